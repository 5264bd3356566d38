"""JSON lines of usage: the compiled reader and the careful reader read every line the same way."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import duckdb
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reclaim.data import schema as s
from reclaim.data.errors import ReclaimError
from reclaim.data.ingest import job as ingest_module
from reclaim.data.ingest.bucket import staged_schema
from reclaim.data.ingest.job import IngestConfig, ingest
from reclaim.data.ingest.readers.json_fast import plain_rows
from reclaim.data.ingest.readers.json_kernel import PAD
from reclaim.data.ingest.readers.json_lines import take_json
from reclaim.data.ingest.readers.rejects import RejectsWriter
from reclaim.data.ingest.readers.rows import Stage
from reclaim.data.ingest.readers.staging import Layout, RowsWriter, read_chunks
from reclaim.data.traces.google_v3 import USAGE, google_v3
from reclaim.data.traces.source import RawTable
from tests.folders import contents

Said = tuple[list[bytes], list[tuple[int, str]], dict[str, int]] | str
Reader = Callable[[bytes, RawTable], Said]

CAREFULLY = replace(USAGE, fields=())
LAYOUT = Layout.of(staged_schema(google_v3()))
FIT = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
HEADER = 200
"""Lines whose keys are checked: an unknown key is an error in them, and ignored in later lines."""


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    """Return what a reader says of lines: the rows it takes, in their bytes; its rejects; the defects it counts."""
    folder = tmp_path_factory.mktemp("lines")
    file = folder / "instance_usage-000000000000.json"
    with closing(duckdb.connect()) as connection:

        def said(lines: bytes, table: RawTable) -> Said:
            file.write_bytes(lines)
            try:
                with (
                    RowsWriter(folder, LAYOUT, 1) as writer,
                    RejectsWriter(folder / "rejects.parquet", file.name, 1.0) as refused,
                ):
                    taken = take_json(Stage(connection, folder, 1, writer, refused), table, file)
            except ReclaimError as error:
                return str(error)
            rows = [bytes(row) for chunk in read_chunks([folder], LAYOUT, 0) for row in chunk]
            assert len(rows) == taken.rows
            rejects = [
                pair for lines, why in refused.batches() for pair in zip(lines.tolist(), why.to_pylist(), strict=True)
            ]
            return sorted(rows), sorted(rejects), taken.defects

        yield said


# Values as they stand in the text, good ones first: shrinking ends there.
INTEGERS = ["5", '"5"', "0", '"0"', "1", '"900000000"', '"1200000000"', "-1", '"9007199254740993"', "null",
            str(2**63 - 1), f'"{2**63 - 1}"', str(2**63), str(2**64), f'"-{2**63}"', str(-(2**63) + 1), "-0", '"-0"',
            "007", '"007"', "1.0", "1e3", "1E3", '"1e3"', '" 7"', '"7 "', '""', "true", "[]", "{}", "[5]", '"x"',
            '"+1"', "+1", "0x10", '"\\u0035"', "99999999999999999999", "12345678901234567890123", "NaN", '"1_0"',
            "'5'", '"5', "5a", '"\N{ARABIC-INDIC DIGIT FIVE}"']  # fmt: skip
NUMBERS = ["0.1", "0", "1", "0.30000000000000004", "1e-3", "2.5E+2", "1e0", "null", "123456.7890123", "0.0", "5e-324",
           "1e400", "1e-400", "-1", "-0", "-0.0", "18446744073709551616.5", "9007199254740993",
           "0.1234567890123456789", "0.12345678901234567890", "0." + "0" * 320 + "1e321", "1" + "0" * 25, ".5", "5.",
           "1.e3", "1e", "1e+", "01", "00", "0e0", "0e999999999999999999999", "NaN", "nan", "Infinity", "-Infinity",
           "inf", "true", "false", '"0.5"', '" 0.5"', '"0.5 "', '"1_0"', '"nan"', '"-nan"', '"inf"', '"Infinity"',
           '"+1"', '"01"', '"5."', '".5"', '"x"', '""', "[]", "{}", "[1]", "1 2", "--1", "1.7976931348623157e308",
           "1.7976931348623159e308", "3.5e38", "3.40282350e38", "1152921573326323713", '"\N{FULLWIDTH DIGIT ONE}"',
           "1,5", "1.2.3", "1e5.0"]  # fmt: skip
TEXTS = ["0", "1", '"0"', '"1"', '"JOB"', '"ALLOC_SET"', "null", "2", '"2"', '"job"', "1.0", "true", '"\\u0030"',
         '"\\ud800"', '""', "[]", "[0]", "{}", '{"a": 1}', '"[0]"', '"\\u0000"', '"a\\"b"', '"\\x"', "-1",
         "NaN"]  # fmt: skip
NESTED = ["{}", "null", "[]", '"x"', "1", "{", "}", '{"cpus": 0.1, "memory": 0.2}', '{"memory": 0.2}',
          '{"cpus": null}', '{"cpus": 0.1,}', '{"cpus": 0.1, "cpus": 0.2}',
          '{ "cpus" : 0.1 }', '{"cpus" 0.1}', '{"c\\u0070us": 0.1}', '{"cpus": {"cpus": 0.1}}', '{"cpus": [0.1]}',
          '{,"cpus": 0.1}', '{"cpus": 0.1}}', '{"cpus":}', "[0.1, 0.2]",
          '{"cpus": 0.1 "memory": 0.2}', '{"cpus": 0, "memory": 0.0}', '{"cpus": 0.0}']  # fmt: skip

number = st.one_of(
    st.sampled_from(NUMBERS),
    st.floats(0, allow_nan=False, allow_infinity=False).map(repr),
    st.floats(0, 1).map(lambda x: f"{x:.17g}"),
    st.decimals(0, 10, allow_nan=False, places=18).map(str),
    st.from_regex(r"-?[0-9]{1,22}(\.[0-9]{0,22})?([eE][-+]?[0-9]{1,4})?", fullmatch=True),
)
integer = st.one_of(
    st.sampled_from(INTEGERS),
    st.integers(-(2**64), 2**64).map(str),
    st.integers(-(2**64), 2**64).map(lambda n: f'"{n}"'),
)
space = st.sampled_from(["", "", "", "", " ", "\t", "\r", "  \t ", "\x0b", "\x00", "\N{NO-BREAK SPACE}"])
nested = st.one_of(
    st.sampled_from(NESTED), st.tuples(number, number).map(lambda pair: f'{{"cpus": {pair[0]}, "memory": {pair[1]}}}')
)
vector = st.one_of(
    st.tuples(st.lists(number, max_size=12), space).map(lambda v: f"[{v[1]}{', '.join(v[0])}{v[1]}]"),
    st.tuples(st.sampled_from([9, 11]), number).map(lambda v: f"[{', '.join(['0.25'] * (v[0] - 1) + [v[1]])}]"),
    st.sampled_from(["[]", "null", "{}", "[null]", "[[1]]", '["1"]', "[1,]", "[,1]", "1", '"[]"', "[1 2]", "[1"]),
)
KINDS = {"BIGINT": integer, "VARCHAR": st.sampled_from(TEXTS), "DOUBLE": number, "FLOAT[]": vector}
GOOD = {"start_time": '"900000000"', "end_time": '"1200000000"', "collection_id": '"9007199254740993"',
        "instance_index": "3", "average_usage": '{"cpus": 0.1, "memory": 0.2}', "machine_id": '"7"',
        "alloc_collection_id": '"0"', "alloc_instance_index": '"-1"', "collection_type": '"0"',
        "maximum_usage": '{"cpus": 0.4}', "random_sample_usage": '{"cpus": 0.12}', "assigned_memory": "0.5",
        "page_cache_memory": "0.01", "cycles_per_instruction": "1.25", "memory_accesses_per_instruction": "0.003",
        "sample_rate": "1", "cpu_usage_distribution": f"[{', '.join(['0.125'] * 11)}]",
        "tail_cpu_usage_distribution": f"[{', '.join(['0.3'] * 9)}]"}  # fmt: skip


@st.composite
def a_line(draw: st.DrawFn) -> bytes:
    """Return one line, from good to hopeless, without a line's end."""
    fields = [(key, value) for key, value in GOOD.items() if draw(st.integers(0, 15))]
    for _ in range(draw(st.integers(0, 2))):  # other values, in place of the good ones or next to them
        key = draw(st.sampled_from([*GOOD]))
        value = draw(KINDS.get(USAGE.columns[key], nested))
        if draw(st.integers(0, 7)):
            fields = [(k, v) for k, v in fields if k != key]
        fields.append((key, value))
    fields = draw(st.permutations(fields))
    keys = [json.dumps(key) for key, _ in fields]
    if keys and not draw(st.integers(0, 7)):  # an escape that changes nothing
        at = draw(st.integers(0, len(keys) - 1))
        keys[at] = keys[at].replace("_", "\\u005f", 1)
    gap = [draw(space) for _ in range(6)]
    inside = f"{gap[0]},{gap[1]}".join(
        f"{key}{gap[2]}:{gap[3]}{value}" for key, (_, value) in zip(keys, fields, strict=True)
    )
    line = f"{gap[4]}{{{gap[3]}{inside}{gap[2]}}}{gap[5]}".encode("utf-8", "surrogatepass")
    match draw(st.integers(0, 15)):
        case 0:
            line = line[: draw(st.integers(0, len(line)))]
        case 1:
            at = draw(st.integers(0, len(line)))
            line = line[:at] + draw(st.binary(max_size=3)).replace(b"\n", b"") + line[at:]
        case 2:
            at = draw(st.integers(0, max(len(line) - 1, 0)))
            line = (
                line[:at]
                + draw(st.sampled_from([b",", b"}", b"{", b"]", b'"', b"\\", b"\x00", b"\xff"]))
                + line[at + 1 :]
            )
        case 3:
            line += draw(st.sampled_from([b",", b"}", b"x", b" {}", b"//", b"\r", b"\x00", b"\xef\xbb\xbf"]))
        case 4:
            line = (
                draw(st.sampled_from([b"", b" ", b"\r", b"\x0c", b"\xef\xbb\xbf", b"[" * 5000, b"null", b"[]"])) + line
            )
        case 5:
            line = draw(
                st.sampled_from([b"", b" ", b"\r", b"{}", b"null", b"[]", b"1", b'""', b"[" * 3000, b"\x00" * 9])
            )
    return line


