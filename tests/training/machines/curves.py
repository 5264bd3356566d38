"""Gives the terms of tasks whose curves a test writes down."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from reclaim.training.machines.terms import PAST, shares_of, terms_of

Floats = NDArray[np.float64]


def terms_of_curves(
    survival: NDArray[np.float32], thresholds: NDArray[np.float32], usage: Floats, limit: Floats,
    seen: NDArray[np.int64], mean_limit: tuple[float, ...], past: NDArray[np.float32] | None = None,
) -> Floats:  # fmt: skip
    """Return the terms of tasks, shape (n, n_resources, N_TERMS), with curves of one horizon, (n, n_targets, J)."""
    past = np.full((*limit.shape, len(PAST)), 0.5, np.float32) if past is None else past
    return terms_of(shares_of(survival[:, :, None], thresholds, usage, limit, seen, past, mean_limit), usage, limit)
