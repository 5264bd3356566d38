"""Shapes of a measurement window: quantiles fitted to recorded windows, and draws from them.

Every table here holds a few quantiles per tier, fitted to the Google cluster-usage traces v3 (2019) sample, CC-BY 4.0.
A value is drawn by reading such a table at a standard normal score. Scores that are sums of unit variance (level of the
collection + its movement + noise) give the fitted distribution over the tier, whatever their parts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from reclaim.data.schema import TIERS

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

FREE, BEB, MID, PROD, MON = range(len(TIERS))

# Levels of the tables below, and the standard normal scores of these levels.
LEVELS = (0.05, 0.25, 0.50, 0.75, 0.95)
SCORES = np.array([-1.6449, -0.6745, 0.0, 0.6745, 1.6449])
# Scores are cut here, so that a table read beyond its outer quantiles stays near the sample (1.4 % of a tail).
SCORE_CUT = 2.2

# Mean CPU of a full window over the CPU limit, by tier. It passes 1: CPU may burst above its limit.
CPU_RATIO = np.array(
    [
        [0.018, 0.136, 0.667, 1.161, 1.882],
        [0.012, 0.061, 0.258, 0.663, 1.738],
        [0.021, 0.099, 0.691, 1.157, 1.609],
        [0.021, 0.139, 0.330, 0.727, 3.444],
        [0.034, 0.548, 0.824, 1.430, 4.037],
    ]
)
# Mean memory of a full window over the memory limit. The sample's values above 0.93 (a limit changed after its first
# event) are cut to 0.93, because here the limit binds; ``mon`` has the numbers of ``prod``, as the sample's monitoring
# tasks are inside alloc instances, where their own limit binds nothing.
MEMORY_RATIO = np.array(
    [
        [0.139, 0.249, 0.493, 0.652, 0.927],
        [0.072, 0.273, 0.471, 0.626, 0.927],
        [0.153, 0.367, 0.583, 0.847, 0.930],
        [0.112, 0.382, 0.541, 0.733, 0.930],
        [0.112, 0.382, 0.541, 0.733, 0.930],
    ]
)
# Maximum CPU of a window over its mean.
CPU_PEAK = np.exp(
    [
        [0.449, 0.847, 1.166, 1.527, 2.235],
        [0.616, 1.159, 1.557, 2.064, 3.131],
        [0.633, 0.919, 1.224, 1.730, 2.529],
        [0.612, 0.945, 1.253, 1.653, 2.393],
        [0.676, 0.995, 1.385, 1.789, 2.422],
    ]
)
# Maximum memory of a window over its mean, less 1; the zeros of the sample are a tenth of a thousandth here.
MEMORY_PEAK = np.array(
    [
        [0.001, 0.007, 0.070, 0.211, 0.568],
        [1e-4, 0.002, 0.009, 0.048, 0.261],
        [0.001, 0.006, 0.068, 0.202, 0.422],
        [1e-4, 0.003, 0.010, 0.092, 0.305],
        [0.001, 0.002, 0.005, 0.019, 0.212],
    ]
)
# Page cache over mean memory; zeros as above.
PAGE_CACHE = np.array(
    [
        [1e-4, 0.014, 0.090, 0.314, 0.588],
        [1e-4, 0.028, 0.109, 0.247, 0.617],
        [0.001, 0.011, 0.048, 0.218, 0.629],
        [0.003, 0.041, 0.154, 0.406, 0.655],
        [0.008, 0.050, 0.126, 0.196, 0.491],
    ]
)
# Cycles and memory accesses per instruction: mean and standard deviation of the logarithm.
CPI_LOG = np.array([[0.558, 0.681], [0.759, 0.559], [0.561, 0.722], [0.882, 0.509], [0.313, 0.468]])
MAI_LOG = np.array([[-4.882, 0.936], [-4.609, 0.818], [-4.866, 0.919], [-4.632, 0.685], [-5.154, 0.674]])
# Share of windows that lack a field, by tier; alloc instances never carry CPI and MAI.
MISSING_CPI = np.array([0.670, 0.371, 0.593, 0.239, 0.226])
MISSING_PERCENTILES = np.array([0.343, 0.069, 0.230, 0.046, 0.064])
MISSING_MAX_MEMORY = 0.010
TAIL_PRESENT = 0.065  # of the windows with percentiles
MISSING_WINDOW = 0.0025  # of all windows; assumed, a cross-section cannot tell

# The 100th percentile over the maximum (the percentiles count coarser samples), at these levels.
TOP_LEVELS = np.array([0.0, 0.05, 0.25, 0.50, 0.75, 0.95, 1.0])
TOP_OVER_MAX = np.array([0.300, 0.380, 0.653, 0.948, 1.000, 1.009, 1.150])
# Log of the percentiles 0, 10, ... 90 over the mean (columns), where log(100th percentile / mean) is one of the knots.
SHAPE_KNOTS = np.array([0.0, 0.35, 1.0, 1.9, 3.4])
SHAPE_LOG = np.array(
    [
        [0.00, 0.00, 0.00, 0.00, 0.00, 0.00, 0.00, 0.00, 0.00, 0.00],
        [-0.40, -0.19, -0.13, -0.08, -0.04, -0.01, 0.02, 0.06, 0.11, 0.17],
        [-0.67, -0.40, -0.30, -0.22, -0.14, -0.07, 0.00, 0.08, 0.18, 0.36],
        [-0.73, -0.55, -0.48, -0.40, -0.30, -0.21, -0.11, -0.01, 0.13, 0.45],
        [-0.92, -0.87, -0.78, -0.68, -0.59, -0.52, -0.49, -0.38, -0.23, 0.02],
    ]
)
# Spread of a window's own shape about that: standard deviation of the log, below and above 0.
SHAPE_SPREAD = (0.7, 0.4)
# Where the percentiles 91 to 99 lie between the 90th (0) and the 100th (1).
TAIL_POSITION = np.array([0.024, 0.054, 0.093, 0.134, 0.188, 0.244, 0.336, 0.464, 0.690])
FULL_SAMPLE_RATE = 0.87  # of the windows have every sample (rate 1); the others these, at LEVELS
SAMPLE_RATE = np.array([0.938, 0.990, 0.993, 0.997, 0.998])

# Resources in the v3 traces carry 10 binary digits, in steps of 2^-20 at the finest.
_CODES_PER_OCTAVE = 1024
_STEP = 2.0**-20
_CODE_VALUES = np.concatenate(
    [np.arange(_CODES_PER_OCTAVE)] + [2.0**k * np.arange(_CODES_PER_OCTAVE, 2 * _CODES_PER_OCTAVE) for k in range(14)]
)
RESOURCE_TEXT = np.array([f"{v * _STEP:.8g}" for v in _CODE_VALUES], dtype=object)
# The values are read back from the text, so that JSON and parquet hold the same doubles.
RESOURCE_VALUE = np.array([float(t) for t in RESOURCE_TEXT])


def resource_code(amount: FloatArray) -> IntArray:
    """Return the code of the nearest amount of a v3 trace, an index of ``RESOURCE_TEXT`` and ``_VALUE``; same shape.

    Rounding keeps order: an amount up to a limit stays at or below the rounded limit.
    """
    steps = np.clip(amount, 0.0, 15.0) / _STEP
    octave = np.maximum(np.floor(np.log2(np.maximum(steps, 1.0))) - 10, 0).astype(np.int64)
    coarse = _CODES_PER_OCTAVE * octave + np.rint(steps / 2.0**octave)
    return np.where(steps >= _CODES_PER_OCTAVE, coarse, np.rint(steps)).astype(np.int64)


def rounded(amount: FloatArray) -> FloatArray:
    """Return amounts as a v3 trace carries them, same shape and unit."""
    return np.asarray(RESOURCE_VALUE[resource_code(amount)])


def read_table(table: FloatArray, tier: IntArray, score: FloatArray) -> FloatArray:
    """Read a quantile table (rows tiers, columns ``LEVELS``) at standard normal scores.

    Shape (n,) for tier, score and result. Between and beyond the quantiles the logarithm is linear in the score.
    """
    z = np.clip(score, -SCORE_CUT, SCORE_CUT)
    right = np.clip(np.searchsorted(SCORES, z), 1, len(SCORES) - 1)
    share = (z - SCORES[right - 1]) / (SCORES[right] - SCORES[right - 1])
    log = np.log(table)
    return np.asarray(np.exp(log[tier, right - 1] * (1.0 - share) + log[tier, right] * share))


@dataclass(frozen=True)
class SimulatedWindows:
    """Windows as the cell simulates them; every array has shape (n,)."""

    start_s: IntArray
    end_s: IntArray
    collection: IntArray
    index: IntArray
    machine: IntArray
    alloc_collection: IntArray  # 0 outside an alloc set
    alloc_index: IntArray
    kind: IntArray  # 0 task, 1 alloc instance
    tier: IntArray
    cpu: FloatArray  # mean
    memory: FloatArray  # mean
    memory_max: FloatArray
    memory_limit: FloatArray
    out_of_memory: npt.NDArray[np.bool_]  # the window ends in an out-of-memory kill
    peak_score: FloatArray  # how bursty, how much page cache, ... : the task's own standard normal scores
    cache_score: FloatArray
    cpi_score: FloatArray
    counters_u: FloatArray  # in [0, 1): below the tier's missing share, the task lacks the field
    percentiles_u: FloatArray


@dataclass(frozen=True)
class UsageRows:
    """Windows with every field of the usage table; arrays of shape (n,) unless said otherwise, resources as codes."""

    simulated: SimulatedWindows
    cpu: IntArray
    memory: IntArray
    cpu_max: IntArray
    memory_max: IntArray
    has_memory_max: npt.NDArray[np.bool_]
    cpu_sample: IntArray
    assigned_memory: IntArray
    page_cache: IntArray
    sample_rate: FloatArray
    cpi: FloatArray  # NaN where the machine did not count
    mai: FloatArray
    percentiles: IntArray  # (n, 11)
    has_percentiles: npt.NDArray[np.bool_]
    tail: IntArray  # (n, 9)
    has_tail: npt.NDArray[np.bool_]


def _mixed(own: FloatArray, share: float, rng: np.random.Generator) -> FloatArray:
    """Return the task's own score with ``share`` of the variance, fresh noise with the rest."""
    return np.asarray(np.sqrt(share) * own + np.sqrt(1.0 - share) * rng.standard_normal(len(own)))


