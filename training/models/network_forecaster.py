"""The network behind the numpy interface: features in, curves of every target out, on the CPU."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save

from reclaim.features.targets import HORIZONS_S, TARGETS
from reclaim.training.estimators.base import Forecast
from reclaim.training.models.beyond import KEY, RECENT, Beyond, taken_from, temper
from reclaim.training.models.forecaster import ALL_HEADS, Heads, InputRanges
from reclaim.training.models.forward import ForwardPass
from reclaim.training.models.portable import PortableForecaster
from reclaim.training.models.prior import Prior
from reclaim.training.models.survival import N_THRESHOLDS, forecast_of
from reclaim.training.settings import QUANTILE_LEVELS

if TYPE_CHECKING:  # it needs torch, whose import takes longer than all else that a server needs to start
    from reclaim.training.models.network import SurvivalNetwork


class NetworkForecaster:
    """The network behind the numpy interface, on the CPU.

    Parameters
    ----------
    tensors : mapping
        The ``state_dict`` of a ``network.SurvivalNetwork``, as arrays; see ``of``. Not changed from then on.
    heads : Heads
        What was fitted; all other forecasts are NaN.
    beyond : Beyond or None
        What the curves are tempered by; None: they are the network's own.
    prior : Prior or None
        What is mixed into the curves then.

    Attributes
    ----------
    threads : int
        For large calls; the answers do not depend on it.
    """

    _FILE: Final = "network.safetensors"

    def __init__(
        self, tensors: Mapping[str, NDArray[np.float32]], heads: Heads = ALL_HEADS, beyond: Beyond | None = None,
        prior: Prior | None = None,
    ) -> None:  # fmt: skip
        self.tensors = dict(tensors)
        self.heads = heads
        self.beyond = beyond
        self.prior = prior
        self.threads = 1
        self._passes: dict[tuple[int, ...], ForwardPass] = {}

    @classmethod
    def of(
        cls, network: SurvivalNetwork, heads: Heads = ALL_HEADS, beyond: Beyond | None = None,
        prior: Prior | None = None,
    ) -> NetworkForecaster:  # fmt: skip
        """Return a forecaster with a network's weights."""
        return cls({name: tensor.numpy() for name, tensor in network.cpu().state_dict().items()}, heads, beyond, prior)

    @property
    def network(self) -> SurvivalNetwork:
        """A network of these weights, for callers that need more than answers."""
        import torch

        from reclaim.training.models.network import Scaling, SurvivalNetwork

        tensors = {name: torch.from_numpy(values) for name, values in self.tensors.items()}
        width, depth = _size(self.tensors)
        network = SurvivalNetwork(
            Scaling(*(tensors[name] for name in Scaling._fields)), n_targets=len(TARGETS), n_horizons=len(HORIZONS_S),
            width=width, depth=depth,
        )  # fmt: skip
        network.load_state_dict(tensors)
        return network.eval()

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
        """Return the mean and the scale by which the network standardises its inputs."""
        return InputRanges(*(self.tensors[name] for name in InputRanges._fields))

    def predict(self, x: NDArray[np.float32], horizon_s: int | None = None) -> Forecast:
        """Return the forecast of each row; shape (n, n_features); NaN where not fitted."""
        horizons_s = HORIZONS_S if horizon_s is None else (horizon_s,)
        if horizons_s not in self._passes:
            self._passes[horizons_s] = self._pass_to(horizons_s)
        forward, n = self._passes[horizons_s], len(x)
        survival = np.empty((n, len(TARGETS), len(horizons_s), N_THRESHOLDS), np.float32)
        probability = np.empty((n, len(horizons_s)))
        features = np.ascontiguousarray(x, np.float32)
        mix = None if self.prior is None else self.prior.mixer(horizons_s)

        def curves(rows: slice, thresholds: NDArray[np.float32]) -> None:
            some = survival[rows]
            forward.write(
                features[rows], some.reshape(len(some), len(TARGETS) * len(horizons_s), N_THRESHOLDS), probability[rows]
            )
            temper(some, thresholds, features[rows], self.beyond, horizons_s)
            if mix is not None:
                mix(some, thresholds, features[rows])

        return forecast_of(survival, features, probability, horizons_s, QUANTILE_LEVELS, self.threads, curves)

    def _pass_to(self, horizons_s: tuple[int, ...]) -> ForwardPass:
        outputs = np.arange(_N_STEPS).reshape(len(TARGETS), len(HORIZONS_S), N_THRESHOLDS)
        places = _places(horizons_s)
        return ForwardPass.of(
            self.tensors,
            curves=outputs[:, places].reshape(-1, N_THRESHOLDS),
            logits=outputs.size + places,
            fitted=np.concatenate([self.heads.targets[:, places].ravel(), self.heads.oom[places]]),
        )

    def save(self, folder: Path) -> None:
        """Write the weights, the shape of the network, what of it was fitted, what tempers it, and what is mixed in."""
        width, depth = _size(self.tensors)
        shape = {"width": width, "depth": depth}
        tensors = {name: np.ascontiguousarray(values) for name, values in self.tensors.items()}
        if self.beyond is not None:
            tensors[KEY] = self.beyond
        heads = {"targets": self.heads.targets.tolist(), "oom": self.heads.oom.tolist()}
        facts: dict[str, Any] = {"shape": shape, "heads": heads}
        if self.prior is not None:
            self.prior.forecaster.save(folder)
            facts["prior"] = self.prior.quarters
        content = save(tensors, metadata={"facts": json.dumps(facts)})
        (folder / self._FILE).write_bytes(content)  # of a full disk, save_file has an error of its own

    @classmethod
    def load(cls, folder: Path) -> NetworkForecaster:
        """Read what ``save`` wrote; ValueError where the tensors do not fit the network described."""
        with safe_open(folder / cls._FILE, framework="np") as file:
            facts = json.loads(file.metadata()["facts"])
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - no mapping
        shape, beyond = facts["shape"], taken_from(tensors, cls._FILE, RECENT)
        heads = Heads(*(np.array(facts["heads"][key], np.bool_) for key in ("targets", "oom")))
        expected = _shapes(len(tensors["mean"]), shape["width"], shape["depth"])
        if (found := {name: values.shape for name, values in tensors.items()}) != expected:
            raise ValueError(f"{cls._FILE}: expected tensors of shapes {expected}, got {found}")
        quarters = facts.get("prior")
        prior = None if quarters is None else Prior(PortableForecaster.load(folder), tuple(quarters))
        return cls(tensors, heads, beyond, prior)


_N_STEPS: Final = len(TARGETS) * len(HORIZONS_S) * N_THRESHOLDS


def _size(tensors: Mapping[str, NDArray[np.float32]]) -> tuple[int, int]:
    """Return the units of each hidden layer, and how many layers there are."""
    return tensors["head.weight"].shape[1], sum(name.startswith("body.") for name in tensors) // 2


def _shapes(n_features: int, width: int, depth: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of a ``network.SurvivalNetwork``."""
    outputs = _N_STEPS + len(HORIZONS_S)
    shapes: dict[str, tuple[int, ...]] = {name: (n_features,) for name in InputRanges._fields}
    for layer in range(depth):  # behind each come its activation and its dropout, which have no weights
        shapes[f"body.{3 * layer}.weight"] = (width, width if layer else n_features)
        shapes[f"body.{3 * layer}.bias"] = (width,)
    return shapes | {"head.weight": (outputs, width), "head.bias": (outputs,)}


def _places(horizons_s: tuple[int, ...]) -> NDArray[np.int64]:
    return np.array([HORIZONS_S.index(horizon_s) for horizon_s in horizons_s])
