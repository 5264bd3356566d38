"""Acknowledgements of writes: the outcomes that they say, and the durability that they promise."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import numpy as np
import pytest

from reclaim.data.errors import StoreError
from reclaim.serving.wire.errors import UNAVAILABLE
from reclaim.serving.wire.rows import Refusals, UsageRows
from reclaim.serving.writing import queue
from tests.serving.cell_fixtures import usage_rows, windows_of
from tests.serving.patience import PATIENCE_S
from tests.serving.writing.running import Service, in_parts_of, refused_with


def test_a_bulk_write_is_acknowledged_only_once_all_of_it_is_on_the_disk(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> NoReturn:
        raise StoreError("the disk does not sync")

    monkeypatch.setattr(queue, "_SMALL_ROWS", 3)
    in_parts_of(2, monkeypatch)
    told = [{"task": task} for task in range(5)]
    with monkeypatch.context() as patch:
        patch.setattr(service.store, "sync", fails)
        refused_with(UNAVAILABLE, "not_stored", lambda: service.told(*told))
    assert service.told(*told).repeated == 5


def test_a_bulk_write_out_of_order_says_of_each_window_whether_its_task_is_inside_an_alloc_instance(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "_SMALL_ROWS", 1)
    windows = windows_of({"task": 1, "at": 2}, {"task": 2, "at": 1}, {"task": 3, "at": 0})
    rows = usage_rows(windows, np.array([1, 0, 0], np.int8))
    assert service.writer.write(rows).result(PATIENCE_S).taken == 3
    known = service.tracker.look(np.array([[1, 0], [2, 0], [3, 0]]))
    assert known.task["in_alloc"].tolist() == [True, False, False]


def test_facts_that_are_refused_are_not_among_those_that_are_taken(service: Service) -> None:
    service.told({"task": 1, "at": 0})
    answer = service.facts({"task": 1, "limit": 2.0}, {"task": 2, "limit": 1.0, "since_us": 2**50})
    assert (answer.rows, answer.taken, answer.refused) == (2, 1, {"in_the_future": 1})


def test_windows_that_cannot_be_read_are_counted_as_refused(start: Callable[..., Service]) -> None:
    service = start(None)
    refusals = Refusals()
    refusals.add("invalid_field", np.array([1, 2]), "must be a number")
    rows = UsageRows(windows_of({"task": 1}), np.array([-1], np.int8), np.array([0]), 3, refusals)
    answer = service.writer.write(rows).result(PATIENCE_S)
    assert (answer.rows, answer.taken, answer.refused) == (3, 1, {"invalid_field": 2})
    assert 'reclaim_windows_total{outcome="refused"} 2.0' in service.writer._metrics.text()
