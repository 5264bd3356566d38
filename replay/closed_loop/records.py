"""Records of runs, machines and slots of the closed loop, shared by numpy and compiled code."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from reclaim.data.core.jit import LENT

AHEAD, BLOCKED, PENDING, RUNNING, DONE = range(5)
"""States of a run: not yet submitted; submitted while the task's earlier run goes on, or a collection that
must end before; waiting for a machine; on a
machine; ended."""

NON_PRODUCTION, PRODUCTION, MONITORING = range(3)
"""Bands of priorities. Work of the upper two is placed by limit."""

OWN_LIMIT, MACHINE, PREEMPTED, MACHINE_GONE = range(4)
CAUSES: Final = ("own_limit", "machine", "preempted", "machine_gone")
"""Causes of a stop before the end: the machine was out of memory and the run above its own limit; the machine was out
of memory; a run of higher priority needed the room; the machine was taken away."""

NO_REASON, CONSTRAINTS, TOO_LARGE, SPREAD, CPU, MEMORY, BOTH = range(7)
REASONS: Final = ("none", "constraints", "too_large", "spread", "cpu", "memory", "cpu_and_memory")
"""Reasons for waiting: no machine in service meets the constraints; the run is larger than every machine that does;
those with room hold as many of its collection as may share one; most machines lack CPU alone, memory alone, or both.
``none`` is a run that was stopped and has not been tried again."""

RUN = np.dtype(
    [
        # read by a loop over the runs of a machine, adjacent in memory
        ("next", "i4"), ("previous", "i4"), ("rank", "i4"), ("band", "i1"), ("service", "?"), ("latency", "?"),
        ("carried", "?"), ("held", "?"), ("placed_us", "i8"), ("offset_us", "i8"), ("reservation", "f8", (2,)),
        ("limit", "f8", (2,)), ("use", "f8", (2,)),
        # as submitted
        ("first", "i8"), ("stop", "i8"), ("arrival_us", "i8"), ("duration_us", "i8"), ("collection", "i8"),
        ("after", "i8"), ("then", "i8"), ("mask", "i4"), ("per_machine", "i4"), ("varies", "?"),
        ("user", "i4"), ("first_limit", "f8", (2,)),
        # as it goes
        ("state", "i1"), ("reason", "i1"), ("machine", "i4"), ("cursor", "i8"), ("waiting_us", "i8"),
        ("ready_us", "i8"), ("first_placed_us", "i8"), ("ended_us", "i8"), ("ran_us", "i8"), ("lost_us", "i8"),
        ("waited_us", "i8"), ("kills", "i4", (4,)),
    ]
)  # fmt: skip
"""One run of a task, from its submission to its end; see ``workload.Workload``. ``varies`` says whether the limit
differs from ``first_limit`` later. From ``ready_us`` on the run lacks nothing but a machine. ``offset_us`` is its
progress when placed. A ``held`` run counts its limit where machines reserve for all runs together. ``next`` and
``previous`` chain the runs of a machine in the order of preemption. ``carried`` runs were in progress when the period
began."""

WAITING = np.dtype(
    [
        ("turn", "i8"), ("run", "i8"), ("until_us", "i8"), ("not_before_us", "i8"), ("collection", "i8"),
        ("first_limit", "f8", (2,)), ("mask", "i4"), ("rank", "i4"), ("per_machine", "i4"), ("user", "i4"),
        ("band", "i1"), ("reason", "i1"), ("special", "?"),
    ]
)  # fmt: skip
"""The part of a waiting run that decides whether it is skipped: a cache line or two, where ``RUN`` has six. The first
entry's ``run`` counts the others. ``special`` runs are always tried, as they need something else than
``first_limit``."""

RANKS: Final = 16
"""Ranks that a machine's sums distinguish, from the lowest up; the last one includes all above it."""

MACHINE_STATE = np.dtype(
    [
        # read by searches, adjacent in memory
        ("capacity", "f8", (2,)), ("reserved", "f8", (2,)), ("production", "f8", (2,)), ("head", "i4"),
        ("lowest", "i4"), ("count", "i4"), ("up", "?"), ("open", "?"),
        ("use", "f8", (2,)), ("limit", "f8", (2,)), ("busy_us", "i8"), ("changed_us", "i8"),
        ("least", "f8", (2,)), ("up_to_rank", "f8", (RANKS, 2)),
    ]
)  # fmt: skip
"""Sums over a machine's runs: ``reserved`` of reservations, or the prediction for all together; ``production`` of the
limits of production; ``least`` of what each run adds at least to ``reserved``, whatever the others, and
``up_to_rank`` the same of non-production of at most each rank. ``lowest`` is the lowest rank among them."""

CAPACITY, FREE, UNPROMISED, LOWEST, FREED = 0, 2, 4, 6, 7
"""First rows of each part of ``LoopState.rooms``, with a row for each resource: the capacity; what reservations leave;
what production's limits leave; the lowest rank (one row); and, rank by rank, the most that can be free without
non-production work of at most that rank."""

ROOM_CHANGE = np.dtype([("machine", "i4"), ("before", "f4", (LOWEST,)), ("after", "f4", (LOWEST,))])
"""A change of a machine's column of ``LoopState.rooms``, rows ``CAPACITY``, ``FREE`` and ``UNPROMISED``."""

