"""Summary of a closed loop: kills, throttling, waiting, wasted work, and the workload in reclaimed resources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from reclaim.data.schema import DAY_US, HOUR_US, RESOURCES
from reclaim.replay.closed_loop.records import (
    AHEAD,
    CAUSES,
    DONE,
    MACHINE,
    NO_REASON,
    NON_PRODUCTION,
    OWN_LIMIT,
    REASONS,
    RUNNING,
)
from reclaim.replay.closed_loop.simulate import Outcome
from reclaim.replay.open_loop.rows import ratio

_BANDS: Final = ("production", "non_production")
_CLASSES: Final = ("batch", "latency_sensitive")

DEFINITIONS: Final[Mapping[str, str]] = {
    "closed loop": (
        "The cell's machines run the trace's workload again. Production and monitoring tasks are placed by limit, and "
        "never on reclaimed resources; the others by limit into what the reservations of all tasks on a machine leave "
        "free, each at least what its task uses just now. A task may preempt what has a lower priority, production "
        "never production. An estimator of machines reserves for all tasks on one together, and no less than they use; "
        "a task counts its limit for the first five minutes."
    ),
    "gives way": (
        "With `--set scheduling.gives_way=true` non-production is preempted, from the lowest priority up, as soon as "
        "more memory is reserved on a machine than it has."
    ),
    "kill, out of memory": (
        "At the start of a slot, and whenever a task is placed, a machine on which the largest memory of the tasks' "
        "present windows adds up to more than it has stops tasks until it can meet the reservations of the rest: "
        "first those above their own limit (cause own_limit), then from the lowest priority up (cause machine), "
        "production last, and only while usage itself does not fit. What was stopped comes back in the next slot at "
        "the earliest. Windows of five minutes are taken to reach their largest usage at once, which is harder than "
        "it was."
    ),
    "recorded out of memory": (
        "Runs that ended in the trace's own out-of-memory label, recorded or derived, and end so here, "
        "under any estimator."
    ),
    "throttled": (
        "Mean CPU of the present windows above the machine's, times the slot: of batch work first, of "
        "latency-sensitive work what is left. It is not made up for later."
    ),
    "in reclaimed resources": (
        "Limits of the tasks on a machine above its capacity, summed over machines and slots, over the sum of all "
        "limits: the share of the workload that could not be there if every task were given its limit. Limits that "
        "grow while a task runs are counted, too, so that it may be above zero without reclamation: that is the floor."
    ),
    "peaks passed": (
        "Times of machines at which their tasks came to more, within the horizon, than was reserved for them: the "
        "tasks that were there, for as long as they stayed, each up to its limit of that time."
    ),
    "passed at once": "Times at which more than a tenth of the machines, and more than two, were passed.",
    "waiting": "Task-time spent waiting for a machine, over task-time waiting or running.",
    "delay": (
        "From when a run lacks only a machine to its first placement; for a run never placed, to the end of the "
        "period, or of the time in which it should have run."
    ),
    "waited for": (
        "Why tasks waited, by the slots they waited: most machines lacked CPU alone, memory alone, or both; they were "
        "too small for the task, or not such as its constraints ask for; or those with room held as many of its job as "
        "may be on one. The reason is that of the last search for the task, or for one that asks for no more."
    ),
    "wasted": "Task-time of batch work done for nothing, because it was stopped and began again, over all of batch.",
    "missed": "Task-time in which a service should have run and did not, over all in which it should.",
}
"""Meaning of the numbers of ``summary``, for a report."""


def summary(outcome: Outcome) -> dict[str, float | None]:
    """Return the numbers of an outcome; see ``DEFINITIONS``. None where there is nothing to divide by."""
    runs, ticks = outcome.runs, outcome.ticks
    task_days = float(runs["ran_us"].sum()) / DAY_US
    kills = runs["kills"].sum(axis=0)
    ran = (runs["state"] == DONE) & (runs["first_placed_us"] >= 0)
    ended_so = int((outcome.workload.ends_out_of_memory & ran).sum())
    found: dict[str, float | None] = {
        "task_days": task_days,
        "oom_kills": float(kills[OWN_LIMIT] + kills[MACHINE]),
        "oom_kills_per_1000_task_days": _share(1000 * (kills[OWN_LIMIT] + kills[MACHINE]), task_days),
        "recorded_oom_per_1000_task_days": _share(1000 * ended_so, task_days),
        "runs_killed": float((runs["kills"][:, [OWN_LIMIT, MACHINE]] > 0).any(axis=1).sum()),
        "times_out_of_memory": float(ticks["out_of_memory"].sum()),
    }
    for c, cause in enumerate(CAUSES):
        found[f"{cause}_per_1000_task_days"] = _share(1000 * kills[c], task_days)
    production = runs["band"] > NON_PRODUCTION
    found["production_oom_kills"] = float(runs["kills"][production][:, [OWN_LIMIT, MACHINE]].sum())
    for r, resource in enumerate(RESOURCES):
        capacity, limit = ticks["capacity"][:, r].sum(), ticks["limit"][:, r].sum()
        found[f"utilisation_{resource}"] = _share(ticks["use"][:, r].sum(), capacity)
        found[f"granted_{resource}"] = _share(limit, capacity)
        found[f"reserved_{resource}"] = _share(ticks["reserved"][:, r].sum(), capacity)
        found[f"in_reclaimed_{resource}"] = _share(ticks["in_reclaimed"][:, r].sum(), limit)
        found[f"machines_over_{resource}"] = _share(outcome.held.over[r], outcome.held.judged)
        found[f"machines_over_at_once_{resource}"] = _share(outcome.held.crowded[r], outcome.held.times)
    for c, name in enumerate(_CLASSES):
        found[f"throttled_{name}"] = _share(ticks["throttled_s"][:, c].sum(), ticks["cpu_s"][:, c].sum())
        found[f"throttled_cpu_hours_{name}"] = float(ticks["throttled_s"][:, c].sum()) / 3600
    found["waiting"] = _share(runs["waited_us"].sum(), runs["waited_us"].sum() + runs["ran_us"].sum())
    delay_s = _delays_s(outcome)
    for name, chosen in zip(_BANDS, (production, ~production), strict=True):
        of_band = delay_s[chosen & np.isfinite(delay_s)]
        for level in (50, 90, 99):
            found[f"delay_p{level}_s_{name}"] = float(np.percentile(of_band, level)) if len(of_band) else None
        band_waits = runs["waited_us"][chosen].sum()
        found[f"waiting_{name}"] = _share(band_waits, band_waits + runs["ran_us"][chosen].sum())
    slots_waited = ticks["reasons"].sum(axis=0)
    for k, reason in enumerate(REASONS):
        if k != NO_REASON:
            found[f"waiting_for_{reason}"] = _share(slots_waited[k], slots_waited[NO_REASON + 1 :].sum())
    work = balance(outcome)
    found["wasted"] = _share(work["lost_h"], work["executed_h"])
    found["missed"] = _share(work["missed_h"], work["due_h"])
    found["finished"] = float(ran.sum())
    found["never_placed"] = float(((runs["first_placed_us"] < 0) & (runs["ready_us"] >= 0)).sum())
    return found | {f"work_{name}": value for name, value in work.items()}


def mean_of(values: Sequence[Any]) -> Any:
    """Return the mean of numbers, lists and mappings of one shape, number by number; None where one of them is None."""
    one = values[0]
    if isinstance(one, Mapping):
        return {key: mean_of([value[key] for value in values]) for key in one}
    if isinstance(one, list):
        return [mean_of(list(of)) for of in zip(*values, strict=True)]
    if isinstance(one, str):
        return one
    return None if any(value is None for value in values) else sum(values) / len(values)


def balance(outcome: Outcome) -> dict[str, float]:
    """Return the balance of work, in task-hours.

    Of batch work ``asked_h`` is ``done_h`` and ``left_h``, and ``executed_h`` is ``done_h`` and ``lost_h``. Of services
    ``due_h``, up to the end of the period, is ``served_h`` and ``missed_h``.
    """
    runs, stop_us = outcome.runs, outcome.workload.stop_us
    came = runs["state"] != AHEAD
    batch, service = came & ~runs["service"], came & runs["service"]
    progress_us = runs["offset_us"] + np.where(runs["state"] == RUNNING, stop_us - runs["placed_us"], 0)
    done_us = np.where(runs["state"] == DONE, runs["duration_us"], progress_us)
    due_us = np.minimum(runs["duration_us"], stop_us - runs["arrival_us"])
    hours = {
        "asked_h": runs["duration_us"][batch],
        "done_h": done_us[batch],
        "left_h": (runs["duration_us"] - done_us)[batch],
        "executed_h": runs["ran_us"][batch],
        "lost_h": runs["lost_us"][batch],
        "due_h": due_us[service],
        "served_h": runs["ran_us"][service],
        "missed_h": (due_us - runs["ran_us"])[service],
    }
    return {name: float(values.sum()) / HOUR_US for name, values in hours.items()}


def _delays_s(outcome: Outcome) -> NDArray[np.float64]:
    """Return each run's delay in seconds, NaN of those that ran before the period or were not ready by its end."""
    runs = outcome.runs
    gone = np.where(runs["state"] == DONE, runs["ended_us"], outcome.workload.stop_us)
    until = np.where(runs["first_placed_us"] >= 0, runs["first_placed_us"], gone)
    counted = ~outcome.workload.runs["carried"] & (runs["ready_us"] >= 0)
    return np.where(counted, (until - runs["ready_us"]) / 1e6, np.nan)


