"""Compares sums of reservations, and predicted peaks, with the peaks that machines came to."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from reclaim.data.schema import RESOURCES, UNKNOWN_ID
from reclaim.data.windows import demand
from reclaim.features.splits import TEST
from reclaim.replay.experiments.frontier.sweep import FACTORS, Bare, Guards, sweep_machines
from reclaim.replay.machine_peaks.predictors import Limit, MachineSamples, Oracle, Predictor
from reclaim.replay.open_loop.bootstrap import Bootstrap, number
from reclaim.replay.open_loop.period import Period
from reclaim.replay.open_loop.rows import is_last, ratio, sums_by
from reclaim.training.margins.violation import violates

Floats = NDArray[np.float64]

LOOSE: Final = 0.01
"""Relative tolerance of the second, looser violation rate."""

MACHINE_DEFINITIONS: Final = {
    "machine peak": "The largest usage at any time within the horizon of the tasks that are on the machine now, each "
    "up to its limit now: what the clairvoyant oracle of the EuroSys'21 study reserves. That one looks 24 hours ahead; "
    "here the horizon is that of the reservations, and `--set horizon_s=86400` makes it the study's. Tasks that come "
    "later do not count, nor do times of which the machine's record does not reach over the whole horizon. Only times "
    "of the test period are judged; the record of a machine, from which the predictors foresee its peaks, begins with "
    "the validation period.",
    "machine violation rate": "Share of a machine's times at which its peak passes the sum of the reservations on it, "
    "or what a predictor foresaw; over machines: median, 90th and 99th percentile, and the mean over all times.",
    "machine severity": "Peak less what was foreseen, over the peak, at violations; 0 elsewhere.",
    "machine savings": "Sum of limits less sum of what was foreseen, over the sum of limits, over machines and times.",
}


@dataclass(frozen=True)
class MachinePeaks:
    """Machines of a cell, one resource, at every time of the test period with a whole horizon after it.

    Attributes
    ----------
    resource : int
    rows : int64, shape (n,)
        Rows of the history with known usage and limit on a machine, in order of (machine, time).
    snapshot : int64, shape (n,)
        Machine and time of each, from 0, rising.
    machine : int64, shape (n_snapshots,)
        From 0.
    start_us : int64, shape (n_snapshots,)
    oracle, limit : float64, shape (n_snapshots,)
        Peak within the horizon, and sum of the limits.
    predicted : mapping of predictor to float64, shape (n_snapshots,)
    low, high : float64, shape (n,)
        The guards of the rows, as in ``Guards``.
    n_machines : int
    slot_s : int
        Time from one snapshot to the next.
    """

    resource: int
    rows: NDArray[np.int64]
    snapshot: NDArray[np.int64]
    machine: NDArray[np.int64]
    start_us: NDArray[np.int64]
    oracle: Floats
    limit: Floats
    predicted: Mapping[str, Floats]
    low: Floats
    high: Floats
    n_machines: int
    slot_s: int

    def total(self, reservation: Floats) -> Floats:
        """Return the sum of reservations, (n_history, n_resources), at each time; shape (n_snapshots,)."""
        of_rows = reservation[self.rows, self.resource]
        return np.bincount(self.snapshot, of_rows, len(self.machine)).astype(np.float64)

    def sweep(self, bare: Bare) -> tuple[Floats, Floats]:
        """Return violations and reclaimed volume at every step of bare answers; shape (n_machines, n_steps) each."""
        return sweep_machines(
            bare.answers[:, self.resource], self.rows, self.low, self.high, self.snapshot, self.machine, self.oracle,
            self.n_machines, bare.steps,
        )  # fmt: skip

    def sweep_peak(self, peak: Floats) -> tuple[Floats, Floats]:
        """Return the same of a predictor's peaks, shape (n_snapshots,): each times a factor, at most the limit."""
        nothing, each = np.full(len(peak), -np.inf), np.arange(len(peak))
        return sweep_machines(
            peak, each, nothing, self.limit, each, self.machine, self.oracle, self.n_machines, FACTORS
        )

    def totals(self) -> Floats:
        """Return times, granted and oracle's reclaimed volume of each machine; shape (n_machines, 3)."""
        columns = (np.ones(len(self.limit)), self.limit, self.limit - self.oracle)
        return sums_by(self.machine, np.stack(columns, axis=1), self.n_machines)


