"""Keeps a live fold as bytes, so that a feed that is started again does not fold its history again."""

from __future__ import annotations

import copyreg
import hashlib
import io
import pickle
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from reclaim.data.traces.dialect import Dialect, Matcher, Metric
from reclaim.data.traces.history import RawSeries
from reclaim.data.traces.kubernetes.fold import Fold, Task
from reclaim.data.traces.kubernetes.live import LiveFold
from reclaim.data.traces.kubernetes.owners import Facts, Owners, Workload
from reclaim.data.traces.kubernetes.series import AsOf, ContainerKey, Tails

_OWN: Final[tuple[type, ...]] = (
    LiveFold, Fold, Task, Owners, Workload, Facts, Tails, AsOf, ContainerKey, RawSeries, Dialect, Metric, Matcher,
)  # fmt: skip
_NUMBERS: Final = tuple({one for one in np.sctypeDict.values() if issubclass(one, np.number | np.bool_)})
"""Types of single numbers of numpy."""
_KINDS: Final = "biuf"
"""Kinds of numbers that arrays hold: flags, integers, floats."""


def as_bytes(fold: LiveFold, until_us: int) -> bytes:
    """Return a fold and the end of what it has folded, µs."""
    out = io.BytesIO()
    _Pickler(out, 5).dump((until_us, fold))
    content = out.getvalue()
    return _digest(content) + content


def from_bytes(kept: bytes) -> tuple[LiveFold, int] | None:
    """Return what ``as_bytes`` was given; None where the bytes are damaged, or other code wrote them."""
    size = hashlib.sha256().digest_size
    content = kept[size:]
    if kept[:size] != _digest(content):
        return None
    try:
        until_us, fold = _Unpickler(io.BytesIO(content)).load()
    except Exception:  # the file may come from anywhere, and hold anything
        return None
    return (fold, until_us) if isinstance(fold, LiveFold) and isinstance(until_us, int) else None


def _array(dtype: str, shape: tuple[int, ...], content: bytes) -> NDArray[Any]:
    """Return an array of numbers; UnpicklingError for one of anything else."""
    of = np.dtype(dtype)
    if of.kind not in _KINDS:
        raise pickle.UnpicklingError(f"{dtype} is no type of a fold's numbers")
    return np.frombuffer(content, of).reshape(shape).copy()


def _number(dtype: str, content: bytes) -> Any:
    """Return a number of numpy."""
    return _array(dtype, (), content)[()]


_NAMED: Final[dict[tuple[str, str], Any]] = {
    **{(one.__module__, one.__qualname__): one for one in _OWN},
    **{(one.__module__, one.__qualname__): one for one in (_array, _number)},
}


def _reduce_array(value: NDArray[Any]) -> tuple[Any, tuple[str, tuple[int, ...], bytes]]:
    """Return a recipe that restores an array from its bytes only: numpy's own one trusts the file."""
    return _array, (value.dtype.str, value.shape, value.tobytes())


def _reduce_number(value: Any) -> tuple[Any, tuple[str, bytes]]:
    """Return the same for a single number."""
    return _number, (value.dtype.str, value.tobytes())


class _Pickler(pickle.Pickler):
    dispatch_table = (
        copyreg.dispatch_table | {np.ndarray: _reduce_array} | dict.fromkeys(_NUMBERS, _reduce_number)
    )  # fmt: skip


class _Unpickler(pickle.Unpickler):
    """Unpickles only objects of a fold and arrays of numbers."""

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _NAMED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"{module}.{name} is no part of a fold") from None


def _digest(content: bytes) -> bytes:
    """Return the hash of the content and of the code whose objects it holds."""
    return hashlib.sha256(_code() + content).digest()


@lru_cache(maxsize=1)
def _code() -> bytes:
    files = sorted({__file__, *(str(sys.modules[one.__module__].__file__) for one in _OWN)})
    return b"".join(hashlib.sha256(Path(file).read_bytes()).digest() for file in files)
