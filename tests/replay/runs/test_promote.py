"""A promotion moves the alias when the candidate is not worse on validation rows, and says why when it does not."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reclaim.data.errors import ConfigError, ModelError, OtherReleaseError
from reclaim.data.schema import RESOURCES
from reclaim.data.windows import Windows
from reclaim.features.feature_set import FeatureSet
from reclaim.features.seen import SEEN, sample_windows
from reclaim.features.targets import HORIZONS_S
from reclaim.replay.open_loop.estimates import estimator_makers
from reclaim.replay.open_loop.metrics import Scored, sums
from reclaim.replay.open_loop.paired import UNKNOWN, WORSE, Comparison, Paired
from reclaim.replay.runs import promote as module
from reclaim.replay.runs.promote import promote
from reclaim.replay.settings import ReplayConfig
from reclaim.training.bundle import Bundle
from reclaim.training.fitting.sources import windows_of
from reclaim.training.margins.calibrate import Calibration, calibrate
from reclaim.training.margins.margin import Budgets
from reclaim.training.tracking import runs as tracking
from reclaim.training.tracking.references import BUILTIN
from reclaim.training.tracking.runs import ModelVersion
from tests.replay.conftest import write_series
from tests.replay.largest_of_the_day import LargestOfTheDay, bundle_of
from tests.series import dataset_of

SETTINGS = {"budgets": {"baseline": 0.01, "aggressive": 0.05}, "by_tier": False}


def guessing(noise: float) -> Bundle:
    return bundle_of(LargestOfTheDay(noise), {"settings": SETTINGS})


@dataclass
class Registry:
    """As much of a registry as a promotion asks: the models by version, and the alias."""

    models: dict[str, Bundle]
    champion: str | None = "1"

    def find_version(self, reference: str) -> ModelVersion | None:
        """Return the champion."""
        assert reference == "reclaim@champion"
        return self.champion and ModelVersion("reclaim", self.champion, "")  # type: ignore[return-value]


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    """Return a registry whose champion, version 1, is worse than version 2 and better than version 3."""
    registry = Registry({"1": guessing(0.5), "2": guessing(0.0), "3": guessing(2.0)})
    monkeypatch.setattr(tracking, "resolve_model", lambda name: ModelVersion("reclaim", name.partition("/")[2], ""))
    monkeypatch.setattr(tracking, "find_version", registry.find_version)
    monkeypatch.setattr(tracking, "move_alias", lambda to, _: setattr(registry, "champion", to.version))
    monkeypatch.setattr(module, "load_model", lambda name: registry.models[name.partition("/")[2]])
    return registry


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return another dataset, whose collections have the ids of the first one's."""
    folder = tmp_path_factory.mktemp("other")
    write_series(folder / "raw", tasks=12, windows=576, seed=4)
    return dataset_of(folder / "raw", folder / "other").path


def test_a_better_candidate_is_promoted_with_the_numbers_of_both(dataset: Path, registry: Registry) -> None:
    promotion = promote([dataset], "reclaim/2")
    assert (promotion.moved, promotion.before, registry.champion) == (True, "1", "2")
    assert promotion.why == "not worse than version 1 on validation rows"
    assert [(row["margin"], row["budget"], row["resource"]) for row in promotion.comparison] == [
        (margin, budget, resource)
        for margin, budget in (("baseline", 0.01), ("aggressive", 0.05))
        for resource in ("CPU", "memory")
    ]
    for row in promotion.comparison:
        assert row["difference"] == pytest.approx(row["reclaimed"] - row["champion"])
        assert row["low"] <= row["difference"] <= row["high"]
    assert len(promotion.table.rows) == 4


def test_a_worse_candidate_is_refused_with_the_reason_unless_forced(dataset: Path, registry: Registry) -> None:
    promotion = promote([dataset], "reclaim/3")
    assert (promotion.moved, promotion.refused, registry.champion) == (False, True, "1")
    assert promotion.why.startswith("reclaim/3 reclaims less than reclaim/1 on validation rows (CPU at baseline, ")
    assert "--force" in promotion.why
    assert {row["verdict"] for row in promotion.comparison} == {"worse"}
    forced = promote([], "reclaim/3", force=True)
    assert (forced.moved, forced.comparison, registry.champion) == (True, [], "3")


