"""A real browser for tests of pages: runs a script in a page and returns what the script found."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def found_in(page: str, script: str, folder: Path, *, width: int = 1280) -> Any:
    """Return the value of a script's expression in a page of so many pixels; skips the test without a browser."""
    if BROWSER is None:
        pytest.skip("no Chromium on this machine")
    frame = f'<iframe style="width: {width}px; border: 0" srcdoc="{html.escape(page)}"></iframe>'
    probe = f"""<script>
      const frame = document.querySelector("iframe");
      const found = () => frame.contentWindow.eval({json.dumps(script)})();
      frame.onload = () => document.body.dataset.found = JSON.stringify(found());
    </script>"""
    file = folder / "probed.html"
    file.write_text(f"<!doctype html><html><body>{frame}{probe}</body></html>", encoding="utf-8")
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
             f"--user-data-dir={folder / 'profile'}", "--dump-dom")  # fmt: skip
    done = subprocess.run([BROWSER, *flags, file.as_uri()], capture_output=True, timeout=120)
    value = re.search(r'<body data-found="([^"]*)"', done.stdout.decode())
    assert value is not None, done.stderr.decode()[-2000:]
    return json.loads(html.unescape(value[1]))
