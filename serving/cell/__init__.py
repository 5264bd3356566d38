"""The state of a cell: what the service knows of each task; imports ``serving.models`` and ``serving.wire``."""
