"""Downloads one object over HTTP: resumes within one version of it, and names the file only after its checks."""

from __future__ import annotations

import base64
import hashlib
import logging
import os
import random
from collections.abc import Callable
from concurrent.futures import CancelledError
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from threading import Event
from typing import Any, Final, TypeVar

import httpx

from reclaim.data.core.files import file_sha256, partial_of
from reclaim.data.errors import ConfigError, TraceError
from reclaim.data.fetch.ledger import Ledger

log = logging.getLogger(__name__)
T = TypeVar("T")

TRIES: Final = 8
"""Failures in a row without one new byte after which an object is given up: two minutes of waiting at 1 s, doubled."""
TRIES_AT_CHECKSUM: Final = 3
"""Complete downloads with a wrong checksum after which an object is given up."""
LONGEST_WAIT_S: Final = 60.0
"""Longest pause between two tries, whatever the backoff or the server's ``Retry-After`` say."""
_TRANSIENT: Final = frozenset({408, 425, 429, 500, 502, 503, 504})
"""HTTP statuses after which the same request may succeed."""


@dataclass(frozen=True)
class RemoteFile:
    """An object to fetch: its path below base URL and folder, its address, its published checksum."""

    name: str
    url: str
    sha256: str | None = None


class _TryAgainError(Exception):
    """A try failed and another may succeed; ``wait_s`` is the pause that the server asked for."""

    def __init__(self, reason: str, wait_s: float = 0.0) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


class _WrongBytesError(_TryAgainError):
    """A complete download does not fit its checksum."""


def check_url(url: str) -> str:
    """Return ``url`` if it is HTTPS, or HTTP to this machine; ConfigError otherwise."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ConfigError(f"{url}: not a URL ({error})") from error
    if parsed.host and (parsed.scheme == "https" or (parsed.scheme == "http" and is_loopback(parsed.host))):
        return url
    raise ConfigError(f"{url}: expected an https:// URL (http:// only for this machine, such as http://127.0.0.1:8000)")


def is_loopback(host: str) -> bool:
    """Return whether a host is this machine."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def open_client(base_url: str, timeout_s: float) -> httpx.Client:
    """Return a client that follows redirections and checks each before it is requested.

    Parameters
    ----------
    base_url : str
        Prefix of every address, as ``check_url`` returns it.
    timeout_s : float
        Silence after which a connection counts as broken, in seconds.

    Raises
    ------
    ConfigError
        On a request whose redirection leads out of HTTPS, or from this machine to plain HTTP of another.
    """
    check = partial(_check_hop, httpx.URL(base_url))
    return httpx.Client(timeout=timeout_s, follow_redirects=True, event_hooks={"request": [check]})


def _check_hop(base_url: httpx.URL, request: httpx.Request) -> None:
    if base_url.scheme == "https" != request.url.scheme:
        raise ConfigError(f"{base_url}: redirects to {request.url}, out of HTTPS; try another mirror with --base-url")
    check_url(str(request.url))


