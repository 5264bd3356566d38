"""Fetches shards of a public trace into a folder, several at once; a repeated run continues an interrupted one."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Lock
from typing import Final

from tqdm import tqdm

from reclaim.data.errors import ConfigError, TraceError
from reclaim.data.fetch.download import Downloader, RemoteFile, check_url, open_client
from reclaim.data.fetch.ledger import Ledger
from reclaim.data.fetch.locations import TRACES

MOST_SHARDS: Final = 1_000_000
"""Upper bound of shard numbers: more than any published table has, and few enough for a list."""
GIVE_UP_AFTER: Final = 25
"""Failed files after which the rest is not tried: the cause is then the server or the address."""
UNCHECKED: Final = ("length", "nothing")
"""Checks of a file without a checksum."""


@dataclass(frozen=True)
class FetchConfig:
    """The shards to fetch, and their source."""

    trace: str
    """A published trace, one of ``locations.TRACES``."""
    cell: str | None = None
    """Cell of the trace, for a trace of several."""
    tables: tuple[str, ...] = ()
    """Tables to fetch; empty: all."""
    shards: str | None = None
    """Shards of each table, as ``0-3,7``; None: all. Of several tables, a shorter one yields the shards it has."""
    base_url: str | None = None
    """Address of a mirror, HTTPS or of this machine; None: the address of publication."""
    parallel: int = 4
    """Files fetched at once."""
    timeout_s: float = 30.0
    """Silence after which a connection counts as broken, in seconds."""
    backoff_s: float = 1.0
    """First pause before another try, in seconds; doubled each time."""

    def __post_init__(self) -> None:
        if self.trace not in TRACES:
            raise ConfigError(f"trace must be one of {', '.join(TRACES)}, got {self.trace!r}")
        published = TRACES[self.trace]
        if published.cells and self.cell not in published.cells:
            raise ConfigError(f"{self.trace}: --cell must be one of {', '.join(published.cells)}, got {self.cell!r}")
        if not published.cells and self.cell is not None:
            raise ConfigError(f"{self.trace} has no cells; leave out --cell {self.cell}")
        unknown = sorted(set(self.tables) - published.objects.keys())
        if unknown:
            raise ConfigError(f"{self.trace}: no table {', '.join(unknown)}; it has {', '.join(published.objects)}")
        if self.base_url is None and not published.base_url:
            raise ConfigError(f"{self.trace}: no public address; {published.how}: pass it with --base-url URL")
        if self.base_url is not None:
            check_url(self.base_url)
        if self.shards is not None:
            parse_shards(self.shards)
        if not 1 <= self.parallel <= 64:
            raise ConfigError(f"parallel must be between 1 and 64, got {self.parallel}")

    @property
    def url(self) -> str:
        """Prefix of every object's address."""
        return (self.base_url or TRACES[self.trace].base_url.format(cell=self.cell)).rstrip("/")


@dataclass(frozen=True)
class FetchReport:
    """The result of a fetch.

    Attributes
    ----------
    files : tuple of str
        Every requested file, as a path below the folder; all exist.
    fetched : tuple of str
        Those of ``files`` that this run downloaded.
    n_bytes : int
        Bytes received for them.
    unchecked : tuple of str
        Those of ``files`` without a checksum from the trace or the server: only their length was checked.
    """

    files: tuple[str, ...]
    fetched: tuple[str, ...]
    n_bytes: int
    unchecked: tuple[str, ...]


def parse_shards(text: str) -> tuple[int, ...]:
    """Return the shard numbers of a text such as ``0-3,7``, ascending and unique; ConfigError for another form."""
    shards: set[int] = set()
    for part in text.split(","):
        first, dash, last = (word.strip() for word in part.partition("-"))
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last) < MOST_SHARDS):
            raise ConfigError(f"--shards {text!r}: expected numbers and ranges below {MOST_SHARDS:,}, such as 0-3,7")
        shards.update(range(int(first), int(last) + 1))
    return tuple(sorted(shards))


def fetch(config: FetchConfig, out: Path) -> FetchReport:
    """Fetch shards of a public trace into ``out``, each under its published path.

    A file is ``NAME.partial`` until its length and every checksum that the trace publishes or the server sends are
    verified. Verified files are recorded in the folder's ledger and not requested again.

    Raises
    ------
    ConfigError
        The trace has no such shards; ``out`` holds another trace or cell, or another process is fetching into it; a
        redirection leads to plain HTTP.
    TraceError
        Files could not be fetched: names each; the others exist.
    OSError
        The disk is full.
    """
    lock, stop, received = Lock(), Event(), 0
    with (
        Ledger(out) as ledger,
        open_client(config.url, config.timeout_s) as client,
        tqdm(desc="fetching", unit="B", unit_scale=True, disable=None, leave=False) as bar,
    ):

        def advance(n_bytes: int) -> None:
            nonlocal received
            with lock:  # every download thread calls it
                received += n_bytes
                bar.update(n_bytes)

        _claim(config, out, ledger)
        downloader = Downloader(client, out, ledger, backoff_s=config.backoff_s, stop=stop, advance=advance)
        requested = _requested(config, out, downloader, ledger)
        missing = [file for file in requested if not downloader.is_complete(file)]
        with ThreadPoolExecutor(config.parallel, thread_name_prefix="fetch") as pool:
            failures = _get_missing(pool, downloader, missing, bar, stop)
        if failures:
            gave_up = f"; gave up after {GIVE_UP_AFTER}" if len(failures) == GIVE_UP_AFTER else ""
            raise TraceError(
                f"{len(failures)} of {len(requested)} files not fetched{gave_up}: {'; '.join(failures)}. "
                "Run again for them: what came is kept"
            )
        facts = {file.name: ledger.get("done", file.name) for file in requested}
    return FetchReport(
        files=tuple(facts),
        fetched=tuple(file.name for file in missing),
        n_bytes=received,
        unchecked=tuple(name for name, fact in facts.items() if fact["checked"] in UNCHECKED),
    )


