"""Ledger of a folder of fetched files: one appended JSON line per fact, so that a kill loses at most the last one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from reclaim.data.core.files import lock
from reclaim.data.errors import ConfigError

LEDGER: Final = "fetch.jsonl"


class Ledger:
    """Facts about the files in a folder; the last fact of a kind about a name is valid.

    A line that a kill or a full disk cut short is ignored, and its fact is determined again. An open ledger holds a
    lock, so two processes never write into one folder.

    Raises
    ------
    ConfigError
        The folder is a file, or another process is fetching into it.
    """

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise ConfigError(f"{folder}: is not a folder; choose another") from error
        path = folder / LEDGER
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            lock(self._file, ConfigError(f"{folder}: another fetch is writing into it; wait until it ends"))
        except BaseException:
            os.close(self._file)
            raise
        text = path.read_bytes()
        self._facts: dict[tuple[str, str], dict[str, Any]] = {}
        for line in text.splitlines():
            try:
                fact = json.loads(line)
                self._facts[fact["kind"], fact["name"]] = fact
            except (ValueError, KeyError, TypeError):
                continue
        if text and not text.endswith(b"\n"):
            os.write(self._file, b"\n")

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self._file)  # releases the lock

    def get(self, kind: str, name: str) -> dict[str, Any]:
        """Return the last fact of that kind about a name; empty if there is none."""
        return self._facts.get((kind, name), {})

    def put(self, kind: str, name: str, **facts: Any) -> dict[str, Any]:
        """Append a fact in one write and return it."""
        fact = {"kind": kind, "name": name, **facts}
        os.write(self._file, json.dumps(fact).encode() + b"\n")
        self._facts[kind, name] = fact
        return fact
