"""Counts the cores and the memory that this process may use: those of the machine, or fewer in a container."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

PROC: Final = Path("/proc")
GROUPS: Final = Path("/sys/fs/cgroup")
_MIB: Final = 1 << 20


def cores(proc: Path = PROC, groups: Path = GROUPS) -> int:
    """Return the number of cores for this process: those it may run on, at most its processor time, rounded up.

    Python's own counts know the cores alone. A container with a CPU limit has all cores of its machine, and stands
    still for the rest of each tenth of a second in which its threads used up its time (CFS bandwidth control).

    Parameters
    ----------
    proc, groups : Path
        Folders of the kernel: of processes, and of control groups.
    """
    n = len(os.sched_getaffinity(0))
    for folder in _folders("cpu", proc, groups):
        for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
            quota = _numbers(*(folder / name for name in names))
            if quota and quota[0] > 0:
                n = min(n, math.ceil(quota[0] / quota[1]))
    return n


def memory_mib(proc: Path = PROC, groups: Path = GROUPS) -> int:
    """Return the memory that this process may use, in MiB: the machine's, at most its control group's limit.

    Parameters
    ----------
    proc, groups : Path
        As of ``cores``.
    """
    most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for folder in _folders("memory", proc, groups):
        for name in ("memory.max", "memory.high", "memory.limit_in_bytes"):
            most = min([most, *_numbers(folder / name)])
    return most // _MIB


def _folders(controller: str, proc: Path, groups: Path) -> Iterator[Path]:
    """Yield the folders of this process's control group and of those around it, of both versions (cgroups(7)).

    A container may see its own group as the outermost one, under another path than the kernel tells.
    """
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:  # another system, or one without control groups
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mounts = (controllers, controller) if controllers else ("", "unified")
        for mount in dict.fromkeys(mounts):
            inside = Path(path.lstrip("/"))
            for folder in (inside, *inside.parents):
                yield groups / mount / folder


def _numbers(*files: Path) -> list[int]:
    """Return the whole numbers of files; none where one is missing or says ``max``."""
    try:
        return [int(word) for file in files for word in file.read_text().split()]
    except (OSError, ValueError):
        return []
