"""Resolves a model reference and loads the model; the only place of serving that fetches from MLflow at a start."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final
from zipfile import BadZipFile

from reclaim.data.errors import ConfigError, ModelError
from reclaim.serving.settings import ServingSettings
from reclaim.training.margins.margin import MARGIN_NAMES

if TYPE_CHECKING:
    from reclaim.training.bundle import Bundle

_REGISTERED: Final = re.compile(r"(?P<name>[\w.-]+)(?:@(?P<alias>[\w.-]+)|/(?P<version>\d+))")
LOCAL_VERSION: Final = "local"
"""Version of a bundle from a folder rather than the registry."""


@dataclass(frozen=True)
class ModelLocation:
    """Location of a model.

    Attributes
    ----------
    name, version : str
        As registered; the folder's name and ``LOCAL_VERSION`` for a folder.
    folder : Path
        Absolute; holds the bundle.
    source : str
        Its reference.
    """

    name: str
    version: str
    folder: Path
    source: str


@dataclass(frozen=True)
class LoadedModel:
    """A bundle, and the name and version shown in answers."""

    name: str
    version: str
    source: str
    bundle: Bundle


def find_model(reference: str) -> ModelLocation:
    """Return the location of a model on this machine; a registered one is fetched.

    Parameters
    ----------
    reference : str
        ``NAME@ALIAS`` or ``NAME/VERSION`` of a registered model, or the folder of a bundle.

    Raises
    ------
    ModelError
        There is no such model; the message says how to make one.
    """
    registered = _REGISTERED.fullmatch(reference)
    if registered is None:
        folder = Path(reference).expanduser().resolve()
        if not folder.is_dir():
            raise ModelError(
                f"no model {reference!r}: neither NAME@ALIAS, NAME/VERSION nor an existing folder; "
                "`reclaim train DATASET` or `reclaim demo` registers reclaim@champion"
            )
        return ModelLocation(folder.name, LOCAL_VERSION, folder, reference)
    from reclaim.training.tracking.aliases import give_up_soon
    from reclaim.training.tracking.runs import fetch_bundle

    give_up_soon()
    folder, version = fetch_bundle(reference)
    return ModelLocation(registered["name"], version, folder.resolve(), reference)


def named_location(settings: ServingSettings) -> ModelLocation:
    """Return the location of the settings' model: their own where they name it, else that of ``find_model``."""
    if settings.bundle is None:
        return find_model(settings.model)
    name = settings.bundle.name if is_folder(settings.model) else re.split("[@/]", settings.model)[0]
    return ModelLocation(name, settings.model_version or LOCAL_VERSION, settings.bundle, settings.model)


def load_location(location: ModelLocation, margin: str) -> LoadedModel:
    """Return the model of a folder.

    Raises
    ------
    ModelError
        There is no such model, or another feature pipeline made it.
    ConfigError
        The model has no margin of that name.
    """
    from safetensors import SafetensorError

    from reclaim.training.bundle import load_bundle

    damages = (OSError, LookupError, TypeError, ValueError, RuntimeError, BadZipFile, SafetensorError)
    try:
        bundle = load_bundle(location.folder)
    except damages as error:
        raise ModelError(f"{location.folder}: the files of the model are damaged ({error!r}); train again") from error
    if margin not in bundle.margins:
        raise ConfigError(f"RECLAIM_MARGIN: expected one of {', '.join(bundle.margins)}, got {margin!r}")
    return LoadedModel(location.name, location.version, location.source, bundle)


def load_model(reference: str) -> LoadedModel:
    """Return the model of a reference, as ``find_model`` takes it; ModelError where there is none or it is damaged."""
    return load_location(find_model(reference), MARGIN_NAMES[0])


def is_alias(reference: str) -> bool:
    """Return whether a reference may resolve to another version later."""
    registered = _REGISTERED.fullmatch(reference)
    return registered is not None and registered["alias"] is not None


def is_folder(reference: str) -> bool:
    """Return whether a reference is the path of a folder."""
    return _REGISTERED.fullmatch(reference) is None
