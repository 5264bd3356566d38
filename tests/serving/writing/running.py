"""A writer over a folder with its parts, and the same after a power cut."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest

from reclaim.data.windows import Windows
from reclaim.serving.cell.clock import CellClock
from reclaim.serving.cell.tracker import FORMAT, Tracker
from reclaim.serving.models.scorer import Scorer
from reclaim.serving.monitoring.metrics import Metrics
from reclaim.serving.monitoring.watch import Watch
from reclaim.serving.settings import ServingSettings
from reclaim.serving.storage.store import Store
from reclaim.serving.wire.cell_schemas import WriteAnswer
from reclaim.serving.wire.errors import RequestError
from reclaim.serving.writing import log_records, writer
from reclaim.serving.writing.snapshotter import Snapshotter
from reclaim.serving.writing.writer import Writer
from tests.serving.cell_fixtures import Json, fact_rows, usage_rows, windows_of
from tests.serving.patience import PATIENCE_S

SETTINGS = ServingSettings(stale_s=1e9, clock="trace")


class Service:
    """A writer over a folder and its parts; ``told`` and ``facts`` wait for the answer."""

    now_us = -1
    """This machine's time."""

    def __init__(self, folder: Path | None, scorer: Scorer, **changes: Any) -> None:
        self.settings = SETTINGS.model_copy(update=changes)
        self.closed = False
        self.tracker = Tracker(self.settings, CellClock(self.settings, lambda: self.now_us, passed_s=lambda: 0.0))
        self.store = None if folder is None else Store.open(folder, state_version=FORMAT)
        self.writer = Writer(self.tracker, self.store, Metrics(), Watch(900.0), self.settings)
        self.writer.start(scorer)
        while self.writer.state == "recovering":
            time.sleep(0.001)

    def told(self, *windows: Json) -> WriteAnswer:
        """Write, and wait."""
        return self.write(windows_of(*windows)).result(PATIENCE_S)

    def write(self, windows: Windows) -> Future[WriteAnswer]:
        """Write, and do not wait."""
        return self.writer.write(usage_rows(windows))

    def facts(self, *tasks: Json, **more: Any) -> WriteAnswer:
        """Tell facts, and wait."""
        return self.writer.write(fact_rows(*tasks, **more)).result(PATIENCE_S)

    @contextmanager
    def held_up(self) -> Iterator[None]:
        """Block the thread, so that writes queue up meanwhile."""
        begun, go_on = threading.Event(), threading.Event()

        def wait() -> None:
            begun.set()
            go_on.wait(PATIENCE_S)

        waiting = self.writer._queue.command(wait)
        begun.wait(PATIENCE_S)
        try:
            yield
        finally:
            go_on.set()
            waiting.result(PATIENCE_S)

    @property
    def snapshotter(self) -> Snapshotter:
        """The writer's snapshotter."""
        assert self.writer.snapshotter is not None
        return self.writer.snapshotter

    def save(self) -> None:
        """Make one snapshot."""
        before, thread = self.snapshotter.saved_at, self.writer._queue
        self.snapshotter.settings = self.settings.model_copy(update={"snapshot_mib": -1})
        assert self.store is not None
        if self.store.log_bytes > self.store.snapshot_bytes:  # or there is none
            while self.snapshotter.saved_at == before:
                thread.command(lambda: None).result(PATIENCE_S)
                time.sleep(0.001)
        self.idle()

    def idle(self) -> None:
        """Wait until no snapshot is being made or will be."""
        self.snapshotter.settings = self.settings.model_copy(update={"snapshot_mib": 2**40})
        for _ in range(2):  # the store is looked after behind the first
            self.writer._queue.command(lambda: None).result(PATIENCE_S)
        if self.snapshotter.busy is not None:
            wait_for([self.snapshotter.busy], PATIENCE_S)

    def close(self) -> None:
        """Finish, once."""
        if not self.closed:
            self.closed = True
            self.writer.close()


def in_parts_of(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let large writes be taken so, whatever else is written."""
    monkeypatch.setattr(writer, "_CHUNK_ROWS", rows)
    monkeypatch.setattr(writer, "_SMALL_CHUNK_ROWS", rows)


def crashed(service: Service, start: Callable[..., Service], torn: bytes = b"", **changes: Any) -> Service:
    """Return a service over the folder as after a power cut: of the log only what was synced, and part of a record."""
    assert service.store is not None
    service.idle()
    copy = service.store.folder.with_name(f"copy-{time.monotonic_ns()}")
    shutil.copytree(service.store.folder, copy)
    segment = service.store._segment
    os.truncate(copy / segment.path.name, segment._synced)
    with (copy / segment.path.name).open("ab") as log:
        log.write(torn)
    return start(copy.name, **changes)


def appended(service: Service, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Return a list that grows with every record appended: its kind, and how many windows or facts it has."""
    assert service.store is not None
    told: list[tuple[str, int]] = []
    append = service.store.append

    def spy(kind: str, payload: Any) -> int:
        n = 0
        if kind == log_records.WINDOWS:
            n = len(log_records.read_windows(memoryview(payload)))
        elif kind == log_records.FACTS:
            n = log_records.read_facts(memoryview(payload)).rows
        told.append((kind, n))
        return append(kind, payload)

    monkeypatch.setattr(service.store, "append", spy)
    return told


def refused_with(status: int, code: str, what: Callable[[], object]) -> RequestError:
    with pytest.raises(RequestError) as caught:
        what()
    assert (caught.value.status, caught.value.body.error.code) == (status, code)
    assert caught.value.retry_after_s is not None
    return caught.value


def refuse(number: int) -> Callable[..., NoReturn]:
    def call(*_: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    return call
