"""The survey behind `inspect`: facts computed by hand, bounded points, one self-contained page, equal bytes."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from reclaim.cli import app as cli
from reclaim.data import schema as s
from reclaim.data.core.pages.render import inline_svg
from reclaim.data.dataset import Dataset
from reclaim.data.errors import ConfigError, TraceError
from reclaim.data.ingest.job import IngestConfig, ingest
from reclaim.data.survey.facts import survey
from reclaim.data.survey.figures import draw
from reclaim.data.survey.machines import _step_s
from reclaim.data.survey.page import render_page, write_page
from reclaim.data.survey.query import percentiles
from reclaim.data.survey.tables import summary, tables, text
from reclaim.data.traces.alibaba_2017_columns import COLUMNS
from tests.browser import found_in

Make = Callable[..., dict[str, Any]]
Write = Callable[..., Path]
OTHER = {"collection_id": "2", "priority": "50", "resource_request": {"cpus": 0.2, "memory": 0.4}}
SERIES = 'task = "vm"\ntime = "t"\ntime_unit = "s"\nwindow_s = 300\n[columns]\ncpu_mean = "used"\ncpu_limit = 4.0\n'


def machine(time_s: int, machine_id: int, type_: int, cpus: float, memory: float) -> dict[str, Any]:
    return {"time": str(time_s * 1_000_000), "machine_id": str(machine_id), "type": str(type_),
            "capacity": {"cpus": cpus, "memory": memory}}  # fmt: skip


@pytest.fixture
def cell(tmp_path: Path, window: Make, event: Make, write_shard: Write) -> Path:
    """Return the source folder of three tasks and two machines.

    A (prod, limit 0.3) has windows at 600, 900 and, evicted in between, 1500 s, and a new limit at 1600 s. B (free,
    limit 0.2) has one of 300 s at 600 s and one of 270 s at 750 s, which overlap. C (mon) has an event and no usage.
    """
    folder = tmp_path / "cell"
    usage_b = {"collection_id": "2", "machine_id": "8"}
    write_shard(folder, "instance_usage-000000000000", [
        window(600), window(900), window(1500),
        window(600, average_usage={"cpus": 0.4, "memory": 0.1}, **usage_b),
        window(750, average_usage={"cpus": 0.2, "memory": 0.1}, end_time="1020000000", cpu_usage_distribution=None,
               **usage_b),
        "{no json\n",
    ])  # fmt: skip
    write_shard(folder, "instance_events-000000000000", [
        event(500, 0), event(600, 3), event(1200, 4), event(1500, 3),
        event(1600, 10, resource_request={"cpus": 0.4, "memory": 0.5}),
        event(0, 0, **OTHER), event(600, 3, missing_type="2", **OTHER),
        event(700, 0, collection_id="3", priority="360"),
    ])  # fmt: skip
    write_shard(folder, "machine_events-000000000000", [
        machine(0, 7, 1, 1.0, 1.0), machine(0, 8, 1, 0.5, 0.25), machine(1000, 8, 2, 0.5, 0.25),
        machine(1500, 7, 3, 2.0, 1.0),
    ])  # fmt: skip
    return folder


def dataset(source: Path, **options: Any) -> Dataset:
    options = {"buckets": 3, "max_reject_share": 1.0, **options}
    out = source.with_name(f"{source.name}-{options['buckets']}")
    return ingest(source, out, IngestConfig(**options)).dataset


def first_figures(facts: dict[str, Any]) -> dict[str, Any]:
    return {str(row["figure"]): row["value"] for row in summary(facts).as_records()}


@pytest.fixture
def facts(cell: Path) -> dict[str, Any]:
    return survey(dataset(cell))


def test_tiers_divide_tasks_hours_limits_and_usage(facts: dict[str, Any]) -> None:
    free, prod, mon = facts["tiers"]
    assert [t["tier"] for t in facts["tiers"]] == ["free", "prod", "mon"]
    assert [(t["tasks"], t["windows"]) for t in facts["tiers"]] == [(1, 2), (1, 3), (1, 0)]
    assert (free["task_hours"], prod["task_hours"], mon["task_hours"]) == (pytest.approx(570 / 3600), 0.25, 0.0)
    limit_b, limit_a = 0.2 * 570 / 3600, 0.3 * 900 / 3600
    usage_b, usage_a = (0.4 * 300 + 0.2 * 270) / 3600, 0.1 * 900 / 3600
    assert free["cpu"] == pytest.approx({
        "limit_hours": limit_b, "limit_share": limit_b / (limit_a + limit_b),
        "usage_hours": usage_b, "usage_share": usage_b / (usage_a + usage_b), "usage_of_limit": usage_b / limit_b,
    })  # fmt: skip
    assert prod["cpu"]["usage_of_limit"] == pytest.approx(1 / 3)
    assert prod["memory"]["usage_of_limit"] == pytest.approx(0.2 / 0.5)
    assert mon["cpu"]["limit_hours"] is None
    assert mon["cpu"]["limit_share"] is None


def test_tasks_inside_an_alloc_instance_do_not_count_twice(
    tmp_path: Path, window: Make, event: Make, write_shard: Write
) -> None:
    folder, inside = tmp_path / "cell", {"alloc_collection_id": "55", "alloc_instance_index": "0"}
    used = {"average_usage": {"cpus": 0.3, "memory": 0.1}}
    write_shard(folder, "instance_usage-0", [window(600), window(600, collection_id="4", **inside, **used)])
    write_shard(folder, "instance_events-0", [event(600, 3), event(600, 3, collection_id="4", **inside)])
    found = survey(dataset(folder))
    assert found["windows"]["in_alloc"] == 1
    assert found["tiers"][0]["task_hours"] == pytest.approx(600 / 3600)
    assert found["tiers"][0]["cpu"]["limit_hours"] == pytest.approx(0.3 * 300 / 3600)
    assert found["timeline"]["cpu_usage"] == [0.1]
    assert found["used_of_limits"]["cpu"] == found["tiers"][0]["cpu"]["usage_of_limit"] == pytest.approx(1 / 3)


def test_usage_is_compared_only_with_a_limit_of_the_same_window_and_up_to_ten_times_of_it(tmp_path: Path) -> None:
    # three windows of a limit of 0.5 used 0.4, 0.2 and 10; one has no usage and one no limit
    (tmp_path / "vms").mkdir()
    rows = "1,0,0.4,0.5\n1,300,,0.5\n1,600,0.9,\n2,0,0.2,0.5\n2,300,10,0.5\n"
    (tmp_path / "vms" / "a.csv").write_text("vm,t,used,granted\n" + rows)
    (tmp_path / "mapping.toml").write_text(SERIES.replace("cpu_limit = 4.0", 'cpu_limit = "granted"'))
    found = survey(dataset(tmp_path / "vms", trace="series", mapping=str(tmp_path / "mapping.toml")))
    assert found["used_of_limits"]["cpu"] == pytest.approx(10.6 / 1.5)
    assert found["tiers"][0]["cpu"]["usage_of_limit"] == pytest.approx(10.6 / 1.5)
    (only,) = found["usage_of_limit"]["cpu"]  # of one tier, so there is no row of all
    assert (only["tier"], only["windows"], only["largest"], only["percentiles"]["p99"]) == ("unknown", 3, 20.0, 10.0)
    assert (found["windows"]["no_cpu_limit"], found["windows"]["no_memory_limit"]) == (1, 5)


def test_usage_over_limit_is_described_by_percentiles_and_the_share_above(facts: dict[str, Any]) -> None:
    free, prod, everything = facts["usage_of_limit"]["cpu"]  # B: 2.0 and 1.0 of its limit; A: a third, three times
    assert (free["windows"], free["share_above_1"], free["largest"]) == (2, 0.5, 2.0)
    assert free["percentiles"] == {"p5": 1.0, "p25": 1.0, "p50": 1.0, "p75": 2.0, "p95": 2.0, "p99": 2.0}
    assert (prod["percentiles"]["p5"], prod["share_above_1"]) == (0.333, 0.0)
    assert (everything["tier"], everything["windows"], everything["share_above_1"]) == ("all", 5, 0.2)
    assert (everything["percentiles"]["p50"], everything["percentiles"]["p75"]) == (0.333, 1.0)
    at = dict(zip(range(151), everything["curve"], strict=True))  # percent of the limit → share of windows
    assert (at[0], at[33], at[34], at[99], at[100], at[150]) == (0.0, 0.0, 0.6, 0.6, 0.8, 0.8)


def test_the_cell_over_time_has_each_window_where_it_lies_and_capacity_as_of_time(facts: dict[str, Any]) -> None:
    over_time = facts["timeline"]
    assert (over_time["step_s"], over_time["first_us"], over_time["points"]) == (300, 600_000_000, 4)
    # B's second window, 750 to 1020 s, is in half of the first step and in 120 s of the second
    assert over_time["cpu_usage"] == pytest.approx([0.1 + 0.4 + 0.2 / 2, 0.1 + 0.2 * 0.4, 0.0, 0.1])
    assert over_time["cpu_limit"] == pytest.approx([0.3 + 0.2 + 0.2 / 2, 0.3 + 0.2 * 0.4, 0.0, 0.3])
    assert over_time["cpu_capacity"] == [1.5, 1.0, 1.0, 2.0]  # 8 is removed at 1000 s, 7 grows at 1500 s
    assert over_time["memory_capacity"] == [1.25, 1.0, 1.0, 1.0]
    assert over_time["machines"] == [2, 1, 1, 1]
    assert facts["machines"]["of_capacity"]["cpu"]["usage"] == pytest.approx(0.88 / 5.5)
    assert (over_time["submitted"], over_time["started"], over_time["ended"]) == (
        [1, 0, 0, 0], [2, 0, 0, 1], [0, 0, 1, 0],
    )  # fmt: skip


def test_a_machine_that_goes_and_comes_back_at_one_time_is_in_service(cell: Path, write_shard: Write) -> None:
    again = [machine(1200, 8, 1, 0.25, 0.25), machine(1500, 8, 1, 0.5, 0.25), machine(1500, 8, 2, 0.25, 0.25)]
    write_shard(cell, "machine_events-000000000001", again)
    found = survey(dataset(cell))
    assert found["timeline"]["machines"] == [2, 1, 2, 2]
    assert {"cpu": 0.5, "memory": 0.25, "machines": 1} in found["machines"]["capacities"]


def test_a_long_window_is_spread_over_all_it_covers_in_at_most_a_thousand_steps(
    tmp_path: Path, window: Make, write_shard: Write
) -> None:
    folder, month = tmp_path / "cell", 31 * 86_400
    write_shard(folder, "instance_usage-0", [window(0, end_time=str(month * 1_000_000))])
    over_time = survey(dataset(folder))["timeline"]
    assert (over_time["step_s"], over_time["points"]) == (3600, month // 3600)
    assert over_time["cpu_usage"] == [0.1] * over_time["points"]
    assert over_time["cpu_limit"] is None


def test_gaps_overlaps_and_restarts_are_counted(facts: dict[str, Any]) -> None:
    w = facts["windows"]
    assert (w["windows"], w["exact"], w["shorter"], w["longer"]) == (5, 4, 1, 0)
    assert (w["length_s"]["p0"], w["length_s"]["p50"], w["length_s"]["p100"]) == (270, 300, 300)
    assert (w["gaps"], w["gap_share"], w["gaps_between_runs"], w["tasks_with_gaps"]) == (1, 0.2, 1, 1)
    assert (w["missing_hours"], w["longest_gap_hours"]) == (pytest.approx(300 / 3600), pytest.approx(300 / 3600))
    assert (w["overlapping"], w["restarts"], w["tasks_restarted"], w["limit_changes"]) == (1, 1, 1, 0)
    assert (w["windows_per_task"]["p5"], w["windows_per_task"]["p100"]) == (2, 3)
    assert (w["in_alloc"], w["no_cpu_limit"], w["no_tier"], w["machines"]) == (0, 0, 0, 2)


def test_a_gap_begins_where_the_last_of_all_windows_before_ended(
    tmp_path: Path, window: Make, write_shard: Write
) -> None:
    rows = [window(0, end_time="1200000000"), window(300), window(1200), window(1800)]
    write_shard(tmp_path / "cell", "instance_usage-0", rows)
    found = survey(dataset(tmp_path / "cell"))["windows"]
    assert (found["overlapping"], found["gaps"], found["missing_hours"]) == (1, 1, pytest.approx(300 / 3600))


def test_tasks_live_from_first_to_last_seen_and_events_are_counted_by_name(facts: dict[str, Any]) -> None:
    tasks = facts["tasks"]  # A from 500 to 1800 s, B from 600 to 1020 s (its submission is before the trace), C at once
    assert tasks["lifetime_hours"]["p100"] == pytest.approx(1300 / 3600)
    assert tasks["lifetime_hours"]["p50"] == pytest.approx(420 / 3600)
    assert {band["from_s"]: band["tasks"] for band in tasks["lifetimes"] if band["tasks"]} == {0: 1, 300: 1, 900: 1}
    assert (tasks["usage_without_events"], tasks["events_without_usage"]) == (0, 1)
    assert (tasks["limit_changes"], tasks["tasks_with_limit_changes"], tasks["most_limit_changes"]) == (1, 1, 1)
    counts = {row["event"]: (row["events"], row["before"], row["synthesised"]) for row in facts["events"]["types"]}
    assert counts == {"SUBMIT": (3, 1, 0), "SCHEDULE": (3, 0, 1), "EVICT": (1, 0, 0), "UPDATE_RUNNING": (1, 0, 0)}
    assert facts["events"]["synthesised"] == {"NO_SNAPSHOT_OR_TRANSITION": 1}


def test_missing_fields_machines_and_rejects_are_counted(facts: dict[str, Any]) -> None:
    missing = facts["missing"]["usage"]
    assert set(s.USAGE.names) <= missing.keys() <= {*s.USAGE.names, *s.EXTRAS}
    assert (missing["cpu_percentiles"], missing["cpu_mean"], missing["cpi"]) == (0.2, 0.0, 1.0)
    assert facts["machines"]["capacities"] == [
        {"cpu": 0.5, "memory": 0.25, "machines": 1}, {"cpu": 2.0, "memory": 1.0, "machines": 1},
    ]  # fmt: skip
    assert [(e["event"], e["events"], e["before"]) for e in facts["machines"]["events"]] == [
        ("ADD", 2, 2), ("REMOVE", 1, 0), ("UPDATE", 1, 0),
    ]  # fmt: skip
    (reject,) = facts["quality"]["rejects"]
    assert (reject["lines"], reject["file"], reject["line"]) == (1, "instance_usage-000000000000.json.gz", 6)
    assert facts["head"]["read"]["usage"]["rows"] == 5
    assert facts["collections"]["distinct"] == 3


def test_a_line_that_is_read_twice_for_a_table_is_counted_once(tmp_path: Path) -> None:
    cell = tmp_path / "cell"
    cell.mkdir()
    contents = COLUMNS["batch_task"]
    lines = [f"batch_task.csv,{k},{content},ANY,YES\n" for k, content in enumerate(contents, 1)]
    (cell / "schema.csv").write_text("file name,field number,content,format,mandatory\n" + "".join(lines))
    (cell / "batch_task.csv").write_text("100,900,5,9,3,Terminated,50,0.008\n100,900,5,-9,3,Terminated,50,0.008\n")
    found = ingest(cell, tmp_path / "dataset", IngestConfig(trace="alibaba-2017", max_reject_share=0.5)).dataset
    read = survey(found)["head"]["read"]["collections"]
    assert (read["files"], read["rows"], read["rejects"], found.manifest["counts"]["collections"]) == (1, 1, 1, 2)


def test_each_row_of_a_table_has_the_number_that_it_names_and_its_share(facts: dict[str, Any]) -> None:
    of_windows = {
        "of exactly 300 s": "exact", "shorter": "shorter", "longer": "longer", "after a gap": "gaps",
        "after a gap and a restart": "gaps_between_runs", "first of a restart": "restarts",
        "before the end of an earlier one": "overlapping", "with a new limit": "limit_changes",
        "without a CPU limit": "no_cpu_limit", "without a memory limit": "no_memory_limit",
        "without a tier": "no_tier", "inside an alloc instance": "in_alloc", "before time 0": "before_zero",
    }  # fmt: skip
    facts["windows"] |= {key: k for k, key in enumerate(of_windows.values())} | {
        "windows": 20, "tasks_with_gaps": 1, "tasks_restarted": 2,
    }  # fmt: skip
    facts["tasks"] |= {"usage_without_events": 3, "events_without_usage": 4, "tasks_with_limit_changes": 5,
                       "constrained": {"tasks": 6, "relations": {"equal": 7}}}  # fmt: skip
    facts["head"]["counts"]["tasks"] = 10
    windows, tasks, _ = tables(facts)["Windows and tasks"]
    assert windows.rows == tuple((name, k, k / 20) for k, name in enumerate(of_windows))
    assert tasks.rows == (
        ("with a gap", 1, 0.1), ("restarted", 2, 0.2), ("with usage, without events", 3, 0.3),
        ("with events, without usage", 4, 0.4), ("with a new limit by an event", 5, 0.5),
        ("with placement constraints", 6, 0.6), ("constraints: equal", 7, None),
    )  # fmt: skip


def test_the_input_is_listed_by_table_with_its_days_and_its_faults(facts: dict[str, Any]) -> None:
    facts["head"]["read"]["usage"]["bytes"] = 3 * 2**20
    facts["span"]["tables"]["usage"] = {"first_us": 43_200_000_000, "last_us": 1_209_600_000_000}
    facts["quality"] |= {"damaged": [{"file": "b.gz", "reason": "cut off"}], "repeated_files": ["c.gz"],
                         "duplicates": {"usage": 2, "events": 0}, "defects": {"negative": 4}}  # fmt: skip
    read, faults = tables(facts)["Input"]
    assert read.rows[0] == ("usage", 1, 3.0, 5, 1, 5, "0.50 to 14.00")
    assert read.rows[2] == ("tasks", None, None, None, None, 3, "-")
    assert faults.rows == (
        ("rejected lines", "not valid JSON", 1, "instance_usage-000000000000.json.gz:6"),
        ("damaged file, left out", "cut off", None, "b.gz"), ("known defect, accepted", "negative", 4, None),
        ("repeated rows, dropped", "usage", 2, None), ("file given twice, read once", None, None, "c.gz"),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("span_s", "step_s"),
    [(0, 300), (999 * 300, 300), (999 * 300 + 1, 600), (999 * 43_200, 43_200), (999 * 43_200 + 1, 86_400),
     (999 * 86_400 - 1, 86_400), (999 * 86_400, 172_800)],
)  # fmt: skip
def test_steps_are_as_short_as_a_thousand_of_them_allow(span_s: float, step_s: int) -> None:
    """A span of 999 steps may touch a thousand."""
    assert _step_s(span_s) == step_s


def test_capacities_are_listed_by_their_number_of_machines(cell: Path, write_shard: Write) -> None:
    write_shard(cell, "machine_events-000000000001", [machine(0, k, 1, 2.0, 1.0) for k in (9, 10)])
    found = survey(dataset(cell))["machines"]
    assert [(of["cpu"], of["machines"]) for of in found["capacities"]] == [(2.0, 3), (0.5, 1)]
    assert (found["distinct"], found["kinds"]) == (4, 2)


def test_percentiles_are_by_nearest_rank() -> None:
    values, counts = np.array([1, 5, 9]), np.array([5, 90, 5])
    assert percentiles(values, counts, (0, 5, 6, 95, 96, 100)) == {
        "p0": 1, "p5": 1, "p6": 5, "p95": 5, "p96": 9, "p100": 9,
    }  # fmt: skip
    assert percentiles(values[:0], counts[:0], (50,)) == {"p50": None}


def test_a_dataset_without_usage_says_so_and_is_still_drawn(tmp_path: Path, event: Make, write_shard: Write) -> None:
    rows = [event(600, 0), event(700, 3), event(9000, 6), event(600, 0, **OTHER)]
    write_shard(tmp_path / "cell", "instance_events-0", rows)
    found = survey(dataset(tmp_path / "cell"))
    assert (found["span"]["first_us"], found["span"]["last_us"]) == (600_000_000, 9_000_000_000)
    assert found["timeline"]["cpu_usage"] is None
    assert sum(found["timeline"]["submitted"]) == 2
    figures = first_figures(found)
    assert (figures["CPU used, of the limits"], figures["out-of-memory ends (derived)"]) == ("-", "-")
    assert "nan" not in text(found).lower()
    assert "nan" not in re.sub(r"<(svg|script).*?</", "", render_page(found), flags=re.S).lower()
    assert "Usage over limit" not in tables(found)
    assert draw(found).keys() == {"tier_shares", "lifetimes", "event_types", "starts_over_time", "missing_fields"}


def test_only_collections_are_enough_for_a_page(tmp_path: Path, write_shard: Write) -> None:
    told = {"collection_id": "5", "collection_type": "0", "priority": "200"}
    rows = [{"time": "600000000", "type": "0", **told}, {"time": "900000000", "type": "6", **told}]
    write_shard(tmp_path / "cell", "collection_events-0", rows)
    found = survey(dataset(tmp_path / "cell"))
    assert (found["collections"]["distinct"], found["collections"]["without_tasks"]) == (1, 1)
    assert found["timeline"]["counted"] == "collections"
    assert first_figures(found)["tasks"] == "0"
    assert "Tiers" not in tables(found)
    assert "event_types" in draw(found)
    assert "<table data-sortable>" in render_page(found)
    assert "<thead><tr></tr>" not in render_page(found)


def test_a_series_has_no_tiers_events_or_machines(tmp_path: Path) -> None:
    assert tomllib.loads(SERIES)
    (tmp_path / "vms").mkdir()
    (tmp_path / "vms" / "a.csv").write_text("vm,t,used\n1,0,2\n1,300,1\n2,0,4\n")
    (tmp_path / "mapping.toml").write_text(SERIES)
    found = survey(dataset(tmp_path / "vms", trace="series", mapping=str(tmp_path / "mapping.toml")))
    assert [t["tier"] for t in found["tiers"]] == ["unknown"]
    assert found["tiers"][0]["cpu"]["usage_of_limit"] == pytest.approx(7 / 12)
    assert found["timeline"]["cpu_usage"] == [6, 1]
    shown = tables(found)
    assert not {"Events", "Machines"} & shown.keys()
    assert [table.caption for table in shown["Usage over limit"]] == ["CPU"]  # no window has memory and its limit
    assert not [name for name in first_figures(found) if "memory" in name]
    assert re.search(r"\nusage +tier +100.00 % +the source never has it\n", text(found))
    assert "tier_shares" not in draw(found)


def test_the_same_dataset_gives_the_same_bytes_and_the_number_of_buckets_changes_nothing(cell: Path) -> None:
    first, again, other = (survey(d) for d in (dataset(cell), dataset(cell), dataset(cell, buckets=1)))
    assert json.dumps(first) == json.dumps(again)
    assert render_page(first) == render_page(again)
    other["head"]["fingerprint"] = first["head"]["fingerprint"]
    assert text(first) == text(other)
    assert render_page(first) == render_page(other)


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("link", "iframe")
        assert tag != "script" or not attrs  # the page's own, which sorts the tables
        self.found += [value or "" for name, value in attrs if name in ("src", "href", "srcset")]


def test_the_page_needs_no_other_file_and_shows_every_section_and_figure(facts: dict[str, Any], tmp_path: Path) -> None:
    write_page(facts, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert [p.name for p in tmp_path.glob("page*")] == ["page.html"]
    links = _Links()
    links.feed(page)
    assert all(link.startswith("#") for link in links.found)
    assert "http" not in page
    assert "@import" not in page
    assert all(inline_svg(svg.decode(), name) in page for name, svg in draw(facts).items())
    assert page.count("<svg") >= 6
    for section, of in tables(facts).items():
        assert f"<h2>{section}</h2>" in page
        assert all(table.rows for table in of)
    assert page.count("<table data-sortable>") == page.count("<table") == sum(map(len, tables(facts).values()))
    assert "<h1>Dataset <span>on cell</span></h1>" in page


def test_the_large_figures_of_the_page_are_the_facts(facts: dict[str, Any]) -> None:
    facts["tasks"]["oom_ends"] = 1_234
    page = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", render_page(facts).split('class="answer"')[1].split("<svg")[0]))
    cpu, memory = (facts["used_of_limits"][r] for r in ("cpu", "memory"))
    assert (cpu, memory) == pytest.approx(((90 + 174) / (270 + 114), (180 + 57) / (450 + 228)))
    for figure in (
        "Tasks 3 Collections 3", "Time covered 20 min", f"{100 * cpu:.1f} % CPU {100 * memory:.1f} % memory",
        "Out-of-memory ends 1,234 derived", "Rejected lines 1 faults",
    ):  # fmt: skip
        assert figure.lower() in page.replace("\N{NO-BREAK SPACE}", " ").lower(), page


def test_out_of_memory_ends_are_those_of_the_derived_label(
    tmp_path: Path, window: Make, event: Make, write_shard: Write
) -> None:
    full = {"average_usage": {"cpus": 0.1, "memory": 0.4}, "maximum_usage": {"cpus": 0.1, "memory": 0.495}}
    write_shard(tmp_path / "cell", "instance_usage-0", [window(600), window(900, **full)])
    write_shard(tmp_path / "cell", "instance_events-0", [event(500, 0), event(600, 3), event(700, 5), event(1200, 5)])
    assert survey(dataset(tmp_path / "cell"))["tasks"]["oom_ends"] == 1


def test_the_summary_fits_a_console_of_eighty_columns_and_twelve_lines(facts: dict[str, Any]) -> None:
    said = summary(facts).as_text().splitlines()
    assert len(said) <= 12
    assert max(map(len, said)) <= 80
    assert max(map(len, text(facts, 80).splitlines())) <= 80


@pytest.mark.slow
@pytest.mark.parametrize("width", [400, 1280])
def test_the_page_itself_never_scrolls_sideways_in_a_browser(facts: dict[str, Any], tmp_path: Path, width: int) -> None:
    wide = "() => [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
    inner, outer = found_in(render_page(facts), wide, tmp_path, width=width)
    assert inner <= outer


def test_a_page_needs_an_existing_folder(facts: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no such folder .*nowhere; make it first"):
        write_page(facts, tmp_path / "nowhere" / "page.html")
    with pytest.raises(ConfigError, match="is a folder; name a file"):
        write_page(facts, tmp_path)


def test_the_command_prints_text_or_json_and_last_the_page(cell: Path, tmp_path: Path) -> None:
    folder, page = str(dataset(cell).path), tmp_path / "page.html"
    said = CliRunner().invoke(cli.app, ["inspect", folder])
    assert said.output.startswith("cell: recorded\nfigure")
    assert "Usage over limit\n--------" not in said.output
    assert said.output.splitlines()[-1] == "no page written; --html FILE writes one"
    assert "Usage over limit\n--------" in CliRunner().invoke(cli.app, ["inspect", folder, "--verbose"]).output
    told = CliRunner().invoke(cli.app, ["inspect", folder, "--json", "--html", str(page)])
    assert json.loads(told.output)["page"] == str(page)
    assert json.loads(told.output)["windows"]["gaps"] == 1
    assert page.is_file()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["google_2019", "google_2011", "alibaba_2017", "bitbrains_faststorage", "azure_2017"])
def test_real_data_is_described_within_eighty_columns(name: str, real_data: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "google_2019": {}, "google_2011": {"trace": "google-v2.1"}, "alibaba_2017": {"trace": "alibaba-2017"},
        "bitbrains_faststorage": {"trace": "series", "mapping": "bitbrains"},
        "azure_2017": {"trace": "series", "mapping": "azure"},
    }[name]  # fmt: skip
    made = ingest(real_data / name, tmp_path / "dataset", IngestConfig(max_reject_share=1.0, **options)).dataset
    found = survey(made)
    assert found["windows"]["windows"] == made.n_windows == sum(t["windows"] for t in found["tiers"])
    assert sum(t["tasks"] for t in found["tiers"]) == made.manifest["counts"]["tasks"]
    assert max(map(len, text(found, 80).splitlines())) <= 80
    json.dumps(found, allow_nan=False)
    write_page(found, tmp_path / "page.html")


@pytest.mark.parametrize("part", ["page", "footer"])
def test_a_table_that_is_damaged_inside_is_one_line_with_the_remedy(part: str, cell: Path, tmp_path: Path) -> None:
    dataset = ingest(cell, tmp_path / "dataset", IngestConfig(buckets=1, max_reject_share=0.5)).dataset
    file = dataset.path / "tasks.parquet"
    content = bytearray(file.read_bytes())
    at = 4 if part == "page" else len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    content[at : at + 16] = b"\xff" * 16
    file.write_bytes(content)
    with pytest.raises(TraceError, match=r"dataset: is damaged or incomplete; delete it and ingest again \(\S"):
        survey(dataset)
