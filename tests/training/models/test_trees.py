"""Trees answer without opening a file."""

from __future__ import annotations

from typing import Any

import numpy as np

from reclaim.features.targets import HORIZONS_S, TARGETS
from reclaim.training.models.trees import TreeForecaster
from tests.serving.descriptors import no_descriptors


class OneTree:
    """A fitted regressor of half the limit."""

    def predict(self, x: Any) -> Any:
        """Return a half for each row."""
        return np.full(len(x), 0.5)


def test_trees_answer_while_no_file_can_be_opened() -> None:
    trees = TreeForecaster([[OneTree()]] * len(TARGETS), 0.1, levels=(0.5,), horizon_s=HORIZONS_S[0])
    x = np.zeros((2, 3), np.float32)
    first = trees.predict(x)  # the service's warm-up
    with no_descriptors():
        again = trees.predict(x)
    np.testing.assert_array_equal(first.quantiles, again.quantiles)
