"""Finds the model that a reference names: a registered version, fetched, a folder, or the built-in one."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from reclaim.data.errors import ModelAbsentError, ModelError
from reclaim.training.tracking.runs import CHAMPION, fetch_bundle, resolve_model

log = logging.getLogger(__name__)

_REGISTERED: Final = re.compile(r"(?P<name>[\w.-]+)(?:@(?P<alias>[\w.-]+)|/(?P<version>\d+))")
LOCAL_VERSION: Final = "local"
"""Version of a bundle from a folder rather than the registry."""
SERVED: Final = "reclaim@champion"
"""Reference of the model that is used where none is named: the version that the alias ``champion`` points at."""
BUILTIN: Final = "builtin"
"""Reference and name of the model that comes with the package; a folder of that name is ``./builtin``."""
BUILTIN_VERSION: Final = "2"
"""Its version: raised with every change of its files."""
BUILTIN_FOLDER: Final = Path(__file__).parents[1] / "builtin"
"""Its bundle."""


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
    run_id : str
        Of the training run in MLflow; empty where it is unknown.
    """

    name: str
    version: str
    folder: Path
    source: str
    run_id: str = ""

    @property
    def registered(self) -> bool:
        """True if it is a version of the registry, not a folder."""
        return self.version != LOCAL_VERSION

    @property
    def builtin(self) -> bool:
        """True if it came with the package."""
        return self.folder == BUILTIN_FOLDER

    @property
    def label(self) -> str:
        """``NAME/VERSION`` of a registered model, the name of a folder."""
        return f"{self.name}/{self.version}" if self.registered else self.name


def find_model(reference: str) -> ModelLocation:
    """Return the location of a model on this machine; a registered one is fetched.

    Parameters
    ----------
    reference : str
        ``NAME@ALIAS`` or ``NAME/VERSION`` of a registered model, the folder of a bundle, or ``BUILTIN``.

    Raises
    ------
    ModelError
        There is no such model; the message says how to make one.
    """
    if reference == BUILTIN:
        return builtin_model()
    if is_folder(reference):
        folder = Path(reference).expanduser().resolve()
        if not folder.is_dir():
            raise ModelError(
                f"no model {reference!r}: neither NAME@ALIAS, NAME/VERSION, builtin nor an existing folder; "
                "`reclaim train DATASET` registers one"
            )
        return ModelLocation(folder.name, LOCAL_VERSION, folder, reference)
    found = resolve_model(reference)
    folder, _ = fetch_bundle(f"{found.name}/{found.version}")
    return ModelLocation(found.name, found.version, folder.resolve(), reference, found.run_id)


def builtin_model(reference: str = BUILTIN) -> ModelLocation:
    """Return the location of the built-in model, as what ``reference`` resolved to."""
    return ModelLocation(BUILTIN, BUILTIN_VERSION, BUILTIN_FOLDER, reference)


def is_champion(reference: str) -> bool:
    """Return whether a reference names a champion."""
    registered = _REGISTERED.fullmatch(reference)
    return registered is not None and registered["alias"] == CHAMPION


def find_served(reference: str | None = None) -> ModelLocation:
    """Return the location of a model as ``find_model`` does; where none is named, of ``SERVED``.

    The built-in one where that is not registered yet. A champion that is damaged, or in a store that cannot be reached,
    is an error.
    """
    if reference is not None:
        return find_model(reference)
    try:
        return find_model(SERVED)
    except ModelAbsentError as error:
        log.warning("%s; the built-in model answers", error)
        return builtin_model(SERVED)


def is_alias(reference: str) -> bool:
    """Return whether a reference may resolve to another version later."""
    registered = _REGISTERED.fullmatch(reference)
    return registered is not None and registered["alias"] is not None


def is_folder(reference: str) -> bool:
    """Return whether a reference names a folder, the built-in model's included: no registry knows it."""
    return _REGISTERED.fullmatch(reference) is None
