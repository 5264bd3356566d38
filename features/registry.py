"""Registry of features: name, formula, unit and missing value of each; the order is the model's input."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, Final

from reclaim.data.schema import RESOURCES, TIERS

SIGNALS: Final = ("cpu", "memory", "peak_cpu")
"""Signals that the statistics below describe, each over the limit: the demand a reservation must cover (``data.windows.
demand``) per resource, and the largest CPU usage inside the window."""

SLOT_S: Final = 300
"""Length in seconds of a slot of the trace's clock. What other tasks did is known slot by slot: at t, of the slots
before the one in which t lies. So the order in which the windows of one slot arrive makes no difference."""
SLOT_US: Final = SLOT_S * 1_000_000


LARGEST: Final = 1e6
"""No feature and no target is larger: a measurement a million times the limit is a fault, and infinity would spread."""


@dataclass(frozen=True)
class Feature:
    """One number that a model may look at.

    Attributes
    ----------
    name, formula, unit : str
        Formulas are over the windows that ended at or before t; "recent" ones are the last 24 at most.
    missing : str
        What the value is where there is nothing to compute it from.
    corrected : str
        Better words than the formula, which names the version of trained models and stays until that is raised.
    """

    name: str
    formula: str
    unit: str
    missing: str = "NaN"
    corrected: str = field(default="", repr=False)

    @property
    def words(self) -> str:
        """The formula for a reader."""
        return self.corrected or self.formula


RECENT_WINDOWS: Final = 24
"""Windows kept one by one, the "recent" ones: 2 hours of 5-minute windows."""

SAME_HOUR_DAYS: Final = (1, 2, 7)
"""Days ago of which a task's maximum around the same time of day is a feature."""
_SAME_HOUR: Final = (
    "largest in the clock hours {from_h} and {to_h} before this one, which hold the hour that began {from_h} h ago; "
    "kept in 16 steps to a doubling, rounded up, from 1/1024 to 60 times the first limit"
)

_STEPS: Final = ", in steps of 6 to 12 %"
_BINNED: Final = f"{_STEPS}, rounded up, from 1/128 to 1.875 times the first limit"
"""Edges of the bins of ``fold.task_record``: no percentile over time is above the last one."""


def _over_time(name: str, weighted: str) -> Feature:
    """Return a percentile over time, by what weighs in it."""
    return Feature(name, weighted + _STEPS, "of limit", corrected=weighted + _BINNED)


_STATISTICS: Final = (
    Feature("last", "the last window's value", "of limit"),
    Feature("mean_30m", "mean of the recent windows that ended within 30 minutes", "of limit"),
    Feature("mean_2h", "mean of the recent windows that ended within 2 hours", "of limit"),
    Feature("std_2h", "standard deviation (ddof 0) of the same windows", "of limit"),
    Feature("max_1h", "largest of the recent windows that ended within 1 hour", "of limit"),
    Feature("max_2h", "largest of the recent windows that ended within 2 hours", "of limit"),
    Feature("max_6h", "largest in this clock hour and the 5 before it", "of limit"),
    Feature("max_24h", "largest in this clock hour and the 23 before it", "of limit"),
    Feature(
        "max_7d",
        "largest in this clock hour and the 168 before it, kept as same_hour_1d is and so rounded up, but at most "
        "max_ever",
        "of limit",
    ),
    Feature("max_ever", "largest since the task was first seen", "of limit"),
    Feature(
        "slow_max",
        "maximum that decays towards the value with a half-life of 12 hours",
        "of limit",
        corrected="maximum that decays towards the value with a half-life of 12 hours; not over the time before a "
        "window that lacks the value",
    ),
    Feature("ewm_1h", "mean with weights that halve every hour", "of limit"),
    Feature("ewm_12h", "mean with weights that halve every 12 hours", "of limit"),
    _over_time("p99_12h", "99th percentile with weights that halve every 12 hours"),
    _over_time("p90_12h", "90th percentile with weights that halve every 12 hours"),
    *(
        Feature(f"same_hour_{days}d", _SAME_HOUR.format(from_h=24 * days, to_h=24 * days - 1), "of limit")
        for days in SAME_HOUR_DAYS
    ),
    Feature(
        "change_1h",
        "last value minus that of the recent window nearest to one hour ago",
        "of limit",
        "0 at the first window",
    ),
)

_RESOURCE: Final = (
    _over_time("p98_48h", "98th percentile with weights that halve every 48 hours"),
    Feature("limit", "log2 of the limit over the capacity of the cell's largest machine, a constant", "log2"),
    Feature("limit_change", "log2 of the limit over the first one seen", "log2"),
)

