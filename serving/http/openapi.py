"""Makes the OpenAPI page of ``/docs.json`` from the wire models and the declarations of the routes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Final

from fastapi import FastAPI, Path
from fastapi.openapi.utils import get_openapi
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from reclaim import __version__
from reclaim.serving.wire import arrow, rows
from reclaim.serving.wire.cell_schemas import AnswerFor, PageSize, Share
from reclaim.serving.wire.errors import (
    BAD_REQUEST,
    BUSY,
    DISK_FULL,
    FORBIDDEN,
    INTERNAL,
    INVALID,
    NOT_FOUND,
    TIMEOUT,
    TOO_LARGE,
    UNAUTHORIZED,
    UNAVAILABLE,
    UNKNOWN_TYPE,
)
from reclaim.serving.wire.machine_schemas import Horizon
from reclaim.serving.wire.schemas import MAX_ID, ErrorResponse, MarginName, TaskId

Json = dict[str, Any]

PATH: Final = "/docs.json"
_INDEX: Final = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><title>reclaim</title><link rel="stylesheet" href="./static_content/swagger-ui.css"></head>
<body><div id="swagger-ui"></div><script src="./static_content/swagger-ui-bundle.js"></script>
<script>SwaggerUIBundle({url: "./docs.json", dom_id: "#swagger-ui", validatorUrl: null})</script></body>
</html>
"""
"""Page that shows the routes, with files that BentoML ships; BentoML's own page loads a script from another host."""
_OWN_ALONE: Final = (
    "default-src 'self'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; img-src 'self' data:"
)
"""Content security policy under which a page loads nothing from other hosts."""
REFUSALS: Final = {
    BAD_REQUEST: "The body is not JSON, or not an Arrow stream.",
    UNAUTHORIZED: "The bearer token is missing or wrong.",
    FORBIDDEN: "The token may only read; or, where none is asked for, the request comes from a web page of another "
    "origin, or names a host that is not this service.",
    NOT_FOUND: "There is no such task, or no such machine with tasks.",
    TIMEOUT: "The body did not arrive in time.",
    TOO_LARGE: "The body is too large, or holds too many rows.",
    UNKNOWN_TYPE: "The body has a `Content-Encoding`, or is neither JSON nor an Arrow stream.",
    INVALID: "A field, column or parameter is missing, unknown or out of range.",
    BUSY: "Too much is under way; `Retry-After` says when to try again.",
    INTERNAL: "A fault of the service, which its log describes.",
    UNAVAILABLE: "There is no answer yet, or none in time; `Retry-After` says when to try again.",
    DISK_FULL: "The disk is full, and nothing was stored.",
}
"""Meaning of each status of a refusal."""
ALWAYS: Final = (UNAUTHORIZED, FORBIDDEN, BUSY, INTERNAL, UNAVAILABLE)
"""Refusals of every route."""
BODIED: Final = (BAD_REQUEST, TIMEOUT, TOO_LARGE, UNKNOWN_TYPE, INVALID)
"""Further refusals of routes that take a body."""

_ABOUT: Final = (
    "Reservations from recent usage. JSON is read strictly: whole numbers have no decimal point, unknown fields are "
    "refused, and every refusal has one shape. Histories in `application/vnd.apache.arrow.stream` have an answer of "
    "that type. Reservations of the cell, and the list of machines, come in it where `Accept` names it, or where the "
    "request is of it and `Accept` does not name JSON. Metrics are text. All else is JSON."
)
_GROUPS: Final = {
    "tasks": "Reservations of tasks, from histories in the request or from the service's memory, and what it is told.",
    "machines": "What tasks of a machine need together, and machines with room.",
    "service": "The served model, the memory, probes and metrics.",
}
"""Groups of the page's routes, in its order."""
_CURSOR: Final = r"^[0-9]{1,19}:[0-9]{1,19}$"
"""Form of the ``next`` of an answer."""
_MOST_DIGITS: Final = len(str(MAX_ID))
_TYPES: Final = {
    "whole": "integer", "number": "float or integer", "vector": "list of floats", "word": "string",
    "tier": "string or integer", "flag": "boolean",
}  # fmt: skip
_REQUEST_ID: Final = {"description": "Names the request in the log.", "schema": {"type": "string"}}
_RETRY_AFTER: Final = {"description": "When to try again, in seconds.", "schema": {"type": "integer", "minimum": 0}}
_CHALLENGE: Final = {"description": "How to authenticate.", "schema": {"type": "string"}}
REFUSED: Final = {"application/json": {"schema": {"$ref": f"#/components/schemas/{ErrorResponse.__name__}"}}}
"""Content of a refusal, by media type."""


