"""The canary: synthetic histories that a model must answer sensibly before it serves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from reclaim.data import windows as w
from reclaim.data.errors import ModelError
from reclaim.data.schema import TIERS, UNKNOWN_ID
from reclaim.data.windows import Windows, empty_windows
from reclaim.features.registry import SLOT_US
from reclaim.training.margins.margin import MARGIN_NAMES

if TYPE_CHECKING:
    from reclaim.training.bundle import Bundle
    from reclaim.training.estimators.base import Estimate, Forecast
    from reclaim.training.models.forecaster import Heads

_SEED: Final = 20_150_421
_GAP_US: Final = 6 * 3_600_000_000
"""Length of each gap of a history with gaps: longer than every horizon except a day's."""
_NOW_US: Final = 40 * 86_400_000_000
"""End of all histories."""
_BEFORE_THE_TRACE, _UNTOLD = 0, UNKNOWN_ID
"""Values of ``Windows.scheduled_us`` that are not times."""


class _Task(NamedTuple):
    """One synthetic task: limits without a unit, and ``used`` as a share of them."""

    collection: int
    tier: int
    cpu: float
    memory: float
    n_windows: int
    used: float
    scheduled_us: int | None = None  # None: when its first window begins
    gap_every: int = 0  # windows; 0: never
    measured: str = "all"  # or "means", or "gaps": every third window holds nothing


_FREE, _BEB, _MID, _PROD, _MON = range(len(TIERS))
_TASKS: Final = (
    _Task(1, _FREE, 0.002, 0.001, 1, 0.3),
    _Task(2, _BEB, 0.03, 0.02, 3, 0.9),
    _Task(3, _MID, 0.25, 0.1, 40, 0.4, gap_every=7),
    _Task(4, _PROD, 0.5, 0.3, 120, 0.5, scheduled_us=_BEFORE_THE_TRACE),
    _Task(4, _PROD, 0.5, 0.3, 60, 0.2),
    _Task(5, _MON, 1.0, 0.9, 30, 1.3),
    _Task(6, UNKNOWN_ID, 0.1, 0.1, 24, 0.5, scheduled_us=_UNTOLD, measured="means"),
    _Task(7, _PROD, 0.1, 0.2, 24, 0.6, gap_every=5, measured="gaps"),
    _Task(8, _FREE, 0.1, 0.1, 12, 0.0),
    _Task(9, _MID, 16.0, 64e9, 36, 0.1),
)
"""Tasks of every tier: small and huge, minutes and hours old, idle, above the limit, with gaps, hardly measured."""


def canary_batch() -> tuple[NDArray[np.int64], Windows]:
    """Return the histories in time order; always the same ones.

    Returns
    -------
    slot : int64, shape (n,)
        The task of each row, from 0.
    windows : Windows
        ``n`` rows.
    """
    random = np.random.default_rng(_SEED)
    histories = [_history(task, random) for task in _TASKS]
    slot = np.repeat(np.arange(len(_TASKS), dtype=np.int64), [task.n_windows for task in _TASKS])
    windows = w.concatenate(histories)
    order = np.lexsort((slot, windows.end_us))
    return slot[order], windows.take(order)


def _history(task: _Task, random: np.random.Generator) -> Windows:
    n = task.n_windows
    out = empty_windows(n)
    back = np.arange(n)[::-1]
    gaps = back // task.gap_every if task.gap_every else np.zeros(n, np.int64)
    out.end_us[:] = _NOW_US - back * SLOT_US - gaps * _GAP_US
    out.start_us[:] = out.end_us - SLOT_US
    out.start_us[0] += SLOT_US // 2  # it began between two windows
    out.scheduled_us[:] = out.start_us[0] if task.scheduled_us is None else task.scheduled_us
    out.collection_id[:] = task.collection
    out.instance_index[:] = n  # two tasks of one collection differ in it
    out.tier[:] = task.tier
    out.limit[:] = task.cpu, task.memory
    share = np.sort(task.used * random.uniform(0.5, 1.5, (n, len(w.LEVELS))), axis=1)
    out.usage[:, w.CPU_MEAN] = share.mean(axis=1) * task.cpu
    out.usage[:, w.MEMORY_MEAN] = task.used * random.uniform(0.7, 0.9, n) * task.memory
    if task.measured != "means":
        out.percentiles[:] = share * task.cpu
        out.usage[:, w.CPU_MAX] = share[:, -1] * task.cpu
        out.usage[:, w.MEMORY_MAX] = out.usage[:, w.MEMORY_MEAN] * 1.1
        out.usage[:, w.PAGE_CACHE] = out.usage[:, w.MEMORY_MEAN] * 0.2
        out.usage[:, w.CPI] = random.uniform(0.5, 4.0, n)
        out.usage[:, w.MAI] = random.uniform(0.0, 0.1, n)
    if task.measured == "gaps":
        out.usage[::3] = np.nan
        out.percentiles[::3] = np.nan
    return out


