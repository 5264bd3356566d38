"""Writes the current segment of the log: append, sync, and recovery from a disk that refuses."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from isal.isal_zlib import crc32
from numpy.typing import NDArray

from reclaim.data.core.files import FULL_DISK, partial_of, sync_folder
from reclaim.data.errors import StoreError
from reclaim.serving.storage import log_format
from reclaim.serving.storage.log_format import CRC, HEADER, HEADER_BYTES, RECORD, Scan

Payload = bytes | bytearray | memoryview | NDArray[Any]
"""Contiguous bytes of any type."""
_PROBE_BYTES: Final = 2**20
"""Free space from which on a full disk counts as recovered: enough for a write of some ten thousand windows."""


@dataclass(frozen=True)
class Fault:
    """Reason why a segment takes no record, and whether the disk is full."""

    reason: str
    full: bool


class Segment:
    """The current segment. One thread appends; another one may sync at the same time.

    Attributes
    ----------
    first, next : int
        Number of its first record, and of the next one.
    size : int
        Bytes of the header and of all whole records.
    refused : Fault or None
        Why the last record could not be written. Nothing of it is left, and the next append tries again.
    lost : Fault or None
        Why appended records may not be on the disk. This is permanent: the system does not write again what a failed
        sync left unwritten, so a later success would prove nothing.
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
        """Return a new, empty segment, durable unless it has a fault; OSError leaves none behind."""
        path = folder / log_format.segment_name(first)
        salt = os.urandom(8)
        head = HEADER.pack(log_format.MAGIC, log_format.FORMAT, state_version, salt, first)
        partial = partial_of(path)
        fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        try:
            log_format.write_all(fd, [head, CRC.pack(crc32(head))])
            os.fsync(fd)
            os.replace(partial, path)
        except OSError:
            os.close(fd)
            with contextlib.suppress(OSError):
                partial.unlink()
            raise
        segment = cls(path, fd, first=first, after=first, salt=salt, size=HEADER_BYTES)
        try:
            sync_folder(folder)
        except OSError as error:
            segment.lost = segment._fault(error, "sync")
        return segment

    @classmethod
    def reopen(cls, scan: Scan) -> Segment:
        """Return a scanned segment, cut behind its last whole record and durable."""
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
        """Reason for which no record can be appended, or None."""
        return self.lost or self.refused

    def append(self, kind: str, payload: Payload) -> int:
        """Write a record and return its number; a partly written one is cut off again.

        Raises
        ------
        StoreError
            The disk is full or refuses, or an earlier sync failed.
        """
        if self.lost is not None:
            raise StoreError(self.lost.reason)
        name = kind.encode()
        body = np.frombuffer(payload, np.uint8).data
        head = RECORD.pack(self._salt, self.next, len(body), len(name)) + name
        try:
            self._cut()
            self._clean = False
            log_format.write_all(self._fd, [head, body, CRC.pack(crc32(body, crc32(head)))])
        except OSError as error:
            self.refused = self._fault(error, "append to")
            with contextlib.suppress(OSError):  # retried before the next record, and when the log is read
                self._cut()
            raise StoreError(self.refused.reason) from error
        self._clean, self.refused = True, None
        self.size += len(head) + len(body) + CRC.size
        self.next += 1
        return self.next - 1

    def sync(self) -> None:
        """Make all appended records durable.

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
        """Return whether records can be appended again: the failed one is cut off and the disk has room."""
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
        full = error.errno in FULL_DISK
        remedy = "make room there" if full else "look at the disk"
        return Fault(f"{self.path}: cannot {what} the log: {log_format.reason(error)}; {remedy}", full)