class Downloader:
    """Fetches objects into a folder; safe to call from several threads.

    Parameters
    ----------
    client : httpx.Client
        As ``open_client`` returns it.
    folder : Path
        Destination. An object is ``NAME.partial`` until it is checked, then ``NAME``.
    ledger : Ledger
        Of that folder.
    backoff_s : float
        First pause between two tries, in seconds; doubled each time, times a random factor between a half and one.
    stop : Event
        Once set, every download ends at its next chunk with ``CancelledError``.
    advance : callable
        Called with the number of bytes after each write.
    """

    def __init__(
        self, client: httpx.Client, folder: Path, ledger: Ledger, *,
        backoff_s: float, stop: Event, advance: Callable[[int], object],
    ) -> None:  # fmt: skip
        self._client, self._folder, self._ledger = client, folder, ledger
        self._backoff_s, self._stop, self._advance = backoff_s, stop, advance

    def exists(self, url: str) -> bool:
        """Return whether the server has an object; TraceError where its answer is neither yes nor no."""

        def ask() -> bool:
            response = self._client.head(url)
            if response.status_code == httpx.codes.NOT_FOUND:
                return False
            _check_status(response)
            return True

        return self._retry(url, ask, lambda: 0)

    def is_complete(self, file: RemoteFile) -> bool:
        """Return whether the checked object is in the folder; its bytes are read only if size or time changed."""
        path, done = self._folder / file.name, self._ledger.get("done", file.name)
        if not path.is_file():
            return False
        stat = path.stat()
        if (done.get("bytes"), done.get("mtime_ns")) == (stat.st_size, stat.st_mtime_ns):
            return True
        sha256 = file.sha256 or done.get("sha256")
        if sha256 is None or file_sha256(path) != sha256:
            return False
        self._record(file, path, sha256, done.get("checked", "sha256"))
        return True

    def get(self, file: RemoteFile) -> None:
        """Fetch an object, continuing after the last byte of an earlier try or run.

        Raises
        ------
        TraceError
            The server lacks or refuses the object, fails ``TRIES`` times in a row without a new byte, or sends bytes
            with a wrong checksum ``TRIES_AT_CHECKSUM`` times.
        OSError
            The disk is full.
        """
        path = self._folder / file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = partial_of(path)

        def attempt() -> None:
            begun = self._receive(file, partial)
            sha256, checked = _verify(file, partial, begun)
            # recorded, then renamed: the final name implies the check; a kill in between repeats it
            self._record(file, partial, sha256, checked)
            os.replace(partial, path)

        self._retry(file.url, attempt, lambda: _size(partial))

    def _retry(self, url: str, attempt: Callable[[], T], progress: Callable[[], int]) -> T:
        """Return the result of ``attempt``, repeated after failures; only failures in a row without progress count."""
        furthest, failures, wrong = progress(), 0, 0
        while True:
            try:
                return attempt()
            except (httpx.RequestError, _TryAgainError) as error:
                reason = str(error) or type(error).__name__  # a timeout has no message of its own
                wait_s = error.wait_s if isinstance(error, _TryAgainError) else 0.0
                wrong += isinstance(error, _WrongBytesError)
            failures = 1 if progress() > furthest else failures + 1
            furthest = max(furthest, progress())
            if wrong == TRIES_AT_CHECKSUM:
                raise TraceError(f"{url}: {reason}, {wrong} times")
            if failures == TRIES:
                raise TraceError(f"{url}: {reason}; given up after {failures} tries in a row without a new byte")
            backoff_s = self._backoff_s * 2 ** (failures - 1) * random.uniform(0.5, 1.0)
            pause_s = min(max(backoff_s, wait_s), LONGEST_WAIT_S)
            log.warning("%s: %s; trying again in %.1f s", url, reason, pause_s)
            if self._stop.wait(pause_s):
                raise CancelledError

    def _receive(self, file: RemoteFile, partial: Path) -> dict[str, Any]:
        """Complete the partial file with at most one request; return the facts recorded at its first byte."""
        begun = self._ledger.get("begun", file.name)
        resumable = begun.get("url") == file.url and begun.get("version") and begun["bytes"]
        have = _size(partial) if resumable else 0
        if have and have == begun["bytes"]:
            return begun
        # a packed file as stored, because checksums are of the stored bytes; any other without packing on its way
        headers = {"Accept-Encoding": "gzip" if file.name.endswith(".gz") else "identity"}
        if have:
            headers |= {"Range": f"bytes={have}-", "If-Range": begun["version"]}
        with self._client.stream("GET", file.url, headers=headers) as response:
            if response.status_code in (httpx.codes.PARTIAL_CONTENT, httpx.codes.REQUESTED_RANGE_NOT_SATISFIABLE):
                if not (have and _continues(response, have, begun)):
                    partial.unlink(missing_ok=True)
                    span = response.headers.get("Content-Range", "no Content-Range")
                    raise _TryAgainError(f"not the rest of the file from byte {have} ({span})")
            else:  # from the first byte: the first try, a new version, or a server without ranges
                _check_status(response)
                partial.unlink(missing_ok=True)
                length = response.headers.get("Content-Length")
                begun = self._ledger.put(
                    "begun", file.name, url=file.url, version=_version(response), md5=_md5(response),
                    bytes=int(length) if length else None,
                )  # fmt: skip
            with partial.open("ab") as f:
                for chunk in response.iter_raw():
                    f.write(chunk)
                    self._advance(len(chunk))
                    if self._stop.is_set():
                        raise CancelledError
                f.flush()
                os.fsync(f.fileno())
        if begun["bytes"] is not None and _size(partial) < begun["bytes"]:
            raise _TryAgainError(f"only {_size(partial)} of {begun['bytes']} bytes came")
        return begun

    def _record(self, file: RemoteFile, path: Path, sha256: str, checked: str) -> None:
        stat = path.stat()
        self._ledger.put(
            "done", file.name, url=file.url, bytes=stat.st_size, mtime_ns=stat.st_mtime_ns, sha256=sha256,
            checked=checked,
        )  # fmt: skip


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _continues(response: httpx.Response, have: int, begun: dict[str, Any]) -> bool:
    """Return whether the response holds the missing end of the version that was begun."""
    span, n_bytes = response.headers.get("Content-Range"), begun["bytes"]
    of_span = span in (f"bytes {have}-{n_bytes - 1}/{n_bytes}", f"bytes {have}-{n_bytes - 1}/*")
    return of_span and _version(response) in (None, begun["version"])


