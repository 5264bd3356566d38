"""Predicts the machines of a replayed cell with a model's estimator, with margins set on validation peaks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from reclaim.data.core.parallel import THREADS
from reclaim.data.schema import RESOURCES
from reclaim.data.windows import with_demand
from reclaim.features.feature_set import FeatureSet
from reclaim.features.splits import VALID, in_period
from reclaim.replay.experiment import LEARNED_MACHINE, SUM_OF_TASKS, Source, rests_on
from reclaim.replay.open_loop.estimates import LIMIT, Estimates
from reclaim.replay.open_loop.fold import ROWS_PER_CALL
from reclaim.replay.open_loop.history import History
from reclaim.replay.settings import ReplayConfig
from reclaim.training.bundle import Bundle
from reclaim.training.machines.curve import MachineCurve
from reclaim.training.machines.estimator import BOUND, Curves, MachineEstimator
from reclaim.training.machines.fit import MachineRows
from reclaim.training.machines.following import AT_ONCE
from reclaim.training.machines.snapshots import Snapshots, lay_out_cell
from reclaim.training.machines.terms import N_TERMS, T_HELD
from reclaim.training.margins.answers import Answers, Widened
from reclaim.training.margins.calibrate import guarded_reservations
from reclaim.training.margins.margin import Budgets, Margin, guarded_amounts
from reclaim.training.margins.price import Price
from reclaim.training.margins.violation import violates

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]
Kept = Callable[[Mapping[str, Price | Margin]], NDArray[np.bool_]]
"""Says by resource whether settings keep a budget."""

FITTED, UNFITTED = KINDS = ("machine", "bound")
"""Suffixes of a model's name for its two estimators of machines: the one it comes with, and the bound that needs no
fit, on the same forecasts."""
BY_MACHINE_DEFINITION: Final = (
    "Their margins keep the budgets as shares of machines' times, not of task-windows, on the machines of the "
    "validation period, without the tasks of collections that are kept for the test. `NAME (sum)` sums an estimator's "
    "reservations of tasks under the least margin or price with which that sum keeps the budget. `NAME (machine)` is a "
    "model's estimator of machines: it foresees the peak of all tasks on a machine together. It has no reservation of "
    "a task."
)
"""Meaning of the kinds ``experiment.BY_MACHINE``."""
IN_A_LOOP_DEFINITION: Final = (
    f"{BY_MACHINE_DEFINITION} `NAME (machine, following)` is the same with margins that follow the peaks of the "
    "machines of the loop, as they are packed there, from half the budget on; `NAME (machine, held)` keeps the second "
    "budget as well, of machines that pass at the same time."
)
"""The same in a closed loop."""
_IN_A_LOOP: Final[Mapping[str, float]] = {f"{FITTED}, following": 1.0, f"{FITTED}, held": AT_ONCE}
"""Suffixes of an estimator of machines whose margins follow the machines of a closed loop, with the share of them that
may exceed their reservation at once."""
_SUM: Final = " (sum)"
"""Suffix of an estimator of tasks whose reservations are summed."""
_HALVINGS: Final = 40
"""Steps of the search for a setting: to a millionth of a millionth of the range."""


@dataclass(frozen=True)
class Foreseer:
    """A model's estimator of machines on the rows of a history.

    Attributes
    ----------
    bundle : Bundle
    features : FeatureSet
        Of the dataset replayed.
    history : History
    horizon_s : int
    """

    bundle: Bundle
    features: FeatureSet
    history: History
    horizon_s: int

    @property
    def estimator(self) -> MachineEstimator:
        """The model's own estimator, at the mean limit of the dataset replayed; a service takes that of training."""
        return self.bundle.machine_estimator(horizon_s=self.horizon_s, mean_limit=self.features.mean_limit)

    def terms(self, rows: Ids) -> Floats:
        """Return the terms of rows of the history, after their windows; shape (n, n_resources, N_TERMS)."""
        estimator, terms = self.estimator, np.empty((len(rows), len(RESOURCES), N_TERMS))
        of_tasks = self.bundle.bare_estimator(horizon_s=self.horizon_s)
        rising = np.argsort(self.history.source_row[rows], kind="stable")
        done = 0
        for bucket, places in self.features.by_bucket(self.history.source_row[rows[rising]]):
            x = self.features.bucket(bucket).features(places, THREADS)
            for start in range(0, len(places), ROWS_PER_CALL):
                some = x[start : start + ROWS_PER_CALL]
                part = rising[done + start : done + start + len(some)]
                windows = self.history.windows.take(rows[part])
                terms[part] = estimator.terms(of_tasks.forecast(some, windows, self.horizon_s), some, windows)
            done += len(places)
        return terms

    def current_terms(self, rows: Ids) -> Floats:
        """Return the terms current as the windows of rows began; shape (n, n_resources, N_TERMS).

        They are those after the task's previous window. A task's first window, the first one of a new run, and the
        first one under another limit began under the limit.
        """
        windows, before = self.history.windows, self.history.previous[rows]
        known = (before >= 0) & (windows.scheduled_us[rows] <= windows.scheduled_us[before])
        limit, limit_before = windows.limit[rows], windows.limit[before]
        unknown = np.isnan(limit) & np.isnan(limit_before)
        known &= ((limit == limit_before) | unknown).all(axis=1)
        terms = np.zeros((len(rows), len(RESOURCES), N_TERMS))
        terms[..., T_HELD] = np.nan_to_num(windows.limit[rows])
        terms[known] = self.terms(before[known])
        return terms


