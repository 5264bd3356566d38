"""Serves the same model in a plain FastAPI route, the reference of the serving benchmark.

    python -m benchmarks.serving.bare --model reclaim@champion --port 3001

No state, no limits, no token, no metrics, no log; the same bodies in and out as `POST /v1/reservations`, as JSON.
"""

from __future__ import annotations

import argparse

import uvicorn
from fastapi import FastAPI

from reclaim.serving.answers.stateless import answer
from reclaim.serving.models.loader import load_location, named_location
from reclaim.serving.settings import ServingSettings
from reclaim.serving.wire.schemas import ReservationRequest, ReservationResponse


def main() -> None:
    """Serve until stopped."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, required=True)
    arguments = parser.parse_args()
    settings = ServingSettings(model=arguments.model)
    model = load_location(named_location(settings), settings.margin)
    api = FastAPI()

    @api.get("/readyz")
    async def ready() -> bool:
        return True

    @api.post("/v1/reservations")
    async def reservations(request: ReservationRequest) -> ReservationResponse:
        return answer(model, request, settings)

    uvicorn.run(api, host="127.0.0.1", port=arguments.port, access_log=False, log_level="warning")


if __name__ == "__main__":
    main()
