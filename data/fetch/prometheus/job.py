"""Fetches the history of a cluster from a Prometheus into a folder, piece by piece; a repeated run continues."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from reclaim.data.core.files import write_json
from reclaim.data.errors import ConfigError, TraceError
from reclaim.data.fetch.ledger import Ledger
from reclaim.data.fetch.prometheus.client import Access, Client
from reclaim.data.fetch.prometheus.probe import AUTO, LARGEST_PIECE, Plan, choose, plan, too_large
from reclaim.data.fetch.prometheus.reading import Labels, external_labels, read_series
from reclaim.data.fetch.prometheus.transports import TRANSPORTS, held
from reclaim.data.traces.dialect import USAGE, Dialect, Matcher, Metric, load_dialect
from reclaim.data.traces.history import (
    FORMAT,
    PIECE_S,
    RECORD,
    History,
    RawSeries,
    moment_s,
    piece_path,
    read_piece,
    roles_in,
    split,
    write_piece,
)

log = logging.getLogger(__name__)

SAMPLES_AT_ONCE: Final = 6_000_000
"""Samples of pieces that are read together, by plan: 100 MB."""
PIECES_AT_ONCE: Final = 84
"""Largest number of pieces that are asked for at once: a week, so that progress is visible."""
SYNTHETIC: Final = "SYNTHETIC.json"
"""Marker by which reports call a dataset synthetic."""
LATE_S: Final = 600
"""Seconds after which a piece is complete at the server."""
_COMPARED_MS: Final = 600_000
"""Length at a piece's end over which series are compared: any series that is scraped has a sample there."""


@dataclass(frozen=True)
class HistoryConfig:
    """Settings of a fetch from a Prometheus."""

    access: Access
    """Address and credentials."""
    days: float = 14.0
    """Length of the history."""
    end: str | None = None
    """Its end, as 2026-11-02 or 2026-11-02T14:00 (UTC); None: the end of the last full two hours."""
    namespace: str | None = None
    """Namespaces, a regular expression as in PromQL; None: all."""
    cluster: str | None = None
    """Condition on the cluster, as label=value; None: none."""
    dialect: str = "kubernetes"
    """Names of metrics and labels: a file, or the name of a shipped one."""
    transport: str = AUTO
    """Way of reading, one of ``TRANSPORTS``, or ``auto``."""
    probe: bool = False
    """Only reports what there is."""

    def __post_init__(self) -> None:
        if not PIECE_S / 86_400 <= self.days <= 3660:
            raise ConfigError(f"--days must be between {PIECE_S / 86_400:.3f} and 3660, got {self.days}")
        if self.transport not in (AUTO, *TRANSPORTS):
            raise ConfigError(f"--transport must be one of {', '.join((AUTO, *TRANSPORTS))}, got {self.transport!r}")
        if self.cluster is not None and not all(self.cluster.partition("=")):
            raise ConfigError(f"--cluster: expected label=value, got {self.cluster!r}")
        self.end_s()

    def end_s(self) -> int | None:
        """Return the end asked for, in seconds of Unix time."""
        return None if self.end is None else moment_s(self.end)

    def asked(self) -> dict[str, Any]:
        """Return the settings that decide the samples, besides the range; no address and no secret."""
        return {"namespace": self.namespace, "cluster": self.cluster, "days": self.days, "end": self.end}


@dataclass(frozen=True)
class HistoryReport:
    """The result of a fetch; ``plan`` is that of a probe or of a first run.

    Attributes
    ----------
    start_s, end_s : int
        Range of the history.
    pieces, fetched : int
        Pieces it has, and those that this run fetched.
    empty_s : tuple of int
        Beginnings of the pieces without usage, of whichever run; of a probe none.
    missing : tuple of str
        Metrics of which the whole history has nothing; of a probe, those not seen at the times looked at.
    samples, n_bytes, requests, received : int
        Of this run: samples, bytes written, requests, bytes of answers.
    transport : str
        Way of reading; empty where nothing was left to fetch.
    namespace : str or None
        Namespaces that were asked for.
    """

    start_s: int
    end_s: int
    pieces: int
    fetched: int = 0
    samples: int = 0
    n_bytes: int = 0
    requests: int = 0
    received: int = 0
    transport: str = ""
    namespace: str | None = None
    plan: Plan | None = None
    empty_s: tuple[int, ...] = ()
    missing: tuple[str, ...] = ()


