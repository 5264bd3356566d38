"""Estimators at equal violation, by hand: one period swept, and shares compared in the same resamples."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from reclaim.data.windows import empty_windows
from reclaim.replay.equal_violation.compare import EqualViolation, SweptPeriod
from reclaim.replay.open_loop.bootstrap import Bootstrap
from reclaim.replay.open_loop.paired import BETTER, NOISE, UNKNOWN, WORSE
from reclaim.training.estimators.base import Estimate
from reclaim.training.margins.answers import Widened
from reclaim.training.margins.calibrate import Calibration, calibrate, guarded_reservations
from reclaim.training.margins.margin import Budgets
from reclaim.training.margins.violation import needed, violates

HOUR_US = 3_600_000_000
BUDGETS = Budgets(0.1, 0.4)
HOW = Bootstrap(draws=200, seed=1, confidence=0.9)


def shares(*values: float) -> np.ndarray:
    """Return shares of all units and of resamples, of CPU; memory is not measured."""
    return np.stack([np.array(values), np.full(len(values), np.nan)], axis=1)


def test_the_difference_is_taken_in_each_resample_and_the_verdict_is_that_of_its_interval() -> None:
    of = {"a": shares(0.5, 0.6, 0.4), "b": shares(0.4, 0.5, 0.3), "c": shares(0.5, 0.4, 0.6)}
    equal = EqualViolation(of, 1.0)
    better, level = equal.compare("a", "b", 0), equal.compare("a", "c", 0)
    assert better.verdict == BETTER
    gained = better.difference.reclaimed
    assert (gained.value, gained.low, gained.high) == pytest.approx((0.1, 0.1, 0.1))  # the noise is common to both
    assert equal.compare("b", "a", 0).verdict == WORSE
    assert level.verdict == NOISE
    assert level.difference.reclaimed.low == pytest.approx(-0.2)
    assert level.difference.violation.report() == {"value": 0.0, "low": 0.0, "high": 0.0}
    assert equal.compare("a", "b", 1).verdict == UNKNOWN
    apart = EqualViolation({"a": shares(0.9, 0.1, 0.2), "b": shares(0.0, 0.0, 0.0)}, 1.0).compare("a", "b", 0)
    gained = apart.difference.reclaimed
    assert (gained.value, gained.low, gained.high) == (0.9, 0.1, 0.2)  # the interval is of the resamples alone


@pytest.mark.parametrize(("reached", "verdict"), [(8, UNKNOWN), (9, BETTER)])
def test_the_verdict_is_unknown_where_more_than_a_tenth_of_the_resamples_do_not_reach_the_budget(
    reached: int, verdict: str
) -> None:
    draws = [0.6 if k < reached else np.nan for k in range(10)]
    equal = EqualViolation({"a": shares(0.6, *draws), "b": shares(0.5, *[0.5] * 10)}, 0.9)
    assert equal.compare("a", "b", 0).verdict == verdict


def test_the_best_other_is_the_one_that_reclaims_most_of_those_that_reach_the_budget() -> None:
    of = {"a": shares(0.5, 0.5), "b": shares(0.4, 0.4), "c": shares(0.3, 0.3), "d": shares(np.nan, 0.9)}
    equal = EqualViolation(of, 0.9)
    best = equal.compare_best("a", ["a", "b", "c", "d", "not swept"], 0)
    assert best is not None
    assert best.against == "b"
    assert equal.compare_best("a", ["a", "d"], 0) is None
    assert equal.compare_best("not swept", ["b"], 0) is None


def _period(rng: np.random.Generator, n_units: int, hours: int) -> Any:
    """Return a task of a limit of 2 in each collection, with a window an hour that needs some share of it."""
    windows = empty_windows(n_units * hours)
    windows.limit[:] = 2.0
    windows.end_us[:] = np.tile(np.arange(10, hours + 10) * HOUR_US, n_units)
    windows.start_us[:] = windows.end_us - HOUR_US
    return SimpleNamespace(
        rows=np.arange(len(windows)), unit=np.repeat(np.arange(n_units), hours), unseen_units=np.zeros(n_units, bool),
        history=SimpleNamespace(windows=windows, target=rng.uniform(0.1, 0.9, (len(windows), 2))),
    )  # fmt: skip


def test_what_is_reclaimed_at_a_budget_is_what_the_margin_that_just_keeps_it_reclaims() -> None:
    rng = np.random.default_rng(3)
    period = _period(rng, 6, 50)
    windows, target = period.history.windows, period.history.target
    bare = 2.0 * target * rng.uniform(0.7, 1.1, target.shape)
    answers = Widened.alike(Estimate(bare, np.zeros(bare.shape, np.uint8)))
    at = SweptPeriod.lay_out(period, BUDGETS, HOW).reclaimed(answers)
    assert list(at) == ["baseline", "aggressive"]
    assert at["baseline"].shape == (1 + HOW.draws, 2)
    set_there: Calibration = calibrate(answers, windows, target, BUDGETS)
    reserved = guarded_reservations(answers, windows, set_there.settings)
    for margin, budget in (("baseline", 0.1), ("aggressive", 0.4)):
        kept = violates(needed(target, windows.limit), reserved[margin]).mean(axis=0)
        assert (kept <= budget).all()
        spared = (2.0 - reserved[margin]).mean(axis=0) / 2.0
        np.testing.assert_allclose(at[margin][0], spared, atol=0.005)  # a curve is straight between steps of 3 %
    assert (at["aggressive"][0] > at["baseline"][0]).all()
    assert np.isfinite(at["baseline"]).all()
