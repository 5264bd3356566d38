"""Times the feature pipeline against polars and duckdb on one dataset, and the live features of a large cell.

    python -m benchmarks.speed.features           # about 2 million windows, 250,000 live tasks; some 10 minutes
    python -m benchmarks.speed.features --machines 40 --live-tasks 25000 --work /tmp/bench

Contenders, each a process of its own, in turn, round after round, on two threads, on the same dataset (a synthetic
cell, ingested once), from its parquet files to files with the result:

- reclaim: the command `reclaim features DATASET --set rows=all`: every feature of every row,
  targets and splits, too;
- reclaim-default: `reclaim features DATASET`, which keeps the rows that training reads;
- polars: 30 rolling features, from a lazy scan to an uncompressed parquet file. Tasks lie one after another on one time
  axis, far apart, so that every window function runs once over all of them: faster than `.over` or `rolling` by group;
- duckdb: 27 of them (it has no mean with weights that decay in time), RANGE frames in one WINDOW per width, a query for
  each file: faster than one query for all.

Frames are by time, not by rows: there are gaps. Where definitions coincide the numbers must, so the share of rows in
which each engine's equal reclaim's is printed. Reclaim's differ on purpose: max_6h and max_24h go by clock hours; what
looks back up to two hours takes at most 24 windows; ewm_1h is a weighted mean of what was seen, where polars' starts
at the first value and moves from it; a late or repeated window changes nothing.

Seconds are those of the whole process: its start, and reading compiled code back, are in them. Warm seconds are those
of the same work done once more in a process that has done it before, as in a run over many datasets or a large one.
CPU seconds are of all threads; on a machine that others use, their ratio says more than that of seconds.

Live is the next window of every task at once, in the order of the tasks, after thirty windows each:
`FeatureState.advance`, two threads.

Memory is that of all processes of a contender together (proportional set size, sampled in a run of its own); private is
the part that is no page of a file. The first round is thrown away: it compiles. Read ratios within one run; seconds of
a shared machine say little.
"""

# A contender's process imports what it needs and no more: imports are inside the functions.
from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks import made_by
from benchmarks.speed.processes import time_command, watch_command

_THREADS = 2
_S_US = 1_000_000
_SIGNALS = {"cpu": "cpu_limit", "memory": "memory_limit", "peak_cpu": "cpu_limit"}
"""Each with what it is over."""
_KEY = ["collection_id", "instance_index", "end_us"]
_MEANS = {"mean_30m": 1_800, "mean_2h": 7_200}
_DEVIATIONS = {"std_2h": 7_200}
_MAXIMA = {"max_1h": 3_600, "max_2h": 7_200, "max_6h": 21_600, "max_24h": 86_400}
_APART_US = 400 * 86_400 * _S_US
"""Between two tasks on the one time axis: more than the longest trace."""
_PRIME, _TICKS = 30, 5
_THIS = (sys.executable, "-m", "benchmarks.speed.features")
"""Runs a contender in a process of its own."""
_TASKS_PER_COLLECTION = 25


