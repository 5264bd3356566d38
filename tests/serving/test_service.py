"""The whole application in this process: every route, every refusal, in the one shape."""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import math
import re
from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reclaim.serving.http import routes
from reclaim.serving.wire import arrow
from reclaim.serving.wire.schemas import ErrorBody, ErrorResponse, ModelInfo, ReservationResponse
from reclaim.training.bundle import Bundle

if TYPE_CHECKING:
    from httpx import Response
    from starlette.testclient import TestClient

    from tests.serving.conftest import History

Json = dict[str, Any]
Steps = tuple[str | int, ...]
"""The keys and rows that lead to one value of a body."""

URL = "/v1/reservations"
TASK: Json = {
    "collection_id": 1,
    "instance_index": 0,
    "limit": {"cpu": 2.0, "memory": 4e9},
    "tier": "prod",
    "scheduling_class": 2,
    "scheduled_us": 0,
    "in_alloc": False,
    "user": "someone",
    "logical_name": "web-server",
    "windows": [
        {"start_us": 0, "end_us": 300_000_000, "cpu_mean": 0.5, "cpu_max": 0.9, "memory_max": 1e9, "cpi": 1.5},
        {
            "start_us": 300_000_000,
            "end_us": 600_000_000,
            "cpu_percentiles": [0.1 * k for k in range(11)],
            "cpu_tail_percentiles": [0.91 + 0.01 * k for k in range(9)],
            "limit": {"cpu": 1.0, "memory": 4e9},
        },
    ],
}
CELL: Json = {"largest_machine": {"cpu": 64.0, "memory": 256e9}, "monday_us": 0}
BODY: Json = {"tasks": [TASK], "cell": CELL, "margin": "medium", "units": {"cpu": "cores", "memory": "bytes"}}


def test_a_request_is_answered(client: TestClient) -> None:
    response = client.post(URL, json=BODY)
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    answer = ReservationResponse.model_validate(response.json())
    assert (answer.model.name, answer.model.version, answer.margin.name) == ("reclaim", "3", "medium")
    (task,) = answer.tasks
    assert (task.reservation.cpu, task.rule.cpu) == (2.0, "unknown")  # the last window reserves all of a lower limit
    assert 0 < task.reservation.memory < 4e9


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_a_body_that_a_web_page_can_send_unasked_is_refused_with_the_remedy(client: TestClient, kind: str) -> None:
    for path in (URL, "/v1/usage", "/v1/tasks", "/v1/cell/reservations"):
        refused = client.post(path, content=json.dumps(BODY), headers={"content-type": f"{kind}; charset=utf-8"})
        error = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (415, "content_type")
        assert "curl --json" in error["message"]


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=utf-8", None])
def test_a_body_is_json_if_it_is_said_to_be_or_nothing_is_said(client: TestClient, kind: str | None) -> None:
    answer = client.post(URL, content=json.dumps(BODY), headers={} if kind is None else {"content-type": kind})
    assert (answer.status_code, answer.json()) == (200, client.post(URL, json=BODY).json())


@pytest.mark.parametrize("path", ["/v1/cell/reservations", "/v1/machines/fit"])
def test_json_is_not_read_from_a_body_that_is_called_an_arrow_stream_and_may_be_larger(
    client: TestClient, path: str
) -> None:
    refused = client.post(path, content=b"{}", headers={"content-type": arrow.MEDIA_TYPE})
    assert (refused.status_code, refused.json()["error"]["code"]) == (415, "content_type")
    assert "application/json" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/x"), ("POST", "/"), ("GET", "/v2/usage"), ("PUT", "/docs.json")]
)
def test_paths_outside_the_interface_are_refused_in_the_one_shape_of_error(
    client: TestClient, method: str, path: str
) -> None:
    refused = client.request(method, path)
    error = ErrorResponse.model_validate_json(refused.content).error
    assert (refused.status_code, error.code) in ((404, "not_found"), (405, "method_not_allowed"))
    assert "/docs.json" in error.message


