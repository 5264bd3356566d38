"""A small dataset with its features, and the drawn model as a service loads it."""

from __future__ import annotations

from pathlib import Path

import pytest

from reclaim.data.dataset import Dataset
from reclaim.data.ingest.job import IngestConfig, ingest
from reclaim.data.synthetic.job import SyntheticCellConfig, write_cell
from reclaim.features.build import FeatureConfig, build_features
from reclaim.serving.models.loader import LoadedModel, load_model


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("predicted")
    write_cell(folder / "cell", SyntheticCellConfig(machines=3, days=0.5, tasks_per_machine=10.0))
    made = ingest(folder / "cell", folder / "dataset", IngestConfig(buckets=3)).dataset
    build_features(made, FeatureConfig(monday_s=-86_400))
    return made


@pytest.fixture(scope="session")
def model(bundle_folder: Path) -> LoadedModel:
    return load_model(str(bundle_folder))
