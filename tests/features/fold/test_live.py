"""Windows in any order and tasks that come and go: the bits of the time order, and a memory that stays bounded."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from reclaim.data.errors import ConfigError
from reclaim.data.windows import Cell, Windows, empty_windows
from reclaim.features.fold import live
from reclaim.features.fold.batch import FeatureState
from reclaim.features.fold.live import TolerantState
from reclaim.features.fold.live_kernel import LATE, NEW, PENDING, REPEATED, TOO_LATE
from reclaim.features.fold.live_record import KEPT, ROW
from reclaim.features.fold.task_record import STATE
from reclaim.features.registry import AT, FEATURE_NAMES, SLOT_S

History = Callable[..., Windows]
Rows = NDArray[np.int64]
CELL: Final = Cell((4.0, 8.0), 12_345_000_000)
BOUND_S: Final = 900
S: Final = 1_000_000


def same_bits(a: NDArray[np.float32], b: NDArray[np.float32]) -> bool:
    return bool(((a.view(np.int32) == b.view(np.int32)) | (np.isnan(a) & np.isnan(b))).all())


def in_order(windows: Windows) -> Windows:
    """Return the rows that are later than all before them of their task."""
    taken: list[int] = []
    last: dict[int, int] = {}
    for row, task in enumerate(windows.task_numbers().tolist()):
        if windows.end_us[row] > last.get(task, -1):
            last[task] = int(windows.end_us[row])
            taken.append(row)
    return windows.take(np.array(taken))


def by_time(windows: Windows) -> Rows:
    return np.argsort((windows.end_us - 1) // (SLOT_S * S), kind="stable").astype(np.int64)


def at_random(rows: Rows, seed: int) -> list[Rows]:
    """Return the rows cut into calls, those of a call in any order."""
    rng = np.random.default_rng(seed)
    cuts = np.flatnonzero(rng.random(len(rows)) < rng.choice([0.02, 0.2, 0.9]))
    return [rng.permutation(part) for part in np.split(rows, cuts) if len(part)]


def last_rows(task: Rows, end_us: Rows, rows: Rows) -> Rows:
    """Return the latest of the rows of each task, task by task."""
    order: Rows = rows[np.lexsort((end_us[rows], task[rows]))]
    latest: Rows = order[np.append(np.diff(task[order]) != 0, True)]
    return latest


def fresh(windows: Windows, cell: Cell = CELL) -> NDArray[np.float32]:
    return FeatureState(cell).advance(windows.task_numbers(), windows)


def value(x: NDArray[np.float32], name: str, row: int = -1) -> float:
    return float(x[row, FEATURE_NAMES.index(name)])


def owned(windows: Windows, *, user: int = -1, name: int = -1, instance: int = 0) -> Windows:
    windows.user[:], windows.name[:], windows.instance_index[:] = user, name, instance
    return windows


def saved(state: TolerantState) -> dict[str, NDArray[Any]]:
    """Return the memory as it comes back from a file."""
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **state.memory())
    file.seek(0)
    with np.load(file, allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}


def same_memory(one: dict[str, NDArray[Any]], two: dict[str, NDArray[Any]]) -> bool:
    """Return whether all is equal to the bit, but for what fills the gaps between a record's fields."""

    def parts(memory: dict[str, NDArray[Any]]) -> list[tuple[str, bytes]]:
        fields = [
            (name, array if f is None else array[f])
            for name, array in memory.items()
            for f in array.dtype.names or (None,)
        ]
        return [(name, array.tobytes()) for name, array in fields]

    return parts(one) == parts(two)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), bound_s=st.sampled_from([0, 1, BOUND_S, 1e7]))
def test_in_time_order_it_gives_the_bits_of_feature_state_however_the_calls_are_cut(
    seed: int, bound_s: float, random_histories: History
) -> None:
    windows = in_order(random_histories(seed))
    task = windows.task_numbers()
    expected = FeatureState(CELL).advance(task, windows)
    state = TolerantState(CELL, bound_s)
    for rows in at_random(by_time(windows), seed):
        call = windows.take(rows)
        assert (state.classify(task[rows], call) == NEW).all()
        slots, x, end_us, row = state.advance(task[rows], call)
        last = last_rows(task, windows.end_us, rows)
        assert slots.tolist() == task[last].tolist()
        assert end_us.tolist() == windows.end_us[last].tolist()
        assert rows[row].tolist() == last.tolist()
        assert same_bits(x, expected[last])


