"""Parses JSON lines in compiled code: keys, integers, numbers, lists of numbers and texts, each by its address."""

from __future__ import annotations

from typing import Any, Final

import numba
import numpy as np

from reclaim.data.core.jit import CACHED
from reclaim.data.ingest.readers.decimal import scaled
from reclaim.data.ingest.readers.memory import byte_at, put_single, word_at
from reclaim.data.ingest.readers.staging import NULL

NEWLINE, QUOTE, COMMA, COLON, DOT, MINUS, PLUS, ZERO, NINE = (ord(c) for c in '\n",:.-+09')
SPACE, TAB, RETURN, OPEN, CLOSE, FIRST, LAST, LOWER_E, ESCAPE, TILDE = (ord(c) for c in " \t\r{}[]e\\~")
_TRUE, _FALSE = (np.uint64(int.from_bytes(word, "little")) for word in (b"true", b"false"))
_FOUR_BYTES, _FIVE_BYTES = np.uint64(0xFFFFFFFF), np.uint64(0xFFFFFFFFFF)
_HIGH, _SIX, _FOUR, _DIGITS, _LOW_NIBBLES = (
    np.uint64(word) for word in (0xF0F0F0F0F0F0F0F0, 0x0606060606060606, 4, 0x3333333333333333, 0x0F0F0F0F0F0F0F0F)
)
INTEGER, DOUBLE, VECTOR, STRUCT, TEXT, FLAG, LIST = range(7)
"""Kinds of values that a key may have; a list is accepted without an element."""
LENGTH_BITS: Final = 20
"""Low bits of a text's word that hold its length in bytes; those above hold where it begins in the block."""
PAD: Final = 16
"""Bytes after a block that may be read; their values do not matter."""
_MOST_IN_VECTOR: Final = 2.0**53
"""Larger numbers are left to the careful reader, which checks that a single float can hold them."""
_FAR: Final = 1 << 40
"""A power of ten that no number of digits can compensate."""

# Functions take addresses: counting the references of an array at every call would cost more than the parsing.
# They rely on a newline at the end of the text: none of them skips one, so none reads past it.


@numba.njit(**CACHED, inline="always")
def skip(i: Any) -> Any:
    """Return where the white space at ``i`` ends."""
    while byte_at(i) <= SPACE and (byte_at(i) == SPACE or byte_at(i) == TAB or byte_at(i) == RETURN):
        i += 1
    return i


@numba.njit(**CACHED, inline="always")
def key(i: Any, names: Any, lengths: Any, words: Any, first: Any, count: Any, guess: Any) -> Any:
    """Return the index of the key at ``i`` among the given ones, -1 if it is another, and where its value begins."""
    i = skip(i)
    key, candidate = -1, guess
    for _ in range(count):
        text, at = names + 16 * words * candidate, i
        while (word_at(at) ^ word_at(text)) & word_at(text + 8) == 0:
            text += 16
            at += 8
            if word_at(text + 8) == 0:
                break
        if at > i and word_at(text + 8) == 0:
            i = skip(i + np.int64(word_at(lengths + 8 * candidate)))
            if byte_at(i) == COLON:
                key = candidate
                i = skip(i + 1)
            break
        candidate = candidate + 1 if candidate + 1 < first + count else first
    return key, i


@numba.njit(**CACHED, inline="always")
def _digits(i: Any, value: Any) -> Any:
    """Return ``value`` followed by the digits at ``i``, and where they end; eight at a time, then one by one.

    Eight ASCII digits in one word become a number by three multiplications: D. Lemire, "Quickly parsing eight digits".
    """
    word = word_at(i)
    while (word & _HIGH) | (((word + _SIX) & _HIGH) >> _FOUR) == _DIGITS:
        pairs = (word & _LOW_NIBBLES) * np.uint64(2561) >> np.uint64(8)
        fours = (pairs & np.uint64(0x00FF00FF00FF00FF)) * np.uint64(6553601) >> np.uint64(16)
        eight = (fours & np.uint64(0x0000FFFF0000FFFF)) * np.uint64(42949672960001) >> np.uint64(32)
        value = value * np.uint64(100000000) + eight
        i += 8
        word = word_at(i)
    digit = byte_at(i) - ZERO
    while 0 <= digit <= 9:
        value = value * np.uint64(10) + np.uint64(digit)
        i += 1
        digit = byte_at(i) - ZERO
    return value, i


