"""The what-if experiment: would a workload fit, and how many machines fewer could run it within a budget of kills."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from reclaim.data.errors import ConfigError
from reclaim.replay.cell import period_facts
from reclaim.replay.closedloop import Scheduling, simulate
from reclaim.replay.folded import LIMIT, Folded, fold
from reclaim.replay.kinds import LEARNED, STATISTICAL, Experiment, Measured, Source
from reclaim.replay.openloop import in_force
from reclaim.replay.outcome import DEFINITIONS, summary
from reclaim.replay.settings import ReplayConfig
from reclaim.replay.whatif_figures import against_machines
from reclaim.replay.whatif_page import COLUMNS, KILLS, PENDING, judged, runs, says, sections
from reclaim.replay.workload import Machines, Workload, machines_of, workload_of
from reclaim.training.estimators.margin import MARGIN_NAMES

GRID: Final = (0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.4)
"""Sizes that every curve has, as shares of the cell's machines times the growth of the workload."""


@dataclass(frozen=True)
class WhatIfConfig(ReplayConfig):
    """What is asked."""

    estimators: tuple[str, ...] = ("borg", "autopilot-percentile")
    """Estimators without a model, as in ``ReplayConfig``; no reclamation is run beside them in any case."""
    margin: str = "medium"
    """The margin of all of them; one of ``margin.MARGIN_NAMES``."""
    oom_budget: float = 5.0
    """Tasks killed for want of memory, per 1,000 task-days, that are accepted: at 5 a task dies once in 200 days."""
    pending_budget: float = 0.01
    """Share of task-time spent waiting for a machine that is accepted."""
    machines: tuple[int, ...] = ()
    """Numbers of machines to try; none: the fewest within the budgets are searched for."""
    growth: float = 1.0
    """Size of the workload: 1.2 clones a fifth of its collections, 0.8 leaves a fifth of them out."""
    scheduling: Scheduling = field(default_factory=Scheduling)
    """How the closed loop places tasks."""

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
        if not 0 < self.growth < float("inf"):
            raise ConfigError(f"growth must be above 0, got {self.growth}")


