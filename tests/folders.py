"""The files of a folder, for tests that compare what was written with what was to be."""

from pathlib import Path


def contents(folder: Path) -> dict[str, bytes]:
    """Return the content of each file below a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
