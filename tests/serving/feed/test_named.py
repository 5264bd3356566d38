"""Reservations by name: what a table says of each container besides the service's answer."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import csv

from reclaim.data import schema as s
from reclaim.data.errors import ConfigError
from reclaim.data.traces.history import PIECE_S
from reclaim.data.traces.kubernetes.owners import machine_id
from reclaim.serving.feed import named
from reclaim.serving.feed.metrics import NamedMetrics, text_of
from reclaim.serving.feed.named import SUFFIXES, check_out, nodes_with_names, with_names, write_named
from tests.data.traces.kubernetes.histories import APP, POD, beat, counter, fold, one


def test_a_request_that_was_removed_is_none() -> None:
    """A pod of a set came again under its name without the request that it had; its other one stays."""
    request = {r: APP | {"resource": r} for r in s.RESOURCES}
    series = {
        "cpu": [one(APP, counter(0, PIECE_S, 0.3))],
        "pod": [one(POD, beat(0, PIECE_S))],
        "request": [one(request["cpu"], beat(0, 3600, 0.5)), one(request["memory"], beat(0, PIECE_S, 5e8))],
    }
    tasks = fold(series)[2].seen()
    ((collection, index),) = tasks
    answer: dict[str, Any] = {
        s.COLLECTION_ID: [collection], s.INSTANCE_INDEX: [index], s.TIER: ["prod"], "oom_probability": [0.0],
        s.END_US: [0],
    }  # fmt: skip
    for r in s.RESOURCES:
        answer |= {f"{r}_limit": [1.0], f"{r}_reservation": [0.4], f"{r}_rule": ["model"]}
    (row,) = with_names(pa.table(answer), tasks).to_pylist()
    assert (row["cpu_request"], row["memory_request"]) == (None, 5e8)


def test_a_limit_that_nothing_enforces_is_no_limit_of_the_table_nor_of_the_metrics() -> None:
    """A container has a limit of memory, of which its pod lost the one of CPU, and another one has none."""
    other = {**APP, "pod": "cart-7d9f8b6c5x-other"}
    limit = {r: APP | {"resource": r} for r in s.RESOURCES}
    series = {
        "cpu": [one(APP, counter(0, PIECE_S, 0.3)), one(other, counter(0, PIECE_S, 0.3))],
        "pod": [one(POD, beat(0, PIECE_S)), one({**POD, "pod": other["pod"]}, beat(0, PIECE_S))],
        "limit": [one(limit["cpu"], beat(0, 3600, 0.5)), one(limit["memory"], beat(0, PIECE_S, 5e8))],
    }
    windows, _, made = fold(series)
    tasks = made.seen()
    last = {(row[s.COLLECTION_ID], row[s.INSTANCE_INDEX]): row for row in windows}  # what the service is sent
    answer = pa.Table.from_pylist([
        {s.COLLECTION_ID: key[0], s.INSTANCE_INDEX: key[1], s.TIER: "prod", "oom_probability": 0.0, s.END_US: 0,
         **{f"{r}_limit": row[f"{r}_limit"] for r in s.RESOURCES}, **{f"{r}_reservation": 0.2 for r in s.RESOURCES},
         **{f"{r}_rule": "model" for r in s.RESOURCES}}
        for key, row in last.items()
    ])  # fmt: skip
    table = with_names(answer, tasks)
    first, second = table.to_pylist()
    assert (first["cpu_limit"], first["memory_limit"]) == (None, 5e8)
    assert (first["cpu_assumed_limit"], first["memory_assumed_limit"]) == (1.0, None)
    assert (second["cpu_limit"], second["memory_limit"]) == (None, None)
    assert second["cpu_assumed_limit"] == 1.0
    text = text_of(NamedMetrics(table)).decode().splitlines()
    assert [line.split()[-1] for line in text if line.startswith("reclaim_container_memory_limit_bytes{")] == ["5e+08"]
    assert not [line for line in text if line.startswith("reclaim_container_cpu_limit_cores{")]
    assert len([line for line in text if line.startswith("reclaim_container_cpu_reservation_cores{")]) == 2
    rules = [line for line in text if line.startswith("reclaim_container_memory_reservation_rule{")]
    assert [line.rpartition("rule=")[2] for line in rules] == ['"model"} 1.0'] * 2
    ends = [line for line in text if line.startswith("reclaim_container_window_end_timestamp_seconds{")]
    assert [float(line.split()[-1]) for line in ends] == [0.0] * 2


@pytest.mark.parametrize("cluster", ["", "eu"])
def test_a_node_has_the_limits_and_the_reservation_of_its_containers_together_and_others_are_left_out(
    cluster: str,
) -> None:
    place = f"{cluster}/n1" if cluster else "n1"
    task = SimpleNamespace(key=SimpleNamespace(cluster=cluster), seen_us=5, place_at=lambda _: place)
    nowhere = SimpleNamespace(key=SimpleNamespace(cluster=cluster), seen_us=5, place_at=lambda _: "")
    machines = pa.table({
        s.MACHINE_ID: [1, machine_id(place)], "cpu_limit": [9.0, 4.0], "memory_limit": [9.0, 8e9],
        "cpu_peak_medium": [9.0, 1.5], "memory_peak_medium": [9.0, 2e9], "cpu_peak_baseline": [9.0, 3.0],
        "memory_peak_baseline": [9.0, 3e9],
    })  # fmt: skip
    nodes = nodes_with_names(machines, cast(Any, {(1, 0): task, (2, 0): task, (3, 0): nowhere}), "medium")
    labels = 'cluster="eu",node="n1"' if cluster else 'node="n1"'
    text = text_of(NamedMetrics(nodes=nodes)).decode().splitlines()
    assert [line for line in text if line.startswith("reclaim_node_")] == [
        f"reclaim_node_cpu_reservation_cores{{{labels}}} 1.5",
        f"reclaim_node_cpu_limit_cores{{{labels}}} 4.0",
        f"reclaim_node_memory_reservation_bytes{{{labels}}} 2e+09",
        f"reclaim_node_memory_limit_bytes{{{labels}}} 8e+09",
    ]


def test_nodes_of_one_name_in_two_clusters_are_two_and_a_feed_that_knows_none_has_none() -> None:
    places = {(1, 0): ("eu", "eu/n1"), (2, 0): ("", "n1")}
    tasks: Any = {
        key: SimpleNamespace(key=SimpleNamespace(cluster=cluster), seen_us=5, place_at=lambda _, place=place: place)
        for key, (cluster, place) in places.items()
    }
    machines = pa.table({
        s.MACHINE_ID: [machine_id(place) for _, place in places.values()],
        **{f"{r}_{name}": [1.0, 2.0] for r in s.RESOURCES for name in ("limit", "peak_medium")},
    })  # fmt: skip
    text = text_of(NamedMetrics(nodes=nodes_with_names(machines, tasks, "medium"))).decode().splitlines()
    assert [line for line in text if line.startswith("reclaim_node_cpu_limit_cores{")] == [
        'reclaim_node_cpu_limit_cores{cluster="eu",node="n1"} 1.0',
        'reclaim_node_cpu_limit_cores{cluster="",node="n1"} 2.0',
    ]
    none = nodes_with_names(machines, {}, "medium")
    assert none.num_rows == 0
    assert "reclaim_node_cpu_limit_cores{" not in text_of(NamedMetrics(nodes=none)).decode()
    answer = {name: [1] for name in (s.COLLECTION_ID, s.INSTANCE_INDEX, s.END_US)}
    amounts = {f"{r}_{name}": [1.0] for r in s.RESOURCES for name in ("limit", "reservation")}
    words = {name: ["x"] for name in (s.TIER, *(f"{r}_rule" for r in s.RESOURCES))}
    assert with_names(pa.table({**answer, **amounts, **words, "oom_probability": [0.0]}), {}).num_rows == 0


def test_each_reservation_stands_by_the_names_of_its_container_and_one_of_an_unknown_task_is_left_out() -> None:
    of = [{**APP, "pod": f"cart-{k}"} for k in range(3)]
    series = {
        "cpu": [one(labels | {"node": f"n{k}"}, counter(0, PIECE_S, 0.3)) for k, labels in enumerate(of)],
        "request": [one(labels | {"resource": "cpu"}, beat(0, PIECE_S, 1.0 + k)) for k, labels in enumerate(of)],
    }
    tasks = fold(series)[2].seen()
    numbered = {int(task.key.pod[-1]): key for key, task in tasks.items()}
    answer = pa.Table.from_pylist([
        {s.COLLECTION_ID: key[0], s.INSTANCE_INDEX: key[1], s.TIER: "prod", "oom_probability": k / 10, s.END_US: k,
         **{f"{r}_limit": 9.0 for r in s.RESOURCES}, "cpu_reservation": 10.0 + k, "memory_reservation": 20.0 + k,
         "cpu_rule": f"c{k}", "memory_rule": f"m{k}"}
        for k, key in [*sorted(numbered.items(), reverse=True), (7, (0, 0))]
    ])  # fmt: skip
    table = with_names(answer, tasks)
    assert table.to_pylist() == [
        {
            s.CLUSTER: None, s.NAMESPACE: "shop", s.WORKLOAD_KIND: "StatefulSet", s.WORKLOAD: "cart",
            s.CONTAINER: "app", s.POD: f"cart-{k}", s.MACHINE_NAME: f"n{k}", s.TIER: "prod",
            "cpu_request": 1.0 + k, "cpu_limit": None, "cpu_assumed_limit": 9.0, "cpu_reservation": 10.0 + k,
            "cpu_rule": f"c{k}", "memory_request": None, "memory_limit": None, "memory_assumed_limit": 9.0,
            "memory_reservation": 20.0 + k, "memory_rule": f"m{k}", "oom_probability": k / 10, s.END_US: k,
            s.COLLECTION_ID: numbered[k][0], s.INSTANCE_INDEX: numbered[k][1],
        }
        for k in range(3)
    ]  # fmt: skip
    text = text_of(NamedMetrics(table, until_us=5_000_000, refused={"late": 2})).decode().splitlines()
    values = dict(line.rsplit(" ", 1) for line in text if "cart-1" in line or line.startswith("reclaim_feed"))
    labels = 'container="app",namespace="shop",pod="cart-1"'
    assert {name: float(value) for name, value in values.items()} == {
        "reclaim_feed_until_timestamp_seconds": 5.0, 'reclaim_feed_refused_windows_total{code="late"}': 2.0,
        "reclaim_feed_unwritten_files": 0.0,
        f"reclaim_container_window_end_timestamp_seconds{{{labels}}}": 1e-6,
        f"reclaim_container_cpu_reservation_cores{{{labels}}}": 11.0,
        f"reclaim_container_cpu_request_cores{{{labels}}}": 2.0,
        f'reclaim_container_cpu_reservation_rule{{{labels},rule="c1"}}': 1.0,
        f"reclaim_container_memory_reservation_bytes{{{labels}}}": 21.0,
        f'reclaim_container_memory_reservation_rule{{{labels},rule="m1"}}': 1.0,
    }  # fmt: skip


def test_the_suffix_of_a_file_chooses_its_format_and_its_folder_is_made(tmp_path: Path) -> None:
    table, folder = pa.table({"pod": ["cart-0"], "cpu_reservation": [0.5]}), tmp_path / "new" / "folder"
    as_csv, parquet, prom = (folder / f"reservations{suffix}" for suffix in SUFFIXES)
    for out in (as_csv, parquet):
        check_out(out)
        write_named(NamedMetrics(table), out)
    assert as_csv.read_text() == '"pod","cpu_reservation"\n"cart-0",0.5\n'
    assert pq.read_table(parquet).equals(table)
    metrics = NamedMetrics(until_us=7_000_000)
    write_named(metrics, prom)
    assert prom.read_bytes() == text_of(metrics)
    assert b"reclaim_feed_until_timestamp_seconds 7.0" in prom.read_bytes()


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_file_that_cannot_be_written_whole_stays_as_it_was(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(_: object, partial: Path | None = None) -> None:
        if partial is not None:
            partial.write_bytes(b"half")
        raise OSError("no room")

    out = tmp_path / f"reservations{suffix}"
    out.write_bytes(b"as it was")
    monkeypatch.setattr(pq, "write_table", breaks)
    monkeypatch.setattr(csv, "write_csv", breaks)
    monkeypatch.setattr(named, "text_of", breaks)
    with pytest.raises(OSError, match="no room"):
        write_named(NamedMetrics(pa.table({"pod": ["cart-0"]})), out)
    assert out.read_bytes() == b"as it was"


def test_a_reservation_of_nothing_is_shown_as_zero() -> None:
    names = {name: ["x"] for name in (s.NAMESPACE, s.POD, s.CONTAINER)} | {s.CLUSTER: [None], s.END_US: [5_000_000]}
    amounts: dict[str, list[float | None]] = {f"{r}_reservation": [0.0] for r in s.RESOURCES}
    amounts |= {f"{r}_{what}": [None] for r in s.RESOURCES for what in ("limit", "request")}
    table = pa.table(names | amounts | {f"{r}_rule": ["statistic"] for r in s.RESOURCES})
    text = text_of(NamedMetrics(table)).decode()
    assert 'reclaim_container_cpu_reservation_cores{container="x",namespace="x",pod="x"} 0.0' in text
    assert "reclaim_container_cpu_limit_cores{" not in text


def test_a_file_of_another_suffix_and_a_folder_are_refused_each_by_what_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "out.csv"
    folder.mkdir()
    for out, message in ((folder, "got a folder"), (tmp_path / "out.txt", r"got the suffix '\.txt'")):
        with pytest.raises(ConfigError, match=message):
            check_out(out)


def test_files_of_the_history_that_could_not_be_written_are_counted() -> None:
    metrics = NamedMetrics()
    metrics.unwritten |= {"events", "names"}
    assert "reclaim_feed_unwritten_files 2.0" in text_of(metrics).decode().splitlines()