def _digits(text: str) -> int:
    """Return a number of decimal digits; ``int`` also takes blanks, signs, underscores and digits of all scripts."""
    if not text.isascii() or not text.isdecimal() or len(text) > _MOST_DIGITS:
        raise PydanticCustomError("digits", f"must be a whole number from 0 to {MAX_ID}")
    return int(text)


def _number(text: str) -> str:
    """Return text that is a number without blanks and underscores, or no number at all, which pydantic refuses."""
    if not text.isascii() or "_" in text or text != text.strip():
        raise PydanticCustomError("number", "must be a number")
    return text


def _flag(text: str) -> bool:
    if text not in ("true", "false"):
        raise PydanticCustomError("flag", "must be true or false")
    return text == "true"


_Ids = Annotated[list[TaskId] | None, BeforeValidator(lambda texts: [_digits(text) for text in texts])]


class Parameters(BaseModel):
    """Parameters of a request's URL, as text; each means one value or is refused."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class CertaintyParameters(Parameters):
    """Parameters that choose how safe a reservation is."""

    margin: MarginName | None = Field(default=None, description="Safety margin; the service's default where absent.")
    budget: Annotated[Share | None, BeforeValidator(_number)] = Field(
        default=None, description="In place of `margin`: share of task-windows that may exceed their reservation."
    )


class HistoryParameters(CertaintyParameters):
    """Parameters of a question that brings its histories as an Arrow stream."""

    quantiles: Annotated[bool | None, BeforeValidator(_flag)] = Field(
        default=None, description="Whether quantiles are wanted; absent: in JSON, not in Arrow."
    )


class PageParameters(HistoryParameters):
    """Parameters of a question that is answered from the service's memory."""

    page_size: Annotated[PageSize, BeforeValidator(_digits)] = Field(default=1_000, description="Tasks on a JSON page.")


class UsageParameters(PageParameters):
    """Parameters of a write of usage."""

    answer: AnswerFor = "none"


class CellParameters(PageParameters):
    """Parameters of a question about the cell."""

    machine_id: _Ids = Field(default=None, serialization_alias="machines", description="Only tasks on these machines.")
    collection_id: _Ids = Field(
        default=None, serialization_alias="collections", description="Only tasks of these collections."
    )
    after: str | None = Field(
        default=None, max_length=64, description="`next` of the page before.", json_schema_extra={"pattern": _CURSOR}
    )


class HorizonParameters(Parameters):
    """Parameters of a question about all machines."""

    horizon_s: Annotated[Horizon | None, BeforeValidator(_digits)] = Field(
        default=None,
        description="Horizon of the peaks, in seconds, that the model forecasts; absent: that of the reservations.",
    )


class MachinesParameters(HorizonParameters):
    """Parameters of a question about a page of machines."""

    page_size: Annotated[PageSize, BeforeValidator(_digits)] = Field(
        default=1_000, description="Machines on a JSON page."
    )
    after: Annotated[TaskId | None, BeforeValidator(_digits)] = Field(
        default=None, description="`next` of the page before."
    )


Machine = Annotated[TaskId, BeforeValidator(_digits), Path(description="The machine.")]
Collection = Annotated[TaskId, BeforeValidator(_digits), Path(description="Job or alloc set.")]
Index = Annotated[TaskId, BeforeValidator(_digits), Path(description="Position of the task in its collection.")]


class TaskPath(Parameters):
    """The parts of a path that name a task."""

    collection_id: Collection
    instance_index: Index


class MachinePath(Parameters):
    """The part of a path that names a machine."""

    machine_id: Machine


def table(description: str, columns: dict[str, arrow.Kind] | None = None) -> Json:
    """Return the content of an Arrow stream, by media type, for the page."""
    if columns:
        description += " Columns: " + ", ".join(f"`{name}` ({_TYPES[kind]})" for name, kind in columns.items()) + "."
    return {arrow.MEDIA_TYPE: {"schema": {"type": "string", "format": "binary", "description": description}}}


USAGE_TABLE: Final = table("One row per window, not compressed.", rows.USAGE_COLUMNS)
TASK_TABLE: Final = table("One row per task, not compressed.", rows.TASK_COLUMNS)
ANSWER_TABLE: Final = table("One row per task; the schema's metadata has model, horizon, levels, units and clock.")
MACHINE_TABLE: Final = table(
    "One row per machine; the schema's metadata has model, horizon, units, clock, budgets, tasks without a machine and "
    "`margins`, as JSON."
)


