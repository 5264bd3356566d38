"""The record of a task: all that is kept of its history, from which its own features follow."""

from __future__ import annotations

from typing import Final

import numpy as np

from reclaim.data.schema import RESOURCES
from reclaim.features.compiled import CODE
from reclaim.features.registry import CONTEXT, CONTEXT_WINDOWS, SIGNALS

HOURS: Final = 26
"""Clock hours of which the maximum is kept: a day, and the hours around the same time yesterday."""
BINS: Final = 64
"""Bins of a decayed histogram: eight to each doubling, evenly spaced in between, so each is 6 to 12 % wide."""
BIN_FIRST: Final = -7
"""log2 of the upper edge of the first bin, over the first limit seen; the last bin ends at 1.875 times the limit. Many
virtual machines idle near 1 % of their CPU: an edge at 1.6 % cost the network 10 % of its loss there."""

N_SIGNALS: Final = len(SIGNALS)
N_CHANNELS: Final = len(CONTEXT)
USAGE: Final = N_SIGNALS
"""Position of the histogram of CPU over time among the histograms: after the signals'."""
LONG: Final = N_SIGNALS + 1
"""Position of the first of the histograms with the longer half-life, one per resource."""

(
    AT_CPU_MEAN, AT_CPU_P10, AT_CPU_P50, AT_CPU_P99, AT_MEMORY_MEAN, AT_PAGE_CACHE, AT_CPI, AT_MAI, AT_LENGTH
) = range(N_SIGNALS, N_CHANNELS)  # fmt: skip
"""Positions in the context after the signals."""

HOUR_US: Final = 3_600_000_000
WINDOW_US: Final = 300_000_000

STATE: Final = np.dtype(
    [
        ("context", "f4", (CONTEXT_WINDOWS, N_CHANNELS)),  # ring of recent windows, in the unit of the limit
        ("recent_us", "i8", CONTEXT_WINDOWS),  # their ends
        ("hour_max", "f4", (HOURS, N_SIGNALS)),  # ring of maxima by clock hour
        ("hour", "i4", HOURS),  # which clock hour each holds, plus one; 0 is none
        ("rest", "f4", (N_SIGNALS, 3)),  # largest of the hours before this one that max_6h, max_24h and yesterday cover
        ("histogram", "f4", (LONG + len(RESOURCES), BINS)),  # weights by value over reference
        ("octave", "f4", (LONG + len(RESOURCES), BINS // 8)),  # their sums over eight bins each, for speed
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
        ("p90", "f4"),  # of CPU in the last window, not capped
        ("over_limit", "f4"),  # share of the last window above the limit
        ("known", "f4"),  # how much of its distribution was measured
        ("restarts", "i4"),
        ("run_us", "i8"),  # start of the current run
        ("gap_us", "i8"),  # between the ends of the last two windows
        ("count", "i8"),
        ("first_us", "i8"),
        ("end_us", "i8"),
        CODE,
    ],
    align=True,
)
"""The record. Usage is kept in the trace's unit and divided by the limit in force when a feature is asked for, so a
changed limit changes the features and not the history. Its size is ``STATE.itemsize`` bytes."""
