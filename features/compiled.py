"""How the inner functions of the folds are compiled."""

from __future__ import annotations

from typing import Any, Final

LENT: Final[dict[str, Any]] = {"cache": True, "nogil": True, "error_model": "numpy", "_nrt": False}
"""For functions that are only lent their arrays: without reference counts, which took a fifth of the time, so they can
make no arrays of their own. Division by zero gives infinity or NaN and raises nothing."""
