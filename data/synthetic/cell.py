"""Simulation of the synthetic cell: arrivals, placement, ends and restarts, window by window.

Time advances in windows of 300 s. In each, machines leave and return, work arrives and is placed, running tasks use
resources, and runs end at a second inside the window. The cell yields simulated windows by the hour and records events
in a journal; the format on disk is the writer's.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from reclaim.data.schema import RESOURCES, TIERS, EventType, MachineEventType
from reclaim.data.synthetic.journal import Journal
from reclaim.data.synthetic.machines import Machines, absences, machine_capacities
from reclaim.data.synthetic.movement import SharedMovement
from reclaim.data.synthetic.shapes import MON, PROD, FloatArray, IntArray, SimulatedWindows, rounded
from reclaim.data.synthetic.usage import PER_DAY, UsageModel
from reclaim.data.synthetic.workload import (
    BATCH_FAILS,
    BATCH_LOG_SD,
    BATCH_MEAN_S,
    BATCH_RANGE_S,
    BATCH_SHARE,
    DAY_S,
    EMPTY,
    EVICT_MACHINE,
    FAILURES_PER_DAY,
    FINISHED,
    GROUPS,
    IN_ALLOC_SHARE,
    KILLED,
    LEAK,
    NEVER,
    OOM_LIMIT,
    PENDING,
    PROGRAM_FAILURE,
    RUNNING,
    TASK,
    TRACE_START_S,
    UNDERSIZED,
    UPDATES_PER_DAY,
    WINDOW_S,
    Collection,
    TaskArray,
    Workload,
    end_run,
)

# Sum of limits over capacity (CPU, memory) to which the workload is scaled; with pending tasks and bursts of arrivals
# the cell then runs at about 1.1 times its capacity.
FILL = np.array([1.0, 1.05])
LARGEST_TASK = 0.4  # of the smallest machine
ALLOC_MARGIN = 1.2  # limit of an alloc instance over those of its tasks
MAX_TRIES = 3  # of a batch task
RAISED_AFTER_OOM, RAISE = 0.5, 1.4  # share of out-of-memory kills after which the limit is raised, and by how much
BATCH_COLLECTION_SIZE = 5.3  # mean number of tasks, to turn tasks into arrivals
HOUR = 12  # windows


class Cell:
    """One cell and its clock; ``hours`` runs it once."""

    def __init__(
        self,
        machines: int,
        windows: int,
        tasks_per_machine: float,
        seed: int,
        *,
        common: float = 0.0,
        service: float = 0.0,
    ) -> None:
        self.windows = windows
        self.collections_made = self.tasks_made = 0
        # One generator per subject: more draws in one do not shift the others.
        streams = np.random.SeedSequence(seed).spawn(6)
        self._rng, work, iron, notes, motion, together = (np.random.default_rng(s) for s in streams)
        capacity = machine_capacities(machines, iron)
        tasks = machines * tasks_per_machine
        fill, largest = FILL * capacity.sum(axis=0), LARGEST_TASK * capacity.min(axis=0)
        self._work = Workload(seed, tasks, fill, largest, work)
        self._machine_ids = np.array([self._work.new_id() for _ in range(machines)])
        self._machines = Machines(capacity)
        self._usage = UsageModel(motion, SharedMovement(common, service, GROUPS, together))
        self.journal = Journal(seed, self._machine_ids.tolist(), capacity, notes)
        self._tasks: TaskArray = np.zeros(1024, TASK)
        self._collections: dict[int, Collection] = {}
        end = TRACE_START_S + windows * WINDOW_S
        for machine in range(machines):
            self.journal.machine(0, machine, MachineEventType.ADD)
            self.journal.attributes(machine, (TRACE_START_S, end))
        away = absences(machines, TRACE_START_S + WINDOW_S, end, iron)
        self._moves = sorted(
            [(at, MachineEventType.REMOVE, m) for m, at, _ in away]
            + [(until, MachineEventType.ADD, m) for m, _, until in away]
        )
        self._start_work(tasks)

    def hours(self) -> Iterator[tuple[int, SimulatedWindows]]:
        """Run the cell; yield (hour, its windows by start, collection and index) at the end of each hour."""
        for k in range(self.windows):
            self._window(TRACE_START_S + k * WINDOW_S)
            if (k + 1) % HOUR == 0 or k + 1 == self.windows:
                yield k // HOUR, self.journal.drain_windows()

    def _start_work(self, tasks: float) -> None:
        inside = 0
        while inside < round(IN_ALLOC_SHARE * tasks):
            inside += self._alloc_set(min(round(IN_ALLOC_SHARE * tasks) - inside, self._work.size(MON, service=True)))
        for tier in reversed(range(len(TIERS))):
            batch = self._work.target[tier] * BATCH_SHARE[tier]
            service = self._work.target[tier] - batch - (inside if tier >= PROD else 0)
            for lasting, want in ((True, service), (False, batch)):
                while want > 0.5:
                    want -= self._arrive(tier, 0, service=lasting, most=round(want))
        # Tasks running at one moment are longer than tasks that arrive.
        longer = self._tasks["duration_s"] * np.exp(BATCH_LOG_SD**2)
        self._tasks["duration_s"] = np.clip(longer, *BATCH_RANGE_S)
        self._place_pending(0)
        # Running tasks have a past: their start lies before the trace, their events at time 0.
        t, rng = self._tasks, self._rng
        run = np.flatnonzero(t["state"] == RUNNING)
        age = np.exp(rng.uniform(np.log(1800), np.log(20 * DAY_S), len(run)))
        batch_run = t["service"][run] == 0
        age = np.where(batch_run, rng.random(len(run)) * t["duration_s"][run], age)
        age = np.where(t["mode"][run] == LEAK, rng.random(len(run)) * 0.9 * t["mode_s"][run], age)
        # Undersized tasks would have ended before the trace.
        age = np.where(t["mode"][run] == UNDERSIZED, 0.0, age).astype(np.int64)
        t["start_s"][run] = TRACE_START_S - age
        rest = np.maximum(t["end_s"][run] - age, TRACE_START_S + 5)
        t["end_s"][run] = np.where(batch_run, rest, t["end_s"][run])
        self._usage.settle(t, run, TRACE_START_S)

    def _alloc_set(self, size: int) -> int:
        """Make an alloc set and, in each of its instances, a production task and a monitoring task."""
        alloc = self._work.collection(PROD, size, 0, service=True, kind=1)
        instances = self._admit(alloc, 0)
        inside = []
        for tier in (PROD, MON):
            slots = self._admit(self._work.collection(tier, size, 0, service=True, alloc_id=alloc.id), 0)
            self._tasks["parent"][slots] = instances
            inside.append(slots)
        t = self._tasks
        for r, name in enumerate(RESOURCES):
            limit, base = f"{name}_limit", f"{name}_base"
            held = ALLOC_MARGIN * sum(t[limit][slots] for slots in inside)
            # Tasks that together exceed the smallest machine are scaled down to it.
            shrink = np.minimum(1.0, LARGEST_TASK * self._machines.capacity[:, r].min() / held)
            for slots in inside:
                t[limit][slots] = t[base][slots] = rounded(t[limit][slots] * shrink)
            t[limit][instances] = t[base][instances] = rounded(held * shrink)
        for slots in (instances, *inside):
            self._submit(slots)
        return size

    def _arrive(self, tier: int, ready_s: int, *, service: bool, most: int = 10**9) -> int:
        size = max(1, min(self._work.size(tier, service), most))
        collection = self._work.collection(tier, size, max(ready_s, TRACE_START_S), service=service)
        self._submit(self._admit(collection, ready_s))
        return size

    def _admit(self, collection: Collection, ready_s: int) -> IntArray:
        """Assign slots to a collection's tasks and return them in order of the task index."""
        number = self.collections_made
        self.collections_made += 1
        self.tasks_made += collection.size
        self._collections[number] = collection
        fresh = self._work.tasks(collection, number, ready_s)
        fresh["state"], fresh["end_s"] = PENDING, NEVER
        empty = np.flatnonzero(self._tasks["state"] == EMPTY)
        if len(empty) < len(fresh):
            self._tasks = np.concatenate([self._tasks, np.zeros(max(len(self._tasks), len(fresh)), TASK)])
            empty = np.flatnonzero(self._tasks["state"] == EMPTY)
        slots = empty[: len(fresh)]
        self._tasks[slots] = fresh
        self.journal.enter(ready_s, collection)
        return slots

    def _submit(self, slots: IntArray) -> None:
        t = self._tasks
        for slot in slots.tolist():
            self.journal.submit(int(t["ready_s"][slot]), t, slot, self._of(slot))

    def _of(self, slot: int) -> Collection:
        return self._collections[int(self._tasks["collection"][slot])]

    def _arrivals(self, now: int) -> None:
        rng, t = self._rng, self._tasks
        daily = 1.0 + 0.3 * np.sin(2 * np.pi * (now % DAY_S) / DAY_S)
        services = np.bincount(t["tier"][(t["state"] != EMPTY) & (t["service"] == 1) & (t["kind"] == 0)], minlength=5)
        for tier, target in enumerate(self._work.target.tolist()):
            rate = target * BATCH_SHARE[tier] * WINDOW_S / BATCH_MEAN_S / BATCH_COLLECTION_SIZE
            for _ in range(int(rng.poisson(rate * daily))):
                self._arrive(tier, now + int(rng.integers(0, WINDOW_S)), service=False)
            want = target * (1 - BATCH_SHARE[tier]) - services[tier]
            if want >= 1 and rng.random() < 0.1:
                self._arrive(tier, now + int(rng.integers(0, WINDOW_S)), service=True, most=round(want))

    def _place_pending(self, now: int) -> None:
        """Place pending tasks, highest priority first; ``now`` 0 is the moment before the trace."""
        t = self._tasks
        latest = now + WINDOW_S - 10
        waiting = np.flatnonzero((t["state"] == PENDING) & (t["ready_s"] < latest))
        # An alloc instance is placed before its tasks, whatever their priorities.
        order = np.lexsort((waiting, t["ready_s"][waiting], -t["priority"][waiting], t["kind"][waiting] == 0))
        refused: set[tuple[int, float, float]] = set()
        for slot in waiting[order].tolist():
            asked = (int(t["tier"][slot]), float(t["cpu_limit"][slot]), float(t["memory_limit"][slot]))
            if asked in refused:  # a task of the same size has just been refused
                continue
            at = now and max(int(t["ready_s"][slot]), now) + int(self._rng.integers(1, 9))
            parent = int(t["parent"][slot])
            if parent >= 0:
                if t["state"][parent] == RUNNING and t["start_s"][parent] <= at < t["end_s"][parent]:
                    self._start(slot, int(t["machine"][parent]), at)
                continue
            machine = self._machines.best_fit(t, slot)
            if machine < 0 and t["tier"][slot] >= PROD and now:
                machine = self._machines.make_room(t, slot, at)
            if machine < 0:
                refused.add(asked)
            else:
                self._start(slot, machine, at)

    def _start(self, slot: int, machine: int, at: int) -> None:
        rng, t, collection = self._rng, self._tasks, self._of(slot)
        for name, value in (("state", RUNNING), ("machine", machine), ("start_s", at), ("end_s", NEVER)):
            t[name][slot] = value
        for name in ("cpu", "memory", "near_until_s", "burst", "cause", "released"):
            t[name][slot] = 0
        self._machines.account(t, slot, 1)
        if not t["service"][slot]:
            fails = rng.random() < BATCH_FAILS
            share = float(rng.uniform(0.05, 1.0)) if fails else float(rng.uniform(0.8, 1.2))
            t["end_s"][slot] = max(at, TRACE_START_S) + max(2, int(t["duration_s"][slot] * share))
            t["cause"][slot] = PROGRAM_FAILURE if fails else FINISHED
        if not collection.scheduled:
            collection.scheduled = True
            self.journal.collection(at, collection, EventType.SCHEDULE)
        self.journal.task(at, t, slot, collection, EventType.SCHEDULE, machine)

    def _window(self, now: int) -> None:
        end = now + WINDOW_S
        self._arrivals(now)
        t = self._tasks  # arrivals may have moved the slots to a larger table; nothing below does
        self._move_machines(now)
        self._place_pending(now)
        self._take_down(now)
        run = np.flatnonzero(t["state"] == RUNNING)
        self._fail_some(run, now)
        usage = self._usage.step(t, run, now, self._machines.capacity)
        for host in run[(t["kind"][run] == 1) & (t["end_s"][run] <= end)].tolist():
            inside = run[t["parent"][run] == host]
            end_run(t, inside, int(t["end_s"][host]), int(t["cause"][host]))
        begins = np.maximum(now, t["start_s"][run])
        ends = np.minimum(end, t["end_s"][run])
        simulated = (usage.cpu, usage.memory, usage.memory_max)
        factor, moment = self._limit_changes(run, now)
        split = (factor != 1.0) & (t["end_s"][run] > end) & (begins < moment)
        if split.any():
            # A change of limit splits the window.
            self._record(run[split], begins[split], np.full(split.sum(), moment), *(x[split] for x in simulated))
            for slot, f, peak in zip(run[split].tolist(), factor[split], usage.memory_max[split], strict=True):
                self._change_limit(slot, f, peak, moment)
            begins = np.where(split, moment, begins)
        self._record(run, begins, ends, *simulated)
        for slot in run[t["end_s"][run] <= end].tolist():
            self._terminate(slot)
        top = (t["state"] == RUNNING) & (t["parent"] < 0)
        used = [np.bincount(t["machine"][top], t[name][top], len(self._machine_ids)) for name in RESOURCES]
        self._machines.used = np.column_stack(used)

    def _move_machines(self, now: int) -> None:
        t = self._tasks
        while self._moves and self._moves[0][0] < now + WINDOW_S:
            at, event, machine = self._moves.pop(0)
            self.journal.machine(at, machine, event)
            self._machines.up[machine] = event == MachineEventType.ADD
            if event == MachineEventType.REMOVE:
                here = np.flatnonzero((t["state"] == RUNNING) & (t["machine"] == machine))
                end_run(t, here, max(at, now + 1), EVICT_MACHINE)

    def _take_down(self, now: int) -> None:
        """End the running and pending tasks of collections whose end is reached."""
        t = self._tasks
        for number in [k for k, c in self._collections.items() if c.end_s < now + WINDOW_S]:
            collection = self._collections[number]
            at = max(collection.end_s, now + 1)
            mine = t["collection"] == number
            run = np.flatnonzero(mine & (t["state"] == RUNNING))
            end_run(t, run, at, KILLED if collection.end_killed else FINISHED)
            for slot in np.flatnonzero(mine & (t["state"] == PENDING)).tolist():
                gone = max(at, int(t["ready_s"][slot]))
                self.journal.task(gone, t, slot, collection, EventType.KILL)
                self._retire(slot, gone)

    def _fail_some(self, run: IntArray, now: int) -> None:
        t = self._tasks
        chance = np.where(
            (t["service"][run] == 1) & (t["kind"][run] == 0), FAILURES_PER_DAY[t["tier"][run]] * PER_DAY, 0
        )
        unlucky = run[self._rng.random(len(run)) < chance]
        end_run(t, unlucky, self._rng.integers(now + 1, now + WINDOW_S, len(unlucky)), PROGRAM_FAILURE)

    def _limit_changes(self, run: IntArray, now: int) -> tuple[FloatArray, int]:
        """Return the factor on each running task's limits, shape (n,), mostly 1, and the second of the change."""
        rng, t = self._rng, self._tasks
        numbers = np.unique(t["collection"][run])
        factors = np.where(
            rng.random(len(numbers)) < UPDATES_PER_DAY * PER_DAY, rng.uniform(0.75, 1.4, len(numbers)), 1.0
        )
        free = (t["service"][run] == 1) & (t["kind"][run] == 0) & (t["parent"][run] < 0)
        factor = np.where(free, factors[np.searchsorted(numbers, t["collection"][run])], 1.0)
        return factor, int(rng.integers(now + 20, now + WINDOW_S - 20))

    def _change_limit(self, slot: int, factor: float, peak: float, at: int) -> None:
        """Set new limits of a running task; the memory limit stays above its latest maximum."""
        t = self._tasks
        self._machines.account(t, slot, -1)
        largest = LARGEST_TASK * self._machines.capacity.min(axis=0)
        wanted = np.array([t["cpu_limit"][slot] * factor, max(t["memory_limit"][slot] * factor, 1.15 * peak)])
        now_has = np.array([t["cpu_limit"][slot], t["memory_limit"][slot]])
        t["cpu_limit"][slot], t["memory_limit"][slot] = rounded(np.minimum(wanted, np.maximum(largest, now_has)))
        self._machines.account(t, slot, 1)
        self.journal.task(at, t, slot, self._of(slot), EventType.UPDATE_RUNNING, int(t["machine"][slot]))

    def _record(self, run: IntArray, begins: IntArray, ends: IntArray, *usage: FloatArray) -> None:
        t = self._tasks[run]
        collections = [self._collections[k] for k in t["collection"].tolist()]
        self.journal.windows(t, collections, (begins, ends), usage)

    def _terminate(self, slot: int) -> None:
        """End a run at its second; the task is submitted again or retired."""
        rng, t, collection = self._rng, self._tasks, self._of(slot)
        at, cause = int(t["end_s"][slot]), int(t["cause"][slot])
        self.journal.end(t, slot, collection)
        if not t["released"][slot]:
            self._machines.account(t, slot, -1)
        failed = cause in (OOM_LIMIT, PROGRAM_FAILURE)
        t["tries"][slot] += failed
        given_up = failed and not t["service"][slot] and t["tries"][slot] >= MAX_TRIES
        collection.failed |= given_up
        if cause in (FINISHED, KILLED) or given_up:
            self._retire(slot, at)
            return
        # A task that keeps failing waits longer before each try.
        wait = int(rng.integers(1, 30)) + (min(600, 10 * 2 ** min(int(t["tries"][slot]), 6)) if failed else 0)
        t["state"][slot], t["ready_s"][slot] = PENDING, at + wait
        t["end_s"][slot] = NEVER
        self._submit(np.array([slot]))
        if cause == OOM_LIMIT and t["parent"][slot] < 0 and rng.random() < RAISED_AFTER_OOM:
            largest = LARGEST_TASK * self._machines.capacity[:, 1].min()
            t["memory_limit"][slot] = rounded(np.array([min(RAISE * t["memory_limit"][slot], largest)]))[0]
            self.journal.task(at + wait, t, slot, collection, EventType.UPDATE_PENDING)

    def _retire(self, slot: int, at: int) -> None:
        t, collection = self._tasks, self._of(slot)
        number = int(t["collection"][slot])
        t["state"][slot] = EMPTY
        t["parent"][slot] = -1
        collection.left -= 1
        if collection.left == 0:
            killed = collection.end_killed and at >= collection.end_s
            self.journal.collection(
                at, collection, EventType.KILL if killed else EventType.FAIL if collection.failed else EventType.FINISH
            )
            del self._collections[number]
