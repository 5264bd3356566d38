"""Records the windows that a service takes, as a trace that ``--trace recorded`` of an ingest reads."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

from reclaim.data.core.parquet import TableWriter
from reclaim.data.schema import USAGE
from reclaim.data.traces.recorded import NAME, windows_table
from reclaim.data.windows import Windows, concatenate

log = logging.getLogger(__name__)

_HOUR_US: Final = 3_600_000_000
_MOST_ROWS: Final = 1 << 19
"""Rows in memory, 200 MB: a file is written when there are more."""
_MOST_WRITES: Final = 1_024
"""Writes that are kept apart: arrays of one row take ten times what the row does."""


class Recorder:
    """Writes a file for each hour of the windows' clock; a crash loses the hour under way.

    Parameters
    ----------
    folder : Path
        Made where it is missing.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._kept: list[Windows] = []
        self._writes: list[Windows] = []  # the latest ones
        self._rows, self._end_us = 0, -1

    def take(self, windows: Windows) -> None:
        """Keep windows, and write those of an hour that is over."""
        end_us = int(windows.end_us.max())
        if end_us // _HOUR_US > self._end_us // _HOUR_US or self._rows + len(windows) > _MOST_ROWS:
            self.close()
        self._writes.append(windows)
        if len(self._writes) == _MOST_WRITES:
            self._kept.append(concatenate(self._writes))
            self._writes = []
        self._rows += len(windows)
        self._end_us = max(end_us, self._end_us)

    def close(self) -> None:
        """Write what is kept; a folder that cannot be written is reported, and writes to the service go on."""
        if not self._rows:
            return
        path = self._folder / NAME.format(end_us=self._end_us)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            number = 0
            while path.exists():  # late windows of an hour that was written, or a restart within one
                number += 1
                path = self._folder / NAME.format(end_us=self._end_us).replace(".parquet", f"-{number}.parquet")
            with TableWriter(path, USAGE) as writer:
                writer.write(windows_table(concatenate([*self._kept, *self._writes])))
        except OSError as error:
            log.warning("%d windows are not recorded: %s", self._rows, error)
        self._kept, self._writes, self._rows = [], [], 0
