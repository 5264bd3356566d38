"""Assigns rows to periods a horizon apart, collections to groups, and a whole dataset to its role."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from reclaim.data import schema as s
from reclaim.data.core.jit import CACHED
from reclaim.data.errors import ConfigError
from reclaim.data.windows import Windows
from reclaim.features.targets import HORIZONS_S, TARGETS

TRAIN, VALID, TEST = range(3)
PERIODS: Final = ("train", "valid", "test")
"""By the time t of the row."""
WRONG_TIME: Final = (
    "one row of a wrong time empties periods, too: `reclaim features DATASET` reports the time they divide"
)
"""Cause of an error of a period without rows that a longer history does not cure."""
OTHER_SHARES: Final = (
    "use a longer history, or build the features with other shares, `reclaim features DATASET --set "
    f"split.train_share=0.4`; {WRONG_TIME}"
)
"""Remedies of a period without rows."""

SEEN, VALID_UNSEEN, TEST_UNSEEN, IN_ALLOC = range(4)
GROUPS: Final = ("seen", "valid-unseen", "test-unseen", "in-alloc")
"""By collection: ``seen`` is trained on; ``valid-unseen`` only sets margins; ``test-unseen`` only tests. A task inside
an alloc instance uses its alloc's resources, not the machine's: no reservation is learned from it or judged on it, only
on the alloc instance (as in the EuroSys'21 study, which takes top-level instances). Its ends out of memory are."""

PERMITTED: Final = ((SEEN,), (SEEN, VALID_UNSEEN), (SEEN, VALID_UNSEEN, TEST_UNSEEN))
"""The groups that may be used in each period, in the order of ``PERIODS``."""
_IS_PERMITTED: Final = np.array([[group in groups for group in range(len(GROUPS))] for groups in PERMITTED])
"""True where a group may be used in a period; shape (n_periods, n_groups)."""

ROLES: Final = ("all", "train", "test")
"""Uses of a dataset. ``all``: to be trained on and tested on later. ``train``: to be trained on alone; no time is
kept for a test. ``test``: held out whole, for models trained on other datasets; nothing of it is ever trained on, its
first ``valid_share`` of the time only sets margins, and all the rest is test."""


@dataclass(frozen=True)
class SplitConfig:
    """Use of the dataset, ends of its periods, and the number of collections held out."""

    role: str = "all"
    """``all``, ``train`` (no test period) or ``test`` (nothing is trained on)."""
    train_share: float = 0.55
    """Share of the trace's time that is trained on; in role ``train`` it and the next are scaled up to fill it."""
    valid_share: float = 0.20
    """Share of the time after it on which margins are set and training is stopped."""
    valid_unseen_share: float = 0.10
    """Share of the collections that are first seen when margins are set."""
    test_unseen_share: float = 0.20
    """Share of the collections that are first seen in the test."""

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ConfigError(f"role must be one of {', '.join(ROLES)}, got {self.role!r}")
        for name in ("train_share", "valid_share", "valid_unseen_share", "test_unseen_share"):
            if not 0 < getattr(self, name) < 1:
                raise ConfigError(f"{name} must be between 0 and 1, got {getattr(self, name)}")
        if self.train_share + self.valid_share >= 1:
            raise ConfigError(
                f"train_share + valid_share must leave time to test, got {self.train_share} + {self.valid_share}"
            )
        if self.valid_unseen_share + self.test_unseen_share >= 1:
            raise ConfigError("valid_unseen_share + test_unseen_share must leave collections to train on")


def cuts_us(first_us: int, last_us: int, config: SplitConfig) -> tuple[int, int]:
    """Return the ends of the training and of the validation period, in µs on the trace's clock.

    Where nothing is trained on, training ends as the trace begins; where nothing is tested, validation ends after the
    trace, so that no target is lost to a gap before a test.
    """
    span = last_us - first_us
    if config.role == "test":
        return first_us, first_us + int(span * config.valid_share)
    if config.role == "train":
        filled = config.train_share / (config.train_share + config.valid_share)
        return first_us + int(span * filled), s.AFTER_TRACE_US
    train = first_us + int(span * config.train_share)
    return train, train + int(span * config.valid_share)


def periods(end_us: NDArray[np.int64], cuts: tuple[int, int]) -> NDArray[np.uint8]:
    """Return the period of each row by its time t; uint8, shape (n,)."""
    first, second = cuts
    return (end_us >= first).astype(np.uint8) + (end_us >= second)


def groups(windows: Windows, config: SplitConfig) -> NDArray[np.uint8]:
    """Return the group of each row; uint8, shape (n,).

    A collection's group depends on its id and the configuration alone, not on the dataset: the same collection of the
    same trace falls into the same group in two datasets of the same configuration. A role moves whole groups and draws
    nothing new: in ``train``, what would only test sets margins instead; in ``test``, so does what would be trained
    on. So, whatever the roles of two datasets of one trace, no collection that is ``test-unseen`` in one is ``seen``
    in the other, and in ``test`` every collection counts as unseen by training.
    """
    starts = windows.task_starts()  # drawn for each task, not for each row: the ids of its rows are equal
    share = np.repeat(drawn(windows.collection_id[starts[:-1]]), np.diff(starts))
    group = np.full(len(windows), VALID_UNSEEN if config.role == "test" else SEEN, np.uint8)
    group[share < config.valid_unseen_share + config.test_unseen_share] = VALID_UNSEEN
    if config.role != "train":
        group[share < config.test_unseen_share] = TEST_UNSEEN
    group[windows.in_alloc] = IN_ALLOC
    return group


def permitted(period: int | NDArray[np.uint8], group: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Return which rows may be used in a period, or each in its own, given their groups; shape (n,)."""
    return np.asarray(_IS_PERMITTED[period, group])


def in_period(wanted: int, period: NDArray[np.uint8], group: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Return which rows lie in a period and may be used in it, given the period and group of each; shape (n,)."""
    rows: NDArray[np.bool_] = (period == wanted) & permitted(wanted, group)
    return rows


def inside_period(
    period: NDArray[np.uint8], measured_us: NDArray[np.int64], cuts: tuple[int, int]
) -> NDArray[np.bool_]:
    """Return which targets rest on nothing measured after the row's own period: the gap between two periods.

    Parameters
    ----------
    period : uint8, shape (n,)
        From ``periods``.
    measured_us : int64, shape (n, n_horizons), µs
        From ``targets.measured_by``; its shape is the result's.
    cuts : tuple of int
        From ``cuts_us``.
    """
    return measured_us <= np.array([*cuts, s.AFTER_TRACE_US])[period][:, None]


_FATES: Final = ("known", "gap", "censored", "unmeasured", "positive")
"""Fates of a target; the last is a part of the first, of ``oom`` alone."""


class SplitCounts(NamedTuple):
    """Rows and known targets of each period; whole numbers, so those of parts of a dataset add up.

    Attributes
    ----------
    rows : int64, shape (n_periods, n_groups)
    targets : int64, shape (n_periods, n_targets + 1, n_horizons, len(_FATES))
    """

    rows: NDArray[np.int64]
    targets: NDArray[np.int64]

    @classmethod
    def of(cls, labels: Mapping[str, NDArray[Any]], trace_end_us: int) -> SplitCounts:
        """Count rows.

        Parameters
        ----------
        labels : mapping
            ``period`` and ``group``, uint8, shape (n,); ``end_us``, int64, shape (n,); ``y``, float32, shape
            (n, T, H); ``oom``, float32, and ``inside``, bool, shape (n, H).
        trace_end_us : int
            End of the last window of the trace.
        """
        rows = np.zeros((len(PERIODS), len(GROUPS)), np.int64)
        counts = np.zeros((len(PERIODS), len(TARGETS) + 1, len(HORIZONS_S), len(_FATES)), np.int64)
        horizons_us = np.array(HORIZONS_S, np.int64) * 1_000_000
        _count(
            labels["period"], labels["group"], labels[s.END_US], labels["y"], labels["oom"], labels["inside"],
            _IS_PERMITTED, trace_end_us - horizons_us, rows, counts,
        )  # fmt: skip
        return cls(rows, counts)

    @classmethod
    def added(cls, parts: Sequence[SplitCounts]) -> SplitCounts:
        """Return the counts of all parts together; there is at least one."""
        return cls(*(np.sum(column, axis=0) for column in zip(*parts, strict=True)))

    def facts(self) -> dict[str, dict[str, Any]]:
        """Return how many rows and known targets each period has, and why the others are missing, for the manifest.

        Returns
        -------
        dict
            ``rows``: period, then group, to rows. ``targets``: period, then target or ``oom``, then horizon as
            ``3600s``, to counts that add up to the period's rows of the permitted groups: ``known`` inside the period;
            taken away by the ``gap`` at its end (``inside_period``); ``censored``, unknown with a horizon that reaches
            past the end of the trace; ``unmeasured``, unknown for want of a limit or of anything measured after t. For
            ``oom`` there is ``positive``, too: those of the known that are 1.
        """
        named: dict[str, Any] = {}
        for p, period_name in enumerate(PERIODS):
            for t, target in enumerate((*TARGETS, "oom")):
                kinds = _FATES if target == "oom" else _FATES[:-1]
                named.setdefault(period_name, {})[target] = {
                    f"{horizon_s}s": dict(zip(kinds, self.targets[p, t, h].tolist(), strict=False))
                    for h, horizon_s in enumerate(HORIZONS_S)
                }
        return {
            "rows": {p: dict(zip(GROUPS, self.rows[k].tolist(), strict=True)) for k, p in enumerate(PERIODS)},
            "targets": named,
        }


@numba.njit(**CACHED)
def _count(
    period: Any,  # (n,) uint8
    group: Any,  # (n,) uint8
    end_us: Any,  # (n,) int64
    y: Any,  # (n, n_targets, H) float32
    oom: Any,  # (n, H) float32
    inside: Any,  # (n, H) bool
    allowed: Any,  # (n_periods, n_groups) bool
    complete_us: Any,  # (H,) int64
    rows: Any,  # (n_periods, n_groups) int64, added to
    counts: Any,  # (n_periods, n_targets + 1, H, 5) int64, added to
) -> None:
    n_targets, n_horizons = y.shape[1], y.shape[2]
    # rows that are alike: which of the targets are known (a bit each), oom (unknown, 0, 1), inside, past the end
    alike = np.zeros((len(rows), n_horizons, 2, 2, 3, 1 << n_targets), np.int64)
    for i in range(len(period)):
        p = period[i]
        rows[p, group[i]] += 1
        if not allowed[p, group[i]]:
            continue
        for h in range(n_horizons):
            known = 0
            for t in range(n_targets):
                known |= (y[i, t, h] == y[i, t, h]) << t
            label = int(oom[i, h] == oom[i, h]) + int(oom[i, h] == 1.0)
            alike[p, h, int(inside[i, h]), int(end_us[i] > complete_us[h]), label, known] += 1
    for p in range(len(rows)):
        for h in range(n_horizons):
            for within in range(2):
                for past in range(2):
                    for label in range(3):
                        for known in range(1 << n_targets):
                            n = alike[p, h, within, past, label, known]
                            for t in range(n_targets + 1):
                                there = known >> t & 1 if t < n_targets else int(label > 0)
                                fate = 1 - within if there else 3 - past
                                counts[p, t, h, fate] += n
                            counts[p, n_targets, h, 4] += n if within and label == 2 else 0


def drawn(*ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return a number in [0, 1) for each row of ids, (n,) each, the same on every machine; float64, shape (n,)."""
    return (mixed(*ids) >> np.uint64(11)).astype(np.float64) / 2.0**53


def mixed(*ids: NDArray[np.int64] | NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return 64 bits for each row of ids, (n,) each, the same on every machine (the finaliser of SplitMix64)."""
    x = np.zeros(len(ids[0]), np.uint64)
    for column in ids:
        x = (x ^ column.astype(np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    return x
