"""Facts about tasks, by hand: gaps next to restarts, and what events of unknown limits and times count for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reclaim.data import schema as s
from reclaim.data.ingest.job import IngestConfig, ingest
from reclaim.data.survey.facts import survey

Make = Callable[..., dict[str, Any]]
Found = Callable[..., dict[str, Any]]


@pytest.fixture
def found(tmp_path: Path, window: Make, write_shard: Callable[..., Path]) -> Found:
    """Return a maker of the facts of a cell of a few windows and events; by default one window."""

    def facts(*events: dict[str, Any], windows: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        rows = {"instance_usage-0": [window(600)] if windows is None else windows, "instance_events-0": list(events)}
        for name in rows:
            if rows[name]:
                write_shard(tmp_path / "cell", name, rows[name])
        return survey(ingest(tmp_path / "cell", tmp_path / "dataset", IngestConfig(buckets=1)).dataset)

    return facts


def limit(cpus: float) -> dict[str, Any]:
    return {"resource_request": {"cpus": cpus, "memory": 0.5}}


def test_a_restart_without_a_gap_is_no_gap_between_runs(found: Found, window: Make, event: Make) -> None:
    windows = found(event(600, 3), event(900, 4), event(900, 3), windows=[window(600), window(900)])["windows"]
    assert (windows["restarts"], windows["gaps"], windows["gaps_between_runs"]) == (1, 0, 0)


def test_windows_that_all_overlap_have_no_longest_gap(found: Found, window: Make, event: Make) -> None:
    rows = [window(600, end_time="1200000000"), window(900), window(1000)]
    windows = found(event(600, 3), windows=rows)["windows"]
    assert (windows["overlapping"], windows["missing_hours"], windows["longest_gap_hours"]) == (2, 0, 0)


def test_an_event_without_a_limit_neither_changes_it_nor_hides_a_change(found: Found, event: Make) -> None:
    unknown = event(700, 10, resource_request=None)
    same, other = event(800, 10, **limit(0.3)), event(900, 10, **limit(0.4))
    tasks = found(event(600, 3, **limit(0.3)), unknown, same, event(850, 10, resource_request=None), other)["tasks"]
    assert (tasks["limit_changes"], tasks["tasks_with_limit_changes"], tasks["most_limit_changes"]) == (1, 1, 1)


def test_events_of_one_time_change_the_limit_in_the_order_in_which_they_hold(found: Found, event: Make) -> None:
    # 0.3, then 0.5 and 0.4 within one second, then 0.4 again
    tasks = found(
        event(500, 0, **limit(0.3)), event(600, 0, **limit(0.5)), event(600, 3, **limit(0.4)),
        event(700, 10, **limit(0.4)),
    )["tasks"]  # fmt: skip
    assert tasks["limit_changes"] == 2


def test_an_event_after_the_trace_does_not_lengthen_a_life_and_is_counted_as_such(found: Found, event: Make) -> None:
    after = event(600, 6) | {"time": str(s.AFTER_TRACE_US)}
    facts = found(event(0, 0), event(600, 3), after)
    assert facts["tasks"]["lifetime_hours"]["p100"] == pytest.approx(300 / 3600)
    counts = {row["event"]: (row["before"], row["after"]) for row in facts["events"]["types"]}
    assert counts == {"SUBMIT": (1, 0), "SCHEDULE": (0, 0), "FINISH": (0, 1)}


def test_collections_are_counted_by_their_number_of_tasks_both_ends_of_a_band_included(
    found: Found, event: Make
) -> None:
    sizes = {1: 1, 2: 1, 3: 2, 4: 10, 5: 11, 6: 100, 7: 101}
    events = [
        event(600, 3, collection_id=str(collection), instance_index=str(index))
        for collection, size in sizes.items() for index in range(size)
    ]  # fmt: skip
    collections = found(*events, windows=[])["collections"]
    assert [(band["from"], band["to"], band["collections"]) for band in collections["sizes"]] == [
        (1, 1, 2), (2, 10, 2), (11, 100, 2), (101, 1000, 1), (1001, None, 0),
    ]  # fmt: skip
    assert (collections["with_tasks"], collections["distinct"], collections["largest"]) == (7, 7, 101)


def test_a_task_of_several_placement_constraints_counts_once_and_each_of_them_by_its_relation(
    found: Found, event: Make
) -> None:
    def of(*relations: str) -> dict[str, Any]:
        return {"constraint": [{"name": "o/", "value": str(k), "relation": r} for k, r in enumerate(relations)]}

    constrained = found(
        event(600, 3, **of("5", "4")), event(600, 3, instance_index="1", **of("5")), event(600, 3, instance_index="2")
    )["tasks"]["constrained"]
    assert constrained["tasks"] == 2
    assert constrained["relations"] == {s.RELATIONS[4]: 1, s.RELATIONS[5]: 2}


def test_without_any_event_it_is_unknown_and_not_zero_how_many_tasks_ran_out_of_memory(found: Found) -> None:
    assert found()["tasks"]["oom_ends"] is None


def test_without_a_failure_no_task_ran_out_of_memory(found: Found, event: Make) -> None:
    assert found(event(600, 3))["tasks"]["oom_ends"] == 0
