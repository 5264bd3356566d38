"""Readiness of a service: whether requests may be sent, and the facts behind it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Readiness:
    """Readiness for requests, and the service's report of state, store and model; ``about`` is JSON."""

    ready: bool
    about: dict[str, Any]
