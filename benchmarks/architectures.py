"""Compares network architectures and fitting methods for the forecast, on the same samples, loss and steps.

    python benchmarks/architectures.py DATASET [DATASET ...] --steps 1300 --seeds 2 --device auto

Every candidate sees the same training samples in the same order for the same number of steps, is validated on the way,
and keeps the weights of the lowest validation loss; wall time differs and is reported. It is scored on test rows: later
time, seen and unseen collections. Next to the raw weights, their moving average is validated and scored (`ema`, decay
0.99 per step). The averaged forecasts of a candidate's seeds show the value of an ensemble. Boosted trees, one hour
ahead, are scored too. Pinball losses are in shares of the limit.

Missing features and context values are replaced by the mean (zero after standardisation); the context has a mask, one
number for each window.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.metrics import average_precision_score
from torch import Tensor, nn

from reclaim.features.feature_set import FeatureSet
from reclaim.features.registry import CONTEXT, CONTEXT_WINDOWS
from reclaim.features.targets import HORIZONS_S, TARGETS
from reclaim.training.fitting.network import _one_cycle, choose_device, on_device, oom_loss, pinball_loss
from reclaim.training.fitting.samples import Batch, Samples, column_bounds, column_moments
from reclaim.training.fitting.sources import choose_rows
from reclaim.training.fitting.trees import fit_trees
from reclaim.training.models.network import (
    QuantileNetwork,
    Scaling,
    cpu_threads,
    inverse_transform,
    squash,
    transform,
)
from reclaim.training.models.trees import Rows
from reclaim.training.settings import QUANTILE_LEVELS, FitConfig, TreeConfig

TREES = TreeConfig(levels=(0.5, 0.9, 0.98, 0.99, 0.999), max_samples=60_000)
HORIZON_S = 3_600
"""The horizon of the trees and of the printed table."""
DECAY = 0.99
VALIDATIONS = 5
TASKS = 250_000
"""Tasks of the serving budget."""
_CHANNELS = len(CONTEXT) + 1  # and the mask
_BELOW = QUANTILE_LEVELS.index(0.95) + 1  # levels that a modelled tail leaves alone
_EVALUATION_ROWS = 8_192


@dataclass(frozen=True)
class Candidate:
    """An architecture and its fitting method.

    Attributes
    ----------
    encoder : str or None
        What looks at the context: ``flat``, ``patch``, ``tcn``, ``gru``, or None for nothing.
    features : bool
        Whether the engineered features are seen.
    clip : float
        Inputs are cut off at this quantile of the training rows and one minus it; 0: at 8 standard deviations.
    plain : bool
        Whether the square roots of the features are inputs too.
    bins : int
        Knots per input of a piecewise linear embedding before the hidden layers; 0 is none.
    input_dropout : float
        Share of what enters the first layer that is left out.
    tail : bool
        A generalised Pareto tail beyond the 0.95 quantile instead of pinball there.
    length : float
        Length of the one-cycle schedule over the number of steps; later steps are not taken.
    fit : FitConfig
        Of it: sizes, transform, batch, schedule, weights of losses.
    """

    encoder: str | None = None
    features: bool = True
    clip: float = 0.0
    plain: bool = False
    bins: int = 0
    input_dropout: float = 0.0
    tail: bool = False
    length: float = 1.0
    fit: FitConfig = field(default_factory=FitConfig)


_FIRST = FitConfig(learning_rate=4e-3, weight_decay=0.3, warmup_share=0.2, dropout=0.0, transform="sqrt", width=128)
_FLAT = replace(_FIRST, transform="identity")
_GENTLE = replace(_FIRST, learning_rate=2e-3, weight_decay=0.1, warmup_share=0.1, dropout=0.1)
_BEST = replace(_FLAT, dropout=0.1)
_CHOSEN = Candidate(clip=0.001, fit=_BEST)
CANDIDATES = {
    "mlp": _CHOSEN,
    "patch-mlp": replace(_CHOSEN, encoder="patch"),
    "tcn": replace(_CHOSEN, encoder="tcn"),
    "gru": replace(_CHOSEN, encoder="gru"),
    "context only": replace(_CHOSEN, encoder="flat", features=False),
    "pareto tail": replace(_CHOSEN, tail=True),
    "plain features too": replace(_CHOSEN, plain=True),
    "embedding": replace(_CHOSEN, bins=8),
    "width 256, dropout 0.2": replace(_CHOSEN, fit=replace(_BEST, width=256, dropout=0.2)),
    "input dropout 0.1": replace(_CHOSEN, input_dropout=0.1),
    "weight decay 0.02": replace(_CHOSEN, fit=replace(_BEST, weight_decay=0.02)),
    "half the steps": replace(_CHOSEN, length=0.5),
    "double the steps": replace(_CHOSEN, length=2.0),
    "square roots": replace(_CHOSEN, fit=replace(_BEST, transform="sqrt")),
    "gentle": Candidate(fit=_GENTLE),
    "gentle, flat, clip": Candidate(clip=0.001, fit=replace(_GENTLE, transform="identity")),
    "first": Candidate(fit=_FIRST),
    "first, a quarter of the steps": Candidate(length=0.25, fit=_FIRST),
    "first, width 256": Candidate(fit=replace(_FIRST, width=256)),
    "first, dropout": Candidate(fit=replace(_FIRST, dropout=0.1)),
    "first, clip": Candidate(clip=0.001, fit=_FIRST),
    "first, flat": Candidate(fit=_FLAT),
}
"""``mlp`` is the chosen way of fitting, the same for all architectures and what follows them is named for how it
differs; ``first`` is how the project's first network was fitted."""


