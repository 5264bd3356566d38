"""Every experiment by the name of its verb; a module is read when its experiment is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Final, cast

if TYPE_CHECKING:
    from reclaim.replay.kinds import Experiment

EXPERIMENTS: Final[Mapping[str, str]] = {
    "margins": "margins",
    "ratios": "ratios",
    "compaction": "compaction",
    "frontier": "frontier",
    "what-if": "whatif",
}
"""Name of an experiment to the module of this room that ends in it."""


def load_experiment(name: str) -> Experiment:
    """Return the experiment of a name of ``EXPERIMENTS``."""
    return cast("Experiment", import_module(f"reclaim.replay.{EXPERIMENTS[name]}").EXPERIMENT)
