"""Draws figures as files: the same bytes for the same figure, and text as it is."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any, Final

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
_CLIP_PATH: Final = re.compile(rb'(<clipPath id="|clip-path="url\(#)(p[0-9a-f]{10})\b')


def figure_bytes(figure: Figure, kind: str) -> bytes:
    """Return a figure as ``png`` or ``svg``."""
    for text in figure.findobj(Text):
        text.set_parse_math(False)  # the name of a model or a workload may hold `$`, and is not a formula
    drawn = io.BytesIO()
    with mpl.rc_context(STYLE):
        FigureCanvasAgg(figure)
        figure.savefig(drawn, format=kind, **_OPTIONS[kind])
    return drawn.getvalue() if kind == "png" else _CLIP_PATH.sub(_number(), drawn.getvalue())


def _number() -> Callable[[re.Match[bytes]], bytes]:
    """Return a function that numbers the clip paths of an SVG in their order.

    matplotlib names them by positions to their last bits, which a constrained layout does not always give the same.
    """
    numbers: dict[bytes, int] = {}
    return lambda found: found[1] + b"clip-%d" % numbers.setdefault(found[2], len(numbers))
