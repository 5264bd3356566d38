"""Large stateless answers are made in pieces by threads, with the same result."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from reclaim.data import schema as s
from reclaim.data.core import parallel as pieces
from reclaim.data.windows import Windows
from reclaim.serving.answers.stateless_table import answer_histories
from reclaim.serving.models.loader import LoadedModel
from reclaim.serving.monitoring.metrics import ANSWER_PHASES, Metrics
from reclaim.serving.settings import ServingSettings
from reclaim.serving.wire import arrow
from reclaim.serving.wire.cell_schemas import CellQuery
from reclaim.training.bundle import Bundle
from tests.serving.cell_fixtures import usage_arrow, windows_of

TASKS = 9_000
"""More than one thread is worth, and no multiple of a piece."""


def body_of(n: int, windows: int) -> bytes:
    random = np.random.default_rng(5)
    task = np.repeat(np.arange(n), windows)
    slot = np.tile(np.arange(windows), n)
    usage = random.uniform(0.0, 1.0, len(task))
    table = pa.table(
        {
            s.COLLECTION_ID: task // 7, s.INSTANCE_INDEX: task % 7, s.TIER: task // 7 % len(s.TIERS),
            s.START_US: slot * 300_000_000, s.END_US: (slot + 1) * 300_000_000,
            s.CPU_MEAN: usage, s.MEMORY_MAX: usage * 1e9, s.CPU_LIMIT: np.ones(len(task)),
            s.MEMORY_LIMIT: np.full(len(task), 1e9),
        }
    )  # fmt: skip
    return bytes(arrow.write_table(table))


def test_pieces_and_threads_change_nothing(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    model, settings, metrics = LoadedModel("m", "1", "m", bundle), ServingSettings(), Metrics()
    query = CellQuery(margins={"prod": "aggressive"}, quantiles=True)
    body = body_of(TASKS, 2)
    made = answer_histories(model, body, query, settings, metrics, 2)
    assert len(made) == TASKS
    assert made.column(s.COLLECTION_ID).num_chunks > 1
    assert set(made.column("margin").to_pylist()) == {"baseline", "aggressive"}
    with pa.ipc.open_stream(arrow.write_table(made)) as reader:
        sent = reader.read_all()
    monkeypatch.setattr(pieces, "_PIECE_ROWS", TASKS)
    whole = answer_histories(model, body, query, settings, metrics, 1)
    assert whole.column(s.COLLECTION_ID).num_chunks == 1
    assert sent.schema.metadata == whole.schema.metadata
    assert sent.to_pylist() == whole.to_pylist()
    told = metrics.text()
    assert all(f'answer_phase_duration_seconds_count{{phase="{phase}"}}' in told for phase in ANSWER_PHASES)
    assert 'answer_phase_duration_seconds_count{phase="features"} 2.0' in told


def test_a_window_that_comes_again_counts_once(bundle: Bundle) -> None:
    def answered(windows: Windows) -> list[dict[str, Any]]:
        model, query = LoadedModel("m", "1", "m", bundle), CellQuery(quantiles=True)
        rows: list[dict[str, Any]] = answer_histories(
            model, usage_arrow(windows), query, ServingSettings(), Metrics(), 1
        ).to_pylist()
        return rows

    once = windows_of(*({"at": k, "cpu": 0.9} for k in range(3)), {"task": 2})
    again = once.take(np.array([0, 1, 2, 2, 2, 3, 3]))
    again.usage[[3, 4]] = np.nan  # says less than the first one, and does not contradict it
    assert answered(again) == answered(once)
    assert [row["windows"] for row in answered(again)] == [3, 1]


def test_zero_rows_are_one_piece() -> None:
    assert pieces.in_pieces(lambda piece: piece, 0, 2) == [slice(0, pieces._PIECE_ROWS)]
