"""Harness that kills a real server under load and compares its answers with those of an uninterrupted one."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pyarrow as pa
from numpy.typing import NDArray

from reclaim.data import schema as s
from reclaim.data.schema import RESOURCES
from reclaim.data.windows import CHANNELS, Windows, concatenate, empty_windows
from reclaim.serving.answers.encode import SERVED_RULES, cell_prices, machine_margins
from reclaim.serving.settings import ServingSettings
from reclaim.serving.wire.arrow import MEDIA_TYPE
from reclaim.training.bundle import Bundle
from reclaim.training.margins.margin import MARGIN_NAMES
from tests.serving.cell_fixtures import Json, Memory, W, fact_rows, usage_arrow, usage_json
from tests.serving.free_ports import reserved_port

SETTINGS = {"RECLAIM_CLOCK": "trace", "RECLAIM_SNAPSHOT_MIB": "1", "RECLAIM_MAX_TRACKED": "100000"}
"""Small snapshots, so that a kill finds the server at work on one."""
_START_S, _STOP_S, _ANSWER_S = 600.0, 120.0, 120.0
"""Timeouts of events that must happen (s)."""
_LOOK_BACK = 5
"""Slots of acknowledged windows that are sent again after each restart; the server must know all of them."""


@dataclass(frozen=True)
class Cell:
    """A synthetic history: the windows of each slot of the clock, in pieces of one request, and facts after it."""

    slots: list[list[Windows]]
    facts: list[list[Json]]

    @property
    def rows(self) -> int:
        """All windows."""
        return sum(len(piece) for pieces in self.slots for piece in pieces)


def made_up(tasks: int, slots: int, pieces: int, seed: int = 1) -> Cell:
    """Return a cell whose tasks come and go, with changes of limits and ends."""
    random = np.random.default_rng(seed)
    first = np.where(random.random(tasks) < 0.7, 0, random.integers(0, slots, tasks))
    ends = np.where(random.random(tasks) < 0.8, 2 * slots, first + random.integers(2, slots, tasks))
    limit = random.uniform(0.2, 2.0, (tasks, len(RESOURCES)))
    level = random.uniform(0.1, 0.8, (tasks, 1)) * limit
    told, facts = [], []
    for slot in range(slots):
        who = np.flatnonzero((first <= slot) & (slot < ends))
        windows = empty_windows(len(who))
        windows.collection_id[:], windows.instance_index[:] = 1 + who // 4, who % 4
        windows.start_us[:], windows.end_us[:] = slot * W, (slot + 1) * W
        windows.limit[:], windows.tier[:], windows.machine_id[:] = limit[who], who % 5, who % 6
        windows.user[:], windows.name[:] = who // 4 % 7, who // 4 % 11
        usage = level[who] * random.uniform(0.5, 1.2, (len(who), len(RESOURCES)))
        for name, resource in (("cpu_mean", 0), ("cpu_max", 0), ("memory_mean", 1), ("memory_max", 1)):
            windows.usage[:, CHANNELS.index(name)] = usage[:, resource]
        told.append([windows.take(part) for part in np.array_split(random.permutation(len(who)), pieces) if len(part)])
        gone = np.flatnonzero(ends == slot + 1)
        changed = random.choice(who, min(3, len(who)), replace=False)
        facts.append(
            [{**_named(t), "ended_us": (slot + 1) * W} for t in gone.tolist()]
            + [
                {**_named(t), "limit": float(random.uniform(0.3, 2.0)), "since_us": (slot + 1) * W}
                for t in changed.tolist()
                if t not in gone
            ]
        )
    return Cell(told, facts)


def _named(task: int) -> Json:
    return {"task": 1 + task // 4, "index": task % 4}


Answer = dict[str, NDArray[Any]]
"""Columns of the answers for all tasks, in order, the prices that they are made at, and the margins of machines."""
_OF_CELL = ("prices", "machines")
"""Columns among them that all answers rest on."""


def never_killed(cell: Cell, bundle: Bundle) -> Answer:
    """Return the answers of an uninterrupted tracker."""
    memory = Memory(ServingSettings(clock="trace"), bundle)
    for pieces, facts in zip(cell.slots, cell.facts, strict=True):
        memory.write(concatenate(pieces))
        if facts:
            memory.tell(fact_rows(*facts))
    found = {margin: memory.answers(margin=margin) for margin in MARGIN_NAMES}
    known = found["baseline"].known
    out: Answer = {
        "key": known.key, "windows": known.task["windows"].copy(), "end_us": known.task[s.END_US].copy(),
        "oom_probability": known.scores.oom,
        "prices": np.array([price.now for price in cell_prices(memory.tracker.prices)]),
        "machines": _outcomes([of.model_dump() for of in machine_margins(memory.tracker.prices.machines)]),
    }  # fmt: skip
    for margin, answers in found.items():
        for r, resource in enumerate(RESOURCES):
            out[f"{margin} {resource}"] = answers.estimate.reservation[:, r]
            out[f"{margin} {resource} rule"] = np.array([SERVED_RULES[rule] for rule in answers.estimate.rule[:, r]])
    return out


def _outcomes(margins: list[Json]) -> NDArray[np.float64]:
    return np.array([[of["asked"], of["judged"], of["violated"]] for of in margins])


def different(ours: Answer, theirs: Answer) -> int:
    """Return the number of tasks with different bits, or in one answer only."""
    if not np.array_equal(ours["key"], theirs["key"]):
        keys = [{tuple(key) for key in answer["key"].tolist()} for answer in (ours, theirs)]
        return len(keys[0] ^ keys[1])
    if not all(np.array_equal(ours[name], theirs[name]) for name in _OF_CELL):
        return len(ours["key"])
    wrong = np.zeros(len(ours["key"]), np.bool_)
    for name, column in ours.items():
        if name not in ("key", *_OF_CELL):
            both = column == theirs[name]
            if np.issubdtype(column.dtype, np.floating):
                both |= np.isnan(column) & np.isnan(theirs[name])
            wrong |= ~both
    return int(wrong.sum())


class Server:
    """`reclaim serve` over one folder, started and killed any number of times."""

    def __init__(self, model: Path, folder: Path, **settings: str) -> None:
        self._reserved = ExitStack()
        self.port = self._reserved.enter_context(reserved_port())
        self.url = f"http://127.0.0.1:{self.port}"
        self.state, self.log = folder / "state", folder / "log"
        self._environment = os.environ | SETTINGS | settings
        self._command = [sys.executable, "-m", "reclaim", "serve", "--model", str(model), "--port", str(self.port)]
        self._command += ["--state", str(self.state)]
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server without waiting."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, env=self._environment, stdout=log, stderr=log, cwd=self._folder
            )

    def wait(self) -> Json:
        """Return the body of /readyz once the cell's state is restored or refused."""
        until = time.monotonic() + _START_S
        with httpx.Client(base_url=self.url, timeout=_ANSWER_S) as client:  # one for all: each reads the certificates
            while time.monotonic() < until:
                assert self._process is not None
                assert self._process.poll() is None, f"the server ended while it started:\n{self.tail()}"
                with contextlib.suppress(httpx.HTTPError):
                    told: Json = client.get("/readyz").json()
                    if told.get("state", "recovering") != "recovering":
                        return told
                time.sleep(0.05)
        raise AssertionError(f"the server was not ready in {_START_S} s:\n{self.tail()}")

    def kill(self) -> None:
        """Kill all its processes at once, as a power cut would; workers have their own sessions."""
        assert self._process is not None
        family = self._family()
        for pid in (*(process.pid for process in family), self._process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait(_STOP_S)
        _, alive = psutil.wait_procs(family, _STOP_S)
        self._process = None
        assert not alive, "a process outlived SIGKILL"

    def stop(self) -> int:
        """Send SIGTERM, and return the exit code once all its processes have ended."""
        assert self._process is not None
        family = self._family()
        self._process.send_signal(signal.SIGTERM)
        code = self._process.wait(_STOP_S)
        _, alive = psutil.wait_procs(family, _STOP_S)
        self._process = None
        assert not alive, "a process outlived its server"
        return code

    def _family(self) -> list[psutil.Process]:
        assert self._process is not None
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self._process.pid).children(recursive=True)
        return []

    def tail(self) -> str:
        """Return the end of its log."""
        return self.log.read_text(errors="replace")[-3_000:]

    def answer(self) -> Answer:
        """Return its answers for the whole cell."""
        state = httpx.get(f"{self.url}/v1/cell", timeout=_ANSWER_S).raise_for_status().json()
        out: Answer = {
            "prices": np.array([price["now"] for price in state["prices"]]),
            "machines": _outcomes(state["machine_margins"]),
        }
        for margin in MARGIN_NAMES:
            accept = {"accept": MEDIA_TYPE}
            answer = httpx.get(
                f"{self.url}/v1/cell/reservations?margin={margin}", headers=accept, timeout=_ANSWER_S
            ).raise_for_status()
            with pa.ipc.open_stream(io.BytesIO(answer.content)) as reader:
                table = reader.read_all()
            key = np.column_stack([table[s.COLLECTION_ID].to_numpy(), table[s.INSTANCE_INDEX].to_numpy()])
            order = np.lexsort((key[:, 1], key[:, 0]))
            out["key"] = key[order]
            for name in ("windows", s.END_US, "oom_probability"):
                out[name] = table[name].to_numpy()[order]
            for resource in RESOURCES:
                out[f"{margin} {resource}"] = table[f"{resource}_reservation"].to_numpy()[order]
                rules = np.array(table[f"{resource}_rule"].to_pylist())
                out[f"{margin} {resource} rule"] = rules[order]
        return out

    def __enter__(self) -> Server:
        self.start()
        self.wait()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self.kill()
        self._reserved.close()


