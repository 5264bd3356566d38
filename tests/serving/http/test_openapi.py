"""The one OpenAPI page is true: whatever it says may be asked is asked, and every answer is held against it."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest
import requests
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from reclaim.data import schema as s
from reclaim.serving.http.guard import PROBES
from reclaim.serving.wire import rows
from reclaim.serving.wire.arrow import MEDIA_TYPE, write_table
from reclaim.serving.wire.cell_schemas import WriteAnswer
from reclaim.serving.wire.schemas import MarginName
from reclaim.training.margins.margin import MARGIN_NAMES

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # schemathesis asks others for things by their old names while it is imported
    import schemathesis
    from schemathesis import GenerationMode
    from schemathesis.checks import not_a_server_error
    from schemathesis.config import SchemathesisConfig
    from schemathesis.specs.openapi import checks

if TYPE_CHECKING:
    from schemathesis.schemas import BaseSchema

Json = dict[str, Any]

OPERATIONS = [
    ("get", "/livez"),
    ("get", "/readyz"),
    ("get", "/healthz"),
    ("get", "/metrics"),
    ("post", "/v1/reservations"),
    ("post", "/v1/usage"),
    ("post", "/v1/tasks"),
    ("get", "/v1/tasks/{collection_id}/{instance_index}"),
    ("get", "/v1/cell/reservations"),
    ("post", "/v1/cell/reservations"),
    ("get", "/v1/machines"),
    ("get", "/v1/machines/metrics"),
    ("get", "/v1/machines/{machine_id}"),
    ("post", "/v1/machines/fit"),
    ("get", "/v1/cell"),
    ("get", "/v1/model"),
]
NOTHING_TO_GET_WRONG = ("/livez", "/readyz", "/healthz", "/metrics", "/v1/cell", "/v1/model")
GOOD, BAD = GenerationMode.POSITIVE, GenerationMode.NEGATIVE
CASES = [(method, path, GOOD) for method, path in OPERATIONS]
CASES += [(method, path, BAD) for method, path in OPERATIONS if path not in NOTHING_TO_GET_WRONG]
CHECKS = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
]
"""Checks that every answer is held against. Acceptance of good data is not among them, as JSON Schema cannot say all
that is asked: that a window ends after it starts, percentiles rise, units are the cell's, a margin and a budget exclude
each other, 1.0 is no whole number. That each route answers some is checked instead."""
TAKES_THE_GOOD_ROWS = ("/v1/usage", "/v1/tasks")
"""Here a bad row is no refusal of the request: it is named in the answer, as ``test_bodies`` checks."""

ACCEPTED = ("*/*", MEDIA_TYPE)
TIMES = st.integers(0, 10**9)
WINDOW: Json = {
    "collection_id": 7, "instance_index": 3, "machine_id": 11, "start_us": 0, "end_us": 300_000_000,
    "cpu_mean": 0.5, "memory_max": 1e9, "limit": {"cpu": 1.0, "memory": 2e9},
}  # fmt: skip


@st.composite
def streams(draw: st.DrawFn) -> bytes:
    """Draw a table of usage or of facts in good shape, its values drawn from a few."""
    kinds = draw(st.sampled_from([rows.USAGE_COLUMNS, rows.TASK_COLUMNS]))
    n = draw(st.integers(0, 3))
    numbers = st.lists(st.sampled_from([0.5, 2.0, None]), min_size=n, max_size=n)
    columns: dict[str, pa.Array] = {s.COLLECTION_ID: pa.array(np.arange(n))}
    if kinds is rows.USAGE_COLUMNS:
        columns |= {s.START_US: pa.array(np.zeros(n, np.int64)), s.END_US: pa.array(np.full(n, draw(TIMES)))}
    for name in draw(st.sets(st.sampled_from([name for name, kind in kinds.items() if kind == "number"]))):
        columns[name] = pa.array(draw(numbers), pa.float64())
    return bytes(write_table(pa.table(columns)))


@pytest.fixture(scope="module")
def asked(make_app: Any, at_url: Any) -> Iterator[tuple[str, BaseSchema]]:
    """Give a service's URL, where a task is known, and the page that it gives there."""
    schemathesis.openapi.media_type(MEDIA_TYPE, streams())
    with make_app() as (app, _), at_url(app) as url:
        told = requests.post(f"{url}/v1/usage", json={"windows": [WINDOW]}, timeout=120).json()
        assert told["taken"] == 1
        page = requests.get(f"{url}/docs.json", timeout=120).json()
        yield url, schemathesis.openapi.from_dict(page, config=SchemathesisConfig(seed=1))


