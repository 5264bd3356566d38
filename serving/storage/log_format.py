"""Format of the log on disk: numbered records in segments; distinguishes an unfinished write from damage."""

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

from reclaim.data.core.files import FULL_DISK
from reclaim.data.errors import StoreError

FORMAT: Final = 1
"""Version of the layout of a segment and of a snapshot; ``state_version`` is that of their content."""
MAGIC: Final = b"reclaim\n"
HEADER: Final = struct.Struct("<8sII8sQ")
"""Magic, format, state version, salt, number of the first record; its CRC32 follows."""
RECORD: Final = struct.Struct("<8sQQI")
"""Salt, number, bytes of the payload, bytes of the kind; kind, payload and the CRC32 of all of it follow.

The salt is random for each segment: no payload can look like a record, and no record fits another segment.
"""
CRC: Final = struct.Struct("<I")
_SHORT: Final = "is cut short"
HEADER_BYTES: Final = HEADER.size + CRC.size


class Record(NamedTuple):
    """One record: its number from 1, its kind and its bytes."""

    sequence: int
    kind: str
    payload: memoryview


@dataclass(frozen=True)
class Scan:
    """Result of reading a segment and checking every checksum in it.

    Attributes
    ----------
    path : Path
        The file.
    first, next : int
        Number of its first record, and of the one that would follow its last whole one.
    state_version : int
        Version of the state that its records change; 0 where the header cannot be read.
    salt : bytes
        First bytes of each record.
    end, size : int
        Ends of the last whole record and of the file, in bytes.
    problem : str or None
        Why the file does not end with a whole record.
    torn : bool
        Whether that looks like an unfinished write: no whole record follows.
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
        """True if the file ends before its last record does, which damage alone does not cause."""
        return self.problem is not None and self.problem.endswith(_SHORT)


def scan(path: Path) -> Scan:
    """Read a segment and check every checksum in it.

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
            found = _read_record(file, size - end, salt, sequence)
            if isinstance(found, str):
                torn = not _any_whole(file, end, size, salt)
                return Scan(path, first, sequence, state_version, salt, end, size, found, torn)
            end, sequence = file.tell(), sequence + 1
    return Scan(path, first, sequence, state_version, salt, end, size)


def version_of(path: Path) -> int:
    """Return the state version in the header of a segment; 0 where the header cannot be read."""
    with path.open("rb") as file:
        head = file.read(HEADER_BYTES)
    if len(head) < HEADER_BYTES or crc32(head[: HEADER.size]) != CRC.unpack_from(head, HEADER.size)[0]:
        return 0
    return int(HEADER.unpack_from(head)[2])


def read_records(found: Scan) -> Iterator[Record]:
    """Yield the whole records of a scanned segment, in order.

    Raises
    ------
    StoreError
        The file changed since.
    """
    with found.path.open("rb") as file:
        file.seek(HEADER_BYTES)
        for sequence in range(found.first, found.next):
            left = found.end - file.tell()
            record = _read_record(file, left, found.salt, sequence)
            if isinstance(record, str):
                raise StoreError(f"{found.path}: {record} at byte {found.end - left}, and it was whole a moment ago")
            yield record


def _read_record(file: BinaryIO, left: int, salt: bytes, sequence: int) -> Record | str:
    """Return the record that begins here, or its problem in words; ``left`` bytes of the file remain."""
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
    return Record(number, str(body[:kind_bytes], "utf-8"), body[kind_bytes:])


def _any_whole(file: BinaryIO, offset: int, size: int, salt: bytes) -> bool:
    """Return whether a record with a correct checksum begins at the offset or behind it."""
    file.seek(offset)
    rest = file.read()
    at = rest.find(salt)
    while at >= 0:
        if len(rest) - at >= RECORD.size:
            file.seek(offset + at)
            number = RECORD.unpack_from(rest, at)[1]
            if isinstance(_read_record(file, size - offset - at, salt, number), Record):
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
    """Write all parts one after another, in as many calls as needed; raises OSError when the disk refuses."""
    left = [memoryview(part) for part in parts if len(memoryview(part))]
    while left:
        written = os.writev(fd, left)
        if not written:
            raise OSError(errno.EIO, "nothing was written")
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if left:
            left[0] = left[0][written:]


def reason(error: OSError) -> str:
    """Return the reason of a system error in words; a full disk is named as such."""
    if error.errno == errno.EFBIG:
        return "the file may not grow further (limit on the size of files)"
    return "the disk is full" if error.errno in FULL_DISK else error.strerror or str(error)
