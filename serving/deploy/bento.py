"""Entry point of a bento, where the rooms lie next to the package, as BentoML copies no links to folders."""

from pathlib import Path

import reclaim

_HERE = Path(__file__).resolve().parents[2]
if not (Path(reclaim.__file__).parent / "serving").exists():
    reclaim.__path__.append(str(_HERE))

from reclaim.serving.service import ReservationService  # noqa: E402 - needs the path above

__all__ = ["ReservationService"]
