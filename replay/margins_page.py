"""What the page of the margins experiment says, and its parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from reclaim.data.schema import RESOURCES
from reclaim.data.style import RESOURCE_TITLES, RESOURCE_WORDS
from reclaim.data.table import show
from reclaim.replay import hosted_page
from reclaim.replay.cell import SEQUENCE
from reclaim.replay.kinds import COMPARED, LEARNED, STATISTICAL, Results, Section, judged_ahead
from reclaim.replay.margins_runs import COLUMNS, UNSEEN_COLUMNS, runs
from reclaim.replay.margins_tables import detail_table, margins_table, sequence_table, split_table
from reclaim.replay.paired import BETTER, LESS, MORE, RECLAIMED, UNKNOWN, VIOLATION, WORSE
from reclaim.replay.report import runs_table
from reclaim.training.estimators.margin import MARGIN_NAMES

_PAIR: Final = (RECLAIMED, VIOLATION)
_RANK: Final = {BETTER: 0, WORSE: 2}
"""Of verdicts, for choosing whom to speak of; the others lie between."""
_WORDS: Final = {
    BETTER: "better by more than the noise",
    WORSE: "worse by more than the noise",
    MORE: "ahead in what it reclaims and behind in violations",
    LESS: "behind in what it reclaims and ahead in violations",
}


def says(results: Results) -> list[str]:
    """Return what the numbers show: each quarter, whether medium lies between its neighbours, who is better."""
    drawn = [e for e in results["estimators"] if e["sequence"] is not None and e["sequence"]["drawn"]]
    compared = [e for e in results["estimators"] if e["kind"] in COMPARED]
    paragraphs = [_quarters(e, results["timeline"]) for e in drawn]
    if compared:
        paragraphs.append(_order_of_margins(compared, results["timeline"]))
    return paragraphs + hosted_page.says(results) + _who_is_better(results)


def judged(results: Results) -> str:
    """Return how the numbers came about, those of the closed loop apart."""
    beside = " The closed loop counts what befell tasks while they ran by the reservations, on the same test period."
    return judged_ahead(results) + (beside if (results.get("closed_loop") or {}).get("estimators") else "")


def sections(results: Results) -> list[Section]:
    """Return the parts of the page."""
    config = results["inputs"]["config"]
    quarter = _length(results["timeline"]["length_hours"] / len(SEQUENCE))
    recorded = runs(results)
    return [
        Section(
            "The cell over time",
            figure="margins_over_time",
            caption=(
                "Borg's experiment (Verma et al., EuroSys'15, Figure 12) repeated in the open loop. Borg changed the "
                f"margin by the week; here a segment is a quarter of the test period, {quarter}. Reservations are "
                "those in force when each window began. Nothing was placed by them: usage and placement are the "
                "trace's own."
            ),
            table=sequence_table(results),
        ),
        Section(
            "Each margin over the whole test period",
            figure="reclaimed_at_margins",
            caption=(
                f"What each estimator reclaims, with {config['confidence']:.0%} intervals over collections; the dashed "
                "line is the oracle. A point further right at the same violation rate is better; comparing points of "
                "different violation rates is not a comparison."
            ),
            table=runs_table(recorded, COLUMNS),
        ),
        *hosted_page.section(results),
        Section("Collections kept for the test", table=runs_table(recorded, UNSEEN_COLUMNS)),
        Section("By priority tier, medium margin", table=split_table(results, "tiers", "medium")),
        Section("By age of the task, medium margin", table=split_table(results, "ages", "medium")),
        Section("More of each", table=detail_table(results)),
        Section(
            "The margins, and what they did on the validation rows they were set on",
            text="\n\n".join(f"{e['name']}: {'; '.join(e['notes'])}." for e in results["estimators"] if e["notes"]),
            table=margins_table(results),
        ),
    ]


def _quarters(estimator: Mapping[str, Any], timeline: Mapping[str, Any]) -> str:
    """Say what each quarter of the sequence reclaimed and cost."""
    segments = estimator["sequence"]["segments"]
    reclaimed = " and ".join(
        f"{_listed([show(s['reclaimed_share'][r], percent=True) for s in segments])} of the {RESOURCE_WORDS[r]} limits"
        for r in RESOURCES
    )
    text = (
        f"`{estimator['name']}` went through {_listed([s['margin'] for s in segments])}, "
        f"{_length(timeline['length_hours'] / len(segments))} each, and reclaimed {reclaimed}. "
        f"Tasks passed their memory reservation in {_listed([_count(s['tasks_over']) for s in segments])} task-windows"
    )
    if timeline["machines"]:
        events = [s["events"] for s in segments]
        often = f"{_listed([_count(n) for n in events])} times" if any(events) else "at no time"
        text += f"; had everything reclaimed been lent out and used, machines would have run out of memory {often}"
    return text + "."


def _order_of_margins(estimators: Sequence[Mapping[str, Any]], timeline: Mapping[str, Any]) -> str:
    """Say whether medium's event rate lies between baseline's and aggressive's, in the sequence and all along."""
    kinds = {"tasks_over": "task-windows over their memory reservation"}
    if timeline["machines"]:
        kinds = {"events": "would-be out-of-memory events", **kinds}
    texts = []
    for key, words in kinds.items():
        in_sequence = {e["name"]: _per_day(e["sequence"]["segments"], timeline["segments"], key) for e in estimators}
        days = timeline["length_hours"] / 24
        all_along = {e["name"]: {m: _rate(e["results"][m]["oom"][key], days) for m in MARGIN_NAMES} for e in estimators}
        texts.append(
            f"Medium's rate of {words}: in the sequence, where each quarter has its own workload, "
            f"{_ordered(in_sequence)}; under one margin over the whole test period, {_ordered(all_along)}."
        )
    return " ".join(texts)


