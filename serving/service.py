"""The service: BentoML around the routes, the guard in front of both."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import signal
import sys
from typing import Final

import bentoml

from reclaim.serving.guard import Guard
from reclaim.serving.logs import set_up_logs
from reclaim.serving.openapi import page_app
from reclaim.serving.routes import PREFIX, routes
from reclaim.serving.runtime import Runtime
from reclaim.serving.settings import read_settings
from reclaim.serving.wire import bound_heads

_PR_SET_PDEATHSIG: Final = 1
"""Of prctl(2)."""
_SWITCH_S: Final = 0.0005
"""How long a thread may keep the interpreter while another waits for it, in seconds. The event loop waits several times
for each request, and at Python's 5 ms a bulk call beside it would make that 20 ms and more."""
_running: Final[list[Runtime]] = []
"""The one runtime of this process, from its start-up to its end."""


def _runtime() -> Runtime:
    return _running[-1]


def _give_up() -> None:
    """End at once: what was acknowledged is on the disk, and whoever watches over the service starts it anew."""
    logging.shutdown()
    os._exit(os.EX_SOFTWARE)


def _end_with_the_server() -> None:
    """Let a worker of BentoML's end when its parent does, however that ends: it would go on, and hold the state."""
    if sys.platform == "linux" and bentoml.server_context.worker_index is not None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _metrics() -> str:
    return _runtime().metrics.text()


_api: Final = routes(_runtime)


@bentoml.service(
    name="reclaim", workers=1, http={"host": "127.0.0.1"}, logging={"access": {"enabled": False}},
    tracing={"excluded_urls": ".*"},  # spans that nobody collects would cost half a millisecond a request
    metrics={"enabled": False},  # a dozen series for each path that anybody asks for, a task's too, kept for ever
)  # fmt: skip
@bentoml.asgi_app(_api, path=PREFIX)
@bentoml.asgi_app(page_app(_api, PREFIX, _metrics), path="/")  # before the page that BentoML would make of it
class ReservationService:
    """Reservations, peak predictions and out-of-memory probabilities from recent usage."""

    def __init__(self) -> None:
        _end_with_the_server()
        sys.setswitchinterval(_SWITCH_S)
        settings = read_settings()
        set_up_logs(settings.log_json)
        self.runtime = Runtime(settings, on_fault=_give_up)
        _running.append(self.runtime)
        gc.enable()
        gc.freeze()  # what is there now stays; to look it over again would hold everybody up for 0.3 s

    @bentoml.on_shutdown
    def close(self) -> None:
        """Finish what is under way."""
        _running.remove(self.runtime)
        self.runtime.close()
        gc.unfreeze()


bound_heads()  # the server that imports this reads its protocol later
ReservationService.add_asgi_middleware(  # type: ignore[attr-defined]  # of what the decorator made of it
    Guard, runtime=lambda: _running[-1] if _running else None
)
