"""What `reclaim tune` searches: settings and their ranges, and how a configuration takes them."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Final

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from reclaim.data.errors import ConfigError
from reclaim.training.settings import TrainConfig

Ranges = Mapping[str, BaseDistribution]
"""Dotted names of settings, and where each is searched."""

SPACE: Final[Mapping[str, Mapping[str, tuple[BaseDistribution, str]]]] = {
    "network": {
        "fit.width": (IntDistribution(64, 256, step=64), "the time to answer goes with its square"),
        "fit.depth": (IntDistribution(1, 4), "the time to answer goes with it; a linear path is there anyway"),
        "fit.dropout": (FloatDistribution(0.0, 0.4), "none at all, to where little is left of a narrow layer"),
        "fit.epochs": (IntDistribution(2, 10), "few: rows of one task are alike, more passes learn tasks by heart"),
        "fit.learning_rate": (FloatDistribution(4e-4, 1e-2, log=True), "the default and a factor of five to each side"),
        "fit.weight_decay": (FloatDistribution(1e-3, 1.0, log=True), "from almost none to ten times the default"),
        "fit.warmup_share": (FloatDistribution(0.05, 0.4), "from a short climb to almost half of the schedule"),
        "fit.batch_size": (CategoricalDistribution((512, 1024, 2048, 4096)), "below, a step is all overhead"),
    },
    "trees": {
        "trees.iterations": (IntDistribution(50, 400, log=True), "the times to fit and to answer go with it"),
        "trees.leaves": (IntDistribution(7, 127, log=True), "the default and a factor of four to each side"),
        "trees.learning_rate": (FloatDistribution(0.02, 0.3, log=True), "goes against the number of trees"),
        "trees.min_leaf": (IntDistribution(10, 500, log=True), "a leaf's 0.99 quantile wants a hundred rows or more"),
    },
}
"""What is searched, per estimator: the setting, its range, and why that. Left out: what changes the meaning of the loss
(``fit.transform``, ``fit.oom_weight``, ``trees.levels``), by which trials could then not be compared; and what trades
time for quality (``max_samples``), which is for the caller to decide."""

_DIGITS: Final = 3
"""Significant digits of a number that is tried: more only make it hard to read."""


def ranges_of(estimator: str, held: Collection[str] = ()) -> Ranges:
    """Return what is searched of an estimator's settings, but for those that are held.

    Raises
    ------
    ConfigError
        Nothing is left to search.
    """
    ranges = {name: range_ for name, (range_, _) in SPACE[estimator].items() if name not in held}
    if not ranges:
        raise ConfigError(f"every setting that is searched is held: let go of one of {', '.join(SPACE[estimator])}")
    return ranges


def rounded(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a sampler drew as settings that a person can read."""
    return {k: float(f"{v:.{_DIGITS}g}") if isinstance(v, float) else v for k, v in params.items()}


def with_settings(config: TrainConfig, settings: Mapping[str, Any]) -> TrainConfig:
    """Return the configuration with settings, by dotted names of one part, put in."""
    (part,) = {name.partition(".")[0] for name in settings}
    changed = {name.partition(".")[2]: value for name, value in settings.items()}
    return replace(config, **{part: replace(getattr(config, part), **changed)})


def searchable(config: TrainConfig, ranges: Ranges) -> dict[str, Any]:
    """Return those of a configuration's settings that are searched and lie in their ranges."""
    given: dict[str, Any] = {}
    for name, range_ in ranges.items():
        part, _, field = name.partition(".")
        value = getattr(getattr(config, part), field)
        if _inside(range_, value):
            given[name] = value
    return given


def _inside(range_: BaseDistribution, value: Any) -> bool:
    if isinstance(range_, CategoricalDistribution):
        return value in range_.choices
    assert isinstance(range_, IntDistribution | FloatDistribution)
    whole = range_.step is None or (value - range_.low) % range_.step == 0
    return bool(range_.low <= value <= range_.high and whole)


def as_toml(settings: Mapping[str, Any]) -> str:
    """Return settings, one level of tables among them, as TOML; one of None is left out, to its default."""
    tables = {name: value for name, value in settings.items() if isinstance(value, Mapping)}
    lines = [f"{k} = {json.dumps(v)}" for k, v in settings.items() if k not in tables and v is not None]
    for name, table in tables.items():
        lines += ["", f"[{name}]", *(f"{k} = {json.dumps(v)}" for k, v in table.items() if v is not None)]
    return "\n".join(lines) + "\n"
