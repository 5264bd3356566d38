"""Arguments of the benchmarks: mistakes are refused by name, and the recorded command is the one that ran."""

from __future__ import annotations

import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import builtin
from benchmarks.speed import closed_loop, estimators, open_loop, sizes, two_trees
from reclaim.training.estimators.registry import ESTIMATORS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("main", "words", "message"),
    [
        (two_trees.main, ["{folder}", "{folder}", "--", "--help"], "{folder}: no checkout of reclaim"),
        (builtin.main, ["a", "b", "--family", "a"], "--family a: expected NAME=NAME of the datasets a, b"),
        (builtin.main, ["a", "b", "--family", "a=c"], "--family a=c: expected NAME=NAME of the datasets a, b"),
        (open_loop.main, ["--machines", "100", "50"], "--machines: expected multiples of 100, got 50"),
        (open_loop.main, ["--only", "none"], "argument --only: invalid choice: 'none'"),
        (estimators.main, ["--only", "none"], "argument --only: invalid choice: 'none'"),
        (closed_loop.main, ["--margin", "wide"], "argument --margin: invalid choice: 'wide'"),
        (sizes.main, ["--work", "w", "--cells", "abc"], "argument --cells: expected MACHINESxDAYS"),
    ],
)
def test_a_mistake_is_refused_by_its_name_before_anything_is_measured(
    main: Callable[[], None],
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["benchmark", *(word.format(folder=tmp_path) for word in words)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert message.format(folder=tmp_path) in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_benchmark_of_machines_names_the_options_that_it_lacks() -> None:
    def refusal(*words: str) -> str:
        script = [sys.executable, "-m", "benchmarks.machines", *words]
        done = subprocess.run(script, capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 2
        return done.stderr.splitlines()[-1]

    assert "--donors, --work, --composer: needed to measure" in refusal("--sets", "cell-7")
    assert "--donors, --work: needed to measure" in refusal("--sets", "azure")


def test_the_recorded_command_of_the_open_loop_has_the_options_that_narrowed_it() -> None:
    def recorded(**options: object) -> str:
        given = {"machines": list(open_loop.SIZES), "only": list(ESTIMATORS), "bundle": None, "jobs": False}
        return open_loop._options(Namespace(**{**given, **options}))

    assert recorded() == ""
    assert recorded(bundle=Path("model")) == "--bundle FOLDER"
    assert recorded(jobs=True, machines=[100, 1_000]) == "--jobs --machines 100 1000"
    assert recorded(machines=[100], only=["borg", "vpa"]) == "--machines 100 --only borg vpa"
