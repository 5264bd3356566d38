"""A synthetic history in a real Prometheus and a real VictoriaMetrics: fetched in every way, interrupted, ingested."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from reclaim.data import schema as s
from reclaim.data.dataset import Dataset
from reclaim.data.errors import ConfigError, TraceError
from reclaim.data.fetch.prometheus import job, transports
from reclaim.data.fetch.prometheus.client import Access
from reclaim.data.fetch.prometheus.job import HistoryConfig, fetch_history
from reclaim.data.fetch.prometheus.transports import TRANSPORTS
from reclaim.data.ingest.job import IngestConfig, ingest
from reclaim.data.synthetic.kubernetes.job import TRUE_ENDS, TRUE_WINDOWS, SyntheticHistoryConfig, write_history
from reclaim.data.traces.history import piece_path, write_piece
from tests.data.fetch.prometheus.servers import backfilled, needs, prometheus, victoria_metrics

DAYS = 0.5
CONFIG = HistoryConfig(Access("http://127.0.0.1:1"), days=DAYS, end="2026-11-02")


@pytest.fixture(scope="module")
def made_up(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with half a day of a synthetic cluster."""
    needs("prometheus", "promtool")
    out = tmp_path_factory.mktemp("made-up") / "cluster"
    write_history(out, SyntheticHistoryConfig(machines=2, days=DAYS, seed=9, tasks_per_machine=8))
    return out