class Columns(Samples):
    """Samples with a candidate's inputs: engineered features, context and its mask, concatenated."""

    def __init__(self, sets: Sets, name: str, candidate: Candidate) -> None:
        super().__init__(*sets.tensors[name])
        self.sets, self.rows, self.candidate = sets, sets.rows[name], candidate

    def context(self, positions: Tensor) -> Tensor:
        """Gather what ``FeatureSet.context_of`` returns, to the bit on a CPU; (B,) to float32 (B, windows, C)."""
        of, rows = self.sets, self.rows[positions]
        position = of.last[rows][:, None] + torch.arange(1 - CONTEXT_WINDOWS, 1, device=self.device)  # (B, windows)
        reached = position >= of.first[rows][:, None]
        flat = of.context.index_select(1, torch.where(reached, position, 0).flatten())
        values = flat.view(-1, *position.shape).permute(1, 2, 0)  # (B, windows, C)
        over = torch.where(of.limit[rows] > 0, of.limit[rows], torch.nan)
        one = torch.ones(len(rows), device=self.device)
        divisor = torch.stack([one if c.over is None else over[:, c.over] for c in CONTEXT], dim=1)
        return torch.where(reached[..., None], values / divisor[:, None], torch.nan)

    def features(self, positions: Tensor) -> Tensor:
        """Gather the columns of samples; (B,) to float32 (B, K)."""
        columns = []
        if self.candidate.features:
            columns.append(super().features(positions))
            if self.candidate.plain:
                columns.append(columns[0].sign() * columns[0].square())  # the network takes the square root
        if self.candidate.encoder is not None:
            context = self.context(positions)  # (B, W, C)
            mask = torch.isfinite(context).any(-1, keepdim=True).float()
            columns.append(torch.cat([context, mask], dim=-1).flatten(1))
        return torch.cat(columns, dim=1)


