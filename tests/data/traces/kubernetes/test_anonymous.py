"""A dataset without names: no text or id of the cluster is in it, and all else is as it was."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from reclaim.data import schema as s
from reclaim.data.dataset import Dataset
from reclaim.data.errors import ConfigError
from reclaim.data.ingest.job import IngestConfig, ingest
from reclaim.data.traces.kubernetes.anonymous import _names, _Numbers
from tests.data.traces.kubernetes.histories import beat, counter, one, write_history

SECRETS = ("shop", "acme", "cart", "node-x", "proxy", "billing")
IDS = [*s.TASK_KEY, s.MACHINE_ID]


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a history of three pods of two owners, one of a kind of the company's own."""
    pods = [
        ({"namespace": "shop", "pod": "cart-7d9f8b6c5x-abcde"}, "ReplicaSet", "cart-7d9f8b6c5x", 0.3),
        ({"namespace": "shop", "pod": "cart-7d9f8b6c5x-fghij"}, "ReplicaSet", "cart-7d9f8b6c5x", 0.4),
        ({"namespace": "billing", "pod": "acme-db-0"}, "AcmeDatabase", "acme-db", 0.5),
    ]
    usage, owner, info = [], [], []
    for k, (pod, kind, name, cores) in enumerate(pods):
        for container in ("app", "proxy"):
            labels = pod | {"container": container, "node": f"node-x{k % 2}"}
            usage.append(one(labels, counter(0, 7200, cores)))
        owner.append(one(pod | {"owner_kind": kind, "owner_name": name}, beat(0, 7200)))
        info.append(one(pod | {"node": f"node-x{k % 2}"}, beat(0, 7200)))
    series = {"cpu": usage, "owner": owner, "pod": info}
    return write_history(tmp_path_factory.mktemp("anonymous") / "history", series)


def made(history: Path, out: Path, *, anonymise: bool) -> Dataset:
    return ingest(history, out, IngestConfig(trace="kubernetes", buckets=2, anonymise=anonymise)).dataset


def test_no_name_and_no_id_of_one_is_left(history: Path, tmp_path: Path) -> None:
    named, numbered = (made(history, tmp_path / str(how), anonymise=how) for how in (False, True))
    files = [path for path in (tmp_path / "True").rglob("*") if path.is_file()]
    texts = [str(pq.read_table(path).to_pydict()) if path.suffix == ".parquet" else path.read_text() for path in files]
    assert [word for word in SECRETS if any(word in text for text in texts)] == []
    assert [word for word in SECRETS if word not in str(named.table("names").to_pylist())] == []
    for table in ("usage", "events"):
        before, after = (one.read(table).to_pandas() for one in (named, numbered))
        for name in IDS:
            known = {*before[name].dropna()} - {s.UNKNOWN_ID}
            assert known.isdisjoint(after[name]), (table, name)
            assert {*after[name].dropna()} <= {s.UNKNOWN_ID, *range(len(known) + 1)}


def test_what_is_alike_stays_alike_and_usage_is_as_it_was(history: Path, tmp_path: Path) -> None:
    named, numbered = (made(history, tmp_path / str(how), anonymise=how) for how in (False, True))
    both = []
    for dataset in (named, numbered):
        rows = dataset.read("usage").to_pandas().drop(columns=[s.CPU_PERCENTILES, s.CPU_TAIL_PERCENTILES])
        names = dataset.table("names").to_pandas().drop(columns=[s.AUTOSCALED])
        rows = rows.merge(names, on=list(s.TASK_KEY))
        order = [s.CPU_MEAN, s.START_US, s.CONTAINER]
        both.append(rows.sort_values(order).reset_index(drop=True))
    before, after = both
    texts = [s.NAMESPACE, s.WORKLOAD, s.CONTAINER, s.POD, s.MACHINE_NAME]
    pd.testing.assert_frame_equal(
        before.drop(columns=[*IDS, *texts, s.WORKLOAD_KIND]), after.drop(columns=[*IDS, *texts, s.WORKLOAD_KIND])
    )
    for column in (*texts, s.MACHINE_ID, s.COLLECTION_ID):
        pairs = set(zip(before[column].astype(str), after[column].astype(str), strict=True))
        assert len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs}), column
    assert set(after[s.WORKLOAD_KIND]) == {"Deployment", "kind-1"}
    assert np.unique(after[s.COLLECTION_ID]).tolist() == [1, 2, 3, 4]
    for _, tasks in after.groupby(s.COLLECTION_ID):
        assert np.unique(tasks[s.INSTANCE_INDEX]).tolist() == list(range(tasks[s.POD].nunique()))
    assert numbered.manifest["options"]["anonymous"] == "yes"
    again = ingest(history, tmp_path / "True", IngestConfig(trace="kubernetes", buckets=2, anonymise=True))
    assert again.already_there


def test_names_that_stand_in_two_places_are_two_names(tmp_path: Path) -> None:
    numbers = _Numbers(tmp_path)

    def named(cluster: str | None, space: str, kind: str) -> list[str | None]:
        row: dict[str, str | None] = {s.CLUSTER: cluster, s.NAMESPACE: space, s.WORKLOAD_KIND: kind}
        row |= dict.fromkeys((s.WORKLOAD, s.CONTAINER, s.POD, s.AUTOSCALER, s.MACHINE_NAME), "x")
        _names(row, numbers.of_text)
        return list(row.values())

    first = ["cluster-1", "namespace-1", "Job", "workload-1", "container-1", "pod-1", "autoscaler-1", "machine-1"]
    assert named("a", "shop", "Job") == first == named("a", "shop", "Job")
    assert named("a", "shop", "Pod")[2:5] == ["Pod", "workload-2", "container-1"]
    assert named("a", "pay", "Job")[1:7] == [
        "namespace-2", "Job", "workload-3", "container-1", "pod-2", "autoscaler-2",
    ]  # fmt: skip
    assert named("b", "shop", "Job")[:7] == [
        "cluster-2", "namespace-3", "Job", "workload-4", "container-1", "pod-3", "autoscaler-3",
    ]  # fmt: skip
    assert named(None, "shop", "Acme")[:4] == [None, "namespace-4", "kind-1", "workload-5"]


def test_ids_are_counted_from_one_and_indexes_in_each_collection_from_zero_and_what_is_unknown_stays(
    tmp_path: Path,
) -> None:
    ids = {s.COLLECTION_ID: [70, 70, 90, 90], s.INSTANCE_INDEX: [5, 8, 8, 2], s.MACHINE_ID: [44, None, 33, None]}
    usage = pa.table({name: pa.array(values, pa.int64()) for name, values in ids.items()})
    pq.write_table(usage, tmp_path / "usage-0.parquet")
    pq.write_table(pa.table({s.COLLECTION_ID: [70, 80, 90]}), tmp_path / "collections-0.parquet")
    numbers = _Numbers(tmp_path)
    assert numbers.ids_replaced(usage).to_pydict() == {
        s.COLLECTION_ID: [1, 1, 3, 3], s.INSTANCE_INDEX: [0, 1, 1, 0], s.MACHINE_ID: [2, None, 1, None],
    }  # fmt: skip


def test_only_a_kubernetes_history_has_names_to_replace() -> None:
    with pytest.raises(ConfigError, match="--anonymise is for trace 'kubernetes'"):
        IngestConfig(trace="google-v3", anonymise=True)
