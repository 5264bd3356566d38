"""Large arrays: zero however they were made, grown without loss, and lent to be read alone."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from reclaim.data.core.arrays import blank_records, blank_rows, copy_of, lent, raw, room_for

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
