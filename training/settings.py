"""Settings of training: plain values without torch and scikit-learn, so that the command line reads them fast."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from reclaim.data.core.nested import flatten
from reclaim.data.errors import ConfigError
from reclaim.features.targets import HORIZONS_S
from reclaim.training.estimators.registry import LEARNED
from reclaim.training.margins.margin import Budgets
from reclaim.training.margins.value import Value
from reclaim.training.tracking.references import BUILTIN, is_folder

QUANTILE_LEVELS: Final = (0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999, 0.9995)
"""Levels that are read off a curve; dense at the top, where reservations lie (budgets of 1 % and 0.1 %)."""

NO_PRIOR: Final = "none"
"""The prior of a network that answers by its own curves alone, however short its history is."""

_UNNAMED: Final = ("estimator", "experiment", "model_name")
"""Settings that a run's name leaves out: they are shown where it is."""
_TAKEN: Final = (".", "..", BUILTIN)
"""Names that have another meaning in a reference or a store."""
_NAME_LETTERS: Final = 200
"""Largest length of a run's name, which MLflow shows in a column; params have every setting."""

_LARGEST: Final = 2**31 - 1
"""Libraries keep seeds and counts in 32 bits with a sign; a fit of several models adds to the seed that is given."""

CONFIGS: Final = Path(__file__).parent / "configs"
"""Folder of the settings that come with the package, each a TOML."""


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
        raise ConfigError(f"{name_or_path}: no such file; shipped are {', '.join(shipped_configs())}")
    return CONFIGS / f"{name_or_path}.toml"


def _check(condition: bool, name: str, rule: str, value: object) -> None:
    if not condition:
        raise ConfigError(f"{name} must be {rule}, got {value!r}")


def _check_count(name: str, value: int) -> None:
    _check(1 <= value <= _LARGEST, name, f"from 1 to {_LARGEST}", value)


@dataclass(frozen=True)
class FitConfig:
    """Settings of the network and of its fit."""

    width: int = 128
    """Units of each hidden layer."""
    depth: int = 2
    """Hidden layers."""
    dropout: float = 0.1
    """Share of hidden units left out at each step. Rows of one task are much alike, so a network soon memorises the
    tasks it has seen, and is then far too sure about the tails of others."""
    epochs: int = 10
    """Largest number of passes over the training rows. The schedule is made for all of them: a long one that is stopped
    early ends at a high learning rate."""
    batch_size: int = 1_024
    """Rows per step, on every device: larger ones forecast worse, and a GPU fits in seconds with these."""
    learning_rate: float = 4e-3
    """Highest rate of the one-cycle schedule."""
    weight_decay: float = 0.3
    """Weight decay of AdamW."""
    warmup_share: float = 0.2
    """Share of all steps in which the rate climbs; it falls along a cosine afterwards."""
    patience: int = 5
    """Epochs without a better validation loss after which fitting stops."""
    oom_weight: float = 0.1
    """Weight of the out-of-memory loss next to that of the curves."""
    max_samples: int = 400_000
    """Largest number of training rows; a seeded choice when there are more."""
    max_valid_samples: int = 60_000
    """Largest number of validation rows, chosen likewise."""
    threads: int = 1
    """CPU threads; 1 by default, see ``network.cpu_threads``."""
    bfloat16: bool = False
    """Forward passes in bfloat16; takes effect on CUDA only, and is refused on a card without bfloat16."""
    recorded: bool = True
    """Steps are recorded once and repeated by one launch; takes effect on CUDA and in one process only, and is not used
    where the recording does not agree with the steps."""
    refit: bool = True
    """Fits network and out-of-memory model once more, to the training and the validation rows, when the first have set
    prices and calibration. The second ones serve: they know the newest days. The first answer for the rows that the
    second learned from."""
    device: str = "auto"
    """``auto`` is CUDA where present, else CPU; or a name torch knows, such as ``cuda:1``."""

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
            _check_count(name, getattr(self, name))
        _check(0 <= self.dropout < 1, "dropout", "in [0, 1)", self.dropout)
        _check(0 < self.learning_rate < math.inf, "learning_rate", "above 0 and finite", self.learning_rate)
        _check(0 <= self.weight_decay < math.inf, "weight_decay", "at least 0 and finite", self.weight_decay)
        _check(0 <= self.warmup_share < 1, "warmup_share", "in [0, 1)", self.warmup_share)
        _check(0 <= self.oom_weight < math.inf, "oom_weight", "at least 0 and finite", self.oom_weight)


