"""Decides what counts as a violation and as a machine overrun: usage above what was reserved, by more than rounding.

Each rule is a plain function of numbers or arrays, and the same function compiled into kernels.
"""

from __future__ import annotations

from typing import Any, Final

import numba
import numpy as np

ROUNDING: Final = 1e-6
"""Relative tolerance of a violation: targets are stored as single-precision shares of the limit, and the oracle
reserves them."""

SUM_ROUNDING: Final = 1e-9
"""Relative tolerance of sums over tasks against a capacity: a sum that fits exactly must not fail by rounding, and sums
in another order differ in their last bits."""


def needed(target: Any, limit: Any) -> Any:
    """Return the least reservation that a target does not violate; NaN where target or limit is unknown.

    A target is a share of the limit. One above the limit counts as the limit: there the limit itself was too low, and
    no reservation within it can help.
    """
    return np.minimum(target, 1.0) * limit


def violates(usage: Any, reservation: Any) -> Any:
    """Return whether usage exceeds its reservation, of a task or summed over a machine; False where one is NaN."""
    return usage > reservation * (1.0 + ROUNDING)


def room(capacity: Any) -> Any:
    """Return the largest sum over tasks that fits a capacity."""
    return capacity * (1.0 + SUM_ROUNDING)


def overruns(total: Any, capacity: Any) -> Any:
    """Return whether a sum over tasks exceeds a capacity; False where one of them is NaN."""
    return total > capacity * (1.0 + SUM_ROUNDING)


needed_in_kernel = numba.njit(inline="always")(needed)
violates_in_kernel = numba.njit(inline="always")(violates)
room_in_kernel = numba.njit(inline="always")(room)
overruns_in_kernel = numba.njit(inline="always")(overruns)
