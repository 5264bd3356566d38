"""Answers from task state: applies prices, guards and the service's own rules; encodes as JSON or as a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from reclaim.data import schema as s
from reclaim.data.schema import RESOURCES, TIERS
from reclaim.features.targets import TARGETS
from reclaim.serving.answers.encode import (
    OPT_OUT,
    SERVED_RULES,
    STALE,
    amounts_of,
    by_target,
    finite,
    known_or_none,
    model_name,
    resources,
    rules,
)
from reclaim.serving.answers.query import margins_of
from reclaim.serving.answers.stateless import under_current_limit
from reclaim.serving.models.scorer import TASK_PARTS, reserved
from reclaim.serving.wire.cell_schemas import CellAnswer, CellReservation
from reclaim.serving.wire.schemas import History, Resources, Units
from reclaim.training.estimators.base import UNKNOWN, Estimate
from reclaim.training.margins.margin import MARGIN_NAMES

if TYPE_CHECKING:
    from reclaim.serving.answers.query import Page
    from reclaim.serving.cell.tracker import Tracker
    from reclaim.serving.cell.views import Known
    from reclaim.serving.settings import ServingSettings
    from reclaim.serving.wire.cell_schemas import CellQuery

_US: Final = 1_000_000
_HORIZONS_FRESH: Final = 2.0
"""Horizons after its last window for which a reservation is valid, unless the settings say otherwise."""


@dataclass(frozen=True)
class Answers:
    """Reservations of ``n`` tasks.

    Attributes
    ----------
    known : Known
    margin : int64, shape (n,)
        Position in ``MARGIN_NAMES``.
    estimate : Estimate
        Rules are positions in ``SERVED_RULES``. NaN where not even the limit is known.
    limit : float64, shape (n, n_resources)
        Current limits.
    """

    known: Known
    margin: NDArray[np.int64]
    estimate: Estimate
    limit: NDArray[np.float64]


def answers(
    known: Known,
    margin_of_tier: NDArray[np.int64],
    settings: ServingSettings,
    limit_else: NDArray[np.float64] | None = None,
) -> Answers:
    """Return the reservations of tasks under the margins of their tiers.

    Parameters
    ----------
    known : Known
        ``n`` tasks.
    margin_of_tier : int64, shape (1 + n_tiers,)
        From ``margins_of``.
    settings : ServingSettings
    limit_else : float64, shape (n, n_resources), or None
        Limits of tasks without a known limit.
    """
    task, n = known.task, len(known.task)
    margin = margin_of_tier[task["tier"].astype(np.int64) + 1]
    limit = np.ascontiguousarray(task["limit"])
    if limit_else is not None:
        limit = np.where(np.isnan(limit), limit_else, limit)
    estimate = Estimate(limit.copy(), np.full(limit.shape, UNKNOWN, np.uint8))
    seen = task[s.END_US] >= 0
    last = known.last
    for number in np.flatnonzero(np.bincount(margin[seen])):
        rows = np.flatnonzero(seen & (margin == number))
        if len(rows) == n:
            estimate = reserved(known.prices.now[MARGIN_NAMES[number]], known.scores.steps, last)
            break
        made = reserved(known.prices.now[MARGIN_NAMES[number]], known.scores.steps.take(rows), last.take(rows))
        estimate.reservation[rows], estimate.rule[rows] = made.reservation, made.rule
    estimate = under_current_limit(estimate, last.limit, limit)
    for wrong, rule in ((is_stale(known, settings), STALE), (known.opted_out, OPT_OUT)):
        if wrong.any():
            estimate = estimate.where(np.broadcast_to(wrong[:, None], limit.shape), limit, rule)
    return Answers(known, margin, estimate, limit)


def is_stale(known: Known, settings: ServingSettings) -> NDArray[np.bool_]:
    """Return which tasks had windows, but none recent enough to base a reservation on; shape (n,)."""
    end_us = known.task[s.END_US]
    until_us = end_us + stale_after_us(known.scorer.horizon_s, settings)
    stale: NDArray[np.bool_] = (end_us >= 0) & (until_us < known.present_us)
    return stale


def stale_after_us(horizon_s: int, settings: ServingSettings) -> int:
    """Return for how long after its last window a task's reservation is valid (µs)."""
    return int((_HORIZONS_FRESH * horizon_s if settings.stale_s is None else settings.stale_s) * _US)


def as_json(found: Answers, units: Units, *, following: str | None = None) -> CellAnswer:
    """Return the JSON model of the answers without their tasks; ``following`` is the start of the next page."""
    known = found.known
    return CellAnswer(
        model=model_name(known.scorer.model),
        horizon_s=known.scorer.horizon_s,
        levels=list(known.scorer.levels),
        units=units,
        clock_us=known_or_none(known.clock_us),
        tracked=known.tracked,
        tasks=[],
        next=following,
    )


