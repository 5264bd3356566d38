"""Reads the windows of all tasks by workload, and makes one series of the largest task of each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from reclaim.data import schema as s
from reclaim.data import windows as w
from reclaim.data.core.arrays import is_first
from reclaim.data.core.engine.workers import HERE, Engine
from reclaim.data.dataset import Dataset
from reclaim.data.oom import oom_columns, oom_events
from reclaim.data.schema import MEMORY_AT, RESOURCES
from reclaim.data.windows import Windows, demand, empty_windows
from reclaim.features.feature_set import FeatureSet
from reclaim.features.registry import SLOT_US

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

_AT_ONCE: Final = 500_000
"""Windows of the series that are laid out at once, about: 120 MB."""
_MOST_DOUBLED: Final = 1 << 16
"""More than the doublings from the smallest to the largest float."""
_NONE: Final = np.zeros(0, np.int64)


@dataclass(frozen=True)
class TaskRows:
    """The ``n`` windows of all tasks at top level, those of one task together and in time order.

    Attributes
    ----------
    ids : int64, shape (n_workloads,)
        Collection of each workload, rising.
    workload, task : int64, shape (n,)
        Position in ``ids``; number of the task, from 0.
    start_us, end_us : int64, shape (n,), µs on the trace's clock
    scheduled_us : int64, shape (n,), µs
        Start of the task's run; 0 before the trace, -1 unknown.
    demand, limit, enforced, request : float64, shape (n, n_resources), trace's unit
        NaN unknown. Where a dataset has no requests and enforced limits apart from limits, both are the limit.
    tier : int8, shape (n,)
    period, group : uint8, shape (n,)
        As in ``features.splits``.
    source_row : int64, shape (n,)
        Row of the feature set.
    index : int64, shape (n_tasks,)
        Instance index of each task.
    oom_workload, oom_us : int64, shape (n_events,)
        Workload and time of each out-of-memory end.
    oom_limit : float64, shape (n_events,)
        Memory that the task could not exceed then: the enforced limit; where there is none, the larger of its
        request and the largest usage in its last window, as VPA takes it.
    """

    ids: Integers
    workload: Integers
    task: Integers
    start_us: Integers
    end_us: Integers
    scheduled_us: Integers
    demand: Floats
    limit: Floats
    enforced: Floats
    request: Floats
    tier: NDArray[np.int8]
    period: NDArray[np.uint8]
    group: NDArray[np.uint8]
    source_row: Integers
    index: Integers
    oom_workload: Integers
    oom_us: Integers
    oom_limit: Floats

    def __len__(self) -> int:
        return len(self.end_us)

    @property
    def seconds(self) -> Floats:
        """Length of each window; shape (n,)."""
        return (self.end_us - self.start_us) / 1e6

    def last_at(self, time_us: int) -> Integers:
        """Return the last row of each task that has one up to a time."""
        starts = np.flatnonzero(is_first(self.task))
        count = np.add.reduceat((self.end_us <= time_us).astype(np.int64), starts) if len(starts) else starts
        return (starts + count - 1)[count > 0]


def read_rows(features: FeatureSet, engine: Engine = HERE, *, without: Integers = _NONE) -> TaskRows:
    """Read the rows of a dataset, bucket by bucket, without some collections, (n,).

    Tasks inside an alloc instance are left out, their alloc is not.
    """
    parts: list[dict[str, NDArray[np.generic]]] = []
    kills: list[tuple[Integers, Integers, Floats]] = []
    index: list[Integers] = []
    tasks = 0
    with (
        engine.pool() as pool,
        closing(pool.each(partial(_rows_of, features, without), range(features.n_buckets))) as buckets,
    ):
        for part, of_kills, of_tasks in tqdm(buckets, "read", features.n_buckets, unit="bucket", disable=None):
            part["task"] = part["task"] + tasks
            parts.append(part)
            kills.append(of_kills)
            index.append(of_tasks)
            tasks += len(of_tasks)
    # one column at a time, each released, so that there are never two copies of all
    joined = {name: np.concatenate([part.pop(name) for part in parts]) for name in list(parts[0])}
    killed, when_us, reached = (np.concatenate(of) for of in zip(*kills, strict=True))
    ids, workload = np.unique(joined.pop("collection"), return_inverse=True)
    return TaskRows(
        ids=ids.astype(np.int64), workload=workload.astype(np.int64), index=np.concatenate(index),
        oom_workload=np.searchsorted(ids, killed).astype(np.int64), oom_us=when_us, oom_limit=reached, **joined,
    )  # fmt: skip


def _rows_of(
    features: FeatureSet, without: Integers, bucket: int
) -> tuple[dict[str, NDArray[np.generic]], tuple[Integers, Integers, Floats], Integers]:
    """Return the columns of a bucket's rows, tasks from 0, its ends out of memory, and each task's index."""
    dataset = features.dataset
    windows = dataset.windows(bucket)
    period, group = features.folding.period_and_group(windows)
    task, when = oom_events(windows, dataset.events(bucket, oom_columns(dataset.manifest)))
    enforced, request = _enforced_and_requested(dataset, bucket, windows)
    kills = _kills(windows, task, when, enforced[:, MEMORY_AT], request[:, MEMORY_AT])
    kept = ~np.isin(kills[0], without)
    kills = kills[0][kept], kills[1][kept], kills[2][kept]
    keep = np.flatnonzero(~windows.in_alloc & ~np.isin(windows.collection_id, without))
    windows = windows.take(keep)
    columns: dict[str, NDArray[np.generic]] = {
        "collection": windows.collection_id, "task": windows.task_numbers(), "start_us": windows.start_us,
        "end_us": windows.end_us, "scheduled_us": windows.scheduled_us, "demand": demand(windows),
        "limit": windows.limit,
        "enforced": enforced[keep], "request": request[keep],
        "tier": windows.tier,
        "period": period[keep], "group": group[keep], "source_row": features.bucket_start[bucket] + keep,
    }  # fmt: skip
    return columns, kills, windows.instance_index[windows.task_starts()[:-1]]


def _enforced_and_requested(dataset: Dataset, bucket: int, windows: Windows) -> tuple[Floats, Floats]:
    """Return enforced limits and requests of a bucket's windows; both the limit where a dataset has neither."""
    found = []
    for names in ((s.CPU_ENFORCED, s.MEMORY_ENFORCED), (s.CPU_REQUEST, s.MEMORY_REQUEST)):
        if set(names) <= set(dataset.manifest.get("extras", {}).get("usage", ())):
            table = dataset.usage(bucket, list(names))
            found.append(np.stack([table[name].to_numpy().astype(np.float64) for name in names], axis=1))
        else:
            found.append(windows.limit)
    return found[0], found[1]


