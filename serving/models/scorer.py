"""Scores tasks of a cell with a loaded model, and applies a price and the guards to the scores."""

from __future__ import annotations

import math
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from reclaim.data.core.arrays import room_for
from reclaim.data.core.parallel import ROWS_WORTH_A_THREAD, in_pieces
from reclaim.data.errors import ModelError
from reclaim.data.schema import RESOURCES
from reclaim.data.windows import Cell, Windows
from reclaim.features.groups import tier_key
from reclaim.features.targets import TARGETS
from reclaim.training.estimators.base import Estimate, Forecast
from reclaim.training.machines.estimator import MachineEstimator
from reclaim.training.machines.terms import N_SHARES, unknown_shares
from reclaim.training.margins.margin import MARGIN_NAMES, Budgets, guarded
from reclaim.training.margins.online import own_prices
from reclaim.training.margins.own_price import Risk
from reclaim.training.margins.price import Price
from reclaim.training.models.estimator import as_estimate
from reclaim.training.models.steps import N_RISES, NOTHING, Steps, reserved_at

if TYPE_CHECKING:
    from reclaim.serving.models.loader import LoadedModel

TASK_PARTS: Final = ("rises", "now", "quantiles", "oom")
"""Parts of ``Scores`` that answers about tasks rest on."""
MACHINE_PARTS: Final = ("shares",)
"""Those that answers about machines rest on."""
SCORED_AT_ONCE: Final = 32_768
"""Tasks to score at once: a forecast takes several kB a task while it is made."""


@dataclass(frozen=True)
class Scores:
    """Output of a model for ``n`` tasks, before any price.

    Attributes
    ----------
    rises : uint8, shape (n, n_resources, N_RISES)
    now : float32, shape (n, n_resources)
        What is reserved at each price, over the limit of the last window (``models.steps.Steps``): 62 bytes a task.
    quantiles : float32, shape (n, n_targets, n_levels)
        Over the limit of the last window, at the model's horizon.
    oom : float64, shape (n,)
        Probability of the derived out-of-memory label within that horizon.
    shares : float32, shape (n, n_resources, N_SHARES)
        What the task adds to the sums of its machine, over the limit of the last window (``machines.terms``): 112 bytes
        a task. NaN where nothing is scored; shape (n, 0, 0) where they were not requested.
    risk : Risk or None
        What the model expects of each price. Only of tasks just scored: it is not kept.
    """

    rises: NDArray[np.uint8]
    now: NDArray[np.float32]
    quantiles: NDArray[np.float32]
    oom: NDArray[np.float64]
    shares: NDArray[np.float32]
    risk: Risk | None = None

    @property
    def steps(self) -> Steps:
        """Reservations at every price."""
        return Steps(self.rises, self.now)

    @property
    def kept(self) -> tuple[NDArray[Any], ...]:
        """The arrays that are kept of a task, in the order of the fields."""
        return self.rises, self.now, self.quantiles, self.oom, self.shares

    def take(self, rows: NDArray[np.int64] | slice) -> Scores:
        """Return the chosen rows."""
        return Scores(self.rises[rows], self.now[rows], self.quantiles[rows], self.oom[rows], self.shares[rows])

    def room(self, n: int) -> Scores:
        """Return them with room for ``n`` tasks, doubling; further rows are zero and take no memory until written."""
        return Scores(*(room_for(part, n) for part in self.kept))

    @property
    def bytes_per_task(self) -> int:
        """Memory of a task."""
        return sum(part.itemsize * math.prod(part.shape[1:]) for part in self.kept)

    def put(self, rows: NDArray[np.int64], scores: Scores) -> None:
        """Replace the chosen rows."""
        for part, new in zip(self.kept, scores.kept, strict=True):
            part[rows] = new


def priced(price: Price, steps: Steps, last: Windows) -> NDArray[np.float64]:
    """Return what a price reserves of tasks before any guard, shape (n, n_resources); ``steps`` of ``Scores``."""
    return reserved_at(steps, price.rung(last), last.limit)


def reserved(price: Price, steps: Steps, last: Windows) -> Estimate:
    """Return the guarded reservations of ``n`` tasks at a price; ``steps`` of ``Scores``."""
    return guarded(as_estimate(priced(price, steps, last)), last)


def violations_of(model: LoadedModel, tier: str | None = None) -> dict[str, float]:
    """Return the violation rate of each margin on validation data, the largest over resources that were measured.

    Parameters
    ----------
    model : LoadedModel
    tier : str or None
        Rates among the tasks of that tier; for None, and for a resource with too few measured tasks, among those of all
        tiers. Margins without a measured rate are left out.
    """
    trained = model.bundle.trained
    by_tier = trained.get("violation_by_tier", {})
    out = {}
    for name, rates in trained.get("violation", {}).items():
        own = by_tier.get(name, {}).get(tier, {})
        known = [rate if own.get(r) is None else own[r] for r, rate in rates.items()]
        if name in MARGIN_NAMES and any(rate is not None for rate in known):
            out[name] = max(rate for rate in known if rate is not None)
    return out


