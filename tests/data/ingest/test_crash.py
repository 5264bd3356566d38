"""Ingest that is killed, starved of disk, or run twice at once: in the end the same bytes, and never half a dataset."""

from __future__ import annotations

import gc
import json
import logging
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import pytest
from pyarrow.parquet import ParquetWriter

from reclaim.data.core.parquet import TableWriter
from reclaim.data.dataset import Dataset
from reclaim.data.errors import ConfigError
from reclaim.data.ingest.job import IngestConfig, ingest
from reclaim.data.ingest.readers.staging import RowsWriter
from reclaim.data.synthetic.job import SyntheticCellConfig, write_cell
from tests.folders import contents

Maker = Callable[..., dict[str, Any]]
Writer = Callable[..., Path]
Command = Callable[..., subprocess.CompletedProcess[str]]

BUCKETS, WORKERS, KILLS, SEED = 6, 2, 10, 7
MOST_ROUNDS = 60
"""Runs after which it is no luck any more that a stage was never met."""
KILLS_A_ROUND = 7
"""Kills of one run at most, that all three kinds are met; each waits longer, should the machine have become slower."""
_RUN = """
import sys
from pathlib import Path
from reclaim.data.core.engine import workers as engine
from reclaim.data.ingest.job import IngestConfig, ingest
engine.POOL_BYTES = int(sys.argv[3])
ingest(Path(sys.argv[1]), Path(sys.argv[2]), IngestConfig(buckets=int(sys.argv[4]), workers=int(sys.argv[5])))
"""
PROCESSES, THREADS = 0, 1 << 60
"""Input from which ingest starts processes: any, or none."""


def start(cell: Path, out: Path, pool_bytes: int) -> subprocess.Popen[bytes]:
    """Start an ingest in a process, and a process group, of its own."""
    words = [cell, out, pool_bytes, BUCKETS, WORKERS]
    return subprocess.Popen([sys.executable, "-W", "error", "-c", _RUN, *map(str, words)], start_new_session=True)


def stage_of(staging: Path, shards: int) -> str:
    """Return how far a killed ingest had come."""
    if not staging.exists():
        return "starting"
    if len(done_shards(staging)) < shards:
        return "reading"
    return "sorting" if len([*(staging / "buckets").glob("*.json")]) < BUCKETS else "listing"


