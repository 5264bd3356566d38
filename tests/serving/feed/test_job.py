"""Feed of a service: it knows what it would know of a dataset, wherever it is killed on the way."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyarrow import csv

from reclaim.data import schema as s
from reclaim.data.core.files import locked
from reclaim.data.errors import ConfigError, TraceError
from reclaim.data.fetch.prometheus.client import Access
from reclaim.data.fetch.prometheus.job import shorten_history
from reclaim.data.ingest.job import IngestConfig, ingest
from reclaim.data.traces.dialect import parse_dialect
from reclaim.data.traces.history import PIECE_S, History, RawSeries, cut
from reclaim.data.traces.kubernetes.kept import as_bytes, from_bytes
from reclaim.data.traces.kubernetes.live import LiveFold
from reclaim.data.traces.kubernetes.owners import machine_id
from reclaim.serving.client.client import Client, ServiceError
from reclaim.serving.feed.job import FOLD, LOCK, PROGRESS, FeedConfig
from reclaim.serving.feed.metrics import NamedMetrics, address_of, shown
from reclaim.serving.predictions.histories import histories_of
from tests.data.traces.kubernetes.histories import DIALECT, T0, US, Piece, write_history
from tests.data.traces.kubernetes.test_live import pod, together
from tests.serving.feed.feeding import HOUR_S, SERIES, Known, Moment, known, renamed, run, sent


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
    after: int, answered: bool, history: Path, service: str, undisturbed: Callable[[float], Known],
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

    with monkeypatch.context() as patch:
        patch.setattr(Client, "usage_table", killed)
        run(history, service, Moment(2.2 * HOUR_S, 4 * HOUR_S))
    assert calls == after
    run(history, service, Moment(3.9 * HOUR_S, 5 * HOUR_S))
    assert known(service) == undisturbed(5)


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
    with pytest.raises(ConfigError, match=r"nowhere: not certificates in PEM \(No such file"):
        run(history, "https://127.0.0.1", moment, service_ca=tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"ends in \.csv, \.parquet, \.prom, got the suffix '\.txt'"):
        FeedConfig(Access("http://127.0.0.1"), out=(Path("r.txt"),))
    with pytest.raises(TraceError, match=r"HTTP 500: out of order; given up after 5 tries$"):
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
