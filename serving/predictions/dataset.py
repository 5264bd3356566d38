"""Predicts the tasks of a dataset, bucket by bucket."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from reclaim.data.core.parallel import THREADS, in_pieces
from reclaim.data.core.parquet import ROW_GROUP_ROWS
from reclaim.data.dataset import Dataset
from reclaim.data.errors import ConfigError
from reclaim.data.windows import Windows, concatenate
from reclaim.features.feature_set import FeatureSet
from reclaim.serving.answers.query import margins_of
from reclaim.serving.answers.stateful import as_table
from reclaim.serving.answers.stateless_table import answers_at
from reclaim.serving.models.scorer import Scorer
from reclaim.serving.predictions.columns import flat
from reclaim.serving.settings import ServingSettings
from reclaim.serving.wire.cell_schemas import CellQuery
from reclaim.serving.wire.schemas import Units
from reclaim.training.margins.margin import MARGIN_NAMES

if TYPE_CHECKING:
    from reclaim.serving.models.loader import LoadedModel

Rows = NDArray[np.int64]

_UNITS: Final = Units(cpu="trace cpu", memory="trace memory")
"""A dataset keeps its trace's units."""


class _Asked(NamedTuple):
    """Windows of a bucket, the first row of each row's task, the rows that are asked for, and their features."""

    windows: Windows
    first: Rows
    rows: Rows
    x: NDArray[np.float32]


def check_margin(name: str) -> str:
    """Return the name of a margin; ConfigError where it is none of ``MARGIN_NAMES``."""
    if name not in MARGIN_NAMES:
        raise ConfigError(f"margin must be one of {', '.join(MARGIN_NAMES)}, got {name!r}")
    return name


def _at_own_price(scorer: Scorer, dataset: Dataset, features: FeatureSet) -> Scorer:
    """Return the scorer at the price that it solves for the latest window of every task."""
    kept, risks = [], []
    for bucket in range(dataset.n_buckets):
        here = features.bucket(bucket)
        last = here.windows.task_starts()[1:] - 1
        kept.append(here.windows.take(last))
        scores = scorer.score(here.features(last, THREADS), kept[-1])
        assert scores.risk is not None
        risks.append(scores.risk)
    begin_us, end_us = features.manifest["span_us"]
    return scorer.priced_for(concatenate(kept), np.concatenate(risks), end_us - begin_us)


def predictions(
    model: LoadedModel,
    dataset: Path,
    *,
    margin: str = MARGIN_NAMES[0],
    every_window: bool = False,
    progress: Callable[[float], None] | None = None,
) -> Iterator[pa.Table]:
    """Yield the predictions of all tasks of a dataset, one bucket in memory at a time.

    Arguments and errors are those of ``job.predict``.

    Rows are in the order of the dataset: bucket by bucket, in each by task, then time. They rest on features that are
    equal to the bit to those of the service's own state. A portable model answers at the price that
    it solves for the latest window of every task.

    Yields
    ------
    pyarrow.Table
        At most ``ROW_GROUP_ROWS`` rows of ``columns.schema_of``.
    """
    opened, features = Dataset.open(dataset), FeatureSet.open(dataset)
    features.check_holds(related=model.bundle.related)
    settings, portable = ServingSettings(), model.bundle.portable
    scorer = Scorer(model, features.folding.cell, THREADS, features.mean_limit if portable else None)
    if portable:
        scorer = _at_own_price(scorer, opened, features)
    margin_of_tier = margins_of(CellQuery(), scorer, check_margin(margin))
    for bucket in range(opened.n_buckets):
        here = features.bucket(bucket)
        windows, starts = here.windows, here.windows.task_starts()
        rows = np.arange(len(windows)) if every_window else starts[1:] - 1
        x = here.features(rows, THREADS)
        for low in range(0, len(rows), ROW_GROUP_ROWS):
            group = slice(low, low + ROW_GROUP_ROWS)
            some = _Asked(windows, np.repeat(starts[:-1], np.diff(starts)), rows[group], x[group])

            def made(piece: slice, some: _Asked = some) -> pa.Table:
                at = some.rows[piece]
                first = some.first[at]
                seen, first_us, of_rows = at - first + 1, some.windows.start_us[first], some.windows.take(at)
                found = answers_at(scorer, some.x[piece], of_rows, seen, first_us, margin_of_tier, settings)
                return flat(as_table(found, _UNITS, quantiles=True))

            yield pa.concat_tables(in_pieces(made, len(some.rows), THREADS))
        if progress is not None:
            progress(int(features.bucket_start[bucket + 1]) / max(int(features.bucket_start[-1]), 1))
