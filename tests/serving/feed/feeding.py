"""A Prometheus of which the test sets the time, and a feed of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote_plus

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from reclaim.data import schema as s
from reclaim.data.fetch.prometheus.client import Access
from reclaim.data.traces.history import RawSeries
from reclaim.serving.client.client import Client
from reclaim.serving.feed.job import FeedConfig, FeedReport, feed
from tests.data.fetch.prometheus.answering import Answer, ok, serving
from tests.data.traces.kubernetes.histories import DIALECT, T0, Piece
from tests.data.traces.kubernetes.test_live import pod, together

HOUR_S = 3600
QUERY = re.compile(r"(\w+)\{.*\}\[(\d+)ms\]")
NAMES = {metric.role: metric.name for metric in DIALECT.metrics}
SERIES: Piece = together(
    pod("cart-7d9f8b6c5x-aaaaa", 0, 8 * HOUR_S, cores=0.5),
    pod("cart-7d9f8b6c5x-bbbbb", 100, 8 * HOUR_S, cores=1.5, gap_s=(9_000, 9_900)),
    pod("cart-7d9f8b6c5x-ccccc", 400, 3 * HOUR_S, cores=1.0),
    pod("cart-7d9f8b6c5x-ddddd", 5 * HOUR_S, 8 * HOUR_S, cores=2.0),
)


class Moment:
    """Time of a test: a pause moves it."""

    def __init__(self, since_s: float, until_s: float) -> None:
        self.now_s, self.until_s = T0 + since_s, T0 + until_s
        self.pauses: list[float] = []

    def now(self) -> float:
        """Return the time."""
        return self.now_s

    def sleep(self, seconds: float) -> None:
        """Move the time, and end the test after its own."""
        self.pauses.append(seconds)
        self.now_s += seconds
        if self.now_s > self.until_s:
            raise KeyboardInterrupt


@dataclass(frozen=True)
class Late:
    """Samples of [since, until) that come later: at a time, or slowly from then on."""

    since_s: float
    until_s: float
    come_s: float
    slowly: bool = False

    def at_ms(self, time_ms: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return when samples are there."""
        late = (time_ms >= (T0 + self.since_s) * 1000) & (time_ms < (T0 + self.until_s) * 1000)
        come_ms = (T0 + self.come_s) * 1000 + self.slowly * (time_ms - (T0 + self.since_s) * 1000) / 2
        return np.where(late, np.maximum(come_ms, time_ms), time_ms)


ON_TIME = Late(0, 0, 0)


@contextmanager
def a_prometheus(
    series: Piece, moment: Moment, failing: tuple[float, float] = (0, 0), status: int = 500,
    late: Late = ON_TIME,
) -> Iterator[str]:  # fmt: skip
    """Answer range selectors with what was scraped until now, or comes late; fail for a while."""
    by_name = {NAMES[role]: rows for role, rows in series.items()}

    def respond(path: str, headers: dict[str, str], _: int) -> Answer:
        if failing[0] <= moment.now_s - T0 < failing[1]:
            return status, {}, b"out of order"
        if path != "/api/v1/query":
            return 404, {}, b"not found"
        form = dict(pair.split("=", 1) for pair in headers["body"].split("&"))
        name, range_ms = QUERY.fullmatch(unquote_plus(form["query"])).groups()  # type: ignore[union-attr]
        end_ms = round(float(form["time"]) * 1000)
        found: list[dict[str, Any]] = []
        for row in by_name.get(name, []):
            kept = (row.time_ms > end_ms - int(range_ms)) | (row.time_ms == end_ms - int(range_ms) + 1)
            kept &= (row.time_ms <= end_ms) & (late.at_ms(row.time_ms) <= moment.now_s * 1000)
            if kept.any():
                values = [[t / 1000, repr(v)] for t, v in zip(row.time_ms[kept].tolist(), row.value[kept].tolist(),
                                                              strict=True)]  # fmt: skip
                found.append({"metric": {"__name__": name, **row.named}, "values": values})
        return ok({"resultType": "matrix", "result": found})

    with serving(respond) as (url, _came):
        yield url


def run(
    history: Path, service: str, moment: Moment, *, failing: tuple[float, float] = (0, 0),
    said: list[str] | None = None, series: Piece = SERIES, status: int = 500, late: Late = ON_TIME, **changes: Any,
) -> FeedReport | None:  # fmt: skip
    """Feed until the time of the test is over; None where that ends it."""
    lines: list[str] = [] if said is None else said
    with a_prometheus(series, moment, failing, status, late) as url:
        config = FeedConfig(Access(url, pause_s=0.001), service, **changes)
        try:
            return feed(config, history, say=lines.append, now=moment.now, sleep=moment.sleep)
        except KeyboardInterrupt:
            return None


Known = dict[tuple[int, int], dict[str, Any]]
"""Rows of a service by task."""


def known(service: str) -> Known:
    with Client(service) as client:
        rows = client.cell_table().table.to_pylist()
    return {(row[s.COLLECTION_ID], row[s.INSTANCE_INDEX]): row for row in rows}


def sent(dataset: pa.Table, url: str) -> None:
    """Send the windows of a dataset, a slot at a time."""
    slots = dataset.append_column("slot", pa.array([(end + 299_999_999) // 300_000_000 for end in
                                                    dataset[s.END_US].to_pylist()]))  # fmt: skip
    with Client(url, strict=True) as client:
        for slot in sorted(set(slots["slot"].to_pylist())):
            client.usage_table(slots.filter(pc.equal(slots["slot"], slot)).drop_columns("slot"))


def renamed(series: Piece, namespace: str) -> Piece:
    """Return the series of another namespace."""
    return {
        role: [RawSeries(tuple(sorted({**row.named, "namespace": namespace}.items())), row.time_ms, row.value)
               for row in rows]
        for role, rows in series.items()
    }  # fmt: skip
