"""From what is known of a cell's tasks to answers: margins, guards, the service's own rules; as JSON or as a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from reclaim.data import schema as s
from reclaim.data.errors import ModelError
from reclaim.data.schema import RESOURCES, TIERS
from reclaim.data.windows import demand
from reclaim.features.targets import HORIZONS_S, TARGETS
from reclaim.serving.answer import under_limit_of_now
from reclaim.serving.cell_schemas import (
    CellAnswer,
    CellQuery,
    CellReservation,
    HorizonQuantiles,
    Step,
    TaskExplanation,
)
from reclaim.serving.errors import INVALID, RequestError
from reclaim.serving.schemas import MAX_ID, History, ModelName, Quantiles, ResourceRules, Resources, Units, Window
from reclaim.training.estimators.base import CAP, JUMP, RULES, STARTUP, UNKNOWN, Estimate
from reclaim.training.estimators.margin import MARGIN_NAMES, STARTUP_HOLD_S

if TYPE_CHECKING:
    from reclaim.serving.engine import Engine
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


@dataclass(frozen=True)
class Page:
    """Whose turn it is.

    Attributes
    ----------
    key : int64, shape (n, 2), or None
        Collection and index; None: everybody that the query asks for.
    limit : float64, shape (n, n_resources), or None
        What those get of whom nothing is known, NaN where the query does not say.
    following : str or None
        Where the next page goes on.
    """

    key: NDArray[np.int64] | None = None
    limit: NDArray[np.float64] | None = None
    following: str | None = None


def page_of(query: CellQuery, tracker: Tracker, key: NDArray[np.int64] | None, *, whole: bool) -> Page:
    """Return the page of tasks that a query asks for.

    Parameters
    ----------
    query : CellQuery
    tracker : Tracker
    key : int64, shape (n, 2), or None
        Only these tasks, in order of collection and index, whatever the query says.
    whole : bool
        All on one page.

    Raises
    ------
    RequestError
        ``after`` is none that an answer gave.
    """
    if key is None and query.tasks is not None:
        names = np.array([(t.collection_id, t.instance_index) for t in query.tasks], np.int64).reshape(-1, 2)
        nothing = (np.nan,) * len(RESOURCES)
        told = [nothing if t.limit is None else (t.limit.cpu, t.limit.memory) for t in query.tasks]
        limit = np.array(told).reshape(-1, len(RESOURCES))
        start = 0 if query.after is None else _cursor(query.after, 1)[0]
        if whole:
            return Page(names, limit)
        stop = start + query.page_size
        return Page(names[start:stop], limit[start:stop], str(stop) if stop < len(names) else None)
    if whole:
        return Page(key)
    names = tracker.names(query.machines, query.collections) if key is None else key
    start = 0
    if query.after is not None:
        collection, index = _cursor(query.after, 2)
        start = int(
            np.count_nonzero((names[:, 0] < collection) | ((names[:, 0] == collection) & (names[:, 1] <= index)))
        )
    stop = start + query.page_size
    following = f"{names[stop - 1, 0]}:{names[stop - 1, 1]}" if stop < len(names) else None
    return Page(names[start:stop], None, following)


def _cursor(after: str, n: int) -> list[int]:
    parts = after.split(":")
    if len(parts) != n or not all(p.isascii() and p.isdecimal() and int(p) <= MAX_ID for p in parts):
        raise RequestError(INVALID, "invalid_field", "after: must be the `next` of an answer", field="after")
    return [int(p) for p in parts]


def margins_of(query: CellQuery, engine: Engine, default: str) -> NDArray[np.int64]:
    """Return the margin of each tier as a position in ``MARGIN_NAMES``; shape (1 + n_tiers,), the unknown tier first.

    Raises
    ------
    RequestError
        A margin is unknown, or none keeps to a budget.
    """

    def position(name: str | None, budget: float | None, field: str) -> int:
        if budget is not None:
            if name is not None:
                raise RequestError(INVALID, "margin_and_budget", f"{field}: give a margin or a budget, not both")
            try:
                return MARGIN_NAMES.index(engine.within_budget(budget))
            except ModelError as error:
                raise RequestError(INVALID, "budget_too_small", f"{field}: {error}", field=field) from error
        if name not in MARGIN_NAMES:
            expected = ", ".join(MARGIN_NAMES)
            message = f"{field}: expected one of {expected}, got {name!r}"
            raise RequestError(INVALID, "unknown_margin", message, field=field)
        return MARGIN_NAMES.index(name)

    name = default if query.margin is None and query.budget is None else query.margin
    everybody = position(name, query.budget, "margin" if query.budget is None else "budget")
    out = np.full(1 + len(TIERS), everybody)
    for k, tier in enumerate(TIERS, 1):
        if tier in query.margins or tier in query.budgets:
            field = f"margins.{tier}" if tier in query.margins else f"budgets.{tier}"
            out[k] = position(query.margins.get(tier), query.budgets.get(tier), field)
    return out


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
    seen = task["end_us"] >= 0
    last = known.last
    for number in np.unique(margin[seen]):
        rows = np.flatnonzero(seen & (margin == number))
        some = known.last if len(rows) == n else last.take(rows)
        bare = known.scores.bare if len(rows) == n else known.scores.bare[rows]
        made = known.engine.estimate(MARGIN_NAMES[number], bare, some)
        estimate.reservation[rows], estimate.rule[rows] = made.reservation, made.rule
    estimate = under_limit_of_now(estimate, limit)
    stale_us = _stale_us(settings, known.engine)
    stale = seen & (task["end_us"] + stale_us < known.present_us)
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
        model=_model(known.engine),
        horizon_s=known.engine.horizon_s,
        levels=list(known.engine.levels),
        units=units,
        clock_us=_or_none(known.clock_us),
        tracked=known.tracked,
        tasks=[_task(found, row, quantiles) for row in range(len(known.key))],
        next=following,
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
    seen = task["end_us"] >= 0
    columns["windows"] = pa.array(task["windows"])
    columns["age_s"] = pa.array(np.where(seen, (task["end_us"] - task["first_us"]) / _US, 0.0))
    columns[s.END_US] = whole(task["end_us"])
    columns["oom_probability"] = _amounts(known.scores.oom)
    if quantiles:
        for name, amounts in zip(TARGETS, _quantiles(found).transpose(1, 0, 2), strict=True):
            flat = _amounts(np.ascontiguousarray(amounts).reshape(-1))
            columns[f"{name}_quantiles"] = pa.FixedSizeListArray.from_arrays(flat, amounts.shape[1])
    model = _model(known.engine)
    about = {
        "model_name": model.name, "model_version": model.version, "horizon_s": str(known.engine.horizon_s),
        "levels": ",".join(map(str, known.engine.levels)), "cpu_unit": units.cpu, "memory_unit": units.memory,
        "clock_us": str(known.clock_us), "tracked": str(known.tracked),
    }  # fmt: skip
    return pa.table(columns).replace_schema_metadata(about)


def explain(found: Answers, units: Units) -> TaskExplanation:
    """Return all that is known of the one task, and how its reservation came about; its features must be there."""
    known, engine = found.known, found.known.engine
    task = known.task[0]
    seen = bool(task["end_us"] >= 0)
    by_margin, steps, forecast = {}, [], []
    if seen and known.x is not None:
        last = known.last
        for name in MARGIN_NAMES:
            under = under_limit_of_now(engine.estimate(name, known.scores.bare, last), found.limit)
            by_margin[name] = _resources(under.reservation[0])
        steps = _steps(found)
        over = np.array([last.limit[0, 0], last.limit[0, 1], last.limit[0, 0]])[:, None]
        whole = engine.model.bundle.forecaster.predict(known.x)
        for horizon_s in engine.model.bundle.forecaster.horizons_s:
            h = HORIZONS_S.index(horizon_s)
            forecast.append(
                HorizonQuantiles(
                    horizon_s=horizon_s,
                    oom_probability=_finite(float(whole.oom_probability[0, h])),
                    quantiles=_named(whole.quantiles[0, :, h] * over),
                )
            )
    return TaskExplanation(
        model=_model(engine), horizon_s=engine.horizon_s, levels=list(engine.levels), units=units,
        clock_us=_or_none(known.clock_us), task=_task(found, 0, quantiles=True),
        limit_since_us=_or_none(int(task["limit_us"])), scheduled_us=_or_none(int(task["scheduled_us"])),
        scheduling_class=_or_none(int(task["scheduling_class"])), in_alloc=bool(task["in_alloc"]),
        estimation=not known.opted_out[0], last_window=_window(found) if seen else None,
        by_margin=by_margin, steps=steps, forecast=forecast,
    )  # fmt: skip


def _steps(found: Answers) -> list[Step]:
    """Return the way from the plans to the answer, in words with the numbers."""
    known, engine = found.known, found.known.engine
    last, name = known.last, MARGIN_NAMES[found.margin[0]]
    plans = dict(zip(engine.plans, known.scores.bare[0], strict=True))
    margins: Mapping[str, tuple[float, ...]] = {n: m.share for n, m in engine.model.bundle.margins.items()}
    steps = [
        Step(
            rule="model",
            amounts=_resources(amounts),
            why=f"what the plan of the {plan} margin reserves of the forecast",
        )
        for plan, amounts in plans.items()
        if np.isfinite(amounts).all()
    ]
    if not steps:
        steps.append(
            Step(rule="unknown", amounts=_resources(found.limit[0]), why="the model foresees nothing: the limit")
        )
    elif known.scores.bare.shape:
        widened = engine.widened(name, known.scores.bare, last)[0]
        shares = " and ".join(f"{share:+.1%} of {r}" for share, r in zip(margins[name], RESOURCES, strict=True))
        steps.append(Step(rule="model", amounts=_resources(widened), why=f"under the {name} margin, {shares} over all"))
    now = demand(last)[0]
    for rule, amounts, why in (
        (JUMP, now, "no less than the last window demanded"),
        (CAP, found.limit[0], "no more than the limit of now"),
        (STARTUP, found.limit[0], f"the limit, as its run is younger than {STARTUP_HOLD_S:g} s"),
        (STALE, found.limit[0], "the limit, as nothing was heard of it for too long"),
        (OPT_OUT, found.limit[0], "the limit, as its collection wants no estimation"),
    ):
        won = [r for k, r in enumerate(RESOURCES) if found.estimate.rule[0, k] == rule]
        if won:
            steps.append(Step(rule=SERVED_RULES[rule], amounts=_resources(amounts), why=f"{why} ({', '.join(won)})"))
    return steps


def _window(found: Answers) -> Window:
    last = found.known.last
    names = ("cpu_mean", "cpu_max", "memory_mean", "memory_max", "page_cache", "cpi", "mai")
    measured = {n: float(v) for n, v in zip(names, last.usage[0], strict=True) if np.isfinite(v)}
    limit = _resources(last.limit[0])
    return Window.model_validate(
        {
            "start_us": int(last.start_us[0]),
            "end_us": int(last.end_us[0]),
            "limit": None if limit is None else limit.model_dump(),
            **measured,
        }
    )


def _task(found: Answers, row: int, quantiles: bool) -> CellReservation:
    known = found.known
    task = known.task[row]
    seen = bool(task["end_us"] >= 0)
    rules = dict(zip(RESOURCES, (SERVED_RULES[k] for k in found.estimate.rule[row]), strict=True))
    return CellReservation(
        collection_id=int(known.key[row, 0]),
        instance_index=int(known.key[row, 1]),
        machine_id=_or_none(int(task["machine"])),
        tier=None if task["tier"] < 0 else TIERS[task["tier"]],  # type: ignore[arg-type]  # a tuple of names
        margin=MARGIN_NAMES[found.margin[row]],
        reservation=_resources(found.estimate.reservation[row]),
        limit=_resources(found.limit[row]),
        rule=ResourceRules(**rules),  # type: ignore[arg-type]  # names of rules
        history=History(
            windows=int(task["windows"]),
            age_s=float(task["end_us"] - task["first_us"]) / _US if seen else 0.0,
            end_us=_or_none(int(task["end_us"])),
        ),
        oom_probability=_finite(float(known.scores.oom[row])),
        quantiles=_named(_quantiles(found, row)) if quantiles and seen else None,
    )


def _quantiles(found: Answers, row: int | slice = slice(None)) -> NDArray[np.float64]:
    """Return quantiles in the unit of the limit; peak CPU is over the CPU limit."""
    granted = found.known.task["granted"][row]
    over: NDArray[np.float64] = granted[..., [0, 1, 0], None]
    amounts: NDArray[np.float64] = found.known.scores.quantiles[row] * over
    return amounts


def _named(quantiles: NDArray[np.float64]) -> Quantiles:
    return Quantiles(
        **{name: q.tolist() if np.isfinite(q).all() else None for name, q in zip(TARGETS, quantiles, strict=True)}
    )


def _resources(amounts: NDArray[np.float64]) -> Resources | None:
    if not np.isfinite(amounts).all():
        return None
    return Resources(**{resource: float(v) for resource, v in zip(RESOURCES, amounts, strict=True)})


def _amounts(values: NDArray[np.float64]) -> pa.Array:
    unknown = np.isnan(values)
    return pa.array(values, mask=unknown) if unknown.any() else pa.array(values)


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None


def _or_none(value: int) -> int | None:
    return None if value < 0 else value


def _model(engine: Engine) -> ModelName:
    return ModelName(name=engine.model.name, version=engine.model.version)
