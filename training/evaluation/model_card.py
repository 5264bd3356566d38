"""Writes the model card: what a model predicts, its data and scores, and where not to trust it, as Markdown.

After Mitchell et al., "Model Cards for Model Reporting", 2019.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from reclaim.data.core.nested import flatten
from reclaim.data.core.tables import Cell, Table
from reclaim.data.oom import OOM_DEFINITION
from reclaim.data.schema import RESOURCES
from reclaim.features.registry import N_FEATURES, PIPELINE_VERSION
from reclaim.features.targets import HORIZONS_S, TARGETS

OOM_NOTE: Final = "OOM label: "
"""Beginning of a training's note that defines the out-of-memory label of its datasets."""
LONGEST: Final = 5_000
"""Characters that MLflow's store keeps of a version's description."""

_QUANTILE_SCORES: Final = {
    "rows": "rows",
    "log loss": "log_loss",
    "pinball / usage": "pinball_over_usage",
    "coverage error": "coverage_error",
    "width": "width",
}
_OOM_SCORES: Final = {
    "positives": "positives",
    "base rate": "base_rate",
    "Brier skill": "brier_skill",
    "ECE": "ece",
    "average precision": "average_precision",
    "recall at 10 alerts": "recall_at_10",
    "at most": "recall_bound_at_10",
    "precision": "precision_at_10",
    "lead, s": "lead_s_at_10",
}

_LIMITS: Final = (
    "Workloads drift, and prices were set on one stretch of time: watch the violation rate; train again if it rises.",
    "Of a task younger than an hour little is known: the guards hold its limit at first. Judge young tasks by the "
    "scores by age.",
    "CPU is compressible: the CPU that a reservation covers is the largest 90th percentile within a window, capped at "
    "the limit; a violation throttles. Memory is not: it is the largest usage, and a violation may end a task.",
    "A limit that is itself too low is not seen: demand above the limit counts as the limit.",
    "The out-of-memory probability rests on a derived label of few positives: rank tasks by it, and look at the base "
    "rate before trusting its size.",
    "Everything is relative to the limit: a cell that grants differently, or a source that measures by means alone, is "
    "another population; replay on it before use.",
)


def model_card(
    report: Mapping[str, Any],
    *,
    settings: Mapping[str, Any],
    test_scores: Mapping[str, Any] | None = None,
    probability: Mapping[str, Any] | None = None,
    refitted: bool = False,
) -> str:
    """Return the card of a trained model.

    Parameters
    ----------
    report : mapping
        ``asdict`` of a ``train.TrainReport``; a dataset in it may hold ``nature`` (recorded, synthetic, composed).
    settings : mapping
        ``TrainConfig.settings()``.
    test_scores : mapping or None
        See ``scores.Scores``; of the test rows.
    probability : mapping or None
        ``ProbabilityCalibration.to_dict()``.
    refitted : bool
        Whether a second fit, to the validation rows, too, is served.

    Returns
    -------
    str
        Markdown of at most ``LONGEST`` characters: settings are cut first.
    """
    cut = "… (all of them are the run's parameters)"
    listed = ", ".join(f"{name}={value}" for name, value in flatten(settings).items())
    whole = _card(report, listed, test_scores, probability, refitted)
    if len(whole) > LONGEST:
        kept = max(len(listed) - (len(whole) - LONGEST) - len(cut), 0)
        whole = _card(report, listed[:kept] + cut, test_scores, probability, refitted)
    return whole if len(whole) <= LONGEST else whole[: LONGEST - 2] + "…\n"


