"""Placement constraints of tasks at any time, and the machines whose attributes meet them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from reclaim.data import schema as s
from reclaim.data.core.arrays import is_first, is_last
from reclaim.data.dataset import Dataset
from reclaim.data.windows import identities

NO_SET: Final = 0
"""The constraint set of a task without constraints."""

Constraint = tuple[str, int, str]
"""Attribute, position in ``schema.RELATIONS``, and the value to compare with: ``machine's value RELATION value``."""


@dataclass(frozen=True)
class Constraints:
    """Constraints of every task of a dataset over time.

    Tasks with the same constraints share a set, so a machine is checked once for each set, not for each task: the
    equivalence classes of Borg's scheduler (EuroSys'15, section 3.4).

    Attributes
    ----------
    collection_id, instance_index, time_us : int64, shape (n,)
        Sorted by task, then time: from then on the task has the set.
    number : int64, shape (n,)
        The set, a position in ``sets``.
    sets : sequence of tuple of Constraint
        All of a set must hold; ``NO_SET`` is empty.
    attributes : mapping of str to array
        The columns of the dataset's ``attributes`` table, sorted by machine, name and time; of one time, deletions
        come first.
    """

    collection_id: NDArray[np.int64]
    instance_index: NDArray[np.int64]
    time_us: NDArray[np.int64]
    number: NDArray[np.int64]
    sets: Sequence[tuple[Constraint, ...]]
    attributes: Mapping[str, NDArray[Any]]

    @classmethod
    def read(cls, dataset: Dataset) -> Constraints:
        """Read the constraints and the attributes of a dataset."""
        parts = [dataset.constraints(bucket) for bucket in range(dataset.n_buckets)]
        table = pa.concat_tables(parts).sort_by([(name, "ascending") for name in (*s.TASK_KEY, s.TIME_US)])
        collection, instance, time = (table[name].to_numpy() for name in (*s.TASK_KEY, s.TIME_US))
        first = np.flatnonzero(is_first(collection, instance, time))
        number, sets = _sets(table, first)
        attributes = dataset.table("attributes").sort_by(
            [(name, "ascending") for name in (s.MACHINE_ID, s.ATTRIBUTE_NAME, s.TIME_US)]
            + [(s.ATTRIBUTE_DELETED, "descending")]  # of one time, what was deleted is then set
        )
        return cls(
            collection_id=collection[first],
            instance_index=instance[first],
            time_us=time[first],
            number=number,
            sets=sets,
            attributes={
                name: attributes[name].to_numpy()
                for name in (s.MACHINE_ID, s.ATTRIBUTE_NAME, s.TIME_US, s.ATTRIBUTE_VALUE, s.ATTRIBUTE_DELETED)
            },
        )

    def set_of(
        self,
        collection_id: NDArray[np.int64],
        instance_index: NDArray[np.int64],
        time_us: NDArray[np.int64] | int,
    ) -> NDArray[np.int64]:
        """Return the current set of each task at its time, ``NO_SET`` for none; shape (n,).

        It is the last one that came with an event of the task. Events without constraints change nothing: in the v2
        trace only some carry them.
        """
        at_us = np.broadcast_to(np.asarray(time_us, np.int64), collection_id.shape)
        known = len(self.number)
        keys = [
            np.concatenate([mine, theirs])
            for mine, theirs in (
                (self.time_us, at_us),
                (self.instance_index, instance_index),
                (self.collection_id, collection_id),
            )
        ]
        order = np.lexsort((np.arange(known + len(at_us)) >= known, *keys))  # at one time, records come first
        before = np.maximum.accumulate(np.where(order < known, np.arange(len(order)), -1))
        at = order[before[order >= known]]  # where ``before`` is -1 this is the last of all, of another task
        row = order[order >= known] - known
        same = before[order >= known] >= 0
        same &= (keys[2][at] == collection_id[row]) & (keys[1][at] == instance_index[row])
        out = np.full(len(at_us), NO_SET, np.int64)
        out[row[same]] = self.number[at[same]]
        return out

    def allowed(self, machine_id: NDArray[np.int64], time_us: int) -> NDArray[np.bool_]:
        """Return on which machines each set holds at a time; shape (n_sets, n_machines)."""
        values = self._attributes_at(time_us)
        holds: dict[Constraint, NDArray[np.bool_]] = {}
        out = np.ones((len(self.sets), len(machine_id)), np.bool_)
        for mask, constraints in zip(out, self.sets, strict=True):
            for constraint in constraints:
                if constraint not in holds:
                    name, relation, value = constraint
                    of_name = values.get(name, {})
                    holds[constraint] = np.array(
                        [satisfies(of_name.get(machine), relation, value) for machine in machine_id.tolist()], np.bool_
                    )
                mask &= holds[constraint]
        return out

    def _attributes_at(self, time_us: int) -> dict[str, dict[int, str]]:
        """Return the value of every attribute that machines have at a time, by name and machine."""
        a = self.attributes
        rows = np.flatnonzero(a[s.TIME_US] <= time_us)
        machine, name = a[s.MACHINE_ID][rows], a[s.ATTRIBUTE_NAME][rows]
        out: dict[str, dict[int, str]] = {}
        for row in rows[is_last(machine, name)].tolist():
            if not a[s.ATTRIBUTE_DELETED][row]:
                of_name = out.setdefault(a[s.ATTRIBUTE_NAME][row], {})
                of_name[int(a[s.MACHINE_ID][row])] = a[s.ATTRIBUTE_VALUE][row] or ""
        return out


