"""Documents agree with the code: every command is in the README and has help, and the reference is generated."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from reclaim import reference
from reclaim.cli import app as cli
from reclaim.replay.runs.catalogue import EXPERIMENTS

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
VERBS = sorted(get_command(cli.app).commands)  # type: ignore[attr-defined] # a group, whose commands these are


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_is_in_the_readme_and_has_help_with_an_example(verb: str) -> None:
    assert f"reclaim {verb}" in README
    for names in [[verb]] if verb != "replay" else [[verb], *([verb, name] for name in EXPERIMENTS)]:
        result = CliRunner().invoke(cli.app, [*names, "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"})
        assert result.exit_code == 0
        assert re.search(rf"Examples?: .*reclaim {' '.join(names)}", result.output.replace("\n", " ")), result.output


def test_the_help_of_all_commands_has_examples_from_usage_to_a_service() -> None:
    shown = " ".join(CliRunner().invoke(cli.app, ["--help"], env={"COLUMNS": "200", "NO_COLOR": "1"}).output.split())
    examples = shown.partition("Examples: ")[2]
    verbs = ["ingest", "features", "train", "replay", "serve"]
    assert sorted(verbs, key=lambda verb: examples.index(f"reclaim {verb}")) == verbs


def test_every_experiment_has_a_verb_and_every_verb_of_the_replay_an_experiment() -> None:
    replay = get_command(cli.app).commands["replay"]  # type: ignore[attr-defined] # a group, whose commands these are
    assert set(replay.commands) == set(EXPERIMENTS)


def test_every_command_of_the_design_exists() -> None:
    assert {"synth", "ingest", "features", "train", "replay", "compare", "serve", "demo"} <= set(VERBS)


def test_the_reference_page_is_generated_from_the_code() -> None:
    page = (ROOT / "docs" / "reference.md").read_text()
    assert page == reference.render(), "run `python -m reclaim.reference > docs/reference.md`"


def test_help_imports_none_of_the_heavy_libraries() -> None:
    code = (
        "import sys; from reclaim.cli.app import app; from typer.main import get_command; get_command(app);"
        "print([m for m in ('torch', 'mlflow', 'pandas', 'pyarrow', 'numba', 'sklearn', 'bentoml', 'duckdb')"
        " if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_readme_is_short() -> None:
    lines = README.splitlines()
    assert len(lines) <= 150
    assert [line for line in lines if len(line) > 140] == []


def test_the_example_request_of_the_readme_is_one_the_service_takes() -> None:
    from reclaim.serving.wire.errors import parse_request

    body = re.search(r"/v1/reservations --json '(.*?)'", README, re.DOTALL)
    assert body is not None
    request = parse_request(body.group(1).encode())
    assert len(request.tasks[0].windows) == 2


def test_the_example_answers_have_no_cpu_above_the_limit() -> None:
    for page in (README, (ROOT / "docs" / "http-api.md").read_text()):
        request, answer = re.findall(r"/v1/reservations --json '(.*?)'.*?```json\n(.*?)```", page, re.DOTALL)[0]
        (limit,) = re.findall(r'"limit": {"cpu": ([\d.]+)', request)
        amounts = re.findall(r'"(?:peak_cpu|reservation)": (?:{"cpu": )?([\d.]+)', answer)
        assert len(amounts) == 2
        assert max(map(float, amounts)) <= float(limit)
