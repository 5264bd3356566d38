"""The series of the largest task, the decisions on it, and the windows on which each is judged: small cases by hand."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from reclaim.data import schema as s
from reclaim.data import windows as w
from reclaim.data.dataset import Dataset
from reclaim.data.errors import HistoryTooShortError
from reclaim.data.windows import empty_windows
from reclaim.features.build import build_features
from reclaim.features.feature_set import FeatureSet
from reclaim.features.splits import SEEN, TEST, TRAIN, VALID
from reclaim.replay.experiment import Source
from reclaim.replay.experiments.recommend.answers import _target, ask_statistics
from reclaim.replay.experiments.recommend.decisions import NOW, lay_out
from reclaim.replay.experiments.recommend.policy import RecommendConfig
from reclaim.replay.experiments.recommend.score import Judged, of_each_workload, set_once, shares
from reclaim.replay.experiments.recommend.series import TaskRows, _kills, largest_task
from reclaim.replay.open_loop.bootstrap import Bootstrap
from reclaim.training.margins.answers import Widened

SLOT = 300_000_000
HOUR = 12 * SLOT
DAY = 24 * HOUR


def rows_of(
    tasks: list[tuple[int, int, list[float]]],
    *,
    cuts: tuple[int, int] = (0, 0),
    kills: Sequence[tuple[int, int, float]] = (),
) -> TaskRows:
    """Return windows of tasks, each a workload, its first slot and its CPU demand; memory is ten times that."""
    workload = np.concatenate([np.full(len(of), w) for w, _, of in tasks])
    start = np.concatenate([(first + np.arange(len(of))) * SLOT for _, first, of in tasks])
    cpu = np.concatenate([np.array(of, np.float64) for *_, of in tasks])
    n = len(cpu)
    period = np.where(start + SLOT <= cuts[0], TRAIN, np.where(start + SLOT <= cuts[1], VALID, TEST)).astype(np.uint8)
    limit = np.tile((8.0, 80.0), (n, 1))
    return TaskRows(
        ids=np.unique(workload) + 100, workload=workload,
        task=np.repeat(np.arange(len(tasks)), [len(t[2]) for t in tasks]),
        start_us=start, end_us=start + SLOT,
        scheduled_us=np.concatenate([np.full(len(of), first * SLOT) for _, first, of in tasks]),
        demand=np.stack([cpu, 10 * cpu], axis=1), limit=limit, enforced=limit,
        request=limit / 2, tier=np.zeros(n, np.int8), period=period, group=np.full(n, SEEN, np.uint8),
        source_row=np.arange(n), index=np.zeros(len(tasks), np.int64),
        oom_workload=np.array([k[0] for k in kills], np.int64),
        oom_us=np.array([k[1] for k in kills], np.int64), oom_limit=np.array([k[2] for k in kills]),
    )  # fmt: skip


def test_the_series_is_the_largest_task_of_each_slot_and_skips_slots_in_which_none_ran() -> None:
    # workload 0 has tasks from slot 0 (1 2 3) and slot 1 (5 0); workload 1 ran in slots 0 and 4
    series = largest_task(rows_of([(0, 0, [1, 2, 3]), (0, 1, [5, 0]), (1, 0, [7]), (1, 4, [6])]))
    assert series.workload.tolist() == [0, 0, 0, 1, 1]
    assert series.demand[:, 0].tolist() == [1, 5, 3, 7, 6]
    assert series.demand[:, 1].tolist() == [10, 50, 30, 70, 60]
    assert (series.end_us // SLOT).tolist() == [1, 2, 3, 1, 5]


def test_an_unknown_demand_of_one_task_leaves_that_of_the_other() -> None:
    series = largest_task(rows_of([(0, 0, [np.nan, np.nan]), (0, 0, [2, np.nan])]))
    np.testing.assert_array_equal(series.demand[:, 0], [2, np.nan])


def test_the_last_row_before_a_time_has_ended_by_then() -> None:
    series = largest_task(rows_of([(0, 0, [1, 2, 3]), (1, 1, [4])]))
    found = series.last_before(np.array([0, 0, 0, 1, 1]), np.array([0, SLOT, 3 * SLOT - 1, SLOT, 2 * SLOT]))
    assert found.tolist() == [-1, 0, 1, -1, 3]


def test_the_chunks_are_whole_workloads_and_all_rows() -> None:
    series = largest_task(rows_of([(0, 0, [1, 2, 3]), (1, 1, [4])]))
    assert list(series.chunks()) == [slice(0, 4)]
    windows, place = series.windows(slice(0, 4))
    assert windows.usage[:, 0].tolist() == [1, 2, 3, 4]
    assert windows.task_starts().tolist() == [0, 3, 4]
    assert place.tolist() == [0, 1, 2, 3]


def test_a_window_is_judged_by_the_request_that_was_set_before_it_began() -> None:
    # training ends at hour 1, validation at hour 3, the history at hour 5; requests hold for an hour
    rows = rows_of([(0, 0, [1.0] * 60)], cuts=(HOUR, 3 * HOUR))
    of = lay_out(rows, largest_task(rows), (HOUR, 3 * HOUR), hold_days=1 / 24, seen_days=1)
    assert (of.time_us // HOUR).tolist() == [1, 2, 3, 4, 5]
    assert of.period.tolist() == [VALID, VALID, TEST, TEST, NOW]
    assert of.before.tolist() == [-1, 0, -1, 2, -1]
    for period in (VALID, TEST):
        set_at = of.time_us[of.held[period]]
        began = rows.start_us[of.judged[period]]
        assert np.all((set_at <= began) & (began < set_at + HOUR))
        assert len(began) == 24
    np.testing.assert_allclose(of.age_days * 24, [1, 2, 3, 4, 5])
    np.testing.assert_allclose(of.ran_hours, of.age_days * 24)
    last = largest_task(rows).end_us[of.known]
    assert np.all(last <= of.time_us)


def test_the_hours_that_a_workload_ran_leave_out_those_in_which_it_did_not() -> None:
    # one workload throughout; two tasks of another, a quarter of an hour at the beginning and the fifth hour
    rows = rows_of([(0, 0, [1.0] * 60), (1, 0, [1.0] * 3), (1, 48, [1.0] * 12)], cuts=(HOUR, 3 * HOUR))
    of = lay_out(rows, largest_task(rows), (HOUR, 3 * HOUR), hold_days=1 / 24, seen_days=1)
    mine = of.workload == 1
    np.testing.assert_allclose(of.age_days[mine] * 24, [4, 5])
    np.testing.assert_allclose(of.ran_hours[mine], [0.25, 1.25])


def test_a_workload_that_begins_when_a_request_is_set_has_its_own_first_request_and_limit() -> None:
    # the other one begins at hour 2, when requests are set for the second time; its first windows request 3 of 6
    rows = rows_of([(0, 0, [1.0] * 60), (1, 24, [1.0] * 36)], cuts=(HOUR, 3 * HOUR))
    first = (rows.workload == 1) & (rows.start_us < 3 * HOUR)
    rows.request[first], rows.limit[first] = 3.0, 6.0
    of = lay_out(rows, largest_task(rows), (HOUR, 3 * HOUR), hold_days=1 / 24, seen_days=1)
    mine = np.flatnonzero(of.workload == 1)
    assert (of.time_us[mine] // HOUR).tolist() == [2, 3, 4, 5]
    assert of.known[mine[0]] == -1
    assert of.request[mine].tolist() == [[3.0, 3.0], [3.0, 3.0], [4.0, 40.0], [4.0, 40.0]]
    assert of.limit[mine[0]].tolist() == [6.0, 6.0]
    assert of.ran_hours[mine[0]] == 0


def test_a_workload_that_ended_just_so_long_ago_still_has_a_recommendation() -> None:
    rows = rows_of([(0, 0, [1.0] * 60), (1, 0, [1.0] * 36), (2, 0, [1.0] * 35)], cuts=(HOUR, 3 * HOUR))
    of = lay_out(rows, largest_task(rows), (HOUR, 3 * HOUR), hold_days=1 / 24, seen_days=2 / 24)
    assert of.workload[of.of(NOW)].tolist() == [0, 1]  # hour 3 is two hours before the end, hour 2:55 is more


def test_a_workload_is_as_old_as_its_first_window_however_old_the_history_is() -> None:
    rows = rows_of([(0, 0, [1.0] * 60), (1, 30, [1.0] * 30)], cuts=(HOUR, 3 * HOUR))  # from half past two
    of = lay_out(rows, largest_task(rows), (HOUR, 3 * HOUR), hold_days=1 / 24, seen_days=1)
    np.testing.assert_allclose(
        of.age_days[of.workload == 1] * 24, [-0.5, 0.5, 1.5, 2.5]
    )  # it begins while the first one holds


def test_a_window_across_the_end_of_a_period_is_judged_in_neither() -> None:
    rows = rows_of([(0, 0, [1.0] * 60)], cuts=(HOUR + SLOT // 2, 3 * HOUR))
    of = lay_out(rows, largest_task(rows), (HOUR + SLOT // 2, 3 * HOUR), hold_days=1 / 24, seen_days=1)
    assert rows.start_us[of.judged[VALID]].min() == HOUR + SLOT
    assert len(of.judged[VALID]) == 23


def test_a_kill_counts_from_its_time_on_and_the_largest_limit_does() -> None:
    kills = [(0, 2 * HOUR, 70.0), (0, 4 * HOUR, 60.0), (1, 2 * HOUR, 99.0)]
    rows = rows_of([(0, 0, [1.0] * 60), (1, 40, [1.0] * 20)], cuts=(HOUR, 3 * HOUR), kills=kills)
    of = lay_out(rows, largest_task(rows), (HOUR, 3 * HOUR), hold_days=1 / 24, seen_days=1)
    mine = of.workload == 0
    np.testing.assert_array_equal(of.killed_at[mine], [np.nan, 70, 70, 70, 70])


def test_an_end_out_of_memory_after_the_last_window_of_all_counts_now_and_at_no_time_before() -> None:
    # the only task is killed in the last slot, whose samples are too few for a window
    rows = rows_of([(0, 0, [1.0] * 60)], cuts=(HOUR, 3 * HOUR), kills=[(0, 5 * HOUR + SLOT // 2, 70.0)])
    of = lay_out(rows, largest_task(rows), (HOUR, 3 * HOUR), hold_days=1 / 24, seen_days=1)
    np.testing.assert_array_equal(of.killed_at, [np.nan] * 4 + [70])


def test_an_end_out_of_memory_is_at_the_enforced_limit_or_where_none_is_at_what_the_task_had() -> None:
    """A limit that the dataset guessed stopped nothing: it is twice the usage, or more."""
    windows = empty_windows(3)
    windows.start_us[:], windows.end_us[:] = np.arange(3) * SLOT, np.arange(1, 4) * SLOT
    windows.limit[:] = (1.0, 2048.0)
    windows.usage[:, w.MEMORY_MAX] = (300.0, 700.0, 100.0)
    kill = (windows, np.array([0]), np.array([2 * SLOT]))

    def at(enforced: float, request: float) -> float:
        return float(_kills(*kill, np.full(3, enforced), np.full(3, request))[2][0])

    nan = float("nan")
    assert at(1024.0, 512.0) == 1024.0
    assert at(nan, nan) == 700.0  # in the window in which it was killed
    assert at(nan, 512.0) == 700.0
    assert at(nan, 800.0) == 800.0


def test_windows_of_requests_that_are_withheld_choose_no_margin() -> None:
    """A workload that an autoscaler keeps near its request would ask for a margin that the others pay for."""
    rows = rows_of([(0, 0, [1.0] * 60), (1, 0, [8.0] * 60)], cuts=(HOUR, 3 * HOUR))
    of = lay_out(rows, largest_task(rows), (HOUR, 3 * HOUR), hold_days=1 / 24, seen_days=1)
    mine = of.workload[of.held[VALID]]
    scaled = np.stack([of.workload == 1, np.zeros(len(of), np.bool_)], axis=1)
    target = _target(rows, of, scaled)
    np.testing.assert_array_equal(np.isnan(target), np.stack([mine == 1, np.zeros(len(mine), np.bool_)], axis=1))
    every = np.ones((len(of), 2), np.bool_)  # then nothing is set, and something has to be chosen
    np.testing.assert_array_equal(_target(rows, of, every), _target(rows, of, ~every))


def test_the_need_of_a_window_is_at_most_its_limit_and_a_day_of_the_period_begins_with_it() -> None:
    cuts = (HOUR, 2 * HOUR)
    rows = rows_of([(0, 0, [9.0] * 12 * 30)], cuts=cuts)  # of a limit of 8, for 30 hours
    of = lay_out(rows, largest_task(rows), cuts, hold_days=1, seen_days=1)
    judged = Judged.of(rows, of, TEST, cuts[1])
    assert np.unique(judged.need[:, 0]).tolist() == [8.0]
    assert np.bincount(judged.day).tolist() == [24 * 12, 4 * 12]
    assert np.unique(judged.seconds).tolist() == [300.0]
    rows.limit[:, 0] = np.nan
    assert np.unique(Judged.of(rows, of, TEST, cuts[1]).need[:, 0]).tolist() == [9.0]  # no limit is known


def first_ends(dataset: Path, copy: Path) -> int:
    """Copy a dataset of which the first collection ends an hour into the test, with features; return its id."""
    collections = Dataset.open(dataset).read("tasks", [s.COLLECTION_ID])[s.COLLECTION_ID].to_numpy()
    first, until = int(collections.min()), FeatureSet.open(dataset).cuts_us[1] + HOUR
    shutil.copytree(dataset, copy)
    shutil.rmtree(copy / "features")
    for path in (copy / "usage").iterdir():
        table = pq.read_table(path)
        late = (table[s.COLLECTION_ID].to_numpy() == first) & (table[s.START_US].to_numpy() >= until)
        pq.write_table(table.filter(pa.array(~late)), path)
    build_features(Dataset.open(copy))
    return first


def test_a_backtest_by_hand() -> None:
    nan = float("nan")
    judged = Judged(
        workload=np.array([0, 0, 0, 0, 1]), held=np.array([0, 0, 1, 1, 2]), day=np.array([0, 0, 1, 1, 1]),
        need=np.array([[1, nan], [3, nan], [1, nan], [1, nan], [5, nan]]),
        request=np.array([[4.0, 4.0]] * 4 + [[nan, nan]]), seconds=np.full(5, 300.0), n_workloads=2,
    )  # fmt: skip
    requests = np.array([[2.0, 1.0], [0.5, 1.0], [6.0, 1.0]])
    # workload 0 needs more than 2 once, and more than 0.5 twice; it gives back 2 + 2 + 3.5 + 3.5 of 16
    violated, reclaimed = shares(judged.by_workload(requests))
    np.testing.assert_allclose(violated[:, 0], [3 / 4, 0])
    np.testing.assert_allclose(reclaimed[:, 0], [11 / 16, nan])
    np.testing.assert_array_equal(reclaimed[:, 1], [nan, nan])  # nothing is known to be needed, so nothing was given
    assert judged.most(3)[:, 0].tolist() == [3, 1, 5]
    one, other = of_each_workload(judged, requests, Bootstrap(draws=200, seed=1, confidence=0.9))
    # of the first day half is violated, of the second all
    counts = {"windows": 4, "violations": 3, "days": 2}
    assert one["cpu"] == {"value": 0.75, "low": 0.5, "high": 1.0, **counts}
    assert other["cpu"] == {"value": 0.0, "low": None, "high": None, "windows": 1, "violations": 0, "days": 1}
    assert one["memory"] == {"value": None, "low": None, "high": None, "windows": 0, "violations": 0, "days": 0}
    # a half of all draws has each day once, and a quarter either twice: no day after the last one is drawn
    middle = of_each_workload(judged, requests, Bootstrap(draws=200, seed=1, confidence=0.4))[0]["cpu"]
    assert (middle["low"], middle["high"]) == (0.75, 0.75)
    withheld = np.array([[False, False], [True, False], [False, False]])
    np.testing.assert_allclose(shares(judged.without(withheld).by_workload(requests))[0][:, 0], [1 / 2, 0])


def test_what_a_window_reclaims_counts_by_its_length_and_one_without_a_request_reclaims_nothing() -> None:
    nan = float("nan")
    judged = Judged(
        workload=np.zeros(3, np.int64), held=np.array([0, 1, 1]), day=np.zeros(3, np.int64), need=np.ones((3, 2)),
        request=np.array([[4.0, 8.0], [4.0, nan], [4.0, 8.0]]), seconds=np.array([300.0, 600.0, 300.0]), n_workloads=1,
    )  # fmt: skip
    _, reclaimed = shares(judged.by_workload(np.array([[1.0, 2.0], [3.0, 4.0]])))
    # of CPU 3 of 4 for 300 s and 1 of 4 for 900 s; of memory 6 and 4 of 8
    np.testing.assert_allclose(reclaimed, [[(3 + 3 * 1) / (4 * 4), (6 + 4) / (8 + 8)]])


def test_each_workload_has_the_same_rate_and_interval_however_many_are_resampled_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = np.random.default_rng(2)
    n, how = 400, Bootstrap(draws=50, seed=1, confidence=0.9)
    judged = Judged(
        workload=rng.integers(0, 5, n), held=np.arange(n), day=rng.integers(0, 6, n), need=rng.random((n, 2)),
        request=np.ones((n, 2)), seconds=np.full(n, 300.0), n_workloads=5,
    )  # fmt: skip
    requests = rng.random((n, 2))
    at_once = of_each_workload(judged, requests, how)
    monkeypatch.setattr("reclaim.replay.experiments.recommend.score._AT_ONCE", 2)
    assert of_each_workload(judged, requests, how) == at_once
    assert len({(one["cpu"]["low"], one["memory"]["high"]) for one in at_once}) == 5


@pytest.mark.parametrize(
    ("unknown", "expected"),
    [
        ([], [1, 2, 2, 2, 5]),  # the decisions of the test are the second to the fourth
        ([1], [1, 2, 3, 3, 5]),
        ([1, 3], [1, 2, 3, 3, 5]),
        ([1, 2], [1, 2, 3, 4, 5]),
        ([0, 2], [1, 2, 2, 2, 5]),
    ],
)
def test_set_once_the_first_request_of_the_test_that_rests_on_an_answer_stays(
    unknown: list[int], expected: list[float]
) -> None:
    cuts = (HOUR, 2 * HOUR)
    rows = rows_of([(0, 0, [1.0] * 60)], cuts=cuts)
    of = lay_out(rows, largest_task(rows), cuts, hold_days=1 / 24, seen_days=1)
    requests = np.tile(np.arange(1.0, 6.0)[:, None], 2)
    kept = np.isin(np.arange(5), unknown)[:, None] & np.array([True, False])
    given = requests.copy(), kept.copy()
    once = set_once(requests, kept, of)
    assert once[:, 0].tolist() == expected
    assert once[:, 1].tolist() == [1, 2, 2, 2, 5]
    np.testing.assert_array_equal((requests, kept), given)  # what is set again is still needed


def test_a_workload_that_has_not_run_for_long_gets_no_recommendation() -> None:
    rows = rows_of([(0, 0, [1.0] * 60), (1, 0, [1.0] * 30)], cuts=(HOUR, 3 * HOUR))  # ends at 2.5 h of 5
    now = {
        days: lay_out(rows, largest_task(rows), (HOUR, 3 * HOUR), hold_days=1 / 24, seen_days=days)
        for days in (0.2, 0.1)
    }
    assert [sorted(of.workload[of.of(NOW)].tolist()) for of in now.values()] == [[0, 1], [0]]


def test_a_history_without_a_window_to_judge_is_refused() -> None:
    rows = rows_of([(0, 0, [1.0] * 24)], cuts=(HOUR, 3 * HOUR))
    with pytest.raises(HistoryTooShortError, match="test period"):
        lay_out(rows, largest_task(rows), (HOUR, 3 * HOUR), hold_days=1, seen_days=1)


def test_a_workload_stands_again_under_its_first_limit_doubled_where_that_is_outgrown() -> None:
    rows = rows_of([(0, 0, [1, 1, 2, 2, 1]), (1, 0, [5])])
    limit = np.array([[2, 20], [2, 20], [5, 20], [3, 20], [np.nan, 20], [8, 80]])
    windows, place = largest_task(replace(rows, limit=limit)).windows(slice(0, 6))
    assert windows.task_starts().tolist() == [0, 2, 7, 8]
    assert windows.usage[:, 0].tolist() == [1, 1, 1, 1, 2, 2, 1, 5]
    np.testing.assert_array_equal(windows.limit[:, 0], [2, 2, 8, 8, 8, 8, np.nan, 8])
    assert windows.limit[:, 1].tolist() == [20] * 7 + [80]
    assert place.tolist() == [0, 1, 4, 5, 6, 7]


@pytest.mark.parametrize("name", RecommendConfig().estimators)
def test_a_limit_that_changes_changes_no_statistic_of_what_was_used(name: str) -> None:
    """A workload uses 0.4 and 4 for days; its limit is raised fourfold, or cut to an eighth, in the last hours."""
    rows = rows_of([(0, 0, [0.4, 0.38] * 144 * 8)])
    last = rows.end_us > rows.end_us.max() - 6 * HOUR
    lay = partial(lay_out, cuts_us=(6 * DAY, 7 * DAY), hold_days=1, seen_days=7)
    rows = replace(rows, period=np.where(rows.end_us <= 7 * DAY, VALID, TEST).astype(np.uint8))
    source = Source(None, None, {})  # type: ignore[arg-type]  # neither is read

    def now(before: float, after: float) -> np.ndarray:
        limit = np.where(last, after, before)[:, None] * np.array([1.0, 10.0])
        series = largest_task(replace(rows, limit=limit, enforced=limit))
        decisions = lay(rows, series)
        config = RecommendConfig(estimators=(name,))
        (answers,) = ask_statistics(source, config, series, decisions).values()
        return np.array([one.of["baseline"].reservation[decisions.of(NOW)[0]] for one in answers
                         if isinstance(one, Widened)])  # fmt: skip

    as_ever = now(4.0, 4.0)
    np.testing.assert_array_equal(now(1.0, 4.0), as_ever)
    np.testing.assert_array_equal(now(4.0, 0.5), as_ever)
    assert (as_ever < [1.0, 10.0]).all()
