"""Tempers the tails of curves by how far tasks in training exceeded their largest past usage within the horizon.

The tail of a curve rests on few outcomes: a day ahead the whole tail, as a task has few days, and an hour ahead
everything rarer than one in twenty. That of all tasks together, over the largest of the past, is one statistic of many
outcomes. The geometric mean of both tells risky tasks apart better than either one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import product
from typing import Any, Final, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from reclaim.data.core.jit import LENT, straight
from reclaim.features.registry import AT, SIGNALS
from reclaim.features.targets import HORIZONS_S, TARGETS
from reclaim.training.margins.violation import ROUNDING
from reclaim.training.models.survival import EVER, FLOOR

TAILS: Final[tuple[float, ...]] = (0.0, 0.05, 0.5)
"""Largest probability that is tempered, by horizon: five minutes ahead none, as there are enough outcomes; a day ahead
all above the median (`benchmarks/LOG.md`, 2026-11-23)."""
_ONE: Final = 32
"""Position of the ratio 1 among ``RATIOS``."""
_TO_DOUBLE: Final = 8
"""Ratios to a doubling."""
RATIOS: Final = 2.0 ** (np.arange(-_ONE, _ONE + 1) / _TO_DOUBLE)
"""Demand over the largest of the past, from a 16th to 16 times it."""
HISTORIES: Final = (7, 11)
"""First and last class of history: floor of log2(1 + windows seen), so up to 21 hours of it, … and 7 days and more."""
STALE: Final = (1.04, 1.4)
"""Largest so far over the largest of a week from which on a task belongs to the next class: a record of this week, one
a little above what came since, one far above."""
_PRIOR_ROWS: Final = 1_000
"""Rows of all classes that count next to those of each class."""
_WEEK: Final = np.array([AT[f"{signal}_max_7d"] for signal in SIGNALS])
assert SIGNALS == TARGETS
_N_HISTORIES: Final = HISTORIES[1] - HISTORIES[0] + 1


class Past(NamedTuple):
    """Largest of the past that a demand is compared with, and classes of tasks whose past is alike.

    Attributes
    ----------
    largest : int64, shape (n_horizons, n_targets)
        Features: the largest of the past.
    stale : bool
        Whether tasks are alike by the classes of ``STALE``, too, and not only by the length of their history.
    """

    largest: NDArray[np.int64]
    stale: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of ``Beyond``."""
        n_classes = _N_HISTORIES * (len(STALE) + 1 if self.stale else 1)
        return len(HORIZONS_S), n_classes, len(TARGETS), len(RATIOS)

    def classes(self, x: NDArray[np.float32]) -> NDArray[np.int64]:
        """Return the class of each task and target; shape (n, n_features) to (n, n_targets)."""
        out = np.empty((len(x), len(TARGETS)), np.int64)
        _classes(x, EVER, _WEEK, self.stale, out)
        return out


@numba.njit(**LENT)
def _classes(x: Any, ever: Any, week: Any, stale: bool, out: Any) -> None:
    first, last = HISTORIES
    for i in range(len(out)):
        seen = x[i, AT.seen]
        history = min(max(math.floor(seen), first), last) - first if seen >= first else 0
        for t in range(out.shape[1]):
            out[i, t] = history
            if stale:
                over = x[i, ever[t]] / x[i, week[t]]
                out[i, t] *= len(STALE) + 1
                for least in STALE:
                    out[i, t] += over >= least


SO_FAR: Final = Past(np.array([EVER] * len(HORIZONS_S)), stale=False)
"""The largest so far."""
RECENT: Final = Past(np.array([EVER, _WEEK, np.where(np.array(TARGETS) == "memory", _WEEK, EVER)]), stale=True)
"""The largest of a week, for an older level says little of memory. But a day holds peaks of CPU that come once a week
or less often, so there it is the largest so far (`benchmarks/LOG.md`, 2026-11-24)."""

Beyond = NDArray[np.float32]
"""Share of the training rows whose demand within the horizon exceeded each of ``RATIOS`` times the largest of the past;
float32, shape (n_horizons, n_classes, n_targets, n_ratios), falling along the last axis. NaN where the horizon is not
tempered, or no demand over it is known."""

KEY: Final = "beyond"
"""Name of ``Beyond`` among the tensors of a network's file."""

Part = tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32] | None]


