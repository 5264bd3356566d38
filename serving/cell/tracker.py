"""The state of a cell: takes windows and facts, and holds features, last window and scores of each task."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from reclaim.data import schema as s
from reclaim.data.core.arrays import copy_of, room_for
from reclaim.data.core.parallel import in_pieces
from reclaim.data.core.state import part_of
from reclaim.data.errors import ConfigError, StoreError
from reclaim.data.windows import Windows, with_demand, with_p90_alone
from reclaim.features.fold.live import TolerantState
from reclaim.features.fold.live_kernel import LATE, NEW, TOO_LATE
from reclaim.features.registry import N_FEATURES
from reclaim.serving.cell.following import Following, Prices, named_in
from reclaim.serving.cell.machine_peaks import MachinePeaks
from reclaim.serving.cell.outcomes import (
    ENDED,
    IN_THE_FUTURE,
    IN_THE_PAST,
    NO_LIMIT,
    RUN_TO_COME,
    TOO_MANY_TASKS,
    refuse_repeats,
    set_facts,
    without_room,
)
from reclaim.serving.cell.size import CellSize
from reclaim.serving.cell.slots import KEPT_US, EndedTasks, Slots
from reclaim.serving.cell.task_kernels import copy_rows, filled, keep, run_of
from reclaim.serving.cell.task_record import (
    TASK,
    UNKNOWN_TASK,
    UNSEEN_US,
    Admitted,
    Ids,
    Taken,
    chosen,
    key_of,
    last_windows,
    machine_of,
)
from reclaim.serving.cell.views import Known
from reclaim.serving.models.scorer import SCORED_AT_ONCE, TASK_PARTS, Scores
from reclaim.serving.wire.rows import ENDED_US, FAILED, FAILED_US, SINCE_US, FactRows

if TYPE_CHECKING:
    from reclaim.serving.cell.clock import CellClock
    from reclaim.serving.models.scorer import Scorer
    from reclaim.serving.settings import ServingSettings

log = logging.getLogger(__name__)

_Made = TypeVar("_Made")
_US: Final = 1_000_000
FORMAT: Final = 12
"""Version of the arrays of ``memory``."""


class Tracker:
    """The tasks of one cell. One thread writes; any thread reads consistent tasks, all scored by one model.

    Parameters
    ----------
    settings : ServingSettings
    clock : CellClock
    threads : int
        For large writes; answers do not depend on it.
    """

    def __init__(self, settings: ServingSettings, clock: CellClock, threads: int = 1) -> None:
        self._settings = settings
        self.clock = clock
        self._threads, self._slots = threads, Slots()
        self._lateness_s = settings.lateness_s
        self._state = self._tolerant()
        self._tasks = np.zeros(0, TASK)
        self._x = np.zeros((0, N_FEATURES), np.float32)
        self._opted_out = np.zeros(0, np.int64)
        self._ended = EndedTasks(settings.max_tracked)
        self._scorer: Scorer | None = None
        self._scores: Scores | None = None
        self._following: Following | None = None
        self._watched: MachinePeaks | None = None  # where prices do not follow: outcomes of machines, not saved
        self.size = CellSize()
        self._prices: Prices | None = None
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def clock_us(self) -> int:
        """The cell's clock as shown to callers; -1 before the first window."""
        return self.clock.shown_us

    @property
    def n_opted_out(self) -> int:
        """Number of collections without estimation."""
        return len(self._opted_out)

    def admit(self, windows: Windows, in_alloc: NDArray[np.int8]) -> Admitted:
        """Decide which windows are taken; changes no task, and the clock only where most tasks agree on another time.

        Parameters
        ----------
        windows : Windows
            ``n`` rows in any order. Facts of -1, and a limit of NaN, are filled in from earlier writes.
        in_alloc : int8, shape (n,)
            -1 where it is unknown.
        """
        key, end_us = key_of(windows), windows.end_us
        slot = self._slots.find(key)
        outcome = np.zeros(len(windows), np.uint8)
        outcome[windows.scheduled_us > end_us] = RUN_TO_COME
        outcome[self._ended.before_end(key, windows.start_us)] = ENDED
        outcome[self.clock.ahead(key, end_us, self)] = IN_THE_FUTURE
        outcome[self.clock.past(key, end_us, self) | self.clock.impossible(windows.scheduled_us)] = IN_THE_PAST
        unknown = np.flatnonzero((slot < 0) & (outcome == NEW))
        if len(unknown):
            _, task = np.unique(key[unknown], axis=0, return_inverse=True)
            slot[unknown] = len(self._slots.key) + task.reshape(-1)  # free slots
        rows, kind = np.flatnonzero(outcome == NEW), outcome
        while True:  # refused windows must not affect the others, so all are classified again without them
            kind = self._state.classify(slot[rows], windows if len(rows) == len(windows) else windows.take(rows))
            good = rows[kind <= LATE]
            part = windows if len(good) == len(windows) else windows.take(good)
            whole = filled(part, in_alloc[good], slot[good], self._tasks[: len(self._slots.key)])
            unlimited = np.isnan(whole.limit[:, 0])
            outcome[good[unlimited]] = NO_LIMIT
            room = self._settings.max_tracked - len(self)
            over = without_room(slot[good[~unlimited]], len(self._slots.key), room)
            outcome[good[~unlimited][over]] = TOO_MANY_TASKS
            if not (unlimited.any() or over.any()):
                break
            refuse_repeats(outcome, slot, windows)
            rows = np.flatnonzero(outcome == NEW)
        outcome[rows] = kind
        self.clock.claims.miss(slot[outcome == TOO_LATE])
        return Admitted(whole, outcome)

    def take(self, windows: Windows) -> Taken:
        """Fold admitted windows into the features; readers see the result after ``publish``."""
        slot = self._give(key_of(windows))
        if not (windows.end_us[:-1] <= windows.end_us[1:]).all():
            order = np.argsort(windows.end_us, kind="stable")
            slot, windows = slot[order], windows.take(order)
        windows = with_demand(windows)
        touched, x, _, row = self._state.advance(slot, windows)
        last = with_p90_alone(windows)
        if not np.array_equal(row, np.arange(len(windows))):
            last = last.take(row)
        if (row < 0).any():
            before = last_windows(self._slots.key[touched], self._tasks[touched])
            last = chosen(row >= 0, last, before)
        return Taken(slot, windows, touched, x, row, last, self._has_opted_out(self._slots.key[touched, 0]))

    def sized(self, scorer: Scorer, taken: Taken) -> Scorer:
        """Return the scorer for windows just taken: one without a mean limit has that of this cell.

        Where that has changed, all tasks are scored again.
        """
        limit = taken.last.limit[~taken.last.in_alloc]
        mean_limit = self.size.reach(int(taken.windows.end_us[-1]), limit, self._tasks, taken.touched)
        if not scorer.of_cell_size or mean_limit is None:
            return scorer
        scorer = scorer.resized(mean_limit)
        follower = self._following or self._watched
        if follower is not None:
            follower.resize(scorer)
        if self._scorer is not None:
            scores = self._scored_by(scorer)
            with self._lock:
                self._scorer, self._scores = scorer, scores
        return scorer

    @property
    def following(self) -> Following | None:
        """The follower of the outcomes of answers, by which prices move, or None."""
        return self._following

    @property
    def prices(self) -> Prices:
        """The prices of the moment."""
        assert self._prices is not None
        return self._prices

    def follow(self, following: Following | None) -> None:
        """Let the prices of a model follow outcomes while the log is read; readers see them after ``promote``."""
        self._following = following

    def publish(self, taken: Taken, scores: Scores | None) -> None:
        """Publish facts, last windows and scores of touched tasks, and the prices of the moment, all at once.

        Without scores the old ones stay until ``promote`` computes all; they are needed where prices follow.
        """
        if self._following is not None:
            assert scores is not None
            self._following.take(taken, scores, self.size.begun_us)
        elif self._watched is not None and scores is not None:
            self._watched.take(taken, scores)
        with self._lock:
            if self._following is not None and self._scorer is not None:
                self._prices = self._following.prices
            elif self._watched is not None and self._prices is not None:
                self._prices = replace(self._prices, machines={self._watched.horizon_s: self._watched.margins})
            self._reserve()
            keep(taken, scores, self._tasks, self._x, self._scores, self._threads)
            begins = self.clock.latest_us < 0
            self.clock.reach(taken.last.end_us, self)
            self.clock.claims.take(taken.touched)
            if begins:  # earlier facts have no time
                self._tasks["heard_us"][self._seen(self._slots.all())] = self.clock.present_us
            self._tasks["heard_us"][taken.touched] = self.clock.present_us

    def judge(self, facts: FactRows) -> NDArray[np.uint8]:
        """Return the outcome of each fact as a position in ``OUTCOMES``, shape (n,).

        A new task needs room. Facts from before the end of a task that has ended would bring it back.
        """
        outcome = np.zeros(len(facts.key), np.uint8)
        for name in (ENDED_US, FAILED_US, SINCE_US, s.SCHEDULED_US):
            if self.clock.bound_us >= 0:
                outcome[facts.columns[name] > self.clock.bound_us] = IN_THE_FUTURE
            outcome[self.clock.impossible(facts.columns[name])] = IN_THE_PAST
        unknown = (self._slots.find(facts.key) < 0) & (facts.columns[ENDED_US] < 0)
        began_us = np.maximum(facts.columns[SINCE_US], facts.columns[s.SCHEDULED_US])
        of_us = np.where(began_us < 0, facts.columns[FAILED_US] - 1, began_us)  # without a time they are current
        outcome[unknown & (of_us >= 0) & self._ended.before_end(facts.key, of_us)] = ENDED
        new = np.flatnonzero(unknown & (outcome == NEW))
        _, task = np.unique(facts.key[new], axis=0, return_inverse=True)
        over = without_room(task.reshape(-1), 0, self._settings.max_tracked - len(self))
        outcome[new[over]] = TOO_MANY_TASKS
        return outcome

    def opted_out_after(self, facts: FactRows) -> Ids:
        """Return the collections without estimation once facts are stored, sorted."""
        if not facts.estimation:
            return self._opted_out
        on = [collection for collection, estimation in facts.estimation.items() if estimation]
        off = [collection for collection, estimation in facts.estimation.items() if not estimation]
        return np.union1d(np.setdiff1d(self._opted_out, np.array(on, np.int64)), np.array(off, np.int64))

    def store_facts(self, facts: FactRows) -> Ids:
        """Store facts; return the slots of tasks that were removed."""
        columns, key = facts.columns, facts.key
        ends = columns[ENDED_US] >= 0
        self._give(key[~ends])
        slot = self._slots.find(key)
        with self._lock:
            self._opted_out = self.opted_out_after(facts)
            rows = np.flatnonzero((slot >= 0) & ~ends)
            set_facts(self._tasks, slot[rows], rows, facts)
            self._tasks["heard_us"][slot[rows]] = self.clock.present_us
        obeyed = ends & ~self._outlived(slot, columns[ENDED_US])
        if obeyed.any():
            self._ended.add(key[obeyed], columns[ENDED_US][obeyed])
        gone = np.unique(slot[obeyed & (slot >= 0)])
        self.remove(gone)
        return gone

    def _outlived(self, slot: Ids, ended_us: Ids) -> NDArray[np.bool_]:
        """Return which ends belong to an earlier run than the current one, shape (n,)."""
        task = np.full(len(slot), UNKNOWN_TASK)
        task[slot >= 0] = self._tasks[slot[slot >= 0]]
        windowed = task[s.END_US] >= 0  # a window that began then is of the run after it, as in ``EndedTasks``
        outlived: NDArray[np.bool_] = (windowed & (ended_us <= task[s.START_US])) | (ended_us < task[s.SCHEDULED_US])
        return outlived

    def failed(self, facts: FactRows) -> tuple[Ids, Ids, Ids]:
        """Return the slots of failed tasks, the times, and 1 for out of memory, 0 for not, -1 where it is not given.

        Must be called before ``store_facts``.
        """
        ended_us, slot = facts.columns[ENDED_US], self._slots.find(facts.key)
        ended = (ended_us >= 0) & (facts.columns[FAILED] > 0) & ~self._outlived(slot, ended_us)
        failed_us = np.where(ended, ended_us, facts.columns[FAILED_US])
        met = (slot >= 0) & (failed_us >= 0)
        return slot[met], failed_us[met], facts.columns[s.OUT_OF_MEMORY][met]

    def promote(self, scorer: Scorer, following: Following | None = None) -> None:
        """Change the model: all tasks are scored again, then all answers change at once.

        Its prices follow outcomes from there on, or are the model's own.
        """
        scores = self._scored_by(scorer)
        with self._lock:
            self._scorer, self._scores = scorer, scores
            self._following = following
            self._watched = MachinePeaks(scorer, at_once=1.0, moves=False) if following is None else None
            self._prices = Prices.of(scorer) if following is None else following.prices

    def _scored_by(self, scorer: Scorer) -> Scores:
        """Return the scores of all tasks."""
        scores, slots = scorer.nothing(0).room(len(self._tasks)), self._slots.all()
        for low in range(0, len(slots), SCORED_AT_ONCE):
            slot = slots[low : low + SCORED_AT_ONCE]
            scores.put(slot, scorer.nothing(len(slot)))
            slot = slot[self._tasks[s.END_US][slot] >= 0]
            if len(slot):
                last = last_windows(self._slots.key[slot], self._tasks[slot])
                scores.put(slot, scorer.score(self._x[slot], last))
        return scores

    def look(self, key: Ids, *, with_x: bool = False, parts: tuple[str, ...] = TASK_PARTS) -> Known:
        """Return the state of named tasks, key (n, 2), all at one moment; ``parts`` of their scores.

        Unknown tasks have -1 as ``end_us`` and every other fact, and a limit of NaN.
        """
        with self._lock:
            slot = self._slots.find(key)
            there = np.flatnonzero(slot >= 0)
            slot[there[self._tasks["heard_us"][slot[there]] == UNSEEN_US]] = -1
            return self._copied(slot, key, with_x, parts)

    def visit(
        self, make: Callable[[Known, slice], _Made], key: Ids | None = None, *, machines: list[int] | None = None,
        collections: list[int] | None = None, with_x: bool = False, parts: tuple[str, ...] = TASK_PARTS,
    ) -> list[_Made]:  # fmt: skip
        """Apply a function to pieces of the named tasks, in that order, or of all tasks in any order; in threads.

        Each piece is of one moment, and all are of one model: a promotion meanwhile starts the visit again.

        Parameters
        ----------
        make : callable
            Called with the state of a piece and its place among the tasks.
        key : int64, shape (n, 2), or None
            Collection and instance index.
        machines, collections : list of int or None
            Restrict the tasks to these machines or collections.
        with_x : bool
            Copy features, too.
        parts : tuple of str
            Fields of ``Scores`` that are copied; the others have a length of 0 in every axis but the first.
        """
        with self._lock:
            slots = self._slots.all()
            if machines is not None or collections is not None:
                slots = self._chosen(slots, machines, collections)
        scorers: set[Scorer] = set()

        def made(piece: slice) -> _Made:
            if key is not None:
                known = self.look(key[piece], with_x=with_x, parts=parts)
            else:
                with self._lock:
                    slot = self._chosen(slots[piece], machines, collections)  # some may have been removed
                    known = self._copied(slot, copy_rows(self._slots.key, slot), with_x, parts)
            scorers.add(known.scorer)
            return make(known, piece)

        while True:
            pieces = in_pieces(made, len(slots if key is None else key), self._threads)
            if len(scorers) == 1:
                return pieces
            scorers.clear()

    def _copied(self, slot: Ids, key: Ids, with_x: bool, parts: tuple[str, ...]) -> Known:
        """Return the state of slots, -1 for unknown tasks; the lock is held."""
        assert self._scorer is not None
        assert self._scores is not None
        assert self._prices is not None
        there, kept, n = slot >= 0, self._scores, len(slot)
        # values of an unknown task mean nothing; an empty cell has none
        x = self._x[slot] if with_x and (len(self._x) or not n) else None
        if there.all():
            task = copy_rows(self._tasks, slot)
            copied: dict[str, Any] = {
                name: copy_rows(values, slot) if name in parts else np.zeros((n, *[0] * (values.ndim - 1)))
                for name, values in vars(kept).items()
                if values is not None
            }
            scores = Scores(**copied)
        else:
            task, scores = np.full(n, UNKNOWN_TASK), self._scorer.nothing(n)
            task[there] = self._tasks[slot[there]]
            scores.put(np.flatnonzero(there), kept.take(slot[there]))
        return Known(
            self._scorer, self._prices, key, there, task, scores, x, self._has_opted_out(key[:, 0]),
            self.clock.shown_us, self.clock.present_us, len(self._slots),
        )  # fmt: skip

    def _has_opted_out(self, collection: Ids) -> NDArray[np.bool_]:
        """Return which collections want no estimation, shape (n,); there may be far more of those than queried."""
        if len(self._opted_out) == 0:
            return np.zeros(len(collection), np.bool_)
        at = np.searchsorted(self._opted_out, collection)
        out: NDArray[np.bool_] = self._opted_out.take(at, mode="clip") == collection
        return out

    def machines(self) -> tuple[Ids, int]:
        """Return the machines of all tasks (``machine_of``), sorted, (m,), and the number of tasks that are on none."""
        with self._lock:
            machine = machine_of(self._tasks, self._seen(self._slots.all()))
        placed = machine[machine >= 0]
        return np.unique(placed), len(machine) - len(placed)

    def names(self, machines: list[int] | None = None, collections: list[int] | None = None) -> Ids:
        """Return collection and index of all tasks or of those on machines or in collections, sorted; shape (n, 2)."""
        with self._lock:
            key = self._slots.key[self._chosen(self._slots.all(), machines, collections)]
        return key[np.lexsort((key[:, 1], key[:, 0]))]

    def _chosen(self, slot: Ids, machines: list[int] | None, collections: list[int] | None) -> Ids:
        slot = self._seen(slot)
        if machines is not None:
            slot = slot[np.isin(self._tasks["machine"][slot], np.array(machines, np.int64))]
        if collections is not None:
            slot = slot[np.isin(self._slots.key[slot, 0], np.array(collections, np.int64))]
        return slot

    @property
    def bytes_per_task(self) -> int:
        """Memory of a task without its name (bytes)."""
        parts = [part.bytes_per_task for part in (self._scores, self._following or self._watched) if part is not None]
        return self._state.bytes_per_task + TASK.itemsize + self._x.itemsize * self._x.shape[1] + sum(parts)

    def memory(self, copied: Callable[[NDArray[Any]], NDArray[Any]] = copy_of) -> dict[str, NDArray[Any]]:
        """Return copies of the arrays to save, by name; the model is not part of them."""
        n = len(self._slots.key)
        parts = {
            **{f"slots.{name}": array for name, array in self._slots.memory().items()},
            **{f"state.{name}": array for name, array in self._state.memory().items()},
            **{f"ended.{name}": array for name, array in self._ended.memory().items()},
            "tasks": self._tasks[:n], "x": self._x[:n], "opted_out": self._opted_out,
            "clock_us": np.array([self.clock.latest_us]), "size": self.size.memory,
        }  # fmt: skip
        if self._following is not None:
            parts |= {f"following.{name}": array for name, array in self._following.memory().items()}
        return {name: copied(array) for name, array in parts.items()}

    def recall(self, memory: Mapping[str, NDArray[Any]]) -> None:
        """Restore saved arrays, which are kept, not copied.

        Raises
        ------
        StoreError
            Other code made them, or they are incomplete.
        """
        try:
            if memory["tasks"].dtype != TASK or memory["x"].shape[1:] != self._x.shape[1:]:
                raise StoreError(
                    "the state was saved by another release or for a model of other features; start afresh with "
                    "another --state folder"
                )
            self._state.recall(part_of(memory, "state."))
            self._slots.recall(part_of(memory, "slots."))
            self._tasks, self._x = memory["tasks"], memory["x"]
            self._ended.recall(part_of(memory, "ended."))
            self._opted_out = memory["opted_out"].copy()
            self.clock.move(int(memory["clock_us"][0]))
            self.size.recall(memory["size"])
            self._recall_prices(part_of(memory, "following."))
        except KeyError as error:
            raise StoreError(f"the state lacks {error}; start afresh with another --state folder") from error
        except ConfigError as error:
            raise StoreError(f"{error} with another --state folder") from error

    def _recall_prices(self, memory: Mapping[str, NDArray[Any]]) -> None:
        """Resume the prices where they belong to the followed model and this release."""
        if self._following is None or named_in(memory) != self._following.of:
            return
        try:
            self._following.recall(memory)
        except ConfigError as error:
            log.warning("prices start again at the model's own: %s", error)

    def _give(self, key: Ids) -> Ids:
        """Return the slots of tasks; a new one is hidden from readers until something is stored in it."""
        slot = self._slots.find(key)
        unknown = slot < 0
        if unknown.any():
            with self._lock:
                slot[unknown] = self._slots.give(key[unknown])
                self._reserve()
                self._tasks[slot[unknown]] = UNKNOWN_TASK
                if self._scorer is not None and self._scores is not None:
                    self._scores.put(slot[unknown], self._scorer.nothing(int(unknown.sum())))
        return slot

    def _seen(self, slot: Ids) -> Ids:
        seen: Ids = slot[self._tasks["heard_us"][run_of(slot)] != UNSEEN_US]
        return seen

    def _reserve(self) -> None:
        need = len(self._slots.key)
        if need > len(self._tasks):
            self._tasks, self._x = room_for(self._tasks, need), room_for(self._x, need)
        if self._scores is not None:
            self._scores = self._scores.room(need)

    def expired(self) -> Ids:
        """Return the names of tasks without news for long, shape (n, 2); they stay until ``remove``.

        No task is forgotten while no windows arrive, however wrong this machine's time, nor just after, while others
        have not sent again yet. A window is news of its end at least: it may have come, or been read from the log,
        while this machine's time was behind.
        """
        present_us, latest_us = self.clock.present_us, self.clock.latest_us
        if present_us < 0 or self.clock.resumes:
            return np.zeros((0, 2), np.int64)
        if latest_us >= 0:
            present_us = min(present_us, latest_us)
        self._ended.forget(present_us - max(KEPT_US, int(self._settings.lateness_s * _US)))
        slot = self._seen(self._slots.all())
        heard_us: Ids = np.maximum(self._tasks["heard_us"][slot], self._tasks[s.END_US][slot])
        return self._slots.key[slot[(heard_us >= 0) & (heard_us + int(self._settings.forget_s * _US) < present_us)]]

    def remove(self, gone: Ids) -> None:
        """Remove tasks by their slots."""
        if len(gone) == 0:
            return
        with self._lock:
            self._state.forget(gone)
            self._slots.free(gone)
            if self._following is not None:
                self._following.forget(gone)
            elif self._watched is not None:
                self._watched.forget(gone)
            self._tasks[gone] = UNKNOWN_TASK  # a reader that already has the slots skips these
            if self._scorer is not None and self._scores is not None:
                self._scores.put(gone, self._scorer.nothing(len(gone)))

    def spans(self) -> tuple[Ids, Ids]:
        """Return start and end of the last windows of all tasks that have one; for the writer thread."""
        slot = run_of(self._slots.all())
        start_us, end_us = self._tasks[s.START_US][slot], self._tasks[s.END_US][slot]
        return start_us[end_us >= 0], end_us[end_us >= 0]

    def silent_since(self, before_us: int) -> int:
        """Return how many tasks have sent windows, and none since a time; from any thread."""
        with self._lock:
            end_us = self._tasks[s.END_US][run_of(self._slots.all())]  # rows beyond the tasks are zero
            return int(np.count_nonzero((end_us >= 0) & (end_us < before_us)))

    def ends_of(self, key: Ids) -> Ids:
        """Return the end of each task's last window, -1 without one; for the writer thread. key (n, 2), result (n,)."""
        slot = self._slots.find(key)
        return np.where(slot < 0, -1, self._tasks[s.END_US][slot]) if len(self._tasks) else slot

    def find(self, key: Ids) -> Ids:
        """Return the slots of the known ones of named tasks; for the writer thread."""
        slot = self._slots.find(key)
        return slot[slot >= 0]

    def tolerate(self, lateness_s: float) -> None:
        """Change how late windows may arrive; no state is lost."""
        if lateness_s != self._lateness_s:
            memory, self._lateness_s = self._state.memory(), lateness_s
            self._state = self._tolerant()
            self._state.recall(memory)

    def _tolerant(self) -> TolerantState:
        """Return a state of features without tasks."""
        return TolerantState(self._settings.cell, self._lateness_s, self._threads)
