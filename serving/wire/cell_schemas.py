"""Schemas of the routes of the service's memory: facts about a cell's tasks, and answers from them."""

from __future__ import annotations

from typing import Annotated, Final, Literal, Self

from pydantic import FailFast, Field, model_validator
from pydantic_core import PydanticCustomError

from reclaim.serving.wire.schemas import (
    Answer,
    ErrorBody,
    History,
    MarginName,
    ModelName,
    Owner,
    Quantiles,
    ResourceLimit,
    ResourceRules,
    Resources,
    TaskId,
    TierLabel,
    TierName,
    TimeUs,
    Units,
    Window,
    Wire,
)

MOST_ERRORS: Final = 100
"""Largest number of refused rows that an answer describes; further ones are counted by code."""
FAILED_WITHOUT_END: Final = (
    "failed says how a task ended and needs ended_us; for a run that another one follows send failed_us"
)
"""Message about a fact that gives how a task ended, but not when."""
OOM_WITHOUT_FAILURE: Final = (
    "out_of_memory says how a run failed and needs failed_us, or failed with ended_us; false needs only ended_us"
)
"""Message about a fact that gives the cause of a failure, but no failure."""
MOST_NAMED: Final = 500_000
"""Largest number of tasks, of machines and of collections that a query names."""
MOST_PAGE: Final = 10_000
"""Largest number of tasks on a JSON page."""

SchedulingClass = Annotated[int, Field(ge=0, le=3)]
Share = Annotated[float, Field(gt=0, lt=1)]
PageSize = Annotated[int, Field(ge=1, le=MOST_PAGE)]
AnswerFor = Literal["none", "tasks", "cell"]
"""Tasks whose reservations answer a write: none, the tasks written, or the whole cell."""


class _Facts(Wire):
    """Facts about a task, with or without usage; absent ones stay as they were."""

    collection_id: TaskId
    instance_index: TaskId = 0
    machine_id: TaskId | None = Field(default=None, description="Where it runs.")
    tier: TierName | None = Field(
        default=None, description="Priority tier, lowest to highest: free, beb, mid, prod, mon."
    )
    scheduling_class: SchedulingClass | None = Field(default=None, description="3 is the most latency-sensitive.")
    in_alloc: bool | None = Field(
        default=None,
        description="Whether the task runs inside an alloc instance, which is a task of its own: it alone counts for "
        "its machine, for prices and for margins.",
    )
    user: Owner | None = Field(default=None, description="Who submitted the collection; the first one given stays.")
    logical_name: Owner | None = Field(
        default=None, description="Name that the runs of one program share; the first one given stays."
    )


class UsageWindow(Window, _Facts):
    """A measurement window, and its task."""

    limit: ResourceLimit | None = Field(
        default=None, description="Limit at that time; absent: the last one given; without any, the window is refused."
    )
    scheduled_us: TimeUs | None = Field(default=None, description="Start of the run, µs; absent: the last one given.")


class UsageRequest(Wire):
    """Windows in any order; good ones are taken even where others are refused."""

    windows: Annotated[list[UsageWindow], FailFast()] = Field(min_length=1)
    units: Units | None = Field(default=None, description="Refused where they differ from the cell's.")


class TaskFacts(_Facts):
    """Facts about a task: its limit, its machine, its end."""

    limit: ResourceLimit | None = Field(
        default=None, description="Its current limit; absent or null leaves the one that is known."
    )
    since_us: TimeUs | None = Field(
        default=None,
        description="When that limit began, µs; absent: now. Windows from before do not change it.",
    )
    scheduled_us: TimeUs | None = Field(default=None, description="Start of the current run, µs.")
    ended_us: TimeUs | None = Field(
        default=None,
        description="When it ended for good, µs; it is then forgotten. A restart is a new `scheduled_us`, not an end.",
    )
    failed_us: TimeUs | None = Field(
        default=None, description="When a run of it failed and another will follow, µs; the task stays in memory."
    )
    failed: bool = Field(
        default=False, description="Whether it ended by failing, not by finishing or being stopped; with `ended_us`."
    )
    out_of_memory: bool | None = Field(
        default=None,
        description="Whether that end or failure was out of memory, as the cluster records it; absent: it is derived "
        "from the memory of the last window.",
    )

    @model_validator(mode="after")
    def _says_when(self) -> Self:
        if self.failed and self.ended_us is None:
            raise PydanticCustomError("failed_without_end", FAILED_WITHOUT_END)
        failure = self.failed or self.failed_us is not None
        if self.out_of_memory is not None and not failure and (self.out_of_memory or self.ended_us is None):
            raise PydanticCustomError("oom_without_failure", OOM_WITHOUT_FAILURE)
        return self


