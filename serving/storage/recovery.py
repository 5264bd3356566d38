"""Reads a store's folder: the newest whole snapshot and the log behind it; moves damaged files aside on request."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Final

from numpy.typing import NDArray

from reclaim.data.core.files import copy_durably, sync_folder
from reclaim.data.errors import StoreError
from reclaim.serving.storage import log_format, snapshot
from reclaim.serving.storage.log_format import Scan
from reclaim.serving.storage.segment import Segment
from reclaim.serving.storage.snapshot import DamagedError, Manifest

Arrays = dict[str, NDArray[Any]]

_REMEDY: Final = (
    "restore the folder from a copy, or start with --repair (RECLAIM_REPAIR=true), which keeps what comes before the "
    "damage and moves the rest aside"
)


@dataclass
class Found:
    """Content of the folder, read before anything in it is changed."""

    manifest: Manifest | None = None
    arrays: Arrays | None = None  # those of the snapshot; they may be large: the caller clears them after use
    facts: dict[str, Any] = field(default_factory=dict)  # saved with the arrays
    log: list[Scan] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # a sentence for each damaged file and what was done about it
    damaged: list[str] = field(default_factory=list)  # problems of snapshots
    gap: str | None = None  # problem of the log
    aside: list[Path] = field(default_factory=list)  # files that cannot be used

    @property
    def empty(self) -> bool:
        """True if nothing was stored yet."""
        return self.manifest is None and not any(scan.next > scan.first for scan in self.log)

    @property
    def sequence(self) -> int:
        """Number of the last record in the snapshot."""
        return 0 if self.manifest is None else self.manifest.sequence


def recover(folder: Path, *, state_version: int, repair: bool) -> tuple[Found, Segment]:
    """Return the whole content of a locked folder, and the segment that takes the next record.

    Nothing is changed before everything is read. Parameters and errors are those of ``Store.open``.
    """
    snapshot.recover_replaced(folder)
    found = _read(folder, state_version)
    if found.gap and not repair:
        raise StoreError("; ".join([*found.damaged, found.gap, _REMEDY]))
    if found.aside or found.gap:
        _set_aside(folder, found)
    sync_folder(folder)  # a killed process may have left names that are not durable yet
    return found, _segment_to_write(folder, found, state_version)


def _read(folder: Path, state_version: int) -> Found:
    """Return the newest whole snapshot and the log behind it; changes nothing."""
    found = Found()
    for path in snapshot.snapshots(folder):
        try:
            manifest = snapshot.read_manifest(path)
            if snapshot.snapshot_name(manifest.sequence) != path.name:
                raise DamagedError(f"{path.name} says that it is {snapshot.snapshot_name(manifest.sequence)}")
            _check_version(path, manifest.state_version, state_version)
            found.manifest, found.arrays, found.facts = manifest, snapshot.load_arrays(path, manifest), manifest.facts
            break
        except DamagedError as error:
            found.aside.append(path)
            found.damaged.append(str(error))
    _read_log(folder, found)
    for scan in found.log:
        if scan.state_version:
            _check_version(scan.path, scan.state_version, state_version)
    return found


def _read_log(folder: Path, found: Found) -> None:
    """Find the segments behind the snapshot, up to the first gap."""
    paths = log_format.segments(folder)
    firsts = [log_format.first_of(path) for path in paths]
    expected = found.sequence + 1
    begin = max((k for k, first in enumerate(firsts) if first <= expected), default=0)
    if found.manifest is not None and found.manifest.followed and expected not in firsts:
        found.gap = f"{folder}: {log_format.segment_name(expected)} is missing"
        begin = sum(first < expected for first in firsts)
    elif paths:
        expected = min(firsts[begin], expected)
    for k in range(begin, len(paths)):
        if firsts[k] != expected and found.gap is None:
            found.gap = f"{paths[k]} begins with record {firsts[k]}, and record {expected} is in no segment"
        if found.gap is not None:
            found.aside += paths[k:]
            return
        scan = log_format.scan(paths[k])
        found.log.append(scan)
        expected = scan.next
        if scan.problem is None:
            continue
        if scan.torn and (k + 1 == len(paths) or firsts[k + 1] == expected):
            rest, why = scan.size - scan.end, "never finished" if scan.short else "unfinished or damaged"
            found.notes.append(f"{scan.path.name}: {scan.problem}; the last {rest} bytes, {why}, were cut off.")
        else:
            found.gap = f"{scan.path}, byte {scan.end}: {scan.problem}, and there is more behind it"


def _check_version(path: Path, theirs: int, ours: int) -> None:
    if theirs != ours:
        raise StoreError(
            f"{path} was written by state version {theirs}, this code has {ours}: start with another --state folder, "
            "or with the release that wrote it"
        )


def _set_aside(folder: Path, found: Found) -> None:
    """Move unusable files into a new folder; a segment that is cut keeps a whole copy there."""
    aside = next(path for k in count(1) if not (path := folder / f"damaged-{k}").exists())
    aside.mkdir(mode=0o700)
    for path in found.aside:
        os.replace(path, aside / path.name)
    if found.gap and found.log and found.log[-1].problem:
        last = found.log[-1]
        copy_durably(last.path, aside / last.path.name)  # before the cut
        found.notes.append(f"{last.path.name} was cut off at byte {last.end}; a copy of it is in {aside.name}.")
    sync_folder(aside)
    found.notes += [f"{problem}: the snapshot was moved to {aside.name}." for problem in found.damaged]
    if found.gap:
        moved = ", ".join(path.name for path in found.aside if path.suffix)
        behind = f"files behind it were moved to {aside.name}: {moved}" if moved else "no file came behind it"
        found.notes.append(f"{found.gap}: the log ends before it; {behind}.")


def _segment_to_write(folder: Path, found: Found, state_version: int) -> Segment:
    """Return the segment that takes the next record; the log that was read is whole and durable then."""
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
        if segment.next == following:
            return segment
        segment.close()
    return Segment.create(folder, following, state_version)
