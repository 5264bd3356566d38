"""Workers of every kind: results in the order of the jobs, errors of their own type."""

from __future__ import annotations

import gzip
import json
import operator
import os
import socket
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reclaim.data.core.duck import DamagedFileError, check_gzip
from reclaim.data.core.engine import workers as engine
from reclaim.data.core.engine.workers import Engine, Workers, plan_workers
from reclaim.data.dataset import Dataset
from reclaim.data.errors import ConfigError, ReclaimError, SchemaError
from tests.pickled import Pickled

Maker = Callable[..., dict[str, Any]]
Writer = Callable[..., Path]

SERIAL, THREADS, PROCESSES = (1, 1 << 60), (2, 1 << 60), (2, 0)
"""Workers, and the input from which they are processes."""


KINDS = [SERIAL, THREADS, pytest.param(PROCESSES, marks=pytest.mark.slow)]


@pytest.mark.parametrize("kind", KINDS)
def test_results_come_in_the_order_of_the_jobs_and_every_end_is_told(
    kind: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "POOL_BYTES", kind[1])
    told = Counter[int]()
    with Workers("local", kind[0], 1) as pool:
        assert pool.separate == (kind == PROCESSES)
        assert pool.run(str.upper, [*"abcdefg"], lambda place: told.update([place])) == [*"ABCDEFG"]
        assert pool.run(str.upper, [], lambda place: told.update([place])) == []
    assert told == Counter(range(7))


def wrong_jobs(folder: Path) -> dict[str, tuple[Callable[[Any], Any], list[Path], type[Exception], str]]:
    """Return functions that other processes know, too, and jobs the second of which fails."""
    for name, version in (("good", 2), ("other", 1)):
        (folder / name).mkdir()
        (folder / name / "manifest.json").write_text(json.dumps({"format_version": version}))
        (folder / f"{name}.gz").write_bytes(gzip.compress(b"abc")[: version * 99 - 99 or 9])
    return {
        "damaged": (check_gzip, [folder / "good.gz", folder / "other.gz"], DamagedFileError, r"other\.gz: truncated"),
        "schema": (Dataset.open, [folder / "good", folder / "other"], SchemaError, "other: dataset format 1"),
        "system": (os.mkdir, [folder / "new", folder / "other"], FileExistsError, "File exists: .*other"),
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", ["damaged", "schema", "system"])
def test_an_error_in_one_job_is_raised_as_itself_and_jobs_done_before_are_kept(
    what: str, kind: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "POOL_BYTES", kind[1])
    function, jobs, error, message = wrong_jobs(tmp_path)[what]
    told: list[int] = []
    with pytest.raises(error, match=message) as caught, Workers("local", kind[0], 1) as pool:
        pool.run(function, jobs, told.append)
    assert type(caught.value) is error
    assert 1 not in told
    if isinstance(caught.value, OSError):
        assert (caught.value.errno, str(caught.value.filename)) == (17, str(jobs[1]))
        assert (tmp_path / "new").exists()


@pytest.mark.slow
def test_a_worker_that_is_killed_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "POOL_BYTES", PROCESSES[1])
    with (
        pytest.raises(ReclaimError, match="a worker was killed, most likely for its memory"),
        Workers("local", 2, 1) as pool,
    ):
        pool.run(os._exit, [9, 9], print)


def test_without_ray_its_engine_is_an_error_that_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # what the import system makes of a module that is not there
    with (
        pytest.raises(ConfigError, match=r"Ray is not installed; pip install 'ray\[train\]'"),
        Workers("ray", 2, 1) as pool,
    ):
        pool.run(str, [1], print)


@pytest.mark.slow
def test_what_the_jobs_of_processes_share_is_sent_once_whatever_their_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    shared = Pickled(5)
    with Engine("processes", 2).pool() as pool:
        assert pool.separate
        add = partial(operator.add, shared)
        calls = [(add, job) for job in range(8)] + [(partial(operator.sub, 1), job) for job in range(3)]
        assert [*pool.each_call(calls)] == [*range(5, 13), 1, 0, -1]
        assert shared.times == 1
        assert pool.run(add, range(8), lambda _: None) == [*range(5, 13)]
        assert shared.times == 2
        assert not any(tmp_path.glob("reclaim-*/*"))  # kept no longer than its jobs


@pytest.mark.slow
def test_processes_have_the_environment_of_now_whatever_that_of_earlier_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    for word in ("first", "second"):
        monkeypatch.setenv("RECLAIM_TOLD", word)
        with Engine("processes", 2).pool() as pool:
            assert pool.run(os.getenv, ["RECLAIM_TOLD"], lambda _: None) == [word]


def test_an_engine_is_one_of_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match="engine must be one of local, processes, ray, got 'spark'"):
        Engine("spark")
    assert not Engine("processes", 1).pool().separate
    assert not Engine("local", 2).pool().separate


@settings(deadline=None)
@given(workers=st.integers(0, 64), memory=st.integers(512, 1 << 16), n_bytes=st.sampled_from([0, 1 << 50]))
def test_a_plan_is_never_more_than_asked_for_nor_larger_than_the_memory(
    workers: int, memory: int, n_bytes: int
) -> None:
    fitting, each = plan_workers("local", workers, memory, n_bytes)
    assert 1 <= fitting <= (workers or fitting)
    assert 0 < each * (fitting if n_bytes else 1) < memory


@pytest.mark.parametrize("kind", KINDS)
def test_results_are_yielded_in_the_order_of_the_jobs_and_few_are_begun_ahead(
    kind: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "POOL_BYTES", kind[1])
    begun: list[str] = []

    def jobs() -> Iterator[str]:
        for letter in "abcdefghij":
            begun.append(letter)
            yield letter

    with Workers("local", kind[0], 1) as pool:
        results = pool.each(str.upper, jobs())
        assert begun == []
        assert next(results) == "A"
        assert len(begun) == 2 * kind[0]
        assert [*results] == [*"BCDEFGHIJ"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_error_ends_what_is_yielded(
    kind: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "POOL_BYTES", kind[1])
    function, jobs, error, message = wrong_jobs(tmp_path)["schema"]
    with pytest.raises(error, match=message), Workers("local", kind[0], 1) as pool:
        [*pool.each(function, jobs)]


@pytest.mark.parametrize("workers", [1, 2])
def test_after_the_first_error_of_a_run_no_more_jobs_are_begun_than_were_ahead(workers: int) -> None:
    ran: list[int] = []

    def third_fails(number: int) -> None:
        ran.append(number)
        if number == 2:
            raise ValueError(number)

    with pytest.raises(ValueError, match="2"), Workers("local", workers) as pool:
        pool.run(third_fails, range(100), lambda _: None)
    assert len(ran) <= 3 + 2 * workers


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_a_cluster_that_does_not_answer_is_named_at_once_with_what_to_do(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"{scheme}127.0.0.1:{server.getsockname()[1]}"
    monkeypatch.setenv("RAY_ADDRESS", address)  # its port is closed by now
    with pytest.raises(
        ConfigError, match=rf"no cluster answers at RAY_ADDRESS={address} .*; start one with `ray start"
    ):
        engine.connected_ray(1)