def _sticky(own: FloatArray, rng: np.random.Generator) -> FloatArray:
    """Return the task's own uniform number, in one window of ten a fresh one: a task mostly lacks the same fields."""
    return np.where(rng.random(len(own)) < 0.1, rng.random(len(own)), own)


def percentile_shape(mean: FloatArray, top: FloatArray, rng: np.random.Generator) -> tuple[FloatArray, FloatArray]:
    """Draw CPU percentiles of windows with these means and 100th percentiles.

    Returns shape (n, 11), the percentiles 0, 10, ... 100, and shape (n, 9), the percentiles 91 to 99. Both are
    non-decreasing and lie under the 100th.
    """
    n = len(mean)
    knot = np.clip(np.log(np.maximum(top, 1e-9) / np.maximum(mean, 1e-9)), 0.0, SHAPE_KNOTS[-1])
    log = np.column_stack([np.interp(knot, SHAPE_KNOTS, SHAPE_LOG[:, i]) for i in range(SHAPE_LOG.shape[1])])  # (n, 10)
    below, above = (np.exp(s * rng.standard_normal((n, 1))) for s in SHAPE_SPREAD)
    body = mean[:, None] * np.exp(log * np.where(log < 0, below, above))
    percentiles = np.minimum(np.maximum.accumulate(np.column_stack([body, top]), axis=1), top[:, None])  # (n, 11)
    position = TAIL_POSITION ** np.exp(0.25 * rng.standard_normal((n, 1)))  # (n, 9)
    tail = percentiles[:, 9:10] + position * (percentiles[:, 10:] - percentiles[:, 9:10])
    return percentiles, tail


