"""Recommend experiment: a request for each workload, by the estimator that the validation rows chose."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from reclaim.data.errors import ConfigError
from reclaim.data.schema import RESOURCES
from reclaim.features.splits import TEST, TEST_UNSEEN, VALID
from reclaim.replay.experiment import ORACLE, STATISTICAL, Experiment, Measured, Source
from reclaim.replay.experiments.recommend import formats, names
from reclaim.replay.experiments.recommend.answers import Contender, ask_all, settings_in_words
from reclaim.replay.experiments.recommend.decisions import NOW, Decisions, lay_out
from reclaim.replay.experiments.recommend.definitions import PRESENT, definitions
from reclaim.replay.experiments.recommend.lines import Recommended, lines_of, totals
from reclaim.replay.experiments.recommend.page import COLUMNS, page, runs, summary_table
from reclaim.replay.experiments.recommend.policy import NONE, OVER, UNKNOWN, RecommendConfig, held_back
from reclaim.replay.experiments.recommend.score import (
    Judged,
    of_each_workload,
    set_once,
    shares,
    with_intervals,
)
from reclaim.replay.experiments.recommend.series import (
    Floats,
    TaskRows,
    largest_task,
    read_rows,
)
from reclaim.replay.open_loop.bootstrap import Bootstrap, number
from reclaim.replay.open_loop.paired import Paired
from reclaim.training.margins.calibrate import merit
from reclaim.training.tracking.references import LOCAL_VERSION

_TELLING: Final = 4
"""Fewest days whose lower bound is not the mildest day: of ``n`` days, one of ``n ** n`` resamples has that day alone,
which of three is more than the 2.5 % below an interval of 95 %."""


def measure(source: Source, config: RecommendConfig) -> Measured:
    """Set the request of every workload, in the past by every estimator and now by the best of them.

    Raises
    ------
    ConfigError
        There is a value of reclaimed resources, and no model to price by it.
    HistoryTooShortError
        No window of the validation or of the test period can be judged.
    """
    if config.value.known and not source.bundles:
        raise ConfigError("value.* has no effect without a model, whose price it sets; name one or leave it out")
    kubernetes = names.is_kubernetes(source.dataset)
    policy = config.policy(kubernetes=kubernetes, largest_memory=source.dataset.cell().largest_machine[1])
    with source.timed("read"):
        rows = read_rows(source.features, source.engine, without=names.run_once(source.dataset))
        series = largest_task(rows)
    cuts_us = source.features.cuts_us
    decisions = lay_out(rows, series, cuts_us, hold_days=config.hold_days, seen_days=config.seen_days)
    workloads = names.workloads_of(source.dataset, rows.ids)
    autoscaled = np.array([[r in one.autoscaled for r in RESOURCES] for one in workloads], np.bool_)
    withheld = autoscaled.reshape(-1, len(RESOURCES))[decisions.workload]
    contenders = ask_all(source, config, config.margins, rows, series, decisions, withheld)
    set_by = {one.name: policy.requests(one.answer, decisions, withheld) for one in contenders}
    valid, test = (
        Judged.of(rows, decisions, period, begins).without(withheld)
        for period, begins in zip((VALID, TEST), cuts_us, strict=True)
    )
    on_valid, tested = (
        {name: judged.by_workload(request) for name, (request, _) in set_by.items()} for judged in (valid, test)
    )
    winners = _winners(contenders, [config.budgets.by_margin[margin] for margin in config.margins])
    bootstrap = Bootstrap.of(config)
    chosen, rule = (
        np.stack([of[:, r] for r, of in enumerate(by_winner)], axis=1)
        for by_winner in zip(*(set_by[one.name] for one in winners), strict=True)
    )
    others = {
        "recommendation": test.by_workload(chosen),
        "set once": test.by_workload(set_once(chosen, np.isin(rule, (UNKNOWN, NONE)), decisions)),
        PRESENT: test.as_requested(),
        ORACLE: test.by_workload(test.most(len(decisions))),
    }
    every = Judged.of(rows, decisions, TEST, cuts_us[1])
    of_workloads = of_each_workload(every, chosen, bootstrap)
    as_requested, _ = shares(every.as_requested())
    now = decisions.of(NOW)
    backtest = {name: with_intervals(sums, bootstrap) for name, sums in others.items()}
    failed = _far_over_in_all(backtest["recommendation"]["violation_rate"], config)
    over = _far_over(of_workloads, config) | failed
    unjudged = np.array([[one[resource]["windows"] == 0 for resource in RESOURCES] for one in of_workloads])
    for held, why in ((unjudged, UNKNOWN), (over, OVER)):
        of = held[decisions.workload[now]]
        chosen[now], rule[now] = held_back(chosen[now], rule[now], decisions.request[now], of, why)
    made = Recommended(policy, winners, chosen, rule, of_workloads, as_requested)
    lines = lines_of(source.dataset, config, rows, series, decisions, workloads, made)
    paired = Paired(tested, bootstrap)
    results = {
        "dataset": _period_facts(rows, decisions, cuts_us),
        "kubernetes": kubernetes,
        "anonymous": config.anonymise or names.is_anonymous(source.dataset),
        "hold_days": config.hold_days,
        "budget": dict(zip(RESOURCES, config.of_requests, strict=True)),
        "policy": {"least": list(policy.least), "step": list(policy.step), "oom_bump_by": policy.oom_bump_by},
        "estimators": [
            _of_contender(one, on_valid[one.name], tested[one.name], bootstrap, paired, winners) for one in contenders
        ],
        "test": backtest,
        "failed": dict(zip(RESOURCES, failed.tolist(), strict=True)),
        "totals": totals(lines),
        "workloads": lines,
        "left_out": len(rows.ids) - len(now),
    }
    return Measured(
        results, definitions(config, policy, kubernetes=kubernetes), lambda folder: formats.write(results, folder)
    )


def _far_over(of_workloads: Sequence[Mapping[str, Any]], config: RecommendConfig) -> NDArray[np.bool_]:
    """Return where a workload violates more than ``most_over`` budgets, beyond the noise; shape (n, n_resources).

    With fewer than ``_TELLING`` days the rate itself counts: one day shows no noise, and with two or three the lower
    bound is the rate of the mildest.
    """
    found = []
    for resource, budget in zip(RESOURCES, config.of_requests, strict=True):
        rates = (one[resource] for one in of_workloads)
        least = [rate["low"] if rate["days"] >= _TELLING else rate["value"] for rate in rates]
        found.append(np.array(least, np.float64) > config.most_over * budget)
    return np.stack(found, axis=1)


def _far_over_in_all(violation: Mapping[str, Mapping[str, Any]], config: RecommendConfig) -> NDArray[np.bool_]:
    """Return where all together violate more than ``most_over_in_all`` budgets, and more than one beyond the noise."""
    found = []
    for resource, budget in zip(RESOURCES, config.of_requests, strict=True):
        value, low = (np.nan if violation[resource][of] is None else violation[resource][of] for of in ("value", "low"))
        found.append(value > config.most_over_in_all * budget and not low <= budget)
    return np.array(found)


def _winners(contenders: Sequence[Contender], budgets: Sequence[float]) -> list[Contender]:
    """Return, per resource, the contender of the largest ``calibrate.merit`` on validation windows; the first of such.

    What a contender does not know counts as the limit: an estimator that leaves requests as they are gains nothing by
    that.
    """
    found = []
    for r, budget in enumerate(budgets):
        merits = [merit(one.lost[r], one.reclaimed[r], budget) for one in contenders]
        found.append(contenders[merits.index(max(merits))])
    return found


def _of_contender(
    one: Contender, on_valid: Floats, tested: Floats, bootstrap: Bootstrap, paired: Paired, winners: list[Contender]
) -> dict[str, Any]:
    violation, reclaimed = shares(on_valid.sum(axis=0))
    of = {}
    for r, resource in enumerate(RESOURCES):
        winner = winners[r].name
        behind = None if one.name == winner else paired.difference(one.name, winner, r)
        of[resource] = {
            "won": one.name == winner,
            "margin": number(one.margin[r]),
            "settings": settings_in_words(one.settings[r]) if one.kind == STATISTICAL else "",
            "chosen_by": {"violation_rate": number(one.violation[r]), "reclaimed_share": number(one.reclaimed[r])},
            "valid": {"violation_rate": number(violation[r]), "reclaimed_share": number(reclaimed[r])},
            "less_reclaimed": None if behind is None else behind.reclaimed.report(),
        }
    return {
        "name": one.name, "kind": one.kind, "notes": list(one.notes), "resources": of,
        "test": with_intervals(tested, bootstrap),
    }  # fmt: skip


def _period_facts(rows: TaskRows, decisions: Decisions, cuts_us: tuple[int, int]) -> dict[str, Any]:
    test = decisions.judged[TEST]
    times = np.unique(decisions.time_us[decisions.of(TEST)])
    end_us = int(rows.end_us.max())
    return {
        "test_task_windows": len(test),
        "test_hours": (end_us - cuts_us[1]) / 3.6e9,
        "valid_hours": (cuts_us[1] - cuts_us[0]) / 3.6e9,
        "history_hours": (end_us - int(rows.start_us.min())) / 3.6e9,
        "test_collections": len(np.unique(rows.workload[test])),
        "unseen_collections": len(np.unique(rows.workload[test][rows.group[test] == TEST_UNSEEN])),
        "test_decisions": len(times),
    }


def _published(results: dict[str, Any]) -> dict[str, Any]:
    """Return results without the names of the dataset and of folders, if they are to be anonymous."""
    if not results["inputs"]["config"]["anonymise"]:
        return results
    dataset = results["dataset"] | {"name": "anonymous", "folder": "dataset"}
    models = {name: of | {"reference": None} for name, of in results["models"].items()}
    command = results["command"].replace(f" {shlex.quote(results['dataset']['folder'])} ", " dataset ")
    for of in results["models"].values():
        if of["version"] == LOCAL_VERSION:
            command = command.replace(f" --model {shlex.quote(of['reference'])} ", " --model FOLDER ")
    return results | {"dataset": dataset, "models": models, "command": command}


EXPERIMENT: Final = Experiment(
    name="recommend",
    title="Recommended requests",
    version=10,
    config=RecommendConfig,
    measure=measure,
    page=page,
    summary=summary_table,
    figures={},
    runs=runs,
    columns=COLUMNS,
    command="recommend",
    publish=_published,
)
