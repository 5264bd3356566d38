"""Answers of estimators to the question of a request, and the settings and margins that validation rows choose."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from reclaim.data.core.parallel import THREADS
from reclaim.data.errors import HistoryTooShortError
from reclaim.data.schema import DAY_US, RESOURCES
from reclaim.data.windows import Windows, empty_windows
from reclaim.features.feature_set import FeatureSet
from reclaim.features.splits import VALID
from reclaim.replay.experiment import LEARNED, STATISTICAL, Source
from reclaim.replay.experiments.recommend.decisions import Decisions
from reclaim.replay.experiments.recommend.series import Floats, Integers, Series, TaskRows
from reclaim.replay.open_loop.estimates import estimator_makers
from reclaim.replay.open_loop.fold import answer_folded, run_base
from reclaim.replay.settings import ComparisonConfig
from reclaim.training.estimators.base import STATISTIC, Estimate, Estimator, Settings
from reclaim.training.estimators.registry import build_estimator, candidates
from reclaim.training.margins.answers import Answers, Priced, Widened, scores_of
from reclaim.training.margins.calibrate import NO_LIMIT, Calibration, calibrate, choose_best
from reclaim.training.margins.ladder import N_RUNGS
from reclaim.training.margins.margin import Margin
from reclaim.training.models.estimator import ForecastEstimator

RECENT_US: Final = DAY_US
"""A model answers for the tasks of the workload's last day; for a weekly workload, of the last day it ran."""


Margins = tuple[str, ...]
"""Name of the margin of each of ``schema.RESOURCES``, whose budget its requests keep."""


@dataclass(frozen=True)
class Contender:
    """An estimator's answers to all decisions, under the settings and the margin that validation rows chose.

    Attributes
    ----------
    name, kind : str
    answer : float64, shape (n_decisions, n_resources)
        NaN unknown.
    settings : tuple of mapping, in the order ``schema.RESOURCES``
        Empty for a model.
    margin : tuple of float
        What a bare answer is multiplied with; the price of a violation for a model.
    violation, lost, reclaimed : tuple of float
        Share of the validation rows that violate under it, of those that violate under any, and of the limit that is
        reclaimed.
    notes : tuple of str
        Where the budget could not be met.
    """

    name: str
    kind: str
    answer: Floats
    settings: tuple[Settings, ...]
    margin: tuple[float, ...]
    violation: tuple[float, ...]
    lost: tuple[float, ...]
    reclaimed: tuple[float, ...]
    notes: tuple[str, ...]


def ask_all(
    source: Source,
    config: ComparisonConfig,
    margins: Margins,
    rows: TaskRows,
    series: Series,
    decisions: Decisions,
    withheld: NDArray[np.bool_],
) -> list[Contender]:
    """Return every estimator of a configuration and every model, set on the validation rows for margins' budgets.

    Rows of withheld requests, bool of shape (n_decisions, n_resources), do not count, unless all of a resource are
    withheld.
    """
    answers = ask_statistics(source, config, series, decisions)
    target = _target(rows, decisions, withheld)
    found = [
        _chosen(
            name, STATISTICAL, [candidates(name)[k] for k in range(len(of))], of, config, margins, target, decisions
        )
        for name, of in answers.items()
    ]
    prices = scores_of(config.value.prices(source.features.mean_limit, config.horizon_s))
    for name in source.bundles:
        with source.timed(f"ask/{name}"):
            asked = [ask_model(source, config, name, rows, decisions)]
        found.append(_chosen(name, LEARNED, [{}], asked, config, margins, target, decisions, given=prices))
    return found


