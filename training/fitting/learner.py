"""Defines the learner: how one kind of learned estimator is fitted to datasets, and how its settings are searched."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from reclaim.data.core.arrays import mean_known
from reclaim.data.errors import ConfigError, HistoryTooShortError
from reclaim.data.schema import RESOURCES
from reclaim.features.feature_set import FeatureSet
from reclaim.features.targets import HORIZONS_S
from reclaim.training.estimators.registry import LEARNED, imported
from reclaim.training.fitting.sources import NO_ROWS, Source, chosen_rows, hidden_features, rows_in_memory
from reclaim.training.models.survival import log_loss
from reclaim.training.settings import TrainConfig

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

    from reclaim.training.models.forecaster import Forecaster
    from reclaim.training.models.trees import Rows

FITTING: Final = 16
"""Version of the fit; raised by hand when the same data and settings give another model, so that a run or a search of
before does not count as this one."""

OnEpoch = Callable[[int, float], None]
"""Receives an epoch, from 0, and its validation loss."""

Objective = Callable[[TrainConfig, OnEpoch], float]
"""Fits settings and returns their validation loss; reports each epoch and its loss where there are epochs."""

Space = Mapping[str, tuple["BaseDistribution", str]]
"""Searched settings by dotted name: the range, and the reason for it."""


@dataclass(frozen=True)
class Fitted:
    """A fitted forecaster and the facts of its fit.

    Attributes
    ----------
    forecaster : Forecaster
        Of the training rows; prices are set by it.
    train_rows : list of int
        Rows used of each source.
    facts : dict
        Plain values for the bundle; ``rows`` among them.
    history : list of dict
        Measurements per epoch; empty where there are no epochs.
    refitted : Forecaster or None
        Of the training and the validation rows: it is served. None where the other one is.
    """

    forecaster: Forecaster
    train_rows: list[int]
    facts: dict[str, Any]
    history: list[dict[str, float]] = field(default_factory=list)
    refitted: Forecaster | None = None


class Learner(ABC):
    """Fits one kind of learned estimator; ``estimators.registry.LEARNED`` names the class."""

    settings: ClassVar[type]
    """The dataclass of its settings, ``max_samples`` among them: training rows at most."""
    served: ClassVar[bool] = False
    """True if its models are served by default: registered under the plain model name."""

    shared: ClassVar[bool] = False
    """True if all processes of torchrun or Ray Train fit one model; else one alone fits."""

    @abstractmethod
    def fit(
        self, sources: Sequence[Source], config: TrainConfig, checkpoints: Path, *, on_epoch: OnEpoch | None = None
    ) -> Fitted:
        """Fit to the training rows of the sources; a fit that was killed may go on from ``checkpoints``, a folder.

        A learner with epochs calls ``on_epoch`` after each, in every process that fits.

        Raises
        ------
        HistoryTooShortError
            There is no training row, or no known demand in any.
        """

    def rests_on(self, sources: Sequence[Source], config: TrainConfig) -> Any:  # noqa: ARG002 - nothing
        """Return, as plain values, what a fit depends on besides the rows and the settings; None for nothing."""
        return None

    def objective(self, sources: Sequence[Source], config: TrainConfig) -> Objective:  # noqa: ARG002 - for those that have one
        """Return the loss that a search of the settings lowers."""
        raise ConfigError(f"estimator {config.estimator!r} has no settings that are searched")

    def space(self) -> Space:
        """Return the settings that are searched."""
        return {}

    def check(self, config: TrainConfig) -> None:
        """Raise ConfigError where this machine cannot fit these settings; called before a run is recorded."""
        self.own(config)

    def together(self, config: TrainConfig, *, go: bool) -> AbstractContextManager[bool]:  # noqa: ARG002 - alone
        """Bring together the processes that fit one model; yields whether the first one has work to do."""
        return nullcontext(go)

    def own(self, config: TrainConfig) -> Any:
        """Return the learner's own settings out of those of the run; ConfigError where ``params`` do not fit them."""
        if not isinstance(config.own, Mapping):
            return config.own
        try:
            return self.settings(**config.own)
        except TypeError as error:
            known = ", ".join(one.name for one in fields(self.settings))
            raise ConfigError(f"params of {config.estimator} ({known}): {error}") from error


