"""Services with a writer, which end with their test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from reclaim.serving.models.scorer import Scorer
from reclaim.serving.writing import snapshotter
from reclaim.training.bundle import Bundle
from tests.serving.cell_fixtures import loaded
from tests.serving.writing.running import SETTINGS, Service


@pytest.fixture(scope="module")
def scorer(bundle: Bundle) -> Scorer:
    return Scorer(loaded(bundle), SETTINGS.cell)


@pytest.fixture
def start(scorer: Scorer, tmp_path: Path) -> Iterator[Callable[..., Service]]:
    """Give ``start(name, **settings)``: a service over a folder of that name, which ends with the test."""
    running: list[Service] = []

    def start(name: str | None = "cell", **changes: Any) -> Service:
        running.append(Service(None if name is None else tmp_path / name, scorer, **changes))
        return running[-1]

    yield start
    for service in running:
        service.close()


@pytest.fixture
def mends_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a store that refuses writes be tried again at once."""
    monkeypatch.setattr(snapshotter, "MEND_S", 0.05)


@pytest.fixture
def service(start: Callable[..., Service]) -> Service:
    return start()
