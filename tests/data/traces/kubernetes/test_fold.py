"""Tests of windows and events of hand-made series: runs, ends, limits; what comes later changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reclaim.data import schema as s
from reclaim.data.traces.dialect import parse_dialect
from reclaim.data.traces.history import PIECE_S, RawSeries
from reclaim.data.traces.kubernetes.fold import GONE_US, Fold, Task, _machine, open_limit
from reclaim.data.traces.kubernetes.owners import Facts, Owners, Workload, machine_id
from reclaim.data.traces.kubernetes.series import ContainerKey
from tests.data.traces.kubernetes.histories import (
    APP,
    DIALECT,
    POD,
    T0,
    US,
    Piece,
    Samples,
    beat,
    counter,
    fold,
    one,
    told,
)

GOES_ON = one(POD | {"pod": "other", "container": "app"}, counter(0, PIECE_S, 1.0))
"""Another container, which is there to the end of a piece."""


def test_a_kill_for_memory_is_recorded_with_its_time_and_begins_a_new_run() -> None:
    runs = [one(APP | {"id": "1"}, counter(0, 1000, 1.0)), one(APP | {"id": "2"}, counter(1030, 3000, 1.0))]
    restarts = one(APP | {"uid": "u"}, [*beat(0, 1020, 0, 60), *beat(1020, 7200, 1, 60)])
    reason = one(APP | {"uid": "u", "reason": "OOMKilled"}, beat(1020, 7200, 1, 60))
    ended = one(APP | {"uid": "u"}, beat(1020, 7200, T0 + 1003, 60))
    started = one(APP | {"uid": "u"}, [*beat(0, 1020, T0 - 500, 60), *beat(1020, 7200, T0 + 1015, 60)])
    facts = {"cpu": runs, "restarts": [restarts], "ended_reason": [reason]}
    known = facts | {"started": [started], "ended_time": [ended]}
    _, events, _ = fold(known | {"cpu": [*runs, GOES_ON]})
    kinds = s.EventType
    assert told(events) == [
        (-500, kinds.SCHEDULE, None), (0, kinds.SCHEDULE, None), (1003, kinds.FAIL, True),
        (1015, kinds.SCHEDULE, None), (3000, kinds.KILL, False),
    ]  # fmt: skip
    rows, _, _ = fold(known)
    assert [row[s.SCHEDULED_US] // US - T0 for row in rows[:5]] == [-500, -500, -500, 1015, 1015]
    assert all(row[s.CPU_MEAN] == pytest.approx(1.0) for row in rows)
    # without the time of the end, the start after it is the time
    _, events, _ = fold(facts | {"started": [started]})
    assert (1015, kinds.FAIL, True) in told(events)
    # without any time, the sample that shows it; a series that begins is a run
    rows, events, _ = fold(facts)
    assert (1020, kinds.FAIL, True) in told(events)
    assert [row[s.SCHEDULED_US] // US - T0 for row in rows[:5]] == [0, 0, 0, 1030, 1030]


def one_kill(end_s: float, *, silent: tuple[float, float] = (0, 0), shown: bool = True) -> Piece:
    """Return two pieces of a container that is killed at a time and starts again 45 seconds later.

    The exporter is silent for a span; while the container is down it shows its state, unless ``shown`` is false.
    """
    start_s, of = end_s + 45, APP | {"uid": "u"}
    heard = [time for time, _ in beat(0, 2 * PIECE_S) if not silent[0] <= time < silent[1]]
    after = [time for time in heard if time >= start_s]
    states = [(time, 1.0) for time in heard if end_s <= time < start_s and shown]
    return {
        "cpu": [one(APP | {"id": "1"}, counter(0, end_s, 1.0)), one(APP | {"id": "2"}, counter(start_s, 14400, 1.0))],
        "restarts": [one(of, [(time, float(time >= start_s)) for time in heard])],
        "started": [one(of, [(time, T0 + (start_s if time >= start_s else -500)) for time in heard])],
        "terminated": [one(of | {"reason": "OOMKilled"}, states)] if states else [],
        "ended_reason": [one(of | {"reason": "OOMKilled"}, [(time, 1.0) for time in after])],
        "ended_time": [one(of, [(time, T0 + end_s) for time in after])],
    }


def kills(series: Piece) -> list[float]:
    """Return the times of the kills for memory in two pieces; fails where there is another end."""
    ends = [event for event in told(fold(series, pieces=2)[1]) if event[1] != s.EventType.SCHEDULE]
    assert {event[1:] for event in ends} <= {(s.EventType.FAIL, True)}
    return [event[0] for event in ends]


def test_a_kill_whose_state_a_scrape_sees_is_one_kill() -> None:
    """The state, the restart and its reason say the same end, in one piece or in two."""
    assert kills(one_kill(3593)) == [3593]  # seen at 3600, restarted at 3638
    assert kills(one_kill(PIECE_S - 37)) == [PIECE_S - 30]  # the next piece has the restart, and the end was recorded
    assert kills(one_kill(PIECE_S - 7)) == [PIECE_S - 7]
    # without times of starts and ends
    for end_s, time_s in ((3593, 3660), (PIECE_S - 37, PIECE_S - 30)):
        series = {role: rows for role, rows in one_kill(end_s).items() if role not in ("started", "ended_time")}
        assert kills(series) == [time_s]


@pytest.mark.parametrize("end_s", [3593, PIECE_S - 200])
def test_a_kill_has_its_recorded_time_though_the_container_waits_for_minutes_to_start_again(end_s: float) -> None:
    """A container that fails again and again is started after five minutes; the end is said while it waits."""
    series, of, start_s = one_kill(end_s, shown=False), APP | {"uid": "u"}, end_s + 300
    series["cpu"][1] = one(APP | {"id": "2"}, counter(start_s, 14400, 1.0))
    series["restarts"] = [one(of, [*beat(0, start_s, 0), *beat(np.ceil(start_s / 30) * 30, 2 * PIECE_S)])]
    series["started"] = [one(of, [*beat(0, end_s, T0 - 500), *beat(np.ceil(start_s / 30) * 30, 14400, T0 + start_s)])]
    assert kills(series) == [end_s]
    # said of the end before, by an exporter that has been silent since: the start is nearer
    (said,) = series["ended_time"]
    old = RawSeries(said.labels, said.time_ms[:1] - 600_000, said.value[:1] - 900)
    assert kills(series | {"ended_time": [old]}) == [start_s]


@pytest.mark.parametrize("end_s", [3593, PIECE_S + 100])
def test_a_kill_before_the_exporter_first_sees_its_pod_counts_where_it_lies_within_the_history(end_s: float) -> None:
    series = one_kill(end_s, silent=(0, end_s + 60))
    assert kills(series) == [end_s]
    assert kills({role: rows for role, rows in series.items() if role != "ended_time"}) == [end_s + 45]
    # without either time, nothing says that it was not before the history
    assert kills({role: rows for role, rows in series.items() if role not in ("ended_time", "started")}) == []
    before = APP | {"uid": "u"}
    series |= {role: [one(before, beat(end_s + 60, 2 * PIECE_S, T0 - 500))] for role in ("ended_time", "started")}
    assert kills(series) == []
    # the same kill is known, under a name alone: the exporter began to say uids
    series = one_kill(end_s)
    (count,) = series["restarts"]
    late = count.time_ms >= (T0 + end_s + 600) * 1000
    unnamed = RawSeries(tuple(sorted(APP.items())), count.time_ms[~late], count.value[~late])
    series["restarts"] = [unnamed, RawSeries(count.labels, count.time_ms[late], count.value[late])]
    assert kills(series) == [end_s]


def test_the_last_end_is_told_by_the_state_though_restarts_told_those_before() -> None:
    """A job's container is killed, starts again, and is killed for good; the state is seen both times."""
    series = one_kill(3593)
    (count,) = series["restarts"]
    ended = T0 + 9000
    series["cpu"] = [RawSeries(one.labels, at, one.value[: len(at)]) for one in series["cpu"]
                     if len(at := one.time_ms[one.time_ms < ended * 1000])]  # fmt: skip
    state = one(dict(series["terminated"][0].labels), [(3600, 1.0), (3630, 1.0), *beat(9000, 2 * PIECE_S)])
    assert count.value[-1] == 1
    assert kills(series | {"terminated": [state]}) == [3593, 9000]


