"""Predicts machine peaks from a file of task samples into a file with a row for each predictor, machine and time."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pyarrow import types

from reclaim.data import schema as s
from reclaim.data.core.engine.workers import HERE, Engine
from reclaim.data.core.parquet import ROW_GROUP_ROWS, TableWriter
from reclaim.data.errors import ConfigError, SchemaError, TraceError
from reclaim.replay.machine_peaks.predictors import PREDICTORS, MachineSamples, Oracle, Predictor

MACHINE: Final = "machine"
TASK: Final = "task"
USAGE: Final = "usage"
LIMIT: Final = "limit"
SAMPLE_COLUMNS: Final = (MACHINE, s.TIME_US, TASK, USAGE, LIMIT)
"""Columns of the samples: ids (integers or text), microseconds, and usage and limit in any unit that they share."""
_LATEST_US: Final = 2**62
"""Upper bound of times, some 146,000 years, so that a horizon can be added to each."""


@dataclass(frozen=True)
class PeaksReport:
    """Counts of a run of ``predict_peaks``.

    Attributes
    ----------
    samples, machines : int
        Read.
    predictions : int
        Rows written: one for each predictor, machine and time, but those at which the predictor is undefined.
    predictors : tuple of str
    seconds : float
    """

    samples: int
    machines: int
    predictions: int
    predictors: tuple[str, ...]
    seconds: float


def choose_predictors(names: tuple[str, ...] = (), *, oracle: bool = True) -> dict[str, Predictor]:
    """Return the named predictors, or all where none is named; on demand without those that see the future.

    Raises
    ------
    ConfigError
        A name is unknown, or none is left.
    """
    unknown = [name for name in names if name not in PREDICTORS]
    if unknown:
        raise ConfigError(f"--predictor: unknown {', '.join(unknown)}; expected any of {', '.join(PREDICTORS)}")
    chosen = {name: p for name, p in PREDICTORS.items() if name in (names or PREDICTORS)}
    if not oracle:
        chosen = {name: p for name, p in chosen.items() if not isinstance(p, Oracle)}
    if not chosen:
        raise ConfigError("--no-oracle leaves none of the predictors that were asked for; name another one")
    return chosen


def predict_peaks(
    samples: Path,
    out: Path,
    predictors: Mapping[str, Predictor] | None = None,
    *,
    progress: Callable[[float], None] | None = None,
    engine: Engine = HERE,
) -> PeaksReport:
    """Predict the peak of each machine at each time of a file of samples.

    A few machines for each worker are in memory at a time. The same samples give the same bytes, in any order of those
    of one machine and time and with any row groups. The file is written under a temporary name and then renamed.

    Parameters
    ----------
    samples : Path
        Parquet with the columns ``SAMPLE_COLUMNS`` among others. The rows of a machine stand together, in order of
        time.
    out : Path
        Parquet to write, rows (predictor, machine, time_us, predicted_peak, total_usage, limit) in the order
        (machine, predictor, time): total usage is the sum of each task's up to its limit, limit the sum of the limits.
        A time at which a predictor is undefined has no row. The predictors' parameters are in the file's metadata.
    predictors : mapping of str to Predictor or None
        By name; None is all of ``PREDICTORS``.
    progress : callable or None
        Called with the share of the rows done as each machine is.
    engine : Engine
        Runs a job for each machine; the bytes do not depend on it.

    Raises
    ------
    ConfigError
        The file to write is the one to read, a folder, or has the ending of CSV.
    SchemaError
        A column is missing or of the wrong type, or a row is not in order, is there twice, or holds what cannot be:
        null, NaN, infinity, a negative number. The message names the column and the row, counted from 0.
    TraceError
        There is no such file, or it is not Parquet, or damaged.
    """
    started = time.perf_counter()
    predictors = PREDICTORS if predictors is None else predictors
    if out.is_dir() or out.resolve() == samples.resolve():
        raise ConfigError(
            f"{out}: expected the name of a new file, got {'a folder' if out.is_dir() else 'the samples'}"
        )
    if out.suffix == ".csv":
        raise ConfigError(f"{out}: Parquet is written; name a file that ends with .parquet")
    with _open(samples) as file:
        machine_type = _check_columns(samples, file.schema_arrow)
        schema = _schema(machine_type, predictors)
        rows, machines = file.metadata.num_rows, 0
        out.parent.mkdir(parents=True, exist_ok=True)
        predicted = partial(_predicted, samples, predictors, schema)
        with (
            TableWriter(out, schema) as writer,
            engine.pool() as pool,
            closing(pool.each(predicted, _machines(samples, file, machine_type))) as of_machines,
        ):
            for until, predictions in of_machines:
                for table in predictions:
                    writer.write(table)
                machines += 1
                if progress is not None:
                    progress(until / rows)
    return PeaksReport(rows, machines, writer.rows, tuple(predictors), time.perf_counter() - started)


def _open(path: Path) -> pq.ParquetFile:
    if not path.is_file():
        found = "a folder" if path.is_dir() else "no such file"
        raise TraceError(f"{path}: {found}; expected Parquet with columns {', '.join(SAMPLE_COLUMNS)}")
    try:
        return pq.ParquetFile(path)
    except pa.ArrowInvalid as error:
        raise TraceError(f"{path}: not a Parquet file, or damaged ({error})") from error


def _check_columns(path: Path, schema: pa.Schema) -> pa.DataType:
    """Return the type that machines are written with; SchemaError that names every column that does not fit."""
    missing = sorted(set(SAMPLE_COLUMNS) - set(schema.names))
    if missing:
        raise SchemaError(f"{path}: missing columns {', '.join(missing)}; there are {', '.join(schema.names)}")

    def plain(name: str) -> pa.DataType:
        kind = schema.field(name).type
        return kind.value_type if types.is_dictionary(kind) else kind

    def is_id(kind: pa.DataType) -> bool:
        return any(fits(kind) for fits in (types.is_string, types.is_large_string, types.is_integer, types.is_null))

    def is_number(kind: pa.DataType) -> bool:
        return any(fits(kind) for fits in (types.is_floating, types.is_integer, types.is_null))

    wrong = [
        f"{name} must be integers or text, got {plain(name)}" for name in (MACHINE, TASK) if not is_id(plain(name))
    ]
    if not (types.is_integer(plain(s.TIME_US)) or types.is_null(plain(s.TIME_US))):
        wrong.append(f"{s.TIME_US} must be integers (microseconds), got {plain(s.TIME_US)}")
    wrong += [f"{name} must be numbers, got {plain(name)}" for name in (USAGE, LIMIT) if not is_number(plain(name))]
    if wrong:
        raise SchemaError(f"{path}: {'; '.join(wrong)}")
    return pa.int64() if types.is_integer(plain(MACHINE)) else pa.string()


def _schema(machine_type: pa.DataType, predictors: Mapping[str, Predictor]) -> pa.Schema:
    message = {name: _described(predictor) for name, predictor in predictors.items()}
    columns = {
        "predictor": pa.string(), MACHINE: machine_type, s.TIME_US: pa.int64(), "predicted_peak": pa.float64(),
        "total_usage": pa.float64(), LIMIT: pa.float64(),
    }  # fmt: skip
    return pa.schema(list(columns.items()), metadata={"predictors": json.dumps(message)})


def _described(value: Any) -> Any:
    """Return a predictor's kind and parameters, those of predictors inside it as well; else the value."""
    if isinstance(value, tuple):
        return [_described(one) for one in value]
    if not is_dataclass(value):
        return value
    return {"kind": type(value).__name__} | {f.name: _described(getattr(value, f.name)) for f in fields(value)}


