"""Packs rows of 64-bit words: of each word the bytes that differ from the row before, without leading zeros.

A chunk holds half a byte a word, the number of its bytes, and then the bytes. Rows of one bucket and minute share most
of their words, and numbers of one kind their leading bytes. It takes an eighth of the time of lz4, and a fifth more
bytes.
"""

from __future__ import annotations

from typing import Any, Final

import numba
import numpy as np
from numpy.typing import NDArray

from reclaim.data.core.jit import CACHED
from reclaim.data.ingest.readers.memory import length_of, put_word, word_at

_MASKS: Final = np.array([2 ** (8 * k) - 1 for k in range(9)], np.uint64)
SPARE: Final = 8
"""Bytes after a chunk that may be read and written; their values do not matter."""


def pack(rows: NDArray[np.uint64], order: NDArray[np.int64], counts: NDArray[np.int64]) -> tuple[
    NDArray[np.uint8], NDArray[np.int64]
]:  # fmt: skip
    """Return chunks of rows, one behind another, and where each ends.

    Parameters
    ----------
    rows : uint64, shape (n, words)
    order : int64, shape (n,)
        Places of the rows, chunk after chunk.
    counts : int64, shape (n_chunks,)
        Rows of each chunk.
    """
    content = np.empty(len(rows) * (8 * rows.shape[1] + _head(rows.shape[1])) + SPARE, np.uint8)
    ends = _pack(rows, order, counts, content, content.ctypes.data)
    return content[: int(ends[-1]) if len(ends) else 0], ends


def unpack(content: NDArray[np.uint8], rows: NDArray[np.uint64]) -> None:
    """Fill rows from their chunk, which ``SPARE`` bytes follow."""
    _unpack(content, content.ctypes.data, rows)


def _head(words: int) -> int:
    return (words + 1) // 2


@numba.njit(**CACHED)
def _pack(rows: Any, order: Any, counts: Any, content: Any, address: Any) -> Any:
    """Write the chunks and return where each ends."""
    words = rows.shape[1]
    head = (words + 1) // 2
    ends = np.empty(len(counts), np.int64)
    before = np.empty(words, np.uint64)
    at = place = 0
    for k in range(len(counts)):
        heads = at
        at += counts[k] * head
        before[:] = 0
        for row in order[place : place + counts[k]]:
            for j in range(0, words, 2):
                differs = rows[row, j] ^ before[j]
                before[j] = rows[row, j]
                first = length_of(differs)
                put_word(address + at, differs)
                at += first
                second = np.int64(0)
                if j + 1 < words:
                    differs = rows[row, j + 1] ^ before[j + 1]
                    before[j + 1] = rows[row, j + 1]
                    second = length_of(differs)
                    put_word(address + at, differs)
                    at += second
                content[heads + j // 2] = first | second << 4
            heads += head
        place += counts[k]
        ends[k] = at
    return ends


@numba.njit(**CACHED)
def _unpack(content: Any, address: Any, rows: Any) -> None:
    """Fill the rows of a chunk."""
    words = rows.shape[1]
    head = (words + 1) // 2
    before = np.zeros(words, np.uint64)
    heads, at = 0, address + len(rows) * head
    for row in range(len(rows)):
        for j in range(words):
            size = content[heads + j // 2] >> (4 * (j & 1)) & 15
            before[j] ^= word_at(at) & _MASKS[size]
            at += size
            rows[row, j] = before[j]
        heads += head
