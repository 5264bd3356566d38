"""Lines of the recommendations: sums over the tasks that run, and how far the tasks of a workload differ."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from reclaim.data.schema import RESOURCES
from reclaim.replay.experiments.recommend.decisions import NOW, lay_out
from reclaim.replay.experiments.recommend.lines import _absent, _amounts, _Facts, totals
from reclaim.replay.experiments.recommend.names import Workload
from reclaim.replay.experiments.recommend.series import largest_task
from tests.replay.experiments.recommend.test_series import DAY, HOUR, SLOT, rows_of


def line(tasks: int, request: float | None, recommended: float | None) -> dict[str, Any]:
    """Return a line whose memory is a hundred times its CPU."""
    of: dict[str, Any] = {"tasks": tasks, "kind": "Deployment", "running": True, "absent": False}
    for resource, unit in (("cpu", 1.0), ("memory", 100.0)):
        now, then = (None if value is None else unit * value for value in (request, recommended))
        reclaimable = None if now is None or then is None else now - then
        of[resource] = {"request": now, "requested": now, "recommended": then, "reclaimable": reclaimable}
    return of


def test_totals_by_hand() -> None:
    # 3 tasks give back 1 each and 2 tasks take 2 each; 5 tasks request 0.5 each first; of the others nothing is known
    lines = [
        line(3, 2.0, 1.0), line(2, 1.0, 3.0), line(5, None, 0.5), line(4, 1.0, 1.0), line(9, 7.0, None),
        line(8, None, None),
    ]  # fmt: skip
    requested, reclaimable = 3 * 2.0 + 2 * 1.0 + 4 * 1.0, 3 * 1.0 - 2 * 2.0
    expected = {"changes": 4, "raises": 1, "firsts": 1, "share": pytest.approx(reclaimable / requested)}
    found = totals(lines)
    assert found["cpu"] == expected | {"requested": requested, "reclaimable": reclaimable, "first": 2.5}
    assert found["memory"] == expected | {
        "requested": 100 * requested, "reclaimable": 100 * reclaimable, "first": 250.0,
    }  # fmt: skip
    assert totals([line(5, None, 0.5)])["cpu"]["share"] is None


def test_jobs_pods_and_containers_that_are_over_are_in_no_sum() -> None:
    """Those of a week never ran together; a cron job runs again, and so may a Deployment."""
    over = {"running": False}
    others = [line(1, 2.0, 1.0) | {"kind": "Job"}, line(1, 4.0, 2.0) | over, line(1, 8.0, 4.0) | over | {"kind": None}]
    once = ("Job", "Pod", "Node", "Workflow", "TaskRun")
    lines = [*others, *(line(3, now, 16.0) | over | {"kind": kind} for kind in once for now in (32.0, None))]
    lines += [line(1, 64.0, 64.0) | over | {"absent": True}]
    assert totals(lines)["cpu"] == {
        "requested": 14.0, "reclaimable": 7.0, "share": 0.5, "changes": 3, "raises": 0, "first": 0, "firsts": 0,
    }  # fmt: skip


def test_of_tasks_with_different_requests_the_largest_is_shown_and_the_mean_is_reclaimed_from() -> None:
    cuts = (HOUR, 3 * HOUR)
    rows = rows_of([(0, 0, [1.0] * (DAY // SLOT)), (0, 0, [1.0] * (DAY // SLOT))], cuts=cuts)
    of = lay_out(rows, largest_task(rows), cuts, hold_days=1, seen_days=1)
    k, at = int(of.of(NOW)[0]), RESOURCES.index("cpu")
    largest = of.request[k, at]
    chosen = np.full(of.request.shape, 0.75 * largest)
    lower = _amounts(of, chosen, k, at, np.array([largest, largest / 2, np.nan]))
    assert (lower["request"], lower["change"]) == (largest, -0.25)
    assert lower["requested"] == pytest.approx(0.75 * largest)  # the mean of the two that are known
    assert lower["reclaimable"] == pytest.approx(0.0)
    kept = _amounts(of, of.request, k, at, np.array([largest, largest / 2]))
    assert kept["reclaimable"] == 0.0  # a request that stays changes none of them
    assert _amounts(of, chosen, k, at, np.array([largest] * 3))["reclaimable"] == pytest.approx(0.25 * largest)


def test_the_tasks_of_the_last_day_are_compared_and_those_that_run_to_the_end_are_counted() -> None:
    days, cuts = 3 * DAY // SLOT, (HOUR, 3 * HOUR)
    tasks = [
        (0, 0, [1.0] * days), (0, 0, [7.0] * (days // 3)), (0, 600, [2.0] * (days - 601)), (0, 700, [6.0] * 10),
        (1, 0, [4.0] * days),
    ]  # fmt: skip
    rows = rows_of(tasks, cuts=cuts, kills=[(0, HOUR, 70.0), (0, 5 * HOUR, 70.0)])
    of = lay_out(rows, largest_task(rows), cuts, hold_days=1, seen_days=1)
    facts = _Facts.of(rows, of, of.of(NOW))
    # the second task ended two days before the end, the third one lacks the last window, the fourth ended
    assert [mine.tolist() for mine in facts.tasks] == [[0, 2], [4]]
    assert facts.kills.tolist() == [2, 0]
    assert facts.runs.tolist() == [True, True]
    np.testing.assert_allclose(facts.largest, [[6.0, 60.0], [4.0, 40.0]])
    np.testing.assert_allclose(facts.spread, [[6 / 2, 6 / 2], [1.0, 1.0]])  # of 1, 2 and 6


def test_of_a_workload_that_is_not_running_the_last_day_it_ran_counts_and_of_one_that_used_nothing_no_spread() -> None:
    days, cuts = 3 * DAY // SLOT, (HOUR, 3 * HOUR)
    tasks = [(0, 0, [1.0] * 24), (0, 0, [5.0] * 24), (1, 0, [0.0] * days)]  # the first workload ran for two hours
    rows = rows_of(tasks, cuts=cuts)
    of = lay_out(rows, largest_task(rows), cuts, hold_days=1, seen_days=7)
    facts = _Facts.of(rows, of, of.of(NOW))
    assert [mine.tolist() for mine in facts.tasks] == [[0, 1], [2]]
    assert facts.runs.tolist() == [False, True]
    np.testing.assert_allclose(facts.largest, [[5.0, 50.0], [0.0, 0.0]])
    np.testing.assert_allclose(facts.spread, [[5 / 3, 5 / 3], [np.nan, np.nan]])


def test_a_task_and_the_one_that_replaced_it_count_once() -> None:
    """As at a rollout just before the end, and of a job that runs each five minutes."""
    days, cuts = DAY // SLOT, (HOUR, 3 * HOUR)
    rollout = [(0, 0, [1.0] * (days - 1)), (0, 0, [1.0] * (days - 1)), (0, days - 1, [1.0]), (0, days - 1, [1.0])]
    surge = [(1, 0, [1.0] * (days - 1)), (1, 0, [1.0] * days), (1, days - 2, [1.0] * 2)]  # the last two stay
    rows = rows_of([*rollout, *surge], cuts=cuts)
    of = lay_out(rows, largest_task(rows), cuts, hold_days=1, seen_days=1)
    facts = _Facts.of(rows, of, of.of(NOW))
    assert [mine.tolist() for mine in facts.tasks] == [[2, 3], [4, 5, 6]]  # three ran for five minutes, as in a surge


def test_a_container_is_absent_where_the_pod_that_began_last_runs_without_it() -> None:
    # pods 1 to 3 of one object, by container: pod 1 had both, pod 2 has the second alone
    pods, workloads = [1, 1, 2], [Workload("web", "shop", "Deployment", of) for of in ("old", "app")]
    tasks = [(0, 0, [1.0] * 20), (1, 0, [1.0] * 20), (1, 18, [1.0] * 20)]
    rows = replace(rows_of(tasks), index=np.array(pods))
    assert _absent(rows, workloads).tolist() == [True, False]
    # of another object it says nothing
    assert _absent(rows, [workloads[0], replace(workloads[1], name="cart")]).tolist() == [False, False]
    # a pod that runs for less than ten minutes may not have windows of all containers yet
    short = replace(rows_of([*tasks[:2], (1, 18, [1.0])]), index=np.array(pods))
    assert _absent(short, workloads).tolist() == [False, False]
    # a pod of a set has the name of the one before it, here without the first container
    again = replace(rows_of([(0, 0, [1.0] * 20), (1, 0, [1.0] * 40)]), index=np.array([0, 0]))
    again.scheduled_us[(again.workload == 1) & (again.start_us >= 20 * SLOT)] = 20 * SLOT
    assert _absent(again, workloads).tolist() == [True, False]
    # half a minute before the end of a slot: the last window of the first is filled to that end
    again.scheduled_us[again.scheduled_us > 0] -= SLOT // 10
    assert _absent(again, workloads).tolist() == [True, False]
    # the second one alone began again, and the first goes on
    both = replace(rows_of([(0, 0, [1.0] * 40), (1, 0, [1.0] * 40)]), index=np.array([0, 0]))
    both.scheduled_us[(both.workload == 1) & (both.start_us >= 20 * SLOT)] = 20 * SLOT
    assert _absent(both, workloads).tolist() == [False, False]
    # no later run of a cron job took ten minutes: the containers of those are there, too
    runs = replace(rows_of([(0, 0, [1.0] * 3), (1, 12, [1.0]), (1, 24, [1.0])]), index=np.arange(3))
    assert _absent(runs, workloads).tolist() == [False, False]
