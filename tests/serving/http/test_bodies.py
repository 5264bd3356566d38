"""Bodies in any shape: good rows are taken, each bad one is named, and what is refused leaves no trace."""

from __future__ import annotations

import itertools
import json
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from reclaim.data import schema as s
from reclaim.serving.wire import rows
from reclaim.serving.wire.arrow import MEDIA_TYPE
from reclaim.serving.wire.cell_schemas import WriteAnswer
from reclaim.serving.wire.schemas import ErrorResponse

if TYPE_CHECKING:
    from httpx import Response
    from starlette.testclient import TestClient

Json = dict[str, Any]
Rows = list[Any]

ARROW: Final = {"content-type": MEDIA_TYPE, "accept": "application/json"}
LOOPBACK: Final = "http://127.0.0.1"
TABLE: Final = {"accept": MEDIA_TYPE}
SLOT_US: Final = 300_000_000
WELL: Final = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
COLLECTIONS: Final = itertools.count(10, 10)
"""Each example has tasks of its own, which nothing was told of before."""


@dataclass
class Pair:
    """Two services: one is told everything, the other only what the first took; they must answer alike."""

    told: TestClient
    spared: TestClient

    def tell(
        self, path: str, body: bytes, without: Callable[[set[int]], bytes | None], headers: dict[str, str] | None = None
    ) -> Response:  # fmt: skip
        """Tell one service a body, and the other what ``without`` leaves of it; compare all answers after it."""
        response: Response = self.told.post(path, content=body, headers=headers)
        answer = written(response)
        if answer is not None:
            refused = {error.row for error in answer.errors if error.row is not None}
            assert len(refused) == len(answer.errors) == sum(answer.refused.values())
            rest = without(refused)
            if rest is not None:
                other = written(self.spared.post(path, content=rest, headers=headers))
                assert other is not None
                assert (other.taken, other.late, other.repeated) == (answer.taken, answer.late, answer.repeated)
                assert other.refused == {}
        assert cell(self.told).equals(cell(self.spared), check_metadata=True)
        return response


def cell(client: TestClient) -> pa.Table:
    """Return all that a service answers for all of its tasks, in order."""
    response = client.get("/v1/cell/reservations?quantiles=true", headers=TABLE)
    assert response.status_code == 200, response.text
    table = pa.ipc.open_stream(response.content).read_all()
    return table.sort_by([(s.COLLECTION_ID, "ascending"), (s.INSTANCE_INDEX, "ascending")])


def written(response: Response) -> WriteAnswer | None:
    """Return what a service says of a write, None where all of it is refused; in either case in the one shape."""
    assert response.status_code in (200, 400, 413, 415, 422), response.text
    if response.status_code != 200:
        error = ErrorResponse.model_validate_json(response.content).error
        assert "\n" not in error.message
        assert len(error.message) < 500
        return None
    answer = WriteAnswer.model_validate_json(response.content)
    assert answer.rows == answer.taken + answer.repeated + sum(answer.refused.values())
    assert answer.late <= answer.taken
    assert all("\n" not in error.message and len(error.message) < 500 for error in answer.errors)
    return answer


@pytest.fixture(scope="module")
def pair(make_app: Any) -> Iterator[Pair]:
    with ExitStack() as running:
        with warnings.catch_warnings():
            # starlette 1.10 prefers a successor of httpx
            warnings.filterwarnings("ignore", "Using `httpx` with `starlette.testclient` is deprecated")
            from starlette.testclient import TestClient
        both = Pair(*(TestClient(running.enter_context(make_app())[0], LOOPBACK) for _ in range(2)))
        for client in (both.told, both.spared):
            running.enter_context(client)
            client.post("/v1/usage", json={"windows": [window(1, 0, 100)]})  # the clock stands somewhere
        yield both


def window(collection: int, index: int, slot: int, **more: Any) -> Json:
    return {
        "collection_id": collection, "instance_index": index,
        "start_us": slot * SLOT_US, "end_us": (slot + 1) * SLOT_US,
        "cpu_mean": 0.2, "cpu_max": 0.5, "memory_max": 1e9, "limit": {"cpu": 1.0, "memory": 4e9}, **more,
    }  # fmt: skip


