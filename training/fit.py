"""The training loop: arrays in, a fitted network out; interrupted anywhere, it goes on to the same result."""

from __future__ import annotations

import json
import logging
import math
import time
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from reclaim.data.errors import ConfigError, HistoryTooShortError, ModelError
from reclaim.training.forecaster import Heads
from reclaim.training.losses import oom_loss, pinball_loss
from reclaim.training.networks import QuantileNetwork, cpu_threads, squash, standardisation, transform
from reclaim.training.settings import QUANTILE_LEVELS, FitConfig

logger = logging.getLogger(__name__)

_CHECKPOINT: Final = "checkpoint.safetensors"
_EVALUATION_ROWS: Final = 16_384
"""Validation rows per pass, to bound memory."""


@dataclass(frozen=True)
class Rows:
    """What is fitted on.

    Attributes
    ----------
    x : float32, shape (n, n_features)
    y : float32, shape (n, n_targets, n_horizons)
        Over the limit; NaN unknown.
    oom : float32, shape (n, n_horizons)
        0 or 1; NaN unknown.
    """

    x: NDArray[np.float32]
    y: NDArray[np.float32]
    oom: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.x)

    def heads(self) -> Heads:
        """Return what can be fitted on these rows: all that is known in at least one."""
        return Heads(*(np.logical_or.reduce(np.isfinite(known), axis=0) for known in (self.y, self.oom)))


@dataclass(frozen=True)
class FitResult:
    """A fitted network and how it came about.

    Attributes
    ----------
    network : QuantileNetwork
        On the CPU, with the weights of the epoch of the lowest validation loss.
    history : list of dict
        Per epoch: ``train_loss``, ``valid_loss``, ``learning_rate``, ``seconds``.
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
    """Return the named device; for ``auto``, CUDA where there is one, else the CPU.

    Raises
    ------
    ConfigError
        There is no such device here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # torch names devices that it does not have
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"fit.device: {name!r} cannot be used here ({reason}); auto takes what there is") from error
    return device


def choose_rows(rows: NDArray[np.int64], limit: int, seed: int) -> NDArray[np.int64]:
    """Return at most ``limit`` of the rows, chosen by the seed, in their order."""
    if len(rows) <= limit:
        return rows
    return np.sort(np.random.default_rng(seed).choice(rows, limit, replace=False))


