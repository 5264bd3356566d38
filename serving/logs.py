"""The service's log: one JSON object a line where asked for, never with a token in it."""

from __future__ import annotations

import json
import logging
import math
import re
import sys
from datetime import UTC, datetime
from typing import Any, Final, TextIO

LOGGER: Final = "reclaim"
"""Above all loggers of this package."""
_OTHERS: Final = ("bentoml", "uvicorn", "uvicorn.error", "circus")
"""Loggers to which BentoML gives handlers of their own."""

_HIDDEN: Final = frozenset(vars(logging.makeLogRecord({}))) | {
    "message", "asctime", "time", "level", "logger", "exception",  # the line's own
    "levelname_bracketed", "component", "trace_msg", "service_name",  # what BentoML adds to a record for its format
}  # fmt: skip
"""What is no extra of a record, or would hide what is said of it."""
_SECRET: Final = frozenset({"authorization", "token", "password", "cookie", "headers", "body", "content"})
"""Extras that are never written, whoever gives them."""
_BEARER: Final = re.compile(r"(?i)\b(bearer)\s+[^\s\"',;]+")


class JsonLines(logging.Formatter):
    """A record as one JSON object: ``time`` (ISO 8601, UTC), ``level``, ``logger``, ``message``, and its extras."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line, without the end of line."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {
            "time": time.replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "message": without_secrets(record.getMessage()),
        }
        for name, value in vars(record).items():
            if value is not None and name not in _HIDDEN and name.lower() not in _SECRET:
                line[name] = _plain(value)
        if record.exc_info:
            line["exception"] = without_secrets(self.formatException(record.exc_info))
        return json.dumps(line, allow_nan=False)


class Plain(logging.Formatter):
    """A record as a line for people: time in UTC, level, logger, message."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: ARG002 - its name
        """Return the time in UTC."""
        return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, and the traceback's where there is one."""
        return without_secrets(super().format(record))


def set_up_logs(as_json: bool, stream: TextIO | None = None) -> None:
    """Let this process write one log, to one stream: that of this package from INFO on, and all others' warnings.

    BentoML's handlers are taken away, for they would write all of it again, in another form. Calling it again changes
    the form.

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
        for handler in [h for h in logger.handlers if type(h) is logging.StreamHandler]:  # none of a test's
            logger.removeHandler(handler)
        logger.propagate = True
    handler = logging.StreamHandler(sys.stdout if stream is None else stream)
    handler.setFormatter(JsonLines() if as_json else Plain())
    root.addHandler(handler)
    logging.getLogger(LOGGER).setLevel(logging.INFO)


def without_secrets(text: str) -> str:
    """Return the text with whatever stands behind the word Bearer blotted out."""
    return _BEARER.sub(r"\1 …", text)


def _plain(value: Any) -> str | int | float | None:
    """Return a value as JSON has it; what it has not, as text."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    return without_secrets(str(value))
