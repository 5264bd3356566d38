"""Opens and makes datasets from Python, and reads their tables and features as frames."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from reclaim.api.display import frame_of, html_of_facts
from reclaim.config import config_from
from reclaim.data.dataset import Dataset as Stored
from reclaim.data.errors import ConfigError, SchemaError
from reclaim.data.schema import TASK_KEY

if TYPE_CHECKING:
    import pandas as pd

    from reclaim.api.replay import Learned, Recommendations, Replay
    from reclaim.data.windows import Cell

_MOST_ID: Final = 2**63 - 1
"""Largest id that a dataset can hold."""


def open(path: Path | str) -> Dataset:
    """Open a dataset folder; nothing but its manifest is read.

    Parameters
    ----------
    path : Path or str
        Folder that ``ingest`` or ``reclaim ingest`` wrote.

    Raises
    ------
    ConfigError
        There is no dataset; the message names the command that makes one.

    Examples
    --------
    >>> import reclaim
    >>> dataset = reclaim.open("dataset")
    >>> dataset.path.name
    'dataset'
    """
    return Dataset(Stored.open(folder_of(path)))


def synth(
    out: Path | str,
    *,
    machines: int = 30,
    days: float = 4.0,
    seed: int = 1,
    tasks_per_machine: float = 12.0,
    common: float = 0.0,
    service: float = 0.0,
) -> Path:
    """Write a synthetic cell in the Google v3 layout, as ``reclaim synth``; return its folder.

    Parameters
    ----------
    out : Path or str
        Folder to write. A cell of the same settings there is left as it is.
    machines : int
    days : float
    seed : int
    tasks_per_machine : float
        Tasks running on a machine, on average.
    common, service : float
        Shares of each task's movement that the whole cell, and beyond that the task's collection, has in common.

    Examples
    --------
    >>> import reclaim
    >>> reclaim.synth("cell", machines=3, days=0.75).name
    'cell'
    """
    from reclaim.data.core.stores.places import on_this_machine
    from reclaim.data.synthetic.job import SyntheticCellConfig, write_cell

    config = SyntheticCellConfig(
        machines=machines,
        days=days,
        seed=seed,
        tasks_per_machine=tasks_per_machine,
        common=common,
        service=service,
    )
    return write_cell(on_this_machine(out), config).out


def ingest(
    source: Path | str,
    dataset: Path | str,
    *,
    trace: str = "google-v3",
    mapping: Path | str | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Dataset:
    """Read a trace into a dataset, as ``reclaim ingest``; a dataset of the same inputs is left as it is.

    Warns of each sign that the trace was read in a wrong way, as in a wrong unit of time. ``Dataset.notes`` has all
    that the command prints.

    Parameters
    ----------
    source : Path or str
        Folder with the trace's files, or ``s3://bucket/folder``; a file of a series.
    dataset : Path or str
        Folder to write, or ``s3://bucket/folder``.
    trace : str
        ``google-v3``, ``google-v2.1``, ``alibaba-2017``, ``kubernetes``, ``recorded`` or ``series``.
    mapping : Path or str or None
        For ``series``: a mapping file; ``azure-csv`` or ``bitbrains-csv``, as these traces are published; ``azure``,
        ``bitbrains`` or ``google-2011-machines``, cuts in parquet.
    settings : mapping or None
        Other fields of ``data.ingest.job.IngestConfig`` by name, as ``{"buckets": 4}``.

    Examples
    --------
    >>> import reclaim
    >>> reclaim.ingest("cell", "dataset", settings={"buckets": 2}).path.name
    'dataset'
    """
    from reclaim.data.ingest.job import IngestConfig
    from reclaim.data.ingest.job import ingest as run

    given = {"trace": trace, **({} if mapping is None else {"mapping": str(mapping)}), **(settings or {})}
    made = run(folder_of(source), folder_of(dataset), config_from(IngestConfig, given)).dataset
    for warning in made.manifest.get("warnings", []):
        warnings.warn(f"{made.path}: {warning}", stacklevel=2)
    return Dataset(made)


class Dataset:
    """An ingested trace; a notebook shows its counts.

    Parameters
    ----------
    stored : data.dataset.Dataset
    """

    def __init__(self, stored: Stored) -> None:
        self._stored = stored

    def __repr__(self) -> str:
        return f"Dataset({self._stored.folder_name!r})"

    def _repr_html_(self) -> str:
        manifest = self._stored.manifest
        facts = {
            "nature": manifest["nature"], **manifest["counts"], "rejected lines": sum(manifest["rejects"].values()),
            "damaged files": len(manifest["damaged"]), "fingerprint": self._stored.fingerprint[:12],
        }  # fmt: skip
        return html_of_facts(f"Dataset {self._stored.folder_name}", facts, self.notes)

    @property
    def path(self) -> Path:
        """Its folder."""
        return self._stored.path

    @property
    def notes(self) -> list[str]:
        """Lines that a reader must know: findings about its trace, what was not read, or read twice."""
        from reclaim.data.ingest.manifest import notes_of

        return notes_of(self._stored.manifest, self._stored.manifest["notes"])

    def usage(self, columns: Sequence[str] | None = None, *, tasks: pd.DataFrame | None = None) -> pd.DataFrame:
        """Return usage, one row per task and window, by task, then time within each bucket.

        Parameters
        ----------
        columns : sequence of str or None
            Columns to read; None: all. ``docs/reference.md`` has their units.
        tasks : DataFrame or None
            Rows of ``tasks()`` whose usage is wanted; None: all.

        Raises
        ------
        SchemaError
            There is no such column, or the rows do not name tasks.

        Examples
        --------
        >>> import reclaim
        >>> dataset = reclaim.open("dataset")
        >>> one = dataset.tasks().head(1)
        >>> list(dataset.usage(["end_us", "cpu_mean", "cpu_limit"], tasks=one))
        ['end_us', 'cpu_mean', 'cpu_limit']
        """
        return self.table("usage", columns, tasks=tasks)

    def tasks(self, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """Return one row per task.

        Examples
        --------
        >>> import reclaim
        >>> tasks = reclaim.open("dataset").tasks(["collection_id", "instance_index", "tier"])
        >>> tasks.shape[1]
        3
        """
        return self.table("tasks", columns)

    def table(
        self, name: str, columns: Sequence[str] | None = None, *, tasks: pd.DataFrame | None = None
    ) -> pd.DataFrame:
        """Return any table of the dataset: ``events``, ``machines``, ``names`` …; arguments as for ``usage``.

        Raises
        ------
        SchemaError
            There is no such table or column.

        Examples
        --------
        >>> import reclaim
        >>> "cpu_capacity" in reclaim.open("dataset").table("machines")
        True
        """
        return frame_of(self._stored.read(name, _names_of(columns), _keys_of(tasks)))

    def histories(self, tasks: pd.DataFrame | None = None) -> pd.DataFrame:
        """Return the windows of tasks in the columns that ``Model.predict`` and the service take.

        Parameters
        ----------
        tasks : DataFrame or None
            Rows of ``tasks()``; None: all.

        Examples
        --------
        >>> import reclaim
        >>> dataset = reclaim.open("dataset")
        >>> histories = dataset.histories(dataset.tasks().head(2))
        >>> {"user", "logical_name", "cpu_limit", "memory_limit"} < set(histories)
        True
        """
        from reclaim.serving.predictions.histories import histories_of

        return frame_of(histories_of(self._stored, _keys_of(tasks)))

    @property
    def cell(self) -> Cell:
        """Largest machine and Monday of the cell; ConfigError without features, which record them."""
        from reclaim.features.feature_set import FeatureSet

        return FeatureSet.open(self.path).folding.cell

    def features(
        self,
        names: Sequence[str] | None = None,
        *,
        tasks: pd.DataFrame | None = None,
        period: str | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> pd.DataFrame:
        """Build the features unless they are there, as ``reclaim features``; return those that are asked for.

        Parameters
        ----------
        names : sequence of str or None
            Features, as ``cpu_max_2h``, and targets, as ``cpu_3600s`` and ``oom_3600s``; None: all features.
            ``docs/reference.md`` has their formulas.
        tasks : DataFrame or None
            Rows of ``tasks()``; None: all.
        period : str or None
            Only rows of one of ``train``, ``valid`` and ``test``.
        settings : mapping or None
            Fields of ``features.build.FeatureConfig``, as ``{"split.train_share": 0.6}``; None: features that are
            there stay as they are, new ones are built with the defaults.

        Returns
        -------
        DataFrame
            One row per usage row: the task, ``end_us``, ``period``, and the columns asked for.

        Raises
        ------
        ConfigError
            A setting or a period is unknown.
        SchemaError
            A feature is unknown.
        HistoryTooShortError
            The trace is too short for periods of training, validation and test.

        Examples
        --------
        >>> import reclaim
        >>> features = reclaim.open("dataset").features(["cpu_max_2h", "cpu_3600s"], period="test")
        >>> list(features)
        ['collection_id', 'instance_index', 'end_us', 'period', 'cpu_max_2h', 'cpu_3600s']
        """
        from reclaim.features.build import FeatureConfig, build_features, built_features
        from reclaim.features.table import feature_table

        features = None if settings is not None else built_features(self._stored)
        if features is None:
            features, _ = build_features(self._stored, config_from(FeatureConfig, settings or {}))
        return frame_of(feature_table(self._stored, features, _names_of(names), tasks=_keys_of(tasks), period=period))

    def replay(
        self,
        experiment: str,
        out: Path | str,
        *,
        models: Sequence[Learned] = (),
        settings: Mapping[str, Any] | None = None,
    ) -> Replay:
        """Replay estimators on the dataset, as ``reclaim replay``; results that are there are read, not made again.

        Parameters
        ----------
        experiment : str
            ``margins``, ``ratios``, ``compaction``, ``frontier`` or ``what-if``.
        out : Path or str
            Folder to write.
        models : sequence of Model
            Learned estimators; ``margins`` compares each with the first.
        settings : mapping or None
            Fields of the experiment's settings, as ``{"estimators": ["borg", "limit"]}``.

        Raises
        ------
        ConfigError
            The experiment or a setting is unknown, the features are missing, or ``out`` holds something else.

        Examples
        --------
        >>> import reclaim
        >>> dataset, model = reclaim.open("dataset"), reclaim.load("reclaim@champion")
        >>> replay = dataset.replay("ratios", "ratios", models=[model], settings={"estimators": ["borg", "limit"]})
        >>> sorted(replay.figures)
        ['ratios']
        """
        from reclaim.api.replay import Replay, run

        return run(Replay, experiment, self.path, out, models=models, settings=settings)

    def recommend(
        self, out: Path | str, *, models: Sequence[Learned] = (), settings: Mapping[str, Any] | None = None
    ) -> Recommendations:
        """Recommend a request for every workload, as ``reclaim recommend``; results that are there are read.

        Parameters
        ----------
        out : Path or str
            Folder to write.
        models : sequence of Model
            Learned estimators that take part.
        settings : mapping or None
            Fields of ``RecommendConfig``, as ``{"hold_days": 7}``; ``docs/reference.md`` has them.

        Raises
        ------
        ConfigError
            A setting is unknown, the features are missing, or ``out`` holds something else.
        HistoryTooShortError
            No window of the validation or of the test period can be judged.

        Examples
        --------
        >>> import reclaim
        >>> dataset = reclaim.open("dataset")
        >>> found = dataset.recommend("requests", settings={"estimators": ["max-so-far"], "hold_days": 0.1})
        >>> {"name", "cpu_request", "cpu_recommended", "cpu_violation"} < set(found.workloads)
        True
        """
        from reclaim.api.replay import Recommendations, run
        from reclaim.replay.runs.catalogue import RECOMMEND

        return run(Recommendations, RECOMMEND, self.path, out, models=models, settings=settings, tracking=False)


def _names_of(columns: Sequence[str] | None) -> list[str] | None:
    """Return names of columns, each once; a single string is one name, not a sequence of letters."""
    if columns is None:
        return None
    names = [columns] if isinstance(columns, str) or not isinstance(columns, Iterable) else list(columns)
    if wrong := [name for name in names if not isinstance(name, str)]:
        raise SchemaError(f"names of columns must be text, got {wrong[0]!r}")
    return list(dict.fromkeys(names))


def _keys_of(tasks: pd.DataFrame | None) -> pa.Table | None:
    """Return which tasks rows of ``Dataset.tasks`` are.

    Raises
    ------
    ConfigError
        It is no frame of pandas.
    SchemaError
        As for ``table_of``, or an id is missing, too large for a dataset or not an integer: a float may have been
        rounded to another task's id.
    """
    import pandas as pd

    if tasks is None:
        return None
    if not isinstance(tasks, pd.DataFrame):
        raise ConfigError(
            f"tasks must be a frame of pandas, rows of Dataset.tasks(), got an object of type {type(tasks).__name__}; "
            "`.to_pandas()` makes a frame of another table"
        )
    keys = table_of(tasks, TASK_KEY, "tasks")
    for name, column in zip(keys.column_names, keys.columns, strict=True):
        if not pa.types.is_integer(column.type) or column.null_count:
            came = f"{column.null_count} missing" if pa.types.is_integer(column.type) else str(column.type)
            raise SchemaError(f"tasks: {name} must be whole numbers, as of Dataset.tasks(), got {came}")
        if pa.types.is_uint64(column.type) and len(column) and (most := pc.max(column).as_py()) > _MOST_ID:
            raise SchemaError(f"tasks: {name} must be at most {_MOST_ID}, as of Dataset.tasks(), got {most}")
    return keys


def table_of(frame: pd.DataFrame, columns: Collection[str], what: str) -> pa.Table:
    """Return those of some columns that a frame has as a table.

    Raises
    ------
    SchemaError
        Columns have several levels, one is there twice, or one cannot be a column of Arrow.
    """
    if frame.columns.nlevels > 1:
        raise SchemaError(f"{what}: the columns have {frame.columns.nlevels} levels, expected one")
    known = frame.loc[:, frame.columns.isin(list(columns))]
    if known.columns.has_duplicates:
        twice = known.columns[known.columns.duplicated()]
        raise SchemaError(f"{what}: columns twice: {', '.join(twice.unique())}; each is needed once")
    try:
        return pa.Table.from_pandas(known, preserve_index=False)
    except (pa.ArrowException, TypeError) as error:  # the latter of a sparse column
        raise SchemaError(f"{what}: {'; '.join(map(str, error.args))}; a column has values of one type") from error


def folder_of(dataset: Dataset | Path | str) -> Path:
    """Return the folder of a dataset, or the place that a path names; ConfigError for anything else, as a frame."""
    from reclaim.data.core.stores.places import location

    if isinstance(dataset, Dataset):
        return dataset.path
    if not isinstance(dataset, str) and not hasattr(dataset, "joinpath"):  # a place in a store is no local path
        raise ConfigError(
            f"expected a dataset or the path of a folder, got an object of type {type(dataset).__name__}; a frame is "
            "written as CSV or parquet into a folder, and `reclaim.ingest(FOLDER, DATASET, trace='series', "
            "mapping=FILE)` makes a dataset of it"
        )
    return location(dataset)
