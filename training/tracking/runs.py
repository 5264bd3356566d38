"""Records runs and models with MLflow, which is imported here, in ``client`` and in ``aliases`` only, when needed."""

from __future__ import annotations

import json
import logging
import math
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from reclaim.data.core.files import folder_of_process
from reclaim.data.core.nested import flatten
from reclaim.data.errors import ConfigError, ModelAbsentError, ModelError
from reclaim.training.tracking.client import (
    artifact_folder,
    default_store,
    default_tracking_uri,
    missing,
    quiet,
    sqlite_file,
    store_client,
    store_reader,
    store_shown,
    without_credentials,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from mlflow import MlflowClient

log = logging.getLogger(__name__)

CHAMPION: Final = "champion"
"""Alias of the model version that is served."""
CANDIDATE: Final = "candidate"
"""Alias of the newest version, which is served once it is promoted."""

ABSENT: Final = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")
"""MLflow's codes for an unknown model, version, alias and run."""
FINISHED: Final = "FINISHED"
"""MLflow's status of a run that ended without an error; one of a killed process stays RUNNING."""
_MODEL: Final = "model"
_BUNDLE: Final = "bundle"
"""Name of the bundle's folder inside the logged model."""
PARENT: Final = "mlflow.parentRunId"
"""MLflow's tag of the run that a run is within."""
KEY_TAG: Final = "reclaim.key"
"""Tag of a training or a search: a hash of all that decides its result."""
_LOOKED_AT: Final = 20
"""Newest versions of a registered model that say of which kind it is: a single one may be registered by mistake."""
_DIGEST: Final = 36
"""Letters of a dataset's digest that MLflow keeps."""
_REQUIREMENTS: Final = ("numpy", "numba", "safetensors", "scikit-learn", "skops", "torch")


@dataclass(frozen=True)
class ModelVersion:
    """One registered version of a model, and the run that trained it; empty where the registry names none."""

    name: str
    version: str
    run_id: str


@dataclass(frozen=True)
class DatasetFacts:
    """A dataset that a run read: its name, its fingerprint, and where it lies."""

    name: str
    fingerprint: str
    source: str


@dataclass(frozen=True)
class RunRecord:
    """Record of one run, for comparison.

    Attributes
    ----------
    run_id, name, experiment, status : str
        Status as MLflow says it: FINISHED, RUNNING, FAILED, KILLED.
    started_ms : int
        Milliseconds since 1970.
    params : mapping of str to str
    metrics : mapping of str to float
        Last values.
    tags : mapping of str to str
        Without MLflow's own.
    """

    run_id: str
    name: str
    experiment: str
    status: str
    started_ms: int
    params: Mapping[str, str]
    metrics: Mapping[str, float]
    tags: Mapping[str, str]


def _experiment_id(client: MlflowClient, name: str) -> str:
    found = client.get_experiment_by_name(name)
    if found is not None:
        if found.lifecycle_stage == "deleted":
            client.restore_experiment(found.experiment_id)
        return str(found.experiment_id)
    # without a location, MLflow would scatter artifacts under the working folder
    return str(client.create_experiment(name, artifact_location=artifact_folder(default_tracking_uri())))


class Run:
    """A run in progress: everything that is recorded for it goes through here.

    Metrics carry the time of the run's start, so that the store keeps one of those that a run logs again after a kill.
    Of one with another value, such as seconds, the first is kept: MLflow logs no model for a run that has both.
    """

    def __init__(self, client: MlflowClient, run_id: str, started_ms: int, *, continued: bool = False) -> None:
        self._client = client
        self.run_id = run_id
        self._started_ms = started_ms
        self._continued = continued

    def log_params(self, params: Mapping[str, Any]) -> None:
        """Log a nested mapping of settings; inner names are joined with dots."""
        from mlflow.entities import Param

        flat = {k: v if isinstance(v, str) else json.dumps(v) for k, v in flatten(params).items()}
        self._client.log_batch(self.run_id, params=[Param(k, v) for k, v in flat.items()])

    def log_metrics(self, metrics: Mapping[str, Any], *, step: int = 0) -> None:
        """Log a nested mapping of numbers; inner names are joined with dots, values not finite left out."""
        self.log_history([metrics], first=step)

    def log_history(self, history: Sequence[Mapping[str, Any]], *, first: int = 0) -> None:
        """Log one mapping of numbers per step, all at once."""
        from mlflow.entities import Metric

        entries = [
            Metric(name, float(value), self._started_ms, step)
            for step, metrics in enumerate(history, first)
            for name, value in flatten(metrics).items()
            if isinstance(value, Real) and math.isfinite(value)  # numpy's, too
        ]
        if self._continued:
            logged = {name: self._steps_of(name) for name in {entry.key for entry in entries}}
            entries = [entry for entry in entries if entry.step not in logged[entry.key]]
        for start in range(0, len(entries), 1000):  # the store takes 1000 at a time
            self._client.log_batch(self.run_id, metrics=entries[start : start + 1000])

    def _steps_of(self, metric: str) -> set[int]:
        """Return the steps of a metric that the store has of this run."""
        return {point.step for point in self._client.get_metric_history(self.run_id, metric)}

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Set tags."""
        from mlflow.entities import RunTag

        self._client.log_batch(self.run_id, tags=[RunTag(k, v) for k, v in tags.items()])

    def log_datasets(self, datasets: Sequence[DatasetFacts], *, context: str) -> None:
        """Log datasets as inputs of the run; ``context`` says what for, as ``training`` or ``evaluation``."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        self._client.log_inputs(
            self.run_id,
            [
                DatasetInput(
                    Dataset(one.name, one.fingerprint[:_DIGEST], "local", json.dumps({"uri": one.source})),
                    [InputTag("mlflow.data.context", context)],
                )
                for one in datasets
            ],
        )

    def log_dict(self, value: Mapping[str, Any], file: str) -> None:
        """Keep a mapping as a JSON file; every number in it must be finite."""
        self._client.log_text(self.run_id, json.dumps(value, indent=2, allow_nan=False), file)

    def log_text(self, text: str, file: str) -> None:
        """Keep a text file."""
        self._client.log_text(self.run_id, text, file)

    def log_figure(self, figure: Figure, file: str) -> None:
        """Keep a figure."""
        self._client.log_figure(self.run_id, figure, file)

    def log_artifact(self, path: Path) -> None:
        """Keep a file, or a folder with its content."""
        if path.is_dir():
            self._client.log_artifacts(self.run_id, str(path), path.name)
        else:
            self._client.log_artifact(self.run_id, str(path))


