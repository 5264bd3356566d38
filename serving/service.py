"""The service: BentoML around the routes, the guard in front of both."""

from __future__ import annotations

from typing import Final

import bentoml

from reclaim.serving.guard import Guard
from reclaim.serving.logs import set_up_logs
from reclaim.serving.routes import PREFIX, routes
from reclaim.serving.runtime import Runtime
from reclaim.serving.settings import read_settings

_running: Final[list[Runtime]] = []
"""The one runtime of this process, from its start-up to its end."""


def _runtime() -> Runtime:
    return _running[-1]


@bentoml.service(name="reclaim", workers=1, http={"host": "127.0.0.1"}, logging={"access": {"enabled": False}})
@bentoml.asgi_app(routes(_runtime), path=PREFIX)
class ReservationService:
    """Reservations, peak predictions and out-of-memory probabilities from recent usage."""

    def __init__(self) -> None:
        settings = read_settings()
        set_up_logs(settings.log_json)
        self.runtime = Runtime(settings)
        _running.append(self.runtime)

    @bentoml.on_shutdown
    def close(self) -> None:
        """Finish what is under way."""
        _running.remove(self.runtime)
        self.runtime.close()

    def __metrics__(self, text: str) -> str:
        """Return BentoML's metrics and ours."""
        return text + self.runtime.metrics.text()


ReservationService.add_asgi_middleware(  # type: ignore[attr-defined]  # of what the decorator made of it
    Guard, runtime=lambda: _running[-1] if _running else None
)
