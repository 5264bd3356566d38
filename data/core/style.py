"""Colours, titles and matplotlib settings of all figures."""

from __future__ import annotations

import re
from typing import Any, Final

INK: Final = "#222222"
ON_COLOUR: Final = "#1F2328"
"""Text on a coloured bar: not grey, so that it stays dark on a page with a dark ground."""
USAGE_COLOUR: Final = "#B8B8B8"
RESOURCE_WORDS: Final = {"cpu": "CPU", "memory": "memory"}
"""Names within a sentence or a column heading."""
SUBJECTS: Final = {"cpu": re.compile(r"\bCPU\b"), "memory": re.compile(r"memory|\bOOM\b", re.IGNORECASE)}
"""Names of resources in running text."""
RESOURCE_TITLES: Final = {"cpu": "CPU", "memory": "Memory"}
"""Names at the beginning of a line, or alone above a figure or a section."""
STYLE: Final[dict[Any, Any]] = {
    "font.size": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "svg.hashsalt": "reclaim",  # element names of an SVG follow from its content: same content, same bytes
    "svg.fonttype": "none",
}
"""For ``matplotlib.rc_context``."""
