"""Compaction experiment (EuroSys'15, Figure 10): the fewest machines that hold the workload, and the risk of that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from reclaim.data.errors import ConfigError
from reclaim.data.schema import RESOURCES
from reclaim.replay.closed_loop.constraints import Constraints
from reclaim.replay.closed_loop.placement import POLICIES
from reclaim.replay.closed_loop.workload import machines_at
from reclaim.replay.experiment import (
    ORACLE,
    REFERENCE,
    Experiment,
    Measured,
    Source,
)
from reclaim.replay.experiments.compaction.checkpoint import (
    HANDFUL,
    Checkpoint,
    check_times,
    checkpoint_times,
    take_checkpoint,
)
from reclaim.replay.experiments.compaction.contenders import Key
from reclaim.replay.experiments.compaction.figures import machines_needed
from reclaim.replay.experiments.compaction.packed import PackedMoments, set_on_packed, validation_moments
from reclaim.replay.experiments.compaction.packing import LOOK_BELOW, MOST_CLONES, PENDING_SHARE, Foreseen
from reclaim.replay.experiments.compaction.page import (
    CHANCE,
    COLUMNS,
    SAME_SHARE,
    page,
    runs,
    summary_table,
)
from reclaim.replay.experiments.compaction.trials import Trial, compact
from reclaim.replay.open_loop.estimates import LIMIT, Estimates, estimate_all
from reclaim.replay.open_loop.machines import BY_MACHINE_DEFINITION, MachineContenders
from reclaim.replay.open_loop.period import period_facts
from reclaim.replay.open_loop.scoring import per_resource
from reclaim.replay.settings import ReplayConfig
from reclaim.training.margins.violation import violates

PERCENTILE: Final = 90
"""Percentile of the machines needed in the trials: with the mean the workload would not fit in many orders."""


@dataclass(frozen=True)
class CompactionConfig(ReplayConfig):
    """Settings of the compaction."""

    checkpoints: int = 3
    """Moments of the test period, spread over it, at 14:00 where it has that hour."""
    at_us: tuple[int, ...] = ()
    """The moments themselves, in µs on the trace's clock, instead of those."""
    trials: int = 11
    """Orders in which machines are removed at each checkpoint, each drawn by a seed of its own."""
    policy: str = "hybrid"
    """Rule that picks one of the machines with room for a task; one of ``placement.POLICIES``."""
    production_by_limit: bool = True
    """Places production by its limits, as Borg does: on no machine do these sum to more than the capacity. Otherwise
    all tasks are placed only by what is reserved."""
    packed_moments: int = 48
    """Moments of the validation period, a horizon apart, that are packed to set the margins of contenders by machine.
    With 0 they are set on the machines of the trace."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.packed_moments < 0:
            raise ConfigError(f"packed_moments must be at least 0, got {self.packed_moments}")
        for name in ("checkpoints", "trials"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if twice := sorted(time for time, times in Counter(self.at_us).items() if times > 1):
            raise ConfigError(f"at_us must be different moments, got {', '.join(map(str, twice))} more than once")
        if self.policy not in POLICIES:
            raise ConfigError(f"policy must be one of {', '.join(POLICIES)}, got {self.policy}")


def measure(source: Source, config: CompactionConfig) -> Measured:
    """Compact the cell at every checkpoint, for every estimator at every margin.

    Raises
    ------
    ConfigError
        The trace has no machines, no task runs or no machine takes work at a checkpoint, there are more
        checkpoints than slots, or no number of clones holds the workload.
    HistoryTooShortError
        The validation or the test period is shorter than the horizon, or a named moment is later than the last horizon.
    """
    machines_at(source.dataset, 0)  # a trace without machines is refused before anything is estimated
    estimates = estimate_all(source, config)
    constraints = Constraints.read(source.dataset)
    monday_us = int(source.features.manifest["config"]["monday_s"]) * 1_000_000
    times = list(config.at_us) or checkpoint_times(estimates.period, config.checkpoints, config.horizon_s, monday_us)
    check_times(estimates.period, times, config.horizon_s)
    compacted, facts = [], []
    with source.timed("machines"):
        contenders = MachineContenders.set_on_validation(source, estimates, config)
    with source.timed("pack"):
        contenders, packed = _set_on_packed(source, estimates, constraints, contenders, config)
    taken = (take_checkpoint(source, estimates, constraints, at, config.horizon_s, contenders) for at in times)
    with (
        source.timed("compaction"),
        source.engine.pool() as pool,
        closing(pool.each(_compacted, ((checkpoint, config) for checkpoint in taken))) as results_of,
    ):
        done = tqdm(results_of, "compacting", len(times), unit="checkpoint", disable=None)
        for time_us, (summary, of) in zip(times, done, strict=True):
            compacted.append(summary)
            facts.append(of | {"hours": (time_us - estimates.period.slots.first_us) / 3.6e9})
    results = {
        "dataset": period_facts(estimates.period),
        "checkpoints": facts,
        "packed": packed,
        "estimators": _estimators(source, estimates, contenders, compacted),
        "trials": config.trials,
        "horizon_s": config.horizon_s,
        "policy": config.policy,
    }
    return Measured(results, definitions(config))


def _compacted(job: tuple[Checkpoint, CompactionConfig]) -> tuple[dict[Key, dict[str, Any]], dict[str, Any]]:
    """Compact the cell at one checkpoint; return the results by contender, and the facts of the checkpoint."""
    checkpoint, config = job
    production = int(checkpoint.workload.production.sum())
    checkpoint = _placed_by(checkpoint, config)
    clones, trials = compact(checkpoint, count=config.trials, policy=config.policy, seed=config.seed)
    limits = checkpoint.workload.limit.sum(axis=0)
    return summarise(checkpoint, trials), {
        "time_us": checkpoint.time_us,
        "tasks": len(checkpoint.workload),
        "production": production,
        "machines": len(checkpoint.machines),
        "clones": clones,
        "too_large": checkpoint.too_large,
        "picky": int(checkpoint.workload.picky.sum()),
        "constrained": int((checkpoint.workload.constraint_set > 0).sum()),
        "limit_share": per_resource(limits / checkpoint.machines.capacity.sum(axis=0)),
        "limit_known": _counts(_limit_known(checkpoint).sum(axis=0)),
    }


def _set_on_packed(
    source: Source,
    estimates: Estimates,
    constraints: Constraints,
    contenders: MachineContenders,
    config: CompactionConfig,
) -> tuple[MachineContenders, dict[str, Any] | None]:
    """Return the contenders with margins set on packed machines, and how many moments were packed and left out, why.

    Without a moment that can be packed the contenders are as they were. The counts are None where none was asked for.
    With them are the margins of which none keeps its budget there, and whether there are so few machines that not one
    may pass at the aggressive budget.
    """
    names = (*contenders.sums, *contenders.machines)
    if not (names and config.packed_moments):
        return contenders, None
    moments, left_out = validation_moments(source, estimates, constraints, config.horizon_s, config.packed_moments)
    asked = len(moments) + left_out.total()
    counts: dict[str, Any] = {
        "asked": asked,
        "packed": len(moments),
        "left_out": left_out,
        "not_kept": [],
        "few": False,
    }
    if moments:
        machines = len(moments) * len(moments[0].machines)
        counts["few"] = machines * config.budgets.aggressive < 1
        placed = [_placed_by(at, config) for at in moments]
        with source.engine.pool() as pool:
            packed = PackedMoments(estimates, placed, config.policy, config.seed, pool.each)
            steps = set_on_packed(contenders, packed)
            *_, contenders = tqdm(steps, "packing", len(names), unit="contender", disable=None)
        reason = f"{MOST_CLONES} copies of the cell do not hold the tasks, for some estimators only"
        left_out += Counter({reason: len(packed.not_held)})
        counts["not_kept"] = packed.not_kept
    return contenders, counts


def _placed_by(checkpoint: Checkpoint, config: CompactionConfig) -> Checkpoint:
    """Return the checkpoint with production where it is placed by its limits, and none where it is not."""
    if config.production_by_limit:
        return checkpoint
    nothing = np.zeros_like(checkpoint.workload.production)
    return replace(checkpoint, workload=replace(checkpoint.workload, production=nothing))


def summarise(checkpoint: Checkpoint, trials: Mapping[Key, list[Trial]]) -> dict[Key, dict[str, Any]]:
    """Return the results of a checkpoint's trials by contender; ``LIMIT`` is one of them."""
    most = checkpoint.within_limits.max(axis=1)
    known = _limit_known(checkpoint)
    beyond = {
        key: known & violates(most, of)  # (n, R) each
        for key in trials
        if not isinstance(of := checkpoint.reserved[key], Foreseen)
    }
    return {
        key: _counted(checkpoint, trials[key], trials[LIMIT, "none"])
        | _failed(beyond.get(key), beyond.get((REFERENCE, key[1])), known.sum(axis=0))
        for key in trials
    }


