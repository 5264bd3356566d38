"""Keeps freed memory in the process, for commands that make arrays of the same sizes again and again."""

from __future__ import annotations

import ctypes
from typing import Final

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of ``mallopt`` (glibc, malloc.h)."""
_NEVER: Final = 2**31 - 1
"""Bytes that are free at the end of the heap before it is made smaller: the most that there is room for."""
_LARGEST: Final = 32 * 2**20
"""Bytes from which an array gets pages of its own: the most that glibc takes (``HEAP_MAX_SIZE / 2``)."""


def keep_freed_memory() -> None:
    """Let arrays below 32 MiB use the pages of those that were freed, where the system's allocator is glibc's.

    By default each of a bucket's columns gets new pages, which the system clears, and gives them back. Memory is then
    returned only as the process ends, so it is for a command, and not for an interpreter that runs other code, too.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library, or none that can be asked
        return
    mallopt(_MMAP_THRESHOLD, _LARGEST)
    mallopt(_TRIM_THRESHOLD, _NEVER)