def lay_out_machines(
    period: Period, guards: Guards, resource: int, horizon_s: int, predictors: Mapping[str, Predictor]
) -> MachinePeaks | None:
    """Return the machines with their peaks and those of predictors; None where no time can be judged.

    The guards are those of the whole history. Usage is ``demand``. Of a task's two windows in one slot the later one
    counts. The record of machines begins with the history, so that validation rows warm the predictors up.
    """
    history = period.history
    windows, slot_us = history.windows, period.slots.slot_us
    usage, limit = demand(windows)[:, resource], windows.limit[:, resource]
    known = np.flatnonzero((windows.machine_id != UNKNOWN_ID) & np.isfinite(usage) & np.isfinite(limit))
    machines, machine = np.unique(windows.machine_id[known], return_inverse=True)
    by_machine = np.argsort(machine.astype(np.int32), kind="stable")
    rows, cuts = known[by_machine], np.searchsorted(machine[by_machine], np.arange(len(machines) + 1))
    task, slot = windows.task_numbers()[rows], windows.start_us[rows] // slot_us
    of_test, all_predictors = history.period == TEST, {"": Oracle(horizon_s), "limit": Limit()} | dict(predictors)

    def one(number: int) -> _Machine | None:
        here = np.arange(cuts[number], cuts[number + 1])
        here = here[is_last(task[here], slot[here])]
        mine = rows[here]
        samples = MachineSamples.lay_out(slot[here] * slot_us, task[here], usage[mine], limit[mine])
        peaks = {name: samples.peak(p) for name, p in all_predictors.items()}
        tested = samples.total(of_test[mine].astype(np.float64)) == samples.total(np.ones(len(mine)))
        judged = np.flatnonzero(tested & np.isfinite(peaks[""]))
        if len(judged) == 0:
            return None
        number_of = np.full(len(tested), -1, np.int64)
        number_of[judged] = np.arange(len(judged))
        by_time = np.argsort(samples.snapshot, kind="stable")
        by_time = by_time[number_of[samples.snapshot[by_time]] >= 0]
        return _Machine(
            mine[by_time], number_of[samples.snapshot[by_time]], samples.times_us[judged],
            {name: peak[judged] for name, peak in peaks.items()},
        )  # fmt: skip

    with ThreadPoolExecutor(len(RESOURCES)) as pool:
        parts = [m for m in pool.map(one, range(len(machines))) if m is not None]
    if not parts:
        return None
    offsets = np.cumsum([0, *(len(m.start_us) for m in parts)])
    peaks = {name: np.concatenate([m.peaks[name] for m in parts]) for name in all_predictors}
    judged_rows = np.concatenate([m.rows for m in parts])
    return MachinePeaks(
        resource=resource,
        rows=judged_rows,
        snapshot=np.concatenate([m.snapshot + first for m, first in zip(parts, offsets, strict=False)]),
        machine=np.repeat(np.arange(len(parts)), np.diff(offsets)),
        start_us=np.concatenate([m.start_us for m in parts]),
        oracle=peaks.pop(""),
        limit=peaks.pop("limit"),
        predicted=peaks,
        low=guards.low[judged_rows, resource],
        high=guards.high[judged_rows, resource],
        n_machines=len(parts),
        slot_s=period.slots.slot_s,
    )


@dataclass(frozen=True)
class _Machine:
    """One machine's part of ``MachinePeaks``, its snapshots numbered from 0."""

    rows: NDArray[np.int64]
    snapshot: NDArray[np.int64]
    start_us: NDArray[np.int64]
    peaks: Mapping[str, Floats]


def judge_peaks(peak: Floats, machines: MachinePeaks, bootstrap: Bootstrap) -> dict[str, Any]:
    """Return violations and savings of predicted peaks, shape (n_snapshots,), with intervals over machines.

    See ``MACHINE_DEFINITIONS``.
    """
    foreseen = np.minimum(peak, machines.limit)
    over = violates(machines.oracle, foreseen)
    severity = np.divide(machines.oracle - foreseen, machines.oracle, out=np.zeros(len(peak)), where=over)
    goes_on = (np.diff(machines.machine) == 0) & (np.diff(machines.start_us) == machines.slot_s * 1_000_000)
    begins = over & ~np.concatenate([[False], over[:-1] & goes_on])
    columns = {
        "times": np.ones(len(peak)),
        "over": over,
        "loosely": machines.oracle > foreseen * (1 + LOOSE),
        "severity": severity,
        "episodes": begins,
        "saved": machines.limit - foreseen,
        "best": machines.limit - machines.oracle,
        "granted": machines.limit,
    }
    by_snapshot = np.stack([c.astype(np.float64) for c in columns.values()], axis=1)
    sums = sums_by(machines.machine, by_snapshot, machines.n_machines)
    position = {name: i for i, name in enumerate(columns)}
    draws = bootstrap.sums(sums)
    rates = sums[:, position["over"]] / sums[:, position["times"]]

    def share(above: str, below: str) -> Floats:
        return ratio(draws[:, position[above]], draws[:, position[below]])

    return {
        "violation_rate": bootstrap.interval(share("over", "times"))
        | {f"p{q}": number(np.quantile(rates, q / 100)) for q in (50, 90, 99)},
        "violation_rate_1pct": number(share("loosely", "times")[0]),
        "severity": {
            "mean": number(share("severity", "times")[0]),
            "at_violation": number(share("severity", "over")[0]),
            "p99": number(np.quantile(severity, 0.99)),
        },
        "violation_s": number(share("over", "episodes")[0] * machines.slot_s),
        "savings": bootstrap.interval(share("saved", "granted")),
        "efficiency": bootstrap.interval(share("saved", "best")),
    }
