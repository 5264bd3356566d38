"""Ingest: every good row arrives exactly, every bad one is named, nothing is left half written."""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import IO, Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import reclaim.data.ingest.job as ingest_module
from reclaim.data import schema as s
from reclaim.data.core.duck import open_bytes
from reclaim.data.dataset import Dataset
from reclaim.data.errors import ConfigError, SchemaError, TraceError
from reclaim.data.ingest.job import IngestConfig, ingest
from reclaim.data.ingest.readers import json_lines as jsonlines
from reclaim.data.windows import MEMORY_MAX, P50, P90, P99, P100, Windows, concatenate
from tests.folders import contents

Maker = Callable[..., dict[str, Any]]
Writer = Callable[..., Path]

USAGE, EVENTS = "instance_usage-000000000000", "instance_events-000000000000"
ONE_BUCKET = IngestConfig(buckets=1)


def only_windows(dataset: Dataset) -> Windows:
    return concatenate([dataset.windows(b) for b in range(dataset.n_buckets)])


def test_a_window_arrives_with_every_field_and_the_limit_in_force_at_its_start(
    tmp_path: Path, window: Maker, event: Maker, write_shard: Writer
) -> None:
    write_shard(tmp_path / "cell", USAGE, [window(900), window(1200), window(1500)])
    write_shard(
        tmp_path / "cell",
        EVENTS,
        [
            event(0, 0),
            event(910, 3),  # scheduled ten seconds into the first window, as traces have it
            event(1400, 10, resource_request={"cpus": 0.6, "memory": 0.8}),  # in the second: in force from the third
        ],
    )
    dataset = ingest(tmp_path / "cell", tmp_path / "out", ONE_BUCKET).dataset
    table = dataset.usage(0)
    assert table.schema.names == s.USAGE.names
    assert table[s.COLLECTION_ID].to_pylist() == [9007199254740993] * 3
    assert table[s.CPU_LIMIT].to_pylist() == [0.3, 0.3, 0.6]
    assert table[s.MEMORY_LIMIT].to_pylist() == [0.5, 0.5, 0.8]
    assert table[s.SCHEDULED_US].to_pylist() == [910_000_000] * 3
    assert table[s.TIER].to_pylist() == [s.TIERS.index("prod")] * 3
    row = table.to_pylist()[0]
    assert (row[s.START_US], row[s.END_US]) == (900_000_000, 1_200_000_000)
    assert (row[s.CPU_MEAN], row[s.CPU_MAX], row[s.CPU_SAMPLE]) == (0.1, 0.4, 0.12)
    assert (row[s.MEMORY_MEAN], row[s.MEMORY_MAX]) == (0.2, 0.25)
    assert (row[s.MEMORY_ASSIGNED], row[s.PAGE_CACHE], row[s.SAMPLE_RATE_HZ]) == (0.5, 0.01, 1.0)
    assert row[s.CPI] is None
    assert row[s.CPU_TAIL_PERCENTILES] is None
    assert row[s.ALLOC_COLLECTION_ID] is None
    windows = dataset.windows(0)
    assert windows.percentiles[0, [P50, P90, P100]].tolist() == pytest.approx([0.1, 0.2, 0.4])
    assert np.isnan(windows.percentiles[0, P99])


def test_a_restart_inside_a_window_brings_its_start_and_its_limit_with_that_window(
    tmp_path: Path, window: Maker, event: Maker, write_shard: Writer
) -> None:
    write_shard(tmp_path / "cell", USAGE, [window(t) for t in (600, 900, 1800, 2100)])
    larger = {"resource_request": {"cpus": 0.9, "memory": 0.7}, "priority": "360"}
    write_shard(
        tmp_path / "cell",
        EVENTS,
        [event(590, 0), event(595, 3), event(1100, 5), event(1805, 0, **larger), event(1810, 3, **larger)],
    )
    table = ingest(tmp_path / "cell", tmp_path / "out", ONE_BUCKET).dataset.usage(0)
    assert table[s.SCHEDULED_US].to_pylist() == [595_000_000] * 2 + [1_810_000_000] * 2
    assert table[s.CPU_LIMIT].to_pylist() == [0.3, 0.3, 0.9, 0.9]
    assert table[s.MEMORY_LIMIT].to_pylist() == [0.5, 0.5, 0.7, 0.7]
    assert table[s.PRIORITY].to_pylist() == [200, 200, 360, 360]


