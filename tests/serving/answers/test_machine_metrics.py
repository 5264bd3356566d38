"""Metrics of each machine for Prometheus: the numbers of its answer, by the names that dashboards use."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx
import pytest
from prometheus_client import CONTENT_TYPE_LATEST
from prometheus_client.parser import text_string_to_metric_families

from reclaim.data.schema import RESOURCES
from reclaim.features.targets import HORIZONS_S
from reclaim.serving.answers.machine_metrics import as_metrics
from reclaim.serving.answers.machine_sums import sums_by_horizon
from reclaim.training.margins.margin import MARGIN_NAMES
from tests.serving.answers.machines_by_hand import uneven, write_five
from tests.serving.cell_fixtures import Memory


def read(text: bytes | str) -> dict[str, dict[tuple[str, ...], float]]:
    """Return the values by metric and by the values of their labels, in the order of the labels' names."""
    families = text_string_to_metric_families(text if isinstance(text, str) else text.decode())
    samples = [sample for family in families for sample in family.samples]
    found: dict[str, dict[tuple[str, ...], float]] = {sample.name: {} for sample in samples}
    for sample in samples:
        found[sample.name][tuple(sample.labels[name] for name in sorted(sample.labels))] = sample.value
    return found


def test_each_machine_has_its_limit_what_is_reclaimable_and_its_outcomes_under_one_margin(three: Memory) -> None:
    cell = uneven(three)
    found, b = read(as_metrics(cell, "medium")), MARGIN_NAMES.index("medium")
    assert found["reclaim_machine_limit_amount"] == {
        ("7", "cpu"): 2.0, ("7", "memory"): 11.0, ("9", "cpu"): 4.5, ("9", "memory"): 7.0,
    }  # fmt: skip
    left = cell.limit - cell.peaks()[b]
    assert found["reclaim_machine_reclaimable_amount"] == {
        (machine, "medium", resource): left[m, r]
        for m, machine in enumerate("79")
        for r, resource in enumerate(RESOURCES)
    }
    assert found["reclaim_machine_answers_total"] == {
        ("7", "cpu"): 31, ("7", "memory"): 32, ("9", "cpu"): 41, ("9", "memory"): 42,
    }  # fmt: skip
    assert found["reclaim_machine_violations_total"] == {
        ("7", "medium", "cpu"): 2,
        ("7", "medium", "memory"): 3,
        ("9", "medium", "cpu"): 8,
        ("9", "medium", "memory"): 9,
    }


def test_over_a_horizon_of_which_no_outcomes_are_counted_none_are_shown(three: Memory) -> None:
    for of in sums_by_horizon(three.tracker, three.settings):
        for counted in (False, True):
            found = read(as_metrics(replace(of, counted=counted), "baseline"))
            assert ("reclaim_machine_violations_total" in found) == counted
            assert len(found["reclaim_machine_reclaimable_amount"]) == 4


def test_an_empty_cell_has_no_metrics_of_machines(three: Memory) -> None:
    (nothing, *_) = sums_by_horizon(three.tracker, three.settings, [77])
    assert read(as_metrics(nothing, "baseline")) == {}


@pytest.mark.parametrize("horizon_s", [None, *HORIZONS_S])
def test_prometheus_reads_the_numbers_of_the_list(url: str, horizon_s: int | None) -> None:
    query = {} if horizon_s is None else {"horizon_s": horizon_s}
    answer = httpx.get(f"{url}/v1/machines/metrics", params=query, timeout=120)
    assert (answer.status_code, answer.headers["content-type"]) == (200, CONTENT_TYPE_LATEST)
    found = read(answer.text)
    listed = httpx.get(f"{url}/v1/machines", params=query, timeout=120).json()["machines"]
    assert found["reclaim_machine_reclaimable_amount"] == {
        (str(machine["machine_id"]), "baseline", resource): machine["reclaimable"]["baseline"][resource]
        for machine in listed
        for resource in RESOURCES
    }


def test_they_are_at_the_margin_of_the_service(make_app: Any, at_url: Any) -> None:
    with make_app(margin="aggressive") as (app, _), at_url(app) as url:
        write_five(url)
        found = read(httpx.get(f"{url}/v1/machines/metrics", timeout=120).text)
        machines = httpx.get(f"{url}/v1/machines", timeout=120).json()["machines"]
    shown = found["reclaim_machine_reclaimable_amount"]
    assert shown["10", "aggressive", "cpu"] == machines[0]["reclaimable"]["aggressive"]["cpu"]
    assert {labels[1] for labels in shown} == {"aggressive"}


def test_the_machines_add_up_to_the_totals_of_the_cell(url: str) -> None:
    each, total = (read(httpx.get(url + path, timeout=120).text) for path in ("/v1/machines/metrics", "/metrics"))
    for resource in RESOURCES:
        limits = [value for labels, value in each["reclaim_machine_limit_amount"].items() if labels[-1] == resource]
        assert sum(limits) == pytest.approx(total["reclaim_machines_limit_amount"][resource,], rel=1e-12)


def test_a_large_cell_and_a_horizon_that_is_none_are_as_for_the_list(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small = httpx.get(f"{url}/v1/machines/metrics", timeout=120).text
    monkeypatch.setattr("reclaim.serving.http.routes.SMALL_TASKS", 0)
    assert httpx.get(f"{url}/v1/machines/metrics", timeout=120).text == small
    refused = httpx.get(f"{url}/v1/machines/metrics?horizon_s=7", timeout=120)
    assert (refused.status_code, refused.json()["error"]["field"]) == (422, "horizon_s")
