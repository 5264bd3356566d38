"""Explains a reservation: history, forecast, and each step from there to the answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from reclaim.data import schema as s
from reclaim.data.schema import RESOURCES
from reclaim.data.windows import CHANNELS, demand
from reclaim.features.targets import HORIZONS_S
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
)
from reclaim.serving.answers.stateful import Answers, one_task
from reclaim.serving.answers.stateless import under_current_limit
from reclaim.serving.wire.cell_schemas import HorizonQuantiles, Step, TaskExplanation
from reclaim.serving.wire.schemas import Resources, Window
from reclaim.training.estimators.base import CAP, JUMP, STARTUP
from reclaim.training.margins.margin import MARGIN_NAMES, STARTUP_HOLD_S

if TYPE_CHECKING:
    from reclaim.serving.wire.schemas import Units


def explain(found: Answers, units: Units) -> TaskExplanation:
    """Return the state of one task and the steps to its reservation; its features must be present."""
    known, scorer = found.known, found.known.scorer
    task = known.task[0]
    seen = bool(task[s.END_US] >= 0)
    by_margin: dict[str, Resources] = {}
    steps: list[Step] = []
    forecast: list[HorizonQuantiles] = []
    if seen and known.x is not None:
        last = known.last
        overruled = np.isin(found.estimate.rule, (STALE, OPT_OUT))  # whatever the margin
        for name in MARGIN_NAMES:
            under = under_current_limit(scorer.estimate(name, known.scores.bare, last), found.limit)
            by_margin[name] = resources(np.where(overruled, found.limit, under.reservation)[0])
        steps = _steps(found)
        whole = scorer.model.bundle.forecaster.predict(known.x)
        for horizon_s in scorer.model.bundle.forecaster.horizons_s:
            h = HORIZONS_S.index(horizon_s)
            forecast.append(
                HorizonQuantiles(
                    horizon_s=horizon_s,
                    oom_probability=finite(float(whole.oom_probability[0, h])),
                    quantiles=by_target(amounts_of(whole.quantiles[0, :, h], last.limit[0])),
                )
            )
    return TaskExplanation(
        model=model_name(scorer.model), horizon_s=scorer.horizon_s, levels=list(scorer.levels), units=units,
        clock_us=known_or_none(known.clock_us), task=one_task(found, 0, quantiles=True),
        limit_since_us=known_or_none(int(task["limit_us"])), scheduled_us=known_or_none(int(task[s.SCHEDULED_US])),
        scheduling_class=known_or_none(int(task[s.SCHEDULING_CLASS])), in_alloc=bool(task["in_alloc"]),
        estimation=not known.opted_out[0], last_window=_window(found) if seen else None,
        by_margin=by_margin, steps=steps, forecast=forecast,
    )  # fmt: skip


def _steps(found: Answers) -> list[Step]:
    """Return the steps from the plans to the answer, in words with numbers."""
    known, scorer = found.known, found.known.scorer
    last, name = known.last, MARGIN_NAMES[found.margin[0]]
    plans = dict(zip(scorer.plans, known.scores.bare[0], strict=True))
    margins: Mapping[str, tuple[float, ...]] = {n: m.share for n, m in scorer.model.bundle.margins.items()}
    steps = [
        Step(
            rule="model",
            amounts=resources(amounts),
            why=f"the reservation of the {plan} margin's plan for the forecast",
        )
        for plan, amounts in plans.items()
        if np.isfinite(amounts).all()
    ]
    if not steps:
        steps.append(
            Step(rule="unknown", amounts=resources(found.limit[0]), why="the limit, as the model has no forecast")
        )
    elif known.scores.bare.shape:
        widened = scorer.widened(name, known.scores.bare, last)[0]
        shares = " and ".join(f"{share:+.1%} of {r}" for share, r in zip(margins[name], RESOURCES, strict=True))
        steps.append(Step(rule="model", amounts=resources(widened), why=f"under the {name} margin, {shares} over all"))
    now = demand(last)[0]
    for rule, amounts, why in (
        (JUMP, now, "no less than the last window demanded"),
        (CAP, found.limit[0], "no more than the current limit"),
        (STARTUP, found.limit[0], f"the limit, as its run is younger than {STARTUP_HOLD_S:g} s"),
        (STALE, found.limit[0], "the limit, as there was no news of it for too long"),
        (OPT_OUT, found.limit[0], "the limit, as its collection has no estimation"),
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
