"""Every feature by name: its formula, unit, and what it is when data is missing; the order is the model's input."""

from __future__ import annotations

import hashlib
from dataclasses import astuple, dataclass
from typing import Final

from reclaim.data.schema import TIERS

SIGNALS: Final = ("cpu", "memory", "peak_cpu")
"""What the statistics below are made of, each over the limit: the demand a reservation must cover (``data.windows.
demand``) per resource, and the largest CPU usage inside the window."""


@dataclass(frozen=True)
class Feature:
    """One number that a model may look at.

    Attributes
    ----------
    name, formula, unit : str
        Formulas are over the windows that ended at or before t; "recent" ones are the last 24 at most.
    missing : str
        What the value is where there is nothing to compute it from.
    """

    name: str
    formula: str
    unit: str
    missing: str = "NaN"


_STATISTICS: Final = (
    Feature("last", "the last window's value", "of limit"),
    Feature("mean_30m", "mean of the recent windows that ended within 30 minutes", "of limit"),
    Feature("mean_2h", "mean of the recent windows that ended within 2 hours", "of limit"),
    Feature("std_2h", "standard deviation (ddof 0) of the same windows", "of limit"),
    Feature("max_1h", "largest of the recent windows that ended within 1 hour", "of limit"),
    Feature("max_2h", "largest of the recent windows that ended within 2 hours", "of limit"),
    Feature("max_6h", "largest in this clock hour and the 5 before it", "of limit"),
    Feature("max_24h", "largest in this clock hour and the 23 before it", "of limit"),
    Feature("max_ever", "largest since the task was first seen", "of limit"),
    Feature("slow_max", "maximum that decays towards the value with a half-life of 12 hours", "of limit"),
    Feature("ewm_1h", "mean with weights that halve every hour", "of limit"),
    Feature("ewm_12h", "mean with weights that halve every 12 hours", "of limit"),
    Feature("p90_12h", "90th percentile with weights that halve every 12 hours, in steps of 9 %", "of limit"),
    Feature("p99_12h", "99th percentile with weights that halve every 12 hours, in steps of 9 %", "of limit"),
    Feature("yesterday", "largest in the clock hour 23 hours ago and the two around it", "of limit"),
    Feature("change_1h", "last value minus that of the recent window nearest to one hour ago", "of limit"),
)

_SINGLE: Final = (
    Feature("cpu_mean", "mean CPU of the last window", "of limit"),
    Feature("cpu_spread", "90th minus 50th percentile of CPU in the last window", "of limit"),
    Feature("cpu_tail", "largest CPU minus 90th percentile in the last window", "of limit"),
    Feature("memory_mean", "mean memory of the last window", "of limit"),
    Feature("memory_growth_6h", "memory now minus the least hourly maximum of the 6 hours before", "of limit"),
    Feature("page_cache", "page cache in the last window", "of limit"),
    Feature("cpi", "cycles per instruction in the last window", "cycles"),
    Feature("mai", "memory accesses per instruction in the last window", "accesses"),
    Feature("age", "log2(1 + hours since the run began; since first seen, where that is not told)", "log2 h"),
    Feature("seen", "log2(1 + windows seen)", "log2"),
    Feature("gap", "log2(1 + minutes between the last two windows)", "log2 min", "0 at the first window"),
    Feature("length", "length of the last window over 300 s", "ratio"),
    Feature("hour_sin", "sine of the time of day on the trace's clock", "-1..1", "never"),
    Feature("hour_cos", "cosine of the time of day on the trace's clock", "-1..1", "never"),
    Feature("day", "day of the week on the trace's clock, over 7", "0..1", "never"),
    Feature("in_alloc", "whether the task runs in an alloc instance", "0 or 1", "never"),
    Feature("scheduling_class", "scheduling class over 3", "0..1"),
    *(Feature(f"tier_{tier}", f"whether the tier is {tier}", "0 or 1", "0") for tier in TIERS),
)

FEATURES: Final = (
    *(Feature(f"{signal}_{f.name}", f.formula, f.unit, f.missing) for signal in SIGNALS for f in _STATISTICS),
    *_SINGLE,
)
"""All features, in the order of a model's input."""

FEATURE_NAMES: Final = tuple(f.name for f in FEATURES)

N_STATISTICS: Final = len(_STATISTICS)
FIRST_SINGLE: Final = len(SIGNALS) * N_STATISTICS

PIPELINE_VERSION: Final = hashlib.sha256(repr(("2", *(astuple(f) for f in FEATURES))).encode()).hexdigest()[:12]
"""Names the definitions. A model remembers it and is refused by another. The leading literal is raised by hand when
the computation of a feature changes but its words do not."""
