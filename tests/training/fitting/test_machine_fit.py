"""Tests that machines are fitted to the tasks of validation rows, of every source, and to nothing later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from reclaim.data.dataset import Dataset
from reclaim.features.feature_set import FeatureSet
from reclaim.training.bundle import Bundle, load_bundle, save_bundle
from reclaim.training.fitting import machine_fit
from reclaim.training.fitting.held_out import HeldOut, held_out
from reclaim.training.fitting.machine_fit import fit_machines, machine_rows
from reclaim.training.fitting.sources import Source
from reclaim.training.machines import regroup
from reclaim.training.machines.curve import MachineCurve
from reclaim.training.machines.estimator import BOUND
from reclaim.training.machines.fit import MachineRows
from reclaim.training.machines.regroup import SIZES
from reclaim.training.machines.terms import PAST, T_LIMIT
from reclaim.training.margins.margin import Budgets
from tests.series import CPU, dataset_of, write_raw

TASKS, WINDOWS, MACHINES = 24, 400, 3


def source_of(folder: Path, seed: int, machine: str = 'machine_id = "machine"', later: float = 1.0) -> Source:
    """Return a source of drawn tasks on three machines; usage after the validation period is times ``later``."""
    rng = np.random.default_rng(seed)
    lines = ["task,time_s,machine,cpu"]
    for task in range(TASKS):
        cpu = rng.uniform(0.1, 0.6) * rng.lognormal(0, 0.3, WINDOWS)
        cpu[int(0.76 * WINDOWS) :] *= later
        lines += [f"{task},{300 * i},{task % MACHINES},{min(c, 0.99):.6g}" for i, c in enumerate(cpu)]
    write_raw(folder, lines, f"{CPU}{machine}\n")
    made = dataset_of(folder, folder / "set")
    return Source(Dataset.open(made.path), FeatureSet.open(made.path))


def valid_of(bundle: Bundle, *sources: Source) -> HeldOut:
    """Return the validation rows of sources and what a drawn network says of them."""
    return held_out(sources, bundle.forecaster, [source.features.valid_rows() for source in sources])


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return source_of(tmp_path_factory.mktemp("machines") / "raw", seed=1)


def test_a_snapshot_is_of_all_tasks_of_a_machine_and_its_peak_lies_within_the_period(
    source: Source, bundle: Bundle
) -> None:
    valid = valid_of(bundle, source)
    (cpu, memory), regrouped = machine_rows(valid, 3_600)
    assert memory is None  # no limit of it
    assert regrouped == [None, None]  # too few to fit anything
    assert cpu is not None
    tasks = len({*valid.windows.collection_id.tolist()})
    windows = len(valid) // tasks
    assert len(cpu) == MACHINES * (windows - 12)  # the last hour's peaks are not over
    assert set(cpu.machine.tolist()) == set(range(MACHINES))
    np.testing.assert_allclose(cpu.sums[:, 0].reshape(MACHINES, -1)[:, 0].sum(), tasks)  # limits of one
    assert (cpu.peak <= cpu.sums[:, 0]).all()


def test_tasks_of_every_source_are_regrouped_where_there_are_snapshots_enough_to_fit(
    source: Source, bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_fit, "FEWEST", 2)
    valid = valid_of(bundle, source, source_of(tmp_path / "raw", seed=2))
    (own, _), (regrouped, none) = machine_rows(valid, 3_600)
    assert none is None
    assert own is not None
    assert regrouped is not None
    times = len(own) // (2 * MACHINES)
    # of each source as many machines twice, half as many and twice as many, some of them without a task
    assert 2 * 4 * times < len(regrouped) <= 2 * (2 * MACHINES + MACHINES // 2 + 2 * MACHINES + 3) * times
    every = len(SIZES) * own.sums[:, T_LIMIT].sum()
    assert regrouped.sums[:, T_LIMIT].sum() == pytest.approx(every)  # each task is on one machine of each regrouping
    for fewest, enough in ((len(own), True), (len(own) + 1, False)):  # those of all sources together
        monkeypatch.setattr(machine_fit, "FEWEST", fewest)
        assert (machine_rows(valid, 3_600)[1][0] is not None) is enough


def test_snapshots_are_as_far_apart_as_windows_are_long(
    source: Source, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    valid = valid_of(bundle, source)
    (every, _), _ = machine_rows(valid, 3_600)
    monkeypatch.setattr(machine_fit, "slot_s_of", lambda _: 600)  # as where a window lasts ten minutes
    (second, _), _ = machine_rows(valid, 3_600)
    assert every is not None
    assert second is not None
    assert len(second) == pytest.approx(len(every) / 2, abs=MACHINES)


def test_regrouped_tasks_are_in_the_half_of_their_own_machine_though_some_machines_have_no_task(
    source: Source, bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_fit, "FEWEST", 2)
    monkeypatch.setattr(regroup, "SIZES", (20.0,))
    # the first machine of every other source is an odd one, of tasks regrouped as well
    second = source_of(tmp_path / "raw", seed=2)
    valid = valid_of(bundle, source, second, source, second)
    (own, _), (regrouped, _) = machine_rows(valid, 3_600)
    assert own is not None
    assert regrouped is not None
    for half in (0, 1):
        of_own, of_regrouped = (rows.sums[rows.machine % 2 == half, T_LIMIT].sum() for rows in (own, regrouped))
        assert of_regrouped == pytest.approx(of_own)


def test_the_fit_is_given_what_is_regrouped_whether_tasks_are_placed_by_it_and_which_pasts_it_looks_at(
    source: Source, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[MachineRows, MachineRows | None, bool, Sequence[str]]] = []

    def spy(
        rows: MachineRows, allowed: Sequence[float], regrouped: MachineRows | None = None, *, placed: bool,
        pasts: Sequence[str],
    ) -> MachineCurve:  # fmt: skip
        assert allowed == (0.002, 0.03)
        given.append((rows, regrouped, placed, pasts))
        return BOUND[0]

    monkeypatch.setattr(machine_fit, "FEWEST", 2)
    monkeypatch.setattr(machine_fit, "fit_curve", spy)
    for placed_s in (3_600, 300):
        fit_machines(valid_of(bundle, source), (300, 3_600), Budgets(baseline=0.002, aggressive=0.03), placed_s)
    (own, regrouped, _, _) = given[1]
    # no limit of memory is known; longer horizons than the one that tasks are placed by look at their past
    assert [(placed, pasts) for _, _, placed, pasts in given] == [(False, ()), (True, ()), (True, ()), (False, PAST)]
    assert regrouped is not None
    assert len(regrouped) > len(own)


def test_nothing_after_the_validation_period_changes_what_is_fitted(
    source: Source, bundle: Bundle, tmp_path: Path
) -> None:
    other = source_of(tmp_path / "raw", seed=1, later=1.6)
    (cpu, _), (changed, _) = (machine_rows(valid_of(bundle, one), 3_600)[0] for one in (source, other))
    assert cpu is not None
    assert changed is not None
    np.testing.assert_array_equal(cpu.peak, changed.peak)
    np.testing.assert_array_equal(cpu.sums, changed.sums)


def test_what_is_held_out_knows_no_target_that_rests_on_anything_after_its_own_period(
    source: Source, bundle: Bundle
) -> None:
    rows = source.features.valid_rows()
    later = ~source.features.inside[rows]
    of = np.moveaxis(valid_of(bundle, source).y, 2, 1)  # by horizon, then target
    assert np.isfinite(np.moveaxis(source.features.y[rows], 2, 1)[later]).any()  # or this says nothing
    assert np.isnan(of[later]).all()
    assert np.isfinite(of[~later]).any()


def test_machines_of_two_sources_are_all_there_in_the_unit_of_their_mean_limits(
    source: Source, bundle: Bundle, tmp_path: Path
) -> None:
    second, of_first = source_of(tmp_path / "raw", seed=2), valid_of(bundle, source)
    both = machine_rows(valid_of(bundle, source, second), 3_600)[0][0]
    alone, other = machine_rows(of_first, 3_600)[0][0], machine_rows(valid_of(bundle, second), 3_600)[0][0]
    assert both is not None
    assert alone is not None
    assert other is not None
    np.testing.assert_allclose(both.sums, np.concatenate([alone.sums, other.sums]))  # each of its own tasks
    assert set(both.machine.tolist()) == {0, 1, 2, 5, 6, 7}  # the second begins with an odd one
    assert both.mean_limit == 1.0
    np.testing.assert_allclose(both.peak[: len(alone)], alone.peak)  # here the mean limit is one
    in_halves = machine_rows(replace(of_first, mean_limit=(2.0, np.nan)), 3_600)[0][0]
    assert in_halves is not None
    assert in_halves.mean_limit == 2.0


def test_without_machines_the_bound_keeps_its_own_exponents_and_a_bundle_keeps_the_curves(
    source: Source, bundle: Bundle, tmp_path: Path
) -> None:
    alone = source_of(tmp_path / "raw", seed=1, machine="")
    assert fit_machines(valid_of(bundle, alone), (3_600,), Budgets(), 3_600) == {3_600: BOUND}
    budgets = Budgets(baseline=0.05, aggressive=0.2)  # few peaks: larger budgets than usual
    machines = fit_machines(valid_of(bundle, source), (300, 3_600), budgets, 3_600)
    assert machines[3_600][0] != BOUND[0]
    assert machines[3_600][1] == BOUND[1]
    save_bundle(Bundle(**{**vars(bundle), "machines": machines}), tmp_path / "saved")
    loaded = load_bundle(tmp_path / "saved")
    assert loaded.machines == machines
    assert loaded.machine_estimator().curves == machines[3_600]
    assert loaded.machine_estimator(horizon_s=86_400).curves == BOUND
