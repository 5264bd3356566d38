"""Tests of margins of machines that follow: two budgets, of times and of machines at once, and their bounds."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from reclaim.data.errors import ConfigError
from reclaim.training.machines.curve import MachineCurve
from reclaim.training.machines.fit import MachineRows
from reclaim.training.machines.following import AT_ONCE, SMALLEST, TIMES, OnlineMachines, follow_all
from reclaim.training.machines.terms import N_TERMS, RATES, T_BAND, T_LIMIT
from reclaim.training.margins.violation import violates

BUDGETS = (0.001, math.sqrt(1e-5), 0.01)
SLOT_US = 300_000_000
HOUR = 12
"""Slots of an hour."""


def moving_together(days: int, seed: int = 2) -> tuple[MachineRows, NDArray[np.int64]]:
    """Return snapshots of 50 machines whose peaks have most in common, which is another each hour."""
    rng, slots = np.random.default_rng(seed), 288 * days
    common = 0.7 * rng.random(slots // HOUR).repeat(HOUR) ** 6
    peak = common[:, None] + 0.3 * rng.random((slots, 50))
    n = slots * 50
    sums = np.zeros((n, N_TERMS))
    sums[:, T_LIMIT] = 1.0
    sums[:, T_BAND:] = np.linspace(0.1, 0.3, len(RATES))
    time = np.repeat(np.arange(slots), 50) * SLOT_US
    return MachineRows(sums, peak.reshape(-1), np.arange(n) % 50, 1.0), time


def crowded(rows: MachineRows, time: NDArray[np.int64], reserved: NDArray[np.float64]) -> float:
    """Return the share of the times at which more than a tenth of the machines pass."""
    return float((np.bincount(time // SLOT_US, violates(rows.peak, reserved)) > AT_ONCE * 50).mean())


def test_machines_that_move_together_pass_together_at_no_more_than_one_time_in_a_hundred_where_that_is_held() -> None:
    rows, time = moving_together(20)
    curve = MachineCurve().with_margins(MachineCurve().score(rows.sums[:50_000], rows.peak[:50_000], 1.0))
    free, held = (follow_all(curve, rows, time, 3_600, SLOT_US, BUDGETS, at_once=share) for share in (1.0, AT_ONCE))
    assert 0.8 * 0.01 <= violates(rows.peak, free[2]).mean() <= 1.25 * 0.01
    assert crowded(rows, time, free[2]) > 1.5 * TIMES
    assert crowded(rows, time, held[2]) <= TIMES
    assert violates(rows.peak, held[2]).mean() <= 0.01
    assert (np.diff(held, axis=0) <= 0).all()  # a smaller budget never reserves less
    assert (held <= 1.0).all()


def test_machines_that_are_alone_are_not_held_any_tighter() -> None:
    rng, n = np.random.default_rng(1), 288 * 10 * 50
    rows, time = moving_together(10)
    rows = MachineRows(rows.sums, rng.random(n) ** 4, rows.machine, 1.0)
    curve = MachineCurve().with_margins(MachineCurve().score(rows.sums[:50_000], rows.peak[:50_000], 1.0))
    free, held = (follow_all(curve, rows, time, 3_600, SLOT_US, BUDGETS, at_once=share) for share in (1.0, AT_ONCE))
    np.testing.assert_array_equal(held, free)


def counted(online: OnlineMachines, slots: range, machines: int, passed: Any) -> None:
    """Let as many of the machines pass at each slot as ``passed`` says, under every margin."""
    for slot in slots:
        online.reach(slot)
        if online.is_time(slot):
            violated = np.full((len(BUDGETS), 1), passed(slot))
            online.count(slot, np.array([machines]), np.minimum(violated, machines))


def test_the_first_outcomes_move_the_margins_by_hand() -> None:
    online = OnlineMachines([MachineCurve()], BUDGETS, 3_600)
    counted(online, range(14), 100, lambda slot: 3 if slot == 0 else 0)
    assert online.asked[:, 0].tolist() == list(BUDGETS)  # slot 0 is known when 14 begins: after 12, and a slot late
    assert online.reach(14)
    # a day has 288 * 100 answers: at 1 % 288 violations, at 0.1 % 28.8, and the full rate of 4 is of 640; 3 violations
    # for 1 and for 0.1
    assert online.asked[2, 0] == pytest.approx(0.01 * math.exp(-4 * math.sqrt(288 / 640) * (3 - 1) / 288))
    assert online.asked[0, 0] == pytest.approx(0.001 * math.exp(-4 * math.sqrt(28.8 / 640) * (3 - 0.1) / 28.8))
    assert online.judged.tolist() == [100]
    assert online.violated[:, 0].tolist() == [3, 3, 3]
    assert online.at_once[:, 0].tolist() == [0.03] * 3
    assert (online.lowered == 1).all()  # 3 of 100 at once are no tenth


def test_too_many_at_once_lower_what_is_asked_until_that_is_made_good_by_hand() -> None:
    online = OnlineMachines([MachineCurve()], BUDGETS, 3_600)
    counted(online, range(15), 100, lambda slot: 11 if slot == 0 else 0)
    # one time of the twelve a day that count: (1 - 0.01) / 12; and a hundredth of that less at each later time
    assert online.lowered[2, 0] == pytest.approx(math.exp(-0.99 / 12))
    first = online.asked[2, 0]
    counted(online, range(15, 15 + 98), 100, lambda _: 0)
    assert online.lowered[2, 0] == pytest.approx(math.exp(-(0.99 - 0.98) / 12))
    own = 0.01 * math.exp(-4 * math.sqrt(288 / 640) * (11 - 1) / 288)  # the first budget has raised nothing meanwhile
    assert online.asked[2, 0] == pytest.approx(own * online.lowered[2, 0])
    assert online.asked[2, 0] > first
    counted(online, range(113, 130), 100, lambda _: 0)
    assert online.lowered[2, 0] == 1
    assert online.asked[2, 0] > own


def test_what_is_asked_stays_within_its_bounds() -> None:
    for passed, bound in ((100, SMALLEST), (0, 0.5)):
        online = OnlineMachines([MachineCurve()], BUDGETS, 3_600)
        counted(online, range(288 * 20), 100, lambda _, n=passed: n)
        assert online.asked[2, 0] == pytest.approx(bound)
        assert (online.asked <= 0.5).all()
        assert (online.asked >= SMALLEST * (1 - 1e-9)).all()
        assert np.isfinite(online.margins).all()


@pytest.mark.parametrize("horizon_s", [300, 3_600, 86_400])
def test_it_goes_on_to_the_bit_from_its_arrays(horizon_s: int) -> None:
    rng = np.random.default_rng(2)
    drawn = rng.integers(0, 30, 2_000)
    ours, theirs = (OnlineMachines([MachineCurve()], BUDGETS, horizon_s) for _ in range(2))
    counted(ours, range(1_000), 100, lambda slot: drawn[slot])
    theirs.recall({name: array.copy() for name, array in ours.memory().items()})
    np.testing.assert_array_equal(ours.margins, theirs.margins)
    for online in (ours, theirs):
        counted(online, range(1_000, 2_000), 100, lambda slot: drawn[slot])
    np.testing.assert_array_equal(ours.margins, theirs.margins)
    for name, array in ours.memory().items():
        np.testing.assert_array_equal(array, theirs.memory()[name], name)
    assert (ours.asked != np.array(BUDGETS)[:, None]).all()
    with pytest.raises(ConfigError, match="start afresh"):
        theirs.recall({})


def test_before_the_first_outcome_nothing_is_known_of_them() -> None:
    online = OnlineMachines([MachineCurve()], BUDGETS, 3_600)
    for share in (online.recent, online.at_once, online.most_at_once):
        assert np.isnan(share).all()


def test_a_time_at_which_no_machine_is_judged_spends_nothing_and_makes_nothing_good() -> None:
    online = OnlineMachines([MachineCurve()] * 2, BUDGETS, 3_600)
    for slot in range(40):
        online.reach(slot)
        passed = np.tile([11 if slot == 0 else 0, 0], (len(BUDGETS), 1))
        online.count(slot, np.array([100 if slot == 0 else 0, 100]), passed)
    assert online.lowered[:, 0] == pytest.approx([math.exp(-0.99 / 12)] * 3)
    assert online.judged.tolist() == [100, 26 * 100]
    assert (online.lowered[:, 1] == 1).all()
    assert (online.at_once == 0).all()


def test_switched_off_it_counts_and_moves_nothing() -> None:
    online = OnlineMachines([MachineCurve()], BUDGETS, 3_600, moves=False)
    counted(online, range(100), 100, lambda _: 50)
    assert online.asked[:, 0].tolist() == list(BUDGETS)
    assert online.recent[:, 0].tolist() == pytest.approx([0.5] * 3)
    assert online.most_at_once[:, 0].tolist() == [0.5] * 3
    assert online.judged.tolist() == [8_600]  # of slots 0 to 85
