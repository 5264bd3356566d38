"""Usage of the synthetic cell's running tasks in a window, and their out-of-memory ends."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from reclaim.data.synthetic.machines import overfull
from reclaim.data.synthetic.movement import SharedMovement
from reclaim.data.synthetic.shapes import MEMORY_PEAK, PROD, FloatArray, IntArray, read_table
from reclaim.data.synthetic.workload import (
    BURST_SCORE,
    BURSTS_PER_DAY,
    DAY_S,
    GROUPS,
    KEEP_BURST,
    KEEP_CPU,
    KEEP_MEMORY,
    LEAK,
    NEAR_MISS,
    NEAR_MISS_PER_DAY,
    NEAR_MISS_S,
    OOM_LIMIT,
    OOM_MACHINE,
    SUDDEN,
    SUDDEN_PER_DAY,
    UNDERSIZED,
    WINDOW_S,
    TaskArray,
    cpu_demand,
    end_run,
    memory_demand,
)

PER_DAY = WINDOW_S / DAY_S
BATCH_SUDDEN = 0.33  # of the runs of a batch collection with sudden jumps meet one
# Page cache fills what memory is free: a task that does not run out stays below this share of its limit with what it
# needs, and may touch the limit with its maximum.
HIGHEST_LIVING = 0.985
LEAST_THROTTLED = 0.1  # share of the wanted CPU that best-effort work keeps on a full machine


@dataclass
class Usage:
    """Usage of running tasks in one window; arrays of shape (n,), in the trace's unit."""

    cpu: FloatArray  # mean
    memory: FloatArray  # mean
    memory_max: FloatArray