def table_of(tracker: Tracker, query: CellQuery, page: Page, settings: ServingSettings, units: Units) -> pa.Table:
    """Return the answers for all tasks of a page as a table, made in pieces by threads.

    Raises
    ------
    RequestError
        The model lacks a margin of the query.
    """
    quantiles = bool(query.quantiles)

    def made(known: Known, piece: slice) -> pa.Table:
        margin_of_tier = margins_of(query, known.scorer, settings.margin)
        some = None if page.limit is None else page.limit[piece]
        return as_table(answers(known, margin_of_tier, settings, some), units, quantiles=quantiles)

    parts = TASK_PARTS if quantiles else tuple(name for name in TASK_PARTS if name != "quantiles")
    return pa.concat_tables(
        tracker.visit(made, page.key, machines=query.machines, collections=query.collections, parts=parts)
    )


def as_table(found: Answers, units: Units, *, quantiles: bool = False) -> pa.Table:
    """Return the answers as a table, one row per task; the schema's metadata holds model, units and clock."""
    known, task, estimate = found.known, found.known.task, found.estimate

    def words(codes: NDArray[np.int64] | NDArray[np.uint8], names: tuple[str, ...]) -> pa.Array:
        valid = codes.astype(np.int8)
        return pa.DictionaryArray.from_arrays(pa.array(valid, mask=valid < 0), pa.array(names, pa.string()))

    def whole(values: NDArray[np.int64]) -> pa.Array:
        return pa.array(values, mask=values < 0)

    columns: dict[str, pa.Array] = {
        s.COLLECTION_ID: pa.array(known.key[:, 0]), s.INSTANCE_INDEX: pa.array(known.key[:, 1]),
        s.MACHINE_ID: whole(task["machine"]), s.TIER: words(task["tier"], TIERS),
        "margin": words(found.margin, MARGIN_NAMES),
    }  # fmt: skip
    for r, resource in enumerate(RESOURCES):
        columns[f"{resource}_reservation"] = _amounts(estimate.reservation[:, r])
        columns[f"{resource}_limit"] = _amounts(found.limit[:, r])
        columns[f"{resource}_rule"] = words(estimate.rule[:, r], SERVED_RULES)
    seen = task[s.END_US] >= 0
    columns["windows"] = pa.array(task["windows"])
    columns["age_s"] = pa.array(np.where(seen, (task[s.END_US] - task["first_us"]) / _US, 0.0))
    columns[s.END_US] = whole(task[s.END_US])
    columns["oom_probability"] = _amounts(known.scores.oom)
    if quantiles:
        for name, amounts in zip(TARGETS, _quantiles(found).transpose(1, 0, 2), strict=True):
            flat = _amounts(np.ascontiguousarray(amounts).reshape(-1))
            columns[f"{name}_quantiles"] = pa.FixedSizeListArray.from_arrays(flat, amounts.shape[1])
    said = model_name(known.scorer.model)
    about = {
        "model_name": said.name, "model_version": said.version, "horizon_s": str(known.scorer.horizon_s),
        "levels": ",".join(map(str, known.scorer.levels)), "cpu_unit": units.cpu, "memory_unit": units.memory,
        "clock_us": str(known.clock_us), "tracked": str(known.tracked),
    }  # fmt: skip
    return pa.table(columns).replace_schema_metadata(about)


def one_task(found: Answers, row: int, quantiles: bool) -> CellReservation:
    """Return the answer for the task of one row."""
    known = found.known
    task = known.task[row]
    seen = bool(task[s.END_US] >= 0)
    return CellReservation(
        collection_id=int(known.key[row, 0]),
        instance_index=int(known.key[row, 1]),
        machine_id=known_or_none(int(task["machine"])),
        tier=None if task["tier"] < 0 else TIERS[task["tier"]],
        margin=MARGIN_NAMES[found.margin[row]],
        reservation=_known(found.estimate.reservation[row]),
        limit=_known(found.limit[row]),
        rule=rules(found.estimate.rule[row]),
        history=History(
            windows=int(task["windows"]),
            age_s=float(task[s.END_US] - task["first_us"]) / _US if seen else 0.0,
            end_us=known_or_none(int(task[s.END_US])),
        ),
        oom_probability=finite(float(known.scores.oom[row])),
        quantiles=by_target(_quantiles(found, row)) if quantiles and seen else None,
    )


def _quantiles(found: Answers, row: int | slice = slice(None)) -> NDArray[np.float64]:
    """Return quantiles in the unit of the limit; shape (n, n_targets, n_levels), or without n for one row."""
    return amounts_of(found.known.scores.quantiles[row], found.known.task["granted"][row])


def _known(amounts: NDArray[np.float64]) -> Resources | None:
    return resources(amounts) if np.isfinite(amounts).all() else None


def _amounts(values: NDArray[np.float64]) -> pa.Array:
    unknown = np.isnan(values)
    return pa.array(values, mask=unknown) if unknown.any() else pa.array(values)
