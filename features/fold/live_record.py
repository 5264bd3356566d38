"""Keeps the record of a served task without the empty octaves of its histograms; compiled part of ``live``."""

from __future__ import annotations

from typing import Any, Final

import numba
import numpy as np
from numpy.typing import NDArray

from reclaim.data.core.arrays import blank_records, blank_rows, room_for
from reclaim.data.core.jit import LENT, fetch_line
from reclaim.features.fold.task_record import BINS, STATE

_TO_OCTAVE: Final = 8
_OCTAVES: Final = BINS // _TO_OCTAVE
_KINDS: Final = STATE["histogram"].shape[1]
"""Histograms of a record."""
BLOCKS: Final = 4
"""Octaves of a row. Half a row is unused on average, and each row takes four bytes of the record, used or not: of the
octaves of recorded tasks, 24 to 29 of 48, that is the least together."""
MOST_ROWS: Final = _OCTAVES * _KINDS // BLOCKS
"""Rows of a task whose histograms are full."""
ROW: Final = np.dtype([("block", "f4", (BLOCKS, _TO_OCTAVE + 1))])
"""Weights of the bins of some octaves, each with their sum."""

_OF_STATE: Final[Any] = STATE.fields
_BEGIN: Final = _OF_STATE["histogram"][1]
_END: Final = _OF_STATE["octave"][1] + STATE["octave"].itemsize
_SPARE: Final = _OF_STATE["spare"][1] - (_END - _BEGIN)
_FIELDS: Final = sorted(
    [
        *((at if at < _BEGIN else at - (_END - _BEGIN), name, kind) for name, (kind, at, *_) in _OF_STATE.items()
          if at < _OF_STATE["spare"][1] and name not in ("histogram", "octave")),
        (_SPARE, "octaves", np.dtype("u8")),
        (_SPARE + 8, "rows", np.dtype(("i4", MOST_ROWS))),
    ],
    key=lambda field: field[0],
)  # fmt: skip
KEPT: Final = np.dtype(
    {
        "names": [name for _, name, _ in _FIELDS],
        "formats": [kind for _, _, kind in _FIELDS],
        "offsets": [at for at, _, _ in _FIELDS],
        "itemsize": _SPARE + 8 + 4 * MOST_ROWS,
    }
)
"""A record as it is kept: that of ``task_record`` without its histograms, in whole cache lines.

In place of what is spare there, it has a bit for each octave of a histogram that holds something, and the numbers of
the rows where these lie, in the order of the bits; numbers count from 1, and 0 is none. Code does not access it by
fields: functions on it also take a ``STATE``, or use only its layout."""
assert _OF_STATE["octave"][1] == _BEGIN + STATE["histogram"].itemsize
assert STATE["spare"].itemsize >= 8 + 4 * MOST_ROWS


_LINE: Final = 64
"""Bytes of a cache line."""
assert _BEGIN % 8 == _END % 8 == KEPT.itemsize % _LINE == 0
_BEGIN_WORD: Final = _BEGIN // 8
_WORDS: Final = (_END - _BEGIN) // 8
"""Words of the histograms in a record."""
_KEPT_WORDS: Final = KEPT.itemsize // 8
_KEPT_BYTES: Final = KEPT.itemsize
_ROW_BYTES: Final = ROW.itemsize


class Histograms:
    """Rows of octaves that records take one after another, and give back when their tasks end.

    Threads take rows from stacks of their own, which are filled before they begin, so that no thread waits for another
    one. What is left is returned.

    Attributes
    ----------
    rows : structured array of ``ROW``, shape (room,)
    """

    def __init__(self) -> None:
        self.rows = blank_records((0,), ROW)
        self._used = 0  # rows ever lent
        self._free = np.zeros(0, np.int32)

    def __len__(self) -> int:
        return self._used - len(self._free)

    def lend(self, n: int) -> NDArray[np.int32]:
        """Return the numbers of so many free rows, from 1."""
        again, self._free = self._free[:n], self._free[n:]
        fresh = np.arange(self._used + 1, self._used + 1 + n - len(again), dtype=np.int32)
        self._used += len(fresh)
        self.rows = room_for(self.rows, self._used)
        return np.concatenate([again, fresh])

    def take_back(self, numbers: NDArray[np.int32]) -> None:
        """Return rows for reuse, after those that are free already."""
        self._free = np.concatenate([self._free, numbers])
        # the last ones were never lent to others: they are no longer counted
        other = np.flatnonzero(self._free[::-1] != np.arange(self._used, self._used - len(self._free), -1))
        n = int(other[0]) if len(other) else len(self._free)
        self._free, self._used = self._free[: len(self._free) - n], self._used - n

    def release(self, numbers: NDArray[np.int32]) -> None:
        """Free the rows of tasks that have ended, and forget what they hold."""
        blank_rows(self.rows, numbers.astype(np.int64) - 1)
        self.take_back(numbers)

    def recall(self, rows: NDArray[Any], free: NDArray[np.int32]) -> None:
        """Go on from what ``memory`` gave; the arrays are kept, not copied."""
        self.rows, self._used, self._free = rows, len(rows), free

    def memory(self) -> tuple[NDArray[Any], NDArray[np.int32]]:
        """Return the rows to save, and the numbers of those that are free, in the order in which they are lent."""
        return self.rows[: self._used], self._free


