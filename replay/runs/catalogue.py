"""Lists the experiments by the name of their verb; a module is imported when its experiment is requested."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Final, cast

from reclaim.data.errors import ConfigError

if TYPE_CHECKING:
    from reclaim.replay.experiment import Experiment

EXPERIMENTS: Final[Mapping[str, str]] = {
    "margins": "margins",
    "ratios": "ratios",
    "compaction": "compaction",
    "frontier": "frontier",
    "what-if": "what_if",
}
"""Name of an experiment to its folder, whose ``measure.py`` defines ``EXPERIMENT``."""
RECOMMEND: Final = "recommend"
"""Experiment with a verb of its own: its answer is a request for each workload, not a comparison to record."""


def load_experiment(name: str) -> Experiment:
    """Return the experiment of a name of ``EXPERIMENTS``, or of ``RECOMMEND``; ConfigError for an unknown one."""
    folders = {**EXPERIMENTS, RECOMMEND: RECOMMEND}
    if name not in folders:
        raise ConfigError(f"no experiment {name!r}; expected one of {', '.join(EXPERIMENTS)}")
    return cast("Experiment", import_module(f"reclaim.replay.experiments.{folders[name]}.measure").EXPERIMENT)
