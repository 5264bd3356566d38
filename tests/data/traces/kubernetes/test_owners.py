"""Tests of what series say of pods: their topmost owners, tiers and autoscalers."""

from __future__ import annotations

import pytest

from reclaim.data import schema as s
from reclaim.data.traces.kubernetes.owners import Owners, Workload, owners_of
from reclaim.data.traces.series import task_id
from tests.data.traces.kubernetes.histories import DIALECT, POD, T0, beat, one


def owners(**roles: list[dict[str, str]]) -> Owners:
    """Return the owners that series of value 1 tell."""
    return owners_of([{role: [one(labels, [(0, 1)]) for labels in rows] for role, rows in roles.items()}], DIALECT)


def test_a_pods_workload_is_its_topmost_owner() -> None:
    pod = ("", "shop", POD["pod"])
    of_set = POD | {"owner_kind": "ReplicaSet", "owner_name": "cart-7d9f8b6c5x", "owner_is_controller": "true"}
    set_owner = {"namespace": "shop", "replicaset": "cart-7d9f8b6c5x", "owner_kind": "Deployment", "owner_name": "cart"}
    cart = Workload("", "shop", "Deployment", "cart")
    assert owners(owner=[of_set], replicaset_owner=[set_owner]).workload(pod) == cart
    rollout = set_owner | {"owner_kind": "Rollout"}
    assert owners(owner=[of_set], replicaset_owner=[rollout]).workload(pod).kind == "Rollout"
    assert owners(owner=[of_set]).workload(pod) == cart  # off the set's name
    assert owners(owner=[of_set | {"owner_name": "own-set"}]).workload(pod).kind == "ReplicaSet"
    created = POD | {"created_by_kind": "DaemonSet", "created_by_name": "agent"}
    assert owners(pod=[created]).workload(pod) == Workload("", "shop", "DaemonSet", "agent")
    alone = POD | {"created_by_kind": "<none>", "created_by_name": "<none>"}
    assert owners(pod=[alone]).workload(pod) == Workload("", "shop", "Pod", POD["pod"])


def test_a_job_belongs_to_its_cron_job_and_runs_share_a_name() -> None:
    pod = ("", "batch", "report-29892000-xk2pq")
    of_job = {"namespace": "batch", "pod": pod[2], "owner_kind": "Job", "owner_name": "report-29892000"}
    owner = {"namespace": "batch", "job_name": "report-29892000", "owner_kind": "CronJob", "owner_name": "nightly"}
    assert owners(owner=[of_job], job_owner=[owner]).workload(pod) == Workload("", "batch", "CronJob", "nightly")
    assert owners(owner=[of_job]).workload(pod) == Workload("", "batch", "CronJob", "report")
    job = Workload("", "batch", "Job", "migrate-2026-11-02")
    assert job.logical_name("app") == "Job/migrate/app"
    assert job.collection_name("app") == "batch/Job/migrate-2026-11-02/app"
    assert Workload("eu", "a", "Job", "7").collection_name("c") == "eu/a/Job/7/c"
    assert Workload("eu", "a", "Job", "7").logical_name("c") == "Job/7/c"


def test_of_two_pods_of_one_name_the_later_one_counts_whatever_its_labels() -> None:
    """A pod of a set that came again under another priority class: series are in the order of labels."""
    pod = {"namespace": "shop", "pod": "db-0"}
    later, earlier = ({"uid": uid, "priority_class": of} for uid, of in (("a", "koord-free"), ("z", "koord-mid")))
    series = [one(pod | later, beat(600, 1200)), one(pod | earlier, beat(0, 600))]
    assert s.TIERS[owners_of([{"pod": series}], DIALECT).tier(("", "shop", "db-0"))] == "free"
    quality = [one(pod | {"uid": uid, "qos_class": of}, beat(start, start + 600))
               for uid, of, start in (("a", "BestEffort", 600), ("z", "Guaranteed", 0))]  # fmt: skip
    assert s.TIERS[owners_of([{"quality": quality}], DIALECT).tier(("", "shop", "db-0"))] == "free"


