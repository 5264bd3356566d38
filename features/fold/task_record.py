"""Record of a task: everything kept of its history, from which its own features follow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from reclaim.data.core.jit import code_field
from reclaim.data.schema import RESOURCES
from reclaim.features.registry import CONTEXT, CONTEXT_WINDOWS, SIGNALS

COMPILED_FILES: Final = (
    "data/schema.py", "data/windows.py", "data/core/jit.py", "features/registry.py",
    *(f"features/fold/{name}.py" for name in ("task_record", "task_update", "task_read", "related_record")),
)  # fmt: skip
"""All files that the folds of ``batch`` and ``related`` rest on, compiled into them in addition to those two."""
CODE: Final = code_field(*COMPILED_FILES)
"""A field of the folds' records, other when one of those files is."""


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


class FoldColumns(NamedTuple):
    """The columns of windows that a fold reads: ``signals``, and those of ``Windows`` of the same names."""

    start_us: NDArray[Any]  # (n,) int64
    end_us: NDArray[Any]  # (n,) int64
    scheduled_us: NDArray[Any]  # (n,) int64
    signals: NDArray[Any]  # (n, N_SIGNALS) float64
    usage: NDArray[Any]  # (n, len(CHANNELS)) float64
    percentiles: NDArray[Any]  # (n, len(LEVELS)) float32
    limit: NDArray[Any]  # (n, R) float64
    tier: NDArray[Any]  # (n,) int8
    scheduling_class: NDArray[Any]  # (n,) int8
    in_alloc: NDArray[Any]  # (n,) bool


RECENT_LENGTH: Final = N_SIGNALS
"""Position of the length in ``STATE["recent"]``, after the signals."""
(
    AT_CPU_MEAN, AT_CPU_P10, AT_CPU_P50, AT_CPU_P99, AT_MEMORY_MEAN, AT_PAGE_CACHE, AT_CPI, AT_MAI
) = range(N_CHANNELS - N_SIGNALS - 1)  # fmt: skip
"""Positions in ``STATE["context"]``: the channels between the signals and the length."""

HOUR_US: Final = 3_600_000_000
WINDOW_US: Final = 300_000_000

STATE: Final = np.dtype(
    [
        ("context", "f4", (CONTEXT_WINDOWS, N_CHANNELS - N_SIGNALS - 1)),  # the rest of what the network sees of them
        ("histogram", "f4", (BINS, LONG + len(RESOURCES))),  # weights by value over reference
        ("octave", "f4", (BINS // 8, LONG + len(RESOURCES))),  # their sums over eight bins each, for speed
        ("hour_max", "f4", (HOURS, N_SIGNALS)),  # ring of maxima by clock hour
        ("hour", "i4", HOURS),  # which clock hour each holds, plus one; 0 is none
        ("rest", "f4", (N_SIGNALS, 3)),  # largest of the hours before this one that max_6h, max_24h and yesterday cover
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
        ("recent", "f4", (CONTEXT_WINDOWS, N_SIGNALS + 1)),  # ring of recent windows: signals, length over 5 minutes
        ("recent_us", "i8", CONTEXT_WINDOWS),  # their ends
        ("spare", "i8"),  # makes it a whole number of cache lines
        CODE,
    ],
    align=True,
)
"""The record. Usage is kept in the trace's unit and divided by the current limit when a feature is read, so a
changed limit changes the features and not the history. Its size is ``STATE.itemsize`` bytes, whole cache lines.

It is read from memory far slower than it is worked on. So what a feature reads of the last window alone stands first,
then the bins of small values, which few tasks use: the rest is fetched ahead, its end only to read features off it."""

_FIELDS: Final[Mapping[str, Any]] = STATE.fields or {}
TAKEN_FROM: Final = _FIELDS["histogram"][1] + STATE["histogram"].itemsize // 2
READ_FROM: Final = _FIELDS["recent"][1]
"""Bytes from which on a window that is taken changes the record, and from which on features are read off it besides.
The bins left out are those up to an eighth of the first limit."""
