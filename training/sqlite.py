"""Where a SQLite tracking store lies, and whether it can be used; knows nothing of MLflow."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Final

SQLITE: Final = "sqlite:///"
_PATIENCE_S: Final = 60.0
"""Time to wait, in seconds, for another process that is writing into the store."""


def sqlite_file(uri: str) -> Path | None:
    """Return the file of a SQLite store; None for a store of another kind."""
    return Path(uri.removeprefix(SQLITE).partition("?")[0]).absolute() if uri.startswith(SQLITE) else None


def artifact_folder(uri: str) -> str | None:
    """Return the URI of the folder beside the file of a SQLite store, in which its files are kept; else None."""
    file = sqlite_file(uri)
    return None if file is None else (file.parent / "artifacts").as_uri()


def missing(uri: str) -> bool:
    """Return whether the store is a SQLite file that does not exist; reading must not make it."""
    file = sqlite_file(uri)
    return file is not None and not file.exists()


def make_usable(uri: str) -> None:
    """Make the folder of a SQLite store and try to open its file, which MLflow would do for minutes.

    Raises
    ------
    OSError
        The folder cannot be made.
    sqlite3.Error
        The file cannot be opened, or is no database.
    """
    file = sqlite_file(uri)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        with closing(sqlite3.connect(file, timeout=_PATIENCE_S)) as opened:
            opened.execute("PRAGMA schema_version")
