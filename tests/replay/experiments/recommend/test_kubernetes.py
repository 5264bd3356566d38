"""A dataset of Kubernetes: names, requests, autoscalers and recorded kills go into recommendation and patches."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import yaml
from typer.testing import CliRunner

from reclaim.cli import app as cli
from reclaim.data import schema as s
from reclaim.data.dataset import Dataset
from reclaim.data.windows import demand
from reclaim.features.build import build_features
from reclaim.features.feature_set import FeatureSet
from reclaim.features.splits import TEST
from reclaim.replay.experiments.recommend.formats import records
from reclaim.replay.experiments.recommend.lines import totals
from reclaim.replay.experiments.recommend.measure import EXPERIMENT
from reclaim.replay.experiments.recommend.page import findings
from reclaim.replay.experiments.recommend.patches import write_patches
from reclaim.replay.experiments.recommend.policy import RecommendConfig
from reclaim.replay.report.page import ReplayReport
from reclaim.replay.runs.run import run_experiment
from tests.replay.experiments.recommend.test_series import first_ends

GIB = 2.0**30
MIB = 2.0**20
KUBECTL = shutil.which("kubectl")
CONFIG = RecommendConfig(estimators=("max-so-far", "krr"), hold_days=0.25, draws=20)
REQUEST = (0.8, 1.5 * GIB)
"""Requests of every task; limits are 1 core and 2 GiB, and no CPU limit is enforced."""


def in_gibibytes(column: pa.ChunkedArray) -> pa.ChunkedArray:
    return pc.multiply(column, GIB)


@pytest.fixture(scope="module")
def cluster(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the dataset of ten services one of Kubernetes: synthetic usage, under names, requests and two kills."""
    copy = tmp_path_factory.mktemp("cluster") / "cluster"
    shutil.copytree(dataset, copy)
    shutil.rmtree(copy / "features")
    for path in (copy / "usage").iterdir():
        table = pq.read_table(path)
        for name in (s.MEMORY_MEAN, s.MEMORY_MAX, s.MEMORY_LIMIT):
            at = table.column_names.index(name)
            table = table.set_column(at, table.schema.field(name), in_gibibytes(table[name]))
        n = len(table)
        extras = {
            s.CPU_REQUEST: np.full(n, REQUEST[0]), s.MEMORY_REQUEST: np.full(n, REQUEST[1]),
            s.CPU_ENFORCED: np.full(n, np.nan), s.MEMORY_ENFORCED: np.full(n, 2 * GIB),
        }  # fmt: skip
        for name, values in extras.items():
            table = table.append_column(name, pa.array(values, pa.float64(), from_pandas=True))
        pq.write_table(table, path)
    tasks = pq.read_table(copy / "tasks.parquet").select([*s.TASK_KEY]).to_pandas()
    number = {one: k for k, one in enumerate(sorted(tasks[s.COLLECTION_ID].unique()))}
    rows = [
        {
            s.COLLECTION_ID: c, s.INSTANCE_INDEX: i, s.NAMESPACE: "shop" if number[c] < 5 else "pay",
            s.WORKLOAD_KIND: "Deployment", s.WORKLOAD: f"svc-{number[c] // 2}",
            s.CONTAINER: ("app", "proxy")[number[c] % 2],
            s.POD: f"svc-{number[c] // 2}-{i % 97}", s.AUTOSCALER: "web-scaler" if number[c] in (3, 5) else None,
            s.AUTOSCALED: {3: "cpu", 5: "memory"}.get(number[c]),
        }
        for c, i in tasks.itertuples(index=False)
    ]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows, schema=s.NAMES), copy / "names.parquet")
    _kill(copy, int(tasks[s.COLLECTION_ID].min()))
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["options"]["trace"] = "kubernetes"
    manifest["counts"] |= {"names": len(rows), "events": 2}
    manifest["extras"] = {
        "usage": [s.CPU_REQUEST, s.MEMORY_REQUEST, s.CPU_ENFORCED, s.MEMORY_ENFORCED], "events": [s.OUT_OF_MEMORY],
    }  # fmt: skip
    (copy / "manifest.json").write_text(json.dumps(manifest))
    build_features(Dataset.open(copy))
    return copy


