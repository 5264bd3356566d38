"""The routes under /v1: bodies in, answers out, each as JSON or as an Arrow stream; no arithmetic."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Annotated, Any, Final, TypeVar

import numpy as np
from fastapi import APIRouter, FastAPI, Query, Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import QueryParams
from starlette.exceptions import HTTPException

from reclaim.data import schema as s
from reclaim.serving import arrow, bulk, rows
from reclaim.serving.answer import answer, model_info
from reclaim.serving.cell_answer import answers, as_json, as_table
from reclaim.serving.cell_schemas import (
    AnswerFor,
    CellAnswer,
    CellQuery,
    StateInfo,
    TaskExplanation,
    TasksRequest,
    UsageRequest,
    WriteAnswer,
)
from reclaim.serving.errors import (
    BAD_REQUEST,
    BUSY,
    INTERNAL,
    INVALID,
    METHOD_NOT_ALLOWED,
    NO_ROOM,
    NOT_FOUND,
    TIMEOUT,
    TOO_LARGE,
    UNAUTHORIZED,
    UNAVAILABLE,
    RequestError,
    error_from_validation,
    parse_body,
    parse_request,
)
from reclaim.serving.explain import explain
from reclaim.serving.query import margins_of, page_of
from reclaim.serving.runtime import Runtime
from reclaim.serving.schemas import MAX_ID, ErrorResponse, ModelInfo, ReservationRequest, ReservationResponse

PREFIX: Final = "/v1"
_INLINE_BYTES: Final = 16 * 2**10
"""Bodies up to this size are read on the event loop, in a millisecond or two; larger ones in a thread, so that probes
and small requests are not kept waiting for them."""
_WRITE: Final = b"write"
"""Key, in the metadata of a table of reservations, of what became of the write that it answers; as JSON."""
_JSON: Final = "application/json"
_ManyIds = Annotated[list[int] | None, Query()]
_Model = TypeVar("_Model", bound=BaseModel)

Handler = Callable[[Runtime, Request, bytes], Coroutine[Any, Any, Response]]


def routes(runtime: Callable[[], Runtime]) -> FastAPI:
    """Return the application; ``runtime`` is asked once for each request."""
    api = FastAPI(title="reclaim", openapi_url=None, docs_url=None, redoc_url=None)  # BentoML's page describes them
    router = APIRouter()
    paths: dict[str, set[str]] = {}

    def add(
        path: str, method: str, handler: Handler, describe: Callable[..., Any], returns: type[BaseModel],
        *refusals: int, takes_arrow: bool = False, gives_arrow: bool = False,
    ) -> None:  # fmt: skip
        paths.setdefault(PREFIX + path, set()).add(method)
        responses: dict[int | str, dict[str, Any]] = {
            status: {"model": ErrorResponse, "description": _REFUSALS[status]} for status in (*refusals, *_ALWAYS)
        }
        if gives_arrow:
            responses[200] = {"content": {arrow.MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}}}
        body = {"requestBody": {"content": {arrow.MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}}}}
        router.add_api_route(
            path, describe, methods=[method], response_model=returns, responses=responses,
            route_class_override=_handled_by(handler, runtime), openapi_extra=body if takes_arrow else None,
        )  # fmt: skip

    bodied = (BAD_REQUEST, TIMEOUT, TOO_LARGE, INVALID)
    add("/reservations", "POST", _reservations, _describe_reservations, ReservationResponse, *bodied,
        takes_arrow=True, gives_arrow=True)  # fmt: skip
    add("/usage", "POST", _usage, _describe_usage, WriteAnswer, *bodied, NO_ROOM, takes_arrow=True, gives_arrow=True)
    add("/tasks", "POST", _tasks, _describe_tasks, WriteAnswer, *bodied, NO_ROOM, takes_arrow=True)
    add("/tasks/{collection_id}/{instance_index}", "GET", _task, _describe_task, TaskExplanation, NOT_FOUND, INVALID)
    add("/cell/reservations", "GET", _cell, _describe_cell, CellAnswer, INVALID, gives_arrow=True)
    add("/cell/reservations", "POST", _query, _describe_query, CellAnswer, *bodied, gives_arrow=True)
    add("/cell", "GET", _state, _describe_state, StateInfo)
    add("/model", "GET", _model, _describe_model, ModelInfo)
    api.include_router(router)

    @api.api_route("/{path:path}", methods=["GET", "POST", "PUT", "PATCH", "DELETE"], include_in_schema=False)
    async def nothing_here(request: Request) -> Response:
        if request.url.path in paths:
            raise HTTPException(METHOD_NOT_ALLOWED, f"use {' or '.join(sorted(paths[request.url.path]))}")
        raise RequestError(NOT_FOUND, "not_found", f"no such path; there are {', '.join(sorted(paths))}")

    @api.exception_handler(RequestError)
    async def refuse(request: Request, error: RequestError) -> Response:  # noqa: ARG001 - the handler's signature
        headers = {} if error.retry_after_s is None else {"retry-after": str(error.retry_after_s)}
        return Response(error.body.model_dump_json(), error.status, headers, _JSON)

    @api.exception_handler(HTTPException)
    async def refuse_http(request: Request, error: HTTPException) -> Response:
        code = "method_not_allowed" if error.status_code == METHOD_NOT_ALLOWED else "refused"
        message = f"{request.method} {request.url.path}: {error.detail}"
        return await refuse(request, RequestError(error.status_code, code, message))

    @api.exception_handler(Exception)
    async def confess(request: Request, error: Exception) -> Response:  # noqa: ARG001 - goes on to the guard's log
        message = "a fault of the service, not of the request; its log has the details"
        return await refuse(request, RequestError(INTERNAL, "internal", message))

    return api


_REFUSALS: Final = {
    BAD_REQUEST: "The body is not JSON, or no Arrow stream.",
    UNAUTHORIZED: "The service asks for a bearer token, and this is not it.",
    NOT_FOUND: "There is no such task.",
    TIMEOUT: "The body did not arrive in time.",
    TOO_LARGE: "The body is too large, or holds too many rows.",
    INVALID: "A field or column is missing, unknown or out of range.",
    BUSY: "Too much is under way; `Retry-After` says when to come again.",
    INTERNAL: "A fault of the service, which its log describes.",
    UNAVAILABLE: "There is no answer yet, or none in time; `Retry-After` says when to come again.",
    NO_ROOM: "The disk is full: nothing is acknowledged that could be lost.",
}
_ALWAYS: Final = (UNAUTHORIZED, BUSY, INTERNAL, UNAVAILABLE)


def _handled_by(handler: Handler, runtime: Callable[[], Runtime]) -> type[APIRoute]:
    """Return a route that hands over the bare body: FastAPI would parse it, twice, before anybody asked for it."""

    class Route(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            async def handle(request: Request) -> Response:
                return await handler(runtime(), request, await request.body())

            return handle

    return Route


async def _reservations(runtime: Runtime, request: Request, body: bytes) -> Response:
    model, settings = runtime.keeper.served, runtime.settings
    if _is_arrow(request):
        query = _query_of(request.query_params, CellQuery)

        def made() -> Response:
            return _table(bulk.answer_histories(model, body, query, settings))

        return await run_in_threadpool(made)

    def respond() -> Response:
        return Response(answer(model, parse_request(body), settings).model_dump_json(), media_type=_JSON)

    return respond() if len(body) <= _INLINE_BYTES else await run_in_threadpool(respond)


async def _usage(runtime: Runtime, request: Request, body: bytes) -> Response:
    settings = runtime.settings
    wanted = _wanted(request)
    query = _query_of(request.query_params, CellQuery, ignored=("answer",))
    runtime.writer.check()

    def read() -> rows.UsageRows:
        with runtime.writer.timed("decode"):
            if _is_arrow(request):
                return rows.usage_from_arrow(body, settings.max_bulk_rows)
            return rows.usage_from_json(body, runtime.units)

    told = read() if len(body) <= _INLINE_BYTES else await run_in_threadpool(read)
    done = await asyncio.wrap_future(runtime.writer.write(told))
    if wanted == "none":
        return _said(done)

    def made() -> Response:
        chosen = query
        if wanted == "tasks":
            key = np.column_stack([told.windows.collection_id, told.windows.instance_index])
            return _answered(runtime, request, chosen, np.unique(key, axis=0), done)
        return _answered(runtime, request, chosen, None, done)

    return await run_in_threadpool(made)


async def _tasks(runtime: Runtime, request: Request, body: bytes) -> Response:
    runtime.writer.check()

    def read() -> rows.FactRows:
        if _is_arrow(request):
            return rows.facts_from_arrow(body, runtime.settings.max_bulk_rows)
        return rows.facts_from_json(body)

    told = read() if len(body) <= _INLINE_BYTES else await run_in_threadpool(read)
    done = await asyncio.wrap_future(runtime.writer.write(told))
    return _said(done)


async def _task(runtime: Runtime, request: Request, body: bytes) -> Response:  # noqa: ARG001 - a GET has none
    runtime.writer.check_readable()
    query = _query_of(request.query_params, CellQuery)
    key = np.array([[_whole(request.path_params, name) for name in (s.COLLECTION_ID, s.INSTANCE_INDEX)]])
    known = runtime.tracker.look(key, with_x=True)
    if not known.there[0]:
        raise RequestError(NOT_FOUND, "unknown_task", f"nothing was told of task {key[0, 0]}/{key[0, 1]}, or it left")
    margins = margins_of(query, known.engine, runtime.settings.margin)
    return _said(explain(answers(known, margins, runtime.settings), runtime.units))


async def _cell(runtime: Runtime, request: Request, body: bytes) -> Response:  # noqa: ARG001 - a GET has none
    runtime.writer.check_readable()
    query = _query_of(request.query_params, CellQuery)
    return await run_in_threadpool(lambda: _answered(runtime, request, query, None, None))


async def _query(runtime: Runtime, request: Request, body: bytes) -> Response:
    runtime.writer.check_readable()
    query = parse_body(body, CellQuery)
    return await run_in_threadpool(lambda: _answered(runtime, request, query, None, None))


async def _state(runtime: Runtime, request: Request, body: bytes) -> Response:  # noqa: ARG001 - a GET has none
    return _said(runtime.state_info())


async def _model(runtime: Runtime, request: Request, body: bytes) -> Response:  # noqa: ARG001 - a GET has none
    return _said(model_info(runtime.keeper.served, runtime.settings))


def _answered(
    runtime: Runtime, request: Request, query: CellQuery, key: np.ndarray[Any, Any] | None, write: WriteAnswer | None
) -> Response:
    """Return reservations for whom the query names, or of ``key``, with what became of the write before it."""
    tracker, settings = runtime.tracker, runtime.settings
    page = page_of(query, tracker, key, whole=_gives_arrow(request))
    known = tracker.look(page.key, machines=query.machines, collections=query.collections)
    found = answers(known, margins_of(query, known.engine, settings.margin), settings, page.limit)
    if _gives_arrow(request):
        table = as_table(found, runtime.units, quantiles=bool(query.quantiles))
        if write is not None:
            about = {**(table.schema.metadata or {}), _WRITE: write.model_dump_json().encode()}
            table = table.replace_schema_metadata(about)
        return _table(table)
    quantiles = query.quantiles is not False
    told = as_json(found, runtime.units, following=page.following, quantiles=quantiles)
    return _said(told if write is None else write.model_copy(update={"reservations": told}))


def _said(model: BaseModel) -> Response:
    return Response(model.model_dump_json(), media_type=_JSON)


def _table(table: Any) -> Response:
    return Response(memoryview(arrow.write_table(table)), media_type=arrow.MEDIA_TYPE)


def _is_arrow(request: Request) -> bool:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower() == arrow.MEDIA_TYPE


def _gives_arrow(request: Request) -> bool:
    """Return whether the answer is wanted as Arrow: by name, or as the question came, where nothing is named."""
    accept = request.headers.get("accept", "*/*").lower()
    if arrow.MEDIA_TYPE in accept:
        return True
    return _is_arrow(request) and _JSON not in accept


def _wanted(request: Request) -> AnswerFor:
    wanted = request.query_params.get("answer", "none")
    if wanted not in ("none", "tasks", "cell"):
        raise RequestError(
            INVALID, "invalid_field", f"answer: must be none, tasks or cell, got {wanted[:60]!r}", field="answer"
        )  # fmt: skip
    return wanted  # type: ignore[return-value]  # one of the three


def _query_of(params: QueryParams, model: type[_Model], ignored: tuple[str, ...] = ()) -> _Model:
    """Return the query that the part of a URL behind the question mark stands for."""
    lists = {s.MACHINE_ID: "machines", s.COLLECTION_ID: "collections"}
    numbers: dict[str, Callable[[str], Any]] = {"page_size": int, "budget": float}
    content: dict[str, Any] = {}
    for name in dict.fromkeys(params.keys()):
        if name in ignored:
            continue
        try:
            if name in lists:
                content[lists[name]] = [int(value) for value in params.getlist(name)]
            elif name == "quantiles":
                content[name] = {"true": True, "false": False}[params[name]]
            else:
                content[name] = numbers.get(name, str)(params[name])
        except (ValueError, KeyError) as error:
            given = params[name][:60]
            raise RequestError(INVALID, "invalid_field", f"{name}: cannot be {given!r}", field=name) from error
    try:
        return model.model_validate(content)
    except ValidationError as error:
        raise error_from_validation(error) from error


def _whole(params: dict[str, Any], name: str) -> int:
    text = str(params[name])
    if not text.isascii() or not text.isdecimal() or len(text) > 19 or int(text) > MAX_ID:
        raise RequestError(INVALID, "invalid_field", f"{name}: must be a whole number from 0 to {MAX_ID}", field=name)
    return int(text)


def _describe_reservations(request: ReservationRequest) -> None:
    """Answer for each task from the history in the request alone; nothing is remembered.

    As Arrow: one row per window, as for `/v1/usage`, limits told in every row; the answer has one row per task.
    """


def _describe_usage(
    request: UsageRequest, answer: AnswerFor = "none", margin: str | None = None, budget: float | None = None,
    quantiles: bool | None = None,
) -> None:  # fmt: skip
    """Take windows as they come; good rows are kept though others are refused; the same window twice changes nothing.

    What is acknowledged is on the disk. `answer` asks for reservations right after it: of the tasks written of, or of
    the whole cell.
    """


def _describe_tasks(request: TasksRequest) -> None:
    """Take facts about tasks: limits, places, ends; and which collections want no estimation."""


def _describe_task(collection_id: int, instance_index: int, margin: str | None = None) -> None:
    """Explain one task: its history, its forecast, and how its reservation came about."""


def _describe_cell(
    machine_id: _ManyIds = None, collection_id: _ManyIds = None, margin: str | None = None,
    budget: float | None = None, page_size: int = 1_000, after: str | None = None, quantiles: bool | None = None,
) -> None:  # fmt: skip
    """Answer for all tasks, or those on machines or of collections: JSON by pages, Arrow in one stream."""


def _describe_query(request: CellQuery) -> None:
    """Answer for a list of tasks, for machines, collections or all, with margins and budgets by tier."""


def _describe_state() -> None:
    """Say how the memory fares: tasks, clock, sizes, what was found when it was read."""


def _describe_model() -> None:
    """Describe the served model: what an answer rests on, and the limits of a request."""
