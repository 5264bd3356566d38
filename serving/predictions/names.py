"""Names the tasks of predictions, where their dataset has names."""

from __future__ import annotations

import pandas as pd
import pyarrow as pa

from reclaim.data import schema as s
from reclaim.data.dataset import Dataset
from reclaim.serving.predictions.columns import NAMES


def has_names(dataset: Dataset) -> bool:
    """Return whether any task of a dataset has a name."""
    return bool(dataset.manifest["counts"].get(s.OPTIONAL[0]))


class Names:
    """Names of the tasks of a dataset that ``has_names``."""

    def __init__(self, dataset: Dataset) -> None:
        table = dataset.table(s.OPTIONAL[0])
        places = pd.Series(range(len(table)), _index(table))
        self._places = places[~places.index.duplicated(keep="last")]
        self._names = {column: table[name].combine_chunks() for column, (name, _) in NAMES.items()}

    def added(self, table: pa.Table) -> pa.Table:
        """Return rows of tasks with ``NAMES``, null for a task without a name, after the key."""
        at = self._places.index.get_indexer(_index(table))
        where = pa.array(self._places.to_numpy()[at], mask=at < 0)
        for place, (column, names) in enumerate(self._names.items(), len(s.TASK_KEY)):
            table = table.add_column(place, pa.field(column, pa.string()), names.take(where))
        return table


def _index(table: pa.Table) -> pd.MultiIndex:
    return pd.MultiIndex.from_arrays([table[name].to_numpy() for name in s.TASK_KEY])