class Scorer:
    """The same estimator as in a replay, split in two steps: score, then ``reserved`` at a price.

    Parameters
    ----------
    model : LoadedModel
    cell : Cell
    threads : int
        For large calls; answers do not depend on it.
    mean_limit : tuple of float, in the order ``schema.RESOURCES``, or None
        Of the cell's tasks; None: that of the tasks that the model was trained on.
    """

    def __init__(
        self, model: LoadedModel, cell: Cell, threads: int = 1, mean_limit: tuple[float, ...] | None = None
    ) -> None:
        self.model, self._cell = model, cell
        trained = model.bundle.mean_limit
        self.mean_limit = trained if mean_limit is None else mean_limit
        self.horizon_s, self.horizons_s = model.bundle.horizon_s, model.bundle.forecaster.horizons_s
        self.levels = model.bundle.forecaster.quantile_levels
        model.bundle.forecaster.threads = threads
        self.prices = model.bundle.prices
        self.budgets = Budgets(**model.bundle.trained.get("settings", {}).get("budgets", {}))
        self.own_price = model.bundle.portable
        known = np.isfinite(trained) & (not self.own_price)
        self.of_cell_size = not known.all()
        """True where the cell's mean limit matters: a model of other cells, or of several datasets, has none."""
        of_machines = np.where(known, trained, self.mean_limit)
        of_tasks = self.mean_limit if self.own_price else trained  # the amounts by which the prices were set
        self.machines = model.bundle.machine_estimator(mean_limit=tuple(of_machines.tolist()))
        self._estimator = model.bundle.bare_estimator(mean_limit=of_tasks, cell=cell)
        self._threads = threads

    def resized(self, mean_limit: tuple[float, ...]) -> Scorer:
        """Return the scorer for a cell whose tasks have another mean limit; every task is to be scored again."""
        return Scorer(self.model, self._cell, self._threads, mean_limit)

    def priced_for(self, windows: Windows, risk: Risk, age_us: int) -> Scorer:
        """Return the scorer at its own price for tasks that were just scored, of a cell of an age; (n, …) each."""
        made = copy(self)
        made.prices = own_prices(self.prices, self.budgets, tier_key(windows.tier), risk, age_us)
        return made

    def nothing(self, n: int) -> Scores:
        """Return empty scores of ``n`` tasks."""
        return Scores(
            np.full((n, len(RESOURCES), N_RISES), NOTHING, np.uint8),
            np.zeros((n, len(RESOURCES)), np.float32),
            np.full((n, len(TARGETS), len(self.levels)), np.nan, np.float32),
            np.full(n, np.nan),
            unknown_shares(n),
        )

    def score(self, x: NDArray[np.float32], last: Windows, *, of_cell: bool = True) -> Scores:
        """Return the model's scores of ``n`` tasks from their features after their last windows.

        Parameters
        ----------
        x : float32, shape (n, n_features)
        last : Windows
            The ``n`` last windows.
        of_cell : bool
            Whether to compute what a cell needs, too: shares, which take a seventh of the time, and risks.
        """
        steps, risk, forecast = self._estimator.steps(x, last, risks=of_cell)
        quantiles, oom = forecast.at(self.horizon_s)
        shares = self._shares(self.machines, forecast, x, last) if of_cell else np.zeros((len(oom), 0, 0), np.float32)
        return Scores(*steps, quantiles, oom, shares, risk)

    def _shares(
        self, machines: MachineEstimator, forecast: Forecast, x: NDArray[np.float32], last: Windows
    ) -> NDArray[np.float32]:
        out = np.zeros((len(x), len(RESOURCES), N_SHARES), np.float32)

        def make(piece: slice) -> None:
            machines.shares(forecast.take(piece), x[piece], last.take(piece), out[piece])

        if len(x) < ROWS_WORTH_A_THREAD:
            return machines.shares(forecast, x, last, out)
        in_pieces(make, len(x), self._threads)
        return out

    def machines_over(self, horizon_s: int) -> MachineEstimator:
        """Return the estimator of machines over a horizon, in seconds; ``machines`` over that of the reservations."""
        if horizon_s == self.machines.horizon_s:
            return self.machines
        return self.model.bundle.machine_estimator(horizon_s=horizon_s, mean_limit=self.machines.mean_limit)

    def shares_over(self, horizon_s: int, x: NDArray[np.float32], last: Windows) -> NDArray[np.float32]:
        """Return the ``shares`` of ``n`` tasks over another horizon than that of the reservations; as for ``score``."""
        return self._shares(self.machines_over(horizon_s), self._estimator.forecast(x, last, horizon_s), x, last)

    def within_budget(self, budget: float, tier: str | None = None) -> str:
        """Return the margin that reclaims most among those within a budget on validation data.

        Parameters
        ----------
        budget : float
            Share of task-windows that may exceed their reservation within the horizon, for every resource that was
            measured.
        tier : str or None
            Tier of the task-windows, as for ``violations_of``; None: all tiers together.

        Raises
        ------
        ModelError
            No margin kept the budget, or the model has no such rates.
        """
        kept = violations_of(self.model, tier)
        for name in reversed(MARGIN_NAMES):
            if name in kept and kept[name] <= budget:
                return name
        said = ", ".join(f"{name} {rate:.3g}" for name, rate in kept.items()) or "the model does not say"
        whose = "" if tier is None else f" among tasks of tier {tier}, or of all tiers where it has too few,"
        raise ModelError(f"no margin kept a budget of {budget:g}{whose} on validation data ({said})")
