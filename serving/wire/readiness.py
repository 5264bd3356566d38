"""Readiness of a service: whether requests may be sent, and the facts behind it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Readiness:
    """Whether requests may be sent, and what the service reports of state, store and model; ``about`` is JSON."""

    ready: bool
    about: dict[str, Any]