def _machines(path: Path, file: pq.ParquetFile, machine_type: pa.DataType) -> Iterator[tuple[int, pa.Table]]:
    """Return the rows of each machine, with the number of the first; SchemaError where a machine appears twice."""
    schema = pa.schema([(MACHINE, machine_type), (s.TIME_US, pa.int64()), (TASK, pa.string()),
                        (USAGE, pa.float64()), (LIMIT, pa.float64())])  # fmt: skip
    seen: set[Any] = set()
    waiting: list[pa.Table] = []
    first_row = row = 0
    for table in _read(path, file):
        for part in _cut(_cast(path, row, table, schema)):
            machine = part[MACHINE][0]
            if waiting and waiting[0][MACHINE][0] != machine:
                yield first_row, pa.concat_tables(waiting)
                waiting, first_row = [], row
            if not waiting:
                if machine.as_py() in seen:
                    raise SchemaError(
                        f"{path}: {MACHINE}: row {row}: {machine} again after others; sort the rows by {MACHINE} and "
                        f"{s.TIME_US}"
                    )
                seen.add(machine.as_py())
            waiting.append(part)
            row += len(part)
    if waiting:
        yield first_row, pa.concat_tables(waiting)


def _read(path: Path, file: pq.ParquetFile) -> Iterator[pa.Table]:
    batches = file.iter_batches(ROW_GROUP_ROWS, columns=list(SAMPLE_COLUMNS))
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return
        except (OSError, pa.ArrowInvalid) as error:  # bytes that pyarrow cannot decode
            raise TraceError(f"{path}: damaged ({error})") from error
        yield pa.Table.from_batches([batch])


