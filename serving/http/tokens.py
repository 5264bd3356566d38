"""Reads bearer tokens from files, follows their replacement, and refuses requests that their token does not allow."""

from __future__ import annotations

import hmac
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from reclaim.data.errors import ConfigError
from reclaim.serving.settings import ServingSettings
from reclaim.serving.wire.errors import FORBIDDEN, UNAUTHORIZED, RequestError

log = logging.getLogger(__name__)

_TOKEN: Final = re.compile(rb"[!-~]{16,1024}")
"""A token: visible ASCII, of a length that cannot be guessed."""
_LOOK_S: Final = 1.0
"""Seconds between two checks for a replaced token: a check takes a microsecond, and a replacement minutes."""
_READING: Final = frozenset({"/v1/reservations", "/v1/cell/reservations", "/v1/machines/fit"})
"""Paths at which a request with a body stores nothing."""
_READ_METHODS: Final = frozenset({"GET", "HEAD"})


def read_token(path: Path) -> bytes:
    """Return the bearer token in a file, without surrounding white space.

    Raises
    ------
    ConfigError
        The file cannot be read, or holds no token.
    """
    try:
        token = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"the token file {path} cannot be read: {error.strerror}") from error
    if not _TOKEN.fullmatch(token):
        raise ConfigError(
            f"the token file {path} must hold one token of 16 to 1024 visible ASCII characters; "
            "`openssl rand -hex 32` makes one"
        )
    return token


class Token:
    """The token of a file, which may be replaced while the service runs.

    Raises
    ------
    ConfigError
        The file cannot be read, or holds no token.
    """

    def __init__(self, file: Path) -> None:
        self._file, self._version, self._token = file, _version(file), read_token(file)
        self._looked_s = -_LOOK_S

    def is_given(self, given: bytes, now_s: float) -> bool:
        """Return whether a request carries it; a new one counts within a second."""
        if now_s - self._looked_s >= _LOOK_S:
            self._looked_s = now_s
            self._look_again()
        return hmac.compare_digest(given, self._token)

    def _look_again(self) -> None:
        """Take the token that replaced the one in use; where a file holds none, that one stays."""
        if (version := _version(self._file)) != self._version:
            self._version = version
            try:
                self._token = read_token(self._file)
                log.info("the token was replaced: %s", self._file)
            except ConfigError as error:
                log.error("%s; the previous token stays", error)


class Tokens:
    """The token of all requests, and the one that may only read, where there are such.

    Attributes
    ----------
    asked : bool
        True if requests must give a token.

    Raises
    ------
    ConfigError
        A file cannot be read or holds no token, or there is a token for readers and none for writers.
    """

    def __init__(self, settings: ServingSettings) -> None:
        if settings.token_file is None and settings.read_token_file is not None:
            raise ConfigError(
                "RECLAIM_READ_TOKEN_FILE names a token that may only read, and without --token-file every caller may "
                "write; name that, too"
            )
        self._all = None if settings.token_file is None else Token(settings.token_file)
        self._read = None if settings.read_token_file is None else Token(settings.read_token_file)
        self.asked = self._all is not None

    def check(self, headers: Mapping[bytes, bytes], method: str, path: str, now_s: float) -> None:
        """Refuse a request without a token that allows it, by RequestError."""
        if self._all is None:
            return
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        given = given.strip() if scheme.lower() == b"bearer" else b""
        if self._all.is_given(given, now_s):
            return
        if self._read is None or not self._read.is_given(given, now_s):
            raise RequestError(
                UNAUTHORIZED, "unauthorized", "this service asks for `Authorization: Bearer` and its token"
            )
        if method not in _READ_METHODS and path not in _READING:
            raise RequestError(FORBIDDEN, "read_only", f"{path}: this token may only read")


def _version(file: Path) -> tuple[int, ...] | None:
    """Return what changes when a file does; None where it is not there."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size
