"""Reads the body of a write, JSON or Arrow, into arrays: good rows are kept, and every bad one is named."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field, ValidationError

from reclaim.data import schema as s
from reclaim.data import windows as w
from reclaim.data.core.arrays import is_first
from reclaim.data.windows import Windows, identities
from reclaim.serving.wire import arrow
from reclaim.serving.wire.arrow import Columns, Kind
from reclaim.serving.wire.cell_schemas import (
    FAILED_WITHOUT_END,
    MOST_ERRORS,
    OOM_WITHOUT_FAILURE,
    CollectionFacts,
    TaskFacts,
    TasksRequest,
    UsageRequest,
    UsageWindow,
)
from reclaim.serving.wire.errors import INVALID, TOO_LARGE, RequestError, code_of, error_from_validation, parse_json
from reclaim.serving.wire.schemas import (
    LONGEST_WINDOW_US,
    MAX_AMOUNT,
    MAX_OWNER,
    MEAN_ABOVE,
    MIN_LIMIT,
    ErrorBody,
    Units,
    Wire,
)

USER: Final = "user"
LOGICAL_NAME: Final = "logical_name"
IN_ALLOC: Final = "in_alloc"
SINCE_US: Final = "since_us"
ENDED_US: Final = "ended_us"
FAILED: Final = "failed"
FAILED_US: Final = "failed_us"
FAILED_OOM: Final = "failed_oom"
ESTIMATION: Final = "estimation"

_LIMITS: Final = (s.CPU_LIMIT, s.MEMORY_LIMIT)
_FACTS: Final[dict[str, Kind]] = {
    s.COLLECTION_ID: "whole", s.INSTANCE_INDEX: "whole", s.MACHINE_ID: "whole", s.TIER: "tier",
    s.SCHEDULING_CLASS: "whole", IN_ALLOC: "flag", USER: "word", LOGICAL_NAME: "word", s.SCHEDULED_US: "whole",
    **dict.fromkeys(_LIMITS, "number"),
}  # fmt: skip
USAGE_COLUMNS: Final[dict[str, Kind]] = {
    **_FACTS, s.START_US: "whole", s.END_US: "whole", **dict.fromkeys(w.CHANNELS, "number"),
    **dict.fromkeys(w.VECTORS, "vector"),
}  # fmt: skip
"""Columns of usage as an Arrow table, one row per window."""
TASK_COLUMNS: Final[dict[str, Kind]] = {
    **_FACTS, SINCE_US: "whole", ENDED_US: "whole", FAILED: "flag", FAILED_US: "whole", s.OUT_OF_MEMORY: "flag",
    ESTIMATION: "flag",
}  # fmt: skip
"""Columns of facts about tasks as an Arrow table, one row per task."""
_OF_FACTS: Final = (FAILED_US, FAILED_OOM)
"""Columns of ``Windows`` that a cell fills in from earlier facts."""
_MIX: Final = np.int64(-7046029254386353131)
"""Odd, with well-mixed bits: 2^64 over the golden ratio."""
_LENGTHS: Final = {name: len(levels) for name, levels in w.VECTORS.items()}
_MOST: Final = {s.TIER: len(s.TIERS) - 1, s.SCHEDULING_CLASS: 3, s.START_US: s.LATEST_US, s.END_US: s.LATEST_US,
                s.SCHEDULED_US: s.LATEST_US, SINCE_US: s.LATEST_US, ENDED_US: s.LATEST_US,
                FAILED_US: s.LATEST_US}  # fmt: skip


_MEANS: Final = tuple((f"{resource}_mean", f"{resource}_max") for resource in s.RESOURCES)
_MOST_BAD: Final = 10_000
"""Bad rows of a JSON list that are counted, some 50 µs each; a body with more of them is refused whole."""


class _UsageShell(Wire):
    windows: list[Any] = Field(min_length=1)
    units: Units | None = None


class _TasksShell(Wire):
    tasks: list[Any] = Field(default_factory=list)
    collections: list[Any] = Field(default_factory=list)


@dataclass
class Refusals:
    """Refused rows: all are counted, and the first ``MOST_ERRORS`` by row described."""

    counts: dict[str, int] = field(default_factory=dict)
    errors: list[ErrorBody] = field(default_factory=list)

    def add(self, code: str, rows: Sequence[int] | NDArray[np.int64], message: str, name: str | None = None) -> None:
        """Refuse rows, in any order, for one reason."""
        self.count(code, len(rows))
        self._describe(
            ErrorBody(code=code, message=f"row {row}: {message}", field=name, row=row, task=None, window=None)
            for row in np.sort(rows)[:MOST_ERRORS].tolist()
        )

    def add_one(self, row: int, body: ErrorBody) -> None:
        """Refuse a row for a reason of its own."""
        self.count(body.code, 1)
        self._describe([body.model_copy(update={"row": row})])

    def count(self, code: str, n: int) -> None:
        """Refuse ``n`` rows that come after ``MOST_ERRORS`` others, which are described."""
        if n:
            self.counts[code] = self.counts.get(code, 0) + n

    def _describe(self, errors: Iterable[ErrorBody]) -> None:
        self.errors = sorted([*self.errors, *errors], key=lambda e: -1 if e.row is None else e.row)[:MOST_ERRORS]


@dataclass(frozen=True)
class UsageRows:
    """The good windows of a write.

    Attributes
    ----------
    windows : Windows
        ``n`` rows; absent values are -1 or NaN, the limit included.
    in_alloc : int8, shape (n,)
        0, 1, or -1 where absent.
    row : int64, shape (n,)
        Row of the body.
    rows : int
        Rows of the body.
    refusals : Refusals
        Refusals of the other rows.
    """

    windows: Windows
    in_alloc: NDArray[np.int8]
    row: NDArray[np.int64]
    rows: int
    refusals: Refusals


@dataclass(frozen=True)
class FactRows:
    """The good facts of a write, about tasks and collections.

    Attributes
    ----------
    columns : dict of arrays, shape (n,)
        All of ``TASK_COLUMNS``; absent values are -1 or NaN.
    row : int64, shape (n,)
    estimation : dict of collection to bool
    rows : int
        Rows of the body, collections included.
    refusals : Refusals
    """

    columns: Columns
    row: NDArray[np.int64]
    estimation: dict[int, bool]
    rows: int
    refusals: Refusals

    def keep(self, good: NDArray[np.bool_]) -> FactRows:
        """Return the facts of the chosen tasks, and those of all collections."""
        columns = {name: values[good] for name, values in self.columns.items()}
        return FactRows(columns, self.row[good], self.estimation, self.rows, self.refusals)

    @property
    def key(self) -> NDArray[np.int64]:
        """Collection and instance index; shape (n, 2)."""
        return np.column_stack([self.columns[s.COLLECTION_ID], self.columns[s.INSTANCE_INDEX]])

    @property
    def limit(self) -> NDArray[np.float64]:
        """Current limit, NaN where absent; shape (n, n_resources)."""
        return np.column_stack([self.columns[name] for name in _LIMITS])


def usage_from_json(body: bytes, units: Units, max_rows: int) -> UsageRows:
    """Return the windows of a JSON body; RequestError where it is invalid or in other units."""
    rows, n, refusals, request = _parsed(body, UsageRequest, _UsageShell, {"windows": UsageWindow}, max_rows)
    if request.units is not None and request.units != units:
        raise RequestError(
            INVALID, "other_units",
            f"units: this cell's amounts are in {units.cpu} and {units.memory}, "
            f"got {request.units.cpu} and {request.units.memory}",
            field="units",
        )  # fmt: skip
    items, row = rows["windows"]
    columns = _columns(USAGE_COLUMNS, items)
    return _without_contradictions(UsageRows(*_windows(columns | vectors_of(items)), row, n, refusals))


def vectors_of(windows: Sequence[Any]) -> Columns:
    """Return the percentile vectors of validated windows, NaN where missing; shape (n, n_levels) each."""
    columns: Columns = {}
    for name, levels in w.VECTORS.items():
        unknown = [np.nan] * len(levels)
        values = np.array([unknown if v is None else v for v in map(attrgetter(name), windows)], np.float32)
        columns[name] = values.reshape(len(windows), len(levels))
    return columns


def usage_from_arrow(body: bytes, max_rows: int) -> UsageRows:
    """Return the windows of an Arrow stream of ``USAGE_COLUMNS``; RequestError where it is invalid."""
    table = arrow.read_table(body, USAGE_COLUMNS, (s.COLLECTION_ID, s.START_US, s.END_US), max_rows)
    columns = _complete(arrow.columns_of(table, USAGE_COLUMNS, _LENGTHS), USAGE_COLUMNS, table.num_rows)
    refusals, good = Refusals(), np.ones(table.num_rows, np.bool_)
    _check_ranges(columns, (s.COLLECTION_ID, s.START_US, s.END_US), good, refusals)
    empty = np.asarray(columns[s.END_US] <= columns[s.START_US], np.bool_)
    _refuse(empty, "invalid_field", "a window must end after it starts", s.END_US, good, refusals)
    long = np.asarray(columns[s.END_US] - columns[s.START_US] > LONGEST_WINDOW_US, np.bool_)
    message = "a window must not be longer than a day, and its times are µs"
    _refuse(long, "invalid_field", message, s.END_US, good, refusals)
    for mean, most in _MEANS:
        with np.errstate(invalid="ignore"):
            above = np.logical_and(columns[mean] > columns[most] * MEAN_ABOVE, columns[most] > 0.0)
        _refuse(above, "invalid_field", f"{mean}: must not be above {most}", mean, good, refusals)
    for name in w.VECTORS.keys() & columns.keys():
        values = columns[name]
        with np.errstate(invalid="ignore"):
            fit = (values >= 0) & (values <= MAX_AMOUNT) | np.isnan(values)
            wrong = np.logical_or(~fit.all(axis=1), (np.diff(values, axis=1) < 0).any(axis=1))
        message = f"{name}: expected {_LENGTHS[name]} numbers of at least 0, none below the one before"
        _refuse(wrong, "invalid_field", message, name, good, refusals)
    row = np.flatnonzero(good)
    if len(row) < len(good):
        columns = {name: values[row] for name, values in columns.items()}
    return _without_contradictions(UsageRows(*_windows(columns), row, table.num_rows, refusals))


def facts_from_json(body: bytes, max_rows: int) -> FactRows:
    """Return the facts of a JSON body; RequestError where it is invalid."""
    lists: dict[str, type[BaseModel]] = {"tasks": TaskFacts, "collections": CollectionFacts}
    rows, n, refusals, _ = _parsed(body, TasksRequest, _TasksShell, lists, max_rows)
    (items, row), (collections, _) = rows["tasks"], rows["collections"]
    columns = _columns({n: k for n, k in TASK_COLUMNS.items() if n != ESTIMATION}, items)
    estimation = {c.collection_id: c.estimation for c in collections}
    return _without_facts_after_an_end(FactRows(columns, row, estimation, n, refusals))


def facts_from_arrow(body: bytes, max_rows: int) -> FactRows:
    """Return the facts of an Arrow stream of ``TASK_COLUMNS``; RequestError where it is invalid."""
    table = arrow.read_table(body, TASK_COLUMNS, (s.COLLECTION_ID,), max_rows)
    columns = _complete(arrow.columns_of(table, TASK_COLUMNS, {}), TASK_COLUMNS, table.num_rows)
    refusals, good = Refusals(), np.ones(table.num_rows, np.bool_)
    _check_ranges(columns, (s.COLLECTION_ID,), good, refusals)
    no_end = (columns[FAILED] > 0) & (columns[ENDED_US] < 0)
    _refuse(no_end, "invalid_field", FAILED_WITHOUT_END, FAILED, good, refusals)
    said, no_failure = columns[s.OUT_OF_MEMORY], (columns[FAILED] <= 0) & (columns[FAILED_US] < 0)
    of_none = (said >= 0) & no_failure & ((said > 0) | (columns[ENDED_US] < 0))
    _refuse(of_none, "invalid_field", OOM_WITHOUT_FAILURE, s.OUT_OF_MEMORY, good, refusals)
    row = np.flatnonzero(good)
    columns = {name: values[row] for name, values in columns.items()}
    wanted = columns.pop(ESTIMATION)
    given = np.flatnonzero(wanted >= 0)
    estimation = dict(zip(columns[s.COLLECTION_ID][given].tolist(), (wanted[given] > 0).tolist(), strict=True))
    facts = [
        ~np.isnan(values) if np.issubdtype(values.dtype, np.floating) else values >= 0
        for name, values in columns.items()
        if name not in (s.COLLECTION_ID, s.INSTANCE_INDEX)
    ]
    of_task = (wanted < 0) | np.any(facts, axis=0)  # the other facts are about collections only
    columns, row = {name: values[of_task] for name, values in columns.items()}, row[of_task]
    return _without_facts_after_an_end(FactRows(columns, row, estimation, table.num_rows, refusals))


def _without_facts_after_an_end(facts: FactRows) -> FactRows:
    """Refuse facts of a task later than its end in the same body: all count at once, and the end would remove them."""
    ends = facts.columns[ENDED_US] >= 0
    if not ends.any():
        return facts
    _, task = np.unique(facts.key, axis=0, return_inverse=True)
    task = task.reshape(-1)
    first_end = np.full(len(ends), len(ends))
    np.minimum.at(first_end, task[ends], np.flatnonzero(ends))
    behind = ~ends & (np.arange(len(ends)) > first_end[task])
    if not behind.any():
        return facts
    message = "facts after the end of their task; send those of its next run in another call"
    facts.refusals.add("contradiction", facts.row[behind], message, ENDED_US)
    return facts.keep(~behind)


def _parsed(
    body: bytes, model: type[BaseModel], shell: type[BaseModel], lists: Mapping[str, type[BaseModel]], max_rows: int
) -> tuple[dict[str, tuple[list[Any], NDArray[np.int64]]], int, Refusals, Any]:  # fmt: skip
    """Return the good rows of each list of the body with their positions, the number of rows, and the refusals.

    The body itself comes last: a ``model`` where every row is good, else a ``shell``.
    """
    content = parse_json(body)
    for name in lists:
        if isinstance(content, dict) and isinstance(items := content.get(name), list) and len(items) > max_rows:
            message = f"{name}: at most {max_rows} items, got {len(items)}; send them in parts"
            raise RequestError(TOO_LARGE, "too_many_rows", message, field=name)
    refusals = Refusals()
    try:
        request = model.model_validate(content)
        rows = {name: (getattr(request, name), np.arange(len(getattr(request, name)))) for name in lists}
    except ValidationError:
        try:
            request = shell.model_validate(content)
        except ValidationError as error:
            raise error_from_validation(error) from error
        rows = {name: _good_rows(getattr(request, name), of, name, refusals) for name, of in lists.items()}
    return rows, sum(len(getattr(request, name)) for name in lists), refusals, request


def _good_rows(
    content: list[Any], of: type[BaseModel], name: str, refusals: Refusals
) -> tuple[list[Any], NDArray[np.int64]]:
    good, row = [], []
    for number, item in enumerate(content):
        try:
            good.append(of.model_validate(item))
            row.append(number)
        except ValidationError as error:
            bad = number + 1 - len(good)
            if bad > _MOST_BAD:
                message = f"{name}: more than {_MOST_BAD} rows are bad, so none is taken; the first: "
                raise RequestError(INVALID, "too_many_bad_rows", message + refusals.errors[0].message) from error
            if bad > MOST_ERRORS:
                refusals.count(code_of(error), 1)
                continue
            body = error_from_validation(error).body.error
            path = f"{name}[{number}]" + (f".{body.field}" if body.field else "")
            message = body.message.removeprefix(body.field or "the body")
            refusals.add_one(number, body.model_copy(update={"field": path, "message": path + message}))
    return good, np.array(row, np.int64)


def _columns(kinds: dict[str, Kind], items: Sequence[Any]) -> Columns:
    """Return the columns of validated rows, without vectors."""
    columns: Columns = {}
    for name, kind in kinds.items():
        if name in _LIMITS:
            resource = s.RESOURCES[_LIMITS.index(name)]
            values = [np.nan if t.limit is None else getattr(t.limit, resource) for t in items]
            columns[name] = np.array(values, np.float64)
        elif kind == "number":
            columns[name] = np.array([getattr(t, name) for t in items], np.float64)
        elif kind == "word":
            columns[name] = identities(getattr(t, name) for t in items)
        elif kind != "vector":
            code: Callable[[Any], int] = s.TIERS.index if kind == "tier" else int
            values = [s.UNKNOWN_ID if (v := getattr(t, name)) is None else code(v) for t in items]
            columns[name] = np.array(values, np.int64)
    return columns


def _complete(columns: Columns, kinds: dict[str, Kind], n: int) -> Columns:
    """Add absent columns, except vectors."""
    for name, kind in kinds.items():
        if name in columns or kind == "vector":
            continue
        if kind == "number":
            columns[name] = np.full(n, np.nan)
        else:
            columns[name] = np.full(n, 0 if name == s.INSTANCE_INDEX else s.UNKNOWN_ID, np.int64)
    return columns


def _check_ranges(columns: Columns, required: tuple[str, ...], good: NDArray[np.bool_], refusals: Refusals) -> None:
    """Refuse rows with a number out of range, or without a required one."""
    for name, values in columns.items():
        if values.ndim > 1:
            continue
        least: float
        if np.issubdtype(values.dtype, np.floating):
            least = MIN_LIMIT if name in _LIMITS else 0.0
            with np.errstate(invalid="ignore"):
                wrong = (values < least) | (values > MAX_AMOUNT)
            message = f"{name}: must be at least {least:g} and at most {MAX_AMOUNT:g}"
        else:
            least, most = (0 if name in (*required, s.INSTANCE_INDEX) else s.UNKNOWN_ID), _MOST.get(name)
            wrong = values < least if most is None else (values < least) | (values > most)
            message = f"{name}: must be a whole number from 0 to {2**63 - 1 if most is None else most}"
            if name in (USER, LOGICAL_NAME):
                message = f"{name}: must have 1 to {MAX_OWNER} characters"
            if name == s.TIER:
                message = f"{name}: must be one of {', '.join(s.TIERS)}"
        _refuse(wrong, "invalid_field", message, name, good, refusals)
    unlimited = {name: np.isnan(columns[name]) for name in _LIMITS}
    message = "a limit must be given for every resource; for one that is not measured any amount will do"
    for name, none in unlimited.items():
        half = none & ~np.logical_and.reduce(list(unlimited.values()))
        _refuse(half, "invalid_field", message, name, good, refusals)


def _refuse(
    wrong: NDArray[np.bool_], code: str, message: str, name: str, good: NDArray[np.bool_], refusals: Refusals
) -> None:
    wrong = wrong & good
    if wrong.any():
        refusals.add(code, np.flatnonzero(wrong), message, name)
        good &= ~wrong


def _without_contradictions(usage: UsageRows) -> UsageRows:
    """Refuse windows that differ from an earlier one of the body of the same task and end; equal ones are repeats."""
    windows = usage.windows
    if len(windows) < 2:
        return usage
    name = (windows.collection_id, windows.instance_index, windows.end_us)
    mixed = ((name[0] * _MIX + name[1]) * _MIX + name[2]) * _MIX  # wraps round
    bits = len(windows).bit_length() + 2  # few share a bin: takes a third of the time of sorting all
    bins = (mixed.view(np.uint64) >> np.uint64(64 - bits)).view(np.int64)
    shared = np.sort(mixed[np.bincount(bins, minlength=1 << bits)[bins] > 1])
    if (shared[1:] != shared[:-1]).all():
        return usage
    order = np.lexsort((np.arange(len(windows)), *name))
    first = np.empty(len(windows), np.int64)  # the row of the earliest window of that name
    begins = is_first(*(column[order] for column in name))
    first[order] = order[np.maximum.accumulate(np.where(begins, np.arange(len(order)), 0))]
    wrong = np.zeros(len(windows), np.bool_)
    for column in (*(getattr(windows, of) for of in w.COLUMNS if of != IN_ALLOC), usage.in_alloc):
        before = column[first]
        differs = (column >= 0) & (before >= 0) & (column != before)  # neither is unknown
        wrong |= differs.reshape(len(windows), -1).any(axis=1)
    if not wrong.any():
        return usage
    message = "contradicts an earlier window of the request, of the same task and the same end"
    usage.refusals.add("contradiction", usage.row[wrong], message, s.END_US)
    return replace(usage, windows=windows.take(~wrong), in_alloc=usage.in_alloc[~wrong], row=usage.row[~wrong])


def _windows(columns: Columns) -> tuple[Windows, NDArray[np.int8]]:
    n = len(columns[s.START_US])
    percentiles = np.full((n, len(w.LEVELS)), np.nan, np.float32)
    for name in w.VECTORS.keys() & columns.keys():
        percentiles[:, w.VECTORS[name]] = columns[name]
    in_alloc = columns[IN_ALLOC].astype(np.int8)
    usage = np.column_stack([columns[name] for name in w.CHANNELS])
    w.drop_zero_maxima(usage)
    made: dict[str, NDArray[Any]] = {
        "usage": usage,
        "percentiles": percentiles,
        "limit": np.column_stack([columns[name] for name in _LIMITS]),
        "name": columns[LOGICAL_NAME],
        "in_alloc": in_alloc > 0,
    }
    for name, column in w.COLUMNS.items():
        if name in _OF_FACTS:
            made[name] = np.full(n, column.unknown, column.dtype)
        elif name not in made:
            made[name] = columns[name].astype(column.dtype, copy=False)
    return Windows(**made), in_alloc
