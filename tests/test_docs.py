"""Pages of README and docs: every printed command parses, and runs as printed unless ``_PARSED`` says why not.

The README's commands for demo and tests are run by `.ci/run` and `test_demo`, curl lines by `test_readme_lines`, Python
lines by `test_client`.
"""

from __future__ import annotations

import re
import shlex
import shutil
import tomllib
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import numpy as np
import pandas as pd
import pytest
from typer.main import get_command

from reclaim.cli import app as cli
from reclaim.config import load_config
from reclaim.data import dataset
from reclaim.data.errors import ConfigError
from reclaim.data.traces.series_mapping import load_mapping
from reclaim.serving.cell import tracker
from reclaim.training import bundle
from reclaim.training.estimators.registry import ESTIMATORS
from reclaim.training.settings import TrainConfig, shipped_configs

Printed = Callable[[str], None]

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
_STARTS = ("reclaim ", "python ", "torchrun ", "make ", "pip ", "bentoml ")
_RUN = "Your data"
"""Section of the README whose commands are run as printed; `reclaim serve` at its end is run by `test_readme_lines`."""


_ABOUT_A_DATASET = ("run-on-your-cluster", "predict-to-a-file", "settings")
_PARSED = {
    "reclaim fetch": "it needs the network",
    "reclaim ingest traces/2011": "it needs the trace",
    "reclaim ingest traces/alibaba": "it needs the trace",
    "reclaim ingest usage/": "the README's commands have run it",
    "reclaim ingest seen": "it needs what a service recorded; test_recorder ingests such a trace",
    'reclaim features "dataset-$day"': "as the one before",
    'reclaim train "dataset-$day"': "as the one before",
    "reclaim replay margins dataset --out new-or-old": "the page's first replay is of two models, too",
    "reclaim tune": "it takes minutes",
    "reclaim promote": "it may say no, with exit code 2: test_promote",
    "reclaim serve": "it runs until it is stopped; test_readme_lines runs it",
}
"""Beginnings of commands in the pages about a dataset that are parsed alone, and the reasons."""


def _commands(page: Path) -> Iterator[str]:
    """Yield the commands of blocks and of the text, without the folder of the virtual environment."""
    text = page.read_text()
    blocks = re.findall(r"^```sh\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    indented = re.findall(
        r"^    (?! )(\S.*)$", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE
    )
    inline = re.findall(r"`([^`]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE))
    for line in [*"\n".join(blocks).replace("\\\n", " ").splitlines(), *indented, *inline]:
        for part in line.split(" && "):
            command = " ".join(part.replace(".venv/bin/", "").split())
            if command.startswith(_STARTS) and "…" not in command:
                yield re.sub(r"\s+# .*", "", command)


COMMANDS = sorted({(page.name, command) for page in PAGES for command in _commands(page)})


def test_the_pages_print_commands() -> None:
    assert len(COMMANDS) > 60
    assert {command.split()[0] for _, command in COMMANDS} >= {"reclaim", "python", "torchrun", "make"}


@pytest.mark.parametrize(("page", "command"), COMMANDS)
def test_a_printed_command_exists_and_its_arguments_parse(page: str, command: str) -> None:
    program, *arguments = shlex.split(command)
    if program == "torchrun":
        program, arguments = "reclaim", arguments[arguments.index("reclaim") + 1 :]
    if program == "reclaim":
        _parse(arguments)
    elif program == "make":
        targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert set(arguments) <= set(targets)
    elif program == "python" and arguments[0] == "-c":
        exec(arguments[1], {})
    elif program == "python" and arguments[0] == "-m" and arguments[1] not in ("venv", "pip", "pytest"):
        assert (ROOT / f"{arguments[1].replace('.', '/')}.py").exists() or arguments[1].startswith("reclaim"), page
    elif program == "python" and arguments[0].endswith(".py"):
        script = ROOT / arguments[0]
        assert script.exists(), page
        for option in (word.partition("=")[0] for word in arguments if word.startswith("--")):
            assert f'"{option}"' in script.read_text(), f"{page}: {command}: {option}"
    elif program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        for named in re.findall(r"\[([a-z0-9]+)\]", command):
            assert named in extras


def _parse(arguments: list[str]) -> None:
    """Parse the arguments of `reclaim` as the command line does, without running the command."""
    command = get_command(cli.app)
    if arguments[0] in ("COMMAND", "VERB"):
        return
    while hasattr(command, "commands"):
        command = command.commands[arguments[0]]
        arguments = arguments[1:]
        if not arguments:
            return  # the name of a command, in the text
    if "--help" in arguments:
        return
    with command.make_context(command.name, list(arguments)):
        pass


def test_the_pages_say_how_many_statistical_estimators_there_are() -> None:
    said = {15: "fifteen", 16: "sixteen", 17: "seventeen", 18: "eighteen"}[len(ESTIMATORS)]
    for page, words in (
        ("README.md", f"({said} to choose from)"), ("docs/index.md", f"({said} to choose from)"),
        ("docs/how-it-works.md", f"There are {said}:"),
    ):  # fmt: skip
        assert words in " ".join((ROOT / page).read_text().split()), page


def test_the_changelog_has_the_formats_of_now() -> None:
    said = dict(re.findall(r"^\| (.+?) \| (\d+) \|", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE))
    assert said == {
        "state of a service": str(tracker.FORMAT), "bundle of a model": str(bundle.FORMAT),
        "dataset": str(dataset.FORMAT_VERSION),
    }  # fmt: skip


def test_links_of_every_document_have_targets_and_anchors() -> None:
    for page in [*PAGES, ROOT / "CHANGELOG.md", ROOT / "CONVENTIONS.md", ROOT / "benchmarks" / "LOG.md"]:
        text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)]*)\)", text):
            path = (page.parent / target) if target else page
            assert path.exists(), f"{page.name}: {target}"
            if anchor:
                assert anchor in _anchors(path) or "<!-- generated" in path.read_text(), (
                    f"{page.name}: {target}#{anchor}"
                )


