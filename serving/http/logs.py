"""Formats the service's log: lines for people or one JSON object a line, never with a token in either."""

from __future__ import annotations

import json
import logging
import math
import re
import sys
from datetime import UTC, datetime
from typing import Any, Final, TextIO

LOGGER: Final = "reclaim"
"""The parent of all loggers of this package."""
_OTHERS: Final = ("bentoml", "uvicorn", "uvicorn.error", "circus")
"""Loggers to which BentoML adds handlers of its own."""

_HIDDEN: Final = frozenset(vars(logging.makeLogRecord({}))) | {
    "message", "asctime", "time", "level", "logger", "exception",
    "levelname_bracketed", "component", "trace_msg", "service_name",  # BentoML adds them to records for its own format
    "_ray_timestamp_ns",  # and Ray this one, once it is imported
}  # fmt: skip
"""Attributes of a record that are not its extras, or would replace a field of the line."""
_SECRET: Final = frozenset({"authorization", "token", "password", "cookie", "headers", "body", "content"})
"""Extras that are never written."""
_BEARER: Final = re.compile(r"(?i)\b(bearer)\s+[^\s\"',;]+")


class _Utc(logging.Formatter):
    """Writes times in UTC, as ISO 8601 with milliseconds."""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: ARG002 - its name
        """Return the time in UTC."""
        return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class JsonLines(_Utc):
    """A record as one JSON object: ``time`` (ISO 8601, UTC), ``level``, ``logger``, ``message``, and its extras."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line, without the end of line."""
        line: dict[str, Any] = {
            "time": self.formatTime(record), "level": record.levelname, "logger": record.name,
            "message": without_secrets(record.getMessage()),
        }  # fmt: skip
        for name, value in vars(record).items():
            if value is not None and name not in _HIDDEN and name.lower() not in _SECRET:
                line[name] = _plain(value)
        if record.exc_info:
            line["exception"] = without_secrets(self.formatException(record.exc_info))
        return json.dumps(line, allow_nan=False)


class Plain(_Utc):
    """A record as a line for people: time in UTC, level, logger, message."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, followed by the traceback where there is one."""
        return without_secrets(super().format(record))


def set_up_logs(as_json: bool, stream: TextIO | None = None) -> None:
    """Send this package's log from INFO on, and the warnings of all other packages, to one stream.

    Handlers of BentoML are removed: they would write the same records again in another form. A second call replaces
    the form and the stream.

    Parameters
    ----------
    as_json : bool
        ``settings.log_json``.
    stream : text file or None
        None: standard output, where BentoML writes.
    """
    root = logging.getLogger()
    for name in (None, *_OTHERS):
        logger = logging.getLogger(name)
        for handler in [h for h in logger.handlers if type(h) is logging.StreamHandler]:  # not those of a test runner
            logger.removeHandler(handler)
        logger.propagate = True
    handler = logging.StreamHandler(sys.stdout if stream is None else stream)
    handler.setFormatter(JsonLines() if as_json else Plain())
    root.addHandler(handler)
    logging.getLogger(LOGGER).setLevel(logging.INFO)


def without_secrets(text: str) -> str:
    """Return the text with the word that follows ``Bearer`` replaced."""
    return _BEARER.sub(r"\1 …", text)


def _plain(value: Any) -> str | int | float:
    """Return a value that JSON can hold; any other as text."""
    if isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return without_secrets(str(value))
