"""Names files and folders of this machine or of an object store alike, and reports what is wrong with one.

A place in a store is written ``s3://bucket/folder``. It has the methods of a ``Path`` (``UPath`` of universal_pathlib
over fsspec), but the functions of ``os`` do not take it.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, cast

from reclaim.data.core.files import FULL_DISK, content_sha256
from reclaim.data.errors import ConfigError, DataError

_SCHEME: Final = re.compile(r"([a-z][a-z0-9+.-]*)://", re.ASCII | re.IGNORECASE)
_LIBRARIES: Final = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs"}
"""Scheme → its library."""
_FAULTS: Final = (
    ("botocore.exceptions", "BotoCoreError"),
    ("aiohttp", "ClientError"),
    ("gcsfs.retry", "HttpError"),
    ("google.auth.exceptions", "GoogleAuthError"),
)
"""Errors of the libraries of stores that are not an OSError: module and class."""
_PLAIN: Final = re.compile(r"[^A-Za-z0-9._-]+")
"""Characters of a place that the name of its folder in the cache leaves out."""
_PATTERN: Final = re.compile(r"[*?[]")
"""Characters by which the libraries of stores take a name for a pattern: they would read or delete what it matches."""
_CREDENTIALS: Final = ("NoCredentialsError", "PartialCredentialsError", "TokenRetrievalError", "GoogleAuthError")
_SETTINGS: Final = ("ProfileNotFound", "ConfigNotFound", "ConfigParseError", "InvalidRegionError")
"""Errors of botocore's about settings, which another run meets again."""
_ENDPOINT: Final = "Invalid endpoint"
"""Beginning of the plain ValueError that botocore raises for an address without a scheme."""


def location(name: Path | str) -> Path:
    """Return the place that a name means: of this machine, or of a store where it begins with ``scheme://``.

    Capitals in the scheme have no meaning, as in any URL.

    Raises
    ------
    ConfigError
        The library of the store is not installed; the message names it. Or the name has no bucket, or a
        character that would make it a pattern.
    """
    if not isinstance(name, str):
        return name
    found = _SCHEME.match(name)
    if found is None:
        return Path(name)
    scheme, below = found[1].lower(), name[found.end() :]
    if not below.strip("/") or (scheme in _LIBRARIES and below.startswith("/")):
        raise ConfigError(f"{name}: names no bucket; expected {scheme}://bucket/folder")
    if pattern := _PATTERN.search(name):
        raise ConfigError(f"{name}: {pattern[0]} in a name of a store makes it a pattern; use another name")
    try:
        from upath import UPath

        place = UPath(f"{scheme}://{below.rstrip('/')}")
        _ = place.fs
    except ImportError as error:
        library = _LIBRARIES.get(scheme)
        remedy = f"pip install universal-pathlib {library}" if library else f"install the fsspec library of {scheme}://"
        raise ConfigError(f"{name}: the library of {scheme}:// is not installed; {remedy} ({error})") from error
    except ValueError as error:
        raise ConfigError(f"{name}: no store known by {scheme}:// ({error}); expected s3:// or gs://") from error
    return cast(Path, place)


def on_this_machine(name: Path | str) -> Path:
    """Return the path of a file or folder that is written on this machine, wherever the dataset is.

    Raises
    ------
    ConfigError
        The name is one of a store: as a path it would make a folder ``s3:`` in the working folder.
    """
    if not isinstance(name, str) and not in_store(name):
        return name
    if _SCHEME.match(str(name)):
        raise ConfigError(
            f"{name}: expected a place on this machine, got one of a store; name a path and copy it there"
        )
    return Path(name)


def in_store(path: Path) -> bool:
    """Return whether a place is in an object store."""
    return not isinstance(path, Path)


def opened(path: Path) -> tuple[Any, str]:
    """Return the file system of a place in a store, by fsspec, and its name there."""
    place = cast(Any, path)
    return place.fs, place.path


def arrow_place(path: Path) -> tuple[str, Any]:
    """Return the name of a file and its file system, None for this machine, as functions of Arrow take them."""
    if not in_store(path):
        return str(path), None
    files, name = opened(path)
    return name, files


