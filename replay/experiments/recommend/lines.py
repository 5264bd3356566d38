"""Assembles the lines of each workload: its tasks, its requests, the rule that made them, and the totals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from reclaim.data.core.arrays import is_first
from reclaim.data.core.prose import counted
from reclaim.data.dataset import Dataset
from reclaim.data.schema import RESOURCES
from reclaim.replay.experiment import LEARNED
from reclaim.replay.experiments.recommend import names
from reclaim.replay.experiments.recommend.answers import RECENT_US, Contender, settings_in_words
from reclaim.replay.experiments.recommend.decisions import NOW, Decisions
from reclaim.replay.experiments.recommend.picture import Pictures
from reclaim.replay.experiments.recommend.policy import RULES, Policy, RecommendConfig
from reclaim.replay.experiments.recommend.series import Floats, Integers, Series, TaskRows, peaks_by_task
from reclaim.replay.open_loop.bootstrap import number

_ONCE: Final = ("Job", "Pod", "Node", "Workflow", "TaskRun")
"""Kinds that run once: the next job or bare pod, node of a static pod, run of Argo or Tekton has another name, and is
another workload."""


@dataclass(frozen=True)
class Recommended:
    """The requests of all ``n`` decisions, and their results.

    Attributes
    ----------
    policy : Policy
    winners : sequence of Contender, in the order ``schema.RESOURCES``
        The estimator whose answers they are.
    request : float64, shape (n, n_resources)
    rule : int64, shape (n, n_resources)
        Position in ``policy.RULES`` of the rule that made each.
    violation : sequence of mapping, one per workload
        Violation rate of each resource (``score.of_each_workload``).
    as_requested : float64, shape (n_workloads, n_resources)
        Violation rate under the requests that the tasks had.
    """

    policy: Policy
    winners: Sequence[Contender]
    request: Floats
    rule: NDArray[np.int64]
    violation: Sequence[Mapping[str, Any]]
    as_requested: Floats


def lines_of(
    dataset: Dataset,
    config: RecommendConfig,
    rows: TaskRows,
    series: Series,
    decisions: Decisions,
    workloads: Sequence[names.Workload],
    made: Recommended,
) -> list[dict[str, Any]]:
    """Return the line of each workload with a recommendation; ``workloads`` are all, by position."""
    now = decisions.of(NOW)
    shown = [workloads[decisions.workload[k]] for k in now]
    if config.anonymise:
        shown = names.anonymous(shown)
    pictures = Pictures.draw(rows, series, decisions, made.request)
    facts = _Facts.of(rows, decisions, now)
    # numbers that stand for pods are those of one container
    absent = np.zeros(len(workloads), np.bool_) if names.is_anonymous(dataset) else _absent(rows, workloads)
    pods = [[] for _ in now] if config.anonymise else _pods(dataset, rows, facts.tasks)
    return [
        {
            "cluster": one.cluster, "namespace": one.namespace, "kind": one.kind, "name": one.name,
            "container": one.container, "sidecar": one.sidecar,
            "collection_id": None if config.anonymise else int(rows.ids[decisions.workload[k]]),
            "autoscaler": one.autoscaler, "tasks": len(facts.tasks[i]), "pods": pods[i],
            "oom_kills": int(facts.kills[i]), "running": bool(facts.runs[i]),
            "absent": bool(absent[decisions.workload[k]]),
            **{
                resource: {
                    **_amounts(decisions, made.request, k, r, rows.request[facts.last[i], r]),
                    "rule": RULES[made.rule[k, r]],
                    "words": _in_words(made.winners[r], r, RULES[made.rule[k, r]], config, made.policy),
                    "violation": made.violation[decisions.workload[k]][resource],
                    "as_requested": number(made.as_requested[decisions.workload[k], r]),
                    "spread": number(facts.spread[i, r]),
                    "largest_task": number(facts.largest[i, r]),
                    "picture": pictures.of(int(decisions.workload[k]), r),
                }
                for r, resource in enumerate(RESOURCES)
            },
        }
        for i, (k, one) in enumerate(zip(now, shown, strict=True))
    ]  # fmt: skip


def totals(lines: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return, per resource, sums over the tasks that ran last, and the number of requests to change.

    ``first`` sums what the ``firsts`` workloads without a current request would request. Workloads that are over
    count nowhere: the jobs of a week never ran together, and there is nothing to change.
    """
    found: dict[str, dict[str, Any]] = {}
    counted = [line for line in lines if not is_over(line)]
    for resource in RESOURCES:
        known = [
            (line["tasks"], line[resource]) for line in counted
            if line[resource]["request"] is not None and line[resource]["recommended"] is not None
        ]  # fmt: skip
        first = [
            line["tasks"] * line[resource]["recommended"] for line in counted
            if line[resource]["request"] is None and line[resource]["recommended"] is not None
        ]  # fmt: skip
        requested = sum(n * one["requested"] for n, one in known)
        reclaimable = sum(n * one["reclaimable"] for n, one in known)
        found[resource] = {
            "requested": requested, "reclaimable": reclaimable,
            "share": reclaimable / requested if requested else None,
            "changes": sum(one["recommended"] != one["request"] for one in (line[resource] for line in counted)),
            "raises": sum(one["recommended"] > one["request"] for _, one in known),
            "first": sum(first), "firsts": len(first),
        }  # fmt: skip
    return found