def _kill(folder: Path, collection: int) -> None:
    """Let one task of a collection end out of memory after four hours, and once more for another reason."""
    done = False
    for path in sorted((folder / "events").iterdir()):
        usage = pq.read_table(folder / "usage" / path.name).to_pandas()
        mine = usage[usage[s.COLLECTION_ID] == collection]
        rows: list[dict[str, Any]] = []
        for key, of in list(mine.groupby(list(s.TASK_KEY)))[: 0 if done else 1]:
            done = True
            at = int(of[s.END_US].iloc[48])
            rows = [
                {**dict(zip(s.TASK_KEY, key, strict=True)), s.TIME_US: at + k, s.EVENT_TYPE: s.EventType.FAIL,
                 s.OUT_OF_MEMORY: killed}
                for k, killed in ((0, True), (1, False))
            ]  # fmt: skip
        pq.write_table(pa.Table.from_pylist(rows, schema=s.with_extras("events", [s.OUT_OF_MEMORY])), path)


@pytest.fixture(scope="module")
def report(cluster: Path, tmp_path_factory: pytest.TempPathFactory) -> ReplayReport:
    """Make the recommendation of that cluster; to be read only."""
    out = tmp_path_factory.mktemp("requests") / "out"
    return run_experiment(EXPERIMENT, cluster, out, CONFIG, tracking=False)


def lines_of(report: ReplayReport) -> dict[tuple[str, str], dict[str, Any]]:
    return {(line["name"], line["container"]): line for line in report.results["workloads"]}


def test_a_workload_is_named_and_its_request_is_not_its_limit(report: ReplayReport) -> None:
    lines = lines_of(report)
    assert len(lines) == 10
    line = lines["svc-2", "app"]
    assert (line["namespace"], line["kind"], line["autoscaler"]) == ("shop", "Deployment", None)
    assert (line["cpu"]["request"], line["memory"]["request"]) == REQUEST
    assert (line["cpu"]["limit"], line["memory"]["limit"]) == (None, 2 * GIB)  # no CPU limit is enforced
    assert sorted(line["pods"])[0].startswith("svc-2-")
    for one in lines.values():
        assert one["cpu"]["recommended"] * 1000 == pytest.approx(round(one["cpu"]["recommended"] * 1000))
        assert one["memory"]["recommended"] % MIB == 0 or one["memory"]["recommended"] == REQUEST[1]


def test_an_autoscaler_keeps_the_cpu_request_and_not_that_of_memory(report: ReplayReport) -> None:
    line = lines_of(report)["svc-1", "proxy"]
    assert line["autoscaler"] == "web-scaler"
    assert (line["cpu"]["recommended"], line["cpu"]["rule"]) == (REQUEST[0], "autoscaler")
    assert line["memory"]["rule"] != "autoscaler"
    # its request stands where it stood, so what it violates is its own and in no total
    assert line["cpu"]["violation"]["windows"] > 0
    windows = [one["cpu"]["violation"]["windows"] for one in report.results["workloads"]]
    violations = [one["cpu"]["violation"]["violations"] for one in report.results["workloads"] if one is not line]
    of_all = report.results["test"]["recommendation"]["violation_rate"]["cpu"]["value"]
    assert of_all == pytest.approx(sum(violations) / (sum(windows) - line["cpu"]["violation"]["windows"]))
    others = [one["cpu"]["rule"] for one in report.results["workloads"] if one is not line]
    assert "autoscaler" not in others


def test_a_scaler_keeps_the_request_of_the_resource_whose_share_it_holds(report: ReplayReport) -> None:
    line = lines_of(report)["svc-2", "proxy"]
    assert line["autoscaler"] == "web-scaler"
    assert (line["memory"]["recommended"], line["memory"]["rule"]) == (REQUEST[1], "autoscaler")
    assert line["cpu"]["rule"] != "autoscaler"


