"""A live fold: the windows are those of an ingest, tasks end once, and what is gone is forgotten."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reclaim.data import schema as s
from reclaim.data.traces.history import PIECE_S, joined
from reclaim.data.traces.history import cut as part_of
from reclaim.data.traces.kubernetes import kept as kept_module
from reclaim.data.traces.kubernetes.kept import as_bytes, from_bytes
from reclaim.data.traces.kubernetes.live import LiveFold, Slot
from tests.data.traces.kubernetes.histories import APP, DIALECT, POD, T0, US, Piece, beat, counter, fold, one

SLOT_S, DELAY_S = 300, 60
HOUR_S = 3600.0


def live(
    series: Piece, until_s: int, step_s: int = SLOT_S, made: LiveFold | None = None, since_s: int = 0
) -> list[Slot]:
    """Return the slots of a history that is folded step by step; each step sees a minute of what follows it."""
    made = made or LiveFold(DIALECT)
    slots: list[Slot] = []
    for at in range(T0 + since_s, T0 + until_s, step_s):
        seen = part_of(series, at * 1000, (at + step_s + DELAY_S) * 1000)
        slots += made.take(seen, at * US, (at + step_s) * US)
    return slots


def rows(tables: list[pa.Table]) -> list[dict[str, Any]]:
    found = pa.concat_tables(tables).to_pylist()
    return sorted(found, key=lambda row: (row[s.COLLECTION_ID], row[s.INSTANCE_INDEX], row[s.END_US]))


def pod(
    name: str, start_s: float, end_s: float, *, cores: float, gap_s: tuple[float, float] | None = None,
    listed_s: float | None = None, of: str = "",
) -> Piece:  # fmt: skip
    """Return what is scraped of a pod of one container, but for a gap; it is listed to its end, or to another time.

    Its limit is in the role that begins with ``of``.
    """
    labels = {**APP, "pod": name}
    listed_s = end_s if listed_s is None else listed_s

    def seen(samples: Any) -> Any:
        return [(t, v) for t, v in samples if gap_s is None or not gap_s[0] <= t < gap_s[1]]

    parts: Piece = {
        "cpu": [one(labels, seen(counter(start_s, end_s, cores)))],
        "memory": [one(labels, seen(beat(start_s, end_s, 1e9 * cores)))],
        "pod": [one({**labels, "created_by_kind": "ReplicaSet", "created_by_name": "cart-7d9f8b6c5x", "node": "n1",
                     "priority_class": "koord-mid"}, beat(start_s, listed_s))],
        f"{of}limit": [one({**labels, "resource": "memory"}, beat(start_s, listed_s, 4e9))],
        "started": [one(labels, beat(start_s, listed_s, T0 + start_s))],
    }  # fmt: skip
    return {role: [row for row in found if len(row.value)] for role, found in parts.items()}


def together(*parts: Piece) -> Piece:
    found: Piece = {}
    for part in parts:
        for role, series in part.items():
            found.setdefault(role, []).extend(series)
    return {role: joined(series, 0, 1 << 60) for role, series in found.items()}


@st.composite
def clusters(draw: st.DrawFn) -> Piece:
    """Draw pods that come, go and are not scraped for a while, at any moment of four hours."""
    parts = []
    for k in range(draw(st.integers(1, 4))):
        start_s = draw(st.integers(0, 12_000))
        end_s = draw(st.integers(start_s + 60, 2 * PIECE_S))
        gap = draw(st.none() | st.tuples(st.integers(start_s, end_s), st.integers(60, 2_000)))
        gap_s = None if gap is None else (gap[0], gap[0] + gap[1])
        name, cores, of = f"cart-7d9f8b6c5x-abcd{k}", draw(st.floats(0.1, 3)), draw(st.sampled_from(["", "init_"]))
        parts.append(pod(name, start_s, end_s, cores=cores, gap_s=gap_s, of=of))
    return together(*parts)


@settings(max_examples=60, deadline=None)
@given(series=clusters(), step_s=st.sampled_from([SLOT_S, 1200]))
def test_windows_are_those_of_an_ingest_of_the_same_history(series: Piece, step_s: int) -> None:
    whole, _, _ = fold(series, pieces=2)
    slots = live(series, 2 * PIECE_S, step_s)
    assert [slot.end_us for slot in slots] == [(T0 + SLOT_S * (k + 1)) * US for k in range(48)]
    for slot in slots:
        ends = slot.windows[s.END_US].to_pylist()
        assert all(slot.end_us - SLOT_S * US < end <= slot.end_us for end in ends)
    ours = rows([slot.windows for slot in slots])
    assert ours == rows([pa.Table.from_pylist(whole, slots[0].windows.schema)] if whole else [slots[0].windows])


@settings(max_examples=20, deadline=None)
@given(series=clusters(), at=st.integers(1, 47))
def test_a_fold_that_was_kept_goes_on_as_one_that_was_not(series: Piece, at: int) -> None:
    until_s = at * SLOT_S
    fold = LiveFold(DIALECT)
    live(series, until_s, made=fold)
    found = from_bytes(as_bytes(fold, (T0 + until_s) * US))
    assert found is not None
    kept, until_us = found
    assert until_us == (T0 + until_s) * US
    expected, slots = (live(series, 2 * PIECE_S, made=one, since_s=until_s) for one in (fold, kept))
    assert expected == slots
    assert repr(fold.tasks()) == repr(kept.tasks())  # a NaN is not equal to itself


def test_bytes_that_are_damaged_or_of_other_code_are_no_fold(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = as_bytes(LiveFold(DIALECT), 0)
    for bad in (b"", whole[:-1], whole[:40] + b"?" + whole[41:]):
        assert from_bytes(bad) is None
    monkeypatch.setattr(kept_module, "_code", lambda: b"of another version")
    assert from_bytes(whole) is None


class _Reduced:
    """An object that a pickle makes by a call."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


