"""The portable network: its inputs are a signal's own shares of the limit, and a row's answer is its own alone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Final

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import save_file

from reclaim.data.core.files import FULL_DISK
from reclaim.features.registry import AT, FEATURE_NAMES
from reclaim.features.targets import HORIZONS_S, TARGETS
from reclaim.training.models.beyond import SO_FAR, temper
from reclaim.training.models.network import Scaling, SurvivalNetwork
from reclaim.training.models.portable import FIRST, INPUTS, PortableForecaster, inputs_of, place
from reclaim.training.models.survival import ABOVE, LAST, N_BELOW, N_THRESHOLDS, thresholds_of
from tests.folders import full_disk

_N: Final = len(FEATURE_NAMES)


@pytest.fixture(scope="module")
def network() -> SurvivalNetwork:
    generator = torch.Generator().manual_seed(3)
    n = len(INPUTS)
    scaling = Scaling(torch.full((n,), 0.5), torch.full((n,), 0.3), torch.full((n,), -3.0), torch.full((n,), 3.0))
    made = SurvivalNetwork(scaling, n_targets=1, n_horizons=len(HORIZONS_S), width=128, depth=2)
    made.initialise(generator)
    with torch.no_grad():
        made.head.weight.normal_(0.0, 0.2, generator=generator)
    return made.eval()


@pytest.fixture(scope="module")
def forecaster(network: SurvivalNetwork) -> PortableForecaster:
    return PortableForecaster({name: tensor.numpy() for name, tensor in network.state_dict().items()})


def _rows(n: int) -> NDArray[np.float32]:
    return np.random.default_rng(5).random((n, _N), np.float32)


def test_inputs_are_of_the_signal_alone_with_marks_for_lags_that_are_missing() -> None:
    x = _rows(2)
    x[0, AT.memory_same_hour_2d] = np.nan
    inputs = inputs_of(x)
    assert inputs.shape == (2, len(TARGETS), len(INPUTS))
    cpu, memory, peak = inputs[0]
    assert (cpu[FIRST], memory[FIRST], peak[FIRST]) == (x[0, AT.cpu_last], x[0, AT.memory_last], x[0, AT.peak_cpu_last])
    assert [of[INPUTS.index("memory")] for of in (cpu, memory, peak)] == [0, 1, 0]
    assert [of[INPUTS.index("same_hour_2d_missing")] for of in (cpu, memory, peak)] == [0, 1, 0]
    assert cpu[INPUTS.index("p98_48h")] == x[0, AT.cpu_p98_48h]
    assert np.isnan(peak[INPUTS.index("p98_48h")])  # a statistic that peak CPU does not have


def test_the_place_of_a_statistic_is_that_of_the_threshold_at_which_it_lies() -> None:
    x = _rows(1)
    x[0, AT.cpu_last] = 0.2
    for k in (1, 12, len(ABOVE) - 1):
        x[0, AT.cpu_max_24h] = thresholds_of(x)[0, 0, N_BELOW + k]
        cpu = inputs_of(x)[0, 0]
        assert math.sqrt(cpu[INPUTS.index("max_24h_place")]) == pytest.approx(ABOVE[k], rel=1e-3)
    x[0, AT.cpu_mean_2h] = 0.1  # below what is used now, so the place is negative
    way = math.log(0.1 / 0.2) / math.log(LAST / 0.2)
    assert inputs_of(x)[0, 0, INPUTS.index("mean_2h_place")] == pytest.approx(-(way**2), rel=1e-5)


def test_a_place_is_unknown_with_its_statistic_and_no_value_is_too_far() -> None:
    x = _rows(3)
    x[0, AT.cpu_same_hour_1d], x[0, AT.cpu_std_2h] = np.nan, np.nan
    x[1, AT.cpu_last], x[1, AT.cpu_max_6h], x[1, AT.cpu_change_1h] = 0.0, 5.0, -3.0
    x[2, AT.cpu_last], x[2, AT.cpu_mean_30m] = 1e6, 0.0
    cpu = inputs_of(x)[:, 0]
    assert np.isnan(cpu[0, [INPUTS.index(f"{name}_place") for name in ("same_hour_1d", "std_2h")]]).all()
    assert cpu[1, INPUTS.index("max_6h_place")] == pytest.approx((math.log(5 / 0.005) / math.log(LAST / 0.005)) ** 2)
    assert cpu[1, INPUTS.index("change_1h_place")] == -(8.0**2)
    assert cpu[2, INPUTS.index("mean_30m_place")] == -(4.0**2)
    assert np.isfinite(cpu[1:]).all()


def test_places_computed_again_are_those_of_the_other_inputs() -> None:
    inputs = inputs_of(_rows(40)).reshape(-1, len(INPUTS))
    changed = inputs.copy()
    changed[:, [k for k, name in enumerate(INPUTS) if name.endswith("_place")]] = 7.0
    place(changed)
    assert changed.tobytes() == inputs.tobytes()


def test_only_the_own_signal_moves_a_curve_and_nothing_of_the_cell_does(forecaster: PortableForecaster) -> None:
    x = _rows(1)
    before = forecaster.predict(x).survival[0]
    for name in FEATURE_NAMES:
        changed = x.copy()
        changed[0, AT[name]] += 0.25
        after = forecaster.predict(changed).survival[0]
        moved = [target for t, target in enumerate(TARGETS) if not np.array_equal(before[t], after[t])]
        own = {
            target for target in TARGETS if name.startswith(f"{target}_") and name.removeprefix(f"{target}_") in INPUTS
        }
        assert set(moved) == own, name


def test_curves_are_those_of_the_torch_network(forecaster: PortableForecaster, network: SurvivalNetwork) -> None:
    x = _rows(50)
    with torch.no_grad():
        steps, _ = network(torch.from_numpy(inputs_of(x).reshape(-1, len(INPUTS))))
    expected = torch.sigmoid(steps).cumprod(-1).numpy().reshape(50, len(TARGETS), len(HORIZONS_S), N_THRESHOLDS)
    assert forecaster.predict(x).survival == pytest.approx(expected, abs=1e-5)


def test_a_row_alone_one_horizon_and_any_threads_give_the_same_bits(forecaster: PortableForecaster) -> None:
    x = _rows(300)
    whole = forecaster.predict(x)
    assert forecaster.predict(x[17:18]).survival.tobytes() == whole.survival[17:18].tobytes()
    hour = forecaster.predict(x, 3_600)
    assert hour.survival[:, :, 0].tobytes() == whole.survival[:, :, 1].tobytes()
    forecaster.threads = 2
    assert forecaster.predict(x).survival.tobytes() == whole.survival.tobytes()
    forecaster.threads = 1


def test_nothing_is_said_of_a_signal_that_was_never_measured(forecaster: PortableForecaster) -> None:
    x = _rows(3)
    x[1, [AT[name] for name in FEATURE_NAMES if name.startswith("memory_")]] = np.nan
    said = forecaster.predict(x)
    assert np.isnan(said.survival[1, 1]).all()
    assert np.isfinite(said.survival[1, 0]).all()
    assert np.isfinite(said.survival[[0, 2]]).all()
    assert np.isnan(said.oom_probability).all()


def test_tails_are_tempered_and_come_back_as_saved(forecaster: PortableForecaster, tmp_path: Path) -> None:
    x = _rows(30)
    beyond = np.full(SO_FAR.shape, 0.01, np.float32)
    beyond[0] = np.nan  # five minutes ahead nothing is tempered
    tempered = PortableForecaster(forecaster.tensors, beyond)
    bare, found = forecaster.predict(x), tempered.predict(x)
    expected = bare.survival.copy()
    temper(expected, bare.thresholds, x, beyond, HORIZONS_S, SO_FAR)
    assert found.survival.tobytes() == expected.tobytes()
    assert found.survival[:, :, 0].tobytes() == bare.survival[:, :, 0].tobytes()
    assert (found.survival[:, :, 1] != bare.survival[:, :, 1]).any()
    assert tempered.predict(x, 3_600).survival[:, :, 0].tobytes() == found.survival[:, :, 1].tobytes()
    tempered.save(tmp_path)
    assert PortableForecaster.load(tmp_path).predict(x).survival.tobytes() == found.survival.tobytes()


def test_a_table_of_tails_of_another_shape_is_refused(forecaster: PortableForecaster, tmp_path: Path) -> None:
    PortableForecaster(forecaster.tensors, np.zeros((2, 2), np.float32)).save(tmp_path)
    with pytest.raises(ValueError, match=r"expected beyond of shape .* got \(2, 2\)"):
        PortableForecaster.load(tmp_path)


def test_a_full_disk_is_an_error_of_the_system(forecaster: PortableForecaster, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="File too large") as refusal, full_disk(after=1_000):
        forecaster.save(tmp_path)
    assert refusal.value.errno in FULL_DISK


def test_it_comes_back_as_saved_and_other_inputs_are_refused(forecaster: PortableForecaster, tmp_path: Path) -> None:
    forecaster.save(tmp_path)
    x = _rows(5)
    assert PortableForecaster.load(tmp_path).predict(x).survival.tobytes() == forecaster.predict(x).survival.tobytes()
    save_file(dict(forecaster.tensors), tmp_path / PortableForecaster.FILE, metadata={"facts": '{"inputs": ["age"]}'})
    with pytest.raises(ValueError, match=r"expected the inputs .* got \('age',\)"):
        PortableForecaster.load(tmp_path)