@numba.njit(**CACHED, inline="always")
def integer(i: Any) -> Any:
    """Return a canonical integer, in quotes or not, and where it ends; -1 for anything else."""
    quoted = byte_at(i) == QUOTE
    i += quoted
    negative = byte_at(i) == MINUS
    i += negative
    begin = i
    unsigned, i = _digits(i, np.uint64(0))
    digits = i - begin
    value = np.int64(unsigned)
    if digits == 0 or digits > 19 or value < 0 or (byte_at(begin) == ZERO and (digits > 1 or negative)):
        i = -1
    elif quoted:
        i = i + 1 if byte_at(i) == QUOTE else -1
    return -value if negative else value, i


@numba.njit(**CACHED, inline="always")
def double(i: Any) -> Any:
    """Return a number that is not negative, and where it ends; -1 for anything else."""
    begin = i
    digits = np.uint64(0)
    digit = byte_at(i) - ZERO
    while 0 <= digit <= 9:
        digits = digits * np.uint64(10) + np.uint64(digit)
        i += 1
        digit = byte_at(i) - ZERO
    significant = i - begin
    good = significant == 1 or (significant > 1 and byte_at(begin) != ZERO)
    power = 0
    if byte_at(i) == DOT:
        i += 1
        point = i
        if significant == 1 and digits == 0:
            significant = 0
            while byte_at(i) == ZERO:
                i += 1
        begin = i
        digits, i = _digits(i, digits)
        significant += i - begin
        power = point - i
        good = good and power < 0
    if byte_at(i) | 32 == LOWER_E:
        i += 1
        minus = byte_at(i) == MINUS
        i += minus or byte_at(i) == PLUS
        begin = i
        tens = 0
        while ZERO <= byte_at(i) <= NINE:
            tens = min(tens * 10 + byte_at(i) - ZERO, _FAR)
            i += 1
        good = good and i > begin
        power += -tens if minus else tens
    value, certain = scaled(digits, power)
    return value, i if good and significant <= 19 and certain else -1


@numba.njit(**CACHED, inline="always")
def vector(i: Any, out: Any, size: Any) -> Any:
    """Store the list of ``size`` numbers, or of none, at address ``out``; return its end, -1 for anything else."""
    count = 0
    more = byte_at(i) == FIRST
    if more:
        i = skip(i + 1)
        if byte_at(i) == LAST:
            more = False
    else:
        i = -1
    while more:
        value, i = double(i)
        if i < 0 or value > _MOST_IN_VECTOR:
            i = -1
            break
        if count < size:
            put_single(out + 4 * count, np.float32(value))
        count += 1
        i = skip(i)
        more = byte_at(i) == COMMA
        if more:
            i = skip(i + 1)
        elif byte_at(i) != LAST:
            i = -1
    if i >= 0:
        i += 1
        if count != size and count > 0:
            i = -1
    return i


@numba.njit(**CACHED, inline="always")
def text(i: Any, block: Any) -> Any:
    """Return the word of a text, and where its value ends; -1 for anything else.

    A text is a string of printable ASCII without an escape, or a canonical integer.
    """
    if byte_at(i) == QUOTE:
        i += 1
        begin = i
        while SPACE <= byte_at(i) <= TILDE and byte_at(i) != QUOTE and byte_at(i) != ESCAPE:
            i += 1
        end = i
        i = i + 1 if byte_at(i) == QUOTE else -1
    else:
        begin = i
        _, i = integer(i)
        end = i
    if end - begin >= 1 << LENGTH_BITS:
        i = -1
    return (begin - block) << LENGTH_BITS | (end - begin), i


@numba.njit(**CACHED, inline="always")
def flag(i: Any) -> Any:
    """Return 1 for true and 0 for false, and where it ends; -1 for anything else."""
    true, false = word_at(i) & _FOUR_BYTES == _TRUE, word_at(i) & _FIVE_BYTES == _FALSE
    return np.int64(true), i + 4 if true else i + 5 if false else -1


@numba.njit(**CACHED, inline="always")
def empty_list(i: Any) -> Any:
    """Return where the list without an element at ``i`` ends; -1 for anything else."""
    end = -1
    if byte_at(i) == FIRST:
        i = skip(i + 1)
        if byte_at(i) == LAST:
            end = i + 1
    return end


