"""Watching the answers of two models, each by its own, and never stopping the thread that writes."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from copy import copy
from functools import cache
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import numpy as np
import pytest

from reclaim.data.schema import RESOURCES, TIERS
from reclaim.features.targets import HORIZONS_S, TARGETS, targets
from reclaim.serving.cell.following import Following
from reclaim.serving.cell.size import CellSize
from reclaim.serving.models.scorer import Scorer
from reclaim.serving.monitoring.watch import Watch
from reclaim.serving.settings import ServingSettings
from reclaim.training.bundle import Bundle, load_model
from reclaim.training.margins.margin import MARGIN_NAMES
from reclaim.training.margins.violation import needed, violates
from tests.serving.cell_fixtures import Json, Memory, S, W, fact_rows, usage_rows, windows_of
from tests.serving.patience import PATIENCE_S

HORIZON_US = 3_600 * S
FIRST_US = W
"""End of a task's window 0, at which the answer to the first task of a cell is the first that waits."""


@cache
def builtin() -> Bundle:
    return load_model("builtin")


class Cell(Memory):
    """A cell of few tasks, and the watch that its writer would have."""

    def __init__(self, lateness_s: float = 0.0) -> None:
        super().__init__(ServingSettings(clock="trace", stale_s=1e9, follow=False), builtin())
        self.watch = Watch(lateness_s)
        self.watch.serve(self.scorer)

    def told(self, *windows: Json, clock_us: int = 0, size: CellSize | None = None) -> None:
        """Take windows as a writer would, at a time of the clock."""
        rows = usage_rows(windows_of(*windows))
        taken = self.tracker.take(self.tracker.admit(rows.windows, rows.in_alloc).windows)
        scores = self.scorer.score(taken.x, taken.last)
        self.tracker.publish(taken, scores)
        self.watch.answered(taken, scores, clock_us, self.scorer.prices, size or self.tracker.size)

    def shown(self, name: str) -> Mapping[tuple[str, ...], float]:
        """Return a metric by its labels."""
        return cast("Mapping[tuple[str, ...], float]", self.watch.shown().get(name, {}))

    def total(self, name: str, *labels: str) -> float:
        """Return the sum of a metric over all labels but some."""
        return sum(value for key, value in self.shown(name).items() if set(labels) <= set(key))

    def shadow(self) -> Scorer:
        """Return a second model, which does not price itself."""
        other = copy(self.scorer)
        other.own_price = False
        return other


@pytest.fixture
def cell() -> Iterator[Cell]:
    made = Cell()
    yield made
    made.watch.close()


def followed(scorer: Scorer, calls: list[tuple[str, Any]]) -> Following:
    """Return what notes its calls in the place of prices that follow."""
    return cast(
        "Following",
        SimpleNamespace(
            prices=SimpleNamespace(now=scorer.prices),
            take=lambda _taken, _scores, begun_us: calls.append(("take", begun_us)),
            forget=lambda slot: calls.append(("forget", slot.tolist())),
            resize=lambda resized: calls.append(("resize", resized.mean_limit)),
        ),
    )


def test_calls_after_a_fault_do_not_wait_for_ever_and_the_fault_is_reported() -> None:
    watch = Watch(0.0)

    def fail() -> None:
        raise OSError("no more")

    def call() -> None:
        for _ in range(20):
            watch._later(fail)

    calls = threading.Thread(target=call, daemon=True)
    calls.start()
    calls.join(60)
    assert not calls.is_alive()
    with pytest.raises(RuntimeError, match="cannot be watched"):
        watch.check()
    watch.close()


def test_a_fault_is_reported_after_calls_that_end_well_too() -> None:
    watch = Watch(0.0)

    def fail() -> None:
        raise OSError("no more")

    watch._later(fail)
    for _ in range(20):
        watch._later(lambda: None)
    with pytest.raises(RuntimeError, match="cannot be watched") as fault:
        watch.check()
    assert isinstance(fault.value.__cause__, OSError)
    watch.close()


