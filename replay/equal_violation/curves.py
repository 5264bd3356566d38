"""Draws the curve of a contender, reclaimed share against violation rate, and compares contenders at equal rates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reclaim.replay.equal_violation.sweep import at_rate
from reclaim.replay.open_loop.bootstrap import Bootstrap, number
from reclaim.replay.open_loop.rows import ratio

Floats = NDArray[np.float64]

Sweep = tuple[Floats, Floats]
"""Violations and the volume reclaimed of each unit at every factor; shape (n_units, n_factors) each."""


@dataclass(frozen=True)
class JudgedUnits:
    """Totals that every contender is judged on: one resource, by ``n_units`` units that are resampled.

    Attributes
    ----------
    count, granted, oracle : float64, shape (n_units,)
        Task-windows or times, the volume of limits, and the oracle's reclaimed volume.
    rates : tuple of float, falling from the last to the first
        Shares of violations at which contenders are compared.
    bootstrap : Bootstrap
    """

    count: Floats
    granted: Floats
    oracle: Floats
    rates: tuple[float, ...]
    bootstrap: Bootstrap

    @classmethod
    def from_totals(cls, totals: Floats, rates: tuple[float, ...], bootstrap: Bootstrap) -> JudgedUnits:
        """Take apart the three sums, shape (n_units, 3)."""
        return cls(totals[:, 0], totals[:, 1], totals[:, 2], rates, bootstrap)

    @property
    def oracle_share(self) -> float:
        """Share of the limits that the oracle reclaims; NaN without limits."""
        return float(ratio(self.oracle.sum(), self.granted.sum()))


@dataclass(frozen=True)
class Curve:
    """Curve of one contender.

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


def draw_curve(sweeps: Sequence[Sweep], units: JudgedUnits) -> Curve:
    """Return the curve of a contender.

    Parameters
    ----------
    sweeps : sequence of Sweep
        One, or one for each of ``units.rates``, of the contender's bare answer for that rate. The curve follows each
        on its side of the geometric mean of two rates, so nothing is chosen on the rows judged.
    units : JudgedUnits
    """
    flat = np.hstack([np.hstack(sweep) for sweep in sweeps] + [units.count[:, None], units.granted[:, None]])
    draws = units.bootstrap.sums(flat)
    count, granted = draws[:, -2:-1], draws[:, -1:]
    n = sweeps[0][0].shape[1]
    shares = [
        (ratio(two[:, :n], count), ratio(two[:, n:], granted))
        for two in (draws[:, 2 * n * i : 2 * n * (i + 1)] for i in range(len(sweeps)))
    ]
    per_rate = shares * len(units.rates) if len(shares) == 1 else shares
    at = np.stack([at_rate(*share, rate) for share, rate in zip(per_rate, units.rates, strict=True)])
    between = [float(np.sqrt(a * b)) for a, b in pairwise(units.rates)]
    edges = [-np.inf, *between, np.inf] if len(shares) > 1 else [-np.inf, np.inf]
    points: list[Floats] = []
    for share, (above, up_to) in reversed(list(zip(shares, pairwise(edges), strict=True))):
        violation, reclaimed = share[0][0], share[1][0]  # of all units
        mine = (violation > above) & (violation <= up_to)
        points.append(np.stack([violation[mine], reclaimed[mine]]))
    joined = np.hstack(points)
    return Curve(joined[0], joined[1], at)


def report_curves(curves: Mapping[str, Curve], units: JudgedUnits, learned: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return, for each curve, its points, and at each rate its reclaimed share: interval, rank, share of the oracle's.

    ``lead`` compares the first contender at a rate with the second, ``ahead`` a learned one with the best other, both
    in the same resamples.
    """
    report: dict[str, dict[str, Any]] = {n: {"curve": _points(curve), "at": []} for n, curve in curves.items()}
    for k, rate in enumerate(units.rates):
        values = {name: float(curve.at[k, 0]) for name, curve in curves.items()}
        ranked = sorted((n for n in values if np.isfinite(values[n])), key=lambda n: -values[n])
        best = next((name for name in ranked if name not in learned), None)
        for name, curve in curves.items():
            line: dict[str, Any] = {
                "rate": rate,
                **units.bootstrap.interval(curve.at[k]),
                "of_oracle": number(float(ratio(values[name], units.oracle_share))),
                "rank": ranked.index(name) + 1 if name in ranked else None,
            }
            if len(ranked) > 1 and name == ranked[0]:
                line["lead"] = _ahead(curves, name, ranked[1], k, units.bootstrap)
            if name in learned and best is not None and name in ranked:
                line["ahead"] = _ahead(curves, name, best, k, units.bootstrap)
            report[name]["at"].append(line)
    return report


def _ahead(curves: Mapping[str, Curve], name: str, other: str, k: int, bootstrap: Bootstrap) -> dict[str, Any]:
    """Return the difference of two contenders' reclaimed shares at the k-th rate, with its interval."""
    return {"of": other, **bootstrap.interval(curves[name].at[k] - curves[other].at[k])}


def _points(curve: Curve) -> dict[str, list[float | None]]:
    """Return the points without repetitions, which arise where every answer is the limit."""
    new = np.append(True, (np.diff(curve.violation) != 0) | (np.diff(curve.reclaimed) != 0))[: len(curve.violation)]
    return {
        "violation_rate": [number(v) for v in curve.violation[new]],
        "reclaimed_share": [number(v) for v in curve.reclaimed[new]],
    }