def test_the_page_of_the_routes_asks_no_other_host_for_anything(client: TestClient) -> None:
    page = client.get("/")
    assert page.status_code == 200
    assert "//" not in page.text
    assert page.headers["content-security-policy"].startswith("default-src 'self';")
    for file in re.findall(r'(?:src|href)="\.([^"]+)"', page.text):
        assert client.get(file).status_code == 200


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/v1/cell/reservations"), ("POST", "/v1/tasks"), ("GET", "/v1/cell"), ("GET", "/v1/model")],
)
def test_a_parameter_that_means_nothing_is_refused(client: TestClient, method: str, path: str) -> None:
    body: Json = {} if method == "GET" else {"json": {"tasks": [{"collection_id": 7}]}}
    refused = client.request(method, f"{path}?margin=aggressive", **body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (422, "unknown_field")
    assert "did you mean 'margin'" not in refused.json()["error"]["message"]


def test_a_large_request_is_answered_as_if_it_were_small(
    client: TestClient, history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"tasks": history.tasks, "cell": history.facts}
    assert len(json.dumps(body)) > routes._INLINE_BYTES
    aside = client.post(URL, json=body).json()
    monkeypatch.setattr(routes, "_INLINE_BYTES", 2**30)
    assert client.post(URL, json=body).json() == aside
    assert len(aside["tasks"]) == len(history.tasks)


@pytest.mark.parametrize(
    ("work", "path", "of_each"),
    [
        ("parse_body", "/v1/cell/reservations", {}),
        ("_tasks_in", "/v1/usage?answer=tasks", {"start_us": 0, "end_us": 300_000_000, "limit": TASK["limit"]}),
    ],
)
def test_the_tasks_of_a_large_body_are_read_outside_the_event_loop(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, work: str, path: str, of_each: Json
) -> None:
    in_the_loop, of = [], getattr(routes, work)

    def noted(*given: Any) -> Any:
        try:
            asyncio.get_running_loop()
            in_the_loop.append(True)
        except RuntimeError:
            in_the_loop.append(False)
        return of(*given)

    monkeypatch.setattr(routes, work, noted)
    for n in (1, 1_000):
        named = [{"collection_id": task, **of_each} for task in range(n)]
        answer = client.post(path, json={"windows" if of_each else "tasks": named}).json()
        assert len(answer.get("reservations", answer)["tasks"]) == n
    assert in_the_loop == [True, False]


def test_the_model_is_described(client: TestClient, bundle: Bundle) -> None:
    info = ModelInfo.model_validate(client.get("/v1/model").json())
    assert (info.source, info.kind, info.model.version) == ("reclaim@champion", "network", "3")
    assert info.dataset_fingerprint == bundle.dataset_fingerprint


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/healthz"])
def test_bentoml_says_that_it_is_well(client: TestClient, path: str) -> None:
    assert client.get(path).status_code == 200


def test_the_openapi_page_describes_what_the_endpoint_takes_and_answers(client: TestClient) -> None:
    document = client.get("/docs.json").json()
    post = document["paths"][URL]["post"]

    def model(part: Json) -> str:
        reference: str = part["content"]["application/json"]["schema"]["$ref"]
        return reference.rsplit("/", 1)[1]

    assert model(post["requestBody"]) == "ReservationRequest"
    answers = {status: model(part) for status, part in post["responses"].items()}
    assert answers == {"200": "ReservationResponse"} | dict.fromkeys(
        ("400", "401", "403", "408", "413", "415", "422", "429", "500", "503"), "ErrorResponse"
    )
    schemas = document["components"]["schemas"]
    assert set(schemas["Window"]["required"]) == {"start_us", "end_us"}
    assert schemas["Task"]["additionalProperties"] is False
    assert "/v1/model" in document["paths"]


def changed(*path: str | int, to: object) -> str:
    """Return the body with one value replaced."""
    body = copy.deepcopy(BODY)
    inner: Any = body
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = to
    return json.dumps(body)


WINDOW = ("tasks", 0, "windows", 0)
REFUSALS: dict[str, tuple[str | bytes, int, str, str | None, str]] = {
    "malformed": ("{", 400, "malformed_json", None, "the body is not valid JSON: EOF while parsing"),
    "empty": ("", 400, "malformed_json", None, "the body is not valid JSON: EOF while parsing"),
    "no UTF-8": (b"\xff\xfe", 400, "malformed_json", None, "the body is not valid JSON"),
    "too deep": ('{"tasks":' * 500, 400, "malformed_json", None, "recursion limit exceeded"),
    "no object": ("[]", 422, "invalid_field", None, "the body: must be an object"),
    "no tasks": ("{}", 422, "invalid_field", "tasks", "tasks: required, but absent"),
    "empty tasks": ('{"tasks": []}', 422, "invalid_field", "tasks", "tasks: must have at least 1 items, got 0"),
    "NaN": (
        changed(*WINDOW, "cpu_mean", to=math.nan), 422, "invalid_field", "tasks[0].windows[0].cpu_mean",
        "tasks[0].windows[0].cpu_mean: must be a finite number, got NaN",
    ),
    "infinity": (
        changed(*WINDOW, "cpu_mean", to=-math.inf), 422, "invalid_field", "tasks[0].windows[0].cpu_mean",
        "tasks[0].windows[0].cpu_mean: must be a finite number, got -Infinity",
    ),
    "text for a number": (
        changed(*WINDOW, "cpu_mean", to="0.5"), 422, "invalid_field", "tasks[0].windows[0].cpu_mean",
        'tasks[0].windows[0].cpu_mean: must be a number, got "0.5"',
    ),
    "negative limit": (
        changed("tasks", 0, "limit", "cpu", to=-1), 422, "invalid_field", "tasks[0].limit.cpu",
        "tasks[0].limit.cpu: must be at least 1e-12, got -1",
    ),
    "typo": (
        changed(*WINDOW, "memory_maximum", to=1), 422, "unknown_field", "tasks[0].windows[0].memory_maximum",
        "tasks[0].windows[0].memory_maximum: no such field; did you mean 'memory_max'?",
    ),
    "window ends before it starts": (
        changed(*WINDOW, "end_us", to=0), 422, "invalid_field", "tasks[0].windows[0]",
        "tasks[0].windows[0]: a window must end after it starts: start_us 0, end_us 0",
    ),
    "window whose times are of two units": (
        changed(*WINDOW, "end_us", to=172_800_000_000), 422, "invalid_field", "tasks[0].windows[0]",
        "tasks[0].windows[0]: a window must not be longer than a day, and its times are µs: "
        "start_us 0, end_us 172800000000",
    ),
    "disorder": (
        changed(*WINDOW, to={"start_us": 400_000_000, "end_us": 600_000_000}), 422, "invalid_field",
        "tasks[0].windows[1]",
        "tasks[0].windows[1]: windows must be in time order, but this one (start_us 300000000, end_us 600000000) "
        "precedes an earlier one",
    ),
    "tier": (
        changed("tasks", 0, "tier", to="gold"), 422, "invalid_field", "tasks[0].tier",
        "tasks[0].tier: must be one of 'free', 'beb', 'mid', 'prod' or 'mon', got \"gold\"",
    ),
    "id beyond 64 bits": (
        '{"tasks": [{"collection_id": 1' + "0" * 4_000 + "}]}",
        422,
        "invalid_field",
        "tasks[0].collection_id",
        "tasks[0].collection_id: must be at most 9223372036854775807, got a number of 13288 bits",
    ),
    "number beyond all bounds": (
        '{"tasks": [{"collection_id": 1' + "0" * 5_000 + "}]}",
        400,
        "malformed_json",
        None,
        "number out of range",
    ),
    "bloat": (
        json.dumps({f"x{k}": 0 for k in range(100_000)}),
        422,
        "unknown_field",
        None,
        "an object of 100000 fields, starting with 'x0'",
    ),
    "bloat inside": (
        changed(*WINDOW, "limit", to={f"x{k}": 0 for k in range(100_000)}),
        422,
        "unknown_field",
        None,
        "an object of 100000 fields, starting with 'x0'",
    ),
    "margin": (
        changed("margin", to="brave"), 422, "unknown_margin", "margin",
        "margin: expected one of baseline, medium, aggressive, got 'brave'",
    ),
}  # fmt: skip


def assert_refused(response: Response, status: int, code: str, field: str | None, message: str) -> ErrorBody:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = ErrorResponse.model_validate(response.json()).error
    assert set(response.json()["error"]) == {"code", "message", "field", "row", "task", "window"}
    assert (error.code, error.field) == (code, field)
    assert message in error.message
    assert "\n" not in error.message
    return error


@pytest.mark.parametrize("case", REFUSALS)
def test_a_mistake_is_named_in_one_line(client: TestClient, case: str) -> None:
    body, status, code, field, message = REFUSALS[case]
    assert_refused(client.post(URL, content=body), status, code, field, message)


def test_a_refusal_names_the_row_of_the_task_and_of_the_window(client: TestClient) -> None:
    body = {"tasks": [TASK, {**TASK, "instance_index": 1, "windows": [*TASK["windows"], {"start_us": 7, "end_us": 9}]}]}
    error = assert_refused(
        client.post(URL, json=body), 422, "invalid_field", "tasks[1].windows[2]", "precedes an earlier one"
    )
    assert (error.task, error.window) == (1, 2)


def test_too_many_tasks_are_refused(
    client: TestClient, service: ModuleType, monkeypatch: pytest.MonkeyPatch, history: History
) -> None:
    runtime = service._runtime()
    monkeypatch.setattr(runtime, "settings", runtime.settings.model_copy(update={"max_tasks": 2}))
    assert client.post(URL, json={"tasks": history.tasks[:2]}).status_code == 200
    response = client.post(URL, json={"tasks": history.tasks[:3]})
    assert_refused(response, 413, "too_many_tasks", "tasks", "tasks: at most 2 in one request, got 3")


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/reservations", 405, "method_not_allowed"),
        ("HEAD", "/v1/reservations", 405, "method_not_allowed"),
        ("POST", "/v1/model", 405, "method_not_allowed"),
        ("GET", "/v1/machines/fit", 405, "method_not_allowed"),
        ("POST", "/v1/machines/7", 405, "method_not_allowed"),
        ("POST", "/v1/machines/metrics", 405, "method_not_allowed"),
        ("POST", "/v1/reservation", 404, "not_found"),
        ("GET", "/v1/", 404, "not_found"),
    ],
)
def test_a_wrong_path_or_method_is_refused_in_the_same_shape(
    client: TestClient, method: str, path: str, status: int, code: str
) -> None:
    response = client.request(method, path)
    assert response.status_code == status
    allowed = {"/v1/model": "GET", "/v1/machines/7": "GET", "/v1/machines/metrics": "GET"}.get(path, "POST")
    assert response.headers.get("allow") == (allowed if status == 405 else None)
    if method != "HEAD":
        assert_refused(response, status, code, None, "")


