"""Frontier experiment: the share that each estimator reclaims at every violation rate, of tasks and of machines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from reclaim.data.errors import ConfigError
from reclaim.data.schema import RESOURCES, UNKNOWN_ID
from reclaim.replay.equal_violation.curves import Curve, JudgedUnits, draw_curve, report_curves
from reclaim.replay.equal_violation.sweep import Bare, Guards, TaskRows
from reclaim.replay.experiment import LEARNED_MACHINE, STATISTICAL, Experiment, Measured, Source
from reclaim.replay.experiments.frontier.day import machine_day, one_day
from reclaim.replay.experiments.frontier.figures import frontier_of_machines, frontier_of_tasks
from reclaim.replay.experiments.frontier.learned import ForeseenMachines, foresee_machines
from reclaim.replay.experiments.frontier.machines import (
    MACHINE_DEFINITIONS,
    MachinePeaks,
    Record,
    judge_peaks,
    lay_out_machines,
)
from reclaim.replay.experiments.frontier.page import AS_PUBLISHED, COLUMNS, page, runs, summary_table
from reclaim.replay.machine_peaks.predictors import PREDICTORS, Oracle
from reclaim.replay.open_loop.bootstrap import LEAST_KNOWN, Bootstrap, number
from reclaim.replay.open_loop.estimates import LIMIT, Estimates, estimate_all
from reclaim.replay.open_loop.history import window_seconds
from reclaim.replay.open_loop.machines import FITTED
from reclaim.replay.open_loop.metrics import POSITION, STATS
from reclaim.replay.open_loop.paired import VERDICT_DEFINITION, Paired
from reclaim.replay.open_loop.period import Period, period_facts
from reclaim.replay.open_loop.rows import ratio
from reclaim.replay.settings import ReplayConfig
from reclaim.training.machines.following import ALONE, AT_ONCE, TIMES

Floats = NDArray[np.float64]

MACHINE: Final = "machine"
"""Kind of a contender that predicts the peak of a machine, without reservations of tasks."""
Curves = dict[str, dict[str, Curve]]
"""By resource, then by contender."""


@dataclass(frozen=True)
class FrontierConfig(ReplayConfig):
    """Settings of the frontier: at the rates that ``budgets`` name, for the horizon ``horizon_s``."""

    estimators: tuple[str, ...] = (
        "borg", "percentile", "max-nsigma-percentile", "moving-max", "autopilot-percentile", "vpa", "krr",
        "koordinator", "limit",
    )  # fmt: skip
    """Estimators without a model, by their names in ``training.estimators.registry``; learned ones come as bundles. By
    default Borg's, Resource Central's, the EuroSys'21 study's, Autopilot's, VPA's, KRR's and Koordinator's."""
    predictors: tuple[str, ...] = (
        "borg_default", "nsigma5", "rc_p99", "max_n5_rc99", "machine_p100", "peak_max",
        "rc_p99_bridged", "max_n5_rc99_bridged", "machine_p100_bridged",
        "trimaran_p99", "coach_p95", "coach_shared_p95", "coach_shared_p99", "coach_day_p95", "coach_day_p99",
    )  # fmt: skip
    """Predictors of whole machines, by their names in ``replay.machine_peaks``: the EuroSys'21 study's as published and
    with gaps bridged, Trimaran's and Coach's."""

    def __post_init__(self) -> None:
        super().__post_init__()
        known = [name for name, p in PREDICTORS.items() if not isinstance(p, Oracle) and name != LIMIT]
        unknown = sorted(set(self.predictors) - set(known))
        if unknown:
            raise ConfigError(f"predictors must be some of {', '.join(known)}, got {', '.join(unknown)}")


def measure(source: Source, config: FrontierConfig) -> Measured:
    """Sweep the margin or price of every estimator, and a factor of every predictor, over the test period.

    Raises
    ------
    HistoryTooShortError
        The validation or the test period is shorter than the horizon.
    """
    estimates = estimate_all(source, config)
    history, period = estimates.history, estimates.period
    bootstrap = Bootstrap.of(config)
    rates = (config.budgets.baseline, config.budgets.aggressive)
    guards, test, seconds = Guards.from_windows(history.windows), period.rows, window_seconds(history.windows)
    rows = TaskRows.lay_out(test, guards, history.target, seconds, period.unit, len(period.unseen_units))
    of_tasks = {
        name: JudgedUnits.from_totals(rows.totals()[..., r], rates, bootstrap) for r, name in enumerate(RESOURCES)
    }
    with source.timed("machines"):
        machines = _lay_out(source, period, guards, config)
        of_machines = {name: JudgedUnits.from_totals(m.totals(), rates, bootstrap) for name, m in machines.items()}
    task_curves: Curves = {name: {} for name in of_tasks}
    machine_curves: Curves = {name: {} for name in of_machines}
    points: dict[str, Any] = {}
    of_margins: dict[str, Any] = {}
    of_units: dict[tuple[str, str], Floats] = {}
    names = [name for name in estimates.answers if name != LIMIT]
    for name in source.each(names, "sweeping", "sweep"):
        bare = Bare.of(estimates.answers[name])
        sweeps = [rows.sweep(one) for one in bare]
        reserved = estimates.reservations(name)
        at_margins = {margin: rows.at(r[test]) for margin, r in reserved.items()}
        points[name] = {margin: _shares(totals, of_tasks) for margin, totals in at_margins.items()}
        of_units |= {(name, margin): _unit_sums(totals, rows.totals()) for margin, totals in at_margins.items()}
        for r, (resource, units) in enumerate(of_tasks.items()):
            ours = [(violations[..., r], reclaimed[..., r]) for violations, reclaimed in sweeps]
            task_curves[resource][name] = draw_curve(ours, units)
        for resource, m in machines.items():
            machine_curves[resource][name] = draw_curve([m.sweep(one) for one in bare], of_machines[resource])
            of_margins.setdefault(name, {})[resource] = {
                k: judge_peaks(m.total(v), m, bootstrap) for k, v in reserved.items()
            }
    for resource, m in machines.items():
        for name, peak in m.at.foreseen.items():
            machine_curves[resource][name] = draw_curve([m.sweep_peak(peak)], of_machines[resource])
            of_margins.setdefault(name, {})[resource] = {AS_PUBLISHED: judge_peaks(peak, m, bootstrap)}
    of_models = _foresee(source, period, machines, config)
    for name, by_resource in of_models.items():
        for resource, one in by_resource.items():
            m = machines[resource]
            machine_curves[resource][name] = draw_curve([one.sweep(m.at.limit)], of_machines[resource])
            budgets = config.budgets.by_margin
            of_margins.setdefault(name, {})[resource] = {
                margin: judge_peaks(one.peak(budget), m, bootstrap) for margin, budget in budgets.items()
            } | {
                f"{margin} following": judge_peaks(one.following(budget, config.horizon_s, m.slot_s), m, bootstrap)
                for margin, budget in budgets.items()
            }
            held = one.held(tuple(budgets.values()), config.horizon_s, m.slot_s)
            of_margins[name][resource] |= {
                f"{margin} held": judge_peaks(peak, m, bootstrap) for margin, peak in zip(budgets, held, strict=True)
            }
    days = _days(source, estimates, machines, of_models, config)
    learned = [*source.bundles, *of_models]
    kinds = {n: source.kind(n) for n in names} | dict.fromkeys(config.predictors, MACHINE)
    kinds |= dict.fromkeys(of_models, LEARNED_MACHINE)
    results = {
        "dataset": period_facts(period),
        "horizon_s": config.horizon_s,
        "rates": list(rates),
        "estimators": [{"name": name, "kind": kind} for name, kind in kinds.items()],
        "tasks": _side(task_curves, of_tasks, learned)
        | {"margins": points, "at_budget": _at_budget(of_units, kinds, config)},
        "machines": _side(machine_curves, of_machines, learned)
        | {
            "machines": max(m.at.n_machines for m in machines.values()),
            "margins": _by_margin(of_margins),
            "day": days,
        }
        if machines
        else None,
    }
    return Measured(results, definitions(config, machines=bool(machines), models=bool(of_models)))


def _foresee(
    source: Source, period: Period, machines: Mapping[str, MachinePeaks], config: FrontierConfig
) -> dict[str, dict[str, ForeseenMachines]]:
    """Return each model's predictions for the machines, by its name and the kind of its estimator."""
    found: dict[str, dict[str, ForeseenMachines]] = {}
    for name in source.each(source.bundles if machines else (), "foreseeing", "foresee"):
        bundle, features = source.bundles[name], source.features
        by_kind = foresee_machines(bundle, features, period, machines, config.horizon_s, config.budgets)
        found |= {f"{name} ({kind})": by_resource for kind, by_resource in by_kind.items()}
    return found


