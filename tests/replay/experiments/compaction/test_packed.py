"""Margins set on the machines that a packing makes: least ones that keep the budget there, of validation rows alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from reclaim.data.core.engine.workers import Engine
from reclaim.data.dataset import Dataset
from reclaim.data.errors import ConfigError
from reclaim.features.splits import TEST
from reclaim.replay.closed_loop.constraints import Constraints
from reclaim.replay.experiment import Source
from reclaim.replay.experiments.compaction import checkpoint, packed
from reclaim.replay.experiments.compaction.checkpoint import Checkpoint, _machines_at
from reclaim.replay.experiments.compaction.packed import PackedMoments, set_on_packed, validation_moments
from reclaim.replay.experiments.compaction.packing import Booked, Foreseen, MachineSet, Packer, booked_on
from reclaim.replay.open_loop.estimates import Estimates
from reclaim.replay.open_loop.history import current_reservations
from reclaim.replay.open_loop.machines import MachineContenders
from reclaim.replay.open_loop.share import Share
from reclaim.training.margins.answers import Widened
from reclaim.training.margins.margin import Margin
from reclaim.training.margins.violation import violates
from tests.replay.experiments.compaction.conftest import CONFIG


@pytest.fixture(scope="module")
def moments(source: Source, estimates: Estimates) -> list[Checkpoint]:
    found, left_out = validation_moments(source, estimates, Constraints.read(source.dataset), CONFIG.horizon_s, 24)
    assert not left_out
    return found


def test_moments_are_of_the_validation_period_and_of_collections_that_are_not_kept_for_the_test(
    source: Source, estimates: Estimates, moments: list[Checkpoint]
) -> None:
    history = estimates.history
    rows = np.concatenate([at.rows for at in moments])
    assert np.isin(history.source_row[rows], source.features.row[source.features.valid_rows()]).all()
    last = moments[-1].time_us + CONFIG.horizon_s * 1_000_000
    assert last <= estimates.period.slots.first_us
    assert all(b.time_us - a.time_us >= CONFIG.horizon_s * 1_000_000 for a, b in pairwise(moments))
    two, _ = validation_moments(source, estimates, Constraints.read(source.dataset), CONFIG.horizon_s, 2)
    assert len(two) == 2


def test_a_window_that_ends_behind_the_validation_period_is_in_the_horizon_of_no_moment(
    source: Source, estimates: Estimates, moments: list[Checkpoint]
) -> None:
    horizon_us, history = CONFIG.horizon_s * 1_000_000, estimates.history
    start_us, later = history.windows.start_us.copy(), np.flatnonzero(history.period == TEST)
    assert moments[-1].time_us + horizon_us <= start_us[later].min()
    start_us[later[0]] = begins = moments[-1].time_us + horizon_us - 1
    longer = replace(estimates, history=replace(history, windows=replace(history.windows, start_us=start_us)))
    found, _ = validation_moments(source, longer, Constraints.read(source.dataset), CONFIG.horizon_s, 24)
    assert [at.time_us for at in found] == [at.time_us for at in moments if at.time_us + horizon_us <= begins]
    assert len(found) == len(moments) - 1


def test_moments_at_which_nothing_can_be_placed_are_counted_by_the_reason(
    source: Source, estimates: Estimates, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[int] = []

    def machines_at(dataset: Dataset, constraints: Constraints, time_us: int, share: Share) -> MachineSet:
        every = _machines_at(dataset, constraints, time_us, share)
        if len(closed) == 2:
            return every
        closed.append(time_us)
        return every.take(np.zeros(0, np.int64))

    monkeypatch.setattr(checkpoint, "_machines_at", machines_at)
    found, left_out = validation_moments(source, estimates, Constraints.read(source.dataset), CONFIG.horizon_s, 5)
    assert left_out == {"no machine takes work": 2}
    assert [at.time_us for at in found] == sorted({at.time_us for at in found} - {*closed})
    assert len(found) == 3


def test_a_moment_that_no_clones_hold_is_left_out_and_named(
    estimates: Estimates, contenders: MachineContenders, moments: list[Checkpoint]
) -> None:
    name = "network (machine)"
    tiny = [replace(at, machines=replace(at.machines, capacity=at.machines.capacity / 1e6)) for at in moments]
    some = PackedMoments(estimates, [*moments[:6], *tiny[6:8]], "hybrid", 1)
    found = some.set_machine(name, contenders)
    assert some.not_held == {at.time_us for at in tiny[6:8]}
    assert found == PackedMoments(estimates, moments[:6], "hybrid", 1).set_machine(name, contenders)
    with pytest.raises(ConfigError, match=r"8 times the cell's machines do not hold .* at any of 2 moments"):
        PackedMoments(estimates, tiny[:2], "hybrid", 1).set_sum("borg", contenders)


@pytest.mark.parametrize("engine", [Engine(workers=2), pytest.param(Engine("processes", 2), marks=pytest.mark.slow)])
def test_margins_do_not_depend_on_who_packs_the_moments(
    estimates: Estimates, contenders: MachineContenders, moments: list[Checkpoint], engine: Engine
) -> None:
    here = PackedMoments(estimates, moments[:4], "hybrid", 1)
    with engine.pool() as pool:
        there = PackedMoments(estimates, moments[:4], "hybrid", 1, pool.each)
        for name in contenders.machines:
            assert there.set_machine(name, contenders) == here.set_machine(name, contenders)
        assert there.set_sum("borg", contenders) == here.set_sum("borg", contenders)


def packed_by_hand(moments: list[Checkpoint], booked: Sequence[Booked]) -> tuple[np.ndarray, np.ndarray]:
    """Return what is booked on the machines packed at all moments, and their peaks; shape (n, 2) each."""
    of_machines, peaks = [], []
    for at, its in zip(moments, booked, strict=True):
        order = np.random.default_rng([1, at.time_us]).permutation(len(at.machines))
        fewest = Packer(at.workload, its).fewest(at.machines.take(order))
        assert fewest is not None
        on, placed = fewest
        used = np.unique(placed[placed >= 0])
        of_machines.append(booked_on(its, placed, on)[used])
        peaks.append(np.stack([at.used[placed == m].sum(axis=0).max(axis=0) for m in used]))
    return np.concatenate(of_machines), np.concatenate(peaks)


def test_margins_keep_their_budgets_on_the_machines_packed_under_them(
    estimates: Estimates, contenders: MachineContenders, moments: list[Checkpoint]
) -> None:
    name = "network (machine)"
    foreseer, estimator = contenders.machines[name]
    for some in (moments, moments[:6], moments[6:], moments[::2]):
        found = PackedMoments(estimates, some, "hybrid", 1).set_machine(name, contenders)
        for margin, budget in CONFIG.budgets.by_margin.items():
            terms = [foreseer.current_terms(at.rows) for at in some]
            booked, peak = packed_by_hand(some, [Foreseen(of, estimator, found[margin]) for of in terms])
            assert (violates(peak, booked).mean(axis=0) <= budget).all()
        widest, middle, narrowest = (np.array(found[margin]) for margin in ("baseline", "medium", "aggressive"))
        assert ((widest >= middle) & (middle >= narrowest)).all()


@pytest.mark.parametrize("name", ["borg", "network"])
def test_a_sum_keeps_its_budgets_on_the_machines_packed_under_it(
    estimates: Estimates, contenders: MachineContenders, moments: list[Checkpoint], name: str
) -> None:
    for some in (moments, moments[:6], moments[6:], moments[::2]):
        settings = PackedMoments(estimates, some, "hybrid", 1).set_sum(name, contenders)
        reserved = replace(contenders, sums={name: settings}).reserved_by(f"{name} (sum)", estimates)
        for margin, budget in (("baseline", 0.02), ("aggressive", 0.1)):
            current = current_reservations(reserved[margin], estimates.history)
            booked, peak = packed_by_hand(some, [current[at.rows] for at in some])
            assert (violates(peak, booked).mean(axis=0) <= budget).all()


def test_a_sum_with_answers_of_its_own_for_each_budget_keeps_them_on_what_is_packed(
    estimates: Estimates, contenders: MachineContenders, moments: list[Checkpoint]
) -> None:
    alike = estimates.answers["borg"]
    assert isinstance(alike, Widened)
    said, narrow = alike.of["aggressive"], {m: Margin(m, (-0.5, -0.5)) for m in contenders.sums["borg"]}
    contenders = replace(contenders, sums={"borg": narrow})
    for seed in range(4):
        chosen = np.random.default_rng(seed).uniform(0.2, 1.0, said.reservation.shape)  # by other settings
        own = Widened({"baseline": replace(said, reservation=said.reservation * chosen), "aggressive": said})
        other = replace(estimates, answers={**estimates.answers, "borg": own})
        packed = PackedMoments(other, moments, "hybrid", 1)
        settings = packed.set_sum("borg", contenders)
        assert packed.not_kept == []
        reserved = replace(contenders, sums={"borg": settings}).reserved_by("borg (sum)", other)
        for margin, budget in (("baseline", 0.02), ("aggressive", 0.1)):
            current = current_reservations(reserved[margin], estimates.history)
            booked, peak = packed_by_hand(moments, [current[at.rows] for at in moments])
            assert (violates(peak, booked).mean(axis=0) <= budget).all()


@pytest.mark.parametrize(
    ("answers", "tried", "found"),
    [
        # what is packed under 1 asks for 3, under 3 for 4, and under 4 keeps the budget by 4 and no less
        ({1: (False, 3), 3: (False, 4), 4: (True, 4)}, [1, 3, 4], 4),
        # what is packed under 4 would keep it by 2, but under 2 other machines come out
        ({1: (False, 4), 4: (True, 2), 2: (False, 3)}, [1, 4, 2], 4),
        # the first one is too careful, twice over
        ({4: (True, 3), 3: (True, 2.5), 2.5: (False, 5)}, [4, 3, 2.5], 3),
        # a narrower margin has come to 2
        ({4: (True, 1), 2: (True, 1)}, [4, 2], 2),
    ],
)
def test_a_margin_rises_until_its_own_packing_keeps_the_budget_and_falls_while_it_still_does(
    answers: dict[float, tuple[bool, float]], tried: list[float], found: float
) -> None:
    seen = []

    def packing(margins: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        seen.append(margins[0])
        kept, least = answers[margins[0]]
        return np.array([kept, True]), np.array([least, 0.5])

    first = np.array([tried[0], 0.5])
    least, kept = packed._least_kept(first, packing, np.array([2.0, 0.5]))
    assert least.tolist() == [found, 0.5]
    assert kept
    assert seen == tried


def test_where_no_margin_keeps_a_budget_the_highest_one_tried_is_taken() -> None:
    highest, kept = packed._least_kept(np.array([1.0, 1.0]), lambda _: (np.array([False, True]), np.array([7.0, 0.5])))
    assert highest.tolist() == [7.0, 1.0]
    assert not kept


def test_a_budget_is_kept_by_limits_at_the_latest_and_named_where_no_round_comes_that_far(
    estimates: Estimates, contenders: MachineContenders, moments: list[Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every task uses twice its limit, so a machine's peak is the sum of its limits."""
    double = [replace(at, used=at.used * 0 + 2 * at.workload.limit[:, None]) for at in moments[:3]]
    some = PackedMoments(estimates, double, "hybrid", 1)
    some.set_sum("borg", contenders)
    some.set_machine("network (machine)", contenders)
    assert not some.not_kept
    monkeypatch.setattr(packed, "ROUNDS", 1)
    some.set_sum("borg", contenders)
    some.set_machine("network (machine)", contenders)
    assert {"borg (sum), aggressive", "network (machine), aggressive"} <= {*some.not_kept}


def test_contenders_are_set_one_after_the_other(
    estimates: Estimates, contenders: MachineContenders, moments: list[Checkpoint]
) -> None:
    steps = list(set_on_packed(contenders, PackedMoments(estimates, moments, "hybrid", 1)))
    assert len(steps) == len(contenders.sums) + len(contenders.machines)
    assert steps[-1].sums.keys() == contenders.sums.keys()
    assert steps[-1].margins_of("network (machine)") == steps[-1].packed["network (machine)"]
    assert steps[0].margins_of("network (machine)") == contenders.margins_of("network (machine)")
