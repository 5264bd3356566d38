"""Keeps the store small and well: a snapshot when the log has grown, another try when the disk took nothing."""

from __future__ import annotations

import logging
import mmap
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
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
"""Room is made for so many times what the tasks take: they become more while it is made, and are not all."""
_SAVED: Final = 0.5
"""Share of what a task takes that is saved, until the first copy tells: of its two records one."""
_AT_ONCE: Final = 64 * 2**20
"""Bytes that are touched before it is asked whether the service stops."""
_MIB: Final = 2**20


class Saver:
    """Makes snapshots in a thread of its own, of copies that the thread that writes makes between two turns.

    Nobody is written for while they are made, so the memory for them is taken, and touched, before: of a cell of
    250,000 tasks they are 1.4 GB, which can take far longer to get from the system than to copy.

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
        self._room: Room | None = None
        self._bytes_per_task = _SAVED * tracker.bytes_per_task
        self._again_at = 0.0
        self._closing = False
        self.saved_at: float | None = None
        """When the last snapshot was made, in seconds since 1970."""
        self.save_s = float("nan")
        """What it took."""

    def close(self) -> None:
        """Finish the snapshot that is being made; no other follows."""
        self._closing = True
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
            self._begin(self._make_room, int(_SPARE * len(self._tracker) * self._bytes_per_task))
            return
        room, self._room = self._room, None
        try:
            arrays = self._tracker.memory((room or Room(0)).copied)
        except (MemoryError, OSError) as error:
            self._put_off(error)
            return
        self._bytes_per_task = sum(array.nbytes for array in arrays.values()) / max(len(self._tracker), 1)
        self._begin(self._save, store.roll(), arrays)

    def _begin(self, what: Callable[..., None], *given: object) -> None:
        self.busy = self._thread.submit(what, *given)
        self.busy.add_done_callback(lambda _: self._wake())

    def _make_room(self, size: int) -> None:
        try:
            room = Room(size)
            while not self._closing and room.touch():
                pass
            self._room = room
        except (MemoryError, OSError) as error:
            self._put_off(error)

    def _save(self, mark: Mark, arrays: dict[str, NDArray[Any]]) -> None:
        began = time.monotonic()
        try:
            self._store.save(mark, arrays, facts_of(self.settings))
        except StoreError as error:
            self._put_off(error)
            return
        self.saved_at, self.save_s = time.time(), time.monotonic() - began
        _LOG.info("snapshot of %.0f MiB in %.1f s", self._store.snapshot_bytes / _MIB, self.save_s)

    def _put_off(self, error: Exception) -> None:
        _LOG.error("no snapshot: %s", error)
        self._again_at = time.monotonic() + MEND_S  # a copy of all that is known is not made at every write


class Room:
    """Memory for copies, touched before they are made.

    Parameters
    ----------
    size : int
        Bytes; what does not fit is copied elsewhere.
    """

    def __init__(self, size: int) -> None:
        self._bytes = blank_records((size,), np.dtype(np.uint8))
        self._touched = self._used = 0

    def touch(self) -> bool:
        """Have some more of it from the system; return whether there is more."""
        self._bytes[self._touched : self._touched + _AT_ONCE : mmap.PAGESIZE] = 0
        self._touched += _AT_ONCE
        return self._touched < len(self._bytes)

    def copied(self, array: NDArray[Any]) -> NDArray[Any]:
        """Return a copy of a contiguous array, in the next free part."""
        begin = -(-self._used // mmap.PAGESIZE) * mmap.PAGESIZE
        part = self._bytes[begin : begin + array.nbytes]
        if len(part) == array.nbytes:
            self._used = begin + array.nbytes
        return copy_of(array, part)
