"""The writer thread: the order of writes, and that acknowledged writes survive whatever happens afterwards."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from reclaim.data.errors import ModelError, StoreError
from reclaim.data.windows import Windows
from reclaim.features.groups import tier_key
from reclaim.serving.cell.clock import CellClock
from reclaim.serving.cell.following import Following
from reclaim.serving.cell.tracker import FORMAT, Tracker
from reclaim.serving.models.scorer import Scorer
from reclaim.serving.monitoring.metrics import Metrics
from reclaim.serving.monitoring.quality import LiveQuality
from reclaim.serving.monitoring.watch import Watch
from reclaim.serving.storage.store import Mark, Store
from reclaim.serving.wire.cell_schemas import WriteAnswer
from reclaim.serving.wire.errors import BUSY, DISK_FULL, UNAVAILABLE, RequestError
from reclaim.serving.writing import log_records, queue, writer
from reclaim.serving.writing.writer import Writer
from reclaim.training.bundle import Bundle
from tests.serving.cell_fixtures import W, assert_same, fact_rows, loaded, told_by, windows_of
from tests.serving.patience import PATIENCE_S, soon
from tests.serving.writing.running import SETTINGS, Service, appended, crashed, in_parts_of, refuse, refused_with


def test_acknowledged_writes_are_visible_and_survive_a_power_cut(
    service: Service, start: Callable[..., Service]
) -> None:
    answer = service.told({"task": 1, "at": 4}, {"task": 1, "at": 5}, {"task": 2, "limit": None})
    assert (answer.rows, answer.taken, answer.late, answer.repeated) == (3, 2, 0, 0)
    assert answer.refused == {"no_limit": 1}
    assert [(error.row, error.code) for error in answer.errors] == [(2, "no_limit")]
    assert answer.durable
    assert answer.clock_us == service.tracker.clock_us == 1_800_000_000
    assert service.told({"task": 1, "at": 5}, {"task": 1, "at": 3}).model_dump(
        include={"rows", "taken", "late", "repeated"}
    ) == {"rows": 2, "taken": 1, "late": 1, "repeated": 1}
    assert service.facts({"task": 1, "limit": 0.5}, {"task": 7, "limit": 1.0}, estimation={9: False}).taken == 3
    after = crashed(service, start)
    assert_same(told_by(after.tracker, SETTINGS), told_by(service.tracker, SETTINGS))
    assert after.tracker.n_opted_out == 1
    assert after.writer.recovered_rows == 3


def test_a_state_of_a_trace_is_refused_under_the_clock_of_the_machine_and_stays_as_it_is(
    service: Service, start: Callable[..., Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    service.told({"task": 1, "at": 4})
    monkeypatch.setattr(Service, "now_us", 1_800_000_000_000_000)
    wrong = crashed(service, start, clock="unix")
    refused_with(503, "not_ready", lambda: wrong.told({"task": 1, "at": 5}))
    assert "ends 1,500 s after the beginning of 1970" in wrong.writer.state
    assert "start the service with --clock trace, or choose another folder with --state" in wrong.writer.state
    wrong.close()
    assert crashed(wrong, start).tracker.names()[:, 0].tolist() == [1]


def test_only_a_state_that_was_read_is_called_restored(
    service: Service, start: Callable[..., Service], caplog: pytest.LogCaptureFixture
) -> None:
    service.told({"task": 1, "at": 4})
    with caplog.at_level(logging.INFO, logger=writer.__name__):
        start(None)  # as the warm-up before a restart does
        crashed(service, start)
    assert caplog.messages == ["1 tasks restored, 1 windows read from the log"]


def test_without_a_folder_no_write_is_called_durable(start: Callable[..., Service]) -> None:
    service = start(None)
    assert not service.told({"task": 1}).durable
    assert not service.facts({"task": 1, "limit": 2.0}).durable
    assert service.writer.store_problem is None


def test_windows_of_usage_in_another_unit_than_the_limit_are_counted_once_taken(start: Callable[..., Service]) -> None:
    service = start(None)
    answer = service.told(
        {"task": 1, "cpu": 400.0},
        {"task": 2, "cpu": 2.0},
        {"task": 3, "cpu": 2.1},
        {"task": 4, "cpu": 9.0, "limit": None},
    )
    assert (answer.taken, answer.refused) == (3, {"no_limit": 1})
    service.told({"task": 1, "cpu": 400.0})  # a repeat
    service.told({"task": 1, "cpu": 400.0}, {"task": 1, "cpu": 1.0, "at": 1})  # another one, next to a window
    shown = service.writer._metrics.text()
    assert 'reclaim_windows_above_limit_total{resource="cpu"} 2.0' in shown
    assert 'reclaim_windows_above_limit_total{resource="memory"} 0.0' in shown


def test_rows_are_named_as_they_stood_in_the_body_however_they_were_taken(
    start: Callable[..., Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "_SMALL_ROWS", 3)
    in_parts_of(2, monkeypatch)
    service = start(max_tracked=3)
    answer = service.told(
        {"task": 1, "at": 9}, {"task": 2, "at": 0}, {"task": 3, "at": 10}, {"task": 1, "at": 8}, {"task": 1, "at": 8},
        {"task": 2, "at": 4, "limit": None}, {"task": 4, "at": 1}, {"task": 5, "at": 0, "limit": None},
    )  # fmt: skip
    assert (answer.rows, answer.taken, answer.repeated) == (8, 5, 1)
    assert answer.refused == {"too_many_tasks": 1, "no_limit": 1}
    assert [error.row for error in answer.errors] == [2, 7]
    assert service.tracker.names()[:, 0].tolist() == [1, 2, 4]  # a large write is taken in the order of time


def test_small_writes_that_wait_share_a_record_and_keep_their_order_with_facts(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = appended(service, monkeypatch)
    with service.held_up():
        first = [service.write(windows_of({"task": t, "at": k})) for k in range(3) for t in range(4)]
        facts = service.writer.write(fact_rows({"task": 9, "limit": 2.0}))
        second = [service.write(windows_of({"task": 9, "limit": None}, {"task": 1, "at": 2})) for _ in range(2)]
        assert service.writer.waiting == 15
        assert not any(done.done() for done in (*first, facts, *second))
    answers = [done.result(PATIENCE_S) for done in (*first, facts, *second)]
    assert told == [("windows", 12), ("facts", 1), ("windows", 1)]
    assert [a.taken for a in answers] == [1] * 13 + [1, 0]  # the second gets the same answer
    assert [a.repeated for a in answers] == [0] * 13 + [1, 2]


def test_small_writes_and_chunks_of_a_bulk_write_alternate(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "_SMALL_ROWS", 50)
    in_parts_of(100, monkeypatch)
    told = appended(service, monkeypatch)
    append, small = service.store.append, list[Future[WriteAnswer]]()  # type: ignore[union-attr]  # it has one

    def busy(kind: str, payload: Any) -> int:
        """Let another small write wait whenever something is taken, until 20 did."""
        if len(small) < 20:
            begin_us = len(small) * W // 10  # one task alone cannot go far ahead of the others
            small.append(service.write(windows_of({"task": 1_000, "start_us": begin_us, "end_us": begin_us + W // 10})))
        return append(kind, payload)

    monkeypatch.setattr(service.store, "append", busy)
    with service.held_up():
        large = [
            service.write(windows_of(*({"task": t, "at": k} for k in range(4) for t in range(200)))) for _ in range(2)
        ]
    answers = [done.result(PATIENCE_S) for done in large]
    assert [(a.taken, a.repeated) for a in answers] == [(800, 0), (0, 800)]
    assert all(done.result(PATIENCE_S).taken == 1 for done in small)
    rows = [n for _, n in told]
    assert rows[:15:2] == [100] * 8  # neither takes all turns
    assert set(rows[1:15:2]) == {1, 2}  # what came while the one before and the part were taken
    assert sum(rows) == 800 + 20


def test_too_many_waiting_writes_are_refused_with_retry_after(start: Callable[..., Service]) -> None:
    service = start(max_waiting=2)
    with service.held_up():
        waiting = [service.write(windows_of({"task": 1})), service.writer.write(fact_rows({"task": 2, "limit": 1.0}))]
        refused_with(BUSY, "busy", lambda: service.write(windows_of({"task": 3})))
        refused_with(BUSY, "busy", lambda: service.writer.write(fact_rows({"task": 3, "limit": 1.0})))
    assert [done.result(PATIENCE_S).taken for done in waiting] == [1, 1]
    assert service.told({"task": 3}).taken == 1


def test_close_finishes_waiting_writes_and_refuses_new_ones(service: Service, start: Callable[..., Service]) -> None:
    with service.held_up():
        waiting = [service.write(windows_of({"task": t})) for t in range(5)]
        closing = threading.Thread(target=service.close)
        closing.start()
        while not service.writer._queue._closed:
            time.sleep(0.001)
        refused_with(UNAVAILABLE, "stopping", lambda: service.write(windows_of({"task": 9})))
    closing.join(PATIENCE_S)
    assert [done.result(0).taken for done in waiting] == [1] * 5
    refused_with(UNAVAILABLE, "not_ready", lambda: service.write(windows_of({"task": 9})))
    assert start().tracker.names()[:, 0].tolist() == [0, 1, 2, 3, 4]


def test_a_caller_that_leaves_withdraws_nothing_and_breaks_nothing(service: Service) -> None:
    with service.held_up():
        left = service.write(windows_of({"task": 1}))
        assert not left.cancel()
    assert left.result(PATIENCE_S).taken == 1
    assert service.told({"task": 1}).repeated == 1


@pytest.mark.usefixtures("mends_soon")
@pytest.mark.parametrize("large", [False, True])
def test_a_full_disk_refuses_writes_by_name_until_there_is_room(
    service: Service, start: Callable[..., Service], monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    if large:
        monkeypatch.setattr(queue, "_SMALL_ROWS", 0)
        in_parts_of(1, monkeypatch)
    service.told({"task": 1, "at": 0})
    before = told_by(service.tracker, SETTINGS)
    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", refuse(errno.ENOSPC))
        patch.setattr(os, "posix_fallocate", refuse(errno.ENOSPC))
        error = refused_with(DISK_FULL, "not_stored", lambda: service.told({"task": 1, "at": 1}, {"task": 2, "at": 1}))
        assert "disk is full" in error.body.error.message
        assert_same(told_by(service.tracker, SETTINGS), before)
        assert service.writer.store_problem is not None
        assert "disk is full" in service.writer.store_problem
        assert service.writer.state == "ok"  # answers go on
        refused_with(DISK_FULL, "not_stored", lambda: service.told({"task": 1, "at": 1}))
        refused_with(DISK_FULL, "not_stored", lambda: service.facts({"task": 1, "limit": 0.1}))
        time.sleep(0.2)  # looked at again, and still full
        assert service.writer.store_problem is not None
    soon(lambda: service.writer.store_problem is None)
    assert service.told({"task": 1, "at": 1}, {"task": 2, "at": 1}).taken == 2
    after = crashed(service, start)
    assert_same(told_by(after.tracker, SETTINGS), told_by(service.tracker, SETTINGS))


@pytest.mark.usefixtures("mends_soon")
def test_a_start_under_other_settings_answers_while_the_disk_is_full_and_records_them_with_the_next_windows(
    service: Service, start: Callable[..., Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    service.told({"task": 1, "at": 0})
    service.close()
    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", refuse(errno.ENOSPC))
        patch.setattr(os, "posix_fallocate", refuse(errno.ENOSPC))
        other = start(lateness_s=0.0)
        assert other.writer.state == "ok"
        assert len(other.tracker) == 1
        refused_with(DISK_FULL, "not_stored", lambda: other.told({"task": 1, "at": 2}))
    soon(lambda: other.writer.store_problem is None)
    assert other.told({"task": 1, "at": 2}).taken == 1
    assert other.told({"task": 1, "at": 1}).refused == {"too_late": 1}
    after = crashed(other, start, lateness_s=0.0)
    assert_same(told_by(after.tracker, SETTINGS), told_by(other.tracker, SETTINGS))


@pytest.mark.usefixtures("mends_soon")
def test_a_disk_that_fills_up_between_two_chunks_acknowledges_neither_and_a_retry_is_answered_truthfully(
    service: Service, start: Callable[..., Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "_SMALL_ROWS", 3)
    in_parts_of(2, monkeypatch)
    told = [{"task": t, "at": k} for k in range(3) for t in range(2)]
    writev = os.writev
    calls: list[int] = []

    def full_after_one(fd: int, parts: Any) -> int:
        calls.append(fd)
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, "no room")
        return writev(fd, parts)

    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", full_after_one)
        patch.setattr(os, "posix_fallocate", refuse(errno.ENOSPC))
        refused_with(DISK_FULL, "not_stored", lambda: service.told(*told))
    soon(lambda: service.writer.store_problem is None)
    answer = service.told(*told)
    assert (answer.taken, answer.repeated) == (4, 2)
    after = crashed(service, start)
    assert_same(told_by(after.tracker, SETTINGS), told_by(service.tracker, SETTINGS))
    assert after.told(*told).repeated == 6


@pytest.mark.usefixtures("mends_soon")
def test_after_a_failed_sync_no_write_is_acknowledged_until_a_snapshot_is_saved(
    service: Service, start: Callable[..., Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    service.told({"task": 1, "at": 0})
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", refuse(errno.EIO))
        patch.setattr(os, "fsync", refuse(errno.EIO))
        error = refused_with(UNAVAILABLE, "not_stored", lambda: service.told({"task": 1, "at": 1}))
        assert "nothing of it is acknowledged" in error.body.error.message
        refused_with(UNAVAILABLE, "not_stored", lambda: service.told({"task": 1, "at": 1}))
        time.sleep(0.2)
        assert service.writer.store_problem is not None
    soon(lambda: service.writer.store_problem is None)
    assert service.told({"task": 1, "at": 1}).repeated == 1  # it counts since its first try
    assert service.told({"task": 1, "at": 2}).taken == 1
    after = crashed(service, start)
    assert_same(told_by(after.tracker, SETTINGS), told_by(service.tracker, SETTINGS))
    assert after.told({"task": 1, "at": 1}, {"task": 1, "at": 2}).repeated == 2


def test_a_repeat_is_acknowledged_only_once_what_it_repeats_is_on_the_disk(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> NoReturn:
        raise StoreError("the disk does not sync")

    service.told({"task": 1})
    with monkeypatch.context() as patch:
        patch.setattr(service.store, "sync", fails)
        refused_with(UNAVAILABLE, "not_stored", lambda: service.told({"task": 1}))
    assert service.told({"task": 1}).repeated == 1


def test_a_service_that_stops_finishes_its_snapshot_before_another_one_may_have_the_folder(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, begun, order = service.store, threading.Event(), list[str]()
    assert store is not None
    save, close = store.save, store.close

    def slow(*given: Any) -> None:
        begun.set()
        time.sleep(0.05)
        save(*given)
        order.append("saved")

    def closes() -> None:
        order.append("closed")
        close()

    monkeypatch.setattr(store, "save", slow)
    monkeypatch.setattr(store, "close", closes)
    service.snapshotter.settings = SETTINGS.model_copy(update={"snapshot_mib": 0})
    service.told({"task": 1})
    assert begun.wait(PATIENCE_S)
    service.close()
    assert order == ["saved", "closed"]


def test_a_service_whose_disk_failed_ends_without_an_error_of_its_own(
    service: Service, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    service.told({"task": 1, "at": 0})
    monkeypatch.setattr(os, "fdatasync", refuse(errno.EIO))
    monkeypatch.setattr(os, "fsync", refuse(errno.EIO))
    refused_with(UNAVAILABLE, "not_stored", lambda: service.told({"task": 1, "at": 1}))
    service.close()
    assert "may be lost, of which no write was acknowledged: " in caplog.text
    assert "cannot sync the log" in caplog.text


@pytest.mark.usefixtures("mends_soon")
def test_facts_whose_sync_failed_do_not_count(
    service: Service, start: Callable[..., Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    service.told({"task": 1, "at": 0})
    before = told_by(service.tracker, SETTINGS)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", refuse(errno.EIO))
        refused_with(
            UNAVAILABLE, "not_stored", lambda: service.facts({"task": 1, "ended_us": 5}, estimation={1: False})
        )
    assert_same(told_by(service.tracker, SETTINGS), before)
    soon(lambda: service.writer.store_problem is None)
    after = crashed(service, start)
    assert_same(told_by(after.tracker, SETTINGS), before)
    assert after.tracker.n_opted_out == 0


def test_a_snapshot_replaces_the_log_and_a_failed_one_is_not_retried_at_once(
    start: Callable[..., Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    service = start()
    service.snapshotter.settings = SETTINGS.model_copy(update={"snapshot_mib": 0})
    service.told({"task": 1, "at": 0})
    soon(lambda: service.snapshotter.saved_at is not None)
    assert service.store is not None
    size = service.store.snapshot_bytes
    assert size > 0
    tried: list[int] = []

    def save(mark: Mark, *_: object) -> NoReturn:
        tried.append(mark.sequence)
        raise StoreError("no snapshot today")

    with monkeypatch.context() as patch:
        patch.setattr(service.store, "save", save)
        at = 0
        while service.store.log_bytes <= size:
            at += 1
            service.told({"task": 1, "at": at})
        soon(lambda: bool(tried))
        for _ in range(5):
            at += 1
            service.told({"task": 1, "at": at})
        assert len(tried) == 1
        after = crashed(service, start)
    assert_same(told_by(after.tracker, SETTINGS), told_by(service.tracker, SETTINGS))
    assert after.writer.recovered_rows == at


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_fault_of_the_service_rejects_all_writes_and_leaves_none_waiting(
    service: Service, scorer: Scorer, start: Callable[..., Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    service.told({"task": 1, "at": 0})
    monkeypatch.setattr(queue, "_SMALL_ROWS", 2)

    def fault(_: Windows) -> NoReturn:
        raise ValueError("this should not be")

    monkeypatch.setattr(service.tracker, "take", fault)
    with service.held_up():
        small = [service.write(windows_of({"task": t, "at": 1})) for t in range(2)]
        small.append(service.writer.write(fact_rows({"task": 5, "limit": 1.0})))
        large = service.write(windows_of(*({"task": t, "at": 2} for t in range(10))))
    for done in (*small, large):
        refused_with(UNAVAILABLE, "not_ready", lambda done=done: done.result(PATIENCE_S))  # type: ignore[misc]  # bound
    assert "a fault of the service" in service.writer.state
    refused_with(UNAVAILABLE, "not_ready", lambda: service.told({"task": 1, "at": 1}))
    service.writer.promote(scorer)
    service.writer.shadow(None)
    service.close()
    assert start().told({"task": 1, "at": 0}).repeated == 1


def test_a_writer_that_never_started_leaves_no_write_waiting(scorer: Scorer) -> None:
    idle = Writer(Tracker(SETTINGS, CellClock(SETTINGS, lambda: -1)), None, Metrics(), Watch(900.0), SETTINGS)
    idle.state = "damaged"
    idle.promote(scorer)
    refused_with(UNAVAILABLE, "not_ready", lambda: idle.write(fact_rows({"task": 1})))
    idle.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_fault_while_the_state_is_restored_ends_the_service_and_an_unreadable_state_or_a_stop_does_not(
    scorer: Scorer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(name: str, error: Exception | None) -> tuple[str, list[str]]:
        faults: list[str] = []
        tracker = Tracker(SETTINGS, CellClock(SETTINGS, lambda: -1))
        store = Store.open(tmp_path / name, state_version=FORMAT)
        one = Writer(tracker, store, Metrics(), Watch(900.0), SETTINGS, on_fault=lambda: faults.append(name))

        def restored(*_: object) -> tuple[int, dict[str, Any]]:
            if error is not None:
                raise error
            return 0, {}

        monkeypatch.setattr(writer, "replay_log", restored)
        one.start(scorer)
        soon(lambda: one.state != "recovering")
        one.close()
        return one.state, faults

    state, faults = started("fault", ValueError("this should not be"))
    assert "a fault of the service" in state
    assert faults == ["fault"]
    assert started("unreadable", StoreError("of another release")) == ("of another release", [])
    assert started("stopped", None) == ("the service is stopping", [])


def test_a_model_that_waits_for_a_state_that_cannot_be_read_is_taken_for_answers_without_one(
    scorer: Scorer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = threading.Event()

    def unreadable(*_: object) -> NoReturn:
        waits.wait(PATIENCE_S)
        raise StoreError("of another release")

    monkeypatch.setattr(writer, "replay_log", unreadable)
    settings = SETTINGS.model_copy()
    tracker = Tracker(settings, CellClock(settings, lambda: -1))
    store = Store.open(tmp_path / "cell", state_version=FORMAT)
    one = Writer(tracker, store, Metrics(), Watch(900.0), settings)
    one.start(scorer)
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(one.promote, scorer), pool.submit(one.shadow, scorer)]
        soon(lambda: len(one._queue._commands) == 2)
        waits.set()
        for each in waiting:
            each.result(PATIENCE_S)
    assert one.state == "of another release"
    one.close()


def test_a_promotion_waits_for_writes_and_all_later_answers_are_of_the_new_model(
    service: Service, bundle: Bundle
) -> None:
    service.told({"task": 1}, {"task": 2})
    other = Scorer(loaded(bundle, "2"), SETTINGS.cell)
    service.writer.promote(other)
    assert service.tracker.look(service.tracker.names()).scorer is other
    service.told({"task": 1, "at": 1})
    assert service.tracker.look(service.tracker.names()).scorer is other


def test_a_promoted_model_without_a_mean_limit_follows_outcomes_with_that_of_the_cell(
    service: Service, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.told({"task": 1, "limit": 2.0})
    sized: list[Scorer] = []
    monkeypatch.setattr(Following, "resize", lambda _, scorer: sized.append(scorer))
    service.writer.promote(Scorer(loaded(replace(bundle, mean_limit=(np.nan, np.nan)), "2"), SETTINGS.cell))
    assert sized == [service.tracker.look(service.tracker.names()).scorer]
    assert sized[0].mean_limit == service.tracker.size.mean_limit


def test_a_model_or_a_shadow_that_fails_on_the_cells_tasks_is_refused_and_writes_go_on(
    service: Service, scorer: Scorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.told({"task": 1, "at": 0})
    before = told_by(service.tracker, SETTINGS)
    bad = Scorer(scorer.model, SETTINGS.cell)

    def fail(*_: object, **__: object) -> NoReturn:
        raise RuntimeError("not of these tasks")

    monkeypatch.setattr(bad, "score", fail)
    with pytest.raises(ModelError, match="it fails on the tasks of this cell: RuntimeError"):
        service.writer.promote(bad)
    assert_same(told_by(service.tracker, SETTINGS), before)
    service.writer.shadow(bad)
    assert service.told({"task": 1, "at": 1}).taken == 1
    service.writer._watch.shown()  # of all that was sent before
    assert "not of these tasks" in str(service.writer._watch.shadow_problem)
    assert service.told({"task": 1, "at": 2}).taken == 1


def test_large_writes_are_cut_finer_while_small_ones_come(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "_SMALL_ROWS", 2)
    now_s = [0.0]
    monkeypatch.setattr(queue, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(writer, "_CHUNK_ROWS", 10)
    monkeypatch.setattr(writer, "_SMALL_CHUNK_ROWS", 3)
    taken: list[int] = []
    take = service.tracker.take

    def noted(windows: Windows) -> Any:
        taken.append(len(windows))
        return take(windows)

    monkeypatch.setattr(service.tracker, "take", noted)
    service.told(*({"task": t} for t in range(10)))
    assert taken == [10]
    service.told({"task": 99})
    service.told(*({"task": t, "at": 1} for t in range(10)))
    assert taken == [10, 1, 3, 3, 3, 1]
    now_s[0] = 3_600.0
    service.told(*({"task": t, "at": 2} for t in range(10)))
    assert taken[-1] == 10


def test_a_collection_without_estimation_is_not_judged_nor_is_a_task_inside_an_alloc_instance(service: Service) -> None:
    service.facts(estimation={2: False})
    for at in range(40):
        inside = {"task": 3, "at": at, "tier": 2, "in_alloc": True}
        service.told({"task": 1, "at": at, "tier": 0}, {"task": 2, "at": at, "tier": 1}, inside)
    shown = service.writer._watch.shown()
    service.close()
    assert service.writer._watch.shown() == shown  # while it stops, too
    watched = service.writer._watch._served
    assert watched is not None
    judged = watched.quality.numbers().judged[tier_key(np.array([0, 1, 2], np.int8))]
    assert (judged.sum(axis=1) > 0).tolist() == [True, False, False]


def test_a_fault_of_the_watch_ends_the_writer_and_is_not_lost(
    start: Callable[..., Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    service = start()

    def fail(*_: object) -> NoReturn:
        raise RuntimeError("watched badly")

    monkeypatch.setattr(LiveQuality, "observe", fail)
    faults: list[object] = []
    monkeypatch.setattr(service.writer, "_on_fault", lambda: faults.append(1))
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    assert service.told({"task": 1, "at": 0}).taken == 1
    ats = itertools.count(1)

    def ended() -> bool:
        try:
            service.told({"task": 1, "at": next(ats)})
        except RequestError as error:
            assert error.body.error.code == "not_ready"  # noqa: PT017 - it takes a few calls
            return True
        return False

    soon(ended)
    service.writer._thread.join(PATIENCE_S)
    assert faults == [1]
    assert "fault of the service" in service.writer.state
    monkeypatch.undo()


def test_an_estimation_choice_beyond_the_limit_is_refused(start: Callable[..., Service]) -> None:
    service = start(max_tracked=2)
    service.facts(estimation={5: False, 6: False})
    with pytest.raises(RequestError) as refusal:
        service.facts(estimation={1: False})
    assert refusal.value.body.error.code == "too_many_collections"
    assert "send `estimation: true` for those that are gone" in refusal.value.body.error.message
    assert service.tracker.n_opted_out == 2
    assert service.facts(estimation={5: False, 6: False}).taken == 2  # said again, it asks for no more room
    assert service.facts(estimation={5: True, 1: False}).taken == 2
    assert service.tracker.n_opted_out == 2


def test_a_service_that_remembers_more_choices_than_its_limit_takes_what_adds_none(
    start: Callable[..., Service],
) -> None:
    service = start(max_tracked=3)
    service.facts(estimation={5: False, 6: False, 7: False})
    after = crashed(service, start, max_tracked=1)
    assert after.facts({"task": 1, "limit": 1.0}).taken == 1
    assert after.facts(estimation={5: True}).taken == 1  # the two that remain are still more than one
    with pytest.raises(RequestError, match="remembers 1 collections"):
        after.facts(estimation={8: False})


def test_the_watch_forgets_a_task_that_ended_and_one_without_news_for_long(
    start: Callable[..., Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    service, forgotten = start(forget_s=3_600.0, ahead_s=1e6), list[int]()
    monkeypatch.setattr(service.writer._watch, "forget", lambda slot: forgotten.extend(slot.tolist()))
    service.told(*({"task": task} for task in (1, 2, 3)))
    ended, silent = (int(service.tracker.find(np.array([[task, 0]]))[0]) for task in (3, 1))
    service.facts({"task": 3, "ended_us": W})
    assert forgotten == [ended]
    for at in (10, 20, 21):
        service.writer._evict_at = 0.0
        service.told({"task": 2, "at": at})
    soon(lambda: forgotten == [ended, silent])


def test_tasks_without_news_are_looked_for_every_few_seconds_alone(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[int] = []
    expired = service.tracker.expired

    def look() -> Any:
        looked.append(1)
        return expired()

    now_s = [1e6]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(service.tracker, "expired", look)
    for passed_s, times in ((0.0, 1), (4.9, 1), (5.1, 2), (5.2, 2)):
        now_s[0] = 1e6 + passed_s
        for at in range(2):
            service.told({"task": 1, "at": at})
        service.told({"task": 1, "at": 1})  # behind what the one before was followed by
        assert len(looked) == times


@pytest.mark.usefixtures("mends_soon")
def test_tasks_whose_removal_cannot_be_logged_stay_until_it_can(
    start: Callable[..., Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    service = start(forget_s=3_600.0, ahead_s=1e6)
    service.told({"task": 1}, {"task": 2})
    append, refused = service.store.append, list[str]()  # type: ignore[union-attr]  # it has one

    def full(kind: str, payload: Any) -> int:
        if kind == log_records.GONE and not refused:
            refused.append(kind)
            raise StoreError("the disk is full")
        return append(kind, payload)

    monkeypatch.setattr(service.store, "append", full)
    service.told({"task": 2, "at": 10})
    service.told({"task": 2, "at": 20})
    service.writer._evict_at = 0.0
    service.told({"task": 2, "at": 21})
    soon(lambda: bool(refused))
    service.idle()
    assert service.tracker.names()[:, 0].tolist() == [1, 2]
    service.writer._evict_at = 0.0
    service.told({"task": 2, "at": 22})
    soon(lambda: service.tracker.names()[:, 0].tolist() == [2])
    service.told({"task": 2, "at": 23})  # which is synced, and what is logged before it
    assert crashed(service, start).tracker.names()[:, 0].tolist() == [2]


def test_settings_are_in_the_log_once_for_as_long_as_they_stay(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = appended(service, monkeypatch)
    for at in range(3):
        service.told({"task": 1, "at": at})
    assert [kind for kind, _ in records] == [log_records.WINDOWS] * 3
    service.writer._recorded = {}  # as where the disk refused the record of a promotion
    for at in range(3, 6):
        service.told({"task": 1, "at": at})
    assert [kind for kind, _ in records[3:]] == [log_records.SETTINGS, *[log_records.WINDOWS] * 3]


def test_facts_alone_set_no_clock(service: Service) -> None:
    assert service.facts({"task": 1, "limit": 1.0}).clock_us is None
    assert service.told({"task": 1, "at": 0}).clock_us == W


def test_a_limit_without_a_start_counts_from_when_it_came(
    start: Callable[..., Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Service, "now_us", 1_000_000 * W)
    service = start(clock="unix")
    service.facts({"task": 1, "limit": 2.0}, {"task": 2, "limit": 3.0, "since_us": 999_000 * W})
    for one in (service, crashed(service, start, clock="unix")):
        tasks = one.tracker._tasks[one.tracker.find(np.array([[1, 0], [2, 0]]))]
        assert tasks["limit_us"].tolist() == [1_000_000 * W, 999_000 * W]


def test_the_time_of_a_write_is_that_of_each_phase_once(service: Service) -> None:
    service.told({"task": 1})
    shown = service.writer._metrics.text()
    for phase in ("admit", "log", "fold", "score", "publish"):
        assert f'write_phase_duration_seconds_count{{phase="{phase}"}} 1.0' in shown


def test_windows_and_a_promotion_are_followed_by_a_call_with_the_model_that_answers(
    service: Service, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[Scorer] = []
    monkeypatch.setattr(service.writer, "_on_taken", called.append)
    service.told({"task": 1, "at": 0})
    assert called == [service.tracker.look(service.tracker.names()).scorer]
    service.told({"task": 1, "at": 0})  # nothing is taken of a repeat
    assert len(called) == 1
    other = Scorer(loaded(bundle, "2"), SETTINGS.cell)
    service.writer.promote(other)
    assert called[1:] == [other]


def test_failures_of_tasks_are_watched_once_their_facts_are_taken(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed: list[list[int]] = []
    monkeypatch.setattr(service.writer._watch, "failed", lambda *of: failed.append([int(*one) for one in of]))
    service.told({"task": 1, "at": 0})
    (slot,) = service.tracker.find(np.array([[1, 0]])).tolist()
    service.facts({"task": 1, "failed_us": W, "out_of_memory": True})
    assert failed == [[slot, W, 1]]


def test_prices_of_a_shadow_follow_where_it_prices_itself_and_prices_follow_at_all(
    start: Callable[..., Service], scorer: Scorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    following, fixed = start(None), start(None, follow=False)
    assert following.tracker.following is not None  # of the model that answers
    assert fixed.tracker.following is None
    assert following.writer._shadow_following(scorer) is None
    own = Scorer(scorer.model, SETTINGS.cell)
    monkeypatch.setattr(own, "own_price", True)
    assert following.writer._shadow_following(own) is not None
    assert fixed.writer._shadow_following(own) is None
    assert following.writer._shadow_following(None) is None


@pytest.mark.usefixtures("mends_soon")
def test_a_model_that_came_back_while_the_disk_refused_begins_again_after_a_crash_too(
    service: Service, start: Callable[..., Service], scorer: Scorer, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(slots: range) -> None:
        for at in slots:
            cpu = 0.1 if at % 3 else 0.7
            service.told(*({"task": t, "at": at, "cpu": cpu, "memory": cpu, "tier": t % 2} for t in range(8)))

    told(range(30))
    append = service.store.append  # type: ignore[union-attr]  # it has one

    def full(kind: str, payload: Any) -> int:
        if kind == log_records.SETTINGS:
            raise StoreError("the disk is full")
        return append(kind, payload)

    with monkeypatch.context() as patch:
        patch.setattr(service.store, "append", full)
        service.writer.promote(Scorer(loaded(bundle, "2"), SETTINGS.cell))
        service.writer.promote(scorer)  # of neither a record
    told(range(30, 33))
    after = crashed(service, start)
    assert_same(told_by(after.tracker, SETTINGS), told_by(service.tracker, SETTINGS))
