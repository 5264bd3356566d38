"""Renders docs/reference.md from the code: columns, features, targets, labels, experiments, service settings."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, Final

from reclaim.config import default_text, meanings_of, settings_of
from reclaim.data import schema
from reclaim.data.oom import OOM_DEFINITION
from reclaim.features.build import FeatureConfig
from reclaim.features.registry import FEATURES, PIPELINE_VERSION, RECENT_WINDOWS, SLOT_S
from reclaim.features.splits import GROUPS, PERIODS, ROLES
from reclaim.features.targets import HORIZONS_S, TARGETS
from reclaim.replay.runs.catalogue import EXPERIMENTS, RECOMMEND, load_experiment
from reclaim.replay.settings import ComparisonConfig, ReplayConfig
from reclaim.serving.predictions.columns import schema_of
from reclaim.serving.settings import ENV_PREFIX, ServingSettings
from reclaim.training.settings import TrainConfig

_FOR_STAGE: Final = {
    "features": "For `--set` and `--config`; `reclaim features --help` prints the same.",
    "train": "For `--set` and `--config` of `train` and `tune`; `--help` of both prints the same.",
}


def render() -> str:
    """Return the page, as Markdown."""
    lines = [
        "# Reference",
        "",
        "Generated from the code by `python -m reclaim.reference > docs/reference.md`; a test keeps them equal.",
        "",
        "## Columns of a dataset",
        "",
    ]
    for name, table in schema.TABLES.items():
        lines += _columns(name, table)
    lines += _columns("extra columns, each in the datasets of some trace alone", schema.EXTRAS.values())
    lines += [
        "### Columns that are stored and not read",
        "",
        "No feature, estimator, replay or service reads them. A test holds that all others are read.",
        "",
        "| column | not read because |",
        "|---|---|",
        *(f"| `{column}` | {why} |" for column, why in schema.UNREAD.items()),
        "",
    ]
    codes = {
        "EventType": schema.codes_of(schema.EventType),
        "MachineEventType": schema.codes_of(schema.MachineEventType),
        **{title: {name: place for place, name in enumerate(names)} for title, names in (
            ("TIERS", schema.TIERS), ("MISSING_TYPES", schema.MISSING_TYPES), ("RELATIONS", schema.RELATIONS),
            ("VERTICAL_SCALINGS", schema.VERTICAL_SCALINGS), ("SCHEDULERS", schema.SCHEDULERS))},
    }  # fmt: skip
    lines += ["### Codes", ""]
    lines += [f"- {title}: {', '.join(f'{code} {name}' for name, code in of.items())}" for title, of in codes.items()]
    lines.append("")
    lines += [
        f"## Features (pipeline `{PIPELINE_VERSION}`)",
        "",
        "Each is computed at t, the end of a window, from the task's windows up to t; those of its collection from the "
        f"windows in the {SLOT_S}-second slots of the clock before the slot of t. Recent windows are the last "
        f"{RECENT_WINDOWS}, less than 2 hours where windows are shorter than 5 minutes. In a mean or "
        "percentile whose weights halve, a window counts by its length, up to 5 minutes.",
        "",
        "| feature | formula | unit | where missing |",
        "|---|---|---|---|",
        *(f"| `{f.name}` | {f.words} | {f.unit} | {f.missing} |" for f in FEATURES),
        "",
        "## Targets and splits",
        "",
        f"Targets: {', '.join(f'`{t}`' for t in TARGETS)}; horizons: {', '.join(f'{h:,} s' for h in HORIZONS_S)}; all "
        "over the limit at t. CPU is the largest 90th percentile of a window in the horizon, capped at the limit; "
        "memory the largest maximum; `peak_cpu` the largest CPU maximum, not capped. A source without percentiles or "
        "maxima falls back to its mean.",
        "",
        f"{OOM_DEFINITION}.",
        "",
        f"Periods by time: {', '.join(PERIODS)}. Groups by collection: {', '.join(GROUPS)}. A target is used in a "
        "period only if all it rests on was measured in it; the manifest counts what is known and what the gap takes.",
        "",
        f"Roles of a dataset (`--set split.role=`): {', '.join(ROLES)}. `test`: nothing of it is ever trained on, its "
        "first part sets margins; `train`: no test period; `all`: split by time and by collection.",
        "",
        *_predictions(),
        *_stages(),
        *_experiments(),
        *_recommendation(),
        *_service(),
    ]
    return "\n".join(lines)


def _predictions() -> list[str]:
    return [
        "## Predictions",
        "",
        f"A row of `reclaim predict`. {', '.join(f'`{t}_q…`' for t in TARGETS)} have one column for each quantile "
        "level of the model, here 0.99 alone. The horizon is the model's; `--json` and the metadata of a parquet file "
        "name it.",
        "",
        *_columns("columns of a file of predictions", schema_of((0.99,), named=True)),
    ]


def _stages() -> list[str]:
    lines = []
    for command, config in (("features", FeatureConfig), ("train", TrainConfig)):
        lines += [f"## Settings of `reclaim {command}`", "", _FOR_STAGE[command], "", *_settings(config)]
    return lines


def _experiments() -> list[str]:
    lines = ["## Experiments", "", "Settings of all of them, for `--set` and `--config`:", "", *_settings(ReplayConfig)]
    for name in EXPERIMENTS:
        experiment = load_experiment(name)
        lines += [f"### `reclaim replay {name}`", "", f"{experiment.title}. "]
        columns = "; ".join(f"{c.heading} (`{c.metric}`)" for c in experiment.columns)
        lines[-1] += f"Columns of its table, with their metrics in MLflow: {columns}."
        lines += ["", *_settings(experiment.config, without=ReplayConfig)]
    return lines


def _recommendation() -> list[str]:
    config = load_experiment(RECOMMEND).config
    lines = ["## Settings of `reclaim recommend`", ""]
    lines += ["In addition to those of all experiments; these have other defaults or are its own:", ""]
    return [*lines, *_settings(config, without=ComparisonConfig)]


def _service() -> list[str]:
    lines = ["## Settings of the service", ""]
    lines += [
        "Environment variables; an empty one counts as not set; options of `reclaim serve` take precedence.",
        "",
    ]
    meanings = meanings_of(ServingSettings)
    lines += ["| variable | default | meaning |", "|---|---|---|"]
    for name, field in ServingSettings.model_fields.items():
        default = "" if field.default in (None, "") else default_text(field.default)
        lines.append(f"| `{ENV_PREFIX}{name.upper()}` | {default} | {meanings[name]} |")
    return [*lines, ""]


def _settings(config: type[Any], without: type[Any] | None = None) -> list[str]:
    """Return a table of settings, without those that another class has with the same default."""
    known = set() if without is None else {(s.name, s.default) for s in settings_of(without)}
    rows = [
        f"| `{s.name}` | {s.default} | {s.meaning} |" for s in settings_of(config) if (s.name, s.default) not in known
    ]
    return ["| setting | default | meaning |", "|---|---|---|", *rows, ""] if rows else []


def _columns(title: str, fields: Iterable[Any]) -> list[str]:
    lines = [f"### {title}", "", "| column | type | unit | meaning |", "|---|---|---|---|"]
    for field in fields:
        unit, meaning = (field.metadata[key].decode() for key in (b"unit", b"meaning"))
        meaning = meaning.replace("|", "\\|")
        type_ = str(field.type).replace("list<element: ", "list<").replace("list<item: ", "list<").replace("<", "\\<")
        lines.append(f"| `{field.name}` | {type_} | {unit} | {meaning} |")
    return [*lines, ""]


if __name__ == "__main__":
    sys.stdout.write(render())
