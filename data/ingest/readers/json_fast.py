"""Reads JSON lines with compiled code, if they are certainly valid: usage into staged rows, other tables into Arrow.

The table's SQL (``RawTable.select`` and ``checks``) defines the meaning of a line. The compiled reader accepts a line
only if it has known keys, canonical integers, finite numbers that are not negative, and texts of printable ASCII
without an escape. It leaves every other line, with its number, to the careful reader of ``json_lines``; a test holds
that both give the same rows and rejects.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numba
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from reclaim.data import schema as s
from reclaim.data.columns import array_of, bits_of
from reclaim.data.core.duck import INTEGERS
from reclaim.data.core.jit import CACHED
from reclaim.data.ingest.readers.json_kernel import (
    DOUBLE,
    FLAG,
    INTEGER,
    LENGTH_BITS,
    LIST,
    PAD,
    STRUCT,
    TEXT,
    VECTOR,
    read_lines,
)
from reclaim.data.ingest.readers.staging import NULL, Layout
from reclaim.data.traces.source import Field, RawTable

SHORTEST: Final = 64
"""Bytes that a line of usage with all it needs has at least; shorter lines of other tables come in several parts."""
_HIGHEST: Final = 2**63 - 1
_KINDS: Final = {"DOUBLE": DOUBLE, "VARCHAR": TEXT, "BOOLEAN": FLAG, **dict.fromkeys(INTEGERS, INTEGER)}


@dataclass(frozen=True)
class Keys:
    """The keys of a table's lines as the arrays that the compiled reader uses.

    Attributes
    ----------
    names : uint64, shape (n_keys, n_words, 2)
        Each key in its quotes, eight bytes a word, and a mask of the bytes that count.
    lengths : int64, shape (n_keys,)
        Of each key in its quotes, in bytes.
    places : int64, shape (n_keys, 6)
        Of each key: kind, slot of its value (-1: not kept), smallest and largest integer, first child, number of
        children.
    top : int
        Keys of the outer object; those after it are children.
    """

    names: NDArray[np.uint64]
    lengths: NDArray[np.int64]
    places: NDArray[np.int64]
    top: int


@dataclass(frozen=True)
class Plan:
    """A table's keys, and what makes a row of their values.

    Attributes
    ----------
    keys : Keys
    zero_is_null, only_with : bool and int64, shape (n_integers,)
        Whether 0 is null, and the integer without which this one is null (-1: none).
    needs : int64, shape (n,)
        Words of a row that must be there.
    maxima : tuple of (int, int)
        Words of maxima and of their means: a maximum of 0 is null where the mean is above 0.
    null_row : uint64, shape (n_words,)
        A row without a value.
    shape : tuple of (int, int)
        Number of integers and of doubles.
    window : tuple of (int, int)
        Integers of which the second must be larger than the first; twice 0 for none.
    """

    keys: Keys
    zero_is_null: NDArray[np.bool_]
    only_with: NDArray[np.int64]
    needs: NDArray[np.int64]
    maxima: tuple[tuple[int, int], ...]
    null_row: NDArray[np.uint64]
    shape: tuple[int, int]
    window: tuple[int, int]

    def read(
        self,
        block: NDArray[np.uint8],
        begin: int,
        number: int,
        rows: NDArray[np.uint64],
        numbers: NDArray[np.int64],
        n: int,
    ) -> tuple[int, NDArray[np.int64], int, int]:
        """Read lines from ``begin`` on into the rows from ``n`` on, until the block ends or there is no room.

        Returns the number of rows, the lines left as ``plain_rows`` gives them, where to continue and its line.
        """
        left = np.empty((len(rows), 3), np.int64)
        n, m, begin, number = read_lines(
            block.ctypes.data, begin, len(block) - PAD, number, n, rows.ctypes.data, rows.view(np.int64),
            rows.view(np.float64), numbers, left, self.keys.names.ctypes.data, self.keys.lengths.ctypes.data,
            self.keys.names.shape[1], self.keys.places, self.keys.top, self.zero_is_null, self.only_with,
            self.needs, self.null_row.view(np.int64), self.shape, self.window,
        )  # fmt: skip
        return n, left[:m], begin, number


def _keys(columns: tuple[tuple[str, str], ...], place: Callable[[str, str], tuple[int, int, int, int]]) -> Keys:
    """Return the keys of columns; ``place`` gives kind, slot and range of a path and its type."""
    names: list[str] = [name for name, _ in columns]
    places = [[*place(name, type_), -1, 0] for name, type_ in columns]
    for number, (name, type_) in enumerate(columns):
        if fields := fields_of(type_):
            places[number][4:] = len(names), len(fields)
            names += [child for child, _ in fields]
            places += [[*place(f"{name}.{child}", child_type), -1, 0] for child, child_type in fields]
    quoted = [f'"{name}"'.encode() for name in names]
    most_words = max(map(len, quoted)) // 8 + 2  # the last one empty
    words = np.zeros((len(quoted), most_words, 2), np.uint64)
    for k, key_text in enumerate(quoted):
        words[k, :, 0] = np.frombuffer(key_text.ljust(8 * most_words, b"\0"), "<u8")
        words[k, :, 1] = np.frombuffer((b"\xff" * len(key_text)).ljust(8 * most_words, b"\0"), "<u8")
    return Keys(words, np.array([len(name) for name in quoted], np.int64), np.array(places, np.int64), len(columns))


def fields_of(type_: str) -> list[tuple[str, str]]:
    """Return names and types of a struct's fields; none for any other type."""
    if not type_.startswith("STRUCT(") or type_.endswith("[]"):
        return []
    parts = [part.split() for part in type_[len("STRUCT(") : -1].split(", ")]
    return [(name, field_type) for name, field_type in parts]


