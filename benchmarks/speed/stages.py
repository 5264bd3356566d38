"""Times each stage on the device at hand, of a synthetic cell or of a dataset, and writes figures, device and versions.

    python -m benchmarks.speed.stages --machines 30 --days 4                # CPU, or CUDA where there is one
    python -m benchmarks.speed.stages --device cuda --dataset DATASET --epochs 10 --out stages-cuda.json

On CUDA the fit is timed in several ways, with the validation loss of each: steps recorded or one by one, in bfloat16,
compiled by torch, with large batches. A dataset stands in for the synthetic cell; features that it has are not made
again.

Single runs on a machine that others may share: read ratios between lines of one run, not seconds between runs.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from benchmarks import made_by, processor
from reclaim.data.dataset import Dataset
from reclaim.data.ingest.job import IngestConfig, ingest
from reclaim.data.synthetic.job import SyntheticCellConfig, write_cell
from reclaim.data.windows import empty_windows
from reclaim.features.build import build_features
from reclaim.features.fold.batch import FeatureState
from reclaim.features.targets import HORIZONS_S
from reclaim.training.fitting import network
from reclaim.training.fitting.network import choose_device, fit_network
from reclaim.training.fitting.samples import Batch, Samples
from reclaim.training.fitting.sources import Source, rows_in_memory
from reclaim.training.margins.price import Price
from reclaim.training.models.estimator import ForecastEstimator
from reclaim.training.models.network import SurvivalNetwork, survival_loss
from reclaim.training.models.network_forecaster import NetworkForecaster
from reclaim.training.settings import FitConfig

TASKS = 250_000
"""Tasks of a large cell: 10,000 machines with 25 tasks each."""
REPEATS = 5
"""Repeats of steps well under a second; the median counts."""
LARGE_BATCHES = (4_096, 16_384)
"""Rows of a step that fill a card better than the default's."""


@dataclass(frozen=True)
class Way:
    """A way to fit on a GPU: what it changes of the settings, and whether torch compiles network and loss."""

    name: str
    changes: dict[str, Any]
    compiled: bool = False


WAYS = (
    Way("recorded", {}),
    Way("step by step", {"recorded": False}),
    Way("bfloat16, recorded", {"bfloat16": True}),
    *(Way(f"{rows:,} rows a step, recorded", {"batch_size": rows}) for rows in LARGE_BATCHES),
    Way("compiled, step by step", {"recorded": False}, compiled=True),
    Way("compiled, recorded", {}, compiled=True),
    Way("compiled, bfloat16, recorded", {"bfloat16": True}, compiled=True),
)
"""The first is the default."""


@contextmanager
def compiled_by_torch() -> Iterator[None]:
    """Let torch compile the network and its loss for the fits inside the block."""
    compiled = torch.compile(SurvivalNetwork.forward), torch.compile(survival_loss)
    with patch.object(SurvivalNetwork, "forward", compiled[0]), patch.object(network, "survival_loss", compiled[1]):
        yield
    torch.compiler.reset()


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
    parser.add_argument("--dataset", type=Path, help="in place of the synthetic cell")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of the served path")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "stages.json")
    arguments = parser.parse_args()
    fit = replace(FitConfig(), epochs=arguments.epochs, device=arguments.device)
    rows: list[dict[str, object]] = []

    def note(stage: str, unit: str, count: int, seconds: float, **more: float) -> None:
        rate = count / seconds
        rows.append({"stage": stage, "seconds": round(seconds, 4), "unit": unit, "count": count,
                     "per_second": round(rate), **more})  # fmt: skip
        facts = "".join(f"  {name} {value:g}" for name, value in more.items())
        print(f"{stage:55s} {seconds:9.4f} s  {rate:14,.0f} {unit}/s{facts}", flush=True)

    @contextmanager
    def timed(stage: str, unit: str, count: list[int]) -> Iterator[None]:
        started = time.perf_counter()
        yield
        note(stage, unit, count[0], time.perf_counter() - started)

    with tempfile.TemporaryDirectory() as folder:
        n = [0]
        if arguments.dataset is not None:
            dataset = Dataset.open(arguments.dataset)
            n[0] = dataset.n_windows
        else:
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
        with timed(f"rows to {device}", "rows", [sum(map(len, rows_of))]):
            train, valid = (
                Samples.of_rows(rows_in_memory([Source(dataset, features)], [rows]), device) for rows in rows_of
            )
            synchronise(device)
        with timed(f"fit on {device}, all of it", "rows", [len(train) * arguments.epochs]):
            fitted = fit_network(train, valid, fit, seed=1)
        steps, clock = -(-len(train) // fit.batch_size), BatchClock(train)
        fit_network(train, valid, replace(fit, recorded=False), seed=1)
        del train.take  # the class's own again
        share = {"waiting_for_data": round(clock.waiting_share(steps), 4)} if steps > 1 else {}
        seconds = float(np.median([len(train) / epoch["rows_per_second"] for epoch in fitted.history]))
        note(f"an epoch on {device}, {fit.batch_size:,} rows a step", "rows", len(train), seconds, **share)
        for way in WAYS if device.type == "cuda" else ():
            torch.cuda.reset_peak_memory_stats(device)
            with compiled_by_torch() if way.compiled else nullcontext():
                result = fit_network(train, valid, replace(fit, **way.changes), seed=1)
            epochs = result.history
            seconds = float(np.median([len(train) / epoch["rows_per_second"] for epoch in epochs]))
            note(
                f"an epoch on {device}, {way.name}", "rows", len(train), seconds,
                least_loss=min(epoch["valid_loss"] for epoch in epochs),
                fit_s=sum(epoch["seconds"] for epoch in epochs),
                mib=torch.cuda.max_memory_allocated(device) / 2**20,
            )  # fmt: skip

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
        for bfloat16 in (False, True) if device.type == "cuda" else (False,):
            seconds = score_on_device(forecaster, x, device, bfloat16=bfloat16)
            note(f"forecast in one pass on {device}" + ", bfloat16" * bfloat16, "tasks", TASKS, seconds)
    content = {
        **made_by("python -m benchmarks.speed.stages "
        + (f"--machines {arguments.machines} --days {arguments.days:g}" if arguments.dataset is None
           else f"--dataset {arguments.dataset.name}")
        + f" --epochs {arguments.epochs} --device {arguments.device} --threads {arguments.threads}"),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "processor": processor(),
        "stages": rows,
    }  # fmt: skip
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(content, indent=2) + "\n")
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
