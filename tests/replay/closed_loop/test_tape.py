"""Usage, request and bound of a run as its tape plays: the windows of now, and no others."""

from __future__ import annotations

import numpy as np
import pytest

from reclaim.replay.closed_loop.records import DONE, PENDING, PRODUCTION, RUNNING
from tests.replay.small_cells import SLOT_US, Task, killed, machines, run, states

USE = [(0.11, 0.21), (0.12, 0.22), (0.13, 0.23), (0.14, 0.24)]
LIMIT = [(0.71, 0.81), (0.72, 0.82), (0.73, 0.83), (0.74, 0.84)]
HELD = [(0.41, 0.51), (0.42, 0.52), (0.43, 0.53), (0.44, 0.54)]
"""Of four windows, all different."""


def test_in_every_slot_usage_limit_and_reservation_are_those_of_that_window() -> None:
    ticks = run(Task(USE, LIMIT, reserved=HELD, carried=True), slots=4).ticks
    assert ticks["use"] == pytest.approx(np.array(USE))
    assert ticks["limit"] == pytest.approx(np.array(LIMIT))
    assert ticks["reserved"] == pytest.approx(np.array(HELD))


def test_between_two_ticks_the_window_is_the_one_that_has_begun() -> None:
    ticks = run(Task(USE, LIMIT, reserved=HELD, at=0.5), slots=5).ticks
    # placed at 0.5: at ticks 1 to 4 it is 0.5 to 3.5 slots along, in its windows 0 to 3, and at the first still young
    assert ticks["use"][1:] == pytest.approx(np.array(USE))
    assert ticks["reserved"][1:] == pytest.approx(np.array([LIMIT[0], *HELD[1:]]))


def test_a_reservation_follows_a_limit_that_falls_below_it() -> None:
    falls = Task([(0.1, 0.1)] * 4, [(0.8, 0.8), (0.8, 0.5), (0.4, 0.5), (0.8, 0.8)], reserved=(0.6, 0.6), carried=True)
    ticks = run(falls, slots=4).ticks
    assert ticks["reserved"] == pytest.approx(np.array([(0.6, 0.6), (0.6, 0.5), (0.4, 0.5), (0.6, 0.6)]))


def test_memory_used_above_the_limit_is_reserved_and_cpu_is_not() -> None:
    above = Task([(0.7, 0.7)] * 4, (0.5, 0.5), reserved=(0.2, 0.2), carried=True)
    for memory, placed in ((0.3, 0), (0.4, -1)):  # next to the 0.7 that it uses, rather than the 0.5 of its limit
        outcome = run(above, Task([(0.1, 0.1)] * 4, (0.5, memory)), slots=3)
        assert outcome.runs["first_placed_us"].tolist() == [0, placed]
        assert outcome.ticks["reserved"][0] == pytest.approx(
            np.array([0.5 + 0.5 * (placed == 0), 0.7 + 0.3 * (placed == 0)])
        )


NOTHING = (0.0, 0.0)


@pytest.mark.parametrize("carried", [False, True])
def test_what_begins_again_plays_its_tape_from_the_beginning(carried: bool) -> None:
    away = machines((1.0, 1.0), changes=[(2.5, 0, False), (3.5, 0, True)])
    outcome = run(Task(USE, LIMIT, reserved=HELD, carried=carried), on=away, slots=9)
    # stopped at 2.5 in its third window; placed again at tick 4, after the cell was looked at; at tick 5 in its second
    first = HELD[0] if carried else LIMIT[0]
    assert killed(outcome) == [(0, "machine_gone")]
    assert outcome.ticks["use"] == pytest.approx(np.array([*USE[:3], NOTHING, NOTHING, *USE[1:], NOTHING]))
    assert outcome.ticks["limit"] == pytest.approx(np.array([*LIMIT[:3], NOTHING, NOTHING, *LIMIT[1:], NOTHING]))
    reserved = [first, *HELD[1:3], NOTHING, NOTHING, *HELD[1:], NOTHING]
    assert outcome.ticks["reserved"] == pytest.approx(np.array(reserved))
    assert outcome.runs["lost_us"].tolist() == [2.5 * SLOT_US]
    assert outcome.runs["ended_us"].tolist() == [8 * SLOT_US]


def test_what_goes_back_to_a_checkpoint_plays_its_tape_from_there() -> None:
    away = machines((1.0, 1.0), changes=[(2.5, 0, False), (3.5, 0, True)])
    outcome = run(Task(USE, LIMIT, reserved=HELD), on=away, slots=9, checkpoint_s=300.0)
    assert outcome.ticks["use"][4:] == pytest.approx(np.array([NOTHING, USE[3], NOTHING, NOTHING, NOTHING]))
    early = machines((1.0, 1.0), changes=[(2, 0, False), (3.5, 0, True)])
    outcome = run(Task(USE, LIMIT, reserved=HELD), on=early, slots=9, checkpoint_s=500.0)
    # 600 s done, 500 of them safe: at tick 5 it has done 800 s
    assert outcome.ticks["use"][4:] == pytest.approx(np.array([NOTHING, USE[2], USE[3], NOTHING, NOTHING]))
    assert outcome.ticks["reserved"][5:7] == pytest.approx(np.array(HELD[2:]))
    assert outcome.runs["ended_us"].tolist() == [4 * SLOT_US + 700_000_000]


