"""Folding a dataset: which rows are kept, what is known to have come after them, and that answers stay their own."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from reclaim.data.core.engine.workers import Engine
from reclaim.data.dataset import Dataset
from reclaim.data.windows import Windows, concatenate
from reclaim.features.feature_set import FeatureSet
from reclaim.features.splits import IN_ALLOC, TEST, TRAIN, VALID, in_period
from reclaim.features.targets import HORIZONS_S
from reclaim.replay.experiment import Source
from reclaim.replay.open_loop.estimates import CandidateFold, estimate_all
from reclaim.replay.open_loop.fold import fold_dataset, run_base
from reclaim.replay.open_loop.history import History
from reclaim.replay.settings import ReplayConfig
from reclaim.training.bundle import Bundle
from reclaim.training.estimators.registry import build_estimator
from reclaim.training.margins.answers import Answers, Widened
from reclaim.training.margins.margin import MARGIN_NAMES, NO_MARGIN, Guarded, Margin
from reclaim.training.margins.tune import TunedEstimator, Tuning
from reclaim.training.models.estimator import ForecastEstimator
from tests.every_row import labels_of

HOUR, NEXT = HORIZONS_S.index(3600), HORIZONS_S.index(300)


def fold(path: Path, horizon_s: int = 3600) -> tuple[History, dict[str, Answers]]:
    makers = {"borg": lambda: build_estimator("borg")}
    return fold_dataset(FeatureSet.open(path), horizon_s, makers, {})


@pytest.fixture(scope="module")
def folded(dataset: Path) -> tuple[History, dict[str, Answers]]:
    return fold(dataset)


def global_rows(path: Path, history: History) -> np.ndarray:
    """Return the row of the feature set that each row of a history came from, found by task and time."""
    opened = Dataset.open(path)
    everything = concatenate([opened.windows(b) for b in range(opened.n_buckets)])

    def keys(windows: Windows) -> list[tuple[int, ...]]:
        columns = (windows.collection_id, windows.instance_index, windows.end_us)
        return list(zip(*(column.tolist() for column in columns), strict=True))

    at = {key: row for row, key in enumerate(keys(everything))}
    return np.array([at[key] for key in keys(history.windows)])


def test_rows_after_training_are_kept_with_the_one_just_before_them(
    dataset: Path, folded: tuple[History, dict[str, Answers]]
) -> None:
    history, features = folded[0], labels_of(FeatureSet.open(dataset))
    kept = np.bincount(history.period, minlength=3)
    assert kept[VALID] == (features.period == VALID).sum()
    assert kept[TEST] == (features.period == TEST).sum()
    assert kept[TRAIN] == 30  # one window of each task
    first = np.flatnonzero(history.previous < 0)
    assert (history.period[first] == TRAIN).all()
    later = np.flatnonzero(history.previous >= 0)
    before = history.previous[later]
    assert (history.windows.collection_id[later] == history.windows.collection_id[before]).all()
    assert (history.windows.start_us[later] == history.windows.end_us[before]).all()
    assert history.known_s[first].min() > 0.5 * 86_400


def test_targets_are_those_of_the_features_and_stop_at_the_end_of_validation(
    dataset: Path, folded: tuple[History, dict[str, Answers]]
) -> None:
    history, features = folded[0], labels_of(FeatureSet.open(dataset))
    y = features.y[global_rows(dataset, history)]
    test = history.period == TEST
    np.testing.assert_array_equal(history.target[test], y[test, :2, HOUR].astype(np.float64))
    np.testing.assert_array_equal(history.next_target[test], y[test, :2, NEXT].astype(np.float64))
    assert np.isnan(history.target[history.period == TRAIN]).all()
    settable = in_period(VALID, features.period, features.group)
    for targets, horizon in ((history.target, HOUR), (history.next_target, NEXT)):
        inside = features.inside[global_rows(dataset, history), horizon]
        shown = (history.period == VALID) & inside & settable[global_rows(dataset, history)]
        np.testing.assert_array_equal(targets[shown], y[shown, :2, horizon].astype(np.float64))
        assert np.isnan(targets[(history.period == VALID) & ~shown]).all()
        assert shown.any()


def test_another_horizon_has_its_own_targets(dataset: Path) -> None:
    history = fold(dataset, horizon_s=300)[0]
    np.testing.assert_array_equal(history.target, history.next_target)


def widened(answers: Answers) -> Widened:
    assert isinstance(answers, Widened)
    return answers


def test_answers_are_those_of_the_whole_history(dataset: Path, folded: tuple[History, dict[str, Answers]]) -> None:
    opened = Dataset.open(dataset)
    everything = concatenate([opened.windows(b) for b in range(opened.n_buckets)])
    whole = run_base(build_estimator("borg"), everything)
    history, answers = folded
    rows = global_rows(dataset, history)
    np.testing.assert_array_equal(widened(answers["borg"]).of["baseline"].reservation, whole.reservation[rows])
    np.testing.assert_array_equal(widened(answers["borg"]).of["aggressive"].rule, whole.rule[rows])


def test_a_learned_estimator_answers_from_the_stored_features_what_it_would_by_folding(
    dataset: Path, bundle: Bundle
) -> None:
    opened = Dataset.open(dataset)
    everything = concatenate([opened.windows(b) for b in range(opened.n_buckets)])
    history, priced = fold_dataset(FeatureSet.open(dataset), 3600, {"network": bundle.bare_estimator}, {})
    rows = global_rows(dataset, history)
    answers = priced["network"]
    for margin in MARGIN_NAMES:
        alone = ForecastEstimator(bundle.forecaster, 3600, bundle.prices[margin], bundle.mean_limit, opened.cell())
        whole = run_base(alone, everything)
        held = answers.under(bundle.prices, margin, history.windows)
        np.testing.assert_array_equal(held, whole.reservation[rows])
        assert len(np.unique(whole.reservation)) > 100


def test_settings_are_chosen_without_reading_a_test_row(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, features = Dataset.open(dataset), FeatureSet.open(dataset)
    read = opened.windows

    def chosen(period: int | None, horizon_s: int = 3600) -> Tuning:
        def changed(_: Dataset, bucket: int) -> Windows:
            windows = read(bucket)
            # a window that ends as a period does is measured within it
            here, usage = np.searchsorted(features.cuts_us, windows.end_us) == period, windows.usage.copy()
            usage[here] = np.random.default_rng(bucket).random(usage[here].shape)
            return replace(windows, usage=usage)

        monkeypatch.setattr(Dataset, "windows", changed)
        return CandidateFold.run(features, ["borg"], {}).choose(horizon_s)["borg"]

    assert chosen(TEST) == chosen(None)
    assert chosen(VALID) != chosen(None)
    assert chosen(None, 300) != chosen(None)


@pytest.mark.parametrize("engine", [Engine(workers=1), pytest.param(Engine("processes", 2), marks=pytest.mark.slow)])
def test_the_settings_chosen_do_not_depend_on_the_engine_nor_on_the_number_of_workers(
    dataset: Path, engine: Engine
) -> None:
    folded = CandidateFold.run(FeatureSet.open(dataset), ["borg", "vpa", "limit"], {}, engine)
    assert set(folded.answers) == {"borg", "vpa"}
    assert folded.choose(3600, engine=engine) == folded.choose(3600)


def test_without_settings_to_choose_nothing_is_folded_and_no_worker_begins(
    dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "pool", None)
    folded = CandidateFold.run(FeatureSet.open(dataset), ["limit"], {})
    assert (len(folded.windows), folded.choose(3600)) == (0, {})


def test_what_was_tuned_is_what_replays_and_what_could_be_served(dataset: Path) -> None:
    opened = Dataset.open(dataset)
    source = Source(opened, FeatureSet.open(dataset), {})
    estimates = estimate_all(source, ReplayConfig(estimators=("borg", "limit")))
    tuning = {budget: tuple(of.values()) for budget, of in source.settings["borg"].items()}
    margins = {k: of for k, of in estimates.calibrations["borg"].settings.items() if isinstance(of, Margin)}
    assert tuning != {"baseline": ({}, {}), "aggressive": ({}, {})}
    everything = concatenate([opened.windows(b) for b in range(opened.n_buckets)])
    rows = global_rows(dataset, estimates.history)
    for margin in MARGIN_NAMES:
        served = run_base(Guarded(TunedEstimator("borg", tuning, margins, margin), NO_MARGIN), everything)
        np.testing.assert_array_equal(estimates.reservations("borg")[margin], served.reservation[rows])


def test_untuned_estimators_have_the_published_settings(dataset: Path) -> None:
    source = Source(Dataset.open(dataset), FeatureSet.open(dataset), {})
    estimates = estimate_all(source, ReplayConfig(estimators=("borg",), tune=False))
    assert not source.settings
    np.testing.assert_array_equal(
        widened(estimates.answers["borg"]).of["baseline"].reservation,
        widened(fold(dataset)[1]["borg"]).of["baseline"].reservation,
    )


def tasks_of(windows: Windows) -> set[tuple[int, int]]:
    return set(zip(windows.collection_id.tolist(), windows.instance_index.tolist(), strict=True))


def test_tasks_inside_an_alloc_instance_are_left_out(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first_bucket, read = tasks_of(Dataset.open(dataset).windows(0)), Dataset.windows

    def in_alloc(self: Dataset, bucket: int) -> Windows:
        windows = read(self, bucket)
        windows.in_alloc[:] = bucket == 0
        return windows

    monkeypatch.setattr(Dataset, "windows", in_alloc)
    history, _ = fold(dataset)
    assert IN_ALLOC not in history.group
    assert first_bucket
    assert first_bucket.isdisjoint(tasks_of(history.windows))
