"""Remembers slots without usage and the fold before them, as long as their samples may still come."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np

from reclaim.data.samples import WINDOW_US
from reclaim.data.traces.history import PIECE_S, RawSeries

LATENESS_S: Final = 900
"""Time by which a slot may precede the last one with usage, as windows of a task may by ``RECLAIM_LATENESS_S``."""
LONGEST_S: Final = PIECE_S
"""Time for which a fold is remembered: a Prometheus that sends to another keeps two hours that it could not send."""
_SLOT_S: Final = WINDOW_US // 1_000_000


class EmptySlots:
    """Slots of which no usage was there when they were folded.

    Attributes
    ----------
    counts : dict of int to int
        Start of each, in seconds, and how many samples of usage it had when it was last folded.
    before : tuple of (int, bytes) or None
        A time at or before the first of them, in seconds, and the fold of what precedes it; None without slots.
    """

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        self.before: tuple[int, bytes] | None = None
        self._latest_s = 0

    @property
    def range_s(self) -> tuple[int, int]:
        """Start of the first of them, and end of the last."""
        return min(self.counts), max(self.counts) + _SLOT_S

    def folded(self, usage: Iterable[RawSeries], start_s: int, end_s: int, before: bytes) -> None:
        """Add the slots of a range that was folded, and forget those whose windows would come too late.

        Parameters
        ----------
        usage : iterable of RawSeries
        start_s, end_s : int
        before : bytes
            The fold of what precedes the range.
        """
        found = _counted(usage)
        for slot_s in range(start_s, end_s, _SLOT_S):
            if slot_s in self.counts or slot_s not in found:
                self.counts[slot_s] = found.get(slot_s, 0)
        self.before = self.before or (start_s, before)
        self._latest_s = max(self._latest_s, *(slot_s for slot_s in found if slot_s < end_s), 0)
        self.counts = {slot_s: n for slot_s, n in self.counts.items() if slot_s >= self._latest_s - LATENESS_S}
        if not self.counts or self.before[0] < end_s - LONGEST_S:
            self.counts, self.before = {}, None

    def came(self, usage: Iterable[RawSeries]) -> list[int]:
        """Return the starts of the slots that have more samples of usage now, in seconds, rising."""
        found = _counted(usage)
        return sorted(slot_s for slot_s, n in self.counts.items() if found.get(slot_s, 0) > n)


def _counted(usage: Iterable[RawSeries]) -> dict[int, int]:
    """Return the number of samples in each slot that has any, by its start in seconds."""
    time_ms = np.concatenate([np.zeros(0, np.int64), *(one.time_ms for one in usage)])
    slot, n = np.unique(time_ms // (_SLOT_S * 1000), return_counts=True)
    return dict(zip((slot * _SLOT_S).tolist(), n.tolist(), strict=True))
