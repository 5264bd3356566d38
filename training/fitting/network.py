"""Fits the network to samples; an interrupted fit continues to the same result."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from itertools import islice, product
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load, save
from torch import Tensor, nn
from tqdm import tqdm

from reclaim.data.core.files import replaced_file
from reclaim.data.errors import ConfigError, HistoryTooShortError, ModelError
from reclaim.features.feature_set import FeatureSet
from reclaim.training.bundle import load_model
from reclaim.training.fitting.devices.distributed import Ranks, joined, own_device
from reclaim.training.fitting.devices.recorded import Step, recorded_step, set_rate
from reclaim.training.fitting.learner import Fitted, Learner, Objective, OnEpoch, Space, check_known
from reclaim.training.fitting.samples import Batch, Samples, column_bounds, column_moments
from reclaim.training.fitting.sources import (
    NO_ROWS,
    Source,
    chosen_rows,
    hidden_features,
    newest_rows,
    reason_against,
    rows_in_memory,
)
from reclaim.training.models.beyond import Beyond, beyond_of
from reclaim.training.models.forecaster import Heads
from reclaim.training.models.network import (
    Scaling,
    SurvivalNetwork,
    cpu_threads,
    squash,
    survival_loss,
    thresholds_from,
    weighted_mean,
)
from reclaim.training.models.network_forecaster import NetworkForecaster
from reclaim.training.models.oom_calibration import Calibrated
from reclaim.training.models.portable import PortableForecaster
from reclaim.training.models.prior import Prior, quarters_of
from reclaim.training.models.survival import ABOVE, BELOW, CEILING, FLOOR, LAST, NOW
from reclaim.training.models.trees import Rows
from reclaim.training.settings import NO_PRIOR, FitConfig, TrainConfig
from reclaim.training.tracking.references import BUILTIN

log = logging.getLogger(__name__)

_CHECKPOINT: Final = "checkpoint.safetensors"
_REFIT: Final = "refit"
"""Folder of the checkpoint of the second fit."""
_RARE: Final = 0.001
"""Share of the training rows at either end of each feature whose values are cut off. Extreme values of later tasks,
unlike those learned from, made the network far too sure."""
_NO_MEMORY: Final = ("can't allocate memory", "Storage size calculation overflowed")
"""Words of torch's errors on the CPU, which are plain ``RuntimeError``."""
_EVALUATION_ROWS: Final = 16_384
"""Validation rows per pass, to bound memory."""


