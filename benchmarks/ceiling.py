"""Measures how much a model of the features could reclaim of a dataset: one that is fitted on the test period itself.

    python -m benchmarks.ceiling DATASET ... --horizons 3600       # after `reclaim features DATASET --set rows=all`
    python -m benchmarks.ceiling                                   # the table alone, with the bars as they are by now

The ceiling is the boosted survival model (`training.fitting.trees`), fitted on test rows, with one price in hindsight
per resource and budget. It is cross-fitted by task and by block of time: a row is judged by a model that saw no row of
its task in its block, and none of its task within a horizon of it. The model sees other tasks at the same time and the
same task at other times, which no service can. It does not see what would date a row: calendar, age and length of
history. It knows no more of a row than its features, so what lies between it and the oracle cannot be foreseen from
them, but for what a better model, more rows, or more pairs of a row and a threshold would add: of these a model takes
`--pairs` at most, drawn at random: by default 6 to 82 % of those of the datasets published.

The rivals are in the results of `benchmarks/bar.py` for the same dataset: the best statistical estimator, its settings
chosen on validation rows or published, and the network, all with their free number in hindsight, too. The share of the
way is what the network reclaims beyond that estimator, over what the ceiling does.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks import made_by
from benchmarks.bar_tables import BUDGETS, HINDSIGHT, HOURS, NETWORK, ORACLE, PUBLISHED
from reclaim.data.schema import RESOURCES
from reclaim.features.registry import CALENDAR, FEATURE_NAMES
from reclaim.features.splits import IN_ALLOC, TEST
from reclaim.features.targets import HORIZONS_S
from reclaim.replay.open_loop import metrics
from reclaim.replay.open_loop.fold import answer_folded, fold_dataset
from reclaim.replay.open_loop.history import History, oracle, previous_rows
from reclaim.replay.open_loop.paired import RECLAIMED, USUAL, VIOLATION, Paired
from reclaim.training.estimators.registry import ESTIMATORS
from reclaim.training.fitting.sources import Source, open_sources
from reclaim.training.fitting.trees import fit_trees
from reclaim.training.margins.answers import Priced
from reclaim.training.margins.calibrate import calibrate, guarded_reservations
from reclaim.training.margins.ladder import N_RUNGS
from reclaim.training.models.estimator import ForecastEstimator
from reclaim.training.models.trees import Rows
from reclaim.training.settings import TreeConfig

CEILING, LIMIT = "ceiling", "limit"
FOLDS: Final = 3
"""Models per dataset: each is fitted on two thirds of the task-blocks and judged on the rest."""
BLOCKS: Final = 7
"""Blocks of time in the test period, at most; none is shorter than the horizon."""
TREES: Final = TreeConfig(max_samples=10**9, max_pairs=500_000)
"""All rows, but not all of their pairs with a threshold, 11 to 24 a row, which take kilobytes each (``--pairs``)."""
DATING: Final = (*CALENDAR, "age", "seen")
"""Features that would tell a model when a row was, and so what other tasks did then."""
RESULTS: Final = Path(__file__).parent / "results"
_LEAST_ROWS: Final = 1_000
"""Known rows of a resource below which it is left out, as in `benchmarks/bar.py`."""


def main() -> None:
    """Measure the datasets named, add them to the results, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("datasets", nargs="*", type=Path, metavar="DATASET")
    parser.add_argument("--horizons", nargs="+", type=int, default=[3_600], choices=HORIZONS_S, metavar="SECONDS")
    parser.add_argument("--pairs", type=int, default=TREES.max_pairs, metavar="N", help="Of each model, at most.")
    parser.add_argument("--out", type=Path, default=RESULTS / "ceiling.json")
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    trees = replace(TREES, max_pairs=given.pairs)
    content = json.loads(given.out.read_text()) if given.out.exists() else {"datasets": {}}
    for path in given.datasets:
        (source,) = open_sources([path])
        source.features.check_whole()
        of = content["datasets"].setdefault(source.dataset.fingerprint, {"lines": []})
        of |= {"name": source.dataset.manifest.get("name", source.name), "nature": source.dataset.manifest["nature"]}
        for horizon_s in given.horizons:
            others = [line for line in of["lines"] if line["horizon_s"] != horizon_s]
            of["lines"] = others + [
                {**_facts(path, horizon_s, trees), **line} for line in measure(source, horizon_s, trees)
            ]
            given.out.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
    print("\n".join(table(content, [json.loads(path.read_text()) for path in sorted(RESULTS.glob("bar-*.json"))])))


def _facts(path: Path, horizon_s: int, trees: TreeConfig) -> dict[str, Any]:
    command = f"python -m benchmarks.ceiling {path.name} --horizons {horizon_s} --pairs {trees.max_pairs}"
    return {**made_by(command), "folds": FOLDS, "trees": asdict(trees)}


def measure(source: Source, horizon_s: int, trees: TreeConfig) -> Iterator[dict[str, Any]]:
    """Yield a line for each resource and budget that the dataset can measure over a horizon."""
    started = time.perf_counter()
    history = fold_dataset(source.features, horizon_s, {}, {})[0]
    history = history.take(np.flatnonzero((history.period == TEST) & (history.group != IN_ALLOC)))
    known = np.isfinite(history.target).sum(axis=0)
    if known.max() < _LEAST_ROWS:
        return
    windows = history.windows
    answers = cross_fitted(source, history, horizon_s, trees)
    calibration = calibrate(answers, windows, history.target)
    held = guarded_reservations(answers, windows, calibration.settings)
    best = oracle(history).reservation
    for margin, budget in BUDGETS.items():
        of = {CEILING: held[margin], ORACLE: best, LIMIT: windows.limit}
        paired = Paired({name: _sums(r, history) for name, r in of.items()})
        for r, resource in enumerate(RESOURCES):
            if known[r] < _LEAST_ROWS:
                continue
            over = paired.difference(CEILING, LIMIT, r)  # which reclaims and violates nothing
            yield {
                "horizon_s": horizon_s, "resource": resource, "budget": budget, "rows": int(known[r]),
                CEILING: {
                    name: [round(v, 6) for v in (i.value, i.low, i.high)]
                    for name, i in ((RECLAIMED, over.reclaimed), (VIOLATION, over.violation))
                },
                ORACLE: round(paired.value(ORACLE, r), 6),
                "seconds": round(time.perf_counter() - started),
            }  # fmt: skip


