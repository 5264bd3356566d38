"""Measures cells of growing size in one process: memory of a task by part, slots, state, and a start after a kill."""

from __future__ import annotations

import gc
import hashlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.serving.callers import ARROW, OK, Caller, request
from benchmarks.serving.cell import MadeUpCell, bulk
from benchmarks.serving.servers import MIB, Server, reclaim_server
from reclaim.data.core.parallel import THREADS
from reclaim.serving.cell.clock import CellClock
from reclaim.serving.cell.tracker import FORMAT, Tracker
from reclaim.serving.models.loader import LoadedModel, find_model
from reclaim.serving.models.scorer import Scorer
from reclaim.serving.runtime import Runtime
from reclaim.serving.settings import ServingSettings, cell_folder
from reclaim.serving.storage.formats import place_of
from reclaim.serving.storage.store import Store
from reclaim.serving.wire.arrow import write_table
from reclaim.serving.wire.rows import usage_from_arrow
from reclaim.serving.writing.replay_log import facts_of, replay_log
from reclaim.training.bundle import load_bundle

Json = dict[str, Any]

ROWS = 250_000
"""Rows of a post: a client sends a large cell in several."""
_PARTS_TASKS, _PARTS_SLOTS = 8_192, 14
_NEVER_MIB = "1000000"
_START_S = 1_800
_PARTS = {
    "record of its history, without histograms": "tracker._state._settled",
    "windows that a late one may precede": "tracker._state._pending",
    "features after the last window": "tracker._x",
    "facts and last window": "tracker._tasks",
    "scores: what each price reserves": ("tracker._scores.rises", "tracker._scores.now"),
    "scores: sums of machines": "tracker._scores.shares",
    "scores: quantiles, out-of-memory probability": ("tracker._scores.quantiles", "tracker._scores.oom"),
    "answers whose outcome moves prices": "tracker._following._online._tasks",
    "answers whose outcome moves margins of machines": "tracker._following._machines.3600._tasks",
    "the same a day ahead": "tracker._following._machines.86400._tasks",
    "answer whose quality is measured": "watch._served.quality",
    "name, and its table": ("tracker._slots", "tracker.clock.claims"),
}
"""Part of a task's memory → attributes of the runtime, or keys of a mapping, whose arrays it is."""


def parts_of(model: str) -> dict[str, int]:
    """Return the bytes that a task takes in each part, from the sizes of arrays."""
    runtime = Runtime(ServingSettings(model=model, clock="trace"))
    try:
        while runtime.writer.state == "recovering":
            time.sleep(0.05)
        cell = MadeUpCell(_PARTS_TASKS)
        for slot in range(_PARTS_SLOTS):
            body = write_table(cell.usage(slot)).to_pybytes()
            runtime.writer.write(usage_from_arrow(body, _PARTS_TASKS)).result()
        runtime.watch.shown()  # the watch is behind until it answers
        histograms = runtime.tracker._state._histograms
        names = {part: (of,) if isinstance(of, str) else of for part, of in _PARTS.items()}
        return {
            part: round(sum(_bytes(_attribute(runtime, name)) for name in of) / _PARTS_TASKS)
            for part, of in names.items()
        } | {"octaves of its histograms": round(len(histograms) * histograms.rows.itemsize / _PARTS_TASKS)}
    finally:
        runtime.close()


