"""Large arrays: zero however they were made, grown without loss, and lent to be read alone."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from reclaim.data.core.arrays import (
    blank_records,
    blank_rows,
    copy_of,
    is_first,
    is_last,
    lent,
    mean_known,
    raw,
    room_for,
)

PAIR = np.dtype([("small", "i1"), ("large", "f8")], align=True)


@pytest.mark.parametrize("n", [0, 3, 2**19])
def test_blank_records_are_zero_and_may_be_written_to(n: int) -> None:
    records = blank_records((n, 2), PAIR)
    assert (records.shape, records.dtype) == ((n, 2), PAIR)
    assert not raw(records).any()
    records["large"] = 1.5
    assert (records["large"] == 1.5).all()


@pytest.mark.parametrize("n", [1, 2**19])
def test_what_grows_keeps_its_rows_and_has_zeros_behind_them(n: int) -> None:
    records = np.zeros(n, PAIR)
    records["large"] = np.arange(n)
    assert room_for(records, n) is records
    grown = room_for(records, n + 1)
    assert len(grown) == 2 * n
    assert (grown["large"][:n] == np.arange(n)).all()
    assert not raw(grown[n:]).any()
    assert len(room_for(records, 5 * n)) == 5 * n


def test_a_copy_is_equal_and_apart_and_blanked_rows_are_zero() -> None:
    records = np.zeros((3, 2), PAIR)
    records["small"], records["large"] = 7, 0.5
    copy = copy_of(records)
    blank_rows(records, np.array([2, 0, 2]))
    assert records["large"].tolist() == [[0, 0], [0.5, 0.5], [0, 0]]
    assert (copy["small"] == 7).all()
    blank_rows(np.zeros(0, PAIR), np.zeros(0, np.int64))


def test_what_is_lent_is_of_one_kind_whatever_it_was() -> None:
    plain: NDArray[np.int64] = np.arange(6)
    fixed = plain.copy()
    fixed.flags.writeable = False
    for column in lent(plain, fixed, plain.repeat(2)[::2]):
        assert column.tolist() == plain.tolist()
        assert column.flags.c_contiguous
        assert not column.flags.writeable
    assert plain.flags.writeable


def test_a_copy_is_made_in_the_room_that_is_given_where_that_is_enough() -> None:
    records = np.zeros((3, 2), PAIR)
    records["large"] = 0.5
    for more in (-1, 0, 5):
        room = np.full(records.nbytes + more, 9, np.uint8)
        copy = copy_of(records, room)
        assert copy.tolist() == records.tolist()
        assert np.shares_memory(copy, room) == (more >= 0)
        assert (room[records.nbytes :] == 9).all()


def test_a_run_ends_where_any_of_its_keys_changes() -> None:
    a, b = np.array([1, 1, 1, 2, 2, 2]), np.array([5, 5, 6, 6, 6, 5])  # (1, 5) twice, (1, 6), (2, 6) twice, (2, 5)
    assert is_first(a, b).tolist() == [True, False, True, True, False, True]
    assert is_last(a, b).tolist() == [False, True, True, False, True, True]
    assert is_first(a[:0]).tolist() == is_last(a[:0]).tolist() == []
    assert is_first(a[:1]).tolist() == is_last(a[:1]).tolist() == [True]


def test_the_mean_is_of_finite_values_alone() -> None:
    values = np.array([[1.0, np.nan, np.nan], [3.0, 4.0, np.inf], [np.inf, np.nan, np.nan]])
    assert np.array_equal(mean_known(values), [2.0, 4.0, np.nan], equal_nan=True)
    assert np.isnan(mean_known(np.zeros((0, 2)))).all()
