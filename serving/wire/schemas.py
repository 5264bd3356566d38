"""Schemas of the stateless routes: requests, answers and the one shape of a refusal.

Amounts are in the units of the dataset that the model was trained on: a price weighs a task by its limit over the mean
limit there. The built-in model and one of several datasets take any unit. An answer has the unit of its request.
Times are whole microseconds on any one clock, as in a dataset, so that a history taken from a trace has exactly the
numbers of its replay.

A model reads a task's own history, and the ends out of memory of the tasks of its collection in the same request.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, FailFast, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from reclaim.data.schema import LATEST_US, PERCENTILES, TAIL_PERCENTILES

MAX_ID: Final = 2**63 - 1
"""Ids are exact 64-bit integers."""
LONGEST_WINDOW_US: Final = 86_400_000_000
"""Longest window: a day. Windows last minutes; a longer one has a time in another unit than µs."""
MAX_AMOUNT: Final = 1e18
"""The largest amount taken, in any unit; an exabyte in bytes."""
MIN_LIMIT: Final = 1e-12
"""The smallest limit taken, in any unit: with ``MAX_AMOUNT`` it keeps usage over limit within single precision."""
MEAN_ABOVE: Final = 1.0 + 1e-6
"""A mean may be above its maximum by this factor, as sources round to single precision. A maximum of 0 is unknown where
the mean is above it, as in the traces."""
MAX_NAME: Final = 64
"""Longest name of a unit or a margin, in characters."""
MAX_OWNER: Final = 256
"""Longest name of a user or a logical name, in characters."""
ROW: Final = "row"
"""Key, in the context of a refusal, of the row of a list that broke a rule over the whole list."""

TierName = Literal["free", "beb", "mid", "prod", "mon"]
TierLabel = Literal["unknown", "free", "beb", "mid", "prod", "mon"]
RuleName = Literal["limit", "model", "statistic", "startup", "jump", "cap", "unknown", "stale", "opt_out"]

TaskId = Annotated[int, Field(ge=0, le=MAX_ID)]
TimeUs = Annotated[int, Field(ge=0, le=LATEST_US)]
Amount = Annotated[float, Field(ge=0, le=MAX_AMOUNT)]
Limit = Annotated[float, Field(gt=0, ge=MIN_LIMIT, le=MAX_AMOUNT)]
Ratio = Annotated[float, Field(ge=0, le=MAX_AMOUNT)]
Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
MarginName = Annotated[Name, Field(json_schema_extra={"enum": ["baseline", "medium", "aggressive"]})]
"""A margin. The page names all of them; the model refuses other names."""
Owner = Annotated[str, Field(min_length=1, max_length=MAX_OWNER)]


class Wire(BaseModel):
    """A part of a request: unknown fields, text in place of numbers and NaN are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class Units(Wire):
    """The units of every amount in a request and in its answer. They are repeated, never converted."""

    cpu: Name = "cores"
    memory: Name = "bytes"


class ResourceLimit(Wire):
    """Limit of a task."""

    cpu: Limit
    memory: Limit


class LargestMachine(Wire):
    """The most that any one machine of the cell supplies, in the unit of the amounts; null: unknown."""

    cpu: Limit | None = None
    memory: Limit | None = None


class CellFacts(Wire):
    """Facts about the cell that the tasks run in; absent ones are unknown."""

    largest_machine: LargestMachine = Field(
        default_factory=LargestMachine, description="Features relate a task's limit to it."
    )
    monday_us: TimeUs = Field(
        default=0, description="A midnight that begins a Monday, in the cell's own zone, on the caller's clock; µs."
    )


def _must_not_fall(values: list[float] | None) -> list[float] | None:
    if values is not None and values != sorted(values):
        raise PydanticCustomError("percentiles_fall", "percentiles must not fall from one to the next")
    return values


