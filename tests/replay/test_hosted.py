"""The margins experiment in the closed loop: each margin throughout, all in turn, and what the page says of it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reclaim.data.errors import ConfigError
from reclaim.data.store import Dataset
from reclaim.features.store import FeatureSet
from reclaim.replay.closedloop import Outcome, Scheduling, simulate
from reclaim.replay.folded import Folded, fold
from reclaim.replay.hosted import mean, most_reclaiming, run_cells
from reclaim.replay.hosted_figures import cell_in_turn
from reclaim.replay.hosted_page import says, section
from reclaim.replay.kinds import Source
from reclaim.replay.settings import ReplayConfig
from reclaim.replay.workload import Machines, Workload
from reclaim.training.estimators.margin import MARGIN_NAMES


def source_of(path: Path) -> Source:
    return Source(Dataset.open(path), FeatureSet.open(path), {}, progress=False)


@pytest.fixture(scope="module")
def folded(cell_dataset: Path) -> Folded:
    return fold(source_of(cell_dataset), ReplayConfig(estimators=("borg", "percentile", "limit")))


@pytest.fixture(scope="module")
def loop(cell_dataset: Path, folded: Folded) -> dict[str, Any]:
    return run_cells(source_of(cell_dataset), folded, Scheduling(), ["borg"])


def test_every_margin_is_run_throughout_and_all_of_them_in_turn(loop: dict[str, Any]) -> None:
    assert [e["name"] for e in loop["estimators"]] == ["limit", "borg", "oracle"]
    assert [list(e["runs"]) for e in loop["estimators"]] == [["none"], ["baseline", "medium", "aggressive"], ["none"]]
    weeks = loop["estimators"][1]["sequence"]
    assert [week["margin"] for week in weeks] == ["baseline", "aggressive", "medium", "baseline"]
    assert [e["sequence"] for e in loop["estimators"] if e["name"] != "borg"] == [None, None]
    assert loop["machines"] == 4
    assert loop["runs"] == loop["runs_from_before"] == 30


def test_a_narrower_margin_reserves_less_of_the_same_cell(loop: dict[str, Any]) -> None:
    limit, borg, oracle = (e["runs"] for e in loop["estimators"])
    reserved = [borg[m]["reserved_cpu"] for m in ("baseline", "medium", "aggressive")]
    assert limit["none"]["reserved_cpu"] >= reserved[0] >= reserved[1] >= reserved[2] >= oracle["none"]["reserved_cpu"]
    assert limit["none"]["in_reclaimed_cpu"] == 0.0


def test_tasks_are_held_to_the_answer_to_the_window_before_under_the_margin_whose_turn_it_is(
    cell_dataset: Path, folded: Folded, monkeypatch: pytest.MonkeyPatch
) -> None:
    n = len(folded.history)
    marks = {m: (np.arange(1, n + 1) + k * n)[:, None] * [1e-9, 1e-9] for k, m in enumerate(MARGIN_NAMES)}
    told: list[tuple[Workload, np.ndarray, list[int]]] = []

    def remember(work: Workload, on: Machines, held: np.ndarray, plan: np.ndarray, how: Scheduling) -> Outcome:
        told.append((work, held, plan.tolist()))
        return simulate(work, on, held, plan, how)

    def answers(of: Folded, name: str) -> dict[str, np.ndarray]:  # to each row its own number
        return dict(marks) if name == "borg" else {"none": of.history.windows.limit}

    monkeypatch.setattr(Folded, "reservations", answers)
    monkeypatch.setattr("reclaim.replay.hosted.simulate", remember)
    run_cells(source_of(cell_dataset), folded, Scheduling(), ["borg"])
    borg = [(work, held, plan) for work, held, plan in told if len(held) == 3]
    baseline, medium, aggressive = range(3)
    work, held, _ = borg[0]
    for k in range(3):
        np.testing.assert_allclose(held[k, :, 0] * 1e9, k * n + work.row, atol=0.1)  # of the row before: from 1 on
    slots = folded.cell.slots.count
    edges = [-(-slots * quarter // 4) for quarter in range(5)]
    order = (baseline, aggressive, medium, baseline)
    turns = [margin for margin, a, b in zip(order, edges, edges[1:], strict=False) for _ in range(a, b)]
    assert sorted(plan for *_, plan in borg) == sorted([*([k] * slots for k in range(3)), turns])


def test_each_quarter_of_the_sequence_says_its_own_task_time(loop: dict[str, Any]) -> None:
    limit, borg, _ = loop["estimators"]
    assert limit["runs"]["none"]["task_days"] == pytest.approx(30 * loop["length_hours"] / 24)  # nobody waits
    hours = [part["end_hours"] - part["start_hours"] for part in loop["segments"]]
    days = [week["task_days"] for week in borg["sequence"]]
    assert days == pytest.approx([30 * h / 24 for h in hours], rel=0.01)  # but for a task that is placed anew


def test_a_cell_run_in_several_orders_is_their_mean(loop: dict[str, Any], cell_dataset: Path, folded: Folded) -> None:
    source = source_of(cell_dataset)
    other = run_cells(source, folded, Scheduling(seed=2), ["borg"])
    both = run_cells(source, folded, Scheduling(), ["borg"], orders=2)
    assert both["orders"] == 2
    for a, b, ab in zip(loop["estimators"], other["estimators"], both["estimators"], strict=True):
        assert ab["runs"] == mean([a["runs"], b["runs"]])
        assert ab["sequence"] == (mean([a["sequence"], b["sequence"]]) if a["sequence"] else None)
        assert ab["over_time"] == mean([a["over_time"], b["over_time"]])
        assert ab["kills_by_order"] == {m: a["kills_by_order"][m] + b["kills_by_order"][m] for m in a["runs"]}


def test_a_mean_keeps_words_and_is_unknown_where_one_of_its_numbers_is() -> None:
    a, b = {"margin": "medium", "x": [1, None], "y": 2.0}, {"margin": "medium", "x": [2, 3.0], "y": 4.0}
    assert mean([a, b]) == {"margin": "medium", "x": [1.5, None], "y": 3.0}


def test_the_same_seed_gives_the_same_numbers(loop: dict[str, Any], cell_dataset: Path, folded: Folded) -> None:
    assert run_cells(source_of(cell_dataset), folded, Scheduling(), ["borg"]) == loop


def test_a_trace_without_machines_is_not_run_and_says_why(dataset: Path) -> None:
    source = source_of(dataset)
    none = run_cells(source, fold(source, ReplayConfig(estimators=("borg", "limit"))), Scheduling(), ["borg"])
    assert none["estimators"] == []
    results = {"closed_loop": none}
    assert cell_in_turn(results) is None
    assert says(results) == []
    assert "no machine with a capacity" in section(results)[0].text


def test_only_a_lack_of_machines_becomes_a_note(
    cell_dataset: Path, folded: Folded, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise ConfigError("another setting is wrong")

    monkeypatch.setattr("reclaim.replay.hosted.machines_of", refuse)
    with pytest.raises(ConfigError, match="another setting"):
        run_cells(source_of(cell_dataset), folded, Scheduling(), ["borg"])


def test_the_estimators_beside_are_those_that_reclaim_most_on_validation_rows(folded: Folded) -> None:
    reclaimed = {n: sum(folded.calibrations[n].reclaimed["medium"]) for n in ("borg", "percentile")}
    assert most_reclaiming(folded, ["borg", "percentile", "limit"], 1) == [max(reclaimed, key=lambda n: reclaimed[n])]
    assert len(most_reclaiming(folded, ["borg", "percentile", "limit"], 9)) == 2


def test_the_page_says_plainly_where_medium_does_not_lie_between(loop: dict[str, Any]) -> None:
    rates = dict(zip(("baseline", "medium", "aggressive"), (1.0, 3.0, 2.0), strict=True))
    borg = loop["estimators"][1]
    runs = {m: run | {"oom_kills_per_1000_task_days": rates[m]} for m, run in borg["runs"].items()}
    odd = {"closed_loop": loop | {"estimators": [loop["estimators"][0], borg | {"runs": runs}]}}
    text = " ".join(says(odd))
    assert "`borg` 1.00, 3.00 and 2.00 under baseline, medium and aggressive throughout" in text
    assert "lies between baseline's and aggressive's for 0 of the 1 with any kills, not for `borg`." in text
    kills = {"baseline": [1.0, 2.0], "medium": [2.0, 2.0], "aggressive": [3.0, 2.0]}
    floor = loop["estimators"][0] | {"kills_by_order": {"none": [7.0, 4.0]}}
    beneath = {"closed_loop": loop | {"estimators": [floor, borg | {"runs": runs}]}}
    assert "; without reclamation, the floor, 0.00 (11 kills). Under one margin" in " ".join(says(beneath))
    twice = {"closed_loop": loop | {"orders": 2, "estimators": [borg | {"runs": runs, "kills_by_order": kills}]}}
    assert "Order by order, its number of kills does in 1 of 2." in " ".join(says(twice))
    none = {m: run | {"oom_kills_per_1000_task_days": 0.0} for m, run in borg["runs"].items()}
    calm = [w | {"oom_kills_per_1000_task_days": 0.0} for w in borg["sequence"]]
    quiet = {"closed_loop": loop | {"estimators": [borg | {"runs": none, "sequence": calm}]}}
    assert "No task was killed for want of memory in the closed loop, run once" in " ".join(says(quiet))
    once = [calm[0] | {"oom_kills_per_1000_task_days": 2.0}, *calm[1:]]
    in_turn = {"closed_loop": loop | {"estimators": [borg | {"runs": none, "sequence": once}]}}
    text = " ".join(says(in_turn))
    assert "and 2.00, 0.00, 0.00 and 0.00 in the four parts of the sequence. There were none under any margin" in text


def test_the_section_has_a_row_for_every_run_and_every_part(loop: dict[str, Any]) -> None:
    whole, parts, why = section({"closed_loop": loop})
    assert why.table is not None
    assert whole.table is not None
    assert parts.table is not None
    assert [row[:2] for row in whole.table.rows] == [
        ("limit", "none"), ("borg", "baseline"), ("borg", "medium"), ("borg", "aggressive"), ("oracle", "none"),
    ]  # fmt: skip
    assert len(parts.table.rows) == 4
    figure = cell_in_turn({"closed_loop": loop})
    assert figure is not None
    assert len(figure.axes) == 4
