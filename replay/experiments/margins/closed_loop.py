"""Runs the margins experiment in the closed loop: under each margin of an estimator, then with alternating margins."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from reclaim.data.schema import RESOURCES
from reclaim.replay.closed_loop.foreseen import ByMachine, Placing
from reclaim.replay.closed_loop.outcome import mean_of, over_time, summary
from reclaim.replay.closed_loop.records import MACHINE, OWN_LIMIT, PREEMPTED
from reclaim.replay.closed_loop.simulate import Outcome, Scheduling, simulate
from reclaim.replay.closed_loop.workload import CellMachines, NoMachinesError, Workload, machines_of, workload_of
from reclaim.replay.experiment import LEARNED, ONLINE, ORACLE, STATISTICAL, SUM_OF_TASKS, Source
from reclaim.replay.open_loop.estimates import LIMIT, Estimates
from reclaim.replay.open_loop.history import current_reservations, oracle
from reclaim.replay.open_loop.machines import MachineContenders
from reclaim.replay.open_loop.period import SEQUENCE, segment_slots
from reclaim.replay.settings import ReplayConfig
from reclaim.training.margins.margin import MARGIN_NAMES

BINS: Final = 200
"""Most points of a line in the figure over time."""
IN_TURN: Final = "sequence"
"""The run in which the margins alternate, week by week."""

_Job = tuple[str, str, NDArray[np.int8], Scheduling]
"""Name of an estimator and a margin, the place of the margin in each slot, and settings."""
_Ran = tuple[str, str, dict[str, Any], float]
"""Name and margin; summary of the run, that of each segment, and its course over time; and seconds taken."""


def run_cells(
    source: Source,
    estimates: Estimates,
    scheduling: Scheduling,
    chosen: Sequence[str],
    orders: int = 1,
    follow: Callable[[str], Mapping[str, NDArray[np.float64]]] | None = None,
    contenders: MachineContenders | None = None,
    horizon_s: int = ReplayConfig.horizon_s,
) -> dict[str, Any]:
    """Run the cell under every margin of chosen estimators, and under the sequence of them; sums without the sequence.

    Parameters
    ----------
    source : Source
    estimates : Estimates
        Of the same dataset.
    scheduling : Scheduling
    chosen : sequence of str
        Names of estimators, with ``ONLINE`` behind them for those that follow the workload; the limit and the oracle
        are run as well.
    orders : int
        Runs of each, with another seed of ``scheduling`` each time; every number returned is their mean.
    follow : callable or None
        Returns the reservations under each margin of a named estimator that follows the workload; shape
        (n, n_resources) each.
    contenders : MachineContenders or None
        Further ones, which keep budgets of machine peaks.
    horizon_s : int
        Time ahead for which machines are compared with their peaks.

    Returns
    -------
    dict
        The part ``closed_loop`` of ``results.json``; only ``notes`` where the trace has no machines.
    """
    slots = estimates.period.slots
    try:
        machines = machines_of(source.dataset, slots.first_us, slots.stop_us, estimates.period.share)
    except NoMachinesError as error:
        return {"notes": [str(error)], "estimators": []}
    workload = workload_of(source, estimates.period, machines)
    segments = list(zip(SEQUENCE, segment_slots(slots), strict=True))
    turns = np.concatenate([np.full(b - a, MARGIN_NAMES.index(m), np.int8) for m, (a, b) in segments])
    contenders = contenders or MachineContenders()
    names = [LIMIT, *(name for name in chosen if name != LIMIT), *contenders.in_a_loop, ORACLE]
    kinds = (
        {LIMIT: LIMIT, ORACLE: ORACLE}
        | contenders.in_a_loop
        | {name: LEARNED if name.removesuffix(ONLINE) in source.bundles else STATISTICAL for name in chosen}
    )

    budgets = contenders.budgets.by_margin
    placing = Placing(contenders, workload.row, tuple(budgets.values()))

    def calls() -> Iterator[tuple[Callable[[_Job], _Ran], _Job]]:
        for name in tqdm(names, desc="closed loop", unit="estimator", disable=None):
            placed, by_machine = placing.by_machine(name), None
            if placed is None:
                margins, reserved = _reservations(name, estimates, workload, follow, contenders)
            else:
                margins, (by_machine, reserved) = list(budgets), placed
            plans = {m: np.full(slots.count, k, np.int8) for k, m in enumerate(margins)}
            if len(margins) > 1 and kinds[name] != SUM_OF_TASKS:
                plans[IN_TURN] = turns
            run = partial(_run, workload, machines, reserved, segments, by_machine, horizon_s)
            for margin, plan in plans.items():
                for k in range(orders):
                    yield run, (name, margin, plan, replace(scheduling, seed=scheduling.seed + k))

    ran: dict[str, dict[str, list[dict[str, Any]]]] = {name: {} for name in names}
    with source.engine.pool() as pool, closing(pool.each_call(calls())) as results:
        for name, margin, one, seconds in results:
            ran[name].setdefault(margin, []).append(one)
            part = f"closed_loop/{name}"
            source.seconds[part] = source.seconds.get(part, 0.0) + seconds
    return {
        "notes": [],
        "machines": len(machines),
        "runs": len(workload.runs),
        "runs_from_before": int(workload.runs["carried"].sum()),
        "orders": orders,
        "segments": [
            {"margin": m, "start_hours": slots.hours_at(a), "end_hours": slots.hours_at(b)} for m, (a, b) in segments
        ],
        "length_hours": slots.hours_at(slots.count),
        "estimators": [_of_estimator(name, kinds[name], of) for name, of in ran.items()],
    }


def _of_estimator(name: str, kind: str, ran: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Return the results of an estimator from its runs under each margin, one of each order."""
    under = {m: of for m, of in ran.items() if m != IN_TURN}
    first = ran.get(IN_TURN) or next(iter(ran.values()))
    return {
        "name": name,
        "kind": kind,
        "runs": {m: mean_of([one["summary"] for one in of]) for m, of in under.items()},
        "kills_by_order": {m: [one["summary"]["oom_kills"] for one in of] for m, of in under.items()},
        "sequence": mean_of([one["weeks"] for one in ran[IN_TURN]]) if IN_TURN in ran else None,
        "over_time": mean_of([one["over_time"] for one in first]),
    }


