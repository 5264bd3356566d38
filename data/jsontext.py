"""JSON text walked byte by byte in compiled code: keys, integers, numbers and lists of numbers, each by its address."""

from __future__ import annotations

from typing import Any, Final

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from reclaim.data.decimals import scaled

NEWLINE, QUOTE, COMMA, COLON, DOT, MINUS, PLUS, ZERO, NINE = (ord(c) for c in '\n",:.-+09')
SPACE, TAB, RETURN, OPEN, CLOSE, FIRST, LAST, BACKSLASH = (ord(c) for c in " \t\r{}[]\\")
LOWER_E, LOWER_N, LOWER_U, UPPER_A, UPPER_Z = (ord(c) for c in "enuAZ")
_HIGH, _SIX, _FOUR, _DIGITS, _LOW_NIBBLES = (
    np.uint64(word) for word in (0xF0F0F0F0F0F0F0F0, 0x0606060606060606, 4, 0x3333333333333333, 0x0F0F0F0F0F0F0F0F)
)
PAD: Final = 16
"""Bytes after a block that may be read, though they are never looked at."""
_MOST_IN_VECTOR: Final = 2.0**53
"""Above it the query engine rounds an integer to a single float at once, and a double would round it twice."""
_FAR: Final = 1 << 40
"""A power of ten that no number of digits makes up for."""

_LETTERS: Final = tuple(b"nulleE")
"""Letters outside of strings: of null and of exponents."""
_LETTERS_OF_FLAGS: Final = tuple(b"truefals")

# Text is walked by address: an array handed from function to function would be counted at every step, which costs more
# than the reading.


def _load_byte(_typing: Any, _address: Any) -> Any:
    """Return the byte at an address."""

    def load(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())
        return builder.zext(builder.load(pointer), ir.IntType(64))

    return types.int64(types.int64), load


