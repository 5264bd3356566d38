"""Large answers are made piece by piece, in threads."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final, TypeVar

from reclaim.features.kin import ROWS_WORTH_A_THREAD, in_parts

_Made = TypeVar("_Made")

THREADS: Final = min(os.cpu_count() or 1, 8)
"""For large calls; more than a few wait for memory, not for cores."""
_PIECE_ROWS: Final = ROWS_WORTH_A_THREAD - 1
"""A piece nearly stays in a core's own cache, nothing within it is cut up again, and between the steps of one the
interpreter is free for others within a millisecond."""


def in_pieces(make: Callable[[slice], _Made], n: int, threads: int) -> list[_Made]:
    """Return what is made of each piece of ``n`` rows, in their order; there is one piece at least."""
    pieces = [slice(low, low + _PIECE_ROWS) for low in range(0, max(n, 1), _PIECE_ROWS)]
    made: list[_Made | None] = [None] * len(pieces)

    def run(part: int, parts: int) -> None:
        for k in range(part, len(pieces), parts):
            made[k] = make(pieces[k])

    in_parts(run, n, threads)
    return [m for m in made if m is not None]