GOOD: Final = st.fixed_dictionaries(
    {"instance_index": st.integers(0, 2), "slot": st.integers(95, 103)},
    optional={
        "cpu_mean": st.sampled_from([0.0, 0.3, 7.5, 1e18, 5e-324]),
        "cpu_percentiles": st.sampled_from([[0.1 * k for k in range(11)], [0.0] * 11, None]),
        "cpu_tail_percentiles": st.sampled_from([[1.0] * 9, None]),
        "memory_max": st.sampled_from([0.0, 2e9, 1e18]),
        "limit": st.sampled_from([None, {"cpu": 0.5, "memory": 8e9}, {"cpu": 1e-12, "memory": 1e18}]),
        "tier": st.sampled_from([*s.TIERS, None]),
        "scheduling_class": st.sampled_from([0, 3, None]),
        "scheduled_us": st.sampled_from([0, 95 * SLOT_US, None]),
        "machine_id": st.sampled_from([0, 2**63 - 1, None]),
        "in_alloc": st.sampled_from([True, False, None]),
        "user": st.sampled_from(["someone", "ü" * 256, None]),
        "logical_name": st.sampled_from(["web", None]),
    },
)
"""Fields of a window; ``usage`` makes it one."""


def each(name: str, *values: object) -> list[Json]:
    return [{name: value} for value in values]


BAD: Final[list[Json]] = [
    *each("collection_id", -1, 2**63, 1.5, "1", None, True, math.nan, 10**40),
    *each("start_us", -1, s.LATEST_US + 1, 0.5, None, math.inf, "0"),
    *each("end_us", -1, s.LATEST_US + 1, 0.5, None, math.inf, "0"),
    *each("cpu_mean", -1e-9, math.nan, -math.inf, 1e19, "1", []),
    *each("cpi", -1e-9, math.nan, -math.inf, 1e19, "1", []),
    *each("cpu_percentiles", [0.1] * 10, [0.1] * 12, [], [0.2, *[0.1] * 10], [math.nan] * 11, [None] * 11, 0.5),
    *each("limit", {}, {"cpu": 1.0}, {"cpu": 0.0, "memory": 1.0}, {"cpu": 1.0, "memory": math.inf}, 1.0),
    *each("tier", "gold", 3), *each("scheduling_class", 4, -1, 1.0), *each("user", "", "x" * 257, 7),
    *each("in_alloc", 1, "yes"), *each("machine_id", -1), *each("instance_index", None), *each("more", 1, None),
    {"start_us": 5, "end_us": 5},
]  # fmt: skip
"""Each is enough to refuse a window."""
ANYTHING: Final = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4)
    | st.sampled_from([0, 1, 2**59, 2**62, 2**63, 10**400, 1e18, 1e308]),
    lambda inner: st.lists(inner, max_size=12) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
)  # fmt: skip


def usage(told: list[Json], collection: int) -> Rows:
    return [
        window(
            collection,
            item["instance_index"],
            item["slot"],
            cpu_max=1e18,
            **{k: v for k, v in item.items() if k != "slot"},
        )
        for item in told
    ]


def as_json(name: str, items: Rows) -> tuple[bytes, Callable[[set[int]], bytes | None]]:
    """Return a body, and what makes one of its rows but for some."""

    def without(refused: set[int]) -> bytes | None:
        rest = [item for row, item in enumerate(items) if row not in refused]
        return json.dumps({name: rest}).encode() if rest else None

    return json.dumps({name: items}).encode(), without