class Encoder(nn.Module):
    """Input of the first hidden layer: the features, then the encoded context."""

    def __init__(self, kind: str, n_columns: int) -> None:
        super().__init__()
        self.kind = kind
        self.n_features = n_columns - CONTEXT_WINDOWS * _CHANNELS
        n_encoded = {"flat": CONTEXT_WINDOWS * _CHANNELS, "patch": 64, "tcn": 32, "gru": 64}[kind]
        if kind == "patch":
            self.patch = nn.Sequential(nn.Linear(4 * _CHANNELS, 32), nn.SiLU())
            self.mix = nn.Sequential(nn.Linear(CONTEXT_WINDOWS // 4 * 32, n_encoded), nn.SiLU())
        elif kind == "tcn":
            self.layers = nn.ModuleList(nn.Conv1d(_CHANNELS if d == 1 else 32, 32, 3, dilation=d) for d in (1, 2, 4, 8))
        elif kind == "gru":
            self.gru = nn.GRU(_CHANNELS, n_encoded, batch_first=True)
        self.n_out = self.n_features + n_encoded

    def forward(self, z: Tensor) -> Tensor:
        """Shapes (B, K) to (B, n_out)."""
        if self.kind == "flat":
            return z
        features, context = z[:, : self.n_features], z[:, self.n_features :].unflatten(1, (CONTEXT_WINDOWS, -1))
        if self.kind == "patch":
            encoded = self.mix(self.patch(context.unflatten(1, (-1, 4)).flatten(2)).flatten(1))
        elif self.kind == "gru":
            encoded = self.gru(context)[0][:, -1]
        else:
            hidden = context.transpose(1, 2)  # (B, C, W)
            for i, layer in enumerate(self.layers):
                new = nn.functional.silu(layer(nn.functional.pad(hidden, (2 << i, 0))))
                hidden = hidden + new if i else new
            encoded = hidden[..., -1]
        return torch.cat([features, encoded], dim=1)


class Embedding(nn.Module):
    """Each input as a piecewise linear function with knots at its own quantiles (Gorishniy et al., 2022)."""

    knots: Tensor

    def __init__(self, z: Tensor, bins: int) -> None:
        super().__init__()
        self.register_buffer("knots", torch.quantile(z, torch.linspace(0.02, 0.98, bins), dim=0).T.contiguous())
        self.n_out = z.shape[1] * (bins + 1)

    def forward(self, z: Tensor) -> Tensor:
        """Shapes (B, K) to (B, K + K * bins)."""
        return torch.cat([z, torch.relu(z[..., None] - self.knots).flatten(1)], dim=1)


class TailNetwork(QuantileNetwork):
    """Quantiles up to 0.95 and, above, those of a generalised Pareto distribution (Pickands, 1975)."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return all quantiles, shape (B, T, H, Q), and OOM logits."""
        below, scale, shape, logits = self.parts(x)
        rarer = [0.05 / (1 - level) for level in QUANTILE_LEVELS[_BELOW:]]
        above = [below[..., -1] + scale * (r**shape - 1) / shape for r in rarer]
        return torch.cat([below, torch.stack(above, dim=-1)], dim=-1), logits

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the quantiles that pinball fits, the tail's scale and shape, (B, T, H), and logits."""
        z, logits = super().forward(x)
        scale, shape = z[..., _BELOW] - z[..., _BELOW - 1], z[..., _BELOW + 1] - z[..., _BELOW]
        return z[..., :_BELOW], scale.clamp(min=1e-4), (0.5 * shape).clamp(1e-3, 0.9), logits


class Objective:
    """The loss of ``training.fit``; where the tail is modelled, its likelihood instead of pinball above 0.95."""

    tail_weight = 0.02

    def __init__(self, train: Columns, valid: Columns, config: FitConfig) -> None:
        self.train, self.valid, self.config = train, valid, config
        self.levels = torch.tensor(QUANTILE_LEVELS, device=train.device)
        _, spread = column_moments(train, lambda at: transform(train.targets(at)[0], config.transform).flatten(1))
        self.weight = (1 / spread.clamp(min=1e-3)).reshape(train.widths[1:])

    def loss(self, network: QuantileNetwork, batch: Batch) -> Tensor:
        """Return the loss of a batch."""
        y, device = transform(batch.y, self.config.transform), batch.x.device.type
        if isinstance(network, TailNetwork) and network.training:
            below, scale, shape, logits = network.parts(batch.x)
            pinball = (pinball_loss(below, y, self.levels[:_BELOW]) * self.weight).mean()
            beyond = y > below[..., -1]  # NaN is not
            excess = torch.where(beyond, y - below[..., -1].detach(), 0.0)
            likelihood = scale.log() + (1 + 1 / shape) * torch.log1p(shape * excess / scale)
            pinball = pinball + self.tail_weight * (likelihood * beyond).sum() / beyond.sum().clamp(min=1)
        else:
            with torch.autocast(device, torch.bfloat16, enabled=self.config.bfloat16 and device == "cuda"):
                quantiles, logits = network(batch.x)
            pinball = (pinball_loss(quantiles.float(), y, self.levels) * self.weight).mean()
        return pinball + self.config.oom_weight * oom_loss(logits.float(), batch.oom).mean()


@dataclass
class Sets:
    """Rows of one dataset on a device, by period, the same for every candidate and seed, and the context of all."""

    rows: dict[str, Tensor]
    tensors: dict[str, tuple[Tensor, Tensor, Tensor]]
    first: Tensor
    last: Tensor
    limit: Tensor
    context: Tensor

    @classmethod
    def of(cls, features: FeatureSet, device: torch.device, limits: Sequence[int]) -> Sets:
        """Choose at most so many rows to train on, validate on and test on."""
        of_period = {
            "train": features.train_rows(),
            "valid": features.valid_rows(),
            "test": features.test_rows(),
        }
        rows, tensors = {}, {}
        for (name, known), limit in zip(of_period.items(), limits, strict=True):
            chosen = choose_rows(known, limit, 1)
            rows[name] = torch.from_numpy(chosen).to(device)
            arrays = (np.array(features.x[chosen]), *features.targets(chosen))
            tensors[name] = tuple(torch.from_numpy(array).to(device) for array in arrays)
        whole = (features.first, features.last, features.limit, features.context)
        return cls(rows, tensors, *(torch.from_numpy(np.array(array)).to(device) for array in whole))

    def columns(self, name: str, candidate: Candidate) -> Columns:
        """Return the samples of a period as a candidate sees them."""
        return Columns(self, name, candidate)

    def targets(self, name: str) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return the targets, (n, T, H) and (n, H); NaN unknown."""
        samples = self.columns(name, Candidate())
        y, oom = samples.targets(next(samples.chunks(len(samples))))
        return y.cpu().numpy(), oom.cpu().numpy()


def build(train: Columns, candidate: Candidate, seed: int) -> QuantileNetwork:
    """Return the network of a candidate with its first weights."""
    torch.manual_seed(seed)
    config = candidate.fit
    mean, scale = column_moments(train, lambda positions: squash(train.features(positions)))
    low, high = torch.full_like(mean, -8.0), torch.full_like(mean, 8.0)
    if candidate.clip:
        low, high = column_bounds(train, lambda at: (squash(train.features(at)) - mean) / scale, candidate.clip)
    scaling = Scaling(*(column.cpu() for column in (mean, scale, low, high)))
    _, n_targets, n_horizons = train.widths
    network = (TailNetwork if candidate.tail else QuantileNetwork)(
        scaling, n_targets=n_targets, n_horizons=n_horizons, n_levels=len(QUANTILE_LEVELS),
        width=config.width, depth=config.depth,
    )  # fmt: skip
    network.initialise(torch.Generator().manual_seed(seed))
    layers: list[nn.Module] = [nn.Dropout(candidate.input_dropout)]
    n_in = len(mean)
    if candidate.encoder is not None:
        layers.append(encoder := Encoder(candidate.encoder, n_in))
        n_in = encoder.n_out
    if candidate.bins:
        some = train.features(torch.arange(0, len(train), max(1, len(train) // 10_000), device=train.device))
        z = torch.nan_to_num((squash(some) - mean) / scale).clamp(low, high)
        layers.append(embedding := Embedding(z.cpu(), candidate.bins))
        n_in = embedding.n_out
    for _ in range(config.depth):
        layer = nn.Linear(n_in, config.width)
        nn.init.kaiming_uniform_(layer.weight, nonlinearity="relu")
        nn.init.zeros_(layer.bias)
        layers += [layer, nn.SiLU(), nn.Dropout(config.dropout)]
        n_in = config.width
    network.body = nn.Sequential(*layers)
    return network.to(train.device)


def fit(sets: Sets, candidate: Candidate, steps: int, seed: int) -> tuple[dict[str, QuantileNetwork], dict[str, Any]]:
    """Return the raw and the averaged weights, each of its lowest validation loss, and the cost of the run."""
    train, valid = sets.columns("train", candidate), sets.columns("valid", candidate)
    device, n = train.device, len(train)
    config = on_device(candidate.fit, device, n)
    size = config.batch_size or n
    data = Objective(train, valid, config)
    network = build(train, candidate, seed)
    average = copy.deepcopy(network)
    weights = list(network.parameters())
    optimizer = torch.optim.AdamW(weights, lr=config.learning_rate, weight_decay=config.weight_decay)
    kept: dict[str, QuantileNetwork] = {}
    lowest = {"raw": np.inf, "ema": np.inf}
    history: list[dict[str, float]] = []
    steps, per_epoch = round(steps * candidate.length), -(-n // size)
    seconds = waited = 0.0
    for step in range(steps):
        if step % per_epoch == 0:
            generator = torch.Generator().manual_seed(seed * 1_000_003 + step // per_epoch)
            order = torch.randperm(n, generator=generator).to(device)
        network.train()
        started = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * _one_cycle(step / steps, config.warmup_share)
        at = step % per_epoch * size
        batch = train.take(order[at : at + size])
        _wait(device)
        waited += time.perf_counter() - started
        loss = data.loss(network, batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        _wait(device)
        seconds += time.perf_counter() - started
        with torch.no_grad():
            torch._foreach_lerp_(list(average.parameters()), weights, 1 - min(DECAY, (1 + step) / (10 + step)))
        if (step + 1) * VALIDATIONS // steps > step * VALIDATIONS // steps:
            history.append({"step": step + 1})
            for name, one in {"raw": network, "ema": average}.items():
                history[-1][name] = round(_validate(one.eval(), data), 6)
                if history[-1][name] < lowest[name]:
                    lowest[name], kept[name] = history[-1][name], copy.deepcopy(one)
    return kept, {
        "seed": seed, "parameters": sum(p.numel() for p in weights), "steps": steps, "seconds": round(seconds, 1),
        "samples_per_s": round(steps * size / seconds), "waiting_for_data": round(waited / seconds, 3),
        "history": history,
    }  # fmt: skip


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _validate(network: QuantileNetwork, data: Objective) -> float:
    total = 0.0
    with torch.no_grad():
        for positions in data.valid.chunks(_EVALUATION_ROWS):
            total += float(data.loss(network, data.valid.take(positions))) * len(positions)
    return total / len(data.valid)


Forecasts = tuple[NDArray[np.float32], NDArray[np.float32]]
"""Quantiles over the limit, (n, T, H, Q), and OOM probabilities, (n, H)."""


def predict(network: QuantileNetwork, samples: Columns) -> Forecasts:
    """Return the forecasts of all samples."""
    name, parts = samples.candidate.fit.transform, []
    with torch.inference_mode():
        for positions in samples.chunks(_EVALUATION_ROWS):
            z, logits = network(samples.features(positions))
            parts.append((inverse_transform(z, name).cpu().numpy(), torch.sigmoid(logits).cpu().numpy()))
    quantiles, oom = (np.concatenate(part) for part in zip(*parts, strict=True))
    return quantiles, oom


def score(forecasts: Forecasts, truth: Forecasts, levels: Sequence[float] = QUANTILE_LEVELS) -> dict[str, Any]:
    """Return pinball per level, by target and horizon, coverage at 0.99 and 0.999, and average precision of the OOM.

    ``loss`` is the mean over targets and horizons of pinball over the target's standard deviation.
    """
    q, scores, relative = np.array(levels), {}, []
    tails = [levels.index(level) for level in (0.99, 0.999)]
    for t, target in enumerate(TARGETS):
        for h, horizon_s in enumerate(HORIZONS_S):
            y, quantiles = truth[0][:, t, h], forecasts[0][:, t, h]
            known = np.isfinite(y) & np.isfinite(quantiles[:, 0])
            if known.any():
                error = y[known].astype(np.float64)[:, None] - quantiles[known]
                pinball = np.maximum(q * error, (q - 1) * error).mean(0)
                above = (error > 1e-6 * np.abs(quantiles[known])).mean(0)
                relative.append(pinball.mean() / max(float(y[known].std()), 1e-3))
                scores[f"{target} {horizon_s}s"] = {
                    "pinball": round(float(pinball.mean()), 7),
                    "by_level": [round(float(p), 7) for p in pinball],
                    "coverage": [round(1 - float(above[i]), 5) for i in tails],
                }
    for h, horizon_s in enumerate(HORIZONS_S):
        label, probability = truth[1][:, h], forecasts[1][:, h]
        known = np.isfinite(label) & np.isfinite(probability)
        if (label[known] == 1).any():
            scores[f"oom {horizon_s}s"] = {
                "base_rate": round(float(label[known].mean()), 6),
                "average_precision": round(float(average_precision_score(label[known], probability[known])), 5),
            }
    return {"loss": round(float(np.mean(relative)), 6), **scores}


def score_periods(
    forecasts: dict[str, Forecasts], truth: dict[str, Forecasts], levels: Sequence[float] = QUANTILE_LEVELS
) -> dict[str, Any]:
    """Return the scores of the test rows, and of the validation rows those that fit on a line."""
    scores: dict[str, Any] = {period: score(f, truth[period], levels) for period, f in forecasts.items()}
    scores["valid"] = {k: v["pinball"] for k, v in scores["valid"].items() if k != "loss" and "pinball" in v} | {
        "loss": scores["valid"]["loss"]
    }
    return scores


def inference(network: QuantileNetwork, samples: Columns) -> dict[str, float]:
    """Return rows per second of eager passes over 4,096 rows, gathered before, the best of several."""
    x = samples.features(torch.arange(min(4_096, len(samples)), device=samples.device))
    result: dict[str, float] = {}
    for threads in (1, 2) if samples.device.type == "cpu" else (1,):
        seconds = []
        with cpu_threads(threads), torch.inference_mode():
            for _ in range(10 // threads):
                started = time.perf_counter()
                network(x)
                _wait(samples.device)
                seconds.append(time.perf_counter() - started)
        result[f"rows_per_s_{threads}"] = round(len(x) / min(seconds))
        result[f"seconds_for_{TASKS}_{threads}"] = round(TASKS / len(x) * min(seconds), 3)
    return result


def try_candidate(sets: Sets, name: str, arguments: argparse.Namespace, truth: dict[str, Forecasts]) -> dict[str, Any]:
    """Fit a candidate with each seed and score every run and the mean of all."""
    candidate = CANDIDATES[name]
    candidate = replace(candidate, fit=replace(candidate.fit, bfloat16=arguments.bfloat16))
    samples = {period: sets.columns(period, candidate) for period in truth}
    runs = []
    members: dict[str, list[dict[str, Forecasts]]] = {}
    for seed in range(1, arguments.seeds + 1):
        kept, run = fit(sets, candidate, arguments.steps, seed)
        for kind, network in kept.items():
            forecasts = {period: predict(network, columns) for period, columns in samples.items()}
            members.setdefault(kind, []).append(forecasts)
            run[kind] = score_periods(forecasts, truth)
            print(_line(f"{name} #{seed} {kind}", run["seconds"], run[kind]), flush=True)
        runs.append(run)
    entry: dict[str, Any] = {"candidate": asdict(candidate), "runs": runs}
    for kind, each in members.items() if len(runs) > 1 else ():
        mean = {p: tuple(np.mean(both, axis=0) for both in zip(*(m[p] for m in each), strict=True)) for p in truth}
        entry[f"ensemble_{kind}"] = score_periods(mean, truth)
        print(_line(f"{name} ensemble {kind}", np.nan, entry[f"ensemble_{kind}"]), flush=True)
    entry["inference"] = inference(kept["raw"], samples["test"])
    return entry


def try_trees(sets: Sets, truth: dict[str, Forecasts]) -> dict[str, Any]:
    """Return the scores of boosted trees, one hour ahead."""
    samples = {period: sets.columns(period, Candidate()) for period in sets.rows}
    rows = torch.from_numpy(choose_rows(np.arange(len(samples["train"])), TREES.max_samples, 1))
    train = Rows(*(a.cpu().numpy() for a in samples["train"].take(rows.to(samples["train"].device))))
    started = time.perf_counter()
    trees = fit_trees(train, TREES, horizon_s=HORIZON_S, seed=1)
    entry: dict[str, Any] = {"seconds": round(time.perf_counter() - started, 1), "train_rows": len(rows)}
    forecasts = {}
    for period in truth:
        x = torch.cat([samples[period].features(p) for p in samples[period].chunks()]).cpu().numpy()
        forecast = trees.predict(x)
        forecasts[period] = forecast.quantiles, forecast.oom_probability
    entry |= score_periods(forecasts, truth, TREES.levels)
    print(_line("trees", entry["seconds"], entry, TREES.levels), flush=True)
    return entry


_SHOWN = (0.9, 0.98, 0.99, 0.999)
_HEAD = (
    f"pinball x 1e5, {HORIZON_S} s ahead, of CPU and memory: validation, then TEST by level\n"
    f"{'':34s} {'s':>5s} {'valid':>7s} {'test':>7s} {'cpu':>6s} {'memory':>6s} |"
    + " |".join("".join(f"{level:8g}" for level in _SHOWN) for _ in range(2)) + " | AP"
)  # fmt: skip


def _line(name: str, seconds: float, by: dict[str, Any], levels: Sequence[float] = QUANTILE_LEVELS) -> str:
    nothing = {"by_level": [np.nan] * len(levels)}
    test = [by["test"].get(f"{of} {HORIZON_S}s", nothing) for of in ("cpu", "memory", "oom")]
    valid = [by["valid"].get(f"{of} {HORIZON_S}s", np.nan) for of in ("cpu", "memory")]
    shown = " |".join("".join(f"{1e5 * of['by_level'][levels.index(q)]:8.1f}" for q in _SHOWN) for of in test[:2])
    return (
        f"{name:34s} {seconds:5.0f} {by['valid']['loss']:7.5f} {by['test']['loss']:7.5f}"
        f" {1e5 * valid[0]:6.1f} {1e5 * valid[1]:6.1f} |{shown} | "
        f"{test[2].get('average_precision', np.nan):.3f}"
    )


def main() -> None:
    """Run the candidates named on the datasets named, print tables and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", nargs="+", type=Path)
    names = [*CANDIDATES, "trees"]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=f"of {names}")
    parser.add_argument("--steps", type=int, default=1_300)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs=3, default=(150_000, 40_000, 60_000), help="train, valid, test")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--bfloat16", action="store_true")
    parser.add_argument("--keep", action="store_true", help="add to what the file of results holds")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/architectures.json"))
    arguments = parser.parse_args()
    device = choose_device(arguments.device)
    results = json.loads(arguments.out.read_text())["results"] if arguments.keep else {}
    with cpu_threads(1):
        for path in arguments.dataset:
            features = FeatureSet.open(path)
            sets = Sets.of(features, device, arguments.rows)
            truth = {period: sets.targets(period) for period in ("valid", "test")}
            result = results.setdefault(path.resolve().name, {})
            result |= {"features": features.fingerprint, "rows": {k: len(v) for k, v in sets.rows.items()}}
            print(f"\n{path.resolve().name}: {result['rows']}\n{_HEAD}", flush=True)
            for name in arguments.only:
                trees = name == "trees"
                entry = try_trees(sets, truth) if trees else try_candidate(sets, name, arguments, truth)
                result.setdefault("candidates", {})[name] = entry
                _write(arguments, device, results)
    print(f"\nwritten: {arguments.out}")


def _write(arguments: argparse.Namespace, device: torch.device, results: dict[str, Any]) -> None:
    on = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()}, 1 thread"
    facts = {
        "made": datetime.now(UTC).isoformat(timespec="seconds"), "steps": arguments.steps, "device": on,
        "cores": os.cpu_count(), "torch": version("torch"), "levels": QUANTILE_LEVELS, "tree_levels": TREES.levels,
        "coverage_at": (0.99, 0.999), "results": results,
    }  # fmt: skip
    text = json.dumps(facts, indent=1)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    # lists and innermost objects stand on one line
    arguments.out.write_text(re.sub(r"([\[{])\s+([^][{}]*?)\s+([\]}])", _joined, text) + "\n")


def _joined(found: re.Match[str]) -> str:
    return found[1] + re.sub(r"\s*\n\s*", " ", found[2]) + found[3]


if __name__ == "__main__":
    main()
