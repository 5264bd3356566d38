"""Registry of features: each is written, and under its name, wherever it stands in the order."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from reclaim.data.windows import MEMORY_MAX, Cell, Windows, empty_windows
from reclaim.features.fold.stateless import features_of_histories
from reclaim.features.fold.task_record import BIN_FIRST, BINS
from reclaim.features.registry import FEATURE_NAMES, FEATURES, Feature

_PERMUTED = """
import ast, importlib.util, sys
import numpy as np

spec = importlib.util.find_spec("reclaim.features.registry")
tree = ast.parse(open(spec.origin).read())
groups = {"_STATISTICS", "_RESOURCE", "_SHAPE", "_SINGLE", "_OOM", "_COLLECTION_OOM"}
for node in tree.body:
    if isinstance(node, ast.AnnAssign) and node.target.id in groups:
        groups.remove(node.target.id)
        node.value.elts.reverse()
assert not groups
module = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = module
exec(compile(tree, spec.origin, "exec"), module.__dict__)

sys.path.insert(0, sys.argv[1])
from test_registry import _features

np.savez(sys.argv[2], **dict(zip(module.FEATURE_NAMES, _features().T)))
"""


def _histories() -> Windows:
    rng = np.random.default_rng(3)
    n = 8_400  # four tasks of a week each
    windows = empty_windows(n)
    windows.collection_id[:] = np.arange(n) // 4_200
    windows.instance_index[:] = np.arange(n) // 2_100 % 2
    windows.start_us[:] = np.arange(n) % 2_100 * 300_000_000
    windows.end_us[:] = windows.start_us + 300_000_000
    windows.scheduled_us[:] = windows.start_us // 9_000_000_000 * 9_000_000_000
    windows.usage[:] = rng.uniform(0.01, 0.9, windows.usage.shape)
    windows.percentiles[:] = np.sort(rng.uniform(0.01, 0.9, windows.percentiles.shape), axis=1)
    windows.limit[:] = rng.uniform(0.9, 1.0, windows.limit.shape)
    windows.usage[29::30, MEMORY_MAX] = windows.limit[29::30, 1]  # every run ends out of memory
    windows.tier[:], windows.scheduling_class[:] = windows.instance_index, 2
    return windows


def _features() -> NDArray[np.float32]:
    return features_of_histories(_histories(), Cell((1.0, 1.0)))


def test_every_registered_feature_of_a_full_history_has_a_value() -> None:
    x = _features()
    assert x.shape == (4, len(FEATURE_NAMES))
    assert [name for name, column in zip(FEATURE_NAMES, x.T, strict=True) if not np.isfinite(column).all()] == []


@pytest.mark.slow
def test_every_feature_keeps_its_values_when_the_order_of_the_registry_changes(tmp_path: Path) -> None:
    out = tmp_path / "x.npz"
    compiled = {"NUMBA_CACHE_DIR": str(tmp_path / "compiled"), "NUMBA_OPT": "0"}  # for another order, and soon ready
    environment = {**os.environ, **compiled}
    subprocess.run([sys.executable, "-c", _PERMUTED, str(Path(__file__).parent), str(out)], check=True, env=environment)
    with np.load(out) as permuted:
        assert list(permuted) != list(FEATURE_NAMES)
        assert sorted(permuted) == sorted(FEATURE_NAMES)
        for name, column in zip(FEATURE_NAMES, _features().T, strict=True):
            np.testing.assert_array_equal(permuted[name], column, name, strict=True)


def test_the_words_of_a_percentile_over_time_name_its_least_and_largest_step() -> None:
    of_percentiles = [f.words for f in FEATURES if "percentile" in f.words and "with weights" in f.words]
    assert len(of_percentiles) == 8  # three signals at two levels, and two resources
    # bins end at 2**-7, and from there on in eighths of each doubling: the last of 64 at 2**0 * (1 + 7 / 8)
    assert (2.0**BIN_FIRST, 2.0 ** (BIN_FIRST + (BINS - 1) // 8) * (1 + (BINS - 1) % 8 / 8)) == (1 / 128, 1.875)
    assert all(words.endswith("from 1/128 to 1.875 times the first limit") for words in of_percentiles)


def test_words_that_are_corrected_do_not_make_another_definition() -> None:
    wrong = Feature("a", "wrong words", "ratio")
    right = Feature("a", "wrong words", "ratio", corrected="right words")
    assert right.words == "right words"
    assert repr(right) == repr(wrong)