def test_enums_may_be_names_and_ids_may_be_numbers(
    tmp_path: Path, window: Maker, event: Maker, write_shard: Writer
) -> None:
    write_shard(tmp_path / "cell", USAGE, [window(900, collection_id=2**62 + 1, collection_type="ALLOC_SET")])
    write_shard(tmp_path / "cell", EVENTS, [event(0, 3, type="SCHEDULE", collection_id=2**62 + 1)])
    dataset = ingest(tmp_path / "cell", tmp_path / "out", ONE_BUCKET).dataset
    assert dataset.usage(0)[s.COLLECTION_ID].to_pylist() == [2**62 + 1]
    assert dataset.usage(0)[s.COLLECTION_TYPE].to_pylist() == [1]
    assert dataset.events(0)[s.EVENT_TYPE].to_pylist() == [s.EventType.SCHEDULE]
    assert dataset.usage(0)[s.CPU_LIMIT].to_pylist() == [0.3]


def test_a_time_one_past_the_documented_end_means_after_the_trace(
    tmp_path: Path, window: Maker, event: Maker, write_shard: Writer
) -> None:
    write_shard(tmp_path / "cell", USAGE, [window(900)])
    write_shard(
        tmp_path / "cell", EVENTS, [event(0, 3), event(0, 5, time=str(2**63)), event(0, 5, time=str(2**63 - 1))]
    )
    dataset = ingest(tmp_path / "cell", tmp_path / "out", ONE_BUCKET).dataset
    assert dataset.events(0)[s.TIME_US].to_pylist() == [0, s.AFTER_TRACE_US]  # the two are now one and the same
    assert dataset.manifest["rejects"] == {}


def test_too_many_rejects_fail_the_run_with_a_summary_and_leave_no_dataset(
    tmp_path: Path, window: Maker, write_shard: Writer
) -> None:
    write_shard(tmp_path / "cell", USAGE, [window(900), "not json"])
    with pytest.raises(TraceError, match=r"1 of 2 lines rejected.*not valid JSON \(1\); first .* line 2"):
        ingest(tmp_path / "cell", tmp_path / "out", ONE_BUCKET)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("damage", ["truncated", "empty", "not gzip"])
