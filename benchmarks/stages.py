"""Times each stage on a synthetic cell, on the device at hand, and writes the figures with device and versions.

    python benchmarks/stages.py --machines 30 --days 4                     # CPU, or CUDA where there is one
    python benchmarks/stages.py --device cuda --out benchmarks/results/stages-cuda.json
    python benchmarks/stages.py --device cuda --bfloat16 --batch-size 16384

On CUDA the fit is timed with its steps recorded and one by one, and the last validation losses of both are written.

Single runs on a machine that others may share: read ratios between lines of one run, not seconds between runs.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

from reclaim.data.ingest.job import IngestConfig, ingest
from reclaim.data.synthetic.job import SyntheticCellConfig, write_cell
from reclaim.data.windows import empty_windows
from reclaim.features.build import build_features
from reclaim.features.fold.batch import FeatureState
from reclaim.features.targets import HORIZONS_S
from reclaim.training.fitting.network import choose_device, fit_network, on_device
from reclaim.training.fitting.samples import Batch, Samples
from reclaim.training.fitting.sources import Source, rows_in_memory
from reclaim.training.margins.price import Price
from reclaim.training.models.estimator import ForecastEstimator
from reclaim.training.models.forecaster import NetworkForecaster
from reclaim.training.settings import FitConfig

TASKS = 250_000
"""Tasks of a large cell: 10,000 machines with 25 tasks each."""
REPEATS = 5
"""Repeats of steps well under a second; the median counts."""


class BatchClock:
    """Records when each batch of some samples was requested and when it was ready on the device.

    It waits for the device before and after each batch, so that a GPU's steps cannot overlap: the share that gathering
    takes is right, the speed of the whole is not.
    """

    def __init__(self, samples: Samples) -> None:
        self._device, self._take = samples.device, samples.take
        self.times: list[tuple[float, float]] = []
        samples.take = self._timed  # type: ignore[method-assign]  # the fit is to notice nothing

    def _timed(self, positions: torch.Tensor) -> Batch:
        synchronise(self._device)
        asked = time.perf_counter()
        batch = self._take(positions)
        synchronise(self._device)
        self.times.append((asked, time.perf_counter()))
        return batch

    def waiting_share(self, steps: int) -> float:
        """Return the share of a step, from its batch's asking to the next; epochs have so many steps, 2 at least."""
        asked, there = np.array(self.times).reshape(-1, steps, 2).transpose(2, 0, 1)  # (epochs, steps) each
        return float((there - asked)[:, :-1].sum() / np.diff(asked, axis=1).sum())


def synchronise(device: torch.device) -> None:
    """Wait until the device has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def score_on_device(forecaster: NetworkForecaster, x: np.ndarray, device: torch.device, *, bfloat16: bool) -> float:
    """Return the median seconds from features to every curve and OOM probability, all of them on the device.

    One pass for the whole cell; copies to the device and back are not in it. The served path is exact to the bit
    whatever else is in the batch, which this is not.
    """
    network, features = copy.deepcopy(forecaster.network).to(device), torch.from_numpy(x).to(device)
    seconds = []
    with torch.inference_mode(), torch.autocast(device.type, torch.bfloat16, enabled=bfloat16):
        for _ in range(REPEATS + 1):
            synchronise(device)
            started = time.perf_counter()
            steps, logits = network(features)
            torch.sigmoid(steps).cumprod(-1), torch.sigmoid(logits)
            synchronise(device)
            seconds.append(time.perf_counter() - started)
    return float(np.median(seconds[1:]))


def median_seconds(work: Callable[[], object]) -> float:
    """Return the median duration of some work."""
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return float(np.median(seconds))


def peak_mib(work: Callable[[], object]) -> float:
    """Return the rise of this process's peak memory by some work, in MiB; Linux only."""
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again
    before = _memory_mib("VmRSS")
    work()
    return _memory_mib("VmHWM") - before


