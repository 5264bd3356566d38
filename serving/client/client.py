"""Typed client: every route as a method, with retries where they are safe and may help."""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, Self, TypeVar

import httpx
import pyarrow as pa
from pydantic import BaseModel, ValidationError

from reclaim.serving.client.transport import RefusedRowsError, ServiceError, Transport
from reclaim.serving.wire.arrow import MEDIA_TYPE, read_stream, write_table
from reclaim.serving.wire.cell_schemas import (
    AnswerFor,
    CellAnswer,
    CellQuery,
    CollectionFacts,
    StateInfo,
    TaskExplanation,
    TaskFacts,
    TasksRequest,
    UsageRequest,
    UsageWindow,
    WriteAnswer,
)
from reclaim.serving.wire.errors import UNAVAILABLE
from reclaim.serving.wire.machine_schemas import FitAnswer, FitRequest, MachineExplanation, MachinesAnswer
from reclaim.serving.wire.readiness import Readiness
from reclaim.serving.wire.schemas import ErrorBody, ModelInfo, ModelName, ReservationRequest, ReservationResponse, Units

__all__ = ["About", "Client", "Readiness", "RefusedRowsError", "Reservations", "ServiceError", "Written"]

_JSON: Final = "application/json"
_Model = TypeVar("_Model", bound=BaseModel)


@dataclass(frozen=True)
class About:
    """Facts that all rows of a table of reservations share.

    Attributes
    ----------
    model : ModelName
    horizon_s : int
        Horizon of the reservations, in seconds.
    levels : tuple of float
        The levels of all quantiles.
    units : Units
    clock_us : int or None
        The cell's clock, µs; None without one.
    tracked : int
        Tasks in the service's memory.
    refused : dict of code to int
        Refused rows of the request, by code.
    errors : list of ErrorBody
        The first of them.
    """

    model: ModelName
    horizon_s: int
    levels: tuple[float, ...]
    units: Units
    clock_us: int | None
    tracked: int
    refused: dict[str, int]
    errors: list[ErrorBody]


class Reservations(NamedTuple):
    """Reservations as a table, one row per task, and the facts that the rows share."""

    table: pa.Table
    about: About


class Written(NamedTuple):
    """Outcome of a write of usage, and the reservations that were asked for with it."""

    write: WriteAnswer
    reservations: Reservations | None


