"""Tables of the recommendations: the order of their rows, what each counts, and what is said of them."""

from __future__ import annotations

from typing import Any

import pytest

from reclaim.replay.experiments.recommend.lines import totals
from reclaim.replay.experiments.recommend.page import (
    _leaves_guaranteed,
    console_table,
    estimator_table,
    workload_table,
)
from tests.replay.experiments.recommend.test_patches import MIB, line, of_resource, results_of

NOTHING: dict[str, Any] = {"usage": [None], "request": None, "held": [], "next": None, "killed": []}


def changing(name: str, tasks: int, request: float, recommended: float, **of: Any) -> dict[str, Any]:
    """Return a line whose memory is as many MiB as its CPU has cores."""
    both = {}
    for resource, unit in (("cpu", 1.0), ("memory", MIB)):
        both[resource] = of_resource(unit * request, None, unit * recommended, "estimate") | {
            "requested": unit * request, "reclaimable": unit * (request - recommended),
            "change": recommended / request - 1, "picture": NOTHING,
        }  # fmt: skip
    return line(name, "app", both["cpu"], both["memory"], tasks=tasks, **of)


def of_lines(*lines: dict[str, Any]) -> dict[str, Any]:
    return results_of(*lines) | {
        "totals": totals(lines), "dataset": {}, "inputs": {"config": {"confidence": 0.95}}, "test": {},
    }  # fmt: skip


LINES = (
    changing("one", 1, 4.0, 1.0, autoscaler="scaler", oom_kills=7),  # 3 less
    changing("many", 10, 1.0, 0.5),  # 5 less
    changing("more", 1, 1.0, 5.0),  # 4 more
    changing("kept", 50, 1.0, 1.0),
)


def test_the_requests_that_reclaim_or_add_most_in_all_tasks_come_first() -> None:
    rows = console_table(of_lines(*LINES)).as_records()
    assert [(row["workload"], row["resource"]) for row in rows] == [
        (f"shop/{name}/app", resource) for name in ("many", "more", "one") for resource in ("CPU", "memory")
    ]
    assert [(row["request"], row["recommended"], row["change"]) for row in rows[2:4]] == [(1.0, 5.0, 4.0)] * 2
    for resource in ("cpu", "memory"):
        of_all = workload_table(of_lines(*LINES), resource).as_records()
        assert [str(row["workload"]).split("/")[1] for row in of_all] == ["many", "more", "one", "kept"]


def test_a_job_that_is_over_is_not_among_the_requests_to_change() -> None:
    lines = changing("over", 1, 4.0, 1.0, kind="Job", running=False), changing("runs", 1, 4.0, 1.0, kind="Job")
    rows = console_table(of_lines(*lines)).as_records()
    assert [row["workload"] for row in rows] == ["shop/runs/app"] * 2


def test_a_table_that_is_cut_says_so_and_one_that_is_whole_does_not() -> None:
    results = of_lines(*LINES)
    assert console_table(results, 6).caption == "Requests to change, CPU in cores, memory in MiB"
    assert console_table(results, None).caption == "Requests to change, CPU in cores, memory in MiB"
    cut = console_table(results, 5)
    assert console_table(of_lines(changing("same", 1, 1.0, 1.0))).caption == "Requests to change: none"
    assert cut.caption == "Requests to change, CPU in cores, memory in MiB: 5 of 6, the largest first"
    assert len(cut.rows) == 5


def test_a_table_of_the_page_has_the_workloads_that_reclaim_or_add_most() -> None:
    for resource in ("cpu", "memory"):
        of_all = workload_table(of_lines(*LINES), resource, most=2).as_records()
        assert [str(row["workload"]).split("/")[1] for row in of_all] == ["many", "more"]


def test_a_long_name_keeps_its_end() -> None:
    rows = console_table(of_lines(changing("a-very-long-name-of-a-service-v2", 1, 2.0, 1.0))).as_records()
    assert rows[0]["workload"] == "…long-name-of-a-service-v2/app"
    assert len("…long-name-of-a-service-v2/app") == 30


def test_a_table_counts_all_tasks_of_a_workload_and_has_the_scaler_with_the_cpu_and_kills_with_the_memory() -> None:
    cpu, memory = (workload_table(of_lines(*LINES), r).as_records() for r in ("cpu", "memory"))
    assert [row["reclaimable, cores"] for row in cpu] == [5.0, -4.0, 3.0, 0.0]
    assert [row["reclaimable, MiB"] for row in memory] == [5.0, -4.0, 3.0, 0.0]
    assert [row["autoscaler"] for row in cpu] == [None, None, "scaler", None]
    assert [row["out-of-memory ends"] for row in memory] == [0, 0, 7, 0]
    assert "autoscaler" not in memory[0]


def test_the_estimators_stand_by_what_they_reclaim_on_the_validation_part_and_the_bounds_below_them() -> None:
    rate = {"value": 0.01, "low": None, "high": None}
    test = {metric: {"cpu": rate} for metric in ("reclaimed_share", "violation_rate")}

    def estimator(name: str, reclaimed: float | None, violation: float, won: bool) -> dict[str, Any]:
        of = {"chosen_by": {"reclaimed_share": reclaimed, "violation_rate": violation}, "won": won, "margin": 1.0,
              "valid": {"reclaimed_share": 0.1, "violation_rate": 0.0}, "settings": ""}  # fmt: skip
        return {"name": name, "kind": "statistical", "resources": {"cpu": of}, "test": test}

    results = of_lines(*LINES) | {
        "estimators": [
            estimator("none", None, 0.9, False), estimator("less", 0.2, 0.8, False), estimator("most", 0.3, 0.1, True),
        ],
        "test": {"recommendation": test, "oracle": test},
    }  # fmt: skip
    rows = estimator_table(results, "cpu").as_records()
    assert [(row["estimator"], row["chosen"]) for row in rows] == [
        ("most", "won"), ("less", None), ("none", None), ("oracle", None),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("limits", "recommended", "leaves"),
    [
        ((2.0, 2.0), (1.0, 2.0), True), ((2.0, 2.0), (2.0, 2.0), False), ((2.0, 2.0), (3.0, 2.0), False),
        ((None, 2.0), (1.0, 1.0), False), ((2.0, None), (1.0, 1.0), False), ((4.0, 2.0), (1.0, 1.0), False),
        ((2.0, 2.0), (None, 1.0), True), ((2.0, 2.0), (None, None), False),
    ],
)  # fmt: skip
def test_a_pod_whose_requests_are_both_its_limits_leaves_its_class_where_one_is_lowered(
    limits: tuple[float | None, float | None], recommended: tuple[float | None, float | None], leaves: bool
) -> None:
    cpu, memory = (of_resource(2.0, limit, wanted, "") for limit, wanted in zip(limits, recommended, strict=True))
    assert _leaves_guaranteed(line("web", "app", cpu, memory)) == leaves
