"""Answers a request from the histories in it, with the same estimator as a replay; no HTTP, no files."""

from __future__ import annotations

from itertools import chain
from math import nan
from operator import attrgetter
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from reclaim.data import windows as w
from reclaim.data.oom import OOM_DEFINITION
from reclaim.data.schema import TIERS, UNKNOWN_ID
from reclaim.data.windows import Cell, Windows
from reclaim.features.targets import HORIZONS_S, TARGETS
from reclaim.serving.answers.encode import (
    SERVED_RULES,
    amounts_of,
    by_target,
    finite,
    model_name,
    peak_position,
    resources,
    rules,
)
from reclaim.serving.wire.errors import INVALID, TOO_LARGE, RequestError
from reclaim.serving.wire.rows import vectors_of
from reclaim.serving.wire.schemas import (
    History,
    HorizonForecast,
    MarginPrice,
    ModelInfo,
    ReservationRequest,
    ReservationResponse,
    ResourceLimit,
    Task,
    TaskReservation,
)
from reclaim.training.bundle import price_facts
from reclaim.training.estimators.base import CAP, LIMIT, RULES, STARTUP, UNKNOWN, Estimate

if TYPE_CHECKING:
    from reclaim.serving.models.loader import LoadedModel
    from reclaim.serving.settings import ServingSettings
    from reclaim.training.bundle import Bundle
    from reclaim.training.estimators.base import Forecast

_IS_LIMIT: Final = np.isin(np.arange(len(RULES)), (LIMIT, STARTUP, CAP, UNKNOWN))
"""Rules by which the reservation is the limit."""
_PEAK_CPU: Final = TARGETS[-1]
_COMPARED: Final = 30
"""Tasks of a request from which on their mean limit is compared with that of training: fewer say little."""


def windows_from_request(request: ReservationRequest) -> tuple[NDArray[np.int64], Windows]:
    """Return all windows of a request as arrays.

    Returns
    -------
    slot : int64, shape (n,)
        Row in the request of each window's task.
    windows : Windows
        ``n`` rows, equal to those of a dataset with the same measurements: percentiles in single precision.
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
        out.usage[:] = np.array(list(map(attrgetter(*w.CHANNELS), rows)), np.float64)  # None becomes NaN
        w.drop_zero_maxima(out.usage)
        for name, values in vectors_of(rows).items():
            out.percentiles[:, w.VECTORS[name]] = values
        out.limit[:] = [_pair(r.limit or t.limit) for t in request.tasks for r in t.windows]
        out.scheduled_us[:] = [
            _known(t.scheduled_us if r.scheduled_us is None else r.scheduled_us)
            for t in request.tasks
            for r in t.windows
        ]
    return slot, out


def cell_from_request(request: ReservationRequest) -> Cell:
    """Return the cell of a request."""
    largest = request.cell.largest_machine
    cpu, memory = (nan if amount is None else amount for amount in (largest.cpu, largest.memory))
    return Cell((cpu, memory), request.cell.monday_us)


def answer(model: LoadedModel, request: ReservationRequest, settings: ServingSettings) -> ReservationResponse:
    """Return the reservations of a fresh estimator at the end of each task's history.

    One call passes all tasks to one estimator, which may use the past of one task for others of its collection.

    Raises
    ------
    RequestError
        The model lacks the margin, or there are more tasks than the settings allow.
    """
    if len(request.tasks) > settings.max_tasks:
        raise RequestError(
            TOO_LARGE, "too_many_tasks",
            f"tasks: at most {settings.max_tasks} in one request, got {len(request.tasks)}; send them in parts",
            field="tasks",
        )  # fmt: skip
    bundle = model.bundle
    name = settings.margin if request.margin is None else request.margin
    if name not in bundle.prices:
        raise RequestError(
            INVALID, "unknown_margin", f"margin: expected one of {', '.join(bundle.prices)}, got {name!r}",
            field="margin",
        )  # fmt: skip
    limit = np.array([_pair(task.limit) for task in request.tasks])
    found = Estimate(limit.copy(), np.full(limit.shape, UNKNOWN, np.uint8))
    forecasts: dict[int, list[HorizonForecast]] = {}
    slot, windows = windows_from_request(request)
    if len(slot):
        last = np.flatnonzero(np.diff(slot, append=-1))
        estimate = bundle.estimator(name, cell_from_request(request)).update(slot, windows).take(last)
        slot, windows = slot[last], windows.take(last)
        estimate = under_current_limit(estimate, windows.limit, limit[slot])
        found.reservation[slot], found.rule[slot] = estimate.reservation, estimate.rule
        if estimate.forecast is not None:
            for row, number in enumerate(slot.tolist()):
                forecasts[number] = _forecast(estimate.forecast, row, windows.limit[row], bundle)
    return ReservationResponse(
        model=model_name(model),
        margin=_margin(bundle, name),
        horizon_s=bundle.horizon_s,
        levels=list(bundle.forecaster.quantile_levels),
        units=request.units,
        tasks=[_task(task, found, row, forecasts.get(row, [])) for row, task in enumerate(request.tasks)],
    )


def under_current_limit(
    estimate: Estimate, granted: NDArray[np.float64], limit: NDArray[np.float64]
) -> Estimate:  # fmt: skip
    """Return the estimate of each task's last window under the current limit.

    Where the limit has changed since the last window, a reservation of the whole old limit becomes the new one, because
    the window says nothing about demand beyond the old one. No reservation exceeds the new limit.

    Parameters
    ----------
    estimate : Estimate
    granted, limit : float64, shape (n, n_resources)
        The limit of the last window, and the current one; NaN unknown.
    """
    held = _IS_LIMIT[estimate.rule]
    followed = Estimate(np.where(held, limit, estimate.reservation), estimate.rule, estimate.forecast)
    beyond = ~held & (limit > granted) & (estimate.reservation >= granted)
    followed = followed.where(beyond, limit, UNKNOWN)
    return followed.where(followed.reservation > limit, limit, CAP)


def other_units(bundle: Bundle, limit: NDArray[np.float64]) -> str | None:
    """Return ``Bundle.other_units`` of the limits of a request's tasks, (n, n_resources); None for a few tasks."""
    if len(limit) < _COMPARED:
        return None
    granted = limit > 0
    total, count = np.where(granted, limit, 0.0).sum(axis=0), granted.sum(axis=0)
    return bundle.other_units(tuple(np.where(count, total / np.maximum(count, 1), nan).tolist()))


