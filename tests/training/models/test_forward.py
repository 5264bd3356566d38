"""The compiled pass: the network's numbers, and each of them the one chain of operations it is said to be."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numba
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from reclaim.features.registry import FEATURE_NAMES
from reclaim.features.targets import HORIZONS_S, TARGETS
from reclaim.training.models import forward
from reclaim.training.models.forecaster import NetworkForecaster
from reclaim.training.models.network import QuantileNetwork, Scaling
from reclaim.training.models.network import transform as transformed
from reclaim.training.settings import QUANTILE_LEVELS, TRANSFORMS

F = len(FEATURE_NAMES)


def _network(width: int = 40, depth: int = 2, seed: int = 3) -> QuantileNetwork:
    generator = torch.Generator().manual_seed(seed)
    scaling = Scaling(*(torch.full((F,), v) for v in (0.3, 0.5, -2.0, 2.0)))
    network = QuantileNetwork(
        scaling, n_targets=len(TARGETS), n_horizons=len(HORIZONS_S), n_levels=len(QUANTILE_LEVELS),
        width=width, depth=depth,
    )  # fmt: skip
    network.initialise(generator)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.04 * torch.randn(parameter.shape, generator=generator))
    return network.eval()


def _features(n: int, seed: int = 0) -> NDArray[np.float32]:
    rng = np.random.default_rng(seed)
    x = rng.normal(0.0, 1.0, (n, F)).astype(np.float32)
    x[rng.random((n, F)) < 0.05] = np.nan
    x[0, :4] = [np.inf, -np.inf, 0.0, -0.0]
    return x


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize(("width", "depth"), [(40, 1), (40, 2), (64, 3), (5, 2)])
def test_answers_are_those_of_the_network_but_for_rounding(transform: str, width: int, depth: int) -> None:
    network, x = _network(width, depth), _features(200)
    forecast = NetworkForecaster.of(network, transform).predict(x)
    with torch.inference_mode():
        quantiles, logits = network(torch.from_numpy(x))
        expected = quantiles.clamp(min=0).numpy()  # in the space of the transform, as is the rounding
        probability = torch.sigmoid(logits).numpy()
    answered = torch.from_numpy(forecast.quantiles)
    assert np.abs(transformed(answered, transform).numpy() - expected).max() <= 5e-6
    np.testing.assert_allclose(forecast.oom_probability, probability, rtol=1e-5, atol=1e-9)


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 20), depth=st.integers(1, 9), seed=st.integers(0, 99))
def test_a_product_is_one_chain_of_exact_products_each_sum_rounded_once(rows: int, depth: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    a = rng.normal(size=(24, depth)).astype(np.float32)
    w = rng.normal(size=(depth, 32)).astype(np.float32)
    out = np.full((24, 32), 0.1, np.float32)
    forward._layer(a, w[None], out[0].copy(), out, -(-rows // 8) * 8)
    i, j = int(rng.integers(rows)), int(rng.integers(32))
    total = Fraction(float(np.float32(0.1)))
    for k in range(depth):
        exact = total + Fraction(float(a[i, k])) * Fraction(float(w[k, j]))
        total = Fraction(float(_nearest(exact)))
    assert float(out[i, j]) == float(total)
    assert (out[-(-rows // 8) * 8 :] == np.float32(0.1)).all()


@numba.njit
def _silu(values: Any) -> Any:
    out = values.copy()
    for i in range(len(out)):
        out[i] = out[i] / (np.float32(1.0) + forward._exp(-out[i]))
    return out


@pytest.mark.parametrize("panels", [1, 2])
def test_a_hidden_layer_is_the_same_chain_and_its_activation_the_one_of_single_numbers(panels: int) -> None:
    rng = np.random.default_rng(panels)
    a, w, bias = (rng.normal(size=s).astype(np.float32) for s in ((16, 9), (9, 64 * panels), (64 * panels,)))
    a[3] *= 1e4  # to where the exponential ends
    sums, hidden = (np.zeros((16, 64 * panels), np.float32) for _ in range(2))
    for columns, out in ((32, sums), (64, hidden)):
        forward._layer(a, forward._panels([w], 9, columns)[0], bias, out, 16)
    assert hidden.tobytes() == _silu(sums.ravel()).tobytes()


def test_weights_and_what_is_computed_with_them_begin_on_a_cache_line() -> None:
    panels = forward._panels([np.ones((5, 70), np.float32)] * 2, 8, 64)
    assert panels.shape == (2, 2, 8, 64)
    assert panels.ctypes.data % 64 == 0
    assert panels.flags.c_contiguous
    assert panels.sum() == 2 * 5 * 70  # the rest is zero
    assert (panels[:, 1, :5, :6] == 1).all()
    assert forward._panels([], 8, 64).shape == (0, 1, 8, 64)


def _nearest(exact: Fraction) -> np.float32:
    """Return the float32 nearest to a number, found among its neighbours, for halving twice may go astray."""
    near = np.float32(float(exact))
    around = (near, np.nextafter(near, np.float32(-np.inf)), np.nextafter(near, np.float32(np.inf)))
    return min(around, key=lambda f: (abs(Fraction(float(f)) - exact), int(f.view(np.int32)) & 1))


def test_the_exponential_is_right_to_two_parts_in_ten_million_and_ends_where_it_must() -> None:
    x = np.linspace(-87.0, 88.0, 100_001).astype(np.float32)
    step = np.zeros((1, len(x)), np.float32)
    forward._steps(-np.abs(x)[None], step, 1, len(x))
    exact = np.exp(-np.abs(x).astype(np.float64))
    assert (np.abs(step[0] / np.maximum(exact, 1e-37) - 1)[np.abs(x) < 85] < 2e-7).all()
    hidden = _silu(np.array([-1e30, -200.0, -0.0, 0.0, 200.0, 1e30], np.float32))
    assert np.allclose(hidden, [0.0, 0.0, 0.0, 0.0, 200.0, 1e30], atol=1e-6)


def test_one_horizon_alone_has_the_bits_it_has_among_all() -> None:
    forecaster, x = NetworkForecaster.of(_network(), "log1p"), _features(70)
    whole = forecaster.predict(x)
    for horizon_s in HORIZONS_S:
        alone = forecaster.predict(x, horizon_s)
        assert alone.horizons_s == (horizon_s,)
        assert alone.quantiles.shape == (70, len(TARGETS), 1, len(QUANTILE_LEVELS))
        for mine, theirs in zip(alone.at(horizon_s), whole.at(horizon_s), strict=True):
            assert mine.tobytes() == np.ascontiguousarray(theirs).tobytes()


def test_threads_and_a_stride_in_the_features_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    forecaster, x = NetworkForecaster.of(_network(), "sqrt"), _features(500)
    expected = forecaster.predict(x).quantiles.tobytes()
    monkeypatch.setattr("reclaim.data.core.parallel.ROWS_WORTH_A_THREAD", 1)
    forecaster.threads = 3
    assert forecaster.predict(x).quantiles.tobytes() == expected
    assert forecaster.predict(np.asfortranarray(x)).quantiles.tobytes() == expected


def test_what_training_hardly_saw_is_cut_off_and_what_is_not_known_counts_as_the_mean() -> None:
    forecaster = NetworkForecaster.of(_network(), "sqrt")
    x = np.full((4, F), 0.09, np.float32)  # its root is the mean
    x[1, 5], x[2, 6], x[3, 6] = np.nan, 50.0, 7.0  # beyond two deviations, both
    answers = forecaster.predict(x).quantiles
    assert answers[0].tobytes() == answers[1].tobytes()
    assert answers[2].tobytes() == answers[3].tobytes()
    assert answers[2].tobytes() != answers[0].tobytes()
    ranges = forecaster.input_ranges()
    assert [float(values[0]) for values in ranges] == pytest.approx([0.3, 0.5, -2.0, 2.0])
    assert all(values.shape == (F,) and values.dtype == np.float32 for values in ranges)
