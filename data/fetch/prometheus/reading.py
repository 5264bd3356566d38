"""Reads the series of a metric in a range, in parts as small as the server wants them."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Final

from reclaim.data.errors import TraceError
from reclaim.data.fetch.prometheus.client import Client, RefusedError, TooMuchError
from reclaim.data.fetch.prometheus.transports import SAMPLES_AT_ONCE, TRANSPORTS, OtherEncodingError, read_samples
from reclaim.data.traces.dialect import Metric
from reclaim.data.traces.history import RawSeries, joined

SHORTEST_READ_S: Final = 60
"""Seconds that are asked for at once at least, before a server that refuses more is given up."""


def read_series(
    client: Client, metric: Metric, transport: str, start_ms: int, end_ms: int, *, planned: float = 0
) -> list[RawSeries]:
    """Return the series of a metric in a range, in ms; in halves, where the server refuses the whole.

    Parameters
    ----------
    planned : float
        Samples that are expected; more than a request may ask for are asked for in parts of equal length.

    Raises
    ------
    TraceError
        The server refuses even ``SHORTEST_READ_S``, or fails.
    """
    n_parts = min(math.ceil(planned / SAMPLES_AT_ONCE[transport]), (end_ms - start_ms) // (SHORTEST_READ_S * 1000))
    if n_parts > 1:
        edges = [start_ms + (end_ms - start_ms) * k // n_parts for k in range(n_parts + 1)]
        ranges = pairwise(edges)
        rows = [row for low, high in ranges for row in read_series(client, metric, transport, low, high)]
        return joined(rows, start_ms, end_ms)
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
                "narrow it by --namespace. Run again to go on: pieces that came are kept"
            ) from error
        halves = ((start_ms, middle), (middle, end_ms))
        parts = [row for low, high in halves for row in read_series(client, metric, transport, low, high)]
    except RefusedError as error:
        raise TraceError(f"{client.url}: {metric.selector}: {error}") from error
    return joined(parts, start_ms, end_ms)
