"""A process that can open nothing more, and the service's calls in one: run with the folder of a bundle."""

from __future__ import annotations

import asyncio
import os
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

W = 300_000_000
"""A window in µs."""
FIRST = int(time.time()) // 300 - 70
"""The slot that slots are counted from: the last ones are current."""


@contextmanager
def no_descriptors() -> Iterator[None]:
    """Let this process open no file inside the block: every number below the limit is taken."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(2)  # the least free number
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def windows(slot: int, *tasks: int) -> list[dict[str, Any]]:
    """Return the windows of tasks in a slot of the clock."""
    return [
        {"collection_id": t, "limit": {"cpu": 1, "memory": 1}, "tier": "prod", "user": "u", "logical_name": f"n{t % 3}",
         "start_us": (FIRST + slot) * W, "end_us": (FIRST + slot + 1) * W, "cpu_mean": 0.1, "cpu_max": 0.2,
         "memory_max": 0.999}
        for t in tasks
    ]  # fmt: skip


async def _call_everything(app: Any) -> list[str]:
    """Make calls of every kind; return those that failed."""
    import httpx
    from starlette.concurrency import run_in_threadpool

    from tests.serving.cell_fixtures import usage_arrow, windows_of

    failed: list[str] = []
    arrow = {"content-type": "application/vnd.apache.arrow.stream"}
    table = usage_arrow(windows_of(*({"task": t, "at": FIRST + 60} for t in range(700))))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://127.0.0.1") as client:

        async def call(method: str, path: str, **what: Any) -> None:
            answer = await client.request(method, path, timeout=300, **what)
            if answer.status_code != 200 or '"refused":{"' in answer.text[:300]:
                failed.append(f"{method} {path}: {answer.status_code} {answer.text[:200]}")

        await run_in_threadpool(lambda: None)  # as the guard does at the start
        with no_descriptors():
            for slot in (0, 1, 3, 2, 3, 20, 60):
                for tasks in ((1,), (1, 2, 3), range(600)):
                    await call("POST", "/v1/usage?answer=tasks", json={"windows": windows(slot, *tasks)})
            await call("POST", "/v1/usage?answer=cell", content=table, headers=arrow)
            await call("POST", "/v1/reservations?quantiles=true", content=table, headers=arrow)
            past = [{"start_us": k * W, "end_us": (k + 1) * W, "cpu_mean": 0.1} for k in range(30)]
            history = {"collection_id": 1, "limit": {"cpu": 1, "memory": 1}, "windows": past}
            await call("POST", "/v1/reservations", json={"tasks": [history]})
            ended_us = (FIRST + 61) * W
            facts = [{"collection_id": 1, "ended_us": ended_us, "failed": True},
                     {"collection_id": 2, "failed_us": ended_us},
                     {"collection_id": 3, "limit": {"cpu": 0.5, "memory": 1}}]  # fmt: skip
            off = [{"collection_id": 4, "estimation": False}]
            await call("POST", "/v1/tasks", json={"tasks": facts, "collections": off})
            await call("POST", "/v1/usage", json={"windows": windows(61, *range(2, 600))})
            for path in ("/v1/tasks/4/0", "/v1/tasks/5/0", "/v1/cell/reservations?page_size=10000", "/v1/cell",
                         "/v1/cell/reservations?collection_id=5", "/v1/model", "/metrics", "/readyz"):  # fmt: skip
                await call("GET", path)
            await call("GET", "/v1/cell/reservations?quantiles=true", headers={"accept": arrow["content-type"]})
            await call("POST", "/v1/cell/reservations", json={"tasks": [{"collection_id": 5}]})
    return failed


def main(bundle: Path) -> int:
    """Start the service's parts, take all descriptors away, and print every call that failed then."""
    from starlette.applications import Starlette
    from starlette.routing import Mount

    from reclaim.serving.http.guard import Guard
    from reclaim.serving.http.openapi import page_app
    from reclaim.serving.http.routes import PREFIX, routes
    from reclaim.serving.runtime import Runtime
    from reclaim.serving.settings import ServingSettings

    with tempfile.TemporaryDirectory() as folder:
        runtime = Runtime(ServingSettings(model=str(bundle), bundle=bundle, state=Path(folder), clock="unix"))
        api = routes(lambda: runtime)
        app = Starlette(routes=[Mount(PREFIX, api), Mount("/", page_app(api, PREFIX, runtime.metrics.text))])
        failed = asyncio.run(_call_everything(Guard(app, runtime=lambda: runtime)))
        runtime.close()
    sys.stdout.write("\n".join(failed))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