def test_a_kill_while_the_exporter_is_silent_has_its_recorded_time_wherever_the_border_of_pieces_is() -> None:
    for silent_s in (2400, PIECE_S - 1200, PIECE_S - 310):
        series = one_kill(silent_s + 300, silent=(silent_s, silent_s + 2400), shown=False)
        assert kills(series) == [silent_s + 300]


@pytest.mark.parametrize("moved_s", [600, 1500])
@pytest.mark.parametrize("until_s", [0, 3 * 60, 2 * PIECE_S])
def test_an_exporter_that_moves_or_has_a_copy_adds_no_end(moved_s: int, until_s: int) -> None:
    """The series of the new address stands before that of the old one, and goes on in the next piece."""
    usage = {"cpu": [one(APP, counter(0, 2 * PIECE_S, 1.0))]}
    counts = [*beat(0, 1020, 0, 60), *beat(1020, 2 * PIECE_S, 1, 60)]
    old = [(time, value) for time, value in counts if time < moved_s + until_s]
    new = [(time, value) for time, value in counts if time >= moved_s]
    labels = [APP | {"uid": "u", "instance": address} for address in ("10.0.0.10:8080", "10.0.0.9:8080")]
    said = [one(labels[0], new), one(labels[1], old)]
    _, events, _ = fold(usage | {"restarts": said}, pieces=2)
    assert [event for event in told(events) if event[1] == s.EventType.FAIL] == [(1020, s.EventType.FAIL, None)]


@pytest.mark.parametrize("memory_s", [15, 20])
def test_a_container_that_goes_on_into_the_next_piece_is_not_started_again(memory_s: int) -> None:
    """Nothing tells its start but its usage; a new id, or an absence, is a start."""
    kinds = s.EventType
    memory = [one(APP, beat(memory_s, 3 * PIECE_S, 1e8))]
    rows, events, _ = fold({"cpu": [one(APP, counter(15, 3 * PIECE_S, 1.0))], "memory": memory}, pieces=3)
    assert told(events) == [(15, kinds.SCHEDULE, None)]
    assert {row[s.SCHEDULED_US] for row in rows} == {(T0 + 15) * US}
    moved = [one(APP | {"job": job}, counter(*span, 1.0)) for job, span in
             (("a", (0, PIECE_S)), ("b", (PIECE_S + 15, 2 * PIECE_S)))]  # fmt: skip
    assert told(fold({"cpu": moved}, pieces=2)[1]) == [(0, kinds.SCHEDULE, None)]  # another scraper sees the same
    other = [one(APP | {"id": name}, counter(*span, 1.0)) for name, span in
             (("1", (0, PIECE_S)), ("2", (PIECE_S + 15, 2 * PIECE_S)))]  # fmt: skip
    assert told(fold({"cpu": other}, pieces=2)[1]) == [(0, kinds.SCHEDULE, None), (PIECE_S + 15, kinds.SCHEDULE, None)]
    absent = [one(APP, [*counter(0, 6000, 1.0), *counter(PIECE_S + 900, 2 * PIECE_S, 1.0)])]
    found = [event[:2] for event in told(fold({"cpu": absent}, pieces=2)[1])]
    assert found == [(0, kinds.SCHEDULE), (6000, kinds.KILL), (PIECE_S + 900, kinds.SCHEDULE)]


