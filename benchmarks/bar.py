"""Measures the share that every estimator reclaims of a dataset at equal violation, next to network and oracle.

    python -m benchmarks.bar DATASET --work FOLDER --markdown
    python -m benchmarks.bar DATASET --work FOLDER --transfer OTHER

The dataset has its features built. One network, for all horizons, is trained with the default settings and kept in the
work folder, so that a second call only measures. `--horizon` and `--rivals` measure less. With `--transfer` the network
trained on DATASET is measured on OTHER, its prices set on OTHER's validation rows, next to one trained there. With
`--trees` the boosted trees are trained, for one hour, and measured next to it, alone and mixed with the network (the
mean of both curves): minutes per 100,000 rows.

Every estimator has one free number per resource, horizon and budget: the price of a violation, or a margin. It is set
in three ways:

- on the validation rows, as in service. Where the load drifts, violations on the test rows differ from the budget, and
  an estimator with more violations reclaims more: read both.
- online: from there it follows the workload (`training.margins.online`), so that violations stay near the
  budget.
- in hindsight, on the test rows themselves: where what is reclaimed at every number comes to the budget, as in the
  frontier (`replay.experiments.frontier`), again in each resample. No service can do this, but it favours all
  estimators alike and makes them comparable.

Every statistical estimator is measured twice: with settings chosen on the validation rows for each resource, horizon
and budget (`training.margins.tune`), and as published.

All is measured on the test rows, at a later time than anything that was trained or tuned on, and once more on those of
them that belong to unseen collections. Intervals draw whole collections with replacement; differences are paired. The
best statistical estimator is chosen on the test rows, of those that keep the budget (or exceed it by no more than the
noise) the one that reclaims most: the choice favours the statistical side. An estimator that exceeds the budget gets
that for a verdict, whatever it reclaims. Gap closed: network less best statistical, over oracle less best statistical.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks import made_by
from benchmarks.bar_tables import (
    BEST,
    BORG,
    BUDGETS,
    FIXED,
    HINDSIGHT,
    MIXED_IN,
    NETWORK,
    ONLINE,
    ORACLE,
    PUBLISHED,
    markdown,
)
from reclaim.data.schema import RESOURCES
from reclaim.data.windows import Windows
from reclaim.features.groups import AGES, age_key
from reclaim.features.splits import IN_ALLOC, TEST, TEST_UNSEEN, VALID
from reclaim.features.targets import HORIZONS_S
from reclaim.replay.equal_violation.curves import JudgedUnits, draw_curve
from reclaim.replay.equal_violation.sweep import Bare, Guards, TaskRows
from reclaim.replay.open_loop import metrics
from reclaim.replay.open_loop.bootstrap import bounds
from reclaim.replay.open_loop.estimates import CandidateFold
from reclaim.replay.open_loop.fold import fold_dataset
from reclaim.replay.open_loop.history import History, oracle, previous_rows, window_seconds
from reclaim.replay.open_loop.paired import RECLAIMED, USUAL, VIOLATION, Difference, Interval, Paired
from reclaim.replay.runs.unseen import judged_on
from reclaim.training.bundle import Bundle, load_bundle
from reclaim.training.estimators.base import Estimator, Forecast
from reclaim.training.estimators.registry import ESTIMATORS, build_estimator, candidates
from reclaim.training.fitting.sources import Source, open_sources
from reclaim.training.fitting.train import run_training
from reclaim.training.margins.answers import Answers, Setting
from reclaim.training.margins.calibrate import calibrate, guarded_reservations
from reclaim.training.margins.margin import Budgets
from reclaim.training.margins.online import OnlineMargins
from reclaim.training.margins.price import Price
from reclaim.training.margins.tune import TunedEstimator, tuning_facts
from reclaim.training.models.forecaster import ALL_HEADS, Forecaster
from reclaim.training.models.survival import forecast_of
from reclaim.training.settings import NO_PRIOR, TrainConfig
from reclaim.training.tracking import runs as tracking
from reclaim.training.tracking.client import sqlite_uri

TREES, MIX, LIMIT = "trees", "mix", "limit"
NAMES = tuple(name for name in ESTIMATORS if name != LIMIT)
STATISTICAL = (*NAMES, *(name + PUBLISHED for name in NAMES if len(candidates(name)) > 1))
LEAST_ROWS = 1_000
"""Rows of known target below which a horizon is left out: 0.1 % of fewer is less than one row."""

Found = dict[str, list[dict[str, Any]]]
"""Tables by name, as lists of lines."""
Sums = NDArray[np.float64]
"""Shape (n_units, n_ages, n_stats, n_resources): ``metrics.sums`` of the test rows."""
Key = tuple[str, str, str]
"""Setting, margin, estimator."""


@dataclass(frozen=True)
class Rows:
    """The rows of a history that margins are set on, those that are measured, and the collection of each of these."""

    history: History
    valid: NDArray[np.int64]
    test: NDArray[np.int64]
    unit: NDArray[np.int64]
    unseen: NDArray[np.bool_]

    def known(self, r: int) -> dict[str, int]:
        """Return how many rows of a resource have a known target, and whether that is enough."""
        known = np.isfinite(self.history.target[:, r])
        valid, test = int(known[self.valid].sum()), int(known[self.test].sum())
        return {"valid": valid, "test": test, "measured": min(valid, test) >= LEAST_ROWS}


def main() -> None:
    """Train, measure, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", type=Path, metavar="DATASET")
    parser.add_argument("--transfer", type=Path, metavar="OTHER", help="Measure there what was trained on DATASET.")
    parser.add_argument("--prior", metavar="MODEL", help="Measure the network with this model mixed in, too.")
    parser.add_argument("--trees", action="store_true", help="Measure the trees, too, and the mean of both curves.")
    parser.add_argument("--horizon", type=int, choices=HORIZONS_S, metavar="S", help="Measure this horizon alone.")
    parser.add_argument("--rivals", nargs="+", choices=NAMES, default=NAMES, metavar="NAME", help="By default all.")
    parser.add_argument("--work", type=Path, required=True, help="Folder of the trained models, kept and used again.")
    parser.add_argument("--out", type=Path, help="By default benchmarks/results/bar-NAME.json.")
    parser.add_argument("--markdown", action="store_true", help="Print the tables.")
    arguments = parser.parse_args()
    horizons_s = HORIZONS_S if arguments.horizon is None else (arguments.horizon,)
    os.environ["MLFLOW_TRACKING_URI"] = sqlite_uri(arguments.work / "mlflow.db")
    started = time.perf_counter()
    (source,) = open_sources([arguments.transfer or arguments.dataset])
    (origin,) = open_sources([arguments.dataset])
    models = {NETWORK: train_model(source, "network")}
    if arguments.transfer:
        other = f"network of {name_of(origin)}"
        models[other] = train_model(origin, "network")
        pairs = [(NETWORK, BEST), (NETWORK, BORG), (other, BEST), (other, NETWORK)]
    else:
        pairs = [(NETWORK, BEST), (NETWORK, BORG)]
    if arguments.prior:
        models[MIXED_IN] = train_model(source, "network", arguments.prior)
        pairs += [(MIXED_IN, BEST), (MIXED_IN, NETWORK)]
    if arguments.trees:
        models[TREES] = train_model(source, "trees")
        network, trees = models[NETWORK], models[TREES].forecaster
        mix = Mix(network.forecaster, trees)
        models[MIX] = replace(network, forecaster=mix, held_out=network.held_out and Mix(network.held_out, trees))
        pairs += [(TREES, BEST), (MIX, BEST), (NETWORK, TREES), (MIX, NETWORK)]
    models = {name: judged_on(name, model, source.features) for name, model in models.items()}
    seconds: dict[str, float] = {}
    content = {
        **made_by(
            f"python -m benchmarks.bar {arguments.dataset.name}"
            + (f" --transfer {arguments.transfer.name}" if arguments.transfer else "")
            + (f" --prior {Path(arguments.prior).name}" if arguments.prior else "")
            + " --trees" * arguments.trees
            + (f" --horizon {arguments.horizon}" if arguments.horizon else "")
            + (f" --rivals {' '.join(arguments.rivals)}" if arguments.rivals != NAMES else "")
        ),
        "dataset": facts_of(source),
        "trained_on": facts_of(origin),
        "bootstrap": {**asdict(USUAL), "unit": "collection"},
        **_measure(source, models, pairs, horizons_s, arguments.rivals, seconds),
        "seconds": {name: round(s, 1) for name, s in seconds.items()} | {"all": round(time.perf_counter() - started)},
    }
    name = f"{name_of(origin)}-to-{name_of(source)}" if arguments.transfer else name_of(source)
    out = arguments.out or Path(__file__).parent / "results" / f"bar-{name}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
    if arguments.markdown:
        print("\n".join(markdown(content)))
    else:
        print(f"wrote {out}")


