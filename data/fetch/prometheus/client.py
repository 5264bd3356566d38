"""Speaks HTTP with a Prometheus: headers, tokens, certificates, repeated tries, bounded answers, errors of one line."""

from __future__ import annotations

import base64
import json
import logging
import re
import ssl
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, quote_plus

import httpx

from reclaim.data.errors import ConfigError, TraceError
from reclaim.data.fetch.download import is_loopback

log = logging.getLogger(__name__)

TRIES: Final = 5
"""Tries of a request before it is given up: half a minute of waiting at 2 s, doubled."""
LARGEST_ANSWER: Final = 1 << 30
"""Bytes of one answer, unpacked, that is decoded as it comes."""
LARGEST_WHOLE: Final = 128 << 20
"""Bytes of one answer, unpacked, that is held whole: as JSON, three million samples, which take six times as much."""
CONNECT_S: Final = 10.0
"""Longest time until a connection is there; the timeout of a request is for an answer."""
_TRANSIENT: Final = frozenset({408, 425, 429, 500, 502, 503})
_TOO_MUCH: Final = frozenset({413, 422, 504})
"""Statuses of a request that asks for too much: a limit of samples, series or time, the server's or a gateway's."""
_MAY_LIMIT: Final = frozenset({400, 503})
"""Statuses whose text tells it: 503 is a query that timed out, or a server that has not started yet."""
_LIMIT: Final = re.compile("exceed|limit|too many|too large|too long|maximum|timed? ?out", re.IGNORECASE)
"""Words of a refusal by a limit."""
_TLS: Final = re.compile(r"\[SSL|certificate|tlsv1", re.IGNORECASE)
"""Words in the error of a connection that fails over certificates."""
_SECRET: Final = re.compile("auth|cookie|credential|key|passw|secret|token", re.IGNORECASE)
"""Names of headers that are credentials."""
_TITLE: Final = re.compile(r"\s*<.*?<title[^>]*>(.*?)</title>", re.IGNORECASE | re.DOTALL)
"""Title of a page, such as a gateway's error or a login, whose first lines say less."""
_LONGEST_PAUSE_S: Final = 120.0
"""Longest pause that a server may ask for by ``Retry-After``."""
_HEADER: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE: Final = re.compile(r"[\t\x20-\x7e]*")
_TOKEN: Final = re.compile(r"[\x21-\x7e]+")
"""Characters that HTTP can send. Others end in an error of the library, which repeats the value."""
_READ_IN: Final = 200
"""Characters of a server's own words that a message repeats."""
_ERROR_BYTES: Final = 1 << 16
"""Bytes read of an error's answer, of which a message shows the first line."""
_HIDDEN: Final = "[hidden]"
"""Replaces, in a message, credentials of ours that a server repeats."""
_SHORTEST_SECRET: Final = 4
"""Characters of a credential that is hidden: fewer are part of any word."""


class TooMuchError(Exception):
    """The server refuses as much as was asked for; half of it may do."""