def ask_statistics(
    source: Source, config: ComparisonConfig, series: Series, decisions: Decisions
) -> dict[str, list[Answers]]:
    """Return the answer of every candidate of the estimators to the series of the largest task, at each decision."""
    tried = {name: candidates(name) if config.tune else candidates(name)[:1] for name in config.estimators}
    makers = [(name, partial(build_estimator, name, one)) for name, of in tried.items() for one in of]
    said = [np.full((len(decisions), len(RESOURCES)), np.nan) for _ in makers]
    chunks = list(series.chunks())
    asked = [np.flatnonzero((decisions.known >= part.start) & (decisions.known < part.stop)) for part in chunks]
    jobs = (
        (make, windows, place[decisions.known[mine] - part.start])
        for mine, part in zip(asked, chunks, strict=True)
        for windows, place in [series.windows(part)]
        for _, make in makers
    )
    total = len(series.workload) * len(makers)
    with (
        source.timed("ask"),
        tqdm(total=total, desc="recommend", unit="window", unit_scale=True, disable=None) as bar,
        source.engine.pool() as pool,
        closing(pool.each(_answers_at, jobs)) as answered,
    ):
        for number, of in enumerate(answered):
            chunk, maker = divmod(number, len(makers))
            said[maker][asked[chunk]] = of
            bar.update(chunks[chunk].stop - chunks[chunk].start)
    rule = np.full((len(decisions), len(RESOURCES)), STATISTIC, np.uint8)
    answers: dict[str, list[Answers]] = {name: [] for name in tried}
    for (name, _), one in zip(makers, said, strict=True):
        answers[name].append(Widened.alike(Estimate(one, rule)))
    return answers


def _answers_at(job: tuple[Callable[[], Estimator], Windows, Integers]) -> Floats:
    """Return a fresh estimator's answers at some rows of windows; NaN where it knows none; (n_rows, n_resources)."""
    make, windows, rows = job
    estimate = run_base(make(), windows)
    return estimate.reservation[rows]


def ask_model(source: Source, config: ComparisonConfig, name: str, rows: TaskRows, decisions: Decisions) -> Priced:
    """Return what a model reserves at every price at each decision: the largest of what it says of the tasks.

    The tasks are those of ``RECENT_US``; a model that knows no task of a workload says nothing of it.
    """
    decision, row = _recent_tasks(rows, decisions)
    asked, at = np.unique(row, return_inverse=True)
    make = estimator_makers(config, {name: source.bundles[name]}, source.features.mean_limit)[name]
    jobs = source.features.by_bucket(rows.source_row[asked])
    with source.engine.pool() as pool, closing(pool.each(partial(_amounts, source.features, make), jobs)) as buckets:
        amounts = np.concatenate([np.zeros((0, len(RESOURCES), N_RUNGS), np.float32), *buckets])
    most = np.full((len(decisions), len(RESOURCES), N_RUNGS), np.nan, np.float32)
    starts = np.flatnonzero(np.diff(decision, prepend=-1))
    if len(starts):
        most[decision[starts]] = np.fmax.reduceat(amounts[at], starts)
    share = most / decisions.limit[:, :, None]
    return Priced(np.minimum(share, np.float32(1.0)).astype(np.float32))


def _amounts(features: FeatureSet, make: Callable[[], Estimator], job: tuple[int, Integers]) -> NDArray[np.float32]:
    """Return what a fresh estimator reserves at every price at rows of a bucket; (n_rows, n_resources, N_RUNGS)."""
    number, places = job
    estimator, bucket = make(), features.bucket(number)
    assert isinstance(estimator, ForecastEstimator)
    windows = bucket.windows.take(places)
    ladder = answer_folded(estimator, bucket.features(places, THREADS), windows).ladder
    return (ladder * windows.limit[:, :, None]).astype(np.float32)


def _recent_tasks(rows: TaskRows, decisions: Decisions) -> tuple[Integers, Integers]:
    """Return pairs of a decision and the last row of a task that it rests on, in the order of the decisions."""
    found_decisions, found_rows = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for time_us in np.unique(decisions.time_us):
        here = np.flatnonzero(decisions.time_us == time_us)
        last = rows.last_at(int(time_us))
        workload, ended = rows.workload[last], rows.end_us[last]
        latest = np.full(len(rows.ids), -1, np.int64)
        np.maximum.at(latest, workload, ended)
        last = last[ended > latest[workload] - RECENT_US]
        for period in np.unique(decisions.period[here]):  # the end of the history also belongs to the test
            number = np.full(len(rows.ids), -1, np.int64)
            mine = here[decisions.period[here] == period]
            number[decisions.workload[mine]] = mine
            of = number[rows.workload[last]]
            found_decisions.append(of[of >= 0])
            found_rows.append(last[of >= 0])
    decision, row = np.concatenate(found_decisions), np.concatenate(found_rows)
    order = np.argsort(decision, kind="stable")
    return decision[order], row[order]