def _limit_known(checkpoint: Checkpoint) -> NDArray[np.bool_]:
    """Return which tasks have a known limit above 0; shape (n, n_resources)."""
    known: NDArray[np.bool_] = checkpoint.workload.limit > 0
    return known


def _failed(
    beyond: NDArray[np.bool_] | None, of_reference: NDArray[np.bool_] | None, known: NDArray[np.int64]
) -> dict[str, Any]:
    """Return share and number of the tasks beyond their reservation, and the numbers that only one of two fails.

    The share is of tasks with a ``known`` limit, None without any. ``beyond_alone`` is [the contender's, the
    reference's] at the same margin, None without a reference. All are None where no task has a reservation of its own.
    """
    if beyond is None:
        return {"beyond": dict.fromkeys(RESOURCES), "beyond_tasks": dict.fromkeys(RESOURCES), "beyond_alone": None}
    alone = {}
    if of_reference is not None:
        pairs = ((beyond & ~of_reference).sum(axis=0), (of_reference & ~beyond).sum(axis=0))
        alone = {r: [int(mine), int(its)] for r, mine, its in zip(RESOURCES, *pairs, strict=True)}
    tasks = beyond.sum(axis=0)
    return {
        "beyond": {r: float(n / of) if of else None for r, n, of in zip(RESOURCES, tasks, known, strict=True)},
        "beyond_tasks": _counts(tasks),
        "beyond_alone": alone or None,
    }


