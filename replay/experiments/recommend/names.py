"""Names workloads and collects a dataset's facts of them besides their windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from reclaim.data import schema as s
from reclaim.data.dataset import Dataset
from reclaim.replay.experiments.recommend.series import Integers

KUBERNETES: Final = "kubernetes"
"""Trace whose units are cores and bytes, and whose workloads have names."""


@dataclass(frozen=True)
class Workload:
    """A workload under its own name; None for facts that a dataset does not have.

    Attributes
    ----------
    name : str
    namespace, kind, container, cluster : str or None
    autoscaler : str or None
        Horizontal autoscaler that sets its number of tasks.
    autoscaled : tuple of str
        Resources whose share of the request it holds.
    sidecar : bool
        Whether it is an init container that runs next to the others.
    """

    name: str
    namespace: str | None = None
    kind: str | None = None
    container: str | None = None
    cluster: str | None = None
    autoscaler: str | None = None
    autoscaled: tuple[str, ...] = ()
    sidecar: bool = False


def is_kubernetes(dataset: Dataset) -> bool:
    """Return whether a dataset is of Kubernetes: in cores and bytes, with names."""
    return bool(dataset.manifest.get("options", {}).get("trace") == KUBERNETES)


def is_anonymous(dataset: Dataset) -> bool:
    """Return whether a dataset was ingested with numbers for names."""
    return "anonymous" in dataset.manifest.get("options", {})


def workloads_of(dataset: Dataset, ids: Integers) -> list[Workload]:
    """Return the workload of each collection; under its number where the dataset has no names."""
    if not dataset.named:
        return [Workload(str(one)) for one in ids.tolist()]
    every = _names(dataset)
    sidecars = set(every.loc[every[s.CONTAINER_KIND] == s.SIDECAR, s.COLLECTION_ID])
    names = every.drop_duplicates(s.COLLECTION_ID, keep="last")
    found = []
    for one, of in zip(ids.tolist(), names.set_index(s.COLLECTION_ID).reindex(ids).to_dict("records"), strict=True):
        text = {key: value if isinstance(value, str) else None for key, value in of.items()}
        found.append(Workload(
            name=text[s.WORKLOAD] or str(one), namespace=text[s.NAMESPACE], kind=text[s.WORKLOAD_KIND],
            container=text[s.CONTAINER], cluster=text[s.CLUSTER], autoscaler=text[s.AUTOSCALER],
            autoscaled=tuple(filter(None, (text[s.AUTOSCALED] or "").split(","))), sidecar=one in sidecars,
        ))  # fmt: skip
    return found


def run_once(dataset: Dataset) -> Integers:
    """Return the collections of init containers that run once: a pod needs room for them before the others start."""
    if not dataset.named:
        return np.zeros(0, np.int64)
    names = _names(dataset)
    once = (names[s.CONTAINER_KIND] == s.INIT).groupby(names[s.COLLECTION_ID]).all()
    return np.array(once.index[once], np.int64)


def _names(dataset: Dataset) -> Any:
    """Return the table of names; earlier datasets do not have the kind of a container."""
    names = dataset.table("names").to_pandas()
    return names if s.CONTAINER_KIND in names else names.assign(**{s.CONTAINER_KIND: None})


def pods_of(dataset: Dataset, keys: Sequence[tuple[int, int]]) -> list[str]:
    """Return a text for each task, given as collection and index: its pod where the dataset has names."""
    if not dataset.named:
        return [str(index) for _, index in keys]
    table = dataset.table("names").select([*s.TASK_KEY, s.POD]).to_pydict()
    pods = dict(zip(zip(*(table[key] for key in s.TASK_KEY), strict=True), table[s.POD], strict=True))
    return [pods.get(key) or str(key[1]) for key in keys]


def anonymous(workloads: list[Workload]) -> list[Workload]:
    """Return the workloads under numbers, in the order given; equal names get equal numbers."""
    numbers: dict[str, dict[str, int]] = {}

    def number(what: str, name: str) -> str:
        known = numbers.setdefault(what, {})
        return f"{what}-{known.setdefault(name, len(known) + 1)}"

    found = []
    for one in workloads:
        space = None if one.namespace is None else number("namespace", one.namespace)
        name = number("workload", f"{one.cluster}/{one.namespace}/{one.kind}/{one.name}")
        container = None if one.container is None else number("container", one.container)
        cluster = None if one.cluster is None else number("cluster", one.cluster)
        scaler = None if one.autoscaler is None else number("autoscaler", f"{one.namespace}/{one.autoscaler}")
        found.append(Workload(name, space, one.kind, container, cluster, scaler, one.autoscaled, one.sidecar))
    return found
