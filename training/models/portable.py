"""The portable network: one pass from a task's own shares of its limit to its curve, the same for any cell."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numba
import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save

from reclaim.data.core.jit import LENT
from reclaim.data.schema import RESOURCES
from reclaim.features.registry import AT, FEATURE_NAMES, SAME_HOUR_DAYS, SIGNALS, STATISTIC, definitions_of
from reclaim.features.targets import HORIZONS_S, TARGETS
from reclaim.training.estimators.base import Forecast
from reclaim.training.models.beyond import KEY, SO_FAR, Beyond, taken_from, temper
from reclaim.training.models.forecaster import ALL_HEADS, Heads
from reclaim.training.models.forward import ForwardPass
from reclaim.training.models.survival import CEILING, FLOOR, LAST, N_THRESHOLDS, forecast_of
from reclaim.training.settings import QUANTILE_LEVELS

LAGS: Final = tuple(f"same_hour_{days}d" for days in SAME_HOUR_DAYS)
"""Statistics that are unknown for a task's first days, and marked where they are."""
_OF_RESOURCE: Final = "p98_48h"
"""A statistic of resources only."""
_UNREAD: Final = ("max_7d",)
"""Statistics that came later than the model that ships."""
_STATISTICS: Final = (*(statistic.name for statistic in STATISTIC if statistic.name not in _UNREAD), _OF_RESOURCE)
_SPREADS: Final = ("std_2h", "change_1h")
"""Statistics that are not a level."""
_LEVELS: Final = tuple(name for name in _STATISTICS if name not in {"last", *_SPREADS})
_MEASURED: Final = (*_STATISTICS, *(f"{lag}_missing" for lag in LAGS), "memory")
INPUTS: Final = (*_MEASURED, *(f"{name}_place" for name in (*_LEVELS, *_SPREADS)))
"""Inputs of one target: what is known of its own signal, in shares of the limit, marks, whether it is memory, and where
each statistic lies among the thresholds of the curve. No clock, no age, no size of the limit, and nothing of another
signal: all these mean something else in another cell."""
FIRST: Final = _STATISTICS.index("last")
"""Position of what is used now."""
_EVER: Final = _STATISTICS.index("max_ever")
"""Position of the statistic that is known from the first measurement on; before it nothing is forecast."""
SHARES: Final = len(_STATISTICS)
"""Number of the inputs, the first ones, that are shares of the limit."""
_COLUMNS: Final = np.array(
    [[AT[f"{signal}_{name}"] if f"{signal}_{name}" in AT.__members__ else -1 for name in _STATISTICS]
     for signal in SIGNALS]
)  # fmt: skip
"""Feature of each target and statistic; -1 where there is none."""
_LEVELS_AT: Final = np.array([_STATISTICS.index(name) for name in _LEVELS])
_SPREADS_AT: Final = np.array([_STATISTICS.index(name) for name in _SPREADS])
_LEAST: Final = 1e-4
"""Least share of the limit that has a place."""
_FARTHEST: Final = 4.0
"""Farthest place of a level, in distances from current usage to the limit: near the limit this distance is short."""
_WIDEST: Final = 8.0
"""Largest spread, over what is used now, which may be near 0."""
_LAGS: Final = np.array([_STATISTICS.index(lag) for lag in LAGS])
_IS_MEMORY: Final = np.array([float(target == "memory") for target in TARGETS], np.float32)
assert TARGETS[: len(RESOURCES)] == RESOURCES


