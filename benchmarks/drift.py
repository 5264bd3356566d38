"""Changes a cell's workload on purpose in its test period, and shows how fast prices that follow keep their budgets.

    python benchmarks/drift.py CELL --model NAME@ALIAS --work WORK --out benchmarks/results/drift

CELL is a dataset with features whose model was trained on the periods before the test, such as a composed cell of 30
machines and 14 days with ``--set split.train_share=0.4 --set split.valid_share=0.2``. Two days into the test one of
three changes begins; each is written as a dataset of its own below WORK, with features built afresh:

usage
    What every task uses grows by half within a day, up to its limit.
kind
    Tasks of a kind that was never seen arrive within half a day: copies of a fifth of the collections that run then,
    under new names. They use 15 % of their limit, and about every four hours 60 to 95 % of it for an hour.
limits
    Every limit is halved at once. What is used is cut off at it.

Written are ``OUT.json`` and ``OUT.svg``: the violation of every six hours as a multiple of the budget, at prices set on
the validation rows and at prices that follow, and after how long the latter keep the budget again: the first moment
from which a whole day's violation lies between 0.8 and 1.25 times the budget.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from matplotlib.figure import Figure
from numpy.typing import NDArray

from reclaim.data import schema as s
from reclaim.data.core.files import replaced_folder
from reclaim.data.core.style import RESOURCE_TITLES, STYLE
from reclaim.data.dataset import Dataset
from reclaim.data.schema import RESOURCES
from reclaim.features.build import FeatureConfig, build_features
from reclaim.features.feature_set import FeatureSet
from reclaim.features.splits import SplitConfig
from reclaim.replay.experiment import Source
from reclaim.replay.experiments.margins.following import WITHIN, follow
from reclaim.replay.open_loop.estimates import Estimates, estimate_all
from reclaim.replay.open_loop.rows import ratio
from reclaim.replay.settings import ReplayConfig
from reclaim.training.bundle import load_model
from reclaim.training.margins.violation import needed, violates

_HOUR_US: Final = 3_600_000_000
_DAY_US: Final = 24 * _HOUR_US
_BEFORE_US: Final = 2 * _DAY_US
"""Time in the test period before the change."""
_PART_H: Final = 6
_NEW: Final = 2**50
"""Added to the number of a collection that is copied."""
_SHARE: Final = 0.2
"""Share of the collections that are copied."""
_CPU: Final = (s.CPU_MEAN, s.CPU_MAX, s.CPU_SAMPLE, s.CPU_PERCENTILES, s.CPU_TAIL_PERCENTILES)
_MEMORY: Final = (s.MEMORY_MEAN, s.MEMORY_MAX, s.PAGE_CACHE)
_MODEL: Final = "network"

Columns = dict[str, Any]
"""Columns of a bucket of usage: arrays, (n,), or (n, k) of percentiles."""


def usage_grows(columns: Columns, change_us: int, _: np.random.Generator) -> Columns:
    """Return the windows with half as much usage again, reached within a day."""
    factor = 1 + 0.5 * np.clip((columns[s.END_US] - change_us) / _DAY_US, 0, 1)
    return columns | dict(_used(columns, factor))


def a_kind_arrives(columns: Columns, change_us: int, rng: np.random.Generator) -> Columns:
    """Return the windows with those of new tasks among them."""
    later = columns[s.START_US] >= change_us
    running = np.unique(columns[s.COLLECTION_ID][later])
    copied = running[rng.random(len(running)) < _SHARE]
    delay_us = dict(zip(copied.tolist(), rng.integers(0, 12 * 12, len(copied)) * 300_000_000, strict=True))
    began_us = np.array([change_us + delay_us.get(c, 0) for c in columns[s.COLLECTION_ID].tolist()])
    rows = np.flatnonzero(np.isin(columns[s.COLLECTION_ID], copied) & (columns[s.START_US] >= began_us))
    new: Columns = {name: values[rows] for name, values in columns.items()}
    new[s.COLLECTION_ID] = new[s.COLLECTION_ID] + _NEW
    task = np.stack([new[s.COLLECTION_ID], new[s.INSTANCE_INDEX]])
    _, first, number = np.unique(task, axis=1, return_index=True, return_inverse=True)
    new[s.SCHEDULED_US] = new[s.START_US][first][number.reshape(-1)]
    # an hour of twelve windows at random, of each task by itself
    hour = number.reshape(-1) * 100_000 + new[s.START_US] // _HOUR_US
    _, hour = np.unique(hour, return_inverse=True)
    bursts = rng.random(hour.max(initial=0) + 1) < 0.25
    share = np.where(bursts[hour], rng.uniform(0.6, 0.95, len(bursts))[hour], 0.15)
    for names, limit in ((_CPU, s.CPU_LIMIT), (_MEMORY, s.MEMORY_LIMIT)):
        for name in names:
            level = share * new[limit]
            new[name] = np.broadcast_to(level if new[name].ndim == 1 else level[:, None], new[name].shape).copy()
    joined = {name: np.concatenate([columns[name], new[name]]) for name in columns}
    order = np.lexsort((joined[s.START_US], joined[s.INSTANCE_INDEX], joined[s.COLLECTION_ID]))
    return {name: values[order] for name, values in joined.items()}


def limits_are_halved(columns: Columns, change_us: int, _: np.random.Generator) -> Columns:
    """Return the windows with half the limit from the change on, and no more usage than that."""
    half = np.where(columns[s.END_US] > change_us, 0.5, 1.0)
    changed = columns | {name: columns[name] * half for name in (s.CPU_LIMIT, s.MEMORY_LIMIT, s.MEMORY_ASSIGNED)}
    return changed | dict(_used(changed, np.ones(len(half)), cut=half < 1))


CHANGES: Final[Mapping[str, Callable[[Columns, int, np.random.Generator], Columns]]] = {
    "usage": usage_grows, "kind": a_kind_arrives, "limits": limits_are_halved,
}  # fmt: skip
_TITLES: Final = {
    "usage": "Usage grows by half within a day", "kind": "A new kind of task arrives", "limits": "Limits are halved",
}  # fmt: skip


def _used(
    columns: Columns, factor: NDArray[np.float64], cut: NDArray[np.bool_] | None = None
) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield usage times a factor, where that is above the limit the limit, or what was used if that was more.

    Where ``cut`` is true nothing is above the limit.
    """
    for names, limit in ((_CPU, s.CPU_LIMIT), (_MEMORY, s.MEMORY_LIMIT)):
        for name in names:
            used = columns[name]
            most, times = (of if used.ndim == 1 else of[:, None] for of in (columns[limit], factor))
            bound = np.fmax(most, used)
            if cut is not None:
                bound = np.where(cut if used.ndim == 1 else cut[:, None], most, bound)
            yield name, np.minimum(used * times, bound).astype(used.dtype)


