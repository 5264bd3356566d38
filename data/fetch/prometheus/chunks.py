"""Decodes what is dense in an answer of remote read: XOR chunks, plain samples and the checksum of a frame.

XOR chunks are Prometheus' form of the Gorilla compression (Pelkonen et al., VLDB 2015): the second difference of times,
and the exclusive or of neighbouring values.
"""

from __future__ import annotations

from typing import Any, Final

import numba
import numpy as np
from numpy.typing import NDArray

from reclaim.data.core.jit import CACHED
from reclaim.data.fetch.prometheus.protobuf import MalformedError

XOR: Final = 1
"""Encoding of a chunk of floats."""
_CASTAGNOLI: Final = 0x82F63B78


def _table() -> NDArray[np.uint32]:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, table >> 1 ^ np.uint32(_CASTAGNOLI), table >> 1).astype(np.uint32)
    return table


_TABLE: Final = _table()


def crc32c(content: NDArray[np.uint8]) -> int:
    """Return the Castagnoli checksum of bytes."""
    return int(_crc32c(content, _TABLE))


@numba.njit(**CACHED)
def _crc32c(content: Any, table: Any) -> Any:
    crc = np.uint32(0xFFFFFFFF)
    for k in range(len(content)):
        crc = table[(crc ^ content[k]) & np.uint32(0xFF)] ^ (crc >> np.uint32(8))
    return crc ^ np.uint32(0xFFFFFFFF)


def decode_xor(content: NDArray[np.uint8]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return times (ms) and values of a chunk; MalformedError where it breaks off."""
    if len(content) < 2:
        raise MalformedError("a chunk is cut short")
    count = int(content[0]) << 8 | int(content[1])
    if count > 8 * len(content):  # a sample takes two bits at least
        raise MalformedError("a chunk is shorter than its samples")
    time, value = np.empty(count, np.int64), np.empty(count, np.uint64)
    if not _decode_xor(content, time, value):
        raise MalformedError("a chunk is cut short")
    return time, value.view(np.float64)


@numba.njit(**CACHED)
def _bits(content: Any, at: Any, count: Any) -> Any:
    """Return ``count`` bits from bit ``at`` on, as uint64; the caller sees to it that they are there."""
    out = np.uint64(0)
    while count > 0:
        left = 8 - (at & 7)
        take = min(left, count)
        byte = np.uint64(content[at >> 3])
        part = (byte >> np.uint64(left - take)) & np.uint64((1 << take) - 1)
        out = (out << np.uint64(take)) | part
        at += take
        count -= take
    return out


@numba.njit(**CACHED)
def _varint(content: Any, at: Any) -> Any:
    """Return the varint at a byte as uint64, and the byte after it; -1 where it is cut short."""
    value, shift = np.uint64(0), 0
    while at < len(content) and shift < 64:
        byte = content[at]
        at += 1
        value |= np.uint64(byte & 0x7F) << np.uint64(shift)
        if byte < 0x80:
            return value, at
        shift += 7
    return value, -1


@numba.njit(**CACHED)
def _decode_xor(
    content: Any,  # (n_bytes,) uint8
    time: Any,  # (n,) int64; written to
    value: Any,  # (n,) uint64; written to
) -> Any:
    """Decode a chunk; return whether it was whole."""
    total, at = len(content) * 8, 2
    if len(time) == 0:
        return True
    zigzag, at = _varint(content, at)
    if at < 0 or at + 8 > len(content):
        return False
    time[0] = np.int64(zigzag >> np.uint64(1)) ^ -np.int64(zigzag & np.uint64(1))
    value[0] = _bits(content, at * 8, 64)
    at += 8
    if len(time) == 1:
        return True
    delta_u, at = _varint(content, at)
    if at < 0:
        return False
    delta, place = np.int64(delta_u), at * 8
    lead: Any = np.int64(0)
    trail: Any = np.int64(0)
    time[1] = time[0] + delta
    for k in range(1, len(time)):
        if k > 1:
            size = 0
            while size < 4:
                if place >= total:
                    return False
                place += 1
                if _bits(content, place - 1, 1) == 0:
                    break
                size += 1
            width = 0 if size == 0 else 14 if size == 1 else 17 if size == 2 else 20 if size == 3 else 64
            if place + width > total:
                return False
            change = np.int64(_bits(content, place, width))
            place += width
            if 0 < width < 64 and change > np.int64(1) << (width - 1):
                change -= np.int64(1) << width
            delta += change
            time[k] = time[k - 1] + delta
        if place >= total:
            return False
        place += 1
        if _bits(content, place - 1, 1) == 0:
            value[k] = value[k - 1]
            continue
        if place >= total:
            return False
        place += 1
        if _bits(content, place - 1, 1) == 1:
            if place + 11 > total:
                return False
            lead, used = np.int64(_bits(content, place, 5)), np.int64(_bits(content, place + 5, 6))
            trail = np.int64(64) - lead - (used if used > 0 else np.int64(64))
            place += 11
        width = 64 - lead - trail
        if trail < 0 or place + width > total:
            return False
        value[k] = value[k - 1] ^ (_bits(content, place, width) << np.uint64(trail))
        place += width
    return True


def decode_samples(series: NDArray[np.uint8]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return times (ms) and values of the samples in a ``TimeSeries`` message; MalformedError where it breaks off."""
    most = len(series) // 2  # of a sample whose time and value are zero, the tag and the length are left
    time, value = np.empty(most, np.int64), np.empty(most, np.uint64)
    count = _decode_samples(series, time, value)
    if count < 0:
        raise MalformedError("a series is cut short")
    return time[:count].copy(), value[:count].view(np.float64).copy()


@numba.njit(**CACHED)
def _decode_samples(series: Any, time: Any, value: Any) -> Any:
    """Write the samples of a series, field 2 of it, and return their number; -1 where it is cut short."""
    at = count = 0
    while at < len(series):
        tag, at = _varint(series, at)
        if at < 0 or tag & np.uint64(7) != np.uint64(2):
            return -1
        length, at = _varint(series, at)
        if at < 0 or length > np.uint64(len(series) - at):
            return -1
        end = at + np.int64(length)
        if tag >> np.uint64(3) != np.uint64(2):
            at = end
            continue
        time[count], value[count] = 0, np.uint64(0)  # proto3 leaves out what is zero
        while at < end:
            inner, at = _varint(series, at)
            if at < 0:
                return -1
            if inner == np.uint64(9):  # field 1, eight bytes, the least significant one first
                if at + 8 > end:
                    return -1
                for k in range(8):
                    value[count] |= np.uint64(series[at + k]) << np.uint64(8 * k)
                at += 8
            elif inner == np.uint64(16):  # field 2, varint
                moment, at = _varint(series, at)
                if at < 0 or at > end:
                    return -1
                time[count] = np.int64(moment)
            else:
                return -1
        count += 1
    return count
