"""Curves of the frontier by hand, and their intervals in the same resamples."""

import numpy as np
import pytest

from reclaim.replay.equal_violation.curves import Curve, JudgedUnits, draw_curve, report_curves
from reclaim.replay.open_loop.bootstrap import Bootstrap
from reclaim.replay.open_loop.rows import ratio

HOW = Bootstrap(draws=200, seed=1, confidence=0.9)
RATES = (0.1, 0.4)


def units(n_units: int = 1, rates: tuple[float, ...] = RATES) -> JudgedUnits:
    """Return units of 10 task-windows, 100 granted each, of which the oracle reclaims 80."""
    return JudgedUnits.from_totals(np.tile([10.0, 100.0, 80.0], (n_units, 1)), rates, HOW)


def sweep(violations: list[float], reclaimed: list[float]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([violations]), np.array([reclaimed])


NARROW = sweep([6, 2, 1, 0], [80, 60, 30, 0])


def test_one_plan_makes_the_whole_curve_and_what_it_reclaims_at_each_rate() -> None:
    curve = draw_curve([NARROW], units())
    assert curve.violation.tolist() == [0.6, 0.2, 0.1, 0.0]
    assert curve.reclaimed.tolist() == [0.8, 0.6, 0.3, 0.0]
    assert curve.at.shape == (2, 201)
    np.testing.assert_allclose(curve.at[:, 0], [0.3, 0.7])
    assert np.isnan(curve.at[:, 1:]).all()  # one unit tells nothing of the noise
    alike = draw_curve([(np.tile(NARROW[0], (2, 1)), np.tile(NARROW[1], (2, 1)))], units(2))
    np.testing.assert_allclose(alike.at, alike.at[:, :1].repeat(201, axis=1))  # so is every resample of two alike
    np.testing.assert_allclose(alike.at[:, 0], curve.at[:, 0])


def test_of_two_plans_each_is_followed_on_its_side_of_the_rates_geometric_mean() -> None:
    careful, bold = sweep([5, 2.2, 1, 0], [50, 45, 40, 0]), NARROW
    curve = draw_curve([careful, bold], units())  # the mean is 0.2, not 0.25: up to there the careful one
    assert curve.violation.tolist() == [0.6, 0.1, 0.0]
    assert curve.reclaimed.tolist() == [0.8, 0.4, 0.0]
    np.testing.assert_allclose(curve.at[:, 0], [0.4, 0.7])


def test_a_report_ranks_who_gets_there_and_holds_the_learned_against_the_best_of_the_others() -> None:
    curves = {
        "ours": draw_curve([NARROW], units()),
        "good": draw_curve([sweep([6, 2, 1, 0], [70, 50, 20, 0])], units()),
        "never": draw_curve([sweep([6, 5, 5, 5], [80, 60, 30, 0])], units()),
    }
    report = report_curves(curves, units(), ["ours"])
    strict = {name: of["at"][0] for name, of in report.items()}
    assert [strict[name]["rank"] for name in curves] == [1, 2, None]
    assert strict["never"]["value"] is None
    assert strict["ours"]["value"] == pytest.approx(0.3)
    assert strict["ours"]["of_oracle"] == pytest.approx(0.3 / 0.8)
    assert strict["ours"]["ahead"]["of"] == "good"
    assert strict["ours"]["ahead"]["value"] == pytest.approx(0.1)
    assert "ahead" not in strict["good"]
    assert strict["ours"]["lead"] == strict["ours"]["ahead"]  # the first is compared with the next, whichever that is
    assert not any("lead" in strict[name] for name in ("good", "never"))
    assert report_curves(curves, units(), [])["ours"]["at"][0]["lead"]["of"] == "good"


def test_curves_are_resampled_alike_so_that_their_difference_has_less_noise_than_either() -> None:
    rng = np.random.default_rng(2)
    ground = units(40, (0.2,))
    reclaimed = rng.uniform(20, 80, (40, 1)) * [1.0, 0.5]
    violations = np.tile([4.0, 0.0], (40, 1))
    one = draw_curve([(violations, reclaimed)], ground)
    other = draw_curve([(violations, reclaimed - 5.0)], ground)
    assert np.ptp(one.at[0, 1:]) > 0.02
    np.testing.assert_allclose(one.at - other.at, 0.05)


def test_points_that_say_nothing_new_are_left_out() -> None:
    # of each point one number is new, or both are; of the last none
    curve = Curve(np.array([0.4, 0.3, 0.2, 0.2, 0.1, 0.1]), np.array([0.6, 0.5, 0.5, 0.4, 0.4, 0.4]), np.ones((2, 201)))
    points = report_curves({"a": curve}, units(), [])["a"]["curve"]
    assert points == {"violation_rate": [0.4, 0.3, 0.2, 0.2, 0.1], "reclaimed_share": [0.6, 0.5, 0.5, 0.4, 0.4]}


def test_an_interval_leaves_out_resamples_in_which_nothing_is_known() -> None:
    values = np.concatenate([[0.5], [0.1, np.nan, 0.9], np.full(18, 0.5)])
    known = np.concatenate([[0.1, 0.9], np.full(18, 0.5)])
    low, high = np.quantile(known, [(1 - HOW.confidence) / 2, (1 + HOW.confidence) / 2])
    assert HOW.interval(values) == pytest.approx({"value": 0.5, "low": low, "high": high})
    values[4:6] = np.nan  # three of 21 are more than a tenth
    assert HOW.interval(values) == {"value": 0.5, "low": None, "high": None}
    assert HOW.interval(np.array([np.nan, np.nan])) == {"value": None, "low": None, "high": None}
    assert np.isnan(ratio(1.0, 0.0))