def _ordered(rates: Mapping[str, Mapping[str, float | None]]) -> str:
    """Return for how many the rates rise from baseline over medium to aggressive, and those for which they do not."""
    known = {n: [v for m in MARGIN_NAMES if (v := of[m]) is not None] for n, of in rates.items()}
    known = {n: of for n, of in known.items() if len(of) == len(MARGIN_NAMES)}
    if not known:
        return "unknown, as memory is"
    alike = sum(len(set(of)) == 1 for of in known.values())
    if alike == len(known):
        return f"the same as baseline's and aggressive's for {_of(alike, 'estimator')}"
    rising = [name for name, of in known.items() if of == sorted(of)]
    text = f"between baseline's and aggressive's for {len(rising)} of {_of(len(known), 'estimator')}"
    if alike:
        text += f" ({alike} of them with the same under all three)"
    at = _listed(list(MARGIN_NAMES))
    odd = [
        f"`{n}` ({_listed([f'{v:.3g}' if v < 1000 else f'{v:,.0f}' for v in of])} a day at {at})"
        for n, of in known.items()
        if n not in rising
    ]
    return text + (f", not for {_listed(odd)}" if odd else "")


def _per_day(
    segments: Sequence[Mapping[str, Any]], bounds: Sequence[Mapping[str, Any]], key: str
) -> dict[str, float | None]:
    """Return the rate of events a day under each margin of the sequence, all quarters of a margin together."""
    rates: dict[str, float | None] = {}
    for margin in MARGIN_NAMES:
        mine = [(s, b) for s, b in zip(segments, bounds, strict=True) if b["margin"] == margin]
        days = sum(b["end_hours"] - b["start_hours"] for _, b in mine) / 24
        rates[margin] = _rate(sum(s[key] for s, _ in mine), days)
    return rates


def _who_is_better(results: Results) -> list[str]:
    """Say how the best learned estimator (statistical, without one) stands to the best statistical other one."""
    kinds = {e["name"]: e["kind"] for e in results["estimators"]}
    kind = LEARNED if LEARNED in kinds.values() else STATISTICAL
    opponent = "the best statistical one" if kind == LEARNED else "the best other one"
    found = {e["name"]: e["results"] for e in results["estimators"]}
    paragraphs, verdicts = [], []
    for margin, differences in results["against_best"].items():
        sentences = []
        for r in RESOURCES:
            mine = {name: of[r] for name, of in differences.items() if kinds[name] == kind and r in of}
            known = {name: of for name, of in mine.items() if of["verdict"] != UNKNOWN}
            if not known:
                continue
            reclaimed, violated = ({n: found[n][margin]["all"][m][r]["value"] for n in known} for m in _PAIR)
            name = min(known, key=lambda n: (_RANK.get(known[n]["verdict"], 1), -reclaimed[n]))
            one = known[name]
            verdicts.append(one["verdict"])
            sentences.append(
                f"{RESOURCE_TITLES[r]}: `{name}` reclaims {show(reclaimed[name], percent=True)} and violates "
                f"{show(violated[name], percent=True)}, {_points(one[RECLAIMED])} and {_points(one[VIOLATION])} "
                f"against `{one['against']}`, {opponent}: {_WORDS.get(one['verdict'], one['verdict'])}"
            )
        if sentences:
            paragraphs.append(f"The {margin} margin, best {kind} estimator. {'. '.join(sentences)}.")
    if not verdicts:
        return []
    counts = [f"{_WORDS.get(v, v)} in {verdicts.count(v)}" for v in dict.fromkeys(verdicts)]
    comparisons = f"{_of(len(verdicts), 'comparison')} (a margin and a resource each)"
    return [f"In {comparisons} of the best {kind} estimator with {opponent}, it is {_listed(counts)}.", *paragraphs]


def _points(interval: Mapping[str, float | None]) -> str:
    """Return a difference of shares, in points, with its interval."""
    value, low, high = ("-" if (v := interval[k]) is None else f"{100 * v:+.2f}" for k in ("value", "low", "high"))
    return f"{value} points ({low} to {high})"


def _rate(events: int | None, days: float) -> float | None:
    return None if events is None or not days else events / days


def _count(events: int | None) -> str:
    return "-" if events is None else f"{events:,}"


def _of(number: int, thing: str) -> str:
    return f"{number} {thing}{'s' * (number != 1)}"


def _length(hours: float) -> str:
    return f"{hours:.1f} hours" if hours < 72 else f"{hours / 24:.1f} days"


def _listed(words: Sequence[str]) -> str:
    """Return words as a sentence lists them.

    >>> _listed(["a", "b", "c"]), _listed(["a"])
    ('a, b and c', 'a')
    """
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