@pytest.mark.parametrize(("lateness_s", "grace_s"), [(0.0, 300), (300.0, 300), (900.0, 900)])
def test_an_answer_is_judged_once_its_horizon_and_the_lateness_have_passed_by_the_clock_and_five_minutes_at_least(
    lateness_s: float, grace_s: int
) -> None:
    cell = Cell(lateness_s)
    cell.watch.shadow(cell.shadow())
    due_us = FIRST_US + HORIZON_US + grace_s * S
    for at in range(12):
        cell.told({"at": at}, clock_us=FIRST_US + at * W)
    cell.told({"at": 40}, clock_us=due_us - S)  # by the clock, whatever the windows say
    assert cell.total("quality_answers_total") == 0
    cell.told({"at": 41}, clock_us=due_us)
    for role in ("served", "shadow"):
        assert cell.total("quality_answers_total", role, "cpu") == 1
    cell.watch.close()


def test_an_answer_is_judged_under_the_limit_of_its_window_as_in_a_replay_though_a_fact_has_lowered_it_since(
    cell: Cell,
) -> None:
    told: list[Json] = [{"cpu": 0.1, "memory": 0.1}, {"cpu": 0.8, "memory": 0.8}, {"cpu": 0.1, "memory": 0.1}]
    cell.told({"at": 0, **told[0]}, clock_us=FIRST_US)
    (held,) = cell.answers((1, 0), margin="aggressive").estimate.reservation
    assert ((held > 0.05) & (held < 0.8)).all()
    cell.tell(fact_rows({"task": 1, "limit": 0.05, "since_us": W}))
    answered = cell.answers((1, 0), margin="aggressive").estimate.reservation
    assert answered.tolist() == [[0.05, 0.05]]  # from now on, which is no answer of a window
    cell.told({"at": 1, "limit": None, **told[1]}, clock_us=2 * W)
    cell.told({"at": 20, "limit": None, **told[2]}, clock_us=FIRST_US + HORIZON_US + W)
    # in a replay, each window has the limit of its time, up to which it demands CPU
    each = zip((0, 1, 20), (1.0, 0.05, 0.05), told, strict=True)
    windows = windows_of(*({"at": at, "limit": limit, **of} for at, limit, of in each))
    value, oom = np.empty((3, len(TARGETS), len(HORIZONS_S)), np.float32), np.empty((3, len(HORIZONS_S)), np.float32)
    none = np.zeros(0, np.int64)
    targets(windows, none, none, 2**62, value, oom)
    needs = needed(value[0, : len(RESOURCES), HORIZONS_S.index(3_600)], windows.limit[0])
    assert needs.tolist() == pytest.approx([0.05, 0.8])
    for r, resource in enumerate(RESOURCES):
        assert cell.total("quality_limit_total", resource) == 1.0
        assert cell.total("quality_reserved_total", "aggressive", resource) == held[r]
        assert cell.total("quality_violations_total", "aggressive", resource) == violates(needs, held)[r] == r


def test_what_was_reserved_is_shown_under_its_own_margin(cell: Cell) -> None:
    for at in range(16):
        cell.told(*({"task": task, "at": at, "cpu": 0.1 + 0.2 * (at % 3)} for task in range(4)), clock_us=at * W)
    widest, medium, narrowest = (cell.total("quality_reserved_total", margin, "cpu") for margin in MARGIN_NAMES)
    assert widest > medium > narrowest > 0


def test_a_shadow_is_judged_by_its_own_answers_at_its_own_prices(cell: Cell) -> None:
    other = cell.shadow()
    other.prices = {margin: cell.scorer.prices["aggressive"] for margin in MARGIN_NAMES}
    cell.watch.shadow(other)
    for at in range(16):
        cell.told(*({"task": task, "at": at, "cpu": 0.1 + 0.2 * (at % 3)} for task in range(4)), clock_us=at * W)
    served = cell.total("quality_reserved_total", "served", "aggressive", "cpu")
    assert cell.total("quality_reserved_total", "served", "baseline", "cpu") > served > 0
    for margin in MARGIN_NAMES:
        assert cell.total("quality_reserved_total", "shadow", margin, "cpu") == served


