"""The training loop: it learns, it repeats itself, and a killed run ends as if it had not been killed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from reclaim.data.errors import ConfigError, HistoryTooShortError, ModelError
from reclaim.training import fit
from reclaim.training.fit import FitResult, choose_device, fit_network
from reclaim.training.networks import inverse_transform
from reclaim.training.resident import Rows
from reclaim.training.settings import FitConfig, TreeConfig

CONFIG = FitConfig(width=16, depth=1, epochs=4, batch_size=128, learning_rate=1e-2, device="cpu")


def _rows(n: int, seed: int) -> Rows:
    """Demand is the first feature plus noise that grows with the second; the third is sometimes unknown."""
    rng = np.random.default_rng(seed)
    x = rng.random((n, 3)).astype(np.float32)
    noise = rng.random((n, 3, 3)).astype(np.float32)
    y = 0.5 * x[:, 0, None, None] + 0.5 * x[:, 1, None, None] * noise
    y[rng.random(n) < 0.2, 0] = np.nan
    x[rng.random(n) < 0.2, 2] = np.nan
    oom = (rng.random((n, 3)) < 0.1).astype(np.float32)
    return Rows(x, y.astype(np.float32), oom)


class _KilledError(Exception):
    pass


def _weights_equal(a: FitResult, b: FitResult) -> bool:
    mine, theirs = a.network.state_dict(), b.network.state_dict()
    return all(torch.equal(mine[k], theirs[k]) for k in mine)


def test_a_killed_run_goes_on_to_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train, valid = _rows(1000, 0), _rows(300, 1)
    whole = fit_network(train, valid, CONFIG, seed=3)

    one_epoch, seen = fit._epoch, []

    def killed_in_the_third(*args: Any) -> dict[str, float]:
        seen.append(args[4])
        if len(seen) == 3:
            raise _KilledError
        return one_epoch(*args)

    monkeypatch.setattr(fit, "_epoch", killed_in_the_third)
    with pytest.raises(_KilledError):
        fit_network(train, valid, CONFIG, seed=3, checkpoints=tmp_path)
    resumed = fit_network(train, valid, CONFIG, seed=3, checkpoints=tmp_path)
    assert seen == [0, 1, 2, 2, 3]
    assert _weights_equal(whole, resumed)
    assert [h["valid_loss"] for h in whole.history] == [h["valid_loss"] for h in resumed.history]


def test_the_same_seed_gives_the_same_weights_and_another_seed_others() -> None:
    train, valid = _rows(600, 0), _rows(200, 1)
    config = replace(CONFIG, epochs=1)
    assert _weights_equal(fit_network(train, valid, config, seed=3), fit_network(train, valid, config, seed=3))
    assert not _weights_equal(fit_network(train, valid, config, seed=3), fit_network(train, valid, config, seed=4))


def test_a_checkpoint_of_other_data_is_refused(tmp_path: Path) -> None:
    valid = _rows(200, 1)
    fit_network(_rows(600, 0), valid, replace(CONFIG, epochs=1), seed=3, checkpoints=tmp_path)
    with pytest.raises(ModelError, match="belongs to a run of other settings or data"):
        fit_network(_rows(600, 2), valid, replace(CONFIG, epochs=1), seed=3, checkpoints=tmp_path)


def test_the_fitted_quantiles_cover_what_they_promise() -> None:
    result = fit_network(_rows(6000, 0), _rows(1000, 1), replace(CONFIG, epochs=12), seed=1)
    assert result.history[result.best_epoch]["valid_loss"] < 0.5 * result.history[0]["valid_loss"]
    test = _rows(4000, 2)
    with torch.no_grad():
        quantiles = inverse_transform(result.network(torch.from_numpy(test.x))[0], CONFIG.transform).numpy()
    known = np.isfinite(test.y[:, 0, 0])
    covered = (test.y[known, 0, 0, None] <= quantiles[known, 0, 0]).mean(0)
    assert covered[0] == pytest.approx(0.5, abs=0.06)
    assert covered[1] == pytest.approx(0.9, abs=0.04)


def test_fitting_stops_when_validation_no_longer_improves() -> None:
    # the validation targets have nothing to do with the training ones: learning only hurts
    valid = _rows(200, 1)
    contrary = Rows(valid.x, (2.0 - valid.y).astype(np.float32), valid.oom)
    result = fit_network(_rows(600, 0), contrary, replace(CONFIG, epochs=30, patience=2, learning_rate=0.05), seed=1)
    assert len(result.history) < 30
    assert len(result.history) == result.best_epoch + 1 + 2


def test_no_rows_is_an_error_that_names_the_part() -> None:
    some, none = _rows(10, 0), _rows(0, 0)
    with pytest.raises(HistoryTooShortError, match="training row"):
        fit_network(none, some, CONFIG, seed=1)
    with pytest.raises(HistoryTooShortError, match="validation row"):
        fit_network(some, none, CONFIG, seed=1)


@pytest.mark.parametrize("name", ["foo", "cuda:99", "meta"])
def test_a_device_that_is_not_here_is_refused_with_its_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"fit.device: '{name}' cannot be used here"):
        choose_device(name)
    assert choose_device("cpu").type == "cpu"


def test_what_no_training_row_knows_is_not_counted_as_fitted() -> None:
    rows = _rows(300, 0)
    rows.y[:, 1] = np.nan
    rows.y[:, 0, 2] = np.nan
    rows.oom[:, 1:] = np.nan
    heads = fit_network(rows, _rows(100, 1), replace(CONFIG, epochs=1), seed=1).heads
    assert heads.targets.tolist() == [[True, True, False], [False] * 3, [True] * 3]
    assert heads.oom.tolist() == [True, False, False]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FitConfig(width=0), "width must be at least 1, got 0"),
        (lambda: FitConfig(transform="cube"), "transform must be one of"),
        (lambda: FitConfig(learning_rate=0.0), "learning_rate must be above 0"),
        (lambda: TreeConfig(levels=(0.9, 0.5)), "levels must be increasing"),
        (lambda: TreeConfig(levels=(1.5,)), "levels must be between 0 and 1"),
    ],
)
def test_settings_out_of_range_are_refused_with_the_value(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(ConfigError, match=message):
        make()