@pytest.mark.parametrize("teller", ["started", "started_usage"])
@pytest.mark.parametrize("from_s", [1800, PIECE_S - 1800, PIECE_S - 300])
def test_an_outage_of_scraping_ends_no_container_that_goes_on(from_s: float, teller: str) -> None:
    """Usage is missing for an hour, alone or with all else, within a piece or across a border."""
    kinds, end_s = s.EventType, 2 * PIECE_S

    def outage(samples: Samples) -> Samples:
        return [sample for sample in samples if not from_s <= sample[0] < from_s + 3600]

    for facts in (beat(0, end_s, T0 - 60), outage(beat(0, end_s, T0 - 60))):
        series = {"cpu": [one(APP, outage(counter(0, end_s, 1.0)))], teller: [one(APP, facts)]}
        series["restarts"] = [one(APP | {"uid": "u"}, [(time, 0.0) for time, _ in facts])]
        rows, events, _ = fold(series, pieces=2)
        assert told(events) == [(-60, kinds.SCHEDULE, None)]
        assert {row[s.SCHEDULED_US] for row in rows} == {(T0 - 60) * US}
    # another run is there afterwards
    facts = [(time, T0 + (from_s + 1800 if time >= from_s + 1800 else -60)) for time, _ in beat(0, end_s)]
    _, events, _ = fold(series | {teller: [one(APP, facts)]}, pieces=2)
    assert told(events)[1:] == [(from_s, kinds.KILL, False), (from_s + 1800, kinds.SCHEDULE, None)]
    # nothing but usage tells starts
    _, events, _ = fold({"cpu": series["cpu"]}, pieces=2)
    assert told(events)[1:] == [(from_s, kinds.KILL, False), (from_s + 3600, kinds.SCHEDULE, None)]


@pytest.mark.parametrize("first", ["started", "started_usage"])
def test_a_start_that_two_series_tell_a_second_apart_is_one(first: str) -> None:
    other = {"started": "started_usage", "started_usage": "started"}[first]
    told_by = {
        first: [one(APP, beat(15, 3 * PIECE_S, T0 + 4))],
        other: [one(APP, beat(PIECE_S + 15, 3 * PIECE_S, T0 + 5))],
    }
    rows, events, _ = fold({"cpu": [one(APP, counter(15, 3 * PIECE_S, 1.0))], **told_by}, pieces=3)
    assert told(events) == [(4, s.EventType.SCHEDULE, None)]
    assert {row[s.SCHEDULED_US] for row in rows} == {(T0 + 4) * US}


def test_a_pod_that_moves_leaves_its_windows_on_the_node_where_they_were() -> None:
    """The history up to the move gives the same windows as all of it."""
    spans = {"a": (0, 3600), "b": (3900, PIECE_S)}
    nodes = {name: APP | {"node": name} for name in spans}
    series = {
        "cpu": [one(nodes[name], counter(*span, 1.0)) for name, span in spans.items()],
        "memory": [one(nodes[name], beat(*span, 1e9)) for name, span in spans.items()],
        "allocatable": [
            one({"node": name, "resource": "memory"}, beat(0, PIECE_S, of)) for name, of in (("a", 64e9), ("b", 1.5e9))
        ],
    }
    rows, events, _ = fold(series)
    before = [row for row in rows if row[s.END_US] <= (T0 + 3600) * US]
    assert {(row[s.MACHINE_ID], row[s.MEMORY_LIMIT]) for row in before} == {(machine_id("a"), 2**31)}
    assert {(row[s.MACHINE_ID], row[s.MEMORY_LIMIT]) for row in rows[len(before) :]} == {(machine_id("b"), 1.5e9)}
    starts = [event[s.MACHINE_ID] for event in events if event[s.EVENT_TYPE] == s.EventType.SCHEDULE]
    assert starts == [machine_id("a"), machine_id("b")]
    early = series | {role: series[role][:1] for role in ("cpu", "memory")}
    assert [row for row in fold(early)[0] if row[s.END_US] <= (T0 + 3600) * US] == before


@pytest.mark.parametrize("moved_s", [3900, PIECE_S + 300])
def test_a_pod_whose_usage_names_no_node_is_where_its_listing_says_at_the_time(moved_s: int) -> None:
    """A kubelet's `instance` may be an address, and a pod of a set comes again on another node."""
    spans = {"a": (0, moved_s - 300), "b": (moved_s, 2 * PIECE_S)}
    usage = {name: APP | {"id": f"/{name}", "instance": "10.0.0.1:10250"} for name in spans}
    series = {
        "cpu": [one(usage[name], counter(*span, 1.0)) for name, span in spans.items()],
        "pod": [one(POD | {"uid": name, "node": name}, beat(*span)) for name, span in spans.items()],
    }
    rows, _, made = fold(series, 2)
    there = {row[s.MACHINE_ID] for row in rows if row[s.END_US] <= (T0 + moved_s) * US}
    assert there == {machine_id("a")}
    assert {row[s.MACHINE_ID] for row in rows if row[s.START_US] >= (T0 + moved_s) * US} == {machine_id("b")}
    assert [task.place_at(task.seen_us) for task in made.tasks.values()] == ["b"]


@pytest.mark.parametrize("uids", ["1234", "1111"])
def test_a_pod_that_comes_again_on_an_earlier_node_within_a_piece_is_there_again(uids: str) -> None:
    """Each pod of the name has a listing of its own, or those of one node share a series that names no uid."""
    runs = [("a", 0, 2400), ("b", 2700, 3900), ("a", 4200, 5400), ("b", 5700, PIECE_S)]
    listed: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for (node, low_s, high_s), uid in zip(runs, uids, strict=True):
        listed.setdefault((node, uid), []).extend(beat(low_s, high_s))
    rows, _, _ = fold({
        "cpu": [one(APP | {"id": f"/{k}"}, counter(low, high, 1.0)) for k, (_, low, high) in enumerate(runs)],
        "pod": [one(POD | {"node": node, "uid": uid}, samples) for (node, uid), samples in sorted(listed.items())],
    })  # fmt: skip
    for node, low_s, high_s in runs:
        there = {row[s.MACHINE_ID] for row in rows if low_s <= row[s.START_US] / US - T0 < high_s}
        assert there == {machine_id(node)}


