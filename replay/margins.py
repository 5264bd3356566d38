"""The margins experiment (EuroSys'15, Figure 12): every estimator at every margin, and all of them week by week."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from tqdm import tqdm

from reclaim.data.errors import ConfigError
from reclaim.data.schema import RESOURCES
from reclaim.features.targets import OOM_DEFINITION
from reclaim.replay.cell import period_facts
from reclaim.replay.closedloop import Scheduling
from reclaim.replay.figures import FIGURES
from reclaim.replay.folded import LIMIT, Folded, fold
from reclaim.replay.hosted import most_reclaiming, run_cells
from reclaim.replay.hosted_figures import cell_in_turn
from reclaim.replay.judging import cell_over_time, follow, judge, judge_fixed
from reclaim.replay.kinds import COMPARED, LEARNED, ONLINE, ORACLE, STATISTICAL, Experiment, Measured, Source
from reclaim.replay.margins_page import judged, says, sections
from reclaim.replay.margins_runs import COLUMNS, runs
from reclaim.replay.metrics import METRICS
from reclaim.replay.openloop import oracle
from reclaim.replay.outcome import DEFINITIONS
from reclaim.replay.paired import RECLAIMED, VIOLATION, Interval, Paired
from reclaim.replay.scoring import Bootstrap, number
from reclaim.replay.settings import ReplayConfig
from reclaim.replay.timeline import EVENT_DEFINITION, OVER_DEFINITION
from reclaim.replay.units import UnitSums, write_units
from reclaim.replay.workload import RUN_DEFINITION


@dataclass(frozen=True)
class MarginsConfig(ReplayConfig):
    """How the margins are replayed."""

    online: bool = True
    """Whether learned estimators are replayed a second time, under margins that follow the workload."""
    closed_loop: bool = True
    """Whether the cell is also run by the reservations, where the trace has machines: by those of the learned ones, of
    Borg's, and of the ``beside`` others that reclaim most on the validation rows."""
    beside: int = 2
    """How many those are."""
    orders: int = 3
    """How often the cell is run by each, its machines looked at in another order each time: kills are few, and where a
    task is placed is chance. What is shown is the mean."""
    scheduling: Scheduling = field(default_factory=Scheduling)
    """How the closed loop places tasks."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beside < 0:
            raise ConfigError(f"beside must be 0 or more, got {self.beside}")
        if self.orders < 1:
            raise ConfigError(f"orders must be at least 1, got {self.orders}")


def measure(source: Source, config: MarginsConfig) -> Measured:
    """Judge every estimator at every margin, and under the sequence of them.

    Margins are set on the validation rows, everything reported is measured on the test rows. ``units.parquet`` keeps
    the sums behind it.

    Raises
    ------
    HistoryTooShortError
        The validation or the test period is shorter than the horizon.
    """
    folded = fold(source, config)
    judged = list(_judged(folded, source, config))
    units = UnitSums(
        unit=np.unique(folded.history.windows.collection_id[folded.cell.test]),
        unseen=folded.cell.unseen_units,
        sums={(e["name"], margin): sums for e in judged for margin, sums in e.pop("units").items()},
    )
    results = {
        "dataset": period_facts(folded.cell),
        "timeline": cell_over_time(folded.cell),
        "estimators": judged,
        "against_best": against_best(judged, units, config),
    }
    definitions = _definitions(config)
    if config.closed_loop:
        chosen = _run_in_cells(folded, source, config)
        results["closed_loop"] = run_cells(source, folded, config.scheduling, chosen, config.orders)
        definitions |= {"run": RUN_DEFINITION, **DEFINITIONS}
    return Measured(results, definitions, lambda folder: write_units(units, folder))


def _judged(folded: Folded, source: Source, config: MarginsConfig) -> Iterator[dict[str, Any]]:
    cell, bundles = folded.cell, source.bundles
    bootstrap = Bootstrap(config.draws, config.seed, config.confidence)
    drawn = _drawn(config, list(bundles))
    quiet = None if source.progress else True
    for name, both in tqdm(folded.bases.items(), desc="judging", unit="estimator", disable=quiet):
        started = time.perf_counter()
        if name == LIMIT:
            yield judge_fixed(name, LIMIT, both["baseline"], cell, bootstrap=bootstrap)
        else:
            kind, made = LEARNED if name in bundles else STATISTICAL, folded.calibrations[name]
            held = folded.reservations(name)
            yield judge(name, kind, made, held, cell, bootstrap=bootstrap, drawn=name in drawn)
            if name in bundles and config.online:
                held = follow(both, cell, made.margins, config.budgets, config.horizon_s)
                yield judge(name + ONLINE, kind, None, held, cell, bootstrap=bootstrap, drawn=False)
        source.seconds[f"judge/{name}"] = time.perf_counter() - started
    yield judge_fixed(ORACLE, ORACLE, oracle(folded.history), cell, bootstrap=bootstrap)


def _run_in_cells(folded: Folded, source: Source, config: MarginsConfig) -> list[str]:
    """Return the estimators of the closed loop: learned, Borg's, and the best of the others by the validation rows."""
    others = [n for n in config.estimators if n not in (LIMIT, "borg")]
    mine = [*source.bundles, *(n for n in config.estimators if n == "borg")]
    return [*mine, *most_reclaiming(folded, others, config.beside)]