class UsageModel:
    """Noise processes of all tasks, and the resulting usage."""

    def __init__(self, rng: np.random.Generator, shared: SharedMovement) -> None:
        self._rng, self._shared = rng, shared
        self._common = rng.standard_normal((2, GROUPS))  # CPU, memory

    def settle(self, t: TaskArray, run: IntArray, now_s: int) -> None:
        """Set the memory of tasks that run before the trace begins."""
        want = memory_demand(t[run], np.full(len(run), now_s), self._common[1], self._shared)
        t["memory"][run] = np.minimum(want, 0.9 * t["memory_limit"][run])

    def step(self, t: TaskArray, run: IntArray, now_s: int, capacity: FloatArray) -> Usage:
        """Return usage in the window from ``now_s``; set the ends of runs that exceed their limit or the machine."""
        self._move(t, run, now_s)
        usage = self._own(t, run, now_s)
        self._fill_allocs(t, run, usage)
        _throttle(t, run, usage.cpu, capacity)
        t["cpu"][run] = usage.cpu
        self._clear_machines(t, run, now_s, capacity)
        return usage

    def _move(self, t: TaskArray, run: IntArray, now_s: int) -> None:
        rng, n = self._rng, len(run)
        self._shared.step((now_s % DAY_S) / DAY_S)
        keep = np.array([[KEEP_CPU], [KEEP_MEMORY]])
        self._common = keep * self._common + np.sqrt(1 - keep**2) * rng.standard_normal((2, GROUPS))
        for name, k in (("cpu_own", KEEP_CPU), ("memory_own", KEEP_MEMORY)):
            t[name][run] = k * t[name][run] + np.sqrt(1 - k * k) * rng.standard_normal(n)
        burst = rng.random(n) < BURSTS_PER_DAY * PER_DAY
        t["burst"][run] = KEEP_BURST * t["burst"][run] + np.where(burst, BURST_SCORE * rng.random(n), 0.0)
        near = run[(rng.random(n) < NEAR_MISS_PER_DAY * PER_DAY) & (t["mode"][run] == NEAR_MISS)]
        t["near_until_s"][near] = now_s + NEAR_MISS_S * rng.lognormal(0, 0.7, len(near))

    def _own(self, t: TaskArray, run: IntArray, now_s: int) -> Usage:
        rng, n, end = self._rng, len(run), now_s + WINDOW_S
        a = t[run]
        limit, mode = a["memory_limit"], a["mode"]
        want = memory_demand(a, np.minimum(a["end_s"], end), self._common[1], self._shared)
        often = BATCH_SUDDEN * WINDOW_S / np.maximum(a["duration_s"], WINDOW_S)
        jump = (mode == SUDDEN) & (rng.random(n) < np.where(a["service"] == 1, SUDDEN_PER_DAY * PER_DAY, often))
        want = np.where(jump, limit * (1.1 + 0.5 * rng.random(n)), want)
        mortal = (mode == LEAK) | (mode == UNDERSIZED) | jump
        want = np.where(mortal, want, np.minimum(want, HIGHEST_LIVING * limit))
        begin = np.maximum(now_s, a["start_s"])
        before = np.where(a["memory"] > 0, a["memory"], 0.5 * np.minimum(want, limit))
        # Memory grows linearly within a window; a jump may come at any moment of it.
        moment = np.where(jump, rng.random(n), (limit - before) / np.maximum(want - before, 1e-12))
        dies = begin + np.clip((moment * (end - begin)).astype(np.int64), 1, np.maximum(end - begin - 1, 1))
        out = (want >= limit) & (dies < a["end_s"])
        end_run(t, run[out], dies[out], OOM_LIMIT)
        after = np.where(out, limit, np.minimum(want, HIGHEST_LIVING * limit))
        mean = np.where(jump & out, before, 0.5 * (before + after))
        score = 0.6 * a["cache_score"] + 0.8 * rng.standard_normal(n)
        highest = np.maximum(np.maximum(before, after), mean * (1.0 + read_table(MEMORY_PEAK, a["tier"], score)))
        t["memory"][run] = after
        cpu = cpu_demand(a, now_s, self._common[0], self._shared)
        return Usage(cpu, mean, np.where(out, limit, np.minimum(highest, limit)))

    def _fill_allocs(self, t: TaskArray, run: IntArray, usage: Usage) -> None:
        """Set an alloc instance's usage to that of its tasks plus a small overhead."""
        inside = t["parent"][run] >= 0
        hosts = t["kind"][run] == 1
        parent = t["parent"][run][inside]
        for amounts, own in ((usage.cpu, 1.01), (usage.memory, 1.01), (usage.memory_max, 1.015)):
            amounts[hosts] = own * np.bincount(parent, amounts[inside], len(t))[run[hosts]]
        limit = t["memory_limit"][run[hosts]]
        usage.memory[hosts] = np.clip(usage.memory[hosts], 0.01 * limit, limit)
        usage.memory_max[hosts] = np.clip(usage.memory_max[hosts], 0.01 * limit, limit)
        usage.cpu[hosts] = np.maximum(usage.cpu[hosts], 0.002 * t["cpu_limit"][run[hosts]])
        t["memory"][run[hosts]] = usage.memory[hosts]

    def _clear_machines(self, t: TaskArray, run: IntArray, now_s: int, capacity: FloatArray) -> None:
        """End tasks of machines with exhausted memory, lowest priority first, until the rest fits."""
        end = now_s + WINDOW_S
        for here in overfull(t, run, capacity):
            used = t["memory"][here].sum()
            at = int(self._rng.integers(now_s + 1, end))
            for slot in here[t["end_s"][here] > end].tolist():
                if used <= capacity[t["machine"][slot], 1]:
                    break
                used -= t["memory"][slot]
                end_run(t, np.array([slot]), at, OOM_MACHINE)


def _throttle(t: TaskArray, run: IntArray, cpu: FloatArray, capacity: FloatArray) -> None:
    """Throttle tasks below production on machines with exhausted CPU."""
    machine = t["machine"][run]
    top = t["parent"][run] < 0
    low = t["tier"][run] < PROD
    firm = np.bincount(machine, np.where(top & ~low, cpu, 0.0), len(capacity))
    wanted = np.bincount(machine, np.where(low, cpu, 0.0), len(capacity))
    share = np.clip((capacity[:, 0] - firm) / np.maximum(wanted, 1e-12), LEAST_THROTTLED, 1.0)
    cpu *= np.where(low, share[machine], 1.0)
