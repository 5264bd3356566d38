"""From a request to its answer: the history through the very estimator that a replay runs; no HTTP, no files."""

from __future__ import annotations

from itertools import chain
from math import isfinite, nan
from operator import attrgetter
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from reclaim.data import schema
from reclaim.data import windows as w
from reclaim.data.schema import RESOURCES, TIERS, UNKNOWN_ID
from reclaim.data.windows import Cell, Windows
from reclaim.features.targets import HORIZONS_S, OOM_DEFINITION, TARGETS
from reclaim.serving.errors import INVALID, TOO_LARGE, RequestError
from reclaim.serving.schemas import (
    History,
    HorizonForecast,
    MarginShares,
    ModelInfo,
    ModelName,
    Plan,
    Quantiles,
    ReservationRequest,
    ReservationResponse,
    ResourceBasis,
    ResourceLimit,
    ResourceRules,
    Resources,
    RuleName,
    Task,
    TaskReservation,
)
from reclaim.training.estimators.base import CAP, LIMIT, RULES, STARTUP, UNKNOWN, Estimate

if TYPE_CHECKING:
    from reclaim.serving.loader import LoadedModel
    from reclaim.serving.settings import ServingSettings
    from reclaim.training.bundle import Bundle

_PLAIN: Final = (
    (w.CPU_MEAN, schema.CPU_MEAN),
    (w.CPU_MAX, schema.CPU_MAX),
    (w.MEMORY_MEAN, schema.MEMORY_MEAN),
    (w.MEMORY_MAX, schema.MEMORY_MAX),
    (w.PAGE_CACHE, schema.PAGE_CACHE),
    (w.CPI, schema.CPI),
    (w.MAI, schema.MAI),
)
_VECTORS: Final = (
    (schema.CPU_PERCENTILES, [w.LEVELS.index(level) for level in schema.PERCENTILES]),
    (schema.CPU_TAIL_PERCENTILES, [w.LEVELS.index(level) for level in schema.TAIL_PERCENTILES]),
)
"""The vectors of a window, and where their values stand among the levels."""
_IS_LIMIT: Final = np.isin(np.arange(len(RULES)), (LIMIT, STARTUP, CAP, UNKNOWN))
"""Of each rule, whether its reservation is the limit."""
_PEAK_CPU: Final = TARGETS[-1]
_PEAK_LEVEL: Final = 0.99
"""Quantile level of the one number that stands for peak CPU, or the nearest that the model has."""


def windows_from_request(request: ReservationRequest) -> tuple[NDArray[np.int64], Windows]:
    """Return every window of every task as arrays.

    Returns
    -------
    slot : int64, shape (n,)
        Row in the request of each window's task.
    windows : Windows
        ``n`` rows, exactly those that a dataset holds for the same measurements: percentiles in single precision.
    """
    rows = list(chain.from_iterable(task.windows for task in request.tasks))
    counts = [len(task.windows) for task in request.tasks]
    slot = np.repeat(np.arange(len(counts), dtype=np.int64), counts)

    def per_task(values: list[int], dtype: type) -> NDArray[np.generic]:
        return np.repeat(np.array(values, dtype), counts)

    out = w.empty_windows(len(rows))
    out.collection_id[:] = per_task([t.collection_id for t in request.tasks], np.int64)
    out.instance_index[:] = per_task([t.instance_index for t in request.tasks], np.int64)
    out.start_us[:] = [r.start_us for r in rows]
    out.end_us[:] = [r.end_us for r in rows]
    out.tier[:] = per_task([UNKNOWN_ID if t.tier is None else TIERS.index(t.tier) for t in request.tasks], np.int8)
    out.scheduling_class[:] = per_task([_known(t.scheduling_class) for t in request.tasks], np.int8)
    out.user[:] = np.repeat(w.identities(t.user for t in request.tasks), counts)
    out.name[:] = np.repeat(w.identities(t.logical_name for t in request.tasks), counts)
    out.in_alloc[:] = per_task([t.in_alloc for t in request.tasks], np.bool_)
    if rows:
        names = [name for _, name in _PLAIN]
        plain = np.array(list(map(attrgetter(*names), rows)), np.float64)  # None becomes NaN
        out.usage[:, [channel for channel, _ in _PLAIN]] = plain
        for name, levels in _VECTORS:
            unknown = [np.nan] * len(levels)
            out.percentiles[:, levels] = [unknown if v is None else v for v in map(attrgetter(name), rows)]
        out.limit[:] = [_pair(r.limit or t.limit) for t in request.tasks for r in t.windows]
        out.scheduled_us[:] = [
            _known(t.scheduled_us if r.scheduled_us is None else r.scheduled_us)
            for t in request.tasks
            for r in t.windows
        ]
    return slot, out


