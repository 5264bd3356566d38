"""Records of served tasks: kept in parts to the bit, in rows that come and go with their tasks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from reclaim.data.windows import Cell, Windows, concatenate
from reclaim.features.fold import live
from reclaim.features.fold.batch import FeatureState
from reclaim.features.fold.live import TolerantState
from reclaim.features.fold.live_record import BLOCKS, KEPT, MOST_ROWS, Histograms, pack, unpack, words_of
from reclaim.features.fold.task_record import BINS, STATE

History = Callable[..., Windows]
CELL = Cell((4.0, 8.0), 12_345_000_000)
OCTAVES, KINDS = STATE["octave"].shape
FIELDS = [name for name in STATE.names or () if name != "spare"]


def drawn(seed: int, full: bool = False) -> NDArray[Any]:
    """Return a record of drawn bytes, whose histograms hold something in some octaves, or in all of them."""
    rng = np.random.default_rng(seed)
    records = np.frombuffer(rng.bytes(STATE.itemsize), STATE).copy()
    there = np.ones((OCTAVES, KINDS), np.bool_) if full else rng.random((OCTAVES, KINDS)) < rng.random()
    weights = rng.gamma(1.0, size=(OCTAVES, BINS // OCTAVES, KINDS)).astype(np.float32) * there[:, None]
    weights *= rng.random(weights.shape) < 0.7
    weights[:, 0] += there  # so that the octave holds something
    records["histogram"], records["octave"] = weights.reshape(BINS, KINDS), weights.sum(axis=1)
    return records


def kept_and_back(record: NDArray[Any], kept: NDArray[Any], histograms: Histograms, task: int) -> NDArray[Any]:
    """Keep a record in place of another one; return what is made of it again."""
    free, taken, room = histograms.lend(MOST_ROWS), np.zeros(1, np.int64), np.zeros(1, STATE)
    unpack(words_of(kept), kept, histograms.rows, task, room[0], words_of(room)[0])
    for name in FIELDS:
        room[name] = record[name]
    pack(room[0], words_of(room)[0], words_of(kept), kept, histograms.rows, task, free, taken)
    histograms.take_back(free[taken[0] :])
    again = np.zeros(1, STATE)
    unpack(words_of(kept), kept, histograms.rows, task, again[0], words_of(again)[0])
    return again


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_a_record_comes_back_to_the_bit_whatever_was_kept_there_before(seed: int) -> None:
    kept, histograms = np.zeros(2, KEPT), Histograms()
    for k in range(4):
        record = drawn(seed + k)
        again = kept_and_back(record, kept, histograms, task=k % 2)
        assert all(again[name].tobytes() == record[name].tobytes() for name in FIELDS)
        octaves = int((record["octave"] > 0).sum())
        assert int(kept["octaves"][k % 2]).bit_count() == octaves
        assert (kept["rows"][k % 2] > 0).sum() >= -(-octaves // BLOCKS)  # a task keeps the rows it once had
    rows = kept["rows"][kept["rows"] > 0]
    assert len(set(rows.tolist())) == len(rows) == len(histograms)  # none has two tasks, and none is lost


def test_a_record_of_full_histograms_fits() -> None:
    record, kept, histograms = drawn(1, full=True), np.zeros(1, KEPT), Histograms()
    again = kept_and_back(record, kept, histograms, task=0)
    assert again["histogram"].tobytes() == record["histogram"].tobytes()
    assert (kept["rows"] > 0).all()
    assert len(histograms) == MOST_ROWS


def test_rows_are_lent_once_and_again_when_they_are_taken_back() -> None:
    histograms = Histograms()
    first = histograms.lend(3)
    assert first.tolist() == [1, 2, 3]
    histograms.take_back(first[1:])  # never written: no longer counted
    assert (len(histograms), len(histograms.memory()[0])) == (1, 1)
    second = histograms.lend(4)
    assert second.tolist() == [2, 3, 4, 5]
    histograms.take_back(np.array([3, 1], np.int32))
    assert (len(histograms), len(histograms.memory()[0])) == (3, 5)
    assert histograms.lend(3).tolist() == [3, 1, 6]
    assert len(histograms.rows) >= 6


def test_tasks_that_come_and_go_leave_no_rows_behind(history: History) -> None:
    state, sizes = TolerantState(CELL, 900.0), []
    for day in range(5):
        for task in range(4):
            windows = history([0.01 * 1.3 ** (k % 17) for k in range(30)], task=task, start_s=day * 86_400)
            state.advance(np.full(30, task), windows)
        state.forget(np.arange(4))
        sizes.append(len(state._histograms))
    assert sizes == [0] * 5
    assert len(state.memory()["histograms"]) == 0


def test_all_octaves_of_many_tasks_have_the_bits_of_feature_state_though_rows_run_short(
    history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reclaim.data.core.parallel.ROWS_WORTH_A_THREAD", 2)
    monkeypatch.setattr(live, "_TASKS_TO_A_ROW", 1_000)
    shares = [0.003 * 2 ** (k % 10) for k in range(40)]
    histories = [history([share * (1 + task / 100) for share in shares], task=task) for task in range(50)]
    state, expected = TolerantState(CELL, 900.0, threads=3), FeatureState(CELL)
    for at in range(len(shares)):
        windows, task = concatenate([of.take(slice(at, at + 1)) for of in histories]), np.arange(50)
        assert state.advance(task, windows)[1].tobytes() == expected.advance(task, windows).tobytes()
    assert len(state._histograms) > 50 * MOST_ROWS / 2
    other = TolerantState(CELL, 0.0)  # which holds no windows: they are settled when it goes on
    other.recall({name: np.array(array) for name, array in state.memory().items()})
    windows = concatenate([history([0.3], task=task, start_s=10**5) for task in range(50)])
    assert other.advance(task, windows)[1].tobytes() == expected.advance(task, windows).tobytes()
