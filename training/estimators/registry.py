"""Finds estimators by name: those built from settings alone, and where the parts of learned ones are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

from reclaim.data.errors import ConfigError
from reclaim.training.estimators.autopilot.argmin import AutopilotMlEstimator
from reclaim.training.estimators.autopilot.moving_window import AutopilotMeanEstimator, AutopilotPercentileEstimator
from reclaim.training.estimators.base import Estimator, Settings
from reclaim.training.estimators.borg import BorgEstimator
from reclaim.training.estimators.fixed import FixedShareEstimator, LimitEstimator
from reclaim.training.estimators.koordinator import KoordinatorEstimator
from reclaim.training.estimators.krr import KrrEstimator
from reclaim.training.estimators.last_windows import (
    MaxNSigmaPercentileEstimator,
    MovingMaxEstimator,
    NSigmaEstimator,
    PercentileEstimator,
)
from reclaim.training.estimators.seasonal import SeasonalEstimator
from reclaim.training.estimators.so_far import MaxSoFarEstimator, MeanSoFarEstimator
from reclaim.training.estimators.vpa import VpaEstimator

ESTIMATORS: Final[Mapping[str, type[Estimator]]] = {
    "limit": LimitEstimator,
    "fixed-share": FixedShareEstimator,
    "borg": BorgEstimator,
    "nsigma": NSigmaEstimator,
    "percentile": PercentileEstimator,
    "max-nsigma-percentile": MaxNSigmaPercentileEstimator,
    "moving-max": MovingMaxEstimator,
    "max-so-far": MaxSoFarEstimator,
    "mean-so-far": MeanSoFarEstimator,
    "seasonal": SeasonalEstimator,
    "vpa": VpaEstimator,
    "koordinator": KoordinatorEstimator,
    "krr": KrrEstimator,
    "autopilot-mean": AutopilotMeanEstimator,
    "autopilot-percentile": AutopilotPercentileEstimator,
    "autopilot-ml": AutopilotMlEstimator,
}
"""Every estimator that is built from settings alone; learned ones come out of a bundle (``training.bundle``)."""


@dataclass(frozen=True)
class Learned:
    """The parts of a learned estimator, each as ``module:name``, imported when first needed.

    Attributes
    ----------
    forecaster : str
        The class that answers, a ``models.forecaster.Forecaster``; its ``load(folder)`` reads what its ``save`` wrote.
    learner : str
        The class that fits it, a ``fitting.learner.Learner``.
    settings : str
        The table of ``settings.TrainConfig`` that holds its settings.
    packages : tuple of str
        Packages whose versions a replay records.
    portable : bool
        Whether its models serve cells that they were not trained on: they solve their own price, and reserve for
        machines by the bound that needs no fit.
    """

    forecaster: str
    learner: str
    settings: str = "params"
    packages: tuple[str, ...] = ()
    portable: bool = False


LEARNED: Final[dict[str, Learned]] = {
    "network": Learned(
        "reclaim.training.models.network_forecaster:NetworkForecaster",
        "reclaim.training.fitting.network:NetworkLearner",
        settings="fit",
        packages=("torch",),
    ),
    "trees": Learned(
        "reclaim.training.models.trees:TreeForecaster",
        "reclaim.training.fitting.trees:TreeLearner",
        settings="trees",
    ),
    "portable": Learned(
        "reclaim.training.models.portable:PortableForecaster",
        "reclaim.training.fitting.portable:PortableLearner",
        settings="fit",
        packages=("torch",),
        portable=True,
    ),
}
"""Every estimator that can be trained; a bundle names its own as ``kind``."""


def candidates(name: str) -> tuple[Settings, ...]:
    """Return the settings that are tried of an estimator, the published ones first."""
    return ESTIMATORS[name].CANDIDATES


def imported(path: str) -> Any:
    """Return the object at ``module:name``."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def build_estimator(name: str, params: Mapping[str, Any] | None = None) -> Estimator:
    """Return a fresh estimator.

    Raises
    ------
    ConfigError
        The name is unknown (the message lists the known ones), or a parameter is unknown or out of range.
    """
    if name not in ESTIMATORS:
        raise ConfigError(f"unknown estimator {name!r}; expected one of {', '.join(sorted(ESTIMATORS))}")
    try:
        return ESTIMATORS[name](**(params or {}))
    except TypeError as error:
        raise ConfigError(f"estimator {name!r}: {error}") from error
