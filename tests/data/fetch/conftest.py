"""A mirror that is served while a test runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tests.data.fetch.mirror import Mirror, Server, handler_of


@pytest.fixture
def mirror(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mirror]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    mirror = Mirror()
    with Server(("127.0.0.1", 0), handler_of(mirror)) as server:
        mirror.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield mirror
        server.shutdown()
        thread.join()
