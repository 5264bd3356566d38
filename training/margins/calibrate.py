"""Sets the margins: on validation rows, the narrowest that keep a violation budget, and what goes under them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from reclaim.data.errors import HistoryTooShortError
from reclaim.data.schema import RESOURCES
from reclaim.data.windows import Windows
from reclaim.features.groups import TIER_LABELS, tier_key
from reclaim.training.estimators.base import MODEL, UNKNOWN, Estimate
from reclaim.training.margins.margin import (
    MARGIN_GROUPS,
    MARGIN_NAMES,
    Budgets,
    Margin,
    guarded,
    margin_group,
    three_margins,
    under,
)
from reclaim.training.margins.violation import needed, violates

LOWEST_SHARE: Final = -0.95
"""Narrowest margin looked at: a twentieth of what the estimator said."""
HIGHEST_SHARE: Final = 1e3
"""Widest margin looked at: in effect the limit, for every task that uses anything at all."""
GROUP_VIOLATIONS: Final = 20
"""Rows that a group must be able to spend before it gets a margin of its own: with fewer, one task decides."""
TIER_ROWS: Final = 10_000
"""Rows from which the violation rate of a tier is reported: of fewer, a budget of 0.1 % means ten at most."""


@dataclass(frozen=True)
class Calibration:
    """Margins, and what they do to the rows they were set on.

    Attributes
    ----------
    margins : mapping of name to Margin
    violation : mapping of margin name to tuple of float, in the order ``schema.RESOURCES``
        Share of rows that violate.
    violation_by_tier : mapping of margin name to mapping of ``groups.TIER_LABELS`` to tuple of float
        The same among the rows of each tier that has any; NaN for a resource of which fewer than ``TIER_ROWS`` count.
    reclaimed : mapping of margin name to tuple of float
        Sum of (limit - reservation) over the sum of limits.
    rows : tuple of int
        Rows of known target and limit, per resource.
    notes : tuple of str
        Where a budget could not be met, or rests on few rows.
    """

    margins: Mapping[str, Margin]
    violation: Mapping[str, tuple[float, ...]]
    violation_by_tier: Mapping[str, Mapping[str, tuple[float, ...]]]
    reclaimed: Mapping[str, tuple[float, ...]]
    rows: tuple[int, ...]
    notes: tuple[str, ...]


def violation_share(
    reservation: NDArray[np.float64], limit: NDArray[np.float64], target: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the share of rows whose target exceeds the reservation; (n, n_resources) each, to (n_resources,).

    Rows of unknown target or limit do not count; NaN where none is left. A target above the limit counts as the limit:
    there the limit itself was too low, and no reservation within it can help.
    """
    known = np.isfinite(target) & (limit > 0)
    with np.errstate(invalid="ignore"):
        above = known & violates(needed(target, limit), reservation)
    n = known.sum(0)
    return np.where(n > 0, above.sum(0) / np.maximum(n, 1), np.nan)


