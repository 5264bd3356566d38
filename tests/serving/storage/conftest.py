"""Fixtures of stores."""

from __future__ import annotations

import os

import pytest


@pytest.fixture
def instant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip waiting for the disk."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(os, "fdatasync", lambda _: None)
