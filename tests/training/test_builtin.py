"""The built-in model: its files are those of its version, small, and an ordinary model for the rest of the system."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from reclaim.data.errors import ModelError
from reclaim.features.seen import SAMPLED, SEEN
from reclaim.training.bundle import load_bundle, load_model
from reclaim.training.models.estimator import UNKNOWN_LIMITS
from reclaim.training.tracking.references import (
    BUILTIN,
    BUILTIN_FOLDER,
    BUILTIN_VERSION,
    find_model,
    find_served,
    is_alias,
    is_champion,
    is_folder,
)

SHA256 = {
    "1": "e5b5f3d24e5c233eb640caa5cafb8556d26f595278cb88693a58fdc16dd941b8",
    "2": "c5ee44b556815b4cfa77525f8f8d93eaf933c8c64c04bea6dc721ac7beb466db",
}
"""Of the weights of each version: other weights are another version."""


def test_the_weights_are_those_of_the_version_and_below_a_megabyte() -> None:
    weights = (BUILTIN_FOLDER / "portable.safetensors").read_bytes()
    assert hashlib.sha256(weights).hexdigest() == SHA256[BUILTIN_VERSION]
    assert sum(path.stat().st_size for path in BUILTIN_FOLDER.iterdir()) < 1_000_000


def test_the_reference_builtin_is_that_model_and_needs_no_registry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    location = find_model(BUILTIN)
    assert (location.name, location.version, location.label) == (
        "builtin",
        BUILTIN_VERSION,
        f"builtin/{BUILTIN_VERSION}",
    )
    assert is_folder(BUILTIN)
    assert not is_alias(BUILTIN)
    bundle = load_model(BUILTIN)
    assert bundle.portable
    assert bundle.machines == {}  # the bound, which needs no fit
    assert np.array_equal(bundle.mean_limit, UNKNOWN_LIMITS, equal_nan=True)
    assert list(tmp_path.iterdir()) == []


def test_it_stands_in_where_no_model_is_named_and_for_none_that_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_served().builtin
    assert load_model().origin == find_served()
    for reference in ("reclaim@champion", "mine@champion", "reclaim@candidate", "reclaim/3", "./nowhere"):
        with pytest.raises(ModelError, match="no model"):
            load_model(reference)


def test_it_stands_in_for_no_champion_that_is_damaged_or_whose_store_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "store.db").write_bytes(b"no database" * 100)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/store.db")
    with pytest.raises(ModelError, match="cannot be used"):
        find_served()


def test_a_folder_by_the_name_of_a_champion_is_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_champion("reclaim@champion")
    assert not is_champion("./models/mine@champion")
    with pytest.raises(ModelError, match="no model"):
        load_model("./models/mine@champion")


def test_where_it_does_not_load_the_remedy_is_a_training_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reclaim.training.bundle._load", lambda _: np.zeros(3).reshape(4))
    with pytest.raises(
        ModelError,
        match=r"; install reclaim again, or .* --set prior=none --set against_builtin=false`$",
    ):
        load_model(BUILTIN)


def test_its_card_names_every_source_and_its_terms() -> None:
    bundle = load_bundle(BUILTIN_FOLDER)
    card = (BUILTIN_FOLDER / "README.md").read_text()
    notice = (Path(__file__).parents[2] / "NOTICE").read_text()
    for source in bundle.trained["datasets"]:
        assert f"| `{source['name']}` |" in card
        assert len(set(source[SEEN])) == SAMPLED  # by which a replay knows its windows in other datasets
    for line in ("CC-BY 4.0", "Bitbrains", "Azure", "Google"):
        assert line in card
        assert line in notice
    assert SHA256[BUILTIN_VERSION] in card
