"""Bodies that are large or bad on purpose: what is looked at of them is counted, and bounded."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from reclaim.data import schema as s
from reclaim.data.windows import demand, peak_cpu
from reclaim.serving.wire import arrow, errors, rows
from reclaim.serving.wire.cell_schemas import (
    MOST_ERRORS,
    MOST_NAMED,
    CellQuery,
    TasksRequest,
    UsageRequest,
    UsageWindow,
)
from reclaim.serving.wire.errors import RequestError, error_from_validation, parse_body
from reclaim.serving.wire.schemas import Units

UNITS = Units(cpu="cores", memory="bytes")
GOOD = {"collection_id": 1, "start_us": 0, "end_us": 10, "limit": {"cpu": 1, "memory": 1}}
SCHEMA = pa.schema([(name, pa.int64()) for name in (s.COLLECTION_ID, s.START_US, s.END_US)])


def usage(items: list[Any], max_rows: int = 1_000_000) -> rows.UsageRows:
    return rows.usage_from_json(json.dumps({"windows": items}).encode(), UNITS, max_rows)


def refusal(call: Callable[[], object]) -> RequestError:
    with pytest.raises(RequestError) as refused:
        call()
    return refused.value


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> list[ValidationError]:
    """Return the problems that were put into words."""
    told: list[ValidationError] = []

    def counted(error: ValidationError) -> RequestError:
        told.append(error)
        return error_from_validation(error)

    monkeypatch.setattr(rows, "error_from_validation", counted)
    return told


def test_only_the_first_bad_rows_are_described_and_all_are_counted(described: list[ValidationError]) -> None:
    told = usage([GOOD, *[1] * 300, {**GOOD, "more": 1}, *[GOOD] * 3])
    assert told.refusals.counts == {"invalid_field": 300, "unknown_field": 1}
    assert [error.row for error in told.refusals.errors] == list(range(1, MOST_ERRORS + 1))
    assert told.row.tolist() == [0, 302, 303, 304]
    assert len(described) == MOST_ERRORS


def test_a_body_of_bad_rows_is_given_up(described: list[ValidationError], monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[object] = []
    validate = UsageWindow.model_validate

    def counted(item: object) -> UsageWindow:
        looked_at.append(item)
        return validate(item)

    monkeypatch.setattr(UsageWindow, "model_validate", counted)
    refused = refusal(lambda: usage([GOOD, *[1] * 500_000]))
    assert (refused.status, refused.body.error.code) == (422, "too_many_bad_rows")
    assert "windows[1]" in str(refused)
    assert len(looked_at) == 10_002
    assert len(described) == MOST_ERRORS
    assert len(usage([GOOD, *[1] * 10_000]).row) == 1


@pytest.mark.parametrize("name", ["tasks", "collections"])
def test_bad_facts_are_given_up_too(name: str) -> None:
    body = json.dumps({name: [1] * 20_000}).encode()
    assert refusal(lambda: rows.facts_from_json(body, 10**6)).body.error.code == "too_many_bad_rows"


def test_pydantic_is_not_asked_for_every_fault_of_a_list() -> None:
    for model, name in ((UsageRequest, "windows"), (TasksRequest, "tasks"), (CellQuery, "machines")):
        with pytest.raises(ValidationError) as error:
            model.model_validate({name: ["x"] * 1_000})
        assert error.value.error_count() == 1


def test_a_list_has_so_many_rows_at_most() -> None:
    assert usage([GOOD] * 3, 3).rows == 3
    refused = refusal(lambda: usage([1] * 4, 3))
    assert (refused.status, refused.body.error.code, refused.body.error.field) == (413, "too_many_rows", "windows")
    facts = json.dumps({"collections": [1] * 4}).encode()
    assert refusal(lambda: rows.facts_from_json(facts, 3)).body.error.field == "collections"
    query = json.dumps({"machines": [1] * (MOST_NAMED + 1)}).encode()
    assert refusal(lambda: parse_body(query, CellQuery)).body.error.field == "machines"


@pytest.mark.parametrize("before", [1, None, [], {}])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_an_object_of_absurdly_many_names_is_refused_wherever_it_stands(
    before: object, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(errors, "error_from_validation", None)  # it is not put into words
    item: Any = {f"a{k}": 1 for k in range(300)}
    for _ in range(depth):
        item = [before, item]
    refused = refusal(lambda: usage([before, item]))
    assert "an object of 300 fields" in str(refused)


def stream(schema: pa.Schema, batches: list[pa.RecordBatch], **options: Any) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return bytes(sink.getvalue())


def read(body: bytes, max_rows: int = 5_000) -> pa.Table:
    return arrow.read_table(body, rows.USAGE_COLUMNS, (s.COLLECTION_ID,), max_rows)


def worded(words: list[str], n: int = 1) -> pa.RecordBatch:
    one = pa.array([1] * n)
    users = pa.DictionaryArray.from_arrays(pa.array([0] * n, pa.int32()), pa.array(words, pa.string()))
    return pa.record_batch([one, one, one, users], [*SCHEMA.names, "user"])


def test_a_stream_has_so_many_batches_at_most() -> None:
    empty = pa.RecordBatch.from_arrays([pa.array([], pa.int64())] * 3, schema=SCHEMA)
    assert len(read(stream(SCHEMA, [empty] * 1_000))) == 0
    refused = refusal(lambda: read(stream(SCHEMA, [empty] * 1_001)))
    assert (refused.status, refused.body.error.code) == (413, "too_many_batches")
    changing = [worded([str(k)]) for k in range(1_001)]
    assert "1000 dictionaries" in str(refusal(lambda: read(stream(changing[0].schema, changing))))


def test_dictionaries_have_so_many_words_at_most() -> None:
    half = [worded([str(k) for k in range(2_500)]), worded([str(-k) for k in range(2_500)])]
    assert len(read(stream(half[0].schema, half))) == 2
    refused = refusal(lambda: read(stream(half[0].schema, [*half, worded(["x"])])))
    assert (refused.status, refused.body.error.code) == (413, "too_many_words")


def test_a_dictionary_that_grows_is_refused() -> None:
    growing = [worded(["a"]), worded(["a", "b"])]
    refused = refusal(lambda: read(stream(growing[0].schema, growing, emit_dictionary_deltas=True)))
    assert (refused.status, refused.body.error.code) == (422, "delta_dictionary")


def test_a_dictionary_is_looked_over_once(monkeypatch: pytest.MonkeyPatch) -> None:
    known: list[int] = []

    class Addresses(set[int]):
        def add(self, address: int) -> None:
            known.append(address)
            super().add(address)

    validate = arrow._validate
    addresses = Addresses()
    monkeypatch.setattr(arrow, "_validate", lambda batch, _: validate(batch, addresses))
    same = worded([str(k) for k in range(1_000)])
    read(stream(same.schema, [same] * 50))
    assert len(known) == 50
    assert len(addresses) == 1


def test_an_index_outside_its_dictionary_is_refused() -> None:
    body = stream(worded(["a"]).schema, [worded(["a"], 64)])
    place = body.rindex(b"\0" * 4 * 64)
    for outside in (1, -1):
        bad = body[: place + 8] + outside.to_bytes(4, "little", signed=True) + body[place + 12 :]
        assert refusal(partial(read, bad)).body.error.code == "malformed_arrow"


def test_refused_rows_are_described_by_row_whatever_they_were_refused_for() -> None:
    refusals = rows.Refusals()
    refusals.add("b", np.arange(1_000, 500, -1), "late")
    refusals.add("a", [400, 7], "early")
    refusals.add("c", np.arange(0), "never")
    assert refusals.counts == {"b": 500, "a": 2}
    assert [error.row for error in refusals.errors] == [7, 400, *range(501, 599)]
    assert [error.code for error in refusals.errors[1:3]] == ["a", "b"]


def test_a_row_that_tells_only_of_its_collection_is_no_task() -> None:
    table = pa.table({
        s.COLLECTION_ID: [1, 2, 3], s.INSTANCE_INDEX: [0, 0, 5], rows.ESTIMATION: [False, True, None],
        s.MACHINE_ID: [None, 9, None],
    })  # fmt: skip
    told = rows.facts_from_arrow(arrow.write_table(table).to_pybytes(), 10)
    assert told.estimation == {1: False, 2: True}
    assert told.key.tolist() == [[2, 0], [3, 5]]
    assert (told.row.tolist(), told.rows, told.refusals.counts) == ([1, 2], 3, {})


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ('{"windows": [], "windows": []}', "windows"),
        ('{"windows": [{"end_us": 1, "start_us": 0, "end_us": 2}]}', "end_us"),
        ('{"a": 1, "\\u0061": 1}', "a"),
        ('{"windows": [{"user": "a:b", "user": "c"}]}', "user"),
        ('[{"a:b": 1, "a:b": 1}]', "a:b"),
    ],
)
def test_a_field_that_comes_twice_is_refused_by_name(body: str, name: str) -> None:
    refused = refusal(lambda: errors.parse_json(body.encode()))
    assert (refused.status, refused.body.error.code, refused.body.error.field) == (400, "duplicate_field", name)


_VALUE = st.none() | st.floats(allow_nan=False) | st.integers() | st.text(':ab"\\', max_size=4)


def _holding(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(inner, max_size=3) | st.dictionaries(st.text(":ab", max_size=2), inner, max_size=3)


@given(st.recursive(_VALUE, _holding), st.booleans())
def test_json_without_twins_is_read_as_it_is(value: Any, escaped: bool) -> None:
    body = json.dumps(value)
    body = body.replace("b", "\\u0062") if escaped else body
    assert errors.parse_json(body.encode()) == value


def test_windows_of_a_request_that_contradict_each_other_are_refused_by_row() -> None:
    other, more, elsewhere = {**GOOD, "cpu_mean": 0.5}, {**GOOD, "cpu_mean": 0.1}, {**GOOD, "start_us": 5}
    told = usage([{**GOOD, "cpu_mean": 0.1}, more, other, GOOD, elsewhere, {**GOOD, "instance_index": 1}])
    assert told.row.tolist() == [0, 1, 3, 5]  # a repeat is none, nor is one that says less
    assert told.refusals.counts == {"contradiction": 2}
    assert [error.row for error in told.refusals.errors] == [2, 4]
    table = pa.Table.from_pylist([{s.COLLECTION_ID: 1, s.START_US: k, s.END_US: 10} for k in (0, 0, 1)], SCHEMA)
    assert rows.usage_from_arrow(bytes(arrow.write_table(table)), 10).refusals.counts == {"contradiction": 1}


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(1, 3), st.integers(0, 1)), max_size=30))
def test_contradictions_are_those_that_a_search_of_all_pairs_finds(told: list[tuple[int, int, int, int]]) -> None:
    items = [
        {**GOOD, "collection_id": c, "instance_index": i, "end_us": end, "cpu_mean": float(usage)}
        for c, i, end, usage in told
    ]
    first: dict[tuple[int, int, int], int] = {}
    wrong = [row for row, (*name, usage) in enumerate(told) if first.setdefault(tuple(name), usage) != usage]  # type: ignore[arg-type]
    found = rows.usage_from_json(json.dumps({"windows": items or [GOOD]}).encode(), UNITS, 100)
    assert found.row.tolist() == [row for row in range(max(len(told), 1)) if row not in wrong]


@pytest.mark.parametrize("name", ["cpu", "memory"])
def test_a_mean_above_its_maximum_is_refused_and_a_maximum_of_0_is_unknown(name: str) -> None:
    means = [(0.2, 0.1), (0.1, 0.1), (0.1 + 1e-9, 0.1), (0.2, 0.0), (0.0, 0.0)]
    told = [{**GOOD, "end_us": 10 + k, f"{name}_mean": m, f"{name}_max": x} for k, (m, x) in enumerate(means)]
    assert usage(told).row.tolist() == [1, 2, 3, 4]
    flat = [{n: v for n, v in row.items() if n != "limit"} for row in told]
    table = pa.Table.from_pylist(
        flat, pa.schema([*SCHEMA, (f"{name}_mean", pa.float64()), (f"{name}_max", pa.float64())])
    )
    found = rows.usage_from_arrow(bytes(arrow.write_table(table)), 10)
    assert (found.row.tolist(), found.refusals.errors[0].field) == ([1, 2, 3, 4], f"{name}_mean")


def test_a_maximum_of_0_beside_a_mean_above_it_is_no_measurement() -> None:
    """Else 0 would be the demand, and the reservation far below what is used."""
    told = [{**GOOD, "end_us": 10, "memory_mean": 3.0, "memory_max": 0.0, "cpu_mean": 0.0, "cpu_max": 0.0}]
    schema = pa.schema(
        [*SCHEMA, *((f"{name}_{of}", pa.float64()) for name in ("cpu", "memory") for of in ("mean", "max"))]
    )
    flat = [{n: v for n, v in row.items() if n != "limit"} for row in told]
    for found in (usage(told), rows.usage_from_arrow(bytes(arrow.write_table(pa.Table.from_pylist(flat, schema))), 10)):
        assert demand(found.windows)[0].tolist() == [0.0, 3.0]
        assert peak_cpu(found.windows).tolist() == [0.0]


def test_a_window_longer_than_a_day_has_times_of_two_units_and_is_refused() -> None:
    day = 86_400_000_000
    spans = [(0, day), (0, day + 1), (1_700_000_000, 1_700_000_000_000_000)]
    told = [{**GOOD, "instance_index": k, "start_us": a, "end_us": b} for k, (a, b) in enumerate(spans)]
    assert usage(told).row.tolist() == [0]
    flat = [{n: v for n, v in row.items() if n not in ("limit", "instance_index")} for row in told]
    found = rows.usage_from_arrow(bytes(arrow.write_table(pa.Table.from_pylist(flat, SCHEMA))), 10)
    assert (found.row.tolist(), found.refusals.counts) == ([0], {"invalid_field": 2})


def test_facts_behind_the_end_of_their_task_are_refused() -> None:
    told = [
        (1, {"machine_id": 4}),
        (1, {"ended_us": 7}),
        (1, {"machine_id": 5}),
        (2, {"machine_id": 6}),
        (1, {"ended_us": 9}),
    ]
    items = [{s.COLLECTION_ID: task, **fact} for task, fact in told]
    by_json = rows.facts_from_json(json.dumps({"tasks": items}).encode(), 10)
    schema = pa.schema({s.COLLECTION_ID: pa.int64(), "ended_us": pa.int64(), s.MACHINE_ID: pa.int64()})
    by_arrow = rows.facts_from_arrow(bytes(arrow.write_table(pa.Table.from_pylist(items, schema))), 10)
    for found in (by_json, by_arrow):
        assert found.row.tolist() == [0, 1, 3, 4]
        assert found.refusals.counts == {"contradiction": 1}


def test_a_task_that_failed_ended_at_a_time() -> None:
    told: list[dict[str, int]] = [
        {"failed": True},
        {"failed": True, "ended_us": 7},
        {"failed_us": 7},
        {"failed": False},
    ]
    items = [{s.COLLECTION_ID: k, **fact} for k, fact in enumerate(told)]
    by_json = rows.facts_from_json(json.dumps({"tasks": items}).encode(), 10)
    schema = pa.schema(
        {s.COLLECTION_ID: pa.int64(), "failed": pa.bool_(), "ended_us": pa.int64(), "failed_us": pa.int64()}
    )
    by_arrow = rows.facts_from_arrow(bytes(arrow.write_table(pa.Table.from_pylist(items, schema))), 10)
    for found in (by_json, by_arrow):
        assert found.row.tolist() == [1, 2, 3]
        assert found.refusals.counts == {"invalid_field": 1}
        assert "needs ended_us" in found.refusals.errors[0].message


def test_out_of_memory_is_said_of_a_failure_and_read_alike_from_json_and_arrow() -> None:
    told: list[dict[str, Any]] = [
        {"failed_us": 7, "out_of_memory": True},
        {"failed_us": 7, "out_of_memory": False},
        {"failed_us": 7, "out_of_memory": None},
        {"failed_us": 7},
        {"ended_us": 7, "failed": True, "out_of_memory": True},
        {"ended_us": 7, "out_of_memory": False},
        {"out_of_memory": False},
        {"ended_us": 7, "out_of_memory": True},
        {"machine_id": 1, "out_of_memory": True},
    ]
    items = [{s.COLLECTION_ID: k, **fact} for k, fact in enumerate(told)]
    by_json = rows.facts_from_json(json.dumps({"tasks": items}).encode(), 10)
    schema = pa.schema({
        s.COLLECTION_ID: pa.int64(), "failed": pa.bool_(), "ended_us": pa.int64(), "failed_us": pa.int64(),
        s.OUT_OF_MEMORY: pa.bool_(), s.MACHINE_ID: pa.int64(),
    })  # fmt: skip
    by_arrow = rows.facts_from_arrow(bytes(arrow.write_table(pa.Table.from_pylist(items, schema))), 10)
    for found in (by_json, by_arrow):
        assert found.row.tolist() == [0, 1, 2, 3, 4, 5]
        assert found.columns[s.OUT_OF_MEMORY].tolist() == [1, 0, -1, -1, 1, 0]
        assert found.refusals.counts == {"invalid_field": 3}
        assert all("needs failed_us" in error.message for error in found.refusals.errors)


@pytest.mark.parametrize("more", [b"x", b"\0" * 8, None])
def test_bytes_after_the_end_of_a_stream_are_refused(more: bytes | None) -> None:
    stream = bytes(arrow.write_table(pa.Table.from_pylist([{s.COLLECTION_ID: 1, s.START_US: 0, s.END_US: 1}], SCHEMA)))
    assert len(rows.usage_from_arrow(stream, 10).windows) == 1
    refused = refusal(lambda: rows.usage_from_arrow(stream + (stream if more is None else more), 10))
    assert (refused.status, refused.body.error.code) == (400, "malformed_arrow")
    assert "follow the end" in refused.body.error.message


BOUNDS: list[tuple[dict[str, Any], bool]] = [
    ({}, True), ({s.SCHEDULING_CLASS: 3}, True), ({s.SCHEDULING_CLASS: 4}, False), ({s.COLLECTION_ID: -1}, False),
    ({s.END_US: 0}, False), ({s.CPU_LIMIT: 1e-12, s.MEMORY_LIMIT: 1e18}, True), ({s.CPU_LIMIT: 5e-13}, False),
    ({s.MEMORY_LIMIT: 2e18}, False), ({s.CPU_LIMIT: None, s.MEMORY_LIMIT: None}, True), ({s.CPU_LIMIT: None}, False),
    ({s.CPU_MEAN: 1e18}, True), ({s.CPU_MEAN: 2e18}, False), ({s.CPU_PERCENTILES: [0.0] * 10 + [1e18]}, True),
    ({s.CPU_PERCENTILES: [0.0] * 10 + [2e18]}, False), ({rows.LOGICAL_NAME: "x" * 256}, True),
    ({rows.LOGICAL_NAME: "x" * 257}, False), ({rows.IN_ALLOC: True}, True), ({rows.IN_ALLOC: False}, True),
]  # fmt: skip


def test_amounts_and_names_have_the_same_bounds_in_json_and_in_a_table() -> None:
    one = {s.COLLECTION_ID: 1, s.START_US: 0, s.END_US: 10, s.CPU_LIMIT: 1.0, s.MEMORY_LIMIT: 2.0}
    flat = [{**one, s.INSTANCE_INDEX: k, **of} for k, (of, _) in enumerate(BOUNDS)]
    types = {
        s.SCHEDULING_CLASS: pa.int64(), s.INSTANCE_INDEX: pa.int64(), s.CPU_LIMIT: pa.float64(),
        s.MEMORY_LIMIT: pa.float64(), s.CPU_MEAN: pa.float64(), s.CPU_PERCENTILES: pa.list_(pa.float64()),
        rows.LOGICAL_NAME: pa.string(), rows.IN_ALLOC: pa.bool_(),
    }  # fmt: skip
    table = pa.Table.from_pylist(flat, pa.schema([*SCHEMA, *types.items()]))
    items = []
    for row in flat:
        limit = {of: row.pop(name) for of, name in (("cpu", s.CPU_LIMIT), ("memory", s.MEMORY_LIMIT))}
        given = {of: amount for of, amount in limit.items() if amount is not None}
        items.append({**row, "limit": given} if given else row)
    taken = [k for k, (_, good) in enumerate(BOUNDS) if good]
    for found in (usage(items), rows.usage_from_arrow(bytes(arrow.write_table(table)), 100)):
        assert found.row.tolist() == taken
        assert found.refusals.counts == {"invalid_field": len(BOUNDS) - len(taken)}
        assert found.windows.limit[:3].tolist() == [[1.0, 2.0], [1.0, 2.0], [1e-12, 1e18]]
        assert np.isnan(found.windows.limit[3]).all()
        assert (found.windows.in_alloc[-2:].tolist(), found.in_alloc[-3:].tolist()) == ([True, False], [-1, 1, 0])
    (named,) = (error for error in found.refusals.errors if error.field == rows.LOGICAL_NAME)
    assert "logical_name: must have 1 to 256 characters" in named.message


def test_a_body_in_other_units_than_the_cells_is_refused_whole() -> None:
    body = {"windows": [GOOD], "units": {"cpu": "cores", "memory": "GiB"}}
    refused = refusal(lambda: rows.usage_from_json(json.dumps(body).encode(), UNITS, 10))
    assert (refused.status, refused.body.error.code) == (422, "other_units")
    assert "amounts are in cores and bytes, got cores and GiB" in str(refused)
    body["units"] = {"cpu": "cores", "memory": "bytes"}
    assert len(rows.usage_from_json(json.dumps(body).encode(), UNITS, 10).row) == 1
