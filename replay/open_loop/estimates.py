"""Folds a dataset through estimators, bucket by bucket; sets their settings and margins on the validation rows.

Every experiment begins with ``estimate_all``; margins are then replayed from the answers it returns.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from reclaim.data.core.arrays import blank_records
from reclaim.data.core.parallel import THREADS
from reclaim.data.dataset import Dataset
from reclaim.data.schema import MACHINES, RESOURCES
from reclaim.data.windows import Windows, concatenate, empty_windows, what_is_judged
from reclaim.features.bucket import Labels
from reclaim.features.feature_set import FeatureSet
from reclaim.features.groups import known_seconds
from reclaim.features.splits import IN_ALLOC, TEST, TRAIN, VALID, in_period
from reclaim.features.targets import HORIZONS_S
from reclaim.replay.experiment import Source
from reclaim.replay.open_loop.history import History, join_histories, previous_rows
from reclaim.replay.open_loop.period import Period, lay_out_period
from reclaim.replay.settings import ReplayConfig
from reclaim.training.estimators.base import Estimate, Estimator
from reclaim.training.estimators.registry import build_estimator, candidates
from reclaim.training.margins.answers import Answers, Priced, Widened, scores_of
from reclaim.training.margins.calibrate import Calibration, calibrate, guarded_reservations
from reclaim.training.margins.ladder import N_RUNGS
from reclaim.training.margins.margin import Budgets
from reclaim.training.margins.tune import TunedEstimator, Tuning, choose_settings, tuning_facts
from reclaim.training.models.estimator import ForecastEstimator

if TYPE_CHECKING:
    from reclaim.training.bundle import Bundle

LIMIT: Final = "limit"
"""The estimator that takes no margin: it reserves the limit."""
ROWS_PER_CALL: Final = 65_536
"""Rows given to an estimator at once; bounds the memory of a learned one, 2 kB of curves a row."""
TUNED_ROWS: Final = 150_000
"""Validation rows that settings are chosen by, about: 150 of them may violate at a budget of 0.1 %. Of a larger dataset
the first buckets are taken; tasks fall into buckets by their collection's hash."""
_NEXT_S: Final = 300
"""The shortest horizon, in seconds: the next window."""


@dataclass(frozen=True)
class Estimates:
    """Estimators' answers to every row that is judged.

    Attributes
    ----------
    history : History
        Validation and test rows, and the windows just before them.
    period : Period
        The test period of it.
    answers : mapping of estimator to Answers
        Before any margin or price, learned estimators first; those of ``LIMIT``, too.
    calibrations : mapping of estimator to Calibration
        The margins or prices of each, set on validation rows; none for ``LIMIT``.
    tunings : mapping of estimator to Tuning
        The settings of each statistical one that has any to choose, chosen on validation rows.
    began_us : int
        Begin of the cell's record.
    """

    history: History
    period: Period
    answers: Mapping[str, Answers]
    calibrations: Mapping[str, Calibration]
    tunings: Mapping[str, Tuning] = field(default_factory=dict)
    began_us: int = 0

    def reservations(self, name: str) -> Mapping[str, NDArray[np.float64]]:
        """Return an estimator's reservations under each margin, guards included; shape (n, n_resources) each.

        ``LIMIT`` has one answer, under ``none``.
        """
        if name == LIMIT:
            return {"none": self.history.windows.limit}
        return guarded_reservations(self.answers[name], self.history.windows, self.calibrations[name].settings)


def estimate_all(source: Source, config: ReplayConfig) -> Estimates:
    """Fold the dataset through every estimator of a configuration and every bundle, and set their margins.

    Raises
    ------
    HistoryTooShortError
        The validation or the test period is shorter than the horizon.
    """
    tunings: Mapping[str, Tuning] = {}
    if config.tune:
        fold = CandidateFold.run(
            source.dataset, source.features, config.estimators, source.seconds, progress=source.progress
        )
        with source.timed("tune"):
            names = fold.answers if len(fold.windows) else ()  # without rows the margins say what is wrong
            tunings = {name: fold.choose(name, config.horizon_s, config.budgets) for name in names}
        source.settings.update({name: tuning_facts(tuning) for name, tuning in tunings.items()})
    makers = estimator_makers(config, source.bundles, source.features.mean_limit, tunings)
    history, answers = fold_dataset(
        source.dataset, source.features, config.horizon_s, makers, source.seconds, progress=source.progress
    )
    table = source.dataset.table("machines")
    period = lay_out_period(history, {name: table[name].to_numpy() for name in MACHINES.names})
    given = scores_of(config.value.prices(source.features.mean_limit, config.horizon_s))
    calibrations = {
        name: set_margins(
            of, period, config.budgets, by_tier=config.by_tier, given=given if isinstance(of, Priced) else None
        )
        for name, of in answers.items()
        if name != LIMIT
    }
    return Estimates(history, period, answers, calibrations, tunings, int(source.features.manifest["span_us"][0]))


