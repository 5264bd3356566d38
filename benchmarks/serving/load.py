"""Measures the service under load, next to the same model in a plain FastAPI route, in one run on one machine.

    python -m benchmarks.serving.load --model reclaim@champion --out benchmarks/results/serving.json
    python -m benchmarks.serving.load --model reclaim@champion --soak 30 --out benchmarks/results/serving-memory.json
    python -m benchmarks.serving.load --model reclaim@champion --machines --out benchmarks/results/serving-machines.json
    python -m benchmarks.serving.load --model builtin --size 100000 250000 --out benchmarks/results/serving-size.json

A real `reclaim serve` with its state on the disk, and every write synced. The clients are one process on the same
machine; each calls again once it is answered. Servers are measured in turn, several times over. `--soak` is steady load
for so many minutes, and the memory of all processes of the server meanwhile. `--machines` is of the calls for machines
alone, and of sets of tasks in bulk in this process. `--size` is of cells of so many tasks, one after another: memory,
slots, state and a start after SIGKILL. `--quick` runs everything once, too briefly for a measurement.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from benchmarks import made_by
from benchmarks.serving.callers import ARROW, OK, Caller, Calls, Maker, hammer, one_after_another, request
from benchmarks.serving.cell import MACHINES, MadeUpCell, bulk, candidates, explained, one_task, one_window
from benchmarks.serving.machine_sets import SETS, time_sets
from benchmarks.serving.servers import MIB, Server, bare_server, reclaim_server
from benchmarks.serving.size import measure_size, parts_of, size_table
from benchmarks.serving.soak import soak, write_figure

Json = dict[str, Any]

CLIENTS = (1, 16, 64)
SINGLES = {
    "reservations": "POST /v1/reservations, one task",
    "bare": "the same in bare FastAPI",
    "usage": "POST /v1/usage, one window",
    "task": "GET /v1/tasks/…, one task",
}
BULK = {
    "reservations": "POST /v1/reservations, a window each",
    "usage": "POST /v1/usage",
    "usage_cell": "POST /v1/usage?answer=cell",
    "cell": "GET /v1/cell/reservations",
    "machines": f"GET /v1/machines, {MACHINES:,} of them",
    "machines_json": "the same as JSON, on one page",
    "machines_day": "GET /v1/machines?horizon_s=86400, Arrow",
    "machines_metrics": "GET /v1/machines/metrics",
    "fit": "POST /v1/machines/fit, 20 candidates (JSON)",
}
READ = {
    "cell": request("GET", "/v1/cell/reservations", accept=ARROW),
    "machines": request("GET", "/v1/machines", accept=ARROW),
    "machines_json": request("GET", f"/v1/machines?page_size={MACHINES}"),
    "machines_day": request("GET", "/v1/machines?horizon_s=86400", accept=ARROW),
    "machines_metrics": request("GET", "/v1/machines/metrics"),
    "fit": candidates(20),
}
"""Bulk calls that change nothing → request."""
OF_MACHINES = ("machines", "machines_json", "machines_day", "machines_metrics", "fit")


def main() -> None:
    """Measure, write and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="reclaim@champion", help="what `reclaim serve --model` takes")
    parser.add_argument("--tasks", type=int, help="tasks of the cell; 250,000, and 20,000 for --soak")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each turn of single calls")
    parser.add_argument(
        "--rounds", type=int, default=3, help="turns of each server, and a few times that of bulk calls"
    )
    parser.add_argument("--soak", type=float, metavar="MINUTES", help="steady load, and the memory meanwhile")
    parser.add_argument("--machines", action="store_true", help="calls for machines alone, and sets of tasks in bulk")
    parser.add_argument("--size", type=int, nargs="+", metavar="TASKS", help="memory, slots and starts of such cells")
    parser.add_argument("--slots", type=int, default=12, help="slots that --size writes")
    parser.add_argument("--no-snapshots", action="store_true", help="--size: the service makes none, to save memory")
    parser.add_argument("--quick", action="store_true", help="everything once, too briefly for a measurement")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.tasks, arguments.seconds, arguments.rounds = arguments.tasks or 2_000, 0.3, 1
        arguments.soak = None if arguments.soak is None else min(arguments.soak, 0.1)
    found: Json = {
        **made_by("python -m benchmarks.serving.load --model MODEL" + _told(arguments)),
        "device": f"{os.cpu_count()} cores, {_memory_gib():.0f} GiB, {platform.machine()}, client on the same cores",
        "load_average": round(os.getloadavg()[0], 2),
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="reclaim-benchmark-") as folder:
        if arguments.soak is not None:
            n = arguments.tasks or 20_000
            found |= soak(
                arguments.model, Path(folder), n, arguments.soak * 60, every_s=0.5 if arguments.quick else 5.0
            )
        elif arguments.size is not None:
            found |= {"parts": parts_of(arguments.model), "snapshots": not arguments.no_snapshots}
            found["cells"] = [
                measure_size(
                    arguments.model, Path(folder) / str(n), n, arguments.slots, snapshots=not arguments.no_snapshots
                )
                for n in arguments.size
            ]
        elif arguments.machines:
            found |= measure_machines(arguments, Path(folder)) | {"sets": time_sets(arguments.model)}
        else:
            found |= measure(arguments, Path(folder))
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")
        if arguments.soak is not None:
            write_figure(found, arguments.out.with_suffix(".png"))
    of_size = arguments.size is not None
    print(
        "\n".join(
            size_table(found) if of_size else _soak_table(found) if arguments.soak is not None else _tables(found)
        )
    )