class CollectionFacts(Wire):
    """True if the collection wants estimation."""

    collection_id: TaskId
    estimation: bool = Field(description="False: all its tasks keep their limits, whatever is estimated.")


class TasksRequest(Wire):
    """Facts about tasks and collections; good ones are taken even where others are refused."""

    tasks: Annotated[list[TaskFacts], FailFast()] = Field(default_factory=list)
    collections: Annotated[list[CollectionFacts], FailFast()] = Field(default_factory=list)


class TaskName(Wire):
    """A task, and the limit that is its reservation where the service does not know it."""

    collection_id: TaskId
    instance_index: TaskId = 0
    limit: ResourceLimit | None = None


class CellQuery(Wire):
    """Tasks whose reservations are wanted, and their margin; without any list: all tasks.

    Machines and collections together are the tasks of these collections on these machines.
    """

    tasks: list[TaskName] | None = Field(
        default=None, fail_fast=True, max_length=MOST_NAMED, description="These alone, in this order, known or not."
    )
    machines: list[TaskId] | None = Field(
        default=None, fail_fast=True, max_length=MOST_NAMED, description="All tasks on these machines."
    )
    collections: list[TaskId] | None = Field(
        default=None, fail_fast=True, max_length=MOST_NAMED, description="All tasks of these collections."
    )
    margin: MarginName | None = Field(
        default=None, description="Safety margin of all tasks; the service's default where absent."
    )
    margins: dict[TierName, MarginName] = Field(
        default_factory=dict, description="Margin of a tier; takes precedence over `margin`."
    )
    budget: Share | None = Field(
        default=None,
        description="In place of `margin`: the share of task-windows that may exceed their reservation within the "
        "horizon. Of the margins that kept it on validation data, the one that reclaims most is used.",
    )
    budgets: dict[TierName, Share] = Field(
        default_factory=dict,
        description="Budget of a tier; takes precedence over `budget`. The margin is chosen among those that kept it "
        "for the tier's own tasks, or, where too few of them were measured, for the tasks of all tiers.",
    )
    page_size: PageSize = Field(default=1_000, description="Tasks on a JSON page.")
    after: str | None = Field(
        default=None,
        max_length=64,
        description="`next` of the page before.",
        json_schema_extra={"pattern": "^[0-9]{1,19}(:[0-9]{1,19})?$"},
    )
    quantiles: bool | None = Field(
        default=None, description="Whether quantiles are wanted; absent: in JSON, not in Arrow."
    )


class CellReservation(Answer):
    """The answer for one task of the cell."""

    collection_id: int
    instance_index: int
    machine_id: int | None
    tier: TierName | None
    margin: str
    reservation: Resources | None = Field(description="Null only for a task without a known limit.")
    limit: Resources | None
    rule: ResourceRules
    history: History
    oom_probability: float | None = Field(description="Within the horizon, as the model info defines it.")
    quantiles: Quantiles | None = Field(description="At `levels`, over the horizon; null without a forecast.")


class CellAnswer(Answer):
    """Reservations in order of collection and index, or of the list that was asked for."""

    model: ModelName
    horizon_s: int = Field(description="The horizon that a reservation is promised for, in seconds.")
    levels: list[float] = Field(description="The levels of all quantiles.")
    units: Units
    clock_us: int | None = Field(
        description="The cell's clock: end of the latest window; with RECLAIM_CLOCK=trace the time tasks agree on; µs."
    )
    tracked: int = Field(description="Tasks in memory.")
    tasks: list[CellReservation]
    next: str | None = Field(description="Cursor of the next page; null on the last one.")


class WriteAnswer(Answer):
    """Outcome of a write: each row is counted once, and those counted as taken are on the disk."""

    rows: int
    taken: int = Field(description="Rows that now count, late ones within the bound included.")
    late: int = Field(description="Number of those that came after a later window of their task.")
    repeated: int = Field(description="Windows that were known already; they changed nothing.")
    refused: dict[str, int] = Field(description="Refused rows by code.")
    errors: list[ErrorBody] = Field(description=f"The first {MOST_ERRORS} refused rows.")
    clock_us: int | None = Field(description="The cell's clock after the write; µs.")
    durable: bool = Field(description="Whether it outlives the process; false without a state folder.")
    reservations: CellAnswer | None = Field(default=None, description="Present where `?answer=` asks for them.")


