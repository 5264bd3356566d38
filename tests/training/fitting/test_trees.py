"""Boosted survival: which pairs of a row and a step the trees are fitted to, and that they learn the curve."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from sklearn.ensemble import HistGradientBoostingClassifier

from reclaim.features.registry import N_FEATURES
from reclaim.features.targets import HORIZONS_S, TARGETS
from reclaim.training.fitting.trees import binnable, boosted, fit_trees, step_pairs
from reclaim.training.models.survival import NOW
from reclaim.training.models.trees import Rows
from reclaim.training.settings import TreeConfig

NAN = float("nan")


def test_a_row_is_a_pair_with_every_step_it_passed_and_with_the_first_it_did_not() -> None:
    thresholds = np.tile(np.array([0.2, 0.5, 1.0], np.float32), (4, 1))
    y = np.array([0.3, NAN, 0.2, 1.5], np.float32)  # passes one step; unknown; none, for it equals it; all
    row, step, passed = step_pairs(y, thresholds, 100, seed=1)
    assert row.tolist() == [0, 0, 2, 3, 3, 3]
    assert step.tolist() == [0, 1, 0, 0, 1, 2]
    assert passed.tolist() == [1, 0, 0, 1, 1, 1]


def test_of_too_many_pairs_a_seeded_choice_is_taken() -> None:
    thresholds = np.tile(np.array([0.2, 0.5, 1.0], np.float32), (50, 1))
    y = np.linspace(0, 1, 50, dtype=np.float32)

    def pairs(most: int, seed: int) -> list[tuple[int, int]]:
        row, step, _ = step_pairs(y, thresholds, most, seed)
        return list(zip(row.tolist(), step.tolist(), strict=True))

    some = pairs(20, seed=1)
    assert len(set(some)) == 20
    assert set(some) < set(pairs(1_000, seed=1))
    assert some == pairs(20, seed=1) != pairs(20, seed=2)


@pytest.mark.parametrize("seed", range(8))
def test_trees_with_bins_found_at_once_are_those_of_scikit_learn_to_the_bit(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = 3_000
    many = rng.lognormal(size=(n, 3))
    columns = [
        *many.T, np.round(many[:, 0], 1), rng.integers(0, 9, n), rng.integers(0, 2, n), np.ones(n),
        np.where(rng.random(n) < 0.9, 0.0, many[:, 1]),  # most in one bin
        np.where(rng.random(n) < 0.5, 2.0, rng.integers(0, 600, n)),
        np.where(np.arange(n) == 7, 1e30, rng.integers(0, 256, n)),  # a value more than there are bins
        np.where(rng.random(n) < 0.3, 64.0, rng.random(n) * 64.0),  # the largest value fills the last bins
    ]  # fmt: skip
    x = np.stack(columns, axis=1).astype(np.float32)
    x[rng.random(n) < 0.3, 10] = NAN
    x[:, :7][rng.random((n, 7)) < 0.2] = NAN
    x[rng.random(n) < 0.9, 4] = NAN
    known = np.nan_to_num(x[:, 0]) + np.nan_to_num(x[:, 4]) + (x[:, 8] > 40) + 2 * np.isfinite(x[:, 10])
    y = known + rng.normal(size=n) > 3.5
    weight = rng.choice([1.0, 4.0, 10.0, 0.7, 77.3] if seed % 2 else [1.0], n).astype(np.float32)

    def blank() -> HistGradientBoostingClassifier:
        return HistGradientBoostingClassifier(
            max_iter=20,
            max_leaf_nodes=9,
            min_samples_leaf=20,
            max_features=0.5,
            early_stopping=False,
            random_state=seed,
        )

    assert same_trees(blank, x, y, weight) > 80


def test_where_a_bin_is_empty_a_split_stands_at_its_lower_bound_as_in_scikit_learn() -> None:
    # 2,550 rows in 255 bins of ten: twenty of value 0 fill the first, and the second, which begins above 0, is empty
    x = np.maximum(np.arange(2_550) - 19, 0).astype(np.float32)[:, None]
    x = np.random.default_rng(1).permutation(x)
    y = x[:, 0] > 0

    def blank() -> HistGradientBoostingClassifier:
        return HistGradientBoostingClassifier(max_iter=3, min_samples_leaf=20, early_stopping=False)

    assert same_trees(blank, x, y, np.ones(len(x), np.float32)) > 0


def same_trees(
    blank: Callable[[], HistGradientBoostingClassifier], x: np.ndarray, y: np.ndarray, weight: np.ndarray
) -> int:
    """Compare trees with those of scikit-learn; return the number of their splits."""
    ours, theirs = boosted(blank(), x, y, weight), blank().fit(x, y, sample_weight=weight)
    inner = 0
    for (tree,), (other,) in zip(ours._predictors, theirs._predictors, strict=True):
        for name in set(tree.nodes.dtype.names) - {"bin_threshold"}:
            np.testing.assert_array_equal(tree.nodes[name], other.nodes[name], name)
        inner += int((tree.nodes["is_leaf"] == 0).sum())
    np.testing.assert_array_equal(ours.predict_proba(x), theirs.predict_proba(x))
    return inner


def test_trees_learn_how_often_each_threshold_is_exceeded() -> None:
    # half of the tasks go on as they are, the others double: of those that use 0.2 half exceed 0.3, none exceeds 0.5
    rng = np.random.default_rng(0)
    x = rng.random((2_000, N_FEATURES)).astype(np.float32)
    x[:, NOW] = 0.2
    y = np.full((2_000, len(TARGETS), len(HORIZONS_S)), NAN, np.float32)
    y[:, 0, 1] = np.where(rng.random(2_000) < 0.5, 0.2, 0.4)
    oom = np.zeros((2_000, len(HORIZONS_S)), np.float32)
    trees = fit_trees(Rows(x, y, oom), TreeConfig(iterations=30, min_leaf=50), horizon_s=3_600, seed=1)
    forecast = trees.predict(x, 3_600)
    curve, thresholds = forecast.survival[:, 0, 0].mean(axis=0), forecast.thresholds[0, 0]
    between = (thresholds >= np.float32(0.2)) & (thresholds < 0.4)
    assert curve[thresholds < np.float32(0.2)].min() > 0.97
    assert curve[between] == pytest.approx(0.5, abs=0.05)
    assert curve[thresholds > 0.4].max() < 0.02


def test_trees_count_rows_by_their_weight() -> None:
    # half of the tasks double and meet an end, and each of these counts for three of the others: three of four
    x, doubled = np.zeros((2_000, N_FEATURES), np.float32), np.arange(2_000) % 2 == 1
    x[:, NOW] = 0.2
    y = np.full((2_000, len(TARGETS), len(HORIZONS_S)), NAN, np.float32)
    y[:, 0, 1] = np.where(doubled, 0.4, 0.2)
    oom = np.repeat(doubled.astype(np.float32)[:, None], len(HORIZONS_S), axis=1)
    rows = Rows(x, y, oom, np.where(doubled, 3, 1).astype(np.float32))
    trees = fit_trees(rows, TreeConfig(iterations=30, min_leaf=50), horizon_s=3_600, seed=1)
    forecast = trees.predict(x, 3_600)
    curve, thresholds = forecast.survival[:, 0, 0].mean(axis=0), forecast.thresholds[0, 0]
    between = (thresholds >= np.float32(0.2)) & (thresholds < 0.4)
    assert curve[between] == pytest.approx(0.75, abs=0.05)
    assert forecast.oom_probability.mean() == pytest.approx(0.75, abs=0.05)


def test_a_feature_is_kept_where_a_leaf_of_rows_knows_it() -> None:
    x = np.full((1_000, 3), NAN, np.float32)
    x[:20, 0], x[:19, 1] = 1.0, 1.0
    kept = binnable(x, least=20)
    np.testing.assert_array_equal(kept[:, 0], x[:, 0])
    assert (kept[:, 1:] == 0).all()


def test_of_many_rows_more_must_know_a_feature_than_a_leaf_has() -> None:
    x = np.full((1_000_000, 2), NAN, np.float32)
    x[:199, 0], x[:200, 1] = 1.0, 1.0
    assert np.isnan(binnable(x, least=1)).any(axis=0).tolist() == [False, True]


def test_a_feature_that_hardly_any_row_knows_does_not_stop_the_fit() -> None:
    rng = np.random.default_rng(0)
    x = rng.random((500, N_FEATURES)).astype(np.float32)
    x[:, NOW] = 0.2
    y = np.full((500, len(TARGETS), len(HORIZONS_S)), NAN, np.float32)
    y[100:, 0, 1] = np.where(rng.random(400) < 0.5, 0.2, 0.4)
    oom = np.full((500, len(HORIZONS_S)), NAN, np.float32)
    oom[100:, 1] = rng.random(400) < 0.2
    x[100:, 0] = NAN  # known in no row with a target
    x[101:, 1] = NAN  # in one
    trees = fit_trees(Rows(x, y, oom), TreeConfig(iterations=3, min_leaf=20), horizon_s=3_600, seed=1)
    assert np.isfinite(trees.predict(x, 3_600).survival[:, 0, 0]).all()
