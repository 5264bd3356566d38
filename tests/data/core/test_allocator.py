"""Memory that is freed is used again, and is not given back to the system in between."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

_PROGRAM = """
import resource, sys
import numpy as np
from reclaim.data.core.allocator import keep_freed_memory

if sys.argv[1] == "kept":
    keep_freed_memory()
    keep_freed_memory()
for megabytes in (1, 7, 20):  # of new sizes, as of another bucket
    np.ones(megabytes << 17)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for megabytes in (20, 7, 1, 20, 7, 1):
    np.ones(megabytes << 17)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def _new_pages(how: str) -> int:
    command = [sys.executable, "-c", _PROGRAM, how]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library: the command goes on as it is")
def test_arrays_use_the_pages_of_those_that_were_freed() -> None:
    kept, by_default = _new_pages("kept"), _new_pages("default")
    assert kept < 0.1 * by_default, (kept, by_default)
