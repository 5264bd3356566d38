"""Measures what every estimator reclaims of a dataset at equal violation, beside the network and the oracle.

    python benchmarks/bar.py DATASET --work FOLDER --markdown
    python benchmarks/bar.py DATASET --work FOLDER --transfer OTHER --out benchmarks/results/bar-transfer.json

The dataset has its features built. One network, for all horizons, and the trees, for one hour, are trained with the
default settings and kept in the work folder, so that a second call only measures. With `--transfer` the network trained
on DATASET is measured on OTHER, its plans and margins chosen on OTHER's validation rows, beside one trained there.

Every estimator is one free number per resource, horizon and budget: its margin. It is set twice:

- on the validation rows, as in service. Where the load drifts, what is violated on the test rows is not the budget, and
  who violates more reclaims more: both must be read.
- in hindsight, on the test rows themselves: the narrowest with which exactly the budget is violated. Nobody can do
  this, but it is the same favour to all, and makes them comparable.

All is measured on the test rows, at a later time than anything that was trained or tuned on, and once more on those of
them that belong to unseen collections. Intervals draw whole collections with replacement; differences are paired. The
best statistical estimator is chosen on the test rows, of those that do not violate more than the network (beyond the
noise) the one that reclaims most: the choice favours the statistical side. Gap closed: network less best statistical,
over oracle less best statistical.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from bar_tables import BEST, BORG, BUDGETS, NETWORK, ORACLE, SETTINGS, markdown
from numpy.typing import NDArray

from reclaim.data.schema import RESOURCES
from reclaim.data.windows import Windows
from reclaim.features.splits import IN_ALLOC, TEST, TEST_UNSEEN, VALID
from reclaim.features.targets import HORIZONS_S
from reclaim.replay import metrics
from reclaim.replay.fold import Bases, fold_dataset
from reclaim.replay.openloop import History, oracle
from reclaim.replay.paired import CONFIDENCE, DRAWS, RECLAIMED, SEED, VIOLATION, Paired
from reclaim.training import tracking
from reclaim.training.bundle import Bundle, load_bundle
from reclaim.training.calibrate import calibrate, choose_best, guarded_reservations
from reclaim.training.estimators.base import Estimator
from reclaim.training.estimators.registry import ESTIMATORS, build_estimator
from reclaim.training.heldout import HeldOut, choose_plans, held_out
from reclaim.training.settings import TrainConfig
from reclaim.training.sources import Source, open_sources
from reclaim.training.train import run_training

ONE_LEVEL, TREES, LIMIT = "network, one level", "trees", "limit"
STATISTICAL = tuple(name for name in ESTIMATORS if name != LIMIT)
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
    parser.add_argument("--work", type=Path, required=True, help="Folder of the trained models, kept and used again.")
    parser.add_argument("--out", type=Path, help="By default benchmarks/results/bar-NAME.json, of the dataset's name.")
    parser.add_argument("--markdown", action="store_true", help="Print the tables.")
    arguments = parser.parse_args()
    os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{(arguments.work / 'mlflow.db').absolute()}"
    started = time.perf_counter()
    (source,) = open_sources([arguments.transfer or arguments.dataset])
    (origin,) = open_sources([arguments.dataset])
    models = {NETWORK: _train(source, "network")}
    if arguments.transfer:
        other = f"network of {_name(origin)}"
        models[other] = _train(origin, "network")
        pairs = [(NETWORK, BEST), (other, BEST), (other, NETWORK)]
    else:
        models[TREES] = _train(source, "trees")
        pairs = [(NETWORK, BEST), (TREES, BEST), (NETWORK, TREES), (NETWORK, ONE_LEVEL)]
    seconds: dict[str, float] = {}
    content = {
        "command": f"python benchmarks/bar.py {arguments.dataset.name}"
        + (f" --transfer {arguments.transfer.name}" if arguments.transfer else ""),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "device": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "versions": {name: version(name) for name in ("reclaim", "torch", "scikit-learn", "numpy", "numba")},
        "dataset": _facts(source),
        "trained_on": _facts(origin),
        "bootstrap": {"draws": DRAWS, "seed": SEED, "confidence": CONFIDENCE, "unit": "collection"},
        **_measure(source, models, pairs, seconds),
        "seconds": {name: round(s, 1) for name, s in seconds.items()} | {"all": round(time.perf_counter() - started)},
    }
    out = arguments.out or Path(__file__).parent / "results" / f"bar-{_name(source)}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
    if arguments.markdown:
        print("\n".join(markdown(content)))
    else:
        print(f"wrote {out}")


def _name(source: Source) -> str:
    return str(source.dataset.manifest.get("name", source.name)).replace("_", "-")


def _facts(source: Source) -> dict[str, Any]:
    return {
        "name": _name(source),
        "nature": source.dataset.manifest.get("nature", "not stated"),
        "fingerprint": source.dataset.fingerprint,
        "features_fingerprint": source.features.fingerprint,
        "windows": source.dataset.n_windows,
    }


def _train(source: Source, estimator: str) -> Bundle:
    """Return the model of a dataset, trained if it is not in the store."""
    report = run_training(source.dataset.path, TrainConfig(estimator=estimator))
    return load_bundle(tracking.fetch_bundle(f"{report.model}/{report.version}")[0])


def _at_horizon(bundle: Bundle, valid: HeldOut, horizon_s: int) -> Bundle:
    """Return the model with the plans that reclaim most of the validation rows at a horizon."""
    config = TrainConfig(estimator=bundle.kind, horizon_s=horizon_s)
    plans, calibration = choose_plans(valid, bundle.forecaster.quantile_levels, config)
    return replace(bundle, horizon_s=horizon_s, plans=plans, margins=calibration.margins)


def _one_level(bundle: Bundle, valid: HeldOut, horizon_s: int) -> Bundle:
    """Return the model that reserves one level for all tasks, per resource and budget the best one there is."""
    levels = bundle.forecaster.quantile_levels
    config = TrainConfig(estimator=bundle.kind, horizon_s=horizon_s)
    tried = {level: choose_plans(valid, levels, replace(config, level=level)) for level in levels}
    plans = {}
    for margin in BUDGETS:
        best = choose_best({level: calibration for level, (_, calibration) in tried.items()}, margin)
        plans[margin] = tuple(tried[level][0][margin][r] for r, level in enumerate(best))
    return replace(bundle, horizon_s=horizon_s, plans={name: plans[name] for name in bundle.plans})


def _measure(
    source: Source, models: Mapping[str, Bundle], pairs: list[tuple[str, str]], seconds: dict[str, float]
) -> dict[str, Any]:
    """Return the tables of one dataset."""
    fold = partial(fold_dataset, source.dataset, source.features, seconds=seconds, progress=True)
    found: Found = {"rows": [], "estimators": [], "differences": [], "ages": []}
    by_horizon = {}
    for horizon_s in HORIZONS_S:
        rows = _rows(fold(horizon_s=horizon_s, makers={})[0])
        counts = [rows.known(r) for r in range(len(RESOURCES))]
        found["rows"] += [{"horizon_s": horizon_s, "resource": r} | c for r, c in zip(RESOURCES, counts, strict=True)]
        if any(c["measured"] for c in counts):
            by_horizon[horizon_s] = rows
    makers: dict[str, Callable[[], Estimator]] = {name: partial(build_estimator, name) for name in STATISTICAL}
    plans: dict[str, Any] = {}
    for name, model in models.items():
        valid = held_out([source], model.forecaster, [source.features.valid_rows()], "valid")
        for horizon_s in set(by_horizon) & set(model.forecaster.horizons_s):
            learned = {name: _at_horizon(model, valid, horizon_s)}
            if (name, ONE_LEVEL) in pairs:
                learned[ONE_LEVEL] = _one_level(model, valid, horizon_s)
            for called, bundle in learned.items():
                makers[f"{called}@{horizon_s}"] = partial(bundle.bare_estimator, mean_limit=source.features.mean_limit)
                plans[f"{called}@{horizon_s}"] = {k: [vars(b) for b in plan] for k, plan in bundle.plans.items()}
    del valid
    bases = fold(horizon_s=HORIZONS_S[0], makers=makers)[1]
    for horizon_s, rows in by_horizon.items():
        started = time.perf_counter()
        own = {name.partition("@")[0]: b for name, b in bases.items() if name.partition("@")[2] in ("", str(horizon_s))}
        sums = _judge(rows, own)
        for r, resource in enumerate(RESOURCES):
            at = {"horizon_s": horizon_s, "resource": resource}
            for kind, units in (("all", np.ones_like(rows.unseen)), ("unseen", rows.unseen)):
                if rows.known(r)["measured"] and units.sum() > 1:
                    _compare({k: v[units] for k, v in sums.items()}, r, pairs, at | {"collections": kind}, found)
        seconds[f"judge/{horizon_s}"] = time.perf_counter() - started
    return {"plans": plans, **found}


def _rows(history: History) -> Rows:
    outside = history.group != IN_ALLOC
    test = np.flatnonzero((history.period == TEST) & outside)
    collections, unit = np.unique(history.windows.collection_id[test], return_inverse=True)
    unseen = np.zeros(len(collections), np.bool_)
    unseen[unit] = history.group[test] == TEST_UNSEEN
    return Rows(history, np.flatnonzero((history.period == VALID) & outside), test, unit.astype(np.int64), unseen)


def _judge(rows: Rows, bases: Mapping[str, Bases]) -> dict[Key, Sums]:
    """Set every estimator's margins twice, and return what becomes of the test rows."""
    history = rows.history
    windows, target = history.windows.take(rows.test), history.target[rows.test]
    valid_windows, valid_target = history.windows.take(rows.valid), history.target[rows.valid]
    sums: dict[Key, Sums] = {}
    for name, both in bases.items():
        of_test = {margin: base.take(rows.test) for margin, base in both.items()}
        of_valid = {margin: base.take(rows.valid) for margin, base in both.items()}
        calibrations = (calibrate(of_valid, valid_windows, valid_target), calibrate(of_test, windows, target))
        for setting, calibration in zip(SETTINGS, calibrations, strict=True):
            held = guarded_reservations(of_test, windows, calibration.margins)
            sums |= {(setting, margin, name): _sums(held[margin], rows, windows) for margin in BUDGETS}
    for name, reservation in ((LIMIT, windows.limit), (ORACLE, oracle(history.take(rows.test)).reservation)):
        fixed = _sums(reservation, rows, windows)
        sums |= {(setting, margin, name): fixed for setting in SETTINGS for margin in BUDGETS}
    return sums


