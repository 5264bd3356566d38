"""Changes a cell's workload on purpose in its test period, and shows how fast what follows keeps its budgets again.

    python -m benchmarks.drift CELL --model NAME@ALIAS --work WORK --out benchmarks/results/drift

CELL is a dataset with features whose model was trained on the periods before the test, such as a composed cell of 30
machines and 14 days with ``--set split.train_share=0.4 --set split.valid_share=0.2``. Two days into the test one of
three changes begins; each is written as a dataset of its own below WORK, with features of its own:

usage
    What every task uses grows by half within a day, up to its limit.
kind
    Tasks of a kind that was never seen arrive: copies, under new names, of a fifth of the tasks that run from then on.
    They are drawn by collection within each file of the dataset, of which a collection has tasks in several. Those of
    tasks that run already arrive within half a day, others with the task that they copy or up to half a day after the
    change. They use 15 % of their limit, and about every four hours 60 to 95 % of it for an hour.
limits
    Every limit is halved at once. What is used is cut off at it.

Written are ``OUT.json``, ``OUT.svg`` and ``OUT-machines.svg``, of tasks and of machines: the violation of every six
hours as a multiple of the budget, at prices and margins set on the validation rows and at those that follow, and after
how long these keep the budget again: the first moment from which a whole day's violation lies between 0.8 and 1.25
times the budget, of machines below that.
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

from benchmarks import made_by
from reclaim.data import schema as s
from reclaim.data.core.files import replaced_folder
from reclaim.data.core.style import RESOURCE_TITLES, STYLE
from reclaim.data.dataset import Dataset
from reclaim.data.schema import RESOURCES
from reclaim.features.build import FeatureConfig, build_features
from reclaim.features.feature_set import FeatureSet
from reclaim.features.registry import SLOT_US
from reclaim.features.splits import SplitConfig
from reclaim.replay.equal_violation.sweep import Guards
from reclaim.replay.experiment import Source
from reclaim.replay.experiments.frontier.learned import foresee_machines
from reclaim.replay.experiments.frontier.machines import lay_out_machines
from reclaim.replay.experiments.margins.following import WITHIN, follow
from reclaim.replay.open_loop.estimates import Estimates, estimate_all
from reclaim.replay.open_loop.machines import FITTED
from reclaim.replay.open_loop.rows import ratio
from reclaim.replay.runs.unseen import judged_on
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
_COLOURS: Final = {"set": "#999999", "following": "#1b6ca8", "held": "#c2571a"}
"""Ways to reserve, each with its colour."""

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
    known = np.isfinite(target) & (limit > 0)
    ways = {"set": estimates.reservations(_MODEL), "following": follow(_MODEL, estimates, config)}
    found: dict[str, dict[str, Any]] = {}
    for margin, budget in asdict(config.budgets).items():
        for r, resource in enumerate(RESOURCES):
            here = known[:, r]
            need, granted = needed(target, limit)[here, r], limit[here, r]
            held = {way: reserved[margin][rows][here, r] for way, reserved in ways.items()}
            found.setdefault(margin, {})[resource] = by_part(
                windows.end_us[rows][here] - 1 - change_us, need, granted, held, budget
            )
    return found


def measure_machines(source: Source, estimates: Estimates, config: ReplayConfig, change_us: int) -> dict[str, Any]:
    """Return the same of machines: passed peaks and what is reserved for all tasks on one together.

    ``held`` follows, and holds the second budget, of machines at once, as a service does.
    """
    period, found = estimates.period, dict[str, dict[str, Any]]()
    guards = Guards.from_windows(period.history.windows)
    laid_out = {name: lay_out_machines(period, guards, r, config.horizon_s, {}) for r, name in enumerate(RESOURCES)}
    machines = {name: m for name, m in laid_out.items() if m is not None}
    bundle, features = source.bundles[_MODEL], source.features
    of_model = foresee_machines(bundle, features, period, machines, config.horizon_s, config.budgets)[FITTED]
    budgets = config.budgets.by_margin
    for resource, m in machines.items():
        one, at = of_model[resource], (config.horizon_s, m.slot_s)
        for (margin, budget), held in zip(budgets.items(), one.held(tuple(budgets.values()), *at), strict=True):
            ways = {"set": one.peak(budget), "following": one.following(budget, *at), "held": held}
            reserved = {way: np.minimum(peak, m.at.limit) for way, peak in ways.items()}
            found.setdefault(margin, {})[resource] = by_part(
                m.at.start_us - change_us, m.at.peak, m.at.limit, reserved, budget, least=0.0
            )
    return found


def by_part(
    since_us: NDArray[np.int64],
    need: NDArray[np.float64],
    limit: NDArray[np.float64],
    reserved: Mapping[str, NDArray[np.float64]],
    budget: float,
    least: float = WITHIN[0],
) -> dict[str, Any]:
    """Return the violation and the reclaimed share of each way to reserve, by six hours since the change."""
    parts, of_part, count = np.unique(since_us // (_PART_H * _HOUR_US), return_inverse=True, return_counts=True)
    granted = np.bincount(of_part, limit)
    until = int(since_us.max() + SLOT_US) // (_PART_H * _HOUR_US)  # the last part ends with the record
    found: dict[str, Any] = {"budget": budget, "hours": (parts * _PART_H).tolist(), "answers": count.tolist()}
    for way, held in reserved.items():
        above = np.bincount(of_part, violates(need, held))
        found[way] = {
            "times_the_budget": (above / count / budget).tolist(),
            "reclaimed": ratio(np.bincount(of_part, limit - held), granted).tolist(),
            "back_h": back_within(parts, above, count, budget, least, until),
        }
    return found


def back_within(
    parts: NDArray[np.int64], above: NDArray[Any], count: NDArray[Any], budget: float, least: float, until: int
) -> int | None:
    """Return the hours to the first part from which a day's violation lies between ``least`` and ``WITHIN[1]``.

    Parts from ``until`` on are not whole, and no day that ends with one of them counts.
    """
    day = 24 // _PART_H
    for first in parts[(parts >= 0) & (parts + day <= until)]:
        some = (parts >= first) & (parts < first + day)
        if least <= above[some].sum() / count[some].sum() / budget <= WITHIN[1]:
            return int(first) * _PART_H
    return None


def draw(results: Mapping[str, Any], of: str) -> Figure:
    """Draw the violation of tasks or machines over time: a column a change, a row a budget and resource."""
    kinds = [(margin, resource) for margin in ("aggressive", "baseline") for resource in RESOURCES]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(12, 10), layout="constrained")
        axes = figure.subplots(len(kinds), len(results["changes"]), sharex=True, sharey=True, squeeze=False)
        for column, (change, found) in enumerate(results["changes"].items()):
            for row, (margin, resource) in enumerate(kinds):
                ax, one = axes[row, column], found[of][margin][resource]
                edges = [*one["hours"], one["hours"][-1] + _PART_H]
                ax.axhspan(*WITHIN, color="#bbddbb")
                ax.axvline(0, color="#444444", linewidth=1)
                for way, colour in _COLOURS.items():
                    if way in one:
                        values = np.clip(one[way]["times_the_budget"], 0.02, None)
                        ax.stairs(values, edges, baseline=None, color=colour, linewidth=1.6, label=way)
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
        **made_by(f"python -m benchmarks.drift CELL --model MODEL --work WORK --changes {' '.join(asked.changes)}"),
        "cell": {"windows": cell.n_windows, "fingerprint": cell.fingerprint},
        "model": Path(asked.model).name, "seed": asked.seed, "horizon_s": config.horizon_s, "within": WITHIN,
        "changes": {},
    }  # fmt: skip
    for change in asked.changes:
        out = asked.work / change
        changed_dataset(cell, out, change, change_us, asked.seed)
        features = FeatureSet.open(out)
        source = Source(features.dataset, features, {_MODEL: judged_on(_MODEL, bundle, features)})
        estimates = estimate_all(source, config)
        results["changes"][change] = {
            "tasks": measure(estimates, config, change_us),
            "machines": measure_machines(source, estimates, config, change_us),
        }
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    for of, name in (("tasks", asked.out.name), ("machines", f"{asked.out.name}-machines")):
        draw(results, of).savefig(asked.out.with_name(f"{name}.svg"))
        print("\n".join(table(results, of)))


def table(results: Mapping[str, Any], of: str) -> Iterator[str]:
    """Yield a table: the largest violation of six hours over the budget, and the hours until that is kept."""
    some = next(iter(results["changes"].values()))[of]["aggressive"][RESOURCES[0]]
    ways = [way for way in _COLOURS if way in some]
    columns = [f"{RESOURCE_TITLES[r]}, {way}" for r in RESOURCES for way in ways]
    yield f"| {of}: change | budget | " + " | ".join(columns) + " |"
    yield "|---|---|" + "--:|" * len(columns)
    for margin in ("aggressive", "baseline"):
        for change, found in results["changes"].items():
            cells = []
            for resource in RESOURCES:
                one = found[of][margin][resource]
                after = np.array(one["hours"]) >= 0
                for way in ways:
                    most, back_h = np.array(one[way]["times_the_budget"])[after].max(), one[way]["back_h"]
                    cells.append(f"{most:.1f}, " + ("-" if back_h is None else f"{back_h} h"))
            yield f"| {_TITLES[change]} | {one['budget']:.1%} | " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()
