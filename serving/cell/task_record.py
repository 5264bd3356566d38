"""Record of a task, its facts and last window, and the windows of a write on their way into records."""

from __future__ import annotations

import math
from collections import namedtuple
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from reclaim.data import schema as s
from reclaim.data import windows as w
from reclaim.data.schema import RESOURCES, UNKNOWN_ID
from reclaim.data.windows import Windows, with_p90_alone

Ids = NDArray[np.int64]

_CALLED: Final = {"scheduled_us": "run_us", "machine_id": "machine", "limit": "granted"}
"""Fields of a task's last window whose names in ``TASK`` are not those of the columns of ``Windows``."""
LAST: Final = {name: _CALLED.get(name, name) for name in w.COLUMNS if name not in s.TASK_KEY}
"""Column of ``Windows`` → field of ``TASK`` for the last window; the slot says which task's it is."""
LastColumns = namedtuple("LastColumns", LAST.values())  # type: ignore[misc]  # a field for each column
"""Columns of last windows under the names that ``TASK`` has for them."""
_NONE: Final = with_p90_alone(w.empty_windows())
"""No windows, with the columns that are kept of a last one."""
TASK: Final = np.dtype(
    [
        ("limit", "f8", len(RESOURCES)),  # current; NaN before the first is received
        ("limit_us", "i8"),  # since when
        (s.SCHEDULED_US, "i8"),
        ("heard_us", "i8"),  # the clock when anything was last received; UNSEEN_US before that counts
        ("first_us", "i8"), ("windows", "i8"),
        # end_us is -1 before the first window
        *((field, getattr(_NONE, name).dtype, getattr(_NONE, name).shape[1:]) for name, field in LAST.items()),
    ]
)  # fmt: skip
"""Facts and last window of a task. Both share the machine, the owner, the tier, the scheduling class and
``in_alloc``."""
UNSEEN_US: Final = -2
"""``heard_us`` of a task with a slot that readers must not see yet; -1 is before the clock began."""


def _unknown_task() -> Any:
    task = np.zeros((), TASK)
    for name, field in LAST.items():
        task[field] = w.COLUMNS[name].unknown
    for field in (s.END_US, "limit_us", s.SCHEDULED_US):
        task[field] = UNKNOWN_ID
    task["limit"], task["heard_us"] = math.nan, UNSEEN_US
    return task


UNKNOWN_TASK: Final = _unknown_task()
"""Record of a task of which nothing is known."""


def last_windows(key: Ids, task: NDArray[Any]) -> Windows:
    """Return the last windows of tasks, which all have one; key (n, 2), task (n,)."""
    columns = {name: task[field] for name, field in LAST.items()}
    return Windows(collection_id=key[:, 0], instance_index=key[:, 1], **columns)


def keep_last(tasks: NDArray[Any], at: Ids | slice, last: Windows) -> None:
    """Store the last windows of tasks, and the facts in them; ``k`` rows each."""
    last = with_p90_alone(last)
    for name, field in LAST.items():
        tasks[field][at] = getattr(last, name)


def chosen(mask: NDArray[np.bool_], ours: Windows, theirs: Windows) -> Windows:
    """Return ours where the mask is set, theirs elsewhere; mask (n,)."""

    def column(name: str) -> NDArray[Any]:
        a, b = getattr(ours, name), getattr(theirs, name)
        out: NDArray[Any] = np.where(mask.reshape(-1, *[1] * (a.ndim - 1)), a, b)
        return out

    return Windows(**{name: column(name) for name in w.COLUMNS})


def machine_of(tasks: NDArray[Any], at: Ids | slice = slice(None)) -> Ids:
    """Return the machine that each task counts for; -1: unknown, or the task uses what its alloc instance counts."""
    machine: Ids = np.where(tasks["in_alloc"][at], UNKNOWN_ID, tasks["machine"][at])
    return machine


def key_of(windows: Windows) -> Ids:
    """Return collection and instance index of each row's task; shape (n, 2)."""
    return np.column_stack([windows.collection_id, windows.instance_index])


@dataclass(frozen=True)
class Admitted:
    """Windows to take, with all facts filled in, and the outcomes of all windows of the write.

    Attributes
    ----------
    windows : Windows
        Those to take.
    outcome : uint8, shape (n,)
        Outcome of every window: position in ``outcomes.OUTCOMES``.
    """

    windows: Windows
    outcome: NDArray[np.uint8]


@dataclass(frozen=True)
class Taken:
    """Windows folded into the features, and the tasks they touched.

    Attributes
    ----------
    slot : int64, shape (n,)
        Slot of each window's task.
    windows : Windows
        ``n`` rows in time order.
    touched : int64, shape (k,), ascending
    x : float32, shape (k, n_features)
        Features of each touched task after its last window.
    row : int64, shape (k,)
        Row of that last window; -1 where it came in an earlier write.
    last : Windows
        Last windows, ``k`` rows.
    opted_out : bool, shape (k,)
        Whether the task's collection opted out of estimation.
    """

    slot: Ids
    windows: Windows
    touched: Ids
    x: NDArray[np.float32]
    row: Ids
    last: Windows
    opted_out: NDArray[np.bool_]

    def outside_allocs(self) -> Taken:
        """Return it without windows inside an alloc instance, whose resources they use: a replay leaves them out, too.

        Tasks stay; one whose last window is left out has -1 as its ``row``.
        """
        inside = self.windows.in_alloc
        if not inside.any():
            return self
        kept = np.flatnonzero(~inside)
        number = np.full(len(inside) + 1, -1, np.int64)  # the last one for -1
        number[kept] = np.arange(len(kept))
        return replace(self, slot=self.slot[kept], windows=self.windows.take(kept), row=number[self.row])
