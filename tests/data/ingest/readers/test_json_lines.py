"""The careful reader of JSON lines: every value is the one that the line holds."""

from __future__ import annotations

import json

from hypothesis import example, given
from hypothesis import strategies as st

from reclaim.data.ingest.readers.json_lines import decoded
from reclaim.data.traces.google_v3 import google_v3

_TABLE = next(table for table in google_v3().tables if table.name == "collections")
_VALUES = st.recursive(
    st.integers(-(10**30), 10**30) | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)


@given(row=st.dictionaries(st.sampled_from(["user", "type", "x"]), _VALUES, max_size=3))
@example(row={"user": 2**64})
@example(row={"user": -(2**63) - 1})
@example(row={"constraint": [{"value": 10**19 * 9}]})
def test_a_line_holds_what_pythons_own_reader_says_to_the_last_digit(row: dict[str, object]) -> None:
    line = json.dumps(row).encode()
    assert repr(decoded(line, _TABLE)) == repr(json.loads(line))
