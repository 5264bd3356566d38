"""Fits the out-of-memory model to rows that are chosen for it, for most of those without the label say little."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from reclaim.features.feature_set import FeatureSet
from reclaim.features.registry import AT
from reclaim.features.splits import IN_ALLOC, TRAIN, permitted
from reclaim.features.targets import HORIZONS_S
from reclaim.training.fitting.sources import RowIndex, Source
from reclaim.training.models.network import cpu_threads, squash
from reclaim.training.models.oom_model import DEPTH, INPUTS, WIDTH, OomModel

log = logging.getLogger(__name__)

_SOON: Final = HORIZONS_S.index(3_600)
"""The longest horizon of which every positive row is kept; within a day there are hundreds of each end."""
_KEEP_LATER: Final = 0.25
_KEEP_NEAR: Final = 0.1
_KEEP_REST: Final = 0.02
"""Shares of the other rows that are kept: positive within a day; above ``_NEAR`` of the limit or with a history of
out-of-memory ends; and all others. A row counts by the inverse of its share."""
_NEAR: Final = 0.8
FEWEST: Final = 20
"""Positive rows below which a horizon is not fitted."""
_MOST_ROWS: Final = 2_000_000
"""Rows that are learned from at most; more are thinned out alike."""

_DROPOUT: Final = 0.3
"""Share of hidden units left out at each step: more than of the curves' network, for a few hundred ends are few."""
_EPOCHS: Final = 8
"""Passes over the rows."""
_LEAST_STEPS: Final = 2_000
"""Steps that are taken at least, by more epochs over few rows."""
_BATCH: Final = 1_024
"""Rows per step, as of the curves' network on a CPU."""
_RATE: Final = 2e-3
"""Highest rate of the one-cycle schedule."""
_DECAY: Final = 1e-4
"""AdamW's weight decay: dropout does the work."""
_TAIL: Final = 5e-4
"""Share of the rows beyond each of the bounds that inputs are cut off at."""
_BLOCK: Final = 1 << 17
"""Rows read at once."""


class OomRows(NamedTuple):
    """Rows to learn from: the inputs ``INPUTS``, float32 (n, k), labels (n, n_horizons), NaN unknown, and weights."""

    x: NDArray[np.float32]
    oom: NDArray[np.float32]
    weight: NDArray[np.float32]


def fit_oom(sources: Sequence[Source], seed: int, n_features: int) -> OomModel | None:
    """Return a model of the training rows of all sources; None where no horizon has enough positive ones.

    The result depends on the sources and the seed alone.
    """
    parts = [choose(source, rows_of(source.features, TRAIN), seed + k) for k, source in enumerate(sources)]
    rows = OomRows(*(np.concatenate(column) for column in zip(*parts, strict=True)))
    if len(rows.x) > _MOST_ROWS:
        rng = np.random.default_rng(seed)
        some = np.sort(rng.choice(len(rows.x), _MOST_ROWS, replace=False))
        rows = OomRows(*(column[some] for column in rows))
    fitted = (rows.oom == 1).sum(axis=0) >= FEWEST
    if not fitted.any():
        log.info("no out-of-memory model: %s positive rows, each horizon needs %d", (rows.oom == 1).sum(0), FEWEST)
        return None
    with cpu_threads(1):
        return OomModel(_fit(rows, fitted, seed, n_features), fitted)


def rows_of(features: FeatureSet, period: int) -> RowIndex:
    """Return the rows of a period, those of tasks inside an alloc instance among them.

    They are no part of what reservations are learned from, for they live off their alloc's resources; but they have
    limits of their own and meet them, and are warned of like any other.
    """
    mine = permitted(period, features.group) | (np.asarray(features.group) == IN_ALLOC)
    return np.flatnonzero((features.period == period) & mine)


def choose(source: Source, candidates: RowIndex, seed: int) -> OomRows:
    """Return the rows of a source that are learned from."""
    rng, chosen = np.random.default_rng(seed), []
    for start in range(0, len(candidates), _BLOCK):
        rows = candidates[start : start + _BLOCK]
        x, (_, oom) = source.features.x[rows], source.features.targets(rows)
        near = (x[:, AT.memory_last] > _NEAR) | (x[:, AT.ooms] > 0) | (x[:, AT.collection_ooms] > 0)
        soon, later = (oom[:, : _SOON + 1] == 1).any(axis=1), (oom == 1).any(axis=1)
        share = np.where(soon, 1.0, np.where(later, _KEEP_LATER, np.where(near, _KEEP_NEAR, _KEEP_REST)))
        kept = (rng.random(len(rows)) < share) & np.isfinite(oom).any(axis=1)
        weight = source.features.weight[rows[kept]] / share[kept]
        chosen.append(OomRows(x[kept][:, list(INPUTS)], oom[kept], weight.astype(np.float32)))
    if not chosen:
        none = np.zeros((0, len(HORIZONS_S)), np.float32)
        return OomRows(np.zeros((0, len(INPUTS)), np.float32), none, none[:, 0])
    return OomRows(*(np.concatenate(column) for column in zip(*chosen, strict=True)))