LYING = _Reduced(np.dtype, ("V8", False, True), (3, "|", None, ("a",), {"a": (np.dtype("O"), 0)}, 8, 1, 0))


CONTENTS = {
    "a function": (0, Path.cwd), "a number": 5, "two numbers": (1, 2), "no time": ("1", LiveFold(DIALECT)),
    "no fold": (0, [LiveFold(DIALECT)]), "a type that lies": (0, LYING),
    "an array of numpy": (0, _Reduced(*np.zeros(1).__reduce__()[:1], (np.ndarray, (10**13,), b"d"))),
    "objects": (0, _Reduced(kept_module._array, ("O", (1,), b"AAAAAAAA"))),
    "objects in records": (0, _Reduced(kept_module._array, ("i4,O", (1,), bytes(12)))),
    "another size": (0, _Reduced(kept_module._array, ("<f8", (10**13,), b""))),
    "a fold of nothing": (0, _Reduced(LiveFold, ())),
}  # fmt: skip


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
def test_bytes_of_anything_but_a_fold_make_nothing(content: Any) -> None:
    kept = pickle.dumps(content)
    assert from_bytes(kept_module._digest(kept) + kept) is None


def test_a_function_that_bytes_call_is_not_called(tmp_path: Path) -> None:
    for folder, content in (("alone", []), ("in a fold", [LiveFold(DIALECT)])):
        kept = pickle.dumps((0, [*content, _Reduced(os.mkdir, (str(tmp_path / folder),))]))
        assert from_bytes(kept_module._digest(kept) + kept) is None
    assert list(tmp_path.iterdir()) == []
    pickle.loads(kept)  # a plain unpickler calls it
    assert [path.name for path in tmp_path.iterdir()] == ["in a fold"]


