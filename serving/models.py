"""The models in force: follows the registry's aliases while serving, and lets no model in that fails its checks."""

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
from reclaim.serving.kept import (
    Refusal,
    checked_model,
    keep_if_possible,
    kept_models,
    start_model,
    without_credentials,
)
from reclaim.serving.loader import LOCAL_VERSION, LoadedModel, ModelLocation, find_model, is_alias, is_folder
from reclaim.serving.settings import ServingSettings
from reclaim.training.lookup import RegistryReader
from reclaim.training.tracking import ModelVersion, fetch_bundle

_LOG = logging.getLogger(__name__)

_FETCH_AGAIN_S: Final = 60.0
"""After a version's files could not be had they are asked for again so much later, in seconds: a download may fail."""
_PATIENCE_S: Final = 15.0
"""A registry that has not answered for so long, in seconds, is called unreachable: longer than MLflow's first try."""
_LAST_LOOK_S: Final = 2.0
"""How long the end waits for a look under way, in seconds: a promotion takes a fraction of one."""


@dataclass(frozen=True)
class ModelStatus:
    """What is served and why; ``dataclasses.asdict`` of it is JSON.

    Attributes
    ----------
    reference, name, version : str
        What was asked for, and what answers.
    loaded_at : float
        Since when, in seconds since 1970.
    from_disk : bool
        Whether it is the last model kept on disk, served for want of what the reference stands for.
    registry : str
        ``reachable``, ``not asked``, or ``unreachable: …`` with the reason and the time.
    refused : Refusal or None
        What the reference stands for by now, where that was not let in.
    shadow_name, shadow_version : str or None
        The model that is scored beside the served one.
    shadow_loaded_at : float or None
        Since when, as above.
    shadow_problem : str or None
        Why there is none, or not the one that its reference stands for.
    """

    reference: str
    name: str
    version: str
    loaded_at: float
    from_disk: bool
    registry: str
    refused: Refusal | None
    shadow_name: str | None
    shadow_version: str | None
    shadow_loaded_at: float | None
    shadow_problem: str | None


@dataclass(frozen=True)
class _Current:
    """A model in force: since when, on whose word, and from which run; an empty ``run_id`` is unknown."""

    model: LoadedModel
    loaded_at: float
    run_id: str = ""
    from_disk: bool = False

    def is_version(self, found: ModelVersion) -> bool:
        """Return whether it is that version; where its run is unknown, name and number say so."""
        same = (self.model.name, self.model.version) == (found.name, found.version)
        return same and self.run_id in ("", found.run_id)


class _Followed:
    """A reference, the model in force for it, and who is told of another."""

    def __init__(self, reference: str, hand_over: Callable[[LoadedModel], None], refused: Callable[[], None]) -> None:
        self.reference = reference
        self.hand_over = hand_over
        self._tell_refused = refused
        self.current: _Current | None = None
        self.refused: Refusal | None = None
        self._again_at = -math.inf

    def refuse(self, version: str | None, why: str, again_s: float = math.inf) -> None:
        """Keep the reason, and do not try again before some seconds have passed; the log has it once."""
        refused = Refusal(version, why)
        if refused != self.refused:
            self._tell_refused()
            which = self.reference if version is None else f"{self.reference}, version {version},"
            _LOG.warning("%s is not taken: %s; in force is %s", which, why, self.named())
        self.refused, self._again_at = refused, time.monotonic() + again_s

    def gave_up(self, found: ModelVersion) -> bool:
        """Return whether that version was refused, and is not to be tried again yet."""
        return self.refused is not None and self.refused.version == found.version and time.monotonic() < self._again_at

    def named(self) -> str:
        """Return what is in force, in words."""
        return "none" if self.current is None else f"{self.current.model.name} version {self.current.model.version}"


