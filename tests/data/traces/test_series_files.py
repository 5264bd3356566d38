"""Files of a series as they come: headers, separators, quotes, blanks, line ends, and the layouts of public traces."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from reclaim.cli.results import of_ingest
from reclaim.data import schema as s
from reclaim.data.errors import ConfigError, SchemaError, TraceError
from reclaim.data.ingest.job import ingest
from reclaim.data.survey.facts import survey
from reclaim.data.traces.series import task_id
from tests.data.traces.mapped import MAPPING, config, given_mapping, names_of


@pytest.mark.parametrize(
    "text",
    [
        ",vm,t,used\n0,1,300,1\n1,1,600,2\n",  # as pandas writes an index
        "vm,t,used,\n1,300,1,\n1,600,2,\n",
        "USED,vm,t,used,Used\n9,1,300,1,9\n9,1,600,2,9\n",
        ",column 0,vm,t,used\n0,9,1,300,1\n1,9,1,600,2\n",
    ],
)
def test_columns_that_no_mapping_names_may_have_any_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.csv").write_text(text)
    dataset = ingest(tmp_path / "in", tmp_path / "out", config(given_mapping(tmp_path))).dataset
    assert dataset.usage(0)[s.CPU_MEAN].to_pylist() == [1.0, 2.0]


def test_columns_that_the_query_engine_cannot_tell_apart_are_named(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.csv").write_text("vm,t,used,USED\n1,300,1,2\n")
    mapping = given_mapping(tmp_path, MAPPING + 'cpu_max = "USED"\n')
    with pytest.raises(SchemaError, match=r"a\.csv: columns USED and used differ by case alone; rename one"):
        ingest(tmp_path / "in", tmp_path / "out", config(mapping))
    (tmp_path / "in" / "a.csv").unlink()
    table = pa.table({"vm": ["1"], "t": [300], "used": [1.0], "file_row_number": [0]})
    pq.write_table(table, tmp_path / "in" / "a.parquet")
    with pytest.raises(SchemaError, match=r"a\.parquet: file_row_number is a name of the query engine's own; rename"):
        ingest(tmp_path / "in", tmp_path / "out", config(given_mapping(tmp_path)))


def test_a_single_file_is_read_without_those_beside_it(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name in ("week[1].csv", "week1.csv", "notes.txt"):
        (tmp_path / "in" / name).write_text("vm,t,used\n12,600,1.5\n")
    mapping = config(given_mapping(tmp_path))
    dataset = ingest(tmp_path / "in" / "week[1].csv", tmp_path / "out", mapping).dataset
    manifest = dataset.manifest
    assert (dataset.n_windows, manifest["name"], manifest["not_read"]) == (1, "week[1]", [])
    assert {entry["file"] for entry in manifest["inputs"]} == {"week[1].csv"}
    assert ingest(tmp_path / "in" / "week[1].csv", tmp_path / "out", mapping).already_there
    with pytest.raises(ConfigError, match="holds a dataset made from other files"):
        ingest(tmp_path / "in" / "week1.csv", tmp_path / "out", mapping)
    with pytest.raises(ConfigError, match=r"notes\.txt: a file of a series ends in \.parquet, \.csv or \.csv\.gz"):
        ingest(tmp_path / "in" / "notes.txt", tmp_path / "new", mapping)


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_csv_rows_with_too_many_or_too_few_fields_are_rejects_with_their_lines(tmp_path: Path, delimiter: str) -> None:
    (tmp_path / "in").mkdir()
    text = "vm,t,used\n1,300,1\n1,600,1,7,8\n1,900\n1,1200,1\n1,1500,lots\n"
    (tmp_path / "in" / "a.csv").write_text(text.replace(",", delimiter))
    dataset = ingest(tmp_path / "in", tmp_path / "out", config(given_mapping(tmp_path), share=0.9)).dataset
    rejects = pq.read_table(tmp_path / "out" / "rejects" / "rejects.parquet").to_pylist()
    assert [(r[s.REJECT_LINE], r[s.REJECT_REASON]) for r in rejects] == [
        (3, "row is malformed: too many columns"),
        (4, "row is malformed: missing columns"),
        (6, "used is not a double"),
    ]
    assert dataset.n_windows == 2


def test_parquet_and_csv_of_the_same_rows_give_the_same_windows(tmp_path: Path) -> None:
    for name in ("csv", "parquet"):
        (tmp_path / name).mkdir()
    (tmp_path / "csv" / "a.csv").write_text("vm,t,used\n1,300,1.25\n2,300,0.5\n")
    pq.write_table(pa.table({"vm": [1, 2], "t": [300, 300], "used": [1.25, 0.5]}), tmp_path / "parquet" / "a.parquet")
    mapping = given_mapping(tmp_path)
    made = [ingest(tmp_path / n, tmp_path / f"out-{n}", config(mapping)).dataset.usage(0) for n in ("csv", "parquet")]
    assert made[0].equals(made[1])


@pytest.mark.parametrize("ending", ["parquet", "csv", "csv.gz"])
def test_a_file_that_names_its_columns_is_whole_without_rows_unless_there_is_no_other(
    tmp_path: Path, ending: str
) -> None:
    def part(number: int, rows: pd.DataFrame) -> None:
        file = tmp_path / "in" / f"part-{number}.{ending}"
        rows.to_parquet(file, index=False) if ending == "parquet" else rows.to_csv(file, index=False)

    (tmp_path / "in").mkdir()
    rows = pd.DataFrame({"vm": [1], "t": [300], "used": [1.25]})
    part(0, rows[:0])
    mapping = config(given_mapping(tmp_path))
    with pytest.raises(TraceError, match=rf"in: not one row in part-0\.{ending}$"):
        ingest(tmp_path / "in", tmp_path / "none", mapping)
    part(1, rows)
    part(2, rows[:0])
    dataset = ingest(tmp_path / "in", tmp_path / "out", mapping).dataset
    assert dataset.usage(0)[s.CPU_MEAN].to_pylist() == [1.25]
    assert dataset.manifest["repeated"] == []


def test_a_folder_named_key_is_value_adds_no_column(tmp_path: Path) -> None:
    file = tmp_path / "in" / "used=7" / "a.parquet"
    file.parent.mkdir(parents=True)
    pq.write_table(pa.table({"vm": [1], "t": [300], "used": [1.25]}), file)
    mapping = given_mapping(tmp_path, 'files = ["*/*.parquet"]\n' + MAPPING)
    dataset = ingest(tmp_path / "in", tmp_path / "out", config(mapping)).dataset
    assert dataset.usage(0)[s.CPU_MEAN].to_pylist() == [1.25]
    pq.write_table(pa.table({"vm": [1], "t": [300]}), file)
    with pytest.raises(SchemaError, match=r"the mapping names columns used, the file has t, vm$"):
        ingest(tmp_path / "in", tmp_path / "lacks", config(mapping))


@pytest.mark.parametrize("header", ["", 'header = ["vm", "t", "used"]\n'])
@pytest.mark.parametrize("ending", ["csv", "csv.gz"])
def test_a_folder_named_key_is_value_replaces_no_column_of_a_csv_file(tmp_path: Path, ending: str, header: str) -> None:
    file = tmp_path / "in" / "vm=7" / "used=7" / f"a.{ending}"
    file.parent.mkdir(parents=True)
    text = ("" if header else "vm,t,used\n") + "1,300,1.25\n"
    file.write_bytes(gzip.compress(text.encode()) if ending == "csv.gz" else text.encode())
    mapping = given_mapping(tmp_path, f'files = ["**/*.{ending}"]\n{header}{MAPPING}')
    usage = ingest(tmp_path / "in", tmp_path / "out", config(mapping)).dataset.usage(0)
    assert (usage[s.COLLECTION_ID].to_pylist(), usage[s.CPU_MEAN].to_pylist()) == ([1], [1.25])


PUBLISHED_VM = (
    "Timestamp [ms];\tCPU cores;\tCPU capacity provisioned [MHZ];\tCPU usage [MHZ];\tCPU usage [%];\t"
    "Memory capacity provisioned [KB];\tMemory usage [KB];\tDisk read throughput [KB/s];\t"
    "Disk write throughput [KB/s];\tNetwork received throughput [KB/s];\tNetwork transmitted throughput [KB/s]\n"
    "1376314846;\t4;\t11703.998;\t10912.25;\t93.23;\t6.7108864E7;\t6129274.4;\t0.13;\t20.06;\t1.66;\t0.73\n"
    "1376315146;\t4;\t11703.998;\t10890.5;\t93.05;\t6.7108864E7;\t6755624.0;\t13.4;\t26.2;\t2.4;\t0.8\n"
)
"""Rows in the layout of GWA-T-12."""


def test_the_files_of_bitbrains_are_read_as_they_are_published(tmp_path: Path) -> None:
    folder = tmp_path / "2013-8"
    folder.mkdir()
    off = PUBLISHED_VM.splitlines()[0] + "\n1376315446;\t0;\t0.0;\t0.0;\t0.0;\t0.0;\t0.0;\t0.0;\t0.0;\t0.0;\t0.0\n"
    for name, text in (("1", PUBLISHED_VM), ("2", PUBLISHED_VM), ("31", off)):
        (folder / f"{name}.csv").write_text(text)
    dataset = ingest(folder, tmp_path / "out", config("bitbrains-csv", share=1)).dataset
    rows = dataset.usage(0).to_pylist()
    assert [row[s.COLLECTION_ID] for row in rows] == [1, 1, 2, 2]  # two files of the same bytes are two VMs
    assert dataset.manifest["repeated"] == []
    first = {s.START_US: 1_376_314_846_000_000, s.CPU_MEAN: 10912.25, s.CPU_LIMIT: 11703.998,
             s.MEMORY_MEAN: 6129274.4, s.MEMORY_LIMIT: 67108864.0}  # fmt: skip
    assert {name: rows[0][name] for name in first} == first
    with pytest.raises(TraceError, match="are left out with a larger --max-reject-share"):
        ingest(folder, tmp_path / "strict", config("bitbrains-csv"))
    with pytest.raises(SchemaError, match=r"the mapping names columns .*; --mapping bitbrains-csv reads the files"):
        ingest(folder, tmp_path / "cut", config("bitbrains"))


def test_the_files_of_azure_are_read_as_they_are_published(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    vm = "yNf/R3X8fyXkOJm3ihXQcT0F52a8cDWPPRzTT6QFW8N+1QPfeKR5//6xyX0VYn7X"
    files = {
        "vm_cpu_readings-file-1-of-125.csv.gz": f"0,{vm},19.1,22.9,20.5\n0,b+/=,0,1.5,0.25\n",
        "trace_data_vm_cpu_readings_vm_cpu_readings-file-2-of-125.csv.gz": f"300,{vm},18,30,21\n",
        "vmtable.csv.gz": f"{vm},s,d,0,2591700,99.36,3.42,10.19,Delay-insensitive,1,1.75\n",
    }
    for name, text in files.items():
        (tmp_path / "in" / name).write_bytes(gzip.compress(text.encode()))
    dataset = ingest(tmp_path / "in", tmp_path / "out", config("azure-csv")).dataset
    rows = {(row[s.COLLECTION_ID], row[s.START_US]): row for row in dataset.usage(0).to_pylist()}
    assert {key: (row[s.CPU_MEAN], row[s.CPU_MAX], row[s.CPU_LIMIT]) for key, row in rows.items()} == {
        (task_id(vm), 0): (20.5, 22.9, 100.0),
        (task_id(vm), 300_000_000): (21.0, 30.0, 100.0),
        (task_id("b+/="), 0): (0.25, 1.5, 100.0),
    }
    assert dataset.manifest["not_read"] == ["vmtable.csv.gz"]
    assert dataset.manifest["rejects"] == {}


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_a_mapping_names_the_columns_of_files_without_a_header(tmp_path: Path, delimiter: str) -> None:
    (tmp_path / "in").mkdir()
    text = '300,"a,b;c|d\te",1\n600,web,lots\n900,web,2,3\n1200,web,4\n'
    (tmp_path / "in" / "a.csv").write_text("\n".join(
        line if k == 0 else line.replace(",", delimiter) for k, line in enumerate(text.splitlines())
    ).replace('300,"a,b;c|d\te",1', delimiter.join(['300', '"a,b;c|d\te"', '1'])) + "\n")  # fmt: skip
    mapping = given_mapping(tmp_path, 'header = ["t", "vm", "used"]\n' + MAPPING)
    dataset = ingest(tmp_path / "in", tmp_path / "out", config(mapping, share=0.9)).dataset
    rejects = pq.read_table(dataset.path / "rejects" / "rejects.parquet")
    assert list(zip(rejects["line"].to_pylist(), rejects["reason"].to_pylist(), strict=True)) == [
        (2, "used is not a double"), (3, "row is malformed: too many columns")
    ]  # fmt: skip
    assert {row[s.COLLECTION_ID]: row[s.CPU_MEAN] for row in dataset.usage(0).to_pylist()} == {
        task_id("a,b;c|d\te"): 1.0, task_id("web"): 4.0
    }  # fmt: skip


def test_a_header_line_where_the_mapping_says_that_there_is_none_is_a_reject(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.csv").write_text("t,vm,used\n300,1,1\n")
    mapping = given_mapping(tmp_path, 'header = ["t", "vm", "used"]\n' + MAPPING)
    dataset = ingest(tmp_path / "in", tmp_path / "out", config(mapping, share=0.5)).dataset
    assert (dataset.n_windows, dataset.manifest["rejects"]) == (1, {"used is not a double": 1})


@pytest.mark.parametrize("ending", ["csv", "csv.gz", "parquet"])
def test_the_name_of_a_file_can_be_a_column(tmp_path: Path, ending: str) -> None:
    (tmp_path / "in" / "sub").mkdir(parents=True)
    table = pd.DataFrame({"t": [300, 600], "used": [1.0, 2.0]})
    for path in (tmp_path / "in" / f"web.1.{ending}", tmp_path / "in" / "sub" / f"7.{ending}"):
        table.to_parquet(path) if ending == "parquet" else table.to_csv(path, index=False)
    text = f'file_column = "vm"\nfiles = ["**/*.{ending}"]\n'
    dataset = ingest(tmp_path / "in", tmp_path / "out", config(given_mapping(tmp_path, text + MAPPING))).dataset
    assert dict.fromkeys(dataset.usage(0)[s.COLLECTION_ID].to_pylist()) == dict.fromkeys(sorted([7, task_id("web.1")]))
    assert names_of(dataset) == [("web.1", "web.1", task_id("web.1"), 0)]
    named = given_mapping(tmp_path, text.replace('"vm"', '"used"') + MAPPING)
    with pytest.raises(SchemaError, match="the mapping's file_column used is a column of the file; rename it"):
        ingest(tmp_path / "in", tmp_path / "twice", config(named))


def test_the_name_of_a_file_is_read_as_the_column_that_the_mapping_makes_of_it(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name in ("0", "1", "x"):  # a file of each day
        (tmp_path / "in" / f"{name}.csv").write_text("vm,slot,used\n1,0,1\n1,1,2\n")
    text = 'file_column = "day"\n' + MAPPING.replace('"t"', "{ day = 86400, slot = 300 }")
    dataset = ingest(tmp_path / "in", tmp_path / "days", config(given_mapping(tmp_path, text), share=0.4)).dataset
    assert dataset.usage(0)[s.START_US].to_pylist() == [0, 300_000_000, 86_400_000_000, 86_700_000_000]
    assert dataset.manifest["rejects"] == {"day is not a double": 2}
    text = 'file_column = "rank"\n' + MAPPING.replace('"t"', '"slot"') + 'priority = "rank"\n'
    dataset = ingest(tmp_path / "in", tmp_path / "ranks", config(given_mapping(tmp_path, text), share=0.4)).dataset
    assert dataset.manifest["rejects"] == {"rank is not a integer": 2}


@pytest.mark.parametrize("name", ["a.tsv", "a.json", "a.csv.bz2", "README"])
def test_a_file_of_another_ending_that_a_mapping_names_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "b.csv").write_text("vm,t,used\n1,300,1\n")
    (tmp_path / "in" / name).write_text("vm\tt\tused\n1\t300\t1\n")
    mapping = given_mapping(tmp_path, 'files = ["*"]\n' + MAPPING)
    with pytest.raises(ConfigError, match=rf"{name}: a file of a series ends in \.parquet, \.csv or \.csv\.gz; rename"):
        ingest(tmp_path / "in", tmp_path / "out", config(mapping))


def test_a_gzip_of_an_empty_file_is_damaged_as_the_empty_file_is(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.csv.gz").write_bytes(gzip.compress(b""))
    (tmp_path / "in" / "b.csv").write_bytes(b"")
    with pytest.raises(TraceError, match=r"2 damaged files: .*a\.csv\.gz: empty file; .*b\.csv: empty file"):
        ingest(tmp_path / "in", tmp_path / "out", config(given_mapping(tmp_path)))


def test_an_error_of_no_row_names_each_file_once(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.csv").write_text("vm,t,used\n,300,1\n")  # read for the names, too
    with pytest.raises(TraceError, match=r"in: not one row in a\.csv$"):
        ingest(tmp_path / "in", tmp_path / "out", config(given_mapping(tmp_path), share=1))


def test_blanks_around_the_names_and_values_of_a_file_are_none_of_theirs(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.csv").write_text("t; vm;\tused ;\thost\n300; web;\t1.5 ;\t7\n600; web; 2;\t\n")
    mapping = given_mapping(tmp_path, MAPPING + 'machine_id = "host"\n')
    dataset = ingest(tmp_path / "in", tmp_path / "out", config(mapping)).dataset
    assert dataset.usage(0)[s.CPU_MEAN].to_pylist() == [1.5, 2.0]
    assert dataset.usage(0)[s.MACHINE_ID].to_pylist() == [7, None]
    assert set(dataset.usage(0)[s.COLLECTION_ID].to_pylist()) == {task_id("web")}
    exact = given_mapping(tmp_path, MAPPING.replace('"vm"', '" vm"'))  # a mapping may name the blanks
    dataset = ingest(tmp_path / "in", tmp_path / "exact", config(exact)).dataset
    assert set(dataset.usage(0)[s.COLLECTION_ID].to_pylist()) == {task_id(" web")}


def test_blanks_around_a_value_are_none_of_it_whatever_the_header_has(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.csv").write_text("vm,t,used,host,class\nweb,300,1,7,gold\n web ,600,\t ,\t7 , gold\n")
    text = 'tier = { column = "class", gold = "prod" }\n' + MAPPING + 'machine_id = "host"\n'
    headless = 'header = ["vm", "t", "used", "host", "class"]\n' + text
    for name, mapping in (("headed", text), ("headless", headless)):
        dataset = ingest(tmp_path / "in", tmp_path / name, config(given_mapping(tmp_path, mapping), share=0.4)).dataset
        rows = [(x[s.COLLECTION_ID], x[s.START_US], x[s.CPU_MEAN], x[s.MACHINE_ID], x[s.TIER])
                for x in dataset.usage(0).to_pylist()]  # fmt: skip
        tier = s.TIERS.index("prod")
        assert rows == [(task_id("web"), 300_000_000, 1.0, 7, tier), (task_id("web"), 600_000_000, None, 7, tier)]
        assert dict.fromkeys(row[1] for row in names_of(dataset) if row[1] != "vm") == {"web": None}


NAMED = MAPPING.replace("cpu_limit = 4.0", 'cpu_limit = "most"')


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("place", ["name", "value", "closed far below"])
def test_a_quote_that_is_not_closed_is_a_damaged_file_and_swallows_no_rows(
    place: str, packed: bool, tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    good = [f"a,{300 * k},0.5,1" for k in range(200)]
    odd = 'b,0,",1' if place == "value" else '"b,0,0.5,1'
    lines = ["vm,t,used,most", *good, odd, *good, *(['c",0,0.5,1'] if place == "closed far below" else [])]
    text = ("\n".join(lines) + "\n").encode()
    (tmp_path / "in" / f"a.csv{'.gz' * packed}").write_bytes(gzip.compress(text) if packed else text)
    with pytest.raises(TraceError, match=r"1 damaged file: .*a quote in the row that begins in line 202 is not closed"):
        ingest(tmp_path / "in", tmp_path / "out", config(given_mapping(tmp_path, NAMED)))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param('"b,0,0.5,1', 'b",300,0.5,1', id="both in the name"),
        pytest.param('"b,0,0.5,1', '"b,300,0.5,1', id="both open"),
        pytest.param('b,0,0.5,"1', 'b,300,0.5,1"', id="in the last value"),
        pytest.param('b"c,0,0.5,"1', 'b,300,0.5,1"', id="an even number in each line"),
    ],
)
@pytest.mark.parametrize("between", [0, 50])
def test_a_quote_that_is_closed_in_a_later_row_swallows_no_rows(
    first: str, second: str, between: int, tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    lines = ["vm,t,used,most", "a,0,0.5,1", first, *(f"a,{300 * k},0.5,1" for k in range(1, between + 1)), second]
    (tmp_path / "in" / "a.csv").write_text("\n".join(lines) + "\n")
    with pytest.raises(TraceError, match="a quote in the row that begins in line 3 is not closed in that row"):
        ingest(tmp_path / "in", tmp_path / "out", config(given_mapping(tmp_path, NAMED), share=0.9))


@pytest.mark.parametrize("ends", [("\n", "\r\n"), ("\r\n", "\n"), ("\n", "\r")])
def test_a_file_whose_lines_end_in_different_ways_is_named_as_such(ends: tuple[str, str], tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    text = f"vm,t,used{ends[0]}a,0,0.5{ends[0]}a,300,0.5{ends[1]}a,600,0.5{ends[1]}"
    (tmp_path / "in" / "a.csv").write_text(text, newline="")
    with pytest.raises(TraceError, match="some lines end in a carriage return and others do not; end all in a line"):
        ingest(tmp_path / "in", tmp_path / "out", config(given_mapping(tmp_path)))


def test_the_lines_of_rejects_count_line_breaks_within_names(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    text = 'vm,t,used\n"b\nb\n\nb",0,1\na,300,lots\n\na,600\na,900,-1\n"c\nc",0,x\na,1200,x\n'
    (tmp_path / "in" / "a.csv").write_text(text)
    ingest(tmp_path / "in", tmp_path / "out", config(given_mapping(tmp_path), share=0.9))
    rejects = pq.read_table(tmp_path / "out" / "rejects" / "rejects.parquet")
    assert rejects[s.REJECT_LINE].to_pylist() == [6, 8, 9, 10, 12]


def test_names_with_quotes_and_line_breaks_are_kept(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    long = "\n".join(f"{k}, {k}" for k in range(200))
    text = 'vm,t,used,most\n"a""b",0,0.5,1\n5"disk,0,0.5,1\n"c\nd",0,0.5,1\n"e,f",0,0.5,1\n'
    text += f'"{long}",0,0.5,1\n'
    (tmp_path / "in" / "a.csv").write_text(text)
    dataset = ingest(tmp_path / "in", tmp_path / "out", config(given_mapping(tmp_path, NAMED))).dataset
    found = set(dataset.table("tasks")["collection_id"].to_pylist())
    assert found == {task_id(name) for name in ('a"b', '5"disk', "c\nd", "e,f", long)}


@pytest.mark.parametrize("ending", ["csv", "csv.gz", "parquet"])
@pytest.mark.parametrize(
    ("name", "other"), [("a[1]", "a1"), ("a?", "ab"), ("a*", "ab"), ("[!b]/a", "c/a"), ("{a,b}", "a")]
)
def test_a_name_that_looks_like_a_pattern_of_others_is_that_of_its_own_file(
    name: str, other: str, ending: str, tmp_path: Path
) -> None:
    for task, file in ((7, name), (8, other)):
        path = tmp_path / "in" / f"{file}.{ending}"
        path.parent.mkdir(parents=True, exist_ok=True)
        table = pd.DataFrame({"vm": [task], "t": [300], "used": [float(task)]})
        table.to_parquet(path) if ending == "parquet" else table.to_csv(path, index=False)
    mapping = given_mapping(tmp_path, f'files = ["**/*.{ending}"]\n' + MAPPING)
    usage = ingest(tmp_path / "in", tmp_path / "out", config(mapping)).dataset.usage(0)
    assert dict(zip(usage[s.COLLECTION_ID].to_pylist(), usage[s.CPU_MEAN].to_pylist(), strict=True)) == {7: 7.0, 8: 8.0}


def test_a_file_whose_name_is_not_utf_8_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / os.fsdecode(b"caf\xe9.csv")).write_text("vm,t,used\n1,300,1\n")
    with pytest.raises(ConfigError, match=r"in: the name of 'caf.udce9\.csv' is not UTF-8; rename it$"):
        ingest(tmp_path / "in", tmp_path / "out", config(given_mapping(tmp_path)))


def test_rejects_are_those_of_their_files_in_a_folder_named_as_a_column_of_theirs(tmp_path: Path) -> None:
    folder = tmp_path / "reason=7" / "line=7"
    (folder / "in").mkdir(parents=True)
    (folder / "in" / "a.csv").write_text("vm,t,used\n1,300,1\n1,600,x\n1,900,1\n")
    dataset = ingest(folder / "in", folder / "out", config(given_mapping(tmp_path), share=0.5)).dataset
    assert dataset.manifest["rejects"] == {"used is not a double": 1}
    assert dataset.table("rejects")["line"].to_pylist() == [3]


def test_folders_whose_names_look_like_patterns_are_no_others(tmp_path: Path) -> None:
    for task, folder in ((8, "in1"), (7, "in[1]")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.csv").write_text(f"vm,t,used\nvm-{task},300,{task}\nvm-{task},x,1\n")
    mapping = config(given_mapping(tmp_path), share=0.5)
    made = [ingest(tmp_path / f"in{k}", tmp_path / f"out{k}", mapping).dataset for k in ("1", "[1]")]
    assert [one.usage(0)[s.COLLECTION_ID].to_pylist() for one in made] == [[task_id("vm-8")], [task_id("vm-7")]]
    assert [one.table("tasks")[s.COLLECTION_ID].to_pylist() for one in made] == [[task_id("vm-8")], [task_id("vm-7")]]
    assert [survey(one)["used_of_limits"]["cpu"] for one in made] == [2.0, 1.75]


def test_ingest_names_the_first_files_that_were_not_read(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.csv").write_text("vm,t,used\n1,300,0.5\n")
    for number, said in ((1, "not read: 0.zip"), (5, "not read: 0.zip, 1.zip, 2.zip and 2 more")):
        for name in range(number):
            (tmp_path / "in" / f"{name}.zip").touch()
        report = ingest(tmp_path / "in", tmp_path / f"out-{number}", config(given_mapping(tmp_path, MAPPING)))
        assert said in of_ingest(report, tmp_path / "out")[1]