def inputs_of(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the inputs of each target; float32, shape (n, n_features) to (n, n_targets, len(INPUTS)).

    A level's place is its share of the way, by the logarithm, from what is used now to the limit, as thresholds are
    (``survival.thresholds_of``): 0 is what is used now. A spread's place is its ratio to what is used now. Both are
    squared, with their sign: the network takes the fourth root of all inputs.
    """
    out = np.empty((len(x), len(TARGETS), len(INPUTS)), np.float32)
    _inputs(x, _COLUMNS, _LAGS, _IS_MEMORY, out)
    return out


@numba.njit(**LENT)
def _inputs(x: Any, columns: Any, lags: Any, is_memory: Any, out: Any) -> None:
    shares = columns.shape[1]
    for i in range(len(out)):
        for t in range(out.shape[1]):
            to = out[i, t]
            for k in range(shares):
                to[k] = x[i, columns[t, k]] if columns[t, k] >= 0 else np.float32(np.nan)
            for k in range(len(lags)):
                to[shares + k] = np.float32(1.0 if np.isnan(to[lags[k]]) else 0.0)
            to[shares + len(lags)] = is_memory[t]
            _place(to)


def place(inputs: NDArray[np.float32]) -> None:
    """Compute the places again, in place, from the other inputs; float32, shape (n, len(INPUTS))."""
    _place_all(inputs)


@numba.njit(**LENT)
def _place_all(inputs: Any) -> None:
    for i in range(len(inputs)):
        _place(inputs[i])


@numba.njit(**LENT)
def _place(to: Any) -> None:
    now = to[FIRST]
    now = np.float32(FLOOR) if np.isnan(now) else min(max(now, np.float32(FLOOR)), np.float32(CEILING))
    from_now = math.log(now)
    of_way = np.float32(1.0) / (np.float32(math.log(LAST)) - from_now)
    at = len(_MEASURED)
    for k in _LEVELS_AT:
        if np.isnan(to[k]):
            to[at] = to[k]
        else:
            way = (math.log(max(to[k], np.float32(_LEAST))) - from_now) * of_way
            way = min(max(way, np.float32(-_FARTHEST)), np.float32(_FARTHEST))
            to[at] = way * abs(way)
        at += 1
    for k in _SPREADS_AT:
        if np.isnan(to[k]):
            to[at] = to[k]
        else:
            spread = min(max(to[k] / now, np.float32(-_WIDEST)), np.float32(_WIDEST))
            to[at] = spread * abs(spread)
        at += 1


class PortableForecaster:
    """The portable network behind the numpy interface, on the CPU.

    Parameters
    ----------
    tensors : dict
        The ``state_dict`` of a ``network.SurvivalNetwork`` of one target with the inputs ``INPUTS``, as arrays.
    beyond : Beyond or None
        What the curves are tempered by; None: they are the network's own.

    Attributes
    ----------
    threads : int
        For large calls; the answers do not depend on it.
    """

    PIPELINE: Final = definitions_of(
        FEATURE_NAMES[k] for k in {*_COLUMNS.ravel(), *SO_FAR.largest.ravel(), AT.seen} if k >= 0
    )
    """Definitions of the features that it reads: it outlives a change of the others."""
    FILE: Final = "portable.safetensors"
    heads: Final = Heads(ALL_HEADS.targets, np.zeros(len(HORIZONS_S), np.bool_))
    horizons_s: Final = HORIZONS_S
    quantile_levels: Final = QUANTILE_LEVELS

    def __init__(self, tensors: dict[str, NDArray[np.float32]], beyond: Beyond | None = None) -> None:
        self.tensors = tensors
        self.beyond = beyond
        self.threads = 1
        self._passes: dict[tuple[int, ...], ForwardPass] = {}

    def input_ranges(self) -> None:
        """Return None: the ranges of other cells' features say nothing about this one's."""

    def predict(self, x: NDArray[np.float32], horizon_s: int | None = None) -> Forecast:
        """Return the forecast of each row; it does not predict out-of-memory ends."""
        horizons_s = HORIZONS_S if horizon_s is None else (horizon_s,)
        write, n = self.writer(horizons_s), len(x)
        survival = np.empty((n, len(TARGETS), len(horizons_s), N_THRESHOLDS), np.float32)
        features = np.ascontiguousarray(x, np.float32)

        def curves(rows: slice, thresholds: NDArray[np.float32]) -> None:
            write(survival[rows], thresholds, features[rows])

        unknown = np.full((n, len(horizons_s)), np.nan)
        return forecast_of(survival, features, unknown, horizons_s, QUANTILE_LEVELS, self.threads, curves)

    def writer(self, horizons_s: tuple[int, ...]) -> Callable[..., None]:
        """Return the function that writes the curves of some horizons.

        Its arguments are the curves, float32, shape (n, n_targets, n_horizons, N_THRESHOLDS), their thresholds and the
        features of the rows.
        """
        if horizons_s not in self._passes:
            self._passes[horizons_s] = self._pass_to(horizons_s)
        forward = self._passes[horizons_s]

        def write(survival: NDArray[np.float32], thresholds: NDArray[np.float32], x: NDArray[np.float32]) -> None:
            inputs = inputs_of(x)
            by_target = inputs.reshape(-1, len(INPUTS))
            forward.write(
                by_target, survival.reshape(len(by_target), len(horizons_s), N_THRESHOLDS),
                np.empty((len(by_target), 0)),
            )  # fmt: skip
            survival[np.isnan(inputs[:, :, _EVER])] = np.nan
            temper(survival, thresholds, x, self.beyond, horizons_s, SO_FAR)

        return write

    def _pass_to(self, horizons_s: tuple[int, ...]) -> ForwardPass:
        outputs = np.arange(len(HORIZONS_S) * N_THRESHOLDS).reshape(len(HORIZONS_S), N_THRESHOLDS)
        curves = outputs[[HORIZONS_S.index(horizon_s) for horizon_s in horizons_s]]
        return ForwardPass.of(
            self.tensors, curves=curves, logits=np.zeros(0, np.int64), fitted=np.ones(len(curves), np.bool_)
        )

    def save(self, folder: Path) -> None:
        """Write the weights, the names of the inputs, and what tempers the curves."""
        tensors = {name: np.ascontiguousarray(values) for name, values in self.tensors.items()}
        if self.beyond is not None:
            tensors[KEY] = self.beyond
        content = save(tensors, metadata={"facts": json.dumps({"inputs": INPUTS})})
        (folder / self.FILE).write_bytes(content)  # of a full disk, save_file has an error of its own

    @classmethod
    def load(cls, folder: Path) -> PortableForecaster:
        """Read what ``save`` wrote; ValueError where its inputs are others."""
        with safe_open(folder / cls.FILE, framework="np") as file:
            inputs = tuple(json.loads(file.metadata()["facts"])["inputs"])
            if inputs != INPUTS:
                raise ValueError(f"{cls.FILE}: expected the inputs {INPUTS}, got {inputs}")
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - no mapping
        return cls(tensors, taken_from(tensors, cls.FILE, SO_FAR))
