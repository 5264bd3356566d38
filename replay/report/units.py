"""Writes and reads the numbers behind a replay's results, by unit and by resample, to compare replays pairwise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from reclaim.data.errors import DataError
from reclaim.data.schema import RESOURCES
from reclaim.replay.open_loop.metrics import STATS

UNITS: Final = "units.parquet"
"""File next to ``results.json``: one row per unit, estimator, margin and resource."""

EQUAL: Final = "equal_violation.parquet"
"""File next to it: what each estimator reclaims at each budget, of all units and of each resample."""
_UNIT, _UNSEEN, _ESTIMATOR, _MARGIN, _RESOURCE = "unit", "unseen", "estimator", "margin", "resource"
_DRAW, _RECLAIMED = "draw", "reclaimed_share"
_FIXED: Final = ("rows", "granted")
"""Statistics that depend on the rows alone: equal where two replays judged the same task-windows."""


@dataclass(frozen=True)
class UnitSums:
    """Additive statistics of every estimator and margin of one replay.

    Attributes
    ----------
    unit : int64, shape (n_units,)
        Collections of the test rows, ascending.
    unseen : bool, shape (n_units,)
        Whether no model was trained or tuned on the collection.
    sums : mapping of (estimator, margin) to float64, shape (n_units, len(STATS), n_resources)
        See ``metrics.sums``.
    """

    unit: NDArray[np.int64]
    unseen: NDArray[np.bool_]
    sums: Mapping[tuple[str, str], NDArray[np.float64]]

    def same_rows(self, other: UnitSums) -> bool:
        """Say whether both judged the same task-windows, so that they can be paired."""
        if not np.array_equal(self.unit, other.unit) or not self.sums or not other.sums:
            return False
        fixed = [list(STATS).index(name) for name in _FIXED]
        one, two = (next(iter(u.sums.values()))[:, fixed] for u in (self, other))
        return np.array_equal(one[:, 0], two[:, 0]) and np.allclose(one, two, rtol=1e-9, atol=0.0)


def write_units(units: UnitSums, folder: Path) -> None:
    """Write ``units.parquet`` into a folder; the same sums give the same bytes."""
    n = len(units.unit)
    names = [(estimator, margin, r) for estimator, margin in units.sums for r in range(len(RESOURCES))]

    columns = {
        _UNIT: np.tile(units.unit, len(names)),
        _UNSEEN: np.tile(units.unseen, len(names)),
        **_named(names, n),
    }
    for i, stat in enumerate(STATS):
        columns[stat] = np.concatenate([units.sums[e, m][:, i, r] for e, m, r in names] or [np.zeros(0)])
    pq.write_table(pa.table(columns), folder / UNITS, compression="zstd")


def write_equal(reclaimed: Mapping[str, Mapping[str, NDArray[np.float64]]], folder: Path) -> None:
    """Write ``equal_violation.parquet`` into a folder: (1 + draws, n_resources) by margin of each estimator."""
    flat = {(estimator, margin): of for estimator, by_margin in reclaimed.items() for margin, of in by_margin.items()}
    names = [(estimator, margin, r) for estimator, margin in flat for r in range(len(RESOURCES))]
    n = len(next(iter(flat.values()), ()))
    columns = {
        _DRAW: np.tile(np.arange(n, dtype=np.int32), len(names)),
        **_named(names, n),
        _RECLAIMED: np.concatenate([flat[e, m][:, r] for e, m, r in names] or [np.zeros(0)]),
    }
    pq.write_table(pa.table(columns), folder / EQUAL, compression="zstd")


def read_equal(path: Path) -> dict[tuple[str, str], NDArray[np.float64]]:
    """Read ``equal_violation.parquet``.

    Raises
    ------
    DataError
        The file is damaged or of another version.
    """
    with _refused(path):
        table = pq.read_table(path)
        names = _names(table)
        values = table[_RECLAIMED].to_numpy().reshape(max(len(names), 1), len(RESOURCES), -1)
        return {name: values[i].T for i, name in enumerate(names)}


def read_units(path: Path) -> UnitSums:
    """Read ``units.parquet``.

    Raises
    ------
    DataError
        The file is damaged or of another version.
    """
    with _refused(path):
        table = pq.read_table(path)
        names = _names(table)
        blocks = max(len(names) * len(RESOURCES), 1)
        values = np.stack([table[stat].to_numpy() for stat in STATS])  # (S, E·R·U)
        shaped = values.reshape(len(STATS), len(names), len(RESOURCES), -1).transpose(1, 3, 0, 2)
        n = len(table) // blocks
        return UnitSums(
            unit=table[_UNIT].to_numpy()[:n],
            unseen=table[_UNSEEN].to_numpy()[:n],
            sums={name: shaped[i] for i, name in enumerate(names)},
        )


def _named(names: Sequence[tuple[str, str, int]], n: int) -> dict[str, pa.DictionaryArray]:
    """Return the columns that name each of ``n`` rows for each estimator, margin and resource."""

    def words(column: list[str]) -> pa.DictionaryArray:
        distinct = list(dict.fromkeys(column))
        index = np.repeat([distinct.index(word) for word in column], n).astype(np.int32)
        return pa.DictionaryArray.from_arrays(pa.array(index), pa.array(distinct, pa.string()))

    return {
        _ESTIMATOR: words([estimator for estimator, _, _ in names]),
        _MARGIN: words([margin for _, margin, _ in names]),
        _RESOURCE: words([RESOURCES[r] for _, _, r in names]),
    }


def _names(table: pa.Table) -> list[tuple[str, str]]:
    """Return estimators and margins in the order of their rows."""
    keys = zip(*(table[name].to_pylist() for name in (_ESTIMATOR, _MARGIN)), strict=True)
    return list(dict.fromkeys(keys))


@contextmanager
def _refused(path: Path) -> Iterator[None]:
    """Refuse a file that cannot be read or does not hold what it should."""
    try:
        yield
    except (OSError, KeyError, ValueError, pa.ArrowException) as error:
        raise DataError(f"{path}: damaged, or of another version ({error}); replay again") from error
