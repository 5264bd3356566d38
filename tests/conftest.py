"""Fixtures of all rooms: the folder of real data, a hand-made trace in the v3 layout, a drawn model."""

from __future__ import annotations

import gzip
import json
import os
import signal
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# Read as the libraries load. Test workers share the cores: a second thread of each would only wait.
os.environ["OMP_NUM_THREADS"] = "1"

from reclaim.data.schema import RESOURCES
from reclaim.training.bundle import Bundle
from reclaim.training.margins.margin import MARGIN_NAMES
from reclaim.training.margins.price import Price, three_prices
from tests.object_store import Bucket, server

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("BENTOML_DO_NOT_TRACK", "True")

# No test fails by a deadline. New cases are drawn at every run except in CI, which tests the change, not the draw.
settings.register_profile(
    "reclaim", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize="CI" in os.environ
)
settings.load_profile("reclaim")

Rows = Sequence[dict[str, Any] | str]


_LONG = ("test_demo", "test_crash", "test_docs", "test_survival", "test_distributed", "test_train")
"""Files that take minutes: they start first and in this order, so that no worker is left with one at the end, and the
documents begin once the demo has compiled what both run."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the long ones."""
    order = {name: place for place, name in enumerate(_LONG)}
    items.sort(key=lambda item: order.get(item.path.stem, len(_LONG)))


_STORES = ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI")


@pytest.fixture(scope="module", autouse=True)
def no_store_of_another_file() -> Iterator[None]:
    """Take the store that an earlier file used out of the environment, where MLflow itself writes it."""
    for name in _STORES:
        os.environ.pop(name, None)
    yield
    for name in _STORES:
        os.environ.pop(name, None)


@pytest.fixture
def real_data() -> Path:
    """Return the folder of real measurements; skip without one next to the checkout."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"real measurements are not beside this checkout ({folder.name}/ missing)")
    return folder


def _window(start_s: int, **changes: Any) -> dict[str, Any]:
    """Return one raw v3 usage row of 300 s; a change to None leaves the field out."""
    row: dict[str, Any] = {
        "start_time": str(start_s * 1_000_000),
        "end_time": str((start_s + 300) * 1_000_000),
        "collection_id": "9007199254740993",  # 2^53 + 1: exact only as an integer
        "instance_index": "0",
        "machine_id": "7",
        "alloc_collection_id": "0",
        "collection_type": "0",
        "average_usage": {"cpus": 0.1, "memory": 0.2},
        "maximum_usage": {"cpus": 0.4, "memory": 0.25},
        "random_sample_usage": {"cpus": 0.12},
        "assigned_memory": 0.5,
        "page_cache_memory": 0.01,
        "sample_rate": 1.0,
        "cpu_usage_distribution": [0.0, 0.02, 0.04, 0.06, 0.08, 0.1, 0.12, 0.14, 0.16, 0.2, 0.4],
    }
    row.update(changes)
    return {k: v for k, v in row.items() if v is not None}


def _event(time_s: int, type_: int, **changes: Any) -> dict[str, Any]:
    """Return one raw v3 instance event of the same task."""
    row: dict[str, Any] = {
        "time": str(time_s * 1_000_000),
        "type": str(type_),
        "collection_id": "9007199254740993",
        "scheduling_class": "2",
        "collection_type": "0",
        "priority": "200",
        "alloc_collection_id": "0",
        "instance_index": "0",
        "machine_id": "7",
        "resource_request": {"cpus": 0.3, "memory": 0.5},
    }
    row.update(changes)
    return {k: v for k, v in row.items() if v is not None}


@pytest.fixture
def window() -> Callable[..., dict[str, Any]]:
    """Return a maker of raw v3 usage rows."""
    return _window


@pytest.fixture
def event() -> Callable[..., dict[str, Any]]:
    """Return a maker of raw v3 instance events."""
    return _event


@pytest.fixture
def write_shard() -> Callable[[Path, str, Rows], Path]:
    """Return a writer of gzipped JSON-lines shards; a row of text is written unchanged."""

    def write(folder: Path, name: str, rows: Rows) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
        path = folder / f"{name}.json.gz"
        path.write_bytes(gzip.compress(text.encode(), mtime=0))
        return path

    return write


@pytest.fixture
def command_line(capsys: pytest.CaptureFixture[str]) -> Callable[..., CompletedProcess[str]]:
    """Return a runner of `reclaim` in this process, in the working folder: a new one would import for seconds."""
    from reclaim.cli.app import main

    def run(*words: object) -> CompletedProcess[str]:
        arguments = [str(word) for word in words]
        capsys.readouterr()
        handler = signal.getsignal(signal.SIGTERM)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["reclaim", *arguments])
            with pytest.raises(SystemExit) as ended:
                main()
        signal.signal(signal.SIGTERM, handler)  # which ``main`` sets
        return CompletedProcess(arguments, int(ended.value.code or 0), *capsys.readouterr())

    return run


@pytest.fixture
def blank_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Save an empty figure in place of each: drawing is half of a training or a replay that is not looked at."""
    from matplotlib.figure import Figure

    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda _, *args, **options: save(Figure((1, 1)), *args, **options))


@pytest.fixture(scope="session")
def s3_server() -> Iterator[tuple[str, int]]:
    """Return host and port of a running S3 server."""
    with server() as address:
        yield address


@pytest.fixture
def bucket(s3_server: tuple[str, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Bucket]:
    """Return an empty bucket of an S3 server that the environment of the test leads to."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://{}:{}".format(*s3_server))
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = Bucket(f"s3://test-{uuid.uuid4().hex}", s3_server)
    made.files().mkdir(made.url)
    yield made
    made.files().clear_instance_cache()


@pytest.fixture(scope="session")
def bundle() -> Bundle:
    """Return a small network whose answers depend on every feature; drawn, not fitted."""
    import torch

    from reclaim.features.registry import N_FEATURES
    from reclaim.features.targets import HORIZONS_S, TARGETS
    from reclaim.training.models.network import Scaling, SurvivalNetwork
    from reclaim.training.models.network_forecaster import NetworkForecaster

    generator = torch.Generator().manual_seed(7)
    network = SurvivalNetwork(
        Scaling(*(torch.full((N_FEATURES,), v) for v in (0.3, 1.0, -8.0, 8.0))),
        n_targets=len(TARGETS), n_horizons=len(HORIZONS_S), width=32, depth=2,
    )  # fmt: skip
    network.initialise(generator)
    with torch.no_grad():
        network.head.weight.normal_(0.0, 0.3, generator=generator)
        network.head.bias.fill_(2.0)  # curves that fall over all thresholds
    return Bundle(
        kind="network",
        forecaster=NetworkForecaster.of(network),
        horizon_s=3_600,
        mean_limit=(1.0, 1.0),
        prices=three_prices(Price("baseline", (12.0, 6.0)), Price("aggressive", (1.5, 0.75))),
        dataset_fingerprint="0" * 64,
        trained={
            "violation": {
                name: dict(zip(RESOURCES, rates, strict=True))
                for name, rates in zip(MARGIN_NAMES, ((0.001, 0.0008), (0.004, 0.003), (0.01, 0.009)), strict=True)
            }
        },
    )
