"""Defines the estimator: windows in, a reservation per row out; the same object in replay and behind HTTP."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from types import MappingProxyType
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from reclaim.data.core.arrays import room_for
from reclaim.data.core.parallel import ROWS_WORTH_A_THREAD, in_parts
from reclaim.data.core.state import memory_of, state_of
from reclaim.data.errors import ConfigError
from reclaim.data.schema import RESOURCES
from reclaim.data.windows import Windows, demand
from reclaim.features.targets import HORIZONS_S

RULES: Final = ("limit", "model", "statistic", "startup", "jump", "cap", "unknown")
"""Rules that make a reservation.

``limit``: it is the limit by policy; ``model``: a learned prediction plus margin; ``statistic``: a statistical
estimate plus margin; ``startup``: the limit is held at first; ``jump``: usage passed the estimate; ``cap``: the
estimate passed the limit; ``unknown``: nothing is known of the task yet, so it keeps its limit.
"""
LIMIT, MODEL, STATISTIC, STARTUP, JUMP, CAP, UNKNOWN = range(len(RULES))

_BLOCK: Final = 6
"""Large calls are taken in the order of the slots, in blocks of two to the power of this: 16 bits identify the
block."""


Settings = Mapping[str, Any]
"""Arguments of an estimator by their names."""


def grid(**values: Sequence[Any]) -> tuple[Settings, ...]:
    """Return every combination of values of an estimator's settings; the first values of each come first."""
    return tuple(dict(zip(values, chosen, strict=True)) for chosen in product(*values.values()))


