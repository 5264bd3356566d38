"""Formats results for a notebook: tables as frames, facts as HTML, figures as SVG."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pandas as pd
import pyarrow as pa

from reclaim.data.core.tables import show

if TYPE_CHECKING:
    from reclaim.data.core.tables import Cell, Table


_NUMPY: Final[dict[pa.DataType, Any]] = {}
_NULLABLE: Final[dict[pa.DataType, Any]] = {
    pa.int8(): pd.Int8Dtype(), pa.int32(): pd.Int32Dtype(), pa.int64(): pd.Int64Dtype(), pa.bool_(): pd.BooleanDtype(),
}  # fmt: skip


@dataclass(frozen=True)
class Figure:
    """A figure of a finished replay, which a notebook shows.

    Attributes
    ----------
    path : Path
        Its SVG file; the PNG of the same name lies next to it.
    """

    path: Path

    def _repr_svg_(self) -> str:
        return self.path.read_text(encoding="utf-8")


def frame_of(table: pa.Table) -> pd.DataFrame:
    """Return an Arrow table as a frame of numpy's types, NaN for unknown numbers.

    Integers with nulls become pandas' nullable ones, so that an id never passes through a float; vectors stay Arrow's.
    """

    def type_of(column: pa.ChunkedArray) -> Callable[[pa.DataType], Any]:
        return pd.ArrowDtype if pa.types.is_nested(column.type) else _NULLABLE.get if column.null_count else _NUMPY.get

    columns = zip(table.column_names, table.columns, strict=True)
    return pd.DataFrame({name: column.to_pandas(types_mapper=type_of(column)) for name, column in columns})


def frame_of_results(table: Table) -> pd.DataFrame:
    """Return a table of results as a frame; shares stay fractions of one."""
    return pd.DataFrame(table.as_records(), columns=list(table.columns))


def html_of_results(table: Table) -> str:
    """Return a table of results as HTML, with the texts of the command line."""
    shown = pd.DataFrame(table.as_strings(), columns=list(table.columns))
    return str(shown.to_html(index=False, border=0))


def html_of_facts(title: str, facts: Mapping[str, Cell], notes: Sequence[str] = ()) -> str:
    """Return a title, a table of facts and a list of notes as HTML."""
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(show(fact))}</td></tr>" for name, fact in facts.items())
    listed = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return f"<b>{escape(title)}</b><table>{rows}</table>" + (f"<ul>{listed}</ul>" if listed else "")
