"""Compares sums of reservations, and predicted peaks, with the peaks that machines reached."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from reclaim.data.core.engine.workers import HERE, Engine
from reclaim.data.windows import Windows, concatenate, what_is_judged
from reclaim.features.feature_set import FeatureSet
from reclaim.features.splits import TEST
from reclaim.replay.equal_violation.sweep import FACTORS, Bare, Guards, sweep_machines
from reclaim.replay.machine_peaks.predictors import MachineSamples, Predictor
from reclaim.replay.open_loop.bootstrap import Bootstrap, number
from reclaim.replay.open_loop.period import Period
from reclaim.replay.open_loop.rows import ratio, sums_by
from reclaim.replay.open_loop.share import Share
from reclaim.training.machines.samples import TaskSamples
from reclaim.training.machines.snapshots import Snapshots, lay_out_cell
from reclaim.training.margins.violation import violates

Floats = NDArray[np.float64]

LOOSE: Final = 0.01
"""Relative tolerance of the second, looser violation rate."""

MACHINE_DEFINITIONS: Final = {
    "machine peak": "The largest usage at any time within the horizon of the tasks that are on the machine now, "
    "each up to its limit now: what the clairvoyant oracle of the EuroSys'21 study reserves. That one looks 24 hours "
    "ahead; here the horizon is that of the reservations, and `--set horizon_s=86400` makes it the study's. Tasks that"
    " come later do not count, nor do times in whose horizon the machine has no window, or at whose end it has none. "
    "Only times of the test period are judged; the predictors foresee the peaks of a machine from its record since the "
    "dataset begins.",
    "machine violation rate": "Share of a machine's times at which its peak passes the sum of the reservations on it, "
    "or what a predictor foresaw; over machines: median, 90th and 99th percentile, and the mean over all times.",
    "at once": "Share of the machines whose peak passes what was foreseen at the same time: its 99.9th percentile over "
    "times, and the largest. Where tasks move together violations do, and work must then be evicted in the whole cell.",
    "machine severity": "Peak less what was foreseen, over the peak, at violations; 0 elsewhere.",
    "machine minutes": "Mean time, in minutes, for which a machine's peak passes what was foreseen at one time after "
    "another.",
    "machine savings": "Sum of limits less sum of what was foreseen, over the sum of limits, over machines and times.",
}


@dataclass(frozen=True)
class Record:
    """All windows of the machines that are judged.

    Attributes
    ----------
    windows : Windows
        ``n`` rows outside alloc instances, those of one task together and in time order, reduced as in a history.
    source_row : int64, shape (n,), rising
        As in ``History``.
    """

    windows: Windows
    source_row: NDArray[np.int64]

    @classmethod
    def of(cls, features: FeatureSet, share: Share) -> Record:
        """Return the record of the machines of a share since the dataset begins."""
        windows, rows = [], []
        for bucket, first in enumerate(features.bucket_start[:-1].tolist()):
            of_bucket = features.dataset.windows(bucket)
            mine = np.flatnonzero(share.rows(of_bucket) & ~of_bucket.in_alloc)
            windows.append(what_is_judged(of_bucket.take(mine)))
            rows.append(first + mine)
        return cls(concatenate(windows), np.concatenate(rows))


@dataclass(frozen=True)
class MachinePeaks:
    """Machines of a cell, one resource, at every time of the test period with a whole horizon after it.

    Attributes
    ----------
    at : Snapshots
        Its rows are of the history.
    low, high : float64, shape (n,)
        The guards of the rows, as in ``Guards``.
    slot_s : int
        Time from one snapshot to the next.
    """

    at: Snapshots
    low: Floats
    high: Floats
    slot_s: int

    def total(self, reservation: Floats) -> Floats:
        """Return the sum of reservations, (n_history, n_resources), at each time; shape (n_snapshots,)."""
        return self.at.total(reservation[self.at.rows, self.at.resource])

    def sweep(self, bare: Bare) -> tuple[Floats, Floats]:
        """Return violations and reclaimed volume at every step of bare answers; shape (n_machines, n_steps) each."""
        return sweep_machines(
            bare.answers[:, self.at.resource], self.at.rows, self.low, self.high, self.at.snapshot, self.at.machine,
            self.at.peak, self.at.n_machines, bare.steps,
        )  # fmt: skip

    def sweep_peak(self, peak: Floats) -> tuple[Floats, Floats]:
        """Return the same of a predictor's peaks, shape (n_snapshots,): each times a factor, at most the limit."""
        nothing, each = np.full(len(peak), -np.inf), np.arange(len(peak))
        return sweep_machines(
            peak, each, nothing, self.at.limit, each, self.at.machine, self.at.peak, self.at.n_machines, FACTORS
        )

    def totals(self) -> Floats:
        """Return times, granted and oracle's reclaimed volume of each machine; shape (n_machines, 3)."""
        columns = (np.ones(len(self.at)), self.at.limit, self.at.limit - self.at.peak)
        return sums_by(self.at.machine, np.stack(columns, axis=1), self.at.n_machines)


