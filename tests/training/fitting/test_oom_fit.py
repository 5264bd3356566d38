"""The out-of-memory model is fitted to rows chosen by weight, and learns what announces an end."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from reclaim.features.registry import AT, N_FEATURES
from reclaim.features.splits import IN_ALLOC, SEEN, TEST_UNSEEN, TRAIN, VALID, VALID_UNSEEN
from reclaim.features.targets import HORIZONS_S
from reclaim.training.fitting import oom_fit
from reclaim.training.fitting.oom_fit import FEWEST, choose, fit_oom, refit_oom, rows_of
from reclaim.training.models.oom_model import INPUTS

H = len(HORIZONS_S)
FREE = INPUTS.index(AT.memory_mean_2h)  # an input that chooses no row


@pytest.fixture(autouse=True)
def few_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fit a tenth of the trees: what is asked holds of any number."""
    monkeypatch.setattr(oom_fit, "_TREES", 20)


def source(x: NDArray[np.float32], oom: NDArray[np.float32]) -> Any:
    """Return all that a fit asks of a source: every row is of training."""
    n = len(x)
    features = SimpleNamespace(
        x=x,
        stands_for=lambda rows: np.ones(len(rows), np.float32),
        targets=lambda rows: (None, oom[rows]),
        period=np.full(n, TRAIN),
        group=np.full(n, SEEN),
    )
    return SimpleNamespace(features=features)


def cell(n: int, seed: int = 0, rare: float = 0.004) -> Any:
    """Return rows of which those above 97 % of the limit meet an end within the hour, rarely."""
    rng = np.random.default_rng(seed)
    x = np.zeros((n, N_FEATURES), np.float32)
    x[:, AT.memory_mean_2h] = rng.random(n)
    x[:, AT.memory_last] = np.where(rng.random(n) < rare, rng.uniform(0.97, 1, n), rng.uniform(0, 0.97, n))
    oom = np.repeat((x[:, AT.memory_last] >= 0.97).astype(np.float32)[:, None], H, axis=1)
    return source(x, oom)


def test_rows_before_an_end_are_all_kept_and_the_weights_add_up_to_the_rest() -> None:
    rng, n = np.random.default_rng(3), 60_000
    x = rng.random((n, N_FEATURES)).astype(np.float32)
    x[:, [AT.ooms, AT.collection_ooms]] = rng.random((n, 2)) < 0.01
    oom = (rng.random((n, H)) < 0.003).astype(np.float32)
    oom[:, 0] = np.minimum(oom[:, 0], oom[:, 1])
    oom[rng.random(n) < 0.1] = np.nan
    (chosen,) = choose(source(x, oom), np.arange(n), [1])
    soon = (oom[:, :2] == 1).any(axis=1)
    kept_soon = (chosen.oom[:, :2] == 1).any(axis=1)
    assert kept_soon.sum() == soon.sum()
    assert (chosen.weight[kept_soon] == 1).all()
    assert np.isfinite(chosen.oom).all()
    assert sorted(set(chosen.weight.tolist())) == [1.0, 4.0, 10.0, 50.0]
    assert chosen.weight.sum() == pytest.approx(np.isfinite(oom).all(axis=1).sum(), rel=0.05)


def test_a_row_counts_for_all_that_it_stands_for_by_how_near_it_is_to_an_end() -> None:
    # a thousand rows of each kind: an end within the hour, within the day, near the limit, of either history, others
    kind = np.repeat(np.arange(6), 1_000)
    x, oom = np.zeros((6_000, N_FEATURES), np.float32), np.zeros((6_000, H), np.float32)
    oom[kind == 0, 1:], oom[kind == 1, 2] = 1, 1
    x[:, AT.memory_last] = np.where(kind == 2, 0.81, 0.79)
    x[(kind == 1) & (np.arange(6_000) % 2 == 0), AT.memory_last] = 0.9  # half are near the limit, too
    x[kind == 3, AT.ooms], x[kind == 4, AT.collection_ooms] = 1, 1
    x[:, AT.memory_mean_2h] = kind  # to know them again
    of = source(x, oom)
    of.features.stands_for = lambda rows: (1 + kind[rows]).astype(np.float32)
    (chosen,) = choose(of, np.arange(6_000), [1])
    chosen_kind = chosen.x[:, FREE]
    for k, over_share in enumerate((1, 4, 10, 10, 10, 50)):
        assert set(chosen.weight[chosen_kind == k].tolist()) == {over_share * (1 + k)}
    for k, share in enumerate((1, 0.25, 0.1, 0.1, 0.1, 0.02)):
        assert (chosen_kind == k).sum() == pytest.approx(1_000 * share, rel=0.35)


