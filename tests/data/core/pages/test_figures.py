"""Figures as files: the same bytes for the same figure, whatever the last bits of its layout."""

from __future__ import annotations

import re

import numpy as np
import pytest
from matplotlib.figure import Figure

from reclaim.data.core.pages.figures import figure_bytes


def drawn(*lefts: float) -> Figure:
    """Return a figure with an axes at each of these left ends."""
    figure = Figure(figsize=(4, 2))
    for left in lefts:
        figure.add_axes((left, 0.1, 0.1, 0.8)).plot([0, 2], [1, 3])
    return figure


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_a_figure_whose_positions_differ_in_their_last_bits_has_the_same_bytes(kind: str) -> None:
    moved = float(np.nextafter(0.3, 1))
    assert figure_bytes(drawn(0.1, 0.3), kind) == figure_bytes(drawn(0.1, moved), kind)
    assert figure_bytes(drawn(0.1, 0.3), kind) != figure_bytes(drawn(0.1, 0.4), kind)


def test_each_axes_is_clipped_by_its_own_path() -> None:
    svg = figure_bytes(drawn(0.1, 0.3, 0.7), "svg").decode()
    assert re.findall(r'<clipPath id="(.*?)"', svg) == ["clip-0", "clip-1", "clip-2"]
    used = re.findall(r'clip-path="url\(#(.*?)\)"', svg)
    assert list(dict.fromkeys(used)) == ["clip-0", "clip-1", "clip-2"]