def test_the_owners_of_pods_that_are_kept_stay_and_all_others_are_forgotten() -> None:
    found = Owners(DIALECT)
    for cluster in ("", "shop"):  # a set of the same name in each
        labels = {"namespace": "shop"} | ({"cluster": cluster} if cluster else {})
        of_set = labels | {
            "pod": f"web{cluster}-x",
            "owner_kind": "ReplicaSet",
            "owner_name": f"web{cluster}-7d9f8b6c5x",
        }
        of_job = labels | {"pod": f"run{cluster}-x", "owner_kind": "Job", "owner_name": f"run{cluster}"}
        set_of = labels | {"replicaset": of_set["owner_name"], "owner_kind": "Rollout", "owner_name": "web"}
        job_of = labels | {"job_name": of_job["owner_name"], "owner_kind": "Workflow", "owner_name": "run"}
        for role, series in (("owner", [of_set, of_job]), ("replicaset_owner", [set_of]), ("job_owner", [job_of])):
            found.add({role: [one(of, [(0, 1)]) for of in series]})
    kept = {("", "shop", "web-x"), ("", "shop", "run-x")}
    found.keep(kept)
    assert found.pods.keys() == kept
    assert [found.workload(pod).kind for pod in sorted(kept)] == ["Workflow", "Rollout"]
    assert (len(found.sets), len(found.jobs)) == (1, 1)


def test_the_quality_of_a_pod_is_the_one_that_is_true() -> None:
    """There is a series of each class, of which one has the value 1."""
    found = Owners(DIALECT)
    for classes in (("BestEffort", "Guaranteed"), ("Guaranteed", "BestEffort")):
        said = [one(POD | {"qos_class": name}, [(0, float(name == "Guaranteed"))]) for name in classes]
        found.add({"quality": said})
        assert s.TIERS[found.tier(("", "shop", POD["pod"]))] == "prod"


def test_of_two_scalers_of_a_workload_the_one_that_was_said_last_counts_in_whatever_order_they_come() -> None:
    target = {"namespace": "shop", "scaletargetref_kind": "Deployment", "scaletargetref_name": "cart"}
    old = one(target | {"horizontalpodautoscaler": "old"}, [(0, 1), (300, 1)])
    new = one(target | {"horizontalpodautoscaler": "new"}, [(330, 1), (600, 1)])
    for series in ([old, new], [new, old]):
        found = owners_of([{"autoscaler": series}], DIALECT)
        assert found.autoscaler(Workload("", "shop", "Deployment", "cart")) == "new"


@pytest.mark.parametrize("none", ["", "<none>"])
def test_a_job_or_a_set_without_an_owner_is_its_own_workload_whatever_its_name_looks_like(none: str) -> None:
    """kube-state-metrics 2 says that there is no owner by empty labels, older ones by `<none>`."""
    unowned = {"owner_kind": none, "owner_name": none, "owner_is_controller": none}
    pod = {"namespace": "batch", "pod": "migrate-10000000-bcdfg"}
    of_job = pod | {"owner_kind": "Job", "owner_name": "migrate-10000000"}
    job = {"namespace": "batch", "job_name": "migrate-10000000"}
    key = ("", "batch", pod["pod"])
    assert owners(owner=[of_job], job_owner=[job | unowned]).workload(key) == Workload(
        "", "batch", "Job", "migrate-10000000"
    )
    nightly = job | {"owner_kind": "CronJob", "owner_name": "nightly"}
    assert owners(owner=[of_job], job_owner=[nightly, job | unowned]).workload(key).kind == "CronJob"
    of_set = pod | {"owner_kind": "ReplicaSet", "owner_name": "web-7d9f8b6c5x"}
    bare_set = {"namespace": "batch", "replicaset": "web-7d9f8b6c5x"} | unowned
    assert owners(owner=[of_set], replicaset_owner=[bare_set]).workload(key) == Workload(
        "", "batch", "ReplicaSet", "web-7d9f8b6c5x"
    )


@pytest.mark.parametrize(
    ("name", "kind", "workload"),
    [("cart-7d9f8b6c5x-abcde", "Pod", None), ("cart-7d9f8b6c5x-bcdfg", "Deployment", "cart"),
     ("ledger-12", "StatefulSet", "ledger"), ("debug", "Pod", "debug")],
)  # fmt: skip
def test_without_facts_a_workload_is_read_off_the_pods_name(name: str, kind: str, workload: str | None) -> None:
    """Random parts of names have no vowels: `abcde` is none."""
    found = Owners(DIALECT).workload(("", "a", name))
    assert (found.kind, found.name) == (kind, workload or name)


