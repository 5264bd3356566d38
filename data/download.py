"""One object over HTTP: resumed where it broke, never of two versions, and under its name only when it was checked."""

from __future__ import annotations

import base64
import hashlib
import logging
import os
import random
import re
from collections.abc import Callable
from concurrent.futures import CancelledError
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from threading import Event
from typing import Any, Final, TypeVar

import httpx

from reclaim.data.errors import ConfigError, TraceError
from reclaim.data.ledger import Ledger
from reclaim.data.store import file_sha256

log = logging.getLogger(__name__)
T = TypeVar("T")

TRIES: Final = 8
"""Failures in a row without one new byte after which an object is given up: two minutes of waiting at 1 s, doubled."""
TRIES_AT_CHECKSUM: Final = 3
"""Whole downloads with a wrong checksum after which an object is given up: a fault on the way passes by then."""
LONGEST_WAIT_S: Final = 60.0
"""Longest pause between two tries, whatever the backoff or the server's ``Retry-After`` say."""
_PASSING: Final = frozenset({408, 425, 429, 500, 502, 503, 504})
"""HTTP statuses that mean "later" and not "never"."""


@dataclass(frozen=True)
class Wanted:
    """An object to fetch: its path below the base URL and below the folder, its address, its published checksum."""

    name: str
    url: str
    sha256: str | None = None


class _TryAgainError(Exception):
    """A try failed in a way that another may not; ``wait_s`` is the pause the server asked for."""

    def __init__(self, reason: str, wait_s: float = 0.0) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


class _WrongBytesError(_TryAgainError):
    """A whole object came, and it is not the one that was published."""


def check_url(url: str) -> str:
    """Return ``url`` if it is HTTPS, or HTTP to this very machine.

    Raises
    ------
    ConfigError
        It is neither: anybody on the way could change what comes.
    """
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ConfigError(f"{url}: not a URL ({error})") from error
    if parsed.host and (parsed.scheme == "https" or (parsed.scheme == "http" and _is_loopback(parsed.host))):
        return url
    raise ConfigError(f"{url}: expected an https:// URL (http:// only of this machine, as http://127.0.0.1:8000)")


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def open_client(base_url: str, timeout_s: float) -> httpx.Client:
    """Return a client that follows redirections, each checked before it is asked: what is HTTPS stays HTTPS.

    Parameters
    ----------
    base_url : str
        What all that is asked for begins with, as ``check_url`` returns it.
    timeout_s : float
        Silence after which a connection counts as broken, in seconds.

    Raises
    ------
    ConfigError
        On a request that a redirection leads out of HTTPS, or from this machine to plain HTTP of another.
    """
    check = partial(_check_hop, httpx.URL(base_url))
    return httpx.Client(timeout=timeout_s, follow_redirects=True, event_hooks={"request": [check]})


def _check_hop(base_url: httpx.URL, request: httpx.Request) -> None:
    if base_url.scheme == "https" != request.url.scheme:
        raise ConfigError(f"{base_url}: redirects to {request.url}, out of HTTPS; try another mirror with --base-url")
    check_url(str(request.url))


