"""Staged rows: tables there and back, buckets as in SQL, and chunks on disk."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reclaim.data import schema as s
from reclaim.data.core.files import FULL_DISK
from reclaim.data.ingest.bucket import staged_schema
from reclaim.data.ingest.readers.staging import (
    CHUNKS_FILE,
    Layout,
    RowsWriter,
    buckets_of,
    count_rows,
    read_chunks,
    read_rows,
    save_chunks,
)
from reclaim.data.traces.google_v3 import google_v3
from tests.folders import full_disk

V3 = staged_schema(google_v3())
ALL_TYPES = pa.schema([*V3, s.EXTRAS[s.DIFFERENT_MACHINES], s.EXTRAS[s.AGGREGATION_TYPE], s.EXTRAS[s.DISK_MEAN]])
RANGES = {pa.int64(): (-(2**63) + 1, 2**63 - 1), pa.int32(): (-(2**31), 2**31 - 1), pa.int8(): (-128, 127)}

# Without NaN: in a row it is the same as null.
doubles = st.none() | st.floats(allow_nan=False) | st.sampled_from([-0.0, 5e-324, 1.7976931348623157e308, math.inf])


def values(field: pa.Field) -> st.SearchStrategy[object]:
    """Return what a column may hold."""
    if pa.types.is_integer(field.type):
        low, high = RANGES[field.type]
        return st.none() | st.integers(low, high) | st.sampled_from([low, high, 0, -1])
    if pa.types.is_boolean(field.type):
        return st.none() | st.booleans()
    if pa.types.is_floating(field.type):
        return doubles
    size = 11 if field.name == s.CPU_PERCENTILES else 9
    return st.none() | st.lists(st.floats(0, width=32, allow_nan=False), min_size=size, max_size=size)


rows_of_all_types = st.lists(
    st.tuples(*(values(field) for field in ALL_TYPES)).map(lambda row: dict(zip(ALL_TYPES.names, row, strict=True))),
    max_size=8,
).map(lambda rows: rows * 9)  # more than are turned into columns at once


@settings(max_examples=25, deadline=None, suppress_health_check=[*HealthCheck])
@given(rows=rows_of_all_types)
def test_a_table_of_every_type_comes_back_as_it_was(rows: list[dict[str, object]]) -> None:
    layout = Layout.of(ALL_TYPES)
    table = pa.Table.from_pylist(rows, schema=ALL_TYPES)
    staged = layout.rows_of(table)
    assert staged.shape == (len(rows), layout.words)
    back = layout.table_of(staged, np.arange(len(rows)))
    back.validate(full=True)
    assert back.schema.equals(ALL_TYPES)
    assert repr(back.to_pylist()) == repr(table.to_pylist())  # repr tells -0.0 from 0.0


@settings(max_examples=25, deadline=None, suppress_health_check=[*HealthCheck])
@given(rows=rows_of_all_types, data=st.data())
def test_the_same_rows_in_another_order_and_in_chunks_are_the_same_rows(
    rows: list[dict[str, object]], data: st.DataObject
) -> None:
    layout = Layout.of(ALL_TYPES)
    table = pa.Table.from_pylist(rows, schema=ALL_TYPES)
    order = np.array(data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=99)) if rows else [], np.int64)
    cut = len(rows) // 2
    chunked = pa.concat_tables([table.slice(0, cut), table.slice(cut)])
    assert (layout.rows_of(chunked) == layout.rows_of(table)).all()
    assert layout.table_of(layout.rows_of(table), order).equals(table.take(order))


def test_a_column_that_a_table_lacks_is_null_and_one_that_rows_lack_is_passed_over() -> None:
    layout = Layout.of(V3)
    table = pa.table({s.COLLECTION_ID: [1], "unheard_of": ["x"]})
    (row,) = layout.table_of(layout.rows_of(table), np.arange(1)).to_pylist()
    assert row == dict.fromkeys(V3.names) | {s.COLLECTION_ID: 1}


def test_a_column_of_vectors_may_be_null_without_a_type_as_a_null_of_sql_is() -> None:
    layout = Layout.of(V3)
    keys = {s.COLLECTION_ID: pa.array([1, 2]), s.INSTANCE_INDEX: pa.array([0, 0])}
    table = pa.table({**keys, s.CPU_PERCENTILES: pa.nulls(2)})
    assert (layout.rows_of(table) == layout.rows_of(pa.table(keys))).all()


def test_nan_counts_as_null() -> None:
    layout = Layout.of(V3)
    table = pa.table({s.CPU_MEAN: [math.nan, 0.5], s.CPU_PERCENTILES: [[math.nan] * 11, [0.5] * 11]})
    back = layout.table_of(layout.rows_of(table), np.arange(2))
    assert back[s.CPU_MEAN].to_pylist() == [None, 0.5]
    assert back[s.CPU_PERCENTILES].to_pylist() == [None, [0.5] * 11]


def test_a_number_takes_a_word_and_a_percentile_half_of_one() -> None:
    one = [V3.field(name) for name in (s.COLLECTION_ID, s.CPU_MEAN, s.CPU_PERCENTILES, s.CPU_TAIL_PERCENTILES)]
    assert Layout.of(pa.schema(one)).words == 1 + 1 + 10  # of 11 and 9
    assert Layout.of(pa.schema(one[:3])).words == 1 + 1 + 6  # the last word is half empty


int64 = st.integers(-(2**63), 2**63 - 1) | st.sampled_from([0, -1, 1, -(2**63), 2**63 - 1, 1_000_003, 998_244_353])


@settings(max_examples=30, deadline=None)
@given(tasks=st.lists(st.tuples(int64, int64), min_size=1, max_size=200), buckets=st.integers(1, 9999))
def test_a_task_has_the_bucket_that_the_formula_gives(tasks: list[tuple[int, int]], buckets: int) -> None:
    collection, index = (np.array(column, np.int64) for column in zip(*tasks, strict=True))
    low = 2**63 - 1
    expected = [((c & low) % 1_000_003 * 1_000_003 + (i & low) % 1_000_003) % 998_244_353 % buckets for c, i in tasks]
    assert buckets_of(collection, index, buckets).tolist() == expected


def some_rows(layout: Layout, n: int, seed: int) -> np.ndarray[tuple[int, int], np.dtype[np.uint64]]:
    random = np.random.default_rng(seed)
    rows = random.integers(0, 2**63, (n, layout.words), np.uint64)
    rows[:, :2] = random.integers(0, 50, (n, 2), np.uint64)
    return rows


@pytest.mark.parametrize("buckets", [1, 7])
def test_rows_written_bucket_by_bucket_are_all_there_in_their_order(buckets: int, tmp_path: Path) -> None:
    layout = Layout.of(V3)
    blocks = [some_rows(layout, n, n) for n in (0, 1, 100, 1000)]
    folders = [tmp_path / "a", tmp_path / "b", tmp_path / "empty"]
    for folder, part in zip(folders, (blocks[:3], blocks[3:], []), strict=True):
        folder.mkdir()
        with RowsWriter(folder, layout, buckets) as writer:
            for block in part:
                writer.write(writer.pack(block))
        assert writer.rows == sum(map(len, part))
    whole = np.concatenate(blocks)
    bucket = buckets_of(layout.integer(whole, s.COLLECTION_ID), layout.integer(whole, s.INSTANCE_INDEX), buckets)
    for k in range(buckets):
        found = np.concatenate([np.empty((0, layout.words), np.uint64), *read_chunks(folders, layout, k)])
        assert (found == whole[bucket == k]).all()
        assert (read_rows(folders, layout, k) == found).all()
        assert count_rows(folders, k) == len(found) == np.count_nonzero(bucket == k)


def test_a_writer_that_fails_leaves_no_list_of_chunks(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), RowsWriter(tmp_path, Layout.of(V3), 3):
        raise KeyboardInterrupt
    assert not (tmp_path / CHUNKS_FILE).exists()


def test_a_full_disk_is_an_error_of_the_system_where_the_list_of_chunks_is_written(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="File too large") as refusal, full_disk(after=10_000):
        save_chunks(tmp_path, np.zeros((10_000, 4), np.int64))
    assert refusal.value.errno in FULL_DISK
