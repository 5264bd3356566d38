"""The network's pass on a CPU, compiled: each row's arithmetic is laid down step by step, so no batch can change it.

A product is one chain of fused multiply-adds for each output, over the inputs in their order. A fused multiply-add is
rounded once, as IEEE 754 says, wherever it is done: a row gives the same bits alone and among a million, in whatever
place, on however many threads. A library's product promises none of that, and wants many rows to be quick.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from reclaim.features.compiled import LENT
from reclaim.features.kin import in_parts
from reclaim.training.settings import TRANSFORMS

CHUNK_ROWS: Final = 64
"""Rows that go through all layers together: what they need stays in a core's own cache."""
_LANES: Final = 16
_TILE_ROWS: Final = 8
_TILE_COLUMNS: Final = 2 * _LANES
"""A tile of a product, 8 rows by two vectors of 16, is about what the registers of a core with AVX-512 hold; other
cores take longer, to the same bits."""

_SQRT, _LOG1P = TRANSFORMS.index("sqrt"), TRANSFORMS.index("log1p")
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)

# exp(x) = 2^n exp(r): n is the whole number next to x / log 2, which adding 1.5 * 2^23 rounds to; log 2 in two parts,
# the first of few digits; the polynomial is that of Cephes' expf (Moshier, netlib.org/cephes), right to 2e-7
_LEAST, _MOST = np.float32(-87.0), np.float32(88.0)
_PER_LOG2, _ROUND = np.float32(1.44269504), np.float32(12582912.0)
_LOG2, _LOG2_REST = np.float32(0.693359375), np.float32(-2.12194440e-4)
_P0, _P1, _P2 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
_P3, _P4, _P5 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)


@dataclass(frozen=True)
class ForwardPass:
    """A network's weights, laid out for ``run``; widths are filled up with zeros to whole tiles.

    Attributes
    ----------
    scaling : float32, shape (4, n_features)
        As ``networks.Scaling``.
    first : float32, shape (n_features, W)
    deeper : float32, shape (depth - 1, W, W)
    bias : float32, shape (depth, W)
    head : float32, shape (W, J)
        To the quantile levels of each curve, then to the logits.
    line : float32, shape (n_features, J)
    head_bias : float32, shape (J,)
    fitted : bool, shape (n_curves,)
        The other curves are NaN.
    n_logits, n_levels : int
    transform : int
        Position in ``settings.TRANSFORMS``.
    """

    scaling: NDArray[np.float32]
    first: NDArray[np.float32]
    deeper: NDArray[np.float32]
    bias: NDArray[np.float32]
    head: NDArray[np.float32]
    line: NDArray[np.float32]
    head_bias: NDArray[np.float32]
    fitted: NDArray[np.bool_]
    n_logits: int
    n_levels: int
    transform: int

    @classmethod
    def of(
        cls,
        tensors: Mapping[str, NDArray[np.float32]],
        curves: NDArray[np.int64],
        logits: NDArray[np.int64],
        fitted: NDArray[np.bool_],
        transform: str,
    ) -> ForwardPass:
        """Return the pass to chosen outputs of a network.

        Parameters
        ----------
        tensors : mapping
            The ``state_dict`` of a ``networks.QuantileNetwork``, as arrays.
        curves : int64, shape (n_curves, n_levels)
            Outputs that are the levels of a curve, lowest first.
        logits : int64, shape (n_logits,)
            Outputs that are log-odds.
        fitted : bool, shape (n_curves,)
        transform : str
            One of ``settings.TRANSFORMS``.
        """
        layers = sorted({name.rsplit(".", 1)[0] for name in tensors if name.startswith("body.")}, key=_number)
        chosen = np.concatenate([curves.ravel(), logits])
        n_features, width = len(tensors["mean"]), _whole(len(tensors[f"{layers[0]}.bias"]))
        weight = [tensors[f"{layer}.weight"].T for layer in layers]
        return cls(
            scaling=np.stack([tensors[name] for name in ("mean", "scale", "low", "high")]),
            first=_filled(weight[0], n_features, width),
            deeper=np.array([_filled(w, width, width) for w in weight[1:]], np.float32).reshape(-1, width, width),
            bias=np.concatenate([_filled(tensors[f"{layer}.bias"][None], 1, width) for layer in layers]),
            head=_filled(tensors["head.weight"][chosen].T, width, _whole(len(chosen))),
            line=_filled(tensors["line.weight"][chosen].T, n_features, _whole(len(chosen))),
            head_bias=_filled(tensors["head.bias"][None, chosen], 1, _whole(len(chosen)))[0],
            fitted=fitted,
            n_logits=len(logits),
            n_levels=curves.shape[1],
            transform=TRANSFORMS.index(transform),
        )

    def run(self, x: NDArray[np.float32], threads: int = 1) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return curves that rise and are not negative, as no usage is, and probabilities.

        Parameters
        ----------
        x : float32, shape (n, n_features)
            NaN counts as the mean.
        threads : int
            For large calls; the answers do not depend on it.

        Returns
        -------
        curves : float64, shape (n, n_curves, n_levels)
        probability : float64, shape (n, n_logits)
        """
        n, (width, outputs) = len(x), self.head.shape
        curves = np.empty((n, len(self.fitted), self.n_levels))
        probability = np.empty((n, self.n_logits))
        features = np.ascontiguousarray(x, np.float32)
        weights = (self.scaling, self.first, self.deeper, self.bias, self.head, self.line, self.head_bias, self.fitted)

        def run(part: int, parts: int) -> None:
            rows = min(CHUNK_ROWS, -(-n // _TILE_ROWS) * _TILE_ROWS)
            sizes = (self.first.shape[0], width, width, outputs, outputs)
            room = tuple(np.zeros((rows, size), np.float32) for size in sizes)
            _run(features, part, parts, weights, self.transform, room, curves, probability)

        in_parts(run, n, threads)
        return curves, probability


def _number(layer: str) -> int:
    return int(layer.split(".")[1])


def _whole(n: int) -> int:
    return -(-n // _TILE_COLUMNS) * _TILE_COLUMNS


def _filled(values: NDArray[np.float32], rows: int, columns: int) -> NDArray[np.float32]:
    out = np.zeros((rows, columns), np.float32)
    out[: values.shape[0], : values.shape[1]] = values
    return out


_in_llvm: Final[Any] = intrinsic
_numba: Final[Any] = cgutils
"""Both as anything: of their types numba tells too little."""


@_in_llvm
def _fma(_: Any, a: Any, b: Any, c: Any) -> tuple[Any, Callable[..., Any]]:
    """Return ``a * b + c``, rounded once."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.fma(*args)

    return a(a, b, c), generate


