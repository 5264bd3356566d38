"""Reads the service's settings from the environment: variable ``RECLAIM_NAME`` sets ``name``."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Final, Literal

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from reclaim.data.errors import ConfigError
from reclaim.data.schema import LATEST_US
from reclaim.data.windows import Cell
from reclaim.training.machines.following import AT_ONCE
from reclaim.training.margins.margin import MARGIN_NAMES
from reclaim.training.tracking.references import SERVED

ENV_PREFIX: Final = "RECLAIM_"
_ALIKE: Final = 0.9
"""Ratio of equal letters (``difflib``) from which on one name is a misspelling of the other: a letter or two in
fifteen."""
LONGEST_S: Final = 1e9
"""Longest time in seconds that a setting may name, some thirty years: sums with it still fit into whole µs."""


class ServingSettings(BaseSettings):
    """Settings of the service; a variable ``RECLAIM_NAME`` of the environment sets ``name``, an empty one nothing."""

    # files of variables often have empty ones
    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, env_ignore_empty=True, protected_namespaces=())

    model: str = SERVED
    """``NAME@ALIAS``, ``NAME/VERSION``, or the folder of a bundle. An alias is watched: moving it moves the service.
    Where none is named, the built-in model serves until there is a champion; one that is named is not replaced."""
    bundle: Path | None = None
    """Folder of the bundle that ``model`` was resolved to; set by ``launch``, as the server does not ask MLflow."""
    model_version: str = ""
    """The version that ``model`` was resolved to; set together with ``bundle``."""
    shadow: str = ""
    """A second model, scored and compared live but never served; empty: none."""
    watch_s: float = Field(default=5.0, gt=0, le=LONGEST_S)
    """Time in seconds between two reads of the aliases."""
    margin: str = MARGIN_NAMES[0]
    """Margin of a request that names none."""
    follow: bool = True
    """Lets the prices of the tracked cell follow the outcomes of its answers, between a 64th of what the model has and
    the limit, so that each tier keeps its budget as the load drifts, and the margins of machines likewise; ``off``:
    the model's own prices and margins stay."""
    at_once: float = Field(default=AT_ONCE, gt=0, le=1)
    """Share of the machines, two of them in any case, that may pass what was reserved for them at the same time, except
    one time in a hundred; margins of machines that follow keep it. 1: any share, as long as each machine keeps its
    budget of times."""
    max_tasks: int = Field(default=1_000, ge=1)
    """Largest number of tasks in a stateless JSON request."""
    max_body_bytes: int = Field(default=32 * 2**20, ge=1_024)
    """Largest number of bytes in a JSON body; 32 MiB are a thousand tasks with a day of plain windows each."""
    max_bulk_rows: int = Field(default=1_000_000, ge=1)
    """Largest number of rows in an Arrow body."""
    max_bulk_bytes: int = Field(default=512 * 2**20, ge=1_024)
    """Largest number of bytes in an Arrow body."""
    max_connections: int = Field(default=4_096, ge=1)
    """Largest number of connections at once, fewer where the process may open fewer files; one more takes the place of
    the one that has been idle for longest, or is refused with 503."""
    max_requests: int = Field(default=256, ge=1)
    """Requests under way at once; one more is refused with 429 and ``Retry-After``."""
    max_large_answers: int = Field(default=8, ge=1)
    """Answers for more than 256 tasks of the cell that are made or read at once; one more is refused with 503 and
    ``Retry-After``, and waits its turn after a write."""
    max_inflight_bytes: int = Field(default=2 * 2**30, ge=1_024)
    """Largest number of bytes in the bodies of all requests under way; further ones are refused with 429 and
    ``Retry-After``."""
    max_waiting: int = Field(default=64, ge=1)
    """Writes in the queue at once; one more is refused with 429 and ``Retry-After``."""
    body_timeout_s: float = Field(default=30.0, gt=0, le=LONGEST_S)
    """Time in seconds within which a body has to arrive."""
    request_timeout_s: float = Field(default=60.0, gt=0, le=LONGEST_S)
    """Time in seconds within which an answer has to be given after the body is complete."""
    reading_timeout_s: float = Field(default=30.0, gt=0, le=LONGEST_S)
    """Time in seconds within which a client has to read a MiB of an answer; it is cut off then."""
    allowed_hosts: str = ""
    """Names that clients may call this service by where no token is asked for, separated by commas. localhost and
    addresses are always allowed; other names may belong to a web page that resolves them to this machine."""
    allowed_origins: str = ""
    """Origins of web pages that may call this service where no token is asked for, separated by commas, such as
    https://tools.example."""
    token_file: Path | None = None
    """File with the bearer token that every request except probes must carry; None: no token is asked for."""
    read_token_file: Path | None = None
    """File with a second token, for requests that store nothing, such as those of a Prometheus or a scheduler; None:
    none."""
    record: Path | None = None
    """Folder that every window is recorded in, as a trace that ``--trace recorded`` reads; None: no window is
    recorded."""
    record_days: float | None = Field(default=None, ge=1, le=LONGEST_S / 86_400)
    """Days of recorded windows that are kept, counted in hours that have some: older files are deleted when an hour is
    written, and one wrong time deletes none. None: all are kept, some 31 bytes a window."""
    state: Path | None = None
    """Folder for all that must outlive the process; None keeps it in memory only, and answers say so."""
    repair: bool = False
    """Uses a state that is damaged in the middle up to the damage, and moves the rest aside."""
    sync: bool = True
    """Acknowledges a write only when it is on the disk, not when the operating system has it."""
    snapshot_mib: int = Field(default=64, ge=1)
    """A snapshot replaces the log when the log is larger than this, in MiB, and than a fourth of the last snapshot."""
    max_tracked: int = Field(default=500_000, ge=1)
    """Largest number of tasks in memory; windows of one more are refused."""
    lateness_s: float = Field(default=900.0, ge=0, le=LONGEST_S)
    """Largest time in seconds by which a window may end before the latest one of its task."""
    ahead_s: float | None = Field(default=None, gt=0, le=LONGEST_S)
    """Largest time in seconds by which a window may end ahead of the clock, so that one wrong time does not make all
    others old. None: 300 with this machine's clock, else an hour, which gaps in a trace may pass if half of the tasks
    agree."""
    clock: Literal["unix", "trace"] = "unix"
    """``unix``: windows are in µs since 1970 and the clock is this machine's. ``trace``: windows have times of a trace;
    the clock stands at the time that more than a tenth of the tasks have reached and goes on from there with time."""
    stale_s: float | None = Field(default=None, gt=0, le=LONGEST_S)
    """A task without a new window for this long, in seconds, gets its limit again; None: two horizons of the model."""
    forget_s: float = Field(default=86_400.0, gt=0, le=LONGEST_S)
    """A task without a new window for this long, in seconds, is forgotten while other tasks have some."""
    largest_cpu: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """The most CPU that any machine of the cell supplies, in the unit of the limits; None: unknown."""
    largest_memory: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """The same of memory."""
    cpu_unit: str = Field(default="cores", min_length=1, max_length=64)
    """The unit of all CPU amounts of the tracked cell; it is repeated in answers, never converted. A model that was
    trained on a dataset expects the unit of that dataset."""
    memory_unit: str = Field(default="bytes", min_length=1, max_length=64)
    """The same of memory."""
    monday_us: int = Field(default=0, ge=0, le=LATEST_US)
    """A midnight that begins a Monday, in the cell's own zone, on the windows' clock; µs."""
    log_json: bool = False
    """Writes the log as one JSON object a line."""

    @property
    def may_fall_back(self) -> bool:
        """Permission for the built-in model to serve as the champion: a model that was named is not replaced."""
        return "model" not in self.model_fields_set

    @property
    def ahead(self) -> float:
        """Largest time in seconds by which a window may end ahead of the clock."""
        return self.ahead_s if self.ahead_s is not None else 300.0 if self.clock == "unix" else 3_600.0

    @property
    def cell(self) -> Cell:
        """The facts about the cell whose tasks are tracked."""
        cpu, memory = (math.nan if most is None else most for most in (self.largest_cpu, self.largest_memory))
        return Cell((cpu, memory), self.monday_us)


