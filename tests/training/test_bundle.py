"""The bundle: what is saved comes back and answers the same; what does not fit is refused with the remedy."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from reclaim.data.errors import ConfigError, ModelError
from reclaim.data.windows import Windows
from reclaim.features.registry import FEATURE_NAMES, FIRST_RELATED, PIPELINE_VERSION, feature_names
from reclaim.training import bundle as module
from reclaim.training.bundle import (
    BUNDLE_FILE,
    ORIGIN_FILE,
    Bundle,
    _load_pyfunc,
    copy_bundle,
    load_bundle,
    output_names,
    save_bundle,
)
from reclaim.training.margins.margin import MARGIN_GROUPS, Margin, three_margins
from reclaim.training.margins.plan import Basis
from reclaim.training.models.forecaster import NetworkForecaster
from reclaim.training.models.oom_calibration import Calibrated, ProbabilityCalibration
from reclaim.training.settings import QUANTILE_LEVELS
from reclaim.training.tracking.references import ModelLocation


@pytest.fixture
def bundle(random_forecaster: NetworkForecaster) -> Bundle:
    """Return a bundle of the random network."""
    return Bundle(
        kind="network",
        forecaster=random_forecaster,
        horizon_s=3_600,
        plans={
            "baseline": (Basis(0.95, 30.0, 0.25), Basis(0.99)),
            "aggressive": (Basis(0.9, 3.0), Basis(0.9, None, 0.5)),
        },
        margins=three_margins(Margin("baseline", (0.3, 0.2)), Margin("aggressive", (0.1, 0.0))),
        dataset_fingerprint="abc",
        mean_limit=(0.5, 0.25),
        trained={"rows": 5, "notes": ["few rows"]},
    )


def test_a_saved_bundle_comes_back_and_answers_the_same(
    bundle: Bundle, make_windows: Callable[..., Windows], tmp_path: Path
) -> None:
    save_bundle(bundle, tmp_path / "bundle")
    loaded = load_bundle(tmp_path / "bundle")
    assert replace(loaded, forecaster=bundle.forecaster) == bundle
    assert np.isnan(_saved_and_loaded(replace(bundle, mean_limit=(0.5, float("nan"))), tmp_path).mean_limit[1])
    windows = make_windows(np.linspace(0.1, 0.6, 40))
    slot = np.zeros(40, np.int64)
    for margin in bundle.margins:
        mine = bundle.estimator(margin).update(slot, windows)
        theirs = loaded.estimator(margin).update(slot, windows)
        assert mine.reservation.tobytes() == theirs.reservation.tobytes()
        assert mine.rule.tobytes() == theirs.rule.tobytes()


def test_a_model_keeps_which_features_it_reads(bundle: Bundle, tmp_path: Path) -> None:
    assert _saved_and_loaded(bundle, tmp_path).features == feature_names(related=False)
    related = replace(bundle, related=True)
    assert _saved_and_loaded(related, tmp_path).features == FEATURE_NAMES
    assert json.loads((tmp_path / "again" / BUNDLE_FILE).read_text())["features"] == list(FEATURE_NAMES)


def _saved_and_loaded(bundle: Bundle, tmp_path: Path) -> Bundle:
    save_bundle(bundle, tmp_path / "again")
    return load_bundle(tmp_path / "again")


def test_margins_by_group_and_the_calibration_of_the_risk_come_back(bundle: Bundle, tmp_path: Path) -> None:
    shares = tuple((0.01 * g, 0.02 * g) for g in range(len(MARGIN_GROUPS)))
    grouped = {name: replace(margin, by_group=shares) for name, margin in bundle.margins.items()}
    calibrated = Calibrated(bundle.forecaster, ProbabilityCalibration((0.5,) * 3, (-1.0,) * 3))
    loaded = _saved_and_loaded(replace(bundle, margins=grouped, forecaster=calibrated), tmp_path)
    assert loaded.margins == grouped
    x = np.random.default_rng(0).random((5, FIRST_RELATED)).astype(np.float32)
    answer = loaded.forecaster.predict(x).oom_probability
    assert answer.tobytes() == calibrated.predict(x).oom_probability.tobytes()
    assert not np.allclose(answer, bundle.forecaster.predict(x).oom_probability)


def test_medium_reserves_half_way_and_a_wider_margin_never_less(
    bundle: Bundle, make_windows: Callable[..., Windows]
) -> None:
    windows, slot = make_windows(np.full(40, 0.01)), np.zeros(40, np.int64)
    baseline, medium, aggressive = (
        bundle.estimator(name).base.update(slot, windows).reservation for name in ("baseline", "medium", "aggressive")
    )
    assert (medium == (baseline + aggressive) / 2).all()
    assert (baseline >= aggressive).all()
    assert (baseline > aggressive).any()


def test_each_estimator_of_a_bundle_starts_fresh(bundle: Bundle, make_windows: Callable[..., Windows]) -> None:
    windows, slot = make_windows([0.2] * 30), np.zeros(30, np.int64)
    first = bundle.estimator("baseline").update(slot, windows)
    second = bundle.estimator("baseline").update(slot, windows)
    assert first.reservation.tobytes() == second.reservation.tobytes()


def test_a_model_of_another_pipeline_is_refused_with_both_versions(bundle: Bundle, tmp_path: Path) -> None:
    save_bundle(replace(bundle, pipeline_version="0123abcd"), tmp_path / "bundle")
    with pytest.raises(ModelError, match=rf"0123abcd.*{PIPELINE_VERSION}.*reclaim train"):
        load_bundle(tmp_path / "bundle")


def test_a_folder_that_holds_no_bundle_is_refused(bundle: Bundle, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"holds no bundle\.json"):
        load_bundle(tmp_path)
    folder = tmp_path / "bundle"
    save_bundle(bundle, folder)
    facts = json.loads((folder / BUNDLE_FILE).read_text())
    (folder / BUNDLE_FILE).write_text(json.dumps(facts | {"kind": "oracle"}))
    with pytest.raises(ModelError, match="'oracle'"):
        load_bundle(folder)
    (folder / BUNDLE_FILE).write_text("{")
    with pytest.raises(ModelError, match="damaged"):
        load_bundle(folder)


def test_saving_again_replaces_the_older_bundle_whole(bundle: Bundle, tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    save_bundle(bundle, folder)
    (folder / "stray").write_text("left over")
    save_bundle(replace(bundle, dataset_fingerprint="def"), folder)
    assert not (folder / "stray").exists()
    assert load_bundle(folder).dataset_fingerprint == "def"
    assert [p.name for p in tmp_path.iterdir()] == ["bundle"]


def test_an_unknown_margin_is_refused_with_the_known_ones(bundle: Bundle) -> None:
    with pytest.raises(ConfigError, match="baseline, medium, aggressive"):
        bundle.estimator("reckless")


def test_the_generic_model_answers_as_the_forecaster_does(bundle: Bundle, tmp_path: Path) -> None:
    save_bundle(bundle, tmp_path / "bundle")
    x = np.random.default_rng(0).random((5, FIRST_RELATED)).astype(np.float32)
    frame = pd.DataFrame(x[:, ::-1], columns=list(feature_names(related=False))[::-1], index=list("abcde"))
    answer = _load_pyfunc(str(tmp_path / "bundle")).predict(frame)
    forecast = bundle.forecaster.predict(x)
    assert list(answer.columns) == output_names(bundle.forecaster)
    assert list(answer.index) == list("abcde")
    assert np.array_equal(answer["cpu_300s_q0.5"], forecast.quantiles[:, 0, 0, 0])
    assert np.array_equal(answer["peak_cpu_86400s_q0.999"], forecast.quantiles[:, 2, 2, QUANTILE_LEVELS.index(0.999)])
    assert np.array_equal(answer["oom_3600s"], forecast.oom_probability[:, 1])


def test_a_copied_bundle_says_what_it_is_a_copy_of_and_replaces_only_a_model(
    tmp_path: Path, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_bundle(bundle, tmp_path / "registered")
    origin = ModelLocation("reclaim", "7", tmp_path / "registered", "reclaim@champion", "run7")
    monkeypatch.setattr(module, "find_model", lambda _: origin)
    for _ in range(2):  # a second copy replaces the first
        assert copy_bundle("reclaim@champion", tmp_path / "model") == origin
    facts = json.loads((tmp_path / "model" / ORIGIN_FILE).read_text())
    assert facts == {"name": "reclaim", "version": "7", "run_id": "run7"}
    x = np.random.default_rng(0).random((4, len(bundle.features)), np.float32)
    copied = load_bundle(tmp_path / "model").forecaster.predict(x)
    assert np.array_equal(copied.quantiles, bundle.forecaster.predict(x).quantiles)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match="notes: exists and holds no model"):
        copy_bundle("reclaim@champion", tmp_path / "notes")
    assert (tmp_path / "notes" / "thesis.txt").read_text() == "mine"
