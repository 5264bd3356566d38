"""The closed loop asks the estimators that are served, and where nothing is disturbed the tape has the same answers."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from reclaim.data.windows import CPU_MEAN, MEMORY_MAX, Windows
from reclaim.replay.closed_loop.live import Live
from reclaim.replay.closed_loop.records import AHEAD, CHANGE, MACHINE_STATE, PENDING, RUN, RUNNING, TAPE
from reclaim.replay.closed_loop.simulate import simulate
from reclaim.replay.closed_loop.workload import CellMachines, Workload
from reclaim.replay.open_loop.fold import run_base
from reclaim.replay.open_loop.history import current_reservations, previous_rows
from reclaim.training.estimators.base import Estimate, Estimator
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


class Diary(Estimator):
    """Notes the windows that it is fed, as (task, begin, end, scheduling), and reserves a tenth of the number noted."""

    def __init__(self) -> None:
        self.fed: list[tuple[int, int, int, int]] = []

    def update(self, slot: np.ndarray, windows: Windows) -> Estimate:
        """Answer each window with its number, over ten."""
        before = len(self.fed)
        times = (windows.start_us, windows.end_us, windows.scheduled_us)
        self.fed += zip(slot.tolist(), *((of // SLOT_US).tolist() for of in times), strict=True)
        numbers = np.arange(before + 1, len(self.fed) + 1)
        return Estimate(np.repeat(numbers[:, None] / 10, 2, axis=1), np.zeros((len(slot), 2), np.uint8))


def fed(
    windows: Windows, calls: list[tuple[int, dict[str, Any]]]
) -> tuple[list[list[tuple[int, int, int, int]]], list[float]]:
    """Return the windows that each call feeds, and what it leaves the last run reserved; times in slots.

    A call is of a moment, with what has changed of the last run until then. It has a window of each slot, from its
    begin on; the other run, of the first task, is never placed.
    """
    tape = np.zeros(len(windows), TAPE)
    starts = windows.task_starts()
    tape["from_us"] = windows.start_us - np.repeat(windows.start_us[starts[:-1]], np.diff(starts))
    tape["limit"] = windows.limit
    runs = np.zeros(2, RUN)
    runs["first"], runs["stop"], runs["cursor"] = starts[:-1], starts[1:], starts[:-1]
    runs["state"] = AHEAD
    estimator = Diary()
    live, noted, reserved = Live(estimator, windows, tape), [], []
    for at, changes in calls:
        for name, value in changes.items():
            runs[name][1] = value * SLOT_US if name.endswith("_us") else value
        before = len(estimator.fed)
        live.answer(runs, at * SLOT_US)
        noted.append(list(estimator.fed[before:]))
        reserved.append(float(runs["reservation"][1, 0]))
    assert not runs["reservation"][0].any()
    return noted, reserved


def test_a_run_that_begins_again_is_fed_again_at_its_times_of_now(
    make_windows: Callable[..., Windows],
) -> None:
    windows = make_windows([(0.1, 0.1)] * 3, [(0.1, 0.1)] * 4)
    first = int(windows.task_starts()[1])
    noted, reserved = fed(windows, [
        (50, {"state": RUNNING, "placed_us": 50, "cursor": first, "limit": 1.0}),
        (52, {"cursor": first + 2}),
        (53, {"cursor": first + 3, "limit": 0.2}),
        (54, {"state": PENDING}),
        (60, {"state": RUNNING, "placed_us": 60, "cursor": first, "limit": 1.0}),
        (61, {"cursor": first + 1}),
    ])  # fmt: skip
    assert noted == [[], [(1, 50, 51, 50), (1, 51, 52, 50)], [(1, 52, 53, 50)], [], [], [(1, 60, 61, 60)]]
    # the limit until a window has ended, then the answer to the last one that has, up to the limit of now
    assert reserved == [1.0, 0.2, 0.2, 0.2, 1.0, 0.4]


def test_batch_work_that_goes_on_from_a_checkpoint_is_fed_all_of_its_windows_again(
    make_windows: Callable[..., Windows],
) -> None:
    windows = make_windows([(0.1, 0.1)], [(0.1, 0.1)] * 4)
    first = int(windows.task_starts()[1])
    noted, _ = fed(windows, [
        (50, {"state": RUNNING, "placed_us": 50, "cursor": first, "limit": 1.0}),
        (60, {"placed_us": 60, "offset_us": 2, "cursor": first + 2}),
    ])  # fmt: skip
    assert noted == [[], [(1, 58, 59, 60), (1, 59, 60, 60)]]  # as if it had begun at 58


def test_a_service_that_comes_back_is_fed_no_window_that_it_missed(make_windows: Callable[..., Windows]) -> None:
    windows = make_windows([(0.1, 0.1)], [(0.1, 0.1)] * 9)
    first = int(windows.task_starts()[1])
    service = {"state": RUNNING, "service": True, "arrival_us": 50, "limit": 1.0}
    noted, reserved = fed(windows, [
        (51, {**service, "placed_us": 51, "cursor": first + 1}),
        (53, {"cursor": first + 3}),
        (56, {"placed_us": 56, "cursor": first + 6}),
        (57, {"cursor": first + 7}),
    ])  # fmt: skip
    # by the clock from 50 on: not the window before 51, nor those between 53 and 56
    assert noted == [[], [(1, 51, 52, 51), (1, 52, 53, 51)], [], [(1, 56, 57, 56)]]
    assert reserved == [1.0, 0.2, 1.0, 0.3]


def test_a_run_from_before_the_period_was_scheduled_when_the_record_says(make_windows: Callable[..., Windows]) -> None:
    windows = make_windows([(0.1, 0.1)], [(0.1, 0.1)] * 4)
    windows.scheduled_us[:] = 7 * SLOT_US
    first = int(windows.task_starts()[1])
    noted, _ = fed(windows, [
        (50, {"state": RUNNING, "placed_us": 50, "carried": True, "cursor": first, "limit": 1.0}),
        (51, {"cursor": first + 1}),
        (60, {"placed_us": 60, "carried": False, "cursor": first}),
        (61, {"cursor": first + 1}),
    ])  # fmt: skip
    assert noted == [[], [(1, 50, 51, 7)], [], [(1, 60, 61, 60)]]
