"""History and service that a feed lies between."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.data.traces.kubernetes.histories import write_history
from tests.serving.feed.feeding import HOUR_S, SERIES, Known, Moment, known, run


@pytest.fixture
def history(tmp_path: Path) -> Path:
    """Give a history of the first two hours."""
    return write_history(tmp_path / "history", SERIES, 1)


@pytest.fixture
def service(make_app: Any, at_url: Any) -> Iterator[str]:
    with make_app() as (app, _), at_url(app) as url:
        yield url


@pytest.fixture
def undisturbed(make_app: Any, at_url: Any, tmp_path: Path) -> Callable[[float], Known]:
    """Give what another service knows that is fed up to some hours, while nothing fails."""

    def feed(hours: float) -> Known:
        with make_app() as (app, _), at_url(app) as url:
            run(write_history(tmp_path / "undisturbed", SERIES, 1), url, Moment(2.2 * HOUR_S, hours * HOUR_S))
            return known(url)

    return feed
