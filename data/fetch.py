"""The fetch job: shards of a public trace into a folder, several at once; killed anywhere and run again, it goes on."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Lock
from typing import Final

from tqdm import tqdm

from reclaim.data.download import Downloader, Wanted, check_url, open_client
from reclaim.data.errors import ConfigError, TraceError
from reclaim.data.ledger import Ledger
from reclaim.data.locations import TRACES

MOST_SHARDS: Final = 1_000_000
"""Shard numbers end here: more than any published table has, and few enough for a list of them."""
GIVE_UP_AFTER: Final = 25
"""Failed files after which the rest is not tried: so many mean that it is not the files."""
UNCHECKED: Final = ("length", "nothing")
"""What a file was checked against where there is no checksum."""


@dataclass(frozen=True)
class FetchConfig:
    """What to fetch, and from where."""

    trace: str
    """A published trace, one of ``locations.TRACES``."""
    cell: str | None = None
    """Which cell, for a trace of several."""
    tables: tuple[str, ...] = ()
    """Its tables to fetch; none named: all."""
    shards: str | None = None
    """Which shards of each table, as ``0-3,7``; of several tables, one that has fewer gives those it has. None: all."""
    base_url: str | None = None
    """Where the objects are, if not where the trace is published: a mirror, HTTPS or of this machine."""
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
            raise ConfigError(f"{self.trace}: no public address; {published.how}: pass it on with --base-url URL")
        if self.base_url is not None:
            check_url(self.base_url)
        if self.shards is not None:
            parse_shards(self.shards)
        if not 1 <= self.parallel <= 64:
            raise ConfigError(f"parallel must be between 1 and 64, got {self.parallel}")

    @property
    def url(self) -> str:
        """What comes before an object's path."""
        return (self.base_url or TRACES[self.trace].base_url.format(cell=self.cell)).rstrip("/")


@dataclass(frozen=True)
class FetchReport:
    """What a fetch made.

    Attributes
    ----------
    files : tuple of str
        Every file asked for, as a path below the folder; all of them are there.
    fetched : tuple of str
        Those that were not there before.
    n_bytes : int
        What came over the wire for them, in bytes.
    unchecked : tuple of str
        Those of ``files`` for which neither the trace nor the server gives a checksum: only their length was checked.
    """

    files: tuple[str, ...]
    fetched: tuple[str, ...]
    n_bytes: int
    unchecked: tuple[str, ...]


def parse_shards(text: str) -> tuple[int, ...]:
    """Return the shard numbers that ``text`` names, as ``0-3,7``, in order and each once.

    Raises
    ------
    ConfigError
        It names none, or is not of that form.
    """
    shards: set[int] = set()
    for part in text.split(","):
        first, dash, last = (word.strip() for word in part.partition("-"))
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last) < MOST_SHARDS):
            raise ConfigError(f"--shards {text!r}: expected numbers and ranges below {MOST_SHARDS:,}, such as 0-3,7")
        shards.update(range(int(first), int(last) + 1))
    return tuple(sorted(shards))


def fetch(config: FetchConfig, out: Path) -> FetchReport:
    """Fetch shards of a public trace into ``out``, each under its path in the place of publication.

    A file has its name only when its length and every checksum that the trace publishes or the server sends were found
    right; until then it is ``NAME.partial``. What was found right is kept in the folder's ledger and not asked for
    again.

    Raises
    ------
    ConfigError
        The trace has no such shards, or ``out`` holds another trace or cell or is just being written, or a redirection
        leads to plain HTTP.
    TraceError
        Files could not be fetched: names each; the others are there.
    OSError
        The disk is full.
    """
    lock, stop, came = Lock(), Event(), 0
    with (
        Ledger(out) as ledger,
        open_client(config.url, config.timeout_s) as client,
        tqdm(desc="fetching", unit="B", unit_scale=True, disable=None, leave=False) as bar,
    ):

        def advance(n_bytes: int) -> None:
            nonlocal came
            with lock:  # called from every thread
                came += n_bytes
                bar.update(n_bytes)

        _claim(config, out, ledger)
        downloader = Downloader(client, out, ledger, backoff_s=config.backoff_s, stop=stop, advance=advance)
        wanted = _wanted(config, out, downloader, ledger)
        missing = [one for one in wanted if not downloader.is_there(one)]
        with ThreadPoolExecutor(config.parallel, thread_name_prefix="fetch") as pool:
            failures = _get_all(pool, downloader, missing, bar, stop)
        if failures:
            gave_up = f"; gave up after {GIVE_UP_AFTER}" if len(failures) == GIVE_UP_AFTER else ""
            raise TraceError(
                f"{len(failures)} of {len(wanted)} files not fetched{gave_up}: {'; '.join(failures)}. "
                "Run again for them: what came is kept"
            )
        facts = {one.name: ledger.get("done", one.name) for one in wanted}
    return FetchReport(
        files=tuple(facts),
        fetched=tuple(one.name for one in missing),
        n_bytes=came,
        unchecked=tuple(name for name, fact in facts.items() if fact["checked"] in UNCHECKED),
    )


def _claim(config: FetchConfig, out: Path, ledger: Ledger) -> None:
    """Write down what the folder is for: files of two cells have the same names."""
    here = {"trace": config.trace, "cell": config.cell}
    before = ledger.get("folder", "")
    if not before:
        ledger.put("folder", "", **here)
    elif {key: before.get(key) for key in here} != here:
        what = before.get("trace"), before.get("cell")
        raise ConfigError(f"{out}: holds {' cell '.join(w for w in what if w)}; choose another folder")


def _wanted(config: FetchConfig, out: Path, downloader: Downloader, ledger: Ledger) -> list[Wanted]:
    """Return the objects to fetch, with their published checksums; the list of these is fetched first."""
    published = TRACES[config.trace]
    sums: dict[str, str] = {}
    if published.checksums:
        listing = Wanted(published.checksums, f"{config.url}/{published.checksums}")
        if not downloader.is_there(listing):
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
    return [Wanted(name, f"{config.url}/{name}", sums.get(name)) for name in names]


def _count(config: FetchConfig, pattern: str, table: str, downloader: Downloader, ledger: Ledger) -> int:
    """Return how many shards a table has, which no document says; asked of the server once, then known.

    They are numbered from 0 without a gap, so some twenty questions are enough for thousands.
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
        low, high = high, 2 * high
    while low < high - 1:  # high - 1 does not exist
        middle = (low + high - 1) // 2
        low, high = (middle + 1, high) if exists(middle) else (low, middle + 1)
    return low


def read_checksums(path: Path) -> dict[str, str]:
    """Return the SHA-256 of each path that a ``sha256sum`` list names.

    Raises
    ------
    TraceError
        A line is not of such a list.
    """
    sums: dict[str, str] = {}
    for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
        match = re.fullmatch(r"([0-9a-fA-F]{64}) [ *](?:\./)?(.+)", line)
        if match is None:
            raise TraceError(f"{path} line {number}: not of a sha256sum list; delete the file and run again")
        sums[match[2]] = match[1].lower()
    return sums


def _get_all(
    pool: ThreadPoolExecutor, downloader: Downloader, missing: list[Wanted], bar: tqdm, stop: Event
) -> list[str]:
    """Fetch all; return why those failed that did. What is no fault of one file (a full disk) ends all of them."""
    failures: list[str] = []
    futures = [pool.submit(downloader.get, one) for one in missing]
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
