"""Checks before a process becomes the server, and one real server."""

from __future__ import annotations

import http.client
import json
import logging
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import psutil
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from reclaim.cli import app as cli
from reclaim.data.errors import ConfigError, ModelError
from reclaim.data.schema import RESOURCES
from reclaim.serving import launch
from reclaim.serving.client import Client, ServiceError
from reclaim.serving.settings import read_settings
from reclaim.training.bundle import Bundle

if TYPE_CHECKING:
    from tests.serving.conftest import History

Json = dict[str, Any]
Taken = tuple[tuple[str, int], launch.Tls, dict[str, str]]
"""Where the server listens, its certificate and key, and its environment."""


class TakenOver(Exception):
    """Stands where the process would have become the server."""


@pytest.fixture
def taken_over(monkeypatch: pytest.MonkeyPatch) -> list[Taken]:
    calls: list[Taken] = []

    def become_the_server(listening: socket.socket, tls: launch.Tls, environment: dict[str, str]) -> NoReturn:
        assert listening.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        calls.append((listening.getsockname()[:2], tls, environment))
        raise TakenOver

    monkeypatch.setattr(launch, "_become_the_server", become_the_server)
    return calls


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Work in a folder of the test's own, as the state is kept in the working folder."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.write_text("0123456789abcdef\n")
    return file


def taken(calls: list[Taken], **options: Any) -> Taken:
    """Return what the server of a launch would have gone on with."""
    with pytest.raises(TakenOver):
        launch.serve(**options)
    return calls.pop()


