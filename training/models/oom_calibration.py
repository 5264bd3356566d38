"""Calibrates the out-of-memory probability: two numbers per horizon, set on validation rows.

Platt's scaling: the log-odds are stretched by a slope and shifted by an intercept (Platt, "Probabilistic Outputs for
Support Vector Machines", 1999, with its smoothed labels; Niculescu-Mizil and Caruana, ICML 2005, compare it with
isotonic regression). Isotonic regression was not taken: out-of-memory is rare, a validation period holds tens of tasks
that meet it, and steps fitted to so few follow single tasks (ICML 2005 finds it worse below about 1,000 calibration
cases); its flat steps also tie tasks that the forecast ranks, which costs alerts. A slope above 0 leaves the
order of tasks, and so average precision, as it was.

An intercept alone was tried for few positives, and is not a safe choice: for boosted trees that were far too sure
(composed cell, one hour, 16 positive tasks) it made a Brier skill of -3.2 one of -0.34, where a slope, too, makes it
0.00. So few positives may flatten the probability, but not sharpen it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from reclaim.data.errors import ModelError
from reclaim.features.targets import HORIZONS_S
from reclaim.training.estimators.base import Forecast
from reclaim.training.models.oom_model import OomModel
from reclaim.training.models.survival import clear_unmeasured

if TYPE_CHECKING:
    from reclaim.training.models.forecaster import Forecaster, Heads, InputRanges

FEW: Final = 20
"""Positive tasks below which the slope is at most 1: fewer cannot show that a forecast should be surer."""
SMALLEST: Final = 1e-12
"""Probabilities are taken no nearer to 0 or 1 than this, so that their log-odds are finite."""
SMALLEST_SLOPE: Final = 0.01
"""A flatter slope would tie tasks, a negative one reverse their order; at this one all are near the base rate."""
LARGEST_SLOPE: Final = 10.0
"""A steeper one comes from labels that a threshold separates, which says nothing about later ones."""

_BARE: Final = "is as the model says it"
_STEPS: Final = 100
_CONVERGED: Final = 1e-10


@dataclass(frozen=True)
class ProbabilityCalibration:
    """Corrections of the OOM probability of each horizon.

    Attributes
    ----------
    slope, intercept : tuple of float, in the order ``features.targets.HORIZONS_S``
        On the log-odds; 1 and 0 leave a horizon as it is, to the bit.
    notes : tuple of str
        Where too little was known to fit both.
    """

    slope: tuple[float, ...] = (1.0,) * len(HORIZONS_S)
    intercept: tuple[float, ...] = (0.0,) * len(HORIZONS_S)
    notes: tuple[str, ...] = ()

    def apply(self, probability: NDArray[np.float64], horizons_s: tuple[int, ...] = HORIZONS_S) -> NDArray[np.float64]:
        """Return calibrated probabilities, shape (n, len(horizons_s)) as given; NaN stays NaN.

        A row's answer does not depend, to the bit, on its neighbours.
        """
        # contiguous: for memory with gaps numpy's log may use other instructions
        given = np.array(probability.T, np.float64, order="C")
        for one, horizon_s in zip(given, horizons_s, strict=True):
            h = HORIZONS_S.index(horizon_s)
            if (self.slope[h], self.intercept[h]) != (1.0, 0.0):
                one[:] = _odds_share(self.slope[h] * _log_odds(one) + self.intercept[h])
        return given.T

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for ``bundle.json``."""
        named = zip(HORIZONS_S, self.slope, self.intercept, strict=True)
        fitted = {f"{horizon_s}s": {"slope": a, "intercept": b} for horizon_s, a, b in named}
        return {"horizons": fitted, "notes": list(self.notes)}

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> ProbabilityCalibration:
        """Return what ``to_dict`` gave; ModelError where it lacks a horizon or a number."""
        try:
            horizons = [facts["horizons"][f"{horizon_s}s"] for horizon_s in HORIZONS_S]
            slope, intercept = (tuple(float(h[name]) for h in horizons) for name in ("slope", "intercept"))
            notes = tuple(facts["notes"])
        except (KeyError, TypeError, ValueError) as error:
            raise ModelError(f"the calibration of the OOM probability is damaged ({error!r}); train again") from error
        return cls(slope, intercept, notes)


