"""Makes a model of what was fitted: calibrated, priced and scored on rows that it was not fitted to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from reclaim.training.evaluation.scores import Scores, score_forecast
from reclaim.training.fitting.held_out import (
    HeldOut,
    builtin_calibration,
    builtin_saw,
    held_out,
    less_reclaimed,
    sampled_test_rows,
    set_prices,
)
from reclaim.training.fitting.learner import Fitted
from reclaim.training.fitting.machine_fit import fit_machines
from reclaim.training.fitting.oom_fit import refit_oom
from reclaim.training.fitting.sources import RowIndex, Source
from reclaim.training.machines.estimator import Curves
from reclaim.training.margins.calibrate import Calibration
from reclaim.training.margins.price import Price
from reclaim.training.models.oom_calibration import Calibrated, ProbabilityCalibration, fit_probability
from reclaim.training.models.oom_model import OomModel
from reclaim.training.settings import TrainConfig


@dataclass(frozen=True)
class Trained:
    """A model in the course of its training.

    Attributes
    ----------
    fitted : Fitted
    first : Calibrated
        The forecaster of the training rows, which was calibrated and priced.
    served : Calibrated
        The forecaster of the newest rows, too, at the calibration of the first; the first where there is no other.
    valid : HeldOut
        Validation rows with the forecasts of the first.
    raw_oom : float64, shape (n_valid, n_horizons)
        Their out-of-memory probability before it was calibrated.
    calibration : Calibration
        The prices, and what they do to validation rows.
    machines : dict of horizon in seconds to Curves
        Empty until they are fitted.
    worse : sequence of str
        Where it reclaims less than the built-in model, in words; empty until they are compared.
    builtin_saw : sequence of str
        Datasets with windows that the built-in model learned from, for which they are not compared.
    """

    fitted: Fitted
    first: Calibrated
    served: Calibrated
    valid: HeldOut
    raw_oom: NDArray[np.float64]
    calibration: Calibration
    machines: Mapping[int, Curves] = field(default_factory=dict)
    worse: Sequence[str] = ()
    builtin_saw: Sequence[str] = ()

    @property
    def prices(self) -> dict[str, Price]:
        """Prices by name of margin."""
        return {name: price for name, price in self.calibration.settings.items() if isinstance(price, Price)}


@dataclass(frozen=True)
class Scored:
    """Scores of a model, and the out-of-memory probabilities that its reliability is drawn by.

    Attributes
    ----------
    valid, test : Scores
        ``test`` is empty where there is no test row.
    n_test : int
        Test rows.
    raw_oom, oom : float64, shape (n, n_horizons)
        Before and after calibration; of test rows, of validation rows where there are none.
    label : float32, shape (n, n_horizons)
        0 or 1; NaN unknown.
    """

    valid: Scores
    test: Scores
    n_test: int
    raw_oom: NDArray[np.float64]
    oom: NDArray[np.float64]
    label: NDArray[np.float32]


def calibrate_fit(
    fitted: Fitted, oom: OomModel | None, sources: Sequence[Source], rows: Sequence[RowIndex], config: TrainConfig
) -> Trained:
    """Calibrate and price a fit by the validation rows of each source.

    A forecaster that learned from them, too, is served at the calibration of the one that did not.
    """
    uncalibrated = Calibrated(fitted.forecaster, ProbabilityCalibration(), oom)
    valid = held_out(sources, uncalibrated, rows)
    raw = valid.forecast.oom_probability
    first = Calibrated(fitted.forecaster, fit_probability(raw, valid.oom, valid.keys.task), oom)
    valid = valid.calibrated(first.calibration)
    calibration = set_prices(valid, config)
    served = first
    if fitted.refitted is not None:
        newest_oom = None if oom is None else refit_oom(oom, sources, config.seed)
        served = Calibrated(fitted.refitted, first.calibration, newest_oom)
    return Trained(fitted, first, served, valid, raw, calibration)


def add_machines(trained: Trained, config: TrainConfig) -> Trained:
    """Return it with the estimator of machines, fitted to the validation rows."""
    machines = fit_machines(trained.valid, trained.first.horizons_s, config.budgets, config.horizon_s)
    return replace(trained, machines=machines)


def compare_with_builtin(trained: Trained, sources: Sequence[Source], config: TrainConfig) -> Trained:
    """Return it with the cases in which the built-in model, at prices of the same rows, reclaims more.

    They are not compared on datasets that have validation rows from which the built-in model learned.
    """
    if saw := [source.name for source in sources if builtin_saw(source)]:
        return replace(trained, builtin_saw=saw)
    builtin = builtin_calibration(trained.valid, config)
    return replace(trained, worse=less_reclaimed(trained.calibration, builtin, config.budgets))


def score(trained: Trained, sources: Sequence[Source], config: TrainConfig) -> Scored:
    """Score the first forecaster on validation rows, and the one that is served on test rows drawn by the seed."""
    levels, valid = trained.first.quantile_levels, trained.valid
    of_valid = score_forecast(valid.forecast, valid.y, valid.oom, levels, keys=valid.keys)
    rows = sampled_test_rows(sources, config.seed)
    n_test = sum(map(len, rows))
    if not n_test:
        return Scored(of_valid, {}, 0, trained.raw_oom, valid.forecast.oom_probability, valid.oom)
    uncalibrated = Calibrated(trained.served.bare, ProbabilityCalibration(), trained.served.oom)
    test = held_out(sources, uncalibrated, rows)
    raw, test = test.forecast.oom_probability, test.calibrated(trained.first.calibration)
    of_test = score_forecast(test.forecast, test.y, test.oom, levels, keys=test.keys)
    return Scored(of_valid, of_test, n_test, raw, test.forecast.oom_probability, test.oom)
