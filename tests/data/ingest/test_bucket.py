"""Making of one bucket: when an earlier run's tables are taken, and which of the rows of one window is kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from reclaim.data import schema as s
from reclaim.data.dataset import bucket_name
from reclaim.data.ingest import job as ingesting
from reclaim.data.ingest.bucket import BucketJob, make_bucket, staged_schema, tasks_piece
from reclaim.data.ingest.defects import CPU_ABOVE
from reclaim.data.ingest.job import IngestConfig, ingest
from reclaim.data.ingest.readers import staging
from reclaim.data.ingest.shard import LOCK, Shard, ShardJob, take_shard
from reclaim.data.traces.series import series
from reclaim.data.traces.series_mapping import load_mapping
from tests.data.traces import mapped

MAPPING = mapped.MAPPING.replace("4.0", '"granted"')
LINES = ["1,0,0.5,2", "1,0,0.25,2", "1,300,0.75,", "1,600,4.5,2", "2,0,0.125,2"]


@pytest.fixture
def job(tmp_path: Path) -> BucketJob:
    """Return the job of a bucket, not of any shard yet, in a folder for unfinished work."""
    (tmp_path / "m.toml").write_text(MAPPING)
    (tmp_path / LOCK).touch()
    source = series(load_mapping(str(tmp_path / "m.toml")), None)
    return BucketJob(0, "made of nothing", (), source, staged_schema(source), str(tmp_path / "out"), str(tmp_path), 512)


def of(job: BucketJob, *lines: str) -> BucketJob:
    """Return the job of making the bucket of these lines."""
    folder = Path(job.staging)
    (folder / "a.csv").write_text("\n".join(["vm,t,used,granted", *lines]) + "\n")
    table = next(table for table in job.source.tables if table.name == "usage")
    shard = take_shard(ShardJob(table, job.staged, str(folder), "a.csv", str(folder / "shards"), 1, 1, 512, 0.0))
    assert isinstance(shard, Shard)
    return replace(job, identity=shard.sha256, shards=(shard,))


def cpu(job: BucketJob) -> list[float]:
    """Return the CPU of the windows that were made, in their order."""
    used: list[float] = pq.read_table(Path(job.out) / "usage" / bucket_name(0))[s.CPU_MEAN].to_pylist()
    return used


def limit(job: BucketJob) -> list[float]:
    """Return the limits of CPU of the windows that were made, in their order."""
    limits: list[float] = pq.read_table(Path(job.out) / "usage" / bucket_name(0))[s.CPU_LIMIT].to_pylist()
    return limits


def test_of_rows_of_one_window_the_same_is_kept_in_whatever_order_they_come(job: BucketJob) -> None:
    made = of(job, *LINES)
    counts = make_bucket(made)
    assert (counts["usage"], counts["tasks"], counts["duplicate_windows"], counts["contradicting_windows"]) == (
        4,
        2,
        1,
        1,
    )
    assert (counts["windows_without_limit"], counts[CPU_ABOVE]) == (1, 1)
    kept = cpu(made)
    turned = of(job, *reversed(LINES))
    assert make_bucket(turned) == counts
    assert cpu(turned) == kept
    task_by_task = replace(turned, identity="in ranges", rows_at_once=1)
    assert make_bucket(task_by_task) == counts
    assert cpu(task_by_task) == kept


def test_a_window_that_repeats_another_contradicts_it_only_where_its_values_differ(job: BucketJob) -> None:
    lines = ["1,0,0.5,2", "1,0,0.5,2", "1,0,0.25,2", "1,0,0.25,2", "1,0,0.25,4", "1,300,0.5,2", "1,300,0.5,2"]
    made = of(job, *lines)
    counts = make_bucket(made)
    assert (counts["usage"], counts["duplicate_windows"]) == (2, 5)
    # one of the first five is kept: of 0.25 and 2, or of 0.5, or of 0.25 and 4
    assert counts["contradicting_windows"] == 5 - lines[:5].count(f"1,0,{cpu(made)[0]:g},{limit(made)[0]:g}")
    assert make_bucket(of(job, *lines[5:]))["contradicting_windows"] == 0


def test_a_bucket_is_made_again_of_other_rows_and_where_a_table_of_it_is_missing(job: BucketJob) -> None:
    assert make_bucket(job)["usage"] == 0
    made = of(job, *LINES)
    assert make_bucket(made)["usage"] == 4
    tables = [Path(job.out) / name / bucket_name(0) for name in s.BUCKETED] + [tasks_piece(job.staging, 0)]
    for path in tables:
        was = [table.stat().st_ino for table in tables]
        assert make_bucket(made)["usage"] == 4
        assert [table.stat().st_ino for table in tables] == was
        path.unlink()
        make_bucket(made)
        assert path.is_file()


def test_a_bucket_made_in_ranges_of_tasks_has_the_rows_of_one_made_at_once(
    tmp_path: Path, window: Callable[..., Any], event: Callable[..., Any], write_shard: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    needs = [{"name": "o/", "value": "2", "relation": 5}, {"name": "p/", "value": "9", "relation": 4}]
    tasks = [(3, 1), (3, 0), (1, 7), (9, 0), (5, 2)]
    named = [{"collection_id": str(c), "instance_index": str(i)} for c, i in tasks]
    usage = [window(300 * k, **named[of], average_usage={"cpus": k / 100, "memory": 0.1})
             for of, count in ((0, 4), (1, 1), (2, 3), (4, 2)) for k in range(3, 3 + count)]  # fmt: skip
    told = [
        event(time, type_, **of, constraint=needs[: 1 + (time > 0)])
        for of in named
        for time, type_ in ((0, 3), (700, 9))
    ]
    cell = tmp_path / "cell"
    write_shard(cell, "instance_usage-000000000000", [*usage[::2], *usage[:3]])
    write_shard(cell, "instance_usage-000000000001", usage[1::2])
    write_shard(cell, "instance_events-000000000000", [*told[::-1], *told[:5]])
    ranges: list[int] = []
    whole = staging.Layout.table_of

    def table_of(layout: staging.Layout, rows: Any, order: Any) -> pa.Table:
        ranges.append(len(rows))
        return whole(layout, rows, order)

    monkeypatch.setattr(staging.Layout, "table_of", table_of)
    made: dict[int, Any] = {}
    of_tasks = {
        100: [13],
        13: [13],
        12: [11, 2],
        4: [4, 7, 2],
        3: [3, 1, 7, 2],
        1: [3, 1, 7, 2],
    }  # windows with repeats
    for rows_at_once, expected in of_tasks.items():
        ranges.clear()
        monkeypatch.setattr(ingesting, "BucketJob", partial(BucketJob, rows_at_once=rows_at_once))
        dataset = ingest(cell, tmp_path / f"{rows_at_once}", IngestConfig(buckets=1, workers=1)).dataset
        tables = [pq.read_table(dataset.path / name / bucket_name(0)) for name in s.BUCKETED]
        made[rows_at_once] = (*tables, dataset.table("tasks"), dataset.manifest["counts"], dataset.manifest["defects"])
        assert made[rows_at_once] == made[100]
        assert ranges == expected
    counts = dataset.manifest["counts"]
    assert (counts["usage"], counts["tasks"], counts["events"], counts["constraints"]) == (10, 5, 10, 15)
    assert (counts["duplicate_windows"], counts["duplicate_events"]) == (3, 5)


def test_an_event_that_came_twice_is_one_even_where_there_is_no_other(
    tmp_path: Path, window: Callable[..., Any], event: Callable[..., Any], write_shard: Callable[..., Path]
) -> None:
    write_shard(tmp_path / "cell", "instance_usage-000000000000", [window(900)])
    write_shard(tmp_path / "cell", "instance_events-000000000000", [event(0, 3)] * 2)
    dataset = ingest(tmp_path / "cell", tmp_path / "out", IngestConfig(buckets=1, workers=1)).dataset
    assert (dataset.events(0).num_rows, dataset.manifest["counts"]["duplicate_events"]) == (1, 1)
