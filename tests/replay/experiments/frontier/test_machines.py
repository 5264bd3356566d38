"""Whole machines: the predictors' golden numbers out of a cell, sums and violations by hand."""

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from reclaim.data import windows as w
from reclaim.data.core.engine.workers import Engine
from reclaim.data.windows import Windows, empty_windows
from reclaim.features.splits import TEST, VALID
from reclaim.replay.equal_violation.sweep import FACTORS, Bare, Guards
from reclaim.replay.experiments.frontier.machines import MachinePeaks, Record, judge_peaks, lay_out_machines
from reclaim.replay.machine_peaks.predictors import PREDICTORS
from reclaim.replay.open_loop.bootstrap import Bootstrap
from reclaim.replay.open_loop.fold import run_base
from reclaim.replay.open_loop.history import oracle
from reclaim.replay.open_loop.period import Period, lay_out_period
from reclaim.training.estimators.registry import build_estimator
from reclaim.training.machines.snapshots import Snapshots
from tests.replay.histories import NO_MACHINES, period_of

Maker = Callable[..., Windows]

HOW = Bootstrap(draws=50, seed=1, confidence=0.9)
MEMORY = 1
SLOT_US = 300_000_000


def laid_out(period: Period, horizon_s: int = 600, *predictors: str) -> MachinePeaks:
    machines = anything(period, horizon_s, *predictors)
    assert machines is not None
    return machines


def anything(period: Period, horizon_s: int, *names: str) -> MachinePeaks | None:
    guards, predictors = Guards.from_windows(period.history.windows), {name: PREDICTORS[name] for name in names}
    return lay_out_machines(period, guards, MEMORY, horizon_s, predictors)


def test_the_golden_predictors_come_out_of_a_cell_as_they_are(real_data: Path) -> None:
    folder = real_data / "golden_peak_predictors"
    if not folder.is_dir():
        pytest.skip("no golden peak predictors beside the repository")
    samples = pq.read_table(folder / "samples.parquet").to_pandas()
    expected = pq.read_table(folder / "expected.parquet").to_pandas()
    samples = samples.sort_values(["machine", "task", "time_us"], kind="stable")
    windows = empty_windows(len(samples))
    windows.collection_id[:] = pd.factorize(samples["machine"].astype(str) + "/" + samples["task"].astype(str))[0]
    windows.machine_id[:] = samples["machine"]
    windows.start_us[:] = samples["time_us"]
    windows.end_us[:] = windows.start_us + SLOT_US
    windows.usage[:, w.MEMORY_MAX] = samples["usage"]
    windows.limit[:] = samples["limit"].to_numpy()[:, None]
    names = [name for name in expected["predictor"].unique() if name not in ("oracle_24h", "limit")]
    machines = anything(period_of(windows), 86_400, *names)
    assert machines is not None
    wide = expected.pivot_table(index=["machine", "time_us"], columns="predictor", values="predicted_peak")
    judged = wide[wide["oracle_24h"].notna()]
    assert len(judged) == len(machines.at.peak) > 1000
    np.testing.assert_array_equal(judged.index.get_level_values("time_us"), machines.at.start_us)
    np.testing.assert_allclose(machines.at.peak, judged["oracle_24h"], rtol=0, atol=1e-12)
    for name in names:
        np.testing.assert_allclose(machines.at.foreseen[name], judged[name], rtol=0, atol=1e-12, err_msg=name)


@pytest.fixture
def two_tasks(make_windows: Maker) -> Period:
    """Return two tasks on machine 7, six slots of memory each, and a third without a machine."""
    first = [(0.0, m) for m in (0.1, 0.4, 0.2, 0.2, 0.1, 0.1)]
    second = [(0.0, m) for m in (0.3, 0.1, 0.5, 0.1, 0.1, 0.3)]
    return period_of(make_windows(first, second, [(0.0, 0.9)] * 6, machines=[7, 7, -1]))


def test_a_machines_peak_is_the_largest_sum_to_come_and_only_where_the_whole_horizon_is_there(
    two_tasks: Period,
) -> None:
    machines = laid_out(two_tasks)
    # sums by slot: 0.4, 0.5, 0.7, 0.3, 0.2, 0.4; the two slots to come, and none of the last two
    np.testing.assert_allclose(machines.at.peak, [0.7, 0.7, 0.3, 0.4])
    np.testing.assert_allclose(machines.at.limit, 2.0)
    assert machines.at.n_machines == 1
    assert sorted(machines.at.rows.tolist()) == [0, 1, 2, 3, 6, 7, 8, 9]
    reserved = np.arange(18.0)[:, None].repeat(2, axis=1)
    assert machines.total(reserved).tolist() == [6, 8, 10, 12]