def _counted(checkpoint: Checkpoint, trials: list[Trial], without: list[Trial]) -> dict[str, Any]:
    """Return the results of a contender's trials; ``without`` are the trials of ``LIMIT``."""
    needed, of_limit = (float(np.percentile([t.machines for t in of], PERCENTILE)) for of in (trials, without))
    cell = len(checkpoint.machines)
    counts = [t.machines for t in trials]
    return {
        "machines": {"value": needed, "low": min(counts), "high": max(counts)},
        "share": {"value": needed / cell, "low": min(counts) / cell, "high": max(counts) / cell},
        "saved_share": 1 - needed / of_limit,
        "additional_share": of_limit / needed - 1,
        "over": _spread([t.over for t in trials]),
        "used": _spread([t.used for t in trials]),
        "passed": _spread([t.passed for t in trials]),
        "pending": max(t.pending for t in trials),
        "trials": counts,
    }


def _spread(values: list[NDArray[np.float64]]) -> dict[str, dict[str, float]]:
    """Return mean, minimum and maximum of the trials' values, shape (n_resources,) each, by resource."""
    of = np.stack(values)
    return {
        r: {"value": float(v.mean()), "low": float(v.min()), "high": float(v.max())}
        for r, v in zip(RESOURCES, of.T, strict=True)
    }


def _estimators(
    source: Source, estimates: Estimates, contenders: MachineContenders, compacted: list[dict[Key, dict[str, Any]]]
) -> list[dict[str, Any]]:
    """Return every estimator's results over all checkpoints, and at each of them."""
    kinds = {name: source.kind(name) for name in estimates.answers}
    kinds |= contenders.kinds | {LIMIT: LIMIT, ORACLE: ORACLE}
    return [
        {
            "name": name,
            "kind": kind,
            "results": {
                margin: _over_checkpoints([at[of, margin] for at in compacted])
                for of, margin in compacted[0]
                if of == name
            },
        }
        for name, kind in kinds.items()
    ]


def _over_checkpoints(at: list[dict[str, Any]]) -> dict[str, Any]:
    """Return means over the checkpoints with minimum and maximum of all trials; and each checkpoint's results."""
    saved = {key: float(np.mean([one[key] for one in at])) for key in ("saved_share", "additional_share")}
    counted = {key: _joined([one[key] for one in at]) for key in ("machines", "share")}
    used = {key: {r: _joined([one[key][r] for one in at]) for r in RESOURCES} for key in ("over", "used", "passed")}
    shares = {r: [share for one in at if (share := one["beyond"][r]) is not None] for r in RESOURCES}
    beyond = {r: float(np.mean(of)) if of else None for r, of in shares.items()}
    counts = {r: [one["beyond_tasks"][r] for one in at] for r in RESOURCES}
    tasks = {r: None if None in of else sum(of) for r, of in counts.items()}
    pairs = [one["beyond_alone"] for one in at]
    alone = None if None in pairs else {r: [sum(p[r][i] for p in pairs) for i in range(2)] for r in RESOURCES}
    failed = {"beyond": beyond, "beyond_tasks": tasks, "beyond_alone": alone}
    return counted | saved | used | failed | {"checkpoints": at}


def _joined(spreads: list[dict[str, float]]) -> dict[str, float]:
    return {
        "value": float(np.mean([s["value"] for s in spreads])),
        "low": min(s["low"] for s in spreads),
        "high": max(s["high"] for s in spreads),
    }