def plain_line(changes: dict[str, str] | None = None) -> bytes:
    fields = GOOD | (changes or {})
    return ("{" + ", ".join(f'"{key}": {value}' for key, value in fields.items()) + "}").encode()


def joined(lines: Sequence[bytes], end: bytes = b"\n") -> bytes:
    """Return a file's text: enough good lines, then those given."""
    head = [plain_line({"instance_index": str(k)}) for k in range(HEADER)]
    return b"".join(line + b"\n" for line in head) + end.join(lines)


@pytest.mark.slow
@FIT
@given(lines=st.lists(a_line(), min_size=1, max_size=8), end=st.sampled_from([b"\n", b"\r\n"]), ended=st.booleans())
def test_both_readers_give_the_same_rows_rejects_and_defects(
    lines: list[bytes], end: bytes, ended: bool, read: Reader
) -> None:
    text = joined(lines, end) + end * ended
    assert read(text, USAGE) == read(text, CAREFULLY)


@pytest.mark.parametrize("field", GOOD)
def test_every_odd_value_in_every_field_is_read_the_same_by_both_readers(field: str, read: Reader) -> None:
    values = {"BIGINT": INTEGERS, "VARCHAR": TEXTS, "DOUBLE": NUMBERS}.get(USAGE.columns[field], NESTED + NUMBERS)
    if USAGE.columns[field] == "FLOAT[]":
        values = [f"[{', '.join(['0.5'] * n)}{', ' * (n > 0)}{value}]" for value in NUMBERS for n in (0, 8, 10)]
    lines = [plain_line({field: value}) for value in values]
    said = read(joined(lines), CAREFULLY)
    assert read(joined(lines), USAGE) == said
    assert not isinstance(said, str), said  # one line never costs the file


