"""The out-of-memory model is fitted to rows chosen by weight, and learns what announces an end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from numpy.typing import NDArray

from reclaim.data import schema as s
from reclaim.features.registry import AT, FIRST_RELATED
from reclaim.features.splits import GROUPS, PERIODS, SEEN, TEST, TRAIN, VALID
from reclaim.features.targets import HORIZONS_S
from reclaim.training.fitting.oom_fit import FEWEST, FOLDS, choose, fit_oom, folds_of, rows_of

H = len(HORIZONS_S)
ONE_OF_EACH_FOLD = (3, 0, 1)
"""Collections."""


def source(x: NDArray[np.float32], oom: NDArray[np.float32]) -> Any:
    """Return all that a fit asks of a source: every row is of training, and every third of one collection."""
    n = len(x)
    features = SimpleNamespace(
        x=x,
        row=np.arange(n),
        weight=np.ones(n, np.float32),
        targets=lambda rows: (None, oom[rows]),
        period=np.full(n, TRAIN),
        group=np.full(n, SEEN),
        by_bucket=lambda rows: [(0, rows)],
        manifest={"rows": {"valid": dict.fromkeys(GROUPS, 0)}},
    )
    collections = pa.table({s.COLLECTION_ID: np.array(ONE_OF_EACH_FOLD)[np.arange(n) % FOLDS]})
    return SimpleNamespace(features=features, dataset=SimpleNamespace(usage=lambda *_: collections))


def cell(n: int, seed: int = 0, rare: float = 0.004) -> Any:
    """Return rows of which those above 97 % of the limit meet an end within the hour, rarely."""
    rng = np.random.default_rng(seed)
    x = np.zeros((n, FIRST_RELATED), np.float32)
    x[:, AT.memory_mean_2h] = rng.random(n)
    x[:, AT.memory_last] = np.where(rng.random(n) < rare, rng.uniform(0.97, 1, n), rng.uniform(0, 0.97, n))
    oom = np.repeat((x[:, AT.memory_last] >= 0.97).astype(np.float32)[:, None], H, axis=1)
    return source(x, oom)


def test_rows_before_an_end_are_all_kept_and_the_weights_add_up_to_the_rest() -> None:
    rng, n = np.random.default_rng(3), 60_000
    x = rng.random((n, FIRST_RELATED)).astype(np.float32)
    x[:, [AT.ooms, AT.collection_ooms]] = rng.random((n, 2)) < 0.01
    oom = (rng.random((n, H)) < 0.003).astype(np.float32)
    oom[:, 0] = np.minimum(oom[:, 0], oom[:, 1])
    oom[rng.random(n) < 0.1] = np.nan
    chosen = choose(source(x, oom), np.arange(n), seed=1)
    soon = (oom[:, :2] == 1).any(axis=1)
    kept_soon = (chosen.oom[:, :2] == 1).any(axis=1)
    assert kept_soon.sum() == soon.sum()
    assert (chosen.weight[kept_soon] == 1).all()
    assert np.isfinite(chosen.oom).all()
    assert sorted(set(chosen.weight.tolist())) == [1.0, 4.0, 10.0, 50.0]
    assert chosen.weight.sum() == pytest.approx(np.isfinite(oom).all(axis=1).sum(), rel=0.05)


def test_all_is_learned_from_that_no_test_is_made_on() -> None:
    groups = np.arange(len(GROUPS))
    every = np.array([(period, group) for period in (TRAIN, VALID, TEST) for group in groups])
    features: Any = SimpleNamespace(period=every[:, 0], group=every[:, 1])
    learned = {(PERIODS[p], GROUPS[g]) for p, g in every[rows_of(features)]}
    assert learned == {(p, g) for p in ("train", "valid") for g in ("seen", "valid-unseen", "in-alloc")}


def test_validation_rows_stand_for_all_of_their_period() -> None:
    few = cell(4_000, rare=0.05)
    few.features.period[2_000:] = VALID
    few.features.manifest["rows"]["valid"] = {"seen": 5_000, "valid-unseen": 1_000, "test-unseen": 700, "in-alloc": 0}
    few.features.weight[:2_000] = 2
    chosen = choose(few, np.arange(4_000), seed=1)
    met = few.features.targets(slice(None))[1][:, 1] == 1
    assert (chosen.weight[: met[:2_000].sum()][chosen.oom[: met[:2_000].sum(), 1] == 1] == 2).all()
    assert sorted(set(chosen.weight[chosen.oom[:, 1] == 1].tolist())) == [2.0, 3.0]


def test_it_learns_what_announces_an_end_from_several_cells() -> None:
    cells = [cell(30_000, seed) for seed in (1, 2)]
    fit = fit_oom(cells, seed=0)
    assert fit is not None
    unseen = cell(5_000, 9, rare=0.05).features
    p, label = fit.model.predict(unseen.x)[:, 1], unseen.targets(slice(None))[1][:, 1] > 0.5
    assert np.mean(p[label][:, None] > p[~label][None, :300]) > 0.95
    again = fit_oom(cells, seed=0)
    assert again is not None
    np.testing.assert_array_equal(again.model.predict(unseen.x), fit.model.predict(unseen.x))


def test_a_row_is_judged_by_a_model_that_learned_from_no_task_of_its_collection() -> None:
    # tasks of the first collection end above 97 % of the limit, those of the others never
    first = np.arange(30_000) % 3 == 0
    rows = cell(30_000, rare=0.02)
    rows.features.targets(slice(None))[1][~first] = 0
    rows.features.x[:, AT.cpu_last] = np.where(first, 1.0, 0.0)  # tells the collection
    fit = fit_oom([rows], seed=0)
    assert fit is not None
    of = folds_of(rows, np.arange(30_000))
    assert [np.unique(of[np.arange(30_000) % 3 == k]).tolist() for k in range(3)] == [[0], [1], [2]]
    high = np.flatnonzero(first & (rows.features.x[:, AT.memory_last] >= 0.97))
    assert np.median(fit.model.predict(rows.features.x[high])[:, 1]) > 0.9
    assert np.isnan(fit.unseen(rows, high)).all(), "no other collection met an end"
    others = np.flatnonzero(of == 1)
    np.testing.assert_array_equal(fit.unseen(rows, others), fit.without[1].predict(rows.features.x[others]))


def test_a_feature_that_hardly_any_row_with_the_label_knows_does_not_stop_the_fit() -> None:
    rows = cell(30_000, rare=0.02).features
    unlabelled = np.arange(len(rows.x)) < 300
    label = rows.targets(slice(None))[1]
    label[unlabelled, 2] = np.nan
    rows.x[~unlabelled, AT.memory_same_hour_1d] = np.nan
    rows.x[301:, AT.memory_slope_2h] = np.nan
    fit = fit_oom([source(rows.x, label)], seed=0)
    assert fit is not None
    assert np.isfinite(fit.model.predict(rows.x)).all()


def test_too_few_ends_make_no_model() -> None:
    few = cell(2_000)
    x = few.features.x
    oom = np.zeros((len(x), H), np.float32)
    oom[: FEWEST - 1, 1:] = 1
    assert fit_oom([source(x, oom)], 0) is None
    oom[FEWEST - 1, 1] = 1
    fit = fit_oom([source(x, oom)], 0)
    assert fit is not None
    assert fit.model.fitted.tolist() == [False, True, False]