def test_a_pod_whose_node_nothing_names_is_where_it_is_scraped() -> None:
    (row, *_), _, _ = fold({"cpu": [one(APP | {"instance": "10.0.0.7:10250"}, counter(0, PIECE_S, 1.0))]})
    assert row[s.MACHINE_ID] == machine_id("10.0.0.7:10250")


def cart(pod: str = "cart", cluster: str = "", **known: Any) -> Task:
    return Task(1, 2, 3, ContainerKey(cluster, "shop", pod, "app"), Workload(cluster, "shop", "Pod", "cart"), **known)


def of_tasks(*tasks: Task) -> Fold:
    made = Fold(DIALECT, Owners(DIALECT))
    made.tasks = {task.key: task for task in tasks}
    return made


def test_of_two_pods_that_are_one_task_the_one_that_was_seen_last_counts_and_one_without_a_window_is_none() -> None:
    early, late, never = cart("a", seen_us=40), cart("b", seen_us=50), cart("c")
    for tasks in ((early, late, never), (never, late, early)):
        assert of_tasks(*tasks).seen() == {(1, 2): late}
    assert of_tasks(never).seen() == {}


def test_a_task_is_gone_only_where_others_of_its_own_cluster_were_seen_long_after_it() -> None:
    at_us = T0 * US
    tasks = [
        cart("gone", "a", seen_us=at_us - 1), cart("there", "a", seen_us=at_us),
        cart("last", "a", seen_us=at_us + GONE_US), cart("silent", "b", seen_us=at_us - 1), cart("never", "a"),
    ]  # fmt: skip
    events = list(of_tasks(*tasks).ends())
    assert [(event[s.TIME_US], event[s.EVENT_TYPE]) for event in events] == [(at_us - 1, s.EventType.KILL)]
    assert [task.ends_us for task in tasks] == [[at_us - 1], [], [], [], []]


@pytest.mark.parametrize(
    ("facts", "end"),
    [
        (Facts(), s.EventType.KILL), (Facts(completed_s=T0), s.EventType.FINISH),
        (Facts(completed_s=T0 - 3_600), s.EventType.KILL), (Facts(evicted_us=[T0 * US]), s.EventType.EVICT),
        (Facts(completed_s=T0, evicted_us=[T0 * US]), s.EventType.EVICT),
    ],
)  # fmt: skip
def test_a_pod_that_is_gone_was_evicted_or_finished_where_that_was_said_around_its_last_window(
    facts: Facts, end: int
) -> None:
    made = of_tasks(cart(seen_us=T0 * US), cart("other", seen_us=T0 * US + 2 * GONE_US))
    made._owners.pods["", "shop", "cart"] = facts
    assert [event[s.EVENT_TYPE] for event in made.ends()] == [end]


@pytest.mark.parametrize(
    ("kind", "end"),
    [("Job", s.EventType.FINISH), ("CronJob", s.EventType.FINISH), ("Deployment", s.EventType.KILL)],
)
def test_a_pod_of_a_job_that_is_gone_finished(kind: str, end: int) -> None:
    gone = replace(cart(seen_us=T0 * US), workload=Workload("", "shop", kind, "cart"))
    made = of_tasks(gone, cart("other", seen_us=T0 * US + 2 * GONE_US))
    assert [event[s.EVENT_TYPE] for event in made.ends()] == [end]


@pytest.mark.parametrize(
    ("ended_us", "facts", "over"),
    [
        ([], Facts(), False), ([40], Facts(), False), ([60], Facts(), True), ([60, 40], Facts(), True),
        ([], Facts(completed_s=60e-6), True), ([], Facts(completed_s=40e-6), False),
        ([40], Facts(evicted_us=[10, 60]), True), ([40], Facts(evicted_us=[10]), False),
    ],
)  # fmt: skip
def test_a_task_is_over_where_an_end_a_completion_or_an_eviction_came_after_its_last_start(
    ended_us: list[int], facts: Facts, over: bool
) -> None:
    task = cart(starts_us=[20, 50], ends_us=ended_us)
    assert Fold(DIALECT, Owners(DIALECT, {("", "shop", "cart"): facts})).over(task) == over
    assert Fold(DIALECT, Owners(DIALECT)).over(cart(ends_us=[60]))  # its start was not seen


def test_of_what_was_over_before_a_time_a_task_keeps_the_last_run_end_and_node() -> None:
    def forgotten(before_us: int) -> tuple[object, ...]:
        task = cart(
            starts_us=[10, 20, 30], told_by={10: "started", 20: "", 30: "started"}, ends_us=[12, 28],
            places=[(5, "a"), (15, "b"), (40, "c")], restarts={"u": (1.0, 15), "v": (2.0, 30)},
            told_at={"u": 1.0, "v": 2.0},
        )  # fmt: skip
        task.forget(before_us)
        assert list(task.told_by) == task.starts_us
        assert list(task.told_at) == list(task.restarts)
        return task.starts_us, task.ends_us, [node for _, node in task.places], list(task.restarts)

    assert forgotten(10) == ([10, 20, 30], [12, 28], ["a", "b", "c"], ["u", "v"])
    assert forgotten(20) == ([20, 30], [28], ["b", "c"], ["v"])
    assert forgotten(29) == ([20, 30], [28], ["b", "c"], ["v"])
    assert forgotten(50) == ([30], [28], ["c"], [])


def test_a_first_start_that_no_restart_came_before_is_no_end() -> None:
    started = one(APP | {"uid": "u"}, beat(600, PIECE_S, T0 + 600, 60))
    restarts = one(APP | {"uid": "u"}, beat(600, PIECE_S, 0, 60))
    series = {"cpu": [one(APP, counter(600, PIECE_S, 1.0))], "started": [started], "restarts": [restarts]}
    _, events, _ = fold(series)
    assert told(events) == [(600, s.EventType.SCHEDULE, None)]


