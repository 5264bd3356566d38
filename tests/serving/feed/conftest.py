"""History and service that a feed lies between."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.data.traces.kubernetes.histories import write_history
from tests.serving.feed.feeding import SERIES


@pytest.fixture
def history(tmp_path: Path) -> Path:
    """Give a history of the first two hours."""
    return write_history(tmp_path / "history", SERIES, 1)


@pytest.fixture
def service(make_app: Any, at_url: Any) -> Iterator[str]:
    with make_app() as (app, _), at_url(app) as url:
        yield url
