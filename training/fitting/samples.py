"""Holds the rows that are used on a device, and gathers samples from them a batch at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from reclaim.training.models.forecaster import Heads
from reclaim.training.models.trees import Rows

CHUNK_SAMPLES: Final = 65_536
"""Samples gathered at once by whatever passes over all of them, to bound memory: 30 MB of features."""


class Batch(NamedTuple):
    """Gathered samples on their device: ``x`` (B, F), ``y`` (B, T, H), ``oom`` (B, H), float32; NaN unknown.

    ``weight``, (B,), is None where all count alike.
    """

    x: Tensor
    y: Tensor
    oom: Tensor
    weight: Tensor | None = None


class Samples:
    """Rows on a device, gathered a batch at a time; a sample is named by its position, from 0.

    Parameters
    ----------
    x : Tensor, float32, shape (n, F)
    y : Tensor, float32, shape (n, T, H)
        Over the limit; NaN unknown.
    oom : Tensor, float32, shape (n, H)
        0 or 1; NaN unknown.
    weight : Tensor, float32, shape (n,), or None
        How much each counts in a loss; None: all alike.
    """

    def __init__(self, x: Tensor, y: Tensor, oom: Tensor, weight: Tensor | None = None) -> None:
        self._x, self._y, self._oom, self._weight = x, y, oom, weight
        self.device = x.device

    @classmethod
    def of_rows(cls, rows: Rows, device: torch.device | str = "cpu") -> Samples:
        """Put rows on a device, and only these rows; on a CPU they are not copied."""
        x, y, oom = (torch.from_numpy(np.ascontiguousarray(a)).to(device) for a in (rows.x, rows.y, rows.oom))
        return cls(x, y, oom, None if rows.weight is None else torch.from_numpy(rows.weight).to(device))

    def __len__(self) -> int:
        return len(self._x)

    @property
    def widths(self) -> tuple[int, int, int]:
        """Numbers of features, targets and horizons."""
        return self._x.shape[1], self._y.shape[1], self._y.shape[2]

    def features(self, positions: Tensor) -> Tensor:
        """Gather the features of samples; int64 positions on the device, shape (B,), to float32 (B, F)."""
        return self._x.index_select(0, positions)  # three times as fast as indexing, on a CPU

    def targets(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Gather targets and OOM labels, NaN where not known inside the period; to float32 (B, T, H) and (B, H)."""
        return self._y.index_select(0, positions), self._oom.index_select(0, positions)

    def take(self, positions: Tensor) -> Batch:
        """Gather samples; int64 positions on the device, shape (B,)."""
        weight = None if self._weight is None else self._weight.index_select(0, positions)
        return Batch(self.features(positions), *self.targets(positions), weight)

    def chunks(self, size: int = CHUNK_SAMPLES) -> Iterator[Tensor]:
        """Return the positions of all samples in order, ``size`` at a time."""
        for start in range(0, len(self), size):
            yield torch.arange(start, min(start + size, len(self)), device=self.device)

    def heads(self) -> Heads:
        """Return the outputs that can be fitted on these samples: all that are known in at least one."""
        known = torch.isfinite(self._y).any(dim=0), torch.isfinite(self._oom).any(dim=0)
        return Heads(*(one.cpu().numpy() for one in known))


def column_moments(samples: Samples, of: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of each column over the samples in which it is finite; float32, shape (K,).

    0 and 1 where nothing is known, and 1 for a constant column, which says nothing. ``of`` makes the columns of some
    positions, (B,) to (B, K); two passes, a chunk at a time, in float64.
    """
    n = total = torch.zeros((), dtype=torch.float64, device=samples.device)
    for positions in samples.chunks():
        columns = of(positions).double()
        known = torch.isfinite(columns)
        n = n + known.sum(0)
        total = total + torch.where(known, columns, 0.0).sum(0)
    mean = total / n.clamp(min=1)
    squares = torch.zeros_like(mean)
    for positions in samples.chunks():
        squares += torch.nan_to_num((of(positions).double() - mean) ** 2, nan=0.0, posinf=0.0).sum(0)
    scale = (squares / n.clamp(min=1)).sqrt()
    scale = torch.where(scale > 1e-6, scale, torch.ones_like(scale))
    return mean.float(), scale.float()


def column_bounds(samples: Samples, of: Callable[[Tensor], Tensor], share: float) -> tuple[Tensor, Tensor]:
    """Return the quantiles of each column at ``share`` and ``1 - share``; float32, shape (K,); zeros where unknown.

    From ``CHUNK_SAMPLES`` samples at even distances.
    """
    step = -(-len(samples) // CHUNK_SAMPLES)
    columns = of(torch.arange(0, len(samples), step, device=samples.device))
    levels = torch.tensor([share, 1 - share], device=samples.device)
    bounds = torch.stack([torch.nanquantile(column, levels) for column in columns.T], dim=1)  # (2, K)
    low, high = torch.nan_to_num(bounds, nan=0.0)
    return low, high