def cell_from_request(request: ReservationRequest) -> Cell:
    """Return what the request says of its cell."""
    largest = request.cell.largest_machine
    cpu, memory = (nan if amount is None else amount for amount in (largest.cpu, largest.memory))
    return Cell((cpu, memory), request.cell.monday_us)


def answer(model: LoadedModel, request: ReservationRequest, settings: ServingSettings) -> ReservationResponse:
    """Return the reservations that a fresh estimator reaches at the end of each task's history.

    All tasks are seen by the one estimator, in one call: what one did before another's history ends is known to it.

    Raises
    ------
    RequestError
        The margin is unknown to the model, or there are more tasks than the settings allow.
    """
    if len(request.tasks) > settings.max_tasks:
        raise RequestError(
            TOO_LARGE, "too_many_tasks",
            f"tasks: at most {settings.max_tasks} in one request, got {len(request.tasks)}; send them in parts",
            field="tasks",
        )  # fmt: skip
    bundle = model.bundle
    name = settings.margin if request.margin is None else request.margin
    if name not in bundle.margins:
        raise RequestError(
            INVALID, "unknown_margin", f"margin: expected one of {', '.join(bundle.margins)}, got {name!r}",
            field="margin",
        )  # fmt: skip
    limit = np.array([_pair(task.limit) for task in request.tasks])
    slot, windows = windows_from_request(request)
    estimate = None
    if len(slot):
        last = np.flatnonzero(np.diff(slot, append=-1))
        estimate = bundle.estimator(name, cell_from_request(request)).update(slot, windows).take(last)
        slot, windows = slot[last], windows.take(last)
        estimate = under_limit_of_now(estimate, limit[slot])
    row_of = {int(s): row for row, s in enumerate(slot)}
    tasks = [
        _unknown_task(task) if (row := row_of.get(number)) is None or estimate is None
        else _known_task(task, estimate, row, windows.limit[row], model)
        for number, task in enumerate(request.tasks)
    ]  # fmt: skip
    return ReservationResponse(
        model=_name(model),
        margin=_margin(bundle, name),
        horizon_s=bundle.horizon_s,
        levels=list(bundle.forecaster.quantile_levels),
        units=request.units,
        tasks=tasks,
    )


def under_limit_of_now(estimate: Estimate, limit: NDArray[np.float64]) -> Estimate:
    """Return the estimate of each task's last window under the limit in force now, shape (n, n_resources).

    Where that is the last window's own limit, nothing changes. Where it is another, a reservation that was the limit
    is the new one, and no reservation passes it.
    """
    held = _IS_LIMIT[estimate.rule]
    followed = Estimate(np.where(held, limit, estimate.reservation), estimate.rule, estimate.forecast)
    return followed.where(followed.reservation > limit, limit, CAP)


def model_info(model: LoadedModel, settings: ServingSettings) -> ModelInfo:
    """Return what is loaded."""
    bundle = model.bundle
    return ModelInfo(
        model=_name(model),
        kind=bundle.kind,
        source=model.source,
        horizon_s=bundle.horizon_s,
        horizons_s=list(bundle.forecaster.horizons_s),
        levels=list(bundle.forecaster.quantile_levels),
        margins=[_margin(bundle, name) for name in bundle.margins],
        default_margin=settings.margin,
        pipeline_version=bundle.pipeline_version,
        dataset_fingerprint=bundle.dataset_fingerprint,
        oom_definition=OOM_DEFINITION,
        rules=[_rule(number) for number in range(len(RULES))],
        max_tasks=settings.max_tasks,
        max_body_bytes=settings.max_body_bytes,
    )


