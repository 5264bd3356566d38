"""Fixtures of answers for machines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from reclaim.training.bundle import Bundle
from tests.serving.answers.machines_by_hand import ALONE, foresee, write_five
from tests.serving.cell_fixtures import Memory, windows_of


@pytest.fixture
def three(bundle: Bundle) -> Memory:
    """Return a cell of tasks 1 and 2 on machine 7 and task 3 on machine 9: constant 0.2, 0.3 and 0.4 of limits of 1."""
    memory = Memory(ALONE, bundle)
    memory.write(windows_of(*({"task": task, "machine_id": m} for task, m in ((1, 7), (2, 7), (3, 9)))))
    foresee(memory, {1: 0.2, 2: 0.3, 3: 0.4}, new=(2,))
    return memory


@pytest.fixture(scope="module")
def url(make_app: Any, at_url: Any) -> Iterator[str]:
    """Give a service with five machines of a task each, and a task without a machine."""
    with make_app() as (app, _), at_url(app) as url:
        write_five(url)
        yield url