def test_a_machine_is_named_by_its_cluster_too_only_where_a_node_is_known() -> None:
    assert [_machine("north", "n1"), _machine("", "n1"), _machine("north", "")] == ["north/n1", "n1", ""]


def test_an_error_is_a_failure_that_was_not_out_of_memory_and_an_unknown_end_says_nothing() -> None:
    usage = {"cpu": [one(APP, counter(0, 7200, 1.0))]}
    restarts = [one(APP, [*beat(0, 600, 3, 60), *beat(600, 7200, 4, 60)])]
    for reason, expected in (("Error", False), (None, None), ("OOMKilled", True)):
        said = [one(APP | {"reason": reason}, beat(600, 7200, 1, 60))] if reason else []
        _, events, _ = fold(usage | {"restarts": restarts, "ended_reason": said})
        assert (600, s.EventType.FAIL, expected) in told(events)
    for reason, kind in (("Completed", s.EventType.FINISH), ("Evicted", s.EventType.EVICT)):
        said = [one(APP | {"reason": reason}, beat(600, 7200, 1, 60))]
        _, events, _ = fold(usage | {"restarts": restarts, "ended_reason": said})
        assert (600, kind, False) in told(events)


def test_a_pod_that_is_gone_ended_and_how_is_told_by_what_it_was() -> None:
    usage = {"cpu": [one(APP, counter(0, 3600, 1.0)), GOES_ON]}
    last = 3600.0  # end of the last window

    def end(**roles: RawSeries) -> list[tuple[float, int, bool | None]]:
        _, events, _ = fold(usage | {role: [row] for role, row in roles.items()})
        return told(events)[2:]

    assert end() == [(last, s.EventType.KILL, False)]
    assert end(evicted=one(POD | {"reason": "Evicted"}, beat(3600, 4000))) == [(last, s.EventType.EVICT, False)]
    job = one(POD | {"owner_kind": "Job", "owner_name": "migrate"}, beat(0, 3600))
    assert end(owner=job) == [(last, s.EventType.FINISH, False)]
    of = APP | {"reason": "OOMKilled"}
    killed = {"terminated": one(of, beat(3600, 4000)), "completed": one(POD, beat(3600, 4000, T0 + 3580))}
    assert end(owner=job, **killed) == [(3580, s.EventType.FAIL, True)]  # a job's pod is not restarted
    for seen in ([one(APP, counter(0, 7000, 1.0)), GOES_ON], [one(APP, counter(0, 3600, 1.0))]):
        _, events, _ = fold({"cpu": seen})  # too near to the end of the history; after an hour nothing was scraped
        assert {kind for _, kind, _ in told(events)} == {s.EventType.SCHEDULE}


def test_a_pod_that_is_gone_ended_though_the_next_one_of_its_name_has_a_recorded_end() -> None:
    """The pod of a set is gone at 1800 and comes again at 3000, which is killed at 4000, in the same two hours."""
    runs = [one(APP | {"id": str(at)}, counter(at, past, 1.0)) for at, past in ((0, 1830), (3000, 4000), (4020, 7200))]
    uid = APP | {"uid": "later"}
    restarts = one(uid, [*beat(3000, 4020, 0), *beat(4020, 7200, 1)])
    reason = one(uid | {"reason": "OOMKilled"}, beat(4020, 7200))
    _, events, _ = fold({"cpu": runs, "restarts": [restarts], "ended_reason": [reason]})
    assert [of for of in told(events) if of[1] != s.EventType.SCHEDULE] == [
        (1800, s.EventType.KILL, False), (4020, s.EventType.FAIL, True),
    ]  # fmt: skip


def test_an_eviction_ends_the_pod_that_was_evicted_and_no_other_of_its_name() -> None:
    """Of a set's pod that is gone three times, the second is evicted."""
    runs = [one(APP | {"id": str(at)}, counter(at, past, 1.0)) for at, past in ((0, 1230), (2400, 3630), (4800, 6030))]
    evicted = one(POD | {"reason": "Evicted"}, [*beat(2400, 3600, 0), *beat(3600, 4000)])
    _, events, _ = fold({"cpu": [*runs, GOES_ON], "evicted": [evicted]})
    assert [(at, kind) for at, kind, _ in told(events) if kind != s.EventType.SCHEDULE] == [
        (1200, s.EventType.KILL), (3600, s.EventType.EVICT), (6000, s.EventType.KILL),
    ]  # fmt: skip


def test_a_record_that_comes_after_the_last_window_counts() -> None:
    job = one(POD | {"owner_kind": "Job", "owner_name": "migrate"}, beat(0, 7000))
    late = one(APP | {"reason": "Error"}, beat(7260, 7600))
    _, events, _ = fold({"cpu": [one(APP, counter(0, 7000, 1.0))], "owner": [job], "terminated": [late]}, pieces=2)
    assert [kind for _, kind, _ in told(events)] == [s.EventType.SCHEDULE, s.EventType.FAIL]


