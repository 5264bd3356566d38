"""Nothing looks ahead: whatever happens after t, no feature at or before t moves; and no target looks back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from itertools import pairwise
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from reclaim.data import schema as s
from reclaim.data.oom import oom_events
from reclaim.data.windows import MEMORY_MAX, Cell, Windows, concatenate, sort_windows
from reclaim.features.feature_set import FeatureSet
from reclaim.features.registry import FEATURE_NAMES
from reclaim.features.splits import inside_period, periods
from reclaim.features.targets import HORIZONS_S, TARGETS, measured_by, targets

Maker = Callable[..., Windows]
Fold = Callable[..., FeatureSet]
S: Final = 1_000_000
CELL: Final = Cell((4.0, 8.0), 12_345_000_000)
OF_THE_ROW_ALONE: Final = {
    "cpu_last", "memory_last", "peak_cpu_last", "cpu_limit", "memory_limit", "cpu_mean", "cpu_p50", "cpu_low",
    "cpu_spread", "cpu_tail", "cpu_top", "cpu_tail_weight", "cpu_over_limit", "shape_known", "memory_mean",
    "page_cache", "page_cache_share", "cpi", "mai", "length", "hour_sin", "hour_cos", "day", "in_alloc",
    "scheduling_class", "memory_over_mean", *(f"tier_{tier}" for tier in s.TIERS),
}  # fmt: skip
"""Features that say nothing of any window but the last."""


def known_us(windows: Windows) -> NDArray[np.int64]:
    """Return when each row is known: at its own end, or that of an earlier row of its task that ended later."""
    out = windows.end_us.copy()
    for first, stop in pairwise(windows.task_starts()):
        out[first:stop] = np.maximum.accumulate(out[first:stop])
    return out


def numbered(windows: Windows) -> Windows:
    """Return the rows with a number, by which they are found again; no feature looks at the machine."""
    windows.machine_id[:] = np.arange(len(windows))
    return windows


def disturbed(windows: Windows, rows: NDArray[np.bool_], rng: np.random.Generator) -> Windows:
    """Return the same rows in which those chosen say something else."""
    n = int(rows.sum())
    out = Windows(**{f.name: getattr(windows, f.name).copy() for f in fields(Windows)})
    out.usage[rows] = rng.gamma(0.6, rng.choice([0.4, 40.0]), out.usage[rows].shape)
    out.percentiles[rows] = np.sort(rng.gamma(0.6, 0.4, out.percentiles[rows].shape), axis=1)
    out.percentiles[rows & (rng.random(len(rows)) < 0.3)] = np.nan
    out.usage[rows & (rng.random(len(rows)) < 0.1)] = np.nan
    out.limit[rows] = rng.choice([0.3, 1.0, 3.0, 0.0, np.nan], (n, 2), p=[0.3, 0.3, 0.3, 0.05, 0.05])
    out.scheduled_us[rows] = np.where(rng.random(n) < 0.3, -1, rng.integers(0, 10**10, n))
    out.tier[rows] = rng.integers(-1, 5, n)
    out.scheduling_class[rows] = rng.integers(-1, 4, n)
    out.in_alloc[rows] = rng.random(n) < 0.5
    return out


def with_another_future(windows: Windows, t_us: int, rng: np.random.Generator) -> Windows:
    """Return windows of which only what is known by ``t_us`` is the same; tasks and collections begin later."""
    future = known_us(windows) > t_us
    out = disturbed(windows, future, rng)
    shifted = future & (out.instance_index % 2 == 0)  # all of a task's, so that they stay in order
    shift_us = int(rng.integers(5_000)) * S
    for clock in (out.start_us, out.end_us):
        clock[shifted] += shift_us
    task = rng.choice(out.instance_index)
    newcomer = disturbed(out, np.ones(len(out), bool), rng).take(out.instance_index == task)
    later_us = t_us + int(rng.integers(600)) * S - newcomer.start_us[0]
    for clock in (newcomer.start_us, newcomer.end_us):
        clock += later_us
    newcomer.instance_index[:] = 1_000
    newcomer.machine_id[:] = -1
    if rng.random() < 0.5:
        newcomer.collection_id[:] = 1_000  # a later run of the same name
    kept = np.ones(len(out), bool)
    if rng.random() < 0.5:  # one that was late is not, once the longer one before it is gone: by t it must not be known
        kept = ~future | ((rng.random(len(future)) < 0.8) & (out.end_us > t_us))
    return sort_windows(concatenate([out.take(kept), newcomer]))


def names_that_differ(a: NDArray[np.float32], b: NDArray[np.float32]) -> list[str]:
    same = ((a == b) | (np.isnan(a) & np.isnan(b))).all(axis=0)
    return [FEATURE_NAMES[k] for k in np.flatnonzero(~same)]


def aligned(before: Windows, after: Windows, rows: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the chosen rows of ``before`` that are in ``after``, too, and where they stand there."""
    place = np.full(len(before), -1)
    old = np.flatnonzero(after.machine_id >= 0)
    place[after.machine_id[old]] = old
    chosen = np.flatnonzero(rows & (place >= 0))
    return chosen, place[chosen]


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_whatever_happens_after_t_no_feature_at_or_before_t_moves(
    seed: int, random_histories: Maker, fold: Fold
) -> None:
    rng, windows = np.random.default_rng(seed), numbered(random_histories(seed, n_tasks=5, longest=40))
    t_us = int(rng.choice(known_us(windows)))
    other = with_another_future(windows, t_us, rng)
    rows, there = aligned(windows, other, known_us(windows) <= t_us)
    assert len(rows) == (known_us(windows) <= t_us).sum()
    before, after = fold(windows, CELL), fold(other, CELL)
    assert names_that_differ(before.x[rows], after.x[there]) == []


