"""The README's curl lines, run as they are printed against a real server."""

from __future__ import annotations

import re
from pathlib import Path

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()
LINES = [
    line for block in re.findall(r"```sh\n(curl.*?)```", README, re.DOTALL) for line in re.split(r"\n(?=curl)", block)
]
