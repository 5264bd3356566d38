"""Violations and overruns: rounding is neither, a millionth more is."""

from __future__ import annotations

import numpy as np
import pytest

from reclaim.training.margins.violation import needed, overruns, room, violates


def test_a_target_as_it_is_stored_does_not_violate_the_reservation_that_equals_it() -> None:
    third = 1 / 3
    stored = float(np.float32(third))  # 3e-8 more
    assert stored > third
    assert not violates(stored, third)
    assert violates(third * (1 + 2e-6), third)
    assert not violates(np.nan, third)
    assert not violates(third, np.nan)


def test_a_target_above_the_limit_needs_the_limit() -> None:
    target, limit = np.array([0.5, 1.5, np.nan, 0.5]), np.array([4.0, 4.0, 4.0, np.nan])
    np.testing.assert_array_equal(needed(target, limit), [2.0, 4.0, np.nan, np.nan])


@pytest.mark.parametrize("shares", [(0.1, 0.2), (0.1,) * 10, (1 / 3, 1 / 3, 1 / 3), (0.7, 0.2, 0.1)])
def test_tasks_that_fill_a_machine_fit_in_any_order_and_a_little_more_does_not(shares: tuple[float, ...]) -> None:
    capacity = round(sum(shares), 1)
    for order in (shares, shares[::-1]):
        total = sum(order)  # another one than the capacity, in its last bits
        assert not overruns(total, capacity)
        assert total <= room(capacity)
    for total in (capacity * (1 + 1e-8), np.nan):
        assert overruns(total, capacity) == (total > room(capacity)) == (not np.isnan(total))
