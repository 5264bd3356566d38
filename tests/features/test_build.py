"""Building a feature set: the same bytes however it is done, and each array what its name says."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from numpy.typing import NDArray

from reclaim.data import schema as s
from reclaim.data.core.engine.workers import Engine
from reclaim.data.dataset import MANIFEST, Dataset
from reclaim.data.errors import ConfigError, HistoryTooShortError, TraceError
from reclaim.data.ingest.job import IngestConfig, ingest
from reclaim.data.oom import oom_events
from reclaim.data.windows import COLUMNS, Windows, concatenate, measured_by_mean
from reclaim.features import bucket, build
from reclaim.features.build import FeatureConfig, build_features
from reclaim.features.feature_set import FOLDER, FeatureSet, array_path, array_shapes, write_journal
from reclaim.features.groups import AGES, TIER_LABELS
from reclaim.features.registry import FEATURE_NAMES
from reclaim.features.sample import SAMPLING, RowCounts, SampleConfig
from tests.folders import contents

Maker = Callable[..., dict[str, Any]]


def windows_of(dataset: Dataset) -> Windows:
    return concatenate([dataset.windows(b) for b in range(dataset.n_buckets)])


def column(features: FeatureSet, name: str) -> NDArray[np.float32]:
    return features.x[:, FEATURE_NAMES.index(name)]


def test_one_worker_and_two_and_one_for_each_core_write_the_same_bytes(synthetic_cell: Dataset) -> None:
    written = []
    for workers in (1, 2, 0):
        features, there = build_features(synthetic_cell, engine=Engine(workers=workers))
        assert not there
        written.append(contents(features.path))
        shutil.rmtree(features.path)
    assert written[0] == written[1] == written[2]
    assert len(written[0]) == len(array_shapes(0)) + 2  # the manifest and the journal: nothing is left behind


def test_how_many_buckets_the_tasks_are_spread_over_makes_no_difference_to_a_row(
    tmp_path: Path, window: Maker, event: Maker, write_shard: Callable[..., Path]
) -> None:
    rows, events = [], []
    for task in range(20):
        ids = {"collection_id": str(1000 + task // 4), "instance_index": str(task % 4)}
        events.append(event(0, 3, **ids))
        rows += [
            window(600 + 300 * k, **ids, average_usage={"cpus": 0.01 * (task + 1), "memory": 0.001 * k})
            for k in range(task, 60)
        ]
    write_shard(tmp_path / "cell", "instance_usage-000000000000", rows)
    write_shard(tmp_path / "cell", "instance_events-000000000000", events)
    found = []
    for buckets in (1, 5):
        folder = tmp_path / f"dataset{buckets}"
        dataset = ingest(tmp_path / "cell", folder, IngestConfig(buckets=buckets)).dataset
        features, windows = build_features(dataset, FeatureConfig(rows="all"))[0], windows_of(dataset)
        order = np.lexsort((windows.end_us, windows.instance_index, windows.collection_id))
        found.append((features.x[order], features.y[order]))
    for one, five in zip(*found, strict=True):
        assert np.array_equal(one, five, equal_nan=True)


def test_windows_of_some_collections_are_those_of_the_bucket_by_task_and_time(synthetic_cell: Dataset) -> None:
    windows = synthetic_cell.windows(0, measured=False)
    met = np.unique(windows.collection_id)[::3]
    mine = windows.take(np.isin(windows.collection_id, met))
    assert 0 < len(mine) < len(windows)
    found = synthetic_cell.windows_of(0, met)
    for name in ("collection_id", "instance_index", "end_us"):
        assert (getattr(found, name) == getattr(mine, name)).all()
    assert len(synthetic_cell.windows_of(0, met[:0])) == 0


def test_owners_are_unknown_where_they_are_not_asked_for_and_nothing_else_is(synthetic_cell: Dataset) -> None:
    whole, unowned = synthetic_cell.windows(0), synthetic_cell.windows(0, owned=False)
    assert (whole.user >= 0).any()
    for name in COLUMNS:
        expected = np.full(len(whole), -1) if name in ("user", "name") else getattr(whole, name)
        np.testing.assert_array_equal(getattr(unowned, name), expected)


def test_where_a_week_begins_moves_the_calendar_alone(synthetic_cell: Dataset) -> None:
    features, _ = build_features(synthetic_cell)
    before = {name: np.array(getattr(features, name)) for name in array_shapes(0)}
    features, there = build_features(synthetic_cell, FeatureConfig(monday_s=5 * 3_600))
    assert not there
    for name, array in before.items():
        if name != "x":
            assert np.array_equal(getattr(features, name), array, equal_nan=True), name
    same = ((features.x == before["x"]) | (np.isnan(features.x) & np.isnan(before["x"]))).all(axis=0)
    assert {FEATURE_NAMES[k] for k in np.flatnonzero(~same)} == {"hour_sin", "hour_cos", "day"}
    hours = (features.end_us / 3_600e6 - 5) % 24
    np.testing.assert_allclose(column(features, "hour_cos"), np.cos(2 * np.pi * hours / 24), atol=1e-6)
    np.testing.assert_allclose(column(features, "hour_sin"), np.sin(2 * np.pi * hours / 24), atol=1e-6)
    np.testing.assert_allclose(column(features, "day"), (features.end_us / 3_600e6 - 5) % 168 / 168, atol=1e-6)


def test_limits_are_told_by_the_largest_machine_of_the_cell(synthetic_cell: Dataset) -> None:
    features, _ = build_features(synthetic_cell, FeatureConfig(rows="all"))
    limit, (cpu, memory) = windows_of(synthetic_cell).limit, synthetic_cell.cell().largest_machine
    assert cpu > 0
    np.testing.assert_allclose(column(features, "cpu_limit"), np.log2(limit[:, 0] / cpu), rtol=1e-6)
    np.testing.assert_allclose(column(features, "memory_limit"), np.log2(limit[:, 1] / memory), rtol=1e-6)


def test_a_worker_that_dies_leaves_the_old_set_and_nothing_beside_it(
    synthetic_cell: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    features, _ = build_features(synthetic_cell)
    before, calls = contents(features.path), []

    def dying(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(bucket, "targets", dying)
    with pytest.raises(KeyboardInterrupt):
        build_features(synthetic_cell, FeatureConfig(monday_s=300), engine=Engine(workers=2))
    assert contents(FeatureSet.open(synthetic_cell.path).path) == before
    assert [p.name for p in synthetic_cell.path.iterdir() if p.name.startswith(FOLDER)] == [FOLDER]


@pytest.mark.parametrize("step", ["replace features", "replace new", "rmtree features.old.partial"])
def test_killed_while_it_is_put_in_place_a_second_run_ends_the_same_and_leaves_nothing_beside_it(
    step: str, synthetic_cell: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = FeatureConfig(monday_s=300)
    expected = contents(build_features(synthetic_cell, config)[0].path)
    build_features(synthetic_cell)
    dead = False

    def dying(name: str, real: Callable[..., None]) -> Callable[..., None]:
        def call(path: Path, *arguments: Any, **options: Any) -> None:
            nonlocal dead
            dead = dead or (f"{name} {path.name}" == step and path.exists())
            if dead:  # for good: a killed process tidies nothing up
                raise KeyboardInterrupt
            real(path, *arguments, **options)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", dying("replace", os.replace))
        patch.setattr(shutil, "rmtree", dying("rmtree", shutil.rmtree))
        with pytest.raises(KeyboardInterrupt):
            build_features(synthetic_cell, config)
    assert [p.name for p in synthetic_cell.path.iterdir() if "partial" in p.name]
    features, there = build_features(synthetic_cell, config)
    assert there == step.startswith("rmtree")
    assert contents(features.path) == expected
    assert [p.name for p in synthetic_cell.path.iterdir() if "partial" in p.name] == []


def test_a_second_run_at_the_same_time_is_refused_and_the_first_is_not_harmed(
    synthetic_cell: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = contents(build_features(synthetic_cell)[0].path)
    shutil.rmtree(synthetic_cell.path / FOLDER)

    def meanwhile(*arguments: Any) -> None:
        with pytest.raises(ConfigError, match="features: another run is writing it; wait for it"):
            build_features(synthetic_cell)
        write_journal(*arguments)

    monkeypatch.setattr(build, "write_journal", meanwhile)
    features, there = build_features(synthetic_cell)
    assert not there
    assert contents(features.path) == expected


@pytest.mark.parametrize("written", [0, 1_000, 1_000_000])
def test_on_a_full_disk_the_old_set_stays_and_nothing_beside_it(written: int, synthetic_cell: Dataset) -> None:
    before = contents(build_features(synthetic_cell)[0].path)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (written, limits[1]))
    try:
        with pytest.raises(OSError, match=r"File too large: '.*\.npy'"):
            build_features(synthetic_cell, FeatureConfig(monday_s=300))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert contents(FeatureSet.open(synthetic_cell.path).path) == before
    assert [p.name for p in synthetic_cell.path.iterdir() if p.name.startswith(FOLDER)] == [FOLDER]


def test_without_room_the_command_says_so_in_one_line_that_promises_nothing(synthetic_cell: Dataset) -> None:
    def limited() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))

    command = [sys.executable, "-c", "from reclaim.cli.app import main; main()", "features", str(synthetic_cell.path)]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=limited, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith(".npy: File too large; make room and run it again\n")
    assert len(done.stderr.splitlines()) == 1
    assert [p.name for p in synthetic_cell.path.iterdir() if p.name.startswith(FOLDER)] == []


@pytest.mark.parametrize("damage", ["gone", "cut", "no manifest", "no JSON"])
def test_a_damaged_set_is_built_anew(damage: str, synthetic_cell: Dataset) -> None:
    features, _ = build_features(synthetic_cell)
    expected = contents(features.path)
    match damage:
        case "gone":
            array_path(features.path, "first").unlink()
        case "cut":
            os.truncate(array_path(features.path, "x"), 1_000)
        case "no manifest":
            (features.path / MANIFEST).unlink()
        case _:
            (features.path / MANIFEST).write_text("{")
    features, there = build_features(synthetic_cell)
    assert not there
    assert contents(features.path) == expected
    assert build_features(synthetic_cell)[1]


def test_rows_and_counts_are_those_of_the_windows(synthetic_cell: Dataset) -> None:
    features, windows = build_features(synthetic_cell, FeatureConfig(rows="all"))[0], windows_of(synthetic_cell)
    assert np.array_equal(features.end_us, windows.end_us)
    assert np.array_equal(features.limit, windows.limit.astype(np.float32), equal_nan=True)
    for first, stop in pairwise(windows.task_starts()):
        assert (features.first[first:stop] == first).all()
    buckets = [(synthetic_cell.windows(b), synthetic_cell.events(b)) for b in range(synthetic_cell.n_buckets)]
    assert features.manifest["oom_events"] == sum(len(oom_events(w, events)[0]) for w, events in buckets)
    by_mean, measured = measured_by_mean(windows)
    shares = (by_mean.sum(axis=0) / measured.sum(axis=0)).tolist()
    assert features.manifest["measured_by_mean"] == {"cpu": shares[0], "memory": shares[1]}


def test_the_mean_limit_is_that_of_the_rows_that_prices_are_set_on_kept_or_not(synthetic_cell: Dataset) -> None:
    everything = build_features(synthetic_cell, FeatureConfig(rows="all"))[0]
    limit = everything.limit[everything.valid_rows()].astype(np.float64)
    expected = tuple(limit[:, r][limit[:, r] > 0].mean() for r in range(limit.shape[1]))
    assert everything.mean_limit == pytest.approx(expected, rel=1e-9)
    sampled = build_features(synthetic_cell, FeatureConfig(sample=SampleConfig(train=500, valid=500, test=500)))[0]
    assert len(sampled.valid_rows()) < len(limit)
    assert sampled.mean_limit == everything.mean_limit


def test_without_any_event_whether_a_task_ran_out_of_memory_is_unknown(
    tmp_path: Path, window: Maker, write_shard: Callable[..., Path]
) -> None:
    write_shard(tmp_path / "cell", "instance_usage-000000000000", [window(600 + 300 * k) for k in range(60)])
    dataset = ingest(tmp_path / "cell", tmp_path / "dataset", IngestConfig(buckets=1)).dataset
    features, _ = build_features(dataset)
    assert np.isnan(features.oom).all()
    assert features.manifest["oom_events"] == 0


def test_a_row_that_came_late_belongs_to_the_time_at_which_it_was_known(
    history: Callable[..., Windows], fold: Callable[..., FeatureSet]
) -> None:
    windows = history([0.1, 0.2, 0.3])
    windows.end_us[1] = windows.end_us[0] - 1  # within the first
    assert fold(windows).end_us.tolist() == np.maximum.accumulate(windows.end_us).tolist()


def test_a_limit_that_stands_for_none_and_cannot_be_kept_is_named(
    tmp_path: Path, window: Maker, event: Maker, write_shard: Callable[..., Path]
) -> None:
    other = {"collection_id": "5"}  # the first task, whose limits can be kept
    rows = [window(600 + 300 * k, **of) for k in range(60) for of in ({}, other)]
    write_shard(tmp_path / "cell", "instance_usage-000000000000", rows)
    unlimited = event(600, 3, resource_request={"cpus": 1e300, "memory": 0.5})
    write_shard(tmp_path / "cell", "instance_events-000000000000", [unlimited, event(600, 3, **other)])
    dataset = ingest(tmp_path / "cell", tmp_path / "dataset", IngestConfig(buckets=1)).dataset
    with pytest.raises(
        TraceError, match=r"dataset: task 9007199254740993, 0 has the limits 1e\+300 and 0\.5; .* 3\.4e\+38;"
    ):
        build_features(dataset)


@pytest.mark.parametrize("monday_s", [10**14, -(10**14)])
def test_a_monday_beyond_any_clock_is_refused(monday_s: int) -> None:
    with pytest.raises(ConfigError, match="monday_s is seconds on the trace's clock"):
        FeatureConfig(monday_s=monday_s)
    with pytest.raises(ConfigError, match="rows must be one of sample, all, got 'some'"):
        FeatureConfig(rows="some")


def test_a_trace_of_less_than_four_hours_or_without_windows_is_refused() -> None:
    def span_of(*seen_s: tuple[int, int], n_windows: int = 9) -> tuple[int, int]:
        first, last = ([time_s * 1_000_000 for time_s in times] for times in zip(*seen_s, strict=True))
        table = pa.table({s.FIRST_SEEN_US: first, s.LAST_SEEN_US: last})
        dataset: Any = SimpleNamespace(path=Path("d"), n_windows=n_windows, table=lambda *_: table)
        return build._span_us(dataset)

    assert span_of((900, 9_000), (600, 1_200), (7_000, 15_000)) == (600_000_000, 15_000_000_000)
    with pytest.raises(HistoryTooShortError, match=r"spans 14399 s.* at least 14400 s"):
        span_of((600, 14_999))
    with pytest.raises(HistoryTooShortError, match="no usage windows"):
        span_of((600, 90_000), n_windows=0)


@pytest.mark.parametrize(("n", "counted"), [(100, False), (101, True)])
def test_rows_are_counted_first_where_those_of_any_period_may_be_too_many(n: int, *, counted: bool) -> None:
    def each(*_: object) -> Iterator[RowCounts]:
        assert counted
        yield RowCounts(np.zeros((len(TIER_LABELS), len(AGES)), np.int64), 400, 25, 0.0)

    folding: Any = SimpleNamespace(dataset=SimpleNamespace(n_buckets=1))
    pool: Any = SimpleNamespace(each=each)
    shares = build._shares(folding, SampleConfig(train=1_000, valid=100, test=5_000), pool, n)
    assert (shares.valid, shares.test) == ((0.25, 1.0) if counted else (1.0, 1.0))


@pytest.mark.parametrize(
    ("name", "other"),
    [("oom_definition", lambda _: "another"), ("SAMPLING", SAMPLING + 1), ("TARGETS", ("cpu", "memory", "another"))],
)
def test_another_label_or_choice_of_rows_makes_another_feature_set(
    name: str, other: object, synthetic_cell: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = build_features(synthetic_cell)[0].fingerprint
    monkeypatch.setattr(build, name, other)
    built, there = build_features(synthetic_cell)
    assert not there
    assert built.fingerprint != before
