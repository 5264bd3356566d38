"""The network: one pass from a task's features to the survival curve of every target and horizon, and OOM logits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from reclaim.training.models.survival import ABOVE, BELOW, LAST, N_THRESHOLDS


class Scaling(NamedTuple):
    """Shift and scale that turn squashed features into inputs; each float32, shape (F,).

    ``mean`` and ``scale`` standardise; ``low`` and ``high`` cut off, in standard deviations, values that training
    hardly saw: one absurd measurement must not move a reservation beyond what was learned.
    """

    mean: Tensor
    scale: Tensor
    low: Tensor
    high: Tensor


class SurvivalNetwork(nn.Module):
    """A multi-layer perceptron whose outputs are the steps of survival curves, which therefore cannot rise.

    A step is the log-odds of P(demand > r_k | demand > r_k-1), for each threshold of ``survival.thresholds_of``: the
    curve is the product of the steps so far (discrete-time survival; Gensheimer and Narasimhan, "A scalable
    discrete-time survival model for neural networks", 2019).

    Parameters
    ----------
    scaling : Scaling
        Kept with the weights.
    n_targets, n_horizons : int
    width, depth : int
        Units per hidden layer, hidden layers.
    dropout : float
        Share of hidden units left out while training.
    """

    mean: Tensor
    scale: Tensor
    low: Tensor
    high: Tensor

    def __init__(
        self, scaling: Scaling, *, n_targets: int, n_horizons: int, width: int, depth: int, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.shape = (n_targets, n_horizons, N_THRESHOLDS)
        for name, values in zip(Scaling._fields, scaling, strict=True):
            self.register_buffer(name, values)
        sizes = [len(scaling.mean)] + [width] * depth
        layers: list[nn.Module] = []
        for i, o in pairwise(sizes):
            layers += [nn.Linear(i, o), nn.SiLU(), nn.Dropout(dropout)]
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(width, n_targets * n_horizons * N_THRESHOLDS + n_horizons)

    def initialise(self, generator: torch.Generator) -> None:
        """Draw the weights: He's for the hidden layers, small ones for the head."""
        with torch.no_grad():
            for layer in self.body:
                if isinstance(layer, nn.Linear):
                    bound = (6.0 / layer.in_features) ** 0.5
                    layer.weight.uniform_(-bound, bound, generator=generator)
                    layer.bias.zero_()
            self.head.weight.normal_(0.0, 0.01, generator=generator)
            self.head.bias.zero_()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the steps, shape (B, T, H, J), and OOM logits, shape (B, H); what is not finite counts as the mean."""
        z = torch.nan_to_num((squash(x) - self.mean) / self.scale, nan=0.0).clamp(self.low, self.high)  # (B, F)
        out: Tensor = self.head(self.body(z)).float()
        n_horizons = self.shape[1]
        return out[:, :-n_horizons].reshape(-1, *self.shape), out[:, -n_horizons:]


@contextmanager
def cpu_threads(n: int) -> Iterator[None]:
    """Let torch use ``n`` CPU threads inside the block.

    One is the rule here: the matrices are small, so a second thread gains little, loses much where other processes need
    the cores (it waits at every operation), and results would depend on the number.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def squash(x: Tensor) -> Tensor:
    """Return the fourth root of the size with the sign of ``x``.

    Shares of the limit crowd near zero with a long tail. The fourth root spreads them out nearly as the logarithm does,
    is defined at zero, and is exact everywhere: two square roots.
    """
    return x.sign() * x.abs().sqrt().sqrt()


def thresholds_from(now: Tensor) -> Tensor:
    """Return ``survival.thresholds_of``, but for rounding, of ``survival.used_now``; (B, T) to (B, T, J)."""
    below, left = _shares(now.device)
    above = torch.exp(now.log()[..., None] * left + (1 - left) * math.log(LAST))
    above[..., 0] = now
    return torch.cat([now[..., None] * below, above], dim=-1)


@lru_cache
def _shares(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the shares of the thresholds; once per device, as CUDA cannot record a step that copies from the host."""
    return torch.tensor(BELOW, device=device), torch.tensor([1 - u for u in ABOVE], device=device)


def weighted_mean(values: Tensor, known: Tensor, weight: Tensor | None) -> Tensor:
    """Return the mean over known rows, shapes (B, ...), 0 where there is none; ``weight``: (B,), None: all alike."""
    if weight is None:
        return values.sum(0) / known.sum(0).clamp(min=1)
    each = weight.reshape(-1, *(1,) * (values.ndim - 1))
    return (values * each).sum(0) / (known * each).sum(0).clamp(min=1)


def survival_loss(steps: Tensor, y: Tensor, thresholds: Tensor, weight: Tensor | None = None) -> Tensor:
    """Return the negative log-likelihood of the demand of every target and horizon, averaged over known rows.

    A demand is a chain of answers: above the first threshold, above the second given the first, … until it is not. The
    later steps say nothing about it and are left out.

    Parameters
    ----------
    steps : Tensor, shape (B, T, H, J)
    y : Tensor, shape (B, T, H)
        NaN where unknown.
    thresholds : Tensor, shape (B, T, J)
    weight : Tensor, shape (B,), or None
        How much each row counts; None: all alike.

    Returns
    -------
    Tensor, shape (T, H); 0 where no row is known.
    """
    known = torch.isfinite(y)
    above = (torch.where(known, y, torch.zeros_like(y))[..., None] > thresholds[:, :, None]).float()
    at_risk = torch.cat([torch.ones_like(above[..., :1]), above[..., :-1]], dim=-1) * known[..., None]
    loss = nn.functional.binary_cross_entropy_with_logits(steps, above, reduction="none") * at_risk
    return weighted_mean(loss.sum(-1), known, weight)
