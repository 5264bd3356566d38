"""Caches the last served models in the state folder, and starts from them where the registry cannot."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from reclaim.data.core.files import copy_files, remove_left_behind, replaced_folder, write_json
from reclaim.data.errors import ConfigError, ModelAbsentError, ModelError, ReclaimError
from reclaim.serving.models.canary import check_answers
from reclaim.serving.models.loader import LoadedModel, load_location, named_location
from reclaim.serving.settings import ServingSettings
from reclaim.training.tracking.client import without_credentials
from reclaim.training.tracking.references import ModelLocation, builtin_model, is_champion

log = logging.getLogger(__name__)

_FOLDER: Final = "models"
"""In the state folder."""
_INDEX: Final = "kept.json"
_KEPT: Final = 2
"""Number of models kept: the served one and the one before it."""
_SHOWN_CHARACTERS: Final = 300
"""Characters of another program's error that are shown."""


@dataclass(frozen=True)
class CachedModel:
    """One model of the cache.

    Attributes
    ----------
    reference, name, version, run_id : str
        The reference that was served, and the version it resolved to; ``run_id`` is empty where it is unknown.
    folder : str
        Name of its folder, next to the index.
    sha256 : str
        Over the names and bytes of its files.
    from_disk : bool
        Whether it was served from here because the reference could not be resolved.
    """

    reference: str
    name: str
    version: str
    run_id: str
    folder: str
    sha256: str
    from_disk: bool


class ModelCache:
    """A folder with the last served models and an index of them, the latest first.

    Parameters
    ----------
    folder : Path
        Made when a model is added; holds nothing else.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def versions_for(self, reference: str) -> list[tuple[CachedModel, ModelLocation]]:
        """Return the versions served for a reference, the latest first, without those whose files have changed."""
        return [(entry, self._location(entry)) for entry in self._undamaged() if entry.reference == reference]

    def find(self, name: str, version: str, run_id: str) -> ModelLocation | None:
        """Return the location of one version, or None; the run tells versions of two registries apart."""
        for entry in self._undamaged():
            if (entry.name, entry.version, entry.run_id) == (name, version, run_id):
                return self._location(entry)
        return None

    def add(self, location: ModelLocation, *, run_id: str = "", from_disk: bool = False) -> ModelLocation:
        """Copy a model into the cache as the latest one, drop the oldest, and return its new location.

        Raises
        ------
        OSError
            It cannot be written; the models before it are still there.
        ConfigError
            Another process is copying the same version.
        """
        sha256 = _sha256(location.folder)
        folder = f"{location.name}-{location.version}"
        target = self.folder / folder
        if not target.is_dir() or _sha256(target) != sha256:
            with replaced_folder(target) as fresh:
                copy_files(location.folder, fresh)
        new = CachedModel(location.source, location.name, location.version, run_id, folder, sha256, from_disk)
        models = [new, *(entry for entry in self._index() if entry.folder != folder)][:_KEPT]
        write_json(self.folder / _INDEX, {"models": [asdict(entry) for entry in models]})
        wanted = {entry.folder for entry in models}
        for old in self.folder.iterdir():
            if old.is_dir() and old.name not in wanted:
                shutil.rmtree(old, ignore_errors=True)
        return self._location(new)

    def contains(self, folder: Path) -> bool:
        """Return whether a folder is one of the cache's."""
        return folder.resolve().parent == self.folder.resolve()

    def _location(self, entry: CachedModel) -> ModelLocation:
        return ModelLocation(entry.name, entry.version, (self.folder / entry.folder).resolve(), entry.reference)

    def _index(self) -> list[CachedModel]:
        path = self.folder / _INDEX
        if not path.is_file():
            return []
        try:
            return [CachedModel(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))["models"]]
        except (OSError, ValueError, TypeError, KeyError) as error:
            log.warning("%s is damaged (%r): no model of it is used", path, error)
            return []

    def _undamaged(self) -> list[CachedModel]:
        whole = []
        for entry in self._index():
            folder = self.folder / entry.folder
            try:
                remove_left_behind(folder)
                changed = _sha256(folder) != entry.sha256
            except OSError:
                changed = True
            if changed:
                log.warning("%s: the files of %s version %s are damaged", self.folder, entry.name, entry.version)
            else:
                whole.append(entry)
        return whole


