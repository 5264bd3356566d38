"""Assembles the parts of the service, settings, model, memory and metrics, for the routes and the guard."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Final

from reclaim.data.core.parallel import THREADS
from reclaim.data.errors import StoreError
from reclaim.data.schema import DAY_US
from reclaim.serving.answers.encode import cell_prices, machine_margins
from reclaim.serving.answers.machine_sums import CellTotals
from reclaim.serving.answers.stateful import stale_after_us
from reclaim.serving.cell.advice import prices_apart, worth_training
from reclaim.serving.cell.clock import CellClock
from reclaim.serving.cell.tracker import FORMAT, Tracker
from reclaim.serving.models.keeper import ModelKeeper
from reclaim.serving.models.scorer import Scorer, violations_of
from reclaim.serving.monitoring.metrics import Metrics, machine_margins_shown, machines_shown, prices_shown
from reclaim.serving.monitoring.watch import Watch
from reclaim.serving.settings import cell_folder
from reclaim.serving.warm_up import warm_up
from reclaim.serving.wire.cell_schemas import StateInfo
from reclaim.serving.wire.readiness import Readiness
from reclaim.serving.wire.schemas import Units
from reclaim.serving.writing.queue import SmallCallMonitor
from reclaim.serving.writing.writer import Writer
from reclaim.training.margins.margin import MARGIN_NAMES, Budgets

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from reclaim.serving.models.loader import LoadedModel
    from reclaim.serving.monitoring.metrics import Shown
    from reclaim.serving.settings import ServingSettings
    from reclaim.serving.storage.store import Store

log = logging.getLogger(__name__)

_IN_USE_S: Final = 86_400.0
"""Time in seconds for which a margin counts as used after a request for it: some callers ask once a day."""


class Runtime:
    """The parts of the service that requests use.

    Parameters
    ----------
    settings : ServingSettings
    on_fault : callable
        Called after a fault of the service that prevents all further writes.

    Raises
    ------
    ModelError
        No model can be loaded.
    """

    def __init__(self, settings: ServingSettings, on_fault: Callable[[], object] = lambda: None) -> None:
        self.settings = settings
        self.units = Units(cpu=settings.cpu_unit, memory=settings.memory_unit)
        self.metrics = Metrics()
        self.requests_under_way = 0
        self.large_answers: Any = None
        self._asked_at_s: dict[str, float] = {}
        self._other_formats: list[str] = []
        self._warned_of_units = {"stateless": False, "cell": False}
        self.small_calls = SmallCallMonitor()
        self.watch = Watch(settings.lateness_s)
        self.keeper = ModelKeeper(
            settings, promote=self._promote, shadow=self._set_shadow, refused=lambda: self.metrics.promotion("refused")
        )
        model = self.keeper.load()
        warm_up(model, settings)
        clock = CellClock(settings, lambda: time.time_ns() // 1_000)
        self.tracker = Tracker(settings, clock, THREADS)
        self._totals = CellTotals(self.tracker, settings)
        self.store, self._store_error = self._open_store()
        self.writer = Writer(
            self.tracker, self.store, self.metrics, self.watch, settings, on_fault, self._check_units
        )  # fmt: skip
        if self._store_error is None:
            self.writer.start(self._scorer(model))
        else:
            self.writer.state = self._store_error
        self.metrics.show(self._shown)
        self.metrics.show(self.watch.shown)
        self.keeper.watch()

    def close(self) -> None:
        """Finish the queued writes, and release all resources."""
        self.keeper.close()
        self.writer.close()

    def readiness(self) -> Readiness:
        """Return whether requests can be answered, and the problems of state, store and model."""
        model = self.keeper.status()
        if self.watch.shadow_problem is not None:
            model = replace(model, shadow_problem=self.watch.shadow_problem)
        notes = [] if self.store is None else list(self.store.recovered.notes)
        body: dict[str, Any] = {
            "ready": self.writer.state == "ok",
            "state": self.writer.state,
            "store": self._store_status,
            "clock": self.tracker.clock.problem or "ok",
            "amounts": self._other_units or "ok",
            "notes": notes,
            "other_formats": self._other_formats,
            "tracked": len(self.tracker),
            "model": asdict(model),
        }
        return Readiness(self.writer.state == "ok", body)

    def asked_for(self, margin_of_tier: NDArray[np.int64]) -> None:
        """Record that reservations of the cell are answered under margins, positions in ``MARGIN_NAMES``."""
        now_s = time.monotonic()
        for position in set(margin_of_tier.tolist()):
            self._asked_at_s[MARGIN_NAMES[position]] = now_s

    def _in_use(self, margin: str) -> bool:
        asked_at_s = self._asked_at_s.get(margin, -math.inf)
        return margin == self.settings.margin or time.monotonic() - asked_at_s < _IN_USE_S

    def warn_of_units(self, apart: str | None) -> None:
        """Log once that amounts of a stateless request seem to be in another unit than the model's."""
        if apart and not self._warned_of_units["stateless"]:
            self._warned_of_units["stateless"] = True
            log.warning("stateless request: %s", apart)

    def request_done(self, endpoint: str, method: str, status: int, seconds: float) -> None:
        """Count an answered request."""
        self.metrics.request(endpoint, method, status, seconds)

    def state_info(self) -> StateInfo:
        """Return the sizes and the condition of the service's memory."""
        tracker, store = self.tracker, self.store
        snapshotter = self.writer.snapshotter
        saved = None if snapshotter is None else snapshotter.saved_at
        return StateInfo(
            tracked=len(tracker),
            collections_without_estimation=tracker.n_opted_out,
            clock_us=None if tracker.clock_us < 0 else tracker.clock_us,
            bytes=len(tracker) * tracker.bytes_per_task,
            bytes_per_task=tracker.bytes_per_task,
            durable=store is not None,
            store=self._store_status,
            notes=[] if store is None else list(store.recovered.notes),
            log_bytes=0 if store is None else store.log_bytes,
            snapshot_bytes=0 if store is None else store.snapshot_bytes,
            snapshot_age_s=None if saved is None else time.time() - saved,
            waiting=self.writer.waiting,
            follows=self.settings.follow,
            advice=self._advice(),
            prices=cell_prices(tracker.prices) if self.writer.state == "ok" else [],
            machine_margins=machine_margins(tracker.prices.machines) if self.writer.state == "ok" else [],
        )

    def _advice(self) -> list[str]:
        """Return what to do about the model of this cell, in words."""
        begun_us = self.tracker.size.begun_us
        if self.writer.state != "ok" or begun_us < 0:
            return []
        if not self.keeper.served.bundle.portable:
            apart = self._other_units
            return [*([] if apart is None else [apart]), *prices_apart(self.tracker.prices)]
        days = (self.tracker.clock_us - begun_us) / DAY_US
        advice = worth_training(days, len(self.tracker))
        return [] if advice is None else [advice]

    @property
    def _other_units(self) -> str | None:
        """Resources of the cell whose amounts seem to be in another unit than the model's, in words, or None."""
        return self.keeper.served.bundle.other_units(self.tracker.size.mean_limit)

    @property
    def _store_status(self) -> str:
        if self.settings.state is None:
            return "memory only"
        return self._store_error or self.writer.store_problem or "ok"

    def _open_store(self) -> tuple[Store | None, str | None]:
        """Return the store, and why it cannot be opened; the service then stays up and reports it."""
        if self.settings.state is None:
            return None, None
        from reclaim.serving.storage.formats import place_of
        from reclaim.serving.storage.store import Store

        try:
            first = cell_folder(self.settings.state)
            place = place_of(first, FORMAT)
            store = Store.open(
                place.folder, state_version=FORMAT, sync=self.settings.sync, repair=self.settings.repair,
                lock_too=first,
            )  # fmt: skip
        except (StoreError, OSError) as error:
            log.error("%s", error)
            return None, str(error)
        self._other_formats = [
            f"{path} has a state of format {version}, which this release leaves for the one that wrote it; delete it "
            f"once you will not go back to it. The state in use, of format {FORMAT}, is in {place.folder}: tasks "
            "reserve their limit until they have history there, which `reclaim feed` sends by itself"
            for path, version in place.others.items()
        ]
        if place.others and store.recovered.empty:
            store.recovered.notes.append(
                f"The cell begins again in {place.folder}, as no state of format {FORMAT} is there."
            )
        for line in self._other_formats:
            log.warning("%s", line)
        for note in store.recovered.notes:
            log.warning("%s", note)
        return store, None

    def _scorer(self, model: LoadedModel) -> Scorer:
        return Scorer(model, self.settings.cell, THREADS)

    def _check_units(self, scorer: Scorer) -> None:
        """Warn once where the cell's amounts seem to be in another unit than the model's."""
        apart = scorer.model.bundle.other_units(self.tracker.size.mean_limit)
        if apart is not None and not self._warned_of_units["cell"]:
            log.warning("%s", apart)
        self._warned_of_units["cell"] = apart is not None

    def _promote(self, model: LoadedModel) -> None:
        self.writer.promote(self._scorer(model))
        self.metrics.promotion("promoted")

    def _set_shadow(self, model: LoadedModel | None) -> None:
        self.writer.shadow(None if model is None else self._scorer(model))

    def _shown(self) -> Shown:
        """Return the values that are read when Prometheus asks."""
        info, model = self.state_info(), self.keeper.status()
        now = time.time()
        clock_s = float("nan") if info.clock_us is None else info.clock_us / 1e6
        unix = self.settings.clock == "unix"
        fresh_us = self.tracker.clock.present_us - stale_after_us(self.keeper.served.bundle.horizon_s, self.settings)
        roles: dict[tuple[str, ...], float] = {("served", model.name, model.version, model.reference): 1.0}
        loaded_at: dict[tuple[str, ...], float] = {("served",): model.loaded_at}
        if model.shadow_name is not None and model.shadow_version is not None and model.shadow_loaded_at is not None:
            roles["shadow", model.shadow_name, model.shadow_version, self.settings.shadow] = 1.0
            loaded_at["shadow",] = model.shadow_loaded_at
        served = self.keeper.served
        given = served.bundle.trained.get("settings", {}).get("budgets")
        budgets = Budgets(**given).by_margin if given else violations_of(served)
        return {
            "ready": float(self.writer.state == "ok"),
            "requests_under_way": float(self.requests_under_way),
            "writes_waiting": float(info.waiting),
            "tasks_tracked": float(info.tracked),
            "tasks_stale": float(self.tracker.silent_since(fresh_us)),
            "tasks_room": float(self.settings.max_tracked - info.tracked),
            "state_bytes": {("memory",): info.bytes, ("log",): info.log_bytes, ("snapshot",): info.snapshot_bytes},
            "snapshot_age_seconds": float("nan") if info.snapshot_age_s is None else info.snapshot_age_s,
            "snapshot_duration_seconds": float("nan")
            if self.writer.snapshotter is None
            else self.writer.snapshotter.save_s,
            "store_ok": float(info.store in ("ok", "memory only")),
            "recovered_notes": float(len(info.notes)),
            "model_info": roles,
            "model_loaded_timestamp_seconds": loaded_at,
            "model_fallback": float(model.from_disk or model.fallback is not None),
            "registry_reachable": float(not model.registry.startswith("unreachable")),
            "margin_budget_ratio": {(name,): float(budgets[name]) for name in MARGIN_NAMES if name in budgets},
            "margin_in_use": {(name,): float(self._in_use(name)) for name in MARGIN_NAMES},
            **prices_shown(info.prices),
            **machine_margins_shown(info.machine_margins),
            **(machines_shown(*self._totals.now()) if self.writer.state == "ok" else {}),
            "mean_limit_ratio": {
                (r,): ratio for r, ratio in served.bundle.mean_limit_ratio(self.tracker.size.mean_limit).items()
            },
            "clock_ok": float(self.tracker.clock.problem is None),
            "clock_refused_ratio": self.tracker.clock.claims.refused_share,
            "clock_timestamp_seconds": clock_s,
            "clock_lag_seconds": now - clock_s if unix else float("nan"),
        }
