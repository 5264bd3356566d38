"""Opens the datasets of a training run and chooses the rows that are learned from and that set the margins."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from reclaim.data.dataset import Dataset
from reclaim.data.errors import ConfigError
from reclaim.data.schema import AFTER_TRACE_US
from reclaim.data.windows import (
    CPU_MAX,
    CPU_MEAN,
    MEMORY_MAX,
    MEMORY_MEAN,
    PAGE_CACHE,
    Windows,
    concatenate,
    empty_windows,
)
from reclaim.features.feature_set import FeatureSet
from reclaim.features.registry import CALENDAR, FEATURE_NAMES, SAME_HOUR_DAYS, SIGNALS
from reclaim.features.seen import holds, sample_windows
from reclaim.features.splits import WRONG_TIME
from reclaim.training.tracking.runs import DatasetFacts

if TYPE_CHECKING:
    from reclaim.training.models.trees import Rows

_WEEK_DAYS: Final = 7
_SPAN_DAYS: Final = {name: _WEEK_DAYS for name in (*CALENDAR, "age", "seen")} | {
    f"{signal}_same_hour_{days}d": days for signal in SIGNALS for days in SAME_HOUR_DAYS
}
"""Days in which a feature takes its values once: a week of hours and days, a lag. A feature of age or history counts as
a week, though it grows forever: past a fortnight on a logarithmic scale, what is later is close to what was learned."""

RowIndex = NDArray[np.int64]

NO_ROWS: Final = (
    "the split leaves too few collections, or too little time; `reclaim features DATASET --set "
    f"split.test_unseen_share=0.01 --set split.valid_unseen_share=0.01` holds out fewer collections; {WRONG_TIME}"
)
"""Reason and remedy where no row is there to learn from or to set prices on: of one collection, all may be held out."""


@dataclass(frozen=True)
class Source:
    """A dataset with its features."""

    dataset: Dataset
    features: FeatureSet

    @property
    def name(self) -> str:
        """Name of the dataset in reports: its folder's."""
        return self.dataset.folder_name

    @property
    def facts(self) -> DatasetFacts:
        """Record of it as the input of a run."""
        return DatasetFacts(self.name, self.dataset.fingerprint, str(self.dataset.path.resolve()))

    @property
    def history_s(self) -> float:
        """Time from its first window to the end of the validation period, in seconds."""
        first, last = self.features.manifest["span_us"]
        return float(min(self.features.cuts_us[1], last) - first) / 1e6

    @property
    def split_facts(self) -> dict[str, float]:
        """Return the facts by which a replay recognises what this training saw, kept in the bundle.

        ``trained_until_us`` and ``tuned_until_us``, the ends of the training and of the validation period, µs on the
        trace's clock; ``kept_unseen``, the share of the collections that neither saw.
        """
        trained, tuned = self.features.cuts_us
        split = self.features.manifest["config"]["split"]
        kept = 0.0 if split["role"] == "train" else split["test_unseen_share"]  # there they set margins, too
        return {"trained_until_us": trained, "tuned_until_us": tuned, "kept_unseen": kept}


def fitted_until_us(facts: Mapping[str, Any], *, of_prior: bool) -> int:
    """Return the end of the rows of a dataset that every forecaster of a model may have been fitted on, in µs.

    A prior has no held-out forecaster, so the rows that it was tuned on count. 0 where its ``split_facts`` are missing.
    """
    return int(facts.get("tuned_until_us" if of_prior else "trained_until_us", 0))


