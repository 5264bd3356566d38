"""A small mapping of a series, an ingest by it, and the names that a dataset keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from reclaim.data import schema as s
from reclaim.data.dataset import Dataset
from reclaim.data.ingest.job import IngestConfig

MAPPING = """
task = "vm"
time = "t"
time_unit = "s"
window_s = 300
[columns]
cpu_mean = "used"
cpu_limit = 4.0
"""


MEMORY = {"cpu_limit = 4.0": 'cpu_limit = 4.0\nmemory_mean = "memory"'}
"""Change of the mapping that reads memory, too."""


def given_mapping(folder: Path, text: str = MAPPING) -> str:
    path = folder / "mapping.toml"
    path.write_text(text)
    return str(path)


def config(mapping: str, share: float = 0.001) -> IngestConfig:
    return IngestConfig(trace="series", mapping=mapping, buckets=1, max_reject_share=share)


def names_of(dataset: Dataset) -> list[tuple[Any, ...]]:
    """Return workload, task, and the key of each row of names."""
    rows = dataset.table("names").to_pylist()
    return [(row[s.WORKLOAD], row[s.POD], row[s.COLLECTION_ID], row[s.INSTANCE_INDEX]) for row in rows]


SAME = "[machines]\ncpu_capacity = 64\nmemory_capacity = 256e9\n"
"""Part of a mapping: one capacity for all machines."""
