"""Sends a request until it is answered, refused for good, or out of time, and defines the errors."""

from __future__ import annotations

import json
import math
import random
import re
import ssl
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import httpx
from pydantic import ValidationError

from reclaim.data.errors import ConfigError, ReclaimError
from reclaim.data.fetch.download import is_loopback
from reclaim.serving.wire.errors import BUSY, DISK_FULL, UNAVAILABLE
from reclaim.serving.wire.schemas import ErrorBody, ErrorResponse

_TEMPORARY: Final = frozenset({BUSY, UNAVAILABLE, DISK_FULL, 502, 504})
"""Temporary statuses: too much under way, no answer yet, a full disk, and those of a proxy while the service
restarts."""
_TOKEN: Final = re.compile("[!-~]+")
"""Visible ASCII, which is all that a header can carry. The service alone says how long a token has to be."""
_CONNECT_S: Final = 5.0
"""Time limit of a connection, in seconds: a host that is gone does not answer later."""
_FIRST_WAIT_S: Final = 0.1
"""Upper bound of the first wait, in seconds; it doubles with each further one."""
_LONGEST_WAIT_S: Final = 5.0
"""Upper bound of a wait that the service did not ask for, in seconds: about the time of a restart."""


class ServiceError(ReclaimError):
    """The service refused a request, or could not be reached.

    Attributes
    ----------
    status : int or None
        HTTP status; None where there was no answer.
    error : ErrorBody or None
        Refusal of the service: code, message, field and row.
    temporary : bool
        True if the same request may be answered later.
    """

    def __init__(
        self, message: str, status: int | None = None, error: ErrorBody | None = None, *, temporary: bool | None = None
    ) -> None:
        """Take a missing ``temporary`` from the status: no answer, and one that says so, are temporary."""
        super().__init__(message)
        self.status = status
        self.error = error
        self.temporary = status is None or status in _TEMPORARY if temporary is None else temporary


class RefusedRowsError(ServiceError):
    """Some rows were refused and the client is strict; the good rows were taken.

    Attributes
    ----------
    refused : dict of code to int
        Number of refused rows by code.
    errors : list of ErrorBody
        The first of them.
    """

    def __init__(self, refused: Mapping[str, int], errors: Sequence[ErrorBody]) -> None:
        first = errors[0] if errors else None
        counts = ", ".join(f"{n} {code}" for code, n in sorted(refused.items()))
        super().__init__(
            f"rows were refused ({counts}); the first: {first.message if first else 'unknown'}", 200, first
        )
        self.refused = dict(refused)
        self.errors = list(errors)