def test_the_same_model_again_is_not_worse(dataset: Path, registry: Registry) -> None:
    registry.models["4"] = guessing(0.5)
    promotion = promote([dataset], "reclaim/4")
    assert promotion.moved
    assert {(row["difference"], row["verdict"]) for row in promotion.comparison} == {(0.0, "within the noise")}


def test_a_champion_that_another_process_set_meanwhile_stays_until_the_candidate_is_compared_with_it(
    dataset: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    def promoted_meanwhile(*_: Any) -> list[dict[str, Any]]:
        registry.champion = meanwhile
        return []

    with monkeypatch.context() as patched:
        patched.setattr(module, "_compared", promoted_meanwhile)
        meanwhile = "3"
        with pytest.raises(ModelError, match=r"reclaim/3 became the champion meanwhile; run again"):
            promote([dataset], "reclaim/2")
        assert registry.champion == "3"
        registry.champion, meanwhile = "1", "2"  # twice at once
        assert promote([dataset], "reclaim/2").moved
    registry.champion = "3"
    assert promote([dataset], "reclaim/2").before == "3"


def test_a_champion_of_another_release_gives_way_to_what_is_not_worse_than_the_built_in_model(
    dataset: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(name: str) -> Bundle:
        if name == "reclaim/1":
            raise OtherReleaseError("expected format 6")
        return guessing(0.5) if name == BUILTIN else registry.models[name.partition("/")[2]]

    monkeypatch.setattr(module, "load_model", load)
    worse = promote([dataset], "reclaim/3")
    assert (worse.refused, registry.champion) == (True, "1")
    assert worse.why.startswith("reclaim/3 reclaims less than builtin on validation rows")
    promotion = promote([dataset], "reclaim/2")
    assert (promotion.moved, promotion.before, registry.champion) == (True, "1", "2")
    assert promotion.why == "not worse than the built-in model, for version 1 is of another release, on validation rows"


def test_a_champion_whose_files_cannot_be_read_is_an_error_that_names_it_and_the_way_past_it(
    dataset: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(name: str) -> Bundle:
        if name == "reclaim/1":
            raise ModelError("its files are gone; train again")
        return registry.models[name.partition("/")[2]]

    monkeypatch.setattr(module, "load_model", load)
    with pytest.raises(ModelError, match=r"champion reclaim/1 cannot be compared with \(its files .*\); --force prom"):
        promote([dataset], "reclaim/2")
    assert promote([dataset], "reclaim/2", force=True).moved


@pytest.mark.parametrize(("champion", "force"), [("1", True), (None, False)])
def test_a_version_that_cannot_be_read_is_never_promoted(
    champion: str | None, force: bool, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(_: str) -> Bundle:
        raise ModelError("reclaim/2: its files are gone; train again")

    monkeypatch.setattr(module, "load_model", load)
    registry.champion = champion
    with pytest.raises(ModelError, match="reclaim/2: its files are gone; train again"):
        promote([], "reclaim/2", force=force)
    assert registry.champion == champion


def test_the_first_is_promoted_without_a_dataset_and_a_second_asks_for_one(registry: Registry) -> None:
    registry.champion = None
    first = promote([], "reclaim/3")
    assert (first.moved, first.before, first.why) == (True, None, "the first one to be served")
    for force in (False, True):  # a model is never promoted over itself
        again = promote([], "reclaim/3", force=force)
        assert (again.moved, again.refused, again.why) == (False, False, "served already")
    with pytest.raises(ConfigError, match="name the dataset whose validation rows reclaim/2 is judged on; --force"):
        promote([], "reclaim/2")


def test_the_first_of_a_name_is_compared_with_the_built_in_model_where_a_dataset_is_named(
    dataset: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "champion", None)
    models = {BUILTIN: guessing(0.5)} | {f"reclaim/{version}": model for version, model in registry.models.items()}
    monkeypatch.setattr(module, "load_model", lambda name: models[name])
    worse = promote([dataset], "reclaim/3")
    assert (worse.refused, registry.champion) == (True, None)
    assert worse.why.startswith("reclaim/3 reclaims less than builtin on validation rows")
    better = promote([dataset], "reclaim/2")
    assert (better.moved, better.before, registry.champion) == (True, None, "2")
    assert better.why == "not worse than the built-in model on validation rows"


def test_no_model_is_judged_on_rows_that_it_was_trained_on(dataset: Path, registry: Registry) -> None:
    features = FeatureSet.open(dataset)
    trained = {"fingerprint": features.manifest["dataset"], "trained_until_us": features.cuts_us[0]}
    registry.models["1"] = replace(registry.models["1"], trained={"datasets": [trained]})
    assert promote([dataset], "reclaim/2").moved
    registry.champion = "1"
    later = trained | {"trained_until_us": features.cuts_us[1]}
    registry.models["1"] = replace(registry.models["1"], trained={"datasets": [later]})
    with pytest.raises(ConfigError, match=r"the champion was trained on it until .* its validation period begins at"):
        promote([dataset], "reclaim/2")


def test_no_model_is_judged_on_rows_that_it_was_trained_on_in_another_dataset(
    dataset: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    features = FeatureSet.open(dataset)
    asked: list[int] = []

    def counted(*of: Any) -> Windows:
        asked.append(len(windows := windows_of(*of)))
        return windows

    monkeypatch.setattr(module, "windows_of", counted)
    valid = features.valid_rows()
    until_us = int(np.median(features.end_us[valid]))
    facts = {"fingerprint": "another", "trained_until_us": until_us, SEEN: sample_windows(features)}
    registry.models["1"] = replace(registry.models["1"], trained={"datasets": [facts]})
    registry.champion = "1"
    assert promote([dataset], "reclaim/2").moved
    assert asked[-1] == np.count_nonzero(features.end_us[valid] > until_us) < len(valid)
    facts["trained_until_us"] = features.cuts_us[1]
    registry.champion = "1"
    with pytest.raises(ModelError, match="no validation row to judge on"):
        promote([dataset], "reclaim/2")


def facts_of(dataset: Path) -> dict[str, Any]:
    """Return what a bundle says of a dataset whose validation rows its model was tuned on."""
    features = FeatureSet.open(dataset)
    trained, tuned = features.cuts_us
    return {"fingerprint": features.manifest["dataset"], "trained_until_us": trained, "tuned_until_us": tuned}


def test_the_held_out_forecaster_of_a_model_answers_for_the_rows_that_it_learned_from(
    dataset: Path, registry: Registry
) -> None:
    facts = facts_of(dataset)
    registry.models["3"] = replace(
        registry.models["3"], held_out=LargestOfTheDay(0.0), trained={"datasets": [facts], "settings": SETTINGS}
    )
    assert promote([dataset], "reclaim/3").moved


def test_of_several_datasets_it_answers_for_that_one_alone_that_the_model_learned_from(
    dataset: Path, other: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = facts_of(dataset)
    registry.models["2"] = replace(registry.models["2"], trained={"datasets": [facts]})
    learned_until_us: list[int | None] = []

    def answered(config: ReplayConfig, model: dict[str, Bundle], *of: Any) -> Any:
        learned_until_us.extend(bundle.learned_until_us for name, bundle in model.items() if name == "candidate")
        return answer(config, model, *of)

    answer = module._answered
    monkeypatch.setattr(module, "_answered", answered)
    promote([other, dataset], "reclaim/2")
    assert set(learned_until_us) == {None, facts["tuned_until_us"]}


def test_both_are_judged_by_the_horizon_the_budgets_and_the_tiers_of_the_candidate(
    dataset: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, ...]] = []

    def priced(answers: Any, windows: Windows, target: Any, budgets: Budgets, *, by_tier: bool) -> Calibration:
        asked.append((target, budgets, by_tier))
        return calibrate(answers, windows, target, budgets, by_tier=by_tier)

    def made(config: ReplayConfig, *of: Any) -> Any:
        asked_of.append(config.horizon_s)
        return estimator_makers(config, *of)

    def compared(paired: Paired, name: str, against: str, resource: int, budget: float | None = None) -> Comparison:
        kept.append(budget)
        return compare(paired, name, against, resource, budget)

    asked_of: list[int] = []
    kept: list[float | None] = []
    compare = Paired.compare
    monkeypatch.setattr(Paired, "compare", compared)
    monkeypatch.setattr(module, "calibrate", priced)
    monkeypatch.setattr(module, "estimator_makers", made)
    settings = {"budgets": {"baseline": 0.02, "aggressive": 0.04}, "by_tier": True}
    registry.models["2"] = replace(registry.models["2"], horizon_s=300, trained={"settings": settings})
    promotion = promote([dataset], "reclaim/2")
    features = FeatureSet.open(dataset)
    next_window = features.targets(features.valid_rows())[0][:, : len(RESOURCES), HORIZONS_S.index(300)]
    for target, *others in asked:
        assert np.array_equal(target, next_window, equal_nan=True)
        assert others == [Budgets(0.02, 0.04), True]
    assert asked_of == [300, 300]
    assert [row["budget"] for row in promotion.comparison] == kept == [0.02, 0.02, 0.04, 0.04]


def test_collections_of_several_datasets_are_different_ones_though_their_ids_are_alike(
    dataset: Path, other: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    units: list[int] = []

    def summed(scored: Scored, unit: Any, n: int) -> Any:
        units.append(n)
        return sums(scored, unit, n)

    monkeypatch.setattr(module, "sums", summed)
    counts = []
    for datasets in ([dataset], [other], [dataset, other]):
        registry.champion = "1"
        promote(datasets, "reclaim/2")
        counts.append(units[-1])
    assert counts[2] == counts[0] + counts[1]


def test_a_single_collection_has_no_noise_to_compare_with_and_is_refused(
    dataset: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_one_collection(*of: Any) -> Windows:
        windows = windows_of(*of)
        return replace(windows, collection_id=np.zeros(len(windows), np.int64))

    monkeypatch.setattr(module, "windows_of", of_one_collection)
    promotion = promote([dataset], "reclaim/2")
    assert promotion.refused
    assert "cannot be told from reclaim/1" in promotion.why
    assert registry.champion == "1"


def test_a_resource_without_limits_has_no_row_and_does_not_refuse_a_model(
    dataset: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_cpu_alone(*of: Any) -> Windows:
        windows = windows_of(*of)
        return replace(windows, limit=windows.limit * np.array([1.0, 0.0]))

    monkeypatch.setattr(module, "windows_of", of_cpu_alone)
    promotion = promote([dataset], "reclaim/2")
    assert (promotion.moved, registry.champion) == (True, "2")
    assert [(row["margin"], row["resource"]) for row in promotion.comparison] == [
        ("baseline", "CPU"), ("aggressive", "CPU"),
    ]  # fmt: skip


def test_a_refusal_names_what_is_worse_and_what_is_unknown(
    dataset: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdicts = (UNKNOWN, WORSE, "better")
    rows = [{"margin": "medium", "resource": verdict.upper(), "verdict": verdict} for verdict in verdicts]
    monkeypatch.setattr(module, "_compared", lambda *_: rows)
    why = f"reclaims less than reclaim/1 on validation rows ({UNKNOWN.upper()} at medium, {WORSE.upper()} at medium);"
    assert why in promote([dataset], "reclaim/2").why
    assert registry.champion == "1"


def test_a_version_that_is_not_there_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'none.db'}")
    with pytest.raises(ModelError, match="no model reclaim@candidate"):
        promote([])


@pytest.mark.parametrize("reference", ["./bundle", "/bundles/new", "builtin", "reclaim"])
def test_only_a_registered_version_is_promoted_and_the_error_says_so(reference: str) -> None:
    with pytest.raises(ModelError, match=f"^{reference}: expected NAME@ALIAS or NAME/VERSION of a registered model"):
        promote([], reference, force=True)
