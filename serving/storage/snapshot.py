"""Writes and reads snapshots: named arrays and a few facts in a folder, each file with a checksum."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import numpy as np
from isal.isal_zlib import crc32
from numpy.typing import NDArray

from reclaim.data.core.arrays import blank_records
from reclaim.data.core.files import discard_folder, partial_of, recover_folder, replace_folder, retired_of, sync_folder
from reclaim.data.errors import StoreError
from reclaim.serving.storage.log_format import FORMAT, reason

_MANIFEST: Final = "manifest.json"
_ENVELOPE: Final = '{{"crc32": "{:08x}", "content": {}}}\n'
"""The manifest and its own checksum, which is the same in every format."""
_CONTENT_AT: Final = len(_ENVELOPE.format(0, "")) - len("}\n")
_CHUNK_BYTES: Final = 4 * 2**20
"""Bytes written, or read, at a time."""
_HEAD_BYTES: Final = 2**16
"""Bytes in which the type and the shape of an array are, at most; numpy reads no more than 10,000."""


class DamagedError(StoreError):
    """A snapshot differs from what was written."""


@dataclass(frozen=True)
class Manifest:
    """Description of a snapshot.

    Attributes
    ----------
    state_version : int
        Version of the state that the arrays hold.
    sequence : int
        Number of the last record in it; 0 before the first.
    followed : bool
        Whether a segment of the log begins right behind that record.
    arrays : dict
        File, bytes, crc32, dtype and shape of each array.
    facts : dict
        Saved with the arrays.
    """

    state_version: int
    sequence: int
    followed: bool
    arrays: dict[str, dict[str, Any]]
    facts: dict[str, Any]

    @property
    def bytes(self) -> int:
        """Bytes of all arrays on the disk."""
        return sum(entry["bytes"] for entry in self.arrays.values())


def snapshot_name(sequence: int) -> str:
    """Return the name of the folder of a snapshot."""
    return f"snapshot-{sequence:020d}"


def snapshots(folder: Path) -> list[Path]:
    """Return the snapshots in a folder, the newest first."""
    return sorted((p for p in folder.iterdir() if re.fullmatch(r"snapshot-\d{20}", p.name)), reverse=True)


def write_snapshot(folder: Path, manifest: Manifest, arrays: Mapping[str, NDArray[Any]]) -> Manifest:
    """Write a snapshot, read it back, then give it its name; it is durable on return.

    It replaces one of the same name. Contiguous arrays are written without a copy in memory.

    Parameters
    ----------
    folder : Path
        Folder of the snapshots.
    manifest : Manifest
        Its description without the arrays.
    arrays : mapping of str to array
        Of any type but objects; structured ones too.

    Raises
    ------
    StoreError
        It cannot be written, or does not read back as written; nothing is left of it.
    """
    target = folder / snapshot_name(manifest.sequence)
    partial = partial_of(target)
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(mode=0o700)
        entries = {name: _write_array(partial, name, array) for name, array in arrays.items()}
        content = json.dumps({"format": FORMAT, **vars(manifest), "arrays": entries})
        with _ChecksummedFile(partial / _MANIFEST) as file:
            file.write(_ENVELOPE.format(crc32(content.encode()), content).encode())
        sync_folder(partial)
        written = read_manifest(partial)
        check_arrays(partial, written)
        replace_folder(partial, target, durable=True)
    except (OSError, ValueError, DamagedError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        why = reason(error) if isinstance(error, OSError) else str(error)
        raise StoreError(f"{target}: cannot write the snapshot: {why}") from error
    return written


def read_manifest(snapshot: Path) -> Manifest:
    """Return the description of a snapshot.

    Raises
    ------
    DamagedError
        Its checksum is wrong, or the file is missing.
    StoreError
        Another format than this code's.
    """
    said = _content(snapshot)
    layout = said.pop("format")
    if layout != FORMAT:
        raise StoreError(f"{snapshot} has format {layout}, this code knows {FORMAT}: use the code that wrote it")
    return Manifest(**said)


def version_of(snapshot: Path) -> int:
    """Return the state version of a snapshot of any format; 0 where its description is damaged."""
    try:
        return int(_content(snapshot)["state_version"])
    except DamagedError:
        return 0


def _content(snapshot: Path) -> dict[str, Any]:
    with _reading(snapshot / _MANIFEST):
        raw = (snapshot / _MANIFEST).read_bytes()
    content = raw[_CONTENT_AT:-2]
    if raw != _ENVELOPE.format(crc32(content), content.decode(errors="replace")).encode():
        raise DamagedError(f"{snapshot.name}/{_MANIFEST} has a wrong checksum")
    said: dict[str, Any] = json.loads(content)
    return said


def check_arrays(snapshot: Path, manifest: Manifest) -> None:
    """Compare every array's file with the manifest.

    Raises
    ------
    DamagedError
        One is missing, has another length or another checksum.
    """
    chunk = memoryview(bytearray(_CHUNK_BYTES))
    for entry in manifest.arrays.values():
        _check(snapshot, entry, lambda _: chunk)


def load_arrays(snapshot: Path, manifest: Manifest) -> dict[str, NDArray[Any]]:
    """Return the arrays of a snapshot, checked.

    Raises
    ------
    DamagedError
        As ``check_arrays``; or an array's type or shape is not what the manifest says.
    """
    return {name: _read_array(snapshot, entry) for name, entry in manifest.arrays.items()}


def recover_replaced(folder: Path) -> None:
    """Restore a snapshot whose replacement was never finished; remove unfinished files and folders."""
    for retired in folder.glob(retired_of(folder / "snapshot-*").name):
        recover_folder(retired.with_name(retired.name.split(".")[0]))
    for partial in folder.glob("*.partial"):
        shutil.rmtree(partial) if partial.is_dir() else partial.unlink()


def drop_snapshot(snapshot: Path) -> None:
    """Delete a snapshot; it loses its name first."""
    discard_folder(snapshot, partial_of(snapshot))


class _ChecksummedFile:
    """A new file with a running checksum; durable once it is closed without an error."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("xb", buffering=0)
        self.bytes = self.crc32 = 0

    def write(self, data: bytes | memoryview) -> None:
        left = memoryview(data)
        self.crc32 = crc32(left, self.crc32)
        self.bytes += len(left)
        while left:
            left = left[self._file.write(left) :]

    def __enter__(self) -> _ChecksummedFile:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        with self._file as file:
            if kind is None:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # read back from the disk itself


