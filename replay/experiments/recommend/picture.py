"""Draws the last two weeks of a workload in the space of a table's cell: usage, request and recommended requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from markupsafe import Markup

from reclaim.data.schema import DAY_US, MEMORY_AT, RESOURCES
from reclaim.features.splits import TEST
from reclaim.replay.experiments.recommend.decisions import NOW, Decisions
from reclaim.replay.experiments.recommend.series import Floats, Series, TaskRows

DAYS: Final = 14
"""Days that a picture shows."""
BINS: Final = 6 * DAYS
"""Points of a picture, one for four hours."""
FULL: Final = 1_000
"""Height of the highest value drawn, in the whole numbers of a picture."""
_WIDTH, _HEIGHT = 2 * BINS, 30


@dataclass(frozen=True)
class Pictures:
    """Pictures of all workloads.

    Attributes
    ----------
    usage : float64, shape (n_workloads, BINS, n_resources)
        Largest demand of any task in each bin; NaN where none ran.
    held : mapping of workload to list of (bin, decision)
        Requests that the back-test set in the test part.
    kills : mapping of workload to list of bin
        Ends out of memory.
    now : mapping of workload to decision
    decisions : Decisions
    requests : float64, shape (n_decisions, n_resources)
    """

    usage: Floats
    held: Mapping[int, list[tuple[float, int]]]
    kills: Mapping[int, list[float]]
    now: Mapping[int, int]
    decisions: Decisions
    requests: Floats

    @classmethod
    def draw(cls, rows: TaskRows, series: Series, decisions: Decisions, requests: Floats) -> Pictures:
        """Draw the last ``DAYS`` of every workload."""
        bin_us = DAYS * DAY_US // BINS
        begins_us = int(series.end_us.max()) - BINS * bin_us
        usage = np.full((series.n_workloads, BINS, len(RESOURCES)), np.nan)
        here = np.flatnonzero(series.end_us > begins_us)
        np.fmax.at(usage, (series.workload[here], (series.end_us[here] - 1 - begins_us) // bin_us), series.demand[here])
        held: dict[int, list[tuple[float, int]]] = {}
        for one in decisions.of(TEST):
            at = max((int(decisions.time_us[one]) - begins_us) / bin_us, 0.0)
            held.setdefault(int(decisions.workload[one]), []).append((at, int(one)))
        kills: dict[int, list[float]] = {}
        for workload, when_us in zip(rows.oom_workload, rows.oom_us, strict=True):
            if when_us > begins_us:
                kills.setdefault(int(workload), []).append((int(when_us) - begins_us) / bin_us)
        now = {int(decisions.workload[one]): int(one) for one in decisions.of(NOW)}
        return cls(usage, held, kills, now, decisions, requests)

    def of(self, workload: int, resource: int) -> dict[str, Any]:
        """Return the picture of a workload and resource in whole numbers up to ``FULL``, None where nothing is known.

        ``usage`` has one number per bin; ``request`` is the present one; ``held`` has a place along the bins and a
        number for each time that the back-test set a request, ``next`` is the recommended one, and ``killed`` has the
        places of ends out of memory.
        """
        usage, one = self.usage[workload, :, resource], self.now[workload]
        held = [(at, self.requests[k, resource]) for at, k in self.held.get(workload, [])]
        request, wanted = self.decisions.request[one, resource], self.requests[one, resource]
        drawn = np.array([*usage, request, wanted, *(value for _, value in held)])
        top = np.nanmax(drawn) if np.isfinite(drawn).any() else np.nan

        def whole(value: float) -> int | None:
            return round(FULL * value / top) if np.isfinite(value) and top > 0 else None

        return {
            "usage": [whole(value) for value in usage],
            "request": whole(request),
            "held": [[round(at, 2), whole(value)] for at, value in held],
            "next": whole(wanted),
            "killed": [round(at, 2) for at in self.kills.get(workload, [])] if resource == MEMORY_AT else [],
        }


def svg_of(picture: Mapping[str, Any], label: str) -> Markup:
    """Return a picture as an SVG that takes its colours from the page."""
    lines = []
    for part in _stretches(picture["usage"]):
        points = " ".join(f"{2 * k + 1},{_y(value)}" for k, value in part)
        shape = f"{2 * part[0][0] + 1},{_HEIGHT} {points} {2 * part[-1][0] + 1},{_HEIGHT}"
        lines.append(f'<polygon points="{shape}" fill="var(--strong)" stroke="var(--strong)"/>')
    if picture["request"] is not None:
        y = _y(picture["request"])
        lines.append(f'<path d="M0 {y}H{_WIDTH}" stroke="var(--vermilion)" stroke-dasharray="3 2"/>')
    held = [(at, value) for at, value in picture["held"] if value is not None]
    if held:
        path = f"M{2 * held[0][0]:g} {_y(held[0][1])}"
        path += "".join(f"H{2 * at:g}V{_y(value)}" for at, value in held[1:]) + f"H{_WIDTH}"
        lines.append(f'<path d="{path}" stroke="var(--blue)" stroke-width="1.5" fill="none"/>')
    for at in picture["killed"]:
        lines.append(f'<path d="M{2 * at:.3g} 0l-3 -5h6z" transform="translate(0 5)" fill="var(--vermilion)"/>')
    if picture["next"] is not None:
        lines.append(f'<path d="M{_WIDTH} {_y(picture["next"])}h8" stroke="var(--blue)" stroke-width="3"/>')
    head = f'<svg viewBox="0 0 {_WIDTH + 8} {_HEIGHT}" width="{_WIDTH + 8}" height="{_HEIGHT}" role="img"'
    return Markup('{} aria-label="{}">{}</svg>').format(Markup(head), label, Markup("".join(lines)))


def _stretches(usage: list[int | None]) -> list[list[tuple[int, int]]]:
    """Return the runs of known values, each with its places."""
    runs: list[list[tuple[int, int]]] = [[]]
    for k, value in enumerate(usage):
        if value is None:
            runs.append([])
        else:
            runs[-1].append((k, value))
    return [run for run in runs if run]


def _y(value: int) -> str:
    return f"{1 + (_HEIGHT - 2) * (1 - value / FULL):.3g}"
