"""Imported by the server that worker processes are forked from, and by nothing else: they find compiled code loaded."""

import numpy as np

from reclaim.data import schema as s
from reclaim.data.buckets import make_bucket
from reclaim.data.google_v3 import USAGE
from reclaim.data.jsonrows import plain_rows
from reclaim.data.jsontext import NEWLINE, PAD
from reclaim.data.limits import policy_of
from reclaim.data.records import Layout, buckets_of, empty_table
from reclaim.data.shards import take_shard

__all__ = ["make_bucket", "take_shard"]

_layout = Layout.of(s.USAGE)
_rows, _ = plain_rows(np.full(1 + PAD, NEWLINE, np.uint8), USAGE, _layout)
_none = np.empty(0, np.int64)
buckets_of(_none, _none, 1)
_layout.table_of(_rows, _none)
policy_of(empty_table(s.EVENTS), _none, _none, _none, _none)
