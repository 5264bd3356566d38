"""Scores the derived OOM label against the truth of composed cells: precision and recall, by definition of the label.

    python -m benchmarks.oom_label DATASET TRUTH.parquet [DATASET TRUTH.parquet ...]

No public trace records that a task ran out of memory; the label is derived (`data.oom.oom_events`). A composed
cell has a `truth.parquet` next to it, with a row for each end of a task's run: `collection_id`, `instance_index`,
`time` (µs), `event_type` and `cause`, among them `oom_limit` (the task passed its own limit; it fails) and
`oom_machine` (its machine ran out of memory; it is evicted). An end counts as found where the label names the same task
at the same time. In a composed cell the last window's maximum is the limit, to the bit, where the task passed it; a
recorded one samples memory and may miss the moment, so a share of 1.0 owes its recall here to the composition.

Every share of the limit is scored with two kinds of end (FAIL; FAIL or EVICT) against two truths. Ends of tasks without
a single window cannot be labelled; they are counted apart and are no part of the recall. The intervals are Wilson's, at
95 %, as if ends were independent.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable
from pathlib import Path

import pandas as pd

from benchmarks import made_by
from reclaim.data import schema as s
from reclaim.data.dataset import Dataset
from reclaim.data.oom import OOM_SHARE, oom_events

SHARES = (0.90, 0.95, OOM_SHARE, 1.0)
ENDS = {"FAIL": (s.EventType.FAIL,), "FAIL or EVICT": (s.EventType.FAIL, s.EventType.EVICT)}
TRUTHS = {"oom_limit": ("oom_limit",), "oom_limit + oom_machine": ("oom_limit", "oom_machine")}
_Z = 1.959964
"""Standard normal quantile of 97.5 %."""


def main() -> None:
    """Score every definition on all cells together, and the one in use on each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", nargs="+", type=Path, metavar="DATASET TRUTH")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "oom-label.json")
    arguments = parser.parse_args()
    if len(arguments.pairs) % 2:
        parser.error("each DATASET wants its TRUTH.parquet")
    datasets, truths = arguments.pairs[::2], arguments.pairs[1::2]
    seen = pd.concat([_seen(path) for path in datasets], keys=range(len(datasets)), names=["cell"])
    ends = pd.concat([_truth(path) for path in truths], keys=range(len(truths)), names=["cell"])
    labels = pd.concat([_labels(path) for path in datasets], keys=range(len(datasets)), names=["cell"])
    seen, ends, labels = (frame.reset_index("cell") for frame in (seen, ends, labels))
    ends = ends.merge(seen, how="left", on=["cell", *s.TASK_KEY])
    ends["seen"] = ends["seen"].notna()
    by_definition = labels.groupby(["ends", "share"])
    nothing = labels.iloc[:0]
    together = [
        {"truth": truth, "ends": kind, "share": share,
         **_score(by_definition.get_group((kind, share)) if (kind, share) in by_definition.groups else nothing, ends,
                  truth)}
        for truth in TRUTHS for kind in ENDS for share in SHARES
    ]  # fmt: skip
    in_use = labels[(labels["share"] == OOM_SHARE) & (labels["ends"] == "FAIL")]
    key = ["cell", *s.TASK_KEY, s.TIME_US]
    each = [
        {"cell": path.name, "truth": truth, **_score(in_use[in_use["cell"] == k], ends[ends["cell"] == k], truth)}
        for truth in TRUTHS for k, path in enumerate(datasets)
    ]  # fmt: skip
    content = {
        **made_by(
            "python -m benchmarks.oom_label "
            + " ".join(f"{d.name} {Path(t.parent.name) / t.name}" for d, t in zip(datasets, truths, strict=True))
        ),
        "cells": [_about(d, t) for d, t in zip(datasets, truths, strict=True)],
        "ends_by_cause": ends["cause"].value_counts().to_dict(),
        "in_use_labels_by_cause": in_use.merge(ends, how="left", on=key)["cause"]
        .fillna("none")
        .value_counts()
        .to_dict(),
        "together": together,
        "in_use_by_cell": each,
    }
    columns = ["labelled", "true", "hits", "precision", "precision_95", "recall", "recall_95", "true_without_windows"]
    print(pd.DataFrame(together)[["truth", "ends", "share", *columns]].to_string(index=False))
    print("\nwhat the definition in use calls OOM, by its true cause:", content["in_use_labels_by_cause"])
    print(f"\nthe definition in use (FAIL, {OOM_SHARE:.0%}), by cell:")
    print(pd.DataFrame(each)[["truth", "cell", *columns]].to_string(index=False))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(content, indent=2) + "\n")
    print(f"wrote {arguments.out}")


