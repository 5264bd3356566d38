"""Predictors of a machine's peak: examples by hand, and the simulator's own loop over random machines."""

from __future__ import annotations

import gc
import statistics
import weakref
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from reclaim.data.errors import ConfigError
from reclaim.replay.machine_peaks.predictors import (
    BetaQuantile,
    Bridged,
    Coach,
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
    # missing at 3, it starts again at 4
    assert peak([*(stays[:3] + stays[4:]), *other], TaskMaximum(warm_up=2)) == pytest.approx([1, 0.1, 0.1, 0, 1, 0.1])
    # a time at which the machine says nothing is no time at which the task is missing
    assert peak(stays[:3] + stays[4:], TaskMaximum(warm_up=2)) == pytest.approx([1, 0.1, 0.1, 0.1, 0.1])


def test_a_bridged_gap_counts_as_the_record_before_it_and_only_for_those_after_it() -> None:
    there, grid = series(1, [0.1, 0.4, 9.0, 9.0, 0.2, 0.1]), series(2, [0.0] * 6, limit=0.0)
    samples = [*there[:2], *there[4:], *grid]
    # missing at 2 and 3, of a limit of 1: 0.4 stands in for both, so that the task is warm at 4; at 2 and 3 it is away
    warm = {"warm_up": 2}
    assert peak(samples, TaskMaximum(**warm)) == pytest.approx([1.0, 0.4, 0, 0, 1.0, 0.2])
    assert peak(samples, Bridged(TaskMaximum(**warm))) == pytest.approx([1.0, 0.4, 0, 0, 0.4, 0.4])
    assert peak(samples, Bridged(TaskMean(**warm))) == pytest.approx([1.0, 0.25, 0, 0, 1.5 / 5, 1.6 / 6])
    assert peak(samples, Bridged(TaskMaximum(warm_up=5)))[4:] == pytest.approx([0.4, 0.4])  # at 4, its fifth snapshot
    assert peak(samples, Bridged(TaskMaximum(warm_up=6)))[4:] == pytest.approx([1.0, 0.4])
    # a gap of two is more than one
    assert peak(samples, Bridged(TaskMaximum(**warm), gap=1)) == peak(samples, TaskMaximum(**warm))


def test_a_bridged_task_is_in_the_ratios_of_its_machine_at_the_times_that_it_missed() -> None:
    # task 1 (limit 2) misses 1, where task 2 (limit 1) has 0.6; ratios of both at 2: 0.3 / 3, (0.2 + 0.6) / 3, 0.6 / 3
    samples = [(0, 1, 0.2, 2.0), (2, 1, 0.4, 2.0), *series(2, [0.1, 0.6, 0.2])]
    assert peak(samples, Bridged(MachinePercentile(history=3, warm_up=2)))[2] == pytest.approx(0.8)
    # unbridged, task 1 is cold at 2, and task 2 alone has had 0.6
    assert peak(samples, MachinePercentile(history=3, warm_up=2))[2] == pytest.approx(0.6 + 2.0)
    # at 1 only task 2 is there
    assert peak(samples, Bridged(MachinePercentile(history=3, warm_up=2)))[1] == pytest.approx(0.6)


def test_bridging_changes_nothing_of_what_has_no_history_and_gaps_within_gaps_are_the_inner_ones() -> None:
    samples = [(0, 1, 0.2, 1.0), (2, 1, 0.4, 1.0), (5, 1, 0.3, 1.0), *series(2, [0.1] * 6)]
    for predictor in (Limit(), FixedShare(0.5), Oracle(horizon_s=2)):
        np.testing.assert_array_equal(peak(samples, Bridged(predictor)), peak(samples, predictor))
    most = TaskMaximum(warm_up=2)
    assert peak(samples, Bridged(Bridged(most, gap=1), gap=2)) == peak(samples, Bridged(most, gap=1))


def test_samples_and_all_that_is_kept_of_them_are_freed_with_their_last_reference() -> None:
    samples = lay_out([(0, 1, 0.2, 1.0), (2, 1, 0.4, 1.0), *series(2, [0.1] * 3)])
    bridged = weakref.ref(samples.bridged(2))
    samples.peak(Bridged(NSigma()))
    assert bridged() is not None
    gc.disable()  # a cycle of references would wait for the collector, machine after machine
    try:
        del samples
        assert bridged() is None
    finally:
        gc.enable()


def test_the_beta_quantile_by_hand() -> None:
    # ratios 1/2 and 5/6: mean 2/3, variance 1/18, so beta(2, 1), whose distribution function is x^2
    one = series(1, [1.0, 5 / 3], limit=2.0)
    assert peak(one, BetaQuantile(0.81, smoothing=1.0, warm_up=2)) == pytest.approx([2.0, 0.9 * 2.0])
    # the variance times 5: a fifth of it in the samples, 1/2 +- sqrt(1/120), gives that of beta(1, 1), uniform
    apart = (1 / 120) ** 0.5
    flat = [*series(1, [0.5 - apart, 0.5 + apart]), (1, 2, 0.0, 3.0)]  # task 2 is cold
    assert peak(flat, BetaQuantile(0.7, warm_up=2)) == pytest.approx([1.0, 0.7 + 3.0])
    # no deviation: the mean; no usage: none; all of the limit: all
    for ratio in (0.25, 0.0, 1.0):
        assert peak(series(1, [ratio, ratio]), BetaQuantile(0.7, warm_up=2))[1] == ratio
    # 0 and 1 vary more than any beta distribution of their mean can: 99 % of that, 1/4, is beta(1/198, 1/198)
    expected = stats.beta.ppf(0.6, 1 / 198, 1 / 198)
    assert peak(series(1, [0.0, 1.0]), BetaQuantile(0.6, smoothing=1.0, warm_up=2))[1] == pytest.approx(expected)


def hourly(task: int, usage: dict[int, float], limit: float = 1.0) -> list[Sample]:
    return [(3600 * hour, task, u, limit) for hour, u in usage.items()]


def test_coach_by_hand() -> None:
    # two windows of 12 hours, a sample every 6: nights 0.1, 0.3 and 0.2, days 0.5 and 0.7; the limit is 2
    usage = {0: 0.2, 6: 0.6, 12: 1.0, 18: 1.4, 24: 0.4}
    samples = hourly(1, usage, limit=2.0)
    # on the first day no window was seen on an earlier one: all so far. On the second: 0.3 of the nights so far, and
    # 0.7 of the days; medians 0.2 and 0.6
    alone, both = (Coach(50.0, 100.0, windows=2, ahead=ahead, warm_up=2) for ahead in (0, 1))
    assert peak(samples, both) == pytest.approx([2.0, 0.3 * 2, 0.5 * 2, 0.7 * 2, 0.7 * 2])
    assert peak(samples, alone) == pytest.approx([2.0, 0.3 * 2, 0.5 * 2, 0.7 * 2, 0.6 * 2])
    assert peak(samples, Coach(0.0, 50.0, windows=2, ahead=0, warm_up=2))[4] == pytest.approx(0.5 * 2)
    # a limit of now, a percentile of ratios
    grown = [*samples[:4], (24 * 3600, 1, 0.8, 4.0)]
    assert peak(grown, alone)[4] == pytest.approx(0.6 * 4)


def test_coach_lets_tasks_of_different_times_share_and_adds_their_guarantees_up() -> None:
    # task 1 works by night and task 2 by day, two windows; each has a small median
    night, day = (
        {0: 0.9, 3: 0.1, 6: 0.1, 12: 0.1, 18: 0.1, 24: 0.1},
        {0: 0.2, 3: 0.2, 6: 0.2, 12: 0.8, 18: 0.2, 24: 0.2},
    )
    samples = [*hourly(1, night), *hourly(2, day)]
    # medians: task 1 0.1 and 0.1; task 2 0.2, and by day 0.5. By night 0.9 + 0.5, by day 0.1 + 0.8
    assert peak(samples, Coach(50.0, 100.0, windows=2, warm_up=2))[5] == pytest.approx(1.4)
    # without guarantees, 0.9 + 0.2 by night and 0.1 + 0.8 by day
    assert peak(samples, Coach(0.0, 100.0, windows=2, warm_up=2))[5] == pytest.approx(1.1)


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
    for predictor in (
        NSigma(warm_up=2),
        TaskPercentile(warm_up=2),
        MachinePercentile(warm_up=2),
        BetaQuantile(warm_up=2),
        Coach(warm_up=2),
        Oracle(1),
    ):
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
        (lambda: Bridged(Limit(), gap=0), "gap must be at least 1 snapshot, got 0"),
        (lambda: BetaQuantile(1.0), "above 0 and below 1, got 1.0"),
        (lambda: MachinePercentile(percentile=101.0), "between 0 and 100, got 101.0"),
        (lambda: BetaQuantile(float("nan")), "above 0 and below 1, got nan"),
        (lambda: BetaQuantile(smoothing=0.5), "at least 1 window and finite, got 0.5"),
        (lambda: BetaQuantile(smoothing=float("inf")), "finite, got inf"),
        (lambda: BetaQuantile(history=1), "history >= 2"),
        (lambda: Coach(guaranteed=-1.0), "between 0 and 100, got -1.0"),
        (lambda: Coach(oversubscribed=101.0), "between 0 and 100, got 101.0"),
        (lambda: Coach(windows=2, ahead=2), "windows > ahead, got ahead=2, self.windows=2"),
        (lambda: Coach(windows=0, ahead=-1), "ahead >= 0"),
        (lambda: Coach(warm_up=0), "warm_up >= 1"),
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
        self, predict: Callable[[list[list[tuple[float, float]]]], float], warm_up: int, history: int, gap: int = 0
    ) -> list[float]:
        """``predict`` is told of each warm task its (usage up to the limit, limit), newest first.

        A task that missed at most ``gap`` snapshots in a row has what it had before them, once more for each.
        """
        peaks, known, away = [], dict[int, list[tuple[float, float]]](), dict[int, int]()
        for snapshot in self.snapshots.values():
            away = {task: 0 if task in snapshot else away[task] + 1 for task in {*away, *snapshot}}
            known = {task: past for task, past in known.items() if away[task] <= gap}
            for task, (usage, limit) in snapshot.items():
                known[task] = [(min(usage, limit), limit), *known.get(task, [])]
            there = [known[task] for task in snapshot]
            known |= {task: [past[0], *past] for task, past in known.items() if task not in snapshot}
            warm = [past[:history] for past in there if len(past) >= max(warm_up, 2)]
            cold = [past[0][1] for past in there if len(past) < max(warm_up, 2)]
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


