"""Declares the routes under /v1 and handles their requests: bodies in, answers out, as JSON or as Arrow streams."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from inspect import Parameter, Signature
from typing import Annotated, Any, Final, TypeVar

import numpy as np
from fastapi import FastAPI, Query, Request, Response
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Match

from reclaim.data import schema as s
from reclaim.data.core.parallel import THREADS
from reclaim.serving.answers.explain import explain
from reclaim.serving.answers.machine_fit import fit
from reclaim.serving.answers.machine_metrics import as_metrics
from reclaim.serving.answers.machine_sums import sums_by_horizon, sums_of
from reclaim.serving.answers.machines import as_json as machines_as_json
from reclaim.serving.answers.machines import as_table as machines_as_table
from reclaim.serving.answers.machines import explain_machine
from reclaim.serving.answers.query import Page, machines_from, margins_of, page_of
from reclaim.serving.answers.stateful import answers, as_json, one_task, table_of
from reclaim.serving.answers.stateless import answer, model_info, other_units
from reclaim.serving.answers.stateless_table import answer_histories
from reclaim.serving.http.large import SMALL_TASKS, LargeAnswers
from reclaim.serving.http.openapi import (
    ALWAYS,
    ANSWER_TABLE,
    BODIED,
    MACHINE_TABLE,
    REFUSALS,
    REFUSED,
    TASK_TABLE,
    USAGE_TABLE,
    CellParameters,
    CertaintyParameters,
    Collection,
    HistoryParameters,
    HorizonParameters,
    Index,
    Machine,
    MachinePath,
    MachinesParameters,
    Parameters,
    TaskPath,
    UsageParameters,
)
from reclaim.serving.runtime import Runtime
from reclaim.serving.wire import arrow, rows
from reclaim.serving.wire.cell_schemas import (
    CellAnswer,
    CellQuery,
    StateInfo,
    TaskExplanation,
    TasksRequest,
    UsageRequest,
    WriteAnswer,
)
from reclaim.serving.wire.errors import (
    DISK_FULL,
    INTERNAL,
    INVALID,
    METHOD_NOT_ALLOWED,
    NOT_FOUND,
    UNKNOWN_TYPE,
    ClientLeftError,
    RequestError,
    error_from_validation,
    parse_body,
    parse_request,
)
from reclaim.serving.wire.machine_schemas import FitAnswer, FitRequest, MachineExplanation, MachinesAnswer
from reclaim.serving.wire.schemas import ErrorResponse, ModelInfo, ReservationRequest, ReservationResponse

PREFIX: Final = "/v1"
_NO_KEY: Final = np.zeros((0, 2), np.int64)
_INLINE_BYTES: Final = 16 * 2**10
"""Bodies up to this size are read on the event loop, in a millisecond or two; larger ones in a thread, so that probes
and small requests do not wait for them."""
_WRITE: Final = b"write"
"""Key of the outcome of a write, as JSON, in the metadata of the table of reservations that answers it."""
_JSON: Final = "application/json"
_NO_TASKS: Final = '"tasks":[]'
"""Place of the tasks in the JSON of an answer without tasks; within strings, quotes are escaped."""
_METHODS: Final = ["GET", "POST", "PUT", "PATCH", "DELETE"]
"""Methods that are refused where a path is unknown, or known only with other methods."""
_LISTS: Final = (s.MACHINE_ID, s.COLLECTION_ID)
"""Parameters that may be given many times."""

_Parameters = TypeVar("_Parameters", bound=Parameters)
_Rows = TypeVar("_Rows", rows.UsageRows, rows.FactRows)
_Made = TypeVar("_Made")
Handler = Callable[[Runtime, Request, bytes], Coroutine[Any, Any, Response]]


def routes(runtime: Callable[[], Runtime]) -> FastAPI:
    """Return the application; ``runtime`` is called once for each request."""
    api = FastAPI(title="reclaim", openapi_url=None, docs_url=None, redoc_url=None)  # BentoML's page describes them
    paths: set[str] = set()

    def add(
        path: str, method: str, handler: Handler, returns: type[BaseModel] | None, *refusals: int,
        takes: dict[str, Any] | None = None, gives: dict[str, Any] | None = None, **parameters: Any,
    ) -> None:  # fmt: skip
        paths.add(PREFIX + path)
        responses: dict[int | str, dict[str, Any]] = {
            status: {
                "description": REFUSALS[status],
                **({"content": REFUSED} if returns is None else {"model": ErrorResponse}),
            }
            for status in (*refusals, *ALWAYS)
        }
        if gives is not None:
            responses[200] = {"content": gives}
        body = None if takes is None else {"requestBody": {"content": takes}}
        api.router.add_api_route(  # an included router would be built at the first request, in its thread
            path, _declared(handler, parameters), methods=[method], response_model=returns, responses=responses,
            operation_id=handler.__name__.removeprefix("_"), summary=(handler.__doc__ or "").split("\n")[0],
            route_class_override=_handled_by(handler, runtime), openapi_extra=body,
            response_class=PlainTextResponse if returns is None else JSONResponse,
        )  # fmt: skip

    add("/reservations", "POST", _reservations, ReservationResponse, *BODIED, takes=USAGE_TABLE, gives=ANSWER_TABLE,
        request=ReservationRequest, query=Annotated[HistoryParameters, Query()])  # fmt: skip
    add("/usage", "POST", _usage, WriteAnswer, *BODIED, DISK_FULL, takes=USAGE_TABLE, gives=ANSWER_TABLE,
        request=UsageRequest, query=Annotated[UsageParameters, Query()])  # fmt: skip
    add("/tasks", "POST", _tasks, WriteAnswer, *BODIED, DISK_FULL, takes=TASK_TABLE, request=TasksRequest)
    add("/tasks/{collection_id}/{instance_index}", "GET", _task, TaskExplanation, NOT_FOUND, INVALID,
        collection_id=Collection, instance_index=Index, query=Annotated[CertaintyParameters, Query()])  # fmt: skip
    add("/cell/reservations", "GET", _cell, CellAnswer, INVALID, gives=ANSWER_TABLE,
        query=Annotated[CellParameters, Query()])  # fmt: skip
    add("/cell/reservations", "POST", _query, CellAnswer, *BODIED, gives=ANSWER_TABLE, request=CellQuery)
    add("/machines", "GET", _machines, MachinesAnswer, INVALID, gives=MACHINE_TABLE,
        query=Annotated[MachinesParameters, Query()])  # fmt: skip
    add("/machines/metrics", "GET", _machine_metrics, None, INVALID, query=Annotated[HorizonParameters, Query()])
    add("/machines/fit", "POST", _fit, FitAnswer, *BODIED, request=FitRequest)

    async def not_found(request: Request) -> Response:
        known = [of for of in api.routes if isinstance(of, APIRoute) and of.matches(request.scope)[0] is Match.PARTIAL]
        if known:  # in the order of their declaration
            methods = sorted({method for of in known if of.path == known[0].path for method in of.methods or ()})
            raise HTTPException(METHOD_NOT_ALLOWED, f"use {' or '.join(methods)}", {"Allow": ", ".join(methods)})
        raise RequestError(NOT_FOUND, "not_found", f"no such path; the paths are {', '.join(sorted(paths))}")

    api.api_route("/machines/fit", methods=_METHODS, include_in_schema=False)(not_found)  # not the id of a machine
    add("/machines/{machine_id}", "GET", _machine, MachineExplanation, NOT_FOUND, INVALID, machine_id=Machine)
    add("/cell", "GET", _state, StateInfo)
    add("/model", "GET", _model, ModelInfo)

    api.api_route("/{path:path}", methods=_METHODS, include_in_schema=False)(not_found)

    @api.exception_handler(RequestError)
    async def refuse(request: Request, error: RequestError) -> Response:  # noqa: ARG001 - the handler's signature
        headers = {} if error.retry_after_s is None else {"retry-after": str(error.retry_after_s)}
        return Response(error.body.model_dump_json(), error.status, headers, _JSON)

    @api.exception_handler(HTTPException)
    async def refuse_http(request: Request, error: HTTPException) -> Response:
        code = "method_not_allowed" if error.status_code == METHOD_NOT_ALLOWED else "refused"
        message = f"{request.method} {request.url.path}: {error.detail}"
        response = await refuse(request, RequestError(error.status_code, code, message))
        response.headers.update(error.headers or {})
        return response

    @api.exception_handler(Exception)
    async def internal_error(request: Request, error: Exception) -> Response:  # noqa: ARG001 - the guard logs it
        message = "a fault of the service, not of the request; its log has the details"
        return await refuse(request, RequestError(INTERNAL, "internal", message))

    return api


def _declared(handler: Handler, parameters: dict[str, Any]) -> Callable[..., None]:
    """Return a function that is never called: FastAPI makes the page from its signature and its docstring."""

    def declared() -> None: ...

    declared.__doc__ = handler.__doc__
    kinds = [Parameter(name, Parameter.KEYWORD_ONLY, annotation=kind) for name, kind in parameters.items()]
    declared.__signature__ = Signature(kinds)  # type: ignore[attr-defined]  # inspect.signature returns it
    return declared


def _handled_by(handler: Handler, runtime: Callable[[], Runtime]) -> type[APIRoute]:
    """Return a route that gives the handler the body in bytes; FastAPI's own parsing costs 60 µs more a request."""

    class Route(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            async def handle(request: Request) -> Response:
                return await handler(runtime(), request, await request.body())

            return handle

    return Route


async def _reservations(runtime: Runtime, request: Request, body: bytes) -> Response:
    """Answer for each task from the history in the request alone; nothing is stored.

    As Arrow: one row per window, as for `/v1/usage`, with a limit in every row; the answer has one row per task. The
    parameters are for Arrow; a JSON body has its own margin.
    """
    model, settings = runtime.keeper.served, runtime.settings
    if _is_arrow(request):
        query = _query_of(_parameters(request, HistoryParameters))

        def respond_in_arrow() -> Response:
            # or a small call would wait for a core
            threads = max(1, THREADS - 1) if runtime.small_calls.recent else THREADS
            answered = answer_histories(model, body, query, settings, runtime.metrics, threads)
            runtime.warn_of_units((answered.schema.metadata or {}).get(b"amounts", b"").decode())
            return _table(runtime, answered)

        return await run_in_threadpool(respond_in_arrow)
    _parameters(request, Parameters)  # none: a JSON body has its own margin

    def respond() -> Response:
        asked = parse_request(body)
        answered = answer(model, asked, settings)
        limit = np.array([(task.limit.cpu, task.limit.memory) for task in asked.tasks])
        runtime.warn_of_units(other_units(model.bundle, limit))
        return Response(answered.model_dump_json(), media_type=_JSON)

    if len(body) > _INLINE_BYTES:
        answered: Response = await _large_of(runtime).in_thread(respond)
        return answered
    runtime.small_calls.note()
    return respond()


async def _usage(runtime: Runtime, request: Request, body: bytes) -> Response:
    """Take windows in any order; good rows are kept where others are refused, and repeated windows change nothing.

    Acknowledged windows are on the disk. `answer` asks for reservations after the write, of the tasks written or of the
    whole cell; in JSON for the first page of them.
    """
    settings = runtime.settings
    parameters = _parameters(request, UsageParameters)
    wanted, query = parameters.answer, _query_of(parameters)
    runtime.writer.check()
    if wanted != "none":  # errors in the query are reported before anything is stored
        margins_of(query, runtime.tracker.look(_NO_KEY).scorer, settings.margin)

    def read() -> rows.UsageRows:
        with runtime.writer.timed("decode"):
            if _is_arrow(request):
                return rows.usage_from_arrow(body, settings.max_bulk_rows)
            return rows.usage_from_json(body, runtime.units, settings.max_bulk_rows)

    sent, done = await _written(runtime, body, read)
    if wanted == "none":
        return _json(done)

    key = None if wanted == "cell" else await _by_size(body, lambda: _tasks_in(sent))
    return await _reservations_response(runtime, request, query, key, done)


async def _tasks(runtime: Runtime, request: Request, body: bytes) -> Response:
    """Take facts about tasks, such as limits, machines and ends, and collections that want no estimation."""
    runtime.writer.check()
    _parameters(request, Parameters)

    def read() -> rows.FactRows:
        if _is_arrow(request):
            return rows.facts_from_arrow(body, runtime.settings.max_bulk_rows)
        return rows.facts_from_json(body, runtime.settings.max_bulk_rows)

    _, done = await _written(runtime, body, read)
    return _json(done)


async def _written(runtime: Runtime, body: bytes, read: Callable[[], _Rows]) -> tuple[_Rows, WriteAnswer]:
    """Return what a body says, and the outcome of its write."""
    if len(body) <= _INLINE_BYTES:
        runtime.small_calls.note()
    sent = await _by_size(body, read)
    return sent, await asyncio.wrap_future(runtime.writer.write(sent))


async def _by_size(body: bytes, function: Callable[[], _Made]) -> _Made:
    """Return the result of a function whose work grows with a body, called in a thread for a large one."""
    return function() if len(body) <= _INLINE_BYTES else await run_in_threadpool(function)


def _tasks_in(sent: rows.UsageRows) -> np.ndarray[Any, Any]:
    """Return collection and instance index of each task with a good window, sorted; shape (k, 2)."""
    return np.unique(np.column_stack([sent.windows.collection_id, sent.windows.instance_index]), axis=0)


async def _task(runtime: Runtime, request: Request, body: bytes) -> Response:  # noqa: ARG001 - a GET has none
    """Explain one task: its history, its forecast, and the steps to its reservation."""
    runtime.writer.check_readable()
    query = _query_of(_parameters(request, CertaintyParameters))
    path = _read(TaskPath, request.path_params)
    key = np.array([[path.collection_id, path.instance_index]])
    runtime.small_calls.note()
    known = runtime.tracker.look(key, with_x=True)
    if not known.there[0]:
        raise RequestError(NOT_FOUND, "unknown_task", f"task {key[0, 0]}/{key[0, 1]} is unknown, or it left")
    margins = margins_of(query, known.scorer, runtime.settings.margin)
    return _json(explain(answers(known, margins, runtime.settings), runtime.units))


async def _cell(runtime: Runtime, request: Request, body: bytes) -> Response:  # noqa: ARG001 - a GET has none
    """Answer for all tasks, or those on machines or of collections; JSON in pages, Arrow in one stream."""
    runtime.writer.check_readable()
    query = _query_of(_parameters(request, CellParameters))
    return await _reservations_response(runtime, request, query, None, None)


async def _query(runtime: Runtime, request: Request, body: bytes) -> Response:
    """Answer for a list of tasks, for machines, collections or all, with margins and budgets by tier."""
    runtime.writer.check_readable()
    _parameters(request, Parameters)  # none: the body has its own margin
    _check_json(request)
    query = await _by_size(body, lambda: parse_body(body, CellQuery))
    if query.tasks is not None and len(body) <= _INLINE_BYTES:
        runtime.small_calls.note()
    return await _reservations_response(runtime, request, query, None, None)


async def _machines(runtime: Runtime, request: Request, body: bytes) -> Response:  # noqa: ARG001 - a GET has none
    """Answer for all machines that have tasks: their limits, their peaks and what can be reclaimed.

    JSON in pages, in order of the machines' ids, Arrow in one stream.
    """
    runtime.writer.check_readable()
    asked, whole = _parameters(request, MachinesParameters), _gives_arrow(request)
    tracker, settings = runtime.tracker, runtime.settings

    def respond(left: threading.Event | None = None) -> Response:
        if whole:
            with runtime.metrics.answering("answer"):
                found = sums_of(tracker, settings, horizon_s=asked.horizon_s, left=left)
                table = machines_as_table(found, runtime.units)
            return _table(runtime, table)
        machines, without = tracker.machines()
        page, following = machines_from(machines, asked.after, asked.page_size)
        named = None if len(page) == len(machines) else page  # a query for all is faster without names
        found = sums_of(tracker, settings, named, horizon_s=asked.horizon_s, left=left)
        body = machines_as_json(found, runtime.units, without_machine=without, following=following)
        return Response(body, media_type=_JSON)

    return await _of_all(runtime, respond)


async def _machine_metrics(runtime: Runtime, request: Request, body: bytes) -> Response:  # noqa: ARG001 - a GET has none
    """Give the limit of each machine, and what can be reclaimed of it, as metrics for Prometheus.

    They are at the service's default margin.
    """
    runtime.writer.check_readable()
    asked = _parameters(request, HorizonParameters)

    def respond(left: threading.Event | None = None) -> Response:
        with runtime.metrics.answering("answer"):
            found = sums_of(runtime.tracker, runtime.settings, horizon_s=asked.horizon_s, left=left)
            text = as_metrics(found, runtime.settings.margin)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    return await _of_all(runtime, respond)


async def _machine(runtime: Runtime, request: Request, body: bytes) -> Response:  # noqa: ARG001 - a GET has none
    """Explain one machine: what its tasks count, their peaks by horizon and margin, and the steps to one of them."""
    runtime.writer.check_readable()
    _parameters(request, Parameters)
    machine = _read(MachinePath, request.path_params).machine_id

    def respond(left: threading.Event | None = None) -> Response:
        found = sums_by_horizon(runtime.tracker, runtime.settings, [machine], left)
        if len(found[0]) == 0:
            raise RequestError(NOT_FOUND, "unknown_machine", f"machine {machine} is unknown, or it has no tasks")
        return _json(explain_machine(found, runtime.units, runtime.settings.margin))

    tracker = runtime.tracker
    if len(tracker) <= SMALL_TASKS or await run_in_threadpool(lambda: len(tracker.names([machine]))) <= SMALL_TASKS:
        return await run_in_threadpool(respond)
    return _large_of(runtime).answer(respond)


async def _fit(runtime: Runtime, request: Request, body: bytes) -> Response:
    """Find machines with room for tasks, known or new, and what each would cost them.

    A machine has room where the peak of its tasks and the candidate together is within its capacity, for CPU and
    memory.
    """
    runtime.writer.check_readable()
    _parameters(request, Parameters)
    _check_json(request)

    def respond(left: threading.Event | None = None) -> Response:
        asked = parse_body(body, FitRequest)
        with runtime.metrics.answering("answer"):
            answered = fit(runtime.tracker, asked, runtime.settings, runtime.units, THREADS, left)
        if left is not None and left.is_set():
            raise ClientLeftError
        return _json(answered)

    if len(runtime.tracker) <= SMALL_TASKS and len(body) <= _INLINE_BYTES:
        return await run_in_threadpool(respond)
    return _large_of(runtime).answer(respond)


async def _of_all(runtime: Runtime, respond: Callable[..., Response]) -> Response:
    """Return an answer about all tasks, which is large where there are many."""
    if len(runtime.tracker) <= SMALL_TASKS:
        return await run_in_threadpool(respond)
    return _large_of(runtime).answer(respond)


async def _state(runtime: Runtime, request: Request, body: bytes) -> Response:  # noqa: ARG001 - a GET has none
    """Report on the memory: tasks, clock, sizes, and problems found when it was read."""
    _parameters(request, Parameters)
    return _json(runtime.state_info())


async def _model(runtime: Runtime, request: Request, body: bytes) -> Response:  # noqa: ARG001 - a GET has none
    """Describe the served model, and the limits of a request."""
    _parameters(request, Parameters)
    return _json(model_info(runtime.keeper.served, runtime.settings))


async def _reservations_response(
    runtime: Runtime, request: Request, query: CellQuery, key: np.ndarray[Any, Any] | None, write: WriteAnswer | None
) -> Response:
    """Return reservations for the tasks of the query, or of ``key``, with the outcome of the write before it."""
    tracker, whole = runtime.tracker, _gives_arrow(request)
    some = query.tasks is None and key is None and (query.machines is not None or query.collections is not None)
    n = len(tracker) if key is None else len(key)
    if key is None and query.tasks is not None:
        n = len(query.tasks)

    def respond(left: threading.Event | None = None) -> Response:
        page = page_of(query, tracker, key, whole=whole)
        return _made(runtime, query, page, write, left, whole=whole)

    if whole and some:  # Arrow for a part of the cell is made at once
        return await run_in_threadpool(respond)
    if (n if whole else min(n, query.page_size)) > SMALL_TASKS and some:
        page = await run_in_threadpool(lambda: page_of(query, tracker, key, whole=whole))
        assert page.key is not None
        n = len(page.key)
    if (n if whole else min(n, query.page_size)) <= SMALL_TASKS:
        return await run_in_threadpool(respond)
    return _large_of(runtime).answer(respond, wait=write is not None)


def _made(
    runtime: Runtime, query: CellQuery, page: Page, write: WriteAnswer | None, left: threading.Event | None, *,
    whole: bool,
) -> Response:  # fmt: skip
    """Return the response for a page; ``left`` is set once the client has left."""
    tracker, settings = runtime.tracker, runtime.settings
    if left is not None and left.is_set():
        raise ClientLeftError
    if whole:
        runtime.asked_for(margins_of(query, tracker.look(_NO_KEY).scorer, settings.margin))
        with runtime.metrics.answering("answer"):
            table = table_of(tracker, query, page, settings, runtime.units)
        if write is not None:
            about = {**(table.schema.metadata or {}), _WRITE: write.model_dump_json().encode()}
            table = table.replace_schema_metadata(about)
        return _table(runtime, table)
    assert page.key is not None
    known = tracker.look(page.key)
    margin_of_tier = margins_of(query, known.scorer, settings.margin)
    runtime.asked_for(margin_of_tier)
    found = answers(known, margin_of_tier, settings, page.limit)
    tasks = []
    for row in range(len(page.key)):
        if left is not None and left.is_set():
            raise ClientLeftError
        tasks.append(one_task(found, row, query.quantiles is not False).model_dump_json())
    pages = as_json(found, runtime.units, following=page.following)
    envelope = pages if write is None else write.model_copy(update={"reservations": pages})
    head, _, tail = envelope.model_dump_json().partition(_NO_TASKS)
    return Response("".join((head, _NO_TASKS[:-1], ",".join(tasks), _NO_TASKS[-1], tail)), media_type=_JSON)


def _large_of(runtime: Runtime) -> LargeAnswers:
    if runtime.large_answers is None:
        runtime.large_answers = LargeAnswers(runtime.settings.max_large_answers)
    answers_of: LargeAnswers = runtime.large_answers
    return answers_of


def _json(model: BaseModel) -> Response:
    return Response(model.model_dump_json(), media_type=_JSON)


def _table(runtime: Runtime, table: Any) -> Response:
    with runtime.metrics.answering("encode"):
        return Response(memoryview(arrow.write_table(table)), media_type=arrow.MEDIA_TYPE)


def _is_arrow(request: Request) -> bool:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower() == arrow.MEDIA_TYPE


def _check_json(request: Request) -> None:
    """Refuse a body of the type of Arrow streams where JSON is read: the guard allows such a body to be far larger."""
    if _is_arrow(request):
        message = "the body is JSON: send `Content-Type: application/json`; `Accept` names the type of the answer"
        raise RequestError(UNKNOWN_TYPE, "content_type", message)


def _gives_arrow(request: Request) -> bool:
    """Return whether the answer is Arrow: where ``Accept`` names it, or the request is Arrow and names no other."""
    accept = request.headers.get("accept", "*/*").lower()
    if arrow.MEDIA_TYPE in accept:
        return True
    return _is_arrow(request) and _JSON not in accept


def _parameters(request: Request, kind: type[_Parameters]) -> _Parameters:
    """Return the parameters of a URL after its question mark; RequestError where one is unknown or out of range."""
    given = request.query_params
    for name in given:
        if name not in _LISTS and len(given.getlist(name)) > 1:
            raise RequestError(INVALID, "invalid_field", f"{name}: given more than once", field=name)
    return _read(kind, {name: given.getlist(name) if name in _LISTS else given[name] for name in given})


def _read(kind: type[_Parameters], content: dict[str, Any]) -> _Parameters:
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        raise error_from_validation(error) from error


def _query_of(parameters: Parameters) -> CellQuery:
    """Return the query that the parameters of a URL make."""
    return CellQuery.model_validate(parameters.model_dump(by_alias=True, exclude_unset=True, exclude={"answer"}))
