"""Predicts the tasks of a dataset, bucket by bucket."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from reclaim.data.core.engine.workers import HERE, Engine
from reclaim.data.core.parallel import THREADS, in_pieces
from reclaim.data.core.parquet import ROW_GROUP_ROWS
from reclaim.data.errors import ConfigError
from reclaim.data.windows import Windows, concatenate
from reclaim.features.feature_set import FeatureSet
from reclaim.serving.answers.query import margins_of
from reclaim.serving.answers.stateful import as_table
from reclaim.serving.answers.stateless_table import answers_at
from reclaim.serving.models.scorer import Scorer
from reclaim.serving.predictions.columns import flat
from reclaim.serving.predictions.names import Names
from reclaim.serving.settings import ServingSettings
from reclaim.serving.wire.cell_schemas import CellQuery
from reclaim.serving.wire.schemas import Units
from reclaim.training.margins.margin import MARGIN_NAMES
from reclaim.training.margins.own_price import Risk

if TYPE_CHECKING:
    from reclaim.serving.models.loader import LoadedModel

Rows = NDArray[np.int64]

_UNITS: Final = Units(cpu="trace cpu", memory="trace memory")
"""A dataset keeps its trace's units."""


@dataclass(frozen=True)
class _Asked:
    """Everything that the jobs of a dataset share; a job is the number of a bucket."""

    scorer: Scorer
    features: FeatureSet
    margin_of_tier: Rows
    settings: ServingSettings
    every_window: bool


def check_margin(name: str) -> str:
    """Return the name of a margin; ConfigError where it is not one of ``MARGIN_NAMES``."""
    if name not in MARGIN_NAMES:
        raise ConfigError(f"margin must be one of {', '.join(MARGIN_NAMES)}, got {name!r}")
    return name


def predictions(
    model: LoadedModel,
    dataset: Path,
    *,
    margin: str = MARGIN_NAMES[0],
    every_window: bool = False,
    progress: Callable[[float], None] | None = None,
    engine: Engine = HERE,
) -> Iterator[pa.Table]:
    """Return the predictions of all tasks of a dataset, of a bucket for each worker in memory at a time.

    Arguments and errors are those of ``job.predict``.

    Rows are in the order of the dataset: bucket by bucket, in each by task, then time. They rest on features that are
    equal to the bit to those of the service's own state. A portable model answers at the price that
    it solves for the latest window of every task outside alloc instances.

    Returns
    -------
    iterator of pyarrow.Table
        At most ``ROW_GROUP_ROWS`` rows each of ``columns.schema_of``, with names where the dataset has them.
    """
    features = FeatureSet.open(dataset)
    if (apart := model.bundle.other_units(features.mean_limit)) is not None:
        raise ConfigError(f"{dataset}, model {model.name}: {apart}, or name the built-in model, which takes any unit")
    check_margin(margin)
    return _predictions(model, features, margin, every_window, progress, engine)


def _predictions(
    model: LoadedModel,
    features: FeatureSet,
    margin: str,
    every_window: bool,
    progress: Callable[[float], None] | None,
    engine: Engine,
) -> Iterator[pa.Table]:
    opened = features.dataset
    named = Names(opened).added if opened.named else None
    portable = model.bundle.portable
    scorer = Scorer(model, features.folding.cell, THREADS, features.mean_limit if portable else None)
    buckets = range(opened.n_buckets)
    with engine.pool() as pool:
        if portable:
            with closing(pool.each(partial(_latest, scorer, features), buckets)) as latest:
                windows, risks = zip(*latest, strict=True)
            begin_us, end_us = features.manifest["span_us"]
            scorer = scorer.priced_for(concatenate([*windows]), np.concatenate(risks), end_us - begin_us)
        margin_of_tier = margins_of(CellQuery(), scorer, margin)
        asked = _Asked(scorer, features, margin_of_tier, ServingSettings(), every_window)
        with closing(pool.each(partial(_answered, asked), buckets)) as answered:
            for done, tables in zip(features.bucket_start[1:].tolist(), answered, strict=True):
                yield from tables if named is None else map(named, tables)
                if progress is not None:
                    progress(done / max(int(features.bucket_start[-1]), 1))


def _latest(scorer: Scorer, features: FeatureSet, bucket: int) -> tuple[Windows, Risk]:
    """Return the latest window of every task outside alloc instances, and what the model expects of each price there.

    The tasks are those of one bucket; a replay solves its price for the same tasks.
    """
    here = features.bucket(bucket)
    last = here.windows.task_starts()[1:] - 1
    last = last[~here.windows.in_alloc[last]]
    windows = here.windows.take(last)
    scores = scorer.score(here.features(last, THREADS), windows)
    assert scores.risk is not None
    return windows, scores.risk


def _answered(asked: _Asked, bucket: int) -> list[pa.Table]:
    """Return the predictions of a bucket, at most ``ROW_GROUP_ROWS`` rows a table."""
    here = asked.features.bucket(bucket)
    windows, starts = here.windows, here.windows.task_starts()
    rows = np.arange(len(windows)) if asked.every_window else starts[1:] - 1
    first = np.repeat(starts[:-1], np.diff(starts)) if asked.every_window else starts[:-1]  # of each row's task
    x = here.features(rows, THREADS)

    def made(low: int, piece: slice) -> pa.Table:
        part = slice(low + piece.start, min(low + ROW_GROUP_ROWS, low + piece.stop))
        at, begun = rows[part], first[part]
        found = answers_at(
            asked.scorer, x[part], windows.take(at), at - begun + 1, windows.start_us[begun], asked.margin_of_tier,
            asked.settings,
        )  # fmt: skip
        return flat(as_table(found, _UNITS, quantiles=True))

    return [
        pa.concat_tables(in_pieces(partial(made, low), min(ROW_GROUP_ROWS, len(rows) - low), THREADS))
        for low in range(0, len(rows), ROW_GROUP_ROWS)
    ]
