"""Runs compiled functions over ranges of rows in threads, which may share one heap."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from typing import Final, TypeVar

from reclaim.data.core.engine.limits import cores

ROWS_WORTH_A_THREAD: Final = 8_192
"""Rows of a call from which a second thread pays for its start."""


def parts_of(n_rows: int, threads: int) -> int:
    """Return into how many parts ``in_parts`` cuts a call: one for each thread, if there are enough rows."""
    return threads if n_rows >= ROWS_WORTH_A_THREAD else 1


def in_parts(function: Callable[[int, int], object], n_rows: int, threads: int) -> None:
    """Call ``function(part, parts)`` for each part, in threads if there are enough rows."""
    parts = parts_of(n_rows, threads)
    if parts == 1:
        function(0, 1)
        return
    pool = _pool(parts, os.getpid())
    futures = [pool.submit(function, part, parts) for part in range(1, parts)]
    try:
        function(0, parts)
        for part, future in enumerate(futures, 1):
            if future.cancel():  # not begun: all threads are busy, and may be waiting for this part
                function(part, parts)
    finally:
        wait([future for future in futures if not future.cancel()])
    for future in futures:
        if not future.cancelled():
            future.result()


@cache
def _pool(threads: int, _process: int) -> ThreadPoolExecutor:
    """Return the process's pool of threads; a new one for each call would take longer than many parts do.

    A forked process does not inherit threads, so it gets a pool of its own.
    """
    return ThreadPoolExecutor(threads, "reclaim")


_Made = TypeVar("_Made")

THREADS: Final = min(cores(), 8)
"""Threads for large calls; more of them would wait for memory, not for cores."""
_PIECE_ROWS: Final = ROWS_WORTH_A_THREAD - 1
"""Rows of a piece: nearly fits a core's own cache, is not split again by ``in_parts``, and releases the interpreter
between its steps within a millisecond."""


def in_pieces(make: Callable[[slice], _Made], n: int, threads: int) -> list[_Made]:
    """Return the results for all pieces of ``n`` rows, in order; there is at least one piece."""
    pieces = [slice(low, low + _PIECE_ROWS) for low in range(0, max(n, 1), _PIECE_ROWS)]
    made: list[_Made | None] = [None] * len(pieces)

    def run(part: int, parts: int) -> None:
        for k in range(part, len(pieces), parts):
            made[k] = make(pieces[k])

    in_parts(run, n, threads)
    return [m for m in made if m is not None]


_ARENA_MAX, _TRIM_THRESHOLD, _MMAP_THRESHOLD = -8, -1, -3
"""Parameters of ``mallopt`` (glibc, malloc.h): how many heaps there are, from which size on free memory at a heap's end
is given back to the system, and from which size on an array is outside the heap and given back with it."""
_KEPT_FREE: Final = 128 << 20
"""Free memory at the heap's end that is kept; with a GiB an ingest of two workers took a tenth more memory."""
_IN_HEAP: Final = 32 << 20
"""Bytes of an array up to which it is in the heap: the most that every version of glibc takes."""


def keep_one_heap() -> None:
    """Let all threads take memory from one heap that keeps what is freed, where the allocator is glibc's.

    Call it before the threads exist. By default each thread has a heap of its own, which gives memory back to the
    system as arrays are freed, and gets pages that the system clears for the next ones: that is half of the new pages
    of a feature build, two thirds of those of an ingest.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library, or one that cannot be queried
        return
    for parameter, value in ((_ARENA_MAX, 1), (_TRIM_THRESHOLD, _KEPT_FREE), (_MMAP_THRESHOLD, _IN_HEAP)):
        mallopt(parameter, value)
