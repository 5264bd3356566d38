"""Runs the prediction job: a dataset in, a file of predictions out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

from reclaim.data.core.engine.workers import HERE, Engine
from reclaim.data.core.files import replaced_file
from reclaim.data.core.parquet import TableWriter
from reclaim.data.errors import ConfigError
from reclaim.features.feature_set import FeatureSet
from reclaim.serving.models.loader import load_model
from reclaim.serving.predictions.columns import schema_of
from reclaim.serving.predictions.dataset import check_margin, predictions
from reclaim.training.margins.margin import MARGIN_NAMES

SUFFIXES: Final = (".parquet", ".csv")
"""Endings of a file of predictions, one for each format."""

_LOOKS_AHEAD: Final = (
    "reservations of earlier windows have the price of the latest ones, which was not known then: "
    "`reclaim replay` says what would have been reclaimed and violated"
)
"""Note on every window of a portable model."""


@dataclass(frozen=True)
class PredictReport:
    """Outcome of ``predict``.

    Attributes
    ----------
    rows, tasks : int
        Rows of the file, and tasks in them.
    dataset, features : str
        Fingerprints.
    model, version : str
    margin : str
    horizon_s : int
        Horizon of every number, in seconds.
    levels : tuple of float
        Quantile levels.
    notes : tuple of str
        What is to be known before the numbers are used.
    """

    rows: int
    tasks: int
    dataset: str
    features: str
    model: str
    version: str
    margin: str
    horizon_s: int
    levels: tuple[float, ...]
    notes: tuple[str, ...]


def predict(
    dataset: Path,
    out: Path,
    *,
    model: str | None = None,
    margin: str = MARGIN_NAMES[0],
    every_window: bool = False,
    progress: Callable[[float], None] | None = None,
    engine: Engine = HERE,
) -> PredictReport:
    """Write the predictions of all tasks of a dataset into a file, which appears whole or not at all.

    The same dataset, features, model and options give the same bytes.

    Parameters
    ----------
    dataset : Path
        A dataset folder with its features built.
    out : Path
        Parquet or CSV to write, by its suffix: the columns of ``columns.schema_of`` and the rows of
        ``dataset.predictions``.
    model : str or None
        As for ``models.loader.load_model``.
    margin : str
        One of ``MARGIN_NAMES``.
    every_window : bool
        Whether there is a row for each window, or only for the latest of each task.
    progress : callable or None
        Called with the share of the dataset done.
    engine : Engine
        Runs a job for each bucket; the bytes do not depend on it.

    Raises
    ------
    ConfigError
        The suffix, the margin or the dataset is unknown, the dataset has no features, or its amounts seem to be in
        another unit than those that the model was trained on.
    ModelError
        There is no such model.
    TraceError
        A worker was lost, and the engine does not run its job again.
    """
    if out.suffix not in SUFFIXES or out.is_dir():
        what = "a folder" if out.is_dir() else f"the suffix {out.suffix!r}"
        raise ConfigError(f"{out}: expected the name of a file that ends in {' or '.join(SUFFIXES)}, got {what}")
    check_margin(margin)  # again below, but before anything slow
    features = FeatureSet.open(dataset)
    loaded = load_model(model)
    tables = predictions(loaded, dataset, margin=margin, every_window=every_window, progress=progress, engine=engine)
    levels, rows, tasks = loaded.bundle.forecaster.quantile_levels, 0, 0
    about = {
        "dataset": features.manifest["dataset"], "features": features.fingerprint, "model": loaded.name,
        "version": loaded.version, "margin": margin, "horizon_s": loaded.bundle.horizon_s,
    }  # fmt: skip
    schema = schema_of(levels, named=features.dataset.named)
    schema = schema.with_metadata({name: str(fact) for name, fact in about.items()})
    out.parent.mkdir(parents=True, exist_ok=True)
    with _writing(out, schema) as write:
        for table in tables:
            write(table)
            rows += len(table)
            tasks += pc.sum(pc.equal(table["windows"], 1)).as_py() if every_window else len(table)
    notes = (_LOOKS_AHEAD,) if every_window and loaded.bundle.portable else ()
    return PredictReport(rows=rows, tasks=tasks, levels=tuple(levels), notes=notes, **about)


@contextmanager
def _writing(out: Path, schema: pa.Schema) -> Iterator[Callable[[pa.Table], None]]:
    """Yield a function that adds rows to a file, which gets its name at the end."""
    if out.suffix == ".parquet":
        with TableWriter(out, schema) as writer:
            yield writer.write
    else:
        with replaced_file(out) as partial, csv.CSVWriter(partial, schema.remove_metadata()) as file:
            yield lambda table: file.write(table.cast(schema))
