"""Replay: simulated cells, metrics, experiments and reports; imports ``training``, ``features`` and ``data``."""