@numba.njit(**CACHED)
def read_lines(
    block: Any,  # address of the text
    start: Any,  # where to begin in it, bytes
    size: Any,  # its length, bytes
    number: Any,  # of the line that begins there
    n: Any,  # rows that there are already
    rows: Any,  # address of the rows, written from n on
    whole: Any,  # (most, n_words) int64, the same memory
    doubles: Any,  # (most, n_words) float64, the same memory
    numbers: Any,  # (most,) int64, line of each row, written from n on
    others: Any,  # (m, 3) int64, number, begin and end of each line left, written
    names: Any,  # address of json_fast.Keys.names
    lengths: Any,  # address of json_fast.Keys.lengths
    words: Any,  # words of a name
    keys: Any,  # (n_keys, 6) int64, json_fast.Keys.places
    top: Any,  # keys of the outer object; this and all below as in json_fast.Plan
    zero_is_null: Any,  # (n_integers,) bool
    only_with: Any,  # (n_integers,) int64
    needs: Any,  # (k,) int64
    null_row: Any,  # (n_words,) int64
    shape: Any,  # (2,) int
    window: Any,  # (2,) int
) -> Any:
    """Read until the block ends, or the rows or ``others`` are full.

    Returns the counts of rows and others, where to continue, and the number of that line.
    """
    integers, first_vector = shape[0], 2 * (shape[0] + shape[1])
    following = np.concatenate((np.arange(len(keys) + 1), np.zeros(1, np.int64)))  # the key last seen after each key
    m = 0
    begin = block + start
    while begin < block + size and m < len(others) and n < len(whole):
        row = rows + 8 * len(null_row) * n
        i = skip(begin)
        if byte_at(i) != NEWLINE:  # an empty line is skipped
            for k in range(len(null_row)):
                whole[n, k] = null_row[k]
            seen = np.uint64(0)
            first, count, before, inside = 0, top, -1, False
            good = byte_at(i) == OPEN
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
                kind, slot, found = keys[name, 0], keys[name, 1], np.int64(1)
                if kind == DOUBLE:
                    number_, i = double(i)
                    if i >= 0 and slot >= 0:
                        doubles[n, integers + slot] = number_
                elif kind == INTEGER:
                    value, i = integer(i)
                    if not keys[name, 2] <= value <= keys[name, 3]:
                        i = -1
                    if i >= 0 and slot >= 0:
                        none = (value == 0 and zero_is_null[slot]) or (value == -1 and only_with[slot] >= 0)
                        whole[n, slot] = NULL if none else value
                elif kind == VECTOR:
                    i = vector(i, row + 4 * (first_vector + slot), 11 if slot == 0 else 9)
                elif kind == STRUCT:
                    if slot >= 0:
                        whole[n, slot] = 1
                    if inside or byte_at(i) != OPEN:
                        i = -1
                    else:
                        i = skip(i + 1)
                        if byte_at(i) != CLOSE:
                            first, count, inside = keys[name, 4], keys[name, 5], True
                            continue
                        i += 1
                else:
                    if kind == TEXT:
                        found, i = text(i, block)
                    elif kind == FLAG:
                        found, i = flag(i)
                    else:
                        i = empty_list(i)
                    whole[n, slot] = found
                if i < 0:
                    good = False
                    break
                i = skip(i)
                if inside and byte_at(i) == CLOSE:
                    inside, first, count = False, 0, top
                    i = skip(i + 1)
                if byte_at(i) == COMMA:
                    i += 1
                else:
                    good = byte_at(i) == CLOSE and not inside
                    if good:
                        i = skip(i + 1)
                        good = byte_at(i) == NEWLINE
                    break
            if good:
                for k in range(integers):
                    if only_with[k] >= 0 and whole[n, only_with[k]] == NULL:
                        whole[n, k] = NULL
                for k in needs:
                    if whole[n, k] == NULL if k < integers else np.isnan(doubles[n, k]):
                        good = False
                if window[1] > 0 and whole[n, window[1]] <= whole[n, window[0]]:
                    good = False
            if good:
                numbers[n] = number
                n += 1
            else:
                i = begin
                while byte_at(i) != NEWLINE:
                    i += 1
                others[m, 0], others[m, 1], others[m, 2] = number, begin - block, i - block
                m += 1
        begin = i + 1
        number += 1
    return n, m, begin - block, number
