"""The margins experiment in the closed loop: a cell run under each margin of chosen estimators, and in turn."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from reclaim.data.schema import RESOURCES
from reclaim.replay.cell import SEQUENCE, segment_slots
from reclaim.replay.closedloop import Outcome, Scheduling, simulate
from reclaim.replay.closedloop_state import MACHINE, OWN_LIMIT, PREEMPTED
from reclaim.replay.folded import LIMIT, Folded
from reclaim.replay.kinds import LEARNED, ORACLE, STATISTICAL, Source
from reclaim.replay.openloop import in_force, oracle
from reclaim.replay.outcome import over_time, summary
from reclaim.replay.workload import Machines, NoMachinesError, Workload, machines_of, workload_of
from reclaim.training.estimators.margin import MARGIN_NAMES

BINS: Final = 200
"""Points of a line in the figure over time, at most; more are not seen."""
IN_TURN: Final = "sequence"
"""The run in which the margins take turns, week by week."""
_THREADS: Final = 2
"""Cells run at once: each holds no more than its tasks, and the reservations are shared."""


def run_cells(
    source: Source, folded: Folded, how: Scheduling, chosen: Sequence[str], orders: int = 1
) -> dict[str, Any]:
    """Run the cell under every margin of chosen estimators, and under the sequence of them.

    Parameters
    ----------
    source : Source
    folded : Folded
        Of the same dataset.
    how : Scheduling
    chosen : sequence of str
        Names of estimators; the limit and the oracle are run beside them.
    orders : int
        How often each is run, with another seed of ``how`` each time; what is returned is the mean of every number.

    Returns
    -------
    dict
        What ``results.json`` holds under ``closed_loop``; only ``notes`` where the trace has no machines.
    """
    slots = folded.cell.slots
    try:
        machines = machines_of(source.dataset, slots.first_us, slots.first_us + slots.count * slots.slot_s * 1_000_000)
    except NoMachinesError as error:
        return {"notes": [str(error)], "estimators": []}
    workload = workload_of(source, folded.cell, machines)
    segments = list(zip(SEQUENCE, segment_slots(slots), strict=True))
    turns = np.concatenate([np.full(b - a, MARGIN_NAMES.index(m), np.int8) for m, (a, b) in segments])
    names = [LIMIT, *(name for name in chosen if name != LIMIT), ORACLE]
    kinds = {LIMIT: LIMIT, ORACLE: ORACLE} | {
        name: LEARNED if name in source.bundles else STATISTICAL for name in chosen
    }
    estimators = []
    for name in tqdm(names, desc="closed loop", unit="estimator", disable=None if source.progress else True):
        started = time.perf_counter()
        margins, held = _held(name, folded, workload)
        plans = {m: np.full(slots.count, k, np.int8) for k, m in enumerate(margins)}
        if len(margins) > 1:
            plans[IN_TURN] = turns
        seeds = [replace(how, seed=how.seed + k) for k in range(orders)]
        with ThreadPoolExecutor(_THREADS) as pool:
            begun = {
                m: [pool.submit(_run, workload, machines, held, plan, s, segments) for s in seeds]
                for m, plan in plans.items()
            }
            ran = {m: [future.result() for future in of] for m, of in begun.items()}
        under = {m: of for m, of in ran.items() if m != IN_TURN}
        first = ran.get(IN_TURN) or next(iter(ran.values()))
        estimators.append(
            {
                "name": name,
                "kind": kinds[name],
                "runs": {m: mean([one["summary"] for one in of]) for m, of in under.items()},
                "kills_by_order": {m: [one["summary"]["oom_kills"] for one in of] for m, of in under.items()},
                "sequence": mean([one["weeks"] for one in ran[IN_TURN]]) if IN_TURN in ran else None,
                "over_time": mean([one["over_time"] for one in first]),
            }
        )
        source.seconds[f"closed_loop/{name}"] = time.perf_counter() - started
    return {
        "notes": [],
        "machines": len(machines),
        "runs": len(workload.runs),
        "runs_from_before": int(workload.runs["carried"].sum()),
        "orders": orders,
        "segments": [
            {"margin": m, "start_hours": a * slots.slot_s / 3600, "end_hours": b * slots.slot_s / 3600}
            for m, (a, b) in segments
        ],
        "length_hours": slots.count * slots.slot_s / 3600,
        "estimators": estimators,
    }


def mean(values: Sequence[Any]) -> Any:
    """Return the mean of numbers, lists and mappings of one shape, number by number; None where one of them is None."""
    one = values[0]
    if isinstance(one, Mapping):
        return {key: mean([value[key] for value in values]) for key in one}
    if isinstance(one, list):
        return [mean(list(of)) for of in zip(*values, strict=True)]
    if isinstance(one, str):
        return one
    return None if any(value is None for value in values) else sum(values) / len(values)


def most_reclaiming(folded: Folded, names: Sequence[str], count: int) -> list[str]:
    """Return the estimators that reclaimed most under the medium margin on the validation rows, resources alike."""
    reclaimed = {n: np.nanmean(folded.calibrations[n].reclaimed["medium"]) for n in names if n in folded.calibrations}
    return sorted(reclaimed, key=lambda n: -reclaimed[n])[:count]


def _held(name: str, folded: Folded, workload: Workload) -> tuple[list[str], NDArray[np.float64]]:
    """Return the margins, and what is in force under each as a window of the tape begins; (n_margins, n_rows, R)."""
    history = folded.history
    reservations = dict({"none": oracle(history).reservation} if name == ORACLE else folded.reservations(name))
    margins = list(reservations)
    held = np.empty((len(margins), len(workload.row), len(RESOURCES)))
    for k, margin in enumerate(margins):  # one at a time, each let go: they are the largest arrays of all
        held[k] = np.nan_to_num(in_force(reservations.pop(margin), history)[workload.row], copy=False)
    return margins, held


def _run(
    workload: Workload, machines: Machines, held: NDArray[np.float64], plan: NDArray[np.int8], how: Scheduling,
    segments: Sequence[tuple[str, tuple[int, int]]],
) -> dict[str, Any]:  # fmt: skip
    """Run the cell once, and return what is kept of it: its numbers, its parts, and how it went over time."""
    outcome = simulate(workload, machines, held, plan, how)
    return {
        "summary": summary(outcome), "weeks": _weeks(outcome, segments), "over_time": over_time(outcome, BINS),
    }  # fmt: skip


def _weeks(outcome: Outcome, segments: Sequence[tuple[str, tuple[int, int]]]) -> list[dict[str, Any]]:
    """Return what each segment of the sequence hosted and cost."""
    ticks = outcome.ticks
    weeks = []
    for margin, (a, b) in segments:
        part = ticks[a:b]
        days = float(part["running"].sum()) * outcome.workload.slot_s / 86_400
        kills = part["kills"].sum(axis=0)
        out_of_memory = int(kills[OWN_LIMIT] + kills[MACHINE])
        limit, capacity = part["limit"].sum(axis=0), part["capacity"].sum(axis=0)
        weeks.append(
            {
                "margin": margin,
                "task_days": days,
                "oom_kills": out_of_memory,
                "oom_kills_per_1000_task_days": 1000 * out_of_memory / days if days else None,
                "preempted_per_1000_task_days": 1000 * float(kills[PREEMPTED]) / days if days else None,
                "waiting_tasks": float(part["pending"].sum(axis=1).mean()) if b > a else None,
                **{
                    f"{key}_{resource}": float(part[of][:, r].sum() / whole[r]) if whole[r] > 0 else None
                    for r, resource in enumerate(RESOURCES)
                    for key, of, whole in (
                        ("in_reclaimed", "in_reclaimed", limit), ("granted", "limit", capacity),
                        ("reserved", "reserved", capacity), ("utilisation", "use", capacity),
                    )
                },
            }
        )  # fmt: skip
    return weeks
