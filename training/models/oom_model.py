"""The out-of-memory model: small boosted trees from a task's features to the probability at each horizon."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save_file

from reclaim.data.core.jit import LENT
from reclaim.data.core.parallel import in_parts
from reclaim.features.registry import AT, FEATURE_NAMES, FIRST_RELATED
from reclaim.features.targets import HORIZONS_S

LEAVES: Final = 8
"""Most leaves of a tree: a bit of a byte each."""

_BESIDES: Final = (
    AT.age, AT.seen, AT.restarts, AT.gap, AT.coverage_2h, AT.length, AT.in_alloc, AT.scheduling_class, AT.page_cache,
    AT.page_cache_share, AT.cpi, AT.cpu_limit, AT.cpu_last, AT.cpu_mean_2h, AT.cpu_max_24h, AT.cpu_slow_max,
    AT.peak_cpu_last, AT.peak_cpu_max_24h,
)  # fmt: skip
_GROUPS: Final = ("memory_", "oom", "collection_oom", "tier_")
INPUTS: Final = tuple(
    k for k, name in enumerate(FEATURE_NAMES[:FIRST_RELATED]) if name.startswith(_GROUPS) or k in _BESIDES
)
"""Positions of the features that the model reads: memory, out-of-memory history, and a few of the task. All features of
CPU in addition made no difference on cells held out of training."""

_TOGETHER: Final = 64
"""Rows that are asked together: their inputs lie in a core's nearest cache."""
_ALL: Final = 2**LEAVES - 1
_LOWEST_BIT: Final = np.array([(k & -k).bit_length() - 1 for k in range(_ALL + 1)], np.int8)
"""Place of the lowest bit of each byte; -1 of none."""


class Trees(NamedTuple):
    """Trees of each horizon, of ``LEAVES`` leaves at most; a horizon that is not fitted has arrays of zeros.

    A tree is asked by all its nodes at once (QuickScorer, Lucchese et al., SIGIR'15). Leaves are numbered from left to
    right; each node that sends a row to the right rules out the leaves to its left, and the first that is left is it.

    Attributes
    ----------
    feature : int32, shape (n_horizons, n_trees, LEAVES - 1)
        Place in ``INPUTS`` of what each node reads.
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
        """Return trees of which none sends a row anywhere, and that add nothing."""
        nodes, leaves = (len(HORIZONS_S), n_trees, LEAVES - 1), (len(HORIZONS_S), n_trees, LEAVES)
        return cls(
            np.zeros(nodes, np.int32), np.full(nodes, np.inf, np.float32), np.zeros(nodes, np.uint8),
            np.full(nodes, _ALL, np.int32), np.zeros(leaves, np.float32), np.zeros(len(HORIZONS_S), np.float32),
        )  # fmt: skip

    def put(self, h: int, tree: int, nodes: NDArray[Any]) -> None:
        """Write one tree of scikit-learn's (``TreePredictor.nodes``) in its place."""
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
            self.feature[place] = node["feature_idx"]
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
    return np.nextafter(single, np.float32(-np.inf)) if single > threshold else single


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

    def __init__(self, trees: Trees, fitted: NDArray[np.bool_]) -> None:
        self.trees = Trees(*map(np.ascontiguousarray, trees))
        self.fitted = fitted

    def predict(
        self, x: NDArray[np.float32], horizons_s: tuple[int, ...] = HORIZONS_S, threads: int = 1
    ) -> NDArray[np.float64]:
        """Return probabilities, not calibrated; shape (n, n_features) to (n, len(horizons_s)); NaN where not fitted."""
        out = np.full((len(x), len(horizons_s)), np.nan)
        places = np.array([HORIZONS_S.index(h) for h in horizons_s])
        asked = np.flatnonzero(self.fitted[places])

        def ask(part: int, parts: int) -> None:
            rows = slice(len(x) * part // parts, len(x) * (part + 1) // parts)
            block, left, total = (
                np.zeros(shape, dtype)
                for shape, dtype in (
                    ((len(INPUTS), _TOGETHER), np.float32), (_TOGETHER, np.int32), (_TOGETHER, np.float32),
                )
            )  # fmt: skip
            _ask(x[rows], _INPUTS, self.trees, places, asked, _LOWEST_BIT, block, left, total, out[rows])

        in_parts(ask, len(x), threads)
        return out

    def save(self, folder: Path) -> None:
        """Write what ``load`` reads into an existing folder."""
        save_file(self.trees._asdict() | {self._FITTED: self.fitted}, folder / self.FILE)

    @classmethod
    def load(cls, folder: Path) -> OomModel | None:
        """Read what ``save`` wrote; None where there is no such file, ValueError where it is of another model."""
        if not (folder / cls.FILE).is_file():
            return None
        with safe_open(folder / cls.FILE, framework="np") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - no mapping
        if missing := {cls._FITTED, *Trees._fields} - tensors.keys():
            raise ValueError(f"{cls.FILE}: no {', no '.join(sorted(missing))}; train again")
        fitted = tensors.pop(cls._FITTED)
        expected = [array.shape for array in Trees.blank(tensors["value"].shape[1])]
        trees = Trees(**{name: tensors[name] for name in Trees._fields})
        if [array.shape for array in trees] != expected:
            raise ValueError(f"{cls.FILE}: expected arrays of shapes {expected}, got {[a.shape for a in trees]}")
        return cls(trees, fitted)


_INPUTS: Final = np.array(INPUTS)


@numba.njit(**LENT)
def _ask(
    x: Any,  # (n, n_features) float32
    inputs: Any,  # (n_inputs,) int64
    trees: Any,  # Trees
    places: Any,  # (n_asked,) int64: horizons of the columns of out
    asked: Any,  # columns of out that are written
    lowest_bit: Any,  # (256,) int8
    block: Any,  # (n_inputs, _TOGETHER) float32, overwritten
    left: Any,  # (_TOGETHER,) int32, overwritten
    total: Any,  # (_TOGETHER,) float32, overwritten
    out: Any,  # (n, n_asked) float64, written
) -> None:
    """Write probabilities: each row's sum in the order of the trees, whatever other rows there are."""
    for first in range(0, len(x), _TOGETHER):
        n = min(_TOGETHER, len(x) - first)
        for c in range(len(inputs)):
            for i in range(n):
                block[c, i] = x[first + i, inputs[c]]
        for column in asked:
            h = places[column]
            for i in range(_TOGETHER):
                total[i] = trees.start[h]
            for t in range(trees.feature.shape[1]):
                for i in range(_TOGETHER):
                    left[i] = _ALL
                for j in range(trees.feature.shape[2]):
                    values, threshold = block[trees.feature[h, t, j]], trees.threshold[h, t, j]
                    kept = trees.kept[h, t, j]
                    if trees.unknown_right[h, t, j]:
                        for i in range(_TOGETHER):
                            left[i] &= np.int32(_ALL) if values[i] <= threshold else kept
                    else:
                        for i in range(_TOGETHER):
                            left[i] &= kept if values[i] > threshold else np.int32(_ALL)
                for i in range(_TOGETHER):
                    total[i] += trees.value[h, t, lowest_bit[left[i]]]
            for i in range(n):
                out[first + i, column] = 1.0 / (1.0 + np.exp(-np.float64(total[i])))