@pytest.mark.slow
@settings(WELL, max_examples=60)
@given(
    before=st.lists(GOOD, max_size=3),
    told=st.lists(GOOD, max_size=8),
    bad=st.lists(st.tuples(st.integers(0, 8), st.sampled_from(BAD)), min_size=1, max_size=5),
)
def test_good_windows_are_taken_and_each_bad_one_is_named(
    pair: Pair, before: list[Json], told: list[Json], bad: Any
) -> None:
    collection = next(COLLECTIONS)
    if before:
        pair.tell("/v1/usage", *as_json("windows", usage(before, collection)))
    items: Rows = [(item, True) for item in usage(told, collection)]
    for place, how in bad:
        items.insert(place, ({**window(collection, 0, 100), **how}, False))
    body, without = as_json("windows", [item for item, _ in items])
    answer = written(pair.tell("/v1/usage", body, without))
    assert answer is not None
    invalid = {error.row for error in answer.errors if error.code in ("invalid_field", "unknown_field")}
    assert invalid == {row for row, (_, good) in enumerate(items) if not good}
    for error in answer.errors:
        if error.row in invalid:
            assert error.field is not None
            assert error.field.startswith(f"windows[{error.row}].") or error.field == f"windows[{error.row}]"


@settings(WELL, max_examples=60)
@given(
    told=st.lists(GOOD, min_size=1, max_size=6),
    name=st.sampled_from([*rows.USAGE_COLUMNS, "limit"]) | st.text(max_size=8),
    value=ANYTHING,
    place=st.integers(0, 5),
    whole=st.booleans(),
)
def test_whatever_a_window_says_nothing_that_is_refused_leaves_a_trace(
    pair: Pair, told: list[Json], name: str, value: object, place: int, whole: bool
) -> None:
    items = usage(told, next(COLLECTIONS))
    items[place % len(items)] = value if whole else {**items[place % len(items)], name: value}
    pair.tell("/v1/usage", *as_json("windows", items))


FACT: Final = st.fixed_dictionaries(
    {"instance_index": st.integers(0, 2) | st.sampled_from([-1, 2**63, 1.0])},
    optional={
        "limit": st.sampled_from([None, {"cpu": 0.5, "memory": 8e9}, {"cpu": -1, "memory": 1}, {}]),
        "since_us": st.sampled_from([None, 0, 101 * SLOT_US, -1, 2**60]),
        "scheduled_us": st.sampled_from([None, 0, 99 * SLOT_US, "x"]),
        "ended_us": st.sampled_from([None, 102 * SLOT_US, math.nan]),
        "failed": st.booleans() | st.none(),
        "failed_us": st.sampled_from([None, 100 * SLOT_US, -1]),
        "out_of_memory": st.booleans() | st.none(),
        "tier": st.sampled_from([None, "prod", "gold", 1]),
        "user": st.sampled_from([None, "someone", "", 5]),
        "in_alloc": st.sampled_from([None, True, 1]),
        "more": st.just(1),
    },
)


@pytest.mark.slow
@settings(WELL, max_examples=60)
@given(told=st.lists(GOOD, max_size=3), facts=st.lists(FACT | ANYTHING, min_size=1, max_size=6))
def test_whatever_facts_say_nothing_that_is_refused_leaves_a_trace(
    pair: Pair, told: list[Json], facts: list[Any]
) -> None:
    collection = next(COLLECTIONS)
    if told:
        pair.tell("/v1/usage", *as_json("windows", usage(told, collection)))
    named = [{"collection_id": collection, **fact} if isinstance(fact, dict) else fact for fact in facts]
    pair.tell("/v1/tasks", *as_json("tasks", named))


@pytest.mark.parametrize("path", ["/v1/usage", "/v1/tasks", "/v1/reservations", "/v1/cell/reservations"])
@settings(WELL, max_examples=25)
@given(body=st.binary(max_size=60) | ANYTHING.map(json.dumps).map(str.encode), arrow=st.booleans())
@example(body=b"", arrow=True)
def test_whatever_is_sent_is_refused_in_one_shape(pair: Pair, path: str, body: bytes, arrow: bool) -> None:
    response = pair.told.post(path, content=body, headers=ARROW if arrow else {})
    if response.status_code != 200:
        written(response)
    assert cell(pair.told).equals(cell(pair.spared))