def _claim(config: FetchConfig, out: Path, ledger: Ledger) -> None:
    """Record trace and cell of the folder, or refuse another: files of two cells have the same names."""
    here = {"trace": config.trace, "cell": config.cell}
    before = ledger.get("folder", "")
    if not before:
        ledger.put("folder", "", **here)
    elif {key: before.get(key) for key in here} != here:
        holds = " cell ".join(filter(None, (before.get("trace"), before.get("cell"))))
        raise ConfigError(f"{out}: holds {holds}; choose another folder")


def _requested(config: FetchConfig, out: Path, downloader: Downloader, ledger: Ledger) -> list[RemoteFile]:
    """Return the requested objects with their published checksums, whose list is fetched first."""
    published = TRACES[config.trace]
    sums: dict[str, str] = {}
    if published.checksums:
        listing = RemoteFile(published.checksums, f"{config.url}/{published.checksums}")
        if not downloader.is_complete(listing):
            downloader.get(listing)
        sums = read_checksums(out / published.checksums)
    tables = config.tables or tuple(published.objects)
    asked = None if config.shards is None else parse_shards(config.shards)
    counts: dict[str, int | None] = {table: published.shards.get(table) for table in tables}
    for table in tables:
        if counts[table] is None and (asked is None or len(tables) > 1):
            counts[table] = _count(config, published.objects[table], table, downloader, ledger)
    largest = MOST_SHARDS if None in counts.values() else max(count or 0 for count in counts.values())
    if asked is not None and asked[-1] >= largest:
        has = ", ".join(f"{table} has {count:,}" for table, count in counts.items())
        raise ConfigError(f"--shards {config.shards}: there is no shard {asked[-1]} ({has}, counted from 0)")
    names = list(published.always)
    for table, count in counts.items():
        shards = range(count or 0) if asked is None else [n for n in asked if count is None or n < count]
        names += [published.objects[table].format(shard=shard, shards=count) for shard in shards]
    return [RemoteFile(name, f"{config.url}/{name}", sums.get(name)) for name in names]


def _count(config: FetchConfig, pattern: str, table: str, downloader: Downloader, ledger: Ledger) -> int:
    """Return a table's number of shards, from the ledger, or found by about twenty requests and recorded.

    Shards are numbered from 0 without a gap; no document states their number.
    """
    known = ledger.get("shards", table).get("count")
    if known is None:
        known = first_missing(lambda shard: downloader.exists(f"{config.url}/{pattern.format(shard=shard)}"))
        if not known:
            raise TraceError(f"{config.url}/{pattern.format(shard=0)}: no such object; check --base-url")
        ledger.put("shards", table, count=known)
    return int(known)


def first_missing(exists: Callable[[int], bool]) -> int:
    """Return the first number that does not exist, of numbers that exist from 0 on without a gap."""
    low, high = 0, 1  # all below low exist
    while exists(high - 1):
        if high > MOST_SHARDS:
            raise TraceError(f"the server says that shard {high - 1:,} of a table exists, too; check --base-url")
        low, high = high, 2 * high
    while low < high - 1:  # high - 1 does not exist
        middle = (low + high - 1) // 2
        low, high = (middle + 1, high) if exists(middle) else (low, middle + 1)
    return low


def read_checksums(path: Path) -> dict[str, str]:
    """Return path → SHA-256 of a ``sha256sum`` list; TraceError for a line of another form."""
    sums: dict[str, str] = {}
    for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
        match = re.fullmatch(r"([0-9a-fA-F]{64}) [ *](?:\./)?(.+)", line)
        if match is None:
            raise TraceError(f"{path} line {number}: not a line of a sha256sum list; delete the file and run again")
        sums[match[2]] = match[1].lower()
    return sums


def _get_missing(
    pool: ThreadPoolExecutor, downloader: Downloader, missing: list[RemoteFile], bar: tqdm, stop: Event
) -> list[str]:
    """Fetch all and return the failures' messages. A fault of the machine (a full disk) ends all downloads."""
    failures: list[str] = []
    futures = [pool.submit(downloader.get, file) for file in missing]
    try:
        for done, future in enumerate(as_completed(futures), 1):
            bar.set_postfix_str(f"{done} of {len(futures)} files")
            try:
                future.result()
            except TraceError as error:
                failures.append(str(error))
            if len(failures) == GIVE_UP_AFTER:
                break
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)
    return sorted(failures)
