"""Converts windows, facts and departures to log records and back: Arrow streams with named columns."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from reclaim.data import schema as s
from reclaim.data.schema import UNKNOWN_ID
from reclaim.data.windows import COLUMNS, Windows, empty_windows
from reclaim.serving.wire.arrow import read_stream, write_table
from reclaim.serving.wire.rows import FactRows, Refusals

WINDOWS: Final = "windows"
FACTS: Final = "facts"
GONE: Final = "gone"
SETTINGS: Final = "settings"
REPORTED: Final = "reported"
"""Kind of facts of tasks that had ended: they change no state, and the recorder alone takes them."""
RECORDED: Final = "recorded"
"""Kind without content: the recorder has written all windows and facts of the records before."""
_COLLECTION: Final = b"collection"
_HEARD_US: Final = b"heard_us"
_CLOCK_US: Final = b"clock_us"


def write_windows(windows: Windows, heard_us: int = UNKNOWN_ID, clock_us: int = UNKNOWN_ID) -> pa.Buffer:
    """Return windows as bytes, with the time when they came, and the latest time of the cell's clock when they did.

    Columns that are unknown in all rows are left out.
    """
    columns: dict[str, NDArray[Any]] = {}
    for name, column in COLUMNS.items():
        values = getattr(windows, name)
        if not column.axis:
            columns[name] = values
            continue
        unknown = np.isnan(values)
        if unknown.all():  # as percentiles mostly are
            continue
        for k, place in enumerate(column.axis):
            if not unknown[:, k].all():  # ``all(axis=0)`` takes ten times as long
                columns[f"{name}.{place}"] = np.ascontiguousarray(values[:, k])
    batch = pa.RecordBatch.from_arrays([pa.array(column) for column in columns.values()], list(columns))
    return write_table(batch.replace_schema_metadata({_HEARD_US: str(heard_us), _CLOCK_US: str(clock_us)}))


def read_windows(payload: memoryview) -> Windows:
    """Return the windows of ``write_windows``."""
    table = read_stream(payload)
    out = empty_windows(table.num_rows)
    for name in table.column_names:
        column, _, place = name.partition(".")
        values = table.column(name).to_numpy()
        if place:
            getattr(out, column)[:, COLUMNS[column].axis.index(place)] = values
        else:
            getattr(out, column)[:] = values
    return out


def write_facts(facts: FactRows, heard_us: int = UNKNOWN_ID, clock_us: int = UNKNOWN_ID) -> pa.Buffer:
    """Return facts as bytes, with the time when they came, and the latest time of the cell's clock when they did."""
    table = pa.table({name: values for name, values in facts.columns.items()})
    estimation = pa.table({"collection": list(facts.estimation), "estimation": list(facts.estimation.values())})
    about = {_COLLECTION: write_table(estimation).to_pybytes(), _HEARD_US: str(heard_us), _CLOCK_US: str(clock_us)}
    return write_table(table.replace_schema_metadata(about))


def read_facts(payload: memoryview) -> FactRows:
    """Return the facts of ``write_facts``."""
    table = read_stream(payload)
    estimation = read_stream(table.schema.metadata[_COLLECTION]).to_pydict()
    columns = {name: table.column(name).to_numpy() for name in table.column_names}
    by_collection = dict(zip(estimation["collection"], estimation["estimation"], strict=True))
    return FactRows(columns, np.arange(table.num_rows), by_collection, table.num_rows, Refusals())


def times_of(payload: memoryview) -> tuple[int, int]:
    """Return when the windows or facts of a record came, and the clock's latest time then; -1 where it is unknown."""
    with pa.ipc.open_stream(pa.py_buffer(payload)) as reader:
        about = reader.schema.metadata or {}
    return int(about.get(_HEARD_US, UNKNOWN_ID)), int(about.get(_CLOCK_US, UNKNOWN_ID))


def write_names(key: NDArray[np.int64]) -> pa.Buffer:
    """Return the names of tasks as bytes; key (n, 2)."""
    return write_table(pa.table({name: key[:, k] for k, name in enumerate((s.COLLECTION_ID, s.INSTANCE_INDEX))}))


def read_names(payload: memoryview) -> NDArray[np.int64]:
    """Return the names of ``write_names``; shape (n, 2)."""
    return np.column_stack([column.to_numpy() for column in read_stream(payload).columns])
