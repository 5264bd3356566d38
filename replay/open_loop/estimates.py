"""Folds a dataset through estimators, bucket by bucket, and sets their margins on the validation rows.

Every experiment begins with ``estimate_all``; margins are then replayed from the answers it returns.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from reclaim.data.dataset import Dataset
from reclaim.data.schema import MACHINES, RESOURCES
from reclaim.data.windows import Windows, what_is_judged
from reclaim.features.feature_set import FeatureSet
from reclaim.features.groups import known_seconds
from reclaim.features.splits import IN_ALLOC, TRAIN, VALID
from reclaim.features.targets import HORIZONS_S
from reclaim.replay.experiment import Source
from reclaim.replay.open_loop.history import History, join_histories, previous_rows
from reclaim.replay.open_loop.period import Period, lay_out_period
from reclaim.replay.settings import ReplayConfig
from reclaim.training.estimators.base import Estimate, Estimator
from reclaim.training.estimators.registry import build_estimator
from reclaim.training.margins.calibrate import Calibration, calibrate, guarded_reservations
from reclaim.training.margins.margin import Budgets
from reclaim.training.models.estimator import ForecastEstimator

if TYPE_CHECKING:
    from reclaim.training.bundle import Bundle

LIMIT: Final = "limit"
"""The estimator that takes no margin: it reserves the limit."""
ROWS_PER_CALL: Final = 65_536
"""Rows given to an estimator at once; bounds the memory of a learned one, 0.5 kB of quantiles a row."""
_NEXT_S: Final = 300
"""The shortest horizon, in seconds: the next window."""

Bases = Mapping[str, Estimate]
"""Answers without margin, for the ``baseline`` and the ``aggressive`` margin; most estimators have one for both."""


@dataclass(frozen=True)
class Estimates:
    """Estimators' answers to every row that is judged.

    Attributes
    ----------
    history : History
        Validation and test rows, and the windows just before them.
    period : Period
        The test period of it.
    bases : mapping of estimator to Bases
        Answers without margin, learned estimators first.
    calibrations : mapping of estimator to Calibration
        The margins of each, set on validation rows; none for ``LIMIT``.
    """

    history: History
    period: Period
    bases: Mapping[str, Bases]
    calibrations: Mapping[str, Calibration]

    def reservations(self, name: str) -> Mapping[str, NDArray[np.float64]]:
        """Return an estimator's reservations under each margin, guards included; shape (n, n_resources) each.

        ``LIMIT`` has one answer, under ``none``.
        """
        if name == LIMIT:
            return {"none": self.history.windows.limit}
        return guarded_reservations(self.bases[name], self.history.windows, self.calibrations[name].margins)


def estimate_all(source: Source, config: ReplayConfig) -> Estimates:
    """Fold the dataset through every estimator of a configuration and every bundle, and set their margins.

    Raises
    ------
    HistoryTooShortError
        The validation or the test period is shorter than the horizon.
    """
    makers = estimator_makers(config, source.bundles, source.features.mean_limit)
    history, bases = fold_dataset(
        source.dataset, source.features, config.horizon_s, makers, source.seconds, progress=source.progress
    )
    table = source.dataset.table("machines")
    period = lay_out_period(history, {name: table[name].to_numpy() for name in MACHINES.names})
    calibrations = {
        name: set_margins(both, period, config.budgets, by_group=config.by_group)
        for name, both in bases.items()
        if name != LIMIT
    }
    return Estimates(history, period, bases, calibrations)


def estimator_makers(
    config: ReplayConfig, bundles: Mapping[str, Bundle], mean_limit: tuple[float, ...]
) -> dict[str, Callable[[], Estimator]]:
    """Return a factory of each estimator without margin; a learned one is as served, with the horizon of ``config``.

    ``mean_limit`` is that of the dataset replayed. A model of several datasets, whose units differ, takes none.
    """
    makers: dict[str, Callable[[], Estimator]] = {
        name: partial(
            b.bare_estimator,
            horizon_s=config.horizon_s,
            mean_limit=b.mean_limit if np.isnan(b.mean_limit).all() else mean_limit,
        )
        for name, b in bundles.items()
    }
    return makers | {name: partial(build_estimator, name) for name in config.estimators}


def set_margins(bases: Bases, period: Period, budgets: Budgets, *, by_group: bool = False) -> Calibration:
    """Set an estimator's margins on the validation rows.

    Parameters
    ----------
    bases : mapping of margin name to Estimate
        Its answers to every row of the history, for the baseline and for the aggressive margin.
    period : Period
    budgets : Budgets
        Shares of task-windows that may violate, for the baseline and the aggressive margin.
    by_group : bool
        Whether each group of tasks (tier, age) keeps the budgets for itself.
    """
    history = period.history
    valid = np.flatnonzero(history.period == VALID)
    of_valid = {margin: base.take(valid) for margin, base in bases.items()}
    return calibrate(of_valid, history.windows.take(valid), history.target[valid], budgets, by_group=by_group)


def fold_dataset(
    dataset: Dataset,
    features: FeatureSet,
    horizon_s: int,
    makers: Mapping[str, Callable[[], Estimator]],
    seconds: dict[str, float],
    *,
    progress: bool,
) -> tuple[History, dict[str, Bases]]:
    """Fold every bucket through every estimator; return the rows that are judged, and the answers to them.

    Each bucket is read once and dropped. Kept are the rows of the validation and the test period, and the window of
    each task just before them, whose answer is current when they begin. Tasks inside an alloc instance are left out:
    they use its resources, and the alloc instance is judged.

    Parameters
    ----------
    dataset : Dataset
    features : FeatureSet
        Of the same dataset; has the periods, the groups and the targets.
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
        ThreadPoolExecutor(os.cpu_count()) as pool,  # an estimator to a thread
    ):
        for bucket in range(dataset.n_buckets):
            windows = dataset.windows(bucket)
            rows = np.arange(features.bucket_start[bucket], features.bucket_start[bucket + 1], dtype=np.int64)
            period, group, previous = features.period[rows], features.group[rows], previous_rows(windows)
            judged = (period != TRAIN) & (group != IN_ALLOC)
            judged[previous[judged & (previous >= 0)]] = True
            keep = np.flatnonzero(judged)
            target, next_target = future.targets(rows)
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
    """Return a fresh estimator's answers to the kept windows of a bucket, and the seconds taken."""
    started = time.perf_counter()
    estimator = make()
    bases: Bases
    if isinstance(estimator, ForecastEstimator):  # its fold is the features', and those are stored
        bases = answer_stored(estimator, features.x[rows[keep]], windows.take(keep))
    else:
        bases = {"aggressive": run_base(estimator, windows).take(keep)}  # and baseline
    return bases, time.perf_counter() - started


