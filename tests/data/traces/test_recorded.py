"""Recorded windows that were changed by hand: rows that cannot be are set aside, and no row takes another's values."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from reclaim.data import schema as s
from reclaim.data.ingest.defects import OVERLAP
from reclaim.data.ingest.job import IngestConfig, ingest
from reclaim.data.traces.recorded import file_name, windows_table
from reclaim.data.windows import LEVELS, empty_windows


def test_a_row_that_cannot_be_is_a_reject_and_a_long_vector_fills_no_short_one(tmp_path: Path) -> None:
    windows = empty_windows(5)
    windows.collection_id[:], windows.instance_index[:] = range(5), 0
    windows.start_us[:], windows.end_us[:] = 300_000_000, [600_000_000, 600_000_000, 1, 600_000_000, 600_000_000]
    windows.usage[:], windows.limit[:] = 0.1, 1.0
    windows.usage[3, 0] = -5.0
    windows.percentiles[:] = np.arange(len(LEVELS)) / len(LEVELS)
    table = windows_table(windows)
    vectors = table[s.CPU_PERCENTILES].to_pylist()
    changed = pa.array([vectors[0][:-1], [*vectors[1], 9.0], *vectors[2:]], pa.list_(pa.float32()))
    at = table.schema.names.index(s.CPU_PERCENTILES)
    (tmp_path / "in").mkdir()
    pq.write_table(table.set_column(at, table.schema.field(at), changed), tmp_path / "in" / file_name("usage", 7))
    dataset = ingest(
        tmp_path / "in", tmp_path / "out", IngestConfig(trace="recorded", buckets=1, max_reject_share=1.0)
    ).dataset
    assert dataset.manifest["rejects"] == {
        "cpu_percentiles has not 11 elements": 2, "cpu_mean is negative or not finite": 1,
        "end_us is not after start_us": 1,
    }  # fmt: skip
    assert dataset.usage(0)[s.COLLECTION_ID].to_pylist() == [4]
    assert dataset.usage(0)[s.CPU_PERCENTILES].to_pylist() == [vectors[4]]


def test_windows_that_overlap_are_warned_of_in_words_that_name_no_mapping(tmp_path: Path) -> None:
    windows = empty_windows(2)
    windows.collection_id[:], windows.instance_index[:] = 1, 0
    windows.start_us[:], windows.end_us[:] = [300_000_000, 450_000_000], [600_000_000, 750_000_000]
    windows.usage[:], windows.limit[:] = 0.1, 1.0
    windows.percentiles[:] = np.arange(len(LEVELS)) / len(LEVELS)
    (tmp_path / "in").mkdir()
    pq.write_table(windows_table(windows), tmp_path / "in" / file_name("usage", 7))
    (warning,) = ingest(tmp_path / "in", tmp_path / "out", IngestConfig(trace="recorded", buckets=1)).dataset.manifest[
        "warnings"
    ]
    assert OVERLAP in warning
    assert "files of several sources" in warning
    assert "mapping" not in warning