def _counts(values: NDArray[np.int64]) -> dict[str, int]:
    return {r: int(n) for r, n in zip(RESOURCES, values, strict=True)}


def definitions(config: CompactionConfig) -> dict[str, str]:
    """Return what the numbers of the results mean."""
    return {
        "machines needed": (
            "All tasks that run at a checkpoint are packed from scratch onto the machines that are left, while "
            f"machines are removed in a random order. The result is the {PERCENTILE}th percentile of {config.trials} "
            "orders, of its own at each checkpoint and the same ones for every estimator and margin; over several "
            "checkpoints, their mean. Error bars show the least and the most that any trial needed. (EuroSys'15, "
            "section 5.1.)"
        ),
        "searched by bisection": (
            f"The number found fits and the {LOOK_BELOW} numbers below it do not. Packing by rules is not monotone: of "
            "still fewer machines some number might fit, as it might in the paper's method."
        ),
        "rules of the packing": (
            "Priorities from high to low, large tasks first; of the machines with room, the one that the policy "
            f"({config.policy}) likes best. "
            + (
                "Production (tiers prod and mon) is placed by limit: on no machine do its limits sum to more than the "
                "capacity. The reservations of all tasks sum to no more than the capacity either. "
                if config.production_by_limit
                else "All tasks are placed by what is reserved, production too; it sums to no more than the capacity. "
            )
            + "An estimator of machines reserves for all tasks on a machine and the one to be placed together. "
            "Placement constraints and the most tasks of a job on one machine hold; for jobs of more tasks "
            "than half the cell has machines they are preferences. A bound on the tasks behind one switch is not kept."
        ),
        "picky tasks": (
            f"Up to {PENDING_SHARE:.1%} of the tasks may go pending where no more than {HANDFUL} machines of the whole "
            "cell could take them. A task larger than every machine that it may run on is left out for all."
        ),
        "copies of the cell": (
            "Where the cell is too small for its own tasks under their limits, as any cell is that lives off reclaimed "
            "resources, machines are removed from several copies of it; shares are of the one cell."
        ),
        "reservation": (
            "The one that a task has at the checkpoint; a task's first window begins under its limit. Without "
            "reclamation the limit is reserved for all. The oracle reserves exactly what will be used within the "
            "horizon."
        ),
        "machines out of memory": (
            "Of the machines left, the share on which the memory that their tasks really used in some five-minute "
            f"slot of the next {config.horizon_s} s exceeds the capacity: each task's largest memory within the slot, "
            "summed. Tasks that start later are not among them."
        ),
        "sum of tasks; learned machine": BY_MACHINE_DEFINITION
        + (
            f" Here they keep them on the machines that the same rules pack, each under its own margin, at up to "
            f"{config.packed_moments} moments of the validation period."
            if config.packed_moments
            else ""
        ),
        "machines beyond": (
            "Of the machines left, the share on which the tasks together, each up to its limit, use more within the "
            "horizon than is reserved for them: for their sum, or by the estimator of machines. A machine that is not "
            "full has room beyond that."
        ),
        "machines over CPU": (
            "The same for CPU: the sum of each task's 90th percentile within the slot, capped at its limit. Tasks "
            "there are throttled, none dies."
        ),
        "tasks beyond their reservation": (
            "The share of the tasks that use more within the horizon, up to their limit, than was reserved for them at "
            "the checkpoint. What they take is at first what is reserved for others on the machine and not used, and "
            "what no task fitted into; where that is not enough the machine runs out. A task whose limit is not known, "
            "or 0, is placed as if it asked for nothing; no reservation of it could hold, so it does not count here."
        ),
        "risks no more": (
            f"Measured by `{REFERENCE}` at the same margin, for CPU and for memory. Of the tasks beyond their "
            f"reservation only those count that one of the two fails and the other does not: no more than {CHANCE:g} "
            "times the square root of their number apart, they may differ by chance. Of the machines, by no more than "
            f"{100 * SAME_SHARE:g} % of those left. What keeps a budget of machines is judged by machines alone."
        ),
        "used": "What is so used of the capacity of all machines left, the mean over the slots of the horizon.",
        "saved": "The share of the machines needed without reclamation that is not needed.",
        "additional": (
            "What Figure 10 of the paper shows: how many machines more, as a share of those needed with reclamation, "
            "the same workload needs without it."
        ),
    }


EXPERIMENT: Final = Experiment(
    name="compaction",
    title="Compaction: how few machines hold the workload",
    version=13,
    config=CompactionConfig,
    measure=measure,
    page=page,
    summary=lambda results: summary_table(results).of((0, 1, 2, 4, 7)),
    figures={"machines_needed": machines_needed},
    runs=runs,
    columns=COLUMNS,
)
