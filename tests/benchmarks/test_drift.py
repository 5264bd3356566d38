"""The benchmark of drift: a budget is kept again from the first whole day on, and new tasks arrive as its words say."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.drift import a_kind_arrives, by_part
from reclaim.data import schema as s

HOUR_US = 3_600_000_000
SLOT_US = 300_000_000


@pytest.mark.parametrize(("hours", "back_h"), [(30, 6), (28, None), (24, None)])
def test_a_day_that_the_end_of_the_record_cuts_short_is_no_whole_day(hours: int, back_h: int | None) -> None:
    start_us = np.arange(-6 * HOUR_US, hours * HOUR_US, SLOT_US)
    need = np.where((start_us >= 0) & (start_us < 6 * HOUR_US), 0.9, 0.1)  # violated in the first six hours alone
    alike = np.ones(len(start_us))
    for since_us in (start_us, start_us + SLOT_US - 1):  # of machines, and of tasks
        found = by_part(since_us, need, alike, {"set": 0.5 * alike}, 0.01, least=0.0)
        assert found["set"]["back_h"] == back_h
        assert found["hours"][:2] == [-6, 0]
        assert found["answers"][-1] == 12 * (hours % 6 or 6)


def test_copies_of_tasks_that_run_arrive_within_half_a_day_and_others_not_before_the_task_that_they_copy() -> None:
    change_us, collections = 100 * HOUR_US, 400
    begin_us = np.where(np.arange(collections) % 2 == 0, 90, 130) * HOUR_US  # before the change, and 30 hours after it
    slots = np.arange(60 * 12)
    shape = (collections, len(slots))
    start_us = (begin_us[:, None] + slots * SLOT_US).reshape(-1)
    share = np.full(len(start_us), 0.5)
    columns = {
        s.COLLECTION_ID: np.repeat(np.arange(collections), len(slots)), s.INSTANCE_INDEX: np.zeros(len(share), int),
        s.START_US: start_us, s.END_US: start_us + SLOT_US, s.SCHEDULED_US: np.repeat(begin_us, len(slots)),
        **dict.fromkeys((s.CPU_LIMIT, s.MEMORY_LIMIT), 2 * share),
        **dict.fromkeys((s.CPU_MEAN, s.CPU_MAX, s.CPU_SAMPLE, s.MEMORY_MEAN, s.MEMORY_MAX, s.PAGE_CACHE), share),
        **dict.fromkeys((s.CPU_PERCENTILES, s.CPU_TAIL_PERCENTILES), share[:, None]),
    }  # fmt: skip
    found = a_kind_arrives(columns, change_us, np.random.default_rng(1))
    new = found[s.COLLECTION_ID] >= 2**50
    assert len(found[s.START_US]) - new.sum() == np.prod(shape)
    copied, first = np.unique(found[s.COLLECTION_ID][new], return_index=True)
    arrived_us, ran = found[s.START_US][new][first], (copied - 2**50) % 2 == 0
    assert 0.15 < len(copied) / collections < 0.25
    assert (found[s.SCHEDULED_US][new][first] == arrived_us).all()
    assert ((arrived_us >= change_us) & (arrived_us < change_us + 12 * HOUR_US))[ran].all()
    assert (arrived_us == 130 * HOUR_US)[~ran].all()
    assert found[s.CPU_MEAN][new].min() == pytest.approx(0.15)
    assert 0.6 < found[s.CPU_MEAN][new].max() < 0.95