def done_shards(staging: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in (staging / "shards").rglob("done.json")}


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a synthetic cell of a few shards of every table."""
    folder = tmp_path_factory.mktemp("crash") / "cell"
    write_cell(folder, SyntheticCellConfig(machines=60, days=1, shard_hours=3, seed=3))
    return folder


@pytest.mark.slow
def test_killed_ten_times_at_random_moments_it_ends_with_the_bytes_of_an_unbroken_run(
    cell: Path, tmp_path: Path
) -> None:
    for name in ("compiled", "unbroken"):  # the first run of a new installation compiles, which takes far longer
        begun = time.monotonic()
        assert start(cell, tmp_path / name, PROCESSES).wait() == 0
        lasts = time.monotonic() - begun
    unbroken, shards = contents(tmp_path / "unbroken"), len([*cell.glob("*.json.gz")])
    chance, hit, rounds = random.Random(SEED), Counter[str](), 0
    while (hit.total() < KILLS or not (hit["reading"] and hit["sorting"] + hit["listing"])) and rounds < MOST_ROUNDS:
        rounds += 1
        out, staging = tmp_path / f"out{rounds}", tmp_path / f"out{rounds}.partial"
        pool_bytes, whole_group = [(PROCESSES, False), (PROCESSES, True), (THREADS, False)][rounds % 3]
        kept: dict[Path, int] = {}
        for kill in count():
            process = start(cell, out, pool_bytes)
            try:
                assert process.wait(chance.uniform(0, lasts * 1.3**kill) if kill < KILLS_A_ROUND else None) == 0
                break
            except subprocess.TimeoutExpired:
                pass
            family = psutil.Process(process.pid).children(recursive=True)
            (os.killpg if whole_group else os.kill)(process.pid, signal.SIGKILL)
            ended = process.wait()
            orphans = psutil.wait_procs(family, timeout=120)[1]
            assert orphans == [], "a worker outlives the run that began it"
            if ended == 0:
                break  # it was done before the signal came
            if out.exists():
                hit["tidying"] += 1
            else:
                hit[stage_of(staging, shards)] += 1
                found = done_shards(staging)
                assert kept.items() <= found.items(), "a shard that was done was read again"
                kept = found
        assert contents(out) == unbroken
        assert not staging.exists()
        shutil.rmtree(out)
    logging.getLogger(__name__).info("kills by stage: %s; runs to the end: %d", dict(hit), rounds)
    assert hit["reading"], hit
    assert hit["sorting"] + hit["listing"], hit


@pytest.mark.slow
def test_a_second_ingest_into_the_same_folder_is_refused_and_the_first_is_not_harmed(
    cell: Path, tmp_path: Path, command_line: Command
) -> None:
    first = start(cell, tmp_path / "out", PROCESSES)
    lock = tmp_path / "out.partial" / "shards"
    while not lock.exists():
        assert first.poll() is None
        time.sleep(0.01)
    words = ["ingest", str(cell), str(tmp_path / "out"), "--buckets", str(BUCKETS)]
    refused = command_line(*words)
    assert first.wait() == 0
    told = refused.stderr.splitlines()
    assert (refused.returncode, len(told)) == (2, 1), told
    assert "another ingest is writing it; wait for it or choose another folder" in told[0]
    assert command_line(*words).returncode == 0  # it is there
    ingest(cell, tmp_path / "alone", IngestConfig(buckets=BUCKETS))
    assert contents(tmp_path / "out") == contents(tmp_path / "alone")


def write_cell_of_two_shards(cell: Path, window: Maker, event: Maker, write_shard: Writer) -> None:
    for shard in range(2):
        rows = [window(900 + 300 * k, instance_index=str(k % 9), collection_type="JOB" if k % 4 else "0")
                for k in range(shard, 400, 2)]  # fmt: skip
        write_shard(cell, f"instance_usage-{shard:012d}", rows)
    write_shard(cell, "instance_events-000000000000", [event(0, 3, instance_index=str(k)) for k in range(9)])


def full(*_: object, **__: object) -> None:
    raise OSError(28, os.strerror(28))


FULL_AT: dict[str, tuple[object, str]] = {
    "rows": (RowsWriter, "write"),
    "list of chunks": (RowsWriter, "__exit__"),
    "table": (TableWriter, "write"),
    "end of a table": (TableWriter, "__exit__"),
    "row group": (ParquetWriter, "write_table"),
}


@pytest.mark.parametrize("place", FULL_AT)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_full_disk_is_one_line_and_exit_code_2_and_with_room_the_run_goes_on(
    place: str, workers: int, tmp_path: Path, window: Maker, event: Maker, write_shard: Writer,
    command_line: Command,
) -> None:  # fmt: skip
    cell, out = tmp_path / "cell", tmp_path / "out"
    write_cell_of_two_shards(cell, window, event, write_shard)
    words = ["ingest", cell, "--buckets", 3, "--workers", workers]
    assert command_line(*words, tmp_path / "unbroken").returncode == 0
    owner, name = FULL_AT[place]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, full)
        stopped = command_line(*words, out)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # what stood for a full disk let files be left open
        gc.collect()
    told = stopped.stderr.splitlines()
    assert (stopped.returncode, len(told)) == (2, 1), told
    assert "No space left on device" in told[0]
    assert not out.exists()
    assert out.with_name("out.partial").exists()
    assert command_line(*words, out).returncode == 0
    assert contents(out) == contents(tmp_path / "unbroken")


@pytest.mark.slow
@pytest.mark.parametrize("pool_bytes", [PROCESSES, THREADS])
def test_on_a_disk_that_is_really_full_the_run_stops_with_one_line_and_goes_on_when_there_is_room(
    pool_bytes: int, cell: Path, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    small = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    if subprocess.run([*small, "mount -t tmpfs none /tmp"], capture_output=True).returncode:
        pytest.skip("no file system can be mounted here without privileges")
    code = (
        "import sys; from reclaim.data.core.engine import workers as engine; engine.POOL_BYTES = int(sys.argv.pop(1)); "
        "from reclaim.cli.app import main; sys.exit(main())"
    )
    run = f'"{sys.executable}" -c "{code}" {pool_bytes} ingest "{cell}" "{disk}/out" --buckets {BUCKETS} --workers 2'
    # In one shell, as the mount is gone with it: too small at first, then large enough, then copied out.
    script = (
        f'mount -t tmpfs -o size=3m none "{disk}" || exit 90; {run} 2> "{tmp_path}/told"; echo $? > "{tmp_path}/code"; '
        f'ls "{disk}" > "{tmp_path}/left"; mount -o remount,size=2g "{disk}" && {run} > "{tmp_path}/second" 2>&1 '
        f'&& cp -r "{disk}/out" "{tmp_path}/out"'
    )
    done = subprocess.run([*small, script], capture_output=True, text=True)
    told = (tmp_path / "told").read_text().strip().splitlines()
    assert (tmp_path / "code").read_text().strip() == "2", told
    assert len(told) == 1, told
    assert "No space left on device" in told[0]
    assert (tmp_path / "left").read_text().split() == ["out.partial"]
    assert done.returncode == 0, (tmp_path / "second").read_text()
    ingest(cell, tmp_path / "unbroken", IngestConfig(buckets=BUCKETS))
    assert contents(tmp_path / "out") == contents(tmp_path / "unbroken")


@pytest.mark.slow
def test_a_file_that_may_not_grow_further_ends_the_run_in_one_line_too(
    cell: Path, tmp_path: Path, command_line: Command
) -> None:
    def limited() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))

    words = ["ingest", str(cell), str(tmp_path / "out"), "--buckets", "1"]
    code = "import sys; from reclaim.cli.app import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", code, *words], preexec_fn=limited, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr[-2000:]
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()
    assert command_line(*words).returncode == 0
    assert Dataset.open(tmp_path / "out").n_windows


def test_what_a_killed_run_with_other_buckets_left_is_not_part_of_the_dataset(
    cell: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ingest(cell, tmp_path / "unbroken", IngestConfig(buckets=2))
    with monkeypatch.context() as patch:
        patch.setattr("reclaim.data.ingest.job.make_table", killed)
        with pytest.raises(KeyboardInterrupt):
            ingest(cell, tmp_path / "out", IngestConfig(buckets=5))
    (tmp_path / "out.partial" / "dataset" / "names.parquet").touch()  # a table that this trace does not have
    ingest(cell, tmp_path / "out", IngestConfig(buckets=2))
    assert contents(tmp_path / "out") == contents(tmp_path / "unbroken")


def killed(_job: object) -> None:
    raise KeyboardInterrupt


def test_what_a_killed_run_left_of_a_shard_is_not_taken_for_one_that_is_done(
    tmp_path: Path, window: Maker, event: Maker, write_shard: Writer
) -> None:
    cell, out = tmp_path / "cell", tmp_path / "out"
    write_cell_of_two_shards(cell, window, event, write_shard)
    ingest(cell, tmp_path / "unbroken", IngestConfig(buckets=3))
    (cell / "instance_usage-000000000001.json.gz").rename(tmp_path / "aside")
    (cell / "instance_usage-000000000001.json.gz").write_bytes((tmp_path / "aside").read_bytes()[:-9])
    with pytest.raises(Exception, match="damaged"):
        ingest(cell, out, IngestConfig(buckets=3))
    staging = tmp_path / "out.partial"
    (done,) = (path for path in done_shards(staging) if "usage-000000000000" in str(path))
    record = json.loads(done.read_text())
    done.unlink()  # as if it had been killed just before its last step
    assert record["taken"]["rows"] == 200
    os.replace(tmp_path / "aside", cell / "instance_usage-000000000001.json.gz")
    ingest(cell, out, IngestConfig(buckets=3))
    assert contents(out) == contents(tmp_path / "unbroken")


def test_a_lock_that_a_killed_run_left_behind_holds_nobody_up(
    tmp_path: Path, window: Maker, event: Maker, write_shard: Writer
) -> None:
    write_cell_of_two_shards(tmp_path / "cell", window, event, write_shard)
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "lock").write_text("")
    assert ingest(tmp_path / "cell", tmp_path / "out", IngestConfig(buckets=3)).dataset.n_windows == 400
    with pytest.raises(ConfigError):
        ingest(tmp_path / "cell", tmp_path / "out", IngestConfig(buckets=2))