class Model:
    """Class of each window to one task, by the words alone."""

    def __init__(self, bound_us: int) -> None:
        self.bound_us = bound_us
        self.settled: list[int] = []
        self.pending: list[int] = []

    def kind(self, end_us: int) -> int:
        """Return what a window that ends then is."""
        taken = sorted(self.settled + self.pending)
        if not taken or end_us > taken[-1]:
            return NEW
        if end_us in taken[-24:]:
            return REPEATED
        in_time = end_us >= taken[-1] - self.bound_us and end_us > max(self.settled, default=-1)
        return LATE if in_time and self.bound_us else TOO_LATE

    def take(self, end_us: int) -> None:
        """Take it."""
        self.pending = sorted([*self.pending, end_us])
        while self.pending and (
            len(self.pending) > PENDING or self.pending[0] <= max(self.settled + self.pending) - self.bound_us
        ):
            self.settled.append(self.pending.pop(0))


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 2**32), late_s=st.sampled_from([0, 400, BOUND_S, 3_000]), threads=st.sampled_from([1, 2]))
def test_what_comes_late_within_the_bound_counts_for_its_task_as_if_in_time_and_nothing_else_is_let_in(
    seed: int, late_s: int, threads: int, random_histories: History
) -> None:
    rng = np.random.default_rng(seed)
    windows = random_histories(seed, n_tasks=4, longest=25)
    task, n = windows.task_numbers(), len(windows)
    delay_us = rng.integers(0, late_s + 1, n) * S * rng.integers(0, 2, n)
    arriving = np.argsort(windows.end_us + delay_us, kind="stable")
    state, models = TolerantState(CELL, BOUND_S, threads), [Model(BOUND_S * S) for _ in range(4)]
    accepted: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("reclaim.data.core.parallel.ROWS_WORTH_A_THREAD", 1)
        for rows in at_random(np.append(arriving, arriving[: n // 3]), seed):
            kinds = state.classify(task[rows], windows.take(rows))
            expected = [models[task[row]].kind(int(windows.end_us[row])) for row in rows]
            told: set[tuple[int, int]] = set()
            for k, row in enumerate(rows):
                if expected[k] <= LATE and (task[row], windows.end_us[row]) in told:
                    expected[k] = REPEATED
                told.add((task[row], windows.end_us[row]))
            assert kinds.tolist() == expected
            taken = rows[kinds <= LATE]
            for row in taken[np.argsort(windows.end_us[taken], kind="stable")]:
                models[task[row]].take(int(windows.end_us[row]))
            accepted += taken.tolist()
            slots, x, end_us, row = state.advance(task[taken], windows.take(taken))
            everything = np.array(sorted(accepted, key=lambda r: (task[r], windows.end_us[r])), np.int64)
            if len(taken) == 0:
                assert len(slots) == 0
                continue
            x_in_order = FeatureState(CELL).advance(task[everything], windows.take(everything))
            last = np.searchsorted(task[everything], slots, side="right") - 1
            assert same_bits(x[:, : AT.collection_ooms].copy(), x_in_order[last, : AT.collection_ooms].copy())
            assert not np.isinf(x).any()
            assert end_us.tolist() == windows.end_us[everything[last]].tolist()
            for k, r in enumerate(row):
                assert (taken[r] if r >= 0 else -1) == (everything[last[k]] if everything[last[k]] in taken else -1)


def test_each_kind_is_told_by_hand_and_asking_changes_nothing(history: History) -> None:
    windows = history([0.1 * k for k in range(1, 9)])  # they end at 900, 1200, … 3000 s
    state, none = TolerantState(CELL, BOUND_S), np.zeros(8, np.int64)
    state.advance(none[:5], windows.take(np.array([0, 2, 3, 4, 6])))  # the last one at 2700 s
    before = saved(state)
    asked = windows.take(np.array([7, 5, 5, 6, 1, 0, 4, 7]))
    kinds = [NEW, LATE, REPEATED, REPEATED, TOO_LATE, REPEATED, REPEATED, REPEATED]
    assert state.classify(none, asked).tolist() == kinds
    edge = history([0.5, 0.5], start_s=1500)  # ends at 1800 s, the bound, and at 2100 s
    edge.end_us[:] += (1, -1)
    assert state.classify(none[:2], edge).tolist() == [LATE, LATE]
    edge.end_us[:] = 1800 * S - 1
    assert state.classify(none[:1], edge.take(slice(0, 1))).tolist() == [TOO_LATE]
    assert state.classify(np.array([70]), windows.take(slice(0, 1))).tolist() == [NEW]
    assert same_memory(before, saved(state))


def test_a_window_that_is_too_late_and_comes_twice_in_a_call_is_too_late_both_times(history: History) -> None:
    windows, none = history([0.1] * 9), np.zeros(2, np.int64)
    state = TolerantState(CELL, BOUND_S)
    state.advance(none[:1], windows.take(slice(8, 9)))
    assert state.classify(none, windows.take(np.array([0, 0]))).tolist() == [TOO_LATE, TOO_LATE]
    assert state.classify(none, windows.take(np.array([7, 7]))).tolist() == [LATE, REPEATED]


@pytest.mark.parametrize(("later", "kind"), [(PENDING, LATE), (PENDING + 1, TOO_LATE)])
def test_a_window_may_be_late_behind_as_many_as_are_held_and_no_more(later: int, kind: int, history: History) -> None:
    windows, state = history([0.1] * (later + 1)), TolerantState(CELL, 3_600.0)
    state.advance(np.zeros(later, np.int64), windows.take(slice(1, None)))
    assert state.classify(np.zeros(1, np.int64), windows.take(slice(0, 1))).tolist() == [kind]


def test_without_a_bound_nothing_late_is_taken_and_nothing_is_held_for_it(history: History) -> None:
    windows, none = history([0.1, 0.2, 0.3]), np.zeros(3, np.int64)
    state = TolerantState(CELL, 0)
    state.advance(none[:2], windows.take(np.array([0, 2])))
    assert state.classify(none[:2], windows.take(np.array([1, 0]))).tolist() == [TOO_LATE, REPEATED]
    assert state.bytes_per_task == KEPT.itemsize + len(state._histograms) * ROW.itemsize
    assert TolerantState(CELL, 0).bytes_per_task == KEPT.itemsize < STATE.itemsize - 1_700
    assert sum(array.nbytes for name, array in state.memory().items() if name.startswith(("held", "pending"))) == 0


def test_a_task_has_one_record_and_the_windows_held_whatever_the_bound(history: History) -> None:
    for bound_s, held in ((0, 0), (BOUND_S, PENDING)):
        state = TolerantState(CELL, bound_s)
        for k, windows in enumerate([history([0.1] * 9, task=task) for task in range(300)]):
            state.advance(np.full(9, k), windows)
        arrays = [a for a in vars(state).values() if isinstance(a, np.ndarray)]
        places = len(arrays[0])
        assert 300 <= places <= 600
        of_histograms = len(state._histograms) * ROW.itemsize // 300
        assert sum(array.nbytes for array in arrays) == places * (state.bytes_per_task - of_histograms)
        assert state.bytes_per_task <= KEPT.itemsize + of_histograms + held * 217
        assert 0 < of_histograms < 400  # one level of CPU and memory: an octave or two of each histogram


def test_a_late_window_leaves_the_last_one_the_last(history: History) -> None:
    windows = history([0.2, 0.9, 0.3])
    state = TolerantState(CELL, BOUND_S)
    state.advance(np.array([1, 1]), windows.take(np.array([0, 2])))
    slots, x, end_us, row = state.advance(np.array([1]), windows.take(slice(1, 2)))
    assert (slots.tolist(), end_us.tolist(), row.tolist()) == ([1], [windows.end_us[2]], [-1])
    assert value(x, "cpu_last") == pytest.approx(0.3)
    assert value(x, "cpu_max_ever") == pytest.approx(0.9)


@pytest.mark.parametrize("kind", [REPEATED, TOO_LATE])
def test_a_row_that_would_be_refused_is_a_fault_of_the_caller(kind: int, history: History) -> None:
    windows, none = history([0.1] * 9), np.zeros(1, np.int64)
    state = TolerantState(CELL, BOUND_S)
    state.advance(none.repeat(8), windows.take(slice(1, 9)))
    row = windows.take(slice(8, 9) if kind == REPEATED else slice(0, 1))
    assert state.classify(none, row).tolist() == [kind]
    with pytest.raises(ValueError, match="windows of 1 tasks are repeated or too late"):
        state.advance(none, row)
    with pytest.raises(ValueError, match="a slot from 0 on for each of 1 windows"):
        state.classify(none - 1, row)


def test_a_call_without_a_window_touches_no_task() -> None:
    nothing = np.zeros(0, np.int64)
    state = TolerantState(CELL, BOUND_S)
    assert len(state.classify(nothing, empty_windows())) == 0
    assert [len(part) for part in state.advance(nothing, empty_windows())] == [0, 0, 0, 0]


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), bound_s=st.sampled_from([0, BOUND_S]))
def test_a_slot_that_was_released_serves_a_new_task_as_a_fresh_one_would(
    seed: int, bound_s: float, random_histories: History
) -> None:
    first, then = (in_order(random_histories(s)) for s in (seed, seed + 1))
    then.collection_id[:] += 1_000
    expected, task = fresh(then), then.task_numbers()
    state = TolerantState(CELL, bound_s)
    state.advance(first.task_numbers(), first)
    state.forget(np.random.default_rng(seed).permutation(len(np.unique(first.task_numbers())) + 3))
    for rows in at_random(by_time(then), seed):
        _, x, _, _ = state.advance(task[rows], then.take(rows))
        assert same_bits(x, expected[last_rows(task, then.end_us, rows)])


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), bound_s=st.sampled_from([0, BOUND_S]), stop=st.floats(0, 1))
def test_from_what_was_saved_at_any_moment_it_goes_on_to_the_bit(
    seed: int, bound_s: float, stop: float, random_histories: History
) -> None:
    rng = np.random.default_rng(seed)
    windows = random_histories(seed, n_tasks=9, longest=25)
    task = windows.task_numbers()
    delay_us = rng.integers(0, 1_000, len(windows)) * S
    calls = at_random(np.argsort(windows.end_us + delay_us, kind="stable").astype(np.int64), seed)
    gone = [rng.permutation(10)[: rng.integers(0, 3)] for _ in calls]  # in between some leave, to come back at times

    def go_on(state: TolerantState, part: slice) -> list[Any]:
        answers = []
        for rows, leaving in zip(calls[part], gone[part], strict=True):
            taken = rows[state.classify(task[rows], windows.take(rows)) <= LATE]
            answers.append(state.advance(task[taken], windows.take(taken)))
            state.forget(leaving)
        return answers

    cut = int(stop * len(calls))
    one, two = (TolerantState(CELL, bound_s) for _ in range(2))
    go_on(one, slice(0, cut))
    two.recall(saved(one))
    assert same_memory(saved(one), saved(two))
    rest = slice(cut, len(calls))
    for ours, theirs in zip(go_on(one, rest), go_on(two, rest), strict=True):
        assert same_bits(ours[1], theirs[1])
        assert all((a == b).all() for a, b in zip((ours[0], *ours[2:]), (theirs[0], *theirs[2:]), strict=True))
    assert same_memory(saved(one), saved(two))