def _fit(rows: OomRows, fitted: NDArray[np.bool_], seed: int, n_features: int) -> dict[str, NDArray[np.float32]]:
    """Return the tensors of ``OomModel``."""
    generator = torch.Generator().manual_seed(seed)
    z = squash(torch.from_numpy(rows.x))
    known = torch.isfinite(z)
    n = known.sum(0).clamp(min=1)
    mean = (torch.where(known, z, 0.0).double().sum(0) / n).float()
    scale = (torch.where(known, z - mean, 0.0).double().square().sum(0) / n).sqrt().float()
    scale = torch.where(scale > 1e-6, scale, torch.ones_like(scale))
    z = torch.nan_to_num((z - mean) / scale, nan=0.0)
    ranks = torch.tensor([int(_TAIL * (len(z) - 1)), len(z) - 1 - int(_TAIL * (len(z) - 1))])
    low, high = (torch.stack([column.sort().values[ranks] for column in z.T], dim=1)).float()
    z = z.clamp(low, high)
    y, weight = torch.from_numpy(rows.oom), torch.from_numpy(rows.weight)
    asked = torch.isfinite(y) & torch.from_numpy(fitted)
    # each horizon counts alike: its loss over that of its base rate
    base = (torch.where(asked, y, 0.0) * weight[:, None]).sum(0) / (asked * weight[:, None]).sum(0).clamp(min=1)
    entropy = -(base * base.log() + (1 - base) * (1 - base).log())
    each = torch.where(asked, weight[:, None] / torch.nan_to_num(entropy, nan=1.0).clamp(min=1e-6), 0.0)
    each /= each.sum() / len(each)
    y = torch.where(asked, y, 0.0)
    layers: list[nn.Module] = []
    for k in range(DEPTH):
        layers += [nn.Linear(WIDTH if k else z.shape[1], WIDTH), nn.SiLU(), nn.Dropout(_DROPOUT)]
    body, head = nn.Sequential(*layers), nn.Linear(WIDTH, len(HORIZONS_S))
    with torch.no_grad(), torch.random.fork_rng():
        for layer in (*body, head):
            if isinstance(layer, nn.Linear):
                bound = layer.in_features**-0.5
                layer.weight.uniform_(-bound, bound, generator=generator)
                layer.bias.zero_()
        head.bias.copy_(torch.nan_to_num(torch.logit(base.clamp(1e-6, 1 - 1e-6))))
    parameters = [*body.parameters(), *head.parameters()]
    optimiser = torch.optim.AdamW(parameters, lr=_RATE, weight_decay=_DECAY)
    batches = max(len(z) // _BATCH, 1)
    epochs = max(_EPOCHS, -(-_LEAST_STEPS // batches))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, _RATE, total_steps=epochs * batches + 1)
    with torch.random.fork_rng():
        torch.manual_seed(seed)  # of what is dropped out
        for _ in range(epochs):
            order = torch.randperm(len(z), generator=generator)
            for batch in order[: batches * _BATCH].chunk(batches):
                logit: Tensor = head(body(z[batch]))
                loss = nn.functional.binary_cross_entropy_with_logits(logit, y[batch], each[batch], reduction="sum")
                optimiser.zero_grad()
                (loss / len(batch)).backward()  # type: ignore[no-untyped-call]  # torch's is not typed
                optimiser.step()
                schedule.step()
    return _tensors(body, head, dict(mean=mean, scale=scale, low=low, high=high), n_features)


def _tensors(
    body: nn.Module, head: nn.Module, scaling: dict[str, Tensor], n_features: int
) -> dict[str, NDArray[np.float32]]:
    """Return tensors that read rows of all features: those that were not learned from count as zero."""
    out = {}
    for name, values in scaling.items():
        whole = np.full(n_features, 1.0 if name == "scale" else 0.0, np.float32)
        whole[list(INPUTS)] = values.numpy()
        out[name] = whole
    weights = {f"body.{name}": values for name, values in body.state_dict().items()}
    weights |= {f"head.{name}": values for name, values in head.state_dict().items()}
    out |= {name: values.numpy() for name, values in weights.items()}
    first = np.zeros((WIDTH, n_features), np.float32)
    first[:, list(INPUTS)] = out["body.0.weight"]
    return out | {"body.0.weight": first}
