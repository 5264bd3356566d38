"""Beginnings of files of results: a reader can make the numbers again, and see with what they were made."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks import made_by
from reclaim.training.tracking.runs import git_commit

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_a_file_of_results_begins_with_its_command_date_commit_processor_and_versions() -> None:
    about = made_by("python -m benchmarks.bar DATASET")
    assert list(about) == ["command", "date", "commit", "device", "cores", "versions"]
    assert about["command"] == "python -m benchmarks.bar DATASET"
    assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", about["date"])
    assert about["commit"] == git_commit()
    assert about["cores"] >= 1
    assert {"reclaim", "numpy", "numba", "torch"} <= set(about["versions"])


def test_no_script_dates_its_results_in_a_way_of_its_own() -> None:
    scripts = {path.relative_to(BENCHMARKS): path.read_text() for path in BENCHMARKS.rglob("*.py")}
    assert [str(name) for name, text in scripts.items() if "datetime.now(" in text] == ["__init__.py"]