@functools.cache
def plan_of(table_columns: tuple[tuple[str, str], ...], described: tuple[Field, ...], layout_schema: Any) -> Plan:
    """Return the plan for usage, by its raw columns, its described fields and the schema of its rows."""
    layout = Layout.of(layout_schema)
    fields = {field.path: field for field in described}
    integers = len(layout.integers)

    def place(path: str, type_: str) -> tuple[int, int, int, int]:
        field = fields.get(path)
        slot = -1 if field is None else layout.slot(field.column)
        if fields_of(type_):
            return STRUCT, slot, 0, 0
        if type_ == "FLOAT[]":
            return VECTOR, slot, 0, 0
        if type_ == "DOUBLE":
            return DOUBLE, slot, 0, 0
        if field is None or field.most is None:
            least = 0 if slot == layout.slot(s.START_US) else -_HIGHEST
            return INTEGER, slot, least, s.LATEST_US if slot == layout.slot(s.END_US) else _HIGHEST
        return INTEGER, slot, 0, field.most

    zero_is_null = np.zeros(integers, np.bool_)
    only_with = np.full(integers, -1, np.int64)
    needs = []
    for field in described:
        if field.column in layout.integers:
            zero_is_null[layout.slot(field.column)] = field.zero_is_null
            if field.only_with is not None:
                only_with[layout.slot(field.column)] = layout.slot(fields[field.only_with].column)
        if field.needed:
            needs.append(layout.slot(field.column) + (integers if field.column in layout.doubles else 0))
    return Plan(
        keys=_keys(table_columns, place),
        zero_is_null=zero_is_null,
        only_with=only_with,
        needs=np.array(needs, np.int64),
        maxima=tuple(
            (integers + layout.slot(field.column), integers + layout.slot(fields[field.mean].column))
            for field in described
            if field.mean is not None
        ),
        null_row=layout.null_row,
        shape=(integers, len(layout.doubles)),
        window=(layout.slot(s.START_US), layout.slot(s.END_US)),
    )


def plain_rows(
    block: NDArray[np.uint8], table: RawTable, layout: Layout, room: NDArray[np.uint64] | None = None
) -> tuple[NDArray[np.uint64], NDArray[np.int64], int]:
    """Return the rows of the lines of usage that the compiled reader accepts, and the places of the others.

    Parameters
    ----------
    block : uint8, shape (n_bytes,)
        Whole lines, the last one ended as well, then ``PAD`` bytes of any kind.
    table : RawTable
        The table, with its fields.
    layout : Layout
        Of the rows.
    room : uint64, shape (most, layout.words)
        Memory for the rows, as of ``room_for``; None to take some.

    Returns
    -------
    rows : uint64, shape (n, layout.words)
        In the order of the lines.
    others : int64, shape (m, 3)
        Of each line left: its number in the block from 0, where it begins and ends.
    lines : int
        Number of all lines.
    """
    plan = plan_of(tuple(table.columns.items()), table.fields, layout.schema)
    rows = room_for(len(block), layout) if room is None else room
    numbers = np.empty(len(rows), np.int64)
    others = []
    n = begin = number = 0
    while begin < len(block) - PAD:
        n, left, begin, number = plan.read(block, begin, number, rows, numbers, n)
        others.append(left)
    rows = rows[:n]
    values = rows.view(np.float64)
    for highest, mean in plan.maxima:
        values[(values[:, highest] == 0) & (values[:, mean] > 0), highest] = np.nan
    return rows, np.concatenate(others), number