def home_of(folder: Path) -> Path:
    """Return the folder of this machine for what is computed from a folder: itself, or of a store one in the cache.

    The cache is ``$XDG_CACHE_HOME/reclaim``, else ``~/.cache/reclaim``.
    """
    if not in_store(folder):
        return folder
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "reclaim" / _PLAIN.sub("_", str(folder).rstrip("/")) / content_sha256(str(folder))[:16]


@contextmanager
def reached(path: Path) -> Iterator[None]:
    """Turn errors of a store into ones that name the place and the remedy; do nothing for a place on this machine.

    The block touches the store alone: any OSError in it, except for a full disk, counts as the store's.

    Raises
    ------
    ConfigError
        There is no such object or bucket, or no permission, or a setting of the library is wrong.
    DataError
        The store cannot be reached, or broke off; the libraries have tried again by then.
    """
    faults = (OSError, *(getattr(sys.modules[m], name) for m, name in _FAULTS if m in sys.modules))
    try:
        yield
    except ValueError as error:
        if not in_store(path) or not str(error).startswith(_ENDPOINT):
            raise
        raise _wrong_settings(path, str(error)) from error
    except faults as error:
        if not in_store(path) or getattr(error, "errno", None) in FULL_DISK:
            raise
        what = next(iter(str(error).splitlines()), "") or type(error).__name__
        if isinstance(error, FileNotFoundError):
            raise ConfigError(f"{path}: no such object, folder or bucket ({what}); check the name") from error
        if isinstance(error, PermissionError) or type(error).__name__ in _CREDENTIALS:
            raise ConfigError(f"{path}: no permission ({what}); check credentials and the bucket's policy") from error
        if type(error).__name__ in _SETTINGS:
            raise _wrong_settings(path, what) from error
        raise broken_off(path, what) from error


def _wrong_settings(path: Path, what: str) -> ConfigError:
    return ConfigError(
        f"{path}: a setting of the store's library is wrong ({what}); correct AWS_ENDPOINT_URL, which begins with "
        "http:// or https://, AWS_PROFILE or the files in ~/.aws"
    )


def broken_off(path: Path, what: str) -> DataError:
    """Return the error of a store that stopped answering."""
    return DataError(
        f"{path}: the store could not be read or written to the end ({what}); run again, finished work is kept"
    )


def check_folder(folder: Path) -> None:
    """Check that there is such a folder; one of a store is listed again, and later questions are answered by that list.

    Raises
    ------
    ConfigError
        There is none, or no permission to list it.
    DataError
        The store cannot be reached.
    """
    if in_store(folder):
        with reached(folder):
            files, name = opened(folder)
            files.invalidate_cache()
            files.ls(name)
    elif not folder.is_dir():
        what = "a file; name the folder that it is in" if folder.is_file() else "no such folder; name that of a trace"
        raise ConfigError(f"{folder}: {what}")


def version_of(path: Path) -> dict[str, int]:
    """Return what distinguishes an object of a store from an earlier one of its name; nothing for a local file."""
    if not in_store(path):
        return {}
    files, name = opened(path)
    with reached(path):
        return {"version": files.checksum(name)}


def content_of(path: Path) -> bytes:
    """Return the bytes of a file, or of an object as it is now.

    Raises
    ------
    FileNotFoundError
        There is none.
    ConfigError, DataError
        As of ``reached``.
    """
    if not in_store(path):
        return path.read_bytes()
    files, name = opened(path)
    with reached(path):
        try:
            return bytes(files.cat_file(name))
        except FileNotFoundError as error:
            missing = error
    raise FileNotFoundError(f"{path}: {missing}")


def is_object(path: Path) -> bool:
    """Return whether a store has an object, at this moment; errors as of ``reached``."""
    files, name = opened(path)
    with reached(path):
        files.invalidate_cache()
        try:
            return bool(files.info(name)["type"] == "file")
        except FileNotFoundError:
            return False


def files_below(folder: Path) -> list[Path]:
    """Return the objects below a folder of a store, listed again."""
    files, name = opened(folder)
    with reached(folder):
        files.invalidate_cache()
        found = files.find(name)
    return [folder / path.removeprefix(f"{name}/") for path in sorted(found) if path != name]