TEXTS: Final = (pa.string(), pa.large_string())
KINDS: Final[dict[str, list[pa.DataType]]] = {
    "whole": [pa.int64(), pa.uint64()],
    "number": [pa.float64(), pa.float32(), pa.float16(), pa.int64(), pa.uint64()],
    "vector": [pa.list_(pa.float64()), pa.list_(pa.float32()), pa.large_list(pa.float32()), pa.list_(pa.float16())],
    "word": [*TEXTS, *(pa.dictionary(pa.int8(), of) for of in TEXTS)],
    "tier": [*TEXTS, *(pa.dictionary(pa.int32(), of) for of in TEXTS), pa.int8(), pa.uint64()],
    "flag": [pa.bool_()],
}
WHOLE: Final = [-(2**63), -2, 0, 7, 2**31, 2**59 + 1, 2**63 - 1, 2**64 - 1, None]
CELLS: Final[dict[str, list[Any]]] = {
    "whole": WHOLE, "tier": [*s.TIERS, "gold", "", *WHOLE],
    "number": [0.0, 0.5, 3, -1.0, -0.0, math.nan, math.inf, -math.inf, 1e18, 1e19, 2**53 + 1, 2**63 - 1, None],
    "vector": [[0.5] * 11, [0.5] * 9, [], [0.5], [1.0, *[0.5] * 10], [math.nan] * 11, [0.1, None, *[0.2] * 9],
               [*[0.1] * 8, math.inf], [-1.0] * 9, None],
    "word": ["someone", "", "x" * 256, "x" * 257, "\0", None],
    "flag": [True, False, None],
}  # fmt: skip


def fits(value: object, kind: pa.DataType) -> bool:
    try:
        pa.array([value], kind)
    except (pa.ArrowException, OverflowError, TypeError, ValueError):
        return False
    return True


FINE: Final[dict[str, Any]] = {
    s.INSTANCE_INDEX: st.integers(0, 2), s.START_US: st.integers(95, 103).map(lambda slot: slot * SLOT_US),
    s.CPU_PERCENTILES: st.just([0.5] * 11), s.CPU_TAIL_PERCENTILES: st.just([0.5] * 9), s.SCHEDULED_US: st.just(0),
    s.SCHEDULING_CLASS: st.integers(0, 3), "since_us": st.just(7), "ended_us": st.none(),
}  # fmt: skip
FINE_OF_KIND: Final[dict[str, Any]] = {
    "whole": st.integers(0, 7), "number": st.sampled_from([0.5, 2.0]), "word": st.just("someone"),
    "flag": st.booleans(), "tier": st.sampled_from(s.TIERS),
}  # fmt: skip


@st.composite
def tables(draw: st.DrawFn, columns: dict[str, Any], required: tuple[str, ...]) -> Callable[[int], pa.Table]:
    """Draw a table with columns of any type that is taken; some rows hold anything; of a collection yet to be named."""
    n = draw(st.integers(0, 6))
    tainted = draw(st.lists(st.sampled_from([False, False, True]), min_size=n, max_size=n))
    names = {*required, *draw(st.sets(st.sampled_from(sorted(columns))))}
    if draw(st.booleans()):
        names |= {s.CPU_LIMIT, s.MEMORY_LIMIT}
    made: dict[str, pa.Array] = {}
    for name in sorted(names):
        kind = draw(st.sampled_from(KINDS[columns[name]] if name in required else [*KINDS[columns[name]], pa.null()]))
        anything = CELLS[columns[name]]
        some = st.sampled_from([value for value in anything if fits(value, kind)])
        fine = FINE[name] if name in FINE else FINE_OF_KIND[columns[name]]
        if columns[name] == "tier" and pa.types.is_integer(kind):
            fine = st.integers(0, 4)
        fine = st.none() if pa.types.is_null(kind) else fine
        made[name] = pa.array([draw(some if bad else fine) for bad in tainted], kind)

    def of(collection: int) -> pa.Table:
        table = pa.table(made)
        ids = table[s.COLLECTION_ID].to_pylist()
        table = put(table, s.COLLECTION_ID, [i if bad else collection for i, bad in zip(ids, tainted, strict=True)])
        if s.END_US in table.column_names:
            starts, ends = table[s.START_US].to_pylist(), table[s.END_US].to_pylist()
            near = [e if bad else start + SLOT_US for start, e, bad in zip(starts, ends, tainted, strict=True)]
            table = put(table, s.END_US, near)
        return table

    return of


