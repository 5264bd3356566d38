"""Writes figures: the same bytes for the same figure, and text as it is."""

from __future__ import annotations

from pathlib import Path
from typing import IO, Any, Final

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from reclaim.data.core.style import STYLE

DPI: Final = 120
_OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "png": {"dpi": DPI, "metadata": {"Software": None}},
    "svg": {"metadata": {"Date": None, "Creator": None}},
}
"""Options by format, without what differs between two runs."""


def write_figure(figure: Figure, file: Path | IO[bytes], kind: str) -> None:
    """Write a figure as ``png`` or ``svg``."""
    for text in figure.findobj(Text):
        text.set_parse_math(False)  # the name of a model or a workload may hold `$`, and is not a formula
    with mpl.rc_context(STYLE):
        FigureCanvasAgg(figure)
        figure.savefig(file, format=kind, **_OPTIONS[kind])
