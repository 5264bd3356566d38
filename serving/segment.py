"""The segment of the log that is written: append, sync, and what happens when the disk refuses."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from isal.isal_zlib import crc32
from numpy.typing import NDArray

from reclaim.data.errors import StoreError
from reclaim.serving import journal
from reclaim.serving.journal import CRC, HEADER, HEADER_BYTES, RECORD, Scan

Payload = bytes | bytearray | memoryview | NDArray[Any]
"""Bytes in one piece, of any type."""
_PROBE_BYTES: Final = 2**20
"""Room that must be there before a full disk counts as mended: that of a write of some ten thousand windows."""


@dataclass(frozen=True)
class Fault:
    """Why a segment takes no record: in words, and whether for want of room."""

    reason: str
    full: bool


class Segment:
    """The segment that is written. One thread appends; another may sync meanwhile.

    Attributes
    ----------
    first, next : int
        Number of its first record, and of the next one.
    size : int
        Bytes that hold, header included.
    refused : Fault or None
        Why the last record could not be written; nothing of it is left, and the next one is tried again.
    lost : Fault or None
        Why what was appended may not be on the disk: for good, since what a failed sync left unwritten the system
        never tries again, so that a later success would say nothing.
    """

    def __init__(self, path: Path, fd: int, *, first: int, after: int, salt: bytes, size: int) -> None:
        self.path, self.first, self.next, self.size = path, first, after, size
        self.refused: Fault | None = None
        self.lost: Fault | None = None
        self._fd, self._salt = fd, salt
        self._synced = size
        self._clean = True

    @classmethod
    def create(cls, folder: Path, first: int, state_version: int) -> Segment:
        """Return a new, empty segment, durable but for a fault; OSError leaves none behind."""
        path = folder / journal.segment_name(first)
        salt = os.urandom(8)
        head = HEADER.pack(journal.MAGIC, journal.FORMAT, state_version, salt, first)
        partial = path.with_name(path.name + ".partial")
        fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        try:
            journal.write_all(fd, [head, CRC.pack(crc32(head))])
            os.fsync(fd)
            os.replace(partial, path)
        except OSError:
            os.close(fd)
            with contextlib.suppress(OSError):
                partial.unlink()
            raise
        segment = cls(path, fd, first=first, after=first, salt=salt, size=HEADER_BYTES)
        try:
            journal.sync_folder(folder)
        except OSError as error:
            segment.lost = segment._fault(error, "sync")
        return segment

    @classmethod
    def reopen(cls, scan: Scan) -> Segment:
        """Return the segment that was read, cut where its whole records end; all of it is durable then."""
        fd = os.open(scan.path, os.O_WRONLY | os.O_APPEND)
        try:
            os.ftruncate(fd, scan.end)
            os.fsync(fd)
        except OSError:
            os.close(fd)
            raise
        return cls(scan.path, fd, first=scan.first, after=scan.next, salt=scan.salt, size=scan.end)

    @property
    def fault(self) -> Fault | None:
        """Why no record can be appended, or None."""
        return self.lost or self.refused

    def append(self, kind: str, payload: Payload) -> int:
        """Write a record and return its number; what could not be written whole is cut off again.

        Raises
        ------
        StoreError
            There is no room, or the disk refuses; or an earlier sync failed.
        """
        if self.lost is not None:
            raise StoreError(self.lost.reason)
        name = kind.encode()
        body = np.frombuffer(payload, np.uint8).data
        head = RECORD.pack(self._salt, self.next, len(body), len(name)) + name
        try:
            self._cut()
            self._clean = False
            journal.write_all(self._fd, [head, body, CRC.pack(crc32(body, crc32(head)))])
        except OSError as error:
            self.refused = self._fault(error, "append to")
            with contextlib.suppress(OSError):  # tried again before the next record, and when the log is read
                self._cut()
            raise StoreError(self.refused.reason) from error
        self._clean, self.refused = True, None
        self.size += len(head) + len(body) + CRC.size
        self.next += 1
        return self.next - 1

    def sync(self) -> None:
        """Make all that was appended durable.

        Raises
        ------
        StoreError
            It could not be, now or before.
        """
        if self.lost is not None:
            raise StoreError(self.lost.reason)
        size = self.size
        if size == self._synced:
            return
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            self.lost = self._fault(error, "sync")
            raise StoreError(self.lost.reason) from error
        self._synced = size

    def mend(self) -> bool:
        """Return whether records can be appended again: the failed one is cut off and there is room for more."""
        if self.fault is None or self.lost is not None:
            return self.fault is None
        probe = self.path.with_name("room.partial")
        try:
            self._cut()
            fd = os.open(probe, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                os.posix_fallocate(fd, 0, _PROBE_BYTES)
            finally:
                os.close(fd)
                probe.unlink()
        except OSError:
            return False
        self.refused = None
        return True

    def close(self) -> None:
        """Close the file; nothing is synced."""
        os.close(self._fd)

    def _cut(self) -> None:
        if not self._clean:
            os.ftruncate(self._fd, self.size)
            self._clean = True

    def _fault(self, error: OSError, what: str) -> Fault:
        full = error.errno in journal.NO_ROOM
        remedy = "make room there" if full else "look at the disk"
        return Fault(f"{self.path}: cannot {what} the log: {journal.reason(error)}; {remedy}", full)