@dataclass(frozen=True)
class Forecast:
    """Forecast of a learned estimator, for a caller that wants more than the reservation.

    Attributes
    ----------
    survival : float32, shape (n, n_targets, n_horizons, n_thresholds)
        Probability that the demand over the horizon exceeds each threshold, falling along the last axis; targets in the
        order ``features.targets.TARGETS``; NaN for what is not fitted.
    thresholds : float32, shape (n, n_targets, n_thresholds)
        Over the limit, rising: those of ``models.survival.thresholds_of``.
    quantiles : float32, shape (n, n_targets, n_horizons, n_levels)
        Over the limit, read off the same curve, rising along the last axis; 1 stands for the limit and all above it.
    oom_probability : float64, shape (n, n_horizons)
        Probability of the derived out-of-memory label within each horizon.
    horizons_s : tuple of int
        Those of the axes of horizons, in seconds: all of ``features.targets.HORIZONS_S``, or the one asked for.
    """

    survival: NDArray[np.float32]
    thresholds: NDArray[np.float32]
    quantiles: NDArray[np.float32]
    oom_probability: NDArray[np.float64]
    horizons_s: tuple[int, ...] = HORIZONS_S

    def at(self, horizon_s: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return quantiles, shape (n, n_targets, n_levels), and OOM probability, shape (n,), at one horizon; views."""
        h = self.horizons_s.index(horizon_s)
        return self.quantiles[:, :, h], self.oom_probability[:, h]

    def take(self, rows: NDArray[np.int64] | NDArray[np.bool_] | slice) -> Forecast:
        """Return the chosen rows."""
        return replace(
            self, survival=self.survival[rows], thresholds=self.thresholds[rows], quantiles=self.quantiles[rows],
            oom_probability=self.oom_probability[rows],
        )  # fmt: skip

    def put(self, rows: NDArray[np.int64], other: Forecast) -> None:
        """Replace the chosen rows by those of a forecast of as many, over the same horizons."""
        for mine, theirs in (
            (self.survival, other.survival), (self.thresholds, other.thresholds), (self.quantiles, other.quantiles),
            (self.oom_probability, other.oom_probability),
        ):  # fmt: skip
            mine[rows] = theirs


@dataclass(frozen=True)
class Estimate:
    """The answer for ``n`` rows.

    Attributes
    ----------
    reservation : float64, shape (n, n_resources), unit of the limit
        Valid from the row's ``end_us`` until the task's next window. NaN only where the limit is unknown.
    rule : uint8, shape (n, n_resources)
        Position in ``RULES``.
    forecast : Forecast or None
        None from estimators that make none.
    """

    reservation: NDArray[np.float64]
    rule: NDArray[np.uint8]
    forecast: Forecast | None = None

    def take(self, rows: NDArray[np.int64] | NDArray[np.bool_] | slice) -> Estimate:
        """Return the chosen rows."""
        forecast = None if self.forecast is None else self.forecast.take(rows)
        return Estimate(self.reservation[rows], self.rule[rows], forecast)

    def where(self, mask: NDArray[np.bool_], reservation: NDArray[np.float64], rule: int) -> Estimate:
        """Return a copy in which the masked entries, shape (n, n_resources), are replaced under the given rule."""
        return replace(
            self,
            reservation=np.where(mask, reservation, self.reservation),
            rule=np.where(mask, np.uint8(rule), self.rule),
        )


class Estimator(ABC):
    """A fold over a task's windows: each row's answer depends only on that row and the task's earlier rows.

    State lives in the estimator, in one slot per task; a slot number is the caller's name for a task. How a history
    is cut into calls makes no difference, to the bit. An estimator keeps its parameters in public attributes, and its
    state in ``_memory``: arrays with a row per slot, of zeros where nothing is known.
    """

    CANDIDATES: ClassVar[tuple[Settings, ...]] = ({},)
    """Settings that are tried on validation rows (``margins.tune``), the published ones first; see ``grid``."""
    threads: int = 1
    """Threads for large calls; the answers do not depend on it."""
    _memory: Mapping[str, NDArray[Any]] = MappingProxyType({})
    _n_slots: int = 0

    @abstractmethod
    def update(self, slot: NDArray[np.int64], windows: Windows) -> Estimate:
        """Take windows and answer for each.

        Parameters
        ----------
        slot : int64, shape (n,)
            The task of each row, from 0; new numbers make room for themselves.
        windows : Windows
            ``n`` rows, those of one task in time order; never changed.
        """

    def state(self) -> dict[str, NDArray[Any]]:
        """Return copies of all it remembers, as plain arrays that ``np.savez`` takes without pickle."""
        return state_of(self._made_by, {name: array[: self._n_slots] for name, array in self._memory.items()})

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Forget everything and continue from what ``state`` returned, to the bit as if there had been no stop.

        Raises
        ------
        ConfigError
            Another kind, other parameters or other code made it.
        """
        memory = memory_of(self._made_by, self._memory, state)
        if memory:
            self._memory, self._n_slots = memory, len(next(iter(memory.values())))

    def _make_room(self, slot: NDArray[np.int64]) -> None:
        """Make a row in ``_memory`` for every slot."""
        self._n_slots = max(self._n_slots, int(slot.max(initial=-1)) + 1)
        self._memory = {name: room_for(array, self._n_slots) for name, array in self._memory.items()}

    def _in_parts(
        self,
        fold: Callable[..., object],
        slot: NDArray[np.int64],
        columns: Sequence[NDArray[Any]],
        out: NDArray[Any],
    ) -> None:
        """Call ``fold(slot, *columns, out)``, large calls part by part, in threads.

        Parts share no slot, and have the rows of a slot in the order given. Rows that are not in the order of their
        slots are brought into it first, roughly: random access to the memory of a large cell takes longer.

        Parameters
        ----------
        fold : callable
            Writes its last argument, which is in C order like all others.
        slot : int64, shape (n,)
        columns : sequence of arrays, shape (n, ...)
        out : array, shape (n, ...), in C order
        """
        columns = [np.ascontiguousarray(column) for column in columns]
        n, threads = len(slot), self.threads
        if n < ROWS_WORTH_A_THREAD:
            fold(slot, *columns, out)
            return
        block = (slot >> max(_BLOCK, self._n_slots.bit_length() - 16)).astype(np.uint16)
        rows = None if (block[:-1] <= block[1:]).all() else np.argsort(block, kind="stable")  # 16 bits: by radix
        if rows is not None:
            block = block[rows]
        cuts = [*(int(np.searchsorted(block, block[n * part // threads])) for part in range(threads)), n]

        def fold_part(part: int, _: int) -> None:
            mine = slice(cuts[part], cuts[part + 1])
            if rows is None:
                fold(slot[mine], *(column[mine] for column in columns), out[mine])
            else:
                fold(slot[rows[mine]], *(column.take(rows[mine], axis=0) for column in columns), out[mine])

        in_parts(fold_part, n, threads)
        if rows is not None:
            place = np.empty(n, np.int64)
            place[rows] = np.arange(n)
            out[:] = out.take(place, axis=0)

    @property
    def _made_by(self) -> str:
        parameters = {k: v for k, v in sorted(vars(self).items()) if not k.startswith("_") and k != "threads"}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in parameters.items())})"


class Wrapper(Estimator):
    """An estimator around an estimator that changes each answer by a pure function of the answer and its row."""

    def __init__(self, base: Estimator) -> None:
        self.base = base

    @abstractmethod
    def adjust(self, estimate: Estimate, windows: Windows) -> Estimate:
        """Return the changed answers; remembers nothing, so a replay may apply many to one base run."""

    def update(self, slot: NDArray[np.int64], windows: Windows) -> Estimate:
        """Take windows, call the base, adjust its answers."""
        return self.adjust(self.base.update(slot, windows), windows)

    def state(self) -> dict[str, NDArray[Any]]:
        """Return what the base remembers."""
        return self.base.state()

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Let the base continue from there."""
        self.base.restore(state)


def over_limit(windows: Windows) -> NDArray[np.float64]:
    """Return demand over the current limit; shape (n, n_resources), NaN where unknown or the limit is 0."""
    ratio = np.full(windows.limit.shape, np.nan)
    np.divide(demand(windows), windows.limit, out=ratio, where=windows.limit > 0)
    return ratio


def known_statistic(value: NDArray[np.float64]) -> Estimate:
    """Return the value as the reservation, (n, n_resources); NaN where it is not finite, and there the limit stands.

    A margin widens or narrows what an estimator says, not the limit of a task of which it says nothing.
    """
    known = np.isfinite(value)
    rule = np.where(known, np.uint8(STATISTIC), np.uint8(UNKNOWN))
    return Estimate(np.where(known, value, np.nan), rule)


def for_each_resource(name: str, values: Sequence[float]) -> tuple[float, ...]:
    """Return the values as a tuple.

    Raises
    ------
    ConfigError
        There is not one above 0 for each resource.
    """
    if len(values) != len(RESOURCES) or not all(value > 0 for value in values):
        raise ConfigError(f"{name} must be one number above 0 for each of {RESOURCES}, got {values}")
    return tuple(float(value) for value in values)
