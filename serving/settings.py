"""The service's settings, from the environment: one variable each, ``RECLAIM_`` in front of the name."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from reclaim.data.errors import ConfigError
from reclaim.training.estimators.margin import MARGIN_NAMES

ENV_PREFIX: Final = "RECLAIM_"
DEFAULT_MODEL: Final = "reclaim@champion"
"""The model served when nobody names one: whatever the alias ``champion`` points at."""


class ServingSettings(BaseSettings):
    """How the service answers.

    Attributes
    ----------
    model : str
        ``NAME@ALIAS``, ``NAME/VERSION``, or the folder of a bundle.
    bundle : Path or None
        Folder of the bundle that ``model`` was resolved to; set by ``launch``, so that no worker asks MLflow again.
    model_version : str
        The version that ``model`` was resolved to; goes with ``bundle``.
    margin : str
        Margin of a request that names none.
    max_tasks : int
        Tasks per request at most.
    max_body_bytes : int
        Bytes per request body at most; 32 MiB are a thousand tasks with a day of plain windows each.
    """

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, protected_namespaces=())

    model: str = DEFAULT_MODEL
    bundle: Path | None = None
    model_version: str = ""
    margin: str = MARGIN_NAMES[0]
    max_tasks: int = Field(default=1_000, ge=1)
    max_body_bytes: int = Field(default=32 * 2**20, ge=1_024)


def read_settings() -> ServingSettings:
    """Return the settings of this process's environment.

    Raises
    ------
    ConfigError
        A variable holds what it must not; the message names it.
    """
    try:
        return ServingSettings()
    except ValidationError as error:
        problems = "; ".join(f"{ENV_PREFIX}{str(e['loc'][0]).upper()}: {e['msg']}" for e in error.errors())
        raise ConfigError(f"settings of the service: {problems}") from error
