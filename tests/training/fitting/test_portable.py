"""The portable network's samples are balanced, rescaled and hidden as stated, and its fit is the same again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from reclaim.data.errors import HistoryTooShortError
from reclaim.features.feature_set import FeatureSet
from reclaim.features.registry import AT, N_FEATURES
from reclaim.features.targets import HORIZONS_S, TARGETS
from reclaim.training.fitting import portable
from reclaim.training.fitting.portable import PortableLearner
from reclaim.training.fitting.sources import Source, open_sources
from reclaim.training.models.portable import FIRST, INPUTS, LAGS, SHARES, PortableForecaster, place
from reclaim.training.models.trees import Rows
from reclaim.training.settings import FitConfig, TrainConfig
from tests.series import CPU, dataset_of, write_raw

CONFIG = TrainConfig(estimator="portable", fit=FitConfig(width=16, depth=1, epochs=2, max_samples=6_000))


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[Source]:
    """Return two cells: one with memory and one of twice as many tasks without."""
    made = []
    for tasks, memory in ((20, True), (40, False)):
        folder = tmp_path_factory.mktemp("cell")
        random = np.random.default_rng(tasks)
        lines = ["task,time_s,cpu,memory"]
        for task in range(tasks):
            usage = np.minimum(random.uniform(0.1, 0.5) * random.lognormal(0, 0.2, (300, 2)), 0.99)
            lines += [f"{task},{600 + 300 * i},{c:.6g},{m:.6g}" for i, (c, m) in enumerate(usage)]
        write_raw(folder / "raw", lines, CPU + ('memory_mean = "memory"\nmemory_limit = 2.0\n' if memory else ""))
        made.append(dataset_of(folder / "raw", folder / "dataset", buckets=2).path)
    return open_sources(made)


def test_every_source_and_signal_has_as_many_rows(sources: list[Source]) -> None:
    rows, counts = portable._rows(sources, FeatureSet.train_rows, 3_000, 1)
    # CPU of both and memory of one; peak CPU is not recorded, the mean of the window stands in for it
    memory = rows.x[:, INPUTS.index("memory")] == 1
    assert (len(rows), int(memory.sum()), sorted(counts)) == (3_000, 1_000, [1_000, 2_000])
    assert np.isfinite(rows.x[:, FIRST]).all()


def test_limits_are_rescaled_with_what_was_used_and_lags_are_hidden_with_their_marks() -> None:
    n = 20_000
    x = np.full((n, len(INPUTS)), 0.2, np.float32)
    x[:, SHARES:] = 0
    rows = Rows(x, np.full((n, 1, 3), 0.4, np.float32), np.zeros((n, 3), np.float32))
    made = portable._augmented(rows, np.random.default_rng(1))
    factor = made.x[:, FIRST] / np.float32(0.2)
    assert made.y[:, 0, 0] == pytest.approx(0.4 * factor, rel=1e-6)
    rescaled = factor != 1
    assert rescaled.mean() == pytest.approx(0.6, abs=0.02)
    assert np.log(factor[rescaled]).std() == pytest.approx(0.7, abs=0.02)
    assert np.log(factor[rescaled]).mean() == pytest.approx(0, abs=0.03)  # as often larger as smaller
    for lag in LAGS:
        missing = np.isnan(made.x[:, INPUTS.index(lag)])
        assert missing.mean() == pytest.approx(0.4, abs=0.02)
        assert np.array_equal(made.x[:, INPUTS.index(f"{lag}_missing")] == 1, missing)
    shares = made.x[:, :SHARES] / (np.float32(0.2) * factor[:, None])
    assert (np.nanmin(shares, axis=0), np.nanmax(shares, axis=0)) == (pytest.approx(1.0), pytest.approx(1.0))
    again = made.x.copy()
    place(again)
    assert again.tobytes() == made.x.tobytes()  # places go with the other limit
    assert (x[:, FIRST] == np.float32(0.2)).all()  # what it was given is as it was


def test_no_target_that_rests_on_anything_after_the_training_period_is_learned_and_each_row_is_of_one(
    sources: list[Source], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(portable, "_READ_AT_ONCE", 1_000)  # several pieces of each
    weighted = [
        Source(of.dataset, replace(of.features, weight=np.full(len(of.features), k, np.float32)))
        for k, of in enumerate(sources, 1)
    ]
    known, all_of_it, weight = np.zeros(3, int), 0, 0
    for k, of in enumerate(sources, 1):
        y = of.features.targets(of.features.train_rows())[0][:, :2]  # peak CPU is not recorded
        known += np.isfinite(y).sum(axis=(0, 1))
        weight += k * np.isfinite(y).any(axis=2).sum()
        all_of_it += np.isfinite(of.features.y[of.features.train_rows(), :2]).sum()
    assert known.sum() < all_of_it  # or this says nothing
    rows, counts = portable._rows(weighted, FeatureSet.train_rows, 100_000, 1)
    assert np.isfinite(rows.y).sum(axis=(0, 1)).tolist() == known.tolist()
    assert rows.weight is not None
    assert rows.weight.sum() == weight
    x, tails, weights = zip(*portable._targets_alone(weighted, 100_000, 1), strict=True)
    assert sum(np.isfinite(y).sum(axis=(0, 1)) for y in tails).tolist() == known.tolist()
    assert sum(of.sum() for of in weights) == weight
    assert sum(map(len, x)) == len(rows) == sum(counts)


def test_a_row_that_does_not_know_what_is_used_now_is_no_row_of_that_signal(sources: list[Source]) -> None:
    before, counted = portable._rows(sources, FeatureSet.train_rows, 100_000, 1)
    blank = []
    for of in sources:
        x = np.array(of.features.x)
        x[::2, AT.memory_last] = np.nan
        blank.append(Source(of.dataset, replace(of.features, x=x)))
    rows, counts = portable._rows(blank, FeatureSet.train_rows, 100_000, 1)
    assert np.isfinite(rows.x[:, FIRST]).all()
    of_memory = [int((of.x[:, INPUTS.index("memory")] == 1).sum()) for of in (before, rows)]
    assert of_memory[1] == pytest.approx(of_memory[0] / 2, abs=2)
    assert sum(counts) == len(rows) == sum(counted) - of_memory[0] + of_memory[1]


@pytest.mark.parametrize(("recorded", "known"), [(0.6, [0, 1, 3]), (0.4, [])])
def test_peak_cpu_is_learned_where_most_windows_have_a_peak_above_their_mean(recorded: float, known: list[int]) -> None:
    n, hour = 10, 1
    y, inside = np.full((n, len(TARGETS), len(HORIZONS_S)), np.nan, np.float32), np.ones((n, len(HORIZONS_S)), bool)
    y[[0, 1, 2, 3], :, hour], inside[2, hour] = 0.5, False
    x = np.zeros((n, N_FEATURES), np.float32)
    x[:, AT.cpu_last] = 0.2
    x[:, AT.peak_cpu_last] = np.where(np.arange(n) < recorded * n, 0.3, 0.201)  # the rest but for rounding
    features: Any = SimpleNamespace(x=x, y=y, inside=inside)
    for t, target in enumerate(TARGETS):
        found = portable._known(features, np.arange(n), t).tolist()
        assert found == (known if target == "peak_cpu" else [0, 1, 3])


def test_training_rows_are_made_up_and_those_of_validation_which_judge_are_as_recorded(
    sources: list[Source], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []

    def fit(*arguments: Any, **options: Any) -> None:
        given.extend([*arguments, options])
        raise KeyboardInterrupt

    monkeypatch.setattr(portable, "fit_network", fit)
    config = replace(CONFIG, fit=replace(CONFIG.fit, max_valid_samples=600))
    with pytest.raises(KeyboardInterrupt):
        PortableLearner().fit(sources, config, tmp_path)
    train, valid, _, options = given
    recorded, _ = portable._rows(sources, FeatureSet.train_rows, CONFIG.fit.max_samples, config.seed)
    judges, _ = portable._rows(sources, FeatureSet.valid_rows, 600, config.seed)
    assert len(train) == len(recorded)
    assert 0.5 < (train.x[:, FIRST] != recorded.x[:, FIRST]).mean() < 0.7
    np.testing.assert_array_equal(valid.x, judges.x)
    np.testing.assert_array_equal(valid.y, judges.y)
    assert options["now"].tolist() == [FIRST]


def test_without_a_known_demand_there_is_nothing_to_fit_and_the_error_says_so(
    sources: list[Source], tmp_path: Path
) -> None:
    none = [
        Source(of.dataset, replace(of.features, inside=np.zeros((len(of.features), len(HORIZONS_S)), bool)))
        for of in sources
    ]
    with pytest.raises(HistoryTooShortError, match="1 training row with a known demand"):
        PortableLearner().fit(none, CONFIG, tmp_path)


def test_all_signals_have_one_table_of_tails(sources: list[Source], tmp_path: Path) -> None:
    forecasters = [
        PortableLearner().fit(of, CONFIG, tmp_path / str(len(of))).forecaster for of in (sources, sources[:1])
    ]
    beyond, alone = (of.beyond for of in forecasters if isinstance(of, PortableForecaster))
    assert beyond is not None
    assert alone is not None
    assert np.array_equal(beyond[:, :, 0], beyond[:, :, 1], equal_nan=True)
    assert np.array_equal(beyond[:, :, 0], beyond[:, :, 2], equal_nan=True)
    assert ((beyond[1] >= 0) & (beyond[1] <= 1)).all()
    assert (alone != beyond)[1].any()  # it is of all sources


def test_the_same_sources_and_seed_give_the_same_weights(sources: list[Source], tmp_path: Path) -> None:
    made = [PortableLearner().fit(sources, CONFIG, tmp_path / str(k)).forecaster for k in range(2)]
    for folder, forecaster in zip((tmp_path / "a", tmp_path / "b"), made, strict=True):
        folder.mkdir()
        forecaster.save(folder)
    assert (tmp_path / "a" / "portable.safetensors").read_bytes() == (
        tmp_path / "b" / "portable.safetensors"
    ).read_bytes()
