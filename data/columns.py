"""Turns columns of Arrow into arrays of numpy and back by their bytes, without pandas.

Arrow's own ``to_numpy`` and ``pa.array`` import pandas first, which takes a twelfth of the time of a small stage.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

_NUMPY: Final[dict[pa.DataType, type[np.generic]]] = {
    pa.int8(): np.int8, pa.int32(): np.int32, pa.int64(): np.int64, pa.float32(): np.float32, pa.float64(): np.float64,
}  # fmt: skip


def whole(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Return a column as one array, without a copy where it is in one piece."""
    if not isinstance(column, pa.ChunkedArray):
        return column
    if column.num_chunks == 1:
        return column.chunk(0)  # ``combine_chunks`` would copy even that
    return column.combine_chunks() if column.num_chunks else pa.nulls(0, column.type)


def values_of(column: pa.Array | pa.ChunkedArray, null: float = 0) -> NDArray[Any]:
    """Return a column of numbers as an array of its type, with ``null`` in the place of nulls.

    It is read-only, always: compiled code is loaded once.
    """
    array = whole(column)
    valid, content = array.buffers()
    values = np.empty(0, _NUMPY[array.type])
    if len(array):
        values = np.frombuffer(content, values.dtype)[array.offset : array.offset + len(array)]
    if array.null_count:
        values = values.copy()
        values[~_bits(valid, array)] = null
    values.flags.writeable = False
    return values


def flags_of(column: pa.Array | pa.ChunkedArray) -> NDArray[np.bool_]:
    """Return a column of flags, false where it is null."""
    array = whole(column)
    if not len(array):
        return np.empty(0, np.bool_)
    valid, content = array.buffers()
    flags = _bits(content, array)
    return flags & _bits(valid, array) if array.null_count else flags


def array_of(values: NDArray[Any], valid: NDArray[np.bool_] | None = None) -> pa.Array:
    """Return an array as a column of its type, null where ``valid`` is false."""
    bits = None if valid is None else bits_of(valid)
    content = np.packbits(values, bitorder="little") if values.dtype == np.bool_ else values
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [bits, pa.py_buffer(content)])


def bits_of(valid: NDArray[np.bool_]) -> pa.Buffer | None:
    """Return Arrow's bitmap of what is valid; None where all is."""
    return None if valid.all() else pa.py_buffer(np.packbits(valid, bitorder="little"))


def empty_table(schema: pa.Schema) -> pa.Table:
    """Return an empty table of the schema."""
    return pa.table([pa.nulls(0, field.type) for field in schema], schema=schema)


def _bits(bits: pa.Buffer, array: pa.Array) -> NDArray[np.bool_]:
    """Return the bits of an array's rows."""
    every = np.unpackbits(np.frombuffer(bits, np.uint8), count=array.offset + len(array), bitorder="little")
    return every[array.offset :].view(np.bool_)
