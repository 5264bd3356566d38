"""Measures the importance of features: the rise of the loss when a feature's values are permuted.

A feature looks unimportant where others carry the same information, so groups of features are permuted together, too.

Breiman, "Random Forests", Machine Learning 2001 (permutation importance).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from reclaim.data import schema
from reclaim.data.core.arrays import mean_known
from reclaim.data.core.style import INK, STYLE, USAGE_COLOUR
from reclaim.data.schema import RESOURCES
from reclaim.features.registry import CALENDAR, FEATURE_NAMES, FIRST_SHAPE, FIRST_SINGLE
from reclaim.features.targets import HORIZONS_S, TARGETS
from reclaim.training.models.survival import crps

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from reclaim.training.models.forecaster import Forecaster

_FACTS: Final = (
    "age", "seen", "gap", "length", "restarts", "coverage_2h", "in_alloc", schema.SCHEDULING_CLASS,
    *(f"{resource}_limit{what}" for resource in RESOURCES for what in ("", "_change")),
)  # fmt: skip
_MARKS: Final = "ox|"
"""Of the targets in the figure, in their order."""
_TICKS: Final = (0, 1, 10, 100, 1_000)
_SHOWN: Final = 15


def group_of(name: str) -> str:
    """Return the group of a feature."""
    if name in CALENDAR:
        return "calendar"
    if name in _FACTS or name.startswith("tier_"):
        return "task facts"
    return "shape" if FIRST_SHAPE <= FEATURE_NAMES.index(name) < FIRST_SINGLE else "usage statistics"


Columns = Mapping[str, Sequence[int]]
"""Name → positions of the features that are permuted together."""


def columns_alone(names: Sequence[str]) -> Columns:
    """Return each feature by itself."""
    return {name: [k] for k, name in enumerate(names)}


def columns_by_group(names: Sequence[str]) -> Columns:
    """Return the features of each group."""
    return {group: [k for k, name in enumerate(names) if group_of(name) == group] for group in map(group_of, names)}


@dataclass(frozen=True)
class Importance:
    """Rises of the CRPS: the likelihood cannot compare curves of other thresholds, which follow from features, too.

    Attributes
    ----------
    names : tuple of str
        What was permuted.
    rise : float64, shape (len(names), n_targets)
        Loss after permuting over loss before, less 1; NaN where a target has no known row or no loss.
    loss : float64, shape (n_targets,)
        Before permuting, mean over rows, in shares of the limit.
    rows : int
        Rows permuted.
    """

    names: tuple[str, ...]
    rise: NDArray[np.float64]
    loss: NDArray[np.float64]
    rows: int

    @property
    def mean(self) -> NDArray[np.float64]:
        """The mean rise over the targets that have one; shape (len(names),)."""
        return mean_known(self.rise.T)

    @property
    def widest(self) -> float:
        """The largest rise of any target; 0 where none is known."""
        return float(np.max(self.rise, where=np.isfinite(self.rise), initial=0.0))

    def top(self, n: int) -> Importance:
        """Return the ``n`` of highest mean rise, the highest first."""
        order = np.argsort(-self.mean, kind="stable")[:n]  # NaN comes last
        return Importance(tuple(self.names[k] for k in order), self.rise[order], self.loss, self.rows)

    def to_dict(self) -> dict[str, dict[str, float | None]]:
        """Return name → target or ``mean`` → rise, the highest mean first; None for what is not known."""
        ordered = self.top(len(self.names))
        values = np.concatenate([ordered.rise, ordered.mean[:, None]], axis=1)
        return {
            name: {t: float(v) if np.isfinite(v) else None for t, v in zip((*TARGETS, "mean"), row, strict=True)}
            for name, row in zip(ordered.names, values, strict=True)
        }


def permutation_importance(
    forecaster: Forecaster,
    x: NDArray[np.float32],
    y: NDArray[np.float32],
    *,
    horizon_s: int,
    columns: Columns,
    rows: int = 2_000,
    repeats: int = 1,
    seed: int = 1,
    threads: int = 1,
) -> Importance:
    """Permute features among rows and measure the CRPS of the curves at one horizon.

    Parameters
    ----------
    forecaster : Forecaster
    x : float32, shape (n, n_features)
    y : float32, shape (n, n_targets, n_horizons)
        Over the limit; NaN unknown.
    horizon_s : int
        One of ``features.targets.HORIZONS_S``.
    columns : mapping of name to sequence of int
        Columns of ``x`` that are permuted together, from ``columns_alone`` or ``columns_by_group``.
    rows : int
        Rows of any known target at most, a seeded choice when there are more.
    repeats : int
        Permutations of each; their mean counts.
    seed : int
    threads : int
        Permutations at once; more than 1 only for a forecaster that uses one core.
    """
    h = HORIZONS_S.index(horizon_s)
    rng = np.random.default_rng(seed)
    known = np.flatnonzero(np.isfinite(y[:, :, h]).any(axis=1))
    some = np.sort(rng.choice(known, rows, replace=False)) if len(known) > rows else known
    x, y = x[some], y[some]

    def loss(dealt: NDArray[np.float32]) -> NDArray[np.float64]:
        forecast = forecaster.predict(dealt, horizon_s)
        return mean_known(crps(forecast.survival, forecast.thresholds, y[:, :, h : h + 1])[..., 0])

    def dealt_loss(together: Sequence[int]) -> NDArray[np.float64]:
        deal = np.random.default_rng([seed, *together])  # the numbers do not depend on the order
        total = np.zeros(len(TARGETS))
        for _ in range(repeats):
            dealt = x.copy()
            dealt[:, together] = x[deal.permutation(len(x))][:, together]
            total += loss(dealt)
        return total / repeats

    before = loss(x)
    with ThreadPoolExecutor(threads) as pool:
        after = np.array(list(pool.map(dealt_loss, columns.values()))).reshape(len(columns), len(TARGETS))
    return Importance(tuple(columns), after / np.where(before > 0, before, np.nan) - 1.0, before, len(some))


def importance_figure(importance: Importance) -> Figure:
    """Return a figure of the ``_SHOWN`` features of highest rise: a bar the mean, a mark each target."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    shown = importance.top(_SHOWN)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(6.0, 1.2 + 0.24 * len(shown.names)), layout="constrained")
        axis = figure.subplots()
        draw_bars(axis, shown, shown.widest)
        figure.supxlabel(f"rise of the CRPS, dealt among {importance.rows} rows; the bar is the mean", size=9.5)
        figure.legend(*axis.get_legend_handles_labels(), loc="outside upper right", ncols=len(TARGETS))
    return figure


def draw_bars(axis: Axes, importance: Importance, widest: float) -> None:
    """Draw rises in percent, even up to 1 % and by powers of ten beyond, on an axis that reaches past ``widest``."""
    at = np.arange(len(importance.names))
    axis.barh(at, 100 * importance.mean, color=USAGE_COLOUR)
    for t, mark in zip(range(len(TARGETS)), _MARKS, strict=True):
        style: dict[str, Any] = {"color": INK, "markersize": 4, "fillstyle": "none", "linestyle": "none"}
        axis.plot(100 * importance.rise[:, t], at, mark, label=TARGETS[t].replace("_", " "), **style)
    axis.set_yticks(at, [name.replace("_", " ") for name in importance.names])
    axis.invert_yaxis()
    axis.set_xscale("symlog", linthresh=1.0)
    right = max(150 * widest, 1.5)
    axis.set_xlim(-0.5, right)
    ticks = [tick for tick in _TICKS if tick < right]
    axis.set_xticks(ticks, [f"{tick} %" for tick in ticks])
    axis.tick_params(labelbottom=True)
