"""Defines the answers of an estimator before its margin or price: calibration sets these, and a replay applies them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from reclaim.data.core.arrays import blank_records
from reclaim.data.windows import Windows
from reclaim.training.estimators.base import Estimate
from reclaim.training.margins.ladder import TOP_RUNG, Ladder, price_of, reserved_at, rung_for, rung_of
from reclaim.training.margins.margin import HIGHEST_SHARE, LOWEST_SHARE, Margin, three_margins, under
from reclaim.training.margins.own_price import Risk
from reclaim.training.margins.price import Price, three_prices

Rows = NDArray[np.int64] | NDArray[np.bool_] | slice
Setting = Margin | Price
"""The one number per resource that is set for a budget."""


class Answers(ABC):
    """Answers of an estimator to ``n`` rows, before its margin or price is set."""

    LOWEST: ClassVar[float]
    """Least score that is tried."""
    HIGHEST: ClassVar[float]
    """Largest score that is tried."""
    UNSET: ClassVar[float]
    """Score where there is nothing to set one by: no margin, but the highest price, because the lowest one reserves
    only current usage."""

    @abstractmethod
    def take(self, rows: Rows) -> Answers:
        """Return those of the chosen rows."""

    @classmethod
    @abstractmethod
    def joined(cls, parts: list[Self]) -> Self:
        """Return the answers to the rows of all parts, in the order given; the list is emptied to free them."""

    @abstractmethod
    def score(self, budget: str, need: NDArray[np.float64], limit: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the least setting with which each row reserves what it needs; shape (n, n_resources) each.

        Minus infinity where every setting does, or nothing is estimated, for then the guards give the limit. ``budget``
        is ``baseline`` or ``aggressive``.
        """

    @abstractmethod
    def settings(
        self,
        all_tiers: Mapping[str, NDArray[np.float64]],
        by_tier: Mapping[str, NDArray[np.float64]] | None,
    ) -> Mapping[str, Setting]:
        """Return the settings of the three named margins from scores.

        Parameters
        ----------
        all_tiers : mapping of budget to float64, shape (n_resources,)
        by_tier : mapping of budget to float64, shape (n_tiers, n_resources), or None
        """

    @abstractmethod
    def under(self, settings: Mapping[str, Setting], margin: str, windows: Windows) -> NDArray[np.float64]:
        """Return what is reserved under a named margin, before the guards; shape (n, n_resources)."""


@dataclass(frozen=True)
class Widened(Answers):
    """Reservations that a margin widens.

    Attributes
    ----------
    of : mapping of ``baseline`` and ``aggressive`` to Estimate
        Most estimators have one answer for both.
    """

    of: Mapping[str, Estimate]

    LOWEST = LOWEST_SHARE
    HIGHEST = HIGHEST_SHARE
    UNSET = 0.0

    @classmethod
    def alike(cls, estimate: Estimate) -> Widened:
        """Return answers that are the same for both budgets."""
        return cls(dict.fromkeys(("baseline", "aggressive"), estimate))

    def take(self, rows: Rows) -> Widened:
        """Return those of the chosen rows."""
        if self.is_alike:
            return Widened.alike(self.of["baseline"].take(rows))
        return Widened({name: estimate.take(rows) for name, estimate in self.of.items()})

    @property
    def is_alike(self) -> bool:
        """True if the answers are the same for both budgets."""
        return self.of["baseline"] is self.of["aggressive"]

    @classmethod
    def joined(cls, parts: list[Self]) -> Self:
        """Return the answers to the rows of all parts."""
        names = ("aggressive",) if all(part.is_alike for part in parts) else ("baseline", "aggressive")
        of = {
            name: Estimate(
                np.concatenate([part.of[name].reservation for part in parts]),
                np.concatenate([part.of[name].rule for part in parts]),
            )
            for name in names
        }
        parts.clear()
        return cls({"baseline": of["aggressive"]} | of)

    def score(self, budget: str, need: NDArray[np.float64], limit: NDArray[np.float64]) -> NDArray[np.float64]:  # noqa: ARG002 - a price's
        """Return the margin's share that lifts each row to its need."""
        reservation = self.of[budget].reservation
        with np.errstate(divide="ignore", invalid="ignore"):
            share = np.where(need > 0, need / reservation - 1.0, -np.inf)
        share[np.isnan(reservation)] = -np.inf
        return share

    def settings(
        self,
        all_tiers: Mapping[str, NDArray[np.float64]],
        by_tier: Mapping[str, NDArray[np.float64]] | None,
    ) -> Mapping[str, Setting]:
        """Return margins."""
        both = (Margin(name, tuple(of.tolist()), _by_tier(by_tier, name)) for name, of in all_tiers.items())
        return three_of(*both)

    def under(self, settings: Mapping[str, Setting], margin: str, windows: Windows) -> NDArray[np.float64]:
        """Return the widened reservations."""
        widened = {}
        for name, estimate in self.of.items():
            setting = settings[name]
            assert isinstance(setting, Margin)
            widened[name] = estimate.reservation * setting.factor(windows)
        return under(margin, widened)


