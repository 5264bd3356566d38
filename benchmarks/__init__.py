"""Results of the pages, each made by one command: forecasts, machines, cells replayed, out-of-memory risk, drift."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

_PACKAGES: Final = (
    "reclaim", "bentoml", "duckdb", "fastapi", "h11", "isal", "numba", "numpy", "pandas", "polars", "pyarrow",
    "scikit-learn", "scipy", "torch", "uvicorn",
)  # fmt: skip
"""Those on which some number depends; ``polars`` comes with an extra."""


def made_by(command: str) -> dict[str, Any]:
    """Return the beginning of a file of results: the command that makes it, date, commit, processor and versions."""
    from reclaim.training.tracking.runs import git_commit  # some scripts measure the time that imports take

    return {
        "command": command,
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "commit": git_commit(),
        "device": processor(),
        "cores": os.cpu_count(),
        "versions": {name: number for name in _PACKAGES if (number := _version(name)) is not None},
    }


def processor() -> str:
    """Return the name of the processor; that of its architecture where Linux does not tell it."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.is_file() else []
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