def test_failures_and_tasks_that_leave_count_for_the_served_model_and_its_shadow(cell: Cell) -> None:
    cell.watch.shadow(cell.shadow())
    cell.told({"at": 0}, {"task": 2, "at": 0}, clock_us=W)
    cell.told({"at": 1}, {"task": 2, "at": 1}, clock_us=2 * W)
    (slot,) = (cell.tracker.find(np.array([[1, 0]])),)
    assert cell.total("quality_answers_total") == 0
    cell.watch.failed(slot, np.array([2 * W]), np.array([1]))
    cell.watch.forget(slot)
    for role in ("served", "shadow"):
        assert cell.total("quality_failures_total", role) == 1
        assert cell.total("quality_answers_total", role, "cpu") == 1


def test_each_answer_is_that_of_its_own_task_whichever_tasks_of_the_write_are_not_judged_or_have_one_pending(
    cell: Cell,
) -> None:
    # slot 0 is inside an alloc instance; the answer of slot 1 is pending when the first one of slot 2 is wanted
    inside = {"task": 3, "in_alloc": True, "limit": 64.0, "cpu": 60.0, "tier": 0}
    busy, idle = {"task": 1, "limit": 1.0, "cpu": 0.9, "tier": 1}, {"task": 2, "limit": 4.0, "cpu": 0.02, "tier": 2}
    for at in range(14):
        cell.told(*({**task, "at": at} for task in (inside, busy, *([idle] if at else []))), clock_us=W)
    for task in (1, 2, 3):
        cell.watch.forget(cell.tracker.find(np.array([[task, 0]])))
    limits = {tier: cell.total("quality_limit_total", tier, "cpu") for tier in TIERS[:3]}
    assert limits == {TIERS[0]: 0.0, TIERS[1]: 1.0, TIERS[2]: 4.0}
    reserved = [cell.total("quality_reserved_total", "baseline", tier, "cpu") for tier in TIERS[1:3]]
    assert 0.9 < reserved[0] <= 1.0
    assert 0.02 < reserved[1] < 2.0


def test_a_shadow_that_fails_is_named_and_watched_no_longer_until_there_is_another(
    cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, scored = cell.shadow(), list[int]()

    def fail(*_: object, **__: object) -> NoReturn:
        scored.append(1)
        raise ValueError("not of these tasks")

    monkeypatch.setattr(bad, "score", fail)
    cell.watch.shadow(bad)
    for at in range(3):
        cell.told({"at": at})
    assert {key[0] for key in cell.shown("quality_answers_total")} == {"served"}
    assert "not of these tasks" in str(cell.watch.shadow_problem)
    assert scored == [1]
    cell.watch.check()
    cell.watch.shadow(cell.shadow())
    assert {key[0] for key in cell.shown("quality_answers_total")} == {"served", "shadow"}
    assert cell.watch.shadow_problem is None
    cell.watch.shadow(None)
    assert {key[0] for key in cell.shown("quality_answers_total")} == {"served"}


def test_prices_of_a_shadow_follow_the_cell_as_it_was_at_the_write_however_late_they_are_computed(cell: Cell) -> None:
    calls, go_on, size = list[tuple[str, Any]](), threading.Event(), CellSize()
    cell.watch.shadow(cell.shadow(), followed(cell.scorer, calls))
    cell.watch._later(lambda: cast("None", go_on.wait(PATIENCE_S)))
    size.memory[0] = 7.0
    cell.told({"at": 0}, size=size)
    size.memory[0] = 8.0  # by the next write
    go_on.set()
    cell.watch.forget(cell.tracker.find(np.array([[1, 0]])))
    cell.watch.shown()
    assert calls == [("take", 7), ("forget", [0])]


def test_a_shadow_that_prices_itself_and_what_follows_it_take_over_the_mean_limit_of_the_cell(cell: Cell) -> None:
    calls, size = list[tuple[str, Any]](), CellSize()
    assert cell.scorer.own_price
    cell.watch.shadow(copy(cell.scorer), followed(cell.scorer, calls))
    size.memory[0], size.memory[2:] = 7.0, [4.0, 2.0]
    cell.told({"at": 0}, size=size)
    cell.told({"at": 1}, size=size)
    cell.watch.shown()
    assert calls == [("resize", (4.0, 2.0)), ("take", 7), ("take", 7)]
