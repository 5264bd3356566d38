"""Draws limit, reservation and usage of one task of the demo's cell: the figure of the first page.

After ``reclaim demo``::

    python docs/site/figure.py demo docs/reservation.svg
"""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
from numpy.typing import NDArray

from reclaim.data.dataset import Dataset
from reclaim.data.schema import RESOURCES
from reclaim.data.windows import demand
from reclaim.features.feature_set import FeatureSet
from reclaim.replay.experiment import Source
from reclaim.replay.open_loop.estimates import estimate_all
from reclaim.replay.settings import ReplayConfig
from reclaim.training.bundle import load_bundle
from reclaim.training.tracking.runs import fetch_bundle

CPU = RESOURCES.index("cpu")
WINDOWS = 288
"""A day of five-minute windows."""
INK, RESERVED, USED, RECLAIMED = "#808890", "#2f81c1", "#d9822b", "#3fa66b"
"""Colours that are readable on a light and on a dark page."""


def main(demo: Path, out: Path) -> None:
    """Replay the demo's model and draw the day of a task that shows all parts best."""
    dataset = Dataset.open(demo / "dataset")
    bundle = load_bundle(fetch_bundle("reclaim-demo@champion")[0])
    source = Source(dataset, FeatureSet.open(dataset.path), {"network": bundle})
    estimates = estimate_all(source, ReplayConfig(estimators=("borg",)))
    windows = estimates.history.windows
    reserved = estimates.reservations("network")["medium"][:, CPU] / windows.limit[:, CPU]
    used = demand(windows)[:, CPU] / windows.limit[:, CPU]
    starts = windows.task_starts()
    days = [np.arange(b - WINDOWS, b) for a, b in pairwise(starts) if b - a >= WINDOWS]
    _draw(*max(((used[rows], reserved[rows]) for rows in days), key=_interest), out)


def _interest(lines: tuple[NDArray[np.float64], NDArray[np.float64]]) -> float:
    """Return how well a day shows all parts: usage that varies, not far below the reservation, much reclaimed."""
    used, reserved = lines
    return float(np.nanstd(used) / np.nanmean(reserved - used)) if reserved.max() < 0.85 else 0.0


def _draw(used: NDArray[np.float64], reserved: NDArray[np.float64], out: Path) -> None:
    mpl.rcParams.update({"svg.hashsalt": "reclaim", "svg.fonttype": "none", "font.size": 11, "text.color": INK,
                         "axes.edgecolor": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK,
                         "font.family": "sans-serif"})  # fmt: skip
    figure, axes = plt.subplots(figsize=(7.2, 3.4), layout="constrained")
    hours = np.arange(len(used)) / 12
    axes.axhline(1, color=INK, lw=2)
    axes.fill_between(hours, reserved, 1, color=RECLAIMED, alpha=0.22, lw=0, step="post")
    axes.step(hours, reserved, color=RESERVED, lw=2, where="post")
    axes.step(hours, used, color=USED, lw=1.4, where="post")
    axes.text(0.1, 1.02, "limit", weight="bold")
    axes.text(
        12, (1 + reserved[130:160].max()) / 2, "reclaimed", color=RECLAIMED, weight="bold", ha="center", va="center"
    )
    axes.text(24.2, reserved[-12:].mean(), "reservation", color=RESERVED, weight="bold", va="center")
    axes.text(24.2, np.nanmean(used[-12:]), "usage", color=USED, weight="bold", va="center")
    axes.set(xlim=(0, 28), ylim=(0, 1.12), xlabel="hours", ylabel="CPU, share of the limit", xticks=range(0, 25, 6))
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
