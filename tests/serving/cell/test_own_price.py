"""The built-in model's own price: the service solves it as a replay does, to the bit, and goes on after a restart."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from reclaim.data.windows import Windows, concatenate
from reclaim.features.fold.batch import FeatureState
from reclaim.serving.answers.encode import cell_prices
from reclaim.serving.cell.size import CellSize
from reclaim.serving.cell.task_record import TASK, UNKNOWN_TASK, key_of
from reclaim.serving.models.scorer import Scorer
from reclaim.serving.settings import ServingSettings
from reclaim.training.bundle import Bundle, load_model
from reclaim.training.margins.answers import Priced
from reclaim.training.margins.margin import MARGIN_NAMES, Budgets
from reclaim.training.margins.online import OnlineMargins
from tests.serving.cell_fixtures import (
    Memory,
    assert_same,
    assert_same_bits,
    fact_rows,
    loaded,
    told_by,
    windows_of,
    with_tasks_in_allocs,
)
from tests.serving.kill_harness import made_up
from tests.serving.writing.running import Service

SETTINGS = ServingSettings(clock="trace", stale_s=1e9, forget_s=1e9)
HOUR_US = 3_600_000_000


@cache
def builtin() -> Bundle:
    return load_model("builtin")


@cache
def slots() -> list[Windows]:
    """Return the windows of two and a half hours, slot by slot."""
    return [concatenate(pieces) for pieces in made_up(tasks=40, slots=30, pieces=3).slots]


@pytest.mark.parametrize("told", [lambda windows: windows, with_tasks_in_allocs])
def test_a_cell_is_served_as_it_is_replayed_at_a_price_that_moves_every_hour(told: Callable[..., Windows]) -> None:
    windows = concatenate(slots())
    memory, served = Memory(SETTINGS, builtin()), []
    for part in slots():
        memory.write(told(part))
        served.append([memory.answers(*map(tuple, key_of(part).tolist()), margin=m) for m in MARGIN_NAMES])
    mean_limit = memory.tracker.size.mean_limit
    assert memory.scorer.mean_limit == mean_limit == (1.0, 1.0)

    estimator = builtin().bare_estimator(mean_limit=mean_limit, cell=SETTINGS.cell)
    slot = np.unique(key_of(windows), axis=0, return_inverse=True)[1].reshape(-1)
    x = FeatureState(SETTINGS.cell).advance(slot, windows)
    ladder, forecast = estimator.ladder(x, windows, all_horizons=False)
    answers = Priced(ladder, None, estimator.risk(ladder, forecast, windows))
    replay = OnlineMargins(builtin().prices, Budgets(), builtin().horizon_s, own=True)
    held = replay.hold(slot, answers, windows)
    first = 0
    for part, found in zip(slots(), served, strict=True):
        for margin, of in zip(MARGIN_NAMES, found, strict=True):
            assert_same_bits(of.estimate.reservation, held[margin][first : first + len(part)], margin)
        first += len(part)
    assert_same_bits(memory.following.memory()["own"], replay.memory()["own"])
    begun = {(p.margin, p.tier, p.resource): p.start for p in cell_prices(memory.tracker.prices)}
    assert begun["baseline", "unknown", "cpu"] > begun["aggressive", "unknown", "cpu"]
    assert begun["aggressive", "unknown", "cpu"] != builtin().prices["aggressive"].value[0]


@pytest.mark.parametrize("at", [4, 17])
def test_a_restart_goes_on_at_the_same_prices_and_the_same_mean_limit(at: int) -> None:
    whole, before = Memory(SETTINGS, builtin()), Memory(SETTINGS, builtin())
    for part in slots():
        whole.write(part)
    for part in slots()[:at]:
        before.write(part)
    after = Memory(SETTINGS, builtin())
    after.tracker.recall(before.tracker.memory())
    after.scorer = after.scorer.resized(after.tracker.size.mean_limit)
    after.tracker.promote(after.scorer, after.tracker.following)
    for part in slots()[at:]:
        after.write(part)
    for margin in MARGIN_NAMES:
        assert after.tracker.prices.now[margin] == whole.tracker.prices.now[margin]
        ours, theirs = (m.answers(margin=margin).estimate.reservation for m in (after, whole))
        assert_same_bits(ours, theirs, margin)


@contextmanager
def served(folder: Path | None, version: str = "1") -> Iterator[Service]:
    """Give a writer that answers with the built-in model, under a version of its own."""
    with ExitStack() as ends:
        service = Service(folder, scorer(version), forget_s=1e9)
        ends.callback(service.close)
        yield service


def scorer(version: str) -> Scorer:
    return Scorer(loaded(builtin(), version), SETTINGS.cell)


def write(service: Service, parts: list[Windows], later_us: int = 0) -> None:
    """Write windows, as much later as is said."""
    for part in parts:
        moved = part.take(np.arange(len(part)))
        moved.start_us[:] += later_us
        moved.end_us[:] += later_us
        assert service.write(moved).result(120).taken == len(part)


def test_a_task_without_estimation_has_no_part_in_the_price_of_the_cell() -> None:
    whole, rest = Memory(SETTINGS, builtin()), Memory(SETTINGS, builtin())
    whole.tell(fact_rows(estimation={task: False for task in range(4, 8)}))
    for at in range(30):
        told = [{"task": t, "at": at, "cpu": 0.1 + 0.1 * (at * t % 7), "memory": 0.3 + 0.01 * t} for t in range(8)]
        whole.write(windows_of(*told))
        rest.write(windows_of(*told[:4]))
    ours, theirs = (memory.following.prices.own for memory in (whole, rest))
    assert ours is not None
    assert theirs is not None
    assert np.isfinite(ours).any()
    assert_same_bits(ours, theirs)


def test_a_shadow_that_prices_itself_is_judged_by_what_it_would_answer() -> None:
    with served(None) as service:
        write(service, slots()[:2])
        service.writer.promote(scorer("2"))  # so that both begin with the same window
        service.writer.shadow(scorer("3"))
        write(service, slots()[2:])
        shown = service.writer._watch.shown()
    for name in ("quality_answers_total", "quality_reserved_total", "quality_violations_total"):
        of_both = shown[name]
        assert isinstance(of_both, dict)
        of = {role: {key[1:]: n for key, n in of_both.items() if key[0] == role} for role in ("served", "shadow")}
        assert of["served"] == of["shadow"], name
        assert sum(of["served"].values()) > 0 or "violations" in name


def test_the_cell_keeps_its_age_when_a_model_is_promoted_and_after_restarts_to_the_bit(tmp_path: Path) -> None:
    days_us = 5 * 24 * HOUR_US
    with served(tmp_path / "cell") as service:
        write(service, slots()[:4])
        begun_us = service.tracker.size.begun_us
        assert begun_us == slots()[0].end_us.max()
        young = [(price.start, price.own) for price in cell_prices(service.tracker.prices) if price.own is not None]
        assert all(start > own for start, own in young)  # a third of the budget
        service.writer.promote(scorer("2"))
        write(service, slots()[4:16], days_us)
        service.save()
        shutil.copytree(tmp_path / "cell", tmp_path / "copy")
        old = [(price.start, price.own) for price in cell_prices(service.tracker.prices) if price.own is not None]
        assert old
        assert all(start == own for start, own in old)  # the whole budget, with the first window of the model
        write(service, slots()[16:], days_us)
        whole = told_by(service.tracker, service.settings)
    with served(tmp_path / "copy", "2") as service:
        write(service, slots()[16:20], days_us)
    with served(tmp_path / "copy", "2") as service:  # from the snapshot and the log behind it
        write(service, slots()[20:], days_us)
        assert service.tracker.size.begun_us == begun_us
        assert_same(told_by(service.tracker, service.settings), whole)
    with served(tmp_path / "copy", "3") as service:  # a model that the state does not know
        write(service, slots()[:2], 2 * days_us)
        prices = [(price.start, price.own) for price in cell_prices(service.tracker.prices) if price.own is not None]
        assert prices
        assert all(start == own for start, own in prices)


def test_a_restart_from_the_log_alone_goes_on_at_the_same_prices_to_the_bit(tmp_path: Path) -> None:
    with served(tmp_path / "cell") as service:
        write(service, slots()[:20])
        whole, memory = told_by(service.tracker, service.settings), service.tracker.memory()
    with served(tmp_path / "cell") as service:
        assert service.writer.recovered_rows == sum(map(len, slots()[:20]))
        assert_same(told_by(service.tracker, service.settings), whole)
        for name, array in service.tracker.memory().items():
            if name.startswith("following."):
                assert_same_bits(array, memory[name], name)


def test_the_mean_limit_is_looked_at_once_an_hour_and_rounded() -> None:
    size, tasks, new = CellSize(), np.zeros(0, TASK), np.zeros(0, np.int64)
    limit = np.array([[3.0, np.nan], [5.0, np.nan]])
    assert size.reach(HOUR_US, limit, tasks, new) == pytest.approx((4.0, np.nan), nan_ok=True)
    assert size.reach(HOUR_US + 1, limit * 10, tasks, new) is None  # within the hour
    assert size.reach(2 * HOUR_US, limit * 1.3, tasks, new) is None  # 5.2 is less than half as much again
    assert size.reach(3 * HOUR_US, limit * 2, tasks, new) == pytest.approx((8.0, np.nan), nan_ok=True)
    kept = np.full(3, UNKNOWN_TASK)
    kept["limit"], kept["end_us"], kept["in_alloc"] = 99.0, [0, -1, 0], [True, False, True]
    assert size.reach(4 * HOUR_US, limit * 2, kept, new) is None  # of tasks inside alloc instances or without a window
    # a resource that gets its first limit does not wait for the hour
    assert size.reach(4 * HOUR_US + 1, np.array([[8.0, 1.0]]), tasks, new) == (8.0, 1.0)
    size.recall(np.array([0.0, 4.0, 8.0, np.nan]))
    assert size.reach(2 * HOUR_US, np.array([[8.0, 1.0]]), tasks, new) == (
        8.0,
        1.0,
    )  # nor for a later hour
    assert size.reach(4 * HOUR_US, np.array([[99.0, 99.0]]), tasks, new) is None  # this hour was looked at before


def test_each_task_counts_once_in_the_mean_limit_though_it_was_kept_and_is_written() -> None:
    kept = np.full(3, UNKNOWN_TASK)
    kept["limit"], kept["end_us"] = [[1.0] * 2, [1.0] * 2, [46.0] * 2], 0
    size = CellSize()
    size.recall(np.array([0.0, 0.0, 16.0, 16.0]))  # 48 / 3; with the two written ones twice, 50 / 5 rounds to 8
    assert size.reach(HOUR_US, np.ones((2, 2)), kept, np.array([0, 1])) is None
    # a new limit takes the place of the one that was kept: 6 / 3
    assert size.reach(2 * HOUR_US, np.array([[4.0] * 2]), kept, np.array([2])) == (2.0, 2.0)