def _sha256(folder: Path) -> str:
    """Return the SHA-256 over the names and bytes of all files in a folder, in hex."""
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


@dataclass(frozen=True)
class Refusal:
    """A model that was refused; ``version`` is None where the reference resolves to none."""

    version: str | None
    why: str


@dataclass(frozen=True)
class StartModel:
    """The model to start with.

    Attributes
    ----------
    model : LoadedModel
    location : ModelLocation
        In the cache where there is one.
    from_disk : bool
        As in ``ModelStatus``.
    refused : Refusal or None
        Why it is not the version that the reference resolves to.
    """

    model: LoadedModel
    location: ModelLocation
    from_disk: bool = False
    refused: Refusal | None = None


def start_model(settings: ServingSettings) -> StartModel:
    """Return the model that the settings name, checked; else the last one that was served under that reference.

    Where there is neither and the settings name no model, the built-in one serves until there is a champion. A
    named model is not replaced: its operator would mistake the answers for those of that model.

    A worker that starts again takes the latest cached model: it may have been promoted after ``launch`` cached its own.

    Raises
    ------
    ModelError
        Neither is available; the message gives the reason.
    ConfigError
        The model has no margin of the default's name.
    """
    cache = model_cache(settings)
    last = [] if cache is None else cache.versions_for(settings.model)
    launched = cache is not None and settings.bundle is not None and cache.contains(settings.bundle)
    version = None
    try:
        if launched and last:
            entry, location = last.pop(0)
            return StartModel(checked_model(location, settings), location, entry.from_disk)
        location = named_location(settings)
        version = location.version
        return StartModel(checked_model(location, settings), add_if_possible(cache, location))
    except ModelError as error:
        why = in_one_line(error)
        refused = Refusal(version, absent(settings.model) if isinstance(error, ModelAbsentError) else why)
        for _, location in last:
            log.warning("%s: %s; trying version %s, kept on disk", settings.model, why, location.version)
            try:
                model = checked_model(location, settings)
            except ModelError as unfit:
                log.warning("%s version %s, kept on disk: %s", location.name, location.version, unfit)
                continue
            return StartModel(model, add_if_possible(cache, location, from_disk=True), from_disk=True, refused=refused)
        if not settings.may_fall_back:
            if is_champion(settings.model):
                raise ModelError(f"{error}; where no model is named, the built-in one serves until then") from error
            raise
        log.warning("%s: %s; the built-in model serves until there is one", settings.model, why)
        location = builtin_model(settings.model)
        return StartModel(checked_model(location, settings), location, refused=refused)


def absent(reference: str) -> str:
    """Return why a reference without a version is refused: the same at a start and later, so it is logged once."""
    return f"the registry has no {reference}"


def model_cache(settings: ServingSettings) -> ModelCache | None:
    """Return the cache in the state folder; None without a state folder."""
    return None if settings.state is None else ModelCache(settings.state / _FOLDER)


def add_if_possible(
    cache: ModelCache | None, location: ModelLocation, *, run_id: str = "", from_disk: bool = False
) -> ModelLocation:
    """Add a served model to the cache, where there is one; return its location."""
    if cache is None or location.builtin:
        return location
    try:
        return cache.add(location, run_id=run_id, from_disk=from_disk)
    except (OSError, ConfigError) as error:
        log.warning(
            "%s version %s is served but cannot be kept in %s (%s): a start without the registry would not find it",
            location.name, location.version, cache.folder, error,
        )  # fmt: skip
        return location


def checked_model(location: ModelLocation, settings: ServingSettings) -> LoadedModel:
    """Return the model of a folder once it has passed the canary.

    Raises
    ------
    ModelError
        It cannot be loaded, or its answers are wrong.
    ConfigError
        It has no margin of the default's name.
    """
    model = load_location(location, settings.margin)
    try:
        check_answers(model.bundle)
    except ReclaimError:
        raise
    except Exception as error:  # a model that loads may still fail in any way when it answers
        raise ModelError(f"{location.folder}: the model fails on the canary batch ({error!r})") from error
    return model


def in_one_line(error: Exception) -> str:
    """Return an error as one line without the user and password of a URI; it is shown to callers without a token."""
    text = without_credentials(" ".join(str(error).split()))
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 1] + "…"
