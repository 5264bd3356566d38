"""Generates compiled code of vectors of sixteen float32, for loops that the compiler does not vectorise.

Each operation is rounded once, as IEEE 754 says, wherever it is done: a number has the same bits in every lane and on
every processor. The functions are called by the bodies of intrinsics (``in_llvm``); ``builder`` is LLVM's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.core.registry import cpu_target
from numba.extending import intrinsic
from numpy.typing import NDArray

LANES: Final = 16
"""Numbers of a vector: those of a register of AVX-512. Other processors take several registers, to the same bits."""
VECTOR: Final = ir.VectorType(ir.FloatType(), LANES)
INTEGERS: Final = ir.VectorType(ir.IntType(32), LANES)
_FEATURES: Final = cpu_target.target_context.codegen().magic_tuple()[2].split(",")
"""Features that code may be compiled for, by LLVM's names: this processor's, or those of ``NUMBA_CPU_FEATURES``."""
WIDE_REGISTERS: Final = "+avx512f" in _FEATURES
"""True where the processor has 32 registers of a vector each; others have sixteen of half a vector, or smaller ones.
Only the time depends on it."""
_LOOKS_UP: Final = "+avx2" in _FEATURES
"""True where a table of ``_HALF`` numbers is looked up in a register. Only the time depends on it."""
LOOKS_UP_WORDS: Final = "+avx512bw" in _FEATURES
"""True where a table of 32 numbers of two bytes is looked up in a register. Only the time depends on it."""
_HALF: Final = 8
"""Numbers of a register of AVX2, and of a table that it looks up."""

in_llvm: Final[Any] = intrinsic
numba_tools: Final[Any] = cgutils
"""Typed as ``Any``: numba's own types say too little."""

# exp(x) = 2^n exp(r): n is the whole number next to x / log 2, which adding 1.5 * 2^23 rounds to; log 2 in two parts,
# the first of few digits; the polynomial is that of Cephes' expf (Moshier, netlib.org/cephes), right to 2e-7
_LEAST, _MOST = -87.0, 88.0
_PER_LOG2, _ROUND = 1.44269504, 12582912.0
_LOG2, _LOG2_REST = 0.693359375, -2.12194440e-4
_POLYNOMIAL = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)


def constant(*values: float, kind: Any = VECTOR) -> Any:
    """Return a vector of sixteen constants, or of one in every lane."""
    return ir.Constant(kind, list(values) if len(values) == LANES else [*values] * LANES)


def arrays(context: Any, builder: Any, signature: Any, values: Any) -> list[Any]:
    """Return the arguments of an intrinsic that are arrays, with their ``data`` and ``shape``."""
    both = zip(signature.args, values, strict=True)
    return [context.make_array(kind)(context, builder, value) for kind, value in both if hasattr(kind, "ndim")]


def shape_of(builder: Any, array: Any) -> Any:
    """Return the lengths of an array."""
    return numba_tools.unpack_tuple(builder, array.shape)


def at(builder: Any, start: Any, *steps: Any, kind: Any = VECTOR) -> Any:
    """Return the address of the vector that begins the sum of the steps behind a pointer, in numbers."""
    return builder.bitcast(builder.gep(start, [functools.reduce(builder.add, steps)]), kind.as_pointer())


def load(builder: Any, start: Any, *steps: Any) -> Any:
    """Return the vector at that address, wherever it lies."""
    return builder.load(at(builder, start, *steps), align=4)


def spread(builder: Any, value: Any) -> Any:
    """Return a vector of one number in every lane."""
    undefined = ir.Constant(VECTOR, ir.Undefined)
    return lanes(builder, builder.insert_element(undefined, value, ir.IntType(32)(0)), [0] * LANES)


def spread_integer(builder: Any, value: Any) -> Any:
    """Return a vector of one whole number of 32 bits in every lane."""
    return builder.bitcast(spread(builder, builder.bitcast(value, ir.FloatType())), INTEGERS)


def lanes(builder: Any, vector: Any, places: list[int]) -> Any:
    """Return a vector of the lanes at sixteen places of another one."""
    return builder.shuffle_vector(vector, ir.Constant(VECTOR, ir.Undefined), constant(*places, kind=INTEGERS))


def larger(builder: Any, a: Any, b: Any) -> Any:
    """Return the larger number in each lane; that of ``b`` where either is NaN."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Return ``a * b + c``, rounded once."""
    kind = ir.FunctionType(VECTOR, [VECTOR] * 3)
    return builder.call(numba_tools.get_or_insert_function(builder.module, kind, f"llvm.fma.v{LANES}f32"), [a, b, c])


