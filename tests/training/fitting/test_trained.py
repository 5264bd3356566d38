"""A fit becomes a model: prices by the first forecaster, the newest one served at them, and scores of each."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from reclaim.data.schema import RESOURCES
from reclaim.features.feature_set import FeatureSet
from reclaim.features.targets import HORIZONS_S, TARGETS
from reclaim.training.fitting.learner import Fitted
from reclaim.training.fitting.sources import Source, open_sources
from reclaim.training.fitting.trained import Trained, add_machines, calibrate_fit, compare_with_builtin, score
from reclaim.training.margins.margin import Budgets
from reclaim.training.models.oom_model import OomModel
from reclaim.training.settings import TrainConfig
from tests.series import dataset_of, write_cell
from tests.training.constant_estimator import ConstantForecaster

CONFIG = TrainConfig(budgets=Budgets(0.01, 0.05))


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[Source]:
    """Return a small dataset."""
    folder = tmp_path_factory.mktemp("trained")
    write_cell(folder / "raw", tasks=12, windows=300)
    return open_sources([dataset_of(folder / "raw", folder / "dataset", buckets=1).path])


def _forecaster(most: float) -> ConstantForecaster:
    """Return one that calls every demand up to ``most`` as likely as any other."""
    demands = np.broadcast_to(np.linspace(0, most, 101, dtype=np.float32), (len(TARGETS), len(HORIZONS_S), 101))
    return ConstantForecaster(demands, np.full(len(HORIZONS_S), 0.25), (0.9, 0.98))


class _Oom:
    """As much of an out-of-memory model as says one probability of every row."""

    fitted = np.ones(len(HORIZONS_S), np.bool_)

    def __init__(self, probability: float) -> None:
        self.probability = probability

    def predict(
        self, x: NDArray[np.float32], horizons_s: tuple[int, ...] = HORIZONS_S, threads: int = 1
    ) -> NDArray[np.float64]:
        assert threads == 1
        return np.full((len(x), len(horizons_s)), self.probability)


def _trained(sources: list[Source], refitted: float | None = None, oom: OomModel | None = None) -> Trained:
    again = None if refitted is None else _forecaster(refitted)
    rows = [source.features.valid_rows() for source in sources]
    fitted = Fitted(_forecaster(0.9), [1], {"rows": 1}, refitted=again)
    return calibrate_fit(fitted, oom, sources, rows, CONFIG)


def test_a_refitted_forecaster_is_served_and_scored_on_test_rows_at_what_the_first_one_set(
    sources: list[Source],
) -> None:
    alone, twice = _trained(sources), _trained(sources, refitted=0.3)
    assert alone.served is alone.first
    assert twice.served.bare is twice.fitted.refitted
    assert twice.served.calibration == twice.first.calibration
    assert twice.prices == alone.prices
    of_first, of_both = score(alone, sources, CONFIG), score(twice, sources, CONFIG)
    assert of_both.valid == of_first.valid
    assert of_both.test["cpu"]["3600s"]["pinball"] != of_first.test["cpu"]["3600s"]["pinball"]
    assert of_both.n_test == sum(len(source.features.test_rows()) for source in sources)


def test_an_out_of_memory_model_is_calibrated_by_validation_rows_and_a_second_one_served_and_scored_at_that(
    sources: list[Source], monkeypatch: pytest.MonkeyPatch
) -> None:
    # every second row meets an end, of which the first model says a tenth and the second a fifth
    real = FeatureSet.targets

    def targets(features: FeatureSet, rows: NDArray[np.int64]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        y, oom = real(features, rows)
        return y, np.repeat((rows % 2).astype(np.float32)[:, None], oom.shape[1], axis=1)

    first, second = (cast("OomModel", _Oom(probability)) for probability in (0.1, 0.2))
    given: list[Any] = []
    monkeypatch.setattr(FeatureSet, "targets", targets)

    def refit(*arguments: Any) -> OomModel:
        given.append(arguments)
        return second

    monkeypatch.setattr("reclaim.training.fitting.trained.refit_oom", refit)
    trained = _trained(sources, refitted=0.3, oom=first)
    assert given == [(first, sources, CONFIG.seed)]
    assert (trained.first.oom, trained.served.oom) == (first, second)
    assert (trained.raw_oom == 0.1).all()
    assert trained.valid.forecast.oom_probability == pytest.approx(0.5, abs=0.02)
    scored = score(trained, sources, CONFIG)
    assert (scored.raw_oom == 0.2).all()
    np.testing.assert_array_equal(scored.oom, trained.first.calibration.apply(scored.raw_oom))
    assert (scored.oom > 0.5).all()
    # the Brier score of a half is a quarter, and of more than that above it
    assert scored.valid["oom"]["3600s"]["brier"] == pytest.approx(0.25, abs=0.001)
    assert scored.test["oom"]["3600s"]["brier"] == pytest.approx(np.mean((scored.oom[:, 1] - scored.label[:, 1]) ** 2))


def test_without_test_rows_the_reliability_is_of_validation_rows(
    sources: list[Source], monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = _trained(sources)
    monkeypatch.setattr(FeatureSet, "test_rows", lambda _: np.zeros(0, np.int64))
    scored = score(trained, sources, CONFIG)
    assert (scored.test, scored.n_test) == ({}, 0)
    assert scored.raw_oom is trained.raw_oom
    assert scored.label is trained.valid.oom


def test_a_model_that_reserves_limits_is_worse_than_the_built_in_one_in_words(sources: list[Source]) -> None:
    trained = _trained(sources)
    limits = dict.fromkeys(trained.calibration.reclaimed, (0.0,) * len(RESOURCES))
    timid = replace(trained, calibration=replace(trained.calibration, reclaimed=limits))
    assert not trained.worse
    worse = compare_with_builtin(timid, sources, CONFIG).worse
    found = [re.fullmatch(r"0\.0 % of (\w+) for [\d.]+ % at a budget of (\d) %", one) for one in worse]
    assert [one and one.groups() for one in found] == [("CPU", "1"), ("memory", "1"), ("CPU", "5"), ("memory", "5")]


def test_machines_are_fitted_for_every_horizon_of_the_forecaster(sources: list[Source]) -> None:
    trained = _trained(sources)
    assert not trained.machines
    assert tuple(add_machines(trained, CONFIG).machines) == trained.first.horizons_s