def fit_network(
    train: Rows,
    valid: Rows,
    config: FitConfig,
    *,
    seed: int,
    checkpoints: Path | None = None,
) -> FitResult:
    """Fit the network by AdamW under a one-cycle schedule, stopping when validation no longer improves.

    Parameters
    ----------
    train, valid : Rows
        Same widths; the training rows travel to the device once.
    config : FitConfig
    seed : int
        Decides the first weights and the order of rows; the result is the same to the bit on the same machine with
        the same number of threads.
    checkpoints : Path or None
        Folder for one checkpoint, written after every epoch; a run killed in between goes on from it and ends with
        the weights it would have had. A checkpoint of other settings or data is refused.

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
    with cpu_threads(config.threads):
        return _fit(train, valid, config, seed, checkpoints)


def _fit(train: Rows, valid: Rows, config: FitConfig, seed: int, checkpoints: Path | None) -> FitResult:
    device = choose_device(config.device)
    data = _Resident(train, valid, config, device)
    generator = torch.Generator().manual_seed(seed)
    network = QuantileNetwork(
        data.mean, data.scale, n_targets=data.z.shape[1], n_horizons=data.z.shape[2], n_levels=len(QUANTILE_LEVELS),
        width=config.width, depth=config.depth,
    )  # fmt: skip
    network.initialise(generator)
    network.to(device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay)
    state = _Progress(identity=_identity(train, config, seed))
    path = None if checkpoints is None else checkpoints / _CHECKPOINT
    if path is not None and path.exists():
        state = _load_checkpoint(path, network, optimizer, state.identity, device)
        logger.info("going on from %s after epoch %d", path, state.epoch)
    bar = tqdm(total=config.epochs, initial=state.epoch, desc="fit", unit="epoch", disable=None)
    try:
        while state.epoch < config.epochs and state.epoch - state.best_epoch <= config.patience:
            started = time.perf_counter()
            losses = _epoch(network, optimizer, data, config, state.epoch, seed)
            valid_loss = _validate(network, data, config)
            if not math.isfinite(valid_loss):
                raise ModelError(f"epoch {state.epoch}: the validation loss is {valid_loss}; lower fit.learning_rate")
            if valid_loss < state.best_loss:
                state.best_loss, state.best_epoch = valid_loss, state.epoch
                state.best = {k: v.detach().cpu().clone() for k, v in network.state_dict().items()}
            losses |= {"valid_loss": valid_loss, "seconds": time.perf_counter() - started}
            state.history.append(losses)
            state.epoch += 1
            if path is not None:
                _save_checkpoint(path, network, optimizer, state)
            bar.update()
            bar.set_postfix(valid=f"{valid_loss:.4f}")
    finally:
        bar.close()
    network.load_state_dict(state.best)
    return FitResult(network.cpu().eval(), state.history, train.heads(), state.best_epoch, str(device))


class _Resident:
    """The rows on the device, targets in the space of the transform, with the weight of each loss."""

    def __init__(self, train: Rows, valid: Rows, config: FitConfig, device: torch.device) -> None:
        self.x = torch.from_numpy(train.x).to(device)
        self.z = transform(torch.from_numpy(train.y), config.transform).to(device)
        self.oom = torch.from_numpy(train.oom).to(device)
        self.valid_x = torch.from_numpy(valid.x).to(device)
        self.valid_z = transform(torch.from_numpy(valid.y), config.transform).to(device)
        self.valid_oom = torch.from_numpy(valid.oom).to(device)
        self.levels = torch.tensor(QUANTILE_LEVELS, device=device)
        self.mean, self.scale = standardisation(squash(torch.from_numpy(train.x)))
        # each target and horizon weighs the same, whatever its spread
        _, spread = standardisation(transform(torch.from_numpy(train.y), config.transform).flatten(1))
        self.weight = (1 / spread.clamp(min=1e-3)).reshape(self.z.shape[1:]).to(device)


def _loss(network: QuantileNetwork, data: _Resident, config: FitConfig, x: Tensor, z: Tensor, oom: Tensor) -> Tensor:
    half = config.bfloat16 and x.device.type == "cuda"
    with torch.autocast(x.device.type, torch.bfloat16, enabled=half):
        quantiles, logits = network(x)
    pinball = (pinball_loss(quantiles.float(), z, data.levels) * data.weight).mean()
    return pinball + config.oom_weight * oom_loss(logits.float(), oom).mean()


def _epoch(
    network: QuantileNetwork,
    optimizer: torch.optim.Optimizer,
    data: _Resident,
    config: FitConfig,
    epoch: int,
    seed: int,
) -> dict[str, float]:
    network.train()
    n = len(data.x)
    steps = -(-n // config.batch_size)
    # seeded per epoch: a resumed run needs no generator state
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(n, generator=generator).to(data.x.device)
    total = torch.zeros((), device=data.x.device)
    for step in range(steps):
        rate = config.learning_rate * _one_cycle((epoch * steps + step) / (config.epochs * steps), config.warmup_share)
        for group in optimizer.param_groups:
            group["lr"] = rate
        rows = order[step * config.batch_size : (step + 1) * config.batch_size]
        loss = _loss(network, data, config, data.x[rows], data.z[rows], data.oom[rows])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        total += loss.detach()
    return {"train_loss": float(total) / steps, "learning_rate": rate}


def _one_cycle(done: float, warmup: float) -> float:
    """Return the learning rate's share of its highest, linear up, then a cosine down (Smith, "1cycle", 2018)."""
    if done < warmup:
        return 0.04 + 0.96 * done / warmup
    return 0.5 * (1 + math.cos(math.pi * (done - warmup) / (1 - warmup)))


def _validate(network: QuantileNetwork, data: _Resident, config: FitConfig) -> float:
    network.eval()
    total = 0.0
    with torch.no_grad():
        for start in range(0, len(data.valid_x), _EVALUATION_ROWS):
            rows = slice(start, start + _EVALUATION_ROWS)
            x = data.valid_x[rows]
            total += float(_loss(network, data, config, x, data.valid_z[rows], data.valid_oom[rows])) * len(x)
    return total / len(data.valid_x)


@dataclass
class _Progress:
    """How far a run has come."""

    identity: str
    epoch: int = 0
    best_epoch: int = 0
    best_loss: float = math.inf
    best: dict[str, Tensor] = field(default_factory=dict)
    history: list[dict[str, float]] = field(default_factory=list)


def _identity(train: Rows, config: FitConfig, seed: int) -> str:
    """Return what a checkpoint must share with the run that goes on from it."""
    digest = sha256(json.dumps([asdict(config), seed, train.x.shape, train.y.shape], sort_keys=True).encode())
    digest.update(np.ascontiguousarray(train.y[:: max(1, len(train) // 4096)]).tobytes())
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