def measure(arguments: argparse.Namespace, folder: Path) -> Json:
    """Return the durations of single and bulk calls, alone and concurrent."""
    n, seconds, rounds = arguments.tasks or 250_000, arguments.seconds, arguments.rounds
    cell = MadeUpCell(n)
    tables = (cell.usage(slot) for slot in itertools.count())
    with reclaim_server(arguments.model, folder) as ours, bare_server(arguments.model, folder) as bare:
        first = next(tables)
        for server in (ours, bare):
            server.wait()
        caller = Caller(ours.port)
        _answered(caller, bulk("/v1/usage", first))  # a cell of that size, and code that is compiled or read
        caller.close()
        for server in (ours, bare):
            hammer(server.port, one_task, 1, min(seconds, 2.0))
        windows = one_window(first_slot=1)
        makers: dict[str, tuple[Server, Maker]] = {
            "reservations": (ours, one_after_another([one_task()])),
            "bare": (bare, one_after_another([one_task()])),
            "usage": (ours, one_after_another(windows)),
            "task": (ours, one_after_another(explained(n))),
        }
        singles = _in_turn(makers, seconds, rounds)
        caller = Caller(ours.port)  # an idle connection would be closed by now
        large = _bulk(ours, caller, first, tables, 2 if arguments.quick else 1 + 3 * rounds)
        beside = {
            f"{what} beside {of}": _beside(ours, makers[what][1], first, tables, of, seconds * rounds)
            for of in ("reservations", "usage_cell")
            for what in ("reservations", "usage", "task")
        }
        caller.close()
        rss = {"reclaim": ours.rss_mib(), "bare": bare.rss_mib()}
        state = ours.state()
    return {
        "tasks": n, "singles": singles, "bulk": large, "beside": beside, "rss_mib": rss,
        "state_mib": {
            name: round(state[name] / MIB, 1) for name in ("bytes", "log_bytes", "snapshot_bytes")
        },
    }  # fmt: skip


def measure_machines(arguments: argparse.Namespace, folder: Path) -> Json:
    """Return the durations of calls for machines, in a cell that has been written twice."""
    n = arguments.tasks or 250_000
    cell = MadeUpCell(n)
    with reclaim_server(arguments.model, folder) as server:
        server.wait()
        caller = Caller(server.port)
        for slot in range(2):
            _answered(caller, bulk("/v1/usage", cell.usage(slot)))
        large = _bulk(server, caller, cell.usage(2), iter(()), 1 + 10 * arguments.rounds, OF_MACHINES)
        caller.close()
        return {"tasks": n, "bulk": large, "rss_mib": server.rss_mib()}