@pytest.mark.parametrize("dtype", ["O", "i4,O", "U4", "M8[us]"])
def test_an_array_of_anything_but_numbers_is_not_made(dtype: str) -> None:
    with pytest.raises(pickle.UnpicklingError, match="is no type of a fold's numbers"):
        kept_module._array(dtype, (1,), bytes(16))


def test_arrays_and_numbers_come_back_as_they_were() -> None:
    fold = LiveFold(DIALECT)
    numbers: list[Any] = [
        np.arange(6.0).reshape(2, 3), np.array([True, False]), np.zeros(0, np.int32), np.float64("nan"),
        np.int64(-7), np.bool_(True),
    ]  # fmt: skip
    gone: dict[Any, Any] = {(1, k): number for k, number in enumerate(numbers)}
    fold._gone = gone
    found = from_bytes(as_bytes(fold, 3))
    assert found is not None
    kept: list[Any] = list(found[0]._gone.values())
    for before, after in zip(numbers, kept, strict=True):
        assert type(before) is type(after)
        np.testing.assert_array_equal(before, after)
        assert np.asarray(after).dtype == np.asarray(before).dtype


def test_a_step_is_folded_as_its_slots() -> None:
    """The history on disk comes two hours at a time, what follows it in slots."""
    series = pod(POD["pod"], 100, 7000, cores=0.5)
    assert rows([k.windows for k in live(series, PIECE_S, PIECE_S)]) == rows([k.windows for k in live(series, PIECE_S)])


OTHER = pod("cart-7d9f8b6c5x-other", 0, 3 * HOUR_S, cores=1.0)
"""A pod that is seen all the time: without one, the cluster may not have been scraped."""


def ends(series: Piece) -> list[tuple[float, float]]:
    """Return when a task's end is known, and when it was, in hours since ``T0``."""
    slots = live(series, 3 * 3600)
    return [((slot.end_us / US - T0) / 3600, (at_us / US - T0) / 3600) for slot in slots for _, at_us in slot.ended]


def test_a_task_ends_ten_minutes_after_its_last_window() -> None:
    gone = pod(POD["pod"], 0, HOUR_S, cores=1.0)
    # the window that ends at 4500 s is the first that ends more than ten minutes after 3600 s
    assert ends(together(gone, OTHER)) == [(1.25, 1.0)]
    assert ends(gone) == []


def test_a_task_that_is_listed_has_not_ended_and_one_that_completed_has() -> None:
    """A node that is not scraped has its pods still; the pod of a job is listed long after its end."""
    away = pod(POD["pod"], 0, HOUR_S, cores=1.0, listed_s=3 * HOUR_S)
    assert ends(together(away, OTHER)) == []
    completed = {"completed": [one(POD, beat(HOUR_S, 3 * HOUR_S, T0 + HOUR_S))]}
    assert ends(together(away, OTHER, completed)) == [(1.25, 1.0)]


def test_while_the_exporter_that_lists_pods_is_silent_none_has_ended() -> None:
    gone = pod(POD["pod"], 0, HOUR_S, cores=1.0)
    silent = {role: rows for role, rows in OTHER.items() if role in ("cpu", "memory")}
    assert ends(together(gone, silent)) == []
    assert ends(together({role: gone[role] for role in ("cpu", "memory")}, silent)) == [(1.25, 1.0)]  # there is none


def test_a_task_that_came_back_ends_again() -> None:
    twice = together(
        pod(POD["pod"], 0, HOUR_S, cores=1.0),
        {role: rows for role, rows in pod(POD["pod"], 2 * HOUR_S, 2.5 * HOUR_S, cores=1.0).items()},
        OTHER,
    )
    assert ends(twice) == [(1.25, 1.0), (2.75, 2.5)]