def test_rows_are_the_same_however_many_are_read_at_once_and_none_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of = cell(3_000, rare=0.5)
    (whole,) = choose(of, np.arange(3_000), [1])
    monkeypatch.setattr(oom_fit, "_BLOCK", 700)
    (pieces,) = choose(of, np.arange(3_000), [1])
    none, _ = choose(of, np.arange(0), [1, 2])
    for all_at_once, by_piece, no in zip(whole, pieces, none, strict=True):
        np.testing.assert_array_equal(by_piece, all_at_once)
        assert no.shape == (0, *all_at_once.shape[1:])


def test_probabilities_are_those_of_all_rows_and_not_of_the_ones_that_were_kept() -> None:
    of = cell(10_000, rare=0.02)
    x, label = of.features.x, of.features.targets(slice(None))[1]  # itself, no copy
    label[np.random.default_rng(1).random(10_000) < 0.5] = 0  # half of those near the limit meet no end
    model = fit_oom([of], seed=0)
    assert model is not None
    # one of a hundred rows, and one of four of those that are kept
    assert model.predict(x)[:, 1].mean() == pytest.approx(label[:, 1].mean(), rel=0.6)


def test_of_more_rows_than_are_learned_from_some_of_every_source_are_drawn_by_the_seed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cells = [cell(3_000, seed, rare=0.5) for seed in (1, 2)]
    for k, of in enumerate(cells):
        of.features.x[:, AT.memory_mean_2h] = np.arange(3_000) + 3_000 * k  # a number of its own
    whole, _ = oom_fit._draws(cells, [5, 6], (TRAIN,))
    monkeypatch.setattr(oom_fit, "_MOST_ROWS", len(whole.x) // 2)
    some, others = oom_fit._draws(cells, [5, 6], (TRAIN,))
    assert len(some.x) == len(others.x) == len(some.oom) == len(some.weight) == len(whole.x) // 2
    assert (some.x != others.x).any()
    # the rows are those of the whole, in order, and of both cells alike
    at = np.flatnonzero(np.isin(whole.x[:, FREE], some.x[:, FREE]))
    for ours, theirs in zip(some, whole, strict=True):
        np.testing.assert_array_equal(ours, theirs[at])
    assert (some.x[:, FREE] < 3_000).mean() == pytest.approx((whole.x[:, FREE] < 3_000).mean(), abs=0.05)


def test_tasks_inside_an_alloc_instance_are_learned_from_too() -> None:
    group = np.array([SEEN, VALID_UNSEEN, TEST_UNSEEN, IN_ALLOC] * 2)
    features: Any = SimpleNamespace(period=np.repeat([TRAIN, VALID], 4), group=group)
    assert rows_of(features, TRAIN).tolist() == [0, 3]
    assert rows_of(features, VALID).tolist() == [4, 5, 7]


def test_the_second_fit_learns_from_the_validation_period_as_if_it_were_training() -> None:
    both = cell(30_000, 1)
    early = np.arange(30_000) < 18_000
    both.features.period = np.where(early, TRAIN, VALID)
    x, oom = both.features.x, both.features.targets(np.arange(30_000))[1]
    probe = cell(3_000, 9, rare=0.05).features.x
    first, second = fit_oom([both], seed=0), fit_oom([both], seed=0, periods=(TRAIN, VALID))
    early_alone, all_of_training = fit_oom([source(x[early], oom[early])], seed=0), fit_oom([source(x, oom)], seed=0)
    assert first is not None
    assert second is not None
    assert early_alone is not None
    assert all_of_training is not None
    np.testing.assert_array_equal(first.predict(probe), early_alone.predict(probe))
    np.testing.assert_array_equal(second.predict(probe), all_of_training.predict(probe))
    assert (second.predict(probe) != first.predict(probe)).any()


def test_the_second_fit_serves_no_horizon_that_the_first_has_no_calibration_for() -> None:
    whole, early = cell(30_000, 1, rare=0.02).features, np.arange(30_000) < 18_000
    label = whole.targets(np.arange(30_000))[1]
    label[early, 0] = np.nan  # so only the validation period knows the shortest horizon
    both = source(whole.x, label)
    both.features.period = np.where(early, TRAIN, VALID)
    first, free = fit_oom([both], seed=0), fit_oom([both], seed=0, periods=(TRAIN, VALID))
    assert first is not None
    assert free is not None
    assert (first.fitted.tolist(), free.fitted.tolist()) == ([False, True, True], [True, True, True])
    second = refit_oom(first, [both], seed=0)
    probe = both.features.x[:500]
    assert np.isnan(second.predict(probe)[:, 0]).all()
    np.testing.assert_array_equal(second.predict(probe)[:, 1:], free.predict(probe)[:, 1:])


def test_where_a_second_fit_lacks_a_horizon_the_first_serves() -> None:
    first, few = fit_oom([cell(30_000, rare=0.02)], seed=0), cell(2_000, rare=0)
    assert first is not None
    assert refit_oom(first, [few], seed=0) is first
    one_less = cell(30_000, rare=0.02)
    label = one_less.features.targets(slice(None))[1]
    label[:, 0] = np.nan
    assert refit_oom(first, [one_less], seed=0) is first


def test_a_property_of_a_collection_that_all_its_ends_share_is_not_learned() -> None:
    whole = cell(30_000)
    x, met = whole.features.x, whole.features.targets(np.arange(30_000))[1][:, 1] > 0.5
    for of_the_collection in (AT.memory_limit, AT.cpu_limit, AT.cpi, AT.tier_prod, AT.cpu_mean_2h):
        x[:, of_the_collection] = met
    model = fit_oom([whole], seed=0)
    assert model is not None
    probe, other = x[:3_000].copy(), x[:3_000].copy()
    for of_the_collection in (AT.memory_limit, AT.cpu_limit, AT.cpi, AT.tier_prod, AT.cpu_mean_2h):
        other[:, of_the_collection] = 1 - other[:, of_the_collection]
    np.testing.assert_array_equal(model.predict(probe), model.predict(other))


@pytest.mark.parametrize("many", [False, True])
def test_the_level_of_memory_over_days_is_learned_from_many_ends_alone(
    monkeypatch: pytest.MonkeyPatch, *, many: bool
) -> None:
    whole = cell(30_000)
    x, oom = whole.features.x, whole.features.targets(slice(None))[1]
    oom[np.flatnonzero(oom[:, 0] == 0)[:5], 1:] = 1  # what is within the hour alone does not count
    levels = [AT.memory_max_ever, AT.memory_p98_48h, AT.memory_same_hour_7d]
    x[:, levels], x[:, AT.memory_last] = oom[:, :1], 0.9
    ends = int((oom[:, 0] == 1).sum())
    monkeypatch.setattr(oom_fit, "MANY", ends if many else ends + 1)
    model = fit_oom([whole], seed=0)
    assert model is not None
    other = x[:3_000].copy()
    other[:, levels] = 1 - other[:, levels]
    assert (model.predict(x[:3_000]) != model.predict(other)).any() == many


def test_it_learns_what_announces_an_end_from_several_cells() -> None:
    cells = [cell(30_000, seed) for seed in (1, 2)]
    model = fit_oom(cells, seed=0)
    assert model is not None
    unseen = cell(5_000, 9, rare=0.05).features
    p, label = model.predict(unseen.x)[:, 1], unseen.targets(slice(None))[1][:, 1] > 0.5
    assert np.mean(p[label][:, None] > p[~label][None, :300]) > 0.95
    again = fit_oom(cells, seed=0)
    assert again is not None
    np.testing.assert_array_equal(again.predict(unseen.x), model.predict(unseen.x))


def test_a_feature_that_hardly_any_row_with_the_label_knows_does_not_stop_the_fit() -> None:
    rows = cell(30_000, rare=0.02).features
    unlabelled = np.arange(len(rows.x)) < 300
    label = rows.targets(slice(None))[1]
    label[unlabelled, 2] = np.nan
    rows.x[~unlabelled, AT.memory_growth_6h] = np.nan
    rows.x[301:, AT.memory_slope_2h] = np.nan
    model = fit_oom([source(rows.x, label)], seed=0)
    assert model is not None
    assert np.isfinite(model.predict(rows.x)).all()


@pytest.mark.parametrize(
    ("feature", "direction"),
    [
        (AT.memory_rate_2h, 1), (AT.ooms, 1), (AT.collection_ooms, 1), (AT.memory_above, -1), (AT.oom_since, -1),
        (AT.collection_oom_since, -1),
    ],
)  # fmt: skip
def test_the_probability_never_turns_around_in_a_feature_of_known_direction(feature: int, direction: int) -> None:
    rng, n = np.random.default_rng(5), 30_000
    x = np.zeros((n, N_FEATURES), np.float32)
    x[:, feature], x[:, AT.memory_last] = rng.random(n), 0.9  # all rows of a history or near the limit are alike
    band = (x[:, feature] > 0.4) & (x[:, feature] < 0.6)  # free trees would rise and fall
    model = fit_oom([source(x, np.repeat(band.astype(np.float32)[:, None], H, axis=1))], seed=0)
    assert model is not None
    at = np.zeros((101, N_FEATURES), np.float32)
    at[:, feature] = np.linspace(0, 1, 101)
    p = model.predict(at)[:, 1] * direction
    assert (np.diff(p) >= 0).all()
    assert p[-1] > p[0]


def test_too_few_ends_make_no_model() -> None:
    few = cell(2_000)
    x = few.features.x
    oom = np.zeros((len(x), H), np.float32)
    oom[: FEWEST - 1, 1:] = 1
    assert fit_oom([source(x, oom)], 0) is None
    oom[FEWEST - 1, 1] = 1
    model = fit_oom([source(x, oom)], 0)
    assert model is not None
    assert model.fitted.tolist() == [False, True, False]


def test_the_answer_is_the_mean_logit_of_models_of_rows_drawn_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    of_cell = cell(20_000, rare=0.02)

    def logit(seed: int) -> NDArray[np.float64]:
        model = fit_oom([of_cell], seed)
        assert model is not None
        p = model.predict(of_cell.features.x[:2_000])
        return np.log(p / (1 - p))

    together, models = logit(3), oom_fit._MODELS
    monkeypatch.setattr(oom_fit, "_MODELS", 1)
    alone = [logit(3 + k * oom_fit._SEED_STEP) for k in range(models)]
    assert np.abs(alone[0] - alone[1]).max() > 0.01
    np.testing.assert_allclose(together, np.mean(alone, axis=0), atol=1e-4)


def test_the_model_does_not_depend_on_how_many_fits_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    of, probe = cell(20_000, 4), cell(2_000, 5, rare=0.05).features.x
    made = []
    for at_once in (1, 4):
        monkeypatch.setattr(oom_fit, "THREADS", at_once)
        made.append(fit_oom([of], seed=0))
    alone, together = made
    assert alone is not None
    assert together is not None
    for name, of_alone in alone.trees._asdict().items():
        np.testing.assert_array_equal(of_alone, getattr(together.trees, name), err_msg=name)
    assert np.isfinite(together.predict(probe)).all()


def test_threads_that_change_the_filters_of_warnings_leave_them_as_they_were_and_other_warnings_are_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fit = oom_fit._boosted

    def changing(*given: Any) -> Any:
        warnings.resetwarnings()
        warnings.warn("`sklearn.utils.parallel.delayed` should be used with", UserWarning, stacklevel=1)
        warnings.warn("of the fit itself", UserWarning, stacklevel=1)
        return fit(*given)

    monkeypatch.setattr(oom_fit, "_boosted", changing)
    before = [*warnings.filters]
    with pytest.warns(UserWarning, match="of the fit itself") as shown:
        fit_oom([cell(5_000, rare=0.02)], seed=0)
    assert {str(one.message) for one in shown} == {"of the fit itself"}
    assert [*warnings.filters] == before
