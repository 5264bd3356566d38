"""The built-in model's own price: the service solves it as a replay does, to the bit, and goes on after a restart."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray

from reclaim.data.windows import Windows, concatenate
from reclaim.features.fold.batch import FeatureState
from reclaim.serving.answers.encode import cell_prices
from reclaim.serving.cell.size import CellSize
from reclaim.serving.cell.task_record import TASK
from reclaim.serving.settings import ServingSettings
from reclaim.training.bundle import Bundle, load_model
from reclaim.training.margins.answers import Priced
from reclaim.training.margins.margin import MARGIN_NAMES, Budgets
from reclaim.training.margins.online import OnlineMargins
from tests.serving.cell_fixtures import Memory, assert_same_bits
from tests.serving.kill_harness import made_up

SETTINGS = ServingSettings(clock="trace", stale_s=1e9, forget_s=1e9)
HOUR_US = 3_600_000_000


@cache
def builtin() -> Bundle:
    return load_model("builtin")


@cache
def slots() -> list[Windows]:
    """Return the windows of two and a half hours, slot by slot."""
    return [concatenate(pieces) for pieces in made_up(tasks=40, slots=30, pieces=3).slots]


def key_of(windows: Windows) -> NDArray[np.int64]:
    return np.column_stack([windows.collection_id, windows.instance_index])


def test_a_cell_is_served_as_it_is_replayed_at_a_price_that_moves_every_hour() -> None:
    windows = concatenate(slots())
    memory, served = Memory(SETTINGS, builtin()), []
    for part in slots():
        memory.write(part)
        served.append([memory.answers(*map(tuple, key_of(part).tolist()), margin=m) for m in MARGIN_NAMES])
    mean_limit = memory.tracker.mean_limit
    assert memory.scorer.mean_limit == mean_limit

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
    following = memory.tracker.following
    assert following is not None
    assert_same_bits(following.memory()["own"], replay.memory()["own"])
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
    after.scorer = after.scorer.resized(after.tracker.mean_limit)
    after.tracker.promote(after.scorer, after.tracker.following)
    for part in slots()[at:]:
        after.write(part)
    for margin in MARGIN_NAMES:
        assert after.tracker.prices.now[margin] == whole.tracker.prices.now[margin]
        ours, theirs = (m.answers(margin=margin).estimate.reservation for m in (after, whole))
        assert_same_bits(ours, theirs, margin)


def test_the_mean_limit_is_looked_at_once_an_hour_and_rounded() -> None:
    size, tasks = CellSize(), np.zeros(0, TASK)
    limit = np.array([[3.0, np.nan], [5.0, np.nan]])
    assert size.reach(HOUR_US, limit, tasks) == pytest.approx((4.0, np.nan), nan_ok=True)
    assert size.reach(HOUR_US + 1, limit * 10, tasks) is None  # within the hour
    assert size.reach(2 * HOUR_US, limit * 1.3, tasks) is None  # 5.2 is less than half as much again
    assert size.reach(3 * HOUR_US, limit * 2, tasks) == pytest.approx((8.0, np.nan), nan_ok=True)
    # a resource that gets its first limit does not wait for the hour
    assert size.reach(3 * HOUR_US + 1, np.array([[8.0, 1.0]]), tasks) == (8.0, 1.0)
