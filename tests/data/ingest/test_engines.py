"""Ingest by every kind of workers: no option of a run changes a byte, nothing of the trace is lost."""

from __future__ import annotations

import gzip
import json
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from reclaim.data import schema as s
from reclaim.data.core.duck import DamagedFileError, check_gzip
from reclaim.data.core.engine import workers as engine
from reclaim.data.dataset import Dataset
from reclaim.data.errors import ConfigError
from reclaim.data.ingest import bucket as buckets_module
from reclaim.data.ingest import job as ingest_module
from reclaim.data.ingest.bucket import BucketJob
from reclaim.data.ingest.job import IngestConfig, ingest
from reclaim.data.ingest.readers import json_lines as jsonlines_module
from reclaim.data.ingest.readers.json_kernel import PAD
from reclaim.data.synthetic.job import SyntheticCellConfig, write_cell
from tests.folders import contents

Maker = Callable[..., dict[str, Any]]
Writer = Callable[..., Path]

SERIAL, THREADS, PROCESSES = (1, 1 << 60), (2, 1 << 60), (2, 0)
"""Workers, and the input from which they are processes."""
BUCKETS = 4


def tables(folder: Path) -> dict[str, bytes]:
    """Return a dataset's files without the two that name the input files."""
    return {name: content for name, content in contents(folder).items() if name != "manifest.json"}


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a synthetic cell of a few thousand windows in some shards, with a few bad lines."""
    folder = tmp_path_factory.mktemp("engine") / "cell"
    write_cell(folder, SyntheticCellConfig(machines=6, days=0.25, shard_hours=2, seed=5))
    file = sorted(folder.glob("instance_usage-*"))[1]
    lines = gzip.decompress(file.read_bytes()).splitlines(keepends=True)
    lines[3:3] = [b'{"start_time": 5}\n', b"nonsense\n", lines[0].replace(b'"0"', b"0", 1)]
    file.write_bytes(gzip.compress(b"".join(lines), mtime=0))
    return folder


@pytest.fixture(scope="module")
def plain(cell: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the cell's dataset, made in one process and one pass."""
    out = tmp_path_factory.mktemp("plain") / "dataset"
    ingest(cell, out, IngestConfig(buckets=BUCKETS, max_reject_share=0.01))
    return out


@pytest.mark.slow
@pytest.mark.parametrize("pool_bytes", [THREADS[1], PROCESSES[1]])
@pytest.mark.parametrize(("workers", "memory"), [(1, 512), (1, 4096), (2, 1024), (3, 2048)])
def test_workers_threads_and_memory_change_no_byte_of_the_dataset(
    workers: int, memory: int, pool_bytes: int, cell: Path, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "POOL_BYTES", pool_bytes)
    config = IngestConfig(buckets=BUCKETS, max_reject_share=0.01, workers=workers, memory_limit_mib=memory)
    ingest(cell, tmp_path / "out", config)
    assert contents(tmp_path / "out") == contents(plain)