@pytest.fixture(scope="module")
def blocks(made_up: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return its blocks."""
    return backfilled(tmp_path_factory.mktemp("blocks"), made_up.glob("*.om"))


@pytest.fixture(scope="module")
def server(blocks: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Access]:
    """Run a Prometheus that has it."""
    with prometheus(tmp_path_factory.mktemp("prometheus"), blocks) as url:
        yield Access(url)


@pytest.fixture(scope="module")
def history(server: Access, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fetch it."""
    out = tmp_path_factory.mktemp("history") / "history"
    report = fetch_history(replace(CONFIG, access=server), out)
    assert report.transport == "chunks"
    assert report.fetched == report.pieces == 6
    return out


@pytest.fixture(scope="module")
def dataset(history: Path, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Ingest it."""
    return ingest(history, tmp_path_factory.mktemp("dataset") / "dataset", IngestConfig(trace="kubernetes")).dataset


def pieces(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((folder / "samples").iterdir())}


@pytest.mark.parametrize("transport", ["samples", "query"])
def test_every_way_of_reading_gives_the_same_bytes(
    transport: str, server: Access, history: Path, tmp_path: Path
) -> None:
    fetch_history(replace(CONFIG, access=server, transport=transport), tmp_path / transport)
    assert pieces(tmp_path / transport) == pieces(history)


@pytest.mark.parametrize("transport", ["chunks", "samples", "query"])
def test_labels_of_the_server_itself_are_in_no_series(
    transport: str, blocks: Path, history: Path, tmp_path: Path
) -> None:
    """Remote read adds them, a query does not; Debian's configuration has one."""
    with prometheus(tmp_path / "server", blocks, labels={"monitor": "example", "cluster": "eu-1"}) as url:
        fetch_history(replace(CONFIG, access=Access(url), transport=transport), tmp_path / "out")
        (tmp_path / "out" / "samples" / "2026-11-01T22.parquet").unlink()
        fetch_history(replace(CONFIG, access=Access(url), transport="query"), tmp_path / "out")  # goes on another way
    assert pieces(tmp_path / "out") == pieces(history)


@pytest.mark.parametrize("transport", ["auto", "query"])
def test_victoriametrics_gives_the_same_bytes_as_prometheus(
    transport: str, made_up: Path, history: Path, tmp_path: Path
) -> None:
    needs("victoria-metrics")
    with victoria_metrics(tmp_path / "server", made_up.glob("*.om")) as url:
        report = fetch_history(replace(CONFIG, access=Access(url), transport=transport), tmp_path / "out")
    assert report.transport == ("export" if transport == "auto" else transport)
    assert pieces(tmp_path / "out") == pieces(history)


def test_a_fetch_that_is_killed_goes_on_and_ends_with_the_same_bytes(
    server: Access, history: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []

    def killed(path: Path, series: object) -> int:
        written.append(path)
        if len(written) == 3:
            path.with_name(path.name + ".partial").write_bytes(b"half a piece")
            raise KeyboardInterrupt
        return write_piece(path, series)  # type: ignore[arg-type]

    monkeypatch.setattr(job, "write_piece", killed)
    monkeypatch.setattr(job, "PIECES_AT_ONCE", 2)
    with pytest.raises(KeyboardInterrupt):
        fetch_history(replace(CONFIG, access=server), tmp_path / "out")
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="4 of 6 pieces are missing"):
        ingest(tmp_path / "out", tmp_path / "dataset", IngestConfig(trace="kubernetes"))
    report = fetch_history(replace(CONFIG, access=server), tmp_path / "out")
    assert (report.fetched, report.pieces) == (4, 6)
    assert pieces(tmp_path / "out") == pieces(history)
    assert fetch_history(replace(CONFIG, access=server), tmp_path / "out").fetched == 0
    with pytest.raises(ConfigError, match="other --namespace"):
        fetch_history(replace(CONFIG, access=server, namespace="shop"), tmp_path / "out")


def test_a_server_that_refuses_as_much_is_asked_for_less(blocks: Path, history: Path, tmp_path: Path) -> None:
    options = ("--storage.remote.read-sample-limit=9000", "--query.max-samples=9000")
    with prometheus(tmp_path / "server", blocks, *options) as url:
        for transport in ("samples", "query"):
            fetch_history(replace(CONFIG, access=Access(url), transport=transport), tmp_path / transport)
            assert pieces(tmp_path / transport) == pieces(history)
    with prometheus(tmp_path / "other", blocks, "--storage.remote.read-sample-limit=5") as url:
        refused = replace(CONFIG, access=Access(url), transport="samples")
        with pytest.raises((TraceError, ConfigError), match=r"narrow it by --namespace|no --transport"):
            fetch_history(refused, tmp_path / "refused")


@pytest.mark.parametrize("transport", ["chunks", "samples", "query"])
def test_bounds_of_memory_change_no_byte(
    transport: str, server: Access, history: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests are cut by plan, answers by their size, groups of pieces by what they hold."""
    with monkeypatch.context() as by_plan:
        by_plan.setitem(transports.SAMPLES_AT_ONCE, transport, 3000)
        planned = fetch_history(replace(CONFIG, access=server, transport=transport), tmp_path / "plan")
    with monkeypatch.context() as by_size:
        by_size.setattr(transports, "MOST_HELD", 300_000)
        by_size.setattr(job, "LARGEST_PIECE", 3_000_000)
        sized = fetch_history(replace(CONFIG, access=server, transport=transport), tmp_path / "size")
    free = fetch_history(replace(CONFIG, access=server, transport=transport), tmp_path / "free")
    assert pieces(tmp_path / "plan") == pieces(tmp_path / "size") == pieces(tmp_path / "free") == pieces(history)
    assert min(planned.requests, sized.requests) > free.requests
    monkeypatch.setattr(job, "LARGEST_PIECE", 100_000)
    with pytest.raises(ConfigError, match="two hours of the history are more samples than planned"):
        fetch_history(replace(CONFIG, access=server, transport=transport), tmp_path / "none")


def test_a_probe_says_what_there_is_and_writes_nothing(server: Access, tmp_path: Path) -> None:
    report = fetch_history(replace(CONFIG, access=server, probe=True), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert report.plan is not None
    assert report.plan.transport == "chunks"
    assert {one.metric.role for one in report.plan.found} >= {"cpu", "memory", "pod", "owner", "restarts", "request"}
    assert "container_memory_cache" in report.missing
    with pytest.raises(TraceError, match=r"no series of container_cpu_usage_seconds_total.*--namespace"):
        fetch_history(replace(CONFIG, access=server, probe=True, namespace="nowhere"), tmp_path / "out")
    with pytest.raises(ConfigError, match="no --transport export"):
        fetch_history(replace(CONFIG, access=server, transport="export"), tmp_path / "out")


def test_only_the_namespaces_asked_for_are_fetched(server: Access, tmp_path: Path) -> None:
    out = tmp_path / "out"
    fetch_history(replace(CONFIG, access=server, namespace="shop|pay", days=0.1), out)
    names = ingest(out, tmp_path / "dataset", IngestConfig(trace="kubernetes")).dataset.table("names")
    assert set(names[s.NAMESPACE].to_pylist()) == {"shop", "pay"}


def test_windows_are_the_true_ones(dataset: Dataset, made_up: Path) -> None:
    truth = pq.read_table(made_up / TRUE_WINDOWS).to_pandas()
    usage = dataset.read("usage").to_pandas().merge(dataset.table("names").to_pandas(), on=list(s.TASK_KEY))
    usage["slot"] = (usage[s.END_US] - 1) // 300_000_000
    names = {"namespace": s.NAMESPACE, "pod": s.POD, "container": s.CONTAINER}
    both = truth.rename(columns=names).merge(usage, on=[*names.values(), "slot"], how="outer", indicator=True)
    assert (both["_merge"] == "both").all()
    assert len(both) > 1500
    for name in (s.CPU_MEAN, s.CPU_MAX, s.MEMORY_MEAN, s.MEMORY_MAX):
        assert both[f"{name}_y"].to_numpy() == pytest.approx(both[f"{name}_x"].to_numpy(), rel=1e-9, abs=1e-9), name
    p90 = np.array([np.nan if vector is None else vector[9] for vector in both[s.CPU_PERCENTILES]])
    assert p90 == pytest.approx(both["cpu_p90"].to_numpy().astype(np.float32), nan_ok=True)


def test_recorded_kills_are_the_true_ones(dataset: Dataset, made_up: Path) -> None:
    truth = pq.read_table(made_up / TRUE_ENDS).to_pandas()
    events = dataset.read("events").to_pandas().merge(dataset.table("names").to_pandas(), on=list(s.TASK_KEY))
    fails = events[events[s.EVENT_TYPE] == s.EventType.FAIL]
    found = sorted(zip(fails[s.POD], fails[s.TIME_US] / 1e6, fails[s.EVENT_DETAIL], strict=True))
    expected = sorted(zip(truth["pod"], truth["time_s"].round(), truth["reason"], strict=True))
    assert "OOMKilled" in set(truth["reason"])
    assert found == expected
    assert (fails[s.OUT_OF_MEMORY] == (fails[s.EVENT_DETAIL] == "OOMKilled")).all()


def test_the_dataset_holds_owners_requests_and_limits(dataset: Dataset) -> None:
    assert dataset.manifest["nature"] == "synthetic"
    names = dataset.table("names").to_pandas()
    usage = dataset.read("usage").to_pandas().merge(names, on=list(s.TASK_KEY))

    def of(workload: str, container: str) -> pd.DataFrame:
        return pd.DataFrame(usage[(usage[s.WORKLOAD] == workload) & (usage[s.CONTAINER] == container)])

    kinds = dict(zip(names[s.WORKLOAD], names[s.WORKLOAD_KIND], strict=True))
    assert kinds == {"cart": "Deployment", "search": "Deployment", "thumbnails": "Deployment", "ledger": "StatefulSet",
                     "gateway": "Deployment", "agent": "DaemonSet", "report": "CronJob", "scratch": "Deployment",
                     "debug": "Pod"}  # fmt: skip
    assert set(names.loc[names[s.WORKLOAD] == "search", s.AUTOSCALER]) == {"search"}
    assert names.loc[names[s.WORKLOAD] != "search", s.AUTOSCALER].isna().all()
    assert set(of("cart", "app")[s.CPU_LIMIT]) == {2.0}  # enforced
    assert set(of("cart", "app")[s.CPU_REQUEST]) == {1.0}
    ledger = of("ledger", "postgres")
    assert set(ledger[s.INSTANCE_INDEX]) == set(range(len(set(ledger[s.INSTANCE_INDEX]))))
    assert set(of("agent", "agent")[s.TIER]) == {s.TIERS.index("mon")}
    assert set(of("scratch", "app")[s.TIER]) == {s.TIERS.index("free")}
    unlimited = of("search", "app")
    assert unlimited[s.CPU_ENFORCED].isna().all()
    assert (np.log2(unlimited[s.CPU_LIMIT]) % 1 == 0).all()
    assert (unlimited[s.CPU_LIMIT] >= np.minimum(2 * unlimited[s.CPU_MAX], 16)).all()
    assert (unlimited[s.CPU_LIMIT] >= unlimited[s.CPU_REQUEST]).all()
    assert (usage[s.SCHEDULED_US] < usage[s.END_US]).all()
    assert set(dataset.table("machines")[s.MACHINE_NAME].to_pylist()) == {"node-0", "node-1"}


def test_the_ways_of_reading_are_tried_the_lightest_first() -> None:
    assert list(TRANSPORTS) == ["chunks", "samples", "export", "query"]
    assert piece_path(Path("h"), 1_793_520_000).name == "2026-11-01T08.parquet"
