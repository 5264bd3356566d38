"""Computes the network's forecast on a CPU, compiled; each row's arithmetic is the same in every batch.

A product is one chain of fused multiply-adds for each output, over the inputs in their order. A fused multiply-add is
rounded once, as IEEE 754 says, wherever it is done: a row gives the same bits alone and among a million, in whatever
place, on however many threads. A library's product promises none of that, and wants many rows to be quick.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numba
import numpy as np
from numba.core import types
from numpy.typing import NDArray

from reclaim.data.core import vectors
from reclaim.data.core.arrays import lent
from reclaim.data.core.jit import LENT
from reclaim.data.core.vectors import LANES, WIDE_REGISTERS, in_llvm, numba_tools

CHUNK_ROWS: Final = 64
"""Rows that go through all layers together: what they need stays in a core's own cache."""
_WIDE: Final = (4, 4 * LANES) if WIDE_REGISTERS else (4, LANES)
_NARROW: Final = (8, 2 * LANES) if WIDE_REGISTERS else (4, LANES)
_NARROWEST: Final = (8, LANES) if WIDE_REGISTERS else (4, LANES)
"""Rows and columns of a tile of a layer: of a hidden one, of the steps of curves, of which there are fewer, and of the
few other log-odds. With AVX-512 sixteen vectors of sums are enough for the multipliers of a core never to wait for one,
and as four by four they ask for the fewest loads. The sixteen registers of half a vector that AVX2 has keep four, which
is enough for its multipliers, too: with sixteen vectors most are in memory, and a layer takes 2.7 times as long."""
_WHOLE_ROWS: Final = 8
"""Rows are computed in whole tiles of every kind."""
_LINE: Final = 64
"""Bytes of a cache line, and of a vector: one that lies across two lines takes two loads."""

_ZERO, _ONE = np.float32(0.0), np.float32(1.0)


