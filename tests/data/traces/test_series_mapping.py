"""The mapping of a series: which files, keys and columns it may name, and what is said of a mistake in it."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import pytest

from reclaim.data import schema as s
from reclaim.data.errors import ConfigError
from reclaim.data.ingest.job import IngestConfig, ingest
from reclaim.data.traces.series_mapping import load_mapping, shipped_mappings
from tests.data.traces.mapped import MAPPING, SAME, config, given_mapping


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (SAME, "machines without a file are those of the windows: name their column with 'machine'"),
        ('file = "a.csv"', "machines.machine must name the column of machines.file"),
        (
            'file = "../a.csv"\nmachine = "m"',
            "below the source folder that ends in .parquet, .csv or .csv.gz, got '../a",
        ),
        ('file = "a.txt"\nmachine = "m"', "got 'a.txt'"),
        ('machine = "m"', "machines.machine is a column of machines.file, which is missing"),
        ("cores = 3", "unknown key 'machines.cores' (known: file, machine, cpu_capacity, memory_capacity)"),
        ('cpu_capacity = "cores"', "machines.cpu_capacity must be a finite number above 0, got 'cores'"),
        ('file = "a.csv"\ncpu_capacity = 0', "must be a column of machines.file or a finite number above 0, got 0"),
        ("cpu_capacity = 1", "machines.memory_capacity must be a finite number above 0, got None"),
    ],
)
def test_a_mistake_in_what_a_mapping_says_of_machines_is_named(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as found:
        load_mapping(given_mapping(tmp_path, f"{MAPPING}[machines]\n{text.removeprefix('[machines]')}\n"))
    assert said in str(found.value)


def test_a_mapping_names_the_machine_of_a_window_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"machine and columns\.machine_id both name the machine: keep one"):
        load_mapping(given_mapping(tmp_path, 'machine = "node"\n' + MAPPING + 'machine_id = "node"\n'))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {'task = "vm"': 'task = "vm"\ntier = "class"'},
            "got 'class' (a column that has it is { column = \"class\" })",
        ),
        ({'task = "vm"': 'task = "vm"\ntier = { batch = "free" }'}, "tier.column must name a column"),
        (
            {'task = "vm"': 'task = "vm"\ntier = { column = "c", batch = "low" }'},
            "tier.batch must be one of free, beb, mid, prod, mon, got 'low'",
        ),
        ({"cpu_limit = 4.0": 'tier = "prod"'}, "key 'tier' belongs above [columns]"),
        ({"cpu_limit = 4.0": "scheduled_us = 5"}, "columns.scheduled_us must be a column name, got 5"),
        (
            {"cpu_limit = 4.0": 'cpu_percentiles = ["p50", "p90"]'},
            "must be a column of lists, or 11 columns of the percentiles 0, 10 … 100, got ['p50', 'p90']",
        ),
        ({"cpu_limit = 4.0": "cpu_tail_percentiles = 1.0"}, "or 9 columns of the percentiles 91, 92 … 99, got 1.0"),
        ({"cpu_limit = 4.0": 'cpu_limit = ["a"]'}, "columns.cpu_limit must be a column name or a finite number"),
    ],
)
def test_a_mistake_in_what_a_mapping_says_of_tiers_runs_and_percentiles_is_named(
    tmp_path: Path, change: dict[str, str], said: str
) -> None:
    text = MAPPING
    for old, new in change.items():
        text = text.replace(old, new)
    with pytest.raises(ConfigError) as found:
        load_mapping(given_mapping(tmp_path, text))
    assert said in str(found.value)


def test_every_mistake_in_a_mapping_is_named_at_once(tmp_path: Path) -> None:
    text = MAPPING.replace("window_s = 300", "windows = 300").replace("cpu_limit", "cpu_limits")
    with pytest.raises(ConfigError, match=r"unknown key 'windows'; missing key 'window_s' \(window_s = 300, the l"):
        load_mapping(given_mapping(tmp_path, text))
    with pytest.raises(ConfigError, match=r"unknown canonical column 'cpu_means'.*columns.cpu_mean is required"):
        load_mapping(given_mapping(tmp_path, MAPPING.replace("cpu_mean", "cpu_means")))
    text = """
