"""Validates untrusted Arrow streams before any value is read."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, Final, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from reclaim.data.schema import TIERS, UNKNOWN_ID
from reclaim.data.windows import identities
from reclaim.serving.wire.errors import BAD_REQUEST, INVALID, TOO_LARGE, RequestError
from reclaim.serving.wire.schemas import MAX_OWNER

MEDIA_TYPE: Final = "application/vnd.apache.arrow.stream"
"""Content type of the IPC streaming format (https://www.iana.org/assignments/media-types)."""

Kind = Literal["whole", "number", "vector", "word", "tier", "flag"]
"""Content of a column: integers, floats, lists of floats, strings, tiers by name or code, booleans."""

_EXPECTED: Final[dict[Kind, str]] = {
    "whole": "whole numbers", "number": "numbers", "vector": "lists of floats", "word": "text",
    "tier": "text or whole numbers", "flag": "booleans",
}  # fmt: skip

Columns = dict[str, NDArray[Any]]

_DICTIONARY, _BATCH = 2, 3
_HEADERS: Final = {_DICTIONARY: (1,), _BATCH: ()}
"""Types of messages that carry buffers (dictionary batch, record batch), and the fields that lead to their buffers."""
_LENGTH, _COMPRESSION, _IS_DELTA = 0, 3, 2
"""Fields of Arrow's Message.fbs: the first two of the table ``RecordBatch``, the third of ``DictionaryBatch``."""
_MOST_BATCHES: Final = 1_000
"""Batches, and dictionaries, of a stream at most: each costs some 10 µs a column, even an empty one."""
_LARGEST: Final = np.uint64(2**63 - 1)
_OUT_OF_RANGE: Final = -2
"""Replaces a number that does not fit in 64 bits: no id, time or code is below -1, so the row is refused."""


def read_table(body: bytes, kinds: Mapping[str, Kind], required: tuple[str, ...], max_rows: int) -> pa.Table:
    """Return the table in a stream.

    Parameters
    ----------
    body : bytes
        An Arrow IPC stream, not compressed: a megabyte of compressed buffers may be a terabyte.
    kinds : mapping of column name to kind
        All allowed columns.
    required : tuple of str
        Required columns.
    max_rows : int

    Raises
    ------
    RequestError
        The body is no such stream, its columns are wrong, or it has too many rows, batches or words in dictionaries.
        Single rows are not checked here.
    """
    try:
        _check_messages(body, max_rows)
        with pa.ipc.open_stream(pa.BufferReader(body)) as reader:
            _check_columns(reader.schema, kinds, required)
            batches, rows, known = [], 0, set[int]()
            for batch in reader:
                _validate(batch, known)
                rows += batch.num_rows
                if rows > max_rows:
                    raise RequestError(
                        TOO_LARGE, "too_many_rows", f"the table may have at most {max_rows} rows; send it in parts"
                    )  # fmt: skip
                batches.append(batch)
            return pa.Table.from_batches(batches, reader.schema).combine_chunks()
    except (pa.ArrowException, OSError, ValueError, OverflowError, MemoryError, struct.error, IndexError) as error:
        reason = " ".join(str(error).split())[:100]
        raise RequestError(
            BAD_REQUEST,
            "malformed_arrow",
            f"the body is not a plain Arrow IPC stream: {reason or type(error).__name__}",
        ) from error


def write_table(table: pa.Table | pa.RecordBatch) -> pa.Buffer:
    """Return the table as a stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write(table)
    return sink.getvalue()


def read_stream(content: bytes | memoryview) -> pa.Table:
    """Return the table in a stream that ``write_table`` made; ``read_table`` checks those of others."""
    with pa.ipc.open_stream(pa.py_buffer(content)) as reader:
        return reader.read_all()


def columns_of(table: pa.Table, kinds: Mapping[str, Kind], lengths: Mapping[str, int]) -> Columns:
    """Return each column as an array, shape (n,) or, for vectors, (n, length).

    Null is -1 among whole numbers, tiers and flags, and NaN among numbers. A vector of another length, or with only
    some values null, is inf at its first place, which every check of values refuses. Strings become ``identities``;
    empty and too long ones are below -1.
    """
    return {name: _array(table.column(name), kinds[name], lengths.get(name, 0)) for name in table.column_names}


def _validate(batch: pa.RecordBatch, known: set[int]) -> None:
    """Validate a batch; its dictionaries only once, as all batches share them.

    ``known`` has the addresses of the words that were validated, which stay in memory.
    """
    batch.validate()
    for column in batch.columns:
        if not pa.types.is_dictionary(column.type):
            column.validate(full=True)
            continue
        words, place = column.dictionary, column.indices
        place.validate(full=True)
        least_most = pc.min_max(place).as_py()
        if least_most["min"] is not None and not 0 <= least_most["min"] <= least_most["max"] < len(words):
            raise ValueError("an index outside its dictionary")
        offsets = words.buffers()[1]
        if offsets is None or offsets.address not in known:
            words.validate(full=True)
        if offsets is not None:
            known.add(offsets.address)


def _check_columns(schema: pa.Schema, kinds: Mapping[str, Kind], required: tuple[str, ...]) -> None:
    names = schema.names[: 2 * len(kinds)]
    unknown = sorted(set(names) - set(kinds)) or (["…"] if len(schema.names) > len(names) else [])
    absent = [name for name in required if name not in names]
    twice = sorted({name for name in names if names.count(name) > 1})
    fields = [f for f in schema if f.name in kinds and not _fits(f.type, kinds[f.name])]
    wrong = [f"{f.name} ({f.type}, expected {_EXPECTED[kinds[f.name]]})" for f in fields]
    problems = [
        f"{what}: {', '.join(some)[:200]}"
        for what, some in (("unknown", unknown), ("absent", absent), ("twice", twice), ("of the wrong type", wrong))
        if some
    ]
    if problems:
        names = [*unknown, *absent, *twice, *(f.name for f in fields)]
        raise RequestError(INVALID, "invalid_columns", f"columns {'; '.join(problems)}", field=names[0])


def _fits(kind: pa.DataType, wanted: Kind) -> bool:
    if pa.types.is_null(kind):
        return True
    number = pa.types.is_floating(kind) or pa.types.is_integer(kind)
    words = kind.value_type if pa.types.is_dictionary(kind) else kind
    text = pa.types.is_string(words) or pa.types.is_large_string(words)
    lists = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    return bool(
        {
            "whole": pa.types.is_integer(kind),
            "number": number,
            "vector": lists and pa.types.is_floating(kind.value_type),
            "word": text,
            "tier": text or pa.types.is_integer(kind),
            "flag": pa.types.is_boolean(kind),
        }[wanted]
    )


def _array(column: pa.ChunkedArray, kind: Kind, length: int) -> NDArray[Any]:
    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):  # of no chunks at all
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], column.type)
    n = len(array)
    if pa.types.is_null(array.type):
        empty = {"number": np.full(n, np.nan), "vector": np.full((n, length), np.nan, np.float32)}
        return empty.get(kind, np.full(n, UNKNOWN_ID, np.int64))
    if kind == "vector":
        return _vectors(array, length)
    if kind == "number":
        return np.asarray(array.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False), np.float64)
    if kind == "word" or (kind == "tier" and not pa.types.is_integer(array.type)):
        return _words(array, kind)
    if pa.types.is_uint64(array.type):
        bare = np.asarray(array.fill_null(0).to_numpy(zero_copy_only=False), np.uint64)
        numbers = np.where(bare > _LARGEST, np.int64(_OUT_OF_RANGE), bare.astype(np.int64))
        return np.where(array.is_null().to_numpy(zero_copy_only=False), np.int64(UNKNOWN_ID), numbers)
    return np.asarray(array.cast(pa.int64()).fill_null(UNKNOWN_ID).to_numpy(zero_copy_only=False), np.int64)


def _vectors(array: pa.Array, length: int) -> NDArray[np.float32]:
    out = np.full((len(array), length), np.nan, np.float32)
    lengths = pc.fill_null(pc.list_value_length(array), UNKNOWN_ID).to_numpy(zero_copy_only=False)
    out[(lengths >= 0) & (lengths != length), 0] = np.inf
    right = lengths == length
    kept = array if right.all() else array.filter(pa.array(right))
    values = pc.list_flatten(kept).cast(pa.float32()).to_numpy(zero_copy_only=False)
    out[right] = values.reshape(-1, length)
    unknown = np.isnan(out)
    out[unknown.any(axis=1) & ~unknown.all(axis=1), 0] = np.inf  # only some values, which is no distribution
    return out


def _words(array: pa.Array, kind: Kind) -> NDArray[np.int64]:
    encoded = array if pa.types.is_dictionary(array.type) else array.dictionary_encode()
    words = encoded.dictionary.to_pylist()
    if kind == "tier":
        known: dict[str | None, int] = {None: UNKNOWN_ID, **{name: number for number, name in enumerate(TIERS)}}
        numbers = np.array([known.get(word, _OUT_OF_RANGE) for word in words], np.int64)
    else:
        numbers = identities(words)
        numbers[[word is not None and not 0 < len(word) <= MAX_OWNER for word in words]] = _OUT_OF_RANGE
    place = encoded.indices.cast(pa.int64()).fill_null(len(words)).to_numpy(zero_copy_only=False)
    out: NDArray[np.int64] = np.append(numbers, UNKNOWN_ID)[place]
    return out


def _check_messages(body: bytes, max_words: int) -> None:
    """Check every message that carries buffers, before Arrow reads it: its packing, and how many there are."""
    reader = pa.BufferReader(body)
    seen, n_words = {_DICTIONARY: 0, _BATCH: 0}, 0
    while True:
        try:
            message = pa.ipc.read_message(reader)
        except EOFError:
            if reader.tell() < len(body):
                raise ValueError(f"{len(body) - reader.tell()} bytes follow the end of the stream") from None
            return
        metadata = message.metadata.to_pybytes()
        root = struct.unpack_from("<I", metadata)[0]
        kind_at, header_at = _field(metadata, root, 1), _field(metadata, root, 2)
        kind = metadata[kind_at] if kind_at else 0
        if kind not in _HEADERS or not header_at:
            continue
        seen[kind] += 1
        if seen[kind] > _MOST_BATCHES:
            what = "batches" if kind == _BATCH else "dictionaries"
            message = f"the stream may have at most {_MOST_BATCHES} {what}; combine them before it is written"
            raise RequestError(TOO_LARGE, "too_many_batches", message)
        table = header_at + struct.unpack_from("<I", metadata, header_at)[0]
        if kind == _DICTIONARY and (at := _field(metadata, table, _IS_DELTA)) and metadata[at]:
            raise RequestError(INVALID, "delta_dictionary", "a dictionary must be sent whole, not as deltas")
        for step in _HEADERS[kind]:
            at = _field(metadata, table, step)
            if not at:
                raise ValueError("a dictionary without data")
            table = at + struct.unpack_from("<I", metadata, at)[0]
        if kind == _DICTIONARY and (at := _field(metadata, table, _LENGTH)):
            n_words += struct.unpack_from("<q", metadata, at)[0]
            if n_words > max_words:
                message = f"the dictionaries may have at most {max_words} words; send the table in parts"
                raise RequestError(TOO_LARGE, "too_many_words", message)
        if _field(metadata, table, _COMPRESSION):
            raise RequestError(
                INVALID, "compressed_arrow", "the stream's buffers are compressed: write it without `compression`"
            )


def _field(metadata: bytes, table: int, number: int) -> int:
    """Return the position of a field of a flatbuffers table, 0 where it is absent."""
    vtable = table - struct.unpack_from("<i", metadata, table)[0]
    if vtable < 0:
        raise ValueError("a table outside its message")
    size = struct.unpack_from("<H", metadata, vtable)[0]
    entry = 4 + 2 * number
    offset = struct.unpack_from("<H", metadata, vtable + entry)[0] if entry + 2 <= size else 0
    return table + int(offset) if offset else 0
