"""How good reservations were: a metric is one row statistic over another, summed over any grouping of the rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from reclaim.data.schema import RESOURCES
from reclaim.features.groups import AGES as AGES
from reclaim.features.groups import TIER_LABELS as TIER_LABELS
from reclaim.features.groups import age_key as age_key
from reclaim.features.groups import tier_key as tier_key

ROUNDING: Final = 1e-6
"""Relative tolerance of a violation: targets are stored as single-precision shares of the limit."""

_DRAWN_AT_ONCE: Final = 2_000_000
"""Numbers drawn at once by the bootstrap: 16 MB of weights."""


@dataclass(frozen=True)
class Scored:
    """``n`` answers and what came of them; every float64 array of shape (n, n_resources), all but ``limit`` over it.

    Attributes
    ----------
    target : what the reservation had to cover within the horizon; NaN unknown
    next_target : the same for the next five minutes; NaN unknown
    reservation : the answer
    limit : in the trace's unit
    duration_s : float64, shape (n,), length of the row's window in seconds

    A target above the limit counts as the limit wherever reservations are judged: there the limit itself was too low,
    and no reservation within it can help. ``limit_exceeded_rate`` says how often that is.
    """

    target: NDArray[np.float64]
    next_target: NDArray[np.float64]
    reservation: NDArray[np.float64]
    limit: NDArray[np.float64]
    duration_s: NDArray[np.float64]

    @property
    def counted(self) -> NDArray[np.bool_]:
        """Rows whose whole horizon is known, of a known limit: every statistic is taken over these alone."""
        return np.isfinite(self.target) & np.isfinite(self.reservation) & (self.limit > 0) & np.isfinite(self.limit)

    @property
    def volume(self) -> NDArray[np.float64]:
        """Limit times seconds, in the trace's unit; what shares are weighted by."""
        return self.limit * self.duration_s[:, None]


