"""Small cells whose sums are known by hand, and what the service answers for their machines."""

from __future__ import annotations

import json
import math
from dataclasses import replace
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
from reclaim.training.machines.terms import (
    N_SHARES,
    S_BAND,
    S_MEAN,
    S_NEW,
    T_BAND,
    T_HELD,
    T_LIMIT,
    T_NEW,
    T_USAGE,
)
from reclaim.training.margins.margin import MARGIN_NAMES
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


def uneven(memory: Memory) -> MachineSums:
    """Return the sums of two machines in which no two resources, margins or machines have the same numbers."""
    found = sums(memory)
    terms = found.sums.copy()
    terms[..., T_LIMIT], terms[..., T_HELD] = [[2.0, 8.0], [4.0, 0.0]], [[0.0, 3.0], [0.5, 7.0]]
    terms[..., T_NEW], terms[..., T_BAND:] = [[0.0, 1.5], [0.25, 0.75]], 0.0
    terms[..., T_USAGE] = 0.0  # no guard
    margins = replace(
        found.margins,
        asked=np.array([[0.001, 0.0005], [0.002, 0.0005], [0.005, 0.01]]),
        lowered=np.array([[1.0, 1.0], [1.0, 1.0], [0.25, 1.0]]),
        recent=np.array([[math.nan, math.nan], [math.nan, 0.03], [0.0123, 0.5]]),
        machine=np.array([7, 9]),
        judged_of=np.array([[31, 32], [41, 42]]),
        violated_of=np.arange(12).reshape(2, len(MARGIN_NAMES), 2),
    )
    return replace(
        found, margins=margins, sums=terms, usage=np.array([[0.5, 1.0], [0.75, 1.25]]), tasks=np.array([5, 1]),
        whole=np.array([1, 2]), without_machine=6, tracked=12,
    )  # fmt: skip


def write_five(url: str) -> None:
    told = [
        {"collection_id": task, "start_us": 300 * S * at, "end_us": 300 * S * (at + 1), "cpu_mean": 0.1 * task,
         "memory_max": 0.1 * task, "limit": both(2.0), **({} if task == 6 else {"machine_id": 10 * task})}
        for at in range(3) for task in range(1, 7)
    ]  # fmt: skip
    assert httpx.post(f"{url}/v1/usage", json={"windows": told}, timeout=120).json()["taken"] == len(told)


GOOD: Json = {"candidates": [{"limit": both(0.5)}], "capacity": both(5.0)}
"""A question that is answered."""
