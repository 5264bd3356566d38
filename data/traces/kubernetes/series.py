"""Groups series by container: takes one of several copies, and returns the value of a series at a time."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from reclaim.data.samples import LONGEST_STEP_US, NO_SAMPLES, WINDOW_US, Samples
from reclaim.data.traces.dialect import Dialect
from reclaim.data.traces.history import RawSeries

_MS_US: Final = 1000
Labels = tuple[tuple[str, str], ...]
_MEASURED: Final = ("id", "name", "cpu")
"""Labels by which cAdvisor distinguishes the measurements of a container: its cgroup, its name and the core."""


class ContainerKey(NamedTuple):
    """Names that identify a container of a pod."""

    cluster: str
    namespace: str
    pod: str
    container: str


def by_container(series: Iterable[RawSeries], dialect: Dialect) -> dict[ContainerKey, list[RawSeries]]:
    """Return the series of each container, as one scraper has them: the preferred one, else that of most samples.

    More than ``LONGEST_STEP_US`` before and after its time, the series of another one count: a label of the scraper has
    changed.
    """
    found: dict[ContainerKey, dict[tuple[str, ...], list[RawSeries]]] = {}
    names = ("cluster", "namespace", "pod", "container")
    for one in series:
        of = one.named
        key = ContainerKey(*(dialect.named(of, name) for name in names))
        if key.pod and key.container:
            scraper = tuple(of.get(label, "") for label in dialect.scraper)
            found.setdefault(key, {}).setdefault(scraper, []).append(one)
    return {key: _taken(scrapers, dialect) for key, scrapers in found.items()}


def _taken(scrapers: dict[tuple[str, ...], list[RawSeries]], dialect: Dialect) -> list[RawSeries]:
    if len(scrapers) == 1:
        return next(iter(scrapers.values()))

    def rank(scraper: tuple[str, ...]) -> tuple[bool, int, tuple[str, ...]]:
        of = scrapers[scraper][0].named
        preferred = all(of.get(label) == value for label, value in dialect.preferred.items())
        return not preferred, -sum(len(one.value) for one in scrapers[scraper]), scraper

    first, *others = sorted(scrapers, key=rank)
    taken = list(scrapers[first])
    for scraper in others:
        begin = min(int(one.time_ms[0]) for one in taken) - LONGEST_STEP_US // _MS_US
        end = max(int(one.time_ms[-1]) for one in taken) + LONGEST_STEP_US // _MS_US
        apart = [(one, (one.time_ms < begin) | (one.time_ms > end)) for one in scrapers[scraper]]
        taken += [RawSeries(one.labels, one.time_ms[kept], one.value[kept]) for one, kept in apart if kept.any()]
    return taken


def _of_one_copy(series: list[RawSeries], before: Collection[Labels]) -> tuple[list[RawSeries], str]:
    """Return the series of one cgroup without the samples of copies, and the labels in which copies differ, in words.

    Each copy has all of the container's usage, so rates of two are not added up. One counts: one of ``before``, which
    the last piece took, else that of most samples; another one outside of its time, where it has at least two samples.
    Two that overlap for less than half a window are no copies: a label that changes ends one series and begins another,
    and each of several scrapers does so in its own time.
    """
    first, *others = sorted(series, key=lambda one: (one.labels not in before, -len(one.value), one.labels))
    taken, differ = [first], ""
    for one in others:
        begin, end = min(of.time_ms[0] for of in taken), max(of.time_ms[-1] for of in taken)
        if (min(end, one.time_ms[-1]) - max(begin, one.time_ms[0])) * _MS_US > WINDOW_US // 2:
            differ = differ or _differ(first.named, one.named)
        taken += [RawSeries(one.labels, one.time_ms[at], one.value[at])
                  for at in (one.time_ms < begin, one.time_ms > end) if np.count_nonzero(at) > 1]  # fmt: skip
    return taken, differ


def _differ(of: dict[str, str], other: dict[str, str]) -> str:
    """Return the labels in which two series differ, in words."""
    return ", ".join(name for name in sorted(of | other) if of.get(name) != other.get(name))


def copies_in_words(differ: str) -> str:
    """Return what to do about copies that differ in some labels, as ``Tails.measured_once`` has them."""
    return (
        f"they differ in {differ}. If it names the scraper, a --dialect that lists it under `scraper` fetches one "
        "copy; if it names the cluster, a --dialect with `cluster` tells them apart"
    )


class Tails:
    """Samples of the last five minutes of a piece, from which the first rates of the next one begin."""

    def __init__(self) -> None:
        self._last: dict[Labels, RawSeries] = {}

    def measured_once(
        self, grouped: dict[ContainerKey, list[RawSeries]]
    ) -> tuple[dict[ContainerKey, list[RawSeries]], dict[ContainerKey, str]]:
        """Return a piece's series, of each cgroup those of one copy, and the labels in which copies differ, if any.

        Copies of a label that the dialect lists are not there any more: ``by_container`` has taken one.
        """
        found, twice = {}, {}
        for key, series in grouped.items():
            found[key] = series
            if len(series) > 1:
                by_cgroup: dict[tuple[str, ...], list[RawSeries]] = {}
                for one in series:
                    by_cgroup.setdefault(tuple(one.named.get(label, "") for label in _MEASURED), []).append(one)
                of_copies = [_of_one_copy(same, self._last) for same in by_cgroup.values()]
                found[key] = [one for taken, _ in of_copies for one in taken]
                if differs := [differ for _, differ in of_copies if differ]:
                    twice[key] = differs[0]
        return found, twice

    def samples(
        self, grouped: dict[ContainerKey, list[RawSeries]], tasks: dict[ContainerKey, int], start_us: int, end_us: int
    ) -> Samples:
        """Return a piece's samples, each series with its last samples before, by task; remember those of its end."""
        rows = [(tasks[key], self._with_last(one, start_us)) for key, series in grouped.items() for one in series]
        rows.sort(key=lambda row: (row[0], row[1].labels))
        self._last = {}
        for _, one in rows:
            kept = one.time_ms * _MS_US >= end_us - LONGEST_STEP_US
            if kept.any():
                self._last[one.labels] = RawSeries(one.labels, one.time_ms[kept], one.value[kept])
        if not rows:
            return NO_SAMPLES
        return Samples(
            task=np.array([task for task, _ in rows], np.int64),
            offsets=np.cumsum([0, *(len(one.value) for _, one in rows)]).astype(np.int64),
            time_us=np.concatenate([one.time_ms for _, one in rows]) * _MS_US,
            value=np.concatenate([one.value for _, one in rows]),
        )

    def _with_last(self, one: RawSeries, start_us: int) -> RawSeries:
        last = self._last.get(one.labels)
        if last is None:
            return one
        recent = last.time_ms * _MS_US >= start_us - LONGEST_STEP_US
        time_ms = np.concatenate([last.time_ms[recent], one.time_ms])
        return RawSeries(one.labels, time_ms, np.concatenate([last.value[recent], one.value]))


