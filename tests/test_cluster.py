"""Stages on a Ray cluster of several nodes, one of which dies in the middle: the bytes are those of one machine."""

from __future__ import annotations

import gzip
import logging
import operator
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from reclaim.data.core.duck import DamagedFileError, check_gzip
from reclaim.data.core.engine import workers as engine
from reclaim.data.core.engine.workers import HERE, Engine, OnRay, Workers
from reclaim.data.dataset import Dataset
from reclaim.data.ingest.job import IngestConfig, ingest
from reclaim.data.synthetic.job import SyntheticCellConfig, write_cell
from reclaim.features.build import FeatureConfig, build_features
from reclaim.features.sample import SampleConfig
from reclaim.replay.experiment import Experiment
from reclaim.replay.experiments.margins.measure import EXPERIMENT as margins
from reclaim.replay.experiments.margins.measure import MarginsConfig
from reclaim.replay.experiments.what_if.measure import EXPERIMENT as what_if
from reclaim.replay.experiments.what_if.measure import WhatIfConfig
from reclaim.replay.runs.run import by_name, run_experiment
from reclaim.replay.settings import ReplayConfig
from reclaim.serving.predictions.job import predict
from reclaim.training.bundle import load_model
from tests.folders import contents
from tests.pickled import Pickled

_records = logging.getLogRecordFactory()
ray = pytest.importorskip("ray")
logging.setLogRecordFactory(_records)  # Ray's stamps every record of the process, which other tests look at
pytestmark = pytest.mark.slow

BUCKETS = 5
NODES = 2
RAY = Engine("ray", NODES)
PATIENCE = {
    # Ray ends a process in which a request waits for a head that is gone: here, the worker that runs the tests
    "gcs_rpc_server_reconnect_timeout_s": 86_400,
    "health_check_timeout_ms": 120_000,  # of ten seconds: a node of a busy machine is not taken for dead
}
"""Times that the parts of a cluster wait for one another, so that a busy machine ends no process of it."""


class Nodes:
    """A Ray cluster on the loopback interface: a head that runs no job, and nodes of one core each."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 0, "include_dashboard": False, "_system_config": PATIENCE}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self._nodes = [self._cluster.add_node(num_cpus=1) for _ in range(NODES)]
        ray.init(address=self._cluster.address, log_to_driver=False, configure_logging=False)

    def kill_one(self) -> None:
        """Kill a node with all that runs on it, and add another one."""
        self._cluster.remove_node(self._nodes.pop(0), allow_graceful=False)
        self._nodes.append(self._cluster.add_node(num_cpus=1))

    def close(self) -> None:
        """Stop every process of the cluster."""
        ray.shutdown()
        self._cluster.shutdown()


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    """Return the cluster."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")  # of two seconds, to wait less for the end of a fit
        patch.setattr(ray._private.ray_constants, "ENABLE_RAY_CLUSTER", False)  # to listen on loopback alone
        cluster = Nodes()
        yield cluster
        cluster.close()
    logging.setLogRecordFactory(_records)


