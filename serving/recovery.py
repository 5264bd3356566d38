"""Reading a store's folder: the newest whole snapshot, the log behind it, and what is done about all else."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Final

from numpy.typing import NDArray

from reclaim.data.errors import StoreError
from reclaim.serving import journal, snapshot
from reclaim.serving.journal import Scan
from reclaim.serving.segment import Segment
from reclaim.serving.snapshot import DamagedError, Manifest

Arrays = dict[str, NDArray[Any]]
Migration = Callable[[Arrays, dict[str, Any]], tuple[Arrays, dict[str, Any]]]
"""Brings the arrays and facts of one state version to the next."""

_REMEDY: Final = (
    "restore the folder from a copy, or open it for repair: that keeps what stands before, and the rest aside"
)


@dataclass
class Found:
    """What reading the folder found, before anything in it was changed."""

    manifest: Manifest | None = None
    arrays: Arrays | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    log: list[Scan] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)  # snapshots, and what is wrong with them
    gap: str | None = None  # what is wrong with the log
    aside: list[Path] = field(default_factory=list)  # what cannot be used

    @property
    def sequence(self) -> int:
        """Number of the last record in the snapshot."""
        return 0 if self.manifest is None else self.manifest.sequence


def recover(
    folder: Path, *, state_version: int, migrations: Mapping[int, Migration], repair: bool
) -> tuple[Found, Segment]:
    """Return what stands whole in a folder that this process holds, and the segment that goes on.

    Nothing is changed before all was read; parameters and errors are those of ``Store.open``.
    """
    snapshot.recover_replaced(folder)
    found = _read(folder, state_version, migrations)
    if found.gap and not repair:
        raise StoreError("; ".join([*found.damaged, found.gap, _REMEDY]))
    _migrate(found, state_version, migrations)
    if found.aside or found.gap:
        _set_aside(folder, found)
    return found, _segment_to_write(folder, found, state_version)


def _read(folder: Path, state_version: int, migrations: Mapping[int, Migration]) -> Found:
    """Return the newest whole snapshot and the log behind it, having changed nothing."""
    found = Found()
    for path in snapshot.snapshots(folder):
        try:
            manifest = snapshot.read_manifest(path)
            if snapshot.snapshot_name(manifest.sequence) != path.name:
                raise DamagedError(f"{path.name} says that it is {snapshot.snapshot_name(manifest.sequence)}")
            _refuse_strange(path, manifest.state_version, state_version, migrations)
            found.manifest, found.arrays, found.facts = manifest, snapshot.load_arrays(path, manifest), manifest.facts
            break
        except DamagedError as error:
            found.aside.append(path)
            found.damaged.append(str(error))
    _read_log(folder, found)
    for scan in found.log:
        if scan.state_version:
            _refuse_strange(scan.path, scan.state_version, state_version, migrations)
    return found


def _read_log(folder: Path, found: Found) -> None:
    """Find the segments behind the snapshot, up to the first gap."""
    paths = journal.segments(folder)
    firsts = [journal.first_of(path) for path in paths]
    expected = found.sequence + 1
    begin = max((k for k, first in enumerate(firsts) if first <= expected), default=0)
    if found.manifest is not None and found.manifest.followed and expected not in firsts:
        found.gap = f"{folder}: {journal.segment_name(expected)} is missing"
        begin = sum(first < expected for first in firsts)
    elif paths:
        expected = min(firsts[begin], expected)
    for k in range(begin, len(paths)):
        if firsts[k] != expected and found.gap is None:
            found.gap = f"{paths[k]} begins with record {firsts[k]}, and record {expected} is in no segment"
        if found.gap is not None:
            found.aside += paths[k:]
            return
        scan = journal.scan(paths[k])
        found.log.append(scan)
        expected = scan.next
        if scan.problem is None:
            continue
        if scan.torn and (k + 1 == len(paths) or firsts[k + 1] == expected):
            rest, why = scan.size - scan.end, "never finished" if scan.short else "unfinished or damaged"
            found.notes.append(f"{scan.path.name}: {scan.problem}; the last {rest} bytes, {why}, were cut off.")
        else:
            found.gap = f"{scan.path}, byte {scan.end}: {scan.problem}, and there is more behind it"


def _refuse_strange(path: Path, theirs: int, ours: int, migrations: Mapping[int, Migration]) -> None:
    if theirs > ours or not all(version in migrations for version in range(theirs, ours)):
        raise StoreError(f"{path} was written by state version {theirs}; this code has {ours}, and no way from there")


def _migrate(found: Found, state_version: int, migrations: Mapping[int, Migration]) -> None:
    if found.manifest is None or found.arrays is None:
        return
    for version in range(found.manifest.state_version, state_version):
        found.arrays, found.facts = migrations[version](found.arrays, found.facts)
        found.notes.append(f"The snapshot was brought from state version {version} to {version + 1}.")


def _set_aside(folder: Path, found: Found) -> None:
    """Move what cannot be used into a folder of its own; what is cut off a segment stays in a copy of it there."""
    aside = next(path for k in count(1) if not (path := folder / f"damaged-{k}").exists())
    aside.mkdir(mode=0o700)
    for path in found.aside:
        os.replace(path, aside / path.name)
    if found.gap and found.log and found.log[-1].problem:
        last = found.log[-1]
        shutil.copyfile(last.path, aside / last.path.name)
        found.notes.append(f"{last.path.name} was cut off at byte {last.end}; a copy of it is in {aside.name}.")
    journal.sync_folder(aside)
    journal.sync_folder(folder)
    found.notes += [f"{problem}: the snapshot was moved to {aside.name}." for problem in found.damaged]
    if found.gap:
        moved = ", ".join(path.name for path in found.aside if path.suffix) or "nothing"
        found.notes.append(
            f"{found.gap}: the log ends before it, and what came behind was moved to {aside.name}: {moved}."
        )


def _segment_to_write(folder: Path, found: Found, state_version: int) -> Segment:
    """Return the segment that goes on; what is read of the log is whole and durable then."""
    following = max([found.sequence + 1, *(scan.next for scan in found.log)])
    segment = None
    for scan in list(found.log):
        if segment is not None:
            segment.close()
            segment = None
        if scan.end:
            segment = Segment.reopen(scan)
        else:  # not even its header is whole
            scan.path.unlink()
            found.log.remove(scan)
    if segment is not None:
        if segment.next == following and found.log[-1].state_version == state_version:
            return segment
        segment.close()
    return Segment.create(folder, following, state_version)
