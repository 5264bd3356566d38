"""The whole way on a small synthetic cell, by calling each stage as its verb does, but for smaller trees."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from reclaim.replay.report import ReplayReport

DEMONSTRATED: Final = "margins"
"""The experiment that the demo ends with."""


def run_demo(
    out: Path,
    *,
    machines: int,
    days: float,
    seed: int,
    say: Callable[[str], None],
    synth_progress: Callable[[float], None] | None = None,
) -> ReplayReport:
    """Synthesise, ingest, build features, train the network and the trees, and replay every margin.

    Each stage finds its output where it is already there, so that a demo that was stopped goes on.

    Parameters
    ----------
    out : Path
        Folder for the cell, the dataset and the replay.
    machines : int
    days : float
    seed : int
    say : callable
        Told of each stage as it begins, and of each step of training.
    synth_progress : callable or None
        Told the share of the cell that is written.
    """
    from reclaim.data.ingest import IngestConfig, ingest
    from reclaim.data.synthetic import SyntheticCellConfig, write_cell
    from reclaim.features.build import build_features
    from reclaim.replay.experiment import run_experiment
    from reclaim.replay.experiments import load_experiment
    from reclaim.training.bundle import load_bundle
    from reclaim.training.settings import TrainConfig, TreeConfig
    from reclaim.training.tracking import fetch_bundle
    from reclaim.training.train import run_training

    say(f"synth     a cell of {machines} machines and {days:g} days, in the Google v3 layout")
    write_cell(out / "cell", SyntheticCellConfig(machines=machines, days=days, seed=seed), progress=synth_progress)
    say("ingest    its five tables into one dataset")
    dataset = ingest(out / "cell", out / "dataset", IngestConfig()).dataset
    say(f"features  of {dataset.n_windows:,} windows")
    build_features(dataset)
    # few trees: those of `reclaim train` would take longer than all else together
    trees = TreeConfig(levels=(0.9, 0.98, 0.995), iterations=25, learning_rate=0.2, max_samples=20_000)
    bundles = {}
    for estimator in ("trees", "network"):
        say(f"train     the {estimator}")
        config = TrainConfig(estimator=estimator, seed=seed, trees=trees)
        trained = run_training(dataset.path, config, progress=lambda stage: say(f"          {stage}"))
        bundles[estimator] = load_bundle(fetch_bundle(f"{trained.model}/{trained.version}")[0])
    say("replay    baseline, medium and aggressive margins")
    return run_experiment(load_experiment(DEMONSTRATED), dataset.path, out / DEMONSTRATED, bundles=bundles)
