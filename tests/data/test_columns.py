"""Columns of Arrow as arrays of numpy and back: nulls, pieces and cuts of columns, and no pandas."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reclaim.data.columns import array_of, empty_table, flags_of, values_of, whole
from reclaim.data.synthetic.job import SyntheticCellConfig, write_cell

_TYPES = {pa.int8(): np.int8, pa.int32(): np.int32, pa.int64(): np.int64, pa.float64(): np.float64}
_pieces = st.lists(st.lists(st.none() | st.integers(-100, 100), max_size=20), max_size=4)


@pytest.mark.parametrize("kind", _TYPES, ids=str)
@given(pieces=_pieces, cut=st.integers(0, 30))
def test_a_column_in_any_pieces_and_cut_anywhere_gives_its_values(
    kind: pa.DataType, pieces: list[list[int | None]], cut: int
) -> None:
    column = pa.chunked_array([pa.array(piece, kind) for piece in pieces], kind).slice(cut)
    found = values_of(column, -1)
    assert found.dtype == _TYPES[kind]
    assert found.tolist() == [-1 if value is None else value for value in column.to_pylist()]
    assert not found.flags.writeable
    assert values_of(whole(column), -1).tolist() == found.tolist()


@given(pieces=st.lists(st.lists(st.none() | st.booleans(), max_size=20), max_size=4), cut=st.integers(0, 30))
def test_a_null_flag_is_false(pieces: list[list[bool | None]], cut: int) -> None:
    column = pa.chunked_array([pa.array(piece, pa.bool_()) for piece in pieces], pa.bool_()).slice(cut)
    assert flags_of(column).tolist() == [bool(value) for value in column.to_pylist()]


@given(values=st.lists(st.tuples(st.floats(), st.booleans()), max_size=40))
def test_an_array_becomes_the_column_that_pyarrow_makes(values: list[tuple[float, bool]]) -> None:
    numbers, valid = np.array([v for v, _ in values], np.float64), np.array([k for _, k in values], np.bool_)
    usual = pa.array(numbers, mask=~valid) if len(values) else pa.array([], pa.float64())
    assert array_of(numbers, valid).to_pylist().__repr__() == usual.to_pylist().__repr__()
    assert array_of(valid).to_pylist() == valid.tolist()


def test_a_column_in_one_piece_is_not_copied() -> None:
    column = pa.chunked_array([pa.array([1, 2, 3])])
    assert values_of(column).ctypes.data == column.chunk(0).buffers()[1].address


def test_an_empty_table_has_the_columns_of_its_schema() -> None:
    schema = pa.schema({"a": pa.int64(), "b": pa.list_(pa.float32())})
    assert empty_table(schema).schema == schema
    assert len(empty_table(schema)) == 0


_FEATURES_OF_A_CELL = """
import sys
from pathlib import Path
from reclaim.data.core.engine.workers import Engine
from reclaim.data.dataset import Dataset
from reclaim.data.ingest.job import IngestConfig, ingest
from reclaim.features.build import build_features

folder = Path(sys.argv[1])
ingest(folder / "cell", folder / "dataset", IngestConfig())
build_features(Dataset.open(folder / "dataset"), engine=Engine(workers=1))
assert "pandas" not in sys.modules, "pandas was imported"
"""


@pytest.mark.slow
def test_a_trace_becomes_features_without_pandas(tmp_path: Path) -> None:
    write_cell(tmp_path / "cell", SyntheticCellConfig(machines=2, days=4.0, seed=1))
    program = [sys.executable, "-c", _FEATURES_OF_A_CELL, str(tmp_path)]
    run = subprocess.run(program, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
