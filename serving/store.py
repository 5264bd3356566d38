"""The store: what must outlive the process, as a snapshot and the log since, in one folder that one process writes."""

from __future__ import annotations

import fcntl
import logging
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from numpy.typing import NDArray

from reclaim.data.errors import StoreError
from reclaim.serving import journal, snapshot
from reclaim.serving.journal import Record
from reclaim.serving.recovery import Arrays, Found, Migration, recover
from reclaim.serving.segment import Payload, Segment
from reclaim.serving.snapshot import Manifest

_LOG: Final = logging.getLogger(__name__)
_LOCK: Final = "lock"
_NONE: Final[Mapping[int, Migration]] = MappingProxyType({})


@dataclass
class Recovered:
    """What was found on opening.

    Attributes
    ----------
    arrays : dict of str to array, or None
        Those of the snapshot; None where there is none. Set it to None once they are taken: they may be large.
    facts : dict
        What was saved with them.
    notes : list of str
        What was damaged, unfinished or old, and what was done about it: a sentence each.
    """

    arrays: Arrays | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Mark:
    """The moment at which the arrays of a snapshot were copied: the last record in them, and how the log stood."""

    sequence: int
    rolled: bool
    appended: int


class Store:
    """A snapshot and the log since; made by ``open``.

    One thread appends, mends and rolls; ``sync`` and ``save`` may run in another one each. Two snapshots are kept, and
    the log since the older one.

    Attributes
    ----------
    recovered : Recovered
        What was found on opening; ``records`` gives what came after it.
    snapshot_bytes : int
        Size of the arrays of the newest snapshot.
    """

    def __init__(self, folder: Path, lock: int, state_version: int, sync: bool, found: Found, segment: Segment) -> None:
        self.folder = folder
        self.recovered = Recovered(found.arrays, found.facts, found.notes)
        self.snapshot_bytes = 0 if found.manifest is None else found.manifest.bytes
        self._lock_fd, self._state_version, self._durable = lock, state_version, sync
        self._since, self._log, self._segment = found.sequence, found.log, segment
        self._newest = found.sequence
        self._appended, self._saved = sum(scan.end for scan in found.log), 0
        self._changing = threading.Lock()  # append, mend, and the change of segments
        self._syncing = threading.Lock()  # one sync at a time: a failure is told only once by the system
        self._saving = threading.Lock()

    @classmethod
    def open(
        cls,
        folder: Path,
        *,
        state_version: int,
        migrations: Mapping[int, Migration] = _NONE,
        sync: bool = True,
        repair: bool = False,
    ) -> Store:
        """Return the store in a folder, made where there is none, with all that stands whole in it.

        Parameters
        ----------
        folder : Path
            Held by this process alone until ``close``.
        state_version : int
            Version, from 1, of what the arrays and the payloads of records mean.
        migrations : mapping of int to function
            Of a version: what brings its arrays and facts to the next one. Records keep theirs, and say so.
        sync : bool
            Whether ``sync`` does anything; without it a crash of the machine may lose what was acknowledged.
        repair : bool
            Whether what stands before a damage is kept and all else moved into ``damaged-…``, rather than refused.

        Raises
        ------
        StoreError
            Another process holds it; it is damaged (names file, byte and remedy); another format or state version made
            it and there is no way from there; or the disk refuses.
        """
        try:
            if not folder.is_dir():
                folder.mkdir(parents=True)
                journal.sync_folder(folder.parent)
            lock = take_lock(folder)
        except OSError as error:
            raise StoreError(f"{folder}: cannot be opened: {journal.reason(error)}") from error
        try:
            found, segment = recover(folder, state_version=state_version, migrations=migrations, repair=repair)
        except OSError as error:
            os.close(lock)
            raise StoreError(f"{folder}: cannot be opened: {journal.reason(error)}") from error
        except BaseException:
            os.close(lock)
            raise
        return cls(folder, lock, state_version, sync, found, segment)

    def records(self) -> Iterator[Record]:
        """Yield the records behind the snapshot that stood there on opening, in order."""
        for scan in self._log:
            yield from (record for record in journal.read_records(scan) if record.sequence > self._since)

    def append(self, kind: str, payload: Payload) -> int:
        """Write a record and return its number; durable after ``sync``.

        Raises
        ------
        StoreError
            It is not written, nor any part of it: the disk is full, or ``broken`` says why.
        """
        with self._changing:
            before = self._segment.size
            sequence = self._segment.append(kind, payload)
            self._appended += self._segment.size - before
        return sequence

    def sync(self) -> None:
        """Make all that was appended before this call durable.

        Raises
        ------
        StoreError
            Some of it may be lost; nothing is appended until a snapshot has been saved.
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
        """Why nothing can be appended, or None."""
        fault = self._segment.fault
        return None if fault is None else fault.reason

    @property
    def full(self) -> bool:
        """Whether it is broken for want of room."""
        fault = self._segment.fault
        return fault is not None and fault.full

    def mend(self) -> bool:
        """Return whether records can be appended, after looking whether there is room again.

        After a failed sync only a snapshot mends: ``roll`` and ``save``.
        """
        with self._changing:
            return self._segment.mend()

    def roll(self) -> Mark:
        """Let the log go on in a new segment; called while no record comes between it and the copy of the arrays.

        A log that cannot go on in a new segment stays in its old one, and a snapshot can be saved all the same.
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
                    _LOG.warning("%s: the log stays in its segment: %s", self.folder, error)
            return Mark(old.next - 1, rolled, self._appended)

    def save(self, mark: Mark, arrays: Mapping[str, NDArray[Any]], facts: Mapping[str, Any]) -> None:
        """Save a snapshot, and drop what is older than the one before it; a broken log goes on in a new segment.

        Parameters
        ----------
        mark : Mark
            What ``roll`` returned when the arrays were copied.
        arrays : mapping of str to array
            Nobody may change them meanwhile.
        facts : mapping
            What JSON can say.

        Raises
        ------
        StoreError
            It cannot be written; the snapshots before it stand.
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
                            f"{self.folder}: no new segment of the log: {journal.reason(error)}"
                        ) from error
            if mark.sequence > self._newest:
                self._drop_before(self._newest)
                self._newest = mark.sequence

    def close(self) -> None:
        """Make what was appended durable, and let the folder go."""
        try:
            self.sync()
        finally:
            with self._saving, self._changing, self._syncing:
                self._segment.close()
                os.close(self._lock_fd)

    def _begin_segment(self, first: int) -> None:
        old, self._segment = self._segment, Segment.create(self.folder, first, self._state_version)
        old.close()

    def _drop_before(self, sequence: int) -> None:
        """Drop the snapshots before one, and the segments that end with it or earlier; the oldest go first."""
        try:
            for old in reversed(snapshot.snapshots(self.folder)):
                if old.name < snapshot.snapshot_name(sequence):
                    snapshot.drop_snapshot(old)
            for path, following in pairwise(journal.segments(self.folder)):
                if journal.first_of(following) <= sequence + 1:
                    path.unlink()
        except OSError as error:
            _LOG.warning("%s: what is no longer needed stays: %s", self.folder, error)


def take_lock(folder: Path) -> int:
    """Return the descriptor that holds a folder for this process until closed; StoreError where another has it."""
    fd = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    except BlockingIOError as error:
        holder = os.pread(fd, 20, 0).decode().strip() or "unknown"
        os.close(fd)
        raise StoreError(
            f"{folder} is held by another process (pid {holder}): stop it, or use another folder"
        ) from error
    except OSError:
        os.close(fd)
        raise
    return fd