def _card(
    report: Mapping[str, Any],
    settings: str,
    test_scores: Mapping[str, Any] | None,
    probability: Mapping[str, Any] | None,
    refitted: bool,
) -> str:
    reference = f"{report['model']}/{report['version']}" if report["version"] else f"{report['model']}@champion"
    horizons = ", ".join(f"{h} s" for h in HORIZONS_S)
    noted = (note.removeprefix(OOM_NOTE) for note in report["notes"] if note.startswith(OOM_NOTE))
    definition = next(noted, OOM_DEFINITION)
    sections = [
        f"# {report['model']}: {report['estimator']}, {report['horizon_s']} s ahead",
        f"Predicts, for a task of a cluster, curves of {', '.join(t.replace('_', ' ') for t in TARGETS)} over the "
        f"limit and the probability of out-of-memory, within {horizons}; and from them what to reserve. It reads "
        f"{N_FEATURES} features of feature pipeline `{PIPELINE_VERSION}`.",
        "## Data",
        _tight(_datasets(report)),
        "Fitted on the training period of seen collections. Prices and probabilities were set on the "
        "validation period after it, which a gap of one horizon parts from it. "
        + ("Then fitted once more, to both: the second fit is served, and has the test scores. " if refitted else "")
        + "Nothing was set on test rows.",
        "## Reservations",
        _tight(_margins(report)),
        "On validation rows: `price` of a violated task-window, in limits of a task of mean size; `violation`, share "
        "of task-windows whose demand passes the reservation; `reclaimed`, share of the limits. They met the budget "
        "there by construction: what they do later, a replay tells.",
        "## Forecast",
        _tight(_scores(report["scores"], test_scores, TARGETS, _QUANTILE_SCORES, (report["horizon_s"],))),
        "## Out-of-memory",
        f"{definition}.",
        _tight(_scores(report["scores"], test_scores, ("oom",), _OOM_SCORES, HORIZONS_S)),
        _probability(probability),
        "Alerts are per 1,000 task-days; the lead is the median of the events caught.",
        "## Limits of use",
        "\n".join(f"- {limit}" for limit in _LIMITS),
        "## Use",
        f"`reclaim serve --model {reference}`, `reclaim replay margins DATASET --out DIR --model {reference}`, or in "
        f'Python `load_bundle(fetch_bundle("{reference}")[0]).estimator("medium")`.',
        "## Notes and settings",
        "\n".join(f"- {note}" for note in report["notes"] if not note.startswith(OOM_NOTE)),
        f"Run {report['run_id']}. {settings}",
    ]
    return "\n\n".join(section.strip() for section in sections if section.strip()) + "\n"


def _tight(table: Table) -> str:
    """Return a table as Markdown without the spaces that align it: there is room for ``LONGEST`` characters."""
    return re.sub(r"-{2,}", "--", re.sub(r" {2,}", " ", table.as_markdown()))


def _datasets(report: Mapping[str, Any]) -> Table:
    rows = [
        (d["name"], d.get("nature"), str(d["fingerprint"])[:12], d["train"], d["valid"]) for d in report["datasets"]
    ]
    return Table(("dataset", "nature", "fingerprint", "training rows", "validation rows"), tuple(rows))


def _margins(report: Mapping[str, Any]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for margin, price in report["prices"].items():
        for r in RESOURCES:
            of = (report[what][margin][r] for what in ("violation", "reclaimed"))
            rows.append((margin, r, f"{price['value'][r]:.3g}", *of))
    columns = ("margin", "resource", "price", "violation", "reclaimed")
    return Table(columns, tuple(rows), percent=frozenset(columns[3:]))


def _scores(
    valid: Mapping[str, Any],
    test: Mapping[str, Any] | None,
    names: tuple[str, ...],
    shown: Mapping[str, str],
    horizons_s: tuple[int, ...],
) -> Table:
    """Return a row per name, horizon and period that has scores."""
    rows: list[tuple[Cell, ...]] = []
    for name in names:
        for horizon_s in horizons_s:
            for period, scores in (("validation", valid), ("test", test or {})):
                values = scores.get(name, {}).get(f"{horizon_s}s")
                if values is not None:
                    cells = [_whole(values.get(score)) for score in shown.values()]
                    rows.append((name.replace("_", " "), f"{horizon_s} s", period, *cells))
    return Table(("target", "horizon", "rows of", *shown), tuple(rows))


def _whole(value: float | None) -> Cell:
    """Return a count as an integer, so that it is not printed as a fraction."""
    return int(value) if value is not None and value >= 1 and value == int(value) else value


def _probability(probability: Mapping[str, Any] | None) -> str:
    if probability is None:
        return "Its probability is as the model says it."
    fitted = "; ".join(
        f"{horizon}: slope {of['slope']:.3g}, intercept {of['intercept']:.3g}"
        for horizon, of in probability["horizons"].items()
    )
    return f"Its log-odds were calibrated on validation rows (Platt): {fitted}."
