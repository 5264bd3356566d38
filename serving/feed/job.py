"""Feeds a service from a Prometheus: first the history that is on the disk, then each slot as it ends."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from reclaim.data.core.files import locked
from reclaim.data.errors import ConfigError, TraceError
from reclaim.data.fetch.prometheus.client import Access
from reclaim.data.fetch.prometheus.client import Client as Server
from reclaim.data.fetch.prometheus.job import extend_history
from reclaim.data.fetch.prometheus.live import LiveReader
from reclaim.data.samples import WINDOW_US
from reclaim.data.traces.history import PIECE_S, History, read_piece
from reclaim.data.traces.kubernetes.live import LiveFold, Slot
from reclaim.serving.client.client import Client, ServiceError
from reclaim.serving.feed.metrics import NamedMetrics, address_of, shown
from reclaim.serving.feed.named import check_out, with_names, write_named
from reclaim.serving.feed.rows import ends_of, failures_of, usage_of
from reclaim.serving.wire.cell_schemas import CellQuery, WriteAnswer

LOCK: Final = "feed.lock"
SLOT_S: Final = WINDOW_US // 1_000_000
_US: Final = 1_000_000
_AGAIN_S: Final = 30.0
"""Pause before another try where the server or the service fails: they restart within less."""
_ROWS: Final = 100_000
"""Windows of one write: 20 MB, well within what a service takes."""
_LONGEST_DELAY_S: Final = 3600.0


@dataclass(frozen=True)
class FeedConfig:
    """Settings of a feed."""

    access: Access
    """Address and credentials of the Prometheus."""
    service: str = "http://127.0.0.1:3000"
    """Address of the service."""
    service_token: str | None = None
    """Its bearer token."""
    service_ca: Path | None = None
    """Certificates that its own may be signed by, PEM."""
    margin: str | None = None
    """Safety margin of the reservations that are written; None: the service's own."""
    out: tuple[Path, ...] = ()
    """Files to write reservations into after each slot."""
    listen: str | None = None
    """Address on which a Prometheus reads them, too, as ``metrics.address_of``; None: none."""
    delay_s: float = 60.0
    """Time after a slot's end at which its samples are there: two scrapes of half a minute."""
    once: bool = False
    """Ends when the service knows all there is now."""

    def __post_init__(self) -> None:
        if not 0 <= self.delay_s <= _LONGEST_DELAY_S:
            raise ConfigError(f"--delay must be between 0 and {_LONGEST_DELAY_S:.0f} seconds, got {self.delay_s:g}")
        for out in self.out:
            check_out(out)
        if self.listen is not None:
            address_of(self.listen)


@dataclass
class FeedReport:
    """Counts of a feed.

    Attributes
    ----------
    slots, windows, ended : int
        Slots and windows that were sent, and tasks that were ended.
    refused : dict of str to int
        Windows that the service refused, by code.
    until_us : int
        End of the last slot that the service knows.
    reservations : int
        Rows of the last files.
    """

    slots: int = 0
    windows: int = 0
    ended: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    until_us: int = 0
    reservations: int = 0


