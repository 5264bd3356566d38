"""Reading a range: in how many parts, by which other way, without which labels, and what follows a history."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from reclaim.data.errors import ConfigError, TraceError
from reclaim.data.fetch.prometheus import live, reading
from reclaim.data.fetch.prometheus.client import Access, Client, RefusedError, TooMuchError
from reclaim.data.fetch.prometheus.live import LiveReader
from reclaim.data.fetch.prometheus.reading import external_labels, read_series
from reclaim.data.fetch.prometheus.transports import TRANSPORTS, OtherEncodingError
from reclaim.data.traces.dialect import Metric, load_dialect
from reclaim.data.traces.history import FORMAT, PIECE_S, History, RawSeries

CLIENT = cast(Client, SimpleNamespace(url="http://server"))
METRIC = Metric("cpu", "c")
Labels = dict[str, str]
Spans = list[tuple[int, int]]


def one(labels: Labels, *times_ms: int, value: float = 1.0) -> RawSeries:
    return RawSeries(tuple(sorted(labels.items())), np.array(times_ms, np.int64), np.full(len(times_ms), value))


def answering(monkeypatch: pytest.MonkeyPatch, name: str, answer: Callable[[int, int], list[RawSeries]]) -> Spans:
    """Let a transport answer by its range, in ms; return the ranges that it is asked for."""
    asked: Spans = []

    def read(_: Client, __: Metric, start_ms: int, end_ms: int) -> list[RawSeries]:
        asked.append((start_ms, end_ms))
        return answer(start_ms, end_ms)

    monkeypatch.setitem(TRANSPORTS, name, read)
    return asked


@pytest.mark.parametrize(
    ("end_ms", "planned", "edges_ms"),
    [
        (600_000, 3_000_001, [0, 200_000, 400_000, 600_000]), (600_000, 1_500_000, [0, 600_000]),
        (150_000, 1e12, [0, 75_000, 150_000]), (30_000, 1e12, [0, 30_000]), (600_000, 0, [0, 600_000]),
    ],
)  # fmt: skip
def test_a_range_is_read_in_equal_parts_by_plan_each_of_a_minute_at_least(
    end_ms: int, planned: float, edges_ms: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A query asks for 1.5 million samples at once."""
    asked = answering(monkeypatch, "query", lambda start_ms, _: [one({"pod": "a"}, start_ms)])
    (found,) = read_series(CLIENT, METRIC, "query", 0, end_ms, planned=planned)
    assert asked == list(pairwise(edges_ms))
    assert found.time_ms.tolist() == edges_ms[:-1]


def test_a_range_that_is_refused_is_read_in_halves_down_to_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(start_ms: int, end_ms: int) -> list[RawSeries]:
        if end_ms - start_ms > 60_000:
            raise TooMuchError("too many samples")
        return [one({"pod": "a"}, start_ms)]

    asked = answering(monkeypatch, "query", answer)
    (found,) = read_series(CLIENT, METRIC, "query", 0, 240_000)
    assert found.time_ms.tolist() == [0, 60_000, 120_000, 180_000]
    assert asked[:3] == [(0, 240_000), (0, 120_000), (0, 60_000)]
    with pytest.raises(
        TraceError, match=r"c\{\} is too much even for 119 s \(too many samples\); narrow it by --names"
    ):
        read_series(CLIENT, METRIC, "query", 0, 119_998)


def test_a_refusal_names_the_series_that_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(*_: int) -> list[RawSeries]:
        raise RefusedError(400, "bad matcher")

    answering(monkeypatch, "query", answer)
    with pytest.raises(TraceError, match=r"^http://server: c\{\}: HTTP 400: bad matcher$"):
        read_series(CLIENT, METRIC, "query", 0, 1000)


def test_chunks_of_another_encoding_are_read_as_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(*_: int) -> list[RawSeries]:
        raise OtherEncodingError("encoding 2")

    answering(monkeypatch, "chunks", answer)
    monkeypatch.setattr(reading, "read_samples", lambda *_: [one({"pod": "a"}, 5)])
    (found,) = read_series(CLIENT, METRIC, "chunks", 0, 1000)
    assert found.time_ms.tolist() == [5]


