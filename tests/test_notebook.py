"""The notebook of the documents runs in a real kernel, and its stored outputs are of the same kinds and shapes.

``python tests/test_notebook.py`` (``make notebook``) runs it and stores the outputs.
"""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode

PAGE = Path(__file__).resolve().parents[1] / "docs" / "notebook.ipynb"


def page() -> NotebookNode:
    """Return the notebook as it is stored."""
    notebook: NotebookNode = nbformat.read(PAGE, 4)  # type: ignore[no-untyped-call]  # nbformat's
    return notebook


def executed(folder: Path) -> NotebookNode:
    """Return the notebook, run in an empty folder; an error in a cell is raised."""
    notebook = page()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_TRACKING")}
    client = NotebookClient(
        notebook, kernel_name="python3", record_timing=False, timeout=600, resources={"metadata": {"path": str(folder)}}
    )
    client.execute(env=environment)
    return notebook


def shapes(notebook: NotebookNode) -> list[list[tuple[str, ...]]]:
    """Return of each output of each code cell its formats, and the columns and the number of rows of a table."""
    out = []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            data = [output.get("data", {}) for output in cell.outputs]
            heads = [re.findall(r"<th>(.*?)</th>", str(of.get("text/html", ""))) for of in data]
            rows = [str(of.get("text/html", "")).count("<tr") for of in data]
            out.append([(*sorted(of), *h, str(r)) for of, h, r in zip(data, heads, rows, strict=True)])
    return out


@pytest.fixture(scope="module")
def stored() -> NotebookNode:
    return page()


@pytest.mark.slow
def test_every_cell_runs_and_gives_what_is_stored(stored: NotebookNode, tmp_path: Path) -> None:
    assert shapes(executed(tmp_path)) == shapes(stored)


def test_the_stored_notebook_reads_well_on_a_page(stored: NotebookNode) -> None:
    text = PAGE.read_text()
    assert len(text.encode()) < 300_000
    outputs = [output for cell in stored.cells if cell.cell_type == "code" for output in cell.outputs]
    assert {output.output_type for output in outputs} <= {"execute_result", "display_data"}  # no error, no warning
    formats = {kind for output in outputs for kind in output.data}
    assert {"text/html", "image/png", "image/svg+xml"} <= formats
    assert not re.search(r"/(tmp|home|root|work)/", text)
    assert [cell.execution_count for cell in stored.cells if cell.cell_type == "code"] == list(range(1, 10))


def test_the_links_of_the_notebook_have_targets(stored: NotebookNode) -> None:
    told = "\n".join(cell.source for cell in stored.cells if cell.cell_type == "markdown")
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", told)
    assert targets
    assert [target for target in targets if not (PAGE.parent / target).exists()] == []


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as work:
        nbformat.write(executed(Path(work)), PAGE)  # type: ignore[no-untyped-call]  # nbformat's
