"""Budgets kept over time, by hand: weeks of a long test period, days of a short one, and the cost of following."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from reclaim.data.windows import empty_windows
from reclaim.replay.experiments.margins.following import by_part, cost_of_following, following_table, parts_table
from reclaim.replay.open_loop.metrics import GRANTED, RECLAIMED, ROWS, STATS, VIOLATIONS
from reclaim.replay.settings import ReplayConfig
from reclaim.training.margins.margin import Budgets

HOUR_US = 3_600_000_000
CONFIG = ReplayConfig(budgets=Budgets(0.1, 0.5), draws=100)


def _period(hours: int) -> Any:
    """Return two tasks with a window each hour that need half of their limit of 2; the first window is no test's."""
    windows = empty_windows(2 * (hours + 1))
    windows.limit[:] = 2.0
    windows.end_us[:] = np.tile(np.arange(hours + 1) * HOUR_US, 2)
    rows = np.flatnonzero(windows.end_us > 0)
    return SimpleNamespace(
        rows=rows, unit=np.repeat([0, 1], hours), unseen_units=np.zeros(2, np.bool_),
        history=SimpleNamespace(windows=windows, target=np.full((len(windows), 2), 0.5)),
        slots=SimpleNamespace(first_us=0, count=hours, hours_at=float),
    )  # fmt: skip


def _held(period: Any, short: np.ndarray) -> dict[str, np.ndarray]:
    """Return reservations that violate where ``short``, shape (n_test,), is true."""
    held = np.full(period.history.windows.limit.shape, 1.0)
    held[period.rows[short]] = 0.9
    return dict.fromkeys(("baseline", "medium", "aggressive"), held)


def test_a_test_of_three_weeks_is_told_by_week_and_a_shorter_one_by_day() -> None:
    period = _period(4 * 168)
    week = (period.history.windows.end_us[period.rows] - 1) // (168 * HOUR_US)
    kept = by_part(_held(period, (week == 1) & (period.unit == 0)), period, CONFIG)
    assert [part["value"] for part in kept["baseline"]["cpu"]] == [0.0, 5.0, 0.0, 0.0]  # half of them, of a tenth
    assert [part["value"] for part in kept["aggressive"]["memory"]] == [0.0, 1.0, 0.0, 0.0]
    assert {part["days"] for part in kept["baseline"]["cpu"]} == {7}
    assert (kept["baseline"]["cpu"][1]["low"], kept["baseline"]["cpu"][1]["high"]) == (0.0, 10.0)
    short = _period(2 * 24)
    days = by_part(_held(short, np.zeros(96, np.bool_)), short, CONFIG)["baseline"]["cpu"]
    assert [(part["part"], part["days"], part["value"]) for part in days] == [(1, 1, 0.0), (2, 1, 0.0)]


def test_a_part_of_which_less_than_half_is_known_is_left_out() -> None:
    period = _period(3 * 24)
    day = (period.history.windows.end_us[period.rows] - 1) // (24 * HOUR_US)
    late = period.rows[(day == 2) & (np.arange(len(day)) % 3 > 0)]
    period.history.target[late] = np.nan
    kept = by_part(_held(period, day == 2), period, CONFIG)
    assert [part["part"] for part in kept["baseline"]["cpu"]] == [1, 2]


def _sums(reclaimed: float, violations: float) -> np.ndarray:
    sums = np.zeros((5, len(STATS), 2))
    sums[:, ROWS], sums[:, GRANTED], sums[:, RECLAIMED], sums[:, VIOLATIONS] = 100.0, 100.0, reclaimed, violations
    return sums


def test_following_costs_what_hindsights_price_reclaims_more() -> None:
    followed = dict.fromkeys(("baseline", "aggressive"), _sums(45.0, 6.0))
    afterwards = np.full((101, 2), 0.48)
    afterwards[1:51] = 0.46
    cost = cost_of_following(followed, dict.fromkeys(followed, afterwards), CONFIG)
    assert cost["baseline"]["cpu"] == pytest.approx({"value": -0.03, "low": -0.03, "high": -0.01})
    results = {
        "estimators": [
            {"name": name, "results": {m: {"all": {
                metric: {r: {"value": value} for r in ("cpu", "memory")}
                for metric, value in (("reclaimed_share", 0.5), ("violation_rate", 0.1))
            }} for m in ("baseline", "aggressive")}}
            for name in ("network", "network-online")
        ],
        "following": {
            "by_part": {
                name: {m: {r: parts for r in ("cpu", "memory")} for m in ("baseline", "aggressive")}
                for name, parts in (
                    ("network", [{"part": 1, "days": 7, "value": 3.0, "low": 2.0, "high": 4.0},
                                 {"part": 2, "days": 7, "value": 1.5, "low": 1.1, "high": 2.0}]),
                    ("network-online", [{"part": 1, "days": 7, "value": 1.2, "low": 1.0, "high": 1.4}]),
                )
            },
            "cost": {"network-online": cost},
        },
    }  # fmt: skip
    rows = following_table(results).as_records()
    assert len(rows) == 8
    shown = ("least", "most", "kept", "kept, within the noise", "reclaimed less hindsight's")
    assert [rows[0][k] for k in shown] == [1.5, 3.0, 0, 1, None]
    assert [rows[1][k] for k in shown] == pytest.approx([1.2, 1.2, 1, 1, -0.03])
    assert len(parts_table(results).rows) == 12
