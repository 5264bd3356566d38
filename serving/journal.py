"""The log as it stands on the disk: numbered records in segments, where an unfinished write is told from damage."""

from __future__ import annotations

import errno
import os
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

from isal.isal_zlib import crc32

from reclaim.data.errors import StoreError

FORMAT: Final = 1
"""Version of the layout of a segment and of a snapshot; ``state_version`` is that of what they hold."""
MAGIC: Final = b"reclaim\n"
HEADER: Final = struct.Struct("<8sII8sQ")
"""Magic, format, state version, salt, number of the first record; its CRC32 follows."""
RECORD: Final = struct.Struct("<8sQQI")
"""Salt, number, bytes of the payload, bytes of the kind; kind, payload and the CRC32 of all of it follow.

The salt is drawn per segment: nobody can write a payload that looks like a record, and no record fits another segment.
"""
CRC: Final = struct.Struct("<I")
_SHORT: Final = "is cut short"
HEADER_BYTES: Final = HEADER.size + CRC.size
NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Record(NamedTuple):
    """One record: its number from 1, what kind it is, its bytes, and the state version that wrote it."""

    sequence: int
    kind: str
    payload: memoryview
    state_version: int


@dataclass(frozen=True)
class Scan:
    """What stands in a segment.

    Attributes
    ----------
    path : Path
        The file.
    first, next : int
        Number of its first record, and of the one that would follow its last whole one.
    state_version : int
        Version of the state its records change; 0 where the header cannot be read.
    salt : bytes
        What begins each of its records.
    end, size : int
        Where its last whole record ends, and the file; bytes.
    problem : str or None
        Why the file does not end with a whole record.
    torn : bool
        Whether that looks like a write that was never finished: nothing whole stands behind it.
    """

    path: Path
    first: int
    next: int
    state_version: int
    salt: bytes
    end: int
    size: int
    problem: str | None = None
    torn: bool = False

    @property
    def short(self) -> bool:
        """Whether the file ends before the record does: it was never finished; a whole one may be damaged as well."""
        return self.problem is not None and self.problem.endswith(_SHORT)


def scan(path: Path) -> Scan:
    """Return what stands in a segment; every checksum in it was computed.

    Raises
    ------
    StoreError
        Another format than this code's.
    """
    first, size = first_of(path), path.stat().st_size
    with path.open("rb") as file:
        head = file.read(HEADER_BYTES)
        if len(head) < HEADER_BYTES or crc32(head[: HEADER.size]) != CRC.unpack_from(head, HEADER.size)[0]:
            return Scan(path, first, first, 0, b"", 0, size, "its header is damaged", torn=size <= HEADER_BYTES)
        magic, layout, state_version, salt, number = HEADER.unpack_from(head)
        if magic != MAGIC or number != first:
            return Scan(path, first, first, 0, b"", 0, size, f"its header is that of {segment_name(number)}")
        if layout != FORMAT:
            raise StoreError(f"{path} has format {layout}, this code knows {FORMAT}: use the code that wrote it")
        end, sequence = HEADER_BYTES, first
        while end < size:
            found = _read_record(file, size - end, salt, sequence, state_version)
            if isinstance(found, str):
                torn = not _any_whole(file, end, size, salt)
                return Scan(path, first, sequence, state_version, salt, end, size, found, torn)
            end, sequence = file.tell(), sequence + 1
    return Scan(path, first, sequence, state_version, salt, end, size)


def read_records(found: Scan) -> Iterator[Record]:
    """Yield the whole records of a segment that was scanned, in order.

    Raises
    ------
    StoreError
        The file changed since.
    """
    with found.path.open("rb") as file:
        file.seek(HEADER_BYTES)
        for sequence in range(found.first, found.next):
            left = found.end - file.tell()
            record = _read_record(file, left, found.salt, sequence, found.state_version)
            if isinstance(record, str):
                raise StoreError(f"{found.path}: {record} at byte {found.end - left}, and it was whole a moment ago")
            yield record


def _read_record(file: BinaryIO, left: int, salt: bytes, sequence: int, state_version: int) -> Record | str:
    """Return the record that begins here, or what is wrong with it; ``left`` bytes of the file remain."""
    head = file.read(RECORD.size)
    if len(head) < RECORD.size:
        return f"record {sequence} {_SHORT}"
    mark, number, payload_bytes, kind_bytes = RECORD.unpack(head)
    if mark != salt:
        return f"no record begins where {sequence} belongs"
    if RECORD.size + kind_bytes + payload_bytes + CRC.size > left:
        return f"record {sequence} {_SHORT}"
    body = memoryview(file.read(kind_bytes + payload_bytes))
    if crc32(body, crc32(head)) != CRC.unpack(file.read(CRC.size))[0]:
        return f"the checksum of record {sequence} is wrong"
    if number != sequence:
        return f"record {number} stands where {sequence} belongs"
    return Record(number, str(body[:kind_bytes], "utf-8"), body[kind_bytes:], state_version)


def _any_whole(file: BinaryIO, offset: int, size: int, salt: bytes) -> bool:
    """Return whether a record with a right checksum begins at the offset or anywhere behind it."""
    file.seek(offset)
    rest = file.read()
    at = rest.find(salt)
    while at >= 0:
        if len(rest) - at >= RECORD.size:
            file.seek(offset + at)
            number = RECORD.unpack_from(rest, at)[1]
            if isinstance(_read_record(file, size - offset - at, salt, number, 0), Record):
                return True
        at = rest.find(salt, at + 1)
    return False


def segment_name(first: int) -> str:
    """Return the file name of the segment that begins with a record."""
    return f"log-{first:020d}.bin"


def first_of(path: Path) -> int:
    """Return the number of the first record of a segment, by its name."""
    return int(path.stem.removeprefix("log-"))


def segments(folder: Path) -> list[Path]:
    """Return the segments in a folder, in order."""
    return sorted(path for path in folder.glob("log-*.bin") if re.fullmatch(r"log-\d{20}\.bin", path.name))


def write_all(fd: int, parts: Sequence[bytes | memoryview]) -> None:
    """Write all parts behind each other, in as many calls as it takes; OSError when the disk takes no more."""
    left = [memoryview(part) for part in parts if len(memoryview(part))]
    while left:
        written = os.writev(fd, left)
        if not written:
            raise OSError(errno.EIO, "nothing was written")
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if left:
            left[0] = left[0][written:]


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def reason(error: OSError) -> str:
    """Return what the system says, with a full disk named plainly."""
    if error.errno == errno.EFBIG:
        return "the file may not grow further (limit on the size of files)"
    return "the disk is full" if error.errno in NO_ROOM else error.strerror or str(error)
