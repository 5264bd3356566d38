"""Forecasters: features in, quantiles of every target and the OOM probability out; a row's answer is its own alone."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import save_file

from reclaim.features.targets import HORIZONS_S, TARGETS
from reclaim.training.estimators.base import Forecast
from reclaim.training.forward import ForwardPass
from reclaim.training.networks import QuantileNetwork, Scaling
from reclaim.training.settings import QUANTILE_LEVELS


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


class InputRanges(NamedTuple):
    """How the features of the training rows were spread, after ``networks.squash``; each float32, shape (n_features,).

    ``mean`` and ``scale`` standardise; ``low`` and ``high`` are the range that training saw, in those units.
    """

    mean: NDArray[np.float32]
    scale: NDArray[np.float32]
    low: NDArray[np.float32]
    high: NDArray[np.float32]


class Forecaster(Protocol):
    """What a learned model answers.

    Attributes
    ----------
    quantile_levels : tuple of float
        Last axis of ``Forecast.quantiles``, increasing.
    horizons_s : tuple of int
        Horizons it was fitted for, in seconds; at the others its answers are NaN.
    threads : int
        For large calls; the answers do not depend on it.
    """

    threads: int

    @property
    def quantile_levels(self) -> tuple[float, ...]: ...  # noqa: D102 - see the class

    @property
    def horizons_s(self) -> tuple[int, ...]: ...  # noqa: D102 - see the class

    def predict(self, x: NDArray[np.float32], horizon_s: int | None = None) -> Forecast:
        """Return the forecast of each row of features, shape (n, n_features); NaN for what is not fitted.

        With ``horizon_s``, one of ``features.targets.HORIZONS_S``, the forecast is of that horizon alone: the same
        bits, sooner.
        """

    def input_ranges(self) -> InputRanges | None:
        """Return how the features were spread that it was trained on; None where that was not kept."""

    def save(self, folder: Path) -> None:
        """Write what ``load`` of the same class reads, without pickle, into an existing folder."""


class NetworkForecaster:
    """The network behind the numpy interface, on the CPU.

    Parameters
    ----------
    network : QuantileNetwork
        Not changed from the first answer on.
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
        self._passes: dict[tuple[int, ...], ForwardPass] = {}

    @property
    def quantile_levels(self) -> tuple[float, ...]:
        """Levels of the last axis."""
        return QUANTILE_LEVELS

    @property
    def horizons_s(self) -> tuple[int, ...]:
        """Those at which a target or the OOM label was known in training."""
        fitted = self.heads.targets.any(axis=0) | self.heads.oom
        return tuple(horizon_s for horizon_s, known in zip(HORIZONS_S, fitted, strict=True) if known)

    def input_ranges(self) -> InputRanges:
        """Return what the network standardises its inputs with."""
        return InputRanges(*(getattr(self.network, name).numpy() for name in InputRanges._fields))

    def predict(self, x: NDArray[np.float32], horizon_s: int | None = None) -> Forecast:
        """Return the forecast of each row; shape (n, n_features) to (n, T, H, Q) and (n, H); NaN where not fitted."""
        horizons_s = HORIZONS_S if horizon_s is None else (horizon_s,)
        if horizons_s not in self._passes:
            self._passes[horizons_s] = self._pass_to(horizons_s)
        curves, probability = self._passes[horizons_s].run(x, self.threads)
        probability[:, ~self.heads.oom[_places(horizons_s)]] = np.nan
        quantiles = curves.reshape(len(x), len(TARGETS), len(horizons_s), len(QUANTILE_LEVELS))
        return Forecast(quantiles, probability, horizons_s)

    def _pass_to(self, horizons_s: tuple[int, ...]) -> ForwardPass:
        n_targets, n_horizons, n_levels = self.network.shape
        outputs = np.arange(n_targets * n_horizons * n_levels).reshape(self.network.shape)
        places = _places(horizons_s)
        return ForwardPass.of(
            {name: tensor.numpy() for name, tensor in self.network.state_dict().items()},
            curves=outputs[:, places].reshape(-1, n_levels),
            logits=outputs.size + places,
            fitted=self.heads.targets[:, places].ravel(),
            transform=self.transform,
        )

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


def _places(horizons_s: tuple[int, ...]) -> NDArray[np.int64]:
    return np.array([HORIZONS_S.index(horizon_s) for horizon_s in horizons_s])
