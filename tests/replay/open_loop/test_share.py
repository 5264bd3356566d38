"""Judging a share of a large cell: whole machines, the same answers as of everything, and that it is said."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reclaim.data.dataset import Dataset
from reclaim.data.errors import ConfigError, HistoryTooShortError
from reclaim.data.schema import UNKNOWN_ID
from reclaim.data.windows import Windows, empty_windows
from reclaim.features.feature_set import FeatureSet
from reclaim.features.splits import TEST, TRAIN, VALID
from reclaim.replay.closed_loop.workload import NoMachinesError, machines_of
from reclaim.replay.experiment import Source
from reclaim.replay.experiments.margins.measure import EXPERIMENT, MarginsConfig
from reclaim.replay.open_loop import fold as folding
from reclaim.replay.open_loop.estimates import Estimates, estimate_all
from reclaim.replay.open_loop.share import WHOLE, Share
from reclaim.replay.runs.run import run_experiment
from reclaim.replay.settings import ReplayConfig
from reclaim.training.estimators.base import Estimator
from reclaim.training.margins.answers import Widened

MACHINES = np.arange(4)


def judged(features: FeatureSet) -> int:
    return sum(sum(features.manifest["rows"][period].values()) for period in ("valid", "test"))


@pytest.fixture(scope="module")
def moving(cell_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return that dataset with tasks that move to the next of the four machines every ten windows."""
    moved = tmp_path_factory.mktemp("moving") / "moving"
    shutil.copytree(cell_dataset, moved)
    for file in (moved / "usage").iterdir():
        table = pq.read_table(file)
        windows = (table["start_us"].to_numpy() // 300_000_000) // 10
        at = table.schema.get_field_index("machine_id")
        column = pa.array((table["machine_id"].to_numpy() + windows) % 4, table.schema.field(at).type)
        pq.write_table(table.set_column(at, table.schema.field(at), column), file)
    return moved


def test_of_a_task_that_moves_the_windows_on_other_machines_are_not_judged(moving: Path) -> None:
    features, share = FeatureSet.open(moving), Share(0.5)
    kept, _ = folding.fold_dataset(features, 3600, {}, {}, share=share)
    whole, _ = folding.fold_dataset(features, 3600, {}, {})
    assert share.machines(kept.windows.machine_id).all()
    judged = (whole.period != TRAIN) & share.machines(whole.windows.machine_id)
    np.testing.assert_array_equal(kept.source_row[kept.period != TRAIN], whole.source_row[judged])
    follows = kept.previous >= 0
    assert (kept.source_row[follows] - kept.source_row[kept.previous[follows]] == 1).all()
    assert 0 < (~follows).sum() < len(kept)


@pytest.fixture(scope="module")
def some(cell_dataset: Path) -> tuple[Estimates, Estimates]:
    """Return estimates of all four machines, and of about half of the rows."""
    source = Source(Dataset.open(cell_dataset), FeatureSet.open(cell_dataset), {})
    half = judged(source.features) // 2
    asked = ReplayConfig(estimators=("borg", "limit"), tune=False)
    few = ReplayConfig(estimators=("borg", "limit"), tune=False, judged_rows=half)
    return estimate_all(source, asked), estimate_all(source, few)


def test_a_small_cell_is_judged_whole(some: tuple[Estimates, Estimates]) -> None:
    assert some[0].period.share == WHOLE
    assert some[1].period.share == Share(0.5)
    assert 0 < Share(0.5).machines(MACHINES).sum() < len(MACHINES), "or these tests say little"


def test_all_rows_of_the_machines_of_a_share_are_judged_and_answered_as_among_all(
    some: tuple[Estimates, Estimates],
) -> None:
    whole, few = some
    kept = np.flatnonzero(np.isin(whole.history.source_row, few.history.source_row))
    mine = few.period.share.machines(whole.history.windows.machine_id)
    np.testing.assert_array_equal(whole.history.source_row[kept], whole.history.source_row[mine])
    for name, answers in few.answers.items():
        of = whole.answers[name].take(kept)
        assert isinstance(answers, Widened)
        assert isinstance(of, Widened)
        np.testing.assert_array_equal(answers.of["baseline"].reservation, of.of["baseline"].reservation)
    np.testing.assert_array_equal(few.history.target, whole.history.target[kept])
    np.testing.assert_array_equal(np.unique(few.history.period), [TRAIN, VALID, TEST])


def test_machines_of_a_share_are_those_of_its_rows_and_no_others_have_room(
    some: tuple[Estimates, Estimates], cell_dataset: Path
) -> None:
    few, dataset = some[1], Dataset.open(cell_dataset)
    slots = few.period.slots
    on = machines_of(dataset, slots.first_us, slots.stop_us, few.period.share)
    np.testing.assert_array_equal(on.ids, np.unique(few.history.windows.machine_id))
    assert few.period.whole_is_capacity
    np.testing.assert_array_equal(few.period.whole, len(on) * np.array([8.0, 16.0]))


def test_a_share_without_a_machine_says_which_setting_to_raise(cell_dataset: Path) -> None:
    source = Source(Dataset.open(cell_dataset), FeatureSet.open(cell_dataset), {})
    with pytest.raises(HistoryTooShortError, match=r"no task-window to judge on .* of the machines; raise judged_rows"):
        estimate_all(source, ReplayConfig(estimators=("borg", "limit"), tune=False, judged_rows=1))
    with pytest.raises(NoMachinesError, match=r"none of 5 machines .* judged, .* raise judged_rows"):
        machines_of(source.dataset, 0, 10**12, Share(1e-9))


def test_tasks_without_a_row_that_is_judged_are_passed_over(
    cell_dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[np.ndarray] = []
    run = folding.run_base

    def recorded(estimator: Estimator, windows: Windows) -> object:
        seen.append(np.unique(windows.machine_id))
        return run(estimator, windows)

    monkeypatch.setattr(folding, "run_base", recorded)
    source = Source(Dataset.open(cell_dataset), FeatureSet.open(cell_dataset), {})
    rows = judged(source.features) // 2
    estimate_all(source, ReplayConfig(estimators=("borg",), tune=False, judged_rows=rows))
    assert Share(0.5).machines(np.unique(np.concatenate(seen))).all()


@given(st.lists(st.integers(-1, 50), min_size=1, max_size=60), st.floats(0, 1))
def test_a_machine_is_judged_whole_or_not_at_all_and_a_larger_share_has_all_of_a_smaller(
    machines: list[int], share: float
) -> None:
    windows = empty_windows(len(machines))
    windows.machine_id[:] = [UNKNOWN_ID if m < 0 else m for m in machines]
    windows.collection_id[:] = np.arange(len(machines))
    rows, known = Share(share).rows(windows), windows.machine_id != UNKNOWN_ID
    np.testing.assert_array_equal(rows[known], Share(share).machines(windows.machine_id[known]))
    assert WHOLE.rows(windows).all()
    assert (Share((1 + share) / 2).rows(windows) | ~rows).all()


def test_the_results_say_what_share_of_the_machines_was_judged(cell_dataset: Path, tmp_path: Path) -> None:
    rows = judged(FeatureSet.open(cell_dataset)) // 2
    config = MarginsConfig(estimators=("borg", "limit"), tune=False, judged_rows=rows, draws=20, orders=1)
    report = run_experiment(EXPERIMENT, cell_dataset, tmp_path / "out", config, tracking=False)
    assert report.results["dataset"]["share_of_machines"] == 0.5
    assert 0 < report.results["dataset"]["machines"] < 4
    assert report.results["closed_loop"]["machines"] == report.results["dataset"]["machines"]
    assert "judged, of the machines" in report.page.read_text()


def test_a_bound_below_one_row_is_refused() -> None:
    with pytest.raises(ConfigError, match="judged_rows must be at least 1, got 0"):
        ReplayConfig(judged_rows=0)