_SHAPE: Final = (
    Feature("cpu_mean", "mean CPU of the last window", "of limit"),
    Feature("cpu_p50", "50th percentile of CPU in the last window", "of limit"),
    Feature("cpu_low", "50th minus 10th percentile of CPU in the last window", "of limit"),
    Feature("cpu_spread", "90th minus 50th percentile of CPU in the last window", "of limit"),
    Feature("cpu_tail", "99th minus 90th percentile of CPU in the last window", "of limit"),
    Feature("cpu_top", "largest CPU minus 99th percentile in the last window", "of limit"),
    Feature("cpu_tail_weight", "(99th minus 50th) over (90th minus 10th percentile) of CPU, at most 64", "ratio"),
    Feature("cpu_over_limit", "share of the last window in which CPU was above the limit", "0..1"),
    Feature("shape_known", "1: all percentiles of the last window measured; 0.5: the tail interpolated; "
            "0: the mean stands in for those up to the 90th", "0..1", "0"),
    _over_time("usage_p99_12h", "99th percentile of CPU over time, from every window's distribution, weights that "
               "halve every 12 hours"),
    Feature("usage_p90_12h", "90th percentile of the same", "of limit"),
    Feature("usage_p50_12h", "50th percentile of the same", "of limit"),
)  # fmt: skip

_SINGLE: Final = (
    Feature("memory_mean", "mean memory of the last window", "of limit"),
    Feature("memory_growth_6h", "memory now minus the least hourly maximum of the 6 hours before", "of limit"),
    Feature("memory_slope_2h", "slope of memory over the recent windows that ended within 2 hours", "of limit per h"),
    Feature("page_cache", "page cache in the last window", "of limit"),
    Feature("page_cache_share", "page cache over mean memory in the last window", "ratio"),
    Feature("cpi", "cycles per instruction in the last window", "cycles"),
    Feature("cpi_change", "the same over its mean with weights that halve every 12 hours", "ratio"),
    Feature("mai", "memory accesses per instruction in the last window", "accesses"),
    Feature(
        "age",
        "log2(1 + hours since the run began, on the trace's clock from 0; since first seen, where not told)",
        "log2 h",
    ),
    Feature("seen", "log2(1 + windows seen)", "log2"),
    Feature("restarts", "log2(1 + runs begun since the task was first seen)", "log2", "0"),
    Feature("gap", "log2(1 + minutes between the last two windows)", "log2 min", "0 at the first window"),
    Feature("coverage_2h", "time in recent windows that ended within 2 hours, over 2 hours", "0..1", "never"),
    Feature("length", "length of the last window over 300 s", "ratio"),
    Feature("hour_sin", "sine of the time of day in the cell's zone", "-1..1", "never"),
    Feature("hour_cos", "cosine of the time of day in the cell's zone", "-1..1", "never"),
    Feature(
        "day",
        "day of the week in the cell's zone, over 7, Monday first",
        "0..1",
        "never",
        corrected="time since Monday began in the cell's zone, over a week",
    ),
    Feature("in_alloc", "whether the task runs in an alloc instance", "0 or 1", "never"),
    Feature("scheduling_class", "scheduling class over 3", "0..1"),
    *(Feature(f"tier_{tier}", f"whether the tier is {tier}", "0 or 1", "0") for tier in TIERS),
)

_RATE: Final = "slope of memory over {over}, over what is left to the limit, 0.5 % of it at least; from -64 to 64"
_OOM: Final = (
    Feature("memory_rate_30m", _RATE.format(over="the windows of this run that ended within 30 minutes (2 hours, "
            "where those are fewer than two)"), "per h", corrected=_RATE.format(over="the windows of this run that "
            "ended within 30 minutes (of fewer than two, the last two that ended within 2 hours)")),
    Feature("memory_rate_2h", _RATE.format(over="the windows of this run that ended within 2 hours"), "per h"),
    Feature("memory_rate_6h", _RATE.format(over="the maxima of this clock hour and the 5 before it that lie within "
            "this run (its windows of 2 hours, where those are fewer than two)"), "per h"),
    Feature("memory_rate_run", _RATE.format(over="all windows of this run"), "per h"),
    Feature("memory_run_max", "largest memory of this run", "of limit"),
    Feature("memory_over_mean", "largest over mean memory of the last window", "ratio"),
    Feature("memory_above", "log2(1 + windows of this run with memory above the limit, which then does not bind)",
            "log2", "0"),
    Feature("ooms", "log2(1 + out-of-memory ends of runs): the first window of a later run brings to light that one "
            "ended, out of memory where the memory of its last window was at least 98 % of the limit and that of at "
            "most one of its windows above it", "log2", "0",
            corrected="log2(1 + out-of-memory ends of runs): the first window of a later run brings to light that one "
            "ended, out of memory where the last failure since it began is recorded as that; where none is recorded as "
            "that or as another one, where the memory of its last window was at least 98 % of the limit and that of at "
            "most one of its windows above it"),
    Feature("oom_since", "log2(1 + hours since the last of them)", "log2 h"),
    Feature("oom_age", "age less log2(1 + hours that the last of those runs had lasted)", "log2"),
    Feature("oom_age_least", "age less log2(1 + hours of the shortest of those runs)", "log2"),
    Feature("oom_limit", "log2 of the limit over that at the last of them", "log2"),
)  # fmt: skip

