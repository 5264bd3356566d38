"""Estimators that use only the limit."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from reclaim.data.errors import ConfigError
from reclaim.data.windows import Windows
from reclaim.training.estimators.base import LIMIT, Estimate, Estimator


class FixedShareEstimator(Estimator):
    """Reserve a fixed share of the limit ("borg-default" of Bashir et al., EuroSys'21).

    Parameters
    ----------
    share : float
        Of the limit. 0.9 by public notes on the paper; the paper itself was not available. Koordinator's design
        document gives 1/1.1 for the same rule.
    """

    def __init__(self, share: float = 0.9) -> None:
        if not 0 < share <= 1:
            raise ConfigError(f"share must be above 0 and at most 1, got {share}")
        self.share = share

    def update(self, slot: NDArray[np.int64], windows: Windows) -> Estimate:  # noqa: ARG002 - no state, no task
        """Answer with the share of the limit."""
        return Estimate(self.share * windows.limit, np.full(windows.limit.shape, LIMIT, np.uint8))


class LimitEstimator(FixedShareEstimator):
    """Reserve the limit: no reclamation, what everything is measured against."""

    def __init__(self) -> None:
        super().__init__(1.0)
