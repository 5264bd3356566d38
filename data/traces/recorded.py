"""Describes the windows that a service recorded (``reclaim serve --record``) as a trace: they are canonical already."""

from __future__ import annotations

from typing import Final

import numpy as np
import pyarrow as pa

from reclaim.data import schema as s
from reclaim.data.traces.source import RawTable, Source
from reclaim.data.windows import CHANNELS, VECTORS, Windows

_TYPES: Final = {
    pa.int8(): "TINYINT", pa.int32(): "INTEGER", pa.int64(): "BIGINT", pa.float64(): "DOUBLE",
    pa.list_(pa.float32()): "FLOAT[]",
}  # fmt: skip
_LACKS: Final = (
    s.ALLOC_COLLECTION_ID, s.ALLOC_INSTANCE_INDEX, s.CPU_SAMPLE, s.MEMORY_ASSIGNED, s.SAMPLE_RATE_HZ, s.PRIORITY,
)  # fmt: skip
NAME: Final = "usage-{end_us:020d}.parquet"
"""Name of a file, by the end of its last window."""


def recorded() -> Source:
    """Return the source of a folder of ``windows_table`` in parquet."""
    usage = RawTable(
        name="usage",
        patterns=("usage-*.parquet",),
        columns={field.name: _TYPES[field.type] for field in s.USAGE},
        select=", ".join(s.USAGE.names),
        needs=tuple(s.USAGE.names),
    )
    return Source(trace="recorded", tables=(usage,), lacks=_LACKS, limits_in_usage=True)


def windows_table(windows: Windows) -> pa.Table:
    """Return windows as rows of usage; what is unknown is null."""
    columns: dict[str, pa.Array] = {}
    usage = {name: windows.usage[:, k] for k, name in enumerate(CHANNELS)}
    usage |= {name: windows.limit[:, r] for r, name in enumerate((s.CPU_LIMIT, s.MEMORY_LIMIT))}
    for field in s.USAGE:
        name = field.name
        if name in VECTORS:
            vectors = windows.percentiles[:, VECTORS[name]]
            columns[name] = pa.array([None if np.isnan(row).any() else row for row in vectors], field.type)
        elif name in usage:
            columns[name] = pa.array(usage[name], field.type, from_pandas=True)
        elif name == s.COLLECTION_TYPE:
            columns[name] = pa.array(np.zeros(len(windows), np.int8))
        elif name in _LACKS:
            columns[name] = pa.nulls(len(windows), field.type)
        else:
            whole_numbers = getattr(windows, name)
            never = name in (s.COLLECTION_ID, s.INSTANCE_INDEX, s.START_US, s.END_US)
            columns[name] = pa.array(whole_numbers, field.type, mask=None if never else whole_numbers < 0)
    return pa.table(columns, schema=s.USAGE)
