"""The thread that changes task state: takes writes in turn and logs each on disk before it is acknowledged."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from reclaim.data.core.parallel import THREADS
from reclaim.data.errors import ModelError, ReclaimError, StoreError
from reclaim.data.windows import Windows, concatenate, far_above_limit
from reclaim.features.fold.live_kernel import LATE, REPEATED
from reclaim.features.fold.live_kernel import NEW as TAKEN
from reclaim.serving.cell.following import Following
from reclaim.serving.cell.outcomes import ENDED, OUTCOMES, dated, why
from reclaim.serving.cell.tracker import Tracker
from reclaim.serving.wire.cell_schemas import WriteAnswer
from reclaim.serving.wire.errors import DISK_FULL, RETRY_S, TOO_LARGE, UNAVAILABLE, RequestError
from reclaim.serving.wire.rows import FactRows, Refusals, UsageRows
from reclaim.serving.writing import log_records, snapshotter
from reclaim.serving.writing.queue import Command, FactWrite, UsageWrite, WriteQueue
from reclaim.serving.writing.recorder import Recorder
from reclaim.serving.writing.replay_log import recorded, replay_log
from reclaim.serving.writing.snapshotter import Snapshotter

if TYPE_CHECKING:
    from reclaim.serving.models.scorer import Scorer
    from reclaim.serving.monitoring.metrics import Metrics
    from reclaim.serving.monitoring.watch import Watch
    from reclaim.serving.settings import ServingSettings
    from reclaim.serving.storage.store import Store

log = logging.getLogger(__name__)

_CHUNK_ROWS, _SMALL_CHUNK_ROWS = 32_768, 512
"""Rows of a bulk write taken between small writes; the smaller number, a few ms, while small writes arrive. Each chunk
has a fixed cost, so that smaller ones would make the bulk write longer still."""
_EVICT_EVERY_S: Final = 5.0
"""Expired tasks are searched for this often (s)."""


class Writer:
    """Takes writes from any thread one after another; small ones are batched and go before the rest of bulk ones.

    Parameters
    ----------
    tracker : Tracker
    store : Store or None
        None: the state is lost with the process.
    metrics : Metrics
    watch : Watch
        Receives every answer and the windows to compare it with; closed with the writer.
    settings : ServingSettings
    on_fault : callable
        Called when the thread ends by a fault; no write is taken afterwards.
    on_taken : callable
        Called with the scorer after windows were taken, and after a change of the model.
    """

    def __init__(
        self, tracker: Tracker, store: Store | None, metrics: Metrics, watch: Watch, settings: ServingSettings,
        on_fault: Callable[[], object] = lambda: None, on_taken: Callable[[Scorer], object] = lambda _: None,
    ) -> None:  # fmt: skip
        self._tracker, self._store, self._metrics, self._watch = tracker, store, metrics, watch
        self._settings, self._on_fault, self._on_taken = settings, on_fault, on_taken
        self._queue = WriteQueue(settings.max_waiting)
        self._scorer: Scorer | None = None
        self._syncer = ThreadPoolExecutor(1, "sync")
        self.snapshotter = (
            None if store is None else Snapshotter(store, tracker, settings, self._wake, self._write_record)
        )
        self._recorder: Recorder | None = None  # until the log is read
        self._evict_at = 0.0
        self._recorded: dict[str, Any] = {}
        """Settings that the log has last."""
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)
        self.state = "recovering"
        """``recovering``, ``ok``, or why there is no state to answer from."""
        self.recovered_rows = 0

    @property
    def waiting(self) -> int:
        """Number of writes that wait."""
        return self._queue.waiting

    @property
    def store_problem(self) -> str | None:
        """Reason for which no write can be taken, or None."""
        return None if self._store is None else self._store.broken

    def start(self, scorer: Scorer) -> None:
        """Start the thread: restore the state, then answer with a model."""
        self._scorer = scorer
        self._thread.start()

    def close(self) -> None:
        """Finish the writes that wait, and close the store and the watch."""
        self._queue.close()
        if self._thread.is_alive():
            self._thread.join()
        self._write_record()
        self._watch.close()
        if self.snapshotter is not None:
            self.snapshotter.close()
        self._syncer.shutdown()
        if self._store is not None:
            try:
                self._store.close()
            except StoreError as error:  # nothing that was acknowledged
                log.error("the last records of the log may be lost, of which no write was acknowledged: %s", error)

    def write(self, rows: UsageRows | FactRows) -> Future[WriteAnswer]:
        """Queue a write.

        Raises
        ------
        RequestError
            The state is not restored yet, the disk refuses writes, or too many writes wait.
        """
        self.check()
        return self._queue.add(rows)

    def check(self) -> None:
        """Raise RequestError where no write can be taken now."""
        self.check_readable()
        problem = self.store_problem
        if problem is not None:
            raise self._not_stored(problem)

    def check_readable(self) -> None:
        """Raise RequestError where the state is not restored yet."""
        if self.state != "ok":
            raise RequestError(
                UNAVAILABLE, "not_ready", f"the cell's state is not there: {self.state}", retry_after_s=RETRY_S
            )  # fmt: skip

    def promote(self, scorer: Scorer) -> None:
        """Answer with another model; returns once all answers are of that model."""
        self._between_writes(lambda: self._promote(scorer))

    def shadow(self, scorer: Scorer | None) -> None:
        """Also score tasks with a second model, which gives no answers; None ends that."""
        self._between_writes(lambda: self._watch.shadow(scorer, self._shadow_following(scorer)))

    def _wake(self) -> None:
        self._queue.command(lambda: None)

    def _between_writes(self, function: Callable[[], object]) -> None:
        if self._thread.is_alive():
            with suppress(RequestError):  # the thread has ended meanwhile, and without it there is nothing to change
                self._queue.command(function).result()

    def _run(self) -> None:
        try:
            self._recover()
            self._work()
        except ReclaimError as error:
            log.error("the cell's state cannot be read: %s", error)
            self.state = str(error)
        else:
            self.state = "the service is stopping"
        finally:
            fault = self.state in ("ok", "recovering")
            if fault:
                self.state = "the thread that writes has ended by a fault of the service; its log has the details"
            self._queue.reject_all(self.state)
            if fault:
                self._on_fault()

    def _work(self) -> None:
        while (work := self._queue.next(snapshotter.MEND_S)) is not None:
            if work.command is not None:
                _run_command(work.command)
            for group in work.small:
                if isinstance(group, FactWrite):
                    self._take_fact_write(group)
                else:
                    self._take_batch(group)
            if work.bulk is not None:
                self._take_chunk(work.bulk)
            self._evict_expired()
            if self.snapshotter is not None:
                self.snapshotter.check()
            self._watch.check()

    def _evict_expired(self) -> None:
        """Remove tasks without news for long; checked every few seconds."""
        if time.monotonic() < self._evict_at or self.store_problem is not None:
            return
        self._evict_at = time.monotonic() + _EVICT_EVERY_S
        key = self._tracker.expired()
        if len(key) == 0:
            return
        try:
            if self._store is not None:
                self._store.append(log_records.GONE, log_records.write_names(key))
        except StoreError as error:
            log.error("expired tasks are kept: %s", error)
            return
        slot = self._tracker.find(key)
        self._tracker.remove(slot)
        self._watch.forget(slot)
        log.info("%d tasks without news for long were removed", len(key))

    def _take_batch(self, batch: list[UsageWrite]) -> None:
        windows = concatenate([write.usage.windows for write in batch])
        in_alloc = np.concatenate([write.usage.in_alloc for write in batch])
        try:
            outcome, synced = self._take(windows, in_alloc)
            synced.result()
        except ReclaimError as error:
            for write in batch:
                write.done.set_exception(self._not_stored(str(error)))
            return
        edges = np.cumsum([0, *(len(write.usage.windows) for write in batch)])
        for write, low, high in zip(batch, edges, edges[1:], strict=False):
            write.outcome = outcome[low:high]
            write.done.set_result(self._answer(write))

    def _take_chunk(self, write: UsageWrite) -> None:
        """Take the next chunk of a bulk write, which is answered after the last one."""
        rows = _SMALL_CHUNK_ROWS if self._queue.small_writes_recent else _CHUNK_ROWS
        high = min(write.at + rows, len(write.usage.windows))
        chunk = slice(write.at, high)
        last = high == len(write.usage.windows)
        try:
            if write.at == 0:
                _in_time_order(write)
            write.outcome[chunk], synced = self._take(write.usage.windows.take(chunk), write.usage.in_alloc[chunk])
            if last:
                synced.result()
        except ReclaimError as error:
            write.done.set_exception(self._not_stored(str(error)))
            last = True
        else:
            write.at = high
            if last:
                write.done.set_result(self._answer(write))
        if last:
            self._queue.finished(write)

    def _take(self, windows: Windows, in_alloc: NDArray[np.int8]) -> tuple[NDArray[np.uint8], Future[None]]:
        """Take windows; return the outcome of each, shape (n,), and a future that is done once they are on the disk."""
        problem = self.store_problem
        if problem is not None:
            raise StoreError(problem)
        with self.timed("admit"):
            admitted = self._tracker.admit(windows, in_alloc)
        if len(admitted.windows) == 0:
            return admitted.outcome, self._synced()
        self._metrics.above_limit(np.count_nonzero(far_above_limit(admitted.windows), axis=0).tolist())
        self._make_room(admitted.windows)
        with self.timed("log"):
            if self._store is not None:
                self._record_settings(self._store)
                clock = self._tracker.clock
                record = log_records.write_windows(admitted.windows, clock.present_us, clock.latest_us)
                self._store.append(log_records.WINDOWS, record)
        if self._recorder is not None:
            self._recorder.take(admitted.windows)
        synced = self._synced()  # while it is folded
        self._fold(admitted.windows)
        return admitted.outcome, synced

    def _record_settings(self, store: Store) -> None:
        """Record whose prices follow from here on, where the log has others."""
        now = recorded(self._settings, self._tracker.following)
        if now != self._recorded:
            store.append(log_records.SETTINGS, json.dumps(now).encode())
            self._recorded = now

    def _make_room(self, rows: Windows | FactRows) -> None:
        """Let the recorder write what came before, as these rows are next in the log."""
        if self._recorder is not None:
            self._note_record(self._recorder.make_room(rows))

    def _write_record(self) -> None:
        if self._recorder is not None:
            self._note_record(self._recorder.close())

    def _note_record(self, written: bool) -> None:
        """Note in the log that the recorder has written what came before, so that a restart does not write it again."""
        if written and self._store is not None:
            with suppress(StoreError):  # the windows are written again, and an ingest drops repeated rows
                self._store.append(log_records.RECORDED, b"")

    def _synced(self) -> Future[None]:
        if self._store is None:
            done: Future[None] = Future()
            done.set_result(None)
            return done
        return self._syncer.submit(self._store.sync)

    def _fold(self, windows: Windows) -> None:
        assert self._scorer is not None
        with self.timed("fold"):
            taken = self._tracker.take(windows)
        with self.timed("score"):
            self._scorer = self._tracker.sized(self._scorer, taken)
            scores = self._scorer.score(taken.x, taken.last)
        with self.timed("publish"):
            self._tracker.publish(taken, scores)
        self._watch.answered(taken, scores, self._tracker.clock_us, self._tracker.prices.now, self._tracker.size)
        self._on_taken(self._scorer)

    def _take_fact_write(self, write: FactWrite) -> None:
        try:
            write.done.set_result(self._take_facts(write.facts))
        except (ReclaimError, RequestError) as error:
            write.done.set_exception(error)

    def _take_facts(self, facts: FactRows) -> WriteAnswer:
        most, after = self._settings.max_tracked, len(self._tracker.opted_out_after(facts))
        if after > max(most, self._tracker.n_opted_out):
            raise RequestError(
                TOO_LARGE, "too_many_collections",
                f"the service remembers {most} collections without estimation at most (RECLAIM_MAX_TRACKED): send "
                "`estimation: true` for those that are gone",
                field="collections",
            )  # fmt: skip
        outcome = self._tracker.judge(facts)
        present_us = self._tracker.clock.present_us
        kept, reported = dated(facts.keep(outcome == TAKEN), present_us), facts.keep(outcome == ENDED)
        self._make_room(facts)
        if self._store is not None:
            try:
                if self._recorder is not None and len(reported.row):
                    self._store.append(log_records.REPORTED, log_records.write_facts(reported))
                record = log_records.write_facts(kept, present_us, self._tracker.clock.latest_us)
                self._store.append(log_records.FACTS, record)  # last: after a refusal the log has no fact of the state
                self._store.sync()
            except StoreError as error:
                raise self._not_stored(str(error)) from error
        if self._recorder is not None:
            self._recorder.take_facts(facts.keep((outcome == TAKEN) | (outcome == ENDED)))
        self._watch.failed(*self._tracker.failed(kept))
        self._watch.forget(self._tracker.store_facts(kept))
        refusals = facts.refusals
        self._refuse(outcome, facts.row, refusals)
        return self._summed(facts.rows, facts.rows - sum(refusals.counts.values()), 0, 0, refusals)

    def _answer(self, write: UsageWrite) -> WriteAnswer:
        refusals = write.usage.refusals
        unreadable = sum(refusals.counts.values())
        counts = np.bincount(write.outcome, minlength=len(OUTCOMES)).tolist()
        self._refuse(write.outcome, write.usage.row, refusals)
        for name, n in zip(OUTCOMES, counts, strict=True):
            self._metrics.windows(name, n)
        self._metrics.windows("refused", unreadable)
        taken, late, repeated = counts[: LATE + 2]
        return self._summed(write.usage.rows, taken + late, late, repeated, refusals)

    def _refuse(self, outcome: NDArray[np.uint8], row: NDArray[np.int64], refusals: Refusals) -> None:
        """Describe the refused rows by their outcome."""
        for code in np.unique(outcome[outcome > REPEATED]).tolist():
            refusals.add(OUTCOMES[code], row[outcome == code], why(code, self._settings, self._tracker.clock))

    def _summed(self, rows: int, taken: int, late: int, repeated: int, refusals: Refusals) -> WriteAnswer:
        clock_us = self._tracker.clock_us
        return WriteAnswer(
            rows=rows, taken=taken, late=late, repeated=repeated, refused=refusals.counts,
            errors=refusals.errors, clock_us=None if clock_us < 0 else clock_us,
            durable=self._store is not None, reservations=None,
        )  # fmt: skip

    def _promote(self, scorer: Scorer) -> None:
        """Answer with a model that was just loaded; prices that follow begin where it has them."""
        before = self._tracker.following
        number = 1 if before is None else before.number + 1
        settings = self._settings
        self._take_over(scorer, Following(scorer, number, THREADS, settings.at_once) if settings.follow else None)
        if self._store is not None:
            with suppress(StoreError):  # the disk refuses: it is recorded with the next windows
                self._record_settings(self._store)
                self._store.sync()

    def _shadow_following(self, scorer: Scorer | None) -> Following | None:
        """Return the follower that moves the prices of a shadow that prices itself; those of others stay as set."""
        if scorer is None or not scorer.own_price or not self._settings.follow:
            return None
        return Following(scorer, threads=THREADS, at_once=self._settings.at_once)

    def _take_over(self, scorer: Scorer, following: Following | None) -> None:
        if scorer.of_cell_size:
            scorer = scorer.resized(self._tracker.size.mean_limit)
            if following is not None:
                following.resize(scorer)
        self._tracker.promote(scorer, following)
        self._scorer = scorer
        self._watch.serve(scorer)
        self._on_taken(scorer)

    def _recover(self) -> None:
        assert self._scorer is not None
        tracker, settings = self._tracker, self._settings
        recorder = (
            None if settings.record is None else Recorder(settings.record, self._metrics.recorded, settings.record_days)
        )
        if self._store is not None:
            found = replay_log(self._store, tracker, settings, self._scorer, THREADS, recorder)
            self.recovered_rows, self._recorded = found
            log.info("%d tasks restored, %d windows read from the log", len(tracker), self.recovered_rows)
            with suppress(StoreError):  # the disk refuses: they are recorded with the next windows
                self._record_settings(self._store)
                self._store.sync()
        elif settings.follow:
            tracker.follow(Following(self._scorer, threads=THREADS, at_once=settings.at_once))
        tracker.clock.start()
        self._take_over(self._scorer, tracker.following)
        self._recorder = recorder
        self.state = "ok"

    def _not_stored(self, problem: str) -> RequestError:
        full = self._store is not None and self._store.full
        return RequestError(
            DISK_FULL if full else UNAVAILABLE, "not_stored",
            f"nothing of it is acknowledged, as it cannot be kept: {problem}; send it again",
            retry_after_s=int(snapshotter.MEND_S),
        )  # fmt: skip

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Record the duration of a phase of a write, one of ``metrics.PHASES``."""
        began = time.perf_counter()
        yield
        self._metrics.phase(phase, time.perf_counter() - began)


def _run_command(command: Command) -> None:
    """Call the function of a command; an error goes to its caller, and writes go on."""
    try:
        command.function()
        command.done.set_result(None)
    except Exception as error:  # a model may fail in any way on tasks unlike those of the canary
        log.exception("a model was not taken")
        command.done.set_exception(ModelError(f"it fails on the tasks of this cell: {error!r}"))


def _in_time_order(write: UsageWrite) -> None:
    """Sort a bulk write by time, so that its chunks follow each other as the features need them."""
    usage, end_us = write.usage, write.usage.windows.end_us
    if (end_us[:-1] <= end_us[1:]).all():
        return
    order = np.argsort(end_us, kind="stable")
    write.usage = replace(
        usage, windows=usage.windows.take(order), in_alloc=usage.in_alloc[order], row=usage.row[order]
    )