def test_a_limit_is_the_enforced_one_else_a_power_of_two_of_what_was_seen_so_far() -> None:
    memory = [one(APP, [*beat(0, 600, 3e8), *beat(600, 900, 6e8), *beat(900, 7200, 1e8)])]
    usage = {"cpu": [one(APP, counter(0, 7200, 0.3))], "memory": memory}
    request = [one(APP | {"resource": "cpu", "unit": "core"}, beat(0, 7200, 1.5))]
    rows, _, _ = fold(usage | {"request": request})
    assert {row[s.CPU_LIMIT] for row in rows} == {2.0}  # at least the request of 1.5
    assert {row[s.CPU_REQUEST] for row in rows} == {1.5}
    assert [row[s.MEMORY_LIMIT] for row in rows[:4]] == [2**30, 2**30, 2**31, 2**31]  # 2 x 3e8, then 2 x 6e8
    assert rows[0][s.MEMORY_REQUEST] is None
    assert rows[0][s.CPU_ENFORCED] is None
    limit = [one(APP | {"resource": "memory", "unit": "byte"}, beat(0, 7200, 7e8))]
    rows, _, _ = fold(usage | {"limit": limit})
    assert {(row[s.MEMORY_LIMIT], row[s.MEMORY_ENFORCED]) for row in rows} == {(7e8, 7e8)}
    node = [one({"node": "n1", "resource": "memory"}, beat(0, 7200, 1.5e9))]
    rows, _, made = fold(usage | {"allocatable": node, "pod": [one(POD | {"node": "n1"}, beat(0, 7200))]})
    assert [row[s.MEMORY_LIMIT] for row in rows[:3]] == [2**30, 2**30, 1.5e9]  # no more than the node allots
    assert made.machines[0][s.MEMORY_CAPACITY] == 1.5e9
    assert {row[s.MACHINE_ID] for row in rows} == {machine_id("n1")}


def test_the_rate_of_samples_is_that_of_cpu_and_unknown_where_there_is_none() -> None:
    (row, *_), _, _ = fold({"cpu": [one(APP, counter(0, 1200, 0.3))], "memory": [one(APP, beat(0, 1200, 9e8, 60))]})
    assert row[s.SAMPLE_RATE_HZ] == pytest.approx(9 / 300)  # between ten samples
    (row, *_), _, _ = fold({"memory": [one(APP, beat(0, 1200, 9e8))]})
    assert row[s.SAMPLE_RATE_HZ] is None


def test_a_limit_of_zero_is_none() -> None:
    """A limit written as 0 is not enforced, and ends one that was."""
    usage = {"cpu": [one(APP, counter(0, PIECE_S, 0.3))], "memory": [one(APP, beat(0, PIECE_S, 3e8))]}
    of_cpu, of_memory = (APP | {"resource": resource} for resource in s.RESOURCES)
    limit = [one(of_cpu, beat(0, PIECE_S, 0)), one(of_memory, [*beat(0, 3600, 7e8), *beat(3600, PIECE_S, 0)])]
    rows, _, _ = fold(usage | {"limit": limit})
    assert {(row[s.CPU_ENFORCED], row[s.CPU_LIMIT]) for row in rows} == {(None, 1.0)}  # 2 x 0.3, as a power of two
    memory = {row[s.END_US] / US - T0: (row[s.MEMORY_ENFORCED], row[s.MEMORY_LIMIT]) for row in rows}
    assert (memory[3300], memory[3900]) == ((7e8, 7e8), (None, 2**30))


REQUEST = APP | {"resource": "memory", "unit": "byte"}


def requests_of(
    said: Sequence[Samples], listed: Samples, *, pieces: int = 1, from_s: float = 0
) -> dict[float, float | None]:
    """Return the memory request of each window, by its end since ``T0``; usage goes on to the end."""
    end = pieces * PIECE_S
    series = {
        "cpu": [one(APP, counter(from_s, end, 0.3))],
        "request": [one(REQUEST | {"instance": str(k)}, samples) for k, samples in enumerate(said) if samples],
        "pod": [one(POD, listed)] if listed else [],
    }
    rows, _, _ = fold(series, pieces)
    return {row[s.END_US] / US - T0: row[s.MEMORY_REQUEST] for row in rows}


def test_a_request_counts_from_its_first_sample_on_and_no_sooner() -> None:
    """A running container was given a request, within a piece and in a later one."""
    for begins, pieces in ((3600, 1), (PIECE_S + 3600, 2)):
        found = requests_of([beat(begins, pieces * PIECE_S, 5e8)], beat(0, pieces * PIECE_S), pieces=pieces)
        assert {end for end, amount in found.items() if amount is None} == {end for end in found if end < begins}
        assert {amount for end, amount in found.items() if end >= begins} == {5e8}


def test_a_container_has_its_request_from_its_start_though_it_is_scraped_a_little_later() -> None:
    assert requests_of([beat(1060, PIECE_S, 5e8)], beat(1060, PIECE_S), from_s=950)[1200] == 5e8
    assert requests_of([beat(1010, PIECE_S, 5e8)], beat(1010, PIECE_S), from_s=810)[900] == 5e8
    assert requests_of([beat(1300, PIECE_S, 5e8)], beat(1300, PIECE_S), from_s=810)[1200] is None


@pytest.mark.parametrize("pieces", [1, 2])
def test_a_request_that_was_removed_ends_while_the_container_goes_on(pieces: int) -> None:
    end = pieces * PIECE_S
    found = requests_of([beat(0, 3600, 5e8)], beat(0, end), pieces=pieces)
    assert {amount for at, amount in found.items() if at <= 3600} == {5e8}
    assert {amount for at, amount in found.items() if at > 3900} == {None}  # the last sample is of 3570
    found = requests_of([beat(0, 3600, 5e8), beat(5400, end, 7e8)], beat(0, end), pieces=pieces)
    assert (found[3600], found[4200], found[5700]) == (5e8, None, 7e8)


@pytest.mark.parametrize("pieces", [1, 2])
def test_a_request_stays_while_its_exporter_is_silent(pieces: int) -> None:
    """Nothing lists the pod either."""
    end = pieces * PIECE_S
    assert set(requests_of([beat(0, 3600, 5e8)], beat(0, 3600), pieces=pieces).values()) == {5e8}
    # it comes back and lists the pod without the request
    found = requests_of([beat(0, 1800, 5e8)], [*beat(0, 1800), *beat(end - 1800, end)], pieces=pieces)
    assert (found[end - 2100], found[end - 1500]) == (5e8, None)
    # a dialect without kube_pod_info: usage goes on
    found = requests_of([beat(0, 3600, 5e8)], [], pieces=pieces)
    assert (found[3600], found[4200]) == (5e8, None)


