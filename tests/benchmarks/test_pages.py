"""Tables of pages agree with the results that are kept: each row is one that the page's command prints."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from benchmarks import builtin, by_limit, drift, machines
from benchmarks.bar_tables import BEST, FIXED, HINDSIGHT, HOURS, MIXED_IN, NETWORK, ONLINE
from reclaim.data.oom import OOM_SHARE
from reclaim.replay.open_loop.paired import ALONE, BETTER, EXCEEDS, NOISE, WORSE

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def printed(*words: str) -> list[str]:
    """Return the lines that a benchmark prints of its results."""
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True, cwd=ROOT)
    return done.stdout.splitlines()


def of_bar(horizon_s: int) -> list[str]:
    results = [str(path) for path in sorted(RESULTS.glob("bar-*.json"))]
    return printed("-m", "benchmarks.bar_tables", "--summary", str(horizon_s), *results)


def kept(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())


def rows(lines: Iterable[str]) -> set[tuple[str, ...]]:
    """Return the cells of rows with numbers, without the first: a page names a dataset once, and 1.0% is 1 %."""
    cells = (
        tuple(re.sub(r"(\.0)? ?%$", "%", cell.strip()) for cell in line.strip("|").split("|"))
        for line in lines
        if line.startswith("|")
    )
    return {row[1:] for row in cells if any(re.search(r"\d", cell) for cell in row[2:])}


@pytest.mark.parametrize(
    ("page", "heading", "lines"),
    [
        ("docs/results", "One hour ahead", lambda: of_bar(3_600)),
        ("docs/results", "Against Borg's estimator", lambda: of_bar(3_600)),
        ("docs/results", "Drift", lambda: of_bar(3_600)),
        ("docs/results", "A day ahead", lambda: of_bar(86_400)),
        ("docs/results", "By limit", lambda: by_limit.table(kept("by-limit.json"))),
        (
            "benchmarks/results/machines",
            "Machines: what is reclaimed, set by set",
            lambda: printed("-m", "benchmarks.machines", "--table"),
        ),
        ("docs/machines", "When the workload changes", lambda: drift.table(kept("drift.json"), "machines")),
        ("docs/how-it-works", "When the workload drifts", lambda: drift.table(kept("drift.json"), "tasks")),
        ("docs/builtin", "Results", lambda: builtin.markdown(kept("builtin.json"))),
    ],
)
def test_every_row_of_a_table_is_one_that_its_command_prints(
    page: str, heading: str, lines: Callable[[], Iterable[str]]
) -> None:
    text = (ROOT / f"{page}.md").read_text()
    found = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#+ |\Z)", text, re.DOTALL | re.MULTILINE)
    assert found is not None
    whole = rows(lines())
    said = whole | {row[:-1] for row in whole}  # a page may leave out the last column
    shown = {row for row in rows(found[1].splitlines()) if len(row) in set(map(len, said))}
    assert len(shown) > 5
    assert shown <= said


def test_the_rows_of_a_day_ahead_with_others_curves_are_those_that_are_kept() -> None:
    text = (ROOT / "docs" / "results.md").read_text()
    found = re.search(r"^## A day ahead with others' curves\n(.*?)(?=^## )", text, re.DOTALL | re.MULTILINE)
    assert found is not None
    said = set()
    for path in RESULTS.glob("mixed-in-*.json"):
        content = json.loads(path.read_text())
        ran = {
            (e["resource"], e["budget"], e["estimator"]): (100 * e["reclaimed_share"][0], 100 * e["violation_rate"][0])
            for e in content["estimators"]
            if e["margin_set"] == "online"
        }
        both = {
            (d["resource"], d["budget"], d["against"]): d
            for d in content["differences"]
            if (d["margin_set"], d["estimator"]) == ("hindsight", MIXED_IN)
        }
        for resource, budget, against in both:
            if against == NETWORK:
                less, best = (both[resource, budget, of] for of in (NETWORK, BEST))
                alone, mixed = (ran[resource, budget, name] for name in (NETWORK, MIXED_IN))
                more, low, high = (100 * share + 0.0 for share in less["reclaimed_share"])
                after, before = (100 * share for share in less["reclaims"][:2])
                said.add(
                    (
                        resource, budget.replace(" %", "%"), *(f"{r:.1f} at {v:.2f}" for r, v in (alone, mixed)),
                        f"{before:.1f} → {after:.1f}", f"{more:.1f} [{low:.1f}, {high:.1f}]".replace("-0.0", "0.0"),
                        f"{100 * best['reclaims'][1]:.1f}",
                    )
                )  # fmt: skip
    shown = rows(found[1].splitlines())
    assert len(shown) == 6
    assert shown == said


def test_the_page_of_machines_counts_the_leads_that_are_kept() -> None:
    text = (ROOT / "docs" / "machines.md").read_text()
    counted: dict[tuple[str, str], list[int]] = {}
    points = []
    for name, horizon, _, _, _, at, ours in machines.comparisons(kept("machines.json")):
        ahead = at[ours["machine"]]["ahead"]
        cells = "recorded VMs, grouped into machines" if name.partition("-")[0] in machines.GROUPED else "composed"
        of = counted.setdefault((cells, {"1h": "an hour", "24h": "a day"}[horizon]), [0, 0, 0])
        for i, more in enumerate((True, ahead["low"] > 0, ahead["high"] < 0)):
            of[i] += more
        if (cells, horizon) == ("composed", "1h"):
            points.append(100 * ahead["value"])
    for (cells, horizon), (comparisons, ahead, behind) in counted.items():
        assert f"| {cells} | {horizon} | {comparisons} | {ahead} | {behind} |" in text
    assert f"reclaims {min(points):.1f} to {max(points):.1f} points" in text


def test_the_page_of_machines_has_the_violations_of_margins_that_follow_and_of_those_with_the_second_budget() -> None:
    (_, _, *table) = (
        (ROOT / "docs" / "machines.md").read_text().partition("**Budgets an hour ahead.**")[2].split("\n|")[1:]
    )
    shown = [[cell.strip() for cell in row.partition("\n")[0].strip("|").split("|")] for row in table[:4]]
    of: dict[tuple[bool, str, str], list[float]] = {}
    for key, one in kept("machines.json")["sets"].items():
        (machine,) = (of for name, of in one["margins"].items() if name.endswith("(machine)"))
        if key.endswith("-1h"):
            for (margin, budget), how in product(
                {"aggressive": 0.01, "baseline": 0.001}.items(), ("following", "held")
            ):
                rates = [r["violation_rate"]["value"] / budget for r in machine[f"{margin} {how}"].values()]
                of.setdefault((key.partition("-")[0] in machines.GROUPED, how, margin), []).extend(rates)
    for cells, (grouped, how) in zip(shown, product((False, True), ("following", "held")), strict=True):
        large, small = (sorted(of[grouped, how, margin]) for margin in ("aggressive", "baseline"))
        apart = [f", and {large.pop():.2f} (memory of `bitbrains`;"] if grouped and how == "following" else [""]
        assert f"{large[0]:.2f} to {large[-1]:.2f}{apart[0]}" in cells[1]
        assert f"{small[0]:.1f} to {small[-1]:.1f}" == cells[2]


def test_the_page_of_machines_says_what_the_second_budget_costs() -> None:
    text = " ".join((ROOT / "docs" / "machines.md").read_text().split())
    cost: dict[str, list[float]] = {}
    for key, one in kept("machines.json")["sets"].items():
        (machine,) = (of for name, of in one["margins"].items() if name.endswith("(machine)"))
        following, held = (machine[f"aggressive {how}"] for how in ("following", "held"))
        name, _, horizon = key.rpartition("-")
        of = name if name == "cell-27" else name.partition("-")[0]
        kind = "a day" if horizon == "24h" else {"azure": "cell"}.get(of, of)
        points = [100 * (following[r]["savings"]["value"] - held[r]["savings"]["value"]) for r in following]
        cost.setdefault(kind, []).extend(points)
    low, high = ({kind: f"{of(points):.1f}" for kind, points in cost.items()} for of in (min, max))
    assert (
        f"costs {low['cell']} to {high['cell']} points of the limits on `cell-7`, `cell-17` and Azure, "
        f"{low['cell-27']} to {high['cell-27']} on `cell-27`, {low['together']} to {high['together']} where tasks move "
        f"together, and {low['bitbrains']} to {high['bitbrains']} on Bitbrains; a day ahead at most {high['a day']}"
    ) in text


@pytest.mark.parametrize(
    ("collections", "columns"),
    [
        ("all", ((BETTER, ALONE, NOISE, WORSE, EXCEEDS), (BETTER, NOISE, WORSE))),
        ("unseen", ((BETTER, NOISE, WORSE), (BETTER, NOISE, WORSE))),
    ],
)
def test_the_page_of_results_counts_the_verdicts_that_are_kept(
    collections: str, columns: tuple[tuple[str, ...], ...]
) -> None:
    lines = (ROOT / "docs" / "results.md").read_text().splitlines()
    differences = [d for path in RESULTS.glob("bar-*.json") for d in kept(path.name)["differences"]]
    for horizon_s, ahead in HOURS.items():
        counts = []
        for margin_set, verdicts in zip((ONLINE, HINDSIGHT), columns, strict=True):
            found = [
                d["verdict"]
                for d in differences
                if (d["horizon_s"], d["collections"], d["margin_set"]) == (horizon_s, collections, margin_set)
                and (d["estimator"], d["against"]) == (NETWORK, BEST)
            ]
            assert set(found) <= set(verdicts)
            counts += [found.count(verdict) for verdict in verdicts]
        assert f"| {ahead} | {' | '.join(map(str, counts))} |" in lines


def out_of_memory() -> str:
    """Return the section of the page of results whose numbers rest on the derived label."""
    text = (ROOT / "docs" / "results.md").read_text()
    found = re.search(r"^## Out-of-memory risk\n(.*?)(?=^## )", text, re.DOTALL | re.MULTILINE)
    assert found is not None
    return found[1]


def test_the_numbers_of_out_of_memory_ends_stand_next_to_what_their_label_is() -> None:
    label = f"a FAIL of a task whose last window has a maximum memory of at least {OOM_SHARE:.0%} of the limit"
    assert label.replace("%", " %") in out_of_memory()


def test_the_scores_of_alerts_are_those_that_are_kept() -> None:
    before, now = (kept(name)["trained_on"] for name in ("oom-before.json", "oom.json"))
    columns = [
        of[cells]["pooled"][group] for group, cells in product((0, 1), ("1 cell", "10 cells")) for of in (before, now)
    ]
    shown = {
        "average precision": ("average_precision", 1, 3),
        "as a multiple of the base rate": ("times_base", 1, 0),
        "precision at 10 alerts per 1,000 task-days": ("precision_at_10", 1, 2),
        "recall at 10 alerts (at most 0.18 and 0.25)": ("recall_at_10", 1, 2),
        "precision at 100 alerts": ("precision_at_100", 1, 2),
        "recall at 100 alerts (at most 1)": ("recall_at_100", 1, 2),
        "median lead at 100 alerts, minutes": ("lead_s_at_100", 60, 0),
        "Brier skill": ("brier_skill", 1, 2),
    }
    for name, (score, unit, digits) in shown.items():
        cells = " | ".join(f"{of[score] / unit:.{digits}f}" for of in columns)
        assert f"| {name} | {cells} |" in out_of_memory()
    right = " in one group of cells and in ".join(f"{100 * of['precision_at_10']:.0f} %" for of in columns[3::4])
    assert f"right in {right}".replace(" % in one", " % of its alerts in one") in out_of_memory()


def test_kinds_of_ends_have_the_scores_that_are_kept_which_leave_out_rows_before_ends_of_other_kinds() -> None:
    groups = kept("oom.json")["trained_on"]["10 cells"]["split"]
    named = {
        "behaviour leak": "leak", "behaviour load_growth": "growing load", "behaviour sudden": "sudden jump",
        "behaviour undersized": "too small a limit", "first of its task": "first of its task",
        "repeat of its task": "a later one of its task", "first of its collection": "first of its collection",
    }  # fmt: skip
    _, heading, table = out_of_memory().partition(
        "average precision among the rows before such an end and those before none"
    )
    assert heading
    for kind, name in named.items():
        cells = [
            cell
            for of in (group[kind] for group in groups)
            for cell in (f"{of['events']:.0f}", f"{of['average_precision']:.3f}", f"{of['recall_at_100']:.2f}")
        ]
        assert f"| {name} | {' | '.join(cells)} |" in table


def test_the_first_page_counts_the_alerts_that_are_right_and_the_events_that_they_catch() -> None:
    right, caught = {}, {}
    for cells, of in kept("oom.json")["trained_on"].items():
        right[cells] = " and ".join(f"{100 * group['precision_at_10']:.0f}" for group in of["pooled"])
        (caught[cells],) = {f"{100 * group['recall_at_10']:.0f}" for group in of["pooled"]}
    assert (
        f"{right['1 cell']} % of alerts are right and catch {caught['1 cell']} % of events; trained on ten cells, "
        f"{right['10 cells']} %, and {caught['10 cells']} %"
    ) in " ".join((ROOT / "README.md").read_text().split())


def test_the_first_page_counts_the_leads_and_losses_that_the_pages_of_tasks_and_machines_count() -> None:
    shown = {
        re.sub(r"\[(.*?)\]\(.*?\)", r"\1", row[0]): row[1:]
        for row in table_under("README.md", "Results", "5 minutes ahead: more, less")
    }
    results, unseen = (
        {row[0]: row[1:] for row in table_under("docs/results.md", heading, "equal violation: better")}
        for heading in (None, "Unseen")
    )
    horizons = ("5 minutes", "1 hour", "24 hours")
    for name, table in (("tasks", results), ("tasks of collections never seen", unseen)):
        better, level, worse = zip(*(map(int, table[horizon][-3:]) for horizon in horizons), strict=True)
        of = map(sum, zip(better, level, worse, strict=True))
        expected = [f"{more} of {all_}, {less}" for more, all_, less in zip(better, of, worse, strict=True)]
        assert shown[name] == tuple(expected)
    grouped = "recorded VMs, grouped into machines"
    for name, cells in {"machines of composed cells": "composed", "machines made of recorded VMs": grouped}.items():
        counts = [row[2:] for row in table_under("docs/machines.md", None, "horizon") if row[0] == cells]
        assert shown[name] == ("", *(f"{ahead} of {all_}, {behind}" for all_, ahead, behind in counts))


def table_under(page: str, heading: str | None, column: str) -> list[tuple[str, ...]]:
    """Return the rows of the first table with a column under a heading of a page, or of its top; cells as words."""
    text = (ROOT / page).read_text()
    part = text.partition(f"\n## {heading}\n")[2] if heading else text.partition("\n## ")[0]
    blocks = [block.splitlines() for block in part.split("\n\n") if block.startswith("|")]
    (_, _, *found) = next(block for block in blocks if column in block[0])
    return [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in found]


def test_a_network_of_another_cell_has_the_differences_that_are_kept() -> None:
    text = (ROOT / "docs" / "results.md").read_text().partition("## Transfer\n")[2]
    of = {
        (d["margin_set"], d["against"], d["resource"], d["budget"]): [100 * share for share in d["reclaimed_share"]]
        for d in kept("bar-composed-30x4-to-60x7.json")["differences"]
        if (d["horizon_s"], d["collections"], d["estimator"]) == (3_600, "all", "network of composed-30x4")
    }
    cases = [*product(("cpu", "memory"), ("1 %", "0.1 %"))]
    less = [-of[FIXED, NETWORK, *case][0] for case in cases]
    assert f"reclaims {min(less):.1f} to {max(less):.1f} points less than one trained on the cell" in text
    for name, margin_set in (
        ("less the best statistical estimator", FIXED),
        ("the same, with prices that follow", ONLINE),
    ):
        cells = " | ".join("{:.1f} [{:.1f}, {:.1f}]".format(*of[margin_set, BEST, *case]) for case in cases)
        assert f"| … {name} | {cells} |" in text
