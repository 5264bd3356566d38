"""Datasets of plain series for tests."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from reclaim.data.dataset import Dataset
from reclaim.data.ingest.job import IngestConfig, ingest
from reclaim.features.build import build_features

CPU = """
task = "task"
time = "time_s"
time_unit = "s"
window_s = 300
[columns]
cpu_mean = "cpu"
cpu_limit = 1.0
"""
"""Mapping of a series of CPU alone."""
MAPPING = f"""{CPU}
memory_mean = "memory"
memory_max = "memory"
memory_limit = 2.0
machine_id = "machine"
"""


def write_raw(folder: Path, lines: Iterable[str], mapping: str = MAPPING) -> None:
    """Write a plain series, the names of its columns first, and the mapping that reads it."""
    folder.mkdir()
    (folder / "cell.csv").write_text("\n".join(lines) + "\n")
    (folder / "mapping.toml").write_text(mapping)


def write_cell(folder: Path, *, tasks: int, windows: int, seed: int = 1) -> None:
    """Write tasks whose usage is a noisy daily wave, as a plain series."""
    rng = np.random.default_rng(seed)
    lines = ["task,time_s,machine,cpu,memory"]
    for task in range(tasks):
        level, phase = rng.uniform(0.1, 0.5, 2), rng.uniform(0, 2 * np.pi)
        wave = 1 + 0.5 * np.sin(np.arange(windows) * 2 * np.pi / 288 + phase)
        usage = np.minimum(level * wave[:, None] * rng.lognormal(0, 0.2, (windows, 2)), 0.99) * [1.0, 2.0]
        lines += [f"{task},{600 + 300 * i},{task % 4},{c:.6g},{m:.6g}" for i, (c, m) in enumerate(usage)]
    write_raw(folder, lines)


def dataset_of(raw: Path, out: Path, *, mapping: Path | None = None, buckets: int | None = None) -> Dataset:
    """Return the dataset of a plain series, by default by the mapping next to it, with its features."""
    config = IngestConfig(trace="series", mapping=str(mapping or raw / "mapping.toml"), buckets=buckets)
    made = ingest(raw, out, config).dataset
    build_features(made)
    return made