def cell_folder(state: Path) -> Path:
    """Return the folder within a state folder that every release locks; formats up to 8 are kept in it.

    ``storage.formats.place_of`` has the folder of a format.
    """
    return state / "cell"


def read_settings() -> ServingSettings:
    """Return the settings of this process's environment.

    Raises
    ------
    ConfigError
        A variable is out of range or unreadable, or its name is almost that of a setting; the message names it.
    """
    _refuse_misspelt(os.environ)
    try:
        return ServingSettings()
    except ValidationError as error:
        problems = "; ".join(f"{ENV_PREFIX}{str(e['loc'][0]).upper()}: {e['msg']}" for e in error.errors())
        raise ConfigError(f"settings of the service: {problems}") from error


def _refuse_misspelt(variables: Iterable[str]) -> None:
    """Raise ConfigError where a variable's name is almost that of a setting, or the first words of one.

    Other names pass: a Kubernetes with a service of this name sets ``RECLAIM_PORT`` and the like.
    """
    known = {ENV_PREFIX + name.upper() for name in ServingSettings.model_fields}
    for name in variables:
        capitals = name.upper()  # as settings are read
        if capitals.startswith(ENV_PREFIX) and capitals not in known:
            begun = sorted(setting for setting in known if setting.startswith(f"{capitals}_"))
            for meant in (begun or get_close_matches(capitals, known, n=1, cutoff=_ALIKE))[:1]:
                raise ConfigError(f"{name} is no setting of the service; {meant} is")