class Window(Wire):
    """One measurement window of a task; absent and null values are unknown, which is not zero."""

    start_us: TimeUs = Field(description="Start of the window, µs on the caller's clock.")
    end_us: TimeUs = Field(description="End of the window, µs; the time of day and of the week follow from it.")
    cpu_mean: Amount | None = Field(default=None, description="Mean CPU usage.")
    cpu_max: Amount | None = Field(default=None, description="Largest CPU usage of any sample; may pass the limit.")
    cpu_percentiles: list[Amount] | None = Field(
        default=None,
        min_length=len(PERCENTILES),
        max_length=len(PERCENTILES),
        description="Percentiles 0, 10 … 100 of CPU usage; used in single precision, as a dataset keeps them.",
    )
    cpu_tail_percentiles: list[Amount] | None = Field(
        default=None,
        min_length=len(TAIL_PERCENTILES),
        max_length=len(TAIL_PERCENTILES),
        description="Percentiles 91, 92 … 99 of CPU usage; used in single precision.",
    )
    memory_mean: Amount | None = Field(default=None, description="Mean memory usage.")
    memory_max: Amount | None = Field(default=None, description="Largest memory usage.")
    page_cache: Amount | None = Field(default=None, description="Page cache, part of memory usage.")
    cpi: Ratio | None = Field(default=None, description="Cycles per instruction.")
    mai: Ratio | None = Field(default=None, description="Memory accesses per instruction.")
    limit: ResourceLimit | None = Field(
        default=None, description="Limit at that time, where it was not the current one."
    )
    scheduled_us: TimeUs | None = Field(
        default=None, description="Start of the run at that time, where it was not the current one."
    )

    _percentiles_rise = field_validator("cpu_percentiles", "cpu_tail_percentiles")(_must_not_fall)

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Self:
        if self.end_us <= self.start_us:
            raise PydanticCustomError(
                "window_empty",
                "a window must end after it starts: start_us {start}, end_us {end}",
                {"start": self.start_us, "end": self.end_us},
            )
        if self.end_us - self.start_us > LONGEST_WINDOW_US:
            raise PydanticCustomError(
                "window_long",
                "a window must not be longer than a day, and its times are µs: start_us {start}, end_us {end}",
                {"start": self.start_us, "end": self.end_us},
            )
        if _above(self.cpu_mean, self.cpu_max) or _above(self.memory_mean, self.memory_max):
            raise PydanticCustomError("mean_above_maximum", "the mean of a resource must not be above its maximum")
        return self


def _above(mean: float | None, maximum: float | None) -> bool:
    return mean is not None and maximum is not None and mean > maximum * MEAN_ABOVE and maximum > 0.0


class Task(Wire):
    """A task and its recent history; without windows it is unknown, and keeps its limit."""

    collection_id: TaskId = Field(description="Job or alloc set; an exact 64-bit integer.")
    instance_index: TaskId = Field(default=0, description="Position of the task in its collection.")
    limit: ResourceLimit = Field(description="Current limit; no reservation exceeds it.")
    tier: TierName | None = Field(
        default=None, description="Priority tier, lowest to highest: free, beb, mid, prod, mon."
    )
    scheduling_class: Annotated[int, Field(ge=0, le=3)] | None = Field(
        default=None, description="3 is the most latency-sensitive."
    )
    scheduled_us: TimeUs | None = Field(
        default=None, description="Start of the current run, µs; 0: before the clock began; null: unknown."
    )
    in_alloc: bool = Field(default=False, description="Whether the task runs inside an alloc instance.")
    user: Owner | None = Field(default=None, description="Who submitted the collection; no model reads it.")
    logical_name: Owner | None = Field(
        default=None, description="Name that the runs of one program share; no model reads it."
    )
    windows: Annotated[list[Window], FailFast()] = Field(
        default_factory=list, description="In time order: by start, then by end, none twice."
    )

    @field_validator("windows")
    @classmethod
    def _in_time_order(cls, windows: list[Window]) -> list[Window]:
        last = (-1, -1)
        for number, window in enumerate(windows):
            this = (window.start_us, window.end_us)
            if this <= last:
                what = "is repeated" if this == last else "precedes an earlier one"
                raise PydanticCustomError(
                    "window_order",
                    "windows must be in time order, but this one (start_us {start}, end_us {end}) {what}",
                    {ROW: number, "start": window.start_us, "end": window.end_us, "what": what},
                )
            last = this
        return windows


class ReservationRequest(Wire):
    """Tasks that want a reservation, each once, each with its history."""

    tasks: Annotated[list[Task], FailFast()] = Field(
        min_length=1,
        description="One to a thousand tasks, in any order; the service's `RECLAIM_MAX_TASKS` moves the upper bound.",
    )
    cell: CellFacts = Field(default_factory=CellFacts, description="The cell that all the tasks run in.")
    margin: MarginName | None = Field(
        default=None, description="Safety margin: baseline, medium or aggressive; the service's default where absent."
    )
    units: Units = Field(
        default_factory=Units,
        description="Names the unit of all amounts: that of the dataset that the model was trained on. For the "
        "built-in model, and for one of several datasets, any unit will do.",
    )

    @field_validator("tasks")
    @classmethod
    def _each_task_once(cls, tasks: list[Task]) -> list[Task]:
        first: dict[tuple[int, int], int] = {}
        for number, task in enumerate(tasks):
            before = first.setdefault((task.collection_id, task.instance_index), number)
            if before != number:
                raise PydanticCustomError(
                    "task_twice",
                    "the same task as tasks[{before}]: collection_id {collection}, instance_index {index}",
                    {
                        ROW: number,
                        "before": before,
                        "collection": task.collection_id,
                        "index": task.instance_index,
                    },
                )
        return tasks


