"""Cells of the closed loop small enough to work out by hand, and random ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from reclaim.replay.closedloop import Outcome, Scheduling, simulate
from reclaim.replay.closedloop_state import (
    AHEAD,
    CAUSES,
    CHANGE,
    MACHINE_STATE,
    NON_PRODUCTION,
    RUN,
    TAPE,
)
from reclaim.replay.workload import Machines, Workload

SLOT_US = 300_000_000


@dataclass(frozen=True)
class Task:
    """A run for tests: one (cpu, memory) for each slot, a limit, and when it is submitted, in slots."""

    use: Sequence[tuple[float, float]]
    limit: tuple[float, float] = (0.5, 0.5)
    at: float = 0.0
    band: int = NON_PRODUCTION
    rank: int = 0
    held: tuple[float, float] | None = None
    carried: bool = False
    latency: bool = False
    mask: int = 0
    collection: int = 0
    per_machine: int = 0
    after: int = -1


def workload(*tasks: Task, slots: int = 10, masks: np.ndarray | None = None, machines: int = 1) -> tuple[Workload, Any]:
    """Return the workload of these runs and the reservations they are held to; the limit in their first slot."""
    lengths = [len(t.use) for t in tasks]
    tape = np.zeros(sum(lengths), TAPE)
    stops = np.cumsum(lengths)
    firsts = stops - lengths
    held = np.zeros((1, len(tape), 2))
    runs = np.zeros(len(tasks), RUN)
    for i, (t, a, b) in enumerate(zip(tasks, firsts, stops, strict=True)):
        tape["from_us"][a:b] = np.arange(b - a) * SLOT_US
        tape["use"][a:b], tape["limit"][a:b] = t.use, t.limit
        held[0, a:b] = t.held or t.limit
        if not t.carried:
            held[0, a] = t.limit
        run = runs[i]
        run["first"], run["stop"], run["cursor"], run["asked"] = a, b, a, t.limit
        run["arrival_us"], run["duration_us"] = int(t.at * SLOT_US), (b - a) * SLOT_US
        run["collection"], run["rank"], run["mask"], run["per_machine"] = t.collection, t.rank, t.mask, t.per_machine
        run["band"], run["service"], run["latency"] = t.band, t.band > NON_PRODUCTION, t.latency
        run["carried"], run["after"], run["then"] = t.carried, t.after, -1
        if t.after >= 0:
            runs[t.after]["then"] = i
        run["state"], run["machine"], run["next"], run["previous"] = AHEAD, -1, -1, -1
        run["first_placed_us"] = run["ready_us"] = -1
    made = Workload(
        runs=runs,
        tape=tape,
        row=np.arange(len(tape)),
        masks=np.ones((1, machines), np.bool_) if masks is None else masks,
        start_us=0,
        stop_us=slots * SLOT_US,
        slot_s=300,
        ends_out_of_memory=np.zeros(len(tasks), np.bool_),
    )
    assert (np.diff(runs["arrival_us"]) >= 0).all(), "tests give their tasks in the order of arrival"
    return made, held


def machines(*capacities: tuple[float, float], changes: Sequence[tuple[float, int, bool]] = ()) -> Machines:
    """Return machines in service from the start, and changes (slot, machine, up)."""
    state = np.zeros(len(capacities), MACHINE_STATE)
    state["capacity"], state["up"], state["open"], state["head"] = capacities, True, True, -1
    made = np.zeros(len(changes), CHANGE)
    for i, (at, machine, up) in enumerate(changes):
        made[i]["at_us"], made[i]["machine"], made[i]["up"], made[i]["open"] = int(at * SLOT_US), machine, up, up
        made[i]["capacity"] = capacities[machine]
    return Machines(np.arange(len(capacities)), state, made)


def run(*tasks: Task, on: Machines | None = None, slots: int = 10, **how: Any) -> Outcome:
    """Run tasks on machines, one of (1, 1) unless told."""
    on = on or machines((1.0, 1.0))
    masks = how.pop("masks", None)
    made, held = workload(*tasks, slots=slots, masks=masks, machines=len(on))
    return simulate(made, on, held, how=Scheduling(**{"checkpoint_s": 0.0, **how}))


def states(outcome: Outcome) -> list[int]:
    return [int(state) for state in outcome.runs["state"]]


def killed(outcome: Outcome) -> list[tuple[int, str]]:
    return [(int(k["run"]), CAUSES[k["cause"]]) for k in outcome.kills]


QUIET = [(0.1, 0.1)] * 4


@st.composite
def cells(draw: st.DrawFn) -> tuple[list[Task], Machines, int]:
    """Draw a crowded cell of up to 4 machines and 25 runs."""
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    n, m, slots = int(rng.integers(1, 26)), int(rng.integers(1, 5)), int(rng.integers(3, 15))
    tasks = []
    for at in np.sort(rng.uniform(0, slots, n)):
        band = int(rng.choice([0, 0, 0, 1, 2]))
        limit = rng.uniform(0.05, 0.7, 2)
        length = int(rng.integers(1, 12))
        use = limit * rng.uniform(0.1, 1.3, (length, 2))
        tasks.append(
            Task(
                use=[tuple(u) for u in use], limit=tuple(limit), at=0.0 if rng.random() < 0.3 else float(at),
                band=band, rank=int(rng.integers(0, 4)) + 4 * band, held=tuple(limit * rng.uniform(0.1, 1.0, 2)),
                latency=bool(rng.random() < 0.3), collection=int(rng.integers(0, 5)),
                per_machine=int(rng.choice([0, 0, 2])),
            )
        )  # fmt: skip
    tasks.sort(key=lambda t: t.at)
    changes = [(float(t), int(rng.integers(0, m)), bool(rng.random() < 0.6)) for t in np.sort(rng.uniform(0, slots, 3))]
    on = machines(*[tuple(rng.uniform(0.5, 1.5, 2)) for _ in range(m)], changes=changes)
    return tasks, on, slots