def test_with_another_bound_it_goes_on_from_where_the_tasks_stood(history: History) -> None:
    windows, none = history([0.1, 0.4, 0.2, 0.3, 0.5]), np.zeros(5, np.int64)
    expected = fresh(windows)
    for before_s, after_s in ((0, BOUND_S), (BOUND_S, 0), (BOUND_S, 300), (300, BOUND_S)):
        one, two = TolerantState(CELL, before_s), TolerantState(CELL, after_s)
        one.advance(none[:3], windows.take(slice(0, 3)))
        two.recall(saved(one))
        late = two.classify(none[:1], windows.take(slice(1, 2)))
        assert late.tolist() == [REPEATED]
        for k in (3, 4):
            _, x, _, _ = two.advance(none[:1], windows.take(slice(k, k + 1)))
            assert same_bits(x, expected[k : k + 1])


def test_a_cell_that_is_described_otherwise_goes_on_as_if_it_had_always_been_so(history: History) -> None:
    windows, none = history([0.1, 0.4, 0.2, 0.3, 0.5]), np.zeros(5, np.int64)
    for cell in (Cell(), Cell((32.0, math.nan), -3_600_000_000)):  # a larger machine, and summer time
        always, one, two = (TolerantState(of, BOUND_S) for of in (cell, CELL, cell))
        for state in (always, one):
            state.advance(none[:3], windows.take(slice(0, 3)))
        two.recall(saved(one))
        for k in (3, 4):
            _, expected, _, _ = always.advance(none[:1], windows.take(slice(k, k + 1)))
            _, x, _, _ = two.advance(none[:1], windows.take(slice(k, k + 1)))
            assert same_bits(x, expected)


