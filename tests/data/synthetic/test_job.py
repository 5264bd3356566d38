"""The synthetic cell: equal bytes for equal options, the v3 layout, and the difficulties of a real cell."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from reclaim.data.errors import ConfigError
from reclaim.data.schema import TIERS, EventType
from reclaim.data.synthetic.job import MANIFEST, SyntheticCellConfig, write_cell
from reclaim.data.synthetic.shapes import CPU_RATIO, MEMORY_RATIO, RESOURCE_VALUE, read_table, resource_code
from tests.folders import killed_with_the_folder_in_place

TABLES = ("instance_usage", "instance_events", "collection_events", "machine_events", "machine_attributes")
SCHEDULE, EVICT, FAIL, FINISH = EventType.SCHEDULE, EventType.EVICT, EventType.FAIL, EventType.FINISH
KILL, UPDATE_RUNNING = EventType.KILL, EventType.UPDATE_RUNNING
SMALL = SyntheticCellConfig(machines=4, days=0.5, seed=3)
Row = dict[str, Any]


def read_json(folder: Path, table: str) -> list[Row]:
    rows: list[Row] = []
    for path in sorted(folder.glob(f"{table}-*.json.gz")):
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            rows += [json.loads(line) for line in lines]
    return rows


def digest(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}


def task_of(row: Row) -> tuple[int, int]:
    return int(row["collection_id"]), int(row["instance_index"])


class WrittenCell:
    """A cell read back: its tables as rows, its truth, and each task's events in order."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tables = {table: read_json(folder, table) for table in TABLES}
        self.usage = self.tables["instance_usage"]
        self.truth = pq.read_table(folder / "truth.parquet").to_pylist()
        self.events: dict[tuple[int, int], list[Row]] = defaultdict(list)
        for row in self.tables["instance_events"]:
            self.events[task_of(row)].append(row)

    def limits(self, row: Row) -> Row:
        """Return the last event of the task at or before the start of a usage row: the limits that hold in it."""
        start = int(row["start_time"])
        return [e for e in self.events[task_of(row)] if int(e["time"]) <= start][-1]

    def last_windows(self, cause: str) -> list[tuple[Row, Row]]:
        """Return (last window, event whose limits hold in it) of the runs that ended for a cause."""
        ends = {(t["collection_id"], t["instance_index"], t["time"]) for t in self.truth if t["cause"] == cause}
        last = [row for row in self.usage if (*task_of(row), int(row["end_time"])) in ends]
        return [(row, self.limits(row)) for row in last]


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> WrittenCell:
    folder = tmp_path_factory.mktemp("synthetic") / "cell"
    write_cell(folder, SyntheticCellConfig(machines=5, days=1.0, seed=1, shard_hours=6))
    return WrittenCell(folder)


def test_the_same_seed_gives_the_same_bytes_and_another_seed_does_not(tmp_path: Path) -> None:
    write_cell(tmp_path / "a", SMALL)
    write_cell(tmp_path / "b", SMALL)
    write_cell(tmp_path / "c", SyntheticCellConfig(machines=4, days=0.5, seed=4))
    assert digest(tmp_path / "a") == digest(tmp_path / "b")
    assert digest(tmp_path / "a")["truth.parquet"] != digest(tmp_path / "c")["truth.parquet"]


def test_a_run_after_a_killed_one_gives_the_same_bytes(tmp_path: Path) -> None:
    def killed(share: float) -> None:
        if share > 0.5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_cell(tmp_path / "cell", SMALL, progress=killed)
    assert not (tmp_path / "cell").exists()
    write_cell(tmp_path / "cell", SMALL)
    write_cell(tmp_path / "fresh", SMALL)
    assert digest(tmp_path / "cell") == digest(tmp_path / "fresh")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cell", "fresh"]


def test_a_run_after_one_killed_with_the_cell_in_place_removes_what_that_one_left_next_to_it(tmp_path: Path) -> None:
    with killed_with_the_folder_in_place(), pytest.raises(KeyboardInterrupt):
        write_cell(tmp_path / "cell", SMALL)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cell", "cell.partial"]
    assert not write_cell(tmp_path / "cell", SMALL).wrote
    assert [p.name for p in tmp_path.iterdir()] == ["cell"]


