"""Samples to windows: cases worked by hand, and a plain computation of the same rules for any samples."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reclaim.data.samples import (
    FEWEST_FOR_PERCENTILES,
    FEWEST_FOR_TAIL,
    LONGEST_STEP_US,
    NO_SAMPLES,
    WINDOW_US,
    SampledWindows,
    Samples,
    windows_of,
)
from reclaim.data.schema import PERCENTILES, TAIL_PERCENTILES

Series = Sequence[tuple[float, float]]
"""Times in seconds and values."""
S = 1_000_000


def samples(*series: Series, tasks: Sequence[int] | None = None) -> Samples:
    flat = [sample for one in series for sample in one]
    return Samples(
        task=np.array(tasks if tasks is not None else [0] * len(series), np.int64),
        offsets=np.cumsum([0, *(len(one) for one in series)]).astype(np.int64),
        time_us=np.array([round(time * S) for time, _ in flat], np.int64),
        value=np.array([value for _, value in flat], np.float64),
    )


def windows(cpu: Samples, memory: Samples = NO_SAMPLES, start_s: int = 0, end_s: int = 1200) -> SampledWindows:
    n = max([*cpu.task, *memory.task, 0]) + 1
    return windows_of(cpu, memory, n_tasks=n, start_us=start_s * S, end_us=end_s * S)


def test_a_rate_weighs_the_time_it_spans_in_the_window_of_its_second_sample() -> None:
    # rates: (20, 60] 1.0 for 40 s · (60, 260] 0.25 for 200 s · (260, 320] 2.0 for 60 s, of the second window
    found = windows(samples([(20, 0), (60, 40), (260, 90), (320, 210)]))
    assert found.start_us.tolist() == [20 * S, 300 * S]  # the task began at 20 s; the step before 300 s reaches over it
    assert found.end_us.tolist() == [300 * S, 320 * S]  # 300 - 260 is within two steps, 600 - 320 is not
    assert found.rates.tolist() == [2, 1]
    assert found.cpu_mean == pytest.approx([(40 * 1 + 200 * 0.25) / 240, 2.0], rel=1e-12)
    assert found.cpu_max == pytest.approx([1.0, 2.0], rel=1e-12)


def test_a_window_ends_with_its_slot_unless_two_samples_are_missing() -> None:
    assert windows(samples([(0, 0), (100, 1)])).end_us.tolist() == [300 * S]  # 200 s are two steps
    assert windows(samples([(0, 0), (99, 1)])).end_us.tolist() == [99 * S]  # 201 s are more than two of 99 s


def test_percentiles_are_those_of_the_time() -> None:
    # 4 rates over 10, 20, 30 and 40 s: 4, 3, 2 and 1 cores, so 40 % of the time has 1 or less, 70 % 2 or less, 90 % 3
    found = windows(samples([(0, 0), (10, 40), (30, 100), (60, 160), (100, 200)]))
    assert found.percentiles[0] == pytest.approx([1, 1, 1, 1, 1, 2, 2, 2, 3, 3, 4], rel=1e-12)
    assert np.isnan(found.tail).all()  # 4 rates are fewer than the tail needs
    assert FEWEST_FOR_PERCENTILES == 4
    few = windows(samples([(0, 0), (10, 40), (30, 100), (60, 160)]))
    assert np.isnan(few.percentiles).all()
    dense = windows(samples([(k * 30, k * k) for k in range(FEWEST_FOR_TAIL + 1)]))
    assert dense.tail[0] == pytest.approx([15 / 30] * 9, rel=1e-12)  # 7/8 of the time is below the largest of 8 rates


def test_a_counter_that_falls_was_set_to_zero() -> None:
    found = windows(samples([(0, 100), (30, 130), (60, 15), (90, 45)]))  # 1, then 15 / 30, then 1
    assert found.cpu_mean == pytest.approx([(30 + 15 + 30) / 90], rel=1e-12)
    assert found.cpu_max == pytest.approx([1.0], rel=1e-12)


def test_there_is_no_rate_across_two_series_of_a_task() -> None:
    # the container is restarted between 60 and 100 s: 2 cores for 60 s, 1 core for 30 s, nothing in between
    found = windows(samples([(0, 1000), (30, 1060), (60, 1120)], [(100, 3), (130, 33)]))
    assert found.rates.tolist() == [3]
    assert found.cpu_mean == pytest.approx([(120 + 30) / 90], rel=1e-12)
    assert found.cpu_max == pytest.approx([2.0], rel=1e-12)


def test_series_that_run_at_once_are_added() -> None:
    # one series per CPU, equal times: 1 + 0.5, then 0 + 0.5
    found = windows(samples([(0, 0), (30, 30), (60, 30)], [(0, 0), (30, 15), (60, 30)]))
    assert found.cpu_max == pytest.approx([1.5], rel=1e-12)
    assert found.cpu_mean == pytest.approx([1.0], rel=1e-12)
    # the old container of a restart is still listed, at rest: (0, 60] 1 · (60, 90] 0 · the new one (70, 100] 0.5
    found = windows(samples([(0, 0), (60, 60), (90, 60)], [(70, 0), (100, 15)]))
    assert found.cpu_mean == pytest.approx([(60 + 10 * 0 + 20 * 0.5 + 10 * 0.5) / 100], rel=1e-12)


def test_a_gap_longer_than_five_minutes_is_unknown() -> None:
    gap = LONGEST_STEP_US // S
    known = windows(samples([(0, 0), (gap - 1, 30)]))
    assert len(known) == 1
    unknown = windows(samples([(0, 0), (gap + 1, 30)]))
    assert len(unknown) == 0
    after = windows(samples([(0, 0), (30, 30), (420, 40), (450, 70)]))
    assert after.start_us.tolist() == [0, 420 * S]
    assert after.end_us.tolist() == [30 * S, 450 * S]
    assert after.cpu_mean == pytest.approx([1.0, 1.0], rel=1e-12)


def test_memory_is_the_mean_and_the_largest_of_the_samples_in_the_slot() -> None:
    found = windows(samples([(0, 0), (290, 29), (310, 30)]), samples([(0, 1), (290, 3), (300, 100), (310, 20)]))
    assert found.memory_mean.tolist() == [2, 60]  # a sample at 300 s is of the second slot
    assert found.memory_max.tolist() == [3, 100]
    assert np.isnan(found.page_cache).all()


def test_memory_alone_makes_windows_without_cpu() -> None:
    found = windows(NO_SAMPLES, samples([(10, 5), (40, 7)]))
    assert found.start_us.tolist() == [10 * S]
    assert np.isnan(found.cpu_mean).all()
    assert found.memory_max.tolist() == [7]
    assert len(windows(NO_SAMPLES, samples([(10, 5)]))) == 0  # one sample spans no time


def _plain(series: list[Series], slot_s: int) -> tuple[Fraction, Fraction, list[tuple[Fraction, Fraction]]] | None:
    """Return the CPU seconds, the covered time and the rates of a slot of one task, in exact arithmetic."""
    steps = []
    for one in series:
        for (t0, v0), (t1, v1) in pairwise(one):
            if 0 < t1 - t0 <= LONGEST_STEP_US // S and slot_s <= t1 < slot_s + 300:
                rise = Fraction(v1) - Fraction(v0) if v1 >= v0 else Fraction(v1)
                steps.append((t0, t1, rise / Fraction(t1 - t0)))
    edges = sorted({edge for t0, t1, _ in steps for edge in (t0, t1)})
    parts = []
    for low, high in pairwise(edges):
        over = [rate for t0, t1, rate in steps if t0 <= low and high <= t1]
        if over:
            parts.append((sum(over, Fraction(0)), Fraction(high - low)))
    if not parts:
        return None
    return sum((r * w for r, w in parts), Fraction(0)), sum((w for _, w in parts), Fraction(0)), sorted(parts)


def _last_end(series: list[Series], slot_s: int) -> float | None:
    """Return where a slot's window ends if that is its beginning: one rate ends there, and no other ever came."""
    steps = [
        (t0, t1)
        for one in series
        for (t0, _), (t1, _) in pairwise(one)
        if 0 < t1 - t0 <= 300 and slot_s <= t1 < slot_s + 300
    ]
    longest, last = max(t1 - t0 for t0, t1 in steps), max(t1 for _, t1 in steps)
    return last if 2 * longest < 300 else None


