"""The picture of a workload: its last two weeks, by hand."""

from __future__ import annotations

import numpy as np

from reclaim.replay.experiments.recommend.decisions import lay_out
from reclaim.replay.experiments.recommend.picture import BINS, FULL, Pictures, svg_of
from reclaim.replay.experiments.recommend.series import largest_task
from tests.replay.experiments.recommend.test_series import DAY, HOUR, SLOT, rows_of

DAYS = 16
PER_DAY = DAY // SLOT


def pictures(cpu: np.ndarray, cuts: tuple[int, int], kills: list[tuple[int, int, float]]) -> Pictures:
    """Return the pictures of one workload of one task over 16 days, whose requests are 1, 2, … in order of time."""
    rows = rows_of([(0, 0, cpu.tolist())], cuts=cuts, kills=kills)
    series = largest_task(rows)
    decisions = lay_out(rows, series, cuts, hold_days=6, seen_days=1)
    requests = np.tile(np.arange(1.0, len(decisions) + 1)[:, None], 2)
    return Pictures.draw(rows, series, decisions, requests)


def test_a_picture_has_the_largest_usage_of_each_four_hours_and_what_was_set_and_killed_in_its_two_weeks() -> None:
    cpu = np.full(DAYS * PER_DAY, 1.0)
    begins = 2 * PER_DAY  # two weeks before the end
    cpu[begins - 1] = 7.0  # ends with the beginning, so it lies before it
    cpu[begins + 48 - 1] = 5.0  # ends with the first four hours, to which it belongs
    cpu[-1] = 8.0
    # the test begins at 1 day, a day before the picture; requests are set there, at 7 and at 13 days
    kills = [(0, 2 * DAY, 70.0), (0, 2 * DAY + 6 * HOUR, 70.0)]
    drawn = pictures(cpu, (12 * HOUR, DAY), kills)
    found = drawn.of(0, 0)
    # the request of now is 4, half of the limit; the largest thing drawn is the usage of 8
    assert found["usage"] == [5 * FULL // 8, *[FULL // 8] * (BINS - 2), FULL]
    assert found["request"] == FULL // 2
    assert found["held"] == [[0.0, 2 * FULL // 8], [30.0, 3 * FULL // 8], [66.0, 4 * FULL // 8]]
    assert found["next"] == 5 * FULL // 8
    assert found["killed"] == []
    assert drawn.of(0, 1)["killed"] == [1.5]  # the first one came with the beginning


def test_a_picture_of_nothing_has_no_scale() -> None:
    cpu = np.zeros(DAYS * PER_DAY)
    rows = rows_of([(0, 0, cpu.tolist())], cuts=(12 * HOUR, DAY))
    rows.request[:] = 0.0
    series = largest_task(rows)
    decisions = lay_out(rows, series, (12 * HOUR, DAY), hold_days=30, seen_days=1)
    drawn = Pictures.draw(rows, series, decisions, np.zeros((len(decisions), 2)))
    found = drawn.of(0, 0)
    assert set(found["usage"]) == {None}
    assert (found["request"], found["next"]) == (None, None)


def test_the_highest_thing_is_drawn_at_the_top_and_each_place_two_units_after_the_one_before() -> None:
    usage = [FULL, None, 0, *[None] * (BINS - 3)]
    drawn = svg_of({"usage": usage, "request": 0, "held": [[3, FULL], [10, 0]], "next": None, "killed": []}, "web")
    assert drawn.count("<polygon") == 2  # with a gap between them
    assert 'points="1,30 1,1 1,30"' in drawn
    assert 'points="5,30 5,29 5,30"' in drawn
    assert 'd="M6 1H20V29H168"' in drawn
    assert f'd="M0 29H{2 * BINS}"' in drawn
