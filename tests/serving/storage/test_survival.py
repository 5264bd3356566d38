"""A real server killed under load keeps all acknowledged windows and answers like an uninterrupted one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import httpx
import pytest

from reclaim.serving.cell.tracker import FORMAT
from reclaim.serving.storage.store import Store
from reclaim.training.bundle import Bundle
from tests.serving.kill_harness import Cell, Load, Server, Survival, different, made_up, never_killed, survive

pytestmark = pytest.mark.slow

STATELESS = {"tasks": [{"collection_id": 1, "limit": {"cpu": 1, "memory": 1}, "windows": [
    {"start_us": 0, "end_us": 300_000_000, "cpu_mean": 0.1, "memory_max": 0.1}]}]}  # fmt: skip


@pytest.fixture(scope="module")
def cell() -> Cell:
    return made_up(tasks=120, slots=30, pieces=6)


@pytest.fixture
def server(bundle_folder: Path, tmp_path: Path) -> Server:
    return Server(bundle_folder, tmp_path)


def assert_nothing_is_lost(found: Survival, cell: Cell) -> None:
    assert found.failures == []
    assert found.lost == 0
    assert found.wrong == 0
    assert found.acknowledged == cell.rows
    assert found.tasks > 80


def test_a_server_killed_under_load_keeps_acknowledged_windows_and_answers_like_an_uninterrupted_one(
    cell: Cell, bundle: Bundle, server: Server
) -> None:
    found = survive(cell, bundle, server, kills=2, while_starting=1, longest_s=0.5, pause_s=0.05)
    assert_nothing_is_lost(found, cell)
    assert (found.kills, found.kills_while_starting) == (2, 1)
    assert found.refused >= found.kills  # or it was killed while no request was open


def test_a_cell_that_begins_next_to_a_state_of_another_format_survives_kills_and_leaves_that_as_it_is(
    cell: Cell, bundle: Bundle, server: Server
) -> None:
    earlier = server.state / "cell"
    Store.open(earlier, state_version=FORMAT - 1).close()
    before = {path.name: path.read_bytes() for path in earlier.glob("*-*")}
    assert before
    found = survive(cell, bundle, server, kills=2, while_starting=1, longest_s=0.5, pause_s=0.05)
    assert_nothing_is_lost(found, cell)
    assert {path.name: path.read_bytes() for path in earlier.glob("*-*")} == before
    assert list((server.state / f"format-{FORMAT}").glob("log-*"))


def test_a_server_stopped_under_load_loses_nothing(cell: Cell, bundle: Bundle, server: Server) -> None:
    codes: list[int] = []
    found = survive(cell, bundle, server, kills=1, longest_s=0.5, pause_s=0.05, end=lambda s: codes.append(s.stop()))
    assert_nothing_is_lost(found, cell)
    assert codes == [0]
    assert found.notes == []
    assert "Traceback" not in server.log.read_text()


@pytest.fixture(scope="module")
def told_state(cell: Cell, bundle_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the state of a server that was sent some slots, then killed."""
    with Server(bundle_folder, tmp_path_factory.mktemp("told")) as server:
        load = Load(Cell(cell.slots[:20], [[] for _ in range(20)]), server)
        load.open.set()
        load.run()
        assert load.failures == []
    return server.state


@pytest.fixture
def told(told_state: Path, server: Server) -> Server:
    """Return a server that will start with that state."""
    shutil.copytree(told_state, server.state)
    return server


def test_a_damaged_end_of_the_log_is_cut_off_with_a_note_and_its_windows_can_be_sent_again(
    told: Server, cell: Cell, bundle: Bundle
) -> None:
    log = max((told.state / f"format-{FORMAT}").glob("log-*.bin"))
    with log.open("r+b") as file:
        file.truncate(log.stat().st_size - 100)
    with told:
        state = told.wait()
        assert state["ready"]
        assert any(log.name in note and "cut off" in note for note in state["notes"])
        before = Cell(cell.slots[:20], [[] for _ in range(20)])
        load = Load(before, told)
        load.open.set()
        load.run()
        assert different(told.answer(), never_killed(before, bundle)) == 0


def test_a_damaged_middle_of_the_log_is_reported_and_stateless_requests_are_still_answered(told: Server) -> None:
    log = min((told.state / f"format-{FORMAT}").glob("log-*.bin"))
    with log.open("r+b") as file:
        file.seek(log.stat().st_size // 2)
        was = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([was ^ 1]))
    with told:
        state = told.wait()
        assert not state["ready"]
        assert log.name in state["state"]
        ready = httpx.get(f"{told.url}/readyz", timeout=120)
        assert ready.status_code == 503
        usage = httpx.get(f"{told.url}/v1/cell/reservations", timeout=120)
        assert usage.status_code == 503
        assert log.name in usage.json()["error"]["message"]
        stateless = httpx.post(f"{told.url}/v1/reservations", content=json.dumps(STATELESS), timeout=120)
        assert stateless.status_code == 200
        assert httpx.get(f"{told.url}/livez", timeout=120).status_code == 200
