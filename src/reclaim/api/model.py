"""Trains, loads and queries models from Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pandas as pd
import pyarrow as pa

from reclaim.api.dataset import Dataset, folder_of, table_of
from reclaim.api.display import frame_of, html_of_facts
from reclaim.config import config_from
from reclaim.data.errors import ConfigError, ModelError
from reclaim.data.schema import RESOURCES
from reclaim.data.windows import Cell

if TYPE_CHECKING:
    from reclaim.serving.models.loader import LoadedModel
    from reclaim.training.bundle import Bundle

_MEASURED: Final = ("violation", "reclaimed")
"""Shares of each margin that training measured on validation data."""


def train(
    datasets: Dataset | Path | str | Sequence[Dataset | Path | str],
    *,
    estimator: str | None = None,
    settings: Mapping[str, Any] | None = None,
    force: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Model:
    """Train a model, set its margins and register it, as ``reclaim train``; a finished run is found, not repeated.

    Parameters
    ----------
    datasets : Dataset, Path or str, or several of them
        Datasets with their features built.
    estimator : str or None
        ``network`` (the default) or ``trees``.
    settings : mapping or None
        Fields of ``training.settings.TrainConfig``, as ``{"fit.epochs": 5, "seed": 2}``.
    force : bool
        Whether to train even if the same run is finished.
    progress : callable or None
        Called with a line as each stage begins, such as ``print``.

    Raises
    ------
    ConfigError
        A dataset, its features or a setting is missing or unknown; the message has the remedy.
    HistoryTooShortError
        The split leaves no rows to fit or to calibrate on.

    Examples
    --------
    >>> import reclaim
    >>> model = reclaim.train(reclaim.open("dataset"), settings={"fit.epochs": 1})
    >>> model.kind
    'network'
    """
    from reclaim.training.fitting.train import run_training
    from reclaim.training.settings import TrainConfig

    given = {**(settings or {}), **({} if estimator is None else {"estimator": estimator})}
    several = datasets if isinstance(datasets, Sequence) and not isinstance(datasets, str) else [datasets]
    report = run_training(
        [folder_of(dataset) for dataset in several], config_from(TrainConfig, given), force=force, progress=progress
    )
    return load(f"{report.model}/{report.version}")


def load(reference: Path | str | None = None) -> Model:
    """Load a model, as ``reclaim serve --model``.

    Parameters
    ----------
    reference : Path or str or None
        ``NAME@ALIAS``, ``NAME/VERSION``, the folder of a bundle or ``builtin``. None: ``reclaim@champion``, and the
        built-in model until there is one; a model that is named is not replaced.

    Raises
    ------
    ModelError
        There is no such model; the message has the remedy.

    Examples
    --------
    >>> import reclaim
    >>> reclaim.load("reclaim@champion").horizon_s
    3600
    """
    from reclaim.serving.models.loader import load_model

    return Model(load_model(None if reference is None else str(reference)))


class Model:
    """A trained model; a notebook shows what it is and its margins.

    Parameters
    ----------
    loaded : serving.models.loader.LoadedModel
        As the service loads it.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded

    def __repr__(self) -> str:
        return f"Model('{self.name}/{self.version}')"

    def _repr_html_(self) -> str:
        facts: dict[str, str | int] = {
            "kind": self.kind, "horizon, s": self.horizon_s,
            "quantile levels": ", ".join(f"{level:g}" for level in self.bundle.forecaster.quantile_levels),
            "trained on": self.bundle.dataset_fingerprint[:12],
        }  # fmt: skip
        shown = html_of_facts(f"Model {self.name}/{self.version}", facts, self.notes)
        return shown + self.margins().to_html(border=0)

    @property
    def name(self) -> str:
        """Name, as registered."""
        return self._loaded.name

    @property
    def version(self) -> str:
        """Version, as registered; ``local`` for a bundle's folder."""
        return self._loaded.version

    @property
    def kind(self) -> str:
        """``network`` or ``trees``."""
        return self.bundle.kind

    @property
    def horizon_s(self) -> int:
        """Horizon of its reservations, in seconds."""
        return self.bundle.horizon_s

    @property
    def notes(self) -> list[str]:
        """Lines that a reader of its numbers must know, as ``reclaim train`` prints them."""
        return list(self.bundle.trained.get("notes", []))

    @property
    def bundle(self) -> Bundle:
        """Everything registered with it, for code that goes deeper than this interface."""
        return self._loaded.bundle

    def margins(self) -> pd.DataFrame:
        """Return the price of each margin, and the shares it came to on validation data, by margin and resource.

        Examples
        --------
        >>> import reclaim
        >>> list(reclaim.load().margins())
        ['price', 'violation', 'reclaimed']
        """
        trained = self.bundle.trained
        rows = {
            (name, resource): {"price": value, **{k: trained.get(k, {}).get(name, {}).get(resource) for k in _MEASURED}}
            for name, price in self.bundle.prices.items()
            for resource, value in zip(RESOURCES, price.value, strict=True)
        }
        return _indexed(rows, ("margin", "resource"))

    def scores(self) -> pd.DataFrame:
        """Return the scores of its forecast on validation and test rows, as the training run recorded them.

        Returns
        -------
        DataFrame
            By period, target and horizon; a column for each score (``training.evaluation.scores``).

        Raises
        ------
        ModelError
            The model is the built-in one or a bundle's folder, which have no record of a run.

        Examples
        --------
        >>> import reclaim
        >>> scores = reclaim.load().scores()
        >>> "pinball_over_usage" in scores
        True
        >>> scores.index.names
        FrozenList(['period', 'target', 'horizon_s'])
        """
        from reclaim.training.fitting.train import recorded_report
        from reclaim.training.tracking.references import BUILTIN, LOCAL_VERSION

        if self.name == BUILTIN:
            raise ModelError("the built-in model has no record of a run here; docs/builtin.md has its results")
        if self.version == LOCAL_VERSION:
            raise ModelError(
                f"{self._loaded.source}: a folder has no record of its run; load NAME/VERSION or NAME@ALIAS"
            )
        report = recorded_report(f"{self.name}/{self.version}")
        rows = {
            (period, target, int(horizon.removesuffix("s"))): scores
            for period, of in (("valid", report.scores), ("test", report.test_scores))
            for target, by_horizon in of.items()
            for horizon, scores in by_horizon.items()
        }
        return _indexed(rows, ("period", "target", "horizon_s"))

    def predict(
        self,
        histories: pd.DataFrame | Dataset,
        *,
        margin: str = "baseline",
        every_window: bool = False,
        cell: Cell | None = None,
    ) -> pd.DataFrame:
        """Return reservations, quantiles, peak CPU and out-of-memory risk of tasks: the numbers of the service.

        Parameters
        ----------
        histories : DataFrame or Dataset
            A row per task and window, in any order, with ``collection_id``, ``start_us``, ``end_us``, ``cpu_limit`` and
            ``memory_limit`` at least, as ``Dataset.histories`` returns them; further columns are ignored. Both limits
            are numbers: where memory is not measured, any will do (``histories.assign(memory_limit=1.0)``). Or a
            dataset with its features built, as for ``reclaim predict``.
        margin : str
            ``baseline`` (widest), ``medium`` or ``aggressive``.
        every_window : bool
            For a dataset: whether there is a row for each window, or only for the latest of each task. A portable
            model, such as the built-in one, answers all rows at the price of the latest windows, which was not known
            earlier.
        cell : Cell or None
            For a frame: the cell that the tasks run in, as ``Dataset.cell``; None: nothing is known about it.

        Returns
        -------
        DataFrame
            One row per task; ``docs/predict-to-a-file.md`` explains the columns.

        Raises
        ------
        SchemaError
            A column is missing or of the wrong type, or a row cannot be used; the message names the first.
        ConfigError
            ``histories`` is neither, the margin is unknown, the dataset has no features or another unit than the
            model's, or ``every_window`` or ``cell`` does not apply to it.

        Examples
        --------
        >>> import reclaim
        >>> dataset, model = reclaim.open("dataset"), reclaim.load()
        >>> few = dataset.tasks().head(3)
        >>> answers = model.predict(dataset.histories(few), margin="medium", cell=dataset.cell)
        >>> answers[["cpu_reservation", "memory_reservation", "peak_cpu", "oom_probability"]].shape
        (3, 4)
        """
        from reclaim.serving.predictions.dataset import predictions
        from reclaim.serving.predictions.histories import predict_histories
        from reclaim.serving.wire.rows import USAGE_COLUMNS

        if isinstance(histories, Dataset):
            if cell is not None:
                raise ConfigError(f"cell is for a frame: dataset {histories.path.name} has its own; leave it out")
            parts = predictions(self._loaded, histories.path, margin=margin, every_window=every_window)
            return frame_of(pa.concat_tables(parts))
        if every_window:
            raise ConfigError("every_window is for a dataset, and a frame gives one row per task; pass the Dataset")
        if not isinstance(histories, pd.DataFrame):
            raise ConfigError(
                f"histories must be a frame of pandas or a Dataset, got an object of type {type(histories).__name__}; "
                "`reclaim.open(FOLDER)` opens a folder, `.to_pandas()` makes a frame of another table"
            )
        if not isinstance(cell, Cell | None):
            raise ConfigError(f"cell must be a Cell, such as Dataset.cell, got {cell!r}")
        table = table_of(histories, USAGE_COLUMNS, "histories")
        return frame_of(predict_histories(self._loaded, table, margin=margin, cell=cell or Cell()))


def _indexed(rows: Mapping[tuple[Any, ...], Mapping[str, Any]], names: Sequence[str]) -> pd.DataFrame:
    """Return rows as a frame under an index of several levels."""
    index = pd.MultiIndex.from_tuples(list(rows), names=list(names))
    return pd.DataFrame(list(rows.values()), index=index)