def cross_fitted(source: Source, history: History, horizon_s: int, trees: TreeConfig) -> Priced:
    """Return the ladders of test rows, each by the model that saw nothing of its task in its block."""
    features, rows, windows = source.features, history.source_row, history.windows
    x = features.x[rows]
    x[:, [FEATURE_NAMES.index(name) for name in DATING]] = np.nan
    y, oom = np.full((len(rows), *features.y.shape[1:]), np.nan, np.float32), np.full((len(rows), 3), np.nan)
    y[:, : len(RESOURCES), HORIZONS_S.index(horizon_s)] = history.target  # of nothing else a model is fitted
    own, near = groups_of(windows.task_numbers(), features.end_us[rows], horizon_s)
    ladder = np.empty((len(rows), len(RESOURCES), N_RUNGS), np.float32)
    for group in range(FOLDS):
        seen, judged = np.flatnonzero((near != group).all(axis=1)), np.flatnonzero(own == group)
        started = time.perf_counter()
        model = fit_trees(Rows(x[seen], y[seen], oom[seen]), trees, horizon_s=horizon_s, seed=group)
        estimator = ForecastEstimator(model, horizon_s, mean_limit=features.mean_limit)
        ladder[judged] = answer_folded(estimator, x[judged], windows.take(judged)).ladder
        logging.info(
            "%s, %d s: model %d of %d from %d rows, to %d, in %.0f s", source.name, horizon_s, group + 1, FOLDS,
            len(seen), len(judged), time.perf_counter() - started,
        )  # fmt: skip
    return Priced(ladder)


def groups_of(
    task: NDArray[np.int64], end_us: NDArray[np.int64], horizon_s: int, *, folds: int = FOLDS, blocks: int = BLOCKS
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the model that judges each row, and those that must not be fitted on it.

    Tasks are dealt to ``folds`` hands, time is cut into blocks, and each model is judged on another hand in every
    block: so a few models leave every task-block out once.

    Parameters
    ----------
    task : int64, shape (n,)
        From 0.
    end_us : int64, shape (n,)
    horizon_s : int

    Returns
    -------
    own : int64, shape (n,)
    near : int64, shape (n, 3)
        The models of the task a horizon before, at the row, and a horizon after it.
    """
    hand = np.random.default_rng(USUAL.seed).permutation(int(task.max()) + 1) % folds
    first, horizon_us = end_us.min(), horizon_s * 1_000_000
    length = max(-(-(int(end_us.max()) - int(first) + 1) // blocks), horizon_us)
    near = [(hand[task] + (end_us + shift - first) // length) % folds for shift in (-horizon_us, 0, horizon_us)]
    return near[1], np.stack(near, axis=1)


def _sums(reservation: NDArray[np.float64], history: History) -> NDArray[np.float64]:
    """Return the sums of ``replay.open_loop.metrics`` by collection; (n_units, n_stats, n_resources)."""
    windows = history.windows
    unit = np.unique(windows.collection_id, return_inverse=True)[1].astype(np.int64)
    scored = metrics.Scored(
        target=history.target, next_target=history.next_target, reservation=reservation, limit=windows.limit,
        duration_s=(windows.end_us - windows.start_us) / 1e6, previous=previous_rows(windows),
    )  # fmt: skip
    return metrics.sums(scored, unit, int(unit.max()) + 1)


def table(content: dict[str, Any], bars: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of the table as Markdown; what no bar has measured is a dash."""
    yield "| dataset | horizon | resource | budget | best statistical | network | ceiling | oracle | share of the way |"
    yield "|---|---|---|---|---|--:|---|--:|--:|"
    for fingerprint, of in content["datasets"].items():
        measured = {
            (e["horizon_s"], e["resource"], e["budget"], e["estimator"]): e[RECLAIMED][0]
            for bar in bars
            if bar["dataset"]["fingerprint"] == fingerprint
            for e in bar["estimators"]
            if (e["collections"], e["margin_set"]) == ("all", HINDSIGHT)
        }
        for line in of["lines"]:
            key = line["horizon_s"], line["resource"], line["budget"]
            rivals = {
                name: reclaimed
                for (*where, name), reclaimed in measured.items()
                if tuple(where) == key
                and name != LIMIT
                and name.removesuffix(PUBLISHED) in ESTIMATORS
                and reclaimed is not None  # where even the widest margin violates more
            }
            name, best = max(rivals.items(), key=lambda rival: rival[1], default=("-", None))
            network, (ceiling, low, high) = measured.get((*key, NETWORK)), line[CEILING][RECLAIMED]
            way = None if best is None or network is None or ceiling <= best else (network - best) / (ceiling - best)
            cells = (
                of["name"], HOURS[key[0]], *key[1:], "-" if best is None else f"{best:.1%} ({name})", _percent(network),
                f"{ceiling:.1%} [{low:.1%}, {high:.1%}]", _percent(line[ORACLE]), "-" if way is None else f"{way:.2f}",
            )  # fmt: skip
            yield f"| {' | '.join(cells)} |"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


if __name__ == "__main__":
    main()
