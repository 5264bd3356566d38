"""Loads compiled code into the fork server of the worker processes, so that each of them starts with it."""

import numpy as np
import pyarrow as pa

from reclaim.data import schema as s
from reclaim.data.ingest.bucket import make_bucket
from reclaim.data.ingest.limits import policy_of
from reclaim.data.ingest.readers.json_fast import plain_rows
from reclaim.data.ingest.readers.json_kernel import NEWLINE, PAD
from reclaim.data.ingest.readers.staging import Layout, buckets_of, empty_table
from reclaim.data.ingest.shard import take_shard
from reclaim.data.traces.google_v3 import USAGE

__all__ = ["make_bucket", "take_shard"]

_layout = Layout.of(s.USAGE)
_rows, _ = plain_rows(np.full(1 + PAD, NEWLINE, np.uint8), USAGE, _layout)
_none = np.empty(0, np.int64)
buckets_of(_none, _none, 1)
_layout.table_of(_rows, _none)
policy_of(empty_table(s.EVENTS), _none, _none, _none, _none)
pa.array([0])  # the first array of a list imports pandas