class Answer(BaseModel):
    """A part of an answer; every number is finite."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, frozen=True)


class Resources(Answer):
    """One number for each resource."""

    cpu: float
    memory: float


class ResourceRules(Answer):
    """Rule that made the reservation.

    model: a learned prediction plus margin; statistic: a statistical estimate plus margin; startup: the limit is held
    while a run is young; jump: the last window demanded more than the estimate; cap: the estimate passed the limit;
    limit: the limit by policy; unknown: the task has no known usage yet, or only under a lower limit all of which was
    reserved, so it keeps its limit; stale: no window of it came for too long, so it has its limit again; opt_out: its
    collection wants no estimation.
    """

    cpu: RuleName
    memory: RuleName


class History(Answer):
    """Extent of the history behind an answer."""

    windows: int = Field(description="Number of windows.")
    age_s: float = Field(description="From the start of the first window to the end of the last, in seconds.")
    end_us: int | None = Field(description="End of the last window, from which the reservation holds; µs.")


class Quantiles(Answer):
    """Predicted quantiles, one for each of the answer's `levels`, before margin and guards; null without a forecast."""

    cpu: list[float] | None = Field(description="Of the CPU that a reservation must cover.")
    memory: list[float] | None = Field(description="Of the memory that a reservation must cover.")
    peak_cpu: list[float] | None = Field(description="Of the largest CPU usage; the limit means the limit or more.")


class HorizonForecast(Answer):
    """Forecast from the end of the last window over one horizon; null for what the model does not predict."""

    horizon_s: int = Field(description="The horizon, in seconds.")
    oom_probability: float | None = Field(
        description="Probability of an out-of-memory event, as the model info defines it."
    )
    peak_cpu: float | None = Field(
        description="Predicted largest CPU usage, at the level 0.99; the limit means the limit or more."
    )
    quantiles: Quantiles


class TaskReservation(Answer):
    """The answer for one task."""

    collection_id: int
    instance_index: int
    reservation: Resources
    limit: Resources
    rule: ResourceRules
    history: History
    forecast: list[HorizonForecast] = Field(description="One for each horizon; empty where there is no forecast.")


class ModelName(Answer):
    """Name and version of the model that answered."""

    name: str
    version: str


class MarginPrice(Answer):
    """A named margin: the price of a violation, which chooses what is reserved of each task's forecast.

    A price is the cost of one violated task-window, in limits of a task of mean size. A higher price never reserves
    less of any task.
    """

    name: str
    price: Resources = Field(description="The price of all tasks together.")
    by_tier: dict[TierLabel, Resources] | None = Field(
        description="The price of each tier, where each keeps the budget for itself."
    )


class ReservationResponse(Answer):
    """Reservations in the order of the request, with their model, margin and levels."""

    model: ModelName
    margin: MarginPrice
    horizon_s: int = Field(description="The horizon that a reservation is promised for, in seconds.")
    levels: list[float] = Field(description="The levels of all quantiles.")
    units: Units
    tasks: list[TaskReservation]


class ModelInfo(Answer):
    """The loaded model."""

    model: ModelName
    kind: str = Field(description="Kind of the estimator.")
    source: str = Field(description="Reference that it was loaded by.")
    horizon_s: int
    horizons_s: list[int] = Field(description="All horizons of the forecast, in seconds.")
    levels: list[float]
    margins: list[MarginPrice]
    default_margin: str
    pipeline_version: str = Field(description="Version of the feature definitions; a model of another one is refused.")
    dataset_fingerprint: str = Field(description="Fingerprint of the training dataset; a hash over those of several.")
    oom_definition: str = Field(description="Event whose probability `oom_probability` is.")
    rules: list[RuleName] = Field(description="All rules that an answer may name.")
    max_tasks: int
    max_body_bytes: int


class ErrorBody(Answer):
    """Reason of a refusal."""

    code: str = Field(description="A fixed code for programs.")
    message: str = Field(description="One line for people: the expected value, the given one, and where.")
    field: str | None = Field(description="Path of the field, such as `tasks[0].windows[2].cpu_mean`.")
    row: int | None = Field(description="Row of the table or of the list of windows, from 0.")
    task: int | None = Field(description="Row of the task in the request, from 0.")
    window: int | None = Field(description="Row of the window in the task's history, from 0.")


class ErrorResponse(Answer):
    """The one shape of every error."""

    error: ErrorBody
