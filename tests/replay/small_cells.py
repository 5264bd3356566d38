"""Cells of the closed loop small enough to work out by hand, and random ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from reclaim.replay.closed_loop.records import (
    AHEAD,
    CAUSES,
    CHANGE,
    MACHINE_STATE,
    NON_PRODUCTION,
    RUN,
    TAPE,
)
from reclaim.replay.closed_loop.simulate import Outcome, Scheduling, simulate
from reclaim.replay.closed_loop.workload import CellMachines, Workload

SLOT_US = 300_000_000
Pair = tuple[float, float]
"""CPU and memory."""


@dataclass(frozen=True)
class Task:
    """A run for tests: one (cpu, memory) for each slot, a limit, and when it is submitted, in slots.

    ``limit`` and ``held`` are one for all slots, or one for each. ``after`` is the place among the tasks of the run
    that must have ended before.
    """

    use: Sequence[Pair]
    limit: Pair | Sequence[Pair] = (0.5, 0.5)
    at: float = 0.0
    band: int = NON_PRODUCTION
    rank: int = 0
    reserved: Pair | Sequence[Pair] | None = None
    carried: bool = False
    latency: bool = False
    mask: int = 0
    collection: int = 0
    per_machine: int = 0
    after: int = -1
    user: int = 0


def workload(
    *tasks: Task, slots: int = 10, masks: np.ndarray | None = None, machines: int = 1,
    predecessors: Sequence[tuple[int, int]] = (),
) -> tuple[Workload, Any]:  # fmt: skip
    """Return the workload of these runs and the reservations they are held to; the limit in their first slot."""
    lengths = [len(t.use) for t in tasks]
    tape = np.zeros(sum(lengths), TAPE)
    stops = np.cumsum(lengths)
    firsts = stops - lengths
    reserved = np.zeros((1, len(tape), 2))
    runs = np.zeros(len(tasks), RUN)
    runs["then"] = -1
    for i, (t, a, b) in enumerate(zip(tasks, firsts, stops, strict=True)):
        tape["from_us"][a:b] = np.arange(b - a) * SLOT_US
        tape["use"][a:b], tape["limit"][a:b] = t.use, t.limit
        reserved[0, a:b] = t.reserved or t.limit
        limits = tape["limit"][a:b]
        if not t.carried:
            reserved[0, a] = limits[0]
        run = runs[i]
        run["first"], run["stop"], run["cursor"], run["first_limit"] = a, b, a, limits[0]
        run["varies"] = (limits != limits[0]).any()
        run["arrival_us"], run["duration_us"] = int(t.at * SLOT_US), (b - a) * SLOT_US
        run["collection"], run["rank"], run["mask"], run["per_machine"] = t.collection, t.rank, t.mask, t.per_machine
        run["user"] = t.user
        run["band"], run["service"], run["latency"] = t.band, t.band > NON_PRODUCTION, t.latency
        run["carried"], run["after"] = t.carried, t.after
        if t.after >= 0:
            runs[t.after]["then"] = i
        run["state"], run["machine"], run["next"], run["previous"] = AHEAD, -1, -1, -1
        run["first_placed_us"] = run["ready_us"] = -1
    made = Workload(
        runs=runs,
        tape=tape,
        row=np.arange(len(tape)),
        demand=tape["use"].copy(),
        masks=np.ones((1, machines), np.bool_) if masks is None else masks,
        start_us=0,
        stop_us=slots * SLOT_US,
        slot_s=300,
        ends_out_of_memory=np.zeros(len(tasks), np.bool_),
        predecessors=np.array(predecessors, np.int64).reshape(-1, 2),
    )
    assert (np.diff(runs["arrival_us"]) >= 0).all(), "tests give their tasks in the order of arrival"
    return made, reserved


@dataclass(frozen=True)
class Change:
    """A machine from a slot on: in service or not, open to new work or not, with another capacity or as before."""

    at: float
    machine: int
    up: bool = True
    open: bool = True
    capacity: Pair | None = None


def machines(*capacities: Pair, changes: Sequence[Change | tuple[float, int, bool]] = ()) -> CellMachines:
    """Return machines in service from the start, and changes, in short (slot, machine, whether it is up and open)."""
    state = np.zeros(len(capacities), MACHINE_STATE)
    state["capacity"], state["up"], state["open"], state["head"] = capacities, True, True, -1
    made = np.zeros(len(changes), CHANGE)
    for i, given in enumerate(changes):
        change = given if isinstance(given, Change) else Change(*given, open=given[2])
        made[i]["at_us"], made[i]["machine"] = int(change.at * SLOT_US), change.machine
        made[i]["up"], made[i]["open"] = change.up, change.up and change.open
        made[i]["capacity"] = change.capacity or capacities[change.machine]
    return CellMachines(np.arange(len(capacities)), state, made)


def run(*tasks: Task, on: CellMachines | None = None, slots: int = 10, **how: Any) -> Outcome:
    """Run tasks on machines, by default on one of (1, 1)."""
    on = on or machines((1.0, 1.0))
    masks, predecessors = how.pop("masks", None), how.pop("predecessors", ())
    made, reserved = workload(*tasks, slots=slots, masks=masks, machines=len(on), predecessors=predecessors)
    return simulate(made, on, reserved, scheduling=Scheduling(**{"checkpoint_s": 0.0, **how}))


def states(outcome: Outcome) -> list[int]:
    return [int(state) for state in outcome.runs["state"]]


def killed(outcome: Outcome) -> list[tuple[int, str]]:
    return [(int(k["run"]), CAUSES[k["cause"]]) for k in outcome.kills]


QUIET = [(0.1, 0.1)] * 4


@dataclass(frozen=True)
class SmallCell:
    """A cell drawn at random: its runs in the order of their arrival, its machines, how long it is looked at."""

    tasks: list[Task]
    on: CellMachines
    slots: int
    masks: np.ndarray
    predecessors: Sequence[tuple[int, int]]

    def run(self, **how: Any) -> Outcome:
        """Return the outcome, scheduled by the given settings."""
        return run(*self.tasks, on=self.on, slots=self.slots, masks=self.masks, predecessors=self.predecessors, **how)


@st.composite
def cells(draw: st.DrawFn) -> SmallCell:
    """Draw a crowded cell of up to 4 machines and 40 runs.

    Some run from before, some limits change along the tape, some tasks run several times, one after the other, some may
    be on a few machines only, some collections start after others, and machines go, come, close and open.
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    n, m, slots = int(rng.integers(1, 26)), int(rng.integers(1, 5)), int(rng.integers(3, 15))
    masks = np.concatenate([np.ones((1, m), np.bool_), rng.random((2, m)) < 0.6])
    per_machine = rng.choice([0, 0, 2], 5)  # of each collection
    chains: list[list[Task]] = []
    for _ in range(n):
        band, collection = int(rng.choice([0, 0, 0, 1, 2])), int(rng.integers(0, 5))
        task = Task(
            use=(), band=band, rank=int(rng.integers(0, 4)) + int(rng.choice([0, 4 * band])), collection=collection,
            latency=bool(rng.random() < 0.3), mask=int(rng.choice([0, 0, 1, 2])),
            per_machine=int(per_machine[collection]),
        )  # fmt: skip
        lengths = rng.integers(1, 12, int(rng.choice([1, 1, 2, 3])))
        at = float(rng.choice([0.0, rng.uniform(0, slots)]))
        chains.append([])
        for length in lengths:
            carried = at == 0.0 and not chains[-1] and bool(rng.random() < 0.5)
            chains[-1].append(_drawn(replace(task, at=at, carried=carried), int(length), rng))
            # the next one is often submitted before this one, which may have waited, has ended
            at = min(at + length * rng.choice([0.0, 0.3, 1.0, 1.1]), slots + 0.5)
    tasks = [replace(t, after=k - 1) for chain in chains for k, t in enumerate(chain)]  # k: within its chain
    starts = np.repeat(np.cumsum([0, *(len(chain) for chain in chains)])[:-1], [len(chain) for chain in chains])
    order = np.argsort([t.at for t in tasks], kind="stable")
    place = np.argsort(order)
    tasks = [
        replace(tasks[i], after=int(place[starts[i] + tasks[i].after]) if tasks[i].after >= 0 else -1) for i in order
    ]
    changes = [
        Change(float(at), int(rng.integers(0, m)), bool(rng.random() < 0.7), bool(rng.random() < 0.7))
        for at in np.sort(rng.uniform(0, slots, 3))
    ]
    on = machines(*[tuple(rng.uniform(0.5, 1.5, 2)) for _ in range(m)], changes=changes)
    return SmallCell(tasks, on, slots, masks, [(1, 0), (4, 1)] if rng.random() < 0.5 else [])


def _drawn(task: Task, length: int, rng: np.random.Generator) -> Task:
    """Return it with usage, limits and reservations drawn at random, for a number of slots."""
    limit = np.broadcast_to(rng.uniform(0.05, 0.7, 2), (length, 2))
    if rng.random() < 0.3:
        limit = limit * rng.choice([0.5, 1.0, 1.5], (length, 1))
    use, reserved = limit * rng.uniform(0.1, 1.3, (length, 2)), limit * rng.uniform(0.1, 1.0, 2)
    return replace(task, use=_pairs(use), limit=_pairs(limit), reserved=_pairs(reserved))


def _pairs(values: np.ndarray) -> list[Pair]:
    return [(float(cpu), float(memory)) for cpu, memory in values]