@contextmanager
def start_run(
    experiment: str, name: str, *, tags: Mapping[str, str] | None = None, run_id: str | None = None
) -> Iterator[Run]:
    """Open a run; it ends FINISHED, or FAILED when an exception passes.

    A run of the caller's own stays active: this one is nested in it, where both are in one store and ``tags`` name no
    other run.

    Parameters
    ----------
    experiment : str
        Made when it does not exist.
    name : str
        ``<estimator>/<margin>`` by custom.
    tags : mapping or None
    run_id : str or None
        An interrupted run to continue.

    Raises
    ------
    ModelError
        The store cannot be used, or no longer.
    """
    client = store_client()
    import mlflow

    with _store_named("does not record the run"):
        experiment_id = _experiment_id(client, experiment)
        outer, uri = mlflow.active_run(), default_tracking_uri()
        elsewhere = outer is not None and mlflow.get_tracking_uri() != uri
        with (
            default_store(uri),
            mlflow.start_run(
                run_id=run_id, experiment_id=experiment_id, run_name=None if run_id else name, tags=dict(tags or {}),
                nested=outer is not None,
            ) as active,
        ):  # fmt: skip
            if outer is not None and not run_id:
                if tags is not None and PARENT in tags:  # MLflow has put the active run in its place
                    client.set_tag(active.info.run_id, PARENT, tags[PARENT])
                elif elsewhere:
                    client.delete_tag(active.info.run_id, PARENT)
            yield Run(client, active.info.run_id, active.info.start_time, continued=run_id is not None)


