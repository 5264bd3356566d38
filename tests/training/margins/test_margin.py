"""Margins and guards: the bounds of a reservation, the rule that gave it, and what lies between two margins."""

from __future__ import annotations

import math

import numpy as np
import pytest

from reclaim.data.errors import ConfigError
from reclaim.data.windows import P90, demand, empty_windows
from reclaim.features.groups import TIER_LABELS
from reclaim.training.estimators.base import CAP, JUMP, MODEL, STARTUP, UNKNOWN, Estimate
from reclaim.training.margins.margin import (
    HIGHEST_SHARE,
    LOWEST_SHARE,
    Budgets,
    Margin,
    guarded,
    three_margins,
    under,
    young_runs,
)

S = 1_000_000
NAN = math.nan


def test_a_run_is_young_for_five_minutes_and_one_of_unknown_start_is_not() -> None:
    windows = empty_windows(4)
    windows.end_us[:] = 1_000 * S
    windows.scheduled_us[:] = [700 * S, 700 * S + 1, 0, -1]
    assert young_runs(windows).tolist() == [False, True, False, False]
    windows.end_us[:] = 100 * S
    assert not young_runs(windows)[2:].any()


def test_a_rule_is_named_where_it_changes_the_answer() -> None:
    # CPU: answer, demand now and limit; the last two rows are of young runs
    rows = [
        (5.0, 4.0, 8.0, 5.0, MODEL), (4.0, 4.0, 8.0, 4.0, MODEL), (3.0, 4.0, 8.0, 4.0, JUMP),
        (8.0, 4.0, 8.0, 8.0, MODEL), (9.0, 4.0, 8.0, 8.0, CAP), (3.0, 8.0, 8.0, 8.0, JUMP),
        (NAN, 4.0, 8.0, 8.0, UNKNOWN), (5.0, 4.0, NAN, 5.0, MODEL), (5.0, 4.0, 8.0, 8.0, STARTUP),
        (5.0, 4.0, NAN, 5.0, MODEL),
    ]  # fmt: skip
    answer, now, limit, expected, rule = map(np.array, zip(*rows, strict=True))
    windows = empty_windows(len(rows))
    windows.percentiles[:, P90], windows.limit[:], windows.end_us[:] = now, limit[:, None], 1_000 * S
    windows.scheduled_us[-2:] = 900 * S
    assert demand(windows)[:, 0].tolist() == now.tolist()
    found = guarded(Estimate(np.stack([answer, answer], axis=1), np.full((len(rows), 2), MODEL, np.uint8)), windows)
    np.testing.assert_array_equal(found.reservation[:, 0], expected)
    assert found.rule[:, 0].tolist() == rule.tolist()


def test_medium_lies_half_way_and_the_baseline_never_below_the_other() -> None:
    bare = {"baseline": np.array([9.0, 1.0]), "aggressive": np.array([1.0, 4.0])}
    assert {name: under(name, bare).tolist() for name in ("baseline", "medium", "aggressive")} == {
        "baseline": [9.0, 4.0], "medium": [5.0, 4.0], "aggressive": [1.0, 4.0],
    }  # fmt: skip


def test_medium_of_two_margins_is_half_way_and_by_tier_where_both_are() -> None:
    a, b = (Margin(name, of, (of,) * len(TIER_LABELS)) for name, of in (("baseline", (0.5, 0.0)), ("a", (0.1, -0.2))))
    medium = three_margins(a, b)["medium"]
    assert medium.share == pytest.approx((0.3, -0.1))
    assert medium.by_tier is not None
    assert medium.by_tier[-1] == pytest.approx((0.3, -0.1))
    assert three_margins(a, Margin("a", (0.1, -0.2)))["medium"].by_tier is None


def test_a_margin_is_a_factor_by_tier_and_moves_by_the_logarithm_of_it() -> None:
    windows = empty_windows(2)
    windows.tier[:] = [-1, 1]
    by_tier = Margin("m", (0.0, 0.0), tuple((0.1 * k, 0.0) for k in range(len(TIER_LABELS))))
    assert Margin("m", (0.5, -0.5)).factor(windows).tolist() == [1.5, 0.5]
    assert by_tier.factor(windows) == pytest.approx(np.array([[1.0, 1.0], [1.2, 1.0]]))
    log = np.full((len(TIER_LABELS), 2), math.log(2.0))
    moved = by_tier.moved(log).by_tier
    assert moved is not None
    assert moved[2] == pytest.approx((1.4, 1.0))  # 1.2 times 2, less 1
    low, high = by_tier.bounds
    assert low[0, 0] == pytest.approx(math.log(1 + LOWEST_SHARE))
    assert high[-1, -1] == pytest.approx(math.log(1 + HIGHEST_SHARE))


def test_a_budget_is_that_of_its_margin_and_medium_has_the_geometric_mean() -> None:
    budgets = Budgets(0.001, 0.1)
    assert [budgets.of(name) for name in ("baseline", "medium", "aggressive")] == [0.001, None, 0.1]
    assert dict(budgets.by_margin) == pytest.approx({"baseline": 0.001, "medium": 0.01, "aggressive": 0.1})
    assert Budgets(0.01, 0.01).baseline == 0.01


@pytest.mark.parametrize("shares", [(0.0, 0.1), (0.2, 0.1), (0.1, 1.0), (NAN, 0.1)])
def test_impossible_budgets_are_refused(shares: tuple[float, float]) -> None:
    with pytest.raises(ConfigError, match="0 < baseline <= aggressive < 1"):
        Budgets(*shares)
