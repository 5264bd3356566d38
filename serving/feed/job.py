"""Feeds a service from a Prometheus: first the history that is on the disk, then each slot as it ends."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import httpx
import pyarrow as pa
import pyarrow.compute as pc

from reclaim.data import schema as s
from reclaim.data.core.files import locked, replaced_file, write_json
from reclaim.data.errors import ConfigError, TraceError
from reclaim.data.fetch.prometheus.client import Access
from reclaim.data.fetch.prometheus.client import Client as Server
from reclaim.data.fetch.prometheus.job import LATE_S, extend_history, shorten_history
from reclaim.data.fetch.prometheus.live import LiveReader
from reclaim.data.samples import WINDOW_US
from reclaim.data.traces.dialect import USAGE, Dialect
from reclaim.data.traces.history import PIECE_S, RECORD, History, RawSeries, cut, read_piece
from reclaim.data.traces.kubernetes.fold import TaskKey
from reclaim.data.traces.kubernetes.kept import as_bytes, from_bytes
from reclaim.data.traces.kubernetes.live import LiveFold, Slot
from reclaim.data.traces.kubernetes.series import copies_in_words
from reclaim.serving.cell.outcomes import IN_THE_FUTURE, OUTCOMES
from reclaim.serving.client.client import Client, ServiceError
from reclaim.serving.feed.empty import EmptySlots
from reclaim.serving.feed.metrics import NamedMetrics, address_of, shown
from reclaim.serving.feed.named import METRICS, check_out, nodes_with_names, with_names, write_named
from reclaim.serving.feed.rows import ends_of, failures_of, usage_of
from reclaim.serving.wire.cell_schemas import CellQuery, TaskName, WriteAnswer

T = TypeVar("T")
Errors = type[Exception] | tuple[type[Exception], ...]
DEFAULT_SERVICE: Final = "http://127.0.0.1:3000"
LOCK: Final = "feed.lock"
PROGRESS: Final = "feed.json"
"""File of the tasks whose last windows were sent: their windows in the service show how far it knows the history."""
FOLD: Final = "feed.fold"
"""File of the fold before the last slots that were sent: with it, a start folds only what followed."""
SLOT_S: Final = WINDOW_US // 1_000_000
_US: Final = 1_000_000
_AGAIN_S: Final = 30.0
"""Pause before another try where the server or the service fails: they usually restart within it."""
_SAID_S: Final = 60.0
"""Interval of lines about how far the history was sent: without a terminal there is no bar."""
_ROWS: Final = 100_000
"""Windows of one write: 20 MB, well within what a service takes."""
_AHEAD: Final = OUTCOMES[IN_THE_FUTURE]
"""Code of windows that a service refuses until its clock has come so far."""
_WITNESSES: Final = 100
"""Tasks in that record: more than are likely to be removed by hand."""
_LONGEST_DELAY_S: Final = 3600.0


@dataclass(frozen=True)
class FeedConfig:
    """Settings of a feed."""

    access: Access
    """Address and credentials of the Prometheus."""
    service: str = DEFAULT_SERVICE
    """Address of the service."""
    service_token: str | None = None
    """Its bearer token."""
    service_ca: Path | None = None
    """CA certificates to check the service's by, PEM."""
    margin: str | None = None
    """Safety margin of the reservations that are written; None: the service's own."""
    out: tuple[Path, ...] = ()
    """Files to write reservations into after each slot."""
    listen: str | None = None
    """Address where a Prometheus scrapes them, too, as ``metrics.address_of`` takes it; None: none."""
    delay_s: float = 60.0
    """Time after a slot's end at which its samples are there: two scrapes of half a minute."""
    once: bool = False
    """Ends when the service has all that there is now."""
    keep_days: float | None = None
    """Days of the history to keep on disk; None: all."""

    def __post_init__(self) -> None:
        if not 0 <= self.delay_s <= _LONGEST_DELAY_S:
            raise ConfigError(f"--delay must be between 0 and {_LONGEST_DELAY_S:.0f} seconds, got {self.delay_s:g}")
        if self.keep_days is not None and not self.keep_days > 0:
            raise ConfigError(f"--keep must be above 0 days, got {self.keep_days:g}")
        try:
            url = httpx.URL(self.service)
        except httpx.InvalidURL as error:
            raise ConfigError(f"--service: not a URL ({error})") from error
        if url.scheme not in ("http", "https") or not url.host:
            raise ConfigError(f"--service: expected http://… or https://…, as {DEFAULT_SERVICE}, got {self.service!r}")
        if url.userinfo:
            raise ConfigError(
                "--service: holds a password; put the service's token into a file for --service-token-file"
            )
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
        Slots that had something to send, windows that were sent, and tasks that were ended.
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
    """Send the windows of a history, and of what follows it, to a service until stopped, or once with ``config.once``.

    The history grows by whole pieces of two hours, as by ``extend_history``. What the service knows is not sent again,
    except its last slot, and what was folded is not folded again. So a feed that was killed continues where it stopped.
    While the Prometheus or the service fails, the feed waits; then it sends what was missed.

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
        locked(folder / LOCK, ConfigError(f"{folder}: another `reclaim feed` uses it; wait until that one ends")),
        Client(config.service, token=config.service_token, verify=config.service_ca or True) as service,
    ):
        one = Feed(config, service, folder, say)
        # a wrong token or margin is refused before anything is sent
        service.cell_table(CellQuery(margin=config.margin, tasks=[TaskName(collection_id=0)]))
        with shown(one.metrics, config.listen), Server(config.access) as server:
            history = History.known(folder)
            reader = LiveReader(server, config.access, history, now())
            # not beyond the samples: the clock may be wrong, and what is fetched stays
            now_s = now() if reader.scraped(int(now())) else history.range_s[1]
            _grown(one, history.range_s[1], now_s, progress, errors=OSError)
            while True:
                try:
                    at_s = _send_history(one, progress, now=now, sleep=sleep)
                    _follow(one, reader, at_s, now=now, sleep=sleep)
                except AgainError as error:
                    say(f"{error}; starting again from the history in {_AGAIN_S:.0f} s")
                    sleep(_AGAIN_S)
                else:
                    return one.report


class AgainError(Exception):
    """The state folded and sent so far is lost: the feed starts again from the history."""


def _send_history(
    one: Feed, progress: Callable[[float], None] | None, *, now: Callable[[], float], sleep: Callable[[float], None]
) -> int:
    """Send what the service does not know of the history on disk, and return the time up to which it was folded."""
    history = History.open(one.folder)
    at_s = 0

    def begin() -> None:
        nonlocal at_s
        at_s = one.begin(history)

    _patiently(one, begin, sleep)
    end_s = history.range_s[1]
    said_s = now()
    if end_s > said_s + SLOT_S:
        one.say(
            f"{one.folder} ends at {_moment(end_s)}, which is still to come: no usage is sent until then. If it was "
            "fetched while a clock was ahead, move it away and fetch it again"
        )
    if at_s < end_s:
        one.say(f"sending the history from {_moment(at_s)} to {_moment(end_s)}")
    left = [(start_s, path) for start_s, path in zip(history.starts_s(), history.pieces(), strict=True)
            if start_s + PIECE_S > at_s]  # fmt: skip
    for k, (start_s, path) in enumerate(left):
        one.take(cut(read_piece(path), at_s * 1000, (start_s + PIECE_S) * 1000), at_s, start_s + PIECE_S)
        at_s = start_s + PIECE_S
        _patiently(one, one.send, sleep)
        if progress is not None:
            progress((k + 1) / len(left))
        if now() - said_s >= _SAID_S and at_s < end_s:  # without a terminal no bar is shown
            said_s = now()
            one.say(f"sent the history up to {_moment(at_s)}")
    return at_s


def _patiently(one: Feed, action: Callable[[], None], sleep: Callable[[float], None]) -> None:
    """Call a function that uses the server, the service or the disk, again and again until it succeeds."""
    while True:
        try:
            return action()
        except (TraceError, ServiceError, OSError) as error:
            if one.config.once or (isinstance(error, ServiceError) and not error.temporary):
                raise
            one.say(f"{error}; trying again in {_AGAIN_S:.0f} s")
            sleep(_AGAIN_S)


def _follow(
    one: Feed, reader: LiveReader, at_s: int, *, now: Callable[[], float], sleep: Callable[[float], None]
) -> None:
    """Send each slot from ``at_s`` on as it ends."""
    config, begun_s, seen_s, empty = one.config, at_s, at_s, EmptySlots()
    end_s = History.open(one.folder).range_s[1]

    def further() -> None:
        nonlocal at_s, end_s, seen_s
        one.send()  # what waits
        due_s = _ended_s(now() - config.delay_s)
        if begun_s < at_s > due_s + SLOT_S:
            raise AgainError(f"the clock went back: slots were read up to {_moment(at_s)} before they ended")
        if due_s > at_s:
            at_s = _back(one, reader, empty, at_s)
            until_s = min(due_s, at_s + PIECE_S)
            series = _read(reader.read, at_s, max(min(int(now()), until_s + SLOT_S), until_s), config.once)
            one.take(series, at_s, until_s)
            empty.folded(series.get(USAGE[0], ()), at_s, until_s, one.before)
            seen_s = max((int(row.time_ms[-1]) // 1000 for rows in series.values() for row in rows), default=seen_s)
            at_s = until_s
            one.send()
        if at_s == due_s:
            one.write()
            if at_s >= end_s + PIECE_S:  # not beyond the samples: the clock may be wrong, and what is fetched stays
                end_s = _grown(one, end_s, min(now(), seen_s + LATE_S))

    while True:
        _patiently(one, further, sleep)
        if at_s >= _ended_s(now() - config.delay_s):
            if config.once:
                return
            sleep(min(max(at_s + SLOT_S + config.delay_s - now(), 1.0), SLOT_S + config.delay_s))


def _back(one: Feed, reader: LiveReader, empty: EmptySlots, at_s: int) -> int:
    """Return the time from which to fold: ``at_s``, or before slots that were empty and of which samples came late."""
    if empty.before is None or not (came := empty.came(_read(reader.usage, *empty.range_s, one.config.once))):
        return at_s
    one.say(f"samples of {_moment(came[0])} to {_moment(came[-1] + SLOT_S)} came late, and are sent now")
    start_s, fold = empty.before
    one.go_back(fold)
    return start_s


def _read(read: Callable[[int, int], T], start_s: int, end_s: int, once: bool) -> T:
    """Return samples; a server that refuses access it gave before counts as failing for a while."""
    try:
        return read(start_s, end_s)
    except ConfigError as error:
        if once:
            raise
        raise TraceError(str(error)) from error


def _grown(
    one: Feed, end_s: int, now_s: float, progress: Callable[[float], None] | None = None,
    errors: Errors = (TraceError, ConfigError, OSError),
) -> int:  # fmt: skip
    """Fetch what the history lacks, drop what is too old, and return its end: the old one where it cannot grow."""

    def grow() -> None:
        nonlocal end_s
        longer_s = extend_history(one.config.access, one.folder, now_s=now_s, progress=progress).end_s
        shorten_history(one.folder, one.config.keep_days)
        end_s = longer_s

    one.keep(RECORD, grow, errors)
    return end_s


def _ended_s(at_s: float) -> int:
    """Return the end of the last slot that has ended at a time, seconds."""
    return int(at_s // SLOT_S) * SLOT_S


class Feed:
    """Sends slots to a service in order; those that it has not taken wait.

    Attributes
    ----------
    before : bytes
        The fold before the slots that were taken last.
    """

    def __init__(self, config: FeedConfig, service: Client, folder: Path, say: Callable[[str], None]) -> None:
        self.config, self.folder, self.say = config, folder, say
        self.report = FeedReport()
        self.waiting: list[Slot] = []
        self.metrics = NamedMetrics(refused=self.report.refused)
        self._service = service
        self._fold: LiveFold | None = None
        self.before = b""
        self._witnesses = _recorded(folder / PROGRESS, say)
        self._known_us = self._reached_us = 0
        self._written_us = 0
        self._written_windows = 0
        self._said: dict[str, int] = {}
        self._twice: set[str] = set()

    @property
    def fold(self) -> LiveFold:
        """The current fold."""
        assert self._fold is not None
        return self._fold

    def begin(self, history: History) -> int:
        """Begin with what was folded before, else with the history; return the time that follows, in seconds.

        The last windows of the tasks that were sent last show what the service has. A fold can be used where the
        service has later windows: what was folded cannot be sent again.
        """
        self.waiting = []
        self._known_us, self._reached_us = self._has_until_us(), 0
        start_s, _ = history.range_s
        kept = _kept(self.folder / FOLD, history.dialect, self.say)
        self._fold, until_us = kept or (LiveFold(history.dialect), 0)
        if not start_s * _US < until_us < self._known_us:
            self._fold, until_us = LiveFold(history.dialect), start_s * _US
        return until_us // _US

    def take(self, series: dict[str, list[RawSeries]], start_s: int, end_s: int) -> None:
        """Fold the samples of a range, in seconds; its slots wait, except those that the service knows."""
        if not self.waiting:
            self.before = as_bytes(self.fold, start_s * _US)
        slots = self.fold.take(series, start_s * _US, end_s * _US)
        for task in self.fold.tasks().values():
            if task.twice and task.twice not in self._twice:  # one container stands for all
                self._twice.add(task.twice)
                name = "/".join(filter(None, task.key))
                self.say(f"{name} is measured twice, and one copy counts: {copies_in_words(task.twice)}")
        self.waiting += [slot for slot in slots if slot.end_us >= self._known_us]

    def go_back(self, before: bytes) -> None:
        """Continue with an earlier fold, one that ``before`` was; AgainError where it cannot be read any more."""
        kept = from_bytes(before)
        if kept is None:
            raise AgainError("an earlier fold cannot be read")
        self._fold, _ = kept

    def send(self) -> None:
        """Send the slots that wait, in order; one whose answer got lost is sent again, which changes nothing.

        Raises
        ------
        AgainError
            The service has lost what was sent.
        ServiceError
            It cannot be reached, or refuses; temporary where windows are in the future of its clock.
        """
        if not self.waiting:
            return
        if self._has_until_us() < self._reached_us:
            until = _moment(self._reached_us / _US)
            raise AgainError(f"{self.config.service}: has lost what was sent to it until {until}")
        tasks = self.fold.tasks()
        sent = self.report.windows
        while self.waiting:
            slot = self.waiting[0]
            failures, ends, windows = failures_of(slot), ends_of(slot), usage_of(slot, tasks)
            if failures.num_rows:
                self._service.tasks_table(failures)
            for low in range(0, windows.num_rows, _ROWS):
                written = self._service.usage_table(windows.slice(low, _ROWS)).write
                if _AHEAD in written.refused:
                    until = _moment(slot.end_us / _US)
                    raise ServiceError(
                        f"{self.config.service}: windows until {until} are in the future of its clock; set the clock "
                        "there, or here, where it is wrong"
                    )
                self._count(written)
            if windows.num_rows:
                first = windows.slice(0, _WITNESSES)
                keys = zip(*(first[name].to_pylist() for name in (s.COLLECTION_ID, s.INSTANCE_INDEX)), strict=True)
                self._witnesses = list(keys)
                self.keep(PROGRESS, partial(write_json, self.folder / PROGRESS, {"tasks": self._witnesses}))
            if ends.num_rows:  # after the record: the service forgets these
                self._service.tasks_table(ends)
            gone = dict(slot.ended)
            self._witnesses = [key for key in self._witnesses if key not in gone]
            self.waiting.pop(0)
            self.report.slots += windows.num_rows + ends.num_rows + failures.num_rows > 0
            self.report.windows += windows.num_rows
            self.report.ended += ends.num_rows
            self.report.until_us = self.metrics.until_us = slot.end_us
        if self.report.windows > sent:  # the service now has later windows than the fold
            self.keep(FOLD, partial(_write, self.folder / FOLD, self.before))
        self._reached_us = self._has_until_us()

    def keep(self, name: str, write: Callable[[], None], errors: Errors = (ConfigError, OSError)) -> None:
        """Write a file of the history; an error is said once, and the service is fed nevertheless.

        A start that finds an older file, as after a full disk, sends more again than one that does not.
        """
        path, unwritten = self.folder / name, self.metrics.unwritten
        try:
            write()
        except errors as error:
            if name not in unwritten:
                self.say(f"{path}: not written, and tried again later: {error}")
            unwritten.add(name)
        else:
            if name in unwritten:
                self.say(f"{path}: written again")
            unwritten.discard(name)

    def _has_until_us(self) -> int:
        """Return the end of the last window that the service has of the tasks that were sent last; 0 for none.

        Its clock does not show that: others may feed it, too.
        """
        if not self._witnesses:
            return 0
        names = [TaskName(collection_id=collection, instance_index=index) for collection, index in self._witnesses]
        return pc.max(self._service.cell_table(CellQuery(tasks=names)).table[s.END_US]).as_py() or 0

    def write(self) -> None:
        """Write the reservations after the last slot, once, and report their totals."""
        if self.report.until_us == self._written_us:
            return
        found, tasks = self._service.cell_table(CellQuery(margin=self.config.margin)).table, self.fold.tasks()
        table, nodes = with_names(found, tasks), None
        if found.num_rows and (self.config.listen or any(out.suffix == METRICS for out in self.config.out)):
            margin = self.config.margin or found["margin"][0].as_py()
            nodes = nodes_with_names(self._service.machines_table(), tasks, margin)
        self.metrics.table, self.metrics.nodes = table, nodes
        for out in self.config.out:
            write_named(self.metrics, out)
        self.report.reservations = table.num_rows
        self._written_us = self.report.until_us
        refused = {code: n - self._said.get(code, 0) for code, n in self.report.refused.items()}
        self._said = dict(self.report.refused)
        more = "".join(f", {n:,} windows refused as {code}" for code, n in sorted(refused.items()) if n)
        if self.report.windows == self._written_windows:
            more += ", without new usage; check the scrapes of cAdvisor, and the clock here"
        self._written_windows = self.report.windows
        parts = [_share(table, resource, word) for resource, word in (("cpu", "CPU"), ("memory", "memory"))]
        moment = _moment(self._written_us / _US)
        self.say(f"{moment}: {table.num_rows:,} containers, reserved of limits: {', '.join(parts)}{more}")

    def _count(self, written: WriteAnswer) -> None:
        for code, n in written.refused.items():
            self.report.refused[code] = self.report.refused.get(code, 0) + n


def _write(path: Path, content: bytes) -> None:
    """Write a file, complete or not at all."""
    with replaced_file(path) as begun:
        begun.write_bytes(content)


def _recorded(path: Path, say: Callable[[str], None]) -> list[TaskKey]:
    """Return the tasks that the feed before this one sent last; none without one, or where a crash cut the file."""
    try:
        return [
            (int(collection), int(index)) for collection, index in json.loads(path.read_text(encoding="utf-8"))["tasks"]
        ]
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError) as error:
        say(f"{path}: not the record of a feed ({error}), so the whole history is sent again")
        return []


def _kept(path: Path, dialect: Dialect, say: Callable[[str], None]) -> tuple[LiveFold, int] | None:
    """Return the fold that the feed before this one kept, and its end, µs; None where there is no usable one."""
    try:
        kept = from_bytes(path.read_bytes())
    except FileNotFoundError:
        return None
    if kept is None or kept[0].dialect.text != dialect.text:
        say(f"{path}: not of this version and history, so the whole history is folded again")
        return None
    return kept


def _moment(at_s: float) -> str:
    return f"{datetime.fromtimestamp(at_s, UTC):%Y-%m-%d %H:%M} UTC"


def _share(table: pa.Table, resource: str, word: str) -> str:
    """Return the share of the enforced limits that is reserved, and how many containers have one, in words."""
    limited = table.filter(pc.is_valid(table[f"{resource}_limit"]))
    if not limited.num_rows:
        return f"no {word} limit"
    limit, reserved = (pc.sum(limited[f"{resource}_{what}"]).as_py() for what in ("limit", "reservation"))
    of = "" if limited.num_rows == table.num_rows else f" ({limited.num_rows:,} have one)"
    return f"{100 * reserved / limit:.1f} % of {word}{of}"
