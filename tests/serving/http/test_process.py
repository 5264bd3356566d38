"""Tests the preparation of a server's process."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator

import pytest

from reclaim.serving.http.process import prepare_process

Execve = tuple[str, list[str], dict[str, str]]
"""Arguments of ``os.execve``: program, command and environment."""


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Execve]]:
    """Give the commands that the process would have restarted itself with; garbage is collected again afterwards."""
    calls: list[Execve] = []
    monkeypatch.setattr(os, "execve", lambda *call: calls.append(call))
    monkeypatch.setattr(sys, "orig_argv", ["python", "-X", "dev", "-m", "reclaim", "serve"])
    for name in ("OMP_NUM_THREADS", "GLIBC_TUNABLES", "ARROW_DEFAULT_MEMORY_POOL"):
        monkeypatch.delenv(name, raising=False)
    yield calls
    gc.enable()


def test_the_command_is_executed_again_with_the_missing_variables(
    begun: list[Execve], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTHER", "kept")
    prepare_process()
    ((program, command, environment),) = begun
    assert (program, command) == (sys.executable, sys.orig_argv)
    assert "glibc.malloc.mmap_max=0" in environment["GLIBC_TUNABLES"]
    assert (environment["OMP_NUM_THREADS"], environment["ARROW_DEFAULT_MEMORY_POOL"]) == ("1", "system")
    assert environment["OTHER"] == "kept"
    assert "GLIBC_TUNABLES" not in os.environ


def test_it_is_executed_again_once_and_keeps_variables_that_are_set(
    begun: list[Execve], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.check=3")
    prepare_process()
    ((_, _, environment),) = begun
    assert environment["GLIBC_TUNABLES"] == "glibc.malloc.check=3"
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    begun.clear()
    prepare_process()
    assert not begun
    assert not gc.isenabled()  # until the service is ready
    assert "RECLAIM_PREPARED" not in os.environ


def test_it_is_executed_again_once_where_a_variable_is_dropped(
    begun: list[Execve], monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare_process()
    ((_, _, environment),) = begun
    monkeypatch.setenv("RECLAIM_PREPARED", environment["RECLAIM_PREPARED"])
    begun.clear()
    prepare_process()
    assert not begun
