"""Predictors of a machine's peak: examples by hand, and the simulator's own loop over random machines."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from reclaim.data.errors import ConfigError
from reclaim.replay.machine_peaks.predictors import (
    FixedShare,
    Largest,
    Limit,
    MachinePercentile,
    MachineSamples,
    NSigma,
    Oracle,
    Predictor,
    TaskMaximum,
    TaskMean,
    TaskPercentile,
)

Sample = tuple[int, int, float, float]
"""Time in seconds, task, usage, limit."""


def lay_out(samples: list[Sample]) -> MachineSamples:
    time_s, task, usage, limit = (np.array(column) for column in zip(*samples, strict=True))
    order = np.lexsort((time_s, task))
    return MachineSamples.lay_out(
        time_s[order].astype(np.int64) * 1_000_000,
        task[order].astype(np.int64),
        usage[order].astype(np.float64),
        limit[order].astype(np.float64),
    )


def peak(samples: list[Sample], predictor: Predictor) -> list[float]:
    values: list[float] = lay_out(samples).peak(predictor).tolist()
    return values


def series(task: int, usage: list[float], limit: float = 1.0, start: int = 0) -> list[Sample]:
    return [(start + i, task, u, limit) for i, u in enumerate(usage)]


def test_the_limit_and_a_share_of_it_look_at_no_usage() -> None:
    samples = [*series(1, [0.5, 3.0], limit=2.0), *series(2, [0.1], limit=1.0, start=1)]
    assert peak(samples, Limit()) == [2.0, 3.0]
    assert peak(samples, FixedShare(0.9)) == pytest.approx([1.8, 2.7])
    assert lay_out(samples).total(lay_out(samples).capped).tolist() == [0.5, 2.1]


def test_n_sigma_by_hand() -> None:
    # task 1 (limit 2) uses 0.2, 0.4, 0.6; task 2 (limit 1) joins at 1 with 0.5, 0.3
    samples = [*series(1, [0.2, 0.4, 0.6], limit=2.0), *series(2, [0.5, 0.3], start=1)]
    # at 0 all cold: 2. At 1 task 1 is warm: ratios 0.2, 0.1; mean 0.15, deviation 0.1 / sqrt 2; and task 2's limit.
    # At 2 both are: (0.6 + 0.3) / 3, (0.4 + 0.5) / 3 and, of task 1 alone, 0.2 / 2: mean 0.7 / 3, deviation
    # sqrt(0.04 / 3)
    assert peak(samples, NSigma(n=1.0, history=3, warm_up=2)) == pytest.approx(
        [2.0, (0.15 + 0.1 / 2**0.5) * 2 + 1.0, (0.7 / 3 + (0.04 / 3) ** 0.5) * 3]
    )
    # a history of two forgets the first sample: 0.3 and 0.3
    assert peak(samples, NSigma(n=1.0, history=2, warm_up=2))[2] == pytest.approx(0.9)
    # at most the limit, however many deviations
    assert peak(samples, NSigma(n=50.0, history=3, warm_up=2)) == [2.0, 3.0, 3.0]


def test_the_machine_percentile_by_hand() -> None:
    samples = [*series(1, [0.2, 0.4, 0.6], limit=2.0), *series(2, [0.5, 0.3], start=1)]
    # ratios at 2, as above: 0.1, 0.3, 0.3; half way between the lower two is the 25th percentile
    assert peak(samples, MachinePercentile(100.0, history=3, warm_up=2)) == pytest.approx([2.0, 0.2 * 2 + 1.0, 0.9])
    assert peak(samples, MachinePercentile(25.0, history=3, warm_up=2))[2] == pytest.approx(0.6)
    assert peak(samples, MachinePercentile(0.0, history=3, warm_up=2))[2] == pytest.approx(0.3)


def test_the_task_percentile_by_hand() -> None:
    # ratios 0.1, 0.2, 0.3 of the limits then, times the limit now: 4 from the last sample on
    samples = [(0, 1, 0.2, 2.0), (1, 1, 0.4, 2.0), (2, 1, 1.2, 4.0)]
    assert peak(samples, TaskPercentile(50.0, history=3, warm_up=2)) == pytest.approx([2.0, 0.15 * 2, 0.2 * 4])
    assert peak(samples, TaskPercentile(75.0, history=2, warm_up=2))[2] == pytest.approx(0.275 * 4)


def test_the_maximum_and_the_mean_so_far_by_hand() -> None:
    samples = [*series(1, [0.9, 0.1, 0.2], limit=0.5), *series(2, [0.1, 0.2, 0.6])]
    # 0.9 counts as its limit, 0.5; both are cold at 0
    assert peak(samples, TaskMaximum(warm_up=2)) == pytest.approx([1.5, 0.5 + 0.2, 0.5 + 0.6])
    assert peak(samples, TaskMean(warm_up=2)) == pytest.approx([1.5, 0.3 + 0.15, 0.8 / 3 + 0.3])


def test_the_largest_of_several_is_the_largest_at_each_time() -> None:
    samples = series(1, [0.1, 0.9, 0.1, 0.1])
    both = Largest((TaskMaximum(warm_up=2), FixedShare(0.95)))
    assert peak(samples, both) == pytest.approx([1.0, 0.95, 0.95, 0.95])


def test_a_task_is_cold_until_it_has_been_there_long_enough_in_a_row() -> None:
    stays = series(1, [0.1] * 6)
    assert peak(stays, TaskMaximum(warm_up=3)) == pytest.approx([1, 1, 0.1, 0.1, 0.1, 0.1])
    assert peak(stays, TaskMaximum(warm_up=1)) == peak(stays, TaskMaximum(warm_up=2))  # not in its first
    other = series(2, [0.0] * 6, limit=0.0)
    # missing at 3, it begins anew at 4
    assert peak([*(stays[:3] + stays[4:]), *other], TaskMaximum(warm_up=2)) == pytest.approx([1, 0.1, 0.1, 0, 1, 0.1])
    # a time at which the machine says nothing is no time at which the task is missing
    assert peak(stays[:3] + stays[4:], TaskMaximum(warm_up=2)) == pytest.approx([1, 0.1, 0.1, 0.1, 0.1])


def test_the_oracle_counts_the_tasks_of_now_alone_and_says_nothing_of_the_last_horizon() -> None:
    samples = [*series(1, [0.1, 0.2, 0.7, 0.3]), *series(2, [0.9, 0.4, 0.1], start=1)]
    # at 0: of task 1, within 2 s, 0.2 and 0.7. At 1: 0.7 + 0.4 and 0.3 + 0.1; then the samples end within the horizon
    assert peak(samples, Oracle(horizon_s=2)) == pytest.approx([0.7, 1.1, np.nan, np.nan], nan_ok=True)
    # a usage to come counts up to the limit of now
    assert peak([(0, 1, 0.1, 0.3), (1, 1, 0.9, 1.0)], Oracle(horizon_s=1)) == pytest.approx([0.3, np.nan], nan_ok=True)
    # who leaves uses nothing, and who comes back counts; nothing to look at is the limit
    assert peak([(0, 1, 0.5, 1.0), (1, 2, 0.4, 1.0), (2, 1, 0.3, 1.0)], Oracle(1))[0] == 0.0
    assert peak([(0, 1, 0.5, 1.0), (1, 2, 0.4, 1.0), (2, 1, 0.3, 1.0)], Oracle(2))[0] == 0.3
    assert peak([(0, 1, 0.5, 1.0), (9, 1, 0.4, 1.0)], Oracle(5))[0] == 1.0


def test_a_task_without_a_limit_needs_nothing() -> None:
    samples = series(1, [0.3, 0.5, 0.2], limit=0.0)
    for predictor in (NSigma(warm_up=2), TaskPercentile(warm_up=2), MachinePercentile(warm_up=2), Oracle(1)):
        assert peak(samples, predictor)[:2] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: NSigma(history=1), "history >= 2"),
        (lambda: NSigma(n=float("nan")), "n must be at least 0, got nan"),
        (lambda: TaskPercentile(percentile=101), "between 0 and 100, got 101"),
        (lambda: TaskMean(warm_up=0), "warm_up >= 1"),
        (lambda: FixedShare(0.0), "above 0 and at most 1, got 0.0"),
        (lambda: Oracle(0), "at least 1 second, got 0"),
        (lambda: Largest(()), "at least 1, got 0"),
    ],
)
def test_a_parameter_out_of_range_is_refused(make: Callable[[], Predictor], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


class Simulator:
    """The loop of the EuroSys'21 simulator, one task and one sample at a time, as its description has it."""

    def __init__(self, samples: list[Sample]) -> None:
        self.snapshots: dict[int, dict[int, tuple[float, float]]] = {}
        for time_s, task, usage, limit in sorted(samples):
            self.snapshots.setdefault(time_s, {})[task] = (usage, limit)

    def run(
        self, predict: Callable[[list[list[tuple[float, float]]]], float], warm_up: int, history: int
    ) -> list[float]:
        """``predict`` is told of each warm task its (usage up to the limit, limit), newest first."""
        peaks, known = [], dict[int, list[tuple[float, float]]]()
        for snapshot in self.snapshots.values():
            known = {task: known.get(task, []) for task in snapshot}
            for task, (usage, limit) in snapshot.items():
                known[task] = [(min(usage, limit), limit), *known[task]]
            warm = [past[:history] for past in known.values() if len(past) >= max(warm_up, 2)]
            cold = [past[0][1] for past in known.values() if len(past) < max(warm_up, 2)]
            peaks.append((predict(warm) if warm else 0.0) + sum(cold))
        return peaks

    def oracle(self, horizon_s: int) -> list[float]:
        """Look ahead at each time."""
        peaks, last = [], max(self.snapshots)
        for now, snapshot in self.snapshots.items():
            totals = [
                sum(min(later[task][0], limit) for task, (_, limit) in snapshot.items() if task in later)
                for time_s, later in self.snapshots.items()
                if now < time_s <= now + horizon_s
            ]
            limit = sum(limit for _, limit in snapshot.values())
            peaks.append(float("nan") if now + horizon_s > last else max(totals) if totals else limit)
        return peaks


