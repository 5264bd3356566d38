"""Shows one machine through a day: what its tasks use, their limits, and what is reserved for each and for all."""

from __future__ import annotations

from typing import Any, Final

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from reclaim.data.core.style import INK, RESOURCE_TITLES, STYLE
from reclaim.data.schema import DAY_US
from reclaim.data.windows import Windows, demand
from reclaim.replay.experiment import Results
from reclaim.replay.experiments.frontier.machines import MachinePeaks
from reclaim.replay.report.figures import PALETTE, numbers

Floats = NDArray[np.float64]

SHOWN_TASKS: Final = 8
"""Tasks that get an area of their own, those that use most; the others are one."""
_LINES: Final = {
    "limits": ("sum of the limits", INK, (0, (4, 2))),
    "tasks": ("sum of the tasks' reservations", PALETTE[1], "-"),
    "machine": ("reserved for the machine", PALETTE[0], "-"),
    "peak": ("peak within the horizon", "#777777", (0, (1, 1.5))),
}


def one_day(machines: MachinePeaks, windows: Windows, of_tasks: Floats, of_machine: Floats) -> dict[str, Any]:
    """Return the day around the largest peak of the machine that is judged most often, for the figure.

    Parameters
    ----------
    machines : MachinePeaks
    windows : Windows
        Of the history.
    of_tasks, of_machine : float64, shape (n_snapshots,)
        Sums of the tasks' reservations, and what is reserved for the machine.
    """
    at = machines.at
    chosen = int(np.bincount(at.machine).argmax())
    mine = np.flatnonzero(at.machine == chosen)
    top = int(at.start_us[mine[at.peak[mine].argmax()]])
    day = mine[np.abs(at.start_us[mine] - top) <= DAY_US // 2]
    place = np.full(len(at), -1)
    place[day] = np.arange(len(day))
    rows = np.flatnonzero(place[at.snapshot] >= 0)
    capped = np.minimum(demand(windows)[at.rows[rows], at.resource], windows.limit[at.rows[rows], at.resource])
    _, task = np.unique(windows.task_numbers()[at.rows[rows]], return_inverse=True)
    usage = np.zeros((int(task.max()) + 1, len(day)))
    np.add.at(usage, (task, place[at.snapshot[rows]]), capped)
    usage = usage[np.argsort(-usage.sum(axis=1), kind="stable")]
    shown = np.vstack([usage[:SHOWN_TASKS], usage[SHOWN_TASKS:].sum(axis=0, keepdims=True)])
    hours = (at.start_us[day] - at.start_us[day[0]]) / 3.6e9
    lines = {"limits": at.limit[day], "tasks": of_tasks[day], "machine": of_machine[day], "peak": at.peak[day]}
    unit = at.limit[day].mean()  # of the mean sum of limits: a page shows shares
    return {
        "hours": np.round(hours, 3).tolist(),
        "usage": np.round(shown / unit, 5).tolist(),
        **{name: np.round(values / unit, 5).tolist() for name, values in lines.items()},
    }


def machine_day(results: Results) -> Figure | None:
    """Draw the day of one machine, a panel for each resource; None without machines or a model."""
    days = (results["machines"] or {}).get("day", {})
    if not days:
        return None
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(11.0, 4.6), layout="constrained")
        for (resource, day), ax in zip(days.items(), figure.subplots(1, len(days), squeeze=False)[0], strict=True):
            _draw(ax, day)
            ax.set_title(RESOURCE_TITLES.get(resource, resource))
            ax.set_xlabel("hours")
        figure.axes[0].set_ylabel("% of the sum of the limits")
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=5, fontsize=8.5)
    return figure


def _draw(ax: Axes, day: dict[str, Any]) -> None:
    hours, usage = numbers(day["hours"]), 100 * np.array(day["usage"], np.float64)
    greys = [str(0.62 + 0.28 * (k % 2)) for k in range(len(usage))]
    ax.stackplot(hours, usage, colors=greys, labels=["usage, task by task", *[f"_{k}" for k in range(1, len(usage))]])
    for name, (label, colour, dashes) in _LINES.items():
        ax.plot(hours, 100 * numbers(day[name]), color=colour, linestyle=dashes, linewidth=1.8, label=label)
    ax.set_xlim(hours[0], hours[-1])
    ax.set_ylim(0, None)
