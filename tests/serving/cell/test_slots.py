"""Slots agree with a dictionary, reuse numbers and do not depend on the seed; ends are remembered and dropped."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from reclaim.serving.cell.slots import EndedTasks, Slots, _place

KEY = st.tuples(st.sampled_from([0, 1, 7, 2**62, 2**63 - 1]), st.integers(0, 5))
STEPS = st.lists(st.tuples(st.booleans(), st.lists(KEY, max_size=6)), max_size=30)


@settings(max_examples=100, deadline=None)
@given(STEPS)
def test_slots_agree_with_a_dictionary(steps: list[tuple[bool, list[tuple[int, int]]]]) -> None:
    slots, known = Slots(), dict[tuple[int, int], int]()
    for give, names in steps:
        key = np.array(names, np.int64).reshape(-1, 2)
        if give:
            for name, slot in zip(names, slots.give(key).tolist(), strict=True):
                assert known.setdefault(name, slot) == slot
        else:
            gone = {name: known.pop(name) for name in set(names) if name in known}
            slots.free(np.array(list(gone.values()), np.int64))
        assert slots.find(key).tolist() == [known.get(name, -1) for name in names]
        assert len(slots) == len(known) == len(set(known.values()))
        assert sorted(known.values()) == slots.all().tolist()
    other = Slots()
    other.recall(slots.memory())
    everyone = np.array(list(known), np.int64).reshape(-1, 2)
    assert other.find(everyone).tolist() == list(known.values())


def test_numbers_stay_few_when_tasks_come_and_go() -> None:
    slots = Slots()
    for day in range(200):
        given = slots.give(np.column_stack([np.full(100, day), np.arange(100)]))
        assert given.max() < 100
        slots.free(given)
    assert len(slots) == 0
    assert len(slots._table) <= 1_024


def test_slots_do_not_depend_on_a_restart() -> None:
    slots, other = Slots(), Slots()
    slots.give(np.column_stack([np.arange(6), np.zeros(6, np.int64)]))
    for gone in (4, 0, 2):
        slots.free(np.array([gone]))
    other.recall(slots.memory())
    for task in range(10, 15):
        name = np.array([[task, 0]])
        assert other.give(name).tolist() == slots.give(name).tolist()
    assert slots.find(np.array([[task, 0] for task in range(10, 15)])).tolist() == [0, 2, 4, 6, 7]


def test_chosen_names_do_not_collide() -> None:
    factor, n, mask = 0x9E3779B97F4A7C15, 4_000, 2**16 - 1
    chosen = [(c, -c * factor % 2**64) for c in range(3 * n)]  # one sum for all, were they mixed together
    names = np.array([name for name in chosen if name[1] < 2**63][:n])
    places = [
        [_place(collection, index, slots._seed, mask) for collection, index in names.tolist()]
        for slots in (Slots(), Slots())
    ]
    assert len(names) == n
    assert min(len(set(some)) for some in places) > 0.9 * n
    assert places[0] != places[1]


def names_of(*tasks: int) -> NDArray[np.int64]:
    return np.column_stack([tasks, np.zeros(len(tasks), np.int64)])


def test_of_the_ends_of_a_task_the_latest_counts_and_a_window_that_begins_then_is_of_its_next_run() -> None:
    ended = EndedTasks(10)
    ended.add(names_of(1, 1, 2), np.array([9, 5, 7]))
    ended.add(names_of(1), np.array([6]))
    assert ended.before_end(names_of(1, 1, 2, 3), np.array([8, 9, 6, 0])).tolist() == [True, False, True, False]


def test_an_end_of_the_time_given_stays_and_one_that_was_dropped_does_not_count_for_the_next_in_its_place() -> None:
    ended = EndedTasks(10)
    ended.add(names_of(1, 2), np.array([5, 6]))
    ended.forget(6)
    ended.add(names_of(3), np.array([3]))  # in the place of the first
    assert ended.before_end(names_of(1, 2, 3, 3), np.array([0, 5, 2, 4])).tolist() == [False, True, True, False]


def test_the_oldest_ends_are_dropped_where_there_are_more_than_are_remembered() -> None:
    ended = EndedTasks(2)
    ended.add(names_of(1, 2, 3), np.array([8, 5, 9]))
    assert len(ended) == 2
    assert ended.before_end(names_of(1, 2, 3), np.zeros(3, np.int64)).tolist() == [True, False, True]


def test_ends_that_are_restored_take_the_place_of_all_others() -> None:
    ended, other = EndedTasks(10), EndedTasks(10)
    ended.add(names_of(1), np.array([5]))
    other.add(names_of(1, 2), np.array([9, 9]))
    other.recall(ended.memory())
    assert len(other) == 1
    assert other.before_end(names_of(1, 1, 2), np.array([4, 5, 0])).tolist() == [True, False, False]
