"""Compares answers with later usage: live quality and drift of the served model and of its shadow."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from reclaim.data.schema import RESOURCES
from reclaim.features.registry import FEATURE_NAMES
from reclaim.serving.models.scorer import reserved
from reclaim.serving.monitoring.drift import Drift
from reclaim.serving.monitoring.metrics import drift_shown, quality_shown
from reclaim.serving.monitoring.quality import LiveQuality
from reclaim.training.margins.margin import MARGIN_NAMES

if TYPE_CHECKING:
    from reclaim.serving.cell.following import Following
    from reclaim.serving.cell.size import CellSize
    from reclaim.serving.cell.task_record import Taken
    from reclaim.serving.models.scorer import Scorer, Scores
    from reclaim.serving.monitoring.metrics import Shown
    from reclaim.training.margins.price import Price

log = logging.getLogger(__name__)
Ids = NDArray[np.int64]

_MOST_QUEUED: Final = 8
"""Calls of the writer that may wait in the queue; each holds the rows of a part of a write, some 40 MiB."""


class _Watched:
    """A model, the quality of its answers and the drift of its inputs."""

    def __init__(self, scorer: Scorer, lateness_s: float, following: Following | None = None) -> None:
        self.scorer, self.following = scorer, following
        self.quality = LiveQuality(scorer.levels, scorer.horizon_s, grace_s=max(lateness_s, 300.0))
        bundle = scorer.model.bundle
        ranges = bundle.forecaster.input_ranges()
        self.drift = None if ranges is None else Drift(ranges, FEATURE_NAMES)

    def answered(self, taken: Taken, scores: Scores | None, clock_us: int, prices: Mapping[str, Price]) -> None:
        """Record windows and the answers at prices; scores that are None are computed for the answers wanted."""
        self.quality.observe(taken.slot, taken.windows)
        self.quality.settle(clock_us)
        judged = np.flatnonzero(~taken.opted_out & ~taken.last.in_alloc)  # the latter as in a replay
        rows = judged[self.quality.wanted(taken.touched[judged])]
        if len(rows):
            last = taken.last.take(rows)
            scores = self.scorer.score(taken.x[rows], last, of_cell=False) if scores is None else scores.take(rows)
            held = np.stack([reserved(prices[m], scores.steps, last).reservation for m in MARGIN_NAMES], axis=1)
            self.quality.expect(
                taken.touched[rows], last.end_us, last.tier, last.limit, scores.quantiles[:, : len(RESOURCES)], held,
                scores.oom,
            )  # fmt: skip
        if self.drift is not None:
            self.drift.observe(taken.x, clock_us)

    def answers(self, taken: Taken, size: CellSize) -> tuple[Scores | None, Mapping[str, Price]]:
        """Return the scores of a shadow that prices itself, None of another one, and its prices of the moment."""
        if self.scorer.own_price and not np.array_equal(self.scorer.mean_limit, size.mean_limit, equal_nan=True):
            self.scorer = self.scorer.resized(size.mean_limit)
            if self.following is not None:
                self.following.resize(self.scorer)
        if self.following is None:
            return None, self.scorer.prices
        scores = self.scorer.score(taken.x, taken.last)  # its price depends on the answers for all tasks
        self.following.take(taken, scores, size.begun_us)
        return scores, self.following.prices.now

    def forget(self, slot: Ids) -> None:
        self.quality.forget(slot)
        if self.following is not None:
            self.following.forget(slot)

    def shown(self, role: str) -> Shown:
        drift = {} if self.drift is None else drift_shown(role, self.drift.numbers())
        return {**quality_shown(role, self.quality.numbers()), **drift}


class Watch:
    """Receives every answer from the writer, and gives Prometheus the quality of past ones.

    The work is done in a thread of its own, in the order of the calls, so that writes do not wait for it; the
    writer waits only where ``_MOST_QUEUED`` calls are behind.

    Parameters
    ----------
    lateness_s : float
        How late windows may come, in seconds; an answer is judged that much later.
    """

    def __init__(self, lateness_s: float) -> None:
        self._lateness_s = lateness_s
        self._served: _Watched | None = None
        self._shadow: _Watched | None = None
        self._thread = ThreadPoolExecutor(1, "watch")
        self._ahead: deque[Future[None]] = deque()
        self._fault: BaseException | None = None
        self.shadow_problem: str | None = None
        """Reason for which the shadow is no longer watched, or None."""

    def serve(self, scorer: Scorer) -> None:
        """Watch the answers of another model."""

        def serve() -> None:
            self._served = _Watched(scorer, self._lateness_s)

        self._later(serve)

    def shadow(self, scorer: Scorer | None, following: Following | None = None) -> None:
        """Watch the answers that a second model would have given, at its own prices or as they follow; None ends it."""

        def shadow() -> None:
            self._shadow = None if scorer is None else _Watched(scorer, self._lateness_s, following)
            self.shadow_problem = None

        self._later(shadow)

    def answered(
        self, taken: Taken, scores: Scores, clock_us: int, prices: Mapping[str, Price], size: CellSize
    ) -> None:
        """Record windows and the answers made from them at the prices of the moment; a shadow has its own."""
        size = deepcopy(size)  # the next write changes it

        def answered() -> None:
            if self._served is not None:
                self._served.answered(taken, scores, clock_us, prices)
            if self._shadow is not None:
                try:
                    theirs, own = self._shadow.answers(taken, size)
                    self._shadow.answered(taken, theirs, clock_us, own)
                except Exception as error:  # a shadow may fail in any way, and must not stop the service
                    log.exception("the shadow fails and is no longer watched")
                    self._shadow, self.shadow_problem = None, f"it fails on the tasks of this cell: {error!r}"

        self._later(answered)

    def failed(self, slot: Ids, time_us: Ids, out_of_memory: Ids) -> None:
        """Record tasks that failed, as ``LiveQuality.failed``."""
        self._for_each(lambda watched: watched.quality.failed(slot, time_us, out_of_memory))

    def forget(self, slot: Ids) -> None:
        """Record tasks that left."""
        if len(slot):
            self._for_each(lambda watched: watched.forget(slot))

    def shown(self) -> Shown:
        """Return the numbers for Prometheus, of all calls before this one."""
        try:
            shown = self._thread.submit(self._shown)
        except RuntimeError:  # closed: a request while the service stops is answered, too
            self._thread.shutdown()
            return self._shown()
        return shown.result()

    def check(self) -> None:
        """Raise RuntimeError where an earlier call failed: a fault of the service."""
        if self._fault is not None:
            raise RuntimeError("the answers cannot be watched") from self._fault

    def close(self) -> None:
        """End the thread after the calls so far."""
        self._thread.shutdown()

    def _for_each(self, act: Callable[[_Watched], object]) -> None:
        def done() -> None:
            for watched in (self._served, self._shadow):
                if watched is not None:
                    act(watched)

        self._later(done)

    def _later(self, act: Callable[[], None]) -> None:
        """Queue it for the thread; wait where the thread is far behind."""
        while self._ahead and (self._ahead[0].done() or len(self._ahead) >= _MOST_QUEUED):
            fault = self._ahead.popleft().exception()
            self._fault = self._fault or fault
        self._ahead.append(self._thread.submit(act))

    def _shown(self) -> Shown:
        out: dict[str, dict[tuple[str, ...], float]] = {}
        for role, watched in (("served", self._served), ("shadow", self._shadow)):
            if watched is not None:
                for name, values in watched.shown(role).items():
                    assert isinstance(values, Mapping), name  # all of these have labels
                    out.setdefault(name, {}).update(values)
        return out
