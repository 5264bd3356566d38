"""Predicts the tasks of a dataset from its stored features, bucket by bucket."""

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
from reclaim.data.windows import Cell, Windows, concatenate
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


class _Bucket(NamedTuple):
    """Windows of a bucket, the first row of each row's task, and the bucket's first row in the feature set."""

    windows: Windows
    first: Rows
    begins: int


def check_margin(name: str) -> str:
    """Return the name of a margin; ConfigError where it is none of ``MARGIN_NAMES``."""
    if name not in MARGIN_NAMES:
        raise ConfigError(f"margin must be one of {', '.join(MARGIN_NAMES)}, got {name!r}")
    return name


def cell_of(dataset: Dataset, features: FeatureSet) -> Cell:
    """Return the cell that the features of a dataset were computed for."""
    return dataset.cell(features.manifest["config"]["monday_s"] * 1_000_000)


def _at_own_price(scorer: Scorer, dataset: Dataset, features: FeatureSet) -> Scorer:
    """Return the scorer at the price that it solves for the latest window of every task."""
    kept, risks = [], []
    for bucket in range(dataset.n_buckets):
        windows = dataset.windows(bucket)
        last = windows.task_starts()[1:] - 1
        kept.append(windows.take(last))
        scores = scorer.score(features.x[int(features.bucket_start[bucket]) + last], kept[-1])
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

    Rows are in the order of the dataset: bucket by bucket, in each by task, then time. They rest on the stored
    features, which are equal to the bit to those of the service's own state. A portable model answers at the price that
    it solves for the latest window of every task.

    Yields
    ------
    pyarrow.Table
        At most ``ROW_GROUP_ROWS`` rows of ``columns.schema_of``.
    """
    opened, features = Dataset.open(dataset), FeatureSet.open(dataset)
    features.check_holds(related=model.bundle.related)
    settings, portable = ServingSettings(), model.bundle.portable
    scorer = Scorer(model, cell_of(opened, features), THREADS, features.mean_limit if portable else None)
    if portable:
        scorer = _at_own_price(scorer, opened, features)
    margin_of_tier = margins_of(CellQuery(), scorer, check_margin(margin))
    for bucket in range(opened.n_buckets):
        windows = opened.windows(bucket)
        starts = windows.task_starts()
        here = _Bucket(windows, np.repeat(starts[:-1], np.diff(starts)), int(features.bucket_start[bucket]))
        rows = np.arange(len(windows)) if every_window else starts[1:] - 1
        for low in range(0, len(rows), ROW_GROUP_ROWS):
            some = rows[low : low + ROW_GROUP_ROWS]

            def made(piece: slice, bucket: _Bucket = here, rows: Rows = some) -> pa.Table:
                at = rows[piece]
                first = bucket.first[at]
                seen, first_us = at - first + 1, bucket.windows.start_us[first]
                x = features.x[bucket.begins + at]
                found = answers_at(scorer, x, bucket.windows.take(at), seen, first_us, margin_of_tier, settings)
                return flat(as_table(found, _UNITS, quantiles=True))

            yield pa.concat_tables(in_pieces(made, len(some), THREADS))
        if progress is not None:
            progress(int(features.bucket_start[bucket + 1]) / max(int(features.bucket_start[-1]), 1))
