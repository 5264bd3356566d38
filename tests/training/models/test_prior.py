"""Curves of other clusters: mixed in by their quarters where the history is short, and nothing else is changed."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from reclaim.features.registry import AT, N_FEATURES
from reclaim.features.targets import HORIZONS_S, TARGETS
from reclaim.training.bundle import load_bundle
from reclaim.training.models import prior as prior_module
from reclaim.training.models.forecaster import Heads
from reclaim.training.models.network_forecaster import NetworkForecaster
from reclaim.training.models.portable import PortableForecaster
from reclaim.training.models.prior import QUARTERS, Prior, _mix, quarters_of
from reclaim.training.tracking.references import BUILTIN_FOLDER

DAY_S = 86_400


@pytest.fixture(scope="module")
def others() -> PortableForecaster:
    return PortableForecaster.load(BUILTIN_FOLDER)


def _features(n: int) -> NDArray[np.float32]:
    return np.random.default_rng(4).random((n, N_FEATURES)).astype(np.float32)


@pytest.mark.parametrize(("quarters", "expected"), [(1, 0.27), (2, 0.09), (3, 0.03)])
def test_a_curve_is_the_geometric_mean_with_as_many_quarters_of_the_other(quarters: int, expected: float) -> None:
    own, other = np.full((1, 1, 1, 1), 0.81, np.float32), np.full((1, 1, 1, 1), 0.01, np.float32)
    _mix(own, other, np.array([0]), np.array([quarters]))
    assert own[0, 0, 0, 0] == pytest.approx(expected, rel=1e-6)


@given(st.lists(st.tuples(*[st.floats(0, 1, width=32)] * 2), min_size=2, max_size=32), st.integers(1, 3))
def test_a_mixed_curve_falls_and_lies_between_both(points: list[tuple[float, float]], quarters: int) -> None:
    own, other = (np.sort(np.array(of, np.float32))[::-1] for of in zip(*points, strict=True))
    mixed = own.copy().reshape(1, 1, 1, -1)
    _mix(mixed, np.ascontiguousarray(other).reshape(1, 1, 1, -1), np.array([0]), np.array([quarters]))
    assert (np.diff(mixed) <= 0).all()
    assert (mixed >= np.minimum(own, other) * np.float32(1 - 1e-6)).all()
    assert (mixed <= np.maximum(own, other) * np.float32(1 + 1e-6)).all()


def test_the_shorter_the_history_and_the_longer_the_horizon_the_larger_is_the_part_of_the_others() -> None:
    days = [0.0, *(d for d, _ in QUARTERS)]
    parts = [quarters_of(d * DAY_S) for d in days]
    assert parts[-1] == (0, 0, 0)
    for of, after in pairwise(parts):
        assert sum(of) > sum(after)
        assert all(a >= b for a, b in zip(of, after, strict=True))
        assert list(of) == sorted(of)
    for (d, quarters), part in zip(QUARTERS, parts, strict=False):
        assert quarters_of(d * DAY_S - 1) == quarters == part


def test_a_further_horizon_has_the_part_of_the_longest_measured_one_within_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [quarters_of(day * DAY_S) for day in (2, 10)] == [(1, 2, 3), (0, 1, 2)]
    monkeypatch.setattr(prior_module, "HORIZONS_S", (60, 300, 3_600, 21_600, 86_400, 172_800))
    assert [quarters_of(day * DAY_S) for day in (2, 10)] == [(1, 1, 2, 2, 3, 3), (0, 0, 1, 1, 2, 2)]
    assert quarters_of(40 * DAY_S) == (0,) * 6


def test_only_curves_with_a_part_of_the_others_change(
    random_forecaster: NetworkForecaster, others: PortableForecaster
) -> None:
    x = _features(200)
    x[:50, [AT[f"memory_{name}"] for name in ("last", "max_ever")]] = np.nan  # the others know nothing of it
    own, other = random_forecaster.predict(x), others.predict(x)
    mixed = NetworkForecaster(random_forecaster.tensors, prior=Prior(others, (0, 1, 2))).predict(x)
    memory = TARGETS.index("memory")
    assert np.isnan(other.survival[:50, memory]).all()
    assert mixed.survival[:50, memory].tobytes() == own.survival[:50, memory].tobytes()
    assert mixed.survival[:, :, 0].tobytes() == own.survival[:, :, 0].tobytes()
    assert mixed.oom_probability.tobytes() == own.oom_probability.tobytes()
    for h, quarters in ((1, 1), (2, 2)):
        a, b = (of.survival[50:, :, h].astype(np.float64) for of in (own, other))
        expected = a ** (1 - quarters / 4) * b ** (quarters / 4)
        assert np.allclose(mixed.survival[50:, :, h], expected, rtol=1e-6, atol=0)
    assert (np.diff(mixed.quantiles, axis=-1) >= 0).all()


def test_what_was_not_fitted_stays_unknown(random_forecaster: NetworkForecaster, others: PortableForecaster) -> None:
    targets = np.ones((len(TARGETS), len(HORIZONS_S)), np.bool_)
    targets[1], targets[:, 2] = False, False
    heads = Heads(targets, np.zeros(len(HORIZONS_S), np.bool_))
    forecast = NetworkForecaster(random_forecaster.tensors, heads, prior=Prior(others, (1, 1, 2))).predict(_features(9))
    assert np.isnan(forecast.survival[:, ~targets]).all()
    assert np.isfinite(forecast.survival[:, targets]).all()


def test_a_mixed_row_has_the_same_bits_alone_of_one_horizon_on_threads_and_loaded(
    random_forecaster: NetworkForecaster, others: PortableForecaster, tmp_path: Path
) -> None:
    mixed = NetworkForecaster(random_forecaster.tensors, prior=Prior(others, (1, 2, 3)))
    mixed.save(tmp_path)
    loaded, x = NetworkForecaster.load(tmp_path), _features(5_000)
    whole = mixed.predict(x)
    assert loaded.prior is not None
    assert loaded.prior.quarters == (1, 2, 3)
    loaded.threads = 2
    assert loaded.predict(x).survival.tobytes() == whole.survival.tobytes()
    for h, horizon_s in enumerate(HORIZONS_S):
        assert mixed.predict(x[7:8], horizon_s).survival.tobytes() == whole.survival[7:8, :, h : h + 1].tobytes()


def test_the_facts_tell_two_networks_and_two_parts_apart(others: PortableForecaster) -> None:
    tensors = {name: values.copy() for name, values in others.tensors.items()}
    tensors["head.bias"][0] += 1
    facts = Prior(others, (1, 1, 2)).facts
    assert facts["quarters"] == {"300": 1, "3600": 1, "86400": 2}
    trained_on = {"name": "cell_a", "until_us": 7}
    assert Prior(others, (1, 1, 2), (trained_on,)).facts == facts | {"datasets": [trained_on]}
    assert facts != Prior(PortableForecaster(tensors, others.beyond), (1, 1, 2)).facts
    assert facts != Prior(PortableForecaster(others.tensors), (1, 1, 2)).facts
    assert facts != Prior(others, (0, 1, 1)).facts
    assert facts == Prior(load_bundle(BUILTIN_FOLDER).forecaster.bare, (1, 1, 2)).facts  # type: ignore[attr-defined]
