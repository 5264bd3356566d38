"""Feed of a service: it knows what it would know of a dataset, whatever fails or is killed on the way."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import unquote_plus

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray
from pyarrow import csv

from reclaim.data import schema as s
from reclaim.data.core.files import locked
from reclaim.data.errors import ConfigError, TraceError
from reclaim.data.fetch.prometheus.client import Access
from reclaim.data.fetch.prometheus.client import Client as Server
from reclaim.data.fetch.prometheus.job import shorten_history
from reclaim.data.fetch.prometheus.transports import TRANSPORTS, read_query
from reclaim.data.ingest.job import IngestConfig, ingest
from reclaim.data.traces.dialect import Metric, parse_dialect
from reclaim.data.traces.history import PIECE_S, RECORD, History, RawSeries, cut, read_piece
from reclaim.data.traces.kubernetes.kept import as_bytes, from_bytes
from reclaim.data.traces.kubernetes.live import LiveFold
from reclaim.data.traces.kubernetes.owners import machine_id
from reclaim.serving.client.client import Client, ServiceError
from reclaim.serving.feed.job import FOLD, LOCK, PROGRESS, FeedConfig, FeedReport, feed
from reclaim.serving.feed.metrics import NamedMetrics, address_of, shown
from reclaim.serving.predictions.histories import histories_of
from tests.data.fetch.prometheus.answering import Answer, ok, serving
from tests.data.traces.kubernetes.histories import DIALECT, T0, US, Piece, write_history
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


@pytest.fixture
def history(tmp_path: Path) -> Path:
    """Give a history of the first two hours."""
    return write_history(tmp_path / "history", SERIES, 1)


@pytest.fixture
def service(make_app: Any, at_url: Any) -> Iterator[str]:
    with make_app() as (app, _), at_url(app) as url:
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


def known(service: str) -> dict[tuple[int, int], dict[str, Any]]:
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


def test_a_service_that_is_fed_answers_as_one_that_is_sent_the_ingested_history(
    history: Path, service: str, make_app: Any, at_url: Any, tmp_path: Path
) -> None:
    """Two hours on the disk, two and a half more in slots; then eight hours of the same are a dataset."""
    run(history, service, Moment(2.2 * HOUR_S, 4.5 * HOUR_S + 90))
    whole = write_history(tmp_path / "whole", SERIES, 4)
    dataset = ingest(whole, tmp_path / "dataset", IngestConfig(trace="kubernetes")).dataset
    table = histories_of(dataset)
    until_us = (T0 + int(4.5 * HOUR_S)) * US
    with make_app() as (app, _), at_url(app) as other:
        sent(table.filter(pc.less_equal(table[s.END_US], until_us)), other)
        expected = known(other)
    found = known(service)
    ended = expected.keys() - found.keys()
    assert len(found) == 2
    assert len(ended) == 1  # the third pod, gone since three hours; the fourth is still to come
    assert {key: expected[key] for key in found} == found


def test_a_task_that_went_and_came_back_between_two_looks_goes_on_as_in_an_ingest(
    service: str, make_app: Any, at_url: Any, tmp_path: Path
) -> None:
    """A pod of a set is gone for half an hour, and the server is away for longer: windows are missing, a run began."""
    until_s, gone, name = 5 * HOUR_S, (2.5 * HOUR_S, 3 * HOUR_S), "db-0"
    series = together(
        pod("cart-7d9f8b6c5x-aaaaa", 0, 8 * HOUR_S, cores=0.5),
        *(pod(name, start_s, end_s, cores=1.0) for start_s, end_s in ((0, gone[0]), (gone[1], 8 * HOUR_S))),
    )
    history = write_history(tmp_path / "history", series, 1)
    moment = Moment(2.2 * HOUR_S, until_s + 90)
    report = run(history, service, moment, series=series, failing=(gone[0] - 200, gone[1] + 900))
    assert report is None
    whole = write_history(tmp_path / "whole", series, 4)
    table = histories_of(ingest(whole, tmp_path / "dataset", IngestConfig(trace="kubernetes")).dataset)
    with make_app() as (app, _), at_url(app) as other:
        sent(table.filter(pc.less_equal(table[s.END_US], (T0 + int(until_s)) * US)), other)
        assert known(service) == known(other)
    counts = sorted((row["windows"], row["age_s"]) for row in known(service).values())
    assert counts == [(54, until_s), (60, until_s)]


@pytest.mark.parametrize(("after", "answered"), [(1, False), (9, True), (30, False), (30, True)])
def test_a_feed_that_is_killed_and_run_again_leaves_what_one_leaves_that_was_not(
    after: int, answered: bool, history: Path, service: str, make_app: Any, at_url: Any, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Killed before or after a write of windows was answered."""
    calls = 0
    write = Client.usage_table

    def killed(self: Client, table: pa.Table) -> Any:
        nonlocal calls
        calls += 1
        if calls == after and not answered:
            raise KeyboardInterrupt
        found = write(self, table)
        if calls == after:
            raise KeyboardInterrupt
        return found

    other = write_history(tmp_path / "other", SERIES, 1)
    with monkeypatch.context() as patch:
        patch.setattr(Client, "usage_table", killed)
        run(history, service, Moment(2.2 * HOUR_S, 4 * HOUR_S))
    assert calls == after
    run(history, service, Moment(3.9 * HOUR_S, 5 * HOUR_S))
    with make_app() as (app, _), at_url(app) as url:
        run(other, url, Moment(2.2 * HOUR_S, 5 * HOUR_S))
        assert known(service) == known(url)


