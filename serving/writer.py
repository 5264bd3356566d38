"""The one thread that changes what the service remembers: each write in turn, on the disk before it is acknowledged."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from reclaim.data.errors import ModelError, ReclaimError, StoreError
from reclaim.data.windows import Windows, concatenate
from reclaim.features.lateness import LATE, REPEATED
from reclaim.features.lateness import NEW as TAKEN
from reclaim.serving import records, saver
from reclaim.serving.cell_schemas import WriteAnswer
from reclaim.serving.errors import NO_ROOM, TOO_LARGE, UNAVAILABLE, RequestError
from reclaim.serving.outcomes import OUTCOMES, dated, why
from reclaim.serving.recall import recall
from reclaim.serving.rows import FactRows, Refusals, UsageRows
from reclaim.serving.saver import Saver
from reclaim.serving.tracker import Tracker
from reclaim.serving.turns import Command, Facts, Turns, Write

if TYPE_CHECKING:
    from reclaim.serving.engine import Engine
    from reclaim.serving.metrics import Metrics
    from reclaim.serving.settings import ServingSettings
    from reclaim.serving.store import Store
    from reclaim.serving.watch import Watch

_LOG = logging.getLogger(__name__)

_PART_ROWS, _PART_ROWS_IN_COMPANY = 32_768, 512
"""A larger write is taken in parts of this, small ones in between; while such come, in finer parts of a few ms,
of which a part of any size takes some: finer ones make the large write longer still."""
_LET_GO_S: Final = 5.0
"""How often tasks are looked for of which nothing was heard for long, in seconds."""
_RETRY_S: Final = 1
"""When a caller who came too early may come again, in seconds."""


class Writer:
    """Takes writes from any thread, one after the other, small ones together and before the rest of large ones.

    Parameters
    ----------
    tracker : Tracker
    store : Store or None
        None: nothing outlives the process.
    metrics : Metrics
    watch : Watch
        Told of every answer given, and of windows that answers are held against; closed with the writer.
    settings : ServingSettings
    on_fault : callable
        Called when the thread ends by a fault, after which nothing is written any more.
    """

    def __init__(
        self, tracker: Tracker, store: Store | None, metrics: Metrics, watch: Watch, settings: ServingSettings,
        on_fault: Callable[[], object] = lambda: None,
    ) -> None:  # fmt: skip
        self._tracker, self._store, self._metrics, self._watch = tracker, store, metrics, watch
        self._settings, self._on_fault = settings, on_fault
        self._turns = Turns(settings.max_waiting)
        self._engine: Engine | None = None
        self._syncer = ThreadPoolExecutor(1, "sync")
        self.saver = None if store is None else Saver(store, tracker, settings, self._wake)
        self._let_go_at = 0.0
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)
        self.state = "recovering"
        """``recovering``, ``ok``, or why there is nothing to answer from."""
        self.recovered_rows = 0

    @property
    def waiting(self) -> int:
        """Writes that wait for their turn."""
        return self._turns.waiting

    @property
    def store_problem(self) -> str | None:
        """Why nothing can be written, or None."""
        return None if self._store is None else self._store.broken

    def start(self, engine: Engine) -> None:
        """Read back what was remembered, then answer with a model; in the writer's thread."""
        self._engine = engine
        self._thread.start()

    def close(self) -> None:
        """Finish the writes that wait, and let the store and the watch go."""
        self._turns.close()
        if self._thread.is_alive():
            self._thread.join()
        self._watch.close()
        if self.saver is not None:
            self.saver.close()
        self._syncer.shutdown()
        if self._store is not None:
            self._store.close()

    def write(self, told: UsageRows | FactRows) -> Future[WriteAnswer]:
        """Hand in a write.

        Raises
        ------
        RequestError
            There is nothing to write to yet, the disk takes nothing, or too many writes wait.
        """
        self.check()
        return self._turns.add(told)

    def check(self) -> None:
        """Raise RequestError where nothing can be written now."""
        self.check_readable()
        problem = self.store_problem
        if problem is not None:
            raise self._not_stored(problem)

    def check_readable(self) -> None:
        """Raise RequestError where there is nothing to answer from yet."""
        if self.state != "ok":
            raise RequestError(
                UNAVAILABLE, "not_ready", f"the cell's state is not there: {self.state}", retry_after_s=_RETRY_S
            )  # fmt: skip

    def promote(self, engine: Engine) -> None:
        """Answer with another model; returns when everybody is answered by it, if anybody is answered at all."""
        self._between_writes(lambda: self._take_over(engine))

    def shadow(self, engine: Engine | None) -> None:
        """Score tasks with a second model as well, unseen; None: with none any more."""
        self._between_writes(lambda: self._watch.shadow(engine))

    def _wake(self) -> None:
        self._turns.command(lambda: None)

    def _between_writes(self, what: Callable[[], object]) -> None:
        if self._thread.is_alive():
            self._turns.command(what).result()

    def _run(self) -> None:
        try:
            self._recover()
            self._work()
        except ReclaimError as error:
            _LOG.error("the cell's state cannot be read: %s", error)
            self.state = str(error)
        else:
            self.state = "the service is stopping"
        finally:
            fault = self.state in ("ok", "recovering")
            if fault:
                self.state = "the thread that writes has ended by a fault of the service; its log has the details"
            self._turns.turn_away(self.state)
            if fault:
                self._on_fault()

    def _work(self) -> None:
        while (turn := self._turns.next(saver.MEND_S)) is not None:
            if turn.command is not None:
                _attempt(turn.command)
            for group in turn.small:
                if isinstance(group, Facts):
                    _resolve(group.done, partial(self._take_facts, group.told))
                else:
                    self._take_group(group)
            if turn.large is not None:
                self._take_part(turn.large)
            self._let_go()
            if self.saver is not None:
                self.saver.look()
            self._watch.check()

    def _let_go(self) -> None:
        """Let tasks go of which nothing was heard for long; looked at every few seconds."""
        if time.monotonic() < self._let_go_at or self.store_problem is not None:
            return
        self._let_go_at = time.monotonic() + _LET_GO_S
        key = self._tracker.expired()
        if len(key) == 0:
            return
        try:
            if self._store is not None:
                self._store.append(records.GONE, records.write_names(key))
        except StoreError as error:
            _LOG.error("nobody is let go: %s", error)
            return
        self._leave(key)
        _LOG.info("%d tasks were let go, of which nothing was heard for long", len(key))

    def _leave(self, key: NDArray[np.int64]) -> None:
        slot = self._tracker.find(key)
        self._tracker.leave(slot)
        self._watch.forget(slot)

    def _take_group(self, group: list[Write]) -> None:
        windows = concatenate([write.told.windows for write in group])
        in_alloc = np.concatenate([write.told.in_alloc for write in group])
        try:
            outcome, synced = self._take(windows, in_alloc)
            synced.result()
        except (StoreError, ReclaimError) as error:
            for write in group:
                write.done.set_exception(self._not_stored(str(error)))
            return
        edges = np.cumsum([0, *(len(write.told.windows) for write in group)])
        for write, low, high in zip(group, edges, edges[1:], strict=False):
            write.outcome = outcome[low:high]
            write.done.set_result(self._answer(write))

    def _take_part(self, write: Write) -> None:
        """Take the next part of a large write; it is answered after the last."""
        rows = _PART_ROWS_IN_COMPANY if self._turns.in_company else _PART_ROWS
        high = min(write.at + rows, len(write.told.windows))
        part = slice(write.at, high)
        last = high == len(write.told.windows)
        try:
            if write.at == 0:
                _in_time_order(write)
            write.outcome[part], synced = self._take(write.told.windows.take(part), write.told.in_alloc[part])
            if last:
                synced.result()
        except (StoreError, ReclaimError) as error:
            write.done.set_exception(self._not_stored(str(error)))
            last = True
        else:
            write.at = high
            if last:
                write.done.set_result(self._answer(write))
        if last:
            self._turns.finished(write)

    def _take(self, windows: Windows, in_alloc: NDArray[np.int8]) -> tuple[NDArray[np.uint8], Future[None]]:
        """Take windows; return what became of each, and what is done when they are on the disk."""
        problem = self.store_problem
        if problem is not None:
            raise StoreError(problem)
        with self.timed("admit"):
            admitted = self._tracker.admit(windows, in_alloc)
        if len(admitted.windows) == 0:
            return admitted.outcome, self._synced()
        with self.timed("log"):
            if self._store is not None:
                self._store.append(records.WINDOWS, records.write_windows(admitted.windows))
        synced = self._synced()  # while it is folded
        self._fold(admitted.windows)
        return admitted.outcome, synced

    def _synced(self) -> Future[None]:
        if self._store is None:
            nothing: Future[None] = Future()
            nothing.set_result(None)
            return nothing
        return self._syncer.submit(self._store.sync)

    def _fold(self, windows: Windows) -> None:
        assert self._engine is not None
        with self.timed("fold"):
            taken = self._tracker.take(windows)
        with self.timed("score"):
            scores = self._engine.score(taken.x, taken.last)
        with self.timed("publish"):
            self._tracker.publish(taken, scores)
        self._watch.answered(taken, scores, self._tracker.clock_us)

    def _take_facts(self, facts: FactRows) -> WriteAnswer:
        most, off = self._settings.max_tracked, sum(not wish for wish in facts.estimation.values())
        if self._tracker.n_opted_out + off > most:
            raise RequestError(
                TOO_LARGE, "too_many_collections",
                f"the service remembers {most} collections without estimation at most (RECLAIM_MAX_TRACKED)",
                field="collections",
            )  # fmt: skip
        outcome = self._tracker.judge(facts)
        kept = dated(facts.keep(outcome == TAKEN), self._tracker.clock.present_us)
        if self._store is not None:
            try:
                self._store.append(records.FACTS, records.write_facts(kept))
                self._store.sync()
            except StoreError as error:
                raise self._not_stored(str(error)) from error
        self._watch.failed(*self._tracker.failed(kept))
        self._watch.forget(self._tracker.tell(kept))
        refusals = facts.refusals
        self._refuse(outcome, facts.row, refusals)
        return self._summed(facts.rows, facts.rows - sum(refusals.counts.values()), 0, 0, refusals)

    def _answer(self, write: Write) -> WriteAnswer:
        refusals = write.told.refusals
        unreadable = sum(refusals.counts.values())
        counts = np.bincount(write.outcome, minlength=len(OUTCOMES)).tolist()
        self._refuse(write.outcome, write.told.row, refusals)
        for name, n in zip(OUTCOMES, counts, strict=True):
            self._metrics.windows(name, n)
        self._metrics.windows("refused", unreadable)
        taken, late, repeated = counts[: LATE + 2]
        return self._summed(write.told.rows, taken + late, late, repeated, refusals)

    def _refuse(self, outcome: NDArray[np.uint8], row: NDArray[np.int64], refusals: Refusals) -> None:
        """Describe the rows that were refused, by what became of each."""
        for code in np.unique(outcome[outcome > REPEATED]).tolist():
            refusals.add(OUTCOMES[code], row[outcome == code], why(code, self._settings, self._tracker.clock))

    def _summed(self, rows: int, taken: int, late: int, repeated: int, refusals: Refusals) -> WriteAnswer:
        clock_us = self._tracker.clock_us
        return WriteAnswer(
            rows=rows, taken=taken, late=late, repeated=repeated, refused=refusals.counts,
            errors=refusals.errors, clock_us=None if clock_us < 0 else clock_us,
            durable=self._store is not None, reservations=None,
        )  # fmt: skip

    def _take_over(self, engine: Engine) -> None:
        self._tracker.promote(engine)
        self._engine = engine
        self._watch.serve(engine)

    def _recover(self) -> None:
        assert self._engine is not None
        if self._store is not None:
            self.recovered_rows = recall(self._store, self._tracker, self._settings)
        self._take_over(self._engine)
        self.state = "ok"
        _LOG.info("%d tasks remembered, %d windows read from the log", len(self._tracker), self.recovered_rows)

    def _not_stored(self, problem: str) -> RequestError:
        full = self._store is not None and self._store.full
        return RequestError(
            NO_ROOM if full else UNAVAILABLE, "not_stored",
            f"nothing of it is acknowledged, as it cannot be kept: {problem}; send it again",
            retry_after_s=int(saver.MEND_S),
        )  # fmt: skip

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Take in how long a part of a write took, one of ``metrics.PHASES``."""
        began = time.perf_counter()
        yield
        self._metrics.phase(phase, time.perf_counter() - began)


def _attempt(command: Command) -> None:
    """Do what another asks for; should it fail, he is told, and writes go on."""
    try:
        command.what()
        command.done.set_result(None)
    except Exception as error:  # a model may fail in any way, on tasks of which its check had none
        _LOG.exception("a model was not taken")
        command.done.set_exception(ModelError(f"it fails on the tasks of this cell: {error!r}"))


def _resolve(done: Future[Any], what: Callable[[], object]) -> None:
    try:
        done.set_result(what())
    except (ReclaimError, RequestError) as error:
        done.set_exception(error)


def _in_time_order(write: Write) -> None:
    """Let parts follow each other in time, as the features want them."""
    end_us = write.told.windows.end_us
    if (end_us[:-1] <= end_us[1:]).all():
        return
    order = np.argsort(end_us, kind="stable")
    told = write.told
    write.told = UsageRows(
        told.windows.take(order), told.in_alloc[order], told.row[order], told.rows, told.refusals
    )  # fmt: skip
