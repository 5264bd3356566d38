"""Sums of machines that a closed loop keeps as runs come and go: those that its runs add up to, after every step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reclaim.replay.closed_loop import simulate as loop_module
from reclaim.replay.closed_loop.foreseen import ByMachine
from reclaim.replay.closed_loop.records import (
    CAPACITY,
    FREE,
    FREED,
    LOWEST,
    NON_PRODUCTION,
    RANKS,
    RUNNING,
    UNPROMISED,
    LoopState,
)
from reclaim.replay.closed_loop.simulate import Scheduling, simulate
from reclaim.training.machines.estimator import BOUND, MachineEstimator
from reclaim.training.machines.terms import N_TERMS, T_BAND, T_HELD, T_LIMIT, T_SQUARES, T_USAGE
from tests.replay.small_cells import SmallCell, cells, workload

CLOSE = 1e-9
STEPS = ("settle", "schedule", "pass_slot")
"""After each of them sums are compared."""


def check_sums(loop: LoopState, estimator: MachineEstimator | None) -> None:
    """Compare what is kept of each machine with the sums of the runs on it."""
    runs = loop.runs
    for m, machine in enumerate(loop.machines):
        of = runs[(runs["state"] == RUNNING) & (runs["machine"] == m)]
        upper = of["band"] > NON_PRODUCTION
        assert machine["count"] == len(of)
        assert machine["lowest"] <= of["rank"].min(initial=machine["lowest"])
        least = of["reservation"]
        reserved = least.sum(axis=0)
        if estimator is not None:
            terms = loop.foreseen.terms[of["cursor"]].copy()
            terms[of["held"]] = 0.0
            terms[of["held"], :, T_HELD] = of["limit"][of["held"]]
            sums = terms.sum(axis=0)
            assert loop.foreseen.sums[m] == pytest.approx(sums, abs=CLOSE)
            foreseen = estimator.at(loop.foreseen.margins.tolist(), sums[None])[0]
            reserved = np.maximum(foreseen, of["use"].sum(axis=0))
            least = terms[..., T_HELD] + np.minimum(terms[..., T_USAGE], terms[..., T_LIMIT])
        kept = {
            "use": of["use"].sum(axis=0), "limit": of["limit"].sum(axis=0), "reserved": reserved,
            "production": of["limit"][upper].sum(axis=0), "least": least.sum(axis=0),
            "up_to_rank": np.stack([least[~upper & ((of["rank"] <= k) | (k == RANKS - 1))].sum(axis=0)
                                    for k in range(RANKS)]),
        }  # fmt: skip
        for name, expected in kept.items():
            assert machine[name] == pytest.approx(expected, abs=CLOSE), name
        rooms = loop.rooms[:, m]
        if not (machine["up"] and machine["open"]):
            assert (np.delete(rooms, LOWEST) == -np.inf).all()
            continue
        bounds = {CAPACITY: 0.0, FREE: reserved, UNPROMISED: kept["production"]}
        bounds |= {
            FREED + 2 * k: kept["least"] - kept["up_to_rank"][k] for k in range((len(rooms) - FREED) // 2)
        }  # fmt: skip
        for row, taken in bounds.items():
            left = machine["capacity"] - taken
            assert (rooms[row : row + 2] >= left - CLOSE).all()  # no machine that has room is passed over
            assert (rooms[row : row + 2] <= left + 1e-5 * machine["capacity"]).all()


def checked(step: Callable[..., None], estimator: MachineEstimator | None, seen: list[int]) -> Callable[..., None]:
    def run(loop: LoopState, *args: Any) -> None:
        step(loop, *args)
        check_sums(loop, estimator)
        seen.append(len(loop.runs))

    return run


@pytest.mark.parametrize("together", [False, True], ids=["tasks", "machines"])
@settings(max_examples=60, deadline=None)
@given(cell=cells(), gives_way=st.booleans(), seed=st.integers(0, 2**32 - 1))
def test_sums_of_machines_are_those_of_their_runs_after_every_step_of_every_slot(
    together: bool, cell: SmallCell, gives_way: bool, seed: int
) -> None:
    made, reserved = workload(
        *cell.tasks, slots=cell.slots, masks=cell.masks, machines=len(cell.on), predecessors=cell.predecessors
    )
    estimator, by = None, None
    if together:
        limit = made.tape["limit"]
        terms = np.random.default_rng(seed).random((len(limit), 2, N_TERMS)) * limit[..., None]
        terms[..., T_LIMIT], terms[..., T_SQUARES], terms[..., T_HELD] = limit, limit**2, 0.0
        terms[..., T_BAND:] = np.sort(terms[..., T_BAND:], axis=-1)
        estimator = MachineEstimator(BOUND, 3_600, (1.0, 1.0))
        by = ByMachine(terms, estimator, (0.5,))
        reserved = by.alone()
    seen: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        for step in STEPS:
            patch.setattr(loop_module, step, checked(getattr(loop_module, step), estimator, seen))
        how = Scheduling(checkpoint_s=0.0, gives_way=gives_way)
        simulate(made, cell.on, reserved, scheduling=how, by_machine=by)
    assert len(seen) == 1 + 3 * cell.slots
