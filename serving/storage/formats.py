"""Chooses the folder of a state's format, next to those of other formats, which stay as they are."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Final

from reclaim.serving.storage import log_format, snapshot

_FIRST_NAMED: Final = 9
"""First format with a folder of its own in every case; releases of those before know only the first folder."""
_NAMED: Final = "format-{}"


@dataclass(frozen=True)
class Place:
    """Folder of a format, and those of other formats.

    Attributes
    ----------
    folder : Path
        For ``Store.open``.
    lock_too : Path or None
        The first folder where it is another one: by its lock a release of any format knows that the state is in use.
    others : dict of Path to int
        Formats of the folders that another release wrote.
    """

    folder: Path
    lock_too: Path | None
    others: dict[Path, int]


def place_of(first: Path, version: int) -> Place:
    """Return the place of a format; reads only.

    A format up to 8 is kept in the first folder, unless that holds another one. Every other format is kept next to it,
    in ``format-9`` and so on: a release never opens what another format wrote, and finds its own again.

    Parameters
    ----------
    first : Path
        Folder that releases before formats had folders know; it may be missing.
    version : int
        As for ``Store.open``.
    """
    named = first.with_name(_NAMED.format(version))
    held = version_in(first)
    folder = named if version >= _FIRST_NAMED or named.is_dir() or held not in (None, version) else first
    others = {} if held is None or folder == first else {first: held}
    for path in sorted(first.parent.glob(_NAMED.format("*"))):
        if path != folder and (found := re.fullmatch(_NAMED.format(r"(\d+)"), path.name)) and path.is_dir():
            others[path] = int(found[1])
    return Place(folder, None if folder == first else first, others)


def version_in(folder: Path) -> int | None:
    """Return the state version of a store's folder, of its newest files that say one; None where none does."""
    if not folder.is_dir():
        return None
    versions = chain(
        map(snapshot.version_of, snapshot.snapshots(folder)),
        map(log_format.version_of, reversed(log_format.segments(folder))),
    )
    return next(filter(None, versions), None)
