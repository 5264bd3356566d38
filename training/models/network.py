"""The network: one pass from a task's features to every quantile of every target and horizon, and the OOM logits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

from reclaim.training.settings import TRANSFORMS

_FIRST_INCREMENT: Final = -3.0
"""Bias of the increments at the start: elu(-3) + 1 is 0.05, so that the quantiles begin close together."""


class Scaling(NamedTuple):
    """Shift and scale that turn squashed features into inputs; each float32, shape (F,).

    ``mean`` and ``scale`` standardise; ``low`` and ``high`` cut off, in standard deviations, what training hardly saw:
    a straight line goes on for ever, and one absurd measurement must not move a reservation beyond what was learned.
    """

    mean: Tensor
    scale: Tensor
    low: Tensor
    high: Tensor


class QuantileNetwork(nn.Module):
    """A multi-layer perceptron whose quantiles cannot cross.

    The lowest level is a free number; each next level adds an increment that is never below zero. A straight line
    from the features to the output runs next to the hidden layers, because the best forecast of a steady task is close
    to a linear function of its recent usage.

    Parameters
    ----------
    scaling : Scaling
        Kept with the weights.
    n_targets, n_horizons, n_levels : int
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
        self, scaling: Scaling, *, n_targets: int, n_horizons: int, n_levels: int, width: int, depth: int,
        dropout: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.shape = (n_targets, n_horizons, n_levels)
        n_features = len(scaling.mean)
        n_quantiles = n_targets * n_horizons * n_levels
        for name, values in zip(Scaling._fields, scaling, strict=True):
            self.register_buffer(name, values)
        sizes = [n_features] + [width] * depth
        layers: list[nn.Module] = []
        for i, o in pairwise(sizes):
            layers += [nn.Linear(i, o), nn.SiLU(), nn.Dropout(dropout)]
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(width, n_quantiles + n_horizons)
        self.line = nn.Linear(n_features, n_quantiles + n_horizons, bias=False)

    def initialise(self, generator: torch.Generator) -> None:
        """Draw the weights: He's for the hidden layers, small ones for the head, zero for the straight line."""
        with torch.no_grad():
            for layer in self.body:
                if isinstance(layer, nn.Linear):
                    bound = (6.0 / layer.in_features) ** 0.5
                    layer.weight.uniform_(-bound, bound, generator=generator)
                    layer.bias.zero_()
            self.head.weight.normal_(0.0, 0.01, generator=generator)
            self.head.bias.zero_()
            n_targets, n_horizons, n_levels = self.shape
            bias = self.head.bias[: n_targets * n_horizons * n_levels].view(self.shape)
            bias[..., 1:] = _FIRST_INCREMENT
            self.line.weight.zero_()

    def raw(self, x: Tensor) -> Tensor:
        """Return lowest quantiles and increments before ``steps``, and the OOM logits; (B, F) to (B, T*H*Q + H).

        What is not finite in ``x`` counts as the mean.
        """
        z = torch.nan_to_num((squash(x) - self.mean) / self.scale, nan=0.0).clamp(self.low, self.high)  # (B, F)
        out: Tensor = self.head(self.body(z)) + self.line(z)
        return out.float()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return quantiles in the space of the transform, shape (B, T, H, Q), and OOM logits, shape (B, H)."""
        n_targets, n_horizons, n_levels = self.shape
        out = self.raw(x)
        raw = out[:, : n_targets * n_horizons * n_levels].reshape(-1, n_targets, n_horizons, n_levels)
        first = torch.arange(n_levels, device=x.device) == 0
        added = torch.where(first, raw, steps(raw))
        with torch.autocast(x.device.type, enabled=False):  # it would add up in bfloat16
            # a product with a triangle of ones: torch's cumsum over so few takes longer than all else
            quantiles = added @ torch.ones(n_levels, n_levels, device=x.device).triu()
        return quantiles, out[:, n_targets * n_horizons * n_levels :]


def steps(raw: Tensor) -> Tensor:
    """Return increments, never below zero; elu + 1 grows like softplus and costs a tenth of it on a CPU."""
    return nn.functional.elu(raw) + 1.0


@contextmanager
def cpu_threads(n: int) -> Iterator[None]:
    """Let torch use ``n`` CPU threads inside the block.

    One is the rule here: the matrices are small, so a second thread gains little, loses much where other processes want
    the cores (it waits at every operation), and results would depend on the number.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def squash(x: Tensor) -> Tensor:
    """Return the square root of the size with the sign of ``x``.

    Shares of the limit crowd near zero with a long tail; spread out like this, tasks that were not trained on are
    foreseen better.
    """
    return x.sign() * x.abs().sqrt()


def transform(y: Tensor, name: str) -> Tensor:
    """Return the target mapped to the space in which it is fitted; NaN stays. Assumes ``y`` is not negative."""
    if name == "sqrt":
        return y.clamp(min=0).sqrt()
    if name == "log1p":
        return y.clamp(min=0).log1p()
    return _same(y, name)


def inverse_transform(z: Tensor, name: str) -> Tensor:
    """Return what ``transform`` was given; never negative, as no usage is."""
    z = z.clamp(min=0)
    if name == "sqrt":
        return z.square()
    if name == "log1p":
        return z.expm1()
    return _same(z, name)


def _same(y: Tensor, name: str) -> Tensor:
    assert name in TRANSFORMS, name  # settings.py checks what a user may say
    return y
