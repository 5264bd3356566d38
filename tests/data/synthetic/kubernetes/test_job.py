"""The synthetic Kubernetes history: the same options give the same bytes, and its text is what a scraper has."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from reclaim.data.errors import ConfigError
from reclaim.data.synthetic.kubernetes.job import (
    END,
    MANIFEST,
    TRUE_ENDS,
    TRUE_WINDOWS,
    SyntheticHistoryConfig,
    _table,
    write_history,
)
from reclaim.data.synthetic.kubernetes.scrapes import TrueWindow
from reclaim.data.traces.history import moment_s
from tests.folders import killed_with_the_folder_in_place

CONFIG = SyntheticHistoryConfig(machines=2, days=0.25, seed=3, tasks_per_machine=8)
_LINE = re.compile(r"[a-z_]+\{([a-z_]+=\"[^\"]*\",?)+\} [0-9.]+ [0-9]+\.[0-9]{3}")


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with six hours of a small cluster."""
    out = tmp_path_factory.mktemp("made-up") / "cluster"
    assert write_history(out, CONFIG).wrote
    return out


def test_the_same_options_give_the_same_bytes_and_others_do_not(history: Path, tmp_path: Path) -> None:
    write_history(tmp_path / "again", CONFIG)
    for path in history.iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes(), path.name
    assert not write_history(history, CONFIG).wrote
    with pytest.raises(ConfigError, match="something other than this history"):
        write_history(history, SyntheticHistoryConfig(machines=2, days=0.25, seed=4, tasks_per_machine=8))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("x")
    with pytest.raises(ConfigError, match="something other than this history"):
        write_history(tmp_path / "mine", CONFIG)
    with pytest.raises(ConfigError, match=r"--end: expected a time such as 2026-11-02 .* got 'soon'"):
        SyntheticHistoryConfig(end="soon")
    with pytest.raises(ConfigError, match="days must be above 0"):
        SyntheticHistoryConfig(days=0)
    with pytest.raises(ConfigError, match=r"days must be at least 0\.0416667, got 1e-09"):
        SyntheticHistoryConfig(days=1e-9)
    with pytest.raises(ConfigError, match="seed must be at least 0, got -1"):
        SyntheticHistoryConfig(seed=-1)


def test_a_run_after_one_killed_with_the_cluster_in_place_removes_what_that_one_left_next_to_it(tmp_path: Path) -> None:
    with killed_with_the_folder_in_place(), pytest.raises(KeyboardInterrupt):
        write_history(tmp_path / "cluster", CONFIG)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cluster", "cluster.partial"]
    assert not write_history(tmp_path / "cluster", CONFIG).wrote
    assert [p.name for p in tmp_path.iterdir()] == ["cluster"]


@pytest.mark.parametrize("seed", [25, 27, 29])
def test_a_pod_that_is_replaced_just_before_the_end_is_not_seen_after_it(seed: int, tmp_path: Path) -> None:
    config = SyntheticHistoryConfig(machines=2, days=1 / 24, seed=seed, tasks_per_machine=12)
    assert write_history(tmp_path / "short", config).containers > 0
    assert [path.name for path in (tmp_path / "short").glob("*.om")] == ["2026-11-01.om"]


def test_every_line_is_a_sample_of_the_range_and_the_text_ends(history: Path) -> None:
    (text,) = history.glob("*.om")
    assert text.name == "2026-11-01.om"
    *lines, end = text.read_text().splitlines()
    assert end == "# EOF"
    assert all(_LINE.fullmatch(line) for line in lines)
    times = [float(line.rsplit(" ", 1)[1]) for line in lines]
    past_s = moment_s(END)
    assert past_s - 6 * 3600 <= min(times) < max(times) < past_s
    metrics = {line.partition("{")[0] for line in lines}
    assert metrics >= {
        "container_cpu_usage_seconds_total", "container_memory_working_set_bytes", "kube_pod_owner", "kube_job_owner",
        "kube_replicaset_owner", "kube_pod_container_resource_requests", "kube_node_status_allocatable",
        "kube_horizontalpodautoscaler_info", "kube_pod_container_status_restarts_total", "reclaim_synthetic_history",
    }  # fmt: skip


def test_a_history_may_end_at_any_time(tmp_path: Path) -> None:
    write_history(tmp_path / "other", replace(CONFIG, end="2026-11-28T01:00"))
    assert {path.name for path in (tmp_path / "other").glob("*.om")} == {"2026-11-27.om", "2026-11-28.om"}


def test_a_container_that_was_scraped_and_has_no_window_is_of_no_other_columns(history: Path) -> None:
    """One that ran for seconds; a large cluster has some."""
    none = np.zeros(0)
    empty = _table(("shop", "cart", "app"), TrueWindow(none.astype(np.int64), *[none] * 5))
    assert empty.schema.equals(pq.read_schema(history / TRUE_WINDOWS))


def test_a_counter_never_falls_and_the_truth_is_beside_the_text(history: Path) -> None:
    values: dict[str, float] = {}
    (text,) = history.glob("*.om")
    for line in text.read_text().splitlines():
        if line.startswith("container_cpu"):
            name, value, _ = line.rsplit(" ", 2)
            assert float(value) >= values.get(name, 0.0)
            values[name] = float(value)
    windows = pq.read_table(history / TRUE_WINDOWS)
    assert len(windows) > 500
    assert {"pod", "time_s", "reason"} <= set(pq.read_table(history / TRUE_ENDS).column_names)
    assert "Made up" in (history / MANIFEST).read_text()