def _days(
    source: Source,
    estimates: Estimates,
    machines: Mapping[str, MachinePeaks],
    of_models: Mapping[str, Mapping[str, ForeseenMachines]],
    config: FrontierConfig,
) -> dict[str, Any]:
    """Return the day of one machine, by resource, as the first model reserves it at the aggressive margin."""
    for name in source.bundles if of_models else ():
        of_tasks = estimates.reservations(name)["aggressive"]
        return {
            resource: one_day(
                m, estimates.history.windows, m.total(of_tasks),
                of_models[f"{name} ({FITTED})"][resource].following(
                    config.budgets.aggressive, config.horizon_s, m.slot_s
                ),
            )
            for resource, m in machines.items()
        }  # fmt: skip
    return {}


def _lay_out(source: Source, period: Period, guards: Guards, config: FrontierConfig) -> dict[str, MachinePeaks]:
    """Return the machines by resource, where there are any."""
    predictors = {name: PREDICTORS[name] for name in config.predictors}
    known = (period.history.windows.machine_id != UNKNOWN_ID).any()
    record = Record.of(source.features, period.share) if known and predictors else None  # reads the dataset once more
    found = {
        name: lay_out_machines(period, guards, r, config.horizon_s, predictors, source.engine, record=record)
        for r, name in enumerate(RESOURCES)
    }
    return {name: machines for name, machines in found.items() if machines is not None}


