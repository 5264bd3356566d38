"""Memory as plain arrays: it comes back as it was, and that of other code is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from reclaim.data.core.state import adopt, memory_of, part_of, state_of
from reclaim.data.errors import ConfigError

PAIR = np.dtype([("small", "i1"), ("large", "f8")], align=True)


def memory() -> dict[str, NDArray[Any]]:
    pairs = np.zeros((3, 2), PAIR)
    pairs["small"], pairs["large"] = 7, np.arange(6).reshape(3, 2)
    return {"pairs": pairs[:, 0], "rows": np.arange(8.0).reshape(4, 2)}


LIKE = {"pairs": np.zeros(0, PAIR), "rows": np.zeros((0, 2))}


def test_memory_comes_back_from_a_file_without_pickle_in_its_own_layout_and_apart(tmp_path: Path) -> None:
    ours = memory()
    state = state_of("fold/1", ours)
    np.savez(tmp_path / "state.npz", allow_pickle=False, **state)
    with np.load(tmp_path / "state.npz", allow_pickle=False) as saved:
        found = memory_of("fold/1", LIKE, saved)
    assert set(found) == set(ours)
    for name, array in ours.items():
        assert found[name].dtype == array.dtype
        assert found[name].tolist() == array.tolist()
    memory_of("fold/1", LIKE, state)["rows"][:] = -1
    ours["rows"][:] = -2
    ours["pairs"]["large"] = -2
    assert state["rows"][0].tolist() == [0.0, 1.0]  # neither of them changes what was saved
    assert state["pairs.large"].tolist() == [0.0, 2.0, 4.0]


def test_memory_of_another_kind_or_layout_is_refused() -> None:
    state = state_of("fold/1", memory())
    with pytest.raises(ConfigError, match=r"saved by fold/1, and fold/2 cannot continue it: start afresh"):
        memory_of("fold/2", LIKE, state)
    with pytest.raises(ConfigError, match=r"saved by something unknown, and fold/1 cannot"):
        memory_of("fold/1", LIKE, {})
    for name, wrong in (
        ("rows", np.zeros((4, 3))), ("rows", np.zeros((4, 2), np.float32)), ("pairs.large", np.zeros(3, np.int64)),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=rf"of fold/1 does not fit in '{name}', other code saved it"):
            memory_of("fold/1", LIKE, state | {name: wrong})
    del state["pairs.small"]
    with pytest.raises(ConfigError, match=r"does not fit in 'pairs\.small'"):
        memory_of("fold/1", LIKE, state)


def test_an_array_is_adopted_contiguous_if_it_differs_in_length_alone() -> None:
    wide = np.arange(16.0).reshape(4, 4)
    found = adopt("rows", LIKE["rows"], {"rows": wide[:, ::2]})
    assert found.tolist() == wide[:, ::2].tolist()
    assert found.flags.c_contiguous
    for unfit in ({}, {"rows": wide}, {"rows": wide[:, ::2].astype(np.float32)}):
        with pytest.raises(ConfigError, match=r"the memory does not fit in 'rows', other code saved it"):
            adopt("rows", LIKE["rows"], unfit)


def test_a_part_has_the_rest_of_the_names_that_begin_with_its_own() -> None:
    one, other = np.zeros(1), np.ones(1)
    assert part_of({"a.b": one, "a.a.b": other, "b.a.b": other}, "a.") == {"b": one, "a.b": other}