def reclaimed_share(reservation: NDArray[np.float64], limit: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the sum of (limit - reservation) over the sum of limits; (n, n_resources) to (n_resources,)."""
    known = np.isfinite(limit) & np.isfinite(reservation)
    granted = np.where(known, limit, 0.0).sum(0)
    left = np.where(known, limit - reservation, 0.0).sum(0)
    return np.where(granted > 0, left / np.where(granted > 0, granted, 1.0), np.nan)


def needed_reservation(windows: Windows, target: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the least bare reservation with which a row does not violate once guarded; (n, n_resources), trace units.

    The guards (jump, cap, start-up hold) are the served ones, so that what they prevent is not paid for twice: 0 where
    they protect the row whatever was reserved, infinite where they leave it in violation whatever was reserved, NaN
    where target or limit is unknown.
    """
    need = np.where(windows.limit > 0, needed(target, windows.limit), np.nan)
    rule = np.full(need.shape, MODEL, np.uint8)
    least = guarded(Estimate(np.zeros_like(need), rule), windows).reservation
    most = guarded(Estimate(np.full_like(need, np.inf), rule), windows).reservation
    with np.errstate(invalid="ignore"):
        reservation = np.where(violates(need, most), np.inf, need)
        return np.where(np.isnan(need) | violates(need, least), reservation, 0.0)


def calibrate(
    bases: Mapping[str, Estimate],
    windows: Windows,
    target: NDArray[np.float64],
    budgets: Budgets | None = None,
    *,
    by_group: bool = False,
) -> Calibration:
    """Find, per resource, the narrowest margins whose guarded reservations keep the budgets on these rows.

    A row violates at every margin below the one that lifts its reservation to what it needs, and at none above. Of
    ``n`` rows a budget lets ``floor(budget * n)`` violate, so the margin is the one that the next needy row asks for:
    split-conformal prediction with the ratio of need to reservation as the score (Papadopoulos et al., 2002; Vovk).

    Parameters
    ----------
    bases : mapping of margin name to Estimate
        What the bare estimator said of ``n`` rows, for ``baseline`` and for ``aggressive``; most say the same.
    windows : Windows
        The rows themselves.
    target : float64, shape (n, n_resources)
        Demand over the horizon, over the limit of the row; NaN unknown.
    budgets : Budgets or None
        The defaults when None.
    by_group : bool
        Whether each group of ``margin.MARGIN_GROUPS`` keeps the budgets for itself (Mondrian conformal prediction).
        Groups with fewer than ``GROUP_VIOLATIONS`` rows to spend are put together.

    Raises
    ------
    HistoryTooShortError
        A resource that has limits has no row with a known target. One without any limit, which a trace need not have,
        gets a margin of 0 and a note.
    """
    budgets = budgets or Budgets()
    needed = needed_reservation(windows, np.asarray(target, np.float64))
    rows = np.isfinite(target) & (windows.limit > 0)
    granted = np.any(windows.limit > 0, axis=0)
    for r, resource in enumerate(RESOURCES):
        if not rows[:, r].any() and (granted[r] or not granted.any()):
            raise HistoryTooShortError(
                f"{resource}: 0 of {len(windows)} validation rows have a limit and a known demand over the horizon, "
                "expected at least 1; the trace is shorter than the horizon after the validation split"
            )
    n = rows.sum(axis=0)
    notes = [
        f"{resource}: no row has a limit, so nothing is reserved, judged or reclaimed; the margin is 0"
        for r, resource in enumerate(RESOURCES)
        if not granted[r]
    ]
    group = margin_group(windows) if by_group else np.zeros(len(windows), np.int64)
    found: list[Margin] = []
    for name, budget in (("baseline", budgets.baseline), ("aggressive", budgets.aggressive)):
        shares = np.zeros((len(MARGIN_GROUPS), len(RESOURCES)))
        pooled = np.zeros(len(RESOURCES))
        for r, resource in enumerate(RESOURCES):
            if not granted[r]:
                continue
            known = rows[:, r]
            scores = _scores(needed[known, r], bases[name].reservation[known, r])
            pooled[r] = _narrowest(scores, budget)
            shares[:, r] = _of_groups(scores, group[known], budget) if by_group else pooled[r]
            lost = float((scores > HIGHEST_SHARE).mean())
            if lost > budget:
                notes.append(
                    f"{resource}, {name}: even a margin of {HIGHEST_SHARE:g} violates in {lost:.3%} of {n[r]} rows, "
                    f"above the budget of {budget:.3%}"
                )
            if n[r] * budget < 1:
                notes.append(
                    f"{resource}, {name}: a budget of {budget:.3%} of {n[r]} rows is less than one row; "
                    "the margin allows none"
                )
        found.append(Margin(name, _floats(pooled), tuple(map(_floats, shares)) if by_group else None))
    margins = three_margins(*found)
    held = guarded_reservations(bases, windows, margins)
    counted = np.where(rows, windows.limit, np.nan)
    return Calibration(
        margins=margins,
        violation={k: _floats(violation_share(v, windows.limit, target)) for k, v in held.items()},
        violation_by_tier={k: _by_tier(v, windows, target, rows) for k, v in held.items()},
        reclaimed={k: _floats(reclaimed_share(v, counted)) for k, v in held.items()},
        rows=tuple(int(k) for k in n),
        notes=tuple(notes),
    )


def guarded_reservations(
    bases: Mapping[str, Estimate], windows: Windows, margins: Mapping[str, Margin]
) -> dict[str, NDArray[np.float64]]:
    """Return what is reserved under each of the three margins, shape (n, n_resources) each, in trace units.

    Before the guards they are those of ``margin.under``.
    """
    bare = {k: bases[k].reservation * margins[k].factor(windows) for k in ("baseline", "aggressive")}
    rule = np.where(np.isnan(bare["aggressive"]), np.uint8(UNKNOWN), np.uint8(MODEL))
    return {k: guarded(Estimate(under(k, bare), rule), windows).reservation for k in MARGIN_NAMES}


def _by_tier(
    reservation: NDArray[np.float64], windows: Windows, target: NDArray[np.float64], counts: NDArray[np.bool_]
) -> dict[str, tuple[float, ...]]:
    """Return ``Calibration.violation_by_tier`` of one margin; ``counts`` are the rows that do, (n, n_resources)."""
    out = {}
    for number, label in enumerate(TIER_LABELS):
        of = tier_key(windows.tier) == number
        if of.any():
            share = violation_share(reservation[of], windows.limit[of], target[of])
            out[label] = _floats(np.where(counts[of].sum(axis=0) >= TIER_ROWS, share, np.nan))
    return out


def _of_groups(scores: NDArray[np.float64], group: NDArray[np.int64], budget: float) -> NDArray[np.float64]:
    """Return the margin of each group, shape (n_groups,), from the scores of rows and their groups, shape (n,)."""
    shares = np.empty(len(MARGIN_GROUPS))
    spendable = np.bincount(group, minlength=len(MARGIN_GROUPS)) * budget
    small = spendable < GROUP_VIOLATIONS
    together = scores[small[group]]
    # few rows even together: then they get the margin of all
    shares[small] = _narrowest(together if len(together) * budget >= GROUP_VIOLATIONS else scores, budget)
    for g in np.flatnonzero(~small):
        shares[g] = _narrowest(scores[group == g], budget)
    return shares


def _scores(needed: NDArray[np.float64], reservation: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the margin's share that lifts each row to its need; both of shape (n,), rows of known need."""
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.where(needed > 0, needed / reservation - 1.0, -np.inf)
    share[np.isnan(reservation)] = -np.inf  # nothing was estimated: the guards give the limit
    return share


def _narrowest(scores: NDArray[np.float64], budget: float) -> float:
    """Return the narrowest share with which at most the budget's rows violate."""
    allowed = min(int(budget * len(scores) * (1 + 1e-12)), len(scores) - 1)
    narrowest = float(np.partition(scores, len(scores) - 1 - allowed)[len(scores) - 1 - allowed])
    return min(max(narrowest, LOWEST_SHARE), HIGHEST_SHARE)


Key = TypeVar("Key")


def choose_best(candidates: Mapping[Key, Calibration], margin: str) -> list[Key]:
    """Return, per resource, the candidate that reclaims most under a margin; the first one of equals.

    Every candidate keeps the same budgets, so more reclaimed is better without a second look.
    """
    return [max(candidates, key=lambda key: candidates[key].reclaimed[margin][r]) for r in range(len(RESOURCES))]


def _floats(values: NDArray[np.float64]) -> tuple[float, ...]:
    return tuple(float(v) for v in values)
