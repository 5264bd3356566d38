"""Puts tasks on other machines at random: more sets of tasks to learn from than the machines of a cell held."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from reclaim.data.schema import UNKNOWN_ID
from reclaim.data.windows import Windows
from reclaim.training.machines.snapshots import Snapshots, lay_out_cell

Ids = NDArray[np.int64]

SIZES: Final = (1.0, 1.0, 0.5, 2.0)
"""Machines of each regrouping, over those of the cell: the tasks of a machine are about as many, twice and half as
many. Four more of these reclaimed no more of other cells (``benchmarks/LOG.md``, 2026-11-27)."""


def regroup(
    windows: Windows, at: Snapshots, slot_us: int, horizon_s: int, most: int
) -> Iterator[tuple[Snapshots, Ids]]:
    """Yield snapshots of the same tasks on drawn machines, one regrouping after another, and the machine of each.

    A task stays on its machine for life. Tasks of machines of even numbers are on drawn ones of even numbers, the
    others on odd ones; a task that moved counts to its first machine. One that is in no snapshot of ``at`` is on none.
    The draw is the same in every run.

    Parameters
    ----------
    windows : Windows
        Those that ``at`` is laid out of.
    at : Snapshots
    slot_us, horizon_s : int
        As for ``lay_out_cell``.
    most : int
        Snapshots to yield, about: of more, every few slots are left out.
    """
    task = windows.task_numbers()
    half = np.full(task.max() + 1, -1)
    late_first = np.argsort(at.rows)[::-1]
    half[task[at.rows[late_first]]] = at.machine[at.snapshot[late_first]] % 2
    every = max(1, round(len(at) * sum(SIZES) / most))
    judged = windows.start_us // slot_us % every == 0
    rng = np.random.default_rng(0)
    for size in SIZES:
        drawn = 2 * rng.integers(0, max(1, round(size * at.n_machines / 2)), len(half)) + half
        on = np.where(half[task] < 0, UNKNOWN_ID, drawn[task])
        other = lay_out_cell(replace(windows, machine_id=on), at.resource, slot_us, horizon_s, judged=judged)
        if other is not None:
            yield other, on[other.rows[np.searchsorted(other.snapshot, np.arange(len(other)))]]
