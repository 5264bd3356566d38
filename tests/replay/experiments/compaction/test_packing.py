"""Packing from scratch: each rule on cells worked by hand, and what holds on any."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from reclaim.data.errors import ConfigError
from reclaim.replay.closed_loop.placement import POLICIES
from reclaim.replay.experiments.compaction.packing import (
    LOOK_BELOW,
    PENDING_SHARE,
    Foreseen,
    MachineSet,
    Packer,
    TaskSet,
    _with,
    booked_on,
)
from reclaim.training.machines.curve import EXCEEDED, INPUTS, MachineCurve
from reclaim.training.machines.estimator import BOUND, MachineEstimator
from reclaim.training.machines.terms import N_TERMS, RATES, T_BAND, T_HELD, T_LIMIT, T_MEAN, T_USAGE
from reclaim.training.margins.violation import SUM_ROUNDING


def tasks(*limits: tuple[float, float], **changes: Sequence[Any]) -> TaskSet:
    """Make tasks of the lowest priority, each a job of its own, that may run anywhere."""
    n = len(limits)
    columns: dict[str, Any] = {
        "limit": np.array(limits).reshape(n, 2),
        "production": np.zeros(n, np.bool_),
        "priority": np.zeros(n, np.int64),
        "constraint_set": np.zeros(n, np.int64),
        "job": np.arange(n),
        "most": np.zeros(n, np.int64),
        "soft": np.zeros(n, np.bool_),
        "picky": np.zeros(n, np.bool_),
    }
    return TaskSet(**columns | {name: np.array(values) for name, values in changes.items()})


def machines(*capacities: tuple[float, float], allowed: Sequence[Sequence[bool]] = ()) -> MachineSet:
    """Make machines; by default every set is allowed everywhere."""
    every = np.array(allowed) if len(allowed) else np.ones((1, len(capacities)), np.bool_)
    return MachineSet(np.array(capacities), every)


def placed(workload: TaskSet, onto: MachineSet, booked: Any = None, policy: str = "hybrid") -> list[int] | None:
    """Return where tasks go, by their limits unless another amount is booked."""
    reserved = workload.limit if booked is None else np.array(booked, np.float64)
    found = Packer(workload, reserved, policy).place(onto, len(onto))
    return None if found is None else found.tolist()


MEAN = MachineCurve(weights=tuple(float(name == "mean") for name in INPUTS))
"""Reserves the sum of means times one plus the margin."""


def foreseen(n: int, limit: float = 0.5, mean: float = 0.2, margin: float = 0.0, usage: float = 0.0) -> Foreseen:
    """Make tasks of one limit and mean, of both resources, for an estimator that reserves the sum of means.

    They stay at their means, so that any set has the same spread.
    """
    terms = np.zeros((n, 2, N_TERMS))
    terms[..., T_LIMIT], terms[..., T_MEAN], terms[..., T_USAGE] = limit, mean, usage
    terms[..., T_BAND:] = mean
    return Foreseen(terms, MachineEstimator((MEAN, MEAN), 3_600, (1.0, 1.0)), (margin, margin))


ONE, TWO = machines((1, 1)), machines((1, 1), (1, 1))


def test_production_never_relies_on_reclaimed_resources() -> None:
    two = tasks((0.6, 0.1), (0.6, 0.1), production=[True, True])
    assert placed(two, ONE, booked=[(0.1, 0.1), (0.1, 0.1)]) is None
    assert sorted(placed(two, TWO, booked=[(0.1, 0.1), (0.1, 0.1)]) or []) == [0, 1]


def test_everybody_else_is_placed_in_reclaimed_resources() -> None:
    mixed = tasks((0.8, 0.8), (0.6, 0.6), production=[True, False])
    assert placed(mixed, ONE, booked=[(0.3, 0.3), (0.6, 0.6)]) == [0, 0]
    assert placed(mixed, ONE) is None


@pytest.mark.parametrize("booked", [[(0.8, 0.1), (0.3, 0.1)], [(0.1, 0.8), (0.1, 0.3)]])
def test_the_reservations_of_all_tasks_fit_the_capacity_of_each_resource(booked: list[tuple[float, float]]) -> None:
    mixed = tasks((0.8, 0.8), (0.3, 0.3), production=[True, False])
    assert placed(mixed, ONE, booked=booked) is None
    assert placed(mixed, ONE, booked=[(0.7, 0.7), (0.3, 0.3)]) == [0, 0]


def test_a_sum_that_passes_the_capacity_by_rounding_alone_fits() -> None:
    assert 0.3 - 0.1 - 0.1 < 0.1
    assert placed(tasks(*[(0.1, 0.1)] * 3), machines((0.3, 0.3))) == [0] * 3
    assert placed(tasks((0.1, 0.1), (0.1, 0.1), (0.1 + 1e-6, 0.1)), machines((0.3, 0.3))) is None


def test_a_task_runs_where_its_constraints_allow_it() -> None:
    onto = machines((1, 1), (1, 1), allowed=[[True, True], [False, True], [False, False]])
    assert placed(tasks((0.1, 0.1), (0.1, 0.1), constraint_set=[1, 1]), onto) == [1, 1]
    assert placed(tasks((0.1, 0.1), constraint_set=[2]), onto) is None


def test_a_soft_constraint_gives_way_only_where_it_must() -> None:
    onto = machines((1, 1), (4, 4), allowed=[[True, True], [False, True]])
    soft = tasks((0.9, 0.9), constraint_set=[1], soft=[True])
    assert placed(soft, replace(onto, allowed=np.ones((2, 2), np.bool_))) == [0]
    assert placed(soft, onto) == [1]
    assert placed(soft, machines((4, 4), (1, 1), allowed=[[True, True], [True, False]])) == [0]
    assert placed(soft, machines((1, 1), (0.5, 0.5), allowed=[[True, True], [False, True]])) == [0]
    assert placed(replace(soft, soft=np.array([False])), machines((1, 1), allowed=[[True], [False]])) is None


def test_no_more_tasks_of_a_job_share_a_machine_than_it_says() -> None:
    job = tasks((0.1, 0.1), (0.1, 0.1), (0.1, 0.1), job=[7, 7, 7], most=[2, 2, 2])
    assert placed(job, ONE) is None
    assert sorted(placed(job, TWO) or []) in ([0, 0, 1], [0, 1, 1])
    assert placed(replace(job, soft=np.ones(3, np.bool_)), ONE) == [0, 0, 0]
    assert placed(replace(job, job=np.array([7, 7, 8])), ONE) == [0, 0, 0]


def test_a_five_hundredth_of_the_tasks_may_go_pending_if_they_are_picky() -> None:
    n = round(1 / PENDING_SHARE)
    limits, picky = [(0.0, 0.0)] * (n - 1) + [(2.0, 2.0)], np.arange(n) == n - 1
    assert placed(tasks(*limits, picky=picky), ONE) == [0] * (n - 1) + [-1]
    assert placed(tasks(*limits), ONE) is None
    assert placed(tasks(*limits[1:], picky=picky[1:]), ONE) is None  # one fewer: a five hundredth is no whole task


def test_high_priorities_go_first_and_then_large_tasks() -> None:
    workload = tasks((0.1, 0.1), (0.2, 0.2), (0.3, 0.1), (0.1, 0.4), priority=[9, 0, 0, 0])
    assert workload.order(workload.limit).tolist() == [0, 3, 2, 1]
    production = replace(workload, production=np.array([False, True, False, False]), priority=np.zeros(4, np.int64))
    assert production.order(np.full((4, 2), 0.1)).tolist()[0] == 1  # by limit, however little is booked


@pytest.mark.parametrize(("policy", "at"), [("best-fit", 0), ("worst-fit", 2), ("hybrid", 1)])
def test_each_policy_takes_the_machine_that_it_likes_best(policy: str, at: int) -> None:
    # leaves (0.5, 0), (0.5, 0.5) and (0.9, 0.7) of the capacities
    onto = machines((1.0, 0.5), (1.0, 1.0), (5.0, 5 / 3))
    assert placed(tasks((0.5, 0.5)), onto, policy=policy) == [at]


@pytest.mark.parametrize(("policy", "at"), [("best-fit", 0), ("worst-fit", 1)])
def test_the_room_for_production_is_the_smaller_one_of_what_bookings_and_its_limits_leave(policy: str, at: int) -> None:
    # limits of production leave 0.2 of the first machine, though 0.7 is not booked, and 0.8 of the second, 0.5 unbooked
    workload = tasks(
        (0.6, 0.6), (0.3, 0.3), (0.2, 0.2), production=[True, False, True], priority=[9, 8, 7], constraint_set=[1, 2, 0]
    )
    onto = machines((1, 1), (1, 1), allowed=[[True, True], [True, False], [False, True]])
    assert placed(workload, onto, [(0.1, 0.1), (0.3, 0.3), (0.2, 0.2)], policy) == [0, 1, at]


def test_what_is_left_counts_as_a_share_of_the_machines_own_capacity_and_of_equals_the_first_is_taken() -> None:
    # leaves 19/20 and 1/2 of the first, 1/2 and 3/4 of the second
    assert placed(tasks((0.5, 0.5)), machines((10, 1), (1, 2)), policy="best-fit") == [1]
    assert placed(tasks((0.5, 0.5)), machines((1, 10), (2, 1)), policy="best-fit") == [1]
    for policy in POLICIES:
        assert placed(tasks((0.5, 0.5)), TWO, policy=policy) == [0]


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match="best-fit, worst-fit, hybrid, got random"):
        Packer(tasks((1, 1)), np.ones((1, 2)), "random")


def test_the_fewest_machines_are_found_and_confirmed() -> None:
    three = Packer(tasks(*[(0.6, 0.6)] * 3), np.full((3, 2), 0.6))
    found = three.fewest(machines(*[(1, 1)] * 20))
    assert found is not None
    assert found[0] == 3
    assert sorted(found[1].tolist()) == [0, 1, 2]
    assert three.fewest(TWO) is None


def test_numbers_below_one_that_does_not_fit_are_tried_as_well() -> None:
    workload = tasks((0.4, 0.4), (0.5, 0.6), (0.7, 0.2), (0.1, 0.5))
    onto = machines((0.7, 1.0), (1.2, 0.8), (1.1, 0.5), (1.1, 0.6), (0.8, 0.5), (1.0, 0.4))
    packer = Packer(workload, workload.limit)
    assert [packer.place(onto, n) is not None for n in range(1, 7)] == [False, True, False, True, True, True]
    found = packer.fewest(onto)  # the bisection alone ends at 4
    assert found is not None
    assert found[0] == 2


def test_below_each_number_that_fits_the_search_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    fits, tried = {12, 9, 7, 5, 4, 1}, []

    def place(_: Packer, __: MachineSet, n: int) -> NDArray[np.int64] | None:
        tried.append(n)
        return np.full(1, n) if n in fits else None

    monkeypatch.setattr(Packer, "place", place)
    found = Packer(tasks((0.1, 0.1)), np.full((1, 2), 0.1)).fewest(machines(*[(1, 1)] * 12))
    # the bisection ends at 7; two below 7 is 5, one below that is 4, three below that is 1, with nothing below
    assert tried == [12, 6, 9, 7, 5, 4, 3, 2, 1]
    assert found is not None
    assert (found[0], found[1].tolist()) == (1, [1])  # and the placement is that of the last that fits


def test_machines_are_kept_in_their_order() -> None:
    one = Packer(tasks((0.6, 0.6)), np.full((1, 2), 0.6))
    found = one.fewest(machines((0.5, 1), (0.5, 1), (1, 1), (1, 1)))  # the first two are too small
    assert found is not None
    assert found[0] == 3


def test_a_machine_taken_twice_is_cloned() -> None:
    twice = machines((1, 2), (3, 4), allowed=[[True, True], [False, True]]).take(np.array([1, 0, 1]))
    assert twice.capacity.tolist() == [[3, 4], [1, 2], [3, 4]]
    assert twice.allowed.tolist() == [[True] * 3, [True, False, True]]


_SIZES = st.floats(0.0, 1.0).map(lambda v: round(v, 3))


@st.composite
def problems(draw: st.DrawFn) -> tuple[TaskSet, NDArray[np.float64], MachineSet]:
    """Draw tasks with every kind of wish, reservations up to their limits, and machines."""
    n, m, sets = draw(st.integers(1, 12)), draw(st.integers(1, 10)), 3

    def column(values: st.SearchStrategy[Any], count: int) -> list[Any]:
        return draw(st.lists(values, min_size=count, max_size=count))

    limit = np.array(column(_SIZES, 2 * n)).reshape(n, 2)
    booked = limit * np.array(column(_SIZES, 2 * n)).reshape(n, 2)
    workload = tasks(
        *map(tuple, limit.tolist()),
        production=column(st.booleans(), n),
        priority=column(st.integers(0, 2), n),
        constraint_set=column(st.integers(0, sets - 1), n),
        job=column(st.integers(0, 3), n),
        most=column(st.integers(0, 2), n),
    )
    allowed = np.array(column(st.booleans(), sets * m)).reshape(sets, m)
    allowed[0] = True
    capacity = np.array(column(st.floats(0.1, 2.0), 2 * m)).reshape(m, 2)
    return workload, booked, MachineSet(capacity, allowed)


@settings(max_examples=150, deadline=None)
@given(problems(), st.sampled_from(sorted(POLICIES)))
def test_whatever_is_placed_keeps_every_rule(
    problem: tuple[TaskSet, NDArray[np.float64], MachineSet], policy: str
) -> None:
    workload, booked, onto = problem
    packer = Packer(workload, booked, policy)
    found = packer.fewest(onto)
    again = Packer(workload, booked, policy).fewest(onto)
    if found is None or again is None:
        assert found is again is None
        assert packer.place(onto, len(onto)) is None
        return
    n, at = found
    assert n == again[0]
    np.testing.assert_array_equal(at, again[1])
    assert ((at >= 0) & (at < n)).all()  # so few tasks that none may go pending
    whole = onto.capacity[:n] * (1 + 2 * SUM_ROUNDING)
    for sizes in (booked, np.where(workload.production[:, None], workload.limit, 0.0)):
        used = np.zeros((n, 2))
        np.add.at(used, at, sizes)
        assert (used <= whole).all()
    assert onto.allowed[workload.constraint_set, at].all()
    for task in np.flatnonzero(workload.most):  # where a job's tasks differ, a later one may join with a looser bound
        together = (workload.job == workload.job[task]) & (at == at[task]) & (workload.most > 0)
        assert together.sum() <= workload.most[together].max()
    for fewer in range(max(1, n - LOOK_BELOW), n):
        assert packer.place(onto, fewer) is None


def placed_one_by_one(
    workload: TaskSet, booked: NDArray[np.float64] | Foreseen, onto: MachineSet, policy: str
) -> list[int] | None:
    """Place tasks as ``Packer.place`` does, and look at every machine for each of them."""
    weights, n = POLICIES[policy], len(onto)
    alone = booked.of_sets(booked.terms) if isinstance(booked, Foreseen) else booked
    room, production = onto.capacity * (1 + SUM_ROUNDING), np.zeros((n, 2))
    found = np.full(len(workload), -1)

    def best(i: int, *, hard: bool) -> int:
        scores = np.full(n, np.inf)
        for m in range(n):
            those = [*np.flatnonzero(found == m), i]
            if hard and not onto.allowed[workload.constraint_set[i], m]:
                continue
            same = sum(workload.job[k] == workload.job[i] for k in those)
            if hard and same > workload.most[i] > 0:
                continue
            if isinstance(booked, Foreseen):
                left = room[m] - booked.of_sets(booked.terms[those].sum(axis=0)[None])[0]
            else:
                left = room[m] - booked[those].sum(axis=0)
            if workload.production[i]:
                left = np.minimum(left, room[m] - production[m] - workload.limit[i])
            if (left >= 0).all():
                cpu, memory = left / onto.capacity[m]
                scores[m] = weights[0] * abs(cpu - memory) + weights[1] * (cpu + memory) / 2
        return int(scores.argmin()) if np.isfinite(scores).any() else -1

    for i in workload.order(alone):
        at = best(i, hard=True)
        at = best(i, hard=False) if at < 0 and workload.soft[i] else at
        if at < 0:
            return None
        found[i] = at
        production[at] += workload.limit[i] * workload.production[i]
    return found.tolist()


@settings(max_examples=200, deadline=None)
@given(problems(), st.sampled_from(sorted(POLICIES)), st.data())
def test_each_task_goes_to_the_first_machine_of_the_least_score_among_all_with_room(
    problem: tuple[TaskSet, NDArray[np.float64], MachineSet], policy: str, data: st.DataObject
) -> None:
    workload, booked, onto = problem
    n, m = len(workload), len(onto)
    soft = np.array(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    kinds = np.array([(0.5, 1.0), (1.0, 1.0), (2.0, 1.0)])  # many machines are alike
    of = data.draw(st.lists(st.integers(0, len(kinds) - 1), min_size=m, max_size=m))
    # of powers of two and thousandths of them sums and shares are exact, so that ties are
    limit, booked = (np.floor(1024 * sizes) / 1024 for sizes in (workload.limit, booked))
    workload, onto = replace(workload, limit=limit, soft=soft), replace(onto, capacity=kinds[of])
    terms = np.zeros((*booked.shape, N_TERMS))
    terms[..., T_LIMIT], terms[..., T_MEAN], terms[..., T_USAGE] = workload.limit, booked / 2, booked / 4
    terms[..., T_BAND:] = booked[..., None] * np.arange(16, 16 + N_TERMS - T_BAND) / 32
    for of_tasks in (booked, Foreseen(terms, MachineEstimator((MEAN, MEAN), 3_600, (1.0, 1.0)), (0.05, 0.1))):
        found = Packer(workload, of_tasks, policy).place(onto, m)
        assert (None if found is None else found.tolist()) == placed_one_by_one(workload, of_tasks, onto, policy)


def test_an_estimator_of_machines_books_for_all_tasks_together() -> None:
    # the means of five tasks of 0.2 sum to 1; with a fifth of the capacity on top four of them do
    five, margin = tasks(*[(0.5, 0.5)] * 5), 0.2 * RATES[-1] / math.log(1 / EXCEEDED[-1])
    assert Packer(five, foreseen(5)).place(ONE, 1) is not None
    assert Packer(five, foreseen(5, margin=margin)).place(ONE, 1) is None
    assert Packer(five.take(np.arange(4)), foreseen(4, margin=margin)).place(ONE, 1) is not None
    # never below what the tasks use
    assert Packer(five, foreseen(5, usage=0.21)).place(ONE, 1) is None
    found = Packer(five, foreseen(5, margin=margin)).fewest(machines(*[(1.0, 1.0)] * 5))
    assert found is not None
    assert found[0] == 2
    assert booked_on(foreseen(5, margin=margin), found[1], 2).sum(axis=0) == pytest.approx([1.4, 1.4])
    # production is placed by its limits under it, too
    assert Packer(replace(five, production=np.ones(5, np.bool_)), foreseen(5)).place(ONE, 1) is None


def test_each_resource_of_an_estimator_of_machines_must_fit() -> None:
    three = tasks(*[(0.5, 0.5)] * 3)
    for r in range(2):
        booked = foreseen(3)
        booked.terms[:, r, T_MEAN] = 0.4
        assert Packer(three, booked).place(ONE, 1) is None
        assert Packer(three, booked).place(TWO, 2) is not None


@pytest.mark.parametrize("r", [0, 1])
def test_each_resource_has_a_margin_and_a_curve_of_its_own(r: int) -> None:
    three, booked = tasks(*[(0.5, 0.5)] * 3), foreseen(3, mean=0.3)
    assert Packer(three, booked).place(ONE, 1) is not None  # 0.9 of each
    margin = 0.2 * RATES[-1] / math.log(1 / EXCEEDED[-1])  # a fifth of the capacity
    margins = (margin, 0.0) if r == 0 else (0.0, margin)
    assert Packer(three, replace(booked, margins=margins)).place(ONE, 1) is None
    doubled = MachineCurve(weights=tuple(2.0 * (name == "mean") for name in INPUTS))
    curves = (doubled, MEAN) if r == 0 else (MEAN, doubled)
    of_both = replace(booked, estimator=MachineEstimator(curves, 3_600, (1.0, 1.0)))
    assert Packer(three, of_both).place(ONE, 1) is None
    assert Packer(three, of_both).place(TWO, 2) is not None


@settings(max_examples=60, deadline=None)
@given(problems(), st.sampled_from(sorted(POLICIES)))
def test_tasks_without_a_forecast_are_packed_as_by_the_sum_of_what_they_hold(
    problem: tuple[TaskSet, NDArray[np.float64], MachineSet], policy: str
) -> None:
    workload, booked, onto = problem
    terms = np.zeros((*booked.shape, N_TERMS))
    terms[..., T_HELD] = booked
    for curves in (BOUND, (MEAN, MEAN)):
        packed = Packer(workload, Foreseen(terms, MachineEstimator(curves, 3_600, (1.0, 1.0)), (1.0, 1.0)), policy)
        expected, found = Packer(workload, booked, policy).place(onto, len(onto)), packed.place(onto, len(onto))
        assert (found is None) == (expected is None)
        if found is not None:
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("curve", [MachineCurve(), MachineCurve(weights=tuple(0.1 * k for k in range(len(INPUTS))))])
def test_a_kernel_reserves_to_the_same_bits_as_the_estimator(curve: MachineCurve) -> None:
    rng = np.random.default_rng(5)
    sums, terms = rng.random((2, 200, 1, N_TERMS))
    sums[..., T_LIMIT] *= 5
    sums[..., T_BAND:] = np.sort(sums[..., T_BAND:], axis=-1)
    one = Foreseen(terms, MachineEstimator((curve,), 3_600, (0.3,)), (0.4,))
    expected = one.of_sets(sums + terms)[:, 0]
    margins, curves = one.compiled()
    found = [_with(sums[i, 0], terms[i, 0], margins[0], curves[0], np.empty(N_TERMS)) for i in range(len(sums))]
    assert found == expected.tolist()
    assert len(set(found)) == len(found)
