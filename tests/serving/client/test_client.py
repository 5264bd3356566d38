"""The typed client: every route against a real server, and what it does when the service or the network does not."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pyarrow as pa
import pytest

from reclaim.data import schema as s
from reclaim.data.errors import ConfigError, ReclaimError
from reclaim.serving.client import Client, RefusedRowsError, ServiceError, transport
from reclaim.serving.wire.arrow import write_table
from reclaim.serving.wire.cell_schemas import CellQuery, CollectionFacts, TaskFacts, TaskName, UsageWindow, WriteAnswer
from reclaim.serving.wire.machine_schemas import Candidate, FitRequest, MachineCapacity
from reclaim.serving.wire.schemas import ErrorBody, ErrorResponse, ReservationRequest, ResourceLimit, Task, Window

SLOT_US = 300_000_000
LIMIT = ResourceLimit(cpu=1.0, memory=4e9)
TOKEN = "0123456789abcdef"


@pytest.fixture(scope="module")
def client(make_app: Any, at_url: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """Give a client of a service that asks for a token and remembers two tasks; refusals of rows are in answers."""
    file = tmp_path_factory.mktemp("token") / "token"
    file.write_text(TOKEN)
    with make_app(token_file=file) as (app, _), at_url(app) as url, Client(url, token=TOKEN) as client:
        client.usage([usage(1, slot) for slot in range(3)])
        client.usage([usage(2, slot) for slot in range(3)])
        yield client


def usage(collection: int, slot: int, limit: ResourceLimit | None = LIMIT, index: int = 0) -> UsageWindow:
    return UsageWindow(
        collection_id=collection, instance_index=index, start_us=slot * SLOT_US, end_us=(slot + 1) * SLOT_US,
        cpu_mean=0.2, cpu_max=0.5, memory_max=1e9, limit=limit,
    )  # fmt: skip


def table(*windows: UsageWindow) -> pa.Table:
    rows = [
        w.model_dump(include={s.COLLECTION_ID, s.INSTANCE_INDEX, s.START_US, s.END_US, s.CPU_MEAN, s.CPU_MAX})
        | {s.MEMORY_MAX: w.memory_max}
        | {s.CPU_LIMIT: w.limit.cpu if w.limit else None, s.MEMORY_LIMIT: w.limit.memory if w.limit else None}
        for w in windows
    ]
    return pa.Table.from_pylist(rows)


def test_histories_are_answered_as_a_request_and_as_a_table(client: Client) -> None:
    windows = [
        Window(start_us=k * SLOT_US, end_us=(k + 1) * SLOT_US, cpu_mean=0.2, cpu_max=0.5, memory_max=1e9)
        for k in range(3)
    ]
    answer = client.reservations(ReservationRequest(tasks=[Task(collection_id=1, limit=LIMIT, windows=windows)]))
    found = client.reservations_table(table(*(usage(1, slot) for slot in range(3))), quantiles=True)
    (task,), (row,) = answer.tasks, found.table.to_pylist()
    assert (row["cpu_reservation"], row["memory_reservation"]) == (task.reservation.cpu, task.reservation.memory)
    assert (found.about.model, found.about.units, found.about.levels) == (
        answer.model, answer.units, tuple(answer.levels),
    )  # fmt: skip
    assert (found.about.clock_us, found.about.refused) == (None, {})
    assert len(row["cpu_quantiles"]) == len(found.about.levels)


def test_usage_is_told_as_windows_and_as_a_table(client: Client) -> None:
    answer = client.usage([usage(3, 0), usage(3, 1)], answer="tasks", margin="medium", quantiles=False)
    assert (answer.taken, answer.repeated) == (2, 0)
    assert answer.reservations is not None
    (task,) = answer.reservations.tasks
    assert (task.collection_id, task.margin, task.quantiles) == (3, "medium", None)
    again = client.usage_table(table(usage(3, 1), usage(3, 2)))
    assert (again.write.taken, again.write.repeated, again.reservations) == (1, 1, None)
    whole = client.usage_table(table(usage(3, 3)), answer="cell", budget=0.5)
    assert whole.write.taken == 1
    assert whole.reservations is not None
    assert set(whole.reservations.table["collection_id"].to_pylist()) >= {1, 2, 3}
    assert whole.reservations.about.clock_us == whole.write.clock_us


def test_facts_are_told_and_the_cell_is_asked(client: Client) -> None:
    told = client.tasks(
        [TaskFacts(collection_id=2, machine_id=5, tier="prod")], [CollectionFacts(collection_id=2, estimation=False)]
    )
    assert (told.rows, told.taken) == (2, 2)
    as_table = pa.table({s.COLLECTION_ID: [2], s.SCHEDULING_CLASS: [3], s.SCHEDULED_US: [0]})
    assert client.tasks_table(as_table).taken == 1
    (page,) = client.cell(CellQuery(machines=[5]))
    (task,) = page.tasks
    assert (task.tier, task.rule.cpu, task.reservation) == ("prod", "opt_out", task.limit)
    known = client.task(2)
    assert (known.scheduling_class, known.scheduled_us, known.estimation) == (3, 0, False)
    unknown = client.cell_table(CellQuery(tasks=[TaskName(collection_id=9, limit=LIMIT)]))
    assert unknown.table["cpu_rule"].to_pylist() == ["unknown"]


def test_machines_are_listed_explained_and_asked_for_room(client: Client) -> None:
    client.usage([usage(61, 0), usage(62, 0)])
    client.tasks([TaskFacts(collection_id=61, machine_id=71), TaskFacts(collection_id=62, machine_id=72)])
    pages = list(client.machines(page_size=1))
    assert [len(page.machines) for page in pages] == [1] * len(pages)
    listed = [page.machines[0] for page in pages]
    ids = [machine.machine_id for machine in listed]
    assert {71, 72} <= set(ids)
    assert client.machines_table()[s.MACHINE_ID].to_pylist() == ids
    assert client.machine(71).machine == listed[ids.index(71)]
    candidate = Candidate(collection_id=61, limit=LIMIT)
    there = [MachineCapacity(machine_id=m, capacity=ResourceLimit(cpu=9.0, memory=9e9)) for m in (71, 72)]
    answer = client.fit(FitRequest(candidates=[candidate], machines=there, margin="medium"))
    assert (answer.margin, [place.machine_id for place in answer.candidates[0].places]) == ("medium", [72])
    with pytest.raises(ServiceError, match="404 unknown_machine"):
        client.machine(77)
    with pytest.raises(ServiceError, match="no_capacity"):
        client.fit(FitRequest(candidates=[candidate]))


def test_all_pages_are_read(client: Client) -> None:
    pages = list(client.cell(CellQuery(page_size=1)))
    assert [len(page.tasks) for page in pages] == [1] * len(pages)
    listed = [page.tasks[0].collection_id for page in pages]
    assert listed == client.cell_table().table[s.COLLECTION_ID].to_pylist()
    names = [TaskName(collection_id=c) for c in (2, 1)]
    some = client.cell(CellQuery(tasks=names, page_size=1))
    assert [page.tasks[0].collection_id for page in some] == [2, 1]


def test_the_service_says_what_it_is_and_how_it_fares(client: Client) -> None:
    assert client.model().default_margin == "baseline"
    assert client.state().durable is False
    assert client.ready().ready
    assert client.ready().about["store"] == "memory only"


def test_a_refusal_carries_the_status_and_the_services_words(client: Client) -> None:
    with pytest.raises(ServiceError, match="404 unknown_task: task 77/0 is unknown") as caught:
        client.task(77)
    assert isinstance(caught.value, ReclaimError)
    assert caught.value.status == 404
    assert caught.value.error is not None
    assert caught.value.error.code == "unknown_task"
    with pytest.raises(ServiceError, match="invalid_columns"):
        client.usage_table(pa.table({"more": [1]}))


def test_refused_rows_are_an_error_only_to_the_strict(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    assert client.usage([usage(88, 0, limit=None)]).refused == {"no_limit": 1}
    monkeypatch.setattr(client, "_strict", True)
    bad = table(usage(4, 0), usage(88, 0, limit=None))
    for call in (
        lambda: client.usage([usage(4, 0), usage(88, 0, limit=None)]),
        lambda: client.usage_table(bad),
        lambda: client.usage_table(bad, answer="tasks"),
        lambda: client.reservations_table(bad),
    ):
        with pytest.raises(RefusedRowsError, match=r"rows were refused \(1 no_limit\); the first: row 1") as caught:
            call()
        assert (caught.value.refused, caught.value.errors[0].row) == ({"no_limit": 1}, 1)
    assert client.task(4).task.history.windows == 1  # the good row was taken all the same


def test_a_wrong_token_is_not_retried(client: Client, waits: list[float]) -> None:
    url = str(client._transport._http.base_url)
    with Client(url, token="f" * 16) as stranger, pytest.raises(ServiceError, match="401 unauthorized"):
        stranger.state()
    assert waits == []


def test_a_token_as_read_from_its_file_is_sent_without_the_line_end_and_no_error_shows_one() -> None:
    def state(request: httpx.Request) -> httpx.Response:
        assert request.headers["authorization"] == f"Bearer {TOKEN}"
        return httpx.Response(200, json={"ready": True})

    with Client("http://service", token=TOKEN + "\n", transport=httpx.MockTransport(state)) as client:
        assert client.ready().ready
    for wrong in ("", "\n", "first\nsecond", "passé"):
        with pytest.raises(ConfigError, match=r"^token: expected visible ASCII") as caught:
            Client("http://service", token=wrong)
        assert not wrong.strip() or wrong not in str(caught.value)


def refusal(status: int, **headers: str) -> httpx.Response:
    error = ErrorBody(code="some_code", message="some message", field=None, row=None, task=None, window=None)
    return httpx.Response(status, content=ErrorResponse(error=error).model_dump_json(), headers=headers)


STATE = (
    b'{"tracked":0,"collections_without_estimation":0,"clock_us":null,"bytes":0,"bytes_per_task":0,'
    b'"durable":true,"store":"ok","notes":[],"log_bytes":0,"snapshot_bytes":0,"snapshot_age_s":null,"waiting":0,'
    b'"follows":false,"advice":[],"prices":[],"machine_margins":[]}'
)


class ScriptedService:
    """Stands in for the service: gives one scripted response or failure a request, and then good answers."""

    def __init__(self, *does: httpx.Response | type[httpx.TransportError]) -> None:
        self.does = list(does)
        self.asked: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        """Do the next thing."""
        self.asked.append(request)
        now = self.does.pop(0) if self.does else httpx.Response(200, content=STATE)
        if isinstance(now, httpx.Response):
            return now
        raise now("gone", request=request)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Replace time by a clock that only sleeping moves; give what was slept, in seconds."""
    slept: list[float] = []
    clock = SimpleNamespace(sleep=slept.append, monotonic=lambda: sum(slept))
    monkeypatch.setattr(transport, "time", clock)
    monkeypatch.setattr(transport, "random", SimpleNamespace(uniform=lambda _, high: high))
    return slept