def page(api: FastAPI, prefix: str) -> Json:
    """Return the page of the routes of ``api``, which is mounted at ``prefix``, and of the service's own paths."""
    made: Json = get_openapi(title="reclaim", version=__version__, description=_ABOUT, routes=api.routes)
    components = made["components"]
    components["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
    components["headers"] = {"X-Request-Id": _REQUEST_ID, "Retry-After": _RETRY_AFTER, "WWW-Authenticate": _CHALLENGE}
    components["parameters"] = {
        "X-Request-Id": {"name": "X-Request-Id", "in": "header", "required": False, **_REQUEST_ID}
    }
    paths = {prefix + path: item for path, item in made["paths"].items()} | _own_paths()
    for path, item in paths.items():
        for operation in item.values():
            _complete(operation, token=path.startswith(prefix) or path == "/metrics")
            operation["tags"] = [_group(path, prefix)]
    tags = [{"name": name, "description": description} for name, description in _GROUPS.items()]
    return {**made, "servers": [{"url": "."}], "tags": tags, "paths": paths}


def page_app(api: FastAPI, prefix: str, metrics: Callable[[], str]) -> Starlette:
    """Return the application of ``/``, of ``/docs.json``, made at the first request, and of ``/metrics``."""
    made: list[Response] = []

    async def answer(request: Request) -> Response:  # noqa: ARG001 - the signature of a route
        if not made:
            made.append(JSONResponse(page(api, prefix)))
        return made[0]

    def measured(request: Request) -> Response:  # noqa: ARG001 - the signature of a route
        return Response(metrics(), headers={"content-type": CONTENT_TYPE_LATEST})

    def index(request: Request) -> Response:  # noqa: ARG001 - the signature of a route
        return HTMLResponse(_INDEX, headers={"content-security-policy": _OWN_ALONE})

    return Starlette(routes=[Route("/", index), Route(PATH, answer), Route("/metrics", measured)])


def _group(path: str, prefix: str) -> str:
    """Return the group of a path."""
    if not path.startswith(prefix) or path in (f"{prefix}/cell", f"{prefix}/model"):
        return "service"
    return "machines" if path.startswith(f"{prefix}/machines") else "tasks"


def _complete(operation: Json, *, token: bool) -> None:
    """Add the id of a request, and the token, which all routes have in common."""
    for parameter in operation.setdefault("parameters", []):  # an absent parameter has no value: null cannot be sent
        kinds = parameter["schema"].pop("anyOf", [])
        parameter["schema"] |= next((kind for kind in kinds if kind["type"] != "null"), {})
    operation["parameters"].append({"$ref": "#/components/parameters/X-Request-Id"})
    operation["security"] = [{}, {"bearer": []}] if token else []
    for status, response in operation["responses"].items():
        names = ["X-Request-Id"]
        names += ["Retry-After"] if int(status) in (BUSY, UNAVAILABLE) else []
        names += ["WWW-Authenticate"] if int(status) == UNAUTHORIZED else []
        response["headers"] = {name: {"$ref": f"#/components/headers/{name}"} for name in names}


def _own_paths() -> Json:
    """Return the paths of probes and metrics."""

    def get(name: str, summary: str, content: Json, *refusals: int, **others: Json) -> Json:
        responses = {str(status): {"description": REFUSALS[status], "content": REFUSED} for status in refusals}
        answers = {"200": {"description": summary, "content": content}, **responses, **others}
        return {"get": {"operationId": name, "summary": summary, "responses": answers}}

    alive = {"type": "object", "properties": {"alive": {"const": True}}, "required": ["alive"]}
    ready = {"type": "object", "properties": {"ready": {"type": "boolean"}}, "required": ["ready"]}
    answer = {"application/json": {"schema": ready}}
    not_ready = {"503": {"description": "Requests cannot be answered now; the body says why.", "content": answer}}
    say = "Report whether requests can be answered, and the condition of model, state and store."
    return {
        "/livez": get("livez", "Report that the process answers.", {"application/json": {"schema": alive}}),
        "/readyz": get("readyz", say, answer, **not_ready),
        "/healthz": get("healthz", say, answer, **not_ready),
        "/metrics": get(
            "metrics", "Give metrics in the format of Prometheus.", {"text/plain": {"schema": {"type": "string"}}},
            UNAUTHORIZED, INTERNAL, UNAVAILABLE,
        ),
    }  # fmt: skip