@dataclass
class Load:
    """Clients that send a cell's history slot by slot, each piece again until it is acknowledged.

    Attributes
    ----------
    acknowledged : list of (int, Windows)
        Pieces, and their slots.
    failures : list of str
        Answers that should never occur.
    refused : int
        Calls without an answer, or refused with a request to retry.
    kills : int
        Planned ends of the server. The history waits for each at its place, so that it cannot finish before them.
    killed : int
        Ends so far.
    """

    cell: Cell
    server: Server
    clients: int = 4
    pause_s: float = 0.0
    acknowledged: list[tuple[int, Windows]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    refused: int = 0
    kills: int = 0
    killed: int = 0
    open: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Send the whole history; runs in its own thread."""
        try:
            with (
                ThreadPoolExecutor(self.clients) as pool,
                httpx.Client(base_url=self.server.url, timeout=_ANSWER_S) as client,
            ):
                for slot, (pieces, facts) in enumerate(zip(self.cell.slots, self.cell.facts, strict=True)):
                    while self.killed < (self.kills + 1) * slot // len(self.cell.slots):
                        time.sleep(0.01)
                    list(pool.map(lambda k: self._tell(client, slot, k), range(len(pieces))))  # noqa: B023 - at once
                    if facts:
                        self._post(client, "/v1/tasks", {"tasks": [_as_json(fact) for fact in facts]}, len(facts))
                    time.sleep(self.pause_s)
        finally:
            self.ended.set()

    def _tell(self, client: httpx.Client, slot: int, k: int) -> None:
        windows = self.cell.slots[slot][k]
        body = usage_arrow(windows) if k % 2 else {"windows": usage_json(windows)}
        self._post(client, "/v1/usage", body, len(windows))
        self.acknowledged.append((slot, windows))

    def _post(self, client: httpx.Client, path: str, body: bytes | Json, rows: int) -> None:
        arrow = isinstance(body, bytes)
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": MEDIA_TYPE, "accept": "application/json"} if arrow else {}
        while True:
            self.open.wait()
            try:
                answer = client.post(path, content=content, headers=headers)
            except httpx.HTTPError:
                self.refused += 1
                time.sleep(0.01)
                continue
            if answer.status_code in (429, 503):
                self.refused += 1
                time.sleep(0.01)
                continue
            told = answer.json()
            if answer.status_code != 200 or told["taken"] + told["repeated"] != rows or not told["durable"]:
                self.failures.append(answer.text[:300])
            return

    def lost(self) -> int:
        """Return the number of acknowledged windows that the server does not know; called while no client sends."""
        counts: dict[tuple[int, int], int] = defaultdict(int)
        ended = {(f["task"], f["index"]) for facts in self.cell.facts for f in facts if "ended_us" in f}
        for _, windows in self.acknowledged:
            for key in zip(windows.collection_id.tolist(), windows.instance_index.tolist(), strict=True):
                counts[key] += 1
        known = self.server.answer()
        there = dict(zip(map(tuple, known["key"].tolist()), known["windows"].tolist(), strict=True))
        lost = sum(max(n - there.get(key, 0), 0) for key, n in counts.items() if key not in ended)
        latest = max((slot for slot, _ in self.acknowledged), default=0)
        recent = [windows for slot, windows in self.acknowledged if slot > latest - _LOOK_BACK]
        again = concatenate(recent) if recent else empty_windows()
        again = again.take(np.array([key not in ended for key in _keys(again)], np.bool_))
        if len(again):
            content = json.dumps({"windows": usage_json(again)})
            answer = httpx.post(f"{self.server.url}/v1/usage", content=content, timeout=_ANSWER_S)
            assert answer.status_code == 200, answer.text
            told = answer.json()
            lost += len(again) - int(told["repeated"])
        return int(lost)


def _keys(windows: Windows) -> Iterator[tuple[int, int]]:
    yield from zip(windows.collection_id.tolist(), windows.instance_index.tolist(), strict=True)


def _as_json(fact: Json) -> Json:
    out = {name: value for name, value in fact.items() if name not in ("task", "index", "limit")}
    out |= {"collection_id": fact["task"], "instance_index": fact["index"]}
    return out | ({"limit": {"cpu": fact["limit"], "memory": fact["limit"]}} if "limit" in fact else {})


@dataclass
class Survival:
    """Result of sending a history to a server that was killed."""

    kills: int = 0
    kills_while_starting: int = 0
    acknowledged: int = 0
    refused: int = 0
    lost: int = 0
    wrong: int = 0
    tasks: int = 0
    restart_s: list[float] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def survive(
    cell: Cell, bundle: Bundle, server: Server, *, kills: int, while_starting: int = 0, seed: int = 1,
    longest_s: float = 2.0, pause_s: float = 0.0, end: Callable[[Server], object] = Server.kill,
) -> Survival:  # fmt: skip
    """Send a cell's history to a server that is ended repeatedly at random moments, and compare.

    Parameters
    ----------
    cell : Cell
    bundle : Bundle
        The server's model.
    server : Server
        Not running yet; nor is it afterwards.
    kills : int
        Ends while clients send windows.
    while_starting : int
        Of these, those followed by a kill during the next start.
    longest_s : float
        Longest time between a start and an end.
    pause_s : float
        Pause between slots.
    end : callable
        Function that ends the server.
    """
    random = np.random.default_rng(seed)
    found = Survival()
    load = Load(cell, server, pause_s=pause_s, kills=kills)
    telling = threading.Thread(target=load.run, daemon=True)
    starting = set(random.choice(kills, while_starting, replace=False).tolist())
    with server:
        telling.start()
        for number in range(kills + 1):
            load.open.set()
            if number == kills:
                break
            load.ended.wait(random.uniform(0.05, longest_s))
            assert not load.ended.is_set(), "the clients gave up"
            before = load.refused
            end(server)
            load.killed += 1
            while load.refused == before and not load.ended.wait(0.01):  # it was ended while clients sent
                pass
            load.open.clear()
            found.kills += 1
            if number in starting:
                server.start()
                time.sleep(random.uniform(0, max(found.restart_s, default=5.0)))
                server.kill()
                found.kills_while_starting += 1
            began = time.monotonic()
            server.start()
            told = server.wait()
            found.restart_s.append(time.monotonic() - began)
            assert told["ready"], told
            found.notes += told["notes"]
            time.sleep(0.2)  # for calls from before the end to finish
            found.lost += load.lost()
        telling.join()
        found.acknowledged = sum(len(windows) for _, windows in load.acknowledged)
        found.refused, found.failures = load.refused, load.failures
        answer, expected = server.answer(), never_killed(cell, bundle)
        found.wrong, found.tasks = different(answer, expected), len(expected["key"])
    return found