def _load_word(_typing: Any, _address: Any) -> Any:
    """Return the 8 bytes from an address on as one number, the first byte lowest."""

    def load(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.load(pointer, align=1)

    return types.uint64(types.int64), load


def _store_single(_typing: Any, _address: Any, _value: Any) -> Any:
    """Store a single float at an address."""

    def store(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.FloatType().as_pointer())
        builder.store(arguments[1], pointer, align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32), store


byte: Any = intrinsic(_load_byte)
_word: Any = intrinsic(_load_word)
_put: Any = intrinsic(_store_single)


# The readers below trust that the text ends with a newline: nothing they step over is one, so none runs past it.


@numba.njit(cache=True, nogil=True, inline="always")
def skip(i: Any) -> Any:
    """Return where the white space at ``i`` ends."""
    while byte(i) <= SPACE and (byte(i) == SPACE or byte(i) == TAB or byte(i) == RETURN):
        i += 1
    return i


@numba.njit(cache=True, nogil=True, inline="always")
def key(i: Any, names: Any, lengths: Any, words: Any, first: Any, count: Any, guess: Any) -> Any:
    """Return which key of the given ones stands at ``i``, and where its value begins; -1 for none of them."""
    i = skip(i)
    key, candidate = -1, guess
    for _ in range(count):
        text, at = names + 16 * words * candidate, i
        while (_word(at) ^ _word(text)) & _word(text + 8) == 0:
            text += 16
            at += 8
            if _word(text + 8) == 0:
                break
        if at > i and _word(text + 8) == 0:
            i = skip(i + np.int64(_word(lengths + 8 * candidate)))
            if byte(i) == COLON:
                key = candidate
                i = skip(i + 1)
            break
        candidate = candidate + 1 if candidate + 1 < first + count else first
    return key, i


@numba.njit(cache=True, nogil=True, inline="always")
def _digits(i: Any, value: Any) -> Any:
    """Return ``value`` followed by the digits at ``i``, and where they end; eight at a time, then one by one.

    Eight ASCII digits in one word become a number by three multiplications: D. Lemire, "Quickly parsing eight digits".
    """
    word = _word(i)
    while (word & _HIGH) | (((word + _SIX) & _HIGH) >> _FOUR) == _DIGITS:
        pairs = (word & _LOW_NIBBLES) * np.uint64(2561) >> np.uint64(8)
        fours = (pairs & np.uint64(0x00FF00FF00FF00FF)) * np.uint64(6553601) >> np.uint64(16)
        eight = (fours & np.uint64(0x0000FFFF0000FFFF)) * np.uint64(42949672960001) >> np.uint64(32)
        value = value * np.uint64(100000000) + eight
        i += 8
        word = _word(i)
    digit = byte(i) - ZERO
    while 0 <= digit <= 9:
        value = value * np.uint64(10) + np.uint64(digit)
        i += 1
        digit = byte(i) - ZERO
    return value, i


@numba.njit(cache=True, nogil=True, inline="always")
def integer(i: Any) -> Any:
    """Return a canonical integer, in quotes or not, and where it ends; -1 for anything else."""
    quoted = byte(i) == QUOTE
    i += quoted
    negative = byte(i) == MINUS
    i += negative
    begin = i
    unsigned, i = _digits(i, np.uint64(0))
    digits = i - begin
    value = np.int64(unsigned)
    if digits == 0 or digits > 19 or value < 0 or (byte(begin) == ZERO and (digits > 1 or negative)):
        i = -1
    elif quoted:
        i = i + 1 if byte(i) == QUOTE else -1
    return -value if negative else value, i


@numba.njit(cache=True, nogil=True, inline="always")
def double(i: Any) -> Any:
    """Return a number that is not negative, and where it ends; -1 for anything else."""
    begin = i
    digits = np.uint64(0)
    digit = byte(i) - ZERO
    while 0 <= digit <= 9:
        digits = digits * np.uint64(10) + np.uint64(digit)
        i += 1
        digit = byte(i) - ZERO
    significant = i - begin
    good = significant == 1 or (significant > 1 and byte(begin) != ZERO)
    power = 0
    if byte(i) == DOT:
        i += 1
        point = i
        if significant == 1 and digits == 0:
            significant = 0
            while byte(i) == ZERO:
                i += 1
        begin = i
        digits, i = _digits(i, digits)
        significant += i - begin
        power = point - i
        good = good and power < 0
    if byte(i) | 32 == LOWER_E:
        i += 1
        minus = byte(i) == MINUS
        i += minus or byte(i) == PLUS
        begin = i
        tens = 0
        while ZERO <= byte(i) <= NINE:
            tens = min(tens * 10 + byte(i) - ZERO, _FAR)
            i += 1
        good = good and i > begin
        power += -tens if minus else tens
    value, certain = scaled(digits, power)
    return value, i if good and significant <= 19 and certain else -1


@numba.njit(cache=True, nogil=True, inline="always")
def vector(i: Any, out: Any, size: Any) -> Any:
    """Store the list of ``size`` numbers, or of none, at address ``out``; return its end, -1 for anything else."""
    count = 0
    more = byte(i) == FIRST
    if more:
        i = skip(i + 1)
        if byte(i) == LAST:
            more = False
    else:
        i = -1
    while more:
        value, i = double(i)
        if i < 0 or value > _MOST_IN_VECTOR:
            i = -1
            break
        if count < size:
            _put(out + 4 * count, np.float32(value))
        count += 1
        i = skip(i)
        more = byte(i) == COMMA
        if more:
            i = skip(i + 1)
        elif byte(i) != LAST:
            i = -1
    if i >= 0:
        i += 1
        if count != size and count > 0:
            i = -1
    return i


@numba.njit(cache=True, nogil=True)
def only_json(i: Any, end: Any, deepest: Any, flags: Any) -> Any:
    """Whether lines from ``i`` to ``end`` hold nothing that the query engine reads though it is no JSON, or no fit.

    It takes a comma before a bracket, NaN and Infinity; it makes numbers of true and false, which may stand there only
    where ``flags`` says so, and text of what is nested deeper than any column is (``deepest``).
    """
    last, depth, inside = 0, 0, False
    while i < end:
        here = byte(i)
        if inside:
            if here == BACKSLASH:
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
            elif UPPER_A <= here & ~32 <= UPPER_Z:
                known = here in _LETTERS or (flags and here in _LETTERS_OF_FLAGS)
                if not known or (last == LOWER_N and here != LOWER_U):
                    return False
            if depth > deepest:
                return False
            last = here
        i += 1
    return True
