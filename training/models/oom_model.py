"""The out-of-memory model: small boosted trees from a task's features to the probability at each horizon."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple

import numba
import numpy as np
from numba.core import types
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save

from reclaim.data.core import vectors
from reclaim.data.core.jit import LENT
from reclaim.data.core.parallel import in_parts
from reclaim.data.core.vectors import in_llvm, numba_tools
from reclaim.features.registry import AT, FEATURE_NAMES
from reclaim.features.targets import HORIZONS_S

LEAVES: Final = 8
"""Most leaves of a tree: a bit of a byte each."""

_MEMORY: Final = (
    AT.memory_last, AT.memory_mean, AT.memory_mean_30m, AT.memory_mean_2h, AT.memory_std_2h, AT.memory_max_1h,
    AT.memory_max_2h, AT.memory_max_6h, AT.memory_max_24h, AT.memory_ewm_1h, AT.memory_change_1h, AT.memory_growth_6h,
    AT.memory_slope_2h, AT.memory_rate_30m, AT.memory_rate_2h, AT.memory_rate_6h, AT.memory_rate_run, AT.memory_run_max,
    AT.memory_over_mean, AT.memory_above,
)  # fmt: skip
_RUN: Final = (AT.age, AT.seen, AT.restarts, AT.gap, AT.coverage_2h, AT.in_alloc)
_ENDS: Final = (
    AT.ooms, AT.oom_since, AT.oom_age, AT.oom_age_least, AT.oom_limit, AT.collection_ooms, AT.collection_oom_since,
    AT.collection_oom_age, AT.collection_oom_age_least, AT.collection_oom_rate,
)  # fmt: skip
_LEVEL: Final = (
    AT.memory_max_ever, AT.memory_slow_max, AT.memory_ewm_12h, AT.memory_p99_12h, AT.memory_p90_12h, AT.memory_p98_48h,
    AT.memory_same_hour_1d, AT.memory_same_hour_2d, AT.memory_same_hour_7d,
)  # fmt: skip
INPUTS: Final = tuple(sorted(int(k) for k in (*_MEMORY, *_RUN, *_ENDS, *_LEVEL)))
"""Positions of the features that the model reads: memory over the limit, the run, and earlier ends.

CPU, the size of the limits, tier, class, page cache and cycles per instruction are not read. A collection keeps them,
so trees would recognise by them the few collections with an end, and look for those again: on cells of other donors the
model is better without (``benchmarks/LOG.md``, 2026-11-25)."""
FEW_ENDS_INPUTS: Final = tuple(k for k, feature in enumerate(INPUTS) if feature not in _LEVEL)
"""Places in ``INPUTS`` of those that trees of few ends read: without the level of memory over days, by which they would
also recognise collections. Trees of many ends are better with it."""

_TOGETHER: Final = 64
"""Rows that are evaluated together: their inputs fit a core's nearest cache."""
_FEW: Final = 16
"""The same for a call of up to this many rows, as a single one costs as much as all."""
_ALL: Final = 2**LEAVES - 1


class Trees(NamedTuple):
    """Trees of each horizon, of ``LEAVES`` leaves at most; those of a horizon that is not fitted are ``blank``.

    A tree is evaluated at all its nodes at once (QuickScorer, Lucchese et al., SIGIR'15). Leaves are numbered from left
    to right; each node that sends a row to the right rules out the leaves to its left, and the first remaining leaf is
    the result.

    Attributes
    ----------
    feature : int32, shape (n_horizons, n_trees, LEAVES - 1)
        Place in ``INPUTS`` of the input that each node reads.
    threshold : float32, the same shape
        A row goes right whose value is above; a node that a smaller tree lacks has infinity, which sends none.
    unknown_right : uint8, the same shape
        1 where a row of unknown value goes right.
    kept : int32, the same shape
        Bits of the leaves that are left when a row goes right.
    value : float32, shape (n_horizons, n_trees, LEAVES)
        Logit that each leaf adds.
    start : float32, shape (n_horizons,)
        Logit before all trees.
    """

    feature: NDArray[np.int32]
    threshold: NDArray[np.float32]
    unknown_right: NDArray[np.uint8]
    kept: NDArray[np.int32]
    value: NDArray[np.float32]
    start: NDArray[np.float32]

    @classmethod
    def blank(cls, n_trees: int) -> Trees:
        """Return trees without splits that add nothing."""
        nodes, leaves = (len(HORIZONS_S), n_trees, LEAVES - 1), (len(HORIZONS_S), n_trees, LEAVES)
        return cls(
            np.zeros(nodes, np.int32), np.full(nodes, np.inf, np.float32), np.zeros(nodes, np.uint8),
            np.full(nodes, _ALL, np.int32), np.zeros(leaves, np.float32), np.zeros(len(HORIZONS_S), np.float32),
        )  # fmt: skip

    def put(self, h: int, tree: int, nodes: NDArray[Any], reads: Sequence[int]) -> None:
        """Write one tree of scikit-learn's (``TreePredictor.nodes``), whose features are ``reads``, in its place."""
        leaves: list[float] = []
        n_inner = 0

        def walk(at: int) -> int:
            """Return the bits of the leaves below a node, which it numbers."""
            nonlocal n_inner
            node = nodes[at]
            if node["is_leaf"]:
                leaves.append(float(node["value"]))
                return 1 << (len(leaves) - 1)
            left, right = walk(int(node["left"])), walk(int(node["right"]))
            place = h, tree, n_inner
            self.feature[place] = reads[node["feature_idx"]]
            self.threshold[place] = _rounded_down(float(node["num_threshold"]))
            self.unknown_right[place] = not node["missing_go_to_left"]
            self.kept[place] = _ALL & ~left
            n_inner += 1
            return left | right

        walk(0)
        self.value[h, tree, : len(leaves)] = leaves


