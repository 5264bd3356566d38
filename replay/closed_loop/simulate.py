"""Runs a workload on a cell's machines under an estimator's reservations, slot by slot: the closed loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from reclaim.data.core.arrays import lent
from reclaim.data.errors import ConfigError
from reclaim.replay.closed_loop.following import Held, HeldMachines
from reclaim.replay.closed_loop.foreseen import ByMachine, State, no_state
from reclaim.replay.closed_loop.kernel import pass_slot, schedule, settle
from reclaim.replay.closed_loop.placement import POLICIES
from reclaim.replay.closed_loop.records import (
    FAILURE,
    FREED,
    KILL,
    NON_PRODUCTION,
    PENDING,
    PREEMPTED_IN_TURN,
    RANKS,
    ROOM_CHANGE,
    RUNNING,
    TICK,
    TOGETHER,
    VICTIMS,
    WAITING,
    LoopState,
)
from reclaim.replay.closed_loop.rooms import update_all_rooms
from reclaim.replay.closed_loop.workload import CellMachines, Workload
from reclaim.training.margins.margin import STARTUP_HOLD_S

SETTINGS: Final = np.dtype(
    [
        ("stranding", "f8"), ("leftover", "f8"), ("enough", "i8"), ("checkpoint_us", "i8"), ("startup_us", "i8"),
        ("gives_way", "?"),
    ]
)  # fmt: skip
"""``Scheduling`` for compiled code, and the time for which a run that was just placed keeps its limit."""

_LONGEST_S: Final = 1e9
"""Longer than any trace: 31 years."""
_CHANGES, _FAILURES = 16, 1 + 1_024
"""Changes of machines that are kept, in addition to one for every eight machines, since more cost as much as a full
search; and failed searches that are kept."""


@dataclass(frozen=True)
class Scheduling:
    """Settings of a cell's scheduler."""

    policy: str = "hybrid"
    """Score of machines with room: one of ``placement.POLICIES``."""
    enough: int = 100
    """Number of machines with room, or that can make room, that are scored before the best of them is taken."""
    checkpoint_s: float = 3_600.0
    """Stopped batch work goes back to the last whole multiple of this many seconds of its running time. With 0 it goes
    back to its beginning, or to where it was when the period began."""
    gives_way: bool = False
    """Preempts non-production, from the lowest priority up, as soon as more memory is reserved on a machine than it
    has, before it runs out. Without it runs are stopped once memory has run out."""
    seed: int = 1
    """Seed of the order in which machines are searched."""

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ConfigError(f"policy must be one of {', '.join(POLICIES)}, got {self.policy!r}")
        if self.enough < 1:
            raise ConfigError(f"enough must be at least 1, got {self.enough}")
        if not 0 <= self.checkpoint_s <= _LONGEST_S:
            raise ConfigError(f"checkpoint_s must be 0 to {_LONGEST_S:g} seconds, got {self.checkpoint_s}")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed must be at least 0 and below 2**63, got {self.seed}")

    def compiled(self) -> Any:
        """Return a record of ``SETTINGS``."""
        settings = np.zeros(1, SETTINGS)
        settings[0] = (
            *POLICIES[self.policy],
            self.enough,
            int(self.checkpoint_s * 1e6),
            int(STARTUP_HOLD_S * 1e6),
            self.gives_way,
        )
        return settings[0]


@dataclass(frozen=True)
class Outcome:
    """Result of a closed loop.

    Attributes
    ----------
    workload : Workload
        As given.
    runs : structured array of ``records.RUN``, shape (n_runs,)
        At the end of the period.
    machines : structured array of ``records.MACHINE_STATE``
    ticks : structured array of ``records.TICK``, shape (n_slots,)
    kills : structured array of ``records.KILL``, in the order of their times
    held : Held
        Result of comparing the machines with the peaks of their runs.
    """

    workload: Workload
    runs: NDArray[Any]
    machines: NDArray[Any]
    ticks: NDArray[Any]
    kills: NDArray[Any]
    held: Held


