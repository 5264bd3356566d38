"""Tests of whole histories as a source: an ingest, its findings, and files that cannot be used."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from reclaim.cli.results import of_ingest
from reclaim.data import schema as s
from reclaim.data.core.files import write_json
from reclaim.data.errors import ConfigError, TraceError
from reclaim.data.ingest.job import IngestConfig, ingest
from reclaim.data.oom import OOM_RECORDED
from reclaim.data.survey.facts import survey
from reclaim.data.survey.page import render_page
from reclaim.data.survey.tables import summary
from reclaim.data.traces.dialect import load_dialect, parse_dialect
from reclaim.data.traces.history import FORMAT, PIECE_S, RECORD, History, piece_path, read_piece, write_piece
from reclaim.data.traces.kubernetes.source import kubernetes
from tests.data.traces.kubernetes.histories import APP, DIALECT, POD, T0, beat, counter, one, write_history


def test_usage_alone_makes_a_dataset(tmp_path: Path) -> None:
    """Without kube-state-metrics there are usage, names off the pods, and limits by what was seen."""
    usage = {"cpu": [one(APP | {"instance": "10.0.0.1:10250"}, counter(0, 7200, 0.3))]}
    folder = write_history(tmp_path / "history", usage)
    report = ingest(folder, tmp_path / "dataset", IngestConfig(trace="kubernetes", buckets=2))
    (name,) = report.dataset.table("names").to_pylist()
    assert (name[s.WORKLOAD_KIND], name[s.MACHINE_NAME]) == ("Pod", "10.0.0.1:10250")
    assert report.dataset.table("collections")[s.NAME_ID].to_pylist() == [f"shop/Pod/{POD['pod']}/app"]
    assert report.dataset.manifest["nature"] == "recorded"
    assert report.dataset.n_windows == 24
    again = ingest(folder, tmp_path / "dataset", IngestConfig(trace="kubernetes", buckets=2))
    assert again.already_there
    made = (folder / "tables" / "usage-0000.parquet").stat().st_mtime_ns
    kubernetes(folder)
    assert (folder / "tables" / "usage-0000.parquet").stat().st_mtime_ns == made  # not made again
    (folder / "tables" / "made.json").write_text("{}")
    kubernetes(folder)
    assert (folder / "tables" / "usage-0000.parquet").stat().st_mtime_ns > made


def test_an_ingest_says_how_many_containers_have_no_window_and_how_many_owners_are_guessed(tmp_path: Path) -> None:
    """One is scraped less often than every five minutes; of the others one has the name of a Deployment's pod."""
    named = {"namespace": "shop", "pod": "web-bcdfg5678-bcdfg", "container": "app"}
    of_set = POD | {"owner_kind": "StatefulSet", "owner_name": "cart"}
    usage = [one(APP, counter(0, 7200, 0.3)), one(named, counter(0, 7200, 0.3)),
             one(APP | {"container": "slow"}, counter(0, 7200, 0.3, 301))]  # fmt: skip
    folder = write_history(tmp_path / "history", {"cpu": usage, "owner": [one(of_set, beat(0, 7200))]})
    config = IngestConfig(trace="kubernetes", buckets=2)
    for already_there in (False, True):
        report = ingest(folder, tmp_path / "dataset", config)
        assert report.already_there == already_there
        unseen, guessed = report.dataset.manifest["notes"][-2:]
        assert "no window, which are not in the dataset: 1 of 3." in unseen
        assert "owner is read off their name, as nothing else says it: 1 of 2." in guessed
        assert {unseen, guessed} <= set(of_ingest(report, tmp_path / "dataset")[1])


def test_an_ingest_says_which_containers_are_init_containers_and_how_many_run_once(tmp_path: Path) -> None:
    """An earlier history, whose dialect has no init containers, is read as it was, without a kind."""
    of = {name: POD | {"container": name} for name in ("app", "migrate", "proxy")}
    series = {
        "cpu": [one(labels, counter(0, 7200, 0.3)) for labels in of.values()],
        "init": [one(of["migrate"], beat(0, 7200)), one(of["proxy"] | {"restart_policy": "Always"}, beat(0, 7200))],
        "init_request": [one(of["proxy"] | {"resource": "cpu"}, beat(0, 7200, 0.5))],
    }
    config = IngestConfig(trace="kubernetes", buckets=2)
    dataset = ingest(write_history(tmp_path / "history", series), tmp_path / "dataset", config).dataset
    kinds = {name[s.CONTAINER]: name[s.CONTAINER_KIND] for name in dataset.table("names").to_pylist()}
    assert kinds == {"app": None, "migrate": "init", "proxy": "sidecar"}
    assert any("run once, which `recommend` leaves out: 1 of 3" in note for note in dataset.manifest["notes"])
    before = write_history(tmp_path / "before", {"cpu": series["cpu"]})
    record = json.loads((before / RECORD).read_text())
    record["dialect"] = "\n".join(line for line in DIALECT.text.splitlines() if not line.startswith("init"))
    (before / RECORD).write_text(json.dumps(record))
    dataset = ingest(before, tmp_path / "dataset-before", config).dataset
    assert {name[s.CONTAINER_KIND] for name in dataset.table("names").to_pylist()} == {None}
    assert dataset.n_windows == 3 * 24