def test_a_native_sidecar_has_request_limit_and_recorded_kills_as_any_container() -> None:
    """Its exporter lists them apart; a container of its pod and one of another pod keep their own."""
    proxy = POD | {"container": "istio-proxy"}
    series = {
        "cpu": [one(APP, counter(0, PIECE_S, 0.3)), one(proxy | {"id": "1"}, counter(0, 3600, 0.1)),
                one(proxy | {"id": "2"}, counter(3605, PIECE_S, 0.1))],
        "pod": [one(POD, beat(0, PIECE_S))],
        "request": [one(APP | {"resource": "cpu"}, beat(0, PIECE_S, 2.0))],
        "init_request": [one(proxy | {"resource": r}, beat(0, PIECE_S, v)) for r, v in (("cpu", 0.5), ("memory", 1e8))],
        "init_limit": [one(proxy | {"resource": "memory"}, beat(0, PIECE_S, 3e8))],
        "init_restarts": [one(proxy | {"uid": "u"}, [*beat(0, 3620, 0), *beat(3620, PIECE_S, 1)])],
        "init_ended_reason": [one(proxy | {"uid": "u", "reason": "OOMKilled"}, beat(3620, PIECE_S))],
        "init": [one(proxy | {"restart_policy": "Always"}, beat(0, PIECE_S))],
    }  # fmt: skip
    found, events, made = fold(series)
    columns = (s.CPU_REQUEST, s.MEMORY_REQUEST, s.CPU_ENFORCED, s.MEMORY_ENFORCED)
    kinds = {task.collection: task.container_kind for task in made.tasks.values()}
    assert {(kinds[row[s.COLLECTION_ID]], *(row[name] for name in columns)) for row in found} == {
        ("", 2.0, None, None, None), ("sidecar", 0.5, 1e8, None, 3e8),
    }  # fmt: skip
    assert [event for event in told(events) if event[2]] == [(3620, s.EventType.FAIL, True)]


def test_an_init_container_that_runs_once_is_no_sidecar_also_where_its_exporter_is_late() -> None:
    """Usage ends within the first two hours; what it was is said after that."""
    migrate, proxy = POD | {"container": "migrate"}, POD | {"container": "istio-proxy"}
    series = {
        "cpu": [one(migrate, counter(0, 700, 1.0)), one(proxy, counter(0, 2 * PIECE_S, 0.1)),
                one(APP, counter(800, 2 * PIECE_S, 0.3))],
        "init": [one(migrate, beat(PIECE_S + 60, 2 * PIECE_S)),
                 one(proxy | {"container_id": ""}, beat(0, 60)),
                 one(proxy | {"container_id": "x", "restart_policy": "Always"}, beat(60, 2 * PIECE_S))],
    }  # fmt: skip
    _, _, made = fold(series, pieces=2)
    kinds = {task.key.container: task.container_kind for task in made.tasks.values()}
    assert kinds == {"migrate": "init", "istio-proxy": "sidecar", "app": ""}


def test_a_nodes_capacity_changes_when_a_sample_shows_it() -> None:
    """Memory of the node grows after 50 minutes; a limit that it caps does not know that before."""
    node = {"node": "n1", "resource": "memory"}
    series = {
        "cpu": [one(APP, counter(0, 2 * PIECE_S, 0.3))],
        "memory": [one(APP, beat(0, 2 * PIECE_S, 9e8))],
        "pod": [one(POD | {"node": "n1"}, beat(0, 2 * PIECE_S))],
        "allocatable": [
            one(node, [*beat(0, 3000, 1.5e9), *beat(3000, 9000, 1.8e9), *beat(9000, 2 * PIECE_S, 1.6e9)]),
            one(node | {"resource": "cpu"}, [*beat(0, 3000, 4.0), *beat(3000, 2 * PIECE_S, 8.0)]),
        ],
    }
    rows, _, made = fold(series, pieces=2)
    found = [(row[s.TIME_US], row[s.EVENT_TYPE], row[s.MEMORY_CAPACITY], row[s.CPU_CAPACITY]) for row in made.machines]
    kinds = s.MachineEventType
    assert found == [
        (s.BEFORE_TRACE_US, kinds.ADD, 1.5e9, 4.0), ((T0 + 3000) * US, kinds.UPDATE, 1.8e9, 8.0),
        ((T0 + 9000) * US, kinds.UPDATE, 1.6e9, 8.0),
    ]  # fmt: skip
    caps = {row[s.END_US] / US - T0: row[s.MEMORY_LIMIT] for row in rows}
    assert (caps[2700], caps[3000], caps[8700], caps[9000]) == (1.5e9, 1.8e9, 1.8e9, 1.6e9)


def test_the_capacity_of_a_node_without_a_task_is_forgotten_where_it_is_listed_no_more() -> None:
    at = [APP | {"pod": node, "node": node} for node in ("n1", "n2")]
    allotted = [one({"node": of["node"], "resource": "memory"}, beat(0, 600, 1.5e9)) for of in at]
    made = Fold(DIALECT, Owners(DIALECT))
    made.piece({"memory": [one(at[0], beat(0, PIECE_S, 9e8))], "allocatable": allotted}, T0 * US, (T0 + PIECE_S) * US)
    made.forget((T0 + 3600) * US)
    again = {"memory": [one(of, beat(PIECE_S, PIECE_S + 600, 9e8)) for of in at]}
    table, _ = made.piece(again, (T0 + PIECE_S) * US, (T0 + 2 * PIECE_S) * US)
    limits = {(row[s.MACHINE_ID], row[s.MEMORY_LIMIT]) for row in table.to_pylist()}
    assert limits == {(machine_id("n1"), 1.5e9), (machine_id("n2"), 2.0**31)}


