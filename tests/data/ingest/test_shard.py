"""Reading of one raw file: when what an earlier run read of it is taken, and when it is read again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from reclaim.data.ingest.bucket import staged_schema
from reclaim.data.ingest.shard import DONE, LOCK, Shard, ShardJob, take_shard
from reclaim.data.traces.series import series
from reclaim.data.traces.series_mapping import load_mapping
from tests.data.traces.mapped import MAPPING


@pytest.fixture
def job(tmp_path: Path) -> ShardJob:
    """Return the job of reading a file of two windows, in a folder for unfinished work."""
    (tmp_path / "m.toml").write_text(MAPPING)
    (tmp_path / "a.csv").write_text("vm,t,used\n1,0,0.5\n1,300,0.25\n")
    (tmp_path / "partial").mkdir()
    (tmp_path / "partial" / LOCK).touch()
    source = series(load_mapping(str(tmp_path / "m.toml")), "a.csv")
    (table,) = (table for table in source.tables if table.name == "usage")
    return ShardJob(
        table, staged_schema(source), str(tmp_path), "a.csv", str(tmp_path / "partial" / "shards"),
        buckets=1, threads=1, memory_mib=512, max_reject_share=0.0,
    )  # fmt: skip


def reading(job: ShardJob) -> int:
    """Take the file and return a number of the reading that its rows are from."""
    shard = take_shard(job)
    assert isinstance(shard, Shard)
    assert shard.rows == 2
    return (Path(shard.folder) / DONE).stat().st_ino


def test_a_file_is_read_again_where_anything_that_decides_its_rows_has_changed(job: ShardJob) -> None:
    number = next(name for name, kind in job.table.columns.items() if kind == "DOUBLE")
    of_table: dict[str, dict[str, Any]] = {
        "select": {"select": f"{job.table.select} "},
        "columns": {"columns": {**job.table.columns, number: "FLOAT"}},
        "checks": {"checks": {**job.table.checks, "never": "true"}},
        "order": {"order": ("vm", "t", "used")},
        "defects": {"defects": {"odd": "false"}},
        "where": {"where": f"({job.table.where})"},
    }
    more = job.staged.append(pa.field("more", pa.float64()))
    last = reading(job)
    assert reading(job) == last
    assert reading(replace(job, threads=2, memory_mib=600, max_reject_share=0.5)) == last
    same = []
    for change in (*of_table, "buckets", "staged"):  # each on top of those before
        if change in of_table:
            job = replace(job, table=replace(job.table, **of_table[change]))
        else:
            job = replace(job, buckets=2) if change == "buckets" else replace(job, staged=more)
        before, last = last, reading(job)
        if last == before:
            same.append(change)
    assert same == []


def test_a_file_of_the_same_size_with_other_bytes_is_read_again(job: ShardJob) -> None:
    last = reading(job)
    file = Path(job.source_folder) / job.file
    file.write_text(file.read_text().replace("0.5\n", "0.7\n"))
    assert reading(job) != last