def model_info(model: LoadedModel, settings: ServingSettings) -> ModelInfo:
    """Return the description of the loaded model."""
    bundle = model.bundle
    return ModelInfo(
        model=model_name(model),
        kind=bundle.kind,
        source=model.source,
        horizon_s=bundle.horizon_s,
        horizons_s=list(bundle.forecaster.horizons_s),
        levels=list(bundle.forecaster.quantile_levels),
        margins=[_margin(bundle, name) for name in bundle.prices],
        default_margin=settings.margin,
        pipeline_version=bundle.pipeline_version,
        dataset_fingerprint=bundle.dataset_fingerprint,
        oom_definition=str(bundle.trained.get("oom_definition", OOM_DEFINITION)),
        rules=list(SERVED_RULES),
        max_tasks=settings.max_tasks,
        max_body_bytes=settings.max_body_bytes,
    )


def _task(task: Task, found: Estimate, row: int, forecast: list[HorizonForecast]) -> TaskReservation:
    """Return the answer for a task, which is one row of the estimate."""
    end_us = task.windows[-1].end_us if task.windows else None
    age_s = 0.0 if end_us is None else (end_us - task.windows[0].start_us) / 1e6
    return TaskReservation(
        collection_id=task.collection_id,
        instance_index=task.instance_index,
        reservation=resources(found.reservation[row]),
        limit=resources(_pair(task.limit)),
        rule=rules(found.rule[row]),
        history=History(windows=len(task.windows), age_s=age_s, end_us=end_us),
        forecast=forecast,
    )


def _forecast(forecast: Forecast, row: int, last_limit: NDArray[np.float64], bundle: Bundle) -> list[HorizonForecast]:
    """Return the forecast at every horizon of the model, in the unit of the limit."""
    peak = peak_position(bundle.forecaster.quantile_levels)
    out = []
    for horizon_s in bundle.forecaster.horizons_s:
        h = HORIZONS_S.index(horizon_s)
        quantiles = by_target(amounts_of(forecast.quantiles[row, :, h], last_limit))
        peaks: list[float] | None = getattr(quantiles, _PEAK_CPU)
        out.append(
            HorizonForecast(
                horizon_s=horizon_s,
                oom_probability=finite(float(forecast.oom_probability[row, h])),
                peak_cpu=None if peaks is None else peaks[peak],
                quantiles=quantiles,
            )
        )
    return out


def _known(value: int | None) -> int:
    return UNKNOWN_ID if value is None else value


def _pair(limit: ResourceLimit) -> tuple[float, float]:
    return limit.cpu, limit.memory


def _margin(bundle: Bundle, name: str) -> MarginPrice:
    facts = price_facts(bundle.prices[name])
    return MarginPrice(name=name, price=facts["value"], by_tier=facts["by_tier"])
