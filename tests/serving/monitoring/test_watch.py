"""Watching the answers never stops the thread that writes."""

from __future__ import annotations

import threading

import pytest

from reclaim.serving.monitoring.watch import Watch


def test_calls_after_a_fault_do_not_wait_for_ever_and_the_fault_is_reported() -> None:
    watch = Watch(0.0)

    def fail() -> None:
        raise OSError("no more")

    def call() -> None:
        for _ in range(20):
            watch._later(fail)

    calls = threading.Thread(target=call, daemon=True)
    calls.start()
    calls.join(60)
    assert not calls.is_alive()
    with pytest.raises(RuntimeError, match="cannot be watched"):
        watch.check()
    watch.close()
