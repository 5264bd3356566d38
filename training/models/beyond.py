"""Tempers curves of a day ahead by how far beyond their largest so far tasks went in a day, in all training rows.

A day holds few independent outcomes of a task, so a network learns their tail badly. That of all tasks together, over
the largest so far, is one statistic of many outcomes. The geometric mean of both tells risky tasks apart better than
either one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Final

import numba
import numpy as np
from numpy.typing import NDArray

from reclaim.data.core.jit import LENT, straight
from reclaim.features.registry import AT, SIGNALS
from reclaim.features.targets import HORIZONS_S, TARGETS
from reclaim.training.margins.violation import ROUNDING
from reclaim.training.models.survival import FLOOR

DAY: Final = HORIZONS_S.index(86_400)
"""Place of the horizon whose curves are tempered. Those of an hour and of five minutes have outcomes enough."""
TAIL: Final = 0.5
"""Largest probability that is tempered: from the median down, a curve is the network's."""
RATIOS: Final = 2.0 ** (np.arange(-32, 33) / 8)
"""Demand over the largest so far, from a 16th to 16 times it."""
HISTORIES: Final = (7, 11)
"""First and last class of history: floor of log2(1 + windows seen), so up to 21 hours of it, … and 7 days and more."""
_PRIOR_ROWS: Final = 1_000
"""Rows of all histories that count next to those of each class."""
_COLUMNS: Final = np.array([*(AT[f"{signal}_max_ever"] for signal in SIGNALS), AT.seen])
"""Features that are read: the largest so far of each target, and the windows seen."""
assert SIGNALS == TARGETS

Beyond = NDArray[np.float32]
"""Share of the training rows whose demand over a day exceeded each of ``RATIOS`` times the largest so far; float32,
shape (n_histories, n_targets, n_ratios), falling along the last axis."""


Part = tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32] | None]


def beyond_of(parts: Iterable[Part]) -> Beyond | None:
    """Return the shares of rows; None where no demand over a day is known.

    Parameters
    ----------
    parts : iterable of three float32 arrays
        Features, shape (n, n_features), targets, shape (n, n_targets, n_horizons), and weights, shape (n,), of some
        rows each; None: all weigh alike.
    """
    n_histories = HISTORIES[1] - HISTORIES[0] + 1
    exceeded = np.zeros((n_histories, len(TARGETS), len(RATIOS)))
    known = np.zeros((n_histories, len(TARGETS), 1))
    for x, y, weight in parts:
        each = np.ones(len(x)) if weight is None else weight.astype(np.float64)
        ever, history = np.maximum(x[:, _COLUMNS[:-1]], FLOOR), _history(x)
        for t in range(len(TARGETS)):
            ratio = np.minimum(y[:, t, DAY], 1.0) / ever[:, t]
            for k in range(n_histories):
                rows = np.flatnonzero((history == k) & np.isfinite(ratio))
                rows = rows[np.argsort(ratio[rows])]
                up_to = np.cumsum(np.append(0.0, each[rows]))
                known[k, t] += up_to[-1]
                exceeded[k, t] += up_to[-1] - up_to[np.searchsorted(ratio[rows], RATIOS * (1 + ROUNDING), side="right")]
    if not known.any():
        return None
    of_all = (exceeded.sum(axis=0) + 1) / (known.sum(axis=0) + 1)
    shares: Beyond = ((exceeded + _PRIOR_ROWS * of_all) / (known + _PRIOR_ROWS)).astype(np.float32)
    return shares


def _history(x: NDArray[np.float32]) -> NDArray[np.int64]:
    seen = np.nan_to_num(x[:, _COLUMNS[-1]])
    history: NDArray[np.int64] = np.clip(np.floor(seen), *HISTORIES).astype(np.int64) - HISTORIES[0]
    return history


def temper(
    survival: NDArray[np.float32], thresholds: NDArray[np.float32], x: NDArray[np.float32], beyond: Beyond, place: int
) -> None:
    """Temper the curves of a day ahead in place; a task of which nothing was measured keeps its own.

    Parameters
    ----------
    survival : float32, shape (n, n_targets, n_horizons, N_THRESHOLDS)
    thresholds : float32, shape (n, n_targets, N_THRESHOLDS)
    x : float32, shape (n, n_features)
    beyond : Beyond
    place : int
        Of the day among the horizons of the curves.
    """
    ever = np.ascontiguousarray(x[:, _COLUMNS[:-1]])
    _temper(survival, thresholds, ever, _history(x), beyond, RATIOS, place)


@numba.njit(**LENT)
def _temper(survival: Any, thresholds: Any, ever: Any, history: Any, beyond: Any, ratios: Any, place: int) -> None:
    last = len(ratios) - 1
    for i in range(len(survival)):
        for t in range(survival.shape[1]):
            if np.isnan(ever[i, t]):
                continue
            s, shares = survival[i, t, place], beyond[history[i], t]
            of_largest = 1.0 / max(np.float64(ever[i, t]), FLOOR)
            k, before = 0, 1.0
            for j in range(len(s)):
                if s[j] < TAIL:
                    ratio = thresholds[i, t, j] * of_largest
                    while k <= last and ratios[k] <= ratio:
                        k += 1
                    share = np.float64(shares[k - 1]) if k > 0 else 1.0
                    if 0 < k <= last:
                        share = straight(ratio, ratios[k - 1], share, ratios[k], np.float64(shares[k]))
                    s[j] = min(math.sqrt(s[j] * min(share, TAIL)), before)  # not above by rounding
                before = np.float64(s[j])
