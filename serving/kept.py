"""The last models served, copied into the state folder, and a start that falls back on them."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from reclaim.data.errors import ModelError
from reclaim.data.store import write_json
from reclaim.serving.canned import check_answers
from reclaim.serving.loader import LoadedModel, ModelLocation, load_location, named_location
from reclaim.serving.settings import ServingSettings

_LOG = logging.getLogger(__name__)

_FOLDER: Final = "models"
"""In the state folder."""
_INDEX: Final = "kept.json"
_KEPT: Final = 2
"""The served model and the one before it."""
_CREDENTIALS: Final = re.compile(r"(?<=//)[^/@\s]+@")
_SHOWN_CHARACTERS: Final = 300
"""How much of an error of others is repeated."""


@dataclass(frozen=True)
class Kept:
    """One model kept.

    Attributes
    ----------
    reference, name, version, run_id : str
        What it was found by, and what that stood for; ``run_id`` is empty where nobody told.
    folder : str
        Name of its folder, beside the index.
    sha256 : str
        Over the names and bytes of its files.
    from_disk : bool
        Whether it was served from here when it was kept, for want of what the reference stood for.
    """

    reference: str
    name: str
    version: str
    run_id: str
    folder: str
    sha256: str
    from_disk: bool


class KeptModels:
    """A folder with the last models served, and an index of them, the latest first.

    Parameters
    ----------
    folder : Path
        Made when a model is kept; nothing else may be in it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def of(self, reference: str) -> list[tuple[Kept, ModelLocation]]:
        """Return what was served by a reference, the latest first; those whose files changed since are left out."""
        return [(kept, self._location(kept)) for kept in self._whole() if kept.reference == reference]

    def find(self, name: str, version: str, run_id: str) -> ModelLocation | None:
        """Return where one version is, if it is here; another registry's version of the same number is another."""
        for kept in self._whole():
            if (kept.name, kept.version, kept.run_id) == (name, version, run_id):
                return self._location(kept)
        return None

    def keep(self, location: ModelLocation, *, run_id: str = "", from_disk: bool = False) -> ModelLocation:
        """Copy a model here, as the latest one, and let go of those before the last; return where it is now.

        Raises
        ------
        OSError
            It cannot be written; what was kept before still is.
        """
        sha256 = _sha256(location.folder)
        folder = f"{location.name}-{location.version}"
        target = self.folder / folder
        if not target.is_dir() or _sha256(target) != sha256:
            self._copy(location.folder, target)
        new = Kept(location.source, location.name, location.version, run_id, folder, sha256, from_disk)
        models = [new, *(kept for kept in self._index() if kept.folder != folder)][:_KEPT]
        write_json(self.folder / _INDEX, {"models": [asdict(kept) for kept in models]})
        wanted = {kept.folder for kept in models}
        for old in self.folder.iterdir():
            if old.is_dir() and old.name not in wanted:
                shutil.rmtree(old, ignore_errors=True)
        return self._location(new)

    def holds(self, folder: Path) -> bool:
        """Return whether a folder is one of those kept here."""
        return folder.resolve().parent == self.folder.resolve()

    def _location(self, kept: Kept) -> ModelLocation:
        return ModelLocation(kept.name, kept.version, (self.folder / kept.folder).resolve(), kept.reference)

    def _copy(self, source: Path, target: Path) -> None:
        partial, old = target.with_name(f"{target.name}.partial"), _old(target)
        for leftover in (partial, old):
            shutil.rmtree(leftover, ignore_errors=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, partial, copy_function=_copy_durably)
        if target.exists():
            target.rename(old)
        partial.rename(target)
        shutil.rmtree(old, ignore_errors=True)

    def _mend(self, kept: Kept) -> None:
        """Put a model back in its place that was moved out of it by a copy that was cut off then."""
        target = self.folder / kept.folder
        if not target.exists() and (old := _old(target)).is_dir():
            old.rename(target)

    def _index(self) -> list[Kept]:
        path = self.folder / _INDEX
        if not path.is_file():
            return []
        try:
            return [Kept(**kept) for kept in json.loads(path.read_text())["models"]]
        except (OSError, ValueError, TypeError, KeyError) as error:
            _LOG.warning("%s is damaged (%r): no model is kept there", path, error)
            return []

    def _whole(self) -> list[Kept]:
        whole = []
        for kept in self._index():
            try:
                self._mend(kept)
                changed = _sha256(self.folder / kept.folder) != kept.sha256
            except OSError:
                changed = True
            if changed:
                _LOG.warning("%s: the files of %s version %s are damaged", self.folder, kept.name, kept.version)
            else:
                whole.append(kept)
        return whole