def lay_out_machines(
    period: Period,
    guards: Guards,
    resource: int,
    horizon_s: int,
    predictors: Mapping[str, Predictor],
    engine: Engine = HERE,
    *,
    record: Record | None = None,
) -> MachinePeaks | None:
    """Return the machines with their peaks and those of predictors; None where no time can be judged.

    The guards are those of the whole history. Predictors know the record, which by default begins with the history.
    """
    history = period.history
    if record is None:
        record = Record(history.windows, history.source_row)
    row = np.minimum(np.searchsorted(history.source_row, record.source_row), len(history) - 1)
    judged = (history.source_row[row] == record.source_row) & (history.period[row] == TEST)
    at = lay_out_cell(
        record.windows, resource, period.slots.slot_us, horizon_s, judged=judged,
        foresee=partial(_foresee, predictors), kind=MachineSamples, engine=engine,
    )  # fmt: skip
    if at is None:
        return None
    at = replace(at, rows=row[at.rows])
    return MachinePeaks(at, guards.low[at.rows, resource], guards.high[at.rows, resource], period.slots.slot_s)


def _foresee(predictors: Mapping[str, Predictor], samples: TaskSamples) -> dict[str, Floats]:
    """Return the prediction of each predictor for one machine."""
    assert isinstance(samples, MachineSamples)
    return {name: samples.peak(p) for name, p in predictors.items()}


def judge_peaks(peak: Floats, machines: MachinePeaks, bootstrap: Bootstrap) -> dict[str, Any]:
    """Return violations and savings of predicted peaks, shape (n_snapshots,), with intervals over machines.

    See ``MACHINE_DEFINITIONS``.
    """
    foreseen = np.minimum(peak, machines.at.limit)
    over = violates(machines.at.peak, foreseen)
    severity = np.divide(machines.at.peak - foreseen, machines.at.peak, out=np.zeros(len(peak)), where=over)
    goes_on = (np.diff(machines.at.machine) == 0) & (np.diff(machines.at.start_us) == machines.slot_s * 1_000_000)
    begins = over & ~np.concatenate([[False], over[:-1] & goes_on])
    columns = {
        "times": np.ones(len(peak)),
        "over": over,
        "loosely": machines.at.peak > foreseen * (1 + LOOSE),
        "severity": severity,
        "episodes": begins,
        "saved": machines.at.limit - foreseen,
        "best": machines.at.limit - machines.at.peak,
        "granted": machines.at.limit,
    }
    by_snapshot = np.stack([c.astype(np.float64) for c in columns.values()], axis=1)
    sums = sums_by(machines.at.machine, by_snapshot, machines.at.n_machines)
    position = {name: i for i, name in enumerate(columns)}
    draws = bootstrap.sums(sums)
    rates = sums[:, position["over"]] / sums[:, position["times"]]

    def share(above: str, below: str) -> Floats:
        return ratio(draws[:, position[above]], draws[:, position[below]])

    _, moment = np.unique(machines.at.start_us, return_inverse=True)
    at_once = np.bincount(moment, over) / np.bincount(moment)
    return {
        "at_once": {"p99.9": number(np.quantile(at_once, 0.999)), "largest": number(at_once.max())},
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
