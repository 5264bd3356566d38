"""Draws what a scraper sees of each container run, and computes the windows that it makes, by plain sums."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from reclaim.data.synthetic.kubernetes.cluster import DAY_S, Pod, Run

SLOT_MS: Final = 300_000
"""Length of a window."""
_JITTER_MS: Final = 150


@dataclass(frozen=True)
class Scrapes:
    """Samples of one run: times, CPU time since the sample before, and memory; n samples.

    Attributes
    ----------
    time_ms : int64, shape (n,)
    rise_us : int64, shape (n,)
        CPU time since the sample before, the first since the container's start; in µs, so that sums are exact.
    memory : int64, shape (n,)
        Bytes.
    """

    time_ms: NDArray[np.int64]
    rise_us: NDArray[np.int64]
    memory: NDArray[np.int64]

    @property
    def counter_s(self) -> NDArray[np.float64]:
        """The counter's values: CPU seconds, with six decimals."""
        return np.cumsum(self.rise_us) / 1e6


def scrape(pod: Pod, run: Run, start_s: int, scrape_s: int, rng: np.random.Generator) -> Scrapes:
    """Return what a scraper sees of a run from ``start_s`` on, at the node's own beat."""
    beat_ms, step_ms = (pod.node * 7919 + 1234) % (scrape_s * 1000), scrape_s * 1000
    first_ms = round(max(run.start_s + 1, start_s) * 1000)
    times = np.arange(first_ms - first_ms % step_ms + beat_ms, round(run.end_s * 1000), step_ms, dtype=np.int64)
    times = times + rng.integers(-_JITTER_MS, _JITTER_MS + 1, len(times))
    times = times[(times >= first_ms) & (times < round(run.end_s * 1000))]
    n, container = len(times), run.container
    day = 2 * np.pi * ((times / 1000) % DAY_S) / DAY_S
    level = container.cpu * pod.level * (1 + 0.5 * np.sin(day - 2.0))
    bursts = np.where(rng.random(n) < 0.005, rng.uniform(1.5, 3, n), 1.0)
    most = container.limits.get("cpu", 4.0)
    cores = np.minimum(level * rng.lognormal(0, 0.2, n) * bursts, most)
    spans_ms = np.diff(times, prepend=times[:1])
    rise_us = np.round(cores * spans_ms * 1000).astype(np.int64)
    if n:
        rise_us[0] = round(1e6 * container.cpu * (times[0] / 1000 - run.start_s))  # all it used before
    hours = (times / 1000 - run.start_s) / 3600
    memory = container.memory * (0.9 + 0.1 * pod.level) * (1 + 0.05 * np.sin(day)) + container.leak * hours
    memory = memory * rng.normal(1, 0.01, n)
    if "memory" in container.limits:
        memory = np.minimum(memory, 0.995 * container.limits["memory"])
    return Scrapes(times, rise_us, np.round(memory).astype(np.int64))


@dataclass(frozen=True)
class TrueWindow:
    """Windows of one container of one pod; arrays of shape (n,), one for each slot."""

    slot: NDArray[np.int64]
    cpu_mean: NDArray[np.float64]
    cpu_max: NDArray[np.float64]
    cpu_p90: NDArray[np.float64]
    memory_mean: NDArray[np.float64]
    memory_max: NDArray[np.float64]


def true_windows(runs: list[Scrapes]) -> TrueWindow:
    """Return the windows of a container's runs, from the drawn amounts and not from a counter's differences."""
    seen: dict[int, list[tuple[float, int, int]]] = {}
    memory: dict[int, list[int]] = {}
    for run in runs:
        spans = np.diff(run.time_ms)
        for time, span, rise in zip(run.time_ms[1:].tolist(), spans.tolist(), run.rise_us[1:].tolist(), strict=True):
            if span <= SLOT_MS:
                seen.setdefault(time // SLOT_MS, []).append((rise / (span * 1000), span, rise))
        for moment, used in zip(run.time_ms.tolist(), run.memory.tolist(), strict=True):
            memory.setdefault(moment // SLOT_MS, []).append(used)
    slots = sorted(seen)
    rows = []
    for slot in slots:
        parts = sorted(seen[slot])
        covered = [span for _, span, _ in parts]
        shares = np.cumsum(covered) * 10
        p90 = parts[int(np.searchsorted(shares, 9 * sum(covered)))][0] if len(parts) >= 4 else np.nan
        mean = sum(rise for _, _, rise in parts) / (1000 * sum(covered))
        rows.append((mean, parts[-1][0], p90, sum(memory[slot]) / len(memory[slot]), max(memory[slot])))
    columns = np.array(rows, np.float64).reshape(-1, 5).T
    return TrueWindow(np.array(slots, np.int64), *columns)
