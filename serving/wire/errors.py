"""Turns problems of a request into the common shape of errors, with a line that names field and row."""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from reclaim.serving.wire import cell_schemas, machine_schemas, schemas
from reclaim.serving.wire.schemas import ROW, ErrorBody, ErrorResponse, ReservationRequest

BAD_REQUEST, UNAUTHORIZED, FORBIDDEN, NOT_FOUND, METHOD_NOT_ALLOWED, TIMEOUT = 400, 401, 403, 404, 405, 408
TOO_LARGE, UNKNOWN_TYPE, INVALID, BUSY, INTERNAL, UNAVAILABLE, DISK_FULL = 413, 415, 422, 429, 500, 503, 507
RETRY_S: Final = 1
"""Time in seconds after which a request that met a full or a starting service may be sent again; most take
milliseconds."""

_SHOWN_CHARACTERS: Final = 60
"""Characters of a caller's own text that an error repeats."""
_SHOWN_BITS: Final = 128
"""Whole numbers of more bits than this are not written out; Python refuses the longest."""
_EXTRA: Final = "extra_forbidden"
_SILENT: Final = ("missing", _EXTRA)
"""Problems of a field's name, not of its value."""

_UNKNOWN_FIELD, _INVALID_FIELD = "unknown_field", "invalid_field"

_PHRASES: Final = {
    "missing": "required, but absent",
    "finite_number": "must be a finite number",
    "float_type": "must be a number",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "int_parsing_size": "must fit in 64 bits",
    "bool_type": "must be true or false",
    "string_type": "must be text",
    "list_type": "must be a list",
    "model_type": "must be an object",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
    "literal_error": "must be one of {expected}",
    "string_too_short": "must have at least {min_length} character",
    "string_too_long": "must have at most {max_length} characters",
    "too_short": "must have at least {min_length} items, got {actual_length}",
    "too_long": "must have at most {max_length} items",
}
"""Messages in place of those of pydantic that name its own terms; all others stay."""


_Model = TypeVar("_Model", bound=BaseModel)


class ClientLeftError(Exception):
    """The client left before its answer was made."""


