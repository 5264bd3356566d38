"""Opens a dataset's tables by name in one query engine, with bounded memory and bit-equal answers."""

from __future__ import annotations

import errno
import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import duckdb
import numpy as np
from numpy.typing import NDArray

from reclaim.data import schema as s
from reclaim.data.core.duck import connect, file_sql, first_line, unreadable
from reclaim.data.core.stores.places import broken_off, in_store, opened, reached
from reclaim.data.dataset import Dataset, bucket_name
from reclaim.data.errors import TraceError

KEY: Final = f"{s.COLLECTION_ID}, {s.INSTANCE_INDEX}"
"""SQL: key of a task."""
ROW: Final = "file_row_number"
"""Position of a row in its file: events of one time are there in the order in which they hold."""
IN_TRACE: Final = f"{s.TIME_US} > {s.BEFORE_TRACE_US} AND {s.TIME_US} < {s.AFTER_TRACE_US}"
"""SQL: condition that an event's time is a time and not one of the two flags."""
_MEMORY_LIMIT_MIB: Final = 512
"""Memory of the query engine before it spills to disk; the rest of the process needs little."""
_DAMAGED: Final = (duckdb.IOException, duckdb.InvalidInputException)
"""Errors of the query engine when a file of a dataset is missing or cannot be read."""
_OF_LIBRARY: Final = "Traceback"
"""Beginning of the message of an error of a store's library, in the query engine's words."""


class Tables:
    """Views of every table of a dataset, and of one bucket of the bucketed tables.

    Attributes
    ----------
    dataset : Dataset
    columns : dict of str to tuple of str
        Table → its columns, including extra ones.
    """

    def __init__(self, dataset: Dataset, connection: duckdb.DuckDBPyConnection) -> None:
        self.dataset = dataset
        self._connection = connection
        self.columns: dict[str, tuple[str, ...]] = {}
        for table in s.TABLES:
            if table in s.OPTIONAL and not all(file.is_file() for file in self._files(table)):
                continue
            self._view(table, self._files(table))
            described = connection.execute(f"DESCRIBE SELECT * FROM {table}").fetchall()
            self.columns[table] = tuple(row[0] for row in described if row[0] != ROW)

    def rows(self, sql: str) -> list[dict[str, Any]]:
        """Return the rows of a query as dicts by column."""
        cursor = self._connection.execute(sql)
        names = [column[0] for column in cursor.description]
        return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]

    def row(self, sql: str) -> dict[str, Any]:
        """Return the one row of a query."""
        return self.rows(sql)[0]

    def arrays(self, sql: str) -> dict[str, NDArray[Any]]:
        """Return the columns of a query."""
        return {name: np.ma.asarray(values) for name, values in self._connection.execute(sql).fetchnumpy().items()}

    def execute(self, sql: str) -> None:
        """Run a statement."""
        self._connection.execute(sql)

    def each_bucket(self) -> Iterator[int]:
        """Iterate over the buckets; in each step ``usage_of_bucket`` etc. are that bucket's rows."""
        for bucket in range(self.dataset.n_buckets):
            for table in s.BUCKETED:
                self._view(f"{table}_of_bucket", [self.dataset.path / table / bucket_name(bucket)])
            yield bucket

    def _files(self, table: str) -> list[Path]:
        folder = self.dataset.path
        if table in s.BUCKETED:
            return [folder / table / bucket_name(bucket) for bucket in range(self.dataset.n_buckets)]
        with reached(folder):
            several = (folder / table).is_dir()
            return sorted((folder / table).glob("*.parquet")) if several else [folder / f"{table}.parquet"]

    def _view(self, name: str, files: list[Path]) -> None:
        listed = ", ".join(map(file_sql, files))
        rows = f"read_parquet([{listed}], hive_partitioning = false, {ROW} = true)"
        self._connection.execute(f"CREATE OR REPLACE TEMP VIEW {name} AS FROM {rows}")


@contextmanager
def open_tables(dataset: Dataset) -> Iterator[Tables]:
    """Open a dataset's tables in an engine that spills to a temporary folder instead of growing.

    Raises
    ------
    TraceError
        A file of the dataset is missing or cannot be read, found on opening or by any query within.
    DataError
        The store of the dataset broke off.
    OSError
        The disk is full, or this user may not read a file.
    """
    with tempfile.TemporaryDirectory(prefix="reclaim-") as spill:
        connection = connect(_MEMORY_LIMIT_MIB, Path(spill))
        if in_store(dataset.path):
            connection.register_filesystem(opened(dataset.path)[0])
        try:
            yield Tables(dataset, connection)
        except duckdb.Error as error:
            trace, _, _ = str(error).partition("\n\n")
            if trace.startswith(_OF_LIBRARY):
                raise broken_off(dataset.path, trace.splitlines()[-1]) from error
            if not isinstance(error, _DAMAGED) and type(error) is not duckdb.Error:  # of a damaged parquet page
                raise
            failure = unreadable(dataset.path, error)
            if isinstance(failure, OSError):
                raise failure from error
            if not in_store(dataset.path):
                _check_rights(dataset.path)
            raise TraceError(
                f"{dataset.path}: is damaged or incomplete; delete it and ingest again ({first_line(error)})"
            ) from error
        finally:
            connection.close()


def _check_rights(folder: Path) -> None:
    """Raise PermissionError where this user may not read something in a folder, which then is not damaged."""
    for path in (folder, *sorted(folder.rglob("*"))):
        if not os.access(path, os.R_OK | os.X_OK if path.is_dir() else os.R_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def percentiles(
    values: NDArray[np.int64], counts: NDArray[np.int64], levels: Sequence[int], unit: float = 1.0
) -> dict[str, float | None]:
    """Return percentiles of counted values, by nearest rank: the least value with a share of at least p at or below it.

    Parameters
    ----------
    values, counts : int64, shape (n,)
        Distinct values, ascending, and how often each occurs.
    levels : sequence of int
        In percent.
    unit : float
        Factor of the result.
    """
    if not len(values):
        return {f"p{level}": None for level in levels}
    so_far = np.cumsum(counts)
    ranks = [max(1, -(-level * int(so_far[-1]) // 100)) for level in levels]  # ceilings, in integers
    positions = np.searchsorted(so_far, ranks)
    return {f"p{level}": rounded(float(values[at]) * unit) for level, at in zip(levels, positions, strict=True)}


def rounded(value: float | None, digits: int = 9) -> float | None:
    """Return a number without the noise of its last digits; None if it is unknown or not finite."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.{digits}g}")


def ratio(part: float | None, whole: float | None) -> float | None:
    """Return ``part / whole``; None if either is unknown or ``whole`` is zero."""
    return rounded(part / whole) if part is not None and whole else None


def tier_name(tier: int | None) -> str:
    """Return a tier's name; ``unknown`` for null."""
    return "unknown" if tier is None else s.TIERS[tier]