def changed_dataset(cell: Dataset, out: Path, change: str, change_us: int, seed: int) -> None:
    """Write the dataset with a change, and its features; a finished one is left as it is."""
    if out.is_dir():
        return
    with replaced_folder(out) as folder:
        shutil.copytree(cell.path, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("features", "usage"))
        (folder / "usage").mkdir()
        for path in sorted((cell.path / "usage").iterdir()):
            table = pq.read_table(path)
            bucket = int(hashlib.sha256(path.name.encode()).hexdigest()[:8], 16)
            pq.write_table(
                _changed(table, change, change_us, np.random.default_rng([seed, bucket])), folder / "usage" / path.name
            )
        manifest = json.loads((folder / "manifest.json").read_text())
        named = f"{manifest['fingerprint']} {change} {change_us} {seed}"
        manifest["fingerprint"] = hashlib.sha256(named.encode()).hexdigest()
        windows = sum(pq.read_metadata(path).num_rows for path in (folder / "usage").iterdir())
        manifest["counts"]["usage"] = windows
        (folder / "manifest.json").write_text(json.dumps(manifest))
    features = json.loads((cell.path / "features" / "manifest.json").read_text())
    build_features(Dataset.open(out), FeatureConfig(split=SplitConfig(**features["config"]["split"])))


def _changed(table: pa.Table, change: str, change_us: int, rng: np.random.Generator) -> pa.Table:
    columns: Columns = {}
    lengths: dict[str, int] = {}
    for name in table.column_names:
        column = table[name].combine_chunks()
        if pa.types.is_list(column.type):
            size = pc.max(pc.list_value_length(column)).as_py() or 0
            padded = np.full((len(column), size), np.nan, np.float32)
            length = np.nan_to_num(pc.list_value_length(column).to_numpy(zero_copy_only=False)).astype(int)
            padded[length == size] = (
                pc.list_flatten(column.filter(pa.array(length == size))).to_numpy().reshape(-1, size)
            )
            columns[name], lengths[name] = padded, size
        else:
            columns[name] = column.to_numpy(zero_copy_only=False)
    columns = CHANGES[change](columns, change_us, rng)
    arrays = []
    for field in table.schema:
        values = columns[field.name]
        if field.name in lengths:
            known = ~np.isnan(values).any(axis=1)
            listed = [row if ok else None for row, ok in zip(values, known, strict=True)]
            arrays.append(pa.array(listed, field.type))
        else:
            arrays.append(pa.array(values, field.type, from_pandas=True))
    return pa.Table.from_arrays(arrays, schema=table.schema)


