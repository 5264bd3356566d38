"""Machines with room for a task, and what it costs each of them."""

from __future__ import annotations

import json
import math
import threading
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reclaim.data.core import parallel as pieces
from reclaim.data.schema import RESOURCES
from reclaim.serving.answers.machine_fit import fit
from reclaim.serving.answers.machine_sums import MachineSums, sums_of
from reclaim.serving.wire.arrow import MEDIA_TYPE
from reclaim.serving.wire.errors import ClientLeftError, RequestError, parse_body
from reclaim.serving.wire.machine_schemas import MOST_CANDIDATES, FitAnswer, FitRequest
from reclaim.training.bundle import Bundle
from reclaim.training.machines.following import LARGEST
from reclaim.training.machines.terms import N_TERMS, RATES, T_HELD
from tests.serving.answers.machines_by_hand import (
    ALONE,
    E_BASELINE,
    FITTED,
    GOOD,
    UNITS,
    both,
    fitted_to,
    foresee,
    sums,
)
from tests.serving.cell_fixtures import Json, Memory, fact_rows, windows_of


def test_machines_with_room_come_by_what_a_candidate_costs_them(three: Memory) -> None:
    # machine 9, at 0.4 and the margin, has room for a new task of 0.5; machine 7, at 0.5, would pass its capacity
    more = E_BASELINE / RATES[-1]
    answer = fitted_to(three, candidates=[{"limit": both(0.5)}], capacity=both(0.95 + more))
    (candidate,) = answer.candidates
    assert (answer.margin, answer.budget, answer.machines, candidate.with_room) == ("baseline", 0.001, 2, 1)
    (place,) = candidate.places
    assert place.machine_id == 9
    assert place.peak.cpu == pytest.approx(0.9 + more, rel=1e-7)
    assert place.cost.cpu == pytest.approx(0.5, rel=1e-7)
    assert place.share == pytest.approx(1.0, rel=1e-7)
    assert (candidate.known, candidate.machine_id, candidate.freed) == (False, None, None)
    assert (candidate.collection_id, candidate.instance_index) == (None, None)
    nowhere = fitted_to(three, candidates=[{"limit": both(0.5)}], capacity={"cpu": 9.0, "memory": 0.5})
    assert (nowhere.candidates[0].with_room, nowhere.candidates[0].places) == (0, [])
    enough = fitted_to(three, candidates=[{"limit": both(0.5)}], capacity=both(1.0 + more + 1e-7))
    assert enough.candidates[0].with_room == 2


def test_a_known_task_costs_its_terms_and_frees_its_own_machine(three: Memory) -> None:
    request: Json = {"candidates": [{"collection_id": 2, "limit": both(9.0)}], "capacity": both(5.0)}
    (candidate,) = fitted_to(three, **request).candidates
    assert (candidate.known, candidate.machine_id, candidate.limit.cpu) == (True, 7, 1.0)
    assert candidate.freed is not None
    assert candidate.freed.cpu == pytest.approx(0.3, rel=1e-7)
    (place,) = candidate.places
    assert place.machine_id == 9
    assert [place.cost.cpu, place.share] == pytest.approx([0.3, 0.3])
    named = [{"machine_id": 20, "capacity": both(1.0)}, {"machine_id": 9}]
    (elsewhere,) = fitted_to(three, **request, machines=named).candidates
    assert [p.machine_id for p in elsewhere.places] == [
        9,
        20,
    ]  # 20 is empty, where the same task costs e / RATES[-1] more
    assert elsewhere.freed == candidate.freed


def test_a_task_whose_limit_is_unknown_on_its_machine_frees_nothing_there(three: Memory) -> None:
    three.tell(fact_rows({"task": 4, "machine_id": 7, "limit": 5.0}, {"task": 5, "machine_id": 7}))
    request: Json = {"candidates": [{"collection_id": 5, "limit": both(2.0)}], "capacity": both(9.0)}
    (candidate,) = fitted_to(three, **request).candidates
    assert (candidate.known, candidate.machine_id, candidate.limit.cpu) == (False, 7, 2.0)
    assert candidate.freed is not None
    assert candidate.freed.cpu == candidate.freed.memory == 0.0  # machine 7 counts nothing for it
    (place,) = candidate.places
    assert place.machine_id == 9
    assert place.cost.cpu == pytest.approx(2.0)


def test_the_share_that_ranks_machines_is_the_mean_over_the_resources(three: Memory) -> None:
    # task 3 goes on at 0.4 of CPU and 0.1 of memory, of limits of 1
    scores, slot = three.tracker._scores, three.tracker.find(np.array([[3, 0]]))
    assert scores is not None
    scores.shares[slot, RESOURCES.index("memory")] /= 4
    three.tracker._tasks["usage"][slot] = 0.1
    request: Json = {"candidates": [{"collection_id": 3, "limit": both(9.0)}], "capacity": both(5.0)}
    (place,) = fitted_to(three, **request).candidates[0].places
    assert [place.cost.cpu, place.cost.memory, place.share] == pytest.approx([0.4, 0.1, 0.25])


