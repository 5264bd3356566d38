"""What must hold in a closed loop whatever happens: nothing is lost or run twice, and a seed decides all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reclaim.replay.closedloop_state import (
    AHEAD,
    DONE,
    MACHINE,
    MACHINE_GONE,
    OWN_LIMIT,
    PENDING,
    PREEMPTED,
    RUNNING,
)
from reclaim.replay.outcome import balance
from reclaim.replay.workload import Machines
from tests.replay.small_cells import SLOT_US, cells, run


@settings(max_examples=150, deadline=None)
@given(cells(), st.sampled_from([0.0, 400.0]))
def test_nothing_is_lost_or_run_twice_and_no_machine_gives_more_than_it_has(
    cell: tuple[Any, Machines, int], checkpoint_s: float
) -> None:
    tasks, on, slots = cell
    outcome = run(*tasks, on=on, slots=slots, checkpoint_s=checkpoint_s)
    runs, ticks = outcome.runs, outcome.ticks
    assert runs["ran_us"].sum() == outcome.machines["busy_us"].sum()  # counted by tasks, and by machines
    assert set(runs["state"].tolist()) <= {DONE, RUNNING, PENDING, AHEAD}
    on_machines: list[int] = []
    for m, machine in enumerate(outcome.machines):
        here, i = [], int(machine["head"])
        while i >= 0:
            here.append(i)
            i = int(runs["next"][i])
        assert all(runs["machine"][i] == m and runs["state"][i] == RUNNING for i in here)
        assert machine["count"] == len(here)
        turns = [(runs["rank"][i], -runs["placed_us"][i], -i) for i in here]
        assert turns == sorted(turns)  # the order in which they would be preempted
        assert runs["use"][here, 1].sum() <= machine["capacity"][1] * (1 + 1e-6) or not here
        limits = runs["limit"][here][runs["band"][here] > 0].sum(axis=0)
        assert (limits <= machine["capacity"] * (1 + 1e-6)).all() or not (runs["band"][here] > 0).any()
        on_machines += here
    assert sorted(on_machines) == np.flatnonzero(runs["state"] == RUNNING).tolist()
    assert (ticks["use"] <= ticks["capacity"] * (1 + 1e-9)).all()
    assert runs["kills"].sum() == len(outcome.kills) == ticks["kills"].sum()
    work = balance(outcome)
    assert work["asked_h"] == pytest.approx(work["done_h"] + work["left_h"])
    assert work["executed_h"] == pytest.approx(work["done_h"] + work["lost_h"])
    assert work["due_h"] == pytest.approx(work["served_h"] + work["missed_h"])
    assert min(work.values()) >= 0
    lived = (runs["ran_us"] + runs["waited_us"])[runs["state"] != AHEAD]
    until = np.where(runs["state"] == DONE, runs["ended_us"], slots * SLOT_US)[runs["state"] != AHEAD]
    assert (lived == until - runs["arrival_us"][runs["state"] != AHEAD]).all()  # no run depends on another one here
    for kill in outcome.kills:
        assert kill["cause"] in (OWN_LIMIT, MACHINE, PREEMPTED, MACHINE_GONE)


@settings(max_examples=25, deadline=None)
@given(cells())
def test_the_same_seed_gives_the_same_outcome(cell: tuple[Any, Machines, int]) -> None:
    tasks, on, slots = cell
    a, b = (run(*tasks, on=on, slots=slots, seed=3, enough=1, checkpoint_s=450.0) for _ in range(2))
    assert a.runs.tobytes() == b.runs.tobytes()
    assert a.ticks.tobytes() == b.ticks.tobytes()
    assert a.kills.tobytes() == b.kills.tobytes()
