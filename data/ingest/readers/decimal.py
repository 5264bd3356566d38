"""Converts a decimal mantissa and a power of ten to the nearest double."""

from __future__ import annotations

from typing import Any, Final

import numba
import numpy as np
from numpy.typing import NDArray

from reclaim.data.core.jit import CACHED


@numba.njit(**CACHED, inline="always")
def _high_and_low(a: Any, b: Any) -> Any:
    """Return the two halves of the 128-bit product of two unsigned 64-bit numbers."""
    mask, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    a0, a1, b0, b1 = a & mask, a >> half, b & mask, b >> half
    low, mid1, mid2, high = a0 * b0, a1 * b0, a0 * b1, a1 * b1
    carry = (low >> half) + (mid1 & mask) + (mid2 & mask)
    return high + (mid1 >> half) + (mid2 >> half) + (carry >> half), (carry << half) | (low & mask)


@numba.njit(**CACHED)
def scaled(digits: Any, power: Any) -> Any:
    """Return ``digits × 10**power`` as the nearest double, and whether the result is certain.

    D. Lemire, "Number parsing at a gigabyte per second", Software: Practice and Experience 51 (2021): exact arithmetic
    where both the digits and the power of ten are exact doubles (Clinger's fast path), else one 64×128-bit
    multiplication, which settles normal doubles below 2**1023 (N. Mushtak and D. Lemire, "Fast number parsing without
    fallback", the same journal 53, 2023). Others are uncertain, and the line goes to the careful reader.

    Parameters
    ----------
    digits : uint64
    power : int64
    """
    if digits <= np.uint64(1 << 53) and -22 <= power <= 22:
        value = np.float64(digits)
        return (value / EXACT[-power] if power < 0 else value * EXACT[power]), True
    if digits == np.uint64(0):
        return 0.0, True
    if power < LOWEST_POWER or power > HIGHEST_POWER:
        return 0.0, False
    shift = np.int64(0)
    w = digits
    for step in (32, 16, 8, 4, 2, 1):
        if w < np.uint64(1) << np.uint64(64 - step):
            w <<= np.uint64(step)
            shift += step
    high, low = _high_and_low(w, LEADING_BITS[power - LOWEST_POWER, 0])
    if high & np.uint64(0x1FF) == np.uint64(0x1FF):  # the bits below the double's could be carried into
        carry, _ = _high_and_low(w, LEADING_BITS[power - LOWEST_POWER, 1])
        low += carry
        if low < carry:
            high += np.uint64(1)
    upper = high >> np.uint64(63)
    drop = upper + np.uint64(9)  # 64 bits, less the 53 of a double, less two to round by
    mantissa = high >> drop
    exponent = ((np.int64(217706) * power) >> 16) + np.int64(63) + np.int64(upper) - shift + np.int64(1023)
    if exponent <= 0 or exponent >= 2046:
        return 0.0, False
    halfway = mantissa & np.uint64(3) == np.uint64(1) and low <= np.uint64(1) and -4 <= power <= 23
    if halfway and mantissa << drop == high:
        mantissa &= ~np.uint64(1)
    mantissa += mantissa & np.uint64(1)
    mantissa >>= np.uint64(1)
    if mantissa >= np.uint64(1) << np.uint64(53):
        mantissa = np.uint64(1) << np.uint64(52)
        exponent += 1
    bits = (mantissa & ~(np.uint64(1) << np.uint64(52))) | (np.uint64(exponent) << np.uint64(52))
    return np.uint64(bits).view(np.float64), True


LOWEST_POWER, HIGHEST_POWER = -342, 308
"""Powers of ten for which a 64-bit integer times that power can be a finite double other than zero."""


def _leading_bits() -> NDArray[np.uint64]:
    """Return the 128 leading bits of each power of ten, shape (651, 2), high half first.

    Powers below one are rounded up, the others down, as the method needs.
    """
    rows = []
    for power in range(LOWEST_POWER, HIGHEST_POWER + 1):
        if power >= 0:
            value = 10**power
            bits = value.bit_length()
            value = value << (128 - bits) if bits <= 128 else value >> (bits - 128)
        else:
            divisor = 10**-power
            value = (1 << (2 * divisor.bit_length() + 128)) // divisor
            value = (value >> (value.bit_length() - 128)) + 1
        rows.append((value >> 64, value & (2**64 - 1)))
    return np.array(rows, np.uint64)


LEADING_BITS: Final = _leading_bits()
EXACT: Final = np.array([float(10**k) for k in range(23)])
"""1e0 … 1e22, the powers of ten that are exact doubles. Constants of the compiled code: passing them would cost."""
