"""Queries: tasks, margins and budgets; refusals name the parameter as the caller wrote it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest

from reclaim.data.windows import Cell
from reclaim.features.groups import TIER_LABELS
from reclaim.serving.answers.query import Page, machines_from, margins_of, page_of
from reclaim.serving.client.client import Client, ServiceError
from reclaim.serving.models.loader import LoadedModel
from reclaim.serving.models.scorer import Scorer, violations_of
from reclaim.serving.wire.cell_schemas import CellQuery
from reclaim.serving.wire.errors import RequestError
from reclaim.training.bundle import Bundle
from reclaim.training.margins.margin import MARGIN_NAMES


@pytest.fixture(scope="module")
def url(make_app: Any, at_url: Any) -> Iterator[str]:
    with make_app() as (app, _), at_url(app) as url:
        yield url


def pages(tracker: Any, **asked: Any) -> list[Page]:
    """Return the pages that a caller gets who asks for the next one until there is none, nine at most."""
    found = [page_of(CellQuery(**asked), tracker, None, whole=False)]
    while (after := found[-1].following) is not None and len(found) < 9:
        found.append(page_of(CellQuery(**asked, after=after), tracker, None, whole=False))
    return found


def test_pages_have_every_task_of_a_cell_once_and_none_is_empty() -> None:
    names = [[1, 0], [1, 1], [2, 0], [2, 7], [3, 0], [3, 1]]
    cell: Any = SimpleNamespace(names=lambda *_: np.array(names))
    for size in range(1, 8):
        keys = [page.key.tolist() for page in pages(cell, page_size=size) if page.key is not None]
        assert keys == [names[k : k + size] for k in range(0, 6, size)]
    # a task that has ended since is no reason to pass over another one
    asked = page_of(CellQuery(after="2:3"), cell, None, whole=False)
    assert asked.key is not None
    assert asked.key.tolist() == names[3:]


def test_pages_have_every_machine_once_and_none_is_empty() -> None:
    machine = np.array([0, 3, 4, 9, 10, 12])
    for size in range(1, 8):
        found: list[list[int]] = []
        after: int | None = None
        while len(found) < 9:
            page, following = machines_from(machine, after, size)
            found.append(page)
            if following is None:
                break
            after = int(following)
        assert found == [machine[k : k + size].tolist() for k in range(0, 6, size)]
    assert machines_from(machine, 5, 2) == ([9, 10], "10")  # a machine that has gone since


def test_pages_have_every_task_of_a_list_once_in_its_order_with_its_limit() -> None:
    limit = {"cpu": 1.0, "memory": 2.0}
    tasks = [{"collection_id": 3}, {"collection_id": 1, "limit": limit}, {"collection_id": 2, "instance_index": 4}]
    names, limits = [[3, 0], [1, 0], [2, 4]], [[math.nan] * 2, [1.0, 2.0], [math.nan] * 2]
    for size in range(1, 5):
        found = pages(None, tasks=tasks, page_size=size)
        assert [page.key.tolist() for page in found if page.key is not None] == [
            names[k : k + size] for k in range(0, 3, size)
        ]
        assert all(page.key is not None and page.limit is not None for page in found)
        np.testing.assert_array_equal(np.concatenate([page.limit for page in found if page.limit is not None]), limits)


@pytest.mark.parametrize("after", ["1", "1:2:3", "1:-2", "1:x", "1:", f"1:{2**63}", "1:\u0663"])
def test_a_start_of_a_page_that_no_answer_gave_is_refused(after: str) -> None:
    empty: Any = SimpleNamespace(names=lambda *_: np.zeros((0, 2), np.int64))
    with pytest.raises(RequestError, match="after: must be the `next` of an answer"):
        page_of(CellQuery(after=after), empty, None, whole=False)


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"margin": "medium", "budget": 0.5}, "budget"),
        ({"margins": {"prod": "medium"}, "budgets": {"prod": 0.5}}, "budgets.prod"),
        ({"budgets": {"free": 1e-9}}, "budgets.free"),
        ({"budget": 1e-9}, "budget"),
    ],
)
def test_a_budget_that_cannot_be_met_is_named(url: str, asked: dict[str, Any], field: str) -> None:
    response = httpx.post(f"{url}/v1/cell/reservations", json=asked, timeout=120)
    assert (response.status_code, response.json()["error"]["field"]) == (422, field)
    assert response.json()["error"]["message"].startswith(f"{field}: ")


@pytest.mark.parametrize("name", ["collection_id", "machine_id"])
def test_a_refusal_names_the_parameter_as_the_caller_wrote_it(url: str, name: str) -> None:
    error = httpx.get(f"{url}/v1/cell/reservations?{name}=1&{name}={2**63}", timeout=120).json()["error"]
    assert error["field"] == f"{name}[1]"
    assert error["message"].startswith(f"{name}[1]: ")
    body = httpx.post(f"{url}/v1/cell/reservations", json={"machines": [-1]}, timeout=120).json()["error"]
    assert body["field"] == "machines[0]"


def test_a_part_of_a_question_that_would_be_ignored_is_refused(url: str) -> None:
    for name, value in (("margin", "medium"), ("page_size", 5), ("quantiles", "true")):
        twice = httpx.get(f"{url}/v1/cell/reservations?{name}={value}&{name}={value}", timeout=120)
        assert twice.status_code == 422
        assert twice.json()["error"]["message"] == f"{name}: given more than once"
    for name in ("machines", "collections"):
        both = httpx.post(f"{url}/v1/cell/reservations", json={"tasks": [{"collection_id": 1}], name: [1]}, timeout=120)
        assert both.status_code == 422
        assert both.json()["error"]["field"] == "tasks"


def test_unmeasured_resources_and_margins_do_not_break_budgets(bundle: Bundle) -> None:
    violation = {"baseline": {"cpu": 0.001, "memory": None}, "medium": {"cpu": None, "memory": None}}
    told = SimpleNamespace(bundle=SimpleNamespace(trained={"violation": violation}))
    assert violations_of(told) == {"baseline": 0.001}  # type: ignore[arg-type]  # all that is asked of a model
    scorer = Scorer(LoadedModel("m", "1", "m", bundle), Cell())
    scorer.model = told  # type: ignore[assignment]  # likewise
    assert scorer.within_budget(0.01) == "baseline"


def test_the_budget_of_a_tier_is_compared_with_the_violations_of_its_tasks(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = {name: {"cpu": rate, "memory": 0.0} for name, rate in zip(MARGIN_NAMES, (0.001, 0.004, 0.01), strict=True)}
    own = {name: {"prod": {"cpu": 3 * rates["cpu"], "memory": None}} for name, rates in both.items()}
    monkeypatch.setitem(bundle.trained, "violation", both)
    monkeypatch.setitem(bundle.trained, "violation_by_tier", own)
    scorer = Scorer(LoadedModel("m", "1", "m", bundle), Cell())
    query = CellQuery(budget=0.01, budgets={"prod": 0.01, "free": 0.01})
    margins = dict(zip(TIER_LABELS, margins_of(query, scorer, "medium").tolist(), strict=True))
    baseline, _, aggressive = range(len(MARGIN_NAMES))
    assert margins == {**dict.fromkeys(TIER_LABELS, aggressive), "prod": baseline}
    with pytest.raises(
        RequestError, match=r"budgets\.prod: no margin kept a budget of 0\.002 among .* prod.*baseline 0\.003"
    ):
        margins_of(CellQuery(budgets={"prod": 0.002, "free": 0.002}), scorer, "medium")


def test_the_medium_margin_shows_the_geometric_mean_of_the_budgets_and_not_what_validation_rows_violated(
    make_app: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_app() as (_, runtime):
        trained = runtime.keeper.served.bundle.trained
        monkeypatch.setitem(trained, "settings", {"budgets": {"baseline": 0.0025, "aggressive": 0.01}})
        monkeypatch.setitem(trained, "violation", {"medium": {"cpu": 0.0, "memory": 0.0}})
        shown = runtime.metrics.text()
        for margin, budget in (("baseline", 0.0025), ("medium", 0.005), ("aggressive", 0.01)):
            assert f'reclaim_margin_budget_ratio{{margin="{margin}"}} {budget}' in shown


def test_metrics_are_shown_for_a_model_whose_memory_was_never_measured(
    make_app: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_app() as (_, runtime):
        trained = runtime.keeper.served.bundle.trained
        monkeypatch.setitem(trained, "settings", {})
        monkeypatch.setitem(trained, "violation", {"medium": {"cpu": 0.25, "memory": None}})
        assert 'reclaim_margin_budget_ratio{margin="medium"} 0.25' in runtime.metrics.text()


def test_a_task_of_an_empty_cell_is_unknown(make_app: Any, at_url: Any) -> None:
    with make_app() as (app, _), at_url(app) as url:
        refused = httpx.get(f"{url}/v1/tasks/5/0")
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "unknown_task")


@pytest.mark.parametrize("question", ["answer=tasks&margin=foo", "answer=cell&budget=1e-9"])
def test_a_write_whose_question_cannot_be_answered_is_refused_before_it_is_stored(
    make_app: Any, at_url: Any, question: str
) -> None:
    window = {
        "collection_id": 49,
        "start_us": 0,
        "end_us": 300_000_000,
        "cpu_mean": 0.1,
        "limit": {"cpu": 1, "memory": 1},
    }
    with make_app() as (app, runtime), at_url(app) as url:
        refused = httpx.post(f"{url}/v1/usage?{question}", json={"windows": [window]})
        assert refused.status_code == 422
        assert len(runtime.tracker) == 0
        assert httpx.post(f"{url}/v1/usage?answer=tasks", json={"windows": [window]}).status_code == 200


def test_windows_are_counted_by_outcome(make_app: Any, at_url: Any) -> None:
    def window(collection: int, **more: Any) -> dict[str, Any]:
        limit = {"cpu": 1.0, "memory": 1.0}
        return {"collection_id": collection, "start_us": 0, "end_us": 300_000_000, "limit": limit, **more}

    with make_app(max_tracked=2) as (app, runtime), at_url(app) as url:
        told = [window(1), window(2), window(3), window(4, limit=None), window(1), {"collection_id": 5}, 7]
        answer = httpx.post(f"{url}/v1/usage", json={"windows": told}, timeout=120).json()
        text = runtime.metrics.text()
    assert answer["refused"] == {"invalid_field": 2, "no_limit": 1, "too_many_tasks": 1}
    counted = {"taken": 2, "repeated": 1, "no_limit": 1, "too_many_tasks": 1, "refused": 2, "too_late": 0}
    for outcome, n in counted.items():
        assert f'reclaim_windows_total{{outcome="{outcome}"}} {n}.0' in text


def test_a_damaged_state_is_reported_wherever_the_store_is_shown(
    make_app: Any, at_url: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from reclaim.data.errors import StoreError
    from reclaim.serving.storage.store import Store

    def damaged(*_: object, **__: object) -> Store:
        raise StoreError("byte 7 of the log is damaged")

    monkeypatch.setattr(Store, "open", damaged)
    with make_app(state=tmp_path) as (app, runtime), at_url(app) as url, Client(url, retries=0) as client:
        assert client.ready().about["store"] == "byte 7 of the log is damaged"
        assert (client.state().store, client.state().durable) == ("byte 7 of the log is damaged", False)
        assert "reclaim_store_ok 0.0" in runtime.metrics.text()
        with pytest.raises(ServiceError, match="byte 7 of the log"):
            client.cell_table()
