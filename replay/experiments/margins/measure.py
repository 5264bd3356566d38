"""Margins experiment (EuroSys'15, Figure 12): every estimator under every margin, and under alternating margins."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from reclaim.data.errors import ConfigError
from reclaim.data.oom import oom_definition
from reclaim.data.schema import RESOURCES
from reclaim.replay.closed_loop.outcome import DEFINITIONS
from reclaim.replay.closed_loop.simulate import Scheduling
from reclaim.replay.closed_loop.workload import RUN_DEFINITION
from reclaim.replay.equal_violation.compare import EQUAL_DEFINITION, EqualViolation, SweptPeriod
from reclaim.replay.experiment import (
    COMPARED,
    ONLINE,
    ORACLE,
    STATISTICAL,
    Experiment,
    Measured,
    Source,
    rests_on,
)
from reclaim.replay.experiments.margins.closed_loop import most_reclaiming, run_cells
from reclaim.replay.experiments.margins.figures import FIGURES, cell_in_turn
from reclaim.replay.experiments.margins.following import (
    FOLLOWING_DEFINITIONS,
    by_part,
    cost_of_following,
    follow,
)
from reclaim.replay.experiments.margins.judge import cell_over_time, judge, judge_fixed
from reclaim.replay.experiments.margins.models import against_first, models_summary
from reclaim.replay.experiments.margins.money import MONEY_DEFINITIONS, money
from reclaim.replay.experiments.margins.page import EQUAL, page, summary_table
from reclaim.replay.experiments.margins.runs import COLUMNS, runs
from reclaim.replay.open_loop.bootstrap import Bootstrap
from reclaim.replay.open_loop.estimates import LIMIT, Estimates, estimate_all
from reclaim.replay.open_loop.history import oracle
from reclaim.replay.open_loop.machines import IN_A_LOOP_DEFINITION, MachineContenders
from reclaim.replay.open_loop.metrics import METRICS
from reclaim.replay.open_loop.paired import VERDICT_DEFINITION, Paired
from reclaim.replay.open_loop.period import period_facts
from reclaim.replay.open_loop.timeline import EVENT_DEFINITION, OVER_DEFINITION
from reclaim.replay.report.units import UnitSums, write_equal, write_units
from reclaim.replay.settings import ReplayConfig
from reclaim.training.margins.margin import MARGIN_NAMES

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class MarginsConfig(ReplayConfig):
    """Settings of the replay of margins."""

    online: bool = True
    """Replays every estimator a second time, with a price or margin that follows the workload, except those of
    ``value``."""
    closed_loop: bool = True
    """Also runs the cell by the reservations, where the trace has machines: by those of the learned estimators, of
    Borg's, and of the ``beside`` others that reclaim most on the validation rows."""
    beside: int = 2
    """Number of those others."""
    orders: int = 3
    """Number of runs of the cell for each, its machines visited in another order each time: kills are few, and where a
    task is placed is chance. What is shown is the mean."""
    scheduling: Scheduling = field(default_factory=Scheduling)
    """Settings of the scheduler of the closed loop."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beside < 0:
            raise ConfigError(f"beside must be 0 or more, got {self.beside}")
        if self.orders < 1:
            raise ConfigError(f"orders must be at least 1, got {self.orders}")


def measure(source: Source, config: MarginsConfig) -> Measured:
    """Judge every estimator at every margin, and under the sequence of them.

    Margins and prices are set on the validation rows; all results are of the test rows. ``units.parquet`` has their
    sums.

    Raises
    ------
    HistoryTooShortError
        The validation or the test period is shorter than the horizon.
    """
    estimates = estimate_all(source, config)
    kept: dict[str, Any] = {}
    equal: dict[str, dict[str, Floats]] = {}
    judged = list(_judged(estimates, source, config, kept, equal))
    units = UnitSums(
        unit=np.unique(estimates.history.windows.collection_id[estimates.period.rows]),
        unseen=estimates.period.unseen_units,
        sums={(e["name"], margin): sums for e in judged for margin, sums in e.pop("units").items()},
    )
    results = {
        "dataset": period_facts(estimates.period),
        "timeline": cell_over_time(estimates.period),
        "estimators": judged,
        "against_best": against_best(judged, units, equal, config),
        "against_first": against_first(list(source.bundles), units, config),
    }
    definitions = _definitions(config, source.dataset.manifest)
    if config.value.known:
        results["money"] = money(units, config, estimates.period)
        definitions |= MONEY_DEFINITIONS
    if kept:
        cost = {
            name + ONLINE: cost_of_following(
                {m: units.sums[name + ONLINE, m] for m in equal[name]}, equal[name], config
            )
            for name in source.bundles
        }
        results["following"] = {"by_part": kept, "cost": cost}
        definitions |= FOLLOWING_DEFINITIONS
    if config.closed_loop:
        chosen = _run_in_cells(estimates, source, config)
        by_following = partial(follow, estimates=estimates, config=config)
        contenders = MachineContenders.set_on_validation(source, estimates, config, chosen)
        results["closed_loop"] = run_cells(
            source, estimates, config.scheduling, chosen, config.orders, by_following, contenders, config.horizon_s
        )
        definitions |= {"run": RUN_DEFINITION, **DEFINITIONS}
        if contenders.kinds:
            definitions |= {"sum of tasks; learned machine": IN_A_LOOP_DEFINITION}

    def write(folder: Path) -> None:
        write_units(units, folder)
        write_equal(equal, folder)

    return Measured(results, definitions, write)


def _judged(
    estimates: Estimates, source: Source, config: MarginsConfig, kept: dict[str, Any],
    equal: dict[str, dict[str, Floats]],
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Yield what is reported of each estimator.

    ``kept`` is filled with how well the learned ones keep the budgets, ``equal`` with what each reclaims at equal
    violation.
    """
    period, bundles = estimates.period, source.bundles
    bootstrap = Bootstrap.of(config)
    drawn = _drawn(config, list(bundles))
    swept = SweptPeriod.lay_out(period, config.budgets, bootstrap)
    for name in source.each(estimates.answers, "judging", "judge"):
        if name == LIMIT:
            yield judge_fixed(name, LIMIT, period.history.windows.limit, period, bootstrap=bootstrap)
        else:
            kind, made = source.kind(name), estimates.calibrations[name]
            reserved = estimates.reservations(name)
            yield judge(name, kind, made, reserved, period, bootstrap=bootstrap, drawn=name in drawn)
            equal[name] = swept.reclaimed(estimates.answers[name])
            if config.online:
                followed = follow(name, estimates, config)
                yield judge(name + ONLINE, kind, None, followed, period, bootstrap=bootstrap, drawn=False)
                if name in bundles:
                    kept |= {n: by_part(r, period, config) for n, r in ((name, reserved), (name + ONLINE, followed))}
    yield judge_fixed(ORACLE, ORACLE, oracle(estimates.history).reservation, period, bootstrap=bootstrap)


