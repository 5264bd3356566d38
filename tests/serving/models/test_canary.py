"""The canary batch is hard, a sound model passes it, and every kind of wrong answer is found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from reclaim.data.errors import ModelError
from reclaim.data.schema import TIERS, UNKNOWN_ID
from reclaim.data.windows import Windows
from reclaim.features.targets import HORIZONS_S, TARGETS
from reclaim.serving.models.canary import canary_batch, check_answers
from reclaim.training.bundle import Bundle
from reclaim.training.estimators.base import CAP, MODEL, RULES, STARTUP, Estimate, Forecast
from reclaim.training.models.forecaster import ALL_HEADS

_SHARE = {"baseline": 0.9, "medium": 0.8, "aggressive": 0.7}


def test_the_batch_is_always_the_same_and_holds_hard_histories() -> None:
    slot, windows = canary_batch()
    again_slot, again = canary_batch()
    assert (slot == again_slot).all()
    assert windows.usage.tobytes() == again.usage.tobytes()
    assert (np.diff(windows.end_us) >= 0).all()
    assert set(windows.tier) == {UNKNOWN_ID, *range(len(TIERS))}
    lengths = np.bincount(slot)
    assert lengths.min() == 1
    assert lengths.max() >= 100
    assert windows.limit[:, 0].max() / windows.limit[:, 0].min() > 1_000
    assert np.isnan(windows.usage).all(axis=1).any()
    gaps = [np.diff(windows.end_us[slot == task]).max(initial=0) for task in np.unique(slot)]
    assert max(gaps) > 3_600_000_000


def test_a_sound_model_passes_under_several_rules(bundle: Bundle) -> None:
    check_answers(bundle)
    slot, windows = canary_batch()
    rules = set(bundle.estimator("medium").update(slot, windows).rule.ravel())
    assert {MODEL, STARTUP, CAP} <= rules, [RULES[rule] for rule in rules]


class _Answers:
    """Stands for a bundle that reserves a share of the limit, changed by what a test does to its answers."""

    def __init__(self, change: Callable[[str, dict[str, NDArray[Any]]], None]) -> None:
        self._change = change
        self.forecaster = SimpleNamespace(heads=ALL_HEADS)

    def estimator(self, margin: str) -> Any:
        def update(slot: NDArray[np.int64], windows: Windows) -> Estimate:
            n = len(slot)
            thresholds = np.tile(np.linspace(0.05, 1.0, 20, dtype=np.float32), (n, len(TARGETS), 1))
            parts: dict[str, NDArray[Any]] = {
                "reservation": _SHARE[margin] * windows.limit,
                "survival": np.tile(np.linspace(0.9, 0.1, 20, dtype=np.float32), (n, len(TARGETS), len(HORIZONS_S), 1)),
                "quantiles": np.tile(np.linspace(0.1, 0.9, 9), (n, len(TARGETS), len(HORIZONS_S), 1)),
                "oom": np.full((n, len(HORIZONS_S)), 0.5),
            }
            self._change(margin, parts)
            rule = np.full(windows.limit.shape, MODEL, np.uint8)
            return Estimate(
                parts["reservation"], rule, Forecast(parts["survival"], thresholds, parts["quantiles"], parts["oom"])
            )

        return SimpleNamespace(update=update)


def _check(change: Callable[[str, dict[str, NDArray[Any]]], None]) -> None:
    check_answers(cast(Bundle, _Answers(change)))


def _set(margin: str, part: str, value: float) -> Callable[[str, dict[str, NDArray[Any]]], None]:
    def change(asked: str, parts: dict[str, NDArray[Any]]) -> None:
        if asked == margin:
            parts[part].flat[4] = value

    return change


def test_answers_within_their_bounds_pass() -> None:
    _check(lambda _margin, _parts: None)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_set("medium", "reservation", np.nan), "finite medium reservations"),
        (_set("medium", "reservation", -1e-9), "medium reservations of at least 0"),
        (_set("aggressive", "reservation", 1e12), "aggressive reservations of at most the limit"),
        (_set("baseline", "reservation", 0.0), "no baseline reservation below the medium one"),
        (_set("medium", "reservation", 0.0), "no medium reservation below the aggressive one"),
        (_set("medium", "survival", -0.1), "probabilities of a demand between 0 and 1"),
        (_set("medium", "survival", 0.95), "curves that do not rise"),
        (_set("medium", "quantiles", np.inf), "finite quantiles"),
        (_set("medium", "quantiles", 0.0), "quantiles that rise with their level"),
        (_set("medium", "oom", 1.01), "out-of-memory probabilities between 0 and 1"),
        (_set("medium", "oom", np.nan), "out-of-memory probabilities between 0 and 1"),
    ],
)
def test_an_answer_out_of_its_bounds_is_found(
    change: Callable[[str, dict[str, NDArray[Any]]], None], named: str
) -> None:
    with pytest.raises(ModelError, match=f"the canary batch: expected {named}, got 1 of"):
        _check(change)


def test_answers_that_differ_between_two_calls_are_found() -> None:
    drawn: Iterator[float] = iter(np.linspace(0.1, 0.2, 99))

    def change(_margin: str, parts: dict[str, NDArray[Any]]) -> None:
        parts["oom"][:] = next(drawn)

    with pytest.raises(ModelError, match="the same baseline answers when asked again"):
        _check(change)


def test_what_a_model_was_not_fitted_for_is_not_checked() -> None:
    fake = _Answers(lambda _margin, parts: parts["oom"].__setitem__((slice(None), 0), np.nan))
    fake.forecaster.heads = replace(ALL_HEADS, oom=np.array([False, True, True]))
    check_answers(cast(Bundle, fake))
