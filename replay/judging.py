"""What each margin of an estimator does to the test rows: all of them under one margin, and quarter by quarter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from reclaim.data.schema import RESOURCES
from reclaim.data.windows import CPU_MEAN, MEMORY_MEAN
from reclaim.replay import timeline
from reclaim.replay.cell import SEQUENCE, Cell, positive, segment_slots
from reclaim.replay.fold import Bases
from reclaim.replay.openloop import in_force
from reclaim.replay.scoring import Bootstrap, number, per_resource, score
from reclaim.training.calibrate import Budgets, Calibration
from reclaim.training.estimators.base import Estimate
from reclaim.training.estimators.fixed import LimitEstimator
from reclaim.training.estimators.margin import MARGIN_NAMES, Margin, under
from reclaim.training.estimators.online import OnlineMargin

MARGIN_BINS: Final = 200
"""Points of a line in the figure over time, at most; more are not seen."""

_MEMORY: Final = RESOURCES.index("memory")


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
    calibration: Calibration | None,
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
    calibration : Calibration or None
        Of its margins, on validation rows; None where they follow the workload, and nothing was set beforehand.
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
    sequence = np.empty_like(held[SEQUENCE[0]])
    for i, margin in enumerate(SEQUENCE):
        np.copyto(sequence, held[margin], where=(cell.segment == i)[:, None])
    measured = {m: score(held[m], cell, bootstrap) for m in MARGIN_NAMES}
    return {
        "name": name,
        "kind": kind,
        **(_NOT_SET if calibration is None else _calibrated(calibration)),
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
        **_NOT_SET,
        "units": {"none": measured.pop("units")},
        "results": {"none": measured},
        "sequence": None,
    }


def over_time(reservation: NDArray[np.float64], cell: Cell) -> dict[str, Any]:
    """Return reservations summed over the cell, and would-be out-of-memory events, in the bins of the figure.

    Parameters
    ----------
    reservation : float64, shape (n, n_resources)
        One for each row of the history, each under the margin then in force.
    """
    history, slots = cell.history, cell.slots
    held = in_force(reservation, history)[cell.test]
    used, limit = cell.memory_used, history.windows.limit[cell.test]
    events = timeline.oom_events(used, held[:, _MEMORY], slots)
    over = timeline.tasks_over(used, held[:, _MEMORY], slots)
    reserved, granted = timeline.cell_sums(held, slots), timeline.cell_sums(limit, slots)
    bounds = segment_slots(slots)
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
                "reclaimed_share": per_resource(1 - reserved[a:b].sum(0) / positive(granted[a:b].sum(0))),
            }
            for margin, (a, b) in zip(SEQUENCE, bounds, strict=True)
        ],
    }


def cell_over_time(cell: Cell) -> dict[str, Any]:
    """Return usage and limit of the cell in the bins of the figure, as shares of ``Cell.whole``."""
    slots = cell.slots
    windows = cell.history.windows
    usage, limit = windows.usage[cell.test][:, [CPU_MEAN, MEMORY_MEAN]], windows.limit[cell.test]
    hours_per_slot = slots.slot_s / 3600
    return {
        "hours": slots.hours[:: _slots_per_bin(slots)].tolist(),
        "length_hours": slots.count * hours_per_slot,
        "usage": _shares_of_cell(timeline.cell_sums(usage, slots), cell),
        "limit": _shares_of_cell(timeline.cell_sums(limit, slots), cell),
        "unit": "share of capacity" if cell.whole_is_capacity else "share of mean limit",
        "slot_s": slots.slot_s,
        "machines": slots.n_machines,
        "segments": [
            {"margin": margin, "start_hours": a * hours_per_slot, "end_hours": b * hours_per_slot}
            for margin, (a, b) in zip(SEQUENCE, segment_slots(slots), strict=True)
        ],
    }


def _shares_of_cell(slot_sums: NDArray[np.float64], cell: Cell) -> dict[str, list[float | None]]:
    """Return per resource the share of the cell in each bin; from shape (slots, n_resources)."""
    binned = timeline.rebin(slot_sums, _slots_per_bin(cell.slots)) / cell.whole
    return {name: [number(v) for v in binned[:, r]] for r, name in enumerate(RESOURCES)}


def _slots_per_bin(slots: timeline.Slots) -> int:
    return max(1, -(-slots.count // MARGIN_BINS))


def _calibrated(calibration: Calibration) -> dict[str, Any]:
    return {
        "margins": {m: dict(zip(RESOURCES, calibration.margins[m].share, strict=True)) for m in MARGIN_NAMES},
        "validation": {
            m: {
                "violation_rate": dict(zip(RESOURCES, map(number, calibration.violation[m]), strict=True)),
                "reclaimed_share": dict(zip(RESOURCES, map(number, calibration.reclaimed[m]), strict=True)),
            }
            for m in MARGIN_NAMES
        },
        "notes": list(calibration.notes),
    }


_NOT_SET: Final[Mapping[str, Any]] = {"margins": {}, "validation": {}, "notes": []}