def _run_in_cells(estimates: Estimates, source: Source, config: MarginsConfig) -> list[str]:
    """Return the estimators of the closed loop: learned, Borg's, and the best of the others by the validation rows."""
    others = [n for n in config.estimators if n not in (LIMIT, "borg")]
    learned = [n + suffix for n in source.bundles for suffix in ("", ONLINE) if config.online or not suffix]
    return [
        *learned,
        *(n for n in config.estimators if n == "borg"),
        *most_reclaiming(estimates, others, config.beside),
    ]


def _drawn(config: ReplayConfig, learned: Sequence[str]) -> list[str]:
    """Return the estimators of the figure over time: the learned ones and Borg's, or the first two there are."""
    others = [name for name in config.estimators if name != LIMIT]
    chosen = [*learned, *(name for name in others if name == "borg")]
    return chosen if len(chosen) > 1 else list(dict.fromkeys([*chosen, *others]))[:2]


def against_best(
    judged: Sequence[Mapping[str, Any]],
    units: UnitSums,
    equal: Mapping[str, Mapping[str, Floats]],
    config: ReplayConfig,
) -> dict[str, dict[str, dict[str, Any]]]:
    """Return, by margin, estimator and resource, the comparison with the best statistical other one.

    Statistical estimators take part with margins that were set once and with margins that follow, but none is compared
    with itself. ``at_equal_violation`` of each compares what ``equal`` has of both; None where it has neither.
    """
    kinds = {e["name"]: e["kind"] for e in judged if e["kind"] in COMPARED}
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for margin in MARGIN_NAMES:
        budget = config.budgets.of(margin)
        paired = Paired({name: units.sums[name, margin] for name in kinds}, Bootstrap.of(config))
        at_budget = EqualViolation({name: of[margin] for name, of in equal.items() if margin in of}, config.confidence)
        for name, (r, resource) in product(kinds, enumerate(RESOURCES)):
            rivals = [
                other for other, kind in kinds.items() if kind == STATISTICAL and rests_on(other) != rests_on(name)
            ]
            compared = paired.compare_best(name, rivals, r, budget)
            if compared is not None:
                afterwards = at_budget.compare_best(name, rivals, r)
                found.setdefault(margin, {}).setdefault(name, {})[resource] = compared.report() | {
                    "at_equal_violation": None if afterwards is None else afterwards.report()
                }
    return found


