"""Sets margins and prices on validation rows: the least that keep a violation budget."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from reclaim.data.errors import HistoryTooShortError
from reclaim.data.schema import RESOURCES
from reclaim.data.windows import Windows, demand, with_demand
from reclaim.features.groups import TIER_LABELS, tier_key
from reclaim.features.splits import OTHER_SHARES
from reclaim.training.margins.answers import Answers, Setting
from reclaim.training.margins.margin import MARGIN_NAMES, Budgets, guarded_amounts
from reclaim.training.margins.price import Price
from reclaim.training.margins.violation import needed, violates

NO_LIMIT: Final = (
    "no row has a limit: a series gets one from its mapping, `cpu_limit`, and any other trace from its events"
)
"""Cause of an error that a longer history does not cure."""
_NO_USAGE: Final = "no row has a usage of it: without its limit in the mapping of a series, the resource is left out"
"""The same for a resource with a limit."""
_NO_WINDOWS: Final = (
    f"the validation period has no windows, or only those of collections that are kept for the test: {OTHER_SHARES}"
)
"""Cause where there is no validation row at all."""
TIER_VIOLATIONS: Final = 20
"""Violations that the budget must allow a tier before it gets a setting of its own: with fewer, one task decides."""
TIER_ROWS: Final = 10_000
"""Rows from which the violation rate of a tier is reported: of fewer, a budget of 0.1 % means ten at most."""


@dataclass(frozen=True)
class Calibration:
    """Margins or prices, and their results on the rows they were set on.

    Attributes
    ----------
    settings : mapping of name of margin to Setting
    violation : mapping of margin name to tuple of float, in the order ``schema.RESOURCES``
        Share of rows that violate.
    violation_by_tier : mapping of margin name to mapping of ``groups.TIER_LABELS`` to tuple of float
        The same among the rows of each tier that has any; NaN for a resource of which fewer than ``TIER_ROWS`` count.
    lost : mapping of margin name to tuple of float
        Share of rows that violate at every setting, because the answer is nothing: above the budget, none keeps it.
    reclaimed : mapping of margin name to tuple of float
        Sum of (limit - reservation) over the sum of limits.
    rows : tuple of int
        Rows of known target and limit, per resource.
    notes : tuple of str
        Where a budget could not be met, or rests on few rows.
    """

    settings: Mapping[str, Setting]
    violation: Mapping[str, tuple[float, ...]]
    violation_by_tier: Mapping[str, Mapping[str, tuple[float, ...]]]
    lost: Mapping[str, tuple[float, ...]]
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
    return _share(*_judged(reservation, limit, target))


def _share(known: NDArray[np.bool_], above: NDArray[np.bool_]) -> NDArray[np.float64]:
    n = known.sum(0)
    return np.where(n > 0, above.sum(0) / np.maximum(n, 1), np.nan)


def _judged(
    reservation: NDArray[np.float64], limit: NDArray[np.float64], target: NDArray[np.float64]
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return which rows count, and which of these violate; (n, n_resources) each."""
    known = np.isfinite(target) & (limit > 0)
    with np.errstate(invalid="ignore"):
        return known, known & violates(needed(target, limit), reservation)


