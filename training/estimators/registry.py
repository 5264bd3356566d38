"""Estimators by name: those that need no model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from reclaim.data.errors import ConfigError
from reclaim.training.estimators.base import Estimator
from reclaim.training.estimators.borg import BorgEstimator
from reclaim.training.estimators.statistical import STATISTICAL

ESTIMATORS: Final[Mapping[str, Callable[..., Estimator]]] = {"borg": BorgEstimator, **STATISTICAL}
"""Every estimator that is built from settings alone; learned ones come out of a bundle (``training.bundle``)."""


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
