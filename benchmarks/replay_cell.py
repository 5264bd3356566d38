"""Repeats the replay's results: composes two cells, trains on one, runs every experiment on the other, writes the page.

    python -m benchmarks.replay_cell --composer TOOLS/compose_cell.py --donors DATA --work WORK

The composer makes cells in the Google v3 layout out of parts of real traces (its README says of what). Its series are
given to it in two halves, every second VM: the network is trained on a cell of one half and replayed on a cell of the
other, so that no series occurs in both. Request sizes, arrivals and percentile shapes have the same donors. A half is a
folder of donors; a cell, a dataset and a replay are folders below the work folder, and each is made once: run again
after an interruption, the script makes the missing ones.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd

from benchmarks.replay_tables import replays
from reclaim.data.core.files import replaced_folder
from reclaim.replay.runs.catalogue import EXPERIMENTS
from reclaim.training.estimators.registry import ESTIMATORS
from reclaim.training.tracking.client import sqlite_uri

SERIES = ("bitbrains_faststorage", "azure_2017")
"""Folders of donors whose ``usage.parquet`` has a column ``vm``: they are split by it."""
ALL = json.dumps(list(ESTIMATORS))
"""Every estimator without a model: a rival is shown at its best."""
_FEW = '["borg", "moving-max", "autopilot-percentile", "limit"]'
_SUMS = '["borg", "vpa", "moving-max", "autopilot-percentile", "krr"]'  # the best sums of machines
_SETTINGS = {
    "margins": {"estimators": _FEW, "online": "false"},
    "frontier": {"estimators": ALL},
    "frontier-24h": {"horizon_s": "86400", "estimators": ALL},  # the horizon of the EuroSys'21 study
    "compaction": {"estimators": _FEW, "checkpoints": "8"},
    "compaction-by-reservation": {"estimators": _FEW, "checkpoints": "8", "production_by_limit": "false"},
    "ratios": {"estimators": _FEW},
    "what-if": {},
    "what-if-gives-way": {"scheduling.gives_way": "true"},
    "what-if-of-machines": {"estimators": _SUMS, "margin": "aggressive", "scheduling.gives_way": "true"},
    "what-if-of-machines-baseline": {"estimators": _SUMS, "margin": "baseline", "scheduling.gives_way": "true"},
}
"""Output folder, which begins with the experiment's name → options of that replay."""


def main() -> None:
    """Run the missing steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--composer", type=Path, required=True, help="the script that composes cells")
    parser.add_argument("--donors", type=Path, required=True, help="folder of the donors it is to use")
    parser.add_argument("--work", type=Path, default=Path("replay-cell"), help="where everything is made")
    parser.add_argument("--machines", type=int, default=200, help="of the cell that is replayed")
    parser.add_argument("--days", type=int, default=28, help="of the test; a seventh more comes before, for margins")
    parser.add_argument("--train-machines", type=int, default=60)
    parser.add_argument("--train-days", type=int, default=14)
    parser.add_argument("--seed", type=int, default=7, help="of the replayed cell; the other one has the next")
    parser.add_argument("--common", type=float, default=0.0, help="share of tasks' movement that is the whole cell's")
    parser.add_argument("--service", type=float, default=0.0, help="share of it that is their collection's")
    parser.add_argument("--draws", type=int, default=200, help="bootstrap resamples behind each interval")
    parser.add_argument("--experiments", nargs="*", choices=_SETTINGS, default=list(_SETTINGS))
    parser.add_argument("--page", type=Path, help="where the tables go (default: replay-cell.md in the work folder)")
    asked = parser.parse_args()
    work = asked.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "MLFLOW_TRACKING_URI": sqlite_uri(work / "mlruns/mlflow.db")}
    reclaim = [str(Path(sys.executable).with_name("reclaim"))]

    before = max(1, asked.days // 7)
    cells = {
        "train": (0, asked.train_machines, asked.train_days, asked.seed + 1, "split.role=train"),
        "cell": (1, asked.machines, asked.days + before, asked.seed, "split.role=test"),
    }
    for name, (half, machines, days, seed, role) in cells.items():
        donors = halve(asked.donors, work / f"donors-{half}", half)
        trace = work / f"{name}-trace"
        if not (trace / "COMPOSED.json").is_file():
            together = ["--common", str(asked.common), "--service", str(asked.service)]
            compose(asked, trace, donors, machines, days, seed, *together)
        run([*reclaim, "ingest", trace.name, name], work, environment)
        valid = [] if role.endswith("train") else ["--set", f"split.valid_share={before / (asked.days + before):.6f}"]
        run([*reclaim, "features", name, "--set", role, *valid], work, environment)
    run([*reclaim, "train", "train", "--set", "prior=none"], work, environment)
    for folder in asked.experiments:
        experiment = next(name for name in EXPERIMENTS if folder.startswith(name))
        settings = {**_SETTINGS[folder], "draws": str(asked.draws)}
        pairs = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
        model = ["--model", "reclaim@candidate"]  # the one just trained, whether it became champion or not
        run([*reclaim, "replay", experiment, "cell", "--out", folder, *model, *pairs], work, environment)
    if not asked.experiments:
        return
    page = asked.page or work / "replay-cell.md"
    page.write_text(replays(work / folder for folder in asked.experiments) + "\n")
    print(f"wrote {page}")


def halve(donors: Path, out: Path, half: int) -> Path:
    """Write every second VM of the series, from the given one on, and return the folder; it appears whole or not."""
    if not out.is_dir():
        with replaced_folder(out) as folder:
            for name in SERIES:
                frame = pd.read_parquet(donors / name / "usage.parquet")
                rank = frame["vm"].rank(method="dense").astype(int)
                (folder / name).mkdir()
                frame[rank % 2 == half].to_parquet(folder / name / "usage.parquet", index=False)
            for other in sorted(donors.iterdir()):
                if other.is_dir() and other.name not in SERIES:
                    (folder / other.name).symlink_to(other.resolve())
    return out


def compose(
    asked: argparse.Namespace, out: Path, donors: Path, machines: int, days: int, seed: int, *more: str
) -> None:
    """Compose a cell, with more words for the composer; a half made one is thrown away."""
    shutil.rmtree(out, ignore_errors=True)
    options = {"out": out, "donors": donors, "machines": machines, "days": days, "seed": seed, "format": "parquet"}
    words = [part for key, value in options.items() for part in (f"--{key}", str(value))]
    run([sys.executable, str(asked.composer.resolve()), *words, *more], out.parent, dict(os.environ))


def run(command: list[str], work: Path, environment: dict[str, str]) -> None:
    """Run a step, and print it with its duration."""
    started = time.perf_counter()
    print("+ " + " ".join([Path(command[0]).name, *command[1:]]), flush=True)
    subprocess.run(command, cwd=work, env=environment, check=True)
    print(f"  {time.perf_counter() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