@dataclass(frozen=True)
class TreeConfig:
    """Settings of the fit of the gradient-boosted trees."""

    iterations: int = 150
    """Trees per target."""
    leaves: int = 31
    """Largest number of leaves of a tree."""
    learning_rate: float = 0.1
    """Shrinkage."""
    min_leaf: int = 200
    """Least number of pairs of a row and a threshold in a leaf."""
    max_samples: int = 100_000
    """Largest number of training rows; a seeded choice when there are more."""
    max_pairs: int = 500_000
    """Largest number of pairs of a row and a threshold per target, chosen likewise."""
    threads: int = 1
    """CPU threads; more help only where the cores are idle."""

    def __post_init__(self) -> None:
        for name in ("iterations", "min_leaf", "max_samples", "max_pairs", "threads"):
            _check_count(name, getattr(self, name))
        _check(2 <= self.leaves <= _LARGEST, "leaves", f"from 2 to {_LARGEST}", self.leaves)
        _check(0 < self.learning_rate < math.inf, "learning_rate", "above 0 and finite", self.learning_rate)


@dataclass(frozen=True)
class TrainConfig:
    """One training run."""

    estimator: str = "network"
    """``network`` or ``trees``, or another of ``estimators.registry.LEARNED``."""
    horizon_s: int = 3_600
    """The horizon a reservation is promised for, in seconds: 300, 3600 or 86400 (``features.targets.HORIZONS_S``)."""
    budgets: Budgets = field(default_factory=Budgets)
    """Shares of task-windows that may violate, for the baseline and the aggressive price."""
    by_tier: bool = False
    """Makes each tier keep the budgets for itself, at a price of its own."""
    value: Value = field(default_factory=Value)
    """Money instead of a budget: what is reclaimed earns it, a violation costs it, and the price follows."""
    against_builtin: bool = True
    """Compares with the built-in model on validation rows: the first model of a name is served only if it is not
    worse."""
    prior: str = "builtin"
    """Portable model of other clusters whose curves are mixed into those of the network where the history is shorter
    than five weeks: ``builtin``, one by its name or folder, or ``none``."""
    seed: int = 1
    """Seed of every random choice, from 0 to 2147483647."""
    fit: FitConfig = field(default_factory=FitConfig)
    """Settings of the network."""
    trees: TreeConfig = field(default_factory=TreeConfig)
    """Settings of the trees."""
    params: Mapping[str, Any] = field(default_factory=dict)
    """Settings of any other estimator, by the names of its own settings class."""
    experiment: str = "reclaim-train"
    """MLflow experiment."""
    model_name: str = "reclaim"
    """Registered model; for an estimator that is not served by default, the estimator's name is appended."""

    def __post_init__(self) -> None:
        _check(self.estimator in LEARNED, "estimator", f"one of {', '.join(LEARNED)}", self.estimator)
        own = LEARNED[self.estimator].settings
        if self.params and own != "params":
            raise ConfigError(f"params are settings of estimators of your own; those of {self.estimator} are {own}.…")
        _check(0 <= self.seed <= _LARGEST, "seed", f"from 0 to {_LARGEST}", self.seed)
        _check(self.horizon_s in HORIZONS_S, "horizon_s", f"one of {HORIZONS_S} seconds", self.horizon_s)
        _check(bool(self.experiment) and bool(self.model_name), "experiment and model_name", "named", "")
        unread = is_folder(f"{self.model_name}/1") or self.model_name in _TAKEN
        _check(not unread, "model_name", "of letters, digits, '_', '.' and '-', as in NAME/VERSION", self.model_name)

    def settings(self) -> Mapping[str, Any]:
        """Return every setting as plain nested values, without those of the estimators that are not trained."""
        others = {"fit", "trees", "params"} - {LEARNED[self.estimator].settings}
        return {name: value for name, value in asdict(self).items() if name not in others}

    def run_name(self, datasets: Iterable[str]) -> str:
        """Return the name of a run: the estimator, its datasets, and the settings that are not the defaults."""
        mine, default = flatten(self.settings()), flatten(TrainConfig(estimator=self.estimator).settings())
        changed = [f"{k}={v}" for k, v in mine.items() if k not in _UNNAMED and default.get(k) != v]
        return textwrap.shorten(
            " ".join([self.estimator, "+".join(datasets), *changed]), _NAME_LETTERS, placeholder=" …"
        )

    @property
    def own(self) -> Any:
        """The settings of the estimator that is trained: a dataclass, or ``params``."""
        return getattr(self, LEARNED[self.estimator].settings)
