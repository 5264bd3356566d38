"""Bulk requests leave a core free while small requests arrive, and use all cores otherwise."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from reclaim.serving.answers import stateless_table
from reclaim.serving.http import routes
from reclaim.serving.wire import arrow
from reclaim.serving.writing import queue
from reclaim.serving.writing.queue import SmallCallMonitor
from tests.serving.answers.test_stateless_table import body_of

LIMIT = {"cpu": 1.0, "memory": 1.0}
WINDOW = {"start_us": 0, "end_us": 300_000_000}


def test_small_calls_are_recent_for_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monitor = SmallCallMonitor()

    def recent(at_s: float) -> bool:
        monkeypatch.setattr(queue, "monotonic", lambda: at_s)
        return monitor.recent

    assert not recent(0.0)
    monitor.note()
    assert recent(0.9)
    monitor.note()
    assert recent(1.8)
    assert not recent(2.0)


def test_a_bulk_request_leaves_a_core_to_small_ones_of_any_kind(
    make_app: Any, at_url: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, threads = 0.0, list[int]()

    def note(name: str) -> None:
        does = getattr(stateless_table, name)

        def noting(*given: Any, **options: Any) -> Any:
            threads.append(given[-1])
            return does(*given, **options)

        monkeypatch.setattr(stateless_table, name, noting)

    for name in ("Scorer", "features_of_histories", "in_pieces"):
        note(name)
    monkeypatch.setattr(routes, "THREADS", 7)
    with make_app() as (app, _), at_url(app) as url, httpx.Client(base_url=url, timeout=60) as client:
        monkeypatch.setattr(queue, "monotonic", lambda: now_s)

        def large() -> int:
            content, headers = body_of(1, 1), {"content-type": arrow.MEDIA_TYPE}
            assert client.post("/v1/reservations", content=content, headers=headers).status_code == 200
            (given,) = {threads.pop() for _ in range(3)}
            return given

        assert large() == 7
        for path, body in (
            ("/v1/usage", {"windows": [{"collection_id": 1, "limit": LIMIT, **WINDOW}]}),
            ("/v1/tasks", {"tasks": [{"collection_id": 1, "limit": LIMIT}]}),
            ("/v1/tasks/1/0", None),
            ("/v1/cell/reservations", {"tasks": [{"collection_id": 1}]}),
            ("/v1/reservations", {"tasks": [{"collection_id": 1, "limit": LIMIT, "windows": [WINDOW]}]}),
        ):
            answer = client.get(path) if body is None else client.post(path, json=body)
            assert answer.status_code == 200, answer.text
            assert large() == 6
            now_s += 10.0
            assert large() == 7