@contextmanager
def _store_named(fails: str) -> Iterator[None]:
    """Raise ModelError, with the store and what it fails to do, in place of MLflow's own errors."""
    from mlflow.exceptions import MlflowException

    try:
        yield
    except MlflowException as error:
        reason = str(error).strip().partition("\n")[0]
        raise ModelError(f"{store_shown()} {fails} ({without_credentials(reason)}); run it again") from error


def register_bundle(
    run: Run, folder: Path, name: str, *, inputs: Sequence[str], outputs: Sequence[str]
) -> ModelVersion:
    """Log a bundle as a model of the active run, and register it.

    Called again for a run that was killed, it goes on with the version, or the logged model, that is there.

    Parameters
    ----------
    run : Run
        The active one.
    folder : Path
        What ``bundle.save_bundle`` wrote; its last part must be ``bundle``.
    name : str
        Registered model.
    inputs, outputs : sequence of str
        Columns of the signature: float32 features in, float64 numbers out.
    """
    assert folder.name == _BUNDLE, folder
    client = run._client
    mine = [v for v in client.search_model_versions(f"run_id='{run.run_id}'") if v.name == name]
    if mine:
        newest = max(mine, key=lambda v: int(v.version))
    else:
        uri, model_id = _logged_model(run) or _log_model(folder, inputs, outputs)
        if not client.search_registered_models(f"name='{name}'"):
            client.create_registered_model(name)
        newest = client.create_model_version(name, source=uri, run_id=run.run_id, model_id=model_id)
    return ModelVersion(name, str(newest.version), run.run_id)


def move_alias(version: ModelVersion, alias: str) -> None:
    """Point an alias to a version from now on; ModelError where the store cannot be written."""
    client = store_client()
    with _store_named(f"does not make {version.name}/{version.version} the {alias}"):
        client.set_registered_model_alias(version.name, alias, version.version)


def describe_version(version: ModelVersion, text: str) -> None:
    """Set what the registry says of a version, as Markdown."""
    client = store_client()
    with _store_named(f"does not describe {version.name}/{version.version}"):
        client.update_model_version(version.name, version.version, description=text)


def _logged_model(run: Run) -> tuple[str, str] | None:
    """Return URI and id of the whole model that a run has logged; those that it was killed in are deleted."""
    client, whole = run._client, None
    experiment = client.get_run(run.run_id).info.experiment_id
    for model in client.search_logged_models([experiment], f"source_run_id='{run.run_id}'"):
        if model.status == "READY":
            whole = model.model_uri, model.model_id
        else:
            client.delete_logged_model(model.model_id)
    return whole


def _log_model(folder: Path, inputs: Sequence[str], outputs: Sequence[str]) -> tuple[str, str]:
    """Log a bundle as a model of the active run; return its URI and id."""
    with quiet():
        import mlflow.pyfunc
        from mlflow.models import ModelSignature
        from mlflow.types import ColSpec, Schema

        signature = ModelSignature(
            inputs=Schema([ColSpec("float", c) for c in inputs]),
            outputs=Schema([ColSpec("double", c) for c in outputs]),
        )
        logged = mlflow.pyfunc.log_model(
            name=_MODEL,
            loader_module="reclaim.training.bundle",
            data_path=str(folder),
            signature=signature,
            pip_requirements=[f"{p}=={version(p)}" for p in _REQUIREMENTS],
        )
    return str(logged.model_uri), str(logged.model_id)


def resolve_model(reference: str) -> ModelVersion:
    """Return which version ``name@alias`` or ``name/version`` means now.

    Raises
    ------
    ModelAbsentError
        There is no such model, alias or version.
    ModelError
        The store cannot be used or does not answer.
    """
    from mlflow.exceptions import MlflowException

    client = store_reader(f"model {reference}")
    with _store_named(f"does not find model {reference}"):
        try:
            return version_of(client, reference)
        except MlflowException as error:
            if error.error_code not in ABSENT:
                raise
            latest = _latest_in_place_of(client, reference)
            remedy = (
                "train one with `reclaim train`"
                if latest is None
                else f"`reclaim promote DATASET --model {latest}` serves the latest that was trained if it is not "
                f"worse, `--model {latest}` takes it as it is"
            )
            raise ModelAbsentError(
                f"no model {reference} in {store_shown()} ({without_credentials(error.message)}); {remedy}"
            ) from error