def estimator_makers(
    config: ReplayConfig,
    bundles: Mapping[str, Bundle],
    mean_limit: tuple[float, ...],
    tunings: Mapping[str, Tuning] = MappingProxyType({}),
) -> dict[str, Callable[[], Estimator]]:
    """Return a factory of each estimator without margin; a learned one is as served, with the horizon of ``config``.

    ``mean_limit`` is that of the dataset replayed. A model of several datasets, whose units differ, takes none, but for
    a portable one.
    Statistical estimators have the settings of ``tunings``, the published ones where it has none.
    """
    makers: dict[str, Callable[[], Estimator]] = {
        name: partial(
            b.bare_estimator,
            horizon_s=config.horizon_s,
            mean_limit=mean_limit if b.portable else b.mean_limit if np.isnan(b.mean_limit).all() else mean_limit,
        )
        for name, b in bundles.items()
    }
    return makers | {
        name: partial(TunedEstimator, name, tunings[name]) if name in tunings else partial(build_estimator, name)
        for name in config.estimators
    }


@dataclass(frozen=True)
class CandidateFold:
    """Answers of every candidate of statistical estimators to validation rows.

    Attributes
    ----------
    windows : Windows
        The rows, of those that margins are set on.
    y : float32, shape (n, n_resources, n_horizons)
        Their targets.
    answers : mapping of estimator to list of float64, shape (n, n_resources)
        Of each candidate; only estimators with more than one.
    """

    windows: Windows
    y: NDArray[np.float32]
    answers: Mapping[str, list[NDArray[np.float64]]]

    @classmethod
    def run(
        cls,
        dataset: Dataset,
        features: FeatureSet,
        names: Sequence[str],
        seconds: dict[str, float],
        *,
        progress: bool,
    ) -> CandidateFold:
        """Fold the windows before the test period through every candidate of the named estimators.

        Windows of the test period are dropped as they are read. Of a large dataset, buckets are folded until there are
        ``TUNED_ROWS`` rows.
        """
        tried = {name: candidates(name) for name in names if len(candidates(name)) > 1}
        makers = [(name, partial(build_estimator, name, one)) for name, of in tried.items() for one in of]
        kept, known = [empty_windows()], [np.zeros((0, len(RESOURCES), len(HORIZONS_S)), np.float32)]
        parts: list[list[NDArray[np.float64]]] = [[] for _ in makers]
        with (
            tqdm(total=dataset.n_buckets, desc="tune", unit="bucket", disable=None if progress else True) as bar,
            ThreadPoolExecutor(os.cpu_count()) as pool,
        ):
            for bucket in range(dataset.n_buckets if makers else 0):
                here = features.bucket(bucket)
                seen = np.flatnonzero(here.labels.period != TEST)
                windows, labels = here.windows.take(seen), here.labels.take(seen)
                valid = np.flatnonzero(in_period(VALID, labels.period, labels.group))
                kept.append(windows.take(valid))
                known.append(labels.take(valid).targets()[0][:, : len(RESOURCES)])
                answer = partial(_answer_timed, windows=windows, keep=valid)
                for k, (said, took) in enumerate(pool.map(answer, (make for _, make in makers))):
                    parts[k].append(said.reservation)
                    part = f"tune/{makers[k][0]}"
                    seconds[part] = seconds.get(part, 0.0) + took
                bar.update()
                if sum(map(len, known)) >= TUNED_ROWS:
                    break
        answers: dict[str, list[NDArray[np.float64]]] = {name: [] for name in tried}
        for name, _ in makers:
            answers[name].append(np.concatenate(parts.pop(0)))
        return cls(concatenate(kept), np.concatenate(known), answers)

    def choose(self, name: str, horizon_s: int, budgets: Budgets | None = None) -> Tuning:
        """Return the settings of an estimator that reclaim most within the budgets at a horizon."""
        target = self.y[:, :, HORIZONS_S.index(horizon_s)].astype(np.float64)
        return choose_settings(self.answers[name], candidates(name), self.windows, target, budgets)


