"""Scores the out-of-memory model within the hour on cells that it was not trained on, by the composer's truth.

    python -m benchmarks.oom --train CELL [CELL ...] --test CELL TRUTH.parquet [CELL TRUTH.parquet ...] [--test ...]

Cells of one `--test` are scored together, and each by itself. Each CELL is a dataset with its features: built with
`split.role=train` to train on, with `split.role=test` to score on. The model is the one that `reclaim train` fits
(`training.fitting.oom_fit`), trained on the first cell alone and on all: fitted to training rows, calibrated on
validation rows, and fitted once more to both. All rows of the test cells count whose label is known; `without alloc`
leaves out tasks inside an alloc instance, which reservations are neither trained nor scored on. The label is the
derived one (`data.oom`); behaviour and "first of its collection" are the composer's truth, of the next end that is
`oom_limit`. Alerts are those of `training.evaluation.alerts`; the bound of recall is what as many alerts catch at most.
Nothing is chosen by the test cells.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from sklearn.metrics import average_precision_score

from benchmarks import made_by
from reclaim.data import schema as s
from reclaim.data.dataset import Dataset
from reclaim.features.feature_set import FeatureSet
from reclaim.features.groups import RowKeys, join_keys, row_keys
from reclaim.features.splits import IN_ALLOC, VALID
from reclaim.features.targets import HORIZONS_S
from reclaim.training.evaluation.alerts import AlertRows, alerts, events, lowest_threshold, score_alerts, sorted_rows
from reclaim.training.fitting.oom_fit import fit_oom, refit_oom, rows_of
from reclaim.training.fitting.sources import Source, open_sources
from reclaim.training.models.oom_calibration import ProbabilityCalibration, fit_probability
from reclaim.training.models.oom_model import OomModel

HORIZON_S = 3_600
PLACE = HORIZONS_S.index(HORIZON_S)
HOUR_US = HORIZON_S * 1_000_000
BLOCK = 1 << 18
"""Rows asked at once, about."""
RATE = 100
"""Alerts per 1,000 task-days at which recall is split."""
SHOWN = ("average_precision", "times_base", "recall_at_10", "recall_bound_at_10", "precision_at_10", "recall_at_100",
         "recall_bound_at_100", "precision_at_100", "lead_s_at_100", "brier_skill")  # fmt: skip


class Cell(NamedTuple):
    """A test cell: the rows that are scored, their label and keys, and the true end that each positive row precedes."""

    features: FeatureSet
    rows: NDArray[np.int64]
    label: NDArray[np.bool_]
    keys: RowKeys
    end: pd.DataFrame  # kind, first_of_task and first_of_collection of each row; none where no true end follows
    in_alloc: NDArray[np.bool_]


def main() -> None:
    """Fit on one cell and on all, score, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", nargs="+", type=Path, required=True, metavar="CELL")
    parser.add_argument("--test", nargs="+", type=Path, required=True, action="append", metavar="CELL TRUTH")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "oom.json")
    asked = parser.parse_args()
    if any(len(group) % 2 for group in asked.test):
        parser.error("each test CELL wants its TRUTH.parquet")
    began = time.monotonic()
    groups = [list(zip(group[::2], group[1::2], strict=True)) for group in asked.test]
    cells = [[test_cell(*of) for of in group] for group in groups]
    content: dict[str, Any] = {
        **made_by(
            f"python -m benchmarks.oom --train {' '.join(p.name for p in asked.train)} "
            + " ".join("--test " + " ".join(f"{c.name} {t.parent.name}/{t.name}" for c, t in of) for of in groups)
        ),
        "horizon_s": HORIZON_S,
        "tests": [[cell.name for cell, _ in group] for group in groups],
        "ends": [foreseeable([(pd.read_parquet(t), Dataset.open(d)) for d, t in group]) for group in groups],
        "trained_on": {},
    }
    print("true ends of the test cells:", content["ends"])
    for n in sorted({1, len(asked.train)}):
        sources = open_sources(asked.train[:n])
        started = time.monotonic()
        first = fit_oom(sources, asked.seed)
        if first is None:
            raise SystemExit(f"{n} training cells hold too few out-of-memory ends to fit a model")
        model = refit_oom(first, sources, asked.seed)
        seconds = time.monotonic() - started
        calibration = calibrated(first, sources)
        probability = [[answers(model, calibration, cell) for cell in group] for group in cells]
        facts: dict[str, Any] = {
            "events": sum(int(source.features.manifest["oom_events"]) for source in sources),
            "fit_seconds": round(seconds, 1),
            "slope": calibration.slope[PLACE], "intercept": calibration.intercept[PLACE],
            "pooled": [scored(c, p) for c, p in zip(cells, probability, strict=True)],
            "without alloc": [scored(c, p, with_alloc=False) for c, p in zip(cells, probability, strict=True)],
            "by_cell": {
                of[0].name: scored([cell], [p]) for group in zip(groups, cells, probability, strict=True)
                for of, cell, p in zip(*group, strict=True)
            },
            "split": [split(c, p) for c, p in zip(cells, probability, strict=True)],
        }  # fmt: skip
        content["trained_on"][f"{n} cells" if n > 1 else "1 cell"] = facts
        rows = {f"{name}, {k}": of for name in ("pooled", "without alloc") for k, of in enumerate(facts[name])}
        rows |= facts["by_cell"]
        print(f"\ntrained on {n} cells, {facts['events']} ends, {seconds:.0f} s:")
        print(pd.DataFrame(rows).T[["base_rate", *SHOWN]].to_string(float_format=lambda v: f"{v:.4g}"))
        for of_group in facts["split"]:
            print(pd.DataFrame(of_group).T.to_string(float_format=lambda v: f"{v:.4g}"))
    content["seconds"] = round(time.monotonic() - began, 1)
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps(content, indent=2) + "\n")
    print(f"wrote {asked.out}")


