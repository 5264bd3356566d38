"""Histories and periods of windows in memory, without a dataset."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from reclaim.data.schema import MACHINES
from reclaim.data.windows import Windows
from reclaim.features.groups import known_seconds
from reclaim.features.splits import TEST
from reclaim.replay.open_loop.history import History, previous_rows
from reclaim.replay.open_loop.period import Period, lay_out_period

NO_MACHINES = {name: np.zeros(0) for name in MACHINES.names}


def history_of(
    windows: Windows, target: np.ndarray | None = None, following: np.ndarray | None = None,
    period: int | NDArray[np.int64] = TEST, group: int | NDArray[np.int64] = 0,
) -> History:  # fmt: skip
    """Return windows with their target and that of the next window, which is the same unless given."""
    n = len(windows)
    target = np.zeros((n, 2)) if target is None else target
    return History(
        windows=windows, target=target, next_target=target if following is None else following,
        period=np.full(n, period, np.uint8), group=np.full(n, group, np.uint8), known_s=known_seconds(windows),
        previous=previous_rows(windows), source_row=np.arange(n),
    )  # fmt: skip


def period_of(windows: Windows, period: int | NDArray[np.int64] = TEST) -> Period:
    """Return a cell of windows whose target is known, by default all of the test period."""
    return lay_out_period(history_of(windows, period=period), NO_MACHINES)
