"""Metrics of reservations: one row statistic over another, summed over any grouping of the rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numba
import numpy as np
from numpy.typing import NDArray

from reclaim.data.core.jit import CACHED
from reclaim.data.core.parallel import in_parts
from reclaim.data.schema import RESOURCES
from reclaim.replay.open_loop.bootstrap import FEWEST, Bootstrap, bounds, resampled_sums
from reclaim.replay.open_loop.rows import ratio
from reclaim.training.margins.violation import needed_in_kernel, violates_in_kernel

CHANGE: Final = 0.01
"""Share of the limit by which a reservation must move to count as changed; a scheduler would ignore less."""


@dataclass(frozen=True)
class Scored:
    """``n`` reservations and the usage that followed; arrays have shape (n, n_resources) unless stated.

    Attributes
    ----------
    target : float64
        Usage within the horizon, over the limit; NaN unknown.
    next_target : float64
        The same for the next five minutes.
    reservation, limit : float64
        In the trace's unit.
    duration_s : float64, shape (n,)
        Length of the row's window, in seconds.
    previous : int64, shape (n,)
        Row of the task's previous window, -1 for none.

    A target above the limit counts as the limit: there the limit itself was too low, and no reservation within it can
    help. ``limit_exceeded_rate`` is the share of such rows.
    """

    target: NDArray[np.float64]
    next_target: NDArray[np.float64]
    reservation: NDArray[np.float64]
    limit: NDArray[np.float64]
    duration_s: NDArray[np.float64]
    previous: NDArray[np.int64]


STATS: Final = (
    "rows", "granted", "reclaimed", "oracle_reclaimed", "needed", "unused", "violations", "excess", "severity",
    "overrun", "seconds", "violating_s", "episodes", "changes", "moved", "next_rows", "next_violations",
    "limit_exceeded",
)  # fmt: skip
"""Statistics of a row, summed before any division. ``granted`` to ``unused`` and ``overrun`` are volumes, the trace's
unit times seconds; ``excess`` and ``moved`` are over the limit, ``severity`` is over the usage."""
POSITION: Final = {name: i for i, name in enumerate(STATS)}
"""Position of each statistic on its axis."""
(
    ROWS, GRANTED, RECLAIMED, ORACLE_RECLAIMED, NEEDED, UNUSED, VIOLATIONS, EXCESS, SEVERITY,
    OVERRUN, SECONDS, VIOLATING_S, EPISODES, CHANGES, MOVED, NEXT_ROWS, NEXT_VIOLATIONS,
    LIMIT_EXCEEDED,
) = range(len(STATS))  # fmt: skip


@dataclass(frozen=True)
class Metric:
    """A ratio of two sums.

    Attributes
    ----------
    numerator, denominator : str
        Keys of ``STATS``.
    meaning : str
        One sentence for the report.
    share : bool
        Whether it is printed in percent.
    scale : float
        Factor of the ratio.
    """

    numerator: str
    denominator: str
    meaning: str
    share: bool = True
    scale: float = 1.0


METRICS: Final[Mapping[str, Metric]] = {
    "reclaimed_share": Metric(
        "reclaimed", "granted", "Limit less reservation over limit, each task-window weighted by limit and duration."
    ),
    "violation_rate": Metric(
        "violations", "rows", "Share of task-windows of which the usage within the horizon passes the reservation."
    ),
    "violation_depth": Metric(
        "excess", "violations", "Mean of usage less reservation, over the limit, among the violating task-windows."
    ),
    "violation_severity": Metric(
        "severity", "violations", "Mean of usage less reservation, over the usage, among the violating task-windows."
    ),
    "under_time": Metric("violating_s", "seconds", "Share of the tasks' time whose answers turn out violated."),
    "violation_duration_s": Metric(
        "violating_s",
        "episodes",
        "Mean time, in seconds, for which the answers to a task turn out violated one after another.",
        share=False,
    ),
    "overrun_share": Metric("overrun", "needed", "Volume of usage above reservation over the volume of usage."),
    "slack_share": Metric(
        "unused",
        "granted",
        "Reservation less what is used within the horizon, where that is less, over the limit; weighted by both.",
    ),
    "changes_per_day": Metric(
        "changes",
        "seconds",
        f"Changes of a task's reservation by more than {CHANGE:.0%} of its limit, per day of the task.",
        share=False,
        scale=86_400.0,
    ),
    "change_size": Metric("moved", "changes", "Mean size of such a change, over the limit."),
    "next_violation_rate": Metric(
        "next_violations", "next_rows", "Share of task-windows of which the next five minutes pass the reservation."
    ),
    "oracle_reclaimed_share": Metric(
        "oracle_reclaimed", "granted", "What a reservation equal to the usage to come would have reclaimed."
    ),
    "efficiency": Metric(
        "reclaimed", "oracle_reclaimed", "Reclaimed share over what the oracle reclaims on the same task-windows."
    ),
    "limit_exceeded_rate": Metric(
        "limit_exceeded",
        "rows",
        "Share of task-windows whose demand within the horizon passes the limit itself; of memory, for CPU demand is "
        "capped at the limit.",
    ),
}
"""Reported metrics by name; each is one number per resource.

