"""Feeds a running `reclaim serve` with a dataset's windows, and draws the dashboard's panels from what Prometheus saw.

A slot of 5 minutes is told every second or two, so wall clock and cell clock differ: ranges are chosen when drawing.

    reclaim serve --port 3400 --model reclaim@champion --shadow reclaim@candidate --state STATE
    prometheus --config.file PROMETHEUS.yaml --web.listen-address 127.0.0.1:9090
    python benchmarks/dashboard.py feed DATASET --url http://127.0.0.1:3400 --slots 600 --promote 2 --out feed.json
    python benchmarks/dashboard.py draw --feed feed.json --out benchmarks/results/serving-dashboard.png

The panels are drawn from Prometheus' answers to the expressions of `serving/deploy/grafana-dashboard.json`, without
Grafana.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dashboard_panels
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from reclaim.data import schema as s
from reclaim.data.store import Dataset, bucket_name
from reclaim.features.registry import SLOT_S
from reclaim.serving.client import Client, ServiceError
from reclaim.serving.rows import ENDED_US, FAILED, IN_ALLOC, LOGICAL_NAME, USAGE_COLUMNS, USER

SLOT_US = SLOT_S * 1_000_000
HOUR_SLOTS = 3600 // SLOT_S
HELD_BACK, REPEATED = 0.01, 0.005
"""Shares of a slot's windows that are told a slot later, and once more."""
SINGLES_EVERY_S = 0.2
WHOLE_CELL_EVERY = 6
"""Slots after which all reservations are asked for, with the usage."""
GONE = 404


class Source:
    """Some buckets of a dataset, from one time to another, by slot.

    Parameters
    ----------
    dataset : Dataset
    buckets : int
        How many; a collection is in one of them whole.
    first_us, last_us : int
        Windows that end after, and until.
    """

    def __init__(self, dataset: Dataset, buckets: int, first_us: int, last_us: int) -> None:
        within = [(s.END_US, ">", first_us), (s.END_US, "<=", last_us)]
        names = [*(n for n in USAGE_COLUMNS if n in s.USAGE.names), s.ALLOC_COLLECTION_ID]
        some = range(min(buckets, dataset.n_buckets))
        paths = [dataset.path / "usage" / bucket_name(b) for b in some]
        usage = pa.concat_tables([pq.read_table(path, columns=names, filters=within) for path in paths])
        owners = dataset.table("tasks").select([s.COLLECTION_ID, s.USER_ID, s.LOGICAL_NAME_ID])
        owners = owners.group_by(s.COLLECTION_ID).aggregate([(s.USER_ID, "min"), (s.LOGICAL_NAME_ID, "min")])
        at = pc.index_in(usage[s.COLLECTION_ID], owners[s.COLLECTION_ID])
        usage = usage.append_column(IN_ALLOC, usage[s.ALLOC_COLLECTION_ID].is_valid())
        usage = usage.append_column(USER, owners[f"{s.USER_ID}_min"].take(at))
        usage = usage.append_column(LOGICAL_NAME, owners[f"{s.LOGICAL_NAME_ID}_min"].take(at))
        self._usage = usage.drop_columns([s.ALLOC_COLLECTION_ID]).sort_by(s.END_US).combine_chunks()
        self._ends, self.failures_restarted = _ends([dataset.events(b) for b in some], first_us, last_us)
        self._first_us = first_us
        self.n_slots = (last_us - first_us) // SLOT_US

    def usage(self, first: int, last: int) -> pa.Table:
        """Return the windows that end in slots ``first`` to ``last - 1``."""
        return _between(self._usage, s.END_US, self._first_us + first * SLOT_US, self._first_us + last * SLOT_US)

    def ends(self, first: int, last: int) -> pa.Table:
        """Return the facts of tasks that end for good in these slots."""
        return _between(self._ends, ENDED_US, self._first_us + first * SLOT_US, self._first_us + last * SLOT_US)


def _between(table: pa.Table, column: str, after_us: int, until_us: int) -> pa.Table:
    low, high = np.searchsorted(table[column].to_numpy(), [after_us, until_us], side="right")
    return table.slice(low, high - low)


def _ends(events: list[pa.Table], first_us: int, last_us: int) -> tuple[pa.Table, int]:
    """Return the ends after which no event of the task comes, and how many failures are followed by another run."""
    table = pa.concat_tables(events)
    ids, index = (table[name].to_numpy() for name in s.TASK_KEY)
    at, kind = table[s.TIME_US].to_numpy(), table[s.EVENT_TYPE].to_numpy()
    last = np.append((np.diff(ids) != 0) | (np.diff(index) != 0), True)  # events stand by task, then time
    within = (at > first_us) & (at <= last_us)
    good = within & last & np.isin(kind, s.EventType.ENDS)
    out = pa.table({
        s.COLLECTION_ID: ids[good], s.INSTANCE_INDEX: index[good], ENDED_US: at[good],
        FAILED: kind[good] == s.EventType.FAIL,
    })  # fmt: skip
    return out.sort_by(ENDED_US), int((within & ~last & (kind == s.EventType.FAIL)).sum())