def reason_against(
    facts: Mapping[str, Any], features: FeatureSet, whose: str, *, of_prior: bool, same: bool = True
) -> str | None:
    """Return why a model that learned from a dataset is not tested on it; None where it can be.

    The rule of replays, and of the choice of a prior.

    Parameters
    ----------
    facts : mapping
        The bundle's facts of what the model, or its prior, learned from, with ``Source.split_facts``.
    features : FeatureSet
        Of the dataset that is to be tested.
    whose : str
        Name of the model, for the reason.
    of_prior : bool
        Whether the facts are those of a prior.
    same : bool
        Whether the facts are those of this dataset, or of another one that holds windows of its validation period.
    """
    begins_us, tests_us = features.cuts_us
    unseen = features.manifest["config"]["split"]["test_unseen_share"]
    if same and "tuned_until_us" in facts:
        for done in ("trained", "tuned"):
            if (until_us := facts[f"{done}_until_us"]) > tests_us:
                return (
                    f"{whose} was {done} on this dataset {until(until_us)}, and its test period begins at {tests_us} µs"
                )
        if facts["kept_unseen"] < unseen:
            return (
                f"{unseen:.0%} of the collections are to be unseen in the test, and {whose} was trained and tuned on "
                f"all but {facts['kept_unseen']:.0%}"
            )
    if (until_us := fitted_until_us(facts, of_prior=of_prior)) > begins_us:
        return (
            f"{whose} was trained on windows {until(until_us)}, and the validation period, on which margins are set, "
            f"begins at {begins_us} µs"
        )
    return None


def until(until_us: int) -> str:
    """Return the words for an end of rows of a dataset."""
    return "to its end" if until_us == AFTER_TRACE_US else f"until {until_us} µs on its clock"


def open_sources(paths: Sequence[Path]) -> list[Source]:
    """Open datasets to train on, in the order of their fingerprints: the order they are named in decides nothing.

    Raises
    ------
    ConfigError
        There is none, one is missing or has no features of this pipeline, one is held out for tests, or two hold the
        same windows.
    """
    sources = [Source(Dataset.open(path), FeatureSet.open(path)) for path in paths]
    if not sources:
        raise ConfigError("expected at least 1 dataset to train on, got 0")
    for path, source in zip(paths, sources, strict=True):
        if source.features.role == "test":
            raise ConfigError(
                f"{path}: its features were built with split.role=test, so it is held out whole and nothing of it may "
                f"be trained on; leave it out, or drop it as a test: `reclaim features {path} --set split.role=all`"
            )
    sources.sort(key=lambda source: source.dataset.fingerprint)
    for before, after in pairwise(sources):
        if before.dataset.fingerprint == after.dataset.fingerprint:
            raise ConfigError(
                f"{before.dataset.path} and {after.dataset.path} hold the same dataset; name it once, or its rows "
                "count twice"
            )
    _check_apart(sources)
    return sources


def _check_apart(sources: Sequence[Source]) -> None:
    """Raise ConfigError where two datasets hold the same windows, as one trace ingested again when there was more.

    Their periods end at other times, so that prices would be set on rows of one that are learned from in the other.
    """
    if len(sources) < 2:
        return
    samples = [sample_windows(source.features) for source in sources]
    for k, source in enumerate(sources):
        others = [other for j, other in enumerate(sources) if j != k]
        held = holds([sample for j, sample in enumerate(samples) if j != k], source.features, [(0, None)])
        for other, (same,) in zip(others, held, strict=True):
            if same:
                raise ConfigError(
                    f"{other.dataset.path} and {source.dataset.path} hold the same windows, so rows that set prices in "
                    "one would be learned from in the other, and count twice; name the one that has more of them, or "
                    "ingest each part of the trace once"
                )


def hidden_features(sources: Sequence[Source]) -> list[int]:
    """Return the positions of features that training was too short for: shorter than twice their span.

    In a few days every hour and weekday, every age and every length of history stands for the events of that time, and
    later days have others; a lag is known in the last rows alone, or in none. On four days of the Google 2011
    machines a network that saw the calendar had a quarter more pinball loss on the day after.
    """
    learned_s = min(source.features.cuts_us[0] - source.features.manifest["span_us"][0] for source in sources) / 1e6
    return [FEATURE_NAMES.index(name) for name, days in _SPAN_DAYS.items() if learned_s < 2 * days * 86_400]


