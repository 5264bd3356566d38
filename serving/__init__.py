"""The estimator service: reservations over HTTP; imports ``training``, ``features`` and ``data``."""
