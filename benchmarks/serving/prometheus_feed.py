"""Measures what a slot of `reclaim feed` takes: of the server, and of the feed and the service, part by part.

    reclaim synth cluster --format openmetrics --machines 125 --days 0.4 --tasks-per-machine 8 --seed 3
    for day in cluster/*.om; do promtool tsdb create-blocks-from openmetrics $day data; done
    prometheus --storage.tsdb.path=data --storage.tsdb.retention.time=10y --web.listen-address=127.0.0.1:9090 &
    reclaim fetch prometheus history --url http://127.0.0.1:9090 --days 0.17 --end 2026-11-01T22:00
    reclaim serve --in-memory --model builtin &
    python -m benchmarks.serving.prometheus_feed history --url http://127.0.0.1:9090 --pid PID

The server must run on this machine, for its CPU time is read from /proc, and have samples after the history's end. The
history is fed first, then the slots that follow are read, folded, sent, and answered for the whole cell, one by one.
Then a feed begins again with the fold that was kept.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks import made_by
from benchmarks.serving.prometheus_cost import cpu_ms
from reclaim.data.fetch.prometheus.client import Access
from reclaim.data.fetch.prometheus.client import Client as Server
from reclaim.data.fetch.prometheus.live import LiveReader
from reclaim.data.traces.history import PIECE_S, History, read_piece
from reclaim.serving.client.client import Client
from reclaim.serving.feed.job import FOLD, SLOT_S, Feed, FeedConfig


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("history", type=Path)
    parser.add_argument("--url", required=True)
    parser.add_argument("--pid", type=int, required=True)
    parser.add_argument("--service", default="http://127.0.0.1:3000")
    parser.add_argument("--slots", type=int, default=12)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "prometheus-feed.json")
    arguments = parser.parse_args()
    access, history = Access(arguments.url), History.open(arguments.history)
    rows: list[dict[str, float]] = []
    with (
        tempfile.TemporaryDirectory() as name,
        Client(arguments.service) as service,
        Server(access) as server,
    ):
        config = FeedConfig(access, arguments.service, out=(Path(name) / "reservations.csv",))
        one = Feed(config, service, Path(name), lambda _: None)
        one.begin(history)
        reader = LiveReader(server, access, history)
        begun = time.perf_counter()
        for start_s, path in zip(history.starts_s(), history.pieces(), strict=True):
            one.take(read_piece(path), start_s, start_s + PIECE_S)
            one.send()
        fed_s, fed = time.perf_counter() - begun, one.report.windows
        for k in range(arguments.slots):
            at_s = history.range_s[1] + k * SLOT_S
            bytes_, cpu, marks = server.bytes, cpu_ms(arguments.pid), [time.perf_counter()]
            series = reader.read(at_s, at_s + SLOT_S + round(config.delay_s))
            marks.append(time.perf_counter())
            server_cpu = cpu_ms(arguments.pid) - cpu
            one.take(series, at_s, at_s + SLOT_S)
            marks.append(time.perf_counter())
            before = one.report.windows
            one.send()
            marks.append(time.perf_counter())
            one.write()
            marks.append(time.perf_counter())
            names = ("read_s", "fold_s", "send_s", "answer_s")
            spent = {name: marks[n + 1] - marks[n] for n, name in enumerate(names)}
            rows.append({**spent, "server_cpu_ms": server_cpu, "received": server.bytes - bytes_,
                         "windows": one.report.windows - before})  # fmt: skip
        begun = time.perf_counter()
        again_s = Feed(config, service, Path(name), print).begin(history)
        again_took_s = time.perf_counter() - begun
        assert again_s == at_s  # the last slot is folded again
        kept = (Path(name) / FOLD).stat().st_size
    medians = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    command = "python -m benchmarks.serving.prometheus_feed HISTORY --url URL --pid PID"
    result = {**made_by(f"{command} --slots {arguments.slots}"),
              "slots": arguments.slots, "statistic": "median of the slots",
              "history_windows": fed, "history_s": fed_s, "start_s": again_took_s, "kept_bytes": kept,
              **medians}  # fmt: skip
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
