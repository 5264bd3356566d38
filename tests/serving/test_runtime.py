"""Runtime: the state has the features of the model that it was begun with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from reclaim.data.errors import ModelError
from reclaim.serving.runtime import Runtime
from reclaim.serving.settings import ServingSettings
from reclaim.training.bundle import Bundle, save_bundle
from tests.serving.cell_fixtures import loaded


def test_a_model_of_related_tasks_is_refused_where_the_state_has_none_and_the_other_way_round_it_serves(
    make_app: Any, bundle: Bundle, related_bundle: Bundle, tmp_path: Path
) -> None:
    with make_app() as (_, runtime):
        for take in (runtime._promote, runtime._set_shadow):
            with pytest.raises(ModelError, match="which this state lacks"):
                take(loaded(related_bundle))
        runtime._promote(loaded(bundle, "2"))
        lean = runtime.tracker.bytes_per_task
    save_bundle(related_bundle, tmp_path / "model")
    runtime = Runtime(ServingSettings(model=str(tmp_path / "model"), bundle=tmp_path / "model"))
    try:
        assert runtime.tracker.bytes_per_task > lean + 300
        runtime._set_shadow(loaded(bundle))
        runtime._promote(loaded(bundle, "2"))
    finally:
        runtime.close()


def test_a_state_saved_with_other_features_is_refused_with_what_to_do(
    make_app: Any, related_bundle: Bundle, tmp_path: Path
) -> None:
    with make_app(state=tmp_path / "state") as (_, runtime):
        assert runtime.writer.state == "ok"
    save_bundle(related_bundle, tmp_path / "model")
    settings = ServingSettings(model=str(tmp_path / "model"), bundle=tmp_path / "model", state=tmp_path / "state")
    runtime = Runtime(settings)
    runtime.close()
    assert "for a model of other features; start afresh with another --state folder" in runtime.writer.state
