"""Watches answers come true: live quality and drift of the served model, and of a shadow scored beside it."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from reclaim.data.schema import RESOURCES
from reclaim.serving.drift import Drift
from reclaim.serving.metrics import drift_shown, quality_shown
from reclaim.serving.quality import LiveQuality
from reclaim.training.estimators.margin import MARGIN_NAMES

if TYPE_CHECKING:
    from reclaim.serving.engine import Engine, Scores
    from reclaim.serving.metrics import Shown
    from reclaim.serving.tasks import Taken

_LOG = logging.getLogger(__name__)
Ids = NDArray[np.int64]

_BEHIND: Final = 8
"""Calls of the writer that may wait to be noted: each holds the rows of a part of a write, some 40 MiB."""


class _Watched:
    """One model, and how its answers fare."""

    def __init__(self, engine: Engine, lateness_s: float) -> None:
        self.engine = engine
        self.quality = LiveQuality(engine.levels, engine.horizon_s, grace_s=max(lateness_s, 300.0))
        ranges = engine.model.bundle.forecaster.input_ranges()
        self.drift = None if ranges is None else Drift(ranges)

    def answered(self, taken: Taken, scores: Scores | None, clock_us: int) -> None:
        """Take note of windows and answers; those of a shadow are not made yet."""
        self.quality.observe(taken.slot, taken.windows)
        self.quality.settle(clock_us)
        estimated = np.flatnonzero(~taken.opted_out)
        rows = estimated[self.quality.wanted(taken.touched[estimated])]
        if len(rows):
            last = taken.last.take(rows)
            scores = self.engine.score(taken.x[rows], last) if scores is None else scores.take(rows)
            held = np.stack([self.engine.estimate(m, scores.bare, last).reservation for m in MARGIN_NAMES], axis=1)
            self.quality.expect(
                taken.touched[rows], last.end_us, last.tier, last.limit, scores.quantiles[:, : len(RESOURCES)], held,
                scores.oom,
            )  # fmt: skip
        if self.drift is not None:
            self.drift.observe(taken.x, clock_us)

    def shown(self, role: str) -> Shown:
        drift = {} if self.drift is None else drift_shown(role, self.drift.numbers())
        return {**quality_shown(role, self.quality.numbers()), **drift}


class Watch:
    """Told by the writer of every answer; asked by Prometheus for what became of them.

    All is done in a thread of its own, in the order in which it was told, so that nobody waits for it who only wants
    his windows taken; only when it is far behind does the writer wait.

    Parameters
    ----------
    lateness_s : float
        How late windows may come, in seconds: an answer is judged so much later.
    """

    def __init__(self, lateness_s: float) -> None:
        self._lateness_s = lateness_s
        self._served: _Watched | None = None
        self._shadow: _Watched | None = None
        self._thread = ThreadPoolExecutor(1, "watch")
        self._ahead: deque[Future[None]] = deque()
        self._fault: BaseException | None = None
        self.shadow_problem: str | None = None
        """Why a shadow is not watched any more, or None."""

    def serve(self, engine: Engine) -> None:
        """Watch the answers of another model from now on."""

        def serve() -> None:
            self._served = _Watched(engine, self._lateness_s)

        self._later(serve)

    def shadow(self, engine: Engine | None) -> None:
        """Watch what a second model would have answered; None: no more."""

        def shadow() -> None:
            self._shadow = None if engine is None else _Watched(engine, self._lateness_s)
            self.shadow_problem = None

        self._later(shadow)

    def answered(self, taken: Taken, scores: Scores, clock_us: int) -> None:
        """Take note of windows, and of the answers that they led to."""

        def answered() -> None:
            if self._served is not None:
                self._served.answered(taken, scores, clock_us)
            if self._shadow is not None:
                try:
                    self._shadow.answered(taken, None, clock_us)
                except Exception as error:  # it serves nobody, and may fail in any way
                    _LOG.exception("the shadow fails, and is not watched any more")
                    self._shadow, self.shadow_problem = None, f"it fails on the tasks of this cell: {error!r}"

        self._later(answered)

    def failed(self, slot: Ids, time_us: Ids) -> None:
        """Take note of tasks that failed."""
        self._of_each(lambda watched: watched.quality.failed(slot, time_us))

    def forget(self, slot: Ids) -> None:
        """Take note of tasks that left."""
        if len(slot):
            self._of_each(lambda watched: watched.quality.forget(slot))

    def shown(self) -> Shown:
        """Return the numbers for Prometheus, of all that was told before."""
        try:
            shown = self._thread.submit(self._shown)
        except RuntimeError:  # closed: whoever asks while the service stops is answered, too
            self._thread.shutdown()
            return self._shown()
        return shown.result()

    def check(self) -> None:
        """Raise RuntimeError where something that was told could not be noted: a fault of the service."""
        if self._fault is not None:
            raise RuntimeError("the answers cannot be watched") from self._fault

    def close(self) -> None:
        """End the thread once all is done that it was told."""
        self._thread.shutdown()

    def _of_each(self, what: Callable[[_Watched], object]) -> None:
        def done() -> None:
            for watched in (self._served, self._shadow):
                if watched is not None:
                    what(watched)

        self._later(done)

    def _later(self, what: Callable[[], None]) -> None:
        """Let the thread do it; wait where it is far behind."""
        while self._ahead and (self._ahead[0].done() or len(self._ahead) >= _BEHIND):
            self._fault = self._fault or self._ahead.popleft().exception()
        self._ahead.append(self._thread.submit(what))

    def _shown(self) -> Shown:
        out: dict[str, dict[tuple[str, ...], float]] = {}
        for role, watched in (("served", self._served), ("shadow", self._shadow)):
            if watched is not None:
                for name, values in watched.shown(role).items():
                    assert isinstance(values, Mapping), name  # all of these have labels
                    out.setdefault(name, {}).update(values)
        return out
