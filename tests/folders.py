"""The files of a folder, for tests that compare what was written with what was to be; a disk without room; a kill."""

import resource
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from reclaim.data.core import files


@contextmanager
def killed_with_the_folder_in_place() -> Iterator[None]:
    """Kill the writing of a folder once it has its name; what lies next to it is left."""

    def killed(fresh: Path, path: Path) -> None:
        fresh.rename(path)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "replace_folder", killed)
        patch.setattr(shutil, "rmtree", lambda *_paths, **_options: None)  # a killed process tidies nothing up
        yield


@contextmanager
def full_disk(after: int) -> Iterator[None]:
    """Let no file grow beyond so many bytes."""
    handler, limits = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (after, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


def contents(folder: Path) -> dict[str, bytes]:
    """Return the content of each file below a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
