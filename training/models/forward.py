"""Computes the network's forecast on a CPU, compiled; each row's arithmetic is the same in every batch.

A product is one chain of fused multiply-adds for each output, over the inputs in their order. A fused multiply-add is
rounded once, as IEEE 754 says, wherever it is done: a row gives the same bits alone and among a million, in whatever
place, on however many threads. A library's product promises none of that, and wants many rows to be quick.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from reclaim.data.core.jit import LENT
from reclaim.data.core.parallel import in_parts

CHUNK_ROWS: Final = 64
"""Rows that go through all layers together: what they need stays in a core's own cache."""
_LANES: Final = 16
_WIDE: Final = (4, 4 * _LANES)
_NARROW: Final = (8, 2 * _LANES)
"""Rows and columns of a tile of a layer: of a hidden one, and of outputs, of which there are fewer. Sixteen vectors of
sums are enough for the multipliers of a core with AVX-512 never to wait for one, and as four by four they ask for the
fewest loads; other cores take longer, to the same bits."""
_WHOLE_ROWS: Final = 8
"""Rows are computed in whole tiles of either kind."""
_LINE: Final = 64
"""Bytes of a cache line, and of a vector: one that lies across two lines takes two loads."""

_ZERO, _ONE = np.float32(0.0), np.float32(1.0)