@pytest.mark.parametrize("step", ["take_shard", "make_bucket", "make_table"])
def test_a_worker_that_does_not_see_the_unfinished_work_ends_the_run_instead_of_leaving_rows_out(
    step: str, cell: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = getattr(ingest_module, step)

    def elsewhere(job: Any) -> Any:
        return work(replace(job, staging=str(tmp_path / "elsewhere" / "shards")))

    monkeypatch.setattr(ingest_module, step, elsewhere)
    with pytest.raises(ConfigError, match="a worker on another machine does not see this folder; name DATASET in a"):
        ingest(cell, tmp_path / "out", IngestConfig(buckets=BUCKETS, max_reject_share=0.01))
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 5, 777])
def test_a_bucket_made_in_many_passes_has_the_bytes_of_one_pass(
    rows: int, cell: Path, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = cell if rows > 5 else tmp_path / "few"  # a pass for each task is slow
    config = IngestConfig(buckets=BUCKETS, max_reject_share=0.01)
    if few is not cell:
        few.mkdir()
        for file in cell.glob("*.json.gz"):
            lines = gzip.decompress(file.read_bytes()).splitlines(keepends=True)
            (few / file.name).write_bytes(gzip.compress(b"".join(lines[:: 40 if "usage" in file.name else 9])))
    one_pass = plain if few is cell else ingest(few, tmp_path / "one", config).dataset.path
    passes = Counter[int]()
    ranges = buckets_module._ranges

    def counting(*args: Any) -> Iterator[Any]:
        for found in ranges(*args):
            passes[args[2]] += 1
            yield found

    monkeypatch.setattr(buckets_module, "_ranges", counting)
    monkeypatch.setattr(ingest_module, "BucketJob", lambda *args: replace(BucketJob(*args), rows_at_once=rows))
    ingest(few, tmp_path / "out", config)
    assert min(passes.values()) > 1
    assert contents(tmp_path / "out") == contents(one_pass)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_order_and_split_of_the_files_change_no_table(seed: int, cell: Path, plain: Path, tmp_path: Path) -> None:
    chance = random.Random(seed)
    for table in ("instance_usage", "instance_events", "collection_events", "machine_events", "machine_attributes"):
        lines = [line for file in cell.glob(f"{table}-*") for line in gzip.decompress(file.read_bytes()).splitlines()]
        chance.shuffle(lines)
        (tmp_path / "cell").mkdir(exist_ok=True)
        shards = chance.randint(1, 6)
        for shard in chance.sample(range(shards), shards):  # also written in any order
            text = b"".join(line + b"\n" for line in lines[shard::shards])
            (tmp_path / "cell" / f"{table}-{shard:012d}.json").write_bytes(text)
    ingest(tmp_path / "cell", tmp_path / "out", IngestConfig(buckets=BUCKETS, max_reject_share=0.01))
    rejects = "rejects/rejects.parquet"
    found, expected = tables(tmp_path / "out"), tables(plain)
    assert {k: v for k, v in found.items() if k != rejects} == {k: v for k, v in expected.items() if k != rejects}
    reasons = [
        Counter(pq.read_table(folder / rejects)[s.REJECT_REASON].to_pylist()) for folder in (plain, tmp_path / "out")
    ]
    assert reasons[0] == reasons[1]


@pytest.mark.slow
def test_a_file_given_twice_changes_no_table_whether_its_bytes_are_the_same_or_only_its_lines(
    cell: Path, plain: Path, tmp_path: Path
) -> None:
    for name in ("same", "packed anew"):
        twice = tmp_path / name
        twice.mkdir()
        for file in cell.glob("*.json.gz"):
            (twice / file.name).write_bytes(file.read_bytes())
        for file in sorted(cell.glob("*-000000000000.json.gz")):  # of every table; none of these has a bad line
            again = file.name.replace("-000000000000", "-000000000999")
            packed = file.read_bytes()
            (twice / again).write_bytes(
                packed if name == "same" else gzip.compress(gzip.decompress(packed), 1, mtime=9)
            )
        dataset = ingest(twice, twice / "out", IngestConfig(buckets=BUCKETS, max_reject_share=0.01)).dataset
        assert tables(dataset.path) == tables(plain)
        repeated = [name for name in dataset.manifest["repeated"] if name.endswith("-000000000999.json.gz")]
        assert len(repeated) == len(dataset.manifest["repeated"]) == (5 if name == "same" else 0)
        windows = [Dataset.open(path).manifest["counts"]["duplicate_windows"] for path in (plain, dataset.path)]
        assert (windows[1] > windows[0]) == (name != "same")


def raw(cell: Path, table: str) -> Iterator[dict[str, Any]]:
    """Yield a raw table's good rows, their numbers as they are written."""
    for file in sorted(cell.glob(f"{table}-*.json.gz")):
        for line in gzip.decompress(file.read_bytes()).splitlines():
            try:
                row = json.loads(line, parse_float=Fraction, parse_int=Fraction)
            except ValueError:
                continue
            if table != "instance_usage" or "average_usage" in row:
                yield row


@pytest.mark.slow
def test_sums_by_task_and_by_machine_are_those_of_the_raw_trace_exactly(cell: Path, plain: Path) -> None:
    """Every decimal is stored as the double next to it, so the raw sums are taken over those doubles, as fractions."""
    distinct: dict[tuple[int, ...], tuple[Fraction, Fraction | None, int]] = {}
    for row in raw(cell, "instance_usage"):
        key = tuple(int(row[name]) for name in ("collection_id", "instance_index", "start_time", "end_time"))
        values = (row["average_usage"]["cpus"], row["maximum_usage"].get("memory"), int(row.get("machine_id", 0)))
        assert distinct.setdefault(key, values) == values
    expected: dict[tuple[str, Any], list[Fraction]] = defaultdict(lambda: [Fraction(0)] * 3)
    for (collection, index, start, end), (cpu, memory, machine) in distinct.items():
        for of in (("task", (collection, index)), ("machine", machine)):
            sums = expected[of]
            expected[of] = [sums[0] + Fraction(float(cpu)) * (end - start), sums[1] + 1,
                            sums[2] + (0 if memory is None else Fraction(float(memory)))]  # fmt: skip
    found: dict[tuple[str, Any], list[Fraction]] = defaultdict(lambda: [Fraction(0)] * 3)
    dataset = Dataset.open(plain)
    for bucket in range(dataset.n_buckets):
        for row in dataset.usage(bucket).to_pylist():
            for of in (("task", (row[s.COLLECTION_ID], row[s.INSTANCE_INDEX])), ("machine", row[s.MACHINE_ID] or 0)):
                sums = found[of]
                found[of] = [sums[0] + Fraction(row[s.CPU_MEAN]) * (row[s.END_US] - row[s.START_US]), sums[1] + 1,
                             sums[2] + Fraction(row[s.MEMORY_MAX] or 0)]  # fmt: skip
    assert dict(found) == dict(expected)
    assert len(distinct) == dataset.n_windows > 2000


@pytest.mark.slow
def test_every_table_has_as_many_rows_as_the_raw_trace_has_distinct_ones(cell: Path, plain: Path) -> None:
    counts = Dataset.open(plain).manifest["counts"]
    for table, name in {"instance_events": "events", "collection_events": "collections", "machine_events": "machines",
                        "machine_attributes": "attributes"}.items():  # fmt: skip
        distinct = {json.dumps(row, sort_keys=True, default=str) for row in raw(cell, table)}
        assert counts[name] == len(distinct), name
    tasks = {
        (row["collection_id"], row["instance_index"])
        for t in ("instance_usage", "instance_events")
        for row in raw(cell, t)
    }
    assert counts["tasks"] == len({(int(a), int(b)) for a, b in tasks})


def test_ids_beyond_the_integers_of_a_double_arrive_as_they_are_in_every_table(
    tmp_path: Path, window: Maker, event: Maker, write_shard: Writer
) -> None:
    ids = [2**53 + 1, 2**62 + 3, 2**63 - 1, 2**63 - 2]
    cell = tmp_path / "cell"
    write_shard(cell, "instance_usage-000000000000", [window(900, collection_id=str(i), machine_id=i) for i in ids])
    write_shard(cell, "instance_events-000000000000", [event(0, 3, collection_id=str(i), machine_id=i) for i in ids])
    rows = [{"time": "0", "type": "0", "collection_id": i, "start_after_collection_ids": [str(i), i]} for i in ids]
    write_shard(cell, "collection_events-000000000000", rows)
    dataset = ingest(cell, tmp_path / "out", IngestConfig(buckets=1)).dataset
    for table in (dataset.usage(0), dataset.events(0)):
        assert sorted(table[s.COLLECTION_ID].to_pylist()) == sorted(table[s.MACHINE_ID].to_pylist()) == sorted(ids)
    assert sorted(dataset.table("tasks")[s.COLLECTION_ID].to_pylist()) == sorted(ids)
    assert sorted(dataset.table("collections")[s.START_AFTER].to_pylist()) == sorted([i, i] for i in ids)


@pytest.mark.parametrize("entry", [1.5, True, 1e3, "007", 2**63, [1], {}])
@pytest.mark.parametrize("beside", [[], ["not json"]])
def test_an_id_in_a_list_is_never_rounded_whatever_stands_beside_it(
    entry: object, beside: list[str], tmp_path: Path, window: Maker, write_shard: Writer
) -> None:
    cell, row = tmp_path / "cell", {"time": "0", "type": "0", "collection_id": "1"}
    write_shard(cell, "instance_usage-000000000000", [window(900)])
    lines = [row, {**row, "start_after_collection_ids": ["5", entry]}, {**row, "time": "7", "user": [1]}, *beside]
    write_shard(cell, "collection_events-000000000000", lines)
    dataset = ingest(cell, tmp_path / "out", IngestConfig(buckets=1, max_reject_share=1)).dataset
    assert dataset.table("collections")[s.TIME_US].to_pylist() == [0]
    reasons = Counter(pq.read_table(tmp_path / "out" / "rejects" / "rejects.parquet")[s.REJECT_REASON].to_pylist())
    expected = [
        "start_after_collection_ids is not a bigint[]",
        "user is not a varchar",
        *["not valid JSON"] * len(beside),
    ]
    assert reasons == Counter(expected)


@pytest.mark.parametrize(("deleted", "good"), [(True, True), ("true", True), (1, False), ("t", False), (1.0, False)])
@pytest.mark.parametrize("beside", [[], ["not json"]])
def test_a_flag_is_true_or_false_and_nothing_else_whatever_stands_beside_it(
    deleted: object, good: bool, beside: list[str], tmp_path: Path, window: Maker, write_shard: Writer
) -> None:
    cell, row = tmp_path / "cell", {"time": "0", "machine_id": "1", "name": "a", "value": "b"}
    write_shard(cell, "instance_usage-000000000000", [window(900)])
    write_shard(
        cell, "machine_attributes-000000000000", [row | {"deleted": False}, row | {"deleted": deleted}, *beside]
    )
    dataset = ingest(cell, tmp_path / "out", IngestConfig(buckets=1, max_reject_share=1)).dataset
    assert dataset.table("attributes")[s.ATTRIBUTE_DELETED].to_pylist() == [False, True][: 1 + good]


LINES = [b"{}", b"x" * 5, b"", b"y" * 100, b"\r", b"z" * 1000, b"", b""]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 99, 100, 101, 1 << 20])
@pytest.mark.parametrize("kind", [".json", ".json.gz"])
@pytest.mark.parametrize("end", [b"", b"\n", b"\nlast"])
def test_a_file_has_the_same_lines_in_blocks_of_any_size(
    size: int, kind: str, end: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jsonlines_module, "_BLOCK_BYTES", size)
    monkeypatch.setattr(jsonlines_module, "_LAST_LINE_BYTES", 16)
    text, file = b"\n".join(LINES) + end, tmp_path / f"a{kind}"
    file.write_bytes(gzip.compress(text) if kind.endswith("gz") else text)
    blocks = [block.tobytes()[:-PAD] for block in jsonlines_module._blocks(file)]
    assert b"".join(blocks) == text + b"\n" * (not text.endswith(b"\n"))
    assert all(block.endswith(b"\n") for block in blocks)
    assert max(map(len, blocks)) <= max(2 * size, 4 * max(map(len, LINES)) + 2)
    assert [*jsonlines_module._lines(file)] == (text.removesuffix(b"\n")).split(b"\n")


