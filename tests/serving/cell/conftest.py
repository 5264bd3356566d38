"""A cell with default settings."""

from __future__ import annotations

import pytest

from reclaim.serving.settings import ServingSettings
from reclaim.training.bundle import Bundle
from tests.serving.cell_fixtures import Memory


@pytest.fixture
def memory(bundle: Bundle) -> Memory:
    return Memory(ServingSettings(), bundle)
