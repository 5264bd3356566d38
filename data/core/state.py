"""Converts the memory of a fold to plain arrays that ``np.savez`` takes without pickle, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from reclaim.data.errors import ConfigError

MADE_BY: Final = "made_by"
"""Name of the array, of one string, that says which kind of fold made the memory."""


def adopt(name: str, like: NDArray[Any], memory: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
    """Return the array of that name in its own type, contiguous; it need not have been saved field by field.

    The caller checks the meaning of its bytes by a version of its own.

    Raises
    ------
    ConfigError
        It is missing, or its layout differs from that of ``like`` beyond the first axis: other code saved it.
    """
    saved = memory.get(name)
    if saved is None or (saved.shape[1:], saved.dtype) != (like.shape[1:], like.dtype):
        raise ConfigError(f"the memory does not fit in {name!r}, other code saved it: start afresh")
    return np.ascontiguousarray(saved).reshape(saved.shape).view(like.dtype)


def part_of(memory: Mapping[str, NDArray[Any]], prefix: str) -> dict[str, NDArray[Any]]:
    """Return the arrays whose names begin with a prefix, by the rest of their names."""
    return {name.removeprefix(prefix): array for name, array in memory.items() if name.startswith(prefix)}


def state_of(made_by: str, memory: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return copies of all arrays, each field of a structured one under ``name.field``."""
    state: dict[str, NDArray[Any]] = {MADE_BY: np.array(made_by)}
    for name, array in memory.items():
        if array.dtype.names is None:
            state[name] = array.copy()
        else:
            state |= {f"{name}.{field}": array[field].copy() for field in array.dtype.names}
    return state


def memory_of(
    made_by: str, like: Mapping[str, NDArray[Any]], state: Mapping[str, NDArray[Any]]
) -> dict[str, NDArray[Any]]:
    """Return copies of the arrays that ``state_of`` was given.

    Parameters
    ----------
    made_by : str
        Kind of fold that must have made the memory.
    like : mapping of str to array
        Arrays of the expected layouts; the lengths of their first axes do not matter.
    state : mapping of str to array
        Result of ``state_of``, or an ``np.load`` of it.

    Raises
    ------
    ConfigError
        Another kind, other parameters or other code made it.
    """
    theirs = str(state[MADE_BY]) if MADE_BY in state else "something unknown"
    if theirs != made_by:
        raise ConfigError(f"this state was saved by {theirs}, and {made_by} cannot continue it: start afresh")
    memory = {}
    for name, array in like.items():
        fields = array.dtype.names
        parts = {name: array} if fields is None else {f"{name}.{field}": array[field] for field in fields}
        for part, blank in parts.items():
            saved = state.get(part)
            if saved is None or saved.dtype != blank.dtype or saved.shape[1:] != blank.shape[1:]:
                raise ConfigError(
                    f"this state of {made_by} does not fit in {part!r}, other code saved it: start afresh"
                )
        if fields is None:
            memory[name] = np.array(state[name])
            continue
        memory[name] = np.zeros(len(state[f"{name}.{fields[0]}"]), array.dtype)
        for field in fields:
            memory[name][field] = state[f"{name}.{field}"]
    return memory