def set_margins(
    answers: Answers,
    period: Period,
    budgets: Budgets,
    *,
    by_tier: bool = False,
    given: tuple[float, ...] | None = None,
) -> Calibration:
    """Set an estimator's margins or prices on the validation rows.

    Parameters
    ----------
    answers : Answers
        To every row of the history.
    period : Period
    budgets : Budgets
        Shares of task-windows that may violate, for the baseline and the aggressive margin.
    by_tier : bool
        Whether each tier keeps the budgets for itself.
    given : tuple of float or None
        Of ``calibrate``: what is known without a budget.
    """
    history = period.history
    valid = np.flatnonzero(history.period == VALID)
    windows, target = history.windows.take(valid), history.target[valid]
    return calibrate(answers.take(valid), windows, target, budgets, by_tier=by_tier, given=given)


def fold_dataset(
    dataset: Dataset,
    features: FeatureSet,
    horizon_s: int,
    makers: Mapping[str, Callable[[], Estimator]],
    seconds: dict[str, float],
    *,
    progress: bool,
) -> tuple[History, dict[str, Answers]]:
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
    kept: list[History] = []
    answers: dict[str, list[Answers]] = {name: [] for name in makers}
    total = int(features.bucket_start[-1])
    quiet = None if progress else True
    with (
        tqdm(total=total * len(makers), desc="replay", unit="window", unit_scale=True, disable=quiet) as bar,
        ThreadPoolExecutor(os.cpu_count()) as pool,  # an estimator to a thread
    ):
        for bucket in range(dataset.n_buckets):
            here = features.bucket(bucket)
            windows, period, group = here.windows, here.labels.period, here.labels.group
            previous = previous_rows(windows)
            judged = (period != TRAIN) & (group != IN_ALLOC)
            judged[previous[judged & (previous >= 0)]] = True
            keep = np.flatnonzero(judged)
            target, next_target = _targets(here.labels, horizon_s)
            history = History(
                windows=windows,
                target=target,
                next_target=next_target,
                period=period,
                group=group,
                known_s=known_seconds(windows),
                previous=previous,
                source_row=here.first + np.arange(len(windows)),
            )
            judged_alone = history.take(keep)
            kept.append(replace(judged_alone, windows=what_is_judged(judged_alone.windows)))
            estimators = [make() for make in makers.values()]
            x = None
            if any(isinstance(estimator, ForecastEstimator) for estimator in estimators):
                started = time.perf_counter()
                x = here.features(keep, THREADS)
                seconds["fold/features"] = seconds.get("fold/features", 0.0) + time.perf_counter() - started
            answer = partial(_answer, windows=windows, keep=keep, x=x)
            for name, (part, took) in zip(makers, pool.map(answer, estimators), strict=True):
                answers[name].append(part)
                seconds[f"fold/{name}"] = seconds.get(f"fold/{name}", 0.0) + took
                bar.update(len(windows))
    joined = {}
    for name in makers:
        parts = answers.pop(name)
        joined[name] = type(parts[0]).joined(parts)
    return join_histories(kept), joined


def _answer(
    estimator: Estimator, *, windows: Windows, keep: NDArray[np.int64], x: NDArray[np.float32] | None
) -> tuple[Answers, float]:
    """Return a fresh estimator's answers to the kept windows of a bucket, and the seconds taken.

    ``x`` has their features, which are what an estimator that forecasts would fold itself.
    """
    started = time.perf_counter()
    answers: Answers
    if isinstance(estimator, ForecastEstimator):
        assert x is not None
        answers = answer_folded(estimator, x, windows.take(keep))
    elif isinstance(estimator, TunedEstimator):
        slot = windows.task_numbers()
        each = [estimator.answer_each(slot[part], windows.take(part)) for part in _parts(len(windows))]
        answers = Widened.joined(each).take(keep)
    else:
        answers = Widened.alike(run_base(estimator, windows).take(keep))
    return answers, time.perf_counter() - started


def _answer_timed(
    make: Callable[[], Estimator], *, windows: Windows, keep: NDArray[np.int64]
) -> tuple[Estimate, float]:
    """Return a fresh estimator's answers to the kept windows of a bucket, and the seconds taken."""
    started = time.perf_counter()
    return run_base(make(), windows).take(keep), time.perf_counter() - started


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
        so an estimator that reads related tasks is answered from kept features instead.
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
