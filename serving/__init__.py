"""The estimator service: reservations over HTTP."""