Said = tuple[float, int]
"""Value of a sample, and its time in µs."""
UNSAID: Final[Said] = (np.nan, -(1 << 62))
"""Placeholder where there is no sample."""


class AsOf:
    """Values of one thing over time, out of several series; the latest of them at a time counts.

    ``last`` is the last sample of what came before; samples up to its time were read then.
    """

    def __init__(self, series: Iterable[RawSeries], last: Said = UNSAID) -> None:
        parts = list(series)
        time = np.concatenate([np.zeros(0, np.int64), *(one.time_ms for one in parts)]) * _MS_US
        value = np.concatenate([np.zeros(0), *(one.value for one in parts)])
        order = np.argsort(time, kind="stable")
        order = order[time[order] > last[1]]
        self.time_us: NDArray[np.int64] = np.concatenate([[last[1]], time[order]])
        self.value: NDArray[np.float64] = np.concatenate([[last[0]], value[order]])

    def at(self, time_us: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the values at times, (n,); NaN before the first sample."""
        return np.asarray(self.value[np.searchsorted(self.time_us, time_us, side="right") - 1])

    def said_at(self, time_us: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the times of the samples that ``at`` answers by, (n,)."""
        return np.asarray(self.time_us[np.searchsorted(self.time_us, time_us, side="right") - 1])

    def changes(self) -> NDArray[np.int64]:
        """Return the places in ``value`` of samples that differ from the one before, the first ever among them."""
        return np.flatnonzero(np.diff(self.value) != 0) + 1

    @property
    def last(self) -> Said:
        """The last sample; that from before, where there is none."""
        return float(self.value[-1]), int(self.time_us[-1])


def while_said(
    amount: AsOf, listed: AsOf | None, times_us: NDArray[np.int64], begun_us: int | None
) -> NDArray[np.float64]:
    """Return an amount at times, (n,), for as long as it is reported; NaN before, after, and for none.

    An amount is removed where its pod is listed without it for longer than ``LONGEST_STEP_US``. While the exporter that
    lists the pod is silent, the amount stays.

    Parameters
    ----------
    amount : AsOf
    listed : AsOf or None
        Samples that list the pod; None: never listed; then only usage shows that the pod still runs.
    times_us : int64, shape (n,)
    begun_us : int or None
        Start of a container's first window: a pod has its amounts from its start, and is scraped a little later. A
        first sample within ``LONGEST_STEP_US`` of it counts from there on. None: no first window.
    """
    found, said = amount.at(times_us), amount.said_at(times_us)
    going_on = times_us if listed is None else listed.said_at(times_us)
    found = np.where(going_on - np.maximum(said, 0) > LONGEST_STEP_US, np.nan, found)
    if begun_us is not None and len(amount.time_us) > 1 and amount.time_us[1] - begun_us <= LONGEST_STEP_US:
        found = np.where(times_us < amount.time_us[1], amount.value[1], found)
    return found