def test_a_pods_owner_is_read_off_its_name_where_only_other_things_are_said_of_it() -> None:
    """An allow-list of metrics may leave out `kube_pod_info` and `kube_pod_owner`."""
    pod = POD | {"pod": "cart-7d9f8b6c5x-bcdfg"}
    key, cart = ("", "shop", pod["pod"]), Workload("", "shop", "Deployment", "cart")
    assert owners(quality=[pod | {"qos_class": "Burstable"}]).workload(key) == cart
    assert owners(completed=[pod], evicted=[pod]).workload(key) == cart
    for none in (owners(pod=[pod], quality=[pod]), owners(owner=[pod | {"owner_kind": "<none>"}])):
        assert none.workload(key) == Workload("", "shop", "Pod", pod["pod"])


def test_tiers_come_from_the_table_of_priority_classes() -> None:
    b, c = {"namespace": "a", "pod": "b"}, {"namespace": "a", "pod": "c"}
    said = owners(
        pod=[POD | {"priority_class": "system-node-critical"}, b | {"priority_class": "other"}, c],
        quality=[b | {"qos_class": "BestEffort"}, c | {"qos_class": "BestEffort"}],
    )
    tiers = [s.TIERS[said.tier(("", *pod))] for pod in (("shop", POD["pod"]), ("a", "b"), ("a", "c"), ("a", "unknown"))]
    assert tiers == ["mon", "prod", "free", "prod"]
    assert said.index(("", "a", "ledger-3"), Workload("", "a", "StatefulSet", "ledger")) == 3
    assert said.index(("", "a", "web-3"), Workload("", "a", "Deployment", "web")) == task_id("pod/web-3")


def test_a_scaler_holds_the_resources_whose_utilization_it_targets() -> None:
    scaler = {"namespace": "shop", "horizontalpodautoscaler": "h", "scaletargetref_kind": "Deployment",
              "scaletargetref_name": "cart"}  # fmt: skip
    cart, other = (Workload("", "shop", "Deployment", name) for name in ("cart", "other"))
    of = {"namespace": "shop", "horizontalpodautoscaler": "h"}

    def held(*targets: tuple[str, str]) -> tuple[str, ...]:
        rows = [of | {"metric_name": name, "metric_target_type": kind} for name, kind in targets]
        return owners(autoscaler=[scaler], autoscaler_target=rows).autoscaled(cart)

    assert held() == ("cpu",)  # older exporters do not say it, and CPU is usual
    assert held(("cpu", "utilization"), ("memory", "utilization")) == ("cpu", "memory")
    assert held(("memory", "utilization"), ("cpu", "average")) == ("memory",)
    assert held(("requests_per_second", "average")) == ()
    assert owners(autoscaler=[scaler]).autoscaled(other) == ()


def test_a_scaler_or_a_target_that_is_deleted_holds_nothing_at_the_end() -> None:
    cart = Workload("", "shop", "Deployment", "cart")
    of = {"namespace": "shop", "horizontalpodautoscaler": "h"}
    scaler = of | {"scaletargetref_kind": "Deployment", "scaletargetref_name": "cart"}
    target = of | {"metric_target_type": "utilization"}

    def held(scaler_s: int, cpu_s: int, end_s: int) -> tuple[str, ...]:
        said = {
            "pod": [one(POD, [(0, 1), (end_s, 1)])],
            "autoscaler": [one(scaler, [(0, 1), (scaler_s, 1)])],
            "autoscaler_target": [one(target | {"metric_name": "cpu"}, [(0, 1), (cpu_s, 1)]),
                                  one(target | {"metric_name": "memory"}, [(0, 1), (scaler_s, 1)])],
        }  # fmt: skip
        return owners_of([said], DIALECT).autoscaled(cart)

    assert held(7_200, 7_200, 7_200) == ("cpu", "memory")
    assert held(7_200, 3_600, 7_200) == ("memory",)
    assert held(3_600, 3_600, 4_200) == ("cpu", "memory")  # ten minutes: a late scrape
    assert held(3_600, 3_600, 4_260) == ()


def test_of_two_nodes_that_list_a_pod_at_a_time_the_later_one_has_it_however_often_the_piece_is_read() -> None:
    """The first listing goes on for two minutes after the pod has left."""
    piece = {"pod": [one(POD | {"node": "b"}, beat(0, 600)), one(POD | {"node": "a"}, beat(480, 1200))]}
    found = Owners(DIALECT)
    for _ in range(2):
        found.add(piece)
        ((_, facts),) = found.pods.items()
        assert facts.nodes == [(T0 * 1000, "b"), ((T0 + 480) * 1000, "a")]