class Downloader:
    """Fetches objects into a folder; one may serve several threads.

    Parameters
    ----------
    client : httpx.Client
        As ``open_client`` returns it.
    folder : Path
        Where the objects go, each under its ``Wanted.name``; until checked, under that name and ``.partial``.
    ledger : Ledger
        Of that folder.
    backoff_s : float
        First pause between two tries, in seconds; doubled each time, times a random factor between a half and one.
    stop : Event
        Set from outside, it ends every download at its next chunk with ``CancelledError``.
    advance : callable
        Told of every new byte on disk, in bytes.
    """

    def __init__(
        self, client: httpx.Client, folder: Path, ledger: Ledger, *,
        backoff_s: float, stop: Event, advance: Callable[[int], object],
    ) -> None:  # fmt: skip
        self._client, self._folder, self._ledger = client, folder, ledger
        self._backoff_s, self._stop, self._advance = backoff_s, stop, advance

    def exists(self, url: str) -> bool:
        """Return whether the server has an object.

        Raises
        ------
        TraceError
            It does not say so, whether by another status or by none.
        """

        def ask() -> bool:
            response = self._client.head(url)
            if response.status_code == httpx.codes.NOT_FOUND:
                return False
            _check_status(response)
            return True

        return self._persist(url, ask, lambda: 0)

    def is_there(self, wanted: Wanted) -> bool:
        """Return whether the object lies in the folder, whole and checked; only a changed file is read for that."""
        path, done = self._folder / wanted.name, self._ledger.get("done", wanted.name)
        if not path.is_file():
            return False
        stat = path.stat()
        if (done.get("bytes"), done.get("mtime_ns")) == (stat.st_size, stat.st_mtime_ns):
            return True
        sha256 = wanted.sha256 or done.get("sha256")
        if sha256 is None or file_sha256(path) != sha256:
            return False
        checked = done.get("checked", "sha256")
        self._record(wanted, path, sha256, checked)
        return True

    def get(self, wanted: Wanted) -> None:
        """Fetch an object, going on where an earlier try or run was.

        Raises
        ------
        TraceError
            The server has no such object, or refuses, or fails ``TRIES`` times in a row without sending a new byte, or
            sends what does not fit the checksum ``TRIES_AT_CHECKSUM`` times.
        OSError
            The disk is full.
        """
        path = self._folder / wanted.name
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + ".partial")

        def attempt() -> None:
            begun = self._receive(wanted, partial)
            sha256, checked = _verify(wanted, partial, begun)
            # recorded, then named: whatever has the name has been checked; a kill in between costs one more check
            self._record(wanted, partial, sha256, checked)
            os.replace(partial, path)

        self._persist(wanted.url, attempt, lambda: _size(partial))

    def _persist(self, url: str, attempt: Callable[[], T], reached: Callable[[], int]) -> T:
        """Return what ``attempt`` returns once it does; failures that bring no new byte count, others do not."""
        furthest, failures, wrong = reached(), 0, 0
        while True:
            try:
                return attempt()
            except (httpx.RequestError, _TryAgainError) as error:
                reason = str(error) or type(error).__name__  # a timeout has no words of its own
                wait_s = error.wait_s if isinstance(error, _TryAgainError) else 0.0
                wrong += isinstance(error, _WrongBytesError)
            failures = 1 if reached() > furthest else failures + 1
            furthest = max(furthest, reached())
            if wrong == TRIES_AT_CHECKSUM:
                raise TraceError(f"{url}: {reason}, {wrong} times")
            if failures == TRIES:
                raise TraceError(f"{url}: {reason}; given up after {failures} tries in a row without a new byte")
            backoff_s = self._backoff_s * 2 ** (failures - 1) * random.uniform(0.5, 1.0)
            pause_s = min(max(backoff_s, wait_s), LONGEST_WAIT_S)
            log.info("%s: %s; trying again in %.1f s", url, reason, pause_s)
            if self._stop.wait(pause_s):
                raise CancelledError

    def _receive(self, wanted: Wanted, partial: Path) -> dict[str, Any]:
        """Bring the partial file to its end, in one request or none; return what was recorded as it was begun."""
        begun = self._ledger.get("begun", wanted.name)
        resumable = begun.get("url") == wanted.url and begun.get("version")
        have = _size(partial) if resumable else 0
        if have and have == begun["bytes"]:
            return begun
        # of a packed file the bytes as stored, which the checksums are of; of any other, no packing for the way
        headers = {"Accept-Encoding": "gzip" if wanted.name.endswith(".gz") else "identity"}
        if have:
            headers |= {"Range": f"bytes={have}-", "If-Range": begun["version"]}
        with self._client.stream("GET", wanted.url, headers=headers) as response:
            span = response.headers.get("Content-Range", "")
            if have and response.status_code == httpx.codes.REQUESTED_RANGE_NOT_SATISFIABLE:
                if span == f"bytes */{have}":
                    return begun  # there is nothing after what we have
                partial.unlink()
                raise _TryAgainError(f"the server has no byte {have} (HTTP 416)")
            _check_status(response)
            if have and response.status_code == httpx.codes.PARTIAL_CONTENT:
                goes_on = re.fullmatch(rf"bytes {have}-\d+/(\d+|\*)", span)
                same = _version(response) in (None, begun["version"])
                if not (goes_on and same and goes_on[1] in ("*", str(begun["bytes"] or goes_on[1]))):
                    partial.unlink()
                    raise _TryAgainError(f"the server went on with something else ({span or 'no Content-Range'})")
                if begun["bytes"] is None and goes_on[1] != "*":
                    begun = self._ledger.put(**(begun | {"bytes": int(goes_on[1])}))
            else:  # from its first byte: the first try, or another version, or a server that knows no ranges
                partial.unlink(missing_ok=True)
                length = response.headers.get("Content-Length")
                begun = self._ledger.put(
                    "begun", wanted.name, url=wanted.url, version=_version(response), md5=_md5(response),
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

    def _record(self, wanted: Wanted, path: Path, sha256: str, checked: str) -> None:
        stat = path.stat()
        self._ledger.put(
            "done", wanted.name, url=wanted.url, bytes=stat.st_size, mtime_ns=stat.st_mtime_ns, sha256=sha256,
            checked=checked,
        )  # fmt: skip


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _verify(wanted: Wanted, partial: Path, begun: dict[str, Any]) -> tuple[str, str]:
    """Return the SHA-256 of a whole file and what it was checked against; a wrong one is deleted."""
    sha256 = file_sha256(partial)
    expected_and_got = {
        "sha256": (wanted.sha256, sha256),
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
    """Raise unless the response brings the object."""
    status = response.status_code
    if status in (httpx.codes.OK, httpx.codes.PARTIAL_CONTENT):
        return
    if status in _PASSING:
        asked = response.headers.get("Retry-After", "")
        raise _TryAgainError(f"HTTP {status} {response.reason_phrase}", float(asked) if asked.isdecimal() else 0.0)
    if status == httpx.codes.NOT_FOUND:
        raise TraceError(f"{response.url}: no such object (HTTP 404); check --cell, --table, --shards and --base-url")
    raise TraceError(f"{response.url}: HTTP {status} {response.reason_phrase}; check --base-url, or try another mirror")


def _version(response: httpx.Response) -> str | None:
    """Return what names the object's version in ``If-Range``: a strong ETag, else the time it was last changed."""
    etag: str = response.headers.get("ETag", "")
    return etag if etag.startswith('"') else response.headers.get("Last-Modified")


def _md5(response: httpx.Response) -> str | None:
    """Return the MD5, in base64, that Google storage sends of an object as stored: ``x-goog-hash: crc32c=…,md5=…``."""
    stored, sent = (response.headers.get(h, "identity") for h in ("x-goog-stored-content-encoding", "Content-Encoding"))
    if stored != sent:
        return None  # unpacked on its way: of what comes it says nothing
    for part in response.headers.get_list("x-goog-hash", split_commas=True):
        name, _, value = part.strip().partition("=")
        if name == "md5":
            return value
    return None
