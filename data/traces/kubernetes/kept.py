"""Keeps a live fold as bytes, so that a feed that is started again does not fold its history again."""

from __future__ import annotations

import hashlib
import io
import pickle
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np

from reclaim.data.traces.dialect import Dialect, Matcher, Metric
from reclaim.data.traces.history import RawSeries
from reclaim.data.traces.kubernetes.fold import Fold, Task
from reclaim.data.traces.kubernetes.live import LiveFold
from reclaim.data.traces.kubernetes.owners import Facts, Owners, Workload
from reclaim.data.traces.kubernetes.series import AsOf, ContainerKey, Tails

_OWN: Final[tuple[type, ...]] = (
    LiveFold, Fold, Task, Owners, Workload, Facts, Tails, AsOf, ContainerKey, RawSeries, Dialect, Metric, Matcher,
)  # fmt: skip
_NUMPY: Final[tuple[Any, ...]] = (
    np.ndarray, np.dtype, np.zeros(1).__reduce__()[0], np.zeros(1).__reduce_ex__(5)[0], np.float64(0).__reduce__()[0],
)  # fmt: skip
"""Classes of numpy, and functions that make its arrays and numbers again."""
_NAMED: Final[dict[tuple[str, str], Any]] = {(one.__module__, one.__qualname__): one for one in (*_OWN, *_NUMPY)}


def as_bytes(fold: LiveFold, until_us: int) -> bytes:
    """Return a fold and the end of what it has folded, µs."""
    content = pickle.dumps((until_us, fold), 5)
    return _digest(content) + content


def from_bytes(kept: bytes) -> tuple[LiveFold, int] | None:
    """Return what ``as_bytes`` was given; None where the bytes are damaged, or other code wrote them."""
    size = hashlib.sha256().digest_size
    content = kept[size:]
    if kept[:size] != _digest(content):
        return None
    try:
        until_us, fold = _Unpickler(io.BytesIO(content)).load()
    except pickle.UnpicklingError:
        return None
    return fold, until_us


class _Unpickler(pickle.Unpickler):
    """Makes objects of a fold and of numpy alone: a file may come from anywhere."""

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
    files = sorted({str(sys.modules[one.__module__].__file__) for one in _OWN})
    return b"".join(hashlib.sha256(Path(file).read_bytes()).digest() for file in files) + np.__version__.encode()
