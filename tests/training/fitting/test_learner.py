"""A learned estimator of one file and a line of registry: trained, searched, bundled, replayed and served."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from reclaim.config import load_config
from reclaim.data.dataset import Dataset
from reclaim.data.errors import ConfigError, HistoryTooShortError
from reclaim.features.feature_set import FeatureSet
from reclaim.features.registry import N_FEATURES
from reclaim.features.targets import HORIZONS_S, TARGETS
from reclaim.replay.open_loop.fold import run_base
from reclaim.serving.models.canary import check_answers
from reclaim.serving.models.loader import find_model, load_location
from reclaim.serving.models.scorer import Scorer, reserved
from reclaim.training.bundle import Bundle, load_bundle
from reclaim.training.estimators.registry import LEARNED
from reclaim.training.fitting.learner import check_known, unlearned_notes
from reclaim.training.fitting.sources import Source
from reclaim.training.fitting.train import TrainReport, run_training
from reclaim.training.fitting.tune import tune
from reclaim.training.margins.margin import MARGIN_NAMES
from reclaim.training.models.trees import Rows
from reclaim.training.settings import TrainConfig
from reclaim.training.tracking import runs as tracking
from tests.series import dataset_of, write_cell
from tests.training.constant_estimator import CONSTANT, ConstantForecaster, ConstantLearner


@pytest.fixture(scope="module", autouse=True)
def _registered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(LEARNED, "constant", CONSTANT)
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        patch.chdir(tmp_path_factory.mktemp("learner"))
        yield


@pytest.fixture(scope="module")
def dataset(_registered: None) -> Path:
    """Return a dataset with features."""
    write_cell(Path("raw"), tasks=20, windows=300)
    return dataset_of(Path("raw"), Path("dataset")).path


@pytest.fixture(scope="module")
def config() -> TrainConfig:
    """Return settings as the command line reads them."""
    given = ["estimator=constant", "params.raised=0.25", "budgets.baseline=0.01", "budgets.aggressive=0.05"]
    return load_config(TrainConfig, None, given)


@pytest.fixture(scope="module")
def report(dataset: Path, config: TrainConfig) -> TrainReport:
    """Return a finished run."""
    return run_training(dataset, config)


@pytest.fixture(scope="module")
def bundle(report: TrainReport) -> Bundle:
    """Return the registered bundle."""
    folder, _ = tracking.fetch_bundle(f"{report.model}/{report.version}")
    return load_bundle(folder)


def test_its_run_is_registered_under_its_own_name_and_found_again(report: TrainReport, config: TrainConfig) -> None:
    assert (report.model, report.estimator) == ("reclaim-constant", "constant")
    assert tracking.find_run(report.run_id).params["params.raised"] == "0.25"
    assert run_training(Path("dataset"), config) == replace(report, reused=True)


def test_its_bundle_holds_what_was_fitted_and_which_settings(bundle: Bundle, dataset: Path) -> None:
    assert bundle.kind == "constant"
    assert "fit" not in bundle.trained["settings"]
    assert bundle.trained["settings"]["params"] == {"raised": 0.25}
    features = FeatureSet.open(dataset)
    y, _ = features.targets(features.train_rows())
    bare = bundle.forecaster.bare  # type: ignore[attr-defined]  # a Calibrated
    assert isinstance(bare, ConstantForecaster)
    assert bare.horizons_s == (300, 3_600)  # of a day nothing is known
    assert bare.demands[0, 1, 500] == pytest.approx(np.nanmedian(y[:, 0, 1]) * 1.25)


@pytest.mark.parametrize("margin", MARGIN_NAMES)
def test_replay_and_service_give_the_same_bits(bundle: Bundle, report: TrainReport, dataset: Path, margin: str) -> None:
    opened, features = Dataset.open(dataset), FeatureSet.open(dataset)
    windows = opened.windows(0)
    replayed = run_base(bundle.estimator(margin, opened.cell()), windows)
    model = load_location(find_model(f"{report.model}/{report.version}"), margin)
    check_answers(model.bundle)
    scorer = Scorer(model, opened.cell())
    steps = scorer.score(features.x[: len(windows)], windows).steps
    served = reserved(scorer.prices[margin], steps, windows)
    assert served.reservation.tobytes() == replayed.reservation.tobytes()
    assert served.rule.tobytes() == replayed.rule.tobytes()
    assert (served.reservation < windows.limit).any()


def test_its_settings_are_searched(dataset: Path, config: TrainConfig) -> None:
    found = tune([dataset], config, trials=2, config_file=Path("best.toml"))
    assert set(found.best) == {"params.raised"}
    assert load_config(TrainConfig, Path("best.toml")).params == {"raised": found.best["params.raised"]}


def test_the_loss_of_a_search_is_of_validation_rows_over_the_horizon_that_is_promised(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    # all training rows demand a half: validation rows do so within five minutes, and within an hour nine tenths
    x, oom = np.zeros((4, N_FEATURES), np.float32), np.zeros((4, len(HORIZONS_S)), np.float32)
    train, valid = (Rows(x, np.full((4, len(TARGETS), len(HORIZONS_S)), 0.5, np.float32), oom) for _ in range(2))
    valid.y[..., HORIZONS_S.index(3_600)] = 0.9
    of_part = {FeatureSet.train_rows: [train], FeatureSet.valid_rows: [valid]}
    module = "reclaim.training.fitting.learner"
    monkeypatch.setattr(f"{module}.chosen_rows", lambda _sources, rows_of, *_: of_part[rows_of])
    monkeypatch.setattr(f"{module}.rows_in_memory", lambda _, chosen: chosen[0])
    monkeypatch.setattr(f"{module}.hidden_features", lambda _: [])
    config = replace(config, params={})
    objective = ConstantLearner().objective([], config)
    losses = [objective(replace(config, horizon_s=s), lambda *_: None) for s in (300, 3_600)]
    assert losses == pytest.approx([0.0, -np.log(1e-7)])  # the least probability that counts


def test_rows_are_learned_from_without_the_features_that_training_was_too_short_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shape = (4, len(HORIZONS_S))
    rows = Rows(np.ones((4, 3), np.float32), np.ones((4, 1, shape[1]), np.float32), np.ones(shape, np.float32))
    module = "reclaim.training.fitting.learner"
    monkeypatch.setattr(f"{module}.rows_in_memory", lambda *_: rows)
    monkeypatch.setattr(f"{module}.hidden_features", lambda _: [1])
    learned = ConstantLearner()._rows([], [])
    assert np.isnan(learned.x).tolist() == [[False, True, False]] * 4


def test_settings_that_it_does_not_have_are_refused(dataset: Path, config: TrainConfig) -> None:
    with pytest.raises(ConfigError, match=r"params of constant \(levels, max_samples, raised\): .*leaves"):
        run_training(dataset, replace(config, params={"leaves": 3}))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"limit": 0.0}, "cpu: 4 have no limit; memory: 4 have no limit"),
        ({"inside": False}, "cpu: 4 rest on windows that end after the training period; memory: 4 rest"),
        ({"y": np.nan}, "cpu: 4 have nothing measured within 3600 s after them; memory: 4 have nothing"),
        ({"y": np.nan, "end_us": 6 * 3_600_000_000}, "cpu: 4 have nothing measured within 3600 s after them; memory"),
        ({"y": np.nan, "end_us": 6 * 3_600_000_000 + 1}, "cpu: 4 lie in the last horizon of the trace; memory: 4 lie"),
        ({"y": np.nan, "end_us": 7 * 3_600_000_000}, "cpu: 4 lie in the last horizon of the trace; memory: 4 lie"),
    ],
)
def test_where_no_demand_is_known_the_reason_is_said(changes: dict[str, float], reason: str) -> None:
    values = {"limit": 1.0, "inside": True, "y": 0.5, "end_us": 0} | changes
    shapes = {"limit": (4, 2), "inside": (4, 3), "y": (4, 3, 3), "end_us": (4,)}
    features: Any = SimpleNamespace(
        train_rows=lambda: np.arange(4), manifest={"span_us": [0, 7 * 3_600_000_000]},
        **{name: np.full(shape, values[name]) for name, shape in shapes.items()},
    )  # fmt: skip
    several = [cast(Source, SimpleNamespace(features=features))]
    elsewhere = np.array([[True, False, True], [True, False, True], [True, True, True]])  # of peaks it is no demand
    for known in (np.zeros((3, 3), bool), elsewhere):
        with pytest.raises(
            HistoryTooShortError, match="0 of 4 training rows have a known demand over 3600 s"
        ) as raised:
            check_known(known, several, 3_600)
        assert reason in str(raised.value)
    elsewhere[1, 1] = True
    check_known(elsewhere, several, 3_600)  # of one resource is enough


def test_of_several_datasets_the_ones_that_teach_nothing_of_the_horizon_are_named_with_the_reason() -> None:
    def source(name: str, y: NDArray[np.float32]) -> Source:
        features: Any = SimpleNamespace(
            train_rows=lambda: np.arange(4), manifest={"span_us": [0, 7 * 3_600_000_000]},
            limit=np.zeros((4, 2)), inside=np.ones((4, 3), bool), end_us=np.zeros(4), y=y,
            targets=lambda rows: (y[rows], None),
        )  # fmt: skip
        return cast(Source, SimpleNamespace(name=name, features=features))

    nothing, some = np.full((4, 3, 3), np.nan, np.float32), np.full((4, 3, 3), np.nan, np.float32)
    some[3, 1] = 0.5
    silent, other = source("silent", nothing), source("other", some)
    assert unlearned_notes([silent, other], 3_600) == [
        "silent: 0 of 4 training rows have a known demand over 3600 s, so it taught nothing of this horizon; "
        "cpu: 4 have no limit; memory: 4 have no limit"
    ]
    assert unlearned_notes([silent], 3_600) == []  # alone it is refused
    peaks = np.full((4, 3, 3), np.nan, np.float32)
    peaks[:, 2] = 0.5
    assert len(unlearned_notes([source("peaks", peaks), other], 3_600)) == 1