def main() -> None:
    """Run the contenders and write the table."""
    if sys.argv[1:2] == ["contender"]:
        return CONTENDERS[sys.argv[2]](Path(sys.argv[3]), *map(int, sys.argv[4:]))
    if sys.argv[1:2] == ["warm"]:
        return _warm(sys.argv[2], Path(sys.argv[3]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machines", type=int, default=190)
    parser.add_argument("--days", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--live-tasks", type=int, default=250_000)
    parser.add_argument("--work", type=Path, help="Folder for the cell and its dataset, kept and used again.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "features.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = arguments.work or Path(temporary)
        rows = _dataset(work, arguments.machines, arguments.days)
        results = _race(work, rows, arguments.rounds)
        agreement = _agreement(work)
        command = [*_THIS, "contender", "live", str(work), str(arguments.live_tasks)]
        live = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    content = {
        **made_by(
            f"python -m benchmarks.speed.features --machines {arguments.machines} --days {arguments.days:g} "
            f"--rounds {arguments.rounds} --live-tasks {arguments.live_tasks}"
        ),
        "threads": _THREADS,
        "results": results,
        "equal_rows": agreement,
        "live": live,
    }
    for line in results:
        print("  ".join(f"{key} {value}" for key, value in line.items()))
    print("share of rows equal to reclaim's, worst of the signals:")
    for name, shares in agreement.items():
        print(f"  {name:9s}", "  ".join(f"{engine} {share:.4f}" for engine, share in shares.items()))
    print("live:", "  ".join(f"{key} {value}" for key, value in live.items()))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(content, indent=2) + "\n")
    print(f"wrote {arguments.out}")


def _dataset(work: Path, machines: int, days: float) -> int:
    """Make and ingest a cell unless it exists, and return its number of windows."""
    from reclaim.data.dataset import Dataset
    from reclaim.data.ingest.job import IngestConfig, ingest
    from reclaim.data.synthetic.job import SyntheticCellConfig, write_cell

    if not (work / "dataset").exists():
        write_cell(work / "cell", SyntheticCellConfig(machines=machines, days=days, seed=1))
        ingest(work / "cell", work / "dataset", IngestConfig())
    return Dataset.open(work / "dataset").n_windows


def _race(work: Path, rows: int, rounds: int) -> list[dict[str, object]]:
    """Return a line for each contender."""
    runs: dict[str, list[tuple[float, float]]] = {name: [] for name in RACE}
    warm: dict[str, list[tuple[float, float]]] = {name: [] for name in RACE}
    peaks: dict[str, tuple[int, int]] = {}
    for number in range(rounds + 2):
        for name in RACE:
            _remove(work / name, work / "dataset" / "features")
            command = _command(name, work)
            if number == 1:
                peaks[name] = watch_command(command)[1:]
            else:
                measured = time_command(command)
                runs[name] += [measured] if number else []
                if number:
                    again = [*_THIS, "warm", name, str(work)]
                    warm[name].append(
                        json.loads(subprocess.run(again, check=True, capture_output=True, text=True).stdout)
                    )
    lines: list[dict[str, object]] = []
    best, best_cpu, best_warm, best_warm_cpu = (
        min(statistics.median(one[at] for one in of[name]) for name in ("polars", "duckdb"))
        for of in (runs, warm) for at in range(2)
    )  # fmt: skip
    for name, measured_all in runs.items():
        seconds, cpu_seconds = (statistics.median(one[at] for one in measured_all) for at in range(2))
        seconds_warm, warm_cpu_seconds = (statistics.median(one[at] for one in warm[name]) for at in range(2))
        features = _width(work, name)
        lines.append(
            {
                "contender": name,
                "rows": rows,
                "features": features,
                "seconds": round(seconds, 2),
                "all_seconds": [round(one[0], 2) for one in measured_all],
                "cpu_seconds": round(cpu_seconds, 2),
                "rows_per_second": round(rows / seconds),
                "warm_seconds": round(seconds_warm, 2),
                "warm_all_seconds": [round(one[0], 2) for one in warm[name]],
                "warm_cpu_seconds": round(warm_cpu_seconds, 2),
                "warm_rows_per_second": round(rows / seconds_warm),
                "peak_mib": peaks[name][0] >> 20,
                "private_mib": peaks[name][1] >> 20,
                "speed_to_better": round(best / seconds, 2),
                "warm_speed_to_better": round(best_warm / seconds_warm, 2),
                "cpu_to_better": round(best_cpu / cpu_seconds, 2),
                "warm_cpu_to_better": round(best_warm_cpu / warm_cpu_seconds, 2),
            }
        )
    return lines


def _warm(name: str, work: Path) -> None:
    """Do a contender's work twice, and print the seconds of the second time, and those of its processors, as JSON."""
    for _ in range(2):
        _remove(work / name, work / "dataset" / "features")
        started, used = time.perf_counter(), time.process_time()
        CONTENDERS[name](work)
    print(json.dumps([time.perf_counter() - started, time.process_time() - used]))


def _command(name: str, work: Path) -> list[str]:
    """Return the command of a contender's process."""
    if name not in ROWS:
        return [*_THIS, "contender", name, str(work)]
    command = [sys.executable, "-m", "reclaim", "features", str(work / "dataset"), "--workers", str(_THREADS)]
    return [*command, "--set", f"rows={ROWS[name]}"]


def _reclaim(name: str, work: Path) -> None:
    from reclaim.data.core.engine.workers import Engine
    from reclaim.data.core.parallel import keep_one_heap
    from reclaim.data.dataset import Dataset
    from reclaim.features.build import FeatureConfig, build_features

    keep_one_heap()  # as the command does
    build_features(Dataset.open(work / "dataset"), FeatureConfig(rows=ROWS[name]), engine=Engine(workers=_THREADS))


def _polars(work: Path) -> None:
    os.environ["POLARS_MAX_THREADS"] = str(_THREADS)
    import polars as pl

    task = _KEY[:2]
    cpu = pl.coalesce(pl.col("cpu_percentiles").list.get(9, null_on_oob=True), "cpu_mean")
    signals = {
        "cpu": pl.when(cpu > pl.col("cpu_limit")).then("cpu_limit").otherwise(cpu),
        "memory": pl.coalesce("memory_max", "memory_mean"),
        "peak_cpu": pl.coalesce("cpu_max", "cpu_mean"),
    }
    when = (pl.struct(task).rle_id().cast(pl.Int64) * _APART_US + pl.col("end_us")).set_sorted()

    def back(seconds: int) -> str:
        return f"{seconds * _S_US}i"

    made = []
    for signal, limit in _SIGNALS.items():
        x = pl.col(signal)
        statistics_of = {
            "last": x,
            **{name: x.rolling_mean_by("when", back(s)) for name, s in _MEANS.items()},
            **{name: x.rolling_std_by("when", back(s), ddof=0) for name, s in _DEVIATIONS.items()},
            **{name: x.rolling_max_by("when", back(s)) for name, s in _MAXIMA.items()},
            "max_ever": x.cum_max().over(task),
            "ewm_1h": x.ewm_mean_by("end_us", half_life=back(3_600)).over(task),
        }
        made += [(e / pl.col(limit)).cast(pl.Float32).alias(f"{signal}_{n}") for n, e in statistics_of.items()]
    usage = pl.scan_parquet(sorted((work / "dataset" / "usage").glob("*.parquet")))  # sorted by task, then time
    usage = usage.select(*_KEY, "cpu_limit", "memory_limit", **signals).with_columns(when=when)
    (work / "polars").mkdir()
    usage.select(*_KEY, *made).sink_parquet(work / "polars" / "features.parquet", compression="uncompressed")


def _duckdb(work: Path) -> None:
    import duckdb

    frames = {f"last_{s}": f"RANGE BETWEEN {s * _S_US - 1} PRECEDING AND CURRENT ROW"
              for s in {**_MEANS, **_DEVIATIONS, **_MAXIMA}.values()}  # fmt: skip
    frames["ever"] = "RANGE UNBOUNDED PRECEDING"
    made = []
    for signal, limit in _SIGNALS.items():
        statistics_of = {
            "last": signal,
            **{name: f"avg({signal}) OVER last_{s}" for name, s in _MEANS.items()},
            **{name: f"stddev_pop({signal}) OVER last_{s}" for name, s in _DEVIATIONS.items()},
            **{name: f"max({signal}) OVER last_{s}" for name, s in _MAXIMA.items()},
            "max_ever": f"max({signal}) OVER ever",
        }
        made += [f"({formula} / {limit})::FLOAT AS {signal}_{name}" for name, formula in statistics_of.items()]
    windows = ", ".join(
        f"{name} AS (PARTITION BY collection_id, instance_index ORDER BY end_us {frame})"
        for name, frame in frames.items()
    )
    (work / "duckdb").mkdir()
    connection = duckdb.connect(config={"threads": _THREADS, "preserve_insertion_order": False})
    for path in sorted((work / "dataset" / "usage").glob("*.parquet")):
        connection.sql(
            f"COPY (WITH usage AS (SELECT {', '.join(_KEY)}, cpu_limit, memory_limit, "
            "  least(coalesce(cpu_percentiles[10], cpu_mean), cpu_limit) AS cpu, "
            "  coalesce(memory_max, memory_mean) AS memory, coalesce(cpu_max, cpu_mean) AS peak_cpu "
            f" FROM read_parquet('{path}')) "
            f"SELECT {', '.join(_KEY)}, {', '.join(made)} FROM usage WINDOW {windows}) "
            f"TO '{work / 'duckdb' / path.name}' (FORMAT parquet, COMPRESSION uncompressed)"
        )


def _live(_: Path, tasks: int) -> None:
    """Print the duration of a large cell's next windows and the size of the state, as JSON."""
    import resource
    from dataclasses import replace

    import numpy as np

    from reclaim.data.windows import CPU_MAX, CPU_MEAN, LEVELS, MEMORY_MAX, MEMORY_MEAN, Cell, empty_windows
    from reclaim.features.fold.batch import FeatureState
    from reclaim.features.fold.task_record import STATE

    rng = np.random.default_rng(1)
    slot = np.arange(tasks)
    collection = slot // _TASKS_PER_COLLECTION
    level = rng.uniform(0.05, 0.6, (2, tasks))
    shape = np.linspace(0.4, 1.6, len(LEVELS), dtype=np.float32)
    blank = replace(
        empty_windows(tasks), collection_id=collection, instance_index=slot % _TASKS_PER_COLLECTION,
        limit=np.ones((tasks, 2)), scheduled_us=np.zeros(tasks, np.int64), tier=(collection % 5).astype(np.int8),
        scheduling_class=(collection % 4).astype(np.int8),
    )  # fmt: skip
    state = FeatureState(Cell(), threads=_THREADS)
    seconds = []
    for tick in range(_PRIME + _TICKS):
        cpu, memory = level * rng.lognormal(0.0, 0.2, level.shape)
        usage = blank.usage.copy()
        usage[:, CPU_MEAN], usage[:, CPU_MAX] = cpu, cpu * shape[-1]
        usage[:, MEMORY_MEAN], usage[:, MEMORY_MAX] = memory, memory * 1.1
        end_us = np.full(tasks, (tick + 1) * 300 * _S_US)
        windows = replace(
            blank, start_us=end_us - 300 * _S_US, end_us=end_us, usage=usage,
            percentiles=cpu[:, None].astype(np.float32) * shape,
        )  # fmt: skip
        started = time.perf_counter()
        state.advance(slot, windows)
        seconds.append(time.perf_counter() - started)
    report = {
        "tasks": tasks,
        "seconds": round(statistics.median(seconds[_PRIME:]), 3),
        "all_seconds": [round(one, 3) for one in seconds[_PRIME:]],
        "tasks_per_second": round(tasks / statistics.median(seconds[_PRIME:])),
        "record_bytes": STATE.itemsize,
        "state_bytes_per_task": round(_weight(state) / tasks),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
    }
    print(json.dumps(report))


def _weight(thing: object) -> int:
    """Return the bytes of all arrays and dictionaries that an object of ours holds."""
    if hasattr(thing, "nbytes"):
        return int(thing.nbytes)
    if isinstance(thing, dict):
        return sys.getsizeof(thing) + sum(sys.getsizeof(key) + sys.getsizeof(value) for key, value in thing.items())
    if isinstance(thing, list | tuple):
        return sum(map(_weight, thing))
    return sum(map(_weight, vars(thing).values())) if type(thing).__module__.startswith("reclaim") else 0


ROWS = {"reclaim": "all", "reclaim-default": "sample"}
"""Rows whose features are kept by the contenders that are ours."""
RACE = (*ROWS, "polars", "duckdb")
CONTENDERS: dict[str, Callable[..., None]] = {
    **{name: partial(_reclaim, name) for name in ROWS}, "polars": _polars, "duckdb": _duckdb, "live": _live,
}  # fmt: skip


def _agreement(work: Path) -> dict[str, dict[str, float]]:
    """Return for each statistic the share of rows in which an engine's number is reclaim's, to 1e-4; worst signal.

    Rows whose task and time stand more than once are left out.
    """
    import numpy as np
    import pandas as pd

    from reclaim.data.dataset import Dataset
    from reclaim.features.build import FeatureConfig, build_features
    from reclaim.features.registry import FEATURE_NAMES

    dataset = Dataset.open(work / "dataset")
    features, _ = build_features(dataset, FeatureConfig(rows="all"))
    x, names = features.x, FEATURE_NAMES
    keys = pd.concat([dataset.usage(bucket, _KEY).to_pandas() for bucket in range(dataset.n_buckets)])
    ours = keys.reset_index(drop=True).reset_index(names="row").drop_duplicates(_KEY, keep=False)
    shares: dict[str, dict[str, float]] = {}
    for engine in ("polars", "duckdb"):
        theirs = pd.read_parquet(work / engine).merge(ours, on=_KEY)
        for name in theirs.columns.intersection(list(names)):
            mine = x[theirs["row"], names.index(name)]
            equal = float(np.isclose(theirs[name], mine, rtol=1e-4, atol=1e-6, equal_nan=True).mean())
            statistic = name.removeprefix("peak_").split("_", 1)[1]
            worst = shares.setdefault(statistic, {})
            worst[engine] = round(min(worst.get(engine, 1.0), equal), 4)
    return shares


def _width(work: Path, name: str) -> int:
    """Return the number of features that a contender wrote for each row."""
    if name in ROWS:
        from reclaim.features.registry import N_FEATURES

        return N_FEATURES
    import pyarrow.parquet as pq

    return len(pq.read_schema(next((work / name).glob("*.parquet")))) - len(_KEY)


def _remove(*paths: Path) -> None:
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)


if __name__ == "__main__":
    main()
