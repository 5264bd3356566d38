"""The closed loop: a cell of the trace's machines runs a workload under an estimator's reservations, slot by slot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from reclaim.data.errors import ConfigError
from reclaim.replay import closedloop_kernel as kernel
from reclaim.replay import closedloop_state as state
from reclaim.replay.live import Live
from reclaim.replay.placement import POLICIES, note_all
from reclaim.replay.workload import Machines, Workload
from reclaim.training.estimators.margin import STARTUP_HOLD_S

_HOW: Final = np.dtype(
    [("stranding", "f8"), ("leftover", "f8"), ("enough", "i8"), ("checkpoint_us", "i8"), ("startup_us", "i8")]
)
"""``Scheduling`` as compiled code reads it, and how long a run that was just placed holds its limit."""


_LONGEST_S: Final = 1e9
"""No trace is as long: 31 years."""


@dataclass(frozen=True)
class Scheduling:
    """How a cell places what is submitted."""

    policy: str = "hybrid"
    """How machines with room are scored: one of ``placement.POLICIES``."""
    enough: int = 100
    """Machines with room, or that can make room, that are scored before the best of them is taken."""
    checkpoint_s: float = 3_600.0
    """Batch work that is stopped goes back to the last whole multiple of this many seconds of its running time; 0: to
    its beginning, or to where it was when the period began."""
    seed: int = 1
    """Seed of the order in which machines are looked at."""

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ConfigError(f"policy must be one of {', '.join(POLICIES)}, got {self.policy!r}")
        if self.enough < 1:
            raise ConfigError(f"enough must be at least 1, got {self.enough}")
        if not 0 <= self.checkpoint_s <= _LONGEST_S:
            raise ConfigError(f"checkpoint_s must be 0 to {_LONGEST_S:g} seconds, got {self.checkpoint_s}")
        if self.seed < 0:
            raise ConfigError(f"seed must be 0 or more, got {self.seed}")


@dataclass(frozen=True)
class Outcome:
    """What became of a workload.

    Attributes
    ----------
    workload : Workload
        As it was asked for.
    runs : structured array of ``closedloop_state.RUN``, shape (n_runs,)
        As they are at the end of the period.
    machines : structured array of ``closedloop_state.MACHINE_STATE``
    ticks : structured array of ``closedloop_state.TICK``, shape (n_slots,)
    kills : structured array of ``closedloop_state.KILL``, in the order of their times
    """

    workload: Workload
    runs: NDArray[Any]
    machines: NDArray[Any]
    ticks: NDArray[Any]
    kills: NDArray[Any]


def simulate(
    workload: Workload,
    machines: Machines,
    held: NDArray[np.float64],
    in_force: NDArray[np.int8] | None = None,
    how: Scheduling | None = None,
    *,
    live: Live | None = None,
    progress: bool = False,
) -> Outcome:
    """Run a workload on machines; the same arguments give the same outcome.

    Every slot begins with a look at all machines: usage and reservations move on, what is out of memory is relieved,
    what is out of CPU is throttled, what waits is tried again. Within the slot runs end, machines come and go, and
    runs are submitted at their own times.

    Parameters
    ----------
    workload : Workload
    machines : Machines
        ``workload.masks`` speaks of these.
    held : float64, shape (n_margins, n_rows, n_resources)
        The reservation in force when each window of the tape begins, in the trace's unit, guards included, under each
        margin. Read where ``live`` is None, and for what runs when the period begins.
    in_force : int8, shape (n_slots,), or None
        Which of the margins holds in each slot; the first one throughout when None.
    how : Scheduling or None
        The defaults when None.
    live : Live or None
        An estimator to be asked as time passes, instead of ``held``.
    progress : bool
        Whether to show progress on a terminal.
    """
    how = how or Scheduling()
    order = np.random.default_rng(how.seed).permutation(len(machines))  # in which they are looked at
    place = np.argsort(order)
    runs, there = workload.runs.copy(), machines.state[order]
    changes = machines.changes.copy()
    changes["machine"] = place[changes["machine"]]
    slot_us = workload.slot_s * 1_000_000
    n_slots = -(-(workload.stop_us - workload.start_us) // slot_us)
    ticks = np.zeros(n_slots, state.TICK)
    in_force = np.zeros(n_slots, np.int8) if in_force is None else in_force
    kills = np.zeros(2 * len(runs) + 1, state.KILL)  # the first one counts the others
    kills[0]["run"] = 1
    settings = np.zeros(1, _HOW)
    settings[0] = (*POLICIES[how.policy], how.enough, int(how.checkpoint_s * 1e6), int(STARTUP_HOLD_S * 1e6))
    at = np.zeros(2, np.int64)
    board = state.Board(
        runs=runs,
        machines=there,
        rooms=np.zeros((state.ROOM_ROWS, len(machines)), np.float32),
        tape=workload.tape,
        held=held[in_force[0]],
        masks=np.ascontiguousarray(workload.masks[:, order]),
        how=settings[0],
        random=np.array([0x9E3779B97F4A7C15 ^ (how.seed + 1)], np.uint64),
        pending=np.zeros(len(runs) + 1, state.WAITING),
        kills=kills,
        tick=ticks[0],
    )
    note_all(board)
    begun_us = workload.start_us + 1  # what was there when the period began is placed before anything is looked at
    kernel.pass_slot(board, changes, at, workload.start_us, begun_us)
    for t in tqdm(range(n_slots), desc="closed loop", unit="slot", disable=None if progress else True):
        now_us = workload.start_us + t * slot_us
        if len(kills) - kills[0]["run"] <= len(runs):
            kills = np.concatenate([kills, np.zeros(len(kills), state.KILL)])
        board = board._replace(held=held[in_force[t]], kills=kills, tick=ticks[t])
        kernel.advance(board, live is not None, now_us)
        if live is not None:
            live.answer(runs, now_us)
        kernel.settle(board, float(workload.slot_s), now_us)
        kernel.schedule(board, now_us)
        kernel.pass_slot(board, changes, at, now_us, min(now_us + slot_us, workload.stop_us))
    _stop_the_clock(runs, there, workload.stop_us)
    kills = kills[1 : kills[0]["run"]].copy()
    kills["machine"] = order[kills["machine"]]
    runs["machine"] = np.where(runs["machine"] >= 0, order[runs["machine"]], -1)
    return Outcome(workload, runs, there[place], ticks, kills)


def _stop_the_clock(runs: NDArray[Any], machines: NDArray[Any], now_us: int) -> None:
    """Count what still runs or waits up to the end of the period."""
    running, waiting = runs["state"] == state.RUNNING, runs["state"] == state.PENDING
    runs["ran_us"][running] += now_us - runs["placed_us"][running]
    runs["waited_us"][waiting] += now_us - runs["waiting_us"][waiting]
    machines["busy_us"] += machines["count"] * (now_us - machines["changed_us"])
    machines["changed_us"] = now_us
