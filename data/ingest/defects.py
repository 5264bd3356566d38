"""Counts the defects of windows that are kept, once they are sorted and repeats are gone."""

from __future__ import annotations

from typing import Any, Final

import numba
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from reclaim.data import schema as s

OVERLAP: Final = "a window begins before an earlier one of its task ends"
LONGER: Final = "a window is longer than the trace's longest"
CPU_BELOW: Final = f"{s.CPU_MAX} is below {s.CPU_MEAN}"
MEMORY_BELOW: Final = f"{s.MEMORY_MAX} is below {s.MEMORY_MEAN}"
_FALLS: Final = {name: f"{name} fall" for name in (s.CPU_PERCENTILES, s.CPU_TAIL_PERCENTILES)}
DEFECTS: Final = (OVERLAP, LONGER, CPU_BELOW, MEMORY_BELOW, *_FALLS.values())
"""Every defect that is counted here, for all formats alike."""


def count_defects(usage: pa.Table, longest_us: int | None) -> dict[str, int]:
    """Return how many windows have each of ``DEFECTS``.

    Parameters
    ----------
    usage : pyarrow.Table
        Rows of ``schema.USAGE`` by task, start and end, each once.
    longest_us : int or None
        The longest window by the trace's own document.
    """
    collection, index, start_us, end_us = (_integers(usage, name) for name in (*s.TASK_KEY, s.START_US, s.END_US))
    counts: dict[str, Any] = {OVERLAP: _overlaps(collection, index, start_us, end_us)}
    if longest_us is not None:
        counts[LONGER] = np.count_nonzero(end_us - start_us > longest_us)
    for defect, highest, mean in ((CPU_BELOW, s.CPU_MAX, s.CPU_MEAN), (MEMORY_BELOW, s.MEMORY_MAX, s.MEMORY_MEAN)):
        counts[defect] = np.count_nonzero(_floats(usage, highest) < _floats(usage, mean))
    for name, defect in _FALLS.items():
        column = usage[name].combine_chunks()
        values = column.flatten().to_numpy(zero_copy_only=False)
        vectors = values.reshape(len(column) - column.null_count, -1) if len(values) else values.reshape(0, 1)
        counts[defect] = np.count_nonzero((vectors[:, 1:] < vectors[:, :-1]).any(axis=1))
    return {name: int(counts.get(name, 0)) for name in DEFECTS}


def _integers(usage: pa.Table, name: str) -> NDArray[np.int64]:
    return np.asarray(usage[name].to_numpy(), np.int64)


def _floats(usage: pa.Table, name: str) -> NDArray[np.float64]:
    return np.asarray(usage[name].to_numpy(), np.float64)  # null becomes NaN, which compares false


@numba.njit(cache=True, nogil=True)
def _overlaps(
    collection: Any,  # (n,) int64, as the next three
    index: Any,
    start_us: Any,
    end_us: Any,
) -> int:
    """Return how many windows begin before an earlier one of their task ends."""
    n, until_us = 0, 0
    for i in range(len(start_us)):
        if i > 0 and collection[i] == collection[i - 1] and index[i] == index[i - 1]:
            n += start_us[i] < until_us
            until_us = max(until_us, end_us[i])
        else:
            until_us = end_us[i]
    return n
