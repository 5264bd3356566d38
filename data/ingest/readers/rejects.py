"""Writes the rejects of a raw file to disk as they come, and ends a run when most lines of a file are rejects."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from reclaim.data import schema as s
from reclaim.data.errors import TraceError

CR_ALONE: Final = "lines end in a carriage return alone; end them in a line feed"
_ROWS_AT_ONCE: Final = 50_000
HOPELESS: Final = 100_000
"""Number of rejects that ends the run at once, if most lines of the file so far are rejects."""
HOPELESS_SHARE: Final = 0.5


class RejectsWriter:
    """Writes lines and reasons to a parquet file, in the order of coming; a context manager.

    Parameters
    ----------
    path : Path
    file : str
        The raw file, as rejects name it.
    most : float
        The share of rejects that the run allows.
    """

    def __init__(self, path: Path, file: str, most: float) -> None:
        self.count = 0
        self.file = file
        self.most = most
        self.path = path
        self._writer = pq.ParquetWriter(path, s.REJECTS)
        self._waiting: list[pa.Table] = []
        self._rows_waiting = 0
        self._last_line = 0
        self._lock = threading.Lock()  # rows are checked in the query engine's thread, and in the reader's

    def __enter__(self) -> RejectsWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        self.close()

    def add(self, lines: Sequence[int] | NDArray[np.int64], reasons: Sequence[str] | pa.Array) -> None:
        """Write rejects.

        Raises
        ------
        TraceError
            They are more than ``HOPELESS``, half of the lines so far, and the share that the run allows.
        """
        if not len(lines):
            return
        with self._lock:
            files = pa.array([self.file], pa.string()).take(pa.array(np.zeros(len(lines), np.int8)))
            self._waiting.append(pa.table([files, pa.array(lines, pa.int64()), reasons], schema=s.REJECTS))
            self._rows_waiting += len(lines)
            self.count += len(lines)
            self._last_line = max(self._last_line, int(np.max(lines)))
            if self._rows_waiting >= _ROWS_AT_ONCE:
                self._flush()
        if self.count > HOPELESS and self.count > max(HOPELESS_SHARE, self.most) * self._last_line:
            raise TraceError(
                f"{self.file}: {self.count} of the first {self._last_line} lines rejected, far more than "
                f"--max-reject-share={self.most:g}, so reading stopped; last line {lines[-1]}: {reasons[-1]}"
            )

    def close(self) -> None:
        """Write what is waiting and close the file."""
        with self._lock:
            self._flush()
            self._writer.close()

    def batches(self) -> Iterator[tuple[NDArray[np.int64], pa.Array]]:
        """Yield lines and reasons of the closed file, a part at a time."""
        with pq.ParquetFile(self.path) as file:
            for batch in file.iter_batches(_ROWS_AT_ONCE):
                yield np.asarray(batch.column(s.REJECT_LINE)), batch.column(s.REJECT_REASON)

    def _flush(self) -> None:
        if self._waiting:
            self._writer.write_table(pa.concat_tables(self._waiting))
        self._waiting, self._rows_waiting = [], 0
