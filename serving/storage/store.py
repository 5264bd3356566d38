"""The store: persists state as a snapshot and a log since, in a folder that one process locks."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from reclaim.data.core.files import make_folder, take_lock
from reclaim.data.errors import StoreError
from reclaim.serving.storage import log_format, snapshot
from reclaim.serving.storage.log_format import Record
from reclaim.serving.storage.recovery import Found, recover
from reclaim.serving.storage.segment import Payload, Segment
from reclaim.serving.storage.snapshot import Manifest

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Mark:
    """Moment at which the arrays of a snapshot were copied: the last record in them and the state of the log."""

    sequence: int
    rolled: bool
    appended: int


class Store:
    """A snapshot and the log since; made by ``open``.

    One thread calls ``append``, ``mend`` and ``roll``; ``sync`` and ``save`` may run in one more thread each. Two
    snapshots are kept, and the log since the older one. A caller recovers from ``recovered`` and ``records``, writes by
    ``append`` and ``sync``, and bounds the log by ``roll`` and ``save``.

    Attributes
    ----------
    recovered : Found
        The snapshot and notes found on opening; ``records`` gives the log since.
    snapshot_bytes : int
        Size of the arrays of the newest snapshot.
    """

    def __init__(
        self, folder: Path, locks: ExitStack, state_version: int, sync: bool, found: Found, segment: Segment
    ) -> None:  # fmt: skip
        self.folder = folder
        self.recovered = found
        self.snapshot_bytes = 0 if found.manifest is None else found.manifest.bytes
        self._locks, self._state_version, self._durable = locks, state_version, sync
        self._since, self._log, self._segment = found.sequence, found.log, segment
        self._newest = found.sequence
        self._appended, self._saved = sum(scan.end for scan in found.log), 0
        self._changing = threading.Lock()  # append, mend, and the change of segments
        self._syncing = threading.Lock()  # one sync at a time: the system reports a failure only once
        self._saving = threading.Lock()

    @classmethod
    def open(
        cls, folder: Path, *, state_version: int, sync: bool = True, repair: bool = False, lock_too: Path | None = None
    ) -> Store:  # fmt: skip
        """Return the store in a folder, which is made where it is missing.

        Parameters
        ----------
        folder : Path
            Locked by this process until ``close``.
        state_version : int
            Version, from 1, of the meaning of the arrays and of the payloads of records.
        sync : bool
            Whether ``sync`` does anything; without it a crash of the machine may lose acknowledged records.
        repair : bool
            Whether the content before a damage is kept, and the rest moved into ``damaged-…``, rather than refused.
        lock_too : Path or None
            Another folder that is locked as long, and made where it is missing; nothing else in it is touched.

        Raises
        ------
        StoreError
            Another process holds the folder; it is damaged (names file, byte and remedy); another format or state
            version wrote it; or the disk refuses.
        """
        with ExitStack() as opening:
            try:
                for one in (folder,) if lock_too is None else (lock_too, folder):
                    make_folder(one)
                    opening.callback(os.close, take_lock(one))
                found, segment = recover(folder, state_version=state_version, repair=repair)
            except OSError as error:
                raise StoreError(f"{error.filename or folder}: cannot be opened: {log_format.reason(error)}") from error
            return cls(folder, opening.pop_all(), state_version, sync, found, segment)

    def records(self) -> Iterator[Record]:
        """Yield the records behind the snapshot found on opening, in order."""
        for scan in self._log:
            yield from (record for record in log_format.read_records(scan) if record.sequence > self._since)

    def append(self, kind: str, payload: Payload) -> int:
        """Write a record and return its number; durable after ``sync``.

        Raises
        ------
        StoreError
            No part of it is written: the disk is full, or ``broken`` says why.
        """
        with self._changing:
            before = self._segment.size
            sequence = self._segment.append(kind, payload)
            self._appended += self._segment.size - before
        return sequence

    def sync(self) -> None:
        """Make all records appended before this call durable.

        Raises
        ------
        StoreError
            Some of them may be lost; nothing is appended until a snapshot is saved.
        """
        if self._durable:
            with self._syncing:
                self._segment.sync()

    @property
    def log_bytes(self) -> int:
        """Size of the log since the last snapshot."""
        return self._appended - self._saved

    @property
    def broken(self) -> str | None:
        """Reason for which nothing can be appended, or None."""
        fault = self._segment.fault
        return None if fault is None else fault.reason

    @property
    def full(self) -> bool:
        """True if nothing can be appended because the disk is full."""
        fault = self._segment.fault
        return fault is not None and fault.full

    def mend(self) -> bool:
        """Return whether records can be appended, after checking for free room.

        After a failed sync only a snapshot helps: ``roll`` and ``save``.
        """
        with self._changing:
            return self._segment.mend()

    def roll(self) -> Mark:
        """Continue the log in a new segment; no record may come between this call and the copy of the arrays.

        Where no new segment can be made, the log stays in the old one, and a snapshot can still be saved.
        """
        with self._changing, self._syncing:
            old = self._segment
            rolled = old.fault is None and old.next == old.first
            if old.fault is None and not rolled:
                try:
                    if self._durable:
                        old.sync()
                    self._begin_segment(old.next)
                    rolled = True
                except (OSError, StoreError) as error:
                    log.warning("%s: the log stays in its segment: %s", self.folder, error)
            return Mark(old.next - 1, rolled, self._appended)

    def save(self, mark: Mark, arrays: Mapping[str, NDArray[Any]], facts: Mapping[str, Any]) -> None:
        """Save a snapshot and drop those before the previous one; a broken log continues in a new segment.

        Parameters
        ----------
        mark : Mark
            Result of ``roll`` when the arrays were copied.
        arrays : mapping of str to array
            Must not change meanwhile.
        facts : mapping
            JSON values.

        Raises
        ------
        StoreError
            It cannot be written; the snapshots before it remain.
        """
        with self._saving:
            manifest = Manifest(self._state_version, mark.sequence, mark.rolled, {}, dict(facts))
            self.snapshot_bytes = snapshot.write_snapshot(self.folder, manifest, arrays).bytes
            self._saved = mark.appended
            with self._changing, self._syncing:
                if self._segment.fault is not None and self._segment.next == mark.sequence + 1:
                    try:
                        self._begin_segment(mark.sequence + 1)
                    except OSError as error:
                        raise StoreError(
                            f"{self.folder}: no new segment of the log: {log_format.reason(error)}"
                        ) from error
            if mark.sequence > self._newest:
                self._drop_before(self._newest)
                self._newest = mark.sequence

    def close(self) -> None:
        """Make all records durable and release the folder."""
        try:
            self.sync()
        finally:
            with self._saving, self._changing, self._syncing:
                self._segment.close()
                self._locks.close()

    def _begin_segment(self, first: int) -> None:
        old, self._segment = self._segment, Segment.create(self.folder, first, self._state_version)
        old.close()

    def _drop_before(self, sequence: int) -> None:
        """Drop older snapshots, and the segments that end with this record or earlier; the oldest first."""
        try:
            for old in reversed(snapshot.snapshots(self.folder)):
                if old.name < snapshot.snapshot_name(sequence):
                    snapshot.drop_snapshot(old)
            for path, following in pairwise(log_format.segments(self.folder)):
                if log_format.first_of(following) <= sequence + 1:
                    path.unlink()
        except OSError as error:
            log.warning("%s: files that are no longer needed stay: %s", self.folder, error)
