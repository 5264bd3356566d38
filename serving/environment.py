"""Readies a process to become a server: its memory and its threads, which are settled as it begins."""

from __future__ import annotations

import gc
import os
import signal
import sys
from typing import Final

_THREADS: Final = "1"
"""Threads that a library may start of its own for one call: trees have them. A call takes a millisecond, and on a busy
machine to wait for a second thread takes longer; what is large is cut into parts for threads of ours."""
_MALLOC: Final = (
    "glibc.malloc.arena_max=1:glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=1099511627776:"
    "glibc.malloc.top_pad=67108864:glibc.malloc.hugetlb=1"
)
"""What was once taken from the system is kept and used again, in huge pages: a call for a whole cell passes through
some 300 MiB, and to ask for each page of it anew takes time (glibc's manual, "Memory Allocation Tunables"). To compare:
``GLIBC_TUNABLES= python benchmarks/serving.py --model MODEL`` leaves glibc as it is."""
_ARROW_POOL: Final = "system"
"""Arrow takes its memory from there, too."""
_SETTINGS: Final = {
    "OMP_NUM_THREADS": _THREADS,
    "GLIBC_TUNABLES": _MALLOC,
    "ARROW_DEFAULT_MEMORY_POOL": _ARROW_POOL,
}
_PREPARED: Final = "RECLAIM_PREPARED"
"""Says which process has begun anew: some variables do not outlive that where a program has privileges of its own."""


def prepare_process() -> None:
    """Start this very command again, as the same process, where its environment lacks what is read as one begins.

    To be called before anything heavy is imported, which would be imported twice. What is imported then stays, so no
    garbage is looked for until the service is ready. Until then SIGTERM ends it by a handler: the first process of a
    container is ended by no signal that it does not handle.
    """
    missing = {name: value for name, value in _SETTINGS.items() if name not in os.environ}
    if missing and os.environ.get(_PREPARED) != str(os.getpid()):
        os.execve(sys.executable, sys.orig_argv, os.environ | missing | {_PREPARED: str(os.getpid())})
    os.environ.pop(_PREPARED, None)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    gc.disable()
