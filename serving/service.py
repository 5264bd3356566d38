"""The service: BentoML around two routes, a thin skin over ``answer``; every refusal leaves in one shape."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from typing import Any, Final

import bentoml
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.routing import APIRoute
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from reclaim.serving.answer import answer, model_info
from reclaim.serving.errors import (
    BAD_REQUEST,
    INTERNAL,
    INVALID,
    METHOD_NOT_ALLOWED,
    NOT_FOUND,
    TOO_LARGE,
    RequestError,
    parse_request,
)
from reclaim.serving.loader import load_model
from reclaim.serving.schemas import ErrorResponse, ModelInfo, ReservationRequest, ReservationResponse
from reclaim.serving.settings import read_settings

_LOG = logging.getLogger(__name__)

PREFIX: Final = "/v1"
_METHODS: Final = {f"{PREFIX}/reservations": "POST", f"{PREFIX}/model": "GET"}
_INLINE_BYTES: Final = 64 * 2**10
"""Bodies up to this size are answered on the event loop, in a few milliseconds; larger ones in a thread, so that
health checks and small requests are not kept waiting for them."""

_WARM_UP: Final = b"""{"tasks": [{"collection_id": 0, "limit": {"cpu": 1, "memory": 1}, "windows": [
    {"start_us": 0, "end_us": 300000000, "cpu_mean": 0.1, "memory_max": 0.1},
    {"start_us": 300000000, "end_us": 600000000, "cpu_mean": 0.2, "memory_max": 0.2}]}]}"""
"""A request like any other: answering it compiles, or reads from the cache, every kernel that the next one needs."""


class _ReservationRoute(APIRoute):
    """Reads so many bytes and no more, and validates them in one pass; FastAPI's own way parses them twice."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return what takes the request: the endpoint gets what its signature documents."""

        def respond(body: bytes) -> Response:
            response: ReservationResponse = self.endpoint(parse_request(body))
            return Response(response.model_dump_json(), media_type="application/json")

        async def handle(request: Request) -> Response:
            body = await _read_body(request, _service().settings.max_body_bytes)
            return respond(body) if len(body) <= _INLINE_BYTES else await run_in_threadpool(respond, body)

        return handle


async def _read_body(request: Request, most: int) -> bytes:
    parts, size = [], 0
    announced = request.headers.get("content-length", "")
    too_large = announced.isdecimal() and int(announced[:20]) > most
    async for part in request.stream():
        size += len(part)
        too_large = too_large or size > most
        if too_large:
            break
        parts.append(part)
    if too_large:
        raise RequestError(
            TOO_LARGE, "body_too_large", f"the body may have at most {most} bytes; send the tasks in parts"
        )  # fmt: skip
    return b"".join(parts)


def _documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    meanings = {
        BAD_REQUEST: "The body is not JSON.",
        TOO_LARGE: "The body is too large, or holds too many tasks.",
        INVALID: "A field is missing, unknown or out of range.",
        INTERNAL: "A fault of the service, which its log describes.",
    }
    return {status: {"model": ErrorResponse, "description": meanings[status]} for status in statuses}


api = FastAPI(title="reclaim", openapi_url=None, docs_url=None, redoc_url=None)  # BentoML's page describes the routes
_reservation_routes = APIRouter(route_class=_ReservationRoute)


def _service() -> ReservationService:
    service: ReservationService = bentoml.get_current_service()
    return service


@_reservation_routes.post(
    "/reservations",
    response_model=ReservationResponse,
    responses=_documented(BAD_REQUEST, TOO_LARGE, INVALID, INTERNAL),
)
def reservations(request: ReservationRequest) -> ReservationResponse:
    """Answer for each task with its reservation, its forecast and what both rest on."""
    service = _service()
    return answer(service.model, request, service.settings)


@api.get("/model", response_model=ModelInfo, responses=_documented(INTERNAL))
async def model() -> ModelInfo:
    """Describe the loaded model: what an answer rests on, and the limits of a request."""
    service = _service()
    return model_info(service.model, service.settings)


api.include_router(_reservation_routes)


@api.api_route("/{path:path}", methods=["GET", "POST", "PUT", "PATCH", "DELETE"], include_in_schema=False)
async def nothing_here(request: Request) -> Response:
    """Refuse, in the one shape of every error, a path that is none or a method that a path does not take."""
    if request.url.path in _METHODS:
        raise HTTPException(METHOD_NOT_ALLOWED, f"use {_METHODS[request.url.path]}")
    raise RequestError(NOT_FOUND, "not_found", f"no such path; {' and '.join(_METHODS)} are those there are")


@api.exception_handler(RequestError)
async def _refuse(request: Request, error: RequestError) -> Response:  # noqa: ARG001 - the handler's signature
    return Response(error.body.model_dump_json(), error.status, media_type="application/json")


@api.exception_handler(HTTPException)
async def _refuse_http(request: Request, error: HTTPException) -> Response:
    code = "method_not_allowed" if error.status_code == METHOD_NOT_ALLOWED else "refused"
    message = f"{request.method} {request.url.path}: {error.detail}"
    return await _refuse(request, RequestError(error.status_code, code, message))


@api.exception_handler(Exception)
async def _confess(request: Request, error: Exception) -> Response:
    _LOG.error("%s %s failed", request.method, request.url.path, exc_info=error)
    message = "a fault of the service, not of the request; its log has the details"
    return await _refuse(request, RequestError(INTERNAL, "internal", message))


@bentoml.service(name="reclaim", workers=1, http={"host": "127.0.0.1"}, logging={"access": {"enabled": False}})
@bentoml.asgi_app(api, path=PREFIX)
class ReservationService:
    """Reservations, peak predictions and out-of-memory probabilities from recent usage."""

    def __init__(self) -> None:
        self.settings = read_settings()
        self.model = load_model(self.settings)
        answer(self.model, parse_request(_WARM_UP), self.settings)