def violates(target: NDArray[np.float64], reservation: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Whether a target, or the limit where that is less, passes a reservation; both over the limit.

    False where either is unknown. The same rule as ``training.calibrate.violation_share``.
    """
    return np.asarray(np.minimum(target, 1.0) > reservation * (1 + ROUNDING), np.bool_)


def _excess(s: Scored) -> NDArray[np.float64]:
    return np.where(violates(s.target, s.reservation), np.minimum(s.target, 1.0) - s.reservation, 0.0)


Stat = Callable[[Scored], NDArray[np.float64]]

STATS: Final[Mapping[str, Stat]] = {
    "rows": lambda s: np.ones_like(s.target),
    "granted": lambda s: s.volume,
    "reclaimed": lambda s: (1.0 - s.reservation) * s.volume,
    "oracle_reclaimed": lambda s: (1.0 - np.minimum(s.target, 1.0)) * s.volume,
    "needed": lambda s: np.minimum(s.target, 1.0) * s.volume,
    "violations": lambda s: violates(s.target, s.reservation).astype(np.float64),
    "excess": lambda s: _excess(s),
    "overrun": lambda s: _excess(s) * s.volume,
    "next_rows": lambda s: np.isfinite(s.next_target).astype(np.float64),
    "next_violations": lambda s: violates(s.next_target, s.reservation).astype(np.float64),
    "limit_exceeded": lambda s: (s.target > 1.0 + ROUNDING).astype(np.float64),
}
"""What is known of each row, shape (n, n_resources); summed before anything is divided."""
POSITION: Final = {name: i for i, name in enumerate(STATS)}
"""Of each statistic on its axis."""


@dataclass(frozen=True)
class Metric:
    """A ratio of two sums.

    Attributes
    ----------
    numerator, denominator : str
        Keys of ``STATS``.
    meaning : str
        One sentence for the report.
    """

    numerator: str
    denominator: str
    meaning: str


METRICS: Final[Mapping[str, Metric]] = {
    "reclaimed_share": Metric(
        "reclaimed", "granted", "Limit less reservation over limit, each task-window weighted by limit and duration."
    ),
    "violation_rate": Metric(
        "violations", "rows", "Share of task-windows of which the usage within the horizon passes the reservation."
    ),
    "violation_depth": Metric(
        "excess", "violations", "Mean of usage less reservation, over the limit, among the violating task-windows."
    ),
    "overrun_share": Metric("overrun", "needed", "Volume of usage above reservation over the volume of usage."),
    "next_violation_rate": Metric(
        "next_violations", "next_rows", "Share of task-windows of which the next five minutes pass the reservation."
    ),
    "oracle_reclaimed_share": Metric(
        "oracle_reclaimed", "granted", "What a reservation equal to the usage to come would have reclaimed."
    ),
    "efficiency": Metric(
        "reclaimed", "oracle_reclaimed", "Reclaimed share over what the oracle reclaims on the same task-windows."
    ),
    "limit_exceeded_rate": Metric(
        "limit_exceeded",
        "rows",
        "Share of task-windows whose demand within the horizon passes the limit itself; of memory, for CPU demand is "
        "capped at the limit.",
    ),
}
"""Every reported metric by name; each is one number per resource."""


def sums(scored: Scored, key: NDArray[np.int64], n_keys: int) -> NDArray[np.float64]:
    """Sum every statistic over the counted rows of each group.

    Parameters
    ----------
    scored : Scored
        ``n`` rows.
    key : int64, shape (n,)
        Group of each row, from 0 to ``n_keys`` - 1.
    n_keys : int
        Number of groups.

    Returns
    -------
    float64, shape (n_keys, len(STATS), n_resources)
    """
    counted = scored.counted
    out = np.zeros((n_keys, len(STATS), len(RESOURCES)))
    for i, stat in enumerate(STATS.values()):
        values = np.where(counted, stat(scored), 0.0)
        for r in range(len(RESOURCES)):
            out[:, i, r] = np.bincount(key, weights=values[:, r], minlength=n_keys)
    return out


def evaluate(totals: NDArray[np.float64]) -> Mapping[str, NDArray[np.float64]]:
    """Return every metric; from shape (..., len(STATS), n_resources) to (..., n_resources) each.

    A ratio without a denominator (no rows, no violation) is NaN.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        return {
            name: np.where(
                totals[..., POSITION[m.denominator], :] == 0,
                np.nan,
                totals[..., POSITION[m.numerator], :] / totals[..., POSITION[m.denominator], :],
            )
            for name, m in METRICS.items()
        }


def resampled_sums(unit_sums: NDArray[np.float64], *, draws: int, seed: int) -> NDArray[np.float64]:
    """Return the sums over as many units drawn with replacement, in each draw; (n_units, k) to (draws, k).

    How often each unit is drawn follows from their number, draws and seed alone: sums of the same units that are
    resampled apart are resampled alike.
    """
    n_units = len(unit_sums)
    out = np.zeros((draws, unit_sums.shape[1]))
    rng = np.random.default_rng(seed)
    at_once = max(1, _DRAWN_AT_ONCE // max(n_units, 1))
    for start in range(0, draws if n_units else 0, at_once):
        weights = np.empty((min(at_once, draws - start), n_units))
        for row in weights:
            row[:] = np.bincount(rng.integers(0, n_units, n_units), minlength=n_units)
        out[start : start + at_once] = weights @ unit_sums
    return out


def bootstrap(
    unit_sums: NDArray[np.float64], *, draws: int, seed: int, confidence: float
) -> Mapping[str, NDArray[np.float64]]:
    """Return an interval for every metric, by drawing whole units with replacement.

    Tasks of one collection behave alike, so the unit to draw is the collection: rows or tasks would make intervals
    too narrow.

    Parameters
    ----------
    unit_sums : float64, shape (n_units, len(STATS), n_resources)
        What ``sums`` gives with the unit as key.
    draws, seed, confidence : int, int, float
        Resamples, seed of the generator, and the share of them within the interval.

    Returns
    -------
    dict of str to float64, shape (2, n_resources)
        Lower and upper bound; NaN where the metric is NaN in every draw.
    """
    flat = unit_sums.reshape(len(unit_sums), len(STATS) * len(RESOURCES))
    resampled = resampled_sums(flat, draws=draws, seed=seed)
    levels = [(1 - confidence) / 2, (1 + confidence) / 2]
    intervals = {}
    for name, values in evaluate(resampled.reshape(draws, *unit_sums.shape[1:])).items():
        interval = np.full((2, values.shape[-1]), np.nan)
        for r in range(values.shape[-1]):
            known = values[np.isfinite(values[:, r]), r]
            if len(known):
                interval[:, r] = np.quantile(known, levels)
        intervals[name] = interval
    return intervals
