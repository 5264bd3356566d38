"""Encodes amounts, quantiles, rules and names of answers as JSON models; the same for stateless and stateful ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from reclaim.data.schema import RESOURCES
from reclaim.features.groups import TIER_LABELS
from reclaim.features.targets import TARGETS
from reclaim.serving.wire.cell_schemas import CellPrice, MachineMargin
from reclaim.serving.wire.schemas import ModelName, Quantiles, ResourceRules, Resources
from reclaim.training.estimators.base import RULES
from reclaim.training.margins.margin import MARGIN_NAMES
from reclaim.training.margins.online import BUDGETED

if TYPE_CHECKING:
    from reclaim.serving.cell.following import Prices
    from reclaim.serving.cell.machine_peaks import MachineMargins
    from reclaim.serving.models.loader import LoadedModel

SERVED_RULES: Final = (*RULES, "stale", "opt_out")
"""Rules of the estimators, and the two of the service: no news for too long, and a collection that opted out."""
STALE, OPT_OUT = len(RULES), len(RULES) + 1
_PEAK_LEVEL: Final = 0.99
"""Quantile level of the single number for peak CPU, or the nearest level of the model."""
_LIMIT_OF_TARGET: Final = (0, 1, 0)
"""Resource whose limit a target is a share of: peak CPU is over the CPU limit."""


def model_name(model: LoadedModel) -> ModelName:
    """Return name and version of a model."""
    return ModelName(name=model.name, version=model.version)


def resources(amounts: NDArray[np.float64] | tuple[float, ...]) -> Resources:
    """Return amounts by resource; shape (n_resources,), finite."""
    return Resources(**{resource: float(v) for resource, v in zip(RESOURCES, amounts, strict=True)})


def rules(codes: NDArray[np.uint8]) -> ResourceRules:
    """Return rules by resource; codes are positions in ``SERVED_RULES``, shape (n_resources,)."""
    names = dict(zip(RESOURCES, (SERVED_RULES[code] for code in codes), strict=True))
    return ResourceRules(**names)  # type: ignore[arg-type]  # names of rules


def amounts_of(quantiles: NDArray[np.float32], limit: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return quantiles in the unit of the limit; quantiles (..., n_targets, n_levels), limit (..., n_resources)."""
    over: NDArray[np.float64] = limit[..., _LIMIT_OF_TARGET, None]
    return quantiles * over


def by_target(quantiles: NDArray[np.float64]) -> Quantiles:
    """Return quantiles by target, null without a forecast; quantiles (n_targets, n_levels)."""
    return Quantiles(
        **{name: q.tolist() if np.isfinite(q).all() else None for name, q in zip(TARGETS, quantiles, strict=True)}
    )


def peak_position(levels: Sequence[float]) -> int:
    """Return the position of the level that the single number for peak CPU is taken at."""
    return min(range(len(levels)), key=lambda k: abs(levels[k] - _PEAK_LEVEL))


def cell_prices(prices: Prices) -> list[CellPrice]:
    """Return the prices of a moment by margin, tier and resource."""
    out = []
    for margin in MARGIN_NAMES:
        start, now = prices.start[margin].of_tiers, prices.now[margin].of_tiers
        violated, own, budget = None, None, prices.budgets.of(margin)
        if prices.violated is not None and prices.own is not None and margin in BUDGETED:
            violated, own = (of[BUDGETED.index(margin)] for of in (prices.violated, prices.own))
        for t, tier in enumerate(TIER_LABELS):
            for r, resource in enumerate(RESOURCES):
                share = None if violated is None else finite(float(violated[t, r]))
                expected = None if own is None else finite(float(own[t, r]))
                of: dict[str, Any] = {"margin": margin, "tier": tier, "resource": resource, "budget": budget}
                out.append(CellPrice(**of, start=start[t][r], now=now[t][r], violated=share, own=expected))
    return out


def machine_margins(margins: Mapping[int, MachineMargins]) -> list[MachineMargin]:
    """Return margins of machines by their horizon in seconds, with their outcomes, by horizon, margin and resource."""
    return [
        MachineMargin(
            horizon_s=horizon_s, margin=margin, resource=resource, budget=budget, asked=float(of.asked[b, r]),
            lowered=float(of.lowered[b, r]),
            judged=int(of.judged[r]), violated=int(of.violated[b, r]),
            recent=finite(float(of.recent[b, r])), at_once=finite(float(of.at_once[b, r])),
            most_at_once=finite(float(of.most_at_once[b, r])),
        )
        for horizon_s, of in margins.items()
        for b, (margin, budget) in enumerate(of.budgets.items())
        for r, resource in enumerate(RESOURCES)
    ]  # fmt: skip


def finite(value: float) -> float | None:
    """Return a finite number, else None."""
    return value if np.isfinite(value) else None


def known_or_none(value: int) -> int | None:
    """Return a known id or time, else None."""
    return None if value < 0 else value
