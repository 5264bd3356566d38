"""Explanations agree with the reservations that they explain."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from reclaim.training.margins.margin import MARGIN_NAMES
from tests.serving.descriptors import windows


@pytest.mark.parametrize("why", ["model", "opt_out", "stale"])
def test_the_reservation_under_each_margin_is_the_one_that_is_answered(make_app: Any, at_url: Any, why: str) -> None:
    settings = {"clock": "unix", "stale_s": 1.0 if why == "stale" else 86_400.0}
    with make_app(**settings) as (app, _), at_url(app) as url, httpx.Client(base_url=url, timeout=120) as client:
        told = [window | {"memory_max": 0.1} for slot in range(10) for window in windows(slot, 1)]
        assert client.post("/v1/usage", json={"windows": told}).json()["taken"] == 10
        if why == "opt_out":
            client.post("/v1/tasks", json={"collections": [{"collection_id": 1, "estimation": False}]})
        explained = client.get("/v1/tasks/1/0").json()
        assert explained["task"]["rule"]["cpu"] == why
        for margin in MARGIN_NAMES:
            answered = client.get(f"/v1/tasks/1/0?margin={margin}").json()["task"]["reservation"]
            assert explained["by_margin"][margin] == answered
