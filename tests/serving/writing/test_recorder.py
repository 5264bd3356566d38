"""Tests that the windows that a service records become a dataset of the windows that it took."""

from __future__ import annotations

import logging
import tracemalloc
from dataclasses import fields
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from reclaim.data.ingest.job import IngestConfig, ingest
from reclaim.data.windows import concatenate, sort_windows
from reclaim.serving.models.canary import canary_batch
from reclaim.serving.writing.recorder import Recorder


def test_windows_come_back_from_the_dataset_as_they_were_taken(tmp_path: Path) -> None:
    _, windows = canary_batch()
    recorder = Recorder(tmp_path / "seen")
    for part in np.array_split(np.arange(len(windows)), 20):
        recorder.take(windows.take(part))
    recorder.close()
    assert len(list((tmp_path / "seen").iterdir())) > 1  # one for each hour that ended
    dataset = ingest(tmp_path / "seen", tmp_path / "dataset", IngestConfig(trace="recorded")).dataset
    found = sort_windows(concatenate([dataset.windows(bucket) for bucket in range(dataset.n_buckets)]))
    expected = sort_windows(windows)
    for field in fields(expected):
        ours, theirs = getattr(found, field.name), getattr(expected, field.name)
        if field.name not in ("user", "name", "in_alloc"):  # which only the facts of a collection have
            assert np.array_equal(ours, theirs, equal_nan=ours.dtype.kind == "f"), field.name


def test_a_restart_within_the_hour_writes_another_file(tmp_path: Path) -> None:
    _, windows = canary_batch()
    for _ in range(2):
        recorder = Recorder(tmp_path)
        recorder.take(windows.take(np.arange(3)))
        recorder.close()
    assert len(list(tmp_path.iterdir())) == 2
    dataset = ingest(tmp_path, tmp_path.parent / "dataset", IngestConfig(trace="recorded")).dataset
    assert dataset.n_windows == 3  # repeated rows are dropped


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
    (file,) = tmp_path.iterdir()
    assert pq.read_metadata(file).num_rows == 5_000


def test_a_folder_that_cannot_be_written_is_reported_and_nothing_else_fails(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    recorder = Recorder(tmp_path / "file")
    with caplog.at_level(logging.WARNING):
        recorder.take(canary_batch()[1])
        recorder.close()
    assert "windows are not recorded" in caplog.text
