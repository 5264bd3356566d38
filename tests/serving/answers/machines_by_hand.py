"""Small cells whose sums are known by hand, and what the service answers for their machines."""

from __future__ import annotations

import json
import math
from typing import Any

import httpx
import numpy as np

from reclaim.data.schema import RESOURCES
from reclaim.serving.answers.machine_fit import fit
from reclaim.serving.answers.machine_sums import MachineSums, sums_of
from reclaim.serving.answers.machines import as_json
from reclaim.serving.settings import ServingSettings
from reclaim.serving.wire.errors import parse_body
from reclaim.serving.wire.machine_schemas import FitAnswer, FitRequest, MachinesAnswer
from reclaim.serving.wire.schemas import Units
from reclaim.training.machines.curve import N_INPUTS, MachineCurve
from reclaim.training.machines.terms import N_SHARES, S_BAND, S_MEAN, S_NEW
from tests.serving.cell_fixtures import Json, Memory, S

UNITS = Units()
ALONE = ServingSettings(clock="trace", follow=False, ahead_s=1e9)
E_BASELINE = -math.log(0.001)
"""Exponent of the bound at the budget of the baseline margin."""
FITTED = MachineCurve(tuple(0.01 * k for k in range(38)), (0.1, 0.9, 0.0, 0.1, *(0.0,) * (N_INPUTS - 4)))
"""A location of a tenth of the limits, nine tenths of the usage and a tenth of the newcomers."""


def foresee(memory: Memory, amounts: dict[int, float], *, new: tuple[int, ...] = ()) -> None:
    """Let tasks of a limit of 1, by collection, use an amount of each resource, foreseen to go on so."""
    tracker = memory.tracker
    assert tracker._scores is not None
    for collection, amount in amounts.items():
        slot = tracker.find(np.array([[collection, 0]]))
        shares = np.zeros(N_SHARES, np.float32)
        shares[[S_MEAN, *range(S_BAND, N_SHARES)]], shares[S_NEW] = amount, collection in new
        tracker._scores.shares[slot] = shares
        tracker._tasks["usage"][slot], tracker._tasks["percentiles"][slot] = amount, math.nan


def sums(memory: Memory, machines: list[int] | None = None) -> MachineSums:
    return sums_of(memory.tracker, memory.settings, machines)


def answered(memory: Memory, machines: list[int] | None = None) -> MachinesAnswer:
    """Return the answer that a caller reads: a field too many, too few or of another kind is refused."""
    return MachinesAnswer.model_validate_json(as_json(sums(memory, machines), UNITS, without_machine=0))


def fitted_to(memory: Memory, **request: Any) -> FitAnswer:
    body = json.dumps(request).encode()
    return fit(memory.tracker, parse_body(body, FitRequest), memory.settings, UNITS)


def both(amount: float) -> Json:
    return dict.fromkeys(RESOURCES, amount)


def write_five(url: str) -> None:
    told = [
        {"collection_id": task, "start_us": 300 * S * at, "end_us": 300 * S * (at + 1), "cpu_mean": 0.1 * task,
         "memory_max": 0.1 * task, "limit": both(2.0), **({} if task == 6 else {"machine_id": 10 * task})}
        for at in range(3) for task in range(1, 7)
    ]  # fmt: skip
    assert httpx.post(f"{url}/v1/usage", json={"windows": told}, timeout=120).json()["taken"] == len(told)


GOOD: Json = {"candidates": [{"limit": both(0.5)}], "capacity": both(5.0)}
"""A question that is answered."""