def measure(estimates: Estimates, config: ReplayConfig, change_us: int) -> dict[str, Any]:
    """Return the violation and the reclaimed share of every six hours, as set and following, by margin and resource."""
    period = estimates.period
    rows, windows = period.rows, period.history.windows
    limit, target = windows.limit[rows], period.history.target[rows]
    part = (windows.end_us[rows] - 1 - change_us) // (_PART_H * _HOUR_US)
    known = np.isfinite(target) & (limit > 0)
    parts = np.unique(part[known.any(axis=1)])
    ways = {"set": estimates.reservations(_MODEL), "following": follow(_MODEL, estimates, config)}
    found: dict[str, Any] = {"hours": (parts * _PART_H).tolist(), "margins": {}}
    for margin, budget in asdict(config.budgets).items():
        for r, resource in enumerate(RESOURCES):
            here = known[:, r]
            of_part = np.searchsorted(parts, part[here])
            count = np.bincount(of_part, minlength=len(parts))
            granted = np.bincount(of_part, limit[here, r], len(parts))
            of: dict[str, Any] = {"budget": budget, "task_windows": count.tolist()}
            for way, reserved in ways.items():
                held = reserved[margin][rows][here, r]
                above = np.bincount(of_part, violates(needed(target, limit)[here, r], held), len(parts))
                spared = np.bincount(of_part, limit[here, r] - held, len(parts))
                of[way] = {
                    "times_the_budget": (ratio(above, count) / budget).tolist(),
                    "reclaimed": ratio(spared, granted).tolist(),
                    "back_h": back_within(parts, above, count, budget),
                }
            found["margins"].setdefault(margin, {})[resource] = of
    return found


def back_within(parts: NDArray[np.int64], above: NDArray[Any], count: NDArray[Any], budget: float) -> int | None:
    """Return the hours from the change to the first part from which a day's violation is within ``WITHIN``."""
    day = 24 // _PART_H
    for k in np.flatnonzero(parts >= 0):
        some = slice(k, k + day)
        if k + day <= len(parts) and WITHIN[0] <= above[some].sum() / count[some].sum() / budget <= WITHIN[1]:
            return int(parts[k]) * _PART_H
    return None


def draw(results: Mapping[str, Any]) -> Figure:
    """Draw the violation over time: a column for each change, a row for each budget and resource."""
    kinds = [(margin, resource) for margin in ("aggressive", "baseline") for resource in RESOURCES]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(12, 10), layout="constrained")
        axes = figure.subplots(len(kinds), len(results["changes"]), sharex=True, sharey=True, squeeze=False)
        for column, (change, of) in enumerate(results["changes"].items()):
            for row, (margin, resource) in enumerate(kinds):
                ax, one = axes[row, column], of["margins"][margin][resource]
                edges = [*of["hours"], of["hours"][-1] + _PART_H]
                ax.axhspan(*WITHIN, color="#bbddbb")
                ax.axvline(0, color="#444444", linewidth=1)
                for way, colour in (("set", "#999999"), ("following", "#1b6ca8")):
                    values = np.clip(one[way]["times_the_budget"], 0.02, None)
                    ax.stairs(values, edges, baseline=None, color=colour, linewidth=1.6, label=f"price {way}")
                ax.set_yscale("log")
                ax.set_title(
                    f"{_TITLES[change]}\n{RESOURCE_TITLES[resource]}, {one['budget']:.1%}" if row == 0
                    else f"{RESOURCE_TITLES[resource]}, {one['budget']:.1%}", fontsize=10,
                )  # fmt: skip
        for ax in axes[-1]:
            ax.set_xlabel("hours since the change")
        for ax in axes[:, 0]:
            ax.set_ylabel("violation / budget")
        axes[0, 0].legend(fontsize=8)
    return figure


def main() -> None:
    """Make the changed datasets, replay the model on each, write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cell", type=Path, help="dataset with features")
    parser.add_argument("--model", required=True, help="trained on it")
    parser.add_argument("--work", type=Path, required=True, help="where the changed datasets are made")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "drift")
    parser.add_argument("--changes", nargs="*", choices=CHANGES, default=list(CHANGES))
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    cell, bundle, config = Dataset.open(asked.cell), load_model(asked.model), ReplayConfig(estimators=(), tune=False)
    change_us = FeatureSet.open(asked.cell).cuts_us[1] + _BEFORE_US
    results: dict[str, Any] = {
        "cell": {"windows": cell.n_windows, "fingerprint": cell.fingerprint},
        "model": asked.model, "seed": asked.seed, "horizon_s": config.horizon_s, "within": WITHIN, "changes": {},
    }  # fmt: skip
    for change in asked.changes:
        out = asked.work / change
        changed_dataset(cell, out, change, change_us, asked.seed)
        source = Source(Dataset.open(out), FeatureSet.open(out), {_MODEL: bundle})
        results["changes"][change] = measure(estimate_all(source, config), config, change_us)
        for margin, of in results["changes"][change]["margins"].items():
            for resource, one in of.items():
                most = {way: max(one[way]["times_the_budget"]) for way in ("set", "following")}
                print(change, margin, resource, {way: round(m, 2) for way, m in most.items()},
                      "back after", one["set"]["back_h"], one["following"]["back_h"], "h")  # fmt: skip
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    draw(results).savefig(asked.out.with_suffix(".svg"))


if __name__ == "__main__":
    main()