class ModelKeeper:
    """Keeps the served model, and the shadow, to what their references stand for.

    Parameters
    ----------
    settings : ServingSettings
    promote : callable
        Takes a new model, checked, and answers with it from its return on; raises ``ReclaimError`` to refuse it.
    shadow : callable
        Takes the model to score beside the served one, or None for none any more.
    refused : callable
        Called for every model that is not let in.
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
        self._shadow = _Followed(settings.shadow, shadow, refused)
        self._tell_shadow = shadow
        self._kept = kept_models(settings)
        self._reader = RegistryReader()
        self._registry = "not asked"
        self._asked_at: float | None = None
        self._looking = threading.Lock()
        self._closed = threading.Event()
        self._watcher: threading.Thread | None = None

    @property
    def served(self) -> LoadedModel:
        """The model that answers; there is one from ``load`` on."""
        return self._served().model

    def load(self) -> LoadedModel:
        """Return the model to start with; see ``start_model`` for what it is, and for the errors."""
        start = start_model(self._settings)
        self._main.current = _Current(start.model, time.time(), from_disk=start.from_disk)
        self._main.refused = start.refused
        source = "kept on disk" if start.from_disk else self._main.reference
        _LOG.info("serving %s (%s)", self._main.named(), source)
        return start.model

    def watch(self) -> None:
        """Follow the references from now on, in a thread of its own that ends with the process.

        Returns once MLflow is imported: call it before the service is ready.
        """
        if is_alias(self._main.reference) or self._shadow.reference:
            self._reader.prepare()
            self._watcher = threading.Thread(target=self._watch, name="model-watcher", daemon=True)
            self._watcher.start()

    def close(self) -> None:
        """Look no more, and hand nothing over; a look that hangs on the registry is not waited for."""
        self._closed.set()
        if self._watcher is not None:
            self._watcher.join(_LAST_LOOK_S)

    def look(self) -> None:
        """Ask once what the references stand for, and follow them."""
        with self._looking:
            if is_alias(self._main.reference):
                self._follow(self._main)
                if not self._registry_is_there() and not is_folder(self._shadow.reference):
                    return  # waited for once, not twice
            if self._shadow.reference and (is_alias(self._shadow.reference) or self._shadow.current is None):
                self._follow(self._shadow)

    def status(self) -> ModelStatus:
        """Return what is served, and what stands in the way of what should be."""
        served, shadow, problem = self._served(), self._shadow.current, self._shadow.refused
        return ModelStatus(
            reference=self._main.reference,
            name=served.model.name,
            version=served.model.version,
            loaded_at=served.loaded_at,
            from_disk=served.from_disk,
            registry=self._registry_status(),
            refused=self._main.refused,
            shadow_name=None if shadow is None else shadow.model.name,
            shadow_version=None if shadow is None else shadow.model.version,
            shadow_loaded_at=None if shadow is None else shadow.loaded_at,
            shadow_problem=None if problem is None else problem.why,
        )

    def _served(self) -> _Current:
        assert self._main.current is not None, "load() comes first"
        return self._main.current

    def _watch(self) -> None:
        self.look()
        while not self._closed.wait(self._settings.watch_s):
            self.look()

    def _follow(self, followed: _Followed) -> None:
        try:
            found = self._find(followed.reference)
        except ModelError as error:
            if self._registry_is_there():
                why, now = without_credentials(error), datetime.now(UTC).isoformat(timespec="seconds")
                self._registry = f"unreachable: {why} (since {now})"
                _LOG.warning("the model registry is %s; %s goes on", self._registry, self._main.named())
            return
        if found is None:
            if followed is self._shadow and followed.current is not None:
                followed.current = None
                self._tell_shadow(None)
            followed.refuse(None, f"the registry has no {followed.reference}")
        elif followed.current is not None and followed.current.is_version(found):
            self._confirm(followed, found)
        elif not followed.gave_up(found):
            self._take(followed, found)

    def _find(self, reference: str) -> ModelVersion | None:
        if is_folder(reference):
            return ModelVersion(Path(reference).name, LOCAL_VERSION, "")
        self._asked_at = time.monotonic()
        try:
            found = self._reader.find(reference)
        finally:
            self._asked_at = None
        if not self._registry_is_there():
            _LOG.info("the model registry is reachable again")
        self._registry = "reachable"
        return found

    def _confirm(self, followed: _Followed, found: ModelVersion) -> None:
        """Note that the model in force is what its reference stands for, where that was not known."""
        current = followed.current
        assert current is not None
        followed.refused = None
        if (current.run_id, current.from_disk) == (found.run_id, False):
            return
        followed.current = replace(current, run_id=found.run_id, from_disk=False)
        if followed is self._main and self._kept is not None:
            for entry, location in self._kept.of(followed.reference)[:1]:
                if entry.version == found.version:
                    keep_if_possible(self._kept, location, run_id=found.run_id)

    def _take(self, followed: _Followed, found: ModelVersion) -> None:
        """Let a version in, if it can be had and passes; else keep the reason."""
        with tempfile.TemporaryDirectory(prefix="reclaim-model-") as folder:
            try:
                location = self._fetch(followed.reference, found, Path(folder))
            except ModelError as error:
                followed.refuse(found.version, without_credentials(error), _FETCH_AGAIN_S)
                return
            try:
                model = checked_model(location, self._settings)
                if self._closed.is_set():
                    return
                followed.hand_over(model)
            except ReclaimError as error:
                why = without_credentials(error).replace(str(location.folder), f"{found.name} version {found.version}")
                followed.refuse(found.version, why)
                return
            before = followed.named()
            followed.current = _Current(model, time.time(), found.run_id)
            followed.refused = None
            role = "serving" if followed is self._main else "scoring in the shadow"
            _LOG.info("%s %s (%s); before it: %s", role, followed.named(), followed.reference, before)
            if followed is self._main:
                keep_if_possible(self._kept, location, run_id=found.run_id)

    def _fetch(self, reference: str, found: ModelVersion, into: Path) -> ModelLocation:
        if is_folder(reference):
            return find_model(reference)
        kept = None if self._kept is None else self._kept.find(found.name, found.version, found.run_id)
        if kept is not None:
            return replace(kept, source=reference)
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