@dataclass(frozen=True)
class FitResult:
    """A fitted network and the facts of its fit.

    Attributes
    ----------
    network : SurvivalNetwork
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

    network: SurvivalNetwork
    history: list[dict[str, float]]
    heads: Heads
    best_epoch: int
    device: str

    def facts(self, rows: int) -> dict[str, Any]:
        """Return ``Fitted.facts`` of a fit to so many rows."""
        return {"rows": rows, "device": self.device, "epochs": len(self.history), "best_epoch": self.best_epoch}


class NetworkLearner(Learner):
    """Fits the network."""

    settings = FitConfig
    served = True
    shared = True

    def check(self, config: TrainConfig) -> None:
        """Refuse a device that is not here, and bfloat16 on a card that has none."""
        device = choose_device(config.fit.device)
        if (
            config.fit.bfloat16
            and device.type == "cuda"
            and not torch.cuda.is_bf16_supported(including_emulation=False)
        ):
            raise ConfigError(f"fit.bfloat16: {torch.cuda.get_device_name(device)} has no bfloat16; set it to false")

    def together(self, config: TrainConfig, *, go: bool) -> AbstractContextManager[bool]:
        """Bring the processes of torchrun together."""
        return joined(choose_device(config.fit.device), go=go)

    def fit(
        self, sources: Sequence[Source], config: TrainConfig, checkpoints: Path, *, on_epoch: OnEpoch | None = None
    ) -> Fitted:
        """Put the rows that are used on the device and fit."""
        prior = prior_of(sources, config)
        if prior is None and config.prior == BUILTIN and any(quarters_of(_history_s(sources))):
            log.warning("the built-in model learned from these datasets, so none of its curves are mixed in")
        train = chosen_rows(sources, FeatureSet.train_rows, config.fit.max_samples, config.seed)
        with _remedy_named(config.fit):
            samples, valid = _samples(sources, config, train)
            check_known(samples.heads().targets, sources, config.horizon_s)
            result = fit_network(
                samples, valid, config.fit, seed=config.seed, checkpoints=checkpoints, on_epoch=on_epoch,
                hidden=hidden_features(sources),
            )  # fmt: skip
        facts = result.facts(len(samples))
        if prior is not None:
            facts["prior"] = prior.facts | {"history_days": round(_history_s(sources) / 86_400, 2)}
        forecaster = NetworkForecaster.of(result.network, result.heads, _beyond(samples), prior)
        del samples, valid
        refitted = None
        if config.fit.refit:
            refitted, facts["refit_rows"] = _refit(sources, config, result, checkpoints, prior)
        return Fitted(forecaster, [len(rows) for rows in train], facts, result.history, refitted)

    def rests_on(self, sources: Sequence[Source], config: TrainConfig) -> Any:
        """Return the identity of the network that is mixed in."""
        prior = prior_of(sources, config)
        return None if prior is None else prior.facts

    def objective(self, sources: Sequence[Source], config: TrainConfig) -> Objective:
        """Return the least validation loss of the epochs; the samples are put on the device once."""
        train = chosen_rows(sources, FeatureSet.train_rows, config.fit.max_samples, config.seed)
        with _remedy_named(config.fit):
            samples, valid = _samples(sources, config, train)

        def objective(tried: TrainConfig, on_epoch: OnEpoch) -> float:
            with _remedy_named(tried.fit):
                result = fit_network(
                    samples, valid, tried.fit, seed=tried.seed, on_epoch=on_epoch, hidden=hidden_features(sources)
                )
            return min(epoch["valid_loss"] for epoch in result.history)

        return objective

    def space(self) -> Space:
        """Return the settings that are searched; ``oom_weight`` changes the meaning of the loss."""
        from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

        return {
            "fit.width": (IntDistribution(64, 256, step=32), "the time to answer goes with its square"),
            "fit.depth": (IntDistribution(1, 6), "the time to answer goes with it"),
            "fit.dropout": (FloatDistribution(0.0, 0.4), "none at all, to where little is left of a narrow layer"),
            "fit.epochs": (IntDistribution(2, 10), "few: rows of one task are alike, more passes learn tasks by heart"),
            "fit.learning_rate": (
                FloatDistribution(4e-4, 1e-2, log=True),
                "the default, a factor of five to each side",
            ),
            "fit.weight_decay": (FloatDistribution(1e-3, 1.0, log=True), "from almost none to ten times the default"),
            "fit.warmup_share": (FloatDistribution(0.05, 0.4), "from a short climb to almost half of the schedule"),
            "fit.batch_size": (CategoricalDistribution((256, 512, 1024, 2048)), "below, a step is all overhead"),
        }


def prior_of(sources: Sequence[Source], config: TrainConfig) -> Prior | None:
    """Return what is mixed into the curves of a network of some datasets; None where their history is long enough.

    A prior of one of these datasets is refused where a replay would refuse the network, by the same rule; the built-in
    model, which is the default, is left out there. Only the same dataset is known, by its fingerprint; a prior of
    another dataset with windows of the same time is taken here, and refused by the replay.

    Raises
    ------
    ConfigError
        The model of the settings is not portable, or was trained or tuned on rows of one of the datasets that set
        prices or are tested.
    ModelError
        There is no such model.
    """
    quarters = quarters_of(_history_s(sources))
    if config.prior == NO_PRIOR or not any(quarters):
        return None
    bundle = load_model(config.prior)
    forecaster = bundle.forecaster
    bare = forecaster.bare if isinstance(forecaster, Calibrated) else forecaster
    if not isinstance(bare, PortableForecaster):
        raise ConfigError(
            f"prior: {config.prior!r} is a model of one cluster; name one of `reclaim train … --config portable`, "
            f"{BUILTIN} or {NO_PRIOR}"
        )
    learned_from = tuple(bundle.trained.get("datasets", ()))
    for source, of in product(sources, learned_from):
        if of.get("fingerprint") != source.dataset.fingerprint:
            continue
        reason = reason_against(of, source.features, repr(config.prior), of_prior=True)
        if reason is not None and config.prior == BUILTIN:
            return None
        if reason is not None:
            raise ConfigError(
                f"prior: {source.dataset.path}: {reason}; name one that learned from other clusters, or {NO_PRIOR}"
            )
    return Prior(bare, quarters, learned_from)


def _history_s(sources: Sequence[Source]) -> float:
    """Return the longest history of some datasets."""
    return max((source.history_s for source in sources), default=math.inf)


def _samples(sources: Sequence[Source], config: TrainConfig, train: list[NDArray[np.int64]]) -> tuple[Samples, Samples]:
    """Return the samples of the two periods, on the device of the settings; no other rows are put there."""
    valid = chosen_rows(sources, FeatureSet.valid_rows, config.fit.max_valid_samples, config.seed)
    device = choose_device(config.fit.device)
    return (
        Samples.of_rows(rows_in_memory(sources, train), device),
        Samples.of_rows(rows_in_memory(sources, valid), device),
    )


def _refit(
    sources: Sequence[Source], config: TrainConfig, first: FitResult, checkpoints: Path, prior: Prior | None
) -> tuple[NetworkForecaster, int]:
    """Return a network of the training and the validation rows, as many epochs old as the best one, and its rows.

    It answers for the same outputs as the first: prices and calibration of the first hold only for these.
    """
    with _remedy_named(config.fit):
        rows = newest_rows(sources, config.fit.max_samples, config.seed)
        samples = Samples.of_rows(rows, choose_device(config.fit.device))
        result = fit_network(
            samples, None, config.fit, seed=config.seed, checkpoints=checkpoints / _REFIT,
            epochs=first.best_epoch + 1, hidden=hidden_features(sources),
        )  # fmt: skip
    heads = Heads(result.heads.targets & first.heads.targets, result.heads.oom & first.heads.oom)
    return NetworkForecaster.of(result.network, heads, _beyond(samples), prior), len(samples)


def _beyond(samples: Samples) -> Beyond | None:
    taken = map(samples.take, samples.chunks())
    return beyond_of(
        (batch.x.cpu().numpy(), batch.y.cpu().numpy(), None if batch.weight is None else batch.weight.cpu().numpy())
        for batch in taken
    )


@contextmanager
def _remedy_named(config: FitConfig) -> Iterator[None]:
    """Name the remedy where the device's memory does not suffice."""
    try:
        yield
    except RuntimeError as error:
        on_device = isinstance(error, torch.OutOfMemoryError)
        if not on_device and not any(words in str(error) for words in _NO_MEMORY):
            raise
        reason = str(error).partition(". ")[0] if on_device else "the memory of this machine does not suffice"
        raise ConfigError(
            f"fit.device: {reason}; lower fit.max_samples ({config.max_samples:,}), fit.width ({config.width:,}), "
            f"fit.max_valid_samples ({config.max_valid_samples:,}) or fit.batch_size ({config.batch_size:,})"
            + (", or set fit.device=cpu" if on_device else "")
        ) from error


