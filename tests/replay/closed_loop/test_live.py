"""The closed loop asks the estimators that are served, and where nothing is disturbed the tape has the same answers."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from reclaim.data.windows import CPU_MEAN, MEMORY_MAX, Windows
from reclaim.replay.closed_loop.live import Live
from reclaim.replay.closed_loop.records import AHEAD, CHANGE, MACHINE_STATE, RUN, TAPE
from reclaim.replay.closed_loop.simulate import simulate
from reclaim.replay.closed_loop.workload import CellMachines, Workload
from reclaim.replay.open_loop.fold import run_base
from reclaim.replay.open_loop.history import current_reservations, previous_rows
from reclaim.training.estimators.base import Estimate
from reclaim.training.estimators.registry import build_estimator
from reclaim.training.margins.margin import Guarded, Margin

SLOT_US = 300_000_000
MARGIN = Margin("medium", (0.1, 0.05))


def lived(windows: Windows, *, slots: int) -> Workload:
    """Return the workload of tasks that each run once, submitted as their first window begins."""
    starts = windows.task_starts()
    first, stop = starts[:-1], starts[1:]
    tape = np.zeros(len(windows), TAPE)
    tape["from_us"] = windows.start_us - np.repeat(windows.start_us[first], stop - first)
    tape["use"], tape["limit"] = windows.usage[:, [CPU_MEAN, MEMORY_MAX]], windows.limit
    order = np.argsort(windows.start_us[first], kind="stable")
    runs = np.zeros(len(first), RUN)
    runs["first"], runs["stop"], runs["cursor"] = first, stop, first
    runs["arrival_us"], runs["duration_us"] = (
        windows.start_us[first],
        windows.end_us[stop - 1] - windows.start_us[first],
    )
    runs["first_limit"], runs["after"], runs["then"] = windows.limit[first], -1, -1
    runs["state"], runs["machine"], runs["next"], runs["previous"], runs["first_placed_us"] = AHEAD, -1, -1, -1, -1
    runs["ready_us"] = -1
    start_us = int(windows.start_us.min())
    return Workload(
        runs=runs[order], tape=tape, row=np.arange(len(tape)), demand=tape["use"].copy(),
        masks=np.ones((1, 2), np.bool_), start_us=start_us,
        stop_us=start_us + slots * SLOT_US, slot_s=300, ends_out_of_memory=np.zeros(len(first), np.bool_),
    )  # fmt: skip


def machines(capacity: float) -> CellMachines:
    state = np.zeros(2, MACHINE_STATE)
    state["capacity"], state["up"], state["open"], state["head"] = capacity, True, True, -1
    return CellMachines(np.arange(2), state, np.zeros(0, CHANGE))


@pytest.fixture
def windows(make_windows: Callable[..., Windows]) -> Windows:
    """Return eight tasks of 40 noisy windows that begin at different times."""
    rng = np.random.default_rng(4)
    tasks = [np.clip(rng.lognormal(-1.5, 0.5, (40, 2)), 0, 0.99).tolist() for _ in range(8)]
    made = make_windows(*tasks, first_slots=[0, 0, 1, 2, 3, 5, 8, 13])
    starts = made.task_starts()
    made.scheduled_us[:] = np.repeat(made.start_us[starts[:-1]], np.diff(starts))
    return made


def on_tape(name: str, windows: Windows) -> np.ndarray:
    bare = run_base(build_estimator(name), windows)
    guarded = Guarded(build_estimator("limit"), MARGIN).adjust(bare, windows)
    return in_force_of(guarded, windows)


def in_force_of(estimate: Estimate, windows: Windows) -> np.ndarray:
    class Past:
        """The two things of a history that tell what was in force."""

        def __init__(self) -> None:
            self.windows, self.previous = windows, previous_rows(windows)

    return current_reservations(estimate.reservation, Past())  # type: ignore[arg-type]  # a history in all that is asked of it


@pytest.mark.parametrize("name", ["borg", "percentile", "moving-max", "vpa"])
def test_undisturbed_tasks_are_reserved_the_same_to_the_bit_live_and_from_the_tape(name: str, windows: Windows) -> None:
    workload = lived(windows, slots=70)
    reserved = on_tape(name, windows)[None]
    taped = simulate(workload, machines(100.0), reserved)
    live = Live(Guarded(build_estimator(name), MARGIN), windows, workload.tape)
    lives = simulate(workload, machines(100.0), reserved, live=live)
    assert len(taped.kills) == 0
    assert (taped.ticks["reserved"] > 0).any()
    assert (taped.ticks["reserved"] < taped.ticks["limit"]).any()
    assert taped.ticks.tobytes() == lives.ticks.tobytes()
    assert taped.runs.tobytes() == lives.runs.tobytes()


def test_a_task_that_began_again_is_known_to_the_live_estimator(windows: Windows) -> None:
    workload = lived(windows, slots=70)
    reserved = on_tape("max-so-far", windows)[None]
    crowded = machines(1.6)
    live = Live(Guarded(build_estimator("max-so-far"), MARGIN), windows, workload.tape)
    outcome = simulate(workload, crowded, reserved, live=live)
    again = simulate(
        workload, crowded, reserved, live=Live(Guarded(build_estimator("max-so-far"), MARGIN), windows, workload.tape)
    )
    assert outcome.runs["waited_us"].sum() > 0  # it was crowded
    assert outcome.ticks.tobytes() == again.ticks.tobytes()


def test_no_window_is_fed_before_it_has_ended(windows: Windows) -> None:
    late = replace(windows, end_us=windows.end_us + 10 * SLOT_US)
    workload = lived(windows, slots=20)
    live = Live(Guarded(build_estimator("borg"), MARGIN), late, workload.tape)
    with pytest.raises(AssertionError, match="fed before it ended"):
        simulate(workload, machines(100.0), on_tape("borg", windows)[None], live=live)
