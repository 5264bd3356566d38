"""Ends that a Kubernetes history records reach a service that is fed as they reach features in batch."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from pathlib import Path

import numpy as np
import pytest

from reclaim.data.ingest.job import IngestConfig, ingest
from reclaim.data.oom import oom_columns, oom_events
from reclaim.data.traces.kubernetes.live import LiveFold
from reclaim.data.windows import Windows, concatenate
from reclaim.features.fold.batch import FeatureState
from reclaim.features.registry import AT
from reclaim.serving.feed.rows import failures_of, usage_of
from reclaim.serving.settings import ServingSettings
from reclaim.serving.wire import rows
from reclaim.serving.wire.arrow import write_table
from reclaim.training.bundle import Bundle
from tests.data.traces.kubernetes.histories import APP, DIALECT, T0, Piece, Samples, beat, one, write_history
from tests.data.traces.kubernetes.test_live import live, pod, together
from tests.serving.cell_fixtures import Memory, by_slot

LIMIT = 4e9
"""Memory limit of ``pod``."""
Run = tuple[float, float, str | None]
"""End of a run in seconds, share of the limit that its memory has, and the reason that is recorded; None: none is."""


def scraped(low_s: float, high_s: float, value: float) -> Samples:
    """Return samples of one value, every whole half minute from one time until another."""
    return beat(30 * ceil(low_s / 30), high_s, value)


def restarting(name: str, runs: Sequence[Run], end_s: int) -> Piece:
    """Return what is scraped of a pod whose container starts again ten seconds after each end."""
    labels = {**APP, "pod": name}
    starts = [0.0, *(at + 10 for at, _, _ in runs)]
    ends = [*(at for at, _, _ in runs), end_s]
    shares = [*(share for _, share, _ in runs), 0.2]
    lives = list(zip(starts, ends, strict=True))
    found = pod(name, 0, end_s, cores=0.5)
    found["memory"] = [one(labels, [sample for (low, high), share in zip(lives, shares, strict=True)
                                    for sample in scraped(low, high, share * LIMIT)])]  # fmt: skip
    found["started"] = [one(labels, [sample for low, high in lives for sample in scraped(low, high, T0 + low)])]
    counts = [sample for k, (low, high) in enumerate(lives) for sample in scraped(low, high, float(k))]
    found["restarts"] = [one({**labels, "uid": name}, counts)]
    after = list(zip(runs, lives[1:], strict=True))
    found["ended_time"] = [
        one({**labels, "uid": name}, [v for run, (low, high) in after for v in scraped(low, high, T0 + run[0])])
    ]
    reasons = sorted({reason for _, _, reason in runs if reason})
    found["ended_reason"] = [
        one({**labels, "uid": name, "reason": reason},
            [v for run, (low, high) in after for v in scraped(low, high, float(run[2] == reason))])
        for reason in reasons
    ]  # fmt: skip
    return found


SAID = restarting("cart-7d9f8b6c5x-aaaaa", [
    (1_185, 0.3, "OOMKilled"), (2_140, 0.995, "Error"), (3_595, 0.995, "OOMKilled"), (4_700, 0.3, "Error"),
], 7_200)  # fmt: skip
UNSAID = restarting("cart-7d9f8b6c5x-bbbbb", [(1_315, 0.995, None), (3_000, 0.3, None)], 7_200)
SERIES = together(SAID, UNSAID)


def whole(dataset_folder: Path, history: Path) -> tuple[Windows, int]:
    """Return the windows of an ingest, and the number of out-of-memory ends by the label."""
    dataset = ingest(history, dataset_folder, IngestConfig(trace="kubernetes")).dataset
    buckets = [dataset.windows(bucket) for bucket in range(dataset.n_buckets)]
    events = (dataset.events(bucket, oom_columns(dataset.manifest)) for bucket in range(dataset.n_buckets))
    labels = sum(len(oom_events(w, e)[0]) for w, e in zip(buckets, events, strict=True) if len(w))
    return concatenate(buckets), labels


def test_features_live_are_those_of_batch_to_the_bit_with_kills_below_the_limit_and_other_ends_at_it(
    bundle: Bundle, tmp_path: Path
) -> None:
    windows, labels = whole(tmp_path / "dataset", write_history(tmp_path / "history", SERIES, 1))
    assert labels == 3
    memory = Memory(ServingSettings(), bundle)
    state, tasks = FeatureState(memory.settings.cell), dict[tuple[int, int], int]()
    made = LiveFold(DIALECT)
    slots = live(SERIES, 7_200, made=made)
    expected = list(by_slot(windows))
    fed = [slot for slot in slots if slot.windows.num_rows]
    assert len(expected) == len(fed) > 20
    names = made.tasks()
    for part, slot in zip(expected, fed, strict=True):
        failures = failures_of(slot)
        if failures.num_rows:
            told = rows.facts_from_arrow(bytes(write_table(failures.combine_chunks())), 1_000)
            assert not told.refusals.counts
            memory.tell(told)
        memory.write(rows.usage_from_arrow(bytes(write_table(usage_of(slot, names).combine_chunks())), 1_000).windows)
        key = np.column_stack([part.collection_id, part.instance_index])
        for name in map(tuple, key.tolist()):
            tasks.setdefault(name, len(tasks))
        x = state.advance(np.array([tasks[name] for name in map(tuple, key.tolist())]), part)
        last = {name: k for k, name in enumerate(map(tuple, key.tolist()))}
        ours = memory.tracker.look(np.array(list(last)), with_x=True).x
        assert ours is not None
        assert np.array_equal(ours, x[list(last.values())], equal_nan=True)
    assert ours is not None
    derived, recorded = 1.0, np.log2(3.0)  # one end; two
    assert sorted(ours[:, AT.ooms].tolist()) == pytest.approx([derived, recorded])