def test_the_page_names_every_route(asked: tuple[str, BaseSchema]) -> None:
    _, schema = asked
    page: Json = schema.raw_schema
    there = [(method, path) for path, item in page["paths"].items() for method in item]
    assert sorted(there) == sorted(OPERATIONS)
    assert page["openapi"].startswith("3.1")
    group_of = {
        path: tag for path, item in page["paths"].items() for operation in item.values() for tag in operation["tags"]
    }
    assert list(dict.fromkeys(group_of.values())) == [group["name"] for group in page["tags"]]
    assert (group_of["/v1/usage"], group_of["/v1/machines/fit"], group_of["/v1/cell"]) == (
        "tasks",
        "machines",
        "service",
    )


@pytest.mark.slow
@pytest.mark.parametrize(("method", "path", "mode"), CASES, ids=[f"{m} {p} {mode.value}" for m, p, mode in CASES])
def test_every_answer_is_as_the_page_says(
    asked: tuple[str, BaseSchema], method: str, path: str, mode: GenerationMode
) -> None:
    url, schema = asked
    operation = schema[path][method]
    session, statuses = requests.Session(), set()
    rejects = [checks.negative_data_rejection] if mode is BAD and path not in TAKES_THE_GOOD_ROWS else []

    @settings(
        max_examples=25, deadline=None, derandomize=True, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(case=operation.as_strategy(generation_mode=mode), known=st.booleans(), accept=st.sampled_from(ACCEPTED))
    def ask(case: Any, known: bool, accept: str) -> None:
        if known and mode is GOOD and case.path_parameters:
            case.path_parameters = {name: WINDOW[name] for name in case.path_parameters}
        response = case.call(base_url=url, session=session, headers={"accept": accept}, timeout=120)
        case.validate_response(response, checks=[*CHECKS, *rejects])
        statuses.add(response.status_code)
        if path in TAKES_THE_GOOD_ROWS and response.status_code == 200 and MEDIA_TYPE not in str(response.headers):
            told = WriteAnswer.model_validate_json(response.content)
            assert told.rows == told.taken + told.repeated + sum(told.refused.values())

    ask()
    assert mode is BAD or 200 in statuses


def test_a_service_with_a_token_refuses_as_the_page_says(
    asked: tuple[str, BaseSchema], make_app: Any, at_url: Any, tmp_path: Path
) -> None:
    file = tmp_path / "token"
    file.write_text("0123456789abcdef")
    _, schema = asked
    with make_app(token_file=file) as (app, _), at_url(app) as url:
        for method, path in OPERATIONS:
            parameters = dict.fromkeys(re.findall(r"{(\w+)}", path), 1)
            case = schema[path][method].Case(path_parameters=parameters)
            response = case.call(base_url=url, timeout=120)
            assert response.status_code == (200 if path in PROBES else 401)
            case.validate_response(response, checks=CHECKS)
            with_token = case.call(base_url=url, headers={"authorization": "Bearer 0123456789abcdef"}, timeout=120)
            assert with_token.status_code != 401


def test_the_page_says_when_to_come_again_and_what_a_refusal_looks_like(asked: tuple[str, BaseSchema]) -> None:
    _, schema = asked
    for path, item in schema.raw_schema["paths"].items():
        for operation in item.values():
            answers = operation["responses"]
            assert all("X-Request-Id" in answer["headers"] for answer in answers.values())
            assert all("Retry-After" in answers[status]["headers"] for status in ("429", "503") if status in answers)
            assert {"429", "503"} <= set(answers) or not path.startswith("/v1")
            for status in set(answers) - {"200"} if path.startswith("/v1") else ():
                body = answers[status]["content"]["application/json"]["schema"]
                assert body == {"$ref": "#/components/schemas/ErrorResponse"}


@pytest.mark.parametrize("query", ["page_size=1_0", "page_size=%2B1", "page_size=%D9%A3", "budget=%200.1", "budget=0_1",
                                   "machine_id=", "quantiles=1", "more=1", "machines=1"])  # fmt: skip
def test_a_parameter_is_taken_as_it_is_or_refused(asked: tuple[str, BaseSchema], query: str) -> None:
    response = requests.get(f"{asked[0]}/v1/cell/reservations?{query}", timeout=120)
    name = query.partition("=")[0]
    assert (response.status_code, response.json()["error"]["field"]) == (422, name)


def test_the_page_knows_every_margin() -> None:
    assert TypeAdapter(MarginName).json_schema()["enum"] == list(MARGIN_NAMES)