def test_a_node_that_is_listed_later_than_the_first_minutes_is_added_then() -> None:
    nodes = [one({"node": n, "resource": "cpu"}, beat(at, PIECE_S, 4)) for n, at in (("n1", 60), ("n2", 3000))]
    _, _, made = fold({"cpu": [one(APP | {"node": "n1"}, counter(0, PIECE_S, 0.3))], "allocatable": nodes})
    found = [(row[s.MACHINE_NAME], row[s.TIME_US], row[s.EVENT_TYPE]) for row in made.machines]
    assert found == [
        ("n1", s.BEFORE_TRACE_US, s.MachineEventType.ADD), ("n2", (T0 + 3000) * US, s.MachineEventType.ADD),
    ]  # fmt: skip


def test_a_collection_was_first_seen_by_the_earliest_window_of_its_tasks() -> None:
    other = APP | {"pod": "cart-7d9f8b6c5x-zzzzz"}
    owner = {"owner_kind": "ReplicaSet", "owner_name": "cart-7d9f8b6c5x"}
    said = [one(labels | owner, beat(0, PIECE_S)) for labels in (APP, other)]
    for late, early in ((APP, other), (other, APP)):
        usage = [one(late, counter(900, PIECE_S, 0.3)), one(early, counter(0, PIECE_S, 0.3))]
        ((first_us, task),) = fold({"cpu": usage, "owner": said})[2].first_seen_us.values()
        assert (first_us, task.key.pod) == (T0 * US, early["pod"])


def test_nodes_of_one_name_in_two_clusters_are_two() -> None:
    text = DIALECT.text.replace('cluster = ""', 'cluster = "cluster"')
    made = Fold(parse_dialect(text, "own"), Owners(parse_dialect(text, "own")))
    nodes = [
        one({"cluster": c, "node": "n", "resource": "cpu"}, beat(0, 600, cores)) for c, cores in (("a", 4), ("b", 8))
    ]
    usage = [one(APP | {"cluster": c, "node": "n"}, counter(0, 600, 0.3)) for c in "ab"]
    table, _ = made.piece({"cpu": usage, "allocatable": nodes}, T0 * US, (T0 + PIECE_S) * US)
    assert [(row[s.MACHINE_NAME], row[s.CPU_CAPACITY]) for row in made.machines] == [("a/n", 4), ("b/n", 8)]
    assert set(table[s.MACHINE_ID].to_pylist()) == {machine_id("a/n"), machine_id("b/n")}


def test_an_exporter_of_before_says_zero_of_every_reason_until_one_is_true() -> None:
    """kube-state-metrics 1.9 exports each reason of an end from a pod's start on."""
    job = one(POD | {"owner_kind": "Job", "owner_name": "migrate"}, beat(0, 3600))
    reasons = [
        one(APP | {"reason": reason}, [*beat(0, 3600, 0), *beat(3600, 4000, reason == "OOMKilled")])
        for reason in ("Completed", "Error", "OOMKilled")
    ]
    series = {"cpu": [one(APP, counter(0, 3600, 1.0))], "owner": [job], "terminated": reasons}
    _, events, _ = fold(series)
    assert told(events)[1:] == [(3600, s.EventType.FAIL, True)]
    restarts = one(APP | {"uid": "u"}, [*beat(0, 1020, 0, 60), *beat(1020, 7200, 1, 60)])
    last = [
        one(APP | {"reason": reason}, [*beat(0, 1020, 0, 60), *beat(1020, 7200, reason == "OOMKilled", 60)])
        for reason in ("Completed", "OOMKilled", "Error")
    ]
    _, events, _ = fold({"cpu": [one(APP, counter(0, 7200, 1.0))], "restarts": [restarts], "ended_reason": last})
    assert (1020, s.EventType.FAIL, True) in told(events)


def test_siblings_share_the_limit_of_what_has_none() -> None:
    other = APP | {"pod": "cart-7d9f8b6c5x-zzzzz"}
    owner = {"owner_kind": "ReplicaSet", "owner_name": "cart-7d9f8b6c5x"}
    said = [one(labels | owner, beat(0, 7200)) for labels in (APP, other)]
    cpu = [
        one(APP, counter(0, 7200, 0.1)),
        one(other, [(t, 0.1 * t + 0.9 * max(t - 900, 0)) for t in range(0, 7200, 30)]),
    ]
    rows, _, _ = fold({"cpu": cpu, "owner": said})
    by_start: dict[int, set[float]] = {}
    for row in rows:
        by_start.setdefault(row[s.START_US], set()).add(row[s.CPU_LIMIT])
    limits = [by_start[key] for key in sorted(by_start)]
    assert limits[:5] == [{0.25}, {0.25}, {0.25}, {2.0}, {2.0}]  # 2 x 0.1, and 2 x 1.0 once the other has used it


@given(st.floats(1e-6, 1e15), st.floats(0, 1e15))
def test_an_open_limit_is_the_smallest_power_of_two(largest: float, request: float) -> None:
    (found,) = open_limit(np.array([request or np.nan]), np.array([largest]))
    least = max(request, 2 * largest)
    assert np.frexp(found)[0] == 0.5
    assert found / 2 < least <= found


@given(st.integers(1, 4), st.lists(st.floats(0.01, 3), min_size=4, max_size=4))
def test_what_comes_later_changes_no_window(pieces: int, cores: list[float]) -> None:
    """A history of fewer pieces has the same windows as the beginning of a longer one."""
    cpu, total = [], 0.0
    for time in range(0, 4 * PIECE_S, 30):
        total += 30 * cores[time // PIECE_S]
        cpu.append((float(time), total))
    series = {"cpu": [one(APP, cpu)], "memory": [one(APP, [(time, 1e8 * (1 + value)) for time, value in cpu])]}
    whole, _, _ = fold(series, pieces=4)
    early, _, _ = fold(series, pieces=pieces)
    assert early == [row for row in whole if row[s.END_US] <= (T0 + pieces * PIECE_S) * US]
