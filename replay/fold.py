"""Folds a dataset through estimators, bucket by bucket, and keeps what is judged."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from reclaim.data.schema import RESOURCES
from reclaim.data.store import Dataset
from reclaim.data.windows import Windows, what_is_judged
from reclaim.features.splits import IN_ALLOC, TRAIN
from reclaim.features.store import FeatureSet
from reclaim.features.targets import HORIZONS_S
from reclaim.replay.openloop import (
    History,
    answer_stored,
    join_histories,
    joined,
    known_seconds,
    previous_rows,
    run_base,
)
from reclaim.training.estimators.base import Estimate, Estimator
from reclaim.training.estimators.forecast import ForecastEstimator

Bases = Mapping[str, Estimate]
"""The bare answers under the ``baseline`` and the ``aggressive`` margin; most estimators have one for both."""

_NEXT_S: Final = 300
"""The shortest horizon, in seconds: the window that comes next."""


def fold_dataset(
    dataset: Dataset,
    features: FeatureSet,
    horizon_s: int,
    makers: Mapping[str, Callable[[], Estimator]],
    seconds: dict[str, float],
    *,
    progress: bool,
) -> tuple[History, dict[str, Bases]]:
    """Fold every bucket through every estimator; return the rows that are judged, and the bare answers to them.

    Each bucket is read once and dropped; what is kept are the rows of the validation and the test period, and the
    window of each task just before them, which tells what was in force when they began. Tasks inside an alloc
    instance are left out: they live off its resources, and the alloc instance is judged.

    Parameters
    ----------
    dataset : Dataset
    features : FeatureSet
        Of the same dataset; tells the periods, the groups and what came after.
    horizon_s : int
        One of ``features.targets.HORIZONS_S``.
    makers : mapping of str to callable
        Makes a fresh estimator; one for each bucket, as a task lives in one.
    seconds : dict of str to float
        Filled with the wall time of each estimator, as ``fold/<name>``.
    progress : bool
        Whether to show progress on a terminal.
    """
    future = _Future(features, horizon_s)
    kept: list[History] = []
    answers: dict[str, list[Bases]] = {name: [] for name in makers}
    total = int(features.bucket_start[-1])
    quiet = None if progress else True
    with (
        tqdm(total=total * len(makers), desc="replay", unit="window", unit_scale=True, disable=quiet) as bar,
        ThreadPoolExecutor(os.cpu_count()) as pool,  # an estimator to a thread: they share nothing
    ):
        for bucket in range(dataset.n_buckets):
            windows = dataset.windows(bucket)
            rows = np.arange(features.bucket_start[bucket], features.bucket_start[bucket + 1], dtype=np.int64)
            period, group, previous = features.period[rows], features.group[rows], previous_rows(windows)
            judged = (period != TRAIN) & (group != IN_ALLOC)
            judged[previous[judged & (previous >= 0)]] = True
            keep = np.flatnonzero(judged)
            target, next_target = future.of(rows)
            history = History(
                windows=windows,
                target=target,
                next_target=next_target,
                period=period,
                group=group,
                known_s=known_seconds(windows),
                previous=previous,
                source_row=rows,
            )
            judged_alone = history.take(keep)
            kept.append(replace(judged_alone, windows=what_is_judged(judged_alone.windows)))
            answer = partial(_answer, windows=windows, keep=keep, features=features, rows=rows)
            for name, (part, took) in zip(makers, pool.map(answer, makers.values()), strict=True):
                answers[name].append(part)
                seconds[f"fold/{name}"] = seconds.get(f"fold/{name}", 0.0) + took
                bar.update(len(windows))
    bases = {name: joined(answers.pop(name)) for name in makers}
    return join_histories(kept), {name: {"baseline": both["aggressive"]} | both for name, both in bases.items()}


def _answer(
    make: Callable[[], Estimator],
    *,
    windows: Windows,
    keep: NDArray[np.int64],
    features: FeatureSet,
    rows: NDArray[np.int64],
) -> tuple[Bases, float]:
    """Return what a fresh estimator answers to the kept windows of a bucket, and the seconds that took."""
    started = time.perf_counter()
    estimator = make()
    bases: Bases
    if isinstance(estimator, ForecastEstimator):  # its fold is the features', and those are stored
        bases = answer_stored(estimator, features.x[rows[keep]], windows.take(keep))
    else:
        bases = {"aggressive": run_base(estimator, windows).take(keep)}  # and baseline
    return bases, time.perf_counter() - started


class _Future:
    """What came after each row: of validation rows nothing beyond their period, of training rows nothing at all."""

    def __init__(self, features: FeatureSet, horizon_s: int) -> None:
        self._horizons = (HORIZONS_S.index(horizon_s), HORIZONS_S.index(_NEXT_S))
        self._periods = (
            (features.valid_rows(), features.valid_targets),
            (features.test_rows(), features.test_targets),
        )

    def of(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return targets at the horizon and at the next window of consecutive rows; shape (n, n_resources) each."""
        out = np.full((len(self._horizons), len(rows), len(RESOURCES)), np.nan)
        if len(rows):
            for known, targets in self._periods:
                here = known[np.searchsorted(known, rows[0]) : np.searchsorted(known, rows[-1], side="right")]
                y = targets(here)[0]
                for i, horizon in enumerate(self._horizons):
                    out[i, here - rows[0]] = y[:, : len(RESOURCES), horizon]
        return out[0], out[1]
