"""Keeps the store small and well: a snapshot when the log has grown, another try when the disk took nothing."""

from __future__ import annotations

import logging
import mmap
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from reclaim.data.errors import StoreError
from reclaim.features.arrays import blank_records, copy_of
from reclaim.serving.recall import facts_of

if TYPE_CHECKING:
    from reclaim.serving.settings import ServingSettings
    from reclaim.serving.store import Mark, Store
    from reclaim.serving.tracker import Tracker

_LOG = logging.getLogger(__name__)

MEND_S: Final = 5.0
"""How often a store that takes nothing is tried again, in seconds."""
_SPARE: Final = 1.1
"""Room is made for so many times what there is to copy: it grows while room is made."""
_MIB: Final = 2**20


class Saver:
    """Makes snapshots in a thread of its own, of copies that the thread that writes makes between two turns.

    Nobody is written for while they are made, so the memory for them is taken, and touched, before: of a cell of
    250,000 tasks they are 1.4 GB, which take 0.2 s to copy and up to several seconds to get from the system.

    Parameters
    ----------
    store : Store
    tracker : Tracker
    settings : ServingSettings
    wake : callable
        Has ``look`` called soon.
    """

    def __init__(
        self, store: Store, tracker: Tracker, settings: ServingSettings, wake: Callable[[], object] = lambda: None
    ) -> None:
        self._store, self._tracker, self._wake = store, tracker, wake
        self.settings = settings
        self._thread = ThreadPoolExecutor(1, "snapshot")
        self.busy: Future[None] | None = None
        """What the thread is doing, or did last."""
        self._room: dict[str, NDArray[np.uint8]] | None = None
        self._again_at = 0.0
        self.saved_at: float | None = None
        """When the last snapshot was made, in seconds since 1970."""
        self.save_s = float("nan")
        """What it took."""

    def close(self) -> None:
        """Finish the snapshot that is being made."""
        self._thread.shutdown()

    def look(self) -> None:
        """Make a snapshot when the log has grown, or when nothing else mends the store; between two turns."""
        store = self._store
        if (self.busy is not None and not self.busy.done()) or time.monotonic() < self._again_at:
            return
        if store.broken is not None:
            self._again_at = time.monotonic() + MEND_S
            if store.mend():
                _LOG.warning("the disk takes writes again")
                return
        elif store.log_bytes <= max(self.settings.snapshot_mib * _MIB, store.snapshot_bytes):
            return
        elif self._room is None:
            sizes = {name: array.nbytes for name, array in self._tracker.memory(_lent).items()}
            self.busy = self._thread.submit(self._make_room, sizes)
            return
        room, self._room = self._room or {}, None
        mark, arrays = store.roll(), self._tracker.memory(partial(_copied, room))
        self.busy = self._thread.submit(self._save, mark, arrays)

    def _make_room(self, sizes: Mapping[str, int]) -> None:
        room = {}
        try:
            for name, size in sizes.items():
                room[name] = blank_records((int(_SPARE * size),), np.dtype(np.uint8))
                room[name][:: mmap.PAGESIZE] = 0
        except (MemoryError, OSError) as error:
            _LOG.warning("no room could be made for a snapshot beforehand: %s", error)
        self._room = room
        self._wake()

    def _save(self, mark: Mark, arrays: dict[str, NDArray[Any]]) -> None:
        began = time.monotonic()
        try:
            self._store.save(mark, arrays, facts_of(self.settings))
        except StoreError as error:
            _LOG.error("no snapshot: %s", error)
            self._again_at = time.monotonic() + MEND_S  # a copy of all that is known is not made at every write
            return
        self.saved_at, self.save_s = time.time(), time.monotonic() - began
        _LOG.info("snapshot of %.0f MiB in %.1f s", self._store.snapshot_bytes / _MIB, self.save_s)


def _lent(name: str, array: NDArray[Any]) -> NDArray[Any]:  # noqa: ARG001 - as ``Tracker.memory`` calls it
    return array


def _copied(room: Mapping[str, NDArray[np.uint8]], name: str, array: NDArray[Any]) -> NDArray[Any]:
    return copy_of(array, room.get(name))
