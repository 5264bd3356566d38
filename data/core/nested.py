"""Writes nested settings and scores under dotted names, for the record of runs and for a reader."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def flatten(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a nested mapping as one level, names joined with dots."""
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def as_set(value: object) -> str:
    """Return a setting as ``--set`` takes it, in TOML; ``none`` for one without a value."""
    if value is None:
        return "none"
    return json.dumps(value) if isinstance(value, bool | list | tuple) else str(value)