def satisfies(machine_value: str | None, relation: int, value: str) -> bool:
    """Return whether a machine's value, None where it has no such attribute, stands in a relation to a constraint's.

    As the traces define it (Google cluster-usage traces v3, "Machine constraints"): equality is that of strings, an
    attribute that is absent is the empty one; order is that of integers, an absent one is 0. A value that is not an
    integer has no order, and meets no such constraint.
    """
    match s.RELATIONS[relation]:
        case "PRESENT":
            return machine_value is not None
        case "NOT_PRESENT":
            return machine_value is None
        case "EQUAL":
            return (machine_value or "") == value
        case "NOT_EQUAL":
            return (machine_value or "") != value
        case order:
            left, right = _integer(machine_value), _integer(value)
            return left is not None and right is not None and _ORDERS[order](left, right)


def most_per_machine(dataset: Dataset, collection_id: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return how many tasks of each collection may share a machine; shape (n,), 0 for any number.

    The collections' own bound, as last set; 1 where a trace says that the tasks want different machines.
    """
    table = dataset.table("collections").select([s.COLLECTION_ID, s.TIME_US, s.MAX_PER_MACHINE])
    bounded = table.filter(pc.is_valid(table[s.MAX_PER_MACHINE])).sort_by(s.TIME_US)
    bound = dict(zip(bounded[s.COLLECTION_ID].to_pylist(), bounded[s.MAX_PER_MACHINE].to_pylist(), strict=True))
    if s.DIFFERENT_MACHINES in dataset.manifest["extras"].get("events", ()):
        for bucket in range(dataset.n_buckets):
            events = dataset.events(bucket, [s.COLLECTION_ID, s.DIFFERENT_MACHINES])
            apart = events.filter(pc.fill_null(events[s.DIFFERENT_MACHINES], False))
            bound |= dict.fromkeys(apart[s.COLLECTION_ID].unique().to_pylist(), 1)
    return np.array([bound.get(c, 0) for c in collection_id.tolist()], np.int64)


_ORDERS: Final[Mapping[str, Callable[[int, int], bool]]] = {
    "LESS_THAN": int.__lt__,
    "GREATER_THAN": int.__gt__,
    "LESS_THAN_EQUAL": int.__le__,
    "GREATER_THAN_EQUAL": int.__ge__,
}


def _integer(text: str | None) -> int | None:
    """Return the integer of a value: 0 for an absent or an empty one, None for a value that is not an integer."""
    if not text:
        return 0
    try:
        return int(text)
    except ValueError:
        return None


def _sets(table: pa.Table, first: NDArray[np.int64]) -> tuple[NDArray[np.int64], list[tuple[Constraint, ...]]]:
    """Return the number of each set of constraints, and the sets by number; sets begin at rows ``first``."""
    names, relations = (table[n].combine_chunks().dictionary_encode() for n in (s.ATTRIBUTE_NAME, s.RELATION))
    values = table[s.ATTRIBUTE_VALUE].combine_chunks().fill_null("").dictionary_encode()
    columns = [column.indices.to_numpy() for column in (names, relations, values)]
    distinct, which = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)
    constraints = [
        (names.dictionary[i].as_py(), relations.dictionary[j].as_py(), values.dictionary[k].as_py())
        for i, j, k in distinct.tolist()
    ]
    # A set is identified by the sum of its constraints' numbers, each 63 bits, in any order; a constraint occurs
    # in a set once.
    number_of = identities(repr(c) for c in constraints).astype(np.uint64)
    sums = np.add.reduceat(number_of[which], first) if len(first) else np.zeros(0, np.uint64)
    _, at, number = np.unique(sums, return_index=True, return_inverse=True)
    ends = np.append(first, len(table))
    sets = [tuple(constraints[i] for i in sorted(which[ends[g] : ends[g + 1]].tolist())) for g in at.tolist()]
    return number.astype(np.int64) + 1, [(), *sets]
