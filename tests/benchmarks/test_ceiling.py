"""The ceiling: no model judges what it saw, and the table says the share of the way."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.ceiling import RESULTS, TREES, groups_of, table
from reclaim.replay.open_loop.paired import RECLAIMED

S = 1_000_000


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32), n=st.integers(2, 300), folds=st.integers(2, 5), blocks=st.integers(1, 9),
    horizon_s=st.sampled_from([300, 3_600, 86_400]),
)  # fmt: skip
def test_no_model_is_fitted_on_a_row_of_the_same_task_whose_hour_touches_one_that_it_judges(
    seed: int, n: int, folds: int, blocks: int, horizon_s: int
) -> None:
    rng = np.random.default_rng(seed)
    task, end_us = rng.integers(0, 9, n), rng.integers(0, 7 * 86_400, n) * S
    own, near = groups_of(task, end_us, horizon_s, folds=folds, blocks=blocks)
    assert ((own >= 0) & (own < folds)).all()
    for k in range(n):
        fitted = (near != own[k]).all(axis=1)
        assert not fitted[k]
        same_task = np.abs(end_us[fitted & (task == task[k])] - end_us[k])
        assert (same_task > horizon_s * S).all()


def test_every_task_block_is_left_out_once_and_every_model_is_fitted_on_other_hands() -> None:
    task, block = np.divmod(np.arange(6 * 7 * 100), 7 * 100)
    end_us = block * 864 * S  # seven days of 100 rows each
    own, near = groups_of(task, end_us, 3_600)
    day = block // 100
    for k in range(6):
        of = [set(own[(task == k) & (day == d)].tolist()) for d in range(7)]
        assert [len(groups) for groups in of] == [1] * 7  # a task-block has one judge
        assert len(set.union(*of)) == 3  # and each judge some blocks of every task
    for group in range(3):
        fitted = (near != group).all(axis=1)
        assert 0.55 < fitted.mean() < 2 / 3
        assert {*task[fitted].tolist()} == {*range(6)}


def test_no_block_is_shorter_than_the_horizon() -> None:
    end_us = np.arange(0, 36, 1) * 3_600 * S  # a day and a half
    own, _ = groups_of(np.zeros(36, np.int64), end_us, 86_400)
    assert np.flatnonzero(np.diff(own)).tolist() == [23]


def test_the_share_of_the_way_goes_from_the_best_statistical_estimator_to_the_ceiling() -> None:
    where = {"horizon_s": 3_600, "resource": "cpu", "budget": "1 %"}
    content = {
        "datasets": {
            "a": {"name": "one", "lines": [{**where, "ceiling": {RECLAIMED: [0.75, 0.7, 0.8]}, "oracle": 0.85}]},
            "b": {"name": "two", "lines": [{**where, "ceiling": {RECLAIMED: [0.5, 0.4, 0.6]}, "oracle": 0.9}]},
        }
    }
    found = {"network": 0.7, "borg": 0.5, "vpa (published)": 0.6, "oracle": 0.85, "limit": 0.0, "trees": 0.74}
    lines = [
        {**where, "collections": "all", "margin_set": "hindsight", "estimator": name, RECLAIMED: [share]}
        for name, share in found.items()
    ]
    other = [{**line, "margin_set": "validation", RECLAIMED: [0.9]} for line in lines]
    one, two = list(table(content, [{"dataset": {"fingerprint": "a"}, "estimators": lines + other}]))[2:]
    assert one == (
        "| one | 1 hour | cpu | 1 % | 60.0% (vpa (published)) | 70.0% | 75.0% [70.0%, 80.0%] | 85.0% | 0.67 |"
    )
    assert two == "| two | 1 hour | cpu | 1 % | - | - | 50.0% [40.0%, 60.0%] | 90.0% | - |"


def test_the_page_says_how_many_pairs_a_model_of_the_ceiling_takes() -> None:
    content = json.loads((RESULTS / "ceiling.json").read_text())
    taken = {line["trees"]["max_pairs"] for of in content["datasets"].values() for line in of["lines"]}
    assert taken == {TREES.max_pairs}
    page = (Path(__file__).resolve().parents[2] / "docs" / "results.md").read_text()
    assert f"at most {TREES.max_pairs:,} pairs" in page.partition("\n## Ceiling\n")[2].partition("\n## ")[0]


def test_the_page_has_the_ceilings_of_more_pairs_next_to_those_of_the_table() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "results.md").read_text()
    section = page.partition("\n## Ceiling\n")[2].partition("\n## ")[0]
    few, many = (
        json.loads((RESULTS / name).read_text())["datasets"] for name in ("ceiling.json", "ceiling-pairs.json")
    )
    for dataset, of in many.items():
        for line in of["lines"]:
            where = ("horizon_s", "resource", "budget")
            (other,) = (one for one in few[dataset]["lines"] if all(one[key] == line[key] for key in where))
            assert line["trees"] == other["trees"] | {"max_pairs": 2_000_000, "threads": 2}
            fewer, more = (100 * one["ceiling"][RECLAIMED][0] for one in (other, line))
            assert f"| {line['resource']} | {line['budget']} | {fewer:.1f} | {more:.1f} |" in section
