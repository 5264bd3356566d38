"""Finds the machines that have room for a task, and what it would cost each of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from reclaim.data.core.parallel import in_parts
from reclaim.data.schema import RESOURCES
from reclaim.serving.answers.encode import resources
from reclaim.serving.answers.machine_sums import count, own_terms, sums_of
from reclaim.serving.answers.machines import about
from reclaim.serving.cell.task_record import machine_of
from reclaim.serving.models.scorer import MACHINE_PARTS
from reclaim.serving.wire.errors import INVALID, TOO_LARGE, RequestError
from reclaim.serving.wire.machine_schemas import MOST_PAIRS, CandidateFit, FitAnswer, Place
from reclaim.training.machines.following import LARGEST, margin_beyond
from reclaim.training.machines.terms import T_HELD, T_LIMIT
from reclaim.training.margins.margin import MARGIN_NAMES
from reclaim.training.margins.violation import overruns

if TYPE_CHECKING:
    from reclaim.serving.answers.machine_sums import MachineSums
    from reclaim.serving.cell.tracker import Tracker
    from reclaim.serving.models.scorer import Scorer
    from reclaim.serving.settings import ServingSettings
    from reclaim.serving.wire.machine_schemas import FitRequest
    from reclaim.serving.wire.schemas import ResourceLimit, Resources, Units

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]


@dataclass(frozen=True)
class _Candidates:
    """Tasks to place, ``c`` of them.

    Attributes
    ----------
    key : int64, shape (c, 2)
        -1 for one without a name.
    terms, counted : float64, shape (c, n_resources, N_TERMS)
        What it would count for a machine, and what it counts for its own: nothing where its limit is unknown there.
    machine : int64, shape (c,)
        Machine that it is on, or -1.
    """

    key: Ids
    terms: Floats
    counted: Floats
    machine: Ids


def fit(
    tracker: Tracker,
    request: FitRequest,
    settings: ServingSettings,
    units: Units,
    threads: int = 1,
    left: threading.Event | None = None,
) -> FitAnswer:
    """Return, for each candidate, the machines with room for it, at least cost first; ties by the machine's id.

    Parameters
    ----------
    tracker : Tracker
    request : FitRequest
    settings : ServingSettings
    units : Units
    threads : int
        The answer does not depend on it.
    left : threading.Event or None
        Set once the client has left: the rest is not computed.

    Raises
    ------
    ClientLeftError
        The client left meanwhile.
    RequestError
        A machine has no capacity or is named twice, the margin is unknown, or there are too many pairs.
    """
    machine, capacity = _capacities(request)
    found, candidates = _state(request, tracker, settings, machine, left)
    if machine is None:
        machine = found.machine
        capacity = np.broadcast_to(capacity, (len(machine), len(RESOURCES)))
    if len(machine) * len(request.candidates) > MOST_PAIRS:
        message = (
            f"{len(request.candidates)} candidates on {len(machine)} machines: at most {MOST_PAIRS} pairs; "
            "ask for fewer candidates, or name machines"
        )
        raise RequestError(TOO_LARGE, "too_many_pairs", message, field="candidates")
    margin, budget = _budget_of(request, found.scorer, settings)
    asked = _asked(found, margin, budget)
    each = zip(found.estimator.curves, asked, strict=True)
    places = _Places(found, machine, capacity, [margin_beyond(curve, probability) for curve, probability in each])
    answers: list[CandidateFit | None] = [None] * len(candidates.key)

    def run(part: int, parts: int) -> None:
        for c in range(part, len(answers), parts):
            if left is None or not left.is_set():
                answers[c] = places.of(candidates, c, request.most)

    in_parts(run, len(machine) * len(answers), threads)
    return FitAnswer(
        **about(found, units), margin=margin, budget=budget, asked=resources(asked), machines=len(machine),
        candidates=[answer for answer in answers if answer is not None],
    )  # fmt: skip


class _Places:
    """Machines with their sums and capacities; shapes (m,), (m, n_resources, N_TERMS), (m, n_resources)."""

    def __init__(self, found: MachineSums, machine: Ids, capacity: Floats, margins: Sequence[float]) -> None:
        self._machine, self._capacity, self._found = machine, capacity, found
        estimator = found.estimator
        self._peak: Callable[[Floats], Floats] = lambda sums: estimator.at(margins, sums)
        self._sums = found.of(machine)
        self._now = self._peak(self._sums)

    def of(self, candidates: _Candidates, c: int, most: int) -> CandidateFit:
        """Return the places of one candidate: ``most`` of those with room."""
        terms, at = candidates.terms[c], int(candidates.machine[c])
        limit = terms[:, T_LIMIT] + terms[:, T_HELD]
        peak = self._peak(self._sums + terms)
        cost = peak - self._now
        room = np.flatnonzero(~overruns(peak, self._capacity).any(axis=1) & (self._machine != at))
        share = (cost[room] / limit).mean(axis=1)
        if len(room) > most:  # machines are in order: equal shares stay so
            least = np.flatnonzero(share <= np.partition(share, most - 1)[most - 1])
        else:
            least = np.arange(len(room))
        best = least[np.argsort(share[least], kind="stable")][:most]
        named = candidates.key[c, 0] >= 0
        return CandidateFit(
            collection_id=int(candidates.key[c, 0]) if named else None,
            instance_index=int(candidates.key[c, 1]) if named else None,
            limit=resources(limit),
            known=bool((terms[:, T_LIMIT] > 0).any()),
            machine_id=None if at < 0 else at,
            freed=None if at < 0 else self._freed(at, candidates.counted[c]),
            with_room=len(room),
            places=[
                Place(
                    machine_id=int(self._machine[room[k]]),
                    peak=resources(peak[room[k]]),
                    cost=resources(cost[room[k]]),
                    share=float(share[k]),
                )
                for k in best
            ],
        )  # fmt: skip

    def _freed(self, machine: int, terms: Floats) -> Resources:
        """Return the amount by which the peak of a machine falls once a task of these terms has left."""
        sums = self._found.of(np.array([machine]))
        without = self._peak(np.maximum(sums - terms, 0.0))  # rounding would leave less than nothing
        return resources(np.maximum(self._peak(sums) - without, 0.0)[0])


def _state(
    request: FitRequest, tracker: Tracker, settings: ServingSettings, machine: Ids | None, left: threading.Event | None
) -> tuple[MachineSums, _Candidates]:
    """Return the sums of the machines, of those that candidates are on too, and the candidates; all of one model."""
    while True:
        candidates, scorer = _candidates(request, tracker, settings)
        on = candidates.machine[candidates.machine >= 0]
        named = None if machine is None else np.union1d(machine, on).tolist()
        found = sums_of(tracker, settings, named, horizon_s=request.horizon_s, left=left)
        if found.scorer is scorer:
            return found, candidates


def _candidates(request: FitRequest, tracker: Tracker, settings: ServingSettings) -> tuple[_Candidates, Scorer]:
    """Return the candidates: known tasks with what they count, others with their limit, which counts whole."""
    names = [(-1, -1) if c.collection_id is None else (c.collection_id, c.instance_index) for c in request.candidates]
    key, horizon_s = np.array(names, np.int64), request.horizon_s
    known = tracker.look(key, with_x=horizon_s is not None, parts=MACHINE_PARTS)
    terms = own_terms(known, horizon_s)
    count(known, terms, settings)
    counted = terms.copy()
    for k, candidate in enumerate(request.candidates):
        if not terms[k].any():  # it, or its limit, is unknown
            terms[k, :, T_HELD] = _amounts(candidate.limit)
    return _Candidates(known.key, terms, counted, machine_of(known.task)), known.scorer


def _capacities(request: FitRequest) -> tuple[Ids | None, Floats]:
    """Return the named machines, ascending, shape (m,), and their capacities (m, n_resources); None: one for all."""
    common = request.capacity
    if request.machines is None:
        if common is None:
            message = "capacity: required where no machines are named"
            raise RequestError(INVALID, "no_capacity", message, field="capacity")
        return None, _amounts(common)
    machine = np.array([m.machine_id for m in request.machines], np.int64)
    capacity = np.empty((len(machine), len(RESOURCES)))
    for k, m in enumerate(request.machines):
        own = common if m.capacity is None else m.capacity
        if own is None:
            message = f"machines[{k}].capacity: required, as there is no common `capacity`"
            raise RequestError(INVALID, "no_capacity", message, field=f"machines[{k}].capacity", row=k)
        capacity[k] = _amounts(own)
    order = np.argsort(machine, kind="stable")
    twice = np.flatnonzero(machine[order][1:] == machine[order][:-1])
    if len(twice):
        k = int(order[twice[0] + 1])
        message = f"machines[{k}].machine_id: {machine[k]} is named twice"
        raise RequestError(INVALID, "repeated_machine", message, field=f"machines[{k}].machine_id", row=k)
    return machine[order], capacity[order]


def _budget_of(request: FitRequest, scorer: Scorer, settings: ServingSettings) -> tuple[str | None, float]:
    """Return the margin, None where a budget is given, and the budget."""
    if request.budget is not None:
        if request.margin is not None:
            message = "budget: give a margin or a budget, not both"
            raise RequestError(INVALID, "margin_and_budget", message, field="budget")
        if request.budget > LARGEST:
            message = (
                f"budget: the peaks of machines are known for budgets of at most {LARGEST:g}, got {request.budget:g}"
            )
            raise RequestError(INVALID, "budget_too_large", message, field="budget")
        return None, request.budget
    margin = settings.margin if request.margin is None else request.margin
    if margin not in MARGIN_NAMES:
        message = f"margin: expected one of {', '.join(MARGIN_NAMES)}, got {margin!r}"
        raise RequestError(INVALID, "unknown_margin", message, field="margin")
    return margin, scorer.budgets.by_margin[margin]


def _asked(found: MachineSums, margin: str | None, budget: float) -> tuple[float, ...]:
    """Return the current probabilities, by resource, for a margin or a budget."""
    if margin is None:
        return found.margins.probability(budget)
    return tuple(found.margins.asked[MARGIN_NAMES.index(margin)].tolist())


def _amounts(limit: ResourceLimit) -> Floats:
    return np.array([getattr(limit, resource) for resource in RESOURCES])
