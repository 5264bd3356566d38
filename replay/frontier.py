"""The frontier experiment: what each estimator reclaims at every share of violations, task by task and on machines."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from reclaim.data.errors import ConfigError
from reclaim.data.schema import RESOURCES
from reclaim.replay import machine_peaks
from reclaim.replay.cell import Cell, period_facts
from reclaim.replay.curves import Curve, Grounds, draw_curve, ratio, report_curves
from reclaim.replay.fold import Bases
from reclaim.replay.folded import LIMIT, fold
from reclaim.replay.frontier_figures import frontier_of_machines, frontier_of_tasks
from reclaim.replay.frontier_page import AS_PUBLISHED, COLUMNS, judged, runs, says, sections
from reclaim.replay.kinds import LEARNED, STATISTICAL, Experiment, Measured, Source
from reclaim.replay.machine_peaks import MachinePeaks, judge_peaks, lay_out_machines
from reclaim.replay.openloop import window_seconds
from reclaim.replay.scoring import Bootstrap, number
from reclaim.replay.settings import ReplayConfig
from reclaim.replay.sweep import Guards, TaskRows
from reclaim.training.estimators.machine import PREDICTORS, Oracle

Floats = NDArray[np.float64]

MACHINE: Final = "machine"
"""Kind of a contender that predicts the peak of a machine and knows no reservation of a task."""
Curves = dict[str, dict[str, Curve]]
"""By resource, then by contender."""


@dataclass(frozen=True)
class FrontierConfig(ReplayConfig):
    """How the frontier is drawn: at the rates that ``budgets`` name, for the horizon ``horizon_s``."""

    predictors: tuple[str, ...] = ("borg_default", "nsigma5", "rc_p99", "max_n5_rc99", "machine_p100", "peak_max")
    """Predictors of whole machines, by their names in ``estimators.machine``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        known = [name for name, p in PREDICTORS.items() if not isinstance(p, Oracle) and name != LIMIT]
        unknown = sorted(set(self.predictors) - set(known))
        if unknown:
            raise ConfigError(f"predictors must be some of {', '.join(known)}, got {', '.join(unknown)}")


def measure(source: Source, config: FrontierConfig) -> Measured:
    """Sweep the margin of every estimator, and a factor of every predictor, over the test period.

    Raises
    ------
    HistoryTooShortError
        The validation or the test period is shorter than the horizon.
    """
    folded = fold(source, config)
    history, cell = folded.history, folded.cell
    how = Bootstrap(config.draws, config.seed, config.confidence)
    rates = (config.budgets.baseline, config.budgets.aggressive)
    guards, test, seconds = Guards.of(history.windows), cell.test, window_seconds(history.windows)
    rows = TaskRows.of(guards.take(test), history.target[test], seconds[test], cell.unit, len(cell.unseen_units))
    of_tasks = {name: Grounds.of(rows.totals()[..., r], rates, how) for r, name in enumerate(RESOURCES)}
    started = time.perf_counter()
    machines = _lay_out(cell, guards, config)
    of_machines = {name: Grounds.of(m.totals(), rates, how) for name, m in machines.items()}
    source.seconds["machines"] = time.perf_counter() - started
    task_curves: Curves = {name: {} for name in of_tasks}
    machine_curves: Curves = {name: {} for name in of_machines}
    points: dict[str, Any] = {}
    of_margins: dict[str, Any] = {}
    names = [name for name in folded.bases if name != LIMIT]
    for name in tqdm(names, desc="sweeping", unit="estimator", disable=None if source.progress else True):
        started = time.perf_counter()
        plans = _plans(folded.bases[name])
        sweeps = [rows.sweep(plan[test]) for plan in plans]
        held = folded.reservations(name)
        points[name] = {margin: _shares(rows.at(r[test]), of_tasks) for margin, r in held.items()}
        for r, (resource, grounds) in enumerate(of_tasks.items()):
            ours = [(violations[..., r], reclaimed[..., r]) for violations, reclaimed in sweeps]
            task_curves[resource][name] = draw_curve(ours, grounds)
        for resource, m in machines.items():
            machine_curves[resource][name] = draw_curve([m.sweep(plan) for plan in plans], of_machines[resource])
            of_margins.setdefault(name, {})[resource] = {k: judge_peaks(m.total(v), m, how) for k, v in held.items()}
        source.seconds[f"sweep/{name}"] = time.perf_counter() - started
    for resource, m in machines.items():
        for name, peak in m.predicted.items():
            machine_curves[resource][name] = draw_curve([m.sweep_peak(peak)], of_machines[resource])
            of_margins.setdefault(name, {})[resource] = {AS_PUBLISHED: judge_peaks(peak, m, how)}
    learned = list(source.bundles)
    kinds = {n: LEARNED if n in learned else STATISTICAL for n in names} | dict.fromkeys(config.predictors, MACHINE)
    results = {
        "dataset": period_facts(cell),
        "horizon_s": config.horizon_s,
        "rates": list(rates),
        "estimators": [{"name": name, "kind": kind} for name, kind in kinds.items()],
        "tasks": _side(task_curves, of_tasks, learned) | {"margins": points},
        "machines": _side(machine_curves, of_machines, learned)
        | {"machines": max(m.n_machines for m in machines.values()), "margins": _by_margin(of_margins)}
        if machines
        else None,
    }
    return Measured(results, definitions(config, machines=bool(machines)))


