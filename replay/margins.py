"""The margins experiment (EuroSys'15, Figure 12): every estimator at every margin, and all of them week by week."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from reclaim.data.errors import HistoryTooShortError
from reclaim.data.schema import RESOURCES
from reclaim.data.windows import CPU_MEAN, MEMORY_MEAN, demand
from reclaim.features.splits import IN_ALLOC, TEST, TEST_UNSEEN, VALID
from reclaim.replay import metrics, timeline
from reclaim.replay.fold import Bases
from reclaim.replay.openloop import History, in_force
from reclaim.training.calibrate import Budgets, Calibration, calibrate
from reclaim.training.estimators.base import Estimate
from reclaim.training.estimators.fixed import LimitEstimator
from reclaim.training.estimators.margin import MARGIN_NAMES, Margin, under
from reclaim.training.estimators.online import OnlineMargin

SEQUENCE: Final = ("baseline", "aggressive", "medium", "baseline")
"""Which margin is in force in each quarter of the test period; Borg's four weeks."""

MARGIN_BINS: Final = 200
"""Points of a line in the figure over time, at most; more are not seen."""

_MEMORY: Final = RESOURCES.index("memory")


@dataclass(frozen=True)
class Bootstrap:
    """How intervals are drawn: resamples, seed, share of resamples within."""

    draws: int
    seed: int
    confidence: float


@dataclass(frozen=True)
class Cell:
    """The test period, laid out once for all estimators.

    Attributes
    ----------
    history : History
        All rows that matter: validation, test, and the windows just before them.
    test : int64, shape (n_test,)
        Rows of the test period.
    slots : Slots
        Of the test rows.
    segment : int64, shape (n,)
        Quarter of the test period in which each row of the history answers; 0 before it.
    unit : int64, shape (n_test,)
        Collection of each test row, from 0: what the bootstrap draws.
    unseen_units : bool, shape (n_units,)
        Collections that nothing was trained or tuned on.
    whole : float64, shape (n_resources,)
        What the figure over time divides by: the machines' capacity, or the mean sum of limits where none is known.
    whole_is_capacity : bool
        Which of the two.
    """

    history: History
    test: NDArray[np.int64]
    slots: timeline.Slots
    segment: NDArray[np.int64]
    unit: NDArray[np.int64]
    unseen_units: NDArray[np.bool_]
    whole: NDArray[np.float64]
    whole_is_capacity: bool


def lay_out_cell(history: History, machines: Mapping[str, NDArray[Any]]) -> Cell:
    """Return the test period of a history, on the machines of its dataset's table.

    Raises
    ------
    HistoryTooShortError
        No row of the test period has a target that is known.
    """
    test = np.flatnonzero((history.period == TEST) & (history.group != IN_ALLOC))
    known = int(np.isfinite(history.target[test]).any(axis=1).sum())
    if known == 0:
        raise HistoryTooShortError(
            f"0 of {len(test)} task-windows of the test period have a whole horizon after them, expected at least 1; "
            "replay a longer trace or a shorter horizon"
        )
    windows = history.windows.take(test)
    slots = timeline.lay_out(windows)
    end_slot = (history.windows.end_us - slots.first_us) // (slots.slot_s * 1_000_000)
    inner_edges = [first for first, _ in _segment_slots(slots)[1:]]
    capacity = timeline.cell_capacity(machines, int(windows.end_us.max()))
    whole = timeline.cell_sums(windows.limit, slots).mean(axis=0) if capacity is None else capacity
    collections, unit = np.unique(windows.collection_id, return_inverse=True)
    unseen = np.zeros(len(collections), np.bool_)
    unseen[unit] = history.group[test] == TEST_UNSEEN
    return Cell(
        history=history,
        test=test,
        slots=slots,
        segment=np.searchsorted(inner_edges, end_slot, side="right").astype(np.int64),
        unit=unit.astype(np.int64),
        unseen_units=unseen,
        whole=_positive(whole),
        whole_is_capacity=capacity is not None,
    )


def set_margins(bases: Bases, cell: Cell, budgets: Budgets, *, by_group: bool = False) -> Calibration:
    """Set an estimator's margins on the validation rows.

    Parameters
    ----------
    bases : mapping of margin name to Estimate
        Its bare answers to every row of the cell's history, for the baseline and for the aggressive margin.
    cell : Cell
    budgets : Budgets
        Shares of task-windows that may violate, for the baseline and the aggressive margin.
    by_group : bool
        Whether each group of tasks (tier, age) keeps the budgets for itself.
    """
    history = cell.history
    valid = np.flatnonzero(history.period == VALID)
    of_valid = {margin: base.take(valid) for margin, base in bases.items()}
    return calibrate(of_valid, history.windows.take(valid), history.target[valid], budgets, by_group=by_group)


