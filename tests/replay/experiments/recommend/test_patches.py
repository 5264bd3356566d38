"""Formats for programs: KRR's JSON by its rules, and patches that kustomize applies to requests and nothing else."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from reclaim.data.errors import ConfigError
from reclaim.replay.experiments.recommend.formats import as_csv, as_krr_json, changes, records
from reclaim.replay.experiments.recommend.page import labels_of, verdict_of
from reclaim.replay.experiments.recommend.patches import check_target, quantity, write_patches

MIB = 2.0**20
KUBECTL = shutil.which("kubectl")


def of_resource(request: float | None, limit: float | None, recommended: float | None, rule: str) -> dict[str, Any]:
    return {
        "request": request, "limit": limit, "recommended": recommended, "change": None, "reclaimable": None,
        "rule": rule, "words": rule, "spread": 1.0, "as_requested": 0.0,
        "violation": {"value": 0.001, "low": 0.0, "high": 0.002, "windows": 1000, "violations": 1},
    }  # fmt: skip


def line(name: str, container: str, cpu: dict[str, Any], memory: dict[str, Any], **of: Any) -> dict[str, Any]:
    return {
        "namespace": "shop", "kind": "Deployment", "name": name, "container": container, "collection_id": 7,
        "tasks": 2, "pods": ["web-a", "web-b"], "oom_kills": 0, "autoscaler": None, "cluster": None, "sidecar": False,
        "running": True, "absent": False,
        "cpu": cpu, "memory": memory, **of,
    }  # fmt: skip


SAME = of_resource(0.1, None, 0.1, "small change")


def results_of(*lines: dict[str, Any], kubernetes: bool = True, anonymise: bool = False) -> dict[str, Any]:
    return {
        "workloads": list(lines), "kubernetes": kubernetes, "hold_days": 1.0, "budget": {"cpu": 0.01, "memory": 0.001},
        "anonymous": anonymise,
    }  # fmt: skip


RESULTS = results_of(
    line(
        "web", "app", of_resource(1.0, 2.0, 0.25, "estimate"), of_resource(512 * MIB, 1024 * MIB, 300 * MIB, "estimate")
    ),
    line("web", "proxy", SAME, of_resource(64 * MIB, 64 * MIB, 164 * MIB, "out of memory"), oom_kills=3),
    line("batch", "run", SAME, of_resource(64 * MIB, None, 1024 * MIB, "estimate"), kind="CronJob", namespace="jobs"),
    line("canary", "app", of_resource(1.0, None, 0.5, "estimate"), SAME, kind="Rollout"),
)

BASE = """
apiVersion: apps/v1
kind: Deployment
metadata: {name: web, labels: {app: web}}
spec:
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec:
      containers:
      - {name: app, image: web, resources: {requests: {cpu: "1", memory: 512Mi}, limits: {cpu: "2", memory: 1Gi}}}
      - {name: proxy, image: proxy, resources: {requests: {cpu: 100m, memory: 64Mi}, limits: {memory: 64Mi}}}
      - {name: other, image: other}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: web-2}
