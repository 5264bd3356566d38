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
"""Fewest windows of a sample that another dataset holds, too, and more than it has with another usage: two cells that
number their tasks alike may have a few in common by chance."""
_KEY: Final = 3
"""Of a window of a sample, the numbers that name it; usage follows."""

Window = Sequence[int | float | None]
Sample = list[list[int | float | None]]
"""Collection, instance, end (µs), demand of CPU and of memory of some windows, as JSON keeps them; None: unknown."""


def sample_windows(features: FeatureSet) -> Sample:
    """Return some windows with usage of the training and the validation period, evenly spaced; of few windows all."""
    buckets = np.unique(np.linspace(0, features.n_buckets - 1, _BUCKETS).round().astype(np.int64))
    sample: Sample = []
    for bucket in buckets.tolist():
        windows = features.dataset.windows(bucket, owned=False)
        used = (demand(windows) > 0).any(axis=1)  # an idle window is like any other
        rows = np.flatnonzero(used & (windows.end_us < features.cuts_us[1]))
        some = SAMPLED // len(buckets)
        if len(rows) > some:
            rows = rows[np.linspace(0, len(rows) - 1, some).round().astype(np.int64)]
        sample += _listed(windows, rows)
    return sample


def holds(sample: Sequence[Window], features: FeatureSet, begin_us: int, end_us: int | None = None) -> bool:
    """Return whether windows of a dataset that end in a period are those of a sample, whether features are kept or not.

    Measurements are read of buckets alone in which a task of the sample has a window at one of its times.

    Parameters
    ----------
    sample : sequence of Window
        As ``sample_windows`` gave it of another dataset; of none the answer is no.
    features : FeatureSet
        Of the dataset in question.
    begin_us, end_us : int
        The period, µs on the trace's clock; windows that end at ``end_us`` lie behind it, None: to the end.
    """
    same = other = 0
    for bucket in range(features.n_buckets if sample else 0):
        times = features.dataset.windows(bucket, measured=False)
        within = (times.end_us >= begin_us) & (end_us is None or times.end_us < end_us)
        rows = _candidates(sample, times, np.flatnonzero(within))
        if len(rows):
            found = _found(sample, features.dataset.windows(bucket, owned=False), rows)
            same, other = same + found[0], other + found[1]
    return same >= FEWEST and same > other


def _found(sample: Sequence[Window], windows: Windows, rows: NDArray[np.int64]) -> tuple[int, int]:
    """Return how many windows of a sample are among some rows, and how many have another usage there."""
    here = {tuple(one[:_KEY]): one[_KEY:] for one in _listed(windows, rows)}
    used = [(here.get(tuple(one[:_KEY])), list(one[_KEY:])) for one in sample]
    return sum(of == then for of, then in used), sum(of is not None and of != then for of, then in used)


def _candidates(sample: Sequence[Window], windows: Windows, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return those of some rows with the collection of a window of a sample, and the end of one."""
    collections, _, ends, *_ = zip(*sample, strict=True)
    rows = rows[_among(windows.end_us[rows], ends)]
    return rows[_among(windows.collection_id[rows], collections)]


def _among(values: NDArray[np.int64], few: Window) -> NDArray[np.bool_]:
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
