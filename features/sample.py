"""Chooses the rows of a dataset whose features are kept: a bounded number, whatever the dataset's size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from reclaim.data.errors import ConfigError
from reclaim.data.schema import UNKNOWN_ID
from reclaim.data.windows import Windows
from reclaim.features.groups import AGES, TIER_LABELS, age_key, known_seconds, tier_key
from reclaim.features.splits import IN_ALLOC, TEST, TRAIN, VALID, drawn, permitted
from reclaim.features.targets import AN_HOUR

ROWS: Final = ("sample", "all")
"""Rows whose features are kept. ``sample``: at most about as many as ``SampleConfig`` says; whatever else is asked for
is folded again. ``all``: those of every row, 464 bytes each, for study."""

SAMPLING: Final = 1
"""Version of the choice of rows; raised by hand when other rows are chosen by the same settings, where any were."""
_SHARED: Final = 0.5
"""Share of the training rows that is spread equally over tiers and ages, as far as each has rows; the rest is in
proportion to the rows that are left."""
_OF_TRAIN, _OF_VALID, _OF_TEST, OF_REPLAY = range(4)
"""Purposes of random numbers: a row kept for one use is not more likely to be kept for another."""


@dataclass(frozen=True)
class SampleConfig:
    """Approximate number of rows kept of each period; all where there are fewer."""

    train: int = 1_000_000
    """Rows to learn from, by tier and age, with weights; those that meet an end out of memory within an hour come on
    top."""
    valid: int = 500_000
    """Rows to set prices on: all those of some machines, or of some tasks where no machine is known. Each is as likely
    as any other, so shares of them are shares of the trace."""
    test: int = 200_000
    """Rows that training reports scores of: all those of some tasks."""

    def __post_init__(self) -> None:
        for name, rows in vars(self).items():
            if rows < 1:
                raise ConfigError(f"{name} must be at least 1, got {rows}")


class RowCounts(NamedTuple):
    """Rows that may be kept: of training by tier and age, int64 (n_tiers, n_ages), of validation, of the test.

    ``least`` is the least number that is drawn for a validation row, from 0 to 1; 1 without any.
    """

    train: NDArray[np.int64]
    valid: int
    test: int
    least: float

    @classmethod
    def of(cls, windows: Windows, period: NDArray[np.uint8], group: NDArray[np.uint8]) -> RowCounts:
        """Count the rows of whole tasks; ``period`` and ``group`` as in ``splits``, shape (n,)."""
        used, stratum = _used(period, group), _strata(windows)
        train = np.bincount(stratum[used & (period == TRAIN)], minlength=len(TIER_LABELS) * len(AGES))
        valid, test = (np.flatnonzero(used & (period == one)) for one in (VALID, TEST))
        least = float(_drawn(_OF_VALID, valid, *machine_or_task(windows)).min(initial=1.0))
        return cls(train.reshape(len(TIER_LABELS), len(AGES)).astype(np.int64), len(valid), len(test), least)


@dataclass(frozen=True)
class Shares:
    """Share of the rows that is kept: of training by tier and age, shape (n_tiers, n_ages), of validation, of the test.

    Those of a whole dataset decide for each of its rows by its ids alone: any part can be sampled by itself.
    """

    train: NDArray[np.float64]
    valid: float
    test: float

    @classmethod
    def whole(cls) -> Shares:
        """Return those that keep every row."""
        return cls(np.ones((len(TIER_LABELS), len(AGES))), 1.0, 1.0)

    @classmethod
    def within(cls, counts: list[RowCounts], config: SampleConfig) -> Shares:
        """Return those that keep about as many rows as configured, given the counts of all parts of a dataset.

        Of the machines of the validation rows one is kept at least: of few machines none may be drawn.
        """
        train = np.sum([c.train for c in counts], axis=0)
        wanted = train.astype(np.float64)
        if train.sum() > config.train:
            alike = np.minimum(train, _SHARED * config.train / (train > 0).sum())
            rest = train - alike
            wanted = alike + (config.train - alike.sum()) * rest / rest.sum()
        of_train = np.where(train > 0, wanted / np.maximum(train, 1), 1.0)
        valid, test = sum(c.valid for c in counts), sum(c.test for c in counts)
        one_machine = float(np.nextafter(min(c.least for c in counts), 2.0))
        of_valid = min(max(config.valid / max(valid, 1), one_machine), 1.0)
        return cls(of_train, of_valid, min(config.test / max(test, 1), 1.0))

    def choose(
        self, windows: Windows, period: NDArray[np.uint8], group: NDArray[np.uint8], oom: NDArray[np.float32]
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return which rows of whole tasks are kept, and how many rows of the dataset each stands for.

        Parameters
        ----------
        windows : Windows
            ``n`` rows.
        period, group : uint8, shape (n,)
            As in ``splits``.
        oom : float32, shape (n, n_horizons)
            Labels that rest on nothing after the row's own period (``bucket.Labels.targets``).

        Returns
        -------
        rows : int64, shape (k,)
            Rising. Rows that no period may use are left out.
        weight : float32, shape (k,)
            1 for a validation or test row, which stand for equally many rows each.
        """
        used = _used(period, group)
        train, valid, test = (np.flatnonzero(used & (period == one)) for one in (TRAIN, VALID, TEST))
        key = (windows.collection_id, windows.instance_index)
        share = self.train.reshape(-1)[_strata(windows)[train]]
        for horizon in range(AN_HOUR + 1):  # rows that meet an end out of memory are few, and kept
            share[oom[train, horizon] == 1] = 1.0
        kept = np.zeros(len(windows), np.bool_)
        kept[train] = _drawn(_OF_TRAIN, train, *key, windows.start_us) < share
        kept[valid] = _drawn(_OF_VALID, valid, *machine_or_task(windows)) < self.valid
        kept[test] = _drawn(_OF_TEST, test, *key) < self.test
        weight = np.ones(len(windows))
        weight[train] = 1.0 / share
        rows = np.flatnonzero(kept)
        return rows, weight[rows].astype(np.float32)


def _drawn(purpose: int, rows: NDArray[np.int64], *ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the number that is drawn for each of some rows by its ids, for one of the purposes above."""
    return drawn(np.full(len(rows), purpose), *(column[rows] for column in ids))


def machine_or_task(windows: Windows) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return two numbers that name each row's machine, or its task where no machine is known; shape (n,) each."""
    known = windows.machine_id != UNKNOWN_ID
    collection, instance = windows.collection_id, windows.instance_index
    return np.where(known, windows.machine_id, collection), np.where(known, windows.machine_id, instance)


def _used(period: NDArray[np.uint8], group: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Return which rows any use is made of: rows in an alloc instance are used only for out-of-memory warnings."""
    used: NDArray[np.bool_] = permitted(period, group) | (group == IN_ALLOC)
    return used


def _strata(windows: Windows) -> NDArray[np.int64]:
    """Return the number of each row's tier and age, shape (n,)."""
    return tier_key(windows.tier) * len(AGES) + age_key(known_seconds(windows))
