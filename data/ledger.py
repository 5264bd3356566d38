"""The ledger of a folder of fetched files: one JSON line per fact, appended, so that a kill loses at most the last."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from reclaim.data.errors import ConfigError

LEDGER: Final = "fetch.jsonl"


class Ledger:
    """What is known of the files in a folder; the last fact of a kind about a name holds.

    A line that a kill or a full disk cut short is passed over: what it said is found out again. While it is open no
    other process can open the same one, so no two of them ever write into one file.

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
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._file)
            raise ConfigError(f"{folder}: another fetch is writing into it; wait for its end") from error
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
        os.close(self._file)  # and with it goes the lock

    def get(self, kind: str, name: str) -> dict[str, Any]:
        """Return the last fact of that kind about a name, or an empty one."""
        return self._facts.get((kind, name), {})

    def put(self, kind: str, name: str, **facts: Any) -> dict[str, Any]:
        """Append a fact, in one write, and return it."""
        fact = {"kind": kind, "name": name, **facts}
        os.write(self._file, json.dumps(fact).encode() + b"\n")
        self._facts[kind, name] = fact
        return fact