def test_every_benchmark_and_every_result_is_quoted_by_a_page_or_the_log() -> None:
    folder = ROOT / "benchmarks"
    text = "\n".join(page.read_text() for page in [*PAGES, folder / "LOG.md"])
    named = set(re.findall(r"[\w.*-]+\.(?:jsonl?|md|svg|png)\b", text))
    results = [path.name for path in (folder / "results").rglob("*") if path.is_file()]
    assert [name for name in results if not any(fnmatch(name, pattern) for pattern in named)] == []
    scripts = {path: path.read_text() for path in folder.rglob("*.py") if path.stem != "__init__"}
    others = {path: text + "".join(code for other, code in scripts.items() if other != path) for path in scripts}
    names = {path: path.relative_to(ROOT).with_suffix("").as_posix() for path in scripts}
    assert [
        name for path, name in names.items() if not re.search(rf"{name}\.py|\b{name.replace('/', '.')}\b", others[path])
    ] == []


def test_the_log_is_newest_first_and_has_each_entry_by_subject_once() -> None:
    text = (ROOT / "benchmarks" / "LOG.md").read_text()
    entries = re.findall(r"^## (\d{4}-\d\d-\d\d): (.*)$", text, re.MULTILINE)
    assert [day for day, _ in entries] == sorted((day for day, _ in entries), reverse=True)
    listed = re.findall(r"^- \[(.*)\]\(#(.*)\)$", text.partition("\n## 2")[0], re.MULTILINE)
    assert sorted(listed) == sorted((title, _anchor(f"{day}: {title}")) for day, title in entries)


def _anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    return {_anchor(heading) for heading in re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)}


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def test_every_curl_line_of_every_page_is_one_that_is_run_against_the_service() -> None:
    def lines(page: Path) -> set[str]:
        blocks = re.findall(r"```sh\n(curl.*?)```", page.read_text(), re.DOTALL)
        return {line for block in blocks for line in re.split(r"\n(?=curl)", block.strip())}

    run = lines(ROOT / "docs" / "http-api.md")  # tests/serving/test_readme_lines.py runs these
    for page in PAGES:
        assert lines(page) <= run, page.name


