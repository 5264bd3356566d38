"""Puts searched settings into a configuration: their ranges, those that are held, and the TOML of the best."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Final

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from reclaim.data.errors import ConfigError
from reclaim.training.fitting.learner import learner_of
from reclaim.training.settings import TrainConfig

Ranges = Mapping[str, BaseDistribution]
"""Dotted names of settings, and the range of each. A learner's ``space`` leaves out what changes the meaning of the
loss, by which trials could then not be compared, and what trades time for quality (``max_samples``), which is for the
caller to decide."""

_DIGITS: Final = 3
"""Significant digits of a number that is tried: more only make it hard to read."""


def ranges_of(estimator: str, held: Collection[str] = ()) -> Ranges:
    """Return what is searched of an estimator's settings, but for those that are held.

    Raises
    ------
    ConfigError
        Nothing is searched of it, or all of that is held.
    """
    space = learner_of(estimator).space()
    if not space:
        raise ConfigError(f"estimator {estimator!r} has no settings that are searched")
    ranges = {name: range_ for name, (range_, _) in space.items() if name not in held}
    if not ranges:
        raise ConfigError(f"every setting that is searched is fixed: release one of {', '.join(space)}")
    return ranges


def rounded(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a sampler drew as settings that a person can read."""
    return {k: float(f"{v:.{_DIGITS}g}") if isinstance(v, float) else v for k, v in params.items()}


def with_settings(config: TrainConfig, settings: Mapping[str, Any]) -> TrainConfig:
    """Return the configuration with settings, by dotted names of one part, put in."""
    (part,) = {name.partition(".")[0] for name in settings}
    changed = {name.partition(".")[2]: value for name, value in settings.items()}
    before = getattr(config, part)
    after = {**before, **changed} if isinstance(before, Mapping) else replace(before, **changed)
    whole: dict[str, Any] = {part: after}
    return replace(config, **whole)


def searchable(config: TrainConfig, ranges: Ranges) -> dict[str, Any]:
    """Return those of a configuration's settings that are searched and lie in their ranges."""
    given: dict[str, Any] = {}
    own = learner_of(config.estimator).own(config)
    for name, range_ in ranges.items():
        value = getattr(own, name.partition(".")[2])
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
        if not table:
            continue
        lines += ["", f"[{name}]", *(f"{k} = {json.dumps(v)}" for k, v in table.items() if v is not None)]
    return "\n".join(lines) + "\n"
