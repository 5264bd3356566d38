"""Violations that weigh as their task's limit: the same where limits are alike, and as by hand where they are not."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from benchmarks.bar import Rows
from benchmarks.bar_tables import BEST, HINDSIGHT, NETWORK
from benchmarks.by_limit import BY_LIMIT, BY_WINDOW, RESULTS, leads
from reclaim.data.windows import empty_windows
from reclaim.training.estimators.base import MODEL, Estimate
from reclaim.training.margins.answers import Widened

HOUR_US = 3_600_000_000


def measured(limit: np.ndarray, answer: np.ndarray, need: np.ndarray, unit: np.ndarray) -> list[dict[str, Any]]:
    """Return the leads in CPU of answers over those of half of each limit; shape (n,) each, in shares of the limit."""
    n = len(limit)
    windows = empty_windows(n)
    windows.end_us[:] = HOUR_US + np.arange(n) * 300_000_000
    windows.start_us[:] = windows.end_us - 300_000_000
    windows.scheduled_us[:] = 0
    windows.limit[:] = limit[:, None]
    windows.percentiles[:] = windows.usage[:] = 0.0
    history = SimpleNamespace(windows=windows, target=np.stack([need, need], axis=1))
    rows = Rows(cast("Any", history), np.arange(0), np.arange(n), unit, np.zeros(unit.max() + 1, np.bool_))

    def of(share: np.ndarray) -> Widened:
        one = Estimate(np.stack([share * limit] * 2, axis=1), np.full((n, 2), MODEL, np.uint8))
        return Widened.alike(one)

    half = np.full(n, 0.5)
    return leads(rows, {NETWORK: of(answer), "network, all tasks weigh the same": of(answer), "half": of(half)}, 0)


def test_where_all_limits_are_alike_both_ways_of_counting_agree() -> None:
    rng = np.random.default_rng(1)
    n = 3_000
    need, unit = rng.uniform(0.1, 0.6, n), np.sort(rng.integers(0, 30, n))
    found = measured(np.full(n, 2.0), need * np.exp(0.02 * rng.standard_normal(n)), need, unit)
    for budget in ("1 %", "0.1 %"):
        counted = {one["counted"]: one for one in found if one["budget"] == budget}
        assert counted[BY_WINDOW]["value"] == pytest.approx(counted[BY_LIMIT]["value"])
        assert counted[BY_WINDOW]["value"] > 0


def test_an_answer_that_lets_large_tasks_violate_leads_by_less_where_violations_weigh_as_limits() -> None:
    rng = np.random.default_rng(2)
    n = 4_000
    unit = np.repeat(np.arange(40), 100)
    limit = np.where(unit % 2 == 0, 9.0, 1.0)
    need = rng.uniform(0.1, 0.5, n)
    often = (limit > 1.0) & (
        np.arange(n) % 50 == 0
    )  # 1 % of the windows, of which each has a limit of 9 for a mean of 5
    answer = np.where(often, need / 2, need + 0.02)
    one = {line["counted"]: line for line in measured(limit, answer, need, unit) if line["budget"] == "1 %"}
    assert one[BY_LIMIT]["value"] < one[BY_WINDOW]["value"]
    assert one[BY_LIMIT]["best_statistical"] == "half"


def test_leads_by_task_window_are_those_of_the_bar() -> None:
    bars = [json.loads(path.read_text()) for path in RESULTS.parent.glob("bar-*.json")]
    of_fingerprint = {bar["dataset"]["fingerprint"]: bar for bar in bars}
    for of in json.loads(RESULTS.read_text()).values():
        found = {
            (d["resource"], d["budget"]): d["reclaims"][:2]
            for d in of_fingerprint[of["dataset"]["fingerprint"]]["differences"]
            if (d["horizon_s"], d["collections"], d["margin_set"]) == (3_600, "all", HINDSIGHT)
            and (d["estimator"], d["against"]) == (NETWORK, BEST)
        }
        for one in of["leads"]:
            if one["counted"] == BY_WINDOW:
                assert one["reclaims"] == pytest.approx(found[one["resource"], one["budget"]], abs=1e-4)
