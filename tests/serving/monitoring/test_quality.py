"""Outcomes of the answers: worked by hand, against a slow reference, and as training defines its targets."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reclaim.data import schema as s
from reclaim.data.oom import oom_events
from reclaim.data.windows import MEMORY_MAX, MEMORY_MEAN, P90, Windows, concatenate, demand, empty_windows
from reclaim.features.targets import HORIZONS_S, TARGETS, targets
from reclaim.serving.monitoring import quality
from reclaim.serving.monitoring.quality import LiveQuality, QualityNumbers
from reclaim.training.margins.violation import ROUNDING

if TYPE_CHECKING:
    from tests.serving.conftest import History

S = 1_000_000
SLOT_0 = np.zeros(1, np.int64)
NOT_SAID = np.full(1, -1)
LEVELS = (0.5, 0.9)
MARGINS = ("baseline", "aggressive")


def _windows(*rows: tuple[float, float, float], limit: float = 1.0, slot_s: int = 300) -> Windows:
    """Return 5-minute windows of start in seconds, CPU and memory."""
    windows = empty_windows(len(rows))
    start_s, cpu, memory = np.array(rows).T
    windows.start_us[:] = start_s * S
    windows.end_us[:] = windows.start_us + slot_s * S
    windows.percentiles[:, P90] = cpu
    windows.usage[:, MEMORY_MAX] = memory
    windows.limit[:] = limit
    windows.tier[:] = s.TIERS.index("prod")
    return windows


def _answer(
    live: LiveQuality, end_s: float, reservations: Sequence[Sequence[float]], *, slot: int = 0, limit: float = 1.0,
    quantiles: Sequence[Sequence[float]] = ((0.25, 0.5), (0.25, 0.5)), oom: float = np.nan, tier: int = 3,
) -> None:  # fmt: skip
    live.expect(
        np.array([slot]), np.array([int(end_s * S)]), np.array([tier], np.int8), np.full((1, 2), limit),
        np.array([quantiles]), np.array([reservations]), np.array([oom]),
    )  # fmt: skip


def _live(horizon_s: int = 600) -> LiveQuality:
    return LiveQuality(LEVELS, horizon_s, MARGINS)


def test_an_answer_is_judged_by_the_windows_that_begin_within_its_horizon() -> None:
    # answered at 600 s for 600 s: the windows of 600 and 900 s count, the one of 1200 s, which demands all, does not.
    # CPU: 0.25 and 0.5 of limit 1: above the median (0.25), at the 90th percentile (0.5: covered), above what
    # aggressive reserves (0.375), not what baseline does. Memory stays at 0.125: nothing is violated.
    live = _live()
    _answer(live, 600, [[0.625, 0.75], [0.375, 0.5]])
    live.observe(SLOT_0.repeat(3), _windows((600, 0.25, 0.125), (900, 0.5, 0.125), (1_200, 1.0, 1.0)))
    live.settle(1_499 * S)
    assert live.numbers().judged.sum() == 0  # a slot of grace, for a window that began just before the end
    live.settle(1_500 * S)
    n = live.numbers()
    prod = s.TIERS.index("prod") + 1
    assert n.judged[prod].tolist() == n.forecast[prod].tolist() == [1, 1]
    assert n.covered[prod].tolist() == [[0, 1], [1, 1]]
    assert n.violated[prod].tolist() == [[0, 0], [1, 0]]
    assert n.limit[prod].tolist() == [1.0, 1.0]
    assert n.reserved[prod].tolist() == [[0.625, 0.75], [0.375, 0.5]]
    assert n.reclaimed.tolist() == [[0.375, 0.25], [0.625, 0.5]]
    assert n.judged.sum() == 2
    assert n.oom_judged.sum() == 0


def test_one_answer_of_a_task_is_waited_for_at_a_time() -> None:
    live = _live()
    for end_s in range(600, 3_600, 300):
        live.observe(SLOT_0, _windows((end_s - 300, 0.1, 0.1)))
        live.settle(end_s * S)
        _answer(live, end_s, [[0.5, 0.5], [0.5, 0.5]])
    # taken at 600, counted at 1500 and taken again, counted at 2400 and taken again, counted at 3300
    assert live.numbers().judged.sum(axis=0).tolist() == [3, 3]


def test_a_reservation_of_the_whole_limit_cannot_be_violated_and_one_of_an_unknown_limit_is_not_judged() -> None:
    live = _live()
    _answer(live, 600, [[1.0, 1.0], [0.5, np.nan]])
    _answer(live, 600, [[0.1, 0.1], [0.1, 0.1]], slot=1, limit=np.nan)
    _answer(live, 600, [[0.1, 0.1], [0.1, 0.1]], slot=2, limit=0.0)
    live.observe(np.arange(3), concatenate([_windows((600, 1.0, 3.0))] * 3))
    live.settle(9_000 * S)
    n = live.numbers()
    assert n.judged.sum(axis=0).tolist() == [1, 1]
    assert n.violated.sum(axis=0).tolist() == [[0, 0], [1, 0]]
    assert n.reserved.sum(axis=0).tolist() == [[1.0, 1.0], [0.5, 1.0]]


def test_rounding_is_no_violation() -> None:
    for over, violated in ((1 + ROUNDING / 2, 0), (1 + ROUNDING * 2, 1)):
        live = _live()
        _answer(live, 600, [[0.5, 0.5], [0.5, 0.5]], quantiles=[[0.5, 0.5], [0.5, 0.5]])
        live.observe(SLOT_0, _windows((600, 0.1, 0.5 * over)))
        live.forget(SLOT_0)
        assert live.numbers().violated.sum(axis=0).tolist() == [[0, violated]] * 2
        assert live.numbers().covered.sum(axis=0).tolist() == [[1, 1], [1 - violated] * 2]


def test_an_answer_of_which_nothing_was_measured_is_not_judged() -> None:
    live = _live()
    _answer(live, 600, [[0.5, 0.5], [0.5, 0.5]], oom=0.5)
    live.observe(SLOT_0, _windows((600, np.nan, np.nan)))
    live.settle(9_000 * S)
    n = live.numbers()
    assert n.judged.sum() == n.forecast.sum() == n.oom_judged.sum() == 0


def test_the_probability_of_a_task_that_ends_unseen_is_held_against_its_end_and_of_one_that_stays_it_is_not() -> None:
    live = _live()
    for slot in (0, 1):
        _answer(live, 600, [[0.5, 0.5], [0.5, 0.5]], slot=slot, oom=0.5)
    live.forget(SLOT_0)
    live.settle(9_000 * S)
    n = live.numbers()
    assert (n.oom_judged.sum(), n.oom_met.sum(), n.oom_brier.sum()) == (1, 0, 0.25)
    assert n.judged.sum() == 0


def test_answers_given_at_once_are_each_judged_by_their_own_tier_probability_and_reservation() -> None:
    live = _live()
    live.expect(
        np.array([1, 0]), np.full(2, 600 * S), np.array([3, -1], np.int8), np.array([[1.0, 10.0], [2.0, 20.0]]),
        np.full((2, 2, 2), 0.5), np.array([[[0.2, 3.0]] * 2, [[0.4, 6.0]] * 2]), np.array([0.25, 0.75]),
    )  # fmt: skip
    live.observe(np.array([0, 1]), _windows((600, 0.1, 0.1), (600, 0.1, 0.1)))
    live.failed(np.array([1]), np.array([950 * S]), np.array([1]))
    live.settle(9_000 * S)
    n = live.numbers()
    assert n.oom_judged[[0, 4]].tolist() == [1, 1]
    assert n.oom_met[[0, 4]].tolist() == [0, 1]
    assert n.oom_predicted[[0, 4]].tolist() == [0.75, 0.25]
    assert n.limit[[0, 4]].tolist() == [[2.0, 20.0], [1.0, 10.0]]
    assert n.reserved[[0, 4], 0].tolist() == [[0.4, 6.0], [0.2, 3.0]]
    np.testing.assert_allclose(n.reclaimed, [[1 - 0.6 / 3, 1 - 9 / 30]] * 2)


def test_quantiles_that_a_model_lacks_are_not_called_uncovered() -> None:
    live = _live()
    _answer(live, 600, [[0.5, 0.5], [0.5, 0.5]], quantiles=[[np.nan, np.nan], [0.5, 0.5]])
    live.observe(SLOT_0, _windows((600, 0.2, 0.2)))
    live.settle(9_000 * S)
    n = live.numbers()
    assert n.judged.sum(axis=0).tolist() == [1, 1]
    assert n.forecast.sum(axis=0).tolist() == [0, 1]
    assert n.covered.sum(axis=0).tolist() == [[0, 0], [1, 1]]


def test_late_and_repeated_windows_count_for_what_they_cover_alone() -> None:
    live = _live(horizon_s=3_600)
    _answer(live, 900, [[0.5, 0.5], [0.5, 0.5]])
    live.observe(SLOT_0, _windows((1_200, 0.1, 0.1)))
    live.observe(SLOT_0, _windows((600, 1.0, 1.0)))  # ended when the answer was given
    live.observe(SLOT_0, _windows((1_200, 0.1, 0.1)))
    live.observe(SLOT_0, _windows((900, 0.1, 0.6)))  # late, and within
    live.settle(9_000 * S)
    assert live.numbers().violated.sum(axis=0).tolist() == [[0, 1], [0, 1]]
    assert live.numbers().judged.sum(axis=0).tolist() == [1, 1]


def test_a_task_that_leaves_is_judged_by_what_it_did_and_its_slot_begins_afresh() -> None:
    live = _live()
    _answer(live, 600, [[0.5, 0.5], [0.5, 0.5]], oom=0.25)
    live.observe(SLOT_0, _windows((600, 0.6, 0.1)))
    live.forget(np.array([0, 7]))  # 7 was never heard of
    n = live.numbers()
    assert n.judged.sum(axis=0).tolist() == [1, 1]
    assert n.violated.sum(axis=0).tolist() == [[1, 0], [1, 0]]
    assert (n.oom_judged.sum(), n.oom_met.sum(), n.oom_brier.sum()) == (1, 0, 0.0625)
    live.forget(SLOT_0)
    live.settle(9_000 * S)
    assert live.numbers().judged.sum(axis=0).tolist() == [1, 1]
    _answer(live, 700, [[0.5, 0.5], [0.5, 0.5]])
    live.forget(SLOT_0)
    assert live.numbers().judged.sum(axis=0).tolist() == [1, 1]  # what the task before it did is not this one's


def test_a_failure_with_its_memory_at_the_limit_is_an_oom_and_the_probability_is_held_against_it() -> None:
    live = _live()
    for slot, memory in enumerate((0.98, 0.97, 0.99)):
        _answer(live, 600, [[0.5, 0.5], [0.5, 0.5]], slot=slot, oom=0.75)
        live.observe(np.array([slot]), _windows((600, 0.1, memory)))
    live.failed(np.array([0, 1]), np.array([950 * S, 950 * S]), NOT_SAID.repeat(2))
    live.forget(np.array([0, 1, 2]))
    n = live.numbers()
    assert (n.oom_judged.sum(), n.oom_met.sum(), n.oom_predicted.sum(), n.failures[0]) == (3, 1, 2.25, 2)
    assert n.oom_brier.sum() == 0.0625 + 2 * 0.5625


def test_a_failure_that_is_recorded_as_out_of_memory_or_as_not_is_taken_at_its_word() -> None:
    live = _live()
    for slot, memory in enumerate((0.3, 0.3, 0.99, 0.99, 0.3)):
        _answer(live, 600, [[0.5, 0.5], [0.5, 0.5]], slot=slot, oom=0.75)
        live.observe(np.array([slot]), _windows((600, 0.1, memory)))
    live.failed(np.arange(5), np.full(5, 950 * S), np.array([1, -1, 0, -1, 1]))
    live.failed(np.zeros(2, np.int64), np.full(2, 950 * S), np.array([1, 0]))  # again, and against itself
    met = []
    for slot in range(5):
        before = live.numbers().oom_met.sum()
        live.forget(np.array([slot]))
        met.append(int(live.numbers().oom_met.sum() - before))
    assert met == [1, 0, 0, 1, 1]
    assert live.numbers().failures[0] == 5


def test_a_recorded_oom_before_the_answer_or_after_its_horizon_is_not_of_it() -> None:
    for failed_s, oom in ((900, 0), (901, 1), (1_500, 1), (1_501, 0)):
        live = _live()
        _answer(live, 900, [[0.5, 0.5], [0.5, 0.5]], oom=0.5)
        live.failed(SLOT_0, np.array([failed_s * S]), np.array([1]))
        live.forget(SLOT_0)
        assert live._tasks["failed"].tolist() == [0]
        assert live.numbers().oom_met.sum() == oom


def test_a_window_that_comes_late_is_not_the_last_one_before_a_failure() -> None:
    live = _live()
    _answer(live, 900, [[0.5, 0.5], [0.5, 0.5]], oom=0.5)
    for start_s, memory in ((900, 1.0), (600, 0.125)):  # that of 900 s, at the limit, comes first
        live.observe(SLOT_0, _windows((start_s, 0.25, memory)))
    live.failed(SLOT_0, np.array([1_250 * S]), NOT_SAID)
    live.settle(1_800 * S)
    assert (live.numbers().oom_judged.sum(), live.numbers().oom_met.sum()) == (1, 1)


def test_an_oom_counts_for_the_answer_that_was_pending_and_for_no_later_one() -> None:
    live = _live()
    _answer(live, 600, [[0.5, 0.5], [0.5, 0.5]], oom=0.75)
    live.observe(SLOT_0, _windows((600, 0.1, 1.0)))
    live.failed(SLOT_0, np.array([900 * S]), NOT_SAID)
    live.settle(1_500 * S)
    _answer(live, 1_800, [[0.5, 0.5], [0.5, 0.5]], oom=0.75)
    live.observe(SLOT_0, _windows((1_800, 0.1, 0.1)))
    live.settle(2_700 * S)
    assert (live.numbers().oom_judged.sum(), live.numbers().oom_met.sum()) == (2, 1)


def test_a_failure_that_is_reported_again_counts_once() -> None:
    live = _live()
    for task, failed_s in ([0, 1], [950, 950]), ([0, 0], [950, 950]), ([0, 0, 1], [960, 960, 950]), ([1], [960]):
        live.failed(np.array(task), np.array(failed_s) * S, NOT_SAID.repeat(len(task)))
    assert live.numbers().failures[0] == 4
    live.forget(SLOT_0)
    live.failed(SLOT_0, np.array([10 * S]), NOT_SAID)  # of another task
    assert live.numbers().failures[0] == 5


@pytest.mark.parametrize(
    ("failed_s", "oom"),
    [(600, 0), (601, 0), (900, 1), (1_200, 1), (1_201, 0)],
    ids=["before the answer", "before the window began", "at its end", "at the horizon", "after it"],
)
def test_a_failure_counts_within_the_horizon_of_the_answer(failed_s: int, oom: int) -> None:
    live = _live()
    _answer(live, 600, [[0.5, 0.5], [0.5, 0.5]], oom=0.5)
    live.observe(SLOT_0, _windows((601, 0.1, 1.0)))
    live.failed(SLOT_0, np.array([failed_s * S]), NOT_SAID)
    live.forget(SLOT_0)
    assert live.numbers().oom_met.sum() == oom


def test_a_failure_long_after_the_last_window_is_no_oom() -> None:
    for after_s, oom in ((600, 1), (601, 0)):
        live = _live(horizon_s=3_600)
        _answer(live, 600, [[0.5, 0.5], [0.5, 0.5]], oom=0.5)
        live.observe(SLOT_0, _windows((600, 0.1, 1.0)))
        live.failed(SLOT_0, np.array([(900 + after_s) * S]), NOT_SAID)
        live.settle(9_000 * S)
        assert live.numbers().oom_met.sum() == oom


def test_judged_as_training_defines_its_targets(history: History) -> None:
    windows = replace(history.windows, usage=history.windows.usage.copy())
    starts = windows.task_starts()
    # besides the drawn histories: each task fails right after its last window, some with their memory at the limit
    last = starts[1:] - 1
    windows.usage[last[::2], MEMORY_MAX] = windows.limit[last[::2], 1]
    events = pa.table(
        {
            s.COLLECTION_ID: windows.collection_id[last], s.INSTANCE_INDEX: windows.instance_index[last],
            s.TIME_US: windows.end_us[last] + S, s.EVENT_TYPE: pa.array([int(s.EventType.FAIL)] * len(last), pa.int8()),
        }
    )  # fmt: skip
    value = np.empty((len(windows), len(TARGETS), len(HORIZONS_S)), np.float32)
    oom = np.empty((len(windows), len(HORIZONS_S)), np.float32)
    targets(windows, *oom_events(windows, events), 2**62, value, oom)
    h = HORIZONS_S.index(3_600)
    assert np.nansum(oom[:, h]) > 10
    seen = 0
    for first, stop in pairwise(starts.tolist()):
        for row in range(first, stop):
            live = LiveQuality(tuple(np.linspace(0.05, 1.5, 30)), 3_600, MARGINS)
            live.observe(np.zeros(row + 1 - first, np.int64), windows.take(slice(first, row + 1)))
            levels = np.tile(np.linspace(0.05, 1.5, 30), (1, 2, 1))
            live.expect(
                SLOT_0, windows.end_us[[row]], windows.tier[[row]], windows.limit[[row]], levels,
                np.ones((1, 2, 2)), np.array([0.5]),
            )  # fmt: skip
            live.observe(np.zeros(stop - row - 1, np.int64), windows.take(slice(row + 1, stop)))
            live.failed(SLOT_0, windows.end_us[[stop - 1]] + S, NOT_SAID)
            live.forget(SLOT_0)
            n = live.numbers()
            wanted = value[row, :2, h]
            assert n.judged.sum(axis=0).tolist() == (~np.isnan(wanted)).astype(int).tolist()
            known = ~np.isnan(wanted)
            covered = (wanted[:, None] <= levels[0].astype(np.float32) * (1 + ROUNDING)).astype(int)
            assert n.covered.sum(axis=0)[known].tolist() == covered[known].tolist()
            assert n.oom_met.sum() == oom[row, h]
            seen += int(known.sum())
    assert seen > 300


def _reference(
    steps: list[tuple[np.ndarray, Windows, np.ndarray, np.ndarray]], horizon_us: int, grace_us: int
) -> dict[str, float]:
    """Count as ``LiveQuality`` should, one window at a time; memory only, one level, one margin."""
    pending: dict[int, dict[str, Any]] = {}
    total: dict[str, float] = defaultdict(float)
    looked = 0

    def count(slot: int) -> None:
        answer = pending.pop(slot)
        peaks = [v for start, end, v in answer["later"] if not np.isnan(v)]
        if not peaks or not answer["limit"] > 0:
            return
        held = min(answer["held"], answer["limit"])
        total["judged"] += 1
        total["reserved"] += held
        total["violated"] += held < answer["limit"] and max(peaks) > held * (1 + ROUNDING)
        total["covered"] += max(peaks) <= answer["quantile"] * answer["limit"] * (1 + ROUNDING)

    for slot, windows, quantile, held in steps:
        memory = demand(windows)[:, 1]
        for i, k in enumerate(slot.tolist()):
            start, end = int(windows.start_us[i]), int(windows.end_us[i])
            if k in pending and end > pending[k]["end"] and start < pending[k]["end"] + horizon_us:
                pending[k]["later"].append((start, end, memory[i]))
        clock = int(windows.end_us.max()) // (30 * S) * (30 * S)
        if clock > looked:  # a clock that stands still, or jumps back, counts nothing
            looked = clock
            for k in [k for k, a in pending.items() if a["end"] + horizon_us + grace_us <= clock]:
                count(k)
        for k in set(slot.tolist()):
            if k not in pending:
                i = int(np.flatnonzero(slot == k)[-1])
                pending[k] = {
                    "end": int(windows.end_us[i]), "limit": windows.limit[i, 1], "later": [],
                    "quantile": quantile[i], "held": held[i],
                }  # fmt: skip
    for k in list(pending):
        count(k)
    return total


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), horizon_s=st.sampled_from([300, 900, 3_600]))
def test_counts_equal_a_slow_reference(seed: int, horizon_s: int) -> None:
    rng = np.random.default_rng(seed)
    live = LiveQuality((0.9,), horizon_s, ("medium",))
    steps, clock = [], 600
    for _ in range(rng.integers(1, 30)):
        slot = rng.integers(0, 4, rng.integers(1, 6))
        n = len(slot)
        windows = _windows(*((clock, 0.1, 0.1) for _ in range(n)), slot_s=int(rng.integers(1, 400)))
        windows.start_us[:] += np.sort(rng.integers(0, 600, n)) * S
        windows.end_us[:] = np.maximum(windows.start_us + rng.choice([300, 300, 40]) * S, windows.start_us + S)
        windows.usage[:, MEMORY_MAX] = rng.choice([np.nan, 0.2, 0.5, 0.8, 1.5], n)
        windows.usage[:, MEMORY_MEAN] = rng.choice([np.nan, 0.4], n)
        windows.limit[:] = rng.choice([1.0, 2.0, 0.0, np.nan], (n, 1), p=[0.6, 0.2, 0.1, 0.1])
        quantile, held = rng.choice([0.2, 0.5, 0.8], n), rng.choice([0.2, 0.5, 1.0, 9.0], n)
        steps.append((slot, windows, quantile, held))
        clock += int(rng.integers(-300, 900))
        live.observe(slot, windows)
        live.settle(int(windows.end_us.max()))
        last = np.array([np.flatnonzero(slot == k)[-1] for k in np.unique(slot)])
        live.expect(
            slot[last], windows.end_us[last], windows.tier[last], windows.limit[last],
            np.repeat(quantile[last], 2).reshape(-1, 2, 1), np.repeat(held[last], 2).reshape(-1, 1, 2),
            np.full(len(last), np.nan),
        )  # fmt: skip
    live.forget(np.arange(4))
    numbers, wanted = live.numbers(), _reference(steps, horizon_s * S, 300 * S)
    assert numbers.judged.sum(axis=0)[1] == wanted["judged"]
    assert numbers.violated.sum(axis=0)[0, 1] == wanted["violated"]
    assert numbers.covered.sum(axis=0)[1, 0] == wanted["covered"]
    assert numbers.reserved.sum(axis=0)[0, 1] == pytest.approx(wanted["reserved"])


def _settled_cell(n: int) -> LiveQuality:
    """Return one with a window of each of ``n`` tasks, whose first answers are no longer spread over a horizon."""
    live, slot = _live(), np.arange(n)
    live.wanted(slot)
    live.observe(slot, _windows(*[(300, 0.2, 0.2)] * n))
    return live


def test_a_whole_cell_is_taken_in_turns_so_that_no_call_counts_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality, "MOST_WANTED", 3)
    live, slot = _settled_cell(10), np.arange(10)
    asked = []
    for clock_s in range(600, 3_000, 300):
        live.settle(clock_s * S)
        rows = live.wanted(slot)
        asked.append(rows.tolist())
        for k in rows.tolist():
            _answer(live, clock_s, [[0.5, 0.5], [0.5, 0.5]], slot=k)
    # an answer is pending until the third call after it; a call goes on after the slots of the one before
    assert asked[:6] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [0, 1, 9], [2, 3, 4], [5, 6, 7]]


def test_an_answer_given_while_another_is_waited_for_is_not_taken() -> None:
    live = _settled_cell(4)
    _answer(live, 600, [[0.5, 0.5], [0.5, 0.5]])
    assert live.wanted(np.array([3, 0, 1])).tolist() == [0, 2]
    _answer(live, 900, [[0.1, 0.1], [0.1, 0.1]])
    live.observe(SLOT_0, _windows((900, 0.2, 0.2)))
    live.forget(SLOT_0)
    assert live.numbers().violated.sum() == 0


def test_a_clock_that_jumps_back_counts_nothing_twice() -> None:
    live = _live()
    _answer(live, 600, [[0.5, 0.5], [0.5, 0.5]])
    live.observe(SLOT_0, _windows((600, 0.2, 0.2)))
    for clock_s in (9_000, 0, 9_000, 100, 90_000):
        live.settle(clock_s * S)
    assert live.numbers().judged.sum(axis=0).tolist() == [1, 1]


def test_numbers_are_a_copy() -> None:
    live = _live()
    before = live.numbers()
    _answer(live, 600, [[0.5, 0.5], [0.5, 0.5]])
    live.observe(SLOT_0, _windows((600, 0.2, 0.2)))
    live.forget(SLOT_0)
    assert before.judged.sum() == 0
    assert np.isnan(before.reclaimed).all()
    assert isinstance(before, QualityNumbers)


def test_memory_is_bounded_per_task() -> None:
    live = LiveQuality((0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999, 0.9995), 3_600)
    live.observe(np.array([999]), _windows((600, 0.1, 0.1)))
    assert sum(a.nbytes for a in (live._tasks, live._held, live._quantiles)) == 1_000 * 200


def test_the_first_answers_of_a_cell_are_spread_over_a_horizon() -> None:
    live, slot = _live(3_600), np.arange(64)
    windows = empty_windows(64)
    begun: list[int] = []
    for number in range(13):
        windows.start_us[:], windows.end_us[:] = number * 300 * S, (number + 1) * 300 * S
        live.observe(slot, windows)
        rows = live.wanted(slot)
        begun.append(len(rows))
        for k in rows.tolist():
            _answer(live, (number + 1) * 300, [[0.5, 0.5], [0.5, 0.5]], slot=k)
    assert sum(begun) == 64
    assert all(3 <= n <= 8 for n in begun[1:]), begun
