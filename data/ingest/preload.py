"""Loads compiled code into the fork server of the worker processes, so that each of them starts with it."""

import numpy as np
import pyarrow as pa

from reclaim.data import schema as s
from reclaim.data.columns import empty_table, values_of
from reclaim.data.core.jit import begin_lean
from reclaim.data.ingest.bucket import make_bucket
from reclaim.data.ingest.defects import count_defects
from reclaim.data.ingest.limits import policy_of
from reclaim.data.ingest.readers.json_fast import plain_rows
from reclaim.data.ingest.readers.json_kernel import NEWLINE, PAD
from reclaim.data.ingest.readers.packing import SPARE, pack, unpack
from reclaim.data.ingest.readers.staging import Layout, buckets_of
from reclaim.data.ingest.shard import take_shard
from reclaim.data.ingest.tasks import tasks_of
from reclaim.data.traces.google_v3 import USAGE

__all__ = ["make_bucket", "take_shard"]

begin_lean()
_layout, _one, _events = Layout.of(s.USAGE), np.zeros(1, np.int64), empty_table(s.EVENTS)
plain_rows(np.full(1 + PAD, NEWLINE, np.uint8), USAGE, _layout)
_rows = np.zeros((1, _layout.words), np.uint64)
buckets_of(_one, _one, 1)
_content, _ = pack(_rows, _one, _one + 1)
unpack(np.concatenate([_content, np.zeros(SPARE, np.uint8)]), _rows)
_usage = _layout.table_of(_rows, np.zeros(1, np.int64))
policy_of(_events, *(values_of(_usage[name]) for name in (*s.TASK_KEY, s.START_US, s.END_US)))
count_defects(_usage, None)
tasks_of(_usage, _events, pa.schema([s.TASKS.field(name) for name in s.TASK_KEY]))
