"""Reads chosen features and targets of chosen rows as a table, with the task and the time of each row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from reclaim.data import schema as s
from reclaim.data.core.parallel import THREADS
from reclaim.data.dataset import Dataset, rows_of_tasks
from reclaim.data.errors import ConfigError, SchemaError
from reclaim.features.feature_set import FeatureSet
from reclaim.features.registry import FEATURE_NAMES
from reclaim.features.splits import PERIODS
from reclaim.features.targets import HORIZONS_S, TARGETS


def feature_table(
    dataset: Dataset,
    features: FeatureSet,
    names: Sequence[str] | None = None,
    *,
    tasks: pa.Table | None = None,
    period: str | None = None,
) -> pa.Table:
    """Return features and targets, one row per usage row, in the order of the dataset.

    Parameters
    ----------
    dataset : Dataset
    features : FeatureSet
        Of the same dataset.
    names : sequence of str or None
        Features, and targets as ``cpu_3600s`` and ``oom_3600s``; None: all features.
    tasks : pyarrow.Table or None
        As for ``Dataset.read``; None: all tasks.
    period : str or None
        One of ``splits.PERIODS``; None: all.

    Returns
    -------
    pyarrow.Table
        ``schema.TASK_KEY``, ``end_us``, ``period``, and the columns asked for, float32 with NaN where unknown.

    Raises
    ------
    ConfigError
        The period is unknown.
    SchemaError
        A name is unknown.
    """
    there = list(FEATURE_NAMES)
    targets = {f"{t}_{h}s": (i, j) for i, t in enumerate(TARGETS) for j, h in enumerate(HORIZONS_S)}
    ooms = {f"oom_{h}s": j for j, h in enumerate(HORIZONS_S)}
    chosen = there if names is None else list(names)
    if unknown := [name for name in chosen if name not in {*there, *targets, *ooms}]:
        raise SchemaError(
            f"{features.path}: no feature {', '.join(unknown)}; there are {', '.join(there[:3])} … "
            f"({len(there)}, in docs/reference.md) and the targets {', '.join([*targets, *ooms])}"
        )
    if period is not None and period not in PERIODS:
        raise ConfigError(f"period must be one of {', '.join(PERIODS)}, got {period!r}")
    keys = dataset.read("usage", list(s.TASK_KEY))
    rows = np.arange(len(keys)) if tasks is None else np.flatnonzero(rows_of_tasks(keys, tasks))
    tables = [_no_rows(chosen)]
    for number, mine in features.by_bucket(rows):
        bucket = features.bucket(number)
        labels = bucket.labels
        if period is not None:
            mine = mine[labels.period[mine] == PERIODS.index(period)]
        of_x = [name for name in chosen if name in there]
        x = bucket.features(mine, THREADS)[:, [there.index(name) for name in of_x]]
        values = dict(zip(of_x, x.T, strict=True))
        values |= {name: labels.y[mine, i, j] for name, (i, j) in targets.items() if name in chosen}
        values |= {name: labels.oom[mine, j] for name, j in ooms.items() if name in chosen}
        columns = {name: keys[name].take(pa.array(bucket.first + mine)) for name in s.TASK_KEY}
        columns[s.END_US] = pa.array(labels.end_us[mine])
        columns["period"] = pa.DictionaryArray.from_arrays(pa.array(labels.period[mine].astype(np.int8)), list(PERIODS))
        tables.append(pa.table(columns | {name: pa.array(np.ascontiguousarray(values[name])) for name in chosen}))
    return pa.concat_tables(tables)


def _no_rows(names: Sequence[str]) -> pa.Table:
    """Return the table without a row."""
    kinds = {name: pa.int64() for name in (*s.TASK_KEY, s.END_US)} | {"period": pa.dictionary(pa.int8(), pa.string())}
    return pa.schema([*kinds.items(), *((name, pa.float32()) for name in names)]).empty_table()
