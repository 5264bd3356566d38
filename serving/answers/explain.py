"""Explains a reservation: history, forecast, and each step from there to the answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from reclaim.data import schema as s
from reclaim.data.schema import RESOURCES
from reclaim.data.windows import CHANNELS, demand
from reclaim.features.groups import TIER_LABELS, tier_key
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
from reclaim.serving.models.scorer import priced, reserved
from reclaim.serving.wire.cell_schemas import Exceedance, HorizonQuantiles, Step, TaskExplanation
from reclaim.serving.wire.schemas import Resources, Window
from reclaim.training.estimators.base import CAP, JUMP, STARTUP, UNKNOWN
from reclaim.training.margins.ladder import price_of
from reclaim.training.margins.margin import MARGIN_NAMES, STARTUP_HOLD_S
from reclaim.training.margins.online import BUDGETED
from reclaim.training.models.survival import exceedance

if TYPE_CHECKING:
    from reclaim.serving.cell.views import Known
    from reclaim.serving.wire.schemas import Units
    from reclaim.training.estimators.base import Forecast


def explain(found: Answers, units: Units) -> TaskExplanation:
    """Return the state of one task and the steps to its reservation; its features must be present."""
    known, scorer = found.known, found.known.scorer
    task = known.task[0]
    seen = bool(task[s.END_US] >= 0)
    by_margin: dict[str, Resources] = {}
    steps: list[Step] = []
    forecast: list[HorizonQuantiles] = []
    likely: Exceedance | None = None
    if seen and known.x is not None:
        last = known.last
        overruled = np.isin(found.estimate.rule, (STALE, OPT_OUT))  # whatever the margin
        for name in MARGIN_NAMES:
            under = under_current_limit(
                reserved(known.prices.now[name], known.scores.steps, last), last.limit, found.limit
            )
            by_margin[name] = resources(np.where(overruled, found.limit, under.reservation)[0])
        whole = scorer.model.bundle.forecaster.predict(known.x)
        before_guards = priced(known.prices.now[MARGIN_NAMES[found.margin[0]]], known.scores.steps, last)[0]
        steps = _steps(found, before_guards, _exceeded(found, whole, before_guards))
        exceeded = _exceeded(found, whole, found.estimate.reservation[0]).tolist()
        likely = Exceedance(**dict(zip(RESOURCES, map(finite, exceeded), strict=True)))
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
        by_margin=by_margin, steps=steps, exceedance=likely, forecast=forecast,
    )  # fmt: skip


def _steps(found: Answers, bare: NDArray[np.float64], exceeded: NDArray[np.float64]) -> list[Step]:
    """Return the steps from the price to the answer, in words with numbers.

    Parameters
    ----------
    found : Answers
        Of one task.
    bare, exceeded : float64, shape (n_resources,)
        What the price reserves before any guard, and the probability that a demand exceeds it.
    """
    known, scorer = found.known, found.known.scorer
    last, name = known.last, MARGIN_NAMES[found.margin[0]]
    now, limit, forecast = demand(last)[0], found.limit[0], np.isfinite(bare)
    amounts, steps = np.where(forecast, bare, limit), []
    if forecast.any():
        likely = " and ".join(f"{p:.2g} for {r}" for p, r in zip(exceeded, RESOURCES, strict=True) if np.isfinite(p))
        why = (
            f"the least cost at the price of the {name} margin, {_price_in_words(known, name)}; demand exceeds it "
            f"within {scorer.horizon_s} s with a probability of {likely}"
        )
        steps.append(Step(rule="model", amounts=resources(amounts), why=why))
    if not forecast.all():
        why = f"the limit, as the model has no forecast ({', '.join(np.array(RESOURCES)[~forecast])})"
        steps.append(Step(rule="unknown", amounts=resources(amounts), why=why))
    for rule, bound, why in (
        (UNKNOWN, limit, "the limit, as the whole limit of the last window is reserved"),
        (JUMP, now, "no less than the last window demanded"),
        (CAP, limit, "no more than the current limit"),
        (STARTUP, limit, f"the limit, as its run is younger than {STARTUP_HOLD_S:g} s"),
        (STALE, limit, "the limit, as no window of it came for too long"),
        (OPT_OUT, limit, "the limit, as its collection has no estimation"),
    ):
        won = (found.estimate.rule[0] == rule) & (forecast if rule == UNKNOWN else True)
        if won.any():
            amounts = np.where(won, bound, amounts)  # for the others, the last window may have measured nothing
            why = f"{why} ({', '.join(np.array(RESOURCES)[won])})"
            steps.append(Step(rule=SERVED_RULES[rule], amounts=resources(amounts), why=why))
    return steps


def _price_in_words(known: Known, margin: str) -> str:
    """Return the price of a task's reservation, and, where it follows the outcomes, why it is not the model's."""
    prices, tier = known.prices, int(tier_key(known.last.tier)[0])
    portable = known.scorer.model.bundle.portable
    start, now = (price_of(of[margin].rung(known.last))[0] for of in (prices.start, prices.now))
    said = []
    for r, resource in enumerate(RESOURCES):
        given = prices.start[margin].given[r]
        if prices.violated is None or given:
            said.append(f"{start[r]:.3g} for {resource}{', as given' if given else ''}")
            continue
        solved = prices.own is not None and bool(np.isfinite(prices.own[:, tier, r]).all())
        how = "set on validation" if not portable else "solved for this cell" if solved else "of its training sources"
        words = f"{start[r]:.3g} for {resource} {how}, now {now[r]:.3g}"
        if margin in BUDGETED:
            share, budget = prices.violated[BUDGETED.index(margin), tier, r], prices.budgets.of(margin)
            words += ", moved by violations as they come and by answers as their horizons end; "
            if np.isfinite(share):
                words += f"{share:.2%} of the answers of tier {TIER_LABELS[tier]} that were judged in the last day "
                words += f"or so were exceeded for a budget of {budget:.2%}"
            else:
                words += f"no answer of tier {TIER_LABELS[tier]} has been judged yet"
        else:
            words += f", between those of {' and '.join(BUDGETED)}"
        said.append(words)
    return ", and ".join(said) + " (limits of a task of mean size per violated window)"


def _exceeded(found: Answers, forecast: Forecast, reservation: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the probability that a demand within the horizon exceeds a reservation; shape (n_resources,)."""
    h = forecast.horizons_s.index(found.known.scorer.horizon_s)
    of_resources = slice(len(RESOURCES))
    share = reservation / found.known.last.limit[0]
    return exceedance(forecast.survival[0, of_resources, h], forecast.thresholds[0, of_resources], share)


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