def _sums(reservation: NDArray[np.float64], rows: Rows, windows: Windows) -> Sums:
    history, n_ages = rows.history, len(metrics.AGES)
    with np.errstate(divide="ignore", invalid="ignore"):
        scored = metrics.Scored(
            target=history.target[rows.test],
            next_target=history.next_target[rows.test],
            reservation=reservation / windows.limit,
            limit=windows.limit,
            duration_s=(windows.end_us - windows.start_us) / 1e6,
        )
    key = rows.unit * n_ages + metrics.age_key(history.known_s[rows.test])
    flat = metrics.sums(scored, key, len(rows.unseen) * n_ages)
    return flat.reshape(len(rows.unseen), n_ages, *flat.shape[1:])


def _compare(
    sums: Mapping[Key, Sums], r: int, pairs: list[tuple[str, str]], at: Mapping[str, Any], found: Found
) -> None:
    """Add to the tables what the estimators reclaim of one resource, and by how much they differ."""
    for setting, (margin, budget) in product(SETTINGS, BUDGETS.items()):
        here = {**at, "budget": budget, "margin_set": setting}
        units = {name: s.sum(axis=1) for (where, m, name), s in sums.items() if (where, m) == (setting, margin)}
        for name, of_units in units.items():
            values = metrics.evaluate(of_units.sum(axis=0))
            bounds = metrics.bootstrap(of_units, draws=DRAWS, seed=SEED, confidence=CONFIDENCE)
            numbers = {m: _interval(values[m][r], *bounds[m][:, r]) for m in (RECLAIMED, VIOLATION)}
            found["estimators"].append(here | {"estimator": name} | numbers)
        paired = Paired(units)
        best = {name: paired.best_against(name, STATISTICAL, r) or BORG for name, against in pairs if name in units}
        for name, against in pairs:
            other = best.get(name, "") if against == BEST else against
            if name not in units or other not in units:
                continue
            found_out = paired.difference(name, other, r)
            with np.errstate(divide="ignore", invalid="ignore"):
                gap = np.divide(found_out.reclaimed.value, paired.value(ORACLE, r) - paired.value(other, r))
            found["differences"].append(
                here
                | {"estimator": name, "against": against, "opponent": other, "verdict": found_out.verdict}
                | {"reclaims": [_number(paired.value(n, r)) for n in (name, other, ORACLE)]}
                | {RECLAIMED: _interval(*vars(found_out.reclaimed).values())}
                | {VIOLATION: _interval(*vars(found_out.violation).values())}
                | ({"gap_closed": _number(gap)} if against == BEST else {})
            )
        for a, age in enumerate(metrics.AGES):
            young = {name: sums[setting, margin, name][:, a].sum(axis=0) for name in (BORG, best[NETWORK], NETWORK)}
            rows = int(young[NETWORK][metrics.POSITION["rows"], r])
            if rows and at["collections"] == "all" and setting == "validation":
                line = here | {"age": age, "task_windows": rows, "best": best[NETWORK]}
                for name, of_age in young.items():
                    values = metrics.evaluate(of_age)
                    line[name] = {m: _number(values[m][r]) for m in (RECLAIMED, VIOLATION)}
                found["ages"].append(line | {ORACLE: _number(values["oracle_reclaimed_share"][r])})


def _interval(value: float, low: float, high: float) -> list[float | None]:
    return [_number(value), _number(low), _number(high)]


def _number(value: float | np.floating[Any]) -> float | None:
    return round(float(value), 6) if np.isfinite(value) else None


if __name__ == "__main__":
    main()
