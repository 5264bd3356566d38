"""Logs: one object a line whatever is logged, and no secret in any."""

from __future__ import annotations

import io
import json
import logging
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reclaim.serving.http.logs import JsonLines, Plain, set_up_logs, without_secrets

ACCESS = logging.getLogger("reclaim.access")


pytestmark = pytest.mark.usefixtures("loggers_as_before")


def _record(message: str, *args: Any, **extra: Any) -> logging.LogRecord:
    return logging.getLogger("reclaim.access").makeRecord(
        "reclaim.access", logging.INFO, "f.py", 1, message, args, None, extra=extra
    )


def _lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_is_one_object_with_its_extras() -> None:
    record = _record("%s %s", "GET", "/v1/model", request_id="a1", status=200, ms=1.25, bytes=17)
    record.created = 1.5
    assert json.loads(JsonLines().format(record)) == {
        "time": "1970-01-01T00:00:01.500Z", "level": "INFO", "logger": "reclaim.access", "message": "GET /v1/model",
        "request_id": "a1", "status": 200, "ms": 1.25, "bytes": 17,
    }  # fmt: skip


def test_what_json_lacks_is_written_as_text() -> None:
    line = json.loads(JsonLines().format(_record("m", ms=float("nan"), rate=float("inf"), path=b"x", none=None)))
    assert {k: v for k, v in line.items() if k in ("ms", "rate", "path", "none")} == {
        "ms": "nan", "rate": "inf", "path": "b'x'",
    }  # fmt: skip


def test_a_traceback_is_a_field_of_its_line() -> None:
    stream = io.StringIO()
    set_up_logs(True, stream)
    try:
        raise ValueError("bad\nthing")
    except ValueError:
        ACCESS.exception("failed")
    (line,) = _lines(stream)
    assert (line["level"], line["message"]) == ("ERROR", "failed")
    assert line["exception"].endswith("ValueError: bad\nthing")


@settings(deadline=None)
@given(
    st.text(), st.dictionaries(st.text(min_size=1), st.none() | st.floats() | st.integers() | st.text() | st.binary())
)
def test_whatever_is_logged_is_one_line_of_json(message: str, extra: dict[str, Any]) -> None:
    record = _record("%s", message)
    standard = set(vars(record)) | {"message", "asctime"}
    vars(record).update({k: v for k, v in extra.items() if k not in standard})
    line = JsonLines().format(record)
    assert line.isascii()  # what no stream refuses to write
    assert "\n" not in line
    assert json.loads(line)["level"] == "INFO"


@pytest.mark.parametrize("formatter", [JsonLines(), Plain()], ids=["json", "plain"])
def test_no_token_and_no_body_is_ever_written(formatter: logging.Formatter) -> None:
    extra: dict[str, Any] = {
        "headers": {"authorization": "Bearer s3cret"}, "Authorization": "Bearer s3cret", "token": "s3cret",
        "body": b"s3cret", "note": "sent bearer s3cret", "status": 401,
    }  # fmt: skip
    try:
        raise ValueError("Bearer s3cret")
    except ValueError:
        record = _record("refused Authorization: Bearer %s, and more", "s3cret", **extra)
        record.exc_info = sys.exc_info()
        line = formatter.format(record)
    assert "s3cret" not in line
    assert "and more" in line


def test_a_bearer_is_blotted_out_where_it_stands() -> None:
    assert without_secrets('{"a": "Bearer x.y-z==", "b": 1}') == '{"a": "Bearer …", "b": 1}'
    assert without_secrets("the bearer of news") == "the bearer … news"
    assert without_secrets("forbearer s") == "forbearer s"


def test_plain_lines_are_for_people() -> None:
    stream = io.StringIO()
    set_up_logs(False, stream)
    ACCESS.info("GET /v1/model 200", extra={"status": 200})
    time, level, name, message = stream.getvalue().strip().split(" ", 3)
    assert (level, name, message) == ("INFO", "reclaim.access:", "GET /v1/model 200")
    assert time.endswith("Z")


def test_others_are_heard_from_warnings_on_and_nothing_is_written_twice() -> None:
    for name in (None, "bentoml", "uvicorn.error"):
        logging.getLogger(name).addHandler(logging.StreamHandler(io.StringIO()))  # as BentoML does
    logging.getLogger("bentoml").propagate = False
    logging.getLogger().setLevel(logging.WARNING)
    first, second = io.StringIO(), io.StringIO()
    set_up_logs(False, first)
    set_up_logs(True, second)
    for name in ("reclaim.serving.models.keeper", "uvicorn.error", "bentoml", "other"):
        logging.getLogger(name).warning("w")
        if name not in ("bentoml", "uvicorn.error"):
            logging.getLogger(name).info("i")
    assert first.getvalue() == ""
    assert [(line["logger"], line["message"]) for line in _lines(second)] == [
        ("reclaim.serving.models.keeper", "w"), ("reclaim.serving.models.keeper", "i"), ("uvicorn.error", "w"),
        ("bentoml", "w"),
        ("other", "w"),
    ]  # fmt: skip
