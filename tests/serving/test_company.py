"""Large calls take less at once while single ones come, and all that there is when none has come for a while."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from reclaim.serving import arrow, bulk, routes
from reclaim.serving.company import Company
from tests.serving.test_bulk import body_of

LIMIT = {"cpu": 1.0, "memory": 1.0}
WINDOW = {"start_us": 0, "end_us": 300_000_000}


def test_nobody_is_expected_before_the_first_call_nor_long_after_the_last() -> None:
    now_s = [0.0]
    company = Company(lambda: now_s[0])

    def present(at_s: float) -> bool:
        now_s[0] = at_s
        return company.present

    assert not present(0.0)
    company.came()
    assert present(0.9)
    company.came()
    assert present(1.8)
    assert not present(2.0)


def test_a_large_call_leaves_a_core_to_single_ones_of_any_kind(
    make_app: Any, at_url: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, threads = 0.0, list[int]()

    def note(name: str) -> None:
        does = getattr(bulk, name)

        def noting(*given: Any) -> Any:
            threads.append(given[-1])
            return does(*given)

        monkeypatch.setattr(bulk, name, noting)

    for name in ("Engine", "features_of_histories", "in_pieces"):
        note(name)
    monkeypatch.setattr(routes, "THREADS", 7)
    with make_app() as (app, runtime), at_url(app) as url, httpx.Client(base_url=url, timeout=60) as client:
        runtime.company = Company(lambda: now_s)

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
