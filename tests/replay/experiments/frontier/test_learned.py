"""Tests of a model's machines in the frontier: sums of the tasks present, margins of validation peaks, and the day."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from reclaim.data.dataset import Dataset
from reclaim.data.schema import RESOURCES
from reclaim.features.feature_set import FeatureSet
from reclaim.features.splits import TEST
from reclaim.replay.equal_violation.sweep import Guards
from reclaim.replay.experiment import LEARNED_MACHINE, Results, Source
from reclaim.replay.experiments.frontier.day import machine_day
from reclaim.replay.experiments.frontier.learned import foresee_machines
from reclaim.replay.experiments.frontier.machines import lay_out_machines
from reclaim.replay.experiments.frontier.measure import EXPERIMENT, FrontierConfig, definitions
from reclaim.replay.open_loop.estimates import estimate_all
from reclaim.training.bundle import Bundle
from reclaim.training.machines.curve import N_INPUTS, MachineCurve
from reclaim.training.machines.fit import MachineRows
from reclaim.training.machines.following import follow
from reclaim.training.machines.terms import N_TERMS, RATES, T_BAND, T_HELD, T_LIMIT
from reclaim.training.margins.margin import Budgets
from tests.every_row import x_of

CONFIG = FrontierConfig(estimators=("borg", "limit"), predictors=("nsigma5",), tune=False, draws=20)
OURS = ("network (machine)", "network (bound)")


@pytest.fixture(scope="module")
def source(dataset: Path, bundle: Bundle) -> Source:
    return Source(Dataset.open(dataset), FeatureSet.open(dataset), {"network": bundle})


@pytest.fixture(scope="module")
def results(source: Source) -> Results:
    return EXPERIMENT.measure(source, CONFIG).results


def test_a_model_stands_beside_its_sum_of_tasks_on_machines_alone(results: Results) -> None:
    assert list(results["machines"]["contenders"]) == ["network", "borg", "nsigma5", *OURS]
    assert list(results["tasks"]["contenders"]) == ["network", "borg"]
    kinds = {one["name"]: one["kind"] for one in results["estimators"]}
    assert [kinds[name] for name in OURS] == [LEARNED_MACHINE] * 2
    for name in OURS:
        margins = results["machines"]["margins"][name]
        names = ("baseline", "medium", "aggressive")
        assert list(margins) == [*names, *(f"{m} {how}" for how in ("following", "held") for m in names)]
        saved = [margins[m]["cpu"]["savings"]["value"] for m in ("baseline", "medium", "aggressive")]
        assert saved == sorted(saved)


def test_what_stands_behind_a_models_name_is_defined_where_there_is_one() -> None:
    with_model, without = (definitions(CONFIG, machines=True, models=models) for models in (True, False))
    assert set(with_model) - set(without) == {"machine"}
    assert all(f"({kind})" in with_model["machine"] for kind in ("machine", "bound"))


def test_sums_are_of_the_tasks_that_the_machine_runs_at_the_time(source: Source, bundle: Bundle) -> None:
    estimates = estimate_all(source, CONFIG)
    period, features = estimates.period, source.features
    guards = Guards.from_windows(estimates.history.windows)
    laid_out = lay_out_machines(period, guards, 0, CONFIG.horizon_s, {})
    assert laid_out is not None
    found = foresee_machines(bundle, features, period, {"cpu": laid_out}, CONFIG.horizon_s, CONFIG.budgets)
    foreseen, at = found["machine"]["cpu"], laid_out.at
    estimator = bundle.machine_estimator(mean_limit=features.mean_limit)
    history, every = estimates.history, x_of(features)
    for time in (0, len(at) // 2, len(at) - 1):
        rows = at.rows[at.snapshot == time]
        assert (history.windows.start_us[rows] == at.start_us[time]).all()
        assert len(set(history.windows.machine_id[rows].tolist())) == 1
        assert (history.period[rows] == TEST).all()
        x = every[history.source_row[rows]]
        terms = estimator.terms(bundle.forecaster.predict(x, CONFIG.horizon_s), x, history.windows.take(rows))
        np.testing.assert_allclose(foreseen.rows.sums[time], terms[:, 0].sum(axis=0), rtol=1e-12)
        assert foreseen.rows.sums[time, T_LIMIT] + foreseen.rows.sums[time, T_HELD] == pytest.approx(at.limit[time])
    # at the margin of validation peaks no more than the budget of these passed
    assert foreseen.warm_up is not None
    before, _ = foreseen.warm_up
    for budget in (0.01, 0.1):
        peak = foreseen.curve.peak(before.sums, foreseen.curve.margin(budget), before.mean_limit)
        assert (before.peak > peak * (1 + 1e-6)).mean() <= budget


def test_no_margin_follows_peaks_that_its_location_was_fitted_to(source: Source, bundle: Bundle) -> None:
    period, features = estimate_all(source, CONFIG).period, source.features
    laid_out = lay_out_machines(period, Guards.from_windows(period.history.windows), 0, CONFIG.horizon_s, {})
    assert laid_out is not None
    fitted = MachineCurve(weights=(0.1, *(0.0,) * (N_INPUTS - 1)))
    ours = replace(bundle, machines={CONFIG.horizon_s: (fitted,) * len(RESOURCES)})
    first, last = features.cuts_us[0] + 6 * 3_600_000_000, features.cuts_us[1]
    for until_us in (None, first, last):
        asked = replace(ours, learned_until_us=until_us)
        found = foresee_machines(asked, features, period, {"cpu": laid_out}, CONFIG.horizon_s, CONFIG.budgets)
        foreseen, bound = (found[kind]["cpu"].warm_up for kind in ("machine", "bound"))
        assert bound is not None  # it has learned from no peak
        if until_us == last:
            assert foreseen is None
            assert found["machine"]["cpu"].curve == fitted
            assert len(found["machine"]["cpu"].following(0.01, CONFIG.horizon_s, laid_out.slot_s)) == len(laid_out.at)
        else:
            assert foreseen is not None
            wanted = bound[1] if until_us is None else bound[1][bound[1] >= until_us]
            assert foreseen[1].tolist() == wanted.tolist()
            assert len(foreseen[0]) == len(wanted) > 0


def test_the_day_of_a_machine_has_its_usage_below_its_limits(results: Results) -> None:
    days = results["machines"]["day"]
    assert list(days) == ["cpu", "memory"]
    for day in days.values():
        used = np.array(day["usage"]).sum(axis=0)
        assert len(used) == len(day["hours"]) > 100
        assert (used <= np.array(day["limits"]) + 1e-4).all()
        assert (np.array(day["machine"]) <= np.array(day["limits"]) + 1e-4).all()
        assert (np.array(day["machine"]) >= used - 1e-4).all()
    assert machine_day(results) is not None
    assert machine_day({**results, "machines": None}) is None


def drifting(days: int, level: float) -> tuple[MachineRows, np.ndarray[tuple[int], np.dtype[np.int64]]]:
    """Return snapshots of 50 machines, every five minutes, whose peaks are drawn up to a level of the limits."""
    rng = np.random.default_rng(0)
    n = 50 * 288 * days
    sums = np.zeros((n, N_TERMS))
    sums[:, T_LIMIT] = 1.0
    sums[:, T_BAND:] = np.linspace(0.2, 0.4, len(RATES))
    time = np.repeat(np.arange(288 * days), 50) * 300_000_000
    return MachineRows(sums, level * rng.random(n), np.arange(n) % 50, 1.0), time


def test_a_margin_that_follows_comes_back_to_its_budget_and_knows_no_peak_before_it_is_over() -> None:
    calm, _ = drifting(1, 0.5)
    curve = MachineCurve().with_margins(MachineCurve().score(calm.sums, calm.peak, 1.0))
    wild, time = drifting(4, 0.8)  # peaks are higher than those that the margin was set on
    budget = Budgets().aggressive
    fixed = curve.peak(wild.sums, curve.margin(budget), 1.0)
    assert (wild.peak > fixed).mean() > 10 * budget
    held = follow(curve, wild, time, 3_600, 300_000_000, budget)
    last = time >= 2 * 86_400_000_000
    assert 0.8 * budget <= (wild.peak > held * (1 + 1e-6))[last].mean() <= 1.25 * budget
    # the answers before an hour and a window have passed are those of the margin set; later peaks change none before
    early = time < 3_900_000_000
    np.testing.assert_array_equal(held[early], fixed[early])
    cut = time < 86_400_000_000
    changed = MachineRows(wild.sums, np.where(cut, wild.peak, 1.0), wild.machine, 1.0)
    again = follow(curve, changed, time, 3_600, 300_000_000, budget)
    known = time < 86_400_000_000 + 3_900_000_000
    np.testing.assert_array_equal(again[known], held[known])
    assert (again[~known] != held[~known]).any()