def choose_device(name: str = "auto") -> torch.device:
    """Return the named device; for ``auto``, CUDA where there is one, else the CPU; of several ranks, each its own.

    A GPU with a number becomes the current one of this process, which then opens no other.

    Raises
    ------
    ConfigError
        There is no such device here, or not one for each process that fits here.
    """
    try:
        device = own_device(torch.device(name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu"))
        torch.zeros(1, device=device).item()  # torch names devices that it does not have
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"fit.device: {name!r} cannot be used here ({reason}); auto takes what there is") from error
    return device


def fit_network(
    train: Samples | Rows,
    valid: Samples | Rows | None,
    config: FitConfig,
    *,
    seed: int,
    checkpoints: Path | None = None,
    epochs: int | None = None,
    on_epoch: OnEpoch | None = None,
    hidden: Sequence[int] = (),
    now: NDArray[np.int64] = NOW,
) -> FitResult:
    """Fit the network by AdamW under a one-cycle schedule, stopping when validation no longer improves.

    Without validation rows it ends after ``epochs`` of the schedule, with the weights of the last.

    Inside ``distributed.joined`` every rank calls it with the same arguments and gets the same result. Each step's
    batch is the one that a single process would take, split over the ranks, and the gradients are those of its loss:
    without dropout the result is a single process's but for the order of floating-point sums. With it, each rank draws
    its own. Each rank holds all samples; the first alone reads and writes checkpoints, and any number of ranks can
    continue from them.

    Parameters
    ----------
    train, valid : Samples or Rows
        Same widths; ``valid`` may be None. Samples lie on the device already, both on the same one; rows in memory are
        put on that of the settings.
    config : FitConfig
    seed : int
        Decides the first weights and the order of rows; the result is the same to the bit on the same machine with
        the same number of threads.
    checkpoints : Path or None
        Folder for one checkpoint, written after every epoch; a run killed in between goes on from it and ends with
        the weights it would have had. A checkpoint of other settings or data is refused.
    epochs : int or None
        Epochs of the schedule that are run at most; None: all.
    on_epoch : callable or None
        Receives the epoch, from 0, and its validation loss, on every rank; what it raises ends the fit.
    hidden : sequence of int
        Positions of features that the network is not to see.
    now : int64, shape (n_targets,)
        Positions of what is used now.

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
        if rows is not None and len(rows) == 0:
            raise HistoryTooShortError(f"expected at least 1 {name} row, got 0: {NO_ROWS}")
    train, valid = _placed(train, config), None if valid is None else _placed(valid, config)
    own = [train.device] if train.device.type == "cuda" else []  # the generators of other GPUs are left alone
    with cpu_threads(config.threads), torch.random.fork_rng(own):
        data = _Data(train, valid, config, Ranks.current(), now)
        return _fit(data, seed, checkpoints, config.epochs if epochs is None else epochs, on_epoch, hidden)


def _placed(samples: Samples | Rows, config: FitConfig) -> Samples:
    return Samples.of_rows(samples, choose_device(config.device)) if isinstance(samples, Rows) else samples


def _fit(
    data: _Data, seed: int, checkpoints: Path | None, epochs: int, on_epoch: OnEpoch | None, hidden: Sequence[int]
) -> FitResult:
    train, config, ranks = data.train, data.config, data.ranks
    device = train.device
    _, n_targets, n_horizons = train.widths
    generator = torch.Generator().manual_seed(seed)
    network = SurvivalNetwork(
        _scaling(train, hidden), n_targets=n_targets, n_horizons=n_horizons, width=config.width, depth=config.depth,
        dropout=config.dropout,
    )  # fmt: skip
    network.initialise(generator)
    network.to(device)
    recorded = config.recorded and device.type == "cuda" and ranks.size == 1
    rate = torch.tensor(config.learning_rate, device=device) if recorded else config.learning_rate
    optimizer = torch.optim.AdamW(network.parameters(), rate, weight_decay=config.weight_decay, capturable=recorded)
    state = _Progress(identity=_identity(train, config, seed))
    path = None if checkpoints is None else checkpoints / _CHECKPOINT
    checkpoint = ranks.of_first(path.read_bytes() if ranks.first and path is not None and path.exists() else None)
    if checkpoint is not None:
        state = _from_checkpoint(checkpoint, path, network, optimizer, state.identity)
        log.info("continuing from %s after epoch %d", path, state.epoch)
    step = _step_of(ranks.wrapped(network, device), optimizer, data)
    if recorded and len(train) >= config.batch_size:
        step = recorded_step(step, optimizer, config.batch_size, device)
    bar = tqdm(
        total=epochs,
        initial=state.epoch,
        desc="refit" if data.valid is None else "fit",
        unit="epoch",
        disable=None if ranks.first else True,
    )
    try:
        while state.epoch < epochs and state.epoch - state.best_epoch <= config.patience:
            started = time.perf_counter()
            losses = _epoch(network, step, optimizer, data, state.epoch, seed)
            valid_loss = losses["train_loss"] if data.valid is None else _validate(network, data.valid, data)
            if not math.isfinite(valid_loss):
                which = "training" if data.valid is None else "validation"
                raise ModelError(f"epoch {state.epoch}: the {which} loss is {valid_loss}; lower fit.learning_rate")
            if data.valid is None or valid_loss < state.best_loss:
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

    def __init__(
        self, train: Samples, valid: Samples | None, config: FitConfig, ranks: Ranks, now: NDArray[np.int64] = NOW
    ) -> None:
        self.train, self.valid, self.config, self.ranks = train, valid, config, ranks
        self.now = torch.tensor(now, device=train.device)

    def loss(self, network: nn.Module, batch: Batch, ranks: Ranks) -> Tensor:
        """Return the loss of a batch, averaged over what is known; its mean over the ranks is that of all rows."""
        kind = batch.x.device.type
        with torch.autocast(kind, torch.bfloat16, enabled=self.config.bfloat16 and kind == "cuda", cache_enabled=False):
            steps, logits = network(batch.x)
        now = torch.nan_to_num(batch.x[:, self.now], nan=FLOOR).clamp(FLOOR, CEILING)
        of_targets, of_oom = ranks.shares(batch.y, batch.oom, weight=batch.weight)
        curves = (survival_loss(steps, batch.y, thresholds_from(now), batch.weight) * of_targets).mean()
        return curves + self.config.oom_weight * (oom_loss(logits, batch.oom, batch.weight) * of_oom).mean()


def _step_of(network: nn.Module, optimizer: torch.optim.Optimizer, data: _Data) -> Step:
    """Return the function that takes a step on samples, by their positions, and returns their loss."""

    def step(positions: Tensor) -> Tensor:
        loss = data.loss(network, data.train.take(positions), data.ranks)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    return step


def _epoch(
    network: nn.Module, step: Step, optimizer: torch.optim.Optimizer, data: _Data, epoch: int, seed: int
) -> dict[str, float]:
    network.train()
    started = time.perf_counter()
    n, device, ranks, config = len(data.train), data.train.device, data.ranks, data.config
    batch_size = config.batch_size
    steps = -(-n // batch_size)
    # seeded per epoch: a resumed run needs no generator state
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    torch.manual_seed(seed * 1_000_003 + epoch + 100_003 * ranks.rank)  # for dropout, which takes no generator
    order = torch.randperm(n, generator=generator).to(device)
    total = torch.zeros((), device=device)
    for number in range(steps):
        rate = config.learning_rate * _one_cycle(
            (epoch * steps + number) / (config.epochs * steps), config.warmup_share
        )
        set_rate(optimizer, rate)
        total += step(order[number * batch_size : (number + 1) * batch_size][ranks.rank :: ranks.size])
    mean_loss = ranks.total(float(total) / steps, device) / ranks.size
    return {
        "train_loss": mean_loss, "learning_rate": rate, "rows_per_second": n / (time.perf_counter() - started)
    }  # fmt: skip


def _one_cycle(done: float, warmup: float) -> float:
    """Return the learning rate's share of its highest, linear up, then a cosine down (Smith, "1cycle", 2018)."""
    if done < warmup:
        return 0.04 + 0.96 * done / warmup
    return 0.5 * (1 + math.cos(math.pi * (done - warmup) / (1 - warmup)))


def _validate(network: SurvivalNetwork, valid: Samples, data: _Data) -> float:
    network.eval()
    ranks, device = data.ranks, valid.device
    total = torch.zeros((), dtype=torch.float64, device=device)  # the device is waited for once
    with torch.no_grad():
        for positions in islice(valid.chunks(_EVALUATION_ROWS), ranks.rank, None, ranks.size):
            total += data.loss(network, valid.take(positions), Ranks()).double() * len(positions)
    return ranks.total(float(total), device) / len(valid)


@dataclass
class _Progress:
    """Progress of a run."""

    identity: str
    epoch: int = 0
    best_epoch: int = 0
    best_loss: float = math.inf
    best: dict[str, Tensor] = field(default_factory=dict)
    history: list[dict[str, float]] = field(default_factory=list)


def _identity(train: Samples, config: FitConfig, seed: int) -> str:
    """Return what a checkpoint must share with the run that continues from it."""
    grid = [BELOW, ABOVE, LAST, FLOOR, CEILING]  # the meaning of the outputs
    digest = sha256(json.dumps([asdict(config), seed, len(train), train.widths, grid], sort_keys=True).encode())
    some = torch.arange(0, len(train), max(1, len(train) // 4096), device=train.device)
    digest.update(train.targets(some)[0].cpu().numpy().tobytes())
    return digest.hexdigest()


def _save_checkpoint(path: Path, network: SurvivalNetwork, optimizer: torch.optim.Optimizer, state: _Progress) -> None:
    tensors = {f"now.{k}": v.detach().cpu().contiguous() for k, v in network.state_dict().items()}
    tensors |= {f"best.{k}": v.contiguous() for k, v in state.best.items()}
    for i, moments in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{i}.{k}": v.detach().cpu().contiguous() for k, v in moments.items()}
    facts = {k: getattr(state, k) for k in ("identity", "epoch", "best_epoch", "best_loss", "history")}
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced_file(path) as partial:
        partial.write_bytes(save(tensors, metadata={"progress": json.dumps(facts)}))


def _from_checkpoint(
    content: bytes, path: Path | None, network: SurvivalNetwork, optimizer: torch.optim.Optimizer, identity: str
) -> _Progress:
    """Restore network and optimizer from the bytes of a checkpoint, which are those of ``path``."""
    header = int.from_bytes(content[:8], "little")  # of a safetensors file, in JSON behind its length
    facts: dict[str, Any] = json.loads(json.loads(content[8 : 8 + header])["__metadata__"]["progress"])
    if facts["identity"] != identity:
        raise ModelError(f"{path} belongs to a run of other settings or data; remove it to start over")
    parts: dict[str, dict[str, Tensor]] = {"now": {}, "best": {}, "optimizer": {}}
    for key, tensor in load(content).items():
        part, _, name = key.partition(".")
        parts[part][name] = tensor
    network.load_state_dict(parts["now"])
    moments: dict[int, dict[str, Tensor]] = {}
    for key, value in parts["optimizer"].items():
        number, _, name = key.partition(".")
        moments.setdefault(int(number), {})[name] = value
    optimizer.load_state_dict({"state": moments, "param_groups": optimizer.state_dict()["param_groups"]})
    return _Progress(**facts, best=parts["best"])


def oom_loss(logits: Tensor, label: Tensor, weight: Tensor | None = None) -> Tensor:
    """Return the cross-entropy of every horizon, averaged over known rows; shapes (B, H) and (B, H) to (H,)."""
    known = torch.isfinite(label)
    target = torch.where(known, label, torch.zeros_like(label))
    loss = nn.functional.binary_cross_entropy_with_logits(logits, target, reduction="none")
    return weighted_mean(loss * known, known, weight)