# exp(x) = 2^n exp(r): n is the whole number next to x / log 2, which adding 1.5 * 2^23 rounds to; log 2 in two parts,
# the first of few digits; the polynomial is that of Cephes' expf (Moshier, netlib.org/cephes), right to 2e-7
_LEAST, _MOST = np.float32(-87.0), np.float32(88.0)
_PER_LOG2, _ROUND = np.float32(1.44269504), np.float32(12582912.0)
_LOG2, _LOG2_REST = np.float32(0.693359375), np.float32(-2.12194440e-4)
_POLYNOMIAL = tuple(
    np.float32(p)
    for p in (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
)


@dataclass(frozen=True)
class ForwardPass:
    """A network's weights, laid out for ``run``: in panels as wide as a tile, the last one filled up with zeros.

    Attributes
    ----------
    scaling : float32, shape (4, n_features)
        As ``network.Scaling``.
    first : float32, shape (W / 64, n_features, 64)
    deeper : float32, shape (depth - 1, W / 64, W, 64)
    bias : float32, shape (depth, W)
    head : float32, shape (J / 32, W, 32)
        To the steps of each curve, then to the other log-odds.
    head_bias : float32, shape (J,)
    fitted : bool, shape (n_curves + n_logits,)
        The other curves and probabilities are NaN.
    n_logits, n_steps : int
    """

    scaling: NDArray[np.float32]
    first: NDArray[np.float32]
    deeper: NDArray[np.float32]
    bias: NDArray[np.float32]
    head: NDArray[np.float32]
    head_bias: NDArray[np.float32]
    fitted: NDArray[np.bool_]
    n_logits: int
    n_steps: int

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
        chosen = np.concatenate([curves.ravel(), logits])
        n_features, width = len(tensors["mean"]), _up(len(tensors[f"{layers[0]}.bias"]), _WIDE[1])
        first, *deeper = (tensors[f"{layer}.weight"].T for layer in layers)
        head_bias = _filled(tensors["head.bias"][None, chosen], 1, _up(len(chosen), _NARROW[1]))[0]
        return cls(
            scaling=np.stack([tensors[name] for name in ("mean", "scale", "low", "high")]),
            first=_panels([first], n_features, _WIDE[1])[0],
            deeper=_panels(deeper, width, _WIDE[1]),
            bias=np.concatenate([_filled(tensors[f"{layer}.bias"][None], 1, width) for layer in layers]),
            head=_panels([tensors["head.weight"][chosen].T], width, _NARROW[1])[0],
            head_bias=head_bias,
            fitted=fitted,
            n_logits=len(logits),
            n_steps=curves.shape[1],
        )

    def run(self, x: NDArray[np.float32], threads: int = 1) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
        """Return survival curves and probabilities.

        Parameters
        ----------
        x : float32, shape (n, n_features)
            NaN counts as the mean.
        threads : int
            For large calls; the answers do not depend on it.

        Returns
        -------
        survival : float32, shape (n, n_curves, n_steps)
            Product of the probabilities of the steps so far, so it never rises.
        probability : float64, shape (n, n_logits)
        """
        n = len(x)
        survival = np.empty((n, len(self.fitted) - self.n_logits, self.n_steps), np.float32)
        probability = np.empty((n, self.n_logits))
        features = np.ascontiguousarray(x, np.float32)
        weights = (self.scaling, self.first, self.deeper, self.bias, self.head, self.head_bias, self.fitted)
        widest = max(_up(self.scaling.shape[1], _LANES), self.bias.shape[1], len(self.head_bias))

        def run(part: int, parts: int) -> None:
            room = _zeros(4, min(CHUNK_ROWS, _up(n, _WHOLE_ROWS)), widest)
            _run(features, part, parts, weights, room, survival, probability)

        in_parts(run, n, threads)
        return survival, probability


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


_in_llvm: Final[Any] = intrinsic
_numba: Final[Any] = cgutils
"""Typed as anything: numba's own types say too little."""


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Return ``a * b + c``, rounded once, of numbers or of vectors."""
    name = f"llvm.fma.v{a.type.count}f32" if isinstance(a.type, ir.VectorType) else "llvm.fma.f32"
    fma = _numba.get_or_insert_function(builder.module, ir.FunctionType(a.type, [a.type] * 3), name)
    return builder.call(fma, [a, b, c])


def _exponential(builder: Any, x: Any) -> Any:
    """Return exp(x) of a number or of a vector."""
    count = x.type.count if isinstance(x.type, ir.VectorType) else 0
    integers = ir.VectorType(ir.IntType(32), count) if count else ir.IntType(32)

    def of(constant: Any, kind: Any = x.type) -> Any:
        return ir.Constant(kind, [constant] * count if count else constant)

    def fma(a: Any, b: Any, c: Any) -> Any:
        return _fma(builder, a, b, c)

    for sign, bound in ((">", of(float(_LEAST))), ("<", of(float(_MOST)))):
        x = builder.select(builder.fcmp_ordered(sign, bound, x), bound, x)  # what is not a number stays so
    shifted = fma(x, of(float(_PER_LOG2)), of(float(_ROUND)))
    n = builder.fsub(shifted, of(float(_ROUND)))
    r = fma(n, of(-float(_LOG2_REST)), fma(n, of(-float(_LOG2)), x))
    highest, *others = (of(float(p)) for p in _POLYNOMIAL)
    p = functools.reduce(lambda total, coefficient: fma(total, r, coefficient), others, highest)
    biased = builder.add(builder.bitcast(shifted, integers), of(127, integers))
    power = builder.bitcast(builder.shl(biased, of(23, integers)), x.type)
    return builder.fmul(builder.fadd(fma(p, builder.fmul(r, r), r), of(1.0)), power)


@_in_llvm
def exp32(_: Any, x: Any) -> tuple[Any, Callable[..., Any]]:
    """Return exp(x)."""
    return x(x), lambda _context, builder, _signature, args: _exponential(builder, args[0])


def _sigmoid(builder: Any, x: Any, share_of: Any = None) -> Any:
    """Return 1 / (1 + exp(-x)) of a vector, or that share of another one."""
    one = ir.Constant(x.type, [1.0] * x.type.count)
    return builder.fdiv(share_of or one, builder.fadd(one, _exponential(builder, builder.fneg(x))))


def _tile(n_rows: int, n_columns: int, activation: Callable[[Any, Any], Any]) -> Any:
    """Return what computes a tile of a layer; all of its arguments but the last two are C-contiguous float32."""
    vector, int32 = ir.VectorType(ir.FloatType(), _LANES), ir.IntType(32)
    undefined, first_lane = ir.Constant(vector, ir.Undefined), ir.Constant(ir.VectorType(int32, _LANES), [0] * _LANES)
    lanes = range(0, n_columns, _LANES)

    @_in_llvm
    def tile(_: Any, inputs: Any, weight: Any, bias: Any, out: Any, i: Any, p: Any) -> tuple[Any, Callable[..., Any]]:
        """Write the rows from i on, of the columns of the panel p of the weight.

        For each element, in registers: ``sum = bias[j]``, ``for k: sum = fma(inputs[i, k], weight[p, k, j], sum)``;
        what is written is the activation of the sum.
        """

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            a, w, b, o = (
                context.make_array(t)(context, builder, v) for t, v in zip(signature.args[:4], args[:4], strict=True)
            )
            a_width, o_width = (_numba.unpack_tuple(builder, array.shape)[1] for array in (a, o))
            depth = _numba.unpack_tuple(builder, w.shape)[1]
            integer = depth.type
            rows = [builder.add(args[4], integer(row)) for row in range(n_rows)]
            first = builder.mul(args[5], integer(n_columns))
            panel = builder.gep(w.data, [builder.mul(first, depth)])
            begins = [builder.gep(a.data, [builder.mul(row, a_width)]) for row in rows]

            def at(start: Any, *way: Any) -> Any:
                return builder.bitcast(builder.gep(start, [functools.reduce(builder.add, way)]), vector.as_pointer())

            biases = [builder.load(at(b.data, first, integer(lane)), align=4) for lane in lanes]
            sums = [_numba.alloca_once_value(builder, value) for _ in rows for value in biases]

            def add(k: Any) -> None:
                row_of_panel = builder.mul(k, integer(n_columns))
                weights = [builder.load(at(panel, row_of_panel, integer(lane)), align=4) for lane in lanes]
                for n, begin in enumerate(begins):
                    value = builder.insert_element(undefined, builder.load(builder.gep(begin, [k])), int32(0))
                    spread = builder.shuffle_vector(value, undefined, first_lane)
                    for total, columns in zip(sums[n * len(weights) :], weights, strict=False):
                        builder.store(_fma(builder, spread, columns, builder.load(total)), total)

            pairs = builder.sub(depth, builder.and_(depth, integer(1)))
            with _numba.for_range_slice(builder, integer(0), pairs, integer(2)) as (k, _):
                add(k)
                add(builder.add(k, integer(1)))
            with _numba.for_range_slice(builder, pairs, depth, integer(1)) as (k, _):
                add(k)
            places = [at(o.data, builder.mul(row, o_width), first, integer(lane)) for row in rows for lane in lanes]
            for place, total in zip(places, sums, strict=True):
                builder.store(activation(builder, builder.load(total)), place, align=4)
            return context.get_dummy_value()

        return types.void(inputs, weight, bias, out, i, p), generate

    return tile


_hidden_tile = _tile(*_WIDE, lambda builder, total: _sigmoid(builder, total, total))
_output_tile = _tile(*_NARROW, _sigmoid)


@numba.njit(**LENT)
def _run(x: Any, part: int, parts: int, weights: Any, room: Any, survival: Any, probability: Any) -> None:
    scaling, first, deeper, bias, head, head_bias, fitted = weights
    z, hidden, other, step = room[0], room[1], room[2], room[3]
    n_curves, n_steps = survival.shape[1], survival.shape[2]
    for start in range(part * CHUNK_ROWS, len(x), parts * CHUNK_ROWS):
        n = min(CHUNK_ROWS, len(x) - start)
        whole = -(-n // _WHOLE_ROWS) * _WHOLE_ROWS  # what lies in the rows behind them changes nothing
        _standardise(x, start, n, scaling, z)
        _layer(z, first, bias[0], hidden, whole)
        for layer in range(len(deeper)):
            _layer(hidden, deeper[layer], bias[layer + 1], other, whole)
            hidden, other = other, hidden
        _layer(hidden, head, head_bias, step, whole)
        for i in range(n):
            for curve in range(n_curves):
                left = _ONE if fitted[curve] else np.float32(math.nan)
                for j in range(n_steps):
                    left *= step[i, curve * n_steps + j]
                    survival[start + i, curve, j] = left
            for h in range(probability.shape[1]):
                p = step[i, n_curves * n_steps + h]
                probability[start + i, h] = p if fitted[n_curves + h] else math.nan


@numba.njit(**LENT)
def _standardise(x: Any, start: int, n: int, scaling: Any, z: Any) -> None:
    """Fourth root, mean and scale, NaN to the mean, then cut off: as ``network.SurvivalNetwork.forward``."""
    mean, scale, low, high = scaling[0], scaling[1], scaling[2], scaling[3]
    for i in range(n):
        values, out = x[start + i], z[i]
        for k in range(len(mean)):
            v = values[k]
            root = math.sqrt(math.sqrt(abs(v)))
            v = ((root if v >= _ZERO else -root) - mean[k]) / scale[k]
            v = v if v == v else _ZERO  # only NaN differs from itself
            v = v if v > low[k] else low[k]
            out[k] = v if v < high[k] else high[k]


@numba.njit(**LENT)
def _layer(inputs: Any, weight: Any, bias: Any, out: Any, n: int) -> None:
    """Write the first n rows of a layer, n a multiple of ``_WHOLE_ROWS``: hidden where its panels are wide."""
    hidden = weight.shape[2] == _WIDE[1]
    for panel in range(len(weight)):
        for i in range(0, n, _WIDE[0] if hidden else _NARROW[0]):
            if hidden:
                _hidden_tile(inputs, weight, bias, out, i, panel)
            else:
                _output_tile(inputs, weight, bias, out, i, panel)
