"""Makes one call of each kind on a separate state, so that later ones compile nothing and open no file."""

from __future__ import annotations

from time import sleep
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from reclaim.data import schema as s
from reclaim.data.core.parallel import THREADS
from reclaim.features.registry import SLOT_US
from reclaim.serving.answers.explain import explain
from reclaim.serving.answers.machine_fit import fit
from reclaim.serving.answers.machine_sums import sums_by_horizon
from reclaim.serving.answers.machines import explain_machine
from reclaim.serving.answers.query import margins_of
from reclaim.serving.answers.stateful import answers
from reclaim.serving.answers.stateless import answer
from reclaim.serving.answers.stateless_table import answer_histories
from reclaim.serving.cell.clock import CellClock
from reclaim.serving.cell.tracker import Tracker
from reclaim.serving.models.scorer import Scorer
from reclaim.serving.monitoring.metrics import Metrics
from reclaim.serving.monitoring.watch import Watch
from reclaim.serving.wire.arrow import write_table
from reclaim.serving.wire.cell_schemas import CellQuery
from reclaim.serving.wire.errors import parse_body, parse_request
from reclaim.serving.wire.machine_schemas import FitRequest
from reclaim.serving.wire.rows import facts_from_json, usage_from_json
from reclaim.serving.wire.schemas import Units
from reclaim.serving.writing.writer import Writer

if TYPE_CHECKING:
    from reclaim.serving.models.loader import LoadedModel
    from reclaim.serving.settings import ServingSettings

_STATELESS: Final = b"""{"tasks": [{"collection_id": 0, "limit": {"cpu": 1, "memory": 1}, "windows": [
    {"start_us": 0, "end_us": 300000000, "cpu_mean": 0.1, "memory_max": 0.1},
    {"start_us": 300000000, "end_us": 600000000, "cpu_mean": 0.2, "memory_max": 0.2}]}]}"""
_FIT: Final = b"""{"candidates": [{"collection_id": 1, "limit": {"cpu": 1, "memory": 1}}],
    "capacity": {"cpu": 100, "memory": 100}}"""
_WINDOW: Final = """{"collection_id": %d, "machine_id": 0, "limit": {"cpu": 1, "memory": 1}, "user": "u",
    "logical_name": "n", "start_us": %d, "end_us": %d, "cpu_mean": 0.1, "cpu_max": 0.2, "memory_max": 0.999}"""
_FACTS: Final = b"""{"tasks": [
    {"collection_id": 0, "ended_us": %d, "failed": true}, {"collection_id": 1, "failed_us": %d},
    {"collection_id": 2, "limit": {"cpu": 0.5, "memory": 1}}],
    "collections": [{"collection_id": 3, "estimation": false}]}"""
_SLOTS: Final = (0, 1, 3, 2, 3, 600, 601)
"""The fourth is late, the fifth repeated, and the one after it, two days later, ends the horizons of all answers."""
_TASKS: Final = 4


def warm_up(model: LoadedModel, settings: ServingSettings) -> None:
    """Answer from histories, take windows and facts, explain a task and a machine, place a task: all in memory."""
    end_us = (_SLOTS[-1] + 1) * SLOT_US
    settings = settings.model_copy(
        update={"clock": "unix", "record": None, "lateness_s": max(settings.lateness_s, 1.0)}
    )
    units = Units(cpu=settings.cpu_unit, memory=settings.memory_unit)
    metrics, watch = Metrics(), Watch(settings.lateness_s)
    answer(model, parse_request(_STATELESS), settings)
    answer_histories(model, bytes(write_table(_histories())), CellQuery(), settings, metrics, THREADS)
    scorer = Scorer(model, settings.cell, THREADS)
    tracker = Tracker(settings, CellClock(settings, lambda: end_us), THREADS)
    writer = Writer(tracker, None, metrics, watch, settings)
    writer.start(scorer)
    while writer.state == "recovering":
        sleep(0.001)
    for slot in _SLOTS:
        windows = ", ".join(_WINDOW % (task, slot * SLOT_US, (slot + 1) * SLOT_US) for task in range(_TASKS))
        usage = usage_from_json(f'{{"windows": [{windows}]}}'.encode(), units, _TASKS)
        writer.write(usage).result()
    writer.write(facts_from_json(_FACTS % (end_us, end_us), _TASKS)).result()
    known = tracker.look(tracker.names(), with_x=True)
    explain(answers(known, margins_of(CellQuery(), scorer, settings.margin), settings), units)
    explain_machine(sums_by_horizon(tracker, settings), units, settings.margin)
    fit(tracker, parse_body(_FIT, FitRequest), settings, units, THREADS)
    watch.shown()
    writer.close()


def _histories() -> pa.Table:
    ends = [(k + 1) * SLOT_US for k in range(2)]
    columns = {s.COLLECTION_ID: [0, 0], s.START_US: [end - SLOT_US for end in ends], s.END_US: ends}
    return pa.table({**columns, s.CPU_LIMIT: [1.0, 1.0], s.MEMORY_LIMIT: [1.0, 1.0]})