def test_every_feature_moves_after_t_when_what_is_after_t_changes(random_histories: Maker, fold: Fold) -> None:
    moved = set()
    for seed in range(24):  # or the test above would say nothing of those that nothing moves
        rng, windows = np.random.default_rng(seed), numbered(random_histories(seed))
        t_us = int(np.median(known_us(windows)))
        other = with_another_future(windows, t_us, rng)
        rows, there = aligned(windows, other, known_us(windows) > t_us)
        before, after = fold(windows, CELL), fold(other, CELL)
        moved.update(names_that_differ(before.x[rows], after.x[there]))
    assert set(FEATURE_NAMES) - moved == set()


def test_what_was_moves_every_feature_but_those_of_the_row_alone(random_histories: Maker, fold: Fold) -> None:
    moved = set()
    for seed in range(24):
        rng, windows = np.random.default_rng(seed), numbered(random_histories(seed))
        known = known_us(windows)
        past = known <= np.median(known)
        other = disturbed(windows, past, rng)
        if seed % 2:
            other = other.take(~past | (rng.random(len(past)) < 0.8))
        rows, there = aligned(windows, other, ~past)
        moved.update(names_that_differ(fold(windows, CELL).x[rows], fold(other, CELL).x[there]))
    assert moved & OF_THE_ROW_ALONE == set()
    assert set(FEATURE_NAMES) - OF_THE_ROW_ALONE - moved == set()


def looked_for(windows: Windows, failures: pa.Table, trace_end_us: int) -> tuple[NDArray[np.float32], ...]:
    value = np.empty((len(windows), len(TARGETS), len(HORIZONS_S)), np.float32)
    oom = np.empty((len(windows), len(HORIZONS_S)), np.float32)
    targets(windows, *oom_events(windows, failures), trace_end_us, value, oom)
    return value, oom