def _known_task(
    task: Task, estimate: Estimate, row: int, last_limit: NDArray[np.float64], model: LoadedModel
) -> TaskReservation:
    first, last = task.windows[0], task.windows[-1]
    return TaskReservation(
        collection_id=task.collection_id,
        instance_index=task.instance_index,
        reservation=_resources(estimate.reservation[row]),
        limit=_resources(_pair(task.limit)),
        rule=ResourceRules(cpu=_rule(estimate.rule[row, 0]), memory=_rule(estimate.rule[row, 1])),
        history=History(
            windows=len(task.windows), age_s=(last.end_us - first.start_us) / 1e6, end_us=last.end_us
        ),
        forecast=_forecast(estimate, row, last_limit, model),
    )  # fmt: skip


def _unknown_task(task: Task) -> TaskReservation:
    return TaskReservation(
        collection_id=task.collection_id,
        instance_index=task.instance_index,
        reservation=_resources(_pair(task.limit)),
        limit=_resources(_pair(task.limit)),
        rule=ResourceRules(cpu=_rule(UNKNOWN), memory=_rule(UNKNOWN)),
        history=History(windows=0, age_s=0.0, end_us=None),
        forecast=[],
    )


def _forecast(
    estimate: Estimate, row: int, last_limit: NDArray[np.float64], model: LoadedModel
) -> list[HorizonForecast]:
    """Return what is foreseen at every horizon the model was fitted for, in the unit of the limit."""
    if estimate.forecast is None:
        return []
    over = [last_limit[0], last_limit[1], last_limit[0]]  # peak CPU is over the CPU limit
    amounts = estimate.forecast.quantiles[row] * np.array(over)[:, None, None]
    levels = model.bundle.forecaster.quantile_levels
    peak = min(range(len(levels)), key=lambda k: abs(levels[k] - _PEAK_LEVEL))
    out = []
    for horizon_s in model.bundle.forecaster.horizons_s:
        h = HORIZONS_S.index(horizon_s)
        by_target = dict(zip(TARGETS, amounts[:, h], strict=True))
        oom = float(estimate.forecast.oom_probability[row, h])
        out.append(
            HorizonForecast(
                horizon_s=horizon_s,
                oom_probability=oom if isfinite(oom) else None,
                peak_cpu=float(by_target[_PEAK_CPU][peak]) if np.isfinite(by_target[_PEAK_CPU]).all() else None,
                quantiles=Quantiles(
                    **{name: q.tolist() if np.isfinite(q).all() else None for name, q in by_target.items()}
                ),
            )
        )
    return out


def _known(value: int | None) -> int:
    return UNKNOWN_ID if value is None else value


def _pair(limit: ResourceLimit) -> tuple[float, float]:
    return limit.cpu, limit.memory


def _resources(values: NDArray[np.float64] | tuple[float, ...]) -> Resources:
    return Resources(**{resource: float(v) for resource, v in zip(RESOURCES, values, strict=True)})


def _rule(number: int) -> RuleName:
    return RULES[number]


def _name(model: LoadedModel) -> ModelName:
    return ModelName(name=model.name, version=model.version)


def _margin(bundle: Bundle, name: str) -> MarginShares:
    margin = bundle.margins[name]
    plans = [bundle.plans[name]] if name in bundle.plans else list(bundle.plans.values())
    return MarginShares(
        name=name,
        share=_resources(margin.share),
        by_group=margin.by_group is not None,
        plans=[
            Plan(**{r: ResourceBasis(**vars(basis)) for r, basis in zip(RESOURCES, plan, strict=True)})
            for plan in plans
        ],
    )