def _cut(table: pa.Table) -> Iterator[pa.Table]:
    """Cut rows where the machine changes."""
    machine = table[MACHINE].combine_chunks()
    changes = np.flatnonzero(pc.not_equal(machine[1:], machine[:-1]).to_numpy(zero_copy_only=False)) + 1
    edges = [0, *changes.tolist(), len(table)]
    for low, high in pairwise(edges):
        if high > low:
            yield table.slice(low, high - low)


def _cast(path: Path, row: int, table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return the columns in the types used here; SchemaError where a value is null or does not fit."""
    columns = []
    for field in schema:
        column = table[field.name]
        if column.null_count:
            raise SchemaError(f"{path}: {field.name}: row {row + _first(column.is_null().to_numpy())}: null")
        try:
            columns.append(column.cast(field.type))
        except pa.ArrowInvalid as error:
            raise SchemaError(f"{path}: {field.name}: rows from {row}: {error}") from error
    return pa.table(columns, schema=schema)


def _samples_of(path: Path, first_row: int, table: pa.Table) -> MachineSamples:
    """Check the rows of one machine and lay them out."""

    def refuse_where(wrong: NDArray[np.bool_], column: str, message: str) -> None:
        if wrong.any():
            raise SchemaError(f"{path}: {column}: row {first_row + _first(wrong)}: {message}")

    time_us = table[s.TIME_US].to_numpy()
    refuse_where((time_us < 0) | (time_us >= _LATEST_US), s.TIME_US, f"expected a time from 0 to below {_LATEST_US}")
    back = np.zeros(len(time_us), np.bool_)
    back[1:] = time_us[1:] < time_us[:-1]
    refuse_where(back, s.TIME_US, f"earlier than the row before; sort the rows by {MACHINE} and {s.TIME_US}")
    for name in (USAGE, LIMIT):
        values = table[name].to_numpy()
        refuse_where(~(np.isfinite(values) & (values >= 0)), name, "expected a finite number of at least 0")
    encoded = table[TASK].combine_chunks().dictionary_encode()
    # numbered by name: the order in which a snapshot's tasks stand changes no sum
    task = pc.rank(encoded.dictionary, tiebreaker="dense").to_numpy()[encoded.indices.to_numpy()].astype(np.int64)
    order = np.lexsort((time_us, task))
    twice = np.zeros(len(task), np.bool_)
    twice[order[1:]] = (np.diff(task[order]) == 0) & (np.diff(time_us[order]) == 0)
    refuse_where(twice, TASK, f"there already at the same {MACHINE} and {s.TIME_US}")
    usage, limit = (table[name].to_numpy()[order] for name in (USAGE, LIMIT))
    return MachineSamples.lay_out(time_us[order], task[order], usage, limit)


def _first(flags: NDArray[np.bool_]) -> int:
    return int(np.argmax(flags))


def _predicted(
    path: Path, predictors: Mapping[str, Predictor], schema: pa.Schema, job: tuple[int, pa.Table]
) -> tuple[int, list[pa.Table]]:
    """Return the number of the row after a machine's last, and the rows of each predictor for it."""
    first_row, table = job
    predictions = _predictions(predictors, table[MACHINE][0], _samples_of(path, first_row, table), schema)
    return first_row + len(table), list(predictions)


def _predictions(
    predictors: Mapping[str, Predictor], machine: pa.Scalar, samples: MachineSamples, schema: pa.Schema
) -> Iterator[pa.Table]:
    """Return the rows of each predictor for one machine."""
    usage, limit = samples.total(samples.capped), samples.total(samples.limit)
    machines = pa.repeat(machine, len(limit))
    for name, predictor in predictors.items():
        peak = samples.peak(predictor)
        columns = [pa.repeat(name, len(peak)), machines, *map(pa.array, (samples.times_us, peak, usage, limit))]
        yield pa.table(columns, schema=schema).filter(pa.array(np.isfinite(peak)))
