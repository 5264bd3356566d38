"""Measures the portable network on clusters that it was not trained on: the first day, four days, and a warm test.

    python -m benchmarks.builtin DATASET ... --family machines=jobs --markdown

The datasets have their features built. For each, a network is trained on the others, but for those of its family, which
record the same cluster, and measured on it, one hour ahead, at budgets of 1 and 0.1 %:

- the first 24 hours and the first four days of the record, from the first window on;
- the test period, with the validation period before it as warm-up of what follows outcomes.

Each answer is that of a service: the model's own price, solved every hour from the curves of the last day, spends a
part of the budget at first (`training/margins/own_price.py`) and is moved by outcomes (`training/margins/online.py`).
Next to it stand

- `own`: the own price of the whole budget without any outcome;
- `hindsight`: one price with which exactly the budget is violated on the measured rows, which no service can set;
- `statistic`: the one of five (maxima of 6 and 24 hours, of all, a decaying one, the decaying 98th percentile) that
  reclaims most with a margin set on the measured rows themselves;
- in the test period `trained`: the network of `reclaim train` on the dataset itself, following from prices of its
  validation period, and in hindsight.

Differences in hindsight are at equal violation, which is the budget. They have 95 % intervals that draw whole tasks
with replacement, and find the price again in each draw. Of datasets of more than ``MOST_TASKS`` tasks the test period
counts every n-th task, for all alike.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks import made_by
from reclaim.config import load_config
from reclaim.data.schema import RESOURCES
from reclaim.data.windows import Windows
from reclaim.features.registry import AT
from reclaim.features.splits import TEST
from reclaim.features.targets import HORIZONS_S
from reclaim.replay.equal_violation.compare import EqualViolation, SweptPeriod
from reclaim.replay.open_loop.bootstrap import Bootstrap
from reclaim.replay.open_loop.fold import answer_folded
from reclaim.training.bundle import Bundle, pipeline_of
from reclaim.training.estimators.base import STATISTIC, Estimate
from reclaim.training.fitting.learner import learner_of
from reclaim.training.fitting.sources import Source, open_sources, windows_of
from reclaim.training.margins.answers import Answers, Widened
from reclaim.training.margins.calibrate import calibrate, reclaimed_share, violation_share
from reclaim.training.margins.margin import Budgets
from reclaim.training.margins.online import OnlineMargins
from reclaim.training.margins.price import Price, three_prices
from reclaim.training.margins.violation import needed
from reclaim.training.settings import NO_PRIOR, TrainConfig, config_file

Floats = NDArray[np.float64]

HORIZON_S: Final = 3_600
MARGINS: Final = ("aggressive", "baseline")
STATISTICS: Final = ("max_6h", "max_24h", "max_ever", "slow_max", "p98_48h")
MOST_TASKS: Final = 200
DRAWS: Final = 1_000
ROWS_A_SIGNAL: Final = 60_000
_DAY_US: Final = 86_400_000_000
_BEGIN: Final = three_prices(Price("baseline", (200.0, 200.0)), Price("aggressive", (10.0, 10.0)))
"""Prices of the first five minutes, before any curve of the cell is known."""
_STILL: Final = 1e-9
"""A rate at which outcomes move nothing."""


def network_of(source: Source, seed: int) -> Bundle:
    """Return the network of `reclaim train` on one dataset; its prices are set by the caller."""
    with tempfile.TemporaryDirectory() as folder:
        fitted = learner_of("network").fit([source], TrainConfig(seed=seed, prior=NO_PRIOR), Path(folder))
    fingerprint = source.dataset.fingerprint
    return Bundle(
        "network", fitted.refitted or fitted.forecaster, HORIZON_S, _BEGIN, fingerprint, held_out=fitted.forecaster,
        learned_until_us=source.features.cuts_us[1],
    )  # fmt: skip


def portable(sources: Sequence[Source], seed: int) -> Bundle:
    """Return a portable model of the training periods of some datasets, as `--config portable` fits it."""
    config = load_config(TrainConfig, config_file(Path("portable")))
    fit = replace(config.fit, max_samples=ROWS_A_SIGNAL * 2 * len(sources))
    config = replace(config, seed=seed, fit=fit)
    with tempfile.TemporaryDirectory() as folder:
        fitted = learner_of("portable").fit(sources, config, Path(folder))
    return Bundle("portable", fitted.forecaster, HORIZON_S, _BEGIN, "", pipeline_version=pipeline_of("portable"))


class Rows:
    """The rows of a period of a dataset, of which some are measured.

    Parameters
    ----------
    source : Source
    rows : int64, shape (n,)
        In the order of the feature set.
    measured : bool, shape (n,)
    """

    def __init__(self, source: Source, rows: NDArray[np.int64], measured: NDArray[np.bool_]) -> None:
        self.windows: Windows = windows_of([source], [rows])
        self.x = np.take(source.features.x, rows, axis=0)
        self.at = np.flatnonzero(measured)
        y = source.features.y[rows][:, : len(RESOURCES), HORIZONS_S.index(HORIZON_S)].astype(np.float64)
        self.target = np.where(self.windows.limit > 0, y, np.nan)
        granted = np.where(self.windows.limit > 0, self.windows.limit, np.nan)
        self.mean_limit = tuple(float(np.nanmean(of)) if np.isfinite(of).any() else np.nan for of in granted.T)
        self.limit = np.where(np.isfinite(self.target), self.windows.limit, np.nan)[self.at]
        self.inside = source.features.inside[rows][:, HORIZONS_S.index(HORIZON_S)]
        self.task = np.unique(source.features.first[rows], return_inverse=True)[1][self.at]

    def shares(self, reservation: Floats, r: int) -> dict[str, float]:
        """Return what measured rows reclaim and violate, of one resource."""
        limit = self.windows.limit[self.at]
        return {
            "reclaimed": float(reclaimed_share(reservation, self.limit)[r]),
            "violation": float(violation_share(reservation, limit, self.target[self.at])[r]),
        }

    def known_before(self, rows: NDArray[np.int64]) -> Floats:
        """Return the targets of rows that rest on nothing measured after their period."""
        return np.where(self.inside[rows, None], self.target[rows], np.nan)


def first_days(source: Source, days: float) -> Rows:
    """Return the first days of a record, every row measured whose target is known."""
    features = source.features
    rows = np.flatnonzero(features.end_us < int(features.manifest["span_us"][0] + days * _DAY_US))
    return Rows(source, rows, np.ones(len(rows), np.bool_))


def warm(source: Source) -> Rows:
    """Return the validation and the test period of some tasks, of which the second is measured."""
    features = source.features
    task = np.unique(features.first, return_inverse=True)[1]
    step = -(-(int(task.max()) + 1) // MOST_TASKS)
    rows = np.flatnonzero((features.period != 0) & (task % step == 0))
    return Rows(source, rows, features.period[rows] == TEST)


def statistics(rows: Rows) -> dict[str, Answers]:
    """Return the answers of the five statistics, from the features."""
    found: dict[str, Answers] = {}
    for name in STATISTICS:
        share = rows.x[:, [AT[f"{resource}_{name}"] for resource in RESOURCES]].astype(np.float64)
        found[name] = Widened.alike(Estimate(share * rows.windows.limit, np.full(share.shape, STATISTIC, np.uint8)))
    return found


def online(answers: Answers, rows: Rows, settings: Any, **how: Any) -> Mapping[str, Floats]:
    """Return what is reserved of the measured rows hour by hour."""
    held = OnlineMargins(settings, Budgets(), HORIZON_S, **how).hold(rows.windows.task_numbers(), answers, rows.windows)
    return {name: of[rows.at] for name, of in held.items()}


def measure(rows: Rows, model: Bundle, began_us: int, trained: Bundle | None = None) -> list[dict[str, Any]]:
    """Return the lines of one period, one for each resource and margin."""
    answers = answer_folded(model.bare_estimator(horizon_s=HORIZON_S, mean_limit=rows.mean_limit), rows.x, rows.windows)
    held: dict[str, Mapping[str, Floats]] = {
        "service": online(answers, rows, model.prices, own=True, since_us=began_us),
        "own": online(answers, rows, model.prices, own=True, since_us=began_us - 30 * _DAY_US, rate=_STILL),
    }
    swept = SweptPeriod.of_rows(
        rows.windows, rows.target, rows.at, rows.task, Budgets(), Bootstrap(DRAWS, seed=1, confidence=0.95)
    )
    equal = {"hindsight": swept.reclaimed(answers)}
    of_statistics = {name: swept.reclaimed(of) for name, of in statistics(rows).items()}
    if trained is not None:
        estimator = trained.bare_estimator(horizon_s=HORIZON_S, mean_limit=rows.mean_limit)
        theirs = answer_folded(estimator, rows.x, rows.windows)
        before = np.setdiff1d(np.arange(len(rows.windows)), rows.at)
        set_there = calibrate(theirs.take(before), rows.windows.take(before), rows.known_before(before), Budgets())
        held["trained"] = online(theirs, rows, set_there.settings)
        equal["trained_hindsight"] = swept.reclaimed(theirs)
    demand = needed(rows.target[rows.at], rows.windows.limit[rows.at])
    lines = []
    for margin in MARGINS:
        for r, resource in enumerate(RESOURCES):
            if not np.isfinite(rows.target[rows.at][:, r]).any():
                continue
            budget = asdict(Budgets())[margin]
            best = max(STATISTICS, key=lambda name: float(np.nan_to_num(of_statistics[name][margin][0, r], nan=-1.0)))
            at_budget = EqualViolation(
                {name: of[margin] for name, of in (equal | {"statistic": of_statistics[best]}).items()}, 0.95
            )
            line: dict[str, Any] = {"resource": resource, "budget": budget, "statistic_is": best}
            line |= {name: rows.shares(of[margin], r) for name, of in held.items()}
            line |= {
                name: {"reclaimed": float(of[0, r]), "violation": budget} for name, of in at_budget.reclaimed.items()
            }
            line["oracle"] = float(reclaimed_share(demand, rows.limit)[r])
            line["rows"] = int(np.isfinite(rows.target[rows.at][:, r]).sum())
            gained = {
                name: at_budget.compare("hindsight", name, r).difference.reclaimed
                for name in ("statistic", "trained_hindsight")
                if name in at_budget.reclaimed
            }
            line["hindsight_less"] = {name: [of.value, of.low, of.high] for name, of in gained.items()}
            lines.append(line)
    return lines


def main() -> None:
    """Train, measure, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("datasets", type=Path, nargs="+", metavar="DATASET")
    parser.add_argument("--family", action="append", default=[], metavar="NAME=NAME", help="Of the same cluster.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "builtin.json")
    parser.add_argument("--markdown", action="store_true", help="Print the table.")
    asked = parser.parse_args()
    names = {path.resolve().name for path in asked.datasets}
    for pair in asked.family:
        if len(of := pair.split("=")) != 2 or not names.issuperset(of):
            parser.error(f"--family {pair}: expected NAME=NAME of the datasets {', '.join(sorted(names))}")
    started = time.perf_counter()
    sources = {source.name: source for source in open_sources(asked.datasets)}
    for source in sources.values():
        source.features.check_whole()
    families = [set(pair.split("=")) for pair in asked.family]
    results: dict[str, Any] = {
        **made_by("python -m benchmarks.builtin " + " ".join(path.name for path in asked.datasets)
        + "".join(f" --family {pair}" for pair in asked.family)),
        "seed": asked.seed,
        "horizon_s": HORIZON_S, "datasets": {},
    }  # fmt: skip
    if asked.out.is_file() and (before := json.loads(asked.out.read_text()))["command"] == results["command"]:
        results["datasets"] = before["datasets"]  # one that was ended goes on
    for path in asked.datasets:
        name = path.resolve().name
        if name in results["datasets"]:
            continue
        kin = {name}.union(*(family for family in families if name in family))
        others = [source for other, source in sources.items() if other not in kin]
        source, model = sources[name], portable(others, asked.seed)
        began_us = int(source.features.manifest["span_us"][0])
        results["datasets"][name] = {
            "fingerprint": source.dataset.fingerprint,
            "trained_on": [other.name for other in others],
            "first_day": measure(first_days(source, 1), model, began_us),
            "four_days": measure(first_days(source, 4), model, began_us),
            "warm": measure(warm(source), model, began_us, network_of(source, asked.seed)),
        }
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        asked.out.write_text(json.dumps(results, indent=1) + "\n")
        print(name, f"{time.perf_counter() - started:.0f} s", flush=True)
    if asked.markdown:
        print("\n".join(markdown(results)))


def markdown(results: Mapping[str, Any]) -> list[str]:
    """Return the tables of the page: reclaimed share of the limits, and violation in multiples of the budget."""
    out = []
    for period, title in (("first_day", "First 24 hours"), ("four_days", "First four days"), ("warm", "Test period")):
        columns = ["statistic", "hindsight", "own", "service", *(["trained"] if period == "warm" else [])]
        others = {"statistic": "statistic"} | ({"trained": "trained_hindsight"} if period == "warm" else {})
        out += [
            "",
            f"**{title}**",
            "",
            "| " + " | ".join(["left out", "budget", *columns, *(f"hindsight less {name}" for name in others)]) + " |",
        ]
        out += ["|---|--:|" + "--:|" * (len(columns) + len(others))]
        for name, of in results["datasets"].items():
            for line in of[period]:
                cells = []
                for column in columns:
                    shares = line[column]
                    kept = f" at {shares['violation'] / line['budget']:.2f}" if column in columns[2:] else ""
                    cells.append(f"{shares['reclaimed']:.1%}{kept}".replace("%", " %"))
                for other in others.values():
                    less = line["hindsight_less"][other]
                    cells.append(f"{100 * less[0]:+.1f} [{100 * less[1]:.1f}, {100 * less[2]:.1f}]")
                what = f"{name} {line['resource']}"
                out.append(f"| {what} | {100 * line['budget']:g} % | " + " | ".join(cells) + " |")
    return out


if __name__ == "__main__":
    main()
