"""What the page of the compaction experiment says, its parts, and what goes on record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import sqrt
from typing import Any, Final

from reclaim.data.schema import RESOURCES
from reclaim.data.style import RESOURCE_WORDS
from reclaim.data.table import Table, show
from reclaim.replay.folded import LIMIT
from reclaim.replay.kinds import COMPARED, ORACLE, Column, Results, Run, Section
from reclaim.replay.report import runs_table
from reclaim.training.estimators.margin import MARGIN_NAMES

COLUMNS: Final = (
    Column("machines", "machines"),
    Column("of the cell", "machines_share", percent=True),
    Column("saved", "saved_share", percent=True),
    Column("out of memory", "over_memory", percent=True),
    Column("over CPU", "over_cpu", percent=True),
    Column("tasks beyond, memory", "beyond_memory", percent=True),
    Column("tasks beyond, CPU", "beyond_cpu", percent=True),
    Column("memory used", "used_memory", percent=True),
    Column("CPU used", "used_cpu", percent=True),
)
REFERENCE: Final = "borg"
"""Whose risk the others are measured by, where it is among them."""
CHANCE: Final = 2.0
"""Of tasks that only one of two fails, one has failed more where they are further apart than this many times the square
root of their number: two standard deviations, were each as likely to fail either of them (McNemar's test)."""
SAME_SHARE: Final = 0.005
"""Share of the machines by which two may differ and count as the same: of 200 machines one."""


def runs(results: Results) -> list[Run]:
    """Return what goes on record of every estimator at every margin."""
    return [
        Run(
            name=name if margin == "none" else f"{name}/{margin}",
            words={"estimator": name, "margin": margin},
            metrics={
                "machines": one["machines"]["value"],
                "machines_share": one["share"]["value"],
                "machines_share_low": one["share"]["low"],
                "machines_share_high": one["share"]["high"],
                "saved_share": one["saved_share"],
                "additional_share": one["additional_share"],
                **{f"{key}_{r}": one[key][r]["value"] for key in ("over", "used") for r in RESOURCES},
                **{f"beyond_{r}": one["beyond"][r] for r in RESOURCES},
            },
            tags={"kind": kind},
        )
        for name, kind, margin, one in _contenders(results)
    ]


def says(results: Results) -> list[str]:
    """Return what the numbers show: what reclamation saves, who saves most at what risk, and what does not hold."""
    without = _of(results, LIMIT)["none"]
    paragraphs = [_cell(results, without), *(line for m in MARGIN_NAMES if (line := _at_margin(results, m)))]
    return [*paragraphs, *_bound(results), *_what_does_not_hold(results)]


def judged(results: Results) -> str:
    """Say what is packed, and what that is held against."""
    return (
        "Margins are set on the validation period; the checkpoints lie in the later test period. Tasks are packed by "
        "the reservations in force at the checkpoint, each made from the past alone, and what that risks is "
        f"measured by what they use in the {results['horizon_s']} seconds from there on."
    )


def sections(results: Results) -> list[Section]:
    """Return the parts of the page."""
    trials = results["trials"]
    return [
        Section(
            "Machines needed, and what that would risk",
            figure="machines_needed",
            caption=(
                "Cell compaction (Verma et al., EuroSys'15, section 5.1 and Figure 10). Bars: the 90th percentile of "
                f"{trials} orders of removal at each checkpoint, the mean over the checkpoints; error bars: the least "
                "and the most that any order needed. Beside it the tasks that use more within the horizon than is "
                "reserved for them, and (dark) the machines on which all of them together use more than there is: a "
                "smaller cell is only better where that is no worse."
            ),
            table=runs_table(runs(results), COLUMNS),
        ),
        Section("The checkpoints", table=_checkpoints(results)),
        Section("Machines needed at each checkpoint", table=_each_checkpoint(results)),
    ]


def _cell(results: Results, without: Mapping[str, Any]) -> str:
    checkpoints = results["checkpoints"]
    tasks = _range([c["tasks"] for c in checkpoints])
    machines = _range([c["machines"] for c in checkpoints])
    mean = {r: sum(c["limit_share"][r] or 0.0 for c in checkpoints) / len(checkpoints) for r in RESOURCES}
    limits = " and ".join(f"{_percent(mean[r])} of the machines' {RESOURCE_WORDS[r]}" for r in RESOURCES)
    clones = max(c["clones"] for c in checkpoints)
    text = (
        f"At {len(checkpoints)} checkpoints {tasks} tasks ran on {machines} machines; their limits sum to {limits}. "
        f"Without reclamation they need {_needed(without)}"
    )
    return text + (f", so machines were removed from up to {clones} copies of the cell." if clones > 1 else ".")


def _at_margin(results: Results, margin: str) -> str:
    """Say who needs the fewest machines at a margin, at what risk, and who does at no more risk than Borg's."""
    found = {name: one for name, kind, m, one in _contenders(results) if m == margin and kind in COMPARED}
    if not found:
        return ""
    fewest, alike = _fewest(found)
    tasks = sum(c["tasks"] for c in results["checkpoints"])
    text = f"At the {margin} margin `{fewest}` needs the fewest, {_needed(found[fewest])}{alike}; "
    text += f"{_risk(found[fewest], tasks)}."
    reference = found.get(REFERENCE)
    if reference is None or fewest == REFERENCE:
        return text
    text += f" `{REFERENCE}` needs {_needed(reference)}; {_risk(reference, tasks)}."
    best, alike = _fewest({name: one for name, one in found.items() if _no_riskier(one, reference)})
    if best == REFERENCE:
        return text + " No estimator that risks no more than that, beyond chance, needs fewer."
    fewer, more, trials = _paired(found[best], reference)
    counted = (
        f"it needs fewer in {fewer} of the {trials} trials ({results['trials']} orders of removal at each of "
        f"{len(results['checkpoints'])} checkpoints, the same for both) and more in {more}"
    )
    if best == fewest:
        return text + f" `{best}` risks no more than that, beyond chance: {counted}."
    one = found[best]
    return text + (
        f" Of those that risk no more than that, beyond chance, `{best}` needs the fewest, "
        f"{show(one['machines']['value'])}{alike}: {counted}; {_risk(one, tasks)}."
    )


def _paired(one: Mapping[str, Any], reference: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return in how many trials one needs fewer machines than the other, in how many more, and of how many."""
    pairs = [
        (mine, theirs)
        for at, of in zip(one["checkpoints"], reference["checkpoints"], strict=True)
        for mine, theirs in zip(at["trials"], of["trials"], strict=True)
    ]
    return sum(a < b for a, b in pairs), sum(a > b for a, b in pairs), len(pairs)


def _bound(results: Results) -> list[str]:
    oracle = _of(results, ORACLE)["none"]
    return [
        "The oracle, which reserves for each task exactly the most that it will use within the horizon, needs "
        f"{_needed(oracle)}: so packed, the least that reservations made task by task need where none ever fails. "
        "Tasks do not all use their most at once, so a machine could hold more. Production is placed by its limits "
        "under every estimator, so no reservation, not even the oracle's, packs it closer."
    ]


def _what_does_not_hold(results: Results) -> list[str]:
    """Say where a narrower margin does not need fewer machines, or does not risk more."""
    odd = []
    for estimator in results["estimators"]:
        if estimator["kind"] not in COMPARED:
            continue
        of = [estimator["results"][m] for m in MARGIN_NAMES]
        if any(a["share"]["value"] < b["share"]["value"] for a, b in pairwise(of)):
            odd.append(f"`{estimator['name']}` needs more machines at some narrower margin")
        if any(a["over"]["memory"]["value"] > b["over"]["memory"]["value"] for a, b in pairwise(of)):
            odd.append(f"`{estimator['name']}` has fewer machines out of memory at some narrower margin")
    left_out = sum(c["too_large"] for c in results["checkpoints"])
    lines = [f"Not as one would expect: {'; '.join(odd)}."] if odd else []
    if left_out:
        lines.append(f"{left_out} tasks, over all checkpoints, are larger than every machine that could take them.")
    tasks = sum(c["tasks"] for c in results["checkpoints"])
    for r in RESOURCES:
        if unknown := tasks - sum(c["limit_known"][r] for c in results["checkpoints"]):
            lines.append(
                f"Of {unknown:,} of the {tasks:,} tasks, over all checkpoints, no {RESOURCE_WORDS[r]} limit is known: "
                "they are placed as if they asked for none, and are left out of the tasks that use more than their "
                "reservation."
            )
    return lines


def _checkpoints(results: Results) -> Table:
    columns = ("hours into the test period", "tasks", "production", "constrained", "picky", "left out", "machines",
               "copies of the cell", *(f"{RESOURCE_WORDS[r]} limits of capacity" for r in RESOURCES))  # fmt: skip
    keys = ("hours", "tasks", "production", "constrained", "picky", "too_large", "machines", "clones")
    rows = tuple((*(c[key] for key in keys), *(c["limit_share"][r] for r in RESOURCES)) for c in results["checkpoints"])
    return Table(columns, rows, percent=frozenset(columns[-len(RESOURCES) :]))


def _each_checkpoint(results: Results) -> Table:
    hours = [f"after {c['hours']:.0f} h" for c in results["checkpoints"]]
    columns = ("estimator", "margin", *(f"{h}{of}" for h in hours for of in ("", ", least", ", most")))
    rows = tuple(
        (name, margin, *(at["machines"][key] for at in one["checkpoints"] for key in ("value", "low", "high")))
        for name, _, margin, one in _contenders(results)
    )
    return Table(columns, rows)


def _contenders(results: Results) -> list[tuple[str, str, str, Mapping[str, Any]]]:
    """Return name, kind, margin and results of every contender."""
    return [(e["name"], e["kind"], margin, one) for e in results["estimators"] for margin, one in e["results"].items()]


def _of(results: Results, name: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = next(e["results"] for e in results["estimators"] if e["name"] == name)
    return found


def _fewest(found: Mapping[str, Mapping[str, Any]]) -> tuple[str, str]:
    """Return who needs the fewest machines, of equals the one that risks least, and words for the others."""

    def rank(name: str) -> tuple[float, ...]:
        one = found[name]
        return one["share"]["value"], *_risks(one)

    first = min(found, key=rank)
    equals = [f"`{name}`" for name in found if name != first and rank(name)[0] == rank(first)[0]]
    return first, f" (as few as {', '.join(equals)})" if equals else ""


def _no_riskier(one: Mapping[str, Any], reference: Mapping[str, Any]) -> bool:
    """Return whether one fails no more tasks than the reference beyond chance, nor machines beyond ``SAME_SHARE``."""
    for r in RESOURCES:
        mine, its = one["beyond_alone"][r]
        if mine - its > CHANCE * sqrt(mine + its):
            return False
        if one["over"][r]["value"] - reference["over"][r]["value"] > SAME_SHARE:
            return False
    return True


def _risks(one: Mapping[str, Any]) -> tuple[float, ...]:
    return *(one["over"][r]["value"] for r in RESOURCES[::-1]), *(one["beyond"][r] or 0.0 for r in RESOURCES[::-1])


def _needed(one: Mapping[str, Any]) -> str:
    text = f"{show(one['machines']['value'])} machines, {_percent(one['share']['value'])} of the cell"
    saved = one["saved_share"]
    if not saved:
        return text
    return text + f", {_percent(abs(saved))} {'fewer' if saved > 0 else 'more'} than without reclamation"


def _risk(one: Mapping[str, Any], tasks: int) -> str:
    over = " and ".join(
        f"{_percent(one['over'][r]['value'])} of them run out of {RESOURCE_WORDS[r]}" for r in RESOURCES
    )
    share = {r: "no limit is known" if (of := one["beyond"][r]) is None else show(of, percent=True) for r in RESOURCES}
    beyond = " and ".join(f"{one['beyond_tasks'][r]:,} in {RESOURCE_WORDS[r]} ({share[r]})" for r in RESOURCES)
    return f"within the horizon {over}, and of the {tasks:,} tasks {beyond} use more than their reservation"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _range(values: Sequence[int]) -> str:
    return f"{min(values)}" if min(values) == max(values) else f"{min(values)} to {max(values)}"
