"""Datasets of plain series for tests."""

from __future__ import annotations

from pathlib import Path

from reclaim.data.dataset import Dataset
from reclaim.data.ingest.job import IngestConfig, ingest
from reclaim.features.build import build_features


def dataset_of(raw: Path, out: Path, *, mapping: Path | None = None, buckets: int | None = None) -> Dataset:
    """Return the dataset of a plain series, by the mapping beside it unless told, with its features."""
    config = IngestConfig(trace="series", mapping=str(mapping or raw / "mapping.toml"), buckets=buckets)
    made = ingest(raw, out, config).dataset
    build_features(made)
    return made
