"""Samples the windows that a model learned from, to recognise another dataset that also holds them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from reclaim.data.windows import Windows, demand
from reclaim.features.splits import mixed

if TYPE_CHECKING:
    from reclaim.features.feature_set import FeatureSet

SAMPLED: Final = 256
"""Windows of a sample: two or three are found in a dataset that holds a hundredth of the windows judged."""
SEEN: Final = "seen"
"""Name of the sample among the facts that a bundle has of a dataset."""
FEWEST: Final = 2
"""Fewest windows of a sample that another dataset must hold, and more than those that it holds with another usage: two
cells that number their tasks alike may share a few by chance."""
_BUCKETS: Final = 4
"""Most buckets that they are read from."""
_DIGITS: Final = 16
"""Hexadecimal digits of a digest, of 64 bits."""

Sample = Sequence[str]
"""Digests of some windows: of collection, instance and end, then of the demand of CPU and memory. A model that is
passed on reveals neither names nor usage."""
Digests = NDArray[np.uint64]


def sample_windows(features: FeatureSet) -> list[str]:
    """Return some windows of the training and the validation period, evenly spaced; of few windows all.

    They have usage that differs from the window before: idle windows are all alike, and so are most where usage is in
    whole percents.
    """
    buckets = np.unique(np.linspace(0, features.n_buckets - 1, _BUCKETS).round().astype(np.int64))
    sample: list[str] = []
    for bucket in buckets.tolist():
        windows = features.dataset.windows(bucket, owned=False)
        used = np.nan_to_num(demand(windows), nan=-1.0)
        changed = np.concatenate([[True], (used[1:] != used[:-1]).any(axis=1)])[: len(used)]
        rows = np.flatnonzero((used > 0).any(axis=1) & changed & (windows.end_us < features.cuts_us[1]))
        some = SAMPLED // len(buckets)
        if len(rows) > some:
            rows = rows[np.linspace(0, len(rows) - 1, some).round().astype(np.int64)]
        digests = zip(_names(windows, rows).tolist(), _usage(windows, rows).tolist(), strict=True)
        sample += [f"{name:0{_DIGITS}x}{of:0{_DIGITS}x}" for name, of in digests]
    return sample


def holds(
    samples: Sequence[Sample], features: FeatureSet, periods: Sequence[tuple[int, int | None]]
) -> list[list[bool]]:
    """Return, for each sample and period, whether windows that end in the period are in the sample; in one pass.

    Measurements are read only from buckets with a window whose name is in a sample; features need not be kept.

    Parameters
    ----------
    samples : sequence of sequence of str
        As ``sample_windows`` gave each of another dataset; for an empty one the answer is no.
    features : FeatureSet
        Of the dataset in question.
    periods : sequence of (int, int or None)
        Begin and end, µs on the trace's clock; windows that end at a period's end lie behind it, None: to the last.
    """
    parsed = [_parsed(sample) for sample in samples]
    every = np.unique(np.concatenate([np.zeros(0, np.uint64), *(names for names, _ in parsed)]))
    counts = np.zeros((len(samples), len(periods), 2), np.int64)  # windows of the same usage, and of another one
    for bucket in range(features.n_buckets if len(every) else 0):
        times = features.dataset.windows(bucket, measured=False)
        within = np.array([_within(times.end_us, *period) for period in periods])
        rows = np.flatnonzero(within.any(axis=0))
        rows = rows[_found(_names(times, rows), every)[0]]
        if len(rows):
            here, used = _names(times, rows), _usage(features.dataset.windows(bucket, owned=False), rows)
            for k, (names, usage) in enumerate(parsed):
                found, at = _found(here, names)
                alike = used == usage[at] if len(names) else found
                of_period = found & within[:, rows]
                counts[k, :, 0] += np.count_nonzero(of_period & alike, axis=1)
                counts[k, :, 1] += np.count_nonzero(of_period & ~alike, axis=1)
    held: list[list[bool]] = ((counts[..., 0] >= FEWEST) & (counts[..., 0] > counts[..., 1])).tolist()
    return held


def _within(end_us: NDArray[np.int64], begin_us: int, until_us: int | None) -> NDArray[np.bool_]:
    after = end_us >= begin_us
    return after if until_us is None else after & (end_us < until_us)


def _parsed(sample: Sample) -> tuple[Digests, Digests]:
    """Return the digests of names and usage of a sample, the first ones rising."""
    by_name = sorted(sample)
    names, usage = (
        np.array([int(one[part], 16) for one in by_name], np.uint64) for part in (slice(_DIGITS), slice(_DIGITS, None))
    )
    return names, usage


def _found(digests: Digests, few: Digests) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Return which digests are among a few sorted ones, and where: without sorting all, as ``numpy.isin`` does."""
    if not len(few):
        return np.zeros(len(digests), np.bool_), np.zeros(len(digests), np.int64)
    at = np.minimum(np.searchsorted(few, digests), len(few) - 1)
    return few[at] == digests, at


def _names(windows: Windows, rows: NDArray[np.int64]) -> Digests:
    """Return digests of collection, instance and end of some windows."""
    return mixed(*(of[rows] for of in (windows.collection_id, windows.instance_index, windows.end_us)))


def _usage(windows: Windows, rows: NDArray[np.int64]) -> Digests:
    """Return digests of the demand of CPU and memory of some windows; of an unknown one as of -1."""
    used = np.nan_to_num(demand(windows.take(rows)), nan=-1.0)
    return mixed(*(of.view(np.uint64) for of in np.ascontiguousarray(used.T)))
