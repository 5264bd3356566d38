"""Settings of the site: which files are its pages, in which order, and how they look."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import pages  # the folder is no package

ROOT = Path(__file__).resolve().parents[2]

project = html_title = "reclaim"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
source_suffix = {".md": "markdown", ".ipynb": "markdown"}  # `pages` turns a notebook into Markdown

# The source folder is the repository, so that a link in a file means the same on the site and in the repository.
_sources = {"docs", "benchmarks"}
include_patterns = ["docs/*.md", "docs/*.ipynb", "benchmarks/LOG.md", "benchmarks/results/*.md", "CHANGELOG.md",
                    "CONTRIBUTING.md", "CONVENTIONS.md"]  # fmt: skip
exclude_patterns = ["docs/site", *(p.name for p in ROOT.iterdir() if p.is_dir() and p.name not in _sources)]

myst_heading_anchors = 4  # as GitHub names them; a link to one that does not exist is a warning, and so an error
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
python_use_unqualified_type_names = True
napoleon_google_docstring = False
napoleon_use_ivar = True
suppress_warnings = ["misc.highlighting_failure"]  # JSON of the examples leaves parts out as "…"

html_theme = "furo"  # fonts of the reader's system, no file from another server
html_static_path = ["static"]
html_css_files = ["reclaim.css"]
html_additional_pages = {"index": "start.html"}
templates_path = ["templates"]
html_copy_source = False
html_show_copyright = False
html_theme_options = {"navigation_with_keys": True}


def setup(app: pages.Sphinx) -> None:
    """Fill in the generated parts, and check that the site needs no other server."""
    app.connect("source-read", pages.fill_in)
    app.connect("build-finished", pages.check_offline)
