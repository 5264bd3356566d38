"""The Python client of the service; imports ``serving.wire`` alone."""

from reclaim.serving.client.client import (
    About,
    Client,
    Readiness,
    RefusedRowsError,
    Reservations,
    ServiceError,
    Written,
)

__all__ = ["About", "Client", "Readiness", "RefusedRowsError", "Reservations", "ServiceError", "Written"]
