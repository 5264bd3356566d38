"""A cell replayed with Borg's estimator and a network, and its contenders by machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from reclaim.data.dataset import Dataset
from reclaim.features.feature_set import FeatureSet
from reclaim.replay.experiment import Source
from reclaim.replay.experiments.compaction.measure import CompactionConfig
from reclaim.replay.open_loop.estimates import LIMIT, Estimates, estimate_all
from reclaim.replay.open_loop.machines import MachineContenders
from reclaim.training.bundle import Bundle
from reclaim.training.margins.margin import Budgets

CONFIG = CompactionConfig(
    estimators=("borg", LIMIT), trials=3, checkpoints=1, tune=False, budgets=Budgets(0.02, 0.1)
)  # fmt: skip


@pytest.fixture(scope="package")
def source(cell_dataset: Path, bundle: Bundle) -> Source:
    return Source(Dataset.open(cell_dataset), FeatureSet.open(cell_dataset), {"network": bundle})


@pytest.fixture(scope="package")
def estimates(source: Source) -> Estimates:
    return estimate_all(source, CONFIG)


@pytest.fixture(scope="package")
def contenders(source: Source, estimates: Estimates) -> MachineContenders:
    """Return contenders with margins of the machines of the trace."""
    return MachineContenders.set_on_validation(source, estimates, CONFIG)