def test_memory_of_other_code_is_refused(history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    state = TolerantState(CELL, BOUND_S)
    state.advance(np.zeros(1, np.int64), history([0.1]))
    memory = saved(state)
    with monkeypatch.context() as other_code:
        other_code.setattr(live, "PIPELINE_VERSION", "another")
        with pytest.raises(ConfigError, match=r"tolerant features.*another.* cannot continue it"):
            TolerantState(CELL, BOUND_S).recall(memory)
    with_others = str(memory["made_by"]).replace("related=False", "related=True")  # features that have gone
    with pytest.raises(ConfigError, match=r"related=True.*, and .*related=False.* cannot continue it"):
        state.recall(memory | {"made_by": np.array(with_others)})
    with pytest.raises(ConfigError, match="something unknown"):
        state.recall({})
    of: Any = KEPT.fields
    names = (*of,)
    other = np.dtype(
        {
            "names": [*names[:-1], "more"],
            "formats": [of[name][0] for name in names],
            "offsets": [of[name][1] for name in names],
            "itemsize": KEPT.itemsize,
        }
    )
    for name, array in (("task", memory["task"].view(other)), ("pending", memory["pending"][:, None])):
        with pytest.raises(ConfigError, match=f"does not fit in {name!r}, other code saved it"):
            state.recall(memory | {name: array})
    state.recall(memory)


def churn(state: TolerantState, history: History, days: range, per_day: int = 20) -> list[NDArray[np.float32]]:
    """Give a task of a new name and a new user many times a day, and release it."""
    rows, slot = [], np.zeros(1, np.int64)
    for k in range(days.start * per_day, days.stop * per_day):
        run = owned(history([0.1], task=k, start_s=k * 86_400 // per_day), user=k, name=k)
        rows.append(state.advance(slot, run)[1])
        state.forget(slot)
    return rows


def test_names_and_users_that_come_and_go_leave_nothing_behind(history: History) -> None:
    state = TolerantState(CELL, BOUND_S)
    churn(state, history, range(1))
    before = {name: array.nbytes for name, array in state.memory().items()}
    churn(state, history, range(1, 3))
    assert {name: array.nbytes for name, array in state.memory().items()} == before


def test_a_memory_outlives_a_change_of_the_code_that_changes_nothing_of_what_is_kept(history: History) -> None:
    one, two = TolerantState(CELL, BOUND_S), TolerantState(CELL, BOUND_S)
    windows, none = history([0.1, 0.4, 0.2]), np.zeros(1, np.int64)
    one.advance(np.zeros(2, np.int64), windows.take(slice(0, 2)))
    memory = saved(one)
    for array in memory.values():
        if array.dtype.names is not None:
            array.dtype.names = tuple("code_0" if n.startswith("code_") else n for n in array.dtype.names)
    two.recall(memory)
    last = windows.take(slice(2, 3))
    assert same_bits(one.advance(none, last)[1], two.advance(none, last)[1])