def usage_rows(w: SimulatedWindows, rng: np.random.Generator) -> UsageRows:
    """Return simulated windows with every field of the usage table, less the fields and windows that a real cell loses.

    Some windows are dropped as lost measurements, but never the last one before an out-of-memory kill: the truth is
    scored against it.
    """
    keep = (rng.random(len(w.cpu)) >= MISSING_WINDOW) | w.out_of_memory
    w = SimulatedWindows(**{name: getattr(w, name)[keep] for name in SimulatedWindows.__dataclass_fields__})
    n, tier = len(w.cpu), w.tier
    cpu_max = w.cpu * np.maximum(read_table(CPU_PEAK, tier, _mixed(w.peak_score, 0.6, rng)), 1.0)
    top = np.maximum(cpu_max * np.interp(rng.random(n), TOP_LEVELS, TOP_OVER_MAX), w.cpu * 1.01)
    percentiles, tail = percentile_shape(w.cpu, top, rng)

    place = rng.random(n) * 10.0
    left = np.minimum(place.astype(np.int64), 9)
    row = np.arange(n)
    sample = percentiles[row, left] + (place - left) * (percentiles[row, left + 1] - percentiles[row, left])

    page_cache = w.memory * np.minimum(read_table(PAGE_CACHE, tier, _mixed(w.cache_score, 0.9, rng)), 0.95)
    # The assigned memory is the limit for most tasks; inside an alloc instance it is 0, as the instance holds it.
    assigned = np.where(w.cache_score > 1.0, np.maximum(w.memory_max, 0.8 * w.memory_limit), w.memory_limit)
    assigned = np.where(w.alloc_collection > 0, 0.0, assigned)
    rate = np.interp(rng.standard_normal(n), SCORES, SAMPLE_RATE)
    sample_rate = np.where(rng.random(n) < FULL_SAMPLE_RATE, 1.0, np.round(rate, 4))

    counted = (_sticky(w.counters_u, rng) >= MISSING_CPI[tier]) & (w.kind == 0)
    cpi = np.exp(CPI_LOG[tier, 0] + CPI_LOG[tier, 1] * _mixed(w.cpi_score, 0.95, rng))
    mai = np.exp(MAI_LOG[tier, 0] + MAI_LOG[tier, 1] * _mixed(w.cpi_score, 0.60, rng))
    has_percentiles = _sticky(w.percentiles_u, rng) >= MISSING_PERCENTILES[tier]
    return UsageRows(
        simulated=w,
        cpu=resource_code(w.cpu),
        memory=resource_code(w.memory),
        cpu_max=resource_code(np.maximum(cpu_max, w.cpu)),
        memory_max=resource_code(w.memory_max),
        has_memory_max=(rng.random(n) >= MISSING_MAX_MEMORY) | w.out_of_memory,
        cpu_sample=resource_code(sample),
        assigned_memory=resource_code(assigned),
        page_cache=resource_code(page_cache),
        sample_rate=sample_rate,
        cpi=np.where(counted, np.round(cpi, 6), np.nan),
        mai=np.where(counted, np.round(mai, 8), np.nan),
        percentiles=resource_code(percentiles),
        has_percentiles=has_percentiles,
        tail=resource_code(tail),
        has_tail=has_percentiles & (rng.random(n) < TAIL_PRESENT),
    )
