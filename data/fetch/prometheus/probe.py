"""Finds out what a Prometheus has and how best to read it, before anything is fetched."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from reclaim.data.errors import ConfigError, TraceError
from reclaim.data.fetch.prometheus.client import Client, RefusedError, TooMuchError
from reclaim.data.fetch.prometheus.reading import read_series
from reclaim.data.fetch.prometheus.transports import (
    HEADERS,
    STREAM_TYPE,
    TRANSPORTS,
    WHOLE,
    OtherEncodingError,
    remote_read_request,
)
from reclaim.data.traces.dialect import USAGE, Metric
from reclaim.data.traces.history import PIECE_S

log = logging.getLogger(__name__)

AUTO: Final = "auto"
LARGEST_PIECE: Final = 1 << 30
"""Bytes of memory of a piece's samples: 60 million, two hours of 130,000 containers at 30 s."""
_NAMED: Final = 5
"""Clusters that a message names."""
T = TypeVar("T")
_INSTANTS: Final = (0.98, 0.5, 0.02)
"""Places in the range at which series are counted: all of them for usage, the first with a series for the rest."""
_LOOKED_S: Final = 600
"""Seconds of samples that are counted at each of them."""
_TIMED_S: Final = (600, 600, 3600)
"""Seconds of samples that are read to estimate the time of a fetch. The first time, decoders are compiled. Lengths are
two, for a short read is mostly for each series: ten minutes of 2,000 containers took half as long as two hours."""
_STORED_BYTES: Final = 4.0
"""Bytes of a sample in a piece, as measured on a synthetic history (docs/kubernetes.md): for planning only."""
_HELD_BYTES: Final = 16
"""Bytes of a sample in memory: a time of 8 and a value of 8, as ``RawSeries`` holds them."""


@dataclass(frozen=True)
class Found:
    """Series of a role: how many there were at most at an instant, and samples in all, an estimate."""

    metric: Metric
    series: int
    samples: int


@dataclass(frozen=True)
class Plan:
    """Series that will be fetched, and an estimate of what they take.

    Attributes
    ----------
    server : str
        Name and version that the server reports.
    transport : str
        One of ``TRANSPORTS``.
    found : tuple of Found
        One for each role that the server has.
    missing : tuple of Metric
        Those it has not.
    pieces, samples, n_bytes : int
        Pieces of two hours, samples, bytes on disk.
    seconds : float
        Time it takes, from timed reads.
    """

    server: str
    transport: str
    found: tuple[Found, ...]
    missing: tuple[Metric, ...]
    pieces: int
    samples: int
    n_bytes: int
    seconds: float


def plan(
    client: Client, metrics: Sequence[Metric], start_s: int, end_s: int, transport: str, clusters: Sequence[str] = ()
) -> Plan:
    """Return what a server has of the metrics in a range, and how it will be read.

    Parameters
    ----------
    clusters : sequence of str
        Labels that may have one value at a time: pods of the same name in two clusters would be added up.

    Raises
    ------
    ConfigError
        The server does not speak Prometheus' API, the transport asked for is not there, it has several clusters, or
        a piece is more than memory is for.
    TraceError
        It has nothing of a metric that is needed.
    """
    server = _server(client)
    found, missing = [], []
    for metric in metrics:
        counted = _count(client, metric, start_s, end_s)
        if counted is None:
            missing.append(metric)
        else:
            found.append(counted)
    if absent := [metric for metric in missing if metric.needed]:
        raise TraceError(
            f"{client.url}: no series of {' and of '.join(metric.selector for metric in absent)} in the range; check "
            "--days, --end, --namespace and --cluster, or name the metrics in a --dialect of your own"
        )
    first = found[0].metric
    _check_one_cluster(client, first, start_s, end_s, clusters)
    chosen = choose(client, first, start_s, end_s, transport)
    samples = sum(one.samples for one in found)
    pieces = (end_s - start_s) // PIECE_S
    if samples / pieces > LARGEST_PIECE / _HELD_BYTES:
        raise ConfigError(too_large(client.url, f"about {samples / pieces:,.0f} samples"))
    return Plan(
        server=server,
        transport=chosen,
        found=tuple(found),
        missing=tuple(missing),
        pieces=pieces,
        samples=samples,
        n_bytes=round(samples * _STORED_BYTES),
        seconds=samples * _seconds_of_sample(client, first, chosen, end_s, found[0].samples / (end_s - start_s)),
    )


def _seconds_of_sample(client: Client, metric: Metric, transport: str, end_s: int, rate: float) -> float:
    """Return the time that a sample of a metric takes in a piece, on a straight line through reads of ``_TIMED_S``.

    ``rate`` is the number of samples of the metric to expect in a second of the range, which also stands in where the
    range ends without any.
    """
    took_s, read = [], 0
    for looked_s in _TIMED_S:
        begun, start_s = time.perf_counter(), end_s - looked_s
        found = read_series(client, metric, transport, start_s * 1000, end_s * 1000, planned=rate * looked_s)
        took_s.append(time.perf_counter() - begun)
        read = sum(len(series.value) for series in found)
    _, short_s, long_s = took_s
    piece_s = long_s + max(long_s - short_s, 0.0) * (PIECE_S - _TIMED_S[2]) / (_TIMED_S[2] - _TIMED_S[1])
    return piece_s / ((read or max(rate * _TIMED_S[2], 1)) * PIECE_S / _TIMED_S[2])


