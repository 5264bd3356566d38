"""Whether single calls come at present, beside whom a large one takes less at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

_EXPECTED_S: Final = 1.0
"""For so long after a single call another is expected, in seconds."""


class Company:
    """Told of single calls, asked by large ones; from any thread.

    Parameters
    ----------
    passed_s : callable
        Seconds since any moment, which never goes back.
    """

    def __init__(self, passed_s: Callable[[], float] = time.monotonic) -> None:
        self._passed_s = passed_s
        self._came_s = -float("inf")

    def came(self) -> None:
        """Take note of a single call."""
        self._came_s = self._passed_s()

    @property
    def present(self) -> bool:
        """Whether another is to be expected."""
        return self._passed_s() - self._came_s < _EXPECTED_S