def over_time(outcome: Outcome, bins: int) -> dict[str, list[Any]]:
    """Return usage, reservation and limit as shares of the capacity in at most ``bins`` bins, and kills so far."""
    ticks = outcome.ticks
    per_bin = max(1, -(-len(ticks) // bins))
    starts = np.arange(0, len(ticks), per_bin)
    capacity = np.add.reduceat(ticks["capacity"], starts, axis=0)
    out: dict[str, list[Any]] = {"hours": (starts * outcome.workload.slot_s / 3600).tolist()}
    for name in ("use", "reserved", "limit", "in_reclaimed"):
        shares = ratio(np.add.reduceat(ticks[name], starts, axis=0), capacity)
        for r, resource in enumerate(RESOURCES):
            out[f"{name}_{resource}"] = [None if not np.isfinite(v) else float(v) for v in shares[:, r]]
    kills = ticks["kills"][:, [OWN_LIMIT, MACHINE]].sum(axis=1)
    out["oom_kills"] = np.cumsum(np.add.reduceat(kills, starts)).tolist()
    waiting = np.add.reduceat(ticks["pending"].sum(axis=1), starts) / np.diff(np.append(starts, len(ticks)))
    out["waiting"] = waiting.tolist()
    return out


def _share(part: Any, whole: Any) -> float | None:
    return float(part) / float(whole) if whole > 0 else None