spec:
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec: {containers: [{name: app, image: web}]}
"""


@pytest.mark.skipif(KUBECTL is None, reason="no kubectl on this machine")
def test_kustomize_applies_the_patches_to_requests_alone(tmp_path: Path) -> None:
    written = write_patches(RESULTS, tmp_path / "patches")
    assert written.workloads == 2
    assert written.left_out == (
        "shop/canary, a Rollout: kustomize cannot merge its containers by name, and would replace them all",
    )
    (tmp_path / "base.yaml").write_text(BASE)
    content = {"resources": ["base.yaml"], "namespace": "shop-prod", "components": ["patches/shop"]}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(content))
    done = subprocess.run([str(KUBECTL), "kustomize", str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    web, other = yaml.safe_load_all(done.stdout)
    assert web["metadata"]["namespace"] == "shop-prod"
    app, proxy, untouched = web["spec"]["template"]["spec"]["containers"]
    assert app == {
        "name": "app", "image": "web",
        "resources": {"requests": {"cpu": "250m", "memory": "300Mi"}, "limits": {"cpu": "2", "memory": "1Gi"}},
    }  # fmt: skip
    # killed at its limit of 64 MiB: no container may request more than its limit, so that is raised
    assert proxy["resources"] == {"requests": {"cpu": "100m", "memory": "164Mi"}, "limits": {"memory": "164Mi"}}
    assert untouched == {"name": "other", "image": "other"}
    assert other["spec"]["template"]["spec"]["containers"] == [{"name": "app", "image": "web"}]


@pytest.mark.skipif(KUBECTL is None, reason="no kubectl on this machine")
def test_a_cron_job_is_patched_where_its_pods_are(tmp_path: Path) -> None:
    write_patches(RESULTS, tmp_path / "patches")
    job = {"containers": [{"name": "run", "image": "run"}], "restartPolicy": "Never"}
    base: dict[str, Any] = {
        "apiVersion": "batch/v1", "kind": "CronJob", "metadata": {"name": "batch"},
        "spec": {"schedule": "0 * * * *", "jobTemplate": {"spec": {"template": {"spec": job}}}},
    }  # fmt: skip
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(base))
    content = {"resources": ["base.yaml"], "components": ["patches/jobs"]}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(content))
    done = subprocess.run([str(KUBECTL), "kustomize", str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (container,) = yaml.safe_load(done.stdout)["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"]
    assert container == {"name": "run", "image": "run", "resources": {"requests": {"memory": "1Gi"}}} or (
        container["resources"] == {"requests": {"memory": "1024Mi"}}
    )


def test_patches_replace_what_they_wrote_before_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "patches"
    write_patches(RESULTS, folder)
    write_patches(results_of(RESULTS["workloads"][0]), folder)
    assert sorted(path.name for path in folder.iterdir()) == ["README", "shop"]
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "kustomization.yaml").write_text("resources: []\n")
    with pytest.raises(ConfigError, match="was not written by this command"):
        write_patches(RESULTS, mine)
    assert (mine / "kustomization.yaml").read_text() == "resources: []\n"
    with pytest.raises(ConfigError, match="was not written by this command"):
        write_patches(RESULTS, mine / "kustomization.yaml")  # a file


def test_workloads_of_two_clusters_are_kept_apart(tmp_path: Path) -> None:
    web = RESULTS["workloads"][0]
    folder = tmp_path / "patches"
    write_patches(results_of({**web, "cluster": "arn:aws/../eu"}, {**web, "cluster": "us"}), folder)
    found = sorted(str(path.relative_to(folder)) for path in folder.rglob("deployment-web.yaml"))
    assert found == ["arn-aws-eu-52970d35/shop/deployment-web.yaml", "us/shop/deployment-web.yaml"]
    assert (folder / "us" / "shop" / "kustomization.yaml").is_file()


def test_clusters_that_differ_in_punctuation_or_case_have_folders_of_their_own(tmp_path: Path) -> None:
    """A file system without case would take two of them for one, too."""
    clusters = ["eu-1", "eu.1", "eu/1", "EU-1", "eu_1", "eu-1-", "...", "README"]
    lines = [{**RESULTS["workloads"][0], "cluster": one} for one in clusters]
    folder = tmp_path / "patches"
    assert write_patches(results_of(*lines), folder).workloads == len(clusters)
    assert len({path.parts[-3].lower() for path in folder.rglob("deployment-web.yaml")}) == len(clusters)
    assert (folder / "eu-1" / "shop").is_dir()


def test_pods_that_cannot_be_changed_are_left_out_with_the_reason(tmp_path: Path) -> None:
    """A Job is immutable; a CronJob is not, its next Jobs have the new requests."""
    cpu = of_resource(1.0, None, 0.5, "estimate")
    lines = [line(kind.lower(), "app", cpu, SAME, kind=kind) for kind in ("Job", "CronJob", "Pod", "Node")]
    written = write_patches(results_of(*lines), tmp_path / "patches")
    assert [path.name for path in (tmp_path / "patches").rglob("*-*.yaml")] == ["cronjob-cronjob.yaml"]
    assert written.left_out == (
        "shop/job, a Job: the pods of a Job cannot be changed; set the requests where it is made",
        "shop/pod, a Pod: the requests of a Pod cannot be changed by a patch; set them where it is made",
        "shop/node, a Node: its pods are static; set the requests in their files on the node",
    )
    over = [{**one, "running": False} for one in lines]  # of jobs and pods that ended there may be thousands
    written = write_patches(results_of(*over), tmp_path / "patches")
    assert (written.workloads, written.left_out) == (1, ())
    written = write_patches(results_of(*({**one, "absent": True} for one in over)), tmp_path / "patches")
    assert (written.workloads, [name.partition(",")[0] for name in written.left_out]) == (0, ["app of shop/cronjob"])


UNSET = of_resource(None, None, 0.05, "estimate")


def containers_in(folder: Path) -> dict[str, list[str]]:
    """Return the containers that each patch names."""
    patches = {path.stem: yaml.safe_load(path.read_text()) for path in folder.rglob("deployment-*.yaml")}
    return {name: [of["name"] for of in patch["spec"]["template"]["spec"]["containers"]]
            for name, patch in patches.items()}  # fmt: skip


def test_a_container_without_request_and_limit_is_left_out_as_it_may_be_an_init_container(tmp_path: Path) -> None:
    """Kustomize would add it under `containers`, without an image."""
    limited = of_resource(None, 1.0, 0.05, "estimate")
    lines = [
        line("web", "app", of_resource(1.0, None, 0.5, "estimate"), SAME), line("web", "migrate", UNSET, UNSET),
        line("web", "proxy", UNSET, UNSET), line("shopper", "wait", UNSET, UNSET),
        line("cart", "app", UNSET, limited), line("one", "app", UNSET, UNSET, kind="Pod"),
    ]  # fmt: skip
    written = write_patches(results_of(*lines), tmp_path / "patches")
    assert containers_in(tmp_path / "patches") == {"deployment-web": ["app"], "deployment-cart": ["app"]}
    assert written.workloads == 2
    immutable, *unlisted = written.left_out
    assert immutable.startswith("shop/one, a Pod: the requests of a Pod cannot be changed")
    why = "without a request and a limit; may be an init container or a sidecar"
    assert len(unlisted) == 2
    assert unlisted[0].startswith(f"migrate, proxy of shop/web, a Deployment: {why}")
    assert unlisted[1].startswith(f"wait of shop/shopper, a Deployment: {why}")


def test_containers_that_are_asked_for_are_patched_whether_they_have_requests_or_not(tmp_path: Path) -> None:
    lines = [
        line("web", "app", UNSET, UNSET), line("web", "migrate", UNSET, UNSET),
        line("web", "istio-proxy", of_resource(0.1, None, 0.5, "estimate"), SAME),
    ]  # fmt: skip
    written = write_patches(results_of(*lines), tmp_path / "patches", containers="app|log.*")
    assert containers_in(tmp_path / "patches") == {"deployment-web": ["app"]}
    assert written.left_out == ()
    with pytest.raises(ConfigError, match=r"--patch-containers '\('"):
        check_target(tmp_path / "patches", kubernetes=True, anonymous=False, containers="(")


def test_a_container_that_the_last_pod_is_without_is_left_out_unless_it_is_asked_for(tmp_path: Path) -> None:
    """It was renamed: kustomize would add the old one without an image, and the API server refuses the whole object."""
    asked = of_resource(0.1, None, 0.5, "estimate")
    lines = line("web", "old", asked, SAME, absent=True), line("web", "app", asked, SAME)
    written = write_patches(results_of(*lines), tmp_path / "patches")
    assert containers_in(tmp_path / "patches") == {"deployment-web": ["app"]}
    (said,) = written.left_out
    assert said.startswith("old of shop/web, a Deployment: not in the pod that began last")
    write_patches(results_of(*lines), tmp_path / "patches", containers="old")
    assert containers_in(tmp_path / "patches") == {"deployment-web": ["old"]}


@pytest.mark.skipif(KUBECTL is None, reason="no kubectl on this machine")
@pytest.mark.parametrize("name", ["1e3", "08", "y"])
def test_a_name_that_kubectl_would_read_as_something_else_is_in_quotes(name: str, tmp_path: Path) -> None:
    """PyYAML leaves them bare: to kubectl they are the numbers 1000 and 8, and true."""
    write_patches(results_of(line(name, name, of_resource(1.0, None, 0.5, "estimate"), SAME)), tmp_path / "patches")
    base = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name},
            "spec": {"template": {"spec": {"containers": [{"name": name, "image": "web"}]}}}}  # fmt: skip
    (tmp_path / "base.json").write_text(json.dumps(base))
    patch = tmp_path / "patches" / "shop" / f"deployment-{name}.yaml"
    command = [str(KUBECTL), "patch", "--local", "-o", "json", "-f", str(tmp_path / "base.json"), "--patch-file"]
    done = subprocess.run([*command, str(patch)], capture_output=True, text=True, check=True)
    (container,) = json.loads(done.stdout)["spec"]["template"]["spec"]["containers"]
    assert container == {"name": name, "image": "web", "resources": {"requests": {"cpu": "500m"}}}


@pytest.mark.parametrize("containers", [None, "app|istio-proxy"])
def test_a_native_sidecar_is_left_out_also_where_it_is_asked_for(containers: str | None, tmp_path: Path) -> None:
    """Kustomize would move it before the other init containers, which start in their order."""
    asked = of_resource(0.1, None, 0.5, "estimate")
    lines = [
        line("web", "app", asked, SAME), line("web", "istio-proxy", asked, SAME, sidecar=True),
        line("one", "istio-proxy", asked, SAME, sidecar=True, kind="Pod"),
    ]  # fmt: skip
    written = write_patches(results_of(*lines), tmp_path / "patches", containers=containers)
    assert containers_in(tmp_path / "patches") == {"deployment-web": ["app"]}
    immutable, sidecar = written.left_out
    assert immutable.startswith("shop/one, a Pod: the requests of a Pod cannot be changed")
    assert sidecar.startswith(
        "istio-proxy of shop/web, a Deployment: a native sidecar; kustomize would start it before"
    )


@pytest.mark.skipif(KUBECTL is None, reason="no kubectl on this machine")
def test_kustomize_moves_an_init_container_that_a_patch_names_to_the_front(tmp_path: Path) -> None:
    """The reason why none is patched; once this fails, native sidecars may be."""
    base = next(yaml.safe_load_all(BASE))
    base["spec"]["template"]["spec"]["initContainers"] = [{"name": "migrate", "image": "m"}, {"name": "sync"}]
    patch = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "web"}, "spec": {"template": {"spec": {
        "initContainers": [{"name": "sync", "resources": {"requests": {"cpu": "1"}}}]}}}}  # fmt: skip
    kustomization = {"resources": ["base.yaml"], "patches": [{"path": "patch.yaml"}]}
    for name, content in (("base", base), ("patch", patch), ("kustomization", kustomization)):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(content))
    done = subprocess.run([str(KUBECTL), "kustomize", str(tmp_path)], capture_output=True, text=True, check=True)
    made = yaml.safe_load(done.stdout)["spec"]["template"]["spec"]["initContainers"]
    assert [one["name"] for one in made] == ["sync", "migrate"]


def test_anonymous_workloads_are_not_patched(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="anonymous"):
        write_patches(results_of(*RESULTS["workloads"], anonymise=True), tmp_path / "patches")


def test_a_namespace_is_no_path(tmp_path: Path) -> None:
    evil = line("web", "app", of_resource(1.0, None, 0.5, "estimate"), SAME, namespace="../../evil")
    with pytest.raises(ConfigError, match="no name of Kubernetes"):
        write_patches(results_of(evil), tmp_path / "patches")
    assert not (tmp_path / "patches").exists()


def test_a_name_is_no_path(tmp_path: Path) -> None:
    evil = line("../../web", "app", of_resource(1.0, 2.0, 0.25, "estimate"), SAME, namespace="../up")
    with pytest.raises(ConfigError, match="no name of Kubernetes"):
        write_patches(results_of(evil), tmp_path / "patches")
    assert not (tmp_path / "patches").exists()


def test_the_krr_report_has_its_shape_severities_and_score() -> None:
    report = json.loads(as_krr_json(RESULTS))
    assert set(report) == {
        "scans", "score", "resources", "description", "strategy", "errors", "clusterSummary", "config"
    }  # fmt: skip
    web, proxy, batch, canary = report["scans"]
    assert set(web["object"]) == {
        "cluster", "name", "container", "pods", "hpa", "namespace", "kind", "allocations", "warnings", "labels",
        "annotations",
    }  # fmt: skip
    assert web["object"]["allocations"]["requests"] == {"cpu": 1.0, "memory": 512 * MIB}
    assert web["object"]["pods"] == [{"name": "web-a", "deleted": False}, {"name": "web-b", "deleted": False}]
    assert web["recommended"]["requests"] == {
        "cpu": {"value": 0.25, "severity": "CRITICAL"},  # 0.75 cores less
        "memory": {"value": 300 * MIB, "severity": "OK"},  # 212 MiB less
    }
    assert web["recommended"]["limits"]["memory"] == {"value": 1024 * MIB, "severity": "GOOD"}
    assert web["severity"] == "CRITICAL"
    assert proxy["recommended"]["requests"]["memory"]["severity"] == "CRITICAL"  # it was killed
    assert proxy["recommended"]["limits"]["memory"] == {"value": 164 * MIB, "severity": "OK"}
    assert batch["recommended"]["requests"]["memory"]["severity"] == "CRITICAL"  # 960 MiB more
    assert canary["recommended"]["limits"]["cpu"] == {"value": None, "severity": "GOOD"}
    assert report["score"] == 0  # all four are critical
    assert web["reclaim"]["cpu_violation"] == 0.001


def test_what_is_unknown_is_a_question_mark_and_a_request_that_is_missing_a_warning() -> None:
    unknown = line("new", "app", of_resource(0.5, None, 0.5, "unknown"), of_resource(None, None, 64 * MIB, "estimate"))
    report = json.loads(as_krr_json(results_of(unknown)))
    requests = report["scans"][0]["recommended"]["requests"]
    assert requests["cpu"] == {"value": "?", "severity": "UNKNOWN"}
    assert requests["memory"] == {"value": 64 * MIB, "severity": "WARNING"}
    assert report["score"] == 30  # a warning costs 0.7 of one scan


@pytest.mark.parametrize(
    ("resource", "unit", "least"),
    [("cpu", 1.0, (0.5, 0.25, 0.1)), ("memory", MIB, (500.0, 250.0, 100.0))],
)
def test_a_difference_is_as_severe_as_krr_calls_it_in_either_direction_from_each_bound_on(
    resource: str, unit: float, least: tuple[float, float, float]
) -> None:
    for lowered in (False, True):
        for bound, at_it, below in zip(least, ("CRITICAL", "WARNING", "OK"), ("WARNING", "OK", "GOOD"), strict=True):
            for by, severity in ((bound, at_it), (bound - 1 / 1024, below)):
                present, wanted = (by * unit, 0.0) if lowered else (0.0, by * unit)
                changed = of_resource(present, None, wanted, "estimate")
                one = line("web", "app", SAME, SAME) | {resource: changed}
                (scan,) = json.loads(as_krr_json(results_of(one)))["scans"]
                assert scan["recommended"]["requests"][resource]["severity"] == severity, (lowered, by)
                assert scan["severity"] == severity


def test_the_krr_report_leaves_out_what_is_over_for_good_and_counts_it_in_no_score() -> None:
    changed = of_resource(1.0, None, 0.25, "estimate")  # critical
    over = {"running": False}
    lines = [
        line("web", "app", SAME, SAME), line("pause", "app", SAME, SAME, **over),
        line("job-1", "app", changed, SAME, kind="Job", **over), line("web", "old", changed, SAME, absent=True, **over),
    ]  # fmt: skip
    report = json.loads(as_krr_json(results_of(*lines)))
    assert [scan["object"]["name"] for scan in report["scans"]] == ["web", "pause"]
    assert report["score"] == 100


def test_a_scan_is_as_severe_as_the_worst_of_its_requests_and_limits() -> None:
    # the request grows by 0.2 cores, which is worth a look; the limit has to be raised by 0.3 for it
    raised = of_resource(0.8, 0.7, 1.0, "out of memory")
    (scan,) = json.loads(as_krr_json(results_of(line("web", "app", raised, SAME))))["scans"]
    assert scan["recommended"]["requests"]["cpu"]["severity"] == "OK"
    assert scan["recommended"]["limits"]["cpu"] == {"value": 1.0, "severity": "WARNING"}
    assert scan["severity"] == "WARNING"


def test_an_end_out_of_memory_makes_the_memory_critical_and_says_nothing_of_the_cpu() -> None:
    (scan,) = json.loads(as_krr_json(results_of(line("web", "app", SAME, SAME, oom_kills=1))))["scans"]
    severities = {r: of["severity"] for r, of in scan["recommended"]["requests"].items()}
    assert severities == {"cpu": "GOOD", "memory": "CRITICAL"}


def test_a_request_that_neither_is_set_nor_can_be_is_a_question_mark() -> None:
    none = of_resource(None, None, None, "no request")
    (scan,) = json.loads(as_krr_json(results_of(line("web", "app", none, SAME))))["scans"]
    assert scan["recommended"]["requests"]["cpu"] == {"value": "?", "severity": "UNKNOWN"}


def test_krr_is_warned_of_an_autoscaler_where_there_is_one() -> None:
    lines = line("web", "app", SAME, SAME, autoscaler="web"), line("web", "app", SAME, SAME)
    scans = json.loads(as_krr_json(results_of(*lines)))["scans"]
    assert [scan["object"]["warnings"] for scan in scans] == [["HPADetected"], []]


def test_without_a_workload_the_files_are_whole_and_the_score_is_zero() -> None:
    report = json.loads(as_krr_json(results_of()))
    assert (report["scans"], report["score"]) == ([], 0)
    assert as_csv(results_of()).startswith("cluster,namespace,kind,name,container,sidecar,collection_id,")


def test_a_record_has_the_bounds_of_the_violation_each_under_its_name() -> None:
    (record,) = records(results_of(line("web", "app", SAME, SAME)))
    of = {key: record[f"cpu_{key}"] for key in ("violation", "violation_low", "violation_high", "windows")}
    assert of == {"violation": 0.001, "violation_low": 0.0, "violation_high": 0.002, "windows": 1000}


def test_a_workload_changes_where_one_request_of_it_does() -> None:
    less = of_resource(1.0, None, 0.5, "estimate")
    assert changes(results_of(line("web", "app", SAME, less), line("cart", "app", SAME, SAME))) == 1
    over = line("web", "app", SAME, less, running=False)
    kinds = [{**over, "kind": kind} for kind in ("Job", "Pod", "CronJob")]  # a job that is over cannot be changed
    assert changes(results_of(*kinds, {**over, "absent": True})) == 1


@pytest.mark.parametrize(
    ("resource", "amount", "text"),
    [
        ("cpu", 0.25, "250m"), ("cpu", 2.0, "2"), ("cpu", 1.1, "1100m"), ("cpu", 0.0, "0"),
        ("cpu", 1.001, "1001m"),  # 1000.9999999999999 thousandths
        ("memory", 256 * MIB, "256Mi"), ("memory", 1e8, "100000000"), ("memory", 256.5 * MIB, "268959744"),
    ],
)  # fmt: skip
def test_an_amount_is_written_in_the_largest_unit_that_it_is_whole_in(resource: str, amount: float, text: str) -> None:
    assert quantity(resource, amount) == text


def test_a_patch_is_for_the_object_of_exactly_that_name(tmp_path: Path) -> None:
    less = of_resource(1.0, None, 0.5, "estimate")
    write_patches(results_of(line("web.v2", "app", less, SAME)), tmp_path / "patches")
    content = yaml.safe_load((tmp_path / "patches" / "shop" / "kustomization.yaml").read_text())
    # kustomize reads a regular expression, which a dot and the names that only begin so would fit, too
    assert [patch["target"] for patch in content["patches"]] == [{"kind": "Deployment", "name": "^web[.]v2$"}]


def test_a_request_that_reaches_the_limit_raises_none(tmp_path: Path) -> None:
    whole = of_resource(64 * MIB, 128 * MIB, 128 * MIB, "limit")
    write_patches(results_of(line("web", "app", SAME, whole)), tmp_path / "patches")
    patch = yaml.safe_load((tmp_path / "patches" / "shop" / "deployment-web.yaml").read_text())
    (container,) = patch["spec"]["template"]["spec"]["containers"]
    assert container == {"name": "app", "resources": {"requests": {"memory": "128Mi"}}}


def test_the_expression_of_containers_is_of_the_whole_name(tmp_path: Path) -> None:
    less = of_resource(1.0, None, 0.5, "estimate")
    lines = line("web", "app", less, SAME), line("web", "app-proxy", less, SAME)
    write_patches(results_of(*lines), tmp_path / "patches", containers="app")
    patch = yaml.safe_load((tmp_path / "patches" / "shop" / "deployment-web.yaml").read_text())
    assert [of["name"] for of in patch["spec"]["template"]["spec"]["containers"]] == ["app"]


def test_patches_go_into_an_empty_folder_and_into_none_with_a_note_of_another(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    write_patches(RESULTS, tmp_path / "empty")
    assert (tmp_path / "empty" / "shop" / "kustomization.yaml").is_file()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "README").write_text("# our cluster\n")
    with pytest.raises(ConfigError, match="was not written by this command"):
        write_patches(RESULTS, tmp_path / "other")


@pytest.mark.parametrize(
    ("value", "low", "verdict"),
    [
        (0.001, 0.0, "within the budget"), (0.002, 0.0005, "within the noise"), (0.002, 0.0015, "exceeds the budget"),
        (0.001, 0.001, "within the budget"), (0.002, 0.001, "within the noise"),
        (0.002, None, "unknown"), (None, None, ""),
    ],
)  # fmt: skip
def test_a_rate_above_the_budget_exceeds_it_only_beyond_the_noise(
    value: float | None, low: float | None, verdict: str
) -> None:
    rate = {"violation_rate": {"memory": {"value": value, "low": low, "high": None}}}
    assert verdict_of(RESULTS | {"test": {"recommendation": rate}}, "memory") == verdict


def test_workloads_that_share_a_name_are_told_apart_by_their_kind() -> None:
    lines = [
        line("web", "app", SAME, SAME), line("web", "app", SAME, SAME, kind="StatefulSet"),
        line("web", "db", SAME, SAME), line("cart", "app", SAME, SAME), line("cart", "log", SAME, SAME),
        line("web", "app", SAME, SAME, namespace="pay"),
    ]  # fmt: skip
    assert labels_of(lines) == [
        "shop/web/app (Deployment)", "shop/web/app (StatefulSet)", "shop/web/db (Deployment)", "shop/cart/app",
        "shop/cart/log", "pay/web/app",
    ]  # fmt: skip


@pytest.mark.parametrize("first", ["=", "+", "-", "@"])
def test_a_cell_of_the_csv_is_no_formula(first: str) -> None:
    text = as_csv(results_of(line(f"{first}cmd()", "app", SAME, SAME)))
    assert f"'{first}cmd()" in text
