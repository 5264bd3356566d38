"""References of models: the version, folder or built-in model that each one leads to."""

from __future__ import annotations

from pathlib import Path

import pytest

from reclaim.data.errors import ModelAbsentError, ModelError
from reclaim.training.tracking import references
from reclaim.training.tracking.references import (
    ModelLocation,
    builtin_model,
    find_model,
    find_served,
    is_alias,
    is_champion,
)
from reclaim.training.tracking.runs import ModelVersion


def test_a_registered_model_is_fetched_by_the_version_that_its_alias_led_to_and_keeps_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched = []

    def fetch(reference: str) -> tuple[Path, str]:
        fetched.append(reference)
        return tmp_path, "7"

    monkeypatch.setattr(references, "resolve_model", lambda _: ModelVersion("cell", "7", "run7"))
    monkeypatch.setattr(references, "fetch_bundle", fetch)
    found = find_model("cell@champion")
    assert found == ModelLocation("cell", "7", tmp_path, "cell@champion", "run7")
    assert fetched == ["cell/7"]  # a promotion in between changes nothing
    assert (found.registered, found.label) == (True, "cell/7")


def test_a_folder_may_begin_with_the_sign_of_the_home_and_is_no_registered_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine").mkdir()
    found = find_model("~/mine")
    assert found == ModelLocation("mine", "local", tmp_path / "mine", "~/mine")
    assert (found.registered, found.builtin, found.label) == (False, False, "mine")


def test_a_file_is_no_folder_of_a_model(tmp_path: Path) -> None:
    (tmp_path / "model").touch()
    with pytest.raises(ModelError, match=r"no model '.*/model': neither .* nor an existing folder; `reclaim train"):
        find_model(f"{tmp_path}/model")


def test_in_place_of_a_missing_champion_the_built_in_model_has_its_reference_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def absent(reference: str) -> ModelVersion:
        raise ModelAbsentError(f"no model {reference}")

    monkeypatch.setattr(references, "resolve_model", absent)
    assert find_served() == builtin_model("reclaim@champion")
    assert caplog.messages == ["no model reclaim@champion; the built-in model answers"]


def test_only_the_alias_champion_is_a_champion() -> None:
    names = ("reclaim@champion", "cell@champion", "reclaim@candidate", "champion", "champion/1", "./reclaim@champion")
    assert [is_champion(name) for name in names] == [True, True, False, False, False, False]


def test_a_name_at_an_alias_may_lead_to_another_version_later_and_nothing_else_may() -> None:
    names = ("reclaim@champion", "cell@candidate", "reclaim/3", "builtin", "./reclaim@champion", "reclaim")
    assert [is_alias(name) for name in names] == [True, True, False, False, False, False]