def test_a_label_of_the_server_is_dropped_with_its_value_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    of = [one({"pod": "a", "site": "east"}, 1), one({"pod": "b", "site": "west"}, 1)]
    answering(monkeypatch, "samples", lambda *_: of)
    found = read_series(CLIENT, METRIC, "samples", 0, 1000, without=frozenset({("site", "east")}))
    assert [row.named for row in found] == [{"pod": "a"}, {"pod": "b", "site": "west"}]


def test_labels_of_the_server_are_those_of_all_series_that_no_series_of_a_query_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There are series at half the range, and none at 98 %."""
    more = {"site": "east", "job": "kubelet"}

    def answer(start_ms: int, end_ms: int) -> list[RawSeries]:
        there = (start_ms, end_ms) == (440_000, 500_000)
        return [one({"pod": "a", **more}, 1), one({"pod": "b", "zone": "1", **more}, 1)] if there else []

    asked = answering(monkeypatch, "samples", answer)
    answering(monkeypatch, "query", lambda *_: [one({"pod": "a", "job": "kubelet"}, 1)])
    assert external_labels(CLIENT, METRIC, "samples", 0, 1000) == {("site", "east")}
    assert asked == [(920_000, 980_000), (440_000, 500_000)]
    assert external_labels(CLIENT, METRIC, "samples", 0, 600) == frozenset()  # nothing at all
    assert external_labels(CLIENT, METRIC, "samples", 0, 600, now_s=500.2) == {("site", "east")}
    answering(monkeypatch, "query", lambda *_: [])
    assert external_labels(CLIENT, METRIC, "samples", 0, 1000) == frozenset()
    asked.clear()
    assert external_labels(CLIENT, METRIC, "export", 0, 1000) == frozenset()
    assert asked == []


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> LiveReader:
    """Return a reader of a history whose server has chunks and a label of its own."""
    monkeypatch.setattr(live, "choose", lambda *_: "chunks")
    monkeypatch.setattr(live, "external_labels", lambda *_: frozenset({("site", "east")}))
    record = {"format": FORMAT, "start_s": 0, "end_s": PIECE_S, "asked": {"namespace": "shop"},
              "dialect": load_dialect("kubernetes").text}  # fmt: skip
    return LiveReader(CLIENT, Access("http://127.0.0.1:1"), History(Path("history"), record))


def test_what_follows_a_history_is_read_as_samples_by_role_without_what_is_infinite(
    reader: LiveReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk may be an hour long, of which a few minutes are wanted."""
    asked: list[Metric] = []

    def read(_: Client, metric: Metric, *range_ms: int) -> list[RawSeries]:
        assert range_ms == (600_000, 900_000)
        asked.append(metric)
        value = {"cpu": 1.0, "memory": np.inf}.get(metric.role)
        return [] if value is None else [one({"pod": "a", "site": "east"}, 700_000, value=value)]

    monkeypatch.setitem(TRANSPORTS, "samples", read)
    found = reader.read(600, 900)
    assert {role: [row.named for row in rows] for role, rows in found.items()} == {"cpu": [{"pod": "a"}]}
    assert [metric.role for metric in asked] == [metric.role for metric in load_dialect("kubernetes").metrics]
    assert 'namespace=~"shop"' in asked[0].selector
    monkeypatch.setattr(live, "LARGEST_PIECE", 1_500)  # each of the two series takes a kilobyte
    with pytest.raises(ConfigError, match="http://server: two hours of the history are more samples than planned"):
        reader.read(600, 900)


def test_usage_was_scraped_where_there_is_any_of_the_last_ten_minutes(
    reader: LiveReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = answering(monkeypatch, "samples", lambda *_: [one({"pod": "a"}, 700_000)])
    assert reader.scraped(1_000)
    answering(monkeypatch, "samples", lambda *_: [one({"pod": "a"}, 700_000, value=np.inf)])
    assert not reader.scraped(1_000)
    assert asked == [(400_000, 1_000_000)]
