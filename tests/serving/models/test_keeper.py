"""The keeper follows the registry: promotion, rollback, refusals, a shadow, and a registry that is gone."""

from __future__ import annotations

import json
import logging
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from reclaim.data.errors import ModelError, StoreError
from reclaim.serving.models.cache import Refusal
from reclaim.serving.models.keeper import _FETCH_AGAIN_S, ModelKeeper
from reclaim.serving.models.loader import LoadedModel
from reclaim.serving.settings import ServingSettings
from reclaim.training.bundle import BUNDLE_FILE, Bundle, save_bundle
from reclaim.training.tracking.aliases import RegistryReader, give_up_soon
from reclaim.training.tracking.client import store_client
from reclaim.training.tracking.runs import fetch_bundle
from tests.serving.patience import soon

pytestmark = pytest.mark.slow  # MLflow is imported, and a store made: four seconds before the first test


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file of a new registry, which the tests of this module share: making one takes seconds."""
    path = tmp_path_factory.mktemp("registry") / "mlflow.db"
    with pytest.MonkeyPatch.context() as patch:
        _point_at(f"sqlite:///{path}", patch)
        store_client()
    return path


def _point_at(uri: str, patch: pytest.MonkeyPatch) -> None:
    """Let MLflow use a store; what it sets in the environment itself is gone after the test."""
    patch.setenv("MLFLOW_TRACKING_URI", uri)
    patch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    patch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    patch.setenv("MLFLOW_SQLALCHEMYSTORE_POOLCLASS", "NullPool")


@dataclass
class Registry:
    """A registered model of a name of its own, and the service's two callbacks, which note what they are told."""

    bundle: Bundle
    folder: Path
    state: Path
    database: Path
    name: str = field(default_factory=lambda: f"cell-{uuid4().hex[:8]}")
    promoted: list[str] = field(default_factory=list)
    shadows: list[str | None] = field(default_factory=list)
    refusals: int = 0
    refuse: Callable[[LoadedModel], None] = lambda _: None

    def register(self, run_id: str | None = None, **changes: Any) -> str:
        """Register the bundle with some of its parts replaced; return the version's number."""
        client = store_client()
        source = self.folder / f"{self.name}-{uuid4().hex[:8]}"
        save_bundle(replace(self.bundle, **changes), source / "data" / "bundle")
        if not client.search_registered_models(f"name='{self.name}'"):
            client.create_registered_model(self.name)
        return str(client.create_model_version(self.name, source=source.as_uri(), run_id=run_id).version)

    def files(self, version: str) -> Path:
        """Return the folder that a version's bundle was registered in."""
        source = store_client().get_model_version(self.name, version).source
        return Path(str(source).removeprefix("file://")) / "data" / "bundle"

    def point(self, alias: str, version: str | None) -> None:
        """Move an alias; None removes it."""
        if version is None:
            store_client().delete_registered_model_alias(self.name, alias)
        else:
            store_client().set_registered_model_alias(self.name, alias, version)

    def keeper(self, *, shadow: str = "", **settings: Any) -> ModelKeeper:
        """Return the keeper of a service that serves the champion, started."""

        def promote(model: LoadedModel) -> None:
            self.refuse(model)
            self.promoted.append(model.version)

        def refused() -> None:
            self.refusals += 1

        values = {"model": f"{self.name}@champion", "state": self.state, "shadow": shadow and f"{self.name}@{shadow}"}
        keeper = ModelKeeper(
            ServingSettings(**{**values, **settings}),
            promote=promote,
            shadow=lambda model: self.shadows.append(None if model is None else model.version),
            refused=refused,
        )
        keeper.load()
        return keeper

    def serving(self, versions: int, **settings: Any) -> ModelKeeper:
        """Register a number of versions; return the keeper of a service that serves the first."""
        for _ in range(versions):
            self.register()
        self.point("champion", "1")
        return self.keeper(**settings)

    @contextmanager
    def down(self) -> Iterator[None]:
        """Take the registry's file away."""
        away = self.database.with_suffix(".away")
        self.database.rename(away)
        yield
        away.rename(self.database)


