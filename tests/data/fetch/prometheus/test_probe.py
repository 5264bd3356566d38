"""Plan of a fetch: what is counted where, the memory and the time that it takes, and the way of reading."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qs

import numpy as np
import pytest

from reclaim.data.errors import ConfigError
from reclaim.data.fetch.prometheus import probe
from reclaim.data.fetch.prometheus.client import Access, Client
from reclaim.data.fetch.prometheus.probe import Plan, choose, plan
from reclaim.data.traces.dialect import Metric
from reclaim.data.traces.history import PIECE_S, RawSeries
from tests.data.fetch.prometheus.answering import Answer, ok, serving

CPU, REQUEST, PODS = Metric("cpu", "c", needed=True), Metric("request", "r"), Metric("pod", "p")
COUNTS = {
    ("count", "c"): {"14112": 10, "7200": 40, "288": 0}, ("sum", "c"): {"14112": 200, "7200": 800},
    ("count", "r"): {"14112": 0, "7200": 5}, ("sum", "r"): {"7200": 60},
}  # fmt: skip
"""Series and samples of ten minutes, by metric, at 98, 50 and 2 % of two pieces."""
BUILD: Answer = ok({"version": "3.1.0"})


def planned(build: Answer = BUILD) -> Plan:
    """Return the plan of two pieces from the start of Unix time."""

    def respond(path: str, headers: dict[str, str], _: int) -> Answer:
        if path == "/api/v1/status/buildinfo":
            return build
        form = {name: value for name, (value,) in parse_qs(headers["body"]).items()}
        query = form["query"]
        if "count_over_time" not in query:
            return ok({"resultType": "matrix", "result": []})
        function, name = query.partition("(")[0], query.partition("count_over_time(")[2][0]
        found = COUNTS.get((function, name), {}).get(form["time"], 0)
        return ok({"resultType": "vector", "result": [{"metric": {}, "value": [1, str(found)]}] if found else []})

    with serving(respond) as (url, _), Client(Access(url)) as client:
        return plan(client, [CPU, REQUEST, PODS], 0, 2 * PIECE_S, "query")


def test_usage_is_counted_at_three_places_and_the_rest_at_the_first_that_has_any() -> None:
    found = planned()
    # of CPU (200 + 800 + 0) / 3 samples in ten minutes, of which there are 24; of requests 60
    assert [(one.metric, one.series, one.samples) for one in found.found] == [(CPU, 40, 8_000), (REQUEST, 5, 1_440)]
    assert found.missing == (PODS,)
    assert (found.pieces, found.samples, found.n_bytes) == (2, 9_440, 4 * 9_440)
    assert found.transport == "query"


@pytest.mark.parametrize(
    ("build", "server"),
    [(BUILD, "version 3.1.0"), (ok({}), "unknown"), ((403, {}, b"no"), "unknown"), ((504, {}, b""), "unknown")],
)
def test_a_server_that_does_not_say_its_version_is_read_all_the_same(build: Answer, server: str) -> None:
    assert planned(build).server == server


def test_memory_bounds_the_samples_of_a_piece_and_not_those_of_the_history(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "LARGEST_PIECE", 16 * 4_720)
    assert planned().samples / 2 == 4_720
    monkeypatch.setattr(probe, "LARGEST_PIECE", 16 * 4_719)
    with pytest.raises(ConfigError, match="are about 4,720 samples"):
        planned()


def test_where_a_longer_read_takes_no_longer_a_piece_takes_as_long_as_it(monkeypatch: pytest.MonkeyPatch) -> None:
    took_s = {600_000: 5.0, 3_600_000: 2.0}
    now_s = 0.0

    def read(*of: Any, **_: float) -> list[RawSeries]:
        nonlocal now_s
        now_s += took_s[of[-1] - of[-2]]
        return [RawSeries((), np.arange(30), np.zeros(30))]

    monkeypatch.setattr(probe, "read_series", read)
    monkeypatch.setattr("reclaim.data.fetch.prometheus.probe.time.perf_counter", lambda: now_s)
    # 2 s for the 60 samples of a piece, twice as many as of the hour
    with Client(Access("http://127.0.0.1:1")) as client:
        assert probe._seconds_of_sample(client, CPU, "query", PIECE_S, 1.0) == pytest.approx(2 / 60)


def test_ways_of_reading_are_tried_on_a_moment_in_the_middle_of_the_range() -> None:
    answer = ok({"resultType": "matrix", "result": []})
    with serving(lambda *_: answer) as (url, came), Client(Access(url)) as client:
        assert choose(client, CPU, 0, 2 * PIECE_S, "query") == "query"
    (asked,) = (parse_qs(one["body"]) for one in came)
    assert asked["query"] == ["c{}[1000ms]"]
    assert asked["time"] == [f"{PIECE_S}.999"]


def test_a_transport_that_the_server_forbids_is_to_be_left_out() -> None:
    with (
        serving(lambda *_: (403, {}, b"no remote read")) as (url, _),
        Client(Access(url)) as client,
        pytest.raises(ConfigError, match=r"has no --transport samples \(.*no remote read.*\); leave it out"),
    ):
        choose(client, CPU, 0, PIECE_S, "samples")


def test_of_many_clusters_the_first_five_are_named_and_the_last_can_be_chosen() -> None:
    groups = [{"metric": {"cluster": name} if name else {}, "value": [1, "1"]} for name in ["b", "", *"acdef"]]
    answer = ok({"resultType": "vector", "result": groups})
    named = r"7 clusters by the label cluster \(\(none\), a, b, c, d, …\); .* Choose one by --cluster cluster=f, or"
    with serving(lambda *_: answer) as (url, _), Client(Access(url)) as client:
        with pytest.raises(ConfigError, match=named):
            probe._check_one_cluster(client, CPU, 0, PIECE_S, ("cluster",))
        probe._check_one_cluster(client, CPU, 0, PIECE_S, ("other",))