def name_of(source: Source) -> str:
    """Return the name of a dataset in files and tables."""
    return str(source.dataset.manifest.get("name", source.name)).replace("_", "-")


def facts_of(source: Source) -> dict[str, Any]:
    """Return what tells a dataset from others, for a file of results."""
    return {
        "name": name_of(source),
        "nature": source.dataset.manifest.get("nature", "not stated"),
        "fingerprint": source.dataset.fingerprint,
        "features_fingerprint": source.features.fingerprint,
        "windows": source.dataset.n_windows,
    }


def train_model(source: Source, estimator: str, prior: str = NO_PRIOR) -> Bundle:
    """Return the model of a dataset, trained if it is not in the store."""
    report = run_training(source.dataset.path, TrainConfig(estimator=estimator, prior=prior))
    return load_bundle(tracking.fetch_bundle(f"{report.model}/{report.version}")[0])


class Mix:
    """The mean of the curves of two forecasters."""

    heads = ALL_HEADS
    threads = 1

    def __init__(self, first: Forecaster, second: Forecaster) -> None:
        self.both = first, second
        self.quantile_levels = first.quantile_levels
        self.horizons_s = tuple(h for h in first.horizons_s if h in second.horizons_s)

    def predict(self, x: NDArray[np.float32], horizon_s: int | None = None) -> Forecast:
        """Return the mean."""
        one, other = (forecaster.predict(x, horizon_s) for forecaster in self.both)
        survival = np.float32(0.5) * (one.survival + other.survival)
        return forecast_of(survival, x, one.oom_probability, one.horizons_s, self.quantile_levels)

    def input_ranges(self) -> None:
        """Return None."""

    def save(self, folder: Path) -> None:
        """Keep nothing."""


