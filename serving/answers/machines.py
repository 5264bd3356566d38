"""Answers for machines from the sums of their tasks, as JSON models and as a table, and explains one of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import TypeAdapter
from pydantic_core import to_json

from reclaim.data import schema as s
from reclaim.data.schema import RESOURCES
from reclaim.serving.answers.encode import known_or_none, machine_margins, model_name, resources
from reclaim.serving.wire.cell_schemas import MachineMargin, Step
from reclaim.serving.wire.machine_schemas import (
    Counts,
    MachineExplanation,
    MachineForecast,
    MachineOutcomes,
    MachineReservation,
    MachinesAnswer,
)
from reclaim.training.machines.terms import NEWCOMER_WINDOWS, T_LIMIT
from reclaim.training.margins.margin import MARGIN_NAMES

if TYPE_CHECKING:
    from reclaim.serving.answers.machine_sums import MachineSums
    from reclaim.serving.wire.schemas import Units

Floats = NDArray[np.float64]

_MARGINS: Final = TypeAdapter(list[MachineMargin])
BASES: Final = ("fitted", "bound", "limit")
_FITTED, _BOUND, _LIMIT = range(len(BASES))
_NO_MACHINES: Final = b'"machines":[]'


def as_json(found: MachineSums, units: Units, *, without_machine: int, following: str | None = None) -> bytes:
    """Return the JSON of a ``MachinesAnswer``, machines in order; ``following`` is the start of the next page."""
    envelope = MachinesAnswer(
        **about(found, units), margins=_margins(found), tracked=found.tracked,
        without_machine=without_machine, machines=[], next=following,
    )  # fmt: skip
    head, _, tail = envelope.model_dump_json().encode().partition(_NO_MACHINES)
    # Models of ten thousand machines take ten times as long as their JSON.
    return b"".join((head, _NO_MACHINES[:-2], to_json(_each(found)), tail))


def about(found: MachineSums, units: Units) -> dict[str, Any]:
    """Return the fields that all answers about machines share."""
    scorer = found.scorer
    return {
        "model": model_name(scorer.model), "horizon_s": found.estimator.horizon_s, "units": units,
        "clock_us": known_or_none(found.clock_us), "budgets": dict(scorer.budgets.by_margin),
    }  # fmt: skip


def as_table(found: MachineSums, units: Units) -> pa.Table:
    """Return the answers as a table, one row per machine; the schema's metadata holds model, units and clock."""
    peaks, limit, basis, scorer = found.peaks(), found.limit, _basis(found), found.scorer
    judged, violated = found.margins.outcomes_of(found.machine)
    columns: dict[str, pa.Array] = {s.MACHINE_ID: pa.array(found.machine), "tasks": pa.array(found.tasks)}
    for r, resource in enumerate(RESOURCES):
        columns[f"{resource}_limit"] = pa.array(limit[:, r])
        columns[f"{resource}_usage"] = pa.array(found.usage[:, r])
        for k, margin in enumerate(MARGIN_NAMES):
            columns[f"{resource}_peak_{margin}"] = pa.array(peaks[k, :, r])
            columns[f"{resource}_reclaimable_{margin}"] = pa.array(limit[:, r] - peaks[k, :, r])
        columns[f"{resource}_basis"] = pa.DictionaryArray.from_arrays(pa.array(basis[:, r]), pa.array(BASES))
        columns[f"{resource}_newcomers"] = pa.array(found.newcomers[:, r])
        columns[f"{resource}_unforecast"] = pa.array(found.unforecast[:, r])
        columns[f"{resource}_judged"] = pa.array(judged[:, r])
        for k, margin in enumerate(MARGIN_NAMES):
            columns[f"{resource}_violated_{margin}"] = pa.array(violated[:, k, r])
    said = model_name(scorer.model)
    budgets = ",".join(f"{name}={budget}" for name, budget in scorer.budgets.by_margin.items())
    return pa.table(columns).replace_schema_metadata(
        {
            "model_name": said.name, "model_version": said.version, "horizon_s": str(found.estimator.horizon_s),
            "cpu_unit": units.cpu, "memory_unit": units.memory, "clock_us": str(found.clock_us), "budgets": budgets,
            "tracked": str(found.tracked), "without_machine": str(found.without_machine),
            "margins": _MARGINS.dump_json(_margins(found)).decode(),
        }
    )  # fmt: skip


def explain_machine(over: Sequence[MachineSums], units: Units, margin: str) -> MachineExplanation:
    """Return the answer for one machine over each horizon, and the steps to its peak within that of reservations."""
    each = [_each(of)[0] for of in over]
    ((found, said),) = ((of, said) for of, said in zip(over, each, strict=True) if of.estimator is of.scorer.machines)
    forecast = [
        MachineForecast(
            horizon_s=of.estimator.horizon_s,
            outcomes=_outcomes(of) if of.counted else None,
            **{name: said[name] for name in ("peak", "reclaimable", "basis")},
        )
        for of, said in zip(over, each, strict=True)
    ]
    return MachineExplanation(
        **about(found, units), margins=_margins(found), margin=margin, forecast=forecast,
        machine=MachineReservation(**said), outcomes=_outcomes(found), steps=_steps(found, margin),
    )  # fmt: skip


