"""Applies steady load for minutes or hours and records the memory of the server's processes, with a figure."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.serving.callers import OK, Caller, Calls, keep_calling, one_after_another
from benchmarks.serving.cell import MadeUpCell, bulk, one_task, one_window
from benchmarks.serving.servers import Server, reclaim_server
from reclaim.data.core.style import INK, STYLE, USAGE_COLOUR

Json = dict[str, Any]

SLOT_EVERY_S = 3.0
"""Interval of the cell's reports; a cell's own clock runs a hundred times faster than the machine's."""
RENEWED = 0.005
"""Share of the collections that end, and are followed by others, in each slot."""
PAUSE_S = 0.2
"""Of each client of single calls, after each answer."""
FLAT = 0.02
"""Share of the memory by which it may grow in an hour and still be called flat."""
LEAST_S = 600
"""Shorter runs say nothing about an hour, in seconds."""
WARM_UP = 1 / 3
"""Share of the time that is left out of the slope: arrays find their size, and snapshots begin."""


def soak(model: str, folder: Path, n: int, seconds: float, *, every_s: float) -> Json:
    """Return memory over time, and its slope.

    Parameters
    ----------
    model : str
    folder : Path
        For the state and the log.
    n : int
        Tasks of the cell.
    seconds : float
    every_s : float
        Time between two looks at the memory.
    """
    failures: list[str] = []
    with reclaim_server(model, folder) as server:
        server.wait()
        end = time.monotonic() + seconds
        slots = threading.Thread(target=_report, args=(server, MadeUpCell(n), end, failures))
        samples: list[tuple[float, list[float]]] = []
        watcher = threading.Thread(target=_watch, args=(server, end, every_s, samples))
        began = time.monotonic()
        slots.start()
        watcher.start()
        time.sleep(min(2.0, seconds / 4))
        singles = asyncio.run(_singles(server, end))
        slots.join()
        watcher.join()
        told = server.get("/metrics")[1].decode()
    taken = sum(
        float(line.split()[1]) for line in told.splitlines() if line.startswith('reclaim_windows_total{outcome="taken"')
    )
    minutes = np.array([(at - began) / 60 for at, _ in samples])
    total = np.array([sum(mib) for _, mib in samples])
    return {
        "tasks": n, "minutes": round(seconds / 60, 1), "windows": int(taken), "slots": int(taken) // n,
        "single_calls": len(singles.seconds), "single": singles.summary(), "failed": singles.failed + len(failures),
        "failures": failures[:5],
        **growth(minutes, total, seconds),
        "minute": [round(float(m), 2) for m in minutes], "processes_mib": [mib for _, mib in samples],
    }  # fmt: skip


def growth(minutes: NDArray[np.float64], total: NDArray[np.float64], seconds: float) -> Json:
    """Return how memory grew once it had settled, and a word for it.

    The slope is the median of those between any two looks (Theil and Sen): snapshots are peaks of some seconds, and
    at any time of the run, they are no growth. Least squares, which they distort, are reported too.

    Parameters
    ----------
    minutes, total : float64, shape (n,)
        When it was looked at, and the MiB that there were.
    seconds : float
        For how long the load was to last.
    """
    settled = minutes >= WARM_UP * minutes[-1]
    x, y = minutes[settled], total[settled]
    per_hour = least_squares = 0.0
    if len(x) > 2:
        first, second = np.triu_indices(len(x), 1)
        per_hour = float(np.median((y[second] - y[first]) / (x[second] - x[first]))) * 60
        least_squares = float(np.polyfit(x, y, 1)[0]) * 60
    share = per_hour / float(np.median(y))
    return {
        "mib_at_start": round(float(np.median(y[: max(len(total) // 20, 1)])), 1),
        "mib_at_end": round(float(np.median(total[-max(len(total) // 20, 1) :])), 1),
        "mib_per_hour": round(per_hour, 2), "share_per_hour": round(share, 4),
        "mib_per_hour_by_least_squares": round(least_squares, 2),
        "verdict": _verdict(seconds, share),
        "slope_from_minute": round(float(x[0]), 1),
    }  # fmt: skip


def _verdict(seconds: float, share: float) -> str:
    """Return a word for the trend of the memory, from its relative growth per hour."""
    if seconds < LEAST_S:
        return "too short to say"
    return "flat" if abs(share) <= FLAT else "grows" if share > 0 else "shrinks"


def _report(server: Server, cell: MadeUpCell, end: float, failures: list[str]) -> None:
    """Let the cell report slot after slot, some of it end, and ask for all reservations every few slots."""
    caller = Caller(server.port)
    for slot in itertools.count():
        began = time.monotonic()
        if began >= end:
            break
        answer = "cell" if slot % 4 == 0 else "none"
        calls = [bulk(f"/v1/usage?answer={answer}", cell.usage(slot)), bulk("/v1/tasks", cell.renew(RENEWED, slot))]
        for sent in calls:
            status, body, _ = caller.call(sent)
            if status != OK:
                failures.append(body[:300].decode(errors="replace"))
        time.sleep(max(min(SLOT_EVERY_S, end - began) - (time.monotonic() - began), 0.0))
    caller.close()


def _watch(server: Server, end: float, every_s: float, samples: list[tuple[float, list[float]]]) -> None:
    while time.monotonic() < end:
        samples.append((time.monotonic(), server.rss_mib()))
        time.sleep(every_s)


async def _singles(server: Server, end: float) -> Calls:
    calls = Calls()
    makers = (
        one_after_another([one_task()]), one_after_another(one_window(first_slot=0, tasks=200)),
    )  # fmt: skip

    def going() -> bool:
        return time.monotonic() < end

    for made in await asyncio.gather(*(keep_calling(server.port, make, 2, going, PAUSE_S) for make in makers)):
        calls.add(made)
    calls.span_s /= len(makers)
    return calls


def write_figure(found: Json, path: Path) -> None:
    """Draw the memory of each process over time, one upon the other."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    minute = found["minute"]
    most = max(len(mib) for mib in found["processes_mib"])
    parts = np.array([mib + [0.0] * (most - len(mib)) for mib in found["processes_mib"]]).T
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(7.2, 3.0), layout="constrained")
        low = np.zeros(len(minute))
        for part, shade in zip(parts[::-1], np.linspace(0.35, 1.0, most), strict=True):
            axes.fill_between(minute, low, low + part, color=USAGE_COLOUR, alpha=shade, linewidth=0)
            low = low + part
        axes.plot(minute, low, color=INK, linewidth=1.2)
        axes.axvline(found["slope_from_minute"], color="#888888", linewidth=0.8, linestyle=":")
        axes.set_xlim(0, minute[-1])
        axes.set_ylim(0, float(low.max()) * 1.15)
        axes.set_xlabel("minutes")
        axes.set_ylabel("MiB")
        slope = f"{found['mib_per_hour']:+.1f} MiB an hour, {found['verdict']}"
        axes.set_title(f"Memory of all processes, {found['tasks']:,} tasks: {slope}")
        figure.savefig(path, dpi=150)
        plt.close(figure)
