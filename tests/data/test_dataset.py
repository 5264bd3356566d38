"""Folders that are replaced whole, whenever a process is killed, and datasets of which a part was lost since."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from reclaim.data import schema as s
from reclaim.data.core.files import locked, remove_left_behind, replaced_folder
from reclaim.data.core.parquet import TableWriter
from reclaim.data.dataset import Dataset
from reclaim.data.errors import ConfigError, SchemaError, TraceError
from reclaim.data.ingest.job import IngestConfig, ingest
from tests import series


def write(path: Path, text: str) -> None:
    with replaced_folder(path) as folder:
        (folder / "a").write_text(text)
        (folder / "b").write_text(text)


def contents(path: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in path.iterdir()}


def die_at(patch: pytest.MonkeyPatch, step: int, *, done: bool) -> list[str]:
    """Let the process die at the ``step``-th rename or removal, before or when it is done; return those begun.

    Nothing is renamed or removed from then on: what a dying block tidies up, a killed process does not.
    """
    begun: list[str] = []

    def dying(name: str, real: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: Any, **options: Any) -> None:
            begun.append(f"{name} {Path(arguments[0]).name}")
            if len(begun) < step or (len(begun) == step and done):
                real(*arguments, **options)
            if len(begun) >= step:
                raise KeyboardInterrupt

        return call

    patch.setattr(os, "replace", dying("replace", os.replace))
    patch.setattr(shutil, "rmtree", dying("remove", shutil.rmtree))
    return begun


@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize("there", [False, True])
def test_killed_at_any_step_a_folder_is_the_old_or_the_new_one_and_the_next_run_leaves_nothing_beside_it(
    there: bool, done: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = ({name: text for name in ("a", "b")} for text in ("old", "new"))
    step, seen = 0, []
    while True:
        step += 1
        path = tmp_path / str(step) / "folder"
        path.parent.mkdir()
        if there:
            write(path, "old")
        with monkeypatch.context() as patch:
            begun = die_at(patch, step, done=done)
            try:
                write(path, "new")
            except KeyboardInterrupt:
                pass
            else:
                break
        if path.exists():
            assert contents(path) in ([old, new] if there else [new])
        seen.append(begun[step - 1])
        remove_left_behind(path)
        assert [p.name for p in path.parent.iterdir()] == [path.name] * (there or path.exists())
        if path.exists():
            assert contents(path) in ([old, new] if there else [new])
        write(path, "new")
        assert contents(path) == new
        assert [p.name for p in path.parent.iterdir()] == [path.name]
    assert "replace new" in seen
    assert ("replace folder" in seen) == there


def test_a_block_that_raises_leaves_the_old_folder_alone(tmp_path: Path) -> None:
    write(tmp_path / "folder", "old")
    with suppress(KeyboardInterrupt), replaced_folder(tmp_path / "folder") as folder:
        (folder / "a").write_text("new")
        raise KeyboardInterrupt
    assert contents(tmp_path / "folder") == {"a": "old", "b": "old"}
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


def test_a_folder_is_replaced_by_one_run_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    with replaced_folder(path) as folder:
        (folder / "a").write_text("first")
        with pytest.raises(ConfigError, match=r"folder: another run is writing it; wait for it"):
            write(path, "second")
        remove_left_behind(path)  # a run at work is no litter
        (folder / "b").write_text("first")
    assert contents(path) == {"a": "first", "b": "first"}
    write(path, "second")
    assert contents(path) == {"a": "second", "b": "second"}


def test_a_lock_that_the_run_before_removed_as_it_ended_is_not_taken_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, staging = tmp_path / "folder", tmp_path / "folder.partial"
    real_open, real_flock, calls = Path.open, fcntl.flock, []

    def late_open(self: Path, *arguments: Any) -> Any:
        calls.append("open")
        if len(calls) == 1:
            staging.rmdir()  # the run before ends between the making of the folder and the opening of the lock
        return real_open(self, *arguments)

    def late_flock(*arguments: Any) -> None:
        calls.append("flock")
        if len(calls) == 3:
            shutil.rmtree(staging)  # or between that and the locking
        real_flock(*arguments)

    monkeypatch.setattr(Path, "open", late_open)
    monkeypatch.setattr(fcntl, "flock", late_flock)
    with replaced_folder(path):
        assert calls == ["open", "open", "flock", "open", "open", "flock"]
        with pytest.raises(ConfigError, match="another run"):
            write(path, "second")


def test_what_an_earlier_version_left_behind_goes_too(tmp_path: Path) -> None:
    for name in ("folder", "folder.partial", "folder.old.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a").write_text("old")
    remove_left_behind(tmp_path / "folder")
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


def test_a_link_to_a_folder_elsewhere_stays_and_that_folder_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "large_disk" / "kept").mkdir(parents=True)
    path = tmp_path / "here" / "folder"
    path.symlink_to(tmp_path / "large_disk" / "kept")
    for text in ("first", "second", "third"):
        write(path, text)
        assert path.is_symlink()
        assert contents(tmp_path / "large_disk" / "kept") == {"a": text, "b": text}
    assert [p.name for folder in ("here", "large_disk") for p in (tmp_path / folder).iterdir()] == ["folder", "kept"]


@pytest.mark.parametrize("left", ["file", "link"])
def test_a_file_or_a_link_that_waits_to_be_deleted_stops_no_later_run(left: str, tmp_path: Path) -> None:
    write(tmp_path / "folder", "old")
    retired = tmp_path / "folder.old.partial"
    retired.write_text("x") if left == "file" else retired.symlink_to(tmp_path)
    write(tmp_path / "folder", "new")
    assert contents(tmp_path / "folder") == {"a": "new", "b": "new"}
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


def test_every_table_of_a_dataset_can_be_read_by_its_name_rejects_too(
    tmp_path: Path, window: Callable[..., Any], write_shard: Callable[..., Path]
) -> None:
    write_shard(tmp_path / "trace", "instance_usage-000000000000", [window(600), window(900, end_time=1)])
    dataset = ingest(tmp_path / "trace", tmp_path / "out", IngestConfig(buckets=1, max_reject_share=0.5)).dataset
    for name in set(s.TABLES).difference(s.OPTIONAL):
        assert dataset.read(name).schema.names == s.TABLES[name].names
    assert dataset.read("rejects") == dataset.table("rejects")
    assert dataset.read("rejects", [s.REJECT_REASON, s.REJECT_LINE]).to_pylist() == [
        {s.REJECT_REASON: "end_time is not after start_time", s.REJECT_LINE: 2}
    ]
    for tasks in (None, dataset.read("tasks")):  # no columns are none, not all
        assert dataset.read("usage", [], tasks).shape == (1, 0)


def test_a_dataset_has_the_name_of_its_folder_or_link_wherever_it_is_opened_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dataset" / "usage").mkdir(parents=True)
    (tmp_path / "link").symlink_to("dataset")
    for folder, path, name in (("dataset", ".", "dataset"), ("dataset/usage", "..", "dataset"), (".", "link", "link")):
        monkeypatch.chdir(tmp_path / folder)
        assert Dataset(Path(path), {}).folder_name == name


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("usage.csv", r"usage\.csv: a file, so no dataset; if it is a trace, `reclaim ingest .*usage\.csv DATASET`"),
        ("dataset/features", r"features: its manifest\.json is not of a dataset; name a folder that `reclaim ingest`"),
    ],
)
def test_a_file_or_a_folder_of_something_else_is_not_to_be_deleted_or_overwritten(
    tmp_path: Path, name: str, message: str
) -> None:
    (tmp_path / "usage.csv").write_text("task,time_s,cpu\n")
    (tmp_path / "dataset" / "features").mkdir(parents=True)
    (tmp_path / "dataset" / "features" / "manifest.json").write_text('{"pipeline": 1}')
    with pytest.raises(ConfigError, match=message):
        Dataset.open(tmp_path / name)


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (
            '{"format_version": 1',
            TraceError,
            r"manifest\.json: not valid JSON \(.*\); delete the folder and run `reclaim ",
        ),
        (
            '["format_version"]',
            TraceError,
            r"manifest\.json: expected a JSON object; delete the folder and run `reclaim ",
        ),
        ('{"format_version": 1}', SchemaError, r"dataset format 1, this version reads 2; delete the folder and run"),
        ('{"format_version": 3}', SchemaError, r"dataset format 3, this version reads 2; delete the folder and run"),
    ],
)
def test_a_manifest_that_is_damaged_older_or_newer_is_refused_with_the_remedy(
    content: str, error: type[Exception], message: str, tmp_path: Path
) -> None:
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(error, match=message):
        Dataset.open(tmp_path)


def test_a_dataset_of_which_no_task_has_a_name_is_not_named() -> None:
    assert [Dataset(Path(), {"counts": counts}).named for counts in ({}, {"names": 0}, {"names": 2})] == [
        False, False, True,
    ]  # fmt: skip


def test_columns_are_read_in_the_order_in_which_they_are_named(
    tmp_path: Path, window: Callable[..., Any], write_shard: Callable[..., Path]
) -> None:
    write_shard(tmp_path / "trace", "instance_usage-000000000000", [window(600)])
    dataset = ingest(tmp_path / "trace", tmp_path / "dataset", IngestConfig(buckets=1)).dataset
    names = [s.INSTANCE_INDEX, s.COLLECTION_ID]  # in the files the collection is the first
    for table in (dataset.usage(0, names), dataset.read("usage", names), dataset.table("tasks", names)):
        assert table.column_names == names


@pytest.mark.parametrize("size", [None, 0, 600])
@pytest.mark.parametrize("name", ["usage/bucket=000.parquet", "events/bucket=000.parquet", "tasks.parquet"])
def test_a_file_that_was_lost_or_cut_off_is_named_with_the_remedy(
    name: str, size: int | None, tmp_path: Path, window: Callable[..., Any], write_shard: Callable[..., Path]
) -> None:
    write_shard(tmp_path / "trace", "instance_usage-000000000000", [window(600)])
    dataset = ingest(tmp_path / "trace", tmp_path / "dataset", IngestConfig(buckets=1)).dataset
    if size is None:
        (dataset.path / name).unlink()
    else:
        os.truncate(dataset.path / name, size)
    table = name.split("/")[0].removesuffix(".parquet")
    reads: dict[str, list[Callable[[], object]]] = {
        "usage": [lambda: dataset.windows(0), lambda: dataset.n_windows_of(0), lambda: dataset.usage(0)],
        "events": [lambda: dataset.events(0)],
        "tasks": [lambda: dataset.table("tasks"), lambda: dataset.owners],
    }
    reads[table].append(lambda: dataset.read(table))
    for read in reads[table]:
        with pytest.raises(TraceError, match=rf"dataset: is damaged .*; delete it and ingest again \({table}.*: \S"):
            read()


def test_a_file_that_the_system_refuses_is_named_and_not_called_damaged(
    tmp_path: Path, window: Callable[..., Any], write_shard: Callable[..., Path]
) -> None:
    write_shard(tmp_path / "trace", "instance_usage-000000000000", [window(600)])
    dataset: Dataset = ingest(tmp_path / "trace", tmp_path / "dataset", IngestConfig(buckets=1)).dataset
    (dataset.path / "tasks.parquet").unlink()
    (dataset.path / "tasks.parquet").symlink_to("tasks.parquet")  # a loop, which root is refused, too
    with pytest.raises(OSError, match=os.strerror(errno.ELOOP)) as caught:
        dataset.table("tasks")
    assert (caught.value.errno, caught.value.filename) == (errno.ELOOP, str(dataset.path / "tasks.parquet"))


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS])
def test_a_folder_in_which_nothing_can_be_written_is_named_with_the_remedy(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path, *_: object) -> None:
        raise OSError(code, os.strerror(code), str(path))

    monkeypatch.setattr(os, "mkdir", refused)
    message = rf"{tmp_path}: nothing can be written into it \({os.strerror(code)}\); let this user write there, or name"
    with pytest.raises(ConfigError, match=message):
        write(tmp_path / "features", "new")
    with pytest.raises(ConfigError, match=message), locked(tmp_path / "tune" / "lock", None):
        pass


def test_a_folder_that_cannot_be_made_ends_in_an_error_and_is_not_tried_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[Path] = []

    def mkdir(path: Path, *_: object) -> None:
        tried.append(path)
        assert len(tried) < 10
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))  # the working folder is deleted

    monkeypatch.setattr(os, "mkdir", mkdir)
    with pytest.raises(FileNotFoundError):
        write(Path("features"), "new")


def test_the_error_of_a_file_that_cannot_be_written_names_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as raised:
        TableWriter(tmp_path / "none" / "a.parquet", pa.schema([("a", pa.int64())]))
    assert raised.value.filename == f"{tmp_path / 'none' / 'a.parquet'}.partial"


def test_a_window_without_a_start_of_its_run_is_of_the_run_of_the_windows_before_it(tmp_path: Path) -> None:
    started = {
        "a": ["", "300", "", "1200", "", ""],
        "b": ["", "900", "900", "", "", "1800"],
        "c": ["300", "", ""],
    }
    lines = [f"{task},{600 + 300 * i},0.1,{run}" for task, of in started.items() for i, run in enumerate(of)]
    mapping = f'{series.CPU}scheduled_us = "started"'
    series.write_raw(tmp_path / "raw", ["task,time_s,cpu,started", *lines], mapping)
    config = IngestConfig(trace="series", mapping=str(tmp_path / "raw" / "mapping.toml"), buckets=1)
    dataset = ingest(tmp_path / "raw", tmp_path / "dataset", config).dataset
    for measured in (True, False):
        windows = dataset.windows(0, measured=measured)
        found = {tuple(of.tolist()) for of in np.split(windows.scheduled_us // 1_000_000, windows.task_starts()[1:-1])}
        assert found == {(-1, 300, 300, 1200, 1200, 1200), (-1, 900, 900, 900, 900, 1800), (300, 300, 300)}