Slack is Autopilot's (Rzadca et al., EuroSys'20), with the reservation in the place of the limit; severity is that of
EuroSys'21 ("Take it to the Limit"), task by task; how often reservations change is what Kubernetes' VPA counts of its
recommendations. An episode of violation begins with a violating row whose task's row before did not violate or was not
judged.
"""


def sums(scored: Scored, key: NDArray[np.int64], n_keys: int) -> NDArray[np.float64]:
    """Sum every statistic over the counted rows of each group.

    A row counts, per resource, where its target, its reservation and a limit above 0 are known.

    Parameters
    ----------
    scored : Scored
        ``n`` rows, those of one task in time order.
    key : int64, shape (n,)
        Group of each row, from 0 to ``n_keys`` - 1; -1 for a row that is not judged.
    n_keys : int
        Number of groups.

    Returns
    -------
    float64, shape (n_keys, len(STATS), n_resources)
    """
    out = np.zeros((len(RESOURCES), n_keys, len(STATS)))

    def some(part: int, parts: int) -> None:
        for r in range(part, len(RESOURCES), parts):
            _add_rows(
                scored.target[:, r], scored.next_target[:, r], scored.reservation[:, r], scored.limit[:, r],
                scored.duration_s, scored.previous, key, out[r],
            )  # fmt: skip

    in_parts(some, len(key), len(RESOURCES))
    return np.moveaxis(out, 0, -1)


@numba.njit(**CACHED, error_model="numpy")
def _add_rows(
    target: Any,  # (n,) float64, of one resource as the next three
    next_target: Any,  # (n,) float64
    reservation: Any,  # (n,) float64
    limit: Any,  # (n,) float64
    duration_s: Any,  # (n,) float64
    previous: Any,  # (n,) int64
    key: Any,  # (n,) int64
    out: Any,  # (n_keys, len(STATS)) float64, added to
) -> None:
    for i in range(len(key)):
        if key[i] < 0 or not _counts(target[i], reservation[i], limit[i]):
            continue
        granted, used, reserved = limit[i], min(target[i], 1.0), reservation[i] / limit[i]
        seconds = duration_s[i]
        volume = granted * seconds
        sums = out[key[i]]
        sums[ROWS] += 1.0
        sums[GRANTED] += volume
        sums[RECLAIMED] += (1.0 - reserved) * volume
        sums[ORACLE_RECLAIMED] += (1.0 - used) * volume
        sums[NEEDED] += used * volume
        sums[UNUSED] += max(reserved - used, 0.0) * volume
        sums[SECONDS] += seconds
        sums[LIMIT_EXCEEDED] += violates_in_kernel(target[i], 1.0)
        before = previous[i]
        if _violates(target[i], reservation[i], granted):
            sums[VIOLATIONS] += 1.0
            sums[EXCESS] += used - reserved
            sums[SEVERITY] += (used - reserved) / used
            sums[OVERRUN] += (used - reserved) * volume
            sums[VIOLATING_S] += seconds
            if (
                before < 0
                or key[before] < 0
                or not _counts(target[before], reservation[before], limit[before])
                or not _violates(target[before], reservation[before], limit[before])
            ):
                sums[EPISODES] += 1.0
        if before >= 0 and limit[before] > 0.0:
            moved = abs(reservation[i] - reservation[before]) / granted
            if moved > CHANGE:  # not where the row before is unknown
                sums[CHANGES] += 1.0
                sums[MOVED] += moved
        if np.isfinite(next_target[i]):
            sums[NEXT_ROWS] += 1.0
            sums[NEXT_VIOLATIONS] += _violates(next_target[i], reservation[i], granted)


@numba.njit(**CACHED, error_model="numpy")
def _counts(target: float, reservation: float, limit: float) -> bool:
    return np.isfinite(target) and np.isfinite(reservation) and limit > 0.0 and np.isfinite(limit)


@numba.njit(**CACHED, error_model="numpy")
def _violates(target: float, reservation: float, limit: float) -> Any:
    """Say whether a target, at most the limit, exceeds a reservation."""
    return violates_in_kernel(needed_in_kernel(target, limit), reservation)


def evaluate(totals: NDArray[np.float64]) -> Mapping[str, NDArray[np.float64]]:
    """Return every metric; from shape (..., len(STATS), n_resources) to (..., n_resources) each.

    A ratio without a denominator (no rows, no violation) is NaN.
    """
    return {
        name: ratio(m.scale * totals[..., POSITION[m.numerator], :], totals[..., POSITION[m.denominator], :])
        for name, m in METRICS.items()
    }


def bootstrap(unit_sums: NDArray[np.float64], how: Bootstrap) -> Mapping[str, NDArray[np.float64]]:
    """Return an interval for every metric from resamples of whole units.

    Parameters
    ----------
    unit_sums : float64, shape (n_units, len(STATS), n_resources)
        Result of ``sums`` with the unit as key.
    how : Bootstrap

    Returns
    -------
    dict of str to float64, shape (2, n_resources)
        Lower and upper bound; NaN where too few draws know the metric (``bounds``), or fewer than ``FEWEST`` units.
    """
    flat = unit_sums.reshape(len(unit_sums), len(STATS) * len(RESOURCES))
    resampled = resampled_sums(flat, draws=how.draws, seed=how.seed)
    units_known = np.count_nonzero(unit_sums, axis=0)  # (S, R)
    intervals = {}
    for name, values in evaluate(resampled.reshape(how.draws, *unit_sums.shape[1:])).items():
        interval = np.full((2, values.shape[-1]), np.nan)
        for r in range(values.shape[-1]):
            if units_known[POSITION[METRICS[name].denominator], r] >= FEWEST:
                interval[:, r] = bounds(values[:, r], how.confidence)
        intervals[name] = interval
    return intervals