def beta_quantile(r: list[float], level: float) -> float:
    """Return the quantile of the plugin's distribution of ratios, with its deviation taken as smoothed five times."""
    mean = statistics.fmean(r)
    deviation = min(statistics.stdev(r) * 5**0.5, (max(mean * (1 - mean), 0.0) * 0.99) ** 0.5)
    if deviation < 1e-9:
        return mean
    size = mean * (1 - mean) / deviation**2 - 1
    return float(stats.beta.ppf(level, mean * size, (1 - mean) * size))


@settings(max_examples=150, deadline=None)
@given(
    machines(),
    st.integers(1, 4),
    st.integers(2, 5),
    st.sampled_from([0.0, 37.5, 50.0, 95.0, 100.0]),
    st.integers(0, 3),
)
def test_random_machines_get_what_the_simulator_says(
    samples: list[Sample], warm_up: int, history: int, level: float, gap: int
) -> None:
    laid_out, simulator = lay_out(samples), Simulator(samples)

    def check(predictor: Predictor, expected: list[float] | NDArray[np.float64], atol: float = 1e-12) -> None:
        predictor = Bridged(predictor, gap) if gap and not isinstance(predictor, Oracle) else predictor
        np.testing.assert_allclose(laid_out.peak(predictor), expected, rtol=0, atol=atol, err_msg=str(predictor))

    def n_sigma(warm: list[list[tuple[float, float]]]) -> float:
        r = ratios(warm)
        return min(1.0, statistics.fmean(r) + 2 * statistics.stdev(r)) * limit_of(warm)

    def machine(warm: list[list[tuple[float, float]]]) -> float:
        return float(np.percentile(ratios(warm), level)) * limit_of(warm)

    def task(warm: list[list[tuple[float, float]]]) -> float:
        return sum(percentile_of(past, level) for past in warm)

    sigma = simulator.run(n_sigma, warm_up, history, gap)
    check(NSigma(2.0, history, warm_up), sigma)
    check(MachinePercentile(level, history, warm_up), simulator.run(machine, warm_up, history, gap))
    per_task = simulator.run(task, warm_up, history, gap)
    check(TaskPercentile(level, history, warm_up), per_task)
    check(
        Largest((NSigma(2.0, history, warm_up), TaskPercentile(level, history, warm_up))),
        np.maximum(sigma, per_task),
    )
    ever = 1_000
    check(
        TaskMaximum(warm_up),
        simulator.run(lambda warm: sum(max(u for u, _ in past) for past in warm), warm_up, ever, gap),
    )
    check(
        TaskMean(warm_up),
        simulator.run(lambda warm: sum(statistics.fmean(u for u, _ in past) for past in warm), warm_up, ever, gap),
    )

    def beta(warm: list[list[tuple[float, float]]]) -> float:
        return min(1.0, beta_quantile(ratios(warm), 0.9)) * limit_of(warm)

    check(BetaQuantile(0.9, history=history, warm_up=warm_up), simulator.run(beta, warm_up, history, gap), 1e-9)
    for horizon_s in (1, history, 11):
        check(Oracle(horizon_s), simulator.oracle(horizon_s))