@dataclass(frozen=True)
class ValidationMachines:
    """Machines of the validation period by resource, None where no time can be judged.

    Their tasks are those of collections that are not kept for the test.

    Attributes
    ----------
    rows : int64, shape (n,)
        Validation rows of the history.
    at : list of Snapshots or None
        Their rows are positions in ``rows``.
    """

    rows: Ids
    at: Sequence[Snapshots | None]

    @classmethod
    def lay_out(cls, history: History, slot_us: int, horizon_s: int) -> ValidationMachines:
        """Lay out the machines of a history."""
        rows = np.flatnonzero(in_period(VALID, history.period, history.group))
        windows = history.windows.take(rows)
        return cls(rows, [lay_out_cell(windows, r, slot_us, horizon_s) for r in range(len(RESOURCES))])

    def seen(self, terms: Floats, estimator: MachineEstimator) -> list[tuple[MachineRows, Ids] | None]:
        """Return, by resource, snapshots with the sums of their tasks' terms, and their times.

        ``terms`` are those of ``rows``, shape (n, n_resources, N_TERMS).
        """
        return [
            None
            if at is None
            else (MachineRows(at.total(terms[at.rows, r]), at.peak, at.machine, estimator.mean_limit[r]), at.start_us)
            for r, at in enumerate(self.at)
        ]

    def settings_within(self, answers: Answers, history: History, budgets: Budgets) -> Mapping[str, Price | Margin]:
        """Return the margins or prices of tasks with which sums of reservations keep the budgets of machine peaks.

        The budgets are shares of machines' times. Each setting is the least that keeps its budget on the validation
        rows, per resource; the highest setting where no machine is known.
        """
        mine, windows = answers.take(self.rows), with_demand(history.windows.take(self.rows))

        def kept(name: str, budget: float, settings: Mapping[str, Price | Margin]) -> NDArray[np.bool_]:
            held = guarded_amounts(mine.under(settings, name, windows), windows)
            return np.array([
                at is not None and violates(at.peak, at.total(held[at.rows, r])).mean() <= budget
                for r, at in enumerate(self.at)
            ])  # fmt: skip

        return least_settings(mine, budgets, kept)


def least_settings(
    answers: Answers, budgets: Budgets, kept: Callable[[str, float, Mapping[str, Price | Margin]], NDArray[np.bool_]]
) -> Mapping[str, Price | Margin]:
    """Return the least margins or prices that keep the budgets, by margin; the highest ones where none does.

    ``kept`` says by resource whether a named margin and a budget are kept by settings.
    """
    found: dict[str, Floats] = {}
    for name, budget in (("aggressive", budgets.aggressive), ("baseline", budgets.baseline)):
        # the aggressive one first, as the baseline reserves at least what that does
        found[name] = least_score(answers, partial(kept, name, budget), found)
    return answers.settings({name: found[name] for name in ("baseline", "aggressive")}, None)


def least_score(answers: Answers, kept: Kept, others: Mapping[str, Floats]) -> Floats:
    """Return the least score of a margin whose settings are ``kept``; shape (n_resources,).

    The highest score where none is. ``others`` are the scores of other margins: they stay where an estimator has
    answers of its own for each budget. Else all have the same score.
    """
    own = isinstance(answers, Widened) and not answers.is_alike
    low, high = np.full(len(RESOURCES), answers.LOWEST), np.full(len(RESOURCES), answers.HIGHEST)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        pair = {"baseline": middle, "aggressive": middle} | (dict(others) if own else {})
        held = kept(answers.settings(pair, None))
        low, high = np.where(held, low, middle), np.where(held, middle, high)
    return high


def curves_of(
    kind: str, estimator: MachineEstimator, seen: Sequence[tuple[MachineRows, Ids] | None], budgets: Budgets,
    learned_until_us: int | None = None,
) -> Curves:  # fmt: skip
    """Return a model's curves of a kind with the margins of validation peaks.

    The model's own margins where there are too few peaks for the smallest budget. Peaks up to ``learned_until_us``
    (``Bundle``) set no margin of a location that was fitted to them: they lie too near it. The model's own margins were
    set on peaks that it was not fitted to.
    """
    curves = estimator.curves if kind == FITTED else BOUND
    each = (not_learned(curve, of, learned_until_us) for curve, of in zip(curves, seen, strict=True))
    return tuple(
        curve if of is None or len(of[0]) * budgets.baseline < 1 else curve.with_margins(of[0].scores(curve))
        for curve, of in zip(curves, each, strict=True)
    )