def room_for(n_bytes: int, layout: Layout) -> NDArray[np.uint64]:
    """Return memory for the rows of that many bytes of usage; what is not written to is not taken."""
    return np.empty((n_bytes // SHORTEST + 1, layout.words), np.uint64)


@dataclass(frozen=True)
class Slots:
    """The places of a table's raw values, by their path, in a row of integers and then doubles."""

    plan: Plan
    integers: dict[str, int]
    doubles: dict[str, int]


@functools.cache
def _slots_of(columns: tuple[tuple[str, str], ...]) -> Slots:
    """Return the places of raw columns and their fields; a struct, a list and a text are integers as well."""
    integers: dict[str, int] = {}
    doubles: dict[str, int] = {}

    def place(path: str, type_: str) -> tuple[int, int, int, int]:
        kind = STRUCT if fields_of(type_) else LIST if type_.endswith("[]") else _KINDS[type_]
        of_kind = doubles if kind == DOUBLE else integers
        lowest, highest = INTEGERS.get(type_, (0, 0))
        return kind, of_kind.setdefault(path, len(of_kind)), lowest, min(highest, _HIGHEST)

    keys = _keys(columns, place)
    null_row = np.full(len(integers) + len(doubles), NULL, np.int64)
    null_row[len(integers) :].view(np.float64)[:] = np.nan
    plan = Plan(
        keys, np.zeros(len(integers), np.bool_), np.full(len(integers), -1, np.int64), np.empty(0, np.int64), (),
        null_row.view(np.uint64), (len(integers), len(doubles)), (0, 0),
    )  # fmt: skip
    return Slots(plan, integers, doubles)


def plain_batches(
    block: NDArray[np.uint8], table: RawTable, schema: pa.Schema, line: int
) -> Iterator[tuple[pa.RecordBatch, NDArray[np.int64]]]:
    """Yield the raw rows of the lines that the compiled reader accepts, and the places of the others, part by part.

    Parameters
    ----------
    block : uint8, shape (n_bytes,)
        As of ``plain_rows``.
    table : RawTable
        The table.
    schema : pyarrow.Schema
        The table's columns as Arrow types, and one for the number of the line.
    line : int
        Number of the block's first line.

    Yields
    ------
    rows : pyarrow.RecordBatch
        Of the schema, in the order of the lines.
    others : int64, shape (m, 3)
        Of each line left: its number, where it begins and ends in the block.
    """
    slots = _slots_of(tuple(table.columns.items()))
    rows = np.empty(((len(block) - PAD) // SHORTEST + 1, len(slots.plan.null_row)), np.uint64)
    begin, number = 0, line
    while begin < len(block) - PAD:
        numbers = np.empty(len(rows), np.int64)
        n, others, begin, number = slots.plan.read(block, begin, number, rows, numbers, 0)
        yield _batch_of(rows[:n], numbers[:n], block, table, slots, schema), others


def _batch_of(
    rows: NDArray[np.uint64], numbers: NDArray[np.int64], block: NDArray[np.uint8], table: RawTable, slots: Slots,
    schema: pa.Schema,
) -> pa.RecordBatch:  # fmt: skip
    """Return rows of raw values as the columns of a table."""
    whole = np.ascontiguousarray(rows.view(np.int64)[:, : len(slots.integers)].T)
    doubles = np.ascontiguousarray(rows.view(np.float64)[:, len(slots.integers) :].T)

    def column(path: str, type_: str, arrow: pa.DataType) -> pa.Array:
        if path in slots.doubles:
            values = doubles[slots.doubles[path]]
            return array_of(values, ~np.isnan(values))
        values = whole[slots.integers[path]]
        known = values != NULL
        if fields := fields_of(type_):
            children = [column(f"{path}.{name}", of, arrow.field(name).type) for name, of in fields]
            return pa.Array.from_buffers(arrow, len(values), [bits_of(known)], children=children)
        if type_.endswith("[]"):
            ends = pa.py_buffer(np.zeros(len(values) + 1, np.int32))
            return pa.Array.from_buffers(
                arrow, len(values), [bits_of(known), ends], children=[pa.nulls(0, arrow.value_type)]
            )
        if _KINDS[type_] == TEXT:
            ends, content = _texts(block, values)
            return pa.Array.from_buffers(
                arrow, len(values), [bits_of(known), pa.py_buffer(ends), pa.py_buffer(content)]
            )
        if _KINDS[type_] == FLAG:
            return array_of(values == 1, known)
        return array_of(values, known).cast(arrow)

    columns = [column(name, type_, schema.field(name).type) for name, type_ in table.columns.items()]
    return pa.record_batch([*columns, array_of(numbers)], schema=schema)


@numba.njit(**CACHED)
def _texts(block: Any, words: Any) -> Any:
    """Return ends and content of the texts at words of the block; a null is empty."""
    ends = np.zeros(len(words) + 1, np.int32)
    for row in range(len(words)):
        length = 0 if words[row] == NULL else words[row] & ((1 << LENGTH_BITS) - 1)
        ends[row + 1] = ends[row] + length
    content = np.empty(ends[-1], np.uint8)
    for row in range(len(words)):
        begin = words[row] >> LENGTH_BITS
        for k in range(ends[row + 1] - ends[row]):
            content[ends[row] + k] = block[begin + k]
    return ends, content
