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
_AMOUNTS: Final = ("reservation", "limit", "request")
_NAMED: Final = {"limit": "limit that is enforced"}
_UNITS: Final = {"cpu": "cores", "memory": "bytes"}
_LOOPBACK: Final = "127.0.0.1"


class NamedMetrics(Collector):
    """Gauges of a table of ``named.with_names``, and how far the feed has come.

    Attributes
    ----------
    table : pyarrow.Table or None
        None before the first slot.
    until_us : int
        End of the last slot that the service knows.
    refused : mapping of str to int
        Windows that the service refused, by code.
    """

    def __init__(
        self, table: pa.Table | None = None, until_us: int = 0, refused: Mapping[str, int] = MappingProxyType({})
    ) -> None:
        self.table, self.until_us, self.refused = table, until_us, refused

    def collect(self) -> Iterator[Metric]:
        """Yield the end of the last slot and counts of refused windows, and a gauge per resource and amount."""
        table, words = self.table, "End of the last slot that the service knows."
        if self.until_us:
            yield GaugeMetricFamily("reclaim_feed_until_timestamp_seconds", words, self.until_us / 1e6)
        counter = CounterMetricFamily(
            "reclaim_feed_refused_windows", "Windows that the service refused, by code.", labels=["code"]
        )
        for code, n in sorted(dict(self.refused).items()):
            counter.add_metric([code], n)
        yield counter
        if table is None:
            return
        labels = {label: name for label, name in _LABELS.items() if table[name].null_count == 0}
        of = list(zip(*(table[name].to_pylist() for name in labels.values()), strict=True))
        words = "End of the last window of a container; its reservation rests on windows up to there."
        ends = GaugeMetricFamily("reclaim_container_window_end_timestamp_seconds", words, labels=list(labels))
        for values, end_us in zip(of, table[s.END_US].to_pylist(), strict=True):
            if end_us is not None:
                ends.add_metric(values, end_us / 1e6)
        yield ends
        for resource in RESOURCES:
            for what in _AMOUNTS:
                unit = _UNITS[resource]
                words = f"{RESOURCE_TITLES[resource]} {_NAMED.get(what, what)} of a container, in {unit}."
                gauge = GaugeMetricFamily(f"reclaim_container_{resource}_{what}_{unit}", words, labels=list(labels))
                for values, amount in zip(of, table[f"{resource}_{what}"].to_pylist(), strict=True):
                    if amount is not None:
                        gauge.add_metric(values, amount)
                yield gauge
            words = f"1 for the rule that made the {RESOURCE_TITLES[resource]} reservation of a container."
            name = f"reclaim_container_{resource}_reservation_rule"
            rules = GaugeMetricFamily(name, words, labels=[*labels, "rule"])
            for values, rule in zip(of, table[f"{resource}_rule"].to_pylist(), strict=True):
                if rule is not None:
                    rules.add_metric([*values, rule], 1.0)
            yield rules


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