def test_python_blocks_of_the_pages_are_python() -> None:
    for page in PAGES:
        for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
            compile(block, str(page), "exec")


def test_the_mapping_of_the_page_about_traces_is_one(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "add-a-trace-or-an-estimator.md").read_text()
    (block,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "my.toml").write_text(block)
    assert load_mapping(tmp_path / "my.toml").window_s == 300
    (tmp_path / "my.toml").write_text(block + 'no_column = "x"\n')
    with pytest.raises(ConfigError) as found:
        load_mapping(tmp_path / "my.toml")
    known = re.findall(r"\w+", str(found.value).split("(known: ")[1])
    assert "page_cache" in known
    assert [name for name in known if f"`{name}`" not in page] == []


@pytest.mark.slow
def test_the_commands_of_the_readme_for_own_data_and_the_lines_of_the_python_page_run_as_printed(
    tmp_path: Path, printed: Printed
) -> None:
    section = (ROOT / "README.md").read_text().split(f"## {_RUN}\n")[1].split("\n## ")[0]
    commands = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)[0].splitlines()
    assert commands[-1] == "reclaim serve"
    _write_usage(tmp_path)
    for command in commands[:-1]:
        printed(command)
    assert (tmp_path / "margins" / "report.html").stat().st_size > 10_000
    page = (ROOT / "docs" / "python.md").read_text()
    (block,) = [one for one in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "reclaim.open" in one]
    names: dict[str, Any] = {}
    exec(block, names)
    assert len(names["reservations"]) == 12


@pytest.mark.slow
def test_the_commands_of_the_pages_about_a_dataset_run_as_printed(tmp_path: Path, printed: Printed) -> None:
    pages = [(ROOT / "docs" / f"{name}.md").read_text() for name in _ABOUT_A_DATASET]
    lines = [line for page in pages for block in re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
             for line in block.splitlines() if not line.startswith("curl") and line.startswith("reclaim ")]  # fmt: skip
    commands = [line for line in dict.fromkeys(lines) if not line.startswith(tuple(_PARSED))]
    first = "reclaim ingest traces/a dataset"
    commands.remove(first)
    shutil.copy(ROOT / "training" / "configs" / "portable.toml", tmp_path / "best.toml")
    for command in ("reclaim synth traces/a --machines 3 --days 0.75", first, *commands):
        printed(command)
    for file in ("dataset.html", "margins/report.html", "what-if/report.html", "reservations.parquet"):
        assert (tmp_path / file).stat().st_size > 10_000, file


@pytest.fixture
def printed(
    command_line: Callable[..., CompletedProcess[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Printed:
    """Return a runner of a command as a page prints it, in an empty folder and without a record of runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)

    def run(command: str) -> None:
        program, *words = shlex.split(command)
        assert program == "reclaim"
        done = command_line(*words)
        assert done.returncode == 0, f"{command}: {done.stdout[-1000:]}{done.stderr[-1000:]}"

    return run


def _write_usage(folder: Path) -> None:
    """Write two days of twelve VMs as parquet, and a mapping of them."""
    rng = np.random.default_rng(1)
    times = np.arange(0, 2 * 86_400, 300)
    wave = 0.3 + 0.1 * np.sin(times / 86_400 * 2 * np.pi)
    frames = [
        pd.DataFrame({"vm": f"vm-{k}", "time_s": times, "cpu": np.clip(wave + rng.gamma(1.0, 0.05, len(times)), 0, 1)})
        for k in range(12)
    ]
    (folder / "usage").mkdir()
    pd.concat(frames).to_parquet(folder / "usage" / "usage.parquet")
    (folder / "my.toml").write_text(
        'task = "vm"\ntime = "time_s"\ntime_unit = "s"\nwindow_s = 300\n[columns]\ncpu_mean = "cpu"\ncpu_limit = 1.0\n'
    )


def test_the_settings_of_the_page_about_settings_are_those_of_training(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "settings.md").read_text()
    (block,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "my.toml").write_text(block)
    assert load_config(TrainConfig, tmp_path / "my.toml").budgets.baseline == 0.0005
    for name in shipped_configs():
        assert f"--config {name}" in page