def most_reclaiming(estimates: Estimates, names: Sequence[str], count: int) -> list[str]:
    """Return the ``count`` estimators that reclaim most under the medium margin on validation rows."""
    reclaimed = {
        n: np.nanmean(estimates.calibrations[n].reclaimed["medium"]) for n in names if n in estimates.calibrations
    }
    return sorted(reclaimed, key=lambda n: -reclaimed[n])[:count]


def _reservations(
    name: str,
    estimates: Estimates,
    workload: Workload,
    follow: Callable[[str], Mapping[str, NDArray[np.float64]]] | None,
    contenders: MachineContenders,
) -> tuple[list[str], NDArray[np.float64]]:
    """Return the margins, and under each the reservation current as each window begins; (n_margins, n_rows, R)."""
    history = estimates.history
    if name == ORACLE:
        reservations = {"none": oracle(history).reservation}
    elif name.endswith(ONLINE) and follow is not None:
        reservations = dict(follow(name.removesuffix(ONLINE)))
    elif name in contenders.kinds:
        reservations = contenders.reserved_by(name, estimates)
    else:
        reservations = dict(estimates.reservations(name))
    margins = list(reservations)
    reserved = np.empty((len(margins), len(workload.row), len(RESOURCES)))
    for k, margin in enumerate(margins):  # one at a time, each released: these are the largest arrays
        reserved[k] = np.nan_to_num(current_reservations(reservations.pop(margin), history)[workload.row], copy=False)
    return margins, reserved


def _run(
    workload: Workload, machines: CellMachines, reserved: NDArray[np.float64],
    segments: Sequence[tuple[str, tuple[int, int]]], by_machine: ByMachine | None, horizon_s: int, job: _Job,
) -> _Ran:  # fmt: skip
    """Run the cell once."""
    started = time.perf_counter()
    name, margin, plan, scheduling = job
    outcome = simulate(workload, machines, reserved, plan, scheduling, by_machine=by_machine, horizon_s=horizon_s)
    ran = {"summary": summary(outcome), "weeks": _weeks(outcome, segments), "over_time": over_time(outcome, BINS)}
    return name, margin, ran, time.perf_counter() - started


def _weeks(outcome: Outcome, segments: Sequence[tuple[str, tuple[int, int]]]) -> list[dict[str, Any]]:
    """Return the summary of each segment of the sequence."""
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
