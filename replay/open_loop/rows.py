"""Sums rows by key, and divides sums."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def sums_by(key: NDArray[np.int64], values: NDArray[np.float64], n_keys: int) -> NDArray[np.float64]:
    """Return the sums of values, shape (n, k), over the rows of each key from 0; shape (n_keys, k)."""
    columns = [np.bincount(key, values[:, c], n_keys) for c in range(values.shape[1])]
    return np.stack(columns, axis=1).astype(np.float64, copy=False)


def ratio(above: Any, below: Any) -> NDArray[np.float64]:
    """Return one over the other, arrays that broadcast; NaN where ``below`` is 0 or unknown."""
    above, below = np.broadcast_arrays(np.asarray(above, np.float64), np.asarray(below, np.float64))
    return np.asarray(np.divide(above, below, out=np.full(above.shape, np.nan), where=below > 0))
