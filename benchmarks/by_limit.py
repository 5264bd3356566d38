"""Weighs each violation by its task's limit, and compares the network at equal violation with statistical estimators.

    python -m benchmarks.by_limit DATASET --work FOLDER

Violations count by task-window and what is reclaimed by limit, so a price lets tasks of large limits violate more often
than others. Three leads of the network over the best statistical estimator are measured an hour ahead, on the test rows
in hindsight as ``benchmarks.bar`` does it:

- violations count by task-window, as everywhere else;
- each violation, and each task-window, counts as its task's limit;
- as before, where all tasks weigh the same in the price.

FOLDER is that of ``benchmarks.bar``, whose network and chosen settings (``--bar``) are taken; settings were chosen by
task-window. The best statistical estimator is chosen on the test rows, for each way of counting. Results of datasets
are put together in ``--out``.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, astuple
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks import made_by
from benchmarks.bar import NAMES, Rows, facts_of, name_of, rows_of, train_model
from benchmarks.bar_tables import BUDGETS, NETWORK, PUBLISHED
from reclaim.data.schema import RESOURCES
from reclaim.replay.equal_violation.curves import JudgedUnits, draw_curve
from reclaim.replay.equal_violation.sweep import Bare, Guards, TaskRows
from reclaim.replay.open_loop.bootstrap import number
from reclaim.replay.open_loop.fold import fold_dataset
from reclaim.replay.open_loop.history import window_seconds
from reclaim.replay.open_loop.paired import USUAL
from reclaim.replay.runs.unseen import judged_on
from reclaim.training.estimators.base import Estimator
from reclaim.training.estimators.registry import build_estimator
from reclaim.training.fitting.sources import open_sources
from reclaim.training.margins.answers import Answers
from reclaim.training.margins.margin import Budgets
from reclaim.training.margins.tune import TunedEstimator, Tuning
from reclaim.training.tracking.client import sqlite_uri

RESULTS: Final = Path(__file__).parent / "results" / "by-limit.json"
HORIZON_S: Final = 3_600
RIVALS: Final = ("borg", "moving-max", "krr", "vpa", "koordinator", "autopilot-percentile")
"""One of them is the best of the fifteen in each comparison of ``benchmarks.bar`` an hour ahead at equal violation.

Counted by limit one is in 15 of 16; memory of the Google machines at 0.1 % is the other, by 0.02 points."""
ALIKE: Final = "network, all tasks weigh the same"
BY_WINDOW, BY_LIMIT = "by task-window", "by limit"

Floats = NDArray[np.float64]


def main() -> None:
    """Measure one dataset, and put the result beside those of others."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", type=Path, metavar="DATASET")
    parser.add_argument("--work", type=Path, required=True, help="Folder of the trained models, as of benchmarks.bar.")
    parser.add_argument("--bar", type=Path, metavar="FILE", help="By default benchmarks/results/bar-NAME.json.")
    parser.add_argument("--rivals", nargs="+", choices=NAMES, default=RIVALS, metavar="NAME", help="By default six.")
    parser.add_argument("--out", type=Path, default=RESULTS, help="By default benchmarks/results/by-limit.json.")
    asked = parser.parse_args()
    os.environ["MLFLOW_TRACKING_URI"] = sqlite_uri(asked.work / "mlflow.db")
    (source,) = open_sources([asked.dataset])
    name = name_of(source)
    settings = json.loads((asked.bar or RESULTS.parent / f"bar-{name}.json").read_text())["settings"]
    model = judged_on(NETWORK, train_model(source, "network"), source.features)
    unknown = (np.nan,) * len(RESOURCES)
    makers: dict[str, Callable[[], Estimator]] = {
        NETWORK: partial(model.bare_estimator, horizon_s=HORIZON_S, mean_limit=source.features.mean_limit),
        ALIKE: partial(model.bare_estimator, horizon_s=HORIZON_S, mean_limit=unknown),
    }
    for rival in asked.rivals:
        makers[rival + PUBLISHED] = partial(build_estimator, rival)
        if (chosen := settings.get(f"{rival}@{HORIZON_S}")) is not None:
            makers[rival] = partial(TunedEstimator, rival, _tuning(chosen))
    history, answers = fold_dataset(source.features, horizon_s=HORIZON_S, makers=makers, seconds={})
    rows = rows_of(history)
    found = {
        **made_by(
            f"python -m benchmarks.by_limit {asked.dataset.name} --work WORK"
            + (f" --bar benchmarks/results/{asked.bar.name}" if asked.bar else "")
        ),
        "dataset": facts_of(source),
        "rivals": list(asked.rivals),
        "leads": [
            {"resource": resource} | line
            for r, resource in enumerate(RESOURCES)
            if rows.known(r)["measured"]
            for line in leads(rows, answers, r)
        ],
    }
    before = json.loads(asked.out.read_text()) if asked.out.exists() else {}
    asked.out.write_text(json.dumps(before | {name: found}, indent=1, allow_nan=False) + "\n")
    print("\n".join(table({name: found})))