def fetch_history(
    config: HistoryConfig, out: Path, *, progress: Callable[[float], None] | None = None,
    say: Callable[[str], None] | None = None,
) -> HistoryReport:  # fmt: skip
    """Fetch raw samples into ``out``, one file for each two hours; a piece that is there is not fetched again.

    One request at a time, of a week at most; about ``SAMPLES_AT_ONCE`` samples in memory. The range is fixed by the
    first run, so a run after a kill ends with the same bytes. So are the metrics: where the dialect has further ones
    since, as after an update, they are not fetched.

    Parameters
    ----------
    progress : callable or None
        Called with the share of pieces that are there.
    say : callable or None
        Called with a line about the plan.

    Raises
    ------
    ConfigError
        Options are wrong, the server has several clusters, two hours are more than memory is for, or ``out`` holds a
        history of other options or of another server, or another process
        fetches into it.
    TraceError
        The server has nothing, answers in part, or fails; what came is kept.
    """
    dialect = load_dialect(config.dialect)
    if config.probe:
        start_s, end_s = _range(config)
        with Client(config.access) as client:
            found = plan(client, metrics_of(dialect, config), start_s, end_s, config.transport, _clusters(dialect))
            return HistoryReport(start_s, end_s, found.pieces, plan=found, requests=client.requests,
                                 received=client.bytes, namespace=config.namespace,
                                 missing=_absent(found.missing))  # fmt: skip
    with Ledger(out) as ledger:
        history = _begin(config, dialect, out)
        try:
            return _fetch(config, history.dialect, history, ledger, progress=progress, say=say)
        except TraceError as error:
            if not any(piece.is_file() for piece in history.pieces()):
                raise
            raise TraceError(f"{error}. Run again to continue: finished pieces are kept") from error


def extend_history(
    access: Access, out: Path, *, now_s: float, progress: Callable[[float], None] | None = None
) -> HistoryReport:
    """Fetch what followed a history since, in whole pieces; its options are those that it was begun with.

    The longer range is recorded once all of it is there. A run after a kill goes on.

    Parameters
    ----------
    access : Access
    out : Path
        Folder of the history.
    now_s : float
        Seconds of Unix time.
    progress : callable or None
        As in ``fetch_history``.

    Raises
    ------
    ConfigError, TraceError
        As ``fetch_history``; ConfigError where there is no history.
    """
    history = History.known(out)
    with Ledger(out) as ledger:
        longer = history.until(max(history.range_s[1], _latest_s(now_s)))
        report = _fetch(config_of(history, access), history.dialect, longer, ledger, progress=progress, now_s=now_s)
        if longer.record != history.record:
            write_json(out / RECORD, longer.record)
        return report


def shorten_history(out: Path, keep_days: float | None) -> None:
    """Delete the pieces of a history but those of its last days, at least one; None keeps all.

    The shorter range is recorded first. A run after a kill deletes what is left.

    Raises
    ------
    ConfigError
        There is no history, or another process fetches into it.
    """
    if keep_days is None:
        return
    with Ledger(out):
        history = History.known(out)
        start_s, end_s = history.range_s
        kept_s = max(round(keep_days * 86_400 / PIECE_S), 1) * PIECE_S
        if end_s - kept_s > start_s:
            history = history.since(end_s - kept_s)
            write_json(out / RECORD, history.record)
        first = piece_path(out, history.range_s[0])
        for path in first.parent.glob("*.parquet"):
            if path.name < first.name:  # names are times
                path.unlink()


def config_of(history: History, access: Access) -> HistoryConfig:
    """Return the settings that a history was begun with, for a server."""
    asked = history.record["asked"]
    return HistoryConfig(access, namespace=asked.get("namespace"), cluster=asked.get("cluster"))


