"""What all replays share: by how much numbers may differ through rounding alone, and how long a day is.

Numba keeps compiled code with the values it was compiled with: whoever changes one of them clears its caches.
"""

from __future__ import annotations

from typing import Final

ROUNDING: Final = 1e-6
"""Relative tolerance of a violation: targets are stored as single-precision shares of the limit."""

SUM_ROUNDING: Final = 1e-9
"""Relative tolerance of sums of many tasks: what fits exactly must not fail by rounding, and sums in another order are
not the same to the bit."""

DAY_US: Final = 86_400_000_000
"""A day, in microseconds."""
