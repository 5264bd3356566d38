"""Sums of rows by key, ratios of sums, and the ends of runs of equal keys."""

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


def is_last(*keys: NDArray[Any]) -> NDArray[np.bool_]:
    """Return which rows are the last ones of a run of rows with equal keys, shape (n,) each; shape (n,)."""
    out = np.ones(len(keys[0]), np.bool_)
    out[:-1] = np.logical_or.reduce([key[1:] != key[:-1] for key in keys])
    return out


def is_first(*keys: NDArray[Any]) -> NDArray[np.bool_]:
    """Return which rows are the first ones of a run of rows with equal keys, shape (n,) each; shape (n,)."""
    out = np.ones(len(keys[0]), np.bool_)
    out[1:] = np.logical_or.reduce([key[1:] != key[:-1] for key in keys])
    return out