def _fetch(
    config: HistoryConfig, dialect: Dialect, history: History, ledger: Ledger, *,
    progress: Callable[[float], None] | None = None, say: Callable[[str], None] | None = None,
    now_s: float | None = None,
) -> HistoryReport:  # fmt: skip
    """Fetch the pieces that a history lacks; one that goes on up to now may have a gap."""
    out = history.folder
    start_s, end_s = history.range_s
    starts = list(history.starts_s())
    left = [k for k in starts if not piece_path(out, k).is_file()]
    report = HistoryReport(start_s, end_s, len(starts), namespace=config.namespace)
    metrics = metrics_of(dialect, config)
    if not left:
        return _with_lacks(report, metrics, history)
    with Client(config.access) as client:
        if len(left) == len(starts):
            made = plan(client, metrics, start_s, end_s, config.transport, _clusters(dialect))
            by_role = {one.metric.role: one.samples for one in made.found}
            ledger.put("plan", "", transport=made.transport, samples=made.samples, by_role=by_role, pieces=len(starts))
            report = replace(report, plan=made)
            if say is not None:
                say(in_words(made))
            transport = made.transport
        else:
            transport = choose(client, metrics[0], start_s, end_s, config.transport)
        without = external_labels(client, metrics[0], transport, start_s, end_s, now_s)
        if len(left) < len(starts):
            last = piece_path(out, max(set(starts).difference(left)))
            _check_same(client, metrics[0], transport, last, without, now_s)
        planned = ledger.get("plan", "")
        pieces = planned.get("pieces", len(starts))
        per_piece = {role: n / pieces for role, n in planned.get("by_role", {}).items()}
        waiting = list(_groups(left, pieces_at_once(planned.get("samples", 0) / pieces)))[::-1]
        while waiting:
            group = waiting.pop()
            series = _read(client, metrics, transport, group, per_piece, without)
            if series is None and len(group) == 1:
                raise ConfigError(too_large(client.url, "more samples than planned"))
            if series is None:
                middle = len(group) // 2
                waiting += [group[middle:], group[:middle]]
                continue
            if series.get("synthetic"):
                write_json(out / SYNTHETIC, {"statement": "Made up, as the server's history says of itself."})
            parts = {role: split(rows, group) for role, rows in series.items()}
            for at, k in enumerate(group):
                piece = {role: rows[at] for role, rows in parts.items()}
                n_bytes = write_piece(piece_path(out, k), piece)
                n = sum(len(row.value) for rows in piece.values() for row in rows)
                ledger.put("piece", piece_path(out, k).name, samples=n, bytes=n_bytes, transport=transport)
                report = replace(report, fetched=report.fetched + 1, samples=report.samples + n,
                                 n_bytes=report.n_bytes + n_bytes)  # fmt: skip
            if progress is not None:
                progress(1 - (len(left) - report.fetched) / len(starts))
        report = replace(report, requests=client.requests, received=client.bytes, transport=transport)
        return _with_lacks(report, metrics, history)


def _read(
    client: Client,
    metrics: Iterable[Metric],
    transport: str,
    group: list[int],
    per_piece: Mapping[str, float],
    without: Labels,
) -> dict[str, list[RawSeries]] | None:
    """Return the series of pieces that follow each other by role; None where they take more than ``LARGEST_PIECE``."""
    first_ms, past_ms = group[0] * 1000, (group[-1] + PIECE_S) * 1000
    found: dict[str, list[RawSeries]] = {}
    total = 0
    for metric in metrics:
        planned = per_piece.get(metric.role, 0) * len(group)
        found[metric.role] = read_series(client, metric, transport, first_ms, past_ms, planned=planned, without=without)
        total += sum(map(held, found[metric.role]))
        if total > LARGEST_PIECE:
            return None
    return found


def pieces_at_once(samples: float) -> int:
    """Return how many pieces, each of so many samples, one request asks for: requests cost more than samples do."""
    return int(min(max(SAMPLES_AT_ONCE / max(samples, 1), 1), PIECES_AT_ONCE))


def _groups(left: list[int], at_once: int) -> Iterator[list[int]]:
    """Yield the missing pieces, so many together at most; those of a group follow each other."""
    group: list[int] = []
    for k in left:
        if group and (k != group[-1] + PIECE_S or len(group) == at_once):
            yield group
            group = []
        group.append(k)
    if group:
        yield group


def _with_lacks(report: HistoryReport, metrics: Iterable[Metric], history: History) -> HistoryReport:
    """Return the report with the metrics of which no piece has a series, and the pieces without usage."""
    roles = {start_s: roles_in(piece_path(history.folder, start_s)) for start_s in history.starts_s()}
    seen = set().union(*roles.values())
    return replace(
        report, empty_s=tuple(start_s for start_s, of in roles.items() if not of.intersection(USAGE)),
        missing=_absent(metric for metric in metrics if metric.role not in seen),
    )  # fmt: skip


def _absent(metrics: Iterable[Metric]) -> tuple[str, ...]:
    """Return the names of missing metrics; a real cluster has no mark of a synthetic one."""
    return tuple(metric.name for metric in metrics if metric.role != "synthetic")


def in_words(found: Plan) -> str:
    """Return a plan in one line."""
    minutes = found.seconds / 60
    return (
        f"pieces of two hours: {found.pieces}, by {found.transport} (server {found.server}): about "
        f"{found.samples:,} samples, {found.n_bytes / 1e6:,.0f} MB, {max(minutes, 0.1):,.1f} minutes"
    )


