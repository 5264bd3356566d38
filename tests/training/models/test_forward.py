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
from reclaim.training.models.network import Scaling, SurvivalNetwork
from reclaim.training.models.network_forecaster import NetworkForecaster
from reclaim.training.models.survival import N_THRESHOLDS
from reclaim.training.settings import QUANTILE_LEVELS

F = len(FEATURE_NAMES)
COLUMNS = tuple(columns for _, columns in (forward._WIDE, forward._NARROW, forward._NARROWEST))
"""Of the tiles of a hidden layer, of the steps and of the other log-odds."""


def _network(width: int = 40, depth: int = 2, seed: int = 3) -> SurvivalNetwork:
    generator = torch.Generator().manual_seed(seed)
    scaling = Scaling(*(torch.full((F,), v) for v in (0.5, 0.5, -2.0, 2.0)))
    network = SurvivalNetwork(
        scaling, n_targets=len(TARGETS), n_horizons=len(HORIZONS_S), width=width, depth=depth,
    )  # fmt: skip
    network.initialise(generator)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.04 * torch.randn(parameter.shape, generator=generator))
        network.head.bias.add_(2.0)  # curves that fall over all thresholds
    return network.eval()


def _features(n: int, seed: int = 0) -> NDArray[np.float32]:
    rng = np.random.default_rng(seed)
    x = rng.normal(0.0, 1.0, (n, F)).astype(np.float32)
    x[rng.random((n, F)) < 0.05] = np.nan
    x[0, :4] = [np.inf, -np.inf, 0.0, -0.0]
    return x