def test_a_damaged_file_is_named_the_others_are_kept_and_a_repair_goes_on_from_there(
    damage: str, tmp_path: Path, window: Maker, write_shard: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = tmp_path / "cell"
    write_shard(cell, USAGE, [window(900)])
    path = write_shard(cell, "instance_usage-000000000001", [window(1200), window(1500, instance_index=str(10**9))])
    whole = path.read_bytes()
    path.write_bytes({"truncated": whole[: len(whole) // 2], "empty": b"", "not gzip": b"x" * 99}[damage])
    with pytest.raises(TraceError, match=r"1 damaged file: .*instance_usage-000000000001"):
        ingest(cell, tmp_path / "out", ONE_BUCKET)
    assert not (tmp_path / "out").exists()
    skipping = ingest(cell, tmp_path / "skipping", IngestConfig(buckets=1, skip_damaged=True)).dataset
    assert skipping.n_windows == 1
    assert [entry["file"] for entry in skipping.manifest["damaged"]] == ["instance_usage-000000000001.json.gz"]
    path.write_bytes(whole)
    read: list[str] = []

    def noting(file: Path) -> IO[bytes]:
        read.append(file.name)
        return open_bytes(file)

    monkeypatch.setattr(jsonlines, "open_bytes", noting)
    assert ingest(cell, tmp_path / "out", ONE_BUCKET).dataset.n_windows == 3
    assert set(read) == {"instance_usage-000000000001.json.gz"}


@pytest.mark.parametrize("part", ["page", "footer"])
def test_a_parquet_file_that_is_damaged_inside_is_named_and_the_others_are_kept(part: str, tmp_path: Path) -> None:
    (tmp_path / "trace").mkdir()
    for k in range(2):
        rows = pa.table({"vm": [str(k)] * 9, "t": [300.0 * n for n in range(9)], "used": [0.5] * 9})
        pq.write_table(rows, tmp_path / "trace" / f"{k}.parquet")
    damaged = tmp_path / "trace" / "1.parquet"
    content = bytearray(damaged.read_bytes())
    at = 4 if part == "page" else len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    content[at : at + 16] = b"\xff" * 16
    damaged.write_bytes(content)
    (tmp_path / "m.toml").write_text(
        'task = "vm"\ntime = "t"\ntime_unit = "s"\nwindow_s = 300\n[columns]\ncpu_mean = "used"\ncpu_limit = 4.0\n'
    )
    config = IngestConfig(trace="series", mapping=str(tmp_path / "m.toml"), buckets=1)
    with pytest.raises(TraceError, match=r"1 damaged file: .*1\.parquet: cannot be read: "):
        ingest(tmp_path / "trace", tmp_path / "out", config)
    dataset = ingest(tmp_path / "trace", tmp_path / "out", replace(config, skip_damaged=True)).dataset
    assert (dataset.n_windows, [entry["file"] for entry in dataset.manifest["damaged"]]) == (9, ["1.parquet"])


@pytest.mark.parametrize("reader", ["json_lines", "csv_parquet"])
def test_a_full_disk_is_never_taken_for_a_damaged_file(
    reader: str, tmp_path: Path, window: Maker, write_shard: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell, config = tmp_path / "cell", IngestConfig(buckets=1, skip_damaged=True)
    if reader == "json_lines":
        write_shard(cell, USAGE, [window(900, collection_type="JOB")])
    else:
        cell.mkdir()
        (cell / "a.csv").write_text("vm,t,used\n1,300,1\n")
        (tmp_path / "m.toml").write_text(
            'task = "vm"\ntime = "t"\ntime_unit = "s"\nwindow_s = 300\n[columns]\ncpu_mean = "used"\ncpu_limit = 4.0\n'
        )
        config = IngestConfig(trace="series", mapping=str(tmp_path / "m.toml"), buckets=1, skip_damaged=True)

    def full(*_: object) -> None:
        raise duckdb.IOException('IO Error: Could not write file "x": No space left on device')

    with monkeypatch.context() as patch:
        patch.setattr(f"reclaim.data.ingest.readers.{reader}.copy_rows", full)
        with pytest.raises(OSError, match="No space left on device, while reading"):
            ingest(cell, tmp_path / "out", config)
    assert not (tmp_path / "out").exists()
    dataset = ingest(cell, tmp_path / "out", config).dataset
    assert (dataset.n_windows, dataset.manifest["damaged"]) == (1, [])


def test_a_missing_folder_and_a_folder_without_usage_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere: no such folder"):
        ingest(tmp_path / "nowhere", tmp_path / "out", ONE_BUCKET)
    (tmp_path / "usage.csv").write_text("vm,t,used\n")
    with pytest.raises(ConfigError, match=r"usage\.csv: a file; name the folder that it is in"):
        ingest(tmp_path / "usage.csv", tmp_path / "out", ONE_BUCKET)
    (tmp_path / "cell").mkdir()
    with pytest.raises(TraceError, match=r"a google-v3 trace \(looked for instance_usage.* more; there is nothing\);"):
        ingest(tmp_path / "cell", tmp_path / "out", ONE_BUCKET)
    (tmp_path / "cell" / "vms.json").touch()
    with pytest.raises(TraceError, match=r"there is vms\.json\); pass their folder, or name their format by --trace"):
        ingest(tmp_path / "cell", tmp_path / "out", ONE_BUCKET)
    (tmp_path / "cell" / "vms.json").unlink()
    with pytest.raises(TraceError, match=r"looked for \*\.parquet, .*; pass their folder, or name their format"):
        ingest(tmp_path / "cell", tmp_path / "out", IngestConfig(trace="series", mapping="azure"))


def test_a_misspelled_field_that_is_needed_is_named_with_the_known_ones(
    tmp_path: Path, window: Maker, write_shard: Writer
) -> None:
    write_shard(tmp_path / "cell", USAGE, [window(900, averge_usage={"cpus": 1}, average_usage=None)])
    with pytest.raises(SchemaError, match=r"unknown field averge_usage; known are .*average_usage"):
        ingest(tmp_path / "cell", tmp_path / "out", ONE_BUCKET)
    assert not (tmp_path / "out").exists()


def test_a_misspelled_field_inside_a_measurement_is_named(tmp_path: Path, window: Maker, write_shard: Writer) -> None:
    write_shard(tmp_path / "cell", USAGE, [window(900, average_usage={"cpus": 0.1, "mem": 0.2})])
    with pytest.raises(SchemaError, match=r"unknown field average_usage\.mem"):
        ingest(tmp_path / "cell", tmp_path / "out", ONE_BUCKET)


def test_a_source_edited_to_the_same_length_is_another_source(
    tmp_path: Path, window: Maker, write_shard: Writer
) -> None:
    path = write_shard(tmp_path / "cell", USAGE, [window(900)])
    ingest(tmp_path / "cell", tmp_path / "out", ONE_BUCKET)
    data = bytearray(path.read_bytes())
    data[4] ^= 1  # the time stamp in a gzip header
    path.write_bytes(bytes(data))
    with pytest.raises(ConfigError, match=rf"changed: {USAGE}.json.gz\); choose another folder or remove it"):
        ingest(tmp_path / "cell", tmp_path / "out", ONE_BUCKET)


def test_a_dataset_without_its_damaged_file_is_only_there_for_who_skips_it_still_damaged(
    tmp_path: Path, window: Maker, write_shard: Writer
) -> None:
    cell, out, skipping = tmp_path / "cell", tmp_path / "out", IngestConfig(buckets=1, skip_damaged=True)
    write_shard(cell, USAGE, [window(900)])
    path = write_shard(cell, "instance_usage-000000000001", [window(1200)])
    whole = path.read_bytes()
    path.write_bytes(whole[:-3])
    ingest(cell, out, skipping)
    assert ingest(cell, out, skipping).already_there
    with pytest.raises(ConfigError, match=r"without the damaged instance_usage-000000000001.*--skip-damaged"):
        ingest(cell, out, ONE_BUCKET)
    path.write_bytes(whole)
    for config in (skipping, ONE_BUCKET):
        with pytest.raises(ConfigError, match="changed: instance_usage-000000000001"):
            ingest(cell, out, config)


def test_killed_after_the_last_rename_the_next_run_takes_the_litter_away(
    tmp_path: Path, window: Maker, write_shard: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_shard(tmp_path / "cell", USAGE, [window(900)])
    out, staging = tmp_path / "out", tmp_path / "out.partial"

    def dying(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ingest_module, "discard_folder", dying)
        with pytest.raises(KeyboardInterrupt):
            ingest(tmp_path / "cell", out, ONE_BUCKET)
    assert staging.exists()
    assert ingest(tmp_path / "cell", out, ONE_BUCKET).already_there
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cell", "out"]


@pytest.mark.parametrize("gone", ["pieces", "dataset", "nothing"])
def test_killed_while_it_tidies_up_no_later_run_trusts_what_is_left(
    gone: str, tmp_path: Path, window: Maker, event: Maker, write_shard: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell, out = tmp_path / "cell", tmp_path / "out"
    write_shard(cell, USAGE, [window(900)])
    write_shard(cell, EVENTS, [event(0, 3)])
    ingest(cell, tmp_path / "unbroken", ONE_BUCKET)
    removed = shutil.rmtree

    def dying(path: Path, **options: Any) -> None:
        if path.name == "out.old.partial" and path.exists():
            for piece in path.glob({"pieces": "shards/*/*/bucket=*", "dataset": "tasks", "nothing": "x"}[gone]):
                removed(piece)
            raise KeyboardInterrupt
        removed(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", dying)
        with pytest.raises(KeyboardInterrupt):
            ingest(cell, out, ONE_BUCKET)
    out.rename(tmp_path / "moved")
    ingest(cell, out, ONE_BUCKET)
    assert contents(out) == contents(tmp_path / "unbroken") == contents(tmp_path / "moved")
    assert not (tmp_path / "out.old.partial").exists()


def test_what_was_read_of_another_source_of_the_same_names_and_sizes_is_not_taken_for_this_ones(
    tmp_path: Path, window: Maker, write_shard: Writer
) -> None:
    for name, value in (("a", 0.1), ("b", 0.9)):
        path = write_shard(tmp_path / name, USAGE, [window(900, average_usage={"cpus": value})])
        os.utime(path, (1, 1))
        write_shard(tmp_path / name, "instance_usage-000000000001", [window(1200)]).write_bytes(b"damaged")
    with pytest.raises(TraceError, match="1 damaged file"):
        ingest(tmp_path / "a", tmp_path / "out", ONE_BUCKET)
    config = IngestConfig(buckets=1, skip_damaged=True)
    assert ingest(tmp_path / "b", tmp_path / "out", config).dataset.usage(0)[s.CPU_MEAN].to_pylist() == [0.9]


def test_a_dataset_inside_its_source_goes_on_after_a_kill_and_is_no_file_of_it(
    tmp_path: Path, window: Maker, write_shard: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_shard(tmp_path, USAGE, [window(900)])

    def dying(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ingest_module, "manifest_of", dying)
        with pytest.raises(KeyboardInterrupt):
            ingest(tmp_path, tmp_path / "dataset", ONE_BUCKET)
    dataset = ingest(tmp_path, tmp_path / "dataset", ONE_BUCKET).dataset
    assert (dataset.n_windows, dataset.manifest["not_read"]) == (1, [])


def test_an_unfinished_download_is_named_and_files_of_no_table_are_listed(
    tmp_path: Path, window: Maker, write_shard: Writer
) -> None:
    write_shard(tmp_path / "cell", USAGE, [window(900)])
    (tmp_path / "cell" / "instance_events_0.json.gz").write_bytes(b"x")
    dataset = ingest(tmp_path / "cell", tmp_path / "out", ONE_BUCKET).dataset
    assert dataset.manifest["not_read"] == ["instance_events_0.json.gz"]
    (tmp_path / "cell" / "instance_events-000000000000.json.gz.partial").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"json\.gz\.partial: an unfinished download; finish it"):
        ingest(tmp_path / "cell", tmp_path / "other", ONE_BUCKET)


def test_run_again_it_does_nothing_and_another_source_is_refused(
    tmp_path: Path, window: Maker, write_shard: Writer
) -> None:
    write_shard(tmp_path / "cell", USAGE, [window(900)])
    first = ingest(tmp_path / "cell", tmp_path / "out", ONE_BUCKET)
    before = contents(tmp_path / "out")
    again = ingest(tmp_path / "cell", tmp_path / "out", ONE_BUCKET)
    assert not first.already_there
    assert again.already_there
    assert contents(tmp_path / "out") == before
    write_shard(tmp_path / "cell", "instance_usage-000000000001", [window(1200)])
    with pytest.raises(ConfigError, match="made from other files or options"):
        ingest(tmp_path / "cell", tmp_path / "out", ONE_BUCKET)
    with pytest.raises(ConfigError, match=r"made from other files or options than asked for \(changed: buckets\)"):
        ingest(tmp_path / "cell", tmp_path / "out", IngestConfig(buckets=2))


def test_the_remedy_for_a_dataset_of_another_format_makes_one_again(
    tmp_path: Path, window: Maker, write_shard: Writer
) -> None:
    write_shard(tmp_path / "cell", USAGE, [window(900)])
    file = ingest(tmp_path / "cell", tmp_path / "out", ONE_BUCKET).dataset.path / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format_version": 1}))
    for _ in range(2):
        with pytest.raises(SchemaError, match=r"dataset format 1, this version reads \d; delete the folder and run"):
            ingest(tmp_path / "cell", tmp_path / "out", ONE_BUCKET)
    shutil.rmtree(tmp_path / "out")
    assert ingest(tmp_path / "cell", tmp_path / "out", ONE_BUCKET).dataset.n_windows == 1


def test_killed_between_any_two_steps_and_run_again_the_bytes_are_the_same(
    tmp_path: Path, window: Maker, event: Maker, write_shard: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = tmp_path / "cell"
    for shard in range(3):
        rows = [window(900 + 300 * k, instance_index=str(k % 5)) for k in range(shard, 12, 3)]
        write_shard(cell, f"instance_usage-00000000000{shard}", rows)
    write_shard(cell, EVENTS, [event(0, 3, instance_index=str(k)) for k in range(5)])
    config = IngestConfig(buckets=3)
    ingest(cell, tmp_path / "unbroken", config)

    class Killed(BaseException):
        """Nothing may catch a kill."""

    for step in ("take_shard", "make_bucket", "make_table", "manifest_of"):
        original = getattr(ingest_module, step)
        for survive in range(3):
            calls: list[int] = []

            def dying(*args: Any, original: Any = original, calls: list[int] = calls, survive: int = survive,
                      **kwargs: Any) -> Any:  # fmt: skip
                calls.append(1)
                if len(calls) > survive:
                    raise Killed
                return original(*args, **kwargs)

            out = tmp_path / f"{step}{survive}"
            with monkeypatch.context() as patch:
                patch.setattr(ingest_module, step, dying)
                try:
                    ingest(cell, out, config)
                except Killed:
                    assert not out.exists()
            ingest(cell, out, config)
            assert contents(out) == contents(tmp_path / "unbroken")
            assert not out.with_name(out.name + ".partial").exists()


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), n_shards=st.integers(1, 4), repeat=st.booleans())
def test_any_order_and_split_and_repetition_of_rows_gives_the_same_usage(
    seed: int, n_shards: int, repeat: bool, tmp_path_factory: pytest.TempPathFactory, window: Maker, write_shard: Writer
) -> None:
    folder = tmp_path_factory.mktemp("any")
    rows = [window(900 + 300 * k, instance_index=str(i)) for i in range(4) for k in range(6)]
    write_shard(folder / "plain", USAGE, rows)
    mixed = rows * 2 if repeat else list(rows)
    random.Random(seed).shuffle(mixed)
    for shard in range(n_shards):
        write_shard(folder / "mixed", f"instance_usage-{shard:012d}", mixed[shard::n_shards])
    config = IngestConfig(buckets=2)
    plain = ingest(folder / "plain", folder / "a", config).dataset
    other = ingest(folder / "mixed", folder / "b", config).dataset
    for bucket in range(2):
        assert plain.usage(bucket).equals(other.usage(bucket))
    assert other.manifest["counts"]["duplicate_windows"] == (len(rows) if repeat else 0)


def test_a_corrupt_byte_ends_in_the_same_rows_or_a_reject_or_one_clear_error(
    tmp_path: Path, window: Maker, write_shard: Writer
) -> None:
    whole = write_shard(tmp_path / "cell", USAGE, [window(900 + 300 * k) for k in range(6)]).read_bytes()
    original = ingest(tmp_path / "cell", tmp_path / "original", ONE_BUCKET).dataset.usage(0)
    numbers = count()

    @settings(max_examples=80, deadline=None)
    @given(position=st.integers(0, 2000), byte=st.integers(0, 255), packed=st.booleans())
    def corrupted(position: int, byte: int, packed: bool) -> None:
        folder = tmp_path / str(next(numbers))
        data = bytearray(whole if packed else gzip.decompress(whole))
        data[position % len(data)] = byte
        (folder / "cell").mkdir(parents=True)
        (folder / "cell" / f"{USAGE}.json{'.gz' if packed else ''}").write_bytes(data)
        try:
            dataset = ingest(folder / "cell", folder / "out", IngestConfig(buckets=1, max_reject_share=0.2)).dataset
        except (TraceError, SchemaError):
            assert not (folder / "out").exists()
        else:
            # no checksum guards what is not packed: a changed digit is a value like any other
            assert not packed or dataset.usage(0).equals(original)
            assert dataset.n_windows + sum(dataset.manifest["rejects"].values()) == 6

    corrupted()


def test_the_manifest_says_what_a_marked_source_is(tmp_path: Path, window: Maker, write_shard: Writer) -> None:
    write_shard(tmp_path / "cell", USAGE, [window(900)])
    (tmp_path / "cell" / "COMPOSED.json").write_text("{}")
    manifest = ingest(tmp_path / "cell", tmp_path / "out", ONE_BUCKET).dataset.manifest
    assert "semi-synthetic" in manifest["nature"]


def test_the_real_windows_of_google_2019_all_arrive_and_their_sums_are_exact(tmp_path: Path, real_data: Path) -> None:
    rows = []
    for file in sorted((real_data / "google_2019").glob("instance_usage-*.json.gz")):
        with gzip.open(file) as lines:
            rows += [json.loads(line) for line in lines]
    dataset = ingest(real_data / "google_2019", tmp_path / "out", IngestConfig()).dataset
    assert dataset.manifest["rejects"] == {}
    distinct = {(r["collection_id"], r["instance_index"], r["start_time"], r["end_time"]) for r in rows}
    assert dataset.n_windows == len(distinct)
    windows = only_windows(dataset)
    memory: dict[tuple[str, ...], float] = {}
    for r in rows:
        key = (r["collection_id"], r["instance_index"], r["start_time"], r["end_time"])
        memory.setdefault(key, r["maximum_usage"].get("memory", 0.0))
    assert np.nansum(windows.usage[:, MEMORY_MAX]) == pytest.approx(sum(memory.values()), rel=1e-12)