def measure_size(model: str, folder: Path, n: int, slots: int, *, snapshots: bool) -> Json:
    """Return what a cell of ``n`` tasks takes.

    Parameters
    ----------
    model : str
    folder : Path
        For the state, some 14 kB a task.
    n : int
    slots : int
        Slots that are written.
    snapshots : bool
        Whether the service makes snapshots, for which it takes the memory of the state once more. Without, one is made
        after the kill, by this process.
    """
    settings = {"RECLAIM_MAX_TRACKED": str(n)} | ({} if snapshots else {"RECLAIM_SNAPSHOT_MIB": _NEVER_MIB})
    cell, taken = MadeUpCell(n), []
    folder.mkdir()
    with reclaim_server(model, folder, **settings) as server:
        server.wait()
        empty = server.rss_mib()[0]
        for slot in range(slots):
            taken.append(_slot(server, cell, slot))
            print(taken[-1], flush=True)
        state, answers = server.state(), _answers(server)
        server.kill()
    found: Json = {
        "tasks": n, "windows": n * slots, "slots": taken, "empty_mib": empty,
        "bytes_per_task": round((min(slot["rss_mib"] for slot in taken[slots // 2 :]) - empty) * MIB / n),
        "counted_bytes_per_task": state["bytes_per_task"],
        "log_bytes_per_window": round(_files(folder, "log-*.bin") / n / slots, 1),
        "log_mib": round(state["log_bytes"] / MIB),
        "start": _start(model, folder, settings, answers),
    }  # fmt: skip
    if not snapshots:
        _save(model, folder)
        found["start_from_snapshot"] = _start(model, folder, settings, answers)
    return found | {"snapshot_bytes_per_task": round(_newest_snapshot(folder) / n)}


def _slot(server: Server, cell: MadeUpCell, slot: int) -> Json:
    """Write a window of every task in posts of ``ROWS``, then ask for the whole cell."""
    table, caller = cell.usage(slot), Caller(server.port)
    posts = [bulk("/v1/usage", table.slice(at, ROWS)) for at in range(0, len(table), ROWS)]
    server.reset_peak()
    cpu_s, began = server.cpu_s(), time.perf_counter()
    for post in posts:
        _answered(caller, post)
    written = time.perf_counter()
    body = _answered(caller, request("GET", "/v1/cell/reservations", accept=ARROW))
    read = time.perf_counter()
    caller.close()
    return {
        "write_s": round(written - began, 2), "read_s": round(read - written, 2),
        "server_cpu_s": round(server.cpu_s() - cpu_s, 2), "sent_mib": round(sum(map(len, posts)) / MIB),
        "got_mib": round(len(body) / MIB), "rss_mib": server.rss_mib()[0], "peak_mib": server.peak_mib(),
    }  # fmt: skip


def _start(model: str, folder: Path, settings: dict[str, str], answers: str) -> Json:
    """Start on the state that a kill left; return the seconds until it is ready, and whether all is there."""
    began = time.perf_counter()
    with reclaim_server(model, folder, **settings) as server:
        server.wait(_START_S)
        ready_s = time.perf_counter() - began
        found: Json = {"ready_s": round(ready_s, 1), "peak_mib": server.peak_mib(), "rss_mib": server.rss_mib()[0]}
        found["same_answers"] = _answers(server) == answers
        server.kill()
    print(found, flush=True)
    return found


def _answers(server: Server) -> str:
    """Return a digest of all answers: names, reservations, windows, last ends and quantiles of all tasks."""
    caller = Caller(server.port)
    body = _answered(caller, request("GET", "/v1/cell/reservations?quantiles=true", accept=ARROW))
    caller.close()
    with pa.ipc.open_stream(body) as reader:
        table = reader.read_all().replace_schema_metadata(None).combine_chunks()
    return hashlib.sha256(write_table(table)).hexdigest()


def _save(model: str, folder: Path) -> None:
    """Save a snapshot of the state in a folder; no thread writes, so that nothing is copied."""
    place, settings = find_model(model), ServingSettings(clock="trace", max_tracked=2**31)
    loaded = LoadedModel(place.name, place.version, model, load_bundle(place.folder))
    tracker = Tracker(settings, CellClock(settings, lambda: 0), THREADS)
    store = Store.open(_cell(folder), state_version=FORMAT)
    replay_log(store, tracker, settings, Scorer(loaded, settings.cell, THREADS), THREADS)
    store.save(store.roll(), tracker.memory(lambda array: array), facts_of(settings))
    store.close()
    del tracker
    gc.collect()


def _cell(folder: Path) -> Path:
    return place_of(cell_folder(folder / "state"), FORMAT).folder


def _newest_snapshot(folder: Path) -> int:
    names = sorted(_cell(folder).glob("snapshot-*"))
    return sum(path.stat().st_size for path in names[-1].iterdir()) if names else 0


def _files(folder: Path, pattern: str) -> int:
    return sum(path.stat().st_size for path in _cell(folder).glob(pattern))


def _answered(caller: Caller, sent: bytes) -> bytes:
    status, body, _ = caller.call(sent)
    if status != OK:
        raise SystemExit(f"a call was refused with {status}: {body[:1000].decode(errors='replace')}")
    return body


def _attribute(thing: object, path: str) -> object:
    for name in path.split("."):
        thing = thing[int(name)] if isinstance(thing, Mapping) else getattr(thing, name)
    return thing


def _bytes(thing: object) -> int:
    """Return the bytes of an array, or of all arrays that an object has."""
    if isinstance(thing, np.ndarray):
        return thing.nbytes
    if isinstance(thing, list):
        return sum(map(_bytes, thing))
    return sum(
        _bytes(value) for value in getattr(thing, "__dict__", {}).values() if isinstance(value, np.ndarray | list)
    )


def size_table(found: Json) -> list[str]:
    """Return the results as tables."""
    lines = ["", "| part of a task's memory | bytes |", "|---|--:|"]
    lines += [f"| {part} | {size} |" for part, size in found["parts"].items()]
    lines += [
        f"| all | {sum(found['parts'].values())} |", "",
        "| tasks | RSS B a task | write s | read s | CPU s | peak GiB | start s | snapshot B a task | log B a window |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]  # fmt: skip
    for cell in found["cells"]:
        later = cell["slots"][1:] or cell["slots"]
        write, read, cpu = (
            float(np.median([slot[k] for slot in later])) for k in ("write_s", "read_s", "server_cpu_s")
        )
        peak = max(slot["peak_mib"] for slot in cell["slots"]) / 1024
        lines.append(
            f"| {cell['tasks']:,} | {cell['bytes_per_task']:,} | {write:.1f} | {read:.2f} | {cpu:.1f} | {peak:.1f} | "
            f"{cell['start']['ready_s']} | {cell['snapshot_bytes_per_task']:,} | {cell['log_bytes_per_window']} |"
        )
    return lines
