"""Keeps a model from rows that it learned from: refuses tests, leaves earlier rows to its held-out forecaster."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from reclaim.data.errors import ConfigError
from reclaim.features.seen import SEEN, holds
from reclaim.training.fitting.sources import fitted_until_us, reason_against, until
from reclaim.training.settings import NO_PRIOR

if TYPE_CHECKING:
    from reclaim.features.feature_set import FeatureSet
    from reclaim.training.bundle import Bundle

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Learned:
    """A dataset that a model, or its prior, learned from, compared with the one in question.

    Attributes
    ----------
    facts : mapping
        The bundle's facts of it.
    of_prior, same : bool
        Whether the prior learned from it; whether it is the dataset in question, by its fingerprint.
    in_validation, in_test : bool
        Whether it is another dataset that also has windows of these periods.
    """

    facts: Mapping[str, Any]
    of_prior: bool
    same: bool
    in_validation: bool
    in_test: bool

    @property
    def fitted_until_us(self) -> int:
        """The end of the rows that every forecaster of the model may have been fitted on, µs; 0 without that record."""
        return fitted_until_us(self.facts, of_prior=self.of_prior)


def judged_on(name: str, bundle: Bundle, features: FeatureSet) -> Bundle:
    """Return a model for a replay of a dataset: its held-out forecaster answers for rows that it learned from.

    A bundle without a record of what it learned from passes.

    Parameters
    ----------
    name : str
        Of the model, for the message.
    bundle : Bundle
    features : FeatureSet
        Of the dataset. Their periods are the current ones; the model may have been trained on earlier ones of this
        dataset, or on another dataset that has the same windows.

    Raises
    ------
    ConfigError
        It was fitted, stopped, priced or calibrated on rows that are tested here, or fitted on those that margins are
        set on.
    """
    learned = _learned_from(name, bundle, features)
    path = features.dataset.path
    remedy = (
        f"train on these features, `reclaim train {path}`, or replay on those that the model was trained on, "
        f"built by `reclaim features {path}` with the settings of that time"
    )
    if bundle.origin is not None and bundle.origin.builtin:
        remedy = "name another with --model, or none with --no-model"
    for one in learned:
        whose = f"the prior of {name}" if one.of_prior else name
        then = f"train it with another one, or with `--set prior={NO_PRIOR}`" if one.of_prior else remedy
        if one.in_test:
            raise ConfigError(
                f"{path}: {whose} was trained or tuned on windows that are also to be tested here, as part of the "
                f"dataset {one.facts['name']}; {then}"
            )
        if one.same or one.in_validation:
            reason = reason_against(one.facts, features, whose, of_prior=one.of_prior, same=one.same)
            if reason is not None:
                raise ConfigError(f"{path}: {reason}; {then}")
    return _as_asked(bundle, learned)


def compared_on(
    models: Mapping[str, Bundle], features: FeatureSet, remedy: str
) -> tuple[dict[str, Bundle], NDArray[np.int64]]:
    """Return models for validation rows of a dataset, and those of its rows that none was fitted on.

    Raises
    ------
    ConfigError
        One of them, or its prior, was fitted on validation rows as part of this very dataset; ``remedy`` ends the
        message.
    """
    asked, rows, begins_us = {}, features.valid_rows(), features.cuts_us[0]
    for name, bundle in models.items():
        learned = _learned_from(f"the {name}", bundle, features)
        for one in learned:
            if one.same and one.fitted_until_us > begins_us:
                whose = f"the prior of the {name}" if one.of_prior else f"the {name}"
                raise ConfigError(
                    f"{features.dataset.path}: {whose} was trained on it {until(one.fitted_until_us)}, and its "
                    f"validation period begins at {begins_us} µs; judge on another dataset, or {remedy}"
                )
            if one.in_validation:
                rows = rows[features.end_us[rows] > one.fitted_until_us]
        asked[name] = _as_asked(bundle, learned)
    return asked, rows


def _learned_from(name: str, bundle: Bundle, features: FeatureSet) -> list[_Learned]:
    """Return the datasets that a model and its prior learned from, each beside the dataset in question.

    A bundle of an earlier release has no samples of these, which is said.
    """
    of_prior = bundle.trained.get("prior", {}).get("datasets", ())
    every = [(facts, False) for facts in bundle.trained.get("datasets", ())] + [(facts, True) for facts in of_prior]
    same = [facts["fingerprint"] == features.dataset.fingerprint for facts, _ in every]
    samples = [() if mine else facts.get(SEEN, ()) for (facts, _), mine in zip(every, same, strict=True)]
    if any(SEEN not in facts and not mine for (facts, _), mine in zip(every, same, strict=True)):
        log.warning(
            "%s: %s is of a release that kept no samples of what models learned from, so it is unknown whether it "
            "learned from windows of this dataset; train it again to know", features.dataset.path, name,
        )  # fmt: skip
    begins_us, tests_us = features.cuts_us
    held = holds(samples, features, [(begins_us, tests_us), (tests_us, None)])
    return [
        _Learned(facts, its_prior, mine, *found)
        for (facts, its_prior), mine, found in zip(every, same, held, strict=True)
    ]


def _as_asked(bundle: Bundle, learned: list[_Learned]) -> Bundle:
    """Return a model with the end of the rows that it learned from; its held-out forecaster answers for them."""
    mine = [one.facts for one in learned if (one.same or one.in_validation) and not one.of_prior]
    until_us = max((int(facts.get("tuned_until_us", 0)) for facts in mine), default=None)
    return replace(bundle, learned_until_us=until_us)