@dataclass(frozen=True)
class _Facts:
    """Facts of the workloads with a recommendation: tasks that run, ends out of memory, spread, largest peak.

    Lists of ``n`` and arrays of shape (n,) and (n, n_resources); ``last`` has the last row of each of the tasks, and
    ``runs`` is true where they run at the end of the history.
    """

    tasks: list[Integers]
    last: list[Integers]
    runs: NDArray[np.bool_]
    kills: Integers
    spread: Floats
    largest: Floats

    @classmethod
    def of(cls, rows: TaskRows, decisions: Decisions, now: Integers) -> _Facts:
        """Find the tasks that run, compare the peaks of those of the last day, count all ends out of memory."""
        end_us = int(decisions.time_us[now].max(initial=0))
        last_us = np.full(len(rows.ids), -1, np.int64)
        np.maximum.at(last_us, rows.workload, rows.end_us)
        recent = np.flatnonzero(rows.end_us > np.minimum(last_us, end_us)[rows.workload] - RECENT_US)
        task, peak = peaks_by_task(rows, recent)
        first = np.searchsorted(rows.task, task)
        of = rows.workload[first]
        order = np.argsort(of, kind="stable")
        edges = np.searchsorted(of[order], np.arange(len(rows.ids) + 1))
        spread, largest = np.full((2, len(now), len(RESOURCES)), np.nan)
        for i, workload in enumerate(decisions.workload[now]):
            mine = peak[order[edges[workload] : edges[workload + 1]]]
            for r in range(len(RESOURCES)):
                found = mine[np.isfinite(mine[:, r]), r]
                if len(found):
                    largest[i, r] = found.max()
                    middle = np.median(found)
                    spread[i, r] = found.max() / middle if middle > 0 else np.nan
        late_us = _late_us(rows)
        running_us = last_us - late_us
        latest = np.full(int(rows.task.max(initial=-1)) + 1, -1, np.int64)
        latest[rows.task] = rows.end_us  # of several rows the last one counts
        members = (task[order[edges[k] : edges[k + 1]]] for k in decisions.workload[now])
        begins_us = rows.start_us[is_first(rows.task)]
        running = [
            _together(mine[latest[mine] > running_us[k]], begins_us, latest)
            for k, mine in zip(decisions.workload[now], members, strict=True)
        ]
        return cls(
            running, [np.searchsorted(rows.task, mine, "right") - 1 for mine in running],
            last_us[decisions.workload[now]] > end_us - late_us,
            np.bincount(rows.oom_workload, minlength=len(rows.ids))[decisions.workload[now]],
            spread, largest,
        )  # fmt: skip


def is_over(line: Mapping[str, Any]) -> bool:
    """Return whether a workload has ended for good: a job, a bare pod, or a container that the pods no longer have."""
    return not line["running"] and (line["absent"] or line["kind"] in _ONCE)


def _late_us(rows: TaskRows) -> int:
    """Return the time without a window after which a task no longer runs: one missing window is allowed."""
    return 2 * int(np.median(rows.end_us - rows.start_us))


def _together(tasks: Integers, begins_us: Integers, ends_us: Integers) -> Integers:
    """Return, of tasks that may run, those that ran at the last moment at which most of them did.

    One that replaced another, as in a rollout or in the next run of a job, would count twice.
    """
    begin, end = begins_us[tasks], ends_us[tasks]
    at = np.unique(begin)
    count = np.searchsorted(np.sort(begin), at, "right") - np.searchsorted(np.sort(end), at, "right")
    moment_us = at[len(at) - 1 - np.argmax(count[::-1])]
    return np.asarray(tasks[(begin <= moment_us) & (end > moment_us)])


