"""What the closed loop remembers of runs, machines and slots: records that numpy and compiled code share."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from reclaim.features.compiled import code_field

AHEAD, BLOCKED, PENDING, RUNNING, DONE = range(5)
"""States of a run: not submitted yet; submitted while the task's run before goes on; waiting for a machine; on one;
ended."""

NON_PRODUCTION, PRODUCTION, MONITORING = range(3)
"""Bands of priorities. Work of the upper two is placed by limit."""

OWN_LIMIT, MACHINE, PREEMPTED, MACHINE_GONE = range(4)
CAUSES: Final = ("own_limit", "machine", "preempted", "machine_gone")
"""Why a run was stopped before its end: its machine was out of memory and it above its own limit; its machine was out
of memory; it made room for one of higher priority; its machine was taken away."""

NO_REASON, CONSTRAINTS, TOO_LARGE, SPREAD, CPU, MEMORY, BOTH = range(7)
REASONS: Final = ("none", "constraints", "too_large", "spread", "cpu", "memory", "cpu_and_memory")
"""Why a run waits: no machine in service meets its constraints; it is larger than every one that does; those with room
hold as many of its collection as may be on one; or most machines lack CPU alone, memory alone, or both. None: it was
stopped, and not tried again yet."""

_COMPILED_FILES: Final = (
    *(f"replay/closedloop_{name}.py" for name in ("state", "sums", "turns", "kernel")),
    "replay/constants.py", "replay/placement.py",
)  # fmt: skip

RUN = np.dtype(
    [
        # what a look through the runs of a machine reads, side by side
        ("next", "i4"), ("previous", "i4"), ("rank", "i4"), ("band", "i1"), ("service", "?"), ("latency", "?"),
        ("carried", "?"), ("placed_us", "i8"), ("offset_us", "i8"), ("reservation", "f8", (2,)), ("limit", "f8", (2,)),
        ("use", "f8", (2,)),
        # as submitted
        ("first", "i8"), ("stop", "i8"), ("arrival_us", "i8"), ("duration_us", "i8"), ("collection", "i8"),
        ("after", "i8"), ("then", "i8"), ("mask", "i4"), ("per_machine", "i4"), ("varies", "?"), ("asked", "f8", (2,)),
        # as it goes
        ("state", "i1"), ("reason", "i1"), ("machine", "i4"), ("cursor", "i8"), ("waiting_us", "i8"),
        ("ready_us", "i8"), ("first_placed_us", "i8"), ("ended_us", "i8"), ("ran_us", "i8"), ("lost_us", "i8"),
        ("waited_us", "i8"), ("kills", "i4", (4,)),
        code_field(*_COMPILED_FILES),
    ]
)  # fmt: skip
"""One run of a task, from its submission to its end; see ``workload.Workload``. ``asked`` is its first limit, which
``varies`` or not; ``ready_us`` is when nothing but a machine was wanting, ``offset_us`` how far it was when placed.
``next`` and ``previous`` chain the runs of a machine in the order in which they are preempted."""

WAITING = np.dtype(
    [
        ("turn", "i8"), ("run", "i8"), ("until_us", "i8"), ("not_before_us", "i8"), ("collection", "i8"),
        ("asked", "f8", (2,)), ("mask", "i4"), ("rank", "i4"), ("per_machine", "i4"), ("band", "i1"), ("reason", "i1"),
        ("special", "?"),
    ]
)  # fmt: skip
"""What has to be known of a run that waits to pass it over: a line of memory or two, where the run itself is six. The
first entry's ``run`` is how many others there are. ``special`` ones are always tried: what they ask for is not
``asked``."""

RANKS: Final = 16
"""Ranks that a machine's sums tell apart, from the lowest up; the last one stands for all above it as well."""

MACHINE_STATE = np.dtype(
    [
        ("capacity", "f8", (2,)), ("up", "?"), ("open", "?"), ("head", "i4"), ("count", "i4"), ("lowest", "i4"),
        ("use", "f8", (2,)), ("limit", "f8", (2,)), ("reserved", "f8", (2,)),
        ("production", "f8", (2,)), ("busy_us", "i8"), ("changed_us", "i8"), ("up_to_rank", "f8", (RANKS, 2)),
    ]
)  # fmt: skip
"""Sums over a machine's runs: ``reserved`` of reservations; ``production`` of the limits of production; ``up_to_rank``
of the reservations of non-production of at most each rank. ``lowest`` is the lowest rank among them."""

CAPACITY, FREE, UNPROMISED, LOWEST, FREED = 0, 2, 4, 6, 7
"""Rows of ``Board.rooms``: two, one for each resource, of what a machine has; two of what no reservation holds; two of
what is not promised to production; the lowest rank; and from the last one on two for each rank, of what is free once
all non-production work of at most that rank is gone."""

ROOM_ROWS: Final = FREED + 2 * RANKS

TAPE = np.dtype([("from_us", "i8"), ("use", "f8", (2,)), ("limit", "f8", (2,))])
"""One measurement window of a run: its start since the run's, mean CPU and largest memory in it, the limit."""

TICK = np.dtype(
    [
        ("use", "f8", (2,)), ("reserved", "f8", (2,)), ("limit", "f8", (2,)), ("capacity", "f8", (2,)),
        ("in_reclaimed", "f8", (2,)), ("throttled_s", "f8", (2,)), ("cpu_s", "f8", (2,)), ("kills", "i4", (4,)),
        ("out_of_memory", "i4"), ("running", "i4"), ("pending", "i4", (3,)), ("reasons", "i4", (7,)), ("ended", "i4"),
    ]
)  # fmt: skip
"""What is seen of the cell in one slot; ``throttled_s`` and ``cpu_s`` of batch, then latency-sensitive work."""

KILL = np.dtype([("at_us", "i8"), ("run", "i8"), ("machine", "i4"), ("cause", "i4"), ("lost_us", "i8")])
"""A run stopped before its end, and how much of it has to be done again."""

CHANGE = np.dtype([("at_us", "i8"), ("machine", "i4"), ("up", "?"), ("open", "?"), ("capacity", "f8", (2,))])
"""A machine's state from a time on."""

COMPILED: Final[dict[str, Any]] = {"cache": True, "nogil": True, "error_model": "numpy"}
"""How the closed loop is compiled. Division by zero gives infinity or NaN and raises nothing."""


class Board(NamedTuple):
    """All that the mechanics work on, in one slot; arrays of the records above."""

    runs: NDArray[Any]
    machines: NDArray[Any]
    rooms: NDArray[np.float32]
    """What machines have at most, to be looked through fast, shape (ROOM_ROWS, n_machines); -inf where nothing is to be
    placed. A little too large rather than too small: what is passed over for it has no room."""
    tape: NDArray[Any]
    held: NDArray[np.float64]
    """The reservation in force as each window of the tape begins, shape (n_rows, n_resources)."""
    masks: NDArray[np.bool_]
    """Machines on which runs of each mask may be, shape (n_masks, n_machines)."""
    how: Any
    random: NDArray[np.uint64]
    pending: NDArray[Any]
    kills: NDArray[Any]
    """The first entry's ``run`` is where the next one goes."""
    tick: Any
