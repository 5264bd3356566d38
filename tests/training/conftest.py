"""Small histories of windows, and small trained models, for the tests of the training room."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from reclaim.data.windows import (
    CHANNELS,
    CPU_MAX,
    CPU_MEAN,
    MEMORY_MAX,
    MEMORY_MEAN,
    P50,
    P90,
    Windows,
    empty_windows,
)
from reclaim.features.registry import N_FEATURES
from reclaim.features.targets import HORIZONS_S, TARGETS
from reclaim.training.models.network import Scaling, SurvivalNetwork
from reclaim.training.models.network_forecaster import NetworkForecaster

WINDOW_US = 300_000_000
FIRST_US = 600_000_000

MakeWindows = Callable[..., Windows]


def build_windows(
    cpu: list[float] | NDArray[np.float64],
    memory: list[float] | NDArray[np.float64] | None = None,
    *,
    task: int = 1,
    limit: tuple[float, float] = (1.0, 1.0),
    start_us: int = FIRST_US,
    scheduled_us: int = -1,
) -> Windows:
    """Return consecutive 5-minute windows of one task with the given demands, in the unit of the limit."""
    n = len(cpu)
    w = empty_windows(n)
    w.collection_id[:] = task
    w.start_us[:] = start_us + WINDOW_US * np.arange(n)
    w.end_us[:] = w.start_us + WINDOW_US
    w.scheduled_us[:] = scheduled_us
    w.limit[:] = limit
    w.tier[:] = 3
    w.scheduling_class[:] = 2
    for channel, share in ((CPU_MEAN, 0.8), (CPU_MAX, 1.2)):
        w.usage[:, channel] = share * np.asarray(cpu)
    for level, share in ((P50, 0.8), (P90, 1.0)):
        w.percentiles[:, level] = share * np.asarray(cpu)
    for channel, share in ((MEMORY_MEAN, 0.9), (MEMORY_MAX, 1.0)):
        w.usage[:, channel] = share * np.asarray(cpu if memory is None else memory)
    assert len(CHANNELS) == w.usage.shape[1]
    return w


@pytest.fixture
def make_windows() -> MakeWindows:
    """Return the builder of windows, for tests that need one history or two."""
    return build_windows


@pytest.fixture(scope="session")
def random_forecaster() -> NetworkForecaster:
    """Return a network of random weights: nothing is learned, everything is computed."""
    return _random_forecaster(seed=5)


@pytest.fixture(scope="session")
def other_forecaster() -> NetworkForecaster:
    """Return one of other random weights."""
    return _random_forecaster(seed=6)


def _random_forecaster(seed: int) -> NetworkForecaster:
    generator = torch.Generator().manual_seed(seed)
    network = SurvivalNetwork(
        Scaling(*(torch.full((N_FEATURES,), v) for v in (0.3, 0.5, -8.0, 8.0))),
        n_targets=len(TARGETS), n_horizons=len(HORIZONS_S), width=128, depth=3,
    )  # fmt: skip
    network.initialise(generator)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.03 * torch.randn(parameter.shape, generator=generator))
        network.head.bias.add_(2.0)  # curves that fall over all thresholds
    return NetworkForecaster.of(network)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Point the tracking store into the test's own folder."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path