@pytest.fixture
def registry(bundle: Bundle, tmp_path: Path, database: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    _point_at(f"sqlite:///{database}", monkeypatch)
    return Registry(bundle, tmp_path / "artifacts", tmp_path / "state", database)


def _kept(registry: Registry) -> list[str]:
    return sorted(path.name.removeprefix(f"{registry.name}-") for path in (registry.state / "models").glob("*-*"))


def _refused(keeper: ModelKeeper) -> Refusal:
    refused = keeper.status().refused
    assert refused is not None
    return refused


def test_moving_the_alias_promotes_and_moving_it_back_rolls_back(
    registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for fingerprint in ("first", "second", "third"):
        registry.register(dataset_fingerprint=fingerprint)
    registry.point("champion", "1")
    began = time.time()
    keeper = registry.keeper()
    first = keeper.served
    assert (first.version, keeper.status().registry) == ("1", "not asked")
    keeper.check()
    assert keeper.served is first
    assert registry.promoted == []
    status = keeper.status()
    assert (status.reference, status.name, status.version) == (f"{registry.name}@champion", registry.name, "1")
    assert (status.registry, status.from_disk, status.refused) == ("reachable", False, None)
    assert began <= status.loaded_at <= time.time()

    registry.point("champion", "2")
    keeper.check()
    assert keeper.served.bundle.dataset_fingerprint == "second"
    assert keeper.served.source == f"{registry.name}@champion"
    assert _kept(registry) == ["1", "2"]
    registry.point("champion", "3")
    keeper.check()
    assert _kept(registry) == ["2", "3"]
    shutil.rmtree(registry.files("2"))  # rolled back from the copy: the registry's files are not needed
    registry.point("champion", "2")
    keeper.check()
    assert keeper.served.bundle.dataset_fingerprint == "second"
    assert registry.promoted == ["2", "3", "2"]
    assert f"serving {registry.name} version 3" in caplog.text
    json.dumps(asdict(keeper.status()), allow_nan=False)


def test_without_a_state_folder_nothing_is_kept(registry: Registry) -> None:
    keeper = registry.serving(2, state=None)
    registry.point("champion", "2")
    keeper.check()
    assert keeper.served.version == "2"
    assert not registry.state.exists()


def test_a_model_of_another_pipeline_is_refused_once_and_the_old_one_stays(
    registry: Registry, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.register()
    registry.register(pipeline_version="another")
    keeper = registry.serving(1)
    registry.point("champion", "2")
    tried = []

    def fetch(reference: str, into: Path) -> tuple[Path, str]:
        tried.append(reference)
        return fetch_bundle(reference, into)

    monkeypatch.setattr("reclaim.serving.models.keeper.fetch_bundle", fetch)
    for _ in range(3):
        keeper.check()
    assert tried == [f"{registry.name}/2"]
    status = keeper.status()
    assert (status.version, status.registry) == ("1", "reachable")
    assert status.refused is not None
    assert status.refused.version == "2"
    assert status.refused.why.startswith(f"{registry.name} version 2: the model was made by feature pipeline another")
    assert caplog.text.count("version 2, is not taken") == 1
    assert registry.refusals == 1
    assert _kept(registry) == ["1"]
    json.dumps(asdict(status), allow_nan=False)
    registry.point("champion", "3")
    keeper.check()
    assert (keeper.served.version, keeper.status().refused) == ("3", None)
    registry.point("champion", "2")
    keeper.check()
    registry.point("champion", "3")
    keeper.check()
    assert (keeper.served.version, keeper.status().refused) == ("3", None)
    assert registry.promoted == ["3"]


@pytest.mark.parametrize(
    ("file", "content", "why"),
    [
        ("*.safetensors", b"", "the files of the model are damaged"),
        ("*.safetensors", b"\xff" * 64, "the files of the model are damaged"),
        (BUNDLE_FILE, b"{", "damaged"),
        (BUNDLE_FILE, b'{"format": 99}', "expected format"),
    ],
)
def test_damaged_files_are_refused(registry: Registry, file: str, content: bytes, why: str) -> None:
    keeper = registry.serving(2)
    (damaged,) = registry.files("2").glob(file)
    damaged.write_bytes(content)
    registry.point("champion", "2")
    keeper.check()
    refused = _refused(keeper)
    assert (refused.version, keeper.served.version) == ("2", "1")
    assert why in refused.why


def test_a_check_that_fails_in_a_way_no_code_expects_is_not_the_last(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keeper = registry.serving(2)
    monkeypatch.setattr("reclaim.serving.models.cache.check_answers", lambda _: 1 / 0)
    registry.point("champion", "2")
    keeper.check()
    assert (_refused(keeper).version, keeper.served.version) == ("2", "1")
    assert "fails on the canary batch (ZeroDivisionError" in _refused(keeper).why
    checks = iter([KeyError("unforeseen"), None])

    def check() -> None:
        if (fault := next(checks)) is not None:
            raise fault
        keeper._closed.set()

    monkeypatch.setattr(keeper, "check", check)
    monkeypatch.setattr(keeper._closed, "wait", lambda _: keeper._closed.is_set())
    keeper._watch()
    assert next(checks, "none left") == "none left"
    assert "could not be followed" in caplog.text
    assert keeper._registry == "unreachable: the last check failed; see the log"


def test_a_model_that_answers_nonsense_is_refused_by_the_name_of_the_check(registry: Registry) -> None:
    from safetensors import safe_open
    from safetensors.numpy import save_file

    keeper = registry.serving(2)
    (file,) = registry.files("2").glob("*.safetensors")
    with safe_open(file, framework="numpy") as opened:
        facts, tensors = opened.metadata(), {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
    tensors["head.bias"][0] = float("nan")
    save_file(tensors, file, facts)
    registry.point("champion", "2")
    keeper.check()
    refused = _refused(keeper)
    assert refused.version == "2"
    assert refused.why.startswith("the canary batch: expected probabilities of a demand between 0 and 1, got ")
    assert (keeper.served.version, registry.promoted) == ("1", [])


def test_a_model_that_the_service_rejects_is_refused(registry: Registry) -> None:
    keeper = registry.serving(2)

    def full(_: LoadedModel) -> None:
        raise StoreError("no room")

    registry.refuse = full
    registry.point("champion", "2")
    keeper.check()
    registry.refuse = lambda _: None
    keeper.check()
    assert keeper.status().refused == Refusal("2", "no room")
    assert (keeper.served.version, _kept(registry)) == ("1", ["1"])


def test_a_version_of_a_registry_that_was_made_anew_is_another_than_the_refused_one_of_its_number(
    registry: Registry,
) -> None:
    keeper = registry.serving(2)

    def full(_: LoadedModel) -> None:
        raise StoreError("no room")

    registry.refuse = full
    registry.point("champion", "2")
    keeper.check()
    assert _refused(keeper).version == "2"
    registry.refuse = lambda _: None
    store_client().delete_registered_model(registry.name)
    assert [registry.register("b" * 32, dataset_fingerprint=name) for name in ("again", "better")] == ["1", "2"]
    registry.point("champion", "2")
    keeper.check()
    assert (keeper.served.version, keeper.status().refused) == ("2", None)


def test_a_removed_alias_leaves_the_model_current_and_is_no_model_that_was_refused(registry: Registry) -> None:
    keeper = registry.serving(1)
    registry.point("champion", None)
    keeper.check()
    assert registry.refusals == 0
    assert keeper.status().refused == Refusal(None, f"the registry has no {registry.name}@champion")
    assert keeper.status().registry == "reachable"
    store_client().delete_registered_model(registry.name)
    keeper.check()
    assert keeper.served.version == "1"


def test_a_version_whose_files_are_gone_is_refused_and_asked_for_again_later(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = registry.serving(2)
    files = registry.files("2").parents[1]
    files.rename(files.with_name("away"))
    registry.point("champion", "2")
    keeper.check()
    refused = _refused(keeper)
    assert refused.version == "2"
    assert "whose files cannot be read" in refused.why
    files.with_name("away").rename(files)
    keeper.check()
    assert keeper.served.version == "1"
    later = time.monotonic() + _FETCH_AGAIN_S
    monkeypatch.setattr(time, "monotonic", lambda: later)
    keeper.check()
    assert (keeper.served.version, keeper.status().refused) == ("2", None)


def test_a_machine_without_room_for_a_models_files_is_no_end_of_following(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = registry.register()
    registry.point("champion", first)
    keeper = registry.keeper()
    keeper.check()
    second = registry.register()
    registry.point("champion", second)
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(registry.folder / "gone"))
        keeper.check()
    refused = _refused(keeper)
    assert refused.version == second
    assert "No such file" in refused.why
    assert registry.promoted == []
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + _FETCH_AGAIN_S)
    keeper.check()
    assert registry.promoted == [second]


def test_an_unreachable_registry_leaves_the_model_current_and_is_reported_with_its_time(
    registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    keeper = registry.serving(2)
    keeper.check()
    with registry.down():
        keeper.check()
        said = keeper.status().registry
        assert said.startswith("unreachable: sqlite:///")
        assert "(since 20" in said
        keeper.check()
        assert keeper.status().registry == said
        assert keeper.served.version == "1"
        assert not registry.database.exists()
    registry.point("champion", "2")
    keeper.check()
    assert (keeper.served.version, keeper.status().registry) == ("2", "reachable")
    assert caplog.text.count("registry is unreachable") == 1
    assert caplog.text.count("reachable again") == 1


def test_a_service_is_not_told_of_each_attempt_to_reach_a_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = logging.getLogger("urllib3.connectionpool")
    monkeypatch.setattr(attempts, "level", logging.NOTSET)
    give_up_soon()
    assert not attempts.isEnabledFor(logging.WARNING)
    assert attempts.isEnabledFor(logging.ERROR)


def test_a_registry_that_was_replaced_is_read_anew_and_a_damaged_one_is_unreachable(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.register()
    registry.point("champion", "1")
    reader, reference = RegistryReader(), f"{registry.name}@champion"
    _point_at(f"sqlite:///{tmp_path}/own.db", monkeypatch)
    monkeypatch.delenv("MLFLOW_SQLALCHEMYSTORE_POOLCLASS")  # the reader sees to it itself
    with pytest.raises(ModelError, match=r"own\.db does not exist"):
        reader.find(reference)
    shutil.copyfile(registry.database, tmp_path / "own.db")
    found = reader.find(reference)
    assert found is not None
    assert found.version == "1"
    with monkeypatch.context() as patch:
        _point_at(f"sqlite:///{registry.database}", patch)
        registry.point("champion", registry.register())
    shutil.copyfile(registry.database, tmp_path / "new.db")
    (tmp_path / "new.db").rename(tmp_path / "own.db")  # the one that was open is gone
    found = reader.find(reference)
    assert found is not None
    assert found.version == "2"
    (tmp_path / "own.db").write_bytes(b"no database at all" * 100)
    with pytest.raises(ModelError, match=r"own\.db does not answer"):
        reader.find(reference)


def test_a_start_without_the_registry_takes_the_last_model_and_reports_it(registry: Registry) -> None:
    registry.register()
    registry.register()
    registry.point("champion", "1")
    registry.keeper()
    registry.point("champion", "2")
    with registry.down():
        keeper = registry.keeper()
        status = keeper.status()
        assert (status.version, status.from_disk) == ("1", True)
        assert status.refused is not None
        assert status.refused.why == f"the registry has no {registry.name}@champion"
        keeper.check()
        assert keeper.status().registry.startswith("unreachable")
        with pytest.raises(ModelError, match="where no model is named, the built-in one serves until then"):
            registry.keeper(state=registry.state / "another")
    keeper.check()
    status = keeper.status()
    assert (status.version, status.from_disk, status.refused) == ("2", False, None)
    keeper = registry.keeper()
    keeper.check()
    registry.point("champion", "1")
    with registry.down():
        again = registry.keeper()
    assert again.status().version == "2"
    assert again.status().from_disk


@pytest.mark.usefixtures("registry")
def test_a_first_start_without_the_registry_says_that_the_built_in_model_serves_and_why(
    free_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ServingSettings(state=tmp_path / "first")  # names no model
    keeper = ModelKeeper(settings, promote=lambda _: None, shadow=lambda _: None)
    with monkeypatch.context() as patch:
        _point_at(f"http://127.0.0.1:{free_port}", patch)
        assert keeper.load().name == "builtin"
        assert "cannot be used" in (keeper.status().fallback or "")
        keeper.check()
        assert (keeper.status().fallback or "").startswith("unreachable: ")
    keeper.check()
    status = keeper.status()
    assert (status.registry, status.fallback) == ("reachable", "the registry has no reclaim@champion")
    named = ModelKeeper(ServingSettings(model="builtin"), promote=lambda _: None, shadow=lambda _: None)
    assert (named.load().name, named.status().fallback) == ("builtin", None)


@pytest.mark.usefixtures("registry")
def test_that_there_is_no_champion_yet_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keeper = ModelKeeper(ServingSettings(state=tmp_path / "first"), promote=lambda _: None, shadow=lambda _: None)
    keeper.load()
    keeper.check()
    keeper.check()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "the built-in model serves until there is one" in caplog.text


@pytest.mark.usefixtures("registry")
def test_that_there_is_no_champion_is_logged_where_the_registry_could_not_be_asked_at_the_start(
    free_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keeper = ModelKeeper(ServingSettings(state=tmp_path / "first"), promote=lambda _: None, shadow=lambda _: None)
    with monkeypatch.context() as patch:
        _point_at(f"http://127.0.0.1:{free_port}", patch)
        keeper.load()
    keeper.check()
    keeper.check()
    assert caplog.text.count("the registry has no reclaim@champion") == 1


def test_the_model_of_a_launch_needs_no_registry_and_is_confirmed_by_it(registry: Registry) -> None:
    registry.register()
    registry.point("champion", "1")
    files = registry.files("1")
    with registry.down():
        keeper = registry.keeper(bundle=files, model_version="1")
        assert (keeper.served.version, keeper.status().from_disk) == ("1", False)
    keeper.check()
    assert registry.promoted == []
    registry.point("champion", registry.register())
    shutil.rmtree(files)
    keeper.check()
    registry.point("champion", "1")
    keeper.check()
    assert registry.promoted == ["2", "1"]


def test_the_shadow_follows_its_own_alias_and_never_touches_the_served_one(
    registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    registry.register()
    registry.register()
    registry.register(pipeline_version="another")
    registry.point("champion", "1")
    keeper = registry.keeper(shadow="candidate")
    served = keeper.served
    keeper.check()
    assert keeper.status().shadow_name is None
    assert keeper.status().shadow_problem == f"the registry has no {registry.name}@candidate"
    assert caplog.messages[-1].endswith("none is there")
    registry.point("candidate", "2")
    keeper.check()
    status = keeper.status()
    assert (status.shadow_name, status.shadow_version, status.shadow_problem) == (registry.name, "2", None)
    assert status.shadow_loaded_at is not None
    assert abs(status.shadow_loaded_at - time.time()) < 3_600
    registry.point("candidate", "3")
    keeper.check()
    status = keeper.status()
    assert status.shadow_version == "2"
    assert "feature pipeline another" in str(status.shadow_problem)
    assert registry.refusals == 0  # the alert of a refused promotion is for the served model
    assert status.refused is None
    registry.point("candidate", "1")
    keeper.check()
    with registry.down():
        keeper.check()
        assert keeper.status().shadow_version == "1"
    registry.point("candidate", None)
    keeper.check()
    assert keeper.status().shadow_name is None
    assert registry.shadows == ["2", "1", None]
    assert keeper.served is served
    assert (registry.promoted, _kept(registry)) == ([], ["1"])


def test_fixed_models_are_not_watched_and_a_folder_needs_no_registry(
    registry: Registry, bundle_folder: Path, tmp_path: Path
) -> None:
    keeper = registry.serving(1, model=f"{registry.name}/1")
    registry.point("champion", registry.register())
    keeper.check()
    assert (keeper.served.version, keeper.status().registry) == ("1", "not asked")
    keeper.watch()
    assert keeper._watcher is None
    with registry.down():
        keeper = registry.keeper(model=str(bundle_folder), shadow="")
        keeper.check()
        assert keeper.status().registry == "not asked"
        assert keeper.served.name == "bundle"
    shadow = ModelKeeper(
        ServingSettings(model=str(bundle_folder), shadow=str(bundle_folder)),
        promote=lambda _: None,
        shadow=lambda model: registry.shadows.append(None if model is None else model.name),
    )
    shadow.load()
    shadow.check()
    shadow.check()
    assert registry.shadows == ["bundle"]
    broken = ModelKeeper(
        ServingSettings(model=str(bundle_folder), shadow=str(tmp_path / "nowhere")),
        promote=lambda _: None,
        shadow=lambda _: None,
    )
    broken.load()
    broken.check()
    assert "no model" in str(broken.status().shadow_problem)


def test_the_thread_follows_by_itself_until_it_is_closed(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    registry.register()
    registry.register()
    registry.point("champion", "1")
    monkeypatch.setattr("reclaim.serving.models.keeper._LAST_CHECK_S", 120.0)
    keeper = registry.keeper(watch_s=0.05)
    keeper.watch()
    registry.point("champion", "2")
    soon(lambda: keeper.served.version == "2")
    keeper.close()
    assert keeper._watcher is not None
    assert not keeper._watcher.is_alive()
    assert keeper.status().registry == "reachable"
    registry.point("champion", "1")
    keeper.check()
    assert keeper.served.version == "2"


def test_a_model_that_fails_in_a_way_that_was_not_foreseen_is_refused_and_a_later_one_taken(
    registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    keeper = registry.serving(3)

    def fault(model: LoadedModel) -> None:
        if model.version == "2":
            raise RuntimeError("a fault of the service")

    registry.refuse = fault
    registry.point("champion", "2")
    keeper.watch()
    soon(lambda: (refused := keeper.status().refused) is not None and refused.version == "2")
    assert (keeper.served.version, _refused(keeper).why) == ("1", "a fault of the service")
    assert "does not take over" in caplog.text
    registry.point("champion", "3")
    soon(lambda: keeper.served.version == "3")
    keeper.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_watcher_that_has_ended_is_reported(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = registry.serving(1)

    def end() -> None:
        raise SystemExit

    monkeypatch.setattr(keeper, "check", end)
    keeper.watch()
    soon(lambda: keeper.status().registry == "unreachable: the thread that asks it has ended; see the log")
    assert keeper.served.version == "1"


def test_a_registry_that_does_not_answer_blocks_only_the_watcher(
    registry: Registry, bundle_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reclaim.serving.models.keeper._PATIENCE_S", 0.2)
    with closing(socket.create_server(("127.0.0.1", 0))) as hung:
        _point_at(f"http://me:secret@127.0.0.1:{hung.getsockname()[1]}", monkeypatch)
        keeper = registry.keeper(bundle=bundle_folder, model_version="7", watch_s=0.05)
        keeper.watch()
        soon(lambda: keeper.status().registry.startswith("unreachable: no answer for "))
        soon(lambda: keeper._registry.startswith("unreachable: "))
        assert "secret" not in keeper._registry
        assert (keeper.served.version, keeper.status().from_disk) == ("7", False)
        keeper.close()
        assert keeper._watcher is not None
        keeper._watcher.join(10)
