"""Feed where a server, a service, a clock or a disk fails: it makes good what can be, and says the rest."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from reclaim.data import schema as s
from reclaim.data.errors import ConfigError, TraceError
from reclaim.data.fetch.prometheus.client import Client as Server
from reclaim.data.fetch.prometheus.transports import TRANSPORTS, read_query
from reclaim.data.traces.dialect import Metric
from reclaim.data.traces.history import PIECE_S, RECORD, History, RawSeries, cut, read_piece
from reclaim.data.traces.kubernetes.kept import from_bytes
from reclaim.data.traces.kubernetes.live import LiveFold
from reclaim.serving.client.client import Client, ServiceError
from reclaim.serving.feed.job import FOLD, PROGRESS
from tests.data.traces.kubernetes.histories import T0, US, Piece, write_history
from tests.serving.feed.feeding import HOUR_S, SERIES, Known, Late, Moment, known, renamed, run


def test_what_a_server_or_a_service_missed_is_made_good(
    history: Path, service: str, undisturbed: Callable[[float], Known], monkeypatch: pytest.MonkeyPatch
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
    assert known(service) == undisturbed(4)


@pytest.mark.parametrize(("until_s", "come_s", "slowly"), [
    (9_000, 9_400, False),  # one slot, after the one that follows it was sent
    (32_400, 10_500, False),  # five slots
    (9_000, 9_300, True), (11_100, 11_000, True),
])  # fmt: skip
def test_slots_that_were_empty_are_sent_where_their_samples_come_late(
    until_s: float, come_s: float, slowly: bool, history: Path, service: str,
    undisturbed: Callable[[float], Known], monkeypatch: pytest.MonkeyPatch,
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
    of_other = undisturbed(4)
    assert sent[1] <= sent[0]
    if not slowly:
        found, expected = (
            {key: (row["windows"], row[s.END_US]) for key, row in of.items()} for of in (known(service), of_other)
        )
        assert found == expected


@pytest.mark.parametrize("at", [2, 20])
def test_a_service_that_lost_what_it_was_sent_is_sent_all_of_it_again(
    at: int, history: Path, service: str, make_app: Any, at_url: Any, undisturbed: Callable[[float], Known],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
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

        with monkeypatch.context() as patch:
            patch.setattr(Client, "cell_table", moved)
            run(history, service, Moment(2.2 * HOUR_S, 4 * HOUR_S), said=said)
        lost = [line for line in said if "has lost what was sent to it until" in line]
        assert [line.split("; ")[-1] for line in lost] == ["starting again from the history in 30 s"]
        assert known(fresh) == undisturbed(4)


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


def test_a_feed_whose_history_cannot_grow_for_now_does_not_ask_to_be_run_again(
    history: Path, service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = list[str]()

    def fail(*_: Any) -> None:
        raise TraceError("out of order")

    monkeypatch.setattr("reclaim.data.fetch.prometheus.job._read", fail)
    run(history, service, Moment(2.2 * HOUR_S, 5 * HOUR_S), said=said)
    assert f"{history / RECORD}: not written, and tried again later: out of order" in said


def test_while_the_disk_of_the_history_is_full_windows_are_sent_and_then_its_files_are_written_again(
    history: Path, service: str, undisturbed: Callable[[float], Known], monkeypatch: pytest.MonkeyPatch
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
    assert known(service) == undisturbed(5)


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
