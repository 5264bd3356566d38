"""From what is known of a cell's tasks to answers: margins, guards, the service's own rules; as JSON or as a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from reclaim.data import schema as s
from reclaim.data.schema import RESOURCES, TIERS
from reclaim.features.targets import TARGETS
from reclaim.serving.answer import under_limit_of_now
from reclaim.serving.cell_schemas import (
    CellAnswer,
    CellReservation,
)
from reclaim.serving.query import margins_of
from reclaim.serving.schemas import History, ModelName, Quantiles, ResourceRules, Resources, Units
from reclaim.training.estimators.base import RULES, UNKNOWN, Estimate
from reclaim.training.estimators.margin import MARGIN_NAMES

if TYPE_CHECKING:
    from reclaim.serving.cell_schemas import CellQuery
    from reclaim.serving.engine import Engine
    from reclaim.serving.query import Page
    from reclaim.serving.settings import ServingSettings
    from reclaim.serving.tasks import Known
    from reclaim.serving.tracker import Tracker

SERVED_RULES: Final = (*RULES, "stale", "opt_out")
"""Rules of the estimators, and the two of the service: nothing was heard for too long; its collection opted out."""
STALE, OPT_OUT = len(RULES), len(RULES) + 1
_US: Final = 1_000_000
_HORIZONS_FRESH: Final = 2.0
"""For so many horizons after its last window a reservation stands, unless the settings say otherwise."""


@dataclass(frozen=True)
class Answers:
    """Reservations of ``n`` tasks.

    Attributes
    ----------
    known : Known
    margin : int64, shape (n,)
        Position in ``MARGIN_NAMES``.
    estimate : Estimate
        Rules in the order ``SERVED_RULES``. NaN where not even the limit is known.
    limit : float64, shape (n, n_resources)
        In force now.
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
        Limits of tasks whose limit nobody told.
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
            estimate = known.engine.estimate(MARGIN_NAMES[number], known.scores.bare, last)
            break
        made = known.engine.estimate(MARGIN_NAMES[number], known.scores.bare[rows], last.take(rows))
        estimate.reservation[rows], estimate.rule[rows] = made.reservation, made.rule
    estimate = under_limit_of_now(estimate, limit)
    stale_us = _stale_us(settings, known.engine)
    stale = seen & (task[s.END_US] + stale_us < known.present_us)
    for wrong, rule in ((stale, STALE), (known.opted_out, OPT_OUT)):
        if wrong.any():
            estimate = estimate.where(np.broadcast_to(wrong[:, None], limit.shape), limit, rule)
    return Answers(known, margin, estimate, limit)


def _stale_us(settings: ServingSettings, engine: Engine) -> int:
    stale_s = _HORIZONS_FRESH * engine.horizon_s if settings.stale_s is None else settings.stale_s
    return int(stale_s * _US)


def as_json(found: Answers, units: Units, *, following: str | None = None, quantiles: bool = True) -> CellAnswer:
    """Return the answers one by one; ``following`` is where the next page goes on."""
    known = found.known
    return CellAnswer(
        model=model_name(known.engine),
        horizon_s=known.engine.horizon_s,
        levels=list(known.engine.levels),
        units=units,
        clock_us=or_none(known.clock_us),
        tracked=known.tracked,
        tasks=[one_task(found, row, quantiles) for row in range(len(known.key))],
        next=following,
    )


def table_of(tracker: Tracker, query: CellQuery, page: Page, settings: ServingSettings, units: Units) -> pa.Table:
    """Return ``as_table`` of the ``answers`` for everybody on a page, whatever their number.

    Raises
    ------
    RequestError
        The query asks for what the model has not.
    """
    quantiles = bool(query.quantiles)

    def made(known: Known, piece: slice) -> pa.Table:
        margin_of_tier = margins_of(query, known.engine, settings.margin)
        some = None if page.limit is None else page.limit[piece]
        return as_table(answers(known, margin_of_tier, settings, some), units, quantiles=quantiles)

    return pa.concat_tables(
        tracker.visit(made, page.key, machines=query.machines, collections=query.collections, with_quantiles=quantiles)
    )


def as_table(found: Answers, units: Units, *, quantiles: bool = False) -> pa.Table:
    """Return the answers as a table, one row per task; the schema's metadata says what all of them rest on."""
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
    said = model_name(known.engine)
    about = {
        "model_name": said.name, "model_version": said.version, "horizon_s": str(known.engine.horizon_s),
        "levels": ",".join(map(str, known.engine.levels)), "cpu_unit": units.cpu, "memory_unit": units.memory,
        "clock_us": str(known.clock_us), "tracked": str(known.tracked),
    }  # fmt: skip
    return pa.table(columns).replace_schema_metadata(about)


def one_task(found: Answers, row: int, quantiles: bool) -> CellReservation:
    """Return the answer for the task of one row."""
    known = found.known
    task = known.task[row]
    seen = bool(task[s.END_US] >= 0)
    rules = dict(zip(RESOURCES, (SERVED_RULES[k] for k in found.estimate.rule[row]), strict=True))
    return CellReservation(
        collection_id=int(known.key[row, 0]),
        instance_index=int(known.key[row, 1]),
        machine_id=or_none(int(task["machine"])),
        tier=None if task["tier"] < 0 else TIERS[task["tier"]],
        margin=MARGIN_NAMES[found.margin[row]],
        reservation=_known(found.estimate.reservation[row]),
        limit=_known(found.limit[row]),
        rule=ResourceRules(**rules),  # type: ignore[arg-type]  # names of rules
        history=History(
            windows=int(task["windows"]),
            age_s=float(task[s.END_US] - task["first_us"]) / _US if seen else 0.0,
            end_us=or_none(int(task[s.END_US])),
        ),
        oom_probability=finite(float(known.scores.oom[row])),
        quantiles=named(_quantiles(found, row)) if quantiles and seen else None,
    )


def _quantiles(found: Answers, row: int | slice = slice(None)) -> NDArray[np.float64]:
    """Return quantiles in the unit of the limit; peak CPU is over the CPU limit."""
    granted = found.known.task["granted"][row]
    over: NDArray[np.float64] = granted[..., [0, 1, 0], None]
    amounts: NDArray[np.float64] = found.known.scores.quantiles[row] * over
    return amounts


def named(quantiles: NDArray[np.float64]) -> Quantiles:
    """Return quantiles by target, null what is not foreseen; shape (n_targets, n_levels)."""
    return Quantiles(
        **{name: q.tolist() if np.isfinite(q).all() else None for name, q in zip(TARGETS, quantiles, strict=True)}
    )


def resources(amounts: NDArray[np.float64]) -> Resources:
    """Return amounts by resource; shape (n_resources,), all of them finite."""
    return Resources(**{resource: float(v) for resource, v in zip(RESOURCES, amounts, strict=True)})


def _known(amounts: NDArray[np.float64]) -> Resources | None:
    return resources(amounts) if np.isfinite(amounts).all() else None


def _amounts(values: NDArray[np.float64]) -> pa.Array:
    unknown = np.isnan(values)
    return pa.array(values, mask=unknown) if unknown.any() else pa.array(values)


def finite(value: float) -> float | None:
    """Return a number, or None where it is none."""
    return value if np.isfinite(value) else None


def or_none(value: int) -> int | None:
    """Return an id or a time, or None where it is unknown."""
    return None if value < 0 else value


def model_name(engine: Engine) -> ModelName:
    """Return which model answers."""
    return ModelName(name=engine.model.name, version=engine.model.version)
