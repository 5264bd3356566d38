"""Experiment "what if": the fewest machines that run a workload within a budget of kills and waiting."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from reclaim.data.errors import ConfigError
from reclaim.replay.closed_loop.foreseen import ByMachine, Placing
from reclaim.replay.closed_loop.outcome import DEFINITIONS, mean_of, summary
from reclaim.replay.closed_loop.simulate import Scheduling, simulate
from reclaim.replay.closed_loop.workload import CellMachines, Workload, machines_at, machines_of, workload_of
from reclaim.replay.experiment import Experiment, Measured, Source
from reclaim.replay.experiments.what_if.page import (
    COLUMNS,
    KILLS,
    PENDING,
    against_machines,
    page,
    runs,
    summary_table,
)
from reclaim.replay.open_loop.estimates import LIMIT, Estimates, estimate_all
from reclaim.replay.open_loop.history import current_reservations
from reclaim.replay.open_loop.machines import IN_A_LOOP_DEFINITION, MachineContenders, sum_of
from reclaim.replay.open_loop.period import period_facts
from reclaim.replay.settings import ReplayConfig
from reclaim.training.margins.margin import MARGIN_NAMES

GRID: Final = (0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.4)
"""Sizes that every curve has, as shares of the cell's machines times the growth of the workload."""


@dataclass(frozen=True)
class WhatIfConfig(ReplayConfig):
    """Settings of the what-if experiment."""

    estimators: tuple[str, ...] = ("borg", "autopilot-percentile")
    """Estimators without a model, as in ``ReplayConfig``; the run without reclamation is always included."""
    margin: str = "medium"
    """The margin of all of them; one of ``margin.MARGIN_NAMES``."""
    oom_budget: float = 5.0
    """Tasks killed out of memory, per 1,000 task-days, that are accepted: at 5 a task dies once in 200 days."""
    pending_budget: float = 0.01
    """Share of task-time spent waiting for a machine that is accepted."""
    machines: tuple[int, ...] = ()
    """Numbers of machines to try; none: the fewest within the budgets are searched for."""
    orders: int = 3
    """Orders of the machines in which each number of them is run; the means are compared with the budgets. A few days
    of a cell have so few kills that in one order alone they come and go."""
    growth: float = 1.0
    """Size of the workload: 1.2 clones a fifth of its collections, 0.8 leaves a fifth of them out."""
    scheduling: Scheduling = field(default_factory=Scheduling)
    """Settings of the scheduler of the closed loop."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.margin not in MARGIN_NAMES:
            raise ConfigError(f"margin must be one of {', '.join(MARGIN_NAMES)}, got {self.margin}")
        if not 0 <= self.oom_budget < float("inf"):
            raise ConfigError(f"oom_budget must be 0 or more kills per 1,000 task-days, got {self.oom_budget}")
        if not 0 <= self.pending_budget <= 1:
            raise ConfigError(f"pending_budget must be between 0 and 1, got {self.pending_budget}")
        if any(n < 1 for n in self.machines):
            raise ConfigError(f"machines must be at least 1, got {min(self.machines)}")
        if self.orders < 1:
            raise ConfigError(f"orders must be at least 1, got {self.orders}")
        if not 0 < self.growth < float("inf"):
            raise ConfigError(f"growth must be above 0, got {self.growth}")


Run = Callable[[int], dict[str, float | None]]
"""Returns ``over_orders`` of a contender's runs on a number of machines."""
Tried = dict[int, dict[str, float | None]]
"""The same by number of machines."""