def exponential(builder: Any, x: Any) -> Any:
    """Return exp(x); NaN stays so."""
    x = larger(builder, constant(_LEAST), x)
    x = builder.select(builder.fcmp_ordered("<", constant(_MOST), x), constant(_MOST), x)
    shifted = fma(builder, x, constant(_PER_LOG2), constant(_ROUND))
    n = builder.fsub(shifted, constant(_ROUND))
    r = fma(builder, n, constant(-_LOG2_REST), fma(builder, n, constant(-_LOG2), x))
    highest, *others = map(constant, _POLYNOMIAL)
    p = functools.reduce(lambda total, coefficient: fma(builder, total, r, coefficient), others, highest)
    biased = builder.add(builder.bitcast(shifted, INTEGERS), constant(127, kind=INTEGERS))
    power = builder.bitcast(builder.shl(biased, constant(23, kind=INTEGERS)), VECTOR)
    return builder.fmul(builder.fadd(fma(builder, p, builder.fmul(r, r), r), constant(1.0)), power)


def first_left(builder: Any, bits: Any, values: list[Any]) -> Any:
    """Return in each lane the value of the lowest bit that is set there; one of eight is.

    ``bits`` are 32 bits a lane, ``values`` eight float32, that of bit 0 first.
    """
    none = constant(0, kind=INTEGERS)
    if not _LOOKS_UP:
        chosen = spread(builder, values[-1])
        for k in reversed(range(len(values) - 1)):
            there = builder.icmp_unsigned("!=", builder.and_(bits, constant(1 << k, kind=INTEGERS)), none)
            chosen = builder.select(there, spread(builder, values[k]), chosen)
        return chosen
    # the exponent of the lowest bit, a power of two, is 127 and its position, of which three bits count: 7 more
    lowest = builder.uitofp(builder.and_(bits, builder.sub(none, bits)), VECTOR)
    exponent = builder.lshr(builder.bitcast(lowest, INTEGERS), constant(23, kind=INTEGERS))
    half = ir.VectorType(ir.FloatType(), _HALF)
    table = ir.Constant(half, ir.Undefined)
    for k, value in enumerate(values):
        table = builder.insert_element(table, value, ir.IntType(32)((k + _HALF - 1) % _HALF))
    kind = ir.FunctionType(half, [half, ir.VectorType(ir.IntType(32), _HALF)])
    permute = numba_tools.get_or_insert_function(builder.module, kind, "llvm.x86.avx2.permps")
    halves = [
        builder.call(permute, [table, _part(builder, exponent, range(k, k + _HALF))]) for k in range(0, LANES, _HALF)
    ]
    return builder.shuffle_vector(*halves, constant(*range(LANES), kind=INTEGERS))


def _part(builder: Any, vector: Any, places: range) -> Any:
    """Return the lanes at some places."""
    kind = ir.VectorType(ir.IntType(32), len(places))
    return builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), ir.Constant(kind, list(places)))


def bounds_of(values: NDArray[np.float64]) -> NDArray[np.float32]:
    """Return the largest float32 that are not larger: a float32 exceeds the one where it exceeds the other."""
    near = values.astype(np.float32)
    return np.where(near > values, np.nextafter(near, np.float32(-np.inf)), near)


@in_llvm
def _number_above(_: Any, values: Any, bound: Any) -> tuple[Any, Callable[..., Any]]:
    """Return how many of two vectors of values, one behind the other, exceed a bound; float32 all."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        (of,) = arrays(context, builder, signature, args)
        (n,) = shape_of(builder, of)
        least, bits = spread(builder, args[1]), []
        for first in (0, LANES):
            more = builder.fcmp_ordered(">", load(builder, of.data, n.type(first)), least)
            bits.append(builder.shl(builder.zext(builder.bitcast(more, ir.IntType(LANES)), n.type), n.type(first)))
        return builder.ctpop(builder.or_(*bits))

    return types.intp(values, bound), generate


@numba.njit(inline="always")
def number_above(values: Any, bound: Any) -> Any:
    """Return how many values, (n,) float32 and contiguous, exceed one of ``bounds_of``, for kernels."""
    if len(values) == 2 * LANES:
        return _number_above(values, bound)
    n = 0
    for value in values:
        n += value > bound
    return n
