"""Reads the series of a metric in a range, in parts as small as the server wants them."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Final

from reclaim.data.errors import TraceError
from reclaim.data.fetch.prometheus.client import Client, RefusedError, TooMuchError
from reclaim.data.fetch.prometheus.transports import SAMPLES_AT_ONCE, TRANSPORTS, OtherEncodingError, read_samples
from reclaim.data.traces.dialect import Metric
from reclaim.data.traces.history import RawSeries, joined

Labels = frozenset[tuple[str, str]]
REMOTE_READ: Final = ("chunks", "samples")
_PLACES: Final = (0.98, 0.5, 0.02)
"""Places in a range at which labels are compared."""
SHORTEST_READ_S: Final = 60
"""Seconds that are asked for at once at least, before a server that refuses more is given up."""


def read_series(
    client: Client,
    metric: Metric,
    transport: str,
    start_ms: int,
    end_ms: int,
    *,
    planned: float = 0,
    without: Labels = frozenset(),
) -> list[RawSeries]:
    """Return the series of a metric in a range, in ms; in halves, where the server refuses the whole.

    Parameters
    ----------
    planned : float
        Samples that are expected; more than a request may ask for are asked for in parts of equal length.
    without : frozenset of (name, value)
        Labels that the transport adds, as of ``external_labels``; they are dropped.

    Raises
    ------
    TraceError
        The server refuses even ``SHORTEST_READ_S``, or fails.
    """
    n_parts = min(math.ceil(planned / SAMPLES_AT_ONCE[transport]), (end_ms - start_ms) // (SHORTEST_READ_S * 1000))
    edges = [start_ms + (end_ms - start_ms) * k // max(n_parts, 1) for k in range(max(n_parts, 1) + 1)]
    rows = [row for low, high in pairwise(edges) for row in _read(client, metric, transport, low, high)]
    if without:
        rows = [replace(row, labels=tuple(pair for pair in row.labels if pair not in without)) for row in rows]
    return joined(rows, start_ms, end_ms)


def external_labels(
    client: Client, metric: Metric, transport: str, start_s: int, end_s: int, now_s: float | None = None
) -> Labels:
    """Return the labels that remote read adds to every series and a query does not: those of the server itself.

    They are read off the first of a few minutes of the range that has series, or of the last minute, where ``now_s`` is
    given: a server that lost its data may have no other.
    """
    if transport not in REMOTE_READ:
        return frozenset()
    moments_s = [start_s + share * (end_s - start_s) for share in _PLACES] + ([] if now_s is None else [now_s])
    for moment_s in moments_s:
        past_ms = round(moment_s) * 1000
        rows = _read(client, metric, transport, past_ms - SHORTEST_READ_S * 1000, past_ms)
        if rows:
            plain = _read(client, metric, "query", past_ms - SHORTEST_READ_S * 1000, past_ms)
            known = {name for row in plain for name, _ in row.labels}
            common = frozenset.intersection(*(frozenset(row.labels) for row in rows))
            return frozenset(pair for pair in common if pair[0] not in known) if plain else frozenset()
    return frozenset()


def _read(client: Client, metric: Metric, transport: str, start_ms: int, end_ms: int) -> list[RawSeries]:
    """Return the series of a metric in a range, in ms, in parts of one label set; in halves where that is refused."""
    try:
        try:
            parts = TRANSPORTS[transport](client, metric, start_ms, end_ms)
        except OtherEncodingError:
            parts = read_samples(client, metric, start_ms, end_ms)
    except TooMuchError as error:
        middle = (start_ms + end_ms) // 2
        if middle - start_ms < SHORTEST_READ_S * 1000:
            raise TraceError(
                f"{client.url}: {metric.selector} is too much even for {(end_ms - start_ms) // 1000} s ({error}); "
                "narrow it by --namespace"
            ) from error
        halves = ((start_ms, middle), (middle, end_ms))
        return [row for low, high in halves for row in _read(client, metric, transport, low, high)]
    except RefusedError as error:
        raise TraceError(f"{client.url}: {metric.selector}: {error}") from error
    return parts
