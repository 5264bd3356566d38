"""Folds a dataset through estimators: each bucket is a job of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from reclaim.data.core.arrays import blank_records
from reclaim.data.core.engine.workers import HERE, Engine
from reclaim.data.schema import RESOURCES
from reclaim.data.windows import Windows, what_is_judged
from reclaim.features.bucket import Labels
from reclaim.features.feature_set import FeatureSet
from reclaim.features.groups import known_seconds
from reclaim.features.splits import IN_ALLOC, TEST, TRAIN, VALID, in_period
from reclaim.features.targets import HORIZONS_S
from reclaim.replay.open_loop.history import History, join_histories, previous_rows
from reclaim.replay.open_loop.share import WHOLE, Share
from reclaim.training.estimators.base import Estimate, Estimator
from reclaim.training.margins.answers import Answers, Priced, Widened
from reclaim.training.margins.ladder import N_RUNGS
from reclaim.training.margins.tune import TunedEstimator
from reclaim.training.models.estimator import ForecastEstimator

Maker = Callable[[], Estimator]

ROWS_PER_CALL: Final = 65_536
"""Rows passed to an estimator at once; bounds the memory of a learned one, 2 kB of curves a row."""
_NEXT_S: Final = 300
"""The shortest horizon, in seconds: the next window."""


@dataclass(frozen=True)
class Bucketful:
    """One bucket to fold through fresh estimators, as a task lives in one bucket."""

    features: FeatureSet
    bucket: int
    makers: Sequence[Maker]
    horizon_s: int = _NEXT_S
    share: Share = WHOLE


class Judged(NamedTuple):
    """Rows of a bucket that are judged; each maker's answers to them, and the seconds that these took."""

    history: History
    answers: list[Answers]
    seconds: list[float]
    folded: float
    """Seconds that the features took."""


def fold_dataset(
    features: FeatureSet,
    horizon_s: int,
    makers: Mapping[str, Maker],
    seconds: dict[str, float],
    engine: Engine = HERE,
    *,
    share: Share = WHOLE,
) -> tuple[History, dict[str, Answers]]:
    """Fold every bucket through every estimator; return the rows that are judged, and the answers to them.

    Each bucket is read once and dropped. Kept are the rows of the validation and the test period, and the window of
    each task just before them, whose answer is current when they begin. Tasks inside an alloc instance are left out:
    they use its resources, and the alloc instance is judged.

    Parameters
    ----------
    features : FeatureSet
        Of the dataset; has the periods, the groups and the targets.
    horizon_s : int
        One of ``features.targets.HORIZONS_S``.
    makers : mapping of str to callable
        Makes a fresh estimator.
    seconds : dict of str to float
        Filled with the time of each estimator, as ``fold/<name>``, and of the features of learned ones.
    engine : Engine
        The result does not depend on it.
    share : Share
        Rows that are judged.
    """
    kept: list[History] = []
    answers: dict[str, list[Answers]] = {name: [] for name in makers}
    jobs = [
        Bucketful(features, bucket, list(makers.values()), horizon_s, share) for bucket in range(features.n_buckets)
    ]
    sizes = np.diff(features.bucket_start).tolist()
    with (
        engine.pool() as pool,
        closing(pool.each(fold_bucket, jobs)) as buckets,
        tqdm(total=sum(sizes), desc="replay", unit="window", unit_scale=True, disable=None) as bar,
    ):
        for size, judged in zip(sizes, buckets, strict=True):
            kept.append(judged.history)
            learned = {"features": judged.folded} if judged.folded else {}
            for name, of in (dict(zip(makers, judged.seconds, strict=True)) | learned).items():
                seconds[f"fold/{name}"] = seconds.get(f"fold/{name}", 0.0) + of
            for name, part in zip(makers, judged.answers, strict=True):
                answers[name].append(part)
            bar.update(size)
    joined = {}
    for name in makers:
        parts = answers.pop(name)
        joined[name] = type(parts[0]).joined(parts)
    return join_histories(kept), joined


def fold_bucket(job: Bucketful) -> Judged:
    """Fold one bucket through fresh estimators."""
    here = job.features.bucket(job.bucket)
    windows, labels = here.windows, here.labels
    previous = previous_rows(windows)
    mine = job.share.rows(windows)
    judged = (labels.period != TRAIN) & (labels.group != IN_ALLOC) & mine
    before = previous[judged & (previous >= 0)]
    judged[before[mine[before]]] = True  # a window on a machine that is not judged belonged to another run
    keep = np.flatnonzero(judged)
    target, next_target = _targets(labels, job.horizon_s)
    history = History(
        windows=windows,
        target=target,
        next_target=next_target,
        period=labels.period,
        group=labels.group,
        known_s=known_seconds(windows),
        previous=previous,
        source_row=here.first + np.arange(len(windows)),
    ).take(keep)
    estimators = [make() for make in job.makers]
    known, asked = windows.tasks_of(keep)
    started, x = time.perf_counter(), None
    if any(isinstance(estimator, ForecastEstimator) for estimator in estimators):
        x = here.features(keep)
    folded = time.perf_counter() - started if x is not None else 0.0
    answers, seconds = [], []
    for estimator in estimators:
        started = time.perf_counter()
        answers.append(_answer(estimator, known, asked, x))
        seconds.append(time.perf_counter() - started)
    return Judged(replace(history, windows=what_is_judged(history.windows)), answers, seconds, folded)