def _latest_in_place_of(client: MlflowClient, reference: str) -> str | None:
    """Return ``name/version`` of the latest model where an alias of ``reclaim`` is missing; None without a model.

    It is the candidate, or the newest version where that is missing, too, as after it was deleted by hand.
    """
    from mlflow.exceptions import MlflowException

    name, _, alias = reference.partition("@")
    if alias not in (CHAMPION, CANDIDATE):
        return None
    try:
        return f"{name}/{version_of(client, f'{name}@{CANDIDATE}').version}"
    except MlflowException:
        newest = _newest(client, name, 1)
        return f"{name}/{newest[0].version}" if newest else None


def _newest(client: MlflowClient, name: str, count: int) -> list[ModelVersion]:
    """Return the newest versions of a registered model, the newest first."""
    page = client.search_model_versions(f"name='{name}'", max_results=count, order_by=["version_number DESC"])
    return [ModelVersion(name, str(of.version), of.run_id or "") for of in page]


def check_name(name: str) -> None:
    """Raise ConfigError where a registered model is of another kind: no run of its newest versions is of ``reclaim``.

    A version whose run is unknown, as of a copy from another store, may be one of ``reclaim``.
    """
    if missing(default_tracking_uri()):
        return
    client = store_client()
    with _store_named(f"does not find the versions of {name}"):
        newest = _newest(client, name, _LOOKED_AT)
        other_kind = bool(newest) and not any(_may_be_ours(client, of) for of in newest)
    if other_kind:
        raise ConfigError(
            f"the registered model {name} in {store_shown()} is of another kind: no `reclaim train` made "
            f"{name}/{newest[0].version}; choose another name, --set model_name=NAME"
        )


def _may_be_ours(client: MlflowClient, of: ModelVersion) -> bool:
    """Return whether ``reclaim`` made the run of a version, as far as the store knows it."""
    from mlflow.exceptions import MlflowException

    try:
        return not of.run_id or KEY_TAG in client.get_run(of.run_id).data.tags
    except MlflowException as error:
        if error.error_code not in ABSENT:
            raise
        return True


def find_version(reference: str) -> ModelVersion | None:
    """Return which version ``name@alias`` or ``name/version`` means now; None where there is none."""
    try:
        return resolve_model(reference)
    except ModelAbsentError:
        return None


def version_of(client: MlflowClient, reference: str) -> ModelVersion:
    """Return the version of a reference, asked of a client; MLflow's own errors, and ModelError."""
    name, at, alias = reference.partition("@")
    if at:
        found = client.get_model_version_by_alias(name, alias)
    else:
        name, slash, number = reference.partition("/")
        if not slash:
            raise ModelError(f"expected a model as NAME@ALIAS or NAME/VERSION, got {reference!r}")
        found = client.get_model_version(name, number)
    return ModelVersion(found.name, str(found.version), found.run_id or "")


def fetch_bundle(reference: str, into: Path | None = None) -> tuple[Path, str]:
    """Return a local folder with the bundle of ``name@alias`` or ``name/version``, and the version's number.

    Parameters
    ----------
    reference : str
    into : Path or None
        Folder to copy the model into; None: where it lies next to a SQLite store, else a folder that is removed when
        this process ends.

    Raises
    ------
    ModelError
        There is no such model, or its files are gone.
    """
    found = resolve_model(reference)
    with quiet():
        import mlflow.artifacts
        from mlflow.exceptions import MlflowException

    if into is None and sqlite_file(default_tracking_uri()) is None:  # MLflow keeps what it downloads
        into = Path(tempfile.mkdtemp(dir=folder_of_process("reclaim-models-")))
    try:
        with quiet(), default_store(default_tracking_uri()):  # it is searched for the model's name in any case
            uri = f"models:/{found.name}/{found.version}"
            folder = Path(mlflow.artifacts.download_artifacts(uri, dst_path=None if into is None else str(into)))
        if not any(folder.iterdir()):  # MLflow silently copies a folder that is gone
            raise FileNotFoundError(f"{uri} is empty")
    except (MlflowException, OSError) as error:
        raise ModelError(
            f"{reference} is version {found.version}, whose files cannot be read ({error}); train again"
        ) from error
    return folder / "data" / _BUNDLE, found.version