def test_cell(path: Path, truth: Path) -> Cell:
    """Return the rows of a cell whose label is known."""
    dataset, features = Dataset.open(path), FeatureSet.open(path)
    features.check_whole()
    label = np.asarray(features.oom[:, PLACE])
    rows = np.flatnonzero(np.isfinite(label))
    keys = row_keys(dataset, features, rows)
    task = pd.concat([dataset.usage(b, list(s.TASK_KEY)).to_pandas() for b in range(dataset.n_buckets)])
    row = task.iloc[rows].reset_index(drop=True).assign(row=np.arange(len(rows)), at=features.end_us[rows])
    ends = true_ends(pd.read_parquet(truth))
    following = pd.merge_asof(
        row.sort_values("at"), ends.sort_values("at"), on="at", by=list(s.TASK_KEY), direction="forward",
        allow_exact_matches=False, tolerance=HOUR_US,
    )  # fmt: skip
    end = following.sort_values("row")[["kind", "first_of_task", "first_of_collection"]].reset_index(drop=True)
    return Cell(features, rows, label[rows] > 0.5, keys, end, features.group[rows] == IN_ALLOC)


def true_ends(truth: pd.DataFrame) -> pd.DataFrame:
    """Return each end of a task that passed its own limit: time, behaviour, and whether it was the first."""
    ends = truth[truth["cause"] == "oom_limit"].rename(columns={"time": "at", "oom_kind": "kind"}).sort_values("at")
    ends["first_of_task"] = ~ends.duplicated(list(s.TASK_KEY))
    ends["first_of_collection"] = ~ends.duplicated([s.COLLECTION_ID])
    return ends[[*s.TASK_KEY, "at", "kind", "first_of_task", "first_of_collection"]]


def foreseeable(cells: Sequence[tuple[pd.DataFrame, Dataset]]) -> dict[str, float]:
    """Return the number of true ends, and of those that nothing before them tells of."""
    counts = {name: 0 for name in ("ends", "sudden", "first_death_at_start_up", "first_of_collection", "no_window")}
    for truth, dataset in cells:
        ends = true_ends(truth)
        task = pd.concat(
            [dataset.usage(b, [*s.TASK_KEY, s.END_US]).to_pandas() for b in range(dataset.n_buckets)]
        ).sort_values(s.END_US)  # fmt: skip
        seen = pd.merge_asof(
            ends, task.assign(seen=task[s.END_US]), left_on="at", right_on=s.END_US, by=list(s.TASK_KEY),
            allow_exact_matches=False, tolerance=HOUR_US,
        )  # fmt: skip
        counts["ends"] += len(ends)
        counts["sudden"] += int((ends["kind"] == "sudden").sum())
        counts["first_death_at_start_up"] += int(((ends["kind"] == "undersized") & ends["first_of_task"]).sum())
        counts["first_of_collection"] += int(ends["first_of_collection"].sum())
        counts["no_window"] += int(seen["seen"].isna().sum())
    return {name: float(n) for name, n in counts.items()}


