"""From an answer to a request: whole steps, the floor, the limit, out-of-memory ends, and the least change."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reclaim.data.errors import ConfigError
from reclaim.features.splits import TEST
from reclaim.replay.experiments.recommend.decisions import Decisions
from reclaim.replay.experiments.recommend.definitions import definitions
from reclaim.replay.experiments.recommend.policy import ESTIMATE, OVER, RULES, Policy, RecommendConfig, held_back
from reclaim.training.margins.margin import Budgets

MIB = 2.0**20
KUBERNETES = Policy(
    least=(0.01, 100e6),
    step=(0.001, MIB),
    min_change=0.1,
    history_days=1.0,
    ran_hours=2.0,
    oom_bump=1.2,
    oom_bump_by=100 * MIB,
    largest_memory=float("nan"),
)
NAN = float("nan")


def decisions(n: int = 1, *, request: tuple[float, float] = (1.0, 1024 * MIB), killed_at: float = NAN) -> Decisions:
    """Return ``n`` decisions of one workload, one after another, under limits of 2 cores and 2 GiB."""
    return Decisions(
        workload=np.zeros(n, np.int64), time_us=np.arange(n), period=np.full(n, TEST), before=np.arange(n) - 1,
        known=np.arange(n), request=np.tile(request, (n, 1)), limit=np.tile((2.0, 2048 * MIB), (n, 1)),
        enforced=np.tile((2.0, 2048 * MIB), (n, 1)),
        age_days=np.full(n, 9.0), ran_hours=np.full(n, 50.0), killed_at=np.full(n, killed_at),
        tier=np.zeros(n, np.int8), judged={}, held={},
    )  # fmt: skip


def settled(
    answer: tuple[float, float], of: Decisions | None = None, *, withheld: bool = False
) -> list[tuple[Any, str]]:
    of = of or decisions()
    request, rule = KUBERNETES.requests(np.array([answer]), of, np.array([[withheld, False]]))
    return [(float(request[0, r]), RULES[rule[0, r]]) for r in range(2)]


def test_an_answer_is_rounded_up_to_a_millicore_and_a_mebibyte() -> None:
    cpu, memory = settled((0.2341, 300.2 * MIB))
    assert cpu == (pytest.approx(0.235), "estimate")
    assert memory == (301 * MIB, "estimate")
    assert settled((0.25, 300 * MIB)) == [(pytest.approx(0.25), "estimate"), (300 * MIB, "estimate")]
    # percentiles of CPU are of single precision, in which 0.4 is a little more
    assert settled((float(np.float32(0.4)), 300 * MIB))[0] == (pytest.approx(0.4), "estimate")


def test_a_whole_number_of_millicores_is_the_number_that_its_decimals_are() -> None:
    """The API server rounds 0.009000000000000001 up to 10 millicores; a request of 0.013 is none to change to 0.013."""
    exact = replace(KUBERNETES, min_change=0.0, least=(0.0, 0.0))
    for milli in (9, 13, 18, 26, 1001):
        of = decisions(request=(milli / 1000, 300 * MIB))
        request, _ = exact.requests(np.array([[milli / 1000 - 1e-4, 300 * MIB]]), of, np.zeros((1, 2), np.bool_))
        assert request[0].tolist() == [milli / 1000, 300 * MIB]


def test_nothing_is_requested_below_the_floor_or_above_the_limit() -> None:
    assert settled((0.0001, 5.0)) == [(0.01, "floor"), (96 * MIB, "floor")]  # 100 MB are 95.4 MiB
    assert settled((2.5, 4096 * MIB)) == [(2.0, "limit"), (2048 * MIB, "limit")]


def test_a_limit_that_is_not_enforced_is_no_bound_below_the_floor() -> None:
    # the history allows 32 MiB, twice the largest usage so far
    free = replace(decisions(), enforced=np.full((1, 2), NAN), limit=np.array([[0.004, 32 * MIB]]))
    assert settled((0.002, 20 * MIB), free) == [(0.01, "floor"), (96 * MIB, "floor")]
    tight = replace(free, enforced=free.limit)
    assert settled((0.002, 20 * MIB), tight) == [(0.004, "limit"), (32 * MIB, "limit")]


def test_a_limit_that_is_not_enforced_bounds_a_request_to_whole_millicores_and_mebibytes_below_it() -> None:
    # a power of two is no whole number of millicores, nor need what a node allots be one of mebibytes
    assumed = np.array([[0.0625, 2048.5 * MIB]])
    free = replace(decisions(request=(0.04, 1024 * MIB)), enforced=np.full((1, 2), NAN), limit=assumed)
    assert settled((0.08, 4096 * MIB), free) == [(0.062, "limit"), (2048 * MIB, "limit")]
    large = replace(free, limit=np.array([[64.4, 524_287.6 * MIB]]))
    assert settled((70.0, 2**50), large) == [(64.4, "limit"), (524_287 * MIB, "limit")]
    whole = replace(free, limit=np.array([[0.25, 2048 * MIB]]))
    assert settled((0.3, 4096 * MIB), whole) == [(0.25, "limit"), (2048 * MIB, "limit")]


def test_a_change_of_less_than_a_tenth_is_not_made_in_either_direction() -> None:
    assert settled((0.901, 1126 * MIB)) == [(1.0, "small change"), (1024 * MIB, "small change")]  # 102 of 1024 MiB
    assert settled((0.89, 1127 * MIB)) == [(pytest.approx(0.89), "estimate"), (1127 * MIB, "estimate")]  # 103 of them


def test_after_an_end_out_of_memory_the_request_is_above_the_limit_of_then_even_for_a_small_change() -> None:
    # killed at 1024 MiB: 1.2 times are 1228.8, up to a whole one 1229; 100 MiB more would be 1124
    assert settled((0.5, 300 * MIB), decisions(killed_at=1024 * MIB))[1] == (1229 * MIB, "out of memory")
    # killed at 256 MiB: 1.2 times are 307.2, 100 MiB more are 356
    cpu, memory = settled((0.5, 300 * MIB), decisions(killed_at=256 * MIB))
    assert memory == (356 * MIB, "out of memory")
    assert cpu == (0.5, "estimate")  # which no end out of memory raises
    # a present request of 1200 MiB is 2.4 % below 1229, and yet raised
    small = decisions(request=(1.0, 1200 * MIB), killed_at=1024 * MIB)
    assert settled((0.5, 300 * MIB), small)[1] == (1229 * MIB, "out of memory")
    # more is answered than that
    assert settled((0.5, 1500 * MIB), decisions(killed_at=1024 * MIB))[1] == (1500 * MIB, "estimate")
    # the limit does not hold it: it was too low
    assert settled((0.5, 300 * MIB), decisions(killed_at=2048 * MIB))[1] == (2458 * MIB, "out of memory")


def test_after_an_end_out_of_memory_no_more_is_requested_than_the_largest_machine_has() -> None:
    """Where a node of 2200.5 MiB was full of one container, 1.2 times that container is a pod that is never placed."""
    small = replace(KUBERNETES, largest_memory=2200.5 * MIB)
    free = replace(decisions(killed_at=2048 * MIB), enforced=np.full((1, 2), NAN))
    request, rule = small.requests(np.array([(0.5, 300 * MIB)]), free, np.zeros((1, 2), np.bool_))
    assert (request[0, 1], RULES[rule[0, 1]]) == (2200 * MIB, "out of memory")
    for policy, said in ((small, True), (KUBERNETES, False)):  # without a known machine nothing is said of one
        meaning = definitions(RecommendConfig(), policy, kubernetes=True)["out of memory"]
        assert ("the largest machine" in meaning) == said


def test_without_an_answer_the_request_stays_and_without_a_request_there_is_none() -> None:
    assert settled((NAN, NAN)) == [(1.0, "unknown"), (1024 * MIB, "unknown")]
    found = settled((NAN, 300 * MIB), decisions(request=(NAN, NAN)))
    assert np.isnan(found[0][0])
    assert found[0][1] == "no request"
    assert found[1] == (300 * MIB, "estimate")


def test_a_young_workload_is_given_more_and_not_less() -> None:
    young = replace(decisions(), age_days=np.array([0.9]))
    assert settled((0.5, 1500 * MIB), young) == [(1.0, "unknown"), (1500 * MIB, "estimate")]
    none = replace(young, request=np.full((1, 2), NAN))
    assert settled((0.5, 1500 * MIB), none) == [(0.5, "estimate"), (1500 * MIB, "estimate")]
    assert settled((0.5, 1500 * MIB), replace(young, age_days=np.array([1.0])))[0] == (0.5, "estimate")


def test_a_workload_that_ran_for_a_moment_is_given_more_and_not_less_however_long_ago_it_was() -> None:
    brief = replace(decisions(), ran_hours=np.array([1.9]))
    assert settled((0.5, 1500 * MIB), brief) == [(1.0, "unknown"), (1500 * MIB, "estimate")]
    assert settled((0.5, 1500 * MIB), replace(brief, ran_hours=np.array([2.0])))[0] == (0.5, "estimate")


def test_a_request_that_an_autoscaler_uses_stays() -> None:
    assert settled((0.2, 300 * MIB), withheld=True) == [(1.0, "autoscaler"), (300 * MIB, "estimate")]


def test_a_small_change_is_measured_from_the_request_set_before_and_not_from_the_first() -> None:
    answer = np.array([[0.5, NAN], [0.54, NAN], [0.58, NAN], [NAN, NAN]])
    request, rule = KUBERNETES.requests(answer, decisions(4), np.zeros((4, 2), np.bool_))
    # 1 → 0.5; 0.54 is 8 % more, so it stays; 0.58 is 16 % more; nothing is known, so that stays
    np.testing.assert_allclose(request[:, 0], [0.5, 0.5, 0.58, 0.58])
    assert [RULES[k] for k in rule[:, 0]] == ["estimate", "small change", "estimate", "unknown"]


@given(
    answer=st.floats(0, 4e9), present=st.floats(1e6, 2e9), killed=st.one_of(st.just(NAN), st.floats(1e6, 2e9)),
    change=st.floats(0, 0.9),
)  # fmt: skip
def test_whatever_is_answered_memory_is_never_below_the_floor_nor_what_a_kill_asks_for(
    answer: float, present: float, killed: float, change: float
) -> None:
    policy = replace(KUBERNETES, min_change=change)
    of = decisions(request=(1.0, present), killed_at=killed)
    request, rule = policy.requests(np.array([[1.0, answer]]), of, np.zeros((1, 2), np.bool_))
    asked = float(policy.after_kill(np.array(killed)))
    if np.isfinite(asked):
        assert request[0, 1] >= asked
    if RULES[rule[0, 1]] != "small change":
        assert request[0, 1] >= 100e6
    if not np.isfinite(asked):
        assert request[0, 1] <= 2048 * MIB


def test_a_workload_far_over_the_budget_is_not_lowered_and_raised_it_is() -> None:
    requests, rules, present = np.array([1.0, 3.0, 1.0, 2.0]), np.array([ESTIMATE] * 4), np.full(4, 2.0)
    held, why = held_back(requests, rules, present, np.array([True, True, False, True]), OVER)
    assert held.tolist() == [2.0, 3.0, 1.0, 2.0]
    assert [RULES[k] for k in why] == ["over budget", "estimate", "estimate", "estimate"]


def test_settings_become_a_policy_with_the_floor_steps_and_least_raise_of_kubernetes_only_there() -> None:
    config = RecommendConfig(min_change=0.2, history_days=3.0, ran_hours=4.0, oom_bump=1.5, memory_min=5.0)
    there = config.policy(kubernetes=True, largest_memory=64.0)
    expected = Policy(
        least=(0.01, 5.0), step=(0.001, MIB), min_change=0.2, history_days=3.0, ran_hours=4.0, oom_bump=1.5,
        oom_bump_by=100 * MIB, largest_memory=64.0,
    )  # fmt: skip
    assert there == expected
    elsewhere = config.policy(kubernetes=False, largest_memory=64.0)
    assert elsewhere == replace(expected, least=(0.0, 5.0), step=(0.0, 0.0), oom_bump_by=0.0)


def test_each_resource_has_the_margin_and_the_budget_that_the_settings_name_for_it() -> None:
    config = RecommendConfig(budgets=Budgets(0.002, 0.03), cpu_margin="aggressive", memory_margin="baseline")
    assert config.margins == ("aggressive", "baseline")
    assert config.of_requests == (0.03, 0.002)


LEAST = {
    "hold_days": 1 / 24, "seen_days": 0.0, "history_days": 0.0, "ran_hours": 0.0, "oom_bump": 1.0, "most_over": 1.0,
    "most_over_in_all": 1.0, "min_change": 0.0, "cpu_min": 0.0, "memory_min": 0.0,
}  # fmt: skip


@pytest.mark.parametrize("name", LEAST)
def test_a_setting_may_be_the_least_that_is_allowed_and_no_less(name: str) -> None:
    assert getattr(RecommendConfig(**{name: LEAST[name]}), name) == LEAST[name]  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=name):
        RecommendConfig(**{name: LEAST[name] - 0.01})  # type: ignore[arg-type]
