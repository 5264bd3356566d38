"""Tests that the windows that a service records become a dataset of the windows that it took."""

from __future__ import annotations

import logging
import os
import tracemalloc
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from reclaim.data import schema as s
from reclaim.data.core.files import replaced_file
from reclaim.data.ingest.job import IngestConfig, ingest
from reclaim.data.windows import concatenate, sort_windows
from reclaim.serving.models.canary import canary_batch
from reclaim.serving.writing.recorder import Recorder
from tests.serving.cell_fixtures import W, fact_rows, windows_of


def test_windows_come_back_from_the_dataset_as_they_were_taken(tmp_path: Path) -> None:
    _, windows = canary_batch()
    of = windows.collection_id
    windows = replace(windows, in_alloc=of == of[0], user=of % 3, name=of)
    recorder = Recorder(tmp_path / "seen")
    for part in np.array_split(np.arange(len(windows)), 20):
        recorder.take(windows.take(part))
    recorder.close()
    assert len(list((tmp_path / "seen").glob("usage-*"))) > 1  # one for each hour that ended
    dataset = ingest(tmp_path / "seen", tmp_path / "dataset", IngestConfig(trace="recorded")).dataset
    found = sort_windows(concatenate([dataset.windows(bucket) for bucket in range(dataset.n_buckets)]))
    expected = sort_windows(windows)
    for field in fields(expected):
        ours, theirs = getattr(found, field.name), getattr(expected, field.name)
        if field.name in ("user", "name"):  # other numbers
            of_theirs = dict(zip(theirs.tolist(), ours.tolist(), strict=True))
            assert [of_theirs[number] for number in theirs.tolist()] == ours.tolist(), field.name
            assert len(set(of_theirs.values())) == len(of_theirs) > 2
        else:
            assert np.array_equal(ours, theirs, equal_nan=ours.dtype.kind == "f"), field.name


def test_a_restart_within_the_hour_writes_another_file(tmp_path: Path) -> None:
    _, windows = canary_batch()
    for _ in range(2):
        recorder = Recorder(tmp_path)
        recorder.take(windows.take(np.arange(3)))
        recorder.close()
    assert len(list(tmp_path.glob("usage-*"))) == 2
    dataset = ingest(tmp_path, tmp_path.parent / "dataset", IngestConfig(trace="recorded")).dataset
    assert dataset.n_windows == 3  # repeated rows are dropped


def test_what_is_said_to_be_written_outlives_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, windows = canary_batch()
    synced, sync = set[int](), os.fsync

    def spy(fd: int) -> None:
        synced.add(os.fstat(fd).st_ino)
        sync(fd)

    monkeypatch.setattr(os, "fsync", spy)
    folder = tmp_path / "new" / "record"
    recorder = Recorder(folder)
    recorder.take(windows.take(np.arange(3)))
    recorder.take_facts(fact_rows({"task": 1, "ended_us": W}))
    assert recorder.close()
    assert {path.stat().st_ino for path in (tmp_path, folder.parent, folder, *folder.iterdir())} == synced


def test_writes_of_one_row_take_little_more_memory_than_their_rows_and_are_all_written(tmp_path: Path) -> None:
    _, windows = canary_batch()
    one = windows.take(np.arange(1))
    recorder = Recorder(tmp_path)
    tracemalloc.start()
    for _ in range(5_000):
        recorder.take(one.take(np.arange(1)))
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 4_000_000  # 5,000 rows of 400 bytes, and 904 writes apart; all apart are 10 MB
    recorder.close()
    (file,) = tmp_path.glob("usage-*")
    assert pq.read_metadata(file).num_rows == 5_000


def test_ends_of_one_task_each_take_little_more_memory_than_their_rows_and_are_all_written(tmp_path: Path) -> None:
    recorder, one = Recorder(tmp_path), fact_rows({"task": 1, "ended_us": W})
    recorder.take_facts(one)  # imports the rest
    tracemalloc.start()
    for _ in range(4_999):
        recorder.take_facts(one)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 1_500_000  # 908 tables apart, 0.6 MB of Python's; all apart are 3.3 MB
    recorder.close()
    (file,) = tmp_path.glob("events-*")
    assert pq.read_metadata(file).num_rows == 5_000


