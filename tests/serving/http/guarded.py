"""Guards a small application in this process, and asks it: the helpers of tests of the guard and its tokens."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import MutableMapping
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.concurrency import run_in_threadpool
from starlette.responses import StreamingResponse

from reclaim.serving.http.guard import App, Guard
from reclaim.serving.settings import ServingSettings
from reclaim.serving.wire.readiness import Readiness
from reclaim.serving.wire.schemas import ErrorResponse
from tests.serving.patience import PATIENCE_S
from tests.serving.virtual_time import run_timeless

Json = dict[str, Any]
Message = MutableMapping[str, Any]
TOKEN = b"0123456789abcdef"
LIMIT = 2_048
"""Time limit for what must happen; a test waits this long only where it fails."""


class FakeService:
    """The part of the service that the guard uses."""

    def __init__(self, **settings: Any) -> None:
        self.settings = ServingSettings.model_validate(
            {"max_body_bytes": LIMIT, "max_bulk_bytes": 2 * LIMIT, "token_file": None, **settings}
        )
        self.ready = Readiness(True, {"ready": True})
        self.done: list[tuple[str, str, int, float]] = []
        self.requests_under_way = 0
        self.open = threading.Event()

    def readiness(self) -> Readiness:
        """Return what the test says."""
        return self.ready

    def request_done(self, endpoint: str, method: str, status: int, seconds: float) -> None:
        """Keep it for the test to look at."""
        self.done.append((endpoint, method, status, seconds))


def make_api(fake: FakeService) -> FastAPI:
    api = FastAPI(openapi_url=None)

    @api.post("/v1/echo/{name}")
    async def echo(name: str, request: Request) -> Response:
        return Response(f"{name} {len(await request.body())}")

    @api.post("/v1/slow")
    async def slow(request: Request, seconds: float) -> str:
        await request.body()
        await asyncio.sleep(seconds)
        return "done"

    @api.post("/v1/thread")
    async def thread() -> str:
        await run_in_threadpool(fake.open.wait, PATIENCE_S)
        return "done"

    @api.get("/v1/stream")
    async def stream(parts: int, seconds: float) -> Response:
        async def content() -> Any:
            for _ in range(parts):
                yield b"part"
                await asyncio.sleep(seconds)

        return StreamingResponse(content())

    return api


class Answer:
    """One answer: status, headers, what the body holds, and how long after the request it began."""

    def __init__(self, messages: list[Message]) -> None:
        start = messages[0]
        self.status: int = start["status"]
        self.after_s: float = start["after_s"]
        self.headers = {name.decode(): value.decode() for name, value in start["headers"]}
        self.body = b"".join(message.get("body", b"") for message in messages[1:])

    @property
    def code(self) -> str:
        """The code of an error."""
        return ErrorResponse.model_validate_json(self.body).error.code


def ask(
    guard: App, method: str, path: str, *, headers: dict[str, str] | None = None, parts: tuple[bytes, ...] = (),
    gone: bool = False, pause_s: float = 0.0, query: str = "",
) -> list[Message]:  # fmt: skip
    """Return what the guard sent, and after how long; the body comes in parts, and the client leaves if it is gone."""

    async def run() -> list[Message]:
        sent: list[Message] = []
        left = list(parts or [b""])

        async def receive() -> Message:
            await asyncio.sleep(pause_s)
            if left:
                part = left.pop(0)
                return {"type": "http.request", "body": part, "more_body": bool(left) or gone}
            if not gone:
                await asyncio.Event().wait()  # a client that has said all stays, and says nothing
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            sent.append({**message, "after_s": asyncio.get_running_loop().time()})

        given = {"transfer-encoding": "chunked"} if parts and "content-length" not in (headers or {}) else {}
        named = {**given, **(headers or {})}
        scope = {
            "type": "http", "http_version": "1.1", "method": method, "path": path, "raw_path": path.encode(),
            "query_string": query.encode(), "root_path": "", "scheme": "http", "server": ("127.0.0.1", 1),
            "headers": [(name.lower().encode(), value.encode("latin-1")) for name, value in named.items()],
        }  # fmt: skip
        await guard(scope, receive, send)
        return sent

    return run_timeless(run())


def answer(guard: App, method: str, path: str, **options: Any) -> Answer:
    return Answer(ask(guard, method, path, **options))


def guarded(**settings: Any) -> tuple[Guard, FakeService]:
    fake = FakeService(**settings)
    return Guard(make_api(fake), lambda: fake), fake