def put(table: pa.Table, name: str, values: list[Any]) -> pa.Table:
    return table.set_column(table.column_names.index(name), name, pa.array(values, table.schema.field(name).type))


def as_arrow(table: pa.Table, rows_per_batch: int | None = None) -> tuple[bytes, Callable[[set[int]], bytes | None]]:
    def without(refused: set[int]) -> bytes | None:
        return stream(table.filter(pa.array([row not in refused for row in range(len(table))], pa.bool_())))

    return stream(table, rows_per_batch), without


def stream(table: pa.Table, rows_per_batch: int | None = None, **options: Any) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, max_chunksize=rows_per_batch)
    return bytes(sink.getvalue())


@pytest.mark.slow
@settings(WELL, max_examples=100)
@given(make=tables(rows.USAGE_COLUMNS, (s.COLLECTION_ID, s.START_US, s.END_US)), batch=st.sampled_from([None, 1, 2]))
def test_whatever_a_table_of_usage_holds_nothing_that_is_refused_leaves_a_trace(
    pair: Pair, make: Callable[[int], pa.Table], batch: int | None
) -> None:
    body, without = as_arrow(make(next(COLLECTIONS)), batch)
    response = pair.tell("/v1/usage", body, without, ARROW)
    assert response.status_code == 200
    stateless = pair.told.post("/v1/reservations", content=body, headers={"content-type": MEDIA_TYPE})
    assert stateless.status_code == 200, stateless.text


@pytest.mark.slow
@settings(WELL, max_examples=60)
@given(make=tables(rows.TASK_COLUMNS, (s.COLLECTION_ID,)), batch=st.sampled_from([None, 1, 2]))
def test_whatever_a_table_of_facts_holds_nothing_that_is_refused_leaves_a_trace(
    pair: Pair, make: Callable[[int], pa.Table], batch: int | None
) -> None:
    assert pair.tell("/v1/tasks", *as_arrow(make(next(COLLECTIONS)), batch), ARROW).status_code == 200


@settings(WELL, max_examples=40)
@given(told=st.lists(GOOD, min_size=1, max_size=8))
def test_a_window_is_the_same_as_json_and_in_a_table(pair: Pair, told: list[Json]) -> None:
    items = usage(told, next(COLLECTIONS))
    flat = [
        {name: item.get(name) for name in rows.USAGE_COLUMNS if name not in (s.CPU_LIMIT, s.MEMORY_LIMIT)}
        | {s.CPU_LIMIT: (item["limit"] or {}).get("cpu"), s.MEMORY_LIMIT: (item["limit"] or {}).get("memory")}
        for item in items
    ]
    as_table = written(pair.told.post("/v1/usage", content=stream(pa.Table.from_pylist(flat)), headers=ARROW))
    as_items = written(pair.spared.post("/v1/usage", json={"windows": items}))
    assert as_table is not None
    assert as_items is not None
    assert as_table.model_copy(update={"errors": []}) == as_items.model_copy(update={"errors": []})
    assert [error.row for error in as_table.errors] == [error.row for error in as_items.errors]
    assert cell(pair.told).equals(cell(pair.spared), check_metadata=True)


def simple(n: int = 3) -> pa.Table:
    collection = next(COLLECTIONS)
    numbers = np.arange(n)
    return pa.table({
        s.COLLECTION_ID: np.full(n, collection), s.INSTANCE_INDEX: numbers, s.START_US: np.full(n, 100 * SLOT_US),
        s.END_US: np.full(n, 101 * SLOT_US), s.CPU_MEAN: numbers / 10, s.CPU_LIMIT: np.ones(n),
        s.MEMORY_LIMIT: np.ones(n), s.TIER: pa.array(["prod"] * n, pa.string()).dictionary_encode(),
        s.CPU_PERCENTILES: pa.array([[0.1] * 11] * n, pa.list_(pa.float32())),
        "user": pa.array(["someone"] * n, pa.string()),
    })  # fmt: skip


