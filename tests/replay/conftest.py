"""Inputs of the replay's tests: hand-made windows, a small dataset, and the finished replay of it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from reclaim.data import schema
from reclaim.data import windows as w
from reclaim.data.windows import Windows, empty_windows
from reclaim.replay.experiments.margins.measure import EXPERIMENT, MarginsConfig
from reclaim.replay.report.page import ReplayReport
from reclaim.replay.runs.run import run_experiment
from tests import series
from tests.series import dataset_of

WINDOW_US = 300_000_000
START_US = 600_000_000

MAPPING = 'collection = "service"' + series.MAPPING


@pytest.fixture
def make_windows() -> Callable[..., Windows]:
    """Return a maker of adjacent five-minute windows: (cpu, memory) lists by task, by default with limits of 1."""

    def make(
        *tasks: list[tuple[float, float]],
        limit: tuple[float, float] = (1.0, 1.0),
        machines: list[int] | None = None,
        first_slots: list[int] | None = None,
    ) -> Windows:
        lengths = [len(t) for t in tasks]
        made = empty_windows(sum(lengths))
        task = np.repeat(np.arange(len(tasks)), lengths)
        slot = np.concatenate([np.arange(n) + (first_slots or [0] * len(tasks))[i] for i, n in enumerate(lengths)])
        values = np.array([v for t in tasks for v in t])
        made.collection_id[:] = task + 100
        made.start_us[:] = START_US + slot * WINDOW_US
        made.end_us[:] = made.start_us + WINDOW_US
        made.limit[:] = limit
        made.usage[:, w.CPU_MEAN] = made.percentiles[:, w.P90] = values[:, 0]
        made.usage[:, [w.MEMORY_MEAN, w.MEMORY_MAX]] = values[:, [1]]
        if machines is not None:
            made.machine_id[:] = np.array(machines)[task]
        return made

    return make


def write_series(folder: Path, *, tasks: int, windows: int, seed: int) -> None:
    """Write a cell of noisy daily waves with a rare burst, as a plain series; three tasks are one service."""
    rng = np.random.default_rng(seed)
    lines = ["task,service,time_s,machine,cpu,memory"]
    for task in range(tasks):
        level, phase = rng.uniform(0.1, 0.5, 2), rng.uniform(0, 2 * np.pi)
        wave = 1 + 0.5 * np.sin(np.arange(windows) * 2 * np.pi / 288 + phase)
        noise = rng.lognormal(0, 0.15, (windows, 2))
        burst = np.where(rng.random((windows, 2)) < 0.002, 2.0, 1.0)
        usage = np.minimum(level * wave[:, None] * noise * burst, 0.99) * [1.0, 2.0]
        lines += [f"{task},s{task // 3},{600 + 300 * i},{task % 4},{c:.6g},{m:.6g}" for i, (c, m) in enumerate(usage)]
    series.write_raw(folder, lines, MAPPING)


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a dataset of 30 tasks on 4 machines over two days, with its features; to be read only."""
    folder = tmp_path_factory.mktemp("replay")
    write_series(folder / "raw", tasks=30, windows=576, seed=3)
    made = dataset_of(folder / "raw", folder / "cell", buckets=3)
    assert made.n_windows == 30 * 576
    assert schema.CPU_PERCENTILES in made.manifest["lacks"]
    return made.path


@pytest.fixture(scope="session")
def cell_dataset(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return that dataset with four machines that just hold the limits, and a fifth that has gone; to be read only."""
    cell = tmp_path_factory.mktemp("cell") / "cell"
    shutil.copytree(dataset, cell)
    machines: dict[str, Sequence[float]] = {
        schema.TIME_US: [0] * 5 + [START_US],
        schema.MACHINE_ID: [0, 1, 2, 3, 4, 4],
        schema.EVENT_TYPE: [schema.MachineEventType.ADD] * 5 + [schema.MachineEventType.REMOVE],
        schema.CPU_CAPACITY: [8.0] * 6,
        schema.MEMORY_CAPACITY: [16.0] * 6,
    }
    rows = [dict(zip(machines, values, strict=True)) for values in zip(*machines.values(), strict=True)]
    pq.write_table(pa.Table.from_pylist(rows, schema=schema.MACHINES), cell / "machines.parquet")
    return cell


@pytest.fixture(scope="session")
def unlimited(cell_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make that cell again, without limits of memory; to be read only."""
    folder = tmp_path_factory.mktemp("unlimited")
    write_series(folder / "raw", tasks=30, windows=576, seed=3)
    (folder / "raw" / "mapping.toml").write_text(MAPPING.replace("memory_limit = 2.0\n", ""))
    made = dataset_of(folder / "raw", folder / "cell", buckets=3)
    shutil.copy(cell_dataset / "machines.parquet", folder / "cell" / "machines.parquet")
    return made.path


@pytest.fixture(scope="session")
def config() -> MarginsConfig:
    """Return settings with two estimators and the limit."""
    return MarginsConfig(estimators=("borg", "percentile", "limit"), draws=50, online=False)


@pytest.fixture(scope="session")
def report(dataset: Path, config: MarginsConfig, tmp_path_factory: pytest.TempPathFactory) -> ReplayReport:
    """Make a finished replay of that dataset, not recorded; to be read only."""
    out = tmp_path_factory.mktemp("out") / "margins"
    return run_experiment(EXPERIMENT, dataset, out, config, tracking=False)
