"""Prices that follow: the service moves them as a replay does, to the bit, once for each outcome, within bounds."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reclaim.data.schema import RESOURCES
from reclaim.data.windows import Windows, concatenate
from reclaim.features.fold.batch import FeatureState
from reclaim.serving.answers.encode import cell_prices
from reclaim.serving.answers.explain import explain
from reclaim.serving.cell.following import Following, of_same
from reclaim.serving.cell.task_record import key_of
from reclaim.serving.models.scorer import Scorer
from reclaim.serving.settings import ServingSettings
from reclaim.serving.wire.schemas import Units
from reclaim.training.bundle import Bundle
from reclaim.training.margins.answers import Priced
from reclaim.training.margins.margin import MARGIN_NAMES, Budgets
from reclaim.training.margins.online import BUDGETED, OnlineMargins
from reclaim.training.margins.price import Price, three_prices
from tests.serving.cell_fixtures import Memory, W, assert_same_bits, fact_rows, loaded, windows_of, with_tasks_in_allocs
from tests.serving.kill_harness import made_up

if TYPE_CHECKING:
    from tests.serving.kill_harness import Cell

SETTINGS = ServingSettings(clock="trace", stale_s=1e9, forget_s=1e9)
FIXED = SETTINGS.model_copy(update={"follow": False})
SLOTS = 30
"""Two and a half hours: outcomes of the first hour and a half have counted."""


@cache
def cell() -> Cell:
    """Return a cell whose tasks come and go."""
    return made_up(tasks=40, slots=SLOTS, pieces=3)


def served(bundle: Bundle, cell: Cell, settings: ServingSettings = SETTINGS, *, times: int = 1) -> Memory:
    """Return a service that took a cell piece by piece, each as many times."""
    memory = Memory(settings, bundle)
    for pieces in cell.slots:
        for piece in pieces:
            for _ in range(times):
                memory.write(piece)
    return memory


def assert_same_prices(ours: Memory, theirs: Memory) -> None:
    for name in MARGIN_NAMES:
        assert ours.tracker.prices.now[name] == theirs.tracker.prices.now[name]
    for name, array in ours.following.memory().items():
        # slots and places are given in another order, in which floats add up to other last bits
        if name not in ("tasks", "of") and (not name.startswith("machines.") or "online" in name):
            assert_same_bits(array, theirs.following.memory()[name], name)


@pytest.mark.parametrize("how", ["whole", "shuffled", "in parts", "with tasks in alloc instances"])
def test_a_history_in_time_order_is_served_as_it_is_replayed(how: str, bundle: Bundle) -> None:
    windows = concatenate([piece for pieces in cell().slots for piece in pieces])
    slot = np.unique(key_of(windows), axis=0, return_inverse=True)[1].reshape(-1)
    x = FeatureState(SETTINGS.cell).advance(slot, windows)
    ladder, _ = bundle.bare_estimator(cell=SETTINGS.cell).ladder(x, windows, all_horizons=False)
    replay = OnlineMargins(bundle.prices, Budgets(), bundle.horizon_s)
    held = replay.hold(slot, Priced(ladder), windows)

    memory, random, first = Memory(SETTINGS, bundle), np.random.default_rng(1), 0
    for pieces in cell().slots:
        part = concatenate(pieces)
        rows = np.arange(first, first + len(part))
        first += len(part)
        sent = with_tasks_in_allocs(part) if how == "with tasks in alloc instances" else part
        order = random.permutation(len(sent)) if how == "shuffled" else np.arange(len(sent))
        for some in np.array_split(order, 3) if how == "in parts" else (order,):
            memory.write(sent.take(some))
        for margin in MARGIN_NAMES:
            found = memory.answers(*map(tuple, key_of(part).tolist()), margin=margin)
            assert_same_bits(found.estimate.reservation, held[margin][rows], margin)
    prices = memory.tracker.prices
    assert prices.now["baseline"] == replay.settings["baseline"]
    assert any(price.now > 1.1 * price.start for price in cell_prices(prices))


def test_prices_do_not_depend_on_the_number_of_threads(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = served(bundle, cell())
    monkeypatch.setattr("reclaim.data.core.parallel.ROWS_WORTH_A_THREAD", 2)
    memory = Memory(SETTINGS, bundle)
    memory.tracker.promote(memory.scorer, Following(memory.scorer, threads=3))
    for pieces in cell().slots:
        for piece in pieces:
            memory.write(piece)
    assert_same_prices(memory, expected)
    assert any(price.now > 1.1 * price.start for price in cell_prices(memory.tracker.prices))


def test_switched_off_the_prices_of_the_model_stay(bundle: Bundle) -> None:
    memory = served(bundle, cell(), FIXED)
    assert memory.tracker.prices.now == bundle.prices
    assert memory.tracker.following is None
    assert not any(name.startswith("following") for name in memory.tracker.memory())
    fresh, followed = Memory(FIXED, bundle), Memory(SETTINGS, bundle)
    assert fresh.tracker.bytes_per_task + 354 == followed.tracker.bytes_per_task


def test_no_outcome_counts_twice_where_windows_are_repeated(bundle: Bundle) -> None:
    assert_same_prices(served(bundle, cell(), times=2), served(bundle, cell()))


@settings(max_examples=15, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(2, 5))
def test_the_order_of_writes_within_a_slot_and_late_windows_make_no_difference(
    bundle: Bundle, random: object, cuts: int
) -> None:
    plain, disordered = Memory(SETTINGS, bundle), Memory(SETTINGS, bundle)
    generator = np.random.default_rng(random.getrandbits(32))  # type: ignore[attr-defined]  # of hypothesis
    before: Windows | None = None
    for pieces in cell().slots:
        part = concatenate(pieces)
        plain.write(part)
        for some in np.array_split(generator.permutation(len(part)), cuts):
            disordered.write(part.take(some))
            if before is not None:
                disordered.write(before.take(generator.integers(0, len(before), 3)))
        before = part
    assert_same_prices(disordered, plain)


def test_a_late_window_changes_no_price(bundle: Bundle) -> None:
    memory, without = Memory(SETTINGS, bundle), Memory(SETTINGS, bundle)
    for at in range(20):
        if at == 10:
            continue
        for m in (memory, without):
            m.write(windows_of({"task": 1, "at": at, "cpu": 0.2 + 0.01 * at}))
        if at == 12:
            assert memory.write(windows_of({"task": 1, "at": 10, "cpu": 0.9})) == [1]  # late
    assert_same_bits(memory.following.memory()["log"], without.following.memory()["log"])


def test_outcomes_of_tasks_that_end_count_and_their_slot_is_free_of_them(bundle: Bundle) -> None:
    memory = Memory(SETTINGS, bundle)
    for at in range(3):
        memory.write(windows_of({"task": 1, "at": at, "cpu": 0.1 + 0.4 * at}, {"task": 2, "at": at}))
    memory.tell(fact_rows({"task": 1, "ended_us": 3 * W}))
    memory.write(windows_of({"task": 3, "at": 3}, {"task": 2, "at": 3}))  # takes the slot of the first
    state = memory.following.memory()
    (slot,) = memory.tracker.find(np.array([[3, 0]]))
    assert slot == 0
    waiting = state["tasks"][slot]["end_us"]
    assert waiting[waiting > 0].tolist() == [4 * W]
    # of the answers at 1, 2 and 3 windows of the first task two were followed by a window of it, of the other all three
    assert state["answered"][..., 0].sum() == 2 + 3


def test_a_task_without_estimation_moves_no_price(bundle: Bundle) -> None:
    memory = Memory(SETTINGS, bundle)
    memory.tell(fact_rows(estimation={1: False}))
    for at in range(30):
        memory.write(windows_of({"task": 1, "at": at, "cpu": 0.03 * at}))
    assert not memory.following.memory()["outcomes"].any()
    assert not memory.following.memory()["log"].any()


def test_windows_inside_an_alloc_instance_alone_move_no_clock_of_prices_and_count_for_no_earlier_answer(
    bundle: Bundle,
) -> None:
    memory, without = Memory(SETTINGS, bundle), Memory(SETTINGS, bundle)
    for at in range(30):
        inside = at % 3 == 1  # of a task that moves into one and out of it
        window = windows_of({"task": 1, "at": at, "cpu": 0.03 * at, "in_alloc": inside})
        memory.write(window)
        if not inside:
            without.write(window)
    ours, theirs = memory.following, without.following
    assert ours.memory()["outcomes"].any()
    for name, array in ours.memory().items():
        if name == "log" or "outcomes" in name or "clock" in name:
            assert_same_bits(array, theirs.memory()[name], name)


def test_only_the_last_window_of_a_write_has_an_answer_and_all_are_held_against_earlier_ones(bundle: Bundle) -> None:
    cheap = replace(bundle, prices=three_prices(Price("baseline", (0.3, 0.3)), Price("aggressive", (0.25, 0.25))))
    memory = Memory(SETTINGS, cheap)  # at which less than the limit is held
    memory.write(windows_of({"task": 1, "at": 0, "cpu": 0.1}))
    memory.write(windows_of(*({"task": 1, "at": at, "cpu": 0.99 if at == 2 else 0.1} for at in range(1, 5))))
    task = memory.following.memory()["tasks"][0]
    assert sorted(task["end_us"][task["end_us"] > 0].tolist()) == [W, 5 * W]
    came = int(task["came"][task["end_us"] == W][0])
    assert [came >> bit & 1 for bit in (0, 2, 4)] == [1, 1, 1]  # CPU: by the second of the four, for either budget


def test_the_clock_of_prices_moves_to_the_last_window_of_a_write(bundle: Bundle) -> None:
    memory = Memory(SETTINGS, bundle)
    for at in range(5):
        memory.write(windows_of(*({"task": task, "at": at, "cpu": 0.9 if at == 4 else 0.1} for task in range(8))))
    before = memory.tracker.prices.now
    memory.write(windows_of({"task": 8, "at": 4}, {"task": 9, "at": 5}))  # the slot of the violations is over
    assert memory.tracker.prices.now != before


def test_a_promotion_begins_again_at_the_prices_of_the_new_model(bundle: Bundle) -> None:
    memory = served(bundle, cell())
    other = replace(bundle, prices=three_prices(Price("baseline", (50.0, 50.0)), Price("aggressive", (5.0, 5.0))))
    scorer = Scorer(loaded(other, "2"), SETTINGS.cell)
    memory.tracker.promote(scorer, Following(scorer, 2))
    prices = memory.tracker.prices
    for price in cell_prices(prices):
        assert price.now == pytest.approx(price.start)
        assert price.violated is None
    assert prices.start == other.prices


def test_prices_go_on_under_the_same_model_and_settings_alone(bundle: Bundle) -> None:
    scorer = Scorer(loaded(bundle), SETTINGS.cell)
    of = Following(scorer, 3).of
    assert "\n" not in of
    same = of_same(scorer, of)
    assert same is not None
    assert same.number == 3
    assert of_same(Scorer(loaded(bundle, "2"), SETTINGS.cell), of) is None
    dearer = replace(bundle, prices=three_prices(Price("baseline", (9.0, 9.0)), Price("aggressive", (1.0, 1.0))))
    assert of_same(Scorer(loaded(dearer), SETTINGS.cell), of) is None
    assert of_same(scorer, None) is None
    assert of_same(scorer, of, at_once=0.5) is None


def test_prices_stay_within_their_bounds_however_much_is_violated(bundle: Bundle) -> None:
    cheap = replace(bundle, prices=three_prices(Price("baseline", (0.1, 0.1)), Price("aggressive", (0.1, 0.1))))
    memory = Memory(SETTINGS, cheap)
    random = np.random.default_rng(1)
    for at in range(300):
        memory.write(windows_of(*({"task": t, "at": at, "cpu": random.uniform(0, 0.99)} for t in range(20))))
    prices = [p for p in cell_prices(memory.tracker.prices) if p.tier == "unknown" and p.resource == "cpu"]
    for price in prices:
        assert price.start < price.now <= 2.0**20
    quiet = Memory(SETTINGS, bundle)
    for at in range(300):
        quiet.write(windows_of(*({"task": t, "at": at} for t in range(20))))
    for price in cell_prices(quiet.tracker.prices):
        assert price.start / 64.001 <= price.now


def test_a_task_is_told_why_its_price_is_not_the_one_of_the_model(bundle: Bundle) -> None:
    memory = served(bundle, cell())
    key = tuple(key_of(cell().slots[-1][0])[0].tolist())
    for margin in MARGIN_NAMES:
        explained = explain(memory.answers(key, margin=margin), Units())
        told, tier = explained.steps[0].why, explained.task.tier
        of_tier = [p for p in cell_prices(memory.tracker.prices) if (p.margin, p.tier) == (margin, tier)]
        assert [price.resource for price in of_tier] == list(RESOURCES)
        for price in of_tier:
            assert f"{price.start:.3g} for {price.resource} set on validation, now {price.now:.3g}, " in told
            assert price.violated is None or f"; {price.violated:.2%} of the answers of tier {tier} that" in told
        if margin in BUDGETED:
            budget = {"baseline": "0.10%", "aggressive": "1.00%"}[margin]
            assert f"were exceeded for a budget of {budget}" in told
        else:
            assert "between those of baseline and aggressive" in told
    fixed = served(bundle, cell(), FIXED)
    assert "now" not in explain(fixed.answers(key), Units()).steps[0].why


def test_a_task_whose_price_rose_before_any_horizon_was_over_is_told_that_violations_moved_it(bundle: Bundle) -> None:
    memory = Memory(SETTINGS, bundle)
    for at in range(4):  # of an hour
        memory.write(windows_of(*({"task": t, "at": at, "cpu": 0.99 if at == 2 else 0.01} for t in range(20))))
    of = "baseline", "unknown", "cpu"
    (price,) = (p for p in cell_prices(memory.tracker.prices) if (p.margin, p.tier, p.resource) == of)
    assert price.start < price.now
    assert price.violated is None
    told = explain(memory.answers((0, 0)), Units()).steps[0].why
    assert "moved by violations as they come and by answers as their horizons end; no answer of tier unknown" in told


def test_the_exceedance_of_a_reservation_is_that_of_the_curve(bundle: Bundle) -> None:
    memory = served(bundle, cell(), FIXED)
    key = tuple(key_of(cell().slots[-1][0])[0].tolist())
    likely = [explain(memory.answers(key, margin=margin), Units()).exceedance for margin in MARGIN_NAMES]
    baseline, _, aggressive = (p.cpu for p in likely if p is not None and p.cpu is not None)
    assert 0 <= baseline <= aggressive <= 1  # a higher price is exceeded less
