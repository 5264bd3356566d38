"""Writer of tables in the layout of the Google v3 trace: shards of JSON lines or of parquet.

The column names below are those of the foreign format. Missing fields are left out of a JSON line and null in
parquet; 64-bit integers and enumerations are strings in JSON, as the public export has them.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from reclaim.data.synthetic.shapes import RESOURCE_TEXT, RESOURCE_VALUE, UsageRows

US_PER_S: Final = 1_000_000
_GZIP_LEVEL: Final = 1
"""Compression is half the time of a cell written as JSON, and level 6 saves only a sixth of the size."""

_RESOURCES = pa.struct([("cpus", pa.float64()), ("memory", pa.float64())])
_CONSTRAINT = pa.struct([("name", pa.string()), ("value", pa.string()), ("relation", pa.int64())])

USAGE, INSTANCES, COLLECTIONS = "instance_usage", "instance_events", "collection_events"
MACHINES, ATTRIBUTES = "machine_events", "machine_attributes"

_TYPES: Final[Mapping[str, pa.DataType]] = {
    **dict.fromkeys(("switch_id", "platform_id", "name", "value", "user"), pa.string()),
    **dict.fromkeys(("collection_name", "collection_logical_name"), pa.string()),
    **dict.fromkeys(("capacity", "resource_request"), _RESOURCES),
    **dict.fromkeys(("average_usage", "maximum_usage", "random_sample_usage"), _RESOURCES),
    **dict.fromkeys(("assigned_memory", "page_cache_memory", "sample_rate"), pa.float64()),
    **dict.fromkeys(("cycles_per_instruction", "memory_accesses_per_instruction"), pa.float64()),
    **dict.fromkeys(("cpu_usage_distribution", "tail_cpu_usage_distribution"), pa.list_(pa.float64())),
    "deleted": pa.bool_(),
    "start_after_collection_ids": pa.list_(pa.int64()),
    "constraint": pa.list_(_CONSTRAINT),
}
"""Types of the columns that are not 64-bit integers."""


def _schema(columns: str) -> pa.Schema:
    return pa.schema([(name, _TYPES.get(name, pa.int64())) for name in columns.split()])


_EVENT: Final = "time type collection_id scheduling_class missing_type collection_type priority alloc_collection_id "
SCHEMAS: Final[Mapping[str, pa.Schema]] = {
    MACHINES: _schema("time machine_id type switch_id capacity platform_id missing_data_reason"),
    ATTRIBUTES: _schema("time machine_id name value deleted"),
    COLLECTIONS: _schema(
        _EVENT + "user collection_name collection_logical_name parent_collection_id start_after_collection_ids "
        "max_per_machine max_per_switch vertical_scaling scheduler"
    ),
    INSTANCES: _schema(_EVENT + "instance_index machine_id alloc_instance_index resource_request constraint"),
    USAGE: _schema(
        "start_time end_time collection_id instance_index machine_id alloc_collection_id alloc_instance_index "
        "collection_type average_usage maximum_usage random_sample_usage assigned_memory page_cache_memory sample_rate "
        "cycles_per_instruction memory_accesses_per_instruction cpu_usage_distribution tail_cpu_usage_distribution"
    ),
}
"""Table → its columns in the order of the format."""


def resources(cpu_code: int, memory_code: int) -> dict[str, float]:
    """Return a Resources structure of the v3 format, from two resource codes."""
    return {"cpus": float(RESOURCE_VALUE[cpu_code]), "memory": float(RESOURCE_VALUE[memory_code])}


class TableWriter:
    """Writes one table as numbered shards into a folder; the same rows give the same bytes.

    A context manager whose end finishes the open shard.
    """

    def __init__(self, folder: Path, table: str, format: str) -> None:
        self._folder, self._table, self._format = folder, table, format
        self._schema = SCHEMAS[table]
        self._file: Any = None
        self._raw: Any = None
        self.shards = 0
        self.rows = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        if self._file is not None:
            self.end_shard()

    def write_rows(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append rows, mappings from column to a plain value; absent columns are missing values."""
        self._open()
        self.rows += len(rows)
        if self._format == "json":
            lines = (json.dumps(self._json(row), separators=(",", ":")) + "\n" for row in rows)
            self._file.write("".join(lines).encode())
        else:
            self._file.write_table(pa.Table.from_pylist(list(rows), schema=self._schema))

    def write_windows(self, windows: UsageRows) -> None:
        """Append usage windows, in the order given."""
        self._open()
        self.rows += len(windows.cpu)
        if self._format == "json":
            self._file.write("".join(_usage_lines(windows)).encode())
        else:
            self._file.write_table(_usage_table(windows, self._schema))

    def end_shard(self) -> None:
        """Finish the open shard; the next row starts another. A table has at least one shard."""
        if self._file is None and self.shards:
            return
        self._open()
        self._file.close()
        if self._raw is not None:
            self._raw.close()
        self._file = self._raw = None

    def _open(self) -> None:
        if self._file is not None:
            return
        suffix = "json.gz" if self._format == "json" else "parquet"
        path = self._folder / f"{self._table}-{self.shards:012d}.{suffix}"
        self.shards += 1
        if self._format == "json":
            self._raw = path.open("wb")
            # without name and time, so that the same rows give the same bytes
            self._file = gzip.GzipFile(filename="", mode="wb", fileobj=self._raw, compresslevel=_GZIP_LEVEL, mtime=0)
        else:
            self._file = pq.ParquetWriter(path, self._schema, compression="zstd")

    def _json(self, row: Mapping[str, Any]) -> dict[str, Any]:
        line = {}
        for name in self._schema.names:
            value = row.get(name)
            if value is not None:
                line[name] = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
        return line


