"""Answers for machines: sums of their tasks' terms as a replay adds them up, and their peaks."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pyarrow as pa
import pytest

from reclaim.data.core import parallel as pieces
from reclaim.data.errors import ConfigError
from reclaim.data.schema import RESOURCES
from reclaim.features.targets import HORIZONS_S
from reclaim.serving.answers.machine_sums import CellTotals, MachineSums, sums_of
from reclaim.serving.answers.machines import as_json, as_table, explain_machine
from reclaim.serving.cell.task_record import key_of
from reclaim.serving.wire.arrow import MEDIA_TYPE
from reclaim.serving.wire.machine_schemas import MachinesAnswer
from reclaim.serving.wire.schemas import Units
from reclaim.training.bundle import Bundle
from reclaim.training.machines.curve import EXCEEDED, MachineCurve
from reclaim.training.machines.terms import N_TERMS, RATES, T_BAND, T_LIMIT, T_MEAN, T_SQUARES, T_USAGE
from reclaim.training.margins.margin import MARGIN_NAMES
from tests.serving.answers.machines_by_hand import (
    ALONE,
    E_BASELINE,
    FITTED,
    GOOD,
    UNITS,
    answered,
    both,
    fitted_to,
    foresee,
    sums,
    uneven,
    write_five,
)
from tests.serving.answers.test_served_is_replayed import CELL, SETTINGS, tellable
from tests.serving.cell_fixtures import Json, Memory, S, by_slot, fact_rows, windows_of

if TYPE_CHECKING:
    from tests.serving.conftest import History


def test_two_machines_with_three_tasks_by_hand(three: Memory) -> None:
    # the bound at the largest rate, over a mean limit of 1: the sum of the means and the exponent over the rate
    more = E_BASELINE / RATES[-1]
    first, second = answered(three).machines
    assert (first.machine_id, first.tasks, second.machine_id, second.tasks) == (7, 2, 9, 1)
    for resource in RESOURCES:
        assert getattr(first.limit, resource) == 2.0
        assert getattr(first.usage, resource) == 0.5
        assert getattr(first.peak["baseline"], resource) == pytest.approx(0.5 + more, rel=1e-7)
        assert getattr(first.reclaimable["baseline"], resource) == pytest.approx(1.5 - more, rel=1e-7)
        assert getattr(first.peak["aggressive"], resource) == pytest.approx(0.5 + math.log(100) / RATES[-1], rel=1e-7)
        assert getattr(first.newcomers, resource) == 1.0
        assert getattr(first.unforecast, resource) == 0.0
        assert getattr(second.peak["baseline"], resource) == pytest.approx(0.4 + more, rel=1e-7)
        assert getattr(first.basis, resource) == "bound"


def test_a_fitted_curve_is_named_and_used(bundle: Bundle) -> None:
    memory = Memory(ALONE, replace(bundle, machines={3_600: (FITTED, MachineCurve())}))
    memory.write(windows_of({"machine_id": 7}, {"task": 2, "machine_id": 7}))
    foresee(memory, {1: 0.2, 2: 0.3}, new=(2,))
    (machine,) = answered(memory).machines
    assert (machine.basis.cpu, machine.basis.memory) == ("fitted", "bound")
    location, spread = 0.1 * 2 + 0.9 * 0.5 + 0.1 * 1, math.log(1 / EXCEEDED[-1]) / RATES[-1]  # of constant tasks
    for name, budget in memory.scorer.budgets.by_margin.items():
        assert machine.peak[name].cpu == pytest.approx(location + FITTED.margin(budget) * spread, rel=1e-6)
    steps = explain_machine([sums(memory)], UNITS, "medium").steps
    assert [step.rule for step in steps] == ["limit", "fitted", "bound", "newcomers"]
    assert "(cpu)" in steps[1].why
    assert "0.00316, the budget of the medium margin" in steps[1].why
    assert "fewer than 12 windows have been seen" in steps[3].why  # of any length


@pytest.mark.parametrize("horizon_s", [None, *HORIZONS_S])
def test_sums_over_each_horizon_are_those_of_a_replay_to_the_bit(
    history: History, bundle: Bundle, monkeypatch: pytest.MonkeyPatch, horizon_s: int | None
) -> None:
    bundle = replace(bundle, machines={86_400: (FITTED, MachineCurve())})
    windows = tellable(history.windows)
    windows = replace(windows, machine_id=windows.instance_index % 2)
    memory = Memory(SETTINGS, bundle)
    for part in by_slot(windows):
        memory.write(part)
    names = memory.tracker._slots.key[memory.tracker._slots.all()]  # tasks are summed in the order of their slots

    key = key_of(windows)
    order = np.argsort(windows.end_us, kind="stable")
    slot = np.unique(key[order], axis=0, return_inverse=True)[1].reshape(-1)
    x = bundle.bare_estimator(cell=CELL)._state.advance(slot, windows.take(order))
    rows = [np.flatnonzero((key[order] == name).all(axis=1))[-1] for name in names]
    last = windows.take(order[rows])
    estimator = bundle.machine_estimator(horizon_s=horizon_s)
    terms = estimator.terms(bundle.forecaster.predict(x[rows], estimator.horizon_s), x[rows], last)
    wanted = np.zeros((2, len(RESOURCES), N_TERMS))
    for machine, inside, of_task in zip(last.machine_id, last.in_alloc, terms, strict=True):
        if not inside:  # an alloc instance, of which a replay has the usage
            wanted[machine] += of_task
    assert len(names) > 3
    assert last.in_alloc.any()
    assert (wanted[:, :, T_LIMIT] > 0).all()

    def found(machines: list[int] | None = None) -> MachineSums:
        return sums_of(memory.tracker, SETTINGS, machines, horizon_s=horizon_s)

    np.testing.assert_array_equal(found().sums, wanted)
    np.testing.assert_array_equal(found().peaks()[0], estimator.peak(wanted, 0.001))
    monkeypatch.setattr(pieces, "_PIECE_ROWS", 2)
    np.testing.assert_array_equal(found().sums, wanted, "whatever the pieces")
    np.testing.assert_array_equal(found([1]).sums, wanted[1:], "of one machine as of all")
    memory.tracker.promote(memory.scorer)
    np.testing.assert_array_equal(found().sums, wanted, "scored again, as after a restart")


def test_tasks_that_are_stale_opted_out_or_without_windows_count_their_limit(three: Memory) -> None:
    three.tell(
        fact_rows({"task": 4, "limit": 5.0, "machine_id": 9}, {"task": 5, "machine_id": 9}, estimation={1: False})
    )
    found = sums(three)
    assert found.tasks.tolist() == [2, 3]
    assert found.whole.tolist() == [1, 2]
    assert found.limit.tolist() == [[2.0, 2.0], [6.0, 6.0]]  # that of task 5 is unknown, and counts nothing
    assert found.unforecast.tolist() == [[1.0, 1.0], [5.0, 5.0]]
    assert found.peaks()[0, 0, 0] == pytest.approx(1.0 + 0.3 + E_BASELINE / RATES[-1], rel=1e-7)
    assert found.usage.tolist() == [[0.5, 0.5], [0.4, 0.4]]
    explained = explain_machine([sums(three, [7])], UNITS, "baseline")
    assert [step.rule for step in explained.steps] == ["limit", "bound", "unforecast", "newcomers"]
    assert "1 task without a forecast" in explained.steps[2].why

    horizon_us = three.scorer.horizon_s * S
    three.write(
        windows_of({"task": 3, "machine_id": 9, "start_us": 2 * horizon_us, "end_us": 2 * horizon_us + 300 * S})
    )
    stale = sums(three)
    assert stale.unforecast[0].tolist() == [1.0, 1.0]  # two horizons after its end, not more: task 2 still counts
    three.write(
        windows_of(
            {"task": 3, "machine_id": 9, "start_us": 2 * horizon_us + 300 * S, "end_us": 2 * horizon_us + 301 * S}
        )
    )
    stale = sums(three)
    assert stale.unforecast[0].tolist() == [2.0, 2.0]
    assert stale.usage[0].tolist() == [0.0, 0.0]
    machine = answered(three, [7]).machines[0]
    assert (machine.basis.cpu, machine.reclaimable["aggressive"].cpu) == ("limit", 0.0)


def test_a_resource_that_was_not_measured_counts_its_limit_whole_and_the_other_its_forecast(bundle: Bundle) -> None:
    memory = Memory(ALONE, bundle)
    memory.write(windows_of({"machine_id": 7, "cpu": math.nan, "memory": 0.3}))
    found = sums(memory)
    assert (found.whole.tolist(), found.unforecast.tolist(), found.limit.tolist()) == ([1], [[1.0, 0.0]], [[1.0, 1.0]])
    request: Json = {"candidates": [{"collection_id": 1, "limit": both(9.0)}], "capacity": both(5.0)}
    assert fitted_to(memory, **request).candidates[0].known


def test_the_usage_of_a_resource_that_the_model_does_not_forecast_counts_up_to_the_limit(bundle: Bundle) -> None:
    memory = Memory(ALONE, bundle)
    memory.write(windows_of({"machine_id": 7}, {"task": 2, "machine_id": 7, "memory": 1.5}))
    assert memory.tracker._scores is not None
    memory.tracker._scores.shares[:, RESOURCES.index("memory")] = math.nan
    memory.tell(fact_rows({"task": 3, "limit": 5.0, "machine_id": 7}))  # without a window
    found = sums(memory)
    assert found.unforecast.tolist() == [[5.0, 7.0]]
    assert found.usage.tolist() == [[0.4, 1.3]]


def test_a_task_without_a_machine_is_left_out_and_counted_and_ended_tasks_leave(three: Memory) -> None:
    three.write(windows_of({"task": 4}))
    assert (sums(three).without_machine, sums(three).machine.tolist()) == (1, [7, 9])
    machines, without = three.tracker.machines()
    assert (machines.tolist(), without) == ([7, 9], 1)
    three.tell(fact_rows({"task": 3, "ended_us": 300 * S}, {"task": 1, "machine_id": 8}))
    assert sums(three).machine.tolist() == [7, 8]
    assert sums(three).tasks.tolist() == [1, 1]
    assert sums(three, [9]).machine.tolist() == []


def test_tasks_inside_an_alloc_instance_count_for_no_machine_and_are_answered(three: Memory) -> None:
    inside: Json = {"in_alloc": True, "limit": 4.0}
    three.tell(fact_rows({"task": 6, "machine_id": 9, **inside}))  # without a window yet
    three.write(windows_of({"task": 4, "machine_id": 7, **inside}, {"task": 5, "machine_id": 11, **inside}))
    found = sums(three)
    assert (found.machine.tolist(), found.tasks.tolist(), found.without_machine) == ([7, 9], [2, 1], 3)
    assert (found.limit[:, 0].tolist(), found.usage[:, 0].tolist()) == ([2.0, 1.0], [0.5, 0.4])
    machines, without = three.tracker.machines()
    assert (machines.tolist(), without) == ([7, 9], 3)
    assert len(sums(three, [11])) == 0
    foresee(three, {4: 0.3})
    request: Json = {"candidates": [{"collection_id": 4, "limit": both(9.0)}], "capacity": both(5.0)}
    (candidate,) = fitted_to(three, **request).candidates
    assert (candidate.known, candidate.machine_id, candidate.freed) == (True, None, None)
    assert sorted(place.machine_id for place in candidate.places) == [7, 9]
    answers = three.answers((4, 0))
    assert answers.known.task["machine"].tolist() == [7]
    assert np.isfinite(answers.known.scores.oom).all()
    assert (answers.estimate.reservation < 4.0).all()
    three.tell(fact_rows({"task": 5, "in_alloc": False}))
    assert sums(three).machine.tolist() == [7, 9, 11]


def test_a_smaller_limit_bounds_terms_and_of_a_larger_one_the_addition_counts_whole(three: Memory) -> None:
    three.tell(fact_rows({"task": 3, "limit": 0.25}))
    found = sums(three, [9])
    assert found.limit.tolist() == [[0.25, 0.25]]
    assert found.sums[0, 0, [T_USAGE, T_MEAN, T_SQUARES, T_BAND]].tolist() == [0.25, 0.25, 0.0625, 0.25]
    assert found.peaks()[:, 0].tolist() == [[0.25, 0.25]] * len(MARGIN_NAMES)
    three.tell(fact_rows({"task": 3, "limit": 3.0}))
    found = sums(three, [9])
    assert (found.limit.tolist(), found.unforecast.tolist()) == ([[3.0, 3.0]], [[2.0, 2.0]])
    assert found.peaks()[0, 0, 0] == pytest.approx(2.0 + 0.4 + E_BASELINE / RATES[-1], rel=1e-7)
    assert found.whole.tolist() == [0]


def test_a_task_that_counts_its_limit_whole_is_no_newcomer(three: Memory) -> None:
    assert sums(three).newcomers.tolist() == [[1.0, 1.0], [0.0, 0.0]]
    three.tell(fact_rows({"task": 4, "limit": 5.0, "machine_id": 9}, estimation={1: False, 2: False}))
    found = sums(three)
    assert found.unforecast.tolist() == [[2.0, 2.0], [5.0, 5.0]]  # task 4 has no window
    assert found.newcomers.tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_new_slots_hold_no_terms_of_tasks_that_left(three: Memory) -> None:
    three.tell(fact_rows({"task": 1, "ended_us": 300 * S}))
    three.tell(fact_rows({"task": 8, "limit": 2.0, "machine_id": 7}))
    assert sums(three, [7]).unforecast.tolist() == [[2.0, 2.0]]


def test_an_arrival_takes_its_limit_from_the_room_at_once_and_nothing_of_it_is_reclaimable(three: Memory) -> None:
    more, limit = E_BASELINE / RATES[-1], {"cpu": 0.5, "memory": 0.5}
    room = {"candidates": [{"limit": limit}], "machines": [{"machine_id": 9, "capacity": both(1.3 + more)}]}
    before = answered(three, [9]).machines[0]
    assert fitted_to(three, **room).candidates[0].with_room == 1  # 0.4 of its task and 0.5 of the candidate
    three.tell(fact_rows({"task": 4, "limit": 0.5, "machine_id": 9}))  # placed there, without a window yet
    after = answered(three, [9]).machines[0]
    assert after.reclaimable["baseline"].cpu == pytest.approx(before.reclaimable["baseline"].cpu, rel=1e-7)
    assert after.peak["baseline"].cpu == pytest.approx(before.peak["baseline"].cpu + 0.5, rel=1e-7)
    assert fitted_to(three, **room).candidates[0].with_room == 0
    three.write(windows_of({"task": 4, "machine_id": 9, "limit": 0.5, "cpu": 0.1}))
    seen = answered(three, [9]).machines[0]  # a first forecast, and still a newcomer
    assert (seen.newcomers.cpu, seen.unforecast.cpu) == (0.5, 0.0)


def test_a_table_has_the_numbers_of_the_json(three: Memory) -> None:
    three.tell(fact_rows({"task": 4, "limit": 5.0, "machine_id": 11}))
    answer, table = answered(three), as_table(sums(three), UNITS)
    for machine, row in zip(answer.machines, table.to_pylist(), strict=True):
        assert (row.pop("machine_id"), row.pop("tasks")) == (machine.machine_id, machine.tasks)
        for resource in RESOURCES:
            for name in ("limit", "usage", "basis", "newcomers", "unforecast"):
                assert row.pop(f"{resource}_{name}") == getattr(getattr(machine, name), resource)
            assert row.pop(f"{resource}_judged") == 0
            for margin in MARGIN_NAMES:
                assert row.pop(f"{resource}_violated_{margin}") == 0
                assert row.pop(f"{resource}_peak_{margin}") == getattr(machine.peak[margin], resource)
                assert row.pop(f"{resource}_reclaimable_{margin}") == getattr(machine.reclaimable[margin], resource)
        assert row == {}
    about = {name.decode(): value.decode() for name, value in table.schema.metadata.items()}
    assert (about["horizon_s"], about["cpu_unit"], about["without_machine"]) == ("3600", "cores", "0")


def test_a_table_has_the_amounts_the_basis_and_the_outcomes_of_each_machine_resource_and_margin(three: Memory) -> None:
    found = uneven(three)
    table = as_table(found, Units(cpu="shares", memory="pages"))
    columns = table.to_pydict()
    limit, held = {"cpu": [2.0, 4.5], "memory": [11.0, 7.0]}, {"cpu": [0.0, 0.5], "memory": [3.0, 7.0]}
    assert (columns["machine_id"], columns["tasks"]) == ([7, 9], [5, 1])
    assert (columns["cpu_usage"], columns["memory_usage"]) == ([0.5, 0.75], [1.0, 1.25])
    assert (columns["cpu_newcomers"], columns["memory_newcomers"]) == ([0.0, 0.25], [1.5, 0.75])
    assert (columns["cpu_basis"], columns["memory_basis"]) == (["bound"] * 2, ["bound", "limit"])
    assert (columns["cpu_judged"], columns["memory_judged"]) == ([31, 41], [32, 42])
    for k, margin in enumerate(MARGIN_NAMES):
        for r, resource in enumerate(RESOURCES):
            assert columns[f"{resource}_limit"] == limit[resource]
            assert columns[f"{resource}_unforecast"] == held[resource]
            assert columns[f"{resource}_violated_{margin}"] == [2 * k + r, 6 + 2 * k + r]
            peak = found.peaks()[k, :, r]
            assert columns[f"{resource}_peak_{margin}"] == peak.tolist()
            assert columns[f"{resource}_reclaimable_{margin}"] == (np.array(limit[resource]) - peak).tolist()
    about = {name.decode(): value.decode() for name, value in table.schema.metadata.items()}
    assert (about["cpu_unit"], about["memory_unit"], about["horizon_s"]) == ("shares", "pages", "3600")
    model = three.scorer.model
    assert (about["model_name"], about["model_version"]) == (model.name, model.version)
    assert (about["tracked"], about["without_machine"], about["clock_us"]) == ("12", "6", str(300 * S))
    budgets = three.scorer.budgets.by_margin
    assert about["budgets"] == ",".join(f"{margin}={budgets[margin]}" for margin in MARGIN_NAMES)
    told = [(of["margin"], of["resource"], of["asked"]) for of in json.loads(about["margins"])]
    asked = found.margins.asked
    assert told == [(m, x, asked[k, r]) for k, m in enumerate(MARGIN_NAMES) for r, x in enumerate(RESOURCES)]


def test_the_json_has_the_counts_of_the_cell_and_the_start_of_the_next_page(three: Memory) -> None:
    answer = MachinesAnswer.model_validate_json(as_json(uneven(three), UNITS, without_machine=4, following="9"))
    assert (answer.tracked, answer.without_machine, answer.next, answer.clock_us) == (12, 4, "9", 300 * S)
    before = replace(uneven(three), clock_us=-1)  # no window has come
    assert MachinesAnswer.model_validate_json(as_json(before, UNITS, without_machine=0)).clock_us is None


def test_an_explanation_tells_the_outcomes_and_the_amounts_of_its_own_margin_step_by_step(three: Memory) -> None:
    found = uneven(three)
    explained = explain_machine([found], UNITS, "medium")
    assert (explained.outcomes.judged.cpu, explained.outcomes.judged.memory) == (31, 32)
    violated = [(of.cpu, of.memory) for of in explained.outcomes.violated.values()]
    assert dict(zip(explained.outcomes.violated, violated, strict=True)) == dict(
        zip(MARGIN_NAMES, [(0, 1), (2, 3), (4, 5)], strict=True)
    )
    peak = found.peaks()[MARGIN_NAMES.index("medium"), 0]
    assert [(step.rule, step.amounts.cpu, step.amounts.memory) for step in explained.steps] == [
        ("limit", 2.0, 11.0),
        ("bound", *peak),
        ("unforecast", 0.0, 3.0),  # of memory alone, as the next
        ("newcomers", 0.0, 1.5),
    ]
    assert explained.steps[0].why == "the sum of the limits of 5 tasks"
    assert explained.steps[2].why.startswith("counts whole in it: 1 task without a forecast")
    assert "(cpu, memory)" in explained.steps[1].why
    nine = replace(
        found, machine=found.machine[1:], sums=found.sums[1:], usage=found.usage[1:], tasks=np.array([1]),
        whole=np.array([0]),
    )  # fmt: skip
    steps = explain_machine([nine], UNITS, "medium").steps
    assert steps[0].why == "the sum of the limits of 1 task"
    assert steps[1].why.endswith("(cpu)")  # all memory is held
    assert steps[2].why.startswith("counts whole in it: 0 tasks without")


def test_the_probability_that_is_asked_is_told_with_its_reasons_where_it_is_not_the_budget(three: Memory) -> None:
    def told(margin: str) -> str:
        (why,) = [step.why for step in explain_machine([uneven(three)], UNITS, margin).steps if step.rule == "bound"]
        return why.partition("with a probability of ")[2].partition(", by the bound")[0]

    # that of CPU is the budget, and of memory no recent answer is known
    assert told("baseline") == "0.001, the budget of the baseline margin, now 0.0005 for memory"
    assert told("medium") == (
        "0.00316, the budget of the medium margin, now 0.002 for cpu and 0.0005 for memory, because 3.00% of the recent"
        " answers for all machines were passed"
    )
    assert told("aggressive") == (
        "0.01, the budget of the aggressive margin, now 0.005 for cpu, because 1.23% of the recent answers for all"
        " machines were passed, and by many machines at once, for which it is lowered to 0.25 of itself"
    )


def test_a_probability_that_rounds_to_the_budget_is_shown_as_the_budget(three: Memory) -> None:
    of = uneven(three)
    of = replace(of, margins=replace(of.margins, asked=of.margins.asked * 0 + 0.0010004))
    (why,) = [step.why for step in explain_machine([of], UNITS, "baseline").steps if step.rule == "bound"]
    assert "0.001, the budget of the baseline margin, by the bound over independent tasks (cpu, memory)" in why


def test_the_bound_that_was_used_is_named(bundle: Bundle) -> None:
    memory = Memory(ALONE, replace(bundle, machines={3_600: (MachineCurve(together=0.5), MachineCurve())}))
    memory.write(windows_of({"machine_id": 7}))
    foresee(memory, {1: 0.2})
    bounds = [step.why for step in explain_machine([sums(memory)], UNITS, "medium").steps if step.rule == "bound"]
    assert bounds[0].endswith("by the bound over independent tasks (memory)")
    assert bounds[1].endswith("independent tasks and over tasks that peak at the same time (cpu)")


def test_totals_are_kept_for_a_while(three: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 50.0
    monkeypatch.setattr("reclaim.serving.answers.machine_sums.time.monotonic", lambda: now_s)
    totals = CellTotals(three.tracker, three.settings)
    limit, reclaimable = totals.now()
    assert limit.tolist() == [3.0, 3.0]
    assert reclaimable[0, 0] == pytest.approx(3.0 - 0.9 - 2 * E_BASELINE / RATES[-1], rel=1e-7)
    three.tell(fact_rows({"task": 3, "ended_us": 300 * S}))
    assert totals.now()[0].tolist() == [3.0, 3.0]
    now_s += 10.0
    assert totals.now()[0].tolist() == [2.0, 2.0]


def test_a_budget_is_above_0_and_below_1(three: Memory) -> None:
    with pytest.raises(ConfigError, match="above 0 and below 1"):
        three.scorer.machines.curves[0].margin(1.0)


def test_pages_have_every_machine_once_and_equal_one_machine_and_the_stream(url: str) -> None:
    machines, after = [], ""
    while True:
        page = httpx.get(f"{url}/v1/machines?page_size=2{after}", timeout=120).json()
        assert (page["without_machine"], page["tracked"]) == (1, 6)
        assert len(page["machines"]) == 2 or page["next"] is None
        machines += page["machines"]
        if page["next"] is None:
            break
        after = f"&after={page['next']}"
    assert [m["machine_id"] for m in machines] == [10, 20, 30, 40, 50]
    assert httpx.get(f"{url}/v1/machines", timeout=120).json()["machines"] == machines
    for machine in machines:
        explained = httpx.get(f"{url}/v1/machines/{machine['machine_id']}", timeout=120).json()
        assert (explained["machine"], explained["margin"]) == (machine, "baseline")
    stream = httpx.get(f"{url}/v1/machines", headers={"accept": MEDIA_TYPE}, timeout=120)
    assert stream.headers["content-type"] == MEDIA_TYPE
    table = pa.ipc.open_stream(stream.content).read_all()
    assert table["cpu_peak_medium"].to_pylist() == [m["peak"]["medium"]["cpu"] for m in machines]
    assert table.schema.metadata[b"without_machine"] == b"1"
    assert httpx.get(f"{url}/v1/machines?after=50", timeout=120).json()["machines"] == []


def test_a_machine_without_tasks_is_unknown(url: str) -> None:
    response = httpx.get(f"{url}/v1/machines/77", timeout=120)
    assert (response.status_code, response.json()["error"]["code"]) == (404, "unknown_machine")


@pytest.mark.parametrize(
    "query",
    [
        "/x",
        "/-1",
        f"/{2**63}",
        "?after=x",
        "?after=-1",
        "?page_size=0",
        "?more=1",
        "/10?more=1",
        "?horizon_s=7",
        "?horizon_s=1e3",
    ],
)
def test_a_wrong_address_is_refused(url: str, query: str) -> None:
    assert httpx.get(f"{url}/v1/machines{query}", timeout=120).status_code == 422


def test_large_cells_are_answered_in_turn_and_alike(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [("GET", "/v1/machines", None), ("GET", "/v1/machines/20", None), ("POST", "/v1/machines/fit", GOOD)]
    small = [httpx.request(method, url + path, json=body, timeout=120).json() for method, path, body in asked]
    monkeypatch.setattr("reclaim.serving.http.routes.SMALL_TASKS", 0)
    large = [httpx.request(method, url + path, json=body, timeout=120).json() for method, path, body in asked]
    assert large == small
    assert httpx.get(f"{url}/v1/machines/77", timeout=120).status_code == 404
    refused = httpx.post(f"{url}/v1/machines/fit", json={**GOOD, "margin": "wide"}, timeout=120)
    assert (refused.status_code, refused.json()["error"]["code"]) == (422, "unknown_margin")


def test_the_answer_is_the_same_after_a_restart(make_app: Any, at_url: Any, tmp_path: Path) -> None:
    said = []
    for start in range(2):
        with make_app(state=tmp_path, clock="trace") as (app, runtime), at_url(app) as url:
            if start == 0:
                write_five(url)
            said.append((httpx.get(f"{url}/v1/machines", timeout=120).json(), runtime._totals.now()[0].tolist()))
            shown = runtime.metrics.text()
            assert 'reclaim_machines_limit_amount{resource="cpu"} 10.0' in shown
            assert 'reclaim_machines_reclaimable_amount{margin="medium",resource="memory"}' in shown
    assert said[0] == said[1]
    assert len(said[0][0]["machines"]) == 5