def test_a_candidate_numbered_0_on_machine_0_is_named_and_frees_it_though_another_machine_is_asked_for(
    bundle: Bundle,
) -> None:
    memory = Memory(ALONE, bundle)
    memory.write(windows_of({"task": 0, "machine_id": 0}))
    foresee(memory, {0: 0.3})
    request: Json = {"candidates": [{"collection_id": 0, "limit": both(9.0)}], "machines": [{"machine_id": 7}]}
    (candidate,) = fitted_to(memory, **request, capacity=both(5.0)).candidates
    assert (candidate.collection_id, candidate.instance_index, candidate.machine_id) == (0, 0, 0)
    assert candidate.freed is not None
    assert candidate.freed.cpu > 0.3  # and the margin of a machine that is empty then


def test_each_named_machine_has_its_own_capacity_in_any_order(three: Memory) -> None:
    named = [{"machine_id": m, "capacity": both(amount)} for m, amount in ((30, 0.6), (20, 0.1), (9, 5.0), (7, 0.6))]
    (candidate,) = fitted_to(three, candidates=[{"limit": both(0.5)}], machines=named).candidates
    assert sorted(place.machine_id for place in candidate.places) == [9, 30]


def test_a_candidate_that_is_unknown_or_held_at_its_limit_costs_its_limit(three: Memory) -> None:
    three.tell(fact_rows(estimation={3: False}))
    named = [{"collection_id": c, "limit": both(0.5)} for c in (3, 77)]
    opted_out, unknown = fitted_to(three, candidates=named, capacity=both(5.0)).candidates
    assert (opted_out.known, opted_out.limit.cpu, unknown.known, unknown.collection_id) == (False, 1.0, False, 77)
    assert [c.places[0].cost.cpu for c in (opted_out, unknown)] == pytest.approx([1.0, 0.5])


def test_the_largest_budget_for_which_peaks_are_known_is_answered(three: Memory) -> None:
    answer = fitted_to(three, candidates=[{"limit": both(0.5)}], capacity=both(9.0), budget=LARGEST)
    assert (answer.margin, answer.budget) == (None, LARGEST)


def test_most_names_the_cheapest_and_equal_costs_come_by_id(bundle: Bundle) -> None:
    memory = Memory(ALONE, bundle)
    memory.write(windows_of(*({"task": t, "machine_id": 100 - t} for t in range(1, 21))))
    foresee(memory, dict.fromkeys(range(1, 21), 0.2))
    (candidate,) = fitted_to(memory, candidates=[{"limit": both(1.0)}], capacity=both(9.0), most=3).candidates
    assert (candidate.with_room, [p.machine_id for p in candidate.places]) == (20, [80, 81, 82])
    (candidate,) = fitted_to(memory, candidates=[{"limit": both(1.0)}], capacity=both(9.0), most=19).candidates
    assert [p.machine_id for p in candidate.places] == list(range(80, 99))  # all but one


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.booleans(), st.floats(1e-4, 0.5))
def test_fit_is_what_the_estimator_says_of_each_pair(bundle: Bundle, seed: int, fitted: bool, budget: float) -> None:
    random = np.random.default_rng(seed)
    curves = {3_600: (FITTED, FITTED)} if fitted else {}
    memory = Memory(ALONE, replace(bundle, machines=curves))
    tasks = range(1, 13)
    memory.write(windows_of(*({"task": t, "machine_id": int(random.integers(4))} for t in tasks)))
    new = tuple(t for t in tasks if random.random() < 0.3)
    foresee(memory, {t: float(random.uniform(0, 1)) for t in tasks}, new=new)
    found, estimator = sums(memory), memory.scorer.machines
    capacity = float(random.uniform(0.5, 5))
    answer = fitted_to(memory, candidates=[{"limit": both(0.7)}], capacity=both(capacity), budget=budget, most=100)
    candidate = np.zeros((len(RESOURCES), N_TERMS))
    candidate[:, T_HELD] = 0.7
    wanted = {}
    for machine, own in zip(found.machine.tolist(), found.sums, strict=True):
        peak = estimator.peak((own + candidate)[None], budget)[0]
        if (peak <= capacity).all():
            wanted[machine] = peak - estimator.peak(own[None], budget)[0]
    places = answer.candidates[0].places
    assert {place.machine_id: [place.cost.cpu, place.cost.memory] for place in places} == {
        machine: cost.tolist() for machine, cost in wanted.items()
    }
    shares = [place.share for place in places]
    assert shares == sorted(shares)
    peaks = found.peaks()
    assert (peaks <= found.limit).all()
    assert (peaks[:-1] >= peaks[1:]).all()


@pytest.mark.parametrize(
    ("wrong", "code", "field"),
    [
        ({"capacity": None}, "no_capacity", "capacity"),
        ({"machines": [{"machine_id": 1}], "capacity": None}, "no_capacity", "machines[0].capacity"),
        (
            {"machines": [{"machine_id": 2}, {"machine_id": 1}, {"machine_id": 2}]},
            "repeated_machine",
            "machines[2].machine_id",
        ),
        ({"margin": "wide"}, "unknown_margin", "margin"),
        ({"margin": "medium", "budget": 0.1}, "margin_and_budget", "budget"),
        ({"budget": 0.51}, "budget_too_large", "budget"),
    ],
)
def test_a_question_that_means_nothing_is_refused(three: Memory, wrong: Json, code: str, field: str) -> None:
    request = {"candidates": [{"limit": both(0.5)}], "capacity": both(5.0), **wrong}
    with pytest.raises(RequestError) as refused:
        fitted_to(three, **request)
    assert (refused.value.status, refused.value.body.error.code, refused.value.body.error.field) == (422, code, field)


