"""How a placed run moves along its tape, and how the sums of its machine follow, compiled."""

from __future__ import annotations

from typing import Any

import numba

from reclaim.replay.closedloop_state import COMPILED, NON_PRODUCTION, RANKS


@numba.njit(**COMPILED)
def end_us(run: Any) -> Any:
    """Return when a placed run ends if nothing stops it; a service's time is the clock's."""
    if run.service:
        return run.arrival_us + run.duration_us
    return run.placed_us + run.duration_us - run.offset_us


@numba.njit(**COMPILED)
def read(run: Any, tape: Any, now_us: int) -> None:
    """Move a placed run to the window in which it is now."""
    at_us = now_us - run.arrival_us if run.service else run.offset_us + now_us - run.placed_us
    cursor = run.cursor
    while cursor + 1 < run.stop and tape[cursor + 1].from_us <= at_us:
        cursor += 1
    run.cursor = cursor
    for r in range(2):
        run.use[r] = tape[cursor].use[r]
        run.limit[r] = tape[cursor].limit[r]


@numba.njit(**COMPILED)
def jump(run: Any) -> None:
    """Raise the reservation to what is used, as Borg does at once (EuroSys'15, section 5.5).

    Of CPU up to the limit, as it can be throttled; of memory whatever it is.
    """
    run.reservation[0] = max(run.reservation[0], min(run.use[0], run.limit[0]))
    run.reservation[1] = max(run.reservation[1], run.use[1])


@numba.njit(**COMPILED)
def count_in(machine: Any, run: Any, sign: float, now_us: int) -> None:
    """Add a run to its machine's sums, or take it out."""
    for r in range(2):
        machine.use[r] += sign * run.use[r]
        machine.limit[r] += sign * run.limit[r]
        machine.reserved[r] += sign * run.reservation[r]
        if run.band > NON_PRODUCTION:
            machine.production[r] += sign * run.limit[r]
        else:
            for k in range(min(run.rank, RANKS - 1), RANKS):
                machine.up_to_rank[k, r] += sign * run.reservation[r]
    machine.busy_us += machine.count * (now_us - machine.changed_us)
    machine.changed_us = now_us
    machine.count += 1 if sign > 0 else -1