def follow(
    bases: Bases, cell: Cell, margins: Mapping[str, Margin], budgets: Budgets, horizon_s: int
) -> dict[str, NDArray[np.float64]]:
    """Return what is reserved where the margins follow the workload from the first validation row on.

    Each of the two keeps its budget for itself (``estimators.online``), on what all tasks of the cell do; what is
    reserved in the end is ``margin.under`` of both. Shape (n, n_resources) each.
    """
    windows = cell.history.windows
    slot = windows.task_numbers()
    held = {}
    for name, budget in asdict(budgets).items():
        online = OnlineMargin(LimitEstimator(), margins[name], budget, horizon_s)  # hold asks no base
        held[name] = online.hold(slot, bases[name], windows).reservation
    return {name: under(name, held) for name in MARGIN_NAMES}


def judge(
    name: str,
    kind: str,
    calibration: Calibration,
    held: Mapping[str, NDArray[np.float64]],
    cell: Cell,
    *,
    bootstrap: Bootstrap,
    drawn: bool,
) -> dict[str, Any]:
    """Report what each margin of an estimator does to the test rows.

    Parameters
    ----------
    name, kind : str
        As reports call it; ``learned`` or ``statistical``.
    calibration : Calibration
        Of its margins, on validation rows.
    held : mapping of margin name to float64, shape (n, n_resources)
        What it reserves after every row of the cell's history.
    cell : Cell
    bootstrap : Bootstrap
    drawn : bool
        Whether the figure over time draws it.

    Returns
    -------
    dict
        What ``results.json`` holds of an estimator; and ``units``, by margin, what ``units.UnitSums`` does.
    """
    stacked = np.stack([held[m] for m in SEQUENCE])
    sequence = np.take_along_axis(stacked, cell.segment[None, :, None], axis=0)[0]
    measured = {m: score(held[m], cell, bootstrap) for m in MARGIN_NAMES}
    return {
        "name": name,
        "kind": kind,
        "margins": {m: _shares(calibration.margins[m]) for m in MARGIN_NAMES},
        "validation": {
            m: {
                "violation_rate": dict(zip(RESOURCES, map(_json, calibration.violation[m]), strict=True)),
                "reclaimed_share": dict(zip(RESOURCES, map(_json, calibration.reclaimed[m]), strict=True)),
            }
            for m in MARGIN_NAMES
        },
        "notes": list(calibration.notes),
        "units": {m: one.pop("units") for m, one in measured.items()},
        "results": measured,
        "sequence": over_time(sequence, cell) | {"drawn": drawn},
    }


def judge_fixed(name: str, kind: str, estimate: Estimate, cell: Cell, *, bootstrap: Bootstrap) -> dict[str, Any]:
    """Report what answers that take no margin, those of the limit and of the oracle, do to the test rows."""
    measured = score(estimate.reservation, cell, bootstrap)
    return {
        "name": name,
        "kind": kind,
        "margins": {},
        "validation": {},
        "notes": [],
        "units": {"none": measured.pop("units")},
        "results": {"none": measured},
        "sequence": None,
    }


def score(reservation: NDArray[np.float64], cell: Cell, bootstrap: Bootstrap) -> dict[str, Any]:
    """Return every metric of reservations, shape (n, n_resources), over the test rows and over groups of them.

    The result holds ``all`` and ``unseen`` (collections kept for the test), with intervals; ``tiers`` and ``ages``
    without; the would-be out-of-memory events; and ``units``, the sums of each unit that all of it rests on.
    """
    history, test = cell.history, cell.test
    windows = history.windows.take(test)
    with np.errstate(divide="ignore", invalid="ignore"):
        over_limit = reservation[test] / windows.limit
    scored = metrics.Scored(
        target=history.target[test],
        next_target=history.next_target[test],
        reservation=over_limit,
        limit=windows.limit,
        duration_s=(windows.end_us - windows.start_us) / 1e6,
    )
    units = metrics.sums(scored, cell.unit, len(cell.unseen_units))
    tiers = metrics.sums(scored, metrics.tier_key(windows.tier), len(metrics.TIER_LABELS))
    ages = metrics.sums(scored, metrics.age_key(history.known_s[test]), len(metrics.AGES))
    held = in_force(reservation, history)[test, _MEMORY]
    used = demand(windows)[:, _MEMORY]
    return {
        "units": units,
        "all": _with_intervals(units, bootstrap),
        "unseen": _with_intervals(units[cell.unseen_units], bootstrap),
        "tiers": _by_group(tiers, metrics.TIER_LABELS),
        "ages": _by_group(ages, metrics.AGES),
        "oom": _memory_events(used, held, cell.slots),
    }


def _memory_events(
    used: NDArray[np.float64], held: NDArray[np.float64], slots: timeline.Slots
) -> dict[str, float | int | None]:
    """Return would-be out-of-memory events and tasks over their reservation, and their rates; None without memory."""
    if not (np.isfinite(used) & np.isfinite(held)).any():
        return dict.fromkeys(("events", "rate", "tasks_over", "tasks_over_rate"))
    events = int(timeline.oom_events(used, held, slots).sum())
    over = int(timeline.tasks_over(used, held, slots).sum())
    places = timeline.occupied(slots)
    return {"events": events, "rate": events / places, "tasks_over": over, "tasks_over_rate": over / len(used)}