def _target(rows: TaskRows, decisions: Decisions, withheld: NDArray[np.bool_]) -> Floats:
    """Return the demand of the validation rows over the limit; NaN where the request is withheld; (n, n_resources)."""
    held = decisions.held[VALID]
    with np.errstate(divide="ignore", invalid="ignore"):
        target = rows.demand[decisions.judged[VALID]] / decisions.limit[held]
    without = np.where(withheld[held], np.nan, target)
    return np.where(np.isfinite(without).any(axis=0), without, target)


def _judged(target: Floats, limit: Floats) -> NDArray[np.bool_]:
    """Return which resources have a validation row to set a margin on; HistoryTooShortError where none has; (R,)."""
    known = np.isfinite(target).any(axis=0)  # a share of the limit: where that is unknown or 0, it is none
    if not known.any():
        remedy = (
            "recommend on a longer history, or build the features with other shares, "
            "`reclaim features DATASET --set split.train_share=0.4`"
        )
        raise HistoryTooShortError(
            f"none of {len(limit)} validation windows has a limit and a known demand; "
            f"{remedy if (limit > 0).any() else NO_LIMIT}"
        )
    return np.asarray(known)


def _chosen(
    name: str, kind: str, settings: Sequence[Settings], answers: Sequence[Answers], config: ComparisonConfig,
    margins: Margins, target: Floats, decisions: Decisions, given: tuple[float, ...] | None = None,
) -> Contender:  # fmt: skip
    """Return a contender under the candidate that reclaims most of a resource within its budget on validation rows."""
    held = decisions.held[VALID]
    judged = _judged(target, decisions.limit[held])
    windows = _as_windows(np.where(judged, decisions.limit[held], np.nan), decisions.tier[held])
    set_to: Mapping[int, Calibration] = {
        k: calibrate(of.take(held), windows, target, config.budgets, by_tier=config.by_tier, given=given)
        for k, of in enumerate(answers)
    }
    budgets = config.budgets.by_margin
    best = [choose_best(set_to, margin, budgets[margin])[r] for r, margin in enumerate(margins)]
    asked = _as_windows(decisions.limit, decisions.tier)
    chosen = [(r, set_to[k], margins[r]) for r, k in enumerate(best)]
    columns = [answers[k].under(set_to[k].settings, margins[r], asked)[:, r] for r, k in enumerate(best)]
    return Contender(
        name=name, kind=kind, answer=np.where(judged, np.stack(columns, axis=1), np.nan),
        settings=() if kind == LEARNED else tuple(settings[k] for k in best),
        margin=tuple(_number_of(of, margin, r) for r, of, margin in chosen),
        violation=tuple(of.violation[margin][r] for r, of, margin in chosen),
        lost=tuple(of.lost[margin][r] for r, of, margin in chosen),
        reclaimed=tuple(of.reclaimed[margin][r] for r, of, margin in chosen),
        notes=_notes(judged, [set_to[k] for k in best]),
    )  # fmt: skip


def _notes(judged: NDArray[np.bool_], set_to: Sequence[Calibration]) -> tuple[str, ...]:
    """Return the notes of calibrations, each once; for a resource that is not judged only that note."""
    others = tuple(f"{resource}:" for resource, known in zip(RESOURCES, judged, strict=True) if not known)
    why = "no validation window has a limit and a known demand, so requests stay as they are"
    notes = [note for of in set_to for note in of.notes if not note.startswith(others)]
    return tuple(dict.fromkeys([*(f"{other} {why}" for other in others), *notes]))


def _number_of(calibration: Calibration, margin: str, resource: int) -> float:
    setting = calibration.settings[margin]
    return 1 + setting.share[resource] if isinstance(setting, Margin) else setting.value[resource]


def _as_windows(limit: Floats, tier: NDArray[np.int8]) -> Windows:
    """Return windows of a limit and a tier in which nothing was measured: no guard of an estimator applies to them."""
    return replace(empty_windows(len(limit)), limit=np.ascontiguousarray(limit), tier=tier)


def settings_in_words(settings: Mapping[str, Any]) -> str:
    """Return settings as ``level 98, min_samples 12``; settings left at the estimator's default are left out."""
    return ", ".join(f"{key} {value}" for key, value in settings.items() if value is not None)
