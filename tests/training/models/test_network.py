"""The network: its loss by hand, absurd input stays harmless, one batch can be learned by heart."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from reclaim.training.fitting.network import oom_loss
from reclaim.training.models.network import Scaling, SurvivalNetwork, survival_loss, thresholds_from
from reclaim.training.models.survival import N_THRESHOLDS


def _network(n_features: int = 4, *, seed: int = 0, width: int = 32, depth: int = 2) -> SurvivalNetwork:
    network = SurvivalNetwork(
        Scaling(*(torch.full((n_features,), v) for v in (0.0, 1.0, -8.0, 8.0))),
        n_targets=3,
        n_horizons=3,
        width=width,
        depth=depth,
    )
    network.initialise(torch.Generator().manual_seed(seed))
    return network


def test_steps_of_every_curve_and_a_logit_of_every_horizon_come_out() -> None:
    steps, logits = _network()(torch.randn(5, 4))
    assert steps.shape == (5, 3, 3, N_THRESHOLDS)
    assert logits.shape == (5, 3)


def test_what_is_not_finite_counts_as_the_mean_of_the_feature() -> None:
    network = _network()
    known = torch.tensor([[0.0, 1.0, 0.0, 0.0]])
    unknown = torch.tensor([[float("nan"), 1.0, float("nan"), 0.0]])
    assert torch.equal(network(known)[0], network(unknown)[0])
    assert torch.isfinite(network(torch.full((1, 4), float("inf")))[0]).all()


THRESHOLDS = torch.tensor([0.2, 0.5, 1.0])[None, None]


def _steps(*passed: float) -> Tensor:
    """Return the log-odds of passing each threshold, of one row, target and horizon."""
    p = torch.tensor(passed)
    return torch.log(p / (1 - p))[None, None, None]


def test_survival_loss_worked_by_hand() -> None:
    # 0.3 passed the first of probability 0.8 and not the second of 0.5; the third says nothing of it
    loss = survival_loss(_steps(0.8, 0.5, 0.1), torch.full((1, 1, 1), 0.3), THRESHOLDS)
    assert loss.shape == (1, 1)
    assert loss.item() == pytest.approx(-np.log(0.8 * 0.5), rel=1e-6)
    above_the_limit = survival_loss(_steps(0.8, 0.5, 0.1), torch.full((1, 1, 1), 1.2), THRESHOLDS)
    assert above_the_limit.item() == pytest.approx(-np.log(0.8 * 0.5 * 0.1), rel=1e-6)
    equal = survival_loss(_steps(0.8, 0.5, 0.1), torch.full((1, 1, 1), 0.2), THRESHOLDS)
    assert equal.item() == pytest.approx(-np.log(0.2), rel=1e-5)  # a demand equal to a threshold does not exceed it


def test_survival_loss_is_least_at_the_true_distribution() -> None:
    # of ten demands four stay below 0.2, four below 0.5, two above: 6 of 10 pass the first step, 2 of 6 the second
    y = torch.tensor([0.1] * 4 + [0.4] * 4 + [0.8] * 2)[:, None, None]

    def loss(first: float, second: float) -> float:
        return survival_loss(_steps(first, second, 1e-6).expand(10, 1, 1, 3), y, THRESHOLDS.expand(10, 1, 3)).item()

    true = loss(0.6, 1 / 3)
    for first, second in ((0.55, 1 / 3), (0.65, 1 / 3), (0.6, 0.3), (0.6, 0.4)):
        assert true < loss(first, second)


def test_every_known_row_teaches_up_to_the_first_step_it_did_not_pass_and_an_unknown_one_nothing() -> None:
    steps = torch.zeros(3, 1, 1, 3, requires_grad=True)
    y = torch.tensor([0.3, float("nan"), 0.1])[:, None, None]
    loss = survival_loss(steps, y, THRESHOLDS.expand(3, 1, 3))
    assert loss.item() == pytest.approx(3 * np.log(2) / 2)  # two steps of one row, one of another: a mean over two rows
    loss.sum().backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    assert steps.grad is not None
    taught = steps.grad[:, 0, 0] != 0
    assert taught.tolist() == [[True, True, False], [False] * 3, [True, False, False]]


def test_a_row_counts_as_often_as_its_weight_says() -> None:
    # the rows cost -log(0.2) and -log(0.8 * 0.5); the first counts once, the second three times, the unknown one never
    y = torch.tensor([0.1, 0.3, float("nan")])[:, None, None]
    steps, weight = _steps(0.8, 0.5, 0.1).expand(3, 1, 1, 3), torch.tensor([1.0, 3.0, 8.0])
    loss = survival_loss(steps, y, THRESHOLDS.expand(3, 1, 3), weight)
    assert loss.item() == pytest.approx(-(np.log(0.2) + 3 * np.log(0.4)) / 4, rel=1e-6)


def test_dropout_leaves_out_its_share_of_hidden_units_while_training_alone() -> None:
    scaling = Scaling(*(torch.full((4,), v) for v in (0.0, 1.0, -8.0, 8.0)))
    network = SurvivalNetwork(scaling, n_targets=3, n_horizons=3, width=1024, depth=1, dropout=0.25)
    network.initialise(torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    left_out = (network.body(torch.ones(1, 4)) == 0).float().mean().item()
    assert left_out == pytest.approx(0.25, abs=0.06)
    assert (network.eval().body(torch.ones(1, 4)) != 0).all()


def test_a_target_of_no_known_row_costs_nothing_and_has_no_gradient() -> None:
    steps = torch.zeros(2, 1, 1, 3, requires_grad=True)
    loss = survival_loss(steps, torch.full((2, 1, 1), float("nan")), THRESHOLDS.expand(2, 1, 3))
    assert loss.item() == 0.0
    loss.sum().backward()  # type: ignore[no-untyped-call]
    assert steps.grad is not None
    assert (steps.grad == 0).all()


def test_oom_loss_of_an_unknown_horizon_is_zero_and_has_no_gradient() -> None:
    logits = torch.zeros(2, 2, requires_grad=True)
    label = torch.tensor([[1.0, float("nan")], [0.0, float("nan")]])
    loss = oom_loss(logits, label)
    assert loss[0].item() == pytest.approx(np.log(2))
    assert loss[1].item() == 0.0
    loss.sum().backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    assert logits.grad is not None
    assert (logits.grad[:, 1] == 0).all()


def test_one_batch_is_overfitted() -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(32, 4, generator=generator)
    y = torch.rand(32, 3, 3, generator=generator)
    label = (torch.rand(32, 3, generator=generator) > 0.5).float()
    thresholds = thresholds_from(torch.full((32, 3), 0.3))
    network = _network(width=64)
    optimizer = torch.optim.Adam(network.parameters(), lr=5e-3)
    first = 0.0
    for _ in range(400):
        steps, logits = network(x)
        loss = survival_loss(steps, y, thresholds).mean() + oom_loss(logits, label).mean()
        first = first or loss.item()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        optimizer.step()
    assert loss.item() < 0.02 * first
    assert ((torch.sigmoid(logits) > 0.5).float() == label).all()
    survival = torch.sigmoid(steps).cumprod(-1)
    assert ((survival > 0.5) == (y[..., None] > thresholds[:, :, None])).all()


def test_steps_come_out_in_full_precision_where_the_rest_runs_in_bfloat16() -> None:
    network = _network(n_features=5)
    with torch.autocast("cpu", torch.bfloat16):
        steps, logits = network(torch.rand(4, 5))
    assert steps.dtype == torch.float32 == logits.dtype
