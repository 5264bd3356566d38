"""Tests of series by container: labels that were renamed, and which of several scrapers is taken."""

from __future__ import annotations

import pytest

from reclaim.data import schema as s
from reclaim.data.traces.history import PIECE_S
from reclaim.data.traces.kubernetes.series import by_container
from tests.data.traces.kubernetes.histories import APP, DIALECT, POD, beat, counter, fold, one


def test_labels_that_a_scrape_renamed_are_read() -> None:
    """Without `honor_labels`, the namespace and pod of kube-state-metrics stand where the pod's should."""
    renamed = {"exported_namespace": "shop", "exported_pod": POD["pod"], "exported_container": "app",
               "namespace": "monitoring", "pod": "kube-state-metrics-0", "container": "kube-state-metrics"}  # fmt: skip
    usage = {"cpu": [one(APP, counter(0, 7200, 0.3))]}
    owner = one(renamed | {"owner_kind": "DaemonSet", "owner_name": "agent"}, beat(0, 7200))
    request = one(renamed | {"resource": "cpu"}, beat(0, 7200, 1.5))
    rows, _, made = fold(usage | {"owner": [owner], "request": [request]})
    assert {row[s.CPU_REQUEST] for row in rows} == {1.5}
    assert [task.workload.kind for task in made.tasks.values()] == ["DaemonSet"]


def test_usage_of_a_whole_pod_is_of_no_container() -> None:
    """The cgroup of a pod is measured, too: it has no container, and would be added to those of its own."""
    alone = {"cpu": [one(APP, counter(0, 3600, 0.5))]}
    both = {"cpu": [*alone["cpu"], one(POD, counter(0, 3600, 0.7)), one(POD | {"container": ""}, counter(0, 3600, 1))]}
    assert by_container(both["cpu"], DIALECT) == by_container(alone["cpu"], DIALECT)
    assert fold(both)[0] == fold(alone)[0]


def test_of_several_scrapers_one_is_taken_and_they_are_not_added() -> None:
    kubelet = APP | {"job": "kubelet", "metrics_path": "/metrics/cadvisor"}
    other = APP | {"job": "cadvisor", "metrics_path": "/metrics"}
    pair = [kubelet | {"prometheus_replica": name} for name in "ab"]
    dense, sparse = counter(0, 3600, 0.5, 15), counter(0, 3600, 0.5, 60)
    (first, *_), _, _ = fold({"cpu": [one(other, dense), one(kubelet, sparse)]})
    assert first[s.CPU_MEAN] == pytest.approx(0.5)
    assert first[s.SAMPLE_RATE_HZ] == pytest.approx(4 / 300)  # the kubelet's, though the other has more samples
    (first, *_), _, _ = fold({"cpu": [one(pair[0], sparse), one(pair[1], dense)]})
    assert first[s.CPU_MEAN] == pytest.approx(0.5)
    assert first[s.SAMPLE_RATE_HZ] == pytest.approx(19 / 300)


def test_of_scrapers_that_follow_each_other_both_count_and_of_a_pair_one() -> None:
    """A job that was renamed after an hour, and a second server that began then."""
    named = {name: APP | {"job": name} for name in ("kubelet", "cadvisor")}
    before, after = counter(0, 3600, 0.5), [(time, 7 + 0.5 * time) for time in range(3610, 7200, 30)]
    rows, _, _ = fold({"cpu": [one(named["kubelet"], before), one(named["cadvisor"], after)]})
    assert len(rows) == 23  # the five minutes before the change are those of neither
    assert {round(row[s.CPU_MEAN], 9) for row in rows} == {0.5}
    pair = [one(named["kubelet"], counter(0, 7200, 0.5)), one(named["cadvisor"], after)]
    assert fold({"cpu": pair})[0] == fold({"cpu": pair[:1]})[0]
    told = {"restarts": [one(named["kubelet"], beat(0, 3600)), one(named["cadvisor"], [(4000.0, 2.0)])]}
    _, events, _ = fold({"cpu": pair[:1]} | told)
    assert s.EventType.FAIL in {event[s.EVENT_TYPE] for event in events}  # though the other said more often that not