class Transport:
    """Sends requests to one service, with retries where they may help; ``client.Client`` has the parameters."""

    def __init__(
        self, url: str, *, token: str | None, timeout_s: float, retries: int, patience_s: float,
        verify: bool | str | Path | ssl.SSLContext, transport: httpx.BaseTransport | None,
    ) -> None:  # fmt: skip
        if retries < 0:
            raise ConfigError(f"retries: expected 0 or more, got {retries}")
        if not _is_number(timeout_s) or not 0 < timeout_s < math.inf:
            raise ConfigError(f"timeout_s: expected seconds, a number above 0, got {timeout_s!r}")
        if not _is_number(patience_s) or not patience_s >= 0:
            raise ConfigError(f"patience_s: expected seconds, 0 or more, got {patience_s!r}")
        self._timeout_s, self._retries, self._patience_s = timeout_s, retries, patience_s
        headers = {} if token is None else {"authorization": f"Bearer {_checked(token)}"}
        address = _address(url)
        self._shown = address.copy_with(userinfo=b"")
        self._http = httpx.Client(
            base_url=address, headers=headers, verify=_certificates(verify), transport=transport,
            # else $HTTP_PROXY gets requests to this machine
            mounts={f"all://{address.netloc.decode()}": None} if is_loopback(address.host) else None,
        )  # fmt: skip

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def get_once(self, path: str, also: int) -> httpx.Response:
        """Return the answer of status 200 or ``also`` to the first attempt; ServiceError where there is none."""
        try:
            response = self._http.get(path, timeout=min(self._timeout_s, _CONNECT_S))
        except httpx.RequestError as error:
            raise self._unreachable(error, 1) from error
        if response.status_code not in (200, also):
            raise _refusal(response)
        return response

    def send(
        self, method: str, path: str, headers: Mapping[str, str], params: Mapping[str, object], content: bytes | None
    ) -> httpx.Response:  # fmt: skip
        """Return the answer of status 200; ServiceError where there is none. Parameters that are None are left out."""
        words = {name: _word(value) for name, value in params.items() if value is not None}
        end = time.monotonic() + self._patience_s
        for attempt in range(1, self._retries + 2):
            timeout_s = max(min(self._timeout_s, end - time.monotonic()), _FIRST_WAIT_S)
            wait_s = random.uniform(0, min(_FIRST_WAIT_S * 2 ** (attempt - 1), _LONGEST_WAIT_S))
            try:
                response = self._http.request(
                    method, path, content=content, params=words, headers=headers,
                    timeout=httpx.Timeout(timeout_s, connect=min(timeout_s, _CONNECT_S)),
                )  # fmt: skip
            except httpx.RequestError as error:
                if _is_permanent(error) or attempt > self._retries or time.monotonic() + wait_s >= end:
                    raise self._unreachable(error, attempt) from error
            else:
                if response.status_code == 200:
                    return response
                asked_s = response.headers.get("retry-after", "")
                wait_s += int(asked_s) if asked_s.isdecimal() else 0
                temporary = response.status_code in _TEMPORARY
                if not temporary or attempt > self._retries or time.monotonic() + wait_s >= end:
                    raise _refusal(response)
            time.sleep(wait_s)
        raise AssertionError("the last attempt returns or raises")

    def _unreachable(self, error: httpx.RequestError, attempts: int) -> ServiceError:
        reason = str(error).rstrip(".") or type(error).__name__
        tried = f" (tried {attempts} times)" if attempts > 1 else ""
        return ServiceError(
            f"no answer from {self._shown}{tried}: {reason}; is the service running there?",
            temporary=not _is_permanent(error),
        )


def _is_permanent(error: httpx.RequestError) -> bool:
    """Return whether a retry would meet a failure again.

    The caller caused it, a certificate is not trusted, or the answer leads to what is no URL.
    """
    inner = error.__cause__  # that of httpcore; what it was raised for is its context, and no exception of the caller
    refused = inner is not None and isinstance(inner.__cause__ or inner.__context__, ssl.SSLCertVerificationError)
    return refused or isinstance(error, httpx.LocalProtocolError) or isinstance(error.__context__, httpx.InvalidURL)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _address(url: str) -> httpx.URL:
    """Return the address of a service; ConfigError where it is none."""
    try:
        address = httpx.URL(url)
    except (httpx.InvalidURL, TypeError) as error:
        raise ConfigError(f"url: not a URL ({error}); expected one such as http://127.0.0.1:3000") from error
    if address.scheme not in ("http", "https") or not address.host:
        raise ConfigError(f"url: expected http://… or https://…, such as http://127.0.0.1:3000, got {url!r}")
    return address


def _certificates(verify: bool | str | Path | ssl.SSLContext) -> bool | ssl.SSLContext:
    """Return what checks the service's certificate, of a file its content; ConfigError where it holds none."""
    if not isinstance(verify, str | Path):
        return verify
    try:
        return ssl.create_default_context(cafile=verify)
    except OSError as error:  # errors of TLS among them
        raise ConfigError(f"{verify}: not certificates in PEM ({error.strerror or error})") from error


def _checked(token: str) -> str:
    """Return a token without surrounding white space, as a service reads its own; no error may show it."""
    token = token.strip()
    if not _TOKEN.fullmatch(token):
        raise ConfigError("token: expected visible ASCII characters without white space, got others, or none")
    return token


def _word(value: object) -> str:
    return json.dumps(value) if isinstance(value, bool) else str(value)


def _refusal(response: httpx.Response) -> ServiceError:
    url = response.request.url
    status, request = response.status_code, f"{response.request.method} {url.path}"
    try:
        error = ErrorResponse.model_validate_json(response.content, extra="ignore").error
    except ValidationError:
        leads = f", which leads to {response.headers['location']}" if response.has_redirect_location else ""
        return ServiceError(
            f"{request}: status {status}{leads}, in another form than the service's; is it at "
            f"{url.scheme}://{url.netloc.decode()}?",
            status,
        )
    return ServiceError(f"{request}: {status} {error.code}: {error.message}", status, error)
