"""Follows the registry's aliases while serving; refuses a model that fails its checks."""

from __future__ import annotations

import logging
import math
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from reclaim.data.errors import ModelError, ReclaimError
from reclaim.serving.models.cache import (
    Refusal,
    absent,
    add_if_possible,
    checked_model,
    in_one_line,
    model_cache,
    start_model,
)
from reclaim.serving.models.loader import LoadedModel, find_model
from reclaim.serving.settings import ServingSettings
from reclaim.training.tracking.aliases import RegistryReader
from reclaim.training.tracking.client import default_tracking_uri, missing
from reclaim.training.tracking.references import BUILTIN, LOCAL_VERSION, ModelLocation, is_alias, is_folder
from reclaim.training.tracking.runs import ModelVersion, fetch_bundle

log = logging.getLogger(__name__)

_FETCH_AGAIN_S: Final = 60.0
"""Delay before a failed download of a version is tried again (s)."""
_PATIENCE_S: Final = 15.0
"""A registry without an answer for this long (s) is called unreachable; longer than MLflow's first try."""
_LAST_CHECK_S: Final = 2.0
"""Wait for a running check at the end (s); a promotion takes a fraction of it."""


@dataclass(frozen=True)
class ModelStatus:
    """The served model and its state; ``dataclasses.asdict`` of it is JSON.

    Attributes
    ----------
    reference, name, version : str
        The configured reference, and the model that answers.
    loaded_at : float
        Time of loading, in seconds since 1970.
    from_disk : bool
        Whether it comes from the cache because the reference could not be resolved.
    fallback : str or None
        Why the built-in model serves in place of the champion; None where it does not.
    registry : str
        ``reachable``, ``not asked``, ``unreachable: …`` with the reason and the time, or ``not there yet`` while the
        built-in model serves.
    refused : Refusal or None
        The version that the reference resolves to by now, where it was refused.
    shadow_name, shadow_version : str or None
        The model that is scored next to the served one.
    shadow_loaded_at : float or None
        As above.
    shadow_problem : str or None
        Why there is no shadow, or not the version that its reference resolves to.
    """

    reference: str
    name: str
    version: str
    loaded_at: float
    from_disk: bool
    fallback: str | None
    registry: str
    refused: Refusal | None
    shadow_name: str | None
    shadow_version: str | None
    shadow_loaded_at: float | None
    shadow_problem: str | None


@dataclass(frozen=True)
class _Current:
    """The current model of a reference, its time of loading and its run; an empty ``run_id`` is unknown."""

    model: LoadedModel
    loaded_at: float
    run_id: str = ""
    from_disk: bool = False

    def is_version(self, found: ModelVersion) -> bool:
        """Return whether it is that version; by name and number where its run is unknown."""
        same = (self.model.name, self.model.version) == (found.name, found.version)
        return same and self.run_id in ("", found.run_id)


class _Followed:
    """A reference, its current model, and the function that switches to another one."""

    def __init__(self, reference: str, hand_over: Callable[[LoadedModel], None], refused: Callable[[], None]) -> None:
        self.reference = reference
        self.hand_over = hand_over
        self._on_refused = refused
        self.current: _Current | None = None
        self.refused: Refusal | None = None
        self._tried: ModelVersion | None = None
        self._again_at = -math.inf

    def refuse(self, found: ModelVersion | None, why: str, again_s: float = math.inf) -> None:
        """Keep the reason, log it once, and do not try again for some seconds; None: the reference has no version."""
        version = None if found is None else found.version
        refused = Refusal(version, why)
        if refused != self.refused:
            if found is not None:
                self._on_refused()
            which = self.reference if version is None else f"{self.reference}, version {version},"
            remains = f"{self.named()} stays" if self.current else "none is there"
            log.warning("%s is not taken: %s; %s", which, why, remains)
        self.refused, self._tried, self._again_at = refused, found, time.monotonic() + again_s

    def gave_up(self, found: ModelVersion) -> bool:
        """Return whether that version was refused and must not be tried again yet."""
        return self.refused is not None and self._tried == found and time.monotonic() < self._again_at

    def named(self) -> str:
        """Return the current model in words."""
        return "none" if self.current is None else f"{self.current.model.name} version {self.current.model.version}"


