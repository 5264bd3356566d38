"""Makes usage windows from raw samples: a cumulative CPU counter, and memory in use, as a scraper recorded them.

Rules, the same for a history and for a live feed:

- Windows are slots of the clock, whole multiples of their length. A sample belongs to the slot that its time lies in,
  the beginning included and the end not: a window is known at its end, and nothing in it comes from a later time.
- A *rate* is the rise of the counter between two neighbouring samples of one series, over the time between them. It
  belongs wholly to the slot of its second sample, and weighs the time it spans. Each rate is in exactly one window.
- A counter that falls was set to zero in between: the rise is then the second value, as in Prometheus.
- Samples further apart than ``LONGEST_STEP_US`` say nothing about the time between them.
- There is no rate across two series. A restarted container is another series of the same task. Series of a task that
  run at the same time (one per CPU) are added over the time that they span.
- Percentiles are those of the time: the smallest rate that is not exceeded for that share of it. Level 0 is the
  smallest rate, level 100 the largest.
- Memory is the plain mean and the largest of the samples in the slot.
- A window begins with its slot, or with the first sample where the task began within it; it ends with its slot, or
  with the last sample where two further ones would have come since. A window without length is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numba
import numpy as np
from numpy.typing import NDArray

from reclaim.data.core.jit import CACHED
from reclaim.data.schema import PERCENTILES, TAIL_PERCENTILES

WINDOW_US: Final = 300_000_000
"""Length of a window, as in the Google traces: 5 minutes."""
LONGEST_STEP_US: Final = 300_000_000
"""Longest time between two samples that belong together: Prometheus takes a series for ended after 5 minutes, too."""
FEWEST_FOR_PERCENTILES: Final = 4
"""Rates in a window below which its percentiles are unknown: a scrape every minute, with one missing, has them."""
FEWEST_FOR_TAIL: Final = 8
"""Rates in a window below which percentiles 91 to 99 are unknown: a scrape every 30 s, with two missing, has them."""
_MISSED: Final = 2
"""Steps without a sample after which a series has ended."""


@dataclass(frozen=True)
class Samples:
    """Samples of one metric, series by series.

    Attributes
    ----------
    task : int64, shape (n_series,)
        Number of the task that each series belongs to, from 0; rises, several series may share one.
    offsets : int64, shape (n_series + 1,)
        Place of each series' first sample, and of the end.
    time_us : int64, shape (n,)
        Times; they rise within a series.
    value : float64, shape (n,)
        Values; none is NaN.
    """

    task: NDArray[np.int64]
    offsets: NDArray[np.int64]
    time_us: NDArray[np.int64]
    value: NDArray[np.float64]


NO_SAMPLES: Final = Samples(np.zeros(0, np.int64), np.zeros(1, np.int64), np.zeros(0, np.int64), np.zeros(0))
"""Samples of a metric that is absent."""


@dataclass(frozen=True)
class SampledWindows:
    """Windows made from samples, by task and time; NaN is unknown. ``n`` rows.

    Attributes
    ----------
    task, start_us, end_us : int64, shape (n,)
        Number of the task; the window.
    rates : int64, shape (n,)
        Rates behind the window's CPU usage.
    cpu_mean, cpu_max, memory_mean, memory_max, page_cache : float64, shape (n,)
        In cores and bytes.
    percentiles : float64, shape (n, 11)
        CPU usage at ``schema.PERCENTILES``.
    tail : float64, shape (n, 9)
        CPU usage at ``schema.TAIL_PERCENTILES``.
    """

    task: NDArray[np.int64]
    start_us: NDArray[np.int64]
    end_us: NDArray[np.int64]
    rates: NDArray[np.int64]
    cpu_mean: NDArray[np.float64]
    cpu_max: NDArray[np.float64]
    memory_mean: NDArray[np.float64]
    memory_max: NDArray[np.float64]
    page_cache: NDArray[np.float64]
    percentiles: NDArray[np.float64]
    tail: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.task)


def windows_of(
    cpu: Samples, memory: Samples, page_cache: Samples = NO_SAMPLES, *, n_tasks: int, start_us: int, end_us: int
) -> SampledWindows:
    """Return the windows of all tasks within a range of time, sorted by task, then time.

    Parameters
    ----------
    cpu : Samples
        A counter of CPU seconds. Samples of the ``LONGEST_STEP_US`` before ``start_us`` belong to it, so that the first
        rate within the range is known: then a history cut into ranges gives the windows of the whole.
    memory, page_cache : Samples
        Bytes in use.
    n_tasks : int
        Number of tasks.
    start_us, end_us : int
        The range, in µs; whole multiples of ``WINDOW_US``.
    """
    assert start_us % WINDOW_US == end_us % WINDOW_US == 0
    n_slots = (end_us - start_us) // WINDOW_US
    cover = np.zeros((n_tasks, n_slots, 3), np.int64)  # first covered time, last one, longest step
    found = np.full((n_tasks, n_slots, 2 + len(PERCENTILES) + len(TAIL_PERCENTILES)), np.nan)
    rates = np.zeros((n_tasks, n_slots), np.int64)
    levels = np.array([*PERCENTILES, *TAIL_PERCENTILES], np.int64)
    for k, low, high in _tasks(cpu):
        _of_counter(cpu.offsets[low : high + 1], cpu.time_us, cpu.value, start_us, levels, cover[k], rates[k], found[k])
    gauges = np.full((2, n_tasks, n_slots, 2), np.nan)
    for which, gauge in enumerate((memory, page_cache)):
        for k, low, high in _tasks(gauge):
            _of_gauge(
                gauge.offsets[low : high + 1], gauge.time_us, gauge.value, start_us, which == 0, cover[k],
                gauges[which, k],
            )  # fmt: skip
    begin = start_us + np.arange(n_slots) * WINDOW_US
    first, last, step = np.moveaxis(cover, 2, 0)
    first = np.maximum(first, begin)
    last = np.where(begin + WINDOW_US - last <= _MISSED * step, begin + WINDOW_US, last)
    task, slot = np.nonzero(last > first)
    n, values = rates[task, slot], found[task, slot]
    deciles, tail = np.split(values[:, 2:], [len(PERCENTILES)], axis=1)
    deciles[n < FEWEST_FOR_PERCENTILES] = np.nan
    tail[n < FEWEST_FOR_TAIL] = np.nan
    return SampledWindows(
        task=task.astype(np.int64),
        start_us=first[task, slot],
        end_us=last[task, slot],
        rates=n,
        cpu_mean=values[:, 0],
        cpu_max=values[:, 1],
        memory_mean=gauges[0, task, slot, 0],
        memory_max=gauges[0, task, slot, 1],
        page_cache=gauges[1, task, slot, 0],
        percentiles=deciles,
        tail=tail,
    )


def _tasks(samples: Samples) -> list[tuple[int, int, int]]:
    """Return each task, its first series and the one past its last."""
    edges = np.flatnonzero(np.diff(samples.task, prepend=-1, append=-1)).tolist() if len(samples.task) else []
    return [(int(samples.task[low]), low, high) for low, high in pairwise(edges)]


@numba.njit(**CACHED)
def _of_counter(
    offsets: Any,  # (n_series + 1,) int64
    time: Any,  # (n,) int64
    value: Any,  # (n,) float64
    start: Any,
    levels: Any,  # (n_levels,) int64, percent
    cover: Any,  # (n_slots, 3) int64; written to, as the next two
    rates: Any,  # (n_slots,) int64
    found: Any,  # (n_slots, 2 + n_levels) float64
) -> None:
    """Write the CPU usage of one task from its series."""
    most = offsets[-1] - offsets[0]
    begins, ends, rate, count = np.empty(most, np.int64), np.empty(most, np.int64), np.empty(most), 0
    for series in range(len(offsets) - 1):
        for k in range(offsets[series] + 1, offsets[series + 1]):
            span = time[k] - time[k - 1]
            slot = (time[k] - start) // WINDOW_US
            if span <= 0 or span > LONGEST_STEP_US or slot < 0 or slot >= len(rates):
                continue
            rise = value[k] - value[k - 1] if value[k] >= value[k - 1] else value[k]
            begins[count], ends[count], rate[count] = time[k - 1], time[k], rise * 1e6 / span
            _cover(cover[slot], time[k - 1], time[k])
            count += 1
    order = np.argsort(ends[:count], kind="mergesort")
    at = 0
    while at < count:
        slot = (ends[order[at]] - start) // WINDOW_US
        past = at
        while past < count and (ends[order[past]] - start) // WINDOW_US == slot:
            past += 1
        rows = order[at:past]
        spans, values = _added(begins[rows], ends[rows], rate[rows])
        rates[slot] = len(values)
        by_rate = np.argsort(values, kind="mergesort")
        found[slot, 1] = values[by_rate[-1]]
        found[slot, 0] = min(np.sum(values * spans) / np.sum(spans), found[slot, 1])  # rounding must not raise it above
        total, below, k = np.sum(spans), spans[by_rate[0]], 0
        for level in np.argsort(levels):
            while below * 100 < levels[level] * total:
                k += 1
                below += spans[by_rate[k]]
            found[slot, 2 + level] = values[by_rate[k]]
        at = past


@numba.njit(**CACHED)
def _cover(cover: Any, begin: Any, end: Any) -> None:
    """Add a step to what is known of a slot; (3,) int64: first covered time, last one, longest step."""
    if cover[1] == 0 or begin < cover[0]:
        cover[0] = begin
    cover[1] = max(cover[1], end)
    cover[2] = max(cover[2], end - begin)


@numba.njit(**CACHED)
def _added(begins: Any, ends: Any, rate: Any) -> Any:
    """Return spans and sums of rates, of which several may hold at a time; sorted by time, int64 and float64."""
    order = np.argsort(begins, kind="mergesort")
    apart = True
    for k in range(1, len(order)):
        apart &= begins[order[k]] >= ends[order[k - 1]]
    if apart:
        return (ends - begins)[order], rate[order]
    edges = np.unique(np.concatenate((begins, ends)))
    total, known = np.zeros(len(edges) - 1), np.zeros(len(edges) - 1, np.bool_)
    for k in range(len(rate)):
        first, past = np.searchsorted(edges, begins[k]), np.searchsorted(edges, ends[k])
        total[first:past] += rate[k]
        known[first:past] = True
    return np.diff(edges)[known], total[known]


@numba.njit(**CACHED)
def _of_gauge(
    offsets: Any,  # (n_series + 1,) int64
    time: Any,  # (n,) int64
    value: Any,  # (n,) float64
    start: Any,
    covers: Any,  # whether the samples' steps count as covered time
    cover: Any,  # (n_slots, 3) int64; written to, as the next
    found: Any,  # (n_slots, 2) float64: mean, largest
) -> None:
    """Write mean and maximum of the samples of one task in each slot."""
    count = np.zeros(len(found), np.int64)
    for series in range(len(offsets) - 1):
        for k in range(offsets[series], offsets[series + 1]):
            slot = (time[k] - start) // WINDOW_US
            if slot < 0 or slot >= len(found):
                continue
            count[slot] += 1
            if count[slot] == 1:
                found[slot] = value[k]
            else:
                found[slot, 0] += (value[k] - found[slot, 0]) / count[slot]
                found[slot, 1] = max(found[slot, 1], value[k])
                found[slot, 0] = min(found[slot, 0], found[slot, 1])
            if covers and k > offsets[series] and 0 < time[k] - time[k - 1] <= LONGEST_STEP_US:
                _cover(cover[slot], time[k - 1], time[k])
