"""Google cluster-usage traces v2.1 (2011): the six tables, as gzipped CSV with the columns of its schema.csv."""

from pathlib import Path

from reclaim.data.source import Source


def google_v2(folder: Path) -> Source:
    """Return the source of the trace in ``folder``."""
    raise NotImplementedError(folder)
