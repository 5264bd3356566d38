"""The training loop: samples in, a fitted network out; interrupted anywhere, it goes on to the same result."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm

from reclaim.data.errors import ConfigError, HistoryTooShortError, ModelError
from reclaim.training.distributed import Ranks, own_device
from reclaim.training.forecaster import Heads
from reclaim.training.losses import oom_loss, pinball_loss
from reclaim.training.networks import QuantileNetwork, Scaling, cpu_threads, squash, transform
from reclaim.training.resident import Batch, Rows, Samples, column_bounds, column_moments
from reclaim.training.settings import QUANTILE_LEVELS, FitConfig

logger = logging.getLogger(__name__)

_CHECKPOINT: Final = "checkpoint.safetensors"
_RARE: Final = 0.001
"""Share of the training rows at either end of each feature whose values are cut off. Of later tasks, unlike those
learned from, far values made the network far too sure: cut off, the pinball loss at 0.99 fell by a tenth."""
_EVALUATION_ROWS: Final = 16_384
"""Validation rows per pass, to bound memory."""


@dataclass(frozen=True)
class FitResult:
    """A fitted network and how it came about.

    Attributes
    ----------
    network : QuantileNetwork
        On the CPU, with the weights of the epoch of the lowest validation loss.
    history : list of dict
        Per epoch: ``train_loss``, ``valid_loss``, ``learning_rate``, ``rows_per_second`` (of training, over all
        ranks), ``seconds`` (with validation).
    heads : Heads
        Which of its outputs the training rows could fit.
    best_epoch : int
        From 0.
    device : str
    """

    network: QuantileNetwork
    history: list[dict[str, float]]
    heads: Heads
    best_epoch: int
    device: str


def choose_device(name: str = "auto") -> torch.device:
    """Return the named device; for ``auto``, CUDA where there is one, else the CPU; under torchrun, each rank's own.

    Raises
    ------
    ConfigError
        There is no such device here, or not one for each process that torchrun started.
    """
    if name == "auto":
        return own_device(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # torch names devices that it does not have
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"fit.device: {name!r} cannot be used here ({reason}); auto takes what there is") from error
    return own_device(device)


def fit_network(
    train: Samples | Rows,
    valid: Samples | Rows,
    config: FitConfig,
    *,
    seed: int,
    checkpoints: Path | None = None,
    on_epoch: Callable[[int, float], None] | None = None,
    hidden: Sequence[int] = (),
) -> FitResult:
    """Fit the network by AdamW under a one-cycle schedule, stopping when validation no longer improves.

    Inside ``distributed.joined`` every rank calls it with the same arguments and gets the same result. Each step's
    batch is the one that a single process would take, split over the ranks, and the gradients are those of its loss:
    without dropout the result is a single process's but for the order of floating-point sums. With it, each rank draws
    its own. Each rank holds all samples; the first alone writes checkpoints, which the others must be able to read,
    and any number of ranks goes on from them.

    Parameters
    ----------
    train, valid : Samples or Rows
        Same widths. Samples lie on the device already, both on the same one; rows in memory are put on that of the
        settings.
    config : FitConfig
    seed : int
        Decides the first weights and the order of rows; the result is the same to the bit on the same machine with
        the same number of threads.
    checkpoints : Path or None
        Folder for one checkpoint, written after every epoch; a run killed in between goes on from it and ends with
        the weights it would have had. A checkpoint of other settings or data is refused.
    on_epoch : callable or None
        Told the epoch, from 0, and its validation loss, on every rank; what it raises ends the fit.
    hidden : sequence of int
        Positions of features that the network is not to see.

    Raises
    ------
    ConfigError
        The device of the settings is not here.
    HistoryTooShortError
        No training or no validation row.
    ModelError
        The checkpoint belongs to another run.
    """
    for name, rows in (("training", train), ("validation", valid)):
        if len(rows) == 0:
            raise HistoryTooShortError(f"expected at least 1 {name} row, got 0: the trace is too short for the split")
    train, valid = _placed(train, config), _placed(valid, config)
    own = [train.device] if train.device.type == "cuda" else []  # the generators of other GPUs are left alone
    with cpu_threads(config.threads), torch.random.fork_rng(own):
        return _fit(train, valid, config, seed, checkpoints, on_epoch, hidden)


def _placed(samples: Samples | Rows, config: FitConfig) -> Samples:
    return Samples.of_rows(samples, choose_device(config.device)) if isinstance(samples, Rows) else samples


def _fit(
    train: Samples, valid: Samples, config: FitConfig, seed: int, checkpoints: Path | None,
    on_epoch: Callable[[int, float], None] | None, hidden: Sequence[int],
) -> FitResult:  # fmt: skip
    device, ranks = train.device, Ranks.current()
    data = _Data(train, valid, config, ranks)
    _, n_targets, n_horizons = train.widths
    generator = torch.Generator().manual_seed(seed)
    network = QuantileNetwork(
        _scaling(train, hidden), n_targets=n_targets, n_horizons=n_horizons, n_levels=len(QUANTILE_LEVELS),
        width=config.width, depth=config.depth, dropout=config.dropout,
    )  # fmt: skip
    network.initialise(generator)
    network.to(device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay)
    state = _Progress(identity=_identity(train, config, seed))
    path = None if checkpoints is None else checkpoints / _CHECKPOINT
    if path is not None and path.exists():
        state = _load_checkpoint(path, network, optimizer, state.identity, device)
        logger.info("going on from %s after epoch %d", path, state.epoch)
    stepped = ranks.wrapped(network, device)
    bar = tqdm(
        total=config.epochs, initial=state.epoch, desc="fit", unit="epoch", disable=None if ranks.first else True
    )
    try:
        while state.epoch < config.epochs and state.epoch - state.best_epoch <= config.patience:
            started = time.perf_counter()
            losses = _epoch(stepped, optimizer, data, config, state.epoch, seed)
            valid_loss = _validate(network, data)
            if not math.isfinite(valid_loss):
                raise ModelError(f"epoch {state.epoch}: the validation loss is {valid_loss}; lower fit.learning_rate")
            if valid_loss < state.best_loss:
                state.best_loss, state.best_epoch = valid_loss, state.epoch
                state.best = {k: v.detach().cpu().clone() for k, v in network.state_dict().items()}
            losses |= {"valid_loss": valid_loss, "seconds": time.perf_counter() - started}
            state.history.append(losses)
            state.epoch += 1
            if path is not None and ranks.first:
                _save_checkpoint(path, network, optimizer, state)
            bar.update()
            bar.set_postfix(valid=f"{valid_loss:.4f}")
            if on_epoch is not None:
                on_epoch(state.epoch - 1, valid_loss)
    finally:
        bar.close()
    network.load_state_dict(state.best)
    return FitResult(network.cpu().eval(), state.history, train.heads(), state.best_epoch, str(device))


def _scaling(train: Samples, hidden: Sequence[int]) -> Scaling:
    mean, scale = column_moments(train, lambda positions: squash(train.features(positions)))
    low, high = column_bounds(train, lambda positions: (squash(train.features(positions)) - mean) / scale, _RARE)
    low[list(hidden)] = high[list(hidden)] = 0.0
    return Scaling(*(t.cpu() for t in (mean, scale, low, high)))


class _Data:
    """The samples, and what turns them into a loss."""

    def __init__(self, train: Samples, valid: Samples, config: FitConfig, ranks: Ranks) -> None:
        self.train, self.valid, self.config, self.ranks = train, valid, config, ranks
        self.levels = torch.tensor(QUANTILE_LEVELS, device=train.device)
        # each target and horizon weighs the same, whatever its spread
        _, spread = column_moments(
            train, lambda positions: transform(train.targets(positions)[0], config.transform).flatten(1)
        )
        self.weight = (1 / spread.clamp(min=1e-3)).reshape(train.widths[1:])

    def loss(self, network: nn.Module, batch: Batch, ranks: Ranks) -> Tensor:
        """Return the loss of a batch, averaged over what is known; its mean over the ranks is that of all rows."""
        kind = batch.x.device.type
        with torch.autocast(kind, torch.bfloat16, enabled=self.config.bfloat16 and kind == "cuda"):
            quantiles, logits = network(batch.x)
        z = transform(batch.y, self.config.transform)
        of_targets, of_oom = ranks.shares(batch.y, batch.oom)
        pinball = (pinball_loss(quantiles.float(), z, self.levels) * self.weight * of_targets).mean()
        return pinball + self.config.oom_weight * (oom_loss(logits.float(), batch.oom) * of_oom).mean()


def _epoch(
    network: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: _Data,
    config: FitConfig,
    epoch: int,
    seed: int,
) -> dict[str, float]:
    network.train()
    started = time.perf_counter()
    n, device, ranks = len(data.train), data.train.device, data.ranks
    steps = -(-n // config.batch_size)
    # seeded per epoch: a resumed run needs no generator state
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    torch.manual_seed(seed * 1_000_003 + epoch + 100_003 * ranks.rank)  # for dropout, which takes no generator
    order = torch.randperm(n, generator=generator).to(device)
    total = torch.zeros((), device=device)
    for step in range(steps):
        rate = config.learning_rate * _one_cycle((epoch * steps + step) / (config.epochs * steps), config.warmup_share)
        for group in optimizer.param_groups:
            group["lr"] = rate
        batch = order[step * config.batch_size : (step + 1) * config.batch_size]
        loss = data.loss(network, data.train.take(batch[ranks.rank :: ranks.size]), ranks)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        total += loss.detach()
    mean_loss = ranks.total(float(total) / steps, device) / ranks.size
    return {
        "train_loss": mean_loss, "learning_rate": rate, "rows_per_second": n / (time.perf_counter() - started)
    }  # fmt: skip


def _one_cycle(done: float, warmup: float) -> float:
    """Return the learning rate's share of its highest, linear up, then a cosine down (Smith, "1cycle", 2018)."""
    if done < warmup:
        return 0.04 + 0.96 * done / warmup
    return 0.5 * (1 + math.cos(math.pi * (done - warmup) / (1 - warmup)))


