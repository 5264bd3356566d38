"""What is written to the log: windows, facts and departures as they were taken, as Arrow streams that name columns."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from reclaim.data import schema as s
from reclaim.data.schema import RESOURCES
from reclaim.data.windows import CHANNELS, LEVELS, Windows, empty_windows
from reclaim.serving.arrow import write_table
from reclaim.serving.rows import FactRows, Refusals

WINDOWS: Final = "windows"
FACTS: Final = "facts"
GONE: Final = "gone"
SETTINGS: Final = "settings"
_WIDE: Final = {"usage": CHANNELS, "percentiles": tuple(f"p{level}" for level in LEVELS), "limit": RESOURCES}
"""Columns of ``Windows`` with a second axis, and what its places are called."""
_COLLECTION: Final = b"collection"


def write_windows(windows: Windows) -> pa.Buffer:
    """Return windows as bytes; what is unknown in all of them takes none."""
    columns: dict[str, NDArray[Any]] = {}
    for field in fields(Windows):
        values = getattr(windows, field.name)
        if field.name not in _WIDE:
            columns[field.name] = values
            continue
        for k in np.flatnonzero(~np.isnan(values).all(axis=0)):
            columns[f"{field.name}.{_WIDE[field.name][k]}"] = np.ascontiguousarray(values[:, k])
    batch = pa.RecordBatch.from_arrays([pa.array(column) for column in columns.values()], list(columns))
    return write_table(batch)


def read_windows(payload: memoryview) -> Windows:
    """Return what ``write_windows`` was given."""
    table = _read(payload)
    out = empty_windows(table.num_rows)
    for name in table.column_names:
        column, _, place = name.partition(".")
        values = table.column(name).to_numpy()
        if place:
            getattr(out, column)[:, _WIDE[column].index(place)] = values
        else:
            getattr(out, column)[:] = values
    return out


def write_facts(facts: FactRows) -> pa.Buffer:
    """Return facts as bytes."""
    table = pa.table({name: values for name, values in facts.columns.items()})
    wishes = pa.table({"collection": list(facts.estimation), "estimation": list(facts.estimation.values())})
    about = {_COLLECTION: write_table(wishes).to_pybytes()}
    return write_table(table.replace_schema_metadata(about))


def read_facts(payload: memoryview) -> FactRows:
    """Return what ``write_facts`` was given."""
    table = _read(payload)
    wishes = _read(memoryview(table.schema.metadata[_COLLECTION])).to_pydict()
    columns = {name: table.column(name).to_numpy() for name in table.column_names}
    estimation = dict(zip(wishes["collection"], wishes["estimation"], strict=True))
    return FactRows(columns, np.arange(table.num_rows), estimation, table.num_rows, Refusals())


def write_names(key: NDArray[np.int64]) -> pa.Buffer:
    """Return the names of tasks as bytes; key (n, 2)."""
    return write_table(pa.table({name: key[:, k] for k, name in enumerate((s.COLLECTION_ID, s.INSTANCE_INDEX))}))


def read_names(payload: memoryview) -> NDArray[np.int64]:
    """Return what ``write_names`` was given."""
    return np.column_stack([column.to_numpy() for column in _read(payload).columns])


def _read(payload: memoryview) -> pa.Table:
    with pa.ipc.open_stream(pa.py_buffer(payload)) as reader:
        return reader.read_all()
