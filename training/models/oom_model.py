"""The out-of-memory model: a small network of its own from a task's features to the probability at each horizon."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save_file

from reclaim.features.registry import AT, FEATURE_NAMES, FIRST_RELATED
from reclaim.features.targets import HORIZONS_S
from reclaim.training.models.forward import ForwardPass

WIDTH: Final = 64
DEPTH: Final = 3
"""Units of each hidden layer, and hidden layers."""

_BESIDES: Final = (
    AT.age, AT.seen, AT.restarts, AT.gap, AT.coverage_2h, AT.length, AT.in_alloc, AT.scheduling_class, AT.page_cache,
    AT.page_cache_share, AT.cpi, AT.cpu_limit, AT.cpu_last, AT.cpu_mean_2h, AT.cpu_max_24h, AT.cpu_slow_max,
    AT.peak_cpu_last, AT.peak_cpu_max_24h,
)  # fmt: skip
_GROUPS: Final = ("memory_", "oom", "collection_oom", "tier_")
INPUTS: Final = tuple(
    k for k, name in enumerate(FEATURE_NAMES[:FIRST_RELATED]) if name.startswith(_GROUPS) or k in _BESIDES
)
"""Positions of the features that the model reads: memory, out-of-memory history, and a few of the task. All features of
CPU in addition made no difference on cells held out of training."""


class OomModel:
    """The network behind the numpy interface, on the CPU.

    Parameters
    ----------
    tensors : mapping
        ``mean``, ``scale``, ``low`` and ``high`` of the features after ``network.squash``, and the weights of the body
        and the head, under the names of ``network``. A feature that it does not read has bounds of zero.
    fitted : bool, shape (n_horizons,)
        The probability of the other horizons is NaN.
    """

    FILE: Final = "oom_model.safetensors"

    def __init__(self, tensors: Mapping[str, NDArray[np.float32]], fitted: NDArray[np.bool_]) -> None:
        self.tensors = {name: np.ascontiguousarray(values) for name, values in tensors.items()}
        self.fitted = fitted
        self._passes: dict[tuple[int, ...], ForwardPass] = {}

    def predict(
        self, x: NDArray[np.float32], horizons_s: tuple[int, ...] = HORIZONS_S, threads: int = 1
    ) -> NDArray[np.float64]:
        """Return probabilities, not calibrated; shape (n, n_features) to (n, len(horizons_s)); NaN where not fitted."""
        if horizons_s not in self._passes:
            self._passes[horizons_s] = self._pass_to(np.array([HORIZONS_S.index(h) for h in horizons_s]))
        return self._passes[horizons_s].run(x, threads)[1]

    def _pass_to(self, places: NDArray[np.int64]) -> ForwardPass:
        return ForwardPass.of(
            self.tensors, curves=np.zeros((0, 1), np.int64), logits=places, fitted=self.fitted[places]
        )

    def save(self, folder: Path) -> None:
        """Write what ``load`` reads into an existing folder."""
        save_file(self.tensors, folder / self.FILE, metadata={"fitted": json.dumps(self.fitted.tolist())})

    @classmethod
    def load(cls, folder: Path) -> OomModel | None:
        """Read what ``save`` wrote; None where there is no such file."""
        if not (folder / cls.FILE).is_file():
            return None
        with safe_open(folder / cls.FILE, framework="np") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - no mapping
            return cls(tensors, np.array(json.loads(file.metadata()["fitted"]), np.bool_))
