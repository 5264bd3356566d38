"""Readers of raw files: a bad line or value is set aside with its reason, whichever way it is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from reclaim.data import schema as s
from reclaim.data.errors import SchemaError, TraceError
from reclaim.data.ingest.job import IngestConfig, ingest

Maker = Callable[..., dict[str, Any]]
Writer = Callable[..., Path]

USAGE, EVENTS = "instance_usage-000000000000", "instance_events-000000000000"
ONE_BUCKET = IngestConfig(buckets=1)


BAD_LINES = [
    ("not json", "not valid JSON"),
    ("[1, 2]", "not a JSON object"),
    ('{"start_time": "x"}', "start_time is not a bigint"),
]


@pytest.mark.parametrize(("line", "reason"), BAD_LINES)
def test_a_bad_line_is_set_aside_with_its_file_its_number_and_the_reason(
    line: str, reason: str, tmp_path: Path, window: Maker, write_shard: Writer
) -> None:
    write_shard(tmp_path / "cell", USAGE, [window(900), line, window(1200)])
    dataset = ingest(tmp_path / "cell", tmp_path / "out", IngestConfig(max_reject_share=0.5)).dataset
    rejects = pq.read_table(tmp_path / "out" / "rejects" / "rejects.parquet").to_pylist()
    assert rejects == [{s.REJECT_FILE: f"{USAGE}.json.gz", s.REJECT_LINE: 2, s.REJECT_REASON: reason}]
    assert dataset.n_windows == 2


BAD_VALUES = [
    ({"end_time": "900000000"}, "end_time is not after start_time"),
    ({"average_usage": {"cpus": -0.1, "memory": 0.1}}, "average_usage.cpus is negative or not finite"),
    ({"instance_index": None}, "instance_index is missing"),
    ({"collection_id": "12x"}, "collection_id is not a bigint"),
    ({"collection_id": str(2**63)}, "collection_id is not a bigint"),
    ({"average_usage": "much"}, "average_usage is not a struct"),
    ({"average_usage": None}, "average_usage is missing"),
    ({"average_usage": {"memory": 0.1}}, "average_usage is missing"),
    ({"collection_id": 7.6}, "collection_id is not a bigint"),
    ({"collection_id": True}, "collection_id is not a bigint"),
    ({"collection_id": 9007199254740993.0}, "collection_id is not a bigint"),
    ({"collection_id": "007"}, "collection_id is not a bigint"),
    ({"start_time": 6e8}, "start_time is not a bigint"),
    ({"cpu_usage_distribution": [-0.1] + [0.1] * 10}, "cpu_usage_distribution is negative or not finite"),
    ({"tail_cpu_usage_distribution": ["Infinity"] * 9}, "tail_cpu_usage_distribution is negative or not finite"),
    ({"tail_cpu_usage_distribution": ["nan"] * 9}, "tail_cpu_usage_distribution is negative or not finite"),
    ({"tail_cpu_usage_distribution": [1e39] * 9}, "tail_cpu_usage_distribution is not a float[]"),
]


@pytest.mark.parametrize(("change", "reason"), BAD_VALUES)
def test_a_value_that_cannot_be_is_a_reject_and_not_a_guess(
    change: dict[str, Any], reason: str, tmp_path: Path, window: Maker, write_shard: Writer
) -> None:
    write_shard(tmp_path / "cell", USAGE, [window(900), window(1200), window(900, **change)])
    dataset = ingest(tmp_path / "cell", tmp_path / "out", IngestConfig(max_reject_share=0.5)).dataset
    assert dataset.manifest["rejects"] == {reason: 1}
    assert dataset.n_windows == 2


@pytest.mark.parametrize("value", [7.6, True, 9007199254740993.0, "1e3", "007", "", " 7", 2**63, "x"])
def test_the_fast_and_the_careful_reader_take_the_same_integers(
    value: object, tmp_path: Path, window: Maker, write_shard: Writer
) -> None:
    good = [window(900 + 300 * k) for k in range(3)]
    bad_lines: dict[str, list[str]] = {"fast": [], "careful": ["not json"]}
    for name, lines in bad_lines.items():
        write_shard(tmp_path / name, USAGE, [*good, *lines, window(3000, collection_id=value)])
        dataset = ingest(tmp_path / name, tmp_path / f"{name}-out", IngestConfig(max_reject_share=0.9)).dataset
        assert dataset.manifest["rejects"]["collection_id is not a bigint"] == 1
        assert dataset.n_windows == 3


@pytest.mark.parametrize("request_", [{"cpus": -1.0}, {"cpus": "Infinity"}, {"memory": "nan"}])
def test_a_limit_that_is_no_finite_amount_is_a_reject(
    request_: dict[str, Any], tmp_path: Path, window: Maker, event: Maker, write_shard: Writer
) -> None:
    write_shard(tmp_path / "cell", USAGE, [window(900)])
    write_shard(tmp_path / "cell", EVENTS, [event(0, 3), event(5, 10, resource_request=request_)])
    dataset = ingest(tmp_path / "cell", tmp_path / "out", IngestConfig(buckets=1, max_reject_share=0.9)).dataset
    assert dataset.manifest["rejects"] == {"resource_request is negative or not finite": 1}
    assert dataset.usage(0)[s.CPU_LIMIT].to_pylist() == [0.3]


def test_a_parquet_table_without_the_columns_of_required_facts_is_refused(tmp_path: Path, window: Maker) -> None:
    (tmp_path / "cell").mkdir()
    rows = [window(900, end_time=None, average_usage=None)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "cell" / f"{USAGE}.parquet")
    with pytest.raises(SchemaError, match="lacks columns average_usage, end_time"):
        ingest(tmp_path / "cell", tmp_path / "out", ONE_BUCKET)


def test_a_usage_shard_without_a_row_is_damaged(tmp_path: Path, window: Maker, write_shard: Writer) -> None:
    write_shard(tmp_path / "cell", USAGE, [window(900)])
    write_shard(tmp_path / "cell", "instance_usage-000000000001", [])
    write_shard(tmp_path / "cell", EVENTS, [])  # there may be none of these
    with pytest.raises(TraceError, match=r"1 damaged file: .*instance_usage-000000000001.json.gz: no rows"):
        ingest(tmp_path / "cell", tmp_path / "out", ONE_BUCKET)
