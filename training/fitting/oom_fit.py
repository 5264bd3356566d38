"""Fits the out-of-memory model to rows that are chosen for it, because most of those without the label say little."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import product
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from reclaim.data.core.parallel import THREADS
from reclaim.features.feature_set import FeatureSet
from reclaim.features.registry import AT
from reclaim.features.splits import IN_ALLOC, TRAIN, VALID, permitted
from reclaim.features.targets import AN_HOUR, HORIZONS_S
from reclaim.training.fitting.sources import RowIndex, Source
from reclaim.training.fitting.trees import binnable, boosted
from reclaim.training.models.oom_model import FEW_ENDS_INPUTS, INPUTS, LEAVES, OomModel, Trees
from reclaim.training.models.trees import thread_limit

log = logging.getLogger(__name__)

_KEEP_LATER: Final = 0.25
_KEEP_NEAR: Final = 0.1
_KEEP_REST: Final = 0.02
"""Shares of the other rows that are kept: positive within a day; above ``_NEAR`` of the limit or with a history of
out-of-memory ends; and all others. A row counts by the inverse of its share."""
_NEAR: Final = 0.8
FEWEST: Final = 20
"""Positive rows below which a horizon is not fitted."""
MANY: Final = 1_000
"""Rows within five minutes of an end, about as many as ends, from which trees read all inputs. From six cells, with
some 1,700 ends, they gain 7 % of average precision by it on cells of other donors; from one, with some 300, they lose
4 % (``benchmarks/LOG.md``, 2026-11-25)."""
_NO_FILTERS: Final = "sklearn.utils.parallel.delayed"
"""In the warning of a thread of scikit-learn that finds no filter of warnings."""
_MOST_ROWS: Final = 2_000_000
"""Rows that are learned from at most; more are thinned out alike."""

_ROWS_AT_ONCE: Final = 4_000_000
"""Rows that are fitted to at the same time, of all fits together: each takes some 500 bytes while it is binned."""

_MODELS: Final = 3
"""Models of each horizon, of which the mean logit is the answer: each is fitted to rows drawn again, by another seed.
The mean is steadier than any of them (``benchmarks/LOG.md``, 2026-11-25)."""
_TREES: Final = 220
"""Trees of each model and horizon. All settings are those of the prototypes that were the best on cells held out: many
rows in a leaf and small steps, for ends are few and a deeper model learns them by heart."""
_LEAF_ROWS: Final = 500
"""Rows of a leaf, at least; of fewer than fifty thousand rows a hundredth of them."""
_RATE: Final = 0.05
"""Learning rate."""
_L2: Final = 20.0
"""Weight of the squared values of the leaves in the loss."""
_COLUMNS: Final = 0.3
"""Share of the inputs that each split chooses from."""
_RISING: Final = (
    AT.memory_rate_30m, AT.memory_rate_2h, AT.memory_rate_6h, AT.memory_rate_run, AT.ooms, AT.collection_ooms,
    AT.collection_oom_rate,
)  # fmt: skip
_FALLING: Final = (AT.memory_above, AT.oom_since, AT.collection_oom_since)
"""Features with which the probability may only rise, or only fall: the faster memory nears the limit and the more ends
there were, the likelier is one; the longer ago they are, the less likely, and so where the limit does not bind. Trees
without this bound learn the few ends of one cell by heart. A value that is unknown is not compared with others."""
_DIRECTION: Final = tuple(int(k in _RISING) - int(k in _FALLING) for k in INPUTS)
"""1 rising, -1 falling, 0 free, in the order of ``INPUTS``."""
_BLOCK: Final = 1 << 17
"""Rows read at once."""
_SEED_STEP: Final = 1 << 20
"""Distance between the seeds of two models: above any number of sources, each of which adds one to its own."""


class OomRows(NamedTuple):
    """Rows to learn from: the inputs ``INPUTS``, float32 (n, k), labels (n, n_horizons), NaN unknown, and weights."""

    x: NDArray[np.float32]
    oom: NDArray[np.float32]
    weight: NDArray[np.float32]


def fit_oom(sources: Sequence[Source], seed: int, periods: Sequence[int] = (TRAIN,)) -> OomModel | None:
    """Return a model of the rows of all sources in some periods; None where no horizon has enough positive ones.

    The result depends on the sources, the periods and the seed alone. Trees of fewer than ``MANY`` rows before an end
    read ``FEW_ENDS_INPUTS`` alone.
    """
    seeds = [seed + model * _SEED_STEP for model in range(_MODELS)]
    draws = _draws(sources, seeds, periods)
    positive = (draws[0].oom == 1).sum(axis=0)
    fitted = positive >= FEWEST
    if not fitted.any():
        log.info("no out-of-memory model: %s positive rows, each horizon needs %d", positive, FEWEST)
        return None
    reads = range(len(INPUTS)) if positive[0] >= MANY else FEW_ENDS_INPUTS
    return OomModel(_fit(draws, seeds, np.flatnonzero(fitted).tolist(), reads), fitted)


def refit_oom(first: OomModel, sources: Sequence[Source], seed: int) -> OomModel:
    """Return a model of the training and the validation rows, for the horizons that the first was fitted for.

    The calibration of the first holds for no other horizon. The first itself, where the rows drawn again hold too
    few positive ones for one of them.
    """
    second = fit_oom(sources, seed, (TRAIN, VALID))
    if second is None or not second.fitted[first.fitted].all():
        log.info("the first out-of-memory model serves: a second one lacks a horizon")
        return first
    return OomModel(second.trees, first.fitted)


def rows_of(features: FeatureSet, period: int) -> RowIndex:
    """Return the rows of a period, those of tasks inside an alloc instance among them.

    Reservations are not learned from them, because they use their alloc's resources; but they have limits of their own
    and reach them, and are warned of like any other.
    """
    mine = permitted(period, features.group) | (np.asarray(features.group) == IN_ALLOC)
    return np.flatnonzero((features.period == period) & mine)


def choose(source: Source, candidates: RowIndex, seeds: Sequence[int]) -> list[OomRows]:
    """Return the rows of a source that are learned from, drawn once for each seed; the source is read once."""
    draws: list[tuple[np.random.Generator, list[OomRows]]] = [(np.random.default_rng(seed), []) for seed in seeds]
    for start in range(0, len(candidates), _BLOCK):
        rows = candidates[start : start + _BLOCK]
        x, (_, oom) = source.features.x[rows], source.features.targets(rows)
        near = (x[:, AT.memory_last] > _NEAR) | (x[:, AT.ooms] > 0) | (x[:, AT.collection_ooms] > 0)
        # within a day there are hundreds of rows of each end
        soon, later = (oom[:, : AN_HOUR + 1] == 1).any(axis=1), (oom == 1).any(axis=1)
        share = np.where(soon, 1.0, np.where(later, _KEEP_LATER, np.where(near, _KEEP_NEAR, _KEEP_REST)))
        known = np.isfinite(oom).any(axis=1)
        for rng, chosen in draws:
            kept = (rng.random(len(rows)) < share) & known
            weight = source.features.stands_for(rows[kept]) / share[kept]
            chosen.append(OomRows(x[kept][:, list(INPUTS)], oom[kept], weight.astype(np.float32)))
    none = np.zeros((0, len(HORIZONS_S)), np.float32)
    nothing = OomRows(np.zeros((0, len(INPUTS)), np.float32), none, none[:, 0])
    return [_joined(chosen or [nothing]) for _, chosen in draws]


def _draws(sources: Sequence[Source], seeds: Sequence[int], periods: Sequence[int]) -> list[OomRows]:
    """Return the rows of all sources that the model of each seed learns from, at most ``_MOST_ROWS``."""
    parts = []
    for k, source in enumerate(sources):
        candidates = np.concatenate([rows_of(source.features, period) for period in periods])
        parts.append(choose(source, candidates, [seed + k for seed in seeds]))
    return [_thinned(_joined(of_seed), seed) for of_seed, seed in zip(zip(*parts, strict=True), seeds, strict=True)]


def _joined(parts: Sequence[OomRows]) -> OomRows:
    return OomRows(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _thinned(rows: OomRows, seed: int) -> OomRows:
    if len(rows.x) <= _MOST_ROWS:
        return rows
    some = np.sort(np.random.default_rng(seed).choice(len(rows.x), _MOST_ROWS, replace=False))
    return OomRows(*(column[some] for column in rows))


def _fit(draws: Sequence[OomRows], seeds: Sequence[int], horizons: Sequence[int], reads: Sequence[int]) -> Trees:
    """Return the trees of all models, of some horizons, from some of ``INPUTS``; several are fitted at once."""
    trees, jobs = Trees.blank(_MODELS * _TREES), list(product(range(len(draws)), horizons))
    at_once = max(1, min(THREADS, _ROWS_AT_ONCE // max(len(rows.x) for rows in draws)))
    with _filters_kept(), ThreadPoolExecutor(at_once) as pool:
        fits = [pool.submit(_boosted, draws[model], h, reads, seeds[model]) for model, h in jobs]
        try:
            for (place, h), fit in zip(jobs, fits, strict=True):
                model = fit.result()
                # scikit-learn has no public way to its trees
                trees.start[h] += model._baseline_prediction.item() / _MODELS
                for k, (tree,) in enumerate(model._predictors, place * _TREES):
                    trees.put(h, k, tree.nodes, reads)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    trees.value[...] /= _MODELS
    return trees


@contextmanager
def _filters_kept() -> Iterator[None]:
    """Keep the filters of warnings, which belong to the process: scikit-learn changes them in each of several threads.

    Where one thread finds the filters that another one has just emptied, it warns of its own call.
    """
    with warnings.catch_warnings(record=True) as seen:
        yield
    for one in seen:
        if _NO_FILTERS not in str(one.message):
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)


def _boosted(rows: OomRows, h: int, reads: Sequence[int], seed: int) -> Any:
    """Return one of the models of a horizon, as scikit-learn's, from some of ``INPUTS``."""
    from sklearn.ensemble import HistGradientBoostingClassifier

    known = np.flatnonzero(np.isfinite(rows.oom[:, h]))
    leaf, x = min(_LEAF_ROWS, max(20, len(known) // 100)), rows.x[np.ix_(known, np.array(reads))]
    model = HistGradientBoostingClassifier(
        max_iter=_TREES, max_leaf_nodes=LEAVES, min_samples_leaf=leaf,
        learning_rate=_RATE, l2_regularization=_L2, max_features=_COLUMNS,
        monotonic_cst=[_DIRECTION[k] for k in reads], early_stopping=False, random_state=seed,
    )  # fmt: skip
    with thread_limit(1):  # sums of several threads differ in their last bits
        return boosted(model, binnable(x, leaf), rows.oom[known, h] == 1, rows.weight[known])