def _measure(
    source: Source, models: Mapping[str, Bundle], pairs: list[tuple[str, str]], horizons_s: Sequence[int],
    names: Sequence[str], seconds: dict[str, float],
) -> dict[str, Any]:  # fmt: skip
    """Return the tables of one dataset."""
    fold = partial(fold_dataset, source.features, seconds=seconds)
    found: Found = {"rows": [], "estimators": [], "differences": [], "ages": []}
    by_horizon = {}
    for horizon_s in horizons_s:
        rows = rows_of(fold(horizon_s=horizon_s, makers={})[0])
        counts = [rows.known(r) for r in range(len(RESOURCES))]
        found["rows"] += [{"horizon_s": horizon_s, "resource": r} | c for r, c in zip(RESOURCES, counts, strict=True)]
        if any(c["measured"] for c in counts):
            by_horizon[horizon_s] = rows
    makers: dict[str, Callable[[], Estimator]] = {
        name if len(candidates(name)) == 1 else name + PUBLISHED: partial(build_estimator, name) for name in names
    }
    tried = CandidateFold.run(source.features, names, seconds)
    settings: dict[str, Any] = {}
    chosen = {horizon_s: tried.choose(horizon_s) for horizon_s in by_horizon}
    for name, horizon_s in product(tried.answers, by_horizon):
        tuning = chosen[horizon_s][name]
        makers[f"{name}@{horizon_s}"] = partial(TunedEstimator, name, tuning)
        settings[f"{name}@{horizon_s}"] = tuning_facts(tuning)
    del tried
    for name, model in models.items():
        for horizon_s in set(by_horizon) & set(model.forecaster.horizons_s):
            makers[f"{name}@{horizon_s}"] = partial(
                model.bare_estimator, horizon_s=horizon_s, mean_limit=source.features.mean_limit
            )
    answers = fold(horizon_s=horizons_s[0], makers=makers)[1]
    prices: dict[str, Any] = {}
    for horizon_s, rows in by_horizon.items():
        started = time.perf_counter()
        named = ((*name.partition("@")[::2], of) for name, of in answers.items())
        own = {name: of for name, at, of in named if at in ("", str(horizon_s))}
        sums, settings_of = _judge(rows, own, horizon_s)
        frontier = Frontier.of(rows, own)
        for name, of in settings_of.items():
            values = {margin: one.value for margin, one in of.items() if isinstance(one, Price)}
            prices |= {f"{name}@{horizon_s}": values} if values else {}
        for r, resource in enumerate(RESOURCES):
            at = {"horizon_s": horizon_s, "resource": resource}
            for kind, units in (("all", np.ones_like(rows.unseen)), ("unseen", rows.unseen)):
                if rows.known(r)["measured"] and units.sum() > 1:
                    here = at | {"collections": kind}
                    _compare({k: v[units] for k, v in sums.items()}, r, pairs, here, found)
                    _compare_equal(frontier, units, r, pairs, here, found)
        seconds[f"judge/{horizon_s}"] = time.perf_counter() - started
    return {"prices": prices, "settings": settings, **found}