def find_runs(experiment: str, *, tags: Mapping[str, str] | None = None) -> list[RunRecord]:
    """Return the runs of an experiment that carry all of the tags, newest first; none where it does not exist."""
    if missing(default_tracking_uri()):
        return []
    client = store_client()
    condition = " and ".join(f"tags.`{k}` = '{v}'" for k, v in (tags or {}).items())
    records: list[RunRecord] = []
    token: str | None = None
    with _store_named("does not list its runs"):
        found = client.get_experiment_by_name(experiment)
        while found is not None:
            page = client.search_runs(
                [found.experiment_id],
                condition,
                max_results=1000,
                order_by=["attributes.start_time DESC"],
                page_token=token,
            )
            records += [_record(run, experiment) for run in page]
            token = page.token
            if not token:
                break
    return records


def find_run(run_id: str) -> RunRecord:
    """Return one run; ModelError where it does not exist."""
    from mlflow.exceptions import MlflowException

    client = store_reader(f"run {run_id}")
    with _store_named(f"does not find run {run_id}"):
        try:
            run = client.get_run(run_id)
            experiment = client.get_experiment(run.info.experiment_id).name
        except MlflowException as error:
            if error.error_code not in ABSENT:
                raise
            raise ModelError(
                f"no run {run_id} in {store_shown()}; `reclaim mlflow` shows those there are, with their ids"
            ) from error
    return _record(run, experiment)


def load_dict(run_id: str, file: str) -> dict[str, Any]:
    """Return what ``Run.log_dict`` kept; ModelError where it is gone."""
    client = store_reader(f"run {run_id}")
    import mlflow.artifacts
    from mlflow.exceptions import MlflowException

    try:
        with tempfile.TemporaryDirectory() as folder:
            kept = mlflow.artifacts.download_artifacts(
                run_id=run_id, artifact_path=file, dst_path=folder, tracking_uri=client.tracking_uri
            )
            value: dict[str, Any] = json.loads(Path(kept).read_text(encoding="utf-8"))
    except (MlflowException, OSError) as error:
        raise ModelError(f"run {run_id} has no {file}; `reclaim train --force` trains again: {error}") from error
    return value


@contextmanager
def find_file(run_id: str, file: str) -> Iterator[Path | None]:
    """Yield a local copy of what ``Run.log_artifact`` kept, deleted at the end; None where the run has no such file."""
    client = store_reader(f"run {run_id}")
    import mlflow.artifacts
    from mlflow.exceptions import MlflowException

    with tempfile.TemporaryDirectory(prefix=f"run-{run_id}-") as folder:  # an error of what reads the copy names it
        found: Path | None = None
        try:
            if file in {kept.path for kept in client.list_artifacts(run_id)}:
                with quiet():
                    kept = mlflow.artifacts.download_artifacts(
                        run_id=run_id, artifact_path=file, dst_path=folder, tracking_uri=client.tracking_uri
                    )
                    found = Path(kept)
        except (MlflowException, OSError) as error:
            raise ModelError(f"run {run_id}: {file} cannot be read ({error})") from error
        yield found


def git_commit(file: Path = Path(__file__)) -> str | None:
    """Return the commit of the code that runs, with ``+`` where files differ from it; None outside its repository.

    An installed package does not belong to a repository that it may lie in, nor to that of the working folder.
    """

    def git(*words: str) -> str:
        command = ["git", "-C", str(file.resolve().parent), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", file.name)
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _record(run: Any, experiment: str) -> RunRecord:
    return RunRecord(
        run_id=run.info.run_id,
        name=run.info.run_name or "",
        experiment=experiment,
        status=run.info.status,
        started_ms=int(run.info.start_time or 0),
        params=dict(run.data.params),
        metrics=dict(run.data.metrics),
        tags={k: v for k, v in run.data.tags.items() if not k.startswith("mlflow.")},
    )