FAILURE = np.dtype(
    [
        ("need", "f8", (2,)), ("at", "i8"), ("mask", "i4"), ("rank", "i4"), ("band", "i1"),
        ("allowed", "i8"), ("large", "i8"), ("cpu", "i8"), ("memory", "i8"), ("both", "i8"),
    ]
)  # fmt: skip
"""A search that found no machine, after ``at`` changes of rooms. Of the machines in service that its constraints allow,
``large`` could hold it if they were empty; of these some lack CPU alone, ``memory`` alone, or both."""

TAPE = np.dtype([("from_us", "i8"), ("use", "f8", (2,)), ("limit", "f8", (2,))])
"""One measurement window of a run: its start after the run's, of a ``carried`` run after the period's; mean CPU and
largest memory in it or in its slot (``workload.Workload``), and the limit."""

VICTIMS = np.dtype([("machine", "i8"), ("at", "i8"), ("rank", "i8"), ("lost_us", "i8"), ("freed", "f8", (2,))])
"""Cost of making room on a machine: the run that is read next, -1 for none, the highest victim's rank, -1 while what
is freed does not suffice, and the work lost."""

TICK = np.dtype(
    [
        ("use", "f8", (2,)), ("reserved", "f8", (2,)), ("limit", "f8", (2,)), ("capacity", "f8", (2,)),
        ("in_reclaimed", "f8", (2,)), ("throttled_s", "f8", (2,)), ("cpu_s", "f8", (2,)), ("kills", "i4", (4,)),
        ("out_of_memory", "i4"), ("running", "i4"), ("pending", "i4", (3,)), ("reasons", "i4", (7,)), ("ended", "i4"),
    ]
)  # fmt: skip
"""Observations of the cell in one slot; ``throttled_s`` and ``cpu_s`` are of batch, then latency-sensitive work."""

KILL = np.dtype([("at_us", "i8"), ("run", "i8"), ("machine", "i4"), ("cause", "i4"), ("lost_us", "i8")])
"""A run stopped before its end, and the part of it that has to be done again."""

CHANGE = np.dtype([("at_us", "i8"), ("machine", "i4"), ("up", "?"), ("open", "?"), ("capacity", "f8", (2,))])
"""A machine's state from a time on."""

MAKING: Final[dict[str, Any]] = LENT | {"_nrt": True}
"""Options of the few compiled functions that make arrays. Arguments of several integer types, such as a constant or an
int32, are converted to int64, since a function is compiled again for each type."""

TOGETHER: Final = 128
"""Machines that a search looks at together, before those of them that may have room."""
IN_TURN: Final = 16
"""Number of machines whose runs are read in turn, one of each, so that reads from memory overlap."""
PREEMPTED_IN_TURN: Final = 8
"""The same where costs of preemption are computed, for which few machines are left."""


class LoopState(NamedTuple):
    """Everything that compiled code reads and changes in one slot; arrays of the records above."""

    runs: NDArray[Any]
    machines: NDArray[Any]
    rooms: NDArray[np.float32]
    """Upper bounds of the room on machines, for fast searches, shape (FREED + 2 * n_ranks, n_machines), the ranks
    of non-production; -inf where nothing may be placed. A machine that is skipped by them certainly has no room."""
    changed: NDArray[Any]
    """The last changes of ``rooms``, of ``ROOM_CHANGE``, at their number modulo the length."""
    n_changed: NDArray[np.int64]
    """Number of changes of ``rooms``, shape (1,)."""
    anchors: NDArray[np.int64]
    """Time at which each machine's first run, in the order of preemption, would have begun without a break, µs;
    ``rooms.NO_ANCHOR`` where it is not batch work that can be preempted; shape (n_machines,)."""
    failures: NDArray[Any]
    """Searches that found no machine, of ``FAILURE``, at a hash of what they asked for."""
    tape: NDArray[Any]
    reserved: NDArray[np.float64]
    """The current reservation as each window of the tape begins, shape (n_rows, n_resources)."""
    masks: NDArray[np.bool_]
    """Machines that runs of each mask may use, shape (n_masks, n_machines)."""
    settings: Any
    """``simulate.SETTINGS``."""
    random: NDArray[np.uint64]
    pending: NDArray[Any]
    served: NDArray[np.int64]
    """Number of waiting runs that have been placed; and for each user that number at the user's last one."""
    left: NDArray[np.int64]
    """Number of runs of each collection that have not ended."""
    before: NDArray[np.int64]
    """Collections that must end before another may start, one after the other, shape (n_pairs,)."""
    before_of: NDArray[np.int64]
    """Begin of those of each collection in ``before``, shape (n_collections + 1,)."""
    held: NDArray[np.int64]
    """Runs that wait for another collection's end; the first entry is their number."""
    due: NDArray[np.int64]
    """Placed runs that end within the slot if nothing stops them, and services that wait and end in it, some of them
    twice; the first entry is their number."""
    kills: NDArray[Any]
    """The first entry's ``run`` is the position of the next one."""
    tick: Any
    """``TICK`` of this slot."""
    need: NDArray[np.float64]
    """Need of the run that is tried, shape (n_resources,)."""
    found: NDArray[np.int64]
    """Machines that a search found, or runs of machines that are read in turn, shape (TOGETHER,)."""
    victims: NDArray[Any]
    """Machines whose costs of preemption are computed in turn, of ``VICTIMS``, shape (PREEMPTED_IN_TURN,)."""
    foreseen: Any
    """``foreseen.State``."""
