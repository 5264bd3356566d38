"""The portable network's samples are balanced, rescaled and hidden as stated, and its fit is the same again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from reclaim.features.feature_set import FeatureSet
from reclaim.training.fitting import portable
from reclaim.training.fitting.portable import PortableLearner
from reclaim.training.fitting.sources import Source, open_sources
from reclaim.training.models.portable import FIRST, INPUTS, LAGS, SHARES, PortableForecaster, place
from reclaim.training.models.trees import Rows
from reclaim.training.settings import FitConfig, TrainConfig
from tests.series import dataset_of

CONFIG = TrainConfig(estimator="portable", fit=FitConfig(width=16, depth=1, epochs=2, max_samples=6_000))
MAPPING = """
task = "task"
time = "time_s"
time_unit = "s"
window_s = 300
[columns]
cpu_mean = "cpu"
cpu_limit = 1.0
"""


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
        (folder / "raw").mkdir()
        (folder / "raw" / "cell.csv").write_text("\n".join(lines) + "\n")
        mapping = MAPPING + ('memory_mean = "memory"\nmemory_limit = 2.0\n' if memory else "")
        (folder / "raw" / "mapping.toml").write_text(mapping)
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
    for lag in LAGS:
        missing = np.isnan(made.x[:, INPUTS.index(lag)])
        assert missing.mean() == pytest.approx(0.4, abs=0.02)
        assert np.array_equal(made.x[:, INPUTS.index(f"{lag}_missing")] == 1, missing)
    again = made.x.copy()
    place(again)
    assert again.tobytes() == made.x.tobytes()  # places go with the other limit
    assert (x[:, FIRST] == np.float32(0.2)).all()  # what it was given is as it was


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