def choose_rows(rows: RowIndex, limit: int, seed: int) -> RowIndex:
    """Return at most ``limit`` of the rows, chosen by the seed, in their order."""
    if len(rows) <= limit:
        return rows
    return np.sort(np.random.default_rng(seed).choice(rows, limit, replace=False))


def chosen_rows(
    sources: Sequence[Source], rows_of: Callable[[FeatureSet], RowIndex], limit: int, seed: int
) -> list[RowIndex]:
    """Return the rows to use of each source: at most ``limit`` altogether, every row as likely as any other."""
    rows = [rows_of(source.features) for source in sources]
    ends = np.cumsum([len(r) for r in rows])
    chosen = choose_rows(np.arange(ends[-1], dtype=np.int64), limit, seed)
    parts = np.split(chosen, np.searchsorted(chosen, ends[:-1]))
    return [r[part - (end - len(r))] for r, part, end in zip(rows, parts, ends, strict=True)]


def newest_rows(sources: Sequence[Source], limit: int, seed: int) -> Rows:
    """Copy at most ``limit`` training and validation rows, each with the weight of the rows that it stands for."""

    def both(features: FeatureSet) -> RowIndex:
        return np.union1d(features.train_rows(), features.valid_rows())

    chosen = chosen_rows(sources, both, limit, seed)
    stands_for = np.concatenate([source.features.stands_for(r) for source, r in zip(sources, chosen, strict=True)])
    return replace(rows_in_memory(sources, chosen), weight=None if (stands_for == 1).all() else stands_for)


def rows_in_memory(sources: Sequence[Source], rows: Sequence[RowIndex]) -> Rows:
    """Copy chosen rows of each source, one source after another, with the targets known inside their period.

    They have weights where some stand for more rows of their dataset than others.
    """
    from reclaim.training.models.trees import Rows

    ends = np.cumsum([0, *map(len, rows)])
    first = sources[0].features
    copied = Rows(*(np.empty((ends[-1], *a.shape[1:]), np.float32) for a in (first.x, first.y, first.oom)))
    for source, chosen, start, end in zip(sources, rows, ends, ends[1:], strict=False):
        # by any other mode than clip they are copied twice
        np.take(source.features.x, chosen, axis=0, out=copied.x[start:end], mode="clip")
        copied.y[start:end], copied.oom[start:end] = source.features.targets(chosen)
    weight = np.concatenate([source.features.weight[r] for source, r in zip(sources, rows, strict=True)])
    return copied if (weight == 1).all() else replace(copied, weight=weight)


def windows_of(sources: Sequence[Source], rows: Sequence[RowIndex]) -> Windows:
    """Return the windows of chosen rows of each source, one source after another.

    Those of one source are in its trace's unit. Units of several do not add up, so each is then in that of the mean
    limit of its own rows: a sum over limits counts every source with all its rows.
    """
    windows = [concatenate(list(_windows_of(source, r))) for source, r in zip(sources, rows, strict=True)]
    return windows[0] if len(windows) == 1 else concatenate([_in_mean_limits(w) for w in windows])


def _windows_of(source: Source, rows: RowIndex) -> Iterator[Windows]:
    yield empty_windows()
    for bucket, here in source.features.by_bucket(source.features.row[rows]):
        yield source.dataset.windows(bucket).take(here)


def _in_mean_limits(windows: Windows) -> Windows:
    granted = windows.limit > 0
    total, n = np.where(granted, windows.limit, 0.0).sum(axis=0), granted.sum(axis=0)
    unit = np.where(n > 0, total / np.maximum(n, 1), 1.0)
    cpu, memory = unit
    usage = windows.usage.copy()
    usage[:, [CPU_MEAN, CPU_MAX]] /= cpu
    usage[:, [MEMORY_MEAN, MEMORY_MAX, PAGE_CACHE]] /= memory
    return replace(windows, usage=usage, percentiles=windows.percentiles / np.float32(cpu), limit=windows.limit / unit)
