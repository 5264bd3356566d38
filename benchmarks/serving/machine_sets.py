"""Times the estimator of machines on sets of tasks in bulk, in this process, on one core."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from reclaim.data.schema import RESOURCES
from reclaim.serving.models.loader import load_model
from reclaim.training.machines.estimator import BOUND, MachineEstimator
from reclaim.training.machines.terms import (
    N_TERMS,
    PAST,
    RATES,
    T_BAND,
    T_HELD,
    T_LIMIT,
    T_MEAN,
    T_PASSED,
    T_PAST,
    T_SQUARES,
    T_USAGE,
)

SETS = 10_000
"""Sets of one call: those of a cell."""
_PER_SET = 25
_BUDGET = 0.01
_TIMES = 200


def time_sets(model: str) -> dict[str, Any]:
    """Return nanoseconds that a set of tasks takes, CPU and memory together: the least of many calls, and their median.

    ``peak`` is what is reserved for sets whose sums are at hand. ``with_candidate`` adds a task to each before that.
    """
    bundle = load_model(model).bundle
    ours = bundle.machine_estimator()
    made = {"of the model": ours, "bound": MachineEstimator(BOUND, ours.horizon_s, ours.mean_limit)}
    return {
        "sets": SETS, "budget": _BUDGET,
        "curves": ["bound" if curve.weights is None else "fitted" for curve in ours.curves],
        "ns": {name: _time(estimator) for name, estimator in made.items()},
    }  # fmt: skip


def _time(estimator: MachineEstimator) -> dict[str, dict[str, float]]:
    random = np.random.default_rng(0)
    sums = sum(_terms(SETS, estimator.mean_limit, random) for _ in range(_PER_SET))
    assert isinstance(sums, np.ndarray)
    candidate = _terms(1, estimator.mean_limit, random)
    return {
        "peak": _least(lambda: estimator.peak(sums, _BUDGET)),
        "with_candidate": _least(lambda: estimator.peak(sums + candidate, _BUDGET)),
    }


def _terms(n: int, mean_limit: tuple[float, ...], random: np.random.Generator) -> np.ndarray:
    """Return invented terms of tasks, shape (n, n_resources, N_TERMS), each larger than the one before it."""
    out = np.zeros((n, len(RESOURCES), N_TERMS))
    limit = np.array(mean_limit) * random.uniform(0.2, 1.8, (n, len(RESOURCES)))
    share = random.uniform(0.1, 0.4, (n, len(RESOURCES)))
    out[..., T_LIMIT], out[..., T_SQUARES], out[..., T_HELD] = limit, limit**2, 0.0
    out[..., T_USAGE], out[..., T_MEAN] = 0.8 * share * limit, share * limit
    for at, count in ((T_PAST, len(PAST)), (T_PASSED, T_BAND - T_PASSED), (T_BAND, len(RATES))):
        for k in range(count):
            out[..., at + k] = limit * (share + (0.9 - share) * (k + 1) / (count + 1))
    return out


def _least(call: Callable[[], object]) -> dict[str, float]:
    call()
    taken = []
    for _ in range(_TIMES):
        begin = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begin)
    return {"least": round(min(taken) / SETS * 1e9, 1), "median": round(float(np.median(taken)) / SETS * 1e9, 1)}
