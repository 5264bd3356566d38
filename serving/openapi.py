"""The one OpenAPI page: what each route takes, gives and refuses, as it stands at ``/docs.json``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Final

from fastapi import FastAPI, Path, Query
from fastapi.openapi.utils import get_openapi
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from reclaim import __version__
from reclaim.serving import arrow, rows
from reclaim.serving.cell_schemas import AnswerFor, CellQuery, PageSize, Share, TasksRequest, UsageRequest
from reclaim.serving.errors import (
    BAD_REQUEST,
    BUSY,
    INTERNAL,
    INVALID,
    NO_ROOM,
    NOT_FOUND,
    TIMEOUT,
    TOO_LARGE,
    UNAUTHORIZED,
    UNAVAILABLE,
    UNKNOWN_TYPE,
)
from reclaim.serving.schemas import ErrorResponse, MarginName, ReservationRequest, TaskId

Json = dict[str, Any]

PATH: Final = "/docs.json"
REFUSALS: Final = {
    BAD_REQUEST: "The body is not JSON, or no Arrow stream.",
    UNAUTHORIZED: "The service asks for a bearer token, and this is not it.",
    NOT_FOUND: "There is no such task.",
    TIMEOUT: "The body did not arrive in time.",
    TOO_LARGE: "The body is too large, or holds too many rows.",
    UNKNOWN_TYPE: "The body has a `Content-Encoding`.",
    INVALID: "A field, column or parameter is missing, unknown or out of range.",
    BUSY: "Too much is under way; `Retry-After` says when to come again.",
    INTERNAL: "A fault of the service, which its log describes.",
    UNAVAILABLE: "There is no answer yet, or none in time; `Retry-After` says when to come again.",
    NO_ROOM: "The disk is full: nothing is acknowledged that could be lost.",
}
"""Statuses of refusals, and what each means."""
ALWAYS: Final = (UNAUTHORIZED, BUSY, INTERNAL, UNAVAILABLE)
"""Refusals that any route may meet."""
BODIED: Final = (BAD_REQUEST, TIMEOUT, TOO_LARGE, UNKNOWN_TYPE, INVALID)
"""Refusals of a body."""

_ABOUT: Final = (
    "Reservations from recent usage. JSON is taken as it is or refused: whole numbers have no decimal point, nothing "
    "unknown is passed over, and every refusal has one shape. What is `application/vnd.apache.arrow.stream` in a "
    "question is answered in kind, unless `Accept` says otherwise."
)
_CURSOR: Final = r"^[0-9]{1,19}:[0-9]{1,19}$"
"""What the ``next`` of an answer looks like."""
_TYPES: Final = {
    "whole": "integer", "number": "float or integer", "vector": "list of floats", "word": "string",
    "tier": "string or integer", "flag": "boolean",
}  # fmt: skip
_REQUEST_ID: Final = {"description": "Names the request in the log.", "schema": {"type": "string"}}
_RETRY_AFTER: Final = {"description": "When to come again, in seconds.", "schema": {"type": "integer", "minimum": 0}}
_CHALLENGE: Final = {"description": "How to say who asks.", "schema": {"type": "string"}}
_REFUSED: Final = {"application/json": {"schema": {"$ref": f"#/components/schemas/{ErrorResponse.__name__}"}}}

_Margin = Annotated[MarginName | None, Query(description="Safety margin; the service's default where absent.")]
_Budget = Annotated[
    Share | None,
    Query(description="In place of `margin`: share of task-windows that may exceed their reservation."),
]
_Quantiles = Annotated[bool | None, Query(description="Whether quantiles are wanted; absent: in JSON, not in Arrow.")]
_PageSize = Annotated[PageSize, Query(description="Tasks on a JSON page.")]
_After = Annotated[
    str | None,
    Query(max_length=64, description="`next` of the page before.", json_schema_extra={"pattern": _CURSOR}),
]
_Collection = Annotated[TaskId, Path(description="Job or alloc set.")]
_Index = Annotated[TaskId, Path(description="Position of the task in its collection.")]


def table(description: str, columns: dict[str, arrow.Kind] | None = None) -> Json:
    """Return what the page says of an Arrow stream: its content, by media type."""
    if columns:
        description += " Columns: " + ", ".join(f"`{name}` ({_TYPES[kind]})" for name, kind in columns.items()) + "."
    return {arrow.MEDIA_TYPE: {"schema": {"type": "string", "format": "binary", "description": description}}}


USAGE_TABLE: Final = table("One row per window, not compressed.", rows.USAGE_COLUMNS)
TASK_TABLE: Final = table("One row per task, not compressed.", rows.TASK_COLUMNS)
ANSWER_TABLE: Final = table("One row per task; the schema's metadata says what all of them rest on.")


def page(api: FastAPI, prefix: str) -> Json:
    """Return the page: the routes of ``api``, which stands under ``prefix``, and what the service says of itself."""
    made: Json = get_openapi(title="reclaim", version=__version__, description=_ABOUT, routes=api.routes)
    components = made["components"]
    components["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
    components["headers"] = {"X-Request-Id": _REQUEST_ID, "Retry-After": _RETRY_AFTER, "WWW-Authenticate": _CHALLENGE}
    components["parameters"] = {
        "X-Request-Id": {"name": "X-Request-Id", "in": "header", "required": False, **_REQUEST_ID}
    }
    paths = {prefix + path: item for path, item in made["paths"].items()} | _of_itself()
    for path, item in paths.items():
        for operation in item.values():
            _complete(operation, token=path.startswith(prefix) or path == "/metrics")
    return {**made, "servers": [{"url": "."}], "paths": paths}


def page_app(api: FastAPI, prefix: str, metrics: Callable[[], str]) -> Starlette:
    """Return an application for ``/docs.json``, the page, made when first asked for, and for ``/metrics``."""
    made: list[Response] = []

    async def answer(request: Request) -> Response:  # noqa: ARG001 - the signature of a route
        if not made:
            made.append(JSONResponse(page(api, prefix)))
        return made[0]

    def measured(request: Request) -> Response:  # noqa: ARG001 - the signature of a route
        return Response(metrics(), headers={"content-type": CONTENT_TYPE_LATEST})

    return Starlette(routes=[Route(PATH, answer), Route("/metrics", measured)])


def _complete(operation: Json, *, token: bool) -> None:
    """Add what holds for every route: the id of a request, and the token that may be asked for."""
    for parameter in operation.setdefault("parameters", []):  # one that is absent is absent, never null
        kinds = parameter["schema"].pop("anyOf", [])
        parameter["schema"] |= next((kind for kind in kinds if kind["type"] != "null"), {})
    operation["parameters"].append({"$ref": "#/components/parameters/X-Request-Id"})
    operation["security"] = [{}, {"bearer": []}] if token else []
    for status, response in operation["responses"].items():
        names = ["X-Request-Id"]
        names += ["Retry-After"] if int(status) in (BUSY, UNAVAILABLE) else []
        names += ["WWW-Authenticate"] if int(status) == UNAUTHORIZED else []
        response["headers"] = {name: {"$ref": f"#/components/headers/{name}"} for name in names}


def _of_itself() -> Json:
    """Return the paths that say how the service fares."""

    def get(name: str, summary: str, content: Json, *refusals: int, **others: Json) -> Json:
        responses = {str(status): {"description": REFUSALS[status], "content": _REFUSED} for status in refusals}
        answers = {"200": {"description": summary, "content": content}, **responses, **others}
        return {"get": {"operationId": name, "summary": summary, "responses": answers}}

    alive = {"type": "object", "properties": {"alive": {"const": True}}, "required": ["alive"]}
    ready = {"type": "object", "properties": {"ready": {"type": "boolean"}}, "required": ["ready"]}
    answer = {"application/json": {"schema": ready}}
    not_ready = {"503": {"description": "Requests cannot be answered now; the body says why.", "content": answer}}
    say = "Say whether requests can be answered, and how model, state and store fare."
    return {
        "/livez": get("livez", "Say that the process answers.", {"application/json": {"schema": alive}}),
        "/readyz": get("readyz", say, answer, **not_ready),
        "/healthz": get("healthz", say, answer, **not_ready),
        "/metrics": get(
            "metrics", "Give metrics in the format of Prometheus.", {"text/plain": {"schema": {"type": "string"}}},
            UNAUTHORIZED, INTERNAL, UNAVAILABLE,
        ),
    }  # fmt: skip


def describe_reservations(
    request: ReservationRequest, margin: _Margin = None, budget: _Budget = None, quantiles: _Quantiles = None
) -> None:
    """Answer for each task from the history in the request alone; nothing is remembered.

    As Arrow: one row per window, as for `/v1/usage`, limits told in every row; the answer has one row per task. The
    parameters are for Arrow; a JSON body says its margin itself.
    """


def describe_usage(
    request: UsageRequest, answer: AnswerFor = "none", margin: _Margin = None, budget: _Budget = None,
    page_size: _PageSize = 1_000, quantiles: _Quantiles = None,
) -> None:  # fmt: skip
    """Take windows as they come; good rows are kept though others are refused; the same window twice changes nothing.

    What is acknowledged is on the disk. `answer` asks for reservations right after it: of the tasks written of, or of
    the whole cell; in JSON the first page of them.
    """


def describe_tasks(request: TasksRequest) -> None:
    """Take facts about tasks: limits, places, ends; and which collections want no estimation."""


def describe_task(
    collection_id: _Collection, instance_index: _Index, margin: _Margin = None, budget: _Budget = None
) -> None:
    """Explain one task: its history, its forecast, and how its reservation came about."""


def describe_cell(
    machine_id: Annotated[list[TaskId] | None, Query(description="Only tasks on these machines.")] = None,
    collection_id: Annotated[list[TaskId] | None, Query(description="Only tasks of these collections.")] = None,
    margin: _Margin = None, budget: _Budget = None, page_size: _PageSize = 1_000,
    after: _After = None,
    quantiles: _Quantiles = None,
) -> None:  # fmt: skip
    """Answer for all tasks, or those on machines or of collections: JSON by pages, Arrow in one stream."""


def describe_query(request: CellQuery) -> None:
    """Answer for a list of tasks, for machines, collections or all, with margins and budgets by tier."""


def describe_state() -> None:
    """Say how the memory fares: tasks, clock, sizes, what was found when it was read."""


def describe_model() -> None:
    """Describe the served model: what an answer rests on, and the limits of a request."""
