"""Schemas of the routes about machines: what their tasks need together, and where a task fits."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import ConfigDict, Field

from reclaim.serving.wire.cell_schemas import MachineMargin, Share, Step
from reclaim.serving.wire.schemas import Answer, MarginName, ModelName, ResourceLimit, Resources, TaskId, Units, Wire

MOST_CANDIDATES: Final = 1_000
"""Largest number of candidates in a question."""
MOST_CAPACITIES: Final = 100_000
"""Largest number of machines that a question names."""
MOST_PAIRS: Final = 10_000_000
"""Largest product of candidates and machines, some 0.3 µs each: a thousand candidates on ten thousand machines."""
MOST_PLACES: Final = 100
"""Largest number of machines returned for a candidate."""

Horizon = Literal[300, 3_600, 86_400]
"""A horizon in seconds: one of ``features.targets.HORIZONS_S``, whose import takes long."""
Basis = Literal["fitted", "bound", "limit"]
"""``fitted``: by the model's fit to peaks of machines; ``bound``: by the bound that needs no fit; ``limit``: no task of
the machine has a forecast."""


class BasisByResource(Answer):
    """Basis of the peaks of a machine."""

    cpu: Basis
    memory: Basis


class MachineReservation(Answer):
    """The answer for one machine: what its tasks are predicted to need together within the horizon."""

    machine_id: int
    tasks: int = Field(
        description="Tasks on it, those that count their limit included, those inside an alloc instance left out."
    )
    limit: Resources = Field(description="Sum of the limits.")
    usage: Resources = Field(
        description="Sum of what the tasks used in their last windows, each up to its limit; stale ones left out."
    )
    peak: dict[str, Resources] = Field(description="Amount that is reserved for all tasks together, by margin.")
    reclaimable: dict[str, Resources] = Field(description="`limit` less `peak`, by margin.")
    basis: BasisByResource
    newcomers: Resources = Field(
        description="Limits of the tasks with a forecast of which fewer than 12 windows have been seen: an hour of "
        "five-minute ones."
    )
    unforecast: Resources = Field(
        description="Part of the limits that is reserved whole: of tasks without a forecast, stale tasks and those of "
        "collections without estimation, and of a limit raised since the last window the addition."
    )


class _AboutMachines(Answer):
    model: ModelName
    horizon_s: int = Field(description="The horizon of the peaks, in seconds.")
    units: Units
    clock_us: int | None = Field(description="The cell's clock; µs.")
    budgets: dict[str, float] = Field(
        description="By margin, the share of machines' times at which the peak may pass what is reserved."
    )


class MachinesAnswer(_AboutMachines):
    """Machines that have tasks, by id."""

    margins: list[MachineMargin] = Field(description="By margin and resource, over all machines.")
    tracked: int = Field(description="Tasks in memory.")
    without_machine: int = Field(
        description="Tasks among them that are on none of these: their machine is unknown, or they are inside an alloc "
        "instance."
    )
    machines: list[MachineReservation]
    next: str | None = Field(description="Cursor of the next page; null on the last one.")


class Counts(Answer):
    """Counts by resource."""

    cpu: int
    memory: int


class MachineOutcomes(Answer):
    """Number of answers for one machine that were held against its peak, and of those that it passed."""

    judged: Counts = Field(description="Answers whose horizon is over with the machine measured in it.")
    violated: dict[str, Counts] = Field(description="Those of them whose peak exceeded what was reserved, by margin.")


class MachineForecast(Answer):
    """Amounts that the tasks of a machine are predicted to need together within one horizon."""

    horizon_s: int = Field(description="The horizon, in seconds.")
    peak: dict[str, Resources] = Field(
        description="By margin, at the margins of the moment where outcomes are counted, else at those of the fit."
    )
    reclaimable: dict[str, Resources] = Field(description="The machine's `limit` less `peak`, by margin.")
    basis: BasisByResource
    outcomes: MachineOutcomes | None = Field(description="Null where outcomes within the horizon are not counted.")


class MachineExplanation(_AboutMachines):
    """A machine, its peaks over every horizon, and the steps to its peak under the service's default margin."""

    margins: list[MachineMargin] = Field(description="By margin and resource, over all machines.")
    margin: str
    machine: MachineReservation
    forecast: list[MachineForecast] = Field(description="One for each horizon of the model.")
    outcomes: MachineOutcomes
    steps: list[Step]


class MachineCapacity(Wire):
    """A machine that a task may be placed on."""

    machine_id: TaskId
    capacity: ResourceLimit | None = Field(default=None, description="Absent: the `capacity` of the question.")


class Candidate(Wire):
    """A task to place: a known one, or a new one by its limit."""

    collection_id: TaskId | None = Field(default=None, description="Absent: a task that the service does not know.")
    instance_index: TaskId = 0
    limit: ResourceLimit = Field(
        description="Counts whole for a task that the service does not know; a known one has its own, and a forecast."
    )


class FitRequest(Wire):
    """Tasks to place, each by itself, and the machines that they may go to: named ones, or all that have tasks."""

    model_config = ConfigDict(json_schema_extra={"anyOf": [{"required": ["capacity"]}, {"required": ["machines"]}]})

    candidates: list[Candidate] = Field(fail_fast=True, min_length=1, max_length=MOST_CANDIDATES)
    machines: list[MachineCapacity] | None = Field(
        default=None,
        fail_fast=True,
        max_length=MOST_CAPACITIES,
        description="Only these, with tasks or without; absent: all that have tasks.",
    )
    capacity: ResourceLimit | None = Field(default=None, description="Capacity of machines without one of their own.")
    margin: MarginName | None = Field(default=None, description="The service's default where absent.")
    budget: Share | None = Field(
        default=None,
        description="In place of `margin`: the share of machines' times at which the peak may pass what is reserved.",
    )
    horizon_s: Horizon | None = Field(
        default=None,
        description="Horizon of the peaks, in seconds, that the model forecasts; absent: that of the reservations.",
    )
    most: Annotated[int, Field(ge=1, le=MOST_PLACES)] = Field(
        default=10, description="Largest number of machines returned for a candidate."
    )


class Place(Answer):
    """A machine with room for a candidate."""

    machine_id: int
    peak: Resources = Field(description="Amount reserved for its tasks and the candidate together.")
    cost: Resources = Field(description="Amount by which that is more than without the candidate.")
    share: float = Field(description="`cost` over the limit of the candidate, mean of the resources.")


class CandidateFit(Answer):
    """Machines with room for one candidate, at least cost first."""

    collection_id: int | None
    instance_index: int | None
    limit: Resources
    known: bool = Field(description="Whether it counts by its forecast; false: its limit counts whole.")
    machine_id: int | None = Field(description="Machine that it counts for, which is not among `places`.")
    freed: Resources | None = Field(description="Amount by which the peak of that machine falls once it has left.")
    with_room: int = Field(description="Machines with room.")
    places: list[Place]


class FitAnswer(_AboutMachines):
    """Answers for the candidates, in their order; each is placed by itself, as if the others stayed away."""

    margin: str | None = Field(description="Null where a budget was given.")
    budget: float
    asked: Resources = Field(description="Probability for which peaks are estimated, so that the budget is kept.")
    machines: int = Field(description="Machines that were tried.")
    candidates: list[CandidateFit]