def client_of(script: ScriptedService, **options: Any) -> Client:
    return Client("http://service", transport=httpx.MockTransport(script), **options)


@pytest.mark.parametrize(
    "trouble",
    [
        httpx.ConnectError, httpx.ConnectTimeout, httpx.ReadTimeout, httpx.ReadError, httpx.WriteError,
        httpx.RemoteProtocolError, httpx.PoolTimeout, httpx.DecodingError, refusal(429), refusal(503), refusal(507),
        refusal(502), httpx.Response(504, content=b"<html>"),
    ],
)  # fmt: skip
def test_temporary_failures_are_retried(trouble: Any, waits: list[float]) -> None:
    script = ScriptedService(trouble, trouble)
    assert client_of(script).state().durable
    assert waits == [0.1, 0.2]
    assert len({(r.method, r.url, r.content) for r in script.asked}) == 1


@pytest.mark.parametrize("status", [400, 401, 404, 405, 408, 413, 415, 422, 500, 302])
def test_permanent_refusals_are_not_retried(status: int, waits: list[float]) -> None:
    script = ScriptedService(refusal(status))
    with pytest.raises(ServiceError, match=f"{status} some_code: some message") as caught:
        client_of(script).state()
    assert (caught.value.status, len(script.asked), waits) == (status, 1, [])


