"""The out-of-memory model answers as the trees that it was made of, row by row, and reads no more than its inputs."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.numpy import save_file
from sklearn.ensemble import HistGradientBoostingClassifier

from reclaim.data.core.files import FULL_DISK
from reclaim.features.registry import AT, FEATURE_NAMES, N_FEATURES, SIGNALS
from reclaim.features.targets import HORIZONS_S
from reclaim.training.models.network_forecaster import NetworkForecaster
from reclaim.training.models.oom_calibration import Calibrated, ProbabilityCalibration
from reclaim.training.models.oom_model import INPUTS, LEAVES, OomModel, Trees
from tests.folders import full_disk

H = len(HORIZONS_S)
N_TREES = 12


@cache
def boosted() -> list[Any]:
    """Return trees of scikit-learn for each horizon; whether a value is known says something, so both sides are met."""
    x, made = rows(4_000), []
    for h in range(H):
        read = x[:, list(INPUTS)]
        score = np.nan_to_num(read[:, h]) + 0.5 * np.nan_to_num(read[:, 5 + h]) + np.isnan(read[:, 10]) - h
        label = np.random.default_rng(h).random(len(x)) < 1 / (1 + np.exp(-score))
        made.append(
            HistGradientBoostingClassifier(max_iter=N_TREES, max_leaf_nodes=LEAVES, random_state=h).fit(read, label)
        )
    return made


def model(fitted: tuple[bool, ...] = (True,) * H) -> OomModel:
    """Return these trees as a model."""
    trees = Trees.blank(N_TREES)
    for h, of in enumerate(boosted()):
        trees.start[h] = of._baseline_prediction.item()
        for k, (tree,) in enumerate(of._predictors):
            trees.put(h, k, tree.nodes, range(len(INPUTS)))
    return OomModel(trees, np.array(fitted))


def rows(n: int = 130, n_features: int = N_FEATURES) -> NDArray[np.float32]:
    """Return features, some unknown."""
    rng = np.random.default_rng(2)
    x = rng.normal(0, 2, (n, n_features)).astype(np.float32)
    x[rng.random(x.shape) < 0.1] = np.nan
    return x


def test_it_says_what_the_trees_say_that_it_was_made_of() -> None:
    x = rows(1_000)
    x[:200] = np.nan
    said = model().predict(x)
    for h, of in enumerate(boosted()):
        np.testing.assert_allclose(said[:, h], of.predict_proba(x[:, list(INPUTS)])[:, 1], atol=1e-6)
        assert len(np.unique(said[200:, h])) > 100


@given(st.integers(0, N_TREES - 1), st.integers(0, H - 1), st.integers(0, LEAVES - 2), st.sampled_from([-1, 0, 1]))
def test_a_value_at_a_threshold_goes_left_and_the_next_one_right(tree: int, h: int, node: int, step: int) -> None:
    trees, x = model().trees, rows(1)
    feature, threshold = trees.feature[h, tree, node], trees.threshold[h, tree, node]
    if np.isfinite(threshold):
        beside = np.nextafter(threshold, np.float32(np.inf * step)) if step else threshold
        x[0, INPUTS[feature]] = beside
        expected = boosted()[h].predict_proba(x[:, list(INPUTS)])[0, 1]
        assert model().predict(x)[0, h] == pytest.approx(expected, abs=1e-6)


def test_a_tree_of_two_leaves_by_hand() -> None:
    trees = Trees.blank(1)
    node = [
        ("value", "f8"), ("feature_idx", "i8"), ("num_threshold", "f8"), ("missing_go_to_left", "?"),
        ("left", "i8"), ("right", "i8"), ("is_leaf", "?"),
    ]  # fmt: skip
    trees.put(
        0, 0, np.array([(0, 1, 0.5, False, 1, 2, False), (-1, 0, 0, 0, 0, 0, True), (2, 0, 0, 0, 0, 0, True)], node),
        reads=[7, 3],
    )  # fmt: skip
    trees.start[0] = -1
    x = np.zeros((3, N_FEATURES), np.float32)
    x[:, INPUTS[3]] = 0.5, 0.6, np.nan
    said = OomModel(trees, np.array([True, False, False])).predict(x)
    np.testing.assert_allclose(said[:, 0], 1 / (1 + np.exp([2.0, -1.0, -1.0])))
    assert np.isnan(said[:, 1:]).all()


def test_a_threshold_that_single_precision_lacks_sends_the_number_above_it_to_the_right() -> None:
    # 0.1 lies between two numbers of single precision; the one nearest to it, 0.100000001, is above the threshold
    trees = Trees.blank(1)
    node = [
        ("value", "f8"), ("feature_idx", "i8"), ("num_threshold", "f8"), ("missing_go_to_left", "?"),
        ("left", "i8"), ("right", "i8"), ("is_leaf", "?"),
    ]  # fmt: skip
    nodes = np.array([(0, 0, 0.1, True, 1, 2, False), (-1, 0, 0, 0, 0, 0, True), (2, 0, 0, 0, 0, 0, True)], node)
    trees.put(0, 0, nodes, reads=[0])
    nearest = np.float32(0.1)
    assert float(nearest) > 0.1
    x = np.zeros((2, N_FEATURES), np.float32)
    x[:, INPUTS[0]] = np.nextafter(nearest, np.float32(0)), nearest
    said = OomModel(trees, np.ones(H, np.bool_)).predict(x)[:, 0]
    np.testing.assert_allclose(said, 1 / (1 + np.exp([1.0, -2.0])))


def test_a_horizon_asked_for_alone_is_known_where_its_own_trees_are_fitted() -> None:
    partly, x = model((False, True, False)), rows(20)
    whole = partly.predict(x)
    assert np.isnan(whole).all(axis=0).tolist() == [True, False, True]
    for h, horizon_s in enumerate(HORIZONS_S):
        np.testing.assert_array_equal(partly.predict(x, (horizon_s,))[:, 0], whole[:, h])


def test_a_model_of_the_same_inputs_in_another_order_is_refused(tmp_path: Path) -> None:
    trees = model().trees
    names = [FEATURE_NAMES[k] for k in reversed(INPUTS)]
    tensors = trees._asdict() | {"fitted": np.ones(H, np.bool_)}
    save_file(tensors, tmp_path / OomModel.FILE, metadata={"inputs": json.dumps(names)})
    with pytest.raises(ValueError, match=r"oom_model.safetensors: its inputs"):
        OomModel.load(tmp_path)


def test_a_full_disk_is_an_error_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="File too large") as refusal, full_disk(after=1_000):
        model().save(tmp_path)
    assert refusal.value.errno in FULL_DISK


def test_a_model_of_before_is_refused(tmp_path: Path) -> None:
    save_file({"mean": np.zeros(3, np.float32)}, tmp_path / OomModel.FILE)
    with pytest.raises(ValueError, match=r"oom_model.safetensors: no feature, no fitted"):
        OomModel.load(tmp_path)
    short = model().trees._replace(start=np.zeros(H - 1, np.float32))
    OomModel(short, np.ones(H, np.bool_)).save(tmp_path)
    with pytest.raises(ValueError, match=r"oom_model.safetensors: expected start as float32 of shape \(3,\), got "):
        OomModel.load(tmp_path)
    OomModel(model().trees, np.ones(H - 1, np.bool_)).save(tmp_path)
    with pytest.raises(ValueError, match=r"expected fitted as bool of shape \(3,\), got bool of shape \(2,\)"):
        OomModel.load(tmp_path)
    beyond = model().trees
    beyond.feature[0, 0, 0] = len(INPUTS)
    OomModel(beyond, np.ones(H, np.bool_)).save(tmp_path)
    with pytest.raises(ValueError, match=r"a tree reads a feature that is none of the 45"):
        OomModel.load(tmp_path)


def test_a_model_that_reads_other_features_is_refused_though_all_its_places_are_known(tmp_path: Path) -> None:
    of = model()
    names = [FEATURE_NAMES[k] for k in INPUTS]
    save_file(
        of.trees._asdict() | {"fitted": of.fitted}, tmp_path / OomModel.FILE,
        metadata={"inputs": json.dumps(["cpu_last", *names[1:]])},
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"its inputs lack memory_last, and have cpu_last besides"):
        OomModel.load(tmp_path)
    save_file(of.trees._asdict() | {"fitted": of.fitted}, tmp_path / OomModel.FILE)
    with pytest.raises(ValueError, match=r"its inputs lack memory_last, .*, and have none besides"):
        OomModel.load(tmp_path)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_and_a_horizon_alone_get_the_same_bits(threads: int) -> None:
    oom, x = model(), rows()
    whole = oom.predict(x, threads=threads)
    for i in (0, 63, 64, 129):
        np.testing.assert_array_equal(oom.predict(x[i : i + 1])[0], whole[i])
    for h, horizon_s in enumerate(HORIZONS_S):
        np.testing.assert_array_equal(oom.predict(x, (horizon_s,))[:, 0], whole[:, h])


def test_other_features_change_nothing() -> None:
    oom, x = model(), rows()
    other = x.copy()
    other[:, ~np.isin(np.arange(x.shape[1]), INPUTS)] += 7
    np.testing.assert_array_equal(oom.predict(other), oom.predict(x))
    other[:, list(INPUTS)] += 7
    assert (oom.predict(other) != oom.predict(x)).any()


def test_a_horizon_that_was_not_fitted_is_unknown() -> None:
    assert np.isnan(model(fitted=(False, True, True)).predict(rows())).all(axis=0).tolist() == [True, False, False]


def test_saved_and_loaded_it_says_the_same_and_without_a_file_there_is_none(tmp_path: Path) -> None:
    assert OomModel.load(tmp_path) is None
    oom = model(fitted=(False, True, True))
    oom.save(tmp_path)
    again = OomModel.load(tmp_path)
    assert again is not None
    np.testing.assert_array_equal(again.predict(rows()), oom.predict(rows()))


def test_a_calibrated_forecaster_takes_the_probability_from_it_and_the_rest_from_the_forecaster(
    random_forecaster: NetworkForecaster, tmp_path: Path
) -> None:
    oom, x = model(), rows()
    calibration = ProbabilityCalibration((2.0,) * H, (0.5,) * H)
    forecaster = Calibrated(random_forecaster, calibration, oom)
    answer, bare = forecaster.predict(x), random_forecaster.predict(x)
    measured = ~np.isnan(x[:, [AT[f"{signal}_max_ever"] for signal in SIGNALS]])
    np.testing.assert_array_equal(answer.quantiles[measured], bare.quantiles[measured])
    np.testing.assert_array_equal(answer.oom_probability, calibration.apply(oom.predict(x)))
    alone = forecaster.predict(x, 3_600)
    np.testing.assert_array_equal(alone.oom_probability[:, 0], answer.oom_probability[:, HORIZONS_S.index(3_600)])
    forecaster.save(tmp_path)
    loaded = Calibrated.load(NetworkForecaster.load(tmp_path), tmp_path)
    np.testing.assert_array_equal(loaded.predict(x).oom_probability, answer.oom_probability)


def test_a_calibrated_forecaster_has_the_curves_of_the_forecaster_and_the_probabilities_of_the_model(
    random_forecaster: NetworkForecaster,
) -> None:
    oom = model(fitted=(False, True, True))
    heads = Calibrated(random_forecaster, ProbabilityCalibration(), oom).heads
    assert heads.oom.tolist() == [False, True, True]
    assert heads.targets.all()
    assert Calibrated(random_forecaster, ProbabilityCalibration()).heads.oom.all()
