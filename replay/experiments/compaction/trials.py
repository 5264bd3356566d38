"""Compacts a cell (EuroSys'15, section 5.1): removes machines in random order until the tasks do not fit any more."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reclaim.replay.experiments.compaction.checkpoint import Checkpoint
from reclaim.replay.experiments.compaction.contenders import Key
from reclaim.replay.experiments.compaction.packing import MOST_CLONES, Booked, Packer, booked_on, not_held
from reclaim.replay.open_loop.estimates import LIMIT
from reclaim.training.margins.violation import overruns, violates


@dataclass(frozen=True)
class Trial:
    """The smallest cell found for a contender in one order of removal, and its usage within the horizon.

    Attributes
    ----------
    machines, pending : int
        Machines kept, and picky tasks that are left pending.
    over : float64, shape (n_resources,)
        Share of the machines whose usage exceeds the capacity.
    used : float64, shape (n_resources,)
        Mean usage over the capacity of all.
    passed : float64, shape (n_resources,)
        Share of the machines whose usage, of each task up to its limit, exceeds what is reserved on them.
    """

    machines: int
    pending: int
    over: NDArray[np.float64]
    used: NDArray[np.float64]
    passed: NDArray[np.float64]


def compact(checkpoint: Checkpoint, *, count: int, policy: str, seed: int) -> tuple[int, dict[Key, list[Trial]]]:
    """Return the number of clones of the cell, and every contender's trials in the same orders of removal.

    Parameters
    ----------
    checkpoint : Checkpoint
    count : int
        Trials of each contender.
    policy : str
        One of ``placement.POLICIES``.
    seed : int
        Of the orders, together with the checkpoint's time and the number of the trial.

    Raises
    ------
    ConfigError
        ``MOST_CLONES`` of the cell do not hold the workload.
    """
    for clones in range(1, MOST_CLONES + 1):
        found: dict[Key, list[Trial]] = {}
        for key in sorted(checkpoint.reserved, key=lambda k: k[0] != LIMIT):  # the one that needs most first
            trials = _trials(checkpoint, checkpoint.reserved[key], policy, clones, count, seed)
            if trials is None:
                break
            found[key] = trials
        else:
            return clones, found
    raise not_held(f"at {checkpoint.time_us} µs")


def _trials(
    checkpoint: Checkpoint, booked: Booked, policy: str, clones: int, count: int, seed: int
) -> list[Trial] | None:
    packer = Packer(checkpoint.workload, booked, policy)
    cell = np.tile(np.arange(len(checkpoint.machines)), clones)
    trials = []
    for trial in range(count):
        machines = checkpoint.machines.take(np.random.default_rng([seed, checkpoint.time_us, trial]).permutation(cell))
        fewest = packer.fewest(machines)
        if fewest is None:
            return None
        trials.append(_risked(*fewest, checkpoint, booked, machines.capacity))
    return trials


def _risked(
    n: int, placed: NDArray[np.int64], checkpoint: Checkpoint, booked: Booked, capacity: NDArray[np.float64]
) -> Trial:
    """Return the trial of tasks packed onto ``n`` machines, with their real usage within the horizon."""
    here = placed >= 0
    used, within_limits = np.zeros((2, n, *checkpoint.used.shape[1:]))  # (n, n_slots, R) each
    np.add.at(used, placed[here], checkpoint.used[here])
    np.add.at(within_limits, placed[here], checkpoint.within_limits[here])
    return Trial(
        machines=n,
        pending=int(np.count_nonzero(~here)),
        over=overruns(used.max(axis=1), capacity[:n]).mean(axis=0),
        used=used.mean(axis=1).sum(axis=0) / capacity[:n].sum(axis=0),
        passed=violates(within_limits.max(axis=1), booked_on(booked, placed, n)).mean(axis=0),
    )
