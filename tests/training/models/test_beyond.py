"""Curves: tempered in the tail alone, by rows of an alike past, and the same in any batch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from reclaim.features.registry import AT, N_FEATURES, SIGNALS
from reclaim.features.targets import HORIZONS_S, TARGETS
from reclaim.training.models.beyond import RATIOS, RECENT, SO_FAR, STALE, TAILS, Beyond, beyond_of, temper
from reclaim.training.models.network_forecaster import NetworkForecaster
from reclaim.training.models.survival import N_THRESHOLDS

NAN = np.nan
NEXT, HOUR, DAY = range(len(HORIZONS_S))
TAIL = TAILS[DAY]
FEW, MANY = np.log2(1 + 12), np.log2(1 + 4_000)
"""Values of ``seen`` after an hour, and after two weeks."""
LAST = RECENT.shape[1] - len(STALE) - 1
"""Class of those who have the longest history, and whose largest so far is of this week."""


def rows(ever: float, seen: float, n: int = 1, *, week: float | None = None) -> NDArray[np.float32]:
    """Return features of tasks whose largest so far is known, and of a week, by default the same; of every signal."""
    x = np.full((n, N_FEATURES), NAN, np.float32)
    x[:, [AT[f"{signal}_max_ever"] for signal in SIGNALS]] = ever
    x[:, [AT[f"{signal}_max_7d"] for signal in SIGNALS]] = ever if week is None else week
    x[:, AT.seen] = seen
    return x


def demands(of_a_day: list[float]) -> NDArray[np.float32]:
    """Return targets that are known over a day alone, the same for every signal."""
    y = np.full((len(of_a_day), len(TARGETS), len(HORIZONS_S)), NAN, np.float32)
    y[:, :, DAY] = np.array(of_a_day, np.float32)[:, None]
    return y


@pytest.fixture(scope="module")
def beyond() -> Beyond:
    """Return the shares of 9,000 rows: after an hour half go to four times the largest so far, after weeks none."""
    parts = [
        (rows(0.1, FEW, 3_000), demands([0.1, 0.4, NAN] * 1_000), None),
        (rows(0.2, MANY, 6_000), demands([0.1, 0.2, NAN] * 2_000), None),
    ]
    made = beyond_of(parts)
    assert made is not None
    return made


def test_shares_count_the_rows_that_went_beyond_and_a_thousand_of_all_histories(beyond: Beyond) -> None:
    of_all = (1_000 + 1) / (6_000 + 1)
    at = dict(zip(RATIOS.tolist(), beyond[DAY, :: len(STALE) + 1, 0].T, strict=True))
    assert at[1.0][0] == pytest.approx((1_000 + 1_000 * of_all) / 3_000)  # 0.4 of 0.1, and 1,000 rows went beyond
    assert at[1.0][-1] == pytest.approx(1_000 * of_all / 5_000)  # 0.2 of 0.2: not beyond
    assert at[1.0][1] == pytest.approx(of_all)  # no row has such a history
    assert at[4.0][0] == pytest.approx(1_000 * (1 / 6_001) / 3_000)
    assert at[0.25].tolist() == pytest.approx([1.0] * 5)
    assert (np.diff(beyond[DAY], axis=-1) <= 0).all()
    assert np.isnan(beyond[[NEXT, HOUR]]).all()  # of which no demand is known


def test_an_hour_has_shares_of_its_own_and_five_minutes_have_none() -> None:
    y = demands([0.4, 0.1])
    y[:, :, HOUR], y[:, :, NEXT] = 0.1, 0.4
    made = beyond_of([(rows(0.1, FEW, 2), y, None)])
    assert made is not None
    assert made.shape == RECENT.shape
    assert np.isnan(made[NEXT]).all()
    at = RATIOS.tolist().index(1.0)
    assert made[HOUR, 0, 0, at] < made[DAY, 0, 0, at]
    assert made[HOUR, 0, 0, at - 1] == 1


def test_a_day_of_memory_is_compared_with_the_largest_of_a_week_and_one_of_cpu_with_the_largest_so_far() -> None:
    x = rows(0.4, FEW, 2, week=0.1)
    y = demands([0.2, 0.2])
    y[:, :, HOUR] = 0.2
    made = beyond_of([(x, y, None)])
    assert made is not None
    at, alike = RATIOS.tolist().index(1.0), len(STALE)  # four times the largest of a week
    went_beyond = made[[HOUR, DAY], alike, :, at] > 0.99
    assert dict(zip(TARGETS, went_beyond.T.tolist(), strict=True)) == {
        "cpu": [True, False], "memory": [True, True], "peak_cpu": [True, False],
    }  # fmt: skip
    so_far = beyond_of([(x, y, None)], SO_FAR)
    assert so_far is not None
    assert so_far.shape == SO_FAR.shape == (3, 5, 3, 65)
    assert (so_far[[HOUR, DAY], 0, :, at] < 0.99).all()


@pytest.mark.parametrize(
    ("week", "alike"), [(0.4, 0), (0.39, 0), (0.38, 1), (0.3, 1), (0.28, 2), (0.0, 2), (NAN, 0)]
)  # 0.4 over 1.04 is 0.3846, and over 1.4 0.2857
def test_tasks_are_alike_by_how_far_their_largest_so_far_is_above_that_of_a_week(week: float, alike: int) -> None:
    x = rows(0.4, MANY, week=week)
    assert RECENT.classes(x).tolist() == [[LAST + alike] * len(TARGETS)]
    assert SO_FAR.classes(x).tolist() == [[4] * len(TARGETS)]
    assert RECENT.classes(rows(0.0, FEW, week=0.0)).tolist() == [[0] * len(TARGETS)]


def test_a_row_of_weight_two_counts_as_two_rows() -> None:
    twice = beyond_of([(rows(0.1, FEW, 4), demands([0.4, 0.4, 0.1, 0.1]), None)])
    weighed = beyond_of([(rows(0.1, FEW, 2), demands([0.4, 0.1]), np.full(2, 2, np.float32))])
    assert twice is not None
    np.testing.assert_array_equal(weighed, twice)


def test_a_demand_above_the_limit_goes_as_far_beyond_as_the_limit_and_rounding_is_not_beyond() -> None:
    # the limit is twice the largest of one half, which demands four times it; the other half demands its largest again
    largest = np.float32(0.3)
    x, y = rows(0.5, FEW, 4), demands([2.0, 2.0, 0.0, 0.0])
    x[2:, [AT[f"{signal}_{of}"] for signal in SIGNALS for of in ("max_ever", "max_7d")]] = largest
    y[2:, :, DAY] = np.nextafter(largest, np.float32(1))
    made = beyond_of([(x, y, None)])
    assert made is not None
    at = dict(zip(RATIOS.tolist(), made[DAY, 0, 0].tolist(), strict=True))
    # of four rows, and a thousand alike them and one more that goes beyond any ratio
    assert at[2.0] == pytest.approx((0 + 1_000 * 1 / 5) / 1_004)
    assert at[1.0] == pytest.approx((2 + 1_000 * 3 / 5) / 1_004)


def test_rows_of_which_no_day_and_no_hour_is_known_give_no_shares() -> None:
    y = demands([NAN, NAN])
    y[:, :, NEXT] = 0.5
    assert beyond_of([(rows(0.1, FEW, 2), y, None)]) is None


def test_a_curve_below_a_half_becomes_the_geometric_mean_with_the_share(beyond: Beyond) -> None:
    shape = (2, len(TARGETS), 1, N_THRESHOLDS)
    survival = np.full(shape, 0.04, np.float32)
    survival[..., :2] = 0.8, TAIL
    thresholds = np.broadcast_to(np.float32(0.2), (2, len(TARGETS), N_THRESHOLDS)).copy()
    thresholds[:, :, -1] = 0.2 * (1 + 2**0.125) / 2  # in the middle between two ratios
    temper(survival, thresholds, np.concatenate([rows(0.2, MANY), rows(NAN, MANY)]), beyond, (HORIZONS_S[DAY],))
    one, next_one = (beyond[DAY, LAST, 0, RATIOS.tolist().index(2.0**k)] for k in (0, 0.125))
    assert survival[0, 0, 0, :2].tolist() == pytest.approx([0.8, TAIL])
    assert survival[0, 0, 0, 2] == pytest.approx(np.sqrt(0.04 * one), rel=1e-4)
    assert survival[0, 0, 0, -1] == pytest.approx(np.sqrt(0.04 * (one + next_one) / 2), rel=1e-4)
    assert (survival[1, ..., 2:] == np.float32(0.04)).all()  # nothing is known of it


def test_the_share_below_the_smallest_ratio_is_one_and_behind_the_largest_the_last(beyond: Beyond) -> None:
    survival = np.full((1, len(TARGETS), 1, N_THRESHOLDS), 0.08, np.float32)
    thresholds = np.full((1, len(TARGETS), N_THRESHOLDS), 0.9, np.float32)
    thresholds[:, :, 0] = 0.001
    temper(survival, thresholds, rows(0.02, MANY), beyond, (HORIZONS_S[DAY],))
    assert survival[0, 0, 0, 0] == pytest.approx(np.sqrt(0.08 * TAIL))
    assert survival[0, 0, 0, 1] == pytest.approx(np.sqrt(0.08 * beyond[DAY, LAST, 0, -1]))


@pytest.fixture
def pair(random_forecaster: NetworkForecaster) -> tuple[NetworkForecaster, NetworkForecaster]:
    """Return a network, and the same tempered an hour and a day ahead."""
    y = demands([0.1, 0.4, 0.2, 0.1])
    y[:, :, HOUR] = y[:, :, DAY]
    beyond = beyond_of([(rows(0.1, FEW, 4), y, None)])
    return random_forecaster, NetworkForecaster(random_forecaster.tensors, beyond=beyond)


def _features(n: int) -> NDArray[np.float32]:
    x = np.random.default_rng(4).random((n, N_FEATURES)).astype(np.float32)
    x[:, AT.seen] *= 13
    x[::7, [AT.cpu_max_ever, AT.cpu_max_7d]] = NAN
    return x


@pytest.mark.parametrize("horizon", [HOUR, DAY])
def test_only_the_tail_is_tempered_and_curves_never_rise(
    horizon: int, pair: tuple[NetworkForecaster, NetworkForecaster]
) -> None:
    bare, tempered = (forecaster.predict(_features(500)) for forecaster in pair)
    assert tempered.survival[:, :, NEXT].tobytes() == bare.survival[:, :, NEXT].tobytes()
    curves, of_network, tail = tempered.survival[:, :, horizon], bare.survival[:, :, horizon], TAILS[horizon]
    assert np.array_equal(curves[of_network >= tail], of_network[of_network >= tail])
    assert (curves[1::7][of_network[1::7] < tail] != of_network[1::7][of_network[1::7] < tail]).mean() > 0.9
    assert np.array_equal(curves[::7, 0], of_network[::7, 0])
    assert (np.diff(tempered.survival, axis=-1) <= 0).all()
    assert not np.array_equal(tempered.quantiles[:, :, horizon], bare.quantiles[:, :, horizon])


def test_a_tempered_row_has_the_same_bits_alone_among_others_for_one_horizon_and_when_loaded(
    pair: tuple[NetworkForecaster, NetworkForecaster], tmp_path: Path
) -> None:
    _, forecaster = pair
    x = _features(150)
    whole = forecaster.predict(x)
    forecaster.save(tmp_path)
    for other in (forecaster, NetworkForecaster.load(tmp_path)):
        for rows_of in (slice(0, 1), slice(70, 73), slice(0, 150)):
            part = other.predict(x[rows_of])
            assert part.survival.tobytes() == whole.survival[rows_of].tobytes()
            for h, horizon_s in enumerate(HORIZONS_S):
                alone = other.predict(x[rows_of], horizon_s)
                assert alone.survival[:, :, 0].tobytes() == whole.survival[rows_of][:, :, h].tobytes()
                assert alone.quantiles[:, :, 0].tobytes() == whole.quantiles[rows_of][:, :, h].tobytes()


def test_a_network_saved_without_shares_answers_with_its_own_curves(
    pair: tuple[NetworkForecaster, NetworkForecaster], tmp_path: Path
) -> None:
    bare, _ = pair
    bare.save(tmp_path)
    loaded = NetworkForecaster.load(tmp_path)
    assert loaded.beyond is None
    assert loaded.predict(_features(50)).survival.tobytes() == bare.predict(_features(50)).survival.tobytes()


def test_shares_of_another_shape_are_refused(pair: tuple[NetworkForecaster, NetworkForecaster], tmp_path: Path) -> None:
    bare, tempered = pair
    assert tempered.beyond is not None
    NetworkForecaster(bare.tensors, beyond=tempered.beyond[DAY]).save(tmp_path)
    with pytest.raises(ValueError, match=r"expected beyond of shape \(3, 15, 3, 65\), got \(15, 3, 65\)"):
        NetworkForecaster.load(tmp_path)