class RequestError(Exception):
    """A request that is refused.

    Parameters
    ----------
    status : int
        HTTP status.
    code : str
        A fixed code for programs.
    message : str
        One line for people.
    field : str or None
        Path of the field.
    row, task, window : int or None
        Rows, from 0: of a table or a list of windows; of a list of tasks; of a task's history.
    retry_after_s : int or None
        When to try again, in seconds; sent as ``Retry-After``.
    """

    def __init__(
        self, status: int, code: str, message: str, *,
        field: str | None = None, row: int | None = None, task: int | None = None, window: int | None = None,
        retry_after_s: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s
        self.body = ErrorResponse(
            error=ErrorBody(code=code, message=message, field=field, row=row, task=task, window=window)
        )


def parse_request(body: bytes) -> ReservationRequest:
    """Return the request in a JSON body; RequestError where the body is invalid."""
    return parse_body(body, ReservationRequest)


def parse_body(body: bytes, model: type[_Model]) -> _Model:
    """Return the model in a JSON body.

    Raises
    ------
    RequestError
        The body is not JSON, or not a ``model``.
    """
    content = parse_json(body)
    try:
        return model.model_validate(content)
    except ValidationError as error:
        raise error_from_validation(error) from error


def parse_json(body: bytes) -> Any:
    """Return the JSON value of a body; RequestError where it is not JSON, or a field comes twice or among too many."""
    try:
        content = from_json(body)
    except ValueError as error:
        reason = _short(str(error))
        raise RequestError(BAD_REQUEST, "malformed_json", f"the body is not valid JSON: {reason}") from error
    if body.count(b":") != _colons(content) or b"\\u" in body:  # one per field; no parser reports a repeated one
        _refuse_twins(body)
    return content


def _colons(value: Any) -> int:
    """Return the colons that a value takes as JSON without escapes: one a field, and those within texts.

    An object of more fields than there are names is refused: pydantic would describe each of a million.
    """
    found, parts = 0, value
    if type(value) is dict:
        found, parts = len(value), value.values()
        if found > len(_FIELDS):
            first = _short(next(iter(value)))
            raise RequestError(INVALID, "unknown_field", f"an object of {found} fields, starting with {first!r}")
    elif type(value) is not list:
        return value.count(":") if type(value) is str else 0
    for part in parts:
        kind = type(part)
        if kind is str:
            found += part.count(":")
        elif kind is dict or kind is list:
            found += _colons(part)
    return found


def _refuse_twins(body: bytes) -> None:
    """Refuse a body with an object that has a field twice: a parser would take either."""

    def of(pairs: list[tuple[str, Any]]) -> None:
        seen = set[str]()
        for name, _ in pairs:
            if name in seen:
                raise RequestError(
                    BAD_REQUEST, "duplicate_field", f"the field {_short(name)!r} comes twice in one object",
                    field=_short(name),
                )  # fmt: skip
            seen.add(name)

    json.loads(body, object_pairs_hook=of, parse_int=len, parse_float=len)


def error_from_validation(error: ValidationError) -> RequestError:
    """Return the refusal for the first problem that pydantic found."""
    first = error.errors(include_url=False)[0]
    kind, loc, context = str(first["type"]), first["loc"], first.get("ctx", {})
    if ROW in context:  # a rule over a whole list says which row broke it
        loc = (*loc, context[ROW])
    field = _path(loc)
    if kind == _EXTRA:
        code, problem = _UNKNOWN_FIELD, "no such field" + _nearest(str(loc[-1]))
    else:
        code, problem = _INVALID_FIELD, _PHRASES[kind].format(**context) if kind in _PHRASES else first["msg"]
    given = "" if kind in _SILENT else _given(first.get("input"))
    return RequestError(
        INVALID, code, f"{field or 'the body'}: {problem}{given}",
        field=field, task=_row(loc, "tasks"), window=_row(loc, "windows"),
    )  # fmt: skip


def code_of(error: ValidationError) -> str:
    """Return the code of that refusal without its message, which takes most of the time."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    return _UNKNOWN_FIELD if first["type"] == _EXTRA else _INVALID_FIELD


def _nearest(name: str) -> str:
    near = difflib.get_close_matches(name[:_SHOWN_CHARACTERS], _FIELDS, 1)
    return f"; did you mean {near[0]!r}?" if near and near[0] != name else ""


def _given(value: Any) -> str:
    """Return ``, got …`` for a single value as JSON; nothing for a list or an object."""
    if isinstance(value, int) and value.bit_length() > _SHOWN_BITS:
        return f", got a number of {value.bit_length()} bits"
    if value is None or isinstance(value, str | int | float):
        return f", got {_short(json.dumps(value))}"
    return ""


def _path(loc: Sequence[int | str]) -> str | None:
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            path += ("." if path else "") + _short(part)
    return path or None


def _row(loc: Sequence[int | str], name: str) -> int | None:
    for part, after in pairwise(loc):
        if part == name and isinstance(after, int):
            return after
    return None


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN_CHARACTERS else line[: _SHOWN_CHARACTERS - 1] + "…"


_MODELS: Final[tuple[type[BaseModel], ...]] = (
    cell_schemas.UsageWindow,
    cell_schemas.UsageRequest,
    cell_schemas.TaskFacts,
    cell_schemas.TasksRequest,
    cell_schemas.CellQuery,
    machine_schemas.FitRequest,
    machine_schemas.Candidate,
    machine_schemas.MachineCapacity,
    schemas.ReservationRequest,
    schemas.Task,
    schemas.Window,
    schemas.CellFacts,
    schemas.LargestMachine,
    schemas.ResourceLimit,
    schemas.Units,
)
_FIELDS: Final = sorted({name for model in _MODELS for name in model.model_fields})
