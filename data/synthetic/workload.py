"""Workload of the synthetic cell: its collections and tasks, and each task's demand before any limit applies.

Collections of five tiers: services that run for days, short batch work, alloc sets with tasks inside. Their
limits, levels and shares are fitted to the Google cluster-usage traces v3 (2019) sample, CC-BY 4.0, where a comment
says so; that sample is a cross-section, so everything over time (cycles, leaks, failures) is assumed.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from reclaim.data.synthetic.movement import SharedMovement
from reclaim.data.synthetic.shapes import CPU_RATIO, MEMORY_RATIO, MON, PROD, FloatArray, IntArray, read_table, rounded

TRACE_START_S = 600
WINDOW_S = 300
DAY_S = 86_400

# Fitted: priorities and scheduling classes of each tier with their shares.
PRIORITIES = (
    ((0, 25), (0.95, 0.05)),
    ((103, 115, 105, 114, 107), (0.59, 0.19, 0.16, 0.04, 0.02)),
    ((117, 119, 118, 116), (0.84, 0.10, 0.03, 0.03)),
    ((200, 205, 215, 210), (0.90, 0.08, 0.01, 0.01)),
    ((360, 450), (0.95, 0.05)),
)
SCHEDULING_CLASS = (
    (0.82, 0.04, 0.13, 0.01),
    (0.31, 0.44, 0.22, 0.03),
    (0.04, 0.51, 0.44, 0.01),
    (0.03, 0.50, 0.21, 0.26),
    (0.00, 0.02, 0.94, 0.04),
)
VERTICAL_SCALING = (0.34, 0.30, 0.36)  # fitted: shares of the codes 1, 2, 3
NO_USER = 0.09  # fitted: share of collections without user and logical name
# Fitted: mean and standard deviation of the log of the CPU and the memory limit, before the cell is scaled to its fill;
# the monitoring tier's memory is assumed (its own limits inside alloc instances bind nothing).
LIMIT_CPU_LOG = np.array([[-4.95, 0.79], [-5.04, 1.17], [-5.01, 0.77], [-4.62, 1.20], [-4.30, 0.59]])
LIMIT_MEMORY_LOG = np.array([[-6.15, 1.00], [-5.26, 1.18], [-6.12, 0.71], [-5.20, 1.03], [-5.60, 0.80]])
LIMIT_CORRELATION = 0.55  # fitted: of the two logs
RATIO_CORRELATION = 0.50  # fitted: of the logs of CPU and memory over their limits

# Assumed from here on. Shares of the running tasks by tier, and of these the short batch tasks.
TIER_SHARE = np.array([0.14, 0.28, 0.10, 0.41, 0.07])
BATCH_SHARE = np.array([0.50, 0.50, 0.30, 0.04, 0.0])
IN_ALLOC_SHARE = 0.07  # of the running tasks, twice: production tasks and their monitors
BATCH_MEDIAN_S, BATCH_LOG_SD = 1500.0, 1.1
BATCH_RANGE_S = (60.0, 43_200.0)
BATCH_MEAN_S = BATCH_MEDIAN_S * np.exp(BATCH_LOG_SD**2 / 2)
BATCH_FAILS, BATCH_KILLED = 0.06, 0.08  # shares of batch tasks and of batch collections
SERVICE_LIFE_DAYS = np.array([2.0, 2.0, 3.0, 8.0, 20.0])
FAILURES_PER_DAY = np.array([0.10, 0.06, 0.05, 0.02, 0.01])  # of a service task, without memory pressure
UPDATES_PER_DAY = 0.25  # limit changes of a service collection

# Ways in which the memory of a collection behaves. Only LEAK, SUDDEN and UNDERSIZED pass the limit; PLATEAU and
# NEAR_MISS look like them and do not.
NORMAL, LEAK, PLATEAU, SUDDEN, NEAR_MISS, UNDERSIZED = range(6)
SERVICE_MODES = (0.83, 0.04, 0.06, 0.02, 0.05, 0.00)
BATCH_MODES = (0.907, 0.008, 0.030, 0.008, 0.035, 0.012)
SUDDEN_PER_DAY = 0.5  # of a service task whose collection has sudden jumps; batch tasks meet theirs in a third of runs
NEAR_MISS_PER_DAY = 3.0
NEAR_MISS_S = 2400.0

# Standard deviations, in scores of the fitted tables, of what moves a task's CPU: day, siblings' common factor, own
# noise; and its memory: common factor, own noise. The level of the task takes the rest of the unit variance.
CPU_DAY, CPU_COMMON, CPU_OWN = 0.20, 0.22, 0.18
MEMORY_COMMON, MEMORY_OWN = 0.10, 0.08
CPU_LEVEL = np.sqrt(1.0 - CPU_DAY**2 - CPU_COMMON**2 - CPU_OWN**2)
MEMORY_LEVEL = np.sqrt(1.0 - MEMORY_COMMON**2 - MEMORY_OWN**2)
MEMORY_MOVES = np.sqrt(1.0 - MEMORY_LEVEL**2)
KEEP_CPU, KEEP_MEMORY = 0.85, 0.98  # autocorrelation of the noises from window to window
BURSTS_PER_DAY, BURST_SCORE, KEEP_BURST = 3.0, 1.2, 0.75
BURST_VARIANCE = BURSTS_PER_DAY * WINDOW_S / DAY_S * BURST_SCORE**2 / 3 / (1 - KEEP_BURST**2)
WEEKEND_SCORE = -0.15
SIBLING_SHARE = 0.94  # of the variance of a task's level is its collection's
GROUPS = 4096  # common factors, dealt to collections in turn
MAX_CPU_RATIO = 6.0

EMPTY, PENDING, RUNNING = range(3)  # states of a slot
# Ends of a run of a task; the names are those of the truth table.
CAUSES = ("", "oom_limit", "oom_machine", "program_failure", "evict_priority", "evict_machine", "finish", "kill")
OOM_LIMIT, OOM_MACHINE, PROGRAM_FAILURE, EVICT_PRIORITY, EVICT_MACHINE, FINISHED, KILLED = range(1, 8)
NEVER = int(np.iinfo(np.int64).max)

_F, _I = np.float64, np.int64
TASK = np.dtype(
    [(name, _I) for name in ("collection", "index", "tier", "priority", "kind", "parent", "state", "machine", "group")]
    + [(name, _I) for name in ("ready_s", "start_s", "end_s", "cause", "tries", "mode", "service", "released")]
    + [(name, _F) for name in ("cpu_limit", "memory_limit", "cpu_base", "memory_base", "cpu_score", "memory_score")]
    + [
        (name, _F)
        for name in ("cpu_own", "memory_own", "burst", "day", "phase", "cpu_start", "memory_start", "start_tau_s")
    ]
    + [(name, _F) for name in ("mode_s", "mode_level", "near_until_s", "cpu", "memory", "duration_s")]
    + [(name, _F) for name in ("peak_score", "cache_score", "cpi_score", "counters_u", "percentiles_u")]
)
TaskArray = npt.NDArray[Any]  # of dtype TASK


def end_run(t: TaskArray, slots: IntArray, at_s: IntArray | int, cause: int) -> None:
    """Set the end of runs to ``at_s``, at least a second after the start; an earlier end stays."""
    at = np.maximum(at_s, t["start_s"][slots] + 1)
    sooner = at < t["end_s"][slots]
    t["end_s"][slots] = np.where(sooner, at, t["end_s"][slots])
    t["cause"][slots] = np.where(sooner, cause, t["cause"][slots])


@dataclass
class Collection:
    """A job or an alloc set, with the fields of its submitter and scheduler."""

    id: int
    tier: int
    priority: int
    scheduling_class: int
    kind: int  # 0 job, 1 alloc set
    size: int
    service: bool
    alloc_id: int
    user: str | None
    name: str
    logical_name: str | None
    vertical_scaling: int
    scheduler: int
    end_s: int  # when a service is removed or a batch collection killed; NEVER if neither
    end_killed: bool
    group: int
    scheduled: bool = False
    failed: bool = False
    left: int = field(init=False)  # tasks that will still run

    def __post_init__(self) -> None:
        self.left = self.size


def hashed(*parts: object) -> str:
    """Return an opaque name of 44 characters, the same for the same parts, as v3 has for users and names."""
    return base64.b64encode(hashlib.sha256("|".join(map(str, parts)).encode()).digest()).decode()


def normal_score(u: FloatArray) -> FloatArray:
    """Return standard normal scores of uniform numbers, by Tukey's lambda; within 0.01 over the range used here."""
    p = np.clip(u, 0.002, 0.998)
    return np.asarray((p**0.1349 - (1 - p) ** 0.1349) / 0.1975)