_COLLECTION_OOM: Final = (
    Feature("collection_ooms", "log2(1 + out-of-memory ends of runs of all tasks of its collection, known before this "
            "slot of the clock; 14 days after the last they are forgotten)", "log2", "0"),
    Feature("collection_oom_since", "log2(1 + hours since the slot of the last of them)", "log2 h"),
    Feature("collection_oom_age", "age less log2(1 + mean hours of those runs)", "log2"),
    Feature("collection_oom_age_least", "age less log2(1 + hours of the shortest of those runs)", "log2"),
    Feature("collection_oom_rate", "log2 of their number over (1 + hours of windows of all tasks of its collection "
            "since the slot of the first of them)", "log2 per h"),
)  # fmt: skip
"""Features of what a task's collection met; its own ends are among them."""

CALENDAR: Final = ("hour_sin", "hour_cos", "day")
"""Features of the clock alone."""

FEATURES: Final = (
    *(replace(f, name=f"{signal}_{f.name}") for signal in SIGNALS for f in _STATISTICS),
    *(replace(f, name=f"{resource}_{f.name}") for resource in RESOURCES for f in _RESOURCE),
    *_SHAPE,
    *_SINGLE,
    *_OOM,
    *_COLLECTION_OOM,
)
"""All features, in the order of a model's input."""

FEATURE_NAMES: Final = tuple(f.name for f in FEATURES)
N_FEATURES: Final = len(FEATURES)


def _positions(names: Iterable[str]) -> Any:
    """Return positions by name, which compiled code takes for constants."""
    made: Any = IntEnum
    return made("Positions", {name: position for position, name in enumerate(names)})


AT: Final = _positions(FEATURE_NAMES)
"""Position of every feature. The code that computes one writes it by this name; a feature without such code, or the
other way round, is found by ``tests/features/test_registry.py``."""
STATISTIC: Final = _positions(f.name for f in _STATISTICS)
"""Position of a statistic among those of its signal, the ``k``-th of which begin at ``k * N_STATISTICS``."""
OF_RESOURCE: Final = _positions(f.name for f in _RESOURCE)
"""Position of a feature among those of its resource, the ``r``-th of which begin at ``FIRST_RESOURCE + r *
N_RESOURCE``."""

N_STATISTICS: Final = len(_STATISTICS)
N_RESOURCE: Final = len(_RESOURCE)
FIRST_RESOURCE: Final = len(SIGNALS) * N_STATISTICS
FIRST_SHAPE: Final = FIRST_RESOURCE + len(RESOURCES) * N_RESOURCE
FIRST_SINGLE: Final = FIRST_SHAPE + len(_SHAPE)

_DEFINITIONS: Final = ("4", LARGEST, SLOT_S, SIGNALS, RECENT_WINDOWS)
_VERSION: Final = hashlib.sha256(repr((*_DEFINITIONS, FEATURES)).encode()).hexdigest()[:12]
_BEFORE: Final = {"5c909d2b56d0": "d0b1b323a398"}
"""Version of the same definitions from the time when optional features followed them: models and states of that time
stay good. The entry has no effect once a definition changes, and goes then."""
PIPELINE_VERSION: Final = _BEFORE.get(_VERSION, _VERSION)
"""Names the definitions. A model remembers it and is refused by another. The leading literal is raised by hand when
the computation of a feature changes but its words do not."""


def definitions_of(names: Iterable[str]) -> str:
    """Return a name of the definitions of some features, as ``PIPELINE_VERSION`` is of all; their order makes none."""
    chosen = tuple(FEATURES[FEATURE_NAMES.index(name)] for name in sorted(names))
    return hashlib.sha256(repr((*_DEFINITIONS, chosen)).encode()).hexdigest()[:12]
