"""Forecasters: features in, quantiles of every target and the OOM probability out; a row's answer is its own alone."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import save_file

from reclaim.features.compiled import LENT
from reclaim.features.kin import in_parts
from reclaim.features.targets import HORIZONS_S, TARGETS
from reclaim.training.estimators.base import Forecast
from reclaim.training.networks import QuantileNetwork, Scaling, cpu_threads, inverse_transform, steps
from reclaim.training.settings import QUANTILE_LEVELS

CHUNK_ROWS: Final = 256
"""Rows per pass of the network. Every pass has exactly this many, padded with zeros: matrix products of one shape run
the same instructions for each row, so a row's answer does not depend, to the bit, on the batch it stands in."""


@dataclass(frozen=True)
class Heads:
    """Which outputs of a network were fitted; the others never had a gradient, so what they say means nothing.

    Attributes
    ----------
    targets : bool, shape (n_targets, n_horizons)
    oom : bool, shape (n_horizons,)
    """

    targets: NDArray[np.bool_]
    oom: NDArray[np.bool_]


ALL_HEADS: Final = Heads(np.ones((len(TARGETS), len(HORIZONS_S)), np.bool_), np.ones(len(HORIZONS_S), np.bool_))


class Forecaster(Protocol):
    """What a learned model answers.

    Attributes
    ----------
    quantile_levels : tuple of float
        Last axis of ``Forecast.quantiles``, increasing.
    horizons_s : tuple of int
        Horizons it was fitted for, in seconds; at the others its answers are NaN.
    """

    @property
    def quantile_levels(self) -> tuple[float, ...]: ...  # noqa: D102 - see the class

    @property
    def horizons_s(self) -> tuple[int, ...]: ...  # noqa: D102 - see the class

    def predict(self, x: NDArray[np.float32]) -> Forecast:
        """Return the forecast of each row of features, shape (n, n_features); NaN for what is not fitted."""

    def save(self, folder: Path) -> None:
        """Write what ``load`` of the same class reads, without pickle, into an existing folder."""


class NetworkForecaster:
    """The network behind the numpy interface, on the CPU.

    Parameters
    ----------
    network : QuantileNetwork
    transform : str
        The space it was fitted in, one of ``settings.TRANSFORMS``.
    heads : Heads
        What was fitted; the forecast of all else is NaN.

    Attributes
    ----------
    threads : int
        For large calls; the answers do not depend on it.
    """

    _FILE: Final = "network.safetensors"

    def __init__(self, network: QuantileNetwork, transform: str, heads: Heads = ALL_HEADS) -> None:
        self.network = network.cpu().eval()
        self.transform = transform
        self.heads = heads
        self.threads = 1

    @property
    def quantile_levels(self) -> tuple[float, ...]:
        """Levels of the last axis."""
        return QUANTILE_LEVELS

    @property
    def horizons_s(self) -> tuple[int, ...]:
        """Those at which a target or the OOM label was known in training."""
        fitted = self.heads.targets.any(axis=0) | self.heads.oom
        return tuple(horizon_s for horizon_s, known in zip(HORIZONS_S, fitted, strict=True) if known)

    def predict(self, x: NDArray[np.float32]) -> Forecast:
        """Return the forecast of each row; shape (n, n_features) to (n, T, H, Q) and (n, H); NaN where not fitted."""
        n = len(x)
        quantiles = np.empty((n, len(TARGETS), len(HORIZONS_S), len(QUANTILE_LEVELS)))
        probability = np.empty((n, len(HORIZONS_S)))
        flat = quantiles.reshape(n, len(TARGETS) * len(HORIZONS_S), len(QUANTILE_LEVELS))

        def predict_part(part: int, parts: int) -> None:
            chunk = torch.zeros(CHUNK_ROWS, x.shape[1])
            with torch.inference_mode():
                for start in range(part * CHUNK_ROWS, n, parts * CHUNK_ROWS):
                    k = min(CHUNK_ROWS, n - start)
                    chunk.numpy()[:k] = x[start : start + k]  # rows behind them are whatever was there
                    raw = self.network.raw(chunk)
                    _add_up(raw.numpy(), steps(raw).numpy(), flat[start : start + k])
                    probability[start : start + k] = torch.sigmoid(raw[:k, flat.shape[1] * flat.shape[2] :]).numpy()

        with cpu_threads(1):
            in_parts(predict_part, n, self.threads)
        if self.transform != "identity":
            quantiles = inverse_transform(torch.from_numpy(quantiles), self.transform).numpy()
        quantiles[:, ~self.heads.targets] = np.nan
        probability[:, ~self.heads.oom] = np.nan
        return Forecast(quantiles, probability)

    def save(self, folder: Path) -> None:
        """Write the weights, the shape of the network and what of it was fitted."""
        n_layers = sum(isinstance(layer, torch.nn.Linear) for layer in self.network.body)
        shape = {"width": self.network.head.in_features, "depth": n_layers, "transform": self.transform}
        tensors = {k: v.contiguous() for k, v in self.network.state_dict().items()}
        heads = {"targets": self.heads.targets.tolist(), "oom": self.heads.oom.tolist()}
        save_file(tensors, folder / self._FILE, metadata={"facts": json.dumps({"shape": shape, "heads": heads})})

    @classmethod
    def load(cls, folder: Path) -> NetworkForecaster:
        """Read what ``save`` wrote."""
        with safe_open(folder / cls._FILE, framework="pt") as file:
            facts = json.loads(file.metadata()["facts"])
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - no mapping
        shape = facts["shape"]
        heads = Heads(*(np.array(facts["heads"][key], np.bool_) for key in ("targets", "oom")))
        network = QuantileNetwork(
            Scaling(*(tensors[name] for name in Scaling._fields)), n_targets=len(TARGETS), n_horizons=len(HORIZONS_S),
            n_levels=len(QUANTILE_LEVELS), width=shape["width"], depth=shape["depth"],
        )  # fmt: skip
        network.load_state_dict(tensors)
        return cls(network, shape["transform"], heads)


@numba.njit(**LENT)
def _add_up(raw: Any, step: Any, out: Any) -> None:
    """Write quantiles that rise along the last axis and are not negative, as no usage is; shape (k, T*H, Q)."""
    n_levels = out.shape[2]
    for i in range(out.shape[0]):
        for j in range(out.shape[1]):
            total = np.float64(raw[i, j * n_levels])
            out[i, j, 0] = max(total, 0.0)
            for q in range(1, n_levels):
                total += np.float64(step[i, j * n_levels + q])
                out[i, j, q] = max(total, 0.0)