def test_retry_after_is_waited_for(waits: list[float]) -> None:
    script = ScriptedService(refusal(429, **{"retry-after": "7"}), refusal(503, **{"retry-after": "soon"}))
    assert client_of(script).state().durable
    assert waits == [7.1, 0.2]


def test_waits_grow_up_to_a_bound_and_are_drawn(waits: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ServiceError):
        client_of(ScriptedService(*[refusal(503)] * 99), patience_s=1e9).state()
    assert waits == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0, 5.0]
    monkeypatch.setattr(transport, "random", SimpleNamespace(uniform=lambda low, high: (low + high) / 2))
    waits.clear()
    assert client_of(ScriptedService(refusal(503))).state().durable
    assert waits == [0.05]


def test_after_its_patience_the_client_raises_the_last_refusal(waits: list[float]) -> None:
    script = ScriptedService(*[refusal(503, **{"retry-after": "4"})] * 99)
    with pytest.raises(ServiceError, match="503 some_code") as caught:
        client_of(script, patience_s=10).state()
    assert caught.value.status == 503
    assert sum(waits) < 10
    assert len(script.asked) == 3  # at 0, 4.1 and 8.3 s; the next would be too late
    script = ScriptedService(*[httpx.ConnectError] * 99)
    with pytest.raises(
        ServiceError, match=r"no answer from http://service/? \(tried 3 times\): gone; is the"
    ) as caught:
        client_of(script, retries=2).state()
    assert (caught.value.status, caught.value.error, len(script.asked)) == (None, None, 3)


