"""Alibaba cluster trace 2017: the six tables, as CSV with the columns of its schema.csv."""

from pathlib import Path

from reclaim.data.source import Source


def alibaba_2017(folder: Path) -> Source:
    """Return the source of the trace in ``folder``."""
    raise NotImplementedError(folder)