def _seen(path: Path) -> pd.DataFrame:
    """Return a row for each task with usage."""
    dataset = Dataset.open(path)
    parts: list[pd.DataFrame] = [dataset.usage(b, list(s.TASK_KEY)).to_pandas() for b in range(dataset.n_buckets)]
    return pd.concat(parts).drop_duplicates().assign(seen=1.0)


def _truth(path: Path) -> pd.DataFrame:
    """Return a row for each true end: task, time, cause."""
    ends: pd.DataFrame = pd.read_parquet(path, columns=[*s.TASK_KEY, "time", "cause"])
    ends.columns = pd.Index([*s.TASK_KEY, s.TIME_US, "cause"])
    return ends


def _labels(path: Path) -> pd.DataFrame:
    """Return a row for each event that a definition calls OOM: task, time, and the definition (share, ends)."""
    dataset, found = Dataset.open(path), []
    for bucket in range(dataset.n_buckets):
        windows, events = dataset.windows(bucket), dataset.events(bucket)
        starts = windows.task_starts()[:-1]
        for kind, types in ENDS.items():
            for share in SHARES:
                task, time_us = oom_events(windows, events, share=share, ends=types)
                key = zip(s.TASK_KEY, (windows.collection_id, windows.instance_index), strict=True)
                columns = {name: values[starts[task]] for name, values in key}
                found.append(pd.DataFrame({**columns, s.TIME_US: time_us, "share": share, "ends": kind}))
    return pd.concat(found, ignore_index=True)


def _score(labels: pd.DataFrame, ends: pd.DataFrame, truth: str) -> dict[str, object]:
    """Return counts, precision and recall of one definition's labels against one truth."""
    true = ends[ends["cause"].isin(TRUTHS[truth])]
    reachable = true[true["seen"]]
    hits = len(labels.merge(reachable, on=["cell", *s.TASK_KEY, s.TIME_US]))
    return {
        "labelled": len(labels),
        "true": len(reachable),
        "hits": hits,
        "precision": round(hits / len(labels), 3) if len(labels) else None,
        "precision_95": _wilson(hits, len(labels)),
        "recall": round(hits / len(reachable), 3) if len(reachable) else None,
        "recall_95": _wilson(hits, len(reachable)),
        "true_without_windows": len(true) - len(reachable),
    }


def _wilson(hits: int, n: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share. E. B. Wilson, "Probable Inference", JASA 1927."""
    if n == 0:
        return 0.0, 1.0
    share, z2 = hits / n, _Z**2
    middle = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = _Z * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    return round(max(middle - half, 0.0), 3), round(min(middle + half, 1.0), 3)


def _about(dataset: Path, truth: Path) -> dict[str, object]:
    """Return a cell's description: its dataset's fingerprint, and its composition if recorded next to the truth."""
    composed = truth.with_name("COMPOSED.json")
    options: Iterable[tuple[str, object]] = ()
    if composed.is_file():
        options = json.loads(composed.read_text()).get("options", {}).items()
    kept = {key: value for key, value in options if key in ("machines", "days", "seed")}
    return {"dataset": dataset.name, "fingerprint": Dataset.open(dataset).fingerprint[:12], **kept}


if __name__ == "__main__":
    main()
