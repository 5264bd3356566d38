"""Stateless answers for a table of histories: what a fresh estimator says at the end of each, nothing remembered."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa

from reclaim.data import schema as s
from reclaim.data.windows import sort_windows
from reclaim.features.whole import features_of_histories
from reclaim.serving.cell_answer import answers, as_table
from reclaim.serving.engine import Engine
from reclaim.serving.query import margins_of
from reclaim.serving.rows import usage_from_arrow
from reclaim.serving.schemas import Units
from reclaim.serving.tasks import NOBODY, Known, keep_last, key_of

if TYPE_CHECKING:
    from reclaim.serving.cell_schemas import CellQuery
    from reclaim.serving.loader import LoadedModel
    from reclaim.serving.settings import ServingSettings

THREADS: Final = min(os.cpu_count() or 1, 8)
"""For large calls; more than a few wait for memory, not for cores."""


def answer_histories(model: LoadedModel, body: bytes, query: CellQuery, settings: ServingSettings) -> pa.Table:
    """Return one row per task of an Arrow stream of windows, in order of collection and index.

    Rows that are refused, and those without a limit, are left out; the table's metadata counts them by code, as
    ``refused``, and describes the first, as ``errors``.

    Raises
    ------
    RequestError
        The body is no such stream, or the query asks for what the model has not.
    """
    told = usage_from_arrow(body, settings.max_bulk_rows)
    windows, refusals = told.windows, told.refusals
    unlimited = np.isnan(windows.limit[:, 0])  # of both, or of none
    if unlimited.any():
        refusals.add("no_limit", told.row[unlimited], "a limit must be told with every window")
        windows = windows.take(~unlimited)
    key = key_of(windows)
    step = np.diff(key, axis=0)
    later = (windows.end_us[1:] > windows.end_us[:-1]) & (windows.start_us[1:] >= windows.start_us[:-1])
    if not ((step[:, 0] > 0) | ((step[:, 0] == 0) & ((step[:, 1] > 0) | ((step[:, 1] == 0) & later)))).all():
        windows = sort_windows(windows)
        key = key_of(windows)
    starts = windows.task_starts()
    engine = Engine(model, settings.cell, THREADS)
    last = windows.take(starts[1:] - 1)
    x = features_of_histories(windows, settings.cell, THREADS)
    task = np.full(len(last), NOBODY)
    keep_last(task, slice(None), last)
    task["limit"], task["limit_us"], task[s.SCHEDULED_US] = last.limit, last.start_us, last.scheduled_us
    task["windows"], task["first_us"] = np.diff(starts), windows.start_us[starts[:-1]]
    never = np.zeros(len(last), np.bool_)
    known = Known(engine, key_of(last), ~never, task, engine.score(x, last), None, never, -1, -1, 0)
    found = answers(known, margins_of(query, engine, settings.margin), settings)
    units = Units(cpu=settings.cpu_unit, memory=settings.memory_unit)
    table = as_table(found, units, quantiles=bool(query.quantiles))
    errors = [error.model_dump() for error in refusals.errors]
    about = {"refused": json.dumps(refusals.counts), "errors": json.dumps(errors)}
    return table.replace_schema_metadata({**(table.schema.metadata or {}), **about})