def failures_of(windows: Windows, rng: np.random.Generator) -> pa.Table:
    """Return failures of tasks at times when they run, half of them with all memory used."""
    rows = rng.choice(len(windows), 12)
    full = rows[::2]
    windows.usage[full, MEMORY_MAX] = windows.limit[full, 1]
    return pa.Table.from_pylist(
        [
            {
                s.COLLECTION_ID: int(windows.collection_id[k]),
                s.INSTANCE_INDEX: int(windows.instance_index[k]),
                s.TIME_US: int(windows.start_us[k]) + int(rng.integers(1, 400)) * S,
                s.EVENT_TYPE: s.EventType.FAIL,
            }
            for k in rows
        ],
        schema=s.EVENTS,
    )


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_whatever_happened_before_t_no_target_at_t_moves(seed: int, random_histories: Maker) -> None:
    rng, windows = np.random.default_rng(seed), numbered(random_histories(seed, n_tasks=4, longest=40))
    failures, known = failures_of(windows, rng), known_us(windows)
    t_us = int(rng.choice(known))
    past = known < t_us
    other = disturbed(windows, past, rng).take(~past | (rng.random(len(past)) < 0.8))
    rows, there = aligned(windows, other, ~past)
    end_us = int(rng.choice([known.max(), np.median(known), 10**15]))
    value, oom = looked_for(windows, failures, end_us)
    for events in (failures, failures.filter(pc.greater(failures[s.TIME_US], t_us))):
        value_then, oom_then = looked_for(other, events, end_us)
        assert np.array_equal(value[rows], value_then[there], equal_nan=True)
        assert np.array_equal(oom[rows], oom_then[there], equal_nan=True)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), h=st.sampled_from(range(len(HORIZONS_S))))
def test_whatever_happens_after_the_horizon_no_target_of_it_moves(seed: int, h: int, random_histories: Maker) -> None:
    rng, windows = np.random.default_rng(seed), numbered(random_histories(seed, n_tasks=4, longest=40))
    failures, known = failures_of(windows, rng), known_us(windows)
    t_us = int(rng.choice(known))
    until_us = t_us + HORIZONS_S[h] * S
    beyond = windows.start_us >= until_us
    other = disturbed(windows, beyond, rng)  # that a task goes on is known at its end alone: all rows stay
    value, oom = looked_for(windows, failures, 10**15)
    value_then, oom_then = looked_for(other, failures, 10**15)
    rows = known <= t_us
    assert np.array_equal(value[rows, :, h], value_then[rows, :, h], equal_nan=True)
    assert np.array_equal(oom[rows, h], oom_then[rows, h], equal_nan=True)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_whatever_is_measured_after_the_training_period_no_target_that_is_trained_on_moves(
    seed: int, random_histories: Maker
) -> None:
    rng, windows = np.random.default_rng(seed), numbered(random_histories(seed, n_tasks=4, longest=40))
    long = rng.random(len(windows)) < 0.05
    windows.end_us[long] += rng.integers(1, 100_000, int(long.sum())) * S
    failures, known = failures_of(windows, rng), known_us(windows)
    cuts = (int(rng.choice(known)), 10**17)
    inside = inside_period(periods(known, cuts), measured_by(windows), cuts) & (known < cuts[0])[:, None]
    other = disturbed(windows, windows.end_us > cuts[0], rng)  # that a task goes on is known at its end alone
    value, oom = looked_for(windows, failures, 10**15)
    value_then, oom_then = looked_for(other, failures.filter(pc.less_equal(failures[s.TIME_US], cuts[0])), 10**15)
    inside_of_targets = np.repeat(inside[:, None], len(TARGETS), axis=1)
    assert np.array_equal(value[inside_of_targets], value_then[inside_of_targets], equal_nan=True)
    assert np.array_equal(oom[inside], oom_then[inside], equal_nan=True)


def test_every_target_moves_when_what_is_after_t_changes(random_histories: Maker) -> None:
    moved, oom_moved = np.zeros((len(TARGETS), len(HORIZONS_S)), bool), np.zeros(len(HORIZONS_S), bool)
    for seed in range(12):
        rng, windows = np.random.default_rng(seed), random_histories(seed)
        failures, known = failures_of(windows, rng), known_us(windows)
        future = known > np.median(known)
        before, after = (looked_for(w, failures, 10**15) for w in (windows, disturbed(windows, future, rng)))
        moved |= (~np.isclose(before[0][~future], after[0][~future], equal_nan=True)).any(axis=0)
        oom_moved |= (~np.isclose(before[1][~future], after[1][~future], equal_nan=True)).any(axis=0)
    assert moved.all()
    assert oom_moved.all()