class Cells:
    """Runs a workload on any number of a cell's machines, in several orders of these.

    Smaller cells are the first machines of a permutation; all of them are the trace's own cell, and larger ones have
    clones of its machines in the same order. The permutations are drawn by the seed and those that follow it.

    Parameters
    ----------
    workload : Workload
        Its masks are those of ``machines``.
    machines : CellMachines
    config : WhatIfConfig
    """

    def __init__(self, workload: Workload, machines: CellMachines, config: WhatIfConfig) -> None:
        self._workload = workload
        self._orders = [machines.subset(len(machines), config.seed + k) for k in range(config.orders)]
        self._scheduling, self._horizon_s = config.scheduling, config.horizon_s

    def run(
        self, n: int, reserved: NDArray[np.float64], by_machine: ByMachine | None = None
    ) -> dict[str, float | None]:
        """Return ``over_orders`` of runs on ``n`` machines.

        Parameters
        ----------
        n : int
        reserved : float64, shape (n_rows, n_resources)
            The current reservation when each window of the workload's tape begins.
        by_machine : ByMachine or None
            As in ``simulate``.
        """
        return over_orders([self._in_order(n, *of, reserved, by_machine) for of in self._orders])

    def _in_order(
        self, n: int, machines: CellMachines, order: NDArray[np.int64], reserved: NDArray[np.float64],
        by_machine: ByMachine | None,
    ) -> dict[str, float | None]:  # fmt: skip
        times = -(-n // len(machines))
        first = machines.tiled(times).take(np.arange(n))
        masks = np.ascontiguousarray(np.tile(self._workload.masks[:, order], (1, times))[:, :n])
        return summary(
            simulate(
                replace(self._workload, masks=masks), first, reserved[None], scheduling=self._scheduling,
                by_machine=by_machine, horizon_s=self._horizon_s,
            )
        )  # fmt: skip


def over_orders(runs: Sequence[Mapping[str, float | None]]) -> dict[str, float | None]:
    """Return the means of ``outcome.summary`` of runs, with the range of the numbers that have a budget.

    ``KEY_low`` and ``KEY_high`` are the least and the most of any run.
    """
    found: dict[str, float | None] = mean_of(runs)
    for key in (KILLS, PENDING):
        known = [value for run in runs if (value := run[key]) is not None]
        found |= {f"{key}_low": min(known, default=None), f"{key}_high": max(known, default=None)}
    return found


def measure(source: Source, config: WhatIfConfig) -> Measured:
    """Run the test period's workload on fewer and more machines, under every estimator and without reclamation.

    Raises
    ------
    ConfigError
        The trace has no machines, or ``growth`` leaves no collection of it.
    HistoryTooShortError
        The validation or the test period is shorter than the horizon.
    """
    machines_at(source.dataset, 0)  # a trace without machines is refused before anything is estimated
    estimates = estimate_all(source, config)
    slots = estimates.period.slots
    machines = machines_of(source.dataset, slots.first_us, slots.stop_us, estimates.period.share)
    workload = workload_of(source, estimates.period, machines)
    grown = workload if config.growth == 1 else workload.grown(config.growth, config.seed)
    cells = Cells(grown, machines, config)
    by_machine = MachineContenders.set_on_validation(source, estimates, config)
    contenders = _reservations(estimates, by_machine, workload, config)
    names = [*contenders, *(name for name in by_machine.in_a_loop if name not in contenders)]

    placing = Placing(by_machine, workload.row, (config.budgets.by_margin[config.margin],))

    def run_of(name: str) -> Run:
        if name in contenders:
            return partial(cells.run, reserved=contenders[name])
        placed = placing.by_machine(name)
        assert placed is not None
        together, alone = placed
        return partial(cells.run, reserved=alone[0], by_machine=together)

    with source.timed("closed loop"):
        tried = _try_all(source, names, run_of, len(machines), config)
    answers = [
        {
            "name": name,
            "kind": LIMIT if name == LIMIT else by_machine.in_a_loop.get(name) or source.kind(name),
            "margin": "none" if name == LIMIT else config.margin,
            "fewest": fewest_within(points, config),
            "points": [{"machines": n, "share": n / len(machines), **points[n]} for n in sorted(points)],
        }
        for name, points in tried.items()
    ]
    results = {
        "dataset": period_facts(estimates.period),
        "asked": {
            "oom_budget": config.oom_budget,
            "pending_budget": config.pending_budget,
            "peaks_budget": config.budgets.by_margin[config.margin],
            "growth": config.growth,
            "orders": config.orders,
            "searched": not config.machines,
        },
        "cell": {"machines": len(machines), "runs": len(grown.runs)},
        "estimators": answers,
    }
    return Measured(results, definitions(config))


def within(point: Mapping[str, float | None], config: WhatIfConfig) -> bool:
    """Return whether a run keeps both budgets; one in which no task ran keeps none."""
    kills, pending = point[KILLS], point[PENDING]
    if kills is None or pending is None:
        return False
    return kills <= config.oom_budget and pending <= config.pending_budget


def fewest_within(tried: Mapping[int, Mapping[str, float | None]], config: WhatIfConfig) -> int | None:
    """Return the fewest machines tried that keep the budgets, as do all larger numbers tried; None where none do."""
    fewest = None
    for n in sorted(tried, reverse=True):
        if not within(tried[n], config):
            break
        fewest = n
    return fewest


def _try_all(
    source: Source, names: Sequence[str], run_of: Callable[[str], Run], cell: int, config: WhatIfConfig
) -> dict[str, Tried]:
    """Return each contender's runs on each number of machines named; else on the grid and in a search for the fewest.

    Every run is a job; then every search is one, as each of its runs depends on the one before.
    """
    numbers = config.machines or tuple(max(1, round(share * config.growth * cell)) for share in GRID)
    numbers = tuple(dict.fromkeys(numbers))
    runs = ((run, n) for name in names for run in [run_of(name)] for n in numbers)
    with source.engine.pool() as pool:
        with closing(pool.each_call(runs)) as results:
            summaries = iter(tqdm(results, "what if", len(names) * len(numbers), unit="run", disable=None))
            tried = {name: {n: next(summaries) for n in numbers} for name in names}
        if config.machines:
            return tried
        searches = ((partial(_search, run_of(name), config), tried[name]) for name in names)
        with closing(pool.each_call(searches)) as results:
            found = tqdm(results, "searching", len(names), unit="estimator", disable=None)
            return dict(zip(names, found, strict=True))


def _search(run: Run, config: WhatIfConfig, tried: Tried) -> Tried:
    """Return what was tried and the runs of a search for the fewest machines that keep the budgets."""
    tried = dict(tried)
    while (high := fewest_within(tried, config)) is not None:
        low = max((n for n in tried if n < high), default=0)
        if high - low <= 1:
            break
        middle = (low + high) // 2
        tried[middle] = run(middle)
    return tried


def _reservations(
    estimates: Estimates, by_machine: MachineContenders, workload: Workload, config: WhatIfConfig
) -> dict[str, NDArray[np.float64]]:
    """Return the current reservation at every row of the tape by estimator, ``LIMIT`` last; 0 where unknown."""

    def current(reservations: Mapping[str, NDArray[np.float64]]) -> NDArray[np.float64]:
        return current_reservations(reservations[config.margin], estimates.history)[workload.row]

    reserved = {name: current(estimates.reservations(name)) for name in estimates.answers if name != LIMIT}
    summed = map(sum_of, by_machine.sums)
    reserved |= {name: current(by_machine.reserved_by(name, estimates)) for name in summed}
    reserved[LIMIT] = estimates.history.windows.limit[workload.row]
    return {name: np.nan_to_num(of, copy=False) for name, of in reserved.items()}


def definitions(config: WhatIfConfig) -> dict[str, str]:
    """Return what the numbers of the results mean."""
    return {
        "fits": (
            f"The replay kills no more than {config.oom_budget:g} tasks out of memory per 1,000 task-days, above "
            f"their own limit or for the machine's sake, and no more than {config.pending_budget:.2%} of the task-time "
            "is spent waiting. Runs that the trace itself ended out of memory end so under any estimator and are not "
            "counted."
        ),
        "fewest machines": (
            "The smallest of the numbers named that fits, as does every larger one named; nothing is known of others, "
            "so that it says nothing of a saving."
            if config.machines
            else "The smallest number tried that fits, as does every larger number tried; one machine fewer was tried "
            "and does not fit. Numbers in between were not all tried, and what fits need not do so in order: kills in "
            "particular come and go."
        ),
        "machines": (
            "Smaller cells are the first machines of a permutation of the trace's own; larger ones clone them in the "
            "same order. They come, go and change as the trace's do."
        ),
        "orders": (
            f"Each number of machines was run in {config.orders} permutations, drawn by seeds from {config.seed} on. "
            "What is shown, and compared with the budgets, are the means of these runs."
        ),
        "growth": (
            "Whole collections drawn by the seed are cloned, or left out where it is below 1; a clone is submitted "
            "with its original."
        ),
        "no reclamation": "Every task's limit is reserved for it.",
        "sum of tasks; learned machine": IN_A_LOOP_DEFINITION,
        **DEFINITIONS,
    }


EXPERIMENT: Final = Experiment(
    name="what-if",
    title="What if: would the workload fit, on how many machines",
    version=15,
    config=WhatIfConfig,
    measure=measure,
    page=page,
    summary=lambda results: summary_table(results).without(
        "margin", "of the cell", "kills per 1,000 task-days", "peaks passed"
    ),
    figures={"against_machines": against_machines},
    runs=runs,
    columns=COLUMNS,
)
