"""Margins set on the machines that a packing makes: least ones that keep the budget there, of validation rows alone."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from reclaim.data.dataset import Dataset
from reclaim.data.errors import ConfigError
from reclaim.replay.closed_loop.constraints import Constraints
from reclaim.replay.experiment import Source
from reclaim.replay.experiments.compaction import checkpoint, packed
from reclaim.replay.experiments.compaction.checkpoint import Checkpoint, _machines_at
from reclaim.replay.experiments.compaction.packed import PackedMoments, set_on_packed, validation_moments
from reclaim.replay.experiments.compaction.packing import Foreseen, MachineSet, Packer, booked_on
from reclaim.replay.open_loop.estimates import Estimates
from reclaim.replay.open_loop.machines import MachineContenders
from reclaim.replay.open_loop.share import Share
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


def test_a_machine_that_is_packed_keeps_its_budget_by_the_least_margin(
    estimates: Estimates, contenders: MachineContenders, moments: list[Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "ROUNDS", 1)
    name = "network (machine)"
    found = PackedMoments(estimates, moments, "hybrid", 1).set_machine(name, contenders)
    foreseer, estimator = contenders.machines[name]
    for margin, budget in CONFIG.budgets.of_machines.items():
        if margin == "medium":
            continue
        sums, peaks = [], []
        for at in moments:  # the machines of the packing under the margins of before, by hand
            terms = foreseer.current_terms(at.rows)
            booked = Foreseen(terms, estimator, contenders.margins_of(name)[margin])
            order = np.random.default_rng([1, at.time_us]).permutation(len(at.machines))
            fewest = Packer(at.workload, booked).fewest(at.machines.take(order))
            assert fewest is not None
            for machine in range(fewest[0]):
                here = fewest[1] == machine
                if here.any():
                    sums.append(terms[here].sum(axis=0))
                    peaks.append(at.used[here].sum(axis=0).max(axis=0))
        of_sets, peak = np.stack(sums), np.stack(peaks)

        def share(margins: tuple[float, ...], of_sets: np.ndarray = of_sets, peak: np.ndarray = peak) -> np.ndarray:
            return np.asarray(violates(peak, estimator.at(margins, of_sets)).mean(axis=0))

        assert (share(found[margin]) <= budget).all()
        lower = tuple(m - 0.05 * abs(m) for m in found[margin])
        assert (share(lower) >= share(found[margin])).all()
        assert share(lower).max() > budget


def test_a_sum_keeps_its_budget_on_what_it_packs(
    estimates: Estimates, contenders: MachineContenders, moments: list[Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "ROUNDS", 1)
    found = PackedMoments(estimates, moments, "hybrid", 1).set_sum("borg", contenders)
    of_packed = replace(contenders, sums={"borg": found})
    for margin, budget in (("baseline", 0.02), ("aggressive", 0.1)):
        setting = found[margin]
        assert isinstance(setting, Margin)
        for change, keeps in ((1e-6, True), (-0.02, False)):
            changed = {m: replace(setting, share=tuple(s + change for s in setting.share)) for m in found}
            failed, n = np.zeros(2), 0
            for at in moments:
                rows = at.rows
                under = {
                    which: its.reserved_by("borg (sum)", estimates)[margin][estimates.history.previous[rows]]
                    for which, its in (("old", contenders), ("new", replace(of_packed, sums={"borg": changed})))
                }
                order = np.random.default_rng([1, at.time_us]).permutation(len(at.machines))
                fewest = Packer(at.workload, under["old"]).fewest(at.machines.take(order))
                assert fewest is not None
                on, placed = fewest
                peak = np.stack([at.used[placed == m].sum(axis=0).max(axis=0) for m in range(on)])
                used = np.unique(placed)
                failed += violates(peak, booked_on(under["new"], placed, on))[used].sum(axis=0)
                n += len(used)
            assert (failed / n <= budget).all() if keeps else (failed / n > budget).any()


def test_contenders_are_set_one_after_the_other(
    estimates: Estimates, contenders: MachineContenders, moments: list[Checkpoint]
) -> None:
    steps = list(set_on_packed(contenders, PackedMoments(estimates, moments, "hybrid", 1)))
    assert len(steps) == len(contenders.sums) + len(contenders.machines)
    assert steps[-1].sums.keys() == contenders.sums.keys()
    assert steps[-1].margins_of("network (machine)") == steps[-1].packed["network (machine)"]
    assert steps[0].margins_of("network (machine)") == contenders.margins_of("network (machine)")