def test_what_happened_on_a_machine_by_hand(two_tasks: Period) -> None:
    report = judge_peaks(np.array([0.35, 0.6, 0.35, 0.2]), laid_out(two_tasks), HOW)
    # violated at the first two times and, after a third that holds, at the fourth
    assert report["violation_rate"]["value"] == pytest.approx(3 / 4)
    assert report["violation_rate"]["p50"] == pytest.approx(3 / 4)
    severities = [0.35 / 0.7, 0.1 / 0.7, 0.2 / 0.4]
    assert report["severity"]["mean"] == pytest.approx(sum(severities) / 4)
    assert report["severity"]["at_violation"] == pytest.approx(sum(severities) / 3)
    assert report["violation_s"] == pytest.approx(3 * 300 / 2)
    assert report["savings"]["value"] == pytest.approx((8 - 1.5) / 8)
    assert report["efficiency"]["value"] == pytest.approx((8 - 1.5) / (8 - 2.1))
    # one machine tells nothing of others
    assert report["savings"]["low"] is report["savings"]["high"] is None


def test_episodes_end_with_a_gap_or_a_machine_and_percentiles_are_of_each_machines_own_violations() -> None:
    # machine 0 at slots 0, 1 and 3, machine 1 at slots 4 and 5; too little is foreseen at slots 1, 3 and 4
    nothing = np.zeros(0)
    at = Snapshots(
        resource=MEMORY,
        rows=np.zeros(0, np.int64),
        snapshot=np.zeros(0, np.int64),
        machine=np.array([0, 0, 0, 1, 1]),
        start_us=np.array([0, 1, 3, 4, 5]) * SLOT_US,
        peak=np.full(5, 0.6),
        limit=np.full(5, 2.0),
        foreseen={},
        n_machines=2,
    )
    machines = MachinePeaks(at, low=nothing, high=nothing, slot_s=300)
    report = judge_peaks(np.array([0.6, 0.3, 0.3, 0.6 / 1.005, 0.6]), machines, HOW)
    assert report["violation_s"] == pytest.approx(300)  # three violations, each an episode of its own
    # each of the five times is another machine's alone, so that all there is then violates at once
    assert report["at_once"] == {"p99.9": 1.0, "largest": 1.0}
    # of machine 0 2/3 of the times, of machine 1 half: on the straight line between; loosely machine 1 has none
    rates = report["violation_rate"]
    assert [rates[p] for p in ("p50", "p90", "p99")] == pytest.approx([1 / 2 + q / 6 for q in (0.5, 0.9, 0.99)])
    assert (rates["value"], report["violation_rate_1pct"]) == pytest.approx((3 / 5, 2 / 5))


def test_a_peak_foreseen_beyond_the_limits_is_the_limits_and_a_hundredth_too_little_is_told_apart(
    two_tasks: Period,
) -> None:
    report = judge_peaks(np.array([9.0, 0.7 / 1.005, 0.3, 0.4]), laid_out(two_tasks), HOW)
    assert report["violation_rate"]["value"] == pytest.approx(1 / 4)
    assert report["violation_rate_1pct"] == 0.0
    assert report["savings"]["value"] == pytest.approx((8 - 2 - 0.7 / 1.005 - 0.7) / 8)


def test_times_before_the_test_warm_the_predictors_up_and_are_not_judged(two_tasks: Period) -> None:
    history = two_tasks.history
    later = laid_out(period_of(history.windows, np.tile([VALID] * 2 + [TEST] * 4, 3)), 600, "peak_max")
    np.testing.assert_allclose(later.at.peak, [0.3, 0.4])
    assert later.at.foreseen["peak_max"].shape == (2,)
    whole = laid_out(two_tasks, 600, "peak_max")
    np.testing.assert_array_equal(later.at.foreseen["peak_max"], whole.at.foreseen["peak_max"][2:])


def test_predictors_know_the_days_before_the_history_which_the_record_has(make_windows: Maker) -> None:
    rng = np.random.default_rng(5)
    usage = rng.uniform(0.0, 0.2, (4, 400, 2))
    usage[:, :300] += 0.5
    whole = period_of(make_windows(*usage.tolist(), machines=[7, 7, 8, -1]), np.tile([VALID] * 350 + [TEST] * 50, 4))
    late = np.flatnonzero(np.tile(np.arange(400) >= 320, 4))
    cut = lay_out_period(whole.history.take(late), NO_MACHINES)
    names = ("peak_max", "coach_p95", "trimaran_p99")
    predictors, guards = {name: PREDICTORS[name] for name in names}, Guards.from_windows(cut.history.windows)
    record = Record(whole.history.windows, whole.history.source_row)
    known = lay_out_machines(cut, guards, MEMORY, 600, predictors, record=record)
    alone, expected = laid_out(cut, 600, *names), laid_out(whole, 600, *names)
    assert known is not None
    for name in names:
        np.testing.assert_array_equal(known.at.foreseen[name], expected.at.foreseen[name])
    assert (alone.at.foreseen["coach_p95"] < known.at.foreseen["coach_p95"]).all()
    assert (late[known.at.rows] == expected.at.rows).all()
    np.testing.assert_equal(asdict(replace(known.at, foreseen={})), asdict(replace(alone.at, foreseen={})))
    np.testing.assert_array_equal(known.low, alone.low)


