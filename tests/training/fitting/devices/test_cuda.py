"""A fit on a GPU: recorded steps are the plain ones, a killed run goes on, and the CPU answers with the weights."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from reclaim.data.errors import ConfigError
from reclaim.training.fitting import network as fit
from reclaim.training.fitting.network import FitResult, fit_network
from reclaim.training.models.network import survival_loss
from reclaim.training.models.network_forecaster import NetworkForecaster
from reclaim.training.settings import FitConfig
from tests.training.fitting.test_network import killed_and_resumed, rows_of_noise, weights_equal

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")

CONFIG = FitConfig(width=32, depth=2, epochs=4, batch_size=128, learning_rate=1e-2, device="cuda")
TRAIN, VALID = rows_of_noise(1000, 0), rows_of_noise(300, 1)
"""1,000 rows are seven whole batches, which are repeated, and one of 104 rows, which is not."""


def _loss(result: FitResult) -> float:
    return result.history[-1]["valid_loss"]


@pytest.mark.parametrize("bfloat16", [False, True])
def test_steps_are_recorded_and_end_where_plain_ones_end(caplog: pytest.LogCaptureFixture, *, bfloat16: bool) -> None:
    config = replace(CONFIG, bfloat16=bfloat16)
    with caplog.at_level(logging.WARNING):
        recorded = fit_network(TRAIN, VALID, config, seed=3)
    assert "not recorded" not in caplog.text
    plain = fit_network(TRAIN, VALID, replace(config, recorded=False), seed=3)
    assert _loss(recorded) == pytest.approx(_loss(plain), rel=0.01 if bfloat16 else 1e-3)


def test_a_step_that_cannot_be_recorded_is_taken_one_by_one_and_the_next_fit_is_recorded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain = fit_network(TRAIN, VALID, replace(CONFIG, recorded=False), seed=3)

    def waiting(*given: torch.Tensor) -> torch.Tensor:
        loss = survival_loss(*given)
        assert loss.isfinite().all()  # the host waits for the card, which CUDA does not record
        return loss

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(fit, "survival_loss", waiting)
        one_by_one = fit_network(TRAIN, VALID, CONFIG, seed=3)
    assert "steps are not recorded on cuda" in caplog.text
    assert _loss(one_by_one) == pytest.approx(_loss(plain), rel=1e-3)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        recorded = fit_network(TRAIN, VALID, CONFIG, seed=3)
    assert "not recorded" not in caplog.text
    assert _loss(recorded) == pytest.approx(_loss(plain), rel=1e-3)


def test_bfloat16_costs_little() -> None:
    assert _loss(fit_network(TRAIN, VALID, replace(CONFIG, bfloat16=True), seed=3)) == pytest.approx(
        _loss(fit_network(TRAIN, VALID, CONFIG, seed=3)), rel=0.02
    )


@pytest.mark.parametrize("recorded", [False, True])
def test_the_same_seed_gives_the_same_weights(*, recorded: bool) -> None:
    config = replace(CONFIG, recorded=recorded)
    assert weights_equal(fit_network(TRAIN, VALID, config, seed=3), fit_network(TRAIN, VALID, config, seed=3))


def test_a_killed_run_goes_on_to_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert weights_equal(*killed_and_resumed(CONFIG, tmp_path, monkeypatch))


def test_the_fit_ends_near_that_of_the_cpu() -> None:
    config = replace(CONFIG, dropout=0.0)  # dropout draws other units there
    on_cpu = fit_network(TRAIN, VALID, replace(config, device="cpu"), seed=3)
    assert _loss(fit_network(TRAIN, VALID, config, seed=3)) == pytest.approx(_loss(on_cpu), rel=0.01)


def test_the_cpu_answers_what_the_gpu_computes() -> None:
    result = fit_network(TRAIN, VALID, CONFIG, seed=3)
    survival = NetworkForecaster.of(result.network).predict(VALID.x).survival
    with torch.inference_mode():
        steps, _ = result.network.to("cuda")(torch.from_numpy(VALID.x).to("cuda"))
    on_gpu = torch.sigmoid(steps).cumprod(-1).cpu().numpy()
    np.testing.assert_allclose(survival[..., : on_gpu.shape[-1]], on_gpu, atol=2e-3)


def test_too_little_memory_names_the_remedy() -> None:
    with (
        pytest.raises(ConfigError, match=r"fit\.device: CUDA out of memory; lower fit\.max_samples"),
        fit._remedy_named(CONFIG),
    ):
        torch.empty(2**50, dtype=torch.uint8, device="cuda")
