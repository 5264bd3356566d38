"""Alerts on out-of-memory: counted, silenced, and what they catch, by hand; the threshold against brute force."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reclaim.features.groups import RowKeys
from reclaim.training.evaluation.alerts import (
    AlertRows,
    alerts,
    events,
    lowest_threshold,
    score_alerts,
    sorted_rows,
)

MINUTE = 60_000_000
HOUR_S = 3_600


def rows_of(minutes: list[int], probability: list[float], label: list[int], task: list[int] | None = None) -> AlertRows:
    """Return five-minute rows that end at the given minutes, by default of one task."""
    n = len(minutes)
    end_us = np.array(minutes) * MINUTE
    group = np.zeros(n, np.int64)
    keys = RowKeys(group, group, np.array(task or [0] * n), end_us - 5 * MINUTE, end_us)
    return sorted_rows(np.array(probability), np.array(label, np.bool_), keys)


def test_an_alert_is_silent_for_the_horizon_and_only_for_its_own_task() -> None:
    rows = rows_of([0, 30, 59, 60, 130, 10], [0.9] * 6, [0] * 6, task=[0, 0, 0, 0, 0, 1])
    assert alerts(rows, 0.5, HOUR_S).tolist() == [0, 3, 4, 5]
    assert alerts(rows, 0.95, HOUR_S).tolist() == []


def test_rows_are_put_in_order_before_alerts_are_counted() -> None:
    shuffled = rows_of([60, 0, 30], [0.3, 0.1, 0.2], [0, 1, 0])
    assert shuffled.probability.tolist() == [0.1, 0.2, 0.3]
    assert shuffled.label.tolist() == [True, False, False]
    assert shuffled.task_days == pytest.approx(15 / 1440)


def test_an_event_is_an_unbroken_run_of_positive_rows_of_one_task() -> None:
    rows = rows_of([0, 5, 10, 15, 200, 205], [0.1] * 6, [1, 1, 0, 1, 1, 1], task=[0, 0, 0, 0, 0, 1])
    assert events(rows, HOUR_S).tolist() == [0, 0, -1, 1, 2, 3]  # 185 minutes without a row part the third


def test_positive_rows_a_horizon_apart_are_of_one_event_and_those_further_apart_of_two() -> None:
    assert events(rows_of([0, 60, 121], [0.1] * 3, [1, 1, 1]), HOUR_S).tolist() == [0, 0, 1]


def test_recall_precision_and_lead_of_three_tasks_by_hand() -> None:
    # a day of rows five minutes apart; task 0 meets an event (rows 100..110), task 1 another (rows 200..203), 2 none
    n = 288
    probability, label = np.zeros((3, n)), np.zeros((3, n), int)
    label[0, 100:111] = label[1, 200:204] = 1
    probability[0, 103:] = 0.9  # an alert at row 103, the next at 115, 127 … : 16 of them
    probability[2, 50] = 0.8  # one false alert
    task, slot = np.divmod(np.arange(3 * n), n)
    rows = rows_of(list(5 * slot), list(probability.ravel()), list(label.ravel()), task=list(task))
    assert rows.task_days == pytest.approx(3.0)
    assert len(alerts(rows, 0.9, HOUR_S)) == 16
    assert len(alerts(rows, 0.8, HOUR_S)) == 17
    assert lowest_threshold(rows, HOUR_S, 16 / 3 * 1_000) == 0.9
    assert lowest_threshold(rows, HOUR_S, 17 / 3 * 1_000) == 0.8
    scores = score_alerts(rows, HOUR_S)  # at most 0.3 alerts are allowed at 100 per 1,000 task-days: none
    assert scores["events"] == 2
    assert scores["threshold_at_100"] == np.inf
    assert scores["recall_at_100"] == 0
    assert np.isnan(scores["precision_at_100"])

    both = np.concatenate([task, task + 3])  # twice the same, and other tasks that make it 600 task-days:
    twice = rows_of(list(np.tile(5 * slot, 2)), list(np.tile(probability.ravel(), 2)), list(np.tile(label.ravel(), 2)),
                    task=list(both))  # fmt: skip
    scores = score_alerts(replace(twice, task_days=600.0), HOUR_S)  # 100 alerts per 1,000 task-days are 60
    assert scores["alerts_at_100"] == 34  # both copies, at 0.8
    assert scores["recall_at_100"] == 2 / 4
    assert scores["precision_at_100"] == pytest.approx(2 / 34)
    assert scores["lead_s_at_100"] == 7 * 300  # from row 103 to row 110
    assert scores["recall_bound_at_10"] == 1.0  # six alerts could catch four events
    assert score_alerts(replace(twice, task_days=200.0), HOUR_S)["recall_bound_at_10"] == 2 / 4
    assert scores["recall_at_10"] == 0  # six alerts are too few for the first threshold


def test_the_lead_is_at_most_the_horizon_where_events_follow_each_other() -> None:
    rows = rows_of(list(range(0, 300, 5)), [0.9] + [0.1] * 59, [1] * 60)
    scores = score_alerts(replace(rows, task_days=1_000.0), HOUR_S)
    assert scores["lead_s_at_1"] == HOUR_S


def test_every_alert_within_an_event_is_before_an_out_of_memory() -> None:
    rows = rows_of(list(range(0, 300, 5)), [0.9] * 60, [1] * 60)  # one event of five hours, alerted once an hour
    scores = score_alerts(replace(rows, task_days=5_000.0), HOUR_S)
    assert (scores["events"], scores["alerts_at_1"]) == (1, 5)
    assert scores["precision_at_1"] == scores["recall_at_1"] == 1.0


def test_without_events_there_is_no_recall() -> None:
    scores = score_alerts(rows_of([0, 5], [0.1, 0.2], [0, 0]), HOUR_S)
    assert scores["events"] == 0
    assert np.isnan(scores["recall_at_1"])


cell = st.tuples(st.integers(0, 2), st.integers(0, 60), st.sampled_from([0.1, 0.2, 0.3, 0.4]))


@given(st.lists(cell, min_size=1, max_size=30, unique_by=lambda c: c[:2]), st.integers(0, 10))
def test_the_threshold_is_the_lowest_that_keeps_the_rate(cells: list[tuple[int, int, float]], allowed: int) -> None:
    task, slot, probability = (list(column) for column in zip(*cells, strict=True))
    rows = rows_of([5 * k for k in slot], probability, [0] * len(task), task=task)
    counts = {p: len(alerts(rows, p, HOUR_S)) for p in (0.1, 0.2, 0.3, 0.4)}
    expected = min((p for p, n in counts.items() if n <= allowed and p in probability), default=np.inf)
    rate = (allowed + 0.5) * 1_000 / rows.task_days
    assert lowest_threshold(rows, HOUR_S, rate) == expected
