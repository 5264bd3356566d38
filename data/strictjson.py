"""Whether the query engine reads JSON lines as strictly as they are meant: it takes some things that are none."""

from __future__ import annotations

from typing import Any, Final

import numba

from reclaim.data.jsontext import CLOSE, COMMA, FIRST, LAST, NEWLINE, OPEN, QUOTE, RETURN, SPACE, TAB, byte

_BACKSLASH, _LOWER_N, _LOWER_U, _UPPER_A, _UPPER_Z = (ord(c) for c in "\\nuAZ")
_LETTERS: Final = tuple(b"nulleE")
"""Letters outside of strings: of null and of exponents."""
_LETTERS_OF_FLAGS: Final = tuple(b"truefals")


@numba.njit(cache=True, nogil=True)
def only_json(i: Any, end: Any, deepest: Any, flags: Any) -> Any:
    """Whether lines from ``i`` to ``end`` hold nothing that the query engine reads though it is no JSON, or no fit.

    It takes a comma before a bracket, NaN and Infinity, and more kinds of white space; it makes numbers of true and
    false, which may stand there only where ``flags`` says so, and text of what is nested deeper than any column is
    (``deepest``).
    """
    last, depth, inside = 0, 0, False
    while i < end:
        here = byte(i)
        if inside:
            if here == _BACKSLASH:
                i += 1
            inside = here != QUOTE
        elif here == NEWLINE:
            last = depth = 0
        elif here > SPACE:
            inside = here == QUOTE
            if here in (OPEN, FIRST):
                depth += 1
            elif here in (CLOSE, LAST):
                depth -= 1
                if last == COMMA:
                    return False
            elif _UPPER_A <= here & ~32 <= _UPPER_Z:
                known = here in _LETTERS or (flags and here in _LETTERS_OF_FLAGS)
                if not known or (last == _LOWER_N and here != _LOWER_U):
                    return False
            if depth > deepest:
                return False
            last = here
        elif here not in (SPACE, TAB, RETURN):
            return False
        i += 1
    return True
