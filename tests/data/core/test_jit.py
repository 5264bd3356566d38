"""Compiled code: how a command prepares numba, and when cached code is compiled again."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from enum import IntEnum
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from reclaim.data.core.jit import digest_of

ROOT = Path(__file__).resolve().parents[3]
ROOMS = ("data", "features", "training", "replay", "serving", "src/reclaim/cli", "src/reclaim/api")

_COMMAND = """
import sys
import numba
from reclaim.data.core.jit import begin_lean

begin_lean()
begin_lean()
assert numba.njit(lambda x: x + 1)(1) == 2
assert not any(name.startswith("scipy.linalg") for name in sys.modules), "scipy was imported"
import scipy.linalg.cython_blas
assert numba.njit(lambda x: x * x)(3) == 9
"""


def test_a_command_compiles_without_scipy_and_can_import_it_later() -> None:
    run = subprocess.run([sys.executable, "-c", _COMMAND], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")


_CALLED = """
import numba
LEVEL = {level}
TABLE = {table}

@numba.njit(inline="always")
def inner(x):
    return x {sign} LEVEL

@numba.njit{options}
def outer(x):  {comment}
    return inner(x) + TABLE[0]
"""
_SAME: dict[str, object] = {
    "level": 2, "table": "(1.0, 2.0)", "sign": "+", "options": "(nogil=True)", "comment": "",
}  # fmt: skip
_CALLER = "import numba\n\n@numba.njit\ndef run(x):\n    return outer(x)\n"


def digest(**changes: object) -> bytes:
    called, caller = ModuleType("package.called"), ModuleType("package.caller")
    exec(_CALLED.format(**_SAME | changes), called.__dict__)
    caller.__dict__["outer"] = called.__dict__["outer"]
    exec(_CALLER, caller.__dict__)
    return digest_of(caller.__dict__["run"])


def test_what_compiled_code_rests_on_has_one_digest_wherever_it_is_read() -> None:
    assert digest() == digest(comment="# says more")


@pytest.mark.parametrize(
    "change",
    [{"level": 3}, {"level": 2.0}, {"table": "(1.0, 3.0)"}, {"sign": "-"}, {"options": "(fastmath=True)"}],
    ids=str,
)
def test_a_value_or_a_function_that_is_two_calls_away_gives_another_digest(change: dict[str, Any]) -> None:
    assert digest() != digest(**change)


def test_every_value_of_an_array_counts() -> None:
    one, other = np.zeros(3_000), np.zeros(3_000)
    other[1_500] = 1.0  # repr leaves it out
    digests = set()
    for values in (one, other):
        scope: dict[str, Any] = {"__name__": "package.of", "VALUES": values}
        exec("def of(i):\n    return VALUES[i]\n", scope)
        digests.add(digest_of(scope["of"]))
    assert len(digests) == 2


def test_every_member_of_an_enumeration_counts() -> None:
    """Positions of features are one: after a further feature every kernel writes elsewhere."""
    digests = set()
    for names in ("first second", "first further second"):
        scope: dict[str, Any] = {"__name__": "package.of", "AT": IntEnum("Positions", names)}
        exec("def of(out):\n    out[AT.second] = 1.0\n", scope)
        digests.add(digest_of(scope["of"]))
    assert len(digests) == 2


def test_cached_code_of_a_file_that_did_not_change_is_made_anew_where_one_that_it_calls_did(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    cached = _CALLER.replace("@numba.njit", "@numba.njit(cache=True)")
    (package / "caller.py").write_text(f"from package.called import outer\n{cached}")
    run = """
import reclaim.data.core.jit
from package.caller import run
print(run(1), sum(run.stats.cache_hits.values()))
"""
    found = []
    for level in (2, 2, 3):
        (package / "called.py").write_text(_CALLED.format(**_SAME | {"level": level}))
        done = subprocess.run(
            [sys.executable, "-B", "-c", run], capture_output=True, text=True, check=False,
            env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        found.append(done.stdout.strip())
    assert found == ["4.0 0", "4.0 1", "5.0 0"]


def test_where_no_folder_can_be_written_compiled_code_is_kept_until_the_process_ends(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "called.py").write_text(_CALLED.format(**_SAME))
    cached = _CALLER.replace("@numba.njit", "@numba.njit(cache=True)")
    (package / "caller.py").write_text(f"from package.called import outer\n{cached}")
    run = """
import os, subprocess, sys
import reclaim.data.core.jit
from package.caller import run
run(1)
if len(sys.argv) == 1:
    subprocess.run([sys.executable, "-B", __file__, "again"], check=True)
    if not (child := os.fork()):
        sys.exit()
    os.waitpid(child, 0)
    assert os.listdir(os.environ["NUMBA_CACHE_DIR"])
print(os.environ["NUMBA_CACHE_DIR"], sum(run.stats.cache_hits.values()))
"""
    (tmp_path / "run.py").write_text(run)
    places = ",".join(f"reclaim.data.core.jit.{name}" for name in ("InCacheFolder", "OfProcess"))
    done = subprocess.run(
        [sys.executable, "-B", tmp_path / "run.py"], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
             "NUMBA_CACHE_LOCATOR_CLASSES": places, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (folder, hits), (same, hits_again) = (line.split() for line in reversed(done.stdout.splitlines()))
    assert (folder, hits, hits_again) == (same, "0", "1")
    assert not Path(folder).exists()
    assert Path(folder).parent == tmp_path
    assert done.stderr.count("let NUMBA_CACHE_DIR name a folder that can") == 1


def test_every_cached_function_of_the_package_is_declared_where_the_stamp_is() -> None:
    files = [path for room in ROOMS for path in (ROOT / room).rglob("*.py") if "njit" in path.read_text()]
    assert len(files) > 50
    assert [f.name for f in files if re.search(r"\bcache\W+True", f.read_text())] == ["jit.py"]