class Client:
    """Client of one service, for any number of threads, and a context manager.

    Every write may be repeated, as the same window or fact twice changes nothing. So a request that failed by the
    network, by a timeout, or because the service was busy or restarting is sent again. A window that was taken by an
    attempt whose answer got lost then counts as repeated. The service knows the last 24 windows of a task: one that
    is sent again after 24 others is refused as ``too_late``, which changes nothing, but is an error for a
    ``strict`` client.

    Parameters
    ----------
    url : str
        Address of the service, such as ``http://127.0.0.1:3000``.
    token : str or None
        Bearer token; white space around it, as in a file, is left out.
    timeout_s : float
        Time limit of a connection, and of each wait for the service to take or to send bytes, in seconds.
    retries : int
        Further attempts at most.
    patience_s : float
        After this time nothing is sent again, in seconds.
    verify : bool or str or Path or ssl.SSLContext
        Whether the service's certificate is checked, a file of CA certificates, or an SSL context.
    strict : bool
        Whether a refused row is an error; otherwise the answer reports it.
    transport : httpx.BaseTransport or None
        Transport in place of the network.

    Raises
    ------
    ConfigError
        The address is no URL, ``retries`` is below 0, a time is none, the token is not one that a header
        can carry, or the file of certificates holds none.
    """

    def __init__(
        self, url: str, *, token: str | None = None, timeout_s: float = 60.0, retries: int = 10,
        patience_s: float = 60.0, verify: bool | str | Path | ssl.SSLContext = True, strict: bool = False,
        transport: httpx.BaseTransport | None = None,
    ) -> None:  # fmt: skip
        self._strict = strict
        self._transport = Transport(
            url, token=token, timeout_s=timeout_s, retries=retries, patience_s=patience_s, verify=verify,
            transport=transport,
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:  # fmt: skip
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._transport.close()

    def reservations(self, request: ReservationRequest) -> ReservationResponse:
        """Return reservations from the histories in the request alone; ServiceError where it is refused."""
        return self._ask("POST", "/v1/reservations", ReservationResponse, body=request)

    def reservations_table(
        self, table: pa.Table, *, margin: str | None = None, budget: float | None = None, quantiles: bool = False
    ) -> Reservations:  # fmt: skip
        """Return reservations from a table of histories alone, in order of collection and index.

        Parameters
        ----------
        table : pa.Table
            One row per window: columns of ``serving.wire.rows.USAGE_COLUMNS``, a limit in every row.
        margin, budget
            As in ``CellQuery``.
        quantiles : bool
            Whether the table has quantiles.

        Raises
        ------
        ServiceError
            The table is refused; RefusedRowsError where the client is strict and a row is.
        """
        asked = {"margin": margin, "budget": budget, "quantiles": quantiles}
        return self._checked(_reservations(self._send("POST", "/v1/reservations", body=table, query=asked, arrow=True)))

    def usage(
        self, windows: Sequence[UsageWindow] | UsageRequest, *, answer: AnswerFor = "none", margin: str | None = None,
        budget: float | None = None, page_size: int | None = None, quantiles: bool | None = None,
    ) -> WriteAnswer:  # fmt: skip
        """Write windows, in any order, and return the outcome.

        With ``answer`` it has the first page of reservations, in ``WriteAnswer.reservations``; ``cell`` gives all.

        Raises
        ------
        ServiceError
            The request is refused whole; RefusedRowsError where the client is strict and a row is refused.
        """
        request = windows if isinstance(windows, UsageRequest) else UsageRequest(windows=list(windows))
        asked = {"answer": answer, "margin": margin, "budget": budget, "page_size": page_size, "quantiles": quantiles}
        return self._accepted(self._ask("POST", "/v1/usage", WriteAnswer, body=request, query=asked))

    def usage_table(
        self, table: pa.Table, *, answer: AnswerFor = "none", margin: str | None = None, budget: float | None = None,
        quantiles: bool = False,
    ) -> Written:  # fmt: skip
        """Write a table of windows, and return the outcome and all reservations asked for.

        Parameters
        ----------
        table : pa.Table
            One row per window: columns of ``serving.wire.rows.USAGE_COLUMNS``.
        answer : str
            ``none``, the ``tasks`` written, or the whole ``cell``.
        margin, budget
            As in ``CellQuery``.
        quantiles : bool
            Whether the table of reservations has quantiles.

        Raises
        ------
        ServiceError
            The request is refused whole; RefusedRowsError where the client is strict and a row is refused.
        """
        asked = {"answer": answer, "margin": margin, "budget": budget, "quantiles": quantiles}
        if answer == "none":
            return Written(self._accepted(self._ask("POST", "/v1/usage", WriteAnswer, body=table, query=asked)), None)
        found = _reservations(self._send("POST", "/v1/usage", body=table, query=asked, arrow=True))
        write = _read(WriteAnswer, found.table.schema.metadata[b"write"])
        return Written(self._accepted(write), found)

    def tasks(self, tasks: Sequence[TaskFacts] = (), collections: Sequence[CollectionFacts] = ()) -> WriteAnswer:
        """Write facts about tasks, such as limits, machines and ends, and collections that want no estimation.

        Raises
        ------
        ServiceError
            The request is refused whole; RefusedRowsError where the client is strict and a row is refused.
        """
        request = TasksRequest(tasks=list(tasks), collections=list(collections))
        return self._accepted(self._ask("POST", "/v1/tasks", WriteAnswer, body=request))

    def tasks_table(self, table: pa.Table) -> WriteAnswer:
        """Write facts about tasks, one per row, columns of ``serving.wire.rows.TASK_COLUMNS``; raises as ``tasks``."""
        return self._accepted(self._ask("POST", "/v1/tasks", WriteAnswer, body=table))

    def cell(self, query: CellQuery | None = None) -> Iterator[CellAnswer]:
        """Yield pages of reservations, by default of all tasks; each page is of its own moment."""
        query = query or CellQuery()
        while True:
            page = self._ask("POST", "/v1/cell/reservations", CellAnswer, body=query)
            yield page
            if page.next is None:
                return
            query = query.model_copy(update={"after": page.next})

    def cell_table(self, query: CellQuery | None = None) -> Reservations:
        """Return all reservations of a query at one moment; ServiceError where it is refused."""
        body = query or CellQuery()
        return _reservations(self._send("POST", "/v1/cell/reservations", body=body, arrow=True))

    def task(
        self, collection_id: int, instance_index: int = 0, *, margin: str | None = None, budget: float | None = None
    ) -> TaskExplanation:  # fmt: skip
        """Return everything known about a task, and the steps to its reservation; ServiceError 404 if it is unknown."""
        path = f"/v1/tasks/{collection_id}/{instance_index}"
        return self._ask("GET", path, TaskExplanation, query={"margin": margin, "budget": budget})

    def machines(self, *, page_size: int = 1_000, horizon_s: int | None = None) -> Iterator[MachinesAnswer]:
        """Yield pages of machines that have tasks, by id; each page is of its own moment.

        Peaks are those within a horizon, in seconds; None: that of the reservations.
        """
        after: str | None = None
        while True:
            asked = {"page_size": page_size, "after": after, "horizon_s": horizon_s}
            page = self._ask("GET", "/v1/machines", MachinesAnswer, query=asked)
            yield page
            if page.next is None:
                return
            after = page.next

    def machines_table(self, *, horizon_s: int | None = None) -> pa.Table:
        """Return all machines at one moment, a row each; the schema's metadata has model, horizon, units and clock.

        The horizon is as for ``machines``.
        """
        response = self._send("GET", "/v1/machines", query={"horizon_s": horizon_s}, arrow=True)
        try:
            return read_stream(response.content)
        except pa.ArrowException as error:
            message = "the answer is not a table of machines: is the service of another release?"
            raise ServiceError(message, 200) from error

    def machine(self, machine_id: int) -> MachineExplanation:
        """Return one machine, its peaks by horizon, and the steps to one; ServiceError 404 if it has no tasks."""
        return self._ask("GET", f"/v1/machines/{machine_id}", MachineExplanation)

    def fit(self, request: FitRequest) -> FitAnswer:
        """Return the machines with room for each candidate, at least cost first; ServiceError where it is refused."""
        return self._ask("POST", "/v1/machines/fit", FitAnswer, body=request)

    def model(self) -> ModelInfo:
        """Return the served model."""
        return self._ask("GET", "/v1/model", ModelInfo)

    def state(self) -> StateInfo:
        """Return the sizes and the condition of the service's memory."""
        return self._ask("GET", "/v1/cell", StateInfo)

    def ready(self) -> Readiness:
        """Return whether the service can answer, without retries; ServiceError where it cannot be reached."""
        response = self._transport.get_once("/readyz", also=UNAVAILABLE)
        return Readiness(response.status_code == 200, _object(response))

    def _accepted(self, answer: WriteAnswer) -> WriteAnswer:
        if self._strict and answer.refused:
            raise RefusedRowsError(answer.refused, answer.errors)
        return answer

    def _checked(self, found: Reservations) -> Reservations:
        if self._strict and found.about.refused:
            raise RefusedRowsError(found.about.refused, found.about.errors)
        return found

    def _ask(
        self, method: str, path: str, returns: type[_Model], *, body: BaseModel | pa.Table | None = None,
        query: Mapping[str, object] | None = None,
    ) -> _Model:  # fmt: skip
        return _read(returns, self._send(method, path, body=body, query=query or {}).content)

    def _send(
        self, method: str, path: str, *, body: BaseModel | pa.Table | None = None, query: Mapping[str, object] = {},
        arrow: bool = False,
    ) -> httpx.Response:  # fmt: skip
        headers, content = {"accept": MEDIA_TYPE if arrow else _JSON}, None
        if isinstance(body, pa.Table):
            content, headers["content-type"] = write_table(body.combine_chunks()).to_pybytes(), MEDIA_TYPE
        elif body is not None:
            content, headers["content-type"] = body.model_dump_json(exclude_none=True).encode(), _JSON
        return self._transport.send(method, path, headers, query, content)


def _read(model: type[_Model], content: bytes) -> _Model:
    try:
        return model.model_validate_json(content, extra="ignore")  # a later release may have more fields
    except ValidationError as error:
        raise ServiceError(
            f"the answer is not a {model.__name__} ({error.errors()[0]['msg']}): is the service of another release?",
            200,
        ) from error


def _reservations(response: httpx.Response) -> Reservations:
    try:
        table = read_stream(response.content)
        said = {name.decode(): value.decode() for name, value in (table.schema.metadata or {}).items()}
        write = _read(WriteAnswer, said["write"].encode()) if "write" in said else None
        errors = [ErrorBody.model_validate(error, extra="ignore") for error in json.loads(said.get("errors", "[]"))]
        clock_us = int(said["clock_us"])
        about = About(
            model=ModelName(name=said["model_name"], version=said["model_version"]),
            horizon_s=int(said["horizon_s"]),
            levels=tuple(float(level) for level in said["levels"].split(",")),
            units=Units(cpu=said["cpu_unit"], memory=said["memory_unit"]),
            clock_us=None if clock_us < 0 else clock_us,
            tracked=int(said["tracked"]),
            refused=json.loads(said.get("refused", "{}")) if write is None else write.refused,
            errors=errors if write is None else write.errors,
        )
    except (pa.ArrowException, KeyError, ValueError) as error:
        message = "the answer is not a table of reservations: is the service of another release?"
        raise ServiceError(message, 200) from error
    return Reservations(table, about)


def _object(response: httpx.Response) -> dict[str, Any]:
    try:
        said = response.json()
    except ValueError:
        said = None
    return said if isinstance(said, dict) else {}