def _absent(rows: TaskRows, workloads: Sequence[names.Workload]) -> NDArray[np.bool_]:
    """Return which workloads, (n_workloads,), are a container that the pod of their object that began last is without.

    Of pods that have run for less than ``_late_us`` not all containers may have a window yet: what began in them is
    there, too.
    """
    numbers: dict[tuple[str | None, ...], int] = {}
    of = np.array([numbers.setdefault((one.cluster, one.namespace, one.kind, one.name), len(numbers))
                   for one in workloads], np.int64)  # fmt: skip
    pod = rows.index[rows.task]
    last = np.append(is_first(rows.task, rows.scheduled_us)[1:], True)[: len(rows)]  # of each run
    ran = np.flatnonzero(last & (rows.scheduled_us >= 0) & (rows.end_us - rows.scheduled_us >= _late_us(rows)))
    ran = ran[np.lexsort((rows.scheduled_us[ran], of[rows.workload[ran]]))]
    last_pod, began_us = np.zeros(len(numbers), np.int64), np.full(len(numbers), -1, np.int64)
    last_pod[of[rows.workload[ran]]] = pod[ran]  # of several the last one counts
    began_us[of[rows.workload[ran]]] = rows.scheduled_us[ran]
    theirs = of[rows.workload]
    in_it = (pod == last_pod[theirs]) & (rows.start_us >= began_us[theirs])
    there = np.unique(rows.workload[in_it | (rows.scheduled_us > began_us[theirs])])
    return (began_us[of] >= 0) & ~np.isin(np.arange(len(of)), there)


def _pods(dataset: Dataset, rows: TaskRows, tasks: Sequence[Integers]) -> list[list[str]]:
    """Return the names of the tasks of each workload."""
    every = np.concatenate([np.zeros(0, np.int64), *tasks])
    workload = rows.workload[np.searchsorted(rows.task, every)]
    keys = zip(rows.ids[workload].tolist(), rows.index[every].tolist(), strict=True)
    found = iter(names.pods_of(dataset, list(keys)))
    return [[next(found) for _ in of] for of in tasks]


def _amounts(decisions: Decisions, chosen: Floats, k: int, r: int, of_tasks: Floats) -> dict[str, float | None]:
    """Return the current request and the recommended one of a decision, and their difference.

    Tasks that run may have requests of their own, (n_tasks,): ``request`` is the largest, ``requested`` their mean.
    """
    request, limit, wanted = decisions.request[k, r], decisions.enforced[k, r], chosen[k, r]
    change = wanted / request - 1 if request > 0 else np.nan
    less = request - of_tasks[np.isfinite(of_tasks)]  # zeros where all request the same: their mean would be rounded
    requested = request - less.mean() if len(less) else request
    return {
        "request": number(request), "limit": number(limit), "recommended": number(wanted), "change": number(change),
        "requested": number(requested), "reclaimable": number(requested - wanted if wanted != request else 0.0),
    }  # fmt: skip


def _in_words(winner: Contender, r: int, rule: str, config: RecommendConfig, policy: Policy) -> str:
    """Return the rule that made a request as a sentence."""
    if winner.kind == LEARNED:
        basis = f"{winner.name} over {config.horizon_s / 3600:.0f} h, the largest of the tasks' quantiles"
    else:
        settings = settings_in_words(winner.settings[r])
        basis = f"{winner.name}{f' ({settings})' if settings else ''} of the largest task, times {winner.margin[r]:.3g}"
    return {
        "estimate": basis,
        "floor": f"the least request; {basis} is below it",
        "limit": f"the limit; {basis} is above it",
        "out of memory": f"a task ended out of memory: {config.oom_bump:.3g} times the memory at which it did"
        + (f", at least {policy.oom_bump_by / 2**20:.0f} MiB more" if policy.oom_bump_by else "")
        + ("" if np.isnan(policy.largest_memory) else ", no more than the largest machine has"),
        "small change": f"kept: {basis} is less than {config.min_change:.0%} away",
        "unknown": f"kept: no answer yet, or for a lower request less than {counted(config.history_days, 'day')} since "
        f"the first window, than {counted(config.ran_hours, 'hour')} of windows, or than one window in the back-test",
        "autoscaler": "kept: a horizontal autoscaler scales on it",
        "no request": "none is set and nothing was measured",
        "over budget": f"kept: with {basis}, this workload violated more than {config.most_over:g} times the budget, "
        f"or all together more than {config.most_over_in_all:g} times",
    }[rule]
