"""The folder of a real bundle, and synthetic histories as a dataset and as a request hold them."""

from __future__ import annotations

import logging
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from reclaim.data import schema as s
from reclaim.data.dataset import Dataset, Owners, bucket_name
from reclaim.data.windows import Cell, Windows, identities
from reclaim.training.bundle import Bundle, save_bundle
from tests.serving.free_ports import reserved_port

WINDOW_US = 300_000_000


@pytest.fixture
def free_port() -> Iterator[int]:
    """Give a free port, reserved while the test runs, so that no other process gets it by chance."""
    with reserved_port() as port:
        yield port


@pytest.fixture
def loggers_as_before() -> Iterator[None]:
    """Undo what a start does to the handlers of loggers."""
    loggers = [logging.getLogger(name) for name in (None, "reclaim", "bentoml", "uvicorn", "uvicorn.error", "circus")]
    before = [(logger, logger.handlers[:], logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, handlers, level, propagate in before:
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(level)


@pytest.fixture(scope="session")
def bundle_folder(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "bundle"
    save_bundle(bundle, folder)
    return folder


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """Give ``reclaim.serving.service``, imported past the warnings of others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BENTOML_HOME", str(tmp_path_factory.mktemp("bentoml")))
        patch.setenv("BENTOML_DO_NOT_TRACK", "True")
        with warnings.catch_warnings():
            # BentoML 1.4.39 asks pathspec and pydantic for things by their old names while it is imported
            warnings.simplefilter("ignore", DeprecationWarning)
            import bentoml

            assert bentoml.service  # imports the rest, which is lazy
        from reclaim.serving import service

    return service


@pytest.fixture(scope="session", autouse=True)
def clock_of_a_trace() -> Iterator[None]:
    """Have services run by the clock of the windows: their times are small numbers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RECLAIM_CLOCK", "trace")
        yield


@pytest.fixture(scope="session")
def client(service: ModuleType, bundle_folder: Path) -> Iterator[Any]:
    """Give the whole BentoML application in this process, its start-up done; its settings are gone by then."""
    from reclaim.serving.models.keeper import ModelKeeper

    with ExitStack() as running:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RECLAIM_BUNDLE", str(bundle_folder))
            patch.setenv("RECLAIM_MODEL", "reclaim@champion")
            patch.setenv("RECLAIM_MODEL_VERSION", "3")
            # a champion of the folder that tests run in, as the demo leaves one there, is not its own
            patch.setattr(ModelKeeper, "watch", lambda _: None)
            with warnings.catch_warnings():
                # starlette 1.10 prefers a successor of httpx that BentoML does not use
                warnings.filterwarnings("ignore", "Using `httpx` with `starlette.testclient` is deprecated")
                from starlette.testclient import TestClient
            app = TestClient(service.ReservationService.to_asgi(), "http://127.0.0.1", raise_server_exceptions=False)
            client = running.enter_context(app)
        yield client


@pytest.fixture(scope="session")
def make_app(bundle_folder: Path) -> Any:
    """Give ``make_app(**settings)``: the routes, their page and the guard without BentoML, and what they rest on."""
    from starlette.applications import Starlette
    from starlette.routing import Mount

    from reclaim.serving.http.guard import Guard
    from reclaim.serving.http.openapi import page_app
    from reclaim.serving.http.routes import PREFIX, routes
    from reclaim.serving.runtime import Runtime
    from reclaim.serving.settings import ServingSettings

    @contextmanager
    def make(**settings: Any) -> Iterator[tuple[Guard, Runtime]]:
        runtime = Runtime(ServingSettings(model=str(bundle_folder), bundle=bundle_folder, **settings))
        api = routes(lambda: runtime)
        app = Starlette(routes=[Mount(PREFIX, api), Mount("/", page_app(api, PREFIX, runtime.metrics.text))])
        try:
            while runtime.writer.state == "recovering":
                time.sleep(0.01)
            yield Guard(app, runtime=lambda: runtime), runtime
        finally:
            runtime.close()

    return make


@pytest.fixture(scope="session")
def at_url() -> Any:
    """Give ``at_url(app)``: serves an application on loopback, in a thread, and gives its URL."""
    import uvicorn

    @contextmanager
    def serve(app: Any) -> Iterator[str]:
        server = uvicorn.Server(uvicorn.Config(app, port=0, lifespan="off", log_config=None, ws="none"))
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        try:
            while not server.started:
                time.sleep(0.01)
            yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()

    return serve


@dataclass(frozen=True)
class History:
    """The same history three times: as a request, as a dataset's table, and as the arrays made of that table."""

    tasks: list[dict[str, Any]]
    table: pa.Table
    windows: Windows
    facts: dict[str, Any]
    cell: Cell

    def at(self, time_us: int) -> list[dict[str, Any]]:
        """Return the tasks of the request as they were known at a time, those not yet begun without windows."""
        tasks = []
        for task in self.tasks:
            known = [window for window in task["windows"] if window["end_us"] <= time_us]
            tasks.append({**task, "windows": known, **({"limit": known[-1]["limit"]} if known else {})})
        return tasks


OWNERS = (("a", "web"), ("a", "web"), ("a", "web"), ("a", "batch"), ("b", "web"), (None, None))
"""User and logical name of each task; the first two are of one collection."""


@pytest.fixture(scope="session")
def history(tmp_path_factory: pytest.TempPathFactory) -> History:
    """Return histories with gaps, missing measurements, restarts and limit changes; every number drawn."""
    random = np.random.default_rng(3)
    tasks, rows = [], []
    collections = np.sort(random.integers(2**60, 2**62, len(OWNERS)))
    collections[1] = collections[0]
    for t, (user, name) in enumerate(OWNERS):
        tier = int(random.integers(len(s.TIERS)))
        key = {"collection_id": int(collections[t]), "instance_index": t}
        task: dict[str, Any] = {**key, "tier": s.TIERS[tier], "in_alloc": bool(random.random() < 0.3), "windows": []}
        task |= {"user": user, "logical_name": name}
        task["scheduling_class"] = int(random.integers(4))
        limit = {"cpu": float(random.uniform(0.01, 4)), "memory": float(random.uniform(1e8, 8e9))}
        scheduled_us = end_us = int(random.integers(1, 2 * 10**10))  # most run side by side for a while
        for _ in range(40):
            start_us = end_us + (int(random.integers(1, 9 * 10**9)) if random.random() < 0.05 else 0)
            restarts = random.random() < 0.05
            scheduled_us = start_us if restarts else scheduled_us
            whole = not restarts and random.random() < 0.9
            end_us = start_us + (WINDOW_US if whole else int(random.integers(10**6, WINDOW_US)))
            if random.random() < 0.05:
                limit = {name: value * float(random.uniform(0.5, 2)) for name, value in limit.items()}
            window: dict[str, Any] = {
                "start_us": start_us, "end_us": end_us, "limit": limit, "scheduled_us": scheduled_us,
                **_measurements(random, limit),
            }  # fmt: skip
            task["windows"].append(window)
            rows.append(_row(key, tier, task, window))
        task |= {"limit": limit, "scheduled_us": scheduled_us}
        tasks.append(task)
    table = pa.Table.from_pylist(rows, schema=s.USAGE)
    users, names = zip(*OWNERS, strict=True)
    first = np.array([0, *range(2, len(OWNERS))])
    owners = Owners(collections[first], identities(users)[first], identities(names)[first])
    facts = {"largest_machine": {"cpu": 8.0, "memory": 16e9}, "monday_us": 345_600_000_000}
    cell = Cell((8.0, 16e9), 345_600_000_000)
    folder = tmp_path_factory.mktemp("history")
    (folder / "usage").mkdir()
    pq.write_table(table, folder / "usage" / bucket_name(0))
    windows = Dataset(folder, {}).windows(0, owned=False)
    windows.user[:], windows.name[:] = owners.of(windows.collection_id)
    return History(tasks, table, windows, facts, cell)


def _measurements(random: np.random.Generator, limit: dict[str, float]) -> dict[str, Any]:
    cpu = np.sort(random.gamma(2.0, 0.1, 20)) * limit["cpu"]
    memory = random.uniform(0.1, 0.9) * limit["memory"]
    out: dict[str, Any] = {
        "cpu_mean": float(cpu.mean()), "cpu_max": float(cpu[-1] * 1.5),
        "cpu_percentiles": [float(v) for v in (*cpu[:10], cpu[-1])],
        "cpu_tail_percentiles": [float(v) for v in cpu[10:19]],
        "memory_mean": memory * 0.9, "memory_max": memory, "page_cache": memory * 0.1,
        "cpi": float(random.uniform(0.5, 4)), "mai": float(random.uniform(0, 0.1)),
    }  # fmt: skip
    return {name: value for name, value in out.items() if random.random() < 0.93}


def _row(key: dict[str, int], tier: int, task: dict[str, Any], window: dict[str, Any]) -> dict[str, Any]:
    measured = {name: value for name, value in window.items() if name != "limit"}
    return key | measured | {
        s.CPU_LIMIT: window["limit"]["cpu"],
        s.MEMORY_LIMIT: window["limit"]["memory"],
        s.TIER: tier,
        s.SCHEDULING_CLASS: task["scheduling_class"],
        s.ALLOC_COLLECTION_ID: 1 if task["in_alloc"] else None,
    }  # fmt: skip
