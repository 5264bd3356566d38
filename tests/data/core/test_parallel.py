"""Memory that one thread freed is used by another one."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

_PROGRAM = """
import resource, sys
from threading import Thread
import numpy as np
from reclaim.data.core.parallel import keep_one_heap

if sys.argv[1] == "shared":
    keep_one_heap()
    keep_one_heap()

def arrays():
    for megabytes in (7, 3, 2, 1):  # larger ones first: then the system's pages are no longer asked for one by one
        np.ones(megabytes << 17)

arrays()
arrays()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
thread = Thread(target=arrays)
thread.start()
thread.join()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def _new_pages(how: str) -> int:
    command = [sys.executable, "-c", _PROGRAM, how]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library: the command goes on as it is")
def test_a_thread_uses_the_pages_that_another_one_freed() -> None:
    shared, by_default = _new_pages("shared"), _new_pages("default")
    assert shared < 0.2 * by_default, (shared, by_default)