def rows_of(history: History) -> Rows:
    """Return the rows to judge and those to set margins on: of tasks outside alloc instances."""
    outside = history.group != IN_ALLOC
    test = np.flatnonzero((history.period == TEST) & outside)
    collections, unit = np.unique(history.windows.collection_id[test], return_inverse=True)
    unseen = np.zeros(len(collections), np.bool_)
    unseen[unit] = history.group[test] == TEST_UNSEEN
    return Rows(history, np.flatnonzero((history.period == VALID) & outside), test, unit.astype(np.int64), unseen)


def _judge(
    rows: Rows, answers: Mapping[str, Answers], horizon_s: int
) -> tuple[dict[Key, Sums], dict[str, Mapping[str, Setting]]]:
    """Set every estimator's number in all ways; return the results on the test rows, and those set in validation."""
    history, budgets = rows.history, Budgets()
    windows = history.windows.take(rows.test)
    valid_windows, valid_target = history.windows.take(rows.valid), history.target[rows.valid]
    sums: dict[Key, Sums] = {}
    settings: dict[str, Mapping[str, Setting]] = {}
    slot = history.windows.task_numbers()
    for name, of in answers.items():
        settings[name] = calibrate(of.take(rows.valid), valid_windows, valid_target, budgets).settings
        fixed = guarded_reservations(of.take(rows.test), windows, settings[name])
        online = OnlineMargins(settings[name], budgets, horizon_s).hold(slot, of, history.windows)
        for margin in BUDGETS:
            sums[FIXED, margin, name] = _sums(fixed[margin], rows, windows)
            sums[ONLINE, margin, name] = _sums(online[margin][rows.test], rows, windows)
    for name, reservation in ((LIMIT, windows.limit), (ORACLE, oracle(history.take(rows.test)).reservation)):
        alike = _sums(reservation, rows, windows)
        sums |= {(way, margin, name): alike for way in (FIXED, ONLINE) for margin in BUDGETS}
    return sums, settings


@dataclass(frozen=True)
class Frontier:
    """Violations and reclaimed volume of every estimator at every number, by collection, and totals of these."""

    sweeps: Mapping[str, list[tuple[NDArray[np.float64], NDArray[np.float64]]]]
    totals: NDArray[np.float64]

    @classmethod
    def of(cls, rows: Rows, answers: Mapping[str, Answers]) -> Frontier:
        """Sweep the test rows."""
        history = rows.history
        guards, seconds = Guards.from_windows(history.windows), window_seconds(history.windows)
        swept = TaskRows.lay_out(rows.test, guards, history.target, seconds, rows.unit, len(rows.unseen))
        return cls({name: [swept.sweep(b) for b in Bare.of(of)] for name, of in answers.items()}, swept.totals())

    def reclaimed(self, units: NDArray[np.bool_], r: int) -> dict[str, NDArray[np.float64]]:
        """Return what some collections, then each resample of them, reclaim at each budget; (n_budgets, 1 + draws).

        Budgets are in the order of ``Budgets``, and `oracle` violates nothing.
        """
        judged = JudgedUnits.from_totals(self.totals[units][..., r], astuple(Budgets()), USUAL)
        drawn = USUAL.sums(np.stack([judged.oracle, judged.granted], axis=1))
        return {
            name: draw_curve([(v[units][..., r], spared[units][..., r]) for v, spared in sweeps], judged).at
            for name, sweeps in self.sweeps.items()
        } | {ORACLE: np.tile(drawn[:, 0] / drawn[:, 1], (len(judged.rates), 1))}


def _sums(reservation: NDArray[np.float64], rows: Rows, windows: Windows) -> Sums:
    history, n_ages = rows.history, len(AGES)
    scored = metrics.Scored(
        target=history.target[rows.test],
        next_target=history.next_target[rows.test],
        reservation=reservation,
        limit=windows.limit,
        duration_s=(windows.end_us - windows.start_us) / 1e6,
        previous=previous_rows(windows),
    )
    key = rows.unit * n_ages + age_key(history.known_s[rows.test])
    flat = metrics.sums(scored, key, len(rows.unseen) * n_ages)
    return flat.reshape(len(rows.unseen), n_ages, *flat.shape[1:])