class RowsLearner(Learner):
    """Fits on a copy of the training rows in memory; a search compares log-losses of validation rows."""

    @abstractmethod
    def fit_rows(self, rows: Rows, config: TrainConfig) -> Forecaster:
        """Fit to rows, already cut to ``max_samples``."""

    def fit(
        self,
        sources: Sequence[Source],
        config: TrainConfig,
        checkpoints: Path,  # noqa: ARG002 - one go
        *,
        on_epoch: OnEpoch | None = None,  # noqa: ARG002 - none
    ) -> Fitted:
        """Copy the rows and fit."""
        chosen = self._chosen(sources, config)
        rows = self._rows(sources, chosen)
        check_known(np.logical_or.reduce(np.isfinite(rows.y), axis=0), sources, config.horizon_s)
        return Fitted(self.fit_rows(rows, config), [len(r) for r in chosen], {"rows": len(rows), "device": "cpu"})

    def objective(self, sources: Sequence[Source], config: TrainConfig) -> Objective:
        """Return the validation loss; the rows are copied once, for all trials.

        Raises
        ------
        HistoryTooShortError
            No validation row.
        """
        train = self._rows(sources, self._chosen(sources, config))
        chosen = chosen_rows(sources, FeatureSet.valid_rows, config.fit.max_valid_samples, config.seed)
        valid = rows_in_memory(sources, chosen)
        if not len(valid):
            raise HistoryTooShortError(f"expected at least 1 validation row, got 0: {NO_ROWS}")

        def objective(tried: TrainConfig, on_epoch: OnEpoch) -> float:  # noqa: ARG001 - none
            h, forecast = (
                HORIZONS_S.index(tried.horizon_s),
                self.fit_rows(train, tried).predict(valid.x, tried.horizon_s),
            )
            losses = log_loss(forecast.survival, forecast.thresholds, valid.y[:, :, h : h + 1])
            return float(mean_known(mean_known(losses)[:, 0]))

        return objective

    def _rows(self, sources: Sequence[Source], chosen: Sequence[NDArray[np.int64]]) -> Rows:
        rows = rows_in_memory(sources, chosen)
        rows.x[:, hidden_features(sources)] = np.nan  # never known, so that trees do not split by them
        return rows

    def _chosen(self, sources: Sequence[Source], config: TrainConfig) -> list[NDArray[np.int64]]:
        return chosen_rows(sources, FeatureSet.train_rows, self.own(config).max_samples, config.seed)


def learner_of(estimator: str) -> Learner:
    """Return the learner of an estimator, by its name in ``LEARNED``."""
    learner: Learner = imported(LEARNED[estimator].learner)()
    return learner


def check_known(known: NDArray[np.bool_], sources: Sequence[Source], horizon_s: int) -> None:
    """Raise HistoryTooShortError where no demand over the horizon is known, with the reason; ``known``: (T, H)."""
    features = [source.features for source in sources]
    if (
        sum(len(one.train_rows()) for one in features)
        and not known[: len(RESOURCES), HORIZONS_S.index(horizon_s)].any()
    ):
        said, reasons = _nothing_known(features, horizon_s)
        raise HistoryTooShortError(f"{said}, expected at least 1; {reasons}")


def unlearned_notes(sources: Sequence[Source], horizon_s: int) -> list[str]:
    """Return a note on each of several datasets of which no training row has a known demand over the horizon."""
    h, notes = HORIZONS_S.index(horizon_s), []
    for source in sources if len(sources) > 1 else ():
        features = source.features
        rows = features.train_rows()
        if len(rows) and not np.isfinite(features.targets(rows)[0][:, : len(RESOURCES), h]).any():
            said, reasons = _nothing_known([features], horizon_s)
            notes.append(f"{source.name}: {said}, so it taught nothing of this horizon; {reasons}")
    return notes


def _nothing_known(features: Sequence[FeatureSet], horizon_s: int) -> tuple[str, str]:
    """Return in words that no training row has a known demand over the horizon, and the reasons by resource."""
    n, reasons = sum(len(one.train_rows()) for one in features), []
    for place, resource in enumerate(RESOURCES):
        counts: Counter[str] = sum((_unknown(one, place, horizon_s) for one in features), Counter())
        reasons.append(f"{resource}: {', '.join(f'{count} {reason}' for reason, count in counts.most_common())}")
    return f"0 of {n} training rows have a known demand over {horizon_s} s", "; ".join(reasons)


def _unknown(features: FeatureSet, resource: int, horizon_s: int) -> Counter[str]:
    """Return how many training rows have no known demand for a resource, by reason."""
    rows, h = features.train_rows(), HORIZONS_S.index(horizon_s)
    limited = features.limit[rows, resource] > 0
    measured = np.isfinite(features.y[rows, resource, h])
    past = features.end_us[rows] + horizon_s * 1_000_000 > features.manifest["span_us"][1]
    found = {
        "have no limit": ~limited,
        "rest on windows that end after the training period": limited & measured,
        "lie in the last horizon of the trace": limited & ~measured & past,
        f"have nothing measured within {horizon_s} s after them": limited & ~measured & ~past,
    }
    return Counter({reason: int(rows.sum()) for reason, rows in found.items() if rows.any()})
