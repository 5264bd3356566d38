"""The figures of differences have every comparison of the results that they are drawn from."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.forest import of_bar
from reclaim.replay.open_loop.paired import RECLAIMED

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


@pytest.mark.parametrize("name", ["bar", "machines", "short-history"])
def test_a_figure_is_that_of_the_results_that_are_kept(name: str, tmp_path: Path) -> None:
    kept = (RESULTS / f"{name}.svg").read_text()
    subprocess.run([sys.executable, "-m", "benchmarks.forest", "--out", tmp_path], check=True, cwd=RESULTS.parents[1])
    assert widths((tmp_path / f"{name}.svg").read_text()) == pytest.approx(widths(kept), abs=0.01)


def test_a_comparison_of_too_few_tasks_for_an_interval_is_left_out(tmp_path: Path) -> None:
    kept = json.loads((RESULTS / "bar-azure-2017.json").read_text())
    (tmp_path / "bar.json").write_text(json.dumps(kept))
    drawn = of_bar(tmp_path / "bar.json")
    for line in kept["differences"]:
        if line["horizon_s"] == 3600:
            line[RECLAIMED] = [line[RECLAIMED][0], None, None]
    (tmp_path / "bar.json").write_text(json.dumps(kept))
    assert of_bar(tmp_path / "bar.json") == [one for one in drawn if one.horizon != "1 hour"] != drawn


def widths(svg: str) -> list[float]:
    """Return the widths of the intervals in their order, over the widest: another layout scales them alike."""
    found = re.findall(r'd="M ([\d.]+) ([\d.]+) \nL ([\d.]+) \2 \n"', svg)
    assert len(found) > 40
    ends = [(float(left), float(right)) for left, _, right in found]
    widest = max(right - left for left, right in ends)
    return [(right - left) / widest for left, right in ends]
