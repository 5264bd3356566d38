"""JSON lines of tables other than usage: the compiled reader takes only what the careful one reads the same way."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reclaim.data.core.duck import quoted
from reclaim.data.ingest.readers.json_fast import plain_batches
from reclaim.data.ingest.readers.json_kernel import PAD
from reclaim.data.ingest.readers.json_lines import typed
from reclaim.data.ingest.readers.rejects import RejectsWriter
from reclaim.data.traces.google_v3 import ATTRIBUTES, COLLECTIONS, EVENTS, MACHINES
from reclaim.data.traces.source import RawTable

TABLES = (EVENTS, COLLECTIONS, MACHINES, ATTRIBUTES)
ODD = ["null", "0", '"0"', "1", '"1"', "-1", '"-1"', "007", "1.0", "1e3", '"x"', '""', '" 7"', "true", "false",
       '"true"', "tru", "truex", "falsey", "[]", "[ ]", "[1]", '["1"]', "[{}]", "{}", '{"cpus": 0.5}',
       '{"cpus": 0.5, "memory": 1e-3}', '{"cpus": null}', '{"cpus": 0.5, "cpus": 0.5}', '{"other": 1}', '"a\\"b"',
       '"a\\\\b"', '"\\u0041"', '"\N{SNOWMAN}"', '"\x7f"', '"\t"', '"~ }],{"', "127", "128", '"-129"', "2147483647",
       "2147483648", "9223372036854775807", "9223372036854775808", '"18446744073709551615"', "18446744073709551616",
       "-9223372036854775808", "NaN", '"unended', '[{"name": "a", "value": "b", "relation": "0"}]', "1 2", "", ",",
       "}"]  # fmt: skip
GOOD = {"BIGINT": '"17"', "UBIGINT": '"900000000"', "INTEGER": '"200"', "VARCHAR": '"3"', "BOOLEAN": "true",
        "STRUCT(cpus DOUBLE, memory DOUBLE)": '{"cpus": 0.25, "memory": 0.125}'}  # fmt: skip


def line_of(table: RawTable, changes: dict[str, str]) -> bytes:
    fields = {name: GOOD.get(type_, "[]") for name, type_ in table.columns.items()} | changes
    return ("{" + ", ".join(f"{json.dumps(key)}: {value}" for key, value in fields.items()) + "}").encode()


def raw_schema(table: RawTable) -> pa.Schema:
    casts = ", ".join(f"CAST(NULL AS {type_}) AS {quoted(name)}" for name, type_ in table.columns.items())
    with duckdb.connect() as connection:
        return connection.sql(f"SELECT {casts}, CAST(NULL AS BIGINT) AS line").to_arrow_table().schema


def both(table: RawTable, lines: list[bytes], folder: Path) -> tuple[pa.Table, set[int]]:
    """Return the rows that the compiled reader takes, which the careful one reads the same, and the lines it leaves."""
    schema, text = raw_schema(table), b"".join(line + b"\n" for line in lines)
    parts = [*plain_batches(np.frombuffer(text + bytes(PAD), np.uint8), table, schema, line=1)]
    left = {int(number) for _, others in parts for number in others[:, 0]}
    for _, others in parts:
        assert [text[begin:end] for _, begin, end in others] == [lines[number - 1] for number in others[:, 0]]
    found = pa.Table.from_batches([rows for rows, _ in parts], schema)
    found.validate(full=True)
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if number not in left]
    with RejectsWriter(folder / "rejects.parquet", "file", 1.0) as rejects:
        expected = typed(table, schema, numbered, rejects, Counter())
        assert rejects.count == 0
    assert repr(found.to_pylist()) == repr(expected.to_pylist())
    return found, left


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_a_usual_line_is_taken_with_all_its_fields_and_one_with_an_odd_value_says_what_it_says(
    table: RawTable, tmp_path: Path
) -> None:
    lines = [line_of(table, {}), b"", b" \r", line_of(table, {}).replace(b" ", b"") + b"\r"]
    lines += [line_of(table, {name: value}) for name in table.columns for value in ODD]
    found, left = both(table, lines, tmp_path)
    assert found["line"].to_pylist()[:2] == [1, 4]
    assert 1 < len(left) < len(lines) - 4
    for name, type_ in table.columns.items():
        column = found[name].combine_chunks()
        assert column[0].is_valid
        if type_.startswith("STRUCT(") and not type_.endswith("[]"):
            assert column[0].as_py() == {"cpus": 0.25, "memory": 0.125}


def test_a_line_may_lack_all_fields_but_one_and_a_struct_may_be_empty(tmp_path: Path) -> None:
    found, left = both(EVENTS, [b'{"type":"0"}', b'{"resource_request":{},"time":"5"}'], tmp_path)
    assert left == set()
    request = found["resource_request"].to_pylist()
    assert (request, found["time"].to_pylist()) == ([None, {"cpus": None, "memory": None}], [None, 5])


def test_texts_of_a_block_are_where_they_begin_and_as_long_as_they_are(tmp_path: Path) -> None:
    lines = [b'{"name":"","value":"%s","machine_id":"%d"}' % (b"v" * k, k) for k in range(300)]
    found, left = both(ATTRIBUTES, lines, tmp_path)
    assert left == set()
    assert found["value"].to_pylist() == ["v" * k for k in range(300)]
    assert found["name"].to_pylist() == [""] * 300


def test_a_text_of_a_mebibyte_is_left_to_the_careful_reader(tmp_path: Path) -> None:
    longest = (1 << 20) - 1
    lines = [b'{"value":"%s"}' % (b"v" * n) for n in (longest, longest + 1)]
    found, left = both(ATTRIBUTES, lines, tmp_path)
    assert (len(found), left) == (1, {2})


def test_more_lines_than_a_block_of_usual_ones_has_room_for_come_in_parts(tmp_path: Path) -> None:
    lines = [b'{"time":"6"}'] * 1000 + [b"x"] * 1000 + [b'{"time":"7"}'] * 3
    found, left = both(MACHINES, lines, tmp_path)
    assert left == set(range(1001, 2001))
    assert found["line"].to_pylist() == [*range(1, 1001), 2001, 2002, 2003]


@settings(max_examples=60, deadline=None, suppress_health_check=[*HealthCheck])
@given(data=st.data())
def test_lines_with_any_few_values_changed_and_bytes_put_in_are_read_alike(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    table = data.draw(st.sampled_from(TABLES))
    lines = []
    for _ in range(data.draw(st.integers(1, 6))):
        names = data.draw(st.lists(st.sampled_from([*table.columns]), max_size=3))
        line = line_of(table, {name: data.draw(st.sampled_from(ODD)) for name in names})
        if data.draw(st.booleans()):
            at = data.draw(st.integers(0, len(line)))
            put = data.draw(st.sampled_from([b",", b"}", b"{", b'"', b"\\", b"\x00", b"\xff", b" ", b"0", b"]"]))
            line = line[:at] + put + line[at + data.draw(st.integers(0, 1)) :]
        lines.append(line)
    both(table, lines, tmp_path_factory.mktemp("lines"))