def fold_before_test(
    job: Bucketful,
) -> tuple[Windows, NDArray[np.float32], list[tuple[NDArray[np.float64], float]]]:
    """Return a bucket's validation windows, their targets, and each estimator's reservations with the seconds taken.

    Windows of the test period are dropped as they are read. Targets have shape (n, n_resources, n_horizons).
    """
    here = job.features.bucket(job.bucket)
    seen = np.flatnonzero(here.labels.period != TEST)
    windows, labels = here.windows.take(seen), here.labels.take(seen)
    valid = np.flatnonzero(in_period(VALID, labels.period, labels.group))
    known, asked = windows.tasks_of(valid)
    said = []
    for make in job.makers:
        started = time.perf_counter()
        reservation = run_base(make(), known).take(asked).reservation
        said.append((reservation, time.perf_counter() - started))
    return windows.take(valid), labels.take(valid).targets()[0][:, : len(RESOURCES)], said


def _answer(estimator: Estimator, windows: Windows, keep: NDArray[np.int64], x: NDArray[np.float32] | None) -> Answers:
    """Return a fresh estimator's answers to the kept windows of a bucket.

    ``x`` has their features, equal to those that a forecasting estimator would fold itself.
    """
    if isinstance(estimator, ForecastEstimator):
        assert x is not None
        return answer_folded(estimator, x, windows.take(keep))
    if isinstance(estimator, TunedEstimator):
        slot = windows.task_numbers()
        each = [estimator.answer_each(slot[part], windows.take(part)) for part in _parts(len(windows))]
        return Widened.joined(each).take(keep)
    return Widened.alike(run_base(estimator, windows).take(keep))


def _targets(labels: Labels, horizon_s: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return targets at the horizon and at the next window; shape (n, n_resources) each.

    Of validation rows none beyond their period, of training rows none.
    """
    y = labels.targets()[0][:, : len(RESOURCES)].astype(np.float64)
    y[~(in_period(VALID, labels.period, labels.group) | in_period(TEST, labels.period, labels.group))] = np.nan
    return y[:, :, HORIZONS_S.index(horizon_s)], y[:, :, HORIZONS_S.index(_NEXT_S)]


def run_base(estimator: Estimator, windows: Windows) -> Estimate:
    """Fold windows through a fresh estimator and return its answer for each, without the forecasts behind it.

    Parameters
    ----------
    estimator : Estimator
        Without state so far; slots are the tasks' positions in ``windows``. A call has at most ``ROWS_PER_CALL`` rows,
        so an estimator that reads what a collection met is answered from kept features instead.
    windows : Windows
        Any number of whole tasks, each in time order.

    Returns
    -------
    Estimate
        Before any margin; shape (n, n_resources).
    """
    slot, out = windows.task_numbers(), []
    for part in _parts(len(windows)):
        said = estimator.update(slot[part], windows.take(part))
        out.append(Widened.alike(Estimate(said.reservation, said.rule)))
    return Widened.joined(out).of["aggressive"]


def answer_folded(estimator: ForecastEstimator, x: NDArray[np.float32], windows: Windows) -> Priced:
    """Return the ladders of chosen rows, from their features.

    These are equal to the bit to those of the estimator's own fold, so the answers are the same.

    Parameters
    ----------
    estimator : ForecastEstimator
    x : float32, shape (n, n_features)
    windows : Windows
        The ``n`` rows.
    """
    shape = (len(windows), len(RESOURCES), N_RUNGS)
    out = blank_records(shape, np.dtype(np.float32))
    risk = blank_records(shape, np.dtype(np.uint16)) if estimator.own_price else None
    for part in _parts(len(windows)):
        some = windows.take(part)
        out[part], forecast = estimator.ladder(x[part], some, all_horizons=False)
        if risk is not None:
            risk[part] = estimator.risk(out[part], forecast, some)
    return Priced(out, None, risk)


def _parts(n: int) -> list[slice]:
    """Return the rows of each call; at least one."""
    return [slice(start, start + ROWS_PER_CALL) for start in range(0, max(n, 1), ROWS_PER_CALL)]