_USAGE_LINE: Final = (
    '{"start_time":"%d","end_time":"%d","collection_id":"%d","instance_index":"%d","machine_id":"%d",'
    '"alloc_collection_id":"%d",%s"collection_type":"%d","average_usage":{"cpus":%s,"memory":%s},'
    '"maximum_usage":{"cpus":%s%s},"random_sample_usage":{"cpus":%s},"assigned_memory":%s,"page_cache_memory":%s,'
    '"sample_rate":%r%s%s}\n'
)


def _usage_lines(d: UsageRows) -> Iterator[str]:
    """Yield JSON lines of windows, formatted by hand because ``json.dumps`` takes five times as long."""
    w = d.simulated
    memory_max = [
        f',"memory":{text}' if has else ""
        for text, has in zip(RESOURCE_TEXT[d.memory_max].tolist(), d.has_memory_max.tolist(), strict=True)
    ]
    alloc_index = [
        f'"alloc_instance_index":"{index}",' if alloc else ""
        for alloc, index in zip(w.alloc_collection.tolist(), w.alloc_index.tolist(), strict=True)
    ]
    counters = [
        f',"cycles_per_instruction":{cpi!r},"memory_accesses_per_instruction":{mai!r}' if has else ""
        for has, cpi, mai in zip(np.isfinite(d.cpi).tolist(), d.cpi.tolist(), d.mai.tolist(), strict=True)
    ]
    vectors = [""] * len(d.cpu)
    for name, codes, has in (
        ("cpu_usage_distribution", d.percentiles, d.has_percentiles),
        ("tail_cpu_usage_distribution", d.tail, d.has_tail),
    ):
        at = np.flatnonzero(has)
        for i, values in zip(at.tolist(), RESOURCE_TEXT[codes[at]].tolist(), strict=True):
            vectors[i] += f',"{name}":[{",".join(values)}]'
    columns = (
        *((c * US_PER_S).tolist() for c in (w.start_s, w.end_s)),
        *(c.tolist() for c in (w.collection, w.index, w.machine, w.alloc_collection)),
        alloc_index,
        w.kind.tolist(),
        *(RESOURCE_TEXT[c].tolist() for c in (d.cpu, d.memory, d.cpu_max)),
        memory_max,
        *(RESOURCE_TEXT[c].tolist() for c in (d.cpu_sample, d.assigned_memory, d.page_cache)),
        d.sample_rate.tolist(),
        counters,
        vectors,
    )
    return (_USAGE_LINE % row for row in zip(*columns, strict=True))


def _usage_table(d: UsageRows, schema: pa.Schema) -> pa.Table:
    w = d.simulated
    struct = [schema.field("average_usage").type.field(i) for i in range(2)]

    def amounts(codes: npt.NDArray[np.int64]) -> pa.Array:
        return pa.array(RESOURCE_VALUE[codes])

    def vectors(codes: npt.NDArray[np.int64], has: npt.NDArray[np.bool_]) -> pa.Array:
        offsets = np.concatenate([[0], np.cumsum(np.where(has, codes.shape[1], 0))]).astype(np.int32)
        return pa.ListArray.from_arrays(pa.array(offsets), amounts(codes[has].ravel()))

    def pair(cpu: pa.Array, memory: pa.Array) -> pa.Array:
        return pa.StructArray.from_arrays([cpu, memory], fields=struct)

    memory_max = pa.array(RESOURCE_VALUE[d.memory_max], mask=~d.has_memory_max)
    columns = [
        pa.array(w.start_s * US_PER_S),
        pa.array(w.end_s * US_PER_S),
        *(pa.array(c) for c in (w.collection, w.index, w.machine, w.alloc_collection)),
        pa.array(w.alloc_index, mask=w.alloc_collection == 0),
        pa.array(w.kind),
        pair(amounts(d.cpu), amounts(d.memory)),
        pair(amounts(d.cpu_max), memory_max),
        pair(amounts(d.cpu_sample), pa.nulls(len(d.cpu), pa.float64())),
        amounts(d.assigned_memory),
        amounts(d.page_cache),
        pa.array(d.sample_rate),
        pa.array(d.cpi, mask=np.isnan(d.cpi)),
        pa.array(d.mai, mask=np.isnan(d.mai)),
        vectors(d.percentiles, d.has_percentiles),
        vectors(d.tail, d.has_tail),
    ]
    return pa.Table.from_arrays(columns, schema=schema)