def coach_of(samples: list[Sample], coach: Coach) -> list[float]:
    """Return Coach's peaks one time and task at a time, from all that the task has used since it came."""
    snapshots = Simulator(samples).snapshots
    peaks, runs = [], dict[int, list[tuple[int, float]]]()
    for now, snapshot in snapshots.items():
        runs = {task: runs.get(task, []) for task in snapshot}
        sums = [0.0] * (coach.ahead + 1)
        for task, (usage, limit) in snapshot.items():
            runs[task] = [*runs[task], (now, min(usage, limit) / limit if limit > 0 else 0.0)]
            for k in range(len(sums)):
                if len(runs[task]) >= max(coach.warm_up, 2):
                    sums[k] += limit * coach_need(runs[task], now, k, coach)
                else:
                    sums[k] += limit
        peaks.append(max(sums))
    return peaks


def coach_need(run: list[tuple[int, float]], now: int, k: int, coach: Coach) -> float:
    def window(time_s: int) -> int:
        return time_s % 86_400 * coach.windows // 86_400

    def seen(w: int) -> list[float]:
        known = any(window(t) == w and t // 86_400 < now // 86_400 for t, _ in run)
        return [ratio for t, ratio in run if not known or window(t) == w]

    guaranteed = max(float(np.percentile(seen(w), coach.guaranteed)) for w in range(coach.windows))
    there = seen((window(now) + k) % coach.windows)
    return max(guaranteed, float(np.percentile(there, coach.oversubscribed)))


def stretched(samples: list[Sample], step_s: int = 5400) -> list[Sample]:
    """Return samples over days instead of seconds."""
    return [(time_s * step_s, *rest) for time_s, *rest in samples]  # type: ignore[misc]


@settings(max_examples=150, deadline=None)
@given(
    machines(),
    st.sampled_from([(6, 1), (6, 5), (4, 0), (3, 2), (1, 0)]),
    st.sampled_from([(95.0, 100.0), (0.0, 95.0), (50.0, 50.0)]),
    st.integers(1, 3),
)
def test_random_machines_get_what_coach_says(
    samples: list[Sample], windows: tuple[int, int], levels: tuple[float, float], warm_up: int
) -> None:
    coach, days = Coach(*levels, *windows, warm_up), stretched(samples)
    np.testing.assert_allclose(lay_out(days).peak(coach), coach_of(days, coach), rtol=0, atol=1e-12)


CAUSAL = [
    NSigma(3.0, 4, 2),
    TaskPercentile(60.0, 4, 2),
    MachinePercentile(90.0, 4, 2),
    TaskMaximum(2),
    TaskMean(2),
    BetaQuantile(0.9, history=4, warm_up=2),
    Coach(warm_up=2),
    Coach(0.0, 95.0, ahead=5, warm_up=2),
]


@settings(max_examples=80, deadline=None)
@given(machines(), st.integers(1, 56), st.sampled_from([0, 1, 2, 3]))
def test_no_prediction_changes_when_the_future_is_cut_off(samples: list[Sample], last: int, gap: int) -> None:
    days = stretched(samples)
    until = [sample for sample in days if sample[0] <= last * 5400] or days
    whole, known = lay_out(days), lay_out(until)
    for one in CAUSAL:
        predictor = Bridged(one, gap) if gap else one
        expected = whole.peak(predictor)[: len(known.times_us)]
        np.testing.assert_array_equal(known.peak(predictor), expected, err_msg=str(predictor))
