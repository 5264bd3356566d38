"""Reads JSON lines of usage into staged rows with compiled code, if they are valid beyond doubt.

The table's SQL (``RawTable.select`` and ``checks``) defines the meaning of a line. The compiled reader accepts a line
only if it has known keys, canonical integers, and finite numbers that are not negative. It leaves every other line,
with its number, to the careful reader of ``json_lines``; a test holds that both give the same rows and rejects.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from reclaim.data import schema as s
from reclaim.data.ingest.readers.json_kernel import (
    DOUBLE,
    INTEGER,
    PAD,
    STRUCT,
    VECTOR,
    read_lines,
)
from reclaim.data.ingest.readers.staging import Layout
from reclaim.data.traces.source import Field, RawTable

_SHORTEST: Final = 64
"""Bytes that a line with all it needs has at least."""


@dataclass(frozen=True)
class Plan:
    """The fields of a table as the arrays that the compiled reader uses.

    Attributes
    ----------
    names : uint64, shape (n_keys, n_words, 2)
        Each key in its quotes, eight bytes a word, and a mask of the bytes that count.
    lengths : int64, shape (n_keys,)
        Of each key in its quotes, in bytes.
    keys : int64, shape (n_keys, 5)
        Of each key: kind, slot of its value (-1: not kept), largest value (-1: any), first child, number of children.
    top : int
        Keys of the outer object; those after it are children.
    zero_is_null, only_with : bool and int64, shape (n_integers,)
        Whether 0 is null, and the integer without which this one is null (-1: none).
    needs : int64, shape (n,)
        Words of a row that must be there.
    maxima : tuple of (int, int)
        Words of maxima and of their means: a maximum of 0 is null where the mean is above 0.
    """

    names: NDArray[np.uint64]
    lengths: NDArray[np.int64]
    keys: NDArray[np.int64]
    top: int
    zero_is_null: NDArray[np.bool_]
    only_with: NDArray[np.int64]
    needs: NDArray[np.int64]
    maxima: tuple[tuple[int, int], ...]
    null_row: NDArray[np.uint64]
    shape: tuple[int, int]
    window: tuple[int, int]


@functools.cache
def plan_of(table_columns: tuple[tuple[str, str], ...], described: tuple[Field, ...], layout_schema: Any) -> Plan:
    """Return the plan for a raw table's columns, its described fields and the schema of its rows."""
    layout = Layout.of(layout_schema)
    fields = {field.path: field for field in described}
    names: list[str] = []
    keys: list[list[int]] = []

    def add(name: str, path: str, type_: str) -> None:
        field = fields.get(path)
        slot = -1 if field is None else layout.slot(field.column)
        most = -1 if field is None or field.most is None else field.most
        kind = VECTOR if type_ == "FLOAT[]" else DOUBLE if type_ == "DOUBLE" else INTEGER
        names.append(name)
        keys.append([kind, slot, most, -1, 0])

    for name, type_ in table_columns:
        add(name, name, type_)
    top = len(names)
    for number, (name, type_) in enumerate(table_columns):
        if type_.startswith("STRUCT("):
            children = [part.split() for part in type_[len("STRUCT(") : -1].split(", ")]
            keys[number] = [STRUCT, -1, 0, len(names), len(children)]
            for child, child_type in children:
                add(child, f"{name}.{child}", child_type)
    integers = len(layout.integers)
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
    quoted = [f'"{name}"'.encode() for name in names]
    most_words = max(map(len, quoted)) // 8 + 2  # the last one empty
    words = np.zeros((len(quoted), most_words, 2), np.uint64)
    for k, key_text in enumerate(quoted):
        words[k, :, 0] = np.frombuffer(key_text.ljust(8 * most_words, b"\0"), "<u8")
        words[k, :, 1] = np.frombuffer((b"\xff" * len(key_text)).ljust(8 * most_words, b"\0"), "<u8")
    return Plan(
        names=words,
        lengths=np.array([len(name) for name in quoted], np.int64),
        keys=np.array(keys, np.int64),
        top=top,
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
    block: NDArray[np.uint8], table: RawTable, layout: Layout
) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Return the rows of the lines that the compiled reader accepts, and the places of the others.

    Parameters
    ----------
    block : uint8, shape (n_bytes,)
        Whole lines, the last one ended as well, then ``PAD`` bytes of any kind.
    table : RawTable
        The table, with its fields.
    layout : Layout
        Of the rows.

    Returns
    -------
    rows : uint64, shape (n, layout.words)
        In the order of the lines.
    others : int64, shape (m, 3)
        Of each line left: its number in the block from 0, where it begins and ends.
    """
    plan = plan_of(tuple(table.columns.items()), table.fields, layout.schema)
    room = (len(block) - PAD) // _SHORTEST + 1
    rows = np.empty((room, layout.words), np.uint64)
    others = []
    n = begin = number = 0
    while begin < len(block) - PAD:
        left = np.empty((room, 3), np.int64)
        n, m, begin, number = read_lines(
            block.ctypes.data, begin, len(block) - PAD, number, n, rows.ctypes.data, rows.view(np.int64),
            rows.view(np.float64), left, plan.names.ctypes.data, plan.lengths.ctypes.data, plan.names.shape[1],
            plan.keys, plan.top, plan.zero_is_null, plan.only_with, plan.needs, plan.null_row.view(np.int64),
            plan.shape, plan.window,
        )  # fmt: skip
        others.append(left[:m])
    rows = rows[:n]
    values = rows.view(np.float64)
    for highest, mean in plan.maxima:
        values[(values[:, highest] == 0) & (values[:, mean] > 0), highest] = np.nan
    return rows, np.concatenate(others)