def words_of(records: NDArray[Any]) -> NDArray[np.int64]:
    """Return records as words of eight bytes, which are copied several at a time; shape (n, words of a record)."""
    return records.view(np.int64).reshape(len(records), records.dtype.itemsize // 8)


@numba.njit(**LENT)
def unpack(
    kept: Any,  # (n_tasks, words of KEPT) int64
    records: Any,  # (n_tasks,) KEPT, the same memory
    rows: Any,  # (n_rows,) ROW
    task: int,
    s: Any,  # a record of STATE, written
    s_words: Any,  # (words of STATE,) int64, the same memory
) -> None:
    """Write the record of a task."""
    of, record = kept[task], records[task]
    for k in range(_BEGIN_WORD):
        s_words[k] = of[k]
    for k in range(_BEGIN_WORD, _KEPT_WORDS):
        s_words[k + _WORDS] = of[k]
    for k in range(_BEGIN_WORD, _BEGIN_WORD + _WORDS):
        s_words[k] = 0
    bits, q = record.octaves, 0
    for o in range(_OCTAVES):
        for h in range(_KINDS):
            if bits & np.uint64(1):
                block = rows[record.rows[q // BLOCKS] - 1].block[q % BLOCKS]
                for b in range(_TO_OCTAVE):
                    s.histogram[_TO_OCTAVE * o + b, h] = block[b]
                s.octave[o, h] = block[_TO_OCTAVE]
                q += 1
            bits >>= np.uint64(1)


@numba.njit(**LENT)
def pack(
    s: Any,  # a record of STATE
    s_words: Any,  # (words of STATE,) int64, the same memory
    kept: Any,  # (n_tasks, words of KEPT) int64, written
    records: Any,  # (n_tasks,) KEPT, the same memory
    rows: Any,  # (n_rows,) ROW, written
    task: int,
    free: Any,  # (m,) int32: numbers of rows that may be taken
    taken: Any,  # (1,) int64: how many of them have been, changed
) -> None:
    """Keep the record of a task, which ``unpack`` has written; needs ``MOST_ROWS`` free rows at most."""
    of, record = kept[task], records[task]
    for k in range(_BEGIN_WORD):
        of[k] = s_words[k]
    for k in range(_BEGIN_WORD, _KEPT_WORDS):
        of[k] = s_words[k + _WORDS]
    bits, bit, q = np.uint64(0), np.uint64(1), 0
    for o in range(_OCTAVES):
        for h in range(_KINDS):
            if s.octave[o, h] > 0.0:  # the sum of its bins, and no less than each of them
                if record.rows[q // BLOCKS] == 0:
                    record.rows[q // BLOCKS] = free[taken[0]]
                    taken[0] += 1
                block = rows[record.rows[q // BLOCKS] - 1].block[q % BLOCKS]
                for b in range(_TO_OCTAVE):
                    block[b] = s.histogram[_TO_OCTAVE * o + b, h]
                block[_TO_OCTAVE] = s.octave[o, h]
                bits |= bit
                q += 1
            bit <<= np.uint64(1)
    record.octaves = bits


@numba.njit(**LENT)
def fetch(record: Any) -> None:
    """Fetch a record of KEPT while another one is worked on."""
    for at in range(0, _KEPT_BYTES, _LINE):
        fetch_line(record, at)  # type: ignore[call-arg]  # numba gives the first itself


@numba.njit(**LENT)
def fetch_rows(record: Any, rows: Any) -> None:
    """Fetch the histograms of a record of KEPT that has been fetched."""
    for q in range(MOST_ROWS):
        if record.rows[q] > 0:
            for at in range(0, _ROW_BYTES, _LINE):
                fetch_line(rows[record.rows[q] - 1], at)  # type: ignore[call-arg]
