"""The same model behind a bare FastAPI route, as anybody would write it: what the service is measured against.

    python benchmarks/serving_bare.py --model reclaim@champion --port 3001

No state, no limits, no token, no metrics, no log; the same bodies in and out as `POST /v1/reservations`, as JSON.
"""

from __future__ import annotations

import argparse

import uvicorn
from fastapi import FastAPI

from reclaim.serving.answer import answer
from reclaim.serving.loader import load_model
from reclaim.serving.schemas import ReservationRequest, ReservationResponse
from reclaim.serving.settings import ServingSettings


def main() -> None:
    """Serve until told to stop."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, required=True)
    arguments = parser.parse_args()
    settings = ServingSettings(model=arguments.model)
    model = load_model(settings)
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