@pytest.mark.parametrize(("width", "depth"), [(40, 1), (40, 2), (64, 3), (5, 2), (5, 5)])
def test_answers_are_those_of_the_network_but_for_rounding(width: int, depth: int) -> None:
    network, x = _network(width, depth), _features(200)
    forecast = NetworkForecaster.of(network).predict(x)
    with torch.inference_mode():
        steps, logits = network(torch.from_numpy(x))
        survival = torch.sigmoid(steps).cumprod(-1).numpy()
        probability = torch.sigmoid(logits).numpy()
    np.testing.assert_allclose(forecast.survival, survival, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(forecast.oom_probability, probability, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_curves_cannot_rise_whatever_the_weights(seed: int) -> None:
    network, generator = _network(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(3 * torch.randn(parameter.shape, generator=generator))
    forecast = NetworkForecaster.of(network).predict(100 * _features(100, seed))
    assert forecast.survival.shape == (100, len(TARGETS), len(HORIZONS_S), N_THRESHOLDS)
    assert (np.diff(forecast.survival, axis=-1) <= 0).all()
    assert ((forecast.survival >= 0) & (forecast.survival <= 1)).all()
    assert (np.diff(forecast.quantiles, axis=-1) >= 0).all()


def _exp(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the exponentials as ``vectors.exponential`` says, number by number."""
    return np.array([_exp_of(value) for value in values], np.float32)


def _exp_of(x: np.float32) -> np.float32:
    x, round_to = np.clip(x, np.float32(-87), np.float32(88)), np.float32(12582912.0)
    n = _fma(x, np.float32(1.44269504), round_to) - round_to
    r = _fma(n, np.float32(2.12194440e-4), _fma(n, np.float32(-0.693359375), x))
    p = np.float32(1.9875691500e-4)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = _fma(p, r, np.float32(c))
    return np.float32(np.ldexp(_fma(p, r * r, r) + np.float32(1), int(n)))


def _silu(values: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.asarray(values / (np.float32(1) + _exp(-values)))


def _sigmoid(values: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.asarray(np.float32(1) / (np.float32(1) + _exp(-values)))


def _chain(a: NDArray[np.float32], w: NDArray[np.float32], bias: np.float32) -> np.float32:
    """Return a sum of products in their order, each exact, each sum rounded once."""
    total = bias
    for x, y in zip(a, w, strict=True):
        total = _fma(x, y, total)
    return total


def _fma(x: np.float32, y: np.float32, total: np.float32) -> np.float32:
    return _nearest(Fraction(float(total)) + Fraction(float(x)) * Fraction(float(y)))


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 20), depth=st.integers(1, 9), kind=st.sampled_from(range(3)), seed=st.integers(0, 99))
def test_a_layer_is_chains_of_exact_products_each_sum_rounded_once_and_its_activation_that_of_single_numbers(
    rows: int, depth: int, kind: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    columns = COLUMNS[kind]
    a, w, bias = (rng.normal(size=s).astype(np.float32) for s in ((24, depth), (depth, 2 * columns), (2 * columns,)))
    a[3] *= 1e4  # to where the exponential ends
    out = np.full((24, 2 * columns), 0.1, np.float32)
    whole = -(-rows // 8) * 8
    forward._layer(a, forward._panels([w], depth, columns)[0], bias, out, whole, kind)
    activation = _silu if kind == forward._HIDDEN else _sigmoid
    for i, j in [(3, 5), *rng.integers(0, (whole, 2 * columns), (8, 2))]:
        expected = activation(np.array([_chain(a[i], w[:, j], bias[j])], np.float32))
        assert out[i, j].tobytes() == expected.tobytes()
    assert (out[whole:] == np.float32(0.1)).all()


@pytest.mark.parametrize("shape", [(4, 64), (8, 32), (4, 16), (2, 16)])
def test_a_tile_of_any_shape_gives_the_bits_of_the_one_that_this_processor_has(shape: tuple[int, int]) -> None:
    tile = forward._tile(*shape, lambda builder, total: forward._sigmoid(builder, total, total))

    @numba.njit
    def layer(inputs: Any, weight: Any, bias: Any, out: Any) -> None:
        for panel in range(len(weight)):
            for i in range(0, len(out), shape[0]):
                tile(inputs, weight, bias, out, i, panel)

    rng = np.random.default_rng(7)
    a, w, bias = (rng.normal(size=s).astype(np.float32) for s in ((16, 9), (9, 64), (64,)))
    own, other = np.empty((2, 16, 64), np.float32)
    forward._layer(a, forward._panels([w], 9, COLUMNS[0])[0], bias, own, 16, forward._HIDDEN)
    layer(a, forward._panels([w], 9, shape[1])[0], bias, other)
    assert other.tobytes() == own.tobytes()


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


def test_a_feature_without_a_weight_is_not_read_and_the_others_give_the_bits_they_give_with_it() -> None:
    network, x = _network(), _features(70)
    weight = next(iter(network.body.parameters()))
    with torch.no_grad():
        weight[:, [3, 8, 40]] = 0.0
    forecaster = NetworkForecaster.of(network)
    whole = forecaster.predict(x)
    assert forecaster._passes[HORIZONS_S].read.tolist() == [k for k in range(F) if k not in (3, 8, 40)]
    other = x.copy()
    other[:, [3, 8, 40]] = np.nan
    assert forecaster.predict(other).survival.tobytes() == whole.survival.tobytes()
    with torch.no_grad():
        weight[0, [3, 8, 40]] = 1e-38  # read, and too small to move any sum
    read = NetworkForecaster.of(network).predict(x)
    assert read.survival.tobytes() == whole.survival.tobytes()
    assert read.oom_probability.tobytes() == whole.oom_probability.tobytes()


def test_one_horizon_alone_has_the_bits_it_has_among_all() -> None:
    forecaster, x = NetworkForecaster.of(_network()), _features(70)
    whole = forecaster.predict(x)
    for horizon_s in HORIZONS_S:
        alone = forecaster.predict(x, horizon_s)
        assert alone.horizons_s == (horizon_s,)
        assert alone.quantiles.shape == (70, len(TARGETS), 1, len(QUANTILE_LEVELS))
        for mine, theirs in zip(alone.at(horizon_s), whole.at(horizon_s), strict=True):
            assert mine.tobytes() == np.ascontiguousarray(theirs).tobytes()


def test_threads_and_a_stride_in_the_features_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    forecaster, x = NetworkForecaster.of(_network()), _features(500)
    expected = forecaster.predict(x)
    monkeypatch.setattr("reclaim.data.core.parallel.ROWS_WORTH_A_THREAD", 1)
    forecaster.threads = 3
    for answers in (forecaster.predict(x), forecaster.predict(np.asfortranarray(x))):
        for name in ("survival", "thresholds", "quantiles", "oom_probability"):
            assert getattr(answers, name).tobytes() == getattr(expected, name).tobytes()


def test_what_training_hardly_saw_is_cut_off_and_what_is_not_known_counts_as_the_mean() -> None:
    forecaster = NetworkForecaster.of(_network())
    x = np.full((4, F), 0.0625, np.float32)  # its fourth root is the mean
    x[1, 5], x[2, 6], x[3, 6] = np.nan, 50.0, 7.0  # beyond two deviations, both
    answers = forecaster.predict(x).survival
    assert answers[0].tobytes() == answers[1].tobytes()
    assert answers[2].tobytes() == answers[3].tobytes()
    assert answers[2].tobytes() != answers[0].tobytes()
    ranges = forecaster.input_ranges()
    assert [float(values[0]) for values in ranges] == pytest.approx([0.5, 0.5, -2.0, 2.0])
    assert all(values.shape == (F,) and values.dtype == np.float32 for values in ranges)