def test_a_second_run_does_nothing_and_other_content_is_refused(tmp_path: Path) -> None:
    assert write_cell(tmp_path / "cell", SMALL).wrote
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "cell").iterdir()}
    again = write_cell(tmp_path / "cell", SMALL)
    assert not again.wrote
    assert before == {p: p.stat().st_mtime_ns for p in (tmp_path / "cell").iterdir()}
    with pytest.raises(ConfigError, match=r"cell holds another synthetic cell \(seed=3 instead of 9\)"):
        write_cell(tmp_path / "cell", SyntheticCellConfig(machines=4, days=0.5, seed=9))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    for content in (None, "[]", '{"options": 3}', "{}"):
        if content is not None:
            (tmp_path / "other" / MANIFEST).write_text(content)
        with pytest.raises(ConfigError, match="other exists and is not a synthetic cell"):
            write_cell(tmp_path / "other", SMALL)


def test_a_seed_may_be_of_any_size() -> None:
    assert SyntheticCellConfig(seed=10**30).seed == 10**30


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"machines": 0}, "machines must be at least 1, but got machines=0"),
        ({"days": 0.0}, "days must be at least .*, but got days=0.0"),
        ({"days": float("nan")}, "days must be at least"),
        ({"seed": -1}, "seed must be at least 0, but got seed=-1"),
        ({"seed": 1.5}, "seed must be a whole number, but got seed=1.5"),
        ({"tasks_per_machine": 0.0}, "tasks_per_machine must be above 0"),
        (
            {"machines": 4, "tasks_per_machine": 1.0},
            "machines times tasks_per_machine must be at least 5, but got 4 times",
        ),
        ({"days": 1e9}, "days must be at most 3660, but got days=1000000000.0"),
        ({"format": "csv"}, "format must be one of json, parquet, or openmetrics .*, but got format='csv'"),
        ({"shard_hours": 0}, "shard_hours must be at least 1"),
        ({"common": -0.1}, "common must be at least 0, but got common=-0.1"),
        ({"service": float("nan")}, "service must be at least 0, but got service=nan"),
        ({"common": 0.6, "service": 0.4}, "must be below 1 together, but got common=0.6, service=0.4"),
    ],
)
def test_an_option_out_of_range_is_refused_by_name_and_value(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SyntheticCellConfig(**options)


def test_progress_rises_to_one(tmp_path: Path) -> None:
    shares: list[float] = []
    write_cell(tmp_path / "cell", SyntheticCellConfig(machines=1, days=0.1), progress=shares.append)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert shares[0] > 0


def test_all_five_tables_have_the_fields_of_the_format(cell: WrittenCell) -> None:
    always = {
        "instance_usage": "start_time end_time collection_id instance_index machine_id alloc_collection_id "
        "collection_type average_usage maximum_usage random_sample_usage assigned_memory page_cache_memory sample_rate",
        "instance_events": "time type collection_id scheduling_class collection_type priority alloc_collection_id "
        "instance_index machine_id alloc_instance_index resource_request",
        "collection_events": "time type collection_id scheduling_class collection_type priority alloc_collection_id "
        "collection_name vertical_scaling scheduler",
        "machine_events": "time machine_id type switch_id capacity platform_id",
        "machine_attributes": "time machine_id name value deleted",
    }
    sometimes = {
        "instance_usage": "alloc_instance_index cycles_per_instruction memory_accesses_per_instruction "
        "cpu_usage_distribution tail_cpu_usage_distribution",
        "instance_events": "missing_type",
        "collection_events": "user collection_logical_name missing_type",
        "machine_events": "",
        "machine_attributes": "",
    }
    for table, rows in cell.tables.items():
        seen = set().union(*rows)
        assert set(always[table].split()) == set.intersection(*(set(r) for r in rows)), table
        assert seen - set(always[table].split()) <= set(sometimes[table].split()), table
    row = cell.usage[0]
    assert all(isinstance(row[k], str) for k in ("start_time", "collection_id", "instance_index", "collection_type"))
    assert isinstance(row["average_usage"]["cpus"], float | int)


def test_ids_are_exact_and_some_pass_two_to_the_53(cell: WrittenCell) -> None:
    ids = {int(r["collection_id"]) for r in cell.tables["collection_events"]}
    assert any(i > 2**53 and int(float(i)) != i for i in ids)
    assert {int(r["collection_id"]) for r in cell.usage} <= ids
    assert {t["collection_id"] for t in cell.truth} <= ids


def test_usage_comes_in_windows_of_300_s_in_time_order_and_shards_follow_the_hours(cell: WrittenCell) -> None:
    starts = np.array([int(r["start_time"]) for r in cell.usage])
    ends = np.array([int(r["end_time"]) for r in cell.usage])
    assert (np.diff(starts) >= 0).all()
    assert starts[0] == 600_000_000
    assert (ends > starts).all()
    assert (starts // 300_000_000 == (ends - 1) // 300_000_000).all()
    full = ends - starts == 300_000_000
    assert 0.85 < full.mean() < 0.99
    assert len(list(cell.folder.glob("instance_usage-*"))) == 4
    first = read_json_shard(cell.folder / "instance_usage-000000000000.json.gz")
    assert max(int(r["end_time"]) for r in first) == (600 + 6 * 3600) * 1_000_000


def read_json_shard(path: Path) -> list[Row]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def test_the_length_of_a_shard_changes_no_row(tmp_path: Path) -> None:
    write_cell(tmp_path / "long", SMALL)
    write_cell(tmp_path / "short", SyntheticCellConfig(machines=4, days=0.5, seed=3, shard_hours=3))
    for table in TABLES:
        assert read_json(tmp_path / "long", table) == read_json(tmp_path / "short", table)


def test_every_usage_row_lies_within_a_run_of_its_task_on_its_machine(cell: WrittenCell) -> None:
    runs: dict[tuple[int, int], list[tuple[int, int, str]]] = defaultdict(list)
    for task, events in cell.events.items():
        begin = None
        for e in events:
            time, kind = int(e["time"]), int(e["type"])
            if kind == SCHEDULE:
                begin = (time, e["machine_id"])
            elif kind in (EVICT, FAIL, FINISH, KILL) and begin is not None:
                runs[task].append((begin[0], time, begin[1]))
                begin = None
        if begin is not None:
            runs[task].append((begin[0], 2**63 - 1, begin[1]))
    for row in cell.usage:
        start, end = int(row["start_time"]), int(row["end_time"])
        assert any(a <= start and end <= b and m == row["machine_id"] for a, b, m in runs[task_of(row)]), row


def test_events_of_a_task_follow_its_life(cell: WrittenCell) -> None:
    after = {
        0: {1, 2},
        1: {2},
        2: {3, 7, 9},
        3: {4, 5, 6, 7, 10},
        4: {0},
        5: {0},
        6: set(),
        7: set(),
        9: {3, 7},
        10: {4, 5, 6, 7, 10},
    }
    for events in cell.events.values():
        kinds = [int(e["type"]) for e in events]
        assert kinds[0] == 0
        assert all(b in after[a] for a, b in pairwise(kinds)), kinds
    times = [int(e["time"]) for e in cell.tables["instance_events"]]
    assert times == sorted(times)
    assert times[0] == 0  # tasks that ran when the trace began


def test_percentiles_rise_and_end_near_the_maximum(cell: WrittenCell) -> None:
    rows = [r for r in cell.usage if "cpu_usage_distribution" in r]
    vectors = np.array([r["cpu_usage_distribution"] for r in rows])
    assert vectors.shape[1] == 11
    assert (np.diff(vectors, axis=1) >= 0).all()
    # As in the real windows: the 100th percentile counts coarser samples, so mostly it is at most the maximum.
    maximum = np.array([r["maximum_usage"]["cpus"] for r in rows])
    assert (vectors[:, 10] <= 1.17 * maximum + 2e-6).all()
    assert 0.01 < (vectors[:, 10] > 1.01 * maximum).mean() < 0.10
    tails = [
        (r["cpu_usage_distribution"], r["tail_cpu_usage_distribution"])
        for r in rows
        if "tail_cpu_usage_distribution" in r
    ]
    assert tails
    for vector, tail in tails:
        assert len(tail) == 9
        assert vector[9] <= tail[0]
        assert tail == sorted(tail)
        assert tail[-1] <= vector[10]


def test_memory_never_passes_the_limit_and_cpu_often_does(cell: WrittenCell) -> None:
    bursts = []
    for row in cell.usage:
        limit = cell.limits(row)["resource_request"]
        assert row["average_usage"]["memory"] <= row["maximum_usage"].get("memory", np.inf)
        assert row["maximum_usage"].get("memory", 0.0) <= limit["memory"]
        assert row["average_usage"]["cpus"] <= row["maximum_usage"]["cpus"]
        bursts.append(row["maximum_usage"]["cpus"] > limit["cpus"])
    assert 0.3 < np.mean(bursts) < 0.8


def test_each_oom_is_a_fail_whose_last_window_touches_the_limit(cell: WrittenCell) -> None:
    ooms = [t for t in cell.truth if t["cause"] == "oom_limit"]
    assert len(ooms) >= 3
    assert len(cell.last_windows("oom_limit")) == len(ooms)
    for window, event in cell.last_windows("oom_limit"):
        assert window["maximum_usage"]["memory"] == event["resource_request"]["memory"]
    for t in ooms:
        at_that_time = [e for e in cell.events[t["collection_id"], t["instance_index"]] if int(e["time"]) == t["time"]]
        assert FAIL in [int(e["type"]) for e in at_that_time]


def test_failures_and_full_memory_exist_without_oom(cell: WrittenCell) -> None:
    def fullness(pair: tuple[Row, Row]) -> float:
        row, event = pair
        return float(row["maximum_usage"].get("memory", 0.0) / event["resource_request"]["memory"])

    failed = [fullness(p) for p in cell.last_windows("program_failure")]
    assert min(failed) < 0.8
    # Windows at the limit are far more than kills: page cache, plateaus and near misses touch it and live.
    full = sum(fullness((row, cell.limits(row))) >= 0.98 for row in cell.usage)
    assert full > 5 * len(cell.last_windows("oom_limit"))


def test_runs_end_for_many_causes_and_tasks_restart(cell: WrittenCell) -> None:
    causes = {t["cause"] for t in cell.truth}
    assert {"oom_limit", "program_failure", "evict_machine", "finish", "kill"} <= causes
    terminal = sorted(
        (*task_of(e), int(e["time"]))
        for e in cell.tables["instance_events"]
        if int(e["type"]) in (EVICT, FAIL, FINISH) or (int(e["type"]) == KILL and e["machine_id"] != "0")
    )
    assert terminal == sorted((t["collection_id"], t["instance_index"], t["time"]) for t in cell.truth)
    assert any([int(e["type"]) for e in events].count(SCHEDULE) > 1 for events in cell.events.values())
    assert any(e["type"] == str(UPDATE_RUNNING) for e in cell.tables["instance_events"])


def test_a_removed_machine_runs_nothing_until_it_returns(cell: WrittenCell) -> None:
    events = cell.tables["machine_events"]
    removals = [e for e in events if e["type"] == "2"]
    assert removals
    for removal in removals:
        gone = int(removal["time"])
        back = [int(e["time"]) for e in events if e["type"] == "1" and e["machine_id"] == removal["machine_id"]]
        until = min((t for t in back if t > gone), default=2**63 - 1)
        for row in cell.usage:
            if row["machine_id"] == removal["machine_id"]:
                assert int(row["end_time"]) <= gone + 2_000_000 or int(row["start_time"]) >= until


def test_alloc_sets_hold_tasks_that_report_no_assigned_memory(cell: WrittenCell) -> None:
    sets = {int(r["collection_id"]) for r in cell.usage if r["collection_type"] == "1"}
    inside = [r for r in cell.usage if r["alloc_collection_id"] != "0"]
    assert sets
    assert inside
    assert {int(r["alloc_collection_id"]) for r in inside} == sets
    assert all(r["assigned_memory"] == 0 and "alloc_instance_index" in r for r in inside)
    assert all("alloc_instance_index" not in r for r in cell.usage if r["alloc_collection_id"] == "0")
    host = {(*task_of(r), r["start_time"]): r["machine_id"] for r in cell.usage if r["collection_type"] == "1"}
    for r in inside:
        at = (int(r["alloc_collection_id"]), int(r["alloc_instance_index"]), r["start_time"])
        assert host.get(at, r["machine_id"]) == r["machine_id"]


def test_missing_fields_are_as_frequent_as_in_the_real_windows(cell: WrittenCell) -> None:
    def lacking(name: str) -> float:
        return float(np.mean([name not in r for r in cell.usage]))

    assert 0.2 < lacking("cycles_per_instruction") < 0.6
    assert 0.03 < lacking("cpu_usage_distribution") < 0.25
    assert 0.9 < lacking("tail_cpu_usage_distribution") < 0.98
    assert 0.004 < np.mean(["memory" not in r["maximum_usage"] for r in cell.usage]) < 0.02


def test_tables_drawn_at_normal_scores_give_back_the_fitted_quantiles() -> None:
    score = np.random.default_rng(0).standard_normal(20_000)
    for table in (CPU_RATIO, MEMORY_RATIO):
        for tier in range(len(TIERS)):
            drawn = read_table(table, np.full(len(score), tier), score)
            assert np.quantile(drawn, [0.05, 0.25, 0.5, 0.75, 0.95]) == pytest.approx(table[tier], rel=0.1)


def test_usage_over_limit_of_each_tier_lies_where_it_was_fitted(cell: WrittenCell) -> None:
    ratios: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for row in cell.usage:
        event = cell.limits(row)
        if row["collection_type"] == "0" and int(row["end_time"]) - int(row["start_time"]) == 300_000_000:
            tier = int(np.searchsorted([99, 115, 119, 359], int(event["priority"])))
            limit, used = event["resource_request"], row["average_usage"]
            ratios[tier].append((used["cpus"] / limit["cpus"], used["memory"] / limit["memory"]))
    assert sorted(ratios) == list(range(len(TIERS)))
    for tier, pairs in ratios.items():
        cpu, memory = np.median(pairs, axis=0)
        # A small cell holds few collections, so its median may lie anywhere among the fitted middle half, and around.
        assert CPU_RATIO[tier, 1] / 2 < cpu < CPU_RATIO[tier, 3] * 1.5, TIERS[tier]
        assert MEMORY_RATIO[tier, 1] * 0.8 < memory < MEMORY_RATIO[tier, 3] * 1.2, TIERS[tier]


def test_json_and_parquet_hold_the_same_rows(tmp_path: Path) -> None:
    write_cell(tmp_path / "json", SMALL)
    write_cell(tmp_path / "parquet", SyntheticCellConfig(machines=4, days=0.5, seed=3, format="parquet"))
    integers = {"int64"}
    for table in TABLES:
        parquet = pq.read_table(tmp_path / "parquet" / f"{table}-000000000000.parquet")
        whole = {f.name for f in parquet.schema if str(f.type) in integers}

        def shown(row: Row, whole: set[str] = whole) -> Row:
            kept = {k: v for k, v in row.items() if v is not None and v != []}
            kept = {
                k: {n: x for n, x in v.items() if x is not None} if isinstance(v, dict) else v for k, v in kept.items()
            }
            return {k: str(v) if k in whole else v for k, v in kept.items()}

        assert [shown(r) for r in parquet.to_pylist()] == read_json(tmp_path / "json", table)
    assert digest(tmp_path / "json")["truth.parquet"] == digest(tmp_path / "parquet")["truth.parquet"]


def test_amounts_are_rounded_to_ten_binary_digits_and_keep_their_order() -> None:
    amounts = np.sort(np.random.default_rng(0).lognormal(-5, 2, 5000).clip(0, 8))
    rounded = RESOURCE_VALUE[resource_code(amounts)]
    assert (np.diff(rounded) >= 0).all()
    assert np.abs(rounded - amounts).max() <= 8 * 2.0**-10
    assert (np.abs(rounded - amounts) <= np.maximum(amounts * 2.0**-10, 2.0**-20)).all()
    assert (RESOURCE_VALUE[resource_code(rounded)] == rounded).all()


def test_without_movement_in_common_a_cell_is_what_it_was_before_the_settings(tmp_path: Path) -> None:
    write_cell(tmp_path / "cell", SMALL)
    assert not {"common", "service"} & set(json.loads((tmp_path / "cell" / "SYNTHETIC.json").read_text())["options"])
    # Of the rows, not of the files: these differ by the version of zlib.
    rows = hashlib.sha256()
    for table in TABLES:
        rows.update(gzip.decompress((tmp_path / "cell" / f"{table}-000000000000.json.gz").read_bytes()))
    assert rows.hexdigest() == "c15010e33289ff2255ec4c2c9c64e5c9d3440f34c28e2c7677b1cd0f6bd82791"


def test_a_cell_of_before_the_settings_is_that_of_no_movement_in_common(tmp_path: Path) -> None:
    write_cell(tmp_path / "cell", SMALL)
    assert not write_cell(tmp_path / "cell", replace(SMALL, common=0.0)).wrote
    with pytest.raises(ConfigError, match=r"holds another synthetic cell \(common=0.0 instead of 0.4\)"):
        write_cell(tmp_path / "cell", replace(SMALL, common=0.4))


def mean_correlations(folder: Path, resource: str) -> tuple[float, float]:
    """Return mean correlations of the usage of production tasks: on one machine in several collections; in one."""
    windows = pq.read_table(folder / "instance_usage-000000000000.parquet").to_pylist()
    events = pq.read_table(folder / "instance_events-000000000000.parquet", columns=["collection_id", "priority"])
    production = {row["collection_id"] for row in events.to_pylist() if row["priority"] >= 120}
    rows: dict[tuple[int, int, int], dict[int, float]] = defaultdict(dict)
    for row in windows:
        if row["collection_type"] == 0 and row["collection_id"] in production:
            task = row["machine_id"], row["collection_id"], row["instance_index"]
            rows[task][row["start_time"] // 300_000_000] = row["average_usage"][resource]
    times = sorted({t for used in rows.values() for t in used})
    tasks = [task for task, used in rows.items() if len(used) > 0.9 * len(times)]
    usage = np.array([[rows[task].get(t, np.nan) for t in times] for task in tasks])
    moves = np.corrcoef(np.where(np.isnan(usage), np.nanmean(usage, axis=1, keepdims=True), usage))
    machine, collection = (np.array([task[k] for task in tasks]) for k in (0, 1))
    alike, siblings = machine[:, None] == machine, collection[:, None] == collection
    return float(moves[alike & ~siblings].mean()), float(moves[siblings & ~np.eye(len(tasks), dtype=bool)].mean())


def test_usage_moves_together_by_the_shares_that_are_asked(tmp_path: Path) -> None:
    usual = SyntheticCellConfig(machines=8, days=1.0, seed=6, format="parquet", shard_hours=48)
    found = {}
    for common, service in ((0.0, 0.0), (0.4, 0.0), (0.0, 0.4), (0.4, 0.2)):
        write_cell(tmp_path / f"{common}-{service}", replace(usual, common=common, service=service))
        found[common, service] = mean_correlations(tmp_path / f"{common}-{service}", "cpus")
    others, siblings = found[0.0, 0.0]
    assert abs(others) < 0.2  # their days peak near the same hour
    for (common, service), (of_machine, of_collection) in found.items():
        # Of what a task has of its own, days are alike, and siblings move together without the settings.
        own = 1 - common - service
        assert of_machine == pytest.approx(common + own * others, abs=0.1), (common, service)
        assert of_collection == pytest.approx(common + service + own * siblings, abs=0.1), (common, service)
    memory = {shares: mean_correlations(tmp_path / f"{shares[0]}-{shares[1]}", "memory")[0] for shares in found}
    assert abs(memory[0.0, 0.0]) < 0.1
    assert memory[0.4, 0.0] > 0.2  # leaks, ramps and jumps come from the tasks alone