def _kills(
    windows: Windows, task: Integers, when_us: Integers, enforced: Floats, request: Floats
) -> tuple[Integers, Integers, Floats]:
    """Return collection, time and ``oom_limit`` of out-of-memory ends of tasks at top level.

    A limit that the dataset assumed, where none is enforced, stopped no task: the node was out of memory.
    """
    starts = windows.task_starts()
    row = np.array(
        [
            starts[k] + max(np.searchsorted(windows.start_us[starts[k] : starts[k + 1]], t) - 1, 0)
            for k, t in zip(task, when_us, strict=True)
        ],
        np.int64,
    )
    top = ~windows.in_alloc[row]
    row = row[top]
    reached = np.fmax(request[row], demand(windows)[row, MEMORY_AT])
    return windows.collection_id[row], when_us[top], np.where(np.isnan(enforced[row]), reached, enforced[row])


@dataclass(frozen=True)
class Series:
    """One series per workload: in each slot of time the largest demand of any of its tasks.

    Rows stand by workload, then time.

    Attributes
    ----------
    workload : int64, shape (n,)
    start_us, end_us : int64, shape (n,)
        From the first start to the last end of the windows that end in the slot; the row is known at ``end_us``.
    demand, limit, enforced, request : float64, shape (n, n_resources)
        The largest of any task.
    tier : int8, shape (n,)
    n_workloads : int
    """

    workload: Integers
    start_us: Integers
    end_us: Integers
    demand: Floats
    limit: Floats
    enforced: Floats
    request: Floats
    tier: NDArray[np.int8]
    n_workloads: int

    def last_before(self, workload: Integers, time_us: Integers) -> Integers:
        """Return the last row of each workload that is known at each time, -1 for none; shape (n_asked,)."""
        starts = np.searchsorted(self.workload, np.arange(self.n_workloads + 1))
        out = np.full(len(workload), -1, np.int64)
        for at in np.unique(time_us):
            asked = np.flatnonzero(time_us == at)
            known = np.concatenate([[0], np.cumsum(self.end_us <= at)])
            count = known[starts[1:]] - known[starts[:-1]]  # ends rise within a workload
            mine = workload[asked]
            out[asked] = np.where(count[mine] > 0, starts[mine] + count[mine] - 1, -1)
        return out

    def chunks(self) -> Iterator[slice]:
        """Yield the rows of whole workloads, about ``_AT_ONCE`` at a time."""
        edges = [*np.flatnonzero(is_first(self.workload)).tolist(), len(self.workload)]
        first = 0
        for edge in edges[1:]:
            if edge - first >= _AT_ONCE or edge == edges[-1]:
                yield slice(first, edge)
                first = edge

    def windows(self, rows: slice) -> tuple[Windows, Integers]:
        """Return rows of whole workloads as windows, each workload as if it were one task, and the place of each row.

        Estimators keep usage over the limit, and multiply their answer by the limit of the last row: a changed limit
        would rescale all earlier usage. So a workload has one limit here, its first one, doubled until none so far is
        larger. Where it has to be doubled, the workload is repeated from its beginning under the larger one, so that
        the answer at a row depends on no later limit.
        """
        workload, limit = self.workload[rows], self.limit[rows]
        first = is_first(workload)
        of = np.cumsum(first) - 1
        begins = np.flatnonzero(first)[of]
        held = _limits_so_far(limit, of)
        again = first.copy()
        again[1:] |= ((held[1:] != held[:-1]) & ~np.isnan(held[1:])).any(axis=1)
        starts = np.flatnonzero(again)
        ends = np.append(starts[1:], len(workload))
        lengths = ends - begins[starts]
        task = np.repeat(np.arange(len(starts)), lengths)
        offset = np.cumsum(lengths) - lengths
        source = np.arange(len(task)) + (begins[starts] - offset)[task]
        number = np.cumsum(again) - 1
        made = empty_windows(len(source))
        made.collection_id[:] = task
        made.start_us[:], made.end_us[:] = self.start_us[rows][source], self.end_us[rows][source]
        used = self.demand[rows][source]
        made.usage[:, w.CPU_MEAN] = used[:, 0]
        made.usage[:, w.MEMORY_MEAN] = made.usage[:, w.MEMORY_MAX] = used[:, MEMORY_AT]
        made.limit[:] = np.where(np.isnan(limit[source]), np.nan, held[starts][task])
        made.tier[:] = self.tier[rows][source]
        return made, offset[number] + np.arange(len(workload)) - begins


