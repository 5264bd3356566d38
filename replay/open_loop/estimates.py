"""Runs estimators over every row of a dataset, and sets their settings and margins on the validation rows.

Every experiment begins with ``estimate_all``; margins are then replayed from the answers it returns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from reclaim.data.core.engine.workers import HERE, Engine
from reclaim.data.schema import MACHINES, RESOURCES
from reclaim.data.windows import Windows, concatenate, empty_windows
from reclaim.features.feature_set import FeatureSet
from reclaim.features.splits import VALID
from reclaim.features.targets import HORIZONS_S
from reclaim.replay.experiment import Source
from reclaim.replay.open_loop.fold import Bucketful, fold_before_test, fold_dataset
from reclaim.replay.open_loop.history import History
from reclaim.replay.open_loop.period import Period, lay_out_period
from reclaim.replay.open_loop.share import Share
from reclaim.replay.settings import ComparisonConfig, ReplayConfig
from reclaim.training.estimators.base import Estimator
from reclaim.training.estimators.registry import build_estimator, candidates
from reclaim.training.margins.answers import Answers, Priced, scores_of
from reclaim.training.margins.calibrate import Calibration, calibrate, guarded_reservations
from reclaim.training.margins.margin import Budgets
from reclaim.training.margins.tune import TunedEstimator, Tuning, choose_settings, tuning_facts

if TYPE_CHECKING:
    from reclaim.training.bundle import Bundle

LIMIT: Final = "limit"
"""The estimator that takes no margin: it reserves the limit."""
TUNED_ROWS: Final = 150_000
"""Approximate number of validation rows that settings are chosen by: 150 of them may violate at a budget of 0.1 %. Of a
larger dataset the first buckets are taken; tasks fall into buckets by a hash of their collection and index."""


@dataclass(frozen=True)
class Estimates:
    """Estimators' answers to every row that is judged.

    Attributes
    ----------
    history : History
        Validation and test rows, and the windows just before them.
    period : Period
        The test period of it.
    answers : mapping of estimator to Answers
        Before any margin or price, learned estimators first; those of ``LIMIT``, too.
    calibrations : mapping of estimator to Calibration
        The margins or prices of each, set on validation rows; none for ``LIMIT``.
    began_us : int
        Begin of the cell's record.
    """

    history: History
    period: Period
    answers: Mapping[str, Answers]
    calibrations: Mapping[str, Calibration]
    began_us: int = 0

    def reservations(self, name: str) -> Mapping[str, NDArray[np.float64]]:
        """Return an estimator's reservations under each margin, guards included; shape (n, n_resources) each.

        ``LIMIT`` has one answer, under ``none``.
        """
        if name == LIMIT:
            return {"none": self.history.windows.limit}
        return guarded_reservations(self.answers[name], self.history.windows, self.calibrations[name].settings)


def estimate_all(source: Source, config: ReplayConfig) -> Estimates:
    """Fold the dataset through every estimator of a configuration and every bundle, and set their margins.

    Raises
    ------
    HistoryTooShortError
        The validation or the test period is shorter than the horizon.
    """
    tunings: Mapping[str, Tuning] = {}
    if config.tune:
        fold = CandidateFold.run(source.features, config.estimators, source.seconds, source.engine)
        with source.timed("tune"):
            tunings = fold.choose(config.horizon_s, config.budgets, source.engine)
        source.settings.update({name: tuning_facts(tuning) for name, tuning in tunings.items()})
    makers = estimator_makers(config, source.bundles, source.features.mean_limit, tunings)
    share = Share.within(source.features, config.judged_rows)
    history, answers = fold_dataset(
        source.features, config.horizon_s, makers, source.seconds, source.engine, share=share
    )
    table = source.dataset.table("machines")
    period = lay_out_period(history, {name: table[name].to_numpy() for name in MACHINES.names}, share)
    given = scores_of(config.value.prices(source.features.mean_limit, config.horizon_s))
    calibrations = {
        name: set_margins(
            of, period, config.budgets, by_tier=config.by_tier, given=given if isinstance(of, Priced) else None
        )
        for name, of in answers.items()
        if name != LIMIT
    }
    return Estimates(history, period, answers, calibrations, int(source.features.manifest["span_us"][0]))


def estimator_makers(
    config: ComparisonConfig,
    bundles: Mapping[str, Bundle],
    mean_limit: tuple[float, ...],
    tunings: Mapping[str, Tuning] = MappingProxyType({}),
) -> dict[str, Callable[[], Estimator]]:
    """Return a factory of each estimator without margin; a learned one is as served, with the horizon of ``config``.

    ``mean_limit`` is that of the dataset replayed. A model of several datasets, whose units differ, takes none, unless
    it is portable. Statistical estimators have the settings of ``tunings``, the published ones where it
    has none.
    """
    makers: dict[str, Callable[[], Estimator]] = {
        name: partial(
            b.bare_estimator,
            horizon_s=config.horizon_s,
            mean_limit=mean_limit if b.portable else b.mean_limit if np.isnan(b.mean_limit).all() else mean_limit,
        )
        for name, b in bundles.items()
    }
    return makers | {
        name: partial(TunedEstimator, name, tunings[name]) if name in tunings else partial(build_estimator, name)
        for name in config.estimators
    }


@dataclass(frozen=True)
class CandidateFold:
    """Answers of every candidate of statistical estimators to validation rows.

    Attributes
    ----------
    windows : Windows
        The rows, of those that margins are set on.
    y : float32, shape (n, n_resources, n_horizons)
        Their targets.
    answers : mapping of estimator to list of float64, shape (n, n_resources)
        Of each candidate; only estimators with more than one.
    """

    windows: Windows
    y: NDArray[np.float32]
    answers: Mapping[str, list[NDArray[np.float64]]]

    @classmethod
    def run(
        cls,
        features: FeatureSet,
        names: Sequence[str],
        seconds: dict[str, float],
        engine: Engine = HERE,
    ) -> CandidateFold:
        """Fold the windows before the test period through every candidate of the named estimators.

        Windows of the test period are dropped as they are read. Of a large dataset, buckets are folded until there are
        ``TUNED_ROWS`` rows.
        """
        tried = {name: candidates(name) for name in names if len(candidates(name)) > 1}
        makers = [(name, partial(build_estimator, name, one)) for name, of in tried.items() for one in of]
        kept, known = [empty_windows()], [np.zeros((0, len(RESOURCES), len(HORIZONS_S)), np.float32)]
        if not makers:
            return cls(kept[0], known[0], {})
        jobs = [Bucketful(features, bucket, [make for _, make in makers]) for bucket in range(features.n_buckets)]
        parts: list[list[NDArray[np.float64]]] = [[] for _ in makers]
        with (
            engine.pool() as pool,
            closing(pool.each(fold_before_test, jobs)) as buckets,
            tqdm(total=len(jobs), desc="tune", unit="bucket", disable=None) as bar,
        ):
            for windows, y, said in buckets:
                kept.append(windows)
                known.append(y)
                for (name, _), part, (reservation, took) in zip(makers, parts, said, strict=True):
                    part.append(reservation)
                    seconds[f"tune/{name}"] = seconds.get(f"tune/{name}", 0.0) + took
                bar.update()
                if sum(map(len, known)) >= TUNED_ROWS:
                    break
        answers: dict[str, list[NDArray[np.float64]]] = {name: [] for name in tried}
        for name, _ in makers:
            answers[name].append(np.concatenate(parts.pop(0)))
        return cls(concatenate(kept), np.concatenate(known), answers)

    def choose(self, horizon_s: int, budgets: Budgets | None = None, engine: Engine = HERE) -> dict[str, Tuning]:
        """Return the settings of each estimator that reclaim most within the budgets at a horizon; none without rows.

        Without rows, setting the margins raises the error.
        """
        if not (self.answers and len(self.windows)):
            return {}
        target = self.y[:, :, HORIZONS_S.index(horizon_s)].astype(np.float64)
        with engine.pool() as pool:
            chosen = pool.each(partial(_chosen, self.windows, target, budgets), self.answers.items())
            return dict(zip(self.answers, chosen, strict=True))


def _chosen(
    windows: Windows, target: NDArray[np.float64], budgets: Budgets | None, job: tuple[str, list[NDArray[np.float64]]]
) -> Tuning:
    """Return the settings of one estimator."""
    name, answers = job
    return choose_settings(answers, candidates(name), windows, target, budgets)


def set_margins(
    answers: Answers,
    period: Period,
    budgets: Budgets,
    *,
    by_tier: bool = False,
    given: tuple[float, ...] | None = None,
) -> Calibration:
    """Set an estimator's margins or prices on the validation rows.

    It is not a job of the engine: sending the rows to workers takes about as much processor time as the search itself
    (``benchmarks/speed/open_loop.py --jobs``). All rows are in this process in any case, because prices that follow and
    sums of machines read those of all buckets in the order of time.

    Parameters
    ----------
    answers : Answers
        To every row of the history.
    period : Period
    budgets : Budgets
        Shares of task-windows that may violate, for the baseline and the aggressive margin.
    by_tier : bool
        Whether each tier keeps the budgets for itself.
    given : tuple of float or None
        As for ``calibrate``: prices that are known without a budget.
    """
    history = period.history
    valid = np.flatnonzero(history.period == VALID)
    windows, target = history.windows.take(valid), history.target[valid]
    return calibrate(answers.take(valid), windows, target, budgets, by_tier=by_tier, given=given)
