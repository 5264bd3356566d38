"""Rejects go to disk as they come: a hostile file costs neither memory nor time, and is refused in one line."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from reclaim.data import schema as s
from reclaim.data.errors import TraceError
from reclaim.data.ingest.job import IngestConfig, ingest
from reclaim.data.ingest.readers import csv_parquet, rejects

Maker = Callable[..., dict[str, Any]]
Writer = Callable[..., Path]
USAGE = "instance_usage-000000000000"
EVENTS = "instance_events-000000000000"
MAPPING = 'task = "vm"\ntime = "t"\ntime_unit = "s"\nwindow_s = 300\n[columns]\ncpu_mean = "cpu"\n'


@pytest.mark.parametrize("file", [USAGE, EVENTS])
@pytest.mark.parametrize("bad", ["x", '{"collection_id": 1}'])
def test_a_run_ends_early_where_most_lines_are_bad(
    file: str, bad: str, tmp_path: Path, window: Maker, write_shard: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rejects, "HOPELESS", 100)
    write_shard(tmp_path / "cell", USAGE, [window(900)])
    write_shard(tmp_path / "cell", file, [bad] * 20_000)
    with pytest.raises(TraceError, match=r"of the first \d+ lines rejected, far more than --max-reject-share=0.001"):
        ingest(tmp_path / "cell", tmp_path / "out", IngestConfig(buckets=1))


def test_a_run_that_allows_any_share_goes_on_and_lists_every_reject_in_order(
    tmp_path: Path, window: Maker, write_shard: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rejects, "HOPELESS", 100)
    lines = [window(900), *["x", json.dumps(window(900, end_time="0"))] * 10_000]
    write_shard(tmp_path / "cell", USAGE, lines)
    dataset = ingest(tmp_path / "cell", tmp_path / "out", IngestConfig(buckets=1, max_reject_share=1.0)).dataset
    assert dataset.manifest["rejects"] == {"not valid JSON": 10_000, "end_time is not after start_time": 10_000}
    found = pq.read_table(tmp_path / "out" / "rejects" / "rejects.parquet")
    assert found[s.REJECT_LINE].to_pylist() == list(range(2, 20_002))
    assert found.schema.equals(s.REJECTS)


@pytest.mark.slow
def test_a_million_bad_lines_of_two_files_take_no_more_memory_than_is_allowed(tmp_path: Path) -> None:
    (tmp_path / "cell").mkdir()
    for name in (USAGE, EVENTS):
        (tmp_path / "cell" / f"{name}.json.gz").write_bytes(gzip.compress(b"x\n" * 500_000, 1))
    code = (
        "import re, sys; from pathlib import Path; from reclaim.data.errors import TraceError\n"
        "from reclaim.data.ingest.job import IngestConfig, ingest\n"
        "try: ingest(Path(sys.argv[1]), Path(sys.argv[2]), IngestConfig(max_reject_share=1.0, memory_limit_mib=512))\n"
        "except TraceError as error: assert 'not one row' in str(error), error\n"
        "kib = dict(re.findall(r'(\\w+):\\s+(\\d+) kB', Path('/proc/self/status').read_text()))\n"
        "print(int(kib['VmHWM']) - int(kib['RssFile']) >> 10)"
    )
    # not ru_maxrss, in which a process begins with its parent's; pages of libraries, 95 to 250 MiB, are the kernel's
    arguments = [sys.executable, "-c", code, str(tmp_path / "cell"), str(tmp_path / "out")]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 384


@pytest.mark.parametrize("share", [0.001, 1.0])
def test_lines_that_end_in_a_carriage_return_alone_are_named_as_such(
    share: float, tmp_path: Path, window: Maker
) -> None:
    (tmp_path / "cell").mkdir()
    text = "".join(json.dumps(window(900 + 300 * k)) + "\r" for k in range(9))
    (tmp_path / "cell" / f"{USAGE}.json").write_bytes(text.encode())
    config = IngestConfig(buckets=1, max_reject_share=share)
    if share < 1:
        with pytest.raises(TraceError, match="lines end in a carriage return alone; end them in a line feed"):
            ingest(tmp_path / "cell", tmp_path / "out", config)
    (tmp_path / "csv").mkdir()
    (tmp_path / "csv" / "usage.csv").write_bytes(b"vm,t,cpu\r1,0,0.5\r")
    mapping = tmp_path / "m.toml"
    mapping.write_text(MAPPING)
    series = IngestConfig(trace="series", mapping=str(mapping), max_reject_share=share)
    with pytest.raises(TraceError, match="lines end in a carriage return alone"):
        ingest(tmp_path / "csv", tmp_path / "out", series)


@pytest.mark.parametrize(
    ("form", "remedy"), [("gzip", r"add \.gz"), ("utf-16", "write it as UTF-8"), ("zip", "unpack")]
)
def test_what_is_called_csv_by_mistake_is_refused_by_what_it_is(form: str, remedy: str, tmp_path: Path) -> None:
    rows = "vm,t,cpu\r\n1,0,0.5\r\n"
    content = {"gzip": gzip.compress(rows.encode()), "utf-16": rows.encode("utf-16"), "zip": b"PK\x03\x04\r\x00\n"}
    (tmp_path / "csv").mkdir()
    (tmp_path / "csv" / "usage.csv").write_bytes(content[form])
    (tmp_path / "m.toml").write_text(MAPPING)
    with pytest.raises(TraceError, match=rf"usage\.csv: .*{remedy}"):
        ingest(tmp_path / "csv", tmp_path / "out", IngestConfig(trace="series", mapping=str(tmp_path / "m.toml")))


def test_a_first_line_without_end_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(csv_parquet, "_LONGEST_HEADER_BYTES", 1 << 20)
    (tmp_path / "csv").mkdir()
    (tmp_path / "csv" / "usage.csv").write_bytes(b"x" * (2 << 20))
    mapping = tmp_path / "m.toml"
    mapping.write_text(MAPPING)
    with pytest.raises(TraceError, match="the first line is longer than 1 MiB"):
        ingest(tmp_path / "csv", tmp_path / "out", IngestConfig(trace="series", mapping=str(mapping)))
