"""Times ingest against its floor and against hand-written conversion, and shows that its memory does not grow.

    python -m benchmarks.speed.ingest            # about 2 million windows, then ten times as many; some 20 minutes
    python -m benchmarks.speed.ingest --skip-large --rounds 5 --work /tmp/bench

Contenders, each a process of its own, in turn, round after round, on one synthetic cell in the Google v3 layout whose
usage is a single file:

- gunzip: the usage file unpacked and thrown away, by the fastest gzip there is here (isal), one core: the floor;
- duckdb: read_json of the usage file, columns typed by hand, to one zstd parquet file, on all cores;
- ingest: `reclaim ingest` of the whole cell: typed, checked, every line accounted for, joined with the current limits,
  bucketed, sorted, each row once, and its other four tables.

Memory is that of all processes of a contender together (proportional set size, sampled in a run of its own: sampling
costs the sampled process time). The first round is thrown away: it compiles. Read ratios within one run; seconds of a
shared machine say little, and seconds of its processors more.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import made_by
from benchmarks.speed.processes import time_command, watch_command
from reclaim.data.synthetic.job import SyntheticCellConfig, write_cell
from reclaim.data.traces.google_v3 import USAGE

_GUNZIP = """
import sys
from isal import igzip
with igzip.open(sys.argv[1], "rb") as packed:
    while packed.read(1 << 20):
        pass
"""
_DUCKDB = """
import sys, duckdb
columns = ", ".join(f"'{name}': '{type_}'" for name, type_ in (pair.split("=") for pair in sys.argv[3:]))
duckdb.sql(f"COPY (SELECT * FROM read_json('{sys.argv[1]}', format = 'newline_delimited', columns = {{{columns}}})) "
           f"TO '{sys.argv[2]}' (FORMAT parquet, COMPRESSION zstd)")
"""


def main() -> None:
    """Run the contenders and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machines", type=int, default=190)
    parser.add_argument("--days", type=float, default=3.0)
    parser.add_argument("--large-machines", type=int, default=900)
    parser.add_argument("--large-days", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--skip-large", action="store_true")
    parser.add_argument("--work", type=Path, help="Folder for the cells, kept and used again.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "ingest.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = arguments.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        rows = _cell(work / "cell", arguments.machines, arguments.days, seed=1, shard_hours=1_000)
        usage = next((work / "cell").glob("instance_usage-*.json.gz"))
        usage_bytes = usage.stat().st_size
        commands = {
            "gunzip": [sys.executable, "-c", _GUNZIP, str(usage)],
            "duckdb": [sys.executable, "-c", _DUCKDB, str(usage), str(work / "by-hand.parquet"),
                       *(f"{name}={type_}" for name, type_ in USAGE.columns.items())],
            "ingest": _ingest(work / "cell", work / "dataset"),
        }  # fmt: skip
        runs: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
        peaks = {}
        for number in range(arguments.rounds + 2):
            for name, command in commands.items():
                _remove(work / "dataset", work / "by-hand.parquet")
                if number == 1:
                    peaks[name] = watch_command(command)[1]
                else:
                    measured = time_command(command)
                    runs[name] += [measured] if number else []
        results = [_line(name, rows, measured, peaks[name]) for name, measured in runs.items()]
        of = {line["contender"]: line for line in results}
        for line in results:
            line["speed_to_duckdb"] = round(of["duckdb"]["seconds"] / line["seconds"], 2)
            line["duckdb_cpu_to_own"] = round(of["duckdb"]["cpu_seconds"] / line["cpu_seconds"], 2)
            line["time_to_floor"] = round(line["seconds"] / of["gunzip"]["seconds"], 2)
        if not arguments.skip_large:
            large = _cell(work / "large", arguments.large_machines, arguments.large_days, seed=2, shard_hours=24)
            _remove(work / "dataset")
            seconds, peak, _ = watch_command(_ingest(work / "large", work / "dataset"))
            results.append(_line("ingest, large", large, [(seconds, 0.0)], peak))
        _remove(work / "dataset", work / "by-hand.parquet")
    content = {
        **made_by("python -m benchmarks.speed.ingest " + " ".join(
            f"--{key.replace('_', '-')} {value:g}" for key, value in vars(arguments).items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        ) + " --skip-large" * arguments.skip_large),
        "load": round(os.getloadavg()[2], 1),
        "gzip_bytes_per_row": round(usage_bytes / rows),
        "results": results,
    }  # fmt: skip
    for line in results:
        print("  ".join(f"{key} {value}" for key, value in line.items()))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(content, indent=2) + "\n")
    print(f"wrote {arguments.out}")


def _cell(folder: Path, machines: int, days: float, *, seed: int, shard_hours: int) -> int:
    """Make a cell unless it exists, and return its number of windows."""
    config = SyntheticCellConfig(machines=machines, days=days, seed=seed, shard_hours=shard_hours)
    return int(write_cell(folder, config).rows["instance_usage"])


def _ingest(cell: Path, dataset: Path) -> list[str]:
    return [str(Path(sys.executable).with_name("reclaim")), "ingest", str(cell), str(dataset)]


def _line(name: str, rows: int, measured: list[tuple[float, float]], peak: int) -> dict[str, Any]:
    seconds = statistics.median(one[0] for one in measured)
    return {
        "contender": name,
        "rows": rows,
        "seconds": round(seconds, 2),
        "all_seconds": [round(one[0], 2) for one in measured],
        "cpu_seconds": round(statistics.median(one[1] for one in measured), 2) or None,
        "rows_per_second": round(rows / seconds),
        "peak_mib": peak >> 20,
    }


def _remove(*paths: Path) -> None:
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)
        shutil.rmtree(path.with_name(path.name + ".partial"), ignore_errors=True)
        if path.is_file():
            path.unlink()


if __name__ == "__main__":
    main()
