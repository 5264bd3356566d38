"""Decides when to save a snapshot: when the log has grown, or to repair a store after a failed write."""

from __future__ import annotations

import logging
import mmap
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from reclaim.data.core.arrays import blank_records, copy_of
from reclaim.data.errors import StoreError
from reclaim.serving.writing.replay_log import facts_of

if TYPE_CHECKING:
    from reclaim.serving.cell.tracker import Tracker
    from reclaim.serving.settings import ServingSettings
    from reclaim.serving.storage.store import Mark, Store

log = logging.getLogger(__name__)

MEND_S: Final = 5.0
"""A store that refuses writes is tried again this often (s)."""
_SPARE: Final = 1.1
"""Size of the copy buffer over the bytes of the tasks: tasks are added meanwhile, and some arrays are not of tasks."""
_SNAPSHOT_OVER_LOG: Final = 4
"""Size of the last snapshot over that of the log that the next one replaces. A task takes some 50 times the bytes of a
window in the log, so a start reads 13 windows of each task at most: an hour of them, and not four."""
_AT_ONCE: Final = 64 * 2**20
"""Bytes touched between two checks for the end of the service."""
_MIB: Final = 2**20


class Snapshotter:
    """Saves snapshots in its own thread, from copies that the writer thread makes between two writes.

    Writes wait while the copies are made, so their memory is allocated and touched before: for a cell of 250,000 tasks
    it is 1.5 GB, which can take far longer to allocate than to copy.

    Parameters
    ----------
    store : Store
    tracker : Tracker
    settings : ServingSettings
    wake : callable
        Arranges that ``check`` is called soon.
    before : callable
        Called before the log is cut: what is to be read from it again is written.
    """

    def __init__(
        self, store: Store, tracker: Tracker, settings: ServingSettings, wake: Callable[[], object] = lambda: None,
        before: Callable[[], object] = lambda: None,
    ) -> None:  # fmt: skip
        self._store, self._tracker, self._wake, self._before = store, tracker, wake, before
        self.settings = settings
        self._thread = ThreadPoolExecutor(1, "snapshot")
        self.busy: Future[None] | None = None
        """Current or last work of the thread."""
        self._buffer: CopyBuffer | None = None
        self._bytes_per_task: float = tracker.bytes_per_task
        self._again_at = 0.0
        self._closing = False
        self.saved_at: float | None = None
        """Time of the last snapshot, in seconds since 1970."""
        self.save_s = float("nan")
        """Its duration (s)."""

    def close(self) -> None:
        """Finish the current snapshot and start no other."""
        self._closing = True
        self._thread.shutdown()

    def check(self) -> None:
        """Start a snapshot when the log has grown, or when only that repairs the store; called between two writes."""
        store = self._store
        if (self.busy is not None and not self.busy.done()) or time.monotonic() < self._again_at:
            return
        if store.broken is not None:
            self._again_at = time.monotonic() + MEND_S
            if store.mend():
                log.warning("the disk takes writes again")
                return
        elif store.log_bytes <= max(self.settings.snapshot_mib * _MIB, store.snapshot_bytes // _SNAPSHOT_OVER_LOG):
            return
        elif self._buffer is None:
            self._begin(self._allocate, int(_SPARE * len(self._tracker) * self._bytes_per_task))
            return
        buffer, self._buffer = self._buffer, None
        self._before()
        try:
            arrays = self._tracker.memory((buffer or CopyBuffer(0)).copied)
        except (MemoryError, OSError) as error:
            self._put_off(error)
            return
        self._bytes_per_task = sum(array.nbytes for array in arrays.values()) / max(len(self._tracker), 1)
        self._begin(self._save, store.roll(), arrays)

    def _begin(self, what: Callable[..., None], *given: object) -> None:
        self.busy = self._thread.submit(what, *given)
        self.busy.add_done_callback(lambda _: self._wake())

    def _allocate(self, size: int) -> None:
        try:
            buffer = CopyBuffer(size)
            while not self._closing and buffer.touch():
                pass
            self._buffer = buffer
        except (MemoryError, OSError) as error:
            self._put_off(error)

    def _save(self, mark: Mark, arrays: dict[str, NDArray[Any]]) -> None:
        began = time.monotonic()
        try:
            self._store.save(mark, arrays, facts_of(self.settings))
        except (MemoryError, StoreError) as error:
            self._put_off(error)
            return
        self.saved_at, self.save_s = time.time(), time.monotonic() - began
        log.info("snapshot of %.0f MiB in %.1f s", self._store.snapshot_bytes / _MIB, self.save_s)

    def _put_off(self, error: Exception) -> None:
        log.error("no snapshot: %s", error)
        self._again_at = time.monotonic() + MEND_S  # the state is not copied again at every write


class CopyBuffer:
    """Memory for copies, touched before they are made.

    Parameters
    ----------
    size : int
        Bytes; arrays that do not fit are copied elsewhere.
    """

    def __init__(self, size: int) -> None:
        self._bytes = blank_records((size,), np.dtype(np.uint8))
        self._touched = self._used = 0

    def touch(self) -> bool:
        """Touch the next part; return whether more remains."""
        self._bytes[self._touched : self._touched + _AT_ONCE : mmap.PAGESIZE] = 0
        self._touched += _AT_ONCE
        return self._touched < len(self._bytes)

    def copied(self, array: NDArray[Any]) -> NDArray[Any]:
        """Return a copy of a contiguous array, in the next free part of the buffer."""
        begin = -(-self._used // mmap.PAGESIZE) * mmap.PAGESIZE
        part = self._bytes[begin : begin + array.nbytes]
        if len(part) == array.nbytes:
            self._used = begin + array.nbytes
        return copy_of(array, part)