def _validate(network: QuantileNetwork, data: _Data) -> float:
    network.eval()
    total, ranks = 0.0, data.ranks
    with torch.no_grad():
        for positions in islice(data.valid.chunks(_EVALUATION_ROWS), ranks.rank, None, ranks.size):
            total += float(data.loss(network, data.valid.take(positions), Ranks())) * len(positions)
    return ranks.total(total, data.valid.device) / len(data.valid)


@dataclass
class _Progress:
    """How far a run has come."""

    identity: str
    epoch: int = 0
    best_epoch: int = 0
    best_loss: float = math.inf
    best: dict[str, Tensor] = field(default_factory=dict)
    history: list[dict[str, float]] = field(default_factory=list)


def _identity(train: Samples, config: FitConfig, seed: int) -> str:
    """Return what a checkpoint must share with the run that goes on from it."""
    digest = sha256(json.dumps([asdict(config), seed, len(train), train.widths], sort_keys=True).encode())
    some = torch.arange(0, len(train), max(1, len(train) // 4096), device=train.device)
    digest.update(train.targets(some)[0].cpu().numpy().tobytes())
    return digest.hexdigest()


def _save_checkpoint(path: Path, network: QuantileNetwork, optimizer: torch.optim.Optimizer, state: _Progress) -> None:
    tensors = {f"now.{k}": v.detach().cpu().contiguous() for k, v in network.state_dict().items()}
    tensors |= {f"best.{k}": v.contiguous() for k, v in state.best.items()}
    for i, moments in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{i}.{k}": v.detach().cpu().contiguous() for k, v in moments.items()}
    facts = {k: getattr(state, k) for k in ("identity", "epoch", "best_epoch", "best_loss", "history")}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".partial")
    save_file(tensors, temporary, metadata={"progress": json.dumps(facts)})
    temporary.replace(path)


def _load_checkpoint(
    path: Path, network: QuantileNetwork, optimizer: torch.optim.Optimizer, identity: str, device: torch.device
) -> _Progress:
    parts: dict[str, dict[str, Tensor]] = {"now": {}, "best": {}, "optimizer": {}}
    with safe_open(path, framework="pt") as file:
        facts: dict[str, Any] = json.loads(file.metadata()["progress"])
        if facts["identity"] != identity:
            raise ModelError(f"{path} belongs to a run of other settings or data; remove it to start over")
        for key in file.keys():  # noqa: SIM118 - a safetensors file is no mapping
            part, _, name = key.partition(".")
            parts[part][name] = file.get_tensor(key)
    network.load_state_dict(parts["now"])
    moments: dict[int, dict[str, Tensor]] = {}
    for key, value in parts["optimizer"].items():
        number, _, name = key.partition(".")
        moments.setdefault(int(number), {})[name] = value if name == "step" else value.to(device)
    optimizer.load_state_dict({"state": moments, "param_groups": optimizer.state_dict()["param_groups"]})
    return _Progress(**facts, best=parts["best"])
