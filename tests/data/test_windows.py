"""Windows: what a reservation had to cover in each, where its rows belong, and whose they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from reclaim.data import schema as s
from reclaim.data.dataset import Dataset, Owners, bucket_name
from reclaim.data.errors import SchemaError
from reclaim.data.windows import (
    CHANNELS,
    CPU_MAX,
    CPU_MEAN,
    LEVELS,
    MEMORY_MAX,
    MEMORY_MEAN,
    P0,
    P10,
    P50,
    P90,
    P99,
    P100,
    Cell,
    Windows,
    concatenate,
    demand,
    empty_windows,
    identities,
    measured_by_mean,
    peak_cpu,
    sort_windows,
    what_is_judged,
    with_demand,
    with_p90_alone,
)


def test_windows_that_have_their_demand_give_it_with_their_rows_and_lose_it_with_a_column() -> None:
    rng = np.random.default_rng(3)
    windows = empty_windows(50)
    windows.usage[:], windows.limit[:] = rng.random((50, len(CHANNELS))), rng.random((50, 2))
    kept, rows = with_demand(windows), np.array([7, 3, 3, 40])
    for same in (kept, with_p90_alone(kept)):
        assert demand(same) is demand(kept)
        np.testing.assert_array_equal(demand(same.take(rows)), demand(windows.take(rows)))
    half = replace(kept, limit=kept.limit / 2)
    np.testing.assert_array_equal(demand(half), demand(replace(windows, limit=windows.limit / 2)))


def test_what_is_judged_of_windows_demands_the_same_in_fewer_bytes() -> None:
    rng = np.random.default_rng(1)
    windows = empty_windows(50)
    windows.usage[:], windows.percentiles[:], windows.limit[:] = (
        np.where(rng.random(a.shape) < 0.2, np.nan, rng.uniform(0, 2, a.shape))
        for a in (windows.usage, windows.percentiles, windows.limit)
    )
    fewer = what_is_judged(windows)
    assert fewer.usage.nbytes + fewer.percentiles.nbytes < 0.3 * (windows.usage.nbytes + windows.percentiles.nbytes)
    for same in (fewer, what_is_judged(fewer), concatenate([fewer.take(slice(0, 20)), fewer.take(slice(20, 50))])):
        np.testing.assert_array_equal(demand(same), demand(windows), strict=True)
        np.testing.assert_array_equal(peak_cpu(same), peak_cpu(windows), strict=True)
        for part, whole in zip(measured_by_mean(same), measured_by_mean(windows), strict=True):
            np.testing.assert_array_equal(part, whole)


def test_demand_takes_the_best_that_is_known_caps_cpu_alone_and_leaves_the_unknown_unknown() -> None:
    windows = empty_windows(5)
    windows.limit[:] = [1.0, 1.8]
    windows.limit[3] = np.nan
    windows.usage[0, [CPU_MEAN, CPU_MAX, MEMORY_MEAN, MEMORY_MAX]] = [0.2, 3.0, 0.4, 0.6]
    windows.usage[1, [CPU_MEAN, MEMORY_MAX]] = [0.2, 2.0]
    windows.usage[2, [CPU_MEAN, MEMORY_MEAN]] = [0.2, 0.4]
    windows.usage[3, MEMORY_MAX] = 7.0
    windows.percentiles[[0, 1, 3], P90] = [0.5, 1.5, 7.0]
    expected = [[0.5, 0.6], [1.0, 2.0], [0.2, 0.4], [7.0, 7.0], [np.nan, np.nan]]
    assert np.array_equal(demand(windows), np.array(expected), equal_nan=True)
    by_mean, measured = measured_by_mean(windows)
    assert by_mean.tolist() == [[False, False], [False, False], [True, True], [False, False], [False, False]]
    assert measured.sum(axis=0).tolist() == [4, 4]
    assert np.array_equal(peak_cpu(windows), [3.0, 0.2, 0.2, np.nan, np.nan], equal_nan=True)


def test_tasks_are_numbered_in_the_order_they_stand() -> None:
    windows = empty_windows(5)
    windows.collection_id[:] = [1, 1, 1, 2, 2]
    windows.instance_index[:] = [0, 0, 7, 7, 7]
    assert windows.task_starts().tolist() == [0, 2, 3, 5]
    assert windows.task_numbers().tolist() == [0, 0, 1, 2, 2]
    assert empty_windows(0).task_starts().tolist() == [0]


def test_all_rows_of_the_tasks_of_some_rows_are_taken_with_the_places_of_these() -> None:
    windows = empty_windows(10)
    windows.collection_id[:] = [1, 1, 1, 2, 2, 3, 4, 4, 4, 4]
    windows.end_us[:] = np.arange(10)
    for rows, of_tasks in (
        ([0], [0, 1, 2]), ([4, 5], [3, 4, 5]), ([2, 6, 9], [0, 1, 2, 6, 7, 8, 9]), ([3], [3, 4]),
        ([0, 3, 5, 6], list(range(10))), ([], []),
    ):  # fmt: skip
        taken, places = windows.tasks_of(np.array(rows, np.int64))
        assert taken.end_us.tolist() == of_tasks
        assert taken.end_us[places].tolist() == rows


def test_the_levels_of_both_vectors_stand_in_one_rising_row() -> None:
    assert (*range(0, 90, 10), *range(90, 101)) == LEVELS
    assert [LEVELS[p] for p in (P0, P10, P50, P90, P99, P100)] == [0, 10, 50, 90, 99, 100]


Read = Callable[[pa.Table], Windows]
DECILES, TAIL = [float(level) for level in s.PERCENTILES], [float(level) for level in s.TAIL_PERCENTILES]


def usage_table(deciles: list[list[float] | None], tail: list[list[float] | None]) -> pa.Table:
    rows = [{s.CPU_PERCENTILES: d, s.CPU_TAIL_PERCENTILES: t, s.COLLECTION_ID: 7 + i // 2, s.INSTANCE_INDEX: 0}
            for i, (d, t) in enumerate(zip(deciles, tail, strict=True))]  # fmt: skip
    return pa.Table.from_pylist([dict.fromkeys(s.USAGE.names, None) | row | dict.fromkeys((s.START_US, s.END_US), 1)
                                 for row in rows], s.USAGE)  # fmt: skip


@pytest.fixture
def windows_of(tmp_path: Path) -> Read:
    """Return what reads usage rows as a dataset does."""
    (tmp_path / "usage").mkdir()

    def windows_of(table: pa.Table) -> Windows:
        pq.write_table(table, tmp_path / "usage" / bucket_name(0), row_group_size=2)
        return Dataset(tmp_path, {}).windows(0, owned=False)

    return windows_of


def test_a_maximum_of_0_beside_a_mean_above_it_is_unknown_in_any_dataset(windows_of: Read) -> None:
    table = usage_table([None] * 3, [None] * 3)
    for name, values in {s.MEMORY_MEAN: [0.5, 0.0, 0.5], s.MEMORY_MAX: [0.0, 0.0, 0.7], s.CPU_MEAN: [0.5] * 3,
                         s.CPU_MAX: [0.0, 0.6, None]}.items():  # fmt: skip
        table = table.set_column(s.USAGE.names.index(name), s.USAGE.field(name), pa.array(values, pa.float64()))
    windows = windows_of(table)
    assert demand(windows)[:, 1].tolist() == [0.5, 0.0, 0.7]
    assert peak_cpu(windows).tolist() == [0.5, 0.6, 0.5]


@pytest.mark.parametrize("pieces", [1, 2])
def test_each_percentile_arrives_at_its_level_and_a_missing_vector_leaves_its_levels_unknown(
    windows_of: Read, pieces: int
) -> None:
    table = usage_table([DECILES, None, DECILES, None], [TAIL, TAIL, None, None])
    table = pa.concat_tables([table] * pieces)
    windows = windows_of(table)
    nan = np.nan
    no_tail = [level if level % 10 == 0 else nan for level in LEVELS]
    no_deciles = [level if level in s.TAIL_PERCENTILES else nan for level in LEVELS]
    expected = np.array([LEVELS, no_deciles, no_tail, [nan] * 20] * pieces, np.float32)
    assert windows.percentiles.dtype == np.float32
    assert np.array_equal(windows.percentiles, expected, equal_nan=True)


def test_a_vector_that_is_not_as_long_as_its_levels_is_refused(windows_of: Read) -> None:
    for wrong in (DECILES[:-1], [*DECILES, 1.0]):
        with pytest.raises(SchemaError, match=r"cpu_percentiles: expected null or 11 values.*run `reclaim ingest`"):
            windows_of(usage_table([DECILES, wrong], [None, None]))
    with pytest.raises(SchemaError, match="cpu_tail_percentiles: expected null or 9"):  # ten and eight make two nines
        windows_of(usage_table([None, None], [[*TAIL, 1.0], TAIL[1:]]))


def test_a_row_has_the_owner_of_its_collection_and_minus_one_where_none_is_known() -> None:
    owners = Owners(*np.array([[6, 8, 9], [60, 80, 90], [600, -1, 900]]))
    assert [a.tolist() for a in owners.of(np.array([7, 7, 8, 8, 9]))] == [[-1, -1, 80, 80, 90], [-1, -1, -1, -1, 900]]
    assert [a.tolist() for a in owners.of(np.array([99, 9, 6]))] == [[-1, 90, 60], [-1, 900, 600]]
    assert [len(a) for a in owners.of(np.zeros(0, np.int64))] == [0, 0]
    none = Owners(*np.zeros((3, 0), np.int64))
    assert none.of(np.array([7]))[0].tolist() == [-1]


def test_a_bucket_is_read_group_by_group_with_the_owners_of_the_tasks_and_the_largest_machine(tmp_path: Path) -> None:
    table = usage_table([DECILES, None, DECILES, DECILES, None], [None, TAIL, None, TAIL, None])
    (tmp_path / "usage").mkdir()
    pq.write_table(table, tmp_path / "usage" / bucket_name(0), row_group_size=2)
    tasks = [(7, 0, "u", "l"), (8, 0, "v", None), (8, 1, "v", None), (8, 2, "v", None), (10, 0, None, "l")]
    names = (s.COLLECTION_ID, s.INSTANCE_INDEX, s.USER_ID, s.LOGICAL_NAME_ID)
    rows = [dict.fromkeys(s.TASKS.names, None) | dict(zip(names, task, strict=True)) for task in tasks]
    pq.write_table(pa.Table.from_pylist(rows, s.TASKS), tmp_path / "tasks.parquet", row_group_size=3)
    machines = pa.table({s.CPU_CAPACITY: [0.5, None, 0.7], s.MEMORY_CAPACITY: pa.nulls(3, pa.float64())})
    pq.write_table(machines, tmp_path / "machines.parquet")
    dataset = Dataset(tmp_path, {})
    windows = dataset.windows(0)
    known = np.array([[True, False], [False, True], [True, False], [True, True], [False, False]])
    assert np.array_equal(~np.isnan(windows.percentiles[:, [P50, LEVELS.index(91)]]), known)
    assert windows.collection_id.tolist() == [7, 7, 8, 8, 9]
    u, v, name = identities(["u", "v", "l"]).tolist()
    assert windows.user.tolist() == [u, u, v, v, -1]
    assert windows.name.tolist() == [name, name, -1, -1, -1]
    assert dataset.owners.collection_id.tolist() == [7, 8, 10]
    cell = dataset.cell(monday_us=5)
    assert cell.largest_machine[0] == 0.7
    assert np.isnan(cell.largest_machine[1])
    assert cell.monday_us == 5


def test_each_column_of_usage_arrives_in_its_own_place(windows_of: Read) -> None:
    table = usage_table([None] * 3, [None] * 3)
    numbers = {name: 0.5 + k for k, name in enumerate((*CHANNELS, s.CPU_LIMIT, s.MEMORY_LIMIT))}
    for name, value in numbers.items():
        at = s.USAGE.names.index(name)
        table = table.set_column(at, name, pa.array([value, None, value]).cast(s.USAGE.field(name).type))
    at = s.USAGE.names.index(s.ALLOC_COLLECTION_ID)
    table = table.set_column(at, s.ALLOC_COLLECTION_ID, pa.array([None, 0, 70], pa.int64()))
    windows = windows_of(table)
    for row in (0, 2):
        assert windows.usage[row].tolist() == [0.5, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5]
        assert windows.limit[row].tolist() == [7.5, 8.5]
    assert np.isnan(windows.usage[1]).all()
    assert np.isnan(windows.limit[1]).all()
    assert windows.in_alloc.tolist() == [False, True, True]  # 0 is an alloc set, too


def test_the_windows_of_some_collections_have_their_task_and_time_alone(tmp_path: Path) -> None:
    table = usage_table([None] * 6, [None] * 6)  # of collections 7, 7, 8, 8, 9, 9
    ends = pa.array([10, 20, 30, 40, 50, 60], pa.int64())
    table = table.set_column(s.USAGE.names.index(s.END_US), s.USAGE.field(s.END_US), ends)
    (tmp_path / "usage").mkdir()
    pq.write_table(table, tmp_path / "usage" / bucket_name(0))
    windows = Dataset(tmp_path, {}).windows_of(0, np.array([9, 5, 7]))
    assert windows.collection_id.tolist() == [7, 7, 9, 9]
    assert windows.end_us.tolist() == [10, 20, 50, 60]
    assert np.isnan(windows.usage).all()


def test_equal_strings_are_one_identity_and_none_is_unknown() -> None:
    numbers = identities(["a", "b", None, "a", ""])
    assert numbers.dtype == np.int64
    assert numbers[2] == -1
    assert numbers[0] == numbers[3]
    assert len(set(numbers.tolist())) == 4
    assert (numbers[[0, 1, 4]] >= 0).all()
    assert identities(["a"]).tolist() == [1702698405120146464]  # by b2sum -l 64: the same in every process
    assert identities([]).shape == (0,)


def test_taking_joining_and_sorting_keep_every_array_in_step() -> None:
    windows = empty_windows(3)
    windows.collection_id[:] = [3, 1, 2]
    windows.user[:] = windows.name[:] = windows.percentiles[:, P50] = windows.collection_id
    for made in (sort_windows(windows), concatenate([windows.take(np.array([1, 2])), windows.take(slice(0, 1))])):
        assert made.collection_id.tolist() == made.user.tolist() == made.name.tolist() == [1, 2, 3]
        assert made.percentiles[:, P50].tolist() == [1, 2, 3]


def test_nothing_is_known_of_a_cell_by_default() -> None:
    assert np.isnan(Cell().largest_machine).all()
    assert Cell().monday_us == 0
