"""Rows that a model learned from: its held-out forecaster answers for those before the test, others are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from reclaim.data.errors import ConfigError
from reclaim.features.feature_set import FeatureSet
from reclaim.features.seen import SEEN, sample_windows
from reclaim.replay.runs.unseen import compared_on, judged_on
from reclaim.training.bundle import Bundle
from tests.replay.largest_of_the_day import LargestOfTheDay, bundle_of


@pytest.fixture
def features(dataset: Path) -> FeatureSet:
    return FeatureSet.open(dataset)


def learned(*facts: dict[str, Any], prior: bool = False) -> Bundle:
    """Return a model that learned once more from its validation rows; the facts are of its datasets, or its prior's."""
    trained = {"datasets": [], "prior": {"datasets": list(facts)}} if prior else {"datasets": list(facts)}
    return replace(bundle_of(LargestOfTheDay(), trained), held_out=LargestOfTheDay(2.0))


def facts_of(features: FeatureSet, **other: Any) -> dict[str, Any]:
    """Return facts of a dataset that the features are those of, as far as ``other`` says nothing else."""
    trained, tuned = features.cuts_us
    facts = {"name": "it", "trained_until_us": trained, "tuned_until_us": tuned, "kept_unseen": 1.0}
    return {"fingerprint": features.dataset.fingerprint, SEEN: sample_windows(features), **facts, **other}


def judged(bundle: Bundle, features: FeatureSet) -> Bundle:
    return judged_on("trees", bundle, features)


def test_rows_that_a_model_learned_from_are_left_to_its_held_out_forecaster_in_whatever_dataset_they_are(
    features: FeatureSet,
) -> None:
    begins_us, tests_us = features.cuts_us
    elsewhere = facts_of(features, fingerprint="another")
    for facts in (facts_of(features), elsewhere):
        assert judged(learned(facts), features).learned_until_us == tests_us
        asked, rows = compared_on({"champion": learned(facts)}, features, "--force")
        assert asked["champion"].learned_until_us == tests_us
        assert len(rows) == len(features.valid_rows())
    both = learned(elsewhere | {"tuned_until_us": begins_us}, elsewhere | {"tuned_until_us": begins_us + 7})
    assert judged(both, features).learned_until_us == begins_us + 7
    # margins of machines ask for it, with a held-out forecaster or without
    assert judged(replace(both, held_out=None), features).learned_until_us == begins_us + 7
    for unknown in (learned(), learned(elsewhere | {SEEN: []})):
        assert judged(unknown, features).learned_until_us is None


def test_a_forecaster_that_learned_from_nothing_that_margins_are_set_on_answers_for_all_rows(
    features: FeatureSet,
) -> None:
    begins_us = features.cuts_us[0]
    of_training = SimpleNamespace(n_buckets=features.n_buckets, cuts_us=(0, begins_us), dataset=features.dataset)
    sample = sample_windows(cast("FeatureSet", of_training))
    facts = facts_of(features, fingerprint="another", tuned_until_us=begins_us, **{SEEN: sample})
    assert judged(learned(facts), features).learned_until_us is None
    assert judged(learned(facts | {SEEN: sample_windows(features)}), features).learned_until_us == begins_us


def test_a_model_is_named_if_it_is_unknown_what_it_learned_from(
    features: FeatureSet, caplog: pytest.LogCaptureFixture
) -> None:
    facts = facts_of(features, fingerprint="another")
    judged(learned(facts), features)
    judged(learned({k: v for k, v in facts_of(features).items() if k != SEEN}), features)
    assert not caplog.messages
    del facts[SEEN]
    judged(learned(facts), features)
    assert "trees is of a release that kept no samples" in caplog.text
    compared_on({"champion": learned(facts, prior=True)}, features, "--force")
    assert "the champion is of a release that kept no samples" in caplog.text


@pytest.mark.parametrize("fingerprint", [None, "another"])
def test_no_margins_are_set_on_rows_that_a_model_was_fitted_on(features: FeatureSet, fingerprint: str | None) -> None:
    begins_us = features.cuts_us[0]
    facts = facts_of(features, trained_until_us=begins_us + 1)
    facts["fingerprint"] = fingerprint or facts["fingerprint"]
    with pytest.raises(ConfigError, match=f"trees was trained on windows until {begins_us + 1} µs .* margins are set"):
        judged(learned(facts), features)


def test_no_model_is_judged_on_what_its_prior_was_trained_or_tuned_on(features: FeatureSet) -> None:
    begins_us, tests_us = features.cuts_us
    facts = facts_of(features, trained_until_us=0, tuned_until_us=tests_us + 1)
    with pytest.raises(ConfigError, match=r"the prior of trees was tuned on this dataset until .* `--set prior=none`"):
        judged(learned(facts, prior=True), features)
    facts["tuned_until_us"] = begins_us + 1
    with pytest.raises(ConfigError, match=r"the prior of trees was trained on windows until .* `--set prior=none`"):
        judged(learned(facts, prior=True), features)
    facts["tuned_until_us"] = begins_us
    assert judged(learned(facts, prior=True), features).learned_until_us is None


def test_no_promotion_compares_on_rows_that_a_prior_was_tuned_on_in_another_dataset(features: FeatureSet) -> None:
    valid = features.valid_rows()
    until_us = int(sorted(features.end_us[valid])[len(valid) // 2])
    facts = facts_of(features, fingerprint="another", tuned_until_us=until_us)
    _, rows = compared_on({"candidate": learned(facts, prior=True)}, features, "--force")
    assert rows.tolist() == valid[features.end_us[valid] > until_us].tolist()


def test_no_promotion_compares_on_a_dataset_whose_validation_rows_a_prior_was_tuned_on(features: FeatureSet) -> None:
    with pytest.raises(ConfigError, match=r"the prior of the candidate was trained on it until .* or --force"):
        compared_on({"candidate": learned(facts_of(features), prior=True)}, features, "--force")
    facts = facts_of(features, tuned_until_us=features.cuts_us[0])
    _, rows = compared_on({"candidate": learned(facts, prior=True)}, features, "--force")
    assert len(rows) == len(features.valid_rows())


def test_no_model_is_judged_on_collections_of_which_it_saw_more_than_are_kept_unseen(features: FeatureSet) -> None:
    kept = features.manifest["config"]["split"]["test_unseen_share"]
    judged(learned(facts_of(features, kept_unseen=kept)), features)
    with pytest.raises(ConfigError, match=r"collections are to be unseen in the test, and trees was trained"):
        judged(learned(facts_of(features, kept_unseen=kept - 0.01)), features)