def _rounded_down(threshold: float) -> np.float32:
    """Return the largest number of single precision that is not above a threshold: what a feature is compared with."""
    single = np.float32(threshold)
    # compared as doubles: next to a number of single precision NumPy rounds a float, and the two are equal
    return np.nextafter(single, np.float32(-np.inf)) if float(single) > threshold else single


class OomModel:
    """The trees behind the numpy interface, on the CPU.

    Parameters
    ----------
    trees : Trees
    fitted : bool, shape (n_horizons,)
        The probability of the other horizons is NaN.
    """

    FILE: Final = "oom_model.safetensors"
    _FITTED: Final = "fitted"
    _READS: Final = "inputs"

    def __init__(self, trees: Trees, fitted: NDArray[np.bool_]) -> None:
        self.trees = Trees(*map(np.ascontiguousarray, trees))
        self.fitted = fitted

    @cached_property
    def _reads(self) -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.int64]]:
        """Features that are read, with the value of an unknown one, (n_read,) each, and which of them each node reads.

        NaN sends a row to the right, minus infinity to the left.
        """
        pairs, rows = np.unique(2 * self.trees.feature + self.trees.unknown_right, return_inverse=True)
        unknown = np.where(pairs % 2, np.float32(np.nan), np.float32(-np.inf))
        return _INPUTS[pairs // 2], unknown, rows.reshape(self.trees.feature.shape)

    def predict(
        self, x: NDArray[np.float32], horizons_s: tuple[int, ...] = HORIZONS_S, threads: int = 1
    ) -> NDArray[np.float64]:
        """Return probabilities, not calibrated; shape (n, n_features) to (n, len(horizons_s)); NaN where not fitted."""
        out = np.full((len(x), len(horizons_s)), np.nan)
        places = np.array([HORIZONS_S.index(h) for h in horizons_s])
        asked = np.flatnonzero(self.fitted[places])
        inputs, unknown, read_at = self._reads

        def ask(part: int, parts: int) -> None:
            rows = slice(len(x) * part // parts, len(x) * (part + 1) // parts)
            width = _FEW if len(x) <= _FEW else _TOGETHER
            block, total = np.zeros((len(inputs), width), np.float32), np.zeros(width, np.float32)
            _ask(x[rows], inputs, unknown, read_at, self.trees, places, asked, block, total, out[rows])

        in_parts(ask, len(x), threads)
        return out

    def save(self, folder: Path) -> None:
        """Write what ``load`` reads into an existing folder."""
        tensors = self.trees._asdict() | {self._FITTED: self.fitted}
        content = save(tensors, metadata={self._READS: json.dumps(_NAMES)})
        (folder / self.FILE).write_bytes(content)  # of a full disk, save_file has an error of its own

    @classmethod
    def load(cls, folder: Path) -> OomModel | None:
        """Read what ``save`` wrote; None where there is no such file, ValueError where it is of another model."""
        if not (folder / cls.FILE).is_file():
            return None
        with safe_open(folder / cls.FILE, framework="np") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - no mapping
            reads = json.loads((file.metadata() or {}).get(cls._READS, "[]"))
        names = *Trees._fields, cls._FITTED
        if missing := set(names) - tensors.keys():
            raise ValueError(f"{cls.FILE}: no {', no '.join(sorted(missing))}")
        if reads != _NAMES:
            lacks, others = (
                [k for k in of if k not in by] or ["none"] for of, by in ((_NAMES, reads), (reads, _NAMES))
            )
            raise ValueError(f"{cls.FILE}: its inputs lack {', '.join(lacks)}, and have {', '.join(others)} besides")
        trees, fitted = Trees(**{name: tensors[name] for name in Trees._fields}), tensors[cls._FITTED]
        n_trees = trees.value.shape[1] if trees.value.ndim == 3 else 0
        blank: tuple[NDArray[Any], ...] = (*Trees.blank(n_trees), np.zeros(len(HORIZONS_S), np.bool_))
        for name, array, like in zip(names, (*trees, fitted), blank, strict=True):
            if (array.dtype, array.shape) != (like.dtype, like.shape):
                expected, got = (f"{of.dtype} of shape {of.shape}" for of in (like, array))
                raise ValueError(f"{cls.FILE}: expected {name} as {expected}, got {got}")
        if not ((trees.feature >= 0) & (trees.feature < len(INPUTS))).all():
            raise ValueError(f"{cls.FILE}: a tree reads a feature that is none of the {len(INPUTS)}")
        return cls(trees, fitted)


_INPUTS: Final = np.array(INPUTS)
_NAMES: Final = [FEATURE_NAMES[k] for k in INPUTS]


@in_llvm
def _add_tree(
    _: Any, block: Any, rows: Any, threshold: Any, kept: Any, value: Any, total: Any
) -> tuple[Any, Callable[..., Any]]:
    """Add the leaves of one tree to the totals, sixteen rows in registers at a time.

    The arrays are C-contiguous: block (n_read, width) and total (width,) float32, of a tree's nodes rows int64,
    threshold float32 and kept int32, of its leaves value float32. The width is a multiple of sixteen.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values, places, bounds, bits, added, to = vectors.arrays(context, builder, signature, args)
        (width,) = vectors.shape_of(builder, to)
        integer = width.type

        def numbers(array: Any, n: int) -> list[Any]:
            return [builder.load(builder.gep(array.data, [integer(k)])) for k in range(n)]

        nodes = [
            (
                builder.gep(values.data, [builder.mul(row, width)]),
                vectors.spread(builder, bound),
                vectors.spread_integer(builder, left),
            )
            for row, bound, left in zip(*(numbers(of, LEAVES - 1) for of in (places, bounds, bits)), strict=True)
        ]
        leaves = numbers(added, LEAVES)
        with numba_tools.for_range_slice(builder, integer(0), width, integer(vectors.LANES)) as (lane, _):
            left = vectors.constant(_ALL, kind=vectors.INTEGERS)
            for start, bound, those in nodes:
                stays = builder.fcmp_ordered("<=", vectors.load(builder, start, lane), bound)
                left = builder.and_(left, builder.or_(those, builder.sext(stays, vectors.INTEGERS)))
            leaf = vectors.first_left(builder, left, leaves)
            sums = builder.fadd(vectors.load(builder, to.data, lane), leaf)
            builder.store(sums, vectors.at(builder, to.data, lane), align=4)
        return context.get_dummy_value()

    return types.void(block, rows, threshold, kept, value, total), generate


@numba.njit(**LENT)
def _ask(
    x: Any,  # (n, n_features) float32
    inputs: Any,  # (n_read,) int64: the feature of each row of the block
    unknown: Any,  # (n_read,) float32: what is read where it is unknown
    rows: Any,  # (n_horizons, n_trees, LEAVES - 1) int64: row of the block that each node reads
    trees: Any,  # Trees
    places: Any,  # (n_asked,) int64: horizons of the columns of out
    asked: Any,  # columns of out that are written
    block: Any,  # (n_read, width) float32, overwritten
    total: Any,  # (width,) float32, overwritten
    out: Any,  # (n, n_asked) float64, written
) -> None:
    """Write probabilities: each row's sum in the order of the trees, whatever other rows there are."""
    width = len(total)
    for first in range(0, len(x), width):
        n = min(width, len(x) - first)
        for i in range(n):
            values = x[first + i]
            for c in range(len(inputs)):
                value, otherwise = values[inputs[c]], unknown[c]
                block[c, i] = value if value == value else otherwise  # only NaN differs from itself
        for column in asked:
            h = places[column]
            for i in range(width):
                total[i] = trees.start[h]
            for t in range(rows.shape[1]):
                _add_tree(block, rows[h, t], trees.threshold[h, t], trees.kept[h, t], trees.value[h, t], total)
            for i in range(n):
                out[first + i, column] = 1.0 / (1.0 + np.exp(-np.float64(total[i])))