def test_a_file_is_written_before_more_rows_are_in_memory_than_it_may_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reclaim.serving.writing.recorder._MOST_ROWS", 10)
    recorder = Recorder(tmp_path)
    windows = windows_of(*({"task": k} for k in range(1, 7)))  # six of one slot
    ends = fact_rows(*({"task": k, "ended_us": W} for k in range(1, 6)))
    assert not recorder.take(windows)
    assert not recorder.take(windows.take(np.arange(4)))
    assert recorder.take(windows)
    assert recorder.make_room(ends)
    recorder.take_facts(ends)
    assert not recorder.make_room(ends)
    recorder.take_facts(ends)
    assert recorder.take(windows)
    assert recorder.close()
    written = {
        table: [pq.read_metadata(path).num_rows for path in sorted(tmp_path.glob(f"{table}-*"))]
        for table in ("usage", "events")
    }
    assert written == {"usage": [6, 6, 10], "events": [10]}


def test_a_late_window_is_written_with_the_others_and_does_not_turn_the_hour_back(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    for at in (24, 0, 25):  # the second one is two hours late
        assert not recorder.take(windows_of({"at": at}))
    assert recorder.close()
    (file,) = tmp_path.glob("usage-*")
    assert (pq.read_metadata(file).num_rows, int(file.stem.rpartition("-")[2])) == (3, 26 * W)


def test_ends_and_failures_of_tasks_become_events_of_the_dataset(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "seen")
    recorder.take(windows_of({"task": 1}, {"task": 2}, {"task": 3}))
    for _ in range(2):  # a repeated fact is one event
        recorder.take_facts(fact_rows(
            {"task": 1, "ended_us": W}, {"task": 2, "ended_us": 2 * W, "failed": True},
            {"task": 3, "failed_us": W + 5}, {"task": 4, "limit": 1.0},
            {"task": 3, "failed_us": W + 6, "out_of_memory": True},
            {"task": 5, "failed_us": W + 7, "ended_us": W + 8, "out_of_memory": True},
            {"task": 6, "failed_us": W + 7, "ended_us": W + 8, "failed": True, "out_of_memory": False},
        ))  # fmt: skip
    recorder.close()
    dataset = ingest(tmp_path / "seen", tmp_path / "dataset", IngestConfig(trace="recorded")).dataset
    names = [s.COLLECTION_ID, s.TIME_US, s.EVENT_TYPE, s.OUT_OF_MEMORY]
    events = [row for bucket in range(dataset.n_buckets) for row in dataset.events(bucket, names).to_pylist()]
    assert sorted(tuple(row[name] for name in names) for row in events) == [
        (1, W, s.EventType.FINISH, None), (2, 2 * W, s.EventType.FAIL, None), (3, W + 5, s.EventType.FAIL, None),
        (3, W + 6, s.EventType.FAIL, True), (5, W + 7, s.EventType.FAIL, True), (5, W + 8, s.EventType.FINISH, None),
        (6, W + 7, s.EventType.FAIL, None), (6, W + 8, s.EventType.FAIL, False),
    ]  # fmt: skip


def test_a_recording_of_before_failures_said_what_they_were_is_read(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "seen")
    recorder.take(windows_of({"task": 1}))
    recorder.take_facts(fact_rows({"task": 1, "failed_us": W + 5}))
    recorder.close()
    (file,) = (tmp_path / "seen").glob("events-*")
    pq.write_table(pq.read_table(file).drop_columns(s.OUT_OF_MEMORY), file)
    dataset = ingest(tmp_path / "seen", tmp_path / "dataset", IngestConfig(trace="recorded")).dataset
    assert sum(dataset.events(bucket).num_rows for bucket in range(dataset.n_buckets)) == 1


def test_windows_that_cannot_be_written_are_dropped_counted_and_reported_once_until_it_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    counts = {"written": 0, "dropped": 0}

    def count(outcome: str, n: int) -> None:
        counts[outcome] += n

    recorder = Recorder(tmp_path / "seen", count)
    (tmp_path / "seen").touch()
    hours = [windows_of({"task": 1, "at": at}, {"task": 2, "at": at}) for at in range(0, 60, 12)]
    with caplog.at_level(logging.WARNING):
        recorder.take_facts(fact_rows({"task": 1, "ended_us": 0}))
        for _ in range(2):  # of ends alone, too
            assert not recorder.close()
            recorder.take_facts(fact_rows({"task": 1, "ended_us": 0}))
        for windows in hours[:4]:
            recorder.take(windows)
        assert counts == {"written": 0, "dropped": 6}
        assert recorder._rows == 2  # the hour under way
        (tmp_path / "seen").unlink()  # there is room again
        recorder.take(hours[4])
        recorder.close()
    assert counts == {"written": 4, "dropped": 6}
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "0 windows and 1 ends of tasks are not recorded", "windows and ends of tasks are recorded again; 9 were not",
    ]  # fmt: skip


