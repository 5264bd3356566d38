"""A reference resolves to a model in a folder or the registry, or is refused."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from reclaim.data.errors import ConfigError, ModelError
from reclaim.serving.models.loader import LoadedModel, find_model, load_location, named_location
from reclaim.serving.settings import ServingSettings
from reclaim.training.bundle import Bundle, save_bundle
from reclaim.training.tracking import runs as tracking
from reclaim.training.tracking.references import LOCAL_VERSION, is_alias, is_folder


def load_model(settings: ServingSettings) -> LoadedModel:
    """Load the model that settings name."""
    return load_location(named_location(settings), settings.margin)


def test_a_folder_is_a_model(bundle_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(bundle_folder.parent)
    location = find_model("./bundle")
    assert location.folder == bundle_folder.resolve()
    model = load_model(ServingSettings(model="./bundle"))
    assert (model.name, model.version, model.source) == ("bundle", LOCAL_VERSION, "./bundle")


def test_a_missing_model_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no model './nowhere'.*reclaim train DATASET"):
        find_model("./nowhere")
    with pytest.raises(ModelError, match=r"holds no bundle\.json.*reclaim train"):
        load_model(ServingSettings(bundle=tmp_path))


@pytest.mark.parametrize("content", [b"", b"\xff" * 64])
def test_damaged_files_are_refused_in_one_line(bundle_folder: Path, tmp_path: Path, content: bytes) -> None:
    folder = tmp_path / "bundle"
    shutil.copytree(bundle_folder, folder)
    (file,) = folder.glob("*.safetensors")
    file.write_bytes(content)
    with pytest.raises(ModelError, match="bundle: the files of the model are damaged"):
        load_model(ServingSettings(bundle=folder))
    file.unlink()
    with pytest.raises(ModelError, match="bundle: the files of the model are damaged"):
        load_model(ServingSettings(bundle=folder))


def test_only_an_alias_may_resolve_to_another_version() -> None:
    assert [is_alias(reference) for reference in ("reclaim@champion", "reclaim/3", "./bundle")] == [True, False, False]
    assert [is_folder(reference) for reference in ("reclaim@champion", "reclaim/3", "./a/3")] == [False, False, True]


def test_a_default_margin_that_the_model_lacks_is_refused(bundle_folder: Path) -> None:
    with pytest.raises(ConfigError, match="RECLAIM_MARGIN: expected one of baseline, medium, aggressive, got 'brave'"):
        load_model(ServingSettings(bundle=bundle_folder, margin="brave"))


@pytest.mark.slow
# MLflow 3.17 warns of its own type hints while it is imported, and of a signature given without an example
@pytest.mark.filterwarnings("ignore:.*An input example was not provided:UserWarning")
@pytest.mark.filterwarnings("ignore:.*Any type hint is inferred as AnyType:UserWarning")
def test_a_reference_is_resolved_in_the_registry(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    folder = tmp_path / "bundle"
    for fingerprint in ("first", "second"):
        save_bundle(replace(bundle, dataset_fingerprint=fingerprint), folder)
        with tracking.start_run("serving-test", "network") as run:
            registered = tracking.register_bundle(run, folder, "reclaim", inputs=["x"], outputs=["y"])
        tracking.move_alias(registered, tracking.CHAMPION)

    def served(reference: str) -> tuple[str, str, str]:
        location = find_model(reference)
        # as launch hands it to a worker
        settings = ServingSettings(model=reference, bundle=location.folder, model_version=location.version)
        model = load_model(settings)
        direct = load_model(ServingSettings(model=reference))
        assert (model.name, model.version, model.source) == (direct.name, direct.version, direct.source)
        return model.name, model.version, model.bundle.dataset_fingerprint

    assert served("reclaim@champion") == ("reclaim", "2", "second")
    assert served("reclaim/1") == ("reclaim", "1", "first")
    with pytest.raises(ModelError, match=r"no model reclaim@challenger .*reclaim train"):
        find_model("reclaim@challenger")
    with pytest.raises(ModelError, match="no model other/1"):
        find_model("other/1")
