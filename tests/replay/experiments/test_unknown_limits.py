"""Replays of what is unknown or not asked for: no limit of memory, no estimator `limit`; settings that cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from reclaim.data.dataset import Dataset
from reclaim.data.errors import ConfigError
from reclaim.features.feature_set import FeatureSet
from reclaim.replay.closed_loop.simulate import Scheduling
from reclaim.replay.experiment import Source
from reclaim.replay.experiments.margins import measure as margins
from reclaim.replay.experiments.what_if import measure as whatif
from reclaim.replay.settings import ReplayConfig


def _source(cell: Path) -> Source:
    return Source(Dataset.open(cell), FeatureSet.open(cell), {})


def test_tasks_whose_limit_of_memory_is_unknown_are_placed_by_their_cpu(unlimited: Path) -> None:
    asked = whatif.WhatIfConfig(estimators=("borg",), machines=(4,), draws=10)
    found = whatif.measure(_source(unlimited), asked).results
    for estimator in found["estimators"]:
        point = estimator["points"][0]
        assert point["waiting"] == 0.0
        assert point["utilisation_cpu"] > 0.1


def test_the_cell_is_run_without_reclamation_even_where_no_estimator_reserves_the_limit(cell_dataset: Path) -> None:
    asked = margins.MarginsConfig(estimators=("borg",), draws=10, orders=1)
    loop = margins.measure(_source(cell_dataset), asked).results["closed_loop"]
    assert [e["name"] for e in loop["estimators"]] == ["limit", "borg", "oracle"]


@pytest.mark.parametrize(
    ("made", "wrong", "said"),
    [
        (ReplayConfig, {"seed": -1}, "seed must be 0 or more, got -1"),
        (Scheduling, {"seed": -1}, r"seed must be at least 0 and below 2\*\*63, got -1"),
        (Scheduling, {"seed": 2**63}, rf"seed must be at least 0 and below 2\*\*63, got {2**63}"),
        (Scheduling, {"checkpoint_s": 1e300}, "checkpoint_s must be 0 to 1e.09 seconds, got 1e.300"),
        (Scheduling, {"checkpoint_s": float("nan")}, "checkpoint_s must be 0 to 1e.09 seconds, got nan"),
        (whatif.WhatIfConfig, {"oom_budget": float("nan")}, "oom_budget must be 0 or more .* got nan"),
        (whatif.WhatIfConfig, {"oom_budget": float("inf")}, "oom_budget must be 0 or more .* got inf"),
        (margins.MarginsConfig, {"orders": 0}, "orders must be at least 1, got 0"),
    ],
)
def test_settings_that_cannot_be_are_refused_at_once(made: Any, wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        made(**wrong)