@st.composite
def _histories(draw: st.DrawFn) -> list[list[Series]]:
    """Draw tasks of one to three series each, with gaps, resets and overlaps."""
    tasks: list[list[Series]] = []
    for _ in range(draw(st.integers(1, 3))):
        series: list[Series] = []
        for _ in range(draw(st.integers(1, 3))):
            times = np.cumsum([draw(st.integers(0, 900)), *draw(st.lists(st.sampled_from([1, 15, 30, 31, 60, 299, 301]),
                                                                       max_size=25))])  # fmt: skip
            rises = draw(st.lists(st.integers(-50, 400), min_size=len(times), max_size=len(times)))
            values = np.maximum(np.cumsum([1000, *rises])[1:], 0) / 8
            series.append(list(zip(times.tolist(), values.tolist(), strict=True)))
        tasks.append(series)
    return tasks


@settings(max_examples=40)
@given(_histories())
def test_windows_are_those_of_a_plain_computation(tasks: list[list[Series]]) -> None:
    numbers = [k for k, series in enumerate(tasks) for _ in series]
    end_s = 10_200
    cpu = samples(*(one for series in tasks for one in series), tasks=numbers)
    found = windows_of(cpu, NO_SAMPLES, n_tasks=len(tasks), start_us=0, end_us=end_s * S)
    at = 0
    for k, series in enumerate(tasks):
        for slot_s in range(0, end_s, 300):
            expected = _plain(series, slot_s)
            if expected is None or _last_end(series, slot_s) == slot_s:
                continue
            seconds, covered, parts = expected
            assert (found.task[at], found.start_us[at] // WINDOW_US) == (k, slot_s // 300)
            assert found.cpu_mean[at] == pytest.approx(float(seconds / covered), rel=1e-9, abs=1e-9)
            assert found.cpu_max[at] == pytest.approx(float(parts[-1][0]), rel=1e-9, abs=1e-9)
            assert found.rates[at] == len(parts)
            assert slot_s * S <= found.start_us[at] < found.end_us[at] <= (slot_s + 300) * S
            for levels, values, fewest in (
                (PERCENTILES, found.percentiles[at], FEWEST_FOR_PERCENTILES),
                (TAIL_PERCENTILES, found.tail[at], FEWEST_FOR_TAIL),
            ):
                if len(parts) < fewest:
                    assert np.isnan(values).all()
                    continue
                for level, value in zip(levels, values, strict=True):
                    shares = np.cumsum([0, *(weight for _, weight in parts)])
                    rank = next(i for i in range(len(parts)) if shares[i + 1] * 100 >= level * covered)
                    assert value == pytest.approx(float(parts[rank][0]), rel=1e-9, abs=1e-9)
            at += 1
    assert at == len(found)


@given(_histories(), st.integers(1, 33))
def test_a_history_cut_into_ranges_gives_the_same_windows(tasks: list[list[Series]], cut: int) -> None:
    """The second range has the samples of the five minutes before it, and none of those before."""
    numbers = [k for k, series in enumerate(tasks) for _ in series]
    flat = [one for series in tasks for one in series]
    end_s, cut_s = 10_200, cut * 300

    def between(low_s: float, high_s: float) -> Samples:
        return samples(*([(t, v) for t, v in one if low_s <= t < high_s] for one in flat), tasks=numbers)

    def of(low_s: int, high_s: int, known: Samples) -> SampledWindows:
        return windows_of(known, known, n_tasks=len(tasks), start_us=low_s * S, end_us=high_s * S)

    whole = of(0, end_s, between(0, end_s))
    parts = [of(0, cut_s, between(0, cut_s)), of(cut_s, end_s, between(cut_s - 300, end_s))]
    first = [np.concatenate([getattr(part, name) for part in parts]) for name in SampledWindows.__dataclass_fields__]
    order = np.lexsort((first[1], first[0]))
    for name, column in zip(SampledWindows.__dataclass_fields__, first, strict=True):
        assert np.array_equal(column[order], getattr(whole, name), equal_nan=column.dtype == np.float64), name


@given(_histories(), st.integers(1, 33))
def test_a_window_holds_nothing_of_a_later_time(tasks: list[list[Series]], cut: int) -> None:
    numbers = [k for k, series in enumerate(tasks) for _ in series]
    flat = [one for series in tasks for one in series]
    known = samples(*([(t, v) for t, v in one if t < cut * 300] for one in flat), tasks=numbers)
    whole = windows(samples(*flat, tasks=numbers), end_s=10_200)
    past = windows(known, end_s=10_200)
    early = whole.end_us <= cut * WINDOW_US
    for name in SampledWindows.__dataclass_fields__:
        column = getattr(whole, name)[early]
        assert np.array_equal(column, getattr(past, name), equal_nan=column.dtype == np.float64), name
