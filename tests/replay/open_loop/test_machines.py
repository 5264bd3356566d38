"""Margins of machines that a replay sets on validation peaks."""

from __future__ import annotations

import numpy as np

from reclaim.data.schema import RESOURCES
from reclaim.replay.open_loop.machines import FITTED, UNFITTED, curves_of
from reclaim.training.machines.curve import EXCEEDED, N_INPUTS, MachineCurve
from reclaim.training.machines.estimator import MachineEstimator
from reclaim.training.machines.fit import MachineRows
from reclaim.training.machines.terms import N_TERMS, T_BAND, T_LIMIT, T_MEAN, T_USAGE
from reclaim.training.margins.margin import Budgets

_OWN = tuple(np.linspace(1.0, 2.0, len(EXCEEDED)).tolist())
_FIT = MachineCurve(_OWN, weights=(0.1, *(0.0,) * (N_INPUTS - 1)))
_BUDGETS = Budgets(baseline=0.001, aggressive=0.01)


def _seen(n: int) -> tuple[MachineRows, np.ndarray]:
    """Return snapshots whose peaks lie at the fitted location, one each five minutes."""
    sums = np.zeros((n, N_TERMS))
    sums[:, T_LIMIT], sums[:, T_USAGE], sums[:, T_MEAN], sums[:, T_BAND:] = 10.0, 0.5, 0.5, 1.0
    rows = MachineRows(sums, np.full(n, 1.0), np.arange(n) % 2, 1.0)
    return rows, np.arange(n) * 300_000_000


def test_peaks_that_a_location_was_fitted_to_set_no_margin_of_it() -> None:
    of, estimator = _seen(4_000), MachineEstimator((_FIT,) * len(RESOURCES), 3_600, (1.0, 1.0))
    seen, cut_us = [of] * len(RESOURCES), 2_000 * 300_000_000
    of[0].peak[2_000:] = 2.0
    after = of[0].take(np.arange(2_000, 4_000))
    for until_us, wanted in (
        (None, _FIT.with_margins(of[0].scores(_FIT))),  # another dataset
        (cut_us, _FIT.with_margins(after.scores(_FIT))),
        (4_000 * 300_000_000, _FIT),  # all of them: its own margins, of peaks that it was not fitted to
    ):
        assert curves_of(FITTED, estimator, seen, _BUDGETS, until_us) == (wanted, wanted)


def test_a_bound_which_is_not_fitted_has_the_margins_of_all_validation_peaks() -> None:
    of = _seen(4_000)
    bound = MachineEstimator((MachineCurve(),) * len(RESOURCES), 3_600, (1.0, 1.0))
    wanted = MachineCurve().with_margins(of[0].scores(MachineCurve()))
    for kind in (FITTED, UNFITTED):
        assert curves_of(kind, bound, [of] * len(RESOURCES), _BUDGETS, 2**62) == (wanted, wanted)
