"""Compares the models of a replay with the first of them: is the new one better than the champion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, Final

from reclaim.data.core.prose import interval
from reclaim.data.core.style import RESOURCE_WORDS
from reclaim.data.core.tables import Cell, Table
from reclaim.data.schema import RESOURCES
from reclaim.replay.experiment import HEADLINE, Results
from reclaim.replay.open_loop.bootstrap import Bootstrap
from reclaim.replay.open_loop.paired import RECLAIMED, VIOLATION, Paired
from reclaim.replay.report.page import brief
from reclaim.replay.report.units import UnitSums
from reclaim.replay.settings import ReplayConfig
from reclaim.training.margins.margin import MARGIN_NAMES

_METRICS: Final = (RECLAIMED, VIOLATION)


def against_first(models: Sequence[str], units: UnitSums, config: ReplayConfig) -> dict[str, dict[str, dict[str, Any]]]:
    """Return, by margin, model and resource, the paired difference of each other model to the first.

    Parameters
    ----------
    models : sequence of str
        Names of the learned estimators, the one to compare with first.
    units : UnitSums
        Holds them under every margin.
    config : ReplayConfig
    """
    found: dict[str, dict[str, dict[str, Any]]] = {}
    if len(models) < 2:
        return found
    first, *others = models
    for margin in MARGIN_NAMES:
        paired = Paired({name: units.sums[name, margin] for name in models}, Bootstrap.of(config))
        for name, (r, resource) in product(others, enumerate(RESOURCES)):
            compared = paired.compare(name, first, r, config.budgets.of(margin))
            found.setdefault(margin, {}).setdefault(name, {})[resource] = compared.report()
    return found


def models_table(results: Results) -> Table:
    """Return one row per margin, resource and model but the first: both, their difference, and the verdict."""
    measured = {e["name"]: e["results"] for e in results["estimators"]}
    rows: list[tuple[Cell, ...]] = []
    for margin, resource, name, of in _differences(results):
        numbers: list[Cell] = []
        for metric in _METRICS:
            mine, theirs = (measured[n][margin]["all"][metric][resource]["value"] for n in (name, of["against"]))
            numbers += [mine, theirs, of[metric]["value"], interval(of[metric])]
        rows.append((margin, RESOURCE_WORDS[resource], name, of["against"], *numbers, of["verdict"]))
    numbered = [f"{what}{part}" for what in ("reclaimed", "violation") for part in ("", ", first", ", difference")]
    columns = ["margin", "resource", "model", "compared with"]
    for what in ("reclaimed", "violation"):
        columns += [what, f"{what}, first", f"{what}, difference", f"{what}, interval"]
    return Table((*columns, "verdict"), tuple(rows), frozenset(numbered))


def models_summary(results: Results) -> Table:
    """Return the rows of ``models_table`` at ``HEADLINE``, for a console of 80 columns."""
    measured = {e["name"]: e["results"] for e in results["estimators"]}
    rows = tuple(
        (RESOURCE_WORDS[resource], name, measured[name][margin]["all"][RECLAIMED][resource]["value"], of["against"],
         of[RECLAIMED]["value"], interval(of[RECLAIMED]), brief(of["verdict"]))
        for margin, resource, name, of in _differences(results)
        if margin == HEADLINE
    )  # fmt: skip
    columns = ("resource", "model", "reclaimed", "compared with", "difference", "interval", "verdict")
    caption = f"Each model compared with the first at the {HEADLINE} margin"
    return Table(columns, rows, frozenset({"reclaimed", "difference"}), caption)


def _differences(results: Results) -> list[tuple[str, str, str, Mapping[str, Any]]]:
    """Return margin, resource, model and difference of everything that was measured."""
    return [
        (margin, resource, name, of[resource])
        for margin, models in results.get("against_first", {}).items()
        for resource in RESOURCES
        for name, of in models.items()
        if of[resource][RECLAIMED]["value"] is not None
    ]