def feed(
    config: FeedConfig,
    folder: Path,
    *,
    say: Callable[[str], None],
    progress: Callable[[float], None] | None = None,
    now: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> FeedReport:
    """Send the windows of a history, and of what follows it, to a service; goes on until stopped, or ``config.once``.

    The history grows by whole pieces of two hours, as by ``extend_history``. What the service knows is not sent again,
    but for its last slot. So a feed that was killed goes on where it was. While the Prometheus or the service fails,
    the feed waits; then it sends what was missed.

    Parameters
    ----------
    config : FeedConfig
    folder : Path
        The history: a folder of ``reclaim fetch prometheus``.
    say : callable
        Called with a line about each slot, and about each failure that it waits for.
    progress : callable or None
        Called with the share of the history on disk that was sent.
    now, sleep : callable
        Seconds of Unix time; a pause in seconds.

    Raises
    ------
    ConfigError
        There is no history, another process feeds from it, or the server or an option is wrong.
    ServiceError
        The service refuses, or cannot be reached at the start; with ``config.once``, ever.
    TraceError
        The server fails at the start; with ``config.once``, ever.
    """
    History.known(folder)
    with (
        locked(folder / LOCK, ConfigError(f"{folder}: another `reclaim feed` uses it; wait for its end")),
        Client(config.service, token=config.service_token, verify=config.service_ca or True) as service,
    ):
        known_us = service.state().clock_us or 0
        extend_history(config.access, folder, now_s=now(), progress=progress)
        history = History.open(folder)
        one = Feed(config, service, LiveFold(history.dialect), say)
        paths = list(history.pieces())
        with Server(config.access) as server, shown(one.metrics, config.listen):
            reader = LiveReader(server, config.access, history)
            for k, (start_s, path) in enumerate(zip(history.starts_s(), paths, strict=True)):
                slots = one.fold.take(read_piece(path), start_s * _US, (start_s + PIECE_S) * _US)
                one.waiting += [slot for slot in slots if slot.end_us >= known_us]
                one.send()
                if progress is not None:
                    progress((k + 1) / len(paths))
            _follow(one, reader, folder, history.range_s[1], known_us=known_us, now=now, sleep=sleep)
        return one.report


def _follow(
    one: Feed,
    reader: LiveReader,
    folder: Path,
    at_s: int,
    *,
    known_us: int,
    now: Callable[[], float],
    sleep: Callable[[float], None],
) -> None:
    """Send each slot from ``at_s`` on as it ends."""
    config, end_s = one.config, at_s
    while True:
        due_s = _ended_s(now() - config.delay_s)
        try:
            if one.waiting:
                one.send()
            if due_s > at_s:
                until_s = min(due_s, at_s + PIECE_S)
                series = reader.read(at_s, max(min(int(now()), until_s + SLOT_S), until_s))
                slots = one.fold.take(series, at_s * _US, until_s * _US)
                at_s = until_s
                one.waiting += [slot for slot in slots if slot.end_us >= known_us]
                one.send()
            if at_s == due_s:
                one.write()
                if at_s >= end_s + PIECE_S:
                    end_s = _grown(config, folder, end_s, now(), one.say)
        except (TraceError, ServiceError) as error:
            if config.once or (isinstance(error, ServiceError) and not error.temporary):
                raise
            one.say(f"{error}; trying again in {_AGAIN_S:.0f} s")
            sleep(_AGAIN_S)
            continue
        if at_s >= due_s:
            if config.once:
                return
            sleep(max(at_s + SLOT_S + config.delay_s - now(), 1.0))


def _grown(config: FeedConfig, folder: Path, end_s: int, now_s: float, say: Callable[[str], None]) -> int:
    """Fetch what the history lacks, and return its end; that of before, where it cannot grow now."""
    try:
        return extend_history(config.access, folder, now_s=now_s).end_s
    except (TraceError, ConfigError) as error:  # the service is fed all the same
        say(f"{folder} grows later: {error}")
        return end_s


def _ended_s(at_s: float) -> int:
    """Return the end of the last slot that has ended at a time, seconds."""
    return int(at_s // SLOT_S) * SLOT_S


class Feed:
    """Sends slots to a service in order; those that it did not take wait."""

    def __init__(self, config: FeedConfig, service: Client, fold: LiveFold, say: Callable[[str], None]) -> None:
        self.config, self.fold, self.say = config, fold, say
        self.report = FeedReport()
        self.waiting: list[Slot] = []
        self.metrics = NamedMetrics()
        self._service = service
        self._written_us = 0

    def send(self) -> None:
        """Send the slots that wait, in order; one whose answer got lost is sent again, which changes nothing."""
        tasks = self.fold.tasks() if self.waiting else {}
        while self.waiting:
            slot = self.waiting[0]
            failures, ends, windows = failures_of(slot), ends_of(slot), usage_of(slot, tasks)
            if failures.num_rows:
                self._service.tasks_table(failures)
            for low in range(0, windows.num_rows, _ROWS):
                self._count(self._service.usage_table(windows.slice(low, _ROWS)).write)
            if ends.num_rows:
                self._service.tasks_table(ends)
            self.waiting.pop(0)
            self.report.slots += 1
            self.report.windows += windows.num_rows
            self.report.ended += ends.num_rows
            self.report.until_us = self.metrics.until_us = slot.end_us

    def write(self) -> None:
        """Write the reservations after the last slot, once, and say what they come to."""
        if self.report.until_us == self._written_us:
            return
        query = CellQuery() if self.config.margin is None else CellQuery(margin=self.config.margin)
        found = self._service.cell_table(query)
        self.metrics.table = table = with_names(found.table, self.fold.tasks())
        for out in self.config.out:
            write_named(self.metrics, out)
        self.report.reservations = table.num_rows
        self._written_us = self.report.until_us
        moment = datetime.fromtimestamp(self._written_us / _US, UTC)
        parts = [f"{_share(table, resource)} of {word}" for resource, word in (("cpu", "CPU"), ("memory", "memory"))]
        self.say(f"{moment:%Y-%m-%d %H:%M} UTC: {table.num_rows:,} containers, {' and '.join(parts)} limits reserved")

    def _count(self, written: WriteAnswer) -> None:
        for code, n in written.refused.items():
            self.report.refused[code] = self.report.refused.get(code, 0) + n


def _share(table: pa.Table, resource: str) -> str:
    """Return the share of the limits that is reserved, in words."""
    limit, reserved = (pc.sum(table[f"{resource}_{what}"]).as_py() for what in ("limit", "reservation"))
    return f"{100 * reserved / limit:.1f} %" if limit else "0 %"
