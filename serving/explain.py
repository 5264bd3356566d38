"""Why a task has the reservation it has: its history, its forecast, and each step from there to the answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from reclaim.data import schema as s
from reclaim.data.schema import RESOURCES
from reclaim.data.windows import CHANNELS, demand
from reclaim.features.targets import HORIZONS_S
from reclaim.serving.answer import under_limit_of_now
from reclaim.serving.cell_answer import (
    OPT_OUT,
    SERVED_RULES,
    STALE,
    Answers,
    finite,
    model_name,
    named,
    one_task,
    or_none,
    resources,
)
from reclaim.serving.cell_schemas import HorizonQuantiles, Step, TaskExplanation
from reclaim.serving.schemas import Resources, Window
from reclaim.training.estimators.base import CAP, JUMP, STARTUP
from reclaim.training.estimators.margin import MARGIN_NAMES, STARTUP_HOLD_S

if TYPE_CHECKING:
    from reclaim.serving.schemas import Units


def explain(found: Answers, units: Units) -> TaskExplanation:
    """Return all that is known of the one task, and how its reservation came about; its features must be there."""
    known, engine = found.known, found.known.engine
    task = known.task[0]
    seen = bool(task[s.END_US] >= 0)
    by_margin: dict[str, Resources] = {}
    steps: list[Step] = []
    forecast: list[HorizonQuantiles] = []
    if seen and known.x is not None:
        last = known.last
        for name in MARGIN_NAMES:
            under = under_limit_of_now(engine.estimate(name, known.scores.bare, last), found.limit)
            by_margin[name] = resources(under.reservation[0])
        steps = _steps(found)
        over = np.array([last.limit[0, 0], last.limit[0, 1], last.limit[0, 0]])[:, None]
        whole = engine.model.bundle.forecaster.predict(known.x)
        for horizon_s in engine.model.bundle.forecaster.horizons_s:
            h = HORIZONS_S.index(horizon_s)
            forecast.append(
                HorizonQuantiles(
                    horizon_s=horizon_s,
                    oom_probability=finite(float(whole.oom_probability[0, h])),
                    quantiles=named(whole.quantiles[0, :, h] * over),
                )
            )
    return TaskExplanation(
        model=model_name(engine), horizon_s=engine.horizon_s, levels=list(engine.levels), units=units,
        clock_us=or_none(known.clock_us), task=one_task(found, 0, quantiles=True),
        limit_since_us=or_none(int(task["limit_us"])), scheduled_us=or_none(int(task[s.SCHEDULED_US])),
        scheduling_class=or_none(int(task[s.SCHEDULING_CLASS])), in_alloc=bool(task["in_alloc"]),
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
            amounts=resources(amounts),
            why=f"what the plan of the {plan} margin reserves of the forecast",
        )
        for plan, amounts in plans.items()
        if np.isfinite(amounts).all()
    ]
    if not steps:
        steps.append(
            Step(rule="unknown", amounts=resources(found.limit[0]), why="the model foresees nothing: the limit")
        )
    elif known.scores.bare.shape:
        widened = engine.widened(name, known.scores.bare, last)[0]
        shares = " and ".join(f"{share:+.1%} of {r}" for share, r in zip(margins[name], RESOURCES, strict=True))
        steps.append(Step(rule="model", amounts=resources(widened), why=f"under the {name} margin, {shares} over all"))
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
            steps.append(Step(rule=SERVED_RULES[rule], amounts=resources(amounts), why=f"{why} ({', '.join(won)})"))
    return steps


def _window(found: Answers) -> Window:
    last = found.known.last
    measured = {n: float(v) for n, v in zip(CHANNELS, last.usage[0], strict=True) if np.isfinite(v)}
    limit = resources(last.limit[0])
    return Window.model_validate(
        {
            s.START_US: int(last.start_us[0]),
            s.END_US: int(last.end_us[0]),
            "limit": limit.model_dump(),
            **measured,
        }
    )
