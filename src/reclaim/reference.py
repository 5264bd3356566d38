"""Renders docs/reference.md from the code: columns, features, targets, labels, experiments, service settings."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from reclaim.data import schema
from reclaim.data.oom import OOM_DEFINITION
from reclaim.features.registry import (
    CONTEXT,
    CONTEXT_WINDOWS,
    FEATURE_NAMES,
    FEATURES,
    FIRST_RELATED,
    PIPELINE_VERSION,
    SLOT_S,
)
from reclaim.features.splits import GROUPS, PERIODS, ROLES
from reclaim.features.targets import HORIZONS_S, TARGETS
from reclaim.replay.runs.catalogue import EXPERIMENTS, load_experiment
from reclaim.replay.settings import ReplayConfig
from reclaim.serving.predictions.columns import schema_of
from reclaim.serving.settings import ENV_PREFIX, ServingSettings


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
        "EventType": {k: v for k, v in vars(schema.EventType).items() if isinstance(v, int)},
        "MachineEventType": {k: v for k, v in vars(schema.MachineEventType).items() if isinstance(v, int)},
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
        "Each is computed at t, the end of a window, from the task's windows up to t. Those from "
        f"`{FEATURE_NAMES[FIRST_RELATED]}` on are optional (`reclaim features DATASET --set related=true`): of related "
        f"tasks' windows in the {SLOT_S}-second slots of the clock before the slot of t.",
        "",
        "| feature | formula | unit | where missing |",
        "|---|---|---|---|",
        *(f"| `{f.name}` | {f.formula} | {f.unit} | {f.missing} |" for f in FEATURES),
        "",
        f"The context, for models of sequences: of each of the last {CONTEXT_WINDOWS} windows,",
        "",
        "| channel | formula | over |",
        "|---|---|---|",
        *(f"| `{c.name}` | {c.formula} | {_over(c.over)} |" for c in CONTEXT),
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
        *_experiments(),
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
        *_columns("columns of a file of predictions", schema_of((0.99,))),
    ]


def _experiments() -> list[str]:
    lines = ["## Experiments", "", "Settings of all of them, for `--set` and `--config`:", "", *_settings(ReplayConfig)]
    for name in EXPERIMENTS:
        experiment = load_experiment(name)
        lines += [f"### `reclaim replay {name}`", "", f"{experiment.title}. "]
        columns = "; ".join(f"{c.heading} (`{c.metric}`)" for c in experiment.columns)
        lines[-1] += f"Columns of its table, with their metrics in MLflow: {columns}."
        lines += ["", *_settings(experiment.config, without=ReplayConfig)]
    return lines


def _service() -> list[str]:
    lines = ["## Settings of the service", ""]
    lines += ["Environment variables; options of `reclaim serve` take precedence.", ""]
    meanings = _meanings(ServingSettings)
    lines += ["| variable | default | meaning |", "|---|---|---|"]
    for name, field in ServingSettings.model_fields.items():
        default = "" if field.default in (None, "") else _default(field.default)
        lines.append(f"| `{ENV_PREFIX}{name.upper()}` | {default} | {meanings[name]} |")
    return [*lines, ""]


def _settings(config: type[Any], without: type[Any] | None = None) -> list[str]:
    """Return a table of settings, without those that another class has with the same default."""
    known = {} if without is None else asdict(without())
    shown = {name: value for name, value in asdict(config()).items() if name not in known or known[name] != value}
    if not shown:
        return []
    meanings = _meanings(config)
    rows = [f"| `{name}` | {_default(value)} | {meanings[name]} |" for name, value in shown.items()]
    return ["| setting | default | meaning |", "|---|---|---|", *rows, ""]


def _default(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"`{name}` {_default(inner)}" for name, inner in value.items())
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _meanings(config: type[Any]) -> dict[str, str]:
    """Return field → docstring of a class and its bases."""
    meanings: dict[str, str] = {}
    for kind in reversed(config.__mro__[:-1]):
        body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, line in zip(body.body, body.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant):
                meanings[ast.unparse(field.target)] = " ".join(str(line.value.value).replace("``", "`").split())
    return meanings


def _over(resource: int | None) -> str:
    return "" if resource is None else f"the {schema.RESOURCES[resource]} limit at t"


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
