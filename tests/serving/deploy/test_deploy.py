"""Packages of the service: a bento that is built and served here; files for others, which are looked over."""

from __future__ import annotations

import configparser
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from reclaim.cli import app as cli
from reclaim.serving.http.guard import PROBES
from reclaim.serving.settings import ENV_PREFIX, ServingSettings
from reclaim.training.tracking.references import BUILTIN_VERSION
from tests.serving.test_launch import call, wait_until_ready

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "serving" / "deploy"
CONTAINERFILE, UNIT, MANIFEST, FEED = (
    DEPLOY / name for name in ("Containerfile", "reclaim.service", "kubernetes.yaml", "feed.yaml")
)


def _command(name: str) -> Any:
    verbs: Any = typer.main.get_command(cli.app)  # a group, as there are several
    return verbs.commands[name]


USER = "10001"
"""User of the container, in the container file and in the manifest."""
OPTIONS = {option for parameter in _command("serve").params for option in parameter.opts}


def lend_kernels(source: Path) -> None:
    """Give the bento the kernels that were compiled for the very same code here: compiling them takes a minute."""
    for copy in source.rglob("*.py"):
        original = ROOT / "src" / "reclaim" / copy.relative_to(source)
        if original.is_file():
            shutil.copystat(original, copy)  # a kernel belongs to a source of that age
            copy.parent.joinpath("__pycache__").mkdir(exist_ok=True)
            for kernel in original.parent.joinpath("__pycache__").glob(f"{copy.stem}.*.nb[ic]"):
                shutil.copy(kernel, copy.parent / "__pycache__")


@pytest.mark.slow
def test_a_bento_is_built_and_serves_the_model_that_it_carries_and_without_one_the_built_in(
    bundle_folder: Path, free_port: int, tmp_path: Path
) -> None:
    home = tmp_path / "bentoml"
    environment = os.environ | {"BENTOML_HOME": str(home), "BENTOML_DO_NOT_TRACK": "True"}
    bentoml = [sys.executable, "-m", "bentoml"]
    build = subprocess.run(
        [*bentoml, "build", "--output", "tag"], env=environment, cwd=ROOT, capture_output=True, text=True, check=True
    )
    tag = build.stdout.strip().splitlines()[-1].removeprefix("__tag__:")
    source = home / "bentos" / tag.replace(":", "/") / "src"
    assert {path.name for path in source.iterdir()} >= {"reclaim", "data", "features", "training", "serving"}
    assert not [path for path in source.rglob("*") if path.is_symlink() or "tests" in path.parts]
    lend_kernels(source)
    environment |= {"BENTOML_CONTAINERIZED": "True", "PYTHONDONTWRITEBYTECODE": ""}
    shutil.copytree(bundle_folder, source / "model")  # as the build does with model/ of the checkout
    (source / "model" / "origin.json").write_text(json.dumps({"name": "reclaim", "version": "7", "run_id": "1"}))
    carried, aside = source / "model", source / "aside"
    for model in ({"name": "reclaim", "version": "7"}, {"name": "builtin", "version": BUILTIN_VERSION}):
        if model["name"] == "builtin":
            carried.rename(aside)
        with (tmp_path / "log").open("w+") as log:
            server = subprocess.Popen(
                [*bentoml, "serve", tag, "--host", "127.0.0.1", "--port", str(free_port)],
                env=environment, cwd=tmp_path, stdout=log, stderr=log,
            )  # fmt: skip
            try:
                wait_until_ready(server, free_port)
                task = {"collection_id": 1, "limit": {"cpu": 2.0, "memory": 4e9}}
                status, content = call(free_port, "POST", "/v1/reservations", json.dumps({"tasks": [task]}).encode())
                assert status == 200, content
                answer = json.loads(content)
                assert answer["tasks"][0]["reservation"] == task["limit"]  # nothing is known of the task yet
                assert answer["model"] == model
            finally:
                server.send_signal(signal.SIGTERM)
                server.wait(timeout=120)
                log.seek(0)
                output = log.read()
        assert "Traceback" not in output, output
    assert list((source / "serving" / "__pycache__").glob("service.*.pyc")), "the code was another's than the bento's"


def variables(text: str) -> set[str]:
    """Return the settings that a text speaks of, by their names."""
    return {name.lower() for name in re.findall(rf"{ENV_PREFIX}([A-Z_]*[A-Z])", text)}