def test_an_empty_file_has_no_block_and_a_line_without_end_in_sight_is_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.json").write_bytes(b"")
    assert [*jsonlines_module._blocks(tmp_path / "a.json")] == []
    monkeypatch.setattr(jsonlines_module, "_BLOCK_BYTES", 64)
    monkeypatch.setattr(jsonlines_module, "_LONGEST_LINE_BYTES", 1000)
    (tmp_path / "a.json").write_bytes(b"\x00" * 5000)
    with pytest.raises(DamagedFileError, match=r"a\.json: a line of more than"):
        [*jsonlines_module._blocks(tmp_path / "a.json")]


def test_a_truncated_gzip_is_named_in_whatever_block_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonlines_module, "_BLOCK_BYTES", 1000)
    whole = gzip.compress(random.Random(1).randbytes(20_000))
    for size in (5, 15, 1000, len(whole) - 9, len(whole) - 1):
        (tmp_path / "a.json.gz").write_bytes(whole[:size])
        for reading in (
            lambda: [*jsonlines_module._blocks(tmp_path / "a.json.gz")],
            lambda: check_gzip(tmp_path / "a.json.gz"),
        ):
            with pytest.raises(DamagedFileError, match=r"a\.json\.gz: truncated or corrupt gzip"):
                reading()
