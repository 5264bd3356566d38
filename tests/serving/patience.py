"""Waiting for what another thread does, as long as a slow machine needs and no longer."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 120.0
"""Timeout of events that must happen (s)."""


def soon(met: Callable[[], bool]) -> None:
    """Wait until a condition is met."""
    until = time.monotonic() + PATIENCE_S
    while not met():
        assert time.monotonic() < until
        time.sleep(0.01)
