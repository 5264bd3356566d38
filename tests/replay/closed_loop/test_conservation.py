"""Rules of a closed loop that hold whatever happens: nothing is lost or run twice, and a seed decides all."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reclaim.replay.closed_loop.outcome import balance
from reclaim.replay.closed_loop.records import (
    AHEAD,
    BLOCKED,
    DONE,
    MACHINE,
    MACHINE_GONE,
    NON_PRODUCTION,
    OWN_LIMIT,
    PENDING,
    PREEMPTED,
    RANKS,
    RUNNING,
)
from reclaim.replay.closed_loop.simulate import Outcome
from tests.replay.small_cells import SmallCell, cells


@settings(max_examples=150, deadline=None)
@given(cells(), st.sampled_from([0.0, 400.0]))
def test_no_time_of_a_run_is_lost_or_counted_twice(cell: SmallCell, checkpoint_s: float) -> None:
    outcome = cell.run(checkpoint_s=checkpoint_s)
    runs, stop_us = outcome.runs, outcome.workload.stop_us
    assert set(runs["state"].tolist()) <= {DONE, RUNNING, PENDING, BLOCKED, AHEAD}
    for name in ("ran_us", "waited_us", "lost_us", "offset_us"):
        assert (runs[name] >= 0).all(), name
    came = runs["state"] > BLOCKED
    until = np.where(runs["state"] == DONE, runs["ended_us"], stop_us)
    assert ((runs["ran_us"] + runs["waited_us"]) == until - runs["ready_us"])[came].all()
    assert (runs["ready_us"] >= runs["arrival_us"])[came].all()
    assert (runs["ran_us"] + runs["waited_us"] == 0)[~came].all()
    placed = runs["first_placed_us"] >= 0
    assert (runs["ended_us"] >= runs["first_placed_us"])[placed & (runs["state"] == DONE)].all()
    batch, done = ~runs["service"], runs["state"] == DONE
    going_us = np.where(runs["state"] == RUNNING, stop_us - runs["placed_us"], 0)
    useful_us = np.where(done, runs["duration_us"], runs["offset_us"] + going_us)
    assert (runs["ran_us"] - runs["lost_us"] == useful_us)[batch & came].all()
    assert (runs["ended_us"] >= runs["arrival_us"] + runs["duration_us"])[done].all()
    assert (runs["lost_us"] == 0)[runs["service"]].all()
    by_clock_us = np.maximum(runs["arrival_us"] + runs["duration_us"], runs["ready_us"])
    assert (runs["ended_us"] == by_clock_us)[runs["service"] & done].all()
    assert (by_clock_us > stop_us)[runs["service"] & came & ~done].all()


@settings(max_examples=100, deadline=None)
@given(cells(), st.sampled_from([0.0, 400.0]))
def test_work_asked_for_is_work_done_or_left_and_what_was_executed_was_done_or_lost(
    cell: SmallCell, checkpoint_s: float
) -> None:
    outcome = cell.run(checkpoint_s=checkpoint_s)
    runs, ticks = outcome.runs, outcome.ticks
    assert runs["ran_us"].sum() == outcome.machines["busy_us"].sum()  # counted by tasks, and by machines
    work = balance(outcome)
    assert work["asked_h"] == pytest.approx(work["done_h"] + work["left_h"])
    assert work["executed_h"] == pytest.approx(work["done_h"] + work["lost_h"])
    assert work["due_h"] == pytest.approx(work["served_h"] + work["missed_h"])
    assert min(work.values()) >= 0
    assert ticks["ended"].sum() == (runs["state"] == DONE).sum()
    assert runs["kills"].sum() == len(outcome.kills) == ticks["kills"].sum()
    assert outcome.kills["lost_us"].sum() == runs["lost_us"].sum()
    assert (np.diff(outcome.kills["at_us"]) >= 0).all()
    assert set(outcome.kills["cause"].tolist()) <= {OWN_LIMIT, MACHINE, PREEMPTED, MACHINE_GONE}


@settings(max_examples=100, deadline=None)
@given(cells())
def test_runs_of_a_task_come_one_after_the_other(cell: SmallCell) -> None:
    runs = cell.run().runs
    follows = runs["after"] >= 0
    before = runs[runs["after"]]
    came = follows & (runs["state"] > BLOCKED)
    assert (before["state"] == DONE)[came].all()
    assert (runs["ready_us"] >= before["ended_us"])[came].all()
    assert (runs["first_placed_us"] >= before["ended_us"])[came & (runs["first_placed_us"] >= 0)].all()
    held = np.isin(runs["collection"], [waits for waits, _ in cell.predecessors])
    assert (before["state"] != DONE)[follows & ~held & (runs["state"] == BLOCKED)].all()
    assert (runs["first_placed_us"] < 0)[runs["state"] <= BLOCKED].all()


@settings(max_examples=100, deadline=None)
@given(cells())
def test_no_run_of_a_collection_is_placed_before_all_of_its_predecessors_have_ended(cell: SmallCell) -> None:
    runs = cell.run().runs
    for waits, predecessor in cell.predecessors:
        before = runs[runs["collection"] == predecessor]
        new = ~np.array([task.carried for task in cell.tasks])
        placed = runs[(runs["collection"] == waits) & (runs["first_placed_us"] >= 0) & new]
        if len(placed) and len(before):
            assert (before["state"] == DONE).all()
            assert placed["first_placed_us"].min() >= before["ended_us"].max()


@settings(max_examples=100, deadline=None)
@given(cells())
def test_no_machine_gives_more_than_it_has_and_its_sums_are_those_of_its_runs(cell: SmallCell) -> None:
    outcome = cell.run()
    runs = outcome.runs
    assert (outcome.ticks["use"] <= outcome.ticks["capacity"] * (1 + 1e-9)).all()
    on_machines: list[int] = []
    for m, machine in enumerate(outcome.machines):
        here = _chained(outcome, m)
        on_machines += here
        of = runs[here]
        assert (of["machine"] == m).all()
        assert (of["state"] == RUNNING).all()
        assert machine["count"] == len(here)
        assert machine["up"] or not here
        turns = [(of["rank"][k], -of["placed_us"][k], -i) for k, i in enumerate(here)]
        assert turns == sorted(turns)  # the order in which they would be preempted
        assert of["use"][:, 1].sum() <= machine["capacity"][1] * (1 + 1e-6)
        upper = of["band"] > NON_PRODUCTION
        reserved = of["limit"][upper].sum(axis=0) <= machine["capacity"] * (1 + 1e-6)
        assert reserved.all() or of["varies"][upper].any()  # a limit may grow where a task runs
        sums = {"use": of["use"], "limit": of["limit"], "reserved": of["reservation"], "production": of["limit"][upper]}
        for name, values in sums.items():
            assert machine[name] == pytest.approx(values.sum(axis=0), abs=1e-9), name
        for k in range(RANKS):
            lower = of["reservation"][~upper & (of["rank"] <= k)]
            assert machine["up_to_rank"][k] == pytest.approx(lower.sum(axis=0), abs=1e-9)
        assert machine["lowest"] <= of["rank"].min(initial=machine["lowest"])
        assert outcome.workload.masks[of["mask"], m].all()
        for run in of[of["per_machine"] > 0]:
            assert (of["collection"] == run["collection"]).sum() <= run["per_machine"]
    assert sorted(on_machines) == np.flatnonzero(runs["state"] == RUNNING).tolist()


def _chained(outcome: Outcome, m: int) -> list[int]:
    """Return the runs of a machine, in the order in which it chains them."""
    here, i = [], int(outcome.machines["head"][m])
    while i >= 0:
        here.append(i)
        i = int(outcome.runs["next"][i])
    return here


@settings(max_examples=25, deadline=None)
@given(cells())
def test_the_same_seed_gives_the_same_outcome(cell: SmallCell) -> None:
    a, b = (cell.run(seed=3, enough=1, checkpoint_s=450.0) for _ in range(2))
    assert a.runs.tobytes() == b.runs.tobytes()
    assert a.ticks.tobytes() == b.ticks.tobytes()
    assert a.kills.tobytes() == b.kills.tobytes()