def simulate(
    workload: Workload,
    machines: CellMachines,
    reserved: NDArray[np.float64],
    margin: NDArray[np.int8] | None = None,
    scheduling: Scheduling | None = None,
    *,
    by_machine: ByMachine | None = None,
    horizon_s: int | None = None,
) -> Outcome:
    """Run a workload on machines; the same arguments give the same outcome.

    At the start of every slot usage and reservations move on, machines out of memory are relieved, machines out of CPU
    throttle, and waiting runs are tried again. Within the slot runs end, machines change and runs arrive, at their
    own times.

    Parameters
    ----------
    workload : Workload
    machines : CellMachines
        Those of ``workload.masks``.
    reserved : float64, shape (n_margins, n_rows, n_resources)
        The current reservation when each window of the tape begins, in the trace's unit, guards included, under each
        margin.
    margin : int8, shape (n_slots,), or None
        Row of ``reserved`` for each slot; the first one throughout when None.
    scheduling : Scheduling or None
        The defaults when None.
    by_machine : ByMachine or None
        An estimator of machines, by which they reserve for all runs on them together; ``reserved`` is its ``alone``.
    horizon_s : int or None
        Time ahead for which machines are compared with the peaks of their runs; None: they are not.
    """
    scheduling = scheduling or Scheduling()
    order = np.random.default_rng(scheduling.seed).permutation(len(machines))  # of searches
    place = np.argsort(order)
    changes = machines.changes.copy()
    changes["machine"] = place[changes["machine"]]
    slot_us = workload.slot_s * 1_000_000
    n_slots = -(-(workload.stop_us - workload.start_us) // slot_us)
    ticks = np.zeros(n_slots, TICK)
    (reserved,) = lent(reserved)
    margin = np.zeros(n_slots, np.int8) if margin is None else margin
    margins = None if by_machine is None else by_machine.margins()
    foreseen = no_state() if by_machine is None else by_machine.state(len(machines))
    held = _held(workload, len(machines), by_machine, horizon_s)
    loop = _before_first_slot(
        workload, machines, order, scheduling, reserved=reserved[margin[0]], tick=ticks[0],
        foreseen=foreseen if margins is None else foreseen._replace(margins=margins[margin[0]]),
    )  # fmt: skip
    runs, there, kills, at = loop.runs, loop.machines, loop.kills, np.zeros(2, np.int64)
    update_all_rooms(loop)
    # runs in progress when the period began are placed before the first slot
    pass_slot(loop, changes, at, workload.start_us, workload.start_us + 1)
    for t in range(n_slots):
        now_us = workload.start_us + t * slot_us
        if len(kills) - kills[0]["run"] <= len(runs):  # a slot may need more
            kills = np.concatenate([kills, np.zeros(len(kills), KILL)])
        loop = loop._replace(reserved=reserved[margin[t]], kills=kills, tick=ticks[t])
        followed = None if held is None else held.margins(now_us // slot_us)
        margins = margins if followed is None else followed
        if margins is not None:
            loop = loop._replace(foreseen=foreseen._replace(margins=margins[margin[t]]))
        until_us = min(now_us + slot_us, workload.stop_us)
        settle(loop, float(workload.slot_s), now_us, until_us)
        schedule(loop, now_us, until_us)
        if held is not None:
            held.see(now_us // slot_us, runs, there, foreseen.sums)
        pass_slot(loop, changes, at, now_us, until_us)
    _stop_the_clock(runs, there, workload.stop_us)
    kills = kills[1 : kills[0]["run"]].copy()
    kills["machine"] = order[kills["machine"]]
    runs["machine"] = np.where(runs["machine"] >= 0, order[runs["machine"]], -1)
    return Outcome(workload, runs, there[place], ticks, kills, Held() if held is None else held.held)


def _before_first_slot(
    workload: Workload, machines: CellMachines, order: NDArray[np.int64], scheduling: Scheduling, *,
    reserved: NDArray[np.float64], tick: Any, foreseen: State,
) -> LoopState:  # fmt: skip
    """Return the state of a cell on which nothing is placed yet, its machines in the order of searches."""
    runs = workload.runs.copy()
    (tape,) = lent(workload.tape)  # read-only where another process has sent it
    kills = np.zeros(2 * len(runs) + 1, KILL)  # the first one counts the others
    kills[0]["run"] = 1
    of_lower_band = runs["rank"][runs["band"] == NON_PRODUCTION]
    ranks = min(RANKS, 1 + int(of_lower_band.max(initial=0)))
    collections = 1 + int(runs["collection"].max(initial=0))
    pairs = workload.predecessors[np.argsort(workload.predecessors[:, 0], kind="stable")]
    return LoopState(
        runs=runs,
        machines=machines.state[order],
        rooms=np.zeros((FREED + 2 * ranks, len(machines)), np.float32),
        changed=np.zeros(_CHANGES + len(machines) // 8, ROOM_CHANGE),
        n_changed=np.zeros(1, np.int64),
        anchors=np.zeros(len(machines), np.int64),
        failures=np.zeros(_FAILURES, FAILURE),
        tape=tape,
        reserved=reserved,
        masks=np.ascontiguousarray(workload.masks[:, order]),
        settings=scheduling.compiled(),
        random=np.array([0x9E3779B97F4A7C15 ^ (scheduling.seed + 1)], np.uint64),
        pending=np.zeros(len(runs) + 1, WAITING),
        served=np.zeros(2 + int(runs["user"].max(initial=0)), np.int64),
        left=np.bincount(runs["collection"], minlength=collections).astype(np.int64),
        before=np.ascontiguousarray(pairs[:, 1]),
        before_of=np.searchsorted(pairs[:, 0], np.arange(collections + 1)).astype(np.int64),
        held=np.zeros(len(runs) + 1, np.int64),
        due=np.zeros(2 * len(runs) + 1, np.int64),
        kills=kills,
        tick=tick,
        need=np.zeros(2),
        found=np.zeros(TOGETHER, np.int64),
        victims=np.zeros(PREEMPTED_IN_TURN, VICTIMS),
        foreseen=foreseen,
    )


def _held(
    workload: Workload, n_machines: int, by_machine: ByMachine | None, horizon_s: int | None
) -> HeldMachines | None:
    """Return the object that compares machines with their peaks; None where nothing does."""
    follows = by_machine is not None and by_machine.at_once is not None
    assert horizon_s is not None or not follows, "margins follow peaks within a horizon"
    if horizon_s is None:
        return None
    varies = workload.runs["varies"]
    return HeldMachines(workload.demand, varies, n_machines, horizon_s, workload.slot_s, by_machine)


def _stop_the_clock(runs: NDArray[Any], machines: NDArray[Any], now_us: int) -> None:
    """Add the time up to the end of the period to runs that still run or wait."""
    running, waiting = runs["state"] == RUNNING, runs["state"] == PENDING
    runs["ran_us"][running] += now_us - runs["placed_us"][running]
    runs["waited_us"][waiting] += now_us - runs["waiting_us"][waiting]
    machines["busy_us"] += machines["count"] * (now_us - machines["changed_us"])
    machines["changed_us"] = now_us
