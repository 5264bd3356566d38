"""The cache holds the last two models, uses undamaged ones only, and a start falls back on them."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from reclaim.data.errors import ModelError
from reclaim.serving.models.cache import ModelCache, Refusal, add_if_possible, in_one_line, start_model
from reclaim.serving.settings import ServingSettings
from reclaim.training.bundle import BUNDLE_FILE, Bundle, save_bundle
from reclaim.training.tracking.references import ModelLocation

ALIAS = "reclaim@champion"


def _model(folder: Path, version: str, content: str = "") -> ModelLocation:
    folder.mkdir(parents=True)
    (folder / BUNDLE_FILE).write_text(content or f"version {version}")
    return ModelLocation("reclaim", version, folder, ALIAS)


def test_the_last_two_are_kept_the_latest_first(tmp_path: Path) -> None:
    cache = ModelCache(tmp_path / "models")
    assert cache.versions_for(ALIAS) == []
    places = [cache.add(_model(tmp_path / version, version), run_id=f"r{version}") for version in "123"]
    assert [location for _, location in cache.versions_for(ALIAS)] == [places[2], places[1]]
    assert sorted(path.name for path in cache.folder.iterdir()) == ["kept.json", "reclaim-2", "reclaim-3"]
    assert (places[2].folder / BUNDLE_FILE).read_text() == "version 3"
    assert cache.versions_for("reclaim@candidate") == []
    assert cache.find("reclaim", "2", "r2") == places[1]
    assert cache.find("reclaim", "2", "another registry's") is None
    cache.add(places[1], run_id="r2")  # rolled back: from its own place
    assert [entry.version for entry, _ in cache.versions_for(ALIAS)] == ["2", "3"]
    assert cache.contains(places[1].folder)
    assert not cache.contains(tmp_path / "1")


def test_other_files_of_the_same_version_replace_the_cached_ones(tmp_path: Path) -> None:
    cache = ModelCache(tmp_path / "models")
    cache.add(_model(tmp_path / "a", "1", "of one registry"))
    cache.add(_model(tmp_path / "b", "1", "of another"))
    ((_, location),) = cache.versions_for(ALIAS)
    assert (location.folder / BUNDLE_FILE).read_text() == "of another"


def test_files_that_changed_are_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = ModelCache(tmp_path / "models")
    cache.add(_model(tmp_path / "1", "1"))
    latest = cache.add(_model(tmp_path / "2", "2"))
    with (latest.folder / BUNDLE_FILE).open("r+") as file:
        file.write("V")
    assert [entry.version for entry, _ in cache.versions_for(ALIAS)] == ["1"]
    assert "the files of reclaim version 2 are damaged" in caplog.text
    cache.add(_model(tmp_path / "again", "2"))  # an equal one is copied again
    assert [entry.version for entry, _ in cache.versions_for(ALIAS)] == ["2", "1"]


@pytest.mark.parametrize("damage", ["", "{", '{"models": [{"name": "reclaim"}]}', "[]", '{"models": 3}'])
def test_a_damaged_index_is_ignored_and_written_again(tmp_path: Path, damage: str) -> None:
    cache = ModelCache(tmp_path / "models")
    cache.add(_model(tmp_path / "1", "1"))
    (cache.folder / "kept.json").write_text(damage)
    assert cache.versions_for(ALIAS) == []
    cache.add(_model(tmp_path / "2", "2"))
    assert [entry.version for entry, _ in cache.versions_for(ALIAS)] == ["2"]
    assert json.loads((cache.folder / "kept.json").read_text())["models"][0]["version"] == "2"


def test_a_copy_cut_off_at_any_step_leaves_the_last_one_current(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = ModelCache(tmp_path / "models")
    cache.add(_model(tmp_path / "1", "1"))
    for module, step in ((os, "fsync"), (shutil, "copyfile"), (os, "replace")):
        with monkeypatch.context() as patch:
            patch.setattr(module, step, _no_room)
            location = _model(tmp_path / step, "2")
            assert add_if_possible(cache, location) == location  # served all the same
        assert [entry.version for entry, _ in cache.versions_for(ALIAS)] == ["1"]
    cache.add(_model(tmp_path / "2", "2"))
    assert [entry.version for entry, _ in cache.versions_for(ALIAS)] == ["2", "1"]
    assert sorted(path.name for path in cache.folder.iterdir()) == ["kept.json", "reclaim-1", "reclaim-2"]


def _no_room(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_start_without_the_model_falls_back_on_the_cache_and_gives_the_reason(
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
    # nothing is kept without a state folder
    with pytest.raises(ModelError, match=r"holds no bundle\.json.*; where no model is named, the built-in one serves"):
        start_model(settings.model_copy(update={"bundle": tmp_path / "gone", "state": None}))
    # a worker that starts again: what was promoted since its launch goes on, not what the launch found
    save_bundle(replace(bundle, dataset_fingerprint="promoted"), tmp_path / "promoted")
    ModelCache(tmp_path / "models").add(ModelLocation("reclaim", "4", tmp_path / "promoted", ALIAS))
    again = start_model(settings.model_copy(update={"bundle": first.location.folder}))
    assert (again.model.version, again.model.bundle.dataset_fingerprint, again.from_disk) == ("4", "promoted", False)


def test_the_built_in_model_serves_where_no_model_was_named_and_there_is_none_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ServingSettings(bundle=tmp_path / "gone", model_version="3")
    start = start_model(settings)
    assert (start.location.builtin, start.model.name, start.from_disk) == (True, "builtin", False)
    assert start.refused is not None
    assert "the built-in model serves until there is one" in caplog.text
    assert add_if_possible(ModelCache(tmp_path / "models"), start.location) == start.location
    assert not (tmp_path / "models").exists(), "it is in the package, and need not be kept"
    monkeypatch.setenv("RECLAIM_MODEL", ALIAS)  # names it, too
    with pytest.raises(ModelError, match="where no model is named"):
        start_model(ServingSettings(bundle=tmp_path / "gone", model_version="3"))


def test_a_start_skips_a_cached_model_of_another_pipeline(
    bundle: Bundle, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = ModelCache(tmp_path / "models")
    for version, pipeline in (("1", bundle.pipeline_version), ("2", "another")):
        save_bundle(replace(bundle, pipeline_version=pipeline), tmp_path / version)
        cache.add(ModelLocation("reclaim", version, tmp_path / version, ALIAS))
    start = start_model(ServingSettings(model=ALIAS, bundle=tmp_path / "gone", state=tmp_path))
    assert (start.model.version, start.from_disk) == ("1", True)
    assert "reclaim version 2, kept on disk" in caplog.text
    assert "feature pipeline another" in caplog.text


def test_shown_errors_hold_no_password() -> None:
    shown = in_one_line(ModelError("no answer from\n https://me:secret@store.example/x and postgresql://a:b@c/d"))
    assert shown == "no answer from https://store.example/x and postgresql://c/d"
    assert len(in_one_line(ModelError("x" * 1_000))) == 300


def test_a_copy_killed_between_two_renames_restores_the_model_before(tmp_path: Path) -> None:
    cache = ModelCache(tmp_path / "models")
    place = cache.add(_model(tmp_path / "a", "1", "of one registry"))
    place.folder.rename(place.folder.with_name("reclaim-1.old.partial"))  # and no other has taken its place yet
    assert cache.find("reclaim", "1", "") == place
    assert (place.folder / BUNDLE_FILE).read_text() == "of one registry"
    cache.add(_model(tmp_path / "b", "1", "of another"))
    assert sorted(path.name for path in cache.folder.iterdir()) == ["kept.json", "reclaim-1"]
