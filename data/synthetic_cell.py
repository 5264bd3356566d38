"""The synthetic cell at work: machines, placement, kills, restarts, window after window.

Time goes in windows of 300 s. In each, machines leave and come back, work arrives and is placed best-fit, every running
task uses what it wants as far as limit and machine allow, and whatever must end ends at a second inside the window. The
cell hands out bare usage windows hour by hour and rows of the event tables; how they look on disk is not known here.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from reclaim.data.synthetic_format import ATTRIBUTES, COLLECTIONS, INSTANCES, MACHINES, US_PER_S, resources
from reclaim.data.synthetic_shapes import MON, PROD, TIERS, BareWindows, FloatArray, IntArray, resource_code, rounded
from reclaim.data.synthetic_workload import (
    BATCH_FAILS,
    BATCH_MEAN_S,
    BATCH_SHARE,
    BURST_SCORE,
    BURSTS_PER_DAY,
    DAY_S,
    FAILURES_PER_DAY,
    GROUPS,
    IN_ALLOC_SHARE,
    KEEP_BURST,
    KEEP_CPU,
    KEEP_MEMORY,
    LEAK,
    NEAR_MISS,
    NEAR_MISS_PER_DAY,
    NEAR_MISS_S,
    SUDDEN,
    SUDDEN_PER_DAY,
    TASK,
    TRACE_START_S,
    UNDERSIZED,
    UPDATES_PER_DAY,
    WINDOW_S,
    Collection,
    TaskArray,
    Workload,
    cpu_demand,
    hashed,
    memory_demand,
)

SUBMIT, QUEUE, ENABLE, SCHEDULE, EVICT, FAIL, FINISH, KILL = range(8)  # codes of the v3 format
UPDATE_PENDING, UPDATE_RUNNING = 9, 10
ADD, REMOVE = 1, 2

CAUSES = ("", "oom_limit", "oom_machine", "program_failure", "evict_priority", "evict_machine", "finish", "kill")
OOM_LIMIT, OOM_MACHINE, PROGRAM_FAILURE, EVICT_PRIORITY, EVICT_MACHINE, FINISHED, KILLED = range(1, 8)
EVENT_OF = {
    OOM_LIMIT: FAIL,
    OOM_MACHINE: EVICT,
    PROGRAM_FAILURE: FAIL,
    EVICT_PRIORITY: EVICT,
    EVICT_MACHINE: EVICT,
    FINISHED: FINISH,
    KILLED: KILL,
}
EMPTY, PENDING, RUNNING = range(3)

# Machine shapes (CPU, memory; fractions of the largest machine) and their shares: assumed, after the few shapes that
# the v3 traces report.
SHAPES = np.array([[0.386, 0.333], [0.591, 0.333], [0.708, 0.667], [1.0, 1.0]])
SHAPE_SHARE = np.array([0.35, 0.30, 0.25, 0.10])
REMOVALS_PER_DAY, DOWN_MEDIAN_S = 0.03, 2400.0  # of a machine
FILL = 1.1  # sum of limits over capacity that the workload is scaled to
# A task is placed where the limits, its own included, stay under this multiple of the capacity, by tier of the task:
# best-effort work may pile up on memory that others do not use, and dies when they do.
OVERCOMMIT = np.array([1.55, 1.50, 1.35, 1.25, 1.25])
MEMORY_GUARD = 0.97  # best-effort work is not placed where memory in use, with its likely own, passes this share
MAX_TRIES = 3  # of a batch task
WINDOWS_PER_HOUR = 12
NEVER = np.iinfo(np.int64).max

Row = dict[str, Any]


@dataclass
class Counts:
    """What happened in the cell."""

    collections: int = 0
    tasks: int = 0
    windows: int = 0
    ends: dict[str, int] = field(default_factory=lambda: {cause: 0 for cause in CAUSES[1:]})


class Cell:
    """One cell and its clock; `hours` runs it."""

    def __init__(self, machines: int, windows: int, tasks_per_machine: float, seed: int) -> None:
        self.windows = windows
        self.counts = Counts()
        self.events: dict[str, list[Row]] = {MACHINES: [], ATTRIBUTES: [], COLLECTIONS: [], INSTANCES: []}
        self.truth: list[tuple[int, int, int, str]] = []  # collection id, index, time in µs, cause
        self._seed = seed
        # One generator per matter: more draws in one do not shift the others.
        self._rng, work, iron = (np.random.default_rng(s) for s in np.random.SeedSequence(seed).spawn(3))
        shape = np.searchsorted(np.cumsum(SHAPE_SHARE), (np.arange(machines) + 0.5) / machines)
        self._capacity = rounded(SHAPES[iron.permutation(shape)])  # (machines, 2)
        tasks = machines * tasks_per_machine
        fill, cap = FILL * self._capacity.sum(axis=0), 0.4 * self._capacity.min(axis=0)
        self._work = Workload(seed, tasks, fill, cap, work)
        self._tasks: TaskArray = np.zeros(1024, TASK)
        self._collections: dict[int, Collection] = {}
        self._made = 0
        self._common = self._rng.standard_normal((2, GROUPS))  # CPU, memory
        self._up = np.ones(machines, bool)
        self._load = np.zeros((machines, 2))  # sums of limits
        self._firm = np.zeros((machines, 2))  # of them, production's and above
        self._memory_used = np.zeros(machines)
        self._rows: list[tuple[Any, ...]] = []
        self._machine_ids = np.array([self._work.new_id() for _ in range(machines)])
        self._start_machines(iron)
        self._start_work(tasks)

    def hours(self) -> Iterator[tuple[int, BareWindows]]:
        """Run the cell; yield (hour, its windows by start, collection and index) at the end of each hour."""
        for k in range(self.windows):
            self._window(TRACE_START_S + k * WINDOW_S)
            if (k + 1) % WINDOWS_PER_HOUR == 0 or k + 1 == self.windows:
                if self._rows:
                    columns = [np.concatenate(c) for c in zip(*self._rows, strict=True)]
                    self._rows = []
                    order = np.lexsort((columns[3], columns[2], columns[0]))
                    yield k // WINDOWS_PER_HOUR, BareWindows(*(c[order] for c in columns))

    # What is there when the trace begins

    def _start_machines(self, rng: np.random.Generator) -> None:
        n, end = len(self._capacity), TRACE_START_S + self.windows * WINDOW_S
        platform = np.unique(self._capacity, axis=0, return_inverse=True)[1]
        names = [hashed(self._seed, "attribute", i) for i in range(4)]
        for m in range(n):
            self._machine_event(0, m, ADD)
            values = [1 + int(platform[m]), 1 + int(rng.integers(0, 3)), None, hashed("kernel", rng.integers(0, 2))]
            values[2] = 1 if rng.random() < 0.4 else None  # an attribute that is only there or not
            for name, value in zip(names, values, strict=True):
                if value is not None:
                    self._attribute(0, m, name, value)
            if rng.random() < 0.5:  # a new kernel is rolled out during the trace
                self._attribute(int(rng.integers(TRACE_START_S, end)), m, names[3], hashed("kernel", 2))
        # At least one removal: a cell without any is too easy for whoever tests on it.
        count = max(1, int(rng.poisson(REMOVALS_PER_DAY * n * (end - TRACE_START_S) / DAY_S)))
        away: dict[int, list[tuple[int, int]]] = {}
        for at, m in zip(rng.integers(TRACE_START_S + WINDOW_S, end, count), rng.integers(0, n, count), strict=True):
            away.setdefault(int(m), []).append((int(at), int(at + 60 + DOWN_MEDIAN_S * rng.lognormal(0, 1))))
        self._removals: list[tuple[int, int]] = []
        self._returns: list[tuple[int, int]] = []
        for m, spans in away.items():
            back = 0
            for at, until in sorted(spans):
                if at > back:  # a machine that is away cannot leave
                    self._removals.append((at, m))
                    self._returns.append((until, m))
                    back = until + WINDOW_S

    def _start_work(self, tasks: float) -> None:
        left = round(IN_ALLOC_SHARE * tasks)
        while left > 0:
            left -= self._alloc_set(min(left, self._work.size(MON, service=True)))
        for tier in reversed(range(len(TIERS))):
            inside = self._present(tier, inside_allocs=True)
            target = self._work.target[tier]
            for service, want in (
                (True, target * (1 - BATCH_SHARE[tier]) - inside),
                (False, target * BATCH_SHARE[tier]),
            ):
                while want > 0.5:
                    want -= self._arrive(tier, 0, service=service, most=round(want))
        # What already runs has some past: its start lies before the trace, its event at time 0.
        self._place_pending(0)
        t = self._tasks
        running = np.flatnonzero(t["state"] == RUNNING)
        n = len(running)
        age = np.exp(self._rng.uniform(np.log(1800), np.log(20 * DAY_S), n))
        batch = t["service"][running] == 0
        age = np.where(batch, self._rng.random(n) * t["duration_s"][running], age)
        age = np.where(t["mode"][running] == LEAK, self._rng.random(n) * 0.9 * t["mode_s"][running], age)
        # What is too small for its memory would not have lived to see the trace.
        age = np.where(t["mode"][running] == UNDERSIZED, 0.0, age)
        t["start_s"][running] = TRACE_START_S - age.astype(np.int64)
        past = running[batch]
        t["end_s"][past] = np.maximum(t["end_s"][past] - age[batch].astype(np.int64), TRACE_START_S + 5)
        now = np.full(n, TRACE_START_S)
        t["memory"][running] = np.minimum(memory_demand(t[running], now, self._common[1]), 0.9 * t["memory_limit"][running])

    def _alloc_set(self, size: int) -> int:
        """Make an alloc set and, in each of its instances, a production task and a monitoring task."""
        alloc = self._work.collection(PROD, size, 0, service=True, kind=1)
        instances = self._admit(alloc, 0)
        for tier in (PROD, MON):
            inside = self._work.collection(tier, size, 0, service=True, alloc_id=alloc.id)
            slots = self._admit(inside, 0)
            self._tasks["parent"][slots] = instances
        t = self._tasks
        for name, cap in zip(("cpu_limit", "memory_limit"), 0.45 * self._capacity.min(axis=0), strict=True):
            held = np.array([t[name][t["parent"] == i].sum() for i in instances])
            # The set is as large as its tasks and a margin; tasks too large for any machine are cut down to it.
            shrink = np.minimum(1.0, cap / (1.2 * held))
            children = np.flatnonzero(np.isin(t["parent"], instances))
            at = np.searchsorted(instances, t["parent"][children])
            t[name][children] = rounded(t[name][children] * shrink[at])
            base = name.replace("limit", "base")
            t[base][children] = t[name][children]
            t[name][instances] = rounded(1.2 * held * shrink)
        return size

    def _present(self, tier: int, *, inside_allocs: bool) -> int:
        t = self._tasks
        return int(((t["state"] > EMPTY) & (t["tier"] == tier) & (t["kind"] == 0) & ((t["parent"] >= 0) == inside_allocs)).sum())

    # Arrivals

    def _arrive(self, tier: int, ready_s: int, *, service: bool, most: int = 10**9) -> int:
        size = max(1, min(self._work.size(tier, service), most))
        self._admit(self._work.collection(tier, size, max(ready_s, TRACE_START_S), service=service), ready_s)
        return size

    def _admit(self, collection: Collection, ready_s: int) -> IntArray:
        """Give a collection's tasks their slots and submit them; returns the slots in order of the task index."""
        number = self._made
        self._made += 1
        self._collections[number] = collection
        fresh = self._work.tasks(collection, number, ready_s)
        fresh["state"], fresh["end_s"] = PENDING, NEVER
        empty = np.flatnonzero(self._tasks["state"] == EMPTY)
        if len(empty) < len(fresh):
            self._tasks = np.concatenate([self._tasks, np.zeros(max(len(self._tasks), len(fresh)), TASK)])
            empty = np.flatnonzero(self._tasks["state"] == EMPTY)
        slots = empty[: len(fresh)]
        self._tasks[slots] = fresh
        self.counts.collections += 1
        self.counts.tasks += len(fresh)
        for event in self._entry(collection):
            self._collection_event(ready_s, collection, event)
        for slot in slots.tolist():
            self._submit(slot, ready_s)
        return slots

    def _arrivals(self, now: int) -> None:
        rng, t = self._rng, self._tasks
        daily = 1.0 + 0.4 * np.sin(2 * np.pi * (now % DAY_S) / DAY_S)
        for tier in range(len(TIERS)):
            target = self._work.target[tier]
            rate = target * BATCH_SHARE[tier] * WINDOW_S / BATCH_MEAN_S / 5.0  # 5: about the mean size of a collection
            for _ in range(int(rng.poisson(rate * daily))):
                self._arrive(tier, now + int(rng.integers(0, WINDOW_S)), service=False)
            services = int(((t["state"] > EMPTY) & (t["tier"] == tier) & (t["service"] == 1) & (t["kind"] == 0)).sum())
            want = target * (1 - BATCH_SHARE[tier]) - services
            if want >= 1 and rng.random() < 0.1:
                self._arrive(tier, now + int(rng.integers(0, WINDOW_S)), service=True, most=round(want))

    # Placement

    def _place_pending(self, now: int) -> None:
        """Place what waits, highest priority first; `now` 0 is the moment before the trace."""
        t = self._tasks
        latest = now + WINDOW_S - 10
        waiting = np.flatnonzero((t["state"] == PENDING) & (t["ready_s"] < latest))
        order = np.lexsort((waiting, t["ready_s"][waiting], t["parent"][waiting] >= 0, -t["priority"][waiting]))
        # An alloc instance goes before the tasks that will live in it, whatever their priorities.
        order = order[np.argsort(t["kind"][waiting[order]] == 0, kind="stable")]
        hopeless: set[tuple[int, float, float]] = set()
        for slot in waiting[order].tolist():
            task = t[slot]
            asked = (int(task["tier"]), float(task["cpu_limit"]), float(task["memory_limit"]))
            if asked in hopeless:  # a sibling of the same size has just been refused
                continue
            at = now and min(max(int(task["ready_s"]), now) + int(self._rng.integers(1, 9)), latest + 8)
            parent = int(task["parent"])
            if parent >= 0:
                host = t[parent]
                if host["state"] == RUNNING and host["end_s"] > at and host["start_s"] <= at:
                    self._start(slot, int(host["machine"]), at)
                continue
            machine = self._best_fit(slot) if self._up.any() else -1
            if machine < 0 and task["tier"] >= PROD and now:
                machine = self._make_room(slot, at)
            if machine < 0:
                hopeless.add(asked)
            else:
                self._start(slot, machine, at)

    def _best_fit(self, slot: int) -> int:
        task = self._tasks[slot]
        limit = np.array([task["cpu_limit"], task["memory_limit"]])
        tier = int(task["tier"])
        total = self._load + limit
        fits = self._up & (total <= OVERCOMMIT[tier] * self._capacity).all(axis=1)
        if tier >= PROD:
            fits &= (self._firm + limit <= self._capacity).all(axis=1)
        else:
            fits &= self._memory_used + 0.6 * limit[1] <= MEMORY_GUARD * self._capacity[:, 1]
        if not fits.any():
            return -1
        room = (1.0 - total / self._capacity).sum(axis=1)
        return int(np.argmin(np.where(fits, room, np.inf)))

    def _make_room(self, slot: int, at: int) -> int:
        """Evict work of lower tiers for a task of production or above; returns the machine, -1 where none can do."""
        t, task = self._tasks, self._tasks[slot]
        limit = np.array([task["cpu_limit"], task["memory_limit"]])
        excess = self._load + limit - OVERCOMMIT[PROD] * self._capacity  # (machines, 2)
        fits = self._up & (self._firm + limit <= self._capacity).all(axis=1)
        fits &= (self._load - self._firm >= excess).all(axis=1)
        if not fits.any():
            return -1
        machine = int(np.argmin(np.where(fits, np.maximum(excess, 0).sum(axis=1), np.inf)))
        low = np.flatnonzero((t["state"] == RUNNING) & (t["machine"] == machine) & (t["tier"] < PROD) & (t["end_s"] > at))
        need = excess[machine]
        for victim in low[np.lexsort((-t["memory_limit"][low], t["priority"][low]))].tolist():
            if (need <= 0).all():
                break
            need = need - (t["cpu_limit"][victim], t["memory_limit"][victim])
            self._end(np.array([victim]), max(at, int(t["start_s"][victim]) + 1), EVICT_PRIORITY)
            self._account(victim, -1)
            t["tries"][victim] |= 1 << 20  # its limits are given back already
        return machine

    def _account(self, slot: int, sign: int) -> None:
        task = self._tasks[slot]
        if task["parent"] < 0:
            limit = sign * np.array([task["cpu_limit"], task["memory_limit"]])
            self._load[task["machine"]] += limit
            if task["tier"] >= PROD:
                self._firm[task["machine"]] += limit

    def _start(self, slot: int, machine: int, at: int) -> None:
        rng, task = self._rng, self._tasks[slot]
        collection = self._collections[int(task["collection"])]
        task["state"], task["machine"], task["start_s"] = RUNNING, machine, at
        task["memory"], task["near_until_s"], task["burst"], task["cause"], task["end_s"] = 0.0, 0.0, 0.0, 0, NEVER
        self._account(slot, 1)
        if not task["service"]:
            begin = max(at, TRACE_START_S)
            fails = rng.random() < BATCH_FAILS
            share = float(rng.uniform(0.05, 1.0)) if fails else float(rng.uniform(0.8, 1.2))
            task["end_s"] = begin + max(2, int(task["duration_s"] * share))
            task["cause"] = PROGRAM_FAILURE if fails else FINISHED
        if not collection.scheduled:
            collection.scheduled = True
            self._collection_event(at, collection, SCHEDULE)
        self._instance_event(at, slot, SCHEDULE, machine)

    # One window

    def _window(self, now: int) -> None:
        t, rng, end = self._tasks, self._rng, now + WINDOW_S
        for at, m in [r for r in self._returns if r[0] < end]:
            self._up[m] = True
            self._machine_event(at, m, ADD)
            self._returns.remove((at, m))
        self._arrivals(now)
        t = self._tasks
        for at, m in [r for r in self._removals if r[0] < end]:
            self._up[m] = False
            self._machine_event(at, m, REMOVE)
            self._removals.remove((at, m))
            self._end(np.flatnonzero((t["state"] == RUNNING) & (t["machine"] == m)), max(at, now + 1), EVICT_MACHINE)
        self._place_pending(now)
        self._take_down(now)
        run = np.flatnonzero(t["state"] == RUNNING)
        # The day's chances: failures without memory pressure, near misses, limit changes.
        n, per_day = len(run), WINDOW_S / DAY_S
        unlucky = run[(rng.random(n) < FAILURES_PER_DAY[t["tier"][run]] * per_day) & (t["service"][run] == 1) & (t["kind"][run] == 0)]
        for slot in unlucky.tolist():
            self._end(np.array([slot]), int(rng.integers(now + 1, end)), PROGRAM_FAILURE)
        near = run[(rng.random(n) < NEAR_MISS_PER_DAY * per_day) & (t["mode"][run] == NEAR_MISS)]
        t["near_until_s"][near] = now + NEAR_MISS_S * rng.lognormal(0, 0.7, len(near))

        self._move(run)
        cpu, mean, peak = self._use(run, now)
        updated, moment = self._updates(run, now)
        self._propagate(run)
        begins = np.maximum(now, t["start_s"][run])
        ends = np.minimum(end, t["end_s"][run])
        split = np.isin(run, updated) & (ends > moment + 1) & (begins < moment - 1)
        if split.any():
            # A window ends where the limit changes, and another begins.
            self._record(run[split], begins[split], np.full(split.sum(), moment), cpu[split], mean[split], peak[split])
            for slot in run[split].tolist():
                self._change_limit(slot, moment, float(peak[run == slot][0]))
            begins = np.where(split, moment, begins)
        self._record(run, begins, ends, cpu, mean, peak)
        for slot in run[t["end_s"][run] < end].tolist():
            self._terminate(slot)
        running = t["state"] == RUNNING
        top = running & (t["parent"] < 0)
        self._memory_used = np.bincount(t["machine"][top], t["memory"][top], len(self._up))

    def _take_down(self, now: int) -> None:
        """End the tasks of collections whose time has come, and those of them that still wait."""
        t = self._tasks
        for number, c in [(k, c) for k, c in self._collections.items() if c.end_s < now + WINDOW_S]:
            at = max(int(c.end_s), now + 1)
            mine = t["collection"] == number
            run = np.flatnonzero(mine & (t["state"] == RUNNING))
            self._end(run, np.maximum(at, t["start_s"][run] + 1), KILLED if c.end_killed else FINISHED)
            for slot in np.flatnonzero(mine & (t["state"] == PENDING)).tolist():
                at_once = max(at, int(t["ready_s"][slot]))
                self._instance_event(at_once, slot, KILL)
                self._retire(slot, at_once)

    def _move(self, run: IntArray) -> None:
        """Let the noises of all tasks and groups take their next step."""
        t, rng, n = self._tasks, self._rng, len(run)
        keep = np.array([[KEEP_CPU], [KEEP_MEMORY]])
        self._common = keep * self._common + np.sqrt(1 - keep**2) * rng.standard_normal((2, GROUPS))
        for name, k in (("cpu_own", KEEP_CPU), ("memory_own", KEEP_MEMORY)):
            t[name][run] = k * t[name][run] + np.sqrt(1 - k * k) * rng.standard_normal(n)
        burst = rng.random(n) < BURSTS_PER_DAY * WINDOW_S / DAY_S
        t["burst"][run] = KEEP_BURST * t["burst"][run] + np.where(burst, BURST_SCORE * rng.random(n), 0.0)

    def _use(self, run: IntArray, now: int) -> tuple[FloatArray, FloatArray, FloatArray]:
        """CPU mean, memory mean and memory maximum of the window, shape (n,); ends what runs out of memory."""
        t, rng, n, end = self._tasks, self._rng, len(run), now + WINDOW_S
        a = t[run]
        limit, mode = a["memory_limit"], a["mode"]
        want = memory_demand(a, np.minimum(a["end_s"], end), self._common[1])
        chance = np.where(a["service"] == 1, SUDDEN_PER_DAY * WINDOW_S / DAY_S, 0.33 * WINDOW_S / np.maximum(a["duration_s"], 60))
        jump = (mode == SUDDEN) & (rng.random(n) < chance)
        want = np.where(jump, limit * (1.1 + 0.5 * rng.random(n)), want)
        mortal = np.isin(mode, (LEAK, SUDDEN, UNDERSIZED)) & ((mode != SUDDEN) | jump)
        want = np.where(mortal, want, np.minimum(want, 0.985 * limit))
        before = np.where(a["memory"] > 0, a["memory"], np.minimum(0.5 * want, 0.5 * limit))
        begin = np.maximum(now, a["start_s"])
        out = want >= limit
        # Memory is taken to grow evenly within a window, a jump to come at any moment of it.
        share = np.where(jump, rng.random(n), (limit - before) / np.maximum(want - before, 1e-12))
        last = np.minimum(end - 1, a["end_s"])
        dies = np.clip(begin + np.floor(share * (end - begin)).astype(np.int64), begin + 1, np.maximum(last, begin + 1))
        out &= dies <= a["end_s"]
        t["end_s"][run[out]], t["cause"][run[out]] = dies[out], OOM_LIMIT
        after = np.minimum(want, np.where(out, limit, 0.985 * limit))
        mean = np.where(jump & out, before, 0.5 * (before + after))
        swing = self._peaks(a, n)
        highest = np.maximum(np.maximum(before, after), mean * swing)
        # Those that die have touched their limit; of the others, page cache lets some reach it and live.
        highest = np.where(out, limit, np.minimum(highest, limit))
        t["memory"][run] = after
        cpu = cpu_demand(a, now, self._common[0])
        cpu, mean, highest = self._fill_allocs(run, cpu, mean, highest)
        cpu = self._throttle(run, cpu)
        self._machine_memory(run, now)
        return cpu, mean, highest

    def _peaks(self, a: TaskArray, n: int) -> FloatArray:
        from reclaim.data.synthetic_shapes import MEMORY_PEAK, read_table

        score = 0.6 * a["cache_score"] + 0.8 * self._rng.standard_normal(n)
        return 1.0 + read_table(MEMORY_PEAK, a["tier"], score)
