"""Chooses the folder of a state's format, next to those of other formats, which stay as they are."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Final

from reclaim.serving.storage import log_format, snapshot

_NAMED: Final = "format-{}"


@dataclass(frozen=True)
class Place:
    """Folder of a format, and those of other formats.

    Attributes
    ----------
    folder : Path
        For ``Store.open``.
    others : dict of Path to int
        Formats of the folders that another release wrote.
    """

    folder: Path
    others: dict[Path, int]


def place_of(first: Path, version: int) -> Place:
    """Return the place of a format; reads only.

    Each is kept in ``format-9`` and so on: a release never opens what another format wrote, and finds its own again.

    Parameters
    ----------
    first : Path
        Folder next to them that holds a format up to 8, if any. Every release locks it, so that it detects another
        release that uses the state, of whatever format.
    version : int
        As for ``Store.open``; from 9 on.
    """
    folder = first.with_name(_NAMED.format(version))
    held = version_in(first)
    others = {} if held is None else {first: held}
    for path in sorted(first.parent.glob(_NAMED.format("*"))):
        if path != folder and (found := re.fullmatch(_NAMED.format(r"(\d+)"), path.name)) and path.is_dir():
            others[path] = int(found[1])
    return Place(folder, others)


def version_in(folder: Path) -> int | None:
    """Return the state version of a store's folder, from its newest files that state one; None where none does."""
    if not folder.is_dir():
        return None
    versions = chain(
        map(snapshot.version_of, snapshot.snapshots(folder)),
        map(log_format.version_of, reversed(log_format.segments(folder))),
    )
    return next(filter(None, versions), None)