@pytest.mark.parametrize("renamed_s", [3600, PIECE_S + 3600])
@pytest.mark.parametrize("silent_s", [10, 400])
def test_a_run_goes_on_where_its_scraper_is_renamed(renamed_s: int, silent_s: int) -> None:
    """In the first piece as in a later one, though no metric says when it started; it is one run of one start."""
    before = one(APP | {"job": "kubelet"}, counter(0, renamed_s, 0.5))
    after = [(time, 7 + 0.5 * time) for time in range(renamed_s + silent_s, 2 * PIECE_S, 30)]
    rows, events, _ = fold({"cpu": [before, one(APP | {"job": "cadvisor"}, after)]}, pieces=2)
    assert [event[s.EVENT_TYPE] for event in events] == [s.EventType.SCHEDULE]
    assert len({row[s.SCHEDULED_US] for row in rows}) == 1


CGROUP = APP | {"id": "/kubepods/pod1/c1", "name": "c1", "cpu": "total"}


@pytest.mark.parametrize("named", [CGROUP, APP | {"cpu": "total"}])  # some drop the cgroup's labels to store less
def test_of_copies_by_a_label_that_the_dialect_does_not_list_one_counts_and_the_label_is_named(
    named: dict[str, str],
) -> None:
    """Each copy has the container's whole usage: added up, it would be twice as much."""
    pair = [one(named | {"server": name}, counter(11 * k, 7200, 0.1)) for k, name in enumerate("ab")]
    alone, events, _ = fold({"cpu": pair[:1]})
    rows, of_both, made = fold({"cpu": pair})
    assert (rows, of_both) == (alone, events)
    assert [task.twice for task in made.tasks.values()] == ["server"]
    early = one(named | {"server": "c"}, counter(0, 60, 0.1))
    assert fold({"cpu": [pair[0], early, pair[1]]})[0] == alone
    unnamed = [one(named, counter(0, 7200, 0.1)), one(named | {"server": "a"}, counter(30, 7200, 0.1))]
    assert {round(row[s.CPU_MEAN], 9) for row in fold({"cpu": unnamed})[0]} == {0.1}


def test_a_copy_counts_where_the_other_one_is_silent() -> None:
    first = one(CGROUP | {"server": "a"}, counter(0, 3600, 0.1))
    second = one(CGROUP | {"server": "b"}, [(time, 7 + 0.1 * time) for time in range(1810, 7200, 30)])
    rows, events, _ = fold({"cpu": [first, second]})
    assert len(rows) == 24
    assert {round(row[s.CPU_MEAN], 9) for row in rows} == {0.1}
    assert [event[s.EVENT_TYPE] for event in events] == [s.EventType.SCHEDULE]  # a run of one container, by its cgroup


def test_in_the_next_piece_the_same_copy_counts_though_the_other_has_more_samples() -> None:
    sparse = [*counter(0, PIECE_S, 0.1, 30), *counter(PIECE_S, 2 * PIECE_S, 0.1, 60)]
    more = counter(10, 2 * PIECE_S, 0.1, 30)
    rows, _, _ = fold({"cpu": [one(CGROUP | {"server": "a"}, sparse), one(CGROUP | {"server": "b"}, more)]}, pieces=2)
    rates = [row[s.SAMPLE_RATE_HZ] for row in rows]
    half = len(rates) // 2
    assert rates[1:half] == pytest.approx([10 / 300] * (half - 1))
    assert rates[half:-1] == pytest.approx([5 / 300] * (half - 1))


def test_series_of_cores_or_of_a_restart_and_a_label_that_changes_are_no_copies() -> None:
    of = ({"cpu": "cpu00"}, {"cpu": "cpu01"}, {"id": "/kubepods/pod1/c2", "name": "c2"})
    (row, *_), _, _ = fold({"cpu": [one(CGROUP | more, counter(0, 7200, 0.1)) for more in of]})
    assert row[s.CPU_MEAN] == pytest.approx(0.3)
    labelled = [one(CGROUP, counter(0, 3600, 0.1)), one(CGROUP | {"team": "a"}, counter(3540, 7200, 0.1))]
    rows, _, made = fold({"cpu": labelled})  # two scrapers, one of which had its new label a minute later
    assert len(rows) == 24
    assert [task.twice for task in made.tasks.values()] == [""]
    labelled[1] = one(CGROUP | {"team": "a"}, counter(3400, 7200, 0.1))  # both are there for 170 s, over half a window
    assert [task.twice for task in fold({"cpu": labelled})[2].tasks.values()] == ["team"]