def _write_array(folder: Path, name: str, array: NDArray[Any]) -> dict[str, Any]:
    file_name = quote(name, safe="") + ".npy"
    if array.dtype.hasobject:
        raise ValueError(f"array {name!r} holds Python objects")
    flat = array.T if array.flags.f_contiguous and not array.flags.c_contiguous else np.ascontiguousarray(array)
    with _ChecksummedFile(folder / file_name) as file:
        np.lib.format.write_array_header_2_0(file, np.lib.format.header_data_from_array_1_0(array))
        raw = np.frombuffer(flat, np.uint8).data
        for at in range(0, len(raw), _CHUNK_BYTES):
            file.write(raw[at : at + _CHUNK_BYTES])
    kind = np.lib.format.descr_to_dtype(np.lib.format.dtype_to_descr(array.dtype))  # as read back
    return {
        "file": file_name, "bytes": file.bytes, "crc32": file.crc32, "dtype": repr(kind), "shape": list(array.shape)
    }  # fmt: skip


def _check(snapshot: Path, entry: dict[str, Any], room: Callable[[int], memoryview]) -> None:
    """Read an array's file in chunks, each into the buffer behind the one before; compare it with the manifest."""
    path = snapshot / entry["file"]
    size = checksum = 0
    with _reading(path), path.open("rb", buffering=0) as file:
        while size <= entry["bytes"] and (count := file.readinto(chunk := room(size))):
            checksum = crc32(chunk[:count], checksum)
            size += count
    if (size, checksum) != (entry["bytes"], entry["crc32"]):
        raise DamagedError(f"{snapshot.name}/{path.name} has a wrong length or checksum")


def _read_array(snapshot: Path, entry: dict[str, Any]) -> NDArray[Any]:
    """Return an array in the memory that its file was read into, once."""
    content = blank_records((entry["bytes"] + 1,), np.dtype(np.uint8))  # a byte more shows a file that is too long
    _check(snapshot, entry, lambda at: content.data[at : at + _CHUNK_BYTES])
    head = BytesIO(content[:_HEAD_BYTES].tobytes())
    np.lib.format.read_magic(head)
    shape, by_column, dtype = np.lib.format.read_array_header_2_0(head)
    if (repr(dtype), list(shape)) != (entry["dtype"], entry["shape"]):
        raise DamagedError(f"{snapshot.name}/{entry['file']} has another type or shape than the manifest says")
    values = content[head.tell() : entry["bytes"]].view(dtype)
    return values.reshape(shape, order="F" if by_column else "C")


@contextlib.contextmanager
def _reading(path: Path) -> Any:
    """Report a file that is missing or unreadable as damaged; other errors are not due to the snapshot."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.EIO):
            raise
        raise DamagedError(f"{path.parent.name}/{path.name}: {reason(error)}") from error