def choose(client: Client, metric: Metric, start_s: int, end_s: int, transport: str) -> str:
    """Return the transport to use: the one asked for if the server has it, else the lightest that it has."""
    names = [transport] if transport != AUTO else list(TRANSPORTS)
    # the answer holds only a moment of samples
    moment_ms = (start_s + end_s) // 2 * 1000
    for name in names:
        problem = _problem(client, name, metric, moment_ms)
        if problem is None:
            return name
    if isinstance(problem, TooMuchError):
        raise TraceError(_unanswered(client, problem)) from problem
    if isinstance(problem, TraceError) or (isinstance(problem, ConfigError) and transport == AUTO):
        raise problem  # of the last transport, a query, which every server answers that is up and admits us
    if transport != AUTO:
        raise ConfigError(f"{client.url}: has no --transport {transport} ({problem}); leave it out") from problem
    tried = f"tried {', '.join(names)}, the last: {problem}"
    raise ConfigError(f"{client.url}: knows no way to read raw samples ({tried}); check --url") from problem


def _unanswered(client: Client, problem: TooMuchError) -> str:
    return f"{client.url}: does not answer the smallest query ({problem}); run again later"


def _problem(client: Client, name: str, metric: Metric, moment_ms: int) -> Exception | None:
    """Return why a transport cannot be used; None where it can."""
    try:
        if name == "chunks":  # a server without streams answers with samples
            body = remote_read_request(metric, moment_ms, moment_ms + 1000, streamed=True)
            with client.stream("POST", "/api/v1/read", content=body, headers=HEADERS) as parts:
                for _ in parts:
                    pass
            streamed = client.content_type.startswith(STREAM_TYPE)
            return None if streamed else RefusedError(200, f"answers {client.said(client.content_type)}, no stream")
        TRANSPORTS[name](client, metric, moment_ms, moment_ms + 1000)
    except (RefusedError, TooMuchError, OtherEncodingError, TraceError, ConfigError) as error:
        log.info("%s: not read as %s: %s", client.url, name, error)
        return error  # a gateway may also forbid a path; a query has shown that it admits us
    return None


def _server(client: Client) -> str:
    """Return the name and version that a server reports; ConfigError where it does not answer queries."""
    try:
        client.json("/api/v1/query", {"query": "vector(1)"})
    except RefusedError as error:
        raise ConfigError(f"{client.url}: no Prometheus API there ({error}); check --url, and its path") from error
    except TooMuchError as error:
        raise TraceError(_unanswered(client, error)) from error
    try:
        info = client.json("/api/v1/status/buildinfo")
    except (RefusedError, TooMuchError, ConfigError):
        return "unknown"  # a gateway may forbid the path
    return client.said(f"version {info['version']}") if isinstance(info, dict) and info.get("version") else "unknown"


def _count(client: Client, metric: Metric, start_s: int, end_s: int) -> Found | None:
    """Return series and samples of a metric, from a few instants; None where there are none."""
    series, samples = [], []
    for share in _INSTANTS:
        at = str(round(start_s + share * (end_s - start_s)))
        looked = f"count_over_time({metric.selector}[{_LOOKED_S}s])"
        series.append(_scalar(client, f"count({looked})", at))
        samples.append(_scalar(client, f"sum({looked})", at) if series[-1] else 0.0)
        if series[-1] and metric.role not in USAGE:
            series, samples = series[-1:], samples[-1:]
            break
    if not any(series):
        return None
    mean = sum(samples) / len(samples)
    return Found(metric, round(max(series)), round(mean / _LOOKED_S * (end_s - start_s)))


def _scalar(client: Client, query: str, at: str) -> float:
    return _vector(client, query, at, lambda result: float(result[0]["value"][1]) if result else 0.0)


def _vector(client: Client, query: str, at: str, decode: Callable[[list[Any]], T]) -> T:
    """Return the decoded result of an instant query."""
    try:
        data: Any = client.json("/api/v1/query", {"query": query, "time": at, **WHOLE})
        return decode(data["result"])
    except TooMuchError as error:
        raise TraceError(f"{client.url}: cannot count {query} ({error}); narrow it by --namespace") from error
    except (RefusedError, KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise TraceError(f"{client.url}: cannot count {query} ({client.said(str(error))})") from error


def _check_one_cluster(client: Client, metric: Metric, start_s: int, end_s: int, labels: Sequence[str]) -> None:
    """Raise ConfigError where a label that tells clusters apart has several values at one time."""
    if not labels:
        return
    query = f"count by ({', '.join(labels)}) (count_over_time({metric.selector}[{_LOOKED_S}s]))"
    for share in _INSTANTS:
        at = str(round(start_s + share * (end_s - start_s)))
        groups = _vector(client, query, at, lambda result: [dict(one["metric"]) for one in result])
        for label in labels:
            values = sorted({str(of.get(label, "")) for of in groups})
            if len(values) > 1:
                named = ", ".join(value or "(none)" for value in values[:_NAMED]) + ", …" * (len(values) > _NAMED)
                raise ConfigError(
                    f"{client.url}: {len(values)} clusters by the label {label} ({named}); pods of one name would be "
                    f"added up. Choose one by --cluster {label}={values[-1]}, or keep them apart by `cluster = "
                    f'"{label}"` in a --dialect'
                )


def too_large(url: str, what: str) -> str:
    """Return the message about a piece that is more than memory is for."""
    return (
        f"{url}: two hours of the history are {what}, more than the {LARGEST_PIECE >> 20} MiB that are held at once; "
        "fetch it by --namespace, or --cluster, in several folders"
    )
