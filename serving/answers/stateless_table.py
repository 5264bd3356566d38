"""Answers a table of histories: the reservations of a fresh estimator at the end of each."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from reclaim.data import schema as s
from reclaim.data.core.parallel import in_pieces
from reclaim.data.windows import Windows, sort_windows
from reclaim.features.fold.stateless import features_of_histories
from reclaim.serving.answers.query import margins_of
from reclaim.serving.answers.stateful import Answers, answers, as_table
from reclaim.serving.answers.stateless import other_units
from reclaim.serving.cell.following import Prices
from reclaim.serving.cell.task_record import UNKNOWN_TASK, keep_last, key_of
from reclaim.serving.cell.views import Known
from reclaim.serving.models.scorer import Scorer
from reclaim.serving.wire.rows import UsageRows, usage_from_arrow
from reclaim.serving.wire.schemas import Units

if TYPE_CHECKING:
    from reclaim.serving.models.loader import LoadedModel
    from reclaim.serving.monitoring.metrics import Metrics
    from reclaim.serving.settings import ServingSettings
    from reclaim.serving.wire.cell_schemas import CellQuery


def answer_histories(
    model: LoadedModel, body: bytes, query: CellQuery, settings: ServingSettings, metrics: Metrics, threads: int
) -> pa.Table:
    """Return one row per task of an Arrow stream of windows, in order of collection and index.

    Rows that are refused, and those without a limit, are left out; the table's metadata counts them by code, as
    ``refused``, and describes the first, as ``errors``; ``amounts`` is there where they seem to be in another unit than
    the model's. The number of threads changes nothing in it.

    Raises
    ------
    RequestError
        The body is no such stream, or the model lacks a margin of the query.
    """
    with metrics.answering("decode"):
        usage = usage_from_arrow(body, settings.max_bulk_rows)
        windows = _histories(usage)
    scorer = Scorer(model, settings.cell, threads)
    margin_of_tier = margins_of(query, scorer, settings.margin)
    units = Units(cpu=settings.cpu_unit, memory=settings.memory_unit)
    with metrics.answering("features"):
        x = features_of_histories(windows, settings.cell, threads)
    starts = windows.task_starts()

    def made(piece: slice) -> pa.Table:
        first, after = starts[:-1][piece], starts[1:][piece]
        last = windows.take(piece if len(starts) > len(windows) else after - 1)
        seen, first_us = after - first, windows.start_us[first]
        found = answers_at(scorer, x[piece], last, seen, first_us, margin_of_tier, settings)
        return as_table(found, units, quantiles=bool(query.quantiles))

    with metrics.answering("answer"):
        table = pa.concat_tables(in_pieces(made, len(x), threads))
    errors = [error.model_dump() for error in usage.refusals.errors]
    about = {"refused": json.dumps(usage.refusals.counts), "errors": json.dumps(errors)}
    apart = other_units(model.bundle, windows.limit[starts[1:] - 1])
    about |= {} if apart is None else {"amounts": apart}
    return table.replace_schema_metadata({**(table.schema.metadata or {}), **about})


def answers_at(
    scorer: Scorer,
    x: NDArray[np.float32],
    last: Windows,
    seen: NDArray[np.int64],
    first_us: NDArray[np.int64],
    margin_of_tier: NDArray[np.int64],
    settings: ServingSettings,
) -> Answers:
    """Return the answers at the ends of ``n`` histories, from the features there; no state is kept.

    Parameters
    ----------
    scorer : Scorer
    x : float32, shape (n, n_features)
        Features after each history's last window.
    last : Windows
        The ``n`` last windows.
    seen, first_us : int64, shape (n,)
        Windows of each history, and the start of its first one in µs.
    margin_of_tier : int64, shape (1 + n_tiers,)
        From ``margins_of``.
    settings : ServingSettings
    """
    task = np.full(len(last), UNKNOWN_TASK)
    keep_last(task, slice(None), last)
    task["limit"], task["limit_us"], task[s.SCHEDULED_US] = last.limit, last.start_us, last.scheduled_us
    task["windows"], task["first_us"] = seen, first_us
    never = np.zeros(len(last), np.bool_)
    scores = scorer.score(x, last, of_cell=False)
    known = Known(scorer, Prices.of(scorer), key_of(last), ~never, task, scores, None, never, -1, -1, 0)
    return answers(known, margin_of_tier, settings)


def _histories(usage: UsageRows) -> Windows:
    """Return the windows that have a limit, each once, by task, then time."""
    windows = usage.windows
    unlimited = np.isnan(windows.limit[:, 0])  # for both resources, or for neither
    if unlimited.any():
        usage.refusals.add("no_limit", usage.row[unlimited], "every window needs a limit")
        windows = windows.take(~unlimited)
    key = key_of(windows)
    step = np.diff(key, axis=0)
    later = (windows.end_us[1:] > windows.end_us[:-1]) & (windows.start_us[1:] >= windows.start_us[:-1])
    if ((step[:, 0] > 0) | ((step[:, 0] == 0) & ((step[:, 1] > 0) | ((step[:, 1] == 0) & later)))).all():
        return windows
    windows = sort_windows(windows)
    again = (np.diff(key_of(windows), axis=0) == 0).all(axis=1) & (np.diff(windows.end_us) == 0)
    return windows.take(np.append(True, ~again)) if again.any() else windows  # as in a cell, the first one stays