def calibrated(model: OomModel, sources: Sequence[Source]) -> ProbabilityCalibration:
    """Return the calibration by the validation rows of all sources."""
    raw, oom, task, before = [], [], [], 0
    for source in sources:
        rows = rows_of(source.features, VALID)
        keys = row_keys(source.dataset, source.features, rows)
        raw.append(model.predict(source.features.x[rows], threads=2))
        oom.append(source.features.targets(rows)[1])
        task.append(keys.task + before)
        before += int(keys.task.max(initial=-1)) + 1
    return fit_probability(np.concatenate(raw), np.concatenate(oom), np.concatenate(task))


def answers(model: OomModel, calibration: ProbabilityCalibration, cell: Cell) -> NDArray[np.float64]:
    """Return the probability within the hour of each row."""
    raw = [
        model.predict(cell.features.x[rows], (HORIZON_S,), 2)
        for rows in np.array_split(cell.rows, 1 + len(cell.rows) // BLOCK)
    ]
    return calibration.apply(np.concatenate(raw), (HORIZON_S,))[:, 0]


def chosen(cells: Sequence[Cell], with_alloc: bool) -> list[NDArray[np.bool_]]:
    """Return which rows of each cell are scored."""
    return [np.ones(len(cell.label), bool) if with_alloc else ~cell.in_alloc for cell in cells]


def alert_rows(
    cells: Sequence[Cell], probability: Sequence[NDArray[np.float64]], kept: Sequence[NDArray[np.bool_]]
) -> tuple[AlertRows, NDArray[np.int64]]:
    """Return the rows of all cells in the order of alerts, and that order."""
    keys = join_keys([cell.keys.take(k) for cell, k in zip(cells, kept, strict=True)])
    p = np.concatenate([q[k] for q, k in zip(probability, kept, strict=True)])
    label = np.concatenate([cell.label[k] for cell, k in zip(cells, kept, strict=True)])
    return sorted_rows(p, label, keys), np.lexsort((keys.end_us, keys.task))


def scored(
    cells: Sequence[Cell], probability: Sequence[NDArray[np.float64]], *, with_alloc: bool = True
) -> dict[str, float]:
    """Return the scores of all rows together."""
    rows, _ = alert_rows(cells, probability, chosen(cells, with_alloc))
    base, brier = float(rows.label.mean()), float(np.mean((rows.probability - rows.label) ** 2))
    precision = float(average_precision_score(rows.label, rows.probability))
    return {
        "rows": float(len(rows.label)), "base_rate": base, "average_precision": precision,
        "times_base": precision / base, "brier_skill": 1 - brier / (base * (1 - base)),
        "said_over_seen": float(rows.probability.mean()) / base, **score_alerts(rows, HORIZON_S),
    }  # fmt: skip


def split(cells: Sequence[Cell], probability: Sequence[NDArray[np.float64]]) -> dict[str, dict[str, float]]:
    """Return average precision against all negative rows, and recall at ``RATE`` alerts, of kinds of ends."""
    kept = chosen(cells, with_alloc=True)
    rows, order = alert_rows(cells, probability, kept)
    end = pd.concat([cell.end[k] for cell, k in zip(cells, kept, strict=True)], ignore_index=True).iloc[order]
    raised = np.zeros(len(rows.label), bool)
    raised[alerts(rows, lowest_threshold(rows, HORIZON_S, RATE), HORIZON_S)] = True
    event = events(rows, HORIZON_S)
    ends = pd.DataFrame({"event": event, "raised": raised}).assign(**{str(c): end[c].to_numpy() for c in end})
    found = ends[ends["event"] >= 0].groupby("event").agg(
        caught=("raised", "max"), kind=("kind", "first"), first_of_task=("first_of_task", "first"),
        first_of_collection=("first_of_collection", "first"),
    )  # fmt: skip
    kinds = {
        f"behaviour {kind}": (end["kind"] == kind, found["kind"] == kind)
        for kind in sorted(set(found["kind"].dropna()))
    }
    for name, column, value in (
        ("first of its task", "first_of_task", True), ("repeat of its task", "first_of_task", False),
        ("first of its collection", "first_of_collection", True),
    ):  # fmt: skip
        kinds[name] = (end[column] == value, found[column] == value)
    out = {}
    for name, (of_row, of_event) in kinds.items():
        positive = rows.label & of_row.to_numpy(bool)
        some = positive | ~rows.label
        out[name] = {
            "events": float(of_event.sum()), "base_rate": float(positive[some].mean()),
            "average_precision": float(average_precision_score(positive[some], rows.probability[some])),
            f"recall_at_{RATE}": float(found["caught"][of_event].mean()),
        }  # fmt: skip
    return out


if __name__ == "__main__":
    main()
