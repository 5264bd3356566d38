"""The bundle: what is saved comes back and answers the same; what does not fit is refused with the remedy."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from safetensors.numpy import save

from reclaim.data.errors import ConfigError, ModelError, OtherReleaseError
from reclaim.data.schema import RESOURCES
from reclaim.data.windows import Windows
from reclaim.features.groups import TIER_LABELS
from reclaim.features.registry import FEATURE_NAMES, N_FEATURES, PIPELINE_VERSION
from reclaim.training import bundle as module
from reclaim.training.bundle import (
    BUNDLE_FILE,
    FORMAT,
    ORIGIN_FILE,
    Bundle,
    _load_pyfunc,
    copy_bundle,
    load_bundle,
    load_model,
    output_names,
    save_bundle,
)
from reclaim.training.margins.price import Price, three_prices
from reclaim.training.models.network_forecaster import NetworkForecaster
from reclaim.training.models.oom_calibration import Calibrated, ProbabilityCalibration
from reclaim.training.models.oom_model import OomModel
from reclaim.training.settings import QUANTILE_LEVELS
from reclaim.training.tracking.references import ModelLocation


@pytest.fixture
def bundle(random_forecaster: NetworkForecaster) -> Bundle:
    """Return a bundle of the random network."""
    return Bundle(
        kind="network",
        forecaster=random_forecaster,
        horizon_s=3_600,
        prices=three_prices(Price("baseline", (40.0, 200.0)), Price("aggressive", (4.0, 2.0))),
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
    for margin in bundle.prices:
        mine = bundle.estimator(margin).update(slot, windows)
        theirs = loaded.estimator(margin).update(slot, windows)
        assert mine.reservation.tobytes() == theirs.reservation.tobytes()
        assert mine.rule.tobytes() == theirs.rule.tobytes()


def test_the_forecaster_of_the_training_rows_comes_back_and_answers_for_rows_that_the_other_learned_from(
    bundle: Bundle, other_forecaster: NetworkForecaster, make_windows: Callable[..., Windows], tmp_path: Path
) -> None:
    loaded = _saved_and_loaded(replace(bundle, held_out=other_forecaster), tmp_path)
    asked = replace(loaded, learned_until_us=20 * 300_000_000)
    windows = make_windows(np.linspace(0.1, 0.6, 40))
    x = np.random.default_rng(0).random((40, N_FEATURES), np.float32)
    early = windows.end_us <= 20 * 300_000_000
    assert 0 < early.sum() < 40

    def curves(of: Bundle) -> np.ndarray[Any, np.dtype[np.float32]]:
        return of.bare_estimator().forecast(x, windows).survival

    ours, theirs = (of.predict(x).survival for of in (bundle.forecaster, other_forecaster))
    np.testing.assert_array_equal(curves(asked), np.where(early[:, None, None, None], theirs, ours))
    np.testing.assert_array_equal(curves(loaded), ours)
    np.testing.assert_array_equal(curves(replace(asked, held_out=None)), ours)
    np.testing.assert_array_equal(
        asked.bare_estimator().forecast(x[early], windows.take(np.flatnonzero(early))).survival,
        theirs[early],
    )


@pytest.mark.parametrize("names", [[*FEATURE_NAMES, "sibling_tasks"], [*FEATURE_NAMES[::-1]]])
def test_a_model_whose_features_are_not_those_of_now_is_refused_with_what_to_do(
    bundle: Bundle, tmp_path: Path, names: list[str]
) -> None:
    save_bundle(bundle, tmp_path / "bundle")
    facts = json.loads((tmp_path / "bundle" / BUNDLE_FILE).read_text())
    assert facts["features"] == list(FEATURE_NAMES)
    (tmp_path / "bundle" / BUNDLE_FILE).write_text(json.dumps(facts | {"features": names}))
    with pytest.raises(OtherReleaseError, match=r"features that are not .*; run .* `reclaim train` again"):
        load_bundle(tmp_path / "bundle")


def _saved_and_loaded(bundle: Bundle, tmp_path: Path) -> Bundle:
    save_bundle(bundle, tmp_path / "again")
    return load_bundle(tmp_path / "again")


def test_prices_by_tier_and_the_calibration_of_the_risk_come_back(bundle: Bundle, tmp_path: Path) -> None:
    values = tuple((1.0 + tier, 2.0 + tier) for tier in range(len(TIER_LABELS)))
    tiered = {name: replace(price, by_tier=values) for name, price in bundle.prices.items()}
    calibrated = Calibrated(bundle.forecaster, ProbabilityCalibration((0.5,) * 3, (-1.0,) * 3))
    loaded = _saved_and_loaded(replace(bundle, prices=tiered, forecaster=calibrated), tmp_path)
    assert loaded.prices == tiered
    x = np.random.default_rng(0).random((5, N_FEATURES)).astype(np.float32)
    answer = loaded.forecaster.predict(x).oom_probability
    assert answer.tobytes() == calibrated.predict(x).oom_probability.tobytes()
    assert not np.allclose(answer, bundle.forecaster.predict(x).oom_probability)


def test_mediums_price_is_the_geometric_mean_and_its_reservation_lies_between(
    bundle: Bundle, make_windows: Callable[..., Windows]
) -> None:
    assert bundle.prices["medium"].value == pytest.approx((np.sqrt(40.0 * 4.0), np.sqrt(200.0 * 2.0)))
    windows, slot = make_windows(np.linspace(0.01, 0.6, 40)), np.zeros(40, np.int64)
    baseline, medium, aggressive = (
        bundle.estimator(name).base.update(slot, windows).reservation for name in ("baseline", "medium", "aggressive")
    )
    assert (baseline >= medium).all()
    assert (medium >= aggressive).all()
    assert (baseline > medium).any()
    assert (medium > aggressive).any()


def test_each_estimator_of_a_bundle_starts_fresh(bundle: Bundle, make_windows: Callable[..., Windows]) -> None:
    windows, slot = make_windows([0.2] * 30), np.zeros(30, np.int64)
    first = bundle.estimator("baseline").update(slot, windows)
    second = bundle.estimator("baseline").update(slot, windows)
    assert first.reservation.tobytes() == second.reservation.tobytes()


def test_a_model_of_another_pipeline_is_refused_with_both_versions(bundle: Bundle, tmp_path: Path) -> None:
    save_bundle(replace(bundle, pipeline_version="0123abcd"), tmp_path / "bundle")
    with pytest.raises(OtherReleaseError, match=rf"0123abcd.*{PIPELINE_VERSION}.*reclaim train"):
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


@pytest.mark.parametrize(
    ("file", "content", "why"),
    [
        ("network.safetensors", b"\x00", "SafetensorError"),
        ("network.safetensors", None, "FileNotFoundError"),
        (OomModel.FILE, save({"other": np.zeros(3)}), "no feature, no fitted"),
        (BUNDLE_FILE, b"[]", "AttributeError"),
        (BUNDLE_FILE, json.dumps({"format": FORMAT, "kind": "network"}).encode(), "pipeline_version"),
    ],
)
def test_files_that_are_damaged_or_of_another_release_are_refused_in_one_line_with_what_to_do(
    bundle: Bundle, tmp_path: Path, file: str, content: bytes | None, why: str
) -> None:
    save_bundle(bundle, tmp_path / "bundle")
    if content is None:
        (tmp_path / "bundle" / file).unlink()
    else:
        (tmp_path / "bundle" / file).write_bytes(content)
    with pytest.raises(
        ModelError, match=rf"bundle: .*another release.*{why}.*train again with `reclaim train`"
    ) as refused:
        load_bundle(tmp_path / "bundle")
    assert "\n" not in str(refused.value)


def load_changed(folder: Path, change: Callable[[dict[str, Any]], None]) -> Bundle:
    """Load a bundle whose facts were changed on the disk."""
    facts = json.loads((folder / BUNDLE_FILE).read_text())
    change(facts)
    (folder / BUNDLE_FILE).write_text(json.dumps(facts))
    return load_bundle(folder)


@pytest.mark.parametrize(
    "fact",
    [
        {"horizon_s": "3600"}, {"horizon_s": 7}, {"mean_limit": {"cpu": "a", "memory": 1.0}},
        {"mean_limit": {"cpu": -1.0, "memory": 1.0}}, {"trained": []}, {"trained": {"datasets": None}},
        {"trained": {"settings": {"budgets": {"baseline": 0.0}}}}, {"trained": {"settings": {"budgets": {"a": 0.1}}}},
        {"trained": {"violation": {"baseline": {"cpu": "a"}}}},
        {"machines": {"3600": {"cpu": {"margins": ["a"], "weights": None, "together": 0.0}, "memory": None}}},
        {"machines": {"3600": {"cpu": {"margins": [0.0], "weights": None, "together": 2.0}, "memory": None}}},
    ],
    ids=str,
)  # fmt: skip
def test_facts_of_another_kind_are_refused_before_a_request_meets_them(
    bundle: Bundle, tmp_path: Path, fact: dict[str, Any]
) -> None:
    save_bundle(bundle, tmp_path / "bundle")
    load_bundle(tmp_path / "bundle")
    with pytest.raises(ModelError, match="the files of the model are damaged or of another release"):
        load_changed(tmp_path / "bundle", lambda facts: facts.update(fact))


def test_a_price_of_the_baseline_below_that_of_the_aggressive_margin_is_refused(bundle: Bundle, tmp_path: Path) -> None:
    def lower(facts: dict[str, Any]) -> None:
        facts["prices"]["baseline"]["value"]["cpu"] = 0.5 * facts["prices"]["aggressive"]["value"]["cpu"]

    save_bundle(bundle, tmp_path / "bundle")
    with pytest.raises(ModelError, match="prices: not a value that a model has"):
        load_changed(tmp_path / "bundle", lower)


def test_a_bundle_of_an_earlier_format_is_refused_with_what_to_do(bundle: Bundle, tmp_path: Path) -> None:
    save_bundle(bundle, tmp_path / "bundle")
    path = tmp_path / "bundle" / BUNDLE_FILE
    facts = json.loads(path.read_text())
    path.write_text(json.dumps(facts | {"format": FORMAT - 1}))
    with pytest.raises(OtherReleaseError, match=r"format 7 .*got 6 and 'network'; train again with") as refused:
        load_bundle(tmp_path / "bundle")
    assert "\n" not in str(refused.value)


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


def test_a_horizon_that_a_model_lacks_is_refused_by_its_name_and_with_what_to_do(bundle: Bundle) -> None:
    named = replace(bundle, origin=ModelLocation("reclaim-trees", "1", Path("folder"), "reclaim-trees/1"))
    said = r"^reclaim-trees/1 forecasts 300 or 3600 or 86400 s ahead, not 60: --set horizon_s=3600, or train .*=60"
    with pytest.raises(ConfigError, match=said):
        named.bare_estimator(horizon_s=60)
    with pytest.raises(ConfigError, match=r"^network forecasts "):
        bundle.bare_estimator(horizon_s=60)


def test_the_generic_model_answers_as_the_forecaster_does(bundle: Bundle, tmp_path: Path) -> None:
    save_bundle(bundle, tmp_path / "bundle")
    x = np.random.default_rng(0).random((5, N_FEATURES)).astype(np.float32)
    frame = pd.DataFrame(x[:, ::-1], columns=list(FEATURE_NAMES)[::-1], index=list("abcde"))
    answer = _load_pyfunc(str(tmp_path / "bundle")).predict(frame)
    forecast = bundle.forecaster.predict(x)
    assert list(answer.columns) == output_names(bundle.forecaster)
    assert list(answer.index) == list("abcde")
    assert np.array_equal(answer["cpu_300s_q0.5"], forecast.quantiles[:, 0, 0, 0])
    assert np.array_equal(answer["peak_cpu_86400s_q0.999"], forecast.quantiles[:, 2, 2, QUANTILE_LEVELS.index(0.999)])
    assert np.array_equal(answer["oom_3600s"], forecast.oom_probability[:, 1])


@pytest.mark.parametrize("use", [load_model, lambda reference: copy_bundle(reference, Path("copy"))])
def test_an_error_of_a_registered_model_names_it_and_not_the_folder_it_was_downloaded_into(
    tmp_path: Path, bundle: Bundle, use: Callable[[str], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    origin = ModelLocation("reclaim", "7", tmp_path / "tmp1x2y", "reclaim@champion", "run7")
    monkeypatch.setattr(module, "find_model", lambda _: origin)
    monkeypatch.setattr(module, "find_served", lambda _: origin)
    with pytest.raises(ModelError, match=r"^reclaim/7 holds no bundle\.json: it is no model of reclaim"):
        use("reclaim@champion")
    save_bundle(bundle, origin.folder)
    facts = json.loads((origin.folder / BUNDLE_FILE).read_text())
    (origin.folder / BUNDLE_FILE).write_text(json.dumps(facts | {"pipeline_version": "1.0"}))
    with pytest.raises(OtherReleaseError, match=r"^reclaim/7: the model was made by feature pipeline 1\.0, this is "):
        use("reclaim@champion")


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
    x = np.random.default_rng(0).random((4, N_FEATURES), np.float32)
    copied = load_bundle(tmp_path / "model").forecaster.predict(x)
    assert np.array_equal(copied.quantiles, bundle.forecaster.predict(x).quantiles)
    monkeypatch.undo()
    copy_bundle(str(tmp_path / "model"), tmp_path / "again")
    assert json.loads((tmp_path / "again" / ORIGIN_FILE).read_text()) == facts
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match="notes: exists and holds no model"):
        copy_bundle(str(tmp_path / "model"), tmp_path / "notes")
    assert (tmp_path / "notes" / "thesis.txt").read_text() == "mine"


@pytest.mark.parametrize("resource", range(len(RESOURCES)))
@pytest.mark.parametrize(("times", "apart"), [(29.0, False), (31.0, True), (1 / 29, False), (1 / 31, True)])
def test_a_mean_limit_more_than_thirty_times_away_is_said_to_be_another_unit(
    bundle: Bundle, resource: int, times: float, apart: bool
) -> None:
    limit = list(bundle.mean_limit)
    limit[resource] *= times
    found = bundle.other_units(tuple(limit))
    assert (found is not None) == apart
    if found is not None:
        assert f"the mean {RESOURCES[resource]} limit is {times:.4g} times" in found
        assert RESOURCES[1 - resource] not in found


def test_a_unit_is_not_judged_without_mean_limits_nor_of_a_portable_model(bundle: Bundle) -> None:
    nan = float("nan")
    assert bundle.other_units((nan, nan)) is None
    assert replace(bundle, mean_limit=(nan, nan)).other_units((1e9, 1e-9)) is None
    assert replace(bundle, kind="portable").other_units((1e9, 1e-9)) is None
    both = bundle.other_units((1e3 * bundle.mean_limit[0], 1e-3 * bundle.mean_limit[1]))
    assert both is not None
    assert "the mean cpu limit is 1,000 times and the mean memory limit is 0.001 times that" in both