def _compare(
    sums: Mapping[Key, Sums], r: int, pairs: list[tuple[str, str]], at: Mapping[str, Any], found: Found
) -> None:
    """Add the estimators' reclaimed shares of one resource, and their differences, to the tables."""
    for setting, (margin, budget) in product((FIXED, ONLINE), BUDGETS.items()):
        here = {**at, "budget": budget, "margin_set": setting}
        units = {name: s.sum(axis=1) for (where, m, name), s in sums.items() if (where, m) == (setting, margin)}
        paired = Paired(units)
        for name in units:
            numbers = _numbers(paired.difference(name, LIMIT, r))  # which reclaims and violates nothing
            found["estimators"].append(here | {"estimator": name} | numbers)
        rivals = [name for name in STATISTICAL if name in units]
        limit = Budgets().of(margin)
        best = {name: paired.best_against(name, rivals, r, limit) or BORG for name, _ in pairs if name in units}
        for name, against in pairs:
            other = best.get(name, "") if against == BEST else against
            if name not in units or other not in units:
                continue
            compared = paired.compare(name, other, r, limit)
            difference = compared.difference
            line = here | {"estimator": name, "against": against, "opponent": other, "verdict": compared.verdict}
            line |= {"reclaims": [_number(paired.value(n, r)) for n in (name, other, ORACLE)]} | _numbers(difference)
            if against == BEST:
                gap = paired.value(ORACLE, r) - paired.value(other, r)
                line["gap_closed"] = _number(difference.reclaimed.value / gap if gap > 0 else np.nan)
            found["differences"].append(line)
        for a, age in enumerate(AGES) if (setting, at["collections"]) == (FIXED, "all") else ():
            young = {name: sums[setting, margin, name][:, a].sum(axis=0) for name in (BORG, best[NETWORK], NETWORK)}
            line = here | {"age": age, "task_windows": int(young[NETWORK][metrics.POSITION["rows"], r])}
            for name, of_age in young.items():
                values = metrics.evaluate(of_age)
                line[name] = {m: _number(values[m][r]) for m in (RECLAIMED, VIOLATION)}
            if line["task_windows"]:
                oracle_share = _number(values["oracle_reclaimed_share"][r])
                found["ages"].append(line | {"best": best[NETWORK], ORACLE: oracle_share})


def _compare_equal(
    frontier: Frontier, units: NDArray[np.bool_], r: int, pairs: list[tuple[str, str]], at: Mapping[str, Any],
    found: Found,
) -> None:  # fmt: skip
    """Add the same at equal violation."""
    every = frontier.reclaimed(units, r)
    for k, (margin, rate) in enumerate(asdict(Budgets()).items()):
        here = {**at, "budget": BUDGETS[margin], "margin_set": HINDSIGHT}
        reclaimed = {name: of[k] for name, of in every.items()}
        found["estimators"] += [here | {"estimator": name} | _equal(of, rate) for name, of in reclaimed.items()]
        rivals = [name for name in STATISTICAL if name in reclaimed and np.isfinite(reclaimed[name][0])]
        best = max(rivals, key=lambda name: float(reclaimed[name][0]), default=BORG)
        for name, against in pairs:
            other = best if against == BEST else against
            if name not in reclaimed or other not in reclaimed:
                continue
            three = [float(reclaimed[n][0]) for n in (name, other, ORACLE)]
            numbers = _equal(reclaimed[name] - reclaimed[other], 0.0)
            line = here | {"estimator": name, "against": against, "opponent": other}
            interval = Interval(*(np.nan if v is None else v for v in numbers[RECLAIMED]))
            line |= {"verdict": interval.verdict, "reclaims": list(map(_number, three))} | numbers
            if against == BEST:
                gap = three[2] - three[1]
                line["gap_closed"] = _number((three[0] - three[1]) / gap if gap > 0 else np.nan)
            found["differences"].append(line)


def _equal(values: NDArray[np.float64], violation: float) -> dict[str, list[float | None]]:
    """Return a value with the bounds of its interval, and the violation, which is known."""
    interval = (values[0], *bounds(values[1:], USUAL.confidence))
    return {RECLAIMED: [_number(v) for v in interval], VIOLATION: [violation] * 3}


def _numbers(difference: Difference) -> dict[str, list[float | None]]:
    """Return value, lower and upper bound of both."""
    both = {RECLAIMED: difference.reclaimed, VIOLATION: difference.violation}
    return {name: [_number(i.value), _number(i.low), _number(i.high)] for name, i in both.items()}


def _number(value: float | np.floating[Any]) -> float | None:
    return round(float(value), 6) if np.isfinite(value) else None


if __name__ == "__main__":
    main()