@dataclass
class Calls:
    """What was asked of the service, by any thread: when, what, how long it took, and whether it failed."""

    made: list[tuple[float, str, float, str]] = field(default_factory=list)

    def time(self, what: str, call: Any) -> Any:
        """Return what ``call`` does, or None where the service refuses it."""
        began, problem, answer = time.time(), "", None
        try:
            answer = call()
        except ServiceError as error:
            problem = "gone" if error.status == GONE else str(error)
        self.made.append((began, what, time.time() - began, problem))
        return answer

    def summary(self, first: float = 0.0, last: float = float("inf")) -> dict[str, Any]:
        """Return counts and times of the calls that began between two times."""
        some = [call for call in list(self.made) if first <= call[0] <= last]
        out: dict[str, Any] = {}
        for what in sorted({call[1] for call in some}):
            ms = 1000 * np.array([call[2] for call in some if call[1] == what])
            out[what] = {
                "calls": len(ms), "median_ms": round(float(np.median(ms)), 1),
                "p99_ms": round(float(np.quantile(ms, 0.99)), 1), "longest_ms": round(float(ms.max()), 1),
                "of_tasks_just_ended": sum(1 for call in some if call[1] == what and call[3] == "gone"),
            }  # fmt: skip
        problems = [call[3] for call in some if call[3] not in ("", "gone")]
        return {"routes": out, "requests": len(some), "failed": len(problems), "failures": problems[:5]}


class Singles(threading.Thread):
    """Asks for one task after another, and notes which version of the model answers."""

    def __init__(self, url: str, calls: Calls) -> None:
        super().__init__(daemon=True)
        self._url, self._calls = url, calls
        self.tasks = pa.table({name: pa.array([], pa.int64()) for name in s.TASK_KEY})
        self.versions: list[tuple[float, str]] = []
        self.over = threading.Event()

    def run(self) -> None:
        """Ask until it is over."""
        rng = np.random.default_rng(1)
        with Client(self._url, retries=0) as client:
            while not self.over.wait(SINGLES_EVERY_S):
                tasks = self.tasks
                if not len(tasks):
                    continue
                at = int(rng.integers(len(tasks)))
                key = [tasks[name][at].as_py() for name in s.TASK_KEY]
                answer = self._calls.time("one task", lambda key=key: client.task(*key))
                if answer is not None and (not self.versions or self.versions[-1][1] != answer.model.version):
                    self.versions.append((time.time(), answer.model.version))


