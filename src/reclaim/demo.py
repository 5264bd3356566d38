"""Demo: every stage on a small synthetic cell, as its command calls it: the built-in model next to a trained one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from reclaim.replay.report.page import ReplayReport

DEMONSTRATED: Final = "margins"
"""Experiment at the end of the demo."""
MODEL: Final = "reclaim-demo"
"""Name of the model that the demo registers: a model of a synthetic cell must not become the champion that commands
take by default and a running service answers with."""
SERVE: Final = f"reclaim serve --model {MODEL}@champion"
"""Command that serves it."""


def run_demo(
    out: Path,
    *,
    machines: int,
    days: float,
    seed: int,
    say: Callable[[str], None],
    synth_progress: Callable[[float], None] | None = None,
) -> ReplayReport:
    """Synthesise, ingest, build features, train the network, and replay it next to the built-in model at every margin.

    Each stage keeps output that exists, so that an interrupted demo continues.

    Parameters
    ----------
    out : Path
        Folder for the cell, the dataset and the replay.
    machines : int
    days : float
    seed : int
    say : callable
        Called with a line at the start of each stage and each step of training.
    synth_progress : callable or None
        Called with the written share of the cell.
    """
    from reclaim.data.ingest.job import IngestConfig, ingest
    from reclaim.data.synthetic.job import SyntheticCellConfig, write_cell
    from reclaim.features.build import build_features
    from reclaim.replay.runs.catalogue import load_experiment
    from reclaim.replay.runs.run import by_name, run_experiment
    from reclaim.training.bundle import load_model
    from reclaim.training.fitting.train import run_training
    from reclaim.training.settings import TrainConfig
    from reclaim.training.tracking.references import BUILTIN

    say(f"synth     a cell of {machines} machines and {days:g} days, in the Google v3 layout")
    write_cell(out / "cell", SyntheticCellConfig(machines=machines, days=days, seed=seed), progress=synth_progress)
    say("ingest    its five tables into one dataset")
    dataset = ingest(out / "cell", out / "dataset", IngestConfig()).dataset
    say(f"features  of {dataset.n_windows:,} windows")
    build_features(dataset)
    say("builtin   would serve this cell from its first hour: `reclaim serve --model builtin`")
    say("train     a network of this cell")
    trained = run_training(
        dataset.path, TrainConfig(seed=seed, model_name=MODEL), progress=lambda stage: say(f"          {stage}")
    )
    if trained.champion != trained.version:
        mine = f"{trained.model}/{trained.version}"
        of_champion = f"`{SERVE}` answers with {trained.model}/{trained.champion}"
        say(
            f"          {mine} is not champion: "
            + (of_champion if trained.champion else f"serve it by `--model {mine}`")
        )
    models = [load_model(BUILTIN), load_model(f"{trained.model}/{trained.version}")]
    say("replay    both, and the statistical estimators: baseline, medium and aggressive margins")
    return run_experiment(load_experiment(DEMONSTRATED), dataset.path, out / DEMONSTRATED, bundles=by_name(models))
