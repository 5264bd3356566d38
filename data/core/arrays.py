"""Makes, grows, copies and blanks large arrays of records, as fast as their bytes."""

from __future__ import annotations

import math
import mmap
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

_HUGE: Final = 4 * 2**20
"""Bytes from which an array uses huge pages of 2 MiB."""


def blank_records(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return zeros that take no memory until they are touched, in huge pages if the system has them.

    ``np.zeros`` gets small pages: the first touch of 400 MB then took 0.9 s instead of 0.05.
    """
    size = math.prod(shape) * dtype.itemsize
    if size < _HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.zeros(shape, dtype)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype).reshape(shape)


def room_for(records: NDArray[Any], need: int) -> NDArray[Any]:
    """Return ``records`` with at least ``need`` rows, doubling; new rows are zero."""
    if need <= len(records):
        return records
    grown = blank_records((max(need, 2 * len(records)), *records.shape[1:]), records.dtype)
    raw(grown)[: records.nbytes] = raw(records)
    return grown


def raw(records: NDArray[Any]) -> NDArray[np.uint8]:
    """Return the bytes of a contiguous array: numpy copies records field by field, which is far slower."""
    return records.reshape(-1).view(np.uint8)


def copy_of(records: NDArray[Any], room: NDArray[np.uint8] | None = None) -> NDArray[Any]:
    """Return a copy of a contiguous array; its memory is returned to the system with it.

    It is made in ``room``, bytes that the caller holds, if there are enough of them.
    """
    if room is None or len(room) < records.nbytes:
        out = blank_records(records.shape, records.dtype)
    else:
        out = room[: records.nbytes].view(records.dtype).reshape(records.shape)
    raw(out)[:] = raw(records)
    return out


def blank_rows(records: NDArray[Any], rows: NDArray[np.int64]) -> None:
    """Set rows of a contiguous array to zero."""
    if len(records):
        raw(records).reshape(len(records), -1)[rows] = 0


def lent(*columns: NDArray[Any]) -> tuple[NDArray[Any], ...]:
    """Return contiguous, read-only views of columns.

    Numba compiles a function again, for seconds, for each mixture of writable and read-only arrays.
    """
    views = tuple(np.ascontiguousarray(column).view() for column in columns)
    for view in views:
        view.flags.writeable = False
    return views


def mean_known(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the mean over the first axis of what is finite; NaN where nothing is."""
    known = np.isfinite(values)
    n = known.sum(axis=0)
    return np.where(n > 0, np.where(known, values, 0.0).sum(axis=0) / np.maximum(n, 1), np.nan)


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
