"""Recording as a service takes windows and facts: each once, whatever the disk refuses and where the process ends."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from reclaim.data import schema as s
from reclaim.data.errors import StoreError
from reclaim.data.windows import Windows
from reclaim.serving.wire.errors import DISK_FULL, UNAVAILABLE
from reclaim.serving.writing import log_records
from tests.serving.cell_fixtures import W, usage_rows, windows_of
from tests.serving.patience import PATIENCE_S, soon
from tests.serving.writing.running import Service, appended, crashed, refuse, refused_with


def test_a_refused_window_is_neither_recorded_nor_counted_twice(start: Callable[..., Service], tmp_path: Path) -> None:
    service = start(None, record=tmp_path / "seen")
    windows = windows_of({"task": 1, "at": 1}, {"task": 2, "limit": None}, {"task": 3, "at": 1})
    rows = usage_rows(windows)
    rows.refusals.add("invalid", np.array([3]), "not a number")
    assert service.writer.write(rows).result(PATIENCE_S).refused == {"invalid": 1, "no_limit": 1}
    service.close()
    (usage,) = (tmp_path / "seen").glob("usage-*")
    assert pq.read_table(usage)[s.COLLECTION_ID].to_pylist() == [1, 3]
    shown = service.writer._metrics.text()
    for outcome, n in {"taken": 2, "no_limit": 1, "refused": 1}.items():
        assert f'reclaim_windows_total{{outcome="{outcome}"}} {n}.0' in shown


def test_a_service_keeps_the_record_of_as_many_days_as_it_is_set_to(
    start: Callable[..., Service], tmp_path: Path
) -> None:
    old, *_ = files = [tmp_path / "seen" / f"usage-{hour * s.HOUR_US:020d}.parquet" for hour in range(24)]
    old.parent.mkdir()
    for file in files:
        file.touch()
    for days in (None, 1.0):
        service = start(None, record=tmp_path / "seen", record_days=days)
        service.told({"task": 1, "at": 3 * 288})
        service.close()
        assert old.exists() is (days is None)


def test_what_is_recorded_before_facts_is_noted_before_them_in_the_log(
    start: Callable[..., Service], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reclaim.serving.writing.recorder._MOST_ROWS", 2)
    service = start(record=tmp_path / "seen")
    records = appended(service, monkeypatch)
    service.told({"task": 1}, {"task": 2})
    service.facts({"task": 1, "ended_us": W})
    assert [kind for kind, _ in records] == [log_records.WINDOWS, log_records.RECORDED, log_records.FACTS]
    again = crashed(service, start, record=tmp_path / "again")
    again.close()
    assert [path.name.split("-")[0] for path in (tmp_path / "again").iterdir()] == ["events"]


def test_a_record_that_cannot_be_written_is_counted_and_holds_up_no_write(
    start: Callable[..., Service], tmp_path: Path
) -> None:
    (tmp_path / "seen").touch()
    service = start(None, record=tmp_path / "seen")
    assert [service.told({"task": 1, "at": at}).taken for at in (0, 12)] == [1, 1]
    (tmp_path / "seen").unlink()
    service.facts({"task": 1, "ended_us": 20 * W, "failed": True})
    service.close()
    shown = service.writer._metrics.text()
    for outcome in ("dropped", "written"):
        assert f'reclaim_recorded_windows_total{{outcome="{outcome}"}} 1.0' in shown
    assert {path.name.split("-")[0] for path in (tmp_path / "seen").iterdir()} == {"usage", "events"}


@pytest.mark.parametrize("store", [None, "store"])
def test_a_failure_that_is_reported_behind_the_end_of_its_task_is_recorded_and_does_not_bring_it_back(
    start: Callable[..., Service], tmp_path: Path, store: str | None
) -> None:
    service = start(store, record=tmp_path / "seen")
    service.told({"task": 1, "at": 3})
    service.facts({"task": 1, "ended_us": 4 * W})
    assert service.facts({"task": 1, "failed_us": 4 * W - 1}, {"task": 2, "limit": 1.0}).refused == {"ended": 1}
    for one in (service, service if store is None else crashed(service, start, record=tmp_path / "again")):
        assert one.tracker.names().tolist() == [[2, 0]]
        one.close()
    for events in tmp_path.glob("*/events-*"):
        assert pq.read_table(events)[s.TIME_US].to_pylist() == [4 * W, 4 * W - 1]
    assert (tmp_path / "again").exists() is (store is not None)


def test_facts_of_which_a_full_disk_took_a_part_change_no_state_after_a_crash_either(
    start: Callable[..., Service], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = start(record=tmp_path / "seen")
    service.told({"task": 1}, {"task": 2})
    service.facts({"task": 1, "ended_us": 4 * W})
    append, appended_kinds = service.store.append, list[str]()  # type: ignore[union-attr]  # it has one

    def full_after_one(kind: str, payload: Any) -> int:
        if appended_kinds:
            raise StoreError("the disk is full")
        appended_kinds.append(kind)
        return append(kind, payload)

    with monkeypatch.context() as patch:
        patch.setattr(service.store, "append", full_after_one)
        failed = {"task": 1, "failed_us": 4 * W - 1}  # reported behind its end
        refused_with(UNAVAILABLE, "not_stored", lambda: service.facts(failed, {"task": 2, "ended_us": W}))
    service.told({"task": 2, "at": 1})
    after = crashed(service, start)
    assert after.tracker.look(np.array([[2, 0]])).task["windows"].tolist() == [2]


@pytest.mark.usefixtures("mends_soon")
def test_what_a_full_disk_refused_is_recorded_when_it_is_sent_again_and_once(
    start: Callable[..., Service], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = start(record=tmp_path / "seen")
    service.told({"task": 1, "at": 0})
    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", refuse(errno.ENOSPC))
        patch.setattr(os, "posix_fallocate", refuse(errno.ENOSPC))
        refused_with(DISK_FULL, "not_stored", lambda: service.told({"task": 1, "at": 1}))
        refused_with(DISK_FULL, "not_stored", lambda: service.facts({"task": 1, "ended_us": 2 * W}))
    soon(lambda: service.writer.store_problem is None)
    service.told({"task": 1, "at": 1})
    service.facts({"task": 1, "ended_us": 2 * W})
    service.close()
    for table, name, times_us in (("usage", s.END_US, [W, 2 * W]), ("events", s.TIME_US, [2 * W])):
        files = sorted((tmp_path / "seen").glob(f"{table}-*"))  # a snapshot begins another one
        assert sorted(at_us for file in files for at_us in pq.read_table(file)[name].to_pylist()) == times_us


@pytest.mark.parametrize("saved", [False, True])
def test_a_crash_loses_nothing_of_the_record_and_what_was_written_is_not_written_again(
    start: Callable[..., Service], tmp_path: Path, saved: bool
) -> None:
    def recorded(name: str) -> list[tuple[int, int]]:
        tables = [pq.read_table(file) for file in sorted((tmp_path / name).glob("usage-*"))]
        return [row for table in tables for row in zip(*(table[c].to_pylist() for c in names), strict=True)]

    names = (s.COLLECTION_ID, s.END_US)
    service = start(record=tmp_path / "before")
    for at in (10, 11, 12):  # an hour is over with the second
        service.told({"task": 1, "at": at}, {"task": 2, "at": at})
    if saved:
        service.save()
    service.told({"task": 3, "at": 0, "limit": None}, {"task": 1, "at": 13}, {"task": 4, "at": 1})  # the last one late
    service.facts({"task": 2, "ended_us": 13 * W})
    after = crashed(service, start, record=tmp_path / "after")
    written = recorded("before")
    after.told({"task": 1, "at": 14})
    after.close()
    hour = [(task, at * W) for at in (11, 12, 13) for task in (1, 2)]
    assert written == (hour if saved else hour[:2])
    later = recorded("after")
    assert later == [*hour[len(written) :], (1, 14 * W), (4, 2 * W), (1, 15 * W)]
    (events,) = (tmp_path / "after").glob("events-*")
    assert pq.read_table(events)[s.TIME_US].to_pylist() == [13 * W]
    again = start(after.store.folder.name, record=tmp_path / "again")  # type: ignore[union-attr]  # it has a store
    again.close()
    assert not (tmp_path / "again").exists()


def test_a_start_that_fails_within_the_log_leaves_what_is_not_recorded_to_the_next_one(
    start: Callable[..., Service], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = start(record=tmp_path / "before")
    for at in (12, 13, 14):  # of one hour
        service.told({"task": 1, "at": at})
    read, seen = log_records.read_windows, list[Windows]()

    def breaks(payload: memoryview) -> Windows:
        if len(seen) == 2:
            raise StoreError("the disk does not read")
        seen.append(read(payload))
        return seen[-1]

    with monkeypatch.context() as patch:
        patch.setattr(log_records, "read_windows", breaks)
        failed = crashed(service, start, record=tmp_path / "failed")
        failed.close()
    assert failed.writer.state == "the disk does not read"
    after = start(failed.store.folder.name, record=tmp_path / "after")  # type: ignore[union-attr]  # it has a store
    after.close()
    (usage,) = (tmp_path / "after").glob("usage-*")
    assert pq.read_table(usage)[s.END_US].to_pylist() == [13 * W, 14 * W, 15 * W]