def _verify(file: RemoteFile, partial: Path, begun: dict[str, Any]) -> tuple[str, str]:
    """Return the SHA-256 of a complete file and the name of its strongest check; a wrong file is deleted."""
    sha256 = file_sha256(partial)
    expected_and_got = {
        "sha256": (file.sha256, sha256),
        "md5": (begun["md5"], _file_md5(partial) if begun["md5"] else None),
        "length": (begun["bytes"], _size(partial)),
    }
    known = {check: pair for check, pair in expected_and_got.items() if pair[0] is not None}
    for check, (expected, got) in known.items():
        if got != expected:
            partial.unlink()
            raise _WrongBytesError(f"wrong {check}: expected {expected}, got {got}")
    return sha256, next(iter(known), "nothing")


def _file_md5(path: Path) -> str:
    """Return the MD5 of a file's bytes, in base64 as Google storage writes it."""
    with path.open("rb") as f:
        digest = hashlib.file_digest(f, lambda: hashlib.md5(usedforsecurity=False))
    return base64.b64encode(digest.digest()).decode()


def _check_status(response: httpx.Response) -> None:
    """Raise unless the response is a success."""
    status = response.status_code
    if status == httpx.codes.OK:
        return
    if status in _TRANSIENT:
        asked = response.headers.get("Retry-After", "")
        raise _TryAgainError(f"HTTP {status} {response.reason_phrase}", float(asked) if asked.isdecimal() else 0.0)
    if status == httpx.codes.NOT_FOUND:
        raise TraceError(f"{response.url}: no such object (HTTP 404); check --cell, --table, --shards and --base-url")
    raise TraceError(f"{response.url}: HTTP {status} {response.reason_phrase}; check --base-url, or try another mirror")


def _version(response: httpx.Response) -> str | None:
    """Return the object's version for ``If-Range``: a strong ETag, else the time of its last change."""
    etag: str = response.headers.get("ETag", "")
    return etag if etag.startswith('"') else response.headers.get("Last-Modified")


def _md5(response: httpx.Response) -> str | None:
    """Return the MD5, in base64, of an object as Google storage holds it: ``x-goog-hash: crc32c=…,md5=…``."""
    stored, sent = (response.headers.get(h, "identity") for h in ("x-goog-stored-content-encoding", "Content-Encoding"))
    if stored != sent:
        return None  # unpacked on its way, so the checksum is of other bytes
    for part in response.headers.get_list("x-goog-hash", split_commas=True):
        name, _, value = part.strip().partition("=")
        if name == "md5":
            return value
    return None
