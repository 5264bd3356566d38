"""What the margins page says of the closed loop, and its section."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from reclaim.data.schema import RESOURCES
from reclaim.data.style import RESOURCE_WORDS
from reclaim.data.table import Cell, Table
from reclaim.replay.closedloop_state import REASONS
from reclaim.replay.folded import LIMIT
from reclaim.replay.kinds import ORACLE, Results, Section
from reclaim.training.estimators.margin import MARGIN_NAMES

_SHOWN: Final[Mapping[str, tuple[str, bool]]] = {
    **{f"{RESOURCE_WORDS[r]} in reclaimed": (f"in_reclaimed_{r}", True) for r in RESOURCES},
    **{f"{RESOURCE_WORDS[r]} granted": (f"granted_{r}", True) for r in RESOURCES},
    **{f"{RESOURCE_WORDS[r]} used": (f"utilisation_{r}", True) for r in RESOURCES},
    "times out of memory": ("times_out_of_memory", False),
    "OOM kills": ("oom_kills", False),
    "fewest": ("fewest_kills", False),
    "most": ("most_kills", False),
    "runs killed": ("runs_killed", False),
    "of production": ("production_oom_kills", False),
    "machine OOM / 1,000 task-days": ("machine_per_1000_task_days", False),
    "own limit": ("own_limit_per_1000_task_days", False),
    "recorded": ("recorded_oom_per_1000_task_days", False),
    "preempted / 1,000 task-days": ("preempted_per_1000_task_days", False),
    "wasted": ("wasted", True),
    "missed": ("missed", True),
    "waiting": ("waiting", True),
    "never placed": ("never_placed", False),
    "delay p90, production, s": ("delay_p90_s_production", False),
    "delay p90, others, s": ("delay_p90_s_non_production", False),
    "throttled, batch": ("throttled_batch", True),
    "throttled, latency-sensitive": ("throttled_latency_sensitive", True),
    "CPU-hours throttled, batch": ("throttled_cpu_hours_batch", False),
    "latency-sensitive": ("throttled_cpu_hours_latency_sensitive", False),
}
_WHY: Final[Mapping[str, tuple[str, bool]]] = {
    "waiting, production": ("waiting_production", True),
    "waiting, others": ("waiting_non_production", True),
    **{f"for {reason.replace('_', ' ')}": (f"waiting_for_{reason}", True) for reason in REASONS[1:]},
}
_WEEK: Final[Mapping[str, tuple[str, bool]]] = {
    **{f"{RESOURCE_WORDS[r]} in reclaimed": (f"in_reclaimed_{r}", True) for r in RESOURCES},
    **{f"{RESOURCE_WORDS[r]} reserved": (f"reserved_{r}", True) for r in RESOURCES},
    **{f"{RESOURCE_WORDS[r]} used": (f"utilisation_{r}", True) for r in RESOURCES},
    "OOM kills": ("oom_kills", False),
    "OOM kills / 1,000 task-days": ("oom_kills_per_1000_task_days", False),
    "preempted / 1,000 task-days": ("preempted_per_1000_task_days", False),
    "tasks waiting": ("waiting_tasks", False),
}


def says(results: Results) -> list[str]:
    """Return what the closed loop shows; nothing where none was run."""
    loop = results.get("closed_loop")
    if not loop or not loop["estimators"]:
        return []
    under = {e["name"]: e["runs"] for e in loop["estimators"]}
    paragraphs = [_hosted(under, loop)]
    in_turn = [e for e in loop["estimators"] if e["sequence"] is not None]
    rates = {e["name"]: [e["runs"][m]["oom_kills_per_1000_task_days"] or 0.0 for m in MARGIN_NAMES] for e in in_turn}
    parts = {e["name"]: [w["oom_kills_per_1000_task_days"] or 0.0 for w in e["sequence"]] for e in in_turn}
    if rates and not any(any(of) for of in [*rates.values(), *parts.values()]):
        names = ", ".join(f"`{name}`" for name in rates)
        paragraphs.append(
            f"No task was killed for want of memory in the closed loop, {_times(loop['orders'])}, neither under one "
            f"margin throughout nor in the sequence, with any of {names}: nothing tells the margins apart."
        )
    elif rates:
        texts = []
        for estimator in in_turn:
            weeks = parts[estimator["name"]]
            kills = " + ".join(f"{sum(estimator['kills_by_order'][m]):,.0f}" for m in MARGIN_NAMES)
            texts.append(
                f"`{estimator['name']}` {_listed(rates[estimator['name']])} under baseline, medium and aggressive "
                f"throughout ({kills} kills), and {_listed(weeks)} in the four parts of the sequence"
            )
        floor = [e for e in loop["estimators"] if e["name"] == LIMIT]
        texts += [
            f"without reclamation, the floor, {e['runs']['none']['oom_kills_per_1000_task_days'] or 0.0:.2f} "
            f"({sum(e['kills_by_order']['none']):,.0f} kills)"
            for e in floor
        ]
        paragraphs.append(
            f"Kills for want of memory on 1,000 task-days in the closed loop, {_times(loop['orders'])}: "
            f"{'; '.join(texts)}. {_between(rates, in_turn, loop['orders'])} "
            "Each part of the sequence has its own workload, and begins with the backlog of the one before."
        )
    return paragraphs


def _between(rates: Mapping[str, Sequence[float]], ran: Sequence[Mapping[str, Any]], orders: int) -> str:
    """Say plainly whether medium's rate lies between its neighbours', on average and order by order."""
    some = {name: of for name, of in rates.items() if any(of)}
    if not some:
        return "There were none under any margin throughout, so nothing tells the margins apart."
    rising = [name for name, (low, middle, high) in some.items() if low < middle < high]
    text = f"Under one margin throughout, medium's rate lies between baseline's and aggressive's for {len(rising)} of "
    text += f"the {len(some)} with any kills"
    odd = [f"`{name}`{' (a tie)' if list(of) == sorted(of) else ''}" for name, of in some.items() if name not in rising]
    text += f", not for {', '.join(odd)}." if odd else "."
    if orders == 1:
        return text + " One history, run once: few kills tell little."
    kills = [e["kills_by_order"] for e in ran if e["name"] in some]
    held = sum(
        low < middle < high for of in kills for low, middle, high in zip(*(of[m] for m in MARGIN_NAMES), strict=True)
    )
    return (
        text + f" Order by order, its number of kills does in {held} of {orders * len(some)}. One history all the same."
    )


def _times(orders: int) -> str:
    return "run once" if orders == 1 else f"the mean of {orders} runs that look at the machines in other orders"


def _hosted(under: Mapping[str, Mapping[str, Mapping[str, Any]]], loop: Mapping[str, Any]) -> str:
    resource = RESOURCES[0]
    hosted = {
        f"`{name}`" if m == "none" else f"`{name}` under {m}": run[f"in_reclaimed_{resource}"] or 0.0
        for name, of in under.items()
        if name not in (LIMIT, ORACLE)
        for m, run in of.items()
    }
    text = f"On its {loop['machines']} machines the cell was asked to run {loop['runs']:,} runs of tasks. "
    if LIMIT in under:
        run = under[LIMIT]["none"]
        text += (
            f"Without reclamation {_percent(run['waiting'])} of the task-time was spent waiting, and limits of "
            f"{_percent(run[f'granted_{resource}'])} of the {RESOURCE_WORDS[resource]} were granted. "
        )
    if hosted:
        best = max(hosted, key=lambda name: hosted[name])
        text += (
            f"In reclaimed {RESOURCE_WORDS[resource]} ran, by limit, {_percent(min(hosted.values()))} to "
            f"{_percent(max(hosted.values()))} of the workload, most with {best} (Borg: about 20 %)"
        )
        if ORACLE in under:
            text += f"; with the oracle's reservations {_percent(under[ORACLE]['none'][f'in_reclaimed_{resource}'])}"
        text += "."
    return text


def section(results: Results) -> list[Section]:
    """Return the section of the closed loop, or why there is none."""
    loop = results.get("closed_loop")
    if not loop:
        return []
    if not loop["estimators"]:
        return [Section("The cell run by the reservations", text=" ".join(loop["notes"]))]
    return [
        Section(
            "The cell run by the reservations",
            text=(
                "Here placement is not the trace's own: the same machines run the same work anew, production placed by "
                "limit, everything else in what the reservations leave free. The oracle is no bound here: reserving "
                "exactly what comes, it fills machines without any slack, and what then comes at once, the largest of "
                "every task's window, does not fit."
            ),
            figure="cell_in_turn" if any(e["sequence"] for e in loop["estimators"]) else "",
            caption=(
                "Borg's experiment in a closed loop. What more aggressive margins free is given to waiting work, and "
                "what runs out of memory is killed. The thin line is the capacity."
            ),
            table=_table(loop, _SHOWN),
        ),
        Section("The cell run by the reservations, part by part", table=_weeks(loop)),
        Section("Why tasks waited", table=_table(loop, _WHY)),
    ]


def _table(loop: Mapping[str, Any], shown: Mapping[str, tuple[str, bool]]) -> Table:
    rows: list[tuple[Cell, ...]] = [
        (e["name"], margin, *(({**run, **_spread(e, margin)})[key] for key, _ in shown.values()))
        for e in loop["estimators"]
        for margin, run in e["runs"].items()
    ]
    return Table(("estimator", "margin", *shown), tuple(rows), frozenset(k for k, (_, p) in shown.items() if p))


def _spread(estimator: Mapping[str, Any], margin: str) -> dict[str, float]:
    kills = estimator["kills_by_order"][margin]
    return {"fewest_kills": min(kills), "most_kills": max(kills)}


def _weeks(loop: Mapping[str, Any]) -> Table:
    rows: list[tuple[Cell, ...]] = [
        (e["name"], i + 1, week["margin"], *(week[key] for key, _ in _WEEK.values()))
        for e in loop["estimators"]
        for i, week in enumerate(e["sequence"] or ())
    ]
    percent = frozenset(k for k, (_, p) in _WEEK.items() if p)
    return Table(("estimator", "part", "margin", *_WEEK), tuple(rows), percent)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def _listed(rates: Sequence[float]) -> str:
    words = [f"{rate:.2f}" for rate in rates]
    return f"{', '.join(words[:-1])} and {words[-1]}"
