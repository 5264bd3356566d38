"""Writes files and folders so that a reader finds all of one or none of it, and keeps processes apart by locks.

What is being written has the ending ``.partial`` until it is renamed, so no reader takes it for the finished thing.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO, Any, Final

from reclaim.data.errors import ConfigError, StoreError

FULL_DISK: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Codes of the system's errors where a disk or a quota is full, or a file may not grow further."""
_NOT_WRITABLE: Final = (errno.EACCES, errno.EPERM, errno.EROFS)
_LOCK: Final = "lock"


def partial_of(path: Path) -> Path:
    """Return the name under which ``path`` is written until it is complete."""
    return path.with_name(path.name + ".partial")


def retired_of(path: Path) -> Path:
    """Return the name under which a folder waits to be deleted; no reader looks there."""
    return path.with_name(path.name + ".old.partial")


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Name what was being written in the error of a full disk that names no file, or that of a copy its source."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL_DISK or (error.filename is not None and error.filename2 is None):
            raise
        plain, words = os.strerror(error.errno), str(error.strerror)
        raise OSError(error.errno, words if words.startswith(plain) else plain, str(path)) from error


@contextmanager
def replaced_file(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """Yield a temporary name to write a file under; rename it to ``path`` when the block ends without an error.

    ``durable`` puts its content on the disk before: after a power cut no part of it has the name.

    Raises
    ------
    ConfigError
        Another process is writing ``path``.
    """
    partial = partial_of(path)
    with _locked_at(partial, ConfigError(f"{path}: another run is writing it; wait for it")) as file:
        try:
            file.truncate(0)  # what a killed process left
            with _naming(path):
                yield partial
                if durable:
                    os.fsync(file.fileno())
            os.replace(partial, path)
        except BaseException:
            with suppress(OSError):
                partial.unlink()
            raise


def write_text(path: Path, text: str) -> None:
    """Write a text file, complete or not at all."""
    with replaced_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(path: Path, content: object) -> None:
    """Write ``content`` as a JSON file, complete or not at all."""
    write_text(path, json.dumps(content, indent=2, sort_keys=True, allow_nan=False) + "\n")


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, in hex."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def content_sha256(content: object) -> str:
    """Return the SHA-256 of a JSON-like value, in hex; the order of keys makes no difference."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, allow_nan=False).encode()).hexdigest()


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def copy_durably(source: Path, target: Path) -> None:
    """Copy the content of a file, which is on the disk then."""
    shutil.copyfile(source, target)
    with target.open("rb") as written:
        os.fsync(written.fileno())


def copy_files(source: Path, target: Path) -> None:
    """Copy what is in a folder into one that is there; the content of files is on the disk then.

    Raises
    ------
    OSError
        The system's own, of the first file that cannot be copied; ``shutil.copytree`` has one of another kind.
    """
    for path in sorted(source.rglob("*")):  # a folder comes before what is in it
        copy = target / path.relative_to(source)
        if path.is_dir():
            copy.mkdir(exist_ok=True)
        else:
            copy_durably(path, copy)


def make_folder(folder: Path) -> None:
    """Make a folder, and those above it that are missing; the names of those made are durable."""
    made = [path for path in (folder, *folder.parents) if not path.is_dir()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in made:
        sync_folder(path.parent)


def replace_folder(fresh: Path, path: Path, *, durable: bool = False) -> None:
    """Rename a folder to ``path`` and delete the one that was there.

    Killed between the two renames, the old folder waits as ``retired_of(path)``; ``recover_folder`` puts it back.

    Parameters
    ----------
    fresh, path : Path
        The new folder, and its place.
    durable : bool
        Whether to sync the new name before the old folder is deleted.
    """
    if path.exists():
        os.replace(path, retired_of(path))
    os.replace(fresh, path)
    if durable:
        sync_folder(path.parent)
    _remove(retired_of(path))


def recover_folder(path: Path) -> None:
    """Finish what a killed ``replace_folder`` began: put the old folder back if ``path`` is missing, else delete it."""
    retired = retired_of(path)
    if retired.exists() and not path.exists():
        os.replace(retired, path)
    _remove(retired)


def _remove(retired: Path) -> None:
    """Delete what waits for deletion: a folder, or a file or link in its place, on which a rename fails."""
    if retired.is_symlink() or retired.is_file():
        with suppress(OSError):
            retired.unlink()
    shutil.rmtree(retired, ignore_errors=True)


def discard_folder(path: Path, retired: Path) -> None:
    """Delete a folder under the name ``retired``, so that a reader never finds half of it as ``path``.

    Another process that tidies up may delete it, too.
    """
    os.replace(path, retired)
    _remove(retired)


@contextmanager
def replaced_folder(path: Path) -> Iterator[Path]:
    """Yield a new folder to write into, and put it in the place of ``path`` when the block ends without an error.

    Where ``path`` is a link, the folder that it leads to is replaced, and the link stays.

    If the block raises, ``path`` stays as it was. The same holds for a process that is killed, once the next one has
    called this or ``remove_left_behind``.

    Raises
    ------
    ConfigError
        Another process is replacing ``path``, or it is the working folder.
    """
    path = _led_to(path)
    with suppress(FileNotFoundError):
        if path.samefile(Path()):  # the process would go on in the old one
            raise ConfigError(
                f"{path}: the working folder cannot be replaced; name a folder in it, or run from another"
            )
    with _staging_of(path) as staging:
        fresh = staging / "new"
        fresh.mkdir()
        with _naming(path):
            yield fresh
        replace_folder(fresh, path)


def remove_left_behind(path: Path) -> None:
    """Remove what a killed ``replaced_folder`` left next to ``path``, unless another process is at work there."""
    path = _led_to(path)
    if partial_of(path).exists() or retired_of(path).exists():
        with suppress(ConfigError, OSError), _staging_of(path):  # remains that cannot be removed do no harm
            pass


@cache
def folder_of_process(prefix: str) -> Path:
    """Return a temporary folder of this user alone, made by the first call and removed as this process ends.

    A process that is forked from this one shares the folder and leaves it there.
    """
    folder, maker = Path(tempfile.mkdtemp(prefix=prefix)), os.getpid()

    def remove() -> None:
        if os.getpid() == maker:
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder


def _led_to(path: Path) -> Path:
    """Return the target of a link, and the working folder by its name; any other path as it is."""
    return path.resolve() if path.is_symlink() or not path.name else path


@contextmanager
def _staging_of(path: Path) -> Iterator[Path]:
    """Yield the empty, locked folder in which the successor of ``path`` is written; then remove it."""
    staging = partial_of(path)

    def tidy() -> None:
        recover_folder(path)
        shutil.rmtree(staging / "new", ignore_errors=True)

    with _lock_in(staging / _LOCK, ConfigError(f"{path}: another run is writing it; wait for it")):
        tidy()
        try:
            yield staging
        finally:
            tidy()
            shutil.rmtree(staging, ignore_errors=True)  # deletes the lock too, so it comes last


def _lock_in(path: Path, busy: Exception | None) -> IO[bytes]:
    """Return the locked file of a name in a folder that is made, and that its holder may delete at the end."""
    folder = path.parent
    while True:
        with _naming_the_remedy():
            folder.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):  # not by ``exist_ok``, which fails where it is deleted meanwhile
                folder.mkdir()
            try:
                return _locked_at(path, busy)
            except FileNotFoundError:  # another process has just ended and deleted the folder
                if folder.is_symlink() or path.is_symlink():
                    raise


def _locked_at(path: Path, busy: Exception | None) -> IO[bytes]:
    """Return the locked file of a name that its holder deletes or gives to another file at the end."""
    while True:
        file = path.open("ab")
        try:
            lock(file, busy)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                    return file
        except BaseException:
            file.close()
            raise
        file.close()  # its holder has just ended, so this lock excludes no other process


@contextmanager
def _naming_the_remedy() -> Iterator[None]:
    """Raise ConfigError in place of an error of a folder in which nothing can be written."""
    try:
        yield
    except OSError as error:
        if error.errno not in _NOT_WRITABLE:
            raise
        raise ConfigError(
            f"{Path(error.filename).parent}: nothing can be written into it ({error.strerror}); let this user write "
            "there, or name another folder, such as one with a copy of the dataset"
        ) from error


def lock(file: IO[Any] | int, busy: Exception | None) -> None:
    """Lock an open file until it is closed; raise ``busy``, or wait without it, if another process has it.

    The system releases the lock of a killed process.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (fcntl.LOCK_NB if busy else 0))
    except BlockingIOError as error:
        if busy is None:
            raise
        raise busy from error