def test_an_attempt_waits_no_longer_than_patience_lasts(waits: list[float]) -> None:
    script = ScriptedService(refusal(429, **{"retry-after": "7"}), httpx.ReadTimeout)
    assert client_of(script, timeout_s=5.0, patience_s=10.0).state().durable
    assert [request.extensions["timeout"]["read"] for request in script.asked] == pytest.approx([5.0, 2.9, 2.7])
    assert waits == [7.1, 0.2]


def test_readiness_is_asked_once(waits: list[float]) -> None:
    starting = httpx.Response(503, json={"ready": False, "why": "starting"})
    found = client_of(ScriptedService(starting)).ready()
    assert (found.ready, found.about["why"]) == (False, "starting")
    with pytest.raises(ServiceError, match="is the service running there"):
        client_of(ScriptedService(httpx.ConnectError)).ready()
    with pytest.raises(ServiceError, match="404"):
        client_of(ScriptedService(refusal(404))).ready()
    assert waits == []


def test_an_answer_of_a_later_release_may_say_more(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    known = client.task(1, 0)
    send = transport.Transport.send

    def more(*arguments: Any) -> httpx.Response:
        answer = json.loads(send(*arguments).content)
        return httpx.Response(200, json=answer | {"news": 1, "task": answer["task"] | {"moons": 2}})

    monkeypatch.setattr(transport.Transport, "send", more)
    assert client.task(1, 0) == known


def test_an_answer_of_another_kind_is_said_to_be_one() -> None:
    with pytest.raises(ServiceError, match="the answer is not a StateInfo"):
        client_of(ScriptedService(httpx.Response(200, content=b"{}"))).state()
    with pytest.raises(ServiceError, match="the answer is not a table of reservations"):
        client_of(ScriptedService()).cell_table()
    with pytest.raises(ServiceError, match="status 404, in another form than the service's"):
        client_of(ScriptedService(httpx.Response(404, content=b"<html>"))).state()


ROWS = table(usage(1, 0))
ASKED = {"margin": "medium", "budget": "0.2"}


@pytest.mark.parametrize(
    ("call", "asked"),
    [
        (lambda c: c.task(1, margin="medium", budget=0.2), ASKED),
        (lambda c: c.reservations_table(ROWS, margin="medium", budget=0.2), ASKED | {"quantiles": "false"}),
        (
            lambda c: c.usage([usage(1, 0)], answer="cell", margin="medium", budget=0.2, page_size=7, quantiles=True),
            ASKED | {"answer": "cell", "page_size": "7", "quantiles": "true"},
        ),
        (
            lambda c: c.usage_table(ROWS, answer="cell", margin="medium", budget=0.2, quantiles=True),
            ASKED | {"answer": "cell", "quantiles": "true"},
        ),
        (lambda c: next(c.machines(horizon_s=900)), {"page_size": "1000", "horizon_s": "900"}),
        (lambda c: c.machines_table(horizon_s=900), {"horizon_s": "900"}),
        (lambda c: c.machines_table(), {}),
    ],
)
def test_the_margin_budget_and_horizon_that_a_call_names_are_sent(call: Any, asked: dict[str, str]) -> None:
    script = ScriptedService(httpx.Response(200, content=b"{}"))
    with pytest.raises(ServiceError, match="is the service of another release"):
        call(client_of(script))
    assert dict(script.asked[0].url.params) == asked


@pytest.mark.parametrize("of", [{"clock_us": "soon"}, {"levels": "0.5,"}, {"errors": "[{"}, {"errors": "[{}]"}])
def test_a_table_whose_facts_are_of_another_form_is_said_to_be_one(of: dict[str, str]) -> None:
    facts = {
        "model_name": "m", "model_version": "1", "horizon_s": "3600", "levels": "0.5", "cpu_unit": "cores",
        "memory_unit": "bytes", "clock_us": "-1", "tracked": "4",
    }  # fmt: skip

    def answer(metadata: dict[str, str]) -> httpx.Response:
        empty = pa.schema([(s.COLLECTION_ID, pa.int64())], metadata).empty_table()
        return httpx.Response(200, content=write_table(empty).to_pybytes())

    about = client_of(ScriptedService(answer(facts))).cell_table().about
    assert (about.clock_us, about.tracked, about.levels, about.errors) == (None, 4, (0.5,), [])
    with pytest.raises(ServiceError, match="the answer is not a table of reservations"):
        client_of(ScriptedService(answer(facts | of))).cell_table()


def test_readiness_without_an_object_in_its_body_has_no_facts() -> None:
    for content in (b"[]", b"<html>"):
        found = client_of(ScriptedService(httpx.Response(200, content=content))).ready()
        assert (found.ready, found.about) == (True, {})


def test_refused_facts_are_an_error_to_the_strict() -> None:
    error = ErrorBody(code="some_code", message="some message", field=None, row=1, task=None, window=None)
    content = WriteAnswer(
        rows=2, taken=1, late=0, repeated=0, refused={"some_code": 1}, errors=[error], clock_us=None, durable=False
    ).model_dump_json()
    calls: tuple[Callable[[Client], WriteAnswer], ...] = (
        lambda c: c.tasks([TaskFacts(collection_id=1)]),
        lambda c: c.tasks_table(ROWS),
    )
    for call in calls:
        answer = call(client_of(ScriptedService(httpx.Response(200, content=content))))
        assert answer.refused == {"some_code": 1}
        with pytest.raises(RefusedRowsError, match="some message"):
            call(client_of(ScriptedService(httpx.Response(200, content=content)), strict=True))


def test_a_write_is_safe_to_repeat(client: Client, waits: list[float]) -> None:
    """The answer gets lost on its way; the second attempt finds the window there already."""
    lost = iter([True, False])
    inner = client._transport._http._transport

    def lose(request: httpx.Request) -> httpx.Response:
        response = inner.handle_request(request)
        response.read()
        if next(lost):
            raise httpx.ReadError("gone", request=request)
        return response

    url = str(client._transport._http.base_url)
    again = Client(url, token=TOKEN, transport=httpx.MockTransport(lose))
    answer = again.usage([usage(5, 0)])
    assert (answer.taken, answer.repeated) == (0, 1)
    assert len(waits) == 1
    assert client.task(5).task.history.windows == 1


def test_a_file_of_certificates_is_used_for_the_service(tmp_path: Path) -> None:
    file = tmp_path / "ca.pem"
    file.write_text("nothing")
    for given in (file, str(file)):
        with pytest.raises(ConfigError, match=r"ca\.pem: not certificates in PEM \(.*NO_CERTIFICATE"):
            Client("https://service", verify=given)
    with pytest.raises(ConfigError, match=r"nowhere: not certificates in PEM \(No such file or directory\)$"):
        Client("https://service", verify=tmp_path / "nowhere")


@pytest.mark.parametrize(
    "url", ["127.0.0.1:3000", "", "http://", "ftp://service", "http://service:port", "http://[::1"]
)
def test_an_address_that_is_none_is_refused_at_once(url: str) -> None:
    with pytest.raises(ConfigError, match=r"^url: .* such as http://127\.0\.0\.1:3000"):
        Client(url)


def test_fewer_retries_than_none_are_refused() -> None:
    with pytest.raises(ConfigError, match="retries: expected 0 or more, got -1"):
        Client("http://service", retries=-1)


@pytest.mark.parametrize("seconds", [None, math.nan, math.inf, 0, -1.0, "5", True])
def test_a_time_limit_that_no_wait_could_have_is_refused_at_once(seconds: Any) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"timeout_s: expected seconds, a number above 0, got {seconds!r}")):
        Client("http://service", timeout_s=seconds)


