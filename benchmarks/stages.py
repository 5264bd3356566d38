"""Times each stage on a synthetic cell, on whatever device there is, and writes the figures beside what made them.

    python benchmarks/stages.py --machines 30 --days 4                     # CPU, or CUDA where there is one
    python benchmarks/stages.py --device cuda --bfloat16 --batch-size 16384

Single runs on a machine that others may share: read ratios between lines of one run, not seconds between runs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

from reclaim.data.ingest import IngestConfig, ingest
from reclaim.data.synthetic import SyntheticCellConfig, write_cell
from reclaim.features.build import build_features
from reclaim.features.registry import CONTEXT_WINDOWS
from reclaim.features.state import FeatureState
from reclaim.training.fit import choose_device, fit_network
from reclaim.training.forecaster import NetworkForecaster
from reclaim.training.networks import cpu_threads
from reclaim.training.settings import FitConfig
from reclaim.training.sources import Source, resident_samples

TASKS = 250_000
"""Tasks of a large cell: 10,000 machines with 25 tasks each."""
CONTEXT_BATCH = 4_096
"""Samples whose context is gathered at once: 5 MB on the device."""


def main() -> None:
    """Run every stage once and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machines", type=int, default=30)
    parser.add_argument("--days", type=float, default=4.0)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=FitConfig().batch_size)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--bfloat16", action="store_true")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "stages.json")
    arguments = parser.parse_args()
    fit = replace(
        FitConfig(), epochs=arguments.epochs, batch_size=arguments.batch_size, device=arguments.device,
        bfloat16=arguments.bfloat16,
    )  # fmt: skip
    rows: list[dict[str, object]] = []

    @contextmanager
    def timed(stage: str, unit: str, count: list[int]) -> Iterator[None]:
        started = time.perf_counter()
        yield
        seconds = time.perf_counter() - started
        rows.append({"stage": stage, "seconds": round(seconds, 3), "unit": unit, "count": count[0],
                     "per_second": round(count[0] / seconds)})  # fmt: skip
        print(f"{stage:28s} {seconds:8.2f} s  {count[0] / seconds:14,.0f} {unit}/s", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        n = [0]
        with timed("synth (JSON, gzip)", "windows", n):
            report = write_cell(
                Path(folder) / "cell", SyntheticCellConfig(machines=arguments.machines, days=arguments.days)
            )
            n[0] = report.rows["instance_usage"]
        with timed("ingest", "windows", n):
            dataset = ingest(Path(folder) / "cell", Path(folder) / "dataset", IngestConfig()).dataset
        windows = dataset.windows(0)
        FeatureState().advance(windows.task_numbers(), windows)  # compiles, once per machine
        with timed("features and targets", "windows", n):
            features, _ = build_features(dataset)
        device, rows_of = choose_device(fit.device), (features.train_rows(), features.valid_rows())
        with timed(f"arrays to {device}", "rows", [len(features)]):
            train, valid = resident_samples([Source(dataset, features)], [rows_of[0]], [rows_of[1]], device)
        with cpu_threads(fit.threads), timed(f"context of {CONTEXT_WINDOWS} windows", "samples", [len(train)]):
            for positions in train.chunks(CONTEXT_BATCH):
                train.context(positions)
            if device.type == "cuda":
                torch.cuda.synchronize()
        with timed(f"fit on {device}", "rows", [len(train) * arguments.epochs]):
            fitted = fit_network(train, valid, fit, seed=1)
        x = np.ascontiguousarray(features.x[np.random.default_rng(0).integers(0, len(features), TASKS)])
        forecaster = NetworkForecaster(fitted.network, fit.transform)
        forecaster.predict(x[:256])
        with timed("score a cell (served path)", "tasks", [TASKS]):
            forecaster.predict(x)
    chip = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    content = {
        "command": "python benchmarks/stages.py "
        f"--machines {arguments.machines} --days {arguments.days:g} --epochs {arguments.epochs} "
        f"--batch-size {arguments.batch_size} --device {arguments.device}" + " --bfloat16" * arguments.bfloat16,
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "device": chip,
        "cores": os.cpu_count(),
        "versions": {name: version(name) for name in ("reclaim", "torch", "numpy", "numba", "duckdb", "pyarrow")},
        "stages": rows,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(content, indent=2) + "\n")
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