def not_learned(
    curve: MachineCurve, seen: tuple[MachineRows, Ids] | None, learned_until_us: int | None
) -> tuple[MachineRows, Ids] | None:
    """Return the snapshots, and their times, that the location of a curve was not fitted to; None without any."""
    if seen is None or curve.weights is None or learned_until_us is None:
        return seen
    rows, start_us = seen
    later = start_us >= learned_until_us
    return (rows.take(later), start_us[later]) if later.any() else None


@dataclass(frozen=True)
class MachineContenders:
    """Contenders whose margins keep budgets of machine peaks on validation rows.

    Attributes
    ----------
    budgets : Budgets
        Shares of machines' times.
    sums : mapping of str to the settings by margin
        Of estimators of tasks, whose reservations are summed; by the estimator's name.
    machines : mapping of str to Foreseer and MachineEstimator
        By the contender's name; with the margins of validation peaks.
    packed : mapping of str to the margins by name, each in the order ``schema.RESOURCES``
        Of those of ``machines`` whose margins were set on the machines of a packing.
    """

    budgets: Budgets = field(default_factory=Budgets)
    sums: Mapping[str, Mapping[str, Price | Margin]] = field(default_factory=dict)
    machines: Mapping[str, tuple[Foreseer, MachineEstimator]] = field(default_factory=dict)
    packed: Mapping[str, Mapping[str, tuple[float, ...]]] = field(default_factory=dict)

    @classmethod
    def set_on_validation(
        cls, source: Source, estimates: Estimates, config: ReplayConfig, sums: Sequence[str] | None = None
    ) -> MachineContenders:
        """Set the margins of estimators on the machines of the validation period; none without a model.

        ``sums`` are the estimators of tasks that are summed, all when None. Without a validation peak of either
        resource there is no sum, and models keep their own margins.
        """
        if not source.bundles:
            return cls(config.budgets)
        history, horizon_s = estimates.history, config.horizon_s
        before = ValidationMachines.lay_out(history, estimates.period.slots.slot_us, horizon_s)
        summed = {
            name: before.settings_within(answers, history, config.budgets)
            for name, answers in estimates.answers.items()
            if name != LIMIT and (sums is None or name in sums) and all(at is not None for at in before.at)
        }
        machines = {}
        for name, bundle in source.bundles.items():
            foreseer = Foreseer(bundle, source.features, history, horizon_s)
            own = foreseer.estimator
            seen = before.seen(foreseer.terms(before.rows), own)
            curves = curves_of(FITTED, own, seen, config.budgets, bundle.learned_until_us)
            machines[f"{name} ({FITTED})"] = foreseer, MachineEstimator(curves, horizon_s, own.mean_limit)
        return cls(config.budgets, summed, machines)

    @property
    def kinds(self) -> dict[str, str]:
        """The kind of each contender."""
        return {sum_of(name): SUM_OF_TASKS for name in self.sums} | dict.fromkeys(self.machines, LEARNED_MACHINE)

    @property
    def in_a_loop(self) -> dict[str, str]:
        """The kind of each contender of a closed loop, where margins of machines may follow as well."""
        followed = [one for name in self.machines for one in (name, *followed_of(name))]
        return self.kinds | dict.fromkeys(followed, LEARNED_MACHINE)

    def margins_of(self, name: str) -> Mapping[str, tuple[float, ...]]:
        """Return the margins of an estimator of machines by name, each in the order ``schema.RESOURCES``."""
        curves = self.machines[name][1].curves
        return self.packed.get(name) or {
            margin: tuple(curve.margin(budget) for curve in curves) for margin, budget in self.budgets.by_margin.items()
        }

    def reserved(self, estimates: Estimates) -> dict[tuple[str, str], Floats]:
        """Return what the sums add up by contender and margin, of every row of the estimates' history.

        Shape (n, n_resources) each.
        """
        return {
            (name, margin): reserved
            for name in map(sum_of, self.sums)
            for margin, reserved in self.reserved_by(name, estimates).items()
        }

    def reserved_by(self, name: str, estimates: Estimates) -> dict[str, Floats]:
        """Return the same of one contender, by margin."""
        of = name.removesuffix(_SUM)
        return guarded_reservations(estimates.answers[of], estimates.history.windows, self.sums[of])


def followed_of(name: str) -> dict[str, float]:
    """Return the names of an estimator of machines whose margins follow the machines of a closed loop.

    With the share of the machines that may pass at once: ``following.OnlineMachines``.
    """
    return {f"{rests_on(name)} ({way})": at_once for way, at_once in _IN_A_LOOP.items()}


def sum_of(name: str) -> str:
    """Return the name of the contender that sums an estimator's reservations."""
    return name + _SUM