class Step(Answer):
    """One step from a forecast to a reservation."""

    rule: str
    amounts: Resources
    why: str


class Exceedance(Answer):
    """Probability of each resource, null without a forecast of it."""

    cpu: float | None
    memory: float | None


class TaskExplanation(Answer):
    """Everything known about a task, and the steps to its reservation."""

    model: ModelName
    horizon_s: int
    levels: list[float]
    units: Units
    clock_us: int | None
    task: CellReservation
    limit_since_us: int | None
    scheduled_us: int | None
    scheduling_class: int | None
    in_alloc: bool
    estimation: bool = Field(description="False where its collection opted out.")
    last_window: Window | None
    by_margin: dict[str, Resources] = Field(
        description="Its reservation under every margin; empty before the first window, when that is its limit."
    )
    steps: list[Step] = Field(
        description="From the forecast to the reservation under the margin asked for; none before the first window."
    )
    exceedance: Exceedance | None = Field(
        description="Probability that the demand within the horizon exceeds the reservation, read off the forecast's "
        "curve; at the limit, that it reaches the limit, to a thousandth, which is no violation. Null before the "
        "first window."
    )
    forecast: list[HorizonQuantiles]


class HorizonQuantiles(Answer):
    """The forecast up to one horizon."""

    horizon_s: int
    oom_probability: float | None
    quantiles: Quantiles


class CellPrice(Answer):
    """Price of a violation for a tier under a margin, which may follow the outcomes of the answers."""

    margin: MarginName
    tier: TierLabel
    resource: str
    start: float = Field(
        description="Where it began: as set on validation data, or as a model of other cells set it itself."
    )
    now: float = Field(description="The one that reservations are made at.")
    budget: float | None = Field(description="Share of answers that may be violated; null for `medium`.")
    own: float | None = Field(
        description="The price at which the model itself expects the budget, of the last hour's answers. Where it is "
        "far from `start`, the load differs from that of the validation data, or there was too little of that data."
    )
    violated: float | None = Field(
        description="Violated share of the answers whose horizon ended in the last day or so; null before the first, "
        "and for `medium`. `now` has moved by the violations since, too."
    )


class MachineMargin(Answer):
    """Probability by which the peaks of machines are set under a margin, and the outcomes of earlier answers."""

    horizon_s: int = Field(description="The horizon of the peaks, in seconds.")
    margin: MarginName
    resource: str
    budget: float = Field(description="Share of machines' times that may be violated.")
    asked: float = Field(description="Probability for which the estimator sets the peaks, so that the budget is kept.")
    lowered: float = Field(description="Factor in `asked` by which too many machines at once lower it; 1: none.")
    judged: int = Field(description="Answers whose peak is known, of all machines since the model began to answer.")
    violated: int = Field(description="Those of them whose peak exceeded what was reserved.")
    recent: float | None = Field(
        description="Share of the answers of the last day or so that were violated; null before the first is known."
    )
    at_once: float | None = Field(description="Share of the machines whose peak exceeded it at the last known time.")
    most_at_once: float | None = Field(description="The largest such share of the last day.")


class StateInfo(Answer):
    """Sizes and condition of the service's memory."""

    tracked: int
    collections_without_estimation: int
    clock_us: int | None
    bytes: int = Field(description="Size of the memory.")
    bytes_per_task: int
    durable: bool
    store: str = Field(description="`ok`, `memory only`, or why nothing can be written.")
    notes: list[str] = Field(description="Damages and losses found when the state was read, and the repairs.")
    log_bytes: int
    snapshot_bytes: int
    snapshot_age_s: float | None
    waiting: int = Field(description="Writes in the queue.")
    follows: bool = Field(
        description="Whether prices, and margins of machines, follow the outcomes of the answers (RECLAIM_FOLLOW)."
    )
    advice: list[str] = Field(
        description="What to do about the model: train one of this cell's own, or train again. Empty: nothing."
    )
    prices: list[CellPrice] = Field(description="By margin, tier and resource; empty before the state is restored.")
    machine_margins: list[MachineMargin] = Field(
        description="By horizon, margin and resource, of machines, over each horizon whose outcomes are counted; empty "
        "before the state is restored."
    )


TaskExplanation.model_rebuild()