class RefusedError(Exception):
    """The server does not know the request, or refuses it."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"HTTP {status}: {message}")
        self.status = status


@dataclass(frozen=True)
class Access:
    """Address of a Prometheus, and the credentials for it.

    Attributes
    ----------
    url : str
        Address, with its path before ``/api/v1``.
    header_file : Path or None
        Lines ``Name: value`` that go with each request, as a tenant's.
    token_file : Path or None
        Bearer token; read again when it is refused.
    ca, cert, key : Path or None
        CA certificates to check the server's by, and our own certificate with its key; PEM.
    timeout_s : float
        Silence after which a request counts as failed: Prometheus ends a query after two minutes itself.
    pause_s : float
        First pause before another try; doubled each time.
    """

    url: str
    header_file: Path | None = None
    token_file: Path | None = None
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    timeout_s: float = 150.0
    pause_s: float = 2.0

    def __post_init__(self) -> None:
        try:
            url = httpx.URL(self.url)
        except httpx.InvalidURL as error:
            raise ConfigError(f"--url: not a URL ({error})") from error
        if url.scheme not in ("http", "https") or not url.host:
            raise ConfigError("--url: expected http://… or https://…, as https://prometheus.example")
        if url.userinfo:
            raise ConfigError("--url: holds a password; put `Authorization: Basic …` into a file for --header-file")
        if url.query or url.fragment:
            raise ConfigError("--url: expected an address without ? and #; parameters go into --header-file as headers")
        if (self.cert is None) != (self.key is None):
            raise ConfigError("--cert and --key go together")
        certificates = {"--ca": self.ca, "--cert": self.cert, "--key": self.key}
        if url.scheme == "http" and any(certificates.values()):
            given = ", ".join(name for name, path in certificates.items() if path)
            raise ConfigError(f"{self.url}: {given} has no effect, plain HTTP has no certificates; use https://")
        if url.scheme == "http" and not is_loopback(url.host):
            secrets = ["--token-file"] if self.token_file else []
            secrets += [f"{name} of --header-file" for name in self.headers() if _SECRET.search(name)]
            if secrets:
                raise ConfigError(
                    f"{self.url}: {secrets[0]} would be sent in plain text; use https://, or a tunnel to this machine "
                    "(`kubectl port-forward`)"
                )

    def headers(self) -> dict[str, str]:
        """Return the headers of the file; ConfigError names a wrong line only by its number."""
        if self.header_file is None:
            return {}
        found = {}
        for number, line in enumerate(_read(self.header_file).splitlines(), 1):
            name, colon, value = line.partition(":")
            if not line.strip() or line.startswith("#"):
                continue
            if not colon or not _HEADER.fullmatch(name.strip()) or not _VALUE.fullmatch(value.strip()):
                raise ConfigError(f"{self.header_file} line {number}: expected `Name: value` in ASCII")
            found[name.strip()] = value.strip()
        return found

    def token(self) -> dict[str, str]:
        """Return the header of the token, as the file has it now; ConfigError does not repeat it."""
        if self.token_file is None:
            return {}
        token = _read(self.token_file).strip()
        if not _TOKEN.fullmatch(token):
            raise ConfigError(f"{self.token_file}: expected one token, a line of ASCII without spaces")
        return {"Authorization": f"Bearer {token}"}


def _secrets(headers: Mapping[str, str]) -> set[str]:
    """Return the credentials in headers in every form in which a server may repeat them: with, without the scheme."""
    found = set()
    for name, value in headers.items():
        if _SECRET.search(name):
            scheme, _, rest = value.partition(" ")
            found |= {value, rest.strip(), *(part.partition("=")[2].strip() for part in value.split(";"))}
            if scheme.lower() == "basic":
                try:
                    pair = base64.b64decode(rest.strip(), validate=True).decode()
                except ValueError:
                    continue
                found |= {pair, pair.partition(":")[2]}
    return {one for one in (*found, *map(quote, found), *map(quote_plus, found)) if len(one) >= _SHORTEST_SECRET}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({getattr(error, 'strerror', error)})") from error


class Client:
    """Queries one server; a context manager. Follows no redirection, so that nothing goes to another address."""

    def __init__(self, access: Access) -> None:
        self._access = access
        headers = access.headers()
        if access.token_file is not None and any(name.lower() == "authorization" for name in headers):
            raise ConfigError(f"--token-file and Authorization of {access.header_file}: only one can be sent; drop one")
        self._secrets = _secrets(headers)
        self.url = access.url.rstrip("/")
        self.content_type = ""
        self.bytes = 0
        self.requests = 0
        self._client = httpx.Client(
            timeout=httpx.Timeout(access.timeout_s, connect=min(CONNECT_S, access.timeout_s)),
            follow_redirects=False, verify=self._tls(), headers=headers,
            trust_env=not is_loopback(httpx.URL(access.url).host),  # else $HTTP_PROXY gets local requests
        )  # fmt: skip

    def _tls(self) -> ssl.SSLContext:
        access = self._access
        try:
            context = ssl.create_default_context(cafile=None if access.ca is None else str(access.ca))
            if access.cert is not None:
                context.load_cert_chain(str(access.cert), str(access.key))
        except (OSError, ssl.SSLError) as error:
            named = ", ".join(str(path) for path in (access.ca, access.cert, access.key) if path is not None)
            raise ConfigError(f"{named}: not certificates in PEM ({error.strerror or error})") from error
        return context

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def json(self, path: str, form: Mapping[str, str] | None = None) -> Any:
        """Return the ``data`` of an answer of Prometheus' API, to a form or a GET; a warning in it is a failure."""
        if form is None:
            with self.stream("GET", path) as parts:
                answer = whole(parts)
        else:
            answer = self.post(path, data=dict(form))
        try:
            found = json.loads(answer)
        except ValueError as error:
            raise RefusedError(200, f"answers no JSON ({self.said(answer.decode(errors='replace'))})") from error
        if not isinstance(found, dict) or found.get("status") != "success":
            raise RefusedError(200, "answers without success")
        if found.get("warnings") or found.get("isPartial"):  # the second is VictoriaMetrics'
            said = "; ".join(map(str, found.get("warnings") or ["isPartial"]))
            raise TraceError(
                f"{self.url}: answers only in part: {self.said(said)}; "
                "missing usage would make reservations too small, so nothing is taken"
            )
        return found.get("data")

    def post(self, path: str, **request: Any) -> bytes:
        """Return the body of an answer to a POST request, at most ``LARGEST_WHOLE``."""
        with self.stream("POST", path, **request) as parts:
            return whole(parts)

    def said(self, text: str) -> str:
        """Return a server's first line, or its page's title, shortened, without credentials of ours that it repeats."""
        if title := _TITLE.match(text):
            text = title[1]
        for secret in sorted(self._secrets, key=len, reverse=True):
            text = text.replace(secret, _HIDDEN)
        line = next((line.strip() for line in text.splitlines() if line.strip()), "")
        return line if len(line) <= _READ_IN else line[: _READ_IN - 1] + "…"

    @contextmanager
    def stream(self, method: str, path: str, **request: Any) -> Iterator[Iterator[bytes]]:
        """Yield the parts of an answer's body as they come, at most ``LARGEST_ANSWER``; ``content_type`` is known then.

        Raises
        ------
        TooMuchError
            The server refuses as much.
        RefusedError
            The server does not know the request.
        TraceError
            It could not be reached, or failed, ``TRIES`` times.
        """
        with self._answer(method, path, request) as response:
            self.content_type = response.headers.get("Content-Type", "")
            yield self._bounded(response)

    def _bounded(self, response: httpx.Response) -> Iterator[bytes]:
        total = 0
        try:
            for part in response.iter_bytes():
                total += len(part)
                if total > LARGEST_ANSWER:
                    raise TooMuchError(f"an answer of more than {LARGEST_ANSWER >> 20} MiB")
                yield part
        except httpx.RequestError as error:
            raise TooMuchError(f"the answer broke off ({self.said(str(error) or type(error).__name__)})") from error
        finally:
            self.bytes += total

    @contextmanager
    def _answer(self, method: str, path: str, request: dict[str, Any]) -> Iterator[httpx.Response]:
        headers = request.pop("headers", {})
        refreshed = False
        for left in range(TRIES - 1, -1, -1):
            self.requests += 1
            token = self._access.token()
            self._secrets |= _secrets(token)
            asked_s = 0.0
            try:
                with self._client.stream(method, self.url + path, headers=headers | token, **request) as response:
                    if response.status_code == httpx.codes.OK:
                        yield response
                        return
                    message, status = self._message(response, path), response.status_code
                    asked_s = _asked_s(response)
            except (httpx.ReadTimeout, httpx.WriteTimeout) as error:
                raise TooMuchError(f"no answer within {self._access.timeout_s:.0f} s") from error
            except httpx.RequestError as error:
                message, status = self.said(str(error) or type(error).__name__), 0
                if _TLS.search(message):
                    line = f"{self.url}: no TLS connection ({message}); check --ca, and --cert with --key"
                    raise ConfigError(line) from error
            if status in _TOO_MUCH or (status in _MAY_LIMIT and _LIMIT.search(message)):
                raise TooMuchError(f"HTTP {status}: {message}")
            if status in (401, 403):
                if status == 401 and self._access.token_file is not None and left and not refreshed:
                    refreshed = True  # something may have renewed the file
                    continue
                raise ConfigError(f"{self.url}: HTTP {status}: {message}; check --token-file and --header-file")
            if status and status not in _TRANSIENT:
                raise RefusedError(status, message)
            message = f"HTTP {status}: {message}" if status else message
            if not left:
                raise TraceError(f"{self.url}: {message}; given up after {TRIES} tries")
            pause_s = max(self._access.pause_s * 2 ** (TRIES - 1 - left), asked_s)
            log.warning("%s: %s; trying again in %.0f s", self.url, message, pause_s)
            time.sleep(pause_s)

    def _message(self, response: httpx.Response, path: str) -> str:
        """Return the message of an answer other than 200 to a request of ``path``, from its beginning."""
        if response.is_redirect:
            return self._redirection(response, path)
        body = bytearray()
        for part in response.iter_bytes():
            body += part
            if len(body) > _ERROR_BYTES:
                break
        text = body.decode(errors="replace")
        try:
            found = json.loads(text)
            text = str(found.get("error", "")) if isinstance(found, dict) else ""
        except ValueError:
            pass
        return self.said(text) or self.said(response.reason_phrase)

    def _redirection(self, response: httpx.Response, path: str) -> str:
        """Return the target of a redirected request of ``path``, and what to do: the same API elsewhere, or a login."""
        try:
            other = str(response.url.join(response.headers.get("Location", "")))
        except httpx.InvalidURL:
            other = "another address"
        address, of_api, _ = other.partition(path)
        if of_api and "?" not in address:
            return f"redirects to {self.said(address)}; pass that as --url"
        return (
            f"redirects to {self.said(other)}, which is not the API, but may be a login; pass --token-file or "
            "--header-file, or an address that asks for no login in a browser"
        )


def _asked_s(response: httpx.Response) -> float:
    """Return the seconds that a server asks to wait, 0 for none, at most ``_LONGEST_PAUSE_S``."""
    asked = response.headers.get("Retry-After", "")
    return min(float(asked), _LONGEST_PAUSE_S) if asked.isascii() and asked.isdigit() else 0.0


def whole(parts: Iterator[bytes]) -> bytes:
    """Return the parts of an answer as one; TooMuchError where it is larger than ``LARGEST_WHOLE``."""
    kept = bytearray()
    for part in parts:
        kept += part
        if len(kept) > LARGEST_WHOLE:
            raise TooMuchError(f"an answer of more than {LARGEST_WHOLE >> 20} MiB")
    return bytes(kept)
