"""The routes under /v1: bodies in, answers out, each as JSON or as an Arrow stream; no arithmetic."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final

import numpy as np
from fastapi import FastAPI, Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import QueryParams
from starlette.exceptions import HTTPException

from reclaim.data import schema as s
from reclaim.serving import arrow, bulk, rows
from reclaim.serving.answer import answer, model_info
from reclaim.serving.cell_answer import answers, as_json, table_of
from reclaim.serving.cell_schemas import (
    AnswerFor,
    CellAnswer,
    CellQuery,
    StateInfo,
    TaskExplanation,
    WriteAnswer,
)
from reclaim.serving.errors import (
    INTERNAL,
    INVALID,
    METHOD_NOT_ALLOWED,
    NO_ROOM,
    NOT_FOUND,
    RequestError,
    error_from_validation,
    parse_body,
    parse_request,
)
from reclaim.serving.explain import explain
from reclaim.serving.openapi import (
    ALWAYS,
    ANSWER_TABLE,
    BODIED,
    REFUSALS,
    TASK_TABLE,
    USAGE_TABLE,
    describe_cell,
    describe_model,
    describe_query,
    describe_reservations,
    describe_state,
    describe_task,
    describe_tasks,
    describe_usage,
)
from reclaim.serving.pieces import THREADS
from reclaim.serving.query import margins_of, page_of
from reclaim.serving.runtime import Runtime
from reclaim.serving.schemas import MAX_ID, ErrorResponse, ModelInfo, ReservationResponse

PREFIX: Final = "/v1"
_INLINE_BYTES: Final = 16 * 2**10
"""Bodies up to this size are read on the event loop, in a millisecond or two; larger ones in a thread, so that probes
and small requests are not kept waiting for them."""
_WRITE: Final = b"write"
"""Key, in the metadata of a table of reservations, of what became of the write that it answers; as JSON."""
_JSON: Final = "application/json"
_MARGIN: Final = ("margin", "budget")
"""Parameters that say how sure a reservation should be."""

Handler = Callable[[Runtime, Request, bytes], Coroutine[Any, Any, Response]]


def routes(runtime: Callable[[], Runtime]) -> FastAPI:
    """Return the application; ``runtime`` is asked once for each request."""
    api = FastAPI(title="reclaim", openapi_url=None, docs_url=None, redoc_url=None)  # BentoML's page describes them
    paths: dict[str, set[str]] = {}

    def add(
        path: str, method: str, handler: Handler, describe: Callable[..., Any], returns: type[BaseModel],
        *refusals: int, takes: dict[str, Any] | None = None, gives_arrow: bool = False,
    ) -> None:  # fmt: skip
        paths.setdefault(PREFIX + path, set()).add(method)
        responses: dict[int | str, dict[str, Any]] = {
            status: {"model": ErrorResponse, "description": REFUSALS[status]} for status in (*refusals, *ALWAYS)
        }
        if gives_arrow:
            responses[200] = {"content": ANSWER_TABLE}
        body = None if takes is None else {"requestBody": {"content": takes}}
        api.router.add_api_route(  # one that is included would be built at the first request, in whatever thread
            path, describe, methods=[method], response_model=returns, responses=responses,
            operation_id=describe.__name__.removeprefix("describe_"), summary=(describe.__doc__ or "").split("\n")[0],
            route_class_override=_handled_by(handler, runtime), openapi_extra=body,
        )  # fmt: skip

    add("/reservations", "POST", _reservations, describe_reservations, ReservationResponse, *BODIED,
        takes=USAGE_TABLE, gives_arrow=True)  # fmt: skip
    add("/usage", "POST", _usage, describe_usage, WriteAnswer, *BODIED, NO_ROOM, takes=USAGE_TABLE, gives_arrow=True)
    add("/tasks", "POST", _tasks, describe_tasks, WriteAnswer, *BODIED, NO_ROOM, takes=TASK_TABLE)
    add("/tasks/{collection_id}/{instance_index}", "GET", _task, describe_task, TaskExplanation, NOT_FOUND, INVALID)
    add("/cell/reservations", "GET", _cell, describe_cell, CellAnswer, INVALID, gives_arrow=True)
    add("/cell/reservations", "POST", _query, describe_query, CellAnswer, *BODIED, gives_arrow=True)
    add("/cell", "GET", _state, describe_state, StateInfo)
    add("/model", "GET", _model, describe_model, ModelInfo)

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
        query = _query_of(request.query_params, *_MARGIN, "quantiles")

        def made() -> Response:
            # or a single call would wait for a core
            threads = max(1, THREADS - 1) if runtime.company.present else THREADS
            return _table(runtime, bulk.answer_histories(model, body, query, settings, runtime.metrics, threads))

        return await run_in_threadpool(made)
    _query_of(request.query_params)  # a body of JSON says it itself

    def respond() -> Response:
        return Response(answer(model, parse_request(body), settings).model_dump_json(), media_type=_JSON)

    if len(body) > _INLINE_BYTES:
        return await run_in_threadpool(respond)
    runtime.company.came()
    return respond()


async def _usage(runtime: Runtime, request: Request, body: bytes) -> Response:
    settings = runtime.settings
    wanted = _wanted(request)
    asked = QueryParams([item for item in request.query_params.multi_items() if item[0] != "answer"])
    query = _query_of(asked, *_MARGIN, "page_size", "quantiles")
    runtime.writer.check()

    def read() -> rows.UsageRows:
        with runtime.writer.timed("decode"):
            if _is_arrow(request):
                return rows.usage_from_arrow(body, settings.max_bulk_rows)
            return rows.usage_from_json(body, runtime.units, settings.max_bulk_rows)

    if len(body) <= _INLINE_BYTES:
        runtime.company.came()
        told = read()
    else:
        told = await run_in_threadpool(read)
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
        return rows.facts_from_json(body, runtime.settings.max_bulk_rows)

    if len(body) <= _INLINE_BYTES:
        runtime.company.came()
        told = read()
    else:
        told = await run_in_threadpool(read)
    done = await asyncio.wrap_future(runtime.writer.write(told))
    return _said(done)


async def _task(runtime: Runtime, request: Request, body: bytes) -> Response:  # noqa: ARG001 - a GET has none
    runtime.writer.check_readable()
    query = _query_of(request.query_params, *_MARGIN)
    key = np.array([[_whole(request.path_params, name) for name in (s.COLLECTION_ID, s.INSTANCE_INDEX)]])
    runtime.company.came()
    known = runtime.tracker.look(key, with_x=True)
    if not known.there[0]:
        raise RequestError(NOT_FOUND, "unknown_task", f"nothing was told of task {key[0, 0]}/{key[0, 1]}, or it left")
    margins = margins_of(query, known.engine, runtime.settings.margin)
    return _said(explain(answers(known, margins, runtime.settings), runtime.units))


async def _cell(runtime: Runtime, request: Request, body: bytes) -> Response:  # noqa: ARG001 - a GET has none
    runtime.writer.check_readable()
    query = _query_of(request.query_params, *_LISTS, *_MARGIN, "page_size", "after", "quantiles")
    return await run_in_threadpool(lambda: _answered(runtime, request, query, None, None))


async def _query(runtime: Runtime, request: Request, body: bytes) -> Response:
    runtime.writer.check_readable()
    query = parse_body(body, CellQuery)
    if query.tasks is not None and len(body) <= _INLINE_BYTES:
        runtime.company.came()
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
    if _gives_arrow(request):
        with runtime.metrics.answering("answer"):
            table = table_of(tracker, query, page, settings, runtime.units)
        if write is not None:
            about = {**(table.schema.metadata or {}), _WRITE: write.model_dump_json().encode()}
            table = table.replace_schema_metadata(about)
        return _table(runtime, table)
    assert page.key is not None
    known = tracker.look(page.key)
    margin_of_tier = margins_of(query, known.engine, settings.margin)
    found = answers(known, margin_of_tier, settings, page.limit)
    quantiles = query.quantiles is not False
    told = as_json(found, runtime.units, following=page.following, quantiles=quantiles)
    return _said(told if write is None else write.model_copy(update={"reservations": told}))


def _said(model: BaseModel) -> Response:
    return Response(model.model_dump_json(), media_type=_JSON)


def _table(runtime: Runtime, table: Any) -> Response:
    with runtime.metrics.answering("encode"):
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


def _query_of(params: QueryParams, *names: str) -> CellQuery:
    """Return the query that the part of a URL behind the question mark stands for; ``names`` are all it may say."""
    content: dict[str, Any] = {}
    for name in dict.fromkeys(params.keys()):
        if name not in names:
            raise RequestError(INVALID, "unknown_field", f"{name[:60]}: no such parameter here", field=name[:60])
        given, read = params.getlist(name), _READ.get(name, str)
        try:
            content[_LISTS.get(name, name)] = [read(v) for v in given] if name in _LISTS else read(given[-1])
        except (ValueError, KeyError) as error:
            message = f"{name}: cannot be {given[-1][:60]!r}"
            raise RequestError(INVALID, "invalid_field", message, field=name) from error
    try:
        return CellQuery.model_validate(content)
    except ValidationError as error:
        raise error_from_validation(error, {field: name for name, field in _LISTS.items()}) from error


def _integer(text: str) -> int:
    """Return what decimal digits stand for; ``int`` takes blanks, signs, underscores and the digits of all scripts."""
    if not text.isascii() or not text.isdecimal() or len(text) > _MOST_DIGITS:
        raise ValueError(text)
    return int(text)


def _fraction(text: str) -> float:
    if not text.isascii() or "_" in text or text != text.strip():
        raise ValueError(text)
    return float(text)


_LISTS: Final = {s.MACHINE_ID: "machines", s.COLLECTION_ID: "collections"}
"""Parameters that may be there many times, and the fields of a query that they are."""
_READ: Final[dict[str, Callable[[str], Any]]] = {
    **dict.fromkeys(("page_size", *_LISTS), _integer), "budget": _fraction,
    "quantiles": {"true": True, "false": False}.__getitem__,
}  # fmt: skip
_MOST_DIGITS: Final = len(str(MAX_ID))


def _whole(params: dict[str, Any], name: str) -> int:
    try:
        number = _integer(str(params[name]))
    except ValueError:
        number = MAX_ID + 1
    if number > MAX_ID:
        raise RequestError(INVALID, "invalid_field", f"{name}: must be a whole number from 0 to {MAX_ID}", field=name)
    return number