def test_a_task_that_came_and_went_between_two_looks_has_ended_once_more() -> None:
    """The history on disk is looked at every two hours: at 2 h and at 4 h the task is gone, each time another end."""
    first, again = (pod(POD["pod"], start_s, start_s + HOUR_S / 2, cores=1.0) for start_s in (0, 5 * HOUR_S / 2))
    series = together(first, {role: again[role] for role in ("cpu", "memory")},
                      pod("cart-7d9f8b6c5x-other", 0, 4 * HOUR_S, cores=1.0))  # fmt: skip
    slots = live(series, 2 * PIECE_S, PIECE_S)
    assert [((slot.end_us / US - T0) / HOUR_S, (at_us / US - T0) / HOUR_S) for slot in slots
            for _, at_us in slot.ended] == [(2, 0.5), (4, 3)]  # fmt: skip


@pytest.mark.parametrize("step_s", [SLOT_S, 2100])
def test_a_failure_at_the_end_of_a_slot_is_said_once(step_s: int) -> None:
    series = together(
        pod(POD["pod"], 0, 2000, cores=1.0),
        {
            "restarts": [one({**APP, "uid": "1"}, [*beat(0, 610, 0.0), *beat(610, 2000, 1.0)])],
            "ended_time": [one({**APP, "uid": "1"}, beat(610, 2000, T0 + 600.0))],
        },
    )
    slots = live(series, 2100, step_s)
    assert [(slot.end_us / US - T0, at / US - T0) for slot in slots for _, at, _ in slot.failed] == [(600, 600)]


def test_a_run_that_failed_is_said_in_the_slot_in_which_it_is_known() -> None:
    series = together(
        pod(POD["pod"], 0, 2000, cores=1.0),
        {
            "restarts": [one({**APP, "uid": "1"}, [*beat(0, 620, 0.0), *beat(620, 2000, 1.0)])],
            "ended_reason": [one({**APP, "uid": "1", "reason": "OOMKilled"}, beat(620, 2000))],
            "ended_time": [one({**APP, "uid": "1"}, beat(620, 2000, T0 + 605.0))],
        },
    )
    slots = live(series, 2100)
    assert [(slot.end_us / US - T0, at / US - T0) for slot in slots for _, at, _ in slot.failed] == [(900, 605)]
    assert [(slot.end_us / US - T0, at / US - T0) for slot in live(series, 2100, 2100) for _, at, _ in slot.failed] == [
        (900, 605)
    ]


def test_the_tier_is_the_one_that_is_said_last() -> None:
    """A pod may be scraped before the exporter lists it."""
    series = pod(POD["pod"], 0, 3000, cores=1.0)
    late = {**series, "pod": [row for row in part_of({"pod": series["pod"]}, (T0 + 1000) * 1000, 1 << 60)["pod"]]}
    tiers = [row[s.TIER] for slot in live(late, 3000) for row in slot.windows.to_pylist()]
    assert tiers[:2] == [s.TIERS.index("prod")] * 2
    assert set(tiers[4:]) == {s.TIERS.index("mid")}


def test_the_first_window_has_the_amounts_that_are_said_after_its_end() -> None:
    """The exporter is scraped later than the usage: here in the next slot."""
    labels = {**APP, "resource": "memory"}
    series = pod(POD["pod"], 230, 3000, cores=1.0) | {
        "limit": [one(labels, beat(310, 3000, 2e9))],
        "request": [one(labels, beat(310, 3000, 1e9))],
    }
    whole, _, _ = fold(series)
    assert (whole[0][s.MEMORY_LIMIT], whole[0][s.MEMORY_REQUEST]) == (2e9, 1e9)
    first, *others = rows([slot.windows for slot in live(series, 3000)])
    assert (first[s.MEMORY_LIMIT], first[s.MEMORY_REQUEST]) == (2e9, 1e9)
    assert [first, *others] == whole[:10]


