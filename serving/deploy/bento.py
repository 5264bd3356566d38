"""Entry point of a bento, where the rooms lie next to the package, as BentoML copies no links to folders."""

import json
import os
import sys
from pathlib import Path

import reclaim

_HERE = Path(__file__).resolve().parents[2]
if not (Path(reclaim.__file__).parent / "serving").exists():
    reclaim.__path__.append(str(_HERE))

from reclaim.data.errors import ReclaimError  # noqa: E402 - needs the path above
from reclaim.serving.models.cache import start_model  # noqa: E402 - likewise
from reclaim.serving.service import ReservationService  # noqa: E402 - likewise
from reclaim.serving.settings import read_settings  # noqa: E402 - likewise
from reclaim.training.bundle import ORIGIN_FILE  # noqa: E402 - likewise

__all__ = ["ReservationService"]

_CARRIED = _HERE / "model"
"""Bundle that the bento carries, if `reclaim bundle MODEL model` was run before `bentoml build`."""


def _name_the_model() -> None:
    """Name the model for the workers, the carried one unless the environment names another; end where there is none.

    The first process does so before it starts workers, which would be started again for ever.
    """
    if "RECLAIM_BUNDLE" in os.environ:
        return
    if "RECLAIM_MODEL" not in os.environ and (_CARRIED / ORIGIN_FILE).is_file():
        origin = json.loads((_CARRIED / ORIGIN_FILE).read_text(encoding="utf-8"))
        os.environ["RECLAIM_MODEL"] = f"{origin['name']}/{origin['version']}"
        os.environ["RECLAIM_BUNDLE"], os.environ["RECLAIM_MODEL_VERSION"] = str(_CARRIED), origin["version"]
    try:
        location = start_model(read_settings()).location
    except ReclaimError as error:
        remedy = "set MLFLOW_TRACKING_URI, or run `reclaim bundle MODEL model` before `bentoml build`"
        sys.exit(f"error: this bento has no model ({' '.join(str(error).split())}); {remedy}")
    os.environ["RECLAIM_BUNDLE"], os.environ["RECLAIM_MODEL_VERSION"] = str(location.folder), location.version


if (_HERE.parent / "bento.yaml").is_file():  # not in a checkout, which `bentoml build` imports
    _name_the_model()