def test_the_server_takes_the_process_with_the_model_already_fetched(
    taken_over: list[Taken], bundle_folder: Path, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(bundle_folder.parent)
    address, tls, environment = taken(taken_over, host="localhost", port=free_port, model="./bundle", state=None)
    assert address == ("127.0.0.1", free_port)
    assert tls == (None, None)
    assert environment["RECLAIM_BUNDLE"] == str(bundle_folder)
    assert environment["RECLAIM_MODEL"] == "./bundle"
    assert "RECLAIM_STATE" not in environment
    assert environment["BENTOML_DO_NOT_TRACK"] == "True"
    assert os.environ.get("RECLAIM_BUNDLE") is None  # only the server's environment is changed


@pytest.mark.usefixtures("loggers_as_before")
def test_a_log_of_json_has_the_warnings_of_the_start(
    taken_over: list[Taken], free_port: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///nowhere.db")
    taken(taken_over, port=free_port, state=None, log_json=True)  # no champion: the built-in model, with a warning
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["level"] for line in lines if "the built-in model serves until there is one" in line["message"]] == [
        "WARNING"
    ]


@pytest.mark.usefixtures("loggers_as_before")
def test_options_are_handed_on_as_settings(
    taken_over: list[Taken], bundle_folder: Path, free_port: int, token_file: Path, elsewhere: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("BENTOML_CONFIG_OPTIONS", "services.reclaim.backlog=100")
    monkeypatch.setenv("RECLAIM_BODY_TIMEOUT_S", "10")
    os.symlink(token_file, elsewhere / "token")
    _, _, environment = taken(
        taken_over, port=free_port, model=str(bundle_folder), shadow="reclaim@candidate", token_file=Path("token"),
        log_json=True, clock="trace",
    )  # fmt: skip
    assert environment["RECLAIM_CLOCK"] == "trace"
    assert environment["RECLAIM_SHADOW"] == "reclaim@candidate"
    assert environment["RECLAIM_TOKEN_FILE"] == str(elsewhere / "token")
    assert environment["RECLAIM_LOG_JSON"] == "True"
    assert environment["RECLAIM_STATE"] == str(elsewhere / "reclaim-state")
    assert (elsewhere / "reclaim-state").stat().st_mode & 0o777 == 0o700  # what a cell uses is private
    assert environment["RECLAIM_BUNDLE"].startswith(str(elsewhere / "reclaim-state" / "models"))
    options = "services.reclaim.traffic.timeout=75.0 services.reclaim.backlog=100"
    assert environment["BENTOML_CONFIG_OPTIONS"] == options  # 10 s for the body, 60 s for the answer
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    settings = read_settings()  # what is handed on can be read
    assert (settings.shadow, settings.log_json, settings.token_file) == (
        "reclaim@candidate", True, elsewhere / "token",
    )  # fmt: skip


def test_a_state_of_the_environment_is_not_kept_in_memory_alone_unless_asked(
    taken_over: list[Taken], bundle_folder: Path, free_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RECLAIM_STATE", str(tmp_path / "state"))
    _, _, environment = taken(taken_over, port=free_port, model=str(bundle_folder), state=None)
    assert "RECLAIM_STATE" not in environment
    assert not (tmp_path / "state").exists()
    monkeypatch.setattr("reclaim.serving.http.process.prepare_process", lambda: None)
    monkeypatch.setattr(sys, "argv", ["reclaim", "serve", "--port", str(free_port), "--model", str(bundle_folder)])
    with pytest.raises(TakenOver):
        cli.app(standalone_mode=False)
    assert taken_over.pop()[2]["RECLAIM_STATE"] == str(tmp_path / "state")
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--in-memory"])  # an option goes before the environment
    with pytest.raises(TakenOver):
        cli.app(standalone_mode=False)
    assert "RECLAIM_STATE" not in taken_over.pop()[2]


@pytest.mark.parametrize("option", [["--state", "kept"], ["--repair"]])
def test_options_of_the_state_are_refused_with_in_memory(
    option: list[str], taken_over: list[Taken], elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reclaim.serving.http.process.prepare_process", lambda: None)
    monkeypatch.setattr(sys, "argv", ["reclaim", "serve", "--model", "./nowhere", "--in-memory", *option])
    with pytest.raises(
        ConfigError, match=f"--in-memory keeps no state, and {option[0]} needs one; leave one of them out"
    ):
        cli.app(standalone_mode=False)
    assert not (elsewhere / "kept").exists()
    assert not taken_over


def test_a_state_that_cannot_be_kept_is_refused(taken_over: list[Taken], free_port: int, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"the state cannot be kept in .*file/state .*--in-memory"):
        launch.serve(port=free_port, model="./nowhere", state=tmp_path / "file" / "state")
    assert not taken_over


def test_a_start_that_is_refused_leaves_no_new_folder_and_what_was_there(
    taken_over: list[Taken], free_port: int, tmp_path: Path, elsewhere: Path
) -> None:
    (tmp_path / "kept").mkdir()
    starts: list[Json] = [{}, {"state": Path("a/b"), "record": Path("a/c/d")}, {"state": tmp_path / "kept"}]
    for options in starts:
        with pytest.raises(ModelError, match="no model"):
            launch.serve(port=free_port, model="./nowhere", **options)
    assert not list(elsewhere.iterdir())
    assert (tmp_path / "kept").is_dir()
    assert not taken_over


def test_a_folder_that_windows_cannot_be_recorded_in_is_refused_before_the_first_hour_is_lost(
    taken_over: list[Taken], free_port: int, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"windows cannot be recorded in .*file/seen .*--record"):
        launch.serve(port=free_port, model="./nowhere", state=None, record=tmp_path / "file" / "seen")
    (tmp_path / "manifest.json").touch()
    with pytest.raises(ConfigError, match="is a finished dataset; choose another folder with --record"):
        launch.serve(port=free_port, model="./nowhere", state=None, record=tmp_path)
    assert not taken_over


def test_other_machines_are_let_in_with_a_token_alone(
    taken_over: list[Taken], bundle_folder: Path, free_port: int, tmp_path: Path, token_file: Path,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    options: Json = {"host": "0.0.0.0", "port": free_port, "model": str(bundle_folder), "state": None}
    with pytest.raises(ConfigError, match=r"lets other machines in.*--token-file.*--insecure"):
        launch.serve(**options)
    assert not taken_over
    address, _, _ = taken(taken_over, **options, token_file=token_file)
    assert address[0] == "0.0.0.0"
    assert "unencrypted" in caplog.text
    caplog.clear()
    taken(taken_over, **options, insecure=True)
    assert "no token is asked for" in caplog.text
    caplog.clear()
    monkeypatch.setenv("RECLAIM_TOKEN_FILE", str(token_file))  # the environment's token is one, too
    cert, key = make_certificate(tmp_path)
    _, tls, _ = taken(taken_over, **options, tls_cert=cert, tls_key=key)
    assert tls == (cert, key)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    token_file.write_text("short")
    with pytest.raises(ConfigError, match="must hold one token"):
        launch.serve(port=free_port, model=str(bundle_folder), state=None)


def make_certificate(folder: Path, password: bytes | None = None) -> tuple[Path, Path]:
    """Return the files of a certificate for 127.0.0.1 and of its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "reclaim")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now, now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    files = folder / "cert.pem", folder / "key.pem"
    files[0].write_bytes(made.public_bytes(serialization.Encoding.PEM))
    locked = serialization.NoEncryption() if password is None else serialization.BestAvailableEncryption(password)
    pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    files[1].write_bytes(key.private_bytes(pem, form, locked))
    return files


def test_a_certificate_that_cannot_be_used_is_refused(taken_over: list[Taken], free_port: int, tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path)
    options: Json = {"port": free_port, "model": "./nowhere", "state": None}
    for half in ("tls_cert", "tls_key"):
        with pytest.raises(ConfigError, match="--tls-cert and --tls-key go together"):
            launch.serve(**{**options, half: cert})
    with pytest.raises(ConfigError, match=r"none: No such file or directory; --tls-cert and --tls-key name PEM files"):
        launch.serve(**options, tls_cert=cert, tls_key=tmp_path / "none")
    with pytest.raises(ConfigError, match=r"cannot be used"):
        launch.serve(**options, tls_cert=cert, tls_key=cert)
    (tmp_path / "locked").mkdir()
    other, locked = make_certificate(tmp_path / "locked", b"password")
    with pytest.raises(ConfigError, match=r"cannot be used"):
        launch.serve(**options, tls_cert=other, tls_key=locked)
    with pytest.raises(ConfigError, match=r"cannot be used: KEY_VALUES_MISMATCH"):
        launch.serve(**options, tls_cert=other, tls_key=key)
    assert not taken_over


def test_a_busy_port_is_refused_before_anything_is_loaded(taken_over: list[Taken]) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1 port {port} \(.*in use\); choose another with --port"):
            launch.serve(port=port, model="./nowhere")
    assert not taken_over


@pytest.mark.parametrize(
    ("host", "port", "message"),
    [
        ("127.0.0.1", 0, "--port must be between 1 and 65535, got 0"),
        ("127.0.0.1", 70_000, "--port must be between 1 and 65535, got 70000"),
        ("no such host", 3_000, "--host: no address for 'no such host'"),
        ("a..b", 3_000, "--host: no address for 'a..b'"),
        ("192.0.2.1", 3_000, "cannot listen on 192.0.2.1 port 3000"),  # kept for documentation: no machine has it
    ],
)
def test_an_address_that_cannot_be_used_is_refused(taken_over: list[Taken], host: str, port: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        launch.serve(host, port, "./nowhere")
    assert not taken_over


def test_a_model_that_is_none_is_refused(taken_over: list[Taken], free_port: int, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no model '\./nowhere'"):
        launch.serve(port=free_port, model="./nowhere")
    with pytest.raises(ModelError, match=r"holds no bundle\.json"):
        launch.serve(port=free_port, model=str(tmp_path))
    assert not taken_over


def call(
    port: int, method: str, path: str, body: bytes | None = None, *, tls: ssl.SSLContext | None = None, token: str = ""
) -> tuple[int, bytes]:
    if tls is None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    else:
        connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=120, context=tls)
    try:
        connection.request(method, path, body, {"Authorization": f"Bearer {token}"} if token else {})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def wait_until_ready(
    server: subprocess.Popen[bytes], port: int, deadline_s: float = 600, *, tls: ssl.SSLContext | None = None
) -> None:
    start = time.monotonic()
    while time.monotonic() - start < deadline_s:
        assert server.poll() is None, "the server ended while it started"
        try:
            if call(port, "GET", "/readyz", tls=tls)[0] == 200:
                return
        except OSError:  # it does not listen yet
            pass
        time.sleep(0.2)
    pytest.fail(f"the server was not ready after {deadline_s} s")


@pytest.mark.slow
def test_a_real_server_answers_what_a_replay_measured_and_ends_without_a_trace(
    bundle: Bundle, bundle_folder: Path, history: History, free_port: int, tmp_path: Path,
    token_file: Path,
) -> None:  # fmt: skip
    cert, key = make_certificate(tmp_path)
    tls, token = ssl.create_default_context(cafile=cert), token_file.read_text().strip()
    command = [sys.executable, "-m", "reclaim", "serve", "--port", free_port, "--model", bundle_folder]
    command += ["--tls-cert", cert, "--tls-key", key, "--token-file", token_file]
    (tmp_path / "file").touch()
    environment = os.environ | {"HOME": str(tmp_path / "file")}  # not even the superuser can make a folder in it
    environment.pop("BENTOML_HOME", None)
    log = (tmp_path / "log").open("w+b")
    server = subprocess.Popen(
        [str(c) for c in command], env=environment, stdout=log, stderr=log, cwd=tmp_path,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # these tests may run under nohup
    )  # fmt: skip
    try:
        wait_until_ready(server, free_port, tls=tls)
        process = psutil.Process(server.pid)
        assert process.children() == []  # no other process holds the state, or outlives it
        assert not [lib for lib in process.memory_maps() if "libtorch" in lib.path]  # half of the time of a start

        def send(method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
            return call(free_port, method, path, body, tls=tls, token=token)

        def ask(tasks: list[Json]) -> list[Json]:
            status, content = send("POST", "/v1/reservations", json.dumps({"tasks": tasks}).encode())
            assert status == 200, content
            answered: list[Json] = json.loads(content)["tasks"]
            return answered

        served = ask(history.tasks)
        estimate = bundle.estimator("baseline").update(history.windows.task_numbers(), history.windows)
        last = history.windows.task_starts()[1:] - 1
        reservations = [[task["reservation"][r] for r in RESOURCES] for task in served]
        np.testing.assert_array_equal(reservations, estimate.reservation[last])

        alone = [ask([task]) for task in history.tasks]
        with ThreadPoolExecutor(8) as callers:  # large and small requests at once
            at_once = list(callers.map(ask, [history.tasks, *([task] for task in history.tasks)] * 3))
        assert at_once == [served, *alone] * 3

        status, content = send("POST", "/v1/reservations", b'{"tasks": [{"limit": {"cpu": NaN}}]}')
        assert (status, json.loads(content)["error"]["task"]) == (422, 0)
        assert call(free_port, "GET", "/livez", tls=tls)[0] == 200
        for path in ("/metrics", "/", "/docs.json", "/v1/model"):
            assert call(free_port, "GET", path, tls=tls)[0] == 401
        with pytest.raises(ServiceError, match=r"no answer from [^(]*: .*certificate verify failed") as untrusted:
            Client(f"https://127.0.0.1:{free_port}", token=token).state()  # of its own authorities; not tried again
        assert not untrusted.value.temporary
        try:
            raise untrusted.value
        except ServiceError:  # a caller that goes on with another service
            with pytest.raises(ServiceError, match="refused") as absent:
                Client("http://127.0.0.1:9", retries=1).state()
        assert absent.value.temporary
        status, metrics = send("GET", "/metrics")
        assert status == 200
        assert b'endpoint="/v1/reservations",method="POST",status="4xx"' in metrics
        assert b"bentoml" not in metrics  # whose series are one for each path, kept for ever
    finally:
        server.send_signal(signal.SIGHUP)  # its terminal closes
        exit_code = server.wait(timeout=120)
        log.seek(0)
        output = log.read().decode()
        log.close()
    assert exit_code == 0, output
    assert "Traceback" not in output, output
    assert token not in output
    with pytest.raises(ConnectionRefusedError):
        call(free_port, "GET", "/livez")