def _begin(config: HistoryConfig, dialect: Dialect, out: Path) -> History:
    """Return the history of a folder, begun now or before; ConfigError where it is another one.

    A history of other options, or of fewer metrics, that has no piece yet is begun again: its server had nothing for
    them.
    """
    history = History.begun(out)
    other = set() if history is None else _other(config, dialect, history)
    added = set() if history is None else set(dialect.metrics).difference(history.dialect.metrics)
    if history is None or ((other or added) and not any(path.is_file() for path in history.pieces())):
        start_s, end_s = _range(config)
        record = {"format": FORMAT, "start_s": start_s, "end_s": end_s, "dialect": dialect.text,
                  "asked": config.asked()}  # fmt: skip
        write_json(out / RECORD, record)
        return History(out, record)
    if other:
        listed = ", ".join(f"--{name}" for name in sorted(other))
        raise ConfigError(f"{out}: holds a history with other {listed}; give the same options, or another folder")
    if added:
        names = ", ".join(sorted(metric.name for metric in added))
        log.warning("%s: continues with the metrics that it was begun with, without %s; fetch into another folder for "
                    "these", out, names)  # fmt: skip
    return history


def _other(config: HistoryConfig, dialect: Dialect, history: History) -> set[str]:
    """Return the options that differ from those of a history; a dialect that only adds metrics counts as equal."""
    other = {key for key, value in config.asked().items() if history.record["asked"].get(key) != value}
    if history.record["dialect"] == dialect.text:
        return other
    known = history.dialect
    same = replace(dialect, metrics=known.metrics, text=known.text) == known
    return other if same and set(known.metrics) <= set(dialect.metrics) else other | {"dialect"}


def _check_same(
    client: Client, metric: Metric, transport: str, piece: Path, without: Labels, now_s: float | None
) -> None:
    """Raise ConfigError where a server has not one series of a piece that is there: at its end, or now, where given.

    An address says little: behind a forwarded port each cluster has the same one, and one server has several. A server
    that lost its data has the containers that are still there.
    """
    rows = read_piece(piece, {metric.role}).get(metric.role, [])
    if not rows:
        return
    known = {row.labels for row in rows}

    def has_some(past_ms: int) -> bool:
        found = read_series(client, metric, transport, past_ms - _COMPARED_MS, past_ms, without=without)
        return any(row.labels in known for row in found)

    if has_some(max(int(row.time_ms[-1]) for row in rows) + 1):
        return
    if now_s is None or not has_some(round(now_s * 1000)):
        raise ConfigError(
            f"{client.url}: has no series of {metric.name} that {piece} holds, so it is another server, or no longer "
            "keeps that time; pass the address that the history came from, or fetch into another folder"
        )
    log.warning(
        "%s: still has containers of %s, but no longer those samples; the history has a gap there",
        client.url, piece,
    )  # fmt: skip


def _range(config: HistoryConfig) -> tuple[int, int]:
    """Return the range of a new history: whole pieces up to its end, or to what is complete now."""
    asked = config.end_s()
    latest_s = _latest_s(time.time())
    end_s = latest_s if asked is None else min(asked - asked % PIECE_S, latest_s)
    n = max(1, round(config.days * 86_400 / PIECE_S))
    return end_s - n * PIECE_S, end_s


def _latest_s(now_s: float) -> int:
    """Return the end of the last piece that the server has whole at a time."""
    latest_s = int(now_s) - LATE_S
    return latest_s - latest_s % PIECE_S


def _clusters(dialect: Dialect) -> tuple[str, ...]:
    """Return the labels that may have one value at a time: none where the dialect keeps clusters apart."""
    return () if dialect.labels["cluster"] else dialect.clusters


def metrics_of(dialect: Dialect, config: HistoryConfig) -> list[Metric]:
    """Return the dialect's metrics, of the namespaces and the cluster asked for."""
    if config.namespace is not None and not dialect.labels["namespace"]:
        raise ConfigError(f"--namespace {config.namespace}: dialect {config.dialect} names no label for namespaces")
    out = []
    for metric in dialect.metrics:
        where = list(metric.where)
        if config.namespace is not None and not metric.cell:
            where.append(Matcher(dialect.labels["namespace"], "=~", config.namespace))
        if config.cluster is not None:
            label, _, value = config.cluster.partition("=")
            where.append(Matcher(label, "=", value))
        out.append(replace(metric, where=tuple(where)))
    return out