def test_how_far_the_history_was_sent_is_said_each_minute(
    tmp_path: Path, service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four pieces of two hours, each of which takes forty seconds to fold."""
    history, moment = write_history(tmp_path / "history", SERIES, 4), Moment(8.2 * HOUR_S, 9 * HOUR_S)
    said: list[str] = []
    take = LiveFold.take

    def taken(self: LiveFold, *piece: Any) -> Any:
        moment.now_s += 40
        return take(self, *piece)

    monkeypatch.setattr(LiveFold, "take", taken)
    run(history, service, moment, said=said, once=True)
    at = [f"{datetime.fromtimestamp(T0 + hour * HOUR_S, UTC):%Y-%m-%d %H:%M} UTC" for hour in (0, 4, 8)]
    assert said[:2] == [f"sending the history from {at[0]} to {at[2]}", f"sent the history up to {at[1]}"]
    assert not any(line.startswith("sent") for line in said[2:])


def test_a_slot_without_windows_ends_and_failures_is_not_counted_as_sent(history: Path, service: str) -> None:
    """The first two hours of containers that are gone: then half an hour of nothing."""
    gone = {role: [replace(row, time_ms=row.time_ms[early], value=row.value[early]) for row in rows
                   for early in [row.time_ms < (T0 + 1.5 * HOUR_S) * 1000] if early.any()]
            for role, rows in SERIES.items()}  # fmt: skip
    report = run(history, service, Moment(2.2 * HOUR_S, 3 * HOUR_S), series=gone, once=True)
    quiet = run(history, service, Moment(3.2 * HOUR_S, 4 * HOUR_S), series=gone, once=True)
    assert report is not None
    assert quiet is not None
    assert report.slots == 24
    assert quiet.slots <= 2  # the last one again, and the ends


def test_a_feed_that_is_run_again_folds_what_followed_alone(
    tmp_path: Path, service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A history of four hours; stopped half an hour later, and run again after another hour and a half."""
    history = write_history(tmp_path / "history", SERIES, 2)
    run(history, service, Moment(4.2 * HOUR_S, 4.7 * HOUR_S))
    folded: list[tuple[float, float]] = []
    take = LiveFold.take

    def taken(self: LiveFold, series: Piece, start_us: int, end_us: int) -> Any:
        folded.append((start_us / US - T0, end_us / US - T0))
        assert all(row.time_ms[0] >= start_us // 1000 for rows in series.values() for row in rows)
        return take(self, series, start_us, end_us)

    monkeypatch.setattr(LiveFold, "take", taken)
    run(history, service, Moment(6.2 * HOUR_S + 60, 6.2 * HOUR_S + 65))
    sent_s = 4.7 * HOUR_S - 120  # the end of the last slot, which is sent again
    assert folded == [(sent_s - 300, 6 * HOUR_S), (6 * HOUR_S, 6.2 * HOUR_S - 120)]


@pytest.mark.parametrize("damage", ["damaged", "of another dialect", "of what the service has not"])
def test_a_fold_that_cannot_be_used_costs_a_second_folding(damage: str, history: Path, service: str) -> None:
    moment, said = Moment(3 * HOUR_S + 100, 4 * HOUR_S), list[str]()
    run(history, service, moment, once=True)
    before = known(service)
    fold, until_us = from_bytes((history / FOLD).read_bytes()) or pytest.fail("no fold")
    assert until_us == T0 * US + round((2 * HOUR_S) * US)  # the range of the last slots began there
    if damage == "damaged":
        (history / FOLD).write_bytes((history / FOLD).read_bytes()[:-9])
    elif damage == "of another dialect":
        other = parse_dialect(DIALECT.text + "\n# another", "other")
        (history / FOLD).write_bytes(as_bytes(LiveFold(other), until_us))
    else:
        (history / FOLD).write_bytes(as_bytes(fold, until_us + 9 * round(HOUR_S * US)))
    again = run(history, service, moment, once=True, said=said)
    assert again is not None
    assert again.slots == 1
    assert known(service) == before
    assert ("the whole history is folded again" in said[0]) == (damage != "of what the service has not")


def test_a_history_keeps_its_last_days_and_a_service_that_lost_all_is_sent_those(
    tmp_path: Path, service: str, make_app: Any, at_url: Any
) -> None:
    """A history of four hours that grows by two; the last two hours are kept."""
    history = write_history(tmp_path / "history", SERIES, 2)
    run(history, service, Moment(4.2 * HOUR_S, 6.3 * HOUR_S), keep_days=2 / 24)
    opened = History.open(history)
    assert opened.range_s == (T0 + 2 * PIECE_S, T0 + 3 * PIECE_S)
    assert sorted((history / "samples").iterdir()) == list(opened.pieces())
    with make_app() as (app, _), at_url(app) as fresh:
        run(history, fresh, Moment(6.4 * HOUR_S, 6.5 * HOUR_S), keep_days=2 / 24)
        assert known(fresh).keys() == known(service).keys()


def test_a_history_is_shortened_to_the_end_after_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history = write_history(tmp_path / "history", SERIES, 4)

    def killed(_: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", killed)
        with pytest.raises(KeyboardInterrupt):
            shorten_history(history, 0.25)
    assert History.open(history).range_s == (T0 + PIECE_S, T0 + 4 * PIECE_S)
    assert len(list((history / "samples").iterdir())) == 4
    shorten_history(history, 0.25)
    assert len(list((history / "samples").iterdir())) == 3
    shorten_history(history, None)
    shorten_history(history, 0.001)
    assert History.open(history).range_s == (T0 + 3 * PIECE_S, T0 + 4 * PIECE_S)


def test_what_a_server_or_a_service_missed_is_made_good(
    history: Path, service: str, make_app: Any, at_url: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server fails for twenty minutes, the service three times."""
    said: list[str] = []
    write = Client.usage_table
    failures = [ServiceError("no answer", None), ServiceError("restarts", 503), ServiceError("a full disk", 507)]

    def failing(self: Client, table: pa.Table) -> Any:
        if said and failures:
            raise failures.pop()
        return write(self, table)

    monkeypatch.setattr(Client, "usage_table", failing)
    moment = Moment(2.2 * HOUR_S, 4 * HOUR_S)
    run(history, service, moment, failing=(2.5 * HOUR_S, 2.5 * HOUR_S + 1200), said=said)
    assert not failures
    assert {line.split("; ")[-1] for line in said if "trying again" in line} == {"trying again in 30 s"}
    assert any("out of order" in line for line in said)
    other = write_history(tmp_path / "other", SERIES, 1)
    with make_app() as (app, _), at_url(app) as url:
        run(other, url, Moment(2.2 * HOUR_S, 4 * HOUR_S))
        assert known(service) == known(url)


@pytest.mark.parametrize(("until_s", "come_s", "slowly"), [
    (9_000, 9_400, False),  # one slot, after the one that follows it was sent
    (32_400, 10_500, False),  # five slots
    (9_000, 9_300, True), (11_100, 11_000, True),
])  # fmt: skip
def test_slots_that_were_empty_are_sent_where_their_samples_come_late(
    until_s: float, come_s: float, slowly: bool, history: Path, service: str, make_app: Any, at_url: Any,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """As of a server that gets its samples from another one: all at once, or as many as a look finds."""
    write, sent = Client.usage_table, [set[tuple[int, ...]]()]

    def counted(self: Client, table: pa.Table) -> Any:
        found = write(self, table)
        assert set(found.write.refused) <= {"too_late", "ended"}  # of windows that are sent again
        keys = (table[name].to_pylist() for name in (s.COLLECTION_ID, s.INSTANCE_INDEX, s.START_US, s.END_US))
        sent[-1].update(zip(*keys, strict=True))
        return found

    monkeypatch.setattr(Client, "usage_table", counted)
    said: list[str] = []
    run(history, service, Moment(2.2 * HOUR_S, 4 * HOUR_S), late=Late(8_700, until_s, come_s, slowly), said=said)
    assert any("came late, and are sent now" in line for line in said)
    sent.append(set())
    other = write_history(tmp_path / "other", SERIES, 1)
    with make_app() as (app, _), at_url(app) as url:
        run(other, url, Moment(2.2 * HOUR_S, 4 * HOUR_S))
        assert sent[1] <= sent[0]
        if not slowly:
            found, expected = (
                {key: (row["windows"], row[s.END_US]) for key, row in known(of).items()} for of in (service, url)
            )
            assert found == expected


def renamed(series: Piece, namespace: str) -> Piece:
    """Return the series of another namespace."""
    return {
        role: [RawSeries(tuple(sorted({**row.named, "namespace": namespace}.items())), row.time_ms, row.value)
               for row in rows]
        for role, rows in series.items()
    }  # fmt: skip


def test_of_two_feeds_into_one_service_each_sends_all_of_its_own(history: Path, service: str, tmp_path: Path) -> None:
    """The second has a history of another namespace, and begins when the service has later windows of the first."""
    run(history, service, Moment(2.2 * HOUR_S, 4 * HOUR_S))
    before = known(service)
    other = write_history(tmp_path / "other", renamed(SERIES, "pay"), 1)
    again = run(other, service, Moment(3 * HOUR_S + 100, 4 * HOUR_S), once=True, series=renamed(SERIES, "pay"))
    assert again is not None
    assert again.slots == 36
    assert len(known(service)) == len(before) + 3
    assert not again.refused
    back = run(history, service, Moment(4 * HOUR_S + 100, 5 * HOUR_S), once=True)
    assert back is not None
    assert back.slots == 2  # the last one again, and what was missed


@pytest.mark.parametrize("at", [2, 20])
def test_a_service_that_lost_what_it_was_sent_is_sent_all_of_it_again(
    at: int, history: Path, service: str, make_app: Any, at_url: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its state is in memory, and it restarts."""
    ask, calls, said = Client.cell_table, 0, list[str]()
    with make_app() as (app, _), at_url(app) as fresh, Client(fresh) as there:

        def moved(self: Client, query: Any = None) -> Any:
            nonlocal calls
            calls += query is not None and query.tasks is not None
            if calls > at and self._transport is not there._transport:
                self._transport.close()
                self._transport = there._transport
            return ask(self, query)

        other = write_history(tmp_path / "other", SERIES, 1)
        with monkeypatch.context() as patch:
            patch.setattr(Client, "cell_table", moved)
            run(history, service, Moment(2.2 * HOUR_S, 4 * HOUR_S), said=said)
        lost = [line for line in said if "has lost what was sent to it until" in line]
        assert [line.split("; ")[-1] for line in lost] == ["starting again from the history in 30 s"]
        with make_app() as (app, _), at_url(app) as url:
            run(other, url, Moment(2.2 * HOUR_S, 4 * HOUR_S))
            assert known(fresh) == known(url)


def test_a_service_that_fails_while_the_history_is_sent_is_waited_for(
    tmp_path: Path, service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = [ServiceError("restarts", 503)]
    write = Client.usage_table

    def failing(self: Client, table: pa.Table) -> Any:
        if failures:
            raise failures.pop()
        return write(self, table)

    history = write_history(tmp_path / "history", SERIES, 2)
    monkeypatch.setattr(Client, "usage_table", failing)
    moment = Moment(4.2 * HOUR_S, 4.2 * HOUR_S + 40)
    run(history, service, moment)
    assert moment.pauses[0] == 30
    assert len(known(service)) == 2


def test_a_clock_that_was_ahead_for_a_while_costs_no_window(history: Path, service: str) -> None:
    class Jumping(Moment):
        def now(self) -> float:
            """Return the time, ten hours ahead for one slot."""
            return self.now_s + 36_000 * (len(self.pauses) == 4)

    said: list[str] = []
    run(history, service, Jumping(2.2 * HOUR_S, 4 * HOUR_S), said=said)
    assert sum("the clock went back" in line for line in said) == 1
    until_us = max(row[s.END_US] for row in known(service).values())
    assert until_us == (T0 + 4 * HOUR_S - 300) * US
    assert History.open(history).range_s[1] == T0 + PIECE_S  # and not ten hours of nothing


def test_a_clock_that_was_ahead_at_the_start_costs_no_window_either(history: Path, service: str) -> None:
    class Ahead(Moment):
        def now(self) -> float:
            """Return the time, ten hours ahead until it is set right."""
            return self.now_s + 36_000 * (self.now_s < T0 + 2.25 * HOUR_S)

    run(history, service, Ahead(2.2 * HOUR_S, 4 * HOUR_S))
    assert max(row[s.END_US] for row in known(service).values()) == (T0 + 4 * HOUR_S - 300) * US
    assert History.open(history).range_s[1] == T0 + PIECE_S  # and not ten hours of nothing


def test_a_history_that_ends_in_time_to_come_is_named_with_what_to_do(history: Path, service: str) -> None:
    said: list[str] = []
    run(history, service, Moment(HOUR_S, 1.5 * HOUR_S), said=said)
    (line,) = [line for line in said if "still to come" in line]
    assert line.startswith(f"{history} ends at {datetime.fromtimestamp(T0 + PIECE_S, UTC):%Y-%m-%d %H:%M} UTC")
    assert "move it away and fetch it again" in line
    said.clear()
    run(history, service, Moment(2 * HOUR_S, 2.2 * HOUR_S), said=said)
    assert not any("still to come" in line for line in said)


def test_a_start_after_an_outage_of_the_cluster_folds_from_its_last_windows_on(
    history: Path, service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is scraped from three hours on; then the feed is stopped, and run again."""
    short = {role: cut({role: rows}, 0, (T0 + 3 * int(HOUR_S)) * 1000)[role] for role, rows in SERIES.items()}
    run(history, service, Moment(2.2 * HOUR_S, 3.5 * HOUR_S), series=short)
    begun: list[float] = []
    take = LiveFold.take

    def taken(self: LiveFold, series: Piece, start_us: int, end_us: int) -> Any:
        begun.append(start_us / US - T0)
        return take(self, series, start_us, end_us)

    monkeypatch.setattr(LiveFold, "take", taken)
    run(history, service, Moment(3.6 * HOUR_S, 3.7 * HOUR_S), series=short)
    assert begun[0] == 3 * HOUR_S - 300


def test_a_file_that_cannot_be_written_does_not_end_the_feed(history: Path, service: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said: list[str] = []
    run(history, service, Moment(2.2 * HOUR_S, 2.5 * HOUR_S), said=said, out=(tmp_path / "file" / "r.csv",))
    assert all(line.endswith("trying again in 30 s") for line in said[1:])
    assert "file" in said[1]
    assert max(row[s.END_US] for row in known(service).values()) == (T0 + int(2.5 * HOUR_S) - 300) * US


class Full:
    """Disk of a history that is full between two times."""

    def __init__(self, moment: Moment, since_s: float, until_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
        self.moment, self.range_s, self.failed = moment, (since_s, until_s), set[str]()
        for of, name in ((Path, "write_text"), (Path, "write_bytes"), (pq.ParquetWriter, "__init__")):
            monkeypatch.setattr(of, name, self.checked(getattr(of, name)))

    def checked(self, write: Any) -> Any:
        """Return a way to write that fails while the disk is full."""

        def checked(own: Any, *args: Any, **options: Any) -> Any:
            path = own if isinstance(own, Path) else args[0]
            if self.range_s[0] <= self.moment.now_s - T0 < self.range_s[1]:
                self.failed.add(path.name.removesuffix(".partial"))
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            return write(own, *args, **options)

        return checked


def test_while_the_disk_of_the_history_is_full_windows_are_sent_and_then_its_files_are_written_again(
    history: Path, service: str, make_app: Any, at_url: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From three hours to four and a half; the third two hours of the history are due at four hours."""
    said, sent, moment = list[str](), set[float](), Moment(2.2 * HOUR_S, 5 * HOUR_S)
    write = Client.usage_table

    def counted(self: Client, table: pa.Table) -> Any:
        sent.add(moment.now_s - T0)
        return write(self, table)

    with monkeypatch.context() as patch:
        full = Full(moment, 3 * HOUR_S, 4.5 * HOUR_S, patch)
        patch.setattr(Client, "usage_table", counted)
        run(history, service, moment, said=said)
    assert full.failed == {PROGRESS, FOLD, "2026-11-01T10.parquet"}
    assert len([at for at in sent if 3 * HOUR_S <= at < 4.5 * HOUR_S]) == 18  # one for each slot
    for name in (PROGRESS, FOLD, RECORD):
        assert sum(line.startswith(f"{history / name}: not written, and tried again later: ") for line in said) == 1
        assert sum(line == f"{history / name}: written again" for line in said) == 1
    assert History.open(history).range_s == (T0, T0 + 2 * PIECE_S)
    found = from_bytes((history / FOLD).read_bytes())
    assert found is not None
    assert found[1] == (T0 + 5 * HOUR_S - 600) * US
    other = write_history(tmp_path / "other", SERIES, 1)
    with make_app() as (app, _), at_url(app) as url:
        run(other, url, Moment(2.2 * HOUR_S, 5 * HOUR_S))
        assert known(service) == known(url)


def test_a_feed_that_starts_on_a_full_disk_sends_nevertheless(
    history: Path, service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said, moment = list[str](), Moment(4.2 * HOUR_S, 4.5 * HOUR_S)
    with monkeypatch.context() as patch:
        full = Full(moment, 0, 9 * HOUR_S, patch)
        run(history, service, moment, said=said)
    assert full.failed == {PROGRESS, FOLD, "2026-11-01T10.parquet"}
    assert len([line for line in said if "No space left on device" in line]) == 3
    assert max(row[s.END_US] for row in known(service).values()) == (T0 + 4.5 * HOUR_S - 300) * US


def test_a_record_that_a_crash_left_empty_costs_a_second_sending(history: Path, service: str) -> None:
    moment, said = Moment(3 * HOUR_S + 100, 4 * HOUR_S), list[str]()
    run(history, service, moment, once=True)
    before = known(service)
    (history / PROGRESS).write_text("")
    again = run(history, service, moment, once=True, said=said)
    assert again is not None
    assert again.slots == 36
    assert "feed.json: not the record of a feed" in said[0]
    assert known(service) == before


def test_windows_that_are_refused_are_said(history: Path, service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Client.usage_table

    def refusing(self: Client, table: pa.Table) -> Any:
        found = write(self, table)
        return found._replace(write=found.write.model_copy(update={"refused": {"too_many_tasks": 2}}))

    monkeypatch.setattr(Client, "usage_table", refusing)
    said: list[str] = []
    run(history, service, Moment(2.2 * HOUR_S, 2.2 * HOUR_S + 350), said=said)
    # of 26 slots until 7800 s, then of one
    assert [line.split("of memory")[1] for line in said[1:]] == [
        ", 52 windows refused as too_many_tasks", ", 2 windows refused as too_many_tasks",
    ]  # fmt: skip


def test_windows_in_the_future_of_the_services_clock_are_sent_again_until_it_takes_them(
    history: Path, service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of the service's machine is behind, and is set right at 2.4 hours."""
    write, moment, taken = Client.usage_table, Moment(2.2 * HOUR_S, 2.6 * HOUR_S), set()

    def behind(self: Client, table: pa.Table) -> Any:
        if moment.now_s < T0 + 2.4 * HOUR_S and max(table[s.END_US].to_pylist()) > (T0 + 2.2 * HOUR_S) * US:
            found = write(self, table.slice(0, 0))
            return found._replace(write=found.write.model_copy(update={"refused": {"in_the_future": len(table)}}))
        taken.update(table[s.END_US].to_pylist())
        return write(self, table)

    monkeypatch.setattr(Client, "usage_table", behind)
    said: list[str] = []
    run(history, service, moment, said=said)
    assert {(T0 + end_s) * US for end_s in range(300, 9301, 300)} <= taken
    waits = [line for line in said if "windows until 2026-11-01 10:15 UTC are in the future of its clock" in line]
    assert len(waits) == 16  # at 8160 s, 8190 s, … 8610 s


def test_slots_without_usage_are_said(history: Path, service: str) -> None:
    """The server answers, and has no samples from 2.4 hours on, as where its scrapes of the kubelets are removed."""
    said: list[str] = []
    scraped = cut(SERIES, 0, round((T0 + 2.4 * HOUR_S) * 1000))
    run(history, service, Moment(2.2 * HOUR_S, 2.6 * HOUR_S), said=said, series=scraped)
    silent = ["without new usage; check the scrapes of cAdvisor" in line for line in said if "reserved of" in line]
    assert silent == [False, False, False, False, True, True]  # slots end at 7800, 8100, … 9300 s, samples at 8640 s


def test_a_login_that_expires_is_waited_for_and_a_wrong_one_is_said_at_once(history: Path, service: str) -> None:
    said: list[str] = []
    away = (2.5 * HOUR_S, 2.5 * HOUR_S + 400)
    run(history, service, Moment(2.2 * HOUR_S, 3 * HOUR_S), said=said, failing=away, status=401)
    assert any("HTTP 401" in line and line.endswith("trying again in 30 s") for line in said)
    assert max(row[s.END_US] for row in known(service).values()) == (T0 + 3 * HOUR_S - 300) * US


def test_a_login_that_expires_while_slots_are_empty_is_waited_for(history: Path, service: str) -> None:
    away, late = (9_300, 9_600), Late(8_700, 9_500, 9_500)
    run(history, service, Moment(2.2 * HOUR_S, 3 * HOUR_S), failing=away, status=401, late=late)
    assert {row["windows"] for row in known(service).values()} == {32, 34, 35}  # until 10,500 s, with a gap in one


def test_a_margin_that_there_is_not_is_said_before_the_history_is_sent(history: Path, service: str) -> None:
    with pytest.raises(ServiceError, match="margin"):
        run(history, service, Moment(2.2 * HOUR_S, 3 * HOUR_S), margin="none")
    assert not known(service)


def test_the_history_grows_and_is_one_that_was_fetched(history: Path, service: str, tmp_path: Path) -> None:
    run(history, service, Moment(2.2 * HOUR_S, 6.3 * HOUR_S))
    whole = write_history(tmp_path / "whole", SERIES, 3)
    assert History.open(history).range_s == (T0, T0 + 3 * PIECE_S)
    for path in (whole / "samples").iterdir():
        assert (history / "samples" / path.name).read_bytes() == path.read_bytes(), path.name


@pytest.mark.parametrize("lost_s", [2.5 * HOUR_S, 4 * HOUR_S])
def test_a_history_goes_on_with_a_gap_where_the_prometheus_lost_its_data_and_with_no_other_cluster(
    lost_s: float, history: Path, service: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A feed is begun after four hours; what was scraped in the last hour and a half is there, or of ten minutes."""
    left = cut(SERIES, round((T0 + lost_s) * 1000), (T0 + 9 * HOUR_S) * 1000)
    moment = Moment(4.2 * HOUR_S, 5 * HOUR_S)
    with pytest.raises(ConfigError, match=r"has no series of container_cpu\w+ that .* so it is another server"):
        run(history, service, moment, series=renamed(left, "elsewhere"))
    said: list[str] = []
    run(history, service, moment, series=left, said=said)
    assert "has containers of" in caplog.text
    opened = History.open(history)
    assert opened.range_s == (T0, T0 + 2 * PIECE_S)
    fetched = read_piece(list(opened.pieces())[-1])
    assert bool(fetched) == (lost_s < 4 * HOUR_S)
    assert len(known(service)) == 2  # the two that are there since the beginning


@pytest.mark.parametrize(("lost_s", "since_s", "pieces"), [
    (2.15 * HOUR_S, 2.2 * HOUR_S, 1), (2.5 * HOUR_S, 4.2 * HOUR_S, 2), (4 * HOUR_S, 4.2 * HOUR_S, 2),
])  # fmt: skip
def test_labels_that_remote_read_adds_are_left_out_also_where_the_prometheus_has_lost_all_but_the_last_minutes(
    lost_s: float, since_s: float, pieces: int, history: Path, service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the labels of the server itself, no series would be one of the history, as of another cluster."""

    def added(client: Server, metric: Metric, start_ms: int, end_ms: int) -> list[RawSeries]:
        found = read_query(client, metric, start_ms, end_ms)
        return [replace(row, labels=tuple(sorted({**row.named, "region": "eu"}.items()))) for row in found]

    monkeypatch.setitem(TRANSPORTS, "samples", added)
    take, came = LiveFold.take, list[RawSeries]()

    def taken(self: LiveFold, series: Piece, *range_us: int) -> Any:
        came.extend(row for rows in series.values() for row in rows)
        return take(self, series, *range_us)

    monkeypatch.setattr(LiveFold, "take", taken)
    left = cut(SERIES, round((T0 + lost_s) * 1000), (T0 + 9 * HOUR_S) * 1000)
    run(history, service, Moment(since_s, since_s + HOUR_S / 2), series=left)
    opened = History.open(history)
    assert opened.range_s == (T0, T0 + pieces * PIECE_S)
    came += [row for path in opened.pieces() for rows in read_piece(path).values() for row in rows]
    assert came
    assert not any("region" in row.named for row in came)


def test_with_once_it_ends_when_the_service_knows_all_and_sends_the_last_slot_alone_the_next_time(
    history: Path, service: str
) -> None:
    moment = Moment(3 * HOUR_S + 100, 3 * HOUR_S + 200)
    first = run(history, service, moment, once=True)
    again = run(history, service, moment, once=True)
    assert first is not None
    assert again is not None
    assert (first.slots, first.until_us) == (36, (T0 + 3 * HOUR_S) * US)
    assert (again.slots, again.windows, again.until_us) == (1, 3, first.until_us)
    assert not first.refused
    assert not again.refused
    assert not moment.pauses


def test_reservations_are_written_by_name_after_each_slot(history: Path, service: str, tmp_path: Path) -> None:
    said: list[str] = []
    out = (tmp_path / "new" / "reservations.csv", tmp_path / "reclaim.prom")
    run(history, service, Moment(2.2 * HOUR_S, 2.2 * HOUR_S + 650), said=said, out=out, margin="medium")
    table = out[0].read_text().splitlines()
    assert len(table) == 1 + 3
    assert '"shop","Deployment","cart","app","cart-7d9f8b6c5x-aaaaa","n1","mid"' in table[1]
    assert (
        'reclaim_container_memory_limit_bytes{container="app",namespace="shop",pod="cart-7d9f8b6c5x-aaaaa"} 4e+09'
        in (out[1].read_text().splitlines())
    )
    with Client(service) as client:
        machines = {row[s.MACHINE_ID]: row for row in client.machines_table().to_pylist()}
    scraped = dict(line.split() for line in out[1].read_text().splitlines() if line.startswith("reclaim_node_"))
    nodes = {line.split(",")[6].strip('"') for line in table[1:]}
    assert len(scraped) == 4 * len(nodes)
    for node in nodes:
        limit, peak = (machines[machine_id(node)][f"memory_{name}"] for name in ("limit", "peak_medium"))
        assert float(scraped[f'reclaim_node_memory_limit_bytes{{node="{node}"}}']) == limit
        assert float(scraped[f'reclaim_node_memory_reservation_bytes{{node="{node}"}}']) == peak
    assert len(said) == 4
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\d \d\d:\d\d UTC: 3 containers, reserved of limits: no CPU limit, \d+\.\d % of memory", said[1]
    )


def listed(series: Piece, *stays: tuple[float, str | None]) -> Piece:
    """Return the series of pods that are listed on nodes, each from a time on; None: on none."""
    ends_s = [*(since_s for since_s, _ in stays[1:]), 9 * HOUR_S]
    parts: list[Piece] = [{role: rows for role, rows in series.items() if role != "pod"}]
    for (since_s, node), end_s in zip(stays, ends_s, strict=True):
        for row in cut({"pod": series["pod"]}, round((T0 + since_s) * 1000), round((T0 + end_s) * 1000)).get("pod", []):
            of = {name: value for name, value in row.named.items() if name != "node"} | ({"node": node} if node else {})
            parts.append({"pod": [RawSeries(tuple(sorted(of.items())), row.time_ms, row.value)]})
    return together(*parts)


def nodes_of(history: Path) -> tuple[dict[str, str], dict[str, float]]:
    """Return the node of each pod in the table that was written last, empty for none, and the limit of each node."""
    table = csv.read_csv(history / "out.csv").to_pylist()
    text = (history / "out.prom").read_text()
    limits = dict(re.findall(r'reclaim_node_memory_limit_bytes\{node="(\w+)"\} (\S+)', text))
    return ({row[s.POD][-5:]: row[s.MACHINE_NAME] or "" for row in table},
            {node: float(limit) for node, limit in limits.items()})  # fmt: skip


@pytest.mark.parametrize("address", [None, "10.0.0.7:10250"])
def test_a_task_whose_node_nothing_names_is_fed_as_the_others(address: str | None, history: Path, service: str) -> None:
    """The exporter lists the pods before they have a node, or has no label of it; a scraper's address is one."""
    nowhere = pod("cart-7d9f8b6c5x-aaaaa", 0, 8 * HOUR_S, cores=0.5)
    if address:
        for role in ("cpu", "memory"):
            nowhere[role] = [RawSeries((*row.labels, ("instance", address)), row.time_ms, row.value)
                             for row in nowhere[role]]  # fmt: skip
    somewhere = pod("cart-7d9f8b6c5x-bbbbb", 0, 8 * HOUR_S, cores=1.5)
    series = together(listed(nowhere, (0, None)), listed(somewhere, (0, "n2")))
    out = (history / "out.csv", history / "out.prom")
    again = write_history(history.parent / "again", series, 1)
    run(again, service, Moment(2.2 * HOUR_S, 3 * HOUR_S), series=series, out=out)
    pods, limits = nodes_of(history)
    assert pods == {"aaaaa": address or "", "bbbbb": "n2"}
    assert limits["n2"] == 4e9
    found = {row[s.MACHINE_ID] for row in known(service).values()}
    assert found == {machine_id("n2"), machine_id(address) if address else None}
    assert {row["windows"] for row in known(service).values()} == {35}


def test_a_task_is_on_the_node_that_is_listed_last(history: Path, service: str) -> None:
    """One is listed without a node until 2.5 hours, one comes again on another node then; both ends on the same."""
    late = listed(pod("cart-7d9f8b6c5x-aaaaa", 0, 8 * HOUR_S, cores=0.5), (0, None), (2.5 * HOUR_S, "n2"))
    moved = listed(pod("cart-7d9f8b6c5x-bbbbb", 0, 8 * HOUR_S, cores=1.5), (0, "n1"), (2.5 * HOUR_S, "n2"))
    silent = listed(pod("cart-7d9f8b6c5x-ccccc", 0, 8 * HOUR_S, cores=1.0), (0, "n3"))
    silent["pod"] = cut(silent, 0, round((T0 + 2.5 * HOUR_S) * 1000))["pod"]  # the exporter no longer lists it
    series = together(late, moved, silent)
    again = write_history(history.parent / "again", series, 1)
    out = (history / "out.csv", history / "out.prom")
    run(again, service, Moment(2.2 * HOUR_S, 2.3 * HOUR_S), series=series, out=out)
    assert nodes_of(history) == ({"aaaaa": "", "bbbbb": "n1", "ccccc": "n3"}, {"n1": 4e9, "n3": 4e9})
    run(again, service, Moment(2.3 * HOUR_S, 3.5 * HOUR_S), series=series, out=out)
    assert nodes_of(history) == ({"aaaaa": "n2", "bbbbb": "n2", "ccccc": "n3"}, {"n2": 8e9, "n3": 4e9})
    assert {row[s.MACHINE_ID] for row in known(service).values()} == {machine_id("n2"), machine_id("n3")}
    assert len(known(service)) == 3


def test_a_prometheus_reads_the_reservations_of_the_last_slot(
    history: Path, service: str, free_port: int, tmp_path: Path
) -> None:
    out = tmp_path / "reclaim.prom"
    scraped: list[tuple[str, str]] = []

    class Scraped(Moment):
        def sleep(self, seconds: float) -> None:
            """Scrape, as long as the feed pauses."""
            scraped.append((httpx.get(f"http://127.0.0.1:{free_port}/metrics").text, out.read_text()))
            super().sleep(seconds)

    run(history, service, Scraped(2.2 * HOUR_S, 2.2 * HOUR_S + 650), out=(out,), listen=str(free_port))
    assert len(scraped) == 3
    assert all(text == written for text, written in scraped)
    untils = [line for text, _ in scraped for line in text.splitlines() if line.startswith("reclaim_feed_until")]
    # 2.2 hours are 7920 s: a minute after the slot that ends at 7800 s
    assert [float(line.split()[1]) - T0 for line in untils] == [7800, 8100, 8400]
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{free_port}/metrics")


@pytest.mark.parametrize(
    ("listen", "address"),
    [("9105", ("127.0.0.1", 9105)), ("0.0.0.0:9105", ("0.0.0.0", 9105)), ("[::1]:9105", ("::1", 9105))],
)
def test_a_port_alone_is_one_of_this_machine(listen: str, address: tuple[str, int]) -> None:
    assert address_of(listen) == address


@pytest.mark.parametrize("listen", ["", "host", "host:", "70000", "0", ":-1"])
def test_an_address_without_a_port_is_refused(listen: str) -> None:
    with pytest.raises(ConfigError, match="--listen: expected PORT or HOST:PORT"):
        FeedConfig(Access("http://127.0.0.1"), listen=listen)


def test_an_address_that_is_taken_is_named(history: Path, service: str, free_port: int) -> None:
    with shown(NamedMetrics(), str(free_port)), pytest.raises(ConfigError, match=rf"--listen {free_port}: .*another"):
        run(history, service, Moment(2.2 * HOUR_S, 3 * HOUR_S), listen=str(free_port))


def test_what_is_wrong_is_said_before_anything_is_sent(
    history: Path, service: str, make_app: Any, at_url: Any, tmp_path: Path
) -> None:
    moment = Moment(2.2 * HOUR_S, 3 * HOUR_S)
    with pytest.raises(ConfigError, match=r"no history\.json in it; `reclaim fetch prometheus .* makes one"):
        run(tmp_path / "nowhere", service, moment)
    with locked(history / LOCK, None), pytest.raises(ConfigError, match="another `reclaim feed` uses it"):
        run(history, service, moment)
    with pytest.raises(ConfigError, match=r"--delay must be between 0 and 3600 seconds, got -1"):
        FeedConfig(Access("http://127.0.0.1"), delay_s=-1)
    with pytest.raises(ConfigError, match=r"--keep must be above 0 days, got 0"):
        FeedConfig(Access("http://127.0.0.1"), keep_days=0)
    with pytest.raises(ConfigError, match=r"--service: expected http://… or https://…, .* got 'cart:3000'"):
        FeedConfig(Access("http://127.0.0.1"), "cart:3000")
    with pytest.raises(ConfigError, match=r"--service: holds a password; .*--service-token-file$"):
        FeedConfig(Access("http://127.0.0.1"), "http://me:secret@127.0.0.1")
    with pytest.raises(ConfigError, match=r"--service-ca .*nowhere: not certificates in PEM \(No such file"):
        run(history, "https://127.0.0.1", moment, service_ca=tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"ends in \.csv, \.parquet, \.prom, got the suffix '\.txt'"):
        FeedConfig(Access("http://127.0.0.1"), out=(Path("r.txt"),))
    with pytest.raises(TraceError, match=r"HTTP 500: out of order; given up after 5 tries"):
        run(history, service, moment, failing=(0, 1e9), once=True)
    token = tmp_path / "token"
    token.write_text("0123456789abcdef")
    with make_app(token_file=token) as (app, _), at_url(app) as url, pytest.raises(ServiceError, match="401"):
        run(history, url, moment)
    assert json.loads((history / "history.json").read_text())["end_s"] == T0 + PIECE_S
    assert not known(service)


def test_the_files_of_a_feed_in_its_history_are_not_named_as_files_that_were_not_read(
    history: Path, tmp_path: Path
) -> None:
    for name in (LOCK, PROGRESS, FOLD):
        (history / name).write_text("{}")
    dataset = ingest(history, tmp_path / "dataset", IngestConfig(trace="kubernetes")).dataset
    assert dataset.manifest["not_read"] == []
