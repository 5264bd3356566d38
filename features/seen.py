"""Samples the windows that a model learned from, by which another dataset that holds them, too, is recognised."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from reclaim.data.windows import Windows, demand

if TYPE_CHECKING:
    from reclaim.features.feature_set import FeatureSet

SAMPLED: Final = 256
"""Windows of a sample: of a hundredth of the windows that are judged one finds two or three."""
_BUCKETS: Final = 4
"""Most buckets that they are read from."""
FEWEST: Final = 2
"""Windows of a sample that make another dataset hold the same: tasks of two cells have one time, number and usage in
common by chance."""

Sample = list[list[int | float | None]]
"""Collection, instance, end (µs), demand of CPU and of memory of some windows, as JSON keeps them; None: unknown."""


def sample_windows(features: FeatureSet) -> Sample:
    """Return some windows of the training and the validation period, evenly spaced; of a small dataset all."""
    buckets = np.unique(np.linspace(0, features.n_buckets - 1, _BUCKETS).round().astype(np.int64))
    sample: Sample = []
    for bucket in buckets.tolist():
        windows = features.dataset.windows(bucket, owned=False)
        rows = np.flatnonzero(windows.end_us < features.cuts_us[1])
        some = SAMPLED // len(buckets)
        if len(rows) > some:
            rows = rows[np.linspace(0, len(rows) - 1, some).round().astype(np.int64)]
        sample += _listed(windows, rows)
    return sample


def holds(sample: Sequence[Sequence[int | float | None]], windows: Windows, rows: NDArray[np.int64]) -> bool:
    """Return whether at least ``FEWEST`` windows of a sample are among some rows."""
    if not sample:
        return False
    collections, _, ends, *_ = zip(*sample, strict=True)
    rows = rows[_among(windows.end_us[rows], ends)]
    rows = rows[_among(windows.collection_id[rows], collections)]
    here = {tuple(one) for one in _listed(windows, rows)}
    return sum(tuple(one) in here for one in sample) >= FEWEST


def _among(values: NDArray[np.int64], few: Sequence[int | float | None]) -> NDArray[np.bool_]:
    """Return which values are among a few: without the sort of all of them that ``numpy.isin`` makes."""
    sought = np.unique(np.array(few, np.int64))
    found: NDArray[np.bool_] = sought[np.minimum(np.searchsorted(sought, values), len(sought) - 1)] == values
    return found


def _listed(windows: Windows, rows: NDArray[np.int64]) -> Sample:
    """Return some rows as ``Sample`` has them."""
    ids = (of[rows].tolist() for of in (windows.collection_id, windows.instance_index, windows.end_us))
    used = demand(windows.take(rows)).tolist()
    return [
        [*key, *(value if math.isfinite(value) else None for value in of)] for *key, of in zip(*ids, used, strict=True)
    ]