LENIENT = [
    ("assigned_memory", "NaN", "not valid JSON"),
    ("assigned_memory", "-Infinity", "not valid JSON"),
    ("assigned_memory", "0.5,", "not valid JSON"),
    ("assigned_memory", "0.5\x0b", "not valid JSON"),
    ("assigned_memory", "true", "assigned_memory is not a double"),
    ("assigned_memory", '" 0.5 "', "assigned_memory is not a double"),
    ("average_usage", '{"cpus": 0.1,}', "not valid JSON"),
    ("average_usage", '{"cpus": true}', "average_usage is not a struct"),
    ("cpu_usage_distribution", "[0.5, ]", "not valid JSON"),
    ("cpu_usage_distribution", "[false]", "cpu_usage_distribution is not a float[]"),
    ("collection_type", '"\\ud800"', "not valid JSON"),
]


@pytest.mark.parametrize(("field", "value", "reason"), LENIENT)
def test_text_that_lenient_json_parsers_accept_is_a_reject(field: str, value: str, reason: str, read: Reader) -> None:
    text = joined([plain_line({field: value})])
    for said in (read(text, USAGE), read(text, CAREFULLY)):
        assert (len(said[0]), said[1]) == (HEADER, [(HEADER + 1, reason)])


def value_of(row: dict[str, Any], path: str) -> Any:
    outer, _, inner = path.partition(".")
    value = row.get(outer)
    return value.get(inner) if inner and value is not None else value


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


def no_constant(constant: str) -> None:
    raise AssertionError(constant)


