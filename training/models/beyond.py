"""Tempers the tails of curves by how far beyond their largest so far tasks went within the horizon, in training rows.

The tail of a curve rests on few outcomes: all of a day ahead, where a task has few days, and an hour ahead what is
rarer than one in twenty. That of all tasks together, over the largest so far, is one statistic of many outcomes. The
geometric mean of both tells risky tasks apart better than either one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import product
from typing import Any, Final

import numba
import numpy as np
from numpy.typing import NDArray

from reclaim.data.core.jit import LENT, straight
from reclaim.features.registry import AT, SIGNALS
from reclaim.features.targets import HORIZONS_S, TARGETS
from reclaim.training.margins.violation import ROUNDING
from reclaim.training.models.survival import FLOOR

TAILS: Final[tuple[float, ...]] = (0.0, 0.05, 0.5)
"""Largest probability that is tempered, by horizon: five minutes ahead none, for there are outcomes enough; a day ahead
all above the median (`benchmarks/LOG.md`, 2026-11-23)."""
RATIOS: Final = 2.0 ** (np.arange(-32, 33) / 8)
"""Demand over the largest so far, from a 16th to 16 times it."""
HISTORIES: Final = (7, 11)
"""First and last class of history: floor of log2(1 + windows seen), so up to 21 hours of it, … and 7 days and more."""
_PRIOR_ROWS: Final = 1_000
"""Rows of all histories that count next to those of each class."""
COLUMNS: Final = np.array([*(AT[f"{signal}_max_ever"] for signal in SIGNALS), AT.seen])
"""Features that are read: the largest so far of each target, and the windows seen."""
assert SIGNALS == TARGETS

SHAPE: Final = (len(HORIZONS_S), HISTORIES[1] - HISTORIES[0] + 1, len(TARGETS), len(RATIOS))
"""Shape of ``Beyond``."""

Beyond = NDArray[np.float32]
"""Share of the training rows whose demand within the horizon exceeded each of ``RATIOS`` times the largest so far;
float32, shape (n_horizons, n_histories, n_targets, n_ratios), falling along the last axis. NaN where the horizon is not
tempered, or no demand over it is known."""

KEY: Final = "beyond"
"""Name of ``Beyond`` among the tensors of a network's file."""

Part = tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32] | None]


def beyond_of(parts: Iterable[Part], *, alike: bool = False) -> Beyond | None:
    """Return the shares of rows; None where no demand over a horizon that is tempered is known.

    Parameters
    ----------
    parts : iterable of three float32 arrays
        Features, shape (n, n_features), targets, shape (n, n_targets, n_horizons), and weights, shape (n,), of some
        rows each; None: all weigh alike.
    alike : bool
        Whether all targets have the shares of all.
    """
    exceeded, known = np.zeros(SHAPE), np.zeros((*SHAPE[:-1], 1))
    for x, y, weight in parts:
        each = np.ones(len(x)) if weight is None else weight.astype(np.float64)
        ever, history = np.maximum(x[:, COLUMNS[:-1]], FLOOR), _history(x)
        for (h, tail), t in product(enumerate(TAILS), range(len(TARGETS))):
            ratio = np.minimum(y[:, t, h], 1.0) / ever[:, t]
            for k in range(SHAPE[1] if tail else 0):
                rows = np.flatnonzero((history == k) & np.isfinite(ratio))
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


def taken_from(tensors: dict[str, NDArray[np.float32]], file: str) -> Beyond | None:
    """Take what tempers the curves out of the tensors of a file.

    Returns
    -------
    Beyond or None
        None where the file has none: it is of before, or nothing was tempered.

    Raises
    ------
    ValueError
        It has another shape than ``SHAPE``.
    """
    beyond = tensors.pop(KEY, None)
    if beyond is not None and beyond.shape != SHAPE:
        raise ValueError(f"{file}: expected {KEY} of shape {SHAPE}, got {beyond.shape}")
    return beyond


def _history(x: NDArray[np.float32]) -> NDArray[np.int64]:
    seen = np.nan_to_num(x[:, COLUMNS[-1]])
    history: NDArray[np.int64] = np.clip(np.floor(seen), *HISTORIES).astype(np.int64) - HISTORIES[0]
    return history


def temper(
    survival: NDArray[np.float32],
    thresholds: NDArray[np.float32],
    x: NDArray[np.float32],
    beyond: Beyond | None,
    horizons_s: tuple[int, ...],
) -> None:
    """Temper curves in place; a task of which nothing was measured keeps its own.

    Parameters
    ----------
    survival : float32, shape (n, n_targets, n_horizons, N_THRESHOLDS)
    thresholds : float32, shape (n, n_targets, N_THRESHOLDS)
    x : float32, shape (n, n_features)
    beyond : Beyond or None
        None: curves stay as they are.
    horizons_s : tuple of int
        Of the curves.
    """
    if beyond is None:
        return
    ever, history = np.ascontiguousarray(x[:, COLUMNS[:-1]]), _history(x)
    for place, h in enumerate(map(HORIZONS_S.index, horizons_s)):
        if not np.isnan(beyond[h, 0, 0, 0]):
            _temper(survival, thresholds, ever, history, beyond[h], RATIOS, place, TAILS[h])


@numba.njit(**LENT)
def _temper(
    survival: Any, thresholds: Any, ever: Any, history: Any, beyond: Any, ratios: Any, place: int, tail: float
) -> None:
    last = len(ratios) - 1
    for i in range(len(survival)):
        for t in range(survival.shape[1]):
            if np.isnan(ever[i, t]):
                continue
            s, shares = survival[i, t, place], beyond[history[i], t]
            of_largest = 1.0 / max(np.float64(ever[i, t]), FLOOR)
            k, before = 0, 1.0
            for j in range(len(s)):
                if s[j] < tail:
                    ratio = thresholds[i, t, j] * of_largest
                    while k <= last and ratios[k] <= ratio:
                        k += 1
                    share = np.float64(shares[k - 1]) if k > 0 else 1.0
                    if 0 < k <= last:
                        share = straight(ratio, ratios[k - 1], share, ratios[k], np.float64(shares[k]))
                    s[j] = min(math.sqrt(s[j] * min(share, tail)), before)  # not above by rounding
                before = np.float64(s[j])