def _definitions(config: ReplayConfig, manifest: Mapping[str, Any]) -> dict[str, str]:
    budgets = config.budgets
    return {
        **{name: metric.meaning for name, metric in METRICS.items()},
        "what a reservation must cover": (
            f"Within the next {config.horizon_s} s: of CPU the largest 90th percentile of any window, of memory the "
            "largest usage, each at most the limit, beyond which nothing is reserved. The mean of the window "
            "stands in where the trace has no percentiles of CPU, or no largest usage of memory."
        ),
        "margin": (
            "Of a statistical estimator a share of the estimate that is added to it, per resource; of a learned one a "
            f"price. It is the least with which at most {100 * budgets.baseline:.3g}% (baseline) or "
            f"{100 * budgets.aggressive:.3g}% (aggressive) of the validation task-windows violate; medium "
            "lies half way between the two amounts before the guards, of a learned estimator at the geometric mean of "
            "the prices. Nothing is set on test rows."
        ),
        "price": (
            "Limits of a task of mean size that one violated task-window costs, per resource. Reserved is the r for "
            "which weight * r + price * P(demand > r) is least, r as a share of the task's limit, the weight its limit "
            "over the mean one. A higher price never reserves less."
            + (
                " Where a value is set, it follows from that value and from no budget; verdicts judge by the budgets "
                "all the same, `net` by the value."
                if config.value.known
                else ""
            )
        ),
        "online": (
            "Begins with the same price, or margin of a statistical estimator, on the first validation row and then "
            "follows the workload: as answers turn out violated or kept, each tier's moves so that the share violated "
            "stays at the budget. A model that prices itself, as the built-in one, begins with its own price. Unseen "
            "collections are among the tasks that it follows."
        ),
        "oracle": "Reserves exactly what will be used within the horizon; it sees the future, and bounds what never "
        "violates.",
        "would-be out-of-memory event": EVENT_DEFINITION,
        "task over its reservation": OVER_DEFINITION,
        "out-of-memory label of the features (not used in these numbers)": oom_definition(manifest),
        "interval": (
            f"{config.confidence:.0%} percentile interval of {config.draws} bootstrap resamples of whole collections, "
            f"seed {config.seed}. Of one collection alone there is none."
        ),
        "difference between estimators": "Both are resampled on the same collections, and subtracted.",
        "verdict": VERDICT_DEFINITION,
        "at equal violation": EQUAL_DEFINITION,
        "settings": (
            "Those of an estimator without a model are chosen like the margins: per resource and budget, of a few "
            "candidates that include the published ones, what reclaims most of the validation rows under the margin "
            "that keeps the budget there, of those that can keep it. The baseline reserves the larger of the amounts "
            "by its own settings and by those of the aggressive margin."
            if config.tune
            else "Those of an estimator without a model are the published ones."
        ),
        "age": "Time since the task's first window began: all that an estimator can have seen of it.",
    }


EXPERIMENT: Final = Experiment(
    name="margins",
    title="Margins: what could have been reclaimed",
    version=24,
    config=MarginsConfig,
    measure=measure,
    page=page,
    summary=lambda results: summary_table(results).without("interval", "compared with", EQUAL),
    figures={**FIGURES, "cell_in_turn": cell_in_turn},
    runs=runs,
    columns=COLUMNS,
    models=models_summary,
)
