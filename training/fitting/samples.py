"""Holds the training set as arrays on a device, and gathers samples from them a batch at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from reclaim.features.feature_set import FeatureSet
from reclaim.features.registry import CONTEXT, CONTEXT_WINDOWS
from reclaim.training.models.forecaster import Heads
from reclaim.training.models.trees import Rows

CHUNK_SAMPLES: Final = 65_536
"""Samples gathered at once by whatever passes over all of them, to bound memory: 30 MB of features."""


class Batch(NamedTuple):
    """Gathered samples on their device: ``x`` (B, F), ``y`` (B, T, H), ``oom`` (B, H), float32; NaN unknown."""

    x: Tensor
    y: Tensor
    oom: Tensor


@dataclass(frozen=True)
class Resident:
    """The arrays of one feature set on one device, once; see ``features.store.FeatureSet`` for each.

    On the CPU they are the files themselves, mapped into memory: nothing is copied, and nothing is read before a
    sample asks for it. They are read-only: writing to one ends the process.
    """

    x: Tensor
    y: Tensor
    oom: Tensor
    inside: Tensor
    limit: Tensor
    first: Tensor
    last: Tensor
    context: Tensor

    @classmethod
    def of(cls, features: FeatureSet, device: torch.device | str = "cpu") -> Resident:
        """Put the arrays of a feature set on a device."""
        # torch.from_numpy warns of read-only memory, and a mapping that may be written to counts as memory in use
        return cls(**{f.name: from_dlpack(getattr(features, f.name)).to(device) for f in fields(cls)})

    def context_of(self, rows: Tensor, windows: int = CONTEXT_WINDOWS) -> Tensor:
        """Return what ``FeatureSet.context_of`` does, to the bit on a CPU; (B,) to float32 (B, windows, C)."""
        device = self.context.device
        position = self.last[rows][:, None] + torch.arange(1 - windows, 1, device=device)  # (B, windows)
        reached = position >= self.first[rows][:, None]
        flat = self.context.index_select(1, torch.where(reached, position, 0).flatten())
        values = flat.view(-1, *position.shape).permute(1, 2, 0)  # (B, windows, C)
        limit = self.limit[rows]
        over = torch.where(limit > 0, limit, torch.nan)
        one = torch.ones(len(rows), device=device)
        divisor = torch.stack([one if c.over is None else over[:, c.over] for c in CONTEXT], dim=1)
        return torch.where(reached[..., None], values / divisor[:, None], torch.nan)


@dataclass(frozen=True)
class Part:
    """The samples of one feature set.

    Attributes
    ----------
    resident : Resident
    rows : Tensor, int64, shape (k,)
        On the same device.
    """

    resident: Resident
    rows: Tensor


class Samples:
    """An index of (task, t) samples into the resident arrays of one feature set or more, in the order given.

    A sample is named by its position, from 0.

    Parameters
    ----------
    parts : sequence of Part
        At least one; all on one device.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = tuple(parts)
        self.device = self._parts[0].rows.device

    @classmethod
    def of_rows(cls, rows: Rows, device: torch.device | str = "cpu") -> Samples:
        """Return samples of arrays in memory, whose targets are masked already and which have no context."""
        n = len(rows)
        x, y, oom = (torch.from_numpy(np.ascontiguousarray(a)).to(device) for a in (rows.x, rows.y, rows.oom))
        none = torch.zeros(n, dtype=torch.int64, device=device)
        limit, context = torch.empty(n, 0, device=device), torch.empty(0, 0, device=device)
        inside = torch.ones(oom.shape, dtype=torch.bool, device=device)
        resident = Resident(x, y, oom, inside, limit, none, none, context)
        return cls([Part(resident, torch.arange(n, device=device))])

    def __len__(self) -> int:
        return sum(len(part.rows) for part in self._parts)

    @property
    def widths(self) -> tuple[int, int, int]:
        """Numbers of features, targets and horizons."""
        resident = self._parts[0].resident
        return resident.x.shape[1], resident.y.shape[1], resident.y.shape[2]

    def features(self, positions: Tensor) -> Tensor:
        """Gather the features of samples; int64 positions on the device, shape (B,), to float32 (B, F)."""

        def gather(part: Part, here: Tensor) -> tuple[Tensor, ...]:
            return (part.resident.x.index_select(0, part.rows[here]),)  # three times as fast as indexing, on a CPU

        return self._over_parts(positions, gather)[0]

    def targets(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Gather targets and OOM labels, NaN where not known inside the period; to float32 (B, T, H) and (B, H)."""

        def gather(part: Part, here: Tensor) -> tuple[Tensor, ...]:
            rows, resident = part.rows[here], part.resident
            inside = resident.inside.index_select(0, rows)  # (B, H)
            y = torch.where(inside[:, None], resident.y.index_select(0, rows), torch.nan)
            return y, torch.where(inside, resident.oom.index_select(0, rows), torch.nan)

        y, oom = self._over_parts(positions, gather)
        return y, oom

    def context(self, positions: Tensor, windows: int = CONTEXT_WINDOWS) -> Tensor:
        """Gather the last windows known at each sample, oldest first; to float32 (B, windows, C)."""

        def gather(part: Part, here: Tensor) -> tuple[Tensor, ...]:
            return (part.resident.context_of(part.rows[here], windows),)

        return self._over_parts(positions, gather)[0]

    def take(self, positions: Tensor) -> Batch:
        """Gather samples; int64 positions on the device, shape (B,)."""
        return Batch(self.features(positions), *self.targets(positions))

    def chunks(self, size: int = CHUNK_SAMPLES) -> Iterator[Tensor]:
        """Return the positions of all samples in order, ``size`` at a time."""
        for start in range(0, len(self), size):
            yield torch.arange(start, min(start + size, len(self)), device=self.device)

    def heads(self) -> Heads:
        """Return what can be fitted on these samples: all that is known in at least one."""
        _, n_targets, n_horizons = self.widths
        targets, oom = np.zeros((n_targets, n_horizons), np.bool_), np.zeros(n_horizons, np.bool_)
        for positions in self.chunks():
            y, label = self.targets(positions)
            targets |= torch.isfinite(y).any(dim=0).cpu().numpy()
            oom |= torch.isfinite(label).any(dim=0).cpu().numpy()
        return Heads(targets, oom)

    def _over_parts(
        self, positions: Tensor, gather: Callable[[Part, Tensor], tuple[Tensor, ...]]
    ) -> tuple[Tensor, ...]:
        """Return what each part gathers of its own positions, in the order of the positions."""
        if len(self._parts) == 1:
            return gather(self._parts[0], positions)
        gathered, places, start = [], [], 0
        for part in self._parts:
            here = torch.nonzero((positions >= start) & (positions < start + len(part.rows))).flatten()
            gathered.append(gather(part, positions[here] - start))
            places.append(here)
            start += len(part.rows)
        order = torch.argsort(torch.cat(places))
        return tuple(torch.cat(columns)[order] for columns in zip(*gathered, strict=True))


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
