"""Resolves a model reference and loads the model; the only place of serving that fetches from MLflow at a start."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from reclaim.data.errors import ConfigError
from reclaim.serving.settings import ServingSettings
from reclaim.training.margins.margin import MARGIN_NAMES
from reclaim.training.tracking import references
from reclaim.training.tracking.aliases import give_up_soon
from reclaim.training.tracking.references import BUILTIN_FOLDER, LOCAL_VERSION, ModelLocation, builtin_model, is_folder

if TYPE_CHECKING:
    from reclaim.training.bundle import Bundle


@dataclass(frozen=True)
class LoadedModel:
    """A bundle, and the name and version shown in answers."""

    name: str
    version: str
    source: str
    bundle: Bundle


def find_model(reference: str) -> ModelLocation:
    """Return the location of a model, as ``references.find_model`` does, without hanging on a silent registry."""
    give_up_soon()
    return references.find_model(reference)


def named_location(settings: ServingSettings) -> ModelLocation:
    """Return the location of the settings' model: their own where they name it, else that of ``find_model``."""
    if settings.bundle is None:
        return find_model(settings.model)
    if settings.bundle == BUILTIN_FOLDER:
        return builtin_model(settings.model)
    name = settings.bundle.name if is_folder(settings.model) else re.split("[@/]", settings.model)[0]
    return ModelLocation(name, settings.model_version or LOCAL_VERSION, settings.bundle, settings.model)


def load_location(location: ModelLocation, margin: str) -> LoadedModel:
    """Return the model of a folder.

    Raises
    ------
    ModelError
        There is no such model, another feature pipeline made it, or its files are damaged.
    ConfigError
        The model has no price for a margin of that name.
    """
    from reclaim.training.bundle import load_bundle

    bundle = replace(load_bundle(location.folder), origin=location)
    if margin not in bundle.prices:
        raise ConfigError(f"RECLAIM_MARGIN: expected one of {', '.join(bundle.prices)}, got {margin!r}")
    return LoadedModel(location.name, location.version, location.source, bundle)


def load_model(reference: str | None = None) -> LoadedModel:
    """Return the model of a reference, as ``references.find_served`` takes it.

    Raises
    ------
    ModelError
        There is none, or it is damaged.
    """
    give_up_soon()
    return load_location(references.find_served(reference), MARGIN_NAMES[0])
