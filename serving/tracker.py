"""All that the service knows of a cell's tasks: takes windows and facts, and holds the answer for each task."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from reclaim.data import schema as s
from reclaim.data.errors import StoreError
from reclaim.data.windows import Windows
from reclaim.features.arrays import copy_of, room_for
from reclaim.features.lateness import LATE, NEW, TOO_LATE
from reclaim.features.registry import FEATURE_NAMES, SLOT_S
from reclaim.features.tolerant import TolerantState
from reclaim.serving.rows import ENDED_US, FAILED, IN_ALLOC, LOGICAL_NAME, SINCE_US, USER, FactRows
from reclaim.serving.slots import Slots
from reclaim.serving.tasks import (
    NOBODY,
    TASK,
    UNSEEN_US,
    Admitted,
    Ids,
    Known,
    Taken,
    filled,
    keep_last,
    key_of,
    last_windows,
)

if TYPE_CHECKING:
    from reclaim.serving.engine import Engine, Scores
    from reclaim.serving.settings import ServingSettings

_US: Final = 1_000_000
FORMAT: Final = 1
"""Version of what ``memory`` gives."""

IN_THE_FUTURE, NO_LIMIT, TOO_MANY_TASKS = range(TOO_LATE + 1, TOO_LATE + 4)
OUTCOMES: Final = ("taken", "late", "repeated", "too_late", "in_the_future", "no_limit", "too_many_tasks")
"""What becomes of a window; the first two are taken, the third is there already, the others are refused."""


class Tracker:
    """The tasks of one cell. One thread writes; any thread may ask, and gets whole answers of one moment.

    Parameters
    ----------
    settings : ServingSettings
    now_us : callable
        This machine's time, in µs since 1970; asked only where the settings say that windows are in it.
    threads : int
        For large writes; no answer depends on it.
    """

    def __init__(self, settings: ServingSettings, now_us: Callable[[], int], threads: int = 1) -> None:
        self._settings = settings
        self._now_us = now_us
        self._slots = Slots()
        self._state = TolerantState(settings.cell, settings.lateness_s, threads)
        self._tasks = np.zeros(0, TASK)
        self._x = np.zeros((0, len(FEATURE_NAMES)), np.float32)
        self._opted_out: set[int] = set()
        self._expired_at = -1
        self._engine: Engine | None = None
        self._scores: Scores | None = None
        self._lock = threading.Lock()
        self.clock_us = -1

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def present_us(self) -> int:
        """The time that staleness is judged at; -1 unknown."""
        return self._now_us() if self._settings.clock == "unix" else self.clock_us

    @property
    def n_opted_out(self) -> int:
        """Collections without estimation."""
        return len(self._opted_out)

    def admit(self, windows: Windows, in_alloc: NDArray[np.int8]) -> Admitted:
        """Decide which windows are taken; changes nothing.

        Parameters
        ----------
        windows : Windows
            ``n`` rows in any order. Facts of -1, and a limit of NaN, are as they were told before.
        in_alloc : int8, shape (n,)
            -1 where it is not told.
        """
        outcome = np.zeros(len(windows), np.uint8)
        key = key_of(windows)
        slot = self._slots.find(key)
        windows = filled(windows, in_alloc, self._kept(slot))
        outcome[np.isnan(windows.limit).any(axis=1)] = NO_LIMIT
        if self.present_us >= 0:
            outcome[windows.end_us > self.present_us + int(self._settings.ahead_s * _US)] = IN_THE_FUTURE
        unknown = np.flatnonzero((slot < 0) & (outcome == NEW))
        if len(unknown):
            _, first, task = np.unique(key[unknown], axis=0, return_index=True, return_inverse=True)
            place = np.argsort(np.argsort(first))[task.reshape(-1)]  # in the order in which they are told
            slot[unknown] = len(self._slots.key) + place  # nobody's
            outcome[unknown[place >= self._settings.max_tracked - len(self)]] = TOO_MANY_TASKS
        rows = np.flatnonzero(outcome == NEW)
        whole = len(rows) == len(outcome)
        outcome[rows] = self._state.sort_out(slot[rows], windows if whole else windows.take(rows))
        good = outcome <= LATE
        return Admitted(windows if good.all() else windows.take(good), outcome)

    def refusal(self, outcome: int) -> str:
        """Return in words why a window met an outcome."""
        set_to = self._settings
        return {
            TOO_LATE: f"came more than {set_to.lateness_s:g} s, or too many windows, after a later one of its task",
            IN_THE_FUTURE: f"ends more than {set_to.ahead_s:g} s after the clock, which stands at {self.present_us} µs",
            NO_LIMIT: "nobody has told the limit of its task yet: send it with the window, or to /v1/tasks before",
            TOO_MANY_TASKS: self.full_message,
        }[outcome]

    @property
    def full_message(self) -> str:
        """Why an unknown task is refused where there is no room."""
        return f"the service remembers {self._settings.max_tracked} tasks at most (RECLAIM_MAX_TRACKED)"

    def take(self, windows: Windows) -> Taken:
        """Let windows that ``admit`` let in count in the features; nobody sees anything of it before ``publish``."""
        slot = self._give(key_of(windows))
        if not (windows.end_us[:-1] <= windows.end_us[1:]).all():
            order = np.argsort(windows.end_us, kind="stable")
            slot, windows = slot[order], windows.take(order)
        touched, x, _, row = self._state.advance(slot, windows)
        last = windows.take(row)
        if (row < 0).any():
            before = last_windows(self._slots.key[touched], self._tasks[touched])
            came = row >= 0
            last = Windows(**{
                f.name: np.where(_like(came, new := getattr(last, f.name)), new, getattr(before, f.name))
                for f in fields(Windows)
            })  # fmt: skip
        return Taken(slot, windows, touched, x, row, last)

    def publish(self, taken: Taken, scores: Scores | None) -> Ids:
        """Put facts, last windows and answers of touched tasks in force, all at once; return the slots set free.

        Without scores the answers are as they were: ``promote`` makes them all.
        """
        with self._lock:
            self._reserve()
            self._x[taken.touched] = taken.x
            self._note(taken)
            if scores is not None and self._scores is not None:
                self._scores.put(taken.touched, scores)
            begins = self.clock_us < 0
            self.clock_us = max(self.clock_us, int(taken.windows.end_us.max(initial=-1)))
            heard = self._seen(self._slots.all()) if begins else taken.touched  # what was told before has no time
            self._tasks["heard_us"][taken.touched] = self._tasks["heard_us"][heard] = self.clock_us
        return self._expire()

    def room_for(self, facts: FactRows) -> NDArray[np.bool_]:
        """Return whose facts can be taken, shape (n,): a task that is new needs room."""
        new = (self._slots.find(facts.key) < 0) & (facts.columns[ENDED_US] < 0)
        _, first = np.unique(facts.key[new], axis=0, return_index=True)
        over = np.flatnonzero(new)[np.sort(first)[max(self._settings.max_tracked - len(self), 0) :]]
        good = np.ones(len(new), np.bool_)
        good[over] = False
        return good

    def tell(self, facts: FactRows) -> Ids:
        """Take facts; return the slots of tasks that have left."""
        columns, key = facts.columns, facts.key
        ends = columns[ENDED_US] >= 0
        slot = self._slots.find(key)
        slot[~ends] = self._give(key[~ends])
        with self._lock:
            for collection, estimation in facts.estimation.items():
                (self._opted_out.discard if estimation else self._opted_out.add)(collection)
            there = slot >= 0
            slot, rows = slot[there], np.flatnonzero(there)
            tasks = self._tasks
            for name, column in _TOLD.items():
                told = columns[column][rows]
                known = told >= 0
                tasks[name][slot[known]] = told[known]
            for name, column in (("user", USER), ("name", LOGICAL_NAME)):  # the first that is told stands
                told = columns[column][rows]
                known = (told >= 0) & (tasks[name][slot] < 0)
                tasks[name][slot[known]] = told[known]
            limited = ~np.isnan(facts.limit[rows, 0])
            tasks["limit"][slot[limited]] = facts.limit[rows[limited]]
            since = columns[SINCE_US][rows[limited]]
            tasks["limit_us"][slot[limited]] = np.where(since >= 0, since, self.clock_us)
            tasks["heard_us"][slot] = self.clock_us
        gone = np.unique(self._slots.find(key[ends]))
        gone = gone[gone >= 0]
        self._leave(gone)
        return gone

    def failed(self, facts: FactRows) -> tuple[Ids, Ids]:
        """Return the slots of tasks that are told to have failed, and when; to be asked before ``tell``."""
        ends = (facts.columns[ENDED_US] >= 0) & (facts.columns[FAILED] > 0)
        slot = self._slots.find(facts.key[ends])
        return slot[slot >= 0], facts.columns[ENDED_US][ends][slot >= 0]

    def promote(self, engine: Engine) -> None:
        """Answer with another model from now on: all tasks are scored anew, then everybody changes over at once."""
        scores = engine.nothing(len(self._tasks))
        slot = self._slots.all()
        slot = slot[self._tasks[s.END_US][slot] >= 0]
        if len(slot):
            last = last_windows(self._slots.key[slot], self._tasks[slot])
            scores.put(slot, engine.score(self._x[slot], last))
        with self._lock:
            self._engine, self._scores = engine, scores

    def look(
        self, key: Ids | None = None, *, machines: list[int] | None = None, collections: list[int] | None = None,
        with_x: bool = False,
    ) -> Known:  # fmt: skip
        """Return what is known now of the tasks named, in that order, or of all tasks in no order.

        Tasks that are unknown have an ``end_us`` and every other fact of -1, and a limit of NaN.

        Parameters
        ----------
        key : int64, shape (n, 2), or None
            Collection and instance index.
        machines, collections : list of int or None
            Only the tasks on those machines, or of those collections.
        with_x : bool
            Whether features are wanted.
        """
        with self._lock:
            assert self._engine is not None
            assert self._scores is not None
            slot, names = self._chosen(key, machines, collections)
            there = slot >= 0
            x = self._x[slot] if with_x else None
            if there.all():
                task, scores = self._tasks[slot], self._scores.take(slot)
            else:
                task, scores = np.full(len(slot), NOBODY), self._engine.nothing(len(slot))
                task[there] = self._tasks[slot[there]]
                scores.put(np.flatnonzero(there), self._scores.take(slot[there]))
            opted_out = np.isin(names[:, 0], np.array(sorted(self._opted_out), np.int64))
            return Known(
                self._engine, names, there, task, scores, x, opted_out, self.clock_us, self.present_us, len(self._slots)
            )  # fmt: skip

    def names(self, machines: list[int] | None = None, collections: list[int] | None = None) -> Ids:
        """Return collection and index of all tasks, or those on machines, or of collections, in order; shape (n, 2)."""
        with self._lock:
            _, key = self._chosen(None, machines, collections)
        return key[np.lexsort((key[:, 1], key[:, 0]))]

    def _chosen(self, key: Ids | None, machines: list[int] | None, collections: list[int] | None) -> tuple[Ids, Ids]:
        if key is not None:
            slot = self._slots.find(key)
            there = np.flatnonzero(slot >= 0)
            slot[there[self._tasks["heard_us"][slot[there]] == UNSEEN_US]] = -1
            return slot, key
        slot = self._seen(self._slots.all())
        if machines is not None:
            slot = slot[np.isin(self._tasks["machine"][slot], np.array(machines, np.int64))]
        if collections is not None:
            slot = slot[np.isin(self._slots.key[slot, 0], np.array(collections, np.int64))]
        return slot, self._slots.key[slot]

    @property
    def bytes_per_task(self) -> int:
        """What a task takes in memory, its name and the scores not counted."""
        return self._state.bytes_per_task + TASK.itemsize + self._x.itemsize * self._x.shape[1]

    def memory(self) -> dict[str, NDArray[Any]]:
        """Return copies of all that must outlive the process; which model answers is no part of it."""
        n = len(self._slots.key)
        parts = {
            **{f"slots.{name}": array for name, array in self._slots.memory().items()},
            **{f"state.{name}": array for name, array in self._state.memory().items()},
            "tasks": self._tasks[:n], "x": self._x[:n], "opted_out": np.array(sorted(self._opted_out), np.int64),
            "clock_us": np.array([self.clock_us, self._expired_at]),
        }  # fmt: skip
        return {name: copy_of(array) for name, array in parts.items()}

    def recall(self, memory: Mapping[str, NDArray[Any]]) -> None:
        """Go on from there.

        Raises
        ------
        ConfigError
            It was made for another cell, or by other code.
        StoreError
            It is not complete.
        """

        def part(prefix: str) -> dict[str, NDArray[Any]]:
            return {name.removeprefix(prefix): array for name, array in memory.items() if name.startswith(prefix)}

        try:
            if memory["tasks"].dtype != TASK or memory["x"].shape[1:] != self._x.shape[1:]:
                raise StoreError("the state was saved by another release; start afresh with another --state folder")
            self._state.recall(part("state."))
            self._slots.recall(part("slots."))
            self._tasks, self._x = copy_of(memory["tasks"]), copy_of(memory["x"])
            self._opted_out = set(memory["opted_out"].tolist())
            self.clock_us, self._expired_at = memory["clock_us"].tolist()
        except KeyError as error:
            raise StoreError(f"the state lacks {error}; start afresh with another --state folder") from error

    def _give(self, key: Ids) -> Ids:
        """Return the slots of tasks; whoever has none gets one, unseen by others until something is kept in it."""
        slot = self._slots.find(key)
        unknown = slot < 0
        if unknown.any():
            with self._lock:
                slot[unknown] = self._slots.give(key[unknown])
                self._reserve()
                self._tasks[slot[unknown]] = NOBODY
        return slot

    def _seen(self, slot: Ids) -> Ids:
        seen: Ids = slot[self._tasks["heard_us"][slot] != UNSEEN_US]
        return seen

    def _kept(self, slot: Ids) -> NDArray[Any]:
        """Return what is kept of tasks, nothing of those without a slot."""
        there = slot >= 0
        if there.all():
            return self._tasks[slot]
        task = np.full(len(slot), NOBODY)
        task[there] = self._tasks[slot[there]]
        return task

    def _reserve(self) -> None:
        need = len(self._slots.key)
        if need > len(self._tasks):
            self._tasks, self._x = room_for(self._tasks, need), room_for(self._x, need)
        if self._engine is not None and self._scores is not None and need > len(self._scores.oom):
            grown = self._engine.nothing(len(self._tasks))
            grown.put(np.arange(len(self._scores.oom)), self._scores)
            self._scores = grown

    def _note(self, taken: Taken) -> None:
        """Keep the facts and the last windows of touched tasks."""
        tasks, touched, windows = self._tasks, taken.touched, taken.windows
        place = np.searchsorted(touched, taken.slot)
        first_us = np.where(tasks["windows"][touched] > 0, tasks["first_us"][touched], _NEVER_US)
        np.minimum.at(first_us, place, windows.start_us)
        tasks["first_us"][touched] = first_us
        tasks["windows"][touched] += np.bincount(place, minlength=len(touched))
        came = taken.row >= 0
        at, last = touched[came], taken.last if came.all() else taken.last.take(came)
        keep_last(tasks, at, last)
        tasks[s.SCHEDULED_US][at] = np.maximum(tasks[s.SCHEDULED_US][at], last.scheduled_us)
        newer = last.start_us >= tasks["limit_us"][at]
        tasks["limit"][at[newer]] = last.limit[newer]
        tasks["limit_us"][at[newer]] = last.start_us[newer]

    def _expire(self) -> Ids:
        """Let tasks go of which nothing was heard for long; looked at once for every slot of the clock."""
        slot_us = SLOT_S * _US
        if self.clock_us // slot_us <= self._expired_at // slot_us:
            return np.zeros(0, np.int64)
        self._expired_at = self.clock_us
        slot = self._slots.all()
        gone = slot[self._tasks["heard_us"][slot] + int(self._settings.forget_s * _US) < self.clock_us]
        self._leave(gone)
        return gone

    def _leave(self, gone: Ids) -> None:
        if len(gone) == 0:
            return
        with self._lock:
            self._state.forget(gone)
            self._slots.free(gone)
            self._tasks[gone] = NOBODY
            if self._engine is not None and self._scores is not None:
                self._scores.put(gone, self._engine.nothing(len(gone)))


_TOLD: Final = {
    "machine": s.MACHINE_ID, "tier": s.TIER, s.SCHEDULING_CLASS: s.SCHEDULING_CLASS, "in_alloc": IN_ALLOC,
    s.SCHEDULED_US: s.SCHEDULED_US,
}  # fmt: skip
_NEVER_US: Final = 2**62
"""Later than any time that is taken."""


def _like(mask: NDArray[np.bool_], column: NDArray[Any]) -> NDArray[np.bool_]:
    return mask.reshape(-1, *[1] * (column.ndim - 1))
