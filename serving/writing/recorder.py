"""Records what a service takes, as a trace that ``--trace recorded`` of an ingest reads."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa

from reclaim.data import schema as s
from reclaim.data.core.files import make_folder, sync_folder
from reclaim.data.core.parquet import TableWriter
from reclaim.data.errors import ConfigError
from reclaim.data.traces.recorded import RECORDED, ends_table, file_name, owners_table, windows_table
from reclaim.data.windows import Windows, concatenate
from reclaim.serving.wire.rows import ENDED_US, FAILED, FAILED_US, FactRows

log = logging.getLogger(__name__)

_MOST_ROWS: Final = 1 << 19
"""Rows in memory, 200 MB: a file is written when there are more."""
_MOST_WRITES: Final = 1_024
"""Largest number of writes kept separately: arrays of one row take ten times the memory of the row, a table of one row
some 4 kB."""
_DAY_H: Final = s.DAY_US // s.HOUR_US


class Recorder:
    """Writes files for each hour of the windows' clock; what a crash leaves unwritten is read again from the log.

    What cannot be written is dropped and counted, so that memory stays bounded; the next hour is tried again.

    Parameters
    ----------
    folder : Path
        Made where it is missing.
    count : callable
        Called with ``written`` or ``dropped`` and a number of windows.
    keep_days : float or None
        Days of which files are kept, each of 24 hours that have windows; None: all.
    """

    def __init__(
        self, folder: Path, count: Callable[[str, int], object] = lambda *_: None, keep_days: float | None = None
    ) -> None:
        self._folder, self._count, self._keep_days = folder, count, keep_days
        self._kept: list[Windows] = []
        self._writes: list[Windows] = []  # the latest ones
        self._ends: list[pa.Table] = []
        self._rows, self._end_us = 0, -1
        self._dropped = 0  # rows, since one was written

    def make_room(self, rows: Windows | FactRows) -> bool:
        """Write what is kept where its hour is over, or where these rows make it too much; return whether it wrote.

        Called before the rows are in the log: a mark there says that all before it are written.
        """
        end_us = int(rows.end_us.max()) if isinstance(rows, Windows) else self._end_us
        over = end_us // s.HOUR_US > self._end_us // s.HOUR_US
        n = len(rows if isinstance(rows, Windows) else rows.row)
        return (over or self._rows + n > _MOST_ROWS) and self.close()

    def take(self, windows: Windows) -> bool:
        """Keep windows; return whether all before them were written, as ``make_room``."""
        written = self.make_room(windows)
        self._writes.append(windows)
        if len(self._writes) == _MOST_WRITES:
            self._kept.append(concatenate(self._writes))
            self._writes = []
        self._rows += len(windows)
        self._end_us = max(int(windows.end_us.max()), self._end_us)
        return written

    def take_facts(self, facts: FactRows) -> None:
        """Keep the ends and failures of tasks, which are written with the windows of the hour."""
        self.make_room(facts)
        said = (facts.columns[name] for name in (ENDED_US, FAILED, FAILED_US, s.OUT_OF_MEMORY))
        ends = ends_table(facts.key, *said)
        if not len(ends):
            return
        if self._end_us < 0:  # no window came yet
            self._end_us = int(np.max(ends[s.TIME_US].to_numpy()))
        self._ends.append(ends)
        if len(self._ends) == _MOST_WRITES:
            self._ends = [pa.concat_tables(self._ends).combine_chunks()]
        self._rows += len(ends)

    def close(self) -> bool:
        """Write what is kept, and return whether anything was; it is then on the disk.

        A folder that cannot be written is reported, and writes to the service go on.
        """
        if not self._rows:
            return False
        windows = [*self._kept, *self._writes]
        n = sum(map(len, windows))
        try:
            make_folder(self._folder)
            if self._ends:
                self._write("events", pa.concat_tables(self._ends))
            if n:
                joined = concatenate(windows)
                self._write("collections", owners_table(joined))
                self._write("usage", windows_table(joined))  # last: the hour is written where this exists
            sync_folder(self._folder)
        except (OSError, ConfigError) as error:  # the latter where another service writes into the folder
            if not self._dropped:
                ends = self._rows - n
                log.error(
                    "%d windows and %d ends of tasks are not recorded: %s; the next hour is tried again", n, ends, error
                )
            self._dropped += self._rows
            self._count("dropped", n)
            return False
        else:
            if self._dropped:
                log.warning("windows and ends of tasks are recorded again; %d were not", self._dropped)
            self._dropped = 0
            self._count("written", n)
            self._shorten()
            return True
        finally:
            self.forget()

    def forget(self) -> None:
        """Drop what is kept: it was written. A wrong clock may have named its hour: the next rows name their own."""
        self._kept, self._writes, self._ends = [], [], []
        self._rows, self._end_us = 0, -1

    def _shorten(self) -> None:
        """Delete the files of hours that are no longer kept; one that cannot be deleted is reported.

        Hours with windows are counted, as a wrong clock may leap by years, and no later ones than that just written.
        """
        if self._keep_days is None:
            return
        written = self._folder.glob(f"usage-{'[0-9]' * 20}*.parquet")
        every = {int(path.name.split("-")[1][:20]) // s.HOUR_US for path in written}
        hours = sorted(hour for hour in every if hour <= self._end_us // s.HOUR_US)
        kept = round(self._keep_days * _DAY_H)
        from_us = hours[-kept] * s.HOUR_US if len(hours) > kept else 0
        for table in RECORDED:
            unfinished = self._folder.glob(f"{table}-*.parquet.partial")  # a killed process left them
            for path in chain(self._folder.glob(f"{table}-*.parquet"), unfinished):
                if path.name < file_name(table, from_us):  # names are times
                    try:
                        path.unlink(missing_ok=True)
                    except OSError as error:
                        log.warning("%s is older than what is kept, and cannot be deleted: %s", path, error)

    def _write(self, table: str, rows: pa.Table) -> None:
        if not len(rows):
            return
        number = 0
        while (path := self._folder / file_name(table, self._end_us, number)).exists():
            number += 1  # late windows of an hour that was written, or a restart within one
        with TableWriter(path, RECORDED[table], durable=True) as writer:
            writer.write(rows)
