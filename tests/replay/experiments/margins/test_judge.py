"""Judging on a small cell in memory: margins from validation rows, numbers from test rows, in order."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from reclaim.data.errors import HistoryTooShortError
from reclaim.data.schema import RESOURCES
from reclaim.data.windows import MEMORY_MAX, MEMORY_MEAN, Windows, demand
from reclaim.features.splits import IN_ALLOC, TEST, TEST_UNSEEN, TRAIN, VALID
from reclaim.replay.experiments.margins.following import by_part, follow
from reclaim.replay.experiments.margins.judge import cell_over_time, judge, over_time
from reclaim.replay.open_loop.bootstrap import Bootstrap
from reclaim.replay.open_loop.estimates import Estimates, set_margins
from reclaim.replay.open_loop.fold import run_base
from reclaim.replay.open_loop.history import History, oracle
from reclaim.replay.open_loop.period import SEQUENCE, Period, lay_out_period
from reclaim.replay.open_loop.scoring import score
from reclaim.replay.settings import ReplayConfig
from reclaim.training.estimators.base import Estimate
from reclaim.training.estimators.fixed import LimitEstimator
from reclaim.training.estimators.registry import build_estimator
from reclaim.training.margins.answers import Widened
from reclaim.training.margins.calibrate import guarded_reservations
from reclaim.training.margins.margin import MARGIN_NAMES, Budgets, Guarded, Margin
from tests.replay.histories import NO_MACHINES, history_of

Maker = Callable[..., Windows]
Judged = dict[str, Any]
"""Report of ``judge`` on one estimator."""

HOW = Bootstrap(draws=20, seed=1, confidence=0.9)
BUDGETS = Budgets(baseline=0.01, aggressive=0.1)
LENGTH = 120


@pytest.fixture
def history(make_windows: Maker) -> History:
    """Return 12 tasks of 120 noisy windows on 3 machines, cut at 60 and 80, whose target is the next three windows."""
    rng = np.random.default_rng(5)
    tasks = [np.clip(rng.lognormal(-1.2, 0.35, (LENGTH, 2)), 0, 1).tolist() for _ in range(12)]
    windows = make_windows(*tasks, machines=[i % 3 for i in range(12)])
    now = demand(windows).reshape(12, LENGTH, 2)
    ahead = np.full((12, LENGTH + 3, 2), np.nan)
    ahead[:, :LENGTH] = now
    target = np.stack([ahead[:, k : LENGTH + k] for k in (1, 2, 3)]).max(axis=0).reshape(-1, 2)
    following = ahead[:, 1 : LENGTH + 1].reshape(-1, 2)
    slot = np.tile(np.arange(LENGTH), 12)
    part = np.select([slot < 60, slot < 80], [TRAIN, VALID], TEST)
    return history_of(windows, target, following, part, np.where(windows.collection_id < 103, TEST_UNSEEN, 0))


@pytest.fixture
def period(history: History) -> Period:
    return lay_out_period(history, NO_MACHINES)


@pytest.fixture
def judged(period: Period) -> Judged:
    return _judge(run_base(build_estimator("percentile"), period.history.windows), period)


def _judge(base: Estimate, period: Period) -> Judged:
    answers = Widened.alike(base)
    made = set_margins(answers, period, BUDGETS)
    reserved = guarded_reservations(answers, period.history.windows, made.settings)
    return judge("percentile", "statistical", made, reserved, period, bootstrap=HOW, drawn=True)


def test_the_narrower_margin_reclaims_more_and_violates_more_on_the_rows_it_was_set_on(judged: Judged) -> None:
    for resource in RESOURCES:
        violation, reclaimed = (
            [judged["validation"][m][metric][resource] for m in MARGIN_NAMES]
            for metric in ("violation_rate", "reclaimed_share")
        )
        assert violation == sorted(violation)
        assert reclaimed == sorted(reclaimed)
        assert violation[0] <= BUDGETS.baseline < violation[2] <= BUDGETS.aggressive
        assert reclaimed[0] < reclaimed[2]


def test_the_medium_share_is_half_way_and_what_it_reclaims_lies_between(judged: Judged) -> None:
    for resource in RESOURCES:
        baseline, medium, aggressive = (judged["margins"][m][resource] for m in MARGIN_NAMES)
        assert medium == pytest.approx((baseline + aggressive) / 2, rel=1e-15)
        shares = [judged["results"][m]["all"]["reclaimed_share"][resource]["value"] for m in MARGIN_NAMES]
        assert shares == sorted(shares)
        assert shares[0] < shares[1] < shares[2]


def test_changing_the_test_targets_changes_what_is_reported_and_no_margin(history: History, judged: Judged) -> None:
    doubled = np.where((history.period == TEST)[:, None], history.target * 2, history.target)
    period = lay_out_period(replace(history, target=doubled), NO_MACHINES)
    base = run_base(build_estimator("percentile"), history.windows)
    other = _judge(base, period)
    assert other["margins"] == judged["margins"]
    assert other["validation"] == judged["validation"]
    assert other["results"] != judged["results"]


def test_changing_the_validation_targets_changes_the_margins(history: History, judged: Judged) -> None:
    doubled = np.where((history.period == VALID)[:, None], history.target * 2, history.target)
    period = lay_out_period(replace(history, target=doubled), NO_MACHINES)
    base = run_base(build_estimator("percentile"), history.windows)
    other = _judge(base, period)
    assert other["margins"] != judged["margins"]


def test_the_limit_reclaims_nothing_and_never_violates(period: Period) -> None:
    measured = score(period.history.windows.limit, period, HOW)
    for resource in RESOURCES:
        assert measured["all"]["reclaimed_share"][resource]["value"] == 0.0
        assert measured["all"]["violation_rate"][resource]["value"] == 0.0
    assert measured["oom"] == {"events": 0, "rate": 0.0, "tasks_over": 0, "tasks_over_rate": 0.0}


def test_the_oracle_bounds_what_never_violates(period: Period, judged: Judged) -> None:
    best = score(oracle(period.history).reservation, period, HOW)["all"]
    careful = Margin("careful", (0.4, 0.4))
    base = run_base(build_estimator("moving-max"), period.history.windows)
    safe = score(Guarded(LimitEstimator(), careful).adjust(base, period.history.windows).reservation, period, HOW)[
        "all"
    ]
    for resource in RESOURCES:
        assert best["violation_rate"][resource]["value"] == 0.0
        assert best["efficiency"][resource]["value"] == pytest.approx(1.0)
        assert safe["violation_rate"][resource]["value"] == 0.0
        assert 0 < safe["reclaimed_share"][resource]["value"] < best["reclaimed_share"][resource]["value"]
        for m in MARGIN_NAMES:
            bound = judged["results"][m]["all"]["oracle_reclaimed_share"][resource]["value"]
            assert bound == pytest.approx(best["reclaimed_share"][resource]["value"])


def test_each_quarter_of_the_test_period_is_under_its_own_margin(period: Period, judged: Judged) -> None:
    windows = period.history.windows
    base = run_base(build_estimator("percentile"), windows)
    for quarter, name in enumerate(SEQUENCE):
        margins = {m: Margin(m, tuple(shares.values())) for m, shares in judged["margins"].items()}
        reserved = guarded_reservations(Widened.alike(base), windows, margins)
        alone = over_time(reserved[name], period)
        assert judged["sequence"]["segments"][quarter] == alone["segments"][quarter] | {"margin": name}
    drawn = judged["sequence"]
    assert drawn["cumulative_tasks_over"] == sorted(drawn["cumulative_tasks_over"])
    assert drawn["cumulative_tasks_over"][-1] == sum(s["tasks_over"] for s in drawn["segments"]) > 0


def test_a_line_of_more_slots_than_points_by_hand(make_windows: Maker) -> None:
    """Two tasks on one machine use 0.5 of a limit of 1 for 401 slots: 133 bins of three slots and one of two."""
    history = history_of(make_windows([(0.5, 0.5)] * 401, [(0.5, 0.5)] * 401, machines=[7, 7]))
    period = lay_out_period(history, NO_MACHINES)
    reservation = np.full((2, 401, 2), 0.6)  # holds from the next window on; the limit in the first
    reservation[:, 99] = 0.1  # in slot 100 both tasks are over, and so is their machine
    reservation[0, 399] = 0.4  # in slot 400 the other task's reservation makes up for one
    line = over_time(reservation.reshape(-1, 2), period)
    assert line["cumulative_events"] == [0] * 33 + [1] * 101
    assert line["cumulative_tasks_over"] == [0] * 33 + [2] * 100 + [3]
    assert [(segment["events"], segment["tasks_over"]) for segment in line["segments"]] == [
        (1, 2),
        (0, 0),
        (0, 0),
        (0, 1),
    ]
    # slots 0 to 100: the limits of 2, 99 slots of 1.2, and 0.2
    assert line["segments"][0]["reclaimed_share"]["memory"] == pytest.approx(1 - (2 + 99 * 1.2 + 0.2) / (101 * 2))
    shares = line["reservation"]["memory"]
    assert len(shares) == 134
    assert (shares[0], shares[1], shares[33]) == pytest.approx(((2 + 1.2 + 1.2) / 6, 0.6, (1.2 + 0.2 + 1.2) / 6))
    assert shares[-1] == pytest.approx((1.2 + 1.0) / 4)
    hours = cell_over_time(period)["hours"]
    assert (len(hours), hours[1], hours[-1]) == (134, 0.25, pytest.approx(399 / 12))


def test_a_window_without_a_limit_is_in_neither_the_reservations_nor_the_limits_of_the_cell(
    make_windows: Maker,
) -> None:
    # two tasks of limits 1, reserved at a half after their first window; the second one's limit is lost in the third,
    # and the fourth begins under it: 1.5 of 2
    windows = make_windows([(0.1, 0.1)] * 4, [(0.1, 0.1)] * 4)
    windows.limit[6] = np.nan
    made = over_time(np.full((8, 2), 0.5), lay_out_period(history_of(windows), NO_MACHINES))
    assert [quarter["reclaimed_share"]["cpu"] for quarter in made["segments"]] == [0.0, 0.5, 0.5, 0.25]


def test_the_quarters_cover_the_test_period_without_gap(period: Period) -> None:
    timeline = cell_over_time(period)
    segments = timeline["segments"]
    assert [s["margin"] for s in segments] == ["baseline", "aggressive", "medium", "baseline"]
    assert [s["start_hours"] for s in segments[1:]] == [s["end_hours"] for s in segments[:-1]]
    assert (segments[0]["start_hours"], segments[-1]["end_hours"]) == (0.0, timeline["length_hours"])
    assert timeline["length_hours"] == pytest.approx(40 / 12)


def test_without_capacities_the_cell_is_drawn_as_a_share_of_its_limits(period: Period) -> None:
    timeline = cell_over_time(period)
    assert timeline["unit"] == "share of mean limit"
    assert timeline["limit"]["cpu"] == pytest.approx([1.0] * 40)
    usage = period.history.windows.usage[period.rows, 0].reshape(12, 40).sum(axis=0) / 12
    assert timeline["usage"]["cpu"] == pytest.approx(usage.tolist())


def test_the_cell_uses_its_largest_memory_where_no_mean_is_known(period: Period) -> None:
    windows = period.history.windows
    usage = windows.usage.copy()
    usage[:, MEMORY_MEAN] = np.nan
    without = replace(period, history=replace(period.history, windows=replace(windows, usage=usage)))
    most = usage[period.rows, MEMORY_MAX].reshape(12, 40).sum(axis=0) / 12
    assert cell_over_time(without)["usage"]["memory"] == pytest.approx(most.tolist())


def test_with_capacities_the_cell_is_drawn_as_a_share_of_them(history: History) -> None:
    machines = {k: np.array(v) for k, v in zip(NO_MACHINES, ([0], [1], [1], [48.0], [24.0]), strict=False)}
    timeline = cell_over_time(lay_out_period(history, machines))
    assert timeline["unit"] == "share of capacity"
    assert timeline["limit"] == {"cpu": pytest.approx([0.25] * 40), "memory": pytest.approx([0.5] * 40)}


def test_groups_hold_every_counted_row_once(judged: Judged, period: Period) -> None:
    counted = int(np.isfinite(period.history.target[period.rows, 0]).sum())
    for split in ("tiers", "ages"):
        groups = judged["results"]["medium"][split]
        assert sum(g["task_windows"]["cpu"] for g in groups.values()) == counted
    assert set(judged["results"]["medium"]["tiers"]) == {"unknown"}
    assert set(judged["results"]["medium"]["ages"]) == {"up to 24 h"}


def test_unseen_are_the_collections_nothing_was_set_on(period: Period) -> None:
    assert period.unseen_units.tolist() == [True] * 3 + [False] * 9
    reservation = np.where(period.history.windows.collection_id[:, None] < 103, 0.25, 1.0) * np.ones(2)
    measured = score(reservation, period, HOW)
    assert measured["unseen"]["reclaimed_share"]["cpu"]["value"] == pytest.approx(0.75)
    assert measured["all"]["reclaimed_share"]["cpu"]["value"] == pytest.approx(0.75 / 4)


def test_tasks_inside_an_alloc_instance_are_not_judged(history: History) -> None:
    group = np.where(history.windows.collection_id == 111, IN_ALLOC, history.group).astype(np.uint8)
    period = lay_out_period(replace(history, group=group), NO_MACHINES)
    assert 111 not in history.windows.collection_id[period.rows]
    assert len(period.rows) == 11 * 40


def test_a_test_period_without_a_whole_horizon_is_refused(history: History) -> None:
    unknown = np.where((history.period == TEST)[:, None], np.nan, history.target)
    with pytest.raises(HistoryTooShortError, match="0 of 480 task-windows of the test period"):
        lay_out_period(replace(history, target=unknown), NO_MACHINES)


def test_no_collection_kept_for_the_test_leaves_that_column_empty(history: History) -> None:
    period = lay_out_period(replace(history, group=np.zeros_like(history.group)), NO_MACHINES)
    measured = score(Estimate(history.windows.limit, np.zeros((len(history), 2), np.uint8)).reservation, period, HOW)
    assert measured["unseen"]["reclaimed_share"]["cpu"] == {"value": None, "low": None, "high": None}


def test_margins_that_follow_violate_nearer_to_the_budget_than_those_that_do_not(history: History) -> None:
    # after the validation period every task uses half as much again: margins set before are too narrow
    later = history.period == TEST
    usage = np.where(later[:, None], history.windows.usage * 1.5, history.windows.usage)
    percentiles = np.where(later[:, None], history.windows.percentiles * np.float32(1.5), history.windows.percentiles)
    windows = replace(history.windows, usage=usage, percentiles=percentiles)
    target = np.where((history.period >= VALID)[:, None], history.target, np.nan)
    period = lay_out_period(
        replace(history, windows=windows, target=np.where(later[:, None], target * 1.5, target)),
        {name: values.copy() for name, values in NO_MACHINES.items()},
    )
    answers = Widened.alike(run_base(build_estimator("borg"), history.windows))  # as if it had not noticed
    made = set_margins(answers, period, BUDGETS)
    estimates = Estimates(period.history, period, {"borg": answers}, {"borg": made})
    config = ReplayConfig(horizon_s=3600, budgets=BUDGETS, draws=50)
    within: Any = SimpleNamespace(budgets=BUDGETS, horizon_s=900)  # that of the history's targets
    fixed, followed = estimates.reservations("borg"), follow("borg", estimates, within)
    kept = [by_part(of, period, config) for of in (fixed, followed)]
    assert (followed["baseline"] >= followed["medium"]).all()
    assert (followed["medium"] >= followed["aggressive"]).all()
    for resource in RESOURCES:
        violation = [
            score(of["aggressive"], period, HOW)["all"]["violation_rate"][resource]["value"] for of in (fixed, followed)
        ]
        assert violation[0] > 1.5 * BUDGETS.aggressive
        assert abs(violation[1] - BUDGETS.aggressive) < abs(violation[0] - BUDGETS.aggressive)
        (day,) = kept[1]["aggressive"][resource]
        low, value, high = (day[k] or 0.0 for k in ("low", "value", "high"))
        assert value == pytest.approx(violation[1] / BUDGETS.aggressive)
        assert low <= value <= high
        assert value < (kept[0]["aggressive"][resource][0]["value"] or 0.0)