def _memory_mib(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024


def main() -> None:
    """Run every stage once and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machines", type=int, default=30)
    parser.add_argument("--days", type=float, default=4.0)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=None, help="default: what suits the device")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--bfloat16", action="store_true")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of the served path")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "stages.json")
    arguments = parser.parse_args()
    fit = replace(
        FitConfig(), epochs=arguments.epochs, batch_size=arguments.batch_size, device=arguments.device,
        bfloat16=arguments.bfloat16,
    )  # fmt: skip
    rows: list[dict[str, object]] = []

    def note(stage: str, unit: str, count: int, seconds: float, **more: float) -> None:
        rate = count / seconds
        rows.append({"stage": stage, "seconds": round(seconds, 4), "unit": unit, "count": count,
                     "per_second": round(rate), **more})  # fmt: skip
        facts = "".join(f"  {name} {value:g}" for name, value in more.items())
        print(f"{stage:42s} {seconds:9.4f} s  {rate:14,.0f} {unit}/s{facts}", flush=True)

    @contextmanager
    def timed(stage: str, unit: str, count: list[int]) -> Iterator[None]:
        started = time.perf_counter()
        yield
        note(stage, unit, count[0], time.perf_counter() - started)

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
        fit = on_device(fit, device, len(rows_of[0]))
        with timed(f"rows to {device}", "rows", [sum(map(len, rows_of))]):
            train, valid = (
                Samples.of_rows(rows_in_memory([Source(dataset, features)], [rows]), device) for rows in rows_of
            )
            synchronise(device)
        with timed(f"fit on {device}, all of it", "rows", [len(train) * arguments.epochs]):
            fitted = fit_network(train, valid, fit, seed=1)
        rate = float(np.median([epoch["rows_per_second"] for epoch in fitted.history]))
        if device.type == "cuda":
            one_by_one = fit_network(train, valid, replace(fit, recorded=False), seed=1)
            slower = float(np.median([epoch["rows_per_second"] for epoch in one_by_one.history]))
            losses = {"recorded_loss": fitted.history[-1]["valid_loss"], "loss": one_by_one.history[-1]["valid_loss"]}
            note(f"training on {device}, step by step", "samples", len(train), len(train) / slower, **losses)
        steps, clock = -(-len(train) // (fit.batch_size or 1)), BatchClock(train)
        fit_network(train, valid, replace(fit, recorded=False), seed=1)
        share = {"waiting_for_data": round(clock.waiting_share(steps), 4)} if steps > 1 else {}
        note(f"training on {device}", "samples", len(train), len(train) / rate, **share)

        forecaster = NetworkForecaster.of(fitted.network)  # of random heads where a target is unknown
        forecaster.threads = arguments.threads
        x = np.ascontiguousarray(features.x[np.random.default_rng(0).integers(0, len(features), TASKS)])
        cell = empty_windows(TASKS)
        cell.limit[:] = np.random.default_rng(1).lognormal(-4.0, 1.0, cell.limit.shape)
        estimator = ForecastEstimator(forecaster, HORIZONS_S[1], Price("medium", (10.0, 10.0)), (0.03, 0.03))
        peak = peak_mib(lambda: estimator.answer(x, cell))  # compiles, too
        seconds = median_seconds(lambda: estimator.answer(x, cell))
        note(
            f"features to reservations, {arguments.threads} CPU threads", "tasks", TASKS, seconds, peak_mib=round(peak)
        )
        note("of which the forecast", "tasks", TASKS, median_seconds(lambda: forecaster.predict(x)))
        seconds = score_on_device(forecaster, x, device, bfloat16=fit.bfloat16 and device.type == "cuda")
        note(f"forecast in one pass on {device}", "tasks", TASKS, seconds)
    chip = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    content = {
        "command": "python benchmarks/stages.py "
        f"--machines {arguments.machines} --days {arguments.days:g} --epochs {arguments.epochs} "
        f"--batch-size {fit.batch_size} --device {arguments.device} --threads {arguments.threads}"
        + " --bfloat16"
        * arguments.bfloat16,
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