class ModelKeeper:
    """Keeps the served model and the shadow at the versions that their references resolve to.

    Parameters
    ----------
    settings : ServingSettings
    promote : callable
        Called with a new, checked model, which answers from its return on; raises ``ReclaimError`` to refuse it.
    shadow : callable
        Called with the model to score next to the served one, or None.
    refused : callable
        Called for every model that is refused in the served one's place; a refused shadow is in ``status`` alone.
    """

    def __init__(
        self,
        settings: ServingSettings,
        *,
        promote: Callable[[LoadedModel], None],
        shadow: Callable[[LoadedModel | None], None],
        refused: Callable[[], None] = lambda: None,
    ) -> None:
        self._settings = settings
        self._main = _Followed(settings.model, promote, refused)
        self._shadow = _Followed(settings.shadow, shadow, lambda: None)
        self._set_shadow = shadow
        self._cache = model_cache(settings)
        self._reader = RegistryReader()
        self._registry = "not asked"
        self._asked_at: float | None = None
        self._checking = threading.Lock()
        self._closed = threading.Event()
        self._watcher: threading.Thread | None = None

    @property
    def served(self) -> LoadedModel:
        """The model that answers; set by ``load``."""
        return self._served().model

    def load(self) -> LoadedModel:
        """Return the model to start with; choice and errors are those of ``start_model``."""
        start = start_model(self._settings)
        self._main.current = _Current(start.model, time.time(), from_disk=start.from_disk)
        self._main.refused = start.refused
        source = "kept on disk" if start.from_disk else self._main.reference
        log.info("serving %s (%s)", self._main.named(), source)
        return start.model

    def watch(self) -> None:
        """Start the thread that follows the references; it ends with the process.

        Returns once MLflow is imported, so it is called before the service is ready.
        """
        if is_alias(self._main.reference) or self._shadow.reference:
            self._reader.prepare()
            self._watcher = threading.Thread(target=self._watch, name="model-watcher", daemon=True)
            self._watcher.start()

    def close(self) -> None:
        """Stop following; a check that hangs on the registry is not waited for."""
        self._closed.set()
        if self._watcher is not None:
            self._watcher.join(_LAST_CHECK_S)

    def check(self) -> None:
        """Resolve the references once, and take over new versions."""
        with self._checking:
            if is_alias(self._main.reference):
                self._follow(self._main)
                if not self._registry_is_there() and not is_folder(self._shadow.reference):
                    return  # wait once, not twice
            if self._shadow.reference and (is_alias(self._shadow.reference) or self._shadow.current is None):
                self._follow(self._shadow)

    def status(self) -> ModelStatus:
        """Return the served model, and why it is not the version it should be."""
        served, shadow, problem = self._served(), self._shadow.current, self._shadow.refused
        return ModelStatus(
            reference=self._main.reference,
            name=served.model.name,
            version=served.model.version,
            loaded_at=served.loaded_at,
            from_disk=served.from_disk,
            fallback=self._fallback(),
            registry=self._registry_status(),
            refused=self._main.refused,
            shadow_name=None if shadow is None else shadow.model.name,
            shadow_version=None if shadow is None else shadow.model.version,
            shadow_loaded_at=None if shadow is None else shadow.loaded_at,
            shadow_problem=None if problem is None else problem.why,
        )

    def _fallback(self) -> str | None:
        if not self._serves_builtin() or self._main.reference == BUILTIN:
            return None
        registry, refused = self._registry_status(), self._main.refused
        return registry if refused is None or registry.startswith("unreachable") else refused.why

    def _serves_builtin(self) -> bool:
        origin = self._served().model.bundle.origin
        return origin is not None and origin.builtin

    def _served(self) -> _Current:
        assert self._main.current is not None, "load() comes first"
        return self._main.current

    def _watch(self) -> None:
        while True:
            try:
                self.check()
            except Exception:  # the thread would end, and no later champion be taken
                self._registry = "unreachable: the last check failed; see the log"
                log.exception("the model registry could not be followed; the next check tries again")
            if self._closed.wait(self._settings.watch_s):
                return

    def _follow(self, followed: _Followed) -> None:
        try:
            found = self._find(followed.reference)
        except ModelError as error:
            if self._registry_is_there():
                why, now = in_one_line(error), datetime.now(UTC).isoformat(timespec="seconds")
                self._registry = f"unreachable: {why} (since {now})"
                log.warning("the model registry is %s; %s keeps serving", self._registry, self._main.named())
            return
        if found is None:
            if followed is self._shadow and followed.current is not None:
                followed.current = None
                self._set_shadow(None)
            followed.refuse(None, absent(followed.reference))
        elif followed.current is not None and followed.current.is_version(found):
            self._confirm(followed, found)
        elif not followed.gave_up(found):
            self._take(followed, found)

    def _find(self, reference: str) -> ModelVersion | None:
        if is_folder(reference):
            return ModelVersion(Path(reference).name, LOCAL_VERSION, "")
        if self._serves_builtin() and missing(default_tracking_uri()):
            self._registry = "not there yet"  # a cell's first day
            return None
        self._asked_at = time.monotonic()
        try:
            found = self._reader.find(reference)
        finally:
            self._asked_at = None
        if not self._registry_is_there():
            log.info("the model registry is reachable again")
        self._registry = "reachable"
        return found

    def _confirm(self, followed: _Followed, found: ModelVersion) -> None:
        """Record that the current model is the version that its reference resolves to."""
        current = followed.current
        assert current is not None
        followed.refused = None
        if (current.run_id, current.from_disk) == (found.run_id, False):
            return
        followed.current = replace(current, run_id=found.run_id, from_disk=False)
        if followed is self._main and self._cache is not None:
            for entry, location in self._cache.versions_for(followed.reference)[:1]:
                if entry.version == found.version:
                    add_if_possible(self._cache, location, run_id=found.run_id)

    def _take(self, followed: _Followed, found: ModelVersion) -> None:
        """Take a version over if it can be fetched and passes its checks; else keep the reason."""
        try:
            room = tempfile.TemporaryDirectory(prefix="reclaim-model-", ignore_cleanup_errors=True)
        except OSError as error:
            followed.refuse(found, f"there is no room to fetch it: {error}", _FETCH_AGAIN_S)
            return
        with room as folder:
            try:
                location = self._fetch(followed.reference, found, Path(folder))
            except ModelError as error:
                followed.refuse(found, in_one_line(error), _FETCH_AGAIN_S)
                return
            try:
                model = checked_model(location, self._settings)
                if self._closed.is_set():
                    return
                followed.hand_over(model)
            except Exception as error:  # a model may fail in any way when it takes over
                if not isinstance(error, ReclaimError):
                    log.exception("%s version %s does not take over", found.name, found.version)
                why = in_one_line(error).replace(str(location.folder), f"{found.name} version {found.version}")
                followed.refuse(found, why)
                return
            before = followed.named()
            followed.current = _Current(model, time.time(), found.run_id)
            followed.refused = None
            role = "serving" if followed is self._main else "scoring in the shadow"
            log.info("%s %s (%s); before it: %s", role, followed.named(), followed.reference, before)
            if followed is self._main:
                add_if_possible(self._cache, location, run_id=found.run_id)

    def _fetch(self, reference: str, found: ModelVersion, into: Path) -> ModelLocation:
        if is_folder(reference):
            return find_model(reference)
        cached = None if self._cache is None else self._cache.find(found.name, found.version, found.run_id)
        if cached is not None:
            return replace(cached, source=reference)
        folder, _ = fetch_bundle(f"{found.name}/{found.version}", into)
        return ModelLocation(found.name, found.version, folder, reference)

    def _registry_is_there(self) -> bool:
        return not self._registry.startswith("unreachable")

    def _registry_status(self) -> str:
        if self._watcher is not None and not self._watcher.is_alive() and not self._closed.is_set():
            return "unreachable: the thread that asks it has ended; see the log"
        asked_at = self._asked_at
        waiting_s = 0.0 if asked_at is None else time.monotonic() - asked_at
        return self._registry if waiting_s < _PATIENCE_S else f"unreachable: no answer for {waiting_s:.0f} s"