class Cells:
    """A workload on any number of a cell's machines.

    Smaller cells are the first machines of a permutation drawn by the seed; all of them are the trace's own cell, and
    larger ones have clones of its machines in the same order.

    Parameters
    ----------
    workload : Workload
        Its masks speak of ``machines``.
    machines : Machines
    config : WhatIfConfig
    """

    def __init__(self, workload: Workload, machines: Machines, config: WhatIfConfig) -> None:
        self._workload = workload
        self._machines, order = machines.subset(len(machines), config.seed)
        self._masks = workload.masks[:, order]
        self._how = config.scheduling

    def run(self, n: int, held: NDArray[np.float64]) -> dict[str, float | None]:
        """Return what happens on ``n`` machines under reservations, shape (n_rows, n_resources): ``outcome.summary``.

        They are those of the workload's tape, in force when each window begins.
        """
        times = -(-n // len(self._machines))
        cloned = self._machines.tiled(times)
        first = Machines(cloned.ids[:n], cloned.state[:n], cloned.changes[cloned.changes["machine"] < n])
        masks = np.ascontiguousarray(np.tile(self._masks, (1, times))[:, :n])
        return summary(simulate(replace(self._workload, masks=masks), first, held[None], how=self._how))


def measure(source: Source, config: WhatIfConfig) -> Measured:
    """Run the test period's workload on fewer and more machines, under every estimator and without reclamation.

    Raises
    ------
    ConfigError
        The trace does not tell of machines, or ``growth`` leaves no collection of it.
    HistoryTooShortError
        The validation or the test period is shorter than the horizon.
    """
    folded = fold(source, config)
    slots = folded.cell.slots
    stop_us = slots.first_us + slots.count * slots.slot_s * 1_000_000
    machines = machines_of(source.dataset, slots.first_us, stop_us)
    workload = workload_of(source, folded.cell, machines)
    grown = workload if config.growth == 1 else workload.grown(config.growth, config.seed)
    cells = Cells(grown, machines, config)
    contenders = _held(folded, workload, config)
    answers = []
    for name, held in tqdm(contenders.items(), desc="what if", unit="estimator", disable=_quiet(source)):
        started = time.perf_counter()
        tried = _try(cells, held, len(machines), config)
        answers.append({
            "name": name,
            "kind": LEARNED if name in source.bundles else LIMIT if name == LIMIT else STATISTICAL,
            "margin": "none" if name == LIMIT else config.margin,
            "fewest": fewest_within(tried, config),
            "points": [{"machines": n, "share": n / len(machines), **tried[n]} for n in sorted(tried)],
        })  # fmt: skip
        source.seconds[f"closed loop/{name}"] = time.perf_counter() - started
    results = {
        "dataset": period_facts(folded.cell),
        "asked": {
            "oom_budget": config.oom_budget,
            "pending_budget": config.pending_budget,
            "growth": config.growth,
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


def _try(
    cells: Cells, held: NDArray[np.float64], cell: int, config: WhatIfConfig
) -> dict[int, dict[str, float | None]]:
    """Return what happens on each number of machines asked for, or on the grid and around the fewest of it that do."""
    asked = config.machines or tuple(max(1, round(share * config.growth * cell)) for share in GRID)
    tried = {n: cells.run(n, held) for n in dict.fromkeys(asked)}
    if config.machines:
        return tried
    while (high := fewest_within(tried, config)) is not None:
        low = max((n for n in tried if n < high), default=0)
        if high - low <= 1:
            break
        middle = (low + high) // 2
        tried[middle] = cells.run(middle, held)
    return tried


def _held(folded: Folded, workload: Workload, config: WhatIfConfig) -> dict[str, NDArray[np.float64]]:
    """Return the reservation in force at every row of the tape, by estimator, no reclamation last; 0 is not known."""
    held = {
        name: in_force(folded.reservations(name)[config.margin], folded.history)[workload.row]
        for name in folded.bases
        if name != LIMIT
    }
    held[LIMIT] = folded.history.windows.limit[workload.row]
    return {name: np.nan_to_num(of, copy=False) for name, of in held.items()}


def _quiet(source: Source) -> bool | None:
    return None if source.progress else True


def definitions(config: WhatIfConfig) -> dict[str, str]:
    """Return what the numbers of the results mean."""
    return {
        "fits": (
            f"The replay kills no more than {config.oom_budget:g} tasks per 1,000 task-days for want of memory, above "
            f"their own limit or for the machine's sake, and no more than {config.pending_budget:.2%} of the task-time "
            "is spent waiting. Runs that the trace itself ended out of memory end so under any estimator and are not "
            "counted."
        ),
        "fewest machines": (
            "The smallest of the numbers named that fits, as does every larger one named; nothing is known of others, "
            "so that no saving is told from it."
            if config.machines
            else "The smallest number tried that fits, as does every larger number tried; one machine fewer was tried "
            "and does not fit. Numbers in between were not all tried, and what fits need not do so in order: kills in "
            "particular come and go."
        ),
        "machines": (
            f"Smaller cells are the first machines of one permutation (seed {config.seed}) of the trace's own; larger "
            "ones clone them in the same order. They come, go and change as the trace's do."
        ),
        "growth": (
            "Whole collections drawn by the seed are cloned, or left out where it is below 1; a clone is submitted "
            "with its original."
        ),
        "no reclamation": "Every task's limit is reserved for it.",
        **DEFINITIONS,
    }


EXPERIMENT: Final = Experiment(
    name="what-if",
    title="What if: would the workload fit, on how many machines",
    version=3,
    config=WhatIfConfig,
    measure=measure,
    says=says,
    sections=sections,
    figures={"against_machines": against_machines},
    runs=runs,
    columns=COLUMNS,
    judged=judged,
)