def _limits_so_far(limit: Floats, task: Integers) -> Floats:
    """Return the first limit of each task, doubled as often as the largest limit so far takes; (n, n_resources).

    Tasks are numbered from 0, and their rows stand together. NaN before the first limit.
    """
    held, row = np.full(limit.shape, np.nan), np.arange(len(limit))
    starts = np.flatnonzero(is_first(task))
    for r in range(limit.shape[1]):
        known = limit[:, r] > 0
        begin = np.minimum.reduceat(np.where(known, row, len(row)), starts)[task]  # row of the task's first limit
        base = np.append(limit[:, r], np.nan)[begin]
        times = np.zeros(len(row), np.int64)
        times[known] = np.maximum(np.ceil(np.log2(limit[known, r] / base[known])), 0)
        times[known] += base[known] * np.exp2(times[known]) < limit[known, r]  # a logarithm may be off by a rounding
        most = np.maximum.accumulate(times + task * _MOST_DOUBLED) - task * _MOST_DOUBLED
        held[:, r] = np.where(row >= begin, base * np.exp2(most), np.nan)
    return held


def largest_task(rows: TaskRows) -> Series:
    """Return the series of the largest task of each workload."""
    lengths = rows.end_us - rows.start_us
    slot_us = max(SLOT_US, int(np.median(lengths)) if len(rows) else 0)
    slot = (rows.end_us - 1) // slot_us
    order = np.lexsort((slot, rows.workload))
    starts = np.flatnonzero(is_first(rows.workload[order], slot[order]))

    def most(values: Floats) -> Floats:
        return np.asarray(np.fmax.reduceat(values[order], starts))

    return Series(
        workload=rows.workload[order][starts],
        start_us=np.minimum.reduceat(rows.start_us[order], starts),
        end_us=np.maximum.reduceat(rows.end_us[order], starts),
        demand=most(rows.demand), limit=most(rows.limit),
        enforced=most(rows.enforced), request=most(rows.request),
        tier=np.maximum.reduceat(rows.tier[order], starts),
        n_workloads=len(rows.ids),
    )  # fmt: skip


def peaks_by_task(rows: TaskRows, chosen: Integers) -> tuple[Integers, Floats]:
    """Return the tasks of chosen rows, and the largest demand of each in them; (n_tasks,), (n_tasks, R)."""
    tasks, at = np.unique(rows.task[chosen], return_inverse=True)
    peak = np.full((len(tasks), len(RESOURCES)), np.nan)
    np.fmax.at(peak, at, rows.demand[chosen])
    return tasks.astype(np.int64), peak