def test_a_run_from_before_that_was_stopped_asks_for_its_limit_and_no_longer_for_its_reservation() -> None:
    away = machines((1.0, 1.0), changes=[(0.5, 0, False), (0.75, 0, True)])
    outcome = run(
        Task([(0.1, 0.1)] * 4, (0.6, 0.6), reserved=(0.2, 0.2), carried=True),
        Task([(0.1, 0.1)] * 2, (0.7, 0.7), at=0.8),
        on=away, slots=5,
    )  # fmt: skip
    # 0.2 next to 0.7 would fit at tick 1; the other one ends at 2.8
    assert outcome.runs["placed_us"].tolist() == [3 * SLOT_US, 0.8 * SLOT_US]


def test_a_run_from_before_is_placed_by_its_reservation_but_production_by_its_limit() -> None:
    before = Task([(0.1, 0.1)] * 4, (0.6, 0.6), reserved=(0.2, 0.2), carried=True)
    production = Task([(0.1, 0.1)] * 4, (0.6, 0.6), reserved=(0.2, 0.2), carried=True, band=PRODUCTION, rank=1)
    assert states(run(before, before, slots=2)) == [RUNNING, RUNNING]
    assert states(run(production, production, slots=2)) == [RUNNING, PENDING]  # 0.6 + 0.6 of production's limits


@pytest.mark.parametrize(
    ("limits", "placed"),
    [
        # submitted at 0.5, and there is room for 0.5 from tick 2 on, where it is 1.5 slots along its tape
        ([(0.3, 0.3), (0.8, 0.8), (0.8, 0.8), (0.3, 0.3)], 4),
        ([(0.8, 0.8), (0.3, 0.3), (0.8, 0.8), (0.8, 0.8)], 2),
    ],
)
def test_a_service_that_is_placed_late_asks_for_the_limit_of_the_window_of_now(
    limits: list[tuple[float, float]], placed: int
) -> None:
    long = Task([(0.1, 0.1)] * 9, (0.5, 0.5), band=PRODUCTION, rank=3)
    brief = Task([(0.1, 0.1)] * 2, (0.5, 0.5), band=PRODUCTION, rank=3)
    outcome = run(long, brief, Task(USE, limits, at=0.5, band=PRODUCTION, rank=2), slots=6)
    assert outcome.runs["first_placed_us"].tolist() == [0, 0, placed * SLOT_US]
    assert outcome.ticks["use"][placed + 1, 0] == pytest.approx(0.1 + USE[placed][0] if placed < 4 else 0.1)


@pytest.mark.parametrize(
    ("limits", "placed"),
    [
        # two slots are safe; when it is tried at tick 4 another one holds 0.5, until 5.6
        ([(0.3, 0.3), (0.3, 0.3), (0.8, 0.8), (0.8, 0.8)], 6),
        ([(0.8, 0.8), (0.8, 0.8), (0.3, 0.3), (0.3, 0.3)], 4),
    ],
)
def test_batch_work_that_goes_on_asks_for_the_limit_of_the_window_at_which_it_goes_on(
    limits: list[tuple[float, float]], placed: int
) -> None:
    away = machines((1.0, 1.0), changes=[(2.5, 0, False), (3.5, 0, True)])
    outcome = run(
        Task([(0.1, 0.1)] * 4, limits),
        Task([(0.1, 0.1)] * 2, (0.5, 0.5), at=3.6, rank=5),
        on=away, slots=10, checkpoint_s=600.0,
    )  # fmt: skip
    assert outcome.runs["placed_us"].tolist() == [placed * SLOT_US, 3.6 * SLOT_US]
    assert outcome.runs["ended_us"].tolist() == [(placed + 2) * SLOT_US, 5.6 * SLOT_US]
    assert states(outcome) == [DONE, DONE]


def test_a_run_from_before_that_waits_is_tried_for_its_reservation() -> None:
    outcome = run(
        Task([(0.1, 0.1)] * 9, (0.5, 0.5), rank=2, carried=True),
        Task([(0.1, 0.1)] * 2, (0.4, 0.4), rank=2, carried=True),
        Task([(0.1, 0.1)] * 9, (0.6, 0.6), reserved=(0.2, 0.2), rank=1, carried=True),
        slots=4,
    )
    assert outcome.runs["first_placed_us"].tolist() == [0, 0, 2 * SLOT_US]  # into the 0.5 that is free from then on


def test_a_service_placed_in_the_middle_of_its_tape_holds_its_limit_for_300_s() -> None:
    outcome = run(
        Task([(0.1, 0.1)] * 2, (0.8, 0.8), at=0.25, band=PRODUCTION, rank=1),
        Task([(0.1, 0.1)] * 4, (0.8, 0.8), reserved=(0.2, 0.2), at=0.75, after=0, band=PRODUCTION, rank=1),
        slots=5,
    )
    # placed at 2.25, when the first one ends; at tick 3 it is 225 s old, and in its third window
    assert outcome.runs["first_placed_us"].tolist() == [0.25 * SLOT_US, 2.25 * SLOT_US]
    assert outcome.ticks["reserved"][3:, 0].tolist() == pytest.approx([0.8, 0.2])
