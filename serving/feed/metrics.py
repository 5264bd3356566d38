"""Shows the last reservations by name to a Prometheus: as text, or over HTTP."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Final

import pyarrow as pa
from prometheus_client import generate_latest, start_http_server
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from reclaim.data import schema as s
from reclaim.data.core.style import RESOURCE_TITLES
from reclaim.data.errors import ConfigError
from reclaim.data.schema import RESOURCES

_LABELS: Final = {"cluster": s.CLUSTER, "namespace": s.NAMESPACE, "pod": s.POD, "container": s.CONTAINER}
"""Labels of kube-state-metrics, by which its metrics are joined, and the columns that have them."""
_OF_NODES: Final = {"cluster": s.CLUSTER, "node": s.MACHINE_NAME}
"""The same of a node."""
_AMOUNTS: Final = {
    "reservation": "reservation of a container",
    "limit": "limit of a container that is enforced",
    "request": "request of a container",
}
_AMOUNTS_OF_NODES: Final = {
    "reservation": "reservation of all containers of a node together",
    "limit": "sum of the limits of the containers of a node, enforced or assumed",
}
_UNITS: Final = {"cpu": "cores", "memory": "bytes"}
_LOOPBACK: Final = "127.0.0.1"


class NamedMetrics(Collector):
    """Gauges of the tables of ``named``, and how far the feed has come.

    Attributes
    ----------
    table, nodes : pyarrow.Table or None
        Of containers and of nodes; None before the first slot.
    until_us : int
        End of the last slot that the service knows.
    refused : mapping of str to int
        Windows that the service refused, by code.
    unwritten : set of str
        Files of the history that could not be written at the last try.
    """

    def __init__(
        self, table: pa.Table | None = None, until_us: int = 0, refused: Mapping[str, int] = MappingProxyType({}),
        nodes: pa.Table | None = None,
    ) -> None:  # fmt: skip
        self.table, self.until_us, self.refused, self.nodes = table, until_us, refused, nodes
        self.unwritten: set[str] = set()

    def collect(self) -> Iterator[Metric]:
        """Yield the end of the last slot, counts of refused windows, and gauges of containers and nodes."""
        table, nodes, words = self.table, self.nodes, "End of the last slot that the service knows."
        if self.until_us:
            yield GaugeMetricFamily("reclaim_feed_until_timestamp_seconds", words, self.until_us / 1e6)
        counter = CounterMetricFamily(
            "reclaim_feed_refused_windows", "Windows that the service refused, by code.", labels=["code"]
        )
        for code, n in sorted(dict(self.refused).items()):
            counter.add_metric([code], n)
        yield counter
        words = "Files of the history that could not be written at the last try."
        yield GaugeMetricFamily("reclaim_feed_unwritten_files", words, len(self.unwritten))
        if table is not None:
            yield from _of_containers(table)
        if nodes is not None:
            labels, of = _labelled(nodes, _OF_NODES)
            for resource in RESOURCES:
                yield from _gauges(nodes, "node", _AMOUNTS_OF_NODES, resource, labels, of)


def _of_containers(table: pa.Table) -> Iterator[Metric]:
    """Yield the ends of the last windows, the amounts of each resource, and the rules of the reservations."""
    labels, of = _labelled(table, _LABELS)
    words = "End of the last window of a container; its reservation rests on windows up to there."
    ends = GaugeMetricFamily("reclaim_container_window_end_timestamp_seconds", words, labels=labels)
    for values, end_us in zip(of, table[s.END_US].to_pylist(), strict=True):
        if end_us is not None:
            ends.add_metric(values, end_us / 1e6)
    yield ends
    for resource in RESOURCES:
        yield from _gauges(table, "container", _AMOUNTS, resource, labels, of)
        words = f"1 for the rule that made the {RESOURCE_TITLES[resource]} reservation of a container."
        name = f"reclaim_container_{resource}_reservation_rule"
        rules = GaugeMetricFamily(name, words, labels=[*labels, "rule"])
        for values, rule in zip(of, table[f"{resource}_rule"].to_pylist(), strict=True):
            if rule is not None:
                rules.add_metric([*values, rule], 1.0)
        yield rules


def _labelled(table: pa.Table, columns: Mapping[str, str]) -> tuple[list[str], list[tuple[str, ...]]]:
    """Return the labels that any row has, and their values by row, empty for an unknown one; ``columns`` by label."""
    labels = {label: name for label, name in columns.items() if table[name].null_count < len(table)}
    return list(labels), list(zip(*(table[name].fill_null("").to_pylist() for name in labels.values()), strict=True))


def _gauges(
    table: pa.Table, kind: str, amounts: Mapping[str, str], resource: str, labels: list[str], of: list[tuple[str, ...]]
) -> Iterator[Metric]:
    """Yield a gauge of each amount of a resource; ``amounts`` has what it is in words, by the end of its column."""
    unit = _UNITS[resource]
    for what, words in amounts.items():
        described = f"{RESOURCE_TITLES[resource]} {words}, in {unit}."
        gauge = GaugeMetricFamily(f"reclaim_{kind}_{resource}_{what}_{unit}", described, labels=labels)
        for values, amount in zip(of, table[f"{resource}_{what}"].to_pylist(), strict=True):
            if amount is not None:
                gauge.add_metric(values, amount)
        yield gauge


def text_of(metrics: NamedMetrics) -> bytes:
    """Return the metrics as Prometheus reads them."""
    return generate_latest(_registry(metrics))


def address_of(listen: str) -> tuple[str, int]:
    """Return host and port of ``PORT`` or ``HOST:PORT``; a port alone is one of this machine. ConfigError otherwise."""
    host, _, port = listen.rpartition(":")
    if not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ConfigError(f"--listen: expected PORT or HOST:PORT, as 9105 or 0.0.0.0:9105, got {listen!r}")
    return host.strip("[]") or _LOOPBACK, int(port)


@contextmanager
def shown(metrics: NamedMetrics, listen: str | None) -> Iterator[None]:
    """Answer scrapes on an address of ``address_of`` meanwhile; None: no address. ConfigError where it is taken."""
    if listen is None:
        yield
        return
    host, port = address_of(listen)
    try:
        server, thread = start_http_server(port, host, _registry(metrics))
    except OSError as error:
        raise ConfigError(f"--listen {listen}: {error.strerror or error}; name another address") from error
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _registry(metrics: NamedMetrics) -> CollectorRegistry:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(metrics)
    return registry