def _shares(totals: Floats, units: Mapping[str, JudgedUnits]) -> dict[str, dict[str, float | None]]:
    """Return violation rate and reclaimed share, per resource, from sums of shape (n_units, 2, n_resources)."""
    violations, reclaimed = totals.sum(axis=0)
    return {
        resource: {
            "violation_rate": number(float(ratio(violations[r], g.count.sum()))),
            "reclaimed_share": number(float(ratio(reclaimed[r], g.granted.sum()))),
        }
        for r, (resource, g) in enumerate(units.items())
    }


def _side(curves: Curves, units: Mapping[str, JudgedUnits], learned: Sequence[str]) -> dict[str, Any]:
    """Return the results of all contenders, of tasks or of machines."""
    reports = {resource: report_curves(curves[resource], g, learned) for resource, g in units.items()}
    names = dict.fromkeys(name for report in reports.values() for name in report)
    return {
        "oracle": {name: number(units[name].oracle_share) if name in units else None for name in RESOURCES},
        "count": {name: int(units[name].count.sum()) if name in units else 0 for name in RESOURCES},
        "contenders": {
            name: {resource: report[name] for resource, report in reports.items() if name in report} for name in names
        },
    }


def _unit_sums(at_margin: Floats, totals: Floats) -> Floats:
    """Return ``metrics.sums`` of each unit as far as ``Paired`` reads them; from shapes (n_units, 2 and 3, R)."""
    sums = np.zeros((len(totals), len(STATS), totals.shape[-1]))
    columns = {
        "violations": at_margin[:, 0],
        "reclaimed": at_margin[:, 1],
        "rows": totals[:, 0],
        "granted": totals[:, 1],
    }
    for stat, values in columns.items():
        sums[:, POSITION[stat]] = values
    return sums