@pytest.mark.parametrize(
    "path", sorted(path for path in DEPLOY.iterdir() if path.is_file()), ids=lambda path: path.name
)
def test_every_variable_that_a_file_names_is_a_setting(path: Path) -> None:
    assert variables(path.read_text()) <= set(ServingSettings.model_fields)


INSTRUCTION = re.compile(
    r"(FROM|ARG|ENV|RUN|COPY|USER|WORKDIR|VOLUME|EXPOSE|HEALTHCHECK|ENTRYPOINT|CMD|STOPSIGNAL) (.+)"
)


def instructions() -> list[tuple[str, str]]:
    """Return the container file's instructions and what each is given, comments gone and lines joined."""
    text = "\n".join(line for line in CONTAINERFILE.read_text().splitlines() if not line.lstrip().startswith("#"))
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    found = [INSTRUCTION.fullmatch(line) for line in lines]
    assert all(found), [line for line, match in zip(lines, found, strict=True) if match is None]
    return [(match[1], match[2].strip()) for match in found if match]


def given(name: str) -> list[str]:
    return [rest for instruction, rest in instructions() if instruction == name]


def test_the_container_runs_what_exists_as_nobody_in_particular() -> None:
    assert given("FROM") == ["python:3.11-slim"]
    sources = [source for copy in given("COPY") for source in shlex.split(copy)[:-1] if not source.startswith("--")]
    assert sources
    assert all((ROOT / source).exists() for source in sources)
    let_in = [line[1:] for line in (DEPLOY / "Containerfile.dockerignore").read_text().splitlines() if line[:1] == "!"]
    assert sorted(let_in) == sorted(source.rstrip("/") for source in sources)
    (install,) = [run for run in given("RUN") if "pip install" in run]
    assert "--no-cache-dir" in install
    names = [name for name, _ in instructions()]
    assert given("USER") == [USER]
    assert names.index("USER") < names.index("ENTRYPOINT")
    assert f"--uid {USER}" in CONTAINERFILE.read_text()
    assert given("EXPOSE") == ["3000"]
    (volume,) = [json.loads(volume) for volume in given("VOLUME")]
    assert f"RECLAIM_STATE={volume[0]}" in " ".join(given("ENV"))
    command = [word for name in ("ENTRYPOINT", "CMD") for words in given(name) for word in json.loads(words)]
    assert command[:2] == ["reclaim", "serve"]
    assert {word for word in command if word.startswith("--")} <= OPTIONS
    (check,) = given("HEALTHCHECK")
    program = json.loads(check[check.index("[") :])
    assert program[0] == "python"
    compile(program[2], "healthcheck", "exec")
    assert any(f":3000{probe}" in program[2] for probe in PROBES)


def unit() -> configparser.ConfigParser:
    parsed = configparser.ConfigParser(strict=False, interpolation=None)
    parsed.optionxform = str  # type: ignore[assignment,method-assign]  # the documented way to keep capitals
    parsed.read(UNIT)
    return parsed


def test_the_unit_confines_the_service() -> None:
    service = unit()["Service"]
    wanted = {
        "NoNewPrivileges": "yes", "ProtectSystem": "strict", "ProtectHome": "yes", "PrivateTmp": "yes",
        "DynamicUser": "yes", "StateDirectory": "reclaim", "Restart": "on-failure", "CapabilityBoundingSet": "",
    }  # fmt: skip
    assert {name: service[name] for name in wanted} == wanted
    assert service["LoadCredential"].startswith("token:")
    command = shlex.split(service["ExecStart"].replace("\\\n", " "))
    assert command[1] == "serve"
    assert {word for word in command if word.startswith("--")} <= OPTIONS
    assert "--insecure" not in command
    assert "MemoryDenyWriteExecute" not in service  # the kernels are compiled while it runs
    assert int(service["TimeoutStopSec"]) > 20  # of which requests under way may take 20


def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not on this machine")
    program = shlex.split(unit()["Service"]["ExecStart"])[0]
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace(program, sys.executable))  # it must exist
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(copy)], capture_output=True, text=True, check=False
    )
    complaints = [line for line in checked.stderr.splitlines() if UNIT.name in line]
    assert not complaints, checked.stderr
    assert checked.returncode == 0, checked.stderr


def documents() -> dict[str, Any]:
    return {document["kind"]: document for document in yaml.safe_load_all(MANIFEST.read_text())}


