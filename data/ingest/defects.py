"""Counts the defects of windows that are kept, once sorted and unique, with the likely cause of frequent ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numba
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from reclaim.data import schema as s
from reclaim.data.columns import values_of
from reclaim.data.core.jit import CACHED
from reclaim.data.windows import FAR_ABOVE

OVERLAP: Final = "a window begins before an earlier one of its task ends"
LONGER: Final = "a window is longer than the trace's longest"
CPU_BELOW: Final = f"{s.CPU_MAX} is below {s.CPU_MEAN}"
MEMORY_BELOW: Final = f"{s.MEMORY_MAX} is below {s.MEMORY_MEAN}"
_FALLS: Final = {name: f"{name} fall" for name in (s.CPU_PERCENTILES, s.CPU_TAIL_PERCENTILES)}
CPU_ABOVE: Final = f"{s.CPU_MEAN} is more than twice its limit"
MEMORY_ABOVE: Final = f"{s.MEMORY_MEAN} is more than twice its limit"
FAR_BELOW: Final = 0.02
"""Share of the limit that more than one window in a thousand exceeds, where a limit is the task's own; percent of 0 to
1, and KiB of bytes, never do."""
CPU_FAR_BELOW: Final = f"{s.CPU_MEAN} is below {FAR_BELOW:.0%} of its limit"
MEMORY_FAR_BELOW: Final = f"{s.MEMORY_MEAN} is below {FAR_BELOW:.0%} of its limit"
FAR: Final = "a window begins a hundred of its lengths or more after an earlier one of its task"
SPACED: Final = "a window begins one to a hundred of its lengths after an earlier one of its task"
_OF_MAPPINGS: Final = (CPU_FAR_BELOW, MEMORY_FAR_BELOW, SPACED)
"""Defects of a unit or a length that a mapping states, and a fixed format does not."""
DEFECTS: Final = (
    OVERLAP, LONGER, CPU_BELOW, MEMORY_BELOW, *_FALLS.values(), CPU_ABOVE, MEMORY_ABOVE, *_OF_MAPPINGS, FAR
)  # fmt: skip
"""All defects that are counted here, for every format."""
LEGITIMATE: Final = (CPU_ABOVE, MEMORY_ABOVE, *_OF_MAPPINGS, FAR)
"""Defects that a single window may have without an error: a task may exceed its limit, be idle, or pause."""
_LARGER_UNIT: Final = (
    "usage is in a larger unit than the limit (0 to 1 and percent), or not recorded, or a limit is its machine's"
)
_CAUSES: Final = {
    OVERLAP: (
        0.01,
        "the window is shorter than window_s of the mapping says, times are in a coarser unit than it says, or two "
        "recordings of one task overlap",
    ),
    FAR: (0.5, "times are in a finer unit than the mapping says (milliseconds called seconds), or windows are longer"),
    SPACED: (0.9, "windows are longer than window_s of the mapping says, or most are missing"),
    CPU_BELOW: (0.5, f"{s.CPU_MEAN} and {s.CPU_MAX} are swapped, or in different units"),
    MEMORY_BELOW: (0.5, f"{s.MEMORY_MEAN} and {s.MEMORY_MAX} are swapped, or in different units"),
    CPU_ABOVE: (0.25, "usage and limit are in different units, or the limit is of another resource"),
    MEMORY_ABOVE: (0.25, "usage and limit are in different units, or the limit is of another resource"),
    CPU_FAR_BELOW: (0.999, _LARGER_UNIT),
    MEMORY_FAR_BELOW: (0.999, _LARGER_UNIT),
}
"""Defect → share of the windows from which on a warning is given, and its likely cause.

Usage above twice the limit is in 4 to 10 % of the windows of sound traces."""


_OF_A_FORMAT: Final = {
    OVERLAP: "files of several sources are in one folder, or their times are damaged",
    FAR: "most windows are missing, or their times are damaged",
}
"""Likely causes where the trace's format is fixed, and no mapping says how it is read."""


