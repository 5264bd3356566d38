"""Times commands and watches their memory, for benchmarks whose contenders are processes of their own."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

_SAMPLE_S = 0.1


def time_command(command: list[str]) -> tuple[float, float]:
    """Return the seconds a command took, and those its processors worked."""
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    _check(command, process.returncode)
    return time.perf_counter() - started, used.ru_utime + used.ru_stime


def watch_command(command: list[str]) -> tuple[float, int, int]:
    """Return the seconds a command took, and the most memory of its processes together: in bytes, and its private part.

    Memory is the proportional set size; private is the part that is no page of a file.
    """
    import psutil  # here, as contenders import what they need and no more

    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    root = psutil.Process(process.pid)
    peaks = {"Pss:": 0, "Pss_Anon:": 0}
    while process.poll() is None:
        total = dict.fromkeys(peaks, 0)
        try:
            for one in (root, *root.children(recursive=True)):
                for line in Path(f"/proc/{one.pid}/smaps_rollup").read_text().splitlines():
                    kind, *rest = line.split()
                    if kind in total:
                        total[kind] += int(rest[0]) << 10
        except (psutil.Error, OSError):  # one of them ended between two looks
            pass
        peaks = {kind: max(peak, total[kind]) for kind, peak in peaks.items()}
        time.sleep(_SAMPLE_S)
    _check(command, process.returncode)
    return time.perf_counter() - started, peaks["Pss:"], peaks["Pss_Anon:"]


def _check(command: list[str], code: int) -> None:
    if code:
        raise SystemExit(f"{' '.join(command)[:200]}: exit {code}")
