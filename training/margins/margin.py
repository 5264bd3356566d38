"""Defines margins and the guards around an estimate: the one place where a margin is added."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Final

import numba
import numpy as np
from numpy.typing import NDArray

from reclaim.data.core.jit import LENT
from reclaim.data.errors import ConfigError
from reclaim.data.schema import RESOURCES
from reclaim.data.windows import Windows, demand
from reclaim.features.groups import TIER_LABELS, tier_key
from reclaim.training.estimators.base import CAP, JUMP, MODEL, STARTUP, UNKNOWN, Estimate, Estimator, Wrapper


@dataclass(frozen=True)
class Budgets:
    """Shares of task-windows that may violate."""

    baseline: float = 0.001
    """Share of the rows whose demand over the horizon exceeds the reservation, per resource, under that margin."""
    aggressive: float = 0.01
    """The same under the aggressive margin."""

    def __post_init__(self) -> None:
        if not 0 < self.baseline <= self.aggressive < 1:
            raise ConfigError(
                f"baseline and aggressive must satisfy 0 < baseline <= aggressive < 1, got {self.baseline} and "
                f"{self.aggressive}"
            )

    def of(self, margin: str) -> float | None:
        """Return the budget of a named margin; None for one that has none, as ``medium``."""
        return asdict(self).get(margin)

    @property
    def by_margin(self) -> Mapping[str, float]:
        """The shares by the name of the margin; ``medium``, to which none is promised, has the geometric mean."""
        return {
            "baseline": self.baseline,
            "medium": math.sqrt(self.baseline * self.aggressive),
            "aggressive": self.aggressive,
        }


MARGIN_NAMES: Final = ("baseline", "medium", "aggressive")
"""Widest and safest first, as in Borg's experiment (EuroSys'15, Figure 12)."""

LOWEST_SHARE: Final = -0.95
"""Narrowest margin that is tried: a twentieth of the estimator's answer."""
HIGHEST_SHARE: Final = 1e3
"""Widest margin that is tried: in effect the limit, for every task with any usage."""
STARTUP_HOLD_S: Final = 300.0
"""Time in seconds for which a new task keeps its limit, to let start-up transients pass (EuroSys'15, section 5.5)."""


def check_values(
    whose: str, what: str, of_all: tuple[float, ...], by_tier: tuple[tuple[float, ...], ...] | None, *, least: float
) -> None:
    """Raise ConfigError where there is not one finite value of ``what`` for each resource, in every tier if by tier."""
    if by_tier is not None and len(by_tier) != len(TIER_LABELS):
        raise ConfigError(f"{whose}: expected {len(TIER_LABELS)} tiers, got {len(by_tier)}")
    for values in (of_all, *(by_tier or ())):
        if len(values) != len(RESOURCES):
            raise ConfigError(f"{whose}: expected one {what} for each of {RESOURCES}, got {values}")
        for resource, value in zip(RESOURCES, values, strict=True):
            if not least <= value < math.inf:
                raise ConfigError(f"{whose}: the {resource} {what} must be at least {least}, got {value}")


@dataclass(frozen=True)
class Margin:
    """Addition to a prediction, as a share of it, per resource.

    Attributes
    ----------
    name : str
    share : tuple of float, in the order ``schema.RESOURCES``
        0.15 adds 15 %; below zero where the bare estimator is more careful than the budget requires.
    by_tier : tuple of tuple of float, or None
        The same for each of ``groups.TIER_LABELS``; None: ``share`` holds for all tasks.
    """

    name: str
    share: tuple[float, ...]
    by_tier: tuple[tuple[float, ...], ...] | None = None
    rate: ClassVar[float] = 0.5
    """Rate at which a margin follows the workload (``online.OnlineMargins``). At 0.1 it took weeks to follow a drift,
    at 1 the margin swung and reclaimed 2 to 3 points of the limit less."""

    def __post_init__(self) -> None:
        check_values(f"margin {self.name!r}", "share", self.share, self.by_tier, least=-1)

    def factor(self, windows: Windows) -> NDArray[np.float64]:
        """Return what a prediction is multiplied with; float64, shape (n_resources,) or (n, n_resources)."""
        if self.by_tier is None:
            return 1.0 + np.array(self.share)
        shares: NDArray[np.float64] = 1.0 + np.array(self.by_tier)
        return shares[tier_key(windows.tier)]

    @property
    def bounds(self) -> NDArray[np.float64]:
        """Least and largest logarithm that ``moved`` is for; shape (2, n_tiers, n_resources)."""
        log = np.log1p([LOWEST_SHARE, HIGHEST_SHARE])
        return np.broadcast_to(log[:, None, None], (2, len(TIER_LABELS), len(RESOURCES)))

    def moved(self, log: NDArray[np.float64]) -> Margin:
        """Return it with what a prediction is multiplied with raised by a logarithm, shape (n_tiers, n_resources)."""
        shares = np.broadcast_to(self.share if self.by_tier is None else self.by_tier, log.shape)
        return replace(self, by_tier=tuple(map(tuple, ((1.0 + shares) * np.exp(log) - 1.0).tolist())))


