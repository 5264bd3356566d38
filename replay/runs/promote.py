"""Promotes a model: moves the alias that is served to it when it is not worse than the model that has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from reclaim.data.core.style import RESOURCE_WORDS
from reclaim.data.core.tables import Cell, Table
from reclaim.data.errors import ConfigError, ModelError, OtherReleaseError
from reclaim.data.schema import RESOURCES
from reclaim.data.windows import Windows
from reclaim.features.targets import HORIZONS_S
from reclaim.replay.open_loop.estimates import estimator_makers
from reclaim.replay.open_loop.fold import answer_folded
from reclaim.replay.open_loop.history import window_seconds
from reclaim.replay.open_loop.metrics import Scored, sums
from reclaim.replay.open_loop.paired import UNKNOWN, WORSE, Paired
from reclaim.replay.runs.unseen import compared_on
from reclaim.replay.settings import ReplayConfig
from reclaim.training.bundle import Bundle, load_model
from reclaim.training.fitting.held_out import mean_limit_of
from reclaim.training.fitting.sources import Source, open_sources, windows_of
from reclaim.training.margins.answers import Priced
from reclaim.training.margins.calibrate import calibrate, guarded_reservations
from reclaim.training.margins.margin import Budgets
from reclaim.training.models.estimator import ForecastEstimator
from reclaim.training.tracking import runs as tracking
from reclaim.training.tracking.references import BUILTIN, is_folder
from reclaim.training.tracking.runs import ModelVersion

_COLUMNS: Final = ("margin", "budget", "resource", "reclaimed", "champion", "difference", "low", "high", "verdict")
_SHARES: Final = frozenset({"budget", "reclaimed", "champion", "difference", "low", "high"})
_FORCE: Final = "--force promotes it anyway"


@dataclass(frozen=True)
class Promotion:
    """The outcome of a promotion.

    Attributes
    ----------
    model, version : str
        The version that was to be promoted.
    before : str or None
        The version that was served before; None for none.
    moved : bool
        Whether the alias points to another version than before.
    why : str
        The reason, in a sentence without its full stop.
    comparison : list of dict
        By margin and resource: what both reclaim of validation rows at the same budget, and the paired difference.
    """

    model: str
    version: str
    before: str | None
    moved: bool
    why: str
    comparison: list[dict[str, Any]]

    @property
    def refused(self) -> bool:
        """True if the version is not served."""
        return not self.moved and self.version != self.before

    @property
    def table(self) -> Table:
        """The comparison, for a person."""
        return Table(_COLUMNS, tuple(tuple(row[c] for c in _COLUMNS) for row in self.comparison), _SHARES)


def promote(
    datasets: Sequence[Path], reference: str = f"reclaim@{tracking.CANDIDATE}", *, force: bool = False
) -> Promotion:
    """Point ``champion`` to a version when it is not worse than the one that it points to.

    Both have prices set again on the validation rows, at the budgets that the candidate was trained for, so that they
    violate alike; it is worse where it reclaims less beyond the noise, of any resource, at either budget. Rows of a
    single collection have no noise to compare with, and it is refused, too. The first version of a name is compared
    with the built-in model, or with none where no dataset is named. A champion of another release cannot be evaluated,
    and the built-in model takes its place. No test row is read.

    Parameters
    ----------
    datasets : sequence of Path
        With features; several are judged together.
    reference : str
        Registered version.
    force : bool
        Whether it is promoted without a comparison.

    Raises
    ------
    ConfigError
        No dataset is named, or one of the models was trained on validation rows of it.
    ModelError
        It is no registered version, there is none, it or the champion cannot be read, or the champion became another
        one meanwhile.
    """
    if is_folder(reference):
        raise ModelError(
            f"{reference}: expected NAME@ALIAS or NAME/VERSION of a registered model, which `reclaim train` makes; "
            "a bundle in a folder is served by `reclaim serve --model FOLDER`"
        )
    found = tracking.resolve_model(reference)
    champion = tracking.find_version(f"{found.name}@{tracking.CHAMPION}")
    before = champion.version if champion else None
    if found.version == before:
        return Promotion(found.name, found.version, before, False, "served already", [])
    candidate = load_model(f"{found.name}/{found.version}")  # raises before it is one that no command can read
    if force or (champion is None and not datasets):
        why = f"promoted by --force over version {before}" if champion else "the first one to be served"
        return _moved(found, before, why, [])
    if not datasets:
        raise ConfigError(f"name the dataset whose validation rows {reference} is judged on; {_FORCE}")
    served = BUILTIN if champion is None else f"{found.name}/{before}"
    what = "the built-in model" if champion is None else f"version {before}"
    try:
        of_served = load_model(served)
    except OtherReleaseError:
        served, of_served = BUILTIN, load_model(BUILTIN)
        what = f"the built-in model, for version {before} is of another release,"
    except ModelError as error:
        raise ModelError(f"the champion {served} cannot be compared with ({error}); {_FORCE}") from error
    rows = _compared(open_sources(datasets), candidate, of_served)
    failed = [f"{row['resource']} at {row['margin']}" for row in rows if row["verdict"] in (WORSE, UNKNOWN)]
    if not failed:
        return _moved(found, before, f"not worse than {what} on validation rows", rows)
    unknown = all(row["verdict"] != WORSE for row in rows)
    how = "cannot be told from" if unknown else "reclaims less than"
    why = f"{found.name}/{found.version} {how} {served} on validation rows ({', '.join(failed)}); {_FORCE}"
    return Promotion(found.name, found.version, before, False, why, rows)


def _moved(found: ModelVersion, before: str | None, why: str, rows: list[dict[str, Any]]) -> Promotion:
    """Move the alias, unless it was moved while this one was compared: it was not compared with that version."""
    champion = tracking.find_version(f"{found.name}@{tracking.CHAMPION}")
    if champion is not None and champion.version not in (before, found.version):
        raise ModelError(f"{found.name}/{champion.version} became the champion meanwhile; run again to compare with it")
    tracking.move_alias(found, tracking.CHAMPION)
    return Promotion(found.name, found.version, before, found.version != before, why, rows)


def _compared(sources: Sequence[Source], candidate: Bundle, champion: Bundle) -> list[dict[str, Any]]:
    """Return ``Promotion.comparison``; a resource that was not measured has no row."""
    models = {"candidate": candidate, "champion": champion}
    asked, rows = zip(*(compared_on(models, source.features, _FORCE) for source in sources), strict=True)
    settings: Mapping[str, Any] = candidate.trained.get("settings", {})
    budgets = Budgets(**settings.get("budgets", {}))
    if not sum(map(len, rows)):
        raise ModelError(f"{sources[0].dataset.path}: no validation row to judge on; {_FORCE}")
    x = np.concatenate([source.features.x[r] for source, r in zip(sources, rows, strict=True)])
    y = np.concatenate([source.features.targets(r)[0] for source, r in zip(sources, rows, strict=True)])
    target = y[:, : len(RESOURCES), HORIZONS_S.index(candidate.horizon_s)].astype(np.float64)
    windows = windows_of(sources, rows)
    place = np.repeat(np.arange(len(rows)), [len(r) for r in rows])  # ids of collections are those of one dataset
    _, unit = np.unique(np.stack([place, windows.collection_id]), axis=1, return_inverse=True)
    config = ReplayConfig(horizon_s=candidate.horizon_s, estimators=())
    reserved = {}
    for name in models:
        of_source = (np.flatnonzero(place == k) for k in range(len(sources)))
        answers = Priced.joined(
            [
                _answered(config, {name: asked[k][name]}, sources, x[mine], windows.take(mine))
                for k, mine in enumerate(of_source)
            ]
        )
        made = calibrate(answers, windows, target, budgets, by_tier=settings.get("by_tier", False))
        reserved[name] = guarded_reservations(answers, windows, made.settings)

    def unit_sums(reservation: NDArray[np.float64]) -> NDArray[np.float64]:
        nothing = np.full(target.shape, np.nan)
        before = np.full(len(target), -1)
        scored = Scored(target, nothing, reservation, windows.limit, window_seconds(windows), before)
        return sums(scored, unit.reshape(-1), int(unit.max()) + 1)

    found = []
    for margin, budget in asdict(budgets).items():
        paired = Paired({name: unit_sums(of[margin]) for name, of in reserved.items()})
        for r, resource in enumerate(RESOURCES):
            values: dict[str, Cell] = {"margin": margin, "budget": budget, "resource": RESOURCE_WORDS[resource]}
            values |= {"reclaimed": paired.value("candidate", r), "champion": paired.value("champion", r)}
            if not any(np.isnan(paired.value(name, r)) for name in models):
                compared = paired.compare("candidate", "champion", r, budget)
                interval = compared.difference.reclaimed.report()
                bounds = {"low": interval["low"], "high": interval["high"]}
                found.append(values | {"difference": interval["value"], **bounds, "verdict": compared.verdict})
    return found


def _answered(
    config: ReplayConfig, model: Mapping[str, Bundle], sources: Sequence[Source], x: NDArray[np.float32],
    windows: Windows,
) -> Priced:  # fmt: skip
    """Return a model's answers to the validation rows of one source, on which it was not fitted."""
    (make,) = estimator_makers(config, model, mean_limit_of(sources)).values()
    estimator = make()
    assert isinstance(estimator, ForecastEstimator)
    return answer_folded(estimator, x, windows)