def test_a_pod_whose_owner_is_said_late_goes_on_as_the_task_that_it_is_in_an_ingest() -> None:
    """By its name alone it is a pod of its own; under that name it ends."""
    name = "agent-x7k2p"
    series = pod(name, 0, 3000, cores=1.0)
    named = {**APP, "pod": name, "created_by_kind": "DaemonSet", "created_by_name": "agent", "node": "n1"}
    series["pod"] = [one(named, beat(1000, 3000))]
    whole, _, _ = fold(series)
    slots = live(series, 3000)
    known = [row for slot in slots for row in slot.windows.to_pylist()]
    # the slot that ends at 900 s sees what is said until 960 s, the one that ends at 1200 s knows the owner
    assert {row[s.COLLECTION_ID] for row in known[:3]}.isdisjoint({row[s.COLLECTION_ID] for row in whole})
    assert known[3:] == whole[3:10]
    earlier = (known[0][s.COLLECTION_ID], known[0][s.INSTANCE_INDEX])
    assert [(slot.end_us / US - T0, slot.ended) for slot in slots if slot.ended] == [
        (1200, [(earlier, (T0 + 900) * US)])
    ]


def test_a_container_has_ended_when_others_of_its_pod_go_on_without_it() -> None:
    """An init container, or one that a rollout took out of a pod that keeps its name: the pod is listed still."""
    init = {**APP, "container": "init"}
    series = together(
        pod(POD["pod"], 0, 3 * HOUR_S, cores=1.0),
        {"cpu": [one(init, counter(0, 600, 1.0))], "memory": [one(init, beat(0, 600, 1e9))]},
    )
    # the window of the app that ends at 1500 s is the first that ends more than ten minutes after 600 s
    assert ends(series) == [(1500 / 3600, 600 / 3600)]


@pytest.mark.parametrize("step_s", [SLOT_S, 1800])
def test_a_failure_that_is_recorded_after_the_end_of_its_task_is_given_with_the_next_run_alone(step_s: int) -> None:
    """The exporter is silent while the container is killed, and until other containers of its pod have gone on."""
    side = {**APP, "container": "side"}
    killed = together(
        pod(POD["pod"], 0, 27 * HOUR_S, cores=1.0),
        {"cpu": [one(side, counter(0, 600, 1.0))], "memory": [one(side, beat(0, 600, 1e9))]},
        {"terminated": [one({**side, "uid": "1", "reason": "OOMKilled"}, beat(3000, 5000))]},
    )
    slots = live(killed, 27 * 3600, step_s)  # it is forgotten after a day
    assert [at_us / US - T0 for slot in slots for _, at_us in slot.ended] == [600]
    assert not any(slot.failed for slot in slots)
    again = {"cpu": [one(side, counter(5410, 7200, 1.0))], "memory": [one(side, beat(5410, 7200, 1e9))]}
    slots = live(together(killed, again), 7200, step_s)
    failed = [(slot.end_us / US - T0, at_us / US - T0, oom) for slot in slots for _, at_us, oom in slot.failed]
    assert failed == [(5700, 3000, True)]  # before the first window of the next run


def test_of_a_series_that_is_there_twice_one_counts_slot_by_slot() -> None:
    """The sum of both would be its usage; a copy that a second scrape job began to make restarts nothing."""
    alone = pod(POD["pod"], 0, 3000, cores=1.0)
    first, second = (APP | {"id": "/kubepods/1", "who": who} for who in ("one", "another"))
    alone["cpu"] = [one(first, counter(0, 3000, 1.0))]
    both = alone | {"cpu": [*alone["cpu"], one(second, counter(911, 3000, 1.0))]}
    (known, told), (expected, untold) = (
        ([row for slot in slots for row in slot.windows.to_pylist()], [(slot.failed, slot.ended) for slot in slots])
        for slots in (live(both, 3000), live(alone, 3000))
    )
    assert known == expected
    assert told == untold


