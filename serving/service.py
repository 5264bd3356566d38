"""Assembles the service: BentoML around the routes, and the guard in front of both.

BentoML packs the service (``bentoml build``) and starts and stops it; its access log, metrics and tracing are off.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import signal
import sys
from typing import Final

import bentoml

from reclaim.serving.http.guard import Guard
from reclaim.serving.http.logs import set_up_logs
from reclaim.serving.http.openapi import page_app
from reclaim.serving.http.process import raise_open_files
from reclaim.serving.http.protocol import bound_connections, bound_heads
from reclaim.serving.http.routes import PREFIX, routes
from reclaim.serving.runtime import Runtime
from reclaim.serving.settings import read_settings

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG: Final = 1
"""Constant of prctl(2)."""
_SWITCH_S: Final = 0.0005
"""Largest time in seconds for which a thread may keep the interpreter while another one waits. The event loop waits
several times for each request; with Python's 5 ms it would wait 20 ms and more during a bulk call."""
_running: Final[list[Runtime]] = []
"""The runtime of this process, from start-up to shutdown."""


def _runtime() -> Runtime:
    return _running[-1]


def _exit_on_fault() -> None:
    """End the process at once: acknowledged writes are on the disk, and the supervisor starts the service again.

    The fault is logged here, as the thread that calls this would report it only afterwards.
    """
    log.critical("a fault of the service ends it", exc_info=True)
    logging.shutdown()
    os._exit(os.EX_SOFTWARE)


def _end_with_the_server() -> None:
    """End a worker of BentoML with its parent, even a killed one; it would go on and hold the state."""
    if sys.platform == "linux" and bentoml.server_context.worker_index is not None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


_api: Final = routes(_runtime)


@bentoml.service(
    name="reclaim", workers=1, http={"host": "127.0.0.1"}, logging={"access": {"enabled": False}},
    tracing={"excluded_urls": ".*"},  # spans cost half a millisecond a request, and nothing collects them
    metrics={"enabled": False},  # a dozen series for each path asked for, every task's too, for ever
)  # fmt: skip
@bentoml.asgi_app(_api, path=PREFIX)
@bentoml.asgi_app(page_app(_api, PREFIX, lambda: _runtime().metrics.text()), path="/")  # replaces BentoML's own page
class ReservationService:
    """Reservations, peak predictions and out-of-memory probabilities from recent usage."""

    def __init__(self) -> None:
        _end_with_the_server()
        sys.setswitchinterval(_SWITCH_S)
        settings = read_settings()
        set_up_logs(settings.log_json)
        bound_connections(settings, raise_open_files())
        self.runtime = Runtime(settings, on_fault=_exit_on_fault)
        _running.append(self.runtime)
        gc.enable()
        gc.freeze()  # all objects so far stay; a full collection would stop requests for 0.3 s

    @bentoml.on_shutdown
    def close(self) -> None:
        """Finish the writes under way."""
        _running.remove(self.runtime)
        self.runtime.close()
        gc.unfreeze()


bound_heads()  # before the server that imports this module chooses its protocol
ReservationService.add_asgi_middleware(  # type: ignore[attr-defined]  # the decorator replaces the class
    Guard, runtime=lambda: _running[-1] if _running else None
)