class _Future:
    """Targets of rows: of validation rows none beyond their period, of training rows none."""

    def __init__(self, features: FeatureSet, horizon_s: int) -> None:
        self._horizons = (HORIZONS_S.index(horizon_s), HORIZONS_S.index(_NEXT_S))
        self._targets = features.targets
        self._periods = (features.valid_rows(), features.test_rows())

    def targets(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return targets at the horizon and at the next window of consecutive rows; shape (n, n_resources) each."""
        out = np.full((len(self._horizons), len(rows), len(RESOURCES)), np.nan)
        if len(rows):
            for known in self._periods:
                here = known[np.searchsorted(known, rows[0]) : np.searchsorted(known, rows[-1], side="right")]
                y = self._targets(here)[0]
                for i, horizon in enumerate(self._horizons):
                    out[i, here - rows[0]] = y[:, : len(RESOURCES), horizon]
        return out[0], out[1]


def run_base(estimator: Estimator, windows: Windows) -> Estimate:
    """Fold windows through a fresh estimator and return its answer for each, without the forecasts behind it.

    Parameters
    ----------
    estimator : Estimator
        Without state so far; slots are the tasks' positions in ``windows``. A call has at most ``ROWS_PER_CALL`` rows,
        so an estimator that reads related tasks is answered from stored features instead.
    windows : Windows
        Any number of whole tasks, each in time order.

    Returns
    -------
    Estimate
        Before any margin; shape (n, n_resources).
    """
    slot = windows.task_numbers()
    return _in_parts(windows, lambda part: {"": estimator.update(slot[part], windows.take(part))})[""]


def answer_stored(estimator: ForecastEstimator, x: NDArray[np.float32], windows: Windows) -> dict[str, Estimate]:
    """Return the answers of each plan of an estimator to chosen rows, from their stored features.

    Stored features are equal to the bit to those of the estimator's own fold, so the answers are the same.

    Parameters
    ----------
    estimator : ForecastEstimator
    x : float32, shape (n, n_features)
    windows : Windows
        The ``n`` rows.
    """
    return _in_parts(windows, lambda part: estimator.answer_each(x[part], windows.take(part)))


def _in_parts(windows: Windows, answer: Callable[[slice], dict[str, Estimate]]) -> dict[str, Estimate]:
    out: dict[str, Estimate] = {}
    for start in range(0, max(len(windows), 1), ROWS_PER_CALL):
        part = slice(start, start + ROWS_PER_CALL)
        for name, estimate in answer(part).items():
            if name not in out:
                shape = windows.limit.shape
                out[name] = Estimate(np.empty(shape), np.empty(shape, np.uint8))
            out[name].reservation[part], out[name].rule[part] = estimate.reservation, estimate.rule
    return out


def joined(parts: Sequence[Mapping[str, Estimate]]) -> dict[str, Estimate]:
    """Return named answers to the rows of all parts, in the order given, without forecasts; at least one part."""
    out = {}
    for name in parts[0]:
        reservation = np.concatenate([part[name].reservation for part in parts])
        out[name] = Estimate(reservation, np.concatenate([part[name].rule for part in parts]))
    return out
