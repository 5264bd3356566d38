"""Measures networks of short histories, with the curves of other clusters mixed in and without.

    python -m benchmarks.short_history RAW --mapping azure --clock "time_s / 86400" --others bitbrains gm jobs
        --days 2 4 8 16 --from 22.5 --work WORK --out FILE
    python -m benchmarks.short_history --table FILE ...

RAW is a folder with `usage.parquet` of a series. Of it each history is made a dataset of its own, as if recording had
begun so many days before the day that the test begins. A network is trained on it twice, without a prior and with a
portable network of the other datasets (`reclaim train --set prior=…`), and measured by `benchmarks.bar` next to five
statistical estimators, tuned on the same history.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import duckdb

from benchmarks.bar_tables import BEST, FIXED, HINDSIGHT, HOURS, MIXED_IN, NETWORK
from benchmarks.builtin import portable
from reclaim.replay.open_loop.paired import RECLAIMED
from reclaim.training.bundle import save_bundle
from reclaim.training.fitting.sources import open_sources

RIVALS: Final = ("borg", "moving-max", "max-so-far", "krr", "vpa")
_TRAINED: Final = 0.55 / 0.75
"""Share of a history that is trained on, as by default (`splits.SplitConfig`); prices are set on the rest."""


def main() -> None:
    """Make the datasets, measure what is not in the file, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("raw", nargs="?", type=Path, metavar="RAW")
    parser.add_argument("--table", nargs="+", type=Path, metavar="FILE", help="Print the table of these results.")
    parser.add_argument("--mapping", help="Of the series.")
    parser.add_argument("--clock", help="Days, as an expression of the columns.")
    parser.add_argument("--others", nargs="+", type=Path, metavar="DATASET", help="Other clusters, with features.")
    parser.add_argument("--days", nargs="+", type=float, help="Lengths of history.")
    parser.add_argument("--from", type=float, dest="test", help="Day that the test begins, from the first one.")
    parser.add_argument("--work", type=Path)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    if asked.table:
        contents = [json.loads(path.read_text()) for path in asked.table]
        print("\n".join(table(of for content in contents for of in content["histories"])))
        return
    absent = [name for name, value in vars(asked).items() if value is None and name != "table"]
    if absent:
        parser.error(f"{', '.join(absent)}: needed to measure")
    asked.work.mkdir(parents=True, exist_ok=True)
    prior = asked.work / "others"
    if not prior.exists():
        save_bundle(portable(open_sources(asked.others), seed=1), prior)
    content: dict[str, Any] = {
        "command": f"python -m benchmarks.short_history {asked.raw.name} --mapping {Path(asked.mapping).stem} --clock "
        f'"{asked.clock}" --others {" ".join(p.name for p in asked.others)} --days '
        f"{' '.join(f'{d:g}' for d in asked.days)} --from {asked.test:g}",
        "histories": json.loads(asked.out.read_text())["histories"] if asked.out.exists() else [],
    }
    done = {of["days"] for of in content["histories"]}
    for days in (d for d in asked.days if d not in done):
        content["histories"].append({"days": days, **measured(asked, days, prior)})
        asked.out.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
    print("\n".join(table(content["histories"])))


def measured(asked: argparse.Namespace, days: float, prior: Path) -> dict[str, Any]:
    """Return the facts and differences of one history."""
    work: Path = asked.work / f"days-{days:g}"
    raw = work / "raw" / asked.raw.name  # a dataset has its name
    whole = cut(asked.raw / "usage.parquet", raw / "usage.parquet", asked.clock, asked.test - days, asked.test)
    train, valid = days / whole * _TRAINED, days / whole * (1 - _TRAINED)
    dataset, result = work / asked.raw.name, work / "bar.json"
    reclaim = str(Path(sys.executable).with_name("reclaim"))
    for command in (
        [reclaim, "ingest", raw, dataset, "--trace", "series", "--mapping", asked.mapping],
        [reclaim, "features", dataset, "--set", f"split.train_share={train}", "--set", f"split.valid_share={valid}"],
        [sys.executable, "-m", "benchmarks.bar", dataset, "--work", work / "bar", "--out", result, "--prior", prior,
         "--rivals", *RIVALS],
    ):  # fmt: skip
        subprocess.run([str(word) for word in command], check=True)
    content = json.loads(result.read_text())
    of_all = [d for d in content["differences"] if d["collections"] == "all" and d["margin_set"] != FIXED]
    return {name: content[name] for name in ("date", "commit", "device", "versions", "dataset")} | {
        "differences": of_all
    }


def cut(source: Path, target: Path, clock: str, first: float, test: float) -> float:
    """Write the rows from day ``first`` on, counted from the first row's; return the days up to the last one."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with duckdb.connect() as db:
        db.execute(f"CREATE VIEW rows AS SELECT *, {clock} AS day_ FROM read_parquet('{source}')")
        begin, end = db.execute("SELECT min(day_), max(day_) FROM rows").fetchone() or (0.0, 0.0)
        if not first >= 0 or not test < end - begin:
            raise SystemExit(
                f"{source}: {end - begin:.1f} days hold no history from {first:g} and a test from {test:g}"
            )
        db.execute(
            f"COPY (SELECT * EXCLUDE day_ FROM rows WHERE day_ >= {begin + first}) TO '{target}' (FORMAT parquet)"
        )
    return float(end - begin - first)


def table(histories: Iterator[Mapping[str, Any]] | Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines of a table of what is reclaimed at equal violation."""
    yield (
        "| dataset, days of history | resource | budget | ahead | network | others mixed in | more, in points | "
        "best of five statistics |"
    )
    yield "|---|---|--:|---|--:|--:|--:|---|"
    for of in histories:
        found = {
            (d["horizon_s"], d["resource"], d["budget"], d["estimator"], d["against"]): d
            for d in of["differences"]
            if d["margin_set"] == HINDSIGHT
        }
        for horizon_s, ahead in HOURS.items():
            for resource, budget in dict.fromkeys(key[1:3] for key in found if key[0] == horizon_s):
                ours = found[horizon_s, resource, budget, MIXED_IN, NETWORK]
                best = found[horizon_s, resource, budget, MIXED_IN, BEST]
                more, low, high = (100 * share for share in ours[RECLAIMED])
                mixed, alone = (100 * share for share in ours["reclaims"][:2])
                yield (
                    f"| {of['dataset']['name']}, {of['days']:g} | {resource} | {budget} | {ahead} | {alone:.1f} | "
                    f"{mixed:.1f} | {more:+.1f} [{low:.1f}, {high:.1f}] | {100 * best['reclaims'][1]:.1f} "
                    f"({best['opponent']}) |"
                )


if __name__ == "__main__":
    main()