def _in_turn(makers: dict[str, tuple[Server, Maker]], seconds: float, rounds: int) -> Json:
    """Call the servers in turn, repeatedly, so that other load of the machine affects all of them."""
    out: Json = {}
    for clients in CLIENTS:
        calls = {name: Calls() for name in makers}
        for _ in range(rounds):
            for name, (server, make) in makers.items():
                before = server.cpu_s()
                made = hammer(server.port, make, clients, seconds)
                made.cpu_s = server.cpu_s() - before
                calls[name].add(made)
        out[str(clients)] = {name: all_made.summary() for name, all_made in calls.items()}
        print(f"{clients} clients: {json.dumps(out[str(clients)])}", flush=True)
    return out


def _requests(of: str, first: pa.Table, tables: Iterator[pa.Table]) -> Callable[[], bytes]:
    """Return the maker of requests of a kind of bulk call."""
    if of == "reservations":
        fixed = bulk("/v1/reservations", first)
        return lambda: fixed
    if of in READ:
        fixed = READ[of]
        return lambda: fixed
    path = {"usage": "/v1/usage", "usage_cell": "/v1/usage?answer=cell"}[of]
    return lambda: bulk(path, next(tables))


def _bulk(
    server: Server,
    caller: Caller,
    first: pa.Table,
    tables: Iterator[pa.Table],
    times: int,
    names: Iterable[str] = tuple(BULK),
) -> Json:
    """Return the duration of each bulk call, all kinds in turn, and the server's phases in that time."""
    taken: dict[str, list[float]] = {name: [] for name in names}
    parts: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    size: dict[str, tuple[int, int]] = {}
    cpu: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(times):
        for name in names:
            sent = _requests(name, first, tables)()
            before, cpu_s = server.phases(), server.cpu_s()
            body, seconds = _answered(caller, sent)
            cpu[name].append(server.cpu_s() - cpu_s)
            after = server.phases()
            taken[name].append(seconds)
            parts[name].append({" ".join(key): after[key] - before.get(key, 0.0) for key in after})
            size[name] = len(sent), len(body)
    out: Json = {}
    for name, made in taken.items():
        middle = {part: statistics.median(p[part] for p in parts[name]) for part in parts[name][0]}
        middle["transfer, and the rest"] = statistics.median(
            seconds - sum(p.values()) for seconds, p in zip(made, parts[name], strict=True)
        )
        out[name] = {
            "calls": len(made), "median_s": round(statistics.median(made), 4), "least_s": round(min(made), 4),
            "most_s": round(max(made), 4), "server_cpu_s": round(statistics.median(cpu[name]), 3),
            "sent_mib": round(size[name][0] / MIB, 1),
            "got_mib": round(size[name][1] / MIB, 1),
            "seconds_in": {part: round(seconds, 4) for part, seconds in middle.items() if round(seconds, 4)},
        }  # fmt: skip
        print(f"{name}: {json.dumps(out[name])}", flush=True)
    return out


def _beside(server: Server, make: Maker, first: pa.Table, tables: Iterator[pa.Table], of: str, seconds: float) -> Json:
    """Return the durations of one client's single calls while bulk calls run back to back."""
    stop = threading.Event()
    took: list[float] = []
    made = _requests(of, first, tables)

    def run() -> None:
        caller = Caller(server.port)
        sent = made()
        while not stop.is_set():
            took.append(_answered(caller, sent)[1])
            sent = made()
        caller.close()

    bulk_calls = threading.Thread(target=run)
    bulk_calls.start()
    time.sleep(min(seconds, 0.5))
    calls = hammer(server.port, make, 1, seconds)
    stop.set()
    bulk_calls.join()
    out: Json = calls.summary() | {"bulk_calls": len(took), "bulk_median_s": round(statistics.median(took), 4)}
    print(f"beside {of}: {json.dumps(out)}", flush=True)
    return out