@pytest.mark.slow
@settings(WELL, max_examples=150)
@given(flips=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 7)), max_size=6), cut=st.floats(0, 1))
def test_a_damaged_stream_is_refused_or_says_something_else(
    pair: Pair, flips: list[tuple[float, int]], cut: float
) -> None:
    body = bytearray(stream(simple(), 2))
    for place, bit in flips:
        body[int(place * len(body))] ^= 1 << bit
    body = body[: int(cut * len(body)) if cut < 0.5 else len(body)]

    def without(refused: set[int]) -> bytes | None:
        with pa.ipc.open_stream(bytes(body)) as reader:
            return as_arrow(reader.read_all())[1](refused)

    pair.tell("/v1/usage", bytes(body), without, ARROW)
    stateless = pair.told.post("/v1/reservations", content=bytes(body), headers=ARROW | TABLE)
    if stateless.status_code != 200:
        written(stateless)


NOTHING: Final = pa.record_batch({name: pa.nulls(10**9) for name in (s.COLLECTION_ID, s.START_US, s.END_US)})
HOSTILE: Final[dict[str, tuple[Callable[[], bytes], int, str]]] = {
    "lz4": (lambda: stream(simple(), compression="lz4"), 422, "compressed_arrow"),
    "zstd": (lambda: stream(simple(), compression="zstd"), 422, "compressed_arrow"),
    "extra column": (lambda: stream(simple().append_column("more", pa.nulls(3))), 422, "invalid_columns"),
    "a column twice": (lambda: stream(simple().append_column(s.END_US, pa.nulls(3))), 422, "invalid_columns"),
    "no end": (lambda: stream(simple().drop_columns(s.END_US)), 422, "invalid_columns"),
    "no columns": (lambda: stream(pa.table({})), 422, "invalid_columns"),
    "a billion rows of nothing": (lambda: stream(pa.Table.from_batches([NOTHING])), 413, "too_many_rows"),
    "floats for ids": (lambda: stream(cast(s.COLLECTION_ID, pa.float64())), 422, "invalid_columns"),
    "text for numbers": (lambda: stream(cast(s.CPU_MEAN, pa.string())), 422, "invalid_columns"),
    "times": (lambda: stream(cast(s.END_US, pa.timestamp("us"))), 422, "invalid_columns"),
    "lists of lists": (
        lambda: stream(replaced(s.CPU_PERCENTILES, pa.array([[[0.1] * 11]] * 3))), 422, "invalid_columns",
    ),
    "structs": (lambda: stream(replaced("user", pa.array([{"a": 1}] * 3))), 422, "invalid_columns"),
    "a file, no stream": (lambda: b"ARROW1\0\0" + stream(simple()), 400, "malformed_arrow"),
    "no UTF-8": (lambda: stream(simple()).replace(b"someone", b"some\xff\xfee"), 400, "malformed_arrow"),
}  # fmt: skip


def cast(name: str, kind: pa.DataType) -> pa.Table:
    table = simple()
    return table.set_column(table.column_names.index(name), name, table[name].cast(kind))


def replaced(name: str, values: pa.Array) -> pa.Table:
    table = simple()
    return table.set_column(table.column_names.index(name), name, values)


@pytest.mark.parametrize("path", ["/v1/usage", "/v1/reservations"])
@pytest.mark.parametrize("case", HOSTILE)
def test_a_stream_that_cannot_be_taken_is_refused_before_any_of_its_rows(pair: Pair, path: str, case: str) -> None:
    make, status, code = HOSTILE[case]
    response = pair.told.post(path, content=make(), headers=ARROW)
    written(response)
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert cell(pair.told).equals(cell(pair.spared))


def test_a_column_of_the_wrong_type_is_named_with_the_type_that_is_expected(pair: Pair) -> None:
    response = pair.told.post("/v1/usage", content=stream(cast(s.CPU_MEAN, pa.string())), headers=ARROW)
    error = response.json()["error"]
    assert (error["field"], error["message"]) == (
        "cpu_mean", "columns of the wrong type: cpu_mean (string, expected numbers)",
    )  # fmt: skip