def reclaimed_share(reservation: NDArray[np.float64], limit: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the sum of (limit - reservation) over the sum of limits; (n, n_resources) to (n_resources,)."""
    known = np.isfinite(limit) & np.isfinite(reservation)
    granted = np.where(known, limit, 0.0).sum(0)
    left = np.where(known, limit - reservation, 0.0).sum(0)
    return np.where(granted > 0, left / np.where(granted > 0, granted, 1.0), np.nan)


def needed_reservation(windows: Windows, target: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the least bare reservation with which a row does not violate once guarded; (n, n_resources), trace units.

    The guards (jump, cap, start-up hold) are the served ones, so that what they prevent is not counted twice: 0 where
    they protect the row whatever was reserved, NaN where target or limit is unknown.
    """
    need = np.where(windows.limit > 0, needed(target, windows.limit), np.nan)
    least = guarded_amounts(np.zeros_like(need), windows)
    with np.errstate(invalid="ignore"):
        return np.where(np.isnan(need) | violates(need, least), need, 0.0)


def known_rows(windows: Windows, target: NDArray[np.floating]) -> NDArray[np.bool_]:
    """Return which rows judge a setting of each resource: those with a limit and a known demand.

    Shape (n, n_resources).

    Parameters
    ----------
    windows : Windows
        ``n`` validation rows.
    target : floating, shape (n, n_resources)
        Demand over the horizon; NaN unknown.

    Raises
    ------
    HistoryTooShortError
        A resource that has limits has no such row, or none has limits.
    """
    rows: NDArray[np.bool_] = np.isfinite(target) & (windows.limit > 0)
    granted = np.any(windows.limit > 0, axis=0)
    for r, resource in enumerate(RESOURCES):
        if not rows[:, r].any() and (granted[r] or not granted.any()):
            if not len(windows):
                cause = _NO_WINDOWS
            elif not granted.any():
                cause = NO_LIMIT
            elif np.isnan(demand(windows)[:, r]).all():
                cause = _NO_USAGE
            else:
                cause = (
                    "their period or the trace ends within the horizon of each, or their tasks have no later windows; "
                    "set a shorter horizon_s, or ingest a longer history"
                )
            raise HistoryTooShortError(
                f"{resource}: 0 of {len(windows)} validation rows have a limit and a known demand over the horizon, "
                f"expected at least 1; {cause}"
            )
    return rows


def calibrate(
    answers: Answers,
    windows: Windows,
    target: NDArray[np.float64],
    budgets: Budgets | None = None,
    *,
    by_tier: bool = False,
    given: tuple[float, ...] | None = None,
) -> Calibration:
    """Find, per resource, the least margins or prices whose guarded reservations keep the budgets on these rows.

    A row violates at every setting below the one that lifts its reservation to its need, and at none above. Of
    ``n`` rows a budget lets ``floor(budget * n)`` violate, so the setting is the one that the next needy row asks for:
    split-conformal prediction with that setting as the score (Papadopoulos et al., 2002; Vovk).

    Parameters
    ----------
    answers : Answers
        To ``n`` rows.
    windows : Windows
        The rows themselves.
    target : float64, shape (n, n_resources)
        Demand over the horizon, over the limit of the row; NaN unknown.
    budgets : Budgets or None
        The defaults when None.
    by_tier : bool
        Whether each tier keeps the budgets for itself (Mondrian conformal prediction). Tiers with fewer than
        ``TIER_VIOLATIONS`` rows to spend are put together.
    given : tuple of float, in the order ``schema.RESOURCES``, or None
        Scores that are known and set by no budget (``Answers.score``), for all three margins; NaN for the others.

    Raises
    ------
    HistoryTooShortError
        As ``known_rows``. A resource without any limit, which a trace need not have, gets ``Answers.UNSET`` and a
        note, unless its score is given.
    """
    budgets, windows = budgets or Budgets(), with_demand(windows)
    needed = needed_reservation(windows, np.asarray(target, np.float64))
    rows = known_rows(windows, target)
    granted = np.any(windows.limit > 0, axis=0)
    n = rows.sum(axis=0)
    notes = [
        f"{resource}: no row has a limit, so nothing is reserved, judged or reclaimed"
        for r, resource in enumerate(RESOURCES)
        if not granted[r]
    ]
    tier = tier_key(windows.tier)
    found: dict[str, NDArray[np.float64]] = {}
    lost: dict[str, NDArray[np.float64]] = {}
    of_tiers: dict[str, NDArray[np.float64]] = {}
    for name, budget in (("baseline", budgets.baseline), ("aggressive", budgets.aggressive)):
        lost[name] = np.zeros(len(RESOURCES))
        found[name], of_tiers[name] = np.zeros(len(RESOURCES)), np.zeros((len(TIER_LABELS), len(RESOURCES)))
        score = answers.score(name, needed, windows.limit)
        for r, resource in enumerate(RESOURCES):
            if given is not None and not np.isnan(given[r]):
                found[name][r] = of_tiers[name][:, r] = given[r]
                continue
            if not granted[r]:
                found[name][r] = of_tiers[name][:, r] = answers.UNSET
                continue
            known = rows[:, r]
            scores = np.maximum(score[known, r], answers.LOWEST)
            lost[name][r] = (scores > answers.HIGHEST).mean()
            np.minimum(scores, answers.HIGHEST, out=scores)
            found[name][r] = _least(scores, budget)
            if by_tier:
                of_tiers[name][:, r] = _of_tiers(scores, tier[known], budget)
            if lost[name][r] > budget:
                notes.append(
                    f"{resource}, {name}: even the highest setting violates in {100 * lost[name][r]:.3g}% of "
                    f"{n[r]} rows, above the budget of {100 * budget:.3g}%"
                )
            if n[r] * budget < 1:
                notes.append(
                    f"{resource}, {name}: a budget of {100 * budget:.3g}% of {n[r]} rows is less than one row; "
                    "none may violate"
                )
    settings = answers.settings(found, of_tiers if by_tier else None)
    if given is not None:
        fixed = tuple(not math.isnan(score) for score in given)
        settings = {name: replace(of, given=fixed) if isinstance(of, Price) else of for name, of in settings.items()}
    held = guarded_reservations(answers, windows, settings)
    judged = {k: _judged(v, windows.limit, target) for k, v in held.items()}
    counted = np.where(rows, windows.limit, np.nan)
    lost["medium"] = np.maximum(lost["baseline"], lost["aggressive"])
    return Calibration(
        settings=settings,
        violation={k: tuple(_share(*of).tolist()) for k, of in judged.items()},
        violation_by_tier={k: _by_tier(*of, tier) for k, of in judged.items()},
        lost={k: tuple(v.tolist()) for k, v in lost.items()},
        reclaimed={k: tuple(reclaimed_share(v, counted).tolist()) for k, v in held.items()},
        rows=tuple(int(k) for k in n),
        notes=tuple(notes),
    )


def guarded_reservations(
    answers: Answers, windows: Windows, settings: Mapping[str, Setting]
) -> dict[str, NDArray[np.float64]]:
    """Return what is reserved under each of the three margins, shape (n, n_resources) each, in trace units."""
    return {name: guarded_amounts(answers.under(settings, name, windows), windows) for name in MARGIN_NAMES}


def _by_tier(
    known: NDArray[np.bool_], above: NDArray[np.bool_], tier: NDArray[np.int64]
) -> dict[str, tuple[float, ...]]:
    """Return ``Calibration.violation_by_tier`` of one margin from ``_judged``; ``tier``, shape (n,), counts from 0."""
    n, violations = (np.stack([np.bincount(tier, of, len(TIER_LABELS)) for of in one.T], 1) for one in (known, above))
    share = np.divide(violations, n, out=np.full(n.shape, np.nan), where=n >= TIER_ROWS)
    return {TIER_LABELS[t]: tuple(share[t].tolist()) for t in np.unique(tier)}


def _of_tiers(scores: NDArray[np.float64], tier: NDArray[np.int64], budget: float) -> NDArray[np.float64]:
    """Return the score of each tier, shape (n_tiers,), from the scores of rows and their tiers, shape (n,)."""
    found = np.empty(len(TIER_LABELS))
    small = np.bincount(tier, minlength=len(TIER_LABELS)) * budget < TIER_VIOLATIONS
    together = scores[small[tier]]
    # too few rows even together: they get the score of all
    found[small] = _least(together if len(together) * budget >= TIER_VIOLATIONS else scores, budget)
    for t in np.flatnonzero(~small):
        found[t] = _least(scores[tier == t], budget)
    return found


def _least(scores: NDArray[np.float64], budget: float) -> float:
    """Return the least setting with which at most the budget's rows violate."""
    allowed = min(int(budget * len(scores) * (1 + 1e-12)), len(scores) - 1)
    return float(np.partition(scores, len(scores) - 1 - allowed)[len(scores) - 1 - allowed])


Key = TypeVar("Key")


def merit(lost: float, reclaimed: float, budget: float) -> tuple[float, float]:
    """Return what is compared of settings to choose among them, the largest first.

    Settings that keep the budget come first, by what they reclaim; then those by which the fewest rows are ``lost``
    (``Calibration``). What is reclaimed where answers are nothing is reclaimed by violating.
    """
    return (-lost if lost > budget * (1 + 1e-12) else 0.0), -math.inf if math.isnan(reclaimed) else reclaimed


def choose_best(candidates: Mapping[Key, Calibration], margin: str, budget: float) -> list[Key]:
    """Return, per resource, the candidate of the largest ``merit`` under a margin; the first one of equals."""
    of = [
        {key: merit(one.lost[margin][r], one.reclaimed[margin][r], budget) for key, one in candidates.items()}
        for r in range(len(RESOURCES))
    ]
    return [max(candidates, key=merits.__getitem__) for merits in of]