def warnings_of(defects: Mapping[str, int], windows: int, *, mapped: bool) -> list[str]:
    """Return a line for each defect of so many windows that the data is most likely read wrongly.

    ``mapped``: whether the trace is read by a mapping.
    """
    causes = {name: cause for name, (_, cause) in _CAUSES.items()} | ({} if mapped else _OF_A_FORMAT)
    return [
        f"{defects[name] / windows:.1%} of the windows: {name}; likely {causes[name]}"
        for name, (share, _) in _CAUSES.items()
        if defects[name] > share * windows and (mapped or name not in _OF_MAPPINGS)
    ]


def count_defects(usage: pa.Table, longest_us: int | None) -> dict[str, int]:
    """Return how many windows have each of ``DEFECTS``.

    Parameters
    ----------
    usage : pyarrow.Table
        Rows of ``schema.USAGE`` by task, start and end, each once.
    longest_us : int or None
        The longest window by the trace's own document.
    """
    collection, index, start_us, end_us = (values_of(usage[name]) for name in (*s.TASK_KEY, s.START_US, s.END_US))
    counts: dict[str, Any] = dict(zip((OVERLAP, SPACED, FAR), _steps(collection, index, start_us, end_us), strict=True))
    for above, below, mean, limit in (
        (CPU_ABOVE, CPU_FAR_BELOW, s.CPU_MEAN, s.CPU_LIMIT),
        (MEMORY_ABOVE, MEMORY_FAR_BELOW, s.MEMORY_MEAN, s.MEMORY_LIMIT),
    ):
        used, granted = _floats(usage, mean), _floats(usage, limit)
        counts[above] = np.count_nonzero(used > FAR_ABOVE * granted)
        counts[below] = np.count_nonzero(used < FAR_BELOW * granted)
    if longest_us is not None:
        counts[LONGER] = np.count_nonzero(end_us - start_us > longest_us)
    for defect, highest, mean in ((CPU_BELOW, s.CPU_MAX, s.CPU_MEAN), (MEMORY_BELOW, s.MEMORY_MAX, s.MEMORY_MEAN)):
        counts[defect] = np.count_nonzero(_floats(usage, highest) < _floats(usage, mean))
    for name, defect in _FALLS.items():
        column = usage[name].combine_chunks()
        values = values_of(column.flatten(), np.nan)
        counts[defect] = _falls(values.reshape(max(len(column) - column.null_count, 1), -1))
    return {name: int(counts.get(name, 0)) for name in DEFECTS}


def _floats(usage: pa.Table, name: str) -> NDArray[np.float64]:
    return np.asarray(values_of(usage[name], np.nan), np.float64)  # NaN compares false


@numba.njit(**CACHED)
def _falls(vectors: Any) -> int:
    """Return how many vectors, (n, size) float32, have a value below the one before."""
    falls = 0
    for vector in vectors:
        fall = False
        for k in range(1, len(vector)):
            fall |= vector[k] < vector[k - 1]
        falls += fall
    return falls


@numba.njit(**CACHED)
def _steps(
    collection: Any,  # (n,) int64, as the next three
    index: Any,
    start_us: Any,
    end_us: Any,
) -> tuple[int, int, int]:
    """Return how many windows begin before an earlier one of their task ends, a length or more after, and far after."""
    overlaps, spaced, far, until_us = 0, 0, 0, 0
    for i in range(len(start_us)):
        if i > 0 and collection[i] == collection[i - 1] and index[i] == index[i - 1]:
            overlaps += start_us[i] < until_us
            pause, length = start_us[i] - until_us, end_us[i] - start_us[i]
            spaced += length <= pause < 100 * length
            far += pause >= 100 * length
            until_us = max(until_us, end_us[i])
        else:
            until_us = end_us[i]
    return overlaps, spaced, far
