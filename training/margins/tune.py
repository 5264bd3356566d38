"""Tunes statistical estimators: on validation rows, the settings that reclaim most within a violation budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from reclaim.data.core.state import MADE_BY, memory_of, state_of
from reclaim.data.schema import RESOURCES
from reclaim.data.windows import Windows, with_demand
from reclaim.training.estimators.base import STATISTIC, Estimate, Estimator, Settings
from reclaim.training.estimators.registry import build_estimator
from reclaim.training.margins.answers import Widened
from reclaim.training.margins.calibrate import calibrate, choose_best
from reclaim.training.margins.margin import NO_MARGIN, Budgets, Margin

Tuning = Mapping[str, tuple[Settings, ...]]
"""Settings of an estimator for ``baseline`` and ``aggressive``, of each of ``schema.RESOURCES``."""

_BUDGETS: Final = ("baseline", "aggressive")


def choose_settings(
    answers: Sequence[NDArray[np.float64]],
    candidates: Sequence[Settings],
    windows: Windows,
    target: NDArray[np.float64],
    budgets: Budgets | None = None,
) -> Tuning:
    """Return, per budget and resource, the candidate that reclaims most under the margin that keeps the budget.

    Parameters
    ----------
    answers : sequence of float64 arrays, shape (n, n_resources)
        Answers of each candidate to ``n`` validation rows, before any margin.
    candidates : sequence of Settings
        Of equals the first one is chosen.
    windows, target, budgets
        As for ``calibrate``.
    """
    rule, windows = np.full(target.shape, STATISTIC, np.uint8), with_demand(windows)
    tried = {
        k: calibrate(Widened.alike(Estimate(answer, rule)), windows, target, budgets)
        for k, answer in enumerate(answers)
    }
    of = asdict(budgets or Budgets())
    return {name: tuple(candidates[k] for k in choose_best(tried, name, of[name])) for name in _BUDGETS}


class TunedEstimator(Estimator):
    """A statistical estimator with the settings that were chosen for each budget and resource.

    Each different setting is an estimator of its own; an answer takes each resource from the one chosen for it.

    Parameters
    ----------
    name : str
        One of ``registry.ESTIMATORS``.
    tuning : Tuning
    margins : mapping of margin name to Margin, or None
        What is added to the answer for each budget; None adds nothing.
    margin : str
        One of ``MARGIN_NAMES``; see ``margin.under``.
    """

    def __init__(
        self, name: str, tuning: Tuning, margins: Mapping[str, Margin] | None = None, margin: str = "baseline"
    ) -> None:
        self.name = name
        self.tuning = {budget: tuple(map(dict, tuning[budget])) for budget in _BUDGETS}
        self.margins = dict.fromkeys(_BUDGETS, NO_MARGIN) if margins is None else dict(margins)
        self.margin = margin
        different: list[Settings] = []
        for settings in (*self.tuning["baseline"], *self.tuning["aggressive"]):
            if settings not in different:
                different.append(settings)
        self._parts = [build_estimator(name, settings) for settings in different]
        self._part = {budget: [different.index(one) for one in chosen] for budget, chosen in self.tuning.items()}

    def update(self, slot: NDArray[np.int64], windows: Windows) -> Estimate:
        """Take windows and answer for each under the margin."""
        said = self.answer_each(slot, windows)
        return Estimate(said.under(self.margins, self.margin, windows), said.of["aggressive"].rule)

    def answer_each(self, slot: NDArray[np.int64], windows: Windows) -> Widened:
        """Take windows and return the answer for each budget, before any margin."""
        for part in self._parts:
            part.threads = self.threads
        said = [part.update(slot, windows) for part in self._parts]
        found = {}
        for budget, chosen in self._part.items():
            reservation, rule = (
                np.stack([getattr(said[k], field)[:, r] for r, k in enumerate(chosen)], axis=1)
                for field in ("reservation", "rule")
            )
            found[budget] = Estimate(reservation, rule)
        return Widened(found)

    def state(self) -> dict[str, NDArray[Any]]:
        """Return what its parts remember, each under its number."""
        parts = {f"{k} {name}": of for k, part in enumerate(self._parts) for name, of in part.state().items()}
        return state_of(self._made_by, {}) | {name: of for name, of in parts.items() if not name.endswith(MADE_BY)}

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Let its parts continue there; ``ConfigError`` where another kind, other settings or other code made it."""
        memory_of(self._made_by, {}, state)
        for k, part in enumerate(self._parts):
            made_by, mine = {MADE_BY: part.state()[MADE_BY]}, f"{k} "
            part.restore(made_by | {n.removeprefix(mine): of for n, of in state.items() if n.startswith(mine)})


def tuning_facts(tuning: Tuning) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the settings by budget and resource for ``results.json``."""
    return {
        budget: {
            name: {key: list(value) if isinstance(value, tuple) else value for key, value in one.items()}
            for name, one in zip(RESOURCES, chosen, strict=True)
        }
        for budget, chosen in tuning.items()
    }
