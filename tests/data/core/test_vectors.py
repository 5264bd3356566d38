"""Vectors: each lane has the bits of the one chain of operations that it is said to be."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numba
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from llvmlite import ir
from numba.core import types
from numpy.typing import NDArray

from reclaim.data.core import vectors
from reclaim.data.core.vectors import LANES

NUMBERS = st.floats(-100, 100, width=32)


def _applied(of_vectors: Callable[..., Any]) -> Callable[..., NDArray[np.float32]]:
    """Return what applies a function of vectors to arrays of sixteen numbers."""

    @vectors.in_llvm  # type: ignore[untyped-decorator]  # numba's are not typed
    def write(_: Any, a: Any, b: Any, c: Any, out: Any) -> tuple[Any, Callable[..., Any]]:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            *given, to = vectors.arrays(context, builder, signature, args)
            zero = vectors.shape_of(builder, to)[0].type(0)
            value = of_vectors(builder, *(vectors.load(builder, array.data, zero) for array in given))
            builder.store(value, vectors.at(builder, to.data, zero), align=4)
            return context.get_dummy_value()

        return types.void(a, b, c, out), generate

    @numba.njit
    def call(a: Any, b: Any, c: Any, out: Any) -> None:
        write(a, b, c, out)

    def apply(*given: NDArray[np.float32]) -> NDArray[np.float32]:
        out = np.empty(LANES, np.float32)
        call(*(given * 3)[:3], out)
        return out

    return apply


exponential = _applied(lambda builder, x, *_: vectors.exponential(builder, x))
fma = _applied(vectors.fma)
larger = _applied(lambda builder, a, b, _: vectors.larger(builder, a, b))
turned = _applied(lambda builder, x, *_: vectors.lanes(builder, x, [(k + 3) % LANES for k in range(LANES)]))


def _eighth(builder: Any, bits: Any, table: Any, *_: Any) -> Any:
    whole = builder.fptoui(bits, vectors.INTEGERS)
    return vectors.first_left(builder, whole, [builder.extract_element(table, ir.IntType(32)(k)) for k in range(8)])


def _vector(*values: float) -> NDArray[np.float32]:
    return np.resize(np.array(values, np.float32), LANES)


def test_the_exponential_is_right_to_two_parts_in_ten_million_and_ends_where_it_must() -> None:
    x = np.linspace(-87.0, 88.0, 1_600 * LANES).astype(np.float32)
    found = np.concatenate([exponential(part) for part in x.reshape(-1, LANES)])
    assert (np.abs(found / np.exp(x.astype(np.float64)) - 1) < 2e-7).all()
    ends = exponential(_vector(0.0, -0.0, np.nan, 1e30, 88.0, -1e30, -87.0, np.inf))
    assert ends[:2].tolist() == [1.0, 1.0]
    assert np.isnan(ends[2])
    assert ends[3] == ends[4] == ends[7] < np.inf
    assert ends[5] == ends[6] > 0


@given(st.floats(-90, 90, width=32), st.integers(0, LANES - 1))
def test_the_exponential_has_the_same_bits_in_every_lane(x: float, lane: int) -> None:
    among = _vector(*range(LANES))
    among[lane] = x
    assert exponential(among)[lane].tobytes() == exponential(_vector(x))[0].tobytes()


@given(*[arrays(np.float32, LANES, elements=NUMBERS)] * 3)
def test_a_sum_of_a_product_is_rounded_once(
    a: NDArray[np.float32], b: NDArray[np.float32], c: NDArray[np.float32]
) -> None:
    for x, y, z, found in zip(a, b, c, fma(a, b, c), strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        off = abs(Fraction(float(found)) - exact)
        for way in (-np.inf, np.inf):
            assert off <= abs(Fraction(float(np.nextafter(found, np.float32(way)))) - exact)


def test_lanes_and_the_larger_of_two_by_hand() -> None:
    assert turned(_vector(*range(LANES))).tolist() == [*range(3, LANES), 0, 1, 2]
    found = larger(_vector(1, 5, np.nan, 4), _vector(2, 3, 7, np.nan))
    assert found[:3].tolist() == [2, 5, 7]
    assert np.isnan(found[3])


@pytest.mark.parametrize("looks_up", [False, vectors._LOOKS_UP], ids=["any", "this"])
def test_the_number_of_the_lowest_bit_is_found_for_every_byte(looks_up: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vectors, "_LOOKS_UP", looks_up)
    find, table = _applied(_eighth), _vector(*(k + 0.5 for k in range(LANES)))
    for low in range(1, 256, LANES):
        some = [min(low + k, 255) for k in range(LANES)]
        found = find(_vector(*some), table)
        assert found.tolist() == [(byte & -byte).bit_length() - 0.5 for byte in some]


@numba.njit
def _number_above(values: Any, bound: Any) -> Any:
    return vectors.number_above(values, bound)


@given(
    arrays(np.float32, 2 * LANES, elements=st.floats(0, 1, width=32) | st.just(np.nan)),
    st.integers(0, 2 * LANES), st.integers(0, 2 * LANES - 1), st.floats(-1e-9, 1e-9),
)  # fmt: skip
def test_values_above_a_float64_are_counted_by_its_float32_bound_in_two_vectors_or_any_number(
    values: NDArray[np.float32], n: int, k: int, away: float
) -> None:
    near = np.nan_to_num(np.float64(values[k])) + away  # float32 often cannot tell it from a value
    (bound,) = vectors.bounds_of(np.array([near]))
    for some in (values, values[:n].copy()):
        assert _number_above(some, bound) == np.count_nonzero(some.astype(np.float64) > near)
