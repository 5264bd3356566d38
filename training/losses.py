"""The losses of the network: pinball for quantiles, cross-entropy for OOM; what is unknown (NaN) has no part."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def pinball_loss(quantiles: Tensor, y: Tensor, levels: Tensor) -> Tensor:
    """Return the pinball loss of every target and horizon, averaged over known rows and levels.

    Parameters
    ----------
    quantiles : Tensor, shape (B, T, H, Q)
    y : Tensor, shape (B, T, H)
        NaN where unknown.
    levels : Tensor, shape (Q,)

    Returns
    -------
    Tensor, shape (T, H); 0 where no row is known. Koenker and Bassett, "Regression Quantiles", 1978.
    """
    known = torch.isfinite(y)
    error = torch.where(known, y, torch.zeros_like(y))[..., None] - quantiles  # (B, T, H, Q)
    loss = (levels * error + torch.relu(-error)).mean(-1)
    return (loss * known).sum(0) / known.sum(0).clamp(min=1)


def oom_loss(logits: Tensor, label: Tensor) -> Tensor:
    """Return the cross-entropy of every horizon, averaged over known rows; shapes (B, H) and (B, H) to (H,)."""
    known = torch.isfinite(label)
    target = torch.where(known, label, torch.zeros_like(label))
    loss = nn.functional.binary_cross_entropy_with_logits(logits, target, reduction="none")
    return (loss * known).sum(0) / known.sum(0).clamp(min=1)
