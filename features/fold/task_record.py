"""Record of a task: everything kept of its history, from which its own features follow."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from reclaim.data.schema import RESOURCES
from reclaim.features.registry import RECENT_WINDOWS, SAME_HOUR_DAYS, SIGNALS

HOURS: Final = 24
"""Clock hours of which the maximum is kept as it is: this one and those that ``max_24h`` reaches back to."""
WEEK_DAYS: Final = 7
WEEK_STEP_BITS: Final = 4
"""log2 of the steps to a doubling in which the maximum of a clock hour is kept for a week."""
WEEK_FIRST: Final = -10
"""log2 of the first of these steps over the first limit seen; the last of 255, all that fit a byte, is 60 times it."""
WEEK_STEPS: Final = 255
BINS: Final = 64
"""Bins of a decayed histogram: eight to each doubling, evenly spaced in between, so each is 6 to 12 % wide."""
BIN_FIRST: Final = -7
"""log2 of the upper edge of the first bin, over the first limit seen; the last bin ends at 1.875 times the limit. Many
virtual machines idle near 1 % of their CPU: an edge at 1.6 % cost the network 10 % of its loss there."""

FIRST_SAME_HOUR: Final = 3
"""Position of the first day of ``same_hour`` in ``rest``, after ``max_6h``, ``max_24h`` and ``max_7d``."""

N_SIGNALS: Final = len(SIGNALS)
USAGE: Final = N_SIGNALS
"""Position of the histogram of CPU over time among the histograms: after the signals'."""
LONG: Final = N_SIGNALS + 1
"""Position of the first of the histograms with the longer half-life, one per resource."""


class FoldColumns(NamedTuple):
    """The columns of ``Windows`` that a fold reads."""

    start_us: NDArray[Any]  # (n,) int64
    end_us: NDArray[Any]  # (n,) int64
    scheduled_us: NDArray[Any]  # (n,) int64
    usage: NDArray[Any]  # (n, len(CHANNELS)) float64
    percentiles: NDArray[Any]  # (n, len(LEVELS)) float32
    limit: NDArray[Any]  # (n, R) float64
    failed_us: NDArray[Any]  # (n,) int64
    tier: NDArray[Any]  # (n,) int8
    scheduling_class: NDArray[Any]  # (n,) int8
    in_alloc: NDArray[Any]  # (n,) bool
    failed_oom: NDArray[Any]  # (n,) bool


RECENT_LENGTH: Final = N_SIGNALS
"""Position of the length in ``STATE["recent"]``, after the signals."""

WINDOW_US: Final = 300_000_000

STATE: Final = np.dtype(
    [
        ("week", "u1", (HOURS, WEEK_DAYS, N_SIGNALS)),  # steps of the maxima of the clock hours of a week; 0 unknown
        ("histogram", "f4", (BINS, LONG + len(RESOURCES))),  # weights by value over reference
        ("octave", "f4", (BINS // 8, LONG + len(RESOURCES))),  # their sums over eight bins each, for speed
        ("hour_max", "f4", (HOURS, N_SIGNALS)),  # ring of maxima by clock hour; NaN unknown
        # largest of the hours before this one that max_6h, max_24h, max_7d and each of same_hour cover
        ("rest", "f4", (N_SIGNALS, FIRST_SAME_HOUR + len(SAME_HOUR_DAYS))),
        ("total", "f8", LONG + len(RESOURCES)),  # their sums
        ("gain", "f8", 2),  # weight of a full window now: half-life of 12 hours, of 48
        ("reference", "f8", len(RESOURCES)),  # the first limit known: what the bins are relative to
        ("weight_short", "f8", N_SIGNALS),
        ("mean_short", "f8", N_SIGNALS),
        ("weight_long", "f8", N_SIGNALS),
        ("mean_long", "f8", N_SIGNALS),
        ("slow_max", "f8", N_SIGNALS),
        ("max_ever", "f8", N_SIGNALS),
        ("cpi_weight", "f8"),
        ("cpi_mean", "f8"),
        # of the last window: percentiles of CPU, not capped, means, and the share of it above the limit
        *((name, "f4") for name in ("p10", "p50", "p90", "p99")),
        ("cpu_mean", "f4"),
        ("memory_mean", "f4"),
        ("page_cache", "f4"),
        ("cpi", "f4"),
        ("mai", "f4"),
        ("over_limit", "f4"),
        ("known", "f4"),  # how much of its distribution was measured
        ("restarts", "i4"),
        ("ooms", "i4"),  # runs that ended out of memory
        ("near", "i4"),  # whether memory was near the limit in the last window
        ("above", "i4"),  # windows of this run with memory above the limit
        ("run_max", "f4"),  # largest memory of this run
        # sums over its windows: number, hours since it began, memory, squares and products
        *((name, "f8") for name in ("run_n", "run_x", "run_y", "run_xx", "run_xy")),
        ("memory_limit", "f8"),  # of the last window
        ("oom_limit", "f8"),  # the same of the last run that ended out of memory
        ("oom_us", "i8"),  # end of its last window
        ("oom_age_us", "i8"),  # how long it had run by then
        ("oom_least_us", "i8"),  # least of all such times
        ("run_us", "i8"),  # start of the current run
        ("gap_us", "i8"),  # between the ends of the last two windows
        ("count", "i8"),
        ("first_us", "i8"),
        ("end_us", "i8"),
        ("recent", "f4", (RECENT_WINDOWS, N_SIGNALS + 1)),  # ring of recent windows: signals, length over 5 minutes
        ("recent_us", "i8", RECENT_WINDOWS),  # their ends
        ("spare", "i8", 15),  # makes it a whole number of cache lines
    ],
    align=True,
)
"""The record. Usage is kept in the trace's unit and divided by the current limit when a feature is read, so a
changed limit changes the features and not the history. Its size is ``STATE.itemsize`` bytes, whole cache lines.

Reading it from memory takes far longer than working on it, so it is prefetched. The week is kept by time of day, so
that the hours which one step reads and writes lie next to each other."""