def test_candidates_are_answered_alike_and_in_their_order_by_any_number_of_threads(
    three: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "ROWS_WORTH_A_THREAD", 1)
    body = {"candidates": [{"limit": both(0.1 * k)} for k in range(1, 8)], "capacity": both(5.0)}
    request = parse_body(json.dumps(body).encode(), FitRequest)
    alone, threaded = (fit(three.tracker, request, three.settings, UNITS, threads) for threads in (1, 3))
    assert [c.limit.cpu for c in alone.candidates] == pytest.approx([0.1 * k for k in range(1, 8)])
    assert threaded == alone


def test_candidates_and_machines_are_of_one_model_though_it_changes_between_them(
    three: Memory, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    request: Json = {"candidates": [{"collection_id": 3, "limit": both(9.0)}], "capacity": both(5.0)}
    before = fitted_to(three, **request)
    following = [Memory(ALONE, bundle).scorer]

    def promote_first(*of: Any, **more: Any) -> MachineSums:
        if following:  # the candidates have been looked at
            three.tracker.promote(following.pop())
        return sums_of(*of, **more)

    monkeypatch.setattr("reclaim.serving.answers.machine_fit.sums_of", promote_first)
    amid = fitted_to(three, **request)
    assert following == []
    assert amid == fitted_to(three, **request)
    assert amid.candidates[0].freed != before.candidates[0].freed  # the model foresees other than 0.4


def test_nothing_is_computed_for_a_client_that_has_left(three: Memory) -> None:
    request = parse_body(json.dumps({"candidates": [{"limit": both(0.5)}], "capacity": both(5.0)}).encode(), FitRequest)
    left = threading.Event()
    assert len(fit(three.tracker, request, three.settings, UNITS, left=left).candidates) == 1
    left.set()
    with pytest.raises(ClientLeftError):
        fit(three.tracker, request, three.settings, UNITS, left=left)


def test_too_many_pairs_are_refused(three: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reclaim.serving.answers.machine_fit.MOST_PAIRS", 2)
    fitted_to(three, candidates=[{"limit": both(0.5)}], capacity=both(5.0))
    with pytest.raises(RequestError, match="2 candidates on 2 machines: at most 2 pairs") as refused:
        fitted_to(three, candidates=[{"limit": both(0.5)}] * 2, capacity=both(5.0))
    assert refused.value.status == 413


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"null", b'{"candidates": [], "capacity": {"cpu": 1, "memory": 1}}',
        json.dumps({**GOOD, "most": 0}).encode(), json.dumps({**GOOD, "most": 101}).encode(),
        json.dumps({**GOOD, "capacity": both(0)}).encode(), json.dumps({**GOOD, "capacity": both(-1)}).encode(),
        json.dumps({**GOOD, "capacity": both(math.nan)}).encode(),
        json.dumps({**GOOD, "capacity": {"cpu": 1}}).encode(),
        json.dumps({**GOOD, "horizon_s": 7}).encode(), json.dumps({**GOOD, "horizon_s": "300"}).encode(),
        json.dumps({**GOOD, "budget": 1}).encode(), json.dumps({**GOOD, "budget": 0}).encode(),
        json.dumps({**GOOD, "machines": [{"machine_id": -1}]}).encode(), json.dumps({**GOOD, "more": 1}).encode(),
        json.dumps({**GOOD, "candidates": [{}]}).encode(),
        json.dumps({**GOOD, "candidates": GOOD["candidates"] * (MOST_CANDIDATES + 1)}).encode(),
        json.dumps({**GOOD, "candidates": [{"collection_id": 2**63, "limit": both(1)}]}).encode(),
        json.dumps(GOOD).encode()[:-1] + b', "most": 3, "most": 4}',
    ],
)  # fmt: skip
def test_a_hostile_body_is_refused_in_the_one_shape(url: str, body: bytes) -> None:
    response = httpx.post(
        f"{url}/v1/machines/fit", content=body, headers={"content-type": "application/json"}, timeout=120
    )
    assert response.status_code in (400, 422)
    assert response.json()["error"]["message"]


def test_fit_is_answered_over_http_and_a_stream_is_none_of_its_bodies(url: str) -> None:
    answer = httpx.post(f"{url}/v1/machines/fit", json={**GOOD, "most": 2}, timeout=120)
    assert answer.status_code == 200
    (candidate,) = FitAnswer.model_validate_json(answer.content).candidates
    assert (candidate.with_room, len(candidate.places)) == (5, 2)
    arrow = httpx.post(f"{url}/v1/machines/fit", content=b"x", headers={"content-type": MEDIA_TYPE}, timeout=120)
    assert arrow.status_code == 415