def leads(rows: Rows, answers: Mapping[str, Answers], r: int) -> list[dict[str, Any]]:
    """Return the lead of the network at each budget, counted in both ways, with 95 % intervals.

    Answers of names that begin with ``network`` are the network's, others those of statistical estimators.
    """
    counted = _reclaimed(rows, answers, r)
    lines = []
    for margin, budget in BUDGETS.items():
        k = [*asdict(Budgets())].index(margin)
        for way, mine in ((BY_WINDOW, NETWORK), (BY_LIMIT, NETWORK), (BY_LIMIT, ALIKE)):
            at = {name: of[k] for name, of in counted[way].items()}
            rivals = [name for name in at if not name.startswith(NETWORK) and np.isfinite(at[name][0])]
            best = max(rivals, key=lambda name: float(at[name][0]))
            lines.append(
                {"budget": budget, "counted": way, "estimator": mine, "best_statistical": best}
                | {"reclaims": [number(float(at[name][0])) for name in (mine, best)]}
                | USUAL.interval(at[mine] - at[best])
            )
    return lines


def _reclaimed(rows: Rows, answers: Mapping[str, Answers], r: int) -> dict[str, dict[str, Floats]]:
    """Return, by way of counting and estimator, the share reclaimed at each budget; shape (n_budgets, 1 + draws).

    The first is of all collections, the others are of resamples. Rows of one collection and limit are summed first, and
    weighed by it then.
    """
    history = rows.history
    limit = np.nan_to_num(history.windows.limit[rows.test, r])
    (unit, limits), part = np.unique(np.stack([rows.unit.astype(float), limit]), axis=1, return_inverse=True)
    guards, seconds = Guards.from_windows(history.windows), window_seconds(history.windows)
    swept = TaskRows.lay_out(rows.test, guards, history.target, seconds, part.reshape(-1).astype(np.int64), len(unit))
    weights = {BY_WINDOW: np.ones((len(limits), 1)), BY_LIMIT: limits[:, None]}

    def by_collection(values: Floats) -> Floats:
        sums = np.zeros((len(rows.unseen), values.shape[1]))
        np.add.at(sums, unit.astype(np.int64), values)
        return sums

    totals = swept.totals()[..., r]
    judged = {
        way: JudgedUnits.from_totals(
            by_collection(np.hstack([totals[:, :1] * weight, totals[:, 1:]])), astuple(Budgets()), USUAL
        )
        for way, weight in weights.items()
    }
    found: dict[str, dict[str, Floats]] = {way: {} for way in weights}
    for name, of in answers.items():
        sweeps = [swept.sweep(bare) for bare in Bare.of(of)]
        for way, weight in weights.items():
            weighed = [(by_collection(v[..., r] * weight), by_collection(spared[..., r])) for v, spared in sweeps]
            found[way][name] = draw_curve(weighed, judged[way]).at
    return found


def _tuning(chosen: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Tuning:
    """Return the settings of ``tuning_facts`` as they were chosen."""
    return {
        budget: tuple(
            {key: tuple(value) if isinstance(value, list) else value for key, value in of[resource].items()}
            for resource in RESOURCES
        )
        for budget, of in chosen.items()
    }


def table(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the lines of a Markdown table, in points, with 95 % intervals."""

    def shown(one: Mapping[str, Any]) -> str:
        value, low, high = (100 * one[name] for name in ("value", "low", "high"))
        return f"{value:.1f} [{low:.1f}, {high:.1f}]"

    lines = [
        "| dataset | resource | budget | counted by task-window | by limit "
        "| by limit, tasks weigh the same in the price |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for name, of in results.items():
        for start in range(0, len(of["leads"]), 3):
            three = of["leads"][start : start + 3]
            lines.append(
                f"| {name} | {three[0]['resource']} | {three[0]['budget']} | {' | '.join(map(shown, three))} |"
            )
    return lines


if __name__ == "__main__":
    main()