def fit_probability(
    probability: NDArray[np.float64], oom: NDArray[np.float32], task: NDArray[np.int64]
) -> ProbabilityCalibration:
    """Fit slope and intercept of each horizon, or as much of them as the positive rows allow.

    Parameters
    ----------
    probability : float64, shape (n, n_horizons)
        As forecast for validation rows; NaN where nothing was.
    oom : float32, shape (n, n_horizons)
        0 or 1; NaN unknown.
    task : int64, shape (n,)
        The task of each row: its rows are positive together, so ``FEW`` counts tasks.
    """
    slopes, intercepts, notes = [], [], []
    without: dict[int, int] = {}
    unlabelled, unforeseen = [], []
    for h, horizon_s in enumerate(HORIZONS_S):
        known = np.isfinite(probability[:, h]) & np.isfinite(oom[:, h])
        label = oom[known, h] > 0.5
        z = _log_odds(probability[known, h])
        positives = len(np.unique(task[known][label]))
        slope, intercept = 1.0, 0.0
        if not np.isfinite(oom[:, h]).any():
            unlabelled.append(horizon_s)
        elif not known.any():
            unforeseen.append(horizon_s)
        elif positives == 0:
            without[horizon_s] = len(label)
        elif label.all():
            notes.append(
                f"OOM within {horizon_s} s: {positives} positive tasks among {len(label)} validation rows, "
                f"so the probability {_BARE}"
            )
        else:
            wanted, intercept = _fit(z, label)
            slope = min(max(wanted, SMALLEST_SLOPE), LARGEST_SLOPE if positives >= FEW else 1.0)
            if slope != wanted:
                intercept = _fit(z, label, slope)[1]
                notes.append(
                    f"OOM within {horizon_s} s: the slope of the probability is {slope:g}, not {wanted:.3g}, for "
                    f"{positives} positive tasks among {len(label)} validation rows carry no more"
                )
        slopes.append(slope)
        intercepts.append(intercept)
    if unforeseen:
        notes.insert(0, f"{_within(unforeseen)}: nothing is forecast of validation rows, so nothing is calibrated")
    if unlabelled:
        notes.insert(0, f"{_within(unlabelled)}: no validation row has a label, so the probability {_BARE}")
    if without:
        horizons, rows = (", ".join(map(str, of)) for of in (without, without.values()))
        notes.insert(0, f"OOM within {horizons} s: 0 positive among {rows} validation rows, so the probability {_BARE}")
    return ProbabilityCalibration(tuple(slopes), tuple(intercepts), tuple(notes))


def _within(horizons_s: Sequence[int]) -> str:
    """Name horizons in a note; none of them where they are all."""
    every = len(horizons_s) == len(HORIZONS_S)
    return "OOM" if every else f"OOM within {', '.join(map(str, horizons_s))} s"


def _log_odds(probability: NDArray[np.float64]) -> NDArray[np.float64]:
    p = np.minimum(np.maximum(probability, SMALLEST), 1.0 - SMALLEST)
    return np.asarray(np.log(p / (1.0 - p)))


def _odds_share(log_odds: NDArray[np.float64]) -> NDArray[np.float64]:
    # by the sign, so that the exponential is never above 1
    small = np.exp(-np.abs(log_odds))
    return np.asarray(np.where(log_odds >= 0, 1.0, small) / (1.0 + small))


def _loss(z: NDArray[np.float64], y: NDArray[np.float64], slope: float, intercept: float) -> float:
    logit = slope * z + intercept
    return float(np.mean(np.logaddexp(0.0, logit) - y * logit))


