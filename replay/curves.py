"""A curve of the frontier: what one contender reclaims at each share of violations, with intervals, beside others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reclaim.replay.metrics import resampled_sums
from reclaim.replay.scoring import Bootstrap, interval_of, number
from reclaim.replay.sweep import at_rate

Floats = NDArray[np.float64]

Sweep = tuple[Floats, Floats]
"""Violations and the volume reclaimed of each unit at every factor; shape (n_units, n_factors) each."""


@dataclass(frozen=True)
class Grounds:
    """What every contender is judged on: one resource, over ``n_units`` units that are drawn with replacement.

    Attributes
    ----------
    count, granted, oracle : float64, shape (n_units,)
        Task-windows or times, the volume of limits, and what the oracle reclaims of it.
    rates : tuple of float, falling from the last to the first
        Shares of violations at which contenders are compared.
    how : Bootstrap
    """

    count: Floats
    granted: Floats
    oracle: Floats
    rates: tuple[float, ...]
    how: Bootstrap

    @classmethod
    def of(cls, totals: Floats, rates: tuple[float, ...], how: Bootstrap) -> Grounds:
        """Take apart the three sums, shape (n_units, 3)."""
        return cls(totals[:, 0], totals[:, 1], totals[:, 2], rates, how)

    @property
    def oracle_share(self) -> float:
        """What the oracle reclaims of the limits; NaN where there are none."""
        return float(ratio(self.oracle.sum(), self.granted.sum()))


@dataclass(frozen=True)
class Curve:
    """What one contender reclaims.

    Attributes
    ----------
    violation, reclaimed : float64, shape (n_points,)
        The points, the most violations first.
    at : float64, shape (n_rates, 1 + draws)
        Reclaimed share at each of the rates: of all units, then of each resample; NaN where the curve does not reach.
    """

    violation: Floats
    reclaimed: Floats
    at: Floats


def draw_curve(plans: Sequence[Sweep], grounds: Grounds) -> Curve:
    """Return the curve of a contender.

    Parameters
    ----------
    plans : sequence of Sweep
        One, or one for each rate of the grounds: that of the bare answer which the contender gives to keep such a
        rate. The curve follows each on its side of the geometric mean of two rates, so nothing is chosen on the rows
        judged.
    grounds : Grounds
    """
    flat = np.hstack([np.hstack(plan) for plan in plans] + [grounds.count[:, None], grounds.granted[:, None]])
    draws = np.vstack([flat.sum(axis=0), resampled_sums(flat, draws=grounds.how.draws, seed=grounds.how.seed)])
    count, granted = draws[:, -2:-1], draws[:, -1:]
    n = plans[0][0].shape[1]
    shares = [
        (ratio(two[:, :n], count), ratio(two[:, n:], granted))
        for two in (draws[:, 2 * n * i : 2 * n * (i + 1)] for i in range(len(plans)))
    ]
    per_rate = shares * len(grounds.rates) if len(shares) == 1 else shares
    at = np.stack([at_rate(*share, rate) for share, rate in zip(per_rate, grounds.rates, strict=True)])
    between = [float(np.sqrt(a * b)) for a, b in pairwise(grounds.rates)]
    edges = [-np.inf, *between, np.inf] if len(shares) > 1 else [-np.inf, np.inf]
    points: list[Floats] = []
    for share, (above, up_to) in reversed(list(zip(shares, pairwise(edges), strict=True))):
        violation, reclaimed = share[0][0], share[1][0]  # of all units
        mine = (violation > above) & (violation <= up_to)
        points.append(np.stack([violation[mine], reclaimed[mine]]))
    joined = np.hstack(points)
    return Curve(joined[0], joined[1], at)


def report_curves(curves: Mapping[str, Curve], grounds: Grounds, learned: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return of each curve its points, and what it comes to at each rate: interval, rank, share of the oracle's.

    The first at that rate is also held against the next, and a learned one against the best of all others, in the same
    resamples.
    """
    report: dict[str, dict[str, Any]] = {n: {"curve": _points(curve), "at": []} for n, curve in curves.items()}
    for k, rate in enumerate(grounds.rates):
        values = {name: float(curve.at[k, 0]) for name, curve in curves.items()}
        ranked = sorted((n for n in values if np.isfinite(values[n])), key=lambda n: -values[n])
        best = next((name for name in ranked if name not in learned), None)
        for name, curve in curves.items():
            line: dict[str, Any] = {
                "rate": rate,
                **interval_of(curve.at[k], grounds.how),
                "of_oracle": number(float(ratio(values[name], grounds.oracle_share))),
                "rank": ranked.index(name) + 1 if name in ranked else None,
            }
            if len(ranked) > 1 and name == ranked[0]:
                line["lead"] = _ahead(curves, name, ranked[1], k, grounds.how)
            if name in learned and best is not None and name in ranked:
                line["ahead"] = _ahead(curves, name, best, k, grounds.how)
            report[name]["at"].append(line)
    return report


def _ahead(curves: Mapping[str, Curve], name: str, other: str, k: int, how: Bootstrap) -> dict[str, Any]:
    """Return by how much one reclaims more than another at the k-th rate, with its interval."""
    return {"of": other, **interval_of(curves[name].at[k] - curves[other].at[k], how)}


def _points(curve: Curve) -> dict[str, list[float | None]]:
    """Return the points that differ: beyond where every answer is the limit they are all the same."""
    new = np.append(True, (np.diff(curve.violation) != 0) | (np.diff(curve.reclaimed) != 0))[: len(curve.violation)]
    return {
        "violation_rate": [number(v) for v in curve.violation[new]],
        "reclaimed_share": [number(v) for v in curve.reclaimed[new]],
    }


def ratio(above: Any, below: Any) -> Floats:
    """Return one over the other, arrays that broadcast; NaN where there is nothing to divide by."""
    above, below = np.broadcast_arrays(np.asarray(above, np.float64), np.asarray(below, np.float64))
    return np.asarray(np.divide(above, below, out=np.full(above.shape, np.nan), where=below > 0))
