"""Powers of ten, to 128 bits and as exact doubles: the constants that turn decimal text into the nearest double."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

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