def _answered(caller: Caller, sent: bytes) -> tuple[bytes, float]:
    status, body, seconds = caller.call(sent)
    if status != OK:
        raise SystemExit(f"a bulk call was refused with {status}: {body[:1000].decode(errors='replace')}")
    return body, seconds


def _told(arguments: argparse.Namespace) -> str:
    told = "" if arguments.tasks is None else f" --tasks {arguments.tasks}"
    told += " --machines" if arguments.machines else ""
    if arguments.size is not None:
        told += f" --size {' '.join(map(str, arguments.size))} --slots {arguments.slots}"
        return told + (" --no-snapshots" if arguments.no_snapshots else "")
    told += "" if arguments.soak is None else f" --soak {arguments.soak:g}"
    return told + (" --quick" if arguments.quick else f" --seconds {arguments.seconds:g} --rounds {arguments.rounds}")


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def _tables(found: Json) -> Iterator[str]:
    if "sets" in found:
        yield from _bulk_table(found)
        yield from (
            "",
            f"| {SETS:,} sets of tasks, ns a set | peak | with a candidate |",
            "|---|--:|--:|",
        )
        for name, of in found["sets"]["ns"].items():
            yield f"| {name} | " + " | ".join(f"{taken['least']:.0f}" for taken in of.values()) + " |"
        return
    yield from ("", "| one task | clients | p50 ms | p99 ms | server CPU ms | requests/s | failed |")
    yield "|---|--:|--:|--:|--:|--:|--:|"
    for clients, by_call in found["singles"].items():
        for name, r in by_call.items():
            row = [_ms(r, "p50_ms"), _ms(r, "p99_ms"), _ms(r, "server_cpu_ms"), f"{r.get('per_second', 0):.0f}"]
            yield f"| {SINGLES[name]} | {clients} | {' | '.join(row)} | {r['failed']} |"
    yield from _bulk_table(found)
    yield from (
        "",
        "| one task beside bulk calls | p50 ms | p99 ms | most | failed | bulk s |",
        "|---|--:|--:|--:|--:|--:|",
    )
    for name, r in found["beside"].items():
        what, _, of = name.partition(" beside ")
        yield (
            f"| {SINGLES[what]}, beside {BULK[of]} | {_ms(r, 'p50_ms')} | {_ms(r, 'p99_ms')} | {_ms(r, 'max_ms')} "
            f"| {r['failed']} | {r['bulk_median_s']:.2f} |"
        )


def _bulk_table(found: Json) -> Iterator[str]:
    yield from (
        "",
        f"| {found['tasks']:,} tasks | median s | least | most | server CPU s | MiB in, out | where |",
    )
    yield "|---|--:|--:|--:|--:|--:|---|"
    for name, r in found["bulk"].items():
        where = ", ".join(f"{part} {taken:.2f}" for part, taken in r["seconds_in"].items() if taken >= 0.005)
        size = f"{r['sent_mib']:.0f}, {r['got_mib']:.0f}"
        seconds = " | ".join(f"{r[key]:.2f}" for key in ("median_s", "least_s", "most_s", "server_cpu_s"))
        yield f"| {BULK[name]} | {seconds} | {size} | {where} |"


def _ms(row: Json, name: str) -> str:
    return f"{row[name]:.2f}" if name in row else "–"


def _soak_table(found: Json) -> Iterator[str]:
    yield from ("", "| steady load | |", "|---|---|")
    for name in (
        "minutes",
        "slots",
        "windows",
        "single_calls",
        "failed",
        "mib_at_start",
        "mib_at_end",
        "mib_per_hour",
        "verdict",
    ):
        yield f"| {name.replace('_', ' ')} | {found[name]} |"


if __name__ == "__main__":
    main()
