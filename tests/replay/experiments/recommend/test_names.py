"""Names of workloads and pods: what a dataset says of them, and the numbers that stand in their place."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pyarrow as pa

from reclaim.data import schema as s
from reclaim.data.dataset import Dataset
from reclaim.replay.experiments.recommend.names import Workload, anonymous, pods_of, run_once, workloads_of


def named(*rows: dict[str, Any]) -> Dataset:
    """Return a dataset of which the names are known, and no more."""
    table = pa.Table.from_pylist(list(rows), schema=s.with_extras("names", [s.CONTAINER_KIND]))
    return cast(Dataset, SimpleNamespace(named=True, table=lambda _: table))


def of_task(collection: int, index: int, **more: Any) -> dict[str, Any]:
    return {s.COLLECTION_ID: collection, s.INSTANCE_INDEX: index, **more}


def test_a_collection_without_the_name_of_a_workload_is_called_by_its_number() -> None:
    dataset = named(of_task(7, 0, **{s.WORKLOAD: "web"}), of_task(9, 0))
    assert [one.name for one in workloads_of(dataset, np.array([7, 9]))] == ["web", "9"]


def test_a_workload_has_the_resources_that_its_autoscaler_holds_and_none_without_one() -> None:
    scaler = {s.AUTOSCALER: "scaler", s.AUTOSCALED: "cpu,memory"}
    found = workloads_of(named(of_task(7, 0, **scaler), of_task(9, 0)), np.array([9, 7]))
    assert [(one.autoscaler, one.autoscaled) for one in found] == [(None, ()), ("scaler", ("cpu", "memory"))]


def test_a_task_without_a_pod_is_called_by_its_index() -> None:
    dataset = named(of_task(7, 3, **{s.POD: "web-a"}), of_task(7, 4))
    assert pods_of(dataset, [(7, 3), (7, 4), (7, 5)]) == ["web-a", "4", "5"]
    assert pods_of(cast(Dataset, SimpleNamespace(named=False)), [(7, 3)]) == ["3"]


def test_a_container_that_ran_as_an_init_container_in_some_pods_alone_does_not_run_once() -> None:
    dataset = named(
        of_task(1, 0, **{s.CONTAINER_KIND: s.INIT}), of_task(1, 1, **{s.CONTAINER_KIND: s.INIT}),
        of_task(2, 0, **{s.CONTAINER_KIND: s.INIT}), of_task(2, 1), of_task(3, 0, **{s.CONTAINER_KIND: s.SIDECAR}),
    )  # fmt: skip
    assert run_once(dataset).tolist() == [1]
    assert [one.sidecar for one in workloads_of(dataset, np.array([1, 2, 3]))] == [False, False, True]


def test_without_names_what_is_alike_stays_alike_and_what_is_not_stays_apart() -> None:
    web = Workload("web", "shop", "Deployment", "app", "east", autoscaler="cpu", autoscaled=("cpu",))
    found = anonymous([
        web,
        Workload("web", "shop", "Deployment", "log", "east", autoscaler="cpu", autoscaled=("cpu",), sidecar=True),
        Workload("web", "shop", "StatefulSet", "app", "east"),
        Workload("web", "shop", "Deployment", "app", "west"),
        Workload("web", "pay", "Deployment", "app", "east", autoscaler="cpu", autoscaled=("memory",)),
    ])  # fmt: skip
    assert found == [
        Workload("workload-1", "namespace-1", "Deployment", "container-1", "cluster-1", "autoscaler-1", ("cpu",)),
        Workload("workload-1", "namespace-1", "Deployment", "container-2", "cluster-1", "autoscaler-1", ("cpu",), True),
        Workload("workload-2", "namespace-1", "StatefulSet", "container-1", "cluster-1"),
        Workload("workload-3", "namespace-1", "Deployment", "container-1", "cluster-2"),
        Workload("workload-4", "namespace-2", "Deployment", "container-1", "cluster-1", "autoscaler-2", ("memory",)),
    ]