def _old(target: Path) -> Path:
    """Return where a model is moved while another takes its place."""
    return target.with_name(f"{target.name}.old")


def _copy_durably(source: str, target: str) -> str:
    shutil.copyfile(source, target)
    with Path(target).open("rb") as written:
        os.fsync(written.fileno())
    return target


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
    """A model that was not let in; ``version`` is None where the reference stands for none."""

    version: str | None
    why: str


@dataclass(frozen=True)
class StartModel:
    """The model to start with.

    Attributes
    ----------
    model : LoadedModel
    location : ModelLocation
        Where it lies, in the state folder where there is one.
    from_disk : bool
        As in ``ModelStatus``.
    refused : Refusal or None
        Why it is not what the reference stands for.
    """

    model: LoadedModel
    location: ModelLocation
    from_disk: bool = False
    refused: Refusal | None = None


def start_model(settings: ServingSettings) -> StartModel:
    """Return the model that the settings name, checked; else the last one that was served under that reference.

    What ``launch`` left in the state folder may have been followed by a promotion when a worker starts again: then it
    is the latest one there that goes on.

    Raises
    ------
    ModelError
        Neither can be had; the message says why.
    ConfigError
        The model has no margin of the default's name.
    """
    kept = kept_models(settings)
    last = [] if kept is None else kept.of(settings.model)
    launched = kept is not None and settings.bundle is not None and kept.holds(settings.bundle)
    version = None
    try:
        if launched and last:
            entry, location = last.pop(0)
            return StartModel(checked_model(location, settings), location, entry.from_disk)
        location = named_location(settings)
        version = location.version
        return StartModel(checked_model(location, settings), keep_if_possible(kept, location))
    except ModelError as error:
        refused = Refusal(version, without_credentials(error))
        for _, location in last:
            _LOG.warning("%s: %s; trying version %s, kept on disk", settings.model, refused.why, location.version)
            try:
                model = checked_model(location, settings)
            except ModelError as unfit:
                _LOG.warning("%s version %s, kept on disk: %s", location.name, location.version, unfit)
                continue
            return StartModel(model, keep_if_possible(kept, location, from_disk=True), from_disk=True, refused=refused)
        raise


def kept_models(settings: ServingSettings) -> KeptModels | None:
    """Return the models kept in the state folder; None where there is no such folder."""
    return None if settings.state is None else KeptModels(settings.state / _FOLDER)


def keep_if_possible(
    kept: KeptModels | None, location: ModelLocation, *, run_id: str = "", from_disk: bool = False
) -> ModelLocation:
    """Keep a model that is served, where there is a place for it; return where it lies."""
    if kept is None:
        return location
    try:
        return kept.keep(location, run_id=run_id, from_disk=from_disk)
    except OSError as error:
        _LOG.warning(
            "%s version %s is served but cannot be kept in %s (%s): a start without the registry would not find it",
            location.name, location.version, kept.folder, error,
        )  # fmt: skip
        return location


def checked_model(location: ModelLocation, settings: ServingSettings) -> LoadedModel:
    """Return the model of a folder once it has answered the canned batch.

    Raises
    ------
    ModelError
        It cannot be loaded, or what it answers is wrong.
    ConfigError
        It has no margin of the default's name.
    """
    model = load_location(location, settings.margin)
    check_answers(model.bundle)
    return model


def without_credentials(error: Exception) -> str:
    """Return an error's one line without the user and password of a URI: those who ask for it carry no token."""
    text = _CREDENTIALS.sub("", " ".join(str(error).split()))
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 1] + "…"
