"""Saves and loads the bundle, all that is registered for a trained model, and makes estimators from it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from zipfile import BadZipFile

import numpy as np

from reclaim.data.core.files import copy_files, replaced_folder
from reclaim.data.errors import ConfigError, ModelError, OtherReleaseError
from reclaim.data.schema import RESOURCES
from reclaim.data.windows import Cell
from reclaim.features.groups import TIER_LABELS
from reclaim.features.registry import FEATURE_NAMES, N_FEATURES, PIPELINE_VERSION
from reclaim.features.targets import HORIZONS_S, TARGETS
from reclaim.training.estimators.registry import LEARNED, imported
from reclaim.training.machines.curve import MachineCurve
from reclaim.training.machines.estimator import BOUND, Curves, MachineEstimator
from reclaim.training.margins.margin import MARGIN_NAMES, NO_MARGIN, Budgets, Guarded
from reclaim.training.margins.price import Price
from reclaim.training.models.estimator import UNKNOWN_LIMITS, Earlier, ForecastEstimator
from reclaim.training.models.oom_calibration import Calibrated
from reclaim.training.tracking.references import BUILTIN_FOLDER, ModelLocation, find_model, find_served

if TYPE_CHECKING:
    import pandas as pd

    from reclaim.training.models.forecaster import Forecaster

BUNDLE_FILE: Final = "bundle.json"
_HELD_OUT: Final = "held_out"
"""Folder of the forecaster of the training rows alone."""
ORIGIN_FILE: Final = "origin.json"
"""In a copied bundle: name, version and training run of the registered model that it is a copy of."""
OTHER_UNIT: Final = 30.0
"""Factor between mean limits from which on amounts count as being in another unit. Units that are mistaken for each
other are 1,000 apart or more, such as cores and millicores; cells in one unit differ by the size of their tasks. 30 is
about the geometric mean of 1 and 1,000."""
FORMAT: Final = 7
"""Format of the files; a model of another one is refused, and its finished run does not count as a new one."""


@dataclass(frozen=True)
class Bundle:
    """A trained model with everything that an answer needs.

    Attributes
    ----------
    kind : str
        One of ``estimators.registry.LEARNED``.
    forecaster : Forecaster
        With its OOM probability calibrated.
    horizon_s : int
        The horizon the prices were set for, in seconds.
    prices : mapping of name to Price
        One for each of ``margins.margin.MARGIN_NAMES``.
    dataset_fingerprint : str
        Of the dataset it was trained on.
    mean_limit : tuple of float, in the order ``schema.RESOURCES``
        Of that dataset's tasks, in its unit; NaN unknown.
    machines : mapping of int to Curves
        Curves of machines for each horizon, in seconds; of a horizon that is missing, those of no peak seen.
    pipeline_version : str
        Of the features it reads (``pipeline_of``).
    trained : mapping
        Facts for the reader: settings, rows, violation and reclaimed share at each margin; every number finite. Nothing
        that differs between two runs of the same settings on the same data, so that they end in the same bytes. For
        each of its ``datasets`` it gives the end of training, so that no replay tests on what was trained on.
    held_out : Forecaster or None
        The forecaster of the training rows alone, by which the prices were set, where ``forecaster`` learned from the
        validation rows, too.
    learned_until_us : int or None
        Time up to which a dataset has rows that the model learned from, µs on its clock; None for none; not saved. Rows
        of windows that end by then are answered by ``held_out``, and set no margin of a location of machines that was
        fitted to them.
    origin : ModelLocation or None
        Where it was loaded from, and under which name and version it is registered; not saved.
    """

    kind: str
    forecaster: Forecaster
    horizon_s: int
    prices: Mapping[str, Price]
    dataset_fingerprint: str
    mean_limit: tuple[float, ...] = UNKNOWN_LIMITS
    machines: Mapping[int, Curves] = field(default_factory=dict)
    pipeline_version: str = PIPELINE_VERSION
    trained: Mapping[str, Any] = field(default_factory=dict)
    held_out: Forecaster | None = None
    learned_until_us: int | None = None
    origin: ModelLocation | None = None

    def __post_init__(self) -> None:
        if self.kind not in LEARNED:
            raise ConfigError(f"kind must be one of {', '.join(LEARNED)}, got {self.kind!r}")

    @property
    def portable(self) -> bool:
        """True if it serves cells that it was not trained on, at its own price."""
        return LEARNED[self.kind].portable

    def mean_limit_ratio(self, mean_limit: tuple[float, ...]) -> dict[str, float]:
        """Return a cell's mean limit over that of the tasks trained on, by resource; only where amounts matter.

        For a portable model they do not matter, and those of several datasets cannot be compared with a cell's.
        """
        if self.portable:
            return {}
        ratios = {r: ours / own for r, ours, own in zip(RESOURCES, mean_limit, self.mean_limit, strict=True)}
        return {r: ratio for r, ratio in ratios.items() if math.isfinite(ratio)}

    def other_units(self, mean_limit: tuple[float, ...]) -> str | None:
        """Return a sentence on the resources of a cell whose amounts seem to be in another unit, or None."""
        apart = {r: of for r, of in self.mean_limit_ratio(mean_limit).items() if not 1 / OTHER_UNIT <= of <= OTHER_UNIT}
        if not apart:
            return None
        said = " and the mean ".join(f"{r} limit is {ratio:,.4g} times" for r, ratio in apart.items())
        return (
            f"the mean {said} that of the tasks that the model was trained on: amounts seem to be in another unit, and "
            "reservations would be too low or too high; give amounts in the unit of that dataset, or train on this cell"
        )

    def bare_estimator(
        self,
        *,
        horizon_s: int | None = None,
        mean_limit: tuple[float, ...] | None = None,
        cell: Cell = Cell(),  # noqa: B008 - frozen
    ) -> ForecastEstimator:
        """Return the estimator without a price or guards, with fresh state, for the tasks of one cell.

        Parameters
        ----------
        horizon_s : int or None
            Another horizon than the bundle's.
        mean_limit : tuple of float or None
            Of the cell's tasks, where it is another cell than the one trained on.
        cell : Cell

        Raises
        ------
        ConfigError
            The model does not forecast over that horizon.
        """
        horizon_s = self.horizon_s if horizon_s is None else horizon_s
        mean_limit = self.mean_limit if mean_limit is None else mean_limit
        if horizon_s not in self.forecaster.horizons_s:
            name = self.kind if self.origin is None else self.origin.label
            known = " or ".join(map(str, self.forecaster.horizons_s))
            raise ConfigError(
                f"{name} forecasts {known} s ahead, not {horizon_s}: "
                f"--set horizon_s={self.horizon_s}, or train a model with --set horizon_s={horizon_s}, or name another"
            )
        earlier = None
        if self.held_out is not None and self.learned_until_us is not None:
            earlier = Earlier(self.learned_until_us, self.held_out)
        return ForecastEstimator(
            self.forecaster, horizon_s, mean_limit=mean_limit, cell=cell, own_price=self.portable, earlier=earlier
        )

    def machine_estimator(
        self, *, horizon_s: int | None = None, mean_limit: tuple[float, ...] | None = None
    ) -> MachineEstimator:
        """Return the estimator of machines; arguments as for ``bare_estimator``."""
        horizon_s = self.horizon_s if horizon_s is None else horizon_s
        mean_limit = self.mean_limit if mean_limit is None else mean_limit
        return MachineEstimator(self.machines.get(horizon_s, BOUND), horizon_s, mean_limit)

    def estimator(self, margin: str, cell: Cell = Cell()) -> Guarded:  # noqa: B008 - frozen
        """Return the guarded estimator at the price of a margin, with fresh state; ConfigError for an unknown name."""
        if margin not in self.prices:
            raise ConfigError(f"unknown margin {margin!r}; expected one of {', '.join(self.prices)}")
        priced = ForecastEstimator(self.forecaster, self.horizon_s, self.prices[margin], self.mean_limit, cell)
        return Guarded(priced, NO_MARGIN)


def pipeline_of(kind: str) -> str:
    """Return the version of the features that models of a kind read: of all, unless their class names some."""
    return str(getattr(imported(LEARNED[kind].forecaster), "PIPELINE", PIPELINE_VERSION))


def save_bundle(bundle: Bundle, folder: Path) -> None:
    """Write the bundle into a folder of its own, which appears whole or not at all; an older one there is replaced."""
    facts = {
        "format": FORMAT,
        "kind": bundle.kind,
        "horizon_s": bundle.horizon_s,
        "prices": {name: price_facts(price) for name, price in bundle.prices.items()},
        "prices_given": _named(bundle.prices[MARGIN_NAMES[0]].given),
        "mean_limit": _named([limit if math.isfinite(limit) else None for limit in bundle.mean_limit]),
        "machines": {str(h): _named([asdict(c) for c in curves]) for h, curves in bundle.machines.items()},
        "pipeline_version": bundle.pipeline_version,
        "features": list(FEATURE_NAMES),
        "dataset_fingerprint": bundle.dataset_fingerprint,
        "trained": dict(bundle.trained),
    }
    with replaced_folder(folder) as fresh:
        bundle.forecaster.save(fresh)
        if bundle.held_out is not None:
            (fresh / _HELD_OUT).mkdir()
            bundle.held_out.save(fresh / _HELD_OUT)
        (fresh / BUNDLE_FILE).write_text(json.dumps(facts, indent=2, allow_nan=False))


def load_bundle(folder: Path) -> Bundle:
    """Read a bundle.

    Raises
    ------
    OtherReleaseError
        Its format is unknown, or it was made for another feature pipeline or of other features.
    ModelError
        The folder holds none, or its files are damaged or of another release.
    """
    from safetensors import SafetensorError

    damages = (
        OSError, LookupError, TypeError, AttributeError, ValueError, RuntimeError, BadZipFile, SafetensorError,
        ConfigError,
    )  # fmt: skip
    folder = Path(folder)
    if not (folder / BUNDLE_FILE).is_file():
        raise ModelError(f"{folder} holds no {BUNDLE_FILE}: it is no model of reclaim; train one with `reclaim train`")
    try:
        return _load(folder)
    except damages as error:
        remedy = "train again with `reclaim train`"
        if folder == BUILTIN_FOLDER:
            without = "`reclaim train DATASET --set prior=none --set against_builtin=false`"
            remedy = f"install reclaim again, or train without it, {without}"
        raise ModelError(
            f"{folder}: the files of the model are damaged or of another release ({error!r}); {remedy}"
        ) from error


def _load(folder: Path) -> Bundle:
    facts = json.loads((folder / BUNDLE_FILE).read_text(encoding="utf-8"))
    if facts.get("format") != FORMAT or facts.get("kind") not in LEARNED:
        raise OtherReleaseError(
            f"{folder / BUNDLE_FILE}: expected format {FORMAT} and a kind of {', '.join(LEARNED)}, "
            f"got {facts.get('format')!r} and {facts.get('kind')!r}; train again with `reclaim train`"
        )
    if facts["pipeline_version"] != (present := pipeline_of(facts["kind"])):
        raise OtherReleaseError(
            f"{folder}: the model was made by feature pipeline {facts['pipeline_version']}, this is "
            f"{present}; run `reclaim features` and `reclaim train` again, or install the release it came from"
        )
    if not LEARNED[facts["kind"]].portable and facts["features"] != list(FEATURE_NAMES):  # a portable one names its own
        raise OtherReleaseError(
            f"{folder}: the model reads {len(facts['features'])} features that are not the {N_FEATURES} of this "
            "release; run `reclaim features` and `reclaim train` again, or install the release it came from"
        )
    _check(facts)
    kind, held_out = imported(LEARNED[facts["kind"]].forecaster), folder / _HELD_OUT
    return Bundle(
        kind=facts["kind"],
        forecaster=Calibrated.load(kind.load(folder), folder),
        held_out=Calibrated.load(kind.load(held_out), held_out) if held_out.is_dir() else None,
        horizon_s=facts["horizon_s"],
        prices={name: _price_of(name, facts["prices"][name], facts["prices_given"]) for name in MARGIN_NAMES},
        dataset_fingerprint=facts["dataset_fingerprint"],
        mean_limit=tuple(math.nan if (v := facts["mean_limit"][r]) is None else v for r in RESOURCES),
        machines={int(h): tuple(_curve_of(of[r]) for r in RESOURCES) for h, of in facts["machines"].items()},
        pipeline_version=facts["pipeline_version"],
        trained=facts["trained"],
    )


def _check(facts: Mapping[str, Any]) -> None:
    """Raise an error where a fact is of another kind than ``save_bundle`` writes: a start or a request fails on it."""
    prices = [facts["prices"][name]["value"] for name in MARGIN_NAMES]
    means = [facts["mean_limit"][r] for r in RESOURCES]
    datasets = facts["trained"].get("datasets", [])
    violated = [rate for of in facts["trained"].get("violation", {}).values() for rate in of.values()]
    Budgets(**facts["trained"].get("settings", {}).get("budgets", {}))
    for what, good in (
        ("horizon_s", facts["horizon_s"] in HORIZONS_S),
        ("mean_limit", all(v is None or (isinstance(v, float | int) and 0 < v < math.inf) for v in means)),
        ("prices", all(a[r] >= b[r] for a, b in pairwise(prices) for r in RESOURCES)),
        ("trained.datasets", isinstance(datasets, list) and all(isinstance(of, dict) for of in datasets)),
        ("trained.violation", all(rate is None or isinstance(rate, float | int) for rate in violated)),
    ):
        if not good:
            raise ValueError(f"{what}: not a value that a model has")


def load_model(reference: str | None = None) -> Bundle:
    """Return the model of a reference, as ``references.find_served`` takes it; ModelError where there is none."""
    origin = find_served(reference)
    return replace(_load_found(origin), origin=origin)


def _load_found(origin: ModelLocation) -> Bundle:
    """Read the bundle of a location; an error names a registered model, whose folder may be one of this process."""
    try:
        return load_bundle(origin.folder)
    except ModelError as error:
        if origin.builtin or not origin.registered:
            raise
        raise type(error)(str(error).replace(str(origin.folder), origin.label)) from error


def copy_bundle(reference: str, folder: Path) -> ModelLocation:
    """Copy the model of a reference into a folder, which appears whole or not at all; return where it came from.

    Raises
    ------
    ConfigError
        The folder holds something else than a model.
    ModelError
        There is no such model, or it cannot be used here.
    """
    found = find_model(reference)
    _load_found(found)
    if folder.exists() and not (folder / BUNDLE_FILE).is_file() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder}: exists and holds no model; choose another folder or remove it")
    origin = {"name": found.name, "version": found.version, "run_id": found.run_id}
    with replaced_folder(folder) as fresh:
        copy_files(found.folder, fresh)
        if found.registered or not (fresh / ORIGIN_FILE).is_file():  # the copy of a copy keeps its origin
            (fresh / ORIGIN_FILE).write_text(json.dumps(origin, indent=2))
    return found


def _named(values: Sequence[Any]) -> dict[str, Any]:
    return dict(zip(RESOURCES, values, strict=True))


def price_facts(price: Price) -> dict[str, Any]:
    """Return a price as plain values by resource: ``value``, and ``by_tier`` or None."""
    tiers = price.by_tier
    return {
        "value": _named(price.value),
        "by_tier": None if tiers is None else dict(zip(TIER_LABELS, map(_named, tiers), strict=True)),
    }


def _price_of(name: str, facts: Mapping[str, Any], given: Mapping[str, bool]) -> Price:
    tiers = facts["by_tier"]
    return Price(
        name,
        tuple(facts["value"][r] for r in RESOURCES),
        None if tiers is None else tuple(tuple(tiers[tier][r] for r in RESOURCES) for tier in TIER_LABELS),
        tuple(given[r] for r in RESOURCES),
    )


def _curve_of(facts: Mapping[str, Any]) -> MachineCurve:
    weights = facts["weights"]
    return MachineCurve(tuple(facts["margins"]), None if weights is None else tuple(weights), facts["together"])


def output_names(forecaster: Forecaster) -> list[str]:
    """Return the columns of ``BundleModel.predict``: ``cpu_3600s_q0.98`` … and ``oom_3600s`` …, in its order."""
    quantiles = [f"{t}_{h}s_q{q:g}" for t in TARGETS for h in HORIZONS_S for q in forecaster.quantile_levels]
    return quantiles + [f"oom_{h}s" for h in HORIZONS_S]


class BundleModel:
    """The forecaster behind MLflow's generic model interface, for callers with their own features."""

    def __init__(self, bundle: Bundle) -> None:
        self.bundle = bundle

    def predict(self, model_input: pd.DataFrame, params: Mapping[str, Any] | None = None) -> pd.DataFrame:  # noqa: ARG002 - MLflow's signature
        """Return one row of quantiles (over the limit) and OOM probabilities for each row of features."""
        import pandas as pd

        x = model_input[list(FEATURE_NAMES)].to_numpy(np.float32)
        forecast = self.bundle.forecaster.predict(x)
        values = np.concatenate([forecast.quantiles.reshape(len(x), -1), forecast.oom_probability], axis=1)
        return pd.DataFrame(values, columns=output_names(self.bundle.forecaster), index=model_input.index)


def _load_pyfunc(data_path: str) -> BundleModel:
    """Return the model; the name and the argument are MLflow's."""
    return BundleModel(load_bundle(Path(data_path)))
