"""Prepares a process to become a server: sets its memory allocator, its threads and how many files it may open."""

from __future__ import annotations

import gc
import os
import resource
import sys
from typing import Final

_THREADS: Final = "1"
"""Threads that a library may start for one call, as those of the trees. A call takes a millisecond, less than the wait
for a second thread on a busy machine; large calls are cut into parts for our own threads."""
_MALLOC: Final = (
    "glibc.malloc.arena_max=1:glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=1099511627776:"
    "glibc.malloc.top_pad=67108864:glibc.malloc.hugetlb=1"
)
"""Memory of the process is kept and used again, in huge pages: a call for a whole cell uses some 300 MiB, and new pages
from the system take time (glibc's manual, "Memory Allocation Tunables"). To compare:
``GLIBC_TUNABLES= python -m benchmarks.serving.load --model MODEL`` leaves glibc as it is."""
_ARROW_POOL: Final = "system"
"""Arrow allocates with glibc, too."""
_SETTINGS: Final = {
    "OMP_NUM_THREADS": _THREADS,
    "GLIBC_TUNABLES": _MALLOC,
    "ARROW_DEFAULT_MEMORY_POOL": _ARROW_POOL,
}
_BACKLOG: Final = 2_048
"""Connections that may wait to be accepted, as in uvicorn and BentoML."""
_MOST_OPEN: Final = 65_536
"""Open files asked for at most: some systems allow a billion."""
_PREPARED: Final = "RECLAIM_PREPARED"
"""Variable with the id of the process that was executed again: some variables are dropped for privileged programs."""


def prepare_process() -> None:
    """Execute this command again in the same process, where its environment lacks variables that are read at its start.

    Call it before heavy imports, which would run twice. Garbage collection is off until the service is ready, as
    imported modules stay.
    """
    missing = {name: value for name, value in _SETTINGS.items() if name not in os.environ}
    if missing and os.environ.get(_PREPARED) != str(os.getpid()):
        os.execve(sys.executable, sys.orig_argv, os.environ | missing | {_PREPARED: str(os.getpid())})
    os.environ.pop(_PREPARED, None)
    gc.disable()


def raise_open_files() -> int:
    """Raise the soft limit of open files to the hard one, within reason; return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_OPEN if hard == resource.RLIM_INFINITY else min(hard, _MOST_OPEN)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        return most
    return _MOST_OPEN if soft == resource.RLIM_INFINITY else soft


def backlog_of(open_files: int) -> int:
    """Return the connections that may wait to be accepted: the event loop may take all at once, each with a file."""
    return min(_BACKLOG, max(open_files // 8, 1))
