"""Numbers that are given, released and given again."""

from __future__ import annotations

import pytest

from reclaim.features.fold.ids import Numbering


def test_the_smallest_free_number_is_given_first() -> None:
    numbering = Numbering()
    assert [numbering.of(key) for key in "abca"] == [1, 2, 3, 1]
    numbering.release(3)
    numbering.release(1)
    assert [numbering.of(key) for key in "bxyz"] == [2, 1, 3, 4]
    assert numbering.keys == ["x", "b", "y", "z"]


def test_one_made_from_the_keys_of_another_goes_on_as_that_one_would() -> None:
    one = Numbering()
    for key in range(9):
        one.of(key)
    for number in (8, 2, 5):
        one.release(number)
    two = Numbering(list(one.keys))
    assert len(one) == len(two) == 6
    assert [one.of(key) for key in range(5, 14)] == [two.of(key) for key in range(5, 14)]


def test_a_number_that_no_key_has_cannot_be_released() -> None:
    numbering = Numbering("a")
    numbering.release(1)
    with pytest.raises(KeyError):
        numbering.release(1)