@contextmanager
def locked(path: Path, busy: Exception | None) -> Iterator[None]:
    """Hold the lock file ``path``; raise ``busy``, or wait without it, if another process has it.

    Its folder is made where it is missing. The file stays.
    """
    with _lock_in(path, busy):
        yield


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Hold an existing folder, and wait for another process that has it; nothing is written into it."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        lock(fd, None)
        yield
    finally:
        os.close(fd)


@contextmanager
def working_folder(folder: Path, busy: Exception) -> Iterator[None]:
    """Hold a folder for what a killed process leaves to the next one; it is removed at the end.

    Where an exception passes it stays, unless nothing is in it. ``busy`` is raised where another process holds it.
    """
    with _lock_in(folder / _LOCK, busy):
        try:
            yield
        except BaseException:
            if {path.name for path in folder.glob("*")} <= {_LOCK}:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        shutil.rmtree(folder, ignore_errors=True)


def take_lock(folder: Path) -> int:
    """Return the descriptor that holds a folder for this process until closed.

    Raises
    ------
    StoreError
        Another process holds it; the message names its id.
    """
    fd = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        holder = os.pread(fd, 20, 0).decode(errors="replace").strip() or "unknown"
        lock(
            fd,
            StoreError(f"{folder} is held by another process (pid {holder}): stop it, or use another folder"),
        )
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    except BaseException:
        os.close(fd)
        raise
    return fd
