"""Names the tasks of predictions, where their dataset has names."""

from __future__ import annotations

import pandas as pd
import pyarrow as pa

from reclaim.data import schema as s
from reclaim.data.dataset import Dataset
from reclaim.serving.predictions.columns import NAMES


class Names:
    """Names of the tasks of a dataset.

    Parameters
    ----------
    dataset : Dataset
        One that is ``named``.
    """

    def __init__(self, dataset: Dataset) -> None:
        table = dataset.table("names")
        places = pd.Series(range(len(table)), _index(table))
        self._places = places[~places.index.duplicated(keep="last")]
        self._names = {column: table[name].combine_chunks() for column, (name, _) in NAMES.items()}

    def added(self, table: pa.Table) -> pa.Table:
        """Return predictions, ``n`` rows, with ``NAMES`` after the key of the task; null where it has no name."""
        at = self._places.index.get_indexer(_index(table))
        where = pa.array(self._places.to_numpy()[at], mask=at < 0)
        for place, (column, names) in enumerate(self._names.items(), len(s.TASK_KEY)):
            table = table.add_column(place, pa.field(column, pa.string()), names.take(where))
        return table


def _index(table: pa.Table) -> pd.MultiIndex:
    return pd.MultiIndex.from_arrays([table[name].to_numpy() for name in s.TASK_KEY])
