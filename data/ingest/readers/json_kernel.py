"""Parses JSON lines in compiled code: keys, integers, numbers and lists of numbers, each by its address."""

from __future__ import annotations

from typing import Any, Final

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from reclaim.data.ingest.readers.decimal import scaled
from reclaim.data.ingest.readers.staging import NULL

NEWLINE, QUOTE, COMMA, COLON, DOT, MINUS, PLUS, ZERO, NINE = (ord(c) for c in '\n",:.-+09')
SPACE, TAB, RETURN, OPEN, CLOSE, FIRST, LAST, LOWER_E = (ord(c) for c in " \t\r{}[]e")
_HIGH, _SIX, _FOUR, _DIGITS, _LOW_NIBBLES = (
    np.uint64(word) for word in (0xF0F0F0F0F0F0F0F0, 0x0606060606060606, 4, 0x3333333333333333, 0x0F0F0F0F0F0F0F0F)
)
INTEGER, DOUBLE, VECTOR, STRUCT = range(4)
"""Kinds of values that a key may have."""
PAD: Final = 16
"""Bytes after a block that may be read; their values do not matter."""
_MOST_IN_VECTOR: Final = 2.0**53
"""Larger numbers are left to the careful reader, which checks that a single float can hold them."""
_FAR: Final = 1 << 40
"""A power of ten that no number of digits can compensate."""

# Functions take addresses: counting the references of an array at every call would cost more than the parsing.


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


# The functions below rely on a newline at the end of the text: none of them skips one, so none reads past it.


@numba.njit(cache=True, nogil=True, inline="always")
def skip(i: Any) -> Any:
    """Return where the white space at ``i`` ends."""
    while byte(i) <= SPACE and (byte(i) == SPACE or byte(i) == TAB or byte(i) == RETURN):
        i += 1
    return i


@numba.njit(cache=True, nogil=True, inline="always")
def key(i: Any, names: Any, lengths: Any, words: Any, first: Any, count: Any, guess: Any) -> Any:
    """Return the index of the key at ``i`` among the given ones, -1 if it is another, and where its value begins."""
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
def read_lines(
    block: Any, start: Any, size: Any, number: Any, n: Any, rows: Any, whole: Any, doubles: Any, others: Any,
    names: Any, lengths: Any, words: Any, keys: Any, top: Any, zero_is_null: Any, only_with: Any, needs: Any,
    null_row: Any, shape: Any, window: Any,
) -> Any:  # fmt: skip
    """Read until the block ends or ``others`` is full; return the counts of rows and others, and where to continue."""
    integers, first_vector = shape[0], 2 * (shape[0] + shape[1])
    following = np.concatenate((np.arange(len(keys) + 1), np.zeros(1, np.int64)))  # the key last seen after each key
    m = 0
    begin = block + start
    while begin < block + size and m < len(others):
        row = rows + 8 * len(null_row) * n
        i = skip(begin)
        if byte(i) != NEWLINE:  # an empty line is skipped
            for k in range(len(null_row)):
                whole[n, k] = null_row[k]
            seen = np.uint64(0)
            first, count, before, inside = 0, top, -1, False
            good = byte(i) == OPEN
            i += 1
            while good:
                guess = following[before + 1]
                if not first <= guess < first + count:
                    guess = first
                name, i = key(i, names, lengths, words, first, count, guess)
                if name < 0 or seen >> np.uint64(name) & np.uint64(1):
                    good = False
                    break
                seen |= np.uint64(1) << np.uint64(name)
                following[before + 1] = name
                before = name
                kind, slot = keys[name, 0], keys[name, 1]
                if kind == DOUBLE:
                    number_, i = double(i)
                    if i >= 0 and slot >= 0:
                        doubles[n, integers + slot] = number_
                elif kind == INTEGER:
                    value, i = integer(i)
                    most = keys[name, 2]
                    if most >= 0 and not 0 <= value <= most:
                        i = -1
                    if i >= 0 and slot >= 0:
                        none = (value == 0 and zero_is_null[slot]) or (value == -1 and only_with[slot] >= 0)
                        whole[n, slot] = NULL if none else value
                elif kind == VECTOR:
                    i = vector(i, row + 4 * (first_vector + slot), 11 if slot == 0 else 9)
                elif not inside and byte(i) == OPEN:
                    i = skip(i + 1)
                    if byte(i) != CLOSE:
                        first, count, inside = keys[name, 3], keys[name, 4], True
                        continue
                    i += 1
                else:
                    i = -1
                if i < 0:
                    good = False
                    break
                i = skip(i)
                if inside and byte(i) == CLOSE:
                    inside, first, count = False, 0, top
                    i = skip(i + 1)
                if byte(i) == COMMA:
                    i += 1
                else:
                    good = byte(i) == CLOSE and not inside
                    if good:
                        i = skip(i + 1)
                        good = byte(i) == NEWLINE
                    break
            if good:
                for k in range(integers):
                    if only_with[k] >= 0 and whole[n, only_with[k]] == NULL:
                        whole[n, k] = NULL
                for k in needs:
                    if whole[n, k] == NULL if k < integers else np.isnan(doubles[n, k]):
                        good = False
                if whole[n, window[1]] <= whole[n, window[0]]:
                    good = False
            if good:
                n += 1
            else:
                i = begin
                while byte(i) != NEWLINE:
                    i += 1
                others[m, 0], others[m, 1], others[m, 2] = number, begin - block, i - block
                m += 1
        begin = i + 1
        number += 1
    return n, m, begin - block, number