def ratios(warm: list[list[tuple[float, float]]]) -> list[float]:
    out = []
    for k in range(max(map(len, warm))):
        there = [past[k] for past in warm if k < len(past)]
        usage, limit = (sum(column) for column in zip(*there, strict=True))
        out.append(usage / limit if limit > 0 else 0.0)
    return out


def limit_of(warm: list[list[tuple[float, float]]]) -> float:
    return sum(past[0][1] for past in warm)


def percentile_of(past: list[tuple[float, float]], level: float) -> float:
    return float(np.percentile([u / limit if limit > 0 else 0.0 for u, limit in past], level)) * past[0][1]


@st.composite
def machines(draw: st.DrawFn) -> list[Sample]:
    """Return the samples of a small machine: tasks come and go, limits change, times are missing, usage is tied."""
    times = draw(st.lists(st.integers(1, 4), min_size=1, max_size=14).map(lambda steps: np.cumsum(steps).tolist()))
    levels = st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.7, 1.0, 1.5])
    samples = []
    for task in range(draw(st.integers(1, 4))):
        limit = draw(levels)
        for time_s in times:
            if draw(st.integers(0, 9)) == 0:
                limit = draw(levels)
            if draw(st.integers(0, 4)):
                samples.append((time_s, task, draw(levels), limit))
    return samples or [(times[0], 0, 0.5, 1.0)]