def test_what_is_kept_of_a_container_that_restarts_all_the_time_is_bounded() -> None:
    """It restarts every five minutes for three days, and its pod comes again every six hours, on another node."""
    made, day_s = LiveFold(DIALECT), 24 * 3600
    for at in range(0, 3 * day_s, PIECE_S):
        parts: list[Piece] = []
        for k in range(24):
            start_s, end_s = at + 300 * k, at + 300 * k + 240
            uid = {"uid": str(at // 21_600)}
            parts.append({
                "cpu": [one({**APP, "id": str(start_s), "node": f"n{at}"}, counter(start_s, end_s, 1.0))],
                "started": [one(APP | uid, beat(start_s, end_s, T0 + start_s))],
                "restarts": [one(APP | uid, beat(start_s, end_s, at // 300 + k))],
                "allocatable": [one({"node": f"n{at}", "resource": "cpu"}, beat(start_s, end_s, 8.0))],
            })  # fmt: skip
        made.take(together(*parts), (T0 + at) * US, (T0 + at + PIECE_S) * US)
    (task,) = made.tasks().values()
    assert len(task.starts_us) == len(task.told_by) <= 288 + 1
    assert len(task.ends_us) <= 288 + 1
    assert len(task.places) <= 12 + 1
    assert len(task.restarts) <= 4 + 1
    assert len(made._fold._nodes) <= 12 + 1


@pytest.mark.parametrize(("days", "limit"), [(1, 8.0), (34, 8.0), (37, 0.25)])
def test_a_task_that_is_gone_for_a_day_is_forgotten_and_its_largest_usage_a_month_later(
    days: int, limit: float
) -> None:
    """Without an enforced limit, the limit is a power of two at or above twice the largest usage so far."""
    day_s = days * 24 * 3600
    early, late = pod("cart-7d9f8b6c5x-early", 0, HOUR_S, cores=3.0), pod("cart-7d9f8b6c5x-later", 0, HOUR_S, cores=0.1)
    made = LiveFold(DIALECT)
    live(early, 2 * 3600, 7200, made)
    assert len(made.tasks()) == 1
    shifted = {
        role: [type(row)(row.labels, row.time_ms + (day_s + PIECE_S) * 1000, row.value) for row in found]
        for role, found in late.items()
    }
    slots: list[Slot] = []
    for at in range(T0 + PIECE_S, T0 + day_s + 2 * PIECE_S, PIECE_S):
        slots += made.take(part_of(shifted, at * 1000, (at + PIECE_S) * 1000), at * US, (at + PIECE_S) * US)
    assert [task.key.pod for task in made.tasks().values()] == ["cart-7d9f8b6c5x-later"]
    limits = {row[s.CPU_LIMIT] for slot in slots for row in slot.windows.to_pylist()}
    assert limits == {limit}  # of 2 * 3 cores of the one that is forgotten, or of 2 * 0.1


def test_what_is_kept_of_jobs_and_scalers_that_come_once_is_bounded() -> None:
    """Every day another job and another scaler, for a hundred days."""
    made, day_s = LiveFold(DIALECT), 24 * 3600
    for k in range(100):
        at, job = k * day_s, {**APP, "pod": f"run-{k}-abcde"}
        scaler = {"namespace": f"preview-{k}", "horizontalpodautoscaler": "h"}
        made.take({
            "cpu": [one(job, counter(at, at + 600, 1.0))],
            "owner": [one({**job, "owner_kind": "Job", "owner_name": f"run-{k}"}, beat(at, at + 600))],
            "autoscaler": [one({**scaler, "scaletargetref_kind": "Deployment", "scaletargetref_name": "cart"},
                               beat(at, at + 600))],
            "autoscaler_target": [one({**scaler, "metric_name": "cpu", "metric_target_type": "utilization"},
                                      beat(at, at + 600))],
        }, (T0 + at) * US, (T0 + at + 600) * US)  # fmt: skip
    assert len(made._fold._largest) == 37
    assert len(made._owners.scalers) == len(made._owners.targets) == 1