def _drawn(config: ReplayConfig, learned: Sequence[str]) -> list[str]:
    """Return the estimators of the figure over time: the learned ones and Borg's, or the first two there are."""
    others = [name for name in config.estimators if name != LIMIT]
    chosen = [*learned, *(name for name in others if name == "borg")]
    return chosen if len(chosen) > 1 else list(dict.fromkeys([*chosen, *others]))[:2]


def against_best(
    judged: Sequence[Mapping[str, Any]], units: UnitSums, config: ReplayConfig
) -> dict[str, dict[str, dict[str, Any]]]:
    """Return, by margin, estimator and resource, the paired difference to the best statistical other one."""
    kinds = {e["name"]: e["kind"] for e in judged if e["kind"] in COMPARED}
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for margin in dict.fromkeys(margin for name, margin in units.sums if name in kinds):
        sums = {name: units.sums[name, margin] for name in kinds}
        paired = Paired(sums, draws=config.draws, seed=config.seed, confidence=config.confidence)
        statistical = [name for name, kind in kinds.items() if kind == STATISTICAL]
        for name in kinds:
            for r, resource in enumerate(RESOURCES):
                opponent = paired.best_against(name, statistical, r)
                if opponent is not None:
                    difference = paired.difference(name, opponent, r)
                    found.setdefault(margin, {}).setdefault(name, {})[resource] = {
                        "against": opponent,
                        "verdict": difference.verdict,
                        RECLAIMED: _interval(difference.reclaimed),
                        VIOLATION: _interval(difference.violation),
                    }
    return found


def _interval(interval: Interval) -> dict[str, float | None]:
    return {"value": number(interval.value), "low": number(interval.low), "high": number(interval.high)}


def _definitions(config: ReplayConfig) -> dict[str, str]:
    budgets = config.budgets
    return {
        **{name: metric.meaning for name, metric in METRICS.items()},
        "what a reservation must cover": (
            f"Within the next {config.horizon_s} s: of CPU the largest 90th percentile of any window, capped at the "
            "limit; of memory the largest usage. Where the trace has neither, the mean of the window stands in."
        ),
        "margin": (
            "A share of the estimate that is added to it, per resource. It is the narrowest with which at most "
            f"{budgets.baseline:.3%} (baseline) or {budgets.aggressive:.3%} (aggressive) of the validation "
            "task-windows violate; medium reserves exactly half way between the two. Nothing is set on test rows."
        ),
        "online": (
            "Begins with the same margins on the first validation row and then follows the workload: as answers turn "
            "out violated or kept, each tier's margin moves so that the share violated stays at the budget. Unseen "
            "collections are among the tasks that it follows."
        ),
        "oracle": "Reserves exactly what will be used within the horizon; it sees the future, and bounds what never "
        "violates.",
        "would-be out-of-memory event": EVENT_DEFINITION,
        "task over its reservation": OVER_DEFINITION,
        "out-of-memory label of the features (not used in these numbers)": OOM_DEFINITION,
        "interval": (
            f"{config.confidence:.0%} percentile interval of {config.draws} bootstrap resamples of whole collections, "
            f"seed {config.seed}. Of one collection alone there is none."
        ),
        "difference between estimators": (
            "Both are resampled on the same collections, and subtracted. The best statistical one is, of those that do "
            "not violate more beyond the noise, the one that reclaims most. Better: one of reclaimed share and "
            "violation rate is, by its interval, and the other is not worse; more (less) of both: it reclaims more "
            "(less) and violates more (less), so that a margin, not the estimator, makes the difference."
        ),
        "age": "Time since the task's first window began: all that an estimator can have seen of it.",
    }


EXPERIMENT: Final = Experiment(
    name="margins",
    title="Margins: what could have been reclaimed",
    version=7,
    config=MarginsConfig,
    measure=measure,
    says=says,
    sections=sections,
    figures={**FIGURES, "cell_in_turn": cell_in_turn},
    runs=runs,
    columns=COLUMNS,
    judged=judged,
)