NO_MARGIN: Final = Margin("none", (0.0,) * len(RESOURCES))
"""Adds nothing."""


def three_margins(baseline: Margin, aggressive: Margin) -> Mapping[str, Margin]:
    """Return the three named margins; ``medium`` is exactly half way between the other two."""
    tiers = None
    if baseline.by_tier is not None and aggressive.by_tier is not None:
        tiers = tuple(map(_half_way, baseline.by_tier, aggressive.by_tier))
    medium = Margin("medium", _half_way(baseline.share, aggressive.share), tiers)
    return dict(zip(MARGIN_NAMES, (baseline, medium, aggressive), strict=True))


def _half_way(a: tuple[float, ...], b: tuple[float, ...]) -> tuple[float, ...]:
    return tuple((x + y) / 2 for x, y in zip(a, b, strict=True))


def under(margin: str, bare: Mapping[str, NDArray[np.float64]]) -> NDArray[np.float64]:
    """Return what is reserved under a named margin, given the reservations of ``baseline`` and ``aggressive``.

    A wider margin never reserves less: the baseline is the larger of the two, and ``medium`` lies half way between.
    """
    aggressive = bare["aggressive"]
    baseline = np.maximum(bare["baseline"], aggressive)
    return {"baseline": baseline, "medium": (baseline + aggressive) / 2, "aggressive": aggressive}[margin]


@numba.njit(inline="always")
def guard(answer: float, now: float, limit: float, young: bool) -> Any:
    """Return what is reserved of an answer: the one rule of all guards, for kernels.

    No less than the last window demanded (``now``; EuroSys'15: "rapidly increased if the usage exceeds it"), no more
    than the limit, and the limit while the task's run is young. NaN where the answer is; a bound that is NaN bounds
    nothing.
    """
    return limit if young else min(max(answer, now), limit)


def young_runs(windows: Windows) -> NDArray[np.bool_]:
    """Return whether the run of each row began less than ``STARTUP_HOLD_S`` ago; shape (n,).

    A run of unknown start (``scheduled_us``) is not young: estimators answer with the limit until they have
    seen enough.
    """
    return (windows.scheduled_us > 0) & (windows.end_us - windows.scheduled_us < STARTUP_HOLD_S * 1e6)


def guarded(estimate: Estimate, windows: Windows) -> Estimate:
    """Return the estimate as jump, cap and start-up hold leave it; ``n`` rows each.

    A task without an answer gets its limit.
    """
    reservation = np.array(estimate.reservation, np.float64, order="C")
    rule = np.array(estimate.rule, np.uint8, order="C")
    limit = np.array(windows.limit, np.float64, order="C")
    _guard_rows(demand(windows), limit, young_runs(windows), reservation, rule)
    return Estimate(reservation, rule, estimate.forecast)


def guarded_amounts(bare: NDArray[np.float64], windows: Windows) -> NDArray[np.float64]:
    """Return only the reservations of ``guarded``, from bare ones; shape (n, n_resources) each."""
    return guarded(Estimate(bare, np.full(bare.shape, MODEL, np.uint8)), windows).reservation


@numba.njit(**LENT)
def _guard_rows(
    now: Any,  # (n, R) float64
    limit: Any,  # (n, R) float64
    young: Any,  # (n,) bool
    reservation: Any,  # (n, R) float64, in: the answers, out: what is reserved
    rule: Any,  # (n, R) uint8
) -> None:
    for i in range(len(reservation)):
        for r in range(reservation.shape[1]):
            answer, most = reservation[i, r], limit[i, r]
            held = young[i] and not np.isnan(most)
            reservation[i, r] = guard(answer, now[i, r], most, held)
            if held:
                rule[i, r] = STARTUP
            elif np.isnan(reservation[i, r]):
                reservation[i, r] = most
                rule[i, r] = UNKNOWN
            elif max(answer, now[i, r]) > most:
                rule[i, r] = CAP
            elif now[i, r] > answer:
                rule[i, r] = JUMP


class Guarded(Wrapper):
    """Margin, jump, cap and start-up hold around a bare estimator: what is replayed and what is served."""

    def __init__(self, base: Estimator, margin: Margin) -> None:
        super().__init__(base)
        self.margin = margin

    def adjust(self, estimate: Estimate, windows: Windows) -> Estimate:
        """Multiply by one plus the margin, and guard."""
        widened = estimate.reservation * self.margin.factor(windows)
        return guarded(Estimate(widened, estimate.rule, estimate.forecast), windows)