def beyond_of(parts: Iterable[Part], past: Past = RECENT, *, alike: bool = False) -> Beyond | None:
    """Return the shares of rows; None where no demand over a horizon that is tempered is known.

    Parameters
    ----------
    parts : iterable of three float32 arrays
        Features, shape (n, n_features), targets, shape (n, n_targets, n_horizons), and weights, shape (n,), of some
        rows each; None: all weigh alike.
    past : Past
    alike : bool
        Whether all targets have the shares of all.
    """
    exceeded, known = np.zeros(past.shape), np.zeros((*past.shape[:-1], 1))
    for x, y, weight in parts:
        each = np.ones(len(x)) if weight is None else weight.astype(np.float64)
        classes = past.classes(x)
        for (h, tail), t in product(enumerate(TAILS), range(len(TARGETS))):
            ratio = np.minimum(y[:, t, h], 1.0) / np.maximum(x[:, past.largest[h, t]], FLOOR)
            for k in range(past.shape[1] if tail else 0):
                rows = np.flatnonzero((classes[:, t] == k) & np.isfinite(ratio))
                rows = rows[np.argsort(ratio[rows])]
                up_to = np.cumsum(np.append(0.0, each[rows]))
                place = np.searchsorted(ratio[rows], RATIOS * (1 + ROUNDING), side="right")
                known[h, k, t] += up_to[-1]
                exceeded[h, k, t] += up_to[-1] - up_to[place]
    if not known.any():
        return None
    if alike:
        exceeded, known = (np.repeat(of.sum(axis=2, keepdims=True), len(TARGETS), axis=2) for of in (exceeded, known))
    of_all = (exceeded.sum(axis=1, keepdims=True) + 1) / (known.sum(axis=1, keepdims=True) + 1)
    shares: Beyond = ((exceeded + _PRIOR_ROWS * of_all) / (known + _PRIOR_ROWS)).astype(np.float32)
    shares[~known.any(axis=(1, 2, 3))] = np.nan
    return shares


def taken_from(tensors: dict[str, NDArray[np.float32]], file: str, past: Past) -> Beyond | None:
    """Take what tempers the curves out of the tensors of a file.

    Returns
    -------
    Beyond or None
        None where the file has none: it is older, or nothing was tempered.

    Raises
    ------
    ValueError
        It has another shape than that of ``past``.
    """
    beyond = tensors.pop(KEY, None)
    if beyond is not None and beyond.shape != past.shape:
        raise ValueError(f"{file}: expected {KEY} of shape {past.shape}, got {beyond.shape}")
    return beyond


def temper(
    survival: NDArray[np.float32],
    thresholds: NDArray[np.float32],
    x: NDArray[np.float32],
    beyond: Beyond | None,
    horizons_s: tuple[int, ...],
    past: Past = RECENT,
) -> None:
    """Temper curves in place; a task of which nothing was measured in that past keeps its own.

    Parameters
    ----------
    survival : float32, shape (n, n_targets, n_horizons, N_THRESHOLDS)
    thresholds : float32, shape (n, n_targets, N_THRESHOLDS)
    x : float32, shape (n, n_features)
    beyond : Beyond or None
        None: curves stay as they are.
    horizons_s : tuple of int
        Of the curves.
    past : Past
        Of the shares.
    """
    if beyond is None:
        return
    classes, room = past.classes(x), np.empty(survival.shape[3], np.float32)
    for place, h in enumerate(map(HORIZONS_S.index, horizons_s)):
        if not np.isnan(beyond[h, 0, 0, 0]):
            bound = np.float32(TAILS[h])
            bound = bound if float(bound) >= TAILS[h] else np.nextafter(bound, np.float32(1.0))
            columns = past.largest[h]
            _temper(survival, thresholds, x, columns, classes, beyond[h], RATIOS, _WITHIN, place, TAILS[h], bound, room)


_WITHIN: Final = np.searchsorted(RATIOS[_ONE : _ONE + _TO_DOUBLE], 1 + np.arange(16) / 16, side="right")
"""Number of ratios from 1 to 2 up to each 16th between the two; no more than one lies in any of these parts."""


@numba.njit(**LENT)
def _temper(
    survival: Any,  # (n, n_targets, n_horizons, J) float32, changed; curves fall
    thresholds: Any,  # (n, n_targets, J) float32
    x: Any,  # (n, n_features) float32
    columns: Any,  # (n_targets,) int64: features, the largest of the past
    classes: Any,  # (n, n_targets) int64
    beyond: Any,  # (n_classes, n_targets, n_ratios) float32
    ratios: Any,  # (n_ratios,) float64
    within: Any,  # (16,) int64
    place: int,
    tail: float,
    bound: np.float32,  # the least float32 that is not below the tail
    room: Any,  # (J,) float32, overwritten
) -> None:
    last = len(ratios) - 1
    for i in range(len(survival)):
        for t in range(survival.shape[1]):
            largest = np.float64(x[i, columns[t]])
            if np.isnan(largest):
                continue
            s, at, shares = survival[i, t, place], thresholds[i, t], beyond[classes[i, t], t]
            of_largest, first = 1.0 / max(largest, FLOOR), 0
            for j in range(len(s)):
                first += not s[j] < bound
            for j in range(first, len(s)):
                ratio = at[j] * of_largest
                # ratios up to this one, by the leading bits of the number
                bits = np.float64(ratio).view(np.int64)
                k = ((bits >> 52) - 1023) * _TO_DOUBLE + _ONE + within[(bits >> 48) & 15]
                k = min(max(k, 0), last)
                k += ratios[k] <= ratio
                low = min(max(k - 1, 0), last - 1)
                share = straight(
                    ratio, ratios[low], np.float64(shares[low]), ratios[low + 1], np.float64(shares[low + 1])
                )
                share = 1.0 if k == 0 else share if k <= last else np.float64(shares[last])
                room[j] = math.sqrt(s[j] * min(share, tail))
            before = s[first - 1] if first > 0 else np.float32(1.0)
            for j in range(first, len(s)):
                before = min(room[j], before)  # not above by rounding
                s[j] = before