task = 3
time = { day = 0, slot = "x", hour = true }
time_unit = "ms"
window_s = true
files = [1]
colour = "red"
[columns]
cpu_limit = nan
memory_limit = -1
priority = true
"""
    with pytest.raises(ConfigError) as caught:
        load_mapping(given_mapping(tmp_path, text))
    for part in (
        "unknown key 'colour'", "'task' must be text", "'window_s' must be a whole number",
        "time_unit must be s where time is",
        "time.day must be a number of seconds above 0, got 0", "time.slot must be", "time.hour must be",
        "files must be globs, got [1]", "columns.cpu_mean is required",
        "columns.cpu_limit must be a column name or a finite number of at least 0, got nan", "columns.memory_limit",
        "columns.priority must be",
    ):  # fmt: skip
        assert part in str(caught.value)
    with pytest.raises(ConfigError, match="'time' must be text or a table; time_unit must be one of"):
        load_mapping(given_mapping(tmp_path, MAPPING.replace('"t"', "7").replace('"s"', '"min"')))
    with pytest.raises(ConfigError, match="time names no column"):
        load_mapping(given_mapping(tmp_path, MAPPING.replace('"t"', "{}")))
    with pytest.raises(ConfigError, match="window_s must be above 0, got 0"):
        load_mapping(given_mapping(tmp_path, MAPPING.replace("window_s = 300", "window_s = 0")))
    with pytest.raises(ConfigError, match="time_unit must be one of s, ms, us, iso, got 'min'"):
        load_mapping(given_mapping(tmp_path, MAPPING.replace('"s"', '"min"')))
    with pytest.raises(ConfigError, match="no such file; shipped are azure, azure-csv, bitbrains, bitbrains-csv"):
        load_mapping(tmp_path / "none.toml")


def test_a_mapping_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    (tmp_path / "mapping.toml").write_bytes(b"# caf\xe9\n" + MAPPING.encode())
    with pytest.raises(ConfigError, match=r"mapping .*mapping.toml: not UTF-8 \(.*0xe9 in position 5"):
        load_mapping(tmp_path / "mapping.toml")


def test_a_mark_of_utf_8_before_a_mapping_is_no_part_of_it(tmp_path: Path) -> None:
    (tmp_path / "mapping.toml").write_bytes(b"\xef\xbb\xbf" + MAPPING.encode())
    assert load_mapping(tmp_path / "mapping.toml").text == MAPPING


@pytest.mark.parametrize("glob", ["", ".", "/etc/*.csv", "../*.csv", "a/../../*.csv"])
def test_a_mapping_names_files_below_the_source_folder_only(tmp_path: Path, glob: str) -> None:
    text = f'files = ["a/*.csv", "{glob}", "..a.csv"]\n' + MAPPING
    with pytest.raises(ConfigError) as caught:
        load_mapping(given_mapping(tmp_path, text))
    assert str(caught.value).endswith(f"mapping.toml: files must be globs below the source folder, got {glob!r}")


def test_series_needs_a_mapping_and_other_traces_take_none() -> None:
    with pytest.raises(ConfigError, match="'series' needs one"):
        IngestConfig(trace="series")
    with pytest.raises(ConfigError, match="a mapping goes with trace 'series'"):
        IngestConfig(mapping="azure")


def test_the_fingerprint_of_a_dataset_by_a_mapping_of_the_first_keys_stays(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.csv").write_text("vm,t,used\n12,600,1.5\n")
    dataset = ingest(tmp_path / "in", tmp_path / "out", config(given_mapping(tmp_path))).dataset
    assert dataset.manifest["fingerprint"] == ("f718c67d1780523b5b6ec6e5c09d8747090ed3fdb695cf1f68a7eaaa4c5c65cc")
    texts = {name: load_mapping(name).text for name in ("azure", "bitbrains", "google-2011-machines")}
    assert {name: sha256(text.encode()).hexdigest()[:16] for name, text in texts.items()} == {
        "azure": "5eebf1570a292685", "bitbrains": "b04435496686ae09", "google-2011-machines": "eb7ab1dbedb6720c",
    }  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        MAPPING.replace('"vm"', '"t"'),
        MAPPING.replace('"t"', "{ day = 86400, vm = 300 }"),
        'collection = "t"\n' + MAPPING,
        'machine = "t"\n' + MAPPING,
        'tier = { column = "t" }\n' + MAPPING,
        MAPPING + 'scheduled_us = "vm"\n',
    ],
)
def test_a_time_in_numbers_and_a_name_are_not_of_one_column(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"'(t|vm)' is a time, and the name of a task, .*: name two columns"):
        load_mapping(given_mapping(tmp_path, text))
    if "{ day" not in text:
        assert load_mapping(given_mapping(tmp_path, text.replace('"s"', '"iso"'))).time == "t"


@pytest.mark.parametrize(
    ("line", "most"),
    [("priority = 119.6", 2**31 - 1), ("priority = 2147483648", 2**31 - 1), ("scheduling_class = 128", 127),
     ("machine_id = 9223372036854775808", 2**63 - 1), ("machine_id = 0.5", 2**63 - 1)],
)  # fmt: skip
def test_a_number_for_all_rows_of_a_column_of_integers_is_one_that_it_can_hold(
    tmp_path: Path, line: str, most: int
) -> None:
    with pytest.raises(ConfigError, match=f"must be a column name or a whole number from 0 to {most}, got"):
        load_mapping(given_mapping(tmp_path, f"{MAPPING}{line}\n"))


def test_a_number_for_all_rows_arrives_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.csv").write_text("vm,t,used\n12,600,1.5\n")
    text = f"{MAPPING}machine_id = {2**53 + 1}\npriority = 120.0\n"
    (row,) = (
        ingest(tmp_path / "in", tmp_path / "out", config(given_mapping(tmp_path, text))).dataset.usage(0).to_pylist()
    )
    assert (row[s.MACHINE_ID], row[s.PRIORITY], row[s.CPU_LIMIT]) == (2**53 + 1, 120, 4.0)
    with pytest.raises(ConfigError, match="machines without a file are those of the windows: name their column"):
        load_mapping(given_mapping(tmp_path, text + SAME))


@pytest.mark.parametrize("header", ["[]", '["t", "t"]', "[1]"])
def test_a_header_of_a_mapping_names_each_column_once(tmp_path: Path, header: str) -> None:
    with pytest.raises(ConfigError, match="header must name each column once, got"):
        load_mapping(given_mapping(tmp_path, f"header = {header}\n{MAPPING}"))


@pytest.mark.parametrize("name", ["azure", "azure-csv", "bitbrains", "bitbrains-csv", "google-2011-machines"])
def test_shipped_mappings_read(name: str) -> None:
    assert name in shipped_mappings()
    assert load_mapping(name).window_s == 300