@dataclass(frozen=True)
class Priced(Answers):
    """Reservations at every price.

    Attributes
    ----------
    ladder : Ladder
    rows : int64, shape (n,), or None
        Their ladders, where these are not all of them in order: chosen rows are not copied, as a ladder is the largest
        part of a row.
    risk : Risk or None
        Of the same ladders; for a model that solves its own price.
    """

    ladder: Ladder
    rows: NDArray[np.int64] | None = None
    risk: Risk | None = None

    LOWEST = 0.0
    HIGHEST = float(TOP_RUNG)
    UNSET = HIGHEST

    def take(self, rows: Rows) -> Priced:
        """Return those of the chosen rows."""
        if self.rows is not None:
            return replace(self, rows=self.rows[rows])
        if isinstance(rows, np.ndarray) and rows.dtype != np.bool_:
            return replace(self, rows=rows.astype(np.int64, copy=False))
        return replace(self, rows=np.arange(len(self.ladder))[rows])

    def risk_of_rows(self) -> tuple[Risk, NDArray[np.int64]] | None:
        """Return risks, and the place of each row's; None where they are not known."""
        if self.risk is None:
            return None
        return self.risk, np.arange(len(self.risk)) if self.rows is None else self.rows

    @classmethod
    def joined(cls, parts: list[Self]) -> Self:
        """Return the ladders of all parts: the memory of a part is returned when it has been copied."""
        end = sum(len(part.ladder) for part in parts)
        ladder = blank_records((end, *parts[0].ladder.shape[1:]), parts[0].ladder.dtype)
        risk = None if parts[0].risk is None else blank_records(ladder.shape, parts[0].risk.dtype)
        while parts:
            part = parts.pop()
            assert part.rows is None
            here = slice(end - len(part.ladder), end)
            ladder[here] = part.ladder
            if risk is not None and part.risk is not None:
                risk[here] = part.risk
            end = here.start
        return cls(ladder, None, risk)

    def score(self, budget: str, need: NDArray[np.float64], limit: NDArray[np.float64]) -> NDArray[np.float64]:  # noqa: ARG002 - the same ladder for both
        """Return the place on the ladder that lifts each row to its need."""
        return rung_for(self.ladder, need, limit, self.rows)

    def settings(
        self,
        all_tiers: Mapping[str, NDArray[np.float64]],
        by_tier: Mapping[str, NDArray[np.float64]] | None,
    ) -> Mapping[str, Setting]:
        """Return prices."""
        prices = {name: price_of(of) for name, of in all_tiers.items()}
        tiers = None if by_tier is None else {name: price_of(of) for name, of in by_tier.items()}
        return three_of(*(Price(name, tuple(of.tolist()), _by_tier(tiers, name)) for name, of in prices.items()))

    def under(self, settings: Mapping[str, Setting], margin: str, windows: Windows) -> NDArray[np.float64]:
        """Return the reservations at the price."""
        price = settings[margin]
        assert isinstance(price, Price)
        return reserved_at(self.ladder, price.rung(windows), windows.limit, self.rows)


def scores_of(prices: tuple[float, ...]) -> tuple[float, ...]:
    """Return the scores of prices by resource, as ``calibrate`` takes them; NaN stays NaN."""
    return tuple(rung_of(np.array(prices)).tolist())


def three_of(baseline: Setting, aggressive: Setting) -> Mapping[str, Setting]:
    """Return the three named settings of the two that have a budget."""
    if isinstance(baseline, Price) and isinstance(aggressive, Price):
        return three_prices(baseline, aggressive)
    assert isinstance(baseline, Margin)
    assert isinstance(aggressive, Margin)
    return three_margins(baseline, aggressive)


def _by_tier(by_tier: Mapping[str, NDArray[np.float64]] | None, name: str) -> tuple[tuple[float, ...], ...] | None:
    return None if by_tier is None else tuple(map(tuple, by_tier[name].tolist()))
