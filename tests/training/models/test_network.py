"""The network: quantiles never cross, absurd input stays harmless, one batch can be learned by heart."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from reclaim.training.fitting.network import oom_loss, pinball_loss
from reclaim.training.models.network import QuantileNetwork, Scaling, inverse_transform, transform
from reclaim.training.settings import QUANTILE_LEVELS, TRANSFORMS


def _network(n_features: int = 4, *, seed: int = 0, width: int = 32, depth: int = 2) -> QuantileNetwork:
    network = QuantileNetwork(
        Scaling(*(torch.full((n_features,), v) for v in (0.0, 1.0, -8.0, 8.0))),
        n_targets=3,
        n_horizons=3,
        n_levels=len(QUANTILE_LEVELS),
        width=width,
        depth=depth,
    )
    network.initialise(torch.Generator().manual_seed(seed))
    return network


@pytest.mark.parametrize("seed", range(5))
def test_quantiles_do_not_cross_whatever_the_weights(seed: int) -> None:
    network = _network(seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator))
    quantiles, logits = network(torch.randn(500, 4, generator=generator) * 100)
    assert quantiles.shape == (500, 3, 3, len(QUANTILE_LEVELS))
    assert logits.shape == (500, 3)
    assert (quantiles.diff(dim=-1) >= 0).all()


def test_what_is_not_finite_counts_as_the_mean_of_the_feature() -> None:
    network = _network()
    known = torch.tensor([[0.0, 1.0, 0.0, 0.0]])
    unknown = torch.tensor([[float("nan"), 1.0, float("nan"), 0.0]])
    assert torch.equal(network(known)[0], network(unknown)[0])
    assert torch.isfinite(network(torch.full((1, 4), float("inf")))[0]).all()


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_are_undone_and_keep_what_is_unknown(name: str) -> None:
    y = torch.tensor([0.0, 0.01, 0.5, 1.0, 30.0, float("nan")])
    back = inverse_transform(transform(y, name), name)
    assert torch.allclose(back[:5], y[:5], rtol=1e-5, atol=1e-7)
    assert torch.isnan(back[5])
    assert inverse_transform(torch.tensor([-1.0]), name).item() == 0.0


def test_pinball_loss_worked_by_hand() -> None:
    # level 0.9: 0.5 below the truth costs 0.9 * 0.5, 0.5 above costs 0.1 * 0.5; the unknown row has no part
    quantiles = torch.tensor([0.5, 1.5, 9.0]).reshape(3, 1, 1, 1)
    y = torch.tensor([1.0, 1.0, float("nan")]).reshape(3, 1, 1)
    loss = pinball_loss(quantiles, y, torch.tensor([0.9]))
    assert loss.shape == (1, 1)
    assert loss.item() == pytest.approx((0.45 + 0.05) / 2)


def test_pinball_loss_is_least_at_the_quantile() -> None:
    y = torch.arange(1000).float().reshape(-1, 1, 1) / 1000
    losses = [pinball_loss(torch.full((1000, 1, 1, 1), q), y, torch.tensor([0.95])).item() for q in (0.9, 0.95, 0.99)]
    assert losses[1] < losses[0]
    assert losses[1] < losses[2]


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
    network = _network(width=64)
    levels = torch.tensor(QUANTILE_LEVELS)
    optimizer = torch.optim.Adam(network.parameters(), lr=5e-3)
    first = 0.0
    for _ in range(600):
        quantiles, logits = network(x)
        loss = pinball_loss(quantiles, y, levels).mean() + oom_loss(logits, label).mean()
        first = first or loss.item()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        optimizer.step()
    assert loss.item() < 0.1 * first
    assert ((torch.sigmoid(logits) > 0.5).float() == label).all()
    assert (quantiles[..., 0] - y).abs().mean() < 0.05


def test_quantiles_add_up_in_full_precision_where_the_rest_runs_in_bfloat16() -> None:
    network = _network(n_features=5)
    with torch.autocast("cpu", torch.bfloat16):
        quantiles, logits = network(torch.rand(4, 5))
    assert quantiles.dtype == torch.float32 == logits.dtype
    assert (quantiles.diff(dim=-1) > 0).all()