@_in_llvm
def _power_of_two(_: Any, shifted: Any) -> tuple[Any, Callable[..., Any]]:
    """Return 2 to the whole number to which ``_ROUND`` was added."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        integer = ir.IntType(32)
        biased = builder.add(builder.bitcast(args[0], integer), ir.Constant(integer, 127))
        return builder.bitcast(builder.shl(biased, ir.Constant(integer, 23)), ir.FloatType())

    return types.float32(shifted), generate


@_in_llvm
def _add_tile(_: Any, inputs: Any, weight: Any, out: Any, i: Any, j: Any) -> tuple[Any, Callable[..., Any]]:
    """Add inputs @ weight to the tile of ``out`` whose corner is at row i, column j; all C-contiguous float32.

    For each element: ``for k: out[i, j] = fma(inputs[i, k], weight[k, j], out[i, j])``, with the tile in registers.
    """
    vector, int32 = ir.VectorType(ir.FloatType(), _LANES), ir.IntType(32)
    undefined, first_lane = ir.Constant(vector, ir.Undefined), ir.Constant(ir.VectorType(int32, _LANES), [0] * _LANES)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        a, w, o = (
            context.make_array(t)(context, builder, v) for t, v in zip(signature.args[:3], args[:3], strict=True)
        )
        depth, width = (_numba.unpack_tuple(builder, array.shape)[1] for array in (a, w))
        fma = _numba.get_or_insert_function(
            builder.module, ir.FunctionType(vector, [vector] * 3), f"llvm.fma.v{_LANES}f32"
        )
        rows = [builder.add(args[3], ir.Constant(args[3].type, row)) for row in range(_TILE_ROWS)]

        def at(array: Any, row: Any, lane: int) -> Any:
            column = builder.add(args[4], ir.Constant(args[4].type, lane))
            place = builder.gep(array.data, [builder.add(builder.mul(row, width), column)])
            return builder.bitcast(place, vector.as_pointer())

        places = [(row, at(o, row, lane)) for row in rows for lane in range(0, _TILE_COLUMNS, _LANES)]
        sums = [_numba.alloca_once_value(builder, builder.load(place, align=4)) for _, place in places]
        with _numba.for_range(builder, depth) as loop:
            weights = [builder.load(at(w, loop.index, lane), align=4) for lane in range(0, _TILE_COLUMNS, _LANES)]
            for n, row in enumerate(rows):
                value = builder.load(builder.gep(a.data, [builder.add(builder.mul(row, depth), loop.index)]))
                spread = builder.insert_element(undefined, value, ir.Constant(int32, 0))
                spread = builder.shuffle_vector(spread, undefined, first_lane)
                for k, columns in enumerate(weights, n * len(weights)):
                    builder.store(builder.call(fma, [spread, columns, builder.load(sums[k])]), sums[k])
        for (_, place), total in zip(places, sums, strict=True):
            builder.store(builder.load(total), place, align=4)
        return context.get_dummy_value()

    return types.void(inputs, weight, out, i, j), generate


@numba.njit(**LENT)
def _run(
    x: Any, part: int, parts: int, weights: Any, transform: int, room: Any, curves: Any, probability: Any
) -> None:  # fmt: skip
    scaling, first, deeper, bias, head, line, head_bias, fitted = weights
    z, hidden, other, raw, step = room
    for start in range(part * CHUNK_ROWS, len(x), parts * CHUNK_ROWS):
        n = min(CHUNK_ROWS, len(x) - start)
        whole = -(-n // _TILE_ROWS) * _TILE_ROWS  # what lies in the rows behind them changes nothing
        _standardise(x, start, n, scaling, z)
        _begin(bias[0], hidden, whole)
        _add_product(z, first, hidden, whole)
        _silu(hidden, whole)
        for layer in range(len(deeper)):
            _begin(bias[layer + 1], other, whole)
            _add_product(hidden, deeper[layer], other, whole)
            _silu(other, whole)
            hidden, other = other, hidden
        _begin(head_bias, raw, whole)
        _add_product(hidden, head, raw, whole)
        step[:whole] = _ZERO
        _add_product(z, line, step, whole)
        _add(step, raw, n)
        _steps(raw, step, n)
        for i in range(n):
            _add_up(raw[i], step[i], fitted, transform, curves[start + i])
            logit = curves.shape[1] * curves.shape[2]
            for h in range(probability.shape[1]):
                probability[start + i, h] = _ONE / (_ONE + _exp(-raw[i, logit + h]))


@numba.njit(**LENT)
def _standardise(x: Any, start: int, n: int, scaling: Any, z: Any) -> None:
    """Square root of the size, mean and scale, NaN to the mean, then cut off: as ``networks.QuantileNetwork.raw``."""
    mean, scale, low, high = scaling[0], scaling[1], scaling[2], scaling[3]
    for i in range(n):
        values, out = x[start + i], z[i]
        for k in range(len(mean)):
            v = values[k]
            root = math.sqrt(abs(v))
            v = ((root if v >= _ZERO else -root) - mean[k]) / scale[k]
            v = v if v == v else _ZERO  # only NaN differs from itself
            v = v if v > low[k] else low[k]
            out[k] = v if v < high[k] else high[k]


@numba.njit(**LENT)
def _begin(bias: Any, out: Any, n: int) -> None:
    for i in range(n):
        for j in range(len(bias)):
            out[i, j] = bias[j]


@numba.njit(**LENT)
def _add_product(inputs: Any, weight: Any, out: Any, n: int) -> None:
    for j in range(0, weight.shape[1], _TILE_COLUMNS):
        for i in range(0, n, _TILE_ROWS):
            _add_tile(inputs, weight, out, i, j)


@numba.njit(**LENT)
def _add(values: Any, out: Any, n: int) -> None:
    for i in range(n):
        for j in range(out.shape[1]):
            out[i, j] += values[i, j]


@numba.njit(**LENT)
def _exp(x: Any) -> Any:
    x = min(max(x, _LEAST), _MOST)
    shifted = _fma(x, _PER_LOG2, _ROUND)
    n = shifted - _ROUND
    r = _fma(n, -_LOG2_REST, _fma(n, -_LOG2, x))
    p = _fma(_fma(_fma(_fma(_fma(_P0, r, _P1), r, _P2), r, _P3), r, _P4), r, _P5)
    return (_fma(p, r * r, r) + _ONE) * _power_of_two(shifted)


@numba.njit(**LENT)
def _silu(values: Any, n: int) -> None:
    for i in range(n):
        row = values[i]
        for j in range(len(row)):
            row[j] = row[j] / (_ONE + _exp(-row[j]))


@numba.njit(**LENT)
def _steps(raw: Any, step: Any, n: int) -> None:
    """Write increments, never below zero: as ``networks.steps``."""
    for i in range(n):
        values, out = raw[i], step[i]
        for j in range(len(values)):
            out[j] = values[j] + _ONE if values[j] > _ZERO else _exp(values[j])


@numba.njit(**LENT)
def _add_up(raw: Any, step: Any, fitted: Any, transform: int, out: Any) -> None:
    """Write the curves of a row, transformed back; shapes (J,), (J,), (n_curves,) and (n_curves, n_levels)."""
    n_levels = out.shape[1]
    for curve in range(len(fitted)):
        total = np.float64(raw[curve * n_levels])
        for q in range(n_levels):
            if q > 0:
                total += np.float64(step[curve * n_levels + q])
            share = max(total, 0.0)
            if transform == _SQRT:
                share *= share
            elif transform == _LOG1P:
                share = math.expm1(share)
            out[curve, q] = share if fitted[curve] else math.nan