class Workload:
    """Generator of collections and their tasks, by tier."""

    def __init__(self, seed: int, tasks: float, fill: FloatArray, cap: FloatArray, rng: np.random.Generator) -> None:
        """Scale the limits so that ``tasks`` running tasks sum to ``fill`` (CPU, memory), each at most ``cap``."""
        self._seed, self._rng, self._cap = seed, rng, cap
        self.target = TIER_SHARE * tasks  # running tasks
        self._largest = max(2, round(0.05 * tasks))
        # Levels come from an additive recurrence with irrational steps (Roberts 2018), not from independent draws: the
        # few collections of a small cell still cover the fitted distributions.
        root = 1.16730397826141868  # of x^5 = x + 1
        self._steps = root ** -np.arange(1.0, 6.0)
        self._at = rng.random((len(TIER_SHARE), 5))
        self._made = 0
        self._ids: set[int] = set()
        z = normal_score((np.arange(400) + 0.5) / 400)
        self._scale = np.ones(2)
        for _ in range(30):  # the cap bends the mean, so the scale is found by iteration
            mean = [
                [np.minimum(np.exp(m + s * z) * self._scale[r], cap[r]).mean() for m, s in table]
                for r, table in enumerate((LIMIT_CPU_LOG, LIMIT_MEMORY_LOG))
            ]
            self._scale *= fill / (np.array(mean) @ self.target)

    def new_id(self) -> int:
        """Return an unused 64-bit id; one in eight passes 2^53, where a double would lose its last digits."""
        while True:
            large = self._rng.random() < 0.125
            low, high = (2**53 + 1, 2**62) if large else (10**10, 10**12)
            candidate = int(self._rng.integers(low, high))
            if candidate not in self._ids:
                self._ids.add(candidate)
                return candidate

    def size(self, tier: int, service: bool) -> int:
        """Draw the number of tasks of a collection; a few collections hold most tasks."""
        median = 3.0 if service else 4.0
        drawn = round(float(np.exp(self._rng.normal(np.log(median), 0.8))))
        return int(np.clip(drawn, 1, min(self._largest, 10) if tier == MON else self._largest))

    def collection(
        self, tier: int, size: int, now_s: float, *, service: bool, kind: int = 0, alloc_id: int = 0
    ) -> Collection:
        """Make a collection of ``tier`` submitted at ``now_s``; alloc sets and their tasks run to the end."""
        rng = self._rng
        values, shares = PRIORITIES[tier]
        self._made += 1
        user = int(rng.integers(0, 40))
        program = int(rng.integers(0, 60))
        named = rng.random() >= NO_USER
        if kind or alloc_id:
            end = NEVER
        elif service:
            end = int(now_s + float(rng.exponential(SERVICE_LIFE_DAYS[tier])) * DAY_S + 3600)
        else:
            killed = rng.random() < BATCH_KILLED
            end = int(now_s + float(rng.uniform(0.05, 1.0)) * BATCH_MEAN_S) if killed else NEVER
        return Collection(
            id=self.new_id(),
            tier=tier,
            priority=int(rng.choice(values, p=shares)),
            scheduling_class=3 if kind else int(rng.choice(4, p=SCHEDULING_CLASS[tier])),
            kind=kind,
            size=size,
            service=service,
            alloc_id=alloc_id,
            user=hashed(self._seed, "user", tier, user) if named else None,
            name=hashed(self._seed, "name", tier, user, program, self._made),
            logical_name=hashed(self._seed, "logical", tier, user, program) if named else None,
            vertical_scaling=1 + int(rng.choice(3, p=VERTICAL_SCALING)),
            scheduler=int(tier == 1),
            end_s=end,
            end_killed=bool(not service or rng.random() < 0.7),
            group=self._made % GROUPS,
        )

    def tasks(self, collection: Collection, number: int, ready_s: float) -> TaskArray:
        """Make the tasks of a collection, shape (size,), pending from ``ready_s``; ``number`` is the collection's."""
        rng, tier, n = self._rng, collection.tier, collection.size
        t = np.zeros(n, TASK)
        self._at[tier] = (self._at[tier] + self._steps) % 1.0
        z = normal_score(self._at[tier])
        z[1] = LIMIT_CORRELATION * z[0] + np.sqrt(1 - LIMIT_CORRELATION**2) * z[1]
        z[3] = RATIO_CORRELATION * z[2] + np.sqrt(1 - RATIO_CORRELATION**2) * z[3]
        size = np.exp([LIMIT_CPU_LOG[tier] @ (1, z[0]), LIMIT_MEMORY_LOG[tier] @ (1, z[1])])
        limit = rounded(np.clip(size * self._scale, 2.0**-12, self._cap))

        def near(score: float, share: float = SIBLING_SHARE) -> FloatArray:
            return np.asarray(np.sqrt(share) * score + np.sqrt(1 - share) * rng.standard_normal(n))

        t["collection"], t["index"], t["tier"], t["priority"] = number, np.arange(n), tier, collection.priority
        t["kind"], t["parent"], t["machine"], t["group"] = collection.kind, -1, -1, collection.group
        t["service"], t["ready_s"] = collection.service, ready_s
        t["cpu_limit"], t["memory_limit"] = limit
        t["cpu_base"], t["memory_base"] = limit
        t["cpu_score"], t["memory_score"] = near(z[2]), near(z[3])
        t["cpu_own"], t["memory_own"] = rng.standard_normal((2, n))
        cycle = (1.0 if tier >= PROD else 0.6) if collection.service else 0.2
        t["day"] = cycle * rng.lognormal(0.0, 0.4)
        t["phase"] = rng.normal(0.0, 0.8)
        t["cpu_start"], t["memory_start"] = rng.uniform(-0.6, 1.5), rng.uniform(0.2, 0.9)
        t["start_tau_s"] = np.exp(rng.uniform(np.log(60), np.log(900)))
        drawn = np.exp(rng.normal(np.log(BATCH_MEDIAN_S), BATCH_LOG_SD))
        t["duration_s"] = np.clip(drawn * np.exp(rng.normal(0, 0.35, n)), *BATCH_RANGE_S)
        t["peak_score"], t["cache_score"] = near(z[4], 0.8), near(rng.standard_normal(), 0.8)
        t["cpi_score"] = near(rng.standard_normal(), 0.9)
        t["counters_u"], t["percentiles_u"] = rng.random((2, n))
        if collection.kind == 0:
            self._memory_mode(t, collection)
        return t

    def _memory_mode(self, t: TaskArray, collection: Collection) -> None:
        rng, n = self._rng, len(t)
        mode = int(rng.choice(6, p=SERVICE_MODES if collection.service else BATCH_MODES))
        t["mode"] = mode
        if mode in (LEAK, PLATEAU):
            # Time until the limit is reached: about a day for a service, within its run for a batch task.
            median = 20 * 3600.0 if collection.service else 0.7 * float(t["duration_s"].mean())
            t["mode_s"] = max(900.0, median * rng.lognormal(0.0, 0.6)) * rng.lognormal(0.0, 0.15, n)
            t["mode_level"] = 1.0 if mode == LEAK else rng.uniform(0.86, 1.0)
        elif mode == NEAR_MISS:
            t["mode_level"] = rng.uniform(0.93, 0.995)
        elif mode == UNDERSIZED:
            t["mode_level"] = rng.uniform(1.04, 1.4)


