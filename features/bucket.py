"""Folds one bucket of a dataset: the labels of all its rows, and the features of those that are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from reclaim.data.core.parallel import in_parts
from reclaim.data.dataset import Dataset
from reclaim.data.errors import TraceError
from reclaim.data.oom import oom_columns, oom_events
from reclaim.data.windows import Cell, Windows
from reclaim.features.fold.batch import fold_tasks
from reclaim.features.fold.collection_ooms import OomJournal
from reclaim.features.registry import N_FEATURES
from reclaim.features.splits import SplitConfig, groups, inside_period, periods
from reclaim.features.targets import HORIZONS_S, TARGETS, known_by, measured_by, targets

Rows = NDArray[np.int64]

_ROWS_AT_ONCE: Final = 4_096
"""Rows that are folded together: their columns are some MB, which a core's own cache nearly holds."""


_MOST: Final = float(np.finfo(np.float32).max)
"""Largest limit that can be kept."""


class Labels(NamedTuple):
    """The labels and facts of ``n`` rows besides their features; the columns of a ``FeatureSet``."""

    y: NDArray[np.float32]
    oom: NDArray[np.float32]
    inside: NDArray[np.bool_]
    end_us: NDArray[np.int64]
    period: NDArray[np.uint8]
    group: NDArray[np.uint8]
    limit: NDArray[np.float32]

    def take(self, rows: Rows | slice) -> Labels:
        """Return the chosen rows."""
        columns = self._asdict().items()
        if isinstance(rows, slice):
            return Labels(**{name: column[rows] for name, column in columns})
        return Labels(**{name: column.take(rows, axis=0) for name, column in columns})  # faster than an index

    def ooms(self) -> NDArray[np.float32]:
        """Return ``targets`` of out of memory only."""
        return np.where(self.inside, self.oom, np.float32(np.nan))

    def targets(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return (y, oom), NaN where one rests on anything measured after the row's own period."""
        return known_targets(self.y, self.oom, self.inside)


def known_targets(
    y: NDArray[np.float32], oom: NDArray[np.float32], inside: NDArray[np.bool_]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return (y, oom) of rows, NaN where one rests on anything measured after the row's own period."""
    nan = np.float32(np.nan)
    return np.where(inside[:, None, :], y, nan), np.where(inside, oom, nan)


@dataclass(frozen=True)
class Folding:
    """Rules by which the rows of a dataset become features and labels.

    Attributes
    ----------
    dataset : Dataset
    split : SplitConfig
    cell : Cell
    cuts_us : tuple of int
        Ends of the training and of the validation period.
    end_us : int
        End of the last window of the trace.
    """

    dataset: Dataset
    split: SplitConfig
    cell: Cell
    cuts_us: tuple[int, int]
    end_us: int

    def period_and_group(self, windows: Windows) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Return ``splits.periods`` and ``splits.groups`` of the rows of whole tasks; shape (n,) each."""
        return periods(known_by(windows), self.cuts_us), groups(windows, self.split)

    def labels(self, bucket: int, windows: Windows) -> tuple[Labels, int]:
        """Return the labels of a bucket's rows, and how many ends out of memory it has.

        Raises
        ------
        TraceError
            A limit does not fit single precision.
        """
        task, time_us = oom_events(windows, self.dataset.events(bucket, oom_columns(self.dataset.manifest)))
        y = np.empty((len(windows), len(TARGETS), len(HORIZONS_S)), np.float32)
        oom = np.empty((len(windows), len(HORIZONS_S)), np.float32)
        targets(windows, task, time_us, self.end_us, y, oom)
        if not self.dataset.manifest["counts"]["events"]:
            oom[:] = np.nan
        period, group = self.period_and_group(windows)
        inside = inside_period(period, measured_by(windows), self.cuts_us)
        beyond = np.flatnonzero((windows.limit > _MOST).any(axis=1))
        if len(beyond):
            row = beyond[0]
            name, (cpu, memory) = f"{windows.collection_id[row]}, {windows.instance_index[row]}", windows.limit[row]
            raise TraceError(
                f"{self.dataset.path}: task {name} has the limits {cpu:.3g} and {memory:.3g}; expected at most "
                f"{_MOST:.3g}; where that means no limit, leave it out of the trace and ingest again"
            )
        limit = windows.limit.astype(np.float32)
        return Labels(y, oom, inside, known_by(windows), period, group, limit), len(time_us)

    def fold_into(
        self, x: NDArray[np.float32], windows: Windows, rows: Rows, threads: int = 1
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Fold whole tasks and write the features of chosen rows; those of collections as if these had no history.

        Parameters
        ----------
        x : float32, shape (k, n_features)
            Written.
        windows : Windows
            ``n`` rows, sorted by task, then time.
        rows : int64, shape (k,)
        threads : int
            The numbers do not depend on it.

        Returns
        -------
        moment, died : int32, shape (n,)
            As of ``fold_tasks``.
        """
        place = np.full(len(windows), -1, np.int64)
        place[rows] = np.arange(len(rows))
        known_us = np.empty(len(windows), np.int64)
        moment, died = np.empty(len(windows), np.int32), np.empty(len(windows), np.int32)
        parts = list(_parts(windows.task_starts()))

        def fold(part: int, of: int) -> None:
            for starts in parts[part::of]:
                low = int(starts[0])
                here = slice(low, int(starts[-1]))
                fold_tasks(
                    windows.take(here), starts - low, self.cell, x, known_us[here], moment[here], died[here],
                    place[here],
                )  # fmt: skip

        in_parts(fold, len(windows), threads)
        return moment, died


@dataclass(frozen=True)
class Bucket:
    """One bucket of a dataset with its labels and features.

    Attributes
    ----------
    folding : Folding
    journal : OomJournal
        Of the whole dataset.
    number : int
    first : int
        The bucket's first row among those of the dataset.
    windows : Windows
    stored : float32, shape (n, n_features), or None
        Features of all rows, where they are kept.
    """

    folding: Folding
    journal: OomJournal
    number: int
    first: int
    windows: Windows
    stored: NDArray[np.float32] | None = None

    @cached_property
    def labels(self) -> Labels:
        """Labels of all rows."""
        return self.folding.labels(self.number, self.windows)[0]

    def features(self, rows: Rows, threads: int = 1) -> NDArray[np.float32]:
        """Return the features of chosen rows; float32, shape (k, n_features).

        They equal to the bit those that ``FeatureState`` gives window by window. Tasks without a chosen row are
        skipped.
        """
        if self.stored is not None:
            return self.stored[rows]
        if (np.diff(rows) <= 0).any():  # a row asked for twice has one place
            rising, place = np.unique(rows, return_inverse=True)
            return self.features(rising, threads)[place]
        windows, mine = self.windows.tasks_of(rows)
        x = np.empty((len(mine), N_FEATURES), np.float32)
        moment, _ = self.folding.fold_into(x, windows, mine, threads)
        self.journal.write(windows.collection_id[mine], moment[mine], x)
        return x


def _parts(starts: Rows) -> Iterator[Rows]:
    """Return the starts of whole tasks, and the end of the last, ``_ROWS_AT_ONCE`` rows or one task at a time."""
    low = 0
    while low < len(starts) - 1:
        high = max(int(np.searchsorted(starts, starts[low] + _ROWS_AT_ONCE, side="right")) - 1, low + 1)
        yield starts[low : high + 1]
        low = high