def check_answers(bundle: Bundle) -> None:
    """Check a model's answers to the canary batch at each margin, in one call and in two.

    Raises
    ------
    ModelError
        An answer is not finite or out of its bounds, a higher price reserves less, or two calls answer differently than
        one; the message names the check.
    """
    slot, windows = canary_batch()
    answers = {name: bundle.estimator(name).update(slot, windows) for name in MARGIN_NAMES}
    for name, estimate in answers.items():
        reserved = estimate.reservation
        _expect(f"finite {name} reservations", np.isfinite(reserved))
        _expect(f"{name} reservations of at least 0", reserved >= 0)
        _expect(f"{name} reservations of at most the limit", reserved <= windows.limit)
        if estimate.forecast is not None:
            _check_forecast(estimate.forecast.take(_measured(slot, windows)), bundle.forecaster.heads)
    baseline, medium, aggressive = (answers[name].reservation for name in MARGIN_NAMES)
    _expect("no baseline reservation below the medium one", baseline >= medium)
    _expect("no medium reservation below the aggressive one", medium >= aggressive)
    for name, estimate in answers.items():
        _expect(f"the same {name} answers when asked again", _same(estimate, _in_two(bundle, name, slot, windows)))


def _measured(slot: NDArray[np.int64], windows: Windows) -> NDArray[np.int64]:
    """Return the rows whose tasks have been measured by then: for the others a model may have no forecast."""
    known = np.isfinite(windows.usage).any(axis=1)
    first = np.full(int(slot.max()) + 1, len(slot))
    np.minimum.at(first, slot[known], np.flatnonzero(known))
    return np.flatnonzero(np.arange(len(slot)) >= first[slot])


def _check_forecast(forecast: Forecast, heads: Heads) -> None:
    survival, quantiles = forecast.survival[:, heads.targets], forecast.quantiles[:, heads.targets]
    oom = forecast.oom_probability[:, heads.oom]
    _expect("probabilities of a demand between 0 and 1", (survival >= 0) & (survival <= 1))
    _expect("curves that do not rise", np.diff(survival, axis=-1) <= 0)
    _expect("finite quantiles", np.isfinite(quantiles))
    _expect("quantiles that rise with their level", np.diff(quantiles, axis=-1) >= 0)
    _expect("out-of-memory probabilities between 0 and 1", (oom >= 0) & (oom <= 1))


def _in_two(bundle: Bundle, margin: str, slot: NDArray[np.int64], windows: Windows) -> list[Estimate]:
    """Return the answers of a fresh estimator to the first half of the rows, then to the second."""
    estimator, half = bundle.estimator(margin), len(slot) // 2
    return [estimator.update(slot[rows], windows.take(rows)) for rows in (slice(half), slice(half, None))]


def _same(whole: Estimate, parts: list[Estimate]) -> NDArray[np.bool_]:
    """Return for each array whether its bits are those of its concatenated parts."""

    def arrays(estimate: Estimate) -> list[NDArray[np.generic]]:
        forecast = estimate.forecast
        of_estimate: list[NDArray[np.generic]] = [estimate.reservation, estimate.rule]
        if forecast is None:
            return of_estimate
        return [*of_estimate, forecast.survival, forecast.quantiles, forecast.oom_probability]

    joined = [np.concatenate(pieces) for pieces in zip(*map(arrays, parts), strict=True)]
    return np.array([a.tobytes() == b.tobytes() for a, b in zip(arrays(whole), joined, strict=True)])


def _expect(rule: str, right: NDArray[np.bool_]) -> None:
    if not right.all():
        raise ModelError(f"the canary batch: expected {rule}, got {np.sum(~right)} of {right.size} otherwise")