def test_a_recorded_kill_raises_the_request_above_the_limit_and_no_other_end_does(report: ReplayReport) -> None:
    line = lines_of(report)["svc-0", "app"]
    assert line["oom_kills"] == 1
    assert sum(one["oom_kills"] for one in report.results["workloads"]) == 1
    assert len(line["memory"]["picture"]["killed"]) == 1
    assert line["cpu"]["picture"]["killed"] == []
    # killed at 2 GiB: 1.2 times are 2457.6 MiB, up to a whole one 2458
    assert (line["memory"]["recommended"], line["memory"]["rule"]) == (2458 * MIB, "out of memory")


def test_a_kill_raises_the_request_no_further_than_the_memory_of_the_largest_machine(
    report: ReplayReport, cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (killed,) = (key for key, line in lines_of(report).items() if line["oom_kills"])
    free = lines_of(report)[killed]["memory"]
    assert (free["rule"], free["recommended"]) == ("out of memory", 2458 * MIB)  # 1.2 times 2 GiB, in whole MiB
    assert free["reclaimable"] == REQUEST[1] - 2458 * MIB  # less than nothing
    cell = Dataset.open(cluster).cell()
    monkeypatch.setattr(Dataset, "cell", lambda *_: replace(cell, largest_machine=(64.0, 2.25 * GIB)))
    found = run_experiment(EXPERIMENT, cluster, tmp_path / "out", CONFIG, tracking=False)
    capped = lines_of(found)[killed]["memory"]
    assert (capped["rule"], capped["recommended"]) == ("out of memory", 2304 * MIB)
    assert capped["words"].endswith("no more than the largest machine has")


def test_it_is_said_what_all_requests_come_to_and_which_pods_leave_their_class(report: ReplayReport) -> None:
    def line(request: float | None, limit: float, recommended: float) -> dict[str, Any]:
        of: dict[str, Any] = {**report.results["workloads"][0], "tasks": 2}
        saved = None if request is None else request - recommended
        for r, unit in (("cpu", 1.0), ("memory", GIB)):
            found = {"request": request, "limit": limit, "recommended": recommended, "reclaimable": saved}
            found["requested"] = request
            of[r] = {**of[r], **{name: amount and amount * unit for name, amount in found.items()}}
        return of

    # the second is killed at its limit and raised with it, and stays of its class; the last requests nothing now
    lines: list[dict[str, Any]] = [line(4.0, 4.0, 1.5), line(2.0, 2.0, 2.5), line(1.0, 2.0, 0.5), line(None, 2.0, 0.25)]
    said = findings({**report.results, "workloads": lines, "totals": totals(lines)})
    # 2 · (4 + 2 + 1) = 14, 2 · (1.5 + 2.5 + 0.5) = 9, 2 · 0.25 = 0.5
    assert said[0] == "CPU: requests of 14 cores in all become 9, and 1 workload without a known request would add 0.5"
    assert said[1].startswith("Memory: requests of 14,336 MiB in all become 9,216, and 1 workload")
    assert said[1].endswith("would add 512")
    assert said[-1].startswith("Guaranteed: 1 of the workloads whose requests are their limits would request less")
    assert not any("Guaranteed" in one or "would add" in one or "not run" in one for one in findings(report.results))


def test_it_is_said_how_much_of_all_requests_is_of_workloads_that_do_not_run(report: ReplayReport) -> None:
    first, second, *rest = report.results["workloads"]
    assert {line["running"] for line in report.results["workloads"]} == {True}
    lines = [{**first, "running": False, "tasks": 3}, {**second, "running": False, "tasks": 1}, *rest]
    (said,) = (one for one in findings({**report.results, "workloads": lines}) if "not run" in one)
    # four tasks of 0.8 cores and 1,536 MiB
    assert said == (
        "2 workloads do not run at the end of the history; the requests in all count the tasks that ran last: 3.2 "
        "cores of CPU and 6,144 MiB of memory"
    )
    lines = [{**first, "running": False, "kind": "Job"}, {**second, "running": False, "kind": "Pod"}, *rest]
    (said,) = (one for one in findings({**report.results, "workloads": lines}) if "are over" in one)
    assert said.startswith("Jobs, bare and static pods that are over, and containers")
    assert said.endswith("count in no sum of requests: 2")


def test_each_workload_has_the_violations_of_what_it_requested_then(report: ReplayReport, cluster: Path) -> None:
    """Counted once more from the windows of the test part: how a change of a week ago did."""
    stored, features = Dataset.open(cluster), FeatureSet.open(cluster)
    over: dict[int, list[list[bool]]] = {}
    for of in map(stored.windows, range(stored.n_buckets)):
        tested = (features.folding.period_and_group(of)[0] == TEST) & (of.start_us >= features.cuts_us[1])
        needs = np.minimum(demand(of), of.limit)
        for row in np.flatnonzero(tested):
            over.setdefault(int(of.collection_id[row]), []).append((needs[row] > REQUEST).tolist())
    for line in report.results["workloads"]:
        rates = np.mean(over[line["collection_id"]], axis=0)
        for k, r in enumerate(s.RESOURCES):
            assert line[r]["as_requested"] == pytest.approx(rates[k])
    assert sum(line["cpu"]["as_requested"] for line in report.results["workloads"]) > 0


def test_a_line_has_the_violations_of_its_own_requests_where_a_workload_before_it_is_left_out(
    cluster: Path, report: ReplayReport, tmp_path: Path
) -> None:
    first_ends(cluster, tmp_path / "cell")
    config = replace(CONFIG, seen_days=0.1)
    found = run_experiment(EXPERIMENT, tmp_path / "cell", tmp_path / "out", config, tracking=False).results
    assert found["left_out"] == 1
    before = {line["collection_id"]: line for line in report.results["workloads"]}
    for line in found["workloads"]:
        for r in s.RESOURCES:
            assert line[r]["as_requested"] == before[line["collection_id"]][r]["as_requested"]
    assert len({line["cpu"]["as_requested"] for line in found["workloads"]}) > 3


def test_requests_that_rest_on_means_are_said_to_be_lower_bounds(report: ReplayReport) -> None:
    def said(by_mean: float) -> list[str]:
        dataset = {**report.results["dataset"], "measured_by_mean": {"cpu": by_mean, "memory": 0.0}}
        return [one for one in findings({**report.results, "dataset": dataset}) if "lower bounds" in one]

    assert said(0.05) == []
    (line,) = said(0.97)
    assert line.startswith("CPU: in 97 % of the windows the mean stands in for the 90th percentile, so")
    assert line.endswith("a scrape every minute shows more")


def test_a_script_reads_which_workloads_have_no_patch(report: ReplayReport, cluster: Path, tmp_path: Path) -> None:
    words = ["recommend", str(cluster), "--out", str(report.folder), "--no-model", "--json"]
    words += ["--set", 'estimators=["max-so-far", "krr"]', "--set", "hold_days=0.25", "--set", "draws=20"]
    done = CliRunner().invoke(cli.app, [*words, "--patches", str(tmp_path / "patches")])
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    assert facts["already_there"]
    written = write_patches(report.results, tmp_path / "patches")
    assert facts["patches"] == [
        f"{tmp_path / 'patches'}: patches of {written.workloads} workloads",
        *(f"no patch for {name}" for name in written.left_out),
    ]
    assert json.loads(CliRunner().invoke(cli.app, words).stdout)["patches"] == []


@pytest.mark.skipif(KUBECTL is None, reason="no kubectl on this machine")
def test_kustomize_takes_the_patches_of_every_workload(report: ReplayReport, tmp_path: Path) -> None:
    written = write_patches(report.results, tmp_path / "patches")
    lines = report.results["workloads"]
    changed = [line for line in lines if any(line[r]["recommended"] != line[r]["request"] for r in s.RESOURCES)]
    assert written.workloads == len({(line["namespace"], line["name"]) for line in changed})
    for space in ("shop", "pay"):
        here = [line for line in lines if line["namespace"] == space]
        base = [
            _deployment(name, [one for one in here if one["name"] == name]) for name in {one["name"] for one in here}
        ]
        (tmp_path / "base.yaml").write_text(yaml.safe_dump_all(base))
        content = {"resources": ["base.yaml"], "components": [f"patches/{space}"]}
        (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(content))
        done = subprocess.run([str(KUBECTL), "kustomize", str(tmp_path)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        for made in yaml.safe_load_all(done.stdout):
            for container in made["spec"]["template"]["spec"]["containers"]:
                memory = lines_of(report)[made["metadata"]["name"], container["name"]]["memory"]
                resources = container["resources"]
                assert resources["requests"]["memory"] == f"{memory['recommended'] / MIB:.0f}Mi"
                above = memory["recommended"] > memory["limit"]
                assert resources["limits"]["memory"] == (resources["requests"]["memory"] if above else "2Gi")


def _deployment(name: str, lines: list[dict[str, Any]]) -> dict[str, Any]:
    resources = {"requests": {"cpu": "800m", "memory": "1536Mi"}, "limits": {"memory": "2Gi"}}
    containers = [{"name": line["container"], "image": "image", "resources": dict(resources)} for line in lines]
    labels = {"app": name}
    return {
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name},
        "spec": {"selector": {"matchLabels": labels},
                 "template": {"metadata": {"labels": labels}, "spec": {"containers": containers}}},
    }  # fmt: skip


def test_an_init_container_that_runs_once_has_no_recommendation_and_a_sidecar_has_one(
    report: ReplayReport, cluster: Path, tmp_path: Path
) -> None:
    """The one that runs once is the one with the kill; sums, windows and ends are those of the others."""
    copy = tmp_path / "cluster"
    shutil.copytree(cluster, copy)
    names = pq.read_table(copy / "names.parquet").to_pylist()
    once, sidecar = sorted({name[s.COLLECTION_ID] for name in names})[:2]
    for name in names:
        name[s.CONTAINER_KIND] = {once: "init", sidecar: "sidecar"}.get(name[s.COLLECTION_ID])
    pq.write_table(
        pa.Table.from_pylist(names, schema=s.with_extras("names", [s.CONTAINER_KIND])), copy / "names.parquet"
    )
    found = run_experiment(EXPERIMENT, copy, tmp_path / "out", CONFIG, tracking=False)
    lines, before = lines_of(found), lines_of(report)
    (gone,) = before.keys() - lines.keys()
    assert before[gone]["collection_id"] == once
    assert [line["collection_id"] for line in lines.values() if line["sidecar"]] == [sidecar]
    assert [one["collection_id"] for one in records(found.results) if one["sidecar"]] == [sidecar]
    assert {line["oom_kills"] for line in lines.values()} == {0}
    for r in s.RESOURCES:
        left = sum(line["tasks"] * line[r]["request"] for line in before.values() if line["collection_id"] != once)
        assert found.results["totals"][r]["requested"] == pytest.approx(left)


def test_anonymous_files_have_no_name_of_the_cluster(cluster: Path, tmp_path: Path) -> None:
    config = RecommendConfig(estimators=("max-so-far",), hold_days=0.25, draws=20, anonymise=True)
    found = run_experiment(EXPERIMENT, cluster, tmp_path / "out", config, tracking=False)
    for path in found.folder.iterdir():
        text = path.read_text()
        assert [name for name in ("svc-", "shop", "web-scaler", "proxy") if name in text] == [], path.name
    lines = found.results["workloads"]
    assert len({line["name"] for line in lines}) == 6  # svc-2 is in both namespaces
    assert {line["kind"] for line in lines} == {"Deployment"}