def test_a_fault_of_the_service_is_logged_and_not_explained_to_the_caller(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> NoReturn:
        raise RuntimeError("secret")

    monkeypatch.setattr(routes, "answer", fail)
    with caplog.at_level(logging.ERROR):
        response = client.post(URL, json=BODY)
    assert_refused(response, 500, "internal", None, "a fault of the service, not of the request")
    assert "secret" not in response.text
    assert "secret" in caplog.text


LEAF = (
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.integers()
    | st.sampled_from([2**53, 2**59, 2**62, 2**63 - 1, 2**63, 10**400, 1e18, 1e-12, 5e-324, 1e308])
    | st.floats(allow_nan=True, allow_infinity=True)
    | st.text(max_size=5)
)
ANYTHING = st.recursive(LEAF, lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=5), x, max_size=3))


def places(value: object, path: Steps = ()) -> Iterator[Steps]:
    """Yield the path of every value in the body."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inner:
        yield from places(part, (*path, key))


@st.composite
def attacks(draw: st.DrawFn) -> str:
    """Draw a body that is the good one but for one to three places."""
    body: Json = {"body": copy.deepcopy(BODY)}
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(list(places(body["body"]))))
        inner: Any = body
        last: str | int = "body"
        for step in path:
            inner, last = inner[last], step
        how = draw(st.sampled_from(["replace", "remove", "add"]))
        if how == "add" and isinstance(inner[last], dict):
            inner[last][draw(st.text(max_size=8))] = draw(ANYTHING)
        elif how == "remove" and path:
            del inner[last]
        else:
            inner[last] = draw(ANYTHING)
    return json.dumps(body["body"])


def assert_answered_or_refused(response: Response) -> None:
    assert response.status_code in (200, 400, 413, 422), response.text
    if response.status_code != 200:
        error = ErrorResponse.model_validate(response.json()).error
        assert "\n" not in error.message
        assert len(error.message) < 500
        return
    for task in ReservationResponse.model_validate(response.json()).tasks:
        assert 0 <= task.reservation.cpu <= task.limit.cpu
        assert 0 <= task.reservation.memory <= task.limit.memory


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(body=attacks())
def test_whatever_is_wrong_in_a_body_it_is_answered_or_refused_in_one_shape(client: TestClient, body: str) -> None:
    assert_answered_or_refused(client.post(URL, content=body))


@settings(max_examples=100, deadline=None)
@given(body=st.binary(max_size=50) | ANYTHING.map(json.dumps).map(str.encode))
def test_whatever_is_sent_is_refused_in_one_shape(client: TestClient, body: bytes) -> None:
    assert_answered_or_refused(client.post(URL, content=body))


EXTREME = st.sampled_from([0.0, 5e-324, 1e-300, 1e-12, 1.0, 1e18])


@settings(max_examples=100, deadline=None)
@given(
    limit=st.tuples(st.sampled_from([1e-12, 1.0, 1e18]), st.sampled_from([1e-12, 1.0, 1e18])),
    usage=st.lists(st.tuples(EXTREME, EXTREME, EXTREME), min_size=1, max_size=4),
    end_us=st.sampled_from([2**59, 10**15]),
)
def test_the_extremes_that_are_taken_are_answered_with_finite_numbers(
    client: TestClient, limit: tuple[float, float], usage: list[tuple[float, float, float]], end_us: int
) -> None:
    windows: list[Json] = [
        {"start_us": end_us - 10 * (len(usage) - i), "end_us": end_us - 9 * (len(usage) - i - 1),
         "cpu_mean": cpu, "cpu_max": cpu, "cpu_percentiles": [cpu] * 11, "memory_max": memory, "cpi": other}
        for i, (cpu, memory, other) in enumerate(usage)
    ]  # fmt: skip
    task = {"collection_id": 2**63 - 1, "limit": {"cpu": limit[0], "memory": limit[1]}, "windows": windows}
    earlier = [w | {name: w[name] - 10**10 for name in ("start_us", "end_us")} for w in windows]
    sibling = task | {"instance_index": 1, "limit": {"cpu": limit[1], "memory": limit[0]}, "windows": earlier}
    cell = {"largest_machine": {"cpu": limit[1], "memory": limit[0]}, "monday_us": end_us}
    response = client.post(URL, json={"tasks": [task, sibling], "cell": cell})
    assert response.status_code == 200, response.text
    assert_answered_or_refused(response)