@pytest.mark.parametrize("seconds", [None, math.nan, -1.0, "5", True])
def test_patience_that_is_no_time_is_refused_at_once(seconds: Any) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"patience_s: expected seconds, 0 or more, got {seconds!r}")):
        Client("http://service", patience_s=seconds)


@pytest.mark.usefixtures("waits")
@pytest.mark.parametrize(("patience_s", "sent"), [(0, 1), (math.inf, 3)])
def test_patience_of_none_sends_once_and_patience_without_end_is_bounded_by_the_retries(
    patience_s: float, sent: int
) -> None:
    service = ScriptedService(*[httpx.ConnectError] * 3)
    client = Client("http://service", retries=2, patience_s=patience_s, transport=httpx.MockTransport(service))
    with client, pytest.raises(ServiceError):
        client.state()
    assert len(service.asked) == sent


def test_an_error_does_not_show_the_password_of_an_address() -> None:
    unreachable = httpx.MockTransport(ScriptedService(httpx.ConnectError))
    with pytest.raises(ServiceError, match=r"^no answer from http://service:3000: "):
        Client("http://me:secret@service:3000", transport=unreachable).ready()


@pytest.mark.parametrize(
    ("location", "said"),
    [
        (
            "https://login.example/",
            "302, which leads to https://login.example/, in another form than the service's; is it at http://service?",
        ),
        ("http://a:b/", "Invalid port: 'b'"),
    ],
)
def test_a_redirection_is_not_followed_nor_tried_again(location: str, said: str) -> None:
    script = ScriptedService(*[httpx.Response(302, headers={"location": location})] * 2)
    with pytest.raises(ServiceError, match=re.escape(said)) as caught:
        client_of(script).state()
    assert not caught.value.temporary
    assert len(script.asked) == 1


