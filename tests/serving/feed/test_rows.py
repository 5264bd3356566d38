"""Tables that a feed sends: of each window, failure and end what the service has to know of it."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa

from reclaim.data import schema as s
from reclaim.data.traces.history import PIECE_S
from reclaim.data.traces.kubernetes.fold import USAGE_EXTRAS
from reclaim.data.traces.kubernetes.live import Slot
from reclaim.serving.feed.rows import ends_of, failures_of, usage_of
from reclaim.serving.wire.rows import ENDED_US, FAILED_US, IN_ALLOC, LOGICAL_NAME, USAGE_COLUMNS, USER
from tests.data.traces.kubernetes.histories import APP, POD, beat, counter, fold, one

NOTHING = pa.table({})
OTHER = {**APP, "pod": "cart-7d9f8b6c5x-other", "container": "proxy"}


def test_a_window_is_sent_with_the_names_of_its_container_and_only_where_both_limits_are_known() -> None:
    series = {
        "cpu": [one(APP, counter(0, PIECE_S, 0.3)), one(OTHER, counter(0, PIECE_S, 0.4))],
        "pod": [one(POD, beat(0, PIECE_S)), one({**POD, "pod": OTHER["pod"]}, beat(0, PIECE_S))],
        "limit": [one(of | {"resource": r}, beat(0, PIECE_S, 5.0)) for of in (APP, OTHER) for r in s.RESOURCES],
    }
    rows, _, made = fold(series)
    rows = rows[:4]  # two slots of both
    rows[0], rows[1] = rows[0] | {"cpu_limit": None}, rows[1] | {"memory_limit": None}
    windows = pa.Table.from_pylist(rows, s.with_extras("usage", USAGE_EXTRAS))
    sent = usage_of(Slot(0, windows, [], []), made.seen())
    assert sent.column_names == list(USAGE_COLUMNS)
    assert sent.num_rows == 2
    for row, given in zip(sent.to_pylist(), rows[2:], strict=True):
        task = made.seen()[given[s.COLLECTION_ID], given[s.INSTANCE_INDEX]]
        names = {
            USER: "shop", LOGICAL_NAME: f"Pod/{task.key.pod}/{task.key.container}", IN_ALLOC: False,
        }  # fmt: skip
        assert row == {name: given[name] for name in USAGE_COLUMNS if name not in names} | names


def test_failures_say_whether_they_were_out_of_memory_and_ends_when_a_task_was_seen_last() -> None:
    slot = Slot(0, NOTHING, [((1, 2), 30, True), ((3, 4), 50, None)], [((5, 6), 70)])
    names = (s.COLLECTION_ID, s.INSTANCE_INDEX)
    assert failures_of(slot).to_pydict() == {
        names[0]: [1, 3], names[1]: [2, 4], FAILED_US: [30, 50], s.OUT_OF_MEMORY: [True, None],
    }  # fmt: skip
    assert ends_of(slot).to_pydict() == {names[0]: [5], names[1]: [6], ENDED_US: [70]}
    nothing = replace(slot, failed=[], ended=[])
    assert failures_of(nothing).num_rows == ends_of(nothing).num_rows == 0
