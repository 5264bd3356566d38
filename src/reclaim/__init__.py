"""reclaim: predict what every task in a cluster will need, so that the rest can be lent out."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reclaim.api.dataset import Dataset, ingest, open, synth
    from reclaim.api.model import Model, load, train
    from reclaim.api.replay import Recommendations, Replay
    from reclaim.data.traces.series import task_id

__version__ = "0.1.0"

__all__ = ["Dataset", "Model", "Recommendations", "Replay", "ingest", "load", "open", "synth", "task_id", "train"]

_API = {
    "Dataset": "api.dataset", "ingest": "api.dataset", "open": "api.dataset", "synth": "api.dataset",
    "Model": "api.model", "load": "api.model", "train": "api.model",
    "Replay": "api.replay", "Recommendations": "api.replay",
    "task_id": "data.traces.series",
}  # fmt: skip


if not TYPE_CHECKING:  # a type checker knows the names above, and no others

    def __getattr__(name: str) -> Any:
        """Import a name of the Python interface when it is first used (PEP 562): the package itself stays light."""
        if name not in _API:
            raise AttributeError(f"module 'reclaim' has no attribute {name!r}")
        return getattr(import_module(f"reclaim.{_API[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_API})
