"""Fits the portable network: as many rows of each source and signal, limits rescaled at random, lags hidden."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from reclaim.data.errors import HistoryTooShortError
from reclaim.features.feature_set import FeatureSet
from reclaim.features.registry import AT
from reclaim.features.targets import HORIZONS_S, TARGETS
from reclaim.training.fitting.learner import Fitted, Learner, OnEpoch
from reclaim.training.fitting.network import choose_device, fit_network
from reclaim.training.fitting.sources import Source, choose_rows
from reclaim.training.models.beyond import SO_FAR, Part, beyond_of
from reclaim.training.models.portable import FIRST, INPUTS, LAGS, SHARES, PortableForecaster, inputs_of, place
from reclaim.training.models.trees import Rows
from reclaim.training.settings import FitConfig, TrainConfig

_RESCALED: Final = 0.6
"""Share of the training rows whose limit is another one, by a factor drawn for each."""
_SPREAD: Final = 0.7
"""Standard deviation of the factor's logarithm: two thirds lie between a half and the double."""
_HIDDEN: Final = 0.4
"""Share of the training rows whose lags are hidden, as they are in a cell's first week."""
_ABOVE: Final = 1.01
"""A largest value below this many times the mean in most windows counts as the mean, apart from rounding and caps."""
_LOOKED_AT: Final = 10_000
"""Rows by which this is decided."""
_READ_AT_ONCE: Final = 65_536
"""Rows whose inputs are made at once, to bound memory."""


class PortableLearner(Learner):
    """Fits the portable network."""

    settings = FitConfig

    def check(self, config: TrainConfig) -> None:
        """Refuse a device that is not here."""
        choose_device(config.fit.device)

    def fit(
        self, sources: Sequence[Source], config: TrainConfig, checkpoints: Path, *, on_epoch: OnEpoch | None = None
    ) -> Fitted:
        """Fit to the training rows of the sources; ``fit.max_samples`` is shared out among sources and signals."""
        fit, random = config.fit, np.random.default_rng(config.seed)
        parts = [_rows(sources, FeatureSet.train_rows, fit.max_samples, config.seed),
                 _rows(sources, FeatureSet.valid_rows, fit.max_valid_samples, config.seed)]  # fmt: skip
        (train, counts), (valid, _) = parts
        if not len(train):
            raise HistoryTooShortError("expected at least 1 training row with a known demand, got 0")
        result = fit_network(
            _augmented(train, random), valid, fit, seed=config.seed, checkpoints=checkpoints, on_epoch=on_epoch,
            now=np.array([FIRST]),
        )  # fmt: skip
        tensors = {name: tensor.numpy() for name, tensor in result.network.state_dict().items()}
        beyond = beyond_of(_targets_alone(sources, fit.max_samples, config.seed), SO_FAR, alike=True)
        return Fitted(PortableForecaster(tensors, beyond), counts, result.facts(len(train)), result.history)


def _rows(
    sources: Sequence[Source], rows_of: Callable[[FeatureSet], NDArray[np.int64]], limit: int, seed: int
) -> tuple[Rows, list[int]]:
    """Return rows of every source and signal, ``limit`` altogether and as many of each, and how many of each source."""
    parts: list[tuple[NDArray[np.float32], ...]] = []
    counts = [0] * len(sources)
    for source, t, some in _chosen(sources, rows_of, limit, seed):
        y = source.features.targets(some)[0][:, t]
        x = inputs_of(source.features.x[some])[:, t]
        measured = np.isfinite(x[:, FIRST])
        parts.append((x[measured], y[measured, None], source.features.weight[some][measured]))
        counts[sources.index(source)] += int(measured.sum())
    none = [np.zeros((0, *row), np.float32) for row in ((len(INPUTS),), (1, len(HORIZONS_S)), ())]
    x, y, weight = (np.concatenate(column) for column in zip(none, *parts, strict=True))
    oom = np.full((len(x), len(HORIZONS_S)), np.nan, np.float32)
    return Rows(x, y, oom, None if (weight == 1).all() else weight), counts


def _chosen(
    sources: Sequence[Source], rows_of: Callable[[FeatureSet], NDArray[np.int64]], limit: int, seed: int
) -> Iterator[tuple[Source, int, NDArray[np.int64]]]:
    """Yield rows of every source and of each of its targets that is known in some, ``_READ_AT_ONCE`` at a time."""
    kept = [
        (source, t, rows)
        for source in sources
        for t in range(len(TARGETS))
        if len(rows := _known(source.features, rows_of(source.features), t))
    ]
    for source, t, known in kept:
        rows = choose_rows(known, limit // len(kept), seed)
        for start in range(0, len(rows), _READ_AT_ONCE):
            yield source, t, rows[start : start + _READ_AT_ONCE]


def _targets_alone(sources: Sequence[Source], limit: int, seed: int) -> Iterator[Part]:
    """Yield the training rows that the network is fitted to, as recorded, each with its one target."""
    for source, t, some in _chosen(sources, FeatureSet.train_rows, limit, seed):
        y = np.full((len(some), len(TARGETS), len(HORIZONS_S)), np.nan, np.float32)
        y[:, t] = source.features.targets(some)[0][:, t]
        yield source.features.x[some], y, source.features.weight[some]


def _known(features: FeatureSet, rows: NDArray[np.int64], t: int) -> NDArray[np.int64]:
    """Return the rows of a known demand, at any horizon; none of peak CPU where the window's mean takes its place."""
    known = (np.isfinite(features.y[rows, t]) & features.inside[rows]).any(axis=1)
    if TARGETS[t] == "peak_cpu":
        some = rows[:_LOOKED_AT]
        recorded = features.x[some, AT.peak_cpu_last] > _ABOVE * features.x[some, AT.cpu_last]
        known &= recorded.mean() > 0.5 if len(some) else False
    chosen: NDArray[np.int64] = rows[known]
    return chosen


def _augmented(rows: Rows, random: np.random.Generator) -> Rows:
    """Return the rows as if some had another limit, and some a history of a few hours."""
    x, y = rows.x.copy(), rows.y.copy()
    factor = np.where(random.random(len(x)) < _RESCALED, np.exp(random.normal(0.0, _SPREAD, len(x))), 1.0)
    x[:, :SHARES] *= factor[:, None].astype(np.float32)
    y *= factor[:, None, None].astype(np.float32)
    hidden = np.flatnonzero(random.random(len(x)) < _HIDDEN)
    for lag in LAGS:
        x[hidden, INPUTS.index(lag)] = np.nan
        x[hidden, INPUTS.index(f"{lag}_missing")] = 1.0
    place(x)
    return replace(rows, x=x, y=y)