def _margins(found: MachineSums) -> list[MachineMargin]:
    return machine_margins({found.estimator.horizon_s: found.margins})


def _outcomes(found: MachineSums) -> MachineOutcomes:
    """Return the outcomes of one machine."""
    judged, violated = found.margins.outcomes_of(found.machine)
    by_margin = {name: _counts(of) for name, of in zip(MARGIN_NAMES, violated[0], strict=True)}
    return MachineOutcomes(judged=_counts(judged[0]), violated=by_margin)


def _each(found: MachineSums) -> list[dict[str, Any]]:
    """Return the fields of each machine's ``MachineReservation``."""
    peaks, limit, basis = found.peaks(), found.limit, _basis(found)
    columns = {
        "machine_id": found.machine.tolist(),
        "tasks": found.tasks.tolist(),
        "limit": _by_resource(limit),
        "usage": _by_resource(found.usage),
        "peak": _by_margin(peaks),
        "reclaimable": _by_margin(limit - peaks),
        "basis": _by_resource(np.array(BASES, object)[basis]),
        "newcomers": _by_resource(found.newcomers),
        "unforecast": _by_resource(found.unforecast),
    }
    return [dict(zip(columns, fields, strict=True)) for fields in zip(*columns.values(), strict=True)]


def _by_resource(values: NDArray[Any]) -> list[dict[str, Any]]:
    cpu, memory = RESOURCES  # half the time of ``dict(zip(...))``
    return [{cpu: a, memory: b} for a, b in values.tolist()]


def _by_margin(values: Floats) -> list[dict[str, dict[str, float]]]:
    """Return amounts by margin and resource; shape (n_margins, m, n_resources)."""
    return [dict(zip(MARGIN_NAMES, of, strict=True)) for of in zip(*map(_by_resource, values), strict=True)]


def _counts(of: NDArray[np.int64]) -> Counts:
    return Counts(**{resource: int(n) for resource, n in zip(RESOURCES, of, strict=True)})


def _basis(found: MachineSums) -> NDArray[np.int8]:
    """Return what each peak rests on, as a position in ``BASES``; shape (m, n_resources)."""
    of_curve = np.array([_BOUND if curve.weights is None else _FITTED for curve in found.estimator.curves], np.int8)
    return np.where(found.sums[..., T_LIMIT] > 0, of_curve, np.int8(_LIMIT))


def _steps(found: MachineSums, margin: str) -> list[Step]:
    """Return the steps from the limits of one machine to its peak, in words with numbers."""
    limit, held = found.limit[0], found.unforecast[0]
    peak, basis = found.peaks()[MARGIN_NAMES.index(margin), 0], _basis(found)[0]
    tasks, whole = int(found.tasks[0]), int(found.whole[0])
    steps = [Step(rule="limit", amounts=resources(limit), why=f"the sum of the limits of {_tasks(tasks)}")]
    between = "between the bounds over independent tasks and over tasks that peak at the same time"
    for kind, together, how in (
        (_FITTED, False, "by a fit to peaks of machines in training"),
        (_BOUND, False, "by the bound over independent tasks"),
        (_BOUND, True, between),
    ):
        curves = found.estimator.curves
        ours = [r for k, r in enumerate(RESOURCES) if basis[k] == kind and (curves[k].together > 0) == together]
        if ours:
            why = (
                f"the amount that the tasks' sum passes within {found.estimator.horizon_s} s with a probability of "
                f"{_asked_in_words(found, margin, ours)}, {how} ({', '.join(ours)})"
            )
            steps.append(Step(rule=BASES[kind], amounts=resources(peak), why=why))
    if held.any():
        why = (
            f"counts whole in it: {_tasks(whole)} without a forecast, windows or estimation, and limits raised recently"
        )
        steps.append(Step(rule="unforecast", amounts=resources(held), why=why))
    if found.newcomers.any():
        why = (
            f"the limits of tasks of which fewer than {NEWCOMER_WINDOWS} windows have been seen, whose forecasts are "
            "the least certain"
        )
        steps.append(Step(rule="newcomers", amounts=resources(found.newcomers[0]), why=why))
    return steps


def _asked_in_words(found: MachineSums, margin: str, resources_of: list[str]) -> str:
    """Return the probability that is asked for, and why it is not the budget where it follows the outcomes."""
    margins, b, said = found.margins, MARGIN_NAMES.index(margin), []
    budget = margins.budgets[margin]
    for resource in resources_of:
        r = RESOURCES.index(resource)
        if f"{margins.asked[b, r]:.3g}" == f"{budget:.3g}":  # none to name: it has hardly moved
            continue
        words = f"{margins.asked[b, r]:.3g} for {resource}"
        if np.isfinite(margins.recent[b, r]):
            words += f", because {margins.recent[b, r]:.2%} of the recent answers for all machines were passed"
        if margins.lowered[b, r] < 1:
            words += f", and by many machines at once, for which it is lowered to {margins.lowered[b, r]:.2g} of itself"
        said.append(words)
    whole = f"{budget:.3g}, the budget of the {margin} margin"
    return whole if not said else f"{whole}, now {' and '.join(said)}"


def _tasks(n: int) -> str:
    return "1 task" if n == 1 else f"{n} tasks"
