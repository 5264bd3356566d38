"""Finds the model that a reference names: a registered version, fetched, or a folder."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from reclaim.data.errors import ModelError
from reclaim.training.tracking.runs import fetch_bundle, resolve_model

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
    def label(self) -> str:
        """``NAME/VERSION`` of a registered model, the name of a folder."""
        return f"{self.name}/{self.version}" if self.registered else self.name


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
    if is_folder(reference):
        folder = Path(reference).expanduser().resolve()
        if not folder.is_dir():
            raise ModelError(
                f"no model {reference!r}: neither NAME@ALIAS, NAME/VERSION nor an existing folder; "
                "`reclaim train DATASET` or `reclaim demo` registers reclaim@champion"
            )
        return ModelLocation(folder.name, LOCAL_VERSION, folder, reference)
    found = resolve_model(reference)
    folder, _ = fetch_bundle(f"{found.name}/{found.version}")
    return ModelLocation(found.name, found.version, folder.resolve(), reference, found.run_id)


def is_alias(reference: str) -> bool:
    """Return whether a reference may resolve to another version later."""
    registered = _REGISTERED.fullmatch(reference)
    return registered is not None and registered["alias"] is not None


def is_folder(reference: str) -> bool:
    """Return whether a reference is the path of a folder."""
    return _REGISTERED.fullmatch(reference) is None
