"""Slots without usage: they are remembered as long as their windows would be taken, and for two hours at most."""

from __future__ import annotations

from reclaim.data.traces.history import RawSeries
from reclaim.serving.feed.empty import LATENESS_S, LONGEST_S, EmptySlots
from reclaim.serving.settings import ServingSettings
from tests.data.traces.kubernetes.histories import APP, T0, beat, one

BEFORE = b"the fold before"


def usage(start_s: float, end_s: float, step_s: float = 30) -> list[RawSeries]:
    return [one(APP, beat(start_s, end_s, step_s=step_s))]


def test_the_bound_is_that_of_late_windows_in_the_service() -> None:
    assert ServingSettings().lateness_s == LATENESS_S


def test_a_slot_has_come_where_it_has_more_samples_than_when_it_was_folded() -> None:
    empty = EmptySlots()
    empty.folded(usage(0, 300), T0, T0 + 600, BEFORE)
    empty.folded([], T0 + 600, T0 + 900, b"a later fold")
    assert empty.before == (T0, BEFORE)
    assert empty.range_s == (T0 + 300, T0 + 900)
    assert empty.came([]) == []
    assert empty.came(usage(300, 330)) == [T0 + 300]
    empty.folded(usage(0, 330), T0, T0 + 900, BEFORE)
    assert empty.came(usage(300, 330)) == []
    assert empty.came(usage(300, 700)) == [T0 + 300, T0 + 600]


def test_a_slot_of_which_samples_were_deleted_has_not_come() -> None:
    empty = EmptySlots()
    empty.folded([], T0, T0 + 300, BEFORE)
    empty.folded(usage(0, 300), T0, T0 + 300, BEFORE)  # ten samples
    assert empty.came(usage(0, 150)) == []


def test_samples_after_the_range_that_was_folded_make_no_slot_too_late() -> None:
    """The slot that has just begun is folded later, and until then its windows are not with the service."""
    empty = EmptySlots()
    empty.folded(usage(1500, 1530), T0, T0 + 300, BEFORE)
    assert empty.range_s == (T0, T0 + 300)


def test_a_slot_is_forgotten_when_its_windows_would_come_too_late() -> None:
    """A window that ends 900 s before the last one of its task is the last that the service takes."""
    empty = EmptySlots()
    empty.folded([], T0, T0 + 300, BEFORE)
    for end_s in (600, 900, 1200):
        empty.folded(usage(end_s - 300, end_s), T0 + end_s - 300, T0 + end_s, b"")
        assert empty.before == (T0, BEFORE)
    empty.folded(usage(1200, 1500), T0 + 1200, T0 + 1500, b"")
    assert empty.before is None
    assert empty.counts == {}


def test_a_fold_is_remembered_for_two_hours_at_most() -> None:
    empty = EmptySlots()
    for start_s in range(0, LONGEST_S, 300):
        empty.folded([], T0 + start_s, T0 + start_s + 300, str(start_s).encode())
        assert empty.before == (T0, b"0")
    empty.folded([], T0 + LONGEST_S, T0 + LONGEST_S + 300, b"")
    assert empty.before is None