def test_kills_of_containers_without_a_window_are_counted_where_they_are_said_to_be_missing(tmp_path: Path) -> None:
    """One that is killed seconds after each start, of which no two scrapes see the same run."""
    looping = APP | {"container": "loop"}
    runs = [one(looping | {"id": f"/{k}"}, [(300 * k + 10, 0.5)]) for k in range(24)]
    series = {
        "cpu": [one(APP, counter(0, 7200, 0.3)), *runs],
        "restarts": [one(looping | {"uid": "u"}, [(300 * k + 20, k) for k in range(24)])],
        "ended_reason": [one(looping | {"uid": "u", "reason": "OOMKilled"}, beat(310, 7200))],
    }
    folder = write_history(tmp_path / "history", series)
    (unseen,) = ingest(folder, tmp_path / "dataset", IngestConfig(trace="kubernetes", buckets=2)).findings
    assert "no window, which are not in the dataset: 1 of 2." in unseen
    assert unseen.endswith("They had 23 out-of-memory kills, as a container that dies as it starts.")


def test_a_history_of_other_samples_has_other_tables(tmp_path: Path) -> None:
    folder = write_history(tmp_path / "history", {"cpu": [one(APP, counter(0, 7200, 0.3))]})
    first = kubernetes(folder)
    usage = folder / "tables" / "usage-0000.parquet"
    before = pq.read_table(usage)[s.CPU_MEAN].to_pylist()
    made = usage.stat().st_mtime_ns
    assert kubernetes(folder).options == first.options
    assert usage.stat().st_mtime_ns == made  # not made again
    (piece,) = History.open(folder).pieces()
    write_piece(piece, {"cpu": [one(APP, counter(0, 7200, 0.6))]})
    assert kubernetes(folder).options != first.options
    assert pq.read_table(usage)[s.CPU_MEAN].to_pylist() == pytest.approx([2 * mean for mean in before])


def test_an_ingest_of_which_all_is_known_has_no_such_lines(tmp_path: Path) -> None:
    usage = {"cpu": [one(APP, counter(0, 7200, 0.3))]}
    folder = write_history(tmp_path / "history", usage)
    assert ingest(folder, tmp_path / "dataset", IngestConfig(trace="kubernetes", buckets=2)).findings == ()


@pytest.mark.parametrize(
    ("names", "labels", "cpu", "memory"),
    [
        ({"pod": "name", "container": "name", "node": "instance"}, {"name": "db", "instance": "host-1"},
         "container_cpu_usage_seconds_total", "container_memory_usage_bytes"),
        ({"pod": "jobid", "container": "jobid", "node": "instance", "cluster": "cluster"},
         {"jobid": "4711", "step": "", "cluster": "hpc", "instance": "host-1"},
         "cgroup_cpu_total_seconds", "cgroup_memory_rss_bytes"),
    ],
)  # fmt: skip
def test_an_exporter_of_docker_or_slurm_is_a_dialect_more(
    names: dict[str, str], labels: dict[str, str], cpu: str, memory: str, tmp_path: Path
) -> None:
    named = {"namespace": "", "cluster": ""} | names
    own = "[labels]\n" + "".join(f'{thing} = "{label}"\n' for thing, label in named.items())
    own += f'[usage]\ncpu = {{ metric = "{cpu}" }}\nmemory = {{ metric = "{memory}" }}\n'
    series = {"cpu": [one(labels, counter(0, 7200, 0.3))], "memory": [one(labels, beat(0, 7200, 3e8))]}
    folder = write_history(tmp_path / "history", series)
    record = {"format": FORMAT, "start_s": T0, "end_s": T0 + PIECE_S, "dialect": own, "asked": {}}
    write_json(folder / RECORD, record)
    made = ingest(folder, tmp_path / "dataset", IngestConfig(trace="kubernetes", buckets=2)).dataset
    (name,) = made.table("names").to_pylist()
    assert name[s.POD] == name[s.CONTAINER] == labels[names["pod"]]
    assert made.n_windows == 24
    assert set(made.read("usage")[s.MEMORY_MAX].to_pylist()) == {3e8}


