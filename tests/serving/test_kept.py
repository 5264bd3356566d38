"""The last models on disk: two of them, whole or not used, and a start that falls back on them."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from reclaim.data.errors import ModelError
from reclaim.serving.kept import KeptModels, Refusal, keep_if_possible, start_model, without_credentials
from reclaim.serving.loader import ModelLocation
from reclaim.serving.settings import ServingSettings
from reclaim.training.bundle import BUNDLE_FILE, Bundle, save_bundle

ALIAS = "reclaim@champion"


def _model(folder: Path, version: str, content: str = "") -> ModelLocation:
    folder.mkdir(parents=True)
    (folder / BUNDLE_FILE).write_text(content or f"version {version}")
    return ModelLocation("reclaim", version, folder, ALIAS)


def test_the_last_two_are_kept_the_latest_first(tmp_path: Path) -> None:
    kept = KeptModels(tmp_path / "models")
    assert kept.of(ALIAS) == []
    places = [kept.keep(_model(tmp_path / version, version), run_id=f"r{version}") for version in "123"]
    assert [location for _, location in kept.of(ALIAS)] == [places[2], places[1]]
    assert sorted(path.name for path in kept.folder.iterdir()) == ["kept.json", "reclaim-2", "reclaim-3"]
    assert (places[2].folder / BUNDLE_FILE).read_text() == "version 3"
    assert kept.of("reclaim@candidate") == []
    assert kept.find("reclaim", "2", "r2") == places[1]
    assert kept.find("reclaim", "2", "another registry's") is None
    kept.keep(places[1], run_id="r2")  # rolled back: from its own place
    assert [entry.version for entry, _ in kept.of(ALIAS)] == ["2", "3"]
    assert kept.holds(places[1].folder)
    assert not kept.holds(tmp_path / "1")


def test_a_version_of_the_same_number_with_other_files_takes_the_place(tmp_path: Path) -> None:
    kept = KeptModels(tmp_path / "models")
    kept.keep(_model(tmp_path / "a", "1", "of one registry"))
    kept.keep(_model(tmp_path / "b", "1", "of another"))
    ((_, location),) = kept.of(ALIAS)
    assert (location.folder / BUNDLE_FILE).read_text() == "of another"


def test_files_that_changed_are_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = KeptModels(tmp_path / "models")
    kept.keep(_model(tmp_path / "1", "1"))
    latest = kept.keep(_model(tmp_path / "2", "2"))
    with (latest.folder / BUNDLE_FILE).open("r+") as file:
        file.write("V")
    assert [entry.version for entry, _ in kept.of(ALIAS)] == ["1"]
    assert "the files of reclaim version 2 are damaged" in caplog.text
    kept.keep(_model(tmp_path / "again", "2"))  # its like is copied anew
    assert [entry.version for entry, _ in kept.of(ALIAS)] == ["2", "1"]


@pytest.mark.parametrize("damage", ["", "{", '{"models": [{"name": "reclaim"}]}', "[]", '{"models": 3}'])
def test_a_damaged_index_keeps_nothing_and_is_written_anew(tmp_path: Path, damage: str) -> None:
    kept = KeptModels(tmp_path / "models")
    kept.keep(_model(tmp_path / "1", "1"))
    (kept.folder / "kept.json").write_text(damage)
    assert kept.of(ALIAS) == []
    kept.keep(_model(tmp_path / "2", "2"))
    assert [entry.version for entry, _ in kept.of(ALIAS)] == ["2"]
    assert json.loads((kept.folder / "kept.json").read_text())["models"][0]["version"] == "2"


def test_a_copy_cut_off_at_any_step_leaves_the_last_one_in_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = KeptModels(tmp_path / "models")
    kept.keep(_model(tmp_path / "1", "1"))
    for module, step in ((os, "fsync"), (Path, "rename"), (os, "replace")):
        with monkeypatch.context() as patch:
            patch.setattr(module, step, _no_room)
            location = _model(tmp_path / step, "2")
            assert keep_if_possible(kept, location) == location  # served all the same
        assert [entry.version for entry, _ in kept.of(ALIAS)] == ["1"]
    kept.keep(_model(tmp_path / "2", "2"))
    assert [entry.version for entry, _ in kept.of(ALIAS)] == ["2", "1"]
    assert sorted(path.name for path in kept.folder.iterdir()) == ["kept.json", "reclaim-1", "reclaim-2"]


def _no_room(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_start_without_the_model_goes_on_from_disk_and_says_why(
    bundle: Bundle, bundle_folder: Path, tmp_path: Path
) -> None:
    settings = ServingSettings(model=ALIAS, bundle=bundle_folder, model_version="3", state=tmp_path)
    first = start_model(settings)
    assert (first.model.version, first.from_disk, first.refused) == ("3", False, None)
    assert first.location.folder == (tmp_path / "models" / "reclaim-3").resolve()
    gone = start_model(settings.model_copy(update={"bundle": tmp_path / "gone"}))
    assert (gone.model.version, gone.from_disk) == ("3", True)
    assert gone.refused == Refusal("3", f"{tmp_path}/gone holds no bundle.json: it is no model of reclaim; "
                                        "train one with `reclaim train`")  # fmt: skip
    with pytest.raises(ModelError, match=r"holds no bundle\.json"):
        start_model(settings.model_copy(update={"bundle": tmp_path / "gone", "model": "reclaim@another"}))
    with pytest.raises(ModelError, match=r"holds no bundle\.json"):
        start_model(settings.model_copy(update={"bundle": tmp_path / "gone", "state": None}))
    # a worker that starts again: what was promoted since its launch goes on, not what the launch found
    save_bundle(replace(bundle, dataset_fingerprint="promoted"), tmp_path / "promoted")
    KeptModels(tmp_path / "models").keep(ModelLocation("reclaim", "4", tmp_path / "promoted", ALIAS))
    again = start_model(settings.model_copy(update={"bundle": first.location.folder}))
    assert (again.model.version, again.model.bundle.dataset_fingerprint, again.from_disk) == ("4", "promoted", False)


def test_a_kept_model_that_no_longer_fits_gives_way_to_the_one_before(
    bundle: Bundle, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = KeptModels(tmp_path / "models")
    for version, pipeline in (("1", bundle.pipeline_version), ("2", "another")):
        save_bundle(replace(bundle, pipeline_version=pipeline), tmp_path / version)
        kept.keep(ModelLocation("reclaim", version, tmp_path / version, ALIAS))
    start = start_model(ServingSettings(model=ALIAS, bundle=tmp_path / "gone", state=tmp_path))
    assert (start.model.version, start.from_disk) == ("1", True)
    assert "reclaim version 2, kept on disk" in caplog.text
    assert "feature pipeline another" in caplog.text


def test_what_is_shown_holds_no_password() -> None:
    shown = without_credentials(
        ModelError("no answer from\n https://me:secret@store.example/x and postgresql://a:b@c/d")
    )
    assert shown == "no answer from https://store.example/x and postgresql://c/d"
    assert len(without_credentials(ModelError("x" * 1_000))) == 300


def test_a_copy_killed_between_two_names_gives_the_one_before_back(tmp_path: Path) -> None:
    kept = KeptModels(tmp_path / "models")
    place = kept.keep(_model(tmp_path / "a", "1", "of one registry"))
    place.folder.rename(place.folder.with_name("reclaim-1.old"))  # and no other has taken its place yet
    assert kept.find("reclaim", "1", "") == place
    assert (place.folder / BUNDLE_FILE).read_text() == "of one registry"
    kept.keep(_model(tmp_path / "b", "1", "of another"))
    assert sorted(path.name for path in kept.folder.iterdir()) == ["kept.json", "reclaim-1"]