def _at_budget(
    of_units: Mapping[tuple[str, str], Floats], kinds: Mapping[str, str], config: FrontierConfig
) -> dict[str, dict[str, dict[str, Any]]]:
    """Return, by budget, estimator and resource, the comparison with the best statistical other one at the budget."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for margin, budget in asdict(config.budgets).items():
        sums = {name: of for (name, m), of in of_units.items() if m == margin}
        paired = Paired(sums, Bootstrap.of(config))
        rivals = [name for name in sums if kinds[name] == STATISTICAL]
        found[margin] = {
            name: {
                resource: compared.report()
                for r, resource in enumerate(RESOURCES)
                if (compared := paired.compare_best(name, rivals, r, budget)) is not None
            }
            for name in sums
        }
    return found


def _by_margin(judged: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """Return results by contender, margin and resource from those by contender, resource and margin."""
    return {
        name: {
            margin: {resource: of[resource][margin] for resource in of}
            for margin in dict.fromkeys(margin for by_margin in of.values() for margin in by_margin)
        }
        for name, of in judged.items()
    }


def definitions(config: FrontierConfig, *, machines: bool, models: bool = False) -> dict[str, str]:
    """Return the meaning of the terms of the results; those of machines and of models only where there are any."""
    of_machines = {
        **MACHINE_DEFINITIONS,
        "predictors of machines": "Those of the EuroSys'21 study, with its parameters, and later ones: Trimaran's beta "
        "distribution and Coach's windows of the day. To the study, a task that misses one record begins again, at its "
        "limit; 'bridged' forgives two, as Trimaran's and Coach's do. Their curve multiplies the peak they foresee, at "
        "most to the sum of the limits. They know the machine, not what each task would reserve.",
    }
    if models:
        of_machines["machine"] = (
            "`NAME (machine)` is a model's estimator of machines: it foresees the peak of all tasks on one "
            "together, from the sums of what it forecasts of each. `NAME (bound)` is Chernoff's bound on the same "
            "forecasts, without a fit. Their curve is of one margin after another. Their margins are set on the peaks "
            "of the validation period, without the tasks of collections that are kept for the test; those that follow "
            "move from there with the peaks that came. Those that are held are a service's: they move further where "
            f"more than {AT_ONCE:.0%} of the machines, and more than {ALONE}, pass at once at more than {TIMES:.0%} of "
            "the times."
        )
    drawn = "whole collections" + (" (task-windows) or machines (peaks)" if machines else "")
    return {
        "violation rate": f"Share of task-windows of which the usage within the next {config.horizon_s} s passes the "
        "reservation: of CPU the largest 90th percentile of any window, capped at the limit; of memory the largest "
        "usage. A window counts where its whole horizon is known.",
        "reclaimed share": "Limit less reservation over limit, each task-window weighted by limit and duration.",
        "curve": "Of a learned estimator, what is reserved at one price after another, the same for all tasks; of a "
        "statistical one, every bare answer times one factor after another. All is guarded as it is served (jump, cap, "
        "start-up hold). Between two prices or factors the curve is a straight line. An estimator whose settings were "
        "chosen for each budget on validation rows has a bare answer for each: the curve follows the one for "
        f"{config.budgets.baseline:.2%} below the geometric mean of the budgets, and the other above.",
        "verdict": "At equal violation. Better or worse: what the two curves come to at the rate differs, and the "
        "interval of the difference leaves out zero.",
        "at the budget": "The comparison of the margins and prices that were set on validation rows. "
        + VERDICT_DEFINITION,
        "reclaimed at a rate": "What the curve comes to where that share of the test rows violates. It compares "
        "estimators, not calibrations: the price or factor that leads there is known afterwards only. The marked "
        "points are those of the prices and margins that were set on validation rows.",
        "oracle": "Reserves exactly what will be used within the horizon; it sees the future, and bounds what never "
        "violates.",
        **(of_machines if machines else {}),
        "interval": f"{config.confidence:.0%} percentile interval of {config.draws} bootstrap resamples of {drawn}, "
        f"seed {config.seed}. Resamples in which a curve does not reach the rate are left out: the interval is "
        f"conditional on reaching it, and there is none where fewer than {LEAST_KNOWN:.0%} do. Of one "
        f"collection{' or machine' * machines} alone there is none.",
    }


EXPERIMENT: Final = Experiment(
    name="frontier",
    title="Frontier: reclaimed at equal violation",
    version=12,
    config=FrontierConfig,
    measure=measure,
    page=page,
    summary=lambda results: summary_table(results).without("interval", "compared with", "at the budget"),
    figures={"frontier": frontier_of_tasks, "frontier_machines": frontier_of_machines, "machine_day": machine_day},
    runs=runs,
    columns=COLUMNS,
)