@pytest.fixture
def dying(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Kill a node as the first result of a stage is taken; return when that was."""
    killed: list[float] = []

    class Breaking(OnRay):
        def result(self, begun: Any) -> Any:
            if not killed:
                nodes.kill_one()
                killed.append(time.time())
            return super().result(begun)

    monkeypatch.setattr(engine, "OnRay", Breaking)
    return killed


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a synthetic cell of half a day, in several shards."""
    folder = tmp_path_factory.mktemp("cluster") / "cell"
    write_cell(folder, SyntheticCellConfig(machines=4, days=0.5, shard_hours=3, seed=5))
    return folder


@pytest.fixture(scope="module")
def plain(cell: Path) -> Path:
    """Return the cell's dataset with its features, made in this process."""
    out = cell.parent / "plain"
    ingest(cell, out, IngestConfig(buckets=BUCKETS, workers=1))
    build_features(Dataset.open(out), CONFIG, engine=Engine(workers=1))
    return out


CONFIG = FeatureConfig(sample=SampleConfig(train=1_000, valid=500, test=300))


def test_ingest_and_features_with_a_node_killed_in_the_middle_of_each_have_the_same_bytes(
    cell: Path, plain: Path, dying: list[float], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    dataset = ingest(cell, out, IngestConfig(buckets=BUCKETS, workers=NODES, engine="ray")).dataset
    assert len(dying) == 1
    dying.clear()
    build_features(dataset, CONFIG, engine=RAY)
    assert len(dying) == 1
    assert contents(out) == contents(plain)


@pytest.mark.parametrize(
    ("experiment", "config"),
    [
        (margins, MarginsConfig(estimators=("borg", "limit"), draws=20)),
        (what_if, WhatIfConfig(estimators=("borg",), tune=False)),
    ],
    ids=["margins", "what-if"],
)
def test_a_replay_with_a_node_killed_in_the_middle_has_the_same_results(
    plain: Path, dying: list[float], tmp_path: Path, experiment: Experiment, config: ReplayConfig
) -> None:
    found = {}
    for name, on in (("local", HERE), ("ray", RAY)):
        bundles = by_name([load_model("builtin")])
        report = run_experiment(experiment, plain, tmp_path / name, config, bundles=bundles, tracking=False, engine=on)
        found[name] = report.results
    assert len(dying) == 1
    assert found["ray"] == found["local"]


def test_predictions_with_a_node_killed_in_the_middle_have_the_same_bytes(
    plain: Path, dying: list[float], tmp_path: Path
) -> None:
    files = {name: tmp_path / f"{name}.parquet" for name in ("local", "ray")}
    reports = [predict(plain, files[on.name], model="builtin", every_window=True, engine=on) for on in (HERE, RAY)]
    assert len(dying) == 1
    assert reports[0] == reports[1]
    assert files["ray"].read_bytes() == files["local"].read_bytes()


def _told(job: tuple[Path, int]) -> int:
    """Leave a file of each time that the job runs; the first job is slow."""
    folder, number = job
    (folder / f"{number}-{os.getpid()}-{time.time_ns()}").touch()
    time.sleep(4.0 if number == 0 else 0.2)
    return number


def test_what_was_done_is_not_done_again_and_a_slow_node_holds_back_no_order(
    dying: list[float], tmp_path: Path
) -> None:
    with Workers("ray", NODES) as pool:
        assert list(pool.each(_told, [(tmp_path, number) for number in range(8)])) == list(range(8))
    assert len(dying) == 1
    runs = [int(path.name.split("-")[0]) for path in tmp_path.iterdir()]
    assert set(runs) == set(range(8))
    # what ran on the node that died, or lay there finished and not yet taken, is all that ran again
    assert len(runs) <= 8 + 2 * NODES


@pytest.mark.usefixtures("nodes")
def test_what_the_jobs_of_a_cluster_share_is_sent_once_whatever_their_number() -> None:
    shared = Pickled(5)
    with Workers("ray", NODES) as pool:
        assert [*pool.each(partial(operator.add, shared), range(8))] == [*range(5, 13)]
    assert shared.times == 1


def _full(job: tuple[Callable[[str], None], str]) -> None:
    raise OSError(28, os.strerror(28), job[1])


@pytest.mark.usefixtures("nodes")
def test_an_error_of_a_node_is_raised_as_itself(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.gz", tmp_path / "bad.gz"
    good.write_bytes(gzip.compress(b"abc"))
    bad.write_bytes(gzip.compress(b"abc")[:9])
    with pytest.raises(DamagedFileError, match=r"bad\.gz: truncated"), Workers("ray", NODES) as pool:
        pool.run(check_gzip, [good, bad], lambda _: None)
    with pytest.raises(OSError, match=r"No space left on device: 'x\.npy'") as caught, Workers("ray", NODES) as pool:
        [*pool.each(_full, [(print, "x.npy")])]
    assert caught.value.errno == 28


def _second_fails(number: int) -> int:
    if number == 1:
        raise ValueError(str(number))
    time.sleep(0.0005 * number)
    return number


@pytest.mark.usefixtures("nodes")
def test_a_job_that_fails_while_others_end_does_not_end_the_process() -> None:
    for _ in range(100):  # Ray's own ``cancel`` ended it within thirty
        with pytest.raises(ValueError, match="1"), Workers("ray", NODES) as pool:
            pool.run(_second_fails, range(6), lambda _: None)


@pytest.mark.usefixtures("nodes")
def test_ray_does_not_report_its_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_USAGE_STATS_ENABLED")
    engine.connected_ray(NODES)
    from ray._common.usage.usage_lib import usage_stats_enabled

    assert not usage_stats_enabled()
