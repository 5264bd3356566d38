"""Promises of every estimator, held over each registered one and over the learned one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from reclaim.data.core import parallel
from reclaim.data.errors import ConfigError
from reclaim.data.windows import Cell, Windows, concatenate, empty_windows
from reclaim.features.fold.batch import FeatureState
from reclaim.training.estimators import base
from reclaim.training.estimators.base import RULES, STARTUP, UNKNOWN, Estimate, Estimator
from reclaim.training.estimators.registry import ESTIMATORS, build_estimator, candidates
from reclaim.training.margins.margin import Guarded, Margin
from reclaim.training.margins.price import Price
from reclaim.training.margins.tune import TunedEstimator
from reclaim.training.models.estimator import ForecastEstimator, at_price
from reclaim.training.models.network_forecaster import NetworkForecaster

NAMES = (*sorted(ESTIMATORS), "tuned", "forecast")
WINDOW_US = 300_000_000
MARGIN = Margin("baseline", (0.2, 0.1))

PRICE = Price("medium", (5.0, 20.0))

TUNING = {
    "baseline": ({"half_life_s": 3_600.0, "margin": 0.5}, {}),
    "aggressive": ({"half_life_s": 900.0}, {"half_life_s": 3_600.0, "margin": 0.5}),
}

Make = Callable[[], Estimator]


@pytest.fixture(scope="session")
def makers(random_forecaster: NetworkForecaster) -> dict[str, Make]:
    """Return makers of fresh estimators, by name."""
    return {
        **{name: partial(build_estimator, name) for name in ESTIMATORS},
        "tuned": partial(TunedEstimator, "borg", TUNING),
        "forecast": lambda: ForecastEstimator(random_forecaster, 3_600, PRICE),
    }


@pytest.fixture(params=NAMES)
def make(request: pytest.FixtureRequest, makers: dict[str, Make]) -> Make:
    """Return each maker in turn."""
    return makers[request.param]


def _histories(seed: int, n_tasks: int = 4, longest: int = 80) -> Windows:
    """Return tasks of any length with bursts, gaps, changed limits, restarts and unknown measurements.

    Each two are of one collection.
    """
    rng = np.random.default_rng(seed)
    parts = []
    for task in range(n_tasks):
        n = int(rng.integers(1, longest))
        w = empty_windows(n)
        w.collection_id[:] = 10 + task // 2
        w.instance_index[:] = task
        steps = rng.choice([1, 1, 1, 1, 1, 2, 40], n)
        w.start_us[:] = WINDOW_US * (2 + rng.integers(0, 50) + np.cumsum(steps))
        w.end_us[:] = w.start_us + WINDOW_US
        w.usage[:] = rng.random(w.usage.shape) * rng.choice([0.2, 0.5, 1.5], (n, 1))
        w.usage[rng.random(w.usage.shape) < 0.05] = np.nan
        w.percentiles[:] = np.sort(rng.random(w.percentiles.shape), axis=1) * rng.choice([0.2, 0.5, 1.5], (n, 1))
        w.percentiles[rng.random(n) < 0.05] = np.nan
        w.limit[:] = np.where(np.arange(n)[:, None] < n // 2, 1.0, rng.choice([1.0, 2.0]))
        w.scheduled_us[:] = rng.choice([-1, int(w.start_us[n // 2])]) if rng.random() < 0.5 else w.start_us[0]
        w.tier[:] = rng.integers(-1, 5)
        parts.append(w)
    return concatenate(parts)


def _bits(estimate: Estimate) -> tuple[bytes, ...]:
    forecast = estimate.forecast
    more = () if forecast is None else (forecast.quantiles.tobytes(), forecast.oom_probability.tobytes())
    return (estimate.reservation.tobytes(), estimate.rule.tobytes(), *more)


def _join(parts: list[Estimate], order: NDArray[np.int64]) -> tuple[bytes, ...]:
    """Return the bits of answers that came in another order of rows."""
    back = np.argsort(order)
    return (
        np.concatenate([p.reservation for p in parts])[back].tobytes(),
        np.concatenate([p.rule for p in parts])[back].tobytes(),
    )


def test_guarded_reservations_stay_within_zero_and_the_limit(make: Make) -> None:
    windows = _histories(1)
    estimate = Guarded(make(), MARGIN).update(windows.task_numbers(), windows)
    assert estimate.reservation.shape == windows.limit.shape
    assert (estimate.reservation >= 0).all()
    assert (estimate.reservation <= windows.limit).all()
    assert (estimate.rule < len(RULES)).all()


def test_a_reservation_is_unknown_only_where_the_limit_is_and_says_so(make: Make) -> None:
    windows = _histories(2)
    windows.limit[::3] = np.nan
    estimate = Guarded(make(), MARGIN).update(windows.task_numbers(), windows)
    unknown = np.isnan(estimate.reservation)
    assert not unknown[~np.isnan(windows.limit)].any()
    assert np.isin(estimate.rule[unknown], (UNKNOWN, STARTUP)).all()


def test_the_windows_are_left_as_they_were(make: Make) -> None:
    windows = _histories(3)
    before = {f.name: getattr(windows, f.name).copy() for f in fields(windows)}
    Guarded(make(), MARGIN).update(windows.task_numbers(), windows)
    for name, values in before.items():
        assert np.array_equal(values, getattr(windows, name), equal_nan=values.dtype.kind == "f"), name


def test_two_fresh_estimators_agree_to_the_bit(make: Make) -> None:
    windows = _histories(4)
    slot = windows.task_numbers()
    assert _bits(make().update(slot, windows)) == _bits(make().update(slot, windows))


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 1000), cut=st.floats(0.05, 0.95))
@pytest.mark.parametrize("name", NAMES)
def test_changing_the_future_never_changes_the_past(name: str, seed: int, cut: float, makers: dict[str, Make]) -> None:
    make = makers[name]
    windows = _histories(seed)
    slot = windows.task_numbers()
    now_us = int(np.quantile(windows.end_us, cut))
    future = windows.start_us >= now_us
    usage, percentiles, limit = windows.usage.copy(), windows.percentiles.copy(), windows.limit.copy()
    usage[future] = np.random.default_rng(seed + 1).random(usage[future].shape) * 5
    percentiles[future] = 3.0
    limit[future] = 7.0
    changed = replace(windows, usage=usage, percentiles=percentiles, limit=limit)
    past = windows.end_us <= now_us
    before = Guarded(make(), MARGIN).update(slot, windows).take(past)
    after = Guarded(make(), MARGIN).update(slot, changed).take(past)
    assert _bits(before) == _bits(after)


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 1000), data=st.data())
@pytest.mark.parametrize("name", NAMES)
def test_how_a_history_is_cut_into_calls_makes_no_difference(
    name: str, seed: int, data: st.DataObject, makers: dict[str, Make]
) -> None:
    make = makers[name]
    windows = _histories(seed, longest=40)
    slot = windows.task_numbers()
    whole = make().update(slot, windows)
    # as a live service sees it: ordered by time over all tasks, in calls of any size
    order = np.lexsort((slot, windows.end_us))
    cuts = data.draw(st.lists(st.integers(1, len(order)), max_size=6).map(sorted))
    estimator = make()
    parts = [estimator.update(slot[rows], windows.take(rows)) for rows in np.split(order, cuts) if len(rows)]
    assert _join(parts, order) == _bits(whole)[:2]


def test_one_window_at_a_time_gives_the_bits_of_the_whole_history(make: Make) -> None:
    windows = _histories(6, n_tasks=2, longest=60)
    slot = windows.task_numbers()
    whole = make().update(slot, windows)
    estimator = make()
    rows = np.arange(len(slot))
    parts = [estimator.update(slot[i : i + 1], windows.take(rows[i : i + 1])) for i in rows]
    assert _join(parts, rows) == _bits(whole)[:2]


def test_tasks_come_and_go_without_touching_the_others(make: Make) -> None:
    windows = _histories(7)
    slot = windows.task_numbers()
    together = make().update(slot, windows)
    for task in np.unique(slot):
        mine = slot == task
        alone = make().update(np.zeros(mine.sum(), np.int64), windows.take(mine))
        assert _bits(alone)[:2] == _bits(together.take(mine))[:2]


def test_the_cell_reaches_the_features(random_forecaster: NetworkForecaster) -> None:
    windows = _histories(12)
    slot = windows.task_numbers()
    plain, large = (
        ForecastEstimator(random_forecaster, 3_600, PRICE, cell=cell).update(slot, windows)
        for cell in (Cell(), Cell((64.0, 64.0)))
    )
    assert _bits(plain) != _bits(large)


@pytest.mark.parametrize(("late", "factor"), [((40, 33, 40), 50.0), ((40, 33), 0.02)])
@pytest.mark.parametrize("restarts", [False, True])
def test_a_repeated_or_late_window_changes_nothing_that_comes_after(
    make: Make, late: tuple[int, ...], factor: float, restarts: bool
) -> None:
    windows = _histories(8, n_tasks=1, longest=80)
    if not restarts:
        windows.scheduled_us[:] = windows.start_us[0]
    n = len(windows)
    assert n > 50
    slot = np.zeros(n, np.int64)
    expected = make().update(slot, windows)
    again = windows.take(np.array(late))
    again = replace(again, usage=again.usage * factor, percentiles=again.percentiles * np.float32(factor))
    estimator = make()
    first = estimator.update(slot[:41], windows.take(slice(0, 41)))
    estimator.update(slot[: len(late)], again)
    rest = estimator.update(slot[41:], windows.take(slice(41, n)))
    assert _bits(first)[:2] == _bits(expected.take(slice(0, 41)))[:2]
    assert _bits(rest)[:2] == _bits(expected.take(slice(41, n)))[:2]


def test_saved_and_restored_in_the_middle_it_goes_on_as_if_it_had_not_stopped(make: Make, tmp_path: Path) -> None:
    windows = _histories(13)
    slot = windows.task_numbers()
    for times_us in (windows.start_us, windows.end_us):
        times_us[slot >= 2] += 86_400_000_000  # a collection that is new after the stop
    order = np.lexsort((slot, windows.end_us))
    before, after = np.split(order, [(slot < 2).sum() * 3 // 4])
    whole = make()
    whole.update(slot[before], windows.take(before))
    np.savez(tmp_path / "state.npz", **whole.state())  # type: ignore[arg-type]  # a name could be allow_pickle
    expected = whole.update(slot[after], windows.take(after))
    fresh = Guarded(make(), MARGIN)
    with np.load(tmp_path / "state.npz", allow_pickle=False) as state:
        fresh.restore(state)
    assert _bits(fresh.base.update(slot[after], windows.take(after))) == _bits(expected)
    assert _same(fresh.state(), whole.state())


def test_what_was_saved_is_a_copy(make: Make) -> None:
    windows = _histories(14)
    slot = windows.task_numbers()
    estimator = make()
    estimator.update(slot, windows)
    saved = estimator.state()
    again = {key: array.copy() for key, array in saved.items()}
    other = make()
    other.restore(saved)
    for one in (estimator, other):
        later = replace(windows, start_us=windows.end_us.max() + windows.start_us, end_us=windows.end_us.max() * 2)
        later = replace(later, end_us=later.start_us + WINDOW_US)
        one.update(slot, later)
    assert _same(saved, again)


def test_a_state_of_another_kind_or_of_other_parameters_is_refused(make: Make) -> None:
    estimator, other = make(), build_estimator("nsigma", {"n": 4.5})
    with pytest.raises(ConfigError, match=r"was saved by NSigmaEstimator\(.*n=4\.5\), and .* cannot continue it"):
        estimator.restore(other.state())
    with pytest.raises(ConfigError, match=r"was saved by .*, and NSigmaEstimator.* cannot continue it"):
        other.restore(estimator.state())


def test_a_state_that_other_code_saved_is_refused(make: Make) -> None:
    state = make().state()
    del state["made_by"]
    with pytest.raises(ConfigError, match="was saved by something unknown"):
        make().restore(state)
    whole = make().state()
    for name in list(whole)[1:]:
        with pytest.raises(ConfigError, match="other code saved it"):
            make().restore({key: value for key, value in whole.items() if key != name})


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_every_parameter_is_kept_under_its_name_so_that_a_state_knows_it(name: str) -> None:
    parameters = inspect.signature(ESTIMATORS[name]).parameters
    assert set(parameters) <= set(vars(build_estimator(name)))


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_the_first_candidate_is_the_published_one_and_all_differ_and_can_be_built(name: str) -> None:
    built = [vars(build_estimator(name, settings)) for settings in candidates(name)]
    kinds = [repr({k: v for k, v in of.items() if not k.startswith("_")}) for of in built]
    assert kinds[0] == repr({k: v for k, v in vars(build_estimator(name)).items() if not k.startswith("_")})
    assert len(set(kinds)) == len(kinds)
    assert (len(kinds) == 1) == (name in ("limit", "fixed-share"))  # these have no rates


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
@pytest.mark.parametrize("shuffled", [False, True])
def test_large_calls_in_threads_give_the_same_bits(name: str, shuffled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    windows = _histories(15, n_tasks=200, longest=12)
    slot = windows.task_numbers()
    expected = build_estimator(name).update(slot, windows)
    monkeypatch.setattr(base, "ROWS_WORTH_A_THREAD", 2)
    monkeypatch.setattr(parallel, "ROWS_WORTH_A_THREAD", 2)
    monkeypatch.setattr(base, "_BLOCK", 2)
    order = np.random.default_rng(1).permutation(len(slot)) if shuffled else np.arange(len(slot))
    order = order[np.argsort(windows.end_us[order], kind="stable")] if shuffled else order
    estimator = build_estimator(name)
    estimator.threads = 3
    answer = estimator.update(slot[order], windows.take(order))
    assert _join([answer], order) == _bits(expected)


def test_no_windows_give_no_answers(make: Make) -> None:
    estimate = make().update(np.zeros(0, np.int64), empty_windows())
    assert estimate.reservation.shape == (0, 2)


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"expected one of autopilot-mean, .*, vpa"):
        build_estimator("oracle")


def test_an_unknown_or_impossible_parameter_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'nsigma'.*sigma"):
        build_estimator("nsigma", {"sigma": 3})
    with pytest.raises(ConfigError, match="half_life_s must be above 0, got 0"):
        build_estimator("borg", {"half_life_s": 0})


def test_parameters_reach_the_estimator() -> None:
    windows = _histories(9)
    slot = windows.task_numbers()
    short, long = (build_estimator("borg", {"half_life_s": h}) for h in (600.0, 1e9))
    assert _bits(short.update(slot, windows)) != _bits(long.update(slot, windows))


def test_the_forecast_goes_with_the_answer_and_the_price_picks_from_it(random_forecaster: NetworkForecaster) -> None:
    windows = _histories(10)
    slot = windows.task_numbers()
    free, dear = (
        ForecastEstimator(random_forecaster, 3_600, Price("p", (price,) * 2)).update(slot, windows)
        for price in (0.0, 1e9)
    )
    for estimate in (free, dear):
        assert estimate.forecast is not None
        assert estimate.forecast.survival.tobytes() == free.forecast.survival.tobytes()  # type: ignore[union-attr]
    assert np.array_equal(dear.reservation, windows.limit)  # whose violation costs everything
    assert (free.reservation < dear.reservation).any()


@pytest.mark.parametrize("price", [PRICE, Price("tiers", (1.0, 2.0), tuple((k + 1.0, k + 2.0) for k in range(6)))])
def test_a_ladder_that_is_kept_comes_to_the_same_bits_at_any_price(
    price: Price, random_forecaster: NetworkForecaster
) -> None:
    windows = _histories(13)
    estimator = ForecastEstimator(random_forecaster, 3_600, price, (0.5, 2.0))
    x = FeatureState().advance(windows.task_numbers(), windows)
    expected = estimator.update(windows.task_numbers(), windows)
    every, only = estimator.ladder(x, windows), estimator.ladder(x, windows, all_horizons=False)
    assert _bits(at_price(price, every[0], windows, every[1])) == _bits(expected)
    for ladder, forecast in (every, only):
        estimate = at_price(price, ladder, windows, forecast)
        assert estimate.reservation.tobytes() == expected.reservation.tobytes()
        assert estimate.forecast is forecast
    assert only[1].horizons_s == (3_600,)
    for mine, theirs in zip(only[1].at(3_600), every[1].at(3_600), strict=True):
        assert np.array_equal(mine, theirs)
    taken = only[1].take(np.array([3, 1]))
    assert np.array_equal(taken.at(3_600)[1], every[1].at(3_600)[1][[3, 1]])


def _same(one: dict[str, NDArray[Any]], other: dict[str, NDArray[Any]]) -> bool:
    return one.keys() == other.keys() and all(one[name].tobytes() == other[name].tobytes() for name in one)