RULES: Final[dict[str, tuple[str, pa.Array, dict[int, str]]]] = {
    "ids": (s.MACHINE_ID, pa.array([2**63 - 1, 2**64 - 1, None], pa.uint64()), {1: "machine_id: must be a whole"}),
    "numbers": (s.CPU_MEAN, pa.array([2**53 + 1, -1, None]), {1: "cpu_mean: must be at least 0"}),
    "no number": (s.CPU_MEAN, pa.array([math.nan, math.inf, 1e19]), dict.fromkeys((1, 2), "cpu_mean: must be at")),
    "half a limit": (s.CPU_LIMIT, pa.array([0.0, None, 1.0]), {0: "cpu_limit: must", 1: "a limit must be given"}),
    "tiers": (s.TIER, pa.array(["gold", None, "prod"]), {0: "tier: must be one of"}),
    "tiers of a dictionary with null": (
        s.TIER, pa.DictionaryArray.from_arrays(pa.array([0, 1, None]), pa.array([None, "gold"])), {1: "tier: must be"},
    ),
    "numbered tiers": (s.TIER, pa.array([4, 5, None]), {1: "tier: must be one of"}),
    "names": ("user", pa.array(["", "x" * 256, "x" * 257]), dict.fromkeys((0, 2), "user: must have 1 to 256")),
    "vectors": (
        s.CPU_PERCENTILES, pa.array([[0.1] * 10, [0.1, None, *[0.1] * 9], [None] * 11], pa.list_(pa.float64())),
        dict.fromkeys((0, 1), "cpu_percentiles: expected 11 numbers of at least 0, none below the one before"),
    ),
    "falling vectors": (
        s.CPU_PERCENTILES, pa.array([[0.2, *[0.1] * 10], [-0.1] * 11, None], pa.list_(pa.float32())),
        dict.fromkeys((0, 1), "cpu_percentiles: expected"),
    ),
    "an index that is not told": (s.INSTANCE_INDEX, pa.array([None, 1, 2]), {0: "instance_index: must be a whole"}),
}  # fmt: skip


@pytest.mark.parametrize("case", RULES)
def test_a_bad_row_of_a_table_is_refused_in_words(pair: Pair, case: str) -> None:
    name, values, refused = RULES[case]
    table = simple().set_column(0, s.COLLECTION_ID, pa.array([next(COLLECTIONS)] * 3))
    if name in table.column_names:
        table = table.set_column(table.column_names.index(name), name, values)
    else:
        table = table.append_column(name, values)
    response = pair.tell("/v1/usage", *as_arrow(table), ARROW)
    answer = written(response)
    assert answer is not None
    assert answer.taken == 3 - len(refused)
    assert {error.row for error in answer.errors} == set(refused)
    for error in answer.errors:
        assert error.row is not None
        assert (error.code, error.field) == ("invalid_field", name)
        assert error.message.startswith(f"row {error.row}: {refused[error.row]}")


def test_dictionaries_may_change_from_batch_to_batch(pair: Pair) -> None:
    parts = [replaced(s.TIER, pa.array([tier] * 3).dictionary_encode()) for tier in ("prod", "free", "gold")]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, parts[0].schema) as writer:
        for part in parts:
            writer.write_table(part)
    answer = written(pair.told.post("/v1/usage", content=bytes(sink.getvalue()), headers=ARROW))
    pair.spared.post("/v1/usage", content=stream(pa.concat_tables(parts[:2])), headers=ARROW)
    assert answer is not None
    assert [error.row for error in answer.errors] == [6, 7, 8]
    assert cell(pair.told).equals(cell(pair.spared))


def test_an_empty_table_says_nothing(pair: Pair) -> None:
    answer = written(pair.told.post("/v1/usage", content=stream(simple(0)), headers=ARROW))
    assert answer is not None
    assert (answer.rows, answer.taken, answer.refused) == (0, 0, {})
    stateless = pair.told.post("/v1/reservations", content=stream(simple(0)), headers=ARROW | TABLE)
    assert pa.ipc.open_stream(stateless.content).read_all().num_rows == 0
