"""Settings of training: plain values, free of torch and scikit-learn, so that the command line reads them fast."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from reclaim.data.errors import ConfigError
from reclaim.features.targets import HORIZONS_S
from reclaim.training.estimators.registry import LEARNED
from reclaim.training.margins.margin import Budgets
from reclaim.training.margins.plan import ANCHORS

QUANTILE_LEVELS: Final = (0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999, 0.9995)
"""Levels the network answers with; dense at the top, where reservations are chosen (budgets of 1 % and 0.1 %)."""

CONFIGS: Final = Path(__file__).parent / "configs"
"""Folder of the settings that come with the package, one TOML per kind of data."""

TRANSFORMS: Final = ("identity", "sqrt", "log1p")
"""Monotone maps of a target before the loss; quantiles are equivariant under them, the weight of errors is not."""


def shipped_configs() -> list[str]:
    """Return the names of the settings that come with the package."""
    return sorted(path.stem for path in CONFIGS.glob("*.toml"))


def config_file(name_or_path: Path | None) -> Path | None:
    """Return the file of settings: a file, or the one of that name that comes with the package; None stays None.

    Raises
    ------
    ConfigError
        There is neither.
    """
    if name_or_path is None or name_or_path.is_file():
        return name_or_path
    if str(name_or_path) not in shipped_configs():
        raise ConfigError(f"{name_or_path}: no such file, and shipped are only {', '.join(shipped_configs())}")
    return CONFIGS / f"{name_or_path}.toml"


def _check(condition: bool, name: str, rule: str, value: object) -> None:
    if not condition:
        raise ConfigError(f"{name} must be {rule}, got {value!r}")


@dataclass(frozen=True)
class FitConfig:
    """Settings of the network and of its fit.

    Attributes
    ----------
    width : int
        Units of each hidden layer.
    depth : int
        Hidden layers.
    transform : str
        One of ``TRANSFORMS``.
    dropout : float
        Share of hidden units left out at each step. Rows of one task are much alike, so a network soon knows the tasks
        it has seen by heart, and is then far too sure of others in the tail.
    epochs : int
        Passes over the training rows at most. The schedule is made for all of them: a long one that is stopped early
        ends at a high learning rate.
    batch_size : int
        Rows per step.
    learning_rate : float
        Highest rate of the one-cycle schedule.
    weight_decay : float
        AdamW's.
    warmup_share : float
        Share of all steps in which the rate climbs; it falls along a cosine afterwards.
    patience : int
        Epochs without a better validation loss after which fitting stops.
    oom_weight : float
        Weight of the out-of-memory loss next to the pinball loss.
    max_samples : int
        Training rows at most; a seeded choice when there are more.
    max_valid_samples : int
        Validation rows at most, chosen likewise.
    threads : int
        CPU threads; 1 by default, see ``network.cpu_threads``.
    bfloat16 : bool
        Forward passes in bfloat16; takes effect on CUDA only.
    device : str
        ``auto`` is CUDA where present, else CPU; or a name torch knows, such as ``cuda:1``.
    """

    width: int = 128
    depth: int = 2
    transform: str = "identity"
    dropout: float = 0.1
    epochs: int = 10
    batch_size: int = 1024
    learning_rate: float = 4e-3
    weight_decay: float = 0.3
    warmup_share: float = 0.2
    patience: int = 5
    oom_weight: float = 0.1
    max_samples: int = 400_000
    max_valid_samples: int = 60_000
    threads: int = 1
    bfloat16: bool = False
    device: str = "auto"

    def __post_init__(self) -> None:
        for name in (
            "width",
            "depth",
            "epochs",
            "batch_size",
            "patience",
            "max_samples",
            "max_valid_samples",
            "threads",
        ):
            _check(getattr(self, name) >= 1, name, "at least 1", getattr(self, name))
        _check(self.transform in TRANSFORMS, "transform", f"one of {', '.join(TRANSFORMS)}", self.transform)
        _check(0 <= self.dropout < 1, "dropout", "in [0, 1)", self.dropout)
        _check(self.learning_rate > 0, "learning_rate", "above 0", self.learning_rate)
        _check(self.weight_decay >= 0, "weight_decay", "at least 0", self.weight_decay)
        _check(0 <= self.warmup_share < 1, "warmup_share", "in [0, 1)", self.warmup_share)
        _check(self.oom_weight >= 0, "oom_weight", "at least 0", self.oom_weight)


@dataclass(frozen=True)
class TreeConfig:
    """Settings of the fit of the gradient-boosted trees.

    Attributes
    ----------
    levels : tuple of float
        Quantile levels, one model for each level and target.
    iterations : int
        Trees per model.
    leaves : int
        Leaves per tree at most.
    learning_rate : float
        Shrinkage.
    min_leaf : int
        Rows per leaf at least.
    max_samples : int
        Training rows at most; a seeded choice when there are more.
    threads : int
        CPU threads; more help only where the cores are idle.
    """

    levels: tuple[float, ...] = (0.9, 0.95, 0.98, 0.99, 0.995)
    iterations: int = 100
    leaves: int = 31
    learning_rate: float = 0.1
    min_leaf: int = 50
    max_samples: int = 60_000
    threads: int = 1

    def __post_init__(self) -> None:
        _check(len(self.levels) > 0 and all(0 < q < 1 for q in self.levels), "levels", "between 0 and 1", self.levels)
        _check(tuple(sorted(set(self.levels))) == tuple(self.levels), "levels", "increasing", self.levels)
        for name in ("iterations", "min_leaf", "max_samples", "threads"):
            _check(getattr(self, name) >= 1, name, "at least 1", getattr(self, name))
        _check(self.leaves >= 2, "leaves", "at least 2", self.leaves)
        _check(self.learning_rate > 0, "learning_rate", "above 0", self.learning_rate)


@dataclass(frozen=True)
class TrainConfig:
    """One training run.

    Attributes
    ----------
    estimator : str
        One of ``estimators.registry.LEARNED``.
    horizon_s : int
        The horizon a reservation is promised for, in seconds; one of ``features.targets.HORIZONS_S``.
    level : float or None
        Quantile level reserved for all tasks alike; None spends the budget instead (``estimators.plan.Basis``), at the
        price that reclaims most of the validation rows, per resource and budget.
    anchor : float or None
        Weight of the task's own past next to the quantile, one of ``estimators.plan.ANCHORS``; None chooses likewise.
    budgets : Budgets
        Shares of task-windows that may violate, for the baseline and the aggressive margin.
    by_group : bool
        Whether each group of tasks (tier, age) keeps the budgets for itself, with a margin of its own.
    seed : int
        Seed of every random choice.
    fit : FitConfig
        Settings of the network.
    trees : TreeConfig
        Settings of the trees.
    params : mapping
        Settings of any other estimator, by the names of its own settings class.
    experiment : str
        MLflow experiment.
    model_name : str
        Registered model; an estimator that is not served by default gets its own name behind it.
    """

    estimator: str = "network"
    horizon_s: int = 3_600
    level: float | None = None
    anchor: float | None = None
    budgets: Budgets = field(default_factory=Budgets)
    by_group: bool = False
    seed: int = 1
    fit: FitConfig = field(default_factory=FitConfig)
    trees: TreeConfig = field(default_factory=TreeConfig)
    params: Mapping[str, Any] = field(default_factory=dict)
    experiment: str = "reclaim-train"
    model_name: str = "reclaim"

    def __post_init__(self) -> None:
        _check(self.estimator in LEARNED, "estimator", f"one of {', '.join(LEARNED)}", self.estimator)
        _check(self.horizon_s in HORIZONS_S, "horizon_s", f"one of {HORIZONS_S} seconds", self.horizon_s)
        if self.level is not None and not isinstance(self.own, Mapping):
            offered = getattr(self.own, "levels", QUANTILE_LEVELS)
            _check(self.level in offered, "level", f"one of {offered}", self.level)
        _check(self.anchor is None or self.anchor in ANCHORS, "anchor", f"one of {ANCHORS}", self.anchor)
        _check(bool(self.experiment) and bool(self.model_name), "experiment and model_name", "named", "")

    def settings(self) -> Mapping[str, Any]:
        """Return every setting as plain nested values, without those of the estimators that are not trained."""
        others = {"fit", "trees", "params"} - {LEARNED[self.estimator].settings}
        return {name: value for name, value in asdict(self).items() if name not in others}

    @property
    def own(self) -> Any:
        """The settings of the estimator that is trained: a dataclass, or ``params``."""
        return getattr(self, LEARNED[self.estimator].settings)