@settings(max_examples=150, deadline=None)
@given(machines(), st.integers(1, 4), st.integers(2, 5), st.sampled_from([0.0, 37.5, 50.0, 95.0, 100.0]))
def test_random_machines_get_what_the_simulator_says(
    samples: list[Sample], warm_up: int, history: int, level: float
) -> None:
    laid_out, simulator = lay_out(samples), Simulator(samples)

    def check(predictor: Predictor, expected: list[float] | NDArray[np.float64]) -> None:
        np.testing.assert_allclose(laid_out.peak(predictor), expected, rtol=0, atol=1e-12, err_msg=str(predictor))

    def n_sigma(warm: list[list[tuple[float, float]]]) -> float:
        r = ratios(warm)
        return min(1.0, statistics.fmean(r) + 2 * statistics.stdev(r)) * limit_of(warm)

    def machine(warm: list[list[tuple[float, float]]]) -> float:
        return float(np.percentile(ratios(warm), level)) * limit_of(warm)

    def task(warm: list[list[tuple[float, float]]]) -> float:
        return sum(percentile_of(past, level) for past in warm)

    sigma = simulator.run(n_sigma, warm_up, history)
    check(NSigma(2.0, history, warm_up), sigma)
    check(MachinePercentile(level, history, warm_up), simulator.run(machine, warm_up, history))
    per_task = simulator.run(task, warm_up, history)
    check(TaskPercentile(level, history, warm_up), per_task)
    check(
        Largest((NSigma(2.0, history, warm_up), TaskPercentile(level, history, warm_up))),
        np.maximum(sigma, per_task),
    )
    ever = 1_000
    check(
        TaskMaximum(warm_up),
        simulator.run(lambda warm: sum(max(u for u, _ in past) for past in warm), warm_up, ever),
    )
    check(
        TaskMean(warm_up),
        simulator.run(lambda warm: sum(statistics.fmean(u for u, _ in past) for past in warm), warm_up, ever),
    )
    for horizon_s in (1, history, 11):
        check(Oracle(horizon_s), simulator.oracle(horizon_s))
