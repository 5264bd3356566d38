"""Decimal text to doubles: exactly what Python reads, or a word that it is not certain; never a wrong number."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numba
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from reclaim.data.ingest.readers.decimal import HIGHEST_POWER, LOWEST_POWER, scaled
from reclaim.data.ingest.readers.json_kernel import PAD, double

Bulk = Callable[[NDArray[np.uint64], NDArray[np.int64]], tuple[NDArray[np.float64], NDArray[np.bool_]]]


def certain(digits: int, power: int) -> bool:
    """Assert that a certain answer is the right one, and return whether there was one."""
    value, sure = scaled(np.uint64(digits), power)
    if sure:
        expected = float(f"{digits}e{power}")
        assert (value, math.copysign(1, value)) == (expected, 1.0), f"{digits}e{power}"
    return bool(sure)


@settings(deadline=None)
@example(digits=0, power=-400)
@example(digits=2**64 - 1, power=LOWEST_POWER)
@example(digits=2**64 - 1, power=HIGHEST_POWER)
@example(digits=17976931348623157, power=292)
@example(digits=17976931348623159, power=292)
@example(digits=22250738585072014, power=-324)
@example(digits=22250738585072011, power=-324)
@example(digits=5, power=-324)
@example(digits=24703282292062328, power=-340)  # just above half of the smallest subnormal
@example(digits=9007199254740993, power=0)
@example(digits=9223372036854776833, power=0)
@given(digits=st.integers(0, 2**64 - 1), power=st.integers(-420, 420))
def test_any_mantissa_times_any_power_is_what_python_reads_or_not_certain(digits: int, power: int) -> None:
    certain(digits, power)


@settings(deadline=None)
@given(value=st.floats(0, allow_nan=False, allow_infinity=False), extra=st.integers(0, 3))
def test_the_shortest_text_of_a_double_and_longer_ones_bring_it_back(value: float, extra: int) -> None:
    digits, power = f"{value:.{16 + extra}e}".replace(".", "").split("e")
    if len(digits) <= 19:
        certain(int(digits), int(power) - len(digits) + 1)


@settings(deadline=None)
@given(
    mantissa=st.integers(2**52, 2**53 - 1),
    exponent=st.integers(-1090, 960),
    off=st.integers(-2, 2),
    size=st.integers(1, 19),
)
def test_a_number_next_to_the_middle_of_two_doubles_is_never_rounded_the_wrong_way(
    mantissa: int, exponent: int, off: int, size: int
) -> None:
    halfway = Fraction(2 * mantissa + 1) * Fraction(2) ** (exponent - 1)
    power = math.floor(math.log10(halfway.numerator) - math.log10(halfway.denominator)) - size + 1
    digits = math.floor(halfway / Fraction(10) ** power) + off
    if 0 <= digits < 2**64:
        certain(digits, power)


@pytest.mark.parametrize("digits", [2**53 + 1, 2**54 + 2, 2**54 + 6, 2**60 + 2**7, 2**60 + 3 * 2**7, 2**63 + 2**10])
def test_integers_right_in_the_middle_of_two_doubles_go_to_the_even_one(digits: int) -> None:
    assert certain(digits, 0)


@pytest.mark.parametrize(("digits", "power"), [(2**54 - 1, 0), (2**60 - 1, 0), (10**19 - 1, -19)])
def test_a_number_that_rounds_up_to_one_more_digit_is_certain(digits: int, power: int) -> None:
    assert certain(digits, power)  # the first two to the power of two above, the last one to one


def test_the_smallest_normal_double_is_certain_and_a_smaller_one_is_not() -> None:
    assert certain(22250738585072014, -324)
    assert not certain(22250738585072011, -324)


def test_all_that_a_trace_holds_is_certain() -> None:
    random = np.random.default_rng(1)
    for value in random.random(500).tolist() + (10.0 ** random.uniform(-12, 3, 500)).tolist():
        whole, _, part = f"{value:.17f}".rstrip("0").partition(".")
        digits = int(whole + part)
        assert digits >= 10**19 or certain(digits, -len(part))


@pytest.fixture(scope="module")
def bulk() -> Bulk:
    """Return ``scaled`` for many numbers at once."""

    @numba.njit
    def run(digits: Any, power: Any) -> Any:
        out, sure = np.empty(len(digits)), np.empty(len(digits), np.bool_)
        for k in range(len(digits)):
            out[k], sure[k] = scaled(digits[k], power[k])
        return out, sure

    return run  # type: ignore[no-any-return]  # numba's decorators are untyped


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["any", "short", "halfway", "subnormal", "overflow"])
def test_two_hundred_thousand_numbers_of_a_kind_are_right_or_not_certain(kind: str, bulk: Bulk) -> None:
    random, n = np.random.default_rng(7), 200_000
    digits = random.integers(0, 2**64, n, np.uint64, endpoint=False)
    digits //= np.uint64(10) ** random.integers(0, 19, n).astype(np.uint64)
    power = random.integers(-345, 312, n)
    if kind == "short":
        digits, power = random.integers(0, 10**6, n).astype(np.uint64), random.integers(-30, 30, n)
    elif kind == "halfway":  # the 19 leading digits of points between two doubles, and their neighbours
        texts = [f"{x:.0f}" for x in 2.0 ** random.uniform(54, 62, n)]
        digits = np.array([int(text) for text in texts], np.uint64)
        digits += np.uint64(1) << (np.log2(digits.astype(np.float64)).astype(np.uint64) - np.uint64(53))
        digits += random.integers(-1, 2, n).astype(np.uint64)
        power = random.integers(-6, 7, n)
    elif kind in ("subnormal", "overflow"):
        size = np.array([len(str(int(x))) for x in digits])
        power = (random.integers(-327, -305, n) if kind == "subnormal" else random.integers(305, 311, n)) - size
    values, sure = bulk(digits, power)
    expected = np.array([float(f"{d}e{p}") for d, p in zip(digits.tolist(), power.tolist(), strict=True)])
    wrong = np.flatnonzero(sure & (values.view(np.uint64) != expected.view(np.uint64)))
    assert len(wrong) == 0, [f"{digits[k]}e{power[k]}" for k in wrong[:5]]
    assert kind != "short" or sure.all()


@pytest.fixture(scope="module")
def read() -> Callable[[str], tuple[float, int]]:
    """Return the reader of one number's text: its value and where it ends, -1 for what it does not read."""

    @numba.njit
    def at(i: Any) -> Any:
        return double(i)

    def read(text: str) -> tuple[float, int]:
        block = np.frombuffer(text.encode() + b"\n" + bytes(PAD), np.uint8)
        value, end = at(block.ctypes.data)
        return value, int(end - block.ctypes.data) if end >= 0 else -1

    return read


@settings(deadline=None, max_examples=200)
@example(text="18446744073709551616.5")
@example(text="36893488147419103232.25e1")
@example(text="0." + "0" * 10_000 + "1e10001")
@example(text="0.0000000000000000000000000000001")
@example(text="1e-99999999999999999999999999999999999999")
@given(text=st.from_regex(r"(0|[1-9][0-9]{0,24})(\.[0-9]{1,30})?([eE][+-]?[0-9]{1,5})?", fullmatch=True))
def test_a_number_as_json_has_it_is_read_to_its_end_as_python_reads_it_or_left(
    text: str, read: Callable[[str], tuple[float, int]]
) -> None:
    value, end = read(text)
    assert end == -1 or (value, end) == (float(text), len(text))


@pytest.mark.parametrize(
    "text", ["", "-1", "-0", "+1", "01", "00", ".5", "5.", "1.e1", "1e", "1e+", "NaN", "Infinity", "x"]
)
def test_what_is_no_number_of_json_or_negative_is_left(text: str, read: Callable[[str], tuple[float, int]]) -> None:
    assert read(text)[1] == -1
