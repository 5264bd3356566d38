"""Answers: from requests and task state to reservations; imports ``serving.cell`` and ``serving.wire``."""