@pytest.mark.parametrize("variable", ["HTTP_PROXY", "http_proxy", "ALL_PROXY"])
def test_a_service_on_this_machine_is_asked_without_a_proxy(
    client: Client, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "http://127.0.0.1:1")
    with Client(str(client._transport._http.base_url), token=TOKEN, retries=0) as other:
        assert other.ready().ready


def test_the_client_imports_no_heavy_module() -> None:
    heavy = ("torch", "bentoml", "mlflow", "pandas", "numba", "fastapi", "starlette", "sklearn")
    code = f"import sys, reclaim.serving.client; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_python_lines_of_the_pages_run(make_app: Any, at_url: Any, capsys: pytest.CaptureFixture[str]) -> None:
    docs = Path(__file__).resolve().parents[3] / "docs"
    pages = "".join((docs / name).read_text() for name in ("run-on-your-cluster.md", "python.md"))
    blocks = [block for block in re.findall(r"```python\n(.*?)```", pages, re.DOTALL) if "Client(" in block]
    assert len(blocks) == 2
    with make_app() as (app, _), at_url(app) as url:
        for block in blocks:
            exec(block.replace("http://127.0.0.1:3000", url), {})
    said = capsys.readouterr().out
    assert said.startswith("2 {} [{'collection_id': 7, 'instance_index': 0, ")
    assert said.count("'medium'") == 2
    assert said.endswith("True\n")


def test_a_table_in_many_pieces_is_sent_as_one(client: Client) -> None:
    whole = table(*(usage(8, slot) for slot in range(10, 13)))
    parts = [
        whole.slice(k, 1).append_column(s.TIER, pa.array([tier]).dictionary_encode())
        for k, tier in enumerate(("free", "prod", "free"))
    ]
    sent: list[bytes] = []

    def take(request: httpx.Request) -> httpx.Response:
        sent.append(request.content)
        return httpx.Response(500)

    with pytest.raises(ServiceError, match="500"):
        Client("http://x", retries=0, transport=httpx.MockTransport(take)).usage_table(pa.concat_tables(parts))
    with pa.ipc.open_stream(sent[0]) as reader:
        assert [batch.num_rows for batch in reader] == [3]
    assert client.usage_table(pa.concat_tables(parts)).write.taken == 3
