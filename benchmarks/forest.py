"""Draws what is reclaimed more than by the best rival, with its interval: a line a comparison, a panel a horizon.

python -m benchmarks.forest        # results/bar.svg, machines.svg and short-history.svg, from the results there are
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.lines import Line2D

from benchmarks.bar_tables import BEST, HINDSIGHT, HOURS, MIXED_IN, NETWORK
from benchmarks.machines import GROUPED, RESULTS, comparisons
from reclaim.data.core.style import INK, RESOURCE_TITLES, STYLE
from reclaim.replay.open_loop.paired import RECLAIMED

COLOURS: Final = {"cpu": "#2F6DB5", "memory": "#C4622D"}
"""By resource."""
_RATES: Final = {"1 %": 0.01, "0.1 %": 0.001}
_GAP: Final = 0.8
"""Lines left free between two groups."""


class Difference(NamedTuple):
    """A comparison: what one reclaims more than another, in points of the limits, with its interval of 95 %.

    Those of one group stand together. A ``budget`` of 0.01 has a full mark, a smaller one a hollow one.
    """

    group: str
    resource: str
    budget: float
    horizon: str
    value: float
    low: float
    high: float


def main() -> None:
    """Draw the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS.parent, help="folder of the figures")
    asked = parser.parse_args()
    bar = [difference for path in sorted(RESULTS.parent.glob("bar-*.json")) for difference in of_bar(path)]
    draw_forest(bar, "the best statistical estimator", asked.out / "bar.svg")
    draw_forest(of_machines(RESULTS), "the best of the others", asked.out / "machines.svg")
    short = [one for path in sorted(RESULTS.parent.glob("short-history-*.json")) for one in of_short_history(path)]
    draw_forest(short, "by the network alone", asked.out / "short-history.svg")


def of_bar(path: Path) -> list[Difference]:
    """Return what the network reclaims more than the best statistical estimator at equal violation."""
    content = json.loads(path.read_text())
    return list(_differences(content["dataset"]["name"], content["differences"], NETWORK, BEST))


def of_short_history(path: Path) -> list[Difference]:
    """Return what a network of a short history reclaims more with curves of other clusters in it, where they are."""
    return [
        one
        for of in json.loads(path.read_text())["histories"]
        for one in _differences(f"{of['dataset']['name']}, {of['days']:g} days", of["differences"], MIXED_IN, NETWORK)
        if any(one[-3:])
    ]


def _differences(group: str, lines: Sequence[Mapping[str, Any]], name: str, against: str) -> Iterator[Difference]:
    """Yield the differences of two estimators at equal violation; of too few tasks there is no interval to draw."""
    for d in lines:
        of = (d["collections"], d["estimator"], d["margin_set"], d["against"])
        if of == ("all", name, HINDSIGHT, against) and None not in d[RECLAIMED]:
            points = (100 * share for share in d[RECLAIMED])
            yield Difference(group, d["resource"], _RATES[d["budget"]], HOURS[d["horizon_s"]], *points)


def of_machines(path: Path) -> list[Difference]:
    """Return what the estimator of machines reclaims more than the best of the others; composed cells first."""
    titles, found = {"1h": HOURS[3_600], "24h": HOURS[86_400]}, []
    for name, horizon, resource, rate, _, at, ours in comparisons(json.loads(path.read_text())):
        ahead = at[ours["machine"]].get("ahead") if "machine" in ours else None
        if ahead is not None:
            points = (100 * ahead[k] for k in ("value", "low", "high"))
            found.append(Difference(name, resource, rate, titles[horizon], *points))
    return sorted(found, key=lambda one: one.group.partition("-")[0] in GROUPED)


def draw_forest(differences: Sequence[Difference], than: str, path: Path) -> None:
    """Write the figure; ``than`` says what the differences are to, behind "reclaimed more than"."""
    panels = [horizon for horizon in HOURS.values() if any(one.horizon == horizon for one in differences)]
    lines = list(dict.fromkeys(one[:3] for one in differences))
    groups = list(dict.fromkeys(line[0] for line in lines))
    lines.sort(key=lambda line: groups.index(line[0]))  # stable: those of a group stand together
    place = {line: i + _GAP * groups.index(line[0]) for i, line in enumerate(lines)}
    with mpl.rc_context(STYLE):
        figure, axes = plt.subplots(
            1, len(panels), figsize=(9.5, 1.2 + 0.135 * len(lines)), squeeze=False, sharey=True, layout="constrained"
        )
        for axis, horizon in zip(axes[0], panels, strict=True):
            for one in differences:
                if one.horizon != horizon:
                    continue
                colour, at = COLOURS[one.resource], place[one[:3]]
                axis.plot((one.low, one.high), (at, at), color=colour, linewidth=1.3)
                face = colour if one.budget >= 0.01 else "white"
                axis.plot(one.value, at, "o", color=colour, markerfacecolor=face, markersize=4.2)
            axis.axvline(0, color=INK, linewidth=0.9, zorder=0)
            axis.tick_params(axis="y", length=0)
            axis.set_title(f"{horizon} ahead")
        middle = {group: np.mean([place[line] for line in lines if line[0] == group]) for group in groups}
        axes[0, 0].set_yticks(list(middle.values()), groups)
        axes[0, 0].invert_yaxis()
        figure.supxlabel(f"reclaimed more than {than}, points of the limits, with 95 % intervals", fontsize=9.5)
        seen = {resource for _, resource, _ in lines}
        marks = [
            Line2D([], [], color=COLOURS[r], marker="o", markerfacecolor=face, label=f"{RESOURCE_TITLES[r]}, {budget}")
            for r in COLOURS if r in seen for face, budget in ((COLOURS[r], "1 %"), ("white", "0.1 %"))
        ]  # fmt: skip
        figure.legend(handles=marks, loc="outside upper right", ncols=len(marks))
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)


if __name__ == "__main__":
    main()
