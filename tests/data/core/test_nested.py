"""Nested settings under dotted names, and one setting as ``--set`` takes it."""

from __future__ import annotations

import tomllib

import pytest

from reclaim.data.core.nested import as_set, flatten


def test_names_of_all_levels_are_joined_with_dots() -> None:
    assert flatten({"seed": 1, "fit": {"width": 8, "decay": {"cpu": 0.5}}, "none": {}}) == {
        "seed": 1, "fit.width": 8, "fit.decay.cpu": 0.5,
    }  # fmt: skip


@pytest.mark.parametrize("value", [True, False, 3, 0.25, [1, 2], (0.5, 0.9)])
def test_a_setting_is_written_as_it_is_read_again(value: object) -> None:
    read = tomllib.loads(f"of = {as_set(value)}")["of"]
    assert read == (list(value) if isinstance(value, tuple) else value)
    assert type(read) is (list if isinstance(value, tuple) else type(value))


def test_a_word_needs_no_quotes_and_no_value_is_none() -> None:
    assert [as_set("builtin"), as_set(None)] == ["builtin", "none"]
