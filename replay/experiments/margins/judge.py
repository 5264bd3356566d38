"""Judges an estimator on the test rows, under each of its margins throughout and under their sequence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from reclaim.data.schema import MEMORY_AT, RESOURCES
from reclaim.replay.open_loop import timeline
from reclaim.replay.open_loop.bootstrap import Bootstrap, number
from reclaim.replay.open_loop.history import current_reservations, mean_usage
from reclaim.replay.open_loop.period import SEQUENCE, Period, positive, segment_slots
from reclaim.replay.open_loop.scoring import per_resource, score
from reclaim.training.margins.calibrate import Calibration
from reclaim.training.margins.margin import MARGIN_NAMES, Margin
from reclaim.training.margins.price import Price

MARGIN_BINS: Final = 200
"""Most points of a line in the figure over time."""


def judge(
    name: str,
    kind: str,
    calibration: Calibration | None,
    reserved: Mapping[str, NDArray[np.float64]],
    period: Period,
    *,
    bootstrap: Bootstrap,
    drawn: bool,
) -> dict[str, Any]:
    """Report the effect of each margin of an estimator on the test rows.

    Parameters
    ----------
    name, kind : str
        Name in reports; ``learned`` or ``statistical``.
    calibration : Calibration or None
        Of its margins, on validation rows; None where the margins follow the workload.
    reserved : mapping of margin name to float64, shape (n, n_resources)
        Its reservation after every row of the history.
    period : Period
    bootstrap : Bootstrap
    drawn : bool
        Whether the figure over time shows it.

    Returns
    -------
    dict
        An estimator's part of ``results.json``; and ``units``, by margin, for ``units.UnitSums``.
    """
    sequence = np.empty_like(reserved[SEQUENCE[0]])
    for i, margin in enumerate(SEQUENCE):
        np.copyto(sequence, reserved[margin], where=(period.segment == i)[:, None])
    measured = {m: score(reserved[m], period, bootstrap) for m in MARGIN_NAMES}
    return {
        "name": name,
        "kind": kind,
        **(_NOT_SET if calibration is None else _calibrated(calibration)),
        "units": {m: one.pop("units") for m, one in measured.items()},
        "results": measured,
        "sequence": over_time(sequence, period) | {"drawn": drawn},
    }


def judge_fixed(
    name: str, kind: str, reservation: NDArray[np.float64], period: Period, *, bootstrap: Bootstrap
) -> dict[str, Any]:
    """Report the effect of reservations without a margin: those of the limit and of the oracle."""
    measured = score(reservation, period, bootstrap)
    return {
        "name": name,
        "kind": kind,
        **_NOT_SET,
        "units": {"none": measured.pop("units")},
        "results": {"none": measured},
        "sequence": None,
    }


def over_time(reservation: NDArray[np.float64], period: Period) -> dict[str, Any]:
    """Return the cell's reservations and would-be out-of-memory events in the bins of the figure.

    Parameters
    ----------
    reservation : float64, shape (n, n_resources)
        One for each row of the history, each under the margin of its time.
    """
    history, slots = period.history, period.slots
    reserved = current_reservations(reservation, history)[period.rows]
    used, limit = period.memory_used, history.windows.limit[period.rows]
    events = timeline.oom_events(used, reserved[:, MEMORY_AT], slots)
    over = timeline.tasks_over(used, reserved[:, MEMORY_AT], slots)
    summed, granted = timeline.cell_sums(reserved, slots), timeline.cell_sums(limit, slots)
    bounds = segment_slots(slots)
    per_bin = _slots_per_bin(slots)
    last_of_bin = np.minimum(np.arange(per_bin, slots.count + per_bin, per_bin), slots.count) - 1
    return {
        "reservation": _shares_of_cell(summed, period),
        "cumulative_events": np.cumsum(events)[last_of_bin].tolist(),
        "cumulative_tasks_over": np.cumsum(over)[last_of_bin].tolist(),
        "segments": [
            {
                "margin": margin,
                "events": int(events[a:b].sum()),
                "tasks_over": int(over[a:b].sum()),
                "reclaimed_share": per_resource(1 - summed[a:b].sum(0) / positive(granted[a:b].sum(0))),
            }
            for margin, (a, b) in zip(SEQUENCE, bounds, strict=True)
        ],
    }


def cell_over_time(period: Period) -> dict[str, Any]:
    """Return usage and limit of the cell in the bins of the figure, as shares of ``Period.whole``."""
    slots = period.slots
    windows = period.history.windows
    usage, limit = mean_usage(windows)[period.rows], windows.limit[period.rows]
    hours_per_slot = slots.slot_s / 3600
    return {
        "hours": slots.hours[:: _slots_per_bin(slots)].tolist(),
        "length_hours": slots.count * hours_per_slot,
        "usage": _shares_of_cell(timeline.cell_sums(usage, slots), period),
        "limit": _shares_of_cell(timeline.cell_sums(limit, slots), period),
        "unit": "share of capacity" if period.whole_is_capacity else "share of mean limit",
        "slot_s": slots.slot_s,
        "machines": slots.n_machines,
        "segments": [
            {"margin": margin, "start_hours": a * hours_per_slot, "end_hours": b * hours_per_slot}
            for margin, (a, b) in zip(SEQUENCE, segment_slots(slots), strict=True)
        ],
    }


def _shares_of_cell(slot_sums: NDArray[np.float64], period: Period) -> dict[str, list[float | None]]:
    """Return per resource the share of the cell in each bin; from shape (slots, n_resources)."""
    binned = timeline.rebin(slot_sums, _slots_per_bin(period.slots)) / period.whole
    return {name: [number(v) for v in binned[:, r]] for r, name in enumerate(RESOURCES)}


def _slots_per_bin(slots: timeline.SlotGrid) -> int:
    return max(1, -(-slots.count // MARGIN_BINS))


def _calibrated(calibration: Calibration) -> dict[str, Any]:
    settings = calibration.settings
    return _NOT_SET | {
        "margins": {m: per_resource(of.share) for m, of in settings.items() if isinstance(of, Margin)},
        "prices": {m: per_resource(of.value) for m, of in settings.items() if isinstance(of, Price)},
        "validation": {
            m: {
                "violation_rate": per_resource(calibration.violation[m]),
                "reclaimed_share": per_resource(calibration.reclaimed[m]),
            }
            for m in MARGIN_NAMES
        },
        "notes": list(calibration.notes),
    }


_NOT_SET: Final[dict[str, Any]] = {"margins": {}, "prices": {}, "validation": {}, "notes": []}