@FIT
@given(lines=st.lists(a_line(), min_size=1, max_size=8))
def test_what_the_compiled_reader_takes_is_json_and_says_exactly_that(lines: list[bytes]) -> None:
    text = b"".join(line + b"\n" for line in lines)
    rows, others, _ = plain_rows(np.frombuffer(text + bytes(PAD), np.uint8), USAGE, LAYOUT)
    left = {int(number) for number, _, _ in others}
    assert [text[begin:end] for _, begin, end in others] == [lines[k] for k in sorted(left)]
    columns = {field.path: field.column for field in USAGE.fields}
    taken = [line for k, line in enumerate(lines) if k not in left and line.strip(b" \t\r")]
    found = LAYOUT.table_of(rows, np.arange(len(rows))).to_pylist()
    for line, row in zip(taken, found, strict=True):
        raw = json.loads(line.decode(), object_pairs_hook=unique, parse_constant=no_constant)
        assert raw.keys() <= USAGE.columns.keys()
        assert row[s.END_US] > row[s.START_US]
        for field in USAGE.fields:
            value = value_of(raw, field.path)
            expected: Any
            if field.column in LAYOUT.vectors:
                expected = None if not value else [float(np.float32(x)) for x in value]
            elif field.column in LAYOUT.doubles:
                expected = None if value is None else float(value)
            else:
                expected = None if value is None or (field.zero_is_null and int(value) == 0) else int(value)
                if field.only_with is not None and (row[columns[field.only_with]] is None or expected == -1):
                    expected = None
            assert row[field.column] == expected, field.path


def test_a_line_with_all_fields_in_their_usual_form_is_plain_and_so_is_one_with_only_those_it_needs() -> None:
    least = {key: GOOD[key] for key in USAGE.needs}
    for fields in (GOOD | {"alloc_instance_index": "0"}, least, dict(reversed(least.items()))):
        text = ("{" + ",".join(f'"{key}":{value}' for key, value in fields.items()) + "}\r\n").encode()
        rows, others, _ = plain_rows(np.frombuffer(text + bytes(PAD), np.uint8), USAGE, LAYOUT)
        assert (len(rows), len(others)) == (1, 0)


def test_an_integer_that_wraps_around_to_zero_is_not_taken_for_zero(read: Reader) -> None:
    text = plain_line({"assigned_memory": "18446744073709551616.5"}) + b"\n"
    rows, others, _ = plain_rows(np.frombuffer(text + bytes(PAD), np.uint8), USAGE, LAYOUT)
    assert (len(rows), len(others)) == (0, 1)
    said = read(text, USAGE)
    assert not isinstance(said, str)
    (row,), rejects, _ = said
    assert rejects == []
    table = LAYOUT.table_of(np.frombuffer(row, np.uint64).reshape(1, -1), np.arange(1))
    assert table[s.MEMORY_ASSIGNED].to_pylist() == [18446744073709551616.5]


def test_an_exponent_that_a_thousand_zeros_make_up_for_counts_in_full() -> None:
    text = plain_line({"assigned_memory": "0." + "0" * 12_000 + "1e12001"}) + b"\n"
    rows, *_ = plain_rows(np.frombuffer(text + bytes(PAD), np.uint8), USAGE, LAYOUT)
    assert LAYOUT.table_of(rows, np.arange(1))[s.MEMORY_ASSIGNED].to_pylist() == [1.0]


def test_the_lowest_integer_which_stands_for_null_in_staged_rows_is_a_reject(read: Reader) -> None:
    lines = joined([plain_line({"collection_id": f'"{-(2**63)}"'})])
    for said in (read(lines, USAGE), read(lines, CAREFULLY)):
        assert said[1] == [(HEADER + 1, "collection_id is not a bigint")]


@pytest.mark.slow
@FIT
@given(seed=st.integers(0, 2**32), flips=st.integers(1, 6))
def test_flipped_bytes_end_in_the_same_rows_and_rejects_by_both_readers(seed: int, flips: int, read: Reader) -> None:
    random = np.random.default_rng(seed)
    good = [plain_line({"instance_index": str(k)}) for k in range(5)]
    text = bytearray(b"".join(line + b"\n" for line in good))
    for at in random.integers(0, len(text), flips):
        text[at] = random.integers(0, 256) if random.random() < 0.5 else text[at] ^ (1 << int(random.integers(0, 8)))
    lines = joined([]) + bytes(text)
    said = read(lines, CAREFULLY)
    assert read(lines, USAGE) == said
    assert not isinstance(said, str)


@pytest.mark.slow
@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
@given(lines=st.lists(a_line(), min_size=1, max_size=8))
def test_a_dataset_is_the_same_byte_by_byte_with_the_compiled_reader_and_without(
    lines: list[bytes], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("cell")
    (folder / "cell").mkdir()
    (folder / "cell" / "instance_usage-000000000000.json").write_bytes(joined(lines))
    source, made = google_v3(), []
    slow = replace(source, tables=tuple(replace(table, fields=()) for table in source.tables))
    for name, by in (("fast", source), ("slow", slow)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ingest_module, "google_v3", lambda by=by: by)
            ingest(folder / "cell", folder / name, IngestConfig(buckets=2, max_reject_share=1))
        made.append(contents(folder / name))
    assert made[0] == made[1]