def _fit(z: NDArray[np.float64], label: NDArray[np.bool_], slope: float | None = None) -> tuple[float, float]:
    """Return slope and intercept of least log-loss, by Newton's method; a slope that is given is kept.

    Labels are smoothed as Platt did, to the posterior by Bayes' rule after as many of each: the fit stays finite where
    a threshold separates all labels.
    """
    n_positive = int(label.sum())
    y = np.where(label, (n_positive + 1) / (n_positive + 2), 1 / (len(label) - n_positive + 2))
    design = np.stack([z, np.ones_like(z)], axis=1) if slope is None else np.ones((len(z), 1))
    theta = np.array([1.0 if slope is None else slope, 0.0])
    fitted = slice(2 - design.shape[1], 2)
    loss = _loss(z, y, *theta)
    for _ in range(_STEPS):
        p = _odds_share(theta[0] * z + theta[1])
        weight = np.maximum(p * (1.0 - p), SMALLEST)
        curvature = (design * weight[:, None]).T @ design
        step = np.linalg.lstsq(curvature, design.T @ (p - y), rcond=None)[0]
        scale = 1.0
        while True:  # halved until the loss falls: far from the optimum a whole step may pass it
            tried = theta.copy()
            tried[fitted] -= scale * step
            loss_tried = _loss(z, y, *tried)
            if loss_tried <= loss or scale < _CONVERGED:
                break
            scale /= 2
        if scale < _CONVERGED:
            break
        moved = float(np.abs(tried - theta).max())
        theta, loss = tried, loss_tried
        if moved < _CONVERGED:
            break
    return float(theta[0]), float(theta[1])


class Calibrated:
    """A forecaster whose OOM probability has been calibrated; a forecaster itself, silent of what was never measured.

    Parameters
    ----------
    forecaster : Forecaster
    calibration : ProbabilityCalibration
    oom : OomModel or None
        Model of the probability, instead of the forecaster's own.
    """

    _FILE: Final = "oom.json"

    def __init__(
        self, forecaster: Forecaster, calibration: ProbabilityCalibration, oom: OomModel | None = None
    ) -> None:
        self.bare = forecaster
        self.calibration = calibration
        self.oom = oom

    @property
    def quantile_levels(self) -> tuple[float, ...]:
        """Levels of the last axis."""
        return self.bare.quantile_levels

    @property
    def horizons_s(self) -> tuple[int, ...]:
        """Those that it was fitted for."""
        return self.bare.horizons_s

    @property
    def heads(self) -> Heads:
        """Outputs that the forecaster and the model of the probability were fitted for."""
        return self.bare.heads if self.oom is None else replace(self.bare.heads, oom=self.oom.fitted)

    @property
    def threads(self) -> int:
        """The forecaster's."""
        return self.bare.threads

    @threads.setter
    def threads(self, threads: int) -> None:
        self.bare.threads = threads

    def input_ranges(self) -> InputRanges | None:
        """Return the forecaster's value."""
        return self.bare.input_ranges()

    def predict(self, x: NDArray[np.float32], horizon_s: int | None = None) -> Forecast:
        """Return the forecast of each row, shape (n, n_features), or of one horizon of each."""
        forecast = self.bare.predict(x, horizon_s)
        clear_unmeasured(forecast, x)
        raw = forecast.oom_probability
        if self.oom is not None:
            raw = self.oom.predict(x, forecast.horizons_s, self.threads)
        return replace(forecast, oom_probability=self.calibration.apply(raw, forecast.horizons_s))

    def save(self, folder: Path) -> None:
        """Write the forecaster, the model of the probability and the calibration."""
        self.bare.save(folder)
        if self.oom is not None:
            self.oom.save(folder)
        (folder / self._FILE).write_text(json.dumps(self.calibration.to_dict(), indent=2))

    @classmethod
    def load(cls, forecaster: Forecaster, folder: Path) -> Calibrated:
        """Return a forecaster with the model of the probability that ``save`` wrote next to it, if any."""
        path, oom = folder / cls._FILE, OomModel.load(folder)
        if not path.is_file():
            return cls(forecaster, ProbabilityCalibration(), oom)
        return cls(forecaster, ProbabilityCalibration.from_dict(json.loads(path.read_text(encoding="utf-8"))), oom)
