"""Order of the pages, their generated parts, notebooks as Markdown, and the check that the site works offline."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import references
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

NAVIGATION = {
    "Use it": {"self": "Start here", "docs/notebook": "In a notebook", "docs/run-on-your-cluster": None,
               "docs/kubernetes": None, "docs/predict-to-a-file": None, "docs/recommend": None,
               "docs/object-stores": None, "docs/settings": None},
    "Understand it": {"docs/how-it-works": None, "docs/builtin": None, "docs/machines": None, "docs/glossary": None,
                      "docs/results": None, "docs/results-cell-replay": None, "docs/performance": None,
                      "docs/serving-performance": None},
    "Reference": {"docs/python": None, "docs/http-api": None, "docs/command-line": None,
                  "docs/reference": "Columns and settings"},
    "Extend it": {"docs/add-a-trace-or-an-estimator": None, "CONTRIBUTING": None, "CONVENTIONS": None,
                  "CHANGELOG": None},
    "Records": {"benchmarks/results/bar": None,
                "benchmarks/results/machines": "Machines, set by set",
                "benchmarks/results/replay-60x14": "All tables of a cell replayed",
                "benchmarks/results/replay-60x14-machines": "Machines of that cell packed",
                "benchmarks/results/replay-50x6-machines": "Machines of a smaller cell packed",
                "benchmarks/results/what-if-machines": "Fewest machines of eight cells",
                "benchmarks/LOG": None},
}  # fmt: skip
"""Caption, page and, where its own title would be too long or unclear, the name that the navigation shows."""
GENERATED: dict[str, Callable[[], str]] = {
    "commands": references.command_line,
    "http": references.http,
    "python": references.python,
}
_MARK = re.compile(r"^<!-- generated: (\w+) -->$", re.MULTILINE)
_EXTERNAL = re.compile(r"(?:https?:)?//", re.IGNORECASE)
_CSS_FETCH = re.compile(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", re.IGNORECASE)


def fill_in(app: Sphinx, name: str, source: list[str]) -> None:
    """Turn a notebook into Markdown, and put the generated parts of a page in their places."""
    if Path(app.env.doc2path(name)).suffix == ".ipynb":
        source[0] = notebook(source[0])
    source[0] = _MARK.sub(lambda mark: GENERATED[mark.group(1)](), source[0])
    if name == app.config.root_doc:
        known = app.project.docnames
        for caption, names in NAVIGATION.items():
            listed = "\n".join(_entry(page, label) for page, label in names.items() if page == "self" or page in known)
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{listed}\n```\n"


def _entry(page: str, label: str | None) -> str:
    path = page if page == "self" else f"/{page}"
    return f"{label} <{path}>" if label else path


def notebook(text: str) -> str:
    """Return a notebook as Markdown: its text, its code, and what each cell printed or drew."""
    parts = []
    for cell in json.loads(text)["cells"]:
        content = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(content)
        elif cell["cell_type"] == "code" and content:
            parts.append(f"```python\n{content}\n```")
            parts += [shown for output in cell["outputs"] for shown in _output(output)]
    return "\n\n".join(parts) + "\n"


def _output(output: dict[str, Any]) -> Iterator[str]:
    data = output.get("data", {"text/plain": output.get("text", "")})
    if "image/svg+xml" in data:
        encoded = base64.b64encode("".join(data["image/svg+xml"]).encode()).decode()
        yield f'<img alt="figure" src="data:image/svg+xml;base64,{encoded}">'  # Markdown refuses it as a link
    elif "image/png" in data:
        yield f"![figure](data:image/png;base64,{''.join(''.join(data['image/png']).split())})"
    elif "<table" in (html := "".join(data.get("text/html", ""))):
        table = re.sub(r"<style.*?</style>", "", html, flags=re.DOTALL)
        lines = [line for line in table.splitlines() if line.strip()]  # a blank line would end the HTML
        yield "\n".join(["<div>", *lines, "</div>"])
    elif text := "".join(data.get("text/plain", "")).rstrip():
        yield f"```text\n{text}\n```"


class _Fetched(HTMLParser):
    """Addresses that a browser fetches to show a page; links that a reader follows are none of them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note the addresses of an element."""
        names = ("src", "srcset", "poster", "data") if tag != "link" else ("href",)
        self.found += [value for name, value in attrs if name in names and value and _EXTERNAL.match(value)]


def fetched(html: str) -> list[str]:
    """Return the addresses on other servers that a browser would fetch to show a page."""
    parser = _Fetched()
    parser.feed(html)
    return parser.found + _CSS_FETCH.findall(html)


def check_offline(app: Sphinx, error: Exception | None) -> None:
    """Fail the build where a page or a style sheet fetches something from another server."""
    if error is not None or app.builder.format != "html":
        return
    bad = []
    for path in sorted(Path(app.outdir).rglob("*")):
        if path.suffix == ".html":
            bad += [f"{path.name}: {address}" for address in fetched(path.read_text())]
        elif path.suffix == ".css" and _CSS_FETCH.search(path.read_text()):
            bad.append(f"{path.name}: an address on another server")
    if bad:
        raise ExtensionError("the site is not whole without a network: " + "; ".join(bad))
