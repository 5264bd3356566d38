"""Compiled code: what a command prepares numba with."""

from __future__ import annotations

import subprocess
import sys

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
