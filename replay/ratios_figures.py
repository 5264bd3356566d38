"""The figure of the ratios: how usage and reservation over the limit spread over the tasks."""

from __future__ import annotations

from typing import Any, Final

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import PercentFormatter

from reclaim.data.schema import RESOURCES
from reclaim.data.style import INK, RESOURCE_TITLES, STYLE
from reclaim.replay.figures import estimator_colours
from reclaim.replay.kinds import Results
from reclaim.replay.ratios_page import SHOWN_UP_TO

_USAGE: Final = "#8A8A8A"
MARGIN_DASHES: Final[dict[str, Any]] = {"baseline": "-", "medium": (0, (5, 1.5)), "aggressive": (0, (1.2, 1.2))}


def ratios_of_tasks(results: Results) -> Figure:
    """Draw Borg's CDFs (EuroSys'15, Figure 11): usage, the drawn estimators at each margin, and the limit."""
    levels = np.array(results["levels"])
    drawn = [e for e in results["estimators"] if e["drawn"]]
    colours = estimator_colours(results)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(11.0, 5.0), layout="constrained")
        for resource, ax in zip(RESOURCES, figure.subplots(1, len(RESOURCES), squeeze=False)[0], strict=True):
            ax.plot(_values(results["usage"][resource]), levels, color=_USAGE, linewidth=3.0)
            for estimator in drawn:
                for margin, of in estimator["margins"].items():
                    ax.plot(
                        _values(of[resource]), levels, color=colours[estimator["name"]], linewidth=1.8,
                        linestyle=MARGIN_DASHES[margin],
                    )  # fmt: skip
            ax.axvline(1.0, color=INK, linewidth=1.4, linestyle=(0, (4, 2)))
            ax.set_xlim(0, SHOWN_UP_TO)
            ax.set_ylim(0, 1.0)
            ax.xaxis.set_major_formatter(PercentFormatter(1.0))
            ax.yaxis.set_major_formatter(PercentFormatter(1.0))
            ax.set_title(RESOURCE_TITLES.get(resource, resource))
            ax.set_xlabel("share of the limit")
            ax.set_ylabel("tasks with at most as much" + ("" if results["alike"] else ", by time"))
        handles: list[Any] = [Line2D([], [], color=_USAGE, linewidth=3.0, label="usage")]
        handles += [
            Line2D([], [], color=colours[e["name"]], linewidth=1.8, label=f"reservation, {e['name']}") for e in drawn
        ]
        handles += [
            Line2D([], [], color="#555555", linewidth=1.8, linestyle=dashes, label=margin)
            for margin, dashes in MARGIN_DASHES.items()
        ]
        handles.append(Line2D([], [], color=INK, linewidth=1.4, linestyle=(0, (4, 2)), label="limit"))
        figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), fontsize=9)
    return figure


def _values(spread: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.array([np.nan if v is None else v for v in spread["quantiles"]], np.float64)