def test_the_manifest_runs_one_writer_that_is_watched() -> None:
    kinds = documents()
    assert set(kinds) == {"Deployment", "Service", "PersistentVolumeClaim"}
    deployment = kinds["Deployment"]["spec"]
    assert (deployment["replicas"], deployment["strategy"]) == (1, {"type": "Recreate"})  # the state has one writer
    pod = deployment["template"]["spec"]
    (container,) = pod["containers"]
    probes = {name: container[f"{name}Probe"]["httpGet"]["path"] for name in ("liveness", "readiness", "startup")}
    assert probes == {"liveness": "/livez", "readiness": "/readyz", "startup": "/livez"}
    assert set(probes.values()) <= set(PROBES)
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"http": 3000}
    assert {container[f"{name}Probe"]["httpGet"]["port"] for name in probes} == {"http"}
    assert kinds["Service"]["spec"]["ports"][0]["targetPort"] == "http"
    assert kinds["Service"]["spec"]["selector"] == deployment["template"]["metadata"]["labels"]
    assert deployment["selector"]["matchLabels"] == deployment["template"]["metadata"]["labels"]
    assert {word for word in container.get("args", ()) if word.startswith("--")} <= OPTIONS
    assert pod["terminationGracePeriodSeconds"] > 20


def test_the_manifest_grants_nothing_that_is_not_needed() -> None:
    pod = documents()["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["automountServiceAccountToken"] is False
    assert (pod["securityContext"]["runAsNonRoot"], str(pod["securityContext"]["runAsUser"])) == (True, USER)
    own = container["securityContext"]
    assert own["allowPrivilegeEscalation"] is False
    assert own["readOnlyRootFilesystem"] is True
    assert own["capabilities"] == {"drop": ["ALL"]}
    assert set(container["resources"]) == {"requests", "limits"}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert set(mounts) == set(volumes)
    environment = {variable["name"]: variable.get("value", "") for variable in container["env"]}
    assert environment["RECLAIM_STATE"].startswith(mounts["state"])
    assert environment["HOME"].startswith(mounts["state"])  # the one place, with /tmp, that can be written
    assert environment["RECLAIM_TOKEN_FILE"].startswith(mounts["token"])
    claim = documents()["PersistentVolumeClaim"]
    assert volumes["state"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert "ReadWriteOncePod" in claim["spec"]["accessModes"]
    assert "secretName" in volumes["token"]["secret"]


def test_the_feed_has_a_pod_and_a_claim_of_its_own_and_is_confined_as_the_service_is() -> None:
    kinds = {document["kind"]: document for document in yaml.safe_load_all(FEED.read_text())}
    assert set(kinds) == {"Deployment", "PersistentVolumeClaim"}
    deployment, ours = kinds["Deployment"]["spec"], documents()
    assert (deployment["replicas"], deployment["strategy"]) == (1, {"type": "Recreate"})  # one writes the history
    assert deployment["selector"]["matchLabels"] == deployment["template"]["metadata"]["labels"]
    assert kinds["PersistentVolumeClaim"]["metadata"]["name"] != ours["PersistentVolumeClaim"]["metadata"]["name"]
    pod, of_service = deployment["template"]["spec"], ours["Deployment"]["spec"]["template"]["spec"]
    (service,), (history,), (feed,) = of_service["containers"], pod["initContainers"], pod["containers"]
    for key in ("automountServiceAccountToken", "securityContext"):
        assert pod[key] == of_service[key]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    claim = kinds["PersistentVolumeClaim"]["metadata"]["name"]
    assert volumes["history"] == {"name": "history", "persistentVolumeClaim": {"claimName": claim}}
    assert {mount["name"] for mount in feed["volumeMounts"]} == set(volumes)
    assert volumes["token"] in of_service["volumes"]
    for container in (history, feed):
        assert container["image"] == service["image"]
        assert container["securityContext"] == service["securityContext"]
        assert set(container["resources"]) == {"requests", "limits"}
        program, name, *arguments = container["command"]
        assert program == "reclaim"
        with _command(name).make_context(name, arguments) as context:
            found = context.params
        assert str(found["out"] if name == "fetch" else found["history"]) == "/var/lib/reclaim/history"
        assert found["url"].startswith("http")
    environment = {variable["name"]: variable["value"] for variable in service["env"]}
    assert str(found["service_token_file"]) == environment["RECLAIM_TOKEN_FILE"]
    port = ours["Service"]["spec"]["ports"][0]["port"]
    assert found["service"] == f"http://{ours['Service']['metadata']['name']}:{port}"
    assert found["listen"].endswith(f":{feed['ports'][0]['containerPort']}")
