"""Predicts a table of histories in memory, as the service answers the same table."""

from __future__ import annotations

import json
import logging
import math
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.compute as pc

from reclaim.data import schema as s
from reclaim.data.core.parallel import THREADS
from reclaim.data.dataset import Dataset
from reclaim.data.errors import SchemaError
from reclaim.data.schema import DAY_US
from reclaim.data.windows import Cell
from reclaim.serving.answers.stateless_table import answer_histories
from reclaim.serving.monitoring.metrics import Metrics
from reclaim.serving.predictions.columns import flat
from reclaim.serving.predictions.dataset import check_margin
from reclaim.serving.settings import ServingSettings
from reclaim.serving.wire.arrow import write_table
from reclaim.serving.wire.cell_schemas import CellQuery
from reclaim.serving.wire.errors import RequestError
from reclaim.serving.wire.rows import IN_ALLOC, LOGICAL_NAME, USAGE_COLUMNS, USER
from reclaim.training.margins.margin import MARGIN_NAMES

if TYPE_CHECKING:
    from reclaim.serving.models.loader import LoadedModel

log = logging.getLogger(__name__)

_WEEK_US: Final = 7 * DAY_US
_SHORTEST_US: Final = 1_000_000
"""Length below which no window of a monitored task is: so short are all of a table whose times are in seconds."""
_UNBOUNDED: Final = 2**63 - 1
"""Rows, and words of dictionaries, of a table that is in memory already: categories may be more than its rows."""
_OWNERS: Final = {USER: s.USER_ID, LOGICAL_NAME: s.LOGICAL_NAME_ID}
"""Columns of histories that say whose a task is, and those of a dataset's tasks."""
_OF_TASK: Final = (*_OWNERS, IN_ALLOC)
"""Columns of histories that a dataset's usage does not have under the same name."""


def histories_of(dataset: Dataset, tasks: pa.Table | None = None) -> pa.Table:
    """Return the windows of a dataset in the columns of ``USAGE_COLUMNS``, as a service receives them.

    Parameters
    ----------
    dataset : Dataset
    tasks : pyarrow.Table or None
        As for ``Dataset.read``. All tasks are in memory at once.
    """
    own = [name for name in USAGE_COLUMNS if name not in _OF_TASK]
    table = dataset.read("usage", [*own, s.ALLOC_COLLECTION_ID], tasks)
    owners = dataset.read("tasks", [s.COLLECTION_ID, *_OWNERS.values()]).group_by(s.COLLECTION_ID, use_threads=False)
    owner = owners.aggregate([(name, "first") for name in _OWNERS.values()])
    at = pc.index_in(table[s.COLLECTION_ID], owner[s.COLLECTION_ID].combine_chunks())
    columns = {name: table[name] for name in own}
    columns |= {name: owner[f"{theirs}_first"].take(at) for name, theirs in _OWNERS.items()}
    columns[IN_ALLOC] = pc.is_valid(table[s.ALLOC_COLLECTION_ID])
    return pa.table({name: columns[name] for name in USAGE_COLUMNS})


def predict_histories(
    model: LoadedModel,
    histories: pa.Table,
    *,
    margin: str = MARGIN_NAMES[0],
    cell: Cell = Cell(),  # noqa: B008 - frozen
) -> pa.Table:
    """Return the predictions at the end of each history, as the service answers the same table.

    Parameters
    ----------
    model : LoadedModel
    histories : pyarrow.Table
        One row per window, in any order; columns among ``USAGE_COLUMNS``, others are left out.
    margin : str
        One of ``MARGIN_NAMES``.
    cell : Cell
        The cell that the tasks run in.

    Returns
    -------
    pyarrow.Table
        One row per task of ``schema_of``, in order of collection and index.

    Raises
    ------
    ConfigError
        The margin is unknown.
    SchemaError
        A column is missing or of the wrong type, or a row is invalid or without a limit; the message names the first.
    """
    largest = (None if math.isnan(most) else most for most in cell.largest_machine)
    settings = ServingSettings(
        margin=check_margin(margin), max_bulk_rows=_UNBOUNDED, monday_us=cell.monday_us % _WEEK_US,
        **dict(zip(("largest_cpu", "largest_memory"), largest, strict=True)),  # type: ignore[arg-type]  # by name
    )  # fmt: skip
    known = histories.select([name for name in histories.column_names if name in USAGE_COLUMNS])
    body = write_table(known.combine_chunks().replace_schema_metadata()).to_pybytes()
    try:
        answered = answer_histories(model, body, CellQuery(quantiles=True), settings, Metrics(), THREADS)
    except RequestError as error:
        raise SchemaError(f"histories: {error}; columns are {', '.join(USAGE_COLUMNS)}") from error
    about = answered.schema.metadata
    if refused := sum(json.loads(about[b"refused"]).values()):
        first = json.loads(about[b"errors"])[0]["message"]
        raise SchemaError(f"histories: {refused} of {len(histories)} rows cannot be used, the first: {first}")
    if (apart := about.get(b"amounts")) is not None:
        log.warning("%s", apart.decode())
    longest_us = pc.max(pc.subtract(histories[s.END_US], histories[s.START_US])).as_py()
    if longest_us is not None and longest_us < _SHORTEST_US:
        raise SchemaError(
            f"histories: the longest window has {longest_us} µs; {s.START_US} and {s.END_US} are in µs, not in seconds"
        )
    return flat(answered)