def test_recorded_kills_are_those_of_the_survey(tmp_path: Path) -> None:
    """Its memory is unknown, so the derived label has none."""
    restarts = one(APP | {"uid": "u"}, [*beat(0, 1020, 0, 60), *beat(1020, 7200, 1, 60)])
    reason = one(APP | {"uid": "u", "reason": "OOMKilled"}, beat(1020, 7200, 1, 60))
    series = {"cpu": [one(APP, counter(0, 7200, 0.3))], "restarts": [restarts], "ended_reason": [reason]}
    folder = write_history(tmp_path / "history", series)
    facts = survey(ingest(folder, tmp_path / "dataset", IngestConfig(trace="kubernetes", buckets=2)).dataset)
    assert facts["tasks"]["oom_ends"] == 1
    assert ("out-of-memory ends (recorded)", "1") in summary(facts).rows
    assert OOM_RECORDED in render_page(facts)


def test_a_history_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    config = IngestConfig(trace="kubernetes")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"no history.json in it; `reclaim fetch prometheus"):
        ingest(tmp_path / "empty", tmp_path / "dataset", config)
    folder = write_history(tmp_path / "history", {"cpu": [one(APP, [(0, 1)])]})
    with pytest.raises(TraceError, match="not one window in 1 pieces"):
        ingest(folder, tmp_path / "dataset", config)
    assert not (folder / "tables").exists()
    piece_path(folder, T0).write_bytes(b"PAR1 and no more")
    with pytest.raises(TraceError, match=r"cannot be read .* delete it and run `reclaim fetch` again"):
        ingest(folder, tmp_path / "dataset", config)
    piece_path(folder, T0).unlink()
    with pytest.raises(ConfigError, match="1 of 1 pieces are missing"):
        ingest(folder, tmp_path / "dataset", config)


def test_a_piece_is_read_as_it_was_written(tmp_path: Path) -> None:
    series = {
        "cpu": [one(APP, counter(0, 900, 0.3)), one(POD | {"container": "ü"}, [(0, 1)])],
        "pod": [one(POD, [(5, 1)])],
    }
    write_piece(tmp_path / "a.parquet", series)
    write_piece(tmp_path / "b.parquet", series | {"owner": []})
    assert (tmp_path / "a.parquet").read_bytes() == (tmp_path / "b.parquet").read_bytes()
    found = read_piece(tmp_path / "a.parquet")
    assert [(row.labels, row.time_ms.tolist(), row.value.tolist()) for row in found["cpu"]] == [
        (row.labels, row.time_ms.tolist(), row.value.tolist()) for row in series["cpu"]
    ]
    assert set(found) == {"cpu", "pod"}
    assert set(read_piece(tmp_path / "a.parquet", {"pod"})) == {"pod"}
    write_piece(tmp_path / "c.parquet", {})
    assert read_piece(tmp_path / "c.parquet") == {}


def test_an_infinite_sample_measures_nothing(tmp_path: Path) -> None:
    cpu = counter(0, 900, 0.3)
    infinite = [(time, np.inf if time == 300 else value) for time, value in cpu]
    write_piece(tmp_path / "a.parquet", {"cpu": [one(APP, infinite)], "memory": [one(APP, [(0, -np.inf)])]})
    found = read_piece(tmp_path / "a.parquet")
    assert set(found) == {"cpu"}
    assert found["cpu"][0].value.tolist() == [value for time, value in cpu if time != 300]
    assert found["cpu"][0].time_ms.tolist() == [(T0 + time) * 1000 for time, _ in cpu if time != 300]


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("[labels]\n[usage]\n", ["labels.namespace must be", "usage.cpu is missing"]),
        ("[other]\n", [r"unknown section \[other\]", r"missing section \[labels\]"]),
        ("x =", ["not valid TOML"]),
        (DIALECT.text.replace('container!=\\"\\"', "container"), []),
        (DIALECT.text.replace("'container!=\"\"'", "'container'"), ["usage.cpu: 'container' is no matcher"]),
        (DIALECT.text.replace('= "mon"', '= "gold"'), ["tiers.system-node-critical must be one of"]),
        (DIALECT.text + '\n[usage.gpu]\nmetric = "x"\n', ["usage.gpu is unknown"]),
    ],
)
def test_a_dialect_names_all_its_faults(text: str, faults: list[str]) -> None:
    if not faults:
        assert parse_dialect(text, "x").metrics[0].selector == (
            'container_cpu_usage_seconds_total{container!="",container!="POD"}'
        )
        return
    for fault in faults[:1]:
        with pytest.raises(ConfigError, match=fault):
            parse_dialect(text, "x")


def test_there_is_no_such_dialect() -> None:
    with pytest.raises(ConfigError, match="no such file; shipped are kubernetes"):
        load_dialect("mesos")