@dataclass(frozen=True)
class ForwardPass:
    """A network's weights, laid out for ``write``: in panels as wide as a tile, the last one filled up with zeros.

    Attributes
    ----------
    read : int64, shape (n_read,)
        The features with a weight that is not zero; the others would add nothing to any sum.
    scaling : float32, shape (4, n_read)
        As ``network.Scaling``.
    first : float32, shape (W / C, n_read, C)
    deeper : float32, shape (depth - 1, W / C, W, C)
    bias : float32, shape (depth, W)
    steps : float32, shape (J / C, W, C), of other columns C
        To the steps of each curve.
    step_bias : float32, shape (J,)
    odds : float32, shape (K / C, W, C), likewise
        To the other log-odds.
    odds_bias : float32, shape (K,)
    fitted : bool, shape (n_curves + K,)
        The other curves and probabilities are NaN.
    """

    read: NDArray[np.int64]
    scaling: NDArray[np.float32]
    first: NDArray[np.float32]
    deeper: NDArray[np.float32]
    bias: NDArray[np.float32]
    steps: NDArray[np.float32]
    step_bias: NDArray[np.float32]
    odds: NDArray[np.float32]
    odds_bias: NDArray[np.float32]
    fitted: NDArray[np.bool_]

    @classmethod
    def of(
        cls,
        tensors: Mapping[str, NDArray[np.float32]],
        curves: NDArray[np.int64],
        logits: NDArray[np.int64],
        fitted: NDArray[np.bool_],
    ) -> ForwardPass:
        """Return the pass to chosen outputs of a network.

        Parameters
        ----------
        tensors : mapping
            The ``state_dict`` of a ``network.SurvivalNetwork``, as arrays.
        curves : int64, shape (n_curves, n_steps)
            Outputs that are the steps of a curve, lowest threshold first.
        logits : int64, shape (n_logits,)
            Outputs that are log-odds of their own.
        fitted : bool, shape (n_curves + n_logits,)
        """
        layers = sorted({name.rsplit(".", 1)[0] for name in tensors if name.startswith("body.")}, key=_number)
        width = _up(len(tensors[f"{layers[0]}.bias"]), _WIDE[1])
        first, *deeper = (tensors[f"{layer}.weight"].T for layer in layers)
        read = np.flatnonzero(first.any(axis=1))

        def head(outputs: NDArray[np.int64], columns: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
            weight, bias = tensors["head.weight"][outputs].T, tensors["head.bias"][None, outputs]
            return _panels([weight], width, columns)[0], _filled(bias, 1, _up(len(outputs), columns))[0]

        steps, step_bias = head(curves.ravel(), _NARROW[1])
        odds, odds_bias = head(logits, _NARROWEST[1])
        return cls(
            read=read,
            scaling=np.stack([tensors[name][read] for name in ("mean", "scale", "low", "high")]),
            first=_panels([first[read]], len(read), _WIDE[1])[0],
            deeper=_panels(deeper, width, _WIDE[1]),
            bias=np.concatenate([_filled(tensors[f"{layer}.bias"][None], 1, width) for layer in layers]),
            steps=steps,
            step_bias=step_bias,
            odds=odds,
            odds_bias=odds_bias,
            fitted=fitted,
        )

    def write(self, x: NDArray[np.float32], survival: NDArray[np.float32], probability: NDArray[np.float64]) -> None:
        """Write survival curves and probabilities.

        Parameters
        ----------
        x : float32, shape (n, n_features)
            NaN counts as the mean.
        survival : float32, shape (n, n_curves, n_steps), written
            Product of the probabilities of the steps so far, so it never rises.
        probability : float64, shape (n, n_logits), written
        """
        inputs = (self.read, self.scaling)
        layers = (self.first, self.deeper, self.bias, self.steps, self.step_bias, self.odds, self.odds_bias)
        widest = max(_up(len(self.read), LANES), self.bias.shape[1], len(self.step_bias), len(self.odds_bias))
        room = _zeros(4, min(CHUNK_ROWS, _up(len(x), _WHOLE_ROWS)), widest)
        (features,) = lent(x)
        _run(features, inputs, layers, self.fitted, room, survival, probability)


def _number(layer: str) -> int:
    return int(layer.split(".")[1])


def _up(n: int, unit: int) -> int:
    return -(-n // unit) * unit


def _filled(values: NDArray[np.float32], rows: int, columns: int) -> NDArray[np.float32]:
    out = np.zeros((rows, columns), np.float32)
    out[: values.shape[0], : values.shape[1]] = values
    return out


def _zeros(*shape: int) -> NDArray[np.float32]:
    """Return zeros that begin on a cache line."""
    room = np.zeros(math.prod(shape) * 4 + _LINE, np.uint8)
    start = -room.ctypes.data % _LINE
    return room[start : start + len(room) - _LINE].view(np.float32).reshape(shape)


def _panels(weights: Sequence[NDArray[np.float32]], depth: int, columns: int) -> NDArray[np.float32]:
    """Return weights of one width, each of shape (inputs, outputs), as (n, panels, depth, columns)."""
    n_panels = -(-weights[0].shape[1] // columns) if weights else 1
    out = _zeros(len(weights), n_panels, depth, columns)
    for panels, weight in zip(out, weights, strict=True):
        panels[:] = _filled(weight, depth, n_panels * columns).reshape(depth, n_panels, columns).swapaxes(0, 1)
    return out


def _sigmoid(builder: Any, x: Any, share_of: Any = None) -> Any:
    """Return 1 / (1 + exp(-x)) of a vector, or that share of another one."""
    one = vectors.constant(1.0)
    return builder.fdiv(share_of or one, builder.fadd(one, vectors.exponential(builder, builder.fneg(x))))


def _tile(n_rows: int, n_columns: int, activation: Callable[[Any, Any], Any]) -> Any:
    """Return what computes a tile of a layer; all of its arguments but the last two are C-contiguous float32."""
    lanes = range(0, n_columns, LANES)

    @in_llvm
    def tile(_: Any, inputs: Any, weight: Any, bias: Any, out: Any, i: Any, p: Any) -> tuple[Any, Callable[..., Any]]:
        """Write the rows from i on, of the columns of the panel p of the weight.

        For each element, in registers: ``sum = bias[j]``, ``for k: sum = fma(inputs[i, k], weight[p, k, j], sum)``;
        what is written is the activation of the sum.
        """

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            a, w, b, o = vectors.arrays(context, builder, signature, args)
            a_width, o_width = (vectors.shape_of(builder, array)[1] for array in (a, o))
            depth = vectors.shape_of(builder, w)[1]
            integer = depth.type
            rows = [builder.add(args[4], integer(row)) for row in range(n_rows)]
            first = builder.mul(args[5], integer(n_columns))
            panel = builder.gep(w.data, [builder.mul(first, depth)])
            begins = [builder.gep(a.data, [builder.mul(row, a_width)]) for row in rows]

            biases = [vectors.load(builder, b.data, first, integer(lane)) for lane in lanes]
            sums = [numba_tools.alloca_once_value(builder, value) for _ in rows for value in biases]

            def add(k: Any) -> None:
                row_of_panel = builder.mul(k, integer(n_columns))
                weights = [vectors.load(builder, panel, row_of_panel, integer(lane)) for lane in lanes]
                for n, begin in enumerate(begins):
                    value = vectors.spread(builder, builder.load(builder.gep(begin, [k])))
                    for total, columns in zip(sums[n * len(weights) :], weights, strict=False):
                        builder.store(vectors.fma(builder, value, columns, builder.load(total)), total)

            pairs = builder.sub(depth, builder.and_(depth, integer(1)))
            with numba_tools.for_range_slice(builder, integer(0), pairs, integer(2)) as (k, _):
                add(k)
                add(builder.add(k, integer(1)))
            with numba_tools.for_range_slice(builder, pairs, depth, integer(1)) as (k, _):
                add(k)
            places = [(builder.mul(row, o_width), first, integer(lane)) for row in rows for lane in lanes]
            for place, total in zip(places, sums, strict=True):
                value = activation(builder, builder.load(total))
                builder.store(value, vectors.at(builder, o.data, *place), align=4)
            return context.get_dummy_value()

        return types.void(inputs, weight, bias, out, i, p), generate

    return tile


_hidden_tile = _tile(*_WIDE, lambda builder, total: _sigmoid(builder, total, total))
_step_tile = _tile(*_NARROW, _sigmoid)
_odds_tile = _tile(*_NARROWEST, _sigmoid)
_HIDDEN, _STEPS, _ODDS = range(3)
"""Kinds of layers, each with its own tile."""
_ROWS: Final = _WIDE[0], _NARROW[0], _NARROWEST[0]
"""Rows of the tile of each kind."""


@numba.njit(**LENT)
def _run(x: Any, inputs: Any, layers: Any, fitted: Any, room: Any, survival: Any, probability: Any) -> None:
    first, deeper, bias, steps, step_bias, odds, odds_bias = layers
    z, hidden, other, step = room[0], room[1], room[2], room[3]
    n_curves, n_steps = survival.shape[1], survival.shape[2]
    for start in range(0, len(x), CHUNK_ROWS):
        n = min(CHUNK_ROWS, len(x) - start)
        whole = -(-n // _WHOLE_ROWS) * _WHOLE_ROWS  # what lies in the rows behind them changes nothing
        _standardise(x, start, n, inputs, z)
        _layer(z, first, bias[0], hidden, whole, _HIDDEN)
        for layer in range(len(deeper)):
            _layer(hidden, deeper[layer], bias[layer + 1], other, whole, _HIDDEN)
            hidden, other = other, hidden
        _layer(hidden, steps, step_bias, step, whole, _STEPS)
        _layer(hidden, odds, odds_bias, other, whole, _ODDS)
        for i in range(n):
            for curve in range(n_curves):
                left = _ONE if fitted[curve] else np.float32(math.nan)
                for j in range(n_steps):
                    left *= step[i, curve * n_steps + j]
                    survival[start + i, curve, j] = left
            for h in range(probability.shape[1]):
                probability[start + i, h] = other[i, h] if fitted[n_curves + h] else math.nan


@numba.njit(**LENT)
def _standardise(x: Any, start: int, n: int, inputs: Any, z: Any) -> None:
    """Fourth root, mean and scale, NaN to the mean, then cut off: as ``network.SurvivalNetwork.forward``."""
    read, scaling = inputs
    mean, scale, low, high = scaling[0], scaling[1], scaling[2], scaling[3]
    every = len(read) == x.shape[1]
    for i in range(n):
        values, out = x[start + i], z[i]
        for k in range(len(read)):
            out[k] = values[k if every else read[k]]
        for k in range(len(read)):
            v = out[k]
            root = math.sqrt(math.sqrt(abs(v)))
            v = ((root if v >= _ZERO else -root) - mean[k]) / scale[k]
            v = v if v == v else _ZERO  # only NaN differs from itself
            v = v if v > low[k] else low[k]
            out[k] = v if v < high[k] else high[k]


@numba.njit(**LENT)
def _layer(inputs: Any, weight: Any, bias: Any, out: Any, n: int, kind: int) -> None:
    """Write the first n rows of a layer of a kind, n a multiple of ``_WHOLE_ROWS``."""
    for panel in range(len(weight)):
        for i in range(0, n, _ROWS[kind]):
            if kind == _HIDDEN:
                _hidden_tile(inputs, weight, bias, out, i, panel)
            elif kind == _STEPS:
                _step_tile(inputs, weight, bias, out, i, panel)
            else:
                _odds_tile(inputs, weight, bias, out, i, panel)