def test_a_file_that_another_service_writes_at_the_moment_costs_the_hour_and_no_write(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    for outcome in (False, True):
        recorder.take(windows_of({"task": 1}))
        with replaced_file(tmp_path / f"usage-{W:020d}.parquet") if not outcome else nullcontext():
            assert recorder.close() is outcome


def test_what_a_killed_service_left_unfinished_keeps_no_dataset_from_the_rest_and_goes_with_its_age(
    tmp_path: Path,
) -> None:
    recorder = Recorder(tmp_path / "seen", keep_days=1.0)
    recorder.take(windows_of({"task": 1}))
    recorder.close()
    left = tmp_path / "seen" / f"usage-{2 * W:020d}.parquet.partial"
    left.touch()
    assert ingest(tmp_path / "seen", tmp_path / "dataset", IngestConfig(trace="recorded")).dataset.n_windows == 1
    a_day_of_files(tmp_path / "seen")
    recorder.take(windows_of({"at": 3 * 288}))
    recorder.close()
    assert not left.exists()


def a_day_of_files(folder: Path) -> None:
    """Make a file for each hour from the second to the 25th."""
    for hour in range(1, 25):
        (folder / f"usage-{hour * s.HOUR_US:020d}.parquet").touch()


def test_only_files_of_the_last_days_are_kept_where_that_is_asked_for(tmp_path: Path) -> None:
    other = tmp_path / "usage-notes.txt"
    other.touch()
    for days, kept in ((None, 27), (1.0, 24)):
        folder = tmp_path / str(days)
        recorder = Recorder(folder, keep_days=days)
        for at in range(0, 27 * 12, 12):
            recorder.take(windows_of({"at": at}))
            recorder.take_facts(fact_rows({"task": 1, "failed_us": at * W + 5}))
        recorder.close()
        for table in ("usage", "events"):
            ends_us = [int(path.stem.rpartition("-")[2]) for path in sorted(folder.glob(f"{table}-*"))]
            assert ends_us == [hour * s.HOUR_US + W for hour in range(27 - kept, 27)]
    assert other.exists()


def test_a_window_far_ahead_of_all_others_deletes_nothing_and_names_no_later_file(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, keep_days=1.0)
    for at in (0, 12, 3_650 * 288, 24):  # ten years ahead
        recorder.take(windows_of({"at": at}))
    recorder.close()
    recorder.take(windows_of({"at": 36}))
    recorder.close()
    ends_us = [int(path.stem.rpartition("-")[2]) for path in sorted(tmp_path.glob("usage-*"))]
    assert ends_us == [W, s.HOUR_US + W, 3 * s.HOUR_US + W, 3_650 * s.DAY_US + W]


def test_hours_later_than_the_one_that_is_written_push_nothing_out(tmp_path: Path) -> None:
    for day in (100, 0):  # the clock is set right, or an earlier trace follows
        recorder = Recorder(tmp_path, keep_days=1.0)
        for hour in range(day * 24, day * 24 + 30):
            recorder.take(windows_of({"at": hour * 12}))
        recorder.close()
    ends_us = [int(path.stem.rpartition("-")[2]) for path in sorted(tmp_path.glob("usage-*"))]
    assert ends_us == [hour * s.HOUR_US + W for hour in (*range(6, 30), *range(2_406, 2_430))]


def test_ends_that_come_before_the_first_window_are_kept_as_long_as_its_hour(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, keep_days=1.0)
    recorder.take_facts(fact_rows({"task": 1, "ended_us": s.HOUR_US}))
    for hour in (24, 25):
        recorder.take(windows_of({"at": hour * 12}))
    recorder.close()
    assert [path.name for path in tmp_path.glob("events-*")] == [f"events-{s.HOUR_US:020d}.parquet"]


def test_an_old_file_that_cannot_be_deleted_is_reported_and_what_was_written_counts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    counts = {"written": 0, "dropped": 0}

    def count(outcome: str, n: int) -> None:
        counts[outcome] += n

    old = tmp_path / f"usage-{W:020d}.parquet"
    old.mkdir()
    a_day_of_files(tmp_path)
    recorder = Recorder(tmp_path, count, keep_days=1.0)
    recorder.take(windows_of({"at": 3 * 288}))
    assert recorder.close()
    assert counts == {"written": 1, "dropped": 0}
    assert f"{old} is older than what is kept, and cannot be deleted" in caplog.text