def cpu_demand(t: TaskArray, now_s: int, common: FloatArray, shared: SharedMovement) -> FloatArray:
    """Return the mean CPU demand of tasks in the window from ``now_s``; shape (n,), in the trace's unit.

    ``common`` holds the common factors of all groups, shape (GROUPS,). ``shared`` takes its share from all movement.
    """
    own = shared.own
    moves = np.sqrt((CPU_DAY * t["day"]) ** 2 + CPU_COMMON**2 + CPU_OWN**2 + BURST_VARIANCE)
    angle = 2 * np.pi * (now_s % DAY_S) / DAY_S
    weekend = WEEKEND_SCORE if (now_s // DAY_S) % 7 >= 5 else 0.0
    score = (
        CPU_LEVEL * t["cpu_score"]
        + own * (CPU_DAY * t["day"] * np.sqrt(2.0) * np.sin(angle + t["phase"]))
        + own * (t["day"] * weekend)
        + own * (CPU_COMMON * common[t["group"]])
        + own * (CPU_OWN * t["cpu_own"])
        + own * t["burst"]
        + moves * shared.of(0, t["group"])
    )
    age = np.maximum(now_s - t["start_s"], 0)
    start = 1.0 + t["cpu_start"] * np.exp(-age / t["start_tau_s"])
    ratio = read_table(CPU_RATIO, t["tier"], score) * start
    return np.asarray(t["cpu_base"] * np.minimum(ratio, MAX_CPU_RATIO))


def memory_demand(t: TaskArray, now_s: IntArray, common: FloatArray, shared: SharedMovement) -> FloatArray:
    """Return the memory demand of tasks, each at its ``now_s``; shape (n,), in the trace's unit, not limited."""
    own = shared.own
    score = (
        MEMORY_LEVEL * t["memory_score"]
        + own * (MEMORY_COMMON * common[t["group"]])
        + own * (MEMORY_OWN * t["memory_own"])
        + MEMORY_MOVES * shared.of(1, t["group"])
    )
    level = read_table(MEMORY_RATIO, t["tier"], score)
    age = np.maximum(now_s - t["start_s"], 0)
    mode = t["mode"]
    span = np.maximum(t["mode_s"], 1.0)
    rise = np.where(mode == LEAK, age / span, np.where(mode == PLATEAU, 1.0 - np.exp(-age / span), 0.0))
    level = level + np.maximum(t["mode_level"] - level, 0.02) * rise
    level = np.where(mode == UNDERSIZED, t["mode_level"], level)
    level = np.where((mode == NEAR_MISS) & (now_s < t["near_until_s"]), np.maximum(level, t["mode_level"]), level)
    ramp = 1.0 - (1.0 - t["memory_start"]) * np.exp(-age / t["start_tau_s"])
    return np.asarray(t["memory_base"] * level * ramp)
