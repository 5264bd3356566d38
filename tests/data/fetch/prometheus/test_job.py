"""Fetch of a history: what makes it one, how it goes on, what it lacks, and the options of it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from reclaim.cli.app import app
from reclaim.cli.results import of_history
from reclaim.data.errors import ConfigError, TraceError
from reclaim.data.fetch.prometheus import job
from reclaim.data.fetch.prometheus.client import Access, Client
from reclaim.data.fetch.prometheus.job import HistoryConfig, fetch_history
from reclaim.data.fetch.prometheus.probe import choose
from reclaim.data.traces.dialect import load_dialect
from reclaim.data.traces.history import RawSeries
from tests.data.fetch.prometheus.answering import Answer, of_plan, ok, serving


def _of_clusters(values: list[dict[str, str]], path: str, headers: dict[str, str], _: int) -> Answer:
    if path != "/api/v1/query":
        return 404, {}, b"not here"
    chosen = [of for of in values if "cluster%3D%22eu-1%22" not in headers["body"] or of.get("cluster") == "eu-1"]
    if "count+by" in headers["body"]:
        return ok({"resultType": "vector", "result": [{"metric": of, "value": [1, "3"]} for of in chosen]})
    return ok({"resultType": "matrix", "result": [{"metric": {}, "value": [1, "3"], "values": [[1_793_577_500, "1"]]}]})


def test_a_server_that_answers_no_query_in_time_is_named(tmp_path: Path) -> None:
    late = pytest.raises(TraceError, match=r"does not answer the smallest query.*run again later")
    with serving(lambda *_: (504, {}, b"")) as (url, _), late:
        fetch_history(HistoryConfig(Access(url), end="2026-11-02"), tmp_path / "out")


def test_a_server_that_is_no_prometheus_is_named(tmp_path: Path) -> None:
    none = pytest.raises(ConfigError, match=r"no Prometheus API there.*check --url")
    with serving(lambda *_: (200, {}, b"<html>login</html>")) as (url, _), none:
        fetch_history(HistoryConfig(Access(url), end="2026-11-02"), tmp_path / "out")


def test_an_answer_in_part_ends_a_fetch_and_keeps_the_pieces_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A querier over many servers, one of which goes down while the second piece is read."""
    monkeypatch.setattr(job, "PIECES_AT_ONCE", 1)
    start_s = 1_793_570_400  # 2026-11-01 22:00 UTC, the second piece of two
    reads: list[str] = []

    def respond(path: str, headers: dict[str, str], _: int) -> Answer:
        if (answer := of_plan(path, headers)) is not None:
            return answer
        reads.append(headers["body"])
        labels = {"__name__": "x", "pod": "a", "container": "b"}
        down = {"warnings": ["store b is down"]} if "time=1793577599.999" in reads[-1] and len(reads) > 10 else {}
        return ok({"resultType": "matrix", "result": [{"metric": labels, "values": [[start_s - 10, "1"]]}]}, **down)

    with serving(respond) as (url, _):
        config = HistoryConfig(Access(url), days=1 / 6, end="2026-11-02", transport="query")
        with pytest.raises(TraceError, match=r"answers only in part: store b is down;.* Run again to continue"):
            fetch_history(config, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out" / "samples").iterdir()] == ["2026-11-01T20.parquet"]


def test_a_history_goes_on_from_no_other_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two clusters with series of the same metric at the same times, and other pods."""
    monkeypatch.setattr(job, "PIECES_AT_ONCE", 1)
    past_s = 1_793_577_600  # 2026-11-02

    def respond(pod: str, path: str, headers: dict[str, str], _: int) -> Answer:
        if (answer := of_plan(path, headers)) is not None:
            return answer
        values = [[moment, "1"] for moment in range(past_s - 14_400, past_s, 60)]
        return ok({"resultType": "matrix", "result": [{"metric": {"pod": pod, "container": "b"}, "values": values}]})

    out = tmp_path / "out"
    with serving(partial(respond, "a")) as (url, _), serving(partial(respond, "z")) as (other, _):
        config = HistoryConfig(Access(url), days=1 / 6, end="2026-11-02", transport="query")
        fetch_history(config, out)
        first, last = sorted((out / "samples").iterdir())
        expected = last.read_bytes()
        last.unlink()
        named = pytest.raises(
            ConfigError, match=rf"{other}: has no series of container_cpu.*{first.name}.*another server"
        )
        with named:
            fetch_history(replace(config, access=Access(other)), out)
        assert not last.exists()
        fetch_history(config, out)
    assert last.read_bytes() == expected


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        ((503, {}, b"no backend"), TraceError, "HTTP 503: no backend; given up after 5 tries"),
        ((401, {}, b"expired"), ConfigError, "HTTP 401: expired; check --token-file"),
        ((422, {}, b"overloaded"), TraceError, "does not answer the smallest query .HTTP 422: overloaded.; run again"),
        ((404, {}, b"no page"), ConfigError, "no way to read raw samples .tried .*, the last: HTTP 404: no page.; che"),
        (ok({}, isPartial=True), TraceError, "answers only in part: isPartial"),
    ],
)
def test_a_fetch_that_goes_on_names_why_the_server_cannot_be_read(
    answer: Answer, error: type[Exception], message: str
) -> None:
    with (
        serving(lambda *_: answer) as (url, _),
        Client(Access(url, pause_s=0.001)) as client,
        pytest.raises(error, match=message),
    ):
        choose(client, load_dialect("kubernetes").metrics[0], 0, 7200, "auto")


def test_a_fetch_that_goes_on_says_what_the_whole_history_lacks(tmp_path: Path) -> None:
    past_s = 1_793_577_600  # 2026-11-02

    def respond(path: str, headers: dict[str, str], _: int) -> Answer:
        if (answer := of_plan(path, headers)) is not None:
            return answer
        first = past_s - 14_400 if "container_" in headers["body"] else past_s  # of kube-state-metrics there is nothing
        first = past_s - 7_200 - 60 if "kube_pod_info" in headers["body"] else first  # and of one in the first piece
        past = past_s - 7_200 if "kube_pod_info" in headers["body"] else past_s
        values = [[moment, "1"] for moment in range(first, past, 60)]
        result = [{"metric": {"pod": "a", "container": "b"}, "values": values}] if values else []
        return ok({"resultType": "matrix", "result": result})

    out = tmp_path / "out"
    with serving(respond) as (url, _):
        config = HistoryConfig(Access(url), days=1 / 6, end="2026-11-02", transport="query")
        whole = fetch_history(config, out).missing
        assert "kube_pod_owner" in whole
        assert "kube_pod_info" not in whole
        max((out / "samples").iterdir()).unlink()
        rest = fetch_history(config, out)
        assert (rest.fetched, rest.missing) == (1, whole)
        assert fetch_history(config, out).missing == whole


def test_a_fetch_says_since_when_there_is_usage_and_where_it_is_missing(tmp_path: Path) -> None:
    """Of five pieces the first two are older than what the server keeps, and in the fourth nothing was scraped."""
    past_s = 1_793_577_600  # 2026-11-02
    there = [range(past_s - 21_600, past_s - 14_400, 60), range(past_s - 7_200, past_s, 60)]

    def respond(path: str, headers: dict[str, str], _: int) -> Answer:
        if (answer := of_plan(path, headers)) is not None:
            return answer
        values = [[moment, "1"] for span in there for moment in span]
        return ok({"resultType": "matrix", "result": [{"metric": {"pod": "a", "container": "b"}, "values": values}]})

    with serving(respond) as (url, _):
        config = HistoryConfig(Access(url), days=5 / 12, end="2026-11-02", transport="query")
        for fetched in (5, 0):
            report = fetch_history(config, tmp_path / "out")
            assert report.fetched == fetched
            assert report.empty_s == (past_s - 36_000, past_s - 28_800, past_s - 14_400)
            lines = of_history(report, tmp_path / "out")[1]
            assert lines[1:] == [
                "no usage before 2026-11-01 18:00 UTC: 0.25 of 0.4167 days are there; the server may keep no more",
                "no usage in 1 of the pieces after that, the first of 2026-11-01 20:00 UTC",
            ]
        there[:] = [range(past_s - 36_000, past_s - 14_400, 60), range(past_s - 7_200, past_s, 60)]
        gap = of_history(fetch_history(config, tmp_path / "gap"), tmp_path / "gap")[1]
        assert gap[1:] == ["no usage in 1 of the pieces, the first of 2026-11-01 20:00 UTC"]
        there[:] = [range(past_s - 36_000, past_s, 60)]
        whole = fetch_history(config, tmp_path / "whole")
        assert (whole.empty_s, of_history(whole, tmp_path)[1][1:]) == ((), [])


@pytest.mark.parametrize(("namespace", "said"), [("shop", True), (None, False)])
def test_a_namespace_under_which_no_pod_is_listed_is_doubted(namespace: str | None, said: bool, tmp_path: Path) -> None:
    """Its labels are `exported_namespace` and so on, and that of its own is not `shop`."""
    past_s = 1_793_577_600  # 2026-11-02

    def respond(path: str, headers: dict[str, str], _: int) -> Answer:
        body = headers["body"]
        if path != "/api/v1/query" or "kube_" in body:
            return ok({"resultType": "vector", "result": []}) if "kube_" in body else (404, {}, b"not here")
        if "count" in body or "vector" in body:
            return ok({"resultType": "vector", "result": [{"metric": {}, "value": [1, "3"]}]})
        values = [[moment, "1"] for moment in range(past_s - 7_200, past_s, 60)]
        return ok({"resultType": "matrix", "result": [{"metric": {"pod": "a", "container": "b"}, "values": values}]})

    with serving(respond) as (url, _):
        config = HistoryConfig(
            Access(url), days=1 / 12, end="2026-11-02", transport="query", namespace=namespace, probe=True
        )
        lines = of_history(fetch_history(config, tmp_path / "out"), tmp_path / "out")[1]
    assert any("leave --namespace out" in line for line in lines) == said


@pytest.mark.parametrize("at_the_end", [True, False])
def test_the_time_of_a_fetch_counts_what_is_for_each_series_once_a_piece(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, at_the_end: bool
) -> None:
    """A read takes a second, and one more for ten minutes; so a piece takes 13, with 12 times the ten minutes' samples.

    Of three places of the range the first has none, so a read has half as many again as the mean; without any at the
    end the mean counts.
    """
    now_s, series = 0.0, 30

    def read(*of: Any, planned: float) -> list[RawSeries]:
        nonlocal now_s
        tens = (of[-1] - of[-2]) / 600_000
        assert planned == pytest.approx(series * tens * 2 / 3)  # what is expected on average
        now_s += 1.0 + tens + 7.0 * (now_s == 0.0)  # decoders are compiled
        values = np.zeros(round(series * tens) * at_the_end)
        return [RawSeries((), values.astype(np.int64), values)]

    def respond(_path: str, headers: dict[str, str], _: int) -> Answer:
        first_hour = "count_over" in headers["body"] and "time=179340" in headers["body"]  # 2026-10-31
        one = {"metric": {}, "value": [1, "0" if first_hour else str(series)]}
        return ok({"resultType": "vector", "result": [one]})

    monkeypatch.setattr("reclaim.data.fetch.prometheus.probe.read_series", read)
    monkeypatch.setattr("reclaim.data.fetch.prometheus.probe.time.perf_counter", lambda: now_s)
    monkeypatch.setattr("reclaim.data.fetch.prometheus.probe.choose", lambda *_: "query")
    with serving(respond) as (url, _):
        config = HistoryConfig(Access(url), days=2, end="2026-11-02", probe=True)
        found = fetch_history(config, tmp_path / "out").plan
    assert found is not None
    assert found.seconds == pytest.approx(found.samples * 13.0 / ((12 if at_the_end else 8) * series))


def test_options_of_which_the_server_has_nothing_can_be_corrected(tmp_path: Path) -> None:
    """The first run ends before its first piece; the folder is not bound to its options."""

    def respond(path: str, headers: dict[str, str], _: int) -> Answer:
        if path != "/api/v1/query":
            return 404, {}, b"not here"
        there = "vector" in headers["body"] or "nowhere" not in headers["body"]
        result = [{"metric": {}, "value": [1, "3"], "values": [[1_793_577_500, "1"]]}] if there else []
        return ok({"resultType": "matrix", "result": result})

    with serving(respond) as (url, _):
        config = HistoryConfig(Access(url), days=1 / 12, end="2026-11-02", namespace="nowhere", transport="query")
        with pytest.raises(TraceError, match="no series of"):
            fetch_history(config, tmp_path / "out")
        assert fetch_history(replace(config, namespace="shop"), tmp_path / "out").fetched == 1
        with pytest.raises(ConfigError, match="other --namespace"):
            fetch_history(config, tmp_path / "out")


def test_a_history_goes_on_by_its_own_dialect_where_an_update_added_metrics_and_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It says which it lacks; without a piece yet it begins again with all of them."""

    def respond(path: str, _: dict[str, str], __: int) -> Answer:
        if path != "/api/v1/query":
            return 404, {}, b"not here"
        return ok({"resultType": "matrix", "result": [
            {"metric": {}, "value": [1, "3"], "values": [[1_793_577_500, "1"]]}]})  # fmt: skip

    text = load_dialect("kubernetes").text
    old = "\n".join(line for line in text.splitlines() if not line.startswith("init"))
    for name, content in (("old", old), ("other", old.replace("kube_pod_info", "pod_info"))):
        (tmp_path / f"{name}.toml").write_text(content)
    with serving(respond) as (url, came):
        config = HistoryConfig(Access(url), days=1 / 6, end="2026-11-02", transport="query")
        fetch_history(replace(config, dialect=str(tmp_path / "old.toml")), tmp_path / "out")
        first, last = sorted((tmp_path / "out" / "samples").iterdir())
        first.unlink()
        came.clear()
        assert fetch_history(config, tmp_path / "out").fetched == 1
        assert not any("init_container" in one["body"] for one in came)
        assert "without kube_pod_init_container_info, kube_pod_init_container_resource_limits" in caplog.text
        with pytest.raises(ConfigError, match="other --dialect"):
            fetch_history(replace(config, dialect=str(tmp_path / "other.toml")), tmp_path / "out")
        for piece in (first, last):
            piece.unlink()
        assert fetch_history(config, tmp_path / "out").fetched == 2
        assert any("init_container" in one["body"] for one in came)


def test_pieces_are_asked_for_together_as_far_as_memory_allows() -> None:
    """A request costs a server more than its samples: a week at once of a small cluster, one piece of a large one."""
    assert [job.pieces_at_once(samples) for samples in (0, 1e3, 1e6, 3e6, 1e9)] == [84, 84, 6, 2, 1]


@pytest.mark.parametrize(
    ("values", "named"),
    [
        (
            [{"cluster": "eu-1"}, {"cluster": "us-2"}],
            r"2 clusters by the label cluster \(eu-1, us-2\).*--cluster cluster=",
        ),
        ([{"cluster_name": "a"}, {}], r"2 clusters by the label cluster_name \(\(none\), a\)"),
    ],
)
def test_several_clusters_behind_one_address_are_refused(
    values: list[dict[str, str]], named: str, tmp_path: Path
) -> None:
    """Pods of the same name in two clusters would be one."""
    with serving(partial(_of_clusters, values)) as (url, _):
        config = HistoryConfig(Access(url), days=1 / 12, end="2026-11-02", transport="query")
        for asked in (config, replace(config, probe=True)):
            with pytest.raises(ConfigError, match=named):
                fetch_history(asked, tmp_path / "out")
        if "cluster" in values[0]:
            assert fetch_history(replace(config, cluster="cluster=eu-1"), tmp_path / "out").fetched == 1


@pytest.mark.parametrize("values", [[{}], [{"cluster": "eu-1"}], []])
def test_one_cluster_is_fetched_with_and_without_its_label(values: list[dict[str, str]], tmp_path: Path) -> None:
    with serving(partial(_of_clusters, values)) as (url, _):
        config = HistoryConfig(Access(url), days=1 / 12, end="2026-11-02", transport="query")
        assert fetch_history(config, tmp_path / "out").fetched == 1


def test_a_dialect_that_keeps_clusters_apart_takes_several(tmp_path: Path) -> None:
    text = load_dialect("kubernetes").text.replace('cluster = ""', 'cluster = "cluster"')
    (tmp_path / "own.toml").write_text(text)
    with serving(partial(_of_clusters, [{"cluster": "eu-1"}, {"cluster": "us-2"}])) as (url, _):
        config = HistoryConfig(Access(url), days=1 / 12, end="2026-11-02", transport="query")
        own = replace(config, dialect=str(tmp_path / "own.toml"))
        assert fetch_history(own, tmp_path / "out").fetched == 1


def test_a_history_of_which_two_hours_are_too_much_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reclaim.data.fetch.prometheus.probe.LARGEST_PIECE", 16 * 30)
    with serving(partial(_of_clusters, [{}])) as (url, came):
        config = HistoryConfig(Access(url), days=1 / 12, end="2026-11-02", transport="query")
        with pytest.raises(ConfigError, match=r"two hours of the history are about .*fetch it by --namespace"):
            fetch_history(config, tmp_path / "out")
        assert not any("%5B7200000ms%5D" in one["body"] for one in came)


def test_a_namespace_needs_a_dialect_that_names_its_label(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text(
        load_dialect("kubernetes").text.replace('namespace = "namespace"', 'namespace = ""')
    )
    config = HistoryConfig(Access("http://127.0.0.1:1"), namespace="shop", dialect=str(tmp_path / "own.toml"))
    with pytest.raises(ConfigError, match=r"--namespace shop: dialect .* names no label"):
        fetch_history(config, tmp_path / "out")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["prometheus", "--url", "http://127.0.0.1:1", "--parallel", "4"], "--parallel: not an option of"),
        (["prometheus", "--url", "http://127.0.0.1:1", "--cell", "a"], "--cell: not an option of"),
        (["google-v2.1", "--days", "14"], "--days: not an option of"),
        (["google-v2.1", "--dialect", "kubernetes", "--transport", "auto"], "--dialect, --transport: not an option of"),
        (["alibaba-2017", "--probe", "--url", "http://127.0.0.1:1"], "--url, --probe: not an option of"),
    ],
)
def test_an_option_without_effect_is_refused_even_with_its_default(
    words: list[str], named: str, tmp_path: Path
) -> None:
    done = CliRunner().invoke(app, ["fetch", words[0], str(tmp_path / "out"), *words[1:]])
    assert isinstance(done.exception, ConfigError)
    assert f"{named} `reclaim fetch {words[0]}`" in str(done.exception)
    assert not (tmp_path / "out").exists()


def test_an_unknown_trace_is_named_before_its_options(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["fetch", "prom", str(tmp_path / "out"), "--url", "http://127.0.0.1:1"])
    assert isinstance(done.exception, ConfigError)
    assert "alibaba-2017, prometheus, got 'prom'" in str(done.exception)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"days": 0.01}, "--days must be between"),
        ({"end": "yesterday"}, "--end: expected a time"),
        ({"transport": "pigeon"}, "--transport must be one of"),
        ({"cluster": "eu"}, "--cluster: expected label=value"),
    ],
)
def test_options_that_make_no_sense_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        HistoryConfig(Access("https://prometheus.example"), **options)