def _lay_out(cell: Cell, guards: Guards, config: FrontierConfig) -> dict[str, MachinePeaks]:
    """Return the machines by resource, where there are any."""
    predictors = {name: PREDICTORS[name] for name in config.predictors}
    horizon_s = config.horizon_s
    found = {name: lay_out_machines(cell, guards, r, horizon_s, predictors) for r, name in enumerate(RESOURCES)}
    return {name: machines for name, machines in found.items() if machines is not None}


def _plans(bases: Bases) -> list[Floats]:
    """Return the bare answers, those for the baseline first; one where both margins rest on the same."""
    baseline, aggressive = (bases[name].reservation for name in ("baseline", "aggressive"))
    return [baseline] if baseline is aggressive else [baseline, aggressive]


def _shares(totals: Floats, grounds: Mapping[str, Grounds]) -> dict[str, dict[str, float | None]]:
    """Return violation rate and reclaimed share, per resource, from sums of shape (n_units, 2, n_resources)."""
    violations, reclaimed = totals.sum(axis=0)
    return {
        resource: {
            "violation_rate": number(float(ratio(violations[r], g.count.sum()))),
            "reclaimed_share": number(float(ratio(reclaimed[r], g.granted.sum()))),
        }
        for r, (resource, g) in enumerate(grounds.items())
    }


def _side(curves: Curves, grounds: Mapping[str, Grounds], learned: Sequence[str]) -> dict[str, Any]:
    """Return what came of all contenders, of tasks or of machines."""
    reports = {resource: report_curves(curves[resource], g, learned) for resource, g in grounds.items()}
    names = dict.fromkeys(name for report in reports.values() for name in report)
    return {
        "oracle": {name: number(grounds[name].oracle_share) if name in grounds else None for name in RESOURCES},
        "count": {name: int(grounds[name].count.sum()) if name in grounds else 0 for name in RESOURCES},
        "contenders": {
            name: {resource: report[name] for resource, report in reports.items() if name in report} for name in names
        },
    }


def _by_margin(judged: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """Return by contender, margin and resource what stands by contender, resource and margin."""
    return {
        name: {
            margin: {resource: of[resource][margin] for resource in of}
            for margin in dict.fromkeys(margin for by_margin in of.values() for margin in by_margin)
        }
        for name, of in judged.items()
    }


def definitions(config: FrontierConfig, *, machines: bool) -> dict[str, str]:
    """Return what the results' words mean; those of machines where the trace has some."""
    of_machines = {
        **machine_peaks.DEFINITIONS,
        "predictors of machines": "Those of the EuroSys'21 study, with its parameters; their curve multiplies the peak "
        "they foresee, at most to the sum of the limits. They know the machine, not what each task would reserve.",
    }
    drawn = "whole collections" + (" (task-windows) or machines (peaks)" if machines else "")
    return {
        "violation rate": f"Share of task-windows of which the usage within the next {config.horizon_s} s passes the "
        "reservation: of CPU the largest 90th percentile of any window, capped at the limit; of memory the largest "
        "usage. A window counts where its whole horizon is known.",
        "reclaimed share": "Limit less reservation over limit, each task-window weighted by limit and duration.",
        "curve": "Every bare answer is multiplied with one factor after another, the same for all tasks, and guarded "
        "as it is served (jump, cap, start-up hold). Between two factors the curve is a straight line. A learned "
        "estimator has a bare answer for each budget, chosen on validation rows: the curve follows the one for "
        f"{config.budgets.baseline:.2%} below the geometric mean of the budgets, and the other above.",
        "reclaimed at a rate": "What the curve comes to where that share of the test rows violates. It compares "
        "estimators, not calibrations: the factor that leads there is known afterwards only. The marked points are "
        "those of the margins that were set on validation rows.",
        "oracle": "Reserves exactly what will be used within the horizon; it sees the future, and bounds what never "
        "violates.",
        **(of_machines if machines else {}),
        "interval": f"{config.confidence:.0%} percentile interval of {config.draws} bootstrap resamples of {drawn}, "
        f"seed {config.seed}. Resamples in which a curve does not reach the rate are left out: the interval is "
        "conditional on reaching it, and tells too little where many do not. Of one "
        f"collection{' or machine' * machines} alone there is none.",
    }


EXPERIMENT: Final = Experiment(
    name="frontier",
    title="Frontier: reclaimed at equal violation",
    version=3,
    config=FrontierConfig,
    measure=measure,
    says=says,
    sections=sections,
    figures={"frontier": frontier_of_tasks, "frontier_machines": frontier_of_machines},
    runs=runs,
    columns=COLUMNS,
    judged=judged,
)
