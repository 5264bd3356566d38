"""Margins of machines that follow: in the service as in a replay, to the bit; and each outcome counts once."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from reclaim.data.core.state import part_of
from reclaim.data.schema import RESOURCES
from reclaim.data.windows import MEMORY_MAX, MEMORY_MEAN, PAGE_CACHE, Windows, concatenate
from reclaim.features.fold.batch import FeatureState
from reclaim.serving.answers.encode import machine_margins
from reclaim.serving.answers.machine_fit import fit
from reclaim.serving.answers.machine_sums import sums_of
from reclaim.serving.answers.machines import explain_machine
from reclaim.serving.cell import machine_peaks
from reclaim.serving.cell.following import Following
from reclaim.serving.cell.machine_peaks import MachineMargins
from reclaim.serving.cell.task_record import key_of
from reclaim.serving.settings import ServingSettings
from reclaim.serving.wire.errors import parse_body
from reclaim.serving.wire.machine_schemas import FitAnswer, FitRequest
from reclaim.serving.wire.schemas import Units
from reclaim.training.bundle import Bundle, load_model
from reclaim.training.machines.curve import EXCEEDED, MachineCurve
from reclaim.training.machines.fit import MachineRows
from reclaim.training.machines.following import AT_ONCE, follow_all, times_of
from reclaim.training.machines.snapshots import lay_out_cell
from reclaim.training.machines.terms import S_BAND
from reclaim.training.margins.violation import violates
from tests.serving.cell_fixtures import Memory, W, assert_same_bits, fact_rows, windows_of
from tests.serving.kill_harness import made_up

SETTINGS = ServingSettings(clock="trace", stale_s=1e9, forget_s=1e9, ahead_s=1e9)
SLOTS = 40
HORIZON = 12
"""Slots of an hour."""
AN_HOUR, A_DAY = 3_600, 86_400
NARROW = MachineCurve(tuple(np.linspace(-0.5, 0.2, len(EXCEEDED)).tolist()))
"""The bound at exponents so small that many peaks of an hour pass it."""
NARROW_OF_A_DAY = MachineCurve(tuple(np.linspace(0.0, 1.0, len(EXCEEDED)).tolist()))
"""The same for peaks of a day."""


@pytest.fixture(scope="module")
def narrow(bundle: Bundle) -> Bundle:
    return replace(bundle, machines={AN_HOUR: (NARROW,) * len(RESOURCES), A_DAY: (NARROW_OF_A_DAY,) * len(RESOURCES)})


@cache
def history(tasks: int = 40, slots: int = SLOTS) -> Windows:
    """Return the windows of tasks that come and go on three machines, those of a slot in order of the tasks."""
    parts = []
    for pieces in made_up(tasks=tasks, slots=slots, pieces=1).slots:
        part = concatenate(pieces)
        order = np.lexsort((part.instance_index, part.collection_id))
        parts.append(part.take(order))
    windows = concatenate(parts)
    return replace(windows, machine_id=(windows.collection_id + windows.instance_index) % 3 + 7)


def slots_of(windows: Windows) -> list[Windows]:
    return [windows.take(windows.start_us == at * W) for at in range(int(windows.start_us.max()) // W + 1)]


def margins(memory: Memory) -> MachineMargins:
    return memory.tracker.prices.machines[AN_HOUR]


def state(memory: Memory, horizon_s: int = AN_HOUR) -> dict[str, NDArray[Any]]:
    return part_of(memory.following.memory(), f"machines.{horizon_s}.")


@pytest.mark.parametrize(
    ("parts", "empty", "inside"), [(1, 0, 0), (3, 0, 0), (1, HORIZON, 0), (1, HORIZON + 1, 0), (1, 0, 4), (3, 0, 2)]
)
def test_machines_are_followed_in_the_service_as_in_a_replay_to_the_bit(
    narrow: Bundle, parts: int, empty: int, inside: int
) -> None:
    compare_with_a_replay(narrow, history(), AN_HOUR, parts, empty, inside)


def test_tasks_that_move_between_machines_are_followed_as_in_a_replay_to_the_bit(narrow: Bundle) -> None:
    windows = history()
    moved = windows.start_us // W // 9 * (windows.collection_id % 4 == 0)
    windows = replace(windows, machine_id=(windows.machine_id - 7 + moved) % 3 + 7)
    compare_with_a_replay(narrow, windows, AN_HOUR, 2, 0, 0)


def test_answers_are_told_apart_where_the_numbers_in_their_marks_begin_again(
    narrow: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_peaks, "_NUMBERS", 16)  # more than wait
    compare_with_a_replay(narrow, history(), AN_HOUR, 2, 0, 0)


@pytest.mark.parametrize(("parts", "empty", "inside"), [(1, 0, 0), (2, 300, 4)])
def test_machines_are_followed_a_day_ahead_as_in_a_replay_to_the_bit(
    narrow: Bundle, parts: int, empty: int, inside: int
) -> None:
    compare_with_a_replay(narrow, history(tasks=12, slots=700), A_DAY, parts, empty, inside)


def test_the_second_budget_holds_a_day_ahead_unless_it_is_switched_off(narrow: Bundle) -> None:
    lowered = []
    for at_once in (AT_ONCE, 1.0):
        memory = Memory(SETTINGS, narrow)
        memory.tracker.promote(memory.scorer, Following(memory.scorer, at_once=at_once))
        for of_slot in slots_of(history(tasks=12, slots=400)):
            memory.write(of_slot)
        lowered.append(memory.tracker.prices.machines[A_DAY].lowered)
    assert (lowered[0] < 1).any()
    assert (lowered[1] == 1).all()


def compare_with_a_replay(
    bundle: Bundle, windows: Windows, horizon_s: int, parts: int, empty: int, inside: int
) -> None:
    if inside:  # alloc instances
        windows = replace(windows, in_alloc=windows.collection_id % inside == 0)
    slots = windows.start_us // W  # in which one machine stands empty
    windows = windows.take((windows.machine_id != 7) | (slots < 10) | (slots >= 10 + empty))
    memory = Memory(SETTINGS, bundle)
    horizon, step = times_of(horizon_s, W // 1_000_000)
    held: dict[tuple[int, int], NDArray[np.float64]] = {}
    by_slot = slots_of(windows)
    for at, of_slot in enumerate(by_slot):
        for some in np.array_split(np.arange(len(of_slot)), parts):
            memory.write(of_slot.take(some))
        found = state(memory, horizon_s)
        for k, answer in enumerate(found["ring.answer"].tolist()):
            if (answer - 1) * step == at - 2:  # of the slot that was closed just now
                ids = found["machine.id"].tolist()
                held |= {(m, at - 2): found["machine.held"][p, k].copy() for p, m in enumerate(ids)}

    windows = windows.take(~windows.in_alloc)
    order = np.lexsort((windows.end_us, windows.instance_index, windows.collection_id))
    slot = np.unique(key_of(windows), axis=0, return_inverse=True)[1]
    x = FeatureState(SETTINGS.cell).advance(slot.reshape(-1), windows)
    estimator = bundle.machine_estimator(horizon_s=horizon_s)
    terms = estimator.terms(bundle.forecaster.predict(x, estimator.horizon_s), x, windows)[order]
    by_task = windows.take(order)
    budgets = tuple(memory.scorer.budgets.by_margin.values())
    settled = len(by_slot) - 3 - horizon
    compared, margins = 0, memory.tracker.prices.machines[horizon_s]
    for r in range(len(RESOURCES)):
        cell = lay_out_cell(by_task, r, W, estimator.horizon_s)
        assert cell is not None
        rows = MachineRows(cell.total(terms[cell.rows, r]), cell.peak, cell.machine, estimator.mean_limit[r])
        reserved = follow_all(estimator.curves[r], rows, cell.start_us, estimator.horizon_s, W, budgets)
        for k, (machine, start_us) in enumerate(zip(cell.machine + 7, cell.start_us, strict=True)):
            if (key := (int(machine), int(start_us // W))) in held:
                np.testing.assert_array_equal(held[key][:, r], reserved[:, k], f"{key} {r}")
                compared += 1
        known = (cell.start_us <= settled * W) & (cell.start_us // W % step == 0)
        passed = violates(rows.peak, reserved)[:, known]
        assert margins.judged[r] == known.sum()
        assert margins.violated[:, r].tolist() == passed.sum(axis=1).tolist()
        assert 0 < passed.sum() < passed.size
        for m, machine in enumerate(margins.machine):
            here = (cell.machine + 7 == machine)[known]
            assert margins.judged_of[m, r] == here.sum()
            assert margins.violated_of[m, :, r].tolist() == passed[:, here].sum(axis=1).tolist()
    assert compared > 80
    assert (margins.asked < np.array(budgets)[:, None]).any()  # the margins have moved


def one_task(at: int, cpu: float = 0.1, **facts: Any) -> dict[str, Any]:
    return {"task": 1, "machine_id": 7, "at": at, "cpu": cpu, "memory": 0.1, **facts}


def steady(bundle: Bundle, settings: ServingSettings = SETTINGS, *, level: float = 0.2) -> Memory:
    """Return a service that asks for so little of machines that 0.2 of a limit of 1 is passed by half of it."""
    curve = MachineCurve(tuple(np.linspace(0.0, 1e-3, len(EXCEEDED)).tolist()))
    memory = Memory(settings, replace(bundle, machines={3_600: (curve,) * len(RESOURCES)}))
    scored = memory.scorer.score

    def score(*given: Any, **named: Any) -> Any:
        scores = scored(*given, **named)
        scores.shares[:] = 0.0
        scores.shares[..., S_BAND:] = level / given[1].limit[..., None]
        return scores

    memory.scorer.score = score  # type: ignore[method-assign]
    return memory


def counts(memory: Memory) -> tuple[list[int], list[int]]:
    """Return judged and violated answers of CPU: those under the baseline margin."""
    return margins(memory).judged.tolist(), margins(memory).violated[0].tolist()


def test_an_answer_is_violated_by_what_its_tasks_demand_at_once_within_the_horizon(bundle: Bundle) -> None:
    # two tasks of 0.2 each reserve 0.4 together: 0.3 and 0.05 keep it, 0.3 and 0.15 at once pass it, at slot 5
    memory = steady(bundle)
    for at in range(20):
        first, second = (0.3, 0.15) if at == 5 else (0.3, 0.05) if at == 3 else (0.1, 0.1)
        memory.write(windows_of(one_task(at, first), one_task(at, second, task=2)))
    # of the answers of slots 0 to 5 the horizon is over at slot 19: slot 18 is still open
    assert counts(memory) == ([6, 6], [5, 0])
    judged, violated = margins(memory).outcomes_of(np.array([7, 8]))
    assert judged.tolist() == [[6, 6], [0, 0]]
    assert violated[:, :, 0].tolist() == [[5, 5, 5], [0, 0, 0]]


def test_demand_counts_up_to_the_limit_and_of_the_tasks_that_were_there_and_have_not_left(bundle: Bundle) -> None:
    for late in (one_task(5, 0.9, task=2), one_task(5, 0.9, machine_id=8)):  # a newcomer; it has left
        memory = steady(bundle)
        for at in range(20):
            now = late if at == 5 and late["task"] == 1 else one_task(at)
            more = [late] if at == 5 and late["task"] == 2 else []
            others = one_task(at, 0.1, task=3), one_task(at, 0.1, task=4, machine_id=8)
            memory.write(windows_of(now, *others, *more))
        judged, violated = margins(memory).outcomes_of(np.array([7, 8]))
        assert judged[:, 0].tolist() == [6, 6]
        assert violated[:, 0, 0].tolist() == [0, 0]  # nor is it one of those that were there before
    capped = steady(bundle, level=0.5)
    for at in range(20):  # from slot 5 on its limit is 2: earlier answers are for a limit of 0.4
        used = 0.1 if at < 5 else 0.45 if at == 5 else 0.9
        capped.write(windows_of(one_task(at, used, limit=2.0 if at >= 5 else 0.4)))
    assert counts(capped)[1][0] == 1  # of slot 5 alone


def test_late_and_repeated_windows_of_closed_slots_change_nothing_and_of_open_ones_count(bundle: Bundle) -> None:
    def played(*extra: dict[str, Any], when: int) -> Memory:
        memory = steady(bundle)
        for at in range(20):
            memory.write(windows_of(one_task(at, task=2)))
            if at == when:
                memory.write(windows_of(*extra))
            if not any(e["task"] == 1 and e["at"] == at for e in extra):
                memory.write(windows_of(one_task(at)))
        return memory

    plain = played(when=-1)
    assert counts(plain) == ([6, 6], [0, 0])
    # a slot late: the window of slot 4 still counts while slot 5 is under way, for the answers of slots 0 to 3
    assert counts(played(one_task(4, 0.9), when=5))[1] == [4, 0]
    assert counts(played(one_task(4, 0.9), when=6))[1] == [0, 0]
    assert counts(played({**one_task(4, 0.9), "task": 2}, when=4))[1] == [0, 0]  # known already
    first_half = one_task(4, 0.9, task=2, start_us=4 * W, end_us=4 * W + W // 2)
    assert counts(played(first_half, when=4))[1] == [4, 0]
    assert counts(played(first_half, when=5))[1] == [0, 0]  # after one of slot 5


def test_a_task_without_a_measurement_has_no_part_in_an_answer(bundle: Bundle) -> None:
    memory = steady(bundle)
    for at in range(20):
        other = one_task(at, math.nan if at < 3 else 0.18, task=2)
        memory.write(windows_of(one_task(at, 0.25 if at == 2 else 0.1), other))
    # the first three answers are for the one task: 0.2, which 0.25 passes, and to which 0.18 is nothing
    assert counts(memory) == ([6, 6], [2, 0])


def test_a_machine_that_was_not_seen_to_the_end_of_the_horizon_is_not_judged(bundle: Bundle) -> None:
    memory = steady(bundle)
    for at in range(20):
        memory.write(windows_of(one_task(at), *([one_task(at, task=2, machine_id=8)] if at <= 14 else [])))
    judged, _ = margins(memory).outcomes_of(np.array([7, 8]))
    assert judged[:, 0].tolist() == [6, 3]  # the horizons of slots 0 to 2 end at 12 to 14


def test_a_gap_in_which_nothing_came_judges_what_was_measured_and_begins_again(bundle: Bundle) -> None:
    memory = steady(bundle)
    for at in (*range(20), *range(400, 420)):
        memory.write(windows_of(one_task(at, 0.9 if at == 401 else 0.1)))
    assert counts(memory) == ([8 + 6, 8 + 6], [1, 0])  # slots 0 to 7, whose horizons end at 19, and 400 to 405
    waiting = state(memory)["ring.answer"] - 1
    assert waiting.min() > 400


@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_of_several_windows_in_a_slot_the_largest_demand_counts_once(bundle: Bundle, at_once: int) -> None:
    memory = steady(bundle)
    for at in range(20):
        parts = {8: (0.15, 0.05, 0.12), 5: (0.05, 0.5, 0.1)}.get(at, (0.1, 0.1, 0.1))
        thirds = [{"start_us": at * W + k * W // 3, "end_us": at * W + (k + 1) * W // 3} for k in range(3)]
        told = [one_task(at, cpu, **third) for cpu, third in zip(parts, thirds, strict=True)]
        for k in range(0, 3, at_once):  # the last window of a write alone has an answer
            memory.write(windows_of(*told[k : k + at_once]))
    assert counts(memory) == ([6, 6], [5, 0])


def test_margins_go_on_to_the_bit_from_saved_arrays_in_the_middle_of_a_slot(narrow: Bundle) -> None:
    whole, saved = Memory(SETTINGS, narrow), Memory(SETTINGS, narrow)
    slots = slots_of(history())
    for at, of_slot in enumerate(slots):
        for some in np.array_split(np.arange(len(of_slot)), 2):
            whole.write(of_slot.take(some))
        if at < 25:
            saved.write(of_slot)
    cut = Memory(SETTINGS, narrow)
    first, *_ = np.array_split(np.arange(len(slots[25])), 2)
    saved.write(slots[25].take(first))
    cut.tracker.recall({name: of.copy() for name, of in saved.tracker.memory().items()})
    cut.tracker.promote(cut.scorer, cut.tracker.following)
    for memory in (saved, cut):
        memory.write(slots[25].take(np.setdiff1d(np.arange(len(slots[25])), first)))
        for of_slot in slots[26:]:
            memory.write(of_slot)
    theirs = cut.following.memory()
    for name, array in saved.following.memory().items():
        assert_same_bits(array, theirs[name], name)
    assert any(name.startswith(f"machines.{A_DAY}.") for name in theirs)
    np.testing.assert_array_equal(margins(cut).margins, margins(saved).margins)
    np.testing.assert_array_equal(margins(cut).judged_of, margins(saved).judged_of)
    assert margins(whole).judged.tolist() == margins(cut).judged.tolist()


def test_of_windows_of_a_task_in_one_write_the_last_alone_has_a_part_in_an_answer(bundle: Bundle) -> None:
    other = {"task": 2, "machine_id": 7, "memory": 0.1}
    found = []
    for together in (True, False):
        memory = Memory(SETTINGS, bundle)
        told = [one_task(0), {**other, "at": 0}, one_task(1)]
        for write in [told] if together else [told[:2], told[2:]]:
            memory.write(windows_of(*write))
        found.append(state(memory)["machine.answered"][0, :2].tolist())
    assert found == [[[1, 1], [1, 1]], [[2, 2], [1, 1]]]


def test_switched_off_outcomes_are_counted_and_the_margins_of_the_model_stay(narrow: Bundle) -> None:
    fixed, moving = (Memory(SETTINGS.model_copy(update={"follow": f}), narrow) for f in (False, True))
    for of_slot in slots_of(history()):
        fixed.write(of_slot)
        moving.write(of_slot)
    budgets = fixed.scorer.budgets.by_margin
    assert margins(fixed).asked[:, 0].tolist() == list(budgets.values())
    wanted = [[curve.margin(budget) for curve in fixed.scorer.machines.curves] for budget in budgets.values()]
    assert margins(fixed).margins.tolist() == wanted
    assert margins(fixed).judged.tolist() == margins(moving).judged.tolist()
    assert (margins(fixed).asked > margins(moving).asked).all()
    assert not any("machines" in name for name in fixed.tracker.memory())


def test_tasks_that_end_leave_no_demand_to_the_next_in_their_slot(bundle: Bundle) -> None:
    memory = steady(bundle)
    for at in range(20):
        memory.write(windows_of(one_task(at), *([one_task(at, task=2)] if at < 4 else [])))
        if at == 3:
            memory.tell(fact_rows({"task": 2, "ended_us": 4 * W}))
            assert [state(memory, of)["tasks"]["last"].tolist() for of in (AN_HOUR, A_DAY)] == [[4, 0]] * 2
            memory.write(windows_of(one_task(4, 0.9, task=3)))  # takes the slot of the second
    assert counts(memory) == ([6, 6], [0, 0])


@pytest.mark.parametrize("follow", [True, False])
def test_tasks_inside_an_alloc_instance_are_no_part_of_what_a_machine_demands(bundle: Bundle, follow: bool) -> None:
    memory = steady(bundle, SETTINGS.model_copy(update={"follow": follow}))
    for at in range(20):  # 0.2 is reserved for the first; machine 8 has no other, and 9 is not seen to the end
        inside = [one_task(at, 0.9, task=2, in_alloc=True), one_task(at, 0.9, task=3, machine_id=8, in_alloc=True)]
        last = one_task(at, task=4, machine_id=9, in_alloc=at > 13)
        memory.write(windows_of(one_task(at), last))
        memory.write(windows_of(*inside))
    assert counts(memory) == ([6 + 2, 6 + 2], [0, 0])
    assert margins(memory).machine.tolist() == [7, 9]


def test_tasks_without_estimation_count_their_limit(bundle: Bundle) -> None:
    memory = steady(bundle)
    memory.tell(fact_rows(estimation={2: False}))
    for at in range(20):
        memory.write(windows_of(one_task(at), one_task(at, 0.1 if at < 10 else 0.9, task=2)))
    assert counts(memory)[1] == [0, 0]  # 0.2 and the limit of 1 are reserved
    assert counts(memory)[0] == [6, 6]


def test_a_machine_of_tasks_without_estimation_alone_has_no_answer(bundle: Bundle) -> None:
    memory = steady(bundle)
    memory.tell(fact_rows(estimation={2: False}))
    for at in range(20):
        memory.write(windows_of(one_task(at), one_task(at, 0.9, task=2, machine_id=8)))
        if at == 10:  # the answers of later slots are judged
            memory.tell(fact_rows(estimation={2: True}))
    judged, _ = margins(memory).outcomes_of(np.array([7, 8]))
    assert judged[:, 0].tolist() == [6, 0]
    assert counts(memory) == ([6, 6], [0, 0])
    for at in range(20, 26):
        memory.write(windows_of(one_task(at), one_task(at, 0.9, task=2, machine_id=8)))
    judged, _ = margins(memory).outcomes_of(np.array([7, 8]))
    assert judged[:, 0].tolist() == [12, 1]


def test_the_share_of_the_machines_that_passed_at_once_and_the_largest_of_the_day_are_said(bundle: Bundle) -> None:
    memory = steady(bundle)
    for at in range(22):  # at slot 1 one of four machines passes, at slot 3 three
        hot = {1: 1, 3: 3}.get(at, 0)
        memory.write(windows_of(*(one_task(at, 0.9 if m < hot else 0.1, task=m, machine_id=m) for m in range(4))))
    assert margins(memory).at_once[0].tolist() == [0.0, 0.0]  # those of slot 7: the last one known
    assert margins(memory).most_at_once[0].tolist() == [0.75, 0.0]
    told, *_ = machine_margins(memory.tracker.prices.machines)
    assert (told.margin, told.resource, told.at_once, told.most_at_once) == ("baseline", "cpu", 0.0, 0.75)
    (judged, _), (violated, _) = counts(memory)
    assert (told.judged, told.violated) == (judged, violated)
    assert 0 < violated < judged
    for at in range(22, 330):
        memory.write(windows_of(*(one_task(at, task=m, machine_id=m) for m in range(4))))
    assert margins(memory).most_at_once[0].tolist() == [0.0, 0.0]


def test_a_cell_of_which_no_task_is_on_a_machine_keeps_nothing_for_machines(bundle: Bundle) -> None:
    memory = Memory(SETTINGS, bundle)
    for at in range(4):
        memory.write(windows_of(one_task(at, machine_id=-1), one_task(at, task=2, machine_id=-1)))
    without = memory.tracker.bytes_per_task
    assert len(state(memory)["tasks"]) == 0
    memory.write(windows_of(one_task(4, machine_id=-1), one_task(4, task=2)))
    assert len(state(memory)["tasks"]) == len(state(memory, A_DAY)["tasks"]) == 2
    assert memory.tracker.bytes_per_task == without + 188 + 176


def test_places_of_machines_are_given_again_after_a_day_and_no_more_than_there_may_be(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_peaks, "MOST_MACHINES", 3)
    memory = steady(bundle)
    memory.write(windows_of(*(one_task(0, task=m, machine_id=m) for m in range(1, 6))))
    assert state(memory)["machine.id"].tolist() == [1, 2, 3]
    for at in range(1, 310):
        memory.write(windows_of(one_task(at, machine_id=2)))
    memory.write(windows_of(one_task(310, task=9, machine_id=70), one_task(310, machine_id=2)))
    assert sorted(state(memory)["machine.id"].tolist()) == [2, 3, 70]
    judged, _ = margins(memory).outcomes_of(np.array([1, 2, 70]))
    assert judged[:, 0].tolist() == [0, 310 - 2 - HORIZON + 1, 0]


def test_a_smaller_budget_never_reserves_less_and_any_budget_moves_as_its_neighbours(narrow: Bundle) -> None:
    memory = Memory(SETTINGS, narrow)
    for of_slot in slots_of(history()):
        memory.write(of_slot)
        assert (margins(memory).margins[:-1] >= margins(memory).margins[1:]).all()
        assert (margins(memory).asked[:-1] <= margins(memory).asked[1:]).all()
    of = margins(memory)
    for b, budget in enumerate(of.budgets.values()):
        assert of.probability(budget) == pytest.approx(of.asked[b])
    between = of.probability(0.005)
    assert all(low <= p <= high for low, p, high in zip(of.asked[1], between, of.asked[2], strict=True))
    own = MachineMargins.of(memory.scorer.machines, memory.scorer.budgets.by_margin)
    assert own.probability(0.0123) == (0.0123, 0.0123)


def test_a_machine_is_told_why_it_is_asked_for_another_probability(narrow: Bundle) -> None:
    memory = Memory(SETTINGS, narrow)
    for of_slot in slots_of(history()):
        memory.write(of_slot)
    found = sums_of(memory.tracker, SETTINGS, [7])
    explained = explain_machine([found], Units(), "aggressive")
    (why,) = [step.why for step in explained.steps if step.rule == "bound"]
    assert "with a probability of 0.01, the budget of the aggressive margin, now " in why
    assert "of the recent answers for all machines were passed" in why
    (cpu,) = [of for of in explained.margins if (of.margin, of.resource) == ("aggressive", "cpu")]
    assert cpu.asked < cpu.budget
    assert 0 < explained.outcomes.judged.cpu < cpu.judged
    assert explained.outcomes.violated["aggressive"].cpu > 0
    # what is answered is what is asked for
    peak = memory.scorer.machines.at(margins(memory).margins[2].tolist(), found.sums)[0]
    assert explained.machine.peak["aggressive"].cpu == peak[0]
    fitted = fit_aggressive(memory)
    assert fitted.asked.cpu == cpu.asked
    assert fitted.candidates[0].places[0].peak.cpu > 0


def fit_aggressive(memory: Memory) -> FitAnswer:
    one, most = ({"cpu": amount, "memory": amount} for amount in (1, 99))
    body = json.dumps({"margin": "aggressive", "candidates": [{"limit": one}], "capacity": most}).encode()
    return fit(memory.tracker, parse_body(body, FitRequest), SETTINGS, Units())


def test_switched_off_outcomes_stay_where_the_mean_limit_of_the_cell_changes() -> None:
    bundle = load_model("builtin")
    fixed, moving = (Memory(SETTINGS.model_copy(update={"follow": follow}), bundle) for follow in (False, True))
    for at in range(38):  # large tasks come: with the third hour the mean limit is another
        large = [{"task": 2, "limit": 32.0}] if at >= 30 else []
        for memory in (fixed, moving):
            memory.write(windows_of(*({"at": at, "machine_id": 4, **facts} for facts in ({}, *large))))
    assert fixed.scorer.mean_limit[0] > 8.0
    assert margins(fixed).judged.tolist() == margins(moving).judged.tolist() == [24, 24]


def test_machines_of_a_model_without_a_mean_limit_are_foreseen_by_that_of_the_cell(bundle: Bundle) -> None:
    """A model of several datasets has none. Bytes are another unit, and the same shares of the limit."""
    shares: list[NDArray[np.float32]] = []
    estimates: list[NDArray[np.float64]] = []
    held: list[NDArray[np.float64]] = []
    for unit in (1.0, 2.0**30):
        memory = Memory(SETTINGS, replace(bundle, mean_limit=(np.nan, np.nan)))
        for part in slots_of(history())[:20]:
            usage = part.usage.copy()
            usage[:, [MEMORY_MEAN, MEMORY_MAX, PAGE_CACHE]] *= unit
            memory.write(replace(part, usage=usage, limit=part.limit * [1.0, unit]))
        assert memory.scorer.machines.mean_limit == memory.tracker.size.mean_limit == (1.0, unit)
        known = memory.tracker.look(memory.tracker.names())
        shares.append(known.scores.shares)
        held.append(np.concatenate([state(memory, of)["machine.held"][:, 0] for of in (AN_HOUR, A_DAY)]) / [1.0, unit])
        estimates.append(memory.answers(margin="aggressive").estimate.reservation / [1.0, unit])
    assert_same_bits(shares[0], shares[1])
    np.testing.assert_allclose(estimates[0], estimates[1])
    np.testing.assert_allclose(held[0], held[1])
    assert np.isfinite(shares[0]).all()
    assert np.isfinite(held[0]).all()