def feed(args: argparse.Namespace) -> dict[str, Any]:
    """Tell the service slot after slot, and return what was told, what came of it, and how promotions went."""
    dataset = Dataset.open(args.dataset)
    ahead = round(args.history_h * HOUR_SLOTS)
    first_us = round(args.start_h * 3.6e9)
    source = Source(dataset, args.buckets, first_us, first_us + (ahead + args.slots) * SLOT_US)
    calls, told, rng = Calls(), dict.fromkeys(("rows", "taken", "late", "repeated"), 0), np.random.default_rng(0)
    refused: dict[str, int] = {}
    singles = Singles(args.url, calls)

    def count(answer: Any) -> None:
        if answer is not None:
            for name in told:
                told[name] += getattr(answer, name)
            for code, n in answer.refused.items():
                refused[code] = refused.get(code, 0) + n

    with Client(args.url, retries=0) as client:
        reference = client.ready().about["model"]["reference"]
        for hour in range(0, ahead, HOUR_SLOTS):
            usage = source.usage(hour, min(hour + HOUR_SLOTS, ahead))
            count(client.usage_table(usage).write)
            client.tasks_table(source.ends(hour, min(hour + HOUR_SLOTS, ahead)))
        began = time.time()
        moved: list[tuple[float, str]] = []
        singles.start()
        held = before = source.usage(0, 0)
        n_ends = n_failed = 0
        for k in range(args.slots):
            usage, following = source.usage(ahead + k, ahead + k + 1), source.usage(ahead + k + 1, ahead + k + 2)
            back = (rng.random(len(usage)) < HELD_BACK) & _in(usage, following)
            answer = "cell" if k % WHOLE_CELL_EVERY == 0 else "none"
            now = usage.filter(pa.array(~back))
            written = calls.time(f"usage, answer={answer}", lambda t=now, a=answer: client.usage_table(t, answer=a))
            count(None if written is None else written.write)
            again = before.filter(pa.array(rng.random(len(before)) < REPEATED))
            out_of_turn = pa.concat_tables([again, held])
            if len(out_of_turn):
                written = calls.time("usage, late and repeated", lambda t=out_of_turn: client.usage_table(t))
                count(None if written is None else written.write)
            ends = source.ends(ahead + k - 1, ahead + k)  # a slot later, when their last windows are told
            if len(ends):
                calls.time("ends of tasks", lambda t=ends: client.tasks_table(t))
                n_ends, n_failed = n_ends + len(ends), n_failed + pc.sum(ends[FAILED]).as_py()
            singles.tasks, held, before = now.select(list(s.TASK_KEY)), usage.filter(pa.array(back)), now
            if args.promote and k in (args.slots // 3, 2 * args.slots // 3):
                version = args.promote if not moved else args.back
                moved.append((time.time(), version))
                _move(reference, version)
            time.sleep(max(began + (k + 1) * args.every_s - time.time(), 0.0))
        ended = time.time()
        singles.over.set()
        singles.join()
        state = client.state()
    promotions = []
    for at, version in moved:
        done = next((when for when, which in singles.versions if when >= at and which == version), None)
        around = calls.summary(at - 5.0, (done or at) + 10.0)
        promotions.append({
            "to_version": version, "answered_by_it_after_s": None if done is None else round(done - at, 2),
            "requests_around_it": around["requests"], "failed_around_it": around["failed"],
            "longest_ms_around_it": max(route["longest_ms"] for route in around["routes"].values()),
        })  # fmt: skip
    return {
        "dataset": {"name": dataset.manifest["name"], "nature": dataset.manifest["nature"], "buckets": args.buckets,
                    "of_buckets": dataset.n_buckets, "start_h": args.start_h, "history_h": args.history_h},
        "began": began, "ended": ended, "slots": args.slots, "seconds_a_slot": round((ended - began) / args.slots, 3),
        "cell_hours": args.slots / HOUR_SLOTS, "tasks_tracked_at_end": state.tracked, "windows": {**told, **refused},
        "ends_told": n_ends, "failures_told": n_failed,
        "failures_followed_by_another_run": source.failures_restarted, "promotions": promotions, **calls.summary(began),
    }  # fmt: skip


def _in(tasks: pa.Table, others: pa.Table) -> Any:
    """Return which rows are of tasks that the other table has, too."""
    there = set(zip(*(others[name].to_pylist() for name in s.TASK_KEY), strict=True))
    return np.array([key in there for key in zip(*(tasks[name].to_pylist() for name in s.TASK_KEY), strict=True)], bool)


def _move(reference: str, version: str) -> None:
    from mlflow import MlflowClient

    name, _, alias = reference.partition("@")
    MlflowClient().set_registered_model_alias(name, alias, version)


def main() -> None:
    """Feed or draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("feed", help="feed a running service")
    one.add_argument("dataset", type=Path, help="folder made by `reclaim ingest`")
    one.add_argument("--url", default="http://127.0.0.1:3000")
    one.add_argument("--buckets", type=int, default=150, help="how many of the dataset's buckets: bounds the load")
    one.add_argument("--start-h", type=float, default=96.25, help="where to begin, hours of the trace")
    one.add_argument("--history-h", type=float, default=24.0, help="told first, an hour at a time, at once")
    one.add_argument("--slots", type=int, default=600, help="slots of 5 minutes, told one by one")
    one.add_argument("--every-s", type=float, default=1.5, help="seconds from one slot to the next")
    one.add_argument("--promote", default="", help="version that the served alias is moved to after a third")
    one.add_argument("--back", default="1", help="version that it is moved back to after two thirds")
    one.add_argument("--out", type=Path, required=True)
    two = commands.add_parser("draw", help="draw the panels of a run that was fed")
    two.add_argument("--prometheus", default="http://127.0.0.1:9090")
    two.add_argument("--feed", type=Path, required=True, help="what `feed` wrote")
    two.add_argument("--rate-s", type=int, default=60, help="for $__rate_interval, in seconds of wall clock")
    two.add_argument("--range-s", type=int, default=300, help="for $range, in seconds of wall clock")
    two.add_argument("--margin", default="baseline", help="for $margin")
    two.add_argument("--out", type=Path, required=True, help="PNG; numbers go beside it as JSON")
    args = parser.parse_args()
    if args.command == "feed":
        args.out.write_text(json.dumps(feed(args), indent=2) + "\n")
    else:
        dashboard_panels.draw(args)


if __name__ == "__main__":
    main()
