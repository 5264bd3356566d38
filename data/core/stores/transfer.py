"""Moves files and folders between this machine and an object store, so that a reader finds all of one or none of it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from reclaim.data.core.engine.workers import Workers
from reclaim.data.core.files import locked, partial_of, replaced_folder
from reclaim.data.core.stores.places import content_of, files_below, in_store, is_object, opened, reached
from reclaim.data.errors import DataError, ReclaimError

_AT_ONCE: Final = 4
"""Files that are written to a store at once; each is in memory meanwhile."""


@contextmanager
def local_copy(path: Path, work: Path) -> Iterator[Path]:
    """Yield a file of this machine with the bytes of ``path``: itself, or a copy in ``work`` until the block ends.

    An error that names the copy names the object instead.

    Raises
    ------
    ConfigError, DataError
        As of ``reached``, or fewer bytes came than the store lists.
    """
    if not in_store(path):
        yield path
        return
    folder = work / "copy"
    folder.mkdir(parents=True, exist_ok=True)
    copy = folder / path.name
    try:
        fetch_file(path, copy)
        yield copy
    except ReclaimError as error:
        raise type(error)(str(error).replace(str(copy), str(path))) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def fetch_file(path: Path, copy: Path) -> None:
    """Copy an object of a store into a file; errors as of ``local_copy``."""
    files, name = opened(path)
    with reached(path):
        size = path.stat().st_size
        files.get_file(name, str(copy))
    if (got := copy.stat().st_size) != size:
        raise DataError(f"{path}: expected {size} bytes, got {got}; it changed while it was read, so run again")


def fetch_folder(folder: Path, to: Path, last: str) -> None:
    """Bring a folder of this machine to the state of one in a store; do nothing where its file ``last`` is equal.

    ``last`` is the file that ``publish_folder`` wrote last. Other processes that fetch the same folder wait.

    Raises
    ------
    FileNotFoundError
        The store has no such folder, or no ``last`` in it.
    ConfigError, DataError
        As of ``reached``, or the folder was replaced while it was read.
    """
    with locked(to.with_name(to.name + ".lock"), None):
        newest = content_of(folder / last)
        if (to / last).is_file() and (to / last).read_bytes() == newest:
            return
        with replaced_folder(to) as work:
            for path in files_below(folder):
                copy = work / path.relative_to(folder).as_posix()
                copy.parent.mkdir(parents=True, exist_ok=True)
                fetch_file(path, copy)
            if (work / last).read_bytes() != newest or content_of(folder / last) != newest:
                raise DataError(f"{folder}: it was replaced while it was read; run again")


def publish_folder(source: Path, folder: Path, last: str) -> None:
    """Write a folder of this machine into a store, in the place of the one that is there; its file ``last`` at the end.

    A store has no rename. For a reader, a folder without ``last`` does not exist.

    Raises
    ------
    ConfigError, DataError
        As of ``reached``.
    """
    files, name = opened(folder)
    written = (path for path in sorted(source.rglob("*")) if path.is_file() and path != source / last)
    here = [path.relative_to(source).as_posix() for path in written]
    with reached(folder):
        if is_object(folder / last):
            files.rm_file(f"{name}/{last}")
        old = [opened(path)[1] for path in files_below(folder)]
        with Workers("local", _AT_ONCE) as pool:
            pool.run(files.rm_file, old, lambda _: None)  # one by one: ``rm`` would take run[12] for run1 and run2, too
            pool.run(lambda path: files.put_file(str(source / path), f"{name}/{path}"), here, lambda _: None)
        files.put_file(str(source / last), f"{name}/{last}")


@contextmanager
def marked(folder: Path) -> Iterator[None]:
    """Hold the object ``FOLDER.partial``, by which a folder of a store is being written; errors as of ``reached``.

    It stays where this process is killed, and its folder is then not taken for that of another process.
    """
    mark = partial_of(folder)
    with reached(folder):
        files, name = opened(mark)
        files.pipe_file(name, b"being written, or left by a run that was killed\n")
    yield
    remove_mark(folder)


def remove_mark(folder: Path) -> None:
    """Remove the object ``FOLDER.partial``."""
    mark = partial_of(folder)
    with reached(folder):
        if is_object(mark):
            opened(mark)[0].rm_file(opened(mark)[1])


def is_taken(folder: Path, last: str) -> bool:
    """Return whether a folder of a store holds anything but what a killed run left of it."""
    there = files_below(folder)
    return bool(there) and (folder / last in there or not is_object(partial_of(folder)))
