"""Packed rows of words: what is unpacked is what was packed, in as many bytes as it differs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from reclaim.data.ingest.readers.packing import SPARE, pack, unpack

word = st.sampled_from([0, 1, 255, 256, 2**56 - 1, 2**56, 2**63, 2**64 - 1]) | st.integers(0, 2**64 - 1)


def unpacked(content: NDArray[np.uint8], count: int, words: int) -> NDArray[np.uint64]:
    rows = np.full((count, words), 7, np.uint64)
    unpack(np.concatenate([content, np.full(SPARE, 255, np.uint8)]), rows)
    return rows


@settings(max_examples=100, deadline=None)
@given(words=st.integers(1, 5), data=st.data())
def test_chunks_of_rows_in_any_order_come_back_word_by_word(words: int, data: st.DataObject) -> None:
    row = st.lists(word, min_size=words, max_size=words)
    rows = np.array(data.draw(st.lists(row, min_size=1, max_size=20)), np.uint64).reshape(-1, words)
    order = np.array(data.draw(st.permutations(range(len(rows)))), np.int64)
    cut = sorted(data.draw(st.lists(st.integers(0, len(rows)), max_size=3)))
    counts = np.diff([0, *cut, len(rows)]).astype(np.int64)  # some are 0
    content, ends = pack(rows, order, counts)
    assert ends[-1] == len(content)
    begins, places = [0, *ends[:-1].tolist()], np.cumsum(counts)
    for begin, end, place, count in zip(begins, ends.tolist(), places.tolist(), counts.tolist(), strict=True):
        assert (unpacked(content[begin:end], count, words) == rows[order[place - count : place]]).all()


@pytest.mark.parametrize(
    ("rows", "size"),
    [
        ([[0, 0]], 1 + 0),  # half a byte a word; nothing differs from a row of zeros
        ([[1, 2**63]], 1 + 1 + 8),
        ([[300, 5], [300, 5]], 2 + 2 + 1),  # the second row is the first
        ([[300, 5], [301, 5]], 2 + 2 + 1 + 1),  # 300 and 301 differ in their lowest byte
        ([[1, 1, 1]], 2 + 3),  # three words take two bytes
    ],
)
def test_a_row_takes_the_bytes_that_differ_from_the_row_before(rows: list[list[int]], size: int) -> None:
    of = np.array(rows, np.uint64)
    content, _ = pack(of, np.arange(len(of)), np.array([len(of)]))
    assert len(content) == size


def test_no_rows_take_no_bytes() -> None:
    content, ends = pack(np.empty((0, 3), np.uint64), np.empty(0, np.int64), np.zeros(4, np.int64))
    assert (len(content), ends.tolist()) == (0, [0, 0, 0, 0])
