"""Answers for machines over other horizons than that of the reservations."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from typing import Any, get_args

import httpx
import numpy as np
import pyarrow as pa
import pytest

from reclaim.data.schema import RESOURCES
from reclaim.features.targets import HORIZONS_S
from reclaim.serving.answers.machine_fit import fit
from reclaim.serving.answers.machine_sums import MachineSums, own_terms, sums_by_horizon, sums_of
from reclaim.serving.answers.machines import explain_machine
from reclaim.serving.client.client import Client
from reclaim.serving.wire.arrow import MEDIA_TYPE
from reclaim.serving.wire.errors import ClientLeftError, RequestError, parse_body
from reclaim.serving.wire.machine_schemas import CandidateFit, FitAnswer, FitRequest, Horizon, MachinesAnswer
from reclaim.serving.wire.schemas import Resources, Units
from reclaim.training.bundle import Bundle
from reclaim.training.machines.curve import MachineCurve
from reclaim.training.margins.margin import MARGIN_NAMES
from tests.serving.answers.machines_by_hand import FITTED
from tests.serving.cell.test_machine_peaks import NARROW, NARROW_OF_A_DAY, SETTINGS, history, slots_of
from tests.serving.cell_fixtures import Json, Memory, fact_rows

AN_HOUR, A_DAY = 3_600, 86_400
UNITS = Units()
TASK: Json = {"limit": {"cpu": 0.5, "memory": 0.5}}


@pytest.fixture(scope="module")
def moved(bundle: Bundle) -> Memory:
    """Return machines 7, 8 and 9 whose margins have moved, by a model with a fit of CPU a day ahead."""
    curves = {AN_HOUR: (NARROW,) * len(RESOURCES), A_DAY: (FITTED, MachineCurve())}
    memory = Memory(SETTINGS, replace(bundle, machines=curves))
    for windows in slots_of(history()):
        memory.write(windows)
    return memory


def over(memory: Memory, machines: list[int] | None = None) -> dict[int, MachineSums]:
    found = sums_by_horizon(memory.tracker, memory.settings, machines)
    return {of.estimator.horizon_s: of for of in found}


def amounts(of: Resources) -> list[float]:
    return [of.cpu, of.memory]


def test_the_budget_follows_outcomes_within_the_reservations_horizon_and_a_day_and_five_minutes_is_as_fitted(
    moved: Memory,
) -> None:
    found = over(moved)
    budgets = np.array(list(moved.scorer.budgets.by_margin.values()))
    assert [of.counted for of in found.values()] == [False, True, True]
    assert found[AN_HOUR].margins is moved.tracker.prices.machines[AN_HOUR]
    assert found[A_DAY].margins is moved.tracker.prices.machines[A_DAY]
    assert (found[AN_HOUR].margins.asked < budgets[:, None]).any()
    ahead = found[300].margins
    np.testing.assert_array_equal(ahead.asked, np.stack([budgets, budgets], axis=1))
    assert (ahead.judged.tolist(), ahead.outcomes_of(np.array([7]))[0].tolist()) == ([0, 0], [[0, 0]])
    peaks = [found[300].estimator.peak(found[300].sums, budget) for budget in budgets.tolist()]
    np.testing.assert_array_equal(found[300].peaks(), peaks)


def test_peaks_a_day_ahead_are_at_the_margins_that_its_outcomes_moved(bundle: Bundle) -> None:
    curves = {AN_HOUR: (NARROW,) * len(RESOURCES), A_DAY: (NARROW_OF_A_DAY,) * len(RESOURCES)}
    memory = Memory(SETTINGS, replace(bundle, machines=curves))
    for windows in slots_of(history(tasks=12, slots=400)):
        memory.write(windows)
    day, listed = over(memory)[A_DAY], sums_of(memory.tracker, memory.settings, horizon_s=A_DAY)
    budgets = list(memory.scorer.budgets.by_margin.values())
    fitted = np.stack([day.estimator.peak(day.sums, budget) for budget in budgets])
    moved_to = np.stack([day.estimator.at(margins, day.sums) for margins in day.margins.margins.tolist()])
    np.testing.assert_array_equal(day.peaks(), moved_to)
    np.testing.assert_array_equal(listed.peaks(), moved_to)
    assert (moved_to > fitted).any()
    of_one = {of.horizon_s: of for of in explain_machine(list(over(memory, [7]).values()), UNITS, "medium").forecast}
    assert of_one[300].outcomes is None
    told = of_one[A_DAY].outcomes
    assert told is not None
    assert told.judged.cpu == day.margins.outcomes_of(np.array([7]))[0][0, 0] == 5  # of slots 0, 24, 48, 72 and 96
    assert told.violated["baseline"].cpu > 0


def test_limits_usage_and_tasks_are_the_same_over_every_horizon_and_peaks_are_not(moved: Memory) -> None:
    five_minutes, hour, day = over(moved).values()
    for other in (five_minutes, day):
        np.testing.assert_array_equal(other.limit, hour.limit)
        np.testing.assert_array_equal(other.usage, hour.usage)
        np.testing.assert_array_equal([other.tasks, other.whole], [hour.tasks, hour.whole])
    assert (day.peaks() != hour.peaks()).all()
    assert (day.peaks() != five_minutes.peaks()).all()


def test_an_explanation_has_the_peaks_over_each_horizon_and_the_steps_of_one(moved: Memory) -> None:
    found = over(moved, [8])
    said = explain_machine(list(found.values()), UNITS, "aggressive")
    assert [of.horizon_s for of in said.forecast] == list(HORIZONS_S)
    for of in said.forecast:
        peaks = found[of.horizon_s].peaks()[:, 0]
        assert [amounts(of.peak[margin]) for margin in MARGIN_NAMES] == peaks.tolist()
        left = found[of.horizon_s].limit[0] - peaks
        assert [amounts(of.reclaimable[margin]) for margin in MARGIN_NAMES] == left.tolist()
    bases = {of.horizon_s: (of.basis.cpu, of.basis.memory) for of in said.forecast}
    assert bases == {300: ("bound", "bound"), AN_HOUR: ("bound", "bound"), A_DAY: ("fitted", "bound")}
    assert said.horizon_s == AN_HOUR
    assert said.machine.peak == said.forecast[1].peak
    (step,) = [step for step in said.steps if step.rule == "bound"]
    assert (amounts(step.amounts), f"within {AN_HOUR} s" in step.why) == (
        amounts(said.machine.peak["aggressive"]),
        True,
    )


def fitted_to(memory: Memory, horizon_s: int | None, **candidate: Any) -> tuple[FitAnswer, CandidateFit]:
    asked = {"candidates": [candidate], "capacity": {"cpu": 90.0, "memory": 90.0}, "horizon_s": horizon_s}
    answer = fit(memory.tracker, parse_body(json.dumps(asked).encode(), FitRequest), memory.settings, UNITS)
    return answer, answer.candidates[0]


def test_a_candidate_is_placed_by_peaks_over_the_horizon_that_is_asked_for(moved: Memory) -> None:
    key = moved.tracker.names([7])[:1]
    task: Json = {"collection_id": int(key[0, 0]), "instance_index": int(key[0, 1]), "limit": {"cpu": 1, "memory": 1}}
    answer, candidate = fitted_to(moved, A_DAY, **task)
    known = moved.tracker.look(key, with_x=True)
    found, terms = over(moved)[A_DAY], own_terms(known, A_DAY)
    assert (answer.horizon_s, candidate.known, candidate.machine_id) == (A_DAY, True, 7)
    assert {place.machine_id for place in candidate.places} == {8, 9}
    for place in candidate.places:
        both = found.of(np.array([place.machine_id])) + terms
        assert amounts(place.peak) == found.estimator.peak(both, answer.budget)[0].tolist()
    assert fitted_to(moved, AN_HOUR, **task) == fitted_to(moved, None, **task)
    assert fitted_to(moved, None, **task)[1].places != candidate.places


def test_tasks_without_windows_and_unknown_ones_count_their_limit_over_every_horizon(bundle: Bundle) -> None:
    memory = Memory(SETTINGS, bundle)
    memory.tell(fact_rows({"task": 1, "limit": 2.0, "machine_id": 7}))
    for found in over(memory).values():
        assert (found.limit.tolist(), found.unforecast.tolist()) == ([[2.0, 2.0]], [[2.0, 2.0]])
        assert found.peaks().tolist() == [[[2.0, 2.0]]] * len(MARGIN_NAMES)
    for cell in (Memory(SETTINGS, bundle), memory):
        _, unknown = fitted_to(cell, A_DAY, collection_id=2, **TASK)
        assert (unknown.known, [amounts(place.cost) for place in unknown.places]) == (
            False,
            [[0.5, 0.5]] * len(cell.tracker),
        )


def test_a_model_of_one_horizon_explains_machines_by_it_and_refuses_the_others_by_what_it_forecasts(
    moved: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moved.scorer, "horizons_s", (AN_HOUR,))
    said = explain_machine(sums_by_horizon(moved.tracker, moved.settings, [8]), UNITS, "medium")
    assert [of.horizon_s for of in said.forecast] == [AN_HOUR]
    asked = (lambda: sums_of(moved.tracker, moved.settings, horizon_s=A_DAY), lambda: fitted_to(moved, A_DAY, **TASK))
    for ask in asked:
        with pytest.raises(RequestError, match="horizon_s: the model forecasts 3600 s ahead, not 86400") as refused:
            ask()
        assert (refused.value.status, refused.value.body.error.field) == (422, "horizon_s")


def test_nothing_is_scored_for_a_client_that_has_left(moved: Memory) -> None:
    left = threading.Event()
    left.set()
    with pytest.raises(ClientLeftError):
        sums_of(moved.tracker, moved.settings, horizon_s=A_DAY, left=left)
    with pytest.raises(ClientLeftError):
        sums_by_horizon(moved.tracker, moved.settings, left=left)


def test_machines_are_listed_over_a_day_as_one_of_them_is_explained(url: str) -> None:
    listed = MachinesAnswer.model_validate_json(httpx.get(f"{url}/v1/machines?horizon_s=86400", timeout=120).content)
    assert (listed.horizon_s, len(listed.machines), {of.judged for of in listed.margins}) == (A_DAY, 5, {0})
    for machine in listed.machines:
        explained = httpx.get(f"{url}/v1/machines/{machine.machine_id}", timeout=120).json()
        (day,) = [of for of in explained["forecast"] if of["horizon_s"] == A_DAY]
        assert {margin: of.model_dump() for margin, of in machine.peak.items()} == day["peak"]
    stream = httpx.get(f"{url}/v1/machines?horizon_s=86400", headers={"accept": MEDIA_TYPE}, timeout=120)
    table = pa.ipc.open_stream(stream.content).read_all()
    assert table["cpu_peak_medium"].to_pylist() == [machine.peak["medium"].cpu for machine in listed.machines]
    assert table.schema.metadata[b"horizon_s"] == b"86400"
    default, hour = (httpx.get(f"{url}/v1/machines{of}", timeout=120).json() for of in ("", "?horizon_s=3600"))
    assert default == hour


def test_a_client_lists_machines_over_a_day(url: str) -> None:
    with Client(url) as client:
        (page,) = client.machines(horizon_s=A_DAY)
        table = client.machines_table(horizon_s=A_DAY)
    assert table["memory_peak_baseline"].to_pylist() == [of.peak["baseline"].memory for of in page.machines]
    assert table.schema.metadata[b"horizon_s"] == b"86400"


def test_a_horizon_that_models_do_not_predict_is_refused_by_name(url: str) -> None:
    refused = httpx.get(f"{url}/v1/machines?horizon_s=7200", timeout=120)
    assert refused.status_code == 422
    assert get_args(Horizon) == HORIZONS_S
    assert refused.json()["error"]["message"] == "horizon_s: must be one of 300, 3600 or 86400, got 7200"
