"""Fits the out-of-memory model to rows that are chosen for it, for most of those without the label say little."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from reclaim.data import schema as s
from reclaim.data.core.engine.workers import HERE
from reclaim.features.feature_set import FeatureSet
from reclaim.features.registry import AT
from reclaim.features.sample import OF_FOLDS
from reclaim.features.splits import GROUPS, PERIODS, TEST_UNSEEN, VALID, drawn, for_warnings
from reclaim.features.targets import HORIZONS_S
from reclaim.training.fitting.sources import RowIndex, Source
from reclaim.training.fitting.trees import binnable
from reclaim.training.models.oom_model import INPUTS, LEAVES, OomModel, Trees
from reclaim.training.models.trees import thread_limit

log = logging.getLogger(__name__)

_SOON: Final = HORIZONS_S.index(3_600)
"""The longest horizon of which every positive row is kept; within a day there are hundreds of each end."""
_KEEP_LATER: Final = 0.25
_KEEP_NEAR: Final = 0.1
_KEEP_REST: Final = 0.02
"""Shares of the other rows that are kept: positive within a day; above ``_NEAR`` of the limit or with a history of
out-of-memory ends; and all others. A row counts by the inverse of its share."""
_NEAR: Final = 0.8
FEWEST: Final = 20
"""Positive rows below which a horizon is not fitted."""
_MOST_ROWS: Final = 2_000_000
"""Rows that are learned from at most; more are thinned out alike."""

_TREES: Final = 220
"""Trees of each horizon. All settings are those of the prototypes that were the best on cells held out: many rows in a
leaf and small steps, for ends are few and a deeper model learns them by heart."""
_LEAF_ROWS: Final = 500
"""Rows of a leaf, at least; of fewer than fifty thousand rows a hundredth of them."""
_RATE: Final = 0.05
"""Learning rate."""
_L2: Final = 20.0
"""Weight of the squared values of the leaves in the loss."""
_BINS: Final = 63
"""Bins of a feature; 255 take twice the time, and made no difference on cells held out."""
_COLUMNS: Final = 0.3
"""Share of the inputs that each split chooses from."""
FOLDS: Final = 3
"""Parts that the collections are split into, to judge the model by tasks that it did not learn from: of each part by a
model of the others. More would cost a fit each, and of two parts a model knows only half of the ends."""
_BLOCK: Final = 1 << 17
"""Rows read at once."""


class OomRows(NamedTuple):
    """Rows to learn from.

    Attributes
    ----------
    x : float32, shape (n, k)
        The inputs ``INPUTS``.
    oom : float32, shape (n, n_horizons)
        Labels; NaN unknown.
    weight : float32, shape (n,)
    fold : uint8, shape (n,)
    """

    x: NDArray[np.float32]
    oom: NDArray[np.float32]
    weight: NDArray[np.float32]
    fold: NDArray[np.uint8]

    def take(self, rows: NDArray[np.int64]) -> OomRows:
        """Return the chosen rows."""
        return OomRows(self.x[rows], self.oom[rows], self.weight[rows], self.fold[rows])

    @classmethod
    def joined(cls, parts: Sequence[OomRows]) -> OomRows:
        """Return the rows of all parts."""
        x, oom, weight = (np.concatenate(column) for column in zip(*(part[:3] for part in parts), strict=True))
        return cls(x, oom, weight, np.concatenate([part.fold for part in parts]))


@dataclass(frozen=True)
class OomFit:
    """A model that was fitted, and those that stand in for it where it must be judged by rows that it learned from.

    Attributes
    ----------
    model : OomModel
        Of all rows.
    without : tuple of OomModel, one for each fold
        Of the rows of all other folds.
    """

    model: OomModel
    without: tuple[OomModel, ...]

    def unseen(self, source: Source, rows: RowIndex, threads: int = 1) -> NDArray[np.float64]:
        """Return the probability of rows by the model that learned from no task of their collection; (n, n_horizons).

        It is not calibrated; NaN where the others met no end.
        """
        fold, out = folds_of(source, rows), np.full((len(rows), len(HORIZONS_S)), np.nan)
        for k, model in enumerate(self.without):
            mine = np.flatnonzero(fold == k)
            out[mine] = model.predict(source.features.x[rows[mine]], threads=threads)
        return out


def fit_oom(sources: Sequence[Source], seed: int) -> OomFit | None:
    """Return a model of all rows that no test is made on; None where no horizon has enough positive ones.

    The result depends on the sources and the seed alone.
    """
    parts = [choose(source, rows_of(source.features), seed + k) for k, source in enumerate(sources)]
    rows = OomRows.joined(parts)
    if len(rows.x) > _MOST_ROWS:
        rng = np.random.default_rng(seed)
        rows = rows.take(np.sort(rng.choice(len(rows.x), _MOST_ROWS, replace=False)))
    fitted = (rows.oom == 1).sum(axis=0) >= FEWEST
    if not fitted.any():
        log.info("no out-of-memory model: %s positive rows, each horizon needs %d", (rows.oom == 1).sum(0), FEWEST)
        return None
    horizons = np.flatnonzero(fitted).tolist()
    jobs = list(product((None, *range(FOLDS)), horizons))
    with HERE.pool() as pool, tqdm(total=len(jobs), desc="warn", unit="fit", disable=None, leave=False) as bar:
        found = iter(pool.run(partial(_fit, rows, seed), jobs, lambda _: bar.update()))
    model, *without = [_model_of({h: next(found) for h in horizons}) for _ in range(1 + FOLDS)]
    return OomFit(model, tuple(without))


def rows_of(features: FeatureSet) -> RowIndex:
    """Return the rows that are learned from, in rising order."""
    return np.flatnonzero(for_warnings(features.period, features.group))


def folds_of(source: Source, rows: RowIndex) -> NDArray[np.uint8]:
    """Return the fold of each row, in rising order, by its collection; shape (n,), below ``FOLDS``."""
    found = [
        source.dataset.usage(bucket, [s.COLLECTION_ID])[s.COLLECTION_ID].to_numpy()[here]
        for bucket, here in source.features.by_bucket(source.features.row[rows])
    ]
    collection = np.concatenate([np.zeros(0, np.int64), *found])
    return (drawn(np.full(len(rows), OF_FOLDS), collection) * FOLDS).astype(np.uint8)


def choose(source: Source, candidates: RowIndex, seed: int) -> OomRows:
    """Return the rows of a source that are learned from."""
    none = np.zeros((0, len(HORIZONS_S)), np.float32)
    chosen = [OomRows(np.zeros((0, len(INPUTS)), np.float32), none, none[:, 0], np.zeros(0, np.uint8))]
    rng = np.random.default_rng(seed)
    fold, stand_for = folds_of(source, candidates), _stand_for(source.features, candidates)
    for start in range(0, len(candidates), _BLOCK):
        block = slice(start, start + _BLOCK)
        rows = candidates[block]
        x, (_, oom) = source.features.x[rows], source.features.targets(rows)
        near = (x[:, AT.memory_last] > _NEAR) | (x[:, AT.ooms] > 0) | (x[:, AT.collection_ooms] > 0)
        soon, later = (oom[:, : _SOON + 1] == 1).any(axis=1), (oom == 1).any(axis=1)
        share = np.where(soon, 1.0, np.where(later, _KEEP_LATER, np.where(near, _KEEP_NEAR, _KEEP_REST)))
        kept = (rng.random(len(rows)) < share) & np.isfinite(oom).any(axis=1)
        weight = stand_for[block][kept] / share[kept]
        chosen.append(OomRows(x[kept][:, list(INPUTS)], oom[kept], weight.astype(np.float32), fold[block][kept]))
    return OomRows.joined(chosen)


def _stand_for(features: FeatureSet, rows: RowIndex) -> NDArray[np.float64]:
    """Return how many rows of the dataset each of those that are kept stands for; shape (n,).

    Of the validation period all stand for alike, and the feature set says 1 of them.
    """
    weight = features.weight[rows].astype(np.float64)
    valid = features.period[rows] == VALID
    counts = features.manifest["rows"][PERIODS[VALID]]
    weight[valid] = sum(n for group, n in counts.items() if group != GROUPS[TEST_UNSEEN]) / max(valid.sum(), 1)
    return weight


class _Nodes(NamedTuple):
    """Trees as scikit-learn has them, and the logit before all of them."""

    start: float
    trees: list[NDArray[Any]]


def _model_of(found: Mapping[int, _Nodes | None]) -> OomModel:
    """Return the model of the trees of each horizon."""
    trees, fitted = Trees.blank(_TREES), np.zeros(len(HORIZONS_S), np.bool_)
    for h, nodes in found.items():
        if nodes is not None:
            fitted[h], trees.start[h] = True, nodes.start
            for k, tree in enumerate(nodes.trees):
                trees.put(h, k, tree)
    return OomModel(trees, fitted)


def _fit(rows: OomRows, seed: int, job: tuple[int | None, int]) -> _Nodes | None:
    """Return the trees of a horizon, of all rows or those outside a fold; None where they have no end, or no other."""
    from sklearn.ensemble import HistGradientBoostingClassifier

    left_out, h = job
    known = np.flatnonzero(np.isfinite(rows.oom[:, h]) & (rows.fold != (FOLDS if left_out is None else left_out)))
    met = rows.oom[known, h] == 1
    if met.all() or not met.any():
        return None
    leaf = min(_LEAF_ROWS, max(20, len(known) // 100))
    with thread_limit(1):  # sums of several threads differ in their last bits
        model: Any = HistGradientBoostingClassifier(
            max_iter=_TREES, max_leaf_nodes=LEAVES, min_samples_leaf=leaf,
            learning_rate=_RATE, l2_regularization=_L2, max_bins=_BINS, max_features=_COLUMNS, early_stopping=False,
            random_state=seed,
        ).fit(binnable(rows.x[known], leaf), met, sample_weight=rows.weight[known])  # fmt: skip
    # scikit-learn has no public way to its trees
    return _Nodes(model._baseline_prediction.item(), [tree.nodes for (tree,) in model._predictors])