def over_time(reservation: NDArray[np.float64], cell: Cell) -> dict[str, Any]:
    """Return reservations summed over the cell, and would-be out-of-memory events, in the bins of the figure.

    Parameters
    ----------
    reservation : float64, shape (n, n_resources)
        One for each row of the history, each under the margin then in force.
    """
    history, slots = cell.history, cell.slots
    windows = history.windows.take(cell.test)
    held = in_force(reservation, history)[cell.test]
    used = demand(windows)[:, _MEMORY]
    events = timeline.oom_events(used, held[:, _MEMORY], slots)
    over = timeline.tasks_over(used, held[:, _MEMORY], slots)
    reserved, granted = timeline.cell_sums(held, slots), timeline.cell_sums(windows.limit, slots)
    bounds = _segment_slots(slots)
    per_bin = _slots_per_bin(slots)
    last_of_bin = np.minimum(np.arange(per_bin, slots.count + per_bin, per_bin), slots.count) - 1
    return {
        "reservation": _shares_of_cell(reserved, cell),
        "cumulative_events": np.cumsum(events)[last_of_bin].tolist(),
        "cumulative_tasks_over": np.cumsum(over)[last_of_bin].tolist(),
        "segments": [
            {
                "margin": margin,
                "events": int(events[a:b].sum()),
                "tasks_over": int(over[a:b].sum()),
                "reclaimed_share": _per_resource(1 - reserved[a:b].sum(0) / _positive(granted[a:b].sum(0))),
            }
            for margin, (a, b) in zip(SEQUENCE, bounds, strict=True)
        ],
    }


def cell_over_time(cell: Cell) -> dict[str, Any]:
    """Return usage and limit of the cell in the bins of the figure, as shares of ``Cell.whole``."""
    slots = cell.slots
    windows = cell.history.windows.take(cell.test)
    hours_per_slot = slots.slot_s / 3600
    return {
        "hours": slots.hours[:: _slots_per_bin(slots)].tolist(),
        "length_hours": slots.count * hours_per_slot,
        "usage": _shares_of_cell(timeline.cell_sums(windows.usage[:, [CPU_MEAN, MEMORY_MEAN]], slots), cell),
        "limit": _shares_of_cell(timeline.cell_sums(windows.limit, slots), cell),
        "unit": "share of capacity" if cell.whole_is_capacity else "share of mean limit",
        "slot_s": slots.slot_s,
        "machines": slots.n_machines,
        "segments": [
            {"margin": margin, "start_hours": a * hours_per_slot, "end_hours": b * hours_per_slot}
            for margin, (a, b) in zip(SEQUENCE, _segment_slots(slots), strict=True)
        ],
    }


def _shares_of_cell(slot_sums: NDArray[np.float64], cell: Cell) -> dict[str, list[float | None]]:
    """Return per resource the share of the cell in each bin; from shape (slots, n_resources)."""
    binned = timeline.rebin(slot_sums, _slots_per_bin(cell.slots)) / cell.whole
    return {name: [_json(v) for v in binned[:, r]] for r, name in enumerate(RESOURCES)}


def _segment_slots(slots: timeline.Slots) -> list[tuple[int, int]]:
    edges = [-(-slots.count * i // len(SEQUENCE)) for i in range(len(SEQUENCE) + 1)]
    return list(pairwise(edges))


def _slots_per_bin(slots: timeline.Slots) -> int:
    return max(1, -(-slots.count // MARGIN_BINS))


def _positive(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.where(values > 0, values, np.nan)


def _shares(margin: Margin) -> dict[str, float]:
    return dict(zip(RESOURCES, margin.share, strict=True))


def _with_intervals(units: NDArray[np.float64], how: Bootstrap) -> dict[str, dict[str, dict[str, float | None]]]:
    values = metrics.evaluate(units.sum(axis=0))
    intervals = metrics.bootstrap(units, draws=how.draws, seed=how.seed, confidence=how.confidence)
    return {
        name: {
            resource: {"value": _json(v[r]), "low": _json(intervals[name][0, r]), "high": _json(intervals[name][1, r])}
            for r, resource in enumerate(RESOURCES)
        }
        for name, v in values.items()
    }


def _by_group(totals: NDArray[np.float64], labels: Sequence[str]) -> dict[str, dict[str, dict[str, float | None]]]:
    rows = totals[:, list(metrics.STATS).index("rows"), :]
    groups = {}
    for g, label in enumerate(labels):
        if rows[g].any():
            values: Mapping[str, NDArray[np.float64]] = metrics.evaluate(totals[g])
            groups[label] = {name: _per_resource(v) for name, v in values.items()} | {
                "task_windows": _per_resource(rows[g])
            }
    return groups


def _per_resource(values: NDArray[np.float64]) -> dict[str, float | None]:
    return {name: _json(values[r]) for r, name in enumerate(RESOURCES)}


def _json(value: float | np.floating[Any]) -> float | None:
    """Return a number that JSON can hold; None for what is not known."""
    return float(value) if np.isfinite(value) else None
