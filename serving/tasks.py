"""What is kept of a task beside its features: facts and its last window, a record each; and what readers get of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from reclaim.data import schema as s
from reclaim.data import windows as w
from reclaim.data.schema import RESOURCES, UNKNOWN_ID
from reclaim.data.windows import Windows

if TYPE_CHECKING:
    from reclaim.serving.engine import Engine, Scores

Ids = NDArray[np.int64]

TASK: Final = np.dtype(
    [
        ("machine", "i8"), ("user", "i8"), ("name", "i8"), ("tier", "i1"), (s.SCHEDULING_CLASS, "i1"),
        ("in_alloc", "?"),
        ("limit", "f8", len(RESOURCES)),  # in force now; NaN where nobody told
        ("limit_us", "i8"),  # since when
        (s.SCHEDULED_US, "i8"),
        ("heard_us", "i8"),  # the clock when anything was last told of it; UNSEEN_US before that counts
        ("first_us", "i8"), ("windows", "i8"),
        # the last window; end_us is -1 before the first
        (s.START_US, "i8"), (s.END_US, "i8"), ("run_us", "i8"), ("granted", "f8", len(RESOURCES)),
        ("usage", "f8", len(w.CHANNELS)), ("percentiles", "f4", len(w.LEVELS)),
    ]
)  # fmt: skip
"""What is kept of a task beside its features: facts, and its last window."""
UNSEEN_US: Final = -2
"""Stands for the time of a task that has a slot, and nothing yet that may be seen; -1 is before the clock began."""


def _nobody() -> Any:
    nobody = np.zeros((), TASK)
    for name in ("machine", "user", "name", "tier", s.SCHEDULING_CLASS, "limit_us", s.SCHEDULED_US, s.END_US, "run_us"):
        nobody[name] = UNKNOWN_ID
    nobody["heard_us"] = UNSEEN_US
    for name in ("limit", "granted", "usage", "percentiles"):
        nobody[name] = math.nan
    return nobody


NOBODY: Final = _nobody()
"""A task of which nothing is known."""


def last_windows(key: Ids, task: NDArray[Any]) -> Windows:
    """Return the last windows of tasks, shape (n, 2) and (n,); all must have one."""
    return Windows(
        collection_id=key[:, 0], instance_index=key[:, 1], start_us=task[s.START_US], end_us=task[s.END_US],
        scheduled_us=task["run_us"], machine_id=task["machine"], user=task["user"], name=task["name"],
        usage=task["usage"], percentiles=task["percentiles"], limit=task["granted"], tier=task["tier"],
        scheduling_class=task[s.SCHEDULING_CLASS], in_alloc=task["in_alloc"],
    )  # fmt: skip


def keep_last(tasks: NDArray[Any], at: Ids | slice, last: Windows) -> None:
    """Keep the last windows of tasks, and the facts in them; shape (k,) each."""
    for name, column in (
        (s.START_US, last.start_us), (s.END_US, last.end_us), ("tier", last.tier),
        (s.SCHEDULING_CLASS, last.scheduling_class), ("in_alloc", last.in_alloc), ("machine", last.machine_id),
        ("user", last.user), ("name", last.name), ("granted", last.limit), ("run_us", last.scheduled_us),
        ("usage", last.usage), ("percentiles", last.percentiles),
    ):  # fmt: skip
        tasks[name][at] = column


def chosen(mask: NDArray[np.bool_], ours: Windows, theirs: Windows) -> Windows:
    """Return ours where the mask, shape (n,), says so, and theirs elsewhere."""

    def column(name: str) -> NDArray[Any]:
        a, b = getattr(ours, name), getattr(theirs, name)
        out: NDArray[Any] = np.where(mask.reshape(-1, *[1] * (a.ndim - 1)), a, b)
        return out

    return Windows(**{f.name: column(f.name) for f in fields(Windows)})


def key_of(windows: Windows) -> Ids:
    """Return collection and instance index of each row's task; shape (n, 2)."""
    return np.column_stack([windows.collection_id, windows.instance_index])


@dataclass(frozen=True)
class Admitted:
    """Windows that will be taken, every fact filled in, and what becomes of all that were told.

    Attributes
    ----------
    windows : Windows
        Those that are taken.
    outcome : uint8, shape (n,)
        Of every window told: position in ``outcomes.OUTCOMES``.
    """

    windows: Windows
    outcome: NDArray[np.uint8]


@dataclass(frozen=True)
class Taken:
    """Windows that count in the features, and the tasks they touched, whose answers they will change.

    Attributes
    ----------
    slot : int64, shape (n,)
        Of each window.
    windows : Windows
        ``n`` rows in time order.
    touched : int64, shape (k,), ascending
    x : float32, shape (k, n_features)
        Features of each touched task after its last window.
    row : int64, shape (k,)
        Which of the windows that is; -1 where it came earlier.
    last : Windows
        That window, ``k`` rows.
    opted_out : bool, shape (k,)
        Whether the task's collection wants no estimation.
    """

    slot: Ids
    windows: Windows
    touched: Ids
    x: NDArray[np.float32]
    row: Ids
    last: Windows
    opted_out: NDArray[np.bool_]


@dataclass(frozen=True)
class Known:
    """What readers get: copies, each task as of one moment, of ``n`` tasks.

    Attributes
    ----------
    engine : Engine
        Which all scores are of.
    key : int64, shape (n, 2)
    there : bool, shape (n,)
        Whether the task is remembered.
    task : structured array of ``TASK``, shape (n,)
    scores : Scores
        Without quantiles, shape (n, 0, 0), where they were not asked for.
    x : float32, shape (n, n_features), or None
        Features after the last window, where they were asked for.
    opted_out : bool, shape (n,)
    clock_us, present_us : int
        End of the latest window; the time that staleness is judged at. -1 before the first window.
    tracked : int
    """

    engine: Engine
    key: Ids
    there: NDArray[np.bool_]
    task: NDArray[Any]
    scores: Scores
    x: NDArray[np.float32] | None
    opted_out: NDArray[np.bool_]
    clock_us: int
    present_us: int
    tracked: int

    @property
    def last(self) -> Windows:
        """The last windows, of tasks that have one."""
        return last_windows(self.key, self.task)
