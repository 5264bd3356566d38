"""The training loop: it learns, it repeats itself, and a killed run ends as if it had not been killed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from reclaim.data.errors import ConfigError, HistoryTooShortError, ModelError
from reclaim.features.feature_set import FeatureSet
from reclaim.features.registry import N_FEATURES
from reclaim.training.bundle import load_model
from reclaim.training.fitting import network as fit
from reclaim.training.fitting.devices import recorded as module
from reclaim.training.fitting.devices.distributed import Ranks
from reclaim.training.fitting.devices.recorded import Step, recorded_step
from reclaim.training.fitting.network import FitResult, choose_device, fit_network, oom_loss
from reclaim.training.fitting.samples import Samples
from reclaim.training.fitting.sources import Source
from reclaim.training.models.beyond import beyond_of
from reclaim.training.models.network import SurvivalNetwork, survival_loss
from reclaim.training.models.network_forecaster import NetworkForecaster
from reclaim.training.models.prior import quarters_of
from reclaim.training.models.survival import BELOW, NOW, thresholds_of
from reclaim.training.models.trees import Rows
from reclaim.training.settings import FitConfig, TrainConfig, TreeConfig

CONFIG = FitConfig(width=16, depth=1, epochs=4, batch_size=128, learning_rate=1e-2, device="cpu")


def rows_of_noise(n: int, seed: int) -> Rows:
    """Demand is what is used now plus noise that grows with the second feature; the third is sometimes unknown."""
    rng = np.random.default_rng(seed)
    x = np.zeros((n, NOW.max() + 1), np.float32)
    x[:, :3] = rng.random((n, 3))
    x[:, NOW] = x[:, :1]
    noise = rng.random((n, 3, 3)).astype(np.float32)
    y = 0.5 * x[:, 0, None, None] + 0.5 * x[:, 1, None, None] * noise
    y[rng.random(n) < 0.2, 0] = np.nan
    x[rng.random(n) < 0.2, 2] = np.nan
    oom = (rng.random((n, 3)) < 0.1).astype(np.float32)
    return Rows(x, y.astype(np.float32), oom)


class KilledError(Exception):
    """Ends a fit as a kill would."""


def weights_equal(a: FitResult, b: FitResult) -> bool:
    """Return whether two fits ended with the same weights, to the bit."""
    mine, theirs = a.network.state_dict(), b.network.state_dict()
    return all(torch.equal(mine[k], theirs[k]) for k in mine)


def killed_and_resumed(config: FitConfig, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[FitResult, FitResult]:
    """Return a whole fit, and one that was killed in the third epoch and run again."""
    train, valid, one_epoch, seen = rows_of_noise(1000, 0), rows_of_noise(300, 1), fit._epoch, []
    whole = fit_network(train, valid, config, seed=3)

    def killed_in_the_third(*args: Any) -> dict[str, float]:
        seen.append(args[4])
        if len(seen) == 3:
            raise KilledError
        return one_epoch(*args)

    monkeypatch.setattr(fit, "_epoch", killed_in_the_third)
    with pytest.raises(KilledError):
        fit_network(train, valid, config, seed=3, checkpoints=folder)
    torch.rand(7)  # what else was drawn in between has no part
    resumed = fit_network(train, valid, config, seed=3, checkpoints=folder)
    assert seen == [0, 1, 2, 2, 3]
    return whole, resumed


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_killed_run_goes_on_to_the_same_weights(
    dropout: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, resumed = killed_and_resumed(replace(CONFIG, dropout=dropout), tmp_path, monkeypatch)
    assert weights_equal(whole, resumed)
    assert [h["valid_loss"] for h in whole.history] == [h["valid_loss"] for h in resumed.history]


def test_the_same_seed_gives_the_same_weights_and_another_seed_others() -> None:
    train, valid = rows_of_noise(600, 0), rows_of_noise(200, 1)
    config = replace(CONFIG, epochs=1)
    assert weights_equal(fit_network(train, valid, config, seed=3), fit_network(train, valid, config, seed=3))
    assert not weights_equal(fit_network(train, valid, config, seed=3), fit_network(train, valid, config, seed=4))


def test_a_checkpoint_of_other_data_is_refused(tmp_path: Path) -> None:
    valid = rows_of_noise(200, 1)
    fit_network(rows_of_noise(600, 0), valid, replace(CONFIG, epochs=1), seed=3, checkpoints=tmp_path)
    with pytest.raises(ModelError, match="belongs to a run of other settings or data"):
        fit_network(rows_of_noise(600, 2), valid, replace(CONFIG, epochs=1), seed=3, checkpoints=tmp_path)


def test_the_fitted_curves_hold_where_noise_is_small_and_where_it_is_large() -> None:
    # dropout and a strong decay serve tasks that were not seen, of which there are none here; they cost calibration
    config = replace(CONFIG, epochs=12, dropout=0.0, weight_decay=0.01)
    result = fit_network(rows_of_noise(6000, 0), rows_of_noise(1000, 1), config, seed=1)
    test = rows_of_noise(4000, 2)
    survival = NetworkForecaster.of(result.network).predict(test.x).survival[:, 0, 0]
    above = test.y[:, 0, 0, None] > thresholds_of(test.x)[:, 0]
    known = np.isfinite(test.y[:, 0, 0])
    for half in (test.x[:, 1] < 0.5, test.x[:, 1] >= 0.5):
        foreseen, came = survival[known & half].mean(axis=0), above[known & half].mean(axis=0)
        np.testing.assert_allclose(foreseen, came, atol=0.04)


def test_dropout_is_off_in_evaluation() -> None:
    valid = rows_of_noise(300, 1)
    result = fit_network(rows_of_noise(600, 0), valid, replace(CONFIG, dropout=0.5), seed=1)
    x = torch.from_numpy(valid.x)
    assert torch.equal(result.network(x)[0], result.network(x)[0])
    # the loss that chose the epoch was that of the whole network
    samples = Samples.of_rows(valid)
    data = fit._Data(Samples.of_rows(rows_of_noise(600, 0)), samples, CONFIG, Ranks())
    with torch.no_grad():
        loss = float(data.loss(result.network, samples.take(torch.arange(300)), Ranks()))
    assert loss == pytest.approx(result.history[result.best_epoch]["valid_loss"], rel=1e-6)


def test_what_training_hardly_saw_is_cut_off() -> None:
    rows = rows_of_noise(3000, 0)
    rows.x[:2, 0] = 1e6, -1e6  # two of 3,000 at each end are rarer than 0.1 %
    result = fit_network(rows, rows_of_noise(200, 1), replace(CONFIG, epochs=1), seed=1)
    low, high = np.quantile(rows.x[:, 0], [0.001, 0.999])

    def answer(first: float) -> torch.Tensor:
        with torch.no_grad():
            x = torch.full((1, rows.x.shape[1]), 0.5)
            x[0, 0] = first
            steps: torch.Tensor = result.network(x)[0]
        return steps

    assert torch.equal(answer(1.01), answer(1e6))
    assert torch.equal(answer(-0.01), answer(-1e6))
    torch.testing.assert_close(answer(float(high)), answer(1e6), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(answer(float(low)), answer(-1e6), rtol=1e-3, atol=1e-4)
    assert not torch.equal(answer(0.9), answer(0.8))


def test_the_caller_receives_each_epoch_and_may_end_the_fit() -> None:
    train, valid, told = rows_of_noise(600, 0), rows_of_noise(200, 1), list[tuple[int, float]]()
    result = fit_network(train, valid, CONFIG, seed=3, on_epoch=lambda epoch, loss: told.append((epoch, loss)))
    assert told == [(i, epoch["valid_loss"]) for i, epoch in enumerate(result.history)]
    assert len(told) == CONFIG.epochs

    def end(epoch: int, loss: float) -> None:
        told.append((epoch, loss))
        if epoch == 1:
            raise KilledError

    told.clear()
    with pytest.raises(KilledError):
        fit_network(train, valid, CONFIG, seed=3, on_epoch=end)
    assert [epoch for epoch, _ in told] == [0, 1]


def test_fitting_stops_when_validation_no_longer_improves() -> None:
    # the validation targets have nothing to do with the training ones: learning only hurts
    valid = rows_of_noise(200, 1)
    contrary = Rows(valid.x, (2.0 - valid.y).astype(np.float32), valid.oom)
    result = fit_network(
        rows_of_noise(600, 0), contrary, replace(CONFIG, epochs=30, patience=2, learning_rate=0.05), seed=1
    )
    assert len(result.history) < 30
    assert len(result.history) == result.best_epoch + 1 + 2


def test_no_rows_is_an_error_that_names_the_part_and_the_setting_that_holds_out_fewer_collections() -> None:
    some, none = rows_of_noise(10, 0), rows_of_noise(0, 0)
    with pytest.raises(HistoryTooShortError, match=r"training row.*--set split.test_unseen_share=0.01"):
        fit_network(none, some, CONFIG, seed=1)
    with pytest.raises(HistoryTooShortError, match=r"validation row.*--set split.test_unseen_share=0.01"):
        fit_network(some, none, CONFIG, seed=1)


@pytest.mark.parametrize("name", ["foo", "cuda:99", "meta"])
def test_a_device_that_is_not_here_is_refused_with_its_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"fit.device: '{name}' cannot be used here"):
        choose_device(name)
    assert choose_device("cpu").type == "cpu"


def _pretend_a_gpu(monkeypatch: pytest.MonkeyPatch, *, bfloat16: bool = True) -> list[torch.device]:
    """Let torch name two GPUs; return the devices that something was placed on, in turn."""
    used: list[torch.device] = []
    zeros = torch.zeros

    def placed(n: int, device: torch.device) -> torch.Tensor:
        used.append(device)
        return zeros(n)

    monkeypatch.setattr(torch, "zeros", placed)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: bfloat16 or including_emulation)
    return used


@pytest.mark.parametrize("name", ["cuda", "auto"])
def test_a_rank_of_torchrun_touches_its_own_gpu_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in (("TORCHELASTIC_RUN_ID", "none"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(variable, value)
    used = _pretend_a_gpu(monkeypatch)
    assert choose_device(name) == torch.device("cuda", 1)
    assert set(used) == {torch.device("cuda", 1)}


def test_bfloat16_is_refused_on_a_card_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    learner, config = fit.NetworkLearner(), TrainConfig(fit=replace(CONFIG, device="cuda", bfloat16=True))
    _pretend_a_gpu(monkeypatch, bfloat16=False)
    with pytest.raises(ConfigError, match=r"fit\.bfloat16: Tesla T4 has no bfloat16; set it to false"):
        learner.check(config)
    learner.check(replace(config, fit=replace(config.fit, bfloat16=False)))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)  # noqa: ARG005 - torch's
    learner.check(config)


def test_a_gpu_without_enough_memory_is_an_error_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of …")

    monkeypatch.setattr(fit, "chosen_rows", lambda *_: [])
    monkeypatch.setattr(fit, "_samples", full)
    config = TrainConfig(fit=CONFIG)
    learner, remedy = (
        fit.NetworkLearner(),
        r"out of memory; lower fit.max_samples \(400,000\), .*\(128\), .*fit.device=cpu",
    )
    for work in (lambda: learner.fit([], config, Path()), lambda: learner.objective([], config)):
        with pytest.raises(ConfigError, match=remedy) as told:
            work()
        assert "\n" not in str(told.value)


def test_a_cpu_without_enough_memory_is_an_error_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    width = 2**31 - 1  # 1 TB of weights, in the first layer alone
    train, valid = rows_of_noise(200, 0), rows_of_noise(100, 1)
    monkeypatch.setattr(fit, "chosen_rows", lambda *_: [])
    monkeypatch.setattr(fit, "hidden_features", lambda *_: [])
    monkeypatch.setattr(fit, "_samples", lambda *_: (train, valid))
    config = TrainConfig(fit=replace(CONFIG, width=width))
    with pytest.raises(ConfigError, match=rf"does not suffice; lower .*fit.width \({width:,}\)") as told:
        fit.NetworkLearner().objective([], config)(config, lambda *_: None)
    assert "fit.device=cpu" not in str(told.value)


def test_the_longest_history_decides_and_a_long_one_has_no_prior() -> None:
    def source(days: float, cut: float = 1.0) -> Any:
        end_us = int(days * 86_400e6)
        of: Any = SimpleNamespace(manifest={"span_us": [0, end_us]}, cuts_us=(0, int(end_us * cut)), fingerprint="f")
        return Source(of, of)

    def quarters(*sources: Any, **settings: Any) -> tuple[int, ...] | None:
        prior = fit.prior_of(sources, TrainConfig(**settings))
        return None if prior is None else prior.quarters

    assert quarters(source(2)) == quarters_of(2 * 86_400) != quarters_of(8 * 86_400)
    assert quarters(source(2), source(8)) == quarters_of(8 * 86_400)
    assert quarters(source(8, 0.25)) == quarters_of(2 * 86_400)  # what follows validation rows was not learned from
    assert quarters(source(2), source(40)) is None
    assert quarters(source(2), prior="none") is None


@pytest.mark.parametrize(
    ("saw", "reason"),
    [
        # as a prior of the same features: the rows that it was tuned on are those that set prices
        ({}, "was trained on windows until 150 µs on its clock, and the validation period, .* begins at 100 µs"),
        ({"trained_until_us": 50, "tuned_until_us": 101}, "was trained on windows until 101 µs"),
        ({"trained_until_us": 50, "tuned_until_us": 100}, None),
        ({"fingerprint": "another"}, None),
        ({"fingerprint": "another", "tuned_until_us": 200}, None),
        ({"trained_until_us": 151}, "was trained on this dataset until 151 µs .* its test period begins at 150 µs"),
        ({"tuned_until_us": 151}, "was tuned on this dataset until 151 µs"),
        ({"trained_until_us": 50, "tuned_until_us": 100, "kept_unseen": 0.0}, "20% of the collections .* unseen"),
    ],
)  # fmt: skip
def test_a_prior_is_refused_that_learned_from_rows_by_which_prices_are_set_or_that_are_tested(
    monkeypatch: pytest.MonkeyPatch, saw: dict[str, Any], reason: str | None
) -> None:
    split = {"role": "all", "test_unseen_share": 0.2}
    of: Any = SimpleNamespace(
        manifest={"span_us": [0, 200], "config": {"split": split}}, cuts_us=(100, 150), fingerprint="f", path="cell"
    )
    source, builtin = Source(of, of), load_model("builtin")
    learned = {"fingerprint": "f", **source.split_facts, **saw}
    monkeypatch.setattr(fit, "load_model", lambda _: replace(builtin, trained={"datasets": [learned]}))
    message = f"^prior: cell: .*{reason}.*; name one that learned from other clusters, or none$"
    with nullcontext() if reason is None else pytest.raises(ConfigError, match=message):
        fit.prior_of([source], TrainConfig(prior="m/1"))
    left_out = fit.prior_of([source], TrainConfig()) is None  # the built-in model, as the default
    assert left_out == (reason is not None)


def test_a_fit_ends_by_validation_rows_and_no_more_of_them_than_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, int, int]] = []

    def chosen(_sources: Any, rows_of: Any, limit: int, seed: int) -> list[np.ndarray]:
        asked.append((rows_of, limit, seed))
        return [np.arange(100)]

    monkeypatch.setattr(fit, "chosen_rows", chosen)
    monkeypatch.setattr(fit, "rows_in_memory", lambda _, rows: rows_of_noise(len(rows[0]), 0))
    config = TrainConfig(seed=7, fit=replace(CONFIG, max_valid_samples=100))
    train, valid = fit._samples([], config, [np.arange(300)])
    assert (len(train), len(valid)) == (300, 100)
    assert asked == [(FeatureSet.valid_rows, 100, 7)]


def test_a_fitted_network_is_tempered_by_the_rows_that_it_was_fitted_to(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    narrow = rows_of_noise(300, 0)
    x = np.zeros((300, N_FEATURES), np.float32)
    x[:, : narrow.x.shape[1]] = narrow.x
    rows = Rows(x, narrow.y, narrow.oom)
    valid = Samples.of_rows(rows)
    monkeypatch.setattr(fit, "chosen_rows", lambda *_: [])
    monkeypatch.setattr(fit, "_samples", lambda *_: (Samples.of_rows(rows), valid))
    for name in ("check_known", "hidden_features"):
        monkeypatch.setattr(fit, name, lambda *_: ())
    fitted = fit.NetworkLearner().fit([], TrainConfig(fit=replace(CONFIG, refit=False)), tmp_path)
    assert fitted.refitted is None
    expected = beyond_of([(rows.x, rows.y, None)])
    assert isinstance(fitted.forecaster, NetworkForecaster)
    assert expected is not None
    np.testing.assert_array_equal(fitted.forecaster.beyond, expected)


def test_the_second_fit_is_of_the_newest_rows_as_old_as_the_best_of_the_first_and_hides_the_same_features(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows, newest, valid = (rows_of_noise(n, seed) for n, seed in ((300, 0), (400, 2), (100, 1)))
    rows, newest, valid = (
        replace(of, x=np.pad(of.x, ((0, 0), (0, N_FEATURES - of.x.shape[1])))) for of in (rows, newest, valid)
    )
    rows.oom[:, 1] = newest.oom[:, 2] = np.nan
    monkeypatch.setattr(fit, "chosen_rows", lambda *_: [])
    monkeypatch.setattr(fit, "newest_rows", lambda *_: newest)
    monkeypatch.setattr(fit, "_samples", lambda *_: (Samples.of_rows(rows), Samples.of_rows(valid)))
    monkeypatch.setattr(fit, "check_known", lambda *_: None)
    monkeypatch.setattr(fit, "hidden_features", lambda *_: [0])
    fits: list[tuple[int, int | None, Any]] = []
    real = fit.fit_network

    def spied(train: Samples, *arguments: Any, **options: Any) -> FitResult:
        result = real(train, *arguments, **options)
        fits.append((len(train), options.get("epochs"), options["hidden"]))
        return replace(result, best_epoch=1)

    monkeypatch.setattr(fit, "fit_network", spied)
    config = TrainConfig(fit=replace(CONFIG, epochs=3))
    fitted = fit.NetworkLearner().fit([], config, tmp_path)
    assert fits == [(300, None, [0]), (400, 2, [0])]
    fit.NetworkLearner().objective([], config)(config, lambda *_: None)
    assert fits[2] == (300, None, [0])
    assert isinstance(fitted.refitted, NetworkForecaster)
    assert fitted.refitted.heads.oom.tolist() == [True, False, False]
    tempered = beyond_of([(newest.x, newest.y, None)])
    assert tempered is not None
    np.testing.assert_array_equal(fitted.refitted.beyond, tempered)


@pytest.mark.parametrize(
    "setting",
    [
        {"learning_rate": 2e-2}, {"weight_decay": 0.5}, {"dropout": 0.3}, {"warmup_share": 0.5}, {"batch_size": 64},
        {"oom_weight": 3.0}, {"width": 8}, {"depth": 2},
    ],
    ids=str,
)  # fmt: skip
def test_every_setting_of_the_fit_has_a_part_in_its_result(setting: dict[str, Any]) -> None:
    config = replace(CONFIG, epochs=2, dropout=0.0, weight_decay=0.1)
    losses = [
        fit_network(rows_of_noise(200, 0), rows_of_noise(100, 1), of, seed=1).history[-1]["valid_loss"]
        for of in (config, replace(config, **setting))
    ]
    assert losses[0] != losses[1]


@pytest.mark.parametrize("other", [{"seed": 4}, {"rows": 599}, {"dropout": 0.5}], ids=str)
def test_a_checkpoint_of_another_seed_number_of_rows_or_setting_is_refused(
    other: dict[str, Any], tmp_path: Path
) -> None:
    def run(seed: int = 3, rows: int = 600, dropout: float = 0.1) -> None:
        every, config = rows_of_noise(600, 0), replace(CONFIG, epochs=1, dropout=dropout)
        train = Rows(every.x[:rows], every.y[:rows], every.oom[:rows])
        fit_network(train, None, config, seed=seed, checkpoints=tmp_path)

    run()
    run()
    with pytest.raises(ModelError, match="belongs to a run of other settings or data"):
        run(**other)


def test_a_checkpoint_of_curves_at_other_thresholds_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, config = rows_of_noise(600, 0), replace(CONFIG, epochs=1)
    fit_network(rows, None, config, seed=3, checkpoints=tmp_path)
    monkeypatch.setattr(fit, "BELOW", (0.2, *BELOW[1:]))
    with pytest.raises(ModelError, match="belongs to a run of other settings or data"):
        fit_network(rows, None, config, seed=3, checkpoints=tmp_path)


@pytest.mark.parametrize("part", ["training", "validation"])
def test_a_loss_that_is_no_number_ends_the_fit_and_names_its_remedy(
    part: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    valid = rows_of_noise(100, 1) if part == "validation" else None
    monkeypatch.setattr(fit, "_validate", lambda *_: float("nan"))
    if valid is None:
        monkeypatch.setattr(fit, "_epoch", lambda *_: {"train_loss": float("inf")})
    with pytest.raises(ModelError, match=f"epoch 0: the {part} loss is .*; lower fit.learning_rate"):
        fit_network(rows_of_noise(200, 0), valid, CONFIG, seed=1, checkpoints=tmp_path)
    assert not list(tmp_path.iterdir())  # another run does not go on from it


def test_an_epoch_takes_every_row_once_in_an_order_of_its_own_at_the_rate_of_the_whole_schedule() -> None:
    train = Samples.of_rows(rows_of_noise(300, 0))
    config = replace(CONFIG, epochs=4, warmup_share=0.25, learning_rate=0.5)
    network = torch.nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(network.parameters(), 1.0)
    data = fit._Data(train, None, config, Ranks())

    def order_of(epoch: int, seed: int = 3) -> tuple[list[int], list[float]]:
        rows, rates = list[int](), list[float]()

        def step(positions: torch.Tensor) -> torch.Tensor:
            rows.extend(positions.tolist())
            rates.append(float(optimizer.param_groups[0]["lr"]))
            return torch.tensor(2.0)

        facts = fit._epoch(network, step, optimizer, data, epoch, seed)
        assert facts["train_loss"] == 2.0
        return rows, rates

    orders = [order_of(epoch)[0] for epoch in (0, 1, 0)] + [order_of(0, seed=4)[0]]
    assert all(sorted(order) == list(range(300)) for order in orders)
    assert orders[0] == orders[2]  # as an epoch that is run again after a kill
    assert orders[0] != orders[1]
    assert orders[0] != orders[3]
    # of 12 steps the first 3 climb from 0.04 of the highest rate, which the fourth has; then half a cosine over 9
    rates = [rate for epoch in range(4) for rate in order_of(epoch)[1]]
    climb = [0.5 * (0.04 + 0.96 * k / 3) for k in range(3)]
    assert rates == pytest.approx([*climb, *(0.25 * (1 + np.cos(np.pi * k / 9)) for k in range(9))])


def test_the_loss_of_out_of_memory_counts_by_its_weight_and_a_step_is_at_most_of_length_one() -> None:
    rows = Samples.of_rows(rows_of_noise(100, 0))
    network = fit_network(rows, None, replace(CONFIG, epochs=1), seed=3).network.eval()
    none, one, many = (fit._Data(rows, None, replace(CONFIG, oom_weight=weight), Ranks()) for weight in (0.0, 1.0, 1e4))
    batch = rows.take(torch.arange(100))
    with torch.no_grad():
        losses = [float(data.loss(network, batch, Ranks())) for data in (none, one)]
        expected = float(oom_loss(network(batch.x)[1], batch.oom).mean())
    assert losses[1] - losses[0] == pytest.approx(expected, rel=1e-4)
    before = [of.detach().clone() for of in network.parameters()]
    fit._step_of(network, torch.optim.SGD(network.parameters(), 1.0), many)(torch.arange(100))
    steps = [(a - b).detach() for a, b in zip(before, network.parameters(), strict=True)]
    moved = float(torch.cat([one.flatten() for one in steps]).norm())
    assert moved == pytest.approx(1.0, rel=1e-3)


def test_without_validation_rows_a_fit_ends_after_its_epochs_of_the_schedule_with_the_last_weights() -> None:
    train, config = rows_of_noise(1000, 0), replace(CONFIG, epochs=4, patience=4)
    short = fit_network(train, None, config, seed=3, epochs=2)
    assert (len(short.history), short.best_epoch) == (2, 1)
    whole = fit_network(train, None, config, seed=3)
    assert len(whole.history) == 4
    assert [one["train_loss"] for one in short.history] == [one["train_loss"] for one in whole.history[:2]]
    assert not weights_equal(short, whole)


def test_a_step_after_the_first_copies_nothing_from_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    # CUDA records no step that does
    train = Samples.of_rows(rows_of_noise(300, 0))
    network = fit_network(train, None, replace(CONFIG, epochs=1), seed=3).network.train()
    step = fit._step_of(network, torch.optim.AdamW(network.parameters()), fit._Data(train, None, CONFIG, Ranks()))
    step(torch.arange(128))

    def copied(*_: object, **__: object) -> None:
        raise AssertionError("a step copies from the host")

    for name in ("tensor", "as_tensor", "from_numpy"):
        monkeypatch.setattr(torch, name, copied)
    step(torch.arange(128))


def test_recorded_steps_end_with_the_weights_of_steps_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    # without a GPU, repeating a recording is stepping again: what is kept, put back and filled in is tested
    rows = Samples.of_rows(rows_of_noise(1000, 0))
    repeats: list[int] = []

    def recorded(step: Step, positions: torch.Tensor) -> Callable[[], torch.Tensor]:
        def repeat() -> torch.Tensor:
            repeats.append(len(positions))
            return step(positions)

        step(positions)  # as warming up does
        return repeat

    def weights(*, by_recording: bool) -> tuple[list[torch.Tensor], dict[str, float]]:
        torch.manual_seed(7)
        network = SurvivalNetwork(
            fit._scaling(rows, ()), n_targets=3, n_horizons=3, width=8, depth=1,
            dropout=0.2,
        )  # fmt: skip
        network.initialise(torch.Generator().manual_seed(1))
        optimizer = torch.optim.AdamW(network.parameters(), torch.tensor(0.01))
        data = fit._Data(rows, rows, CONFIG, Ranks())
        step = fit._step_of(network, optimizer, data)
        if by_recording:
            step = recorded_step(step, optimizer, 128, rows.device)
        facts = [fit._epoch(network, step, optimizer, data, epoch, 3) for epoch in range(2)]
        return list(network.parameters()), facts[-1]

    monkeypatch.setattr(module, "_record", recorded)
    (mine, facts), (theirs, expected) = weights(by_recording=True), weights(by_recording=False)
    assert repeats == [128] * (2 + 2 * 7)  # the comparison, and the whole batches of two epochs; the last has 104 rows
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    assert facts["train_loss"] == expected["train_loss"]


@pytest.mark.parametrize("fault", ["refused", "another result"])
def test_a_recording_that_does_not_agree_is_given_up_and_changes_nothing(
    fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    weight = torch.nn.Parameter(torch.tensor([1.0]))
    optimizer = torch.optim.AdamW([weight], torch.tensor(0.1))

    def step(positions: torch.Tensor) -> torch.Tensor:
        loss = (weight**2).sum() * len(positions)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    def recorded(step: Step, positions: torch.Tensor) -> Callable[[], torch.Tensor]:
        step(positions)
        if fault == "refused":
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        return lambda: torch.tensor(2.0)  # the loss of the first step, and no step

    monkeypatch.setattr(module, "_record", recorded)
    assert recorded_step(step, optimizer, 2, torch.device("cpu")) is step
    assert weight.item() == 1.0
    assert all(not moment.any() for moment in optimizer.state[weight].values())
    assert "steps are not recorded on cpu" in caplog.text


def test_what_no_training_row_knows_is_not_counted_as_fitted() -> None:
    rows = rows_of_noise(300, 0)
    rows.y[:, 1] = np.nan
    rows.y[:, 0, 2] = np.nan
    rows.oom[:, 1:] = np.nan
    heads = fit_network(rows, rows_of_noise(100, 1), replace(CONFIG, epochs=1), seed=1).heads
    assert heads.targets.tolist() == [[True, True, False], [False] * 3, [True] * 3]
    assert heads.oom.tolist() == [True, False, False]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FitConfig(width=0), "width must be from 1 to 2147483647, got 0"),
        (lambda: FitConfig(learning_rate=0.0), "learning_rate must be above 0"),
        (lambda: FitConfig(depth=2**31), "depth must be from 1 to 2147483647, got 2147483648"),
        (lambda: TreeConfig(leaves=1), "leaves must be from 2 to 2147483647, got 1"),
        (lambda: TreeConfig(threads=2**31), "threads must be from 1 to 2147483647, got 2147483648"),
    ],
)
def test_settings_out_of_range_are_refused_with_the_value(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_hidden_feature_moves_nothing() -> None:
    train = rows_of_noise(2_000, 0)
    network = fit_network(train, rows_of_noise(500, 1), CONFIG, seed=1, hidden=(0,)).network
    x = torch.from_numpy(train.x[:10].copy())
    moved = x.clone()
    moved[:, 0] += 0.5
    assert torch.equal(network(x)[0], network(moved)[0])
    moved[:, 1] += 0.5
    assert not torch.equal(network(x)[0], network(moved)[0])


def test_a_feature_that_no_training_row_had_moves_nothing() -> None:
    train = rows_of_noise(2_000, 0)
    train.x[:, 0] = np.nan
    network = fit_network(train, rows_of_noise(500, 1), CONFIG, seed=1).network
    x = torch.from_numpy(train.x[:10].copy())
    known = x.clone()
    known[:, 0] = 0.7
    assert torch.equal(network(x)[0], network(known)[0])


def test_a_row_of_weight_two_counts_as_two_rows_in_every_loss() -> None:
    nan = float("nan")
    generator = torch.Generator().manual_seed(1)
    steps, logits = (torch.randn(shape, generator=generator) for shape in ((3, 2, 3, 8), (3, 3)))
    y, label = torch.rand((3, 2, 3), generator=generator), torch.tensor([[0.0, 1.0, nan], [1.0, nan, nan], [0.0] * 3])
    y[1, 0, 1] = nan
    thresholds = torch.linspace(0.1, 0.9, 8).expand(3, 2, 8)
    twice, weight = torch.tensor([0, 0, 1, 2]), torch.tensor([2.0, 1.0, 1.0])
    torch.testing.assert_close(
        survival_loss(steps, y, thresholds, weight), survival_loss(steps[twice], y[twice], thresholds[twice])
    )
    torch.testing.assert_close(oom_loss(logits, label, weight), oom_loss(logits[twice], label[twice]))
    ones = torch.ones(3)
    assert torch.equal(survival_loss(steps, y, thresholds, ones), survival_loss(steps, y, thresholds))


def test_a_fit_counts_rows_by_their_weight() -> None:
    rows, config = rows_of_noise(600, seed=2), FitConfig(width=8, depth=1, epochs=1, batch_size=600, dropout=0.0)

    def loss(weight: np.ndarray | None) -> float:
        samples = Samples.of_rows(replace(rows, weight=weight))
        return fit_network(samples, samples, config, seed=1).history[0]["train_loss"]

    assert loss(np.ones(600, np.float32)) == loss(None)
    assert loss(np.full(600, 3, np.float32)) == pytest.approx(loss(None))
    assert loss(np.arange(600, dtype=np.float32)) != pytest.approx(loss(None))
