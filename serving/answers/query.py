"""Resolves a query to a page of tasks and to a margin for each tier."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from reclaim.data.errors import ModelError
from reclaim.data.schema import RESOURCES, TIERS
from reclaim.serving.wire.errors import INVALID, RequestError
from reclaim.serving.wire.schemas import MAX_ID
from reclaim.training.margins.margin import MARGIN_NAMES

if TYPE_CHECKING:
    from reclaim.serving.cell.tracker import Tracker
    from reclaim.serving.models.scorer import Scorer
    from reclaim.serving.wire.cell_schemas import CellQuery


@dataclass(frozen=True)
class Page:
    """Tasks of one page.

    Attributes
    ----------
    key : int64, shape (n, 2), or None
        Collection and index; None: all tasks of the query.
    limit : float64, shape (n, n_resources), or None
        Limits for unknown tasks, NaN where the query gives none.
    following : str or None
        Start of the next page.
    """

    key: NDArray[np.int64] | None = None
    limit: NDArray[np.float64] | None = None
    following: str | None = None


def page_of(query: CellQuery, tracker: Tracker, key: NDArray[np.int64] | None, *, whole: bool) -> Page:
    """Return the page of tasks that a query asks for.

    Parameters
    ----------
    query : CellQuery
    tracker : Tracker
    key : int64, shape (n, 2), or None
        Only these tasks, in order of collection and index, whatever the query says.
    whole : bool
        All on one page.

    Raises
    ------
    RequestError
        ``after`` is not from an answer, or a list of tasks comes with another one.
    """
    if key is None and query.tasks is not None:
        if query.machines is not None or query.collections is not None:
            message = "tasks: give a list of tasks, or machines and collections, not both"
            raise RequestError(INVALID, "tasks_and_others", message, field="tasks")
        names = np.array([(t.collection_id, t.instance_index) for t in query.tasks], np.int64).reshape(-1, 2)
        nothing = (np.nan,) * len(RESOURCES)
        limits = [nothing if t.limit is None else (t.limit.cpu, t.limit.memory) for t in query.tasks]
        limit = np.array(limits).reshape(-1, len(RESOURCES))
        start = 0 if query.after is None else _cursor(query.after, 1)[0]
        if whole:
            return Page(names, limit)
        stop = start + query.page_size
        return Page(names[start:stop], limit[start:stop], str(stop) if stop < len(names) else None)
    if whole:
        return Page(key)
    names = tracker.names(query.machines, query.collections) if key is None else key
    start = 0
    if query.after is not None:
        collection, index = _cursor(query.after, 2)
        start = int(
            np.count_nonzero((names[:, 0] < collection) | ((names[:, 0] == collection) & (names[:, 1] <= index)))
        )
    stop = start + query.page_size
    following = f"{names[stop - 1, 0]}:{names[stop - 1, 1]}" if stop < len(names) else None
    return Page(names[start:stop], None, following)


def machines_from(machine: NDArray[np.int64], after: int | None, page_size: int) -> tuple[list[int], str | None]:
    """Return the machines of a page behind a cursor, and the next cursor; machine ascending, shape (m,)."""
    start = 0 if after is None else int(np.searchsorted(machine, after, "right"))
    page = machine[start : start + page_size].tolist()
    return page, str(page[-1]) if start + page_size < len(machine) else None


def _cursor(after: str, n: int) -> list[int]:
    parts = after.split(":")
    if len(parts) != n or not all(p.isascii() and p.isdecimal() and int(p) <= MAX_ID for p in parts):
        raise RequestError(INVALID, "invalid_field", "after: must be the `next` of an answer", field="after")
    return [int(p) for p in parts]


def margins_of(query: CellQuery, scorer: Scorer, default: str) -> NDArray[np.int64]:
    """Return the margin of each tier as a position in ``MARGIN_NAMES``; shape (1 + n_tiers,), the unknown tier first.

    Raises
    ------
    RequestError
        A margin is unknown, or no margin keeps to a budget.
    """

    def position(name: str | None, budget: float | None, field: str, tier: str | None = None) -> int:
        if budget is not None:
            if name is not None:
                message = f"{field}: give a margin or a budget, not both"
                raise RequestError(INVALID, "margin_and_budget", message, field=field)
            try:
                return MARGIN_NAMES.index(scorer.within_budget(budget, tier))
            except ModelError as error:
                raise RequestError(INVALID, "budget_too_small", f"{field}: {error}", field=field) from error
        if name not in MARGIN_NAMES:
            expected = ", ".join(MARGIN_NAMES)
            message = f"{field}: expected one of {expected}, got {name!r}"
            raise RequestError(INVALID, "unknown_margin", message, field=field)
        return MARGIN_NAMES.index(name)

    name = default if query.margin is None and query.budget is None else query.margin
    all_tiers = position(name, query.budget, "margin" if query.budget is None else "budget")
    out = np.full(1 + len(TIERS), all_tiers)
    for k, tier in enumerate(TIERS, 1):
        if tier in query.margins or tier in query.budgets:
            field = f"budgets.{tier}" if tier in query.budgets else f"margins.{tier}"
            out[k] = position(query.margins.get(tier), query.budgets.get(tier), field, tier)
    return out
