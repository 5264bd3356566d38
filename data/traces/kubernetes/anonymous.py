"""Replaces all names in the tables of a history by numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from reclaim.data import schema as s
from reclaim.data.core.parquet import TableWriter

_KINDS: Final = frozenset({
    "CronJob", "DaemonSet", "Deployment", "Job", "Node", "Pod", "ReplicaSet", "ReplicationController", "StatefulSet",
})  # fmt: skip
"""Kinds that any cluster has; others may carry the name of their maker."""

Row = dict[str, Any]


def anonymise(folder: Path) -> None:
    """Rewrite the tables of a folder without a name, and with numbers from 1 for ids that are hashes of names.

    What belongs together stays together: tasks of a collection, collections of a user, pods on a machine. Times, usage,
    limits, requests and events are as they were.

    Raises
    ------
    OSError
        A table cannot be read or written, as on a full disk; it is then as it was.
    pyarrow.ArrowInvalid
        A file is no table.
    """
    numbers = _Numbers(folder)
    for path in sorted(folder.glob("*.parquet")):
        table = pq.read_table(path, partitioning=None)
        schema = table.schema
        table = numbers.ids_replaced(table)
        name = path.name.partition("-")[0]
        if name in _TEXTS:
            rows = table.to_pylist()
            for row in rows:
                _TEXTS[name](row, numbers.of_text)
            table = pa.Table.from_pylist(rows, schema=schema)
        with TableWriter(path, schema) as writer:
            writer.write(table.cast(schema))


class _Numbers:
    """Numbers for the ids and texts of the tables in a folder."""

    def __init__(self, folder: Path) -> None:
        tasks, machines = [np.zeros((0, 2), np.int64)], [np.zeros(0, np.int64)]
        for path in sorted(folder.glob("*.parquet")):
            for batch in _ids_of(path):
                names = batch.schema.names
                if s.INSTANCE_INDEX in names:
                    tasks.append(np.unique(np.column_stack([_ints(batch[key]) for key in s.TASK_KEY]), axis=0))
                elif s.COLLECTION_ID in names:
                    own = np.unique(_ints(batch[s.COLLECTION_ID]))
                    tasks.append(np.column_stack([own, np.full_like(own, s.UNKNOWN_ID)]))
                if s.MACHINE_ID in names:
                    machines.append(np.unique(_ints(batch[s.MACHINE_ID])))
        known = np.unique(np.concatenate(machines))
        self._machines = known[known != s.UNKNOWN_ID]
        self._tasks = np.unique(np.concatenate(tasks), axis=0)  # by collection, then index
        self._tasks = self._tasks[self._tasks[:, 1] != s.UNKNOWN_ID]
        self._collections = np.unique(np.concatenate([of[:, 0] for of in tasks]))
        self._indexes = np.unique(self._tasks[:, 1])
        self._known = self._keys(self._tasks)  # ascending
        self._first = np.searchsorted(self._tasks[:, 0], self._collections)  # task of each collection
        self._texts: dict[str, dict[tuple[str, ...], int]] = {}

    def _keys(self, tasks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return one number for each task, shape (n, 2) to (n,), in the order of collection and index."""
        collection = np.searchsorted(self._collections, tasks[:, 0])
        return collection * len(self._indexes) + np.searchsorted(self._indexes, tasks[:, 1])

    def of_text(self, what: str, *names: str | None) -> str | None:
        """Return the number of a text among those of its kind: the first one seen is 1; None for None."""
        if names[-1] is None:
            return None
        known = self._texts.setdefault(what, {})
        return f"{what}-{known.setdefault(tuple(name or '' for name in names), len(known) + 1)}"

    def ids_replaced(self, table: pa.Table) -> pa.Table:
        """Return a table with numbers for its ids; those that are unknown stay."""
        names = table.schema.names
        new: dict[str, NDArray[np.int64]] = {}
        if s.COLLECTION_ID in names:
            collection = _ints(table[s.COLLECTION_ID])
            new[s.COLLECTION_ID] = np.searchsorted(self._collections, collection) + 1
        if s.INSTANCE_INDEX in names:
            index = _ints(table[s.INSTANCE_INDEX])
            order = np.searchsorted(self._known, self._keys(np.column_stack([collection, index])))
            found = order - self._first[new[s.COLLECTION_ID] - 1]
            new[s.INSTANCE_INDEX] = np.where(index == s.UNKNOWN_ID, s.UNKNOWN_ID, found)
        if s.MACHINE_ID in names:
            machine = _ints(table[s.MACHINE_ID])
            found = np.searchsorted(self._machines, machine) + 1
            new[s.MACHINE_ID] = np.where(machine == s.UNKNOWN_ID, s.UNKNOWN_ID, found)
        for name, values in new.items():
            mask = table[name].is_null().combine_chunks().to_numpy(zero_copy_only=False)
            table = table.set_column(names.index(name), table.schema.field(name), pa.array(values, mask=mask))
        return table


def _ids_of(path: Path) -> Iterator[pa.RecordBatch]:
    file = pq.ParquetFile(path)
    wanted = [name for name in (*s.TASK_KEY, s.MACHINE_ID) if name in file.schema_arrow.names]
    with file:
        yield from file.iter_batches(columns=wanted)


def _ints(column: Any) -> NDArray[np.int64]:
    found: NDArray[np.int64] = column.fill_null(s.UNKNOWN_ID).to_numpy(zero_copy_only=False).astype(np.int64)
    return found


def _collections(row: Row, number: Callable[..., str | None]) -> None:
    for column, what in ((s.USER_ID, "user"), (s.NAME_ID, "name"), (s.LOGICAL_NAME_ID, "program")):
        row[column] = number(what, row[column])


def _machines(row: Row, number: Callable[..., str | None]) -> None:
    row[s.MACHINE_NAME] = number("machine", row[s.MACHINE_NAME])


def _names(row: Row, number: Callable[..., str | None]) -> None:
    cluster, space, kind = row[s.CLUSTER], row[s.NAMESPACE], row[s.WORKLOAD_KIND]
    row[s.CLUSTER], row[s.NAMESPACE] = number("cluster", cluster), number("namespace", cluster, space)
    row[s.WORKLOAD] = number("workload", cluster, space, kind, row[s.WORKLOAD])
    row[s.WORKLOAD_KIND] = kind if kind in _KINDS else number("kind", kind)
    row[s.CONTAINER] = number("container", row[s.CONTAINER])
    row[s.POD] = number("pod", cluster, space, row[s.POD])
    row[s.AUTOSCALER] = number("autoscaler", cluster, space, row[s.AUTOSCALER])
    _machines(row, number)


_TEXTS: Final = {"collections": _collections, "machines": _machines, "names": _names}
"""Table → function that replaces a row's texts by numbers."""