def test_no_prediction_changes_with_what_comes_after(two_tasks: Period) -> None:
    windows = two_tasks.history.windows
    usage = windows.usage.copy()
    usage[[4, 5, 10, 11]] *= 3.0
    names = ("nsigma5", "rc_p99", "machine_p100", "peak_max")
    before, after = (laid_out(period_of(each), 600, *names) for each in (windows, replace(windows, usage=usage)))
    assert (before.at.peak != after.at.peak).any()
    for name in names:
        np.testing.assert_array_equal(before.at.foreseen[name], after.at.foreseen[name])


@pytest.mark.parametrize("engine", [Engine(workers=1), pytest.param(Engine("processes", 2), marks=pytest.mark.slow)])
def test_machines_laid_out_do_not_depend_on_the_engine_nor_on_the_number_of_workers(
    two_tasks: Period, engine: Engine
) -> None:
    guards, names = Guards.from_windows(two_tasks.history.windows), ("nsigma5", "peak_max")
    predictors = {name: PREDICTORS[name] for name in names}
    other = lay_out_machines(two_tasks, guards, MEMORY, 600, predictors, engine)
    assert other is not None
    np.testing.assert_equal(asdict(other), asdict(laid_out(two_tasks, 600, *names)))


def test_of_two_windows_of_a_task_in_one_slot_the_first_is_answered(make_windows: Maker) -> None:
    windows = make_windows([(0.0, 0.1), (0.0, 0.2), (0.0, 0.3), (0.0, 0.1)], machines=[1])
    windows.start_us[1], windows.end_us[0] = windows.start_us[0] + 200_000_000, windows.start_us[0] + 200_000_000
    windows.end_us[1] = windows.start_us[0] + SLOT_US
    windows.start_us[2:] -= SLOT_US
    windows.end_us[2:] -= SLOT_US
    machines = laid_out(period_of(windows), 300)
    assert machines.at.rows.tolist() == [0, 2]
    np.testing.assert_allclose(machines.at.peak, [0.3, 0.1])


def test_without_machines_or_a_whole_horizon_there_is_nothing_to_judge(make_windows: Maker, two_tasks: Period) -> None:
    assert anything(period_of(make_windows([(0.1, 0.1)] * 4)), 300) is None
    assert anything(two_tasks, 86_400) is None


def test_a_sweep_adds_up_what_the_guards_make_of_each_answer(make_windows: Maker) -> None:
    rng = np.random.default_rng(3)
    tasks = [rng.uniform(0, 1.1, (40, 2)).tolist() for _ in range(9)]
    period = period_of(make_windows(*tasks, machines=[i % 3 for i in range(9)]))
    machines, windows = laid_out(period), period.history.windows
    bare, factors = run_base(build_estimator("percentile"), windows).reservation, np.array([0.3, 0.8, 1.3])
    violations, reclaimed = machines.sweep(Bare(bare, factors))
    for k, factor in enumerate(factors):
        total = machines.total(Guards.from_windows(windows).reservation(bare, factor))
        over = machines.at.peak > total * (1 + 1e-9)
        np.testing.assert_array_equal(violations[:, k], np.bincount(machines.at.machine, over, 3))
        np.testing.assert_allclose(reclaimed[:, k], np.bincount(machines.at.machine, machines.at.limit - total, 3))
    assert violations.any()
    at_one = int(np.searchsorted(FACTORS, 1.0))
    alone = machines.sweep_peak(total / FACTORS[at_one])
    np.testing.assert_array_equal(alone[0][:, at_one], violations[:, -1])
    np.testing.assert_allclose(alone[1][:, at_one], reclaimed[:, -1])


def test_the_sum_of_what_tasks_will_use_covers_their_machine_and_the_limit_never_fails(make_windows: Maker) -> None:
    rng = np.random.default_rng(4)
    usage = rng.uniform(0, 1.0, (6, 30, 2))
    period = period_of(make_windows(*usage.tolist(), machines=[0] * 6))
    ahead = np.full((6, 32, 2), np.nan)
    ahead[:, :30] = usage
    target = np.stack([ahead[:, k : 30 + k] for k in (1, 2)]).max(axis=0).reshape(-1, 2)  # both, or unknown
    history = replace(period.history, target=target)
    machines = laid_out(period)
    for reserved in (oracle(history).reservation, history.windows.limit):
        assert judge_peaks(machines.total(reserved), machines, HOW)["violation_rate"]["value"] == 0.0
